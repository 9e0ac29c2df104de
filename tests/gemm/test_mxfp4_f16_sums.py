"""MXFP4 with sums in f16 without a GPU: which weights it holds, and the arithmetic within its bound. Kernels in the
emulator are in test_f16_sums.py."""

from __future__ import annotations

import builders
import mxfp4
import pytest
import torch
from f16_values import F16_TIERS, largest_mx, used
from tensor_core import TensorCore

import jitgemm
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn import W4A8Linear
from jitgemm.nn.layers.packed import put_sums
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES
from jitgemm.weight.f16_sums import row_powers
from jitgemm.weight.mxfp4 import MOST_IN_RECORD

H200 = DEVICES["h200"]
tiers = pytest.mark.parametrize("tier", F16_TIERS)


@tiers
def test_tiers_are_those_meant(tier):
    assert mxfp4.narrow(1, 16, 1024, tier).packed.format.group_size == mxfp4.TIERS[tier]
    assert largest_mx(1, 16, 1024, tier).packed.format.group_size == mxfp4.TIERS[tier]


@pytest.mark.parametrize(
    "kind, tier, first",
    builders.two_thirds(["plain", "outliers", "positive", "last step", "largest"], F16_TIERS, [1, 5, 8]),
)
def test_the_arithmetic_is_within_the_bound(kind, tier, first):
    k = 1696
    parts = largest_mx(1, 16, k, tier) if kind == "largest" else mxfp4.narrow(2, 32, k, tier)
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
        weight = weight.regrouped(mxfp4.TIERS[tier])
        shares.append(used(TensorCore().mxfp4_gemm_in_f16(lhs, weight), lhs, weight))
    assert 0.05 <= max(shares) <= 1


# ---- which weights ---------------------------------------------------------------------------------------------------


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


# ---- the choice ------------------------------------------------------------------------------------------------------


@tiers
def test_wide_tiles_add_up_in_f16(tier):
    fmt = mxfp4.narrow(1, 16, 1024, tier).packed.format
    chosen = choose(Problem(4096, 4096, 4096, "e4m3", fmt, sums="f16"), H200)
    assert chosen.sums == "f16" and KernelSpec.from_label(chosen.label) == chosen
