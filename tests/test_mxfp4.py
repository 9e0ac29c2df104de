"""MXFP4 weights: their bytes, the three ways to share scales, and kernels that multiply them, on the emulator."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import builders
import moe_cases
import mxfp4
import pytest
import torch
from emulator.launch import COMPILER, emulate
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_core import RUN, TensorCore

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.jit.cache import KernelCache
from jitgemm.kernel.formats import Problem, WeightFormat, format_named
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn.layers.linear import W4A8Linear
from jitgemm.nn.layers.shard_weight import part_of_weight
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES
from jitgemm.weight import e2m1
from jitgemm.weight.mxfp4 import format_of

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
tiers = pytest.mark.parametrize("tier", mxfp4.TIERS)


# ---- packing ---------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 24).map(lambda x: 8 * x),
    k=st.integers(2, 40).map(lambda x: 16 * x),
    tier=st.sampled_from(tuple(mxfp4.TIERS)),
)
@settings(max_examples=60, deadline=None)
def test_what_was_packed_comes_back_bit_for_bit(seed, n, k, tier):
    parts = mxfp4.parts(seed, n, k, tier)
    parts.codes[:, ::16] = 7  # no group of zeros
    weight = parts.packed
    codes, scales, zero = weight.unpack()
    assert torch.equal(codes, parts.codes) and torch.equal(scales.view(torch.uint8), parts.scales) and zero is None
    assert scales.dtype == torch.float8_e8m0fnu and scales.shape == parts.scales.shape
    assert torch.equal(weight.dequantize().double(), parts.dequantize_fp64())


@pytest.mark.parametrize("form", ["one each", "int8", "fp4", "e8m0", "strided"])
def test_every_form_packs_to_the_same_bytes(form):
    parts = mxfp4.parts(1, 72, 416)
    codes, scales = parts.canonical, parts.scales
    codes = {"one each": parts.codes, "int8": codes.view(torch.int8), "fp4": codes.view(torch.float4_e2m1fn_x2),
             "strided": codes.repeat_interleave(2, 0)[::2]}.get(form, codes)  # fmt: skip
    scales = scales.view(torch.float8_e8m0fnu) if form == "e8m0" else scales
    assert torch.equal(jitgemm.pack_mxfp4(codes, scales).blocks, parts.packed.blocks)


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


def test_the_least_and_the_largest_scales():
    for scale in (0, 1, 14, 249):
        parts = mxfp4.all_pairs()
        parts.scales[:] += scale - 113 if scale < 200 else 0
        parts.scales[:] = torch.where(parts.scales < 200, parts.scales + (scale - 127 if scale > 200 else 0), 0)
        weight = parts.packed
        assert weight.group_size == 480
        assert torch.equal(weight.unpack()[1].view(torch.uint8), parts.scales)


def test_bases_are_powers_of_two_down_to_the_least():
    exponents = torch.arange(-133, 128)
    powers = e2m1.power(exponents)
    assert torch.equal(powers.double(), torch.ldexp(torch.ones(261, dtype=torch.float64), exponents))
    assert torch.equal(e2m1.exponent_of(powers), exponents.int())


def test_values_are_e4m3s_exactly():
    codes, exponents = torch.arange(16, dtype=torch.uint8).repeat(15, 2), torch.arange(15, dtype=torch.uint8)
    expected = torch.tensor([*mxfp4.MAGNITUDES, *(-each for each in mxfp4.MAGNITUDES)]).repeat(15, 2)
    expected = expected * (exponents.float() - 8).exp2()[:, None]
    assert torch.equal(e2m1.values(codes, exponents[:, None]).float(), expected)


def test_experts_pack_as_each_does_and_share_a_tier():
    parts = mxfp4.parts(2, 72, 416, experts=3)
    weight = parts.packed
    assert weight.experts == 3 and weight.format.group_size == 0
    for e in range(3):
        alone = mxfp4.Parts(parts.codes[e], parts.scales[e]).packed
        assert torch.equal(weight[e].blocks, alone.blocks)
        assert torch.equal(weight[e].channel_scale, alone.channel_scale)
    parts.scales[1, 3, 0] = 2
    assert parts.packed.format.group_size == 32
    assert torch.equal(parts.packed.dequantize().double(), parts.dequantize_fp64())


@pytest.mark.parametrize("order", [("row", "block", "group"), ("group", "row", "block"), ("row", "row", "block")])
def test_experts_of_several_tiers_stack(order):
    parts = [mxfp4.parts(e, 72, 416, tier) for e, tier in enumerate(order)]
    weight = jitgemm.W4Weight.stacked(3, lambda e: parts[e].packed)
    assert weight.format.group_size == (32 if "group" in order else 128)
    for each, part in zip(weight, parts):
        assert torch.equal(each.dequantize().double(), part.dequantize_fp64())


@tiers
def test_names_and_files_hold_it(tier):
    weight = mxfp4.parts(1, 72, 416, tier).packed
    fmt = weight.format
    assert format_named(fmt.name) == fmt and fmt.name.startswith("mx-")
    spec = KernelSpec("e4m3", fmt.kernel_format, block_m=16, block_n=64, stages=4)
    assert KernelSpec.from_label(spec.label) == spec and KernelSpec.from_dict(spec.to_dict()) == spec
    again = jitgemm.W4Weight.from_state_dict(weight.state_dict("w."), "w.")
    assert again.format == fmt and torch.equal(again.blocks, weight.blocks)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert other.format == fmt and torch.equal(other.blocks, weight.blocks)
    assert fmt.tier in repr(weight) and "mxfp4" in repr(weight)


@tiers
@pytest.mark.parametrize(
    ("dim", "n", "k", "world"), [("n", 128, 416, 2), ("n", 72, 416, 3), ("k", 72, 512, 2), ("k", 72, 320, 2)]
)
def test_ranks_have_their_parts(tier, dim, n, k, world):
    parts = mxfp4.parts(3, n, k, tier)
    cut = [part_of_weight(parts.packed, dim, rank, world, torch.float8_e4m3fn) for rank in range(world)]
    whole = torch.cat([part.dequantize() for part in cut], "nk".index(dim))
    assert torch.equal(whole.double(), parts.dequantize_fp64())


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


def test_what_is_not_finite_is_named():
    w = torch.ones(8, 64)
    w[3, 40] = torch.nan
    with pytest.raises(ValueError, match=r"w: expected finite values, got nan at \[3, 40\]"):
        jitgemm.quantize_mxfp4(w)


# ---- what raises -----------------------------------------------------------------------------------------------------


def wrong(**changes):
    parts = mxfp4.parts(1, 72, 416)
    return {"codes": parts.canonical, "scales": parts.scales} | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(scales=torch.full((72, 13), 255, dtype=torch.uint8)), ValueError, r"scales: expected numbers, got 255"),
        (dict(codes=torch.full((72, 416), 16, dtype=torch.uint8)), ValueError, r"codes: expected values 0\.\.15, got 16"),
        (dict(codes=torch.zeros(72, 208)), TypeError, r"codes: expected uint8 or int8 or .*, got float32"),
        (dict(scales=torch.zeros(72, 13)), TypeError, r"scales: expected float8_e8m0fnu or uint8, got float32"),
        (dict(scales=torch.zeros(72, 4, dtype=torch.uint8)), ValueError, r"scales: expected columns for 32 k each, 13 "),
        (dict(scales=torch.zeros(64, 13, dtype=torch.uint8)), ValueError, r"scales: expected shape \[72, ceil"),
        (dict(codes=torch.zeros(72, dtype=torch.uint8)), ValueError, r"codes: expected shape"),
        (dict(k=208), ValueError, r"k: expected one of \[416\] by codes and scales, got 208"),
        (dict(codes=torch.zeros(70, 208, dtype=torch.uint8), scales=torch.zeros(70, 13, dtype=torch.uint8)), ValueError,
         r"codes: expected n"),
        (dict(codes=torch.zeros(8, 16, dtype=torch.uint8), scales=torch.zeros(8, 1, dtype=torch.uint8)), ValueError,
         r"k: expected the argument k to say"),
    ],
)  # fmt: skip
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        jitgemm.pack_mxfp4(**wrong(**changes))


def test_a_nan_is_named_with_its_expert():
    parts = mxfp4.parts(2, 72, 416, experts=3)
    parts.scales[2, 5, 7] = 255
    with pytest.raises(ValueError, match=r"scales\[2\]: expected numbers, got 255, e8m0's NaN, at \[5, 7\]"):
        _ = parts.packed


def test_int8_activations_raise_with_the_reason():
    weight, out = mxfp4.parts(1, 72, 416).packed, torch.empty(9, 72, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"\(x\): expected float8_e4m3fn, as no integers of 8 bits hold MXFP4"):
        jitgemm.gemm_w4a8_nt(builders.lhs(1, 9, 416, "s8"), weight, out)


def test_pack_w4_does_not_take_its_scales():
    with pytest.raises(ValueError, match="code: expected one of int4, got 'e2m1'"):
        jitgemm.pack_w4(torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1), group_size=32, code="e2m1")
    with pytest.raises(ValueError, match=r"group_size: expected 0 \(per channel\) or one of \(32, 128\), got 64"):
        WeightFormat(64, False, "bf16", "e2m1", code="e2m1")


# ---- kernels ---------------------------------------------------------------------------------------------------------


def expected(lhs, parts: mxfp4.Parts) -> torch.Tensor:
    """The specification of weights and of `gemm_w4a8_nt`'s scales, in fp64."""
    x, scale = lhs
    x = x.double()
    if scale.dim() == 2 and scale.shape[1] > 1:
        x = x * scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]
        return x @ parts.dequantize_fp64().T
    return x @ parts.dequantize_fp64().T * scale.double().view(-1, 1)


