"""The packed order, bit for bit.

The oracle follows the definition in `jitgemm/weight/layout.py` one nibble at a time in plain integers, and shares no code
with it. What kernels make of the bytes is test_codes.py's business.
"""

from __future__ import annotations

import builders
import pytest
import torch

from jitgemm.dtypes import LHS_TYPES
from jitgemm.kernel.formats import WeightFormat
from jitgemm.weight.pack import pack_w4

BYTES_OF_CODES = 4096


# --- the definition, slowly ---


def code_place(half: int, thread: int, word: int, byte: int, which: str) -> tuple[int, int]:
    """(row in the strip, k in the block) of one weight of one word."""
    warp, lane = thread // 32, thread % 32
    r, c = lane // 4, lane % 4
    w = 4 * half + word
    k_step, p = w // 2, w % 2
    row = 16 * warp + r + 8 * p
    k = 32 * k_step + 4 * c + byte + (16 if which == "B" else 0)
    return row, k


def signed_byte(a: int, b: int) -> int:
    """Byte of a signed word with codes a and b."""

    def nibble(d: int) -> int:
        return ((~d if d < 0 else d) & 7) << 1 | int(d < 0)

    return nibble(b) << 4 | nibble(a)


def one_type_byte(a: int, b: int, before_b: int, codes: str) -> int:
    """Byte of a word for one type of activations: codes a and b in this byte's place, `before_b` in b's byte before."""
    if codes == "s8":
        return (a & 15) << 4 | b & 15
    return int(a < 0) << 7 | abs(b) << 4 | int(before_b < 0) << 3 | abs(a)


def expected_record(parts: builders.WeightParts, strip: int, block: int, format: WeightFormat) -> bytes:
    """One record, from the definition."""
    n, k_all = parts.q.shape
    q = parts.q.tolist()

    def code(row: int, k: int) -> int:
        row, k = 64 * strip + row, 128 * block + k
        return q[row][k] if row < n and k < k_all else 0

    record = bytearray(BYTES_OF_CODES)
    for half in range(2):
        for thread in range(128):
            for word in range(4):
                a = [code(*code_place(half, thread, word, b, "A")) for b in range(4)]
                b_ = [code(*code_place(half, thread, word, b, "B")) for b in range(4)]
                for byte in range(4):
                    if format.zero_point:
                        value = a[byte] | b_[byte] << 4
                    elif format.order != "any":
                        value = one_type_byte(a[byte], b_[byte], b_[(byte - 1) % 4], format.order)
                    else:
                        value = signed_byte(a[byte], b_[byte])
                    record[half * 2048 + thread * 16 + word * 4 + byte] = value

    def group_of(line: int, rows: int) -> int:
        if format.group_size == 0:
            return 0
        return block * 128 // format.group_size if format.group_size > 128 else block * rows + line

    def row_values(values: torch.Tensor, line: int, rows: int) -> torch.Tensor:
        out = torch.zeros(64, dtype=values.dtype)
        group = group_of(line, rows)
        for row in range(64):
            if 64 * strip + row < n and group < values.shape[1]:
                out[row] = values[64 * strip + row, group]
        return out

    for line in range(format.scale_rows):
        record += row_values(parts.scale, line, format.scale_rows).view(torch.uint8).numpy().tobytes()
    for line in range(format.offset_rows):
        record += row_values(parts.offset, line, format.offset_rows).view(torch.uint8).numpy().tobytes()
    for line in range(format.zero_rows):
        record += row_values(parts.zero, line, format.zero_rows).numpy().tobytes()
    return bytes(record)


# --- tests ---

ORDERS_AND_OFFSETS = [
    *(dict(group_size=g, zero_point=z, scale_type=t) for g, z, t in builders.ALL_FORMATS),
    *(dict(group_size=g, codes=codes) for g in (32, 128, 256, 0) for codes in LHS_TYPES),
    *(dict(group_size=g, zero_point=z, scale_type=t, offset=True, codes=codes)
      for g, z, t in ((32, False, "fp32"), (64, True, "bf16"), (128, False, "fp16"), (128, True, "fp32"), (256, False, "bf16"))
      for codes in (*LHS_TYPES, "any")),
]  # fmt: skip


@pytest.mark.parametrize("form", ORDERS_AND_OFFSETS, ids=lambda form: " ".join(map(str, form.values())))
def test_records_follow_the_definition(form):
    """Of five blocks of k: the last group of 256 has one of them. Rows, columns and groups that are not there are 0."""
    parts = builders.weight_parts(1, 72, 544, max_zero=16, **form)
    weight, order = parts.packed, "any" if form.get("zero_point") else form.get("codes", "any")
    assert (weight.format.order, weight.format.offset) == (order, form.get("offset", False))
    assert list(weight.blocks.shape) == [2, 5, weight.format.record_bytes] and weight.format.record_bytes % 16 == 0
    for strip, block in ((0, 0), (0, 1), (0, 4), (1, 2), (1, 4)):
        got = weight.blocks[strip, block].numpy().tobytes()
        assert got == expected_record(parts, strip, block, weight.format), (strip, block)
    assert weight.channel_scale is None or not weight.channel_scale[72:].any()


@pytest.mark.gpu
def test_a_gpu_packs_past_2_to_the_31_codes():
    n, k = 65536 + 64, 32768
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.ones((n, k // 128), dtype=torch.bfloat16, device="cuda")
    weight = pack_w4(q, scale, group_size=128)
    back, _, _ = weight.unpack()
    low = (back[-64:].to(torch.int16) & 0xF)[:, 0::2] | (back[-64:].to(torch.int16) & 0xF)[:, 1::2] << 4
    assert torch.equal(low.to(torch.uint8), q[-64:])
