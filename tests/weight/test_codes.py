"""What MXFP4, NVFP4 and two levels have in common: files and parts, what they cannot meet, the specification, and
kernels that multiply them, on the emulator."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle

import builders
import edges
import moe_cases
import mxfp4
import nvfp4
import pytest
import torch
import two_level
from codes import FORMS, KINDS, MODES, PRODUCTS, TIERS, form_and_scheme, forms, kinds, one_hot, rows_of
from emulator.launch import COMPILER, emulate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import emulated
from same_weights import TENSORS, same_weight
from two_level import bytes_of

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.formats import format_named, lhs_columns
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn.layers.by_width import W4A8Linear
from jitgemm.nn.layers.shard_weight import part_of_weight
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES
from jitgemm.weight import layout
from jitgemm.weight.correction import with_sums
from jitgemm.weight.packed import Weight


def assert_within_the_bound(out, lhs, weight, bias=None):
    ref, bound = gemm_w4a8_bound(lhs, weight, bias=bias)
    assert bool(((out.double() - ref).abs() <= bound).all())


def on_both(monkeypatch, call):
    """What a call gives: the reference's result, and the emulator's where there is a compiler."""
    yield call()
    if COMPILER is not None:
        emulator = emulate(monkeypatch)
        yield call()
        assert emulator.launched


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_form_of_codes_packs_to_the_same_bytes(name):
    parts, pack = {"MXFP4": (mxfp4.parts(1, 72, 416), jitgemm.pack_mxfp4),
                   "NVFP4": (nvfp4.parts(1, 72, 416), jitgemm.pack_nvfp4)}[name]  # fmt: skip
    codes, given_ = parts.canonical, [parts.scales] + ([parts.whole] if name == "NVFP4" else [])
    forms = [(codes.view(torch.int8), *given_), (codes.view(torch.float4_e2m1fn_x2), *given_),
             (codes.repeat_interleave(2, 0)[::2], *given_)]  # fmt: skip
    if name == "MXFP4":
        forms += [(parts.codes, parts.scales), (codes, parts.scales.view(torch.float8_e8m0fnu))]
    assert all(torch.equal(pack(*form).blocks, parts.packed.blocks) for form in forms)


def unpacked_from(parts) -> tuple[torch.Tensor | None, ...]:
    """What `unpack` gives back: codes, scales, zero points; offsets and the rows' scales, where there are any."""
    if isinstance(parts, mxfp4.Parts):
        return parts.codes, parts.scales.view(torch.float8_e8m0fnu), None, None, None
    if isinstance(parts, two_level.Parts):
        return parts.q, parts.factor, parts.zero, None, parts.scale[:, None]
    return parts.q, parts.scale, parts.zero, parts.offset, None


@pytest.mark.parametrize("name", FORMS)
@example(seed=1, n=72, k=400)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 24).map(lambda x: 8 * x),
    k=st.integers(2, 56).map(lambda x: 16 * x),
)
@settings(max_examples=8, deadline=None)
def test_what_was_packed_comes_back(name, seed, n, k):
    parts = FORMS[name].parts(seed, n, k)
    if isinstance(parts, mxfp4.Parts):
        parts.codes[:, ::16] = 7  # groups of zeros have any scale
    weight, exact = parts.packed, parts.dequantize_fp64()
    assert torch.equal(weight.dequantize(), exact.float() if weight.correction or weight.bits == 8 else as_fp32(parts))
    if weight.row_sum is not None:
        assert torch.allclose(weight.row_sum[:n].double(), exact.sum(1), rtol=1e-5, atol=1e-5)
    if name not in ("near", "far"):  # whose codes and scales are other ones that give the same: test_nvfp4.py
        given_ = unpacked_from(parts)
        found = *weight.unpack(), weight.unpack().offset, weight.unpack().row_scale
        assert all(a is b is None or builders.same_bits(a, b) for a, b in zip(found, given_, strict=True))


def as_fp32(parts) -> torch.Tensor:
    """Of an offset: one rounding for the product and one for the sum."""
    if getattr(parts, "offset", None) is None:
        return parts.dequantize_fp64().float()
    product, group = dataclasses.replace(parts, offset=None), torch.arange(parts.q.shape[1]) // parts.group_size
    return (product.dequantize_fp64().float().double() + parts.offset.double()[:, group]).float()


