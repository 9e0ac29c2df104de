"""W4Weight, a 4-bit weight in the kernel's order, and pack_w4, which makes one.

Checks what a caller gives and says what is wrong with it; the order of the bytes is `layout.py`'s business. Knows
nothing of kernels, configurations or the driver.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from jitgemm.dtypes import DTYPES, LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import GROUP_SIZES, STRIP_ROWS, WeightFormat, ceil_div, tuned_codes
from jitgemm.tensors import check_dtype, check_tensor, describe, dtype_name
from jitgemm.weight import layout

_ZERO_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
MAX_ZERO = 16
"""Largest zero point: GPTQ's first format stores z - 1 in four bits, so 16 occurs; both decodes take q - 16."""

_META_MAGIC = 0x4A57345634  # tells a meta tensor of ours from some other int64 tensor
_META_FIELDS = ("magic", "layout_version", "n", "k", "group_size", "zero_point", "scale_type", "codes", "offset")
_META_SCALE_TYPES = {DTYPES[name].number: name for name in REAL_TYPES}
_META_CODES = ("any", "e4m3", "s8")  # by their number in the meta tensor; append only


def _group_count(k: int, group_size: int) -> int:
    return 1 if group_size >= k else ceil_div(k, group_size)


def weight_format(
    k: int, group_size: int, zero_point: bool, scale_type: str, codes: str = "any", offset: bool = False
) -> WeightFormat:
    """The format of a weight with k columns. Raises ValueError for a group size that it cannot have."""
    if group_size < 1 or (group_size < k and group_size not in GROUP_SIZES):
        raise ValueError(f"group_size: expected one of {GROUP_SIZES}, or k = {k} for per channel, got {group_size}")
    return WeightFormat(0 if group_size >= k else group_size, zero_point, scale_type, codes, offset)


