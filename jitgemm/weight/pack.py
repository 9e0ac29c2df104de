"""pack_w4 and pack_w8: a weight from the codes, scales, zero points and offsets of any quantiser.

Check what a caller gives and say what is wrong with it; the order of the bytes is `layout.py`'s business.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.kernel.codes import CODES, typed_code
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, MAX_ROWS, STRIP_ROWS, WeightFormat, ceil_div, check_sums
from jitgemm.kernel.formats import tuned_order
from jitgemm.tensors import TYPE_NAMES, check_dtype, check_flag, check_int, check_plain, check_tensor, check_values
from jitgemm.tensors import dtype_name
from jitgemm.weight import layout
from jitgemm.weight.codes import COMPLEMENT, CODE_OPS, MAGNITUDE, TWOS_COMPLEMENT, UNSIGNED, CodeOps, register
from jitgemm.weight.correction import SHIFT, first_type, held_factors, pack_factors
from jitgemm.weight.given import MAX_ZERO, check_finite, row_sums
from jitgemm.weight.packed import W4Weight, W8Weight
from jitgemm.weight.parts import INTEGERS, PackedWeight, check_permutation, check_sizes, expert_indices, format_group
from jitgemm.weight.parts import group_count
from jitgemm.weight.ready import is_captured
from jitgemm.weight.two_level import levels_of, pack_w4_two_level

BLOCK = 128
"""Rows and columns of a block with a scale of its own."""
_ALL = MAX_ROWS
"""A group size that covers every k: per channel, until k is known."""


def pack_w4(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, *, offset: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None, group_size: int | str, k: int | None = None,
    lhs_dtype: torch.dtype | None = None, code: str = "int4", correction: bool = False, sums: str = "f32",
) -> W4Weight:  # fmt: skip
    """Pack a 4-bit weight, or one of E experts, into the kernel's order, once, on the device where it is.

    The weight is (q - zero) * scale + offset; scales and offsets are applied as they are, never rounded or converted.
    Any strides will do. For experts, q, scale, zero and offset have a first dimension E, and are packed one by one into
    the result's memory: temporaries are as large as for one expert.

    Args:
        q: the codes, n a multiple of 8 and k a multiple of 16, in one of these forms:

            - int8 [n, k], one value each: -8..7, or 0..15 with zero points;
            - uint8 [n, k], one value each, 0..15, only with zero points;
            - uint8 [n, k / 2], the canonical form: even k in the low nibble, odd k in the high nibble; two's
              complement without zero points, 0..15 with them.

            Which of the last two is meant follows from scale's columns.
        scale: fp32, bf16 or fp16 [n, ceil(k / group_size)], finite.
        zero: None for signed codes, or integers 0..16 of any width, [n, ceil(k / group_size)].
        offset: None, or [n, ceil(k / group_size)] of scale's dtype, added to each of the group's weights: the float
            zero points of torchao, ExecuTorch and QServe. Not per channel: repeat scale and offset for groups instead.
        permutation: None, or integers [k] that hold 0..k-1 once each: column j of q is column permutation[j] of the
            layer's input, and the GEMM takes x[:, permutation]. Kept with the weight. Not for experts.
        group_size: 32, 64, 128 or 256 values of k share a scale; k (or more), -1 or "channel" for one scale per row.
        k: only needed where both readings of a uint8 q fit scale.
        lhs_dtype: torch.float8_e4m3fn or torch.int8 if the weight will only ever meet these activations: its codes then
            decode in half the instructions where they can (not with zero points; e4m3: where no code is -8, of any
            expert; int8: not per channel with k above 65536). None packs for both.
        code: what the codes are, a 4-bit one of `jitgemm.kernel.codes`. Of unsigned ones q is uint8.
        correction: whether zero points or offsets, one of the two and in groups, become factors of the sums of a
            token's groups: faster with int8 activations, whose rows then hold those sums behind their codes
            (`Weight.correction`, docs/notes/zero-points.md). With lhs_dtype torch.int8 alone. A 16-bit float must hold
            each factor: offsets of few bits, and zero points where scales are bf16 and not zero.
        sums: what kernels may add up in, as `Weight.with_sums` takes it.

    Returns:
        The packed weight on q's device. The CPU and the GPU give the same bytes. On a GPU the current stream is
        synchronised, unless it is being captured: then values are not scanned and the weight is not
        `ready`.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype or layout.
        ValueError: wrong shape or device, values out of range or missing (meta tensors), a form that cannot be told, or
            sums that the weight cannot have.
    """
    check_sums(sums)
    optional = {"zero": zero, "offset": offset, "permutation": permutation}
    others = {"scale": scale} | {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in {"q": q, **others}.items():
        check_plain(name, check_tensor(name, tensor))
    check_values("q", q)
    if q.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"q: expected int8 or uint8, got {dtype_name(q.dtype)}")
    scale_type = check_dtype("scale", scale.dtype, REAL_TYPES)
    if zero is not None and zero.dtype not in INTEGERS:
        raise TypeError(f"zero: expected an integer dtype, got {dtype_name(zero.dtype)}")
    if offset is not None and offset.dtype != scale.dtype:
        raise TypeError(f"offset: expected scale's dtype {dtype_name(scale.dtype)}, got {dtype_name(offset.dtype)}")
    lhs = None if lhs_dtype is None else check_dtype("lhs_dtype", lhs_dtype, LHS_TYPES)
    names = [name for name, ops in CODE_OPS.items() if isinstance(ops, IntegerOps)]
    if not isinstance(code, str) or code not in names:
        raise ValueError(f"code: expected one of {', '.join(names)}, got {code!r}")
    check_flag("correction", correction)
    if correction and not _may_correct(lhs, code, zero, offset):
        offsets_given = [name for name in ("zero", "offset") if others.get(name) is not None]
        got = f"lhs_dtype {lhs_dtype}, code {code!r} and {' and '.join(offsets_given) or 'neither'}"
        raise ValueError(
            f"correction: expected int8 activations, int4 codes and either zero or offset with it, got {got}"
        )
    group_size = check_group_size(group_size, _ALL)
    if k is not None and (k := check_int("k", k)) < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    if q.dim() not in (2, 3) or (q.dim() == 3 and not q.shape[0]):
        raise ValueError(f"q: expected shape [n, k] or [n, k / 2], or [experts, ...] of these, got {list(q.shape)}")
    *lead, n, _ = q.shape
    if scale.shape[:-1] != q.shape[:-1]:
        sizes = f"experts = {lead[0]}, n = {n}" if lead else f"n = {n}"
        expected = f"[{'experts, ' if lead else ''}n, ceil(k / group_size)] with {sizes}"
        raise ValueError(f"scale: expected shape {expected}, got {list(scale.shape)}")
    if lead and permutation is not None:
        raise ValueError("permutation: expected none for a weight of experts, got one")
    for name, tensor in others.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {tensor.device}")
    if group_size < 1:
        raise ValueError(f"group_size: expected one of {GROUP_SIZES}, or k for per channel, got {group_size}")

    numbers, common = CODE_OPS[code], CODES[code].orders[0].name
    unsigned = numbers.given(zero is not None) == torch.uint8
    k, canonical = _read_form(q, scale.shape[-1], group_size, unsigned, k)
    check_sizes(n, k)
    group_size = k if group_size == _ALL else group_size
    format = WeightFormat(format_group(k, group_size), zero is not None, scale_type, common, code=code)
    if offset is not None and not format.group_size:
        raise ValueError("offset: expected none per channel; repeat scale and offset for groups of 128 instead")
    groups = group_count(k, group_size)
    if scale.shape[-1] != groups:
        sizes = f"k = {k} and group_size {group_size}"
        raise ValueError(f"scale: expected shape {[*lead, n, groups]} for {sizes}, got {list(scale.shape)}")
    for name, by_group in (("zero", zero), ("offset", offset)):
        if by_group is not None and by_group.shape != scale.shape:
            raise ValueError(f"{name}: expected scale's shape {list(scale.shape)}, got {list(by_group.shape)}")
    permutation = None if permutation is None else check_permutation(permutation, k)

    with torch.inference_mode(False), torch.no_grad():
        tuned = format = replace(format, offset=offset is not None)
        if lhs is not None:
            tuned = replace(format, order=tuned_order(lhs, format.group_size, format.zero_point, k, code))
        held, of_tuned = (numbers.nibbles(each.order, each.zero_point) for each in (format, tuned))
        if is_captured(q):  # a value cannot be looked at during capture
            tuned = tuned if tuned.complete else format
        else:
            for name, reals in (("scale", scale), ("offset", offset)):
                if reals is not None:
                    check_finite(name, reals)
            for e in expert_indices(lead[0] if lead else None):
                at = f"[{e}]" if lead else ""
                if not canonical:
                    _check_range(f"q{at}", q[e], held.low, held.high)
                if zero is not None:
                    _check_range(f"zero{at}", zero[e].to(torch.int64), 0, MAX_ZERO)
                if not tuned.complete:
                    parts = layout.split_canonical(q[e], False) if canonical else (q[e],)
                    if min(int(part.min()) for part in parts) < of_tuned.low:
                        tuned = format
        if correction:
            tuned = _corrected(replace(format, order="any"), q, scale, zero, offset)
        packed = pack_codes(q, scale, zero, offset, k=k, canonical=canonical, format=tuned)
        return W4Weight(
            packed.blocks, packed.channel_scale, n, k, group_size, tuned, row_sum=packed.row_sum,
            permutation=permutation,
        ).with_sums(sums)  # fmt: skip


def pack_w8(q: torch.Tensor, scale: torch.Tensor, *, group_size: int | str | None = None) -> W8Weight:
    """Pack an 8-bit weight, or one of E experts, into the kernel's order, once, on the device where it is.

    The weight is q * scale; scales are applied as they are, never rounded. Any strides will do. For experts q and scale
    have a first dimension E, and are packed one by one into the result's memory.

    Args:
        q: float8_e4m3fn or int8 [n, k], n a multiple of 8 and k a multiple of 16. It meets activations of its own type.
            Values are not scanned: NaNs stay NaNs.
        scale: fp32, bf16, fp16 or float8_e8m0fnu, finite, in one of these forms:

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
        ValueError: wrong shape or device, a scale that is NaN or infinite, or values missing (meta tensors).
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
        check_finite("scale", scale)
        scale_type = TYPE_NAMES[scale.dtype]
        scale, group_size = _by_row(scale, lead, n, k, group_size)
        group = format_group(k, group_size)
        strips = group == BLOCK and _same_in_strips(scale)
        format = WeightFormat(group, False, scale_type, lhs, code=typed_code(lhs), uniform_strip_scale=strips)
        packed = pack_codes(q, scale, k=k, format=format)
        return W8Weight(packed.blocks, packed.channel_scale, n, k, group_size, format, row_sum=packed.row_sum)


