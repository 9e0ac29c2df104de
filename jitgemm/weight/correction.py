"""A weight with zero points or offsets as a symmetric one and a correction of small rank, for int8 activations.

Weight (row, column) is (q - zero) * scale, or q * scale + offset: codes of -8..7 times the scale, and a factor of the
row and group, scale * (8 - zero) or offset. Factors multiply the sums of a token's groups alone: a GEMM with as many
columns as there are groups. Kernels take it for more blocks of k (include/jitgemm/gemm/correction.cuh); their records
stand behind those of the codes, in units of the tensor cores' sums, and rows of activations hold sums of groups.

A weight is packed so only if a 16-bit float holds each of its factors and they give back each zero point or offset, so
that nothing is rounded and nothing else is kept. Sums of up to 256 codes have 16 bits: two digits of either type.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from types import EllipsisType

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import BLOCK_K, CORRECTION_GROUPS, CORRECTION_TYPES, STRIP_ROWS, Correction, WeightFormat
from jitgemm.kernel.formats import ceil_div, correction_blocks
from jitgemm.weight.codes import Stored

SHIFT = 8
"""What codes of 0..15 are less in two's complement."""
TIMES = 16.0
"""How often operands are the codes, in the order "s8": 1 / kOutputScale of its codec."""


def held_factors(
    scale: torch.Tensor, zero: torch.Tensor | None, offset: torch.Tensor | None, type: str
) -> torch.Tensor | None:
    """The factors of zero points or offsets [..., n, groups] in this type; None where it does not hold them."""
    if offset is not None:
        held = (offset.double() * TIMES).to(torch_dtype(type))
        same = torch.equal(offsets_of(held, scale).double(), offset.double())
        return held if same and torch.equal(offset.signbit(), held.signbit()) else None
    assert zero is not None
    factor = (scale.double() * TIMES) * (SHIFT - zero.double())
    held = factor.to(torch_dtype(type))
    # Of a scale of zero there are no zero points; one that is no number holds no factor.
    fits = torch.equal(held.double(), factor) and torch.equal(zeros_of(held, scale), zero.to(torch.uint8))
    return held if fits else None


def zeros_of(factor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The zero points, uint8, which factors divided by scales are exactly."""
    steps = factor.double() / (scale.double() * TIMES)
    return (SHIFT - steps.nan_to_num(nan=0.0)).to(torch.uint8)


def offsets_of(factor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Offsets, of scale's type."""
    return (factor.double() / TIMES).to(scale.dtype)


def pack_factors(blocks: torch.Tensor, factor: torch.Tensor) -> None:
    """Writes records of factors [n, groups] to uint8 [strips, blocks, bytes], in the order of wgmma's A fragments."""
    strips, count, _ = blocks.shape
    n, groups = factor.shape
    padded = factor.new_zeros(strips * STRIP_ROWS, count * CORRECTION_GROUPS)
    padded[:n, :groups] = factor
    # [strip][warp][row + 8?][row] x [block][step][group + 8?][pair][of a pair]
    parts = padded.view(strips, 4, 2, 8, count, 2, 2, 4, 2)
    ordered = parts.permute(0, 4, 5, 1, 3, 7, 6, 2, 8).contiguous().view(strips, count, -1).view(torch.uint8)
    blocks[..., : ordered.shape[-1]] = ordered
    blocks[..., ordered.shape[-1] :] = 0


def unpack_factors(blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> torch.Tensor:
    """Records of a run of strips that holds n rows -> [n, groups] in the type of `format.correction`."""
    strips, count, _ = blocks.shape
    values = blocks[..., : STRIP_ROWS * CORRECTION_GROUPS * 2].contiguous().view(torch_dtype(format.correction))
    parts = values.view(strips, count, 2, 4, 8, 4, 2, 2, 2).permute(0, 3, 7, 4, 1, 2, 6, 5, 8)
    rows = parts.reshape(strips * STRIP_ROWS, count * CORRECTION_GROUPS)
    return rows[:n, : ceil_div(k, format.group_size)].contiguous()


def uncorrected(stored: Stored, blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> Stored:
    """Rows with the zero points or offsets that their records of corrections stand for, if there are any."""
    if not format.correction:
        return stored
    factor = unpack_factors(blocks, n, k, format)
    if format.zero_point:
        codes = (stored.q + SHIFT).view(torch.uint8)
        return stored._replace(q=codes, zero=zeros_of(factor, stored.scale))
    return stored._replace(offset=offsets_of(factor, stored.scale))


def check_corrected(format: WeightFormat, name: str) -> None:
    """Raises ValueError for corrections of a kernel's format, which stand for no zero points or offsets."""
    if format.correction and not (format.zero_point or format.offset):
        raise ValueError(f"{name}: expected zero points or offsets with a correction, got {format.name}")


def of_parts(formats: Sequence[WeightFormat]) -> list[WeightFormat]:
    """Formats of a joined layer's parts, as the layer has them: no corrections unless one type holds all factors."""
    several = len({format.correction for format in formats}) > 1
    return [replace(format, correction="") if several else format for format in formats]


def with_sums(codes: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Codes of int8 [m, k] with the sums of their groups behind them, [m, lhs_columns]."""
    (m, k), (name, size) = codes.shape, correction
    groups, slots = ceil_div(k, size), correction_blocks(k, size) * CORRECTION_GROUPS
    padded = torch.nn.functional.pad(codes, (0, groups * size - k)).view(m, groups, size)
    sums = torch.nn.functional.pad(padded.sum(2, dtype=torch.int32).float(), (0, slots - groups))
    high = sums.to(torch_dtype(name))
    low = (sums - high.float()).to(high.dtype)
    digits = torch.stack([digit.unflatten(1, (-1, CORRECTION_GROUPS)) for digit in (high, low)], 2)
    padding = -k % BLOCK_K
    return torch.cat((torch.nn.functional.pad(codes, (0, padding)), digits.flatten(1).view(torch.int8)), 1)


def with_late_sums(codes: torch.Tensor, correction: Correction | None, layer: str) -> torch.Tensor:
    """`with_sums` of codes that were quantised without, with a warning that names the weight's layer."""
    assert correction is not None
    _warn_of_sums(layer)
    return with_sums(codes, correction)


@cache
def _warn_of_sums(layer: str) -> None:
    warnings.warn(
        f"{layer or 'a weight'} has corrections, and the call adds up the groups of its activations in kernels of "
        "their own, which takes longer: quantize_activations(..., correction=weight.correction) does so as it "
        "writes them",
        stacklevel=4,
    )


def first_type(
    scale: torch.Tensor, zero: torch.Tensor | None, offset: torch.Tensor | None, parts: Iterable[int | EllipsisType]
) -> str:
    """The type that holds the factors of all experts, or of a dense weight; "" for none.

    parts: what picks each expert's, as `jitgemm.weight.parts.expert_indices`.
    """
    types = list(CORRECTION_TYPES)
    for e in parts:
        zeros, offsets = (None if values is None else values[e] for values in (zero, offset))
        types = [type for type in types if held_factors(scale[e], zeros, offsets, type) is not None]
    return next(iter(types), "")
