"""Quantising activations as specified: formulas, special values, checks, the op, and which kernels there are.

Results here are the CPU's; the kernels are held against them in test_quantize_gpu.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial

import builders
import prepared_calls
import pytest
import torch
import torch._dynamo.testing
from quantize_cases import MODES, X_DTYPES, activations, assert_same_bits, given, parameters

from jitgemm.activations import call
from jitgemm.activations import run as run_module
from jitgemm.activations.call import quantize_activations
from jitgemm.activations.kernel import (
    QuantizeSpec,
    block_dims,
    most_threads,
    quantize_source,
    quantize_spec,
    quantize_specs,
    smem_bytes,
    spec_for_rows,
)
from jitgemm.activations.run import QuantizeCall
from jitgemm.activations.scheme import SILU_MUL
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.jit.cache import KernelCache
from jitgemm.kernel.codes import GROUP_SIZES
from jitgemm.kernel.formats import CORRECTION_TYPES, lhs_columns
from jitgemm.runtime.launch import LaunchCache, this_thread
from jitgemm.weight.correction import with_sums
from jitgemm.weight.rotation import butterfly

OP = torch.ops.jitgemm.quantize_activations.default
K = 96
E4M3 = torch.float8_e4m3fn


def dequantize(results: tuple) -> torch.Tensor:
    zero = results[2].double()[:, None] if len(results) == 3 else 0
    return (results[0].double() - zero) * results[1].double()[:, None]


# ---- formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
@pytest.mark.parametrize("mode, largest", [("e4m3", 448), ("s8", 127)])
def test_a_symmetric_scale_is_the_largest_absolute_value_over_the_largest_code(mode, largest, x_dtype):
    x = activations(1, 16, K, x_dtype)
    _, scale = quantize_activations(x, MODES[mode][0])
    expected = (x.float().abs().amax(1) / largest).clamp(min=2.0**-126)
    assert builders.same_bits(scale, expected)


@pytest.mark.parametrize("mode, expected", [("s8", [0, 2, 2, 4, -2, -4]), ("e4m3", [0.5, 1.5, 2.5, 3.5, -1.5, -3.5])])
def test_codes_are_the_nearest_and_of_two_the_even_one(mode, expected):
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([0.5, 1.5, 2.5, 3.5, -1.5, -3.5])
    q, _ = quantize_activations(x, MODES[mode][0], **given(mode, 1.0))
    assert q[0, :6].tolist() == expected
    x[0, :2] = torch.tensor([17.0, 19.0])  # halfway between e4m3's 16, 18 and 20
    if mode == "e4m3":
        assert quantize_activations(x, E4M3, **given(mode, 1.0))[0][0, :2].tolist() == [16, 20]


def test_affine_scales_and_zero_points_are_pytorch_s_and_executorch_s():
    from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers the ops)

    x = activations(1, 200, K, torch.float32)
    _, scale, zero = quantize_activations(x, torch.int8, affine=True)
    theirs, their_zero = torch.ops.quantized_decomposed.choose_qparams_per_token_asymmetric(x, torch.int8)
    plain = theirs.flatten() > torch.finfo(torch.float32).eps  # below, they round the scale up to that
    assert int(plain.sum()) > 100
    assert torch.equal(scale[plain], theirs.flatten()[plain].float())
    assert torch.equal(zero[plain], their_zero.flatten()[plain].int())


def test_an_affine_range_holds_zero():
    x = torch.full((2, K), 3.0)
    x[1] = -3.0
    q, scale, zero = quantize_activations(x, torch.int8, affine=True)
    assert zero.tolist() == [-128, 127] and q[:, 0].tolist() == [127, -128]
    assert builders.same_bits(scale, torch.full((2,), 3.0) / 255)


def test_given_scales_saturate():
    x = torch.tensor([[1e30, -1e30, float("inf"), -float("inf"), 500.0, -500.0, *[0.0] * 26]])
    assert quantize_activations(x, torch.int8, **given("s8", 1.0))[0][0, :6].tolist() == [127, -128] * 3
    assert quantize_activations(x, E4M3, **given("e4m3", 1.0))[0][0, :6].tolist() == [448, -448] * 3
    z = quantize_activations(x, torch.int8, affine=True, **given("s8z", 1.0, zero=100))
    assert z[0][0, :6].tolist() == [127, -128] * 3


def sums(seed: int, m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """x and a residual, with rows of zeros, tiny and huge ones; their rounded sum."""
    x, residual = activations(seed, m, k, dtype), activations(seed + 1, m, k, dtype).flip(0)
    return {"x": x, "residual": residual, "sum": x + residual}


@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["token", "tensor", "block"])
@pytest.mark.parametrize("mode", MODES)
def test_a_residual_is_added_first_and_the_sum_returned(mode, scheme, x_dtype):
    dtype, affine = MODES[mode]
    if scheme == "block" and affine:
        pytest.skip("blocks have no zero points")
    arguments = parameters(1, K) | ({"scheme": "block"} if scheme == "block" else {})
    arguments |= given(mode, 0.02) if scheme == "tensor" else {}
    s = sums(1, 18, K, x_dtype)
    *lhs, total = quantize_activations(s["x"], dtype, affine=affine, residual=s["residual"], **arguments)
    expected = quantize_activations(s["sum"], dtype, affine=affine, **arguments)
    assert len(lhs) == len(expected) and all(map(same_but_nan, lhs, expected))
    assert total.dtype == x_dtype and builders.same_bits(total, s["sum"])


def same_but_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == torch.float32:
        return torch.equal(a.isnan(), b.isnan()) and builders.same_bits(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return builders.same_bits(a, b)


def test_a_sum_is_rounded_once_to_nearest_even():
    """Of two numbers of bf16 in exact arithmetic, ties among them."""
    x = torch.randn(4, K, generator=builders.generator(1)).bfloat16()
    residual = (torch.randn(4, K, generator=builders.generator(2)) * 64).bfloat16()
    x[0, :3], residual[0, :3] = torch.tensor([1.0, 3.0, 2.0**-8]), torch.tensor([256.0, 256.0, 1.0])
    total = quantize_activations(x, torch.int8, rms_norm=torch.ones(K), residual=residual)[-1]
    assert total[0, :3].tolist() == [256.0, 260.0, 1.0]
    steps = torch.tensor([-1, 0, 1])
    for a, b, s in zip(x.flatten().tolist(), residual.flatten().tolist(), total.flatten()):
        near = (s.view(torch.int16) + steps).to(torch.int16).view(torch.bfloat16)
        below, error, above = (abs(Fraction(value) - Fraction(a) - Fraction(b)) for value in near.tolist())
        assert error < min(below, above) or (error == min(below, above) and int(near[1].view(torch.int16)) % 2 == 0)


@pytest.mark.parametrize("place", ["residual", "x", "rows of a wider tensor"])
def test_a_sum_goes_where_it_is_asked_to(place):
    s, norm = sums(1, 9, K), parameters(1, K)["rms_norm"]
    expected = quantize_activations(s["sum"], torch.int8, rms_norm=norm)
    wide = torch.zeros(9, 2 * K, dtype=torch.bfloat16)
    into = {"residual": s["residual"], "x": s["x"]}.get(place, wide[:, 16 : 16 + K])
    out = torch.empty(9, K, dtype=torch.int8), torch.empty(9)
    for given_out in (None, out):
        copies = {"x": s["x"].clone(), "residual": s["residual"].clone()}
        into = {**copies, "rows of a wider tensor": wide[:, 16 : 16 + K]}[place]
        arguments = {"rms_norm": norm, "residual": copies["residual"], "residual_out": into, "out": given_out}
        *lhs, total = quantize_activations(copies["x"], torch.int8, **arguments)
        assert total is into and builders.same_bits(into, s["sum"])
        assert all(map(builders.same_bits, lhs, expected))
        if given_out is not None:
            assert lhs[0] is out[0] and lhs[1] is out[1]
    assert bool((wide[:, :16] == 0).all()) and bool((wide[:, 16 + K :] == 0).all())


# ---- what codes stand for --------------------------------------------------------------------------------------------

ROTATED_K = 384
GATES = {"silu_mul": (True, {}), "gelu_mul": ("tanh", {"approximate": "tanh"}), "gelu": ("none", {})}
"""What the call is given, and what PyTorch's function is."""


