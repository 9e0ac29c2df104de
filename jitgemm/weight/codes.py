"""What a code needs of torch: `CodeOps`, the twin of `jitgemm.kernel.codes` under the same names, and its nibbles.

Where a word stands in a record is `layout.py`'s business. Packing registers int4 and bytes (`pack.py`); `mxfp4.py`,
`nvfp4.py` and `two_level.py` each register their code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from jitgemm.kernel.codes import CODES, typed_code
from jitgemm.kernel.formats import WeightFormat, ceil_div

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


class RowParts(NamedTuple):
    """What tensor cores multiply of some rows: (q - zero) * scale + offset is the weight.

    ::

        code               q                                                   scale
        int4, int8, e4m3   codes, as they were packed                          of the groups
        MXFP4              codes * 2^exponent of 32 k, float8_e4m3fn           of the groups, or bases; bf16
        NVFP4              codes * scales of 16 k, bfloat16                    of the rows, [rows, 1]
        two levels         (codes - zeros) * factors of 128 k, int8            of the rows, [rows, 1]

    Attributes:
        q: [rows, k].
        scale: [rows, groups].
        zero: uint8 [rows, groups], or None.
        offset: [rows, groups] in scale's type, or None.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    offset: torch.Tensor | None


class Stored(NamedTuple):
    """What records hold of some rows: `RowParts`, but with q [rows, k] codes; and `inner`, as `CodeOps` has it."""

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    offset: torch.Tensor | None
    inner: Any = None


class _Three(NamedTuple):
    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


class Unpacked(_Three):
    """A weight as it was packed, bit for bit: value(q), minus zero, times scale and row_scale, plus offset.

    A tuple of q, scale and zero, with two more attributes. All have a first dimension E where there are experts.

    Attributes:
        q: [n, k], int8 of -8..7, or uint8 of 0..15 with zero points; of 8 bits int8 or float8_e4m3fn. Of MXFP4 and
            NVFP4 uint8, e2m1 codes.
        scale: [n, groups] in its own type. MXFP4's are float8_e8m0fnu, for 32 k; NVFP4's float8_e4m3fn, for 16 k; in
            two levels they are the groups' factors, uint8, for 128 k.
        zero: uint8 [n, groups], or None.
        offset: [n, groups] in scale's type, or None.
        row_scale: [n, 1], or None: NVFP4's global scale, fp32; in two levels the channels' scales, in their own type.
    """

    offset: torch.Tensor | None
    row_scale: torch.Tensor | None

    def __new__(
        cls, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, offset: torch.Tensor | None = None,
        row_scale: torch.Tensor | None = None,
    ) -> Unpacked:  # fmt: skip
        made = super().__new__(cls, q, scale, zero)
        made.offset, made.row_scale = offset, row_scale
        return made

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """All five."""
        return *self, self.offset, self.row_scale


