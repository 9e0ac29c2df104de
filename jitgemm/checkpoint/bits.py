"""Nibbles and bytes in and out of words, for every format. Knows bits, not what they mean.

A word is a uint8, int8, int16, int32 or int64 holding 2, 4, 8 or 16 nibbles. Nibble 0 is the low one, and `order[i]` is
the value that nibble i holds; None means 0, 1, 2, ...::

    int32   | nibble 7 | ... | nibble 1 | nibble 0 |        order None:         ...  | v1 | v0 |
                                                            order AWQ_ORDER:    ...  | v2 | v0 |
    uint8                    | nibble 1 | nibble 0 |        order HIGH_FIRST:        | v0 | v1 |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitgemm.tensors import dtype_name

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's int32 words."""

HIGH_FIRST = (1, 0)
"""Bytes whose high nibble is the even value."""

WORD_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def unpack_nibbles(words: torch.Tensor, dim: int = -1, *, order: Sequence[int] | None = None) -> torch.Tensor:
    """uint8 nibbles 0..15 of words: the size along `dim` grows by the nibbles of a word.

    Args:
        words: any shape and strides, of one of `WORD_DTYPES`.
        dim: the dimension along which the values of a word are neighbours.
        order: order[i] is the value, within its word, of nibble i (0 is the low one).

    Raises:
        TypeError, ValueError: words are of another dtype; order is no permutation of a word's nibbles.
    """
    per_word = _nibbles_of(words.dtype)
    last = _dense(words.movedim(dim, -1))
    pairs = last.view(torch.uint8)  # words are little endian
    nibbles = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
    if order:
        nibbles = nibbles.unflatten(-1, (last.shape[-1], per_word))[..., _inverse(order, per_word)].flatten(-2)
    return nibbles.movedim(-1, dim)


def unpack_bytes(words: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """uint8 bytes of words, the low one first: the size along `dim` grows by the bytes of a word."""
    return _dense(words.movedim(dim, -1)).view(torch.uint8).movedim(-1, dim)  # words are little endian


def twos_complement(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 0..15 read as two's complement: int8 -8..7."""
    return (nibbles ^ 8).view(torch.int8) - 8


def minus_8(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 0..15 stored as q + 8: int8 -8..7."""
    return nibbles.view(torch.int8) - 8


def minus_128(bytes: torch.Tensor) -> torch.Tensor:
    """uint8 0..255 stored as q + 128: int8 -128..127."""
    return (bytes ^ 0x80).view(torch.int8)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that `view(dtype)` takes: `contiguous()` keeps odd strides of dimensions of size 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _nibbles_of(dtype: torch.dtype) -> int:
    if dtype not in WORD_DTYPES:
        names = ", ".join(dtype_name(d) for d in WORD_DTYPES)
        raise TypeError(f"words: expected one of {names}, got {dtype_name(dtype)}")
    return 2 * dtype.itemsize


def _inverse(order: Sequence[int], per_word: int) -> list[int]:
    """Nibble of each value."""
    if sorted(order) != list(range(per_word)):
        raise ValueError(f"order: expected a permutation of 0..{per_word - 1}, got {list(order)}")
    return [list(order).index(value) for value in range(per_word)]
