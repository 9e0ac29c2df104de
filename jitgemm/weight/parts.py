"""PackedWeight: a packed weight's tensors and what they hold, their checks, unpacking by rows, and the sizes.

What a GEMM needs of a weight; knows nothing of kernels or the driver. `packed.py` makes a checked `Weight` of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import EllipsisType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, ROTATION, STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.tensors import check_tensor, describe, dtype_name
from jitgemm.weight import layout
from jitgemm.weight.codes import CODE_OPS, RowParts, Stored, Unpacked
from jitgemm.weight.correction import check_corrected, uncorrected
from jitgemm.weight.ready import ReadyAt, is_captured, noted

T = TypeVar("T")

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


def check_rotation(rotation: object, k: int, name: str = "w") -> int:
    """Raises ValueError unless it is 0, or 128 and k a multiple of it; name: of what has k columns."""
    if type(rotation) is not int or rotation not in (0, ROTATION):
        raise ValueError(f"rotation: expected 0 or {ROTATION}, got {rotation!r}")
    if rotation and k % rotation:
        expected = "a" if name == "k" else "k to be a"
        raise ValueError(f"{name}: expected {expected} multiple of {rotation} with a rotation, got {k}")
    return rotation


class Rotated(tuple[torch.Tensor, ...]):
    """Rotated activations (q, scale), or with a zero point, as `quantize_activations(..., rotation=128)` returns them:
    what rotated weights are multiplied by, and they alone. For tensors from elsewhere: `Rotated((q, scale))`."""

    __slots__ = ()


def check_rotated(lhs: object, rotation: int, name: str = "lhs") -> None:
    """Raises ValueError unless activations are rotated as a weight of this rotation is."""
    rotated = isinstance(lhs, Rotated)
    if not rotated if rotation else rotated:  # a tracer may not compare a symbol with a bool
        rotates = "jitgemm.Rotated for a rotated weight, as quantize_activations(..., rotation=128) returns it"
        wanted = rotates if rotation else "activations that are not rotated for a weight that is not"
        raise ValueError(f"{name}: expected {wanted}, got a {type(lhs).__name__}")


def expert_indices(experts: int | None) -> Iterable[int | EllipsisType]:
    """Indices of the experts' parts of a tensor; `...` for a dense weight, which is one part."""
    return (...,) if experts is None else range(experts)


def count_experts(blocks: torch.Tensor) -> int | None:
    """`experts` of the weight with these records: torch 2.8 cannot compile a property of a `PackedWeight`."""
    return blocks.shape[0] if blocks.dim() == 4 else None


class WeightBase:
    """Base of `Weight`, by which calls recognise one: its tensors were checked when it was made."""

    bits: ClassVar[int] = 0


