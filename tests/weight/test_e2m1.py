"""What MXFP4 and NVFP4 weights have in common: files and parts, what they cannot meet, the specification, and kernels that
multiply them, on the emulator."""

from __future__ import annotations

import copy
import pickle

import builders
import e2m1
import moe_cases
import mxfp4
import nvfp4
import pytest
import torch
from e2m1 import KINDS, kinds, name_of, tiers
from emulator.launch import COMPILER, emulate

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.formats import Problem, format_named
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn.layers.linear import W4A8Linear
from jitgemm.nn.layers.shard_weight import part_of_weight
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
blocks = pytest.mark.parametrize("block", [False, True], ids=["per token", "per token and 128 k"])


def lhs_of(block: bool | None, *sizes) -> tuple[torch.Tensor, torch.Tensor]:
    return (builders.block_lhs if block else builders.lhs)(*sizes, "e4m3")


def assert_within_the_bound(out, lhs, weight, bias=None):
    ref, bound = gemm_w4a8_bound(lhs, weight, bias=bias)
    assert bool(((out.double() - ref).abs() <= bound).all())


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["int8", "fp4", "strided"])
@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_form_of_codes_packs_to_the_same_bytes(name, form):
    parts, pack = {"MXFP4": (mxfp4.parts(1, 72, 416), jitgemm.pack_mxfp4),
                   "NVFP4": (nvfp4.parts(1, 72, 416), jitgemm.pack_nvfp4)}[name]  # fmt: skip
    codes, more = parts.canonical, [parts.scales] + ([parts.whole] if name == "NVFP4" else [])
    codes = {"int8": codes.view(torch.int8), "fp4": codes.view(torch.float4_e2m1fn_x2),
             "strided": codes.repeat_interleave(2, 0)[::2]}[form]  # fmt: skip
    assert torch.equal(pack(codes, *more).blocks, parts.packed.blocks)


@kinds
def test_names_and_files_hold_it(kind):
    weight = KINDS[kind](1, 72, 416).packed
    fmt = weight.format
    assert format_named(fmt.name) == fmt and fmt.name.startswith(f"{name_of(kind)[:2].lower()}-")
    spec = KernelSpec("e4m3", fmt.kernel_format, block_m=16, block_n=64, stages=4)
    assert KernelSpec.from_label(spec.label) == spec
    again = jitgemm.W4Weight.from_state_dict(weight.state_dict("w."), "w.")
    assert again.format == fmt and torch.equal(again.blocks, weight.blocks)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert other.format == fmt and torch.equal(other.blocks, weight.blocks)
    assert fmt.tier in repr(weight) and name_of(kind).lower() in repr(weight)


@kinds
@pytest.mark.parametrize(
    ("dim", "n", "k", "world"), [("n", 128, 416, 2), ("n", 72, 416, 3), ("k", 72, 512, 2), ("k", 72, 320, 2)]
)
def test_ranks_have_their_parts(kind, dim, n, k, world):
    weight = KINDS[kind](3, n, k).packed
    cut = [part_of_weight(weight, dim, rank, world, torch.float8_e4m3fn) for rank in range(world)]
    assert torch.equal(torch.cat([part.dequantize() for part in cut], "nk".index(dim)), weight.dequantize())


# ---- what raises -----------------------------------------------------------------------------------------------------


@kinds
def test_int8_activations_raise_with_the_reason(kind):
    weight, out = KINDS[kind](1, 72, 416).packed, torch.empty(9, 72, dtype=torch.bfloat16)
    reason = f"as no integers of 8 bits hold {name_of(kind)}"
    with pytest.raises(TypeError, match=rf"\(x\): expected float8_e4m3fn, {reason}"):
        jitgemm.gemm_w4a8_nt(builders.lhs(1, 9, 416, "s8"), weight, out)
    for activation in ("int8", "int8_affine", "int8_block"):
        with pytest.raises(ValueError, match=f"weight: expected activation e4m3.*, {reason}"):
            W4A8Linear(weight, activation=activation)