@dataclass(frozen=True)
class CodeOps:
    """What a code needs of torch; one instance a code, in `CODE_OPS`. Subclasses say what differs from integers that
    records hold without anything inside.

    Attributes:
        name: the `Code`'s.
        dtype: of 8-bit codes, which stand in records as they are; None for 4-bit ones.
        orders: by the names of `Code.orders`.
        zero_orders: the same of codes with zero points.
        given_scales: the type of scales that a weight is packed from, where it is none of `REAL_TYPES`. Before packing
            those are held as bytes, uint8, as PyTorch neither joins nor indexes 8-bit floats everywhere.
        row_scales: types of scales of rows that a weight before packing can have next to those of groups.
        needs_row_scale: it has one, by which code * scale is multiplied.
        f16_factor, f16_unit: with sums in f16, what a record's sums are multiplied by on their way to a run, and how
            large the steps of a run are, of a row's power of two.
    """

    name: str
    dtype: torch.dtype | None = None
    orders: Mapping[str, Nibbles] = field(default_factory=dict)
    zero_orders: Mapping[str, Nibbles] = field(default_factory=dict)

    given_scales: ClassVar[torch.dtype | None] = None
    row_scales: ClassVar[tuple[str, ...]] = ()
    needs_row_scale: ClassVar[bool] = False
    f16_factor: ClassVar[float] = 1.0
    f16_unit: ClassVar[float] = 1.0

    def given(self, zero_point: bool) -> torch.dtype:
        """The dtype of codes, one value each."""
        if zero_point:
            return torch.uint8
        return next((order.dtype for order in self.orders.values()), torch.uint8) if self.dtype is None else self.dtype

    def nibbles(self, order: str, zero_point: bool) -> Nibbles:
        return (self.zero_orders if zero_point else self.orders)[order]

    # ---- before packing; `weight` is a `CanonicalWeight` -------------------------------------------------------------

    def values(self, q: torch.Tensor) -> torch.Tensor:
        """The values of codes, fp32."""
        return q.float()

    def no_scales(self, scale: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        """(bool: which scales are invalid, what is expected instead, the numbers for the message)."""
        return ~scale.isfinite(), "finite numbers", scale

    def pack(self, weight: Any, lhs_dtype: torch.dtype | None, correction: bool | None) -> Any:
        """The packed weight, without the permutation; as `CanonicalWeight.pack`."""
        raise NotImplementedError

    def before_packing(self, weight: Any) -> dict[str, Any]:
        """Arguments of `CanonicalWeight` for what a dense packed weight was before packing."""
        unpacked: Unpacked = weight.unpack()
        scale = unpacked.scale if self.given_scales is None else unpacked.scale.view(torch.uint8)
        inner = CODES[self.name].inner
        group_size = weight.group_size if inner is None else inner.group
        rows = None if unpacked.row_scale is None else unpacked.row_scale.flatten()
        parts = dict(q=unpacked.q, scale=scale, zero=unpacked.zero, offset=unpacked.offset, row_scale=rows)
        return parts | dict(group_size=group_size, permutation=weight.permutation, code=self.name)

    # ---- records -----------------------------------------------------------------------------------------------------

    def to_bytes(self, inner: torch.Tensor) -> torch.Tensor:
        """Packs numbers inside records, [64 * strips, groups, ...], to uint8 [strips, kblocks, bytes]."""
        raise NotImplementedError

    def from_bytes(self, bytes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        """The inverse."""
        raise NotImplementedError

    def inner(self, blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> torch.Tensor | None:
        """The numbers inside records of strips that hold n rows, [n, groups, ...]; None if the code has none."""
        if format.inner is None:
            return None
        bytes = blocks[..., format.zeros_at : format.record_bytes]
        return self.from_bytes(bytes, format)[:n, : ceil_div(k, format.inner.group)]

    def operands(self, stored: Stored) -> RowParts:
        return RowParts(*stored[:4])

    def unpacked(self, stored: Stored, format: WeightFormat) -> Unpacked:
        return Unpacked(*stored[:4])

    def summands(self, stored: Stored, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        """The terms that tensor cores multiply if a code is a sum, fp64 [rows, k] each; empty if `operands`' q is."""
        return ()

    def reordered(self, inner: torch.Tensor) -> None:
        """Reorders the bytes of numbers inside records, in place, into the order that holds any numbers."""

    def mended(self, blocks: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        """The blocks with what earlier versions wrote wrong repaired; the same object if nothing is wrong."""
        return blocks

    def f16_holds(self, packed: Any) -> torch.Tensor | bool:
        """bool [n], or one bool for all rows: whether f16 holds the rows' operands and the sums of their records."""
        return True

    # ---- formats that values decide ----------------------------------------------------------------------------------

    def common_group(self, group_size: int, other: int) -> int:
        """The group size at which this weight can be stacked with one of another size; its own if it cannot change."""
        return group_size

    def regrouped(
        self, blocks: torch.Tensor, channel_scale: torch.Tensor | None, old: WeightFormat, new: WeightFormat
    ) -> torch.Tensor:
        """Blocks [..., strips, kblocks, record_bytes] with a scale for fewer k; channel_scale: [..., 64 * strips], of
        an old format per channel."""
        raise NotImplementedError

    # ---- words -------------------------------------------------------------------------------------------------------

    def words(self, format: WeightFormat, group_size: int) -> tuple[str, str, str]:
        """Groups, codes and scales for people."""
        codes = "unsigned with zero points" if format.zero_point else "signed"
        if format.tuned:
            codes += f" for {typed_code(*format.lhs_types)}"
        reals = f"{format.scale_type} scales" + (" and offsets" if format.offset else "")
        reals += f", corrected in {format.correction}" if format.correction else ""
        return f"group_size={group_size}" if format.group_size else "per channel", codes, reals

    def layer_words(self, format: WeightFormat, group_size: int) -> tuple[list[str], list[str]]:
        """The same in a layer's `extra_repr`, before and behind what else it says."""
        group = f"group_size={group_size}" if format.group_size else "per channel"
        zeros = ["zero points"] if format.zero_point else []
        zeros += [f"corrected in {format.correction}"] if format.correction else []
        return [group, *zeros], [f"scale_dtype={format.scale_type}", f"codes={format.order}"]


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

CODE_OPS: dict[str, CodeOps] = {}
"""By `Code.name`."""


def register(ops: CodeOps) -> None:
    """Adds what a code needs of torch, in place of what there was."""
    CODE_OPS[ops.name] = ops
