"""AWQ layers, packed by the format's definition."""

from __future__ import annotations

import checkpoints
import layers
import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GEMM = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GEMV = GEMM | {"version": "gemv"}


def gemm(layer: layers.Layer) -> dict[str, torch.Tensor]:
    return {
        "qweight": checkpoints.words(layer.q.T, 1, order=ORDER),
        "qzeros": checkpoints.words(layer.zero.T, 1, order=ORDER),
        "scales": layer.scale.T.contiguous(),
    }


def gemv(layer: layers.Layer, width: int) -> dict[str, torch.Tensor]:
    """Zeros and scales filled up to `width` words of eight groups."""
    fill = (0, 8 * width - layer.scale.shape[1])
    return {
        "qweight": checkpoints.words(layer.q, 1),
        "qzeros": checkpoints.words(torch.nn.functional.pad(layer.zero, fill), 1),
        "scales": torch.nn.functional.pad(layer.scale, fill),
    }
