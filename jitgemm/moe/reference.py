"""The layer that the kernels are held against, and what calls on CPU tensors run: written to be easy to check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jitgemm.activations.reference import gated, quantize_reference
from jitgemm.gemm.problem import Gemm, Groups, split_lhs
from jitgemm.gemm.reference import round_fp64, write_reference
from jitgemm.moe.arguments import ExpertsCall
from jitgemm.moe.route import combine_reference, route_reference
from jitgemm.tensors import take_rows

if TYPE_CHECKING:
    from jitgemm.weight.packed import AnyWeight


def layer_reference(call: ExpertsCall) -> torch.Tensor:
    """`fused_experts` in plain PyTorch, for checked arguments.

    Both GEMMs, gate and combination in fp64. Rounded to x's type: what each GEMM returns, and the result; to fp32: what
    is quantised.
    """
    x = call.x
    offsets, row_index, inverse = route_reference(call.topk_ids, call.experts, call.expert_map)
    live = int(offsets[-1])

    def quantize(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = quantize_reference(values, call.activation)
        return tuple(result for result in results if result is not None)

    def multiply(lhs: tuple[torch.Tensor, ...], weight: AnyWeight, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty((live, weight.n))
        write_reference(Gemm(*split_lhs(lhs), weight, out, bias, Groups(offsets, None, 0, live)))
        return out

    tokens = row_index[:live].long()
    hidden = multiply(tuple(take_rows(part, tokens) for part in quantize(x)), call.w13, call.bias13)
    rows = multiply(quantize(gated(hidden.double(), call.gate).float()), call.w2, call.bias2)
    return round_fp64(combine_reference(rows, inverse, call.topk_weights, call.addend), x.dtype)
