"""Packed experts that vLLM moves between ranks in place (EPLB): row e of every tensor is all of expert e.

vLLM copies rows and knows no formats, so all ranks hold their experts in one format, whatever the weights' values are.
"""

from __future__ import annotations

import torch

from jitgemm.kernel.codes import CODES
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.weight import layout
from jitgemm.weight.packed import Weight


def movable(weight: Weight) -> Weight:
    """The same experts in the format that holds any values: codes in the order of all codes, MXFP4's scales for 32 k.

    The codes are reordered in the weight's own memory, where the number of bytes stays.
    """
    inner = CODES[weight.format.code].inner
    weight = weight.regrouped((inner and inner.spared) or weight.group_size)
    common = weight.format.for_any_values
    if common == weight.format:
        return weight
    layout.reorder_codes(weight.blocks, common.code, weight.format.order, common.order)
    sizes = weight.n, weight.k, weight.group_size, common
    return type(weight)(weight.blocks, weight.channel_scale, *sizes, row_sum=weight.row_sum)


def expert_rows(module: PackedExperts) -> list[torch.Tensor]:
    """All tensors of packed experts as [E, values of an expert], over the same memory, in one order on all ranks."""
    parts = (module.w13, module.w2)
    tensors = [tensor for part in parts for _, tensor in sorted(part.named_buffers(recurse=False))]
    return [tensor.view(module.num_experts, -1) for tensor in tensors]
