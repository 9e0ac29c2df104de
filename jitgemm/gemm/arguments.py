"""Checks of a GEMM call's arguments: what each must be, in one message that names it, what was expected and what came.

Works on real and fake tensors alike; looks at dtypes, shapes, strides and devices here, at addresses in
`check_addresses`. Never at values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jitgemm.dtypes import DTYPES, LHS_TYPES, REAL_TYPES
from jitgemm.kernel.formats import MAX_INT8_CHANNEL_K, MAX_ROWS, WeightFormat
from jitgemm.tensors import check_dtype, check_tensor, dtype_name
from jitgemm.weight.w4 import plan_key

ALIGNMENT = 16
"""Addresses and row strides of TMA tensors are multiples of so many bytes (CUDA driver API, cuTensorMapEncodeTiled)."""
CHANNEL_SCALE_ALIGNMENT = 4
"""The same of scales per channel, which are copied so many bytes at a time."""


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight as a call sees it: its tensors and what they hold. A `W4Weight` has these attributes too."""

    blocks: torch.Tensor
    channel_scale: torch.Tensor | None
    n: int
    k: int
    format: WeightFormat
    row_sum: torch.Tensor | None = None

    @property
    def plan_key(self) -> int:
        """As `W4Weight.plan_key`."""
        return plan_key(self.n, self.k, self.format, self.blocks.device)


_LHS_NAMES = ("lhs[0] (x)", "lhs[1] (x_scale)", "lhs[2] (x_zero)")


def split_lhs(lhs: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(x, x_scale, x_zero or None) out of the call's first argument."""
    if not isinstance(lhs, (tuple, list)) or len(lhs) not in (2, 3):
        what = f"{type(lhs).__name__} of {len(lhs)}" if isinstance(lhs, (tuple, list)) else type(lhs).__name__
        raise TypeError(f"lhs: expected a pair (x, x_scale), or (x, x_scale, x_zero), got {what}")
    tensors = [check_tensor(name, tensor) for name, tensor in zip(_LHS_NAMES, lhs)]
    return tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None


def _rows(name: str, tensor: torch.Tensor, columns: int, what: str) -> None:
    """A matrix with contiguous rows whose stride TMA can walk."""
    if tensor.dim() != 2:
        raise ValueError(f"{name}: expected shape {what}, got {list(tensor.shape)}")
    if tensor.shape[1] != columns:
        raise ValueError(f"{name}: expected shape {what} with {columns} columns, got {list(tensor.shape)}")
    if tensor.stride(1) != 1:
        raise ValueError(f"{name}: expected stride 1 along its columns, got strides {tuple(tensor.stride())}")
    # One row has no stride to walk.
    if tensor.shape[0] > 1:
        unit = ALIGNMENT // tensor.element_size()
        if tensor.stride(0) % unit != 0:
            raise ValueError(
                f"{name}: expected a row stride that is a multiple of {unit} elements ({ALIGNMENT} bytes), "
                f"got {tensor.stride(0)}"
            )
        if tensor.stride(0) < columns:
            raise ValueError(
                f"{name}: expected rows that do not overlap (row stride at least {columns}), "
                f"got row stride {tensor.stride(0)}"
            )


def _check_per_token(name: str, tensor: torch.Tensor, m: int, type: str) -> None:
    """One value per token, or one for all."""
    check_dtype(name, tensor.dtype, (type,))
    per_token = (tensor.dim() == 1 or (tensor.dim() == 2 and tensor.shape[1] == 1)) and tensor.shape[0] == m
    per_tensor = tensor.numel() == 1 and tensor.dim() <= 2
    if not (per_token or per_tensor):
        raise ValueError(f"{name}: expected shape [{m}], [{m}, 1] or one element, got {list(tensor.shape)}")


def check_arguments(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    x_zero: torch.Tensor | None = None,
) -> None:
    """Raises TypeError or ValueError unless dtypes, shapes, strides and devices fit together."""
    n, k = weight.n, weight.k
    names = (*_LHS_NAMES, "out", "bias")
    for name, tensor in zip(names, (x, x_scale, x_zero, out, bias)):
        if tensor is not None and (tensor.layout != torch.strided or tensor.is_neg()):
            kind = "a lazily negated one" if tensor.layout == torch.strided else f"layout {tensor.layout}"
            raise TypeError(f"{name}: expected a plain strided tensor, got {kind}")
    lhs_type = check_dtype("lhs[0] (x)", x.dtype, LHS_TYPES)
    _rows("lhs[0] (x)", x, k, "[m, k]")
    m = x.shape[0]
    if m > MAX_ROWS or n > MAX_ROWS:
        name, rows = ("lhs[0] (x)", m) if m > MAX_ROWS else ("rhs", n)
        raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {rows}")
    if x.dtype == torch.int8 and weight.format.group_size == 0 and k > MAX_INT8_CHANNEL_K:
        raise ValueError(
            f"lhs[0] (x): expected k of at most {MAX_INT8_CHANNEL_K} for int8 with scales per channel, whose sums are "
            f"32-bit, got {k}"
        )

    if weight.format.codes not in ("any", lhs_type):
        packed_for = DTYPES[weight.format.codes].torch_name
        raise TypeError(
            f"lhs[0] (x): expected {packed_for}, for which rhs was packed (lhs_dtype of pack_w4), got {dtype_name(x.dtype)}"
        )

    _check_per_token("lhs[1] (x_scale)", x_scale, m, "fp32")
    if x_zero is not None:
        if x.dtype != torch.int8:
            raise TypeError(f"lhs[0] (x): expected int8 beside lhs[2] (x_zero), got {dtype_name(x.dtype)}")
        _check_per_token("lhs[2] (x_zero)", x_zero, m, "s32")
        if weight.row_sum is None:
            raise ValueError("rhs: expected a weight with row_sum, which lhs[2] (x_zero) needs, got one without")

    check_dtype("out", out.dtype, REAL_TYPES)
    _rows("out", out, n, "[m, n]")
    if out.shape[0] != m:
        raise ValueError(f"out: expected shape [{m}, {n}], got {list(out.shape)}")
    if out.requires_grad:
        raise ValueError("out: expected a tensor that does not require grad, got one that does")

    if bias is not None:
        check_dtype("bias", bias.dtype, ("bf16", "fp32"))
        if bias.dim() != 1 or bias.shape[0] != n:
            raise ValueError(f"bias: expected shape [{n}], got {list(bias.shape)}")
        if bias.stride(0) != 1:
            raise ValueError(f"bias: expected a contiguous tensor, got stride {bias.stride(0)}")

    device = x.device
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"lhs[0] (x): expected a CUDA or CPU tensor, got one on {device}")
    others = (x_scale, x_zero, weight.blocks, out, bias)
    for name, tensor in zip((*_LHS_NAMES[1:], "rhs", "out", "bias"), others):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, where lhs[0] (x) is, got one on {tensor.device}")


