"""From checked arguments to launches of routing and combining, as `gemm/launch.py` does for GEMMs."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.activations.plan import KERNELS as QUANTIZERS
from jitgemm.activations.plan import row_bytes
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.launch import KERNELS as GEMMS
from jitgemm.kernel.formats import ceil_div
from jitgemm.moe.arguments import COMBINE_POINTERS, GATHER_POINTERS, ROUTE_POINTERS, ROUTE_QUANTIZE_POINTERS
from jitgemm.moe.kernel import COMBINE_THREADS, ROUTE_QUANTIZE_THREADS, MAX_EXPERTS
from jitgemm.moe.kernel import MAX_GLOBAL_EXPERTS, CombineSpec, RouteQuantizeSpec, GatherSpec
from jitgemm.moe.kernel import combine_blocks, route_launch, route_smem_bytes, route_spec, route_threads, source_of
from jitgemm.runtime.device import device_of
from jitgemm.runtime.loaded import KernelFamily, resident
from jitgemm.runtime.launch import ArgumentBlock, Launch
from jitgemm.tensors import TYPE_NAMES

_ROUTE_VALUES = dict.fromkeys(("choices", "top_k", "experts", "global_experts", "run", "id_bytes"), "I")
ROUTE_ARGUMENTS = ArgumentBlock(ROUTE_POINTERS, **_ROUTE_VALUES)
"""`RouteArgs` in include/jitgemm/moe/route.cuh."""
ROUTE_QUANTIZE_ARGUMENTS = ArgumentBlock(
    ROUTE_QUANTIZE_POINTERS, x_row_bytes="Q", **_ROUTE_VALUES, m="I", k="I", scale_block_stride="Q"
)
"""`RouteQuantizeArgs` in include/jitgemm/moe/route_quantize.cuh."""
COMBINE_ARGUMENTS = ArgumentBlock(
    COMBINE_POINTERS, addend_row_bytes="Q", out_row_bytes="Q", tokens="I", top_k="I", n="I", weights_type="i"
)
"""`CombineArgs` in include/jitgemm/moe/combine.cuh."""
GATHER_ARGUMENTS = ArgumentBlock(GATHER_POINTERS, scale_block_stride="Q", out_scale_block_stride="Q", k="I", blocks="I")
"""`GatherArgs` in include/jitgemm/moe/gather.cuh."""

_SMEM_BYTES = {
    "route": route_smem_bytes(32, MAX_EXPERTS, MAX_GLOBAL_EXPERTS),
    "route_quantize": route_smem_bytes(ROUTE_QUANTIZE_THREADS // 32, MAX_EXPERTS, MAX_GLOBAL_EXPERTS),
    "combine": 0,
    "dispatch": route_smem_bytes(ROUTE_QUANTIZE_THREADS // 32, MAX_EXPERTS, 0),
    "gather": 0,
    "collect": 0,
}
_CALL = "the layer once with these shapes"
FAMILIES: dict[str, KernelFamily[Any]] = {
    family: KernelFamily(source_of, lambda spec: _SMEM_BYTES[spec.family], _CALL) for family in _SMEM_BYTES
}
FAMILIES |= {"gemm": GEMMS, "quantize": QUANTIZERS}
"""By `family` of specs."""


def _route_values(
    topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None, threads: int, ctas: int
) -> tuple[dict[str, int], int]:
    """(what `RouteArgs` holds besides addresses, bytes of shared memory of a CTA)."""
    device_of(topk_ids.get_device())  # raises unless it is a Hopper GPU
    choices, global_experts = topk_ids.numel(), 0 if expert_map is None else expert_map.numel()
    run, smem = route_launch(threads, ctas, choices, experts, global_experts)
    values = choices, topk_ids.shape[1], experts, global_experts, run, topk_ids.element_size()
    return dict(zip(_ROUTE_VALUES, values, strict=True)), smem


def prepare_route(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> Launch:
    """For choices of one shape and type. It waits for the kernel before it, as does the next."""
    spec = route_spec(topk_ids.numel())
    threads = route_threads(spec, topk_ids.numel(), experts)
    values, smem = _route_values(topk_ids, experts, expert_map, threads, spec.ctas)
    kernel = FAMILIES["route"].load(spec, topk_ids.get_device())
    return Launch(kernel, ROUTE_ARGUMENTS, values, grid=spec.ctas, threads=(threads, 1), smem_bytes=smem)


def prepare_route_and_quantize(
    spec: RouteQuantizeSpec, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
) -> Launch:
    """The routing, and quantising of the tokens in other CTAs. It waits for the kernel before it, as does the next."""
    m, k = x.shape
    values, smem = _route_values(topk_ids, experts, expert_map, ROUTE_QUANTIZE_THREADS, 1)
    # Scales as `QuantizeCall.new_outputs` lays them out.
    values |= {"x_row_bytes": row_bytes(x), "m": m, "k": k, "scale_block_stride": 4 * ceil_div(m, 4)}
    kernel = FAMILIES["route_quantize"].load(spec, x.get_device())
    # One CTA routes, and each token has a CTA: there are few tokens.
    return Launch(
        kernel, ROUTE_QUANTIZE_ARGUMENTS, values, grid=1 + m, threads=(ROUTE_QUANTIZE_THREADS, 1), smem_bytes=smem
    )


def prepare_combine(
    rows: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor, addend: torch.Tensor | None,
    out: torch.Tensor,
) -> Launch:  # fmt: skip
    """For rows of one shape and type. It waits for the kernel before it, as does the next."""
    (tokens, n), device = out.shape, rows.get_device()
    kernel = FAMILIES["combine"].load(CombineSpec(TYPE_NAMES[rows.dtype], TYPE_NAMES[out.dtype]), device)
    values = {
        "addend_row_bytes": row_bytes(addend),
        "out_row_bytes": row_bytes(out),
        "tokens": tokens,
        "top_k": topk_weights.shape[1],
        "n": n,
        "weights_type": DTYPES[TYPE_NAMES[topk_weights.dtype]].number,
    }
    grid = min(combine_blocks(tokens, n), resident(kernel, device, COMBINE_THREADS))
    return Launch(kernel, COMBINE_ARGUMENTS, values, grid=grid, threads=(COMBINE_THREADS, 1), smem_bytes=0)


def prepare_gather(
    codes: torch.Tensor, scale: torch.Tensor, row_index: torch.Tensor, out_scale: torch.Tensor
) -> Launch:
    """For codes and scales of one shape. It waits for the kernel before it, as does the next."""
    device = codes.get_device()
    spec = GatherSpec()
    kernel = FAMILIES["gather"].load(spec, device)
    block = scale.dim() == 2
    values = {
        "scale_block_stride": scale.stride(1) if block else 0,
        "out_scale_block_stride": out_scale.stride(1) if block else 0,
        "k": codes.shape[1],
        "blocks": scale.shape[1] if block else 1,
    }
    grid = min(ceil_div(row_index.shape[0], spec.threads // 32), resident(kernel, device, spec.threads))
    return Launch(kernel, GATHER_ARGUMENTS, values, grid=grid, threads=(spec.threads, 1), smem_bytes=0)
