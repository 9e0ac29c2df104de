"""torchao's int4 layers, packed by the definition of its ops."""

from __future__ import annotations

import checkpoints
import torch


def high_first(q: torch.Tensor) -> torch.Tensor:
    return checkpoints.words(q, 1, torch.uint8, order=(1, 0))


def tiles(q: torch.Tensor, inner_k_tiles: int) -> torch.Tensor:
    """`_convert_weight_to_int4pack` on an NVIDIA GPU, lane by lane, each from the bytes that it reads."""
    n, k = q.shape
    high, low = q[:, 0::2], q[:, 1::2]  # of byte b: columns 2 * b and 2 * b + 1
    out = torch.zeros((n // 8, k // (16 * inner_k_tiles), 32, inner_k_tiles // 2), dtype=torch.int64)
    for n_tile, super_tile, lane, pair in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        row = 8 * n_tile + lane // 4
        first = (super_tile * inner_k_tiles + 2 * pair) * 8 + lane % 4
        word = 0
        for i in range(4):
            word |= int(high[row, first + 4 * i]) << 4 * i | int(low[row, first + 4 * i]) << 16 + 4 * i
        out[n_tile, super_tile, lane, pair] = word
    return out.to(torch.int32)