def per_token_stride(tensor: torch.Tensor | None) -> int:
    """Elements between the values of consecutive tokens; 0 when one element serves all, or there is none."""
    return 0 if tensor is None or tensor.numel() == 1 else tensor.stride(0)


def byte_extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a byte. Column slices of one matrix interleave without sharing any."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a + byte_extent(a) <= start_b or start_b + byte_extent(b) <= start_a:
        return False
    if b.dim() == 1:
        b = b[:, None]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] < 2 or b.shape[0] < 2:
        return byte_extent(a) > 0 and byte_extent(b) > 0
    pitch = a.stride(0) * a.element_size()
    if pitch != b.stride(0) * b.element_size():
        return True
    # Rows of the same pitch: they meet only if their windows within the pitch do, wrapping around it.
    offset = (start_b - start_a) % pitch
    return offset < a.shape[1] * a.element_size() or offset + b.shape[1] * b.element_size() > pitch


def check_addresses(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    x_zero: torch.Tensor | None = None,
) -> None:
    """Raises ValueError for a misaligned tensor or an output that overlaps an input."""
    if x.is_cuda:
        aligned = (
            ("lhs[0] (x)", x, ALIGNMENT),
            ("out", out, ALIGNMENT),
            ("rhs.blocks", weight.blocks, ALIGNMENT),
            ("rhs.channel_scale", weight.channel_scale, CHANNEL_SCALE_ALIGNMENT),
        )
        for name, tensor, alignment in aligned:
            if tensor is not None and tensor.data_ptr() % alignment:
                raise ValueError(
                    f"{name}: expected an address that is a multiple of {alignment} bytes, "
                    f"got one that is {tensor.data_ptr() % alignment} bytes past it"
                )
    inputs = (
        ("lhs[0] (x)", x),
        ("lhs[1] (x_scale)", x_scale),
        ("lhs[2] (x_zero)", x_zero),
        ("rhs.blocks", weight.blocks),
        ("rhs.channel_scale", weight.channel_scale),
        ("rhs.row_sum", weight.row_sum),
        ("bias", bias),
    )
    for name, tensor in inputs:
        if tensor is not None and _overlap(out, tensor):
            raise ValueError(f"out: expected memory of its own, got a tensor that overlaps {name}")
