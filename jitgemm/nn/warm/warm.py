"""Compiling all kernels that a model's layers can need, before the first call needs one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from jitgemm import settings
from jitgemm.activations.kernel import QuantizeSpec, quantize_specs
from jitgemm.activations.scheme import ADDED_NORM, GATES, NO_PROLOGUE, NORM, Gate, Prologue
from jitgemm.dtypes import REAL_TYPES
from jitgemm.errors import CacheMissError, CompileError
from jitgemm.gemm.partial import FinishSpec, finish_kernels
from jitgemm.gemm.ranks import RanksSpec, ranks_kernels
from jitgemm.jit.cache import process_cache
from jitgemm.jit.compile_many import compile_all, default_threads, look_up
from jitgemm.kernel.formats import LHS_GROUP
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.exchange import exchange_specs
from jitgemm.moe.kernel import RoutingSpec, layer_specs
from jitgemm.moe.plan import FAMILIES
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.invariant import kernels_of
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.packed import Packed
from jitgemm.nn.quantize.replaceable import check_model
from jitgemm.runtime.device import device_of, pick_device
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.select.choose import kernels_for
from jitgemm.select.devices import DEVICES, DeviceSpec
from jitgemm.tensors import TYPE_NAMES, check_dtype, check_int

Spec = KernelSpec | QuantizeSpec | RoutingSpec | FinishSpec | RanksSpec
MOST_TOP_K = 16
"""Experts of a token where a layer does not say: no model that we know takes more."""


def warmup(
    model: torch.nn.Module, max_m: int = 8192, *, dtype: torch.dtype | None = None, device: str | None = None,
    jobs: int | None = None, build: bool = True, compiled: bool = False,
) -> list[str]:  # fmt: skip
    """Compiles every kernel that the packed layers of a model can need, for up to max_m tokens.

    For experts that is every routing; where a layer's `top_k` is None, up to 16 experts of a token.

    Kernels are compiled in threads, under a progress bar on stderr if that is a terminal; what the cache holds is not
    compiled again. For layers on a GPU the kernels are loaded too: after this neither a first call nor the capture of a
    CUDA graph waits for anything. Also under JITGEMM_JIT=off. Warns of kernels that no cache folder took.

    Args:
        max_m: largest number of tokens in one call, batch and sequence together.
        dtype: of the layers' input: bfloat16, float16 or float32; None: that of the model's floating-point parameters,
            bfloat16 if it has none.
        device: for layers on the CPU, the GPU to compile for, as `jitgemm warmup --device` takes it; None: the one at
            hand, else h200.
        jobs: threads; None: one for each CPU that the process may use.
        build: False to compile nothing, only to load.
        compiled: True for a model that `torch.compile` compiles: also quantisers that compute a norm or a gate first,
            where a layer stands so that it may read one; of gates, the gates that the model's config names.

    Returns:
        Labels of the kernels that had to be compiled, in the order of the layers.

    Raises:
        TypeError, ValueError: an argument is wrong.
        CacheMissError: build is False, and the cache lacks a kernel.
        CompileError: a kernel did not compile; the others are compiled and loaded.
    """
    check_model(model)
    if check_int("max_m", max_m) < 1:
        raise ValueError(f"max_m: expected at least 1, got {max_m}")
    if dtype is not None:
        check_dtype("dtype", dtype, REAL_TYPES)
    of_model = dict.fromkeys(p.dtype for p in model.parameters() if TYPE_NAMES.get(p.dtype) in REAL_TYPES)
    dtypes = list(of_model) or [torch.bfloat16] if dtype is None else [dtype]
    needed: dict[Spec, dict[int | None, None]] = {}
    for spec, index, _ in kernels(model, max_m, dtypes, device, compiled):
        needed.setdefault(spec, {})[index] = None
    if not needed:
        warnings.warn("warmup: the model holds no layer of jitgemm.nn, so there is nothing to compile", stacklevel=2)
    plan = {spec: look_up(process_cache, _family(spec).source(spec)) for spec in needed}
    missing = [job for job in plan.values() if not job.stored]
    if missing and not build:
        gpus = [index for where in needed.values() for index in where if index is not None]
        target = device or _name(device_of(gpus[0]) if gpus else pick_device(None))
        first, command = missing[0].source.label, _command(model, max_m, target, compiled)
        raise CacheMissError(f"{len(missing)} kernels are not in the cache, such as {first}; {command} makes them")
    if missing:
        from rich.console import Console  # needed here alone

        console = Console(stderr=True)
        list(compile_all(process_cache, missing, jobs or default_threads(), console, bar=console.is_terminal))
    unwritten = [job.entry.unwritten for job in missing if job.entry and not job.stored]
    if unwritten:
        text = "kernels are not stored and every other process compiles them again"
        warnings.warn(f"{len(unwritten)} {text}: {unwritten[0]}", stacklevel=2)
    for spec, indices in needed.items():
        for index in indices:
            if index is not None and not plan[spec].error:
                with torch.cuda.device(index):
                    _family(spec).load(spec, index)
    failed = [job.error for job in missing if job.error]
    if failed:
        error = failed[0]
        more: Any = {"log": getattr(error, "log", ""), "source_path": getattr(error, "source_path", None)}
        message = f"{len(failed)} of {len(missing)} kernels did not compile; the first: {error}"
        raise CompileError(message, **more) from error
    return [job.source.label for job in missing if job.compiled]


def _family(spec: Spec) -> KernelFamily[Any]:
    made_late: dict[str, Callable[[], KernelFamily[Any]]] = {"finish": finish_kernels, "ranks": ranks_kernels}
    return made_late[spec.family]() if spec.family in made_late else FAMILIES[spec.family]


def _name(gpu: DeviceSpec) -> str:
    """The name of a GPU at hand for --device; "" if it has none."""
    known = DEVICES.get(gpu.name)
    return "" if known is None else gpu.name + (f",sms={gpu.num_sms}" if gpu.num_sms != known.num_sms else "")


def _command(model: torch.nn.Module, max_m: int, device: str, compiled: bool) -> str:
    """The `jitgemm warmup` command that compiles the model's kernels ahead of time."""
    folder = getattr(getattr(model, "config", None), "_name_or_path", "") or "FOLDER"
    use = "compiled" if compiled else "linear"
    sums = next((layer.sums for layer in model.modules() if isinstance(layer, Packed) and layer.sums != "f32"), None)
    use = "vllm" if isinstance(model, torch.nn.ModuleList) else use  # layers by themselves, as its plug-in warms up
    return f"jitgemm warmup --model {folder} --for {use} --max-m {max_m}{f' --sums {sums}' if sums else ''}" + (
        f" --device {device}" if device else ""
    )


