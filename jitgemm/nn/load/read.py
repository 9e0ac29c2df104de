"""A layer of a checkpoint: the weight comes from `jitgemm.checkpoint`, the kind of activations is decided here.

`layer_of` looks at config and headers alone, `read` then reads the data. Knows no modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.format import INPUT_SCALES, INPUT_ZERO_POINTS, KV_CACHE_SCALES, Inputs
from jitgemm.checkpoint.reader import LayerHeader, errors_that_name, layer_header, read_header
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, LHS_GROUP
from jitgemm.nn.layers.shard_weight import Cut, part_of_bias, part_of_weight
from jitgemm.weight.packed import Weight

ACTIVATIONS = ("e4m3", "int8", "int8_affine", "e4m3_block", "int8_block")
"""How a layer quantises its input: fp8 e4m3, int8, or int8 with a zero point per token; e4m3 or int8 with a scale per
token and 128 values. Append only: files hold the number."""

CODES = {name: torch.float8_e4m3fn if name.startswith("e4m3") else torch.int8 for name in ACTIVATIONS}
"""Kinds of activations, and the type that holds them."""

BLOCK = "_block"
"""With which the kinds end that have a scale per token and 128 values."""

ZERO_BIAS = "a bias of zeros, where the model has none"
ZEROS = "8-bit codes with zero points"
OF_CACHE = "scale of the KV cache or attention, not quantised here"
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CPU = torch.device("cpu")
ON_CPU = ("meta", "activation_type")
"""What describes a packed layer in its state dict, for all its experts at once."""


class Parts(NamedTuple):
    """What a `PackedLinear`, or a projection of a `PackedExperts`, is made of; see their constructors."""

    weight: Weight
    bias: torch.Tensor | None
    activation: str
    input_scale: torch.Tensor | None


@dataclass(frozen=True)
class Layer:
    """A quantised layer as config and headers tell it.

    Attributes:
        prefix: its name in the checkpoint.
        names: {suffix: full name} of its tensors.
        n, k, group_size: its sizes; k and group_size are None where only the data tells.
        activation: one of ACTIVATIONS.
        static: whether its input scale is used.
        bits: of its weight's codes, 4 or 8.
        header: how it is read; None for the state dict of a `PackedLinear`.
        unused: {full name: reason} of its tensors that the layer makes no use of.
        experts: how many a packed weight holds; None for one of a `PackedLinear`, and for all others.
        transposed: whether the module keeps its dense weight as [k, n], as transformers' Conv1D does.
    """

    prefix: str
    names: Mapping[str, str]
    n: int
    k: int | None
    group_size: int | None
    activation: str
    static: bool = False
    bits: int = 4
    header: LayerHeader | None = None
    unused: Mapping[str, str] = field(default_factory=dict)
    experts: int | None = None
    transposed: bool = False


def check_activation(activation: object) -> str:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return activation  # type: ignore[return-value]


def packable(layer: Layer) -> bool:
    """Whether a packed weight can hold the layer."""
    if has_zeros(layer):
        return False
    per_channel = layer.group_size is None or (layer.k is not None and layer.group_size >= layer.k)
    fits = layer.n % 8 == 0 and (layer.k or 0) % K_ALIGNMENT == 0
    return fits and (per_channel or layer.group_size % min(GROUP_SIZES) == 0)


def has_zeros(layer: Layer) -> bool:
    """Whether its 8-bit codes may have zero points."""
    return layer.header is not None and layer.header.scheme.unpackable


def is_quantised(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the layer has tensors, and its weight is no plain one of floats."""
    names = checkpoint.layer(prefix)
    if "weight" not in names:
        return bool(set(names) - {"bias"})
    info = checkpoint.info(names["weight"])
    return bool(info.kind) or info.dtype not in _PLAIN_DTYPES