@tiers
@pytest.mark.parametrize("block", [False, True], ids=["per token", "per token and 128 k"])
def test_the_reference_is_the_specification(tier, block):
    parts = mxfp4.parts(5, 72, 416, tier)
    lhs = (builders.block_lhs if block else builders.lhs)(1, 9, 416, "e4m3")
    found = jitgemm.gemm_w4a8_reference(lhs, parts.packed, out_dtype=torch.float64)
    assert torch.allclose(found, expected(lhs, parts), rtol=1e-12, atol=0)


@emulated
@pytest.mark.parametrize("group_size", [480, 32])
def test_every_code_with_every_exponent(monkeypatch, group_size):
    parts = mxfp4.all_pairs()
    if group_size == 32:
        parts.scales[0, 0] = 90
    weight = parts.packed
    assert weight.group_size == group_size
    emulate(monkeypatch)
    one_hot, out = torch.eye(480)[::3].to(torch.float8_e4m3fn), torch.empty(160, 16)
    jitgemm.gemm_w4a8_nt((one_hot, torch.ones(160)), weight, out)
    assert torch.equal(out.T.double(), parts.dequantize_fp64()[:, ::3])


@emulated
@tiers
@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [
        (9, 72, 416, {}),
        (33, 136, 1040, dict(bias=True)),
        (70, 136, 640, dict(block=True)),
        (130, 264, 288, dict(block=True, bias=True)),
        (5, 72, 416, dict(batch_invariant=True)),
    ],
    ids=str,
)
def test_a_kernel_computes_what_the_reference_does(monkeypatch, tier, m, n, k, options):
    parts, block = mxfp4.parts(m, n, k, tier), options.get("block")
    weight = parts.packed
    assert weight.format.group_size == mxfp4.TIERS[tier]
    lhs = (builders.block_lhs if block else builders.lhs)(1, m, k, "e4m3")
    bias = builders.bias(2, n) if options.get("bias") else None
    ref, bound = gemm_w4a8_bound(lhs, weight, bias=bias)
    emulator, out = emulate(monkeypatch), torch.empty(m, n, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, bias=bias, batch_invariant=options.get("batch_invariant", False))
    assert emulator.launched[0].startswith("e4m3mx-")
    assert bool(((out.double() - ref).abs() <= bound).all())


