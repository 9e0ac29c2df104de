"""Routing: tokens' choices sorted by expert, and the rows that experts made of them combined again.

The two calls at the ends of the layer, each one launch on a GPU; CPU tensors run the references here.
"""

from __future__ import annotations

import torch

from jitgemm.activations.arguments import Inputs, Outputs
from jitgemm.activations.call import quantize
from jitgemm.gemm.reference import round_fp64
from jitgemm.moe.arguments import COMBINE_POINTERS, ROUTE_POINTERS, Routing, check_combining, check_routing
from jitgemm.moe.kernel import front_spec
from jitgemm.runtime.checks import check_addresses
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.tensors import TYPE_NAMES


def route(topk_ids: torch.Tensor, experts: int, *, expert_map: torch.Tensor | None = None) -> Routing:
    """Sorts choices by expert, stably, on the current stream; the same result in every run.

    Args:
        topk_ids: int32 or int64 [tokens, top_k], contiguous. Those outside 0..experts - 1 are skipped.
        experts: 1 to 1024.
        expert_map: int32 [global_experts], at most 8192: topk_ids are numbers in it, and what it holds there is the
            expert, or -1 to skip the choice. Ids outside of it are skipped.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        CacheMissError, CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    tensors = [topk_ids] if expert_map is None else [topk_ids, expert_map]
    key = ("route", experts, expert_map is None)
    plan = this_thread.cache.find_plan(key, tensors)
    if plan is None:
        check_routing(topk_ids, experts, expert_map)
        check_addresses(ROUTE_POINTERS, (topk_ids, expert_map))
    if not topk_ids.is_cuda:
        return route_reference(topk_ids, experts, expert_map)
    routing = _new_routing(topk_ids, experts)
    if topk_ids.shape[0] == 0:
        routing.offsets.zero_()
        return routing
    if plan is None:
        from jitgemm.moe.plan import RoutePlan

        with torch.cuda.device(topk_ids.device):
            plan = RoutePlan(topk_ids, experts, expert_map)
        this_thread.cache.add_plan(key, tensors, plan)
    plan.launch(topk_ids, expert_map, routing)
    return routing


def route_and_quantize(
    inputs: Inputs, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
) -> tuple[Routing, Outputs]:
    """`route`, and `quantize` of tokens by row; of few tokens in one launch. For checked tensors.

    Args:
        inputs: x [tokens, k], at least one token; dtype, affine and block. The rest is what says nothing.
    """
    x, dtype, _, affine = inputs[:4]
    spec = front_spec(topk_ids.numel(), x.shape[1], TYPE_NAMES[x.dtype], TYPE_NAMES[dtype], affine, inputs.block)
    if spec is None or not x.is_cuda:
        return route(topk_ids, experts, expert_map=expert_map), quantize(inputs)
    tensors = [x, topk_ids] if expert_map is None else [x, topk_ids, expert_map]
    key = ("front", spec.label, experts, expert_map is None)
    plan = this_thread.cache.find_plan(key, tensors)
    if plan is None:
        from jitgemm.moe.plan import FrontPlan

        with torch.cuda.device(x.device):
            plan = FrontPlan(spec, x, topk_ids, experts, expert_map)
        this_thread.cache.add_plan(key, tensors, plan)
    routing, outputs = _new_routing(topk_ids, experts), inputs.new_outputs()
    plan.launch(x, topk_ids, expert_map, routing, outputs)
    return routing, outputs


def _new_routing(topk_ids: torch.Tensor, experts: int) -> Routing:
    choices, device = topk_ids.numel(), topk_ids.device
    return Routing(
        torch.empty(experts + 1, dtype=torch.int32, device=device),
        torch.empty(choices, dtype=torch.int32, device=device),
        torch.empty(topk_ids.shape, dtype=torch.int32, device=device),
    )


def combine(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
) -> None:
    """out[t] = addend[t] + sum over i of topk_weights[t, i] * rows[inverse[t, i]], on the current stream.

    In fp32, in the order of i, a fused multiply-add each, rounded once: the same bits in every run.

    Args:
        rows: bfloat16, float16 or float32 [m, n], contiguous, n a multiple of 8.
        inverse: int32 [tokens, top_k], contiguous; choices of a negative row are skipped. Others are checked on the CPU
            alone.
        topk_weights: float32, bfloat16 or float16 [tokens, top_k], contiguous.
        out: bfloat16, float16 or float32 [tokens, n], rows a multiple of 16 bytes apart; addend itself for in place.
        addend: of out's shape and type, rows a multiple of 16 bytes apart; None for zeros.

    Raises:
        As `route`; and ValueError if rows, topk_weights, addend or out requires grad and gradients are on.
    """
    tensors = [rows, inverse, topk_weights, out] if addend is None else [rows, inverse, topk_weights, out, addend]
    key = ("combine", addend is None, torch.is_grad_enabled())
    plan = this_thread.cache.find_plan(key, tensors)
    if plan is None:
        check_combining(rows, inverse, topk_weights, addend, out)
        if out.shape[0] == 0:
            return
        check_addresses(COMBINE_POINTERS, (rows, inverse, topk_weights, addend, out))
        if not rows.is_cuda:
            if inverse.numel() and inverse.max() >= rows.shape[0]:
                raise ValueError(f"inverse: expected rows below {rows.shape[0]}, got {int(inverse.max())}")
            out.copy_(round_fp64(combine_reference(rows, inverse, topk_weights, addend), out.dtype))
            return
        from jitgemm.moe.plan import CombinePlan

        with torch.cuda.device(rows.device):
            plan = CombinePlan(rows, topk_weights, addend, out)
        this_thread.cache.add_plan(key, tensors, plan)
    plan.launch(rows, inverse, topk_weights, addend, out)


def route_reference(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> Routing:
    """`route` in plain PyTorch; skipped choices' tokens fill the end of row_index."""
    ids, top_k = topk_ids.flatten().long(), topk_ids.shape[1]
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = ids.sort(stable=True).indices
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = torch.bincount(ids, minlength=experts + 1)[:experts].cumsum(0)
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    inverse.masked_fill_(ids == experts, -1)
    return Routing(offsets, (order // top_k).int(), inverse.view(topk_ids.shape))


def combine_reference(
    rows: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor, addend: torch.Tensor | None
) -> torch.Tensor:
    """`combine` in fp64, not rounded."""
    out = rows.new_zeros((inverse.shape[0], rows.shape[1]), dtype=torch.float64)
    if addend is not None:
        out += addend
    for row, weight in zip(inverse.T, topk_weights.double().T):
        used = row >= 0
        out[used] += weight[used, None] * rows[row[used].long()].double()
    return out
