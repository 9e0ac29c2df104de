"""The three GEMM calls beneath the public names, of a weight of any code: check, then straight down to a launch.

Under a tracer they go through a `torch.library` op. The hot path is `gemm` down to `Launch.run`: one look-up by
everything that decides legality and kernel, one by addresses. Only a miss imports the layers below, so that importing
jitgemm touches neither the CUDA bindings nor the disk.

Grouped calls take rows of activations sorted by expert, or a block of rows for each. How many rows an expert has is on
the device, and stays there: the host knows sizes of tensors and a hint, so a call never waits, and a CUDA graph of it
may be replayed with other routings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.gemm.problem import ANY, X, X_SCALE, X_ZERO, Gemm, Groups, as_rows, check_types
from jitgemm.gemm.problem import check_weight, expected_rows_of, experts_of, pack_e8m0, split_lhs
from jitgemm.kernel.formats import format_named
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.runtime.launch import prepare, this_thread
from jitgemm.tensors import check_tensor
from jitgemm.weight.correction import with_late_sums
from jitgemm.weight.parts import PackedWeight, check_rotated

if TYPE_CHECKING:
    from jitgemm.gemm.launch import GemmLaunch
    from jitgemm.weight.packed import AnyWeight, Weight

# ---- dense -----------------------------------------------------------------------------------------------------------


class GemmCall(Gemm):
    """As `run_prepared` takes it."""

    __slots__ = ()

    def amended(self) -> GemmCall:
        """The checked call; or one to be checked, with packed exponents for others, or with sums that x lacks."""
        if self.packs_scales:
            return self._replace(x_scale=pack_e8m0(self.x_scale))
        self.check()
        if not self.lacks_sums or not self.x.is_cuda:
            return self
        weight = self.weight
        return self._replace(x=with_late_sums(self.x, weight.format.lhs_sums, getattr(weight, "layer", "")))

    def run_reference(self, operands: Sequence[torch.Tensor | None]) -> None:
        from jitgemm.gemm.exact import write_reference

        write_reference(self)

    def prepare(self, operands: Sequence[torch.Tensor | None]) -> GemmLaunch:
        from jitgemm.gemm.launch import GemmLaunch

        return GemmLaunch(self)


def gemm(
    bits: int, lhs: tuple[torch.Tensor, ...], rhs: AnyWeight, out: torch.Tensor,
    bias: torch.Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`gemm_w4a8_nt` for a weight of codes of so many bits; 0 for any, and for activations as a layer made them."""
    if bits:
        check_rotated(lhs, getattr(rhs, "rotation", 0))
    if isinstance(lhs, tuple) and len(lhs) == 2:
        x, x_scale = lhs
        x_zero = None
    else:
        x, x_scale, x_zero = split_lhs(lhs)
    if needs_dispatcher(x, out):
        check_weight(rhs, bits)
        call_op(Gemm(x, x_scale, x_zero, rhs, out, bias, None, batch_invariant, kernel))
        return
    try:
        _run(x, x_scale, x_zero, rhs, out, bias, batch_invariant, kernel, bits)
    except (AttributeError, TypeError):
        check_weight(rhs, bits)
        check_types(Gemm(x, x_scale, x_zero, rhs, out, bias, None, batch_invariant, kernel))
        raise


def _run(
    x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor | None, weight: AnyWeight, out: torch.Tensor,
    bias: torch.Tensor | None, batch_invariant: bool, kernel: str | None, bits: int = ANY,
) -> None:  # fmt: skip
    """`run_prepared`, unrolled: making a `Gemm` and asking it would take a tenth of a call's time."""
    # What decides legality and kernel; `LaunchCache.find_plan` compares the rest of the tensors.
    key = (bits, weight.plan_key, x.numel(), batch_invariant, kernel, bias is None, x_zero is None)
    tensors: tuple[torch.Tensor, ...] = (x, x_scale, out) if x_zero is None else (x, x_scale, out, x_zero)
    if bias is not None:
        tensors += (bias,)
    launch = this_thread.cache.find_plan(key, tensors)
    if launch is None:
        if bits:
            check_weight(weight, bits)
        call = GemmCall(x, x_scale, x_zero, weight, out, bias, None, batch_invariant, kernel)
        if (other := call.amended()) is not call:
            return _run(*other[:6], *other[7:], bits)
        launch = prepare(key, tensors, call, call.operands())
        if launch is None:
            return
    launch.launch_dense(x, x_scale, x_zero, weight, out, bias)


# ---- grouped ---------------------------------------------------------------------------------------------------------