def pack_codes(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, offset: torch.Tensor | None = None, *,
    k: int, canonical: bool = False, format: WeightFormat,
) -> PackedWeight:  # fmt: skip
    """Codes that the format holds, in its order; the arguments are `layout.pack_records`', with experts or without."""
    *lead, n, _ = q.shape
    shape = (*lead, layout.strips_of(n), format.kblocks(k), format.record_bytes)
    blocks = torch.empty(shape, dtype=torch.uint8, device=q.device)
    channel_scale = None if format.group_size else layout.pack_channel_scale(scale)
    kblocks, stored = layout.kblocks_of(k), format.stored
    for e in expert_indices(lead[0] if lead else None):
        codes, zeros = q[e], None if zero is None else zero[e].to(torch.uint8)
        offsets = None if offset is None else offset[e]
        if format.correction:
            factors = held_factors(scale[e], zeros, offsets, format.correction)
            pack_factors(blocks[e][:, kblocks:], factors)  # type: ignore[arg-type]
            if zeros is not None:  # of nibbles the highest bit is all the difference
                codes = codes ^ 0x88 if canonical else (codes.to(torch.int8) - SHIFT)
            zeros = offsets = None
        part = blocks[e][:, :kblocks]
        layout.pack_records(part, codes, scale[e], offsets, zeros, k=k, canonical=canonical, format=stored)
    packed = PackedWeight(blocks, channel_scale, None, n, k, format)
    # From the tensors alone: making a weight waits for the stream.
    return packed._replace(row_sum=row_sums(packed)) if format.row_sums else packed