@tiers
def test_experts_raise_for_int8_with_the_reason(tier):
    case, reason = moe_cases.Case(tier=tier, mode="s8"), f"as no integers of 8 bits hold {name_of(tier)}"
    with pytest.raises(TypeError, match=f"w13: expected lhs_dtype float8_e4m3fn, {reason}"):
        jitgemm.fused_experts(*case.arguments, **case.options)


@pytest.mark.parametrize("code", ["e2m1", "nvfp4"])
def test_pack_w4_does_not_take_its_scales(code):
    with pytest.raises(ValueError, match=f"code: expected one of int4, got '{code}'"):
        jitgemm.pack_w4(torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1), group_size=32, code=code)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@kinds
@blocks
def test_the_reference_is_the_specification(kind, block):
    parts = KINDS[kind](5, 72, 416)
    x, scale = lhs = lhs_of(block, 1, 9, 416)
    found = jitgemm.gemm_w4a8_reference(lhs, parts.packed, out_dtype=torch.float64)
    x, weight = x.double(), parts.dequantize_fp64()
    if block:
        expected = x * scale.double().repeat_interleave(128, 1)[:, :416] @ weight.T
    else:
        expected = x @ weight.T * scale.double().view(-1, 1)
    powers = name_of(kind) == "MXFP4"  # a tensor's scale is none, so that the order counts
    assert torch.allclose(found, expected, rtol=1e-12, atol=0 if powers else 1e-12)


@emulated
@kinds
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
def test_a_kernel_computes_what_the_reference_does(monkeypatch, kind, m, n, k, options):
    weight, lhs = KINDS[kind](m, n, k).packed, lhs_of(options.get("block"), 1, m, k)
    assert weight.format.group_size == mxfp4.TIERS.get(kind, 0)
    bias = builders.bias(2, n) if options.get("bias") else None
    emulator, out = emulate(monkeypatch), torch.empty(m, n, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, bias=bias, batch_invariant=options.get("batch_invariant", False))
    assert emulator.launched[0].startswith(e2m1.LABELS.get(kind, e2m1.MX_LABEL))
    assert_within_the_bound(out, lhs, weight, bias)


@pytest.mark.nvrtc
@kinds
@pytest.mark.parametrize("experts", [0, 64])
def test_chosen_kernels_do_not_spill(compiles_well, kind, experts):
    fmt = KINDS[kind](1, 8, 4096).packed.format
    rows = (16, 16384) if experts else (1, 32, 64, 128, 4096)
    problems = [Problem(m, 4096, 4096, "e4m3", fmt, experts=experts, lhs_group=g) for m in rows for g in (0, 128)]
    spilled = 40 if experts and name_of(kind) == "MXFP4" else 0  # 20 of one by NVRTC 13.5
    compiles_well((choose(problem, DEVICES["h200"]) for problem in problems), spilled)


SHAPES = {
    "split k": dict(block_m=16, block_n=64, stages=4, split_k=2, warpgroups_k=2, scatter=True),
    "shared weights": dict(block_m=112, block_n=128, stages=3, halves=2, multicast_rhs=2),
    "shared activations": dict(block_m=112, block_n=128, stages=3, halves=2, multicast_lhs=2),
    "two CTAs": dict(block_m=32, block_n=64, stages=4, split_k=2, ctas_per_sm=2),
}


@emulated
@kinds
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_every_shape(monkeypatch, kind, shape):
    weight, lhs = KINDS[kind](4, 264, 640).packed, builders.lhs(1, 120, 640, "e4m3")
    spec = KernelSpec("e4m3", weight.format.kernel_format, **SHAPES[shape])
    emulate(monkeypatch)
    out = torch.empty(120, 264, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=spec.label)
    assert_within_the_bound(out, lhs, weight)


# ---- experts ---------------------------------------------------------------------------------------------------------


