"""What `load_` would do to a model: a plan from config and headers, which raises before anything is changed.

`plan_for` finds what becomes of quantised layers, then where every other tensor of the model comes from, then what each
other tensor of the file is for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from jitgemm.activations.scheme import activation_named
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.format import BESIDE, INPUT_TENSORS
from jitgemm.checkpoint.formats import idle, stored_otherwise
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.load.layer_source import OF_BESIDE, zero_bias
from jitgemm.nn.load.plan_layers import Dense, Layers, Sources, find_layers
from jitgemm.nn.load.transformers_names import renamed_for
from jitgemm.nn.quantize.replaceable import PACKED, Filter, Replaceable
from jitgemm.nn.quantize.stacked import experts_layout
from jitgemm.nn.report import some

_IGNORABLE = {rf"(^|\.){BESIDE}$": OF_BESIDE, r"(^|\.)inv_freq$": "rotary frequencies, which the model computes"}
"""Checkpoint tensors that are always ignored."""
_OF_QUANTISED = ("g_idx", *INPUT_TENSORS)
"""What says nothing of a layer that the file has in floats, and some tools write there, too."""
_CPU = torch.device("cpu")

Origin = str | Dense
"""Where a tensor of the model comes from: its name in the checkpoint, or what reads it."""


@dataclass(frozen=True)
class Plan:
    """What to do to a model; made from headers, apart from tied tensors, which are compared.

    Attributes:
        layers: see `Sources`.
        tensors: {name of a tensor of the model: its origin}.
        untied: names of tensors that get a parameter of their own.
        computed: names of tensors that no file holds and the model computes.
        skipped, ignored, kept: see `Report`.
    """

    model: torch.nn.Module
    checkpoint: Checkpoint
    replaceable: Replaceable
    layers: Sources
    tensors: Mapping[str, Origin]
    untied: Collection[str]
    computed: Collection[str]
    skipped: Mapping[str, str]
    ignored: Mapping[str, str]
    kept: Mapping[str, str]


def plan_for(
    model: torch.nn.Module, checkpoint: Checkpoint, filter: Filter | None = None, activation: str | None = None,
    format: str | None = None, allow_missing: Collection[str] = (), strict: bool = True,
) -> Plan:  # fmt: skip
    """What to do to the model. Arguments and errors are `load_`'s; nothing is changed, except that weights get tied."""
    if activation is not None:
        activation_named(activation)
    checkpoint, heads = renamed_for(model, checkpoint)
    tie = getattr(model, "tie_weights", None)
    if tie is not None and any(p.is_meta for p in model.parameters()):
        tie()  # what was made without data may not be tied yet
    replaceable = Replaceable(model)
    layers = find_layers(model, checkpoint, replaceable, filter, activation, format)
    tensors = _find_tensors(model, checkpoint, layers, allow_missing)
    files = heads | layers.files | tensors.files
    files |= _find_unused(model, checkpoint, files.keys(), strict)
    ignored = {name: why for name, why in files.items() if why}
    return Plan(
        model, checkpoint, replaceable, layers.sources, tensors.origins, tensors.untied, tensors.computed,
        layers.skipped, ignored, tensors.kept,
    )  # fmt: skip