def layer_of(
    checkpoint: Checkpoint,
    prefix: str,
    activation: str | None = None,
    format: str | None = None,
    expert: int | None = None,
    k: int | None = None,
) -> Layer:
    """A quantised layer, from config and headers.

    Args:
        activation: replaces what the checkpoint says.
        format, expert: as `jitgemm.load` takes them.
        k: as `layer_header` takes it.

    Raises:
        ValueError: the layer cannot be read exactly, or has activations that a `PackedLinear` does not.
    """
    names = checkpoint.layer(prefix)
    with errors_that_name(checkpoint, prefix):
        if {"blocks", "meta"} <= set(names):
            return _packed_layer(checkpoint, prefix, names, activation)
        return _layer(layer_header(checkpoint, prefix, expert, format, k), activation)


def _layer(header: LayerHeader, activation: str | None) -> Layer:
    scheme, names = header.scheme, header.names
    own = None if scheme.code == "int4" else scheme.code
    said, static = activations(scheme.inputs, activation, own)
    unused = {name: OF_CACHE for suffix, name in names.items() if suffix in KV_CACHE_SCALES}
    if "output_scale" in names:
        unused[names["output_scale"]] = "scale of output activations, which are not quantised"
    scale = next((suffix for suffix in INPUT_SCALES if suffix in names), None)
    why = "where the config says none or dynamic" if activation is None else "replaced by activation=..."
    if static and scale is None:
        if activation is None:
            raise ValueError(
                "input_scale: expected the static scale that the config names, found none; "
                f"activation={said!r} quantises per token instead"
            )
        static = False
    chosen = activation or said or own or "e4m3"
    if own is not None and CODES[chosen] != CODES[own]:
        instead = "" if activation else f", as the config says; activation={own!r} replaces that"
        raise ValueError(f"activation: expected {own} activations, as the 8-bit weight is {own}, got {chosen}{instead}")
    if static and chosen != said:
        static, why = False, f"calibrated for {said}"
    sizes = header.sizes
    bits = 4 if own is None else 8
    layer = Layer(header.prefix, names, sizes.n, sizes.k, sizes.group_size, chosen, static, bits, header, unused)
    return layer if static else without_input_scale(layer, f"static input scale, {why}")


def without_input_scale(layer: Layer, why: str) -> Layer:
    """The layer without a static scale of its input. It is not read either: what it holds need not be right."""
    assert layer.header is not None
    dropped = {suffix: layer.names[suffix] for suffix in (*INPUT_SCALES, *INPUT_ZERO_POINTS) if suffix in layer.names}
    names = {suffix: name for suffix, name in layer.header.names.items() if suffix not in dropped}
    unused = {**layer.unused, **dict.fromkeys(dropped.values(), why)}
    return replace(layer, static=False, header=replace(layer.header, names=names), unused=unused)


def without_bias(checkpoint: Checkpoint, layer: Layer) -> Layer:
    """The layer for a module that has no bias. Reads the bias that the checkpoint has.

    Raises:
        ValueError: it is not zero.
    """
    name = layer.names["bias"]
    unused = {**layer.unused, name: zero_bias(checkpoint, name)}
    names = {suffix: full for suffix, full in layer.names.items() if suffix != "bias"}
    header = None if layer.header is None else replace(layer.header, names=names)
    return replace(layer, names=names, header=header, unused=unused)


def zero_bias(checkpoint: Checkpoint, name: str) -> str:
    """Why a bias may be left out of a model that has no place for it. Raises ValueError for one that is not zero."""
    bias = checkpoint.read(name, _CPU).float()
    others = (bias != 0).nonzero()  # NaN, too
    if len(others):
        at = others[0].tolist()
        raise ValueError(f"{name}: expected no bias, as the model has it, or zeros, got {bias[tuple(at)]:g} at {at}")
    return ZERO_BIAS


