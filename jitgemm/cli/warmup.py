"""`jitgemm warmup`: compile every kernel that some layers can need, before the first call needs it.

The kernels are enumerated from the selector's bands over m, never sampled: after a warm-up no m up to --max-m compiles.
Quantisers of activations do not depend on m.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from typing import Annotated, Any, Optional

import typer

from jitgemm import settings
from jitgemm.activations.kernel import GELU_MULS, QuantizeSpec, quantize_specs
from jitgemm.cli import common
from jitgemm.cli.hf_config import (
    ExpertLayer,
    Form,
    Layer,
    LinearLayer,
    Quantization,
    linear_layers,
    quantization,
    read_config,
)
from jitgemm.dtypes import REAL_TYPES
from jitgemm.errors import JitGemmError
from jitgemm.jit.cache import process_cache
from jitgemm.jit.compile_many import compile_all, default_threads
from jitgemm.jit.entry import Entry
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.jit.source import KernelSource
from jitgemm.kernel.formats import GROUP_SIZES, LHS_GROUP
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.kernel import CombineSpec, FrontSpec, RouteSpec, layer_specs, source_of
from jitgemm.runtime.device import pick_device
from jitgemm.select.choose import kernels_for
from jitgemm.select.devices import DeviceSpec

_FROM_CONFIG = "what --model's quantization_config says, else {}"

QUANTIZER_VARIANTS: dict[str, dict[str, Any]] = {
    "affine": {"affine": True},
    "static": {"static": True},
    "silu_mul": {"silu_mul": True},
    **{f"gelu_mul={name}": {"gelu_mul": name} for name in GELU_MULS},
    "rms_norm": {"rms_norm": True},
    "residual": {"residual": True},
    "permuted": {"permuted": True},
    "block": {"block": True},
}
"""What a quantiser may do besides, as arguments of `quantize_spec`. For "block", GEMMs take such scales, too."""


Spec = KernelSpec | QuantizeSpec | RouteSpec | FrontSpec | CombineSpec

CodesSet = Enum("CodesSet", {name: name for name in ("any", "tuned", "both")}, type=str)
"""`common.Codes`, or both of them."""


Quantizer = tuple[str, tuple[str, ...]]
"""A quantiser as --quantizer names it, such as "fp16+static+permuted": its input's type and its variants."""


def pick_quantizers(
    texts: Sequence[str], outs: Sequence[str], variants: tuple[str, ...], block: bool
) -> list[Quantizer]:
    """What --quantizer asks for; by default those of `jitgemm.nn.W4A8Linear`, whose result has its input's type.

    With `block` all of them are "block", whatever they are else.
    """
    if texts == ["none"]:
        return []
    if "none" in texts:
        raise ValueError(f"--quantizer: expected none alone, got {', '.join(texts)}")
    found: list[Quantizer] = [] if texts else [(out, variants) for out in outs]
    for text in texts:
        x, *given = text.split("+")
        if x not in REAL_TYPES or not set(given) <= QUANTIZER_VARIANTS.keys():
            raise ValueError(
                f"--quantizer: expected one of {', '.join(REAL_TYPES)}, followed by any of "
                f"{', '.join('+' + name for name in QUANTIZER_VARIANTS)}, or none; got {text!r}"
            )
        found.append((x, tuple(dict.fromkeys(given))))
    more = ("block",) if block else ()
    return list(dict.fromkeys((x, tuple(dict.fromkeys((*given, *more)))) for x, given in found))


