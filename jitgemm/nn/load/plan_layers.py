"""What becomes of the layers that a checkpoint has quantised: a packed layer of them, or their values in floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from jitgemm.checkpoint.compressed_tensors import online_transform
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.load.experts_source import ExpertsSource, StackedSource
from jitgemm.nn.load.layer_source import LayerSource, is_quantised
from jitgemm.nn.quantize.replaceable import PACKED, Filter, Replaceable
from jitgemm.nn.quantize.stacked import BIASES, PARAMETERS, Form
from jitgemm.nn.report import some

LEFT_OUT = "dequantised: left out by the filter"
_OF_LINEARS = {"qweight", "blocks"}
"""Tensors of tools that put a Linear in the place of transformers' Conv1D; others keep its weight's [k, n]."""

Sources = Mapping[str, LayerSource | ExpertsSource]
"""{first name of a Linear, or of a module of stacked experts: what it becomes}."""


@dataclass(frozen=True)
class Layers:
    """What becomes of modules.

    Attributes:
        sources: see `Sources`.
        places: all names at which their modules stand.
        dense: {name of a tensor of the model: what is dequantised into it, or copied expert by expert}.
        left: {prefix: why its tensors in the file are not used}.
        used: names in the checkpoint that are read, or known not to be.
    """

    sources: dict[str, LayerSource | ExpertsSource] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)
    dense: dict[str, LayerSource | StackedSource] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)


class _Unreadable(Exception):
    """A quantised layer of the checkpoint that cannot be read, and why."""

    def __init__(self, prefix: str, cause: ValueError):
        super().__init__(str(cause))
        self.prefix, self.cause = prefix, cause


def find_layers(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    replaceable: Replaceable,
    filter: Filter | None,
    activation: str | None,
    format: str | None,
) -> Layers:
    found, problems = Layers(), dict[str, ValueError]()
    others = _other_matrices(model)
    hidden = _beside_weights(model, others)
    weights = checkpoint.hiding(hidden) if hidden else checkpoint
    for name, names in (replaceable.places | others).items():
        module, form = model.get_submodule(name), replaceable.forms.get(name)
        kind = type(module).__name__
        if name not in others:
            reason = replaceable.why_impossible(name)
        else:
            reason = "an Embedding" if kind == "Embedding" else f"{kind}, which is no torch.nn.Linear"
        chosen = reason is None and (filter is None or filter(name, module))
        try:
            if form is not None:
                experts = _experts_source(checkpoint, name, form, chosen, activation, format)
                if experts is not None:
                    _plan_experts(found, names, module, form, experts, chosen)
            else:
                layer = _layer_source(checkpoint, weights, names, module, activation, format)
                if layer is not None:
                    _plan_layer(found, weights, names, module, layer, chosen, reason)
        except _Unreadable as error:
            if chosen or filter is None:
                problems[name] = error.cause
            else:
                reason = f"{reason or 'left out by the filter'}, and cannot be dequantised: {error.cause}"
                _leave(found, checkpoint, name, error.prefix, reason, whole=form is not None)
    if problems:
        first = next(iter(problems.values()))
        count = f"{len(problems)} layers cannot be read" if len(problems) > 1 else "A layer cannot be read"
        raise ValueError(
            f"{first}. {count}: {some(problems)}. To load the others, leave what cannot be read out with "
            "filter=... (in transformers modules_to_not_convert=...), fill it yourself, and name its tensors in "
            "allow_missing=..."
        )
    return found


def _other_matrices(model: torch.nn.Module) -> dict[str, list[str]]:
    """{first name: all names} of the modules with a weight [n, k] that are no Linears: embeddings, routers, Conv1D."""
    found: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(module, (torch.nn.Linear, *PACKED)):
            found.setdefault(module, []).append(name)
    return {names[0]: names for names in found.values()}


def _beside_weights(model: torch.nn.Module, modules: Mapping[str, list[str]]) -> set[str]:
    """Names of what such modules hold themselves beside their weights: no part of a quantised weight."""
    found = set()
    for names in modules.values():
        module = model.get_submodule(names[0])
        tensors = {**module._parameters, **module._buffers}
        found |= {f"{n}.{child}" for child, x in tensors.items() for n in names if x is not None and child != "weight"}
    return found


def _leave(found: Layers, checkpoint: Checkpoint, name: str, prefix: str, why: str, whole: bool = False) -> None:
    """Leaves a layer of the file unused; whole: with all layers in it."""
    found.left[prefix] = found.skipped[name] = why
    found.used.update(checkpoint.layer(prefix).values())
    if whole:
        found.used.update(each for each in checkpoint.names() if each.startswith(f"{name}."))


def _layer_source(
    checkpoint: Checkpoint,
    weights: Checkpoint,
    names: list[str],
    module: torch.nn.Module,
    activation: str | None,
    format: str | None,
) -> LayerSource | None:
    """What the checkpoint has for a Linear, or another module with a matrix, as the module holds it; None for floats."""
    name = names[0]
    linear = isinstance(module, (torch.nn.Linear, PackedLinear))
    prefix = next((each for each in names if is_quantised(weights, each)), None)
    if prefix is None:
        transform = online_transform(checkpoint.config, checkpoint.in_file(name)[0])
        if transform is not None and linear:
            raise ValueError(f"{name}: {transform}")
        return None
    weight = f"{prefix}.weight"
    if not linear and weight in checkpoint:
        info = checkpoint.info(weight)
        if not info.kind and info.dtype == module.weight.dtype:  # as it is
            return None
    try:
        transposed = not hasattr(module, "in_features") and _transposes(module)
        k = getattr(module, "in_features", None) or (None if transposed else module.weight.shape[1])
        layer = LayerSource.find(weights, prefix, activation, format, k=k)
    except ValueError as error:
        raise _Unreadable(prefix, error) from error
    has_bias = False  # of others, whose bias is a tensor like any other
    if linear:
        n, k, has_bias = module.out_features, module.in_features, module.bias is not None
    else:
        n, k = module.weight.shape
        if _transposes(module) and _OF_LINEARS & layer.names.keys():
            layer = replace(layer, transposed=True)
            n, k = k, n
    if layer.n != n or layer.k not in (None, k):
        raise ValueError(f"{name}: expected k, n = {k, n}, got {layer.k, layer.n}")
    if has_bias and "bias" not in layer.names:
        raise ValueError(f"{name}: expected a bias, as the model has it, got none")
    return layer if has_bias else layer.without_bias()


def _plan_layer(
    found: Layers,
    weights: Checkpoint,
    names: list[str],
    module: torch.nn.Module,
    layer: LayerSource,
    chosen: bool,
    reason: str | None,
) -> None:
    found.ignored.update(layer.unused)
    found.used.update(layer.names.values())
    if chosen and layer.why_dense is None:
        found.sources[names[0]] = layer
        found.places.update(names)
        found.used.update(full for each in names for full in weights.layer(each).values())
    elif isinstance(module, PackedLinear):
        _leave(found, weights, names[0], layer.prefix, "left out by the filter")
    else:
        reason = layer.why_dense if chosen else reason
        found.skipped[names[0]] = f"dequantised: {reason}" if reason else LEFT_OUT
        found.dense[f"{layer.prefix}.weight"] = layer


def _experts_source(
    checkpoint: Checkpoint, name: str, form: Form, chosen: bool, activation: str | None, format: str | None
) -> ExpertsSource | None:
    """What the checkpoint has for stacked experts, quantised or in floats one by one."""
    try:
        experts = ExpertsSource.find(checkpoint, name, form, activation, format)
        if chosen and experts is not None and experts.packable:
            experts.check_order()
    except ValueError as error:
        raise _Unreadable(name, error) from error
    return experts


def _plan_experts(
    found: Layers, names: list[str], module: torch.nn.Module, form: Form, experts: ExpertsSource, chosen: bool
) -> None:
    name = names[0]
    found.ignored.update(experts.unused)
    if chosen and experts.packable:
        found.sources[name] = experts
        found.places.update(names)
        found.used.update(experts.files)
    elif isinstance(module, PACKED) or experts.projections is None:
        _leave(found, experts.checkpoint, name, name, "left out by the filter", whole=True)
    else:
        found.used.update(experts.files)
        if experts.quantised:
            found.skipped[name] = f"dequantised: {experts.why_dense}" if chosen else LEFT_OUT
        for part, pair in enumerate(zip(PARAMETERS, BIASES)):
            for bias, tensor in enumerate(pair[: 1 + form.bias]):
                found.dense[f"{name}.{tensor}"] = StackedSource(experts, form.gate.order, part, bool(bias))


def _transposes(module: torch.nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, or a copy of it: its weight is [k, n]."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")
