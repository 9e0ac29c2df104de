"""What `load_` would do to a model: a plan from config and headers, which refuses before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from jitgemm.checkpoint.compressed_tensors_config import online_transform, stored_otherwise
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn.quantize.choose import PACKED, Filter, Replaceable
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.load.read import (
    OF_CACHE,
    ZEROS,
    Layer,
    has_zeros,
    is_quantised,
    layer_of,
    packable,
    without_bias,
    zero_bias,
)
from jitgemm.nn.load.read_experts import Experts, Stacked, check_packable, experts_of
from jitgemm.nn.report import some
from jitgemm.nn.quantize.stacked import BIASES, PARAMETERS, Form, form_of

LEFT_OUT = "dequantised: left out by the filter"
_IGNORABLE = {
    r"\.(k|v|q|kv|prob)_(global_)?(scale|zero_point)$": OF_CACHE,
    r"\.[kv]_proj\.output_(scale|zero_point)$": OF_CACHE,
    r"(^|\.)inv_freq$": "rotary frequencies, which the model computes",
}
"""What no model has a place for, and nobody misses."""
_OF_QUANTISED = ("g_idx", "input_scale", "input_zero_point")
"""What says nothing of a layer that the file has in floats, and some tools write there, too."""
_OF_LINEARS = {"qweight", "blocks"}
"""Tensors of tools that put a Linear in the place of transformers' Conv1D; others keep its weight's [k, n]."""


class _Unreadable(Exception):
    """A quantised layer of the checkpoint that cannot be read, and why."""

    def __init__(self, prefix: str, cause: ValueError):
        super().__init__(str(cause))
        self.prefix, self.cause = prefix, cause


@dataclass
class Plan:
    """What to do to a model; made from headers, apart from tied tensors, which are compared.

    Attributes:
        layers: {first name of a Linear, or of a module of stacked experts: what it becomes}.
        dense: {prefix: layer that is dequantised into a module of that name}.
        stacked: {name of a stacked parameter: experts that are dequantised into it, or copied one by one}.
        left: {prefix: why its tensors in the file are not used}.
        tensors: {name of a tensor of the model: name in the checkpoint, or the layer to dequantise}.
        untied: names of tensors that get a parameter of their own.
        computed: names of tensors that no file holds and the model computes.
        skipped, ignored, kept: see `Report`.
    """

    model: torch.nn.Module
    checkpoint: Checkpoint
    replaceable: Replaceable
    layers: dict[str, Layer | Experts] = field(default_factory=dict)
    dense: dict[str, Layer] = field(default_factory=dict)
    stacked: dict[str, Stacked] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str | Layer | Stacked] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)
    computed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    # ---- layers ------------------------------------------------------------------------------------------------------

    def find_layers(self, filter: Filter | None, activation: str | None, format: str | None) -> None:
        problems: dict[str, ValueError] = {}
        others = self._other_matrices()
        for name, names in (self.replaceable.places | others).items():
            module = self.model.get_submodule(name)
            kind = type(module).__name__
            if name not in others:
                reason = self.replaceable.cannot(name)
            else:
                reason = "an Embedding" if kind == "Embedding" else f"{kind}, which is no torch.nn.Linear"
            chosen = reason is None and (filter is None or filter(name, module))
            try:
                if name in self.replaceable.forms:
                    self._find_experts(names, module, chosen, activation, format)
                else:
                    self._find_layer(names, module, reason, chosen, activation, format)
            except _Unreadable as error:
                if chosen or filter is None:
                    problems[name] = error.cause
                else:
                    reason = f"{reason or 'left out by the filter'}, and cannot be dequantised: {error.cause}"
                    self.left[error.prefix] = self.skipped[name] = reason
        if problems:
            first = next(iter(problems.values()))
            count = f"{len(problems)} layers cannot be read" if len(problems) > 1 else "A layer cannot be read"
            raise ValueError(
                f"{first}. {count}: {some(problems)}. To load the others, leave what cannot be read out with "
                "filter=... (in transformers modules_to_not_convert=...), fill it yourself, and name its tensors in "
                "allow_missing=..."
            )

    def _other_matrices(self) -> dict[str, list[str]]:
        """{first name: all names} of the modules with a weight [n, k] that are no Linears: embeddings, routers, Conv1D.

        What else they hold themselves is no part of a quantised weight.
        """
        found: dict[torch.nn.Module, list[str]] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and not isinstance(module, (torch.nn.Linear, *PACKED)):
                found.setdefault(module, []).append(name)
        more = {
            f"{name}.{child}"
            for module, names in found.items()
            for child, tensor in (*module._parameters.items(), *module._buffers.items())
            for name in names
            if tensor is not None and child != "weight"
        }
        self._weights = self.checkpoint.hiding(more) if more else self.checkpoint
        return {names[0]: names for names in found.values()}

    def _find_layer(
        self,
        names: list[str],
        module: torch.nn.Module,
        reason: str | None,
        chosen: bool,
        activation: str | None,
        format: str | None,
    ) -> None:
        """What becomes of a Linear, or of another module with a matrix, that the checkpoint has quantised."""
        name = names[0]
        prefix = next((each for each in names if is_quantised(self._weights, each)), None)
        if prefix is None:
            transform = online_transform(self.checkpoint.config, self.checkpoint.in_file(name)[0])
            if transform is not None and isinstance(module, (torch.nn.Linear, PackedLinear)):
                raise ValueError(f"{name}: {transform}")
        if prefix is None or self._as_it_is(f"{prefix}.weight", module):
            return
        try:
            transposed = not hasattr(module, "in_features") and _transposes(module)
            k = getattr(module, "in_features", None) or (None if transposed else module.weight.shape[1])
            layer = layer_of(self._weights, prefix, activation, format, k=k)
        except ValueError as error:
            raise _Unreadable(prefix, error) from error
        layer = self._fitted(name, module, layer)
        self.ignored |= layer.unused
        if chosen and packable(layer):
            self.layers[name] = layer
        elif isinstance(module, PackedLinear):
            self.left[prefix] = self.skipped[name] = "left out by the filter"
        else:
            if chosen:
                reason = "n is no multiple of 8, k none of 16 or the group size none of 32"
                reason = ZEROS if has_zeros(layer) else reason
            self.skipped[name] = f"dequantised: {reason}" if reason else LEFT_OUT
            self.dense[prefix] = layer

    def _find_experts(
        self, names: list[str], module: torch.nn.Module, chosen: bool, activation: str | None, format: str | None
    ) -> None:
        """What becomes of stacked experts that the checkpoint has quantised, or in floats one by one."""
        name, form = names[0], self.replaceable.forms[names[0]]
        try:
            experts = experts_of(self.checkpoint, name, form, activation, format)
            if chosen and experts is not None and experts.packable:
                check_packable(self.checkpoint, experts)
        except ValueError as error:
            raise _Unreadable(name, error) from error
        if experts is None:
            return
        self.ignored |= experts.unused
        if chosen and experts.packable:
            self.layers[name] = experts
        elif isinstance(module, PACKED) or experts.projections is None:
            self.left[name] = self.skipped[name] = "left out by the filter"
        else:
            if experts.quantised:
                sizes = "hidden or intermediate size is no multiple of 16, or the group size none of 32"
                zeros = any(has_zeros(layer) for p in experts.projections for each in p.layers for layer in each)
                why = f"dequantised: {ZEROS if zeros else sizes}"
                self.skipped[name] = why if chosen else LEFT_OUT
            for part, (parameter, bias) in enumerate(zip(PARAMETERS, BIASES)):
                self.stacked[f"{name}.{parameter}"] = Stacked(experts, form.gate.order, part, False)
                if form.bias:
                    self.stacked[f"{name}.{bias}"] = Stacked(experts, form.gate.order, part, True)

    def _as_it_is(self, weight: str, module: torch.nn.Module) -> bool:
        """Whether a module that is no Linear has its weight in the type in which the file has it."""
        if isinstance(module, (torch.nn.Linear, PackedLinear)) or weight not in self.checkpoint:
            return False
        info = self.checkpoint.info(weight)
        return not info.kind and info.dtype == module.weight.dtype

    def _fitted(self, name: str, module: torch.nn.Module, layer: Layer) -> Layer:
        """The layer as the module holds it. Raises ValueError for other sizes, and where one of them lacks a bias."""
        has_bias = False  # of others, whose bias is a tensor like any other
        if isinstance(module, (torch.nn.Linear, PackedLinear)):
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
        return layer if has_bias or "bias" not in layer.names else without_bias(self.checkpoint, layer)

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def find_tensors(self, allow_missing: tuple[str, ...]) -> None:
        """Where every other tensor of the model comes from."""
        places = {place for name in self.layers for place in self.replaceable.places[name]}
        modules = dict(self.model.named_modules(remove_duplicate=False))
        state: dict[str, torch.Tensor] = {}
        groups: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if _inside(name, places) or not isinstance(tensor, torch.Tensor):
                continue
            packed = next((each for each in _parents(name) if isinstance(modules.get(each), PACKED)), None)
            if packed is not None:  # one that is not loaded again: all of it is missing
                module = modules[packed]
                name = packed + ".weight"
                tensor = module.blocks if isinstance(module, PackedLinear) else module.w13.blocks
            if name not in state:
                state[name] = tensor
                groups.setdefault(id(tensor), []).append(name)
        missing, never = [], never_saved(self.model)
        kept = "as allow_missing says"

        def may_stay(name: str) -> bool:
            return any(fnmatchcase(name, pattern) for pattern in allow_missing)

        for names in groups.values():
            found = [name for name in names if self._find_tensor(name, state[name])]
            if len(found) > 1:
                self._untie(found, state[names[0]])
            if not found and never.issuperset(names):
                self.computed += names
            elif not found and any(map(may_stay, names)):
                self.kept[names[0]] = kept
            elif not found:
                missing.append(names[0])
        if missing:
            raise ValueError(self._missing_message(missing, state))
        filled = {id(state[name]) for name in self.tensors}
        everything = (*self.model.named_parameters(), *self.model.named_buffers())
        empty = [name for name, x in everything if x.is_meta and id(x) not in filled and not _inside(name, places)]
        self.kept |= dict.fromkeys(filter(may_stay, empty), kept)
        empty = [name for name in empty if not may_stay(name)]
        if empty:
            raise ValueError(
                f"model: expected no tensor left on the meta device, got {some(empty)}: they are not in the "
                "checkpoint; make the model under accelerate.init_empty_weights(), which leaves such buffers where "
                "they hold data, or on a device that holds data"
            )

    def _find_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        """Notes where the tensor comes from, if it is in the checkpoint and fits."""
        prefix, _, child = name.rpartition(".")
        if child == "weight" and prefix in self.dense:
            self.tensors[name] = self.dense[prefix]
            return True
        if name in self.stacked:
            self.tensors[name] = self.stacked[name]
            return True
        if name not in self.checkpoint or prefix in self.left:
            return False
        if isinstance(self.model.get_submodule(prefix), PACKED):
            return False
        info = self.checkpoint.info(name)
        if info.shape != tuple(tensor.shape):
            raise ValueError(f"{name}: expected shape {list(tensor.shape)}, got {list(info.shape)}")
        # Floats are rounded to the model's type, as `load_state_dict` does; nothing else is converted.
        floats = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (tensor.dtype, info.dtype))
        if info.kind or (info.dtype != tensor.dtype and not floats):
            raise ValueError(f"{name}: expected {tensor.dtype}, got {info.kind or info.dtype}")
        self.tensors[name] = name
        return True

    def _untie(self, found: list[str], tensor: torch.Tensor) -> None:
        """Of several names of one tensor that are all in the file: one is read, unless they differ."""
        first, *others = found
        for name in others:
            if self._same(first, name, tensor.dtype):
                del self.tensors[name]
                self.ignored[name] = "the same as another name of the tied tensor"
                continue
            owners = [self.model.get_submodule(each.rpartition(".")[0]) for each in (first, name)]
            if owners[0] is owners[1]:
                raise ValueError(
                    f"source: expected {first} and {name} to be equal, as one module of the model has both"
                )
            self.untied.add(name)

    def _same(self, a: str, b: str, dtype: torch.dtype) -> bool:
        x, y = self.tensors[a], self.tensors[b]
        if not isinstance(x, str) or not isinstance(y, str):
            return False
        cpu = torch.device("cpu")
        return torch.equal(self.checkpoint.read(x, cpu).to(dtype), self.checkpoint.read(y, cpu).to(dtype))

    def _missing_message(self, missing: list[str], state: Mapping[str, torch.Tensor]) -> str:
        used = self._used()
        unused = [name for name in self.checkpoint.names() if name not in state and name not in used]
        otherwise = stored_otherwise(self.checkpoint.config, unused)
        if otherwise is not None:
            return f"source: {otherwise}; found none for {some(missing, 5)}"
        no_place = f"; found no place for {some(unused, 5)}" if unused else ""
        hints = [*self._causes(missing, state, unused)]
        hints.append(
            "a tensor that may keep what it holds, which is random in a model that was just made, is named in "
            "allow_missing=['*.name', ...]"
        )
        return f"source: expected the model's tensors, found none for {some(missing, 5)}{no_place}. {'; '.join(hints)}"

    def _causes(self, missing: list[str], state: Mapping[str, torch.Tensor], unused: list[str]) -> Iterator[str]:
        """Why tensors are missing: first what the config says of the file, then what is known of each tensor."""
        config = self.checkpoint.config or {}
        if config and not (self.layers or self.dense or self.stacked or self.left):
            told = [f"{key} {config[key]!r}" for key in ("quant_method", "format") if isinstance(config.get(key), str)]
            told = told or ["quantised layers"]
            yield f"the config says {', '.join(told)}, and no layer of the file is of a format that is read here"
        left = {name: next((each for each in _parents(name) if each in self.left), None) for name in missing}
        for prefix in [prefix for prefix in dict.fromkeys(left.values()) if prefix is not None][:3]:
            yield f"{prefix}: {self.left[prefix]}"
        missing = [name for name, prefix in left.items() if prefix is None]
        packed = next((name for name in missing if name + "_blocks" in self.checkpoint), None)
        stacked = next((name for name in missing if "experts" in name and state[name].dim() == 3), None)
        each = next((name for name in self.checkpoint.names() if re.search(r"(^|\.)experts\.\d+\.", name)), None)
        if packed is not None:
            yield f"{packed} is packed in the file (…_blocks, …_scales: MXFP4), which is not read here"
        elif stacked is not None and each is not None:
            module = self.model.get_submodule(stacked.rpartition(".")[0])
            form = form_of(module)
            kind = f"{type(module).__name__}, with other names of their projections" if isinstance(form, Form) else form
            yield (
                f"the model stacks a layer's experts in one parameter ({stacked}), and the file names each by "
                f"itself ({each}), which fits what transformers 5 stacks; the model's are "
                f"{kind or 'stacked experts of an unknown kind'}"
            )
        for name in missing[:3]:
            module = self.model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, PACKED):
                kind = type(module).__name__
                yield f"{name.rpartition('.')[0]} is a {kind}, for which the file has no quantised weight"
        longer = next((name for name in unused if name.endswith(f".{missing[0]}")), None) if missing else None
        if longer is not None:
            yield f"the file calls {missing[0]} {longer}: give its tensors under the model's names"

    # ---- tensors of the file -----------------------------------------------------------------------------------------

    def _used(self) -> set[str]:
        """All names in the checkpoint that are read, or known not to be."""
        names: set[str] = set()
        for layer in (*self.layers.values(), *self.dense.values(), *(each.experts for each in self.stacked.values())):
            names |= layer.names if isinstance(layer, Experts) else {*layer.names.values()}
        linears = (name for name, layer in self.layers.items() if isinstance(layer, Layer))
        for prefixes in (*(self.replaceable.places[name] for name in linears), self.left):
            names |= {full for prefix in prefixes for full in self.checkpoint.layer(prefix).values()}
        left = tuple(f"{name}." for name in self.left if name in self.replaceable.forms)
        names |= {name for name in self.checkpoint.names() if left and name.startswith(left)}
        return names | {name for name in self.tensors.values() if isinstance(name, str)} | set(self.ignored)

    def find_unused(self, strict: bool) -> None:
        used = self._used()
        listed = {pattern for m in self.model.modules() for pattern in _ignored_by(m)}
        rules = _IGNORABLE | {pattern: "the model lists it as ignorable" for pattern in listed}
        unknown = []
        for name in self.checkpoint.names():
            if name in used:
                continue
            reason = next((why for pattern, why in rules.items() if re.search(pattern, name)), None)
            reason = reason or self._idle(name)
            if reason is None and strict:
                unknown.append(name)
            else:
                self.ignored[name] = reason or "the model has no place for it"
        otherwise = stored_otherwise(self.checkpoint.config, unknown)
        if otherwise is not None:
            raise ValueError(f"source: {otherwise}")
        if unknown:
            scales = [name for name in unknown if "scale" in name.rpartition(".")[2] and self._in_floats(name)]
            advice = "strict=False ignores such tensors"
            if scales:
                advice = (
                    f"{scales[0]} is of a layer whose weight the file has in floats, as a checkpoint that was saved "
                    "uncompressed (frozen) has it; strict=False takes the weights in floats"
                )
            raise ValueError(
                f"source: expected only the model's tensors, found no place for {some(unknown, 5)}; {advice}"
            )

    def _in_floats(self, name: str) -> bool:
        """Whether the file has the weight in floats of the layer that the tensor belongs to."""
        prefix = name.rpartition(".")[0]
        weight = f"{prefix}.weight" if prefix else "weight"
        return weight in self.checkpoint and not is_quantised(self.checkpoint, prefix)

    def _idle(self, name: str) -> str | None:
        """Why a tensor without a place changes nothing; None where it may.

        Raises:
            ValueError: a bias that is not zero, of a module without one.
        """
        prefix, _, child = name.rpartition(".")
        if not self._in_floats(name):
            return None
        if child in _OF_QUANTISED:
            return "of a quantised layer, where the file has the weight in floats"
        return zero_bias(self.checkpoint, name) if child == "bias" and _has(self.model, prefix) else None


def _has(model: torch.nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _transposes(module: torch.nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, or a copy of it: its weight is [k, n]."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def _inside(name: str, places: Collection[str]) -> bool:
    """Whether a tensor's name lies in a module of one of these names, at any depth."""
    return any(parent in places for parent in (name, *_parents(name)))


def _parents(name: str) -> Iterator[str]:
    """ "a.b" and "a" of "a.b.c"."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def never_saved(model: torch.nn.Module) -> set[str]:
    """Tensors that a model of transformers computes by `_init_weights`, as Marian its positions: it lists them both as
    left out of files and as nobody's loss there."""
    names = set()
    for prefix, module in model.named_modules() if hasattr(model, "_init_weights") else ():
        patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
        for name in getattr(module, "_keys_to_ignore_on_save", None) or ():
            if any(re.search(pattern, name) for pattern in patterns):
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def _ignored_by(module: torch.nn.Module) -> Collection[str]:
    return getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