# ---- runs of 256 k, of weights with a base a row ---------------------------------------------------------------------

LONG, SHORT = 2 * RUN, RUN


class OfEmulator(TensorCore):
    """Which rounds a step's exact sum to fp32."""

    def step(self, acc: torch.Tensor, x: torch.Tensor, d: torch.Tensor, unit: int = 1) -> torch.Tensor:
        return (acc + x @ d.T).float().double()


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
    """Of eleven records. Two warpgroups along k, or CTAs, add up in fp32 what they have: the second one nothing here."""
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


@pytest.mark.nvrtc
@tiers
@pytest.mark.parametrize("experts", [0, 64])
def test_chosen_kernels_do_not_spill(tmp_path, tier, experts):
    fmt, cache = format_of(mxfp4.TIERS[tier] or 4096, 4096), KernelCache([tmp_path])
    rows = (16, 16384) if experts else (1, 64, 128, 4096)
    problems = [Problem(m, 4096, 4096, "e4m3", fmt, experts=experts, lhs_group=g) for m in rows for g in (0, 128)]
    for spec in dict.fromkeys(choose(problem, DEVICES["h200"]) for problem in problems):
        entry, _ = cache.get_or_compile(kernel_source(spec))
        assert entry.metadata["spill_bytes"] <= (40 if experts else 0), spec.label  # 20 of one by NVRTC 13.5
        assert "serialised" not in str(entry.slow_because), spec.label


