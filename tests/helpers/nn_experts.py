"""Layers of experts of jitgemm.nn, and tokens with a routing."""

from __future__ import annotations

import functools

import builders
import torch

from jitgemm.nn import Gate, PackedExperts, W4A8Experts
from jitgemm.nn.layers.experts import packed_experts
from jitgemm.nn.layers.packed import LHS_DTYPES
from jitgemm.weight.pack import pack_w4
from jitgemm.weight.quantize import quantize_w4, quantize_w8

E, HIDDEN, INTER, TOKENS, TOP_K = 4, 64, 96, 9, 2
SILU = Gate()


def weight(seed: int, n: int, k: int, group_size: int = 32, **kind):
    parts = [builders.weight_parts(seed + e, n, k, group_size, **kind) for e in range(E)]
    stacked = {name: torch.stack([getattr(p, name) for p in parts]) for name in ("q", "scale")}
    zero = None if parts[0].zero is None else torch.stack([p.zero for p in parts])
    return pack_w4(**stacked, zero=zero, group_size=group_size, k=k)


def experts(gate: Gate = SILU, activation: str = "e4m3", bias: bool = False, **kind) -> W4A8Experts:
    biases = [builders.bias(7, E * 2 * INTER).view(E, -1), builders.bias(8, E * HIDDEN).view(E, -1)] if bias else []
    w13, w2 = weight(1, 2 * INTER, HIDDEN, **kind), weight(50, HIDDEN, INTER, **kind)
    return W4A8Experts(w13, w2, *biases, gate=gate, activation=activation)


def routed(seed: int = 1, tokens: int = TOKENS, count: int = E, dtype: torch.dtype = torch.float32):
    g = builders.generator(seed)
    x = torch.randn((tokens, HIDDEN), generator=g).to(dtype)
    ids = torch.stack([torch.randperm(count, generator=g)[:TOP_K] for _ in range(tokens)])
    return x, ids, torch.rand((tokens, TOP_K), generator=g)


def close(a: torch.Tensor, b: torch.Tensor, at_most: float = 0.02) -> bool:
    return float((a.double() - b.double()).norm() / b.double().norm()) < at_most


GATES = {
    "silu": Gate(),
    "gelu": Gate("gelu"),
    "gelu_tanh": Gate("gelu_tanh", "up_gate"),
    "limit": Gate(limit=0.5),
    "gpt-oss": Gate("swiglu_oai", "interleaved", 0.7, 1.702),
}


def experts_of_8_bits(activation: str, w13: int = 8, w2: int = 8, gate: Gate = SILU) -> PackedExperts:
    """Of these widths, and a scale for each row."""
    g = builders.generator(5)

    def made(bits: int, n: int, k: int):
        w = torch.randn((E, n, k), generator=g) / k**0.5
        dtype = LHS_DTYPES[activation]
        return quantize_w8(w, dtype) if bits == 8 else quantize_w4(w, 32, lhs_dtype=dtype, clip_steps=0)

    return packed_experts(made(w13, 2 * INTER, HIDDEN), made(w2, HIDDEN, INTER), gate=gate, activation=activation)


WIDTHS = ((8, 8), (4, 8), (8, 4), (4, 4))
"""Bits of w13 and of w2."""
LAYERS = {
    **{name: functools.partial(experts, gate, bias=name == "gpt-oss") for name, gate in GATES.items()},
    **{str(widths): lambda activation, of=widths: experts_of_8_bits(activation, *of) for widths in WIDTHS},
}
"""Of an activation: one of every gate, and of all pairs of widths."""