@dataclass(frozen=True)
class Wanted:
    """Which kernels every layer needs.

    Attributes:
        lhs_types: "e4m3", "s8".
        group_size: 0 for per channel.
        outs: types of the result.
        max_m: largest number of tokens in one call.
    """

    lhs_types: Sequence[str]
    codes: CodesSet
    group_size: int
    zero_point: bool
    offset: bool
    bits: int
    scale_type: str
    outs: Sequence[str]
    batch_invariant: bool
    block_scales: bool
    e8m0: bool
    quantizers: Sequence[Quantizer]
    max_m: int

    def kernels(self, layer: Layer, device: DeviceSpec) -> Iterator[Spec]:
        """Every kernel of the layer: GEMMs, quantisers of their inputs, and experts' routing; some may come twice."""
        experts, shapes, rows = 0, [(layer.n, layer.k)] if isinstance(layer, LinearLayer) else layer.shapes, self.max_m
        if isinstance(layer, ExpertLayer):
            experts, rows = layer.experts, self.max_m * layer.top_k
        for lhs, (x, variants) in product(self.lhs_types, self.quantizers):
            if isinstance(layer, ExpertLayer):
                flags = {name: name in variants for name in ("affine", "block")}
                yield from layer_specs(layer.hidden, layer.inter, x, lhs, layer.gate, **flags)
            else:
                given = {name: value for each in variants for name, value in QUANTIZER_VARIANTS[each].items()}
                yield from quantize_specs(layer.k, x, lhs, **given)
        orders = common.Codes if self.codes is CodesSet.both else [common.Codes(self.codes.value)]
        orders = [common.Codes.tuned] if self.bits == 8 else orders
        groups = {LHS_GROUP if "block" in variants else 0: None for _, variants in self.quantizers} or {0: None}
        groups = {LHS_GROUP: None} if self.block_scales or self.e8m0 else groups
        for lhs, codes, out, (n, k), group in product(self.lhs_types, orders, self.outs, shapes, groups):
            format = common.weight_format(
                codes, lhs, self.group_size, self.zero_point, self.scale_type, self.offset, k, self.bits
            )
            yield from kernels_for(
                n, k, lhs, format, device, rows, out=out, batch_invariant=self.batch_invariant, experts=experts,
                lhs_group=group, lhs_e8m0=self.e8m0,
            )  # fmt: skip

    def describe(self) -> str:
        """What is not every warm-up's, for people."""
        weights = "8-bit weights, " if self.bits == 8 else ""
        weights += f"groups of {self.group_size}" if self.group_size else "scales per channel"
        weights += " with zero points" if self.zero_point else ""
        activations = " and ".join({"e4m3": "fp8", "s8": "int8"}[lhs] for lhs in self.lhs_types)
        modes = dict.fromkeys(mode for _, variants in self.quantizers for mode in variants)
        activations += " activations" + (f" ({', '.join(modes)})" if modes else "")
        return f"{weights} in {self.scale_type}, {activations}, results in {', '.join(self.outs)}"


@dataclass
class Job:
    """One kernel of the warm-up and what became of it.

    Attributes:
        status: "cached", "missing", "compiled", "unstored" (compiled, and no folder took it) or "failed".
        layers: names of the layers that can need it.
        entry: its cache entry, None while it has none.
    """

    kernel: Spec
    source: KernelSource
    key: str
    status: str = "missing"
    layers: list[str] = field(default_factory=list)
    entry: Entry | None = None
    error: str | None = None

    def found(self, entry: Entry | None, how: str) -> None:
        """Take what a look-up or a compilation gave."""
        if entry is not None:
            self.entry, self.status = entry, how if entry.path else "unstored"

    def to_dict(self) -> dict[str, Any]:
        built = self.entry.metadata if self.entry else {}
        return {
            "label": self.kernel.label,
            "kind": {KernelSpec: "gemm", QuantizeSpec: "quantizer"}.get(type(self.kernel), "routing"),
            "key": self.key,
            "status": self.status,
            "layers": self.layers,
            "registers": built.get("registers"),
            "spill_bytes": built.get("spill_bytes"),
            "serialised": built.get("serialised", "") if built else None,
            "seconds": built.get("seconds") if self.status in ("compiled", "unstored") else None,
            "path": str(self.entry.path) if self.entry and self.entry.path else None,
            "error": self.error,
        }


