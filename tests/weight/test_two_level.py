"""Weights in two levels: packing and its bytes, what raises, and kernels on the emulator with every code, factor and zero."""

from __future__ import annotations

import copy
import pickle

import builders
import moe_cases
import pytest
import torch
import two_level
from emulator.launch import COMPILER, emulate
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.formats import Problem, WeightFormat, format_named
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn.layers.linear import W4A8Linear
from jitgemm.nn.layers.shard_weight import part_of_weight
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
FORMAT = WeightFormat(0, False, "fp16", "two_level", code="two_level")


# ---- packing ---------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 24).map(lambda x: 8 * x),
    k=st.integers(1, 40).map(lambda x: 16 * x),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_what_was_packed_comes_back_bit_for_bit(seed, n, k, dtype):
    parts = two_level.parts(seed, n, k, dtype=dtype)
    weight = parts.packed
    for found, packed in zip(weight.unpack(), (parts.q, parts.factor, parts.zero), strict=True):
        assert builders.same_bits(found, packed)
    assert builders.same_bits(weight.unpack_channel_scale(), parts.scale[:, None])
    assert torch.equal(weight.dequantize().double(), parts.dequantize_fp64())
    assert torch.allclose(weight.row_sum[:n].double(), parts.dequantize_fp64().sum(1), rtol=1e-6, atol=1e-6)


def test_it_takes_four_and_an_eighth_bits():
    assert FORMAT.record_bytes * 8 == 64 * 128 * 4.125


def test_a_thread_finds_its_two_rows_factors_in_one_word():
    parts = two_level.parts(1, 64, 128)
    words = parts.packed.blocks[0, 0, 4096:].view(4, 8, 4)
    factor, product = parts.factor[:, 0], parts.factor[:, 0] * parts.zero[:, 0]
    for warp, row in ((0, 0), (2, 5), (3, 7)):
        rows = torch.tensor([16 * warp + row, 16 * warp + row + 8])
        assert torch.equal(words[warp, row], torch.cat((factor[rows], product[rows])))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_any_integers_and_strides_pack_to_the_same_bytes(dtype):
    parts = two_level.parts(1, 72, 416)
    factor, zero = parts.factor.to(dtype), parts.zero.to(dtype).T.contiguous().T
    other = jitgemm.pack_w4_two_level(parts.q.T.contiguous().T, factor, zero, parts.scale[:, None])
    assert torch.equal(other.blocks, parts.packed.blocks)


def test_experts_pack_as_each_does():
    parts = two_level.parts(2, 72, 416, experts=3)
    weight = parts.packed
    assert weight.experts == 3 and weight.unpack_channel_scale().shape == (3, 72, 1)
    for e in range(3):
        alone = jitgemm.pack_w4_two_level(parts.q[e], parts.factor[e], parts.zero[e], parts.scale[e])
        for name in ("blocks", "channel_scale", "row_sum"):
            assert torch.equal(getattr(weight[e], name), getattr(alone, name))
    stacked = jitgemm.W4Weight.stacked(3, lambda e: weight[e])
    assert torch.equal(stacked.dequantize().double(), parts.dequantize_fp64())


def test_names_and_files_hold_it():
    weight = two_level.parts(1, 72, 416).packed
    fmt = weight.format
    assert format_named(fmt.name) == fmt == FORMAT and fmt.name == "tl-channel-fp16-two_level"
    spec = KernelSpec("s8", fmt.kernel_format, block_m=16, block_n=64, stages=4)
    assert KernelSpec.from_label(spec.label) == spec
    again = jitgemm.W4Weight.from_state_dict(weight.state_dict("w."), "w.")
    assert again.format == fmt and torch.equal(again.blocks, weight.blocks)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert other.format == fmt and torch.equal(other.blocks, weight.blocks)
    assert "two levels, unsigned with zero points and factors per 128 k, fp16 scales" in repr(weight)
    assert "two levels, scale_dtype=fp16" in repr(W4A8Linear(weight, activation="int8"))


@pytest.mark.parametrize(
    ("dim", "n", "k", "world", "levels"),
    [("n", 128, 416, 2, True), ("n", 72, 416, 3, True), ("k", 72, 512, 2, True), ("k", 72, 320, 2, False)],
)
@pytest.mark.filterwarnings("ignore:tp_size")
def test_ranks_have_their_parts(dim, n, k, world, levels):
    parts = two_level.parts(3, n, k)
    cut = [part_of_weight(parts.packed, dim, rank, world, torch.int8) for rank in range(world)]
    assert all(part.format.factors == levels for part in cut)
    assert torch.equal(
        torch.cat([part.dequantize() for part in cut], "nk".index(dim)).double(), parts.dequantize_fp64()
    )
    assert all(part.row_sum is not None for part in cut)


# ---- what raises -----------------------------------------------------------------------------------------------------


