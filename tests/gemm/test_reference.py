"""The reference against exact rational arithmetic, and its rounding against the definition of round to nearest even."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import builders
import pytest
import torch

from jitgemm.gemm import exact as exact_gemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.exact import round_fp64
from jitgemm.gemm.reference import gemm_w4a8_reference


def exact(lhs: tuple, weight, **rest) -> torch.Tensor:
    return gemm_w4a8_reference(lhs, weight, out_dtype=torch.float64, **rest)


def rational_gemm(
    lhs: tuple, parts: builders.WeightParts, bias: torch.Tensor
) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """The definition in exact arithmetic: result, and sum of |terms| to measure fp64's rounding by.

    A term is a group's scaled sum, a group's offset times its sum of activations, or x_zero times the row's sum of
    weights for int8; the two products of each k for e4m3.
    """
    x, x_scale, x_zero = (*lhs, None)[:3]
    m, k = x.shape
    xs = [[Fraction(v) for v in row] for row in x.double().tolist()]
    q = parts.q.tolist()
    scale = [[Fraction(v) for v in row] for row in parts.scale.double().tolist()]
    zero = [[0] * len(scale[0])] * len(q) if parts.zero is None else parts.zero.tolist()
    tokens = [Fraction(v) for v in x_scale.double().expand(m, 1).flatten().tolist()]
    token_zeros = [0] * m if x_zero is None else x_zero.expand(m, 1).flatten().tolist()
    none = torch.zeros_like(parts.scale) if parts.offset is None else parts.offset
    offset = [[Fraction(v) for v in row] for row in none.double().tolist()]
    out, size = [], []
    for i in range(m):
        out.append([])
        size.append([])
        for j in range(len(q)):
            groups, added = [Fraction(0)] * len(scale[0]), [Fraction(0)] * len(scale[0])
            terms, row_sum = Fraction(0), Fraction(0)
            for column in range(k):
                g = column // parts.group_size
                weight = (q[j][column] - zero[j][g]) * scale[j][g]
                row_sum += weight + offset[j][g]
                groups[g] += xs[i][column] * weight
                added[g] += xs[i][column] * offset[j][g]
                terms += abs(xs[i][column] * weight) + abs(xs[i][column] * offset[j][g])
            if x.dtype == torch.int8:
                terms = sum(map(abs, groups)) + sum(map(abs, added)) + abs(token_zeros[i] * row_sum)
            added_bias = Fraction(bias[j].item())
            out[-1].append((sum(groups) + sum(added) - token_zeros[i] * row_sum) * tokens[i] + added_bias)
            size[-1].append(terms * abs(tokens[i]) + abs(added_bias))
    return out, size


FORMS = [
    (32, False, "fp32", False), (64, True, "bf16", False), (128, False, "fp16", False), (256, True, "fp32", False),
    (0, True, "bf16", False), (32, True, "bf16", True), (64, False, "fp32", True), (128, False, "bf16", True),
    (256, True, "fp16", True),
]  # fmt: skip


@pytest.mark.parametrize(
    "form, tokens, kind", builders.two_thirds(FORMS, [("zero", True), ("positive", False)], ["e4m3", "s8", "affine"])
)
def test_it_agrees_with_exact_arithmetic(form, tokens, kind):
    (group_size, zero_point, scale_type, offset), (mean, per_token) = form, tokens
    bias = builders.bias(3, 8)
    parts = builders.weight_parts(
        1, 8, 272, group_size, zero_point=zero_point, scale_type=scale_type, scales="negative" if offset else "mixed",
        offset=offset,
    )  # fmt: skip
    if kind == "affine":
        lhs = builders.affine_lhs(2, 3, 272, mean=mean, per_token=per_token)
    else:
        lhs = builders.lhs(2, 3, 272, kind, mean=mean, per_token=per_token)
    ref = exact(lhs, parts.packed, bias=bias)
    rational, terms = rational_gemm(lhs, parts, bias)
    assert ref.dtype == torch.float64 and ref.shape == (3, 8)
    for i, j in itertools.product(range(3), range(8)):
        # the number of operations times half an ulp of fp64, of what was added up
        assert abs(Fraction(ref[i, j].item()) - rational[i][j]) <= terms[i][j] * Fraction(300, 2**53)


def test_int8_group_sums_are_exact_at_their_largest():
    """-128 * (0 - 16) over k = 16384, and one that differs in the last place."""
    k = 16384
    q = torch.zeros((8, k), dtype=torch.uint8)
    q[1, -1] = 1
    zero = torch.full((8, 1), 16, dtype=torch.uint8)
    weight = builders.WeightParts(q, torch.ones((8, 1)), zero, k).packed
    x = torch.full((1, k), -128, dtype=torch.int8)
    out = gemm_w4a8_reference((x, torch.ones(1)), weight, out_dtype=torch.float64)
    assert out[0, 0].item() == 128 * 16 * k
    assert out[0, 1].item() == 128 * 16 * k - 128


def test_a_group_that_cancels_leaves_nothing_behind():
    """int8 sums are integers per group: a huge scale on a group that sums to zero must not hide a tiny one."""
    q = torch.ones((8, 64), dtype=torch.int8)
    scale = torch.tensor([[1e30, 1e-30]]).expand(8, 2)
    x = torch.ones((1, 64), dtype=torch.int8)
    x[0, :32:2] = -1
    weight = builders.WeightParts(q, scale, None, 32).packed
    ref = exact((x, torch.ones(1)), weight)
    assert torch.equal(ref, torch.full((1, 8), 32 * scale[0, 1].double().item(), dtype=torch.float64))


@pytest.mark.parametrize("kind", ["e4m3", "s8", "affine"])
@pytest.mark.parametrize("group_size, zero_point, scale_type, offset", FORMS[1::2])
def test_tiles_do_not_change_the_result(monkeypatch, kind, group_size, zero_point, scale_type, offset):
    parts = builders.weight_parts(3, 200, 416, group_size, zero_point=zero_point, scale_type=scale_type, offset=offset)
    lhs = builders.affine_lhs(4, 9, 416) if kind == "affine" else builders.lhs(4, 9, 416, kind)
    bias = builders.bias(5, 200)
    whole = exact(lhs, parts.packed, bias=bias)
    monkeypatch.setattr(exact_gemm, "_BUDGET", 2048)
    tiled = exact(lhs, parts.packed, bias=bias)
    assert torch.allclose(whole, tiled, rtol=1e-12, atol=1e-12 * float(whole.abs().max()))


def test_the_order_of_codes_does_not_change_the_result():
    for dtype in builders.LHS_DTYPES:
        parts = builders.weight_parts(6, 72, 528, 64, codes=dtype, offset=True)
        lhs = builders.lhs(7, 5, 528, dtype)
        both = replace(parts, lhs_dtype=None).packed
        assert (parts.packed.format.order, both.format.order) == (dtype, "any")
        assert torch.equal(exact(lhs, parts.packed), exact(lhs, both))


def test_a_permuted_weight_meets_permuted_activations():
    """Column j of the packed weight is column permutation[j] of the layer's input."""
    plain = builders.weight_parts(6, 72, 528, 528)
    order = torch.randperm(528, generator=builders.generator(6))
    permuted = replace(plain, q=plain.q[:, order], permutation=order).packed
    x, x_scale = builders.lhs(7, 5, 528, "s8")
    expected = gemm_w4a8_reference((x, x_scale), plain.packed)
    assert builders.same_bits(gemm_w4a8_reference((x[:, permuted.permutation], x_scale), permuted), expected)