def _check_sizes(n: int, k: int) -> None:
    if n < 8 or n % 8:
        raise ValueError(f"q: expected n, its rows, to be a positive multiple of 8, got {n}")
    if k < 32 or k % 32:
        raise ValueError(f"q: expected k to be a positive multiple of 32, got {k}")


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False, repr=False)
class W4Weight:
    """A 4-bit weight [n, k] packed for the kernel; made by `pack_w4`.

    Weight (row, column) is (q - zero) * scale + offset, with the scale, zero point and offset of its group of
    `group_size` columns.

    Attributes:
        blocks: uint8 [ceil(n / 64), ceil(k / 128), format.record_bytes], contiguous, in the order `layout.py` draws.
        channel_scale: [64 * ceil(n / 64)] in the scale's own type when the weight is per channel, else None.
        row_sum: fp32 [64 * ceil(n / 64)], each row's sum of weights, which zero points of activations need; or None.
        permutation: int32 [k], or None. Column j of the packed weight is column permutation[j] of the layer's input, so
            that activations go in as x[:, permutation].
        n, k: rows and columns of the weight.
        group_size: as given to `pack_w4`; at least k means one scale per row.
        format: the layout of a record.
        layout_version: version of the packed order that `blocks` follows.
        plan_key: number of what decides which calls are legal and which kernel runs, see `plan_key`.
        layer: name of the layer that holds the weight, for messages; "" where `named` was not called.

    On CUDA, kernels read a weight before they wait for the kernel before them, if the weight is `settled`: what wrote
    it has ended. Making a weight settles it. Writing `blocks` in place through PyTorch unsettles it, and calls wait
    again; whoever writes it in another way (`.data`, a raw pointer) calls `settle()` before the next GEMM.

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
    layer: ClassVar[str] = ""
    _settled_at: tuple[int, int] | None = field(init=False, default=None)  # address and version of blocks

    def __post_init__(self) -> None:
        if self.layout_version != layout.LAYOUT_VERSION:
            raise ValueError(
                f"layout_version: expected {layout.LAYOUT_VERSION}, got {self.layout_version}; pack the weight again"
            )
        _check_sizes(self.n, self.k)
        fmt = self.format
        expected = weight_format(self.k, self.group_size, fmt.zero_point, fmt.scale_type, fmt.codes, fmt.offset)
        if self.format != expected:
            raise ValueError(f"format: expected {expected} for group_size {self.group_size}, got {self.format}")
        _check_packed(
            "blocks",
            self.blocks,
            (layout.strips_of(self.n), layout.kblocks_of(self.k), self.format.record_bytes),
            torch.uint8,
        )
        if fmt.codes != "any" and fmt.codes != tuned_codes(fmt.codes, fmt.group_size, fmt.zero_point, self.k):
            raise ValueError(f"format: expected codes 'any' for per-channel int8 with k = {self.k}, got {fmt.codes!r}")
        rows = layout.strips_of(self.n) * STRIP_ROWS
        if self.format.group_size == 0:
            if self.channel_scale is None:
                raise ValueError("channel_scale: expected a tensor for a per-channel weight, got None")
            _check_packed("channel_scale", self.channel_scale, (rows,), self.scale_dtype)
        elif self.channel_scale is not None:
            raise ValueError(f"channel_scale: expected None for group_size {self.group_size}, got a tensor")
        if self.row_sum is not None:
            _check_packed("row_sum", self.row_sum, (rows,), torch.float32)
        if self.permutation is not None:
            _check_packed("permutation", self.permutation, (self.k,), torch.int32)
        for name in ("channel_scale", "row_sum", "permutation"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.blocks.device:
                raise ValueError(f"{name}: expected {self.blocks.device}, got {tensor.device}")
        object.__setattr__(self, "plan_key", plan_key(self.n, self.k, fmt, self.blocks.device))
        self.settle()

    def settle(self) -> bool:
        """Waits for what the current stream still writes, so that kernels may read the weight ahead of their turn.

        Returns:
            Whether the weight is settled now: not while a CUDA graph is being captured, where nothing can be waited
            for, nor for inference tensors, which do not tell when they are written, nor for fake ones, which have no
            address.
        """
        settled_at = None
        real = type(self.blocks) in (torch.Tensor, torch.nn.Parameter) and not self.blocks.is_inference()
        if real and not (self.blocks.is_cuda and _capturing(self.device)):
            if self.blocks.is_cuda:
                torch.cuda.current_stream(self.device).synchronize()
            settled_at = (self.blocks.data_ptr(), self.blocks._version)
        object.__setattr__(self, "_settled_at", settled_at)
        return settled_at is not None

    @property
    def settled(self) -> bool:
        """Whether the weight is known to be written: settled, and not written or replaced since."""
        at = self._settled_at
        return at is not None and at == (self.blocks.data_ptr(), self.blocks._version)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that a copy is checked and settled too.
        return type(self), (
            self.blocks,
            self.channel_scale,
            self.n,
            self.k,
            self.group_size,
            self.format,
            self.layout_version,
            self.row_sum,
            self.permutation,
        )

    def __repr__(self) -> str:
        codes = "unsigned with zero points" if self.format.zero_point else "signed"
        if self.format.codes != "any":
            codes += f" for {'int8' if self.format.codes == 's8' else self.format.codes}"
        group = f"group_size={self.group_size}" if self.format.group_size else "per channel"
        reals = f"{self.format.scale_type} scales" + (" and offsets" if self.format.offset else "")
        permuted = ", permuted" if self.permutation is not None else ""
        return f"W4Weight(n={self.n}, k={self.k}, {group}, {codes}, {reals}{permuted}, device='{self.device}')"

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def groups(self) -> int:
        """Groups of k per row: columns of the scale."""
        return _group_count(self.k, self.group_size)

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
        tensors = (self.blocks, self.channel_scale, self.row_sum, self.permutation)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, device: torch.device | str | int) -> W4Weight:
        """The same weight on another device; itself when it is there already."""
        device = torch.empty(0, device=device).device  # "cuda" -> the current one's index
        if device == self.device:
            return self
        with torch.inference_mode(False):
            tensors = (self.blocks, self.channel_scale, self.row_sum, self.permutation)
            blocks, *others = (None if tensor is None else tensor.to(device) for tensor in tensors)
            return self.with_tensors(blocks, *others)

    def with_tensors(
        self,
        blocks: torch.Tensor,
        channel_scale: torch.Tensor | None,
        row_sum: torch.Tensor | None,
        permutation: torch.Tensor | None,
    ) -> W4Weight:
        """The same weight over other tensors, such as copies on another device; checked and settled like a new one."""
        sizes = (self.n, self.k, self.group_size, self.format, self.layout_version)
        weight = W4Weight(blocks, channel_scale, *sizes, row_sum, permutation)
        weight.named(self.layer)
        return weight

    def named(self, layer: str) -> None:
        """Sets the name of the layer that holds the weight."""
        object.__setattr__(self, "layer", layer)

    # What a model may do to the weight of a torch.nn.Linear and cannot do to a packed one is an error that says so.

    def _no_tensor(self, use: str) -> str:
        return (
            f"{self.layer or 'weight'}: expected a tensor for {use}, got a packed 4-bit weight (W4Weight): something "
            "other than the layer's own call uses it; leave the layer out with filter=..., or call dequantize()"
        )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            raise AttributeError(self._no_tensor(f".{name}"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: object) -> Any:
        raise TypeError(self._no_tensor("[...]"))

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

    def rows(self, first_strip: int, end_strip: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Unpack some strips of 64 rows.

        Returns:
            q, scale, zero as `unpack` gives them, of rows 64 * first_strip up to min(64 * end_strip, n).
        """
        return _rows(self.blocks, self.channel_scale, self.n, self.k, self.format, first_strip, end_strip)

    def row_offsets(self, first_strip: int, end_strip: int) -> torch.Tensor | None:
        """Offsets of the rows that `rows` gives, [rows, groups] in the scale's type; None for a weight without."""
        return _row_offsets(self.blocks, self.n, self.k, self.format, first_strip, end_strip)

    def unpack_offset(self) -> torch.Tensor | None:
        """The offsets as packed, bit for bit, [n, groups] in the scale's type; None for a weight without."""
        return self.row_offsets(0, layout.strips_of(self.n))

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What was packed, bit for bit; offsets: `unpack_offset`.

        Returns:
            q: int8 [n, k] of -8..7, or uint8 [n, k] of 0..15 when there are zero points.
            scale: [n, groups] in its own type; the bits of NaNs and the sign of zero are kept.
            zero: uint8 [n, groups], or None.
        """
        code_dtype = torch.uint8 if self.format.zero_point else torch.int8
        q = torch.empty(self.shape, dtype=code_dtype, device=self.device)
        scales, zeros = [], []
        for first, end in layout.strip_chunks(self.n, self.k):
            part, scale, zero = self.rows(first, end)
            q[first * STRIP_ROWS : end * STRIP_ROWS] = part
            scales.append(scale.view(layout.bits_dtype(scale.dtype)))
            zeros.append(zero)
        scale = torch.cat(scales).view(self.scale_dtype)
        return q, scale, torch.cat(zeros) if self.format.zero_point else None

    def dequantize(self) -> torch.Tensor:
        """(q - zero) * scale + offset as fp32 [n, k], in the packed order of columns.

        With a permutation, column j is column permutation[j] of the layer's input; a checkpoint's layer before packing
        (`jitgemm.checkpoint.read_layer(...).dequantize()`) has its columns in the input's order.

        Scale and offset are widened to fp32; one rounding for the product, one for the sum.
        """
        out = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        for first, end in layout.strip_chunks(self.n, self.k):
            q, scale, zero = self.rows(first, end)
            rows = out[first * STRIP_ROWS : end * STRIP_ROWS]
            rows.copy_(q)
            if zero is not None:
                for part, value in by_group(rows, zero, self.group_size):
                    part -= value
            for part, value in by_group(rows, scale.float(), self.group_size):
                part *= value
            offset = self.row_offsets(first, end)
            if offset is not None:
                for part, value in by_group(rows, offset.float(), self.group_size):
                    part += value
        return out

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Plain contiguous tensors for torch.save or safetensors; they share memory with the weight.

        Returns:
            `prefix` + "blocks", "channel_scale" (per channel only), "row_sum" and "permutation" (where there are such)
            and "meta", a small int64 tensor on the CPU with the layout version and sizes.
        """
        meta = (
            _META_MAGIC,
            self.layout_version,
            self.n,
            self.k,
            self.group_size,
            int(self.format.zero_point),
            DTYPES[self.format.scale_type].number,
            _META_CODES.index(self.format.codes),
            int(self.format.offset),
        )
        tensors = {prefix + "blocks": self.blocks, prefix + "meta": torch.tensor(meta, dtype=torch.int64, device="cpu")}
        for name in ("channel_scale", "row_sum", "permutation"):
            if getattr(self, name) is not None:
                tensors[prefix + name] = getattr(self, name)
        return tensors

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> W4Weight:
        """The weight whose `state_dict(prefix)` is among `tensors`, on the device of its blocks; memory is shared.

        Raises:
            ValueError: a tensor is missing, has the wrong shape or type, or was written with another layout version.
        """
        for name in ("blocks", "meta"):
            if prefix + name not in tensors:
                raise ValueError(f"state dict: expected a tensor {prefix + name!r}, found none")
        meta = tensors[prefix + "meta"]
        key = f"state dict: {prefix + 'meta'!r}"
        if meta.dtype != torch.int64 or meta.dim() != 1 or meta.numel() < 2:
            raise ValueError(f"{key}: expected int64 [{len(_META_FIELDS)}], got {describe(meta)}")
        values = meta.tolist()
        if values[0] != _META_MAGIC:
            raise ValueError(f"{key}: expected a packed W4 weight, got another tensor (first value {values[0]})")
        if values[1] != layout.LAYOUT_VERSION:
            raise ValueError(
                f"{key}: expected layout version {layout.LAYOUT_VERSION}, got {values[1]}; pack the weight again"
            )
        if len(values) != len(_META_FIELDS):
            raise ValueError(f"{key}: expected {len(_META_FIELDS)} values, got {len(values)}")
        _, version, n, k, group_size, zero_point, scale_type, codes, offset = values
        known = scale_type in _META_SCALE_TYPES and 0 <= codes < len(_META_CODES)
        if zero_point not in (0, 1) or offset not in (0, 1) or not known:
            raise ValueError(
                f"{key}: expected zero_point and offset 0 or 1, known scale type and codes, got {values[5:]}"
            )
        blocks, channel_scale, row_sum, permutation = (
            _aligned(tensors.get(prefix + name)) for name in ("blocks", "channel_scale", "row_sum", "permutation")
        )
        try:
            format = weight_format(
                k, group_size, bool(zero_point), _META_SCALE_TYPES[scale_type], _META_CODES[codes], bool(offset)
            )
            weight = cls(blocks, channel_scale, n, k, group_size, format, version, row_sum, permutation)
            if type(permutation) in (torch.Tensor, torch.nn.Parameter) and not permutation.is_meta:
                _check_permutation(permutation, k)
            return weight
        except ValueError as error:
            raise ValueError(f"state dict: {prefix}{error}") from None


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy where a tensor read from a file does not start at 16 bytes."""
    return tensor.clone() if tensor is not None and tensor.data_ptr() % 16 else tensor


_plan_keys: dict[tuple[Any, ...], int] = {}
_plan_numbers = itertools.count()


def plan_key(n: int, k: int, fmt: WeightFormat, device: torch.device) -> int:
    """A number, in this process, for what of a weight decides which calls are legal and which kernel runs.

    Every call hashes it, which takes longer for the values themselves.
    """
    # Plain values: hashing a dataclass costs the op's hot path more than hashing its fields.
    values = n, k, fmt.group_size, fmt.zero_point, fmt.scale_type, fmt.codes, fmt.offset, device
    # Both are one step each, so threads agree on a number and never give one twice.
    return _plan_keys.setdefault(values, next(_plan_numbers))


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


def _check_packed(name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_tensor(name, tensor)
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected {dtype_name(dtype)} {list(shape)}, got {describe(tensor)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    if tensor.is_cuda and tensor.data_ptr() % 16:
        raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got {tensor.data_ptr():#x}")


def pack_w4(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    offset: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None,
    group_size: int,
    k: int | None = None,
    lhs_dtype: torch.dtype | None = None,
) -> W4Weight:
    """Pack a 4-bit weight into the kernel's order, once, on the device where it is.

    The weight is (q - zero) * scale + offset; scales and offsets are applied as they are, never rounded or converted.
    Any strides will do.

    Args:
        q: the codes, n a multiple of 8 and k a multiple of 32, in one of these forms:

            - int8 [n, k], one value each: -8..7, or 0..15 with zero points;
            - uint8 [n, k], one value each, 0..15, only with zero points;
            - uint8 [n, k / 2], the canonical form: even k in the low nibble, odd k in the high nibble; two's
              complement without zero points, 0..15 with them.

            Which of the last two is meant follows from scale's columns.
        scale: fp32, bf16 or fp16 [n, ceil(k / group_size)]; values are not scanned.
        zero: None for signed codes, or integers 0..16 of any width, [n, ceil(k / group_size)].
        offset: None, or [n, ceil(k / group_size)] of scale's dtype, added to each of the group's weights: the float
            zero points of torchao, ExecuTorch and QServe. Not per channel: repeat scale and offset for groups instead.
        permutation: None, or integers [k] that hold 0..k-1 once each: column j of q is column permutation[j] of the
            layer's input, and the GEMM takes x[:, permutation]. Kept beside the weight.
        group_size: 32, 64, 128 or 256 values of k share a scale; k (or more) for one scale per row.
        k: only needed where both readings of a uint8 q fit scale.
        lhs_dtype: torch.float8_e4m3fn or torch.int8 if the weight will only ever meet these activations: its codes then
            decode in half the instructions where they can (not with zero points; e4m3: where no code is -8; int8: not
            per channel with k above 65536). None packs for both.

    Returns:
        The packed weight on q's device. The CPU and the GPU give the same bytes. On a GPU the current stream is
        synchronised, unless it is being captured: then values of q and zero are not scanned and the weight is not
        `settled`.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype.
        ValueError: wrong shape or device, values out of range, or a form that cannot be told.
    """
    for name, tensor in (("q", q), ("scale", scale), ("zero", zero), ("offset", offset), ("permutation", permutation)):
        if tensor is not None or name in ("q", "scale"):
            check_tensor(name, tensor)
    if q.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"q: expected int8 or uint8, got {dtype_name(q.dtype)}")
    scale_type = check_dtype("scale", scale.dtype, REAL_TYPES)
    if zero is not None and zero.dtype not in _ZERO_DTYPES:
        raise TypeError(f"zero: expected an integer dtype, got {dtype_name(zero.dtype)}")
    if offset is not None and offset.dtype != scale.dtype:
        raise TypeError(f"offset: expected scale's dtype {dtype_name(scale.dtype)}, got {dtype_name(offset.dtype)}")
    lhs = None if lhs_dtype is None else check_dtype("lhs_dtype", lhs_dtype, LHS_TYPES)
    group_size = _check_int("group_size", group_size)
    k = None if k is None else _check_int("k", k)
    if q.dim() != 2:
        raise ValueError(f"q: expected 2 dimensions, [n, k] or [n, k / 2], got shape {list(q.shape)}")
    n = q.shape[0]
    if scale.dim() != 2 or scale.shape[0] != n:
        raise ValueError(f"scale: expected shape [n, ceil(k / group_size)] with n = {n}, got {list(scale.shape)}")
    for name, tensor in (("scale", scale), ("zero", zero), ("offset", offset), ("permutation", permutation)):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {tensor.device}")
    if group_size < 1:
        raise ValueError(f"group_size: expected one of {GROUP_SIZES}, or k for per channel, got {group_size}")

    k, canonical = _read_form(q, scale.shape[1], group_size, zero is not None, k)
    _check_sizes(n, k)
    format = weight_format(k, group_size, zero is not None, scale_type)
    if offset is not None and not format.group_size:
        raise ValueError("offset: expected none per channel; repeat scale and offset for groups of 128 instead")
    groups = _group_count(k, group_size)
    if scale.shape[1] != groups:
        raise ValueError(
            f"scale: expected shape [{n}, {groups}] for k = {k} and group_size {group_size}, got {list(scale.shape)}"
        )
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"zero: expected scale's shape {list(scale.shape)}, got {list(zero.shape)}")
    if offset is not None and offset.shape != scale.shape:
        raise ValueError(f"offset: expected scale's shape {list(scale.shape)}, got {list(offset.shape)}")
    permutation = None if permutation is None else _check_permutation(permutation, k)

    with torch.inference_mode(False), torch.no_grad():
        if not (q.is_cuda and _capturing(q.device)):  # a value cannot be looked at during capture
            if not canonical:
                _check_range("q", q, *((0, 15) if zero is not None else (-8, 7)))
            if zero is not None:
                _check_range("zero", zero.to(torch.int64), 0, MAX_ZERO)
        zero = None if zero is None else zero.to(torch.uint8)
        codes = "any" if lhs is None else _order_of_codes(q, k, canonical, format, lhs)
        format = replace(format, codes=codes, offset=offset is not None)
        blocks = layout.pack_records(q, scale, offset, zero, k=k, canonical=canonical, format=format)
        channel_scale = None if format.group_size else layout.pack_channel_scale(scale)
        row_sum = _row_sums(blocks, channel_scale, n, k, format)
        return W4Weight(blocks, channel_scale, n, k, group_size, format, row_sum=row_sum, permutation=permutation)


def _order_of_codes(q: torch.Tensor, k: int, canonical: bool, format: WeightFormat, lhs: str) -> str:
    """`WeightFormat.codes`: the order for these activations if it can hold this weight, else the one that holds any."""
    codes = tuned_codes(lhs, format.group_size, format.zero_point, k)
    if codes != "e4m3":
        return codes
    if q.is_cuda and _capturing(q.device):
        return "any"
    least = min(int(part.min()) for part in layout.split_canonical(q, False)) if canonical else int(q.min())
    return "e4m3" if least > -8 else "any"


# What `W4Weight` unpacks, from the tensors alone: row sums are taken before there is a weight, since making one waits.


def _rows(
    blocks: torch.Tensor,
    channel_scale: torch.Tensor | None,
    n: int,
    k: int,
    format: WeightFormat,
    first_strip: int,
    end_strip: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`W4Weight.rows`."""
    first = first_strip * STRIP_ROWS
    n = min(end_strip * STRIP_ROWS, n) - first
    part = blocks[first_strip:end_strip]
    if channel_scale is not None:
        scale = layout.unpack_channel_scale(channel_scale[first:], n)
    else:
        scale = layout.unpack_scales(part, n, k, format, torch_dtype(format.scale_type))
    zero = layout.unpack_zeros(part, n, k, format) if format.zero_point else None
    return layout.unpack_codes(part, n, k, format), scale, zero


