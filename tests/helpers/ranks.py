"""Processes that run the same function, two or more: gloo on the CPU, NCCL where each has a GPU of its own."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
LIMIT_S = 60
"""After which a rank that does not answer counts as hung."""


def _serve(rank: int, folder: str, backend: str, pipe: Any, world: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=LIMIT_S * world // WORLD), device_id=None if device.type == "cpu" else device,
    )  # fmt: skip
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    while True:
        run, arguments = pipe.recv()
        try:
            with torch.inference_mode(False), torch.no_grad():
                pipe.send((run(mesh, *arguments), None))
        except BaseException:  # noqa: BLE001 - told to the test
            pipe.send((None, traceback.format_exc()))


@contextmanager
def two_ranks(folder: Path, backend: str = "gloo", world: int = WORLD) -> Iterator[Callable[..., list[Any]]]:
    """run(function, *arguments): what function(mesh, *arguments) returned on each rank, of two, or of `world`.

    The function is one of a module; what it returns goes through pickle. A failure on any rank is raised.
    """
    # On the CPU of a process that has imported what all of them need; CUDA's are not to be forked.
    context, limit_s = mp.get_context("forkserver" if backend == "gloo" else "spawn"), LIMIT_S * world // WORLD
    if backend == "gloo":
        context.set_forkserver_preload(
            ["pytest", "torch._dynamo", "torch.distributed.tensor.parallel", "jitgemm.nn.parallel"]
        )
    pipes, processes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(rank, str(folder), backend, theirs, world), daemon=True))
        processes[-1].start()
        pipes.append(mine)

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < world:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = connection.wait(waiting, limit_s)
            if not ready:
                raise TimeoutError(f"ranks did not answer within {limit_s} s; those that did: {answers}")
            for pipe in ready:
                answers[pipes.index(pipe)] = pipe.recv()
        errors = [f"rank {rank}: {error}" for rank, (_, error) in sorted(answers.items()) if error is not None]
        if errors:
            raise AssertionError("\n".join(errors))
        return [answers[rank][0] for rank in range(world)]

    try:
        yield run
    finally:
        for process in processes:
            process.kill()
