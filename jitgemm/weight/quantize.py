"""quantize_w4 and quantize_w8: a float weight to 4 or 8 bits, for people without a quantised checkpoint.

Round to nearest; with 4 bits a search over how far each group is clipped. Plain torch, on whatever device the weight
is; knows nothing of activations, calibration data, kernels or the packed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import check_dtype, check_flag, check_int, check_tensor, check_values, dtype_name
from jitgemm.weight.pack import BLOCK, check_group_size, pack_w4, pack_w8
from jitgemm.weight.packed import W4Weight, W8Weight, Weight
from jitgemm.weight.parts import check_sizes, format_group

W = TypeVar("W", bound=Weight)

MIN_CLIP = 0.2
"""Smallest part of a group's range that the search keeps: one outlier among thousands of values is worth no more."""
CLIP_STEPS = 32
"""Ranges tried by default, in geometric steps from all of it down to MIN_CLIP: each is 5 % smaller than the last."""
MAX_CLIP_STEPS = 1000

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Values worked on at once: what fits a core's cache, or a GPU's L2; temporaries are about 32 bytes a value."""


def quantize_w4(
    w: torch.Tensor, group_size: int | str, *, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16,
    full_range: bool = True, clip_steps: int = CLIP_STEPS, lhs_dtype: torch.dtype | None = None,
) -> W4Weight:  # fmt: skip
    """Quantise a weight to 4 bits: per group, the scale (and zero point) of least squared error among those tried.

    ::

        symmetric    q in -8..7    w ~ q * scale              scale of either sign, so that -8 serves either end
        asymmetric   q in 0..15    w ~ (q - zero) * scale     zero an integer 0..15: 0.0 stays 0.0

    Scales are rounded to `scale_dtype` first and codes computed for the rounded scale. Tried are the scales that cover
    the group's range, max |w| / 7, / 7.5 and / 8, or (max - min) / 15, and then those that clip it, down to a fifth of
    it. Plain round to nearest is the first of them, and a later one is taken only if its error is smaller. The same w
    gives the same weight in every run.

    Args:
        w: fp32, bf16 or fp16 [n, k], or [E, n, k] for a weight of E experts, any strides, n a multiple of 8 and k a
            multiple of 16; finite. Left as it is.
        group_size: 32, 64, 128 or 256 values of k share a scale; k (or more), -1 or "channel" for one scale per row.
        symmetric: signed codes; False for codes 0..15 with zero points.
        scale_dtype: torch.bfloat16, torch.float16 or torch.float32.
        full_range: False keeps symmetric codes within -7..7: about a fifth more squared error, but a weight for e4m3
            activations (see lhs_dtype) then decodes in half the instructions.
        clip_steps: how many clipped ranges to try; 0 for plain round to nearest, with max |w| / 7 or (max - min) / 15.
        lhs_dtype: as in `pack_w4`.

    Returns:
        The packed weight on w's device. A group of zeros has scale 0. `unpack()` gives codes, scales and zero points.
        Beside w and the result, n * k / 2 bytes and a fixed amount of memory are used; for experts, which are quantised
        one by one, n * k bytes.

    Raises:
        TypeError: an argument is no tensor, or of a wrong type.
        ValueError: wrong shape, a NaN or infinity, or values too large for scale_dtype, or a group's too small.
    """
    n, k = _check_weight(w)
    check_flag("symmetric", symmetric)
    check_flag("full_range", full_range)
    check_dtype("scale_dtype", scale_dtype, REAL_TYPES)
    group_size, clip_steps = check_group_size(group_size, k), check_int("clip_steps", clip_steps)
    if clip_steps < 0:
        raise ValueError(f"clip_steps: expected at least 0, got {clip_steps}")
    if clip_steps > MAX_CLIP_STEPS:
        raise ValueError(f"clip_steps: expected at most {MAX_CLIP_STEPS}, got {clip_steps}")
    format_group(k, group_size)
    if w.dim() == 3:
        dense = partial(
            quantize_w4, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, full_range=full_range,
            clip_steps=clip_steps, lhs_dtype=lhs_dtype,
        )  # fmt: skip
        return _by_expert(W4Weight, dense, w)
    size = min(group_size, k)
    groups = ceil_div(k, size)
    with torch.inference_mode(False), torch.no_grad():
        scale = torch.empty((n, groups), dtype=scale_dtype, device=w.device)
        zero = None if symmetric else torch.empty((n, groups), dtype=torch.uint8, device=w.device)
        q = torch.empty((n, k // 2), dtype=torch.uint8, device=w.device)
        padding = groups * size - k  # with zeros, which every scale and zero point represents
        step = max(1, _CHUNK["cuda" if w.is_cuda else "cpu"] // (k + padding))
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            part = torch.nn.functional.pad(w[rows].to(torch.float32), (0, padding)).reshape(-1, groups, size)
            _check_finite(w, part, first)
            if symmetric:
                codes, scale[rows] = _signed(part, scale_dtype, full_range, clip_steps)
            else:
                codes, scale[rows], zero[rows] = _with_zero_points(part, scale_dtype, clip_steps)
            _check_underflow(scale[rows], part)
            q[rows] = _canonical(codes.view(part.shape[0], -1)[:, :k])
        return pack_w4(q, scale, zero, group_size=group_size, k=k, lhs_dtype=lhs_dtype)


def quantize_w8(w: torch.Tensor, lhs_dtype: torch.dtype, *, block: int | None = None) -> W8Weight:
    """Quantise a weight to 8 bits: w ~ q * scale, q rounded to nearest even, a scale for each row or block in fp32.

    The scale is max |w| / 448 for e4m3, and max |w| / 127 for int8, of which -128 stays unused.

    Args:
        w: fp32, bf16 or fp16 [n, k], or [E, n, k] for a weight of E experts, any strides, n a multiple of 8 and k a
            multiple of 16; finite. Left as it is.
        lhs_dtype: torch.float8_e4m3fn or torch.int8, the type of the weight and of the activations that it meets.
        block: None for a scale per row, 128 for one per block of 128 x 128.

    Returns:
        The packed weight on w's device. A row or block of zeros has scale 0. Beside w and the result, n * k bytes and a
        fixed amount of memory are used.

    Raises:
        TypeError: an argument is no tensor, or of a wrong type.
        ValueError: wrong shape, a NaN or infinity, or a row or block of values too small for an fp32 scale.
    """
    n, k = _check_weight(w)
    largest = 448.0 if check_dtype("lhs_dtype", lhs_dtype, LHS_TYPES) == "e4m3" else 127.0
    if block is not None and check_int("block", block) != BLOCK:
        raise ValueError(f"block: expected None or {BLOCK}, got {block!r}")
    if w.dim() == 3:
        return _by_expert(W8Weight, partial(quantize_w8, lhs_dtype=lhs_dtype, block=block), w)
    rows_of, columns = block or 1, block or k  # of a scale
    with torch.inference_mode(False), torch.no_grad():
        q = torch.empty((n, k), dtype=lhs_dtype, device=w.device)
        scale = torch.empty((ceil_div(n, rows_of), ceil_div(k, columns)), dtype=torch.float32, device=w.device)
        step = rows_of * max(1, _CHUNK["cuda" if w.is_cuda else "cpu"] // (k * rows_of))
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            count = rows.stop - first
            part = w[rows].to(torch.float32)
            _check_finite(w, part, first)
            part = torch.nn.functional.pad(part, (0, -k % columns, 0, -count % rows_of))
            part = part.view(part.shape[0] // rows_of, rows_of, -1, columns).transpose(1, 2).flatten(2)
            found = part.abs().amax(-1) / torch.tensor(largest, device=w.device)
            scale[first // rows_of :][: found.shape[0]] = found
            _check_underflow(found, part)
            codes = _in_steps(part, found).clamp_(-largest, largest)
            codes = codes if lhs_dtype.is_floating_point else codes.round_()
            codes = codes.to(lhs_dtype).unflatten(2, (rows_of, columns)).transpose(1, 2).flatten(2).flatten(0, 1)
            q[rows] = codes[:count, :k]
        return pack_w8(q, scale)


def _check_weight(w: torch.Tensor) -> tuple[int, int]:
    """n and k of a float weight that can be quantised."""
    check_dtype("w", check_tensor("w", w).dtype, REAL_TYPES)
    check_values("w", w)
    if w.dim() not in (2, 3) or (w.dim() == 3 and not w.shape[0]):
        raise ValueError(f"w: expected shape [n, k] or [experts, n, k], got {list(w.shape)}")
    n, k = w.shape[-2:]
    check_sizes(n, k, "w")
    return n, k


def _by_expert(kind: type[W], quantize: Callable[[torch.Tensor], W], w: torch.Tensor) -> W:
    """The weight of experts whose dense ones `quantize` makes."""

    def expert(e: int) -> W:
        try:
            return quantize(w[e])
        except ValueError as error:
            raise ValueError(str(error).replace("w", f"w[{e}]", 1)) from None

    return kind.stacked(w.shape[0], expert)


def clip_ratios(steps: int) -> list[float]:
    """Parts of a group's range to try, the whole one not among them: geometric down to MIN_CLIP."""
    return [MIN_CLIP ** (i / steps) for i in range(1, steps + 1)]


