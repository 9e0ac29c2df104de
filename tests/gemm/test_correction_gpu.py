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
KINDS = {"zero": dict(zero_point=True, max_zero=16), "offset": dict(offset=True)}


def pair(kind: str, group_size: int, n: int, k: int):
    parts = builders.weight_parts(1, n, k, group_size, codes="s8", device="cuda", **KINDS[kind])
    return parts.packed, replace(parts, lhs_dtype=torch.int8, correction=True).packed


@pytest.mark.filterwarnings("ignore:a weight has corrections:UserWarning")
@pytest.mark.parametrize(("kind", "group_size", "m"), builders.third(KINDS, GROUP_SIZES, (1, 7, 16, 64, 200, 1500)))
def test_a_call_is_within_the_bound_as_the_plain_weight_s_is(kind, group_size, m):
    plain, weight = pair(kind, group_size, 520, 2080)
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


@pytest.mark.parametrize("activation", ("int8", "int8_affine"))
@pytest.mark.parametrize("m", (1, 70))
@pytest.mark.parametrize(("kind", "group_size"), [("zero", 128), ("offset", 32)])
def test_a_linear_multiplies_what_its_quantiser_wrote(kind, group_size, m, activation):
    plain, weight = pair(kind, group_size, 520, 2080)
    x = torch.randn(m, 2080, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    layers = [jitgemm.nn.W4A8Linear(each, activation=activation) for each in (plain, weight)]
    lhs = layers[1].quantise(x)
    assert torch.equal(lhs[0], with_sums(layers[0].quantise(x)[0], weight.correction))
    ref, bound = gemm_w4a8_bound(lhs, weight)
    assert bool(((layers[1](x).double() - ref).abs() <= bound).all())
    _, bound = gemm_w4a8_bound((lhs[0][:, :2080], *lhs[1:]), plain)
    assert bool(((layers[0](x).double() - ref).abs() <= bound).all())