@pytest.mark.parametrize("zero", [-128, 0, 127, 1 << 20])
def test_one_scale_or_zero_point_serves_all_tokens_and_forms_agree(zero):
    weight = builders.weight_parts(9, 8, 96, 32, offset=True).packed
    (x, x_scale), x_zero = builders.lhs(10, 4, 96, "s8"), torch.full((4,), zero, dtype=torch.int32)
    expected = exact((x, x_scale, x_zero), weight)
    for form in (x_zero[:, None], x_zero[:1], x_zero[0], x_zero[:1].expand(4)):
        assert torch.equal(exact((x, x_scale.flatten(), form), weight), expected)
    assert torch.equal(expected, exact((x, x_scale), weight)) == (zero == 0)
    one = exact((x, x_scale[2], x_zero), weight)
    assert torch.equal(one[2], expected[2])
    for form in (x_scale[2, 0], x_scale[2].expand(4)):
        assert torch.equal(exact((x, form, x_zero), weight), one)


# --- rounding ---


def nearest_even(x: float, dtype: torch.dtype) -> float:
    """The definition, with fractions: precision and exponents of bf16 or fp16."""
    precision, least, most = (8, -126, 127) if dtype == torch.bfloat16 else (11, -14, 15)
    if x == 0 or not math.isfinite(x):
        return x
    exponent = max(math.frexp(x)[1] - 1, least)
    ulp = Fraction(2) ** (exponent - precision + 1)
    rounded = round(Fraction(x) / ulp) * ulp  # Python rounds halves to even
    if abs(rounded) >= Fraction(2) ** (most + 1):
        return math.copysign(math.inf, x)
    return math.copysign(float(rounded), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even_near_every_tie(dtype):
    """Midpoints between neighbours and the doubles beside them: a rounding by way of fp32 gets these wrong."""
    bits = torch.arange(0, 0x7F80 if dtype == torch.bfloat16 else 0x7C00, 37, dtype=torch.int16)
    low = bits.view(dtype).double()
    high = (bits + 1).view(dtype).double()
    high = torch.where(high.isinf(), low + (low - (bits - 1).view(dtype).double()), high)
    middle = (low + high) / 2
    near = [middle, *(torch.nextafter(middle, end) for end in (low, high))]
    x = torch.cat([*near, middle * (1 + 2.0**-40), middle * (1 - 2.0**-30), low])
    x = torch.cat([x, -x])
    expected = torch.tensor([nearest_even(v, dtype) for v in x.tolist()], dtype=torch.float64)
    assert builders.same_bits(round_fp64(x, dtype).double(), expected)
    assert not builders.same_bits(x.to(torch.float32).to(dtype).double(), expected)


def test_rounding_of_what_is_not_finite():
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1e300, -1e300, -1e-300, 0.0, -0.0], dtype=torch.float64)
    got = round_fp64(x, torch.bfloat16)
    assert got[:2].isnan().all()
    assert got[2:6].tolist() == [math.inf, -math.inf, math.inf, -math.inf]
    assert got[6:].tolist() == [0.0] * 3 and torch.signbit(got[6:]).tolist() == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("affine", [False, True])
def test_a_gpu_gives_the_same_reference_and_bound_with_offsets_and_zero_points(affine):
    results = []
    for device in ("cpu", "cuda"):
        weight = builders.weight_parts(11, 136, 528, 64, zero_point=True, offset=True, device=device).packed
        lhs = builders.affine_lhs(12, 17, 528, device=device) if affine else builders.lhs(12, 17, 528, device=device)
        results.append([t.cpu() for t in gemm_w4a8_bound(lhs, weight)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12 * float(results[0][0].abs().max()))
