"""GPTQ layers, packed by the format's definition."""

from __future__ import annotations

import checkpoints
import layers
import torch

V1 = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
V2 = V1 | {"checkpoint_format": "gptq_v2"}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "data_type": "int"}


def packed(layer: layers.Layer, *, minus_one: bool, bits: int = 4) -> dict[str, torch.Tensor]:
    """The layer's tensors; v1 stores each zero less one in its own nibble, of 8 bits in its own byte."""
    return {
        "qweight": checkpoints.words(layer.q.T, 0, bits=bits),
        "qzeros": checkpoints.words(layer.zero.T - int(minus_one), 1, bits=bits),
        "scales": layer.scale.T.contiguous(),
        "g_idx": layer.group.to(torch.int32),
    }
