"""The GEMM calls: check arguments, then straight down to a launch; under a tracer through a `torch.library` op.

The hot path is `gemm` down to `Launch.run`: one look-up by everything that decides legality and kernel, one by
addresses. Only a miss imports the layers below, so that importing jitgemm touches neither the CUDA bindings nor the
disk.

Grouped calls take rows of activations sorted by expert, or a block of rows for each. How many rows an expert has is on
the device, and stays there: the host knows sizes of tensors and a hint, so a call never waits, and a CUDA graph of it may
be replayed with other routings.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.gemm.problem import X, X_SCALE, X_ZERO, Gemm, Groups, as_rows, check_types, check_weight
from jitgemm.gemm.problem import experts_of, pack_e8m0, split_lhs
from jitgemm.kernel.formats import MAX_ROWS, format_named
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.runtime.launch import prepare, run_prepared
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.tensors import check_tensor
from jitgemm.weight.parts import PackedWeight

if TYPE_CHECKING:
    from jitgemm.gemm.launch import GemmLaunch
    from jitgemm.weight.packed import AnyWeight


class _Call(Gemm):
    """As `run_prepared` takes it."""

    __slots__ = ()

    def run_reference(self, operands: Sequence[torch.Tensor | None]) -> None:
        from jitgemm.gemm.reference import write_reference

        write_reference(self)

    def prepare(self, operands: Sequence[torch.Tensor | None]) -> GemmLaunch:
        from jitgemm.gemm.launch import GemmLaunch

        return GemmLaunch(self)


def gemm(
    bits: tuple[int, ...], lhs: tuple[torch.Tensor, ...], rhs: AnyWeight, out: torch.Tensor, bias: torch.Tensor | None = None,
    batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`gemm_w4a8_nt` for a weight whose codes have one of these numbers of bits."""
    if getattr(rhs, "bits", 0) not in bits:
        check_weight(rhs, bits)
    if type(lhs) is tuple and len(lhs) == 2:
        x, x_scale = lhs
        x_zero = None
    else:
        x, x_scale, x_zero = split_lhs(lhs)
    if needs_dispatcher(x, out):
        call_op(Gemm(x, x_scale, x_zero, rhs, out, bias, None, batch_invariant, kernel))
        return
    try:
        _run(x, x_scale, x_zero, rhs, out, bias, batch_invariant, kernel)
    except (AttributeError, TypeError):
        check_types(Gemm(x, x_scale, x_zero, rhs, out, bias, None, batch_invariant, kernel))
        raise


def _run(
    x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor | None, weight: AnyWeight, out: torch.Tensor,
    bias: torch.Tensor | None, batch_invariant: bool, kernel: str | None,
) -> None:  # fmt: skip
    """`run_prepared`, unrolled: making a `Gemm` and asking it would take a tenth of a call's time."""
    # What decides legality and kernel; `LaunchCache.find_plan` compares the rest of the tensors.
    key = (weight.plan_key, x.numel(), batch_invariant, kernel, bias is None, x_zero is None)
    tensors: tuple[torch.Tensor, ...] = (x, x_scale, out) if x_zero is None else (x, x_scale, out, x_zero)
    if bias is not None:
        tensors += (bias,)
    launch = this_thread.cache.find_plan(key, tensors)
    if launch is None:
        call = _Call(x, x_scale, x_zero, weight, out, bias, None, batch_invariant, kernel)
        if call.packs_scales:
            return _run(x, pack_e8m0(x_scale), x_zero, weight, out, bias, batch_invariant, kernel)
        call.check()
        launch = prepare(key, tensors, call, call.operands())
        if launch is None:
            return
    launch.launch_dense(x, x_scale, x_zero, weight, out, bias)


# ---- grouped ---------------------------------------------------------------------------------------------------------


