"""quantize_mxfp4: a float weight to the nearest MXFP4 codes, with the best power of two of each 32.

Round to nearest, or GPTQ where the inputs' moments are given.
"""

from __future__ import annotations

from functools import partial

import torch

from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.kernel.formats import ceil_div
from jitgemm.weight.mxfp4 import BIAS, MAGNITUDES, format_of, pack_mxfp4
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.quantize import _check_given, _check_lhs, _rounded, _saying

_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbours of e2m1's magnitudes; a tie takes the even one: the lower, the upper, the lower, ..."""
check_lhs = partial(_check_lhs, format_of(EXPONENT_GROUP, 2 * EXPONENT_GROUP))
"""Raises TypeError for a type of activations, and an argument's name, that the codes do not meet."""


def quantize_mxfp4(
    w: torch.Tensor, *, moments: torch.Tensor | None = None, act_order: bool = True,
    lhs_dtype: torch.dtype | None = None, rotation: int = 0,
) -> W4Weight:  # fmt: skip
    """Quantise a weight to MXFP4: per 32 columns, the scale of least squared error among three.

    Tried are the power of two 2^(floor(log2(max |w|)) - 2) of the OCP MX specification 1.0 (6.3), with which the
    largest value is 4 to 8 steps long and clipped to 6, its double and its half. A later one is taken only if its error
    is smaller. Codes are the nearest, ties to even. The same w gives the same weight in every run.

    With `moments` codes are GPTQ's, and errors count as inputs do, as in `quantize_w4`.

    Args:
        w: fp32, bf16 or fp16 [n, k], or [E, n, k] for a weight of E experts, any strides, n a multiple of 8 and k a
            multiple of 16; finite. Left as it is.
        moments, act_order, rotation: as in `quantize_w4`.
        lhs_dtype: None or torch.float8_e4m3fn.

    Returns:
        The packed weight on w's device, in the first of `pack_mxfp4`'s forms that holds it.

    Raises:
        TypeError: wrong dtype, or lhs_dtype int8, which MXFP4 does not go with.
        ValueError: wrong shape, or values.
    """
    _, k = _check_given(w, moments, act_order, lhs_dtype, check_lhs, rotation)
    grid = Powers()
    with torch.inference_mode(False), torch.no_grad():
        codes = torch.empty((*w.shape[:-1], k // 2), dtype=torch.uint8, device=w.device)
        scales = torch.empty((*w.shape[:-1], ceil_div(k, EXPONENT_GROUP)), dtype=torch.uint8, device=w.device)
        runs = _rounded(w, moments, act_order, rotation, EXPONENT_GROUP, lambda part: grid)
        for e, rows, _, _, values, scale, _ in runs:
            nibbles = codes_of(values)
            codes[e][rows] = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
            scales[e][rows] = (torch.frexp(scale).exponent + (BIAS - 1)).to(torch.uint8)
        return _saying(rotation, pack_mxfp4(codes, scales, k=k))


def codes_of(values: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of e2m1's values."""
    magnitudes = torch.tensor(MAGNITUDES, dtype=values.dtype, device=values.device)
    return (torch.bucketize(values.abs().contiguous(), magnitudes) + 8 * values.signbit()).to(torch.uint8)


class Powers:
    """e2m1's values, and a power of two for each group. As `Search`; codes are the values."""

    def scales(self, w: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zeros), fp32 of w's groups."""
        largest = w.abs().amax(-1)
        # frexp: largest = mantissa * 2^exponent with mantissa from a half on.
        usual = torch.where(largest > 0, torch.frexp(largest).exponent - 3, 0)
        best, least = usual, torch.full_like(largest, torch.inf, dtype=torch.float64)
        for change in (0, 1, -1):
            exponent = (usual + change).clamp(-BIAS, BIAS)
            steps = torch.ldexp(w.double(), -exponent[..., None])
            squares = (self.round_(steps.clone()) - steps).square_()
            if importance is not None:
                squares *= importance
            error = torch.ldexp(squares.sum(-1), 2 * exponent)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, exponent, best)
        scale = torch.ldexp(torch.ones_like(least), best).to(torch.float32)
        return scale, torch.zeros_like(scale)

    def round_(self, steps: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        """The nearest of e2m1's values, in steps' place."""
        halfway = torch.tensor(_HALFWAY, dtype=steps.dtype, device=steps.device)
        # The largest number that is rounded down.
        halfway[1::2] = torch.nextafter(halfway[1::2], torch.zeros_like(halfway[1::2]))
        magnitudes = torch.tensor(MAGNITUDES, dtype=steps.dtype, device=steps.device)
        nearest = magnitudes[torch.bucketize(steps.abs().contiguous(), halfway)]
        return torch.copysign(nearest, steps, out=steps)

    def in_steps(self, codes: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """How many steps from 0 the codes are."""
        return codes
