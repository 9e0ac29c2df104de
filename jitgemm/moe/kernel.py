"""The layer's kernels other than its GEMMs and quantisers: their specs, CUDA sources and launch sizes.

Pure functions over frozen dataclasses; no torch, no driver. The algorithms are in `include/jitgemm/moe/`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jitgemm.activations.kernel import QuantizeSpec, quantize_source, quantize_specs, render_config
from jitgemm.activations.scheme import Gate
from jitgemm.dtypes import DTYPES
from jitgemm.kernel.formats import ceil_div

if TYPE_CHECKING:
    from jitgemm.jit.source import KernelSource

MAX_EXPERTS = 1024
"""Experts of a layer on one device: as many as the grouped GEMM's largest table holds."""
MAX_GLOBAL_EXPERTS = 8192
"""Ids that an expert_map maps: it lies in shared memory."""
CLUSTER = 8
"""CTAs that route together where one would take long."""
ONE_CTA_CHOICES = 2048
"""Up to so many choices one CTA routes alone, which saves the cluster's barriers."""
GATHER_M = 4
"""From so many rows an expert on, tokens are gathered as they are quantised, each once for every choice, and not by the
GEMM, which copies row by row then: a layer takes 1 to 2 % less at 4 rows, half as long at 32, a third at 128."""
GATHER_SENT_M = 2
"""The same for tokens that come quantised from other ranks, which a kernel of its own gathers: at 2 rows, 16 tokens of
each of two ranks through Qwen3-30B-A3B's experts, a layer takes 55.2 us where the GEMM's own gather takes 62.9."""
ROUTE_QUANTIZE_THREADS = 512
COMBINE_THREADS = 128
MAX_RANKS = 8
"""Of one host: what `Head` in include/jitgemm/moe/ranks.cuh holds."""
_VECTOR = 8


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """Everything that is a compile-time constant of a routing kernel: CTAs that share the work, 1 or `CLUSTER`."""

    kind, family = "routing", "route"

    ctas: int

    @property
    def label(self) -> str:
        return f"route-c{self.ctas}"


@dataclass(frozen=True, slots=True)
class RouteQuantizeSpec:
    """Everything that is a compile-time constant of a kernel that routes and quantises: the quantiser's constants."""

    kind, family = "routing", "route_quantize"

    quantizer: QuantizeSpec

    @property
    def label(self) -> str:
        return f"route-{self.quantizer.label}"


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """Everything that is a compile-time constant of a combining kernel: names of the types of rows and result."""

    kind, family = "routing", "combine"

    row: str
    out: str

    @property
    def label(self) -> str:
        return f"combine-{self.row}-{self.out}"


@dataclass(frozen=True, slots=True)
class DispatchSpec:
    """Everything that is a compile-time constant of a kernel that sends tokens to other ranks and routes theirs.

    Attributes:
        quantizer: its constants.
        ctas: CTAs that share the routing, 1 or `CLUSTER`.
    """

    kind, family = "routing", "dispatch"

    quantizer: QuantizeSpec
    ctas: int

    @property
    def label(self) -> str:
        return f"dispatch-{self.quantizer.label}-c{self.ctas}"


@dataclass(frozen=True, slots=True)
class CollectSpec:
    """Everything that is a compile-time constant of a kernel that sums over ranks: the type of rows and result."""

    kind, family = "routing", "collect"

    row: str

    @property
    def label(self) -> str:
        return f"collect-{self.row}"


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """Everything that is a compile-time constant of a kernel that gathers quantised tokens: threads of a CTA."""

    kind, family, label = "routing", "gather", "gather"

    threads: int = 256


ENTRIES = {
    "route": "route",
    "route_quantize": "route_and_quantize",
    "combine": "combine",
    "dispatch": "dispatch",
    "gather": "gather",
    "collect": "collect",
}
"""The function that a family's kernel calls."""


def route_spec(choices: int) -> RouteSpec:
    """The kernel for so many choices, tokens times top-k."""
    return RouteSpec(1 if choices <= ONE_CTA_CHOICES else CLUSTER)


def route_quantize_spec(
    choices: int, k: int, x: str, q: str, affine: bool, block: bool = False, rotated: bool = False
) -> RouteQuantizeSpec | None:
    """The kernel that routes so many choices and quantises tokens of k values; None where two kernels are needed."""
    vectors = next((count for count in (1, 2, 4) if k <= count * ROUTE_QUANTIZE_THREADS * _VECTOR), 0)
    if choices > ONE_CTA_CHOICES or not vectors:
        return None
    return RouteQuantizeSpec(QuantizeSpec(x, q, vectors, affine, block=block, rotated=rotated))


def dispatch_spec(
    choices: int, k: int, x: str, q: str, *, affine: bool, block: bool, rotated: bool = False
) -> DispatchSpec | None:
    """The kernel that sends tokens of k values where ranks together have so many choices; None for a k too large."""
    first = route_quantize_spec(1, k, x, q, affine, block, rotated)
    return None if first is None else DispatchSpec(first.quantizer, route_spec(choices).ctas)


