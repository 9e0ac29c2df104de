"""Llama's decoder layers divided among the GPUs of one host: a process each, and how long they wait for one another.

A time of three: all of a layer as it runs; the rank's part without the collectives; the collectives alone.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import jitgemm.nn
from jitgemm.nn import PackedLinear, W4A8Linear

from .llama import CONTESTANTS, ROUNDS, Forward, ModelSizes, empty_model, first, known_attention
from .timing import QUICK_ROUNDS, REPLAYS, Launched, Timed

COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
DIVIDED = tuple(name for name in CONTESTANTS if name != "fp8")
"""Contestants that can be divided: PyTorch's styles know no fp8 Linear."""
COLLECTIVES = len(ROWWISE)
"""All-reduces of a layer, of bf16 [tokens, hidden] each."""


@dataclass(frozen=True)
class Cells:
    """What is timed: `tokens` of each of so many sequences, behind `context` tokens in the cache."""

    sequences: int
    tokens: int
    context: int

    @property
    def kind(self) -> str:
        return "decode" if self.tokens == 1 else "prefill"


def divide(model: Any, mesh: Any, name: str, group_size: int) -> None:
    """Makes a bf16 model the contestant, this rank's part of it."""
    from torch.distributed.tensor.parallel import parallelize_module

    from jitgemm.nn.parallel import ColwiseParallel, RowwiseParallel

    CONTESTANTS[name](model, group_size)
    plan: dict[str, Any] = {f"model.layers.*.{each}": ColwiseParallel() for each in COLWISE}
    plan |= {f"model.layers.*.{each}": RowwiseParallel() for each in ROWWISE}
    parallelize_module(model, mesh, plan)


def without_collectives(model: Any) -> Any:
    """A copy whose ranks keep their partial sums, of the same memory."""
    model = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    for name, module in list(model.model.named_modules()):
        if isinstance(module, PackedLinear):
            module.split = None
        elif isinstance(module, torch.nn.Linear):
            linear = torch.nn.Linear(1, 1, bias=False, device="meta")
            linear.weight = torch.nn.Parameter(module.weight.to_local(), requires_grad=False)
            parent, _, child = name.rpartition(".")
            setattr(model.model.get_submodule(parent), child, linear)
    return model


def layers_of(
    model: Any, cell: Cells, ids: torch.Tensor, ranks: int, backend: str | None
) -> Callable[[], torch.Tensor]:
    """All layers of a model in a row, as a call without arguments; attention's cache holds zeros."""
    forward = Forward(model, cell.sequences, cell.context + cell.tokens, backend, ranks)
    positions = torch.arange(cell.tokens, device=ids.device) + cell.context
    hidden, rotary, mask = first(model, ids, positions, forward.slots)
    return partial(forward.layers, hidden, rotary, positions, mask)


def collectives(cell: Cells, hidden: int, layers: int, device: torch.device) -> Callable[[], None]:
    """The all-reduces of so many layers, one behind the other."""
    sums = torch.zeros(cell.sequences * cell.tokens, hidden, dtype=torch.bfloat16, device=device)

    def call() -> None:
        for _ in range(COLLECTIVES * layers):
            dist.all_reduce(sums)

    return call


def warm_up(model: Any, mesh: Any, tokens: int, compiled: bool = False) -> None:
    """Every rank's kernels; the others find rank 0's in the cache."""
    for turn in (0, 1):
        if (mesh.get_local_rank() == 0) == (turn == 0):
            jitgemm.nn.warmup(model, tokens, compiled=compiled)
        dist.barrier()


def of_slowest(timed: dict[str, Timed], rounds: int, replays: int) -> dict[str, float]:
    """Microseconds of each, which take turns; of the rank that takes longest."""
    for _ in range(rounds):
        for each in timed.values():
            dist.barrier()
            each.turn(replays)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [each.us for each in timed.values()])
    return dict(zip(timed, map(max, zip(*found))))


