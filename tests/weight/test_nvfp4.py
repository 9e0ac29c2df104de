"""NVFP4 weights: every code times every scale as the sum of two FP8 numbers, their bytes and orders. What they have in
common with MXFP4's is in test_codes.py."""

from __future__ import annotations

import builders
import nvfp4
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_weights import same_weight

import jitgemm
from jitgemm.nn.layers.by_width import W4A8Linear
from jitgemm.weight import layout
from jitgemm.weight.codes import CODE_OPS
from jitgemm.weight.nvfp4 import FORMAT, NEAR, from_bytes, terms, to_bytes

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
"""All that are not negative and no NaN."""
PRODUCTS = SCALES.double()[:, None] * MAGNITUDES


def test_two_e5m2_terms_hold_every_code_times_every_scale():
    high, low = terms()
    assert high.dtype == low.dtype == torch.float8_e5m2
    assert torch.equal(high.double() + low.double(), PRODUCTS)
    assert PRODUCTS.numel() == 127 * 8 and bool((low.double() > 0).any())


# ---- packing ---------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 12).map(lambda x: 8 * x),
    k=st.integers(1, 40).map(lambda x: 16 * x),
)
@settings(max_examples=40, deadline=None)
def test_scales_near_one_another_come_back_times_a_power_of_two(seed, n, k):
    parts = nvfp4.parts(seed, n, k)
    parts.codes[0, :16] &= 8
    weight = parts.packed
    assert weight.format == NEAR and torch.equal(weight.dequantize(), parts.products().float() * parts.whole)
    codes, scales, whole = *weight.unpack()[:2], weight.unpack().row_scale
    expected = torch.where((parts.codes == 8) | (parts.products() == 0), 0, parts.codes)
    assert torch.equal(codes, expected)  # except -0 and codes of the scale 0
    used = expected.unflatten(1, (-1, 16)).amax(-1) > 0
    given_ = parts.scales.double() * parts.whole.double()
    assert torch.equal((scales.double() * whole.double())[used], given_[used])
    assert torch.equal(whole.frexp().mantissa, parts.whole.expand_as(whole).frexp().mantissa)
    again = jitgemm.pack_nvfp4(*nvfp4.Parts(*weight.unpack()[:2], weight.unpack().row_scale).given)
    assert torch.equal(again.blocks, weight.blocks) and torch.equal(again.channel_scale, weight.channel_scale)


@pytest.mark.parametrize(
    ("change", "order"),
    [
        ({}, "near"),
        ({"scales": (40, 119)}, "near"),
        ({"scales": (40, 120)}, "near"),  # 2^10
        ({"scales": (40, 126)}, "near"),
        ({"scales": (39, 126)}, "nvfp4"),
        ({"scales": (47, 126)}, "near"),
        ({"scales": (31, 111)}, "nvfp4"),  # 2^10, of 1.875
        ({"scales": (1, 64)}, "near"),  # 2^-9 and 2
        ({"scales": (1, 72)}, "nvfp4"),
        ({"scales": (0, 64)}, "near"),  # zeros, whatever the codes
        ({"scales": (0, 64), "codes": 8}, "near"),
        ({"scales": (0, 0)}, "near"),
        ({"scales": (1, 126), "codes": 0}, "near"),
        ({"whole": 2.0**-126}, "nvfp4"),  # times a power of two it is none of fp32's normal numbers
        ({"whole": 0.0}, "near"),
    ],
    ids=str,
)
def test_which_scales_are_near_one_another(change, order):
    """Of row 3's first two groups, the codes of the first."""
    parts = nvfp4.parts(1, 8, 64, low=64, high=65)
    parts.codes[:] = 7
    parts.scales.view(torch.uint8)[3, :2] = torch.tensor(change.get("scales", (64, 64)), dtype=torch.uint8)
    parts.codes[3, :16] = change.get("codes", 7)
    parts.whole[:] = change.get("whole", 0.5)
    weight = parts.packed
    assert weight.format.order == order
    assert torch.equal(weight.dequantize(), parts.products().float() * parts.whole)


