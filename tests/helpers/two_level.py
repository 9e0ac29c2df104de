"""Random weights in two levels by seed, for CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jitgemm import W4Weight, pack_w4_two_level


@dataclass(frozen=True)
class Parts:
    """What `pack_w4_two_level` is given; `packed` is what it makes of it."""

    q: torch.Tensor  # uint8 [..., n, k]
    factor: torch.Tensor  # uint8 [..., n, ceil(k / 128)]
    zero: torch.Tensor  # uint8, the same
    scale: torch.Tensor  # fp16 or bf16 [..., n]

    @property
    def packed(self) -> W4Weight:
        return pack_w4_two_level(self.q, self.factor, self.zero, self.scale)

    def over_k(self, values: torch.Tensor) -> torch.Tensor:
        return values.long().repeat_interleave(128, -1)[..., : self.q.shape[-1]]

    def integers(self) -> torch.Tensor:
        """(q - zero) * factor by definition, int64."""
        return (self.q.long() - self.over_k(self.zero)) * self.over_k(self.factor)

    def dequantize_fp64(self) -> torch.Tensor:
        return self.integers().double() * self.scale.double()[..., None]


def bytes_of(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.uint8)


def fitting(q: torch.Tensor, factor: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Codes, each moved to where it minus the zero point times the factor is an integer of 8 bits."""
    low = (zero - 128 // factor).clamp(min=0)
    high = (zero + 127 // factor).clamp(max=15)
    return torch.minimum(torch.maximum(q, low), high)


def parts(
    seed: int, n: int, k: int, *, experts: int | None = None, device: str = "cpu", most: int = 127,
    dtype: torch.dtype = torch.float16,
) -> Parts:  # fmt: skip
    """most: largest factor. Every second one is at most 16."""
    g, lead = torch.Generator().manual_seed(seed), () if experts is None else (experts,)
    groups = -(-k // 128)
    factor = torch.randint(1, most + 1, (*lead, n, groups), generator=g)
    small = torch.randint(1, min(most, 16) + 1, factor.shape, generator=g)
    factor = torch.where(torch.rand(factor.shape, generator=g) < 0.5, small, factor)
    zero = torch.minimum(torch.randint(0, 17, factor.shape, generator=g), 255 // factor)
    zero = torch.minimum(zero, 15 + 128 // factor)  # else no code fits
    q = torch.randint(0, 16, (*lead, n, k), generator=g)
    q = fitting(q, *(each.repeat_interleave(128, -1)[..., :k] for each in (factor, zero)))
    scale = ((torch.rand((*lead, n), generator=g) + 0.5) * 0.01).to(dtype)
    return Parts(*(each.to(torch.uint8).to(device) for each in (q, factor, zero)), scale.to(device))


def all_triples(device: str = "cpu") -> Parts:
    """Every code, factor and zero point that fit one another, one a column: row r has them shifted by r of eight
    groups."""
    pairs = [(f, z) for f in range(1, 128) for z in range(17) if f * z <= 255 and z <= 15 + 128 // f]
    rows = 8
    pairs += [(1, 0)] * (-len(pairs) % rows)
    table = torch.tensor(pairs).view(-1, rows, 2).permute(1, 0, 2)  # [rows, groups, 2]
    factor, zero = table[..., 0], table[..., 1]
    groups = factor.shape[1]
    q = torch.arange(16).repeat(rows, 8 * groups)
    q = fitting(q, *(each.repeat_interleave(128, -1) for each in (factor, zero)))
    found = (each.to(torch.uint8).contiguous().to(device) for each in (q, factor, zero))
    return Parts(*found, torch.ones(rows, dtype=torch.float16, device=device))
