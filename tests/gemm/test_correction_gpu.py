"""Corrected weights on a GPU against the plain weight's, within both bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import builders
import pytest
import torch

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.formats import GROUP_SIZES
from jitgemm.weight.correction import with_sums

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:a weight has corrections:UserWarning")
@pytest.mark.parametrize(("kind", "group_size", "m"), builders.third(("zero", "offset"), GROUP_SIZES, (1, 64, 1500)))
def test_a_call_is_within_the_bound_as_the_plain_weight_s_is(kind, group_size, m):
    form = {"zero_point": True, "max_zero": 16} if kind == "zero" else {"offset": True}
    parts = builders.weight_parts(1, 520, 2080, group_size, codes="s8", device="cuda", **form)
    plain, weight = parts.packed, replace(parts, lhs_dtype=torch.int8, correction=True).packed
    x, scale, zero = builders.affine_lhs(2, m, 2080, device="cuda")
    wide, bias = with_sums(x, weight.correction), builders.bias(2, 520, device="cuda")
    rows = torch.arange(m, device="cuda")[:: max(1, m // 40)]
    few = x[rows], scale if scale.numel() == 1 else scale[rows], zero if zero.numel() == 1 else zero[rows]
    for dtype, sums in itertools.product((torch.bfloat16, torch.float32), ("f32", "exact")):
        out = torch.empty(m, 520, dtype=dtype, device="cuda")
        for lhs, each in ((x, plain.with_sums(sums)), (wide, weight.with_sums(sums))):
            out.fill_(torch.nan)
            jitgemm.gemm_w4a8_nt((lhs, scale, zero), each, out, bias=bias)
            ref, bound = gemm_w4a8_bound(few, each, bias=bias, out_dtype=dtype)
            assert bool(((out[rows].double() - ref).abs() <= bound).all())
    again = torch.empty_like(out)
    jitgemm.gemm_w4a8_nt((x, scale, zero), weight.with_sums("exact"), again, bias=bias)  # without sums
    assert torch.equal(again, out)