@forms
def test_experts_are_packed_as_each_is_in_chunks_and_stacked(monkeypatch, kind):
    parts = kind.parts(2, 200, 288, experts=3)
    weight, fields = parts.packed, {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    each = [dataclasses.replace(parts, **{name: value[e] for name, value in tensors.items()}).packed for e in range(3)]
    assert weight.experts == len(weight) == 3 and weight.shape == (3, 200, 288)
    assert all(map(same_weight, weight, each))
    again = type(weight).stacked(3, each.__getitem__)
    assert same_weight(again, weight) and again.ready and again.plan_key == weight.plan_key != each[0].plan_key
    exact = weight.dequantize()
    assert builders.same_bits(exact, torch.stack([one.dequantize() for one in each]))
    monkeypatch.setattr(layout, "CHUNK_CODES", 1)
    assert len(list(layout.strip_chunks(200, 288))) == 4
    assert same_weight(parts.packed, weight) and torch.equal(weight.dequantize(), exact)


@forms
@pytest.mark.parametrize("experts", [None, 3])
def test_names_copies_and_files_hold_it(kind, experts, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    parts = kind.parts(1, 72, 400, experts=experts)
    if not experts and isinstance(parts, builders.WeightParts) and parts.bits == 4:
        parts = dataclasses.replace(parts, permutation=torch.randperm(400, generator=builders.generator(8)))
    weight = parts.packed
    fmt = weight.format
    assert format_named(fmt.name) == fmt and fmt.name.startswith(kind.format)
    if kind.name != "int":
        assert kind.name.lower() in repr(weight) and (kind.name == "two levels" or fmt.tier in repr(weight))
    spec = KernelSpec(kind.lhs, fmt.kernel_format, block_m=16, block_n=64, stages=4, experts=64 if experts else 0)
    assert KernelSpec.from_label(spec.label) == spec
    state = weight.state_dict("w.")
    assert all(type(each) is torch.Tensor and each.is_contiguous() for each in state.values())
    torch.save(state, tmp_path / "w.pt")
    safetensors.save_file(state | {"odd": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "w.safetensors")
    files = state, torch.load(tmp_path / "w.pt", weights_only=True), safetensors.load_file(tmp_path / "w.safetensors")
    tensors = [getattr(weight, name) for name in TENSORS]
    copies = copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))
    copies = (*copies, weight.with_tensors(*(None if each is None else each.clone() for each in tensors)))
    assert all(other.sums == weight.sums and other.blocks is not weight.blocks for other in copies)
    of_files = [Weight.from_state_dict(each, "w.") for each in files]
    if weight.sums != "f32":  # which no file says
        weight, tensors = weight.with_sums("f32"), [getattr(weight.with_sums("f32"), name) for name in TENSORS]
        copies = [other.with_sums("f32") for other in copies]
    for other in (copy.copy(weight), *copies, *of_files):
        assert other is not weight and type(other) is type(weight) and other.experts == experts
        assert same_weight(other, weight) and other.ready and other.blocks.data_ptr() % 16 == 0
    moved = weight.to("meta")
    assert [each is None for each in tensors] == [getattr(moved, name) is None for name in TENSORS]
    assert moved.shape == weight.shape and moved.blocks.is_meta and moved.format == fmt
    if experts:
        expert = type(weight).from_state_dict(weight[1].state_dict())
        assert same_weight(expert, weight[1]) and expert.experts is None


@forms
@pytest.mark.parametrize(
    ("dim", "n", "k", "world"), [("n", 128, 416, 2), ("n", 72, 416, 3), ("k", 72, 512, 2), ("k", 72, 320, 2)]
)
@pytest.mark.filterwarnings("ignore:tp_size")
def test_ranks_have_their_parts(kind, dim, n, k, world):
    weight = kind.parts(3, n, k).packed
    cut = [part_of_weight(weight, dim, rank, world, kind.lhs_dtype) for rank in range(world)]
    assert torch.equal(torch.cat([part.dequantize() for part in cut], "nk".index(dim)), weight.dequantize())
    assert all((part.row_sum is None) == (weight.row_sum is None) for part in cut)


# ---- what raises -----------------------------------------------------------------------------------------------------


@kinds
def test_activations_of_another_type_raise_with_the_reason(kind):
    weight, out = kind.parts(1, 72, 416).packed, torch.empty(9, 72, dtype=torch.bfloat16)
    (other,) = builders.LHS_DTYPES.keys() - {kind.lhs}
    dtype, mine, theirs = {
        "e4m3": ("float8_e4m3fn", "e4m3", ("int8", "int8_affine", "int8_block")), "s8": ("int8", "int8", ("e4m3",))
    }[kind.lhs]  # fmt: skip
    with pytest.raises(TypeError, match=rf"\(x\): expected {dtype}, {kind.reason}"):
        jitgemm.gemm_w4a8_nt(builders.lhs(1, 9, 416, other), weight, out)
    for activation in theirs:
        with pytest.raises(ValueError, match=f"weight: expected activation {mine}.*, {kind.reason}"):
            W4A8Linear(weight, activation=activation)


@pytest.mark.parametrize("tier", TIERS)
def test_experts_raise_for_other_activations_with_the_reason(tier):
    lhs = TIERS[tier].lhs
    case = moe_cases.Case(tier=tier, mode="s8" if lhs == "e4m3" else "e4m3")
    dtype = {"e4m3": "float8_e4m3fn", "s8": "int8"}[lhs]
    with pytest.raises(TypeError, match=f"w13: expected lhs_dtype {dtype}, {TIERS[tier].reason}"):
        jitgemm.fused_experts(*case.arguments, **case.options)


@pytest.mark.parametrize("code", ["e2m1", "nvfp4", "two_level"])
def test_pack_w4_does_not_take_its_scales(code):
    with pytest.raises(ValueError, match=f"code: expected one of int4, got '{code}'"):
        jitgemm.pack_w4(torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1), group_size=32, code=code)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", edges.EDGES)
