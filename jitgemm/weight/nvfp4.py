"""NVFP4: its numbers as the sum of two terms that tensor cores multiply, its scales in records, and `pack_nvfp4`.

NVFP4 has e2m1 codes, an e4m3 scale for 16 k and an fp32 one for the tensor. A code times a scale has up to six
significant bits, which no FP8 number holds; two e5m2s do, for every pair::

    code * scale    V * 2^q, V an integer of at most 6 bits: 1 or 3, times a mantissa of at most 15
    high            the upper three bits of V: e5m2 has three
    low             the rest: three again, or 0

e5m2 reaches from 2^-16 to 57344 and the terms from 2^-10 to 2560, so that no base is needed.

Where a row's scales are near one another, they become normal e4m3s next to a base, and so do four of their powers of
two. Every code times a scale is the sum of two of these, which a kernel makes with fewer instructions::

    code * scale    large    0, 1, 2, 4, -1, -2, -4 or -8 times the scale
                    small    0, 0.5, 1 or 2 times the scale

A record has 512 bytes of scales behind its codes, from which a thread takes one vector of 16, those of its two rows::

    scales [warp: 4][row: 8][row or row + 8: 2][group of 16 k: 8]      near: the byte of half a scale over the base
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jitgemm.kernel.codes import CODES, SCALE_GROUP
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, WeightFormat
from jitgemm.tensors import describe
from jitgemm.weight import layout, mxfp4
from jitgemm.weight.codes import E2M1, CodeOps, RowParts, Stored, Unpacked, register
from jitgemm.weight.codes import NEAR as NEAR_CODES
from jitgemm.weight.given import check_finite, check_given, row_chunks
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import check_sizes, expert_indices
from jitgemm.weight.ready import is_captured

NAN = CODES["nvfp4"].inner.most + 1  # type: ignore[union-attr]
"""The byte of the scale that is no number; lower ones are 0 and more."""
_GROUPS = BLOCK_K // SCALE_GROUP


def terms(dtype: torch.dtype = torch.float8_e5m2, base: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low), both of dtype [127, 8]: e4m3 scale (the byte's value) times e2m1's magnitude times 2^-base.

    high is the product with as many significant bits as dtype has, the rest cut off; low is what is left, as near as
    dtype has it. Of e5m2 without a base their sum is the product, always.
    """
    scales = torch.arange(NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    products = scales[:, None] * torch.tensor(mxfp4.MAGNITUDES, dtype=torch.float64) * 2.0**-base
    largest = torch.finfo(dtype).max
    high = upper(products, {torch.float8_e5m2: 3, torch.float8_e4m3fn: 4}[dtype]).clamp(max=largest).to(dtype)
    return high, (products - high.double()).clamp(max=largest).to(dtype)


def upper(products: torch.Tensor, bits: int = 3) -> torch.Tensor:
    """The products' upper bits, fp64: the high terms."""
    mantissa, exponent = torch.frexp(products)
    return torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, k] times scales float8_e4m3fn [rows, ceil(k / 16)] -> bfloat16 [rows, k], exactly."""
    return (
        mxfp4.dequantized(codes).bfloat16() * scales.bfloat16().repeat_interleave(SCALE_GROUP, 1)[:, : codes.shape[1]]
    )


# ---- scales near one another: see Nvfp4NearCodec in include/jitgemm/gemm/codec.cuh -----------------------------------

LARGE = (0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -8.0)
"""By code, times its scale; small is the rest."""
LEAST, MOST = 0x08, 0x5E
"""Bytes of half a scale from which on it is normal, and up to which -8 times the scale is a number: of all of them."""
_OCTAVE = 8
"""Bytes between a normal e4m3 and twice of it."""
_SUBNORMAL = (0, -16, -8, -4, 0, 2, 4, 6)
"""Bytes that the scales 1 to 7, e4m3's subnormals, would have with more exponents; no group of the scale 0 is used."""


def near(scales: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of half the scales times 2^shift, shift of each row) of scales uint8 [rows, groups] of groups that are
    `used`: of any scale but 0, and with codes that are not 0.

    Returns:
        uint8 [rows, groups] and int32 [rows, 1]. A row whose scales are not near one another has the shift `FAR`. Bytes
        of groups that are not used are some that fit.
    """
    subnormal = torch.tensor(_SUBNORMAL, dtype=torch.int16, device=scales.device)
    position = scales.to(torch.int16)
    position = torch.where(position < _OCTAVE, subnormal[position.clamp(max=_OCTAVE - 1).long()], position) - _OCTAVE
    top = torch.where(used, position, -2048).amax(1, keepdim=True)
    least = torch.where(used, position, 2048).amin(1, keepdim=True)
    empty = top < -1024  # a row of zeros
    shift = torch.where(empty, 0, (MOST - top).div(_OCTAVE, rounding_mode="floor")).int()
    shift = torch.where(empty | (least + _OCTAVE * shift >= LEAST), shift, FAR)
    bytes = torch.where(used & (shift != FAR), position + _OCTAVE * shift, LEAST)
    return bytes.to(torch.uint8), shift


FAR = 126
"""The shift of a row whose scales are not near one another."""


def of_near(bytes: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 as `near` gives them -> the scales that codes are multiplied by, uint8."""
    return bytes + _OCTAVE


