"""The quantiser's kernels: the frozen facts that tell them apart, which one a row of k needs, and their CUDA source.

Pure functions over a frozen dataclass; no torch, no driver, no files other than the headers. The algorithm is in
`include/jitgemm/quantize/`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jitgemm.activations.scheme import GATE_KINDS, GATE_ORDERS, GELU_MULS, SILU_MUL, UNGATED, Gate
from jitgemm.dtypes import DTYPES, LHS_TYPES, REAL_TYPES
from jitgemm.kernel.codes import GROUP_SIZES
from jitgemm.kernel.formats import CORRECTION_TYPES, K_ALIGNMENT, ROTATION, Correction, ceil_div

if TYPE_CHECKING:
    from jitgemm.jit.source import KernelSource


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {name: True} for name in ("affine", "static")},
    "silu_mul": {"gate": SILU_MUL},
    **{f"gelu_mul={name}": {"gate": gate} for name, gate in GELU_MULS.items()},
    **{name: {name: True} for name in ("rms_norm", "residual", "permuted", "block", "rotated")},
}
"""Keywords of `quantize_spec` by what commands call them."""

VECTOR = 8
"""Values that a thread reads, and codes that it writes, at a time."""
MAX_THREADS = 1024
WARP_ROWS = 8
"""Rows of a CTA where one warp holds a row."""
MAX_K = 2**20
MAX_PERMUTED_K = 2**17
"""With a permutation, a row of codes lies in shared memory."""

ROW_CTAS = 4
"""CTAs, a cluster, that share a row where rows are few and long (docs/notes/quantiser.md)."""
SHARED_WARPS = 12
"""Warps that a row has at least where they share it; a row to rotate two for each scheduler."""
SCHEDULERS = 4  # of an SM
_ROW_REGISTERS = 32
"""Of the 64 that each of 1024 threads has: what a row, the next one and the permutation may take."""


class _Sums(NamedTuple):
    """What sums behind a row's codes add to a kernel: to its label and template arguments, and its header."""

    label: tuple[str, ...] = ()
    arguments: str = ""
    header: str = "quantize/kernel"

    @classmethod
    def of(cls, correction: Correction | None) -> _Sums:
        if correction is None:
            return cls()
        type, size = correction
        policy = f", jitgemm::GroupSums<jitgemm::{DTYPES[type].cpp_name}, {size}>"
        return cls((f"sums{size}{type}",), policy, "quantize/sums")


