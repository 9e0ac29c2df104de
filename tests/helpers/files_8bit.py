"""Layers with 8-bit weights, as their formats store them."""

from __future__ import annotations

import builders
import torch

E4M3 = torch.float8_e4m3fn


def codes(seed: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of the type."""
    bits = torch.randint(0, 256, (n, k), generator=builders.generator(seed), dtype=torch.uint8)
    return (torch.where((bits & 0x7F) == 0x7F, 0x38, bits) if dtype == E4M3 else bits).to(torch.uint8).view(dtype)


def scales(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.rand(shape, generator=builders.generator(seed)) + 0.5) * 0.01).to(dtype)


def inputs(kind: str, *, dynamic: bool = True, strategy: str = "token", **more) -> dict:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic} | more


def scheme(kind: str, strategy: str, format: str, activations: dict | None = None, bits: int = 8, **more) -> dict:
    """compressed-tensors' config of one group."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy} | more
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
