"""A weight as kernels that add up in f16 read it: with a power of two for each row, by which they divide its scales.

Such kernels multiply groups' sums by scale / 2^E in f16, where 2^E exceeds no scale of the row by more than a factor of
two and none exceeds it, and the result by 2^E. No bit may be lost: bf16 scales are exact in f16 down to 2^-17 of 2^E,
fp16 ones to 2^-14, those with fewer bits further. The powers go where a weight per channel has its scales: they are the
`channel_scale` of a weight in groups whose `sums` are "f16".
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import F16_OPERANDS, STRIP_ROWS
from jitgemm.tensors import PLAIN
from jitgemm.weight import layout
from jitgemm.weight.codes import CODE_OPS
from jitgemm.weight.parts import PackedWeight, expert_indices
from jitgemm.weight.ready import is_captured

LEAST, MOST = -126, 126
"""Of E: 2^E and 2^-E are normal fp32 numbers."""


def powers_of(packed: PackedWeight, weight: Any) -> torch.Tensor:
    """The rows' powers of two, fp32 [*lead, 64 * strips], made from the records as they are now, which waits for the
    device; without values where the weight has none. weight: the `Weight`, for messages.

    Raises:
        ValueError: f16 does not hold the scales, the weight is of another format, or a CUDA graph is being captured.
    """
    if not packed.format.f16_sums:
        raise ValueError(f"sums: expected 'f32' except for {F16_OPERANDS}, got 'f16' for {packed.format.name}")
    if type(packed.blocks) not in PLAIN or packed.blocks.is_meta:
        return packed.blocks.new_empty(_shape_of(packed), dtype=torch.float32)
    if is_captured(packed.blocks):
        raise ValueError("sums: expected to look at scales, got a CUDA graph's capture; ask for sums in f16 before it")
    with torch.inference_mode(False), torch.no_grad():
        powers, lost = row_powers(packed)
    if sum(lost):
        raise ValueError(
            f"sums: expected 'f32' for {weight.layer or 'a weight'} whose scales f16 does not hold as parts of their "
            f"row's largest, got 'f16' for {weight!r}: {sum(lost)} of its rows have scales that are too small next to "
            f"it, or have too many bits"
        )
    return powers


def _shape_of(packed: PackedWeight) -> tuple[int, ...]:
    *lead, strips, _, _ = packed.blocks.shape
    return (*lead, strips * STRIP_ROWS)


def row_powers(packed: PackedWeight) -> tuple[torch.Tensor, list[int]]:
    """2^E of each row, fp32 [*lead, 64 * strips], and how many rows of each expert have scales that f16 does not hold;
    waits for the device."""
    fmt, n, blocks, ops = packed.format, packed.n, packed.blocks, CODE_OPS[packed.format.code]
    powers = torch.ones(_shape_of(packed), dtype=torch.float32, device=blocks.device)
    lost = []
    for index in expert_indices(packed.experts):
        expert = packed.expert(index)
        field = expert.blocks[:, :, fmt.scales_at : fmt.offsets_at]
        scale = layout.unpack_field(field, n, packed.k, fmt.group_size, torch_dtype(fmt.scale_type)).double()
        power, held = _row_powers(scale, None, ops.f16_factor)
        if not bool(held.all()):  # scales of groups of zeros may be in the way
            power, held = _row_powers(scale, _used_groups(expert), ops.f16_factor)
        powers[index][:n] = power
        lost.append((~(held & ops.f16_holds(expert))).sum())
    return powers, torch.stack(lost).tolist()


def _row_powers(scale: torch.Tensor, used: torch.Tensor | None, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """2^E of scales fp64 [rows, groups], and whether f16 holds those of used groups times factor / 2^E: [rows] each.

    used: bool [rows, groups] or None for all. Others are multiplied by 0: they may be rounded, but not be infinite.
    """
    counted = scale if used is None else torch.where(used, scale, 0.0)
    exponent = torch.frexp(counted.abs().amax(1)).exponent.clamp(LEAST, MOST)
    power = ((exponent + 127) << 23).to(torch.int32).view(torch.float32)
    part = scale / power[:, None] * factor
    held = (part.abs() <= factor) & (part.half().double() == part)  # not NaN
    if used is not None:
        held |= ~used & (part.abs() <= torch.finfo(torch.float16).max)
    return power, held.all(1)


def _used_groups(packed: PackedWeight) -> torch.Tensor:
    """Which groups have another value than 0, bool [n, groups]."""
    by_rows, size = [], packed.format.group_size
    for first, end in layout.strip_chunks(packed.n, packed.k):
        q, _, zero, _ = packed.rows(first, end)
        used = q.to(torch.float32)
        if zero is not None:
            used -= zero.to(torch.float32).repeat_interleave(size, 1)[:, : packed.k]
        used = torch.nn.functional.pad(used, (0, -packed.k % size)).unflatten(1, (-1, size))
        by_rows.append(used.any(-1))
    return torch.cat(by_rows)
