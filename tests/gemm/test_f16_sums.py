"""Sums in f16 without a GPU: the arithmetic within its bound, kernels in the emulator, and what calls and choices
say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import mxfp4
import pytest
import torch
from emulator.launch import emulate
from emulator.problems import assert_within_the_bound, problem
from f16_values import F16_TIERS, extreme, largest_mx, used
from marks import emulated
from tensor_core import TensorCore

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn import W4A8Linear
from jitgemm.nn.layers.packed import put_sums
from jitgemm.select.choose import choose, kernel_named, kernels_for
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import illegal, legal_kernels
from jitgemm.weight.f16_sums import row_powers
from jitgemm.weight.mxfp4 import MOST_IN_RECORD
from jitgemm.weight.state import TENSORS

H200 = DEVICES["h200"]
GROUPS = (32, 64, 128, 256)
G128 = WeightFormat(128, False, "bf16", "e4m3")
tiers = pytest.mark.parametrize("tier", F16_TIERS)


# ---- the arithmetic --------------------------------------------------------------------------------------------------


FORMS = [(size, codes) for size in GROUPS for codes in ("any", "e4m3", "zero points")] + [
    ("mxfp4", t) for t in F16_TIERS
]


def drawn(kind: str, of: int | str, codes: str, k: int) -> builders.WeightParts | mxfp4.Parts:
    """Of int4 in groups, or of an MXFP4 tier."""
    if of == "mxfp4":
        return largest_mx(1, 16, k, codes) if kind == "largest" else mxfp4.narrow(2, 32, k, codes)
    form = dict(zero_point=True) if codes == "zero points" else dict(codes=codes)
    if kind not in ("extreme", "largest"):
        return builders.weight_parts(2, 32, k, of, scales="negative", **form)
    parts = extreme(2, 32, k, of, **form)
    if kind == "largest":
        parts = replace(parts, q=torch.full_like(parts.q, {"any": -8, "e4m3": 7}.get(codes, 15)))
        parts = replace(parts, scale=torch.full_like(parts.scale, 1.9921875))
        parts = replace(parts, zero=None if parts.zero is None else torch.zeros_like(parts.zero))
    return parts


def in_f16(core: TensorCore, lhs: tuple, parts: builders.WeightParts | mxfp4.Parts, first: int = 8) -> torch.Tensor:
    if isinstance(parts, mxfp4.Parts):
        return core.mxfp4_gemm_in_f16(lhs, parts.packed, first=first)
    return core.gemm_in_f16(lhs, parts, first=first)


KINDS = ["plain", "outliers", "positive", "last step", "extreme", "largest"]


@pytest.mark.parametrize("kind, form", builders.two_thirds(KINDS, FORMS))
def test_the_arithmetic_is_within_the_bound(kind, form):
    k, parts, first = 1696, drawn(kind, *form, 1696), (1, 5, 8)[FORMS.index(form) % 3]
    mean, factor = "positive" if kind == "positive" else "zero", 500 if kind == "last step" else 1
    lhs = builders.lhs(3, 8, k, mean=mean, outliers=kind == "outliers", last_step=factor)
    if kind == "largest":
        lhs = (torch.full((8, k), 448.0).to(torch.float8_e4m3fn), lhs[1])
    for core in (TensorCore(), TensorCore(sign_fill=True), TensorCore(normal=True)):
        assert used(in_f16(core, lhs, parts, first), lhs, parts.packed) <= 1


@pytest.mark.parametrize("of, share", [(32, 0.4), (64, 0.25), (128, 0.1), (256, 0.1), *((t, 0.05) for t in F16_TIERS)])
def test_sums_that_round_the_same_way_at_each_step_come_near_the_bound(of, share):
    x = torch.arange(8.0, 16)[:, None].expand(8, 1024).to(torch.float8_e4m3fn).contiguous()
    lhs, shares, usual = (x, torch.ones(8, 1)), [], []
    for code in (5, 7) if of in GROUPS else (3, 5):
        if of in GROUPS:
            parts = builders.weight_parts(2, 64, 1024, of, codes="e4m3")
            scale = torch.linspace(1, 1.9921875, 64).bfloat16()[:, None].expand(parts.scale.shape).contiguous()
            parts = replace(parts, q=torch.full_like(parts.q, code), scale=scale)
            weight, out = parts.packed, TensorCore().gemm_in_f16(lhs, parts)
        else:
            parts = mxfp4.narrow(2, 64, 1024, of)
            weight = mxfp4.Parts(torch.full_like(parts.codes, code), parts.scales.clamp(100, 106)).packed
            weight = weight.regrouped(mxfp4.TIERS[of])
            out = TensorCore().mxfp4_gemm_in_f16(lhs, weight)
        shares.append(used(out, lhs, weight))
        ref, limit = gemm_w4a8_bound(lhs, weight, out_dtype=out.dtype)
        usual.append(float(((out.double() - ref).abs() / limit).max()))
    assert share <= max(shares) <= 1
    assert of != 32 or max(usual) > 1  # the bound of sums in fp32 does not hold


# ---- powers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_type, least", [("bf16", 17), ("fp16", 14)])
def test_scales_that_f16_holds(scale_type, least):
    parts = builders.weight_parts(1, 72, 512, 128, codes="e4m3", scale_type=scale_type)
    dtype, bits = parts.scale.dtype, {"bf16": 7, "fp16": 10}[scale_type]
    largest, odd = 2 - 2.0**-bits, 1 + 2.0**-bits
    scale = torch.full((72, 4), largest, dtype=torch.float64)
    scale[:, 1] = -odd * 2.0 ** -(least - 1)
    scale[7] = 0
    parts = replace(parts, scale=scale.to(dtype))
    powers, lost = row_powers(parts.packed.packed)
    assert lost == [0] and powers.tolist() == [1.0 if row == 7 or row >= 72 else 2.0 for row in range(128)]
    for lost in (odd * 2.0**-least, 6e4 if scale_type == "fp16" else 3e38):
        scale[5, 2] = lost
        with pytest.raises(ValueError, match="sums: expected 'f32' for a weight whose scales .* 1 of its rows"):
            replace(parts, scale=scale.to(dtype)).packed.with_f16_sums()
    scale[5, 2] = 2.0 ** -(least + bits - 1)  # fewer bits reach further
    assert row_powers(replace(parts, scale=scale.to(dtype)).packed.packed)[1] == [0]


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("value, held", [(1e-39, True), (1e-8, True), (1.0, True), (1e6, False)])
def test_scales_of_groups_of_zeros_may_be_rounded_but_not_be_infinite(value, held, zero_point):
    parts = builders.weight_parts(1, 64, 512, 128, zero_point=zero_point)
    parts.q[9, 128:256] = 5 if zero_point else 0
    if zero_point:
        parts.zero[9, 1] = 5
    expected = row_powers(parts.packed.packed)[0]
    parts.scale[9, 1] = value
    powers, lost = row_powers(parts.packed.packed)
    assert lost == [0 if held else 1] and (not value < 1 or torch.equal(powers, expected))


def test_a_weight_of_f16_sums_is_another_over_the_same_records():
    parts = builders.weight_parts(1, 64, 512, 128, codes="e4m3")
    weight = parts.packed
    form = weight.with_f16_sums()
    assert (weight.sums, weight.channel_scale) == ("f32", None) and form.blocks is weight.blocks
    assert form.plan_key != weight.plan_key and form.ready and form.with_sums("f16") is form
    assert torch.equal(form.channel_scale, row_powers(weight.packed)[0])
    back = form.with_sums("f32")
    assert (back.plan_key, back.channel_scale, back.ready_at) == (weight.plan_key, None, weight.ready_at)
    assert form.state_dict().keys() == weight.state_dict().keys()
    assert jitgemm.W4Weight.from_state_dict(form.state_dict()).sums == "f32"
    again = form.with_tensors(*(getattr(form, name) for name in TENSORS))
    assert again.sums == "f16" and torch.equal(again.channel_scale, form.channel_scale)


def test_packers_make_weights_of_f16_sums():
    parts = builders.weight_parts(1, 64, 512, 128, codes="e4m3")
    form = jitgemm.pack_w4(parts.q, parts.scale, group_size=128, sums="f16")
    assert form.sums == "f16" and torch.equal(form.channel_scale, parts.packed.with_f16_sums().channel_scale)
    assert jitgemm.pack_w4(parts.q, parts.scale, group_size=128, sums="exact").sums == "exact"
    with pytest.raises(ValueError, match="sums: expected 'f32' except for .* got 'f16' for g128-bf16-o-any"):
        jitgemm.pack_w4(parts.q, parts.scale, offset=parts.scale, group_size=128, sums="f16")
    with pytest.raises(ValueError, match="sums: expected 'f32' except for .* got 'f16' for channel-bf16-e4m3"):
        builders.weight_parts(1, 64, 512, 0, codes="e4m3").packed.with_f16_sums()
    with pytest.raises(ValueError, match="sums: expected 'exact' for weights that meet int8 activations"):
        jitgemm.pack_w4(parts.q, parts.scale, group_size=128, lhs_dtype=torch.float8_e4m3fn, sums="exact")
    for sums, error in (("fp16", ValueError), (None, TypeError)):
        with pytest.raises(error, match=r"sums: expected one of \('f32', 'f16', 'exact'\), got"):
            jitgemm.pack_w4(parts.q, parts.scale, group_size=128, sums=sums)


@emulated
@pytest.mark.parametrize("how", ["seen", "marked"])
def test_powers_are_made_again_in_their_memory_after_the_records_were_written(monkeypatch, how):
    emulate(monkeypatch)
    parts = builders.weight_parts(1, 64, 512, 128, codes="e4m3")
    weight = parts.packed.with_f16_sums()
    larger = replace(parts, scale=parts.scale * 2.0**20)
    expected, address = row_powers(larger.packed.packed)[0], weight.channel_scale.data_ptr()
    lhs, out = builders.lhs(1, 20, 512), torch.empty(20, 64, dtype=torch.bfloat16)
    if how == "seen":
        weight.blocks.copy_(larger.packed.blocks)
    else:
        weight.blocks.data.copy_(larger.packed.blocks)
        weight.mark_ready()
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out, kernel="e4m3fast-g128-bf16-m24n64-s4-f16")
    assert torch.equal(weight.channel_scale, expected) and weight.channel_scale.data_ptr() == address
    ref, limit = gemm_w4a8_bound(lhs, weight)
    assert bool(((out.double() - ref).abs() <= limit).all())


def test_experts_have_their_part_of_the_powers():
    """Those that are held where others are not; a stack has the sums of its first one."""
    parts = [builders.weight_parts(e, 64, 512, 128, codes="e4m3") for e in range(3)]
    weight = jitgemm.W4Weight.stacked(3, lambda e: parts[e].packed.with_f16_sums())
    assert weight.sums == weight[1].sums == "f16"
    for e in (0, 2, -1):
        assert torch.equal(weight[e].channel_scale, parts[e].packed.with_f16_sums().channel_scale)
    weight[1].blocks.zero_()
    weight.follow_writes()
    assert torch.equal(weight[1].channel_scale, torch.ones(64))
    parts[1].scale[9, 1] = 3e38
    weight = jitgemm.W4Weight.stacked(3, lambda e: parts[e].packed)
    assert torch.equal(weight[0].with_f16_sums().channel_scale, parts[0].packed.with_f16_sums().channel_scale)
    for given in (weight, weight[1]):
        with pytest.raises(ValueError, match="1 of its rows"):
            given.with_f16_sums()


@tiers
def test_powers_of_a_weight_that_is_held(tier):
    weight = mxfp4.narrow(1, 72, 512, tier).packed
    powers, lost = row_powers(weight.packed)
    assert lost == [0]
    form = weight.with_f16_sums()
    assert form.plan_key != weight.plan_key and torch.equal(form.channel_scale, powers)
    lhs = builders.lhs(1, 5, 512)
    usual, other = (torch.empty(5, 72, dtype=torch.bfloat16) for _ in range(2))
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, usual)
    jitgemm.gemm_w4a8_bf16_nt(lhs, form, other)
    assert builders.same_bits(usual, other)


def test_a_base_a_row_is_refused_as_scales_per_row_are_and_layers_add_up_in_fp32():
    parts = mxfp4.narrow(1, 72, 512, "row")
    weight = parts.packed
    refused = pytest.raises(ValueError, match="sums: expected 'f32' except for .* got 'f16' for mx-channel-bf16")
    with refused:
        weight.with_f16_sums()
    with refused:
        jitgemm.pack_mxfp4(parts.codes, parts.scales, sums="f16")
    layer = W4A8Linear(weight)
    with refused:
        layer.sums = "f16"
    with pytest.warns(UserWarning, match="call: 1 weights are added up in fp32, as sums in f16 cannot be had"):
        put_sums({"layer": layer}, "f16", "call")
    assert layer.sums == "f16" and layer.call_sums == "f32"


def one_row(tier: str, exponent: int) -> mxfp4.Parts:
    """Row 5 has a group whose scale is 2^exponent of the base's largest."""
    parts = mxfp4.narrow(1, 16, 512, tier)
    parts.codes[5, :64], parts.scales[5, :2] = 7, 118
    parts.codes[5, 64:] &= 8
    parts.codes[5, 32:64] = 1
    parts.scales[5, 1] += exponent
    return parts


