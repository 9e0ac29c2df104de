"""How far a kernel's result may be from the exact one: what tensor cores, fp32 sums and the output's type may lose.

Tensor cores add up runs of k: a group, or 128 k where groups are longer or the weight is per channel. Some kernels add
up runs of 256 k of MXFP4 weights with a base a row, and the larger of both losses counts. A run is scaled and added to
the others in fp32. int8 runs are exact. An e4m3 run takes 32 k a step. A step aligns its products and the
sum before it to the largest of them, and cuts off what lies more than 13 bits below; so each of its terms loses less
than 2^-13 of the largest, and the sum, which keeps 13 bits, less than 2^-13 of itself. Codes are at most 16 large:

    loss of a step <= 32 * 2^-13 * max(16 * max |x| of the step, |sum before|) + 2^-13 * |sum after|

in units of codes times activations. A step without activations loses nothing. docs/notes/e4m3-accuracy.md has the
hardware's arithmetic, and why 16 stands here for every code. For 8-bit weights, and MXFP4's codes times their
exponents, max |q| of the row's step stands in its place, and 2^-6, e4m3's least normal number, for less in x or q.
NVFP4's codes times their scales are two terms (`jitgemm.weight.nvfp4`), and each takes a step: twice the steps.

With sums in f16 a step's sum is rounded to 11 bits as well, which loses 2^-11 of |sum after| more. A kernel multiplies
it by scale / 2^E, exact in f16 (`jitgemm.weight.f16_sums`), and adds up at most eight records that follow one another
in f16, from any record on. Each such step is rounded once:

    loss of a step <= 2^-11 * |f16 sum after| + 2^-16 * 2^E

The second term is for sums below 2^-14, f16's least normal number: half of 2^-24, in units that are 512 codes times
activations at most; of MXFP4, whose codes are 2^-8 of their values and in sums an eighth of that, four times as much.
The f16 sum is at most the largest over the starts of what the exact one is, and what was lost since.

int8's sums by parts stand on 1.5 * 2^23 in units of codes times 16, or 8 with zero points, so B = 1.5 * 2^19 or 2^20
here. For two records that follow one another, of scales s0 and s1, fp32 gets (s0 - s1) * (B + p0) + s1 * (B + p0 + p1),
and up to eight pairs' B * s0 are in the sum until they are taken off. Each step rounds; so do s0 - s1 and the sum of
s0:

    loss of a step <= 2^-23 * B * (sum of |s0| of its run so far + |s of it| + |s of the next|)

A weight with corrections (`jitgemm.weight.correction`) is one of codes -8..7 without zero points here, whose offsets
are its factors f: what parts lose goes with its own scales and 16, and the two terms of a group are of their own sizes,
where today's kernels with zero points have one. A block of 32 groups takes four tensor-core steps, two of 16 groups by
two digits. Products of 16-bit floats are exact; a step aligns 16 of them and the sum before to the largest, which is at
most S, the block's sum of |f * sum of activations|, and cuts off at 24 bits (fp32's) or more, as it does its sum:

    loss of a block <= 4 * (17 + 1) * 2^-23 * S

Then it is added in fp32, one more promotion.
"""

from __future__ import annotations

import torch

from jitgemm.dtypes import REAL_TYPES
from jitgemm.gemm.exact import integers
from jitgemm.gemm.problem import Lhs, check_sums_with, fp32_scales, lhs_group_of, split_lhs
from jitgemm.gemm.reference import gemm_w4a8_reference
from jitgemm.kernel.codes import CODES, Code
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, ceil_div, correction_blocks
from jitgemm.tensors import TYPE_NAMES, check_dtype
from jitgemm.weight.correction import SHIFT
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import dequantize_groups

STEP_K = 32
"""k of a tensor-core step with 8-bit operands (`wgmma.mma_async.m64nNk32`)."""
CUT = 2.0**-13
"""What a step cuts off a term at most, as a part of its largest term."""
LEAST_NORMAL = 2.0**-6

LOW = 256
"""By how much less than their values kernels with sums in f16 multiply MXFP4's codes (E2m1LowCodec)."""
F16 = 2.0**-11
"""What rounding to f16 loses of a number at most."""
PARTS = 1.5 * 2.0**23
"""What int8's sums by parts stand on, in units of operands times activations."""
PARTS_RECORDS = 16
"""Records until it is taken off again (kPartsRun in include/jitgemm/gemm/loop.cuh)."""
CORRECTION = 4 * (16 + 2) * 2.0**-23
"""What a block of corrections loses of its sum of |products| at most."""
F16_RECORDS = 8
"""Records that are added up in f16 (kF16Run in include/jitgemm/gemm/loop.cuh)."""

_BUDGET = 1 << 24
"""Float64 values that one temporary may hold (128 MiB)."""
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_HALF_OF_LEAST = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}