# ---- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensors:
    """Where the model's tensors come from: `Plan`'s fields; files: as of `Layers`."""

    origins: dict[str, Origin] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)
    computed: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def _find_tensors(
    model: torch.nn.Module, checkpoint: Checkpoint, layers: Layers, allow_missing: Iterable[str]
) -> _Tensors:
    """Finds where each tensor outside of the layers comes from."""
    tensors, state = _Tensors(), _tensors_outside(model, layers.places)
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    patterns, never = tuple(allow_missing), never_saved(model)
    missing: list[str] = []

    def may_stay(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    kept: list[str] = []
    for names in groups.values():
        origins = ((name, _origin(model, checkpoint, layers, name, state[name])) for name in names)
        held = {name: origin for name, origin in origins if origin is not None}
        tensors.origins.update(held)
        tensors.files.update((origin, "") for origin in held.values() if isinstance(origin, str))
        if held:
            _untie(tensors, model, checkpoint, list(held), state[names[0]])
        elif never.issuperset(names):
            tensors.computed.extend(names)
        else:
            (kept if any(map(may_stay, names)) else missing).append(names[0])
    if missing:
        used = state.keys() | layers.files.keys() | tensors.files.keys()
        unused = [name for name in checkpoint.names() if name not in used]
        if (otherwise := stored_otherwise(checkpoint.config, unused)) is not None:
            raise ValueError(f"source: {otherwise}; found none for {some(missing, 5)}")
        places = f"{some(missing, 5)}; found no place for {some(unused, 5)}" if unused else some(missing, 5)
        why = "; ".join(_why_missing(model, checkpoint, layers, unused, missing, state))
        raise ValueError(f"source: expected the model's tensors, found none for {places}. {why}")
    filled = {id(state[name]) for name in tensors.origins}
    everything = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, x in everything if x.is_meta and id(x) not in filled and not _inside(name, layers.places)]
    tensors.kept.update(dict.fromkeys((*kept, *filter(may_stay, empty)), "as allow_missing says"))
    empty = [name for name in empty if not may_stay(name)]
    if empty:
        raise ValueError(
            f"model: expected no tensor left on the meta device, got {some(empty)}: they are not in the "
            "checkpoint; make the model under accelerate.init_empty_weights(), which leaves such buffers where "
            "they hold data, or on a device that holds data"
        )
    return tensors


def _tensors_outside(model: torch.nn.Module, places: Collection[str]) -> dict[str, torch.Tensor]:
    """{name: tensor} of the model outside of these modules; a packed layer counts as one tensor, called its weight."""
    modules = dict(model.named_modules(remove_duplicate=False))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if _inside(name, places) or not isinstance(tensor, torch.Tensor):
            continue
        packed = next((each for each in _parents(name) if isinstance(modules.get(each), PACKED)), None)
        if packed is not None:  # one that is not loaded again: all of it is missing
            module = modules[packed]
            name, tensor = f"{packed}.weight", (module if isinstance(module, PackedLinear) else module.w13).blocks
        state.setdefault(name, tensor)
    return state


def _origin(
    model: torch.nn.Module, checkpoint: Checkpoint, layers: Layers, name: str, tensor: torch.Tensor
) -> Origin | None:
    """Where the tensor comes from; None if the checkpoint lacks it. Raises ValueError if it does not fit."""
    if name in layers.dense:
        return layers.dense[name]
    prefix = name.rpartition(".")[0]
    if name not in checkpoint or prefix in layers.left or isinstance(model.get_submodule(prefix), PACKED):
        return None
    info = checkpoint.info(name)
    if info.shape != tuple(tensor.shape):
        raise ValueError(
            f"{name}: expected shape {list(tensor.shape)}, got {list(info.shape)} in {checkpoint.place(name)}"
        )
    # Floats are rounded to the model's type, as `load_state_dict` does; nothing else is converted.
    floats = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (tensor.dtype, info.dtype))
    if info.kind or (info.dtype != tensor.dtype and not floats):
        raise ValueError(f"{name}: expected {tensor.dtype}, got {info.kind or info.dtype} in {checkpoint.place(name)}")
    return name


def _untie(
    found: _Tensors, model: torch.nn.Module, checkpoint: Checkpoint, names: list[str], tensor: torch.Tensor
) -> None:
    """If the file holds a tied tensor under several names, reads the first; others that differ get their own."""
    first, *others = names
    for name in others:
        both = first, name
        plain = all(isinstance(found.origins[end], str) for end in both)
        if plain and torch.equal(*(checkpoint.read(end, _CPU).to(tensor.dtype) for end in both)):
            del found.origins[name]
            found.files[name] = "the same as another name of the tied tensor"
        elif len({model.get_submodule(end.rpartition(".")[0]) for end in both}) == 1:
            raise ValueError(f"source: expected {first} and {name} to be equal, as one module of the model has both")
        else:
            found.untied.add(name)


