"""W4Weight, a 4-bit weight in the kernel's order, and pack_w4, which makes one.

Checks what a caller gives and says what is wrong with it; the order of the bytes is `layout.py`'s business. Knows
nothing of kernels, configurations or the driver.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from jitgemm import layout
from jitgemm.spec import GROUP_SIZES, STRIP_ROWS, WeightFormat, ceil_div

SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALE_TYPES = {dtype: name for name, dtype in SCALE_DTYPES.items()}
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
_META_FIELDS = ("magic", "layout_version", "n", "k", "group_size", "zero_point", "scale_type")
_META_SCALE_TYPES = ("fp32", "bf16", "fp16")  # by their number in the meta tensor; append only


def _group_count(k: int, group_size: int) -> int:
    return 1 if group_size >= k else ceil_div(k, group_size)


def weight_format(k: int, group_size: int, zero_point: bool, scale_type: str) -> WeightFormat:
    """The format of a weight with k columns. Raises ValueError for a group size that it cannot have."""
    if group_size < 1 or (group_size < k and group_size not in GROUP_SIZES):
        raise ValueError(f"group_size: expected one of {GROUP_SIZES}, or k = {k} for per channel, got {group_size}")
    return WeightFormat(0 if group_size >= k else group_size, zero_point, scale_type)


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

    Weight (row, column) is (q - zero) * scale, with the scale and zero point of its group of `group_size` columns.

    Attributes:
        blocks: uint8 [ceil(n / 64), ceil(k / 128), format.record_bytes], contiguous, in the order `layout.py` draws.
        channel_scale: [64 * ceil(n / 64)] in the scale's own type when the weight is per channel, else None.
        n, k: rows and columns of the weight.
        group_size: as given to `pack_w4`; at least k means one scale per row.
        format: the layout of a record.
        layout_version: version of the packed order that `blocks` follows.
        plan_key: what of the weight decides which calls are legal and which kernel runs.

    On CUDA, kernels read a weight before they wait for the kernel before them, if the weight is `settled`: what wrote it
    has ended. Making a weight settles it. Writing `blocks` in place through PyTorch unsettles it, and calls wait again;
    whoever writes it in another way (`.data`, a raw pointer) calls `settle()` before the next GEMM.

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
    plan_key: tuple[Any, ...] = field(init=False)
    _settled_at: tuple[int, int] | None = field(init=False, default=None)  # address and version of blocks

    def __post_init__(self) -> None:
        if self.layout_version != layout.LAYOUT_VERSION:
            raise ValueError(
                f"layout_version: expected {layout.LAYOUT_VERSION}, got {self.layout_version}; pack the weight again"
            )
        _check_sizes(self.n, self.k)
        expected = weight_format(self.k, self.group_size, self.format.zero_point, self.format.scale_type)
        if self.format != expected:
            raise ValueError(f"format: expected {expected} for group_size {self.group_size}, got {self.format}")
        _check_packed(
            "blocks",
            self.blocks,
            (layout.strips_of(self.n), layout.kblocks_of(self.k), self.format.record_bytes),
            torch.uint8,
        )
        if self.format.group_size == 0:
            if self.channel_scale is None:
                raise ValueError("channel_scale: expected a tensor for a per-channel weight, got None")
            rows = layout.strips_of(self.n) * STRIP_ROWS
            _check_packed("channel_scale", self.channel_scale, (rows,), self.scale_dtype)
            if self.channel_scale.device != self.blocks.device:
                raise ValueError(f"channel_scale: expected {self.blocks.device}, got {self.channel_scale.device}")
        elif self.channel_scale is not None:
            raise ValueError(f"channel_scale: expected None for group_size {self.group_size}, got a tensor")
        fmt = self.format
        key = (self.n, self.k, fmt.group_size, fmt.zero_point, fmt.scale_type, self.blocks.device)
        object.__setattr__(self, "plan_key", key)
        self.settle()

    def settle(self) -> bool:
        """Waits for what the current stream still writes, so that kernels may read the weight ahead of their turn.

        Returns:
            Whether the weight is settled now: not while a CUDA graph is being captured, where nothing can be waited for,
            nor for inference tensors, which do not tell when they are written, nor for fake ones, which have no address.
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
        )

    def __repr__(self) -> str:
        codes = "unsigned with zero points" if self.format.zero_point else "signed"
        group = f"group_size={self.group_size}" if self.format.group_size else "per channel"
        scale = self.format.scale_type
        return f"W4Weight(n={self.n}, k={self.k}, {group}, {codes}, {scale} scales, device='{self.device}')"

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
        return SCALE_DTYPES[self.format.scale_type]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, padding included."""
        return self.blocks.nbytes + (self.channel_scale.nbytes if self.channel_scale is not None else 0)

    def to(self, device: torch.device | str | int) -> W4Weight:
        """The same weight on another device; itself when it is there already."""
        device = torch.empty(0, device=device).device  # "cuda" -> the current one's index
        if device == self.device:
            return self
        with torch.inference_mode(False):
            channel_scale = self.channel_scale.to(device) if self.channel_scale is not None else None
            return W4Weight(self.blocks.to(device), channel_scale, self.n, self.k, self.group_size, self.format)

    def rows(self, first_strip: int, end_strip: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Unpack some strips of 64 rows.

        Returns:
            q, scale, zero as `unpack` gives them, of rows 64 * first_strip up to min(64 * end_strip, n).
        """
        first = first_strip * STRIP_ROWS
        n = min(end_strip * STRIP_ROWS, self.n) - first
        part = self.blocks[first_strip:end_strip]
        if self.channel_scale is not None:
            scale = layout.unpack_channel_scale(self.channel_scale[first:], n)
        else:
            scale = layout.unpack_scales(part, n, self.k, self.format, self.scale_dtype)
        zero = layout.unpack_zeros(part, n, self.k, self.format) if self.format.zero_point else None
        return layout.unpack_codes(part, n, self.k, self.format), scale, zero

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What was packed, bit for bit.

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
        """(q - zero) * scale as fp32 [n, k]: the scale widened to fp32, one rounding."""
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
        return out

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Plain contiguous tensors for torch.save or safetensors; they share memory with the weight.

        Returns:
            `prefix` + "blocks", "channel_scale" (per channel only) and "meta", a small int64 tensor on the CPU with the
            layout version and sizes.
        """
        meta = (
            _META_MAGIC,
            self.layout_version,
            self.n,
            self.k,
            self.group_size,
            int(self.format.zero_point),
            _META_SCALE_TYPES.index(self.format.scale_type),
        )
        tensors = {prefix + "blocks": self.blocks, prefix + "meta": torch.tensor(meta, dtype=torch.int64, device="cpu")}
        if self.channel_scale is not None:
            tensors[prefix + "channel_scale"] = self.channel_scale
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
            raise ValueError(
                f"{key}: expected int64 [{len(_META_FIELDS)}], got {_dtype(meta.dtype)} {list(meta.shape)}"
            )
        values = meta.tolist()
        if values[0] != _META_MAGIC:
            raise ValueError(f"{key}: expected a packed W4 weight, got another tensor (first value {values[0]})")
        if values[1] != layout.LAYOUT_VERSION:
            raise ValueError(
                f"{key}: expected layout version {layout.LAYOUT_VERSION}, got {values[1]}; pack the weight again"
            )
        if len(values) != len(_META_FIELDS):
            raise ValueError(f"{key}: expected {len(_META_FIELDS)} values, got {len(values)}")
        _, version, n, k, group_size, zero_point, scale_type = values
        if zero_point not in (0, 1) or not 0 <= scale_type < len(_META_SCALE_TYPES):
            raise ValueError(f"{key}: expected zero_point 0 or 1 and a known scale type, got {values[5:]}")
        blocks, channel_scale = tensors[prefix + "blocks"], tensors.get(prefix + "channel_scale")
        try:
            format = weight_format(k, group_size, bool(zero_point), _META_SCALE_TYPES[scale_type])
            return cls(_aligned(blocks), _aligned(channel_scale), n, k, group_size, format, version)
        except ValueError as error:
            raise ValueError(f"state dict: {prefix}{error}") from None


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy where a tensor read from a file does not start at 16 bytes."""
    return tensor.clone() if tensor is not None and tensor.data_ptr() % 16 else tensor


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


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_packed(name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: expected {_dtype(dtype)} {list(shape)}, got {_dtype(tensor.dtype)} {list(tensor.shape)}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    if tensor.is_cuda and tensor.data_ptr() % 16:
        raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got {tensor.data_ptr():#x}")


def pack_w4(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group_size: int,
    k: int | None = None,
) -> W4Weight:
    """Pack a 4-bit weight into the kernel's order, once, on the device where it is.

    The weight is (q - zero) * scale; scales are applied as they are, never rounded or converted. Any strides will do.

    Args:
        q: the codes, n a multiple of 8 and k a multiple of 32, in one of these forms:

            - int8 [n, k], one value each: -8..7, or 0..15 with zero points;
            - uint8 [n, k], one value each, 0..15, only with zero points;
            - uint8 [n, k / 2], the canonical form: even k in the low nibble, odd k in the high nibble; two's
              complement without zero points, 0..15 with them.

            Which of the last two is meant follows from scale's columns.
        scale: fp32, bf16 or fp16 [n, ceil(k / group_size)]; values are not scanned.
        zero: None for signed codes, or integers 0..16 of any width, [n, ceil(k / group_size)].
        group_size: 32, 64, 128 or 256 values of k share a scale; k (or more) for one scale per row.
        k: only needed where both readings of a uint8 q fit scale.

    Returns:
        The packed weight on q's device. The CPU and the GPU give the same bytes. On a GPU the current stream is
        synchronised, unless it is being captured: then values of q and zero are not scanned and the weight is not
        `settled`.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype.
        ValueError: wrong shape or device, values out of range, or a form that cannot be told.
    """
    for name, tensor in (("q", q), ("scale", scale), ("zero", zero)):
        if not isinstance(tensor, torch.Tensor) and not (name == "zero" and tensor is None):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if q.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"q: expected int8 or uint8, got {_dtype(q.dtype)}")
    if scale.dtype not in _SCALE_TYPES:
        raise TypeError(f"scale: expected float32, bfloat16 or float16, got {_dtype(scale.dtype)}")
    if zero is not None and zero.dtype not in _ZERO_DTYPES:
        raise TypeError(f"zero: expected an integer dtype, got {_dtype(zero.dtype)}")
    group_size = _check_int("group_size", group_size)
    k = None if k is None else _check_int("k", k)
    if q.dim() != 2:
        raise ValueError(f"q: expected 2 dimensions, [n, k] or [n, k / 2], got shape {list(q.shape)}")
    n = q.shape[0]
    if scale.dim() != 2 or scale.shape[0] != n:
        raise ValueError(f"scale: expected shape [n, ceil(k / group_size)] with n = {n}, got {list(scale.shape)}")
    for name, tensor in (("scale", scale), ("zero", zero)):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {tensor.device}")
    if group_size < 1:
        raise ValueError(f"group_size: expected one of {GROUP_SIZES}, or k for per channel, got {group_size}")

    k, canonical = _read_form(q, scale.shape[1], group_size, zero is not None, k)
    _check_sizes(n, k)
    format = weight_format(k, group_size, zero is not None, _SCALE_TYPES[scale.dtype])
    groups = _group_count(k, group_size)
    if scale.shape[1] != groups:
        raise ValueError(
            f"scale: expected shape [{n}, {groups}] for k = {k} and group_size {group_size}, got {list(scale.shape)}"
        )
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"zero: expected scale's shape {list(scale.shape)}, got {list(zero.shape)}")

    with torch.inference_mode(False), torch.no_grad():
        if not (q.is_cuda and _capturing(q.device)):  # a value cannot be looked at during capture
            if not canonical:
                _check_range("q", q, *((0, 15) if zero is not None else (-8, 7)))
            if zero is not None:
                _check_range("zero", zero.to(torch.int64), 0, MAX_ZERO)
        zero = None if zero is None else zero.to(torch.uint8)
        blocks = layout.pack_records(q, scale, zero, k=k, canonical=canonical, format=format)
        channel_scale = None if format.group_size else layout.pack_channel_scale(scale)
        return W4Weight(blocks, channel_scale, n, k, group_size, format)


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
