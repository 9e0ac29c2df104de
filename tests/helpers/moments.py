"""Weights, inputs and what quantising loses of their product."""

from __future__ import annotations

import torch

import jitgemm


def inputs(tokens: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows whose columns go together and differ in size, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn((tokens, k), generator=generator) @ torch.randn((k, k), generator=generator)
    return mixed * torch.rand(k, generator=generator).mul(4).exp() / k


def weights(n: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(seed))


def lost(w: torch.Tensor, weight: jitgemm.W4Weight, moments: torch.Tensor) -> float:
    """The squared error of the results, as part of their squares."""
    w, moments = w.double(), moments.double()
    difference = w - weight.dequantize().double()
    return float((difference @ moments * difference).sum() / (w @ moments * w).sum())
