"""8-bit weights: forms of scales, the order of bytes, files and experts, quantising, the calls on a CPU, the bound."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import builders
import pytest
import torch
from tensor_core import RUN, TensorCore

import jitgemm
from jitgemm import W4Weight, W8Weight, pack_w8, quantize_w8
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.reference import gemm_w4a8_reference
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import CORRECTION_TYPES, GROUP_SIZES, Problem, WeightFormat, format_named
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.choose import choose, kernel_named
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import legal_kernels
from jitgemm.weight.parts import PackedWeight

TYPES = list(builders.LHS_DTYPES.values())


def parts_of(seed: int, n: int, k: int, codes: str, group_size: int = 0, **options) -> builders.WeightParts:
    return builders.weight_parts(seed, n, k, group_size, codes=codes, bits=8, **options)


def codes_of(seed: int, n: int, k: int, codes: str = "e4m3") -> torch.Tensor:
    return parts_of(seed, n, k, codes).q


# ---- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", LHS_TYPES)
def test_a_record_is_rows_of_128_bytes_with_the_128_byte_swizzle(codes):
    n, k = 72, 160
    parts = parts_of(1, n, k, codes, 32)
    blocks = parts.packed.blocks
    assert blocks.shape == (2, 2, 8192 + 64 * 2 * 4)
    q = torch.zeros(128, 256, dtype=torch.int8)
    q[:n, :k] = parts.q.view(torch.int8)
    places = (0, 0), (1, 0), (7, 15), (9, 16), (63, 127), (64, 128), (71, 159), (71, 160), (72, 0), (8, 112)
    for row, column in places:
        strip, r, block, c = row // 64, row % 64, column // 128, column % 128
        at = r * 128 + (c // 16 ^ r % 8) * 16 + c % 16
        assert int(blocks.view(torch.int8)[strip, block, at]) == int(q[row, column])
    scales = blocks[1, 0, 8192:].view(torch.bfloat16).view(4, 64)
    assert torch.equal(scales[3, :8], parts.scale[64:, 3])


def test_every_form_of_a_scale_is_the_same_weight():
    n, k = 200, 320
    q = codes_of(2, n, k)
    one = torch.tensor(0.37)
    rows = one.expand(n, 1)
    forms = [one, one.view(1), one.view(1, 1), rows, rows[:, 0], rows.contiguous()]
    assert len({bytes(pack_w8(q, scale).state_dict()["channel_scale"].numpy().tobytes()) for scale in forms}) == 1
    for scale in forms:
        assert pack_w8(q, scale).format == WeightFormat(0, False, "fp32", "e4m3", code="e4m3")
    block = torch.rand(2, 3)
    by_group = block.repeat_interleave(128, 0)[:n]
    assert torch.equal(pack_w8(q, block).blocks, pack_w8(q, by_group, group_size=128).blocks)
    assert torch.equal(pack_w8(q, block).dequantize(), q.float() * by_group.repeat_interleave(128, 1)[:, :k])


def test_groups_are_told_by_the_scales_columns():
    q = codes_of(3, 16, 2048)
    for size in GROUP_SIZES:
        assert pack_w8(q, torch.ones(16, 2048 // size)).group_size == size
    small = q[:, :160]
    for groups, size in ((1, 160), (2, 128), (3, 64), (5, 32)):
        assert pack_w8(small, torch.ones(16, groups)).group_size == size
    with pytest.raises(ValueError, match=r"group_size: expected 128, by scale \[16, 2\] for k = 160, got 64"):
        pack_w8(small, torch.ones(16, 2), group_size=64)
    columns = r"scale: expected 5, 3, 2, 1 columns for groups of 32, 64, 128, 160 of k = 160, got shape \[16, 4\]"
    with pytest.raises(ValueError, match=columns):
        pack_w8(small, torch.ones(16, 4))


def test_e8m0_scales_are_the_same_powers_of_two():
    bits = torch.arange(256, dtype=torch.uint8).clamp(max=254).view(128, 2)  # 255 is no number
    scale = bits.view(torch.float8_e8m0fnu)
    weight = pack_w8(codes_of(4, 128, 256), scale, group_size=128)
    found = weight.unpack()[1]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.double(), torch.exp2(bits.double() - 127))


def test_experts_may_have_a_scale_each_or_one_a_block():
    q = codes_of(0, 3 * 136, 288).view(3, 136, 288)
    per_tensor, block = torch.rand(3), torch.rand(3, 2, 3)
    expected = q.float() * per_tensor[:, None, None]
    for scale in (per_tensor, per_tensor[:, None], per_tensor[:, None, None]):
        assert torch.equal(pack_w8(q, scale).dequantize(), expected)
    by_row = block.repeat_interleave(128, 1)[:, :136].repeat_interleave(128, 2)[:, :, :288]
    assert torch.equal(pack_w8(q, block).dequantize(), q.float() * by_row)


def block_weight(n: int = 200, k: int = 416, seed: int = 1) -> W8Weight:
    """Every strip's rows share their scales."""
    weight = builders.weight_parts(seed, n, k, codes="e4m3", bits=8, scale_type="fp32", uniform_strip_scale=True).packed
    assert weight.format.uniform_strip_scale and "-b-" in weight.format.name
    return weight


