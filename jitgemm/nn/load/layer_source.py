"""Where a quantised layer of a checkpoint is, how it is read, and how its input is quantised.

`LayerSource.find` looks at config and headers alone; the other methods read the data. Knows no modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from jitgemm.activations.scheme import NAMED, activation_name
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.format import BESIDE, INPUT_SCALES, INPUT_TENSORS, Inputs
from jitgemm.checkpoint.reader import LayerHeader, layer_header, read_header
from jitgemm.kernel.codes import CODES, typed_code
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, LHS_GROUP
from jitgemm.nn.layers.packed import LHS_DTYPES, ON_CPU, Parts, state_dict_parts
from jitgemm.nn.layers.shard_weight import Cut, part_of, unpacked

OF_BESIDE = "scale of the KV cache, attention or outputs, not quantised here"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayerSource:
    """A layer of a checkpoint as config and headers tell it.

    Attributes:
        prefix: its name in the checkpoint.
        names: {suffix: full name} of those of its tensors that are read.
        n, k, group_size: its sizes; k and group_size are None where only the data tells.
        activation: one of ACTIVATIONS; "" of a layer in floats.
        bits: of its weight's codes; 0 in floats.
        header: how it is read; None for the state dict of a `PackedLinear`, and in floats.
        expert: which one it is of tensors that stack experts.
        transposed: whether the module keeps its dense weight as [k, n], as transformers' Conv1D does.
        unused: {full name: reason} of its tensors that are not used.
    """

    checkpoint: Checkpoint = field(repr=False)
    prefix: str
    names: Mapping[str, str]
    n: int
    k: int | None
    group_size: int | None = None
    activation: str = ""
    bits: int = 0
    header: LayerHeader | None = None
    expert: int | None = None
    transposed: bool = False
    unused: Mapping[str, str] = field(default_factory=dict)

    layout = None
    """Of experts, which this is not: see `ExpertsSource`."""

    @classmethod
    def find(
        cls, checkpoint: Checkpoint, prefix: str, activation: str | None = None, format: str | None = None,
        expert: int | None = None, k: int | None = None,
    ) -> LayerSource:  # fmt: skip
        """A quantised layer, from config and headers.

        Args:
            activation: replaces what the checkpoint says.
            format, expert: as `jitgemm.load` takes them.
            k: as `layer_header` takes it.

        Raises:
            ValueError: the layer cannot be read exactly, or has activations that a `PackedLinear` does not.
        """
        names = checkpoint.layer(prefix)
        with checkpoint.errors_that_name(prefix):
            if {"blocks", "meta"} <= names.keys():
                saved = parts_without_data(checkpoint, names, activation)
                weight = saved.weight
                size = weight.group_size
                return cls(checkpoint, prefix, names, weight.n, weight.k, size, saved.activation, weight.bits)
            header = layer_header(checkpoint, prefix, expert, format, k)
            chosen, why_not_static = _activation(header, activation)
            if activation is None and header.scheme.inputs is not None and header.scheme.inputs.instead:
                checkpoint.warn(header.scheme.inputs.replaced_by(chosen))
        sizes, bits = header.sizes, CODES[header.scheme.code].bits
        of_groups = sizes.group_size
        layer = cls(checkpoint, prefix, header.names, sizes.n, sizes.k, of_groups, chosen, bits, header, expert)
        layer = layer.without([name for name in layer.names if re.fullmatch(BESIDE, name)], OF_BESIDE)
        layer = layer.without(("input_global_scale",), "scale of input activations of 4 bits, which have 8 here")
        return layer.without(INPUT_TENSORS, f"static input scale, {why_not_static}") if why_not_static else layer

    @property
    def rotation(self) -> int:
        """128 if its packed weight is rotated, else 0."""
        return 0 if self.header is None else self.header.scheme.rotation(self.k)

    # ---- what it can become ------------------------------------------------------------------------------------------

    @property
    def why_dense(self) -> str | None:
        """Why no packed weight can hold the layer; None where one can."""
        if self.header is not None and self.header.scheme.unpackable:
            return "8-bit codes with zero points"
        if self.header is not None and (why := self.header.scheme.why_dense(self.k)) is not None:
            return why
        size = self.group_size
        per_channel = size is None or (self.k is not None and size >= self.k)
        fits = self.n % 8 == 0 and (self.k or 0) % K_ALIGNMENT == 0
        least = min(GROUP_SIZES) if self.header is None else CODES[self.header.scheme.code].least_group
        if fits and (size is None or per_channel or size % least == 0):
            return None
        return "n is no multiple of 8, k none of 16 or the group size none of 32"

    @property
    def files(self) -> set[str]:
        """Full names of all its tensors, whether they are read or not."""
        return {*self.names.values(), *(self.checkpoint.layer(self.prefix).values() if self.bits else ())}

    def without(self, suffixes: Iterable[str], why: str) -> LayerSource:
        """The same layer without its tensors of these suffixes, whose contents then do not matter."""
        unused = {self.names[suffix]: why for suffix in suffixes if suffix in self.names}
        names = {suffix: name for suffix, name in self.names.items() if name not in unused}
        return replace(self, names=names, unused={**self.unused, **unused})

    def without_bias(self) -> LayerSource:
        """The same layer without its bias, for a module that has none. Raises as `zero_bias`, which reads the bias."""
        return self.without(["bias"], zero_bias(self.checkpoint, self.names["bias"])) if "bias" in self.names else self

    # ---- data --------------------------------------------------------------------------------------------------------

    @property
    def lhs_dtype(self) -> torch.dtype:
        return LHS_DTYPES[self.activation]

    @property
    def correction(self) -> bool | None:
        """As `CanonicalWeight.pack` takes it: none with a scale for each block of a token, else if it can be had."""
        return False if NAMED[self.activation].block else None

    def canonical(self, device: torch.device, cut: Cut | tuple[str, int, int] | None = None) -> CanonicalWeight:
        """The layer, or a rank's part, before packing; only for layers with a header."""
        assert self.header is not None
        name = self.prefix if self.expert is None else f"{self.prefix}[{self.expert}]"
        with self.checkpoint.errors_that_name(name):
            return read_header(self.checkpoint, replace(self.header, names=self.names), device, self.expert, cut)

    def read(
        self, device: torch.device, cut: Cut | None = None, columns: tuple[int, int] | None = None,
        correction: bool | None = None,
    ) -> Parts:  # fmt: skip
        """The layer's data, or a rank's part of it, or these columns: first, and one past the last.

        Args:
            correction: as `CanonicalWeight.pack` takes it; of activations that have none it is False.

        Raises:
            ValueError: a value is out of range.
        """
        if self.header is None:
            with self.checkpoint.errors_that_name(self.prefix):
                read = self.checkpoint.read
                parts = state_dict_parts(
                    {suffix: read(name, _CPU if suffix in ON_CPU else device) for suffix, name in self.names.items()}
                )
                return parts if cut is None else part_of(parts, cut)
        weight = self.canonical(device, cut)
        with self.checkpoint.errors_that_name(self.prefix):
            weight = weight if columns is None else weight.columns(*columns)
            packed = weight.pack(self.lhs_dtype, self.correction if correction is None else correction)
            return Parts(packed, weight.bias, self.activation, weight.input_scale)

    @property
    def dense(self) -> dict[str, Callable[[torch.device, torch.dtype], torch.Tensor]]:
        """{the module's parameter: its values in floats}."""
        return {"weight": self.weight}

    def weight(self, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as its module keeps it, [n, k] or [k, n]: in fp32, or as a layer in floats has it."""
        if not self.bits:
            return self.checkpoint.read(self.names["weight"], device)
        weight = unpacked(self.read(device).weight) if self.header is None else self.canonical(device)
        with self.checkpoint.errors_that_name(self.prefix):
            dense = weight.dequantize()
        return dense.t().contiguous() if self.transposed else dense


def zero_bias(checkpoint: Checkpoint, name: str) -> str:
    """Why a bias may be left out of a model that has no place for it. Raises ValueError for one that is not zero."""
    bias = checkpoint.read(name, _CPU).float()
    others = (bias != 0).nonzero()  # NaN, too
    if len(others):
        at = others[0].tolist()
        raise ValueError(f"{name}: expected no bias, as the model has it, or zeros, got {bias[tuple(at)]:g} at {at}")
    return "a bias of zeros, where the model has none"


def parts_without_data(checkpoint: Checkpoint, names: Mapping[str, str], activation: str | None = None) -> Parts:
    """A packed layer from its own state dict, on the meta device.

    Raises:
        ValueError: as `state_dict_parts`, or for another activation than the layer's.
    """
    tensors = {}
    for suffix, name in names.items():
        info = checkpoint.info(name)
        shell = torch.empty(info.shape, dtype=info.dtype, device="meta")
        tensors[suffix] = checkpoint.read(name, _CPU) if suffix in ON_CPU else shell
    parts = state_dict_parts(tensors)
    if activation not in (None, parts.activation):
        raise ValueError(f"activation: expected {parts.activation}, as the layer was saved, got {activation}")
    return parts


def _activation(header: LayerHeader, wanted: str | None) -> tuple[str, str | None]:
    """(name of a layer's activation, why a static scale is not used; None where it is)."""
    code = CODES[header.scheme.code]
    types = tuple(code.orders[0].decoders)
    own = typed_code(types[0]) if len(types) == 1 else None
    inputs = header.scheme.inputs
    stated, static = activations(inputs, wanted, own)
    if static and not any(suffix in header.names for suffix in INPUT_SCALES):
        if wanted is None:
            raise ValueError(
                "input_scale: expected the static scale that the config names, found none; "
                f"activation={own or stated!r} quantises per token instead"
            )
        static = False
    chosen = wanted or stated or own or "e4m3"
    if NAMED[chosen].dtype not in types:
        instead = "" if wanted else f", as the config says; activation={own!r} replaces that"
        why = (
            f"as the 8-bit weight is {own}" if code.lhs_type else "as codes of e2m1 are multiplied as floats of 8 bits"
        )
        raise ValueError(f"activation: expected {own} activations, {why}, got {chosen}{instead}")
    if static:
        return chosen, None if chosen == stated else f"calibrated for {stated}"
    if wanted is None and inputs is not None and inputs.num_bits < 8:
        return chosen, f"of inputs of {inputs.num_bits} bits, which have 8 here"
    return chosen, "where the config says none or dynamic" if wanted is None else "replaced by activation=..."


def activations(inputs: Inputs | None, wanted: str | None, own: str | None = None) -> tuple[str | None, bool]:
    """(name of the activation that a layer's scheme asks for, or None; whether its scale is static). Inputs of fewer
    than 8 bits get 8, with a scale for each token, and MXFP8's one for each token and 128 k.

    Args:
        inputs: what the scheme says; None for nothing.
        wanted: what the caller wants instead, or None.
        own: the activation that the weight meets; None where it meets all.

    Raises:
        ValueError: a layer has no such activations, and `wanted` does not replace them.
    """
    if inputs is None or inputs.floats:
        return None, False
    if inputs.instead:
        meets = own is None or NAMED[own].dtype == NAMED[inputs.instead].dtype
        return wanted or (inputs.instead if meets else own), False
    dynamic, integers = inputs.dynamic, inputs.type == "int"
    block = dynamic and inputs.symmetric and (inputs.strategy, inputs.group_size) == ("group", LHS_GROUP)
    problem = None
    if inputs.num_bits != 8:
        problem = f"num_bits 8, got {inputs.num_bits}"
    elif inputs.type not in ("int", "float"):
        problem = f"type int or float (e4m3), got {inputs.type}"
    elif inputs.strategy != ("token" if dynamic else "tensor") and not block:
        scales = f"{'dynamic' if dynamic else 'static'} ones per {inputs.strategy}"
        problem = f"dynamic scales per token, or per token and 128, or a static one per tensor, got {scales}"
    elif not dynamic and not inputs.symmetric:
        problem = "static scales to be symmetric, got symmetric: false"
    if problem is None:
        affine = integers and not inputs.symmetric
        return activation_name("s8" if integers else "e4m3", affine=affine, block=block), not dynamic
    if wanted is not None:
        return wanted, False
    instead = own or inputs.per_token
    raise ValueError(f"input_activations: expected {problem}; activation={instead!r} quantises per token instead")
