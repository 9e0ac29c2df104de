"""What the kernels of a model's layers may add up in, set for many layers at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch

from jitgemm.kernel.formats import check_sums
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.packed import Packed, check_sums_of
from jitgemm.nn.report import by_reason


def packed_parts(name: str, layer: torch.nn.Module) -> dict[str, Packed]:
    """A Linear, or the two projections of experts, by name."""
    if isinstance(layer, PackedExperts):
        return {f"{name}.w13": layer.w13, f"{name}.w2": layer.w2}
    return {name: layer} if isinstance(layer, Packed) else {}


def check_layers(sums: str, activations: Iterable[tuple[str, str]]) -> None:
    """Raises TypeError or ValueError unless layers of these names and activations can be added up so."""
    check_sums(sums)
    for name, activation in activations:
        try:
            check_sums_of(sums, activation)
        except ValueError as error:
            raise ValueError(f"{error} (layer {name})") from None


def put_sums(layers: Mapping[str, torch.nn.Module], sums: str, call: str, stacklevel: int = 3) -> None:
    """`set_sums`, with one warning, in the name of the caller's caller, for all weights that are added up in fp32 instead.

    call: who warns.
    """
    if problems := set_sums(layers, sums):
        count, lines = len(problems), "\n".join(by_reason(problems))
        text = f"{call}: {count} weights are added up in fp32, as sums in f16 cannot be had:\n{lines}"
        warnings.warn(text, stacklevel=stacklevel)


def set_sums(layers: Mapping[str, torch.nn.Module], sums: str) -> dict[str, str]:
    """Sets `sums` of layers with 4-bit weights; those of 8 bits are added up as before.

    Returns:
        {name: why} of the weights that are added up in fp32, as f16 cannot be had for them.

    Raises:
        TypeError, ValueError: sums cannot be had with a layer's activations.
    """
    parts = {n: part for name, layer in layers.items() for n, part in packed_parts(name, layer).items()}
    parts = {name: part for name, part in parts.items() if part.weight.bits == 4}
    check_layers(sums, ((name, part.activation) for name, part in parts.items()))
    found = {name: part.prefer_sums(sums) for name, part in parts.items()}
    return {name: _short(why) for name, why in found.items() if why is not None}


def _short(problem: str) -> str:
    """What a weight's own error says, without its name."""
    return "scales that f16 does not hold" if "does not hold" in problem else problem.removeprefix("sums: ")
