"""The packed order of a weight: codes, scales, offsets and zero points to records and back.

Pure functions over torch tensors, on whatever device those are. This module knows the order of bytes and nothing else:
it checks no arguments, and knows no checkpoint formats, kernels or streams.

A weight is cut into strips of 64 rows and blocks of 128 k; one record holds one strip x block
(`WeightFormat.record_bytes` has the picture). The 8192 bytes of 8-bit weights are 64 rows of 128 bytes with the
128-byte swizzle, as wgmma reads them from shared memory: chunk c of 16 bytes of row r lies at chunk c ^ (r % 8). The
4096 bytes of 4-bit codes stand in the order in which the 128 threads of a warpgroup want the A fragments of wgmma
m64k32 (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk32"), so that a thread reads two 16-byte vectors::

    codes [half h: 2][thread t: 128][word j: 4], 32-bit little endian; word w = 4h + j, warp = t / 32, lane = t % 32

    row in the strip  16 * warp + lane / 4 + 8 * (w % 2)
    first k, A half   32 * (w / 2) + 4 * (lane % 4)             byte b: weight A_b at this k + b
    first k, B half   32 * (w / 2) + 4 * (lane % 4) + 16        byte b: weight B_b at this k + b

    byte b             bit   7 6 5 4          3 2 1 0
      zero points, two_level B_b              A_b
      any                    v(B_b)  s(B_b)   v(A_b)  s(A_b)       s: d < 0    v: (s ? ~d : d) & 7
      s8                     A_b & 15         B_b & 15             two's complement
                       bit   7       6 5 4    3              2 1 0
      e4m3                   s(A_b)  v(B_b)   s(B_(b-1)%4)   v(A_b)       s: d < 0    v: |d|, no -8
      e2m1, nvfp4 (b < 2)    s(A_b)  v(A_2b+1) s(B_b)        v(A_2b)      s, v: the code's
           (b >= 2)          s(A_b)  v(B_2b-3) s(B_b)        v(B_2b-4)
      near (b < 2)           n(A_2b+1)        n(A_2b)              n: a selector, of `codes.py`
           (b >= 2)          n(B_2b-3)        n(B_2b-4)

The words of e2m1's exponents are in `e2m1.py`, nvfp4's scales in `terms.py`, two_level's factors in `levels.py`. In the order for e4m3 the sign of B_b stands in the next byte so that rotating a word right by four puts B where A was.
Sign and magnitude is what e4m3 decodes fastest, but has no nibble for -8: one's complement has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jitgemm.kernel.codes import CODES, EXPONENT_GROUP, SCALE_GROUP
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.weight import e2m1, levels, terms
from jitgemm.weight.codes import CODE_BYTES, Nibbles

LAYOUT_VERSION = 3
"""Changes when the same weight packs to other bytes."""

CHUNK_CODES = 32 << 20
"""Weights that are packed or unpacked at once; bounds the temporaries to a few times this many bytes."""

_CODE_WORDS = STRIP_ROWS * BLOCK_K // 8
"""32-bit words of 4-bit codes in a record."""


def strips_of(n: int) -> int:
    return ceil_div(n, STRIP_ROWS)


def kblocks_of(k: int) -> int:
    return ceil_div(k, BLOCK_K)


def strip_chunks(n: int, k: int) -> Iterator[tuple[int, int]]:
    """Runs of strips (first, end) of a weight [n, k], each of at most CHUNK_CODES weights but at least one strip."""
    strips = strips_of(n)
    step = max(1, CHUNK_CODES // (STRIP_ROWS * BLOCK_K * kblocks_of(k)))
    for first in range(0, strips, step):
        yield first, min(first + step, strips)


# --- codes ------------------------------------------------------------------------------------------------------------


def encode_codes(codes: torch.Tensor, nibbles: Nibbles) -> torch.Tensor:
    """Put whole strips of 4-bit codes into the order of the records.

    Args:
        codes: contiguous, nibbles.dtype [64 * strips, 128 * kblocks], one value each.

    Returns:
        int32 [strips, kblocks, 1024], the words of each record.
    """
    strips, kblocks = codes.shape[0] // STRIP_ROWS, codes.shape[1] // BLOCK_K
    # strip, warp, row half, lane / 4, block, half h, k step in the half, A or B, lane % 4; a word is four k
    words = codes.view(torch.int32).view(strips, 4, 2, 8, kblocks, 2, 2, 2, 4)
    packed = nibbles.join(*(words[..., i, :].contiguous() for i in range(2)))
    return packed.permute(0, 4, 5, 1, 3, 7, 6, 2).reshape(strips, kblocks, _CODE_WORDS)


def decode_codes(words: torch.Tensor, nibbles: Nibbles) -> torch.Tensor:
    """Undo `encode_codes`: int32 [strips, kblocks, 1024] -> nibbles.dtype [64 * strips, 128 * kblocks]."""
    strips, kblocks, _ = words.shape
    # strip, block, half h, warp, lane / 4, lane % 4, k step in the half, row half -> the order of the matrix
    words = words.reshape(strips, kblocks, 2, 4, 8, 4, 2, 2).permute(0, 3, 7, 4, 1, 2, 6, 5).contiguous()
    words = torch.stack(nibbles.split(words), dim=7)
    return words.view(nibbles.dtype).reshape(strips * STRIP_ROWS, kblocks * BLOCK_K)


def swizzle(rows: torch.Tensor) -> torch.Tensor:
    """Bytes of records [..., 64, 128] with the 128-byte swizzle, or without it: it is its own inverse."""
    chunks = rows.unflatten(-1, (8, 16)).unflatten(-3, (8, 8))
    row = torch.arange(8, device=rows.device)
    return chunks[..., row[:, None], row[:, None] ^ row, :].reshape(rows.shape)


def _encode(codes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Whole strips of codes -> int32 [strips, kblocks, words of a record]."""
    code = CODE_BYTES[format.code]
    if code.dtype is None:
        return encode_codes(codes, code.nibbles(format.order, format.zero_point))
    rows = codes.view(torch.int8).unflatten(1, (-1, BLOCK_K)).unflatten(0, (-1, STRIP_ROWS)).transpose(1, 2)
    return swizzle(rows).flatten(2).view(torch.int32)


