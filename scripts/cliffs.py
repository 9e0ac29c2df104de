#!/usr/bin/env python3
"""Looks for cliffs: m by m, does a call get abruptly slower, or fall behind what the hardware allows?

`python scripts/cliffs.py --help` teaches. The arithmetic comes first and needs no GPU; `Bench` measures.
"""

from __future__ import annotations

import copy
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer
from benchmark_lib.cells import Cell, Format, parse_format, parse_ms

from jitgemm.cli import common
from jitgemm.kernel.render import kernel_source
from jitgemm.runtime.device import device_of, local_device

RISE_LIMIT = 1.20
"""Time of a call over that of the same layer with the m before."""
FLOOR_FACTOR, FLOOR_ADDED_US = 1.6, 3.0
"""A call may take FLOOR_FACTOR x floor + FLOOR_ADDED_US; the floor is the benchmark's."""
SUSPICIOUS = 0.97
"""Whatever comes within this part of a limit is measured again."""
MOST_AGAIN = 24
"""Measured again at most, for each limit of one layer."""
REPLAYS = 3
ROUNDS_AGAIN = 7

SHAPES = ((512, 7168), (1280, 7168), (2112, 7168), (1536, 3584), (3584, 1280), (7168, 512), (7168, 1536), (7168, 2112))
"""(n, k) that tensor parallelism leaves of large layers; each of 512, 1280, 1536, 2112, 3584 and 7168 as n and as k."""
FORMATS = ("e4m3_g128", "int8_g128", "int8_ch")
MS = "1:512"

Key = TypeVar("Key", bound=Hashable)
Pair = tuple[int, int]


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def limit_us(n: int, k: int, m: int) -> float:
    """Microseconds that a call may take."""
    return FLOOR_FACTOR * Cell(n, k, m).floor_us() + FLOOR_ADDED_US


def rises(us: Mapping[int, float]) -> dict[Pair, float]:
    """(m, the next m) -> time over the time before, of times by ascending m."""
    ms = list(us)
    return {(before, after): us[after] / us[before] for before, after in zip(ms, ms[1:])}


def settle(
    values: Mapping[Key, float], limit: float, again: Callable[[Key], float], most: int = MOST_AGAIN
) -> tuple[dict[Key, float], set[Key]]:
    """Measures again whatever is suspicious: near the limit or beyond it, or the largest. Largest first.

    So noise neither breaks a limit nor is reported as the largest value, and a single slow replay is forgotten.

    Args:
        values: first measurements.
        again: a value measured with more care, which replaces the first.
        most: how often `again` may be called.

    Returns:
        The values, and the keys of those that were measured again.
    """
    settled, sure = dict(values), set()
    while len(sure) < min(most, len(settled)):
        key = max((key for key in settled if key not in sure), key=settled.__getitem__)
        largest = max((settled[other] for other in sure), default=0.0)
        if settled[key] <= largest and settled[key] <= SUSPICIOUS * limit:
            break
        settled[key] = again(key)
        sure.add(key)
    return settled, sure


@dataclass(frozen=True)
class Line:
    """One layer in one format, over m.

    Attributes:
        us: microseconds a call, by m.
        rises: (m, the next m) -> time over the time before.
        sure: keys of `us` and `rises` that were measured again; only these break a limit.
    """

    format: str
    n: int
    k: int
    us: dict[int, float]
    rises: dict[Pair, float]
    sure: frozenset[int | Pair]

    @property
    def over_limit(self) -> dict[int, float]:
        """m -> time over what it may be."""
        return {m: us / limit_us(self.n, self.k, m) for m, us in self.us.items()}

    @property
    def steep(self) -> list[Pair]:
        """Where the time rises by more than it may, worst first."""
        return sorted(
            (pair for pair, rise in self.rises.items() if rise > RISE_LIMIT and pair in self.sure),
            key=lambda pair: -self.rises[pair],
        )

    @property
    def slow(self) -> list[int]:
        """Every m that takes longer than it may, worst first."""
        over = self.over_limit
        return sorted((m for m in over if over[m] > 1 and m in self.sure), key=lambda m: -over[m])