def gemm_w4a8_bound(
    lhs: Lhs, rhs: Weight, *, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact result, and how far `gemm_w4a8_nt`, or `gemm_w8a8_nt`, on a GPU may be from it.

    ::

        |out - ref| <= lost + unit * (|ref| + lost)
        lost = |x_scale| * sum over runs r of (|scale| * loss[r] + |offset| * loss1[r])
               + 2^-24 * (promotions + 4) * |x_scale| * size

    loss is the module docstring's, summed over the run's steps with what earlier steps may have lost added to |sum|;
    loss1 is the same with codes of 1. Both are 0 for int8; of a weight with corrections offset is its factors, and
    loss1 what their blocks lose. promotions is how often a result is added to in fp32: runs, twice with offsets, or
    runs and blocks of corrections. size is the sum of |scaled runs|, losses included, and of |x_zero * row sum|. With a
    scale per token and 128 k, |x_scale| stands inside of the sums, as the scale of a run's 128 k.
    unit is 2^-8 for bfloat16, 2^-11 for float16 and 2^-24 for float32. Holds for every kernel and order of sums, as
    long as no intermediate fp32 number over- or underflows.

    Args:
        lhs, bias: as for `gemm_w4a8_reference`.
        rhs: as there. Its sums "f16" add |x_scale| * what steps in f16 lose to lost, "f32" what int8's parts do, where
            kernels may add up so; both cover the other kernels, too.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (ref, bound), fp64 [m, n] on lhs's device. Takes a few times the memory and time of the reference.

    Raises:
        TypeError, ValueError: as `gemm_w4a8_reference`; out_dtype is another type; these activations do not have the
            weight's sums.
    """
    check_dtype("out_dtype", out_dtype, REAL_TYPES)
    unit, least = _UNIT[out_dtype], _HALF_OF_LEAST[out_dtype]
    ref = gemm_w4a8_reference(lhs, rhs, bias=bias, out_dtype=torch.float64)
    x, x_scale, x_zero = split_lhs(lhs)
    check_sums_with(rhs, TYPE_NAMES[x.dtype], lhs_group_of(x_scale) > 0, "rhs")
    powers = rhs.channel_scale[: rhs.n].double() * rhs.ops.f16_unit if rhs.sums == "f16" else None  # type: ignore[index]
    x, corrects = x[:, : rhs.k], bool(rhs.format.correction)
    by_parts = rhs.sums == "f32" and x.dtype == torch.int8 and rhs.format.sums_by_parts and not lhs_group_of(x_scale)
    x_scale = fp32_scales(x_scale, rhs.k)
    lost = torch.empty_like(ref)
    m, k = x.shape
    run = BLOCK_K if rhs.groups == 1 else min(rhs.group_size, BLOCK_K)
    runs = ceil_div(k, run)
    longer = rhs.format.longer_runs(lhs_group_of(x_scale) > 0)
    zero = torch.zeros((m, 1)) if x_zero is None else x_zero.reshape(-1, 1)
    zero = zero.to(ref).expand(m, 1).abs()
    token = x_scale.to(ref).abs()
    blocks = torch.arange(runs, device=token.device) * run // BLOCK_K
    # [runs or 1, m, 1]
    token = token.T[blocks, :, None] if lhs_group_of(x_scale) else token.reshape(1, -1, 1).expand(1, m, 1)
    strips = ceil_div(rhs.n, STRIP_ROWS)
    strip_step = max(1, _BUDGET // (runs * run * STRIP_ROWS))
    for strip in range(0, strips, strip_step):
        end = min(strip + strip_step, strips)
        columns = slice(strip * STRIP_ROWS, min(end * STRIP_ROWS, rhs.n))
        d, scale, offset = integers(rhs.packed, strip, end)
        if corrects and offset is None:  # q - zero = (q - 8) + (8 - zero)
            _, _, zeros, _ = rhs.rows(strip, end)
            shifted = SHIFT - zeros.to(d)  # type: ignore[union-attr]
            dequantize_groups(d, rhs.group_size, zero=shifted)
            offset = scale * shifted
        d = _by_run(d, runs, run)
        operands = [_by_run(each, runs, run) for each in rhs.packed.summands(strip, end)] or [d]
        # [runs, 1, n]: the scale and offset of each run.
        group = torch.arange(runs, device=d.device) * run // max(rhs.group_size, run)
        scale = scale.T[group, None]
        offset = None if offset is None else offset.T[group, None]
        counts = _by_run(ref.new_ones(1, k), runs, run)
        row_sum = (d.sum(-1)[:, None] * scale).sum(0)
        if offset is not None:
            row_sum += (counts.sum(-1)[:, None] * offset).sum(0)
        m_step = max(1, _BUDGET // (runs * max(run, d.shape[1])))
        for first in range(0, m, m_step):
            rows = slice(first, min(first + m_step, m))
            x_rows = _by_run(x[rows].to(torch.float32).to(torch.float64), runs, run)
            code = None if x.dtype == torch.int8 else CODES[rhs.format.code]
            f16 = None if powers is None else token[:, rows] * powers[columns]
            size, loss = _scaled(x_rows, operands, scale * token[:, rows], code, f16)
            for count in longer:  # with one scale a row
                joined = _joined(x_rows, count), [_joined(each, count) for each in operands]
                found = _scaled(*joined, scale[:1] * token[:, rows], code)
                size, loss = torch.maximum(size, found[0]), torch.maximum(loss, found[1])
            if offset is not None:
                added = _scaled(x_rows, [counts], offset * token[:, rows], code)
                size, loss = size + added[0], loss + added[1] + (CORRECTION * added[0] if corrects else 0)
            if by_parts:
                loss = loss + _lost_by_parts(scale / rhs.format.parts_times) * token[:, rows][0]
            size += loss + zero[rows] * token[0, rows] * row_sum.abs()
            more = 0 if offset is None else correction_blocks(k, rhs.group_size) if corrects else runs
            promotions = runs + more + ceil_div(runs, PARTS_RECORDS) * by_parts
            lost[rows, columns] = loss + size * (2.0**-24 * (promotions + 4))
    return ref, lost + unit * (ref.abs() + lost) + least


def _by_run(matrix: torch.Tensor, runs: int, run: int) -> torch.Tensor:
    """[rows, k] -> [runs, rows, run], with zeros after the last k."""
    missing = runs * run - matrix.shape[1]
    return torch.nn.functional.pad(matrix, (0, missing)).unflatten(1, (runs, run)).transpose(0, 1)


def _joined(runs: torch.Tensor, count: int) -> torch.Tensor:
    """[runs, rows, run] -> [runs / count, rows, count * run]."""
    padded = torch.nn.functional.pad(runs, (0, 0, 0, 0, 0, -runs.shape[0] % count))
    return padded.unflatten(0, (-1, count)).transpose(1, 2).flatten(2)


def _scaled(
    x: torch.Tensor,
    operands: list[torch.Tensor],
    scale: torch.Tensor,
    code: Code | None,
    f16: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over runs of |scaled sum| and of the scaled loss: [m, n] each, of x [runs, m, run].

    operands: [runs, n, run], whose sum x is multiplied by; each takes the steps.
    code: of the weight, with e4m3 activations; None for int8, which loses nothing.
    f16: |x_scale| * 2^E, [1, m, n], with sums in f16; else None.
    """
    cut = CUT if f16 is None else CUT + F16 * (1 + CUT)
    sums = torch.zeros(*x.shape[:2], operands[0].shape[1], dtype=x.dtype, device=x.device)
    loss = torch.zeros_like(sums)
    steps = zip(x.split(STEP_K, -1), *(operand.split(STEP_K, -1) for operand in operands), strict=True)
    for part, codes in ((part, codes) for part, *both in steps for codes in both):
        largest = part.abs().amax(-1, keepdim=True)
        if code is None or code.largest is None:
            some = largest > 0
            least = LEAST_NORMAL * (1 if f16 is None else LOW)
            largest = largest.clamp(min=LEAST_NORMAL) * codes.abs().amax(-1)[:, None].clamp(min=least) * some
        else:
            largest = largest * code.largest
        before = torch.maximum(sums.abs() + loss, largest)
        sums.baddbmm_(part, codes.transpose(1, 2))
        if code is not None:
            step = before.mul_(STEP_K * CUT)
            step += (sums.abs() + loss + step) * cut
            loss += step * (largest > 0)
    loss, sums = loss * scale.abs(), sums * scale  # of a sum of activations there is one for all rows
    added = loss.sum(0) if f16 is None else loss.sum(0) + _lost_in_f16(sums, loss, f16, BLOCK_K // x.shape[-1])
    return sums.abs().sum(0), added


def _lost_by_parts(scale: torch.Tensor) -> torch.Tensor:
    """What adding up by parts loses of records' scales [runs, 1, n], [1, n]; from whichever record on a run begins."""
    size = torch.nn.functional.pad(scale.abs(), (0, 0, 0, 0, PARTS_RECORDS, 1))
    runs = scale.shape[0]

    def back(records: int) -> torch.Tensor:  # the records' so many before
        return size[PARTS_RECORDS - records :][:runs]

    even, odd = (sum(map(back, range(first, PARTS_RECORDS, 2)), size.new_zeros(())) for first in (0, 1))
    return (2.0**-23 * PARTS * (torch.maximum(even, odd) + back(0) + back(-1))).sum(0)


def _lost_in_f16(sums: torch.Tensor, loss: torch.Tensor, unit: torch.Tensor, groups: int) -> torch.Tensor:
    """What adding up scaled sums [runs, m, n] with their losses in f16 loses, [m, n]; `groups` of them are a record's.

    With c of a step and a the other terms: c = F16 * (a + sum of c before), so that all c of a run of steps are at most
    F16 * (1 + F16)^steps * the sum of a.
    """
    zero = torch.zeros_like(sums[:1])
    until, lost = (torch.cat((zero, values.cumsum(0))) for values in (sums, loss))  # [runs + 1, m, n]
    record = torch.arange(sums.shape[0], device=sums.device) // groups
    largest = torch.zeros_like(sums)
    for back in range(F16_RECORDS):
        start = (record - back).clamp(min=0) * groups
        largest = torch.maximum(largest, (until[1:] - until[start]).abs())
    largest += lost[1:] - lost[start]
    largest += unit * (2.0**-16 / F16)
    return largest.sum(0) * (F16 * (1 + F16) ** (F16_RECORDS * groups))