def layer_specs(
    k: int, inter: int, x: str, q: str, gate: Gate, *, affine: bool = False, block: bool = False, masked: bool = False,
    rotated: bool = False,
) -> tuple[RouteSpec | RouteQuantizeSpec | CombineSpec | QuantizeSpec, ...]:  # fmt: skip
    """Every kernel of a layer other than its GEMMs, whatever the numbers of tokens, choices and experts are.

    Args:
        k, inter: of w13 and w2.
        x: name of x's type.
        q: name of `lhs_dtype`.
        gate, affine, block, rotated: as the call has them.
        masked: the layer is called by `fused_experts_masked`, too.
    """
    quantisers: list[tuple[int, dict[str, Any]]] = [(k, {}), (k, {"gathered": True}), (inter, {"gate": gate})]
    flags = {"affine": affine, "block": block, "rotated": rotated}
    if masked:
        quantisers += [(k, {"masked": True}), (inter, {"gate": gate, "masked": True})]
    return (
        *filter(None, [route_quantize_spec(1, k, x, q, affine, block, rotated)]),  # up to GATHER_M rows an expert
        RouteSpec(1),
        RouteSpec(CLUSTER),
        *(each for n, more in quantisers for each in quantize_specs(n, x, q, **flags, **more)),
        CombineSpec(x, x),
    )


def exchange_specs(
    k: int, x: str, q: str, *, affine: bool = False, block: bool = False, rotated: bool = False
) -> tuple[DispatchSpec | GatherSpec | CollectSpec, ...]:
    """Every kernel that a layer has besides those of `layer_specs` where ranks exchange tokens of k values over NVLink."""
    flags = {"affine": affine, "block": block, "rotated": rotated}
    dispatches = (dispatch_spec(choices, k, x, q, **flags) for choices in (1, ONE_CTA_CHOICES + 1))
    return *filter(None, dispatches), GatherSpec(), CollectSpec(x)


def route_launch(threads: int, ctas: int, choices: int, experts: int, global_experts: int) -> tuple[int, int]:
    """(choices of a warp, bytes of shared memory of a CTA) of `ctas` CTAs of so many threads."""
    warps = threads // 32
    run = 32 * ceil_div(choices, 32 * warps * ctas)
    return run, route_smem_bytes(min(warps, ceil_div(choices, run)), experts, global_experts)


def route_threads(spec: RouteSpec, choices: int, experts: int) -> int:
    """Threads of a CTA: for each choice and expert one, where that is not too many."""
    return 1024 if spec.ctas > 1 else min(1024, max(128, 32 * ceil_div(max(choices, experts), 32)))


def route_smem_bytes(warps: int, experts: int, global_experts: int) -> int:
    """`RouteShared` of include/jitgemm/moe/route.cuh."""
    return 4 * ((warps + 2) * experts + global_experts)


def combine_blocks(tokens: int, n: int) -> int:
    """CTAs that have something to do."""
    return tokens * ceil_div(n, _VECTOR * COMBINE_THREADS)


def render(spec: RouteSpec | RouteQuantizeSpec | CombineSpec | DispatchSpec | GatherSpec | CollectSpec) -> str:
    """The CUDA source of a kernel; the entry point is `function_name` of its label."""
    from jitgemm.jit.source import function_name

    name, header = ENTRIES[spec.family], spec.family
    bounds, constants, config, ctas = str(COMBINE_THREADS), ["jitgemm::Config"], "", 1
    if isinstance(spec, RouteSpec):
        bounds, constants, ctas = "1024, 1", [str(spec.ctas)], spec.ctas
    elif isinstance(spec, RouteQuantizeSpec):
        bounds, config = f"{ROUTE_QUANTIZE_THREADS}, 1", render_config(spec.quantizer)
    elif isinstance(spec, DispatchSpec):
        bounds, config, ctas = f"{ROUTE_QUANTIZE_THREADS}, 1", render_config(spec.quantizer), spec.ctas
        constants += [str(spec.ctas)]
    elif isinstance(spec, GatherSpec):
        bounds, constants = str(spec.threads), []
    else:
        types = {"Row": spec.row, "Out": spec.out} if isinstance(spec, CombineSpec) else {"Row": spec.row}
        lines = [f"    static constexpr RealType k{part} = {DTYPES[name].cpp_name};\n" for part, name in types.items()]
        config = f"struct Config {{\n{''.join(lines)}}};"
    cluster = f"__cluster_dims__({ctas}, 1, 1) " if ctas > 1 else ""
    arguments = f"<{', '.join(constants)}>" if constants else ""
    namespace = f"namespace jitgemm {{\n{config}\n}}\n\n" if config else ""
    return f"""\
// jitgemm {spec.label}
#include <jitgemm/moe/{header}.cuh>

{namespace}extern "C" __global__ void {cluster}__launch_bounds__({bounds})
{function_name(spec.label)}(const __grid_constant__ jitgemm::{header.title().replace("_", "")}Args args) {{
    jitgemm::{name}{arguments}(args);
}}
"""


def source_of(spec: Any) -> KernelSource:
    """A kernel of any family as the cache keys and compiles it."""
    from jitgemm.jit.source import OPTIONS, KernelSource, headers
    from jitgemm.kernel.render import kernel_source

    if spec.kind == "routing":
        return KernelSource(spec.label, asdict(spec), render(spec), headers(f"moe/{spec.family}"), OPTIONS)
    return quantize_source(spec) if spec.kind == "quantizer" else kernel_source(spec)
