"""Putting W4A8Linear into a model in place of its Linears: quantised on the spot, or read from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from jitgemm.nn.checkpoint import Checkpoint, Source, is_quantised, read_linear
from jitgemm.nn.linear import W4A8Linear

Filter = Callable[[str, torch.nn.Linear], bool]


def quantize_(model: torch.nn.Module, filter: Filter | None = None, **options: Any) -> list[str]:
    """Replaces the Linears of a model by `W4A8Linear`s, in place, one at a time; each original is freed as it goes.

    Args:
        model: any module that holds torch.nn.Linear modules. A Linear that stands at several places is quantised once.
        filter: filter(name, linear) -> whether to replace it; a Linear that is chosen and does not fit is an error.
            None: every Linear whose sizes fit (out_features a multiple of 8, in_features of 32), except the output
            embedding (`lm_head`, or what `model.get_output_embeddings()` returns), Linears that share their weight with
            another module, and the ones inside torch.nn.MultiheadAttention, which reads their weights itself. Routers
            of mixtures of experts are not told apart: leave them out with a filter.
        options: as in `W4A8Linear.from_linear`: activation, group_size, symmetric, scale_dtype, device, ....

    Returns:
        The names of the replaced modules, in the model's order.

    Raises:
        ValueError: model is a Linear itself, or a chosen Linear has no 4-bit form; the message names it. Those before
            it have been replaced.
    """
    chosen = [name for name in _places(model) if _chosen(name, model.get_submodule(name), filter, model)]

    def quantised(name: str, linear: torch.nn.Linear) -> W4A8Linear:
        return W4A8Linear.from_linear(linear, **options)

    return _replace(model, chosen, quantised, "quantising")


def load_(
    model: torch.nn.Module,
    source: Source,
    *,
    activation: str | None = None,
    device: torch.device | str | int | None = None,
    strict: bool = True,
) -> list[str]:
    """Fills a model from a quantised checkpoint: its quantised Linears become `W4A8Linear`s, all else is copied.

    A model from transformers is made by `AutoModelForCausalLM.from_config(config)`; what it holds before does not
    matter. The names in the checkpoint are the model's. Also reads what `safetensors.torch.save_file` or `save_model`
    wrote of a model that was quantised here.

    Args:
        source: folder, file, tensors by name or an open `jitgemm.checkpoint.reader.Checkpoint`, as in `jitgemm.load`.
        activation: "e4m3", "int8" or "int8_affine"; None for what the checkpoint says, see
            `W4A8Linear.from_checkpoint`.
        device: where the model goes; None for where each of its tensors is (the GPU, if there is one, for those on the
            meta device).
        strict: refuse tensors that the model lacks, and the other way round.

    Returns:
        The names of the replaced modules, in the model's order.

    Raises:
        KeyError, ValueError: the checkpoint cannot be read exactly, or does not fit the model; the message says where.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    target = None if device is None else torch.device(device)
    chosen = [name for name in _places(model) if is_quantised(checkpoint, name)]

    def read(name: str, linear: torch.nn.Linear) -> W4A8Linear:
        where = target or _device(linear.weight)
        layer = read_linear(W4A8Linear, checkpoint, name, activation=activation, device=where)
        sizes = (linear.in_features, linear.out_features)
        if (layer.in_features, layer.out_features) != sizes:
            raise ValueError(f"{name}: expected k, n = {sizes}, got {layer.in_features, layer.out_features}")
        if (layer.bias is None) != (linear.bias is None):
            raise ValueError(
                f"{name}: expected {'no bias' if linear.bias is None else 'a bias'}, as the model has it, got "
                f"{'none' if layer.bias is None else 'one'}"
            )
        return layer

    replaced = _replace(model, chosen, read, "loading")
    _copy_plain(model, checkpoint, replaced, target, strict)
    if target is not None:
        model.to(target)
    return replaced


# ---- finding and replacing -------------------------------------------------------------------------------------------


def _places(model: torch.nn.Module) -> dict[str, list[str]]:
    """The Linears of a model by their first name, each with all names at which it stands."""
    if isinstance(model, torch.nn.Linear):
        raise ValueError("model: expected a module that holds Linears, got a Linear; use W4A8Linear.from_linear")
    of_attention = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear) and not isinstance(module, of_attention):
            names.setdefault(module, []).append(name)
    return {same[0]: same for same in names.values()}  # no modules: originals are to be freed


