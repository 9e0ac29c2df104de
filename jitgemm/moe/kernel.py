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
class RoutingSpec:
    """Everything that is a compile-time constant of a kernel other than GEMMs and quantisers: of each family a class.

    `family` names its header in include/jitgemm/moe, `function` what it calls there, if that has another name.
    """

    kind, family, function = "routing", "", ""

    @property
    def label(self) -> str:
        """The kernel's name."""
        raise NotImplementedError

    @property
    def bounds(self) -> str:
        """Arguments of `__launch_bounds__`."""
        return str(COMBINE_THREADS)

    @property
    def config(self) -> str:
        """The text of `jitgemm::Config`; "" for none."""
        return ""


@dataclass(frozen=True, slots=True)
class RouteSpec(RoutingSpec):
    """A kernel that routes: CTAs that share the work, 1 or `CLUSTER`."""

    family, bounds = "route", "1024, 1"

    ctas: int

    @property
    def label(self) -> str:
        return f"route-c{self.ctas}"


@dataclass(frozen=True, slots=True)
class RouteQuantizeSpec(RoutingSpec):
    """A kernel that routes and quantises: the quantiser's constants."""

    family, function, bounds = "route_quantize", "route_and_quantize", f"{ROUTE_QUANTIZE_THREADS}, 1"

    quantizer: QuantizeSpec

    @property
    def label(self) -> str:
        return f"route-{self.quantizer.label}"

    @property
    def config(self) -> str:
        return render_config(self.quantizer)


@dataclass(frozen=True, slots=True)
class CombineSpec(RoutingSpec):
    """A kernel that combines: names of the types of rows and result."""

    family = "combine"

    row: str
    out: str

    @property
    def label(self) -> str:
        return f"combine-{self.row}-{self.out}"

    @property
    def config(self) -> str:
        return type_config(Row=self.row, Out=self.out)


@dataclass(frozen=True, slots=True)
class GatherSpec(RoutingSpec):
    """A kernel that gathers quantised tokens: threads of a CTA."""

    family, label = "gather", "gather"

    threads: int = 256

    @property
    def bounds(self) -> str:
        return str(self.threads)


def type_config(**types: str) -> str:
    """The constants of a kernel that has types alone."""
    lines = [f"    static constexpr RealType k{part} = {DTYPES[name].cpp_name};\n" for part, name in types.items()]
    return f"struct Config {{\n{''.join(lines)}}};"


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


def layer_specs(
    k: int, inter: int, x: str, q: str, gate: Gate, *, affine: bool = False, block: bool = False, masked: bool = False,
    rotated: bool = False,
) -> tuple[RoutingSpec | QuantizeSpec, ...]:  # fmt: skip
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
        *(spec for n, more in quantisers for spec in quantize_specs(n, x, q, **flags, **more)),
        CombineSpec(x, x),
    )


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


def render(spec: RoutingSpec) -> str:
    """The CUDA source of a kernel; the entry point is `function_name` of its label."""
    from jitgemm.jit.source import function_name

    ctas, config = getattr(spec, "ctas", None), spec.config
    constants = ", ".join([*(["jitgemm::Config"] if config else []), *([] if ctas is None else [str(ctas)])])
    arguments = f"<{constants}>" if constants else ""
    cluster = f"__cluster_dims__({ctas}, 1, 1) " if ctas not in (None, 1) else ""
    namespace = f"namespace jitgemm {{\n{config}\n}}\n\n" if config else ""
    return f"""\
// jitgemm {spec.label}
#include <jitgemm/moe/{spec.family}.cuh>

{namespace}extern "C" __global__ void {cluster}__launch_bounds__({spec.bounds})
{function_name(spec.label)}(const __grid_constant__ jitgemm::{spec.family.title().replace("_", "")}Args args) {{
    jitgemm::{spec.function or spec.family}{arguments}(args);
}}
"""


def source_of(spec: Any) -> KernelSource:
    """A kernel of any family as the cache keys and compiles it."""
    from jitgemm.jit.source import OPTIONS, KernelSource, headers
    from jitgemm.kernel.render import kernel_source

    if spec.kind == "routing":
        return KernelSource(spec.label, asdict(spec), render(spec), headers(f"moe/{spec.family}"), OPTIONS)
    return quantize_source(spec) if spec.kind == "quantizer" else kernel_source(spec)
