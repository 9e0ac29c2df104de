"""quantize_w4 and quantize_w8: a float weight to 4 or 8 bits, for people without a quantised checkpoint.

Round to nearest; with 4 bits a search over how far each group is clipped, and GPTQ where the inputs' moments are given.
Plain torch, on whatever device the weight is; knows nothing of kernels or the packed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import WeightFormat, ceil_div
from jitgemm.tensors import check_dtype, check_flag, check_int, check_tensor, check_values, dtype_name, one_of
from jitgemm.weight.gptq import gptq
from jitgemm.weight.pack import BLOCK, check_group_size, pack_w4, pack_w8
from jitgemm.weight.packed import W4Weight, W8Weight, Weight
from jitgemm.weight.parts import check_rotation, check_sizes, expert_indices, format_group
from jitgemm.weight.rotation import rotated, rotated_moments
from jitgemm.weight.search import CHUNK, Grid, Rows, Search, check_underflow, in_steps

W = TypeVar("W", bound=Weight)
G = TypeVar("G", bound=Grid)

CLIP_STEPS = 32
"""Ranges tried by default, in geometric steps from all of it down to MIN_CLIP: each is 5 % smaller than the last."""
MAX_CLIP_STEPS = 1000


def check_clip_steps(steps: object) -> int:
    """Raises TypeError or ValueError for what is no number of ranges to try."""
    if not 0 <= (count := check_int("clip_steps", steps)) <= MAX_CLIP_STEPS:
        raise ValueError(f"clip_steps: expected 0 to {MAX_CLIP_STEPS}, got {count}")
    return count


def check_block(block: object) -> None:
    """Raises TypeError or ValueError for a block of 8-bit weights that no kernel reads."""
    if block is not None and check_int("block", block) != BLOCK:
        raise ValueError(f"block: expected None or {BLOCK}, got {block!r}")


def quantize_w4(
    w: torch.Tensor, group_size: int | str, *, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16,
    full_range: bool = True, positive_scales: bool = False, clip_steps: int = CLIP_STEPS,
    moments: torch.Tensor | None = None, act_order: bool = True, lhs_dtype: torch.dtype | None = None,
    rotation: int = 0,
) -> W4Weight:  # fmt: skip
    """Quantise a weight to 4 bits: per group, the scale (and zero point) of least squared error among those tried.

    ::

        symmetric    q in -8..7    w ~ q * scale              scale of either sign, so that -8 serves either end
        asymmetric   q in 0..15    w ~ (q - zero) * scale     zero an integer 0..15: 0.0 stays 0.0

    Scales are rounded to `scale_dtype` first and codes computed for the rounded scale. Tried are the scales that cover
    the group's range, max |w| / 7, / 7.5 and / 8, or (max - min) / 15, and then scales that clip it, down to a fifth of
    it. Plain round to nearest is the first of them, and a later one is taken only if its error is smaller. The same w
    gives the same weight in every run.

    With `moments` it is the result's error that is made small, not the weight's: an error counts as much as the square
    of the input that it is multiplied by, and GPTQ (https://arxiv.org/abs/2210.17323) lets each column's rounding error
    be made up for by the columns that are rounded later.

    Args:
        w: fp32, bf16 or fp16 [n, k], or [E, n, k] for a weight of E experts, any strides, n a multiple of 8 and k a
            multiple of 16; finite. Left as it is.
        group_size: 32, 64, 128 or 256 values of k share a scale; k (or more), -1 or "channel" for one scale per row.
        symmetric: signed codes; False for codes 0..15 with zero points.
        scale_dtype: torch.bfloat16, torch.float16 or torch.float32.
        full_range: False keeps symmetric codes within -7..7: about a fifth more squared error, but a weight for e4m3
            activations (see lhs_dtype) then decodes in half the instructions.
        positive_scales: symmetric scales of either sign let code -8 serve a group's larger end, which some engines'
            readers do not expect; True for positive ones only.
        clip_steps: how many clipped ranges to try; 0 for plain round to nearest, with max |w| / 7 or (max - min) / 15.
        moments: fp32 [k, k], or [E, k, k] for experts: the sum of x xᵀ over inputs x of the layer, up to a factor.
        act_order: with moments, round the columns of the largest inputs first. The format stays the same. With
            False it is one column after the other.
        lhs_dtype: as in `pack_w4`.
        rotation: 128 rotates w in fp32 before anything else (`jitgemm.weight.rotation.rotated`), and moments with it,
            for activations that are rotated, too; k is a multiple of 128 then. Codes, scales and `dequantize()` are the
            rotated weight's, and `Weight.rotation` says so. 0: w as it is.

    Returns:
        The packed weight on w's device. A group of zeros has scale 0. `unpack()` gives codes, scales and zero points.
        Besides w and the result, n * k / 2 bytes and a fixed amount of memory are used; for experts, which are
        quantised one by one, n * k bytes. With moments it is 16 * (n + k) * k bytes.

    Raises:
        TypeError: an argument is no tensor, or of a wrong type.
        ValueError: wrong shape, a NaN or infinity, or values too large for scale_dtype, or a group's too small.
    """
    n, k = _check_weight(w, rotation)
    check_flag("symmetric", symmetric)
    check_flag("full_range", full_range)
    check_flag("positive_scales", positive_scales)
    check_flag("act_order", act_order)
    check_dtype("scale_dtype", scale_dtype, REAL_TYPES)
    group_size, clip_steps = check_group_size(group_size, k), check_clip_steps(clip_steps)
    format_group(k, group_size)
    _check_moments(moments, w)
    if w.dim() == 3:
        options: dict[str, Any] = dict(
            group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, full_range=full_range,
            positive_scales=positive_scales, clip_steps=clip_steps, act_order=act_order, lhs_dtype=lhs_dtype,
            rotation=rotation,
        )  # fmt: skip
        return _by_expert(W4Weight, lambda e, of_e: quantize_w4(w[e], moments=of_e, **options), w, moments)
    search = Search(symmetric, scale_dtype, full_range, clip_steps, positive_scales)
    size = min(group_size, k)
    with torch.inference_mode(False), torch.no_grad():
        scale = torch.empty((n, ceil_div(k, size)), dtype=scale_dtype, device=w.device)
        zero = torch.empty(scale.shape, dtype=torch.uint8, device=w.device)
        q = torch.empty((n, k // 2), dtype=torch.uint8, device=w.device)
        for _, rows, _, part, codes, *scales in _rounded(w, moments, act_order, rotation, size, lambda part: search):
            scale[rows], zero[rows] = scales
            check_underflow(scale[rows], part)
            q[rows] = _canonical(codes)
        form: Any = dict(zero=None if symmetric else zero, group_size=group_size, k=k, lhs_dtype=lhs_dtype)
        return _saying(rotation, pack_w4(q, scale, **form))


def quantize_w8(
    w: torch.Tensor, lhs_dtype: torch.dtype, *, block: int | None = None, moments: torch.Tensor | None = None,
    rotation: int = 0,
) -> W8Weight:  # fmt: skip
    """Quantise a weight to 8 bits: w ~ q * scale, q rounded to nearest even, a scale for each row or block in fp32.

    The scale is max |w| / 448 for e4m3, and max |w| / 127 for int8, where -128 stays unused. With `moments`, codes
    are GPTQ's, as in `quantize_w4`.

    Args:
        w: fp32, bf16 or fp16 [n, k], or [E, n, k] for a weight of E experts, any strides, n a multiple of 8 and k a
            multiple of 16; finite. Left as it is.
        lhs_dtype: torch.float8_e4m3fn or torch.int8, the type of the weight and of the activations that it meets.
        block: None for a scale per row, 128 for one per block of 128 x 128.
        moments: with a scale per row, as in `quantize_w4`.
        rotation: as in `quantize_w4`.

    Returns:
        The packed weight on w's device. A row or block of zeros has scale 0. Besides w and the result, n * k bytes and
        a fixed amount of memory are used; with moments, 16 * (n + k) * k bytes.

    Raises:
        TypeError: an argument is no tensor, or of a wrong type.
        ValueError: wrong shape, a NaN or infinity, or a row or block of values too small for an fp32 scale.
    """
    n, k = _check_weight(w, rotation)
    check_dtype("lhs_dtype", lhs_dtype, LHS_TYPES)
    grid = Rows(lhs_dtype)
    check_block(block)
    _check_moments(moments, w)
    if moments is not None and block is not None:
        raise ValueError("moments: expected none with block, whose scales are shared by rows, got some")
    if w.dim() == 3:
        options: Any = dict(block=block, rotation=rotation)
        return _by_expert(W8Weight, lambda e, of_e: quantize_w8(w[e], lhs_dtype, moments=of_e, **options), w, moments)
    rows_of, columns = block or 1, block or k  # of a scale
    with torch.inference_mode(False), torch.no_grad():
        if moments is not None:
            rotated_w, moments = _in_fp32(w, slice(n), rotation), _moments_of(moments, rotation)
            codes, scale, _ = gptq(rotated_w, moments, k, grid, act_order=True)
            check_underflow(scale, rotated_w[:, None])
            return _saying(rotation, pack_w8(codes.to(lhs_dtype), scale))
        q = torch.empty((n, k), dtype=lhs_dtype, device=w.device)
        scale = torch.empty((ceil_div(n, rows_of), ceil_div(k, columns)), dtype=torch.float32, device=w.device)
        step = rows_of * max(1, CHUNK["cuda" if w.is_cuda else "cpu"] // (k * rows_of))
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            count = rows.stop - first
            part = _in_fp32(w, rows, rotation)
            part = torch.nn.functional.pad(part, (0, -k % columns, 0, -count % rows_of))
            part = part.view(part.shape[0] // rows_of, rows_of, -1, columns).transpose(1, 2).flatten(2)
            scales, zero = grid.scales(part)
            scale[first // rows_of :][: scales.shape[0]] = scales
            check_underflow(scales, part)
            codes = (
                grid.round_(in_steps(part, scales), zero)
                .to(lhs_dtype)
                .unflatten(2, (rows_of, columns))
                .transpose(1, 2)
                .flatten(2)
                .flatten(0, 1)
            )
            q[rows] = codes[:count, :k]
        return _saying(rotation, pack_w8(q, scale))


def _check_lhs(form: WeightFormat, lhs_type: str | None, name: str = "lhs_dtype") -> None:
    """Raises TypeError for a type of activations that weights of this format do not meet; name: the argument's."""
    if lhs_type not in (None, *form.lhs_types):
        got = dtype_name(torch_dtype(str(lhs_type)))
        raise TypeError(f"{name}: expected {one_of(form.lhs_types)}, {form.why_lhs()}, got {got}")


def _check_given(
    w: torch.Tensor, moments: torch.Tensor | None, act_order: bool, lhs_dtype: torch.dtype | None,
    check_lhs: Callable[[str | None], None], rotation: int,
) -> tuple[int, int]:  # fmt: skip
    """n and k of a weight that has one type of activations, which check_lhs says."""
    sizes = _check_weight(w, rotation)
    check_flag("act_order", act_order)
    check_lhs(None if lhs_dtype is None else check_dtype("lhs_dtype", lhs_dtype, LHS_TYPES))
    _check_moments(moments, w)
    return sizes


def _check_weight(w: torch.Tensor, rotation: int) -> tuple[int, int]:
    """n and k of a float weight that can be quantised."""
    check_dtype("w", check_tensor("w", w).dtype, REAL_TYPES)
    check_values("w", w)
    if w.dim() not in (2, 3) or (w.dim() == 3 and not w.shape[0]):
        raise ValueError(f"w: expected shape [n, k] or [experts, n, k], got {list(w.shape)}")
    n, k = w.shape[-2:]
    check_sizes(n, k, "w")
    check_rotation(rotation, k)
    return n, k


def _check_moments(moments: torch.Tensor | None, w: torch.Tensor) -> None:
    if moments is None:
        return
    check_values("moments", check_tensor("moments", moments))
    shape = [*w.shape[:-2], w.shape[-1], w.shape[-1]]
    if list(moments.shape) != shape or moments.dtype != torch.float32 or moments.device != w.device:
        got = f"{moments.dtype} {list(moments.shape)} on {moments.device}"
        raise ValueError(f"moments: expected fp32 {shape} on {w.device}, got {got}")


def _by_expert(
    kind: type[W], quantize: Callable[[int, torch.Tensor | None], W], w: torch.Tensor, moments: torch.Tensor | None
) -> W:
    """Stacks the weights that `quantize(e, moments of e)` makes for experts."""

    def expert(e: int) -> W:
        try:
            return quantize(e, None if moments is None else moments[e])
        except ValueError as error:
            raise ValueError(str(error).replace("w", f"w[{e}]", 1)) from None

    return kind.stacked(w.shape[0], expert)


def _rounded(
    w: torch.Tensor, moments: torch.Tensor | None, act_order: bool, rotation: int, size: int,
    grid_of: Callable[[torch.Tensor], G],
) -> Iterator[tuple[Any, slice, G, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """For every run of rows of w: (expert, rows, what `grid_of` makes of their values, these [rows, groups, size],
    codes [rows, k], scales and zero points [rows, groups]). Of a dense weight expert is `...`."""
    n, k = w.shape[-2:]
    padding = -k % size  # with zeros, which every scale and zero point represents
    step = n if moments is not None else max(1, CHUNK["cuda" if w.is_cuda else "cpu"] // (k + padding))
    for e in expert_indices(w.shape[0] if w.dim() == 3 else None):
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            values = _in_fp32(w[e], rows, rotation, "w" if e is ... else f"w[{e}]")
            part = torch.nn.functional.pad(values, (0, padding)).unflatten(1, (-1, size))
            grid = grid_of(part)
            if moments is not None:
                yield e, rows, grid, part, *gptq(values, _moments_of(moments[e], rotation), size, grid, act_order)
            else:
                scale, zero = grid.scales(part)
                codes = grid.round_(in_steps(part, scale), zero[..., None])
                yield e, rows, grid, part, codes.flatten(1)[:, :k], scale, zero


def _canonical(codes: torch.Tensor) -> torch.Tensor:
    """Codes [rows, k] -> uint8 [rows, k / 2], even k in the low nibble, two's complement."""
    nibbles = codes.to(torch.int8).view(torch.uint8) & 0xF
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def _in_fp32(w: torch.Tensor, rows: slice, rotation: int, name: str = "w") -> torch.Tensor:
    """Rows of w [n, k] in fp32, rotated if asked for. ValueError for a value that is not finite, before or after."""
    part = w[rows].to(torch.float32)
    if not bool(part.isfinite().all()):
        first = rows.start or 0
        row, column = (~w[rows].isfinite()).nonzero()[0].tolist()
        value = w[first + row, column].item()
        raise ValueError(f"{name}: expected finite values, got {value} at [{first + row}, {column}]")
    if not rotation or bool((part := rotated(part)).isfinite().all()):
        return part
    raise ValueError(f"{name}: expected values whose sums of 128 fp32 holds, which a rotation needs, got larger ones")


def _moments_of(moments: torch.Tensor, rotation: int) -> torch.Tensor:
    return rotated_moments(moments) if rotation else moments


def _saying(rotation: int, weight: W) -> W:
    """The weight, marked as one of values that were rotated so."""
    return replace(weight, rotation=rotation) if rotation else weight
