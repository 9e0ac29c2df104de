"""Kernel spec to CUDA source.

Pure: the same spec gives the same text on every machine; knows no torch, no CUDA library, no cache. The algorithm lives
in the headers under `include/jitgemm`. What is rendered is the part that differs from kernel to kernel: the constants,
and the wgmma wrappers for the type and the few shapes the kernel uses, so that no table of a hundred wrappers has to be
carried.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitgemm import settings
from jitgemm.dtypes import DTYPES
from jitgemm.jit.source import OPTIONS, KernelSource, function_name, headers
from jitgemm.kernel.formats import BLOCK_K
from jitgemm.kernel.spec import KernelSpec, smem_bytes, wgmma_shapes
from jitgemm.kernel.tactics import direct_lhs, fragment_sets, multiply_widths, pins_shared_base, prefetch_stages
from jitgemm.kernel.tactics import promote_records, spares_fragments, units_in_flight, yields


def _wgmma(spec: KernelSpec, tokens: int) -> str:
    if tokens not in wgmma_shapes(spec.lhs):
        raise ValueError(f"spec: wgmma has no N = {tokens} for {spec.lhs}")
    f16 = spec.sums == "f16"
    count = tokens // 4 if f16 else tokens // 2
    integer = spec.lhs == "s8"
    weights = spec.format.decoder(spec.lhs).operand or spec.lhs
    accumulator, constraint, sums = ("i32", "+r", "s32") if integer else ("float", "+f", "f32")
    if f16:
        accumulator, constraint, sums = "u32", "+r", "f16"
    types = f"{sums}.{spec.lhs}.{weights}" if spec.tokens_as_m else f"{sums}.{weights}.{spec.lhs}"
    # e4m3 takes the signs of both operands as immediates, s8 does not.
    signs = "" if integer else ", 1, 1"
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"{constraint}"(d[{i}])' for i in range(count))
    if spec.shared_weights:
        parameter, a, inputs, where = "u64 a", f"%{count}", '"l"(a)', "shared memory"
    else:
        parameter, a, where = "const u32 (&a)[4]", f"{{{', '.join(f'%{count + i}' for i in range(4))}}}", "registers"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    b = count + inputs.count("(a")
    return f"""\
// d = a * b, or d += a * b: a is 64 x 32 in {where}, b is {tokens} x 32 in shared memory.
template <>
struct Wgmma<{tokens}> {{
    using Accumulator = {accumulator};
    static constexpr u32 kRegisters = {count};
    template <int kCount>
    __device__ __forceinline__ static void issue({accumulator} (&d)[kCount], {parameter}, u64 b,
                                                 bool accumulate) {{
        asm volatile(
            "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{tokens}k32.{types}"
            " {{{registers}}}, {a}, %{b}, p{signs};\\n}}"
            : {outputs}
            : {inputs}, "l"(b), "r"(i32(accumulate)));
    }}
}};
"""


def _correction_tokens(spec: KernelSpec) -> list[int]:
    """N of the multiplies of corrections: a half's tokens of each width, or half of them
    (include/jitgemm/gemm/correction.cuh)."""
    tokens = [width // spec.token_halves for width in multiply_widths(spec)]
    return sorted({count // 2 if count > 128 else count for count in tokens})


def _correction_wgmma(spec: KernelSpec, tokens: int) -> str:
    """A multiply of corrections, of 16-bit floats."""
    count, type = tokens // 2, {"bf16": "bf16", "fp16": "f16"}[spec.format.correction]
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""\
// d = a * b, or d += a * b: a is 64 x 16 in registers, b is {tokens} x 16 in shared memory.
template <>
struct CorrectionWgmma<{tokens}> {{
    __device__ __forceinline__ static void issue(float (&d)[{count}], const u32 (&a)[4], u64 b, bool accumulate) {{
        asm volatile(
            "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{type}.{type}"
            " {{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0;\\n}}"
            : {outputs}
            : {inputs}, "l"(b), "r"(i32(accumulate)));
    }}
}};
"""


_DEFAULTS = {
    "RealType kOutType": "kBf16", "u32 kHalves": 1, "u32 kWarpgroupsK": 1, "u32 kSplitK": 1, "u32 kMulticastLhs": 1,
    "u32 kCtasPerSm": 1, "u32 kExperts": 0, "u32 kLhsGroup": 0, "bool kScatter": False,
    "bool kTokensAsM": False, "bool kOffset": False, "bool kLhsE8m0": False, "bool kF16Sums": False,
    "bool kByParts": False,
    "bool kCorrects": False, "bool kChunks": False, "bool kDebug": False, "u32 kInFlight": 1,
    "u32 kFragmentSets": 2, "u32 kPromoteRecords": 1, "bool kDirectLhs": False, "bool kPinSharedBase": False,
    "u32 kWidths": 1,
}  # fmt: skip
"""What constants are unless they are rendered; the struct Defaults of include/jitgemm/gemm/config.cuh."""