@dataclass(frozen=True, slots=True)
class QuantizeSpec:
    """Everything that is a compile-time constant of a quantiser. Equal specs render to the same source.

    m, k, strides, eps, the RMSNorm weight's type and a gate's limit and alpha are run-time arguments.

    Attributes:
        x: type of the values, "fp32", "bf16" or "fp16".
        q: type of the codes, "e4m3" or "s8".
        affine, static, block: of the `Activation`.
        gate, order: of the `Gate`; "" for none.
        limited: gates and ups are limited first.
        rms_norm, permuted, residual: what there is of the `Prologue`.
        gathered: rows are gathered.
        masked: of each of several parts, rows from a number on are left alone.
        vectors: vectors of `VECTOR` values that a thread holds; 0 where rows are read twice.
        rows: rows that a CTA works on at once, one warp each; 1 where a row has the whole CTA.
        sources_held: a thread reads its part of the permutation once for all rows.
        ctas: CTAs, a cluster, that share a row.
        correction: type and group size of the sums behind a row's codes; None for none.
        rotated: of the `Activation`.
    """

    kind, family = "quantizer", "quantize"

    x: str
    q: str
    vectors: int
    affine: bool = False
    static: bool = False
    gate: str = ""
    order: str = "gate_up"
    limited: bool = False
    rms_norm: bool = False
    permuted: bool = False
    rows: int = 1
    sources_held: bool = False
    block: bool = False
    gathered: bool = False
    residual: bool = False
    masked: bool = False
    ctas: int = 1
    correction: Correction | None = None
    rotated: bool = False

    @property
    def label(self) -> str:
        """Short name for people, such as "quantize-bf16-e4m3-v4"; different kernels have different ones."""
        parts = ["quantize", self.x, self.q + ("z" if self.affine else "")]
        parts += ["static"] if self.static else []
        if self.gate:
            parts.append(self.gate.replace("_", "") + ("" if self.gate in UNGATED else "mul"))
            parts += [self.order.replace("_", "")] if self.order != "gate_up" else []
            parts += ["limited"] if self.limited else []
        flags = ("residual", "rms_norm", "permuted", "rotated", "block", "gathered", "masked")
        parts += [name.replace("_", "") for name in flags if getattr(self, name)]
        parts += _Sums.of(self.correction).label
        shape = f"v{self.vectors}{f'r{self.rows}' if self.rows > 1 else ''}{'h' if self.sources_held else ''}"
        parts.append(f"{shape}c{self.ctas}" if self.ctas > 1 else shape)
        return "-".join(parts)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def quantize_spec(
    k: int, x: str, q: str, *, affine: bool = False, static: bool = False, block: bool = False,
    gate: Gate | None = None, rms_norm: bool = False, residual: bool = False, permuted: bool = False,
    gathered: bool = False, masked: bool = False, correction: Correction | None = None, rotated: bool = False,
) -> QuantizeSpec:  # fmt: skip
    """The kernel for rows of k codes, whatever m is, except few rows that several CTAs share (`spec_for_rows`).

    m decides nothing else, so that a new m hardly ever compiles. A row's bits never depend on the other rows:
    RMSNorm's sum has one order for a k.

    Raises:
        ValueError: k or a combination is out of range.
    """
    if x not in REAL_TYPES:
        raise ValueError(f"x: expected one of {REAL_TYPES}, got {x!r}")
    if q not in LHS_TYPES:
        raise ValueError(f"q: expected one of {LHS_TYPES}, got {q!r}")
    if affine and q != "s8":
        raise ValueError("affine: expected codes of int8, got e4m3, which has no zero point")
    if gate and rms_norm:
        raise ValueError("gate: gate and rms_norm cannot be combined")
    if residual and not rms_norm:
        raise ValueError("residual: expected rms_norm with it")
    if gate and (gate.kind not in GATE_KINDS or gate.order not in GATE_ORDERS):
        raise ValueError(f"gate: expected a kind of {GATE_KINDS} and an order of {GATE_ORDERS}, got {gate}")
    if gate and gate.kind in UNGATED and gate != Gate(gate.kind):
        raise ValueError(f"gate: expected neither order, limit nor alpha of {gate.kind}, got {gate}")
    if block and (static or affine):
        raise ValueError("block: cannot be combined with a static scale or a zero point")
    check_correction(correction, q, block, rotated)
    if rotated and permuted:
        raise ValueError("rotated: cannot be combined with a permutation")
    limit = most_k(permuted, block)
    if not K_ALIGNMENT <= k <= limit or k % K_ALIGNMENT:
        raise ValueError(f"k: expected a multiple of {K_ALIGNMENT} of at most {limit}, got {k}")
    if rotated and k % ROTATION:
        raise ValueError(f"k: expected a multiple of {ROTATION} with a rotation, got {k}")

    inputs, computed = gate.inputs if gate else 1, rms_norm or gate is not None
    vectors, rows, sources_held = _shape(k, x, inputs, computed or rotated, permuted and not block)
    if permuted and block and rows == 1:
        vectors = 0  # in shared memory
    # With a residual the same threads add up the same squares as without; registers are what the residual takes.
    sources_held = sources_held and not (residual and rows == 1 and vectors > 1)
    kind, order, limited = (gate.kind, gate.order, gate.limit != math.inf) if gate else ("", "gate_up", False)
    return QuantizeSpec(
        x, q, vectors, affine, static, kind, order, limited, rms_norm, permuted, rows, sources_held, block, gathered,
        residual, masked, correction=correction, rotated=rotated,
    )  # fmt: skip


