"""The public call: checks arguments, then straight down to a plan; under a tracer through the `torch.library` op.

The hot path is `gemm_w4a8_bf16_nt` down to `Plan.launch`: one look-up by everything that decides legality and kernel.
Only a miss imports the layers below, so that importing jitgemm touches neither the CUDA bindings nor the disk.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from jitgemm.arguments import PackedWeight, check_addresses, check_arguments, check_tensor, split_lhs
from jitgemm.spec import WeightFormat
from jitgemm.weight import W4Weight

if TYPE_CHECKING:
    from jitgemm.plan import Plan

MAX_PLANS = 4096
"""Plans a thread keeps; each is a few KiB of host memory."""


class _Plans(threading.local):
    """A thread's plans by signature. A launch block is written in place, so threads do not share them."""

    def __init__(self) -> None:
        self.by_signature: dict[tuple, Plan] = {}


_plans = _Plans()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def gemm_w4a8_bf16_nt(
    lhs: tuple[torch.Tensor, torch.Tensor],
    rhs: W4Weight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """out = lhs · rhsᵀ with scales: 8-bit activations times 4-bit weights, group scales exact, on the current stream.

    ::

        out[i, j] = x_scale[i] * sum over groups g of scale[j, g] * part(i, j, g) + bias[j]
        part(i, j, g) = sum over k in g of x[i, k] * (q[j, k] - zero[j, g])

    int8 sums of a group are exact integers: results are within 2^-8 |exact| (rounding to bf16) plus 2^-20 of the sum of
    |group terms|. e4m3 sums stay in the tensor cores for at most 128 k, then in fp32: within 2^-8 |exact| plus 2^-10 of
    the sum of |terms|; with k below 128 one element in a million may miss that by a fifth (docs/notes/e4m3-accuracy.md).
    Every scaled sum is an fp32 number on its way: a group's, a channel's, and 512 times an e4m3 token scale must not
    overflow. Bit-identical from run to run.

    Args:
        lhs: (x, x_scale). x is float8_e4m3fn or int8 [m, k], stride 1 along k, row stride a multiple of 16 bytes,
            16-byte aligned. x_scale is fp32 [m], [m, 1] or one element.
        rhs: weight [n, k] from `pack_w4`, n a multiple of 8, k a multiple of 32.
        out: bfloat16 [m, n], stride 1 along n, row stride a multiple of 8 elements, 16-byte aligned; may be a column
            slice.
        bias: bfloat16 or fp32 [n], contiguous, or None.

    All on one device. On CUDA: compute capability 9.0; a kernel that is missing is compiled (about 0.2 s), never for a
    new m once the layer is warm. On the CPU: `gemm_w4a8_reference`. m = 0 returns at once.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Nothing was launched.
        CacheMissError: the kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    x, x_scale = lhs if type(lhs) is tuple and len(lhs) == 2 else split_lhs(lhs)
    if torch.compiler.is_compiling() or _traced(x, out):
        _call_op(x, x_scale, rhs, out, bias)
        return
    try:
        signature = (
            rhs.plan_key, x.shape, x.stride(), x.dtype, x.device,
            x_scale.shape, x_scale.stride(), x_scale.dtype, x_scale.device,
            out.shape, out.stride(), out.dtype, out.device, out.requires_grad,
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        )  # fmt: skip
        plan = _plans.by_signature[signature]
    except (AttributeError, KeyError):
        # New shapes, or something that is no tensor or no weight.
        _check_types(x, x_scale, rhs, out, bias)
        _plan_and_run(x, x_scale, rhs, out, bias, rhs.settled)
        return
    plan.launch(x, x_scale, rhs, out, bias, rhs.settled)


def _traced(x: object, out: object) -> bool:
    """Whether this is not plain eager execution: tensor subclasses, a dispatch mode, a functorch transform."""
    return (
        type(x) not in _PLAIN
        or type(out) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


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
    weight: PackedWeight | W4Weight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    dependent: bool,
) -> None:
    """The cold path: all checks, then the reference on the CPU, or a plan kept for the next call of these shapes."""
    check_arguments(x, x_scale, weight, out, bias)
    if not x.is_cuda:
        check_addresses(x, x_scale, weight, out, bias)
        if x.shape[0] > 0:
            _run_reference(x, x_scale, weight, out, bias)
        return
    if x.shape[0] == 0:
        return
    check_addresses(x, x_scale, weight, out, bias)
    from jitgemm.plan import Plan

    with torch.cuda.device(x.device):
        plan = Plan(x, x_scale, weight, out, bias)
    plans = _plans.by_signature
    if len(plans) >= MAX_PLANS:
        del plans[next(iter(plans))]
    plans[_signature(x, x_scale, weight, out, bias)] = plan
    plan.launch(x, x_scale, weight, out, bias, dependent)


def _signature(x, x_scale, weight, out, bias) -> tuple:  # type: ignore[no-untyped-def]
    """What `gemm_w4a8_bf16_nt` writes out in its hot path: all that decides legality and kernel."""
    return (
        weight.plan_key, x.shape, x.stride(), x.dtype, x.device,
        x_scale.shape, x_scale.stride(), x_scale.dtype, x_scale.device,
        out.shape, out.stride(), out.dtype, out.device, out.requires_grad,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
    )  # fmt: skip


def _run_reference(x, x_scale, weight, out, bias) -> None:  # type: ignore[no-untyped-def]
    from jitgemm.reference import gemm_w4a8_reference

    if not isinstance(weight, W4Weight):
        group_size = weight.format.group_size or weight.k
        weight = W4Weight(weight.blocks, weight.channel_scale, weight.n, weight.k, group_size, weight.format)
    out.copy_(gemm_w4a8_reference((x, x_scale), weight, bias=bias))


# ---- torch.library ---------------------------------------------------------------------------------------------------

_library = torch.library.Library("jitgemm", "DEF")
_library.define(
    "gemm_w4a8_bf16_nt(Tensor x, Tensor x_scale, Tensor blocks, Tensor? channel_scale, Tensor(a!) out, Tensor? bias, "
    "int n, int k, int group_size, bool zero_point, str scale_type) -> ()"
)


def _call_op(
    x: torch.Tensor, x_scale: torch.Tensor, rhs: W4Weight, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    _check_types(x, x_scale, rhs, out, bias)
    fmt = rhs.format
    torch.ops.jitgemm.gemm_w4a8_bf16_nt(
        x, x_scale, rhs.blocks, rhs.channel_scale, out, bias,
        rhs.n, rhs.k, fmt.group_size, fmt.zero_point, fmt.scale_type,
    )  # fmt: skip


def _op(  # type: ignore[no-untyped-def]
    x, x_scale, blocks, channel_scale, out, bias, n, k, group_size, zero_point, scale_type
) -> None:
    weight = PackedWeight(blocks, channel_scale, n, k, WeightFormat(group_size, zero_point, scale_type))
    plan = _plans.by_signature.get(_signature(x, x_scale, weight, out, bias)) if x.is_cuda else None
    # A compiler may have put the weight's writer right before this, in a tensor of its own: never ahead of it.
    if plan is None:
        _plan_and_run(x, x_scale, weight, out, bias, dependent=False)
    else:
        plan.launch(x, x_scale, weight, out, bias, dependent=False)


def _fake_op(  # type: ignore[no-untyped-def]
    x, x_scale, blocks, channel_scale, out, bias, n, k, group_size, zero_point, scale_type
) -> None:
    weight = PackedWeight(blocks, channel_scale, n, k, WeightFormat(group_size, zero_point, scale_type))
    check_arguments(x, x_scale, weight, out, bias)


for _key in ("CUDA", "CPU"):
    _library.impl("gemm_w4a8_bf16_nt", _op, _key)
torch.library.register_fake("jitgemm::gemm_w4a8_bf16_nt", _fake_op, lib=_library)