def rows_of(lhs: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, scale = lhs
    return x.view(torch.uint8)[rows].view(x.dtype), scale[rows]


@emulated
@kinds
@blocks
@pytest.mark.parametrize("gathered", [False, True])
def test_contiguous_rows_of_experts(monkeypatch, kind, block, gathered):
    counts = [0, 3, 40, 0, 17]
    ends = torch.tensor(counts).cumsum(0).tolist()
    weight, lhs = KINDS[kind](6, 136, 416, experts=5).packed, lhs_of(block, 3, 23 if gathered else 60, 416)
    index = torch.randint(0, 23, (60,), generator=builders.generator(4), dtype=torch.int32) if gathered else None
    out, offsets = torch.empty(60, 136, dtype=torch.bfloat16), torch.tensor([0, *ends], dtype=torch.int32)
    emulate(monkeypatch)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, out, offsets, row_index=index)
    for e, (count, end) in enumerate(zip(counts, ends)):
        rows = torch.arange(end - count, end)
        assert_within_the_bound(out[rows], rows_of(lhs, rows if index is None else index[rows].long()), weight[e])


@emulated
@kinds
def test_masked_rows_of_experts(monkeypatch, kind):
    weight, lhs = KINDS[kind](6, 136, 416, experts=5).packed, builders.lhs(3, 5 * 12, 416, "e4m3")
    out, counts = torch.zeros(5, 12, 136, dtype=torch.bfloat16), torch.tensor([3, 0, 12, 1, 7], dtype=torch.int32)
    emulate(monkeypatch)
    by_expert = lhs[0].view(5, 12, 416), lhs[1].view(5, 12)
    jitgemm.m_grouped_gemm_w4a8_nt_masked(by_expert, weight, out, counts, expected_m=4)
    for e, count in enumerate(counts.tolist()):
        assert_within_the_bound(out[e, :count], rows_of(lhs, torch.arange(12 * e, 12 * e + count)), weight[e])
        assert not out[e, count:].any()


# ---- layers ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("activation", ["e4m3", "e4m3_block"])
def test_a_layer_computes_what_its_call_does(kind, activation):
    weight, x = KINDS[kind](1, 72, 416).packed, torch.randn(5, 416).bfloat16()
    bias = builders.bias(2, 72)
    layer = W4A8Linear(weight, bias, activation=activation)
    scheme = "block" if activation.endswith("block") else "token"
    lhs = jitgemm.quantize_activations(x, torch.float8_e4m3fn, scheme=scheme)
    assert torch.equal(layer(x), jitgemm.gemm_w4a8_reference(lhs, weight, bias=bias))


@pytest.mark.parametrize("device", ["reference", pytest.param("emulator", marks=emulated)])
@tiers
@pytest.mark.parametrize("biased", [True, False], ids=["biases", ""])
@pytest.mark.parametrize(
    "options", [{}, dict(scheme="block"), dict(activation="swiglu_oai", order="interleaved", limit=7.0)], ids=str
)
def test_a_layer_of_experts(monkeypatch, tier, options, biased, device):
    sizes = dict(k=192, inter=160, scale=1.0, dtype=torch.bfloat16, mode="e4m3")
    case = moe_cases.Case(tier=tier, options=dict(options), **sizes)
    if biased:
        g = builders.generator(8)
        case.options["bias13"], case.options["bias2"] = (torch.randn(5, n, generator=g) * 0.1 for n in (320, 72))
    expected = moe_cases.by_definition(case)
    if device == "emulator":
        emulate(monkeypatch)
    out = jitgemm.fused_experts(*case.arguments, **case.options)
    size = expected.abs().amax(1, keepdim=True)
    assert bool(((out.double() - expected).abs() <= 0.06 * size).all())


@pytest.mark.parametrize("device", ["reference", pytest.param("emulator", marks=emulated)])
@tiers
@blocks
def test_a_layer_of_sorted_tokens(monkeypatch, tier, block, device):
    options = {"scheme": "block" if block else "token"}
    sizes = dict(experts=3, k=192, inter=160, mode="e4m3", dtype=torch.bfloat16, scale=1.0)
    case, counts = moe_cases.Case(tier=tier, options=options, **sizes), (3, 0, 5)
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
