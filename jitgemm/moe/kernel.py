"""The layer's kernels beside its GEMMs and quantisers: their specs, CUDA sources and launch sizes.

Pure functions over frozen dataclasses; no torch, no driver. The algorithms are in `include/jitgemm/moe/`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jitgemm.dtypes import DTYPES
from jitgemm.kernel.formats import ceil_div

if TYPE_CHECKING:
    from jitgemm.jit.source import KernelSource

ROUTE_NAME, COMBINE_NAME = "jitgemm_route", "jitgemm_combine"

MAX_EXPERTS = 1024
"""Experts of a layer on one device: as many as the grouped GEMM's largest table holds."""
MAX_GLOBAL_EXPERTS = 8192
"""Ids that an expert_map maps: it lies in shared memory."""
CLUSTER = 8
"""CTAs that route together where one would take long."""
ONE_CTA_CHOICES = 2048
"""Up to so many choices one CTA routes alone, which saves the cluster's barriers."""
COMBINE_THREADS = 128
_VECTOR = 8


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """Everything that is a compile-time constant of a routing kernel: CTAs that share the work, 1 or `CLUSTER`."""

    ctas: int

    @property
    def label(self) -> str:
        return f"route-c{self.ctas}"


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """Everything that is a compile-time constant of a combining kernel: names of the types of rows and result."""

    row: str
    out: str

    @property
    def label(self) -> str:
        return f"combine-{self.row}-{self.out}"


def route_spec(choices: int) -> RouteSpec:
    """The kernel for so many choices, tokens times top-k."""
    return RouteSpec(1 if choices <= ONE_CTA_CHOICES else CLUSTER)


def route_launch(spec: RouteSpec, choices: int, experts: int, global_experts: int) -> tuple[int, int, int]:
    """(threads of a CTA, choices of a warp, bytes of shared memory of a CTA)."""
    threads = 1024
    if spec.ctas == 1:
        threads = min(1024, max(128, 32 * ceil_div(max(choices, experts), 32)))
    warps = threads // 32
    run = 32 * ceil_div(choices, 32 * warps * spec.ctas)
    return threads, run, route_smem_bytes(min(warps, ceil_div(choices, run)), experts, global_experts)


def route_smem_bytes(warps: int, experts: int, global_experts: int) -> int:
    """`RouteShared` of include/jitgemm/moe/route.cuh."""
    return 4 * ((warps + 2) * experts + global_experts)


def combine_blocks(tokens: int, n: int) -> int:
    """CTAs that have something to do."""
    return tokens * ceil_div(n, _VECTOR * COMBINE_THREADS)


def render(spec: RouteSpec | CombineSpec) -> str:
    """The CUDA source of a kernel; the entry point is `ROUTE_NAME` or `COMBINE_NAME`."""
    if isinstance(spec, RouteSpec):
        cluster = f"__cluster_dims__({spec.ctas}, 1, 1) " if spec.ctas > 1 else ""
        return f"""\
// jitgemm {spec.label}
#include <jitgemm/moe/route.cuh>

extern "C" __global__ void {cluster}__launch_bounds__(1024, 1)
{ROUTE_NAME}(const __grid_constant__ jitgemm::RouteArgs args) {{
    jitgemm::route<{spec.ctas}>(args);
}}
"""
    return f"""\
// jitgemm {spec.label}
#include <jitgemm/moe/combine.cuh>

namespace jitgemm {{
struct Config {{
    static constexpr RealType kRow = {DTYPES[spec.row].cpp_name};
    static constexpr RealType kOut = {DTYPES[spec.out].cpp_name};
}};
}}

extern "C" __global__ void __launch_bounds__({COMBINE_THREADS})
{COMBINE_NAME}(const __grid_constant__ jitgemm::CombineArgs args) {{
    jitgemm::combine<jitgemm::Config>(args);
}}
"""


def moe_source(spec: Any) -> KernelSource:
    """A kernel as the cache keys and compiles it."""
    from jitgemm.jit.source import OPTIONS, KernelSource, headers

    header = "moe/route" if isinstance(spec, RouteSpec) else "moe/combine"
    return KernelSource(spec.label, asdict(spec), render(spec), headers(header), OPTIONS)