@common.guarded
def warmup(
    shape: Annotated[
        Optional[list[str]], typer.Option("--shape", metavar="N,K", help="A layer's weight shape; may be repeated.")
    ] = None,
    model: Annotated[
        Optional[list[str]],
        typer.Option("--model", metavar="CONFIG", help="A Hugging Face config.json, or its folder; may be repeated."),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks that --model is cut into.")] = 1,
    ep: Annotated[
        int, typer.Option("--ep", min=1, help="Expert-parallel ranks: each has a part of --model's experts, whole.")
    ] = 1,
    form: Annotated[
        Form,
        typer.Option(
            "--form",
            help="--model's projections: fused (qkv, gate_up, grouped experts) as serving engines run them, separate, "
            "or both.",
        ),
    ] = Form.both,
    lhs: Annotated[
        Optional[list[common.Lhs]],
        typer.Option("--lhs", help=f"{common.LHS_HELP} May be repeated.", show_default=_FROM_CONFIG.format("fp8")),
    ] = None,
    group_size: Annotated[
        Optional[str],
        typer.Option("--group-size", metavar="G", help=common.GROUP_HELP, show_default=_FROM_CONFIG.format("128")),
    ] = None,
    zero_point: Annotated[
        Optional[bool],
        typer.Option("--zero-point/--no-zero-point", help=common.ZERO_HELP, show_default=_FROM_CONFIG.format("no")),
    ] = None,
    offset: common.Offset = False,
    bits: Annotated[
        Optional[int],
        typer.Option("--bits", metavar="4|8", help=common.BITS_HELP, show_default=_FROM_CONFIG.format("4")),
    ] = None,
    scale_dtype: Annotated[
        Optional[common.RealType],
        typer.Option("--scale-dtype", help=common.SCALE_HELP, show_default=_FROM_CONFIG.format("bf16")),
    ] = None,
    codes: Annotated[
        CodesSet,
        typer.Option(
            "--codes",
            help=common.CODES_HELP + " Weights with zero points have no tuned order. Either one alone takes half the "
            "compile time of both.",
        ),
    ] = CodesSet.both,
    out: Annotated[
        Optional[list[common.RealType]],
        typer.Option("--out", help=f"{common.OUT_HELP} May be repeated.", show_default="bf16"),
    ] = None,
    batch_invariant: common.BatchInvariant = False,
    block_scales: common.BlockScales = False,
    e8m0: common.E8m0 = False,
    quantizer: Annotated[
        Optional[list[str]],
        typer.Option(
            "--quantizer",
            metavar="TYPE[+WHAT]",
            help=f"Quantisers of activations to --lhs, by the type of their input: {', '.join(REAL_TYPES)}, and what "
            f"they do beside: {', '.join('+' + name for name in QUANTIZER_VARIANTS)}. May be repeated. 'none': none.",
            show_default="the types of --out, as W4A8Linear needs",
        ),
    ] = None,
    max_m: Annotated[int, typer.Option("--max-m", min=1, help="Largest number of tokens in one call.")] = 8192,
    device: common.Device = None,
    jobs: Annotated[
        Optional[int],
        typer.Option("--jobs", "-j", min=1, help="Threads that compile.", show_default="the CPUs it may use"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compile nothing; list what would be.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compile nothing; exit 1 if one is missing.")] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Take a kernel that spills registers or serialises its wgmma for a failure."),
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Compile every kernel that these layers can need, for any number of tokens up to --max-m.

    Needs no GPU: kernels are chosen and compiled for the named device. What the cache holds is not compiled again.

    \b
    Where the model is at hand, jitgemm.nn.warmup(model) compiles exactly what
    its layers need: formats, static scales and permutations are read off them.

    \b
    Examples:
      jitgemm warmup --shape 4096,14336
      jitgemm warmup --model Meta-Llama-3-8B/config.json --tp 2 --device h100-sxm
      jitgemm warmup --model config.json --lhs int8 --group-size channel --max-m 2048
      jitgemm warmup --model Qwen3-30B-A3B/config.json --ep 4 --form fused
      jitgemm warmup --model config.json --codes tuned --out fp16
      jitgemm warmup --model config.json --lhs int8 --quantizer bf16+affine
      jitgemm warmup --shape 7168,2048 --bits 8 --scale-dtype fp32
      jitgemm warmup --model config.json --check && echo warm

    \b
    Exit codes:
      0  every kernel is in the cache (or would be, with --dry-run)
      1  --check: a kernel is missing
      2  wrong arguments, or a model that cannot be read or cut
      3  a kernel failed to compile, or was compiled and could not be stored;
         --strict: it spills or is serialised
    """
    if not shape and not model:
        raise ValueError("nothing to warm up: give at least one --shape N,K or --model config.json")
    if (tp > 1 or ep > 1 or form is not Form.both) and not model:
        raise ValueError(
            "--tp, --ep and --form are for the layers of --model; a --shape is taken as one rank's already"
        )
    target = pick_device(device)
    outs = list(dict.fromkeys(choice.value for choice in out or [common.RealType.bf16]))

    def wanted(said: Quantization) -> Wanted:
        """Options, then what the model says."""
        group = said.group_size if group_size is None else common.parse_group_size(group_size)
        if group not in (0, *GROUP_SIZES):
            raise ValueError(f"quantization_config: group_size: expected -1 or one of {GROUP_SIZES}, got {group!r}")
        types = lhs or [common.Lhs(said.lhs or "fp8")]
        return Wanted(
            lhs_types=list(dict.fromkeys(choice.kernel_type for choice in types)),
            codes=codes,
            group_size=group,
            zero_point=said.zero_point if zero_point is None else zero_point,
            offset=offset,
            bits=said.bits if bits is None else bits,
            scale_type=said.scale_type if scale_dtype is None else scale_dtype.value,
            outs=outs,
            batch_invariant=batch_invariant,
            block_scales=block_scales,
            e8m0=e8m0,
            quantizers=pick_quantizers(quantizer or (), outs, said.variants, block_scales),
            max_m=max_m,
        )

    default = Quantization("", 128, False)
    parts: list[tuple[Layer, Wanted]] = [
        (LinearLayer("shape", *common.parse_shape(text)), wanted(default)) for text in shape or ()
    ]
    for path in model or ():
        config = read_config(path)
        said = quantization(config)
        needs = wanted(said if isinstance(said, Quantization) else default)
        if isinstance(said, str):
            if bits is None and group_size is None:
                raise ValueError(
                    f"{path}: quantization_config cannot be read: {said}; --bits, --group-size, --zero-point, --lhs "
                    "and --quantizer can say what to compile, and jitgemm.nn.warmup(model) reads it off the layers"
                )
            common.note(f"{path}: quantization_config is not read ({said}): options say what is compiled")
        elif said:
            common.note(f"{path}: {said.method}: {needs.describe()}")
        parts += [(layer, needs) for layer in linear_layers(config, tp, ep=ep, group_size=needs.group_size, form=form)]
    layers = [layer for layer, _ in parts]
    if any(layer.name.startswith("experts") for layer in layers):
        common.note("experts: as fused_experts runs them (--form fused), or each a call of its own (--form separate)")

    plan = enumerate_jobs(parts, target)
    for job in plan:
        job.found(process_cache.lookup(job.key), "cached")
    missing = [job for job in plan if job.status != "cached"]
    started = time.perf_counter()
    if missing and not (dry_run or check):
        _compile(missing, jobs or default_threads())
    seconds = time.perf_counter() - started

    _report(plan, layers, target, max_m, seconds, as_json)
    slow = [job for job in plan if job.entry and job.entry.slow_because]
    for job in slow:
        said = f"{job.kernel.label} is slower than it should be: {job.entry.slow_because}"
        common.note(f"failed: {said}" if strict else said)
    unstored = [job for job in plan if job.status == "unstored"]
    if unstored:
        common.note(f"{len(unstored)} kernels are not stored: {unstored[0].entry.unwritten}")
    if unstored or any(job.status == "failed" for job in plan) or (strict and slow):
        raise typer.Exit(common.FAILED)
    if check and missing:
        raise typer.Exit(common.FOUND)


def enumerate_jobs(parts: Sequence[tuple[Layer, Wanted]], device: DeviceSpec) -> list[Job]:
    """Every kernel that the layers can need, each once, in the order first needed."""
    jobs: dict[Spec, Job] = {}
    nvrtc, debug = nvrtc_info(), settings.debug()
    for layer, wanted in parts:
        for kernel in wanted.kernels(layer, device):
            if debug and isinstance(kernel, KernelSpec):
                kernel = replace(kernel, debug=True)
            if kernel not in jobs:
                source = kernel_source(kernel) if isinstance(kernel, KernelSpec) else source_of(kernel)
                jobs[kernel] = Job(kernel, source, source.key(nvrtc))
            job = jobs[kernel]
            if layer.label not in job.layers:
                job.layers.append(layer.label)
    return list(jobs.values())


def _compile(jobs: list[Job], threads: int) -> None:
    console = common.err()
    try:
        with closing(compile_all(process_cache, [job.source for job in jobs], threads, console)) as results:
            for index, result in results:
                job = jobs[index]
                if isinstance(result, JitGemmError):
                    job.status, job.error = "failed", str(result)
                    console.print(f"{job.kernel.label}: {result}", style="red", markup=False, soft_wrap=True)
                else:
                    job.found(result[0], "compiled" if result[1] else "cached")
    except KeyboardInterrupt:
        done = sum(job.status == "compiled" for job in jobs)
        common.note(f"interrupted: {done} of {len(jobs)} compiled, which are kept")
        sys.stdout.flush()
        os._exit(130)  # sys.exit would wait for the compilations in flight; the locks they leave are free


def _report(
    jobs: list[Job], layers: list[Layer], device: DeviceSpec, max_m: int, seconds: float, as_json: bool
) -> None:
    statuses = ("cached", "compiled", "unstored", "missing", "failed")
    counts = {status: sum(job.status == status for job in jobs) for status in statuses}
    kernels = [job.to_dict() for job in jobs]
    if as_json:
        common.print_json(
            {
                "device": device.name,
                "max_m": max_m,
                "seconds": round(seconds, 3),
                "summary": counts,
                "layers": [layer.to_dict() for layer in layers],
                "kernels": kernels,
            }
        )
        return
    rows = [
        (
            each["label"],
            each["status"],
            each["registers"],
            None if each["spill_bytes"] is None else common.show_spills(each["spill_bytes"], each["serialised"]),
            None if each["seconds"] is None else f"{each['seconds']:.2f} s",
            each["key"][:12],
            len(each["layers"]),
        )
        for each in kernels
    ]
    columns = ("kernel", "status", "registers", "spills", "compiled in", "key", "layers")
    drop = ("layers", "compiled in", "registers")
    common.out().print(common.table(columns, rows, left=("kernel", "status", "key"), drop=drop))
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    common.note(
        f"{len(layers)} layer shapes on {device.name}, m up to {max_m}: {len(jobs)} kernels, {said}, {seconds:.1f} s"
    )
