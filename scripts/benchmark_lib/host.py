"""What a call costs the host: microseconds from entering it to being free again, while the GPU's queue never fills."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from jitgemm.cli.common import table

from .contestant import Contestant, short
from .timing import relative_spread

BURST = 250
"""Calls between two waits; with at most one launch each, a quarter of what the queue holds."""
BURSTS = 40


def print_host(n: int, k: int, m: int, contestants: Sequence[Contestant], console: Console) -> None:
    """A row a contestant, of medians over bursts: one weight over and over, copies in turn as a model's layers, and how
    much these vary; then an empty call, which is part of every figure."""
    import torch

    from .data import Source

    source, rows = Source(n, k), []
    for each in contestants:
        try:
            calls = each.load(source)(m).calls
            for call in calls:
                call()
            same, copies = (_microseconds(some, torch.cuda.synchronize) for some in (calls[:1], calls))
        except Exception as error:
            rows.append((each.label, "-", "-", "-", short(error)))
            continue
        medians = (f"{statistics.median(some):.2f}" for some in (same, copies))
        rows.append((each.label, *medians, f"{100 * relative_spread(copies):.0f}%", ""))
    empty = f"{statistics.median(_microseconds([lambda: None], lambda: None)):.2f}"
    rows.append(("an empty call", empty, empty, "-", ""))
    console.print(f"\nhost microseconds a call (median over bursts), {n} x {k}, m = {m}")
    console.print(table(("call", "same tensors", "copies in turn", "+-", "note"), rows, left=("call", "note")))


def _microseconds(calls: Sequence[Callable[[], Any]], synchronise: Callable[[], Any]) -> list[float]:
    """Of host time per call, one figure a burst, that is how long enqueuing takes; `synchronise` is outside the
    clock."""
    batch = [calls[i % len(calls)] for i in range(BURST)]
    times, collecting = [], gc.isenabled()
    gc.disable()
    try:
        for _ in range(BURSTS + 1):
            synchronise()
            started = time.perf_counter()
            for call in batch:
                call()
            times.append((time.perf_counter() - started) * 1e6 / BURST)
        synchronise()
    finally:
        if collecting:
            gc.enable()
    return times[1:]