def _config(spec: KernelSpec, smem_bytes: int, sets: int) -> str:
    fmt = spec.format
    constants: dict[str, Any] = {
        "u32 kBlockM": spec.block_m,
        "u32 kStrips": spec.strips,
        "u32 kHalves": spec.token_halves,
        "u32 kWarpgroupsK": spec.warpgroups_k,
        "u32 kStages": spec.stages,
        "u32 kSplitK": spec.split_k,
        "bool kScatter": spec.reduce_scatter,
        "u32 kMulticastLhs": spec.multicast_lhs,
        "u32 kCtasPerSm": spec.ctas_per_sm,
        "bool kTokensAsM": spec.tokens_as_m,
        "u32 kExperts": spec.experts,
        "u32 kGroupSize": fmt.group_size,
        "bool kOffset": fmt.offset,
        "RealType kScaleType": DTYPES[fmt.scale_type].cpp_name,
        "u32 kLhsGroup": spec.lhs_group,
        "bool kLhsE8m0": spec.lhs_e8m0,
        "bool kF16Sums": spec.sums == "f16",
        "bool kByParts": spec.sums == "parts",
        "bool kCorrects": bool(spec.format.correction),
        "bool kChunks": spec.chunks,
        "RealType kOutType": DTYPES[spec.out].cpp_name,
        "u32 kPrefetchStages": prefetch_stages(spec),
        "u32 kInFlight": units_in_flight(spec),
        "u32 kFragmentSets": sets,
        "u32 kPromoteRecords": promote_records(spec),
        "bool kDirectLhs": direct_lhs(spec),
        "bool kPinSharedBase": pins_shared_base(spec),
        "bool kDebug": spec.debug,
        "u32 kWidths": len(multiply_widths(spec)),
    }
    chosen = {name: value for name, value in constants.items() if value != _DEFAULTS.get(name)}
    # Python's True is C++'s true.
    lines = "\n".join(
        f"    static constexpr {name} = {str(value).lower() if isinstance(value, bool) else value};"
        for name, value in chosen.items()
    )
    decoder = fmt.decoder(spec.lhs)
    codec = {"f16": decoder.f16_codec, "parts": decoder.parts_codec}.get(spec.sums) or decoder.codec
    registers = spec.consumer_registers if spec.warpgroups > 1 else 0
    correction = (
        """
    template <u32 kTokens>
    using CorrectionWgmma = jitgemm::CorrectionWgmma<kTokens>;"""
        if spec.format.correction
        else ""
    )
    return f"""\
struct Chosen : Defaults {{
    template <u32 kTokens>
    using Wgmma = jitgemm::Wgmma<kTokens>;{correction}
    using Codec = {codec};
{lines}
    __device__ static constexpr u32 width(u32 index) {{
        constexpr u32 widths[] = {{{", ".join(map(str, multiply_widths(spec)))}}};
        return widths[index];
    }}
}};
using Config = Derived<Chosen>;
static_assert(Record<Config>::kBytes == {fmt.record_bytes}, "formats.py and codec.cuh disagree");
static_assert(Shared<Config>::kBytes == {smem_bytes}, "spec.py and shared.cuh disagree");
static_assert(Config::kConsumerRegisters == {registers}, "spec.py and config.cuh disagree");"""


def render(spec: KernelSpec, sets: int | None = None) -> str:
    """The CUDA source of a kernel. Compile with `OPTIONS` and `headers()`. Entry point: `function_name` of its label.

    Args:
        sets: of fragments; None asks `fragment_sets`.
    """
    maps = ("lhs_map", "last_lhs_map", "out_map", *(["out_part_map", "out_row_map"] if spec.experts else []))
    parameters = [f"const __grid_constant__ jitgemm::TensorMap {name}" for name in maps]
    parameters.append(f"const __grid_constant__ jitgemm::{'GroupedArgs' if spec.experts else 'Args'} args")
    function = function_name(spec.label)
    indent = ",\n" + " " * (len(function) + 1)
    addresses = ", ".join(f"&{name}" for name in (*maps, "out_map", "out_map")[:5])
    multiplies = "\n".join(_wgmma(spec, width // spec.token_halves) for width in multiply_widths(spec))
    declared = ""
    if spec.format.correction:
        declared = "template <u32 kTokens>\nstruct CorrectionWgmma;\n"
        multiplies += "\n" + "\n".join(_correction_wgmma(spec, tokens) for tokens in _correction_tokens(spec))
    cluster = f"__cluster_dims__({spec.cluster_size}, 1, 1) " if spec.cluster_size > 1 else ""
    return f"""\
// jitgemm W4A8 kernel {spec.label}
#include <jitgemm/types.cuh>

namespace jitgemm {{
template <u32 kTokens>
struct Wgmma;
{declared}
{multiplies}}}

#include <jitgemm/gemm/kernel.cuh>

namespace jitgemm {{
{spec.format.decoder(spec.lhs).source}{_config(spec, smem_bytes(spec), sets or fragment_sets(spec))}
}}

extern "C" __global__ void {cluster}__launch_bounds__({spec.threads}, {spec.ctas_per_sm})
{function}({indent.join(parameters)}) {{
    jitgemm::w4a8_gemm<jitgemm::Config>({{{addresses}}}, args);
}}
"""


def kernel_source(spec: KernelSpec) -> KernelSource:
    """Render a kernel into what the cache keys and compiles."""
    return KernelSource(
        spec.label, spec.to_dict(), render(spec), headers(), OPTIONS,
        yields=yields(spec) if settings.yields() else None, warmup=_warmup(spec),
        tighter=render(spec, 1) if spares_fragments(spec) else "",
    )  # fmt: skip


def _warmup(spec: KernelSpec) -> str:
    """The command that compiles a kernel of this format ahead of time."""
    fmt = spec.format
    if fmt.typed and fmt.group_size == BLOCK_K:  # most such weights are in blocks
        fmt = replace(fmt, uniform_strip_scale=True)
    flags = ["--weight", fmt.name, "--lhs", "int8" if spec.lhs == "s8" else "e4m3"]
    if spec.sums == "f16":
        flags += ["--sums", "f16"]
    if spec.out != "bf16":
        flags += ["--out", spec.out]
    if spec.lhs_e8m0:
        flags += ["--quantizer", "none", "--e8m0"]
    elif spec.lhs_group:
        flags += ["--quantizer", f"{spec.out}+block"]
    # Batch invariance is the call's, not the kernel's.
    return f"jitgemm warmup --shape N,K {' '.join(flags)} [--batch-invariant] [--device NAME]"
