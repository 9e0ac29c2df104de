"""BitBLAS layers, packed by the format's definition."""

from __future__ import annotations

import checkpoints
import torch


def qweight(q: torch.Tensor, order: tuple[int, ...] | None = None) -> torch.Tensor:
    if order is None:
        return checkpoints.words(q, 1, torch.int8)
    return checkpoints.words(q, 1, torch.int32, order).view(torch.int8)
