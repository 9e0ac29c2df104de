"""Grouped GEMMs on a GPU between guard bytes, and what their results must be."""

from __future__ import annotations

import torch
from builders import same_bits
from guarded_calls import assert_right as assert_dense_right

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound

ROUTINGS = {
    "uniform": lambda e, g: [g.randint(0, 9) for _ in range(e)],
    "empty": lambda e, g: [0] * e,
    "one row": lambda e, g: [int(i == e // 2) for i in range(e)],
    "all to one": lambda e, g: [150 * int(i == e - 1) for i in range(e)],
    "skewed": lambda e, g: [int(200 / (1 + i)) for i in range(e)],
}


def offsets_of(counts, first=0, dtype=torch.int32):
    return torch.tensor(
        [first, *(first + sum(counts[: i + 1]) for i in range(len(counts)))], dtype=dtype, device="cuda"
    )


def guarded(rows, n, dtype=torch.bfloat16, seed=7):
    """out between rows and columns that nobody may touch."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    whole = torch.randn(rows + 6, n + 32, generator=g, device="cuda").to(dtype)
    return whole, whole[3 : rows + 3, 16 : n + 16]


def assert_right(lhs, weight, out, before, counts, first=0, bias=None, row_index=None):
    end = first
    for e, count in enumerate(counts):
        begin, end = end, end + count
        if not count:
            continue
        rows = torch.arange(begin, end, device="cuda") if row_index is None else row_index[begin:end].long()
        part = tuple(each if each.numel() == 1 else each[rows] for each in lhs)
        ref, bound = gemm_w4a8_bound(part, weight[e], bias=None if bias is None else bias[e], out_dtype=out.dtype)
        assert bool(((out[begin:end].double() - ref).abs() <= bound).all()), (e, count)
    assert same_bits(out[:first], before[:first]) and same_bits(out[end:], before[end:])


def assert_routing_right(
    lhs, weight, counts, *, bias=None, row_index=None, offsets_dtype=torch.int32, out_dtype=torch.bfloat16
):
    """A call with rows of nobody before and after: within the bound, and nothing else is written. Returns out."""
    rows, first = sum(counts) + 5, 2
    whole, out = guarded(rows, weight.n, out_dtype)
    kept, before = whole.clone(), out.clone()
    bits = 8 if isinstance(weight, jitgemm.W8Weight) else 4
    bf16 = "_bf16" * (out_dtype == torch.bfloat16)
    call = getattr(jitgemm, f"m_grouped_gemm_w{bits}a8{bf16}_nt_contiguous")
    call(lhs, weight, out, offsets_of(counts, first, offsets_dtype), bias=bias, row_index=row_index)
    assert_right(lhs, weight, out, before, counts, first, bias, row_index)
    result = out.clone()
    whole[3 : rows + 3, 16 : weight.n + 16] = before
    assert same_bits(whole, kept)
    return result


def assert_masked_right(lhs, weight, counts, expected_m, masked_m=None, has_rms=False):
    """x [experts, max_m, k]: the rows of each expert within the bound, the others as they were."""
    out = torch.full((*lhs[0].shape[:2], weight.n), 3.0, dtype=torch.bfloat16, device="cuda")
    masked_m = torch.tensor(counts if masked_m is None else masked_m, dtype=torch.int32, device="cuda")
    bits = 8 if isinstance(weight, jitgemm.W8Weight) else 4
    getattr(jitgemm, f"m_grouped_gemm_w{bits}a8_bf16_nt_masked")(lhs, weight, out, masked_m, expected_m)
    for e, count in enumerate(counts):
        assert bool((out[e, count:] == 3).all())
        if count:
            assert_dense_right(out[e, :count], tuple(each[e, :count] for each in lhs), weight[e], has_rms=has_rms)
