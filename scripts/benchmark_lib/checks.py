"""Is a result right: ours against the exact reference, all against a plain fp32 product of the shared 16-bit data."""

from __future__ import annotations

import torch

from .contestant import Run
from .data import GroupedSource, Source

COARSE = 0.3
"""Largest relative RMS difference from the unquantised product. 4-bit weights quantised per row of 14336 differ by
0.18; a wrong operand or a tile left out differs by far more."""


def check(run: Run, source: Source | GroupedSource, m: int) -> dict[str, object]:
    """Runs two of the calls, in the end the last one, and compares.

    Returns:
        correct: whether all is within bounds; error: relative RMS difference from the unquantised product;
            error_over_bound: of the
        exact check, where there is one.
    """
    result: dict[str, object] = {"correct": True}
    worst = over = 0.0
    for call in source.checked(m, len(run.calls)):
        rows = source.sample(m, call)
        plain = source.plain(m, rows, call)
        run.poison()
        run.calls[call]()
        if not len(rows):  # no token chose an expert of this rank
            continue
        got = run.rows(rows)
        difference = float((got - plain).norm() / plain.norm())
        worst = max(worst, difference if difference == difference else float("inf"))
        if run.exact_check is not None:
            over = max(over, run.exact_check(rows, call))
    if run.snapshot is not None and not bool(torch.isfinite(run.snapshot()).all()):
        over = float("inf")  # some row outside the sample was not written
    result["error"] = _plain(worst)
    if run.exact_check is not None:
        result["error_over_bound"] = _plain(over)
    result["correct"] = worst <= COARSE and over <= 1.0
    return result


def _plain(value: float) -> float | str:
    """JSON has no infinity."""
    return round(value, 6) if value < float("inf") else "inf"
