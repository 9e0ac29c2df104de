"""From checked arguments to launches of routing and combining, as `gemm/plan.py` does for GEMMs."""

from __future__ import annotations

import torch

from jitgemm.dtypes import DTYPES
from jitgemm.moe.arguments import COMBINE_POINTERS, ROUTE_POINTERS, Routing
from jitgemm.moe.kernel import (
    COMBINE_NAME,
    COMBINE_THREADS,
    MAX_EXPERTS,
    MAX_GLOBAL_EXPERTS,
    ROUTE_NAME,
    CombineSpec,
    RouteSpec,
    combine_blocks,
    moe_source,
    route_launch,
    route_smem_bytes,
    route_spec,
)
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of
from jitgemm.runtime.kernels import KernelFamily
from jitgemm.runtime.prepared import ArgumentBlock, PreparedLaunch
from jitgemm.tensors import TYPE_NAMES

ROUTE_ARGUMENTS = ArgumentBlock(
    ROUTE_POINTERS, choices="I", top_k="I", experts="I", global_experts="I", run="I", id_bytes="I"
)
"""`RouteArgs` in include/jitgemm/moe/route.cuh."""
COMBINE_ARGUMENTS = ArgumentBlock(
    COMBINE_POINTERS, addend_row_bytes="Q", out_row_bytes="Q", tokens="I", top_k="I", n="I", weights_type="i"
)
"""`CombineArgs` in include/jitgemm/moe/combine.cuh."""

_CALL = "the layer once with these shapes"
ROUTES: KernelFamily[RouteSpec] = KernelFamily(
    ROUTE_NAME, moe_source, lambda spec: route_smem_bytes(32, MAX_EXPERTS, MAX_GLOBAL_EXPERTS), _CALL
)
COMBINES: KernelFamily[CombineSpec] = KernelFamily(COMBINE_NAME, moe_source, lambda spec: 0, _CALL)


class RoutePlan(PreparedLaunch):
    """A prepared routing of choices of one shape and type. Waits for the kernel before it, as does the next."""

    __slots__ = ("spec",)

    def __init__(self, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None):
        choices, device = topk_ids.numel(), topk_ids.get_device()
        device_of(device)  # refuses what is no Hopper
        global_experts = 0 if expert_map is None else expert_map.numel()
        spec = self.spec = route_spec(choices)
        threads, run, smem = route_launch(spec, choices, experts, global_experts)
        super().__init__(
            ROUTES.load(spec, device),
            ROUTE_ARGUMENTS,
            {
                "choices": choices,
                "top_k": topk_ids.shape[1],
                "experts": experts,
                "global_experts": global_experts,
                "run": run,
                "id_bytes": topk_ids.element_size(),
            },
            grid=spec.ctas,
            threads=(threads, 1),
            smem_bytes=smem,
        )

    def launch(self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, routing: Routing) -> None:
        """Runs on the tensors' device and its current stream. Raises as `PreparedLaunch.run`."""
        _launch(self, (topk_ids, expert_map, *routing))


class CombinePlan(PreparedLaunch):
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
                # One row's stride is never walked, and torch may report any value for it.
                "addend_row_bytes": 0 if addend is None or tokens == 1 else addend.stride(0) * addend.element_size(),
                "out_row_bytes": 0 if tokens == 1 else out.stride(0) * out.element_size(),
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
        """Runs on the tensors' device and its current stream. Raises as `PreparedLaunch.run`."""
        _launch(self, (rows, inverse, topk_weights, addend, out))


def _launch(plan: PreparedLaunch, tensors: tuple[torch.Tensor | None, ...]) -> None:
    addresses = (*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), plan.number)
    if not plan.run(addresses, True):
        plan.run(addresses, True, tensors)
