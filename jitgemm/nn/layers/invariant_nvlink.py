"""Sums over the ranks of a host by kernels instead of collectives, for `invariant`: PyTorch's symmetric memory.

One buffer for each process group, which layers share: their calls follow one another on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from jitgemm.gemm.partial import rank_sums
from jitgemm.gemm.ranks import BUFFER_BYTES, MOST_BYTES, MOST_ROWS, SumBuffer, agree, total
from jitgemm.nn.layers.expert_nvlink import mapped, same_on_every_rank
from jitgemm.weight.parts import PackedWeight

_buffers: dict[dist.ProcessGroup, SumBuffer] = {}


def takes(m: int, n: int) -> bool:
    """Whether the buffers hold the sums of m tokens and n rows of the weight."""
    return m <= MOST_ROWS and 4 * m * n <= MOST_BYTES


class NvlinkRanks:
    """The ranks that share a layer, each of which reads the others' memory; as `invariant.Ranks`."""

    def __init__(self, group: Any, rank: int, world: int, device: torch.device):
        self.rank, self.world = rank, world
        buffer = _buffers.get(group)
        self._buffer = _buffers[group] = _new_buffer(group, rank, world, device) if buffer is None else buffer

    def maximum(self, scales: torch.Tensor | None) -> None:
        """scales [m] become all ranks' largest. Every call begins with this one."""
        agree(self._buffer, scales)

    def sum(
        self, lhs: tuple[torch.Tensor, torch.Tensor], weight: PackedWeight, chunks: int, bias: torch.Tensor | None,
        out: torch.Tensor, own: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """As `Ranks.sum`."""
        m, n = out.shape
        sums = self._buffer.sums(m, n, torch.float32 if chunks else torch.int32)
        rank_sums(lhs, weight, chunks, sums)
        total(self._buffer, sums.dtype, out, lhs[1], weight.channel_scale, bias, own)
        return out


def _new_buffer(group: Any, rank: int, world: int, device: torch.device) -> SumBuffer:
    """A buffer of each rank of the group, which waits for the others."""
    same_on_every_rank(world, group, rank, world)
    own, addresses, handle = mapped(BUFFER_BYTES, group, rank, world, device)
    own.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return SumBuffer(rank, world, own, addresses, handle)
