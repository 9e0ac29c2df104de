"""8-bit weights on a GPU, by seed."""

from __future__ import annotations

from functools import lru_cache

import builders
import torch
from builders import PER_CHANNEL

import jitgemm
from jitgemm.dtypes import torch_dtype

BLOCK = -1
"""As a group size: a scale per block of 128 x 128."""


@lru_cache(maxsize=24)
def weight(n: int, k: int, codes: str, group: int = PER_CHANNEL, scale: str = "fp32", scales: str = "plain", seed=1):
    if group == BLOCK:
        parts = builders.weight_parts(seed, n, k, PER_CHANNEL, codes=codes, bits=8, device="cuda")
        block = torch.rand((n + 127) // 128, (k + 127) // 128, device="cuda") * 0.01 + 0.001
        return jitgemm.pack_w8(parts.q, block.to(torch_dtype(scale)))
    return builders.weight_parts(
        seed, n, k, group, scale_type=scale, scales=scales, codes=codes, bits=8, device="cuda"
    ).packed


def experts_of(count: int, n: int, k: int, lhs: str, group: int) -> jitgemm.W8Weight:
    return jitgemm.W8Weight.stacked(count, lambda e: weight(n, k, lhs, group, seed=e))