def _row_offsets(
    blocks: torch.Tensor, n: int, k: int, format: WeightFormat, first_strip: int, end_strip: int
) -> torch.Tensor | None:
    """`W4Weight.row_offsets`."""
    if not format.offset:
        return None
    n = min(end_strip * STRIP_ROWS, n) - first_strip * STRIP_ROWS
    return layout.unpack_offsets(blocks[first_strip:end_strip], n, k, format, torch_dtype(format.scale_type))


def _row_sums(
    blocks: torch.Tensor, channel_scale: torch.Tensor | None, n: int, k: int, format: WeightFormat
) -> torch.Tensor:
    """Each row's sum of dequantised weights, summed up in fp64: fp32 [64 * strips], zero where there is no row."""
    sums = torch.zeros(layout.strips_of(n) * STRIP_ROWS, dtype=torch.float32, device=blocks.device)
    for first, end in layout.strip_chunks(n, k):
        q, scale, zero = _rows(blocks, channel_scale, n, k, format, first, end)
        offset = _row_offsets(blocks, n, k, format, first, end)
        total = torch.zeros(q.shape[0], dtype=torch.float64, device=blocks.device)
        column = 0
        for part, _ in by_group(q, scale, format.group_size or k):
            count = part.shape[-1]
            codes = part.sum(-1, dtype=torch.int32)
            codes = codes[:, None] if codes.dim() == 1 else codes
            groups = slice(column, column + codes.shape[1])
            column += codes.shape[1]
            if zero is not None:
                codes = codes - count * zero[:, groups].to(torch.int32)
            total += (codes * scale[:, groups].double()).sum(1)
            if offset is not None:
                total += count * offset[:, groups].double().sum(1)
        sums[first * STRIP_ROWS : first * STRIP_ROWS + q.shape[0]] = total.float()
    return sums