@pytest.mark.parametrize(
    "mode, scheme, front, rotation",
    [
        each
        for each in builders.two_thirds(
            MODES, ["token", "block", "tensor"], ["plain", *GATES, "rms_norm", "residual", "permutation"], [0, 128]
        )
        if each[:2] != ("s8z", "block") and each[2:] != ("permutation", 128)
    ],
)
def test_codes_stand_for_the_values(mode, scheme, front, rotation):
    (dtype, affine), k = MODES[mode], ROTATED_K if rotation else 400
    draw, more = builders.generator(1), parameters(1, k)
    x, order = torch.randn(10, k * (1 + (front in GATES)), generator=draw).bfloat16(), more["permutation"]
    x[:, 7] *= 50
    y, options = x.double(), {"plain": {}, "permutation": {"permutation": order}}.get(front, {})
    if front in GATES:
        argument, approximate = GATES[front]
        act = torch.nn.functional.silu if front == "silu_mul" else partial(torch.nn.functional.gelu, **approximate)
        options, y = {front.partition("_")[0] + "_mul": argument}, act(y[:, :k]) * y[:, k:]
    elif front in ("rms_norm", "residual"):
        options = {"rms_norm": more["rms_norm"]} | ({"residual": x.flip(0)} if front == "residual" else {})
        total = (x + x.flip(0) if front == "residual" else x).double()
        y = torch.nn.functional.rms_norm(total, (k,), more["rms_norm"].double(), 1e-6)
    elif front == "permutation":
        y = y[:, order.long()]
    if rotation:
        signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]).double()
        y = (y.unflatten(1, (-1, 128)) @ signs * 2**-3.5).flatten(1)
    options |= given(mode, 0.1, zero=5) if scheme == "tensor" else {"scheme": scheme}
    q, scale, *zero = quantize_activations(x, dtype, affine=affine, rotation=rotation, **options)[: 2 + affine]
    if scheme == "tensor":
        assert bool((scale == 0.1).all()) and all(bool((each == 5).all()) for each in zero)
    scale = scale.double().repeat_interleave(128, 1)[:, :k] if scheme == "block" else scale.double()[:, None]
    steps = y / scale + (zero[0].double()[:, None] if affine else 0)
    inside = (steps >= -128) & (steps <= 127) if dtype == torch.int8 else steps.abs() <= 448
    bound = torch.maximum(steps.abs() * 2.0**-4, torch.tensor(2.0**-10)) if dtype == E4M3 else torch.tensor(0.5)
    assert bool(((q.double() - steps).abs() <= bound * 1.001 + 1e-4)[inside].all())
    assert inside.float().mean() > 0.95


