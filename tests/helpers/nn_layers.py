"""Layers of jitgemm.nn, their weights and inputs."""

from __future__ import annotations

import copy
import functools

import builders
import pytest
import torch

from jitgemm.nn import ACTIVATIONS, PackedLinear, W4A8Linear, W8A8Linear
from jitgemm.weight.pack import pack_w4, pack_w8
from jitgemm.weight.packed import W4Weight, W8Weight

K, N = 256, 72
CODES = {name: torch.float8_e4m3fn if name.startswith("e4m3") else torch.int8 for name in ACTIVATIONS}


def linear(seed: int = 1, k: int = K, n: int = N, bias: bool = True, dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Linear(k, n, bias=bias).to(dtype)


def inputs(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=builders.generator(seed)).to(dtype)


def permuted_weight(seed: int = 5, n: int = N, k: int = K, within: int = 1) -> W4Weight:
    """Act-order whose columns stay within as many equal parts of k."""
    parts, g = builders.weight_parts(seed, n, k, 64, zero_point=True), builders.generator(seed)
    permutation = torch.cat([torch.randperm(k // within, generator=g) + i * k // within for i in range(within)])
    return pack_w4(parts.q, parts.scale, parts.zero, permutation=permutation, group_size=64, k=k)


def offset_weight(seed: int = 6, n: int = N, k: int = K) -> W4Weight:
    parts = builders.weight_parts(seed, n, k, 32)
    return pack_w4(parts.q, parts.scale, offset=parts.scale * 0.7, group_size=32)


def permuted_w8(seed: int = 7) -> W8Weight:
    g = builders.generator(seed)
    q = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
    weight = pack_w8(q, torch.rand((N, K // 64), generator=g).bfloat16() / 99)
    permutation = torch.randperm(K, generator=g).int()
    return weight.with_tensors(weight.blocks, weight.channel_scale, weight.row_sum, permutation)


MAKERS = {
    **{a: functools.partial(W4A8Linear.from_linear, linear(), activation=a) for a in ACTIVATIONS},
    "zero points": lambda: W4A8Linear.from_linear(linear(bias=False), group_size=32, symmetric=False),
    "per channel": lambda: W4A8Linear.from_linear(linear(), activation="int8", group_size=K, scale_dtype=torch.float32),
    "fp16 scales": lambda: W4A8Linear.from_linear(linear(dtype=torch.float16), scale_dtype=torch.float16),
    "no code of -8": lambda: W4A8Linear.from_linear(linear(), full_range=False),
    "permutation": lambda: W4A8Linear.from_weight(permuted_weight(), activation="int8_affine"),
    "offset": lambda: W4A8Linear.from_weight(offset_weight(), builders.bias(1, N), activation="int8"),
    "static": lambda: W4A8Linear.from_weight(permuted_weight(), input_scale=torch.tensor([0.01])),
    **{f"w8 {a}": functools.partial(W8A8Linear.from_linear, linear(), activation=a) for a in ACTIVATIONS},
    "w8 block": lambda: W8A8Linear.from_linear(linear(bias=False), activation="e4m3_block", block=128),
    "w8 static": lambda: W8A8Linear.from_weight(permuted_w8(), input_scale=torch.tensor([0.01]), activation="int8"),
    "rotated": lambda: W4A8Linear.from_linear(linear(), activation="int8", group_size=128, rotation=128),
    "rotated, w8": lambda: W8A8Linear.from_linear(linear(), activation="e4m3", rotation=128),
}
"""One of every kind of buffers."""


@functools.cache
def prototype(kind: str) -> PackedLinear:
    return MAKERS[kind]()


def layer_of(kind: str) -> W4A8Linear:
    return copy.deepcopy(prototype(kind))


@pytest.fixture(params=MAKERS)
def layer(request) -> W4A8Linear:
    return layer_of(request.param)


def scheme_of(layer: PackedLinear) -> str:
    if layer.input_scale is not None:
        return "tensor"
    return "block" if layer.activation.endswith("_block") else "token"


def requested(when: str = "current") -> int:
    """Bytes asked of the GPU's allocator; a block that it hands out may be larger by up to 1 MiB."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]