def kernels(
    model: torch.nn.Module, max_m: int, dtypes: Sequence[torch.dtype], device: str | None, compiled: bool = False,
    sums: str | None = None,
) -> Iterator[tuple[Spec, int | None, str]]:  # fmt: skip
    """(spec, index of the GPU or None, a layer that needs it) of every kernel. Layers of the same kernels count once.

    sums: what layers without values will add up in; None: what they say.
    """
    seen = set()
    in_graphs = _prologues_in_graphs(model) if compiled else {}
    for name, layer in model.named_modules():
        prologues: tuple[Prologue, ...] = ()
        parts: list[Any]
        if isinstance(layer, PackedLinear):
            prologues, parts = tuple(dict.fromkeys((*layer.prologues, *in_graphs.get(name, ())))), [layer]
        elif isinstance(layer, PackedExperts):
            parts = [layer.w13, layer.w2]
        else:
            continue
        where, weights = parts[0].weight.device, [part.weight for part in parts]
        gemms = [
            (x.weight.shape, x.weight.format, x.weight.permutation is not None, x.scheme, x.call_sums) for x in parts
        ]
        others: Any = prologues
        invariant: Any = None
        if isinstance(layer, PackedExperts):
            others = layer.gate, layer.top_k, layer.batched, _over_nvlink(layer)
        elif layer.tp_invariant:
            split = layer.split
            invariant = layer.tp_invariant, layer.tp_ranks, split is not None and (split.world, split.nvlink)
        if (needs := (*gemms, others, layer.batch_invariant, invariant, where)) in seen:
            continue
        seen.add(needs)
        count = [str(layer.num_experts)] if isinstance(layer, PackedExperts) else []
        label = " ".join([name, *count, *(f"{weight.n}x{weight.k}" for weight in weights)]).strip()
        index = where.index if where.type == "cuda" else None
        figures = pick_device(device) if index is None else device_of(index)
        for dtype in dtypes:
            for spec in _specs(layer, parts, prologues, TYPE_NAMES[dtype], figures, max_m, sums):
                if isinstance(spec, KernelSpec) and settings.debug():
                    spec = replace(spec, debug=True)
                yield spec, index, label


