"""What a checkpoint format is: the scheme that a config names for a layer, and the tensors that hold such a layer.

Reading, sizes, cutting for ranks, vLLM's parameters and warm-up all derive from `Format.scheme` and `Format.tensors`.
Adding a format takes one subclass of `Format` and `formats.register`. Knows no format, no file and no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe, dtype_name, one_of

FLOATS = tuple(torch_dtype(name) for name in REAL_TYPES)
"""What a scale may be."""
INT32 = (torch.int32,)
INT8 = (torch.int8,)
BYTES = (torch.int8, torch.uint8)
E8M0 = (torch.float8_e8m0fnu, torch.uint8)
"""Scales that are powers of two, as such or as bytes."""
CODE_TYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
"""The dtypes of the 8-bit codes."""

Config = Mapping[str, Any] | None
"""A quantization_config."""
Headers = Mapping[str, Any] | None
"""A layer's tensors, or their headers, by suffix."""

INPUT_SCALES = ("input_scale", "activation_scale", "qscale_act", "_weight_act_quant_scale")
"""What formats call a layer's static activation scale."""
INPUT_ZERO_POINTS = ("input_zero_point", "_weight_act_quant_zero_point")
"""What they call its zero point."""
KV_CACHE_SCALES = frozenset({"k_scale", "v_scale"})
"""What ModelOpt puts next to k_proj and v_proj. They say nothing of the weights."""


# ---- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dim:
    """A dimension of a tensor: `per` rows, columns or groups of the layer share an element along it.

    Attributes:
        of: "n" rows, "k" columns, "G" groups of columns, or "parts", an element for each of the layers that vLLM joins.
            Any other letter is a size of the format's own, along which nobody can cut.
    """

    of: str
    per: int = 1

    def __truediv__(self, per: int) -> Dim:
        return Dim(self.of, per)

    def __str__(self) -> str:
        return self.of if self.per == 1 else f"{self.of} / {self.per}"


N, K, G, PARTS = Dim("n"), Dim("k"), Dim("G"), Dim("parts")


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of a layer as a format stores it.

    Attributes:
        dtypes: those that it may have, the usual one first.
        dims: `Dim`s and numbers. (PARTS,) is a single element, in a file of any number of dimensions.
        optional: whether files may lack it.
    """

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[Dim | int, ...]
    optional: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    def axis(self, *letters: str) -> int | None:
        """Which dimension is one of "n", "k", "G", ...; None for none."""
        return next((i for i, dim in enumerate(self.dims) if isinstance(dim, Dim) and dim.of in letters), None)

    @property
    def known(self) -> bool:
        """Whether rows, columns and groups are all that it extends along."""
        return all(isinstance(dim, int) or dim.of in ("n", "k", "G", "parts") for dim in self.dims)

    def per(self, axis: int) -> int:
        """How many rows, columns or groups share an element along a dimension."""
        dim = self.dims[axis]
        return dim.per if isinstance(dim, Dim) else 1

    @property
    def is_scale(self) -> bool:
        """Whether it is in the type of the layer's scales, which files choose."""
        return self.dtypes[: len(FLOATS)] == FLOATS

    @property
    def packed(self) -> tuple[int, int] | None:
        """(dimension, values to a word) of packed integers."""
        found = [(i, self.per(i)) for i in range(len(self.dims)) if self.per(i) > 1]
        return found[0] if found and not self.dtype.is_floating_point else None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for {letter: size}."""
        return tuple(dim if isinstance(dim, int) else ceil_div(sizes[dim.of], dim.per) for dim in self.dims)

    def __str__(self) -> str:
        return f"{' or '.join(map(dtype_name, self.dtypes))} [{', '.join(map(str, self.dims))}]"


Layout = Mapping[str, TensorLayout]
"""A layer's tensors by suffix: what stands behind the layer's name."""


def stored(dtypes: torch.dtype | tuple[torch.dtype, ...], *dims: Dim | int, optional: bool = False) -> TensorLayout:
    """`TensorLayout` in the words of a table: stored(INT32, K / 8, N)."""
    return TensorLayout(dtypes if isinstance(dtypes, tuple) else (dtypes,), dims, optional)


def measure(tensors: Mapping[str, Any], layout: Layout) -> dict[str, int]:
    """The size that each letter of the layout stands for, from tensors or their headers.

    Raises:
        ValueError: a tensor is missing, has another dtype or number of dimensions, or contradicts one further up.
    """
    sizes: dict[str, int] = {}
    for name, expected in layout.items():
        if name not in tensors:
            if expected.optional:
                continue
            raise ValueError(f"{name}: expected {expected}, found none")
        tensor = tensors[name]
        if expected.dims == (PARTS,):
            check_single(name, tensor)
            continue
        if tensor.dtype not in expected.dtypes or tensor.dim() != len(expected.dims):
            raise ValueError(f"{name}: expected {expected}, got {describe(tensor)}")
        for dim, size in zip(expected.dims, tensor.shape):
            if isinstance(dim, Dim):
                sizes.setdefault(dim.of, size * dim.per)
        check_shape(name, tensor, *expected.shape(sizes))
    return sizes


def fits(tensors: Mapping[str, Any], layout: Layout) -> bool:
    """Whether tensors or their headers are of this layout."""
    try:
        return bool(measure(tensors, layout))
    except ValueError:
        return False


def check_shape(name: str, tensor: torch.Tensor | TensorInfo, *shape: int) -> None:
    """Raises ValueError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


