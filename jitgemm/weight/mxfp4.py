"""MXFP4: values of e2m1 codes, powers of two in bf16, which scales a packed weight has of them, and `pack_mxfp4`.

OCP Microscaling Formats (MX) Specification 1.0: an e2m1 code is a sign, two bits of exponent and one of mantissa; 32
along k share a scale e8m0, a byte s that stands for 2^(s - 127), or NaN for 255.

A code times 2^e is an e4m3 exactly for the fifteen e from -8 to 6: of 0.5 to 6, the least then is 2^-9, e4m3's least
subnormal, and the largest is 384. So groups whose scales are within a factor of 2^14 can share one, a base, in steps of
which their products with codes are e4m3s; a record holds each group's exponent t = e + 8. Groups of zeros fit any base.

    base          2^(largest scale - 6), so that the largest values are among e4m3's largest
    group         codes * 2^(t - 8) * base,    t = 0..14
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.kernel.codes import CODES, EXPONENT_GROUP
from jitgemm.kernel.formats import BLOCK_K, K_ALIGNMENT, STRIP_ROWS, WeightFormat, ceil_div, check_sums
from jitgemm.tensors import check_int
from jitgemm.weight import layout
from jitgemm.weight.codes import E2M1, CodeOps, RowParts, Stored, Unpacked, register
from jitgemm.weight.given import check_given, row_chunks
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import PackedWeight, check_sizes, expert_indices, group_count
from jitgemm.weight.ready import is_captured

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the low three bits of a code; the fourth is the sign."""
ONE = 8
"""The exponent t of 2^0."""
LARGEST = CODES["e2m1"].inner.most  # type: ignore[union-attr]
"""The largest exponent t."""
BIAS = 127
"""s of 2^0."""
NAN = 255


def _table(device: torch.device) -> torch.Tensor:
    """Bytes of e4m3, by t * 16 + code. Made each time, as a tensor that a tracer made is of no use to others."""
    magnitudes = torch.tensor(MAGNITUDES)
    codes = torch.cat((magnitudes, -magnitudes))
    powers = torch.arange(LARGEST + 1.0).sub(ONE).exp2()
    return (powers[:, None] * codes).to(torch.float8_e4m3fn).view(torch.uint8).flatten().to(device)


def values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, k] times 2^(t - 8), exponents t uint8 [rows, ceil(k / 32)] -> float8_e4m3fn [rows, k]."""
    index = exponents.repeat_interleave(EXPONENT_GROUP, 1)[:, : codes.shape[1]].to(torch.int32) << 4 | codes
    return _table(codes.device).index_select(0, index.flatten()).view(codes.shape).view(torch.float8_e4m3fn)


def dequantized(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, k] -> their values, fp32."""
    exponents = torch.full((codes.shape[0], ceil_div(codes.shape[1], EXPONENT_GROUP)), ONE, dtype=torch.uint8)
    return values(codes, exponents.to(codes.device)).float()


# ---- powers of two in bf16: from 2^-133, its least subnormal, on -----------------------------------------------------


