"""W4Weight and W8Weight, weights in the kernel's order: their tensors, what they hold, and back to codes and scales.

The order of the bytes is `layout.py`'s business, making a weight `pack.py`'s and `pack8.py`'s. Knows nothing of kernels
or the driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import EllipsisType
from typing import Any, ClassVar, NamedTuple, Self

import torch

from jitgemm.dtypes import DTYPES, REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import BLOCK_K, GROUP_SIZES, K_ALIGNMENT, STRIP_ROWS, WeightFormat, ceil_div, tuned_codes
from jitgemm.tensors import PLAIN, check_int, check_tensor, describe, dtype_name
from jitgemm.weight import layout
from jitgemm.weight.settled import SettledAt, capturing, note_settled, noted_settled, settle

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS = (torch.uint8, *_SIGNED, torch.uint16, torch.uint32, torch.uint64)

_TENSORS = ("blocks", "channel_scale", "row_sum", "permutation")
_META_FIELDS = ("magic", "layout_version", "n", "k", "group_size", "zero_point", "scale_type", "codes", "offset")
# The last is 2 for strips' scales, which weights with offsets do not have.
_META_SCALE_TYPES = {DTYPES[name].number: name for name in REAL_TYPES}
_META_CODES = ("any", "e4m3", "s8")  # by their number in the meta tensor; append only


def group_count(k: int, group_size: int) -> int:
    """Groups of a row of k columns."""
    return 1 if group_size >= k else ceil_div(k, group_size)


def weight_format(
    k: int,
    group_size: int,
    zero_point: bool,
    scale_type: str,
    codes: str = "any",
    offset: bool = False,
    bits: int = 4,
    strip_scales: bool = False,
) -> WeightFormat:
    """The format of a weight with k columns. Raises ValueError for a group size that it cannot have."""
    if group_size < 1 or (group_size < k and group_size not in GROUP_SIZES):
        raise ValueError(f"group_size: expected one of {GROUP_SIZES}, or k = {k} for per channel, got {group_size}")
    group = 0 if group_size >= k else group_size
    return WeightFormat(group, zero_point, scale_type, codes, offset, bits, strip_scales and group == BLOCK_K)


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
    def settled_at(self) -> SettledAt | None:
        """Where a `Weight` settled these very records, if one did."""
        return noted_settled(self.blocks)

    @property
    def experts(self) -> int | None:
        return count_experts(self.blocks)

    def expert(self, index: int | EllipsisType) -> PackedWeight:
        """Views of one expert's tensors; see `expert_indices`."""
        channel_scale, row_sum = (None if part is None else part[index] for part in (self.channel_scale, self.row_sum))
        return PackedWeight(self.blocks[index], channel_scale, row_sum, self.n, self.k, self.format)

    @property
    def plan_key(self) -> int:
        """A number, in this process, for what of a weight decides which calls are legal and which kernel runs.

        Every call hashes it, which takes longer for the values themselves.
        """
        fmt = self.format
        # Plain values: hashing a dataclass takes longer.
        values = (
            self.n, self.k, fmt.group_size, fmt.zero_point, fmt.scale_type, fmt.codes, fmt.offset, fmt.bits,
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

    def checked(self) -> Weight:
        """The same tensors as a weight."""
        group_size = self.format.group_size or self.k
        kind = W4Weight if self.format.bits == 4 else W8Weight
        return kind(self.blocks, self.channel_scale, self.n, self.k, group_size, self.format, row_sum=self.row_sum)

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


def check_packed(weight: PackedWeight | Weight, name: str = "", *, experts: bool | None = None) -> int | None:
    """Its number of experts; TypeError or ValueError unless tensors have the format's dtypes, shapes and strides.

    Args:
        name: what stands before a tensor's name in a message, such as "rhs.".
        experts: True refuses dense weights, False weights of experts; None takes both.
    """
    blocks = check_tensor(f"{name}blocks", weight.blocks)
    count = count_experts(blocks)
    if experts is not None and experts != (count is not None):
        whole, bits = name.removesuffix(".") or "weight", weight.format.bits
        if experts:
            raise ValueError(f"{whole}: expected a weight of experts, got a dense one, which gemm_w{bits}a8_nt takes")
        raise ValueError(
            f"{whole}: expected a dense weight [n, k], got one of {count} experts, which "
            f"m_grouped_gemm_w{bits}a8_nt_contiguous takes; {whole}[e] is the dense weight of expert e"
        )
    if count == 0:
        raise ValueError(f"{name}blocks: expected at least one expert, got {describe(weight.blocks)}")
    lead = () if count is None else (count,)
    n, k, fmt = weight.n, weight.k, weight.format
    check_sizes(n, k, f"{name}blocks")
    if fmt.bits == 4 and fmt.codes != "any" and fmt.codes != tuned_codes(fmt.codes, fmt.group_size, fmt.zero_point, k):
        raise ValueError(f"{name}format: expected codes 'any' for per-channel int8 with k = {k}, got {fmt.codes!r}")
    strips = layout.strips_of(n)
    rows = (*lead, strips * STRIP_ROWS)
    _check_part(weight, name, "blocks", (*lead, strips, layout.kblocks_of(k), fmt.record_bytes), torch.uint8)
    if fmt.group_size and weight.channel_scale is not None:
        raise ValueError(f"{name}channel_scale: expected None for group_size {fmt.group_size}, got a tensor")
    if not fmt.group_size:
        if weight.channel_scale is None:
            raise ValueError(f"{name}channel_scale: expected a tensor for a per-channel weight, got None")
        _check_part(weight, name, "channel_scale", rows, torch_dtype(fmt.scale_type))
    if weight.row_sum is not None:
        _check_part(weight, name, "row_sum", rows, torch.float32)
    return count


def _check_part(
    weight: PackedWeight | Weight, name: str, part: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = check_tensor(name + part, getattr(weight, part))
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name}{part}: expected {dtype_name(dtype)} {list(shape)}, got {describe(tensor)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}{part}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    if tensor.device != weight.blocks.device:
        raise ValueError(f"{name}{part}: expected {weight.blocks.device}, got {tensor.device}")


@dataclass(frozen=True, eq=False, repr=False)
class Weight:
    """A weight [n, k], or one of E experts [E, n, k], packed for the kernel.

    Weight (row, column) is (q - zero) * scale + offset, with the scale, zero point and offset of its group of
    `group_size` columns; those of 8 bits have no zero points and offsets.

    A weight of experts holds E of them in one format, whose tensors have a first dimension E. It has a length and can
    be iterated; `weight[e]` is expert e's dense weight, a view over the same memory that is settled as its whole is.

    Attributes:
        blocks: uint8 [ceil(n / 64), ceil(k / 128), format.record_bytes], contiguous, in the order `layout.py` draws.
        channel_scale: [64 * ceil(n / 64)] in the scale's own type when the weight is per channel, else None.
        row_sum: fp32 [64 * ceil(n / 64)], each row's sum of weights, which zero points of activations need; or None.
        permutation: int32 [k], or None. Column j of the packed weight is column permutation[j] of the layer's input, so
            that activations go in as x[:, permutation]. Never with experts.
        n, k: rows and columns of the weight, an expert's where it has experts.
        experts: E, or None for a dense weight.
        group_size: columns of a group; at least k means one scale per row.
        format: the layout of a record.
        layout_version: version of the packed order that `blocks` follows.
        settled_at: address and version of `blocks` when the weight was last settled, or None.
        plan_key: number of what decides which calls are legal and which kernel runs, see `PackedWeight`.
        layer: name of the layer that holds the weight, for messages; "" where `named` was not called.

    On CUDA, kernels read a weight before they wait for the kernel before them, if the weight is `settled`: what wrote
    it has ended. Making a weight settles it. A write that moves the version counter of `blocks` unsettles it, and calls
    wait again: any operation in place on it or on its views, in inference mode too. Not seen are writes past the
    counter: by `.data`, `numpy()`, DLPack, the storage or a raw pointer, and by a view of another dtype that was made
    in inference mode, `blocks.view(torch.int32)`. Whoever writes so calls `settle()` behind it, before the next GEMM.

    Hashed and compared by identity. Copies, deep copies and pickles; a pickle names this class, so that files meant to
    last are better written from `state_dict()`.
    """

    blocks: torch.Tensor
    channel_scale: torch.Tensor | None
    n: int
    k: int
    group_size: int
    format: WeightFormat
    layout_version: int = layout.LAYOUT_VERSION
    row_sum: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    plan_key: int = field(init=False)
    bits: ClassVar[int] = 0
    layer: ClassVar[str] = ""
    settled_at: SettledAt | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if (version := self.layout_version) != layout.LAYOUT_VERSION:
            raise ValueError(f"layout_version: expected {layout.LAYOUT_VERSION}, got {version}; pack the weight again")
        check_sizes(self.n, self.k)
        fmt = self.format
        expected = weight_format(
            self.k, self.group_size, fmt.zero_point, fmt.scale_type, fmt.codes, fmt.offset, self.bits, fmt.strip_scales
        )
        if fmt != expected:
            raise ValueError(f"format: expected {expected} for group_size {self.group_size}, got {fmt}")
        check_packed(self)
        if self.permutation is not None:
            if self.experts is not None:
                raise ValueError(f"permutation: expected None for {self.experts} experts, got a tensor")
            _check_part(self, "", "permutation", (self.k,), torch.int32)
        for name, tensor in self._tensors.items():
            if tensor.is_cuda and type(tensor) in PLAIN and tensor.data_ptr() % 16:
                address = f"{tensor.data_ptr():#x}"
                raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got {address}")
        object.__setattr__(self, "plan_key", self.packed.plan_key)
        self.settle()

    def settle(self) -> bool:
        """Waits for what the current stream still writes; kernels then read the weight before the one before them ends.

        Returns:
            Whether the weight is settled now: not while a CUDA graph is being captured, where nothing can be waited
            for, nor for inference tensors, which do not tell when they are written, nor for fake ones, which have no
            address.
        """
        object.__setattr__(self, "settled_at", settle(self.blocks))
        return self.settled_at is not None

    @property
    def settled(self) -> bool:
        """Whether the weight is known to be written: settled, and not written or replaced since."""
        return self.settled_at is not None and self.settled_at == (self.blocks.data_ptr(), self.blocks._version)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that a copy is checked and settled too.
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    def __repr__(self) -> str:
        codes = "unsigned with zero points" if self.format.zero_point else "signed"
        own = "int8" if self.format.codes == "s8" else self.format.codes
        if self.format.codes != "any":
            codes = own if self.bits == 8 else f"{codes} for {own}"
        group = f"group_size={self.group_size}" if self.format.group_size else "per channel"
        reals = f"{self.format.scale_type} scales" + (" and offsets" if self.format.offset else "")
        permuted = ", permuted" if self.permutation is not None else ""
        experts = "" if self.experts is None else f"experts={self.experts}, "
        kind = type(self).__name__
        return f"{kind}({experts}n={self.n}, k={self.k}, {group}, {codes}, {reals}{permuted}, device='{self.device}')"

    @property
    def packed(self) -> PackedWeight:
        """What of it a GEMM reads."""
        return PackedWeight(self.blocks, self.channel_scale, self.row_sum, self.n, self.k, self.format)

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}

    @property
    def experts(self) -> int | None:
        return self.packed.experts

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, k), or (experts, n, k)."""
        return *self.blocks.shape[:-3], self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def groups(self) -> int:
        """Groups of k per row: columns of the scale."""
        return group_count(self.k, self.group_size)

    @property
    def scale_dtype(self) -> torch.dtype:
        """torch.float32, torch.bfloat16 or torch.float16."""
        return torch_dtype(self.format.scale_type)

    @property
    def dtype(self) -> torch.dtype:
        """`scale_dtype`: what models that cast their input to `layer.weight.dtype` cast it to."""
        return self.scale_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, padding included."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def to(self, device: torch.device | str | int) -> Self:
        """The same weight on another device; itself when it is there already."""
        device = torch.empty(0, device=device).device  # "cuda" -> the current one's index
        if device == self.device:
            return self
        with torch.inference_mode(False):
            moved = {name: tensor.to(device) for name, tensor in self._tensors.items()}
            return self.with_tensors(moved["blocks"], *(moved.get(name) for name in _TENSORS[1:]))

    def with_tensors(
        self,
        blocks: torch.Tensor,
        channel_scale: torch.Tensor | None,
        row_sum: torch.Tensor | None,
        permutation: torch.Tensor | None,
    ) -> Self:
        """The same weight over other tensors, such as copies on another device; checked and settled like a new one."""
        sizes = (self.n, self.k, self.group_size, self.format, self.layout_version)
        weight = type(self)(blocks, channel_scale, *sizes, row_sum, permutation)
        weight.named(self.layer)
        return weight

    @classmethod
    def stacked(cls, count: int, make: Callable[[int], Self], together: int = 1) -> Self:
        """A weight of experts out of dense ones, each copied as it comes: memory for one more is all it takes.

        Args:
            count: how many experts, a multiple of `together`.
            make: gives the weight of expert 0, 1, ... in this order. All have n, k, group size and format of the first,
                and no permutation. Where their codes stand in different orders, as of e4m3 weights one of which holds a
                -8, all are brought into the order "any", which holds them.
            together: of how many experts each dense weight has the rows, one below another: make(0), make(together),
                ... Their n is then a multiple of 64.

        Raises:
            TypeError, ValueError: something else came from make; the message names the expert.
        """
        if (count := check_int("count", count)) < 1:
            raise ValueError(f"count: expected at least one expert, got {count}")
        if (together := check_int("together", together)) < 1 or count % together:
            raise ValueError(f"together: expected a divisor of {count} experts, got {together}")
        same: dict[str, Any] = {}
        whole: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for e in range(0, count, together):
                each = make(e)
                if not isinstance(each, cls) or each.experts is not None or each.permutation is not None:
                    got = repr(each) if isinstance(each, cls) else type(each).__name__
                    error = ValueError if isinstance(each, cls) else TypeError
                    raise error(f"make({e}): expected a dense {cls.__name__} without a permutation, got {got}")
                if together > 1 and each.n % (together * STRIP_ROWS):
                    expected = f"the rows of {together} experts, {STRIP_ROWS} or a multiple each"
                    raise ValueError(f"make({e}): expected {expected}, got n = {each.n}")
                kind = {name: getattr(each, name) for name in ("n", "k", "group_size", "device")}
                kind |= {"format": each.format.common, "tensors": list(each._tensors)}
                if e == 0:
                    same, format = kind, each.format
                    whole = {
                        name: part.new_empty((count, part.shape[0] // together, *part.shape[1:]))
                        for name, part in each._tensors.items()
                    }
                for what, value in kind.items():
                    if value != same[what]:
                        raise ValueError(f"make({e}): expected {what} {same[what]}, as make(0) has, got {value}")
                for name, part in each._tensors.items():
                    whole[name][e : e + together] = part.unflatten(0, (together, -1))
                if each.format != format:
                    if cls.bits == 4:
                        layout.reorder_codes(whole["blocks"][:e], format.codes, "any")
                        layout.reorder_codes(whole["blocks"][e : e + together], each.format.codes, "any")
                    format = format.common
                del each, part  # before the next is made
            sizes = same["n"] // together, same["k"], same["group_size"]
            return cls(whole["blocks"], whole.get("channel_scale"), *sizes, format, row_sum=whole.get("row_sum"))

    def named(self, layer: str) -> None:
        """Sets the name of the layer that holds the weight."""
        object.__setattr__(self, "layer", layer)

    # What a model may do to the weight of a torch.nn.Linear and cannot do to a packed one is an error that says so.

    def _no_tensor(self, use: str) -> str:
        return (
            f"{self.layer or 'weight'}: expected a tensor for {use}, got a packed {self.bits}-bit weight "
            f"({type(self).__name__}): something other than the layer's own call uses it; leave the layer out with "
            "filter=..., or call dequantize()"
        )

    def __getitem__(self, index: Any) -> Self:
        if (experts := self.experts) is None:
            raise TypeError(self._no_tensor("[...]"))
        if not -experts <= (e := check_int("expert", index)) < experts:
            raise IndexError(f"expert: expected -{experts}..{experts - 1}, got {e}")
        part = self.packed.expert(e)
        settled = self.settled and type(part.blocks) in PLAIN
        settled_at = (part.blocks.data_ptr(), part.blocks._version) if settled else None
        views = {"blocks": part.blocks, "channel_scale": part.channel_scale, "row_sum": part.row_sum}
        note_settled(part.blocks, settled_at)
        # Not through the constructor, which would wait for the stream.
        expert = object.__new__(type(self))
        expert.__dict__.update(self.__dict__, **views, plan_key=part.plan_key, settled_at=settled_at)
        return expert

    def __len__(self) -> int:
        if self.experts is None:
            raise TypeError(self._no_tensor("len()"))
        return self.experts

    def __iter__(self) -> Iterator[Self]:
        return map(self.__getitem__, range(len(self)))

    def __bool__(self) -> bool:
        return True  # a dense one too, which has no length

    def __matmul__(self, other: object) -> Any:
        raise TypeError(self._no_tensor("@"))

    __rmatmul__ = __matmul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of PyTorch that is given the weight."""
        given = [*args, *(kwargs or {}).values()]
        nested = [each for value in given for each in (value if isinstance(value, (list, tuple)) else [value])]
        weight = next(each for each in nested if isinstance(each, cls))
        raise TypeError(weight._no_tensor(getattr(func, "__name__", str(func))))

    def rows(self, first_strip: int, end_strip: int) -> RowParts:
        """Unpack some strips of 64 rows: rows 64 * first_strip up to min(64 * end_strip, n)."""
        return self.packed.rows(first_strip, end_strip)

    def unpack_offset(self) -> torch.Tensor | None:
        """The offsets as packed, bit for bit, [n, groups] in the scale's type; None for a weight without."""
        fmt = self.format
        if not fmt.offset:
            return None
        field = self.blocks[..., fmt.offsets_at : fmt.zeros_at]
        return layout.unpack_field(field, self.n, self.k, fmt.group_size, self.scale_dtype)

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What was packed, bit for bit; offsets: `unpack_offset`. All have a first dimension E where there are experts.

        Returns:
            q: [n, k], int8 of -8..7, or uint8 of 0..15 with zero points; of 8 bits int8 or float8_e4m3fn.
            scale: [n, groups] in its own type; the bits of NaNs and the sign of zero are kept.
            zero: uint8 [n, groups], or None.
        """
        zero_point, device, by_group = self.format.zero_point, self.device, (*self.shape[:-1], self.groups)
        q_dtype = torch_dtype(self.format.codes) if self.bits == 8 else torch.uint8 if zero_point else torch.int8
        q = torch.empty(self.shape, dtype=q_dtype, device=device)
        scale = torch.empty(by_group, dtype=self.scale_dtype, device=device)
        zero = torch.empty(by_group, dtype=torch.uint8, device=device) if zero_point else None
        for rows, parts in self.packed.chunks():
            for whole, part in zip((q, scale, zero), parts):
                if whole is not None and part is not None:
                    bits = layout.bits_dtype(part.dtype)
                    whole.view(bits).flatten(0, -2)[rows] = part.view(bits)
        return q, scale, zero

    def dequantize(self) -> torch.Tensor:
        """(q - zero) * scale + offset as fp32 [n, k] or [experts, n, k], in the packed order of columns.

        With a permutation, column j is column permutation[j] of the layer's input; a checkpoint's layer before packing
        (`jitgemm.checkpoint.read_layer(...).dequantize()`) has its columns in the input's order.

        Scale and offset are widened to fp32; one rounding for the product, one for the sum.
        """
        out = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        for rows, (q, scale, zero, offset) in self.packed.chunks():
            part = out.flatten(0, -2)[rows].copy_(q)
            dequantize_groups(part, self.group_size, scale, zero, offset)
        return out

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Plain contiguous tensors for torch.save or safetensors; they share memory with the weight.

        Returns:
            `prefix` + "blocks", "channel_scale" (per channel only), "row_sum" and "permutation" (where there are such)
            and "meta", a small int64 tensor on the CPU with the layout version and sizes.
        """
        meta = (
            self._magic(),
            self.layout_version,
            self.n,
            self.k,
            self.group_size,
            int(self.format.zero_point),
            DTYPES[self.format.scale_type].number,
            _META_CODES.index(self.format.codes),
            self.format.offset + 2 * self.format.strip_scales,
        )
        tensors = self._tensors | {"meta": torch.tensor(meta, dtype=torch.int64, device="cpu")}
        return {prefix + name: tensor for name, tensor in tensors.items()}

    @classmethod
    def _magic(cls) -> int:
        """Tells a meta tensor of this class from some other int64 tensor."""
        return 0x4A57305634 + (cls.bits << 16)

    @staticmethod
    def sizes_of(meta: torch.Tensor) -> tuple[int, int]:
        """(n, k) of the weight whose state dict has this `meta`."""
        fields = dict(zip(_META_FIELDS, meta.tolist()))
        return fields["n"], fields["k"]

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Self:
        """The weight whose `state_dict(prefix)` is among `tensors`, on the device of its blocks; memory is shared.

        `Weight.from_state_dict` takes one of either width.

        Raises:
            TypeError: something among `tensors` is no tensor.
            ValueError: a tensor is missing, has the wrong shape or type, or was written with another layout version.
        """
        for name in ("blocks", "meta"):
            if prefix + name not in tensors:
                raise ValueError(f"state dict: expected a tensor {prefix + name!r}, found none")
        for name in ("meta", *_TENSORS):
            if tensors.get(prefix + name) is not None:
                check_tensor(f"state dict: {prefix + name!r}", tensors[prefix + name])
        meta = tensors[prefix + "meta"]
        key = f"state dict: {prefix + 'meta'!r}"
        if meta.dtype != torch.int64 or meta.dim() != 1 or meta.numel() < 2:
            raise ValueError(f"{key}: expected int64 [{len(_META_FIELDS)}], got {describe(meta)}")
        values = meta.tolist()
        kind = next((each for each in (cls, *cls.__subclasses__()) if each.bits and each._magic() == values[0]), None)
        if kind is None:
            what = f"packed W{cls.bits} weight" if cls.bits else "packed weight"
            raise ValueError(f"{key}: expected a {what}, got another tensor (first value {values[0]})")
        if values[1] != layout.LAYOUT_VERSION:
            raise ValueError(
                f"{key}: expected layout version {layout.LAYOUT_VERSION}, got {values[1]}; pack the weight again"
            )
        if len(values) != len(_META_FIELDS):
            raise ValueError(f"{key}: expected {len(_META_FIELDS)} values, got {len(values)}")
        _, version, n, k, group_size, zero_point, scale_type, codes, offset = values
        known = scale_type in _META_SCALE_TYPES and 0 <= codes < len(_META_CODES)
        if zero_point not in (0, 1) or offset not in (0, 1, 2) or not known:
            raise ValueError(
                f"{key}: expected zero_point 0 or 1, offset 0, 1 or 2, known scale type and codes, got {values[5:]}"
            )
        parts: dict[str, Any] = {name: _aligned(tensors.get(prefix + name)) for name in _TENSORS}
        try:
            names = _META_SCALE_TYPES[scale_type], _META_CODES[codes]
            format = weight_format(k, group_size, bool(zero_point), *names, offset == 1, kind.bits, offset == 2)
            weight = kind(n=n, k=k, group_size=group_size, format=format, layout_version=version, **parts)
            permutation = parts["permutation"]
            if type(permutation) in PLAIN and not permutation.is_meta:
                check_permutation(permutation, k)
            return weight
        except ValueError as error:
            raise ValueError(f"state dict: {prefix}{error}") from None


class W4Weight(Weight):
    """A 4-bit `Weight`; made by `pack_w4`."""

    bits = 4


class W8Weight(Weight):
    """A `Weight` of 8 bits, e4m3 or int8; made by `pack_w8`."""

    bits = 8


class _OfTensors:
    """An attribute of tensors that a packed weight does not have; `__getattr__` would slow down those that it has."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, weight: Weight | None, owner: type) -> Any:
        raise AttributeError(self.name if weight is None else weight._no_tensor(f".{self.name}"))


for _name in dir(torch.Tensor):
    if not (_name.startswith("_") or hasattr(Weight, _name) or _name in Weight.__dataclass_fields__):
        setattr(Weight, _name, _OfTensors(_name))


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy where a tensor read from a file does not start at 16 bytes."""
    if tensor is None or type(tensor) not in PLAIN:
        return tensor
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def by_group(
    matrix: torch.Tensor, values: torch.Tensor, group_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of matrix [rows, k], each beside the part of values [rows, groups] that broadcasts over it.

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