def measure_line(
    name: str,
    n: int,
    k: int,
    ms: Sequence[int],
    once: Callable[[int], float],
    carefully: Callable[[tuple[int, ...]], tuple[float, ...]],
) -> Line:
    """Measures a layer at all m, what is suspicious again.

    Args:
        once: m -> microseconds.
        carefully: several m -> microseconds of each, measured in turns.
    """
    ms = sorted(ms)
    limits = {m: limit_us(n, k, m) for m in ms}
    over = {m: once(m) / limits[m] for m in ms}
    over, sure_ms = settle(over, 1.0, lambda m: carefully((m,))[0] / limits[m])
    us = {m: over[m] * limits[m] for m in ms}

    def again(pair: Pair) -> float:
        before, after = carefully(pair)
        return after / before

    rising, sure_pairs = settle(rises(us), RISE_LIMIT, again)
    return Line(name, n, k, us, rising, frozenset(sure_ms | sure_pairs))


COLUMNS = ("format", "n", "k", "largest rise", "from m to m", "us / limit", "at m", "us", "limit", "steep", "slow")


def row(line: Line) -> tuple[str, ...]:
    """One line of the table: the largest rise, and the m that comes closest to its limit or passes it by most."""
    pair = max(line.rises, key=line.rises.__getitem__, default=None)
    rise = ("-", "-") if pair is None else (f"{100 * (line.rises[pair] - 1):+.1f} %", f"{pair[0]} to {pair[1]}")
    over = line.over_limit
    m = max(over, key=over.__getitem__)
    worst = (f"{over[m]:.2f}", str(m), f"{line.us[m]:.2f}", f"{limit_us(line.n, line.k, m):.2f}")
    counts = (
        _count(len(line.steep), sum(rise > RISE_LIMIT for rise in line.rises.values())),
        _count(len(line.slow), sum(ratio > 1 for ratio in over.values())),
    )
    return (line.format, str(line.n), str(line.k), *rise, *worst, *counts)


def _count(sure: int, found: int) -> str:
    """How many broke a limit; "+" where there were too many to measure all of them again."""
    return f"{sure}{'+' if found > sure else ''}"


def complaints(line: Line, kernel: Callable[[int], str], most: int = 4) -> list[str]:
    """What broke a limit, with the kernels' names, the worst `most` of each kind."""
    layer = f"{line.format} n={line.n} k={line.k}"
    found = []
    for before, after in line.steep[:most]:
        rise = 100 * (line.rises[before, after] - 1)
        kernels = " to ".join(dict.fromkeys((kernel(before), kernel(after))))
        found.append(
            f"{layer}: from m={before} to m={after} {rise:+.1f} %, more than {100 * (RISE_LIMIT - 1):.0f} % ({kernels})"
        )
    for m in line.slow[:most]:
        allowed = limit_us(line.n, line.k, m)
        found.append(f"{layer}: m={m} takes {line.us[m]:.2f} us, more than {allowed:.2f} ({kernel(m)})")
    more = len(line.steep[most:]) + len(line.slow[most:])
    return found + ([f"{layer}: and {more} more"] if more else [])


def to_dict(line: Line, kernel: Callable[[int], str]) -> dict[str, Any]:
    """A line of the document."""
    return {
        "format": line.format,
        "n": line.n,
        "k": line.k,
        "cells": [
            {
                "m": m,
                "us": round(us, 3),
                "limit_us": round(limit_us(line.n, line.k, m), 3),
                "again": m in line.sure,
                "kernel": kernel(m),
            }
            for m, us in line.us.items()
        ],
        "rises": [
            {"from": before, "to": after, "ratio": round(rise, 4), "again": (before, after) in line.sure}
            for (before, after), rise in line.rises.items()
        ],
        "steep": [list(pair) for pair in line.steep],
        "slow": line.slow,
    }


# ---- the GPU ---------------------------------------------------------------------------------------------------------


