"""pack_w4's forms and error messages; W4Weight's properties, copies, files and round trips."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import warnings
from dataclasses import replace

import builders
import pytest
import torch
from same_weights import TENSORS, same_weight

from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import WeightFormat
from jitgemm.weight import layout
from jitgemm.weight.pack import pack_w4, pack_w8
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.quantize import quantize_w4
from jitgemm.weight.ready import note, now


def permuted_weight(n: int, k: int, **arguments) -> W4Weight:
    parts = builders.weight_parts(8, n, k, **arguments)
    return replace(parts, permutation=torch.randperm(k, generator=builders.generator(8))).packed


def tensors(n=16, columns=128, groups=1, q=torch.int8, scale=torch.bfloat16, zero=None, zero_groups=None):
    """Arguments of pack_w4, all zero."""
    z = None if zero is None else torch.zeros((n, groups if zero_groups is None else zero_groups), dtype=zero)
    return torch.zeros((n, columns), dtype=q), torch.zeros((n, groups), dtype=scale), z


# --- forms of q ---


@pytest.mark.parametrize("group_size, zero_point", [*itertools.product((128, 0), (False, True))])
def test_canonical_is_recognised_by_the_columns_of_scale(group_size, zero_point):
    parts = builders.weight_parts(1, 16, 512, group_size, zero_point=zero_point)
    for q in (builders.canonical(parts.q), parts.q):
        assert same_weight(pack_w4(q, parts.scale, parts.zero, group_size=parts.group_size), parts.packed)


def test_uint8_that_fits_both_readings_asks_for_k():
    q, scale, zero = tensors(columns=64, q=torch.uint8, zero=torch.uint8)
    with pytest.raises(ValueError, match=r"k: expected .* q uint8 \[16, 64\] is k = 64.*or k = 128.*; got None"):
        pack_w4(q, scale, zero, group_size=128)
    assert pack_w4(q, scale, zero, group_size=128, k=64).k == 64
    assert pack_w4(q, scale, zero, group_size=128, k=128).k == 128
    with pytest.raises(ValueError, match="^k: expected .* with group_size -1 fits both; got None"):
        pack_w4(q, scale, zero, group_size="channel")


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
)
def test_zero_points_of_any_integer_width_and_codes_of_int8(dtype):
    parts = builders.weight_parts(2, 16, 128, 64, zero_point=True, max_zero=16)
    for q in (parts.q, parts.q.to(torch.int8)):
        assert same_weight(pack_w4(q, parts.scale, parts.zero.to(dtype), group_size=64), parts.packed)


@pytest.mark.parametrize("chunk", [layout.CHUNK_CODES, 1])
def test_canonical_strided_and_misaligned_arguments_pack_to_the_same_bytes(monkeypatch, chunk):
    parts = builders.weight_parts(3, 200, 160, 32, zero_point=True, offset=True)
    whole = parts.packed
    storage = torch.zeros(200 * 240 + 1, dtype=torch.uint8)[1:].view(200, 240)
    storage[:, 3:163] = parts.q
    scale, zero = parts.scale.T.contiguous().T, parts.zero.repeat_interleave(2, dim=1)[:, ::2]
    monkeypatch.setattr(layout, "CHUNK_CODES", chunk)
    for q in (storage[:, 3:163], parts.q.T.contiguous().T, builders.canonical(parts.q)):
        packed = pack_w4(q, scale, zero, offset=parts.offset.T.contiguous().T, group_size=32, k=160)
        assert same_weight(packed, whole)


@pytest.mark.parametrize("group_size", [96, 128, 256, 1000, -1, "channel"])
def test_a_group_size_of_k_or_more_is_per_channel_as_are_minus_one_and_channel(group_size):
    q, scale, _ = tensors(columns=96)
    weight, size = pack_w4(q, scale, group_size=group_size), group_size if group_size in (128, 256, 1000) else 96
    assert weight.format == WeightFormat(0, False, "bf16") and weight.groups == 1
    assert list(weight.channel_scale.shape) == [64]
    assert pack_w8(q, scale, group_size=group_size).format.group_size == 0
    for each in (weight, quantize_w4(torch.randn(8, 96), group_size)):
        assert (each.format.group_size, each.group_size) == (0, size)


def test_packing_under_inference_mode():
    with torch.inference_mode():
        parts = builders.weight_parts(4, 16, 128, 64, zero_point=True)
        weight = parts.packed
        assert torch.equal(weight.unpack()[0], parts.q)
    assert not weight.blocks.is_inference()
    assert weight.ready
    weight.blocks.add_(0)
    assert not weight.ready
    assert weight.mark_ready() and weight.ready


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("seen, write", [
    (True, lambda blocks: blocks.zero_()),
    (True, lambda blocks: blocks[:, :1].copy_(blocks[:, :1])),
    (True, lambda blocks: blocks.detach().flatten().add_(1)),
    (None, lambda blocks: blocks.view(torch.int32).zero_()),
    (False, lambda blocks: blocks.data.zero_()),
    (False, lambda blocks: blocks.numpy().fill(0)),
    (False, lambda blocks: torch.from_dlpack(blocks).zero_()),
    (False, lambda blocks: blocks.untyped_storage().fill_(0)),
], ids=["blocks", "slice", "detach", "other dtype", "data", "numpy", "dlpack", "storage"])  # fmt: skip
def test_what_is_written_past_the_version_is_not_seen_until_it_is_ready_again(seen, write, mode):
    """As `Weight` says; None: not in inference mode."""
    weight = builders.weight_parts(4, 16, 128, 64).packed
    with mode():
        write(weight.blocks)
    assert weight.ready == (not (seen or (seen is None and mode is torch.no_grad)))
    assert weight.mark_ready() and weight.ready


def test_records_that_are_noted_as_not_ready_are_not_ready_to_an_op_either():
    weight = builders.weight_parts(4, 16, 128, 64).packed
    assert weight.packed.ready_at == weight.ready_at == now(weight.blocks)
    assert note(weight.blocks, False) is None and weight.packed.ready_at is None


# --- bits ---


OFFSETS = list(itertools.product((32, 64, 128, 256), (False, True), REAL_TYPES))
FORMS = pytest.mark.parametrize(
    "group_size, zero_point, scale_type, offset",
    [*((*format, False) for format in builders.ALL_FORMATS), *((*format, True) for format in OFFSETS)],
)


def any_bits(dtype: torch.dtype, shape: torch.Size, seed: int) -> torch.Tensor:
    """All but what is not finite; -0.0 and a subnormal among them."""
    bits = layout.bits_dtype(dtype)
    info = torch.iinfo(bits)
    raw = torch.randint(info.min, info.max + 1, shape, generator=builders.generator(seed)).to(bits)
    raw[0, 0], raw[1, 0] = info.min, 1
    values = raw.view(dtype)
    values[~values.isfinite()] = torch.finfo(dtype).max
    return values


@FORMS
def test_scales_and_offsets_keep_every_bit(group_size, zero_point, scale_type, offset):
    """k = 400 ends within a group of every size."""
    parts = builders.weight_parts(5, 72, 400, group_size, zero_point=zero_point, scale_type=scale_type)
    dtype, shape = parts.scale.dtype, parts.scale.shape
    parts = replace(parts, scale=any_bits(dtype, shape, 5), offset=any_bits(dtype, shape, 6) if offset else None)
    weight = parts.packed
    assert weight.format == WeightFormat(group_size, zero_point, scale_type, offset=offset)
    for found, given_ in zip(
        (*weight.unpack(), weight.unpack().offset), (parts.q, parts.scale, parts.zero, parts.offset)
    ):
        assert found is None if given_ is None else builders.same_bits(found, given_)


@FORMS
def test_a_weight_and_its_row_sums_are_those_of_the_definition(group_size, zero_point, scale_type, offset):
    """A weight in fp32, with one rounding for the product and one for the sum; a row summed up in fp64 and rounded
    once."""
    parts = builders.weight_parts(
        21, 72, 400, group_size, zero_point=zero_point, scale_type=scale_type, scales="mixed", max_zero=16,
        offset=offset,
    )  # fmt: skip
    weight, exact = parts.packed, parts.dequantize_fp64()
    product, expected = replace(parts, offset=None).dequantize_fp64().float(), exact.float()
    if offset:
        expected = (product.double() + parts.offset.double()[:, torch.arange(400) // group_size]).float()
    assert builders.same_bits(weight.dequantize(), expected) and offset != torch.equal(expected, product)
    options = dict(offset=parts.offset, group_size=parts.group_size, k=400)
    assert same_weight(pack_w4(builders.canonical(parts.q), parts.scale, parts.zero, **options), weight)
    assert weight.row_sum.dtype == torch.float32 and list(weight.row_sum.shape) == [128]
    error = (weight.row_sum[:72].double() - exact.sum(1)).abs()
    assert bool((error <= exact.sum(1).abs() * 2.0**-24 + exact.abs().sum(1) * 2.0**-42).all())
    assert not weight.row_sum[72:].any()


# --- what a weight knows ---


def test_what_a_weight_says_of_itself():
    weight = builders.weight_parts(7, 72, 400, 32, zero_point=True, scale_type="fp16").packed
    assert weight.shape == (72, 400) == (weight.n, weight.k)
    assert (weight.groups, weight.group_size, weight.format) == (13, 32, WeightFormat(32, True, "fp16"))
    assert weight.scale_dtype == torch.float16 and weight.device == torch.device("cpu") and weight.ready
    assert weight.layout_version == layout.LAYOUT_VERSION
    assert weight.nbytes == 2 * 4 * weight.format.record_bytes + 128 * 4  # row sums
    per_channel, permuted = builders.weight_parts(7, 72, 400, 0, scale_type="fp32").packed, permuted_weight(72, 400)
    assert per_channel.nbytes == 2 * 4 * 4096 + 2 * 128 * 4  # scales and row sums
    assert permuted.nbytes == 2 * 4 * permuted.format.record_bytes + 128 * 4 + 400 * 4
    assert repr(weight) == "W4Weight(n=72, k=400, group_size=32, unsigned with zero points, fp16 scales, device='cpu')"
    assert "k=400, per channel, signed, fp32 scales, device" in repr(per_channel)
    assert "bf16 scales, permuted, device" in repr(permuted)
    fast = builders.weight_parts(7, 72, 400, 64, codes="s8", offset=True).packed
    assert "signed for int8, bf16 scales and offsets, device" in repr(fast)
    with pytest.raises(dataclasses.FrozenInstanceError):
        weight.n = 16
    assert weight == weight and weight != copy.copy(weight) and len({weight, copy.copy(weight)}) == 2


def test_the_same_weight_over_other_tensors():
    weight = permuted_weight(24, 160, group_size=64, zero_point=True)
    tensors = [getattr(weight, name) for name in TENSORS]
    weight.named("layers.0.q_proj")
    assert {each.layer for each in (weight.with_tensors(*tensors), weight.to("meta"))} == {"layers.0.q_proj"}
    for changes, message in (
        ({2: weight.row_sum.to("meta")}, "row_sum: expected cpu, got meta"),
        ({2: weight.row_sum.double()}, r"row_sum: expected float32 \[64\], got float64 \[64\]"),
        ({3: torch.arange(128, dtype=torch.int32)}, r"permutation: expected int32 \[160\], got int32 \[128\]"),
    ):
        with pytest.raises(ValueError, match=message):
            weight.with_tensors(*(changes.get(at, tensor) for at, tensor in enumerate(tensors)))


# --- state dicts ---


def test_a_misaligned_tensor_is_copied():
    weight = builders.weight_parts(9, 8, 32, 32).packed
    state = weight.state_dict()
    storage = torch.zeros(weight.blocks.numel() + 1, dtype=torch.uint8)
    state["blocks"] = storage[1:].view(weight.blocks.shape).copy_(weight.blocks)
    got = W4Weight.from_state_dict(state)
    assert got.blocks.data_ptr() % 16 == 0 and same_weight(got, weight)


KNOWN = "state dict: 'p.meta': expected zero_point 0 to 5, offset 0, 1 or 2, known scale type and codes"


def changed_meta(index: int, value: int):
    def change(state):
        state["p.meta"][index] = value

    return change


def test_a_state_dict_without_values_gives_a_weight_without_values():
    g = torch.Generator().manual_seed(3)
    q = torch.randint(-8, 8, (8, 64), dtype=torch.int8, generator=g)
    weight = pack_w4(q, torch.ones(8, 2), group_size=32, permutation=torch.randperm(64, generator=g))
    tensors = weight.state_dict()
    meta = W4Weight.from_state_dict({name: t if name == "meta" else t.to("meta") for name, t in tensors.items()})
    assert meta.permutation.is_meta and meta.shape == weight.shape


def order_with(value: int, at: int = 0, k: int = 256) -> torch.Tensor:
    order = torch.arange(k, dtype=torch.int32)
    order[at] = value
    return order


ONCE = "state dict: p.permutation: expected every value of 0..255 once, got repeated or other values"
WRONG_ORDERS = [
    (order_with(256), ONCE), (order_with(-1, 255), ONCE), (order_with(2**31 - 1, 7), ONCE), (order_with(3, 4), ONCE),
    (order_with(0)[:255], "state dict: p.permutation: expected int32 [256], got int32 [255]"),
    (order_with(0)[None], "state dict: p.permutation: expected int32 [256], got int32 [1, 256]"),
    (order_with(0).float(), "state dict: p.permutation: expected int32 [256], got float32 [256]"),
]  # fmt: skip
"""Orders of columns by which a quantiser would read beyond a row, or not all of it."""


FOUND_NONE = "state dict: expected a tensor 'p.{}', found none"
OLD = "state dict: 'p.meta': expected layout version 3, got {}; pack the weight again"


@pytest.mark.parametrize("change, message", [
    (lambda s: s.pop("p.blocks"), FOUND_NONE.format("blocks")),
    (lambda s: s.pop("p.meta"), FOUND_NONE.format("meta")),
    (lambda s: s.update({"p.meta": None}), FOUND_NONE.format("meta")),
    (lambda s: s.update({"p.blocks": None}), FOUND_NONE.format("blocks")),
    (lambda s: s.pop("p.channel_scale"), "state dict: p.channel_scale: expected a tensor for a per-channel weight"),
    (changed_meta(0, 1), "state dict: 'p.meta': expected a packed W4 weight, got another tensor"),
    (changed_meta(1, 2), OLD.format(2)),
    (changed_meta(1, 99), OLD.format(99)),
    (lambda s: s.update({"p.meta": torch.tensor([int(s["p.meta"][0]), 1, 8, 256, 256, 1, 1])}), OLD.format(1)),
    (changed_meta(2, 80), "state dict: p.blocks: expected uint8 [2, 2, 4160], got uint8 [1, 2, 4160]"),
    (changed_meta(3, 512), "state dict: p.blocks: expected uint8 [1, 4, 4288], got uint8 [1, 2, 4160]"),
    (changed_meta(3, 250), "k to be a positive multiple of 16, got 250"),
    (changed_meta(4, 100), "group_size: expected one of (32, 64, 128, 256), or k = 256 for per channel, got 100"),
    (changed_meta(4, 128), "state dict: p.blocks: expected uint8 [1, 2, 4288], got uint8 [1, 2, 4160]"),
    (changed_meta(5, 6), f"{KNOWN}, got [6, 1, 0, 0]"),
    (changed_meta(6, 7), f"{KNOWN}, got [1, 7, 0, 0]"),
    (changed_meta(7, 3), f"{KNOWN}, got [1, 1, 3, 0]"),
    (changed_meta(8, -1), f"{KNOWN}, got [1, 1, 0, -1]"),
    (changed_meta(7, 1), "state dict: p.order: expected 'any' with zero points, got 'e4m3'"),
    (changed_meta(8, 1), "state dict: p.offset: expected none per channel"),
    (changed_meta(6, 0), "state dict: p.channel_scale: expected float32 [64], got bfloat16 [64]"),
    (lambda s: s.update({"p.meta": s["p.meta"][:5]}), "state dict: 'p.meta': expected 9 or 10 values, got 5"),
    (lambda s: s.update({"p.meta": s["p.meta"].float()}), "state dict: 'p.meta': expected int64 [9], got float32 [9]"),
    (lambda s: s.update({"p.blocks": s["p.blocks"].to(torch.int32)}),
     "state dict: p.blocks: expected uint8 [1, 2, 4160], got int32 [1, 2, 4160]"),
    (lambda s: s.update({"p.row_sum": s["p.row_sum"][:8]}), "state dict: p.row_sum: expected float32 [64], got float32 [8]"),
    (lambda s: s.update({"p.permutation": torch.arange(256)}),
     "state dict: p.permutation: expected int32 [256], got int64 [256]"),
    *((lambda s, order=order: s.update({"p.permutation": order}), message) for order, message in WRONG_ORDERS),
])  # fmt: skip
def test_a_state_dict_that_does_not_match_is_refused(change, message):
    state = builders.weight_parts(10, 8, 256, 0, zero_point=True).packed.state_dict("p.")
    change(state)
    with pytest.raises(ValueError, match=re.escape(message)):
        W4Weight.from_state_dict(state, "p.")


# --- orders of codes ---


def test_int8_codes_of_a_row_too_long_for_int32_sums_keep_the_order_for_both_types():
    """Per channel a whole row is summed up: k products of up to 128 * 8 * 16."""
    longest = CODES["int4"].order("s8").max_channel_k
    assert longest * 128 * 8 * 16 < 2**31
    for k, codes in ((longest, "s8"), (longest + 32, "any")):
        q, scale = torch.full((8, k), -8, dtype=torch.int8), torch.ones(8, 1)
        weight = pack_w4(q, scale, group_size=k, lhs_dtype=torch.int8)
        assert weight.format.order == codes and torch.equal(weight.unpack()[0], q)
    q, scale = torch.full((8, longest + 32), -8, dtype=torch.int8), torch.ones(8, (longest + 32) // 32)
    assert pack_w4(q, scale, group_size=32, lhs_dtype=torch.int8).format.order == "s8"


# --- permutations ---


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_a_permutation_is_kept_beside_the_weight_as_int32(dtype):
    parts = builders.weight_parts(20, 16, 96, 32)
    permutation = torch.randperm(96, generator=builders.generator(20))
    weight = replace(parts, permutation=permutation.to(dtype)).packed
    assert weight.permutation.dtype == torch.int32 and weight.permutation.is_contiguous()
    assert torch.equal(weight.permutation.long(), permutation)
    # It describes the activations: the packed weight is as without.
    assert builders.same_bits(weight.blocks, parts.packed.blocks)
    assert weight.plan_key == parts.packed.plan_key


def test_a_permutation_is_copied_and_may_have_any_stride():
    parts, table = builders.weight_parts(20, 16, 96, 32), torch.zeros(96, 3, dtype=torch.int32)
    table[:, 1] = torch.arange(95, -1, -1)
    weight = replace(parts, permutation=table[:, 1]).packed
    assert torch.equal(weight.permutation, table[:, 1])
    table.zero_()
    assert weight.permutation[0] == 95
    whole = torch.arange(96, dtype=torch.int32)
    weight = replace(parts, permutation=whole).packed
    whole.zero_()
    assert weight.permutation[-1] == 95


def offset(columns: int, **options) -> dict[str, torch.Tensor]:
    return {"offset": torch.zeros(16, columns, **({"dtype": torch.bfloat16} | options))}


REPEAT = "offset: expected none per channel; repeat scale and offset"


@pytest.mark.parametrize(
    "given, group_size, error, message",
    [
        ({"offset": 0.5}, 64, TypeError, "offset: expected a torch.Tensor, got float"),
        (offset(2, dtype=torch.float32), 64, TypeError, "offset: expected scale's dtype bfloat16, got float32"),
        (offset(2, dtype=torch.int8), 64, TypeError, "offset: expected scale's dtype bfloat16, got int8"),
        (offset(1), 64, ValueError, "offset: expected scale's shape [16, 2], got [16, 1]"),
        (offset(2, device="meta"), 64, ValueError, "offset: expected q's device cpu, got meta"),
        (offset(1), 128, ValueError, REPEAT),
        (offset(1), 500, ValueError, REPEAT),
        ({"permutation": list(range(128))}, 128, TypeError, "permutation: expected a torch.Tensor, got list"),
        ({"permutation": torch.arange(128.0)}, 128, TypeError, "permutation: expected an integer dtype, got float32"),
        ({"permutation": torch.arange(127)}, 128, ValueError, "permutation: expected shape [128], got [127]"),
        ({"permutation": torch.arange(128)[None]}, 128, ValueError, "permutation: expected shape [128], got [1, 128]"),
        *(({"permutation": order_with(value, at, 128)}, 128, ValueError, "permutation: expected every value of 0..127 once")
          for value, at in ((4, 3), (128, 0), (-1, 0))),
        ({"permutation": torch.arange(128, device="meta")}, 128, ValueError, "permutation: expected q's device cpu, got meta"),
    ],
)  # fmt: skip
def test_wrong_offsets_and_wrong_permutations(given, group_size, error, message):
    q, scale, _ = tensors(groups=1 if group_size >= 128 else 2)
    with pytest.raises(error, match=re.escape(message)):
        pack_w4(q, scale, group_size=group_size, **given)


# --- row sums ---


def test_a_row_sum_that_cancels_is_exact():
    """4096 terms of 1e6, their negatives, and one of 1/1024: lost in fp32, not in fp64."""
    q = torch.ones((8, 8192 + 32), dtype=torch.int8)
    q[:, 4096:8192] = -1
    q[:, 8193:] = 0
    scale = torch.full((8, 8224 // 32), 1e6)
    scale[:, -1] = 2.0**-10
    assert pack_w4(q, scale, group_size=32).row_sum[:8].tolist() == [2.0**-10] * 8


# --- errors of pack_w4: argument, what was expected, what came ---

U8 = torch.uint8


def with_code(value: int, zero: torch.dtype | None) -> tuple:
    q, scale, zeros = tensors(zero=zero)
    q[3, 5] = value
    return q, scale, zeros


def with_zero(value: int, dtype: torch.dtype) -> tuple:
    q, scale, zeros = tensors(q=U8, zero=dtype)
    zeros[2, 0] = value
    return q, scale, zeros


NAMED = "group_size: expected one of (32, 64, 128, 256), or k = 512 for per channel, got 48"
SIGNED = "q: expected int8 for signed codes, one value each (uint8 holds them only as canonical [n, k / 2]), got uint8 "


@pytest.mark.parametrize("arguments, group_size, k, error, message", [
    (tensors(q=torch.int32), 128, None, TypeError, "q: expected int8 or uint8, got int32"),
    (tensors(scale=U8), 128, None, TypeError, "scale: expected bfloat16, float16 or float32, got uint8"),
    (tensors(q=U8, zero=torch.bool), 128, None, TypeError, "zero: expected an integer dtype, got bool"),
    (tensors(), 128.0, None, TypeError, "group_size: expected an int, got float"),
    (tensors(), True, None, TypeError, "group_size: expected an int, got bool"),
    (tensors(), "channels", None, TypeError, "group_size: expected an int"),
    (tensors(), 0, None, ValueError, "group_size: expected one of"),
    ((torch.zeros(16, 128, 1, dtype=torch.int8), *tensors()[1:]), 128, None, ValueError,
     "scale: expected shape [experts, n, ceil(k / group_size)] with experts = 16, n = 128, got [16, 1]"),
    ((tensors()[0], torch.zeros(8, 1), None), 128, None, ValueError,
     "scale: expected shape [n, ceil(k / group_size)] with n = 16, got [8, 1]"),
    ((*tensors(q=U8)[:2], torch.zeros((16, 1), dtype=U8, device="meta")), 128, None, ValueError,
     "zero: expected q's device cpu, got meta"),
    (tensors(n=12), 128, None, ValueError, "expected n, its rows, to be a positive multiple of 8, got 12"),
    (tensors(n=0), 128, None, ValueError, "expected n, its rows, to be a positive multiple of 8, got 0"),
    (tensors(columns=40), 64, None, ValueError, "q: expected k to be a positive multiple of 16, got 40"),
    (tensors(columns=0), 64, None, ValueError, "q: expected k to be a positive multiple of 16, got 0"),
    (tensors(columns=20, q=U8, zero=U8), 64, None, ValueError, "q: expected k to be a positive multiple of 16, got 40"),
    (tensors(columns=512, groups=8), 48, None, ValueError, NAMED),
    (tensors(columns=512, groups=8, q=U8, zero=U8), 48, None, ValueError, NAMED),
    (tensors(), -2, None, ValueError, "group_size: expected one of (32, 64, 128, 256), or k for per channel, got -2"),
    (tensors(columns=512, groups=3), 128, None, ValueError,
     "scale: expected shape [16, 4] for k = 512 and group_size 128, got [16, 3]"),
    (tensors(columns=512, groups=3, q=U8), 128, None, ValueError,
     "scale: expected shape [16, 8] for k = 1024 and group_size 128, got [16, 3]"),
    (tensors(columns=512, groups=3, q=U8, zero=U8), 128, None, ValueError,
     "scale: expected 4 columns for q [16, 512] read as one value each, or 8 read as canonical, with group_size 128, got 3"),
    (tensors(columns=512, groups=4, q=U8, zero=U8, zero_groups=1), 128, None, ValueError,
     "zero: expected scale's shape [16, 4], got [16, 1]"),
    (tensors(columns=512, groups=4, q=U8), 128, None, TypeError, f"{SIGNED}[16, 512] with 4 groups of 128"),
    (tensors(columns=512, groups=4, q=U8), 128, 512, TypeError, f"{SIGNED}[16, 512] with k = 512"),
    (tensors(columns=512, groups=4, q=U8), 128, 256, ValueError,
     "q: expected shape [n, k = 256], or the canonical [n, k / 2 = 128], got [16, 512]"),
    (tensors(columns=512, groups=4), 128, 1024, ValueError,
     "q: expected shape [n, k = 1024] for int8, one value each, got [16, 512]"),
    (with_code(8, None), 128, None, ValueError, "q: expected values -8..7, got 0..8"),
    (with_code(-9, None), 128, None, ValueError, "q: expected values -8..7, got -9..0"),
    (with_code(16, U8), 128, None, ValueError, "q: expected values 0..15, got 0..16"),
    (with_code(-1, U8), 128, None, ValueError, "q: expected values 0..15, got -1..0"),
    *((with_zero(value, dtype), 128, 128, ValueError, "zero: expected values 0..16, got ")
      for value, dtype in ((17, U8), (17, torch.int64), (-1, torch.int32), (256, torch.int64))),
])  # fmt: skip
def test_wrong_arguments(arguments, group_size, k, error, message):
    with pytest.raises(error, match=re.escape(message)):
        pack_w4(*arguments, group_size=group_size, k=k)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"layout_version": 0}, ValueError, "layout_version: expected 3, got 0; pack the weight again"),
        ({"n": 80}, ValueError, "blocks: expected uint8 [2, 2, 4224], got uint8 [1, 2, 4224]"),
        ({"group_size": 64}, ValueError, "format: expected WeightFormat(group_size=64"),
        ({"blocks": None}, TypeError, "blocks: expected a torch.Tensor, got NoneType"),
        ({"channel_scale": torch.zeros(64)}, ValueError, "channel_scale: expected None for group_size 128, got a"),
    ],
)
def test_the_constructor_refuses_what_does_not_match(changes, error, message):
    weight = builders.weight_parts(11, 8, 256, 128).packed
    fields = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight) if f.init}
    with pytest.raises(error, match=re.escape(message)):
        W4Weight(**(fields | changes))


def test_the_constructor_refuses_blocks_that_are_not_contiguous():
    weight = builders.weight_parts(11, 128, 256, 128).packed
    blocks = weight.blocks.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="blocks: expected a contiguous tensor, got strides"):
        W4Weight(blocks, None, 128, 256, 128, weight.format)


# --- on a GPU ---


@pytest.mark.gpu
def test_packing_on_a_gpu_leaves_nothing_running():
    parts = builders.weight_parts(13, 4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        weight = parts.packed
        assert stream.query()
    assert weight.ready


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{"zero_point": True}, {"codes": "e4m3"}], ids=str)
@pytest.mark.parametrize("experts", [None, 3])
def test_packing_during_capture_looks_at_no_code_and_is_not_ready(form, experts):
    """It keeps the order that holds any codes."""
    each = [builders.weight_parts(14 + e, 64, 256, device="cuda", **form) for e in range(experts or 1)]
    parts = builders.stacked(each) if experts else each[0]
    expected = replace(parts, lhs_dtype=None).packed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = parts.packed
        views = [captured[1]] if experts else []
    graph.replay()
    torch.cuda.synchronize()
    assert expected.ready and not captured.ready and not any(view.ready for view in views)
    assert same_weight(captured, expected)


def test_a_weight_of_fake_tensors_has_no_address_to_be_ready_at():
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = builders.weight_parts(1, 64, 256, 128).packed
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks, row_sum = mode.from_tensor(weight.blocks), mode.from_tensor(weight.row_sum)
        fake = W4Weight(blocks, None, 64, 256, 128, weight.format, row_sum=row_sum)
        assert not fake.ready and fake.plan_key == weight.plan_key


@pytest.mark.parametrize("value", [[1, 2], b"bytes", 3.0])
def test_a_state_dict_of_anything_but_tensors_is_refused(value):
    state = builders.weight_parts(1, 64, 256, 128).packed.state_dict("w.")
    for name in state:
        given_ = value if name.endswith("meta") else state[name].numpy()
        message = f"state dict: '{name}': expected a torch.Tensor, got {type(given_).__name__}"
        with pytest.raises(TypeError, match=message):
            W4Weight.from_state_dict({**state, name: given_}, "w.")


def test_tensors_without_values_are_refused_by_name():
    q, scale, _ = tensors()
    with pytest.raises(ValueError, match="q: expected a tensor with values, got one on the meta device"):
        pack_w4(q.to("meta"), scale.to("meta"), group_size=128)
    with pytest.raises(TypeError, match="q: expected a plain strided tensor, got layout torch.sparse_coo"):
        pack_w4(q.to_sparse(), scale, group_size=128)
    with pytest.raises(TypeError, match="scale: expected a plain strided tensor, got layout torch.sparse_coo"):
        pack_w4(q, scale.to_sparse(), group_size=128)


def test_an_attribute_of_tensors_that_models_use_raises_by_name():
    weight = builders.weight_parts(1, 64, 256, 128).packed
    own = {name for name in dir(torch.Tensor) if hasattr(weight, name)}
    assert {"device", "dtype", "nbytes", "shape", "to"} <= own and not own & {"size", "dim", "t", "data_ptr"}
    for name in ("size", "T", "view", "float", "data", "numel", "is_cuda"):
        with pytest.raises(AttributeError, match=rf"weight: expected a tensor for \.{name}, got a packed 4-bit weight"):
            getattr(weight, name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = weight.no_such_name
