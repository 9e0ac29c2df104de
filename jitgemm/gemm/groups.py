"""A grouped call's arguments beside a dense one's, and their checks: which rows are which expert's."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitgemm.gemm.arguments import POINTERS, Operands, check_arguments, check_weight
from jitgemm.runtime.checks import Pointer, check_device
from jitgemm.tensors import check_dtype, check_plain, check_tensor, differ, dtype_name, known
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import PackedWeight, count_experts

GROUPED_POINTERS = (Pointer("sizes", "offsets or masked_m"), Pointer("row_index", "row_index"), *POINTERS)
"""What a launch has addresses of, in the order of `GroupedArgs` in include/jitgemm/gemm/types.cuh."""


class Groups(NamedTuple):
    """Which rows are whose.

    Attributes:
        sizes: [E + 1], first rows and the last one's end; [E, 2], first row and end of each; or [E], rows of each.
        row_index: which row of x each row is, or None for the same.
        rows_of_expert: rows from one expert's first to the next one's where `sizes` are numbers of rows; else 0.
        expected_rows: of all experts together, a hint.
    """

    sizes: torch.Tensor
    row_index: torch.Tensor | None
    rows_of_expert: int
    expected_rows: int


def experts_of(rhs: object, kind: type[Weight] = Weight) -> int:
    if not isinstance(rhs, PackedWeight):
        check_weight(rhs, kind)
    count = count_experts(rhs.blocks)
    if count is None:
        raise ValueError(
            f"rhs: expected a weight of experts, got a dense one, which gemm_w{rhs.format.bits}a8_nt takes"
        )
    return count


def as_rows(name: str, tensor: torch.Tensor, experts: int, max_m: int, columns: str) -> torch.Tensor:
    """[E, max_m, columns] as [E * max_m, columns], or [E, max_m] as [E * max_m], without a copy."""
    if not columns and (tensor.dim() == 3 or (known(tensor.numel() == 1) and tensor.dim() <= 2)):
        return tensor  # scales per token and group keep the dimension of the experts: their strides are free
    if tensor.dim() != 2 + bool(columns) or differ(tensor.shape[:2], (experts, max_m)):
        shape = f"[{experts}, {max_m}{', ' + columns if columns else ''}]"  # here, as a compiler fixes what it prints
        raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
    try:
        return tensor.view(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])
    except RuntimeError:
        raise ValueError(
            f"{name}: expected strides of a view of all rows, one expert {max_m} row strides behind the other, got "
            f"{tuple(tensor.stride())}"
        ) from None


def check_grouped(operands: Operands, groups: Groups) -> None:
    """Raises TypeError or ValueError unless dtypes, shapes, strides and devices fit together."""
    rows = operands.out.shape[0] if operands.out.dim() == 2 else -1
    gathers, masked = groups.row_index is not None, not known(groups.rows_of_expert == 0)
    check_arguments(operands, grouped=True, gathers=gathers, masked=masked)
    check_groups(groups, experts_of(operands.weight), rows, operands.x.device)


def check_groups(groups: Groups, experts: int, rows: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless the groups are of this many experts and rows, on x's device."""
    sizes, row_index, rows_of_expert, _ = groups
    masked = not known(rows_of_expert == 0)
    name = "masked_m" if masked else "offsets"
    check_plain(name, sizes)
    if sizes.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {dtype_name(sizes.dtype)}")
    shapes = ((experts,),) if masked else ((experts + 1,), (experts, 2))
    if all(differ(sizes.shape, shape) for shape in shapes) or not sizes.is_contiguous():
        expected = f"[{experts}]" if masked else f"[{experts + 1}] or [{experts}, 2]"
        raise ValueError(f"{name}: expected a contiguous tensor of shape {expected}, got {list(sizes.shape)}")
    check_device(name, sizes, "lhs[0] (x)", device)
    if row_index is not None:
        check_plain("row_index", check_tensor("row_index", row_index))
        check_dtype("row_index", row_index.dtype, ("s32",))
        if differ(row_index.shape, (rows,)) or not row_index.is_contiguous():
            raise ValueError(f"row_index: expected a contiguous tensor of shape [{rows}], got {list(row_index.shape)}")
        check_device("row_index", row_index, "lhs[0] (x)", device)
