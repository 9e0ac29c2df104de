"""The exact GEMM that the kernels are held against, as public calls: `exact.py` of arguments that are checked here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jitgemm.dtypes import REAL_TYPES
from jitgemm.gemm.exact import write_reference
from jitgemm.gemm.problem import GROUPED_POINTERS, X, X_SCALE, X_ZERO, Gemm, Groups, Lhs, check_groups, check_scales
from jitgemm.gemm.problem import check_weight, experts_of, split_lhs
from jitgemm.kernel.formats import lhs_columns
from jitgemm.runtime.launch import check_addresses
from jitgemm.tensors import check_device, check_dtype, check_no_grad, check_plain, check_tensor, describe, dtype_name
from jitgemm.weight.parts import check_packed, check_rotated

if TYPE_CHECKING:
    from jitgemm.weight.packed import Weight


def gemm_w4a8_reference(
    lhs: Lhs, rhs: Weight, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """lhs · rhsᵀ with scales, rounded once; for weights of 8 bits too.

    int8: the sum of each group is an exact integer, scaled and added up in fp64. e4m3: a weight times its scale is
    exact in fp64, and so is its product with an activation; the products are added up in fp64. Activations with a scale
    per token and 128 k are multiplied by it first, which is exact.

    Args:
        lhs: x, float8_e4m3fn or int8 [m, k] (sums behind it are not looked at), x_scale, fp32 [m], [m, 1], one element
            or [m, ceil(k / 128)], or e8m0 as `gemm_w4a8_nt` takes it, int8 may have x_zero, int32 of three shapes.
        rhs: a weight [n, k] on the same device.
        bias: [n], any float type, or None.
        out_dtype: bfloat16, float16, float32 or float64.

    Returns:
        [m, n] of out_dtype on lhs's device: the fp64 result, correctly rounded to nearest even.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device, or x_scale or bias requires grad and gradients are on.
    """
    check_packed(check_weight(rhs), "rhs.", experts=False)
    m = _check(lhs, rhs, bias, (rhs.n,), out_dtype)
    out = torch.empty((m, rhs.n), dtype=out_dtype, device=rhs.device)
    write_reference(Gemm(*split_lhs(lhs), rhs.packed, out, bias))
    return out


def m_grouped_gemm_w4a8_reference(
    lhs: Lhs, rhs: Weight, offsets: torch.Tensor, *, row_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What `m_grouped_gemm_w4a8_nt_contiguous` computes, rounded once; waits for the device.

    Args:
        lhs, rhs, offsets, row_index, bias: as that call takes them.
        out: [M, n] of any float type to write to, whose rows of no expert stay as they are; None for zeros of
            out_dtype.

    Raises:
        TypeError, ValueError: as that call for rhs, offsets and row_index, else as `gemm_w4a8_reference`.
    """
    experts, x = experts_of(rhs), split_lhs(lhs)[0]
    rows = _check(lhs, rhs, bias, (experts, rhs.n), out_dtype)
    if row_index is not None:
        rows = check_tensor("row_index", row_index).numel()
    groups = Groups(check_tensor("offsets", offsets), row_index, 0, 1)
    check_groups(groups, experts, rows, x.device)
    if out is None:
        out = torch.zeros((rows, rhs.n), dtype=out_dtype, device=rhs.device)
    check_plain("out", check_tensor("out", out))
    if tuple(out.shape) != (rows, rhs.n) or not out.is_floating_point():
        raise ValueError(f"out: expected a float type and shape {[rows, rhs.n]}, got {describe(out)}")
    check_device("out", out, "rhs", rhs.device)
    gemm = Gemm(*split_lhs(lhs), rhs.packed, out, bias, groups)
    check_addresses(GROUPED_POINTERS, gemm.operands())
    write_reference(gemm)
    return out


def _check(
    lhs: Lhs, rhs: Weight, bias: torch.Tensor | None, bias_shape: tuple[int, ...], out_dtype: torch.dtype
) -> int:
    """m of arguments that fit together."""
    x, x_scale, x_zero = split_lhs(lhs)
    check_rotated(lhs, getattr(rhs, "rotation", 0))
    check_dtype(X, x.dtype, rhs.format.for_any_values.lhs_types)
    columns = rhs.k, lhs_columns(rhs.k, rhs.correction)
    if x.dim() != 2 or x.shape[1] not in columns:
        raise ValueError(f"{X}: expected shape [m, {rhs.k}], got {list(x.shape)}")
    check_scales(x, x_scale, x_zero, (x.shape[0],), rhs.k)
    if bias is not None and tuple(check_tensor("bias", bias).shape) != bias_shape:
        raise ValueError(f"bias: expected shape {list(bias_shape)}, got {list(bias.shape)}")
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias: expected a float type, got {dtype_name(bias.dtype)}")
    for name, tensor in ((X, x), (X_SCALE, x_scale), (X_ZERO, x_zero), ("bias", bias)):
        if tensor is not None:
            check_plain(name, tensor)
            check_device(name, tensor, "rhs", rhs.device)
            check_no_grad(name, tensor)
    if out_dtype is not torch.float64:
        check_dtype("out_dtype", out_dtype, REAL_TYPES)
    return x.shape[0]
