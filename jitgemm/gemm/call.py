"""The public call: checks arguments, then straight down to a plan; under a tracer through the `torch.library` op.

The hot path is `gemm_w4a8_nt` down to `Plan.launch`: one look-up by everything that decides legality and kernel.
Only a miss imports the layers below, so that importing jitgemm touches neither the CUDA bindings nor the disk.
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.gemm.arguments import PackedWeight, check_addresses, check_arguments, split_lhs
from jitgemm.kernel.formats import WeightFormat
from jitgemm.runtime.dispatch import traced
from jitgemm.runtime.plans import Plans, present
from jitgemm.tensors import check_tensor
from jitgemm.weight.w4 import W4Weight

_plans = Plans()


Lhs = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gemm_w4a8_bf16_nt(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, *, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> None:
    """`gemm_w4a8_nt` into bfloat16, the type that nearly every caller wants.

    Raises:
        TypeError: out is not bfloat16; else as `gemm_w4a8_nt`.
    """
    if getattr(out, "dtype", torch.bfloat16) is not torch.bfloat16:
        raise TypeError(f"out: expected bfloat16 (gemm_w4a8_nt takes other types), got {str(out.dtype)[6:]}")
    gemm_w4a8_nt(lhs, rhs, out, bias=bias, batch_invariant=batch_invariant)


def gemm_w4a8_nt(
    lhs: Lhs, rhs: W4Weight, out: torch.Tensor, *, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> None:
    """out = lhs · rhsᵀ with scales: 8-bit activations times 4-bit weights, group scales exact, on the current stream.

    ::

        out[i, j] = x_scale[i] * sum over groups g of part(i, j, g) + bias[j]
        part(i, j, g) = scale[j, g] * sum over k in g of (x[i, k] - x_zero[i]) * (q[j, k] - zero[j, g])
                        + offset[j, g] * sum over k in g of (x[i, k] - x_zero[i])

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
            or one element.
        rhs: weight [n, k] from `pack_w4`, n a multiple of 8, k a multiple of 32.
        out: bfloat16, float16 or float32 [m, n], stride 1 along n, row stride a multiple of 16 bytes, 16-byte aligned;
            may be a column slice.
        bias: bfloat16 or fp32 [n], contiguous, or None.
        batch_invariant: a row of out has the same bits whatever m is and whichever row it is. Costs time where k
            would be summed in another order for other m (docs/performance.md).

    All on one device. On CUDA: compute capability 9.0; a kernel that is missing is compiled (about 0.2 s), never for a
    new m once the layer is warm. On the CPU: `gemm_w4a8_reference`. m = 0 returns at once.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Nothing was launched.
        CacheMissError: the kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    if type(lhs) is tuple and len(lhs) == 2:
        x, x_scale = lhs
        x_zero = None
    else:
        x, x_scale, x_zero = split_lhs(lhs)
    if torch.compiler.is_compiling() or traced(x, out):
        _call_op(x, x_scale, x_zero, rhs, out, bias, batch_invariant)
        return
    try:
        # As `_key`, written out: a call saved.
        key = (
            rhs.plan_key, x.shape, out.requires_grad, batch_invariant, bias is None,
            None if x_zero is None else rhs.row_sum is None,
        )  # fmt: skip
        tensors = (x, x_scale, out) if bias is None and x_zero is None else present(x, x_scale, x_zero, out, bias)
        plan = _plans.find(key, tensors)
        settled = rhs.settled
    except AttributeError:
        _check_types(x, x_scale, rhs, out, bias)
        raise
    if plan is not None:
        plan.launch(x, x_scale, rhs, out, bias, settled, x_zero)
        return
    _check_types(x, x_scale, rhs, out, bias)
    _plan_and_run(x, x_scale, x_zero, rhs, out, bias, bool(batch_invariant), settled)


def _check_types(x: object, x_scale: object, rhs: object, out: object, bias: object) -> None:
    split_lhs((x, x_scale))
    if not isinstance(rhs, W4Weight):
        raise TypeError(f"rhs: expected a W4Weight from pack_w4, got {type(rhs).__name__}")
    check_tensor("out", out)
    if bias is not None:
        check_tensor("bias", bias)


