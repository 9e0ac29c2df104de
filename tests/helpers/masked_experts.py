"""Tokens sorted by expert, and the layer of them by its definition."""

from __future__ import annotations

import builders
import torch
from moe_cases import Case, by_definition

from jitgemm.moe.masked import fused_experts_masked

COUNTS = (3, 0, 5, 1)


def sorted_tokens(case: Case, max_m: int, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """x [experts, max_m, k] with NaN in rows of nobody, and masked_m."""
    x = torch.full((case.experts, max_m, case.k), float("nan"), dtype=case.dtype)
    for e, count in enumerate(counts):
        x[e, :count] = torch.randn((count, case.k), generator=builders.generator(e)).to(case.dtype) * case.scale
    return x.to(case.device), torch.tensor(counts, dtype=torch.int32, device=case.device)


def called(case: Case, x, masked_m: torch.Tensor, **options) -> torch.Tensor:
    """The call's result, 7 in rows that it left alone."""
    tokens = x[0] if isinstance(x, tuple) else x
    out = torch.full((*tokens.shape[:2], case.n), 7.0, dtype=case.dtype, device=case.device)
    _, w13, w2, *_ = case.arguments
    fused_experts_masked(x, w13, w2, out, masked_m, 2, **case.options, **options)
    return out


def expected(case: Case, x: torch.Tensor) -> list[torch.Tensor]:
    """What each expert makes of its live rows, one token after the other."""
    found = []
    for e, count in enumerate(COUNTS):
        ids, ones = torch.full((count, 1), e), torch.ones(count, 1)
        found.append(by_definition(case, x=x[e, :count], topk_ids=ids, topk_weights=ones))
    return found