def contiguous(
    bits: int, lhs: tuple[torch.Tensor, ...], rhs: Weight, out: torch.Tensor, offsets: torch.Tensor,
    bias: torch.Tensor | None = None, row_index: torch.Tensor | None = None, expected_m: float | None = None,
    batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_contiguous` for a weight whose codes have so many bits; 0 for any."""
    (x, x_scale, x_zero), experts = split_lhs(lhs), experts_of(rhs, bits)
    check_rotated(lhs, rhs.rotation)
    check_tensor("out", out)
    rows = out.shape[0] if out.dim() else 0
    expected_rows = rows if expected_m is None else expected_rows_of(experts, expected_m)
    groups = Groups(check_tensor("offsets", offsets), row_index, 0, expected_rows)
    _call_grouped(x, x_scale, x_zero, rhs, out, bias, groups, batch_invariant, kernel)


def masked(
    bits: int, lhs: tuple[torch.Tensor, ...], rhs: Weight, out: torch.Tensor, masked_m: torch.Tensor,
    expected_m: float, bias: torch.Tensor | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> None:  # fmt: skip
    """`m_grouped_gemm_w4a8_nt_masked` for a weight whose codes have so many bits; 0 for any."""
    (x, x_scale, x_zero), experts = split_lhs(lhs), experts_of(rhs, bits)
    check_rotated(lhs, rhs.rotation)
    check_tensor("out", out)
    if x.dim() != 3:
        raise ValueError(f"{X}: expected shape [{experts}, max_m, k], got {list(x.shape)}")
    max_m = x.shape[1]
    x, x_scale, x_zero, out = (  # type: ignore[assignment]  # None only for x_zero
        None if each is None else as_rows(name, each, experts, max_m, columns)
        for name, each, columns in ((X, x, "k"), (X_SCALE, x_scale, ""), (X_ZERO, x_zero, ""), ("out", out, "n"))
    )
    expected_rows = expected_rows_of(experts, expected_m)
    # 0 would stand for offsets; where no expert can have a row, any other number serves.
    rows_of_expert = max(max_m, 1) if type(max_m) is int else torch.sym_max(max_m, 1)
    groups = Groups(check_tensor("masked_m", masked_m), None, rows_of_expert, expected_rows)
    _call_grouped(x, x_scale, x_zero, rhs, out, bias, groups, batch_invariant, kernel)


def _call_grouped(*arguments: Any) -> None:
    """The call of a `Gemm`'s fields."""
    call_op(Gemm(*arguments)) if needs_dispatcher(arguments[0], arguments[4]) else run_grouped(GemmCall(*arguments))


def run_grouped(gemm: GemmCall) -> None:
    """`run_prepared`, unrolled: writes to f16 sums' weights are followed between its steps."""
    x, x_scale, x_zero, weight, out, bias, groups, batch_invariant, kernel = gemm
    sizes, row_index, rows_of_expert, _ = groups  # type: ignore[misc]
    # A tracer may not know out's rows: what depends on their number waits until here.
    key = (
        weight.plan_key, x.numel(), batch_invariant, kernel, bias is None, x_zero is None,
        row_index is None, rows_of_expert, gemm.expected_rows,
    )  # fmt: skip
    tensors = [x, x_scale, out, sizes]
    tensors += [tensor for tensor in (x_zero, bias, row_index) if tensor is not None]
    launch = this_thread.cache.find_plan(key, tensors)
    if launch is None and (other := gemm.amended()) is not gemm:
        return run_grouped(other)
    if weight.sums == "f16":
        weight.follow_writes()
    operands = gemm.operands()
    if launch is None:
        launch = prepare(key, tensors, gemm, operands)
    if launch is not None:
        launch.run_tensors(*operands)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def call_op(gemm: Gemm) -> None:
    """The call by its op, which a tracer can follow."""
    x, x_scale, x_zero, weight, out, bias, groups, batch_invariant, kernel = gemm
    check_types(gemm)
    tensors = x, x_scale, x_zero, weight.blocks, weight.channel_scale, weight.row_sum, out, bias
    rest = weight.n, weight.k, weight.format.name, batch_invariant, kernel, weight.sums == "exact"
    if groups is None:
        torch.ops.jitgemm.gemm_w4a8_nt(*tensors, *rest)
    else:
        torch.ops.jitgemm.m_grouped_gemm_w4a8_nt(*tensors, *groups, *rest)


def weight_of_op(
    blocks: torch.Tensor, channel_scale: torch.Tensor | None, row_sum: torch.Tensor | None, n: int, k: int, format: str,
    *, exact: bool,
) -> PackedWeight:  # fmt: skip
    """The weight of an op's arguments: one in groups has a `channel_scale` with sums in f16 alone."""
    named = format_named(format)
    sums = "exact" if exact else "f16" if named.group_size and channel_scale is not None else "f32"
    return PackedWeight(blocks, channel_scale, row_sum, n, k, named, sums)


def gemm_of_op(
    x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor | None, blocks: torch.Tensor,
    channel_scale: torch.Tensor | None, row_sum: torch.Tensor | None, out: torch.Tensor, bias: torch.Tensor | None,
    n: int, k: int, format: str, batch_invariant: bool, label: str | None = None, exact: bool = False,
    groups: Groups | None = None,
) -> GemmCall:  # fmt: skip
    """The GEMM of an op's arguments. Schemas say `label`: Inductor has a `kernel=` of its own."""
    weight = weight_of_op(blocks, channel_scale, row_sum, n, k, format, exact=exact)
    return GemmCall(x, x_scale, x_zero, weight, out, bias, groups, batch_invariant, label)


def _grouped_of_op(*arguments: Any) -> GemmCall:
    """The same where the fields of `Groups` stand behind the bias."""
    return gemm_of_op(*arguments[:8], *arguments[12:])._replace(groups=Groups(*arguments[8:12]))


_TENSORS = (
    "Tensor x, Tensor x_scale, Tensor? x_zero, Tensor blocks, Tensor? channel_scale, Tensor? row_sum, Tensor(a!) out, "
    "Tensor? bias"
)
_REST = "int n, int k, str format, bool batch_invariant, str? label"
define_op(
    f"gemm_w4a8_nt({_TENSORS}, {_REST}=None, bool exact=False) -> ()",
    lambda gemm: _run(*gemm[:6], *gemm[7:]),
    GemmCall.check,
    gemm_of_op,
)
define_op(
    f"m_grouped_gemm_w4a8_nt({_TENSORS}, Tensor sizes, Tensor? row_index, SymInt rows_of_expert, SymInt expected_rows, "
    f"{_REST}, bool exact=False) -> ()",
    run_grouped,
    GemmCall.check,
    _grouped_of_op,
)
