"""The bytes and numbers of a weight's codes: the twin of `jitgemm.kernel.codes`, under the same names.

Where a word stands in a record is `layout.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Words = torch.Tensor
"""int32, contiguous: four codes each, one a byte."""

_SIGNS = 0x80808080 - (1 << 32)  # as an int32
_ONES = 0x01010101
_LOW3 = 0x07070707
_LOW4 = 0x0F0F0F0F
_BIT3 = 0x08080808


@dataclass(frozen=True)
class Nibbles:
    """An order of 4-bit codes: two words of four codes each to one word and back.

    Attributes:
        dtype: of codes, one value each: int8 in two's complement, or uint8.
        low, high: the codes that it holds.
        join: words A and B to a word.
        split: the inverse.
    """

    dtype: torch.dtype
    low: int
    high: int
    join: Callable[[Words, Words], torch.Tensor]
    split: Callable[[Words], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CodeBytes:
    """What a code's bytes are.

    Attributes:
        dtype: of 8-bit codes, which stand in records as they are; None for 4-bit ones.
        orders: by the names of `Code.orders`.
        zero_orders: the same of codes with zero points.
    """

    dtype: torch.dtype | None = None
    orders: Mapping[str, Nibbles] = field(default_factory=dict)
    zero_orders: Mapping[str, Nibbles] = field(default_factory=dict)

    def given(self, zero_point: bool) -> torch.dtype:
        """The dtype of codes, one value each."""
        if zero_point:
            return torch.uint8
        return next((order.dtype for order in self.orders.values()), torch.uint8) if self.dtype is None else self.dtype

    def nibbles(self, order: str, zero_point: bool) -> Nibbles:
        return (self.zero_orders if zero_point else self.orders)[order]


def _masks(words: Words) -> torch.Tensor:
    """0xFF in every byte whose top bit is set, 0 in the others."""
    signs = words & _SIGNS
    return (signs - ((signs >> 7) & _ONES)) | signs


def _as_int8(words: Words, apply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return apply(words.view(torch.int8)).view(torch.int32)


def _join(a: Words, b: Words) -> torch.Tensor:
    return (a & _LOW4) | ((b & _LOW4) << 4)


def _split(words: Words) -> tuple[torch.Tensor, torch.Tensor]:
    return words & _LOW4, (words >> 4) & _LOW4


def _to_complement(words: Words) -> torch.Tensor:
    """v << 1 | s in every byte: the sign, and the low three bits of d, or of ~d where it is negative."""
    return ((words & _LOW3) << 1) ^ _masks(words)


def _from_complement(words: Words) -> torch.Tensor:
    return _as_int8(words ^ (words & _ONES) * 0xFF, lambda codes: codes >> 1)


def _to_magnitude(words: Words) -> torch.Tensor:
    """Bit 7 the sign, bits 0 to 2 the magnitude."""
    return (_as_int8(words, torch.abs) & _LOW3) | (words & _SIGNS)


def _from_magnitude(words: Words) -> torch.Tensor:
    masks = _masks(words)  # minus the magnitude is its complement plus one
    return ((words & _LOW3) ^ masks).view(torch.int8).sub(masks.view(torch.int8)).view(torch.int32)


def _rotated(words: Words) -> torch.Tensor:
    """To the left by four bits."""
    return (words << 4) | ((words >> 28) & 0xF)


def _both(apply: Callable[[Words], torch.Tensor], words: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = words
    return apply(a), apply(b)


UNSIGNED = Nibbles(torch.uint8, 0, 15, _join, _split)
COMPLEMENT = Nibbles(
    torch.int8, -8, 7,
    lambda a, b: _join(_to_complement(a), _to_complement(b)),
    lambda words: _both(_from_complement, _split(words)),
)  # fmt: skip
MAGNITUDE = Nibbles(
    torch.int8, -7, 7,
    lambda a, b: _to_magnitude(a) | _rotated(_to_magnitude(b)),
    lambda words: _both(_from_magnitude, (words, ((words >> 4) & 0x0FFFFFFF) | (words << 28))),
)  # fmt: skip
TWOS_COMPLEMENT = Nibbles(
    torch.int8, -8, 7,
    lambda a, b: _join(b, a),
    lambda words: _both(lambda each: _as_int8(each, lambda codes: (codes << 4) >> 4), _split(words)[::-1]),
)  # fmt: skip


def _join_tables(a: Words, b: Words) -> torch.Tensor:
    """Magnitudes in the order of prmt's selectors, A's in the low half; signs of A at bit 7 of bytes, of B at bit 3."""
    low, high = (_gathered(words & _LOW3) for words in (a, b))
    return low | high << 16 | (a & _BIT3) << 4 | b & _BIT3


def _split_tables(words: Words) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = (_spread(half & 0x7777) for half in (words, words >> 16))
    return low | words >> 4 & _BIT3, high | words & _BIT3


def _gathered(bytes: Words) -> torch.Tensor:
    """The low nibbles of the four bytes in the low 16 bits."""
    pairs = (bytes | bytes >> 4) & 0x00FF00FF
    return (pairs | pairs >> 8) & 0xFFFF


def _spread(nibbles: Words) -> torch.Tensor:
    pairs = (nibbles | nibbles << 8) & 0x00FF00FF
    return (pairs | pairs << 4) & _LOW4


E2M1 = Nibbles(torch.uint8, 0, 15, _join_tables, _split_tables)


def _join_near(a: Words, b: Words) -> torch.Tensor:
    """Selectors of both terms: bits 1 and 0 the powers of two, bit 2 the sign, bit 3 whether small is 0."""
    low, high = (_gathered(_to_near(words)) for words in (a, b))
    return low | high << 16


def _split_near(words: Words) -> tuple[torch.Tensor, torch.Tensor]:
    return _both(lambda half: _from_near(_spread(half & 0xFFFF)), (words, words >> 16))


def _to_near(codes: Words) -> torch.Tensor:
    magnitude = codes & _LOW3
    negative = (magnitude + _LOW3 & codes) >> 3 & _ONES  # except for 0
    rank = magnitude - negative
    return rank >> 1 & 0x03030303 | negative << 2 | ((rank ^ negative ^ _ONES) & _ONES) << 3


def _from_near(nibbles: Words) -> torch.Tensor:
    negative = nibbles >> 2 & _ONES
    rank = (nibbles & 0x03030303) << 1 | (nibbles >> 3 ^ negative ^ _ONES) & _ONES
    return rank + negative | negative << 3


NEAR = Nibbles(torch.uint8, 0, 15, _join_near, _split_near)
"""Of -0, code 8, it makes 0."""

CODE_BYTES: dict[str, CodeBytes] = {
    "int4": CodeBytes(
        orders={"any": COMPLEMENT, "e4m3": MAGNITUDE, "s8": TWOS_COMPLEMENT}, zero_orders={"any": UNSIGNED}
    ),
    "e4m3": CodeBytes(torch.float8_e4m3fn),
    "int8": CodeBytes(torch.int8),
    "e2m1": CodeBytes(orders={"e2m1": E2M1}),
    "nvfp4": CodeBytes(orders={"nvfp4": E2M1, "near": NEAR}),
    "two_level": CodeBytes(orders={"two_level": UNSIGNED}),
}
"""By `Code.name`."""
