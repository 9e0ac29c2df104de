"""MXFP4 weights: their bytes, the three ways to share scales, runs of 256 k. What they have in common with NVFP4's is
in test_codes.py."""

from __future__ import annotations

from dataclasses import replace

import builders
import mxfp4
import pytest
import torch
from emulator.launch import emulate
from marks import emulated
from tensor_core import RUN, OfEmulator, TensorCore

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.spec import KernelSpec
from jitgemm.weight.state import TENSORS

tiers = pytest.mark.parametrize("tier", mxfp4.TIERS)


# ---- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "across", "group_size"),
    [(14, 14, 416), (15, 15, 32), (14, 15, 128), (15, 40, 32), (0, 254, 128), (0, 0, 416)],
)
def test_the_fewest_scales_that_hold_the_weight(spread, across, group_size):
    """spread: of exponents within 128 k; across: within a row."""
    parts = mxfp4.parts(1, 72, 416)
    parts.codes[:, ::16] = 1
    scales = torch.zeros_like(parts.scales)
    scales[5, 1], scales[5, 12] = spread, across  # in the first and in the last block
    scales[5, 13 - 1 - (spread == across) :] = across
    assert replace(parts, scales=scales).packed.group_size == group_size


def test_groups_of_zeros_fit_any_base():
    parts = mxfp4.parts(1, 72, 416)
    parts.codes[7, 32:64], parts.scales[7, 1] = 8, 254  # -0, by the largest scale
    parts.codes[9] = 0
    weight = parts.packed
    assert weight.group_size == 416
    assert torch.equal(weight.dequantize().double(), parts.dequantize_fp64())
    assert not weight.dequantize()[7, 32:64].any() and weight.dequantize()[7, 32:64].signbit().all()


@pytest.mark.parametrize("order", [("row", "block", "group"), ("group", "row", "block"), ("row", "row", "block")])
def test_experts_share_the_tier_that_holds_all(order):
    parts = [mxfp4.parts(e, 72, 416, tier) for e, tier in enumerate(order)]
    at_once = mxfp4.Parts(*(torch.stack([getattr(each, name) for each in parts]) for name in ("codes", "scales")))
    for weight in (jitgemm.W4Weight.stacked(3, lambda e: parts[e].packed), at_once.packed):
        assert weight.format.group_size == (32 if "group" in order else 128)
        assert torch.equal(weight.dequantize().double(), at_once.dequantize_fp64())


# ---- quantising ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(72, 416), (2, 16, 48)])
def test_quantising_takes_the_nearest_codes_and_the_best_of_three_scales(shape):
    w = torch.randn(shape, generator=builders.generator(1)) * 0.1
    weight = jitgemm.quantize_mxfp4(w)
    padded = torch.nn.functional.pad(w, (0, -shape[-1] % 32)).unflatten(-1, (-1, 32)).double()
    usual = padded.abs().amax(-1, keepdim=True).log2().floor() - 2
    values = torch.tensor([sign * each for each in mxfp4.MAGNITUDES for sign in (1, -1)], dtype=torch.float64)
    errors = [
        (padded[..., None] - values * (usual + change).exp2()[..., None]).square().amin(-1).sum(-1)
        for change in (-1, 0, 1)
    ]
    found = torch.nn.functional.pad(weight.dequantize() - w, (0, -shape[-1] % 32)).unflatten(-1, (-1, 32)).double()
    assert torch.allclose(found.square().sum(-1), torch.stack(errors).amin(0), rtol=1e-4)


def test_quantising_rounds_ties_to_even():
    row = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, -0.0] + [0.0] * 20)
    codes, scales, _ = jitgemm.quantize_mxfp4(row.repeat(8, 1)).unpack()
    assert codes[0, :12].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 14, 8] and int(scales.view(torch.uint8)[0]) == 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_values_quantise_to_themselves(dtype):
    parts = mxfp4.parts(1, 72, 416, shift=-4)
    parts.codes[:, ::32] = 7
    values = parts.dequantize_fp64().to(dtype)
    assert torch.equal(jitgemm.quantize_mxfp4(values).dequantize(), values.float())


# ---- runs of 256 k, of weights with a base a row ---------------------------------------------------------------------

LONG, SHORT = 2 * RUN, RUN


def used(out: torch.Tensor, lhs: tuple, weight) -> float:  # type: ignore[no-untyped-def]
    ref, limit = gemm_w4a8_bound(lhs, weight, out_dtype=out.dtype)
    return float(((out.double() - ref).abs() / limit.clamp(min=1e-300)).max())


@pytest.mark.parametrize("run", [SHORT, LONG])
@pytest.mark.parametrize("kind", ["plain", "outliers", "positive", "last step"])
def test_the_arithmetic_is_within_the_bound(kind, run):
    parts, k = mxfp4.parts(2, 32, 1696), 1696
    mean, factor = "positive" if kind == "positive" else "zero", 500 if kind == "last step" else 1
    lhs = builders.lhs(3, 8, k, mean=mean, outliers=kind == "outliers", last_step=factor)
    for core in (TensorCore(), TensorCore(sign_fill=True), TensorCore(normal=True)):
        assert used(core.mxfp4_gemm(lhs, parts.packed, run), lhs, parts.packed) <= 1


