"""Processes that run the same function, two or more: gloo on the CPU, NCCL where each has a GPU of its own.

Where GPUs are fewer than ranks, all ranks share the first. Kernels that reach the others' memory run there, too, in
turns: a kernel that waits for another process is interrupted. NCCL does not: gloo then moves tensors through the host,
and no CUDA graph captures it.
"""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
LIMIT_S = 60
"""After which a rank that does not answer counts as hung."""
GRACE_S = 2
"""The same, once another rank has failed: it may wait for that one."""

OF_ONE_DEVICE = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""What PyTorch's symmetric memory needs to map buffers of ranks that share a GPU, and gloo on any host."""


def apart(world: int = WORLD) -> bool:
    """Whether each rank has a GPU of its own."""
    return torch.cuda.device_count() >= world


needs_gpu = pytest.mark.skipif(not apart(1), reason="needs a GPU: other processes run no emulator")
needs_nccl = pytest.mark.skipif(not apart(), reason=f"needs NCCL, and that {WORLD} GPUs of one host")


def join(rank: int, folder: str, device: str, world: int = WORLD, limit_s: float = LIMIT_S) -> dist.DeviceMesh:
    """Joins the ranks and returns their mesh; device: "cpu" or "cuda"."""
    own = device == "cuda" and apart(world)
    if device == "cuda":
        torch.cuda.set_device(rank if own else 0)
        os.environ.update({} if own else OF_ONE_DEVICE)
    dist.init_process_group(
        "nccl" if own else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=limit_s), device_id=torch.device("cuda", rank) if own else None,
    )  # fmt: skip
    # init_device_mesh would add NCCL to gloo where there is a GPU.
    return dist.DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("tp",))


def _serve(rank: int, folder: str, device: str, pipe: Any, world: int, limit_s: float) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    mesh = join(rank, folder, device, world, limit_s)
    while True:
        run, arguments = pipe.recv()
        try:
            with torch.inference_mode(False), torch.no_grad():
                pipe.send((run(mesh, *arguments), None))
        except BaseException:  # noqa: BLE001 - told to the test
            pipe.send((None, traceback.format_exc()))


class _Ranks:
    """Called with a function, runs it on every rank; the processes start with the first call, and after one hung."""

    def __init__(self, folder: Path, device: str, world: int):
        self.folder, self.device, self.world, self.limit_s = folder, device, world, LIMIT_S * world // WORLD
        self.started, self.processes, self.pipes = 0, [], []

    def start(self) -> None:
        # On the CPU of a process that has imported what all of them need; CUDA's are not to be forked.
        context = mp.get_context("forkserver" if self.device == "cpu" else "spawn")
        if self.device == "cpu":
            context.set_forkserver_preload(
                ["pytest", "torch._dynamo", "torch.distributed.tensor.parallel", "jitgemm.nn.parallel"]
            )
        self.started += 1
        folder = self.folder / f"start{self.started}"
        folder.mkdir()
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            given = rank, str(folder), self.device, theirs, self.world, self.limit_s
            self.processes.append(context.Process(target=_serve, args=given, daemon=True))
            self.processes[-1].start()
            theirs.close()  # so that the process's end ends the pipe
            self.pipes.append(mine)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes, self.pipes = [], []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while waiting := [pipe for rank, pipe in enumerate(self.pipes) if rank not in results | errors]:
            ready = connection.wait(waiting, GRACE_S if errors else self.limit_s)
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    results[rank], error = pipe.recv()
                except EOFError:
                    error = "the process ended"
                if error is not None:
                    errors[rank] = error
        if len(results) < self.world:
            self.end()
        if errors:
            raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
        if waiting:
            raise TimeoutError(f"ranks did not answer within {self.limit_s} s; those that did: {results}")
        return [results[rank] for rank in range(self.world)]


@contextmanager
def two_ranks(folder: Path, device: str = "cpu", world: int = WORLD) -> Iterator[Callable[..., list[Any]]]:
    """run(function, *arguments): what function(mesh, *arguments) returned on each rank, of two, or of `world`.

    The function is one of a module; what it returns goes through pickle. A failure on any rank is raised.
    """
    run = _Ranks(folder, device, world)
    try:
        yield run
    finally:
        run.end()
