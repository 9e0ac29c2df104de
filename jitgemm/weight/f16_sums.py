"""A weight as kernels that add up in f16 read it: with a power of two for each row, by which they divide its scales.

Such kernels multiply groups' sums by scale / 2^E in f16, where 2^E exceeds no scale of the row by more than a factor of two
and none exceeds it, and the result by 2^E. No bit may be lost: bf16 scales are exact in f16 down to 2^-17 of 2^E, fp16
ones to 2^-14, those with fewer bits further. The powers go where a weight per channel has its scales: `channel_scale` of
a weight in groups says that its sums may be in f16.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import F16_OPERANDS, STRIP_ROWS, WeightFormat
from jitgemm.tensors import PLAIN
from jitgemm.weight import layout, ready
from jitgemm.weight.codes import CODE_OPS
from jitgemm.weight.parts import PackedWeight, WeightBase, expert_indices

if TYPE_CHECKING:
    from jitgemm.weight.packed import Weight

LEAST, MOST = -126, 126
"""Of E: 2^E and 2^-E are normal fp32 numbers."""


class _Noted(NamedTuple):
    at: ready.ReadyAt | None  # of the records they were made of
    marked: (
        ready.ReadyAt | None
    )  # another object each time the weight is marked ready, as after writes that nobody sees
    powers: torch.Tensor
    lost: list[int]  # rows that f16 does not hold, of each expert; of a dense weight one number


_noted: weakref.WeakKeyDictionary[Weight, _Noted] = weakref.WeakKeyDictionary()
_forms: weakref.WeakKeyDictionary[Weight, Weight] = weakref.WeakKeyDictionary()


def prepare_f16_sums(weight: Weight) -> None:
    """Makes now what calls with `sums="f16"` need of a weight, which the first of them would wait for: before a CUDA
    graph is captured. Layers of `jitgemm.nn` with `sums="f16"` do so by themselves. A weight of experts is prepared with
    all its views `weight[e]`.

    Args:
        weight: a W4Weight, dense or of experts, that stays where it is: copies and moves are other weights. To be
            called again after its records were written.

    Raises:
        TypeError: weight is no W4Weight or W8Weight.
        ValueError: f16 does not hold the weight's scales, the weight is of a format that is not added up in f16, or a
            CUDA graph is being captured.
    """
    if not isinstance(weight, WeightBase):
        raise TypeError(f"weight: expected a W4Weight, got {type(weight).__name__}")
    with_powers(weight)


def with_powers(weight: Weight) -> Weight:
    """The weight with its rows' powers as `channel_scale`, over the same records.

    They are made from the scales at the first call and after the records were written or marked ready again, waiting for the device. A view of
    experts has its part of theirs.

    Raises:
        ValueError: f16 does not hold the weight's scales, the weight is of another format, or a CUDA graph is being
            captured and the powers are not there yet.
    """
    whole, index = weight.whole or (weight, ...)
    found = _found(whole)
    lost, powers = (sum(found.lost), found.powers) if index is ... else (found.lost[index], found.powers[index])
    if lost:
        raise ValueError(
            f"sums: expected 'f32' for {weight.layer or 'a weight'} whose scales f16 does not hold as parts of their "
            f"row's largest, got 'f16' for {weight!r}: {lost} of its rows have scales that are too small next to it, or "
            f"have too many bits"
        )
    form = _forms.get(weight)
    if form is None or form.channel_scale is None or form.channel_scale.data_ptr() != powers.data_ptr():
        form = object.__new__(type(weight))  # not through the constructor, which would wait for the stream again
        plan_key = weight.packed._replace(channel_scale=powers).plan_key
        form.__dict__.update(weight.__dict__, channel_scale=powers, plan_key=plan_key)
        _forms[weight] = form
    return form


def powers_of(weight: Weight, into: torch.Tensor | None = None) -> torch.Tensor:
    """`channel_scale` of `with_powers`, without values where the weight has none; in the memory of `into` if it fits, which
    CUDA graphs may hold. Raises as `with_powers`."""
    if type(weight.blocks) not in PLAIN or weight.blocks.is_meta:
        check_format(weight.format)
        return weight.blocks.new_empty(_shape_of(weight.packed), dtype=torch.float32)
    powers: torch.Tensor = with_powers(weight).channel_scale  # type: ignore[assignment]
    fits = into is not None and (into.shape, into.device) == (powers.shape, powers.device)
    if into is None or not fits or into is powers or weight.whole is not None:
        return powers
    with torch.no_grad():
        into.copy_(powers)
    _noted[weight] = _noted[weight]._replace(powers=into)
    return into


def check_format(format: WeightFormat) -> None:
    """Raises ValueError for weights of a format that is not added up in f16."""
    if not format.f16_sums:
        raise ValueError(f"sums: expected 'f32' except for {F16_OPERANDS}, got 'f16' for {format.name}")


def _shape_of(packed: PackedWeight) -> tuple[int, ...]:
    *lead, strips, _, _ = packed.blocks.shape
    return (*lead, strips * STRIP_ROWS)


def _found(weight: Weight) -> _Noted:
    """The powers of a weight that is no view of another's, as they are now."""
    at = None if weight.blocks.is_inference() else ready.now(weight.blocks)
    found = _noted.get(weight)
    if found is not None and found.at == at is not None and found.marked is weight.ready_at:
        return found
    if weight.blocks.is_cuda and ready.capturing(weight.device):
        raise ValueError(
            f"sums: expected 'f32', or jitgemm.prepare_f16_sums(weight) before a CUDA graph is captured, got 'f16' in the "
            f"capture with {weight.layer or 'a weight'} that is not prepared, {weight!r}"
        )
    with torch.inference_mode(False), torch.no_grad():
        powers, lost = row_powers(weight.packed)
    _noted[weight] = found = _Noted(at, weight.ready_at, powers, lost)
    return found


def row_powers(packed: PackedWeight) -> tuple[torch.Tensor, list[int]]:
    """2^E of each row, fp32 [*lead, 64 * strips], and how many rows of each expert have scales that f16 does not hold;
    waits for the device."""
    fmt, n, blocks, ops = packed.format, packed.n, packed.blocks, CODE_OPS[packed.format.code]
    check_format(fmt)
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
    found, size = [], packed.format.group_size
    for first, end in layout.strip_chunks(packed.n, packed.k):
        q, _, zero, _ = packed.rows(first, end)
        used = q.to(torch.float32)
        if zero is not None:
            used -= zero.to(torch.float32).repeat_interleave(size, 1)[:, : packed.k]
        used = torch.nn.functional.pad(used, (0, -packed.k % size)).unflatten(1, (-1, size))
        found.append(used.any(-1))
    return torch.cat(found)
