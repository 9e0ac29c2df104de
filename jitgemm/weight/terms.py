"""NVFP4's numbers as the sum of two terms that tensor cores multiply, and its scales in records.

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

import torch

from jitgemm.kernel.codes import CODES, SCALE_GROUP
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS
from jitgemm.weight import e2m1

NAN = CODES["nvfp4"].inner_scales
"""The byte of the scale that is no number; lower ones are 0 and more."""
_GROUPS = BLOCK_K // SCALE_GROUP


def terms(dtype: torch.dtype = torch.float8_e5m2, base: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low), both of dtype [127, 8]: e4m3 scale (the byte's value) times e2m1's magnitude times 2^-base.

    high is the product with as many significant bits as dtype has, the rest cut off; low is what is left, as near as
    dtype has it. Of e5m2 without a base their sum is the product, always.
    """
    scales = torch.arange(NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    products = scales[:, None] * torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64) * 2.0**-base
    largest = torch.finfo(dtype).max
    high = upper(products, {torch.float8_e5m2: 3, torch.float8_e4m3fn: 4}[dtype]).clamp(max=largest).to(dtype)
    return high, (products - high.double()).clamp(max=largest).to(dtype)


def upper(products: torch.Tensor, bits: int = 3) -> torch.Tensor:
    """The products' upper bits, the rest cut off: of fp64, the high terms."""
    mantissa, exponent = torch.frexp(products)
    return torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, k] times scales float8_e4m3fn [rows, ceil(k / 16)] -> bfloat16 [rows, k], exactly."""
    return e2m1.dequantized(codes).bfloat16() * scales.bfloat16().repeat_interleave(SCALE_GROUP, 1)[:, : codes.shape[1]]


# ---- scales near one another: see Nvfp4NearCodec in include/jitgemm/gemm/codec.cuh -------------------------------------

LARGE = (0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -8.0)
"""By code, times its scale; small is the rest."""
LEAST, MOST = 0x08, 0x5E
"""Bytes of half a scale from which on it is normal, and up to which -8 times the scale is a number: of all of them."""
_OCTAVE = 8
"""Bytes between a normal e4m3 and twice of it."""
_SUBNORMAL = (0, -16, -8, -4, 0, 2, 4, 6)
"""Bytes that the scales 1 to 7, e4m3's subnormals, would have with more exponents; no group of the scale 0 is used."""


def near(scales: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of half the scales times 2^shift, shift of each row) of scales uint8 [rows, groups] of groups that are `used`:
    of any scale but 0, and with codes that are not 0.

    Returns:
        uint8 [rows, groups] and int32 [rows, 1]. A row whose scales are not near one another has the shift `FAR`. Bytes of
        groups that are not used are some that fit.
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
    return large * scale, (e2m1.dequantized(codes).double() - large) * scale


# ---- records -----------------------------------------------------------------------------------------------------------


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