def _chosen(name: str, linear: torch.nn.Linear, filter: Filter | None, model: torch.nn.Module) -> bool:
    fits = linear.out_features % 8 == 0 and linear.in_features % 32 == 0 and linear.weight.numel() > 0
    if filter is not None:
        wanted = bool(filter(name, linear))
        if wanted and not fits:
            raise ValueError(
                f"{name}: expected out_features a multiple of 8 and in_features a multiple of 32, got "
                f"{linear.out_features} and {linear.in_features}"
            )
        return wanted
    if not fits or name.rpartition(".")[2] == "lm_head":
        return False
    output = getattr(model, "get_output_embeddings", lambda: None)()
    owners = [module for module in model.modules() for p in module._parameters.values() if p is linear.weight]
    return linear is not output and all(owner is linear for owner in owners)


def _replace(
    model: torch.nn.Module, chosen: list[str], make: Callable[[str, torch.nn.Linear], W4A8Linear], doing: str
) -> list[str]:
    """Puts make(name, linear) wherever a chosen Linear stands. No reference to an original outlives its turn."""
    places = _places(model)
    for name in _progress(chosen, doing):
        linear = model.get_submodule(name)
        try:
            layer = make(name, linear)
        except ValueError as error:
            raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from error
        layer.train(linear.training)
        for place in places[name]:
            parent, _, child = place.rpartition(".")
            model.get_submodule(parent)._modules[child] = layer
        del linear
    return chosen


def _progress(names: list[str], doing: str) -> Iterable[str]:
    """The names, under a bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(TextColumn(doing), *columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(names))
        for name in names:
            progress.update(bar, description=name)
            yield name
            progress.advance(bar)


# ---- what is not quantised -------------------------------------------------------------------------------------------


def _device(tensor: torch.Tensor) -> torch.device:
    if not tensor.is_meta:
        return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _copy_plain(
    model: torch.nn.Module, checkpoint: Checkpoint, replaced: list[str], device: torch.device | None, strict: bool
) -> None:
    """Copies the tensors that are no part of a W4A8Linear; ties those that are one, and compares names."""
    layers = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, W4A8Linear)]
    inside = tuple(name + "." for name in layers)
    plain = {name: x for name, x in model.state_dict(keep_vars=True).items() if not name.startswith(inside)}
    loaded = [name for name in plain if name in checkpoint]
    with torch.no_grad():
        for name in loaded:
            tensor, info = plain[name], checkpoint.info(name)
            if info.shape != tuple(tensor.shape):
                raise ValueError(f"{name}: expected shape {list(tensor.shape)}, got {list(info.shape)}")
            # Floats are rounded to the model's type, as `load_state_dict` does; nothing else is converted.
            floats = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (tensor.dtype, info.dtype))
            if info.dtype != tensor.dtype and not floats:
                raise ValueError(f"{name}: expected {tensor.dtype}, got {info.dtype}")
            if tensor.is_meta:
                value = checkpoint.read(name, device or _device(tensor)).to(tensor.dtype)
                _put(model, name, tensor, value)
            else:
                tensor.copy_(checkpoint.read(name, tensor.device))
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    now = model.state_dict(keep_vars=True)
    same = {id(now[name]) for name in loaded}
    missing = [name for name in plain if name not in loaded and id(now[name]) not in same]
    read = tuple(name + "." for name in replaced)
    unknown = [name for name in checkpoint.names() if name not in plain and not name.startswith(read)]
    if strict and (missing or unknown):
        found = (("found none for", missing), ("found no place for", unknown))
        told = [f"{what} {', '.join(names[:5])}{' and others' * (len(names) > 5)}" for what, names in found if names]
        raise ValueError(f"source: expected the model's tensors, {'; '.join(told)}")
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(
            f"model: expected no tensor left on the meta device, got {', '.join(left[:5])}: these are not in the "
            "checkpoint; make the model on a device that holds data"
        )


def _put(model: torch.nn.Module, name: str, old: torch.Tensor, value: torch.Tensor) -> None:
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    if isinstance(old, torch.nn.Parameter):
        module._parameters[child] = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        module._buffers[child] = value
