"""Others' ways to say which rows are which expert's, as `offsets` of the grouped calls."""

from __future__ import annotations

import torch

from jitgemm import settings
from jitgemm.kernel.formats import MAX_ROWS, TABLE_SIZES
from jitgemm.runtime.checks import check_device
from jitgemm.runtime.dispatch import needs_dispatcher
from jitgemm.tensors import check_dtype, check_flag, check_int, check_plain, check_tensor, dtype_name
from jitgemm.weight.ready import capturing


def rows_of_m_indices(m_indices: torch.Tensor, experts: int, name: str = "m_indices") -> torch.Tensor:
    """DeepGEMM's `m_indices` as `offsets`: int32 [E, 2], each expert's first row and end.

    Args:
        m_indices: int32 [M], the expert of each row; -1, or any number that is no expert's, for rows to skip. Rows of
            one expert stand together, with no other row between them; that is checked on the CPU, and on a GPU,
            waiting for it, where JITGEMM_DEBUG is set. Else an expert's rows are all from its first to its last.
        experts: the number of experts, E.
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
    if not needs_dispatcher(of, of) and (of.is_cpu or (settings.debug() and not capturing(of.device))):
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