@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
@pytest.mark.parametrize("mode, largest", [("e4m3", 448), ("s8", 127)])
def test_a_rotated_scale_is_that_of_the_sums_by_an_fp32_factor(mode, largest, x_dtype):
    x = activations(1, 16, ROTATED_K, x_dtype)
    q, scale = quantize_activations(x, MODES[mode][0], rotation=128)
    step = (butterfly(x.float()).abs().amax(1) / largest).clamp(min=2.0**-122)
    assert builders.same_bits(scale, step * torch.tensor(2.0**-3.5))
    plain, larger = quantize_activations(butterfly(x.float()), MODES[mode][0])[0], step > 2.0**-122
    assert builders.same_bits(q.view(torch.int8)[larger], plain.view(torch.int8)[larger])
    assert int(larger.sum()) >= 10
    assert float(scale.min()) > 2.0**-126


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_rotated_sums_do_not_hold_makes_its_row_s_scale_nan(mode, value):
    dtype, affine = MODES[mode]
    x = torch.randn(3, ROTATED_K, generator=builders.generator(1))
    x[1, 40], x[1, 44] = value, value  # whose sum is beyond fp32
    scale = quantize_activations(x, dtype, affine=affine, rotation=128)[1]
    assert scale.isnan().tolist() == [False, True, False]
    if not affine:
        blocks = quantize_activations(x, dtype, scheme="block", rotation=128)[1]
        assert blocks.isnan().nonzero().tolist() == [[1, 0]]


# ---- a scale for each block ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, torch.int8], ids=str)
@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
def test_every_block_is_quantised_as_a_row_of_its_own(x_dtype, dtype):
    """With a NaN in one; into scales of any strides, too."""
    x = activations(1, 17, 400, x_dtype)
    x[1, 200] = float("nan")
    q, scale = quantize_activations(x, dtype, scheme="block")
    assert q.shape == x.shape and scale.shape == (17, 4) and scale.stride() == (1, 20)
    for into in (torch.empty(17, 4), torch.empty(4, 20).T[:17], torch.empty(34, 8)[::2, ::2]):
        out = torch.empty_like(q), into
        assert quantize_activations(x, dtype, scheme="block", out=out)[1] is into
        assert_same_bits(out, (q, scale))
    for block in range(4):
        columns = slice(128 * block, min(128 * block + 128, 400))
        expected = quantize_activations(x[:, columns].contiguous(), dtype)
        assert_same_bits((q[:, columns].contiguous(), scale[:, block]), expected)


