"""int8's sums by parts without a GPU: kernels in the emulator within the bound, and what calls and choices say."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
import torch
from emulator.launch import emulate
from emulator.problems import assert_outside_untouched, problem, share_of_bound
from marks import emulated

import jitgemm
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.choose import choose, kernel_named
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import legal_kernels

H200 = DEVICES["h200"]
OWN = WeightFormat(128, False, "bf16", "s8")

KERNELS = {
    "s8fast-g128-bf16-tofp32-m16n64-s7-parts": (16, 4224),  # two runs and an odd record
    "s8fast-g128-fp32-tofp32-m80n64-s4-parts": (70, 2176),
    "s8fast-g128-fp16-m80n128-k1x2s-s4-parts": (100, 1056),
    "s8fast-g128-bf16-tofp32-m96n64-k2x2s-s3-parts": (97, 1952),  # a warpgroup without a record at the end
    "s8fast-g128-bf16-m176n128-s5-parts": (190, 544),
    "s8-g128z-bf16-tofp32-m16n64-s7-parts": (16, 4224),
    "s8-g128z-bf16-m160n128-s5-parts": (170, 544),
}


@emulated
@pytest.mark.parametrize("label", KERNELS)
def test_kernels_are_within_the_bound(monkeypatch, label):
    emulator = emulate(monkeypatch)
    spec = KernelSpec.from_label(label)
    m, k = KERNELS[label]
    operands = problem(spec, m, 136, k)
    GemmLaunch(operands, spec).launch(operands)
    assert emulator.launched == [label]
    assert_outside_untouched(operands.out)
    assert share_of_bound(operands) <= 1
    assert (
        spec.out == "bf16" or share_of_bound(operands._replace(weight=operands.weight.with_sums("exact"))) > 1
    )  # it did add up by parts


@emulated
@pytest.mark.parametrize("sign", (-1, 1))
def test_the_largest_sums_are_floats_still(monkeypatch, sign):
    """Two records of the largest codes and activations reach 2^22 in units of codes times 16, either end."""
    emulate(monkeypatch)
    spec = KernelSpec.from_label("s8fast-g128-bf16-tofp32-m16n64-s7-parts")
    operands = problem(spec, 16, 64, 512)
    q = torch.full((64, 512), -8, dtype=torch.int8)
    weight = jitgemm.pack_w4(q, torch.ones(64, 4).bfloat16(), group_size=128, lhs_dtype=torch.int8)
    x = torch.full((16, 512), -128 if sign > 0 else 127, dtype=torch.int8)
    operands = operands._replace(x=x, x_scale=torch.ones(16), x_zero=None, weight=weight, bias=None)
    GemmLaunch(operands, spec).launch(operands)
    assert torch.equal(operands.out, torch.full((16, 64), float(x[0, 0]) * -8 * 512))


@emulated
def test_scales_of_all_sizes_and_signs(monkeypatch):
    emulate(monkeypatch)
    spec = KernelSpec.from_label("s8fast-g128-fp32-tofp32-m16n64-s7-parts")
    operands, k = problem(spec, 16, 64, 2304), 2304
    parts = builders.weight_parts(2, 64, k, 128, codes="s8", scale_type="fp32", scales="negative")
    g = builders.generator(3)
    scale = parts.scale * torch.exp2(-torch.randint(0, 30, parts.scale.shape, generator=g).float())
    scale[::7], scale[:, 5] = 0, 0
    operands = operands._replace(weight=replace(parts, scale=scale).packed)
    GemmLaunch(operands, spec).launch(operands)
    assert share_of_bound(operands) <= 1 and not bool(operands.out[:, ::7].sub(operands.bias[::7]).any())


# ---- choices and calls -----------------------------------------------------------------------------------------------


def test_wide_tiles_add_up_by_parts_where_that_is_allowed_and_not_in_exact_calls():
    wide = Problem(4096, 4096, 4096, "s8", OWN)
    label = choose(wide, H200).label
    assert choose(wide, H200).sums == "parts" and kernel_named(label, wide, H200).label == label
    with pytest.raises(ValueError, match="adds up as the call's sums='exact'"):
        kernel_named(label, replace(wide, sums="exact"), H200)
    assert choose(replace(wide, sums="exact"), H200).sums == "f32"
    zeros = replace(wide, format=replace(OWN, zero_point=True, order="any"))
    assert choose(zeros, H200).sums == "parts"
    assert choose(replace(zeros, sums="exact"), H200).sums == "f32"
    for other in (
        replace(wide, format=replace(OWN, order="any")), replace(wide, format=replace(OWN, group_size=64)),
        replace(wide, format=replace(OWN, group_size=0)), replace(wide, lhs_group=128),
        replace(zeros, format=replace(zeros.format, offset=True)), replace(zeros, lhs="e4m3", sums="f32"),
    ):  # fmt: skip
        assert choose(other, H200).sums == "f32"
    assert all(spec.sums == "f32" for spec in legal_kernels("s8", OWN, H200, sums="exact"))
    assert {spec.sums for spec in legal_kernels("s8", OWN, H200)} == {"f32", "parts"}


@emulated
def test_exact_calls_take_kernels_that_lose_nothing(monkeypatch):
    emulate(monkeypatch)
    operands = problem(KernelSpec.from_label("s8fast-g128-bf16-m96n64-s4"), 300, 4096, 256)
    assert GemmLaunch(operands).spec.sums == "parts"
    assert GemmLaunch(operands._replace(weight=operands.weight.with_sums("exact"))).spec.sums == "f32"