def test_every_packer_names_a_scale_that_is_no_finite_number(name, value):
    parts = edges.EDGES[name][0]("cpu")
    field, argument = {nvfp4.Parts: ("whole", "global_scale"), mxfp4.Parts: ("scales", "scales")}.get(
        type(parts), ("scale", "scale")
    )
    wrong = getattr(parts, field).clone()
    wrong.flatten()[-1] = 255 if argument == "scales" else value
    with pytest.raises(ValueError, match=rf"{argument}: expected (finite )?numbers, got (nan|-inf|255).* at \["):
        _ = dataclasses.replace(parts, **{field: wrong}).packed


MX, NV = mxfp4.parts(1, 72, 416), nvfp4.parts(1, 8, 64)
GIVEN = {
    "pack_mxfp4": {"codes": MX.canonical, "scales": MX.scales},
    "pack_nvfp4": {"codes": NV.canonical, "scales": NV.scales, "global_scale": NV.whole},
    "pack_w4_two_level": {
        "q": bytes_of(0, 8, 144), "group_scale": bytes_of(1, 8, 2), "group_zero": bytes_of(0, 8, 2), "scale": torch.ones(8).half(),
    },
}  # fmt: skip
WRONG_TYPES = [
    ("pack_mxfp4", dict(codes=torch.zeros(72, 208)), r"codes: expected uint8 or int8 or .*, got float32"),
    ("pack_mxfp4", dict(scales=torch.zeros(72, 13)), r"scales: expected float8_e8m0fnu or uint8, got float32"),
    ("pack_nvfp4", dict(scales=-torch.ones(8, 4)), "scales: expected float8_e4m3fn, got float32"),
    ("pack_nvfp4", dict(global_scale=torch.ones(1).double()), "global_scale: expected float32, got float64"),
    ("pack_w4_two_level", dict(q=bytes_of(0, 8, 144).char()), "q: expected uint8, got int8"),
    ("pack_w4_two_level", dict(group_scale=torch.ones(8, 2)), "group_scale: expected an integer dtype, got float32"),
    ("pack_w4_two_level", dict(scale=torch.ones(8)), "scale: expected bfloat16 or float16, got float32"),
]  # fmt: skip
WRONG_VALUES = [
    ("pack_mxfp4", dict(scales=bytes_of(255, 72, 13)), r"scales: expected numbers, got 255"),
    ("pack_mxfp4", dict(codes=bytes_of(16, 72, 416)), r"codes: expected values 0\.\.15, got 16"),
    ("pack_mxfp4", dict(scales=bytes_of(0, 72, 4)), r"scales: expected columns for 32 k each, 13 "),
    ("pack_mxfp4", dict(scales=bytes_of(0, 64, 13)), r"scales: expected shape \[72, ceil"),
    ("pack_mxfp4", dict(codes=bytes_of(0, 72)), r"codes: expected shape"),
    ("pack_mxfp4", dict(k=208), r"k: expected one of \[416\] by codes and scales, got 208"),
    ("pack_mxfp4", dict(codes=bytes_of(0, 70, 208), scales=bytes_of(0, 70, 13)), r"codes: expected n"),
    ("pack_mxfp4", dict(codes=bytes_of(0, 8, 16), scales=bytes_of(0, 8, 1)), r"k: expected the argument k to say"),
    ("pack_nvfp4", dict(scales=(-torch.ones(8, 4)).to(torch.float8_e4m3fn)), "scales: .* at least 0, got -1.0 at .0, 0."),
    ("pack_nvfp4", dict(scales=nvfp4.scales_of(bytes_of(0x7F, 8, 4))), "scales: .* got nan at"),
    ("pack_nvfp4", dict(scales=nvfp4.scales_of(bytes_of(1, 8, 2))), r"scales: expected shape \[8, 4\], got \[8, 2\]"),
    ("pack_nvfp4", dict(codes=bytes_of(0, 32)), r"codes: expected shape \[n, k / 2\] or .* got \[32\]"),
    ("pack_nvfp4", dict(global_scale=torch.ones(3)), r"global_scale: expected one element or \[8\], got float32 \[3\]"),
    ("pack_w4_two_level", dict(q=bytes_of(16, 8, 144)), "q: expected values 0..15, got 16..16"),
    ("pack_w4_two_level", dict(q=bytes_of(0, 144)), r"q: expected shape \[n, k\] or \[experts, n, k\], got \[144\]"),
    ("pack_w4_two_level", dict(q=bytes_of(0, 8, 136)), "q: expected k to be a positive multiple of 16, got 136"),
    ("pack_w4_two_level", dict(group_scale=bytes_of(0, 8, 2)), "group_scale: expected values 1..127, got 0..0"),
    ("pack_w4_two_level", dict(group_scale=bytes_of(128, 8, 2)), "group_scale: expected values 1..127, got 128..128"),
    ("pack_w4_two_level", dict(group_scale=bytes_of(1, 8, 1)), r"group_scale: expected shape \[8, 2\], got \[8, 1\]"),
    ("pack_w4_two_level", dict(group_zero=bytes_of(17, 8, 2)), "group_zero: expected values 0..16, got 17..17"),
    ("pack_w4_two_level", dict(group_zero=bytes_of(16, 8, 2), group_scale=bytes_of(16, 8, 2)),
     r"group_zero: expected group_zero \* group_scale of 0..255, got 256..256"),
    ("pack_w4_two_level", dict(q=bytes_of(15, 8, 144), group_scale=bytes_of(9, 8, 2)),
     r"group_scale: expected \(q - group_zero\) \* group_scale of -128..127, got 135..135"),
    ("pack_w4_two_level", dict(group_zero=bytes_of(10, 8, 2), group_scale=bytes_of(13, 8, 2)),
     r"group_scale: expected .* of -128..127, got -130..-130"),
    ("pack_w4_two_level", dict(scale=torch.ones(8, 2).half()), r"scale: expected shape \[8\] or \[8, 1\], got"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "pack", "change", "message"),
    [*((TypeError, *row) for row in WRONG_TYPES), *((ValueError, *row) for row in WRONG_VALUES)],
)
def test_wrong_arguments_are_named(error, pack, change, message):
    with pytest.raises(error, match=message):
        getattr(jitgemm, pack)(**(GIVEN[pack] | change))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("row", {"scales": 255}, r"scales\[2\]: expected numbers, got 255, e8m0's NaN, at \[5, 3\]"),
        ("near", {"scales": 127}, r"scales\[2\]: expected numbers of at least 0, got nan at \[5, 3\]"),
        ("two levels", {"q": 15, "factor": 100, "zero": 0},
         r"group_scale\[2\]: expected \(q - group_zero\) \* group_scale of -128..127"),
        ("int4 of any", {"q": 8}, r"q\[2\]: expected values -8..7, got -8..8"),
        ("zero points", {"zero": 17}, r"zero\[2\]: expected values 0..16, got 0..17"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_an_expert_is_named_with_its_place(kind, values, message):
    """The last of its row's groups among them."""
    parts = FORMS[kind].parts(2, 72, 416, experts=3)
    for name, value in values.items():
        tensor = getattr(parts, name)
        last = 415 if name == "q" else 3
        tensor.view(torch.uint8 if tensor.dtype == torch.float8_e4m3fn else tensor.dtype)[2, 5, last] = value
    with pytest.raises(ValueError, match=message):
        _ = parts.packed


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", edges.EDGES)
def test_no_rows_are_no_rows(monkeypatch, name):
    make, lhs_type, scheme = edges.EDGES[name]
    weight, none = make("cpu").packed, tuple(each[:0] for each in edges.lhs_of(lhs_type, scheme))
    forms, weights = [none], [weight, *([weight.with_sums("exact")] if lhs_type == "s8" and weight.bits == 4 else [])]
    if weight.correction:
        forms.append((with_sums(none[0], weight.correction), *none[1:]))
        assert forms[1][0].shape == (0, lhs_columns(edges.K, weight.correction))

    def both():
        for lhs, rhs in itertools.product(forms, weights):
            edges.call_of(weight)(lhs, rhs, torch.empty(0, edges.N))

    both()
    emulator = emulate(monkeypatch) if COMPILER else None
    both()
    assert emulator is None or not emulator.launched


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        pytest.param(kind, scheme, id=f"{name}-{scheme}")
        for name, kind in FORMS.items()
        for scheme in dict.fromkeys(kind.schemes)
        if scheme != "e8m0"
    ],
)
def test_the_reference_is_the_specification(kind, scheme):
    parts = kind.parts(5, 72, 416)
    x, scale, *zero = lhs = kind.lhs_of(scheme, 1, 9, 416)
    found = jitgemm.gemm_w4a8_reference(lhs, parts.packed, out_dtype=torch.float64)
    scale = scale.double().repeat_interleave(128, 1)[:, :416] if scheme == "block" else scale.double().view(-1, 1)
    expected = (x.double() - (zero[0].double() if zero else 0)) * scale @ parts.dequantize_fp64().T
    # The order counts where scales are no powers of two. An integer less a zero point is exact, its scaled value not.
    near = {"MXFP4": 0.0 if scheme == "block" else 1e-12, "NVFP4": 1e-12}.get(kind.name, 1e-9)
    assert torch.allclose(found, expected, rtol=1e-12, atol=near)