# ---- the search ------------------------------------------------------------------------------------------------------


def _signed(
    w: torch.Tensor, dtype: torch.dtype, full_range: bool, clip_steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """w fp32 [rows, groups, size] -> codes fp32 of w's shape, and scale [rows, groups] of dtype."""
    largest = w.abs().amax(-1)
    # The largest value is 7 steps long; with -8 also 7.5, which rounds to either end, or 8. Beyond that it is clipped.
    divisors = [7.0]
    if clip_steps:
        end = 8.0 if full_range else 7.0
        divisors += ([7.5, 8.0] if full_range else []) + [end / ratio for ratio in clip_ratios(clip_steps)]
    ranges = ((1, -8, 7), (-1, -7, 8)) if full_range else ((1, -7, 7),)
    best, least = largest, torch.full_like(largest, torch.inf, dtype=torch.float64)
    for number, divisor in enumerate(divisors):
        # By a tensor: torch on a GPU multiplies with a number's reciprocal instead of dividing.
        scale = _rounded(largest / torch.tensor(divisor, device=w.device), dtype)
        steps = _in_steps(w, scale)
        nearest = steps.round()
        for sign, low, high in ranges if number else ranges[:1]:
            error = _squared_error(nearest, low, high, steps, scale)
            better = error < least
            best, least = torch.where(better, scale * sign, best), torch.where(better, error, least)
    return _in_steps(w, best).round_().clamp_(ranges[0][1], 7), best.to(dtype)


def _with_zero_points(
    w: torch.Tensor, dtype: torch.dtype, clip_steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w fp32 [rows, groups, size] -> codes fp32 of w's shape, scale [rows, groups] of dtype, zero fp32 of its shape."""
    low, high = w.amin(-1).clamp_(max=0), w.amax(-1).clamp_(min=0)  # with 0, so that the zero point is in 0..15
    # Halves first: the range of fp32 values need not be one.
    half_range = high / 2 - low / 2
    best, best_zero = half_range, half_range
    least = torch.full_like(half_range, torch.inf, dtype=torch.float64)
    for ratio in (1.0, *(clip_ratios(clip_steps) if clip_steps else ())):
        scale = _rounded(half_range / torch.tensor(7.5 / ratio, device=w.device), dtype)
        steps = _in_steps(w, scale)
        nearest = steps.round()
        exact = -_in_steps(low[..., None], scale)[..., 0] * ratio
        for zero in (exact.round(), exact.floor(), exact.ceil()) if clip_steps else (exact.round(),):
            zero = zero.clamp_(0, 15)
            error = _squared_error(nearest, -zero[..., None], (15 - zero)[..., None], steps, scale)
            better = error < least
            best, best_zero = torch.where(better, scale, best), torch.where(better, zero, best_zero)
            least = torch.where(better, error, least)
    codes = _in_steps(w, best).round_().add_(best_zero[..., None]).clamp_(0, 15)
    return codes, best.to(dtype), best_zero


def _rounded(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale as dtype holds it, in fp32; ValueError where that is infinite."""
    rounded = scale.to(dtype).to(torch.float32)
    if not bool(rounded.isfinite().all()):
        limit = f"{dtype_name(dtype)}'s {torch.finfo(dtype).max:g}"
        raise ValueError(f"w: expected scales within {limit}, got one of {float(scale.max()):g}")
    return rounded


def _check_underflow(scale: torch.Tensor, w: torch.Tensor) -> None:
    """Raises ValueError where a group's scale is 0 and one of its values [rows, groups, size] is not."""
    lost = w.abs().amax(-1).where(scale == 0, 0.0)
    if not bool(lost.any()):
        return
    wider = {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32"}.get(scale.dtype)
    instead = f"use scale_dtype {wider}" if wider else "multiply w by a power of two"
    raise ValueError(
        f"w: expected groups of zeros, or of values that {dtype_name(scale.dtype)} has a scale for, got one of values "
        f"up to {float(lost.max()):g}, whose scale underflows to 0; {instead}"
    )


def _in_steps(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """w / scale; below a half where the scale is 0, which it is where w is zero or too small for dtype."""
    return w / torch.where(scale == 0, 1.0, scale)[..., None]


def _squared_error(
    nearest: torch.Tensor, low: int | torch.Tensor, high: int | torch.Tensor, steps: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Sum over each group of (q * scale - w)^2 in fp64, with q = nearest clamped to low..high.

    In steps, which neither overflow nor vanish. The sum is fp64 so that its order decides no comparison.
    """
    clipped = torch.clamp(nearest, low, high)
    unit = torch.where(scale == 0, 1.0, scale).to(torch.float64)
    return clipped.sub_(steps).square_().sum(-1, dtype=torch.float64) * unit.square()


def _canonical(codes: torch.Tensor) -> torch.Tensor:
    """Codes [rows, k] -> uint8 [rows, k / 2], even k in the low nibble, two's complement."""
    nibbles = codes.to(torch.int8).view(torch.uint8) & 0xF
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def _check_finite(w: torch.Tensor, part: torch.Tensor, first: int) -> None:
    if bool(part.isfinite().all()):
        return
    row, column = (~w[first : first + part.shape[0]].isfinite()).nonzero()[0].tolist()
    value = w[first + row, column].item()
    raise ValueError(f"w: expected finite values, got {value} at [{first + row}, {column}]")
