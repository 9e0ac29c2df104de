"""vLLM's layers, made in the context that a test is in: of a rank with a process group, say."""

from __future__ import annotations

from typing import Any

import torch
from engines import vllm
from served_layers import BF16


def made(config: Any, options: dict[str, Any] | None = None) -> Any:
    return vllm.config(config, **(options or {}))


def told(config: Any, layers: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
    return vllm.told(config, layers, **(options or {}))


def gate_up(config: Any, k: int, n: int) -> torch.nn.Module:
    said = {"bias": False, "params_dtype": BF16, "quant_config": config, "prefix": "m.gate_up_proj"}
    return vllm.linears.MergedColumnParallelLinear(k, [n, n], **said)


def row(config: Any, k: int, n: int, bias: bool = False, prefix: str = "m.o_proj") -> torch.nn.Module:
    said = {"bias": bias, "params_dtype": BF16, "quant_config": config, "prefix": prefix}
    return vllm.linears.RowParallelLinear(k, n, **said)