@pytest.mark.parametrize("tier, least", [("block", -6), ("group", -20)])
def test_how_far_scales_may_be_apart(tier, least):
    held, lost = one_row(tier, least), one_row(tier, least - 1)
    assert held.packed.format.group_size == lost.packed.format.group_size == mxfp4.TIERS[tier]
    assert row_powers(held.packed.packed)[1] == [0] and row_powers(lost.packed.packed)[1] == [1]
    with pytest.raises(ValueError, match="1 of its rows have scales that are too small"):
        jitgemm.pack_mxfp4(lost.codes, lost.scales, sums="f16")
    layer = W4A8Linear(held.packed)
    layer.sums = "f16"
    assert layer.call_sums == "f16" and torch.equal(layer.channel_scale, row_powers(layer.weight.packed)[0])


def test_records_whose_sums_may_be_too_large_are_not_held():
    parts = largest_mx(1, 16, 1024, "block")
    assert row_powers(parts.packed.packed)[1] == [0]
    parts.codes[3, 128:256] = 6 + (torch.arange(128) % 2).to(torch.uint8)
    assert 128 * 384 > MOST_IN_RECORD and row_powers(parts.packed.packed)[1] == [1]


# ---- kernels in the emulator -----------------------------------------------------------------------------------------

KERNELS = {
    "e4m3fast-g128-bf16-m32n64-s6-f16": (20, 200, 2336),
    "e4m3-g128-bf16-m16n64-k1x2s-s5-f16": (30, 136, 3104),
    "e4m3fast-g64-fp16-tofp32-m24n128-s4-f16": (30, 200, 1184),
    "e4m3fast-g32-bf16-tofp16-m16n64-s4-f16": (20, 136, 1312),
    "e4m3fast-g256-bf16-m16n64-k1x3-s4-f16": (20, 136, 1696),
    "e4m3-g32-fp32-m8n128-s4-f16": (11, 136, 288),
    "e4m3fast-g128-bf16-m176n128-s5-f16": (190, 136, 1184),
    "e4m3fast-g64-bf16-m192n128-s5-f16": (70, 72, 544),
    "e4m3-g128z-bf16-m32n64-s6-f16": (20, 200, 2336),
    "e4m3-g32z-bf16-m16n64-s4-f16": (20, 136, 1312),
    "e4m3mx-g128-bf16-m32n64-s6-f16": (20, 200, 2336),
    "e4m3mx-g128-bf16-tofp32-m24n128-k1x2s-s4-f16": (30, 136, 1184),
    "e4m3mx-g32-bf16-m16n64-s4-f16": (20, 136, 1312),
    "e4m3mx-g32-bf16-m176n128-s4-f16": (180, 72, 544),
}
"""Kernels, and m, n and k for them: no multiple of the tile, runs of eight records and fewer, an odd record last."""


