"""From checked arguments to launches of routing and combining, as `gemm/plan.py` does for GEMMs."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.activations.arguments import Outputs
from jitgemm.activations.plan import KERNELS as QUANTIZERS
from jitgemm.activations.plan import row_bytes
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.launch import KERNELS as GEMMS
from jitgemm.kernel.formats import ceil_div
from jitgemm.moe.arguments import COMBINE_POINTERS, FRONT_POINTERS, ROUTE_POINTERS, Routing
from jitgemm.moe.kernel import (
    COMBINE_NAME,
    COMBINE_THREADS,
    FRONT_NAME,
    FRONT_THREADS,
    MAX_EXPERTS,
    MAX_GLOBAL_EXPERTS,
    ROUTE_NAME,
    CombineSpec,
    FrontSpec,
    RouteSpec,
    combine_blocks,
    route_launch,
    route_smem_bytes,
    route_spec,
    route_threads,
    source_of,
)
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.runtime.launch import ArgumentBlock, Launch
from jitgemm.tensors import TYPE_NAMES

ROUTE_ARGUMENTS = ArgumentBlock(
    ROUTE_POINTERS, choices="I", top_k="I", experts="I", global_experts="I", run="I", id_bytes="I"
)
"""`RouteArgs` in include/jitgemm/moe/route.cuh."""
FRONT_ARGUMENTS = ArgumentBlock(
    FRONT_POINTERS, x_row_bytes="Q", choices="I", top_k="I", experts="I", global_experts="I", run="I", id_bytes="I",
    m="I", k="I", scale_block_stride="Q",
)  # fmt: skip
"""`FrontArgs` in include/jitgemm/moe/front.cuh."""
COMBINE_ARGUMENTS = ArgumentBlock(
    COMBINE_POINTERS, addend_row_bytes="Q", out_row_bytes="Q", tokens="I", top_k="I", n="I", weights_type="i"
)
"""`CombineArgs` in include/jitgemm/moe/combine.cuh."""

_CALL = "the layer once with these shapes"
ROUTES: KernelFamily[RouteSpec] = KernelFamily(
    ROUTE_NAME, source_of, lambda spec: route_smem_bytes(32, MAX_EXPERTS, MAX_GLOBAL_EXPERTS), _CALL
)
FRONTS: KernelFamily[FrontSpec] = KernelFamily(
    FRONT_NAME, source_of, lambda spec: route_smem_bytes(FRONT_THREADS // 32, MAX_EXPERTS, MAX_GLOBAL_EXPERTS), _CALL
)
COMBINES: KernelFamily[CombineSpec] = KernelFamily(COMBINE_NAME, source_of, lambda spec: 0, _CALL)
FAMILIES: dict[str, KernelFamily[Any]] = {
    "gemm": GEMMS, "quantize": QUANTIZERS, "route": ROUTES, "front": FRONTS, "combine": COMBINES
}  # fmt: skip
"""By `family` of specs."""


def _route_values(
    topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None, threads: int, ctas: int
) -> tuple[dict[str, int], int]:
    """(what `RouteArgs` holds beside addresses, bytes of shared memory of a CTA)."""
    device_of(topk_ids.get_device())  # refuses what is no Hopper
    choices, global_experts = topk_ids.numel(), 0 if expert_map is None else expert_map.numel()
    run, smem = route_launch(threads, ctas, choices, experts, global_experts)
    values = {
        "choices": choices,
        "top_k": topk_ids.shape[1],
        "experts": experts,
        "global_experts": global_experts,
        "run": run,
        "id_bytes": topk_ids.element_size(),
    }
    return values, smem


class RoutePlan(Launch):
    """A prepared routing of choices of one shape and type. Waits for the kernel before it, as does the next."""

    __slots__ = ("spec",)

    def __init__(self, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None):
        spec = self.spec = route_spec(topk_ids.numel())
        threads = route_threads(spec, topk_ids.numel(), experts)
        values, smem = _route_values(topk_ids, experts, expert_map, threads, spec.ctas)
        kernel = ROUTES.load(spec, topk_ids.get_device())
        super().__init__(kernel, ROUTE_ARGUMENTS, values, grid=spec.ctas, threads=(threads, 1), smem_bytes=smem)

    def launch(self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, routing: Routing) -> None:
        """Runs on the tensors' device and its current stream. Raises as `Launch.run`."""
        self.run_tensors(topk_ids, expert_map, *routing)


class FrontPlan(Launch):
    """A prepared routing, and quantising of the tokens beside it. Waits for the kernel before it, as does the next."""

    __slots__ = ("spec",)

    def __init__(
        self, spec: FrontSpec, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
    ):
        self.spec, (m, k) = spec, x.shape
        values, smem = _route_values(topk_ids, experts, expert_map, FRONT_THREADS, 1)
        values |= {"x_row_bytes": row_bytes(x), "m": m, "k": k}
        values["scale_block_stride"] = 4 * ceil_div(m, 4)  # as Inputs.new_outputs() lays them out
        kernel = FRONTS.load(spec, x.get_device())
        # A CTA for each token beside the one that routes: there are few tokens.
        super().__init__(kernel, FRONT_ARGUMENTS, values, grid=1 + m, threads=(FRONT_THREADS, 1), smem_bytes=smem)

    def launch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        routing: Routing,
        outputs: Outputs,
    ) -> None:
        """Runs on the tensors' device and its current stream. Raises as `Launch.run`."""
        self.run_tensors(topk_ids, expert_map, *routing, x, *outputs)


class CombinePlan(Launch):
    """A prepared combination of rows of one shape and type. Waits for the kernel before it, as does the next."""

    __slots__ = ("spec",)

    def __init__(self, rows: torch.Tensor, topk_weights: torch.Tensor, addend: torch.Tensor | None, out: torch.Tensor):
        (tokens, n), device = out.shape, rows.get_device()
        spec = self.spec = CombineSpec(TYPE_NAMES[rows.dtype], TYPE_NAMES[out.dtype])
        kernel = COMBINES.load(spec, device)
        driver.use_context(device)
        resident = max(1, driver.resident_ctas(kernel, COMBINE_THREADS, 0))
        super().__init__(
            kernel,
            COMBINE_ARGUMENTS,
            {
                "addend_row_bytes": row_bytes(addend),
                "out_row_bytes": row_bytes(out),
                "tokens": tokens,
                "top_k": topk_weights.shape[1],
                "n": n,
                "weights_type": DTYPES[TYPE_NAMES[topk_weights.dtype]].number,
            },
            grid=min(combine_blocks(tokens, n), resident * device_of(device).num_sms),
            threads=(COMBINE_THREADS, 1),
            smem_bytes=0,
        )

    def launch(
        self,
        rows: torch.Tensor,
        inverse: torch.Tensor,
        topk_weights: torch.Tensor,
        addend: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Runs on the tensors' device and its current stream. Raises as `Launch.run`."""
        self.run_tensors(rows, inverse, topk_weights, addend, out)