def _check_permutation(permutation: torch.Tensor, k: int) -> torch.Tensor:
    """As int32, with the values 0..k-1 once each; not looked at while a CUDA graph is captured."""
    if permutation.dtype not in _ZERO_DTYPES:
        raise TypeError(f"permutation: expected an integer dtype, got {dtype_name(permutation.dtype)}")
    if tuple(permutation.shape) != (k,):
        raise ValueError(f"permutation: expected shape [{k}], got {list(permutation.shape)}")
    indices = permutation.to(torch.int64)
    if not (permutation.is_cuda and _capturing(permutation.device)):
        if not torch.equal(indices.sort().values, torch.arange(k, device=permutation.device)):
            raise ValueError(f"permutation: expected every value of 0..{k - 1} once, got repeated or other values")
    return indices.to(torch.int32).contiguous()


def _check_int(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None


def _check_range(name: str, values: torch.Tensor, low: int, high: int) -> None:
    least, most = torch.stack(values.aminmax()).tolist() if values.numel() else (low, high)
    if least < low or most > high:
        raise ValueError(f"{name}: expected values {low}..{high}, got {least}..{most}")


def _read_form(q: torch.Tensor, groups: int, group_size: int, zero_point: bool, k: int | None) -> tuple[int, bool]:
    """Tell one value each from canonical: (k, canonical)."""
    columns = q.shape[1]
    signed_bytes = "q: expected int8 for signed codes, one value each (uint8 holds them only as canonical [n, k / 2])"

    def fits(k: int) -> bool:
        known_group = group_size >= k or group_size in GROUP_SIZES
        return k > 0 and k % 32 == 0 and known_group and _group_count(k, group_size) == groups

    if q.dtype == torch.int8:
        if k is not None and k != columns:
            raise ValueError(f"q: expected shape [n, k = {k}] for int8, one value each, got {list(q.shape)}")
        return columns, False
    if k is not None:
        if k not in (columns, 2 * columns):
            raise ValueError(
                f"q: expected shape [n, k = {k}], or the canonical [n, k / 2 = {k // 2}], got {list(q.shape)}"
            )
        if k == columns and not zero_point:
            raise TypeError(f"{signed_bytes}, got uint8 {list(q.shape)} with k = {k}")
        return k, k != columns
    if not zero_point:
        if fits(columns) and not fits(2 * columns):
            raise TypeError(f"{signed_bytes}, got uint8 {list(q.shape)} with {groups} groups of {group_size}")
        return 2 * columns, True
    one_each, canonical = fits(columns), fits(2 * columns)
    if one_each and canonical and group_size not in GROUP_SIZES and group_size == 2 * columns:
        return 2 * columns, True  # such a group size is only ever k itself
    if one_each and canonical:
        raise ValueError(
            f"k: expected the argument k to say whether q uint8 {list(q.shape)} is k = {columns}, one value each, or "
            f"k = {2 * columns}, canonical: scale [n, {groups}] with group_size {group_size} fits both; got None"
        )
    if one_each or canonical:
        return (columns, False) if one_each else (2 * columns, True)
    least_k = 2 * columns if columns % 32 == 16 else columns
    _check_sizes(q.shape[0], least_k)
    weight_format(least_k, group_size, True, "fp32")
    raise ValueError(
        f"scale: expected {_group_count(columns, group_size)} columns for q {list(q.shape)} read as one value each, or "
        f"{_group_count(2 * columns, group_size)} read as canonical, with group_size {group_size}, got {groups}"
    )
