"""GPTQ: a column's rounding error is made up for by the columns that are still to be rounded.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323. The error that counts is the result's: for inputs x in rows of X,
|X (W - Q)ᵀ|², which XᵀX alone decides. Plain torch, on whatever device the weight is.
"""

from __future__ import annotations

import torch

from jitgemm.weight.search import Grid

DAMPING = 0.01
"""Added to XᵀX's diagonal, in parts of its mean: inputs that calibration did not show are worth a little, too."""
_COLUMNS = 128
"""Columns whose errors go to those behind them at once."""


def gptq(
    w: torch.Tensor, moments: torch.Tensor, size: int, search: Grid, act_order: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of least error of the result, as GPTQ finds them.

    Args:
        w: fp32 [n, k], finite.
        moments: XᵀX, [k, k], up to a factor.
        size: values of k that share a scale, which is searched when the first of them is reached.
        search: finds scales, by errors weighted with XᵀX's diagonal, and codes.
        act_order: the groups of the largest inputs first, and in each its largest inputs first.

    Returns:
        codes fp32 [n, k], scale and zero fp32 [n, ceil(k / size)].

    Raises:
        ValueError: a value of moments is not finite, or no damping makes them positive definite.
    """
    n, k = w.shape
    importance = moments.diagonal().to(torch.float32)
    order = _order(importance, size) if act_order else torch.arange(k, device=w.device)
    upper = _factor(moments, order)
    upper /= upper.diagonal()[:, None].clone()  # of an error, what goes to the columns behind it
    remaining, codes = w.T[order], torch.empty((k, n), device=w.device)  # columns as those before them left them
    importance = importance[order]
    groups = (order // size).tolist()
    scale, zero = (torch.empty((-(-k // size), n), device=w.device) for _ in range(2))
    for first in range(0, k, _COLUMNS):
        block, factor = remaining[first : first + _COLUMNS], upper[first : first + _COLUMNS, first:]
        errors = torch.empty_like(block)
        # A few launches a column are most of the time: rows are taken apart at once.
        rows, lost, out = block.unbind(), errors.unbind(), codes[first : first + _COLUMNS].unbind()
        for i, row in enumerate(rows):
            column, group = first + i, groups[first + i]
            if not column or group != groups[column - 1]:
                width = min(size, k - group * size)
                columns = slice(column, column + width)
                scales = search.scales(remaining[columns].T[:, None], importance[None, columns])
                step, origin = scale[group], zero[group]
                step[:], origin[:] = (values[:, 0] for values in scales)
                divisor = torch.where(step == 0, 1.0, step)
            code = search.round_(torch.div(row, divisor, out=out[i]), origin)
            torch.addcmul(row, search.in_steps(code, origin), step, value=-1, out=lost[i])
            if i + 1 < len(rows):
                block[i + 1 :].addr_(factor[i, i + 1 : len(rows)], lost[i], alpha=-1)
        remaining[first + _COLUMNS :].addmm_(factor[:, _COLUMNS:].T, errors, alpha=-1)
    return codes[order.argsort()].T, scale.T, zero.T


def _order(importance: torch.Tensor, size: int) -> torch.Tensor:
    """Columns group by group, so that each group's scale is searched once, from what earlier groups left of it."""
    k = len(importance)
    padded = torch.nn.functional.pad(importance, (0, -k % size), value=-1.0).view(-1, size)
    groups = padded.clamp(min=0).sum(1).argsort(descending=True, stable=True)
    inside = padded.argsort(dim=1, descending=True, stable=True)
    columns = (groups[:, None] * size + inside[groups]).flatten()
    return columns[columns < k]


def _factor(moments: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped moments, columns in this order."""
    h = moments.to(torch.float32)[order][:, order]
    diagonal = h.diagonal()
    mean = diagonal.mean()
    if not bool(torch.isfinite(h).all()) or float(diagonal.min()) < 0:
        raise ValueError("moments: expected sums of squares and products, finite, got other values")
    if float(mean) == 0:  # no input was other than 0: all columns are as good as each other
        return torch.eye(len(h), device=h.device)
    damping = DAMPING
    while damping <= 1:
        diagonal += damping * mean
        lower, failed = torch.linalg.cholesky_ex(h)
        if not bool(failed):
            lower, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed):
                return lower
        damping *= 10
    raise ValueError("moments: expected a positive semidefinite matrix, got one that no damping makes definite")
