"""The error bound against its definition, and against a tensor core emulated bit by bit on inputs made to lose most."""

from __future__ import annotations

import builders
import pytest
import torch
from tensor_core import TensorCore

from jitgemm.gemm import bound
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.exact import round_fp64
from jitgemm.gemm.reference import gemm_w4a8_reference

HOPPER = TensorCore()
CORES = {"hopper": HOPPER, "14 bits": TensorCore(bits=14), "sign fill": TensorCore(sign_fill=True)}
CORES["exponents of values"] = TensorCore(normal=True)


def used(lhs: tuple, parts: builders.WeightParts, core: TensorCore, out_dtype=torch.float32) -> float:
    """The largest error of an emulated kernel over the bound."""
    ref, limit = gemm_w4a8_bound(lhs, parts.packed, out_dtype=out_dtype)
    return float(((core.gemm(lhs, parts, out_dtype).double() - ref).abs() / limit.clamp(min=1e-300)).max())


# ---- the model of a tensor core -------------------------------------------------------------------------------------


def step(x: list[float], d: list[int], acc: float = 0.0, unit: int = 1) -> float:
    x, d = (torch.tensor([values + [0] * (32 - len(values))], dtype=torch.float64) for values in (x, d))
    return float(HOPPER.step(torch.tensor([[acc]], dtype=torch.float64), x, d, unit))


@pytest.mark.parametrize(
    "x, d, acc, expected",
    [
        ([256, 0.25], [1, 1], 0, 256.25),  # code 1 is subnormal: cut 13 bits below 8 * 256
        ([256, 0.234375], [1, 1], 0, 256),
        ([256, -0.234375], [1, 1], 0, 256),
        ([256, 0.25], [16, 1], 0, 4096),  # code 16 has the next exponent
        ([0.5, 0.001953125], [1, 1], 0, 0.501953125),
        ([448, 0.001953125], [0, 1], 0, 0.001953125),  # a product of 0 aligns nothing
        ([7.5], [1], 65536, 65536),
        ([8], [1], 65536, 65544),
        ([256], [-1], 0.125, -256),  # the accumulator is cut off too
        ([448] * 32, [7] * 31 + [6], 0, 99904),
        ([448] * 31 + [1], [7] * 32, 0, 97216),  # 97223 keeps 14 bits
    ],
)
def test_a_step_cuts_off_13_bits_below_the_largest_exponent(x, d, acc, expected):
    assert step(x, d, acc) == expected


@pytest.mark.parametrize(
    "x, d, expected",
    [
        ([256, 0.125], [1, 1], 256.125),  # code 1 is subnormal: cut 13 bits below 4 * 256
        ([256, 0.1171875], [1, 1], 256),
        ([256, 0.125], [7, 1], 1792.125),
        ([256, 0.125], [-8, 1], -2048),  # code -8 has the next exponent
    ],
)
def test_codes_decoded_to_twice_themselves_have_one_bit_more(x, d, expected):
    assert step(x, d, unit=2) == expected


# ---- the bound against the model ------------------------------------------------------------------------------------