def split_canonical(q: torch.Tensor, unsigned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Canonical bytes uint8 [n, k / 2] -> codes at even k (low nibble) and at odd k, each [n, k / 2].

    int8 -8..7, or uint8 0..15 of unsigned ones.
    """
    if unsigned:
        return q & 0xF, q >> 4
    q = q.view(torch.int8)
    return (q << 4) >> 4, q >> 4


# --- rows of 64 scales or zero points ---------------------------------------------------------------------------------


def bits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer type that carries a value's bits, so that NaN payloads and the sign of zero survive every copy."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]


def _encode_rows(values: torch.Tensor, strips: int, kblocks: int, rows: int, group_size: int) -> torch.Tensor:
    """One value per row of n and group -> [strips, kblocks, rows, 64], zero where there is no such row or group."""
    if group_size == 0:
        values = values.expand(-1, kblocks)
    elif group_size > BLOCK_K:  # every record carries the group it lies in
        values = values[:, :, None].expand(-1, -1, group_size // BLOCK_K).reshape(values.shape[0], -1)[:, :kblocks]
    padded = values.new_zeros(strips * STRIP_ROWS, kblocks * rows)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.view(strips, STRIP_ROWS, kblocks, rows).permute(0, 2, 3, 1)


def unpack_field(field: torch.Tensor, n: int, k: int, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Scales, offsets or zero points of runs of strips that hold n rows each -> contiguous [..., n, groups] of `dtype`.

    Args:
        field: their part of the records, uint8 [..., strips, kblocks, bytes].
    """
    *lead, strips, kblocks, _ = field.shape
    values = field.view(bits_dtype(dtype)).view(*lead, strips, kblocks, -1, STRIP_ROWS)
    values = values.movedim(-1, -3).reshape(*lead, strips * STRIP_ROWS, -1)
    if group_size > BLOCK_K:
        values = values[..., :: group_size // BLOCK_K]
    groups = ceil_div(k, group_size) if group_size else 1
    return values[..., :n, :groups].contiguous().view(dtype)


# --- records ----------------------------------------------------------------------------------------------------------


def pack_records(
    blocks: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None,
    zero: torch.Tensor | None, *, k: int, canonical: bool, format: WeightFormat,
    exponents: torch.Tensor | None = None, inner_scales: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Codes, scales, offsets, zero points -> blocks.

    Args:
        blocks: uint8 [ceil(n / 64), ceil(k / 128), format.record_bytes], written.
        q: [n, k] one value each, or uint8 [n, k / 2] when canonical; int8 or float8_e4m3fn [n, k] of 8-bit formats.
        scale: [n, groups] in the format's scale type; not read per channel.
        offset: [n, groups] in the format's scale type, or None.
        zero: uint8 [n, groups], or None.
        exponents: uint8 [n, ceil(k / 32)] of formats with exponents.
        inner_scales: uint8 [n, k / 16] of formats with such.
        factors: uint8 [n, ceil(k / 128), 2] of formats with such, each with its product with the zero point.

    Padding: rows of n and values of k that the weight does not have hold code, scale, offset and zero point 0.
    """
    n = q.shape[0]
    kblocks = kblocks_of(k)
    for first, end in strip_chunks(n, k):
        strips = end - first
        rows = slice(first * STRIP_ROWS, min(end * STRIP_ROWS, n))
        part = q[rows] if q.dtype == torch.uint8 else q[rows].view(torch.int8)
        # A copy even where nothing is padded: it makes the rows contiguous and aligned to words.
        codes = part.new_zeros(strips * STRIP_ROWS, kblocks * BLOCK_K)
        if canonical:
            even, odd = split_canonical(part, CODE_BYTES[format.code].given(format.zero_point) == torch.uint8)
            pairs = codes.view(even.dtype).view(strips * STRIP_ROWS, -1, 2)
            pairs[: part.shape[0], : k // 2, 0] = even
            pairs[: part.shape[0], : k // 2, 1] = odd
        else:
            codes[: part.shape[0], :k] = part
        blocks[first:end].view(torch.int32)[:, :, : format.scales_at // 4] = _encode(codes, format)
        for values, start, stop in (
            (scale if format.group_size else None, format.scales_at, format.offsets_at),
            (offset, format.offsets_at, format.zeros_at),
            (zero, format.zeros_at, format.record_bytes),
        ):
            if values is not None:
                bits = values[rows].view(bits_dtype(values.dtype))
                field = blocks[first:end, :, start:stop].view(bits.dtype).view(strips, kblocks, -1, STRIP_ROWS)
                field.copy_(_encode_rows(bits, strips, kblocks, field.shape[2], format.group_size))
        if exponents is not None:
            padded = exponents.new_zeros(strips * STRIP_ROWS, kblocks * (BLOCK_K // EXPONENT_GROUP))
            padded[: part.shape[0], : exponents.shape[1]] = exponents[rows]
            _exponents_of(blocks[first:end], format).copy_(e2m1.to_words(padded))
        if inner_scales is not None:
            padded = inner_scales.new_zeros(strips * STRIP_ROWS, kblocks * (BLOCK_K // SCALE_GROUP))
            padded[: part.shape[0], : inner_scales.shape[1]] = inner_scales[rows]
            blocks[first:end, :, format.zeros_at :] = terms.to_bytes(padded)
        if factors is not None:
            padded = factors.new_zeros(strips * STRIP_ROWS, kblocks, 2)
            padded[: part.shape[0]] = factors[rows]
            blocks[first:end, :, format.zeros_at :] = levels.to_bytes(padded)


def _exponents_of(blocks: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """The words of exponents of blocks [..., record_bytes], a view."""
    return blocks[..., format.zeros_at : format.record_bytes].view(torch.int32)


def unpack_exponents(blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> torch.Tensor:
    """Records of a run of strips that holds n rows -> exponents uint8 [n, ceil(k / 32)]; all 2^0's where each group has a
    scale of its own."""
    groups = ceil_div(k, EXPONENT_GROUP)
    if not format.exponents:
        return torch.full((n, groups), e2m1.ONE, dtype=torch.uint8, device=blocks.device)
    return e2m1.from_words(_exponents_of(blocks, format))[:n, :groups]


def unpack_inner_scales(blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> torch.Tensor:
    """Records of a run of strips that holds n rows -> inner scales float8_e4m3fn [n, k / 16]."""
    scales = terms.from_bytes(blocks[..., format.zeros_at :])[:n, : ceil_div(k, SCALE_GROUP)]
    scales = terms.of_near(scales) if format.near else scales
    return scales.contiguous().view(torch.float8_e4m3fn)


def unpack_factors(blocks: torch.Tensor, n: int, format: WeightFormat) -> torch.Tensor:
    """Records of a run of strips that holds n rows -> factors and their products with zero points, uint8 [n, groups, 2]."""
    return levels.from_bytes(blocks[..., format.zeros_at :])[:n]


def regrouped(
    blocks: torch.Tensor, channel_scale: torch.Tensor | None, old: WeightFormat, new: WeightFormat
) -> torch.Tensor:
    """Blocks of e2m1 [..., strips, kblocks, record_bytes] with a scale for fewer k, by exponents of the old format.

    Args:
        channel_scale: [..., 64 * strips] of an old format per channel, else None.
        new: a format of a smaller group size.
    """
    wide = blocks.new_empty(*blocks.shape[:-1], new.record_bytes)
    wide[..., : new.scales_at] = blocks[..., : old.scales_at]
    *lead, strips, kblocks, _ = blocks.shape
    if channel_scale is None:
        base = blocks[..., old.scales_at : old.offsets_at].view(torch.bfloat16)
    else:
        base = channel_scale.view(*lead, strips, 1, STRIP_ROWS).expand(*lead, strips, kblocks, STRIP_ROWS)
    scales = wide[..., new.scales_at : new.offsets_at].view(torch.bfloat16)
    if new.exponents:
        scales.copy_(base)
        _exponents_of(wide, new).copy_(_exponents_of(blocks, old))
        return wide
    exponents = e2m1.from_words(_exponents_of(blocks, old).reshape(-1, kblocks, STRIP_ROWS // 2))
    exponents = exponents.view(*lead, strips, STRIP_ROWS, kblocks, -1).movedim(-3, -1)  # [..., kblocks, groups, 64]
    powers = e2m1.power(e2m1.exponent_of(base.contiguous())[..., None, :] + exponents.to(torch.int32) - e2m1.ONE)
    scales.copy_(powers.flatten(-2))
    return wide


def reorder_codes(blocks: torch.Tensor, code: str, old: str, new: str) -> None:
    """Puts the codes of experts' blocks, without zero points, from one `WeightFormat.order` into another, in place. NVFP4's
    scales go with them, which only the order that holds any can be given.

    Args:
        blocks: uint8 [experts, strips, kblocks, record_bytes].
    """
    orders = CODE_BYTES[code].orders
    for expert in blocks.flatten(1, 2) if old != new else ():
        for part in expert.split(CHUNK_CODES // (STRIP_ROWS * BLOCK_K)):
            words = part.view(torch.int32)[:, None, :_CODE_WORDS]
            words.copy_(encode_codes(decode_codes(words, orders[old]), orders[new]))
            if CODES[code].inner_scales:
                scales = part[:, 4 * _CODE_WORDS :]
                scales.copy_(terms.of_near(scales))


def with_empty_groups(blocks: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """NVFP4's blocks of the order "near", where groups of the scale 0 have codes of 0. Versions before 1.0.0 gave them codes
    as they came and bytes that stand for no scale, in rows that have no other scale."""
    if not blocks.numel() or int(blocks[..., format.zeros_at :].amax()) <= terms.MOST:
        return blocks
    nibbles, mended = CODE_BYTES[format.code].orders[format.order], blocks.clone()
    for part in mended.flatten(0, -2).split(CHUNK_CODES // (STRIP_ROWS * BLOCK_K)):
        words, scales = part.view(torch.int32)[:, None, :_CODE_WORDS], part[:, None, format.zeros_at :]
        codes, bytes = decode_codes(words, nibbles), terms.from_bytes(scales)
        empty = bytes > terms.MOST
        words.copy_(encode_codes(codes.masked_fill_(empty.repeat_interleave(SCALE_GROUP, 1), 0), nibbles))
        scales.copy_(terms.to_bytes(bytes.masked_fill(empty, terms.LEAST)))
    return mended


def unpack_codes(blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> torch.Tensor:
    """Records of a run of strips that holds n rows -> [n, k]: int8, uint8 with zero points, or float8_e4m3fn if the
    format is of these 8 bits. Not chunked."""
    code = CODE_BYTES[format.code]
    if code.dtype is not None:
        rows = swizzle(blocks[:, :, : format.scales_at].unflatten(2, (STRIP_ROWS, BLOCK_K))).transpose(1, 2)
        return rows.flatten(2).flatten(0, 1)[:n, :k].contiguous().view(code.dtype)
    nibbles = code.nibbles(format.order, format.zero_point)
    return decode_codes(blocks.view(torch.int32)[:, :, :_CODE_WORDS], nibbles)[:n, :k]


def pack_channel_scale(scale: torch.Tensor) -> torch.Tensor:
    """Per-channel scales [..., n, 1] -> [..., 64 * strips] of the same type, zero where there is no row of n."""
    *lead, n, _ = scale.shape
    padded = torch.zeros(*lead, strips_of(n) * STRIP_ROWS, dtype=scale.dtype, device=scale.device)
    bits = bits_dtype(scale.dtype)
    padded.view(bits)[..., :n] = scale[..., 0].view(bits)
    return padded


def unpack_channel_scale(padded: torch.Tensor, n: int) -> torch.Tensor:
    """Undo `pack_channel_scale`."""
    bits = padded.view(bits_dtype(padded.dtype))[:n, None].clone()
    return bits.view(padded.dtype)