def summed(label: str, m: int, n: int, k: int) -> tuple[KernelSpec, Gemm, Any]:
    """A kernel, operands, and what their weight was packed from."""
    spec = KernelSpec.from_label(label)
    fmt = spec.format
    if fmt.code == "e2m1":
        (tier,) = (tier for tier, size in mxfp4.TIERS.items() if size == fmt.group_size)
        operands = problem(replace(spec, format=WeightFormat(128, False, "bf16")), m, n, k)
        parts = mxfp4.narrow(4, n, k, tier)
    elif fmt.scale_type == "bf16":
        operands = problem(spec, m, n, k)
        parts = extreme(4, n, k, fmt.group_size, fmt.order, zero_point=fmt.zero_point)
    else:
        operands = problem(spec, m, n, k)
        parts = builders.weight_parts(4, n, k, fmt.group_size, codes=fmt.order, scales="negative")
        dtype = {"fp16": torch.float16, "fp32": torch.float32}[fmt.scale_type]
        parts = replace(parts, scale=parts.scale.to(dtype))  # bf16's bits
    return spec, operands._replace(weight=parts.packed.with_f16_sums()), parts


@emulated
@pytest.mark.parametrize("label", KERNELS)
def test_a_kernel_is_within_the_bound(monkeypatch, label):
    emulator = emulate(monkeypatch)
    spec, operands, _ = summed(label, *KERNELS[label])
    assert operands.weight.sums == "f16"
    GemmLaunch(operands, spec).launch(operands)
    assert emulator.launched == [label]
    assert_within_the_bound(operands)