CLUSTERS = {
    "split k": dict(block_m=16, block_n=64, stages=4, split_k=2, warpgroups_k=2, scatter=True),
    "shared weights": dict(block_m=112, block_n=128, stages=3, halves=2, multicast_rhs=2),
    "shared activations": dict(block_m=112, block_n=128, stages=3, halves=2, multicast_lhs=2),
    "two CTAs": dict(block_m=32, block_n=64, stages=4, split_k=2, ctas_per_sm=2),
}


@emulated
@tiers
@pytest.mark.parametrize("shape", CLUSTERS)
def test_kernels_of_every_shape(monkeypatch, tier, shape):
    weight, lhs = mxfp4.parts(4, 264, 640, tier).packed, builders.lhs(1, 120, 640, "e4m3")
    spec = KernelSpec("e4m3", weight.format.kernel_format, **CLUSTERS[shape])
    emulate(monkeypatch)
    out = torch.empty(120, 264, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=spec.label)
    ref, bound = gemm_w4a8_bound(lhs, weight)
    assert bool(((out.double() - ref).abs() <= bound).all())


def grouped(tier: str, tokens: int, block: bool = False) -> tuple[mxfp4.Parts, tuple[torch.Tensor, torch.Tensor]]:
    make = builders.block_lhs if block else builders.lhs
    return mxfp4.parts(6, 136, 416, tier, experts=5), make(3, tokens, 416, "e4m3")


def assert_rows(out, lhs, weight, e, rows):
    x, scale = (
        each.view(torch.uint8)[rows].view(each.dtype) if each.element_size() == 1 else each[rows] for each in lhs
    )
    ref, bound = gemm_w4a8_bound((x, scale), weight[e])
    assert bool(((out.double() - ref).abs() <= bound).all()), e


@emulated
@tiers
@pytest.mark.parametrize("block", [False, True], ids=["per token", "per token and 128 k"])
@pytest.mark.parametrize("gathered", [False, True])
def test_contiguous_rows_of_experts(monkeypatch, tier, block, gathered):
    counts = [0, 3, 40, 0, 17]
    ends = torch.tensor(counts).cumsum(0).tolist()
    parts, lhs = grouped(tier, 23 if gathered else 60, block)
    index = torch.randint(0, 23, (60,), generator=builders.generator(4), dtype=torch.int32) if gathered else None
    weight, out = parts.packed, torch.empty(60, 136, dtype=torch.bfloat16)
    emulate(monkeypatch)
    offsets = torch.tensor([0, *ends], dtype=torch.int32)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, out, offsets, row_index=index)
    for e, (count, end) in enumerate(zip(counts, ends)):
        rows = torch.arange(end - count, end)
        assert_rows(out[rows], lhs, weight, e, rows if index is None else index[rows].long())


@emulated
@tiers
def test_masked_rows_of_experts(monkeypatch, tier):
    parts, (x, scale) = grouped(tier, 5 * 12)
    weight, out = parts.packed, torch.zeros(5, 12, 136, dtype=torch.bfloat16)
    counts = torch.tensor([3, 0, 12, 1, 7], dtype=torch.int32)
    emulate(monkeypatch)
    by_expert = x.view(5, 12, 416), scale.view(5, 12)
    jitgemm.m_grouped_gemm_w4a8_nt_masked(by_expert, weight, out, counts, expected_m=4)
    for e, count in enumerate(counts.tolist()):
        assert_rows(out[e, :count], (x, scale), weight, e, torch.arange(12 * e, 12 * e + count))
        assert not out[e, count:].any()


@pytest.mark.parametrize("device", ["reference", pytest.param("emulator", marks=emulated)])
@tiers
@pytest.mark.parametrize(
    "options", [{}, dict(scheme="block"), dict(activation="swiglu_oai", order="interleaved", limit=7.0)], ids=str
)
def test_a_layer_of_experts(monkeypatch, tier, options, device):
    case = moe_cases.Case(
        tier=tier, mode="e4m3", dtype=torch.bfloat16, k=192, inter=160, scale=1.0, options=dict(options)
    )
    g = builders.generator(8)
    case.options["bias13"], case.options["bias2"] = (torch.randn(5, n, generator=g) * 0.1 for n in (320, 72))
    expected = moe_cases.by_definition(case)
    if device == "emulator":
        emulate(monkeypatch)
    out = jitgemm.fused_experts(*case.arguments, **case.options)
    size = expected.abs().amax(1, keepdim=True)
    assert bool(((out.double() - expected).abs() <= 0.06 * size).all())