def check_single(name: str, tensor: torch.Tensor | TensorInfo) -> None:
    """Raises ValueError for more than one element, or none."""
    if math.prod(tensor.shape) != 1:
        raise ValueError(f"{name}: expected one element, got shape {list(tensor.shape)}")


def check_scale(name: str, tensor: torch.Tensor | TensorInfo) -> None:
    """Raises ValueError for a type that scales do not have."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected {one_of(REAL_TYPES)}, got {dtype_name(tensor.dtype)}")


def check_known(tensors: Iterable[str], known: Sequence[str]) -> None:
    """Raises ValueError for a tensor that is not among `known`: what it means for the weight is not known either."""
    unknown = sorted(set(tensors) - set(known) - {"bias"} - KV_CACHE_SCALES)
    if unknown:
        raise ValueError(f"{unknown[0]}: expected only {', '.join(known)} and bias, got also {', '.join(unknown)}")


# ---- schemes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """How a checkpoint has a layer's input quantised, in compressed-tensors' words.

    Attributes:
        type: "int" or "float" (e4m3).
        num_bits: 8, or 16 for an input that stays in floats.
        strategy: what a scale belongs to: "token", "tensor", or "group" of group_size values.
        dynamic: False for a static scale, which the checkpoint has.
    """

    type: Any = "int"
    num_bits: int = 8
    strategy: Any = "token"
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = True

    @property
    def floats(self) -> bool:
        """Whether the input is not quantised."""
        return self.num_bits == 16

    @classmethod
    def of(cls, said: Mapping[str, Any] | None) -> Inputs:
        """From compressed-tensors' `input_activations`; nothing there means that the input stays in floats."""
        if not said:
            return cls(num_bits=16)
        bits, type, symmetric = said.get("num_bits", 8), said.get("type", "int"), said.get("symmetric", True)
        dynamic = bool(said.get("dynamic", False))
        return cls(type, bits, said.get("strategy"), said.get("group_size"), symmetric, dynamic)