def bytes_of(value: int, shape: tuple[int, ...] = (8, 2)) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": bytes_of(16, (8, 144))}, ValueError, "q: expected values 0..15, got 16..16"),
        ({"q": bytes_of(0, (8, 144)).char()}, TypeError, "q: expected uint8, got int8"),
        ({"q": bytes_of(0, (144,))}, ValueError, r"q: expected shape \[n, k\] or \[experts, n, k\], got \[144\]"),
        ({"q": bytes_of(0, (8, 136))}, ValueError, "q: expected k to be a positive multiple of 16, got 136"),
        ({"group_scale": bytes_of(0)}, ValueError, r"group_scale: expected values 1..127, got 0..0"),
        ({"group_scale": bytes_of(128)}, ValueError, r"group_scale: expected values 1..127, got 128..128"),
        ({"group_scale": bytes_of(1, (8, 1))}, ValueError, r"group_scale: expected shape \[8, 2\], got \[8, 1\]"),
        ({"group_scale": torch.ones(8, 2)}, TypeError, "group_scale: expected an integer dtype, got float32"),
        ({"group_zero": bytes_of(17)}, ValueError, "group_zero: expected values 0..16, got 17..17"),
        (
            {"group_zero": bytes_of(16), "group_scale": bytes_of(16)},
            ValueError,
            r"group_zero: expected group_zero \* group_scale of 0..255, got 256..256",
        ),
        (
            {"q": bytes_of(15, (8, 144)), "group_scale": bytes_of(9)},
            ValueError,
            r"group_scale: expected \(q - group_zero\) \* group_scale of -128..127, got 135..135",
        ),
        (
            {"group_zero": bytes_of(10), "group_scale": bytes_of(13)},
            ValueError,
            r"group_scale: expected .* of -128..127, got -130..-130",
        ),
        ({"scale": torch.ones(8)}, TypeError, "scale: expected bfloat16 or float16, got float32"),
        ({"scale": torch.ones(8, 2).half()}, ValueError, r"scale: expected shape \[8\] or \[8, 1\], got"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change, error, message):
    given = {
        "q": bytes_of(0, (8, 144)), "group_scale": bytes_of(1), "group_zero": bytes_of(0), "scale": torch.ones(8).half(),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        jitgemm.pack_w4_two_level(**{**given, **change})


def test_a_last_group_is_checked_too_and_named_with_its_expert():
    parts = two_level.parts(2, 72, 416, experts=3)
    parts.q[2, 5, 415], parts.factor[2, 5, 3], parts.zero[2, 5, 3] = 15, 100, 0
    with pytest.raises(ValueError, match=r"group_scale\[2\]: expected \(q - group_zero\) \* group_scale of -128..127"):
        _ = parts.packed


def test_sums_that_int32_may_not_hold_raise():
    largest = 2**17 - 16
    for k, fits in ((largest, True), (largest + 16, False)):
        given = (
            bytes_of(0, (8, k)),
            bytes_of(1, (8, -(-k // 128))),
            bytes_of(0, (8, -(-k // 128))),
            torch.ones(8).half(),
        )
        if fits:
            jitgemm.pack_w4_two_level(*given)
        else:
            with pytest.raises(ValueError, match=f"q: expected k of at most {largest}, for sums in int32, got {k}"):
                jitgemm.pack_w4_two_level(*given)


def test_e4m3_activations_raise_with_the_reason():
    weight, out = two_level.parts(1, 72, 416).packed, torch.empty(9, 72, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"\(x\): expected int8, as no e4m3 holds the integers of 8 bits that"):
        jitgemm.gemm_w4a8_nt(builders.lhs(1, 9, 416, "e4m3"), weight, out)
    with pytest.raises(ValueError, match="weight: expected activation int8.*, as no e4m3 holds the integers"):
        W4A8Linear(weight, activation="e4m3")
    with pytest.raises(ValueError, match="code: expected one of int4, got 'two_level'"):
        jitgemm.pack_w4(torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1), group_size=32, code="two_level")
    case = moe_cases.Case(tier="two_level", mode="e4m3")
    with pytest.raises(TypeError, match="w13: expected lhs_dtype int8, as no e4m3 holds the integers of 8 bits"):
        jitgemm.fused_experts(*case.arguments, **case.options)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def activations(kind: str, m: int, k: int) -> tuple:
    if kind == "affine":
        return builders.affine_lhs(1, m, k)
    return (builders.block_lhs if kind == "block" else builders.lhs)(1, m, k, "s8")


@pytest.mark.parametrize("kind", ["token", "affine", "block"])
def test_the_reference_is_the_specification(kind):
    parts = two_level.parts(5, 72, 416)
    x, scale, *zero = lhs = activations(kind, 9, 416)
    found = jitgemm.gemm_w4a8_reference(lhs, parts.packed, out_dtype=torch.float64)
    token = scale.double().repeat_interleave(128, 1)[:, :416] if kind == "block" else scale.double().view(-1, 1)
    values = (x.double() - (zero[0].double() if zero else 0)) * token
    assert torch.allclose(found, values @ parts.dequantize_fp64().T, rtol=1e-12, atol=1e-9)


@emulated
def test_every_code_with_every_factor_and_zero_point(monkeypatch):
    """Each product alone."""
    parts = two_level.all_triples()
    weight, exact, k = parts.packed, parts.integers(), parts.q.shape[1]
    emulate(monkeypatch)
    for first in range(0, k, 2048):
        columns = torch.arange(first, min(first + 2048, k))
        x = torch.zeros(len(columns), k, dtype=torch.int8)
        x[torch.arange(len(columns)), columns] = 1
        out = torch.empty(len(columns), 8)
        jitgemm.gemm_w4a8_nt((x, torch.ones(len(columns))), weight, out)
        assert torch.equal(out.T.long(), exact[:, columns])


@emulated
@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [
        (9, 72, 416, {}),
        (33, 136, 1040, dict(kind="affine", bias=True)),
        (70, 136, 640, dict(kind="block")),
        (130, 264, 288, dict(bias=True)),
        (5, 72, 416, dict(batch_invariant=True)),
    ],
    ids=str,
)
def test_a_kernel_computes_what_the_reference_does(monkeypatch, m, n, k, options):
    weight, lhs = two_level.parts(m, n, k).packed, activations(options.get("kind", "token"), m, k)
    bias = builders.bias(2, n) if options.get("bias") else None
    ref, bound = gemm_w4a8_bound(lhs, weight, bias=bias)
    emulator, out = emulate(monkeypatch), torch.empty(m, n, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, bias=bias, batch_invariant=options.get("batch_invariant", False))
    assert emulator.launched[0].startswith("s8tl-channel-")
    assert bool(((out.double() - ref).abs() <= bound).all())


SHAPES = {
    "split k": dict(block_m=16, block_n=64, stages=4, split_k=2, warpgroups_k=2, scatter=True),
    "shared weights": dict(block_m=128, block_n=128, stages=4, multicast_rhs=2),
    "shared activations": dict(block_m=128, block_n=128, stages=4, multicast_lhs=2),
    "two CTAs": dict(block_m=32, block_n=64, stages=4, split_k=2, ctas_per_sm=2),
}


@emulated
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_every_shape(monkeypatch, shape):
    weight, lhs = two_level.parts(4, 264, 640).packed, builders.lhs(1, 120, 640, "s8")
    spec = KernelSpec("s8", weight.format.kernel_format, **SHAPES[shape])
    emulate(monkeypatch)
    out = torch.empty(120, 264, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=spec.label)
    ref, bound = gemm_w4a8_bound(lhs, weight)
    assert bool(((out.double() - ref).abs() <= bound).all())


@emulated
@pytest.mark.parametrize("gathered", [False, True])
def test_contiguous_rows_of_experts(monkeypatch, gathered):
    counts = [0, 3, 40, 0, 17]
    ends = torch.tensor(counts).cumsum(0).tolist()
    weight = two_level.parts(6, 136, 416, experts=5).packed
    x, scale = lhs = builders.lhs(3, 23 if gathered else 60, 416, "s8")
    index = torch.randint(0, 23, (60,), generator=builders.generator(4), dtype=torch.int32) if gathered else None
    out, offsets = torch.empty(60, 136, dtype=torch.bfloat16), torch.tensor([0, *ends], dtype=torch.int32)
    emulate(monkeypatch)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, out, offsets, row_index=index)
    for e, (count, end) in enumerate(zip(counts, ends)):
        rows = torch.arange(end - count, end)
        taken = rows if index is None else index[rows].long()
        ref, bound = gemm_w4a8_bound((x[taken], scale[taken]), weight[e])
        assert bool(((out[rows].double() - ref).abs() <= bound).all()), e


@pytest.mark.nvrtc
@pytest.mark.parametrize("experts", [0, 64])
def test_chosen_kernels_do_not_spill(compiles_well, experts):
    rows = (16, 16384) if experts else (1, 32, 64, 128, 512, 4096)
    problems = [Problem(m, 4096, 4096, "s8", FORMAT.kernel_format, experts=experts) for m in rows]
    compiles_well(choose(problem, DEVICES["h200"]) for problem in problems)


@pytest.mark.parametrize("activation", ["int8", "int8_affine"])
def test_a_layer_computes_what_its_call_does(activation):
    weight, x = two_level.parts(1, 72, 416).packed, torch.randn(5, 416).bfloat16()
    bias = builders.bias(2, 72)
    layer = W4A8Linear(weight, bias, activation=activation)
    lhs = jitgemm.quantize_activations(x, torch.int8, affine=activation.endswith("affine"))
    assert torch.equal(layer(x), jitgemm.gemm_w4a8_reference(lhs, weight, bias=bias))


@pytest.mark.parametrize("device", ["reference", pytest.param("emulator", marks=emulated)])
@pytest.mark.parametrize("mode", ["s8", "s8z"])
def test_a_layer_of_experts(monkeypatch, mode, device):
    case = moe_cases.Case(tier="two_level", k=192, inter=160, scale=1.0, dtype=torch.bfloat16, mode=mode)
    expected = moe_cases.by_definition(case)
    if device == "emulator":
        emulate(monkeypatch)
    out = jitgemm.fused_experts(*case.arguments, **case.options)
    size = expected.abs().amax(1, keepdim=True)
    assert bool(((out.double() - expected).abs() <= 0.06 * size).all())