class PackedWeight(NamedTuple):
    """A packed weight's tensors and what they hold, unchecked; the attributes are `Weight`'s."""

    blocks: torch.Tensor
    channel_scale: torch.Tensor | None
    row_sum: torch.Tensor | None
    n: int
    k: int
    format: WeightFormat
    sums: str = "f32"

    @property
    def ready_at(self) -> ReadyAt | None:
        """Where a `Weight` marked these very records ready, if one did."""
        return noted(self.blocks)

    def follow_writes(self) -> None:
        """Nothing: powers that an op is given are a layer's, which makes them again."""

    @property
    def experts(self) -> int | None:
        return count_experts(self.blocks)

    def expert(self, index: int | EllipsisType) -> PackedWeight:
        """Views of one expert's tensors; see `expert_indices`."""
        channel_scale, row_sum = (None if part is None else part[index] for part in (self.channel_scale, self.row_sum))
        return self._replace(blocks=self.blocks[index], channel_scale=channel_scale, row_sum=row_sum)

    @property
    def plan_key(self) -> int:
        """Number, in this process, of everything about the weight that checks and the choice of a kernel depend on.

        Every call hashes it, which takes longer for the values themselves.
        """
        fmt = self.format
        # Plain values: hashing a dataclass takes longer.
        values = (
            self.n, self.k, fmt.group_size, fmt.zero_point, fmt.scale_type, fmt.order, fmt.offset, fmt.code,
            fmt.uniform_strip_scale, fmt.correction, self.blocks.device, self.row_sum is None,
            None if self.channel_scale is None else self.channel_scale.dtype, self.experts, self.sums,
        )  # fmt: skip
        # Both are one step each, so threads agree on a number and never give one twice.
        return _plan_keys.setdefault(values, next(_plan_numbers))

    def rows(self, first_strip: int, end_strip: int) -> RowParts:
        """`Weight.rows`."""
        return CODE_OPS[self.format.code].operands(self.stored(first_strip, end_strip))

    def summands(self, first_strip: int, end_strip: int) -> tuple[torch.Tensor, ...]:
        """What tensor cores multiply where a code is a sum, fp64 [rows, k] each: their sum is `rows`' q, which stands
        for itself where there are none."""
        return CODE_OPS[self.format.code].summands(self.stored(first_strip, end_strip), self.format)

    def unpacked(self, first_strip: int, end_strip: int) -> Unpacked:
        """The same as `Weight.unpack` gives it."""
        return CODE_OPS[self.format.code].unpacked(self.stored(first_strip, end_strip), self.format)

    def stored(self, first_strip: int, end_strip: int) -> Stored:
        """What the records hold, codes and what goes with them."""
        if self.experts is not None:
            raise ValueError(f"rows: expected a dense weight, got one of {self.experts} experts; take weight[e].rows()")
        first = first_strip * STRIP_ROWS
        n = min(end_strip * STRIP_ROWS, self.n) - first
        kblocks, k, format = layout.kblocks_of(self.k), self.k, self.format.stored
        part, scale_dtype = self.blocks[first_strip:end_strip, :kblocks], torch_dtype(format.scale_type)

        def field(start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
            return layout.unpack_field(part[:, :, start:stop], n, k, format.group_size, dtype)

        if not format.group_size:
            scale = layout.unpack_channel_scale(self.channel_scale[first:], n)  # type: ignore[index]
        else:
            scale = field(format.scales_at, format.offsets_at, scale_dtype)
        zero = field(format.zeros_at, format.record_bytes, torch.uint8) if format.zero_point else None
        offset = field(format.offsets_at, format.zeros_at, scale_dtype) if format.offset else None
        q = layout.unpack_codes(part, n, k, format)
        inner = CODE_OPS[format.code].inner(part, n, k, format)
        corrections = self.blocks[first_strip:end_strip, kblocks:]
        return uncorrected(Stored(q, scale, zero, offset, inner), corrections, n, k, self.format)

    def chunks(self, read: Callable[[PackedWeight, int, int], T]) -> Iterator[tuple[slice, T]]:
        """All rows, a chunk of an expert at a time: which of [experts * n], and what `PackedWeight.rows` or another
        gives of them."""
        for number, index in enumerate(expert_indices(self.experts)):
            expert = self.expert(index)
            for first, end in layout.strip_chunks(self.n, self.k):
                start = number * self.n
                rows = slice(start + first * STRIP_ROWS, start + min(end * STRIP_ROWS, self.n))
                yield rows, read(expert, first, end)


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
    matrix: torch.Tensor, group_size: int, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> None:  # fmt: skip
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
    if not is_captured(permutation):
        if not torch.equal(indices.sort().values, torch.arange(k, device=permutation.device)):
            raise ValueError(f"permutation: expected every value of 0..{k - 1} once, got repeated or other values")
    return indices.to(torch.int32).contiguous()


def check_packed(weight: Any, name: str = "", *, experts: bool | None = None) -> int | None:
    """The weight's number of experts. TypeError or ValueError unless tensors have the format's dtypes, shapes, strides.

    Args:
        weight: a `PackedWeight`, or what has its attributes.
        name: what stands before a tensor's name in a message, such as "rhs.".
        experts: True raises for dense weights, False for weights of experts; None takes both.
    """
    n, k, fmt = weight.n, weight.k, weight.format
    count = count_experts(check_tensor(f"{name}blocks", weight.blocks))
    if experts is not None and experts != (count is not None):
        argument = name.removesuffix(".") or "weight"
        if experts:
            raise ValueError(
                f"{argument}: expected a weight of experts, got a dense one, which gemm_w{fmt.bits}a8_nt takes"
            )
        raise ValueError(
            f"{argument}: expected a dense weight [n, k], got one of {count} experts, which "
            f"m_grouped_gemm_w{fmt.bits}a8_nt_contiguous takes; {argument}[e] is the dense weight of expert e"
        )
    if count == 0:
        raise ValueError(f"{name}blocks: expected at least one expert, got {describe(weight.blocks)}")
    check_sizes(n, k, f"{name}blocks")
    if not fmt.group_size and fmt.tuned and k > fmt.max_int8_k:
        raise ValueError(f"{name}format: expected codes 'any' for per-channel int8 with k = {k}, got {fmt.order!r}")
    lead = () if count is None else (count,)
    rows = (*lead, layout.strips_of(n) * STRIP_ROWS)
    shape = (*lead, layout.strips_of(n), fmt.kblocks(k), fmt.record_bytes)
    check_corrected(fmt, f"{name}format")
    check_part(weight, name, "blocks", shape, torch.uint8)
    if weight.sums == "f16" and fmt.f16_sums:
        check_part(weight, name, "channel_scale", rows, torch.float32)
    elif fmt.group_size and weight.channel_scale is not None:
        raise ValueError(f"{name}channel_scale: expected None for group_size {fmt.group_size}, got a tensor")
    elif not fmt.group_size:
        if weight.channel_scale is None:
            raise ValueError(f"{name}channel_scale: expected a tensor for a per-channel weight, got None")
        check_part(weight, name, "channel_scale", rows, torch_dtype(fmt.scale_type))
    if weight.row_sum is not None:
        check_part(weight, name, "row_sum", rows, torch.float32)
    return count


def check_part(weight: Any, name: str, part: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises TypeError or ValueError unless a weight's tensor is as told, contiguous, and on the blocks' device."""
    tensor = check_tensor(name + part, getattr(weight, part))
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name}{part}: expected {dtype_name(dtype)} {list(shape)}, got {describe(tensor)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}{part}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    if tensor.device != weight.blocks.device:
        raise ValueError(f"{name}{part}: expected {weight.blocks.device}, got {tensor.device}")
