"""Checks that both calls make of the tensors of a launch: plain ones, rows that TMA can walk, memory of their own.

Looks at dtypes, shapes, strides and devices of real and fake tensors; at addresses only in `check_addresses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from jitgemm.kernel.formats import MAX_ROWS
from jitgemm.tensors import check_dtype, check_plain, check_tensor, statically_true

ALIGNMENT = 16
"""Addresses and row strides of TMA tensors are multiples of so many bytes (CUDA driver API, cuTensorMapEncodeTiled)."""


def check_rows(name: str, tensor: torch.Tensor, *, may_overlap: bool = False) -> None:
    """A matrix with contiguous rows whose stride TMA can walk."""
    rows, columns = tensor.shape
    if statically_true(tensor.stride(1) != 1) and statically_true(columns > 1):
        raise ValueError(f"{name}: expected stride 1 along its columns, got strides {tuple(tensor.stride())}")
    if statically_true(rows > MAX_ROWS):
        raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {rows}")
    if statically_true(rows < 2):  # one row has no stride to walk
        return
    unit = ALIGNMENT // tensor.element_size()
    if statically_true(tensor.stride(0) % unit != 0):
        multiple = f"a row stride that is a multiple of {unit} elements ({ALIGNMENT} bytes)"
        raise ValueError(f"{name}: expected {multiple}, got {tensor.stride(0)}")
    if statically_true(tensor.stride(0) < columns) and not may_overlap:
        apart = f"rows that do not overlap (row stride at least {columns})"
        raise ValueError(f"{name}: expected {apart}, got row stride {tensor.stride(0)}")


def check_vector(name: str, value: object, types: tuple[str, ...], elements: int) -> None:
    """A contiguous vector, or for one element a tensor of any shape."""
    tensor = check_tensor(name, value)
    check_dtype(name, tensor.dtype, types)
    check_plain(name, tensor)
    several = statically_true(elements > 1)
    if statically_true(tensor.numel() != elements) or (several and tensor.dim() != 1):
        expected = f"shape [{elements}]" if several else "one element"
        raise ValueError(f"{name}: expected {expected}, got shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def check_device(name: str, tensor: torch.Tensor, where: str, device: torch.device) -> None:
    """The device is that of the call's first tensor, whose name is `where`."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where {where} is, got one on {tensor.device}")


# ---- addresses -------------------------------------------------------------------------------------------------------


class Pointer(NamedTuple):
    """An operand of a call: an address that a launch takes.

    Attributes:
        field: its name in the kernel's argument block; None for one that is not in it.
        argument: the caller's name of the tensor there.
        alignment: on a GPU the address is a multiple of so many bytes.
        written: the call writes there; other operands are read.
        in_place: arguments that the tensor may be itself, not only a part of: of its shape, type and columns' stride.
    """

    field: str | None
    argument: str
    alignment: int = 1
    written: bool = False
    in_place: tuple[str, ...] = ()


def check_addresses(pointers: Sequence[Pointer], tensors: Sequence[torch.Tensor | None]) -> None:
    """Raises ValueError for a misaligned CUDA tensor, or one that is written and overlaps another; TypeError for one
    without memory, such as a DTensor next to a plain x.

    Args:
        tensors: what the pointers point to, in their order; None for what the call does without.
    """
    spans = []
    for pointer, tensor in zip(pointers, tensors):
        if tensor is None:
            continue
        start = address_of(tensor) or 0
        if start == 0 and tensor.numel() > 0:
            kind = type(tensor).__name__
            raise TypeError(f"{pointer.argument}: expected a tensor with memory of its own, got a {kind} without")
        if start % pointer.alignment and tensor.is_cuda:
            multiple, past = f"a multiple of {pointer.alignment} bytes", start % pointer.alignment
            raise ValueError(
                f"{pointer.argument}: expected an address that is {multiple}, got one that is {past} bytes past it"
            )
        spans.append((pointer, tensor, start, start + byte_extent(tensor)))
    for i, (pointer, tensor, start, end) in enumerate(spans):
        for j, (other, other_tensor, other_start, other_end) in enumerate(spans if pointer.written else ()):
            apart = end <= other_start or other_end <= start or i == j or (other.written and j > i)
            apart = apart or (other.argument in pointer.in_place and (start, end) == (other_start, other_end))
            if not apart and _share_a_byte(tensor, other_tensor):
                got = f"a tensor that overlaps {other.argument}"
                raise ValueError(f"{pointer.argument}: expected memory of its own, got {got}")


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Where the tensor is, 0 for one that is nowhere, None for None."""
    try:
        return None if tensor is None else tensor.data_ptr()
    except RuntimeError:  # of a fake tensor
        return 0


def byte_extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


def _share_a_byte(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of tensors whose extents cross. Column slices of one matrix interleave without sharing any."""
    if b.dim() == 1:
        b = b[:, None]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] < 2 or b.shape[0] < 2:
        return True
    pitch = a.stride(0) * a.element_size()
    if pitch != b.stride(0) * b.element_size():
        return True
    # Rows of the same pitch: they meet only if their windows within the pitch do, wrapping around it.
    offset = (b.data_ptr() - a.data_ptr()) % pitch
    return offset < byte_extent(a[0]) or offset + byte_extent(b[0]) > pitch
