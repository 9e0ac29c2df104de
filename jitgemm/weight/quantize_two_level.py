"""quantize_w4_two_level: a float weight to 4-bit codes with the best integer factor and zero point of each 128 columns.

Round to nearest, or GPTQ where the inputs' moments are given.
"""

from __future__ import annotations

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.codes import FACTOR_GROUP
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import dtype_name
from jitgemm.weight.gptq import gptq
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import expert_indices
from jitgemm.weight.quantize import _check_given, _in_fp32, _moments_of, _saying
from jitgemm.weight.search import CHUNK, Tried, _least, _squared_error, check_underflow, in_steps
from jitgemm.weight.two_level import format_of, pack_w4_two_level

RANGE = 119
"""Integers that a row's largest value becomes: 8 more, half of the largest factor, are left for what 4 bits miss."""
MOST_FACTOR = 16
"""With larger ones not all of sixteen codes are integers of 8 bits, whatever the zero point."""


def quantize_w4_two_level(
    w: torch.Tensor, *, moments: torch.Tensor | None = None, act_order: bool = True,
    lhs_dtype: torch.dtype | None = None, rotation: int = 0,
) -> W4Weight:  # fmt: skip
    """Quantise a weight to 4 bits in two levels, as `pack_w4_two_level` has them, for int8 activations.

    ::

        w ~ (q - zero) * factor * scale      q in 0..15    (q - zero) * factor in -128..127

    A row's scale is max |w| / 119, in bf16. Of 128 columns the factor 1..16 and the zero point of least squared error are
    taken: for each factor those three zero points are tried that are closest to the middle of the columns' range. The
    same w gives the same weight in every run.

    With `moments` codes are GPTQ's, and errors count as inputs do, as in `quantize_w4`.

    Args:
        w: fp32, bf16 or fp16 [n, k], or [E, n, k] for a weight of E experts, any strides, n a multiple of 8 and k a
            multiple of 16; finite. Left as it is.
        moments, act_order, rotation: as in `quantize_w4`.
        lhs_dtype: None or torch.int8.

    Returns:
        The packed weight on w's device.

    Raises:
        TypeError: wrong dtype, or lhs_dtype e4m3, which two levels do not go with.
        ValueError: wrong shape, or values.
    """
    n, k = _check_given(w, moments, act_order, lhs_dtype, check_lhs, rotation)
    groups = ceil_div(k, FACTOR_GROUP)
    with torch.inference_mode(False), torch.no_grad():
        q = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
        factors, zeros = (torch.empty((*w.shape[:-1], groups), dtype=torch.uint8, device=w.device) for _ in range(2))
        scales = torch.empty(w.shape[:-1], dtype=torch.bfloat16, device=w.device)
        step = n if moments is not None else max(1, CHUNK["cuda" if w.is_cuda else "cpu"] // k)
        for e in expert_indices(w.shape[0] if w.dim() == 3 else None):
            for first in range(0, n, step):
                rows = slice(first, min(first + step, n))
                part = _in_fp32(w[e], rows, rotation)
                scales[e][rows] = part.abs().amax(-1) / RANGE
                check_underflow(scales[e][rows], part)
                grid = Levels(scales[e][rows].to(torch.float32))
                if moments is not None:
                    codes, scale, zero = gptq(part, _moments_of(moments[e], rotation), FACTOR_GROUP, grid, act_order)
                else:
                    part = torch.nn.functional.pad(part, (0, groups * FACTOR_GROUP - k)).unflatten(1, (groups, -1))
                    scale, zero = grid.scales(part)
                    codes = grid.round_(in_steps(part, scale), zero[..., None]).flatten(1)[:, :k]
                q[e][rows], zeros[e][rows] = codes.to(torch.uint8), zero.to(torch.uint8)
                factors[e][rows] = (scale / grid.row).round().to(torch.uint8)
        return _saying(rotation, pack_w4_two_level(q, factors, zeros, scales))


def check_lhs(lhs_type: str | None, name: str = "lhs_dtype") -> None:
    """Raises TypeError for a type of activations that two levels do not meet; name: the argument's."""
    form = format_of("bf16")
    if lhs_type not in (None, *form.lhs_types):
        raise TypeError(f"{name}: expected int8, {form.why_lhs()}, got {dtype_name(torch_dtype(str(lhs_type)))}")


class Levels:
    """Codes 0..15 with zero points, and an integer times a row's scale for each group. As `Search`."""

    def __init__(self, row: torch.Tensor):
        """row: the rows' scales, fp32 [n]."""
        self.row = torch.where(row == 0, 1.0, row)[:, None]

    def scales(self, w: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(factor * row's scale, zero), fp32 of w's groups."""
        middle = w.amin(-1) / 2 + w.amax(-1) / 2

        def tried(factor: torch.Tensor) -> Tried:
            scale = (factor * self.row).expand(len(factor), *middle.shape)
            steps = in_steps(w, scale)
            nearest = steps.round()
            # With these every code is an integer of 8 bits.
            least, most = 15 - (127 / factor).floor(), (128 / factor).floor()
            central = (7.5 - middle / scale).round()
            for change in (0, -1, 1):
                zero = (central + change).clamp(min=0, max=15).clamp(least, most)
                error = _squared_error(nearest, -zero[..., None], (15 - zero)[..., None], steps, scale, importance)
                yield error, scale, zero

        scale, zero = _least(w, [float(factor) for factor in range(1, MOST_FACTOR + 1)], tried)
        return scale, zero

    def round_(self, steps: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Codes of values that are so many steps from 0, in their place."""
        return steps.round_().add_(zero).clamp_(0, 15)

    def in_steps(self, codes: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """How many steps from 0 the codes are."""
        return codes - zero
