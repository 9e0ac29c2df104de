"""Layers divided among the GPUs of one host: a process a GPU, and what a call takes on the slowest."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

REPLAYS = 12


def start(rank: int, world: int, folder: str) -> Any:
    """This process's place among the ranks: a mesh of all."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"file://{folder}/rendezvous", rank=rank, world_size=world, device_id=device)
    return dist.device_mesh.init_device_mesh("cuda", (world,))


def finish(wrong: int) -> None:
    """Leaves the ranks; exits 1 where one of them had something wrong."""
    failed = torch.tensor(wrong, device="cuda")
    dist.all_reduce(failed)
    dist.destroy_process_group()
    if int(failed):
        raise SystemExit(1)


def time_us(calls: Sequence[Callable[[], Any]], times: int) -> float:
    """Microseconds of one call: the slowest rank's median over replays of a graph with all of them, several times over,
    without the first two."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    side.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in times * list(calls):
            call()
    found = []
    for _ in range(REPLAYS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / (times * len(calls)))
    slowest = torch.tensor(statistics.median(found[2:]), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
