"""MXFP4 with sums in f16 without a GPU: which weights it holds, the arithmetic within its bound, kernels in the emulator."""

from __future__ import annotations

from dataclasses import replace

import builders
import mxfp4
import pytest
import torch
from emulator.launch import COMPILER, emulate, plant
from tensor_core import TensorCore
from emulator.problems import assert_outside_untouched, problem

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.jit.cache import KernelCache
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn import W4A8Experts, W4A8Linear
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import illegal
from jitgemm.weight.f16_sums import MOST_IN_RECORD, row_powers, with_powers

H200 = DEVICES["h200"]
tiers = pytest.mark.parametrize("tier", mxfp4.TIERS)
emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def used(out: torch.Tensor, lhs: tuple, weight: jitgemm.W4Weight, bias: torch.Tensor | None = None) -> float:
    """The largest error over the bound."""
    ref, limit = gemm_w4a8_bound(lhs, weight, bias=bias, out_dtype=out.dtype, sums="f16")
    return float(((out.double() - ref).abs() / limit.clamp(min=1e-300)).nan_to_num(nan=torch.inf).max())


def largest(tier: str, k: int = 1024) -> mxfp4.Parts:
    """Sums of nearly all that f16 holds: codes of one sign, and scales that are as large as they may be."""
    shape = 16, k
    codes = torch.full(shape, 7, dtype=torch.uint8)
    scales = torch.full((16, k // 32), 110, dtype=torch.uint8)
    if tier != "group":  # a record's limit is about 37,000, of 128 codes of at most 384
        codes[:, ::2] = 5
    if tier == "group":
        scales[0, 0] = 93
    if tier == "block":
        scales[0, :4] = 95
    return mxfp4.Parts(codes, scales)


@tiers
def test_tiers_are_those_meant(tier):
    assert mxfp4.narrow(1, 16, 1024, tier).packed.format.group_size == mxfp4.TIERS[tier]
    assert largest(tier).packed.format.group_size == mxfp4.TIERS[tier]


@tiers
@pytest.mark.parametrize("first", [1, 5, 8])
@pytest.mark.parametrize("kind", ["plain", "outliers", "positive", "last step", "largest"])
def test_the_arithmetic_is_within_the_bound(kind, tier, first):
    k = 1696
    parts = largest(tier, k) if kind == "largest" else mxfp4.narrow(2, 32, k, tier)
    mean, factor = "positive" if kind == "positive" else "zero", 500 if kind == "last step" else 1
    lhs = builders.lhs(3, 8, k, mean=mean, outliers=kind == "outliers", last_step=factor)
    if kind == "largest":
        lhs = torch.full((8, k), 448.0).to(torch.float8_e4m3fn), lhs[1]
    weight = parts.packed
    for core in (TensorCore(), TensorCore(sign_fill=True), TensorCore(normal=True)):
        assert used(core.mxfp4_gemm_in_f16(lhs, weight, first=first), lhs, weight) <= 1


@tiers
def test_sums_that_round_the_same_way_at_each_step_come_near_the_bound(tier):
    parts = mxfp4.narrow(2, 64, 1024, tier)
    x = torch.arange(8.0, 16)[:, None].expand(8, 1024).to(torch.float8_e4m3fn).contiguous()
    lhs, shares = (x, torch.ones(8, 1)), []
    for code in (3, 5):
        weight = mxfp4.Parts(torch.full_like(parts.codes, code), parts.scales.clamp(100, 106)).packed
        shares.append(used(TensorCore().mxfp4_gemm_in_f16(lhs, weight), lhs, weight))
    assert 0.05 <= max(shares) <= 1


# ---- which weights ---------------------------------------------------------------------------------------------------


@tiers
def test_powers_of_a_weight_that_is_held(tier):
    weight = mxfp4.narrow(1, 72, 512, tier).packed
    powers, lost = row_powers(weight.packed)
    assert lost == [0]
    if tier == "row":
        assert torch.equal(powers[:72], weight.channel_scale[:72].float()) and powers.dtype == torch.float32
    form = with_powers(weight)
    assert form.plan_key != weight.plan_key and torch.equal(form.channel_scale, powers)
    lhs = builders.lhs(1, 5, 512)
    usual, other = (torch.empty(5, 72, dtype=torch.bfloat16) for _ in range(2))
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, usual)
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, other, sums="f16")
    assert builders.same_bits(usual, other)


