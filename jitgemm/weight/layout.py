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

Numbers inside records (`Code.inner`) are in the modules of their codes. In the order for e4m3 the sign of B_b stands in
the next byte so that rotating a word right by four puts B where A was. e4m3 decodes sign and magnitude fastest; one's
complement has a -8.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.weight.codes import CODE_OPS, Nibbles

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
    code = CODE_OPS[format.code]
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
    zero: torch.Tensor | None, *, k: int, canonical: bool, format: WeightFormat, inner: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Codes, scales, offsets, zero points -> blocks.

    Args:
        blocks: uint8 [ceil(n / 64), ceil(k / 128), format.record_bytes], written.
        q: [n, k] one value each, or uint8 [n, k / 2] when canonical; int8 or float8_e4m3fn [n, k] of 8-bit formats.
        scale: [n, groups] in the format's scale type; not read per channel.
        offset: [n, groups] in the format's scale type, or None.
        zero: uint8 [n, groups], or None.
        inner: uint8 [n, ceil(k / group), ...] of formats with numbers inside records, as their `CodeOps` takes them.

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
            even, odd = split_canonical(part, CODE_OPS[format.code].given(format.zero_point) == torch.uint8)
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
        if inner is not None:
            groups = kblocks * BLOCK_K // format.inner.group  # type: ignore[union-attr]
            padded = inner.new_zeros(strips * STRIP_ROWS, groups, *inner.shape[2:])
            padded[: part.shape[0], : inner.shape[1]] = inner[rows]
            blocks[first:end, :, format.zeros_at :] = CODE_OPS[format.code].to_bytes(padded)


def reorder_codes(blocks: torch.Tensor, code: str, old: str, new: str) -> None:
    """Puts the codes of experts' blocks, without zero points, from one `WeightFormat.order` into another, in place.
    Numbers inside records go with them, which only the order that holds any can be given.

    Args:
        blocks: uint8 [experts, strips, kblocks, record_bytes].
    """
    ops = CODE_OPS[code]
    for expert in blocks.flatten(1, 2) if old != new else ():
        for part in expert.split(CHUNK_CODES // (STRIP_ROWS * BLOCK_K)):
            words = part.view(torch.int32)[:, None, :_CODE_WORDS]
            words.copy_(encode_codes(decode_codes(words, ops.orders[old]), ops.orders[new]))
            ops.reordered(part[:, 4 * _CODE_WORDS :])


def unpack_codes(blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> torch.Tensor:
    """Records of a run of strips that holds n rows -> [n, k]: int8, uint8 with zero points, or float8_e4m3fn if the
    format is of these 8 bits. Not chunked."""
    code = CODE_OPS[format.code]
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
