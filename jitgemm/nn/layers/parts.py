"""What a packed layer is made of, and the parts of the layer that a state dict holds. Knows no modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from jitgemm.activations.scheme import ACTIVATIONS, NAMED
from jitgemm.dtypes import torch_dtype
from jitgemm.weight.packed import Weight

LHS_DTYPES = {name: torch_dtype(activation.dtype) for name, activation in NAMED.items()}
"""The type that holds a layer's quantised input, by the name of its activation."""
ON_CPU = ("meta", "activation_type")
"""What describes a packed layer in its state dict, for all its experts at once."""


class Parts(NamedTuple):
    """What a `PackedLinear`, or a projection of a `PackedExperts`, is made of; see their constructors."""

    weight: Weight
    bias: torch.Tensor | None
    activation: str
    input_scale: torch.Tensor | None


def state_dict_parts(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Parts:
    """The parts of the layer whose `state_dict(prefix=prefix)` is among `tensors`; memory is shared.

    Raises:
        ValueError: a tensor is missing, or has the wrong shape, type or value.
    """
    weight = Weight.from_state_dict(tensors, prefix)
    name = prefix + "activation_type"
    number = tensors[name].tolist() if name in tensors else None
    if not isinstance(number, list) or len(number) != 1 or not 0 <= number[0] < len(ACTIVATIONS):
        raise ValueError(f"state dict: expected {name!r} to hold one of 0..{len(ACTIVATIONS) - 1}, got {number}")
    sums = weight.row_sum
    if sums is not None and not sums.is_meta and not bool(sums.isfinite().all()):
        raise ValueError(
            f"state dict: {prefix}row_sum: expected finite numbers, got others: a scale is NaN or infinite"
        )
    bias, input_scale = tensors.get(prefix + "bias"), tensors.get(prefix + "input_scale")
    return Parts(weight, bias, ACTIVATIONS[int(number[0])], input_scale)
