"""Weights in two levels: packing and its bytes, what raises, and a kernel on the emulator with every code, factor and
zero point. What they have in common with MXFP4 and NVFP4 is in test_codes.py."""

from __future__ import annotations

import pytest
import torch
import two_level

import jitgemm
from jitgemm.nn.layers.shard_weight import part_of_weight

# ---- packing ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("k", "levels"), [(512, True), (320, False)])
@pytest.mark.filterwarnings("ignore:tp_size")
def test_ranks_parts_keep_the_levels_where_no_group_is_cut(k, levels):
    cut = [part_of_weight(two_level.parts(3, 72, k).packed, "k", rank, 2, torch.int8) for rank in range(2)]
    assert all((part.format.code == "two_level") == levels for part in cut)


# ---- what raises -----------------------------------------------------------------------------------------------------


def test_sums_that_int32_may_not_hold_raise():
    largest = 2**17 - 16
    for k in (largest, largest + 16):
        groups = -(-k // 128)
        given = (
            two_level.bytes_of(0, 8, k),
            two_level.bytes_of(1, 8, groups),
            two_level.bytes_of(0, 8, groups),
            torch.ones(8).half(),
        )
        if k == largest:
            jitgemm.pack_w4_two_level(*given)
    with pytest.raises(ValueError, match=f"q: expected k of at most {largest}, for sums in int32, got {k}"):
        jitgemm.pack_w4_two_level(*given)
