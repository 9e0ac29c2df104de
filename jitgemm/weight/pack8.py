"""pack_w8: an 8-bit weight from the codes and scales of any quantiser into a `W8Weight`.

Checks what a caller gives and says what is wrong with it; the order of the bytes is `layout.py`'s business.
"""

from __future__ import annotations

import torch

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import GROUP_SIZES, STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.tensors import TYPE_NAMES, check_dtype, check_tensor, check_values
from jitgemm.weight.pack import check_group_size, pack_codes
from jitgemm.weight.packed import W8Weight
from jitgemm.weight.parts import check_sizes, format_group, group_count
from jitgemm.weight.ready import capturing

BLOCK = 128
"""Rows and columns of a block with a scale of its own."""


def pack_w8(q: torch.Tensor, scale: torch.Tensor, *, group_size: int | str | None = None) -> W8Weight:
    """Pack an 8-bit weight, or one of E experts, into the kernel's order, once, on the device where it is.

    The weight is q * scale; scales are applied as they are, never rounded. Any strides will do. For experts q and scale
    have a first dimension E, and are packed one by one into the result's memory.

    Args:
        q: float8_e4m3fn or int8 [n, k], n a multiple of 8 and k a multiple of 16. It meets activations of its own type.
            Values are not scanned: NaNs stay NaNs.
        scale: fp32, bf16, fp16 or float8_e8m0fnu, in one of these forms; any values will do:

            - one element, or one per expert [E]: for the whole weight;
            - [n], [n, 1]: a scale per row;
            - [n, ceil(k / group_size)]: a scale per group of 32, 64, 128 or 256 values of k;
            - [ceil(n / 128), ceil(k / 128)]: a scale per block of 128 x 128.

        group_size: what scale's columns must say; they always tell it, so that it may be left out.

    Returns:
        The packed weight on q's device. The CPU and the GPU give the same bytes. Blocks become groups of 128 that
        repeat their scale, e8m0 scales the same numbers in bf16. Where every strip of 64 rows shares its scales per
        group of 128, as in blocks, the format says so, unless packing is being captured. On a GPU the current stream is
        synchronised, unless it is being captured.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype or layout.
        ValueError: wrong shape or device, or values missing (meta tensors).
    """
    check_values("q", check_tensor("q", q))
    check_values("scale", check_tensor("scale", scale))
    lhs = check_dtype("q", q.dtype, LHS_TYPES)
    if q.dim() not in (2, 3) or (q.dim() == 3 and not q.shape[0]):
        raise ValueError(f"q: expected shape [n, k] or [experts, n, k], got {list(q.shape)}")
    if scale.device != q.device:
        raise ValueError(f"scale: expected q's device {q.device}, got {scale.device}")
    *lead, n, k = q.shape
    check_sizes(n, k)
    check_dtype("scale", scale.dtype, (*REAL_TYPES, "e8m0"))
    with torch.inference_mode(False), torch.no_grad():
        scale = scale.bfloat16() if scale.dtype == torch.float8_e8m0fnu else scale  # exact
        scale_type = TYPE_NAMES[scale.dtype]
        scale, group_size = _by_row(scale, lead, n, k, group_size)
        group = format_group(k, group_size)
        strips = group == BLOCK and _same_in_strips(scale)
        format = WeightFormat(group, False, scale_type, lhs, code=typed_code(lhs), strip_scales=strips)
        packed = pack_codes(q, scale, k=k, format=format)
        return W8Weight(packed.blocks, packed.channel_scale, n, k, group_size, format, row_sum=packed.row_sum)


def _same_in_strips(scale: torch.Tensor) -> bool:
    """Whether the rows of every strip have the same scales [*lead, n, groups]."""
    if scale.is_cuda and capturing(scale.device):
        return False
    same = scale[..., 1:, :] == scale[..., :-1, :]
    same[..., STRIP_ROWS - 1 :: STRIP_ROWS, :] = True
    return bool(same.all())


def _by_row(
    scale: torch.Tensor, lead: list[int], n: int, k: int, group_size: int | str | None
) -> tuple[torch.Tensor, int]:
    """A scale of any form as [*lead, n, groups], and the group size."""
    group_size = None if group_size is None else check_group_size(group_size, k)
    shape, block = tuple(scale.shape), (*lead, ceil_div(n, BLOCK), ceil_div(k, BLOCK))
    if scale.numel() == 1 or (lead and shape in ((*lead,), (*lead, 1), (*lead, 1, 1))):
        found = scale.reshape(*(lead if scale.numel() > 1 else ()), 1, 1).expand(*lead, n, 1)
    elif shape[: len(lead) + 1] == (*lead, n) and len(shape) <= len(lead) + 2:
        found = scale if len(shape) == len(lead) + 2 else scale[..., None]
    elif shape == block:
        found = scale.repeat_interleave(BLOCK, -2)[..., :n, :]
    else:
        rows = f"{[*lead, n]}, {[*lead, n, 'ceil(k / group_size)']}".replace("'", "")
        raise ValueError(f"scale: expected one element, shape {rows} or, by block, {list(block)}, got {list(shape)}")
    sizes = {group_count(k, size): size for size in (*(size for size in GROUP_SIZES if size < k), k)}  # no two as many
    size = sizes.get(found.shape[-1])
    if size is None:
        columns, of = (", ".join(map(str, each)) for each in (sizes, sizes.values()))
        raise ValueError(f"scale: expected {columns} columns for groups of {of} of k = {k}, got shape {list(shape)}")
    if group_size is not None and size != min(group_size, k):
        raise ValueError(f"group_size: expected {size}, by scale {list(shape)} for k = {k}, got {group_size}")
    return found, size