class Bench:
    """One layer in one format on the GPU: copies of its weight that together pass the L2, and calls for any m."""

    def __init__(self, fmt: Format, source: Any, max_m: int):
        import torch
        from benchmark_lib.ours import lhs_of, weight_of

        self.fmt, self.source = fmt, source
        self.weight = weight_of(fmt, source)
        self.weights: list[Any] = []
        self.lhs = lhs_of(fmt, source.activations(max_m))
        self.out = torch.empty(max_m, source.n, dtype=torch.bfloat16, device=source.device)

    def __enter__(self) -> Bench:
        count = self.source.copies(self.weight.nbytes)
        self.weights = [self.weight] + [copy.deepcopy(self.weight) for _ in range(count - 1)]
        return self

    def __exit__(self, *_: object) -> None:
        self.weights = []

    def kernel(self, m: int) -> Any:
        """The kernel that the selector takes."""
        import torch

        from jitgemm.kernel.formats import Problem
        from jitgemm.select.choose import choose

        invariant = self.fmt.batch_invariant
        problem = Problem(m, self.source.n, self.source.k, self.fmt.lhs, self.weight.format, batch_invariant=invariant)
        return choose(problem, device_of(torch.cuda.current_device()))

    def timed(self, m: int) -> Any:
        """A graph of one call per copy of the weight."""
        from benchmark_lib.timing import Timed

        from jitgemm.gemm.problem import Gemm
        from jitgemm.gemm.launch import GemmLaunch

        x, x_scale, out = self.lhs[0][:m], self.lhs[1][:m], self.out[:m]
        operands = [
            Gemm(x, x_scale, None, weight, out, batch_invariant=self.fmt.batch_invariant) for weight in self.weights
        ]
        plan = GemmLaunch(operands[0])
        return Timed([partial(plan.launch, each) for each in operands])

    def once(self, m: int) -> float:
        timed = self.timed(m)
        timed.turn(REPLAYS)
        return timed.us

    def carefully(self, ms: tuple[int, ...]) -> tuple[float, ...]:
        """The medians of some rounds, in which the m take turns, first to last and back."""
        everybody = [self.timed(m) for m in ms]
        for i in range(ROUNDS_AGAIN):
            for timed in everybody[:: -1 if i % 2 else 1]:
                timed.turn(REPLAYS)
        return tuple(statistics.median(statistics.median(turn) for turn in timed.turns) for timed in everybody)


def compile_all(benches: Sequence[Bench], ms: Sequence[int]) -> tuple[int, int]:
    """(kernels that the benches need, of them compiled now)."""
    from jitgemm.jit.cache import KernelCache

    kernels = list(dict.fromkeys(bench.kernel(m) for bench in benches for m in ms))
    cache = KernelCache()
    with ThreadPoolExecutor() as pool:
        found = pool.map(cache.get_or_compile, map(kernel_source, kernels))
        return len(kernels), sum(compiled for _, compiled in found)


def run(
    layers: Sequence[tuple[int, int]],
    formats: Sequence[Format],
    ms: Sequence[int],
    done: Callable[[Line, Callable[[int], str]], None],
) -> None:
    """Measures every layer in every format; `done` gets each line and the names of its kernels by m."""
    import gc

    from benchmark_lib.data import Source

    started = time.perf_counter()
    benches = [Bench(fmt, source, max(ms)) for source in (Source(n, k) for n, k in layers) for fmt in formats]
    count, compiled = compile_all(benches, ms)
    common.note(f"{count} kernels, {compiled} compiled now, {time.perf_counter() - started:.0f} s")
    # Some versions of torch collect garbage before every capture: tens of milliseconds for what the imports left.
    gc.collect()
    gc.freeze()
    for i, bench in enumerate(benches):
        n, k = bench.source.n, bench.source.k
        with bench:
            line = measure_line(bench.fmt.name, n, k, ms, bench.once, bench.carefully)
        done(line, lambda m, bench=bench: bench.kernel(m).label)
        seconds = time.perf_counter() - started
        common.note(f"{i + 1} of {len(benches)}: {bench.fmt.name} n={n} k={k}, {seconds:.0f} s")


# ---- the command -----------------------------------------------------------------------------------------------------

app = common.command_line()


