"""Random NVFP4 weights by seed, for CPU and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mxfp4 import MAGNITUDES

from jitgemm import W4Weight, pack_nvfp4


@dataclass(frozen=True)
class Parts:
    """What `pack_nvfp4` is given; `packed` is what it makes of it."""

    codes: torch.Tensor  # uint8 [..., n, k], one value each
    scales: torch.Tensor  # float8_e4m3fn [..., n, k / 16]
    whole: torch.Tensor  # fp32, the tensor's scale

    @property
    def canonical(self) -> torch.Tensor:
        return self.codes[..., 0::2] | self.codes[..., 1::2] << 4

    @property
    def given(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.canonical, self.scales, self.whole

    @property
    def packed(self) -> W4Weight:
        return pack_nvfp4(*self.given)

    def products(self) -> torch.Tensor:
        """code * scale by definition, fp64."""
        values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], dtype=torch.float64)
        return values.to(self.codes.device)[self.codes.long()] * self.scales.double().repeat_interleave(16, -1)

    def dequantize_fp64(self) -> torch.Tensor:
        whole = self.whole.double()
        return self.products() * (whole[:, None, None] if self.codes.dim() == 3 else whole)


def scales_of(bytes: torch.Tensor) -> torch.Tensor:
    return bytes.to(torch.uint8).view(torch.float8_e4m3fn)


def parts(
    seed: int, n: int, k: int, *, experts: int | None = None, device: str = "cpu", low: int = 32, high: int = 112
) -> Parts:
    """low, high: bytes of scales, from 2^-3 to 2^6 - 1/16: near one another in any row."""
    g, lead = torch.Generator().manual_seed(seed), () if experts is None else (experts,)
    codes = torch.randint(0, 16, (*lead, n, k), generator=g, dtype=torch.uint8)
    scales = scales_of(torch.randint(low, high, (*lead, n, k // 16), generator=g))
    whole = torch.rand(lead or (1,), generator=g) * 0.1
    return Parts(codes.to(device), scales.to(device), whole.to(device))


def far(seed: int, n: int, k: int, **options) -> Parts:
    """The same with scales of 2^-9 and 2^7 in every row; k of 32 at least."""
    made = parts(seed, n, k, **options)
    made.scales.view(torch.uint8)[..., 0], made.scales.view(torch.uint8)[..., 1] = 1, 112
    made.codes[..., 0], made.codes[..., 16] = 7, 12
    return made


def near_pairs(device: str = "cpu") -> Parts:
    """Every code with every scale that stands by another within 2^10: [16, 1264], of row r from the scale 1 + 3 r
    on."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 79)
    values = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rows = []
    for least in 3 * torch.arange(16):
        held = least + torch.arange(int((values < 2**10 * values[least]).sum()) - int(least))
        rows.append(held[torch.arange(79).clamp(max=len(held) - 1)] + 1)
    return Parts(codes.to(device), scales_of(torch.stack(rows)).to(device), torch.ones(1, device=device))


def all_pairs(device: str = "cpu") -> Parts:
    """Every code with every scale, [16, 2032]: row r has group g of all codes at scale (g + 8 r) % 127."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 127)
    scales = scales_of((torch.arange(127)[None] + 8 * torch.arange(16)[:, None]) % 127)
    return Parts(codes.to(device), scales.to(device), torch.ones(1, device=device))
