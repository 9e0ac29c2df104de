"""What becomes of the layers that a checkpoint has quantised: a packed layer of them, or their values in floats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.formats import transforms_of
from jitgemm.nn.load.experts_source import ExpertsSource
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.nn.quantize.replaceable import PACKED, Filter, Replaceable
from jitgemm.nn.report import some

LEFT_OUT = "dequantised: left out by the filter"
_OF_LINEARS = {"qweight", "blocks"}
"""Tensors of tools that put a Linear in the place of transformers' Conv1D; others keep its weight's [k, n]."""

Sources = Mapping[str, LayerSource | ExpertsSource]
"""{first name of a Linear, or of a module of stacked experts: what it becomes}."""
Dense = Callable[[torch.device, torch.dtype], torch.Tensor]
"""What is dequantised, or copied expert by expert, into a tensor of the model."""


@dataclass(frozen=True)
class Layers:
    """What becomes of modules.

    Attributes:
        sources: see `Sources`.
        places: all names at which their modules stand.
        dense: {name of a tensor of the model: what goes into it}.
        left: {prefix: why its tensors in the file are not used}.
        files: {name in the checkpoint: why it is not used; "" if it is, or if `skipped` says why its layer is not}.
        skipped: see `Report`.
    """

    sources: dict[str, LayerSource | ExpertsSource] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)
    dense: dict[str, Dense] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def leave(self, name: str, prefix: str, files: Iterable[str], why: str) -> None:
        """Leaves a layer's tensors of the file unused."""
        self.left[prefix] = self.skipped[name] = why
        self.files.update(dict.fromkeys(files, ""))

    def add(
        self, names: list[str], source: LayerSource | ExpertsSource, chosen: bool, packed: bool, reason: str | None
    ) -> None:
        """What becomes of a module that stands at these places: if it was chosen, is packed, or why it cannot be."""
        name = names[0]
        self.files.update({**dict.fromkeys(source.files, ""), **source.unused})
        if chosen and source.why_dense is None:
            self.sources[name] = source
            self.places.update(names)
            for place in names:
                if place != source.prefix:
                    self.files.update(dict.fromkeys(source.checkpoint.layer(place).values(), ""))
        elif packed or not source.dense:
            self.leave(name, source.prefix, (), "left out by the filter")
        else:
            reason = source.why_dense if chosen else reason
            if source.activation:  # else they are in floats anyway
                self.skipped[name] = f"dequantised: {reason}" if reason else LEFT_OUT
            self.dense.update({f"{source.prefix}.{child}": read for child, read in source.dense.items()})


def find_layers(
    model: torch.nn.Module, checkpoint: Checkpoint, replaceable: Replaceable, filter: Filter | None,
    activation: str | None, format: str | None,
) -> Layers:  # fmt: skip
    """Raises ValueError for layers that cannot be read, all named, and for a layer that does not fit its module."""
    layers, problems = Layers(), dict[str, ValueError]()
    others, hidden = _other_matrices(model)
    weights = checkpoint.hiding(hidden)
    for name, names in (replaceable.places | others).items():
        module: Any = model.get_submodule(name)
        layout = replaceable.experts.get(name)
        of_class = type(module).__name__
        other = "an Embedding" if of_class == "Embedding" else f"{of_class}, which is no torch.nn.Linear"
        reason = other if name in others else replaceable.why_impossible(name)
        chosen = reason is None and (filter is None or filter(name, module))
        prefix = _quantised_name(checkpoint, weights, names, module, name not in others) if layout is None else name
        if prefix is None:
            continue
        source: LayerSource | ExpertsSource | None
        try:
            if layout is None:
                transposed = name in others and _transposes(module)
                k = module.in_features if name not in others else None if transposed else module.weight.shape[1]
                source = LayerSource.find(weights, prefix, activation, format, k=k)
            else:
                source = ExpertsSource.find(checkpoint, name, layout, activation, format)
                if chosen and source is not None and source.why_dense is None:
                    source.check_order()
        except ValueError as error:
            if chosen or filter is None:
                problems[name] = error
            else:
                files = (tensor for tensor in checkpoint.names() if tensor.startswith(f"{prefix}."))
                why = f"{reason or 'left out by the filter'}, and cannot be dequantised: {error}"
                layers.leave(name, prefix, files, why)
            continue
        if isinstance(source, LayerSource):
            source = _fitting(source, name, module, name not in others)
        if source is not None:
            layers.add(names, source, chosen, isinstance(module, PACKED), reason)
    if problems:
        first = next(iter(problems.values()))
        count = f"{len(problems)} layers cannot be read" if len(problems) > 1 else "A layer cannot be read"
        raise ValueError(
            f"{first}. {count}: {some(problems)}. To load the others, leave what cannot be read out with "
            "filter=... (in transformers modules_to_not_convert=...), fill it yourself, and name its tensors in "
            "allow_missing=..."
        )
    return layers


def _other_matrices(model: torch.nn.Module) -> tuple[dict[str, list[str]], set[str]]:
    """{first name: all names} of the modules with a weight [n, k] that are no Linears: embeddings, routers, Conv1D. And
    names of what these hold besides weights, which is no part of a quantised weight."""
    names_of: dict[torch.nn.Module, list[str]] = {}
    hidden = set()
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(module, (torch.nn.Linear, *PACKED)):
            names_of.setdefault(module, []).append(name)
            tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            hidden |= {f"{name}.{child}" for child, _ in tensors if child != "weight"}
    return {names[0]: names for names in names_of.values()}, hidden


def _quantised_name(
    checkpoint: Checkpoint, weights: Checkpoint, names: list[str], module: Any, linear: bool
) -> str | None:
    """The module's name under which the file has a quantised layer; None if its weight is in floats."""
    prefix = next((prefix_of for prefix_of in names if weights.is_quantised(prefix_of)), None)
    if linear:
        transforms = transforms_of(checkpoint.config, checkpoint.in_file(names[0])[0]) if prefix is None else ()
        if transforms:
            raise ValueError(f"{names[0]}: transform_config: expected none of a layer in floats, got {transforms[0]}")
    elif prefix is not None and (weight := f"{prefix}.weight") in checkpoint:
        info = checkpoint.info(weight)
        return None if not info.kind and info.dtype == module.weight.dtype else prefix
    return prefix


def _fitting(layer: LayerSource, name: str, module: Any, linear: bool) -> LayerSource:
    """The layer, checked against the module. Raises ValueError if sizes differ, or one lacks the other's bias."""
    n, k = (module.out_features, module.in_features) if linear else module.weight.shape
    if not linear and _transposes(module) and _OF_LINEARS & layer.names.keys():
        layer, (n, k) = replace(layer, transposed=True), (k, n)
    if layer.n != n or layer.k not in (None, k):
        where = layer.checkpoint.place(next(iter(layer.names.values())))
        raise ValueError(f"{name}: expected k, n = {k, n}, got {layer.k, layer.n} in {where}")
    if not linear or module.bias is None:  # other modules' biases are tensors like any other
        return layer.without_bias()
    if "bias" not in layer.names:
        raise ValueError(f"{name}: expected a bias, as the model has it, got none")
    return layer


def _transposes(module: torch.nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, or a copy of it: its weight is [k, n]."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")
