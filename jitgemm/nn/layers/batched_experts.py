"""A layer's experts over tokens that an engine's dispatch sent sorted by expert."""

from __future__ import annotations

import torch

from jitgemm.gemm.problem import Lhs
from jitgemm.moe.masked import fused_experts_masked
from jitgemm.nn.layers.experts import PackedExperts


def run_batched(
    layer: PackedExperts, x: torch.Tensor | Lhs, out: torch.Tensor, masked_m: torch.Tensor, expected_m: float
) -> None:
    """`fused_experts_masked`: tokens neither weighed nor summed, into out."""
    w13, w2 = layer.w13, layer.w2
    fused_experts_masked(x, w13.weight, w2.weight, out, masked_m, expected_m, **layer.call_options(w13, w2))
