"""A layer read from a checkpoint: `jitgemm.checkpoint.reader` reads the weight, the kind of activations is decided here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.checkpoint import formats
from jitgemm.checkpoint.reader import Checkpoint, read_layer

if TYPE_CHECKING:
    from jitgemm.nn.linear import W4A8Linear

CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int8_affine": torch.int8}
"""Kinds of activations, and the type that holds them."""

Source = str | os.PathLike[str] | Mapping[str, torch.Tensor] | Checkpoint

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def is_quantised(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the layer's tensors are anything but a plain weight and bias."""
    names = checkpoint.layer(prefix)
    if not names or not set(names) <= {"weight", "bias"}:
        return bool(names)
    return "weight" in names and checkpoint.info(names["weight"]).dtype not in _PLAIN_DTYPES


def read_linear(
    layer: type[W4A8Linear],
    source: Source,
    prefix: str,
    *,
    activation: str | None = None,
    device: torch.device | str | int | None = None,
) -> W4A8Linear:
    """`layer.from_checkpoint`; source may also be an open `Checkpoint`."""
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    names = checkpoint.layer(prefix)
    if {"blocks", "meta"} <= set(names):
        return _read_packed(layer, checkpoint, names, prefix, activation, device)
    weight = read_layer(checkpoint, prefix, device=device)
    said, static = activations(_scheme(checkpoint, names, prefix), activation, prefix)
    input_scale = weight.input_scale
    if said is None:  # a format without a config: its static scales are those of e4m3
        said = "e4m3"
    elif static and input_scale is None and activation in (None, said):
        raise ValueError(f"input_scale: expected the static scale that the config names, found none (layer {prefix!r})")
    chosen = activation or said
    if chosen != said:
        input_scale = None  # it was calibrated for other codes
    packed = weight.pack(CODES[chosen]) if chosen in CODES else weight.pack()
    return layer.from_weight(packed, weight.bias, activation=chosen, input_scale=input_scale)


def _scheme(checkpoint: Checkpoint, names: Mapping[str, str], prefix: str) -> Mapping[str, Any]:
    """What the checkpoint's config says of this layer."""
    infos = {suffix: checkpoint.info(name) for suffix, name in names.items()}
    return formats.find(infos, checkpoint.config, prefix).for_layer(checkpoint.config, prefix) or {}


def activations(scheme: Mapping[str, Any], wanted: str | None, prefix: str) -> tuple[str | None, bool]:
    """(kind of activations that a compressed-tensors scheme asks for, or None; whether its scale is static).

    Raises:
        ValueError: the layer has no such activations, and `wanted` does not replace them.
    """
    inputs = scheme.get("input_activations")
    if not inputs or inputs.get("num_bits", 8) == 16:
        return None, False
    dynamic = bool(inputs.get("dynamic", False))
    problem = None
    if inputs.get("num_bits", 8) != 8:
        problem = f"num_bits 8, got {inputs['num_bits']}"
    elif inputs.get("strategy") != ("token" if dynamic else "tensor"):
        kind = "dynamic" if dynamic else "static"
        problem = f"dynamic scales per token or a static one per tensor, got {kind} ones per {inputs.get('strategy')}"
    elif not dynamic and not inputs.get("symmetric", True):
        problem = "static scales to be symmetric, got symmetric: false"
    if problem is not None:
        if wanted is not None:
            return wanted, False
        raise ValueError(
            f"input_activations: expected {problem} (layer {prefix!r}); activation=... quantises per token instead"
        )
    if inputs.get("type", "int") == "float":
        return "e4m3", not dynamic
    return "int8" if inputs.get("symmetric", True) else "int8_affine", not dynamic


def _read_packed(  # type: ignore[no-untyped-def]
    layer, checkpoint, names, prefix, activation, device
) -> W4A8Linear:
    """A layer from its own `state_dict`."""
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = ("meta", "activation_type")
    tensors = {
        suffix: checkpoint.read(name, torch.device("cpu") if suffix in on_cpu else device)
        for suffix, name in names.items()
    }
    found = layer.from_state_dict(tensors)
    if activation is not None and activation != found.activation:
        raise ValueError(f"activation: expected {found.activation}, as layer {prefix!r} was saved, got {activation}")
    return found
