"""The scales and zero points of least error of those tried. Plain torch; sees neither calibration data nor packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from jitgemm.tensors import dtype_name

Tried = Iterator[tuple[torch.Tensor, ...]]
_Bound = TypeVar("_Bound", int, torch.Tensor)

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Values worked on at once: what fits a core's cache, or a GPU's L2; temporaries are about 32 bytes a value."""

MIN_CLIP = 0.2
"""Smallest part of a group's range that the search keeps: one outlier among thousands of values is worth no more."""


class Grid(Protocol):
    """What values a weight's codes stand for: the scales of groups, and the codes next to values. See `Search`."""

    def scales(self, w: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...

    def round_(self, steps: torch.Tensor, zero: torch.Tensor) -> torch.Tensor: ...

    def in_steps(self, codes: torch.Tensor, zero: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Search:
    """How scales are searched; the fields are `quantize_w4`'s arguments.

    w is fp32 [..., size], a group of values in its last dimension, and importance, [..., size] with w's groups or fewer
    dimensions, what a value's squared error counts; None counts all the same.
    """

    symmetric: bool
    scale_dtype: torch.dtype
    full_range: bool
    clip_steps: int
    positive: bool = False

    @property
    def codes(self) -> tuple[int, int]:
        """The least and the largest code."""
        return (-8 if self.full_range else -7, 7) if self.symmetric else (0, 15)

    def scales(self, w: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zero), fp32 of w's groups; scales are such as `scale_dtype` holds, zero is 0 where there is none.

        Raises:
            ValueError: a scale is infinite in `scale_dtype`.
        """
        return (self._signed if self.symmetric else self._with_zero_points)(w, importance)

    def round_(self, steps: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Codes of values that are so many steps from 0, in their place."""
        return (steps.round_() if self.symmetric else steps.round_().add_(zero)).clamp_(*self.codes)

    def in_steps(self, codes: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The codes' distance from 0, in steps."""
        return codes if self.symmetric else codes - zero

    def _signed(self, w: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        largest = w.abs().amax(-1)
        # The largest value is 7 steps long; with -8 also 7.5, which rounds to either end, or 8. More is clipped.
        divisors = [7.0]
        if self.clip_steps:
            end = 8.0 if self.full_range else 7.0
            divisors += [7.5, 8.0] if self.full_range else []
            divisors += [end / ratio for ratio in clip_ratios(self.clip_steps)]
        ranges = [(1, *self.codes)]
        if self.full_range and not self.positive:
            ranges.append((-1, -7, 8))  # a scale of either sign, so that -8 serves either end

        def tried(divisor: torch.Tensor) -> Tried:
            scale = self._rounded(largest / divisor)
            steps = in_steps(w, scale)
            nearest = steps.round()
            for sign, low, high in ranges:
                error = _squared_error(nearest, low, high, steps, scale, importance)
                # Plain rounding is with a positive scale, which is first.
                yield (error if sign > 0 else error.masked_fill_(divisor == 7, torch.inf)), scale * sign

        (best,) = _least(w, divisors, tried)
        return best, torch.zeros_like(best)

    def _with_zero_points(self, w: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = w.amin(-1).clamp_(max=0), w.amax(-1).clamp_(min=0)  # with 0, so that the zero point is in 0..15
        # Halves first: the range of fp32 values need not be one.
        half_range = high / 2 - low / 2

        def tried(ratio: torch.Tensor) -> Tried:
            scale = self._rounded(half_range / (7.5 / ratio))
            steps = in_steps(w, scale)
            nearest = steps.round()
            exact = -in_steps(low[..., None], scale)[..., 0] * ratio
            for zero in (exact.round(), exact.floor(), exact.ceil()) if self.clip_steps else (exact.round(),):
                zero = zero.clamp_(0, 15)
                error = _squared_error(nearest, -zero[..., None], (15 - zero)[..., None], steps, scale, importance)
                yield error, scale, zero

        best, zero = _least(w, [1.0, *clip_ratios(self.clip_steps)], tried)
        return best, zero

    def _rounded(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale as `scale_dtype` holds it, in fp32; ValueError where that is infinite."""
        rounded = scale.to(self.scale_dtype).to(torch.float32)
        if not bool(rounded.isfinite().all()):
            limit = f"{dtype_name(self.scale_dtype)}'s {torch.finfo(self.scale_dtype).max:g}"
            raise ValueError(f"w: expected scales within {limit}, got one of {float(scale.max()):g}")
        return rounded


@dataclass(frozen=True)
class Rows:
    """8-bit codes, torch.float8_e4m3fn or torch.int8, that reach the largest value under a scale. As `Search`."""

    dtype: torch.dtype

    @property
    def largest(self) -> float:
        """The largest code's value; -128 stays unused."""
        return 448.0 if self.dtype.is_floating_point else 127.0

    def scales(self, w: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, zeros), fp32 of w's groups; a search gains nothing: codes are much finer than inputs' weights."""
        scale = w.abs().amax(-1) / torch.tensor(
            self.largest, dtype=torch.float32, device=w.device
        )  # by a tensor: see `_least`
        return scale, torch.zeros_like(scale)

    def round_(self, steps: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        steps.clamp_(-self.largest, self.largest)
        return steps.copy_(steps.to(self.dtype)) if self.dtype.is_floating_point else steps.round_()

    def in_steps(self, codes: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return codes


def _least(w: torch.Tensor, values: list[float], tried: Callable[[torch.Tensor], Tried]) -> list[torch.Tensor]:
    """The candidate of least error for each group of w; of equal errors the first.

    Args:
        tried: for values [count, 1, ...] to be broadcast over w's groups, (error, what was found) in the order in which
            they count, each [count, *groups]. Several values at a time where groups are few, which saves launches.
    """
    # By a tensor: torch on a GPU multiplies with a number's reciprocal instead of dividing.
    every = torch.tensor(values, dtype=torch.float32, device=w.device).view(-1, *[1] * (w.dim() - 1))
    best: list[torch.Tensor] = []
    for part in every.split(max(1, CHUNK["cuda" if w.is_cuda else "cpu"] // max(1, w.numel()))):
        candidates = list(tried(part))
        if len(part) > 1:
            together = [torch.stack(each, 1).flatten(0, 1) for each in zip(*candidates, strict=True)]
            index = together[0].argmin(0, keepdim=True)
            candidates = [tuple(each.gather(0, index) for each in together)]
        for error, *results in candidates:
            if best:
                better = error < best[0]
                best = [torch.where(better, new, old) for new, old in zip((error, *results), best, strict=True)]
            else:
                best = [error, *results]
    return [each[0] for each in best[1:]]


def clip_ratios(steps: int) -> list[float]:
    """Fractions of a group's range to try, besides 1: geometric down to MIN_CLIP."""
    return [MIN_CLIP ** (i / steps) for i in range(1, steps + 1)]


def in_steps(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """w / scale; below a half if the scale is 0, i.e. if w is zero or too small for the scale's dtype."""
    return w / torch.where(scale == 0, 1.0, scale)[..., None]


def check_underflow(scale: torch.Tensor, w: torch.Tensor) -> None:
    """Raises ValueError where a scale is 0 and one of its values [..., size] is not."""
    lost = w.abs().amax(-1).where(scale == 0, 0.0)
    if not bool(lost.any()):
        return
    wider = {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32"}.get(scale.dtype)
    instead = f"use scale_dtype {wider}" if wider else "multiply w by a power of two"
    raise ValueError(
        f"w: expected groups of zeros, or of values that {dtype_name(scale.dtype)} has a scale for, got one of values "
        f"up to {float(lost.max()):g}, whose scale underflows to 0; {instead}"
    )


def _squared_error(
    nearest: torch.Tensor, low: _Bound, high: _Bound, steps: torch.Tensor, scale: torch.Tensor,
    importance: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Sum over each group of importance * (q * scale - w)^2 in fp64, with q = nearest clamped to low..high.

    In steps, which neither overflow nor vanish. The sum is fp64 so that its order decides no comparison.
    """
    squares = torch.clamp(nearest, low, high).sub_(steps).square_()
    if importance is not None:
        squares *= importance
    unit = torch.where(scale == 0, 1.0, scale).to(torch.float64)
    return squares.sum(-1, dtype=torch.float64) * unit.square()
