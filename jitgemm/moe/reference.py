"""The layer that the kernels are held against, and what calls on CPU tensors run: written to be easy to check."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.activations.arguments import Inputs
from jitgemm.activations.reference import gated, quantize_reference
from jitgemm.gemm.reference import gemm_w4a8_reference, round_fp64
from jitgemm.moe.arguments import Layer
from jitgemm.moe.route import combine_reference, route_reference
from jitgemm.tensors import take_rows


def layer_reference(layer: Layer) -> torch.Tensor:
    """`fused_experts` in plain PyTorch, for checked arguments whose weights are W4Weights.

    Both GEMMs, gate and combination in fp64. Rounded to x's type: what each GEMM returns, and the result; to fp32: what
    is quantised.
    """
    x, w13, w2, topk_ids, topk_weights, gate, dtype, affine, expert_map, bias13, bias2, addend, _, block = layer
    offsets, row_index, inverse = route_reference(topk_ids, layer.experts, expert_map)
    live = int(offsets[-1])

    def quantize(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = Inputs(values, dtype, False, affine, None, None, None, None, 0.0, None, block=block)
        results = quantize_reference(inputs)
        return tuple(result for result in results if result is not None)

    def multiply(lhs: tuple[torch.Tensor, ...], weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty((live, weight.n))
        bounds = offsets.tolist()
        for e, (first, end) in enumerate(zip(bounds, bounds[1:])):
            if first < end:
                rows = tuple(part[first:end] for part in lhs)
                expert_bias = None if bias is None else bias[e]
                out[first:end] = gemm_w4a8_reference(rows, weight[e], bias=expert_bias, out_dtype=x.dtype)
        return out

    tokens = row_index[:live].long()
    hidden = multiply(tuple(take_rows(part, tokens) for part in quantize(x)), w13, bias13)
    rows = multiply(quantize(gated(hidden.double(), gate).float()), w2, bias2)
    return round_fp64(combine_reference(rows, inverse, topk_weights, addend), x.dtype)
