"""What packers ask of the tensors that they are given, and the sums of rows that they make."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jitgemm.kernel.formats import STRIP_ROWS, ceil_div
from jitgemm.tensors import check_plain, check_tensor, check_values, dtype_name
from jitgemm.weight import layout
from jitgemm.weight.parts import INTEGERS, PackedWeight, by_group
from jitgemm.weight.ready import is_captured

MAX_ZERO = 16
"""Largest zero point: GPTQ's first format stores z - 1 in four bits, so 16 occurs; both decodes take q - 16."""


def row_chunks(n: int, k: int) -> list[tuple[int, int]]:
    """Runs of rows (first, end) of a weight [n, k], each of at most CHUNK_CODES weights but at least one row."""
    step = max(1, layout.CHUNK_CODES // k)
    return [(first, min(first + step, n)) for first in range(0, n, step)]


def check_given(given: Mapping[str, tuple[torch.Tensor, tuple[torch.dtype, ...]]], columns: str) -> None:
    """Raises TypeError or ValueError unless tensors have values, one of their dtypes and the device of the first, which
    holds codes [n, columns], or [experts, n, columns]."""
    (first, (codes, _)), *_ = given.items()
    for name, (tensor, dtypes) in given.items():
        check_plain(name, check_tensor(name, tensor))
        check_values(name, tensor)
        if tensor.dtype not in dtypes:
            expected = "an integer dtype" if dtypes is INTEGERS else " or ".join(map(dtype_name, dtypes))
            raise TypeError(f"{name}: expected {expected}, got {dtype_name(tensor.dtype)}")
        if tensor.device != codes.device:
            raise ValueError(f"{name}: expected {first}'s device {codes.device}, got {tensor.device}")
    if codes.dim() not in (2, 3) or (codes.dim() == 3 and not codes.shape[0]):
        expected = f"shape [n, {columns}] or [experts, n, {columns}]"
        raise ValueError(f"{first}: expected {expected}, got {list(codes.shape)}")


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raises ValueError for a NaN or an infinity, also next to a code of 0; looks at nothing during a capture."""
    if is_captured(values):
        return
    wrong = ~values.isfinite()
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: expected finite numbers, got {float(values[tuple(at)])} at {at}")


def row_sums(packed: PackedWeight) -> torch.Tensor:
    """`Weight.row_sum` of a packed weight: each row's sum of dequantised weights, summed up in fp64."""
    lead, n, group_size = packed.blocks.shape[:-3], packed.n, packed.format.group_size or packed.k
    sums = []
    for _, (q, scale, zero, offset) in packed.chunks(PackedWeight.rows):
        total = torch.zeros(q.shape[0], dtype=torch.float64, device=q.device)
        column = 0
        for part, _ in by_group(q, scale, group_size):
            codes = part.sum(-1, dtype=torch.int32).view(q.shape[0], -1)
            groups = slice(column, column := column + codes.shape[1])
            if zero is not None:
                codes = codes - part.shape[-1] * zero[:, groups].to(torch.int32)
            total += (codes * scale[:, groups].double()).sum(1)
            if offset is not None:
                total += part.shape[-1] * offset[:, groups].double().sum(1)
        sums.append(total.float())
    row_sum = torch.zeros((*lead, layout.strips_of(n) * STRIP_ROWS), dtype=torch.float32, device=packed.blocks.device)
    row_sum[..., :n] = torch.cat(sums).view(*lead, n)
    return row_sum


def activation_order(g_idx: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """The permutation that makes the groups of an activation order contiguous, None where they are already.

    Args:
        g_idx: integers [k], the group of each column of the layer's input (`g_idx` of GPTQ and compressed-tensors).
        group_size: columns of a group; the last may have fewer. ValueError for groups that are not full.

    Returns:
        int32 [k]: column j of the reordered weight is column permutation[j] of the layer's input. Columns of one group
        keep their order.
    """
    k = g_idx.shape[0]
    groups = ceil_div(k, group_size)
    least, most = (int(x) for x in g_idx.aminmax())
    if least < 0 or most >= groups:
        raise ValueError(
            f"g_idx: expected groups 0..{groups - 1} for k = {k}, group size {group_size}, got {least}..{most}"
        )
    in_order = torch.arange(k, device=g_idx.device)
    counts, expected = (torch.bincount(index, minlength=groups) for index in (g_idx.long(), in_order // group_size))
    if not torch.equal(counts, expected):
        group = int((counts != expected).nonzero()[0])
        raise ValueError(
            f"g_idx: expected {int(expected[group])} columns in group {group}, got {int(counts[group])}: activation "
            "order with groups of unequal sizes has no grouped form"
        )
    permutation = torch.argsort(g_idx.long(), stable=True)
    return None if torch.equal(permutation, in_order) else permutation.to(torch.int32)
