"""Activations with a scale per token and 128 k on the CPU: what calls take and refuse, references, kernels'
constants."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace

import builders
import pytest
import torch
from builders import same_bits, weight_of_experts
from prepared_calls import K, N, gemm_operands, without_driver

import jitgemm
from jitgemm.gemm import launch as gemms
from jitgemm.gemm.problem import Gemm, Groups, fp32_scales, pack_e8m0
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec, smem_bytes
from jitgemm.kernel.tactics import promote_records
from jitgemm.select.choose import choose, kernel_named, kernels_for
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import illegal

H200 = DEVICES["h200"]
FORMATS = [(32, True, "bf16", False), (64, False, "fp32", True), (128, False, "bf16", False), (256, False, "fp16", False),
           (0, False, "fp32", False)]  # fmt: skip


# ---- references -----------------------------------------------------------------------------------------------------


# ---- powers of two ---------------------------------------------------------------------------------------------------


def e8m0(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu)


def unpacked(words: torch.Tensor, k: int) -> torch.Tensor:
    return words.contiguous().view(torch.float8_e8m0fnu)[..., : -(-k // 128)].contiguous()


def test_exponents_are_powers_of_two_and_nan():
    x_scale = e8m0(torch.tensor([[0, 1, 127, 128], [254, 255, 100, 0]]))
    expected = torch.tensor([[2.0**-127, 2.0**-126, 1, 2], [2.0**127, float("nan"), 2.0**-27, 2.0**-127]])
    words = pack_e8m0(x_scale)
    assert words.tolist() == [[-2139160320], [0x0064FFFE]] and words.data_ptr() == x_scale.data_ptr()
    for scale in (x_scale, words, words.T.contiguous().T):
        torch.testing.assert_close(fp32_scales(scale, 512), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k", [128, 400, 1056, 2048])
def test_unpacked_exponents_of_any_strides_are_packed(k):
    blocks = -(-k // 128)
    bits = torch.arange(3 * 2 * 20).view(3, 2, 20)
    for part in (bits[..., :blocks], bits[..., 1 : blocks + 1], bits.permute(2, 1, 0)[:, :, :3].permute(2, 1, 0)):
        scale = e8m0(part)
        assert torch.equal(fp32_scales(pack_e8m0(scale), part.shape[-1] * 128), scale.float())
    whole = e8m0(bits)[..., 4:8]
    assert pack_e8m0(whole).data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("k, dtype, bits", builders.third([128, 400, 1056], builders.LHS_DTYPES, [4, 8]))
def test_calls_take_exponents_packed_and_unpacked(k, dtype, bits):
    codes = dtype if bits == 8 else "any"
    weight, bias = builders.weight_parts(1, 72, k, codes=codes, bits=bits).packed, builders.bias(3, 72)
    gemm = jitgemm.gemm_w4a8_bf16_nt if bits == 4 else jitgemm.gemm_w8a8_bf16_nt
    x, words = builders.e8m0_lhs(2, 5, k, dtype)
    exponents, results = unpacked(words, k), []
    forms = words, words.T.contiguous().T, builders.e8m0_lhs(2, 5, k, dtype, column_major=True)[1]
    for x_scale in (fp32_scales(words, k), *forms, exponents, exponents.T.contiguous().T):
        results.append(torch.empty(5, 72, dtype=torch.bfloat16))
        gemm((x, x_scale), weight, results[-1], bias=bias)
        assert same_bits(results[-1], jitgemm.gemm_w4a8_reference((x, x_scale), weight, bias=bias))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", ["packed", "packed in columns", "unpacked"])
def test_grouped_calls_take_exponents(kind):
    weight, counts = weight_of_experts(3, 72, 400), (2, 0, 4)
    x, words = builders.e8m0_lhs(1, 12, 400, "s8", column_major="columns" in kind)
    offsets, masked_m = torch.tensor([0, 2, 2, 6], dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    index, results = torch.randint(12, (12,), dtype=torch.int32), []
    for x_scale in (fp32_scales(words, 400), unpacked(words, 400) if kind == "unpacked" else words):
        results.append(torch.zeros(12, 72, dtype=torch.bfloat16))
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous((x, x_scale), weight, results[-1], offsets, row_index=index)
        lhs = x.view(3, 4, 400), x_scale.view(3, 4, -1) if x_scale.is_contiguous() else x_scale.unflatten(0, (3, 4))
        out = torch.zeros(3, 4, 72, dtype=torch.bfloat16)
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_masked(lhs, weight, out, masked_m, 2)
        results.append(out)
    assert all(same_bits(*each) and bool(each[0].any()) for each in zip(results[:2], results[2:]))


def test_calls_with_unpacked_exponents_are_checked_once(monkeypatch):
    x, words = builders.e8m0_lhs(1, 6, 400, "s8")
    lhs, offsets = (x, unpacked(words, 400)), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    dense, experts, out = (
        builders.weight_parts(1, 72, 400).packed,
        weight_of_experts(3, 72, 400),
        torch.empty(6, 72).bfloat16(),
    )
    launches, checked, check = without_driver(monkeypatch), [], Gemm.check
    monkeypatch.setattr(Gemm, "check", lambda gemm: (checked.append(gemm), check(gemm)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    for again in (False, True):
        checked.clear()
        jitgemm.gemm_w4a8_bf16_nt(lhs, dense, out)
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, experts, out, offsets)
        assert len(checked) == (0 if again else 2)
    assert len(launches) == 4


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x_scale", "message"),
    [
        (torch.ones(5, 3), r"lhs\[1\] \(x_scale\): expected shape \[5\], \[5, 1\] or one element, or \[5, 4\] for a scale"),
        (torch.ones(4, 4), r"or \[5, 4\] for a scale per token and 128 k, got \[4, 4\]"),
        (torch.ones(1, 5, 4), r"got \[1, 5, 4\]"),
        (torch.ones(5, 4).int(), r"expected shape \[5, 1\] for the exponents of a token and four times 128 k"),
        (torch.ones(5).to(torch.float8_e8m0fnu), r"expected shape \[5, 4\] for a scale per token and 128 k, got \[5\]"),
        (torch.ones(5, 4).bfloat16(), r"\(x_scale\): expected float32, int32 or float8_e8m0fnu, got bfloat16"),
        (torch.ones(5).int(), r"expected shape \[5, 1\] for the exponents .*, got \[5\]"),
        (torch.tensor(127).int(), r"expected shape \[5, 1\] for the exponents .*, got \[\]"),
        (torch.tensor([0x7F7E7D7C]).int(), r"expected shape \[5, 1\] for the exponents .*, got \[1\]"),
    ],
)  # fmt: skip
def test_wrong_scales_are_named(x_scale, message):
    x, weight = builders.block_lhs(1, 5, 400)[0], builders.weight_parts(1, 64, 400).packed
    with pytest.raises((TypeError, ValueError), match=message):
        jitgemm.gemm_w4a8_bf16_nt((x, x_scale), weight, torch.empty(5, 64, dtype=torch.bfloat16))
    with pytest.raises((TypeError, ValueError), match=message):
        jitgemm.gemm_w4a8_reference((x, x_scale), weight)
    with pytest.raises((TypeError, ValueError), match=message):
        jitgemm.m_grouped_gemm_w4a8_reference((x, x_scale), weight_of_experts(3, 64, 400), torch.zeros(4).int())


@pytest.mark.parametrize("step, overlaps", [(40, False), (60, True)])
def test_scales_that_reach_into_the_output_overlap_it(step, overlaps):
    weight, x = builders.weight_parts(1, 64, 400).packed, builders.block_lhs(1, 5, 400)[0]
    rows = torch.ones(5, 256)
    x_scale, out = rows.as_strided((5, 4), (256, step)), rows[:, 128:192]  # the last scale of a row in column 3 * step
    if not overlaps:
        jitgemm.gemm_w4a8_nt((x, x_scale), weight, out)
        assert bool((rows[:, :128] == 1).all()) and bool((rows[:, 192:] == 1).all())
        return
    with pytest.raises(ValueError, match=r"out: expected memory of its own, got a tensor that overlaps lhs\[1\]"):
        jitgemm.gemm_w4a8_nt((x, x_scale), weight, out)


def test_no_zero_points_beside_them():
    weight, (x, x_scale) = builders.weight_parts(1, 64, 400).packed, builders.block_lhs(1, 5, 400, "s8")
    lhs = x, x_scale, torch.zeros(5, dtype=torch.int32)
    message = r"lhs\[2\] \(x_zero\): expected None with a scale per token and 128 k"
    with pytest.raises(ValueError, match=message):
        jitgemm.gemm_w4a8_bf16_nt(lhs, weight, torch.empty(5, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=message):
        jitgemm.gemm_w4a8_reference(lhs, weight)


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lhs, form, invariant, experts", builders.third(builders.LHS_DTYPES, FORMATS, [False, True], [0, 60])
)
def test_every_problem_gets_a_legal_kernel_that_promotes_each_record(lhs, form, invariant, experts):
    """Exponents change nothing of it but how it reads scales."""
    group_size, zero_point, scale_type, offset = form
    fmt = WeightFormat(group_size, zero_point, scale_type, "any", offset)
    problem = Problem(1, 4096, 4096, lhs, fmt, batch_invariant=invariant, experts=experts, lhs_group=128)
    for m, e8m0 in itertools.product((1, 24, 500, 9000), (False, True)):
        of_m = replace(problem, m=m, lhs_e8m0=e8m0)
        spec = choose(of_m, H200)
        assert spec.lhs_group == 128 and illegal(spec, H200) is None and promote_records(spec) == 1
        assert KernelSpec.from_label(spec.label) == spec == kernel_named(spec.label, of_m, H200)
        assert spec == replace(choose(replace(of_m, lhs_e8m0=False), H200), lhs_e8m0=e8m0)
        for other in (replace(spec, lhs_group=0, lhs_e8m0=False), replace(spec, lhs_e8m0=not e8m0)):
            with pytest.raises(ValueError, match="kernel: expected one for these operands"):
                kernel_named(other.label, of_m, H200)
    options = dict(batch_invariant=invariant, experts=experts, lhs_group=128, lhs_e8m0=True)
    found = kernels_for(4096, 4096, lhs, fmt, H200, 512, **options)
    assert found and all(spec.lhs_group == 128 and spec.lhs_e8m0 for spec in found)


def test_groups_that_activations_do_not_have_are_refused():
    with pytest.raises(ValueError, match="lhs_group: expected 128, or 0 for a scale per token, got 64"):
        Problem(1, 64, 128, "s8", WeightFormat(128, False, "bf16"), lhs_group=64)
    with pytest.raises(ValueError, match="lhs_e8m0: expected lhs_group 128 with it, got 0"):
        Problem(1, 64, 128, "s8", WeightFormat(128, False, "bf16"), lhs_e8m0=True)


def test_shared_memory_holds_each_stage_s_scales_and_none_for_the_epilogue():
    spec = KernelSpec("e4m3", WeightFormat(128, False, "bf16"), 64, 128, stages=4, warpgroups_k=2)
    extra = smem_bytes(replace(spec, lhs_group=128)) - smem_bytes(spec)
    assert extra == 4 * (4 * 2 * 64) - 4 * (2 * 64)


def test_int8_per_channel_has_no_limit_of_k():
    fmt = WeightFormat(0, False, "fp32")
    assert choose(Problem(1, 64, 2**21, "s8", fmt, lhs_group=128), H200).lhs_group == 128


# ---- what a launch is given -----------------------------------------------------------------------------------------


STRIDED = {
    "rows": (torch.ones(5, 2), (2, 1)),
    "columns": (torch.ones(2, 8).T[:5], (1, 8)),
    "packed exponents": (torch.zeros(5, 3, dtype=torch.int32)[:, ::3], (3, 3)),  # K is less than 512
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_of_scales_reach_the_parameters(layout, monkeypatch):
    launches, (x_scale, strides) = without_driver(monkeypatch), STRIDED[layout]
    operands = gemm_operands()._replace(x=builders.block_lhs(1, 5, K)[0], x_scale=x_scale, x_zero=None)
    plan = gemms.GemmLaunch(operands)
    assert plan.spec.lhs_group == 128 and plan.spec.lhs_e8m0 == (layout == "packed exponents")
    plan.launch(operands)
    values = parameters(gemms.ARGUMENTS, launches)
    assert (values["lhs_scale"], values["lhs_zero"]) == (x_scale.data_ptr(), 0)
    assert (values["lhs_scale_stride"], values["lhs_zero_stride"]) == strides


@pytest.mark.parametrize("layout", ["rows", "columns of each expert"])
def test_every_masked_row_s_scale_is_at_its_strides(layout, monkeypatch):
    launches = without_driver(monkeypatch)
    experts, rows = 3, 4
    weight, x = weight_of_experts(experts, N, K), torch.zeros(experts * rows, K, dtype=torch.int8)
    whole = torch.arange(experts * rows * 2, dtype=torch.float32)
    x_scale = whole.view(3, 4, 2) if layout == "rows" else whole.view(3, 2, 4).transpose(1, 2)
    operands = Gemm(x, x_scale, None, weight, torch.empty(experts * rows, N), None)
    groups = Groups(torch.zeros(experts, dtype=torch.int32), None, rows, 5)
    gemms.GemmLaunch(operands._replace(groups=groups)).launch(operands._replace(groups=groups))
    values = parameters(gemms.GROUPED_ARGUMENTS, launches)
    for row in range(experts * rows):  # as block_scale_of() in include/jitgemm/gemm/producer.cuh
        at = row * values["lhs_scale_stride"] + row // rows * values["scale_expert_step"]
        found = [whole[(at + block * values["lhs_zero_stride"]) % 2**64] for block in range(2)]
        assert found == x_scale[row // rows, row % rows].tolist()


def parameters(block, launches: list) -> dict[str, int]:
    [(_, (*_, packed))] = launches
    return dict(zip(block.fields, struct.unpack("<" + "".join(block.fields.values()), packed)))