CALLS = {
    "decode": (9, 72, 416, 0, False, False),
    "a third scheme": (33, 136, 1040, 2, True, False),
    "blocks": (70, 136, 640, 1, False, False),
    "blocks and a bias": (130, 264, 288, 1, True, False),
    "batch-invariant": (5, 72, 416, 0, True, True),
}
"""m, n, k, scheme, whether with a bias, whether batch-invariant."""


@emulated
@pytest.mark.parametrize("name, call", builders.two_thirds(KINDS, CALLS))
def test_a_kernel_computes_what_the_reference_does(monkeypatch, name, call):
    kind, (m, n, k, scheme, biased, batch_invariant) = KINDS[name], CALLS[call]
    weight, lhs = kind.parts(m, n, k).packed, kind.lhs_of(kind.schemes[scheme], 1, m, k)
    bias = builders.bias(2, n) if biased else None
    emulator, out = emulate(monkeypatch), torch.empty(m, n, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, bias=bias, batch_invariant=batch_invariant)
    assert emulator.launched[0].startswith(kind.label)
    assert_within_the_bound(out, lhs, weight, bias)


@emulated
@pytest.mark.parametrize("name", edges.EDGES)
def test_a_kernel_multiplies_scales_of_zero_subnormals_and_the_largest(monkeypatch, name):
    make, lhs_type, scheme = edges.EDGES[name]
    parts, lhs = make("cpu"), edges.lhs_of(lhs_type, scheme)
    weight = parts.packed
    ref, bound = gemm_w4a8_bound(lhs, weight, out_dtype=torch.float32)
    edges.assert_near(ref, lhs, parts, bound)
    emulator, out = emulate(monkeypatch), torch.empty(9, edges.N)
    edges.call_of(weight)(lhs, weight, out)
    edges.assert_near(out, lhs, parts, bound)
    assert len(emulator.launched) == 1


