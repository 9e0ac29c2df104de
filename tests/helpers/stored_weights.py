"""Weights rounded to int4 in groups of 32, as checkpoints store them: packers by the format's name, each with a config."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import checkpoints
import files_awq
import files_gptq
import layers
import torch


def rounded(w: torch.Tensor, least: int = -8, group_size: int = 32) -> layers.Layer:
    """The nearest codes from `least` to 7, around zero points of 8, by bf16 scales."""
    groups = w.detach().float().unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(2) / -least).clamp(min=1e-4).bfloat16()
    q = (groups / scale.float()[..., None]).round().clamp(least, 7).flatten(1).long() + 8
    return layers.Layer(q, scale, torch.full(scale.shape, 8), torch.arange(w.shape[1]) // group_size)


def compressed(layer: layers.Layer) -> dict[str, torch.Tensor]:
    shape = torch.tensor(layer.q.shape)
    return {"weight_packed": checkpoints.words(layer.q, 1), "weight_scale": layer.scale, "weight_shape": shape}


def gptq_of_8_bits(layer: layers.Layer, zero: int = 128) -> dict[str, torch.Tensor]:
    wide = replace(layer, q=layer.q - 8 + zero, zero=torch.full_like(layer.zero, zero))
    return files_gptq.packed(wide, minus_one=False, bits=8)


def w4afp8(layer: layers.Layer) -> dict[str, torch.Tensor]:
    words = {"weight": checkpoints.words(layer.q - 8, 1, torch.int8), "weight_scale_inv": layer.scale.float()}
    return words | {"input_scale": torch.tensor(0.5)}


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}
FORMATS = {
    "compressed-tensors": (compressed, COMPRESSED),
    "gptq": (partial(files_gptq.packed, minus_one=False), files_gptq.V2 | {"group_size": 32}),
    "gptq-int8": (gptq_of_8_bits, files_gptq.V2 | {"bits": 8, "group_size": 32, "sym": True}),
    "awq": (files_awq.gemm, files_awq.GEMM | {"group_size": 32}),
    "w4afp8": (w4afp8, {"quant_method": "w4afp8", "group_size": 32}),
}