@app.command()
@common.guarded
def cliffs(
    shape: Annotated[
        Optional[list[str]],
        typer.Option(
            "--shape",
            metavar="N,K",
            help="A weight's shape; may be repeated.",
            show_default=" ".join(f"{n},{k}" for n, k in SHAPES),
        ),
    ] = None,
    formats: Annotated[
        Optional[list[str]],
        typer.Option(
            "--format",
            metavar="NAME",
            help="A format as scripts/benchmark.py names them, such as int8_g64z or e4m3_g128_bi; may be repeated.",
            show_default=" ".join(FORMATS),
        ),
    ] = None,
    m: Annotated[
        str, typer.Option("--m", metavar="LIST", help="Numbers of tokens: 1,2,3 or first:last or first:last:step.")
    ] = MS,
    json_file: Annotated[
        Optional[Path],
        typer.Option("--json", metavar="FILE", help="Write every time to this file, '-' for stdout instead of tables."),
    ] = None,
) -> None:
    """Time layers with every number of tokens m: where does a token more cost abruptly more? Needs a Hopper GPU.

    \b
    Two limits:
      steep  from one m to the next, a call's time rises by at most 20 %
      slow   a call takes at most 1.6 x floor + 3 us, where the floor is
             max(bytes / 4.5 TB/s, 2mnk / 1.5 PFLOP/s), as in benchmark.py

    \b
    A time is the median over replays of a CUDA graph that calls the GEMM on
    one copy of the weight after the other, so that weights come from HBM.
    Whatever comes near a limit is measured again, the two m of a rise in
    turns, and only what repeats itself counts.

    \b
    The table has a line for each layer and format: the largest rise and
    where, the time that is largest against its limit and where, and how many
    m are steep and slow. Everything by default takes about two minutes.

    \b
    Examples:
      python scripts/cliffs.py
      python scripts/cliffs.py --shape 4096,4096 --m 1:128 --json cliffs.json
      python scripts/cliffs.py --format e4m3_g128_bi --m 120:140

    \b
    Exit codes:
      0  no cliff
      1  a limit is broken
      2  wrong arguments
      3  could not measure: no Hopper GPU, or a kernel failed
    """
    layers = list(dict.fromkeys(common.parse_shape(text) for text in shape)) if shape else list(SHAPES)
    chosen = list(dict.fromkeys(parse_format(text) for text in formats or FORMATS))
    ms = sorted(parse_ms(m))
    check_groups(layers, chosen)
    if local_device() is None:
        common.fail("no Hopper GPU here: times need one", common.FAILED)

    from benchmark_lib.results import environment, write_document

    to_stdout = json_file == Path("-")
    document: dict[str, Any] = {
        "tool": "jitgemm scripts/cliffs.py",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": environment(),
        "limits": {"rise": RISE_LIMIT, "floor_factor": FLOOR_FACTOR, "floor_added_us": FLOOR_ADDED_US},
        "lines": [],
    }
    lines: list[Line] = []
    problems: list[str] = []

    def done(line: Line, kernel: Callable[[int], str]) -> None:
        lines.append(line)
        problems.extend(complaints(line, kernel))
        document["lines"].append(to_dict(line, kernel))
        if json_file is not None and not to_stdout:
            write_document(json_file, document)

    try:
        run(layers, chosen, ms, done)
    except KeyboardInterrupt:
        common.note("stopped; these lines were done")
    if to_stdout:
        common.print_json(document)
    else:
        common.out().print(common.table(COLUMNS, map(row, lines), left=("format",)))
    for problem in problems:
        common.err().print(problem, style="red", markup=False, soft_wrap=True)
    steep, slow = sum(len(line.steep) for line in lines), sum(len(line.slow) for line in lines)
    common.note(f"{len(lines)} lines of {len(ms)} m each: {steep} steep, {slow} slow")
    if problems:
        raise typer.Exit(common.FOUND)


def check_groups(layers: Sequence[tuple[int, int]], formats: Sequence[Format]) -> None:
    """A group that covers all of k is no group.

    Raises:
        ValueError: names the layer and the format.
    """
    for n, k in layers:
        for fmt in formats:
            if fmt.group_size >= k:
                raise ValueError(f"--shape {n},{k}: {fmt.name} has one group there; that is per channel")


if __name__ == "__main__":
    app()
