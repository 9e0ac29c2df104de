"""QServe layers, packed from the definition: the order that the kernel's lanes load, and its arithmetic on bytes."""

from __future__ import annotations

import builders
import layers
import pytest
import torch
from files_qserve import per_channel, per_group

from jitgemm.checkpoint.canonical import concat
from jitgemm.checkpoint.qserve import FORMAT


def exact(tensors, by_kernel) -> torch.Tensor:
    return by_kernel.double() * tensors["s1_scales"].double()[:, None]


@pytest.mark.parametrize("group_size, lhs_dtype", [
    (32, torch.int8), (64, torch.int8), (128, torch.int8), (512, torch.int8), (128, torch.float8_e4m3fn), (256, None),
])  # fmt: skip
def test_two_levels_read_as_the_kernels_int8_times_the_channel_scale(tmp_path, group_size, lhs_dtype):
    """int8 activations get the file's levels where groups hold 128 columns, all others zero points."""
    tensors, by_kernel = per_group(group_size, k=512, group_size=group_size)
    weight = layers.load(tmp_path, tensors)
    layers.assert_exactly(weight, exact(tensors, by_kernel))
    assert weight.group_size == group_size and weight.scale.dtype == torch.float32 and weight.offset is None
    packed = weight.pack(lhs_dtype)
    assert torch.equal(packed.dequantize().double(), exact(tensors, by_kernel))
    if lhs_dtype == torch.int8 and group_size >= 128:
        assert packed.format.name == "tl-channel-fp16-two_level"
        assert torch.equal(packed.unpack().row_scale[:, 0], tensors["s1_scales"])
    else:
        assert packed.group_size == group_size and packed.format.zero_point


def test_per_channel_reads_as_the_definition(tmp_path):
    zero = torch.randint(0, 16, (64,), generator=builders.generator(1))
    tensors, expected = per_channel(1, zero)
    assert not torch.equal(tensors["s1_szeros"].double(), zero * tensors["s1_scales"].double()), "no zero was rounded"
    weight = layers.load(tmp_path, tensors, {"group_size": -1})
    layers.assert_exactly(weight, expected)
    assert weight.offset is not None and weight.group_size >= weight.k
    assert torch.equal(weight.pack().dequantize().double(), expected)  # in groups


@pytest.mark.parametrize("zeros", [[0, 1, 2, 4, 8] * 13, [8] * 64], ids=["powers of two", "8"])
def test_per_channel_zeros_that_were_not_rounded_are_integers_again(zeros):
    zero = torch.tensor(zeros)[:64]
    tensors, expected = per_channel(3, zero)
    weight = layers.read(FORMAT, tensors, None)
    layers.assert_exactly(weight, expected)
    assert weight.offset is None and (weight.zero is None if zeros[0] else torch.equal(weight.zero[:, 0].long(), zero))


def same_everywhere(q: int, s2: int, s2_zero: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": torch.full((32, 16), q * 17, dtype=torch.uint8),
        "s1_scales": torch.ones(32, dtype=torch.float16),
        "s2_scales": torch.full((1, 32), s2, dtype=torch.int8),
        "s2_zeros": torch.full((1, 32), s2_zero, dtype=torch.int8),
    }


REFUSED = [
    ({"s2_scales": torch.full((2, 64), 18, dtype=torch.int8)}, None, r"s2_zeros: expected multiples of s2_scales"),
    ({"s2_scales": torch.zeros((2, 64), dtype=torch.int8)}, None, r"s2_scales: expected 1..127, got 0"),
    ({"qweight": torch.zeros((48, 128), dtype=torch.int8)}, None, r"qweight: expected n and k to be multiples of"),
    ({}, {"group_size": 64}, r"s2_scales: expected 4 groups for k = 256 and group_size 64, got 2"),
    ({}, {"wbits": 8}, r"bits: expected 4, got 8"),
    (same_everywhere(15, 18, 0), None, r"s2_scales: expected q \* s2_scales up to 255, got 270"),
    (same_everywhere(15, 10, 0), None, r"s2_zeros: expected \(q - zero\) \* s2_scales within -128..127, got 150..150"),
]


@pytest.mark.parametrize("change, config, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_a_layer_that_cannot_be_read_is_refused(change, config, message):
    with pytest.raises(ValueError, match=message):
        layers.read(FORMAT, per_group(0)[0] | change, config)


def test_zero_points_that_are_all_8_and_rows_of_zeros_are_two_levels_too():
    tensors = same_everywhere(10, 16, -128) | {"qweight": torch.full((32, 64), 10 * 17, dtype=torch.uint8)}
    tensors["s1_scales"][::3] = 0
    packed = layers.read(FORMAT, tensors, None).pack(torch.int8)
    assert packed.format.code == "two_level" and torch.equal(
        packed.dequantize(), 32 * tensors["s1_scales"].float()[:, None].expand(-1, 128)
    )


def test_joined_layers_keep_their_levels():
    found = [per_group(seed) for seed in (10, 11)]
    joined = concat([layers.read(FORMAT, tensors, None) for tensors, _ in found]).pack(torch.int8)
    assert joined.format.code == "two_level"
    assert torch.equal(joined.dequantize().double(), torch.cat([exact(*each) for each in found]))
