"""The exact GEMM of checked arguments, which calls on CPU tensors run, and which `reference.py` gives calls of its own.

Written to be right and easy to check, in float64 on any device. Knows packed weights only by `PackedWeight.rows`.

    out[i, j] = x_scale[i] * sum over groups g of sum over k in g of
                    (x[i, k] - x_zero[i]) * ((q[j, k] - zero[j, g]) * scale[j, g] + offset[j, g])
                + bias[j]

With x_scale [m, ceil(k / 128)], x_scale[i, k / 128] * x[i, k] stands for x[i, k] instead.
"""

from __future__ import annotations

import torch

from jitgemm.gemm.problem import Gemm, fp32_scales, lhs_group_of
from jitgemm.kernel.formats import LHS_GROUP, STRIP_ROWS, ceil_div
from jitgemm.tensors import take_rows
from jitgemm.weight.parts import PackedWeight, dequantize_groups, group_count

_BUDGET = 1 << 25
"""Float64 values that one temporary may hold (256 MiB)."""


def write_reference(gemm: Gemm) -> None:
    """Into out, of checked arguments. Rows of experts are clamped to the rows of out, or of an expert."""
    x, x_scale, x_zero, weight, out, bias, groups = gemm[:7]
    weight = weight if isinstance(weight, PackedWeight) else weight.packed
    x = x[:, : weight.k]
    x_scale = fp32_scales(x_scale, weight.k)
    if groups is None:
        _write(x, x_scale, x_zero, weight, out, bias)
        return
    sizes, row_index, rows_of_expert, _ = groups
    sizes = sizes.cpu().long().clamp(0, rows_of_expert or out.shape[0])
    if rows_of_expert:
        ranges = [(e * rows_of_expert, e * rows_of_expert + count) for e, count in enumerate(sizes.tolist())]
    else:
        ranges = (sizes if sizes.dim() == 2 else torch.stack((sizes[:-1], sizes[1:]), 1)).tolist()
    x_scale = x_scale.flatten(0, 1) if x_scale.dim() == 3 else x_scale
    for expert, (begin, end) in enumerate(ranges):
        if begin >= end:
            continue
        rows: slice | torch.Tensor = slice(begin, end)
        if row_index is not None:
            index = row_index[rows].long()
            rows = torch.where((index >= 0) & (index < x.shape[0]), index, x.shape[0] - 1)
        scale = x_scale if x_scale.numel() == 1 else x_scale[rows]
        zero = x_zero if x_zero is None or x_zero.numel() == 1 else x_zero[rows]
        row = None if bias is None else bias[expert]
        _write(take_rows(x, rows), scale, zero, weight.expert(expert), out[begin:end], row)


def round_fp64(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 -> dtype, correctly rounded to nearest even.

    `x.to(bfloat16)` rounds to fp32 first and then again. Rounding to odd in between makes the second rounding right:
    fp32 has more than two bits more than bf16 and fp16 (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd").
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    nearest = x.to(torch.float32)
    back = nearest.to(torch.float64)
    toward_zero = nearest.view(torch.int32) - (back.abs() > x.abs()).to(torch.int32)
    odd = toward_zero | (back != x).to(torch.int32)
    return odd.view(torch.float32).to(dtype)


def _write(
    x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor | None, rhs: PackedWeight, out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:  # fmt: skip
    """The dense GEMM tile by tile, with scales that are no e8m0."""
    m, k = x.shape
    group, group_size = lhs_group_of(x_scale), rhs.format.group_size or k
    x_scale = x_scale.to(torch.float64)
    if not group:
        x_scale = x_scale.reshape(-1, 1).expand(m, 1)
    if x_zero is not None:
        x_zero = x_zero.to(torch.float64).reshape(-1, 1).expand(m, 1)
    groups = group_count(k, group_size) if x.dtype == torch.int8 else 1
    strips = ceil_div(rhs.n, STRIP_ROWS)
    strip_step = max(1, _BUDGET // (k * STRIP_ROWS))
    for strip in range(0, strips, strip_step):
        end = min(strip + strip_step, strips)
        columns = slice(strip * STRIP_ROWS, min(end * STRIP_ROWS, rhs.n))
        d, scale, offset = integers(rhs, strip, end)
        if x.dtype == torch.float8_e4m3fn:  # at most 29 bits, so that weight times scale is exact
            dequantize_groups(d, group_size, scale, offset=offset)
        widest = max(k, d.shape[0] * groups)
        m_step = max(1, _BUDGET // widest)
        for first in range(0, m, m_step):
            rows = slice(first, min(first + m_step, m))
            x_rows = x[rows].to(torch.float32).to(torch.float64)
            if group:
                x_rows *= x_scale[rows].repeat_interleave(LHS_GROUP, 1)[:, :k]
            if x.dtype == torch.int8:
                ref = _int8_tile(x_rows, d, scale, offset, group_size)
                if x_zero is not None:
                    ones = torch.ones_like(x_rows[:1])
                    ref = ref - x_zero[rows] * _int8_tile(ones, d, scale, offset, group_size)
            else:
                ref = x_rows @ d.T
            if not group:
                ref = ref * x_scale[rows]
            if bias is not None:
                ref = ref + bias[columns].to(torch.float64)
            out[rows, columns] = round_fp64(ref, out.dtype)


def integer_sums(x: torch.Tensor, rhs: PackedWeight) -> torch.Tensor:
    """int32 [m, n]: the sums of x, int8 [m, k], times codes without zero points, of a weight with a scale a row."""
    strips = ceil_div(rhs.n, STRIP_ROWS)
    step = max(1, _BUDGET // (rhs.k * STRIP_ROWS))
    parts = [integers(rhs, first, min(first + step, strips))[0] for first in range(0, strips, step)]
    return torch.cat([x.double() @ part.T for part in parts], 1)[:, : rhs.n].to(torch.int32)


def integers(rhs: PackedWeight, strip: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q - zero (e4m3: no integers), scale and offset of some strips, in fp64: [rows, k], twice [rows, groups]."""
    q, scale, zero, offset = rhs.rows(strip, end)
    d = q.to(torch.float64)
    dequantize_groups(d, rhs.format.group_size or rhs.k, zero=zero)
    return d, scale.to(torch.float64), None if offset is None else offset.to(torch.float64)


def _int8_tile(
    x: torch.Tensor, d: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """Integer sums per group, exact in fp64 (below 2^53), then scaled and added up."""
    k, groups = x.shape[1], scale.shape[1]
    if groups == 1:
        return (x @ d.T) * scale.T
    missing = groups * group_size - k
    if missing:
        x, d = (torch.nn.functional.pad(t, (0, missing)) for t in (x, d))
    x = x.view(-1, groups, group_size).transpose(0, 1)
    d = d.view(-1, groups, group_size).permute(1, 2, 0)
    terms = torch.bmm(x, d)
    terms *= scale.T[:, None, :]
    ref = terms.sum(0)
    return ref if offset is None else ref + x.sum(-1).T @ offset.T
