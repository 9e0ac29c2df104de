"""The public GEMM calls, with DeepGEMM's names. A name says the weight's type, and with bf16 the result's; else all are
three calls of `gemm/run.py`:

| rows | call | names: bf16, any result |
|---|---|---|
| [m, k] | `gemm` | `gemm_w4a8_bf16_nt`, `gemm_w4a8_nt`, and w8a8 |
| by expert | `contiguous` | `m_grouped_gemm_w4a8_bf16_nt_contiguous`, `m_grouped_gemm_w4a8_nt_contiguous`, w8a8 |
| max_m an expert | `masked` | `m_grouped_gemm_w4a8_bf16_nt_masked`, `m_grouped_gemm_w4a8_nt_masked`, and w8a8 |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jitgemm.gemm.problem import W4, W8, Lhs
from jitgemm.gemm.run import contiguous, gemm, masked
from jitgemm.tensors import check_tensor, dtype_name

if TYPE_CHECKING:
    from jitgemm.weight.packed import W4Weight, W8Weight


def gemm_w4a8_bf16_nt(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, *, bias: torch.Tensor | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """`gemm_w4a8_nt` into bfloat16, the type that nearly every caller wants; TypeError for another out."""
    gemm(W4, lhs, rhs, _bf16(out), bias, batch_invariant, kernel)


def gemm_w4a8_nt(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, *, bias: torch.Tensor | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """out = lhs · rhsᵀ with scales: 8-bit activations times 4-bit weights, group scales exact, on the current stream.

    ::

        out[i, j] = x_scale[i] * sum over groups g of part(i, j, g) + bias[j]
        part(i, j, g) = scale[j, g] * sum over k in g of (x[i, k] - x_zero[i]) * (q[j, k] - zero[j, g])
                        + offset[j, g] * sum over k in g of (x[i, k] - x_zero[i])

    With a scale per token and 128 k, part's sums go over the k of one such block b and of one group, and are multiplied
    by x_scale[i, b] there::

        out[i, j] = bias[j] + sum over parts of
                    (scale[j, g] * x_scale[i, b]) * (sum over their k of x[i, k] * (q[j, k] - zero[j, g]))
                    and offset[j, g] * x_scale[i, b] * (sum over their k of x[i, k])

    The product of the two scales is rounded to fp32 first, and multiplied and added up with the run's sum in one step.

    A tensor core adds up a run of k: a group, or 128 k of a longer one. int8 runs are exact integers. An e4m3 run takes
    steps of 32 k; each cuts off its terms 13 bits below the largest of them and loses at most ::

        |x_scale * scale| * (2^-8 * max(16 * max |x| in the step, |sum before|) + 2^-13 * |sum after|)

    where sum is the run's, of codes times activations; an offset contributes the error of a code of 1. Runs are added
    up in fp32, which loses up to 2^-24 of the sum of |scaled runs| for each run, and rounded to out's type (for bf16
    2^-8 of the result). `jitgemm.gemm.bound.gemm_w4a8_bound` works out the whole bound. e4m3 activations without
    outliers typically lose less than 2^-10 of the sum of |terms|. Every scaled sum is an fp32 number on its way: a
    group's, a channel's, and 512 times an e4m3 token scale must not overflow. Bit-identical from run to run.

    Args:
        lhs: (x, x_scale), or (x, x_scale, x_zero) for int8 with zero points. x is float8_e4m3fn or int8 [m, k], stride
            1 along k, row stride a multiple of 16 bytes, 16-byte aligned. x_scale is fp32, x_zero int32, [m], [m, 1]
            or one element. Or x_scale has a scale per token and 128 k, not with x_zero: fp32 [m, ceil(k / 128)], or
            powers of two, as DeepGEMM packs them in int32 [m, ceil(k / 512)] (docs/formats.md), all of any strides.
            Or unpacked, float8_e8m0fnu [m, ceil(k / 128)], which the call packs first unless rows are whole words.
        rhs: weight [n, k] from `pack_w4`, n a multiple of 8, k a multiple of 16. Where it has a `correction`, x is int8
            with a scale per token, [m, k'] with sums of groups behind its codes, as `quantize_activations` writes them
            for the weight's `correction`; x [m, k] works as well, and takes longer. Where it has a `rotation`, lhs
            is a `Rotated`, as `quantize_activations(..., rotation=128)` returns it. Its `sums`
            say what kernels may add up in (`Weight.with_sums`); f16 and exact ones have activations of their own.
        out: bfloat16, float16 or float32 [m, n], stride 1 along n, row stride a multiple of 16 bytes, 16-byte aligned;
            may be a column slice.
        bias: bfloat16 or fp32 [n], contiguous, or None.
        batch_invariant: a row of out has the same bits whatever m is and whichever row it is. Costs time where k
            would be summed in another order for other m (docs/performance.md).
        kernel: label of a kernel to take instead of the chosen one, as `jitgemm explain` prints them. On the
            CPU the reference runs whichever it is.

    All on one device. On CUDA: compute capability 9.0; a kernel that is missing is compiled (0.5 to 3 s), never for a
    new m once the layer is warm. On the CPU: `gemm_w4a8_reference`. m = 0 returns at once.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Nothing was launched.
        CacheMissError: the kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    gemm(W4, lhs, rhs, out, bias, batch_invariant, kernel)


def gemm_w8a8_bf16_nt(
    lhs: Lhs, rhs: W8Weight, out: torch.Tensor, *, bias: torch.Tensor | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """`gemm_w8a8_nt` into bfloat16; TypeError for another out."""
    gemm(W8, lhs, rhs, _bf16(out), bias, batch_invariant, kernel)


def gemm_w8a8_nt(
    lhs: Lhs, rhs: W8Weight, out: torch.Tensor, *, bias: torch.Tensor | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """out = lhs · rhsᵀ with scales, for weights of 8 bits: all else is `gemm_w4a8_nt`'s.

    A step of 32 k of e4m3 loses at most ::

        |x_scale * scale| * (2^-8 * max(max |q| in the step * max |x| in the step, |sum before|) + 2^-13 * |sum after|)

    Args:
        lhs: as `gemm_w4a8_nt` takes it, x of the weight's type. int8 with a scale per row takes k up to 131056.
        rhs: weight [n, k] from `pack_w8`.
        out, bias, batch_invariant, kernel: as `gemm_w4a8_nt` takes them.

    Raises:
        TypeError, ValueError, CacheMissError, CompileError, UnsupportedDeviceError: as from `gemm_w4a8_nt`.
    """
    gemm(W8, lhs, rhs, out, bias, batch_invariant, kernel)


def m_grouped_gemm_w4a8_bf16_nt_contiguous(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, offsets: torch.Tensor, *, bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None, expected_m: float | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_contiguous` into bfloat16; TypeError for another out."""
    contiguous(W4, lhs, rhs, _bf16(out), offsets, bias, row_index, expected_m, batch_invariant, kernel)


def m_grouped_gemm_w4a8_nt_contiguous(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, offsets: torch.Tensor, *, bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None, expected_m: float | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """out[i] = lhs[i] · rhs[e]ᵀ for the rows i of each expert e, as `gemm_w4a8_nt` computes it, on the current stream.

    ::

        rows     0 1 | 2 3 4 5 | 6 7        offsets = [0, 2, 2, 6, 7], E = 4: expert 1 has no rows, row 7 is no one's
        expert   0   | 2       | 3

    Args:
        lhs: (x, x_scale), or (x, x_scale, x_zero), as `gemm_w4a8_nt` takes them: x [M, k], rows sorted by expert.
        rhs: weight of E experts [E, n, k] from `pack_w4`.
        out: bfloat16, float16 or float32 [M, n], as `gemm_w4a8_nt` takes it. Rows of no expert are left alone.
        offsets: int32 or int64 [E + 1], contiguous: expert e has the rows offsets[e] to offsets[e + 1] - 1. Or [E, 2]:
            its first row and its end, for experts with rows of nobody between them. Read on the device when the kernel
            runs. Values are clamped there: to 0..M, and an end before its first row to that, so no sizes make the
            kernel read or write outside of its tensors. Experts that share rows leave in them what either computes.
        bias: bfloat16 or fp32 [E, n], contiguous, or None.
        row_index: int32 [M], contiguous: row i of the GEMM is row row_index[i] of x, which has any number of rows, and
            of x_scale and x_zero. Rows of x come one at a time then; for many rows an expert it is faster to gather
            them when they are quantised. Values outside of x stand for its last row.
        expected_m: rows of an expert, as expected, by which the kernel is chosen: tokens * top_k over the experts of
            all ranks, say, which may be less than one. None for M / E. Any value gives right results.
        batch_invariant: a row of out has the same bits whatever M, the other rows and its place are.
        kernel: as for `gemm_w4a8_nt`; `jitgemm explain --experts` prints labels.

    All on one device. On the CPU: `m_grouped_gemm_w4a8_reference`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Nothing was launched.
        CacheMissError, CompileError, DriverError, UnsupportedDeviceError: as `gemm_w4a8_nt`.
    """
    contiguous(W4, lhs, rhs, out, offsets, bias, row_index, expected_m, batch_invariant, kernel)


def m_grouped_gemm_w8a8_bf16_nt_contiguous(
    lhs: Lhs, rhs: W8Weight, out: torch.Tensor, offsets: torch.Tensor, *, bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None, expected_m: float | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w8a8_nt_contiguous` into bfloat16; TypeError for another out."""
    contiguous(W8, lhs, rhs, _bf16(out), offsets, bias, row_index, expected_m, batch_invariant, kernel)


def m_grouped_gemm_w8a8_nt_contiguous(
    lhs: Lhs, rhs: W8Weight, out: torch.Tensor, offsets: torch.Tensor, *, bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None, expected_m: float | None = None, batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_contiguous` for a weight of experts from `pack_w8`, and as `gemm_w8a8_nt` computes it."""
    contiguous(W8, lhs, rhs, out, offsets, bias, row_index, expected_m, batch_invariant, kernel)


def m_grouped_gemm_w4a8_bf16_nt_masked(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, masked_m: torch.Tensor, expected_m: float, *,
    bias: torch.Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_masked` into bfloat16; TypeError for another out."""
    masked(W4, lhs, rhs, _bf16(out), masked_m, expected_m, bias, batch_invariant, kernel)


def m_grouped_gemm_w4a8_nt_masked(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, masked_m: torch.Tensor, expected_m: float, *,
    bias: torch.Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """out[e, i] = lhs[e, i] · rhs[e]ᵀ for i < masked_m[e]: DeepEP's low-latency form, of max_m rows for every expert.

    Args:
        lhs: (x, x_scale), or (x, x_scale, x_zero): x [E, max_m, k], x_scale and x_zero [E, max_m] or one element, or
            x_scale [E, max_m, ceil(k / 128)], or packed [E, max_m, ceil(k / 512)], of any strides. Else row strides as
            in `gemm_w4a8_nt`; an expert is max_m row strides behind the one before.
        rhs: weight of E experts [E, n, k] from `pack_w4`.
        out: bfloat16, float16 or float32 [E, max_m, n], strides as x. Rows from masked_m[e] on are left alone.
        masked_m: int32 or int64 [E], contiguous, read on the device and clamped to 0..max_m there.
        expected_m: rows of an expert, as expected, by which the kernel is chosen. Any value gives right results.
        bias, batch_invariant, kernel: as `m_grouped_gemm_w4a8_nt_contiguous` has them.

    Raises:
        TypeError, ValueError, CacheMissError, CompileError, UnsupportedDeviceError: as from
            `m_grouped_gemm_w4a8_nt_contiguous`.
    """
    masked(W4, lhs, rhs, out, masked_m, expected_m, bias, batch_invariant, kernel)


def m_grouped_gemm_w8a8_bf16_nt_masked(
    lhs: Lhs, rhs: W8Weight, out: torch.Tensor, masked_m: torch.Tensor, expected_m: float, *,
    bias: torch.Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w8a8_nt_masked` into bfloat16; TypeError for another out."""
    masked(W8, lhs, rhs, _bf16(out), masked_m, expected_m, bias, batch_invariant, kernel)


def m_grouped_gemm_w8a8_nt_masked(
    lhs: Lhs, rhs: W8Weight, out: torch.Tensor, masked_m: torch.Tensor, expected_m: float, *,
    bias: torch.Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_masked` for a weight of experts from `pack_w8`, and as `gemm_w8a8_nt` computes it."""
    masked(W8, lhs, rhs, out, masked_m, expected_m, bias, batch_invariant, kernel)


def _bf16(out: torch.Tensor) -> torch.Tensor:
    if getattr(out, "dtype", None) is not torch.bfloat16:
        got = dtype_name(check_tensor("out", out).dtype)
        raise TypeError(f"out: expected bfloat16 (the call without bf16 in its name takes other types), got {got}")
    return out