def contiguous(
    bits: tuple[int, ...], lhs: tuple[torch.Tensor, ...], rhs: AnyWeight, out: torch.Tensor, offsets: torch.Tensor,
    bias: torch.Tensor | None = None, row_index: torch.Tensor | None = None, expected_m: float | None = None,
    batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_contiguous` for a weight whose codes have one of these numbers of bits."""
    x, x_scale, x_zero = split_lhs(lhs)
    experts = experts_of(rhs, bits)
    check_tensor("out", out)
    rows = out.shape[0] if out.dim() else 0
    expected_rows = rows if expected_m is None else expected_rows_of(experts, expected_m)
    groups = Groups(check_tensor("offsets", offsets), row_index, 0, expected_rows)
    _call_grouped(x, x_scale, x_zero, rhs, out, bias, groups, batch_invariant, kernel)


def masked(
    bits: tuple[int, ...], lhs: tuple[torch.Tensor, ...], rhs: AnyWeight, out: torch.Tensor, masked_m: torch.Tensor,
    expected_m: float, bias: torch.Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_masked` for a weight whose codes have one of these numbers of bits."""
    x, x_scale, x_zero = split_lhs(lhs)
    experts = experts_of(rhs, bits)
    check_tensor("out", out)
    if x.dim() != 3:
        raise ValueError(f"{X}: expected shape [{experts}, max_m, k], got {list(x.shape)}")
    max_m = x.shape[1]
    x, x_scale, x_zero, out = (  # type: ignore[assignment]  # None only for x_zero
        None if each is None else as_rows(name, each, experts, max_m, columns)
        for name, each, columns in ((X, x, "k"), (X_SCALE, x_scale, ""), (X_ZERO, x_zero, ""), ("out", out, "n"))
    )
    expected_rows = expected_rows_of(experts, expected_m)
    # 0 would stand for offsets; where no expert has room for a row, any other number serves.
    rows_of_expert = max(max_m, 1) if type(max_m) is int else torch.sym_max(max_m, 1)
    groups = Groups(check_tensor("masked_m", masked_m), None, rows_of_expert, expected_rows)
    _call_grouped(x, x_scale, x_zero, rhs, out, bias, groups, batch_invariant, kernel)


def expected_rows_of(experts: int, expected_m: Any) -> int:
    """Rows of all experts, of a call's hint; TypeError for what is no number."""
    numbers = int, float, torch.SymInt, torch.SymFloat
    if not isinstance(expected_m, numbers):
        try:
            expected_m = operator.index(expected_m)
        except TypeError:
            pass
    if isinstance(expected_m, bool) or not isinstance(expected_m, numbers) or not 0 <= expected_m < math.inf:
        raise TypeError(f"expected_m: expected a number of rows, got {expected_m!r}")
    rows: Any = experts * expected_m  # type: ignore[operator]
    rows = min(rows, MAX_ROWS) if isinstance(rows, (int, float)) else rows
    return math.trunc(rows + 0.5)  # torch.export saves no `round`


def _call_grouped(*arguments: Any) -> None:
    """The call of a `Gemm`'s fields."""
    call_op(Gemm(*arguments)) if needs_dispatcher(arguments[0], arguments[4]) else _run_grouped(_Call(*arguments))


def _run_grouped(gemm: _Call) -> None:
    x, x_scale, x_zero, weight, out, bias, groups, batch_invariant, kernel = gemm
    sizes, row_index, rows_of_expert, _ = groups  # type: ignore[misc]
    # A tracer may not know out's rows: what depends on their number waits until here.
    key = (
        weight.plan_key, x.numel(), batch_invariant, kernel, bias is None, x_zero is None, row_index is None,
        rows_of_expert, gemm.expected_rows,
    )  # fmt: skip
    tensors = [x, x_scale, out, sizes]
    tensors += [each for each in (x_zero, bias, row_index) if each is not None]
    if x_scale.dtype is torch.float8_e8m0fnu and gemm.packs_scales:
        return _run_grouped(gemm._replace(x_scale=pack_e8m0(x_scale)))
    run_prepared(key, tensors, gemm)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def call_op(gemm: Gemm) -> None:
    """The call by its op, which a tracer can follow."""
    x, x_scale, x_zero, weight, out, bias, groups, batch_invariant, kernel = gemm
    check_types(gemm)
    tensors = x, x_scale, x_zero, weight.blocks, weight.channel_scale, weight.row_sum, out, bias
    rest = weight.n, weight.k, weight.format.name, batch_invariant, kernel
    if groups is None:
        torch.ops.jitgemm.gemm_w4a8_nt(*tensors, *rest)
    else:
        torch.ops.jitgemm.m_grouped_gemm_w4a8_nt(*tensors, *groups, *rest)


def gemm_of_op(*arguments: Any) -> _Call:
    """The GEMM of an op's arguments; those of the grouped one have the fields of `Groups` behind the bias.

    A dense one may leave the kernel's label out. The schema calls it `label`: Inductor has a `kernel=` of its own beside
    an op's arguments.
    """
    x, x_scale, x_zero, blocks, channel_scale, row_sum, out, bias, *rest = arguments
    groups = None if len(rest) < 6 else Groups(*rest[:4])
    n, k, format, batch_invariant, kernel = (*(rest if groups is None else rest[4:]), None)[:5]
    weight = PackedWeight(blocks, channel_scale, row_sum, n, k, format_named(format))
    return _Call(x, x_scale, x_zero, weight, out, bias, groups, batch_invariant, kernel)


def _op(*arguments: Any) -> None:
    gemm = gemm_of_op(*arguments)
    _run(*gemm[:6], *gemm[7:])


def _grouped_op(*arguments: Any) -> None:
    _run_grouped(gemm_of_op(*arguments))


def _fake_op(*arguments: Any) -> None:
    gemm_of_op(*arguments).check()


define_op(
    "gemm_w4a8_nt(Tensor x, Tensor x_scale, Tensor? x_zero, Tensor blocks, Tensor? channel_scale, Tensor? row_sum, "
    "Tensor(a!) out, Tensor? bias, int n, int k, str format, bool batch_invariant, str? label=None) -> ()",
    _op,
    _fake_op,
)
define_op(
    "m_grouped_gemm_w4a8_nt(Tensor x, Tensor x_scale, Tensor? x_zero, Tensor blocks, Tensor? channel_scale, "
    "Tensor? row_sum, Tensor(a!) out, Tensor? bias, Tensor sizes, Tensor? row_index, SymInt rows_of_expert, "
    "SymInt expected_rows, int n, int k, str format, bool batch_invariant, str? label) -> ()",
    _grouped_op,
    _fake_op,
)