def _why_missing(
    model: torch.nn.Module, checkpoint: Checkpoint, layers: Layers, unused: list[str], missing: list[str],
    state: Mapping[str, torch.Tensor],
) -> Iterator[str]:  # fmt: skip
    """Why tensors are missing: first what the config says of the file, then what is known of each tensor."""
    config = checkpoint.config or {}
    if config and not (layers.sources or layers.dense or layers.left):
        settings = [f"{key} {config[key]!r}" for key in ("quant_method", "format") if isinstance(config.get(key), str)]
        says = ", ".join(settings or ["quantised layers"])
        yield f"the config says {says}, and no layer of the file is of a format that is read here"
    left = {name: next((each for each in _parents(name) if each in layers.left), "") for name in missing}
    for prefix in [prefix for prefix in dict.fromkeys(left.values()) if prefix][:3]:
        yield f"{prefix}: {layers.left[prefix]}"
    missing = [name for name, prefix in left.items() if not prefix]
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in missing}
    stacked = next((name for name in missing if "experts" in name and state[name].dim() == 3), None)
    each = next((name for name in checkpoint.names() if re.search(r"(^|\.)experts\.\d+\.", name)), None)
    if stacked is not None and each is not None:
        kind: Any = experts_layout(owners[stacked]) or "stacked experts of an unknown kind"
        if not isinstance(kind, str):
            kind = f"{type(owners[stacked]).__name__}, with other names of their projections"
        yield (
            f"the model stacks a layer's experts in one parameter ({stacked}), and the file names each by "
            f"itself ({each}), which fits what transformers 5 stacks; the model's are {kind}"
        )
    for name in missing[:3]:
        if isinstance(owners[name], PACKED):
            kind = type(owners[name]).__name__
            yield f"{name.rpartition('.')[0]} is a {kind}, for which the file has no quantised weight"
    longer = next((name for name in unused if missing and name.endswith(f".{missing[0]}")), None)
    if longer is not None:
        yield f"the file calls {missing[0]} {longer}: give its tensors under the model's names"
    if beside := dict.fromkeys(name for name, _ in checkpoint.elsewhere() if name not in checkpoint):
        yield f"the index decides what a folder holds, and does not name {some(list(beside), 5)}, which its files have"
    yield (
        "a tensor that may keep what it holds, which is random in a model that was just made, is named in "
        "allow_missing=['*.name', ...]"
    )


# ---- tensors of the file ---------------------------------------------------------------------------------------------


def _find_unused(model: torch.nn.Module, checkpoint: Checkpoint, used: Collection[str], strict: bool) -> dict[str, str]:
    """{name: reason} of the tensors of the file that are not used.

    Raises:
        ValueError: strict, and there is no reason not to use one.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    listed = {p for m in modules.values() for p in getattr(m, "_keys_to_ignore_on_load_unexpected", None) or ()}
    rules = _IGNORABLE | dict.fromkeys(listed, "the model lists it as ignorable")
    ignored: dict[str, str] = {}
    unknown = []
    for name in checkpoint.names():
        if name in used:
            continue
        reason = next((why for pattern, why in rules.items() if re.search(pattern, name)), None)
        reason = reason or idle(checkpoint.config, name) or _idle(modules, checkpoint, name)
        if reason is None and strict:
            unknown.append(name)
        else:
            ignored[name] = reason or "the model has no place for it"
    otherwise = stored_otherwise(checkpoint.config, unknown)
    if otherwise is not None:
        raise ValueError(f"source: {otherwise}")
    if unknown:
        scales = [name for name in unknown if "scale" in name.rpartition(".")[2] and _in_floats(checkpoint, name)]
        advice = "strict=False ignores such tensors"
        if scales:
            advice = (
                f"{scales[0]} is of a layer whose weight the file has in floats, as a checkpoint that was saved "
                "uncompressed (frozen) has it; strict=False takes the weights in floats"
            )
        raise ValueError(f"source: expected only the model's tensors, found no place for {some(unknown, 5)}; {advice}")
    return ignored


def _in_floats(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the file has the weight in floats of the layer that the tensor belongs to."""
    prefix = name.rpartition(".")[0]
    weight = f"{prefix}.weight" if prefix else "weight"
    return weight in checkpoint and not checkpoint.is_quantised(prefix)


def _idle(modules: Collection[str], checkpoint: Checkpoint, name: str) -> str | None:
    """Why a tensor of the file without a place in the model changes nothing; None if it may change something.

    Raises:
        ValueError: a bias that is not zero, of a module without one.
    """
    prefix, _, child = name.rpartition(".")
    if not _in_floats(checkpoint, name):
        return None
    if child in _OF_QUANTISED:
        return "of a quantised layer, where the file has the weight in floats"
    return zero_bias(checkpoint, name) if child == "bias" and prefix in modules else None


def _inside(name: str, places: Collection[str]) -> bool:
    """True if the tensor is in one of these modules, at any depth."""
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
