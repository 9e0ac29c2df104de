"""`jitgemm warmup`: compile every kernel that some layers can need, before the first call needs it.

The kernels are enumerated from the selector's bands over m, never sampled: after a warm-up no m up to --max-m compiles.
Quantisers of activations do not depend on m.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from jitgemm import settings
from jitgemm.activations.kernel import VARIANTS as QUANTIZER_VARIANTS
from jitgemm.activations.kernel import quantize_specs
from jitgemm.activations.scheme import ACTIVATIONS
from jitgemm.cli import common
from jitgemm.cli.common import layer_option
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.jit.cache import process_cache
from jitgemm.jit.compile_many import Job, compile_all, default_threads, look_up
from jitgemm.kernel.formats import LHS_GROUP
from jitgemm.moe.kernel import source_of
from jitgemm.runtime.device import pick_device
from jitgemm.select.choose import kernels_for


class Use(StrEnum):
    """How --model runs, see `jitgemm.nn.warm.ahead`."""

    linear = "linear"
    compiled = "compiled"
    vllm = "vllm"


def pick_quantizers(texts: Sequence[str], block: bool) -> list[tuple[str, dict[str, Any]]]:
    """What --quantizer asks for, such as "fp16+static+permuted": the input's type and keywords of `quantize_specs`.

    With `block` all of them are by block, whatever they are else.
    """
    quantizers: list[tuple[str, dict[str, Any]]] = []
    if "none" in texts and len(texts) > 1:
        raise ValueError(f"--quantizer: expected none alone, got {', '.join(texts)}")
    for text in texts if "none" not in texts else ():
        x, *variants = text.split("+")
        if x not in REAL_TYPES or not set(variants) <= QUANTIZER_VARIANTS.keys():
            raise ValueError(
                f"--quantizer: expected one of {', '.join(REAL_TYPES)}, followed by any of "
                f"{', '.join('+' + name for name in QUANTIZER_VARIANTS)}, or none; got {text!r}"
            )
        first, *others = [name for name in dict.fromkeys(variants) if "gate" in QUANTIZER_VARIANTS[name]] or [""]
        if others:
            raise ValueError(f"{others[0].partition('=')[0]}: expected one gate, got {first}, too, in {text!r}")
        flags = {name: value for variant in variants for name, value in QUANTIZER_VARIANTS[variant].items()}
        quantizers.append((x, flags | {"block": True} if block else flags))
    return quantizers


_SHAPES = "Layers by shape"
_of_shape = partial(typer.Option, rich_help_panel=_SHAPES, show_default=False)
_shape = partial(layer_option, rich_help_panel=_SHAPES)
_of_model = partial(typer.Option, rich_help_panel="A model", show_default=False)
_FOLDER = "A Hugging Face folder. Repeatable."
_USE = "linear, compiled or vllm. Default: linear."
_QUANTIZER = "Of inputs, such as fp16+rms_norm; or none. Repeatable. Default: --out."
_KIND = f"{', '.join(ACTIVATIONS)}."
_RECIPE = "Of floats, as engines take it: '{\"group_size\": 64}'."
_WEIGHT = "Repeatable. Default: g128-bf16, both orders."
_JOBS = "Threads. Default: all CPUs."
_STRICT = "Fail if a kernel spills or serialises."
Some = list[str] | None


@common.guarded
def warmup(
    shape: Annotated[Some, _of_shape("--shape", metavar="N,K", help="A layer's weight. Repeatable.")] = None,
    model: Annotated[list[Path] | None, _of_model("--model", metavar="FOLDER", help=_FOLDER)] = None,
    use: Annotated[Use, _of_model("--for", metavar="USE", help=_USE)] = Use.linear,
    tp: Annotated[int, _of_model("--tp", min=1, metavar="R", help="Tensor-parallel ranks.")] = 1,
    ep: Annotated[int, _of_model("--ep", min=1, metavar="R", help="Ranks that divide experts.")] = 1,
    activation: Annotated[str | None, _of_model("--activation", metavar="KIND", help=_KIND)] = None,
    recipe: Annotated[str | None, _of_model("--recipe", metavar="JSON", help=_RECIPE)] = None,
    weight: Annotated[Some, _shape("--weight", _WEIGHT, metavar="NAME")] = None,
    lhs: Annotated[list[common.Lhs] | None, _shape("--lhs", "Repeatable.")] = None,
    block_scales: Annotated[bool, _shape("--block-scales", metavar=None)] = False,
    e8m0: Annotated[bool, _shape("--e8m0", metavar=None)] = False,
    quantizer: Annotated[Some, _of_shape("--quantizer", metavar="TYPE[+…]", help=_QUANTIZER)] = None,
    out: Annotated[list[common.RealType] | None, layer_option("--out")] = None,
    sums: Annotated[common.Sums, layer_option("--sums", "Default: f32.", metavar="SUMS")] = common.Sums("f32"),
    batch_invariant: common.BatchInvariant = False,
    max_m: Annotated[int, typer.Option("--max-m", min=1, metavar="M", help="Most tokens in one call.")] = 8192,
    device: common.Device = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help=_JOBS)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compile nothing; list the kernels.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compile nothing; exit 1 if a kernel is missing.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help=_STRICT)] = False,
    as_json: common.Json = False,
) -> None:
    """Compile every kernel that layers can need, for any number of tokens up to --max-m.

    Needs no GPU. What the cache holds is not compiled again.

    \b
    Examples (docs/commands.md has more, and what each option means):
      jitgemm warmup --model Qwen3-8B-GPTQ --for vllm --tp 2 --device h100-sxm
      jitgemm warmup --model Qwen3-8B-GPTQ --for vllm --tp 2 --check && echo warm
      jitgemm warmup --shape 4096,14336 --weight g128-bf16-s8 --quantizer bf16+affine

    \b
    Exit codes:
      0  every kernel is in the cache (or would be, with --dry-run)
      1  --check: a kernel is missing
      2  wrong arguments, or a model that cannot be made, read or cut
      3  a kernel was not compiled or not stored; --strict: it is slow
    """
    if not shape and not model:
        raise ValueError("nothing to warm up: give at least one --shape N,K or --model FOLDER")
    if not model and (tp > 1 or ep > 1 or use is not Use.linear or activation or recipe):
        raise ValueError(
            "--for, --tp, --ep, --activation and --recipe are for a --model; a --shape is taken as one rank's already"
        )
    if not shape and (lhs or weight or block_scales or e8m0 or quantizer):
        raise ValueError(
            "--lhs, --weight, --block-scales, --e8m0 and --quantizer are for a --shape; what a --model needs is read "
            "off it, except --activation and --recipe"
        )
    target = pick_device(device)
    outs = [choice.value for choice in out or []]
    weights = _weights([common.LHS_TYPES[choice.value] for choice in lhs or ()], weight or ())
    quantizers = pick_quantizers(quantizer or outs or ["bf16"], block_scales)
    groups = {LHS_GROUP if block_scales or e8m0 or flags.get("block") else 0 for _, flags in quantizers or [("", {})]}
    needed_by: list[tuple[Any, str]] = []
    for (n, k), (kind, name) in product(map(common.parse_shape, shape or ()), weights):
        format = common.weight_format(name, k)
        sums_of = {"correction": format.lhs_sums} if format.lhs_sums else {}
        specs: list[Any] = [spec for x, flags in quantizers for spec in quantize_specs(k, x, kind, **flags, **sums_of)]
        for result, lhs_group in product(outs or ["bf16"], sorted(groups)):
            more: dict[str, Any] = {"batch_invariant": batch_invariant, "lhs_group": lhs_group, "lhs_e8m0": e8m0}
            more["sums"] = "f32" if len(weights) > 1 and sums.value == "f16" and not format.f16_sums else sums.value
            gemms = kernels_for(n, k, kind, format, target, max_m, out=result, **more)
            specs += [replace(spec, debug=settings.debug()) for spec in gemms]
        needed_by += [(spec, f"shape {n}x{k}") for spec in specs]
    if model:
        from jitgemm.nn.warm.ahead import dtype_of, models_ahead  # with torch and transformers
        from jitgemm.nn.warm.warm import kernels

        wanted = None if recipe is None else _recipe(recipe, activation)
        of_layers = sums.value if sums.value != "f32" or wanted is None else wanted.sums
        of_layers = None if of_layers == "f32" else of_layers
        for folder in model:
            folder = folder.parent if folder.name == "config.json" else folder
            for loaded in models_ahead(folder, use.value, tp, ep, activation, wanted, batch_invariant=batch_invariant):
                types = [torch_dtype(name) for name in outs] or [dtype_of(loaded)]
                needed = kernels(loaded, max_m, types, device or target.name, use is Use.compiled, of_layers)
                needed_by += [(spec, layer) for spec, _, layer in needed]

    layers: dict[Any, dict[str, None]] = {}
    for spec, layer in needed_by:
        layers.setdefault(spec, {})[layer] = None
    plan = {spec: look_up(process_cache, source_of(spec)) for spec in layers}
    missing = [job for job in plan.values() if not job.stored]
    started = time.perf_counter()
    if missing and not (dry_run or check):
        _compile(missing, jobs or default_threads())
    seconds = round(time.perf_counter() - started, 3)

    facts = [_facts(job, spec.kind, list(layers[spec])) for spec, job in plan.items()]
    _report(facts, {"device": target.name, "max_m": max_m, "seconds": seconds}, as_json)
    slow = [
        f"{job.source.label} is slower than it should be: {job.entry.slow_because}"
        for job in plan.values()
        if job.entry and job.entry.slow_because
    ]
    for slower in slow:
        common.note(f"failed: {slower}" if strict else slower)
    unstored = [job.entry.unwritten for job in plan.values() if job.entry and not job.stored]
    if unstored:
        common.note(f"{len(unstored)} kernels are not stored: {unstored[0]}")
    if unstored or any(job.error for job in missing) or (strict and slow):
        raise typer.Exit(common.FAILED)
    if check and missing:
        raise typer.Exit(common.FOUND)


def _weights(lhs: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """(type of activations, format's name) of each weight that a --shape has. ValueError for a format that meets none
    of the types."""
    if not names:
        return [(lhs_type, f"g128-bf16-{order}") for lhs_type in lhs or ["e4m3"] for order in ("any", lhs_type)]
    weights = []
    for name in names:
        types = common.weight_format(name).lhs_types
        met = [lhs_type for lhs_type in lhs or types[:1] if lhs_type in types]
        if not met:
            raise ValueError(f"--lhs: expected {' or '.join(types)} with --weight {name}, got {', '.join(lhs)}")
        weights += [(lhs_type, name) for lhs_type in met]
    return weights


def _recipe(text: str, activation: str | None) -> Any:
    """What --recipe says. ValueError where it does not, or says another activation than --activation."""
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--recipe: expected JSON, got {text!r}: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"--recipe: expected options by name, got {text!r}")
    if activation not in (None, said.get("activation", activation)):
        raise ValueError(f"--activation: expected {said['activation']}, as --recipe says, got {activation}")
    return common.recipe_of({"activation": activation} | said, option="--recipe")


def _compile(jobs: list[Job], threads: int) -> None:
    console = common.err()
    try:
        with closing(compile_all(process_cache, jobs, threads, console)) as done:
            for job in done:
                if job.error:
                    console.print(f"{job.source.label}: {job.error}", style="red", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        common.note(f"interrupted: {sum(job.compiled for job in jobs)} of {len(jobs)} compiled, which are kept")
        sys.stdout.flush()
        os._exit(130)  # sys.exit would wait for the compilations in flight; the locks they leave are free


STATUSES = ("cached", "compiled", "unstored", "missing", "failed")
"""What became of a kernel; unstored: compiled, and no folder took it."""


def _facts(job: Job, kind: str, layers: list[str]) -> dict[str, Any]:
    """What --json prints of a kernel."""
    there = "unstored" if not job.stored else "compiled" if job.compiled else "cached"
    status = "failed" if job.error else there if job.entry else "missing"
    facts: dict[str, Any] = {
        "label": job.source.label,
        "kind": kind,
        "key": job.key,
        "status": status,
        "layers": layers,
    }
    built = {"serialised": ""} | job.entry.metadata if job.entry else {}
    facts |= {name: built.get(name) for name in ("registers", "spill_bytes", "serialised")}
    facts["seconds"] = built.get("seconds") if status in ("compiled", "unstored") else None
    facts["path"] = str(job.entry.path) if job.entry and job.stored else None
    return facts | {"error": str(job.error) if job.error else None}


def _report(kernels: list[dict[str, Any]], facts: dict[str, Any], as_json: bool) -> None:
    counts = {status: sum(kernel["status"] == status for kernel in kernels) for status in STATUSES}
    layers = list(dict.fromkeys(layer for kernel in kernels for layer in kernel["layers"]))
    if as_json:
        common.print_json(facts | {"summary": counts, "layers": layers, "kernels": kernels})
        return
    rows = []
    for kernel in kernels:
        start = kernel["label"], kernel["status"], kernel["registers"]
        spills = common.show_spills(kernel["spill_bytes"], kernel["serialised"])
        took = None if kernel["seconds"] is None else f"{kernel['seconds']:.2f} s"
        rows.append((*start, spills, took, kernel["key"][:12], len(kernel["layers"])))
    columns = ("kernel", "status", "registers", "spills", "compiled in", "key", "layers")
    drop = ("layers", "compiled in", "registers")
    common.out().print(common.table(columns, rows, left=("kernel", "status", "key"), drop=drop))
    known = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    where = f"{len(layers)} layers on {facts['device']}, m up to {facts['max_m']}"
    common.note(f"{where}: {len(kernels)} kernels, {known}, {facts['seconds']:.1f} s")
