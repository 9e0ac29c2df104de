"""PackedWeight, a packed weight's tensors and what they hold: unpacking by rows, and what sizes and formats there are.

Knows nothing of kernels or the driver. `packed.py` makes a checked `Weight` of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.tensors import dtype_name
from jitgemm.weight import layout
from jitgemm.weight.ready import ReadyAt, capturing, noted

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def group_count(k: int, group_size: int) -> int:
    """Groups of a row of k columns."""
    return 1 if group_size >= k else ceil_div(k, group_size)


def format_group(k: int, group_size: int) -> int:
    """`WeightFormat.group_size` of a weight with k columns. Raises ValueError for a group size that it cannot have."""
    if group_size < 1 or (group_size < k and group_size not in GROUP_SIZES):
        raise ValueError(f"group_size: expected one of {GROUP_SIZES}, or k = {k} for per channel, got {group_size}")
    return 0 if group_size >= k else group_size


def check_sizes(n: int, k: int, name: str = "q") -> None:
    """Raises ValueError for sizes that no weight has."""
    if n < 8 or n % 8:
        raise ValueError(f"{name}: expected n, its rows, to be a positive multiple of 8, got {n}")
    if k < K_ALIGNMENT or k % K_ALIGNMENT:
        raise ValueError(f"{name}: expected k to be a positive multiple of {K_ALIGNMENT}, got {k}")


def expert_indices(experts: int | None) -> Iterable[int | EllipsisType]:
    """What picks each expert's part of a tensor; `...` for a dense weight, whose only part is all of it."""
    return (...,) if experts is None else range(experts)


RowParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""q, scale, zero as `Weight.unpack` gives them, and offset [rows, groups] in the scale's type or None."""


def count_experts(blocks: torch.Tensor) -> int | None:
    """`experts` of the weight with these records: torch 2.8 cannot compile a property of a `PackedWeight`."""
    return blocks.shape[0] if blocks.dim() == 4 else None


class PackedWeight(NamedTuple):
    """A packed weight's tensors and what they hold, unchecked; the attributes are `Weight`'s."""

    blocks: torch.Tensor
    channel_scale: torch.Tensor | None
    row_sum: torch.Tensor | None
    n: int
    k: int
    format: WeightFormat

    @property
    def settled_at(self) -> ReadyAt | None:
        """Where a `Weight` settled these very records, if one did."""
        return noted(self.blocks)

    @property
    def experts(self) -> int | None:
        return count_experts(self.blocks)

    def expert(self, index: int | EllipsisType) -> PackedWeight:
        """Views of one expert's tensors; see `expert_indices`."""
        channel_scale, row_sum = (None if part is None else part[index] for part in (self.channel_scale, self.row_sum))
        return PackedWeight(self.blocks[index], channel_scale, row_sum, self.n, self.k, self.format)

    @property
    def plan_key(self) -> int:
        """Number, in this process, of everything about the weight that checks and the choice of a kernel depend on.

        Every call hashes it, which takes longer for the values themselves.
        """
        fmt = self.format
        # Plain values: hashing a dataclass takes longer.
        values = (
            self.n, self.k, fmt.group_size, fmt.zero_point, fmt.scale_type, fmt.order, fmt.offset, fmt.code,
            fmt.strip_scales, self.blocks.device, self.row_sum is None, self.experts,
        )  # fmt: skip
        # Both are one step each, so threads agree on a number and never give one twice.
        return _plan_keys.setdefault(values, next(_plan_numbers))

    def rows(self, first_strip: int, end_strip: int) -> RowParts:
        """`Weight.rows`."""
        if self.experts is not None:
            raise ValueError(f"rows: expected a dense weight, got one of {self.experts} experts; take weight[e].rows()")
        first = first_strip * STRIP_ROWS
        n = min(end_strip * STRIP_ROWS, self.n) - first
        part, k, format = self.blocks[first_strip:end_strip], self.k, self.format
        scale_dtype = torch_dtype(format.scale_type)

        def field(start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
            return layout.unpack_field(part[:, :, start:stop], n, k, format.group_size, dtype)

        if self.channel_scale is not None:
            scale = layout.unpack_channel_scale(self.channel_scale[first:], n)
        else:
            scale = field(format.scales_at, format.offsets_at, scale_dtype)
        zero = field(format.zeros_at, format.record_bytes, torch.uint8) if format.zero_point else None
        offset = field(format.offsets_at, format.zeros_at, scale_dtype) if format.offset else None
        return layout.unpack_codes(part, n, k, format), scale, zero, offset

    def chunks(self) -> Iterator[tuple[slice, RowParts]]:
        """All rows, a chunk of an expert at a time: which of [experts * n], and what `rows` gives of them."""
        for number, index in enumerate(expert_indices(self.experts)):
            expert = self.expert(index)
            for first, end in layout.strip_chunks(self.n, self.k):
                parts = expert.rows(first, end)
                start = number * self.n + first * STRIP_ROWS
                yield slice(start, start + parts[0].shape[0]), parts


_plan_keys: dict[tuple[Any, ...], int] = {}
_plan_numbers = itertools.count()


def by_group(
    matrix: torch.Tensor, values: torch.Tensor, group_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of matrix [rows, k], each with the part of values [rows, groups] that broadcasts over it.

    For in-place arithmetic with a value per group, without a second matrix: the full groups, then the tail.
    """
    k = matrix.shape[1]
    group_size = min(group_size, k)
    full = k // group_size
    yield matrix[:, : full * group_size].unflatten(1, (full, group_size)), values[:, :full, None]
    if k % group_size:
        yield matrix[:, full * group_size :], values[:, full:]


def dequantize_groups(
    matrix: torch.Tensor,
    group_size: int,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> None:
    """matrix [rows, k] -> (matrix - zero) * scale + offset in place, with values per group [rows, groups] or None; each
    step is rounded to the matrix's type."""
    for apply, values in ((torch.Tensor.sub_, zero), (torch.Tensor.mul_, scale), (torch.Tensor.add_, offset)):
        if values is not None:
            for part, value in by_group(matrix, values.to(matrix.dtype), group_size):
                apply(part, value)


def check_permutation(permutation: torch.Tensor, k: int) -> torch.Tensor:
    """As int32, with the values 0..k-1 once each; not looked at while a CUDA graph is captured."""
    if permutation.dtype not in INTEGERS:
        raise TypeError(f"permutation: expected an integer dtype, got {dtype_name(permutation.dtype)}")
    if tuple(permutation.shape) != (k,):
        raise ValueError(f"permutation: expected shape [{k}], got {list(permutation.shape)}")
    indices = permutation.to(torch.int64)
    if not (permutation.is_cuda and capturing(permutation.device)):
        if not torch.equal(indices.sort().values, torch.arange(k, device=permutation.device)):
            raise ValueError(f"permutation: expected every value of 0..{k - 1} once, got repeated or other values")
    return indices.to(torch.int32).contiguous()
