"""Codes in two levels: the integers that tensor cores multiply, their factors in records, and `pack_w4_two_level`.

(code - zero) * factor is an integer of 8 bits, the weight that times its channel's scale. Records hold each factor with
zero * factor, which a kernel subtracts from code * factor (TwoLevelCodec in include/jitgemm/gemm/codec.cuh), both as
bytes. Of rows 16 * warp + i and 8 more they stand in a word, which a thread loads::

    [warp: 4][i: 8][factor, product: 2][row, row + 8: 2]
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.kernel.codes import CODES, FACTOR_GROUP
from jitgemm.kernel.formats import WeightFormat, ceil_div
from jitgemm.tensors import TYPE_NAMES, describe
from jitgemm.weight import layout
from jitgemm.weight.codes import UNSIGNED, CodeOps, RowParts, Stored, Unpacked, register
from jitgemm.weight.given import MAX_ZERO, check_finite, check_given, row_sums
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import INTEGERS, PackedWeight, by_group, check_sizes, expert_indices
from jitgemm.weight.ready import is_captured

MOST = CODES["two_level"].inner.most  # type: ignore[union-attr]
"""Largest factor."""
RANGE = -128, 127
"""What a code minus its zero point times its factor may be."""


def to_bytes(factors: torch.Tensor) -> torch.Tensor:
    """uint8 [64 * strips, kblocks, 2] -> the bytes of records, [strips, kblocks, 128]."""
    kblocks = factors.shape[1]
    parts = factors.view(-1, 4, 2, 8, kblocks, 2)  # strip, warp, half, i, block, which
    return parts.permute(0, 4, 1, 3, 5, 2).flatten(2)


def from_bytes(bytes: torch.Tensor) -> torch.Tensor:
    """Undo `to_bytes`."""
    strips, kblocks, _ = bytes.shape
    parts = bytes.unflatten(2, (4, 8, 2, 2))  # strip, block, warp, i, which, half
    return parts.permute(0, 2, 5, 3, 1, 4).reshape(strips * 64, kblocks, 2)


def values(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """int8 [rows, k] of uint8 codes and factors uint8 [rows, ceil(k / 128), 2]."""
    factor, product = (
        row.to(torch.int16).repeat_interleave(FACTOR_GROUP, 1)[:, : codes.shape[1]] for row in factors.unbind(-1)
    )
    return (codes * factor).sub_(product).to(torch.int8)


def factors_and_zeros(factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and zero points, uint8 [rows, groups] each."""
    factor, product = factors.unbind(-1)
    return factor.contiguous(), product // factor