@dataclass(frozen=True)
class Scheme:
    """Everything that a quantization_config, and the headers where they are known, say of one layer.

    Attributes:
        format: name of the format.
        code: name of the weight's code: "int4", "int8" or "e4m3".
        group_size: columns that share a scale; -1 for a whole row; None where only shapes tell.
        strategy: what a scale belongs to: "group", "channel", "tensor" or "block".
        block: (rows, columns) that share a scale, with strategy "block".
        zero_points: whether codes may have zero points.
        ordered: whether columns may be in activation order.
        inputs: how the input is quantised; None where nothing says.
        form: the variant of the format's tensors, in its own words.
        found: layouts of those tensors that files have in several forms, as headers show them.
        settings: the layer's config, for the format's reader.
    """

    format: str
    code: str = "int4"
    group_size: int | None = None
    strategy: str = "group"
    block: tuple[int, int] | None = None
    zero_points: bool = False
    ordered: bool = False
    inputs: Inputs | None = None
    form: str = ""
    found: Layout = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def static(self) -> dict[str, TensorLayout]:
        """The static scale of the input, where there is one."""
        given = self.inputs is not None and not self.inputs.dynamic
        return {"input_scale": stored(torch.float32, PARTS, optional=True)} if given else {}

    @property
    def eight_bits(self) -> bool:
        """Whether its codes are bytes."""
        return self.code in CODE_TYPES

    def by_row(self, name: str, scale: torch.Tensor, n: int) -> torch.Tensor:
        """[n, G] from a scale of `found`, which rows, a block's or all, may share; of e8m0 the same numbers in fp32."""
        scale, layout = scale.view(torch.float8_e8m0fnu).float() if scale.dtype in E8M0 else scale, self.found[name]
        if layout.dims == (PARTS,):
            return scale.reshape(1, 1).expand(n, 1)
        return scale.reshape(len(scale), -1).repeat_interleave(layout.per(0), 0)[:n]

    def columns_of(self, name: str, k: int) -> int:
        """How many of k columns share an element of it."""
        layout = self.found[name]
        return k if (axis := layout.axis("k")) is None else layout.per(axis)

    @property
    def unpackable(self) -> bool:
        """Whether 8-bit codes may have zero points, which no packed weight holds: the layer is dequantised."""
        return self.zero_points and self.eight_bits

    def groups(self, k: int | None) -> Dim | int:
        """G, or 1 where k is known to be one group."""
        return 1 if k is not None and not 0 < (self.group_size or 0) < k else G


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, as far as headers tell: n, k, and the columns of a group. None where only values tell."""

    n: int
    k: int | None
    group_size: int | None = None


class Format:
    """A checkpoint format; one subclass each, and one instance in `formats.FORMATS`.

    Attributes:
        name: as `load(format=...)` takes it.
        methods: the quant_methods of a config that mean its tensors.
        also: names of tensors that may be there without being in `tensors`.
        cuts: whether a rank's part of a layer is a part of each of its tensors.
    """

    name: str
    methods: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    cuts: bool = False

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        """Whether a layer's tensors are of this format. Raises nothing. No two formats may detect the same layer.

        Args:
            names: {what stands behind the layer's name: header}.
            config: the model's quantization_config.
        """
        raise NotImplementedError

    def left_out(self, config: Config, prefix: str) -> str | None:
        """The setting that leaves a layer in floats, as a message; None for a quantised layer."""
        return None

    def scheme(self, config: Config, prefix: str = "", headers: Headers = None) -> Scheme | None:
        """What config and headers say of one layer; None where the config leaves it out.

        Args:
            config: the model's quantization_config, or None.
            prefix: the layer's name, for configs that differ between layers.
            headers: the layer's tensors or their headers by suffix. None: what the format's engines expect by the config.

        Raises:
            ValueError: a setting is not supported; the message names it.
        """
        raise NotImplementedError

    def tensors(self, scheme: Scheme, k: int | None = None) -> dict[str, TensorLayout]:
        """The tensors of a layer, by suffix.

        Args:
            k: columns of the layer, if known: a dimension of groups is then 1 where a row is one group.
        """
        return dict(scheme.found)

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        """Sizes of a layer, from tensors or their headers.

        Raises:
            ValueError: for all that scheme, shapes and dtypes show to be wrong, so that a model is not changed by a load
                that cannot succeed.
        """
        layout = self.tensors(scheme)
        check_known(headers, tuple(dict.fromkeys((*layout, *self.also))))
        size = measure(headers, layout)
        for name in INPUT_SCALES:
            if name in headers:
                check_single(name, headers[name])
        grouped = next((name for name, each in layout.items() if each.axis("G") is not None), None)
        if grouped is None:
            columns = size["k"] if scheme.block is None else scheme.block[1]
        else:
            columns = group_size_of(size["k"], size["G"], scheme.group_size, grouped)
        return Sizes(size["n"], size["k"], columns)

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        """The layer, or a rank's part of it, without its bias.

        Args:
            tensors: by suffix, on the device asked for; each is read from its file when it is looked up.

        Raises:
            ValueError: what cannot be read exactly, naming tensor or setting.
        """
        raise NotImplementedError

    def elsewhere(self, prefix: str) -> Mapping[str, str]:
        """{suffix: full name}: tensors of the layer that may stand under another prefix."""
        return {}

    def described(self, metadata: Mapping[str, str], prefix: str) -> Mapping[str, Any]:
        """Settings that the metadata of the layer's file adds to a config that lacks them."""
        return {}


def static_scale(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The static scale of a layer's input, fp32 [1]."""
    return next((tensors[name].reshape(1).float() for name in INPUT_SCALES if name in tensors), None)


def inputs_of(config: Config, code: str, headers: Headers, blocks: bool = False) -> Inputs | None:
    """The inputs that a format tells which says little: `activation_scheme` for 8 bits, or a static scale's presence.

    Args:
        blocks: whether engines quantise the input per token and 128 values, as DeepSeek's do with blocks.
    """
    type = "int" if code == "int8" else "float"
    named = None if code == "int4" else (config or {}).get("activation_scheme")
    if str(named).lower() == "static" or (named is None and any(name in (headers or ()) for name in INPUT_SCALES)):
        return Inputs(type, strategy="tensor", dynamic=False)
    return Inputs(type, strategy="group", group_size=128) if blocks else None


# ---- settings of a config --------------------------------------------------------------------------------------------


def setting(config: Config, *names: str, default: Any = None) -> Any:
    """The first of several names that a config has, other than null."""
    for name in names:
        value = (config or {}).get(name)
        if value is not None:
            return value
    return default


def check_setting(config: Config, expected: Any, *names: str) -> None:
    """Raises ValueError for a config that has another value under one of the names."""
    found = setting(config, *names, default=expected)
    if found != expected:
        raise ValueError(f"{names[0]}: expected {expected}, got {found!r}")


def check_one_of(config: Config, name: str, known: Sequence[str]) -> None:
    """Raises ValueError for a setting that is given, not null and none of `known`, in whatever case."""
    found = (config or {}).get(name)
    if found is not None and str(found).lower() not in [each.lower() for each in known]:
        raise ValueError(f"{name}: expected {' or '.join(known)}, got {found!r}")


def flag(config: Config, name: str) -> bool | None:
    """A setting that is true or false, None where the config has none. Raises ValueError for another value."""
    value = setting(config, name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value


def group_size_of(k: int, groups: int, given: Any, name: str) -> int:
    """Columns of a group, from the number of groups that tensor `name` has and the config's group_size.

    Args:
        given: the config's; -1, or k and more, for one group a row; None where no config says, and groups divide k.

    Raises:
        ValueError: they contradict each other.
    """
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < -1 or given == 0):
        raise ValueError(f"group_size: expected a positive integer, or -1 for one group a row, got {given!r}")
    if given is None:
        if groups < 1 or k % groups:
            raise ValueError(f"{name}: expected a number of groups that divides k = {k}, got {groups}")
        return k // groups
    size = k if given == -1 or given > k else given
    if ceil_div(k, size) != groups:
        raise ValueError(
            f"{name}: expected {ceil_div(k, size)} groups for k = {k} and group_size {given}, got {groups}"
        )
    return size