def test_experts_raise_for_int8_with_the_reason():
    case = moe_cases.Case(tier="row", mode="s8")
    with pytest.raises(TypeError, match="w13: expected lhs_dtype float8_e4m3fn, as no integers of 8 bits hold MXFP4"):
        jitgemm.fused_experts(*case.arguments, **case.options)


@pytest.mark.parametrize("activation", ["int8", "int8_affine", "int8_block"])
def test_a_layer_raises_for_int8_with_the_reason(activation):
    with pytest.raises(ValueError, match="weight: expected activation e4m3.*, as no integers of 8 bits hold MXFP4"):
        W4A8Linear(mxfp4.parts(1, 72, 416).packed, activation=activation)


@pytest.mark.parametrize("activation", ["e4m3", "e4m3_block"])
def test_a_layer_computes_what_its_call_does(activation):
    parts, x = mxfp4.parts(1, 72, 416), torch.randn(5, 416).bfloat16()
    bias = builders.bias(2, 72)
    layer = W4A8Linear(parts.packed, bias, activation=activation)
    scheme = "block" if activation.endswith("block") else "token"
    lhs = jitgemm.quantize_activations(x, torch.float8_e4m3fn, scheme=scheme)
    assert torch.equal(layer(x), jitgemm.gemm_w4a8_reference(lhs, parts.packed, bias=bias))


@pytest.mark.parametrize(("tier", "sizes"), [("row", (128, 32)), ("block", (32,))])
def test_a_weight_can_have_more_scales_than_it_needs(tier, sizes):
    parts = mxfp4.parts(1, 72, 416, tier)
    for size in sizes:
        weight = parts.packed.regrouped(size)
        assert weight.format.group_size == size and torch.equal(weight.dequantize().double(), parts.dequantize_fp64())
        assert torch.equal(weight.unpack()[0], parts.codes)
        with pytest.raises(ValueError, match="group_size: expected fewer k than the MXFP4 weight's, got 416"):
            weight.regrouped(416)
    with pytest.raises(ValueError, match="group_size: expected 0 .per channel. or one of .32, 128., got 64"):
        parts.packed.regrouped(64)
    with pytest.raises(ValueError, match="group_size: expected fewer k than the MXFP4 weight's, got 32"):
        builders.weight_parts(1, 72, 416, 128).packed.regrouped(32)


def test_a_tracer_leaves_nothing_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    parts = mxfp4.parts(1, 72, 416)
    weight = parts.packed
    with FakeTensorMode(allow_non_fake_inputs=True):
        e2m1.dequantized(torch.zeros(8, 32, dtype=torch.uint8))
    assert torch.equal(weight.dequantize().double(), parts.dequantize_fp64())


@pytest.mark.parametrize("device", ["reference", pytest.param("emulator", marks=emulated)])
@tiers
@pytest.mark.parametrize("block", [False, True], ids=["per token", "per token and 128 k"])
def test_a_layer_of_sorted_tokens(monkeypatch, tier, block, device):
    options = {"scheme": "block" if block else "token"}
    case = moe_cases.Case(
        experts=3, k=192, inter=160, tier=tier, mode="e4m3", dtype=torch.bfloat16, scale=1.0, options=options
    )
    counts = (3, 0, 5)
    x = torch.randn(3, 6, 192, generator=builders.generator(3)).bfloat16()
    _, w13, w2, *_ = case.arguments
    if device == "emulator":
        emulate(monkeypatch)
    out, masked_m = torch.zeros(3, 6, 72, dtype=torch.bfloat16), torch.tensor(counts, dtype=torch.int32)
    jitgemm.fused_experts_masked(x, w13, w2, out, masked_m, 2, **case.options)
    for e, count in enumerate(counts):
        ids, ones = torch.full((count, 1), e), torch.ones(count, 1)
        expected = moe_cases.by_definition(case, x=x[e, :count], topk_ids=ids, topk_weights=ones)
        assert bool(((out[e, :count] - expected).abs() <= 0.06 * expected.abs().amax(1, keepdim=True)).all())
        assert not out[e, count:].any()