def _corrected(
    format: WeightFormat, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, offset: torch.Tensor | None
) -> WeightFormat:
    """The format with factors for zero points or offsets."""
    if not format.group_size:
        raise ValueError("correction: expected False per channel, as sums of all k have too many bits, got True")
    if is_captured(q):
        raise ValueError("correction: expected False while a CUDA graph is captured, which hides values, got True")
    type = first_type(scale, zero, offset, expert_indices(q.shape[0] if q.dim() == 3 else None))
    if not type:
        what = "scales times zero points" if offset is None else "offsets"
        raise ValueError(f"correction: expected {what} that bf16 or fp16 holds 16 times of, got others")
    return replace(format, order="s8", correction=type)


def _check_range(name: str, values: torch.Tensor, low: int, high: int) -> None:
    least, most = torch.stack(values.aminmax()).tolist() if values.numel() else (low, high)
    if least < low or most > high:
        raise ValueError(f"{name}: expected values {low}..{high}, got {least}..{most}")


def check_group_size(group_size: object, k: int) -> int:
    """The columns that share a scale: k for -1 and "channel", which mean all of them."""
    size = -1 if isinstance(group_size, str) and group_size == "channel" else check_int("group_size", group_size)
    return k if size == -1 else size


def _same_in_strips(scale: torch.Tensor) -> bool:
    """Whether the rows of every strip have the same scales [*lead, n, groups]."""
    if is_captured(scale):
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
        by_row = scale.reshape(*(lead if scale.numel() > 1 else ()), 1, 1).expand(*lead, n, 1)
    elif shape[: len(lead) + 1] == (*lead, n) and len(shape) <= len(lead) + 2:
        by_row = scale if len(shape) == len(lead) + 2 else scale[..., None]
    elif shape == block:
        by_row = scale.repeat_interleave(BLOCK, -2)[..., :n, :]
    else:
        rows = f"{[*lead, n]}, {[*lead, n, 'ceil(k / group_size)']}".replace("'", "")
        raise ValueError(f"scale: expected one element, shape {rows} or, by block, {list(block)}, got {list(shape)}")
    sizes = {group_count(k, size): size for size in (*(size for size in GROUP_SIZES if size < k), k)}  # no two as many
    size = sizes.get(by_row.shape[-1])
    if size is None:
        columns, of = (", ".join(map(str, values)) for values in (sizes, sizes.values()))
        raise ValueError(f"scale: expected {columns} columns for groups of {of} of k = {k}, got shape {list(shape)}")
    if group_size is not None and size != min(group_size, k):
        raise ValueError(f"group_size: expected {size}, by scale {list(shape)} for k = {k}, got {group_size}")
    return by_row, size