def one_row(tier: str, exponent: int) -> mxfp4.Parts:
    """Row 5 has a group whose scale is 2^exponent of the base's largest."""
    parts = mxfp4.narrow(1, 16, 512, tier)
    parts.codes[5, :64], parts.scales[5, :2] = 7, 118
    parts.codes[5, 64:] &= 8
    parts.codes[5, 32:64] = 1
    parts.scales[5, 1] += exponent
    return parts


@pytest.mark.parametrize("tier, least", [("row", -6), ("block", -6), ("group", -20)])
def test_how_far_scales_may_be_apart(tier, least):
    held, lost = one_row(tier, least), one_row(tier, least - 1)
    assert held.packed.format.group_size == lost.packed.format.group_size == mxfp4.TIERS[tier]
    assert row_powers(held.packed.packed)[1] == [0] and row_powers(lost.packed.packed)[1] == [1]
    with pytest.raises(ValueError, match="1 of its rows have scales that are too small"):
        jitgemm.prepare_f16_sums(lost.packed)
    layer = W4A8Linear(held.packed)
    layer.sums = "f16"
    assert layer.call_sums == "f16" and torch.equal(layer.powers, row_powers(layer.weight.packed)[0])


@pytest.mark.parametrize("tier", ["row", "block"])
def test_records_whose_sums_may_be_too_large_are_not_held(tier):
    parts = largest(tier)
    assert row_powers(parts.packed.packed)[1] == [0]
    parts.codes[3, 128:256] = 6 + (torch.arange(128) % 2).to(torch.uint8)
    assert 128 * 384 > MOST_IN_RECORD and row_powers(parts.packed.packed)[1] == [1]


@tiers
def test_layers_and_experts_compute_the_same(tier):
    weight = mxfp4.narrow(1, 72, 512, tier).packed
    linear, x = W4A8Linear(weight), torch.randn(5, 512, generator=builders.generator(1)).bfloat16()
    w13, w2 = (mxfp4.narrow(3, n, 256, tier, experts=3).packed for n in (512, 256))
    experts = W4A8Experts(w13, w2, top_k=2)
    ids = torch.randint(0, 3, (5, 2), generator=builders.generator(2), dtype=torch.int32)
    given = {linear: (x,), experts: (x[:, :256].contiguous() / 64, ids, torch.rand(5, 2))}
    for layer, arguments in given.items():
        with torch.no_grad():
            usual = layer(*arguments)
            layer.sums = "f16"
            compiled = torch.compile(layer, fullgraph=True, backend="eager")
            assert torch.equal(layer(*arguments), usual) and torch.equal(compiled(*arguments), usual)
    assert linear.call_sums == experts.w13.call_sums == experts.w2.call_sums == "f16"
    loaded = W4A8Linear.from_state_dict(linear.state_dict())
    assert loaded.sums == "f32" and torch.equal(loaded(x), linear(x))


# ---- kernels in the emulator -----------------------------------------------------------------------------------------

KERNELS = {
    "e4m3mx-channel-m16n64-s5-f16": (20, 136, 1312),
    "e4m3mx-g128-bf16-m32n64-s6-f16": (20, 200, 2336),
    "e4m3mx-g128-bf16-tofp32-m24n128-k1x2s-s4-f16": (30, 136, 1184),
    "e4m3mx-g32-bf16-m16n64-s4-f16": (20, 136, 1312),
    "e4m3mx-g32-bf16-m176n128-s4-f16": (190, 136, 1184),
}
"""Kernels, and m, n and k for them."""


def tier_of(spec: KernelSpec) -> str:
    return {size: tier for tier, size in mxfp4.TIERS.items()}[spec.format.group_size]


def summed(label: str, m: int, n: int, k: int, make=mxfp4.narrow):  # type: ignore[no-untyped-def]
    spec = KernelSpec.from_label(label)
    weight = make(4, n, k, tier_of(spec)).packed
    operands = problem(replace(spec, format=WeightFormat(128, False, "bf16")), m, n, k)
    return spec, operands._replace(weight=with_powers(weight)), weight


