"""The packed order, bit for bit, and the kernel's decode, instruction by instruction.

The oracle here follows the definition in `jitgemm/layout.py` one nibble at a time in plain integers, and shares no code
with it. Its second half does to each thread's words what the kernel does to its registers.
"""

from __future__ import annotations

import itertools
import struct

import builders
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgemm
from jitgemm.dtypes import DTYPES
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import WeightFormat, ceil_div
from jitgemm.weight import layout
from jitgemm.weight.codes import CODE_OPS, UNSIGNED
from jitgemm.weight.pack import pack_w4

U32 = 0xFFFFFFFF
INT4 = CODE_OPS["int4"]
ORDERS = tuple(order.name for order in CODES["int4"].orders)
BYTES_OF_CODES = 4096
E4M3_BYTES = {d: int(torch.tensor(d * 2.0**-9).to(torch.float8_e4m3fn).view(torch.uint8)) for d in range(-16, 16)}
"""The byte of torch.float8_e4m3fn for d * 2^-9."""


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


# --- the kernel's decode, on 32-bit integers ---


def rotr32(w: int, by: int) -> int:
    return (w >> by | w << (32 - by)) & U32


def sign_bytes(w: int) -> int:
    """`prmt` in its sign mode: each byte's top bit all over the byte."""
    return sum(0xFF << 8 * b for b in range(4) if w >> (8 * b + 7) & 1)


def decode_s8_signed(w: int) -> int:
    return (w & 0x0F0F0F0F) ^ sign_bytes(w << 7)


def decode_e4m3_signed(w: int) -> int:
    return ((w & 0x01010101) * 0x81 + (w & 0x0F0F0F0F)) & U32


def subtract_zero(w: int, zero: int) -> int:
    return (((w & 0x0F0F0F0F) | 0x80808080) - zero * 0x01010101) & U32


def decode_s8_zero(w: int, zero: int) -> int:
    return subtract_zero(w, zero) ^ 0x80808080


def decode_e4m3_zero(w: int, zero: int) -> int:
    e = subtract_zero(w, zero)
    r = e ^ ((~sign_bytes(e) & U32) | 0x80808080)
    return (r + ((r & 0x80808080) >> 7)) & U32


def decode(w: int, zero: int | None, lhs: str, codes: str = "any") -> tuple[int, int]:
    """One packed word -> the two registers it holds: A (k + 0..3) and B (k + 16..19)."""
    if codes == "e4m3":
        return w & 0x87878787, rotr32(w, 4) & 0x87878787
    if codes == "s8":
        return w & 0xF0F0F0F0, w << 4 & 0xF0F0F0F0
    if zero is None:
        f = decode_s8_signed if lhs == "s8" else decode_e4m3_signed
        return f(w), f(w >> 4)
    f = decode_s8_zero if lhs == "s8" else decode_e4m3_zero
    return f(w, zero), f(w >> 4, zero)


def operand_byte(d: int, lhs: str, codes: str | None = None) -> int:
    """What the tensor core must see for the integer weight d: "s8" is packed to give sixteen times as much, "any"
    twice; None is a code with a zero point."""
    d *= {"s8": 16, "any": 2}.get(codes, 1)
    return d & 0xFF if lhs == "s8" else E4M3_BYTES[d]


