"""Buffers that the ranks of a host write to over NVLink, for `jitgemm.moe.exchange`: PyTorch's symmetric memory.

One for each process group and layout, which layers share: their calls follow one another on every rank.
"""

from __future__ import annotations

import socket
from dataclasses import replace

import torch
import torch.distributed as dist

from jitgemm.errors import CacheMissError
from jitgemm.moe.arguments import ExpertsCall
from jitgemm.moe.exchange import MOST_CHOICES, Buffer, Layout, most_hidden, run_exchanged
from jitgemm.nn.layers.sharding import ExpertSharding
from jitgemm.tensors import dtype_name

_buffers: dict[tuple[dist.ProcessGroup, Layout], Buffer] = {}


def sent_by_kernels(call: ExpertsCall, split: ExpertSharding, most: int) -> torch.Tensor:
    """The call of all ranks' experts; every rank calls it. The first call with a layout makes the buffers, together."""
    layout = Layout(
        split.rank, split.world, most, call.w13.k, call.w2.n, call.topk_ids.shape[1], call.x.dtype, call.activation
    )
    buffer = _buffers.get((split.group, layout))
    if buffer is None:
        buffer = _buffers[split.group, layout] = _new_buffer(layout, split.group, call.x.device)
    return run_exchanged(call, buffer)


def _new_buffer(layout: Layout, group: dist.ProcessGroup, device: torch.device) -> Buffer:
    """A buffer of each rank of the group, which waits for the others."""
    if layout.k > most_hidden():
        raise ValueError(
            f"hidden_states: expected at most {most_hidden()} columns for exchange='nvlink', got {layout.k}"
        )
    if layout.slots * layout.top_k > MOST_CHOICES:
        raise ValueError(
            f"max_tokens: expected at most {MOST_CHOICES // (layout.world * layout.top_k)} for exchange='nvlink', "
            f"{layout.world} ranks and {layout.top_k} choices, got {layout.max_tokens}"
        )
    same_on_every_rank((replace(layout, rank=0), dtype_name(layout.dtype)), group, layout.rank, layout.world)
    own, addresses, handle = mapped(layout.offsets["end"], group, layout.rank, layout.world, device)
    buffer = Buffer(layout, own, addresses, handle)
    buffer.clear()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return buffer


def same_on_every_rank(what: object, group: dist.ProcessGroup, rank: int, world: int) -> None:
    """Raises ValueError unless ranks are of one host and have the same; CacheMissError while a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise CacheMissError(
            "exchange: the ranks have no buffers for these shapes yet, and making them now would break the CUDA graph "
            "being captured: call the layer once with these shapes before the capture, on every rank"
        )
    mine = socket.gethostname(), what
    ranks = [mine] * world
    dist.all_gather_object(ranks, mine, group=group)
    hosts = list(dict.fromkeys(host for host, _ in ranks))
    if len(hosts) > 1:
        raise ValueError(f"exchange: expected ranks of one host for 'nvlink', got hosts {', '.join(hosts)}")
    for number, other in enumerate(ranks):
        if other != mine:
            raise ValueError(f"exchange: expected {what} on every rank, as on rank {rank}, got {other[1]} on {number}")


def mapped(
    size: int, group: dist.ProcessGroup, rank: int, world: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, object]:
    """(uint8 [size] of this rank, int64 [world]: addresses of all ranks' here, what has to live as long)."""
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    try:
        handle = symmetric.rendezvous(own, group.group_name)
    except RuntimeError as error:
        raise RuntimeError(
            "exchange: expected GPUs that reach one another's memory for 'nvlink', PyTorch's symmetric memory says: "
            f"{error}"
        ) from error
    # Memory of a pool begins somewhere in what the ranks have mapped.
    starts: list[int] = [0] * world
    dist.all_gather_object(starts, own.data_ptr() - handle.buffer_ptrs[rank], group=group)
    addresses = [base + start for base, start in zip(handle.buffer_ptrs, starts, strict=True)]
    return own, torch.tensor(addresses, dtype=torch.int64, device=device), handle