def _read_form(q: torch.Tensor, groups: int, group_size: int, unsigned: bool, k: int | None) -> tuple[int, bool]:
    """(k, whether codes are canonical, two a byte) by the shapes of codes and scales."""
    columns = q.shape[-1]
    signed_bytes = "q: expected int8 for signed codes, one value each (uint8 holds them only as canonical [n, k / 2])"

    def fits(k: int) -> bool:
        known_group = group_size >= k or group_size in GROUP_SIZES
        return k > 0 and k % K_ALIGNMENT == 0 and known_group and group_count(k, group_size) == groups

    if q.dtype == torch.int8:
        if k is not None and k != columns:
            raise ValueError(f"q: expected shape [n, k = {k}] for int8, one value each, got {list(q.shape)}")
        return columns, False
    if k is not None:
        if k not in (columns, 2 * columns):
            raise ValueError(
                f"q: expected shape [n, k = {k}], or the canonical [n, k / 2 = {k // 2}], got {list(q.shape)}"
            )
        if k == columns and not unsigned:
            raise TypeError(f"{signed_bytes}, got uint8 {list(q.shape)} with k = {k}")
        return k, k != columns
    one_each, canonical = fits(columns), fits(2 * columns)
    said = -1 if group_size == _ALL else group_size
    if not unsigned:
        if one_each and not canonical:
            raise TypeError(f"{signed_bytes}, got uint8 {list(q.shape)} with {groups} groups of {said}")
        return 2 * columns, True
    if one_each and canonical:
        if group_size == 2 * columns and group_size not in GROUP_SIZES:
            return group_size, True  # such a group size is only ever k itself
        raise ValueError(
            f"k: expected the argument k to say whether q uint8 {list(q.shape)} is k = {columns}, one value each, or "
            f"k = {2 * columns}, canonical: scale [n, {groups}] with group_size {said} fits both; got None"
        )
    if one_each or canonical:
        return (columns, False) if one_each else (2 * columns, True)
    least_k = columns if columns % K_ALIGNMENT == 0 else 2 * columns
    check_sizes(q.shape[-2], least_k)
    format_group(least_k, group_size)
    raise ValueError(
        f"scale: expected {group_count(columns, group_size)} columns for q {list(q.shape)} read as one value each, or "
        f"{group_count(2 * columns, group_size)} read as canonical, with group_size {said}, got {groups}"
    )