@pytest.mark.nvrtc
@pytest.mark.parametrize("experts", [0, 64])
def test_chosen_kernels_do_not_spill(compiles_well, experts):
    chosen: dict[str, list[KernelSpec]] = {}
    for at, (name, kind) in enumerate(FORMS.items()):
        if name not in KINDS and at % 2 == (experts > 0):  # int4 and 8 bits in turns
            continue
        ms = (16, 16384) if experts else (1, 32, 64, 128, 512, 4096)
        for m, scheme in itertools.product(ms, dict.fromkeys(kind.schemes[:2])):
            spec = choose(kind.problem(m, 4096, 4096, scheme, experts=experts), DEVICES["h200"])
            chosen.setdefault(kind.name, []).append(spec)
    for name, kernels in chosen.items():
        compiles_well(kernels, {"MXFP4": 40 * (experts > 0), "int": 16}.get(name, 0))  # 20 of one by NVRTC 13.5


@emulated
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_code_with_every_scale(monkeypatch, name):
    """Each product alone, every seventh of them; all are a GPU's."""
    parts = PRODUCTS[name]("cpu")
    weight, exact = parts.packed, parts.dequantize_fp64()
    every = torch.arange(weight.k)
    if name == "two levels":  # a group has each code eight times: at other places in each of eight groups
        every = every[every // 16 % 8 == every // 128 % 8]
    emulate(monkeypatch)
    for columns in every[::7].split(1024):
        out = torch.empty(len(columns), weight.n)
        edges.call_of(weight)(one_hot(name, columns, weight.k), weight, out)
        assert torch.equal(out.T.double(), exact[:, columns])


SHAPES = {
    "split k": dict(block_m=16, block_n=64, stages=4, split_k=2, warpgroups_k=2, reduce_scatter=True),
    "shared activations": dict(block_m=96, block_n=128, stages=3, token_halves=2, multicast_lhs=2),
    "two CTAs": dict(block_m=32, block_n=64, stages=4, split_k=2, ctas_per_sm=2),
}


@emulated
@pytest.mark.parametrize("name, shape", [*zip(KINDS, 2 * list(SHAPES), strict=True)])
def test_kernels_of_every_shape(monkeypatch, name, shape):
    kind = KINDS[name]
    weight, lhs = kind.parts(4, 136, 544).packed, kind.lhs_of("token", 1, 100, 544)
    spec = KernelSpec(kind.lhs, weight.format.kernel_format, **SHAPES[shape])
    emulate(monkeypatch)
    out = torch.empty(100, 136, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=spec.label)
    assert_within_the_bound(out, lhs, weight)


# ---- experts ---------------------------------------------------------------------------------------------------------


@form_and_scheme
def test_contiguous_rows_of_experts(monkeypatch, kind, scheme):
    counts, gathered = [0, 3, 40, 0, 17], scheme > 0
    ends = torch.tensor(counts).cumsum(0).tolist()
    weight = kind.parts(6, 136, 416, experts=5).packed
    lhs = kind.lhs_for(weight, kind.schemes[scheme], 3, 23 if gathered else 60, "cpu")
    index = torch.randint(0, 23, (60,), generator=builders.generator(4), dtype=torch.int32) if gathered else None
    out, offsets = torch.empty(60, 136, dtype=torch.bfloat16), torch.tensor([0, *ends], dtype=torch.int32)
    call = getattr(jitgemm, f"m_grouped_gemm_w{kind.bits}a8_nt_contiguous")
    for _ in on_both(monkeypatch, lambda: call(lhs, weight, out, offsets, row_index=index)):
        for e, (count, end) in enumerate(zip(counts, ends)):
            rows = torch.arange(end - count, end)
            assert_within_the_bound(out[rows], rows_of(lhs, rows if index is None else index[rows].long()), weight[e])
        out.zero_()


@form_and_scheme
def test_masked_rows_of_experts(monkeypatch, kind, scheme):
    weight = kind.parts(6, 136, 416, experts=5).packed
    x, scale, *zero = lhs = kind.lhs_for(weight, kind.schemes[min(scheme, 1)], 3, 5 * 12, "cpu")
    out, counts = torch.zeros(5, 12, 136, dtype=torch.bfloat16), torch.tensor([3, 0, 12, 1, 7], dtype=torch.int32)
    by_expert = x.unflatten(0, (5, 12)), scale.unflatten(0, (5, 12)).squeeze(-1)
    call = getattr(jitgemm, f"m_grouped_gemm_w{kind.bits}a8_nt_masked")
    for _ in on_both(monkeypatch, lambda: call(by_expert, weight, out, counts, expected_m=4)):
        for e, count in enumerate(counts.tolist()):
            assert_within_the_bound(out[e, :count], rows_of(lhs, torch.arange(12 * e, 12 * e + count)), weight[e])
            assert not out[e, count:].any()
        out.zero_()


# ---- layers ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("scheme", [0, 1])
def test_a_layer_computes_what_its_call_does(kind, scheme):
    weight, x, bias = kind.parts(1, 72, 416).packed, torch.randn(5, 416).bfloat16(), builders.bias(2, 72)
    activation, options = {
        "e4m3": [("e4m3", {}), ("e4m3_block", dict(scheme="block"))],
        "s8": [("int8", {}), ("int8_affine", dict(affine=True))],
    }[kind.lhs][scheme]  # fmt: skip
    layer = W4A8Linear(weight, bias, activation=activation)
    lhs = jitgemm.quantize_activations(x, kind.lhs_dtype, **options)
    assert torch.equal(layer(x), jitgemm.gemm_w4a8_reference(lhs, weight, bias=bias))


LAYERS = {
    "plain": ({}, None),
    "blocks and biases": (dict(scheme="block"), torch.float32),
    "gpt-oss, biases of 16 bits": (dict(activation="swiglu_oai", order="interleaved", limit=7.0), torch.bfloat16),
}


@pytest.mark.parametrize(("mode", "layer"), builders.two_thirds(MODES, LAYERS), ids=str)
def test_a_layer_of_experts(monkeypatch, mode, layer):
    tier, mode = mode
    options, bias_type = LAYERS[layer]
    if mode == "s8z":  # zero points are per token
        options = {name: value for name, value in options.items() if name != "scheme"}
    sizes = dict(k=192, inter=160, scale=1.0, dtype=torch.bfloat16, mode=mode)
    case = moe_cases.Case(tier=tier, options=dict(options), **sizes)
    if bias_type:
        g = builders.generator(8)
        biases = ((torch.randn(5, n, generator=g) * 0.1).to(bias_type) for n in (320, 72))
        case.options["bias13"], case.options["bias2"] = biases
    expected = moe_cases.by_definition(case)
    size = expected.abs().amax(1, keepdim=True)
    for out in on_both(monkeypatch, lambda: jitgemm.fused_experts(*case.arguments, **case.options)):
        assert bool(((out.double() - expected).abs() <= 0.06 * size).all())


@pytest.mark.parametrize(
    ("tier", "mode", "scheme"),
    [
        *((tier, kind.lhs, scheme) for tier, kind in TIERS.items() for scheme in ("token", "block")),
        ("two_level", "s8z", "token"),
    ],
)
def test_a_layer_of_sorted_tokens(monkeypatch, tier, mode, scheme):
    sizes = dict(experts=3, k=192, inter=160, mode=mode, dtype=torch.bfloat16, scale=1.0)
    case, counts = moe_cases.Case(tier=tier, options={"scheme": scheme}, **sizes), (3, 0, 5)
    x = torch.randn(3, 6, 192, generator=builders.generator(3)).bfloat16()
    _, w13, w2, *_ = case.arguments
    masked_m, wanted = torch.tensor(counts, dtype=torch.int32), []
    for e, count in enumerate(counts):
        ids, ones = torch.full((count, 1), e), torch.ones(count, 1)
        wanted.append(moe_cases.by_definition(case, x=x[e, :count], topk_ids=ids, topk_weights=ones))

    def call():
        out = torch.zeros(3, 6, 72, dtype=torch.bfloat16)
        jitgemm.fused_experts_masked(x, w13, w2, out, masked_m, 2, **case.options)
        return out

    for out in on_both(monkeypatch, call):
        for e, (count, expected) in enumerate(zip(counts, wanted)):
            assert bool(((out[e, :count] - expected).abs() <= 0.06 * expected.abs().amax(1, keepdim=True)).all())
            assert not out[e, count:].any()
