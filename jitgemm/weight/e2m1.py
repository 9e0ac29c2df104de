"""MXFP4's numbers: values of e2m1 codes, powers of two in bf16, and which scales a packed weight has of them.

OCP Microscaling Formats (MX) Specification 1.0: an e2m1 code is a sign, two bits of exponent and one of mantissa; 32
along k share a scale e8m0, a byte s that stands for 2^(s - 127), or NaN for 255.

A code times 2^e is an e4m3 exactly for the fifteen e from -8 to 6: of 0.5 to 6, the least then is 2^-9, e4m3's least
subnormal, and the largest is 384. So groups whose scales are within a factor of 2^14 can share one, a base, in steps of
which their products with codes are e4m3s; a record holds each group's exponent t = e + 8. Groups of zeros fit any base.

    base          2^(largest scale - 6), so that the largest values are among e4m3's largest
    group         codes * 2^(t - 8) * base,    t = 0..14
"""

from __future__ import annotations

import torch

from jitgemm.kernel.codes import CODES, EXPONENT_GROUP
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, ceil_div

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the low three bits of a code; the fourth is the sign."""
ONE = 8
"""The exponent t of 2^0."""
LARGEST = CODES["e2m1"].exponents - 1
"""The largest exponent t."""
BIAS = 127
"""s of 2^0."""
NAN = 255


def _table(device: torch.device) -> torch.Tensor:
    """Bytes of e4m3, by t * 16 + code. Not kept: a tracer's would be no tensor to others."""
    magnitudes = torch.tensor(MAGNITUDES)
    codes = torch.cat((magnitudes, -magnitudes))
    powers = torch.arange(LARGEST + 1.0).sub(ONE).exp2()
    return (powers[:, None] * codes).to(torch.float8_e4m3fn).view(torch.uint8).flatten().to(device)


def values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, k] times 2^(t - 8), exponents t uint8 [rows, ceil(k / 32)] -> float8_e4m3fn [rows, k]."""
    index = exponents.repeat_interleave(EXPONENT_GROUP, 1)[:, : codes.shape[1]].to(torch.int32) << 4 | codes
    return _table(codes.device).index_select(0, index.flatten()).view(codes.shape).view(torch.float8_e4m3fn)


def dequantized(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, k] -> their values, fp32."""
    exponents = torch.full((codes.shape[0], ceil_div(codes.shape[1], EXPONENT_GROUP)), ONE, dtype=torch.uint8)
    return values(codes, exponents.to(codes.device)).float()


# ---- powers of two in bf16: from 2^-133, its least subnormal, on -------------------------------------------------------


def power(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponent as bf16, of integers up to 127; 0 below -133."""
    exponents = exponents.to(torch.int32)
    subnormal = torch.ones_like(exponents) << (exponents + 133).clamp(0, 6)
    bits = torch.where(exponents < -126, subnormal, exponents + BIAS << 7)
    return torch.where(exponents < -133, 0, bits).to(torch.int16).view(torch.bfloat16)


def exponent_of(powers: torch.Tensor) -> torch.Tensor:
    """The inverse, int32; of 0 it is -134."""
    bits = powers.view(torch.int16).to(torch.int32)
    subnormal = sum((bits >> i > 0).to(torch.int32) for i in range(7)) - 134
    return torch.where(bits >> 7 > 0, (bits >> 7) - BIAS, subnormal)


# ---- which scales ------------------------------------------------------------------------------------------------------


def nonzero_groups(q: torch.Tensor, k: int, group: int = EXPONENT_GROUP) -> torch.Tensor:
    """Which groups have another value than 0: bool [rows, ceil(k / group)], of codes uint8 [rows, k], or [rows, k / 2]."""
    per = group * q.shape[1] // k
    magnitudes = q & (0x77 if q.shape[1] < k else 0x7)
    padded = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[1] % per))
    return padded.unflatten(1, (-1, per)).amax(-1) > 0


def fits(scales: torch.Tensor, used: torch.Tensor, group_size: int) -> bool:
    """Whether scales uint8 [rows, groups of 32] of groups that are `used` can share a base for each row and group_size
    of k, 0 for all of it."""
    low, high = (_extreme(scales, used, group_size, largest) for largest in (False, True))
    return bool((high - low <= LARGEST).all())


def _extreme(scales: torch.Tensor, used: torch.Tensor, group_size: int, largest: bool) -> torch.Tensor:
    """int16 [rows, groups of group_size]: the least or the largest scale of the used groups, 1's where there are none."""
    unused = -1 if largest else NAN
    found = torch.where(used, scales.to(torch.int16), unused)
    per = group_size // EXPONENT_GROUP or found.shape[1]
    found = torch.nn.functional.pad(found, (0, -found.shape[1] % per), value=unused).unflatten(1, (-1, per))
    found = found.amax(-1) if largest else found.amin(-1)
    return torch.where(found == unused, BIAS + LARGEST - ONE, found)


def of_zeros(scales: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Scales uint8 [rows, groups of 32], those of groups of zeros as small as the row's least, and 2^0 at most: files have
    any there, and times one near 2^127 a large scale of the activations would be infinite."""
    return torch.where(used, scales.to(torch.int16), _extreme(scales, used, 0, False).clamp(max=BIAS)).to(torch.uint8)


def with_bases(scales: torch.Tensor, used: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bases bf16 [rows, groups of group_size], and exponents t uint8 [rows, groups of 32], of scales that fit."""
    top = _extreme(scales, used, group_size, True)
    per = group_size // EXPONENT_GROUP or scales.shape[1]
    tops = top.repeat_interleave(per, 1)[:, : scales.shape[1]]
    exponents = (scales.to(torch.int16) - tops + LARGEST).clamp_(0, LARGEST).to(torch.uint8)
    return power(top - BIAS - (LARGEST - ONE)), exponents


def scale_bytes(bases: torch.Tensor, exponents: torch.Tensor, group_size: int) -> torch.Tensor:
    """The inverse: scales uint8 [rows, groups of 32]. Those of groups of zeros are some that fit the base."""
    per = group_size // EXPONENT_GROUP or exponents.shape[1]
    base = exponent_of(bases).repeat_interleave(per, 1)[:, : exponents.shape[1]]
    return (base + exponents.to(torch.int32) - ONE + BIAS).clamp_(0, NAN - 1).to(torch.uint8)


# ---- a record's exponents: see E2m1Codec in include/jitgemm/gemm/codec.cuh ---------------------------------------------

_STEPS = BLOCK_K // EXPONENT_GROUP


def to_words(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 [64 * strips, 4 * kblocks] -> int32 [strips, kblocks, 32]: a word for rows i and i + 8 of a warp's 16."""
    # strip, warp, half, i, block, step
    parts = exponents.to(torch.int32).view(-1, 4, 2, 8, exponents.shape[1] // _STEPS, _STEPS)
    words = sum(parts[..., step] << (8 * step + 3) for step in range(_STEPS))
    assert isinstance(words, torch.Tensor)
    low, high = words.unbind(2)
    return (low | high << 4 | high >> 28 & 0x7).permute(0, 3, 1, 2).reshape(words.shape[0], -1, STRIP_ROWS // 2)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    strips, kblocks, _ = words.shape
    parts = torch.stack((words, words >> 4 & 0x0FFFFFFF | words << 28), 2).view(strips, kblocks, 2, 4, 8)
    exponents = torch.stack([parts >> (8 * step + 3) & 0xF for step in range(_STEPS)], -1)
    return exponents.permute(0, 3, 2, 4, 1, 5).reshape(strips * STRIP_ROWS, kblocks * _STEPS).to(torch.uint8)
