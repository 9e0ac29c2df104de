"""The public calls: check arguments, then straight down to a plan; under a tracer through the `torch.library` op.

The hot path is `gemm` down to `Launch.run`: one look-up by everything that decides legality and kernel,
one by addresses. Only a miss imports the layers below, so that importing jitgemm touches neither the CUDA bindings nor
the disk.
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.gemm.arguments import POINTERS, Operands, check_arguments, check_label, check_switches, check_types
from jitgemm.gemm.arguments import check_weight, split_lhs
from jitgemm.gemm.e8m0 import PackingPlan, pack_e8m0
from jitgemm.kernel.formats import format_named
from jitgemm.runtime.checks import check_addresses
from jitgemm.runtime.dispatch import define_op, traced
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.weight.packed import AnyWeight, Weight, as_weight
from jitgemm.weight.parts import PackedWeight


def gemm(
    kind: type[Weight],
    lhs: tuple[torch.Tensor, ...],
    rhs: Weight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:
    """`gemm_w4a8_nt` for a weight of this class; `Weight` for both."""
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


def _run(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor | None,
    weight: AnyWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    batch_invariant: bool,
    kernel: str | None,
) -> None:
    """The call, directly or by its op: one look-up, then a launch.

    Takes the fields of `Operands` in their order: making one would take a tenth of a call's time.
    """
    # What decides legality and kernel; `LaunchCache.find_plan` compares the rest of the tensors.
    key = (weight.plan_key, x.numel(), batch_invariant, kernel, bias is None, x_zero is None)
    tensors: tuple[torch.Tensor, ...] = (x, x_scale, out) if x_zero is None else (x, x_scale, out, x_zero)
    if bias is not None:
        tensors += (bias,)
    plan = this_thread.cache.find_plan(key, tensors)
    if plan is None:
        check_switches(batch_invariant, kernel)
        check_label(kernel)
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

    weight, out = as_weight(operands.weight), operands.out
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


def _operands(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor | None,
    blocks: torch.Tensor,
    channel_scale: torch.Tensor | None,
    row_sum: torch.Tensor | None,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    format: str,
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
