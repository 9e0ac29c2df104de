"""QServe layers, packed by the format's definition."""

from __future__ import annotations

import builders
import layers
import torch


def tiled(q: torch.Tensor) -> torch.Tensor:
    """int8 [n, k / 2]: for each tile of 32 by 32, each lane's 16 bytes, as the kernel picks its operands from them.

    Lane l holds rows l / 4 + {0, 8, 16, 24} and columns 4 * (l % 4) + {0..3} + {0, 16}. Its four words, in order: rows
    0 and 16, columns + 0; rows 8 and 24, columns + 0; the same two, columns + 16. Rows 0 and 8 have the low nibbles.
    """
    n, k = q.shape
    tiles = q.long().reshape(n // 32, 32, k // 32, 32).transpose(1, 2)
    out = torch.zeros((n // 32, k // 32, 32, 16), dtype=torch.int64)
    for lane in range(32):
        row, column = lane // 4, 4 * (lane % 4)
        for word, (up, right) in enumerate(((0, 0), (8, 0), (0, 16), (8, 16))):
            low, high = tiles[:, :, row + up], tiles[:, :, row + up + 16]
            bytes_ = slice(column + right, column + right + 4)
            out[:, :, lane, 4 * word : 4 * word + 4] = low[..., bytes_] + 16 * high[..., bytes_]
    return out.to(torch.int8).reshape(n, k // 2)


def interleaved(values: torch.Tensor) -> torch.Tensor:
    """[n, G] -> int8 [G, n], the channels of each 32 in the order 0, 8, 16, 24, 1, 9, ..."""
    n = values.shape[0]
    order = [32 * tile + 8 * j + i for tile in range(n // 32) for i in range(8) for j in range(4)]
    return values.T[:, order].to(torch.int8).contiguous()


def s1_scales(seed: int, n: int) -> torch.Tensor:
    return ((torch.rand(n, generator=builders.generator(seed)) + 0.5) * 0.01).half()


def per_group(seed: int, n: int = 64, k: int = 256, group_size: int = 128):
    """Tensors of a layer in which (q - zero) * s2 fits int8, as the quantiser sees to, and the kernel's int8 values."""
    g = builders.generator(seed)
    groups = k // group_size
    s2 = torch.randint(1, 9, (n, groups), generator=g)
    zero = torch.randint(0, 16, (n, groups), generator=g)
    q = torch.randint(0, 16, (n, k), generator=g)
    s2_zero = (-zero * s2).to(torch.int8)  # wraps, as the packer's does
    tensors = {
        "qweight": tiled(q),
        "s1_scales": s1_scales(seed, n),
        "s2_scales": interleaved(s2),
        "s2_zeros": interleaved(s2_zero),
    }
    by_kernel = ((q * layers.over_k(s2, k)).to(torch.int8) + layers.over_k(s2_zero, k)).to(torch.int8)  # adds bytes
    return tensors, by_kernel


def per_channel(seed: int, zero: torch.Tensor, n: int = 64, k: int = 256):
    """Tensors of a layer, and q * s1 - szero in fp64."""
    q = torch.randint(0, 16, (n, k), generator=builders.generator(seed))
    s1 = s1_scales(seed, n)
    szero = zero.to(torch.int8) * s1  # rounds to fp16, as the packer's does
    tensors = {"qweight": tiled(q), "s1_scales": s1, "s1_szeros": szero}
    return tensors, q * s1.double()[:, None] - szero.double()[:, None]
