"""Weights whose sums in f16 are near their bound, or near the largest that f16 holds."""

from __future__ import annotations

from dataclasses import replace

import builders
import mxfp4
import torch

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound

F16_TIERS = ("block", "group")
"""Of MXFP4, `mxfp4.TIERS`."""


def used(out: torch.Tensor, lhs: tuple, weight: jitgemm.W4Weight) -> float:
    """The largest error over the bound."""
    ref, limit = gemm_w4a8_bound(lhs, weight.with_f16_sums(), out_dtype=out.dtype)
    return float(((out.double() - ref).abs() / limit.clamp(min=1e-300)).nan_to_num(nan=torch.inf).max())


def extreme(seed: int, n: int, k: int, group_size: int, codes: str = "any", **form: bool) -> builders.WeightParts:
    """Rows whose scales go down to 2^-17 of their largest, rows of zeros, and rows whose codes are all the largest."""
    parts = builders.weight_parts(seed, n, k, group_size, codes=codes, scales="negative", **form)
    g = builders.generator(seed)
    size = torch.exp2(-torch.randint(0, 17, parts.scale.shape, generator=g).float())
    size[:, 0] = 1.0
    scale = torch.where(torch.arange(n)[:, None] % 2 > 0, torch.sign(parts.scale) * size * 1.9921875, parts.scale)
    scale[3::16] = 0
    q = parts.q.clone()
    q[5::16] = 7
    scale[5::16] = scale[5::16].abs()
    return replace(parts, q=q, scale=scale.bfloat16())


def largest_mx(seed: int, n: int, k: int, tier: str) -> mxfp4.Parts:
    """Sums of nearly all that f16 holds: codes of one sign, and scales that are as large as they may be."""
    codes = torch.full((n, k), 7, dtype=torch.uint8)
    scales = torch.full((n, k // 32), 110, dtype=torch.uint8)
    if tier == "group":
        scales[0, 0] = 93
    else:  # a record's limit is about 37,000, of 128 codes of at most 384
        codes[:, ::2] = 5
        scales[0, :4] = 95
    return mxfp4.Parts(codes, scales)