def sum_above(first: int, k: int, negative: bool) -> tuple[mxfp4.Parts, tuple[torch.Tensor, torch.Tensor]]:
    """A step that adds up to 2^15 at k = first; from the next record on all terms are just below its cut."""
    parts = mxfp4.parts(1, 64, k)
    parts.scales[:], parts.codes[:] = 127, 7
    x = torch.zeros(1, k)
    x[:, first : first + 16], parts.codes[:, first : first + 16] = 256, 15 if negative else 7
    x[:, RUN * (first // RUN + 1) :] = 0.3125
    return parts, (x.to(torch.float8_e4m3fn), torch.ones(1, 1))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("first", [0, 96, 256, 384])
def test_a_sum_above_terms_of_the_next_record(first, negative):
    """Runs of 256 k lose the terms of the record behind in the same run: more than runs of 128 k may."""
    parts, lhs = sum_above(first, 640, negative)
    weight, core = parts.packed, TensorCore()
    assert used(core.mxfp4_gemm(lhs, weight, SHORT), lhs, weight) < 0.01
    share = used(core.mxfp4_gemm(lhs, weight, LONG), lhs, weight)
    assert 0.5 <= share <= 1 if first % LONG < SHORT else share < 0.01


def test_the_bound_covers_kernels_that_promote_every_128_k():
    """Whose second record loses more where the first one's sum would have been of the other sign."""
    parts, (x, scale) = sum_above(96, 256, False)
    parts.codes[:, 128:144] = 15
    x = x.float()
    x[:, 128:144], x[:, 144:160], x[:, 160:] = 256, 0, 0.3125
    lhs, weight = (x.to(torch.float8_e4m3fn), scale), parts.packed
    shares = [used(TensorCore().mxfp4_gemm(lhs, weight, run), lhs, weight) for run in (SHORT, LONG)]
    assert 0.1 <= shares[0] <= 1 and shares[1] < shares[0] / 4


@emulated
@pytest.mark.parametrize(
    ("label", "run"),
    [
        ("e4m3mx-channel-tofp32-m24n64-s4", LONG),
        ("e4m3mx-channel-tofp32-m16n64-k1x2s-s4", LONG),
        ("e4m3mx-channel-tofp32-m176hn128-s4", LONG),
        ("e4m3mx-channel-tofp32-m24n64-k2x1-s4", SHORT),
    ],
)
def test_runs_are_as_long_as_a_warpgroup_s_own_records_allow(monkeypatch, label, run):
    """Of eleven records. Two warpgroups along k, or CTAs, add up in fp32 what they have: the second one nothing
    here."""
    spec, k = KernelSpec.from_label(label), 1312
    weight, (x, scale) = mxfp4.parts(4, 72, k).packed, builders.lhs(1, 20, k, "e4m3")
    records = torch.arange(k) // RUN
    others = records % 2 == 1 if spec.warpgroups_k > 1 else records >= (6 if spec.split_k > 1 else 11)
    lhs = (x.float() * ~others).to(torch.float8_e4m3fn), scale
    emulator, out = emulate(monkeypatch), torch.empty(20, 72)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=label)
    assert emulator.launched == [label]
    expected = {each: OfEmulator().mxfp4_gemm(lhs, weight, each) for each in (SHORT, LONG)}
    assert torch.equal(out, expected[run])
    assert torch.equal(*expected.values()) == (spec.warpgroups_k > 1)  # which would take records 0 and 2 for one run


@pytest.mark.parametrize(("tier", "sizes"), [("row", (128, 32)), ("block", (32,))])
def test_a_weight_can_have_more_scales_than_it_needs(tier, sizes):
    parts = mxfp4.parts(1, 72, 416, tier)
    for size in sizes:
        weight = parts.packed.regrouped(size)
        assert weight.format.group_size == size and torch.equal(weight.dequantize().double(), parts.dequantize_fp64())
        assert torch.equal(weight.unpack()[0], parts.codes)
        order = torch.arange(416, dtype=torch.int32).flip(0)
        permuted = parts.packed.with_tensors(*(getattr(parts.packed, name) for name in TENSORS[:3]), order)
        permuted.named("a layer")
        assert permuted.regrouped(size).permutation is order and permuted.regrouped(size).layer == "a layer"
        with pytest.raises(ValueError, match="group_size: expected fewer k than the MXFP4 weight's, got 416"):
            weight.regrouped(416)
    with pytest.raises(ValueError, match="group_size: expected 0 .per channel. or one of .32, 128., got 64"):
        parts.packed.regrouped(64)
    with pytest.raises(ValueError, match="group_size: expected fewer k than the MXFP4 weight's, got 32"):
        builders.weight_parts(1, 72, 416, 128).packed.regrouped(32)