@emulated
@pytest.mark.parametrize("label, k, first", [
    # Ten records: eight of the nine with one behind, the rest.
    ("e4m3fast-g64-fp16-tofp32-m24n128-s4-f16", 1184, 8), ("e4m3mx-g128-bf16-tofp32-m24n128-s4-f16", 1184, 8),
    ("e4m3mx-g32-bf16-tofp32-m24n128-s4-f16", 1184, 8),
    # 13: two, then eight, of the eleven with two behind.
    ("e4m3fast-g128-fp16-tofp32-m24n128-s4-f16", 1568, 2),
    # Ten, not ahead: two, eight.
    ("e4m3fast-g32-fp16-tofp32-m144n128-s4-f16", 1184, 2),
])  # fmt: skip
def test_a_kernel_has_the_bits_of_the_arithmetic(monkeypatch, label, k, first):
    emulate(monkeypatch)
    spec, operands, parts = summed(label, 20, 128, k)
    operands, lhs = operands._replace(bias=None), (operands.x, operands.x_scale)
    GemmLaunch(operands, spec).launch(operands)
    assert torch.equal(operands.out, in_f16(TensorCore(), lhs, parts, first))


# ---- calls -----------------------------------------------------------------------------------------------------------


@emulated
def test_a_call_takes_a_kernel_of_either_kind(monkeypatch):
    emulator = emulate(monkeypatch)
    parts = extreme(1, 256, 512, 32, "e4m3")
    lhs, out = builders.lhs(1, 150, 512), torch.empty(150, 256, dtype=torch.bfloat16)
    chosen = choose(Problem(150, 256, 512, "e4m3", parts.packed.format, sums="f16"), H200)
    label = "e4m3fast-g32-bf16-m80n64-s6-f16"
    weight = parts.packed
    for kernel in (None, label):
        jitgemm.gemm_w4a8_bf16_nt(lhs, weight.with_f16_sums(), out.zero_(), kernel=kernel)
        assert used(out, lhs, parts.packed) <= 1
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out)
    assert emulator.launched[:2] == [chosen.label, label] and not emulator.launched[2].endswith("f16")
    with pytest.raises(ValueError, match="kernel: expected one that adds up as the call's sums='f32' allows"):
        jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out, kernel=label)


