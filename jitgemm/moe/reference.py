"""The layer that the kernels are held against, and what calls on CPU tensors run: written to be easy to check."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.activations.reference import gated, quantize_reference
from jitgemm.gemm.reference import gemm_w4a8_reference, round_fp64
from jitgemm.moe.arguments import ExpertsCall
from jitgemm.moe.route import combine_reference, route_reference
from jitgemm.tensors import take_rows
from jitgemm.weight.packed import as_weight


def layer_reference(call: ExpertsCall) -> torch.Tensor:
    """`fused_experts` in plain PyTorch, for checked arguments.

    Both GEMMs, gate and combination in fp64. Rounded to x's type: what each GEMM returns, and the result; to fp32: what
    is quantised.
    """
    x, w13, w2 = call.x, as_weight(call.w13), as_weight(call.w2)
    offsets, row_index, inverse = route_reference(call.topk_ids, call.experts, call.expert_map)
    live = int(offsets[-1])

    def quantize(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = quantize_reference(values, call.activation)
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
    hidden = multiply(tuple(take_rows(part, tokens) for part in quantize(x)), w13, call.bias13)
    rows = multiply(quantize(gated(hidden.double(), call.gate).float()), w2, call.bias2)
    return round_fp64(combine_reference(rows, inverse, call.topk_weights, call.addend), x.dtype)
