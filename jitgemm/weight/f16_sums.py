"""A weight as kernels that add up in f16 read it: with a power of two for each row, by which they divide its scales.

Such kernels multiply groups' sums by scale / 2^E in f16, where 2^E exceeds no scale of the row by more than a factor of two
and none exceeds it, and the result by 2^E. No bit may be lost: bf16 scales are exact in f16 down to 2^-17 of 2^E, fp16
ones to 2^-14, those with fewer bits further. The powers go where a weight per channel has its scales: `channel_scale` of
a weight in groups says that its sums may be in f16.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import F16_OPERANDS, STRIP_ROWS
from jitgemm.weight import layout, ready
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import PackedWeight, expert_indices

LEAST, MOST = -126, 126
"""Of E: 2^E and 2^-E are normal fp32 numbers."""


class _Noted(NamedTuple):
    at: ready.ReadyAt | None  # of the records they were made of
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
    if not isinstance(weight, Weight):
        raise TypeError(f"weight: expected a W4Weight, got {type(weight).__name__}")
    with_powers(weight)


def with_powers(weight: Weight) -> Weight:
    """The weight with its rows' powers as `channel_scale`, over the same records.

    They are made from the scales at the first call and after the records were written, waiting for the device. A view of
    experts has its part of theirs.

    Raises:
        ValueError: f16 does not hold the weight's scales, the weight is of another format, or a CUDA graph is being
            captured and the powers are not there yet.
    """
    whole, index = weight.whole or (weight, ...)
    found = _found(whole)
    lost, powers = sum(found.lost) if index is ... else found.lost[index], found.powers[index]
    if lost:
        raise ValueError(
            f"sums: expected 'f32' for {weight.layer or 'a weight'} whose scales f16 does not hold as parts of their "
            f"row's largest, got 'f16' for {weight!r}: {lost} of its rows have scales that are too small beside it, or "
            f"have too many bits"
        )
    form = _forms.get(weight)
    if form is None or form.channel_scale is None or form.channel_scale.data_ptr() != powers.data_ptr():
        form = object.__new__(type(weight))  # not through the constructor, which would wait for the stream again
        plan_key = weight.packed._replace(channel_scale=powers).plan_key
        form.__dict__.update(weight.__dict__, channel_scale=powers, plan_key=plan_key)
        _forms[weight] = form
    return form


def _found(weight: Weight) -> _Noted:
    """The powers of a weight that is no view of another's, as they are now."""
    at = None if weight.blocks.is_inference() else ready.now(weight.blocks)
    found = _noted.get(weight)
    if found is not None and found.at == at is not None:
        return found
    if weight.blocks.is_cuda and ready.capturing(weight.device):
        raise ValueError(
            f"sums: expected 'f32', or jitgemm.prepare_f16_sums(weight) before a CUDA graph is captured, got 'f16' in the "
            f"capture with {weight.layer or 'a weight'} that is not prepared, {weight!r}"
        )
    with torch.inference_mode(False), torch.no_grad():
        powers, lost = row_powers(weight.packed)
    _noted[weight] = found = _Noted(at, powers, lost)
    return found


def row_powers(packed: PackedWeight) -> tuple[torch.Tensor, list[int]]:
    """2^E of each row, fp32 [*lead, 64 * strips], and how many rows of each expert have scales that f16 does not hold;
    waits for the device."""
    fmt, n, blocks = packed.format, packed.n, packed.blocks
    if not fmt.f16_sums:
        raise ValueError(f"sums: expected 'f32' except for {F16_OPERANDS}, got 'f16' for {fmt.name}")
    shape = (*blocks.shape[:-3], blocks.shape[-3] * STRIP_ROWS)
    powers = torch.ones(shape, dtype=torch.float32, device=blocks.device)
    lost = []
    for index in expert_indices(packed.experts):
        field = blocks[index][:, :, fmt.scales_at : fmt.offsets_at]
        scale = layout.unpack_field(field, n, packed.k, fmt.group_size, torch_dtype(fmt.scale_type)).double()
        exponent = torch.frexp(scale.abs().amax(1)).exponent.clamp(LEAST, MOST)
        power = ((exponent + 127) << 23).to(torch.int32).view(torch.float32)
        part = scale / power[:, None]
        held = (part.abs() <= 1) & (part.half().double() == part)  # not NaN
        lost.append((~held).any(1).sum())
        powers[index][:n] = power
    return powers, torch.stack(lost).tolist()
