#!/usr/bin/env python3
"""Experts divided among the GPUs of one host, each rank with its own tokens: what a layer takes, by ways of exchange.

    python scripts/benchmark_exchange.py --ranks 2

Qwen3-30B-A3B's experts by default. A time is of one layer in a CUDA graph of many uniform routings, on the slower rank.
Results are compared with one GPU's; exits 1 where one is further away than its roundings.

    one GPU      the whole layer, with the tokens of all ranks
    vllm         vLLM's allgather_reducescatter around this rank's experts: tokens in bf16 to every rank, and sums back,
                 by vLLM's communicator, or by the same calls of torch.distributed where vLLM is not installed
    collectives  `ExpertParallel(max_tokens=…)`
    nvlink       `ExpertParallel(max_tokens=…, exchange="nvlink")`
"""

from __future__ import annotations

import copy
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from benchmark_lib.ranks import finish, start, time_us
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import jitgemm
import jitgemm.nn
from jitgemm.nn import PackedExperts, W4A8Experts
from jitgemm.nn.parallel import ExpertParallel

EXPERTS, TOP_K, HIDDEN, INTER, GROUP = 128, 8, 2048, 768, 128
WAYS = ("one GPU", "vllm", "collectives", "nvlink")
ROUTINGS = 8
"""Of a graph, so that calls meet other experts."""
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 warns of the old names
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Routed = tuple[torch.Tensor, ...]


def experts_of(activation: str) -> W4A8Experts:
    """The whole layer; every expert is another, and the same on every rank."""
    draw = torch.Generator("cuda").manual_seed(0)
    lhs_dtype = torch.int8 if activation == "int8" else torch.float8_e4m3fn

    def weight(n: int, k: int) -> Any:
        def expert(_: int) -> Any:
            q = torch.randint(-7, 8, (n, k), dtype=torch.int8, device="cuda", generator=draw)
            scale = (torch.rand(n, k // GROUP, device="cuda", generator=draw) + 0.5).mul(k**-0.5 / 4).bfloat16()
            return jitgemm.pack_w4(q, scale, group_size=GROUP, k=k, lhs_dtype=lhs_dtype)

        return jitgemm.W4Weight.stacked(EXPERTS, expert)

    return W4A8Experts(weight(2 * INTER, HIDDEN), weight(HIDDEN, INTER), activation=activation, top_k=TOP_K)


def routed(tokens: int, draw: torch.Generator) -> Routed:
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=draw).bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda", generator=draw).topk(TOP_K).indices.int()
    return x, ids, torch.rand(tokens, TOP_K, device="cuda", generator=draw) / TOP_K


class AsVllm:
    """What vLLM's runner does around the experts of a rank, where all ranks have as many tokens."""

    def __init__(self, layer: PackedExperts, world: int):
        self.layer, self.world = layer, world
        assert layer.split is not None
        self.expert_map, layer.split = layer.split.expert_map(torch.device("cuda")), None
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

            group, self.name = dist.new_group(backend="gloo"), "vLLM's"
            self.theirs: Any = PyNcclCommunicator(group, torch.cuda.current_device())
        except ImportError:
            self.name, self.theirs = "torch.distributed's", None

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        whole = [each.new_empty((self.world * each.shape[0], each.shape[1])) for each in given]
        stream = torch.cuda.current_stream()
        if self.theirs is not None:
            self.theirs.group_start()
            for all_ranks, mine in zip(whole, given):
                self.theirs.all_gather(all_ranks, mine, stream=stream)
            self.theirs.group_end()
        else:
            with dist._coalescing_manager(device=given[0].device):  # one kernel, as NCCL's groups are
                for all_ranks, mine in zip(whole, given):
                    GATHER(all_ranks, mine)
        summed, out = self.layer.run(*whole, expert_map=self.expert_map), torch.empty_like(given[0])
        if self.theirs is not None:
            self.theirs.reduce_scatter(out, summed, stream=stream)
        else:
            SCATTER(out, summed)
        return out


def run(rank: int, world: int, folder: str, activation: str, tokens: list[int]) -> None:
    mesh, wrong, lines = start(rank, world, folder), 0, []
    with torch.no_grad():
        whole = experts_of(activation)

        def divided(**options: Any) -> Any:
            return parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(**options))

        theirs = AsVllm(divided(), world)
        own = {way: divided(input_layouts=Shard(0), max_tokens=max(tokens), exchange=way) for way in WAYS[2:]}
        jitgemm.nn.warmup(torch.nn.ModuleList([whole, theirs.layer, own["nvlink"]]), world * max(tokens))
        for count in tokens:
            draw = torch.Generator("cuda").manual_seed(count)
            all_ranks = [routed(world * count, draw) for _ in range(ROUTINGS)]
            mine = slice(rank * count, (rank + 1) * count)
            parts = [tuple(each[mine].clone() for each in given) for given in all_ranks]
            for part in own.values():  # as many rows as there are tokens, not as the longest call has
                part.split = replace(part.split, max_tokens=count)
            calls = {"one GPU": whole, "vllm": theirs, **own}
            exact = [whole(*given)[mine].float() for given in all_ranks]
            far = {
                way: max(
                    float((call(*given).float() - each).abs().max() / each.abs().max())
                    for given, each in zip(parts, exact)
                )
                for way, call in calls.items()
                if way != "one GPU"
            }
            bad = [way for way, error in far.items() if error > 2**-7]  # two roundings to bf16
            wrong += len(bad)
            times = {
                way: time_us([partial(call, *given) for given in (all_ranks if way == "one GPU" else parts)], 3)
                for way, call in calls.items()
            }
            lines.append(
                f"| {count:,} | {' | '.join(f'{us:.1f}' for us in times.values())} | {max(far.values()):.4f} |"
            )
            if rank == 0:
                print(lines[-1], f"TOO FAR: {bad}" * bool(bad), flush=True)
    if rank == 0:
        print(f"\n{torch.cuda.get_device_name()}, {world} ranks, {activation}; vllm: {theirs.name} calls; us a layer\n")
        print(f"| tokens of a rank | {' | '.join(WAYS)} | furthest from one GPU |\n" + "|---" * (len(WAYS) + 2) + "|")
        print("\n".join(lines), flush=True)
    finish(wrong)


def main(
    ranks: Annotated[int, typer.Option(help="GPUs: 2 to 8.")] = 2,
    activation: Annotated[str, typer.Option(help="e4m3 or int8.")] = "e4m3",
    tokens: Annotated[str, typer.Option(help="Of a rank, with commas.")] = "1,16,64,256,2048",
) -> None:
    """Time experts whose tokens travel between ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (ranks, folder, activation, [int(each) for each in tokens.split(",")]), ranks)


if __name__ == "__main__":
    typer.run(main)