def quantize_specs(k: int, x: str, q: str, **options: Any) -> tuple[QuantizeSpec, ...]:
    """Every kernel that rows of k codes can need, whatever m is. Arguments as `quantize_spec`'s."""
    spec = quantize_spec(k, x, q, **options)
    return tuple(filter(None, (spec, shared_spec(spec, k))))


def check_correction(correction: object, q: str, block: bool, rotated: bool = False) -> None:
    """Raises TypeError or ValueError for sums that codes of type q, with a scale for each block or not, do not have."""
    if correction is None:
        return
    if not isinstance(correction, tuple) or len(correction) != 2:
        raise TypeError(f"correction: expected None or (type, group size), got {correction!r}")
    name, size = correction
    if type(name) is not str or name not in CORRECTION_TYPES or type(size) is not int or size not in GROUP_SIZES:
        raise ValueError(
            f"correction: expected a type of {CORRECTION_TYPES} and a group size of {GROUP_SIZES}, got {correction!r}"
        )
    if q != "s8" or block:
        what = "a scale for each block" if q == "s8" else q
        raise ValueError(f"correction: expected None unless for int8 with a scale for each token, got it with {what}")
    if rotated:
        raise ValueError(f"correction: expected None with a rotation, got {correction!r}")


def most_k(permuted: bool, block: bool) -> int:
    """The largest k of such a quantiser: a permuted row lies in shared memory, as fp32 values where it has blocks."""
    return MAX_PERMUTED_K // (4 if block else 1) if permuted else MAX_K