def large_and_small(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [rows, k] and scales float8_e4m3fn [rows, ceil(k / 16)] -> both terms, fp64 [rows, k]."""
    scale = scales.double().repeat_interleave(SCALE_GROUP, 1)[:, : codes.shape[1]]
    large = torch.tensor(LARGE, dtype=torch.float64, device=codes.device)[codes.int()]
    return large * scale, (mxfp4.dequantized(codes).double() - large) * scale


# ---- records ---------------------------------------------------------------------------------------------------------


def to_bytes(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [64 * strips, 8 * kblocks] -> [strips, kblocks, 512], as they stand in records."""
    # strip, warp, row or row + 8, row, block, group
    parts = scales.view(-1, 4, 2, 8, scales.shape[1] // _GROUPS, _GROUPS)
    return parts.permute(0, 4, 1, 3, 2, 5).flatten(2)


def from_bytes(bytes: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    strips, kblocks, _ = bytes.shape
    parts = bytes.reshape(strips, kblocks, 4, 8, 2, _GROUPS).permute(0, 2, 4, 3, 1, 5)
    return parts.reshape(strips * STRIP_ROWS, kblocks * _GROUPS)


class _Nvfp4(CodeOps):
    """Records hold scales, float8_e4m3fn [rows, groups of 16]; in the order "near" half of their bytes over a base."""

    given_scales = torch.float8_e4m3fn
    row_scales = ("fp32",)
    needs_row_scale = True

    def values(self, q: torch.Tensor) -> torch.Tensor:
        return mxfp4.dequantized(q)

    def no_scales(self, scale: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        return scale >= NAN, "numbers of at least 0", scale.view(torch.float8_e4m3fn)

    def pack(self, weight: Any, lhs_dtype: torch.dtype | None, correction: bool | None) -> W4Weight:
        codes = weight.q[:, 0::2] | weight.q[:, 1::2] << 4
        return pack_nvfp4(codes, weight.scale.view(torch.float8_e4m3fn), weight.row_scale)

    def to_bytes(self, inner: torch.Tensor) -> torch.Tensor:
        return to_bytes(inner)

    def from_bytes(self, bytes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        scales = from_bytes(bytes)
        return (of_near(scales) if format.tuned else scales).contiguous().view(torch.float8_e4m3fn)

    def operands(self, stored: Stored) -> RowParts:
        return RowParts(values(stored.q, stored.inner), *stored[1:4])

    def unpacked(self, stored: Stored, format: WeightFormat) -> Unpacked:
        return Unpacked(stored.q, stored.inner, None, row_scale=stored.scale)

    def summands(self, stored: Stored, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        if format.tuned:
            return large_and_small(stored.q, stored.inner)
        products = values(stored.q, stored.inner).double()
        return upper(products), products - upper(products)

    def reordered(self, inner: torch.Tensor) -> None:
        inner.copy_(of_near(inner))

    def mended(self, blocks: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        """In the order "near" groups of the scale 0 have codes of 0. Versions before 1.0.0 gave them codes as they came
        and bytes that stand for no scale, in rows that have no other scale."""
        if not format.tuned or not blocks.numel() or int(blocks[..., format.zeros_at :].amax()) <= MOST:
            return blocks
        nibbles, mended = self.orders[format.order], blocks.clone()
        for part in mended.flatten(0, -2).split(layout.CHUNK_CODES // (STRIP_ROWS * BLOCK_K)):
            words, scales = part.view(torch.int32)[:, None, : format.scales_at // 4], part[:, None, format.zeros_at :]
            codes, bytes = layout.decode_codes(words, nibbles), from_bytes(scales)
            empty = bytes > MOST
            codes.masked_fill_(empty.repeat_interleave(SCALE_GROUP, 1), 0)
            words.copy_(layout.encode_codes(codes, nibbles))
            scales.copy_(to_bytes(bytes.masked_fill(empty, LEAST)))
        return mended

    def words(self, format: WeightFormat, group_size: int) -> tuple[str, str, str]:
        return "nvfp4", "e2m1", format.tier

    def layer_words(self, format: WeightFormat, group_size: int) -> tuple[list[str], list[str]]:
        return [], [f"nvfp4 with {format.tier}"]


register(_Nvfp4("nvfp4", orders={"nvfp4": E2M1, "near": NEAR_CODES}))

# ---- packing ---------------------------------------------------------------------------------------------------------

FORMAT = WeightFormat(0, False, "fp32", "nvfp4", code="nvfp4")
"""Of any scales."""
NEAR = replace(FORMAT, order="near")
"""Of rows whose scales are near one another."""
_TYPES = {
    "codes": (torch.uint8, torch.int8, torch.float4_e2m1fn_x2),
    "scales": (torch.float8_e4m3fn,),
    "global_scale": (torch.float32,),
}


def pack_nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> W4Weight:
    """Pack an NVFP4 weight, or one of E experts, into the kernel's order, once, on the device where it is.

    Weight (row, column) is e2m1(code) * scale * global_scale, with the scale of its 16 columns::

        code   bit 3: sign   bits 2 to 0: 0, 0.5, 1, 1.5, 2, 3, 4, 6      byte i of a row: code 2i     bits 0 to 3
        scale  e4m3                                                                        code 2i + 1 bits 4 to 7

    Nothing is rounded: kernels multiply by two FP8 numbers, whose sum code * scale is, and by global_scale in fp32
    behind the sums. 4.5 bits a weight, and twice the multiplies of other 4-bit weights. Where the largest scale of each
    row is less than 2^10 times its least, groups of zeros left out, the two are e4m3s next to a power of two of the
    row, which kernels decode faster; else they are e5m2s. `repr` shows which.

    Args:
        codes: uint8, int8 or float4_e2m1fn_x2 [n, k / 2], two a byte, the even k in the low nibble; n a multiple of 8,
            k of 16. With a first dimension E for experts.
        scales: float8_e4m3fn [n, k / 16], of at least 0. Those of rows far below the tensor's largest value are 0 in
            files, and their codes may be any.
        global_scale: fp32, finite, one element, or [n] for each row, as joined layers have them; of experts one
            element, [E] or [E, n]. ModelOpt's `weight_scale_2`; of compressed-tensors 1 / `weight_global_scale`.

    Returns:
        The packed weight on codes' device, for e4m3 activations. The CPU and the GPU give the same bytes. Its `unpack`
        gives codes, scales and the global scale of each row back: e5m2s bit for bit, e4m3s 0 for -0 and for codes
        whose scale is 0, and a power of two may have moved from a row's scales to its global scale. On a GPU the
        current stream is synchronised.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype or layout.
        ValueError: wrong shape or device, a scale that is negative, NaN or infinite, values missing (meta tensors), a
            CUDA graph is captured, in which no scale can be looked at.
    """
    tensors = {"codes": codes, "scales": scales, "global_scale": global_scale}
    check_given({name: (tensor, _TYPES[name]) for name, tensor in tensors.items()}, "k / 2")
    *lead, n, half = codes.shape
    k = 2 * half
    check_sizes(n, k, "codes")
    if tuple(scales.shape) != (*lead, n, k // SCALE_GROUP):
        raise ValueError(f"scales: expected shape {[*lead, n, k // SCALE_GROUP]}, got {list(scales.shape)}")
    if is_captured(codes):
        raise ValueError("scales: expected to look at them, got a CUDA graph's capture; pack before it")
    with torch.inference_mode(False), torch.no_grad():
        q, s = codes.view(torch.uint8), scales.view(torch.uint8)
        indices = [*expert_indices(lead[0] if lead else None)]
        for e in indices:
            wrong = (s[e] >= NAN).nonzero()
            if len(wrong):
                row, group = wrong[0].tolist()
                name, got = f"scales[{e}]" if lead else "scales", float(scales[e][row, group])
                raise ValueError(f"{name}: expected numbers of at least 0, got {got} at {[row, group]}")
        check_finite("global_scale", global_scale)
        rows = _of_rows(global_scale, lead, n)
        inner, shifts = torch.empty_like(s), torch.empty((*lead, n, 1), dtype=torch.int32, device=s.device)
        for e in indices:
            for first, end in row_chunks(n, k):
                used = mxfp4.nonzero_groups(q[e][first:end], k, SCALE_GROUP) & (s[e][first:end] > 0)
                inner[e][first:end], shifts[e][first:end] = near(s[e][first:end], used)
        moved = rows * mxfp4.power(-shifts).float()
        normal = (moved.abs() >= torch.finfo(torch.float32).tiny) & moved.isfinite() | (rows == 0)
        if bool(((shifts != FAR) & normal).all()):
            format, rows = NEAR, moved
        else:
            format, inner = FORMAT, s
        shape = (*lead, layout.strips_of(n), layout.kblocks_of(k), format.record_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=q.device)
        for e in indices:
            codes_of = q[e]
            if format.tuned and bool((empty := s[e] == 0).any()):  # there is no byte of half of 0: codes say so
                codes_of = codes_of.masked_fill(empty.repeat_interleave(SCALE_GROUP // 2, 1), 0)
            layout.pack_records(
                blocks[e], codes_of, s[e], None, None, k=k, canonical=True, format=format, inner=inner[e]
            )
        return W4Weight(blocks, layout.pack_channel_scale(rows), n, k, k, format)


def _of_rows(global_scale: torch.Tensor, lead: list[int], n: int) -> torch.Tensor:
    """[..., n, 1]."""
    shape = tuple(global_scale.shape)
    if global_scale.numel() == 1:
        return global_scale.reshape(1).expand(*lead, n, 1)
    if lead and shape in ((*lead,), (*lead, 1)):
        return global_scale.reshape(*lead, 1, 1).expand(*lead, n, 1)
    if shape not in ((*lead, n), (*lead, n, 1)):
        expected = f"one element{f', [{lead[0]}]' if lead else ''} or {[*lead, n]}"
        raise ValueError(f"global_scale: expected {expected}, got {describe(global_scale)}")
    return global_scale.reshape(*lead, n, 1)
