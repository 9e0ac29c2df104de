"""From checked arguments to launches of routing and combining, as `gemm/plan.py` does for GEMMs."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.activations.plan import KERNELS as QUANTIZERS
from jitgemm.activations.plan import row_bytes
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.launch import KERNELS as GEMMS
from jitgemm.kernel.formats import ceil_div
from jitgemm.moe.arguments import COMBINE_POINTERS, FRONT_POINTERS, ROUTE_POINTERS
from jitgemm.moe.kernel import COMBINE_THREADS, ENTRIES, FRONT_THREADS, MAX_EXPERTS, MAX_GLOBAL_EXPERTS
from jitgemm.moe.kernel import CombineSpec, FrontSpec, combine_blocks, route_launch, route_smem_bytes
from jitgemm.moe.kernel import route_spec, route_threads, source_of
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.runtime.launch import ArgumentBlock, Launch
from jitgemm.tensors import TYPE_NAMES

_ROUTE_VALUES = dict.fromkeys(("choices", "top_k", "experts", "global_experts", "run", "id_bytes"), "I")
ROUTE_ARGUMENTS = ArgumentBlock(ROUTE_POINTERS, **_ROUTE_VALUES)
"""`RouteArgs` in include/jitgemm/moe/route.cuh."""
FRONT_ARGUMENTS = ArgumentBlock(FRONT_POINTERS, x_row_bytes="Q", **_ROUTE_VALUES, m="I", k="I", scale_block_stride="Q")
"""`FrontArgs` in include/jitgemm/moe/front.cuh."""
COMBINE_ARGUMENTS = ArgumentBlock(
    COMBINE_POINTERS, addend_row_bytes="Q", out_row_bytes="Q", tokens="I", top_k="I", n="I", weights_type="i"
)
"""`CombineArgs` in include/jitgemm/moe/combine.cuh."""

_SMEM_BYTES = {
    "route": route_smem_bytes(32, MAX_EXPERTS, MAX_GLOBAL_EXPERTS),
    "front": route_smem_bytes(FRONT_THREADS // 32, MAX_EXPERTS, MAX_GLOBAL_EXPERTS),
    "combine": 0,
}
_CALL = "the layer once with these shapes"
FAMILIES: dict[str, KernelFamily[Any]] = {"gemm": GEMMS, "quantize": QUANTIZERS} | {
    family: KernelFamily(source_of, lambda spec: _SMEM_BYTES[spec.family], _CALL) for family in ENTRIES
}
"""By `family` of specs."""


def _route_values(
    topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None, threads: int, ctas: int
) -> tuple[dict[str, int], int]:
    """(what `RouteArgs` holds beside addresses, bytes of shared memory of a CTA)."""
    device_of(topk_ids.get_device())  # refuses what is no Hopper
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


def prepare_front(
    spec: FrontSpec, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
) -> Launch:
    """The routing, and quantising of the tokens in other CTAs. It waits for the kernel before it, as does the next."""
    m, k = x.shape
    values, smem = _route_values(topk_ids, experts, expert_map, FRONT_THREADS, 1)
    # Scales as `QuantizeCall.new_outputs` lays them out.
    values |= {"x_row_bytes": row_bytes(x), "m": m, "k": k, "scale_block_stride": 4 * ceil_div(m, 4)}
    kernel = FAMILIES["front"].load(spec, x.get_device())
    # One CTA routes, and each token has a CTA: there are few tokens.
    return Launch(kernel, FRONT_ARGUMENTS, values, grid=1 + m, threads=(FRONT_THREADS, 1), smem_bytes=smem)


def prepare_combine(
    rows: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor, addend: torch.Tensor | None,
    out: torch.Tensor,
) -> Launch:  # fmt: skip
    """For rows of one shape and type. It waits for the kernel before it, as does the next."""
    (tokens, n), device = out.shape, rows.get_device()
    kernel = FAMILIES["combine"].load(CombineSpec(TYPE_NAMES[rows.dtype], TYPE_NAMES[out.dtype]), device)
    driver.use_context(device)
    resident = max(1, driver.resident_ctas(kernel, COMBINE_THREADS, 0))
    values = {
        "addend_row_bytes": row_bytes(addend),
        "out_row_bytes": row_bytes(out),
        "tokens": tokens,
        "top_k": topk_weights.shape[1],
        "n": n,
        "weights_type": DTYPES[TYPE_NAMES[topk_weights.dtype]].number,
    }
    grid = min(combine_blocks(tokens, n), resident * device_of(device).num_sms)
    return Launch(kernel, COMBINE_ARGUMENTS, values, grid=grid, threads=(COMBINE_THREADS, 1), smem_bytes=0)
