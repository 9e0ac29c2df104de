"""The grouped calls: rows of activations sorted by expert, or a block of rows for each, times the experts' weights.

How many rows an expert has is on the device, and stays there: the host knows sizes of tensors and a hint, so a call
never waits, and a CUDA graph of it may be replayed with other routings. Both calls are one launch of the dense
kernel's family, whose scheduler walks the experts that have rows.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from jitgemm import settings
from jitgemm.gemm.arguments import X, Operands, check_label, check_switches, split_lhs
from jitgemm.gemm.e8m0 import PackingPlan, pack_e8m0
from jitgemm.gemm.groups import GROUPED_POINTERS, Groups, as_rows, check_grouped, experts_of
from jitgemm.kernel.formats import MAX_ROWS, TABLE_SIZES, format_named
from jitgemm.runtime.checks import check_addresses, check_device
from jitgemm.runtime.dispatch import define_op, traced
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.tensors import check_dtype, check_flag, check_int, check_plain, check_tensor, dtype_name
from jitgemm.weight.packed import AnyWeight, Weight
from jitgemm.weight.parts import PackedWeight
from jitgemm.weight.ready import capturing


def contiguous(
    kind: type[Weight],
    lhs: tuple[torch.Tensor, ...],
    rhs: AnyWeight,
    out: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    expected_m: float | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:
    """`m_grouped_gemm_w4a8_nt_contiguous` for a weight of this class; `Weight` for both."""
    x, x_scale, x_zero = split_lhs(lhs)
    experts = experts_of(rhs, kind)
    check_tensor("out", out)
    rows = out.shape[0] if out.dim() else 0
    expected_rows = rows if expected_m is None else expected_rows_of(experts, expected_m)
    groups = Groups(check_tensor("offsets", offsets), row_index, 0, expected_rows)
    _call(Operands(x, x_scale, x_zero, rhs, out, bias), groups, batch_invariant, kernel)


def masked(
    kind: type[Weight],
    lhs: tuple[torch.Tensor, ...],
    rhs: AnyWeight,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: float,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> None:
    """`m_grouped_gemm_w4a8_nt_masked` for a weight of this class; `Weight` for both."""
    x, x_scale, x_zero = split_lhs(lhs)
    experts = experts_of(rhs, kind)
    check_tensor("out", out)
    if x.dim() != 3:
        raise ValueError(f"{X}: expected shape [{experts}, max_m, k], got {list(x.shape)}")
    max_m = x.shape[1]
    x, x_scale, x_zero, out = (
        None if each is None else as_rows(name, each, experts, max_m, columns)
        for name, each, columns in (
            ("lhs[0] (x)", x, "k"), ("lhs[1] (x_scale)", x_scale, ""), ("lhs[2] (x_zero)", x_zero, ""),
            ("out", out, "n"),
        )
    )  # fmt: skip
    expected_rows = expected_rows_of(experts, expected_m)
    # 0 would stand for offsets; where no expert has room for a row, any other number serves.
    rows_of_expert = max(max_m, 1) if type(max_m) is int else torch.sym_max(max_m, 1)
    groups = Groups(check_tensor("masked_m", masked_m), None, rows_of_expert, expected_rows)
    _call(Operands(x, x_scale, x_zero, rhs, out, bias), groups, batch_invariant, kernel)


def rows_of_m_indices(m_indices: torch.Tensor, experts: int, name: str = "m_indices") -> torch.Tensor:
    """DeepGEMM's `m_indices` as `offsets`: int32 [E, 2], each expert's first row and end.

    Args:
        m_indices: int32 [M], the expert of each row; -1, or any number that is no expert's, for rows to skip. Rows of
            one expert stand together, with no other row between them; that is checked on the CPU, and on a GPU,
            waiting for it, where JITGEMM_DEBUG is set. Else an expert's rows are all from its first to its last.
        experts: E.
        name: of m_indices in messages.
    """
    check_dtype(name, check_tensor(name, m_indices).dtype, ("s32",))
    check_plain(name, m_indices)
    if not 1 <= check_int("experts", experts) <= TABLE_SIZES[-1]:
        raise ValueError(f"experts: expected 1 to {TABLE_SIZES[-1]}, got {experts}")
    if m_indices.dim() != 1:
        raise ValueError(f"{name}: expected shape [M], got {list(m_indices.shape)}")
    rows = torch.arange(m_indices.shape[0], dtype=torch.int32, device=m_indices.device)
    of = torch.where((m_indices >= 0) & (m_indices < experts), m_indices, experts).long()
    if not traced(of, of) and (of.is_cpu or (settings.debug() and not capturing(of.device))):
        runs = torch.unique_consecutive(of)
        found, counts = runs[runs < experts].unique(return_counts=True)
        if bool((counts > 1).any()):
            raise ValueError(
                f"{name}: expected each expert's rows together, with no other row between them, got expert "
                f"{int(found[counts > 1][0])} in {int(counts[counts > 1][0])} places"
            )
    first = m_indices.new_full((experts + 1,), m_indices.shape[0]).scatter_reduce_(0, of, rows, "amin")
    end = m_indices.new_zeros(experts + 1).scatter_reduce_(0, of, rows + 1, "amax")
    return torch.stack((torch.minimum(first, end), end), 1)[:experts].contiguous()


def rows_of_problem_sizes(
    expert_offsets: torch.Tensor, problem_sizes: torch.Tensor, swap_ab: bool = True
) -> torch.Tensor:
    """vLLM's `expert_offsets` and `problem_sizes` as `offsets`: int32 [E, 2], each expert's first row and end.

    Args:
        expert_offsets: int32 or int64 [E] or [E + 1], first rows.
        problem_sizes: int32 or int64 [E, 3], m, n and k of each expert's GEMM; n, m and k with swap_ab, as
            `cutlass_w4a8_moe_mm` has them.
    """
    first = check_tensor("expert_offsets", expert_offsets)
    sizes = check_tensor("problem_sizes", problem_sizes)
    check_flag("swap_ab", swap_ab)
    for name, tensor in (("expert_offsets", first), ("problem_sizes", sizes)):
        check_plain(name, tensor)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected int32 or int64, got {dtype_name(tensor.dtype)}")
    if sizes.dim() != 2 or sizes.shape[1] != 3:
        raise ValueError(f"problem_sizes: expected shape [E, 3], got {list(sizes.shape)}")
    if first.dim() != 1 or first.shape[0] - sizes.shape[0] not in (0, 1):
        raise ValueError(f"expert_offsets: expected shape [{sizes.shape[0]}], got {list(first.shape)}")
    check_device("problem_sizes", sizes, "expert_offsets", first.device)
    # No tensor has more rows: what is beyond is cut off as the kernel does, not wrapped around.
    first, rows = (part.long().clamp(-MAX_ROWS, MAX_ROWS) for part in (first, sizes[:, 1 if swap_ab else 0]))
    first = first[: sizes.shape[0]]
    return torch.stack((first, (first + rows).clamp(max=MAX_ROWS)), 1).int()


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
    rows = experts * expected_m
    rows = min(rows, MAX_ROWS) if isinstance(rows, (int, float)) else rows
    return math.trunc(rows + 0.5)  # torch.export saves no `round`


# ---- the call --------------------------------------------------------------------------------------------------------


def _call(operands: Operands, groups: Groups, batch_invariant: bool, kernel: str | None) -> None:
    if traced(operands.x, operands.out):
        x, x_scale, x_zero, weight, out, bias = operands
        torch.ops.jitgemm.m_grouped_gemm_w4a8_nt(
            x, x_scale, x_zero, weight.blocks, weight.channel_scale, weight.row_sum, out, bias, *groups,
            weight.n, weight.k, weight.format.name, batch_invariant, kernel,
        )  # fmt: skip
        return
    _run(operands, groups, batch_invariant, kernel)


def _run(operands: Operands, groups: Groups, batch_invariant: bool, kernel: str | None) -> None:
    """The call, directly or by its op: one look-up, then a launch."""
    x, x_scale, x_zero, weight, out, bias = operands
    sizes, row_index, rows_of_expert, expected_rows = groups
    # A tracer may not know out's rows, so that this waits until here.
    expected_rows = max(1, min(expected_rows, out.shape[0])) if out.dim() else 1
    key = (
        weight.plan_key, x.numel(), batch_invariant, kernel, bias is None, x_zero is None, row_index is None,
        rows_of_expert, expected_rows,
    )  # fmt: skip
    tensors = [x, x_scale, out, sizes]
    tensors += [each for each in (x_zero, bias, row_index) if each is not None]
    plan = this_thread.cache.find_plan(key, tensors)
    if plan is None:
        check_switches(batch_invariant, kernel)
        check_label(kernel)
        check_grouped(operands, groups)
        if out.shape[0] == 0 or x.shape[0] == 0:
            return
        if x_scale.dtype is torch.float8_e8m0fnu:
            plan = PackingPlan(
                lambda operands, groups: _run(
                    operands._replace(x_scale=pack_e8m0(operands.x_scale)), groups, batch_invariant, kernel
                )
            )
        else:
            check_addresses(GROUPED_POINTERS, (sizes, row_index, *operands.tensors))
            if not x.is_cuda:
                _run_reference(operands, groups)
                return
            from jitgemm.gemm.grouped_plan import GroupedPlan

            with torch.cuda.device(x.device):
                groups = groups._replace(expected_rows=expected_rows)
                plan = GroupedPlan(operands, groups, batch_invariant=batch_invariant, kernel=kernel)
        this_thread.cache.add_plan(key, tensors, plan)
    plan.launch(operands, groups)


@torch.no_grad()  # as the kernels, whose results go to out
def _run_reference(operands: Operands, groups: Groups) -> None:
    from jitgemm.gemm.reference import write_grouped_reference

    first = None
    if groups.rows_of_expert:
        first = torch.arange(len(groups.sizes)) * groups.rows_of_expert
    if operands.x_scale.dim() == 3:
        operands = operands._replace(x_scale=operands.x_scale.flatten(0, 1))
    write_grouped_reference(
        operands.lhs, operands.weight, operands.out, groups.sizes, first=first, row_index=groups.row_index,
        bias=operands.bias, most=groups.rows_of_expert or operands.out.shape[0],
    )  # fmt: skip


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _of_op(arguments: tuple[Any, ...]) -> tuple[Operands, Groups]:
    x, x_scale, x_zero, blocks, channel_scale, row_sum, out, bias, *groups, n, k, format, _, _ = arguments
    weight = PackedWeight(blocks, channel_scale, row_sum, n, k, format_named(format))
    return Operands(x, x_scale, x_zero, weight, out, bias), Groups(*groups)


def _op(*arguments: Any) -> None:
    _run(*_of_op(arguments), *arguments[-2:])


def _fake_op(*arguments: Any) -> None:
    check_grouped(*_of_op(arguments))


define_op(
    "m_grouped_gemm_w4a8_nt(Tensor x, Tensor x_scale, Tensor? x_zero, Tensor blocks, Tensor? channel_scale, "
    "Tensor? row_sum, Tensor(a!) out, Tensor? bias, Tensor sizes, Tensor? row_index, SymInt rows_of_expert, "
    "SymInt expected_rows, int n, int k, str format, bool batch_invariant, str? label) -> ()",
    _op,
    _fake_op,
)