def _specs(
    layer: Any, parts: Sequence[Any], prologues: Sequence[Prologue], x: str, figures: DeviceSpec, max_m: int,
    sums: str | None,
) -> Iterator[Spec]:  # fmt: skip
    """The kernels of a Linear, or of experts, which have no prologues."""
    if prologues and layer.tp_invariant:
        yield from kernels_of(layer, x, figures, max_m)
        return
    scheme, rows = parts[0].scheme, max_m
    options: dict[str, Any] = {"batch_invariant": layer.batch_invariant}
    for prologue in prologues:
        flags = scheme.flags | prologue.flags | {"permuted": layer.weight.permutation is not None}
        flags |= {"correction": layer.weight.correction}
        yield from quantize_specs(layer.weight.k, x, scheme.dtype, **flags)
    if not prologues:
        flags = {name: scheme.flags[name] for name in ("affine", "block", "rotated")}
        yield from layer_specs(
            layer.hidden_dim, layer.intermediate_dim, x, scheme.dtype, layer.gate, **flags, masked=layer.batched
        )
        if _over_nvlink(layer):
            yield from exchange_specs(layer.hidden_dim, x, scheme.dtype, **flags)
        rows, options["experts"] = max_m * (layer.top_k or min(layer.num_experts, MOST_TOP_K)), layer.num_experts
    options["lhs_group"] = LHS_GROUP if scheme.block else 0
    for part, weight in ((part, part.weight) for part in parts):
        problem = weight.n, weight.k, scheme.dtype, weight.format, figures, rows
        for added_in in _sums_of(part, sums):
            yield from kernels_for(*problem, out=x, sums=added_in, **options)


def _over_nvlink(layer: PackedExperts) -> bool:
    return layer.split is not None and layer.split.nvlink


def _sums_of(part: Packed, sums: str | None) -> tuple[str, ...]:
    """Types of sums to compile for. A weight without values may turn out not to fit f16, so both are compiled."""
    fmt, scheme = part.weight.format, part.scheme
    if sums is None:
        return ("f16", "f32") if part.call_sums == "f16" and part.blocks.is_meta else (part.call_sums,)
    possible = {"f16": fmt.f16_sums and scheme.dtype == "e4m3" and not scheme.block, "exact": scheme.dtype == "s8"}
    if not possible.get(sums):
        return ("f32",)
    return (sums, "f32") if sums == "f16" else (sums,)


NORMS = (NORM, ADDED_NORM)
"""What quantisers in compiled graphs compute behind a norm."""


def gates_of(config: Any) -> tuple[Gate, ...]:
    """The gates that a model's config names, which quantisers compute; all gates if it names none."""
    text = str(config.to_dict()) if hasattr(config, "to_dict") else ""
    names = re.findall(r"'\w*act\w*': '(\w+)'", text) or GATES
    return tuple(dict.fromkeys(GATES[name] for name in names if name in GATES))


def prologues_in_vllm(dim: str | None, gates: Sequence[Gate]) -> tuple[Prologue, ...]:
    """`PackedLinear.prologues` in graphs that vLLM compiles. Column-parallel layers ("n") read norms, row-parallel
    layers ("k") read products of gates, and layers that no rank divides (None) may read either."""
    return _prologues(NORMS if dim != "k" else (), gates if dim != "n" else ())


def _prologues(norms: Sequence[Prologue], gates: Sequence[Gate]) -> tuple[Prologue, ...]:
    return (NO_PROLOGUE, *norms, *(Prologue(gate=gate) for gate in gates))


def _prologues_in_graphs(model: torch.nn.Module) -> dict[str, tuple[Prologue, ...]]:
    """What quantisers may compute before they quantise, by layer, in compiled graphs.

    A norm, if the model has a norm as wide as the layer's input. A gate's product, if the Linears nearest to the layer
    give inputs of that width: one Linear twice as wide, or two. Layers without a model around them may read all.
    """
    gates = gates_of(getattr(model, "config", None))
    linears: dict[str, Any] = {}
    norms: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if isinstance(module, (torch.nn.Linear, PackedLinear)):
            linears[name] = module
        elif weight is not None and weight.dim() == 1:
            norms.add(weight.shape[0])
    prologues = {}
    for name, layer in linears.items():
        if "prologues" in vars(layer):  # a plug-in says what the graphs of its engine put ahead
            continue
        nearest: list[int] = []
        above = name
        while above and not nearest:
            above = above.rpartition(".")[0]
            near = (linear for other, linear in linears.items() if other != name and f"{other}.".startswith(above))
            nearest = [linear.out_features for linear in near]
        gated = not norms or 2 * layer.in_features in nearest or nearest.count(layer.in_features) > 1
        normed = not norms or layer.in_features in norms
        prologues[name] = _prologues(NORMS if normed else (), gates if gated else ())
    return prologues
