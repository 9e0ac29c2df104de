"""A rank's part of what a packed layer is made of. Knows no `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS
from jitgemm.nn.layers.packed import LHS_DTYPES, Parts
from jitgemm.weight.given import row_sums
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import PackedWeight


class Cut(NamedTuple):
    """Which part: dim "n" or "k", this rank, the number of ranks; see `CanonicalWeight.shard`."""

    dim: str
    rank: int
    world: int


def part_of(parts: Parts, cut: Cut, summed_first: bool = False) -> Parts:
    """A rank's part, in memory of its own: rows of the bias, or along k all of it for rank 0.

    summed_first: along k every rank adds the bias, to the sum over all ranks.
    """
    bias, (dim, rank, world) = parts.bias, cut
    if bias is not None and dim == "n":
        bias = bias.chunk(world)[rank].clone()
    elif rank and not summed_first:
        bias = None
    return parts._replace(weight=part_of_weight(parts.weight, *cut, LHS_DTYPES[parts.activation]), bias=bias)


def part_of_experts(parts: Parts, experts: slice) -> Parts:
    """Some experts, in memory of their own."""
    bias = None if parts.bias is None else parts.bias[experts].clone()
    return parts._replace(weight=_with(parts.weight, lambda tensor: tensor[experts]), bias=bias)


def part_of_weight(weight: Weight, dim: str, rank: int, world: int, lhs_dtype: torch.dtype) -> Weight:
    """A rank's part of a weight, exactly, in memory of its own; see `CanonicalWeight.shard`.

    Records are sliced where the cut falls between them; otherwise the weight is unpacked, cut and packed. Blocks that
    are rotated together stay together: ValueError for other cuts.
    """
    if weight.experts is not None:
        raise ValueError(f"weight: expected a dense one, got one of {weight.experts} experts")
    n, k, group_size = weight.n, weight.k, weight.format.group_size
    if dim == "k" and weight.rotation and k % (world * weight.rotation):
        wanted = f"{weight.layer or 'weight'}: expected k to be a multiple of {world} * {weight.rotation}"
        raise ValueError(f"{wanted}, for a rotated weight's parts on {world} ranks, got {k}")
    if dim == "n" and n % (world * STRIP_ROWS) == 0:
        return _with(weight, lambda tensor: tensor.chunk(world)[rank], n=n // world)
    whole_records = k % (world * max(BLOCK_K, group_size)) == 0 and k // world > group_size
    corrects = bool(weight.format.correction)  # records of corrections are of 32 groups
    if dim == "k" and whole_records and weight.permutation is None and not corrects:
        k //= world
        blocks, row_sum = weight.blocks.chunk(world, 1)[rank].contiguous(), weight.row_sum
        if row_sum is not None:
            row_sum = row_sums(PackedWeight(blocks, weight.channel_scale, None, n, k, weight.format))
        part = replace(weight, blocks=blocks, row_sum=row_sum, k=k, group_size=group_size or k)
    else:
        part = unpacked(weight).shard(dim, rank, world).pack(lhs_dtype, correction=None if corrects else False)
    part.named(weight.layer)
    return part


def unpacked(weight: Weight) -> CanonicalWeight:
    """The layer of a dense weight before packing, bit for bit."""
    return CanonicalWeight(**weight.ops.before_packing(weight), rotation=weight.rotation)


def _with(weight: Weight, pick: Callable[[torch.Tensor], torch.Tensor], **sizes: Any) -> Weight:
    """A weight of some rows or experts of this one."""
    names = ("blocks", "channel_scale", "row_sum")
    tensors: dict[str, Any] = {
        name: pick(tensor).clone() for name in names if (tensor := getattr(weight, name)) is not None
    }
    part = replace(weight, **tensors, **sizes)
    part.named(weight.layer)
    return part
