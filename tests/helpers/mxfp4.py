"""Random MXFP4 weights by seed, for CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jitgemm import W4Weight, pack_mxfp4
from jitgemm.kernel.formats import ceil_div

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TIERS = {"row": 0, "block": 128, "group": 32}
"""How far scales spread, and the group size that holds them."""


@dataclass(frozen=True)
class Parts:
    """What `pack_mxfp4` is given; `packed` is what it makes of it."""

    codes: torch.Tensor  # uint8 [..., n, k], one value each
    scales: torch.Tensor  # uint8 [..., n, ceil(k / 32)]

    @property
    def canonical(self) -> torch.Tensor:
        return self.codes[..., 0::2] | self.codes[..., 1::2] << 4

    @property
    def packed(self) -> W4Weight:
        return pack_mxfp4(self.canonical, self.scales, k=self.codes.shape[-1])

    def dequantize_fp64(self) -> torch.Tensor:
        """The specification, element by element."""
        values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], dtype=torch.float64)
        powers = torch.ldexp(torch.ones(self.scales.shape, dtype=torch.float64), self.scales.cpu().int() - 127)
        group = torch.arange(self.codes.shape[-1]) // 32
        return (values[self.codes.cpu().long()] * powers[..., group]).to(self.codes.device)


def parts(
    seed: int, n: int, k: int, tier: str = "row", *, experts: int | None = None, device: str = "cpu", shift: int = 0
) -> Parts:
    """A weight whose scales need this tier, as far as k has blocks to need it; shift: of all exponents."""
    g, lead = torch.Generator().manual_seed(seed), () if experts is None else (experts,)
    codes = torch.randint(0, 16, (*lead, n, k), generator=g, dtype=torch.uint8)
    groups, blocks = ceil_div(k, 32), ceil_div(k, 128)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (*lead, n, *shape), generator=g)

    scales = drawn(0, 14, groups)
    if tier == "row":
        scales = scales + drawn(100, 120, 1)
    elif tier == "block":
        scales = scales + drawn(90, 125, blocks).repeat_interleave(4, -1)[..., :groups]
    else:
        scales = drawn(95, 140, groups)
    return Parts(codes.to(device), (scales + shift).to(torch.uint8).to(device))


def narrow(seed: int, n: int, k: int, tier: str = "row", *, device: str = "cpu", experts: int | None = None) -> Parts:
    """The same with scales that sums in f16 hold: groups that share a base within 2^6, bases within 2^20, groups of
    zeros with any scale among them."""
    made, g = parts(seed, n, k, tier, experts=experts), torch.Generator().manual_seed(seed + 1)
    lead, groups = made.scales.shape[:-1], made.scales.shape[-1]

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (*lead, *shape), generator=g)

    scales = drawn(0, 6, groups) + drawn(100, 120, 1)
    if tier == "block":
        scales = scales + drawn(0, 14, ceil_div(k, 128)).repeat_interleave(4, -1)[..., :groups]
    if tier == "group":
        scales = drawn(105, 124, groups)
    codes = made.codes.clone()
    zeros = (drawn(0, 9, groups) == 0) & (torch.arange(groups) % 4 > 0)  # some of a base's groups have others
    codes[zeros.repeat_interleave(32, -1)[..., :k]] &= 8
    return Parts(codes.to(device), torch.where(zeros, drawn(60, 124, groups), scales).to(torch.uint8).to(device))


def all_pairs(device: str = "cpu") -> Parts:
    """Every code with every exponent that a row's base allows: row r < 15 has group g at exponent (g + r) % 15, whose
    first 16 columns are all codes; [16, 480]."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 30)
    scales = (torch.arange(15)[None] + torch.arange(16)[:, None]) % 15 + 113
    return Parts(codes.to(device), scales.to(torch.uint8).to(device))
