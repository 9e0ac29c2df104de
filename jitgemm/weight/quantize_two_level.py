"""quantize_w4_two_level: a float weight to 4-bit codes with the best integer factor and zero point of each 128 columns.

Round to nearest, or GPTQ where the inputs' moments are given.
"""

from __future__ import annotations

from functools import partial

import torch

from jitgemm.kernel.codes import FACTOR_GROUP
from jitgemm.kernel.formats import ceil_div
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.quantize import _check_given, _check_lhs, _rounded, _saying
from jitgemm.weight.search import Tried, _least, _squared_error, check_underflow, in_steps
from jitgemm.weight.two_level import format_of, pack_w4_two_level

RANGE = 119
"""Integers that a row's largest value becomes: 8 more, half of the largest factor, are left for what 4 bits miss."""
MOST_FACTOR = 16
"""With larger ones not all of sixteen codes are integers of 8 bits, whatever the zero point."""
check_lhs = partial(_check_lhs, format_of("bf16"))
"""Raises TypeError for a type of activations, and an argument's name, that the codes do not meet."""


def quantize_w4_two_level(
    w: torch.Tensor, *, moments: torch.Tensor | None = None, act_order: bool = True,
    lhs_dtype: torch.dtype | None = None, rotation: int = 0,
) -> W4Weight:  # fmt: skip
    """Quantise a weight to 4 bits in two levels, as `pack_w4_two_level` has them, for int8 activations.

    ::

        w ~ (q - zero) * factor * scale      q in 0..15    (q - zero) * factor in -128..127

    A row's scale is max |w| / 119, in bf16. Of 128 columns the factor 1..16 and the zero point of least squared error
    are taken: for each factor those three zero points are tried that are closest to the middle of the columns' range.
    The same w gives the same weight in every run.

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
    _, k = _check_given(w, moments, act_order, lhs_dtype, check_lhs, rotation)
    with torch.inference_mode(False), torch.no_grad():
        q = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
        shape = *w.shape[:-1], ceil_div(k, FACTOR_GROUP)
        factors, zeros = (torch.empty(shape, dtype=torch.uint8, device=w.device) for _ in range(2))
        scales = torch.empty(w.shape[:-1], dtype=torch.bfloat16, device=w.device)
        for e, rows, grid, _, codes, scale, zero in _rounded(w, moments, act_order, rotation, FACTOR_GROUP, Levels):
            q[e][rows], zeros[e][rows], scales[e][rows] = codes.to(torch.uint8), zero.to(torch.uint8), grid.given
            factors[e][rows] = (scale / grid.row).round().to(torch.uint8)
        return _saying(rotation, pack_w4_two_level(q, factors, zeros, scales))


class Levels:
    """Codes 0..15 with zero points, and an integer times a row's scale for each group. As `Search`."""

    def __init__(self, part: torch.Tensor):
        """part: values [n, groups, size] of rows, whose scales are `given`, and fp32 [n, 1] `row`, 1 for 0."""
        self.given = (part.abs().amax((1, 2)) / RANGE).to(torch.bfloat16)
        check_underflow(self.given, part.flatten(1))
        self.row = torch.where(self.given == 0, 1.0, self.given.float())[:, None]

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