def power(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponent as bf16, of integers up to 127; 0 below -133."""
    exponents = exponents.to(torch.int32)
    subnormal = torch.ones_like(exponents) << (exponents + 133).clamp(0, 6)
    bits = torch.where(exponents < -126, subnormal, exponents + BIAS << 7)
    return torch.where(exponents < -133, 0, bits).to(torch.int16).view(torch.bfloat16)


def exponent_of(powers: torch.Tensor) -> torch.Tensor:
    """The inverse, int32; of 0 it is -134."""
    bits = powers.view(torch.int16).to(torch.int32)
    subnormal = sum((bits >> i > 0).to(torch.int32) for i in range(7)) - 134
    return torch.where(bits >> 7 > 0, (bits >> 7) - BIAS, subnormal)


# ---- which scales ----------------------------------------------------------------------------------------------------


def nonzero_groups(q: torch.Tensor, k: int, group: int = EXPONENT_GROUP) -> torch.Tensor:
    """Groups with a value that is not 0: bool [rows, ceil(k / group)], of codes uint8 [rows, k] or [rows, k / 2]."""
    per = group * q.shape[1] // k
    magnitudes = q & (0x77 if q.shape[1] < k else 0x7)
    padded = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[1] % per))
    return padded.unflatten(1, (-1, per)).amax(-1) > 0


def fits(scales: torch.Tensor, used: torch.Tensor, group_size: int) -> bool:
    """Whether scales uint8 [rows, groups of 32] of groups that are `used` can share a base for each row and group_size
    of k, 0 for all of it."""
    low, high = (_extreme(scales, used, group_size, largest) for largest in (False, True))
    return bool((high - low <= LARGEST).all())


def _extreme(scales: torch.Tensor, used: torch.Tensor, group_size: int, largest: bool) -> torch.Tensor:
    """int16 [rows, groups of group_size]: the least or the largest scale of the used groups, 1's if there are none."""
    unused = -1 if largest else NAN
    extremes = torch.where(used, scales.to(torch.int16), unused)
    per = group_size // EXPONENT_GROUP or extremes.shape[1]
    extremes = torch.nn.functional.pad(extremes, (0, -extremes.shape[1] % per), value=unused).unflatten(1, (-1, per))
    extremes = extremes.amax(-1) if largest else extremes.amin(-1)
    return torch.where(extremes == unused, BIAS + LARGEST - ONE, extremes)


def of_zeros(scales: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Scales uint8 [rows, groups of 32]; groups of zeros get the row's least, and 2^0 at most. Files have any scale
    there, and near 2^127 its product with a large scale of activations would be infinite."""
    return torch.where(used, scales.to(torch.int16), _extreme(scales, used, 0, False).clamp(max=BIAS)).to(torch.uint8)


def with_bases(scales: torch.Tensor, used: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bases bf16 [rows, groups of group_size], and exponents t uint8 [rows, groups of 32], of scales that fit."""
    top = _extreme(scales, used, group_size, True)
    per = group_size // EXPONENT_GROUP or scales.shape[1]
    tops = top.repeat_interleave(per, 1)[:, : scales.shape[1]]
    exponents = (scales.to(torch.int16) - tops + LARGEST).clamp_(0, LARGEST).to(torch.uint8)
    return power(top - BIAS - (LARGEST - ONE)), exponents


def scale_bytes(bases: torch.Tensor, exponents: torch.Tensor, group_size: int) -> torch.Tensor:
    """The inverse: scales uint8 [rows, groups of 32]. Those of groups of zeros are some that fit the base."""
    per = group_size // EXPONENT_GROUP or exponents.shape[1]
    base = exponent_of(bases).repeat_interleave(per, 1)[:, : exponents.shape[1]]
    return (base + exponents.to(torch.int32) - ONE + BIAS).clamp_(0, NAN - 1).to(torch.uint8)


# ---- a record's exponents: see E2m1Codec in include/jitgemm/gemm/codec.cuh -------------------------------------------

_STEPS = BLOCK_K // EXPONENT_GROUP


def to_words(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 [64 * strips, 4 * kblocks] -> int32 [strips, kblocks, 32]: a word for rows i and i + 8 of a warp's 16."""
    # strip, warp, half, i, block, step
    parts = exponents.to(torch.int32).view(-1, 4, 2, 8, exponents.shape[1] // _STEPS, _STEPS)
    words = sum(parts[..., step] << (8 * step + 3) for step in range(_STEPS))
    assert isinstance(words, torch.Tensor)
    low, high = words.unbind(2)
    return (low | high << 4 | high >> 28 & 0x7).permute(0, 3, 1, 2).reshape(words.shape[0], -1, STRIP_ROWS // 2)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse: int32 [strips, kblocks, 32] -> uint8 [64 * strips, 4 * kblocks]."""
    strips, kblocks, _ = words.shape
    parts = torch.stack((words, words >> 4 & 0x0FFFFFFF | words << 28), 2).view(strips, kblocks, 2, 4, 8)
    exponents = torch.stack([parts >> (8 * step + 3) & 0xF for step in range(_STEPS)], -1)
    return exponents.permute(0, 3, 2, 4, 1, 5).reshape(strips * STRIP_ROWS, kblocks * _STEPS).to(torch.uint8)


# ---- sums in f16 -----------------------------------------------------------------------------------------------------

LEAST_EXPONENT = 8
"""Kernels multiply codes by 2^(t - 16), an e4m3 from this t on."""
MOST_IN_RECORD = 37_000.0
"""Sum of |codes times 2^(t - 8)| of a row and record: times 2^-8, times 448, and times what rounding a record's four
sums and a run's eight adds, it is below f16's largest number, 65504."""


class _Mxfp4(CodeOps):
    """Records of longer groups than 32 hold exponents t, uint8 [rows, groups of 32]."""

    given_scales = torch.float8_e8m0fnu
    f16_factor = 2.0**-3
    f16_unit = 4.0

    def values(self, q: torch.Tensor) -> torch.Tensor:
        return dequantized(q)

    def no_scales(self, scale: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        return scale == NAN, "finite numbers", scale

    def pack(self, weight: Any, lhs_dtype: torch.dtype | None, correction: bool | None) -> W4Weight:
        return pack_mxfp4(weight.q, weight.scale, k=weight.k)

    def to_bytes(self, inner: torch.Tensor) -> torch.Tensor:
        return to_words(inner).contiguous().view(torch.uint8)

    def from_bytes(self, bytes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return from_words(bytes.view(torch.int32))

    def inner(self, blocks: torch.Tensor, n: int, k: int, format: WeightFormat) -> torch.Tensor:
        """The exponents inside records; all 2^0 if every group has a scale of its own."""
        if (exponents := super().inner(blocks, n, k, format)) is not None:
            return exponents
        return torch.full((n, ceil_div(k, EXPONENT_GROUP)), ONE, dtype=torch.uint8, device=blocks.device)

    def operands(self, stored: Stored) -> RowParts:
        return RowParts(values(stored.q, stored.inner), *stored[1:4])

    def unpacked(self, stored: Stored, format: WeightFormat) -> Unpacked:
        scales = scale_bytes(stored.scale, stored.inner, format.group_size)
        return Unpacked(stored.q, scales.view(torch.float8_e8m0fnu), None)

    def f16_holds(self, packed: PackedWeight) -> torch.Tensor | bool:
        if packed.format.inner is None:
            return True
        by_rows = []
        for first, end in layout.strip_chunks(packed.n, packed.k):
            q, _, _, _, exponents = packed.stored(first, end)
            size = values(q, exponents).to(torch.float32).abs()
            size = torch.nn.functional.pad(size, (0, -size.shape[1] % BLOCK_K)).unflatten(1, (-1, BLOCK_K)).sum(-1)
            low = (exponents < LEAST_EXPONENT) & nonzero_groups(q, packed.k)
            by_rows.append((size.amax(1) <= MOST_IN_RECORD) & ~low.any(1))
        return torch.cat(by_rows)

    def common_group(self, group_size: int, other: int) -> int:
        return min(group_size, other)  # some scales are within a window that others' are not

    def regrouped(
        self, blocks: torch.Tensor, channel_scale: torch.Tensor | None, old: WeightFormat, new: WeightFormat
    ) -> torch.Tensor:
        wide = blocks.new_empty(*blocks.shape[:-1], new.record_bytes)
        wide[..., : new.scales_at] = blocks[..., : old.scales_at]
        *lead, strips, kblocks, _ = blocks.shape
        if channel_scale is None:
            base = blocks[..., old.scales_at : old.offsets_at].view(torch.bfloat16)
        else:
            base = channel_scale.view(*lead, strips, 1, STRIP_ROWS).expand(*lead, strips, kblocks, STRIP_ROWS)
        scales, inner = wide[..., new.scales_at : new.offsets_at].view(torch.bfloat16), blocks[..., old.zeros_at :]
        if new.inner is not None:
            scales.copy_(base)
            wide[..., new.zeros_at :] = inner
            return wide
        exponents = from_words(inner.view(torch.int32).reshape(-1, kblocks, STRIP_ROWS // 2))
        exponents = exponents.view(*lead, strips, STRIP_ROWS, kblocks, -1).movedim(-3, -1)  # [..., kblocks, groups, 64]
        powers = power(exponent_of(base.contiguous())[..., None, :] + exponents.to(torch.int32) - ONE)
        scales.copy_(powers.flatten(-2))
        return wide

    def words(self, format: WeightFormat, group_size: int) -> tuple[str, str, str]:
        return "mxfp4", "e2m1", format.tier

    def layer_words(self, format: WeightFormat, group_size: int) -> tuple[list[str], list[str]]:
        return [], [f"mxfp4 with {format.tier}"]


register(_Mxfp4("e2m1", orders={"e2m1": E2M1}))

# ---- packing ---------------------------------------------------------------------------------------------------------

_CODE_TYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_SCALE_TYPES = (torch.float8_e8m0fnu, torch.uint8)


def pack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, *, k: int | None = None, sums: str = "f32") -> W4Weight:
    """Pack an MXFP4 weight, or one of E experts, into the kernel's order, once, on the device where it is.

    Weight (row, column) is e2m1(code) * 2^(scale - 127), with the scale of its 32 columns, as the OCP Microscaling
    Formats (MX) Specification 1.0 has it (5.3.3, 5.4.1)::

        code   bit 3: sign   bits 2 to 0: 0, 0.5, 1, 1.5, 2, 3, 4, 6      byte i of a row: code 2i     bits 0 to 3
        scale  e8m0, a power of two for 32 k                                               code 2i + 1 bits 4 to 7

    Nothing is rounded. A code times 2^-8 .. 2^6 is an e4m3, so that groups can share a scale if theirs are within 2^14
    of one another; groups of zeros fit any. All scales are looked at, and the weight gets the first of these that holds
    all of it, which `repr` shows:

    - a base for a row: 4.125 bits a weight;
    - a base for a row and 128 k: 4.25 bits;
    - a scale for a row and 32 k, as groups of 32 have: 4.5 bits.

    Args:
        codes: uint8, int8 or float4_e2m1fn_x2 [n, k / 2], two a byte, the even k in the low nibble; or uint8 [n, k],
            one each, 0..15. scales tell which. n a multiple of 8, k of 16. With a first dimension E for experts.
        scales: float8_e8m0fnu, or its bytes as uint8, [n, ceil(k / 32)]. 255, which is NaN, raises ValueError.
        k: only needed where both readings of codes fit scales, as they do with 16 columns.
        sums: what kernels may add up in, "f32" or "f16", as `Weight.with_sums` takes it.

    Returns:
        The packed weight on codes' device, for e4m3 activations. The CPU and the GPU give the same bytes. Its `unpack`
        gives codes and scales back, bit for bit except the scales of groups of zeros. On a GPU the current stream is
        synchronised.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype or layout.
        ValueError: wrong shape or device, values out of range or missing (meta tensors), sums that the weight cannot
            have, a CUDA graph is captured, in which no scale can be looked at.
    """
    check_sums(sums)
    check_given({"codes": (codes, _CODE_TYPES), "scales": (scales, _SCALE_TYPES)}, "k / 2")
    if scales.shape[:-1] != codes.shape[:-1]:
        expected = [*codes.shape[:-1], "ceil(k / 32)"]
        raise ValueError(f"scales: expected shape {expected}, got {list(scales.shape)}".replace("'", ""))
    if is_captured(codes):
        raise ValueError("scales: expected to look at them, got a CUDA graph's capture; pack before it")
    *lead, n, columns = codes.shape
    k = _columns_of(codes, scales, None if k is None else check_int("k", k))
    check_sizes(n, k, "codes")
    canonical = k != columns
    with torch.inference_mode(False), torch.no_grad():
        q, s = codes.view(torch.uint8), scales.view(torch.uint8)
        indices = [*expert_indices(lead[0] if lead else None)]
        used = torch.empty(s.shape, dtype=torch.bool, device=s.device)
        for e in indices:
            at = f"[{e}]" if lead else ""
            if not canonical and int(q[e].max()) > 15:
                raise ValueError(f"codes{at}: expected values 0..15, got {int(q[e].max())}")
            nan = (s[e] == NAN).nonzero()
            if len(nan):
                raise ValueError(f"scales{at}: expected numbers, got 255, e8m0's NaN, at {nan[0].tolist()}")
            for first, end in row_chunks(n, k):
                used[e][first:end] = nonzero_groups(q[e][first:end], k)
        sizes = [k, *(size for size in (BLOCK_K, EXPONENT_GROUP) if size < k)]
        group_size, format = next(
            (size, format)
            for size, format in ((size, format_of(size, k)) for size in sizes)
            if format.inner is None or all(fits(s[e], used[e], format.group_size) for e in indices)
        )
        shape = (*lead, layout.strips_of(n), layout.kblocks_of(k), format.record_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=q.device)
        bases = torch.empty((*lead, n, group_count(k, group_size)), dtype=torch.bfloat16, device=q.device)
        for e in indices:
            exponents = None
            if format.inner is not None:
                bases[e], exponents = with_bases(s[e], used[e], format.group_size)
            else:
                bases[e] = power(of_zeros(s[e], used[e]).to(torch.int32) - BIAS)
            layout.pack_records(
                blocks[e], q[e], bases[e], None, None, k=k, canonical=canonical, format=format, inner=exponents
            )
        channel_scale = None if format.group_size else layout.pack_channel_scale(bases)
        return W4Weight(blocks, channel_scale, n, k, group_size, format).with_sums(sums)


def format_of(group_size: int, k: int) -> WeightFormat:
    """The format of a weight with a base for so many k."""
    return WeightFormat(0 if group_size >= k else group_size, False, "bf16", "e2m1", code="e2m1")


def _columns_of(codes: torch.Tensor, scales: torch.Tensor, k: int | None) -> int:
    """k of a weight with these codes and scales."""
    columns, groups = codes.shape[-1], scales.shape[-1]
    readings = [2 * columns, columns] if codes.dtype == torch.uint8 else [2 * columns]
    fitting = [k for k in readings if ceil_div(k, EXPONENT_GROUP) == groups and k % K_ALIGNMENT == 0]
    if k is not None and k not in fitting:
        raise ValueError(f"k: expected one of {fitting or readings} by codes and scales, got {k}")
    if k is None and len(fitting) > 1:
        raise ValueError(
            f"k: expected the argument k to say whether codes {list(codes.shape)} are k = {columns}, one value each, "
            f"or k = {2 * columns}, two a byte; got None"
        )
    if not fitting:
        check_sizes(codes.shape[-2], readings[0], "codes")
        expected = " or ".join(f"{ceil_div(k, EXPONENT_GROUP)} for k = {k}" for k in readings)
        raise ValueError(f"scales: expected columns for 32 k each, {expected}, got {groups}")
    return k or fitting[0]