def test_the_format_says_where_rows_of_a_strip_share_scales():
    q, scale, _ = block_weight(136, 384).unpack()
    assert pack_w8(q, scale[::128]).format.uniform_strip_scale == pack_w8(q, scale).format.uniform_strip_scale
    assert pack_w8(q, torch.rand(2, 3)).format.uniform_strip_scale
    for row in (0, 63, 64, 135):
        other = scale.clone()
        other[row, 1] *= 2
        assert not pack_w8(q, other).format.uniform_strip_scale
    assert not pack_w8(q, torch.ones(136, 2), group_size=256).format.uniform_strip_scale
    assert not pack_w8(q[:, :128], torch.ones(2, 1)).format.uniform_strip_scale  # per channel
    both = torch.stack((scale, other))
    assert not pack_w8(torch.stack((q, q)), both).format.uniform_strip_scale


def test_weights_keep_what_the_format_says_of_strips():
    weight = block_weight()
    q, scale, _ = weight.unpack()
    assert pack_w8(q, scale).format == weight.format
    scale[7] *= 2
    rows = pack_w8(q, scale)
    mixed = W8Weight.stacked(2, (weight, rows).__getitem__)
    assert mixed.format == rows.format == weight.format.for_any_values != weight.format
    assert torch.equal(mixed[0].dequantize(), weight.dequantize())
    layers = [jitgemm.nn.W8A8Linear(each) for each in (weight, rows)]
    layers[1].load_state_dict(layers[0].state_dict())
    assert layers[1].weight.format == weight.format


