"""Layers of compressed-tensors, packed by the format's definition."""

from __future__ import annotations

import builders
import checkpoints
import torch

LAYER = "model.layers.0.mlp.down_proj"


def scheme(strategy="group", group_size=128, *, symmetric=True, inputs=None, targets=("Linear",), **weights):
    args = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy}
    args |= {"group_size": group_size if strategy == "group" else None}
    return {"targets": list(targets), "weights": args | weights, "input_activations": inputs}


def config(*groups, **rest):
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups or [scheme()])},
        "ignore": ["lm_head"],
    } | rest


def pack_quantized(parts: builders.WeightParts, layer: str = LAYER, *, zero="packed"):
    """The tensors of a layer whose codes and zero points are in `parts` (0..15, or -8..7 without zero points)."""
    q, zero_point = parts.q.int(), parts.zero
    tensors = {
        "weight_packed": checkpoints.words(q if zero_point is not None else q + 8, 1),
        "weight_scale": parts.scale,
        "weight_shape": torch.tensor(q.shape),
    }
    if zero_point is not None and zero == "packed":
        tensors["weight_zero_point"] = checkpoints.words(zero_point, 0)
    elif zero_point is not None:
        tensors["weight_zero_point"] = (zero_point.int() - 8).to(torch.int8)
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}


def int_quantized(parts: builders.WeightParts, layer: str = LAYER):
    offset = 0 if parts.zero is None else 8
    tensors = {"weight": (parts.q.int() - offset).to(torch.int8), "weight_scale": parts.scale}
    if parts.zero is not None:
        tensors["weight_zero_point"] = (parts.zero.int() - 8).to(torch.int8)
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