def _plan_and_run(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor | None,
    weight: PackedWeight | W4Weight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    batch_invariant: bool,
    dependent: bool,
) -> None:
    """The cold path: all checks, then the reference on the CPU, or a plan kept for the next call of these shapes."""
    check_arguments(x, x_scale, weight, out, bias, x_zero)
    if not x.is_cuda:
        check_addresses(x, x_scale, weight, out, bias, x_zero)
        if x.shape[0] > 0:
            _run_reference(x, x_scale, x_zero, weight, out, bias)
        return
    if x.shape[0] == 0:
        return
    check_addresses(x, x_scale, weight, out, bias, x_zero)
    from jitgemm.gemm.plan import Plan

    with torch.cuda.device(x.device):
        plan = Plan(x, x_scale, weight, out, bias, x_zero=x_zero, batch_invariant=batch_invariant)
    key = _key(x, x_zero, weight, out, bias, batch_invariant)
    _plans.keep(key, present(x, x_scale, x_zero, out, bias), plan)
    plan.launch(x, x_scale, weight, out, bias, dependent, x_zero)


def _key(x, x_zero, weight, out, bias, batch_invariant) -> tuple:  # type: ignore[no-untyped-def]
    """What decides legality and kernel beside what `plan_table.like` compares of the tensors."""
    return (
        weight.plan_key, x.shape, out.requires_grad, batch_invariant, bias is None,
        None if x_zero is None else weight.row_sum is None,
    )  # fmt: skip


def _run_reference(x, x_scale, x_zero, weight, out, bias) -> None:  # type: ignore[no-untyped-def]
    from jitgemm.gemm.reference import gemm_w4a8_reference

    if not isinstance(weight, W4Weight):
        group_size = weight.format.group_size or weight.k
        weight = W4Weight(weight.blocks, weight.channel_scale, weight.n, weight.k, group_size, weight.format)
    lhs = (x, x_scale) if x_zero is None else (x, x_scale, x_zero)
    out.copy_(gemm_w4a8_reference(lhs, weight, bias=bias, out_dtype=out.dtype))


# ---- torch.library ---------------------------------------------------------------------------------------------------

_library = torch.library.Library("jitgemm", "FRAGMENT")
_library.define(
    "gemm_w4a8_nt(Tensor x, Tensor x_scale, Tensor? x_zero, Tensor blocks, Tensor? channel_scale, Tensor? row_sum, "
    "Tensor(a!) out, Tensor? bias, int n, int k, int group_size, bool zero_point, str scale_type, str codes, "
    "bool offset, bool batch_invariant) -> ()"
)


def _call_op(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor | None,
    rhs: W4Weight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    batch_invariant: bool,
) -> None:
    _check_types(x, x_scale, rhs, out, bias)
    fmt = rhs.format
    torch.ops.jitgemm.gemm_w4a8_nt(
        x, x_scale, x_zero, rhs.blocks, rhs.channel_scale, rhs.row_sum, out, bias,
        rhs.n, rhs.k, fmt.group_size, fmt.zero_point, fmt.scale_type, fmt.codes, fmt.offset, batch_invariant,
    )  # fmt: skip


def _packed(blocks, channel_scale, row_sum, n, k, *fmt: Any) -> PackedWeight:  # type: ignore[no-untyped-def]
    return PackedWeight(blocks, channel_scale, n, k, WeightFormat(*fmt), row_sum)


def _op(  # type: ignore[no-untyped-def]
    x, x_scale, x_zero, blocks, channel_scale, row_sum, out, bias,
    n, k, group_size, zero_point, scale_type, codes, offset, batch_invariant,
) -> None:  # fmt: skip
    weight = _packed(blocks, channel_scale, row_sum, n, k, group_size, zero_point, scale_type, codes, offset)
    key = _key(x, x_zero, weight, out, bias, batch_invariant)
    plan = _plans.find(key, present(x, x_scale, x_zero, out, bias))
    # A compiler may have put the weight's writer right before this, in a tensor of its own: never ahead of it.
    if plan is None:
        _plan_and_run(x, x_scale, x_zero, weight, out, bias, batch_invariant, dependent=False)
    else:
        plan.launch(x, x_scale, weight, out, bias, False, x_zero)


def _fake_op(  # type: ignore[no-untyped-def]
    x, x_scale, x_zero, blocks, channel_scale, row_sum, out, bias,
    n, k, group_size, zero_point, scale_type, codes, offset, batch_invariant,
) -> None:  # fmt: skip
    weight = _packed(blocks, channel_scale, row_sum, n, k, group_size, zero_point, scale_type, codes, offset)
    check_arguments(x, x_scale, weight, out, bias, x_zero)


for _backend in ("CUDA", "CPU"):
    _library.impl("gemm_w4a8_nt", _op, _backend)
torch.library.register_fake("jitgemm::gemm_w4a8_nt", _fake_op, lib=_library)