# ---- special rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"silu_mul": True}, {"rms_norm": torch.ones(K)}], ids=lambda a: str(list(a)))
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_zeros_dequantise_to_zeros(mode, arguments):
    dtype, affine = MODES[mode]
    x = torch.zeros(2, 2 * K if "silu_mul" in arguments else K, dtype=torch.bfloat16)
    results = quantize_activations(x, dtype, affine=affine, **arguments)
    assert results[1].tolist() == [2.0**-126] * 2
    assert bool((dequantize(results) == 0).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_or_an_infinity_makes_its_row_s_scale_nan(mode, value):
    dtype, affine = MODES[mode]
    x = activations(1, 3, K)
    x[1, 40] = value
    results = quantize_activations(x, dtype, affine=affine)
    assert results[1].isnan().tolist() == [False, True, False]
    codes = results[0][1].view(torch.uint8)
    assert bool((codes == (0x7F if dtype == E4M3 else 0)).all())
    if affine:
        assert int(results[2][1]) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_makes_its_row_s_scale_nan_under_a_given_scale_too(mode):
    dtype, affine = MODES[mode]
    x = activations(1, 3, K)
    x[0, 2], x[1, 40] = float("inf"), float("nan")
    results = quantize_activations(x, dtype, affine=affine, **given(mode, 0.5))
    assert results[1].isnan().tolist() == [False, True, False]
    assert results[0].view(torch.uint8)[1, 40] == (0x7F if dtype == E4M3 else 253 if affine else 0)


def test_an_affine_range_beyond_fp32_is_nan():
    x = torch.zeros(1, K)
    x[0, 0], x[0, 1] = 3e38, -3e38
    assert bool(quantize_activations(x, torch.int8, affine=True)[1].isnan())
    assert bool(quantize_activations(x, torch.int8)[1].isfinite())


def test_a_sum_of_squares_beyond_fp32_is_nan():
    x = torch.full((1, K), 3e19)
    assert bool(quantize_activations(x, torch.int8, rms_norm=torch.ones(K))[1].isnan())


# ---- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(2, 2, 3), (), (0,), (2, 0)], ids=str)
def test_shapes_of_more_or_fewer_dimensions(lead):
    rows, norm = math.prod(lead), parameters(1, K)["rms_norm"]
    s = {name: tensor[:rows] for name, tensor in sums(1, 12, K).items()}
    shaped = {name: tensor.view(*lead, K) for name, tensor in s.items()}
    flat = quantize_activations(s["sum"], torch.int8, affine=True, rms_norm=norm)
    into = torch.empty_like(shaped["x"])
    for out in (None, into):
        *lhs, total = quantize_activations(
            shaped["x"], torch.int8, affine=True, rms_norm=norm, residual=shaped["residual"], residual_out=out
        )
        assert [tuple(each.shape) for each in lhs] == [(*lead, K), lead, lead] and (out is None or total is out)
        assert all(builders.same_bits(a.view(b.shape), b) for a, b in zip((*lhs, total), (*flat, s["sum"])))


@pytest.mark.parametrize("mode", MODES)
def test_out_is_written_and_returned(mode):
    dtype, affine = MODES[mode]
    x = activations(1, 5, K)
    whole = torch.full((5, K + 32), 77, dtype=torch.uint8)
    out = (whole[:, 16 : 16 + K].view(dtype), torch.empty(5, 1), torch.empty(5, dtype=torch.int32))[: 2 + affine]
    returned = quantize_activations(x, dtype, affine=affine, out=out)
    expected = quantize_activations(x, dtype, affine=affine)
    assert returned is out
    assert builders.same_bits(out[0], expected[0]) and builders.same_bits(out[1].view(5), expected[1])
    assert not affine or builders.same_bits(out[2], expected[2])
    assert bool((whole[:, :16] == 77).all()) and bool((whole[:, 16 + K :] == 77).all())


# ---- sums of groups --------------------------------------------------------------------------------------------------

CORRECTIONS = [(name, size) for name in CORRECTION_TYPES for size in GROUP_SIZES]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("k", [16, 96, 128, 272, 1024, 8208])
def test_the_two_digits_behind_the_codes_are_their_groups_sums(k, correction):
    name, size = correction
    x = activations(1, 9, k)
    wide, *rest = quantize_activations(x, torch.int8, affine=True, correction=correction)
    codes, *expected = quantize_activations(x, torch.int8, affine=True)
    assert builders.same_bits(wide[:, :k], codes) and all(map(builders.same_bits, rest, expected))
    start, groups = -(-k // 128) * 128, -(-k // size)
    assert not wide[:, k:start].any()
    digits = wide[:, start:].contiguous().view(torch_dtype(name)).view(9, -1, 2, 32).double()
    assert digits.shape[1] == -(-groups // 32) and wide.shape[1] == lhs_columns(k, correction)
    found = digits.sum(2).view(9, -1)
    assert found[:, :groups].tolist() == [[sum(part) for part in row.split(size)] for row in codes.double()]
    assert not found[:, groups:].any()


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_the_largest_and_every_smaller_sum_is_two_digits(correction):
    name, size = correction
    sums = torch.arange(-128 * size, 127 * size + 1)
    codes = (sums[:, None] // size + (torch.arange(size) < sums[:, None] % size)).to(torch.int8)
    digits = with_sums(codes, correction)[:, -(-size // 128) * 128 :].view(torch_dtype(name)).double()
    assert torch.equal(digits.sum(1), sums.double()) and torch.equal(codes.sum(1), sums)


@pytest.mark.parametrize(
    "front", ["silu_mul", "gelu_mul", "rms_norm", "residual", "static", "permutation", "3d", "out"]
)
def test_sums_follow_the_codes_of_every_call(front):
    x, correction = activations(1, 6, K), ("fp16", 32)
    options = {
        "silu_mul": {"x": activations(1, 6, 2 * K), "silu_mul": True},
        "gelu_mul": {"x": activations(1, 6, 2 * K), "gelu_mul": "none"},
        "rms_norm": {"rms_norm": parameters(1, K)["rms_norm"]},
        "residual": {"rms_norm": parameters(1, K)["rms_norm"], "residual": activations(2, 6, K)},
        "static": given("s8", 0.02),
        "permutation": parameters(1, K),
        "3d": {"x": x.view(2, 3, K)},
        "out": {"out": (torch.full((6, 304), 7, dtype=torch.int8)[:, 16:272], torch.empty(6, 1))},
    }[front]
    if front == "out":
        found, wide = quantize_activations(x, torch.int8, correction=correction, **options), options["out"][0]
        assert found is options["out"]
        options = {}
    else:
        found = quantize_activations(**{"x": x, **options}, dtype=torch.int8, correction=correction)
        wide = found[0]
    q, *rest = quantize_activations(**{"x": x, **options}, dtype=torch.int8)
    assert wide.shape == (*q.shape[:-1], 256)
    assert builders.same_bits(wide.reshape(6, 256), with_sums(q.view(6, K), correction))
    assert all(builders.same_bits(a.view(b.shape), b) for a, b in zip(found[1:], rest, strict=True))


# ---- checks ---------------------------------------------------------------------------------------------------------

X, X2 = torch.zeros(4, K), torch.zeros(4, 2 * K)
ONE = torch.ones(1)
NORM = {"rms_norm": torch.ones(K)}


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "x: expected k to be a multiple of 16 from 16 to 1048576, got 100", {"x": torch.zeros(4, 100)}),
        (ValueError, "x: expected k to be a multiple of 16 .*, got 0", {"x": torch.zeros(1, 0)}),
        (ValueError, "x: expected 2k columns with a gate, k a multiple of 16, got 80", {"x": X[:, :80], "silu_mul": True}),
        (ValueError, "gelu_mul: expected 'none' or 'tanh' or None, got 'erf'", {"x": X2, "gelu_mul": "erf"}),
        (ValueError, "gelu_mul: expected None with silu_mul", {"x": X2, "silu_mul": True, "gelu_mul": "tanh"}),
        (ValueError, "rms_norm: expected None with silu_mul or gelu_mul",
         {"x": X2, "gelu_mul": "none", "rms_norm": torch.ones(K)}),
        (ValueError, "x: expected stride 1 along its columns", {"x": torch.zeros(K, 32).t()}),
        (ValueError, "x: expected a row stride that is a multiple of 4 elements", {"x": torch.zeros(4, 98)[:, :96]}),
        (ValueError, "x: expected rows that are one stride apart", {"x": torch.zeros(4, 4, K).transpose(0, 1)}),
        (ValueError, r"x: expected shape \[..., k\], got a scalar", {"x": torch.zeros(())}),
        (ValueError, "affine: expected dtype int8, got float8_e4m3fn", {"affine": True, "dtype": E4M3}),
        (ValueError, "scale: expected one element for scheme 'tensor', got None", {"scheme": "tensor"}),
        (ValueError, "scale: expected None unless for scheme 'tensor', got a Tensor", {"scale": ONE}),
        (ValueError, r"scale: expected one element, got shape \[3\]", {"scheme": "tensor", "scale": torch.ones(3)}),
        (ValueError, "zero: expected None unless", {"scheme": "tensor", "scale": ONE, "zero": ONE.int()}),
        (ValueError, "zero: expected one element", {"scheme": "tensor", "scale": ONE, "affine": True}),
        (ValueError, r"rms_norm: expected shape \[96\], got shape \[95\]", {"rms_norm": torch.ones(95)}),
        (ValueError, "rms_norm: expected a contiguous tensor", {"rms_norm": torch.ones(2 * K)[::2]}),
        (ValueError, "residual: expected None without rms_norm", {"residual": X}),
        (TypeError, "residual: expected a torch.Tensor, got NoneType", NORM | {"residual_out": X}),
        (ValueError, r"residual: expected shape \[4, 96\], x's, got \[3, 96\]", NORM | {"residual": X[:3]}),
        (TypeError, "residual: expected float32, x's type, got float16", NORM | {"residual": X.half()}),
        (ValueError, "residual: expected a row stride", NORM | {"residual": torch.zeros(4, 98)[:, :96]}),
        (ValueError, "residual: expected stride 1", NORM | {"residual": torch.zeros(K, 4).t()}),
        (ValueError, "residual_out: expected shape", NORM | {"residual": X, "residual_out": X2}),
        (TypeError, "residual_out: expected float32", NORM | {"residual": X, "residual_out": X.bfloat16()}),
        (ValueError, "residual_out: expected rows that do not overlap",
         NORM | {"residual": X, "residual_out": torch.zeros(1, K).expand(4, K)}),
        (ValueError, "eps: expected a finite number that is not negative, got -1", {"eps": -1}),
        (ValueError, r"permutation: expected shape \[96\]", {"permutation": torch.arange(64).int()}),
        (ValueError, "rotation: expected 0 or 128, got 64", {"rotation": 64}),
        (ValueError, "x: expected k to be a multiple of 128 with a rotation, got 96", {"rotation": 128}),
        (ValueError, "x: expected k to be a multiple of 128 with a rotation, got 192",
         {"x": torch.zeros(4, 384), "rotation": 128, "silu_mul": True}),
        (ValueError, "permutation: expected None with a rotation",
         {"x": torch.zeros(4, 128), "rotation": 128, "permutation": torch.arange(128).int()}),
        (ValueError, r"correction: expected None with a rotation, got \('bf16', 32\)",
         {"x": torch.zeros(4, 128), "rotation": 128, "correction": ("bf16", 32)}),
        (TypeError, r"correction: expected None or \(type, group size\), got \['bf16', 32\]",
         {"correction": ["bf16", 32]}),
        (ValueError, r"correction: expected a type of .* and a group size of .*, got \('fp32', 32\)",
         {"correction": ("fp32", 32)}),
        (ValueError, r"correction: expected .*, got \('bf16', 48\)", {"correction": ("bf16", 48)}),
        (ValueError, "correction: expected None unless for int8 .* got it with e4m3",
         {"dtype": E4M3, "correction": ("bf16", 32)}),
        (ValueError, "correction: expected None unless for int8 .* got it with a scale for each block",
         {"scheme": "block", "correction": ("bf16", 32)}),
        (ValueError, r"out\[0\]: expected shape \[4, 256\], got \[4, 96\]",
         {"correction": ("bf16", 32), "out": (X.char(), torch.ones(4))}),
        (TypeError, r"out: expected \(q, scale, zero\), got tuple of 2", {"affine": True, "out": (X, X)}),
        (ValueError, r"out\[0\]: expected shape \[4, 96\], got \[3, 96\]", {"out": (X[:3].char(), torch.ones(4))}),
        (ValueError, r"out\[1\]: expected a contiguous tensor of shape \[4\] or \[4, 1\]", {"out": (X.char(), ONE)}),
        (ValueError, "affine: expected False for scheme 'block', got True", {"scheme": "block", "affine": True}),
        (ValueError, r"out\[1\]: expected shape \[4, 1\], got \[4\]",
         {"scheme": "block", "out": (X.char(), torch.ones(4))}),
        (ValueError, r"out\[1\]: expected elements that do not overlap", {
            "x": X2, "scheme": "block", "out": (X2.char(), torch.ones(4, 1).expand(4, 2))}),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(error, message, change):
    arguments = {"x": X, "dtype": torch.int8} | change
    with pytest.raises(error, match=message):
        quantize_activations(**arguments)


def test_long_rows_have_a_limit():
    with pytest.raises(ValueError, match="x: expected k .* from 16 to 1048576"):
        quantize_activations(torch.zeros(1, 2**20 + 16), torch.int8)
    with pytest.raises(ValueError, match="x: expected k .* from 16 to 131072 with a permutation, got 131088"):
        quantize_activations(torch.zeros(1, 131088), torch.int8, permutation=torch.arange(131088).int())
    with pytest.raises(ValueError, match="from 16 to 32768 with a permutation"):
        order = torch.arange(2**15 + 32).int()
        quantize_activations(torch.zeros(1, 2**15 + 32), torch.int8, scheme="block", permutation=order)


@pytest.mark.parametrize(("wrong", "got"), [(K, f"0..{K}"), (-1, f"-1..{K - 1}")])
def test_a_permutation_that_leaves_the_row_is_refused_on_the_cpu(wrong, got):
    permutation = torch.arange(K).int()
    permutation[0 if wrong < 0 else 1] = wrong
    with pytest.raises(ValueError, match=f"permutation: expected values 0..{K - 1}, got {got}"):
        quantize_activations(torch.zeros(2, K), torch.int8, permutation=permutation)


def test_an_output_that_overlaps_is_refused():
    x = torch.zeros(4, K)
    q = x.view(torch.int8)[:, :K]
    with pytest.raises(ValueError, match=r"out\[0\]: expected memory of its own, got a tensor that overlaps x"):
        quantize_activations(x, torch.int8, out=(q, torch.empty(4)))
    q = torch.zeros(4, K, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"out\[1\]: expected memory of its own, got a tensor that overlaps out\[0\]"):
        quantize_activations(x, torch.int8, out=(q, q.view(-1)[:16].view(torch.float32)))


@pytest.mark.parametrize("what", ["x", "residual", "out[0]"])
def test_a_sum_that_overlaps_but_is_not_in_place_is_refused(what):
    memory = torch.zeros(9 * K)
    tensors = {"x": memory[: 4 * K].view(4, K), "residual": torch.zeros(4, K)}
    if what == "residual":
        tensors = {"x": tensors["residual"], "residual": tensors["x"]}
    q = tensors.pop("residual") if what == "out[0]" else None
    out = (memory.view(torch.int8)[-4 * K :].view(4, K), torch.empty(4)) if what == "out[0]" else None
    into = memory[5 * K :].view(4, K) if what == "out[0]" else memory[K : 5 * K].view(4, K)
    tensors.setdefault("residual", q)
    message = re.escape(f"residual_out: expected memory of its own, got a tensor that overlaps {what}")
    with pytest.raises(ValueError, match=message):
        quantize_activations(**tensors, dtype=torch.int8, rms_norm=torch.ones(K), residual_out=into, out=out)


# ---- the op ---------------------------------------------------------------------------------------------------------


PLAIN = (torch.int8, False, False, None, None, False)
NORM_AND_ORDER = (torch.ones(K), 1e-6, torch.randperm(K).int())
FORMS = {
    "e4m3": (K, (E4M3, *PLAIN[1:], *NORM_AND_ORDER), {}),
    "zero points": (K, (torch.int8, False, True, *PLAIN[3:], *NORM_AND_ORDER), {}),
    "a gate": (2 * K, (*PLAIN, None, 1e-6, None, False, "tanh"), {}),
    "given scales": (K, (torch.int8, True, True, torch.ones(1), torch.tensor([3]).int(), False, None, 1e-6, None), {}),
    "blocks": (K, (*PLAIN, None, 1e-6, None, True), {}),
    "sums": (K, (*PLAIN, torch.ones(K), 1e-6, None), {"correction": "bf16", "correction_group": 32}),
    "a rotation": (256, (*PLAIN, torch.ones(256), 1e-6, None), {"rotation": 128}),
}
"""Columns of x, and the other arguments of the op."""


@pytest.mark.parametrize("form", FORMS)
def test_opcheck_passes_for_every_form(form):
    columns, arguments, more = FORMS[form]
    # Comparing float8 tensors needs isclose, which PyTorch lacks for them on the CPU.
    tests = ["test_autograd_registration", "test_faketensor"]
    tests += [] if form == "e4m3" else ["test_schema", "test_aot_dispatch_dynamic"]
    wide = torch.zeros(5, 2 * columns, dtype=torch.bfloat16)[:, :columns]
    for x in (activations(1, 5, columns), wide, wide[:1]):
        assert set(torch.library.opcheck(OP, (x, *arguments), more, test_utils=tests).values()) == {"SUCCESS"}
        if arguments[6] is not None:
            op, given = torch.ops.jitgemm.add_quantize_activations.default, (x, *arguments, False, x.flip(0))
            assert set(torch.library.opcheck(op, given, more, test_utils=tests).values()) == {"SUCCESS"}


def test_a_remembered_call_checks_a_residual_by_its_plan(monkeypatch):
    launches = prepared_calls.without_driver(monkeypatch)
    monkeypatch.setattr(this_thread, "cache", LaunchCache())
    x, residual, into = (activations(seed, 4, K) for seed in range(3))

    def run(residual: torch.Tensor, into: torch.Tensor | None, x: torch.Tensor = x) -> None:
        quantize_activations(x, torch.int8, rms_norm=torch.ones(K), residual=residual, residual_out=into)

    def remember(self: QuantizeCall, operands: tuple) -> None:  # as of tensors on a GPU
        this_thread.cache.add_plan(*asked[-1], self.prepare(operands))

    asked, find_plan = [], LaunchCache.find_plan
    monkeypatch.setattr(LaunchCache, "find_plan", lambda self, *which: asked.append(which) or find_plan(self, *which))
    monkeypatch.setattr(QuantizeCall, "run_reference", remember)
    for place in (into, residual, x):
        run(residual, place)
    assert launches == []
    with monkeypatch.context() as checks:
        checks.delattr(run_module, "check_arguments")
        checks.delattr(call, "rows_like")
        for place in (into, residual, x, None):
            run(residual, place)
    assert len(launches) == 4
    for wrong in (residual[:3], residual.half(), residual.to("meta"), torch.zeros(4, 98)[:, :K], residual[None]):
        with pytest.raises((TypeError, ValueError), match="residual: expected"):
            run(wrong, into)
        with pytest.raises((TypeError, ValueError), match="residual_out: expected"):
            run(residual, wrong)
    with pytest.raises(TypeError, match="residual_out: expected a torch.Tensor, got str"):
        run(residual, "x")
    with pytest.raises(ValueError, match=r"residual: expected shape \[2, 2, 96\]"):
        run(residual, into, x.view(2, 2, K))
    assert len(launches) == 4


# ---- kernels --------------------------------------------------------------------------------------------------------


def every_spec(ks: tuple[int, ...]) -> list[tuple[int, QuantizeSpec]]:
    found: dict[QuantizeSpec, int] = {}
    for k in ks:
        for x in REAL_TYPES:
            for q, affine in (("e4m3", False), ("s8", False), ("s8", True)):
                for static in (False, True):
                    for front in ({}, {"gate": SILU_MUL}, {"rms_norm": True}, {"rms_norm": True, "residual": True}):
                        for permuted in (False, True):
                            options = {"affine": affine, "static": static, "permuted": permuted}
                            for spec in quantize_specs(k, x, q, **options, **front):
                                found.setdefault(spec, k)
                        if not static and not affine and (k <= 2**15 or not permuted):
                            found.setdefault(quantize_spec(k, x, q, block=True, permuted=permuted, **front), k)
                    if k % 128 == 0:
                        for spec in quantize_specs(k, x, q, affine=affine, static=static, rotated=True, **front):
                            found.setdefault(spec, k)
    return [(k, spec) for spec, k in found.items()]


ALL = every_spec((32, 256, 512, 1024, 2048, 8192, 13312, 14336, 16384, 28672, 32768, 65536))


def test_labels_tell_kernels_apart():
    assert len({spec.label for _, spec in ALL}) == len(ALL) == len({quantize_source(spec).source for _, spec in ALL})


def test_sums_make_kernels_of_their_own_and_change_no_other():
    plain = quantize_spec(4096, "bf16", "s8")
    summed = [quantize_spec(4096, "bf16", "s8", correction=correction) for correction in CORRECTIONS]
    assert (
        len({quantize_source(spec).source for spec in (plain, *summed)})
        == len({s.label for s in (plain, *summed)})
        == 9
    )
    assert not any("sums" in text for text in (*quantize_source(plain).headers, quantize_source(plain).source))
    assert [spec.ctas for spec in quantize_specs(14336, "bf16", "s8", correction=("bf16", 128))] == [1, 4]


def test_blocks_hold_their_rows():
    for k, spec in ALL:
        threads, rows = block_dims(spec, k)
        assert threads % 32 == 0 and threads * rows <= most_threads(spec) <= 1024
        assert spec.vectors == 0 or threads * spec.ctas * spec.vectors * 8 >= k
        assert (rows == 1) or threads == 32
        assert smem_bytes(spec, k) <= 131072 and (smem_bytes(spec, k) > 0) == spec.permuted
        assert not spec.block or smem_bytes(spec, k) == (4 * k * rows if spec.permuted else 0)


@pytest.mark.parametrize(
    "x, front, longest",
    [
        ("bf16", (), 32768),
        ("fp16", ("rms_norm",), 16384),
        ("bf16", ("gate",), 16384),
        ("bf16", ("rms_norm", "residual"), 16384),
        ("fp32", (), 16384),
        ("fp32", ("rms_norm",), 16384),
        ("fp32", ("gate",), 8192),
        ("fp32", ("rms_norm", "residual"), 16384),
    ],
)
def test_rows_are_read_once_up_to_the_documented_length(x, front, longest):
    def vectors(k: int) -> int:
        return quantize_spec(k, x, "s8", **{each: SILU_MUL if each == "gate" else True for each in front}).vectors

    assert vectors(longest) > 0 and vectors(longest + 32) == 0


def test_a_sum_of_squares_has_one_order_with_and_without_a_residual():
    for k, spec in ALL:
        if spec.residual:
            flags = {"permuted": spec.permuted, "rotated": spec.rotated, "block": spec.block}
            plain = quantize_spec(k, spec.x, spec.q, affine=spec.affine, static=spec.static, rms_norm=True, **flags)
            (threads, rows), (of_plain, plain_rows) = block_dims(spec, k), block_dims(plain, k)
            assert (spec.vectors, threads * spec.ctas, rows) == (plain.vectors, of_plain, plain_rows)


@pytest.mark.parametrize(
    "message, k, arguments",
    [
        ("k: expected", 100, ("bf16", "s8")),
        ("x: expected", 96, ("fp64", "s8")),
        ("q: expected", 96, ("bf16", "u8")),
        ("correction: expected a type", 96, ("bf16", "s8", ("fp32", 32))),
        ("correction: expected None", 96, ("bf16", "e4m3", ("bf16", 32))),
    ],
)
def test_specs_refuse_what_there_is_no_kernel_for(message, k, arguments):
    with pytest.raises(ValueError, match=message):
        quantize_spec(k, *arguments[:2], correction=(*arguments, None)[2])
    with pytest.raises(ValueError, match="block: cannot be combined with a static scale or a zero point"):
        quantize_spec(512, "bf16", "s8", block=True, affine=True)


def sampled() -> list[QuantizeSpec]:
    """Of the kernels of each shape the ones that need most registers, and every feature."""
    shapes: dict[tuple, QuantizeSpec] = {}
    for _, spec in ALL:
        if spec.q == "s8" and (spec.affine or spec.block) and not spec.static:
            front = spec.gate, spec.rms_norm, spec.residual
            flags = spec.permuted, spec.rotated, spec.block
            shape = spec.x == "fp32", front, *flags, spec.vectors, spec.rows > 1, spec.ctas
            shapes.setdefault(shape, spec)
    features = [spec for _, spec in ALL if spec.vectors == 4 and spec.x == "fp16" and spec.rows == 1]
    summed = [replace(spec, correction=("bf16", 32)) for spec in shapes.values() if spec.x == "bf16" and not spec.block]
    return list(dict.fromkeys([*shapes.values(), *features, *summed]))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> KernelCache:
    return KernelCache([tmp_path_factory.mktemp("kernels")])


@pytest.mark.nvrtc
@pytest.mark.parametrize("spec", sampled()[::3], ids=lambda spec: spec.label)
def test_compiles_for_sm_90a_without_spills_or_warnings(cache, compiles_without_warnings, spec):
    entry, compiled = cache.get_or_compile(quantize_source(spec))
    assert compiled and entry.cubin.startswith(b"\x7fELF")
    compiles_without_warnings(entry)
    assert entry.metadata["registers"] <= 65536 // most_threads(spec)


def test_ctas_share_a_row_where_rows_are_long_and_few():
    def ctas(k: int, m: int, **options) -> int:
        return spec_for_rows(quantize_spec(k, "bf16", "e4m3", **options), k, m, 132).ctas

    assert [ctas(14336, m, gate=SILU_MUL) for m in (1, 33, 34, 4096)] == [4, 4, 1, 1]
    assert ctas(1024, 1) == ctas(40960, 1) == ctas(14336, 1, permuted=True) == 1
    assert ctas(13824, 1, rms_norm=True) == 1  # 27 warps: the sum of squares keeps its order
    most = {2048: 0, 3584: 0, 4096: 66, 5120: 52, 6144: 44, 8192: 33, 11008: 24, 14336: 18}  # a scheduler for each warp
    for k, m in most.items():
        assert [ctas(k, each, rotated=True) for each in (1, m, m + 1) if each] == [4 if m else 1, *[4] * (m > 0), 1]
    assert ctas(13312, 1, rotated=True, rms_norm=True) == 2  # 26 warps
    assert len(quantize_specs(14336, "bf16", "s8", rotated=True)) == 2
