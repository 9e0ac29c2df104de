"""ExecuTorch layers, packed by the format's definition."""

from __future__ import annotations

import checkpoints
import torch


def high_first(q: torch.Tensor) -> torch.Tensor:
    return checkpoints.words(q, 1, torch.uint8, order=(1, 0))
