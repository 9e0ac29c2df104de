"""Packed experts that vLLM moves between ranks in place (EPLB): row e of every tensor is all of expert e.

vLLM copies rows and knows no formats, so all ranks hold their experts in one format, whatever the weights' values are.
"""

from __future__ import annotations

import torch

from jitgemm.nn.layers.experts import PackedExperts


def expert_rows(module: PackedExperts) -> list[torch.Tensor]:
    """All tensors of packed experts as [E, values of an expert], over the same memory, in one order on all ranks."""
    parts = (module.w13, module.w2)
    tensors = [tensor for part in parts for _, tensor in sorted(part.named_buffers(recurse=False))]
    return [tensor.view(module.num_experts, -1) for tensor in tensors]