def test_experts_some_of_whose_scales_are_far_apart():
    """All are brought into the order that holds any scales, and give the same numbers."""
    each = [nvfp4.parts(1, 72, 416), nvfp4.far(2, 72, 416), nvfp4.parts(3, 72, 416)]
    assert [one.packed.format.order for one in each] == ["near", "nvfp4", "near"]
    weight = jitgemm.W4Weight.stacked(3, lambda e: each[e].packed)
    assert weight.format == FORMAT
    for e, one in enumerate(each):
        assert torch.equal(weight[e].dequantize(), one.products().float() * one.whole)
    near = jitgemm.W4Weight.stacked(2, lambda e: each[2 * e].packed)
    assert near.format == NEAR and torch.equal(near[1].blocks, each[2].packed.blocks)


def test_scales_near_one_another_load_in_the_order_for_any_scales():
    """As weights were saved before there was the other order; so does a layer that was made of the other one."""
    weight = nvfp4.parts(1, 72, 416).packed
    blocks = weight.blocks.clone()
    layout.reorder_codes(blocks[None], "nvfp4", "near", "nvfp4")
    general = jitgemm.W4Weight(blocks, weight.channel_scale, 72, 416, 416, FORMAT)
    again = jitgemm.W4Weight.from_state_dict(general.state_dict("w."), "w.")
    assert again.format == FORMAT and torch.equal(again.dequantize(), weight.dequantize())
    layer = W4A8Linear(nvfp4.parts(2, 72, 416).packed)
    layer.load_state_dict(W4A8Linear(again).state_dict())
    assert layer.weight.format == FORMAT and torch.equal(layer.weight.dequantize(), weight.dequantize())


def test_rows_of_zeros_that_were_packed_wrong_are_mended_when_they_are_read():
    """Versions before 1.0.0 kept the codes of a row whose scales are all 0, beside bytes of 248."""
    parts = nvfp4.parts(1, 72, 416)
    parts.scales.view(torch.uint8)[3] = 0
    right = parts.packed
    state = {name: each.clone() for name, each in right.state_dict().items()}
    nibbles, fmt = CODE_OPS["nvfp4"].orders["near"], right.format
    for block, record in enumerate(state["blocks"][0]):
        words = record.view(torch.int32)[None, None, :1024]
        codes, bytes = layout.decode_codes(words, nibbles), from_bytes(record[None, None, fmt.zeros_at :])
        columns = parts.codes[3, 128 * block : 128 * (block + 1)]
        codes[3, : len(columns)], bytes[3, : len(columns) // 16] = columns, 248
        words.copy_(layout.encode_codes(codes, nibbles))
        record[fmt.zeros_at :] = to_bytes(bytes)[0, 0]
    assert not torch.equal(state["blocks"], right.blocks)
    for again in (
        jitgemm.W4Weight.from_state_dict(state),
        jitgemm.W4Weight(state["blocks"], right.channel_scale, 72, 416, 416, NEAR),
    ):
        assert torch.equal(again.blocks, right.blocks)


def test_a_thread_finds_its_two_rows_scales_in_one_vector():
    parts = nvfp4.parts(1, 64, 128)
    packed = parts.packed
    vectors, scales = packed.blocks[0, 0, 4096:].view(4, 8, 16), packed.unpack()[1].view(torch.uint8) - 8
    for warp, row in ((0, 0), (2, 5), (3, 7)):
        first = 16 * warp + row
        assert torch.equal(vectors[warp, row], torch.cat((scales[first], scales[first + 8])))


@pytest.mark.parametrize("shape", [(1,), (3,), (3, 1), (3, 72), (3, 72, 1)], ids=str)
def test_experts_may_have_one_scale_each_or_one_a_row(shape):
    parts = nvfp4.parts(2, 72, 416, experts=3)
    whole = torch.rand(shape, generator=builders.generator(1))
    weight = jitgemm.pack_nvfp4(parts.canonical, parts.scales, whole)
    assert weight.experts == 3
    for e in range(3):
        own = whole if whole.numel() == 1 else whole[e].flatten()
        alone = jitgemm.pack_nvfp4(parts.canonical[e], parts.scales[e], own)
        assert torch.equal(alone.dequantize(), parts.products()[e].float() * own[:, None])
        assert same_weight(weight[e], alone)
