"""Codes in two levels as the integers that tensor cores multiply, and their factors in records.

(code - zero) * factor is an integer of 8 bits, the weight that times its channel's scale. Records hold each factor with
zero * factor, which a kernel subtracts from code * factor (TwoLevelCodec in include/jitgemm/gemm/codec.cuh), both as bytes.
Of rows 16 * warp + i and 8 more they stand in a word, which a thread loads::

    [warp: 4][i: 8][factor, product: 2][row, row + 8: 2]
"""

from __future__ import annotations

import torch

from jitgemm.kernel.codes import CODES, FACTOR_GROUP
from jitgemm.weight.codes import CODE_BYTES

MOST = CODES["two_level"].factors
"""Largest factor."""
MOST_CODE = CODE_BYTES["two_level"].orders["two_level"].high
INTEGERS = -128, 127
"""What a code minus its zero point times its factor may be."""


def to_bytes(factors: torch.Tensor) -> torch.Tensor:
    """uint8 [64 * strips, kblocks, 2] -> the bytes of records, [strips, kblocks, 128]."""
    kblocks = factors.shape[1]
    parts = factors.view(-1, 4, 2, 8, kblocks, 2)  # strip, warp, half, i, block, which
    return parts.permute(0, 4, 1, 3, 5, 2).flatten(2)


def from_bytes(bytes: torch.Tensor) -> torch.Tensor:
    """Undo `to_bytes`."""
    strips, kblocks, _ = bytes.shape
    parts = bytes.unflatten(2, (4, 8, 2, 2))  # strip, block, warp, i, which, half
    return parts.permute(0, 2, 5, 3, 1, 4).reshape(strips * 64, kblocks, 2)


def values(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """int8 [rows, k] of uint8 codes and factors uint8 [rows, ceil(k / 128), 2]."""
    factor, product = (
        each.to(torch.int16).repeat_interleave(FACTOR_GROUP, 1)[:, : codes.shape[1]] for each in factors.unbind(-1)
    )
    return (codes * factor).sub_(product).to(torch.int8)


def factors_and_zeros(factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and zero points, uint8 [rows, groups] each."""
    factor, product = factors.unbind(-1)
    return factor.contiguous(), product // factor
