"""Compiling all kernels that a model's layers can need, before the first call needs one."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch

from jitgemm import settings
from jitgemm.activations.kernel import GELU_MULS, QuantizeSpec, quantize_specs
from jitgemm.dtypes import REAL_TYPES
from jitgemm.errors import CacheMissError, CompileError, JitGemmError
from jitgemm.gemm import plan as gemms
from jitgemm.jit.cache import process_cache
from jitgemm.jit.compile_many import compile_all, default_threads
from jitgemm.jit.entry import Entry
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.jit.source import KernelSource
from jitgemm.kernel import render
from jitgemm.kernel.formats import LHS_GROUP
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.kernel import CombineSpec, FrontSpec, RouteSpec, layer_specs, source_of
from jitgemm.moe.plan import FAMILIES
from jitgemm.nn.choose import check_model
from jitgemm.nn.experts import PackedExperts
from jitgemm.nn.linear import PackedLinear
from jitgemm.nn.read import BLOCK, CODES
from jitgemm.runtime.device import device_of, pick_device
from jitgemm.select.choose import kernels_for
from jitgemm.select.devices import DeviceSpec
from jitgemm.tensors import TYPE_NAMES, check_dtype, check_int

Spec = KernelSpec | QuantizeSpec | RouteSpec | FrontSpec | CombineSpec
MOST_TOP_K = 16
"""Experts of a token where a layer does not say: no model that we know takes more."""


def warmup(
    model: torch.nn.Module,
    max_m: int = 8192,
    *,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    jobs: int | None = None,
    build: bool = True,
    compiled: bool = False,
) -> list[str]:
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
        compiled: True for a model that `torch.compile` compiles: also quantisers that compute a norm or a gate first.

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
    dtypes = _dtypes(model, dtype)
    nvrtc = nvrtc_info()
    needed: dict[str, KernelSource] = {}  # by cache key
    on_gpu: dict[tuple[Spec, int], str] = {}
    for spec, index in _kernels(model, max_m, dtypes, device, compiled):
        source = render.kernel_source(spec) if isinstance(spec, KernelSpec) else source_of(spec)
        key = source.key(nvrtc)
        needed.setdefault(key, source)
        if index is not None:
            on_gpu[spec, index] = key
    found = {key: process_cache.lookup(key) for key in needed}
    if not needed:
        warnings.warn("warmup: the model holds no layer of jitgemm.nn, so there is nothing to compile", stacklevel=2)
    missing = {key: needed[key] for key, entry in found.items() if entry is None or entry.path is None}
    if missing and not build:
        first = next(iter(missing.values())).label
        raise CacheMissError(f"{len(missing)} kernels are not in the cache, such as {first}; jitgemm warmup makes them")
    results = dict(zip(missing, _compile(list(missing.values()), jobs or default_threads())))
    failed = {key: result for key, result in results.items() if isinstance(result, JitGemmError)}
    built = [result for result in results.values() if not isinstance(result, JitGemmError)]
    unwritten = [entry.unwritten for entry, _ in built if entry.path is None]
    if unwritten:
        warnings.warn(
            f"{len(unwritten)} kernels are not stored and every other process compiles them again: {unwritten[0]}",
            stacklevel=2,
        )
    for (spec, index), key in on_gpu.items():
        if key not in failed:
            with torch.cuda.device(index):
                (gemms.KERNELS if isinstance(spec, KernelSpec) else FAMILIES[type(spec)]).load(spec, index)
    if failed:
        first = next(iter(failed.values()))
        raise CompileError(
            f"{len(failed)} of {len(missing)} kernels did not compile; the first: {first}",
            log=getattr(first, "log", ""),
            source_path=getattr(first, "source_path", None),
        ) from first
    return [entry.metadata["label"] for entry, compiled in built if compiled]


def _dtypes(model: torch.nn.Module, dtype: torch.dtype | None) -> list[torch.dtype]:
    if dtype is not None:
        check_dtype("dtype", dtype, REAL_TYPES)
        return [dtype]
    found = dict.fromkeys(p.dtype for p in model.parameters() if TYPE_NAMES.get(p.dtype) in REAL_TYPES)
    return list(found) or [torch.bfloat16]


def _kernels(
    model: torch.nn.Module, max_m: int, dtypes: list[torch.dtype], device: str | None, compiled: bool = False
) -> Iterator[tuple[Spec, int | None]]:
    """(spec, index of the GPU or None) of every kernel, layers of one kind once."""
    seen = set()
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and layer.front is not None:
            where, kind, specs = layer.weight.device, _linear_kind(layer), _linear_specs
        elif isinstance(layer, PackedExperts):
            where, kind, specs = layer.w13.weight.device, _experts_kind(layer), _experts_specs
        else:
            continue
        if (kind, where) in seen:
            continue
        seen.add((kind, where))
        index = where.index if where.type == "cuda" else None
        figures = pick_device(device) if index is None else device_of(index)
        for dtype in dtypes:
            for spec in specs(layer, TYPE_NAMES[dtype], figures, max_m, compiled):
                yield replace(spec, debug=True) if settings.debug() and isinstance(spec, KernelSpec) else spec, index


def _linear_kind(layer: PackedLinear) -> Hashable:
    weight = layer.weight
    static, permuted = layer.input_scale is not None, weight.permutation is not None
    front = tuple((layer.front or {}).items())
    return weight.shape, weight.format, layer.activation, layer.batch_invariant, static, permuted, front


def _linear_specs(layer: PackedLinear, x: str, figures: DeviceSpec, max_m: int, compiled: bool) -> Iterator[Spec]:
    weight, lhs, quantiser = layer.weight, TYPE_NAMES[CODES[layer.activation]], _quantiser(layer.activation)
    static, permuted = layer.input_scale is not None, weight.permutation is not None
    fronts = [layer.front or {}]
    if compiled and not layer.front:
        fronts += [{"rms_norm": True}, {"rms_norm": True, "residual": True}, {"silu_mul": True}]
        fronts += [{"gelu_mul": name} for name in GELU_MULS]
    for each in fronts:
        yield from quantize_specs(weight.k, x, lhs, **quantiser, static=static, permuted=permuted, **each)
    yield from kernels_for(
        weight.n, weight.k, lhs, weight.format, figures, max_m, out=x, batch_invariant=layer.batch_invariant,
        lhs_group=LHS_GROUP if quantiser["block"] else 0,
    )  # fmt: skip


def _quantiser(activation: str) -> dict[str, bool]:
    return {"affine": activation == "int8_affine", "block": activation.endswith(BLOCK)}


def _experts_kind(layer: PackedExperts) -> Hashable:
    weights = tuple((part.weight.shape, part.weight.format) for part in (layer.w13, layer.w2))
    return weights, layer.activation, layer.batch_invariant, layer.gate, layer.top_k, layer.batched


def _experts_specs(layer: PackedExperts, x: str, figures: DeviceSpec, max_m: int, _: bool) -> Iterator[Spec]:
    lhs, quantiser = TYPE_NAMES[CODES[layer.activation]], _quantiser(layer.activation)
    yield from layer_specs(
        layer.hidden_dim, layer.intermediate_dim, x, lhs, layer.gate, **quantiser, masked=layer.batched
    )
    experts = layer.num_experts
    rows = max_m * (layer.top_k or min(experts, MOST_TOP_K))
    for weight in (layer.w13.weight, layer.w2.weight):
        yield from kernels_for(
            weight.n, weight.k, lhs, weight.format, figures, rows, out=x, batch_invariant=layer.batch_invariant,
            experts=experts, lhs_group=LHS_GROUP if quantiser["block"] else 0,
        )  # fmt: skip


def _compile(sources: list[KernelSource], threads: int) -> list[tuple[Entry, bool] | JitGemmError]:
    """Compiles under a bar; what `compile_all` yields for each source, in their order."""
    from rich.console import Console  # needed here alone

    if not sources:
        return []
    console = Console(stderr=True)
    results = dict(compile_all(process_cache, sources, threads, console, bar=console.is_terminal))
    return [results[index] for index in range(len(sources))]