@pytest.mark.parametrize("lhs", ["s8", "block"])
def test_activations_that_are_not_added_up_in_f16(lhs):
    weight = builders.weight_parts(1, 64, 512, 128).packed.with_f16_sums()
    given = builders.block_lhs(1, 5, 512) if lhs == "block" else builders.lhs(1, 5, 512, lhs)
    message = "rhs.sums: expected 'f32' except for e4m3 with a scale per token, .* got 'f16' with "
    message += "int8" if lhs == "s8" else "float8_e4m3fn and a scale per 128 k"
    with pytest.raises(ValueError, match=message):
        jitgemm.gemm_w4a8_bf16_nt(given, weight, torch.empty(5, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=message):
        gemm_w4a8_bound(given, weight)
    with pytest.raises(ValueError, match="rhs.sums: expected 'exact' for int8 activations alone"):
        jitgemm.gemm_w4a8_nt(builders.lhs(1, 5, 512), weight.with_sums("exact"), torch.empty(5, 64))


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", GROUPS)
def test_both_kinds_are_considered_and_wide_tiles_add_up_in_f16(group_size):
    fmt = replace(G128, group_size=group_size)
    both, usual = legal_kernels("e4m3", fmt, H200, sums="f16"), legal_kernels("e4m3", fmt, H200)
    assert {spec for spec in both if spec.sums == "f32"} == set(usual)
    assert all(illegal(spec, H200) is None for spec in both)
    chosen = {m: choose(Problem(m, 4096, 4096, "e4m3", fmt, sums="f16"), H200) for m in (1, 16, 1024, 4096)}
    assert chosen[4096].sums == chosen[1024].sums == "f16"
    for tier in F16_TIERS:
        mx = replace(
            Problem(4096, 4096, 4096, "e4m3", fmt, sums="f16"), format=mxfp4.narrow(1, 16, 1024, tier).packed.format
        )
        assert choose(mx, H200).sums == "f16"
    for spec in kernels_for(4096, 4096, "e4m3", fmt, H200, 4096, sums="f16"):
        assert KernelSpec.from_label(spec.label) == spec
        assert kernel_named(spec.label, Problem(1, 4096, 4096, "e4m3", fmt, sums="f16"), H200) == spec


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_batch_invariant_calls_add_up_alike_for_all_m(m):
    problems = [Problem(each, 4096, 4096, "e4m3", G128, batch_invariant=True, sums="f16") for each in (8, m)]
    orders = {(spec.split_k, spec.warpgroups_k, spec.sums) for spec in (choose(each, H200) for each in problems)}
    assert len(orders) == 1


@pytest.mark.parametrize("change", [
    dict(warpgroups_k=2), dict(token_halves=2), dict(lhs="s8"), dict(lhs_group=128), dict(format=WeightFormat(128, False, "bf16", offset=True)),
    dict(format=WeightFormat(0, False, "fp32", "e4m3")),
])  # fmt: skip
def test_kernels_that_there_are_not(change):
    spec = KernelSpec("e4m3", G128, 128, 128, 4, sums="f16")
    assert illegal(spec, H200) is None and "sums in f16" in illegal(replace(spec, **change), H200)


WIDE = (
    "e4m3fast-g128-bf16-m128n128-s7-f16", "e4m3fast-g128-bf16-m176n128-s5-f16", "e4m3fast-g128-bf16-m192n128-s5-f16",
    "e4m3fast-g64-bf16-m192n128-s4-f16", "e4m3fast-g32-bf16-m176n128-s4-f16", "e4m3-g128-fp32-tofp32-m176n128-s4-f16",
    "e4m3-g128z-bf16-m128n128-s7-f16", "e4m3-g128z-bf16-m176n128-s5-f16", "e4m3-g32z-bf16-m160n128-s4-f16",
    "e4m3-g32z-bf16-m128n128-s7-f16-e64", "e4m3-g32z-bf16-m128n128-k1x2-s5-f16",
    "e4m3fast-g128-bf16-m192n128-s5-f16-e64", "e4m3fast-g32-bf16-m176n128-mc2lhs-s4-f16-e64",
    "e4m3mx-g128-bf16-m128n128-s7-f16", "e4m3mx-g128-bf16-m176n128-s5-f16", "e4m3mx-g32-bf16-m176n128-s4-f16",
    "e4m3mx-g32-bf16-m128n128-k1x2-s5-f16-e64",
    "e4m3mx-g128-bf16-m176n128-s5-f16-e64", "e4m3mx-g32-bf16-m160n128-mc2lhs-s4-f16-e64",
)  # fmt: skip


@pytest.mark.nvrtc
def test_wide_kernels_spill_nothing_and_their_multiplies_overlap(compiles_well):
    specs = list(map(KernelSpec.from_label, WIDE))
    assert [spec.label for spec in specs if illegal(spec, H200)] == []
    compiles_well(specs)
