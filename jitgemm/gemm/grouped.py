"""DeepGEMM's way to say which rows are which expert's, as `offsets` of the grouped calls."""

from __future__ import annotations

import torch

from jitgemm import settings
from jitgemm.kernel.formats import TABLE_SIZES
from jitgemm.runtime.dispatch import needs_dispatcher
from jitgemm.tensors import check_dtype, check_int, check_plain, check_tensor
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
        experts_of_runs, counts = runs[runs < experts].unique(return_counts=True)
        if bool((counts > 1).any()):
            raise ValueError(
                f"{name}: expected each expert's rows together, with no other row between them, got expert "
                f"{int(experts_of_runs[counts > 1][0])} in {int(counts[counts > 1][0])} places"
            )
    first = m_indices.new_full((experts + 1,), m_indices.shape[0]).scatter_reduce_(0, of, rows, "amin")
    end = m_indices.new_zeros(experts + 1).scatter_reduce_(0, of, rows + 1, "amax")
    return torch.stack((torch.minimum(first, end), end), 1)[:experts].contiguous()