# ---- codes before packing, `CanonicalWeight`s ------------------------------------------------------------------------


class IntegerOps(CodeOps):
    """Codes of 4 bits that `pack_w4` packs."""

    def pack(self, weight: Any, lhs_dtype: torch.dtype | None, correction: bool | None) -> W4Weight:
        weight = _regrouped(weight)
        scale, zero, offset, size = weight.scale, weight.zero, weight.offset, weight.group_size
        if correction is None:  # wherever it can be had
            lhs = None if lhs_dtype is None else TYPE_NAMES.get(lhs_dtype)
            correction = size < weight.k and _may_correct(lhs, self.name, zero, offset)
            correction = correction and bool(first_type(scale, zero, offset, (...,)))
        return pack_w4(
            weight.q, scale, zero, offset=offset, permutation=weight.permutation, group_size=size, k=weight.k,
            lhs_dtype=lhs_dtype, code=self.name, correction=correction,
        )  # fmt: skip


class _Int4(IntegerOps):
    row_scales = ("bf16", "fp16")

    def pack(self, weight: Any, lhs_dtype: torch.dtype | None, correction: bool | None) -> W4Weight:
        if lhs_dtype == torch.int8 and (in_levels := levels_of(weight)) is not None:
            return pack_w4_two_level(*in_levels)
        return super().pack(weight, lhs_dtype, correction)


class _Bytes(CodeOps):
    """Values of a type of activations, which `pack_w8` packs."""

    def pack(self, weight: Any, lhs_dtype: torch.dtype | None, correction: bool | None) -> W8Weight:
        regrouped = _regrouped(weight)
        if weight.zero is not None:
            raise ValueError(
                "zero: expected none, as packed 8-bit weights have no zero points, got some: `read_layer(...)."
                "dequantize()` gives such a weight in floats, and `jitgemm.nn.load_` does so"
            )
        if lhs_dtype not in (None, weight.q.dtype):
            expected = f"None or {dtype_name(weight.q.dtype)}, the type of the 8-bit weight"
            raise ValueError(f"lhs_dtype: expected {expected}, got {dtype_name(lhs_dtype)}")
        return pack_w8(weight.q, regrouped.scale, group_size=min(regrouped.group_size, weight.k))

    def words(self, format: WeightFormat, group_size: int) -> tuple[str, str, str]:
        group, _, reals = super().words(format, group_size)
        return group, format.code, reals


register(
    _Int4(
        "int4", orders={"any": COMPLEMENT, "e4m3": MAGNITUDE, "s8": TWOS_COMPLEMENT}, zero_orders={"any": UNSIGNED}
    )
)  # fmt: skip
register(_Bytes("e4m3", torch.float8_e4m3fn))
register(_Bytes("int8", torch.int8))


def _may_correct(lhs: str | None, code: str, zero: torch.Tensor | None, offset: torch.Tensor | None) -> bool:
    """Whether corrections may stand for zero points or offsets, whatever their values."""
    return lhs == "s8" and CODES[code].offsets and (zero is None) != (offset is None)


def _regrouped(weight: Any) -> Any:
    """The weight in a group size that kernels have: scales of other sizes are repeated over smaller groups."""
    size = weight.group_size
    if size < weight.k and size not in GROUP_SIZES:
        size = max((group for group in GROUP_SIZES if size % group == 0), default=0)
        if not size:
            expected = f"a multiple of one of {GROUP_SIZES}, or k for per channel"
            raise ValueError(f"group_size: expected {expected}, got {weight.group_size}")
    elif weight.offset is not None and size >= weight.k:
        # The kernel adds offsets by group only.
        size = max((group for group in GROUP_SIZES if group < weight.k and group <= 128), default=0)
        if not size:
            raise ValueError(f"offset: expected k above {min(GROUP_SIZES)} for a float zero point, got {weight.k}")
    return weight.regrouped(size)
