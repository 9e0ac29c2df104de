"""Small models and layers that ranks divide among themselves."""

from __future__ import annotations

import functools
from dataclasses import replace

import builders
import ranks
import torch._dynamo
from nn_experts import experts, routed
from nn_layers import offset_weight, permuted_weight

from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.nn import ACTIVATIONS, PackedExperts, PackedLinear, W4A8Linear, W8A8Experts, W8A8Linear
from jitgemm.nn.layers.packed import LHS_DTYPES
from jitgemm.nn.parallel import ColwiseParallel, RowwiseParallel
from jitgemm.weight.quantize import quantize_w8

N, K, M = 128, 512, 5


def linear(n: int = N, k: int = K, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(n + k)
    return torch.nn.Linear(k, n, bias=bias)


def permuted(n: int = N, k: int = K, within: int = 1) -> PackedLinear:
    return W4A8Linear(permuted_weight(3, n, k, within))


def offset(n: int = N, k: int = K) -> PackedLinear:
    return W4A8Linear(offset_weight(6, n, k), builders.bias(1, n), activation="int8")


quantised = functools.partial(W4A8Linear.from_linear, clip_steps=0)
LAYERS = {
    "e4m3, groups of 128": lambda: quantised(linear()),
    "int8, groups of 256": lambda: quantised(linear(k=1024), activation="int8", group_size=256),
    "int8, per channel": lambda: quantised(linear(), activation="int8", group_size=K),
    "zero points, affine": lambda: quantised(linear(), activation="int8_affine", group_size=32, symmetric=False),
    "offsets": offset,
    "by block": lambda: quantised(linear(), activation="int8_block"),
    "static": lambda: W4A8Linear(quantised(linear()).weight, linear().bias.detach(), input_scale=torch.tensor([0.02])),
    "8 bits": lambda: W8A8Linear.from_linear(linear()),
    "8 bits, int8 by block": lambda: W8A8Linear.from_linear(linear(256), activation="int8_block", block=128),
    "rows within strips": lambda: quantised(linear(n=144), activation="int8"),
    "columns within records": lambda: quantised(linear(k=320), activation="int8", group_size=32),
    "a group a rank": lambda: quantised(linear(k=256), activation="e4m3", group_size=128),
    "columns within groups": lambda: quantised(linear(k=384), activation="int8", group_size=128),
    "no bias": lambda: quantised(linear(bias=False)),
    "rotated": lambda: quantised(linear(n=144), activation="int8", rotation=128),
}


def x_of(layer: PackedLinear, dtype: torch.dtype = torch.bfloat16, *lead: int) -> torch.Tensor:
    x = torch.randn((*(lead or (M,)), layer.in_features), generator=builders.generator(9))
    return (x * torch.logspace(-1, 1, layer.in_features)).to(dtype)  # a rank's largest value is not the row's


def columns_of(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(ranks.WORLD, -1)[rank]


def apart(layer: PackedLinear, rank: int) -> PackedLinear:
    """The rank's part along k as a layer of its own, from codes and scales."""
    weight = layer.weight
    q, scale, zero = weight.unpack()
    whole = CanonicalWeight(
        q, scale, zero, weight.unpack().offset, weight.group_size, weight.permutation, code=weight.format.code
    )
    part = whole.shard("k", rank, ranks.WORLD).pack(LHS_DTYPES[layer.activation])
    weight = replace(part, rotation=weight.rotation)
    bias = layer.bias if rank == 0 else None
    return type(layer)(weight, bias, activation=layer.activation, input_scale=layer.input_scale)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = linear(K, N, False), linear(K, N, False), linear(N, K)
        torch.nn.init.normal_(self.up.weight)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = torch.nn.RMSNorm(N, eps=1e-6), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PLAN = {
    "layers.*.mlp.gate": ColwiseParallel,
    "layers.*.mlp.up": ColwiseParallel,
    "layers.*.mlp.down": RowwiseParallel,
}
EXPERTS = [*ACTIVATIONS, "8 bits"]


def of_rank(rank: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, ids, weights = routed(seed=5 + rank, tokens=tokens, dtype=dtype)
    ids[:2, 0], ids[3] = -1, 7  # a choice that is skipped, and a token without any
    ids[4] = torch.tensor([0, 1])  # one whose experts are all rank 0's
    return x, ids, weights


def layer_of_experts(kind: str) -> PackedExperts:
    if kind != "8 bits":
        return experts(activation=kind, bias=True)
    made = [torch.randn((4, *shape), generator=builders.generator(2)) / 8 for shape in ((192, 64), (64, 96))]
    return W8A8Experts(*(quantize_w8(weight, lhs_dtype=torch.int8) for weight in made), activation="int8")


def in_a_graph(layer: torch.nn.Module, *given: torch.Tensor, collectives: bool = False) -> torch.Tensor:
    """What a CUDA graph of the layer gives; called once more where it has collectives that no graph captures."""
    if collectives and not ranks.apart():
        return layer(*given)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*given)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return out
