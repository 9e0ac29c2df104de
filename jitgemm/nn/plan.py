"""What `load_` would do to a model: a plan from config and headers, which refuses before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn.choose import PACKED, Filter, Replaceable
from jitgemm.nn.linear import PackedLinear
from jitgemm.nn.read import OF_CACHE, ZEROS, Layer, has_zeros, is_quantised, layer_of, packable
from jitgemm.nn.read_experts import Experts, Stacked, check_packable, experts_of
from jitgemm.nn.report import some
from jitgemm.nn.stacked import BIASES, PARAMETERS, form_of

LEFT_OUT = "dequantised: left out by the filter"
_IGNORABLE = {
    r"\.(k|v|q|kv|prob)_(global_)?(scale|zero_point)$": OF_CACHE,
    r"\.[kv]_proj\.output_(scale|zero_point)$": OF_CACHE,
    r"(^|\.)inv_freq$": "rotary frequencies, which the model computes",
}
"""What no model has a place for, and nobody misses."""


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
        skipped, ignored: see `Report`.
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

    # ---- layers ------------------------------------------------------------------------------------------------------

    def find_layers(self, filter: Filter | None, activation: str | None, format: str | None) -> None:
        problems: dict[str, ValueError] = {}
        embeddings = [name for name, m in self.model.named_modules() if isinstance(m, torch.nn.Embedding)]
        for name in (*self.replaceable.places, *embeddings):
            names = self.replaceable.places.get(name, [name])
            module = self.model.get_submodule(name)
            reason = "an Embedding" if name in embeddings else self.replaceable.cannot(name)
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

    def _find_layer(
        self,
        names: list[str],
        module: torch.nn.Module,
        reason: str | None,
        chosen: bool,
        activation: str | None,
        format: str | None,
    ) -> None:
        """What becomes of a Linear or an Embedding that the checkpoint has quantised."""
        name = names[0]
        prefix = next((each for each in names if is_quantised(self.checkpoint, each)), None)
        if prefix is None:
            return
        try:
            k = module.weight.shape[1] if isinstance(module, torch.nn.Embedding) else module.in_features
            layer = layer_of(self.checkpoint, prefix, activation, format, k=k)
        except ValueError as error:
            raise _Unreadable(prefix, error) from error
        self._check_sizes(name, module, layer)
        if chosen and packable(layer):
            self.layers[name] = layer
            self.ignored |= layer.unused
        elif isinstance(module, PackedLinear):
            self.left[prefix] = self.skipped[name] = "left out by the filter"
        else:
            if chosen:
                reason = "n is no multiple of 8, or k or the group size none of 32"
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
        if chosen and experts.packable:
            self.layers[name] = experts
            self.ignored |= experts.unused
        elif isinstance(module, PACKED) or experts.projections is None:
            self.left[name] = self.skipped[name] = "left out by the filter"
        else:
            if experts.quantised:
                why = "hidden, intermediate or group size is no multiple of 32"
                zeros = any(has_zeros(layer) for p in experts.projections for each in p.layers for layer in each)
                why = f"dequantised: {ZEROS if zeros else why}"
                self.skipped[name] = why if chosen else LEFT_OUT
            for part, (parameter, bias) in enumerate(zip(PARAMETERS, BIASES)):
                self.stacked[f"{name}.{parameter}"] = Stacked(experts, form.gate.order, part, False)
                if form.bias:
                    self.stacked[f"{name}.{bias}"] = Stacked(experts, form.gate.order, part, True)

    def _check_sizes(self, name: str, module: torch.nn.Module, layer: Layer) -> None:
        if isinstance(module, torch.nn.Embedding):
            n, k = module.weight.shape
        else:
            n, k = module.out_features, module.in_features
        if layer.n != n or layer.k not in (None, k):
            raise ValueError(f"{name}: expected k, n = {k, n}, got {layer.k, layer.n}")
        has_bias = getattr(module, "bias", None) is not None
        if has_bias != ("bias" in layer.names):
            expected, got = ("a bias", "none") if has_bias else ("no bias", "one")
            raise ValueError(f"{name}: expected {expected}, as the model has it, got {got}")

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
        for names in groups.values():
            found = [name for name in names if self._find_tensor(name, state[name])]
            if len(found) > 1:
                self._untie(found, state[names[0]])
            if not found and never.issuperset(names):
                self.computed += names
            elif not found and not any(fnmatchcase(name, pattern) for name in names for pattern in allow_missing):
                missing.append(names[0])
        if missing:
            raise ValueError(self._missing_message(missing, state))
        filled = {id(state[name]) for name in self.tensors}
        everything = (*self.model.named_parameters(), *self.model.named_buffers())
        empty = [name for name, x in everything if x.is_meta and id(x) not in filled and not _inside(name, places)]
        empty = [name for name in empty if not any(fnmatchcase(name, pattern) for pattern in allow_missing)]
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
        hints = []
        experts = next((name for name in self.checkpoint.names() if re.search(r"(^|\.)experts\.\d+\.", name)), None)
        stacked = [name for name in missing if "experts" in name and state[name].dim() == 3]
        packed = [name for name in missing if name + "_blocks" in self.checkpoint]
        if packed:
            hints.append(f"{packed[0]} is packed in the file (…_blocks, …_scales: MXFP4), which is not read here")
        elif stacked and experts:
            reason = form_of(self.model.get_submodule(stacked[0].rpartition(".")[0]))
            kind = reason if isinstance(reason, str) else "stacked experts of an unknown kind"
            hints.append(
                f"the model stacks a layer's experts in one parameter ({stacked[0]}), and the file names each by "
                f"itself ({experts}), which fits what transformers 5 stacks; the model's are {kind}"
            )
        for name in missing:
            prefix = name.rpartition(".")[0]
            if prefix in self.left:
                hints.append(f"{name}: {self.left[prefix]}")
            elif isinstance(self.model.get_submodule(prefix), PACKED):
                kind = type(self.model.get_submodule(prefix)).__name__
                hints.append(f"{prefix} is a {kind}, for which the file has no quantised weight")
            if len(hints) > 2:
                break
        hints.append("a tensor that may keep what it holds is named in allow_missing=['*.name', ...]")
        used = self._used()
        unused = [name for name in self.checkpoint.names() if name not in state and name not in used]
        no_place = f"; found no place for {some(unused, 5)}" if unused else ""
        return f"source: expected the model's tensors, found none for {some(missing, 5)}{no_place}. {'; '.join(hints)}"

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
            if reason is None and strict:
                unknown.append(name)
            else:
                self.ignored[name] = reason or "the model has no place for it"
        if unknown:
            raise ValueError(
                f"source: expected only the model's tensors, found no place for {some(unknown, 5)}; strict=False "
                "ignores such tensors"
            )


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
