"""What every format does with words and zero points: codes out of words and back, and a `CanonicalWeight` of codes.
Knows no format.

A word is a uint8, int8, int16, int32 or int64 holding 2, 4, 8 or 16 nibbles. Nibble 0 is the low one, and `order[i]` is
the value that nibble i holds; None means 0, 1, 2, ...::

    int32   | nibble 7 | ... | nibble 1 | nibble 0 |        order None:         ...  | v1 | v0 |
                                                            order AWQ_ORDER:    ...  | v2 | v0 |
    uint8                    | nibble 1 | nibble 0 |        order HIGH_FIRST:        | v0 | v1 |

Kinds of zero point::

    integer_zero   (q - zero) * scale             zero an integer 0..16, of 8 bits 0..256
    float_zero     q * scale + zero               zero a float
    scaled_zero    q * scale - zero               zero a float that was an integer times scale, rounded
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.kernel.codes import CODES
from jitgemm.tensors import dtype_name
from jitgemm.weight.given import MAX_ZERO

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's int32 words."""

HIGH_FIRST = (1, 0)
"""Bytes whose high nibble is the even value."""

WORD_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def unpack_nibbles(words: torch.Tensor, dim: int = -1, *, order: Sequence[int] | None = None) -> torch.Tensor:
    """uint8 nibbles 0..15 of words, any shape and strides: the size along `dim` grows by the nibbles of a word. Raises
    TypeError for words of another dtype, ValueError for an order that is no permutation of a word's nibbles."""
    if words.dtype not in WORD_DTYPES:
        raise TypeError(
            f"words: expected one of {', '.join(map(dtype_name, WORD_DTYPES))}, got {dtype_name(words.dtype)}"
        )
    pairs = unpack_bytes(words.movedim(dim, -1))
    nibbles = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
    if order:
        per_word = 2 * words.dtype.itemsize
        if sorted(order) != list(range(per_word)):
            raise ValueError(f"order: expected a permutation of 0..{per_word - 1}, got {list(order)}")
        nibble_of = [list(order).index(value) for value in range(per_word)]
        by_word = (nibbles.shape[-1] // per_word, per_word)
        nibbles = nibbles.unflatten(-1, by_word)[..., nibble_of].flatten(-2)
    return nibbles.movedim(-1, dim)


def unpack_bytes(words: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """uint8 bytes of words, the low one first: the size along `dim` grows by the bytes of a word."""
    # A copy, as `contiguous()` keeps odd strides of dimensions of size 1, which `view` does not take.
    dense = words.movedim(dim, -1).clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8).movedim(-1, dim)  # words are little endian


def unpack_words(words: torch.Tensor, dim: int, per_word: int) -> torch.Tensor:
    """uint8 codes, or zero points, of which a word holds so many along a dimension, 4 or 8."""
    return (unpack_bytes if per_word == 4 else unpack_nibbles)(words, dim)


def pack_words(codes: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """int32 words of uint8 codes of 4 or 8 bits along `dim`, the low one first: the inverse of `unpack_nibbles` and
    `unpack_bytes`. The last word is filled up with zeros."""
    codes = torch.nn.functional.pad(codes.movedim(dim, -1), (0, -codes.shape[dim] % (32 // bits)))
    per_byte = 8 // bits
    packed = codes[..., 0::per_byte].clone(memory_format=torch.contiguous_format)
    for i in range(1, per_byte):
        packed |= codes[..., i::per_byte] << bits * i
    words = packed.view(torch.int32)  # little endian
    return words.movedim(-1, dim).contiguous()


def twos_complement(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 0..15 read as two's complement: int8 -8..7."""
    return minus(nibbles ^ 8, 8)


def minus(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """uint8 codes stored as q + middle, 8 for nibbles and 128 for bytes: int8."""
    return (codes - middle).view(torch.int8)  # which wraps


def check_codes(name: str, codes: torch.Tensor, least: int, most: int, form: str = "") -> None:
    """Raises ValueError for values outside least..most. `form` says in the message what else was expected."""
    low, high = (int(x) for x in codes.aminmax()) if codes.numel() else (least, most)
    if low < least or high > most:
        raise ValueError(f"{name}: expected 4-bit values {least}..{most}{form}, got {low}..{high}")


def integer_zero(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int, *, name: str, code: str = "int4"
) -> CanonicalWeight:
    """(q - zero) * scale. Where every zero is 8 (of 8 bits 128): the signed codes q - 8, for a cheaper kernel.

    Args:
        q: uint8 [n, k], 0..15; of 8 bits 0..255.
        zero: integers [n, G]; None where each is 8 or 128 by definition. ValueError where one is not in 0..16 (0..256).
        name: the tensor that holds zero, for the message.
    """
    most_zero = 1 << CODES[code].bits
    if zero is None or bool((zero == most_zero // 2).all()):
        return CanonicalWeight(minus(q, most_zero // 2), scale, group_size=group_size, code=code)
    least, most = (int(x) for x in zero.aminmax())
    if least < 0 or most > most_zero:
        raise ValueError(
            f"{name}: expected zero points 0..{most_zero} on the scale of the codes 0..{most_zero - 1}, got "
            f"{least}..{most}"
        )
    zero = zero.to(torch.uint8 if most_zero < 256 else torch.int16)
    return CanonicalWeight(q, scale, zero, group_size=group_size, code=code)


def float_zero(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> CanonicalWeight:
    """q * scale + zero, q [n, k], int8 of -8..7 or uint8 of 0..15; without offset where every zero is 0. scale and zero
    are floats [n, G]; where their dtypes differ, both are widened to fp32."""
    offset = zero if bool(zero.any()) else None
    if offset is not None and scale.dtype != zero.dtype:
        scale, offset = scale.float(), zero.float()
    none = None if q.dtype == torch.int8 else torch.zeros(scale.shape, dtype=torch.uint8, device=scale.device)
    return CanonicalWeight(q, scale, none, offset, group_size)


def scaled_zero(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> CanonicalWeight:
    """q * scale - zero, as `float_zero`. With integer zero points where every zero is exactly 0..16 times its scale."""
    integer = (zero.double() / scale.double()).round()
    exact = (integer * scale.double() == zero.double()) & (integer >= 0) & (integer <= MAX_ZERO)
    if scale.dtype != torch.float32 and bool(exact.all()):  # in fp32, q * scale is rounded before zero is subtracted
        return integer_zero(q, scale, integer.to(torch.uint8), group_size, name="zero")
    return float_zero(q, scale, -zero, group_size)