@emulated
@pytest.mark.parametrize("label", KERNELS)
def test_a_kernel_is_within_the_bound(monkeypatch, label):
    emulator = emulate(monkeypatch)
    spec, operands, weight = summed(label, *KERNELS[label])
    GemmLaunch(operands, spec).launch(operands)
    assert emulator.launched == [label]
    assert used(operands.out, (operands.x, operands.x_scale), weight, operands.bias) <= 1
    assert_outside_untouched(operands.out)


@emulated
@pytest.mark.parametrize("label", ["e4m3mx-g128-bf16-tofp32-m24n128-s4-f16", "e4m3mx-g32-bf16-tofp32-m24n128-s4-f16"])
def test_a_kernel_has_the_bits_of_the_arithmetic(monkeypatch, label):
    emulate(monkeypatch)
    spec, operands, weight = summed(label, 20, 128, 1184)
    operands = operands._replace(bias=None)
    GemmLaunch(operands, spec).launch(operands)
    # 1184 k are ten records: eight of the nine with one behind, then the rest.
    assert torch.equal(operands.out, TensorCore().mxfp4_gemm_in_f16((operands.x, operands.x_scale), weight, first=8))


@emulated
@tiers
def test_the_largest_sums_do_not_overflow(monkeypatch, tier):
    emulate(monkeypatch)
    name = {"row": "channel", "block": "g128-bf16", "group": "g32-bf16"}[tier]
    spec, operands, weight = summed(
        f"e4m3mx-{name}-tofp32-m16n64-s4-f16", 8, 16, 1024, lambda seed, n, k, tier: largest(tier, k)
    )
    operands = operands._replace(x=torch.full((8, 1024), 448.0).to(torch.float8_e4m3fn), bias=None)
    GemmLaunch(operands, spec).launch(operands)
    assert used(operands.out, (operands.x, operands.x_scale), weight) <= 1


FAULTS = {
    "another table": ("gemm/codec", "t -= kLow;", "t -= kLow - 1;"),
    "a run of all the sums": ("gemm/codec", "kLow > 0 ? 0.125f", "kLow > 0 ? 1.0f"),
    "a run scale that is not undone": ("gemm/codec", "(1 << kLow) / kRunScale", "(1 << kLow)"),
}


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, fault):
    emulate(monkeypatch)
    plant(monkeypatch, *FAULTS[fault])
    make = (lambda seed, n, k, tier: largest(tier, k)) if "run of all" in fault else mxfp4.narrow
    spec, operands, weight = summed("e4m3mx-g128-bf16-tofp32-m16n64-s4-f16", 8, 16, 1024, make)
    if "run of all" in fault:
        operands = operands._replace(x=torch.full((8, 1024), 448.0).to(torch.float8_e4m3fn), bias=None)
    GemmLaunch(operands, spec).launch(operands)
    assert used(operands.out, (operands.x, operands.x_scale), weight, operands.bias) > 1


# ---- the choice ------------------------------------------------------------------------------------------------------


@tiers
def test_wide_tiles_add_up_in_f16_but_for_runs_of_256_k(tier):
    """Which a base a row has in fp32: 1.00 to 1.08 of e4m3's groups of 128 for 1.04 to 1.14 in f16."""
    fmt = mxfp4.narrow(1, 16, 1024, tier).packed.format
    chosen = choose(Problem(4096, 4096, 4096, "e4m3", fmt, sums="f16"), H200)
    assert chosen.sums == ("f32" if tier == "row" else "f16") and KernelSpec.from_label(chosen.label) == chosen


@pytest.mark.nvrtc
@pytest.mark.parametrize("label", [
    "e4m3mx-g128-bf16-m128n128-s7-f16", "e4m3mx-g128-bf16-m176n128-s5-f16",
    "e4m3mx-g32-bf16-m176n128-s4-f16", "e4m3mx-channel-m176n128-s5-f16", "e4m3mx-channel-m128n128-s7-f16",
    "e4m3mx-g32-bf16-m128n128-k1x2-s5-f16-e64", "e4m3mx-g128-bf16-m176n128-s5-f16-e64", "e4m3mx-g32-bf16-m160n128-mc2lhs-s4-f16-e64",
])  # fmt: skip
def test_wide_kernels_spill_nothing_and_their_multiplies_overlap(tmp_path, label):
    spec = KernelSpec.from_label(label)
    assert illegal(spec, H200) is None
    entry, _ = KernelCache([tmp_path]).get_or_compile(kernel_source(spec))
    assert entry.metadata["spill_bytes"] == 0 and not entry.slow_because
