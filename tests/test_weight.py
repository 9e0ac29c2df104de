"""pack_w4's forms and error messages; W4Weight's properties, copies, files and round trips."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import warnings

import builders
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jitgemm import layout
from jitgemm.spec import WeightFormat
from jitgemm.weight import W4Weight, pack_w4


def same_weight(a: W4Weight, b: W4Weight) -> bool:
    scales = (a.channel_scale, b.channel_scale)
    same_scale = scales == (None, None) or (None not in scales and builders.same_bits(*scales))
    described = ("shape", "group_size", "format", "layout_version")
    return (
        builders.same_bits(a.blocks, b.blocks) and same_scale and all(getattr(a, x) == getattr(b, x) for x in described)
    )


def tensors(n=16, columns=128, groups=1, q=torch.int8, scale=torch.bfloat16, zero=None, zero_groups=None):
    """Arguments of pack_w4, all zero."""
    z = None if zero is None else torch.zeros((n, groups if zero_groups is None else zero_groups), dtype=zero)
    return torch.zeros((n, columns), dtype=q), torch.zeros((n, groups), dtype=scale), z


# --- forms of q ---


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 12).map(lambda x: 8 * x),
    k=st.integers(1, 12).map(lambda x: 32 * x),
    format=st.sampled_from(builders.ALL_FORMATS),
)
@settings(max_examples=40, deadline=None)
def test_canonical_and_one_value_each_pack_to_the_same_bytes(seed, n, k, format):
    group_size, zero_point, scale_type = format
    parts = builders.weight_parts(seed, n, k, group_size, zero_point=zero_point, scale_type=scale_type)
    packed = pack_w4(builders.canonical(parts.q), parts.scale, parts.zero, group_size=parts.group_size, k=k)
    assert same_weight(packed, parts.packed)


def test_canonical_is_recognised_by_the_columns_of_scale():
    for zero_point in (False, True):
        parts = builders.weight_parts(1, 16, 512, 128, zero_point=zero_point)
        packed = pack_w4(builders.canonical(parts.q), parts.scale, parts.zero, group_size=128)
        assert same_weight(packed, parts.packed)
        assert same_weight(pack_w4(parts.q, parts.scale, parts.zero, group_size=128), parts.packed)


def test_a_group_size_of_k_tells_canonical_from_one_value_each():
    parts = builders.weight_parts(1, 16, 320, 0, zero_point=True)
    assert pack_w4(parts.q, parts.scale, parts.zero, group_size=320).shape == (16, 320)
    assert pack_w4(builders.canonical(parts.q), parts.scale, parts.zero, group_size=320).shape == (16, 320)


def test_uint8_that_fits_both_readings_asks_for_k():
    q, scale, zero = tensors(columns=64, q=torch.uint8, zero=torch.uint8)
    with pytest.raises(ValueError, match=r"k: expected .* q uint8 \[16, 64\] is k = 64.*or k = 128.*; got None"):
        pack_w4(q, scale, zero, group_size=128)
    assert pack_w4(q, scale, zero, group_size=128, k=64).k == 64
    assert pack_w4(q, scale, zero, group_size=128, k=128).k == 128


def test_int8_codes_may_have_zero_points():
    parts = builders.weight_parts(2, 16, 128, 64, zero_point=True)
    assert same_weight(pack_w4(parts.q.to(torch.int8), parts.scale, parts.zero, group_size=64), parts.packed)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
)
def test_zero_points_of_any_integer_width(dtype):
    parts = builders.weight_parts(2, 16, 128, 64, zero_point=True, max_zero=16)
    assert same_weight(pack_w4(parts.q, parts.scale, parts.zero.to(dtype), group_size=64), parts.packed)


def test_strided_and_misaligned_arguments_pack_to_the_same_bytes():
    parts = builders.weight_parts(3, 24, 160, 32, zero_point=True)
    storage = torch.zeros(24 * 200 + 1, dtype=torch.uint8)[1:].view(24, 200)
    storage[:, 3:163] = parts.q
    scale, zero = parts.scale.T.contiguous().T, parts.zero.repeat_interleave(2, dim=1)[:, ::2]
    assert same_weight(pack_w4(storage[:, 3:163], scale, zero, group_size=32), parts.packed)
    assert same_weight(pack_w4(parts.q.T.contiguous().T, scale, zero, group_size=32), parts.packed)


@pytest.mark.parametrize("group_size", [96, 128, 256, 1000])
def test_a_group_size_of_k_or_more_is_per_channel(group_size):
    q, scale, _ = tensors(columns=96)
    weight = pack_w4(q, scale, group_size=group_size)
    assert weight.format == WeightFormat(0, False, "bf16")
    assert weight.group_size == group_size and weight.groups == 1
    assert list(weight.channel_scale.shape) == [64]


def test_packing_under_inference_mode():
    with torch.inference_mode():
        parts = builders.weight_parts(4, 16, 128, 64, zero_point=True)
        weight = parts.packed
        assert torch.equal(weight.unpack()[0], parts.q)
    assert not weight.blocks.is_inference()
    assert weight.settled
    weight.blocks.add_(0)
    assert not weight.settled
    assert weight.settle() and weight.settled


# --- bits ---


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 0])
@pytest.mark.parametrize("scale_type, bits", [("fp32", torch.int32), ("bf16", torch.int16), ("fp16", torch.int16)])
def test_scales_keep_every_bit(group_size, scale_type, bits):
    """NaNs with a payload, both zeros, infinities and subnormals too."""
    parts = builders.weight_parts(5, 72, 544, group_size, scale_type=scale_type)
    info = torch.iinfo(bits)
    raw = torch.randint(info.min, info.max + 1, parts.scale.shape, generator=builders.generator(5)).to(bits)
    nan = 0x7F800001 if bits == torch.int32 else 0x7F81 if scale_type == "bf16" else 0x7C01  # signalling
    raw[0, 0], raw[1, 0], raw[2, 0] = nan, info.min, 1
    scale = raw.view(parts.scale.dtype)
    q, got, zero = pack_w4(parts.q, scale, group_size=parts.group_size).unpack()
    assert zero is None
    assert builders.same_bits(got, scale)
    assert builders.same_bits(q, parts.q)


@pytest.mark.parametrize("group_size, zero_point, scale_type", builders.ALL_FORMATS)
def test_dequantize_is_the_definition_in_fp32(group_size, zero_point, scale_type):
    parts = builders.weight_parts(
        6, 72, 416, group_size, zero_point=zero_point, scale_type=scale_type, scales="mixed", max_zero=16
    )
    got = parts.packed.dequantize()
    assert builders.same_bits(got, parts.dequantize_fp64().float().to(torch.float32))


def test_all_codes_with_all_zero_points_come_back():
    parts = builders.all_codes_all_zeros()
    weight = parts.packed
    assert torch.equal(weight.unpack()[0], parts.q) and torch.equal(weight.unpack()[2], parts.zero)
    group = torch.arange(parts.q.shape[1]) // parts.group_size
    seen = {(int(q), int(z)) for q, z in zip(parts.q[0], parts.zero[0, group], strict=True)}
    assert seen == {(q, z) for q in range(16) for z in range(17)}
    assert torch.equal(weight.dequantize().double(), parts.dequantize_fp64())


# --- what a weight knows ---


def test_properties():
    weight = builders.weight_parts(7, 72, 416, 32, zero_point=True, scale_type="fp16").packed
    assert weight.shape == (72, 416) and (weight.n, weight.k) == (72, 416)
    assert weight.groups == 13 and weight.group_size == 32
    assert weight.format == WeightFormat(32, True, "fp16")
    assert weight.scale_dtype == torch.float16
    assert weight.device == torch.device("cpu")
    assert weight.layout_version == layout.LAYOUT_VERSION
    assert weight.settled
    assert weight.nbytes == 2 * 4 * weight.format.record_bytes
    per_channel = builders.weight_parts(7, 72, 416, 0, scale_type="fp32").packed
    assert per_channel.nbytes == 2 * 4 * 4096 + 128 * 4


def test_repr_is_short_and_tells_the_format():
    grouped = builders.weight_parts(7, 72, 416, 32, zero_point=True, scale_type="fp16").packed
    assert repr(grouped) == (
        "W4Weight(n=72, k=416, group_size=32, unsigned with zero points, fp16 scales, device='cpu')"
    )
    channel = builders.weight_parts(7, 72, 416, 0).packed
    assert repr(channel) == "W4Weight(n=72, k=416, per channel, signed, bf16 scales, device='cpu')"


def test_it_is_frozen_and_compared_by_identity():
    weight = builders.weight_parts(7, 8, 32, 32).packed
    with pytest.raises(dataclasses.FrozenInstanceError):
        weight.n = 16
    assert weight == weight and weight != copy.copy(weight)
    assert len({weight, copy.copy(weight)}) == 2


def test_to_the_same_device_is_itself():
    weight = builders.weight_parts(7, 8, 32, 32).packed
    assert weight.to("cpu") is weight and weight.to(torch.device("cpu")) is weight


def test_to_another_device_moves_every_tensor():
    weight = builders.weight_parts(7, 8, 128, 0).packed
    moved = weight.to("meta")
    assert moved.device.type == "meta" and moved.channel_scale.device.type == "meta"
    assert moved.shape == weight.shape and moved.format == weight.format


@pytest.mark.parametrize("group_size", [64, 0])
def test_copies_and_pickles(group_size):
    weight = builders.weight_parts(8, 24, 160, group_size, zero_point=True).packed
    shallow, deep, pickled = copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))
    assert shallow.blocks is weight.blocks
    assert deep.blocks.data_ptr() != weight.blocks.data_ptr()
    for other in (shallow, deep, pickled):
        assert other is not weight and same_weight(other, weight) and other.settled
    assert isinstance(copy.deepcopy({"a": weight})["a"], W4Weight)


# --- state dicts ---


@pytest.mark.parametrize("group_size, zero_point, scale_type", builders.ALL_FORMATS)
def test_state_dict_round_trip(group_size, zero_point, scale_type):
    weight = builders.weight_parts(9, 24, 288, group_size, zero_point=zero_point, scale_type=scale_type).packed
    state = weight.state_dict("layers.0.")
    names = {"layers.0.blocks", "layers.0.meta"} | ({"layers.0.channel_scale"} if group_size == 0 else set())
    assert set(state) == names
    assert all(type(t) is torch.Tensor and t.is_contiguous() for t in state.values())
    assert same_weight(W4Weight.from_state_dict(state, "layers.0."), weight)
    assert same_weight(W4Weight.from_state_dict(weight.state_dict()), weight)


def test_torch_save_round_trip_with_weights_only(tmp_path):
    weight = builders.weight_parts(9, 24, 288, 0).packed
    torch.save(weight.state_dict(), tmp_path / "w.pt")
    assert same_weight(W4Weight.from_state_dict(torch.load(tmp_path / "w.pt", weights_only=True)), weight)


def test_safetensors_round_trip_beside_other_tensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {
        f"layer{i}.": builders.weight_parts(i, 24, 288, g, zero_point=bool(i % 2)).packed
        for i, g in enumerate((32, 64, 128, 256, 0, 0))
    }
    state = {"odd": torch.zeros(3, dtype=torch.uint8)}
    for prefix, weight in weights.items():
        state |= weight.state_dict(prefix)
    safetensors.save_file(state, tmp_path / "w.safetensors")
    loaded = safetensors.load_file(tmp_path / "w.safetensors")
    for prefix, weight in weights.items():
        got = W4Weight.from_state_dict(loaded, prefix)
        assert same_weight(got, weight)
        assert got.blocks.data_ptr() % 16 == 0
        assert torch.equal(got.unpack()[0], weight.unpack()[0])


def test_a_misaligned_tensor_is_copied():
    weight = builders.weight_parts(9, 8, 32, 32).packed
    state = weight.state_dict()
    storage = torch.zeros(weight.blocks.numel() + 1, dtype=torch.uint8)
    state["blocks"] = storage[1:].view(weight.blocks.shape).copy_(weight.blocks)
    got = W4Weight.from_state_dict(state)
    assert got.blocks.data_ptr() % 16 == 0 and same_weight(got, weight)


def changed_meta(index: int, value: int):
    def change(state):
        state["p.meta"][index] = value

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("p.blocks"), "state dict: expected a tensor 'p.blocks', found none"),
        (lambda s: s.pop("p.meta"), "state dict: expected a tensor 'p.meta', found none"),
        (lambda s: s.pop("p.channel_scale"), "state dict: p.channel_scale: expected a tensor for a per-channel weight"),
        (changed_meta(0, 1), "state dict: 'p.meta': expected a packed W4 weight, got another tensor"),
        (changed_meta(1, 99), "state dict: 'p.meta': expected layout version 1, got 99; pack the weight again"),
        (changed_meta(2, 80), r"state dict: p.blocks: expected uint8 [2, 2, 4160], got uint8 [1, 2, 4160]"),
        (changed_meta(3, 512), r"state dict: p.blocks: expected uint8 [1, 4, 4288], got uint8 [1, 2, 4160]"),
        (changed_meta(3, 250), "k to be a positive multiple of 32, got 250"),
        (changed_meta(4, 100), "group_size: expected one of (32, 64, 128, 256), or k = 256 for per channel, got 100"),
        (changed_meta(4, 128), "state dict: p.blocks: expected uint8 [1, 2, 4288], got uint8 [1, 2, 4160]"),
        (changed_meta(5, 2), "expected zero_point 0 or 1 and a known scale type, got [2, 1]"),
        (changed_meta(6, 7), "expected zero_point 0 or 1 and a known scale type, got [1, 7]"),
        (changed_meta(6, 0), "state dict: p.channel_scale: expected float32 [64], got bfloat16 [64]"),
        (
            lambda s: s.update({"p.meta": s["p.meta"][:5]}),
            "state dict: 'p.meta': expected 7 values, got 5",
        ),
        (
            lambda s: s.update({"p.meta": s["p.meta"].float()}),
            "state dict: 'p.meta': expected int64 [7], got float32 [7]",
        ),
        (
            lambda s: s.update({"p.blocks": s["p.blocks"].to(torch.int32)}),
            "state dict: p.blocks: expected uint8 [1, 2, 4160], got int32 [1, 2, 4160]",
        ),
    ],
)
def test_a_state_dict_that_does_not_match_is_refused(change, message):
    state = builders.weight_parts(10, 8, 256, 0, zero_point=True).packed.state_dict("p.")
    change(state)
    with pytest.raises(ValueError, match=re.escape(message)):
        W4Weight.from_state_dict(state, "p.")


# --- errors of pack_w4: argument, what was expected, what came ---

U8 = torch.uint8


@pytest.mark.parametrize(
    "arguments, group_size, k, error, message",
    [
        (([[1]], torch.zeros(1, 1), None), 32, None, TypeError, "q: expected a torch.Tensor, got list"),
        ((torch.zeros(8, 32, dtype=U8), 1.0, None), 32, None, TypeError, "scale: expected a torch.Tensor, got float"),
        ((*tensors()[:2], 8), 128, None, TypeError, "zero: expected a torch.Tensor, got int"),
        (tensors(q=torch.int32), 128, None, TypeError, "q: expected int8 or uint8, got int32"),
        (tensors(q=torch.bool), 128, None, TypeError, "q: expected int8 or uint8, got bool"),
        (
            tensors(scale=torch.float64),
            128,
            None,
            TypeError,
            "scale: expected float32, bfloat16 or float16, got float64",
        ),
        (tensors(scale=U8), 128, None, TypeError, "scale: expected float32, bfloat16 or float16, got uint8"),
        (
            tensors(q=U8, zero=torch.float16),
            128,
            None,
            TypeError,
            "zero: expected an integer dtype, got float16",
        ),
        (tensors(q=U8, zero=torch.bool), 128, None, TypeError, "zero: expected an integer dtype, got bool"),
        (tensors(), 128.0, None, TypeError, "group_size: expected an int, got float"),
        (tensors(), True, None, TypeError, "group_size: expected an int, got bool"),
        (tensors(), None, None, TypeError, "group_size: expected an int, got NoneType"),
        (tensors(), 128, "128", TypeError, "k: expected an int, got str"),
        (
            (torch.zeros(16, 128, 1, dtype=torch.int8), *tensors()[1:]),
            128,
            None,
            ValueError,
            "q: expected 2 dimensions, [n, k] or [n, k / 2], got shape [16, 128, 1]",
        ),
        (
            (tensors()[0], torch.zeros(16), None),
            128,
            None,
            ValueError,
            "scale: expected shape [n, ceil(k / group_size)] with n = 16, got [16]",
        ),
        (
            (tensors()[0], torch.zeros(8, 1), None),
            128,
            None,
            ValueError,
            "scale: expected shape [n, ceil(k / group_size)] with n = 16, got [8, 1]",
        ),
        (
            (tensors()[0], torch.zeros((16, 1), device="meta"), None),
            128,
            None,
            ValueError,
            "scale: expected q's device cpu, got meta",
        ),
        (
            (*tensors(q=U8)[:2], torch.zeros((16, 1), dtype=U8, device="meta")),
            128,
            None,
            ValueError,
            "zero: expected q's device cpu, got meta",
        ),
        (tensors(n=12), 128, None, ValueError, "expected n, its rows, to be a positive multiple of 8, got 12"),
        (tensors(n=0), 128, None, ValueError, "expected n, its rows, to be a positive multiple of 8, got 0"),
        (tensors(columns=48), 64, None, ValueError, "q: expected k to be a positive multiple of 32, got 48"),
        (tensors(columns=0), 64, None, ValueError, "q: expected k to be a positive multiple of 32, got 0"),
        (tensors(columns=40, q=U8), 64, None, ValueError, "q: expected k to be a positive multiple of 32, got 80"),
        (
            tensors(columns=40, q=U8, zero=U8),
            64,
            None,
            ValueError,
            "q: expected k to be a positive multiple of 32, got 40",
        ),
        (
            tensors(columns=512, groups=8),
            48,
            None,
            ValueError,
            "group_size: expected one of (32, 64, 128, 256), or k = 512 for per channel, got 48",
        ),
        (
            tensors(columns=512, groups=8, q=U8, zero=U8),
            48,
            None,
            ValueError,
            "group_size: expected one of (32, 64, 128, 256), or k = 512 for per channel, got 48",
        ),
        (
            tensors(),
            -1,
            None,
            ValueError,
            "group_size: expected one of (32, 64, 128, 256), or k for per channel, got -1",
        ),
        (
            tensors(columns=512, groups=3),
            128,
            None,
            ValueError,
            "scale: expected shape [16, 4] for k = 512 and group_size 128, got [16, 3]",
        ),
        (
            tensors(columns=512, groups=3, q=U8),
            128,
            None,
            ValueError,
            "scale: expected shape [16, 8] for k = 1024 and group_size 128, got [16, 3]",
        ),
        (
            tensors(columns=512, groups=3, q=U8, zero=U8),
            128,
            None,
            ValueError,
            "scale: expected 4 columns for q [16, 512] read as one value each, or 8 read as canonical, with group_size "
            "128, got 3",
        ),
        (
            tensors(columns=512, groups=4, q=U8, zero=U8, zero_groups=1),
            128,
            None,
            ValueError,
            "zero: expected scale's shape [16, 4], got [16, 1]",
        ),
        (
            tensors(columns=512, groups=4, q=U8),
            128,
            None,
            TypeError,
            "q: expected int8 for signed codes, one value each (uint8 holds them only as canonical [n, k / 2]), got "
            "uint8 [16, 512] with 4 groups of 128",
        ),
        (
            tensors(columns=512, groups=4, q=U8),
            128,
            512,
            TypeError,
            "q: expected int8 for signed codes, one value each (uint8 holds them only as canonical [n, k / 2]), got "
            "uint8 [16, 512] with k = 512",
        ),
        (
            tensors(columns=512, groups=4, q=U8),
            128,
            256,
            ValueError,
            "q: expected shape [n, k = 256], or the canonical [n, k / 2 = 128], got [16, 512]",
        ),
        (
            tensors(columns=512, groups=4),
            128,
            1024,
            ValueError,
            "q: expected shape [n, k = 1024] for int8, one value each, got [16, 512]",
        ),
    ],
)
def test_wrong_arguments(arguments, group_size, k, error, message):
    with pytest.raises(error, match=re.escape(message)):
        pack_w4(*arguments, group_size=group_size, k=k)


@pytest.mark.parametrize(
    "value, zero_point, message",
    [
        (8, False, "q: expected values -8..7, got 0..8"),
        (-9, False, "q: expected values -8..7, got -9..0"),
        (16, True, "q: expected values 0..15, got 0..16"),
        (-1, True, "q: expected values 0..15, got -1..0"),
    ],
)
def test_codes_out_of_range(value, zero_point, message):
    q, scale, zero = tensors(zero=torch.uint8 if zero_point else None)
    q[3, 5] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_w4(q, scale, zero, group_size=128)


@pytest.mark.parametrize("dtype, value", [(torch.uint8, 17), (torch.int64, 17), (torch.int32, -1), (torch.int64, 256)])
def test_zero_points_out_of_range(dtype, value):
    q, scale, zero = tensors(q=torch.uint8, zero=dtype)
    zero[2, 0] = value
    with pytest.raises(ValueError, match=re.escape("zero: expected values 0..16, got ")):
        pack_w4(q, scale, zero, group_size=128, k=128)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"layout_version": 0}, ValueError, "layout_version: expected 1, got 0; pack the weight again"),
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
@pytest.mark.parametrize("group_size", [128, 0])
def test_it_moves_to_a_gpu_and_back(group_size):
    weight = builders.weight_parts(12, 200, 544, group_size, zero_point=True).packed
    gpu = weight.to("cuda")
    assert gpu.device == torch.device("cuda", torch.cuda.current_device()) and gpu.settled
    assert gpu.to("cuda") is gpu
    assert same_weight(gpu.to("cpu"), weight)
    for other in (copy.deepcopy(gpu), pickle.loads(pickle.dumps(gpu)), W4Weight.from_state_dict(gpu.state_dict())):
        assert other.device == gpu.device and other.settled and same_weight(other.to("cpu"), weight)


@pytest.mark.gpu
def test_packing_on_a_gpu_leaves_nothing_running():
    parts = builders.weight_parts(13, 4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        weight = parts.packed
        assert stream.query()
    assert weight.settled


@pytest.mark.gpu
def test_packing_during_capture_is_not_settled():
    parts = builders.weight_parts(14, 64, 256, zero_point=True, device="cuda")
    expected = parts.packed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = parts.packed
    graph.replay()
    torch.cuda.synchronize()
    assert not captured.settled and expected.settled
    assert same_weight(captured, expected)


def test_a_weight_of_fake_tensors_has_no_address_to_settle_at():
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = builders.weight_parts(1, 64, 256, 128).packed
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        fake = W4Weight(mode.from_tensor(weight.blocks), None, 64, 256, 128, weight.format)
        assert not fake.settled and fake.plan_key == weight.plan_key