def weight_of(d: torch.Tensor, group_size: int) -> builders.WeightParts:
    """Codes [n, k] of -16..15 with scales of 1; -16 is code 0 with zero point 16."""
    groups = -(-d.shape[1] // group_size)
    zero = torch.full((d.shape[0], groups), 16, dtype=torch.uint8) if bool((d < -8).any()) else None
    q = d.to(torch.int8) if zero is None else (d + 16).to(torch.uint8)
    return builders.WeightParts(q, torch.ones(d.shape[0], groups), zero, group_size)


def lhs_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = x.to(torch.float8_e4m3fn)
    assert torch.equal(exact.double(), x.double())
    return exact, torch.ones(x.shape[0], 1)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("k, position", [(32, 0), (32, 31), (96, 64), (160, 128), (160, 159), (512, 511)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("code, small, at_least", [(-8, 0.029296875, 0.4), (-16, 0.029296875, 0.8)])
def test_an_outlier_above_terms_just_below_its_cut(k, position, sign, core, code, small, at_least):
    """All other terms of the outlier's step are lost, whole: nearly half the bound, nearly all with codes of 16."""
    x = torch.zeros(1, k)
    x[:, position // 32 * 32 : position // 32 * 32 + 32] = small * sign
    x[:, position] = 256
    parts = weight_of(torch.full((64, k), code), 128)
    share = used(lhs_of(x), parts, CORES[core])
    assert share <= 1
    if core == "hopper":
        assert share >= at_least


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_a_sum_above_terms_just_below_its_cut(group_size, sign, core):
    """The first step adds up to 2^15; all 32 terms of each step after it are lost, until the run ends."""
    x, d = torch.full((1, 512), 0.5625 * sign), torch.full((64, 512), 7)
    x[:, :16], x[:, 16:32], d[:, :16] = 256, 0, -8
    lhs, parts = lhs_of(x), weight_of(d, group_size)
    share = used(lhs, parts, CORES[core])
    assert share <= 1
    if core == "hopper" and group_size >= 64:
        assert share >= 0.8
        terms = lhs[0].double().abs() @ d.double().abs().T
        ref = gemm_w4a8_reference(lhs, parts.packed, out_dtype=torch.float64)
        error = (HOPPER.gemm(lhs, parts).double() - ref).abs()
        assert float((error / terms).max()) > 2.0**-10  # a share of the sum of |terms| is no bound


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("factor", [1, 50, 1000])
@pytest.mark.parametrize("group_size, zero_point, scale_type, offset", [
    (32, False, "bf16", False), (64, True, "fp32", True), (128, False, "fp16", True), (256, True, "bf16", True),
    (0, False, "fp32", False), (0, True, "bf16", False),
])  # fmt: skip
def test_random_problems_with_outliers_in_the_last_step(group_size, zero_point, scale_type, offset, factor, core):
    for k, out_dtype in ((32, torch.float32), (48, torch.float32), (160, torch.bfloat16), (544, torch.float16)):
        parts = builders.weight_parts(
            k, 64, k, group_size, zero_point=zero_point, scale_type=scale_type, max_zero=16, scales="negative",
            offset=offset and k > group_size,
        )  # fmt: skip
        for lhs in (builders.lhs(k, 16, k, outliers=False, last_step=factor), builders.block_lhs(k, 16, k)):
            assert used(lhs, parts, CORES[core], out_dtype) <= 1


# ---- the bound against its definition -------------------------------------------------------------------------------


def defined(lhs: tuple, parts: builders.WeightParts, out_dtype: torch.dtype) -> list[list[float]]:
    """`gemm_w4a8_bound`'s formula, one result at a time."""
    x, x_scale, x_zero = (*lhs, None)[:3]
    (m, k), per_block = x.shape, x_scale.dim() == 2 and x_scale.shape[1] > 1
    d = parts.q.double()
    group = torch.arange(k) // parts.group_size
    d = d if parts.zero is None else d - parts.zero.double()[:, group]
    scale, offset = parts.scale.double(), parts.offset
    row_sums = parts.dequantize_fp64().sum(1)
    ref = gemm_w4a8_reference(lhs, parts.packed, out_dtype=torch.float64)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[out_dtype]
    least = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}[out_dtype]

    def run_of(x: list[float], d: list[float], exact: bool) -> tuple[float, float]:
        total = loss = 0.0
        for first in range(0, len(x), 32):
            part = x[first : first + 32]
            largest = 16 * max(map(abs, part))
            before = abs(total) + loss
            total += sum(a * b for a, b in zip(part, d[first : first + 32], strict=True))
            if largest > 0 and not exact:
                loss += 2.0**-8 * max(largest, before)
                loss += 2.0**-13 * (abs(total) + loss)
        return abs(total), loss

    result = []
    for i in range(m):
        result.append([])
        for j in range(d.shape[0]):
            lost = size = 0.0
            promotions = 0
            for first in range(0, k, min(parts.group_size, 128)):
                columns = slice(first, min(first + min(parts.group_size, 128), k))
                g = first // parts.group_size
                values = [(d[j, columns].tolist(), scale[j, g])]
                if offset is not None:
                    values.append(([1.0] * len(values[0][0]), offset.double()[j, g]))
                for codes, factor in values:
                    total, loss = run_of(x[i, columns].double().tolist(), codes, x.dtype == torch.int8)
                    if per_block:
                        factor = float(factor) * float(x_scale[i, first // 128])
                    lost += loss * abs(float(factor))
                    size += (total + loss) * abs(float(factor))
                    promotions += 1
            if x_zero is not None:
                size += abs(float(x_zero.expand(m, 1)[i, 0]) * float(row_sums[j]))
            lost += 2.0**-24 * (promotions + 4) * size
            if not per_block:
                lost *= abs(float(x_scale.expand(m, 1)[i, 0]))
            result[-1].append(lost + unit * (abs(float(ref[i, j])) + lost) + least)
    return result


@pytest.mark.parametrize("dtype", ["e4m3", "s8", "affine", "e4m3 by block", "s8 by block"])
@pytest.mark.parametrize("group_size, k", [(32, 96), (64, 160), (128, 320), (256, 416), (0, 160)])
def test_the_bound_is_its_definition(group_size, k, dtype):
    out_dtype = {32: torch.bfloat16, 64: torch.float16}.get(group_size, torch.float32)
    parts = builders.weight_parts(
        1, 8, k, group_size, zero_point=group_size in (64, 256, 0), scales="negative", offset=group_size > 32
    )
    if dtype == "affine":
        lhs = builders.affine_lhs(2, 3, k)
    elif dtype.endswith("by block"):
        lhs = builders.block_lhs(2, 3, k, dtype.split()[0])
    else:
        lhs = builders.lhs(2, 3, k, dtype, per_token=k != 320)
    lhs[0][1, : k // 2] = 0
    lhs = (lhs[0], -lhs[1], *lhs[2:])
    ref, limit = gemm_w4a8_bound(lhs, parts.packed, out_dtype=out_dtype)
    assert torch.equal(ref, gemm_w4a8_reference(lhs, parts.packed, out_dtype=torch.float64))
    expected = torch.tensor(defined(lhs, parts, out_dtype), dtype=torch.float64)
    assert torch.allclose(limit, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", builders.LHS_DTYPES)
def test_tiles_do_not_change_the_bound(monkeypatch, dtype):
    parts = builders.weight_parts(3, 200, 416, 64, zero_point=True, offset=True)
    lhs = builders.affine_lhs(4, 9, 416) if dtype == "s8" else builders.lhs(4, 9, 416)
    whole = gemm_w4a8_bound(lhs, parts.packed, bias=builders.bias(5, 200))
    monkeypatch.setattr(bound, "_BUDGET", 2048)
    for a, b in zip(whole, gemm_w4a8_bound(lhs, parts.packed, bias=builders.bias(5, 200)), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_the_exact_result_stays_within_the_bound(out_dtype):
    """Down to fp16's subnormals, whose steps do not shrink with the value."""
    weight = builders.weight_parts(1, 64, 32, 0).packed
    x, x_scale = builders.lhs(2, 64, 32, "s8")
    lhs = x, x_scale * 2.0 ** -torch.arange(64)[:, None].remainder(24)
    ref, limit = gemm_w4a8_bound(lhs, weight, out_dtype=out_dtype)
    error = (round_fp64(ref, out_dtype).double() - ref).abs()
    assert bool((error <= limit).all())
    assert float((error / limit).max()) > (0.1 if out_dtype == torch.float32 else 0.9)
