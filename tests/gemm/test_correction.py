"""Zero points and offsets as corrections without a GPU: packing, kernels in the emulator, calls, choices, layers."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import builders
import pytest
import torch
from builders import weight_of_experts
from emulator.launch import emulate
from emulator.problems import assert_within_the_bound, problem
from files_compressed_tensors import config, pack_quantized
from marks import emulated

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel.formats import GROUP_SIZES, Problem, WeightFormat, lhs_columns
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn.layers.shard_weight import part_of_weight
from jitgemm.select.choose import choose, kernel_named
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import legal_kernels
from jitgemm.weight import correction
from jitgemm.weight.correction import with_sums

H200 = DEVICES["h200"]
KINDS = {"zero": dict(zero_point=True, max_zero=16), "offset": dict(offset=True)}


def pair(group_size: int, kind: str, n: int = 136, k: int = 1056, experts: int = 0, **options):
    """The same weight without and with correction."""
    options = KINDS[kind] | {"codes": "s8"} | options
    if experts:
        return [weight_of_experts(experts, n, k, group_size, correction=each, **options) for each in (False, True)]
    parts = builders.weight_parts(1, n, k, group_size, **options)
    return parts.packed, replace(parts, lhs_dtype=torch.int8, correction=True).packed


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or builders.same_bits(a, b)


# ---- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", (0, 3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_factors_give_back_what_was_packed(group_size, kind, experts):
    plain, weight = pair(group_size, kind, experts=experts)
    assert weight.correction == ("fp16" if kind == "zero" else "bf16", group_size) and plain.correction is None
    assert all(map(same, (*weight.unpack(), weight.unpack().offset), (*plain.unpack(), plain.unpack().offset)))
    assert same(weight.dequantize(), plain.dequantize()) and same(weight.row_sum, plain.row_sum)
    assert weight.nbytes == sum(tensor.nbytes for tensor in (weight.blocks, weight.row_sum))
    assert f"corrected in {weight.correction[0]}" in repr(weight) and weight.ready
    if experts:
        assert same(weight[1].dequantize(), plain[1].dequantize()) and weight[1].correction == weight.correction
        stacked = jitgemm.W4Weight.stacked(experts, lambda e: weight[e])
        assert same(stacked.blocks, weight.blocks) and stacked.format == weight.format


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "world"), [("n", 4), ("k", 4), ("k", 16)])
def test_a_rank_s_part_is_corrected_too(kind, dim, world):
    plain, weight = pair(128, kind, n=256, k=2048)
    for rank in range(world):
        parts = [part_of_weight(each, dim, rank, world, torch.int8) for each in (plain, weight)]
        assert same(parts[0].dequantize(), parts[1].dequantize())
        # Of one group a weight is per channel; offsets then have smaller groups.
        assert (parts[1].correction is None) == (world == 16 and kind == "zero")


def test_what_no_factor_holds_is_refused():
    parts = builders.weight_parts(1, 64, 512, 128, offset=True, scale_type="fp16")
    weight = replace(parts, lhs_dtype=torch.int8, correction=True).packed
    assert weight.correction == ("fp16", 128) and same(weight.unpack().offset, parts.offset)
    parts = builders.weight_parts(1, 64, 512, 128, zero_point=True)
    options = dict(group_size=128, k=512, lhs_dtype=torch.int8, correction=True)
    pack = jitgemm.pack_w4
    with pytest.raises(ValueError, match="correction: expected scales times zero points that bf16 or fp16 holds"):
        pack(parts.q, parts.scale.float() * 1.0001, parts.zero, **options)
    empty = parts.scale.clone()
    empty[3, 1] = 0  # its zero point could not be told
    with pytest.raises(ValueError, match="correction: expected scales times zero points"):
        pack(parts.q, empty, parts.zero.clamp(max=7), **options)
    with pytest.raises(ValueError, match="correction: expected offsets that bf16 or fp16 holds"):
        pack(parts.q.to(torch.int8) - 8, parts.scale.float(), offset=parts.scale.float() * 1.0001, **options)
    for wrong in (
        dict(lhs_dtype=None), dict(lhs_dtype=torch.float8_e4m3fn), dict(zero=None, q=parts.q.to(torch.int8) - 8),
        dict(offset=parts.scale),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="correction: expected int8 activations, int4 codes and either zero"):
            pack(**dict(q=parts.q, scale=parts.scale, zero=parts.zero) | options | wrong)
    channel = builders.weight_parts(1, 64, 512, builders.PER_CHANNEL, zero_point=True)
    with pytest.raises(ValueError, match="correction: expected False per channel"):
        pack(channel.q, channel.scale, channel.zero, **options | dict(group_size=-1))
    with pytest.raises(TypeError, match="correction: expected a bool"):
        pack(parts.q, parts.scale, parts.zero, **options | dict(correction="fp16"))


def test_formats_that_no_weight_has_are_refused():
    with pytest.raises(ValueError, match="correction: expected '' or one of"):
        WeightFormat(128, True, "bf16", "s8", correction="fp32")
    with pytest.raises(ValueError, match="correction: expected int4 in order 's8' and in groups"):
        WeightFormat(128, True, "bf16", "any", correction="fp16")
    with pytest.raises(ValueError, match="correction: expected zero points or offsets, got both"):
        WeightFormat(128, True, "bf16", "s8", True, correction="fp16")
    _, weight = pair(128, "zero")
    with pytest.raises(ValueError, match="format: expected zero points or offsets with a correction"):
        replace(weight, format=weight.format.kernel_format)


# ---- kernels ---------------------------------------------------------------------------------------------------------

DENSE = {
    "s8fast-g128-bf16-tofp32-m16n64-s4-xfp16": (16, 544),
    "s8fast-g128-bf16-m16n64-k2x2s-s4-xbf16": (14, 33 * 128),
    "s8fast-g32-fp32-tofp32-m24n64-k1x2-s4-xbf16": (21, 1056),
    "s8fast-g64-bf16-tofp16-m8n128-k2x1-s4-xfp16": (5, 528),
    "s8fast-g256-bf16-m48n64-k1x2s-s4-xfp16": (40, 1200),
    "s8fast-g128-bf16-tofp32-m176n128-s4-parts-xbf16": (180, 1056),
    "s8fast-g128-bf16-m96n64-k2x2s-s3-parts-xfp16": (97, 1184),
    "s8fast-g64-bf16-m160hn128-mc2lhs-s4-xbf16": (170, 544),
}


@emulated
@pytest.mark.parametrize("label", DENSE)
def test_a_kernel_is_within_the_bound(monkeypatch, label):
    emulator = emulate(monkeypatch)
    spec = KernelSpec.from_label(label)
    operands = problem(spec, DENSE[label][0], 136, DENSE[label][1])
    GemmLaunch(operands, spec).launch(operands)
    assert emulator.launched == [label]
    assert_within_the_bound(operands)


@emulated
@pytest.mark.parametrize("m", (1, 20, 130))
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_takes_rows_with_sums_and_without(monkeypatch, kind, m):
    plain, weight = pair(128, kind)
    x, scale, zero = builders.affine_lhs(3, m, weight.k)
    ref, bound = gemm_w4a8_bound((x, scale, zero), weight, out_dtype=torch.float32)
    outs = [torch.empty(m, weight.n) for _ in range(3)]
    jitgemm.gemm_w4a8_nt((x, scale, zero), plain, outs[0])  # the reference of the CPU
    jitgemm.gemm_w4a8_nt((with_sums(x, weight.correction), scale, zero), weight, outs[1])
    jitgemm.gemm_w4a8_nt((x, scale, zero), weight, outs[2])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]) and torch.equal(outs[0], ref.float())
    emulator = emulate(monkeypatch)
    operands = Gemm(with_sums(x, weight.correction), scale, zero, weight, outs[1])
    launch = GemmLaunch(operands)
    launch.launch(operands)
    assert bool(((outs[1].double() - ref).abs() <= bound).all())
    assert emulator.launched == [launch.spec.label] and f"-x{weight.correction[0]}" in launch.spec.label
    exact = GemmLaunch(operands._replace(weight=weight.with_sums("exact")))
    assert exact.spec.sums == "f32"


def test_rows_without_sums_get_them_with_one_warning(monkeypatch):
    _, weight = pair(128, "zero")
    x, _ = builders.lhs(3, 5, weight.k, "s8")
    correction._warn_of_sums.cache_clear()
    with pytest.warns(UserWarning, match="adds up the groups of its activations in kernels of their own"):
        wide = correction.with_late_sums(x, weight.correction, "")
    assert torch.equal(wide, with_sums(x, weight.correction))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        correction.with_late_sums(x, weight.correction, "")


def test_wrong_arguments():
    _, weight = pair(128, "zero")
    x, scale = builders.lhs(3, 5, weight.k, "s8")
    out = torch.empty(5, weight.n)
    for columns in (weight.k - 16, weight.k + 128):
        message = r"lhs\[0\] \(x\): expected shape \[m, k = 1056\], or with sums with 1280 columns"
        with pytest.raises(ValueError, match=message):
            jitgemm.gemm_w4a8_nt((x.new_zeros(5, columns), scale), weight, out)
    with pytest.raises(ValueError, match=r"x_scale\): expected a scale per token for a weight with correction"):
        jitgemm.gemm_w4a8_nt((x, torch.ones(5, 9)), weight, out)
    with pytest.raises(TypeError, match="expected int8"):
        jitgemm.gemm_w4a8_nt(builders.lhs(3, 5, weight.k, "e4m3"), weight, out)
    with pytest.raises(ValueError, match="lhs_group: expected 0 with a weight's correction"):
        Problem(5, weight.n, weight.k, "s8", weight.format, lhs_group=128)


# ---- the bound -------------------------------------------------------------------------------------------------------


def test_the_bound_counts_parts_of_corrected_offsets_and_no_more_than_that():
    """Kernels with offsets in their records never add up by parts; with corrections they do."""
    plain, weight = pair(128, "offset")
    lhs = builders.lhs(3, 20, weight.k, "s8")
    (ref, today), (same_ref, parts) = (gemm_w4a8_bound(lhs, each, out_dtype=torch.float32) for each in (plain, weight))
    _, exact = gemm_w4a8_bound(lhs, weight.with_sums("exact"), out_dtype=torch.float32)
    assert torch.equal(ref, same_ref) and bool((parts > exact).all())
    # Blocks of corrections may lose more than sums in fp32 do, by 4 * 18 * 2^-23.
    assert bool((exact >= today * 0.5).all()) and bool((exact <= today * 40).all())


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", (0, 8))
def test_the_choice_is_the_symmetric_format_s_for_a_longer_k(experts):
    fmt = WeightFormat(128, True, "bf16", "s8", correction="fp16")
    for m in (1, 16, 64, 512, 4096):
        problem = Problem(m, 4096, 4096, "s8", fmt, experts=experts)
        longer = replace(problem, k=4096 + 128, format=fmt.stored)
        assert problem.lhs_columns == longer.k
        found = choose(problem, H200)
        assert found.format == fmt.kernel_format
        assert replace(found, format=fmt.stored) == choose(longer, H200)
        assert kernel_named(found.label, problem, H200) == found
        with pytest.raises(ValueError, match="kernel: expected one for these operands"):
            kernel_named(choose(longer, H200).label, problem, H200)
    assert all(spec.format.correction == "fp16" for spec in legal_kernels("s8", fmt, H200))


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ("int8", "int8_affine"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_quantises_for_its_weight(kind, activation):
    plain, weight = pair(128, kind)
    x = torch.randn(3, 7, weight.k, generator=builders.generator(1)).bfloat16()
    layers = [jitgemm.nn.W4A8Linear(each, activation=activation) for each in (plain, weight)]
    assert torch.equal(*(layer(x) for layer in layers))
    assert layers[1].quantise(x[0])[0].shape == (7, lhs_columns(weight.k, weight.correction))
    assert f"corrected in {weight.correction[0]}" in repr(layers[1])
    again = jitgemm.nn.W4A8Linear.from_state_dict(layers[1].state_dict())
    empty = jitgemm.nn.W4A8Linear.empty(
        weight.k, weight.n, activation=activation, symmetric=kind == "offset", offset=kind == "offset",
        correction=weight.correction[0],
    )  # fmt: skip
    empty.load_state_dict(layers[1].state_dict())
    for other in (again, empty, copy.deepcopy(layers[1])):
        assert torch.equal(other(x), layers[0](x)) and other.weight.format == weight.format
    with pytest.raises(ValueError, match="correction: expected None unless for int8 with a scale for each token"):
        jitgemm.nn.W4A8Linear(weight, activation="int8_block")


def test_experts_take_no_corrected_weights():
    _, w13 = pair(32, "zero", n=128, k=64, experts=2)
    _, w2 = pair(32, "zero", n=64, k=64, experts=2)
    with pytest.raises(ValueError, match="w13: expected a weight packed without correction"):
        jitgemm.nn.W4A8Experts(w13, w2, activation="int8")
    x, ids = torch.randn(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="w13: expected a weight packed without correction"):
        jitgemm.fused_experts(x, w13, w2, torch.ones(3, 1), ids, lhs_dtype=torch.int8)


@pytest.mark.parametrize("activation", ("int8", "int8_affine", "int8_block", "e4m3"))
def test_layers_of_a_checkpoint_are_corrected_where_they_can_be(activation):
    def tensors(name, scale_type):
        parts = builders.weight_parts(1, 64, 512, 128, zero_point=True, scale_type=scale_type)
        return parts, pack_quantized(parts, name)

    made = {"bf16": tensors("bf16", "bf16"), "fp16": tensors("fp16", "fp16")}
    settings, given = config(config_groups={"W4A16_ASYM": ["Linear"]}), {}
    for _, each in made.values():
        given |= each
    model = torch.nn.ModuleDict({name: torch.nn.Linear(512, 64, bias=False) for name in made}).to(torch.bfloat16)
    jitgemm.nn.load_(model, given, activation=activation, config=settings)
    x = torch.randn(5, 512, generator=builders.generator(1)).bfloat16()
    for name, layer in model.items():
        alone = jitgemm.nn.W4A8Linear.from_checkpoint(given, name, activation=activation, config=settings, device="cpu")
        fits = activation in ("int8", "int8_affine") and name == "bf16"
        assert layer.weight.correction == alone.weight.correction == (("fp16", 128) if fits else None)
        plain = jitgemm.load(given, name, config=settings, device="cpu")
        assert plain.correction is None
        right = jitgemm.nn.W4A8Linear(plain, activation=activation)(x)
        assert torch.equal(layer(x), right) and torch.equal(alone(x), right)