class _TwoLevel(CodeOps):
    """Records hold factors and their products with zero points, uint8 [rows, groups of 128, 2]."""

    def to_bytes(self, inner: torch.Tensor) -> torch.Tensor:
        return to_bytes(inner)

    def from_bytes(self, bytes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return from_bytes(bytes)

    def operands(self, stored: Stored) -> RowParts:
        return RowParts(values(stored.q, stored.inner), *stored[1:4])

    def unpacked(self, stored: Stored, format: WeightFormat) -> Unpacked:
        return Unpacked(stored.q, *factors_and_zeros(stored.inner), row_scale=stored.scale)

    def before_packing(self, weight: Any) -> dict[str, Any]:
        """As int4, with scales that are factors times the rows' scales."""
        unpacked: Unpacked = weight.unpack()
        rows: torch.Tensor = unpacked.row_scale  # type: ignore[assignment]
        scale = unpacked.scale.float() * rows.float()  # exact
        parts = dict(q=unpacked.q, scale=scale, zero=unpacked.zero, group_size=FACTOR_GROUP, row_scale=rows.flatten())
        return parts | dict(permutation=weight.permutation)

    def words(self, format: WeightFormat, group_size: int) -> tuple[str, str, str]:
        return "two levels", "unsigned with zero points and factors per 128 k", f"{format.scale_type} scales"

    def layer_words(self, format: WeightFormat, group_size: int) -> tuple[list[str], list[str]]:
        return ["two levels"], [f"scale_dtype={format.scale_type}"]


register(_TwoLevel("two_level", orders={"two_level": UNSIGNED}))

# ---- packing ---------------------------------------------------------------------------------------------------------

_SCALE_TYPES = (torch.bfloat16, torch.float16)
"""Whose products with factors fp32 holds: groups of zero points hold the same weight."""
MAX_K = CODES["two_level"].orders[0].max_channel_k
"""Largest k, as sums of whole rows stay in int32."""


def pack_w4_two_level(
    q: torch.Tensor, group_scale: torch.Tensor, group_zero: torch.Tensor, scale: torch.Tensor
) -> W4Weight:
    """Pack a 4-bit weight in two levels, or one of E experts, into the kernel's order, once, on the device where it is.

    Weight (row, column) is (q - group_zero) * group_scale * scale, with the integers of its 128 columns, as QServe's
    progressive quantisation has it. (q - group_zero) * group_scale must be an integer of 8 bits. It is what tensor
    cores multiply, with sums in int32 over all of k, so groups take as long as a scale a row. 4.125 bits a weight.

    Args:
        q: uint8 [n, k] of 0..15, one value each; n a multiple of 8, k of 16 up to 131056. With a first dimension E for
            experts.
        group_scale: integers 1..127, [n, ceil(k / 128)].
        group_zero: integers 0..16, of group_scale's shape. Times group_scale 255 at most.
        scale: bf16 or fp16, [n] or [n, 1], of experts [E, n] or [E, n, 1]; finite.

    Returns:
        The packed weight on q's device, for int8 activations. The CPU and the GPU give the same bytes. Its `unpack`
        gives q, group_scale, group_zero and as `row_scale` scale back. On a GPU the current stream is synchronised.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype or layout.
        ValueError: wrong shape or device, values out of range or missing (meta tensors), a CUDA graph is captured, in
            which no value can be looked at.
    """
    integers = {"group_scale": (group_scale, INTEGERS), "group_zero": (group_zero, INTEGERS)}
    check_given({"q": (q, (torch.uint8,)), **integers, "scale": (scale, _SCALE_TYPES)}, "k")
    *lead, n, k = q.shape
    check_sizes(n, k)
    if k > MAX_K:
        raise ValueError(f"q: expected k of at most {MAX_K}, for sums in int32, got {k}")
    shape = (*lead, n, ceil_div(k, FACTOR_GROUP))
    for name, tensor in (("group_scale", group_scale), ("group_zero", group_zero)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tuple(scale.shape) not in ((*lead, n), (*lead, n, 1)):
        raise ValueError(f"scale: expected shape {[*lead, n]} or {[*lead, n, 1]}, got {describe(scale)}")
    if is_captured(q):
        raise ValueError("q: expected to look at it, got a CUDA graph's capture; pack before it")
    with torch.inference_mode(False), torch.no_grad():
        check_finite("scale", scale)
        format = format_of(TYPE_NAMES[scale.dtype])
        blocks = torch.empty(
            (*lead, layout.strips_of(n), layout.kblocks_of(k), format.record_bytes), dtype=torch.uint8, device=q.device
        )
        channel_scale = layout.pack_channel_scale(scale.reshape(*lead, n, 1))
        for e in expert_indices(lead[0] if lead else None):
            factors = _checked(q[e], group_scale[e], group_zero[e], f"[{e}]" if lead else "")
            layout.pack_records(
                blocks[e], q[e], channel_scale, None, None, k=k, canonical=False, format=format, inner=factors
            )
        row_sum = row_sums(PackedWeight(blocks, channel_scale, None, n, k, format))
        return W4Weight(blocks, channel_scale, n, k, k, format, row_sum=row_sum)


def format_of(scale_type: str) -> WeightFormat:
    """The format of a weight whose channel scales have this type."""
    return WeightFormat(0, False, scale_type, "two_level", code="two_level")


def levels_of(weight: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Arguments of `pack_w4_two_level` for a `CanonicalWeight` whose scales are exactly integers times its `row_scale`;
    else None."""
    per_channel, row_scale = weight.group_size >= weight.k, weight.row_scale
    if row_scale is None or weight.k > MAX_K or not (per_channel or weight.group_size % FACTOR_GROUP == 0):
        return None
    weight = weight.with_zero_points().regrouped(weight.k if weight.k <= FACTOR_GROUP else FACTOR_GROUP)
    row = row_scale.float()[:, None]
    factor = torch.where(row == 0, 1.0, weight.scale.float() / row).round()
    if not bool(((factor * row == weight.scale.float()) & (factor >= 1) & (factor <= MOST)).all()):
        return None
    return weight.q, factor.to(torch.uint8), weight.zero, row_scale


def holds(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> bool:
    """Whether records hold these codes, factors and zero points of a dense weight."""
    try:
        _checked(q, scale, zero, "")
    except ValueError:
        return False
    return True


def _checked(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, at: str) -> torch.Tensor:
    """Factors and their products with zero points, uint8 [n, groups, 2]. Raises for values that records do not hold."""
    scale, zero = scale.to(torch.int64), zero.to(torch.int64)
    product = scale * zero
    least, most = (
        torch.cat([bound(part) for part, _ in by_group(q, scale, FACTOR_GROUP)], 1) for bound in (_min, _max)
    )
    for name, values, low, high, what in (
        ("q", q, 0, UNSIGNED.high, "values"),
        ("group_scale", scale, 1, MOST, "values"),
        ("group_zero", zero, 0, MAX_ZERO, "values"),
        ("group_zero", product, 0, 255, "group_zero * group_scale of"),
        ("group_scale", (torch.stack((least, most)) - zero) * scale, *RANGE, "(q - group_zero) * group_scale of"),
    ):  # fmt: skip
        first, last = (int(value) for value in values.aminmax())
        if first < low or last > high:
            raise ValueError(f"{name}{at}: expected {what} {low}..{high}, got {first}..{last}")
    return torch.stack((scale, product), -1).to(torch.uint8)


def _min(part: torch.Tensor) -> torch.Tensor:
    return part.amin(-1, keepdim=part.dim() == 2).to(torch.int64)


def _max(part: torch.Tensor) -> torch.Tensor:
    return part.amax(-1, keepdim=part.dim() == 2).to(torch.int64)
