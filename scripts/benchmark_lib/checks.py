"""Is a result right: ours against the exact reference, all against a plain fp32 product of the shared 16-bit data."""

from __future__ import annotations

import torch

from .contestant import Run
from .data import Source

ROWS = 48
"""Rows of the output that are compared: the first, the last, and some between."""
COARSE = 0.3
"""Largest relative RMS difference from the unquantised product. 4-bit weights quantised per row of 14336 differ by
0.18; a wrong operand or a tile left out differs by far more."""


def sample_rows(m: int, device: str, count: int = ROWS) -> torch.Tensor:
    if m <= count:
        return torch.arange(m, device=device)
    inner = torch.randperm(m - 2, generator=torch.Generator().manual_seed(m))[: count - 2] + 1
    return torch.cat([torch.tensor([0, m - 1]), inner]).sort().values.to(device)


def check(run: Run, source: Source, m: int) -> dict[str, object]:
    """Runs the first and the last copy's call and compares.

    Returns:
        correct: whether all is within bounds; error: relative RMS difference from the unquantised product;
            error_over_bound: of the
        exact check, where there is one.
    """
    rows = sample_rows(m, source.device)
    x = source.activations(m).view(m, -1)[rows].float()
    plain = x @ source.weight.float().T
    result: dict[str, object] = {"correct": True}
    worst = over = 0.0
    for call in dict.fromkeys((run.calls[0], run.calls[-1])):
        run.poison()
        call()
        got = run.rows(rows)
        difference = float((got - plain).norm() / plain.norm())
        worst = max(worst, difference if difference == difference else float("inf"))
        if run.exact_check is not None:
            over = max(over, run.exact_check(rows))
    if run.snapshot is not None and m > len(rows) and not bool(torch.isfinite(run.snapshot()).all()):
        over = float("inf")  # some row outside the sample was not written
    result["error"] = _plain(worst)
    if run.exact_check is not None:
        result["error_over_bound"] = _plain(over)
    result["correct"] = worst <= COARSE and over <= 1.0
    return result


def _plain(value: float) -> float | str:
    """JSON has no infinity."""
    return round(value, 6) if value < float("inf") else "inf"