def fragment_place(thread: int, register: int, byte: int) -> tuple[int, int]:
    """(row, k) of a byte of wgmma m64k32's A fragment, after the PTX ISA's picture."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (register % 2), 16 * (register // 2) + 4 * (lane % 4) + byte


# --- tests ---


@pytest.mark.parametrize("group_size, zero_point, scale_type", builders.ALL_FORMATS)
def test_records_follow_the_definition(group_size, zero_point, scale_type):
    """Of five blocks of k: the last group of 256 has one of them."""
    parts = builders.weight_parts(1, 72, 544, group_size, zero_point=zero_point, scale_type=scale_type, max_zero=16)
    weight = parts.packed
    assert list(weight.blocks.shape) == [2, 5, weight.format.record_bytes]
    for strip, block in ((0, 0), (0, 1), (0, 4), (1, 2), (1, 4)):
        got = weight.blocks[strip, block].numpy().tobytes()
        assert got == expected_record(parts, strip, block, weight.format), (strip, block)


@pytest.mark.parametrize("codes", [*builders.LHS_DTYPES, "any"])
@pytest.mark.parametrize(
    "group_size, zero_point, scale_type",
    [(32, False, "fp32"), (64, True, "bf16"), (128, False, "fp16"), (128, True, "fp32"), (256, False, "bf16")],
)
def test_records_with_offsets_follow_the_definition(group_size, zero_point, scale_type, codes):
    """Offsets stand between scales and zero points, whatever the order of the codes."""
    parts = builders.weight_parts(
        1, 72, 544, group_size, zero_point=zero_point, scale_type=scale_type, offset=True, codes=codes
    )
    weight = parts.packed
    assert weight.format == WeightFormat(group_size, zero_point, scale_type, "any" if zero_point else codes, True)
    assert list(weight.blocks.shape) == [2, 5, weight.format.record_bytes]
    for strip, block in ((0, 0), (0, 1), (0, 4), (1, 2), (1, 4)):
        got = weight.blocks[strip, block].numpy().tobytes()
        assert got == expected_record(parts, strip, block, weight.format), (strip, block)


@pytest.mark.parametrize(
    "group_size, codes",
    [(group_size, codes) for group_size in (32, 128, 256, 0) for codes in builders.LHS_DTYPES],
)
def test_records_for_one_type_of_activations_follow_the_definition(group_size, codes):
    parts = builders.weight_parts(2, 72, 416, group_size, codes=codes)
    weight = parts.packed
    assert weight.format.order == codes
    for strip, block in ((0, 0), (0, 3), (1, 1)):
        got = weight.blocks[strip, block].numpy().tobytes()
        assert got == expected_record(parts, strip, block, weight.format), (strip, block)


@pytest.mark.parametrize(
    "format, scales, offsets, zeros, size",
    [
        (WeightFormat(128, False, "bf16"), 1, 0, 0, 4096 + 128),
        (WeightFormat(128, False, "bf16", offset=True), 1, 1, 0, 4096 + 2 * 128),
        (WeightFormat(32, True, "fp32", offset=True), 4, 4, 4, 4096 + 2 * 4 * 256 + 4 * 64),
        (WeightFormat(256, True, "fp16", offset=True), 1, 1, 1, 4096 + 2 * 128 + 64),
        (WeightFormat(64, False, "fp16", "s8", True), 2, 2, 0, 4096 + 2 * 2 * 128),
        (WeightFormat(0, True, "fp32"), 0, 0, 1, 4096 + 64),
    ],
    ids=str,
)
def test_a_record_has_a_row_of_offsets_for_every_row_of_scales(format, scales, offsets, zeros, size):
    assert (format.scale_rows, format.offset_rows, format.zero_rows) == (scales, offsets, zeros)
    assert format.record_bytes == size and format.record_bytes % 16 == 0
    assert format.offsets_at == 4096 + 64 * scales * DTYPES[format.scale_type].bytes
    assert format.zeros_at == format.offsets_at + 64 * offsets * DTYPES[format.scale_type].bytes


def test_a_record_is_little_endian():
    scale = torch.full((64, 1), 1.0, dtype=torch.float32)
    q = torch.zeros((64, 128), dtype=torch.int8)
    record = pack_w4(q, torch.cat([scale] * 4, 1), group_size=32).blocks[0, 0].numpy().tobytes()
    assert record[BYTES_OF_CODES : BYTES_OF_CODES + 4] == struct.pack("<f", 1.0)


def test_every_place_of_a_record_is_used_once():
    places = {
        code_place(half, thread, word, byte, which)
        for half in range(2)
        for thread in range(128)
        for word in range(4)
        for byte in range(4)
        for which in "AB"
    }
    assert places == {(row, k) for row in range(64) for k in range(128)}


def test_each_nibble_goes_to_its_place_and_comes_back():
    """One weight that is not zero at a time moves exactly its own four bits."""
    seen = torch.zeros(BYTES_OF_CODES, dtype=torch.int32)
    for row, k in [(r, c) for r in range(0, 64, 7) for c in range(0, 128, 5)]:
        q = torch.zeros((64, 128), dtype=torch.uint8)
        q[row, k] = 15
        words = layout.encode_codes(q, UNSIGNED)
        data = words.view(torch.uint8).flatten().to(torch.int32)
        assert sorted(data[data != 0].tolist()) in ([0x0F], [0xF0])
        assert not bool((seen & data).any())
        seen |= data
        assert torch.equal(layout.decode_codes(words, UNSIGNED), q)


@pytest.mark.parametrize("lhs", builders.LHS_DTYPES)
def test_decoded_words_are_the_a_fragment_for_all_signed_codes(lhs):
    parts = builders.weight_parts(3, 64, 128)
    parts.q[:16, :16] = torch.arange(-8, 8, dtype=torch.int8)[:, None].expand(16, 16)
    check_fragments(parts, lhs)


@pytest.mark.parametrize("codes", builders.LHS_DTYPES)
def test_decoded_words_for_one_type_are_the_a_fragment_for_all_codes(codes):
    parts = builders.weight_parts(3, 64, 128, 64, codes=codes, offset=True)
    least = -7 if codes == "e4m3" else -8
    parts.q[:16, :16] = torch.arange(-8, 8, dtype=torch.int8).clamp(min=least)[:, None].expand(16, 16)
    assert parts.packed.format.order == codes
    check_fragments(parts, codes)


@pytest.mark.parametrize("lhs", builders.LHS_DTYPES)
def test_decoded_words_are_the_a_fragment_for_all_codes_and_zero_points(lhs):
    check_fragments(builders.all_codes_all_zeros(), lhs)


def check_fragments(parts: builders.WeightParts, lhs: str) -> None:
    """Read records as the kernel's threads do and compare every byte of every register with (q - zero) at its place."""
    weight = parts.packed
    format = weight.format
    zeros_at = format.record_bytes - 64 * format.zero_rows
    q, zero = parts.q.tolist(), None if parts.zero is None else parts.zero.tolist()
    n, k_all = parts.q.shape
    for strip, block in [(s, b) for s in range(weight.blocks.shape[0]) for b in range(weight.blocks.shape[1])]:
        record = weight.blocks[strip, block].numpy().tobytes()
        for thread in range(128):
            lane_row = 16 * (thread // 32) + thread % 32 // 4
            words = [struct.unpack_from("<4I", record, half * 2048 + thread * 16) for half in range(2)]
            for k_step in range(4):
                registers = [0] * 4
                line = 32 * k_step // format.group_size if 0 < format.group_size < 128 else 0
                for p in range(2):
                    z = None if zero is None else record[zeros_at + 64 * line + lane_row + 8 * p]
                    word = words[k_step // 2][2 * (k_step % 2) + p]
                    registers[p], registers[2 + p] = decode(word, z, lhs, format.order)
                for register in range(4):
                    for byte in range(4):
                        row, k = fragment_place(thread, register, byte)
                        row, k = 64 * strip + row, 128 * block + 32 * k_step + k
                        if row < n and k < k_all:
                            d = q[row][k] - (0 if zero is None else zero[row][k // parts.group_size])
                        else:
                            # Padding: rows are never stored, k meets activations that are zero.
                            padded_zero = record[zeros_at + 64 * line + row % 64] if zero is not None else 0
                            d = 0 - padded_zero
                        got = registers[register] >> 8 * byte & 0xFF
                        assert got == operand_byte(d, lhs, None if format.zero_point else format.order), (row, k, d)


@pytest.mark.parametrize("lhs", builders.LHS_DTYPES)
def test_signed_decode_of_every_code_beside_every_neighbour(lhs):
    """No code disturbs the other seven of its word: every code beside every pair of codes around it, in every place."""
    codes = range(-8, 8)
    for d in codes:
        for other in codes:
            for place in range(8):
                values = [other] * 8
                values[place] = d
                word = sum(signed_byte(values[b], values[4 + b]) << 8 * b for b in range(4))
                a, b_ = decode(word, None, lhs)
                expected = [operand_byte(x, lhs, "any") for x in values]
                assert list(a.to_bytes(4, "little") + b_.to_bytes(4, "little")) == expected


@pytest.mark.parametrize("order", builders.LHS_DTYPES)
def test_decode_for_one_type_of_every_code_beside_every_neighbour(order):
    codes = range(-7 if order == "e4m3" else -8, 8)
    for d in codes:
        for other in codes:
            for place in range(8):
                values = [other] * 8
                values[place] = d
                a, b = values[:4], values[4:]
                word = sum(one_type_byte(a[i], b[i], b[i - 1], order) << 8 * i for i in range(4))
                registers = decode(word, None, order, order)
                expected = [operand_byte(x, order, order) for x in values]
                assert list(b"".join(r.to_bytes(4, "little") for r in registers)) == expected


@pytest.mark.parametrize("lhs", builders.LHS_DTYPES)
def test_zero_point_decode_of_every_code_and_zero_point_beside_every_neighbour(lhs):
    for z in range(17):
        for q in range(16):
            for other in range(16):
                for place in range(8):
                    values = [other] * 8
                    values[place] = q
                    word = sum((values[b] | values[4 + b] << 4) << 8 * b for b in range(4))
                    a, b_ = decode(word, z, lhs)
                    expected = [operand_byte(x - z, lhs) for x in values]
                    assert list(a.to_bytes(4, "little") + b_.to_bytes(4, "little")) == expected


def test_e4m3_bytes_are_d_times_2_to_the_minus_9_exactly():
    for d, byte in E4M3_BYTES.items():
        assert byte == (0x80 | -d if d < 0 else d)  # sign and magnitude; zero is +0
        value = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        assert value.item() == d * 2.0**-9


@given(seed=st.integers(0, 2**31), order=st.sampled_from(ORDERS), strips=st.integers(1, 3), kblocks=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_codes_survive_both_directions_in_every_order(seed, order, strips, kblocks):
    codes = builders.weight_parts(seed, 64 * strips, 128 * kblocks, codes=order).q
    codes[:16, 0] = torch.arange(-8, 8, dtype=torch.int8).clamp(min=-7 if order == "e4m3" else -8)
    words = layout.encode_codes(codes, INT4.orders[order])
    assert torch.equal(layout.decode_codes(words, INT4.orders[order]), codes)


def test_orders_of_codes_pack_to_different_words():
    codes = builders.weight_parts(4, 64, 128, codes="e4m3").q
    words = [layout.encode_codes(codes, INT4.orders[order]) for order in ORDERS]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(words, 2))


@given(seed=st.integers(0, 2**31), zero_point=st.booleans(), strips=st.integers(1, 3), kblocks=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_codes_survive_both_directions(seed, zero_point, strips, kblocks):
    low, high, dtype = (0, 16, torch.uint8) if zero_point else (-8, 8, torch.int8)
    g = builders.generator(seed)
    codes = torch.randint(low, high, (64 * strips, 128 * kblocks), generator=g, dtype=dtype)
    words = layout.encode_codes(codes, INT4.nibbles("any", zero_point))
    assert torch.equal(layout.decode_codes(words, INT4.nibbles("any", zero_point)), codes)
    any_words = torch.randint(-(2**31), 2**31, (strips, kblocks, 1024), generator=g, dtype=torch.int64).to(torch.int32)
    assert torch.equal(
        layout.encode_codes(
            layout.decode_codes(any_words, INT4.nibbles("any", zero_point)), INT4.nibbles("any", zero_point)
        ),
        any_words,
    )


def test_chunking_does_not_change_the_bytes(monkeypatch):
    for group_size, zero_point, scale_type in builders.ALL_FORMATS:
        parts = builders.weight_parts(5, 200, 288, group_size, zero_point=zero_point, scale_type=scale_type)
        whole = parts.packed
        monkeypatch.setattr(layout, "CHUNK_CODES", 1)
        assert len(list(layout.strip_chunks(200, 288))) == 4
        chunked = parts.packed
        assert torch.equal(chunked.blocks, whole.blocks)
        assert builders.same_bits(chunked.unpack()[1], parts.scale)
        assert torch.equal(chunked.dequantize(), whole.dequantize())
        monkeypatch.undo()


def test_chunks_cover_every_strip_once():
    chunks = list(layout.strip_chunks(57344, 8192))
    assert [s for first, end in chunks for s in range(first, end)] == list(range(ceil_div(57344, 64)))
    assert len(chunks) <= 16


def padded_field(weight, start: str, stop: str, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Scales, offsets or zero points of the only strip, those of rows and groups that are not there with them."""
    field = weight.blocks[:, :, getattr(weight.format, start) : getattr(weight.format, stop)]
    return layout.unpack_field(field, 64, k, weight.format.group_size, dtype)


@pytest.mark.parametrize("group_size, zero_point", [(g, z) for g in (32, 64, 128, 256, 0) for z in (False, True)])
def test_padding_is_zero(group_size, zero_point):
    parts = builders.weight_parts(6, 8, 176, group_size, zero_point=zero_point, scale_type="fp32")
    weight = parts.packed
    codes = layout.decode_codes(weight.blocks.view(torch.int32)[:, :, :1024], INT4.nibbles("any", zero_point))
    assert not codes[8:].any() and not codes[:, 176:].any()
    if group_size:
        scales = padded_field(weight, "scales_at", "offsets_at", 256, torch.float32)
        assert not scales[8:].any() and not scales[:, parts.scale.shape[1] :].any()
    else:
        assert not weight.channel_scale[8:].any()
    if zero_point:
        assert not padded_field(weight, "zeros_at", "record_bytes", 256, torch.uint8)[8:].any()


@pytest.mark.parametrize("codes", ORDERS)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_padding_is_zero_in_every_order_and_for_offsets(group_size, codes):
    """Offsets meet the activations of a padded k, which are zero; rows past n are never stored."""
    parts = builders.weight_parts(6, 8, 272, group_size, scale_type="fp32", offset=True, codes=codes)
    weight = parts.packed
    words = weight.blocks.view(torch.int32)[:, :, :1024]
    padded = layout.decode_codes(words, INT4.orders[codes])
    assert not padded[8:].any() and not padded[:, 272:].any()
    offsets = padded_field(weight, "offsets_at", "zeros_at", 384, torch.float32)
    assert not offsets[8:].any() and not offsets[:, parts.offset.shape[1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("codes", ORDERS)
@pytest.mark.parametrize("group_size, zero_point", [(32, False), (64, True), (128, False), (256, False)])
def test_a_gpu_packs_the_same_bytes_with_offsets_in_every_order(group_size, zero_point, codes):
    def packed(device: str):
        return builders.weight_parts(
            7, 584, 1120, group_size, zero_point=zero_point, offset=True, codes=codes, device=device
        ).packed

    cpu, gpu = packed("cpu"), packed("cuda")
    assert gpu.format == cpu.format and torch.equal(gpu.blocks.cpu(), cpu.blocks)
    assert builders.same_bits(gpu.unpack().offset.cpu(), cpu.unpack().offset)
    assert torch.equal(gpu.dequantize().cpu(), cpu.dequantize())
    # Sums in fp64 may be taken in another order.
    assert torch.allclose(gpu.row_sum.cpu(), cpu.row_sum, rtol=2**-23, atol=1e-9)


@pytest.mark.gpu
def test_a_gpu_packs_past_2_to_the_31_codes():
    n, k = 65536 + 64, 32768
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.ones((n, k // 128), dtype=torch.bfloat16, device="cuda")
    weight = pack_w4(q, scale, group_size=128)
    back, _, _ = weight.unpack()
    low = (back[-64:].to(torch.int16) & 0xF)[:, 0::2] | (back[-64:].to(torch.int16) & 0xF)[:, 1::2] << 4
    assert torch.equal(low.to(torch.uint8), q[-64:])


@pytest.mark.parametrize("channel", [-1, "channel"])
def test_minus_one_and_channel_are_one_scale_per_row(channel):
    q, scale = torch.randint(-8, 8, (8, 64), dtype=torch.int8), torch.rand(8, 1)
    expected = jitgemm.pack_w4(q, scale, group_size=64)
    packed = jitgemm.pack_w4(q, scale, group_size=channel)
    assert packed.group_size == 64 and packed.format == expected.format
    assert torch.equal(packed.blocks, expected.blocks)
    w8 = jitgemm.pack_w8(q, scale, group_size=channel)
    assert w8.format.group_size == 0 and w8.group_size == 64
    w = torch.randn(8, 64)
    assert torch.equal(jitgemm.quantize_w4(w, channel).blocks, jitgemm.quantize_w4(w, 64).blocks)


def test_per_channel_and_packed_codes_of_either_form_need_k():
    q, scale = torch.randint(0, 16, (8, 64), dtype=torch.uint8), torch.rand(8, 1)
    zero = torch.zeros(8, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="^k: expected .* with group_size -1 fits both; got None"):
        jitgemm.pack_w4(q, scale, zero, group_size="channel")
    assert jitgemm.pack_w4(q, scale, zero, group_size="channel", k=64).k == 64


@pytest.mark.parametrize("wrong", [-2, 0, 48])
def test_other_group_sizes_raise(wrong):
    with pytest.raises(ValueError, match=f"^group_size: expected one of .* got {wrong}"):
        jitgemm.pack_w4(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 2), group_size=wrong)
    with pytest.raises(TypeError, match="^group_size: expected an int"):
        jitgemm.pack_w4(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 1), group_size="channels")


def test_every_code_has_its_bytes_under_the_same_names():
    assert CODES.keys() == CODE_OPS.keys()
    for name, code in CODES.items():
        numbers, orders = CODE_OPS[name], {order.name: order for order in code.orders}
        assert (numbers.dtype is None) == (code.bits == 4)
        if numbers.dtype is None:
            assert numbers.orders.keys() == orders.keys()
            assert numbers.zero_orders.keys() == {order for order in orders if orders[order].zero_decoders}
            least = min(order.low for order in numbers.orders.values())
            holding = {order for order, held in numbers.orders.items() if held.low == least}
            # One holds every code, and no scales that are far apart.
            assert holding - {"near"} == {order for order in orders if orders[order].complete}
