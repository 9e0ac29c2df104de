#!/usr/bin/env python3
"""What the same bits on any number of GPUs cost: row-parallel layers with and without `tp_invariant`, on one host.

    python scripts/benchmark_tp_invariant.py --ranks 2
    python scripts/benchmark_tp_invariant.py --errors

Llama-3-8B's o and down by default. A time is of one layer in a CUDA graph of many, on the slower rank. Results of the
invariant layers are compared with one GPU's, bit for bit; exits 1 where one differs.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.multiprocessing as mp
import typer
from benchmark_lib.ranks import finish, start, time_us
from torch.distributed.tensor.parallel import parallelize_module

import jitgemm.nn
from jitgemm.nn import W4A8Linear
from jitgemm.nn.layers.invariant import multiply_invariantly
from jitgemm.nn.layers.shard_weight import Cut, part_of
from jitgemm.nn.layers.sharding import EngineSharding
from jitgemm.nn.parallel import RowwiseParallel

LAYERS = {"o": (4096, 4096), "down": (4096, 14336)}
KINDS: dict[str, dict[str, Any]] = {
    "int8 channel": {"activation": "int8", "group_size": "channel"},
    "two levels": {"activation": "int8", "scheme": "two-level"},
    "e4m3 g128": {"activation": "e4m3", "group_size": 128},
}
WAYS = {
    "plain": RowwiseParallel(),
    "collectives": RowwiseParallel(tp_invariant=True),
    "nvlink": RowwiseParallel(tp_invariant=True, exchange="nvlink"),
}
FEWER = "nvlink, no more ranks"
"""The same where the layer is for no more ranks than there are: e4m3 and groups have fewer chunks, and other bits."""
ENGINES = {f"engine, {way}": way for way in ("collectives", "nvlink")}
"""As vLLM and SGLang serve such layers, with NCCL for the engine's sum."""
COPIES_BYTES = 100 << 20
"""Of weights that a graph goes through, more than the L2 holds."""


class InAnEngine(torch.nn.Module):
    """A divided layer whose ranks' results an engine adds up."""

    def __init__(self, layer: W4A8Linear):
        super().__init__()
        split: Any = layer.split
        self.layer = copy.deepcopy(layer)
        self.split = self.layer.split = EngineSharding(split.group, split.rank, split.world, split.nvlink)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = multiply_invariantly(self.layer, x)
        self.split.sum(out)
        return out


def layer_of(kind: str, n: int, k: int, device: str = "cuda") -> W4A8Linear:
    torch.manual_seed(n + k)
    holder = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device))
    options = dict(KINDS[kind])
    if "scheme" not in options:
        options["clip_steps"] = 0
    jitgemm.nn.quantize_(holder, **options)
    return holder[0]


def run(rank: int, world: int, folder: str, names: list[str], kinds: list[str], rows: list[int]) -> None:
    mesh = start(rank, world, folder)
    lines, wrong = [], 0
    with torch.no_grad():
        for kind in kinds:
            for name in names:
                n, k = LAYERS[name]
                whole = layer_of(kind, n, k)
                whole.tp_invariant = "k"
                count = max(1, COPIES_BYTES * world // whole.weight.nbytes)
                each: dict[str, list[torch.nn.Module]] = {}
                fewer = copy.deepcopy(whole)
                fewer.tp_ranks = world
                for way, style in {**WAYS, FEWER: RowwiseParallel(tp_invariant=world, exchange="nvlink")}.items():
                    one = copy.deepcopy(whole)
                    one.tp_invariant = None
                    one = parallelize_module(one, mesh, style)
                    each[way] = [one, *(copy.deepcopy(one) for _ in range(count - 1))]
                each |= {way: [InAnEngine(one) for one in each[of]] for way, of in ENGINES.items()}
                for m in rows:
                    torch.manual_seed(m)
                    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
                    mine = x.chunk(world, 1)[rank].contiguous()
                    expected = dict.fromkeys(each, whole(x)) | {FEWER: fewer(x)}
                    bad = [way for way in each if way != "plain" and not torch.equal(each[way][0](mine), expected[way])]
                    wrong += len(bad)
                    repeated = max(1, 24 // count)
                    times = {
                        way: time_us([partial(layer, mine) for layer in layers], repeated)
                        for way, layers in each.items()
                    }
                    numbers = [f"{us:.2f}" for us in times.values()]
                    numbers.append(f"{times['nvlink'] - times['plain']:+.2f}")
                    numbers.append(f"{times['nvlink'] / times['plain']:.2f}")
                    lines.append(
                        f"| {' | '.join([kind, name, f'{m:,}', *numbers])} |" + f" OTHER BITS: {bad}" * bool(bad)
                    )
                    if rank == 0:
                        print(lines[-1], flush=True)
    if rank == 0:
        print(f"\n{torch.cuda.get_device_name()}, {world} ranks; microseconds of a layer\n")
        ways = [*WAYS, FEWER, *ENGINES]
        print(f"| weights | layer | tokens | {' | '.join(ways)} | more | times |\n" + "|---" * (len(ways) + 5) + "|")
        print("\n".join(lines))
    finish(wrong)


def accuracy() -> None:
    """Errors of plain row-parallel layers and invariant ones, relative to activations in floats."""
    print("| weights | activations | plain, 1 rank | 2 | 4 | 8 | tp_invariant |\n" + "|---" * 7 + "|")
    for kind in ("int8 channel", "e4m3 g128"):
        layer, (m, k) = layer_of(kind, 256, 4096, "cpu"), (32, 4096)
        weight, whole = layer.weight.dequantize().double(), copy.deepcopy(layer)
        whole.tp_invariant = "k"
        for name, larger in (("normal", 1), ("8 columns of 30 times the size", 30)):
            torch.manual_seed(0)
            x = torch.randn(m, k)
            x[:, torch.randperm(k)[:8]] *= larger
            x = x.to(torch.bfloat16)
            exact, sums = x.double() @ weight.T, [layer(x)]
            for world in (2, 4, 8):
                parts = [layer.of_parts(part_of(layer.parts, Cut("k", rank, world))) for rank in range(world)]
                sums.append(sum(part(some) for part, some in zip(parts, x.chunk(world, 1), strict=True)))
            errors = [float((y.double() - exact).norm() / exact.norm()) for y in (*sums, whole(x))]
            print(f"| {kind} | {name} | " + " | ".join(f"{100 * error:.2f}%" for error in errors) + " |")


def main(
    ranks: Annotated[int, typer.Option(help="GPUs: 2, 4 or 8.")] = 2,
    layers: Annotated[str, typer.Option(help="Names out of o, down, with commas.")] = "o,down",
    kinds: Annotated[str, typer.Option(help="Kinds of weights, with commas.")] = ",".join(KINDS),
    rows: Annotated[str, typer.Option(help="Tokens, with commas.")] = "1,16,64,2048",
    errors: Annotated[bool, typer.Option("--errors", help="Print errors, on the CPU, and no times.")] = False,
) -> None:
    """Time row-parallel layers with and without tp_invariant."""
    if errors:
        return accuracy()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (ranks, folder, layers.split(","), kinds.split(","), [int(m) for m in rows.split(",")]), ranks)


if __name__ == "__main__":
    typer.run(main)