def _shape(k: int, x: str, inputs: int, computed: bool, permuted: bool) -> tuple[int, int, bool]:
    """(vectors, rows, sources_held): as many vectors a thread as registers allow, for bytes in flight and few warps.

    computed: values differ from the values read, so they are held in fp32.
    """
    for vectors in (1, 2, 4):
        if k <= vectors * 32 * VECTOR:
            return vectors, WARP_ROWS, permuted
    read = (VECTOR if x == "fp32" else VECTOR // 2) * inputs
    held = VECTOR if computed else read
    for sources_held in (True, False) if permuted else (False,):
        registers = read + held + (VECTOR // 2 if sources_held else 0)
        vectors = max(count for count in (1, 2, 4) if count * registers <= _ROW_REGISTERS)
        if k <= vectors * MAX_THREADS * VECTOR:
            return vectors, 1, sources_held
    return 0, 1, False


def block_dims(spec: QuantizeSpec, k: int) -> tuple[int, int]:
    """(threads of a row, rows) of a CTA."""
    if spec.rows > 1:
        return 32, spec.rows
    if spec.vectors == 0:
        return MAX_THREADS, 1
    return 32 * ceil_div(k, 32 * VECTOR * spec.vectors * spec.ctas), 1


def most_threads(spec: QuantizeSpec) -> int:
    """Of a CTA."""
    if spec.rows > 1:
        return 32 * spec.rows
    return MAX_THREADS // spec.ctas


def shared_spec(spec: QuantizeSpec, k: int) -> QuantizeSpec | None:
    """The kernel whose rows have several CTAs each; None where rows are too short for that, or read twice."""
    warps, least = block_dims(spec, k)[0] // 32, 2 * SCHEDULERS if spec.rotated else SHARED_WARPS
    if spec.rows > 1 or spec.vectors == 0 or spec.permuted or warps < least:
        return None
    # The CTAs hold a row as one CTA does, so that RMSNorm's sum keeps its order.
    counts = (ctas for ctas in (ROW_CTAS, 2)[: 1 + spec.rotated] if not (spec.rms_norm and warps % ctas))
    return next((replace(spec, ctas=ctas) for ctas in counts), None)


def spec_for_rows(spec: QuantizeSpec, k: int, m: int, num_sms: int) -> QuantizeSpec:
    """The kernel for m rows: several CTAs share each where that leaves none without an SM.

    Or, with a rotation, whose time is that of its instructions, where all warps can have a scheduler each.
    """
    warps = block_dims(spec, k)[0] // 32
    fits = m * warps <= SCHEDULERS * num_sms if spec.rotated else m * ROW_CTAS <= num_sms
    return (shared_spec(spec, k) if fits else None) or spec


def smem_bytes(spec: QuantizeSpec, k: int) -> int:
    """Dynamic shared memory of a CTA in bytes: its rows' codes on their way to be permuted, or values of blocks."""
    return spec.rows * k * (4 if spec.block else 1) if spec.permuted else 0


def render_config(spec: QuantizeSpec) -> str:
    """The constants of a quantiser as a struct of C++, `Config`."""
    constants = {
        "RealType kX": DTYPES[spec.x].cpp_name,
        "bool kE4m3": spec.q == "e4m3",
        "bool kAffine": spec.affine,
        "bool kStatic": spec.static,
        "GateKind kGate": _enumerator(spec.gate or "ungated"),
        "GateOrder kOrder": _enumerator(spec.order),
    }
    flags = ("limited", "rms_norm", "permuted", "gathered", "residual", "masked", "rotated")
    constants |= {f"bool {_enumerator(name)}": getattr(spec, name) for name in flags}
    constants |= {"u32 kVectors": spec.vectors, "u32 kRows": spec.rows, "bool kSourcesHeld": spec.sources_held}
    constants |= {"bool kBlocks": spec.block, "u32 kCtas": spec.ctas}
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in constants.items()}
    lines = "\n".join(f"    static constexpr {name} = {text};" for name, text in texts.items())
    return f"struct Config {{\n{lines}\n}};"


def _enumerator(name: str) -> str:
    """A constant's name in include/jitgemm/quantize/types.cuh, such as those of `GateKind` and `GateOrder`."""
    return f"k{name.title().replace('_', '')}"


def render_quantize(spec: QuantizeSpec) -> str:
    """The CUDA source of a quantiser. Compile as `quantize_source` says. Entry point: `function_name` of its label."""
    from jitgemm.jit.source import function_name

    threads = most_threads(spec)
    cluster = f"__cluster_dims__({spec.ctas}, 1, 1) " if spec.ctas > 1 else ""
    # erfc() and a row to rotate need more than the 32 registers of two CTAs.
    bounds = f"{threads}, 1" if spec.gate == "gelu" or spec.rotated else threads
    sums = _Sums.of(spec.correction)
    return f"""\
// jitgemm quantiser {spec.label}
#include <jitgemm/{sums.header}.cuh>

namespace jitgemm {{
{render_config(spec)}
}}

extern "C" __global__ void {cluster}__launch_bounds__({bounds})
{function_name(spec.label)}(const __grid_constant__ jitgemm::QuantizeArgs args) {{
    jitgemm::quantize_rows<jitgemm::Config{sums.arguments}>(args, blockIdx.x / {spec.ctas}, gridDim.x / {spec.ctas});
}}
"""


def quantize_source(spec: QuantizeSpec) -> KernelSource:
    """A quantiser as the cache keys and compiles it."""
    from jitgemm.jit.source import OPTIONS, KernelSource, headers

    names = ("affine", "static", "rms_norm", "residual", "permuted", "block", "rotated")
    variants = [name for name in names if getattr(spec, name)]
    gates = {flags["gate"].kind: name for name, flags in VARIANTS.items() if "gate" in flags}
    variants += [gates[spec.gate]] if spec.gate in gates else []
    command = f"--lhs {'int8' if spec.q == 's8' else 'e4m3'} --quantizer {'+'.join([spec.x, *variants])}"
    common = spec.gate in ("", *gates) and (spec.order, spec.limited) == ("gate_up", False)
    sums = _Sums.of(spec.correction)
    named = common and not (spec.gathered or spec.masked or sums.label)
    return KernelSource(
        spec.label,
        spec.to_dict(),
        render_quantize(spec),
        headers(sums.header),
        OPTIONS,
        warmup=f"jitgemm warmup --shape N,K {command}" if named else "",
    )