def time_divided(
    mesh: Any,
    sizes: ModelSizes,
    names: Sequence[str],
    cells: Sequence[Cells],
    group_size: int,
    backend: str | None,
    seed: int,
    device: torch.device,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each contestant and cell, equal on all ranks; times are microseconds of one layer.

    Returns:
        contestant, kind, sequences, tokens (all together); us: of a layer; compute_us: without the collectives;
        collective_us: those alone; communication: 1 - compute_us / us; one_us: of the whole layer on one GPU; speedup:
        one_us / us; times_bf16; difference: relative, of the last layer's output from one GPU's, both uncompiled.
    """
    base = empty_model(sizes, str(device), seed)
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randint(0, sizes.vocab, (c.sequences, c.tokens), generator=draw).to(device) for c in cells]
    most = max(cell.sequences * cell.tokens for cell in cells)
    rows: list[dict[str, Any]] = []
    gpu = device.type == "cuda"
    for name in names:
        say(f"{name}: dividing {sizes.layers} layers")
        whole, part = copy.deepcopy(base), copy.deepcopy(base)
        CONTESTANTS[name](whole, group_size)
        divide(part, mesh, name, group_size)
        alone = without_collectives(part)
        if gpu and any(isinstance(module, W4A8Linear) for module in part.modules()):
            for model in (part, whole):
                warm_up(model, mesh, most, backend is not None)
        for cell, ids in zip(cells, inputs):
            torch._dynamo.reset()  # a function is compiled for a few kinds of arguments at most
            say(f"{name}: {cell.kind}, {cell.sequences} x {cell.tokens} tokens")
            with known_attention():
                exact, found = (
                    layers_of(model, cell, ids, ranks, None)().float()
                    for model, ranks in ((whole, 1), (part, mesh.size()))
                )
                calls: dict[str, Callable[[], Any]] = {
                    "us": layers_of(part, cell, ids, mesh.size(), backend),
                    "compute_us": layers_of(alone, cell, ids, mesh.size(), backend),
                    "one_us": layers_of(whole, cell, ids, 1, backend),
                    "collective_us": collectives(cell, sizes.hidden, sizes.layers, device),
                }
                timed = {key: (Timed if gpu else Launched)([call]) for key, call in calls.items()}
                found_us = of_slowest(timed, QUICK_ROUNDS * ROUNDS if gpu else 1, REPLAYS if gpu else 1)
                times = {key: us / sizes.layers for key, us in found_us.items()}
            row = {"contestant": name, "kind": cell.kind, "sequences": cell.sequences}
            row |= {"tokens": cell.sequences * cell.tokens} | times
            row["communication"] = 1 - times["compute_us"] / times["us"]
            row["speedup"] = times["one_us"] / times["us"]
            row["difference"] = float((found - exact).norm() / exact.norm())
            rows.append(row)
        del whole, part, alone
    for row in rows:
        for other in rows:
            if other["contestant"] == "bf16" and (other["kind"], other["tokens"]) == (row["kind"], row["tokens"]):
                row["times_bf16"] = other["us"] / row["us"]
    return rows


def serve(
    rank: int,
    world: int,
    folder: str,
    device: str,
    job: Callable[..., list[dict[str, Any]]],
    arguments: tuple[Any, ...],
) -> None:
    """A rank's process: times, and as rank 0 leaves what the job returned in `folder`/rows."""
    begun = time.monotonic()
    kind = torch.device(device).type
    here = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if kind == "cuda":
        torch.cuda.set_device(here)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        device_id=here if kind == "cuda" else None,
    )  # fmt: skip
    mesh = dist.device_mesh.init_device_mesh(kind, (world,), mesh_dim_names=("tp",))

    def say(text: str) -> None:
        if rank == 0:
            from jitgemm.cli import common

            common.note(f"{time.monotonic() - begun:4.0f} s  {text}")

    with torch.no_grad():
        rows = job(mesh, *arguments, here, say=say)
    if rank == 0:
        torch.save(rows, Path(folder, "rows"))
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo's that still lets go of a tensor would abort an interpreter on its way out


def on_ranks(
    world: int, folder: str, device: str, job: Callable[..., list[dict[str, Any]]], *arguments: Any
) -> list[dict[str, Any]]:
    """What job(mesh, *arguments, a rank's device, say) returned on the first of so many processes."""
    given = world, folder, device, job, arguments
    torch.multiprocessing.start_processes(serve, given, nprocs=world, start_method="spawn")
    return torch.load(Path(folder, "rows"))