def test_no_two_formats_share_a_plan_or_a_name():
    formats = [
        WeightFormat(
            group_size, zero_point, scale_type, codes, offset, typed_code(codes) if bits == 8 else "int4", strips
        )
        for group_size, zero_point, scale_type, codes, offset, bits, strips in itertools.product(
            (0, *GROUP_SIZES), (False, True), REAL_TYPES, ("any", *LHS_TYPES), (False, True), (4, 8), (False, True)
        )
        if not (zero_point and codes != "any" or offset and not group_size)
        if bits == 4 or not (zero_point or offset or codes == "any")
        if not strips or (bits, group_size) == (8, 128)
    ]
    formats += [
        WeightFormat(group_size, zero_point, scale_type, "s8", not zero_point, correction=correction)
        for group_size, zero_point, scale_type, correction in itertools.product(
            GROUP_SIZES, (False, True), REAL_TYPES, CORRECTION_TYPES
        )
    ]
    assert [format_named(format.name) for format in formats] == formats and len(formats) > 100
    blocks = torch.empty(0, 0, 0)
    assert len({PackedWeight(blocks, None, None, 64, 256, format).plan_key for format in formats}) == len(formats)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (dict(order="s8", zero_point=True), "order: expected 'any' with zero points, got 's8'"),
        (dict(order="int8"), r"order: expected one of \('any', 'e4m3', 's8'\), got 'int8'"),
        (dict(group_size=0, offset=True), "offset: expected none per channel"),
        (dict(code="int8", order="s8", zero_point=True), "(order|zero_point): expected "),
        (dict(code="int8", order="any"), "order: expected "),
        (dict(code="int8", order="s8", offset=True), "offset: expected "),
        (dict(code="int2"), "code: expected one of .*int4.*, got 'int2'"),
        (dict(code="e2m1", order="e2m1"), r"group_size: expected 0 \(per channel\) or one of \(32, 128\), got 64"),
        (dict(code="e4m3", order="e4m3", group_size=256, uniform_strip_scale=True),
         "uniform_strip_scale: expected 8 bits in groups of 128"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_is_refused(format, message):
    with pytest.raises(ValueError, match=message):
        WeightFormat(**(dict(group_size=64, zero_point=False, scale_type="bf16") | format))


@pytest.mark.parametrize("lhs", LHS_TYPES)
def test_only_kernels_for_block_scales_have_tokens_as_rows(lhs):
    rows = WeightFormat(128, False, "fp32", lhs, code=typed_code(lhs))
    strips = replace(rows, uniform_strip_scale=True)
    for experts, group in itertools.product((0, 64), (0, 128)):
        make = functools.partial(legal_kernels, lhs, device=DEVICES["h200"], experts=experts, lhs_group=group)
        kernels = [make(fmt=format) for format in (rows, strips)]
        assert kernels[0] == tuple(spec for spec in kernels[1] if not spec.tokens_as_m)
        assert (kernels[0] != kernels[1]) == bool(group)
        assert all(spec.format == rows for spec in kernels[1])
    for m, tokens_as_m in ((1, False), (24, False), (1000, True), (9000, True)):
        problem = Problem(m, 4096, 4096, lhs, strips, lhs_group=128)
        spec = choose(problem, DEVICES["h200"])
        assert spec.tokens_as_m == tokens_as_m
        assert KernelSpec.from_label(spec.label) == spec
        assert spec == kernel_named(spec.label, problem, DEVICES["h200"])
        assert not choose(replace(problem, lhs_group=0), DEVICES["h200"]).tokens_as_m
        if tokens_as_m:
            with pytest.raises(ValueError, match="whose strips do not share scales"):
                kernel_named(spec.label, replace(problem, format=rows), DEVICES["h200"])


def test_a_file_is_of_one_width():
    four, eight = builders.weight_parts(5, 72, 160).packed, parts_of(5, 72, 160, "s8", 128).packed
    for kind, other in ((W8Weight, four), (W4Weight, eight)):
        with pytest.raises(ValueError, match=f"expected a packed {kind.__name__[:2]} weight, got another tensor"):
            kind.from_state_dict(other.state_dict())
    assert repr(eight) == "W8Weight(n=72, k=160, group_size=128, int8, bf16 scales, device='cpu')"
    with pytest.raises(TypeError, match=r"got a packed 8-bit weight \(W8Weight\)"):
        eight @ torch.ones(160)


@pytest.mark.parametrize(
    "q, scale, error, message",
    [
        (torch.zeros(16, 64), torch.ones(1), TypeError, "q: expected float8_e4m3fn or int8, got float32"),
        (torch.zeros(16, 64, dtype=torch.uint8), torch.ones(1), TypeError, "q: expected float8_e4m3fn or int8, got uint8"),
        (torch.zeros(64, dtype=torch.int8), torch.ones(1), ValueError, r"q: expected shape \[n, k\] or \[experts, n, k\]"),
        (torch.zeros(12, 64, dtype=torch.int8), torch.ones(1), ValueError, "q: expected n, its rows, to be a positive mult"),
        (torch.zeros(16, 40, dtype=torch.int8), torch.ones(1), ValueError, "q: expected k to be a positive multiple of 16"),
        (torch.zeros(16, 64, dtype=torch.int8), torch.ones(8, 1), ValueError, r"scale: expected one element, shape \[16\], "),
        (torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 1).double(), TypeError, "scale: .* float32 or float8_e8m0fnu"),
        (torch.zeros(16, 64, dtype=torch.int8), 1.0, TypeError, "scale: expected a torch.Tensor, got float"),
        (torch.zeros(16, 64, dtype=torch.int8), torch.ones(1, device="meta"), ValueError, "scale: expected a tensor with v"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_pack_w8(q, scale, error, message):
    with pytest.raises(error, match=message):
        pack_w8(q, scale)


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_int8_per_channel_stops_where_int32_may_overflow():
    format = WeightFormat(0, False, "bf16", "s8", code="int8")
    assert Problem(1, 8, 131056, "s8", format)
    with pytest.raises(ValueError, match="k: expected at most 131056 for int8 with scales per channel, got 131072"):
        Problem(1, 8, 131072, "s8", format)
    assert Problem(1, 8, 131072, "s8", WeightFormat(128, False, "bf16", "s8", code="int8"))


# ---- quantising ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 128])
def test_quantize_w8_refuses_values_that_fp32_has_no_scale_for(block):
    w = torch.full((128, 128), 2e-44)
    with pytest.raises(ValueError, match="w: expected groups of zeros, or of values that float32 .* underflows to 0"):
        quantize_w8(w, torch.int8, block=block)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("n, k", [(8, 48), (200, 304), (256, 128)])
def test_quantize_w8_is_the_nearest_of_its_type_for_the_largest_of_a_row_or_block(dtype, block, n, k, monkeypatch):
    monkeypatch.setattr("jitgemm.weight.quantize.CHUNK", {"cpu": 1, "cuda": 1})  # a row, or a row of blocks, at a time
    w = torch.randn(n, k, generator=builders.generator(6))
    w[0] = 0
    largest = 448.0 if dtype.is_floating_point else 127.0
    weight = quantize_w8(w, dtype, block=block)
    assert isinstance(weight, W8Weight) and weight.format.order == ("e4m3" if dtype.is_floating_point else "s8")
    q, scale, _ = weight.unpack()
    size = block or k
    for row in range(0, n, block or 1):
        for column in range(0, k, size):
            part = w[row : row + (block or 1), column : column + size]
            s = part.abs().max() / largest
            assert float(scale[row, column // size]) == float(s)
            steps = part / (s if s else 1)
            nearest = steps.clamp(-largest, largest).to(dtype) if dtype.is_floating_point else steps.round().to(dtype)
            assert torch.equal(q[row : row + (block or 1), column : column + size].float(), nearest.float())


def test_a_wrong_block_and_moments_beside_one_are_named():
    with pytest.raises(ValueError, match="block: expected None or 128, got 64"):
        quantize_w8(torch.zeros(8, 32), torch.int8, block=64)
    with pytest.raises(ValueError, match="moments: expected none with block"):
        quantize_w8(torch.zeros(8, 128), torch.int8, block=128, moments=torch.eye(128))


# ---- reference and bound ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "outlier", "subnormal", "small weights"])
def test_the_bound_holds_for_what_tensor_cores_lose(kind):
    g = builders.generator(10)
    n, m, k = 64, 16, 320
    q = torch.randn(n, k, generator=g)
    x = torch.randn(m, k, generator=g)
    if kind == "outlier":  # all else of its step is just below the cut
        x[:, ::32], x[:, 1::32] = 256, 0.03
        q = torch.full((n, k), 3.5)
    scale = {"subnormal": 2.0**-8, "small weights": 2.0**-5}.get(kind, 16.0)
    q, x = (q * scale).to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn)
    weight, lhs = pack_w8(q, torch.ones(1)), (x, torch.ones(1))
    ref, limit = gemm_w4a8_bound(lhs, weight, out_dtype=torch.float32)
    share = ((TensorCore().mxfp4_gemm(lhs, weight, RUN) - ref).abs() / limit.clamp(min=1e-300)).max()
    assert 0 < share <= 1 or (kind == "subnormal" and share <= 1)


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes, out_dtype", [("e4m3", torch.bfloat16), ("s8", torch.float16), ("s8", torch.float32)])
def test_a_call_on_a_cpu_is_the_reference_and_so_is_its_op(codes, out_dtype):
    weight, bias = parts_of(11, 72, 288, codes, 128).packed, builders.bias(12, 72)
    lhs = builders.affine_lhs(13, 5, 288) if codes == "s8" else builders.lhs(13, 5, 288, codes)
    call = jitgemm.gemm_w8a8_bf16_nt if out_dtype == torch.bfloat16 else jitgemm.gemm_w8a8_nt
    out, by_op = torch.empty(2, 5, 72, dtype=out_dtype)
    call(lhs, weight, out, bias=bias)
    torch.compile(lambda: call(lhs, weight, by_op, bias=bias), backend="eager", fullgraph=True)()
    ref = gemm_w4a8_reference(lhs, weight, bias=bias, out_dtype=out_dtype)
    assert builders.same_bits(out, ref) and builders.same_bits(by_op, ref)


FOUR, EIGHT = builders.weight_parts(1, 16, 64).packed, parts_of(1, 16, 64, "s8").packed
EXPERTS = W4Weight.stacked(1, lambda _: FOUR), W8Weight.stacked(1, lambda _: EIGHT)
WANTS_FOUR = TypeError, "rhs: expected a W4Weight from pack_w4, got W8Weight"
WANTS_EIGHT = TypeError, "rhs: expected a W8Weight from pack_w8, got W4Weight"


@pytest.mark.parametrize(
    ("call", "rhs", "lhs_type", "error", "message"),
    [
        ("gemm_w4a8_nt", EIGHT, "s8", *WANTS_FOUR),
        ("gemm_w4a8_bf16_nt", EIGHT, "s8", *WANTS_FOUR),
        ("gemm_w8a8_nt", FOUR, "s8", *WANTS_EIGHT),
        ("gemm_w8a8_bf16_nt", FOUR, "s8", *WANTS_EIGHT),
        ("gemm_w8a8_nt", EIGHT, "e4m3", TypeError, r"lhs\[0\] \(x\): expected int8, as rhs is, got float8_e4m3fn"),
        ("gemm_w8a8_bf16_nt", EIGHT, "e4m3", TypeError, r"lhs\[0\] \(x\): expected int8, as rhs is, got float8_e4m3fn"),
        ("gemm_w8a8_bf16_nt", EIGHT, "s8", TypeError, "out: expected bfloat16"),
        ("m_grouped_gemm_w8a8_nt_contiguous", EXPERTS[0], "s8", *WANTS_EIGHT),
        ("m_grouped_gemm_w4a8_nt_contiguous", EXPERTS[1], "s8", *WANTS_FOUR),
        ("m_grouped_gemm_w8a8_nt_contiguous", EIGHT, "s8", ValueError,
         "rhs: expected a weight of experts, got a dense one, which gemm_w8a8_nt takes"),
    ],
)  # fmt: skip
def test_each_call_takes_weights_of_its_width_and_activations_of_their_type(call, rhs, lhs_type, error, message):
    lhs = builders.lhs(2, 3, 64, lhs_type)
    out = torch.empty(3, 16, dtype=torch.float32 if message.startswith("out") else torch.bfloat16)
    offsets = [torch.tensor([0, 3], dtype=torch.int32)] if "grouped" in call else []
    with pytest.raises(error, match=message):
        getattr(jitgemm, call)(lhs, rhs, out, *offsets)


# ---- kernels ---------------------------------------------------------------------------------------------------------

H200 = DEVICES["h200"]


def format_of(lhs: str, group_size: int, scale_type: str = "fp32") -> WeightFormat:
    return WeightFormat(group_size, False, scale_type, lhs, code=typed_code(lhs))


def test_a_label_of_a_kernel_that_held_8_bit_weights_in_registers_is_refused():
    """It names no kernel, not another one: timings under such labels are recorded."""
    problem, label = Problem(33, 200, 1056, "e4m3", format_of("e4m3", 128)), "e4m3w8-g128-fp32-m40n64-s4"
    assert kernel_named(f"{label}-ss", problem, H200).label == f"{label}-ss"
    with pytest.raises(ValueError, match=f"^kernel: expected {label}-ss, got {label}$"):
        kernel_named(label, problem, H200)
