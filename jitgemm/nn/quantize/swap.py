"""Putting a layer wherever a module stands in a model, under a progress bar."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear

HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
SAVED = {"quant_method": "jitgemm"}
"""`quantization_config` of a model with packed layers. How each is packed is in its tensors."""


def put_layers(
    model: torch.nn.Module, places: Mapping[str, list[str]], make: Callable[[str, Any], PackedLinear | PackedExperts],
    doing: str,
) -> None:  # fmt: skip
    """Puts make(name, module) at all places of each module; a module's hooks and training mode go to its layer.

    No reference to an original is left when the next layer is made.

    Args:
        places: {name: all names at which the module stands}.
        doing: "quantising", for the bar.

    Raises:
        ValueError, TypeError: from make, with the name.
    """
    with bar(doing, len(places)) as show:
        for name, at in places.items():
            show(name)
            put_layer(model, name, at, made(make, name, model.get_submodule(name)))


def made(make: Callable[[str, Any], Any], name: str, module: torch.nn.Module) -> Any:
    """make(name, module); a ValueError or TypeError says the name."""
    try:
        return make(name, module)
    except (ValueError, TypeError) as error:
        if str(error).startswith(f"{name}:") or repr(name) in str(error):
            raise
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from error


def put_layer(model: torch.nn.Module, name: str, places: Iterable[str], layer: PackedLinear | PackedExperts) -> None:
    """Puts a layer at all places of the module `name`, whose hooks and training mode it takes over."""
    old: Any = model.get_submodule(name)
    layer.train(old.training)
    layer.batch_invariant = getattr(old, "batch_invariant", False)
    layer.named(name)
    for handle, hook in list(old._forward_pre_hooks.items()):
        if type(hook).__module__.startswith("torch.nn.utils"):  # weight_norm, pruning: they compute the weight
            del old._forward_pre_hooks[handle]
    for hooks in HOOKS:
        setattr(layer, hooks, getattr(old, hooks))  # the same dict, so that handles still remove from it
    for place in places:
        put_module(model, place, layer)


def put_module(model: torch.nn.Module, place: str, module: torch.nn.Module) -> None:
    """Puts a module where another stands."""
    parent, _, child = place.rpartition(".")
    model.get_submodule(parent)._modules[child] = module


def put_tensor(model: torch.nn.Module, names: Iterable[str], old: torch.Tensor, value: torch.Tensor) -> None:
    """Makes value the parameter or buffer of all these names, as old was."""
    is_parameter = isinstance(old, torch.nn.Parameter)
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad) if is_parameter else value
    for name in names:
        parent, _, child = name.rpartition(".")
        module: Any = model.get_submodule(parent)
        (module._parameters if is_parameter else module._buffers)[child] = new


def describe_to_transformers(model: torch.nn.Module, untied: bool) -> None:
    """Says in a transformers model's config whether weights are packed, and whether embeddings are no longer tied.

    The caller's config may serve other models: the model gets a copy. What the config says of the checkpoint that was
    read is no longer true of the model.
    """
    copies: dict[int, Any] = {}
    outermost: dict[str, Any] = {}  # models with a config
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if not hasattr(config, "to_dict"):
            continue
        module.config = config = copy.deepcopy(config, copies)
        if untied and getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
        for key in ("quantization_config", "_pre_quantization_dtype"):  # the latter by transformers 4
            vars(config).pop(key, None)
        if not name.startswith(tuple(outermost)):
            outermost[f"{name}." if name else ""] = module
    for module in outermost.values():
        if any(isinstance(part, (PackedLinear, PackedExperts)) for part in module.modules()):
            module.config.quantization_config = dict(SAVED)


@contextmanager
def bar(doing: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr if that is a terminal; its function names the next of `total`, or what runs before it (False)."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = (rich.BarColumn(16), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    words = (rich.TextColumn(text) for text in ("left", "{task.description}"))
    options: Any = {"console": console, "disable": not console.is_terminal}
    # The time left is by all layers, as they come a block at a time.
    with rich.Progress(rich.TextColumn(doing), *columns, *words, speed_estimate_period=1e6, **options) as progress:
        task, started = progress.add_task("", total=total), False

        def show(name: str, step: bool = True) -> None:
            nonlocal started
            progress.update(task, description=name, advance=int(started and step))
            started |= step

        yield show
        progress.advance(task)
