"""A rank's part of a packed weight and of a bias. Knows no modules and no `torch.distributed`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS
from jitgemm.weight.pack import row_sums
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import PackedWeight


class Cut(NamedTuple):
    """Which part: dim "n" or "k", this rank, the number of ranks; see `CanonicalWeight.shard`."""

    dim: str
    rank: int
    world: int


def part_of_weight(weight: Weight, dim: str, rank: int, world: int, lhs_dtype: torch.dtype) -> Weight:
    """A rank's part of a weight, exactly, in memory of its own; see `CanonicalWeight.shard`.

    Records are sliced where the cut falls between them; otherwise the weight is unpacked, cut and packed.
    """
    if weight.experts is not None:
        raise ValueError(f"weight: expected a dense one, got one of {weight.experts} experts")
    n, k, fmt = weight.n, weight.k, weight.format
    if dim == "n" and n % (world * STRIP_ROWS) == 0:
        n //= world
        rows = slice(rank * n, (rank + 1) * n)
        blocks = weight.blocks[rows.start // STRIP_ROWS : rows.stop // STRIP_ROWS].clone()
        channel_scale, row_sum = (
            None if each is None else each[rows].clone() for each in (weight.channel_scale, weight.row_sum)
        )
        part = replace(weight, blocks=blocks, channel_scale=channel_scale, row_sum=row_sum, n=n)
    elif dim == "k" and _between_records(weight, world):
        k //= world
        blocks = weight.blocks[:, rank * k // BLOCK_K : (rank + 1) * k // BLOCK_K].contiguous()
        row_sum = weight.row_sum
        if row_sum is not None:
            row_sum = row_sums(PackedWeight(blocks, weight.channel_scale, None, n, k, fmt))
        part = replace(weight, blocks=blocks, row_sum=row_sum, k=k, group_size=fmt.group_size or k)
    else:
        part = unpacked(weight).shard(dim, rank, world).pack(lhs_dtype)
    part.named(weight.layer)
    return part


def unpacked(weight: Weight) -> CanonicalWeight:
    """The layer of a dense weight before packing, bit for bit."""
    q, scale, zero = weight.unpack()
    offset, permutation = weight.unpack_offset(), weight.permutation
    return CanonicalWeight(q, scale, zero, offset, weight.group_size, permutation, code=weight.format.code)


def _between_records(weight: Weight, world: int) -> bool:
    """Whether each rank's part along k is whole records, in the weight's own format."""
    group_size = weight.format.group_size
    whole = weight.k % (world * max(BLOCK_K, group_size)) == 0
    return whole and weight.permutation is None and weight.k // world > group_size


def part_of_bias(bias: torch.Tensor | None, dim: str, rank: int, world: int) -> torch.Tensor | None:
    """Rows of it, or along k all of it for rank 0."""
    if bias is None or dim == "k":
        return bias if rank == 0 else None
    return bias.chunk(world)[rank].clone()


def part_of_experts(weight: Weight, experts: slice) -> Weight:
    """Some experts of a weight, in memory of their own."""
    names = "blocks", "channel_scale", "row_sum"
    tensors = {name: tensor[experts].clone() for name in names if (tensor := getattr(weight, name)) is not None}
    part = replace(weight, **tensors)
    part.named(weight.layer)
    return part
