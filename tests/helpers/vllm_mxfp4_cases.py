"""What configs in MXFP4 say, and files whose headers are read."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from vllm_cases import made

from jitgemm.vllm.config import JitGemmConfig

QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp", "act_bits": 16}
AUTOROUND["packing_format"] = "auto_round:llm_compressor"


def with_headers(folder, config: dict, layers: dict[str, dict[str, torch.Tensor]]) -> JitGemmConfig:
    """The config of a folder whose file has these layers."""
    tensors = {f"{name}.{suffix}": each.clone() for name, parts in layers.items() for suffix, each in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    found = made(config)
    found.maybe_update_config(str(folder), hf_config=SimpleNamespace())
    return found
