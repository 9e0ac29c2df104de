"""The weight and the activations that everybody in a cell is given, in 16 bits, and how they are quantised.

Normal random numbers by seed: data decides how much power a large GEMM draws, so all contestants get the same.
"""

from __future__ import annotations

import torch

from .cells import COPY_BYTES


class Source:
    """One layer's weight [n, k] in bf16, and activations [m, k] for any m, on the current GPU (tests: the CPU)."""

    def __init__(self, n: int, k: int, device: str = "cuda", seed: int = 0):
        self.n, self.k, self.device = n, k, device
        generator = torch.Generator(device).manual_seed(seed)
        self.weight = (
            torch.randn(n, k, generator=generator, device=device, dtype=torch.float32).mul_(k**-0.5).to(torch.bfloat16)
        )
        self._activations: dict[tuple[int, int], torch.Tensor] = {}

    def activations(self, m: int, index: int = 0) -> torch.Tensor:
        """bf16 [m, k], mean a little above 0; `index` tells different ones of one m apart."""
        if (m, index) not in self._activations:
            generator = torch.Generator(self.device).manual_seed(1000 + m + 100_003 * index)
            x = torch.randn(m, self.k, generator=generator, device=self.device) + 0.1
            if len(self._activations) >= 8:
                self._activations.clear()
            self._activations[m, index] = x.to(torch.bfloat16)
        return self._activations[m, index]

    def copies(self, weight_bytes: float, wanted: int | None = None) -> int:
        """Copies of a weight that together do not stay in the L2; at least 2, or what was asked for."""
        return wanted or max(2, int(COPY_BYTES / weight_bytes) + 1)


def quantise_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row: x / scale in e4m3 or int8, and scale fp32 [rows]."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = (x.abs().amax(1).float() / largest).clamp_(min=1e-12)
    y = x.float() / scale[:, None]
    return (y.round_().clamp_(-127, 127) if dtype == torch.int8 else y.clamp_(-448, 448)).to(dtype), scale


def quantise_groups(
    weight: torch.Tensor, group_size: int, zero_point: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """4-bit codes [n, k], bf16 scales and zero points or None [n, groups]; group_size 0 is one group a row."""
    n, k = weight.shape
    group_size = group_size or k
    grouped = torch.nn.functional.pad(weight.float(), (0, -k % group_size)).view(n, -1, group_size)
    if zero_point:
        low, high = grouped.amin(2), grouped.amax(2)
        scale = ((high - low) / 15).clamp_(min=1e-12).to(torch.bfloat16)
        zero = (-low / scale.float()).round_().clamp_(0, 15)
        q = (grouped / scale.float()[:, :, None]).add_(zero[:, :, None]).round_().clamp_(0, 15)
        return q.to(torch.uint8).view(n, -1)[:, :k].contiguous(), scale, zero.to(torch.uint8)
    scale = (grouped.abs().amax(2) / 7).clamp_(min=1e-12).to(torch.bfloat16)
    q = (grouped / scale.float()[:, :, None]).round_().clamp_(-8, 7)
    return q.to(torch.int8).view(n, -1)[:, :k].contiguous(), scale, None
