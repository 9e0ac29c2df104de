"""The public calls: check arguments, then straight down to a plan; under a tracer through the `torch.library` op.

The hot path is `gemm` down to `PreparedLaunch.run`: one look-up by everything that decides legality and kernel,
one by addresses. Only a miss imports the layers below, so that importing jitgemm touches neither the CUDA bindings nor
the disk.
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.gemm.arguments import (
    POINTERS,
    Lhs,
    Operands,
    check_arguments,
    check_switches,
    check_types,
    check_weight,
    split_lhs,
)
from jitgemm.gemm.e8m0 import PackingPlan, pack_e8m0
from jitgemm.kernel.formats import format_named
from jitgemm.runtime.checks import check_addresses
from jitgemm.runtime.dispatch import define_op, traced
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.tensors import check_tensor, dtype_name
from jitgemm.weight.packed import PackedWeight, W4Weight, W8Weight, Weight


def gemm_w4a8_bf16_nt(
    lhs: Lhs,
    rhs: W4Weight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:
    """`gemm_w4a8_nt` into bfloat16, the type that nearly every caller wants; TypeError for another out."""
    check_bf16(out)
    gemm(W4Weight, lhs, rhs, out, bias, batch_invariant, kernel)


def gemm_w4a8_nt(
    lhs: Lhs,
    rhs: W4Weight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:
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

    where sum is the run's, of codes times activations; offsets lose as much as codes of 1 would. Runs are added up in
    fp32, which loses up to 2^-24 of the sum of |scaled runs| for each of them, and rounded to out's type (2^-8 of the
    result for bf16). `jitgemm.gemm.bound.gemm_w4a8_bound` works out the whole bound. e4m3 activations without outliers
    typically lose less than 2^-10 of the sum of |terms|. Every scaled sum is an fp32 number on its way: a group's, a
    channel's, and 512 times an e4m3 token scale must not overflow. Bit-identical from run to run.

    Args:
        lhs: (x, x_scale), or (x, x_scale, x_zero) for int8 with zero points. x is float8_e4m3fn or int8 [m, k], stride
            1 along k, row stride a multiple of 16 bytes, 16-byte aligned. x_scale is fp32, x_zero int32, [m], [m, 1]
            or one element. Or x_scale has a scale per token and 128 k, not with x_zero: fp32 [m, ceil(k / 128)], or
            powers of two, as DeepGEMM packs them in int32 [m, ceil(k / 512)] (docs/formats.md), all of any strides.
            Or unpacked, float8_e8m0fnu [m, ceil(k / 128)], which the call packs first unless rows are whole words.
        rhs: weight [n, k] from `pack_w4`, n a multiple of 8, k a multiple of 16.
        out: bfloat16, float16 or float32 [m, n], stride 1 along n, row stride a multiple of 16 bytes, 16-byte aligned;
            may be a column slice.
        bias: bfloat16 or fp32 [n], contiguous, or None.
        batch_invariant: a row of out has the same bits whatever m is and whichever row it is. Costs time where k
            would be summed in another order for other m (docs/performance.md).
        kernel: label of a kernel to take instead of the chosen one, as `jitgemm explain` prints them. The CPU's
            reference has none and takes no notice.

    All on one device. On CUDA: compute capability 9.0; a kernel that is missing is compiled (about 0.2 s), never for a
    new m once the layer is warm. On the CPU: `gemm_w4a8_reference`. m = 0 returns at once.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Nothing was launched.
        CacheMissError: the kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    gemm(W4Weight, lhs, rhs, out, bias, batch_invariant, kernel)


def gemm_w8a8_bf16_nt(
    lhs: Lhs,
    rhs: W8Weight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:
    """`gemm_w8a8_nt` into bfloat16; TypeError for another out."""
    check_bf16(out)
    gemm(W8Weight, lhs, rhs, out, bias, batch_invariant, kernel)


def gemm_w8a8_nt(
    lhs: Lhs,
    rhs: W8Weight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:
    """out = lhs · rhsᵀ with scales, for weights of 8 bits: all else is `gemm_w4a8_nt`'s.

    A step of 32 k of e4m3 loses at most ::

        |x_scale * scale| * (2^-8 * max(max |q| in the step * max |x| in the step, |sum before|) + 2^-13 * |sum after|)

    Args:
        lhs: as `gemm_w4a8_nt` takes it, x of the weight's type. int8 with a scale per row takes k up to 131056.
        rhs: weight [n, k] from `pack_w8`.
        out, bias, batch_invariant, kernel: as `gemm_w4a8_nt` takes them.

    Raises:
        As `gemm_w4a8_nt`.
    """
    gemm(W8Weight, lhs, rhs, out, bias, batch_invariant, kernel)


def check_bf16(out: torch.Tensor) -> None:
    if getattr(out, "dtype", None) is not torch.bfloat16:
        got = dtype_name(check_tensor("out", out).dtype)
        raise TypeError(f"out: expected bfloat16 (the call without bf16 in its name takes other types), got {got}")


def gemm(  # type: ignore[no-untyped-def]
    kind: type[Weight], lhs, rhs, out, bias=None, batch_invariant: bool = False, kernel: str | None = None
) -> None:
    """`gemm_w4a8_nt` for a weight of this kind."""
    if type(rhs) is not kind:
        check_weight(rhs, kind)
    if type(lhs) is tuple and len(lhs) == 2:
        x, x_scale = lhs
        x_zero = None
    else:
        x, x_scale, x_zero = split_lhs(lhs)
    if traced(x, out):
        call_op(Operands(x, x_scale, x_zero, rhs, out, bias), batch_invariant, kernel)
        return
    try:
        _run(x, x_scale, x_zero, rhs, out, bias, batch_invariant, kernel)
    except (AttributeError, TypeError):
        check_types(Operands(x, x_scale, x_zero, rhs, out, bias), batch_invariant, kernel)
        raise


def _run(  # type: ignore[no-untyped-def]
    x, x_scale, x_zero, weight, out, bias, batch_invariant: bool, kernel: str | None
) -> None:
    """The call, directly or by its op: one look-up, then a launch.

    Takes the fields of `Operands` in their order: making one would take a tenth of a call's time.
    """
    # What decides legality and kernel; `LaunchCache.find_plan` compares the rest of the tensors.
    key = (weight.plan_key, x.numel(), batch_invariant, kernel, bias is None, x_zero is None)
    tensors = (x, x_scale, out) if x_zero is None else (x, x_scale, out, x_zero)
    if bias is not None:
        tensors += (bias,)
    plan = this_thread.cache.find_plan(key, tensors)
    if plan is None:
        check_switches(batch_invariant, kernel)
        operands = Operands(x, x_scale, x_zero, weight, out, bias)
        check_arguments(operands)
        if x.shape[0] == 0:
            return
        if x_scale.dtype is torch.float8_e8m0fnu:
            plan = PackingPlan(
                lambda x, x_scale, x_zero, weight, out, bias: _run(
                    x, pack_e8m0(x_scale), x_zero, weight, out, bias, batch_invariant, kernel
                )
            )
        else:
            check_addresses(POINTERS, operands.tensors)
            if not x.is_cuda:
                _run_reference(operands)
                return
            from jitgemm.gemm.plan import Plan

            with torch.cuda.device(x.device):
                plan = Plan(operands, batch_invariant=batch_invariant, kernel=kernel)
        this_thread.cache.add_plan(key, tensors, plan)
    plan.launch(x, x_scale, x_zero, weight, out, bias)


@torch.no_grad()  # as the kernels, whose results go to out
def _run_reference(operands: Operands) -> None:
    from jitgemm.gemm.reference import gemm_w4a8_reference

    weight, out = operands.weight, operands.out
    weight = weight.checked() if isinstance(weight, PackedWeight) else weight
    out.copy_(gemm_w4a8_reference(operands.lhs, weight, bias=operands.bias, out_dtype=out.dtype))


# ---- torch.library ---------------------------------------------------------------------------------------------------


def call_op(operands: Operands, batch_invariant: bool, kernel: str | None) -> None:
    """The call by its op, which a tracer can follow."""
    check_types(operands, batch_invariant, kernel)
    x, x_scale, x_zero, weight, out, bias = operands
    torch.ops.jitgemm.gemm_w4a8_nt(
        x, x_scale, x_zero, weight.blocks, weight.channel_scale, weight.row_sum, out, bias,
        weight.n, weight.k, weight.format.name, batch_invariant, kernel,
    )  # fmt: skip


def _operands(  # type: ignore[no-untyped-def]
    x, x_scale, x_zero, blocks, channel_scale, row_sum, out, bias, n, k, format
) -> Operands:
    weight = PackedWeight(blocks, channel_scale, row_sum, n, k, format_named(format))
    return Operands(x, x_scale, x_zero, weight, out, bias)


_OPERANDS = 11
"""Arguments of the op that are `_operands`'; batch_invariant and the kernel's label follow, the latter only where it is
given. The schema calls it `label`: Inductor has a `kernel=` of its own beside an op's arguments."""


def _op(*arguments: Any) -> None:
    batch_invariant, kernel = (*arguments[_OPERANDS:], None)[:2]
    _run(*_operands(*arguments[:_OPERANDS]), batch_invariant, kernel)


def _fake_op(*arguments: Any) -> None:
    check_arguments(_operands(*arguments[:_OPERANDS]))


define_op(
    "gemm_w4a8_nt(Tensor x, Tensor x_scale, Tensor? x_zero, Tensor blocks, Tensor? channel_scale, Tensor? row_sum, "
    "Tensor(a!) out, Tensor? bias, int n, int k, str format, bool batch_invariant, str? label=None) -> ()",
    _op,
    _fake_op,
)