def read(
    checkpoint: Checkpoint,
    layer: Layer,
    device: torch.device,
    cut: Cut | None = None,
    columns: tuple[int, int] | None = None,
) -> Parts:
    """The layer's data, or a rank's part of it, or these columns: first, and one past the last.

    Raises:
        ValueError: a value is out of range.
    """
    with errors_that_name(checkpoint, layer.prefix):
        if layer.header is None:
            tensors = {
                suffix: checkpoint.read(name, _CPU if suffix in ON_CPU else device)
                for suffix, name in layer.names.items()
            }
            parts = state_dict_parts(tensors)
            if cut is None:
                return parts
            part = part_of_weight(parts.weight, *cut, CODES[parts.activation])
            return parts._replace(weight=part, bias=part_of_bias(parts.bias, *cut))
        weight = read_header(checkpoint, layer.header, device, cut=cut)
        weight = weight if columns is None else weight.columns(*columns)
        packed = weight.pack(CODES[layer.activation])
    return Parts(packed, weight.bias, layer.activation, weight.input_scale if layer.static else None)


def read_dense(checkpoint: Checkpoint, layer: Layer, device: torch.device) -> torch.Tensor:
    """The layer's weight in fp32, as its module keeps it: [n, k], or [k, n]; columns in the order of its input."""
    if layer.header is not None:
        with errors_that_name(checkpoint, layer.prefix):
            dense = read_header(checkpoint, layer.header, device).dequantize()
    else:
        weight = read(checkpoint, layer, device).weight
        dense = weight.dequantize()
        if weight.permutation is not None:
            dense = torch.empty_like(dense).index_copy_(1, weight.permutation.long(), dense)
    return dense.t().contiguous() if layer.transposed else dense


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


def packed_parts(checkpoint: Checkpoint, names: Mapping[str, str]) -> Parts:
    """A packed layer from its own state dict, on the meta device. Raises ValueError as `state_dict_parts` does."""
    tensors = {}
    for suffix, name in names.items():
        info = checkpoint.info(name)
        shell = torch.empty(info.shape, dtype=info.dtype, device="meta")
        tensors[suffix] = checkpoint.read(name, _CPU) if suffix in ON_CPU else shell
    return state_dict_parts(tensors)


def _packed_layer(checkpoint: Checkpoint, prefix: str, names: Mapping[str, str], activation: str | None) -> Layer:
    """A layer from its own state dict, its sizes checked on tensors without data."""
    found = packed_parts(checkpoint, names)
    if activation is not None and activation != found.activation:
        raise ValueError(f"activation: expected {found.activation}, as the layer was saved, got {activation}")
    weight = found.weight
    size = (weight.n, weight.k, weight.group_size)
    return Layer(prefix, names, *size, found.activation, bits=weight.bits, experts=weight.experts)


def activations(inputs: Inputs | None, wanted: str | None, own: str | None = None) -> tuple[str | None, bool]:
    """(kind of activations that a layer's scheme asks for, or None; whether its scale is static).

    Args:
        inputs: what the scheme says; None for nothing.
        wanted: what the caller wants instead, or None.
        own: the kind that a weight of 8 bits meets; None for one of 4.

    Raises:
        ValueError: a layer has no such activations, and `wanted` does not replace them.
    """
    if inputs is None or inputs.floats:
        return None, False
    grouped = inputs.dynamic and inputs.strategy == "group" and inputs.group_size == LHS_GROUP
    block = BLOCK if grouped and inputs.symmetric else ""
    problem = None
    if inputs.num_bits != 8:
        problem = f"num_bits 8, got {inputs.num_bits}"
    elif inputs.type not in ("int", "float"):
        problem = f"type int or float (e4m3), got {inputs.type}"
    elif inputs.strategy != ("token" if inputs.dynamic else "tensor") and not block:
        found = f"{'dynamic' if inputs.dynamic else 'static'} ones per {inputs.strategy}"
        problem = f"dynamic scales per token, or per token and 128, or a static one per tensor, got {found}"
    elif not inputs.dynamic and not inputs.symmetric:
        problem = "static scales to be symmetric, got symmetric: false"
    if problem is not None:
        if wanted is not None:
            return wanted, False
        instead = own or ("int8" if inputs.type == "int" else "e4m3")
        raise ValueError(f"input_activations: expected {problem}; activation={instead!r} quantises per token instead")
    if inputs.type == "float":
        return f"e4m3{block}", not inputs.dynamic
    return f"int8{block}" if inputs.symmetric else "int8_affine", not inputs.dynamic
