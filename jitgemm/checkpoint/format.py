"""What a checkpoint format is: the scheme that a config names for a layer, and the tensors that hold such a layer.

Reading, sizes, cutting for ranks and warm-up all derive from `Format.scheme` and `Format.tensors`.
Adding a format takes one subclass of `Format` and `formats.register`. Knows no format, no file and no kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.layouts import CODE_TYPES, E8M0, FLOATS, Layout, TensorLayout, check_single, measure, stored
from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.kernel.formats import ROTATION, ceil_div
from jitgemm.tensors import describe
from jitgemm.weight.rotation import sylvester

Config = Mapping[str, Any] | None
"""A quantization_config."""
Headers = Mapping[str, Any]
"""A layer's tensors, or their headers, by suffix."""

INPUT_SCALES = ("input_scale", "activation_scale", "qscale_act", "_weight_act_quant_scale")
"""What formats call a layer's static activation scale."""
INPUT_ZERO_POINTS = ("input_zero_point", "_weight_act_quant_zero_point")
"""What they call its zero point."""
INPUT_TENSORS = (*INPUT_SCALES, *INPUT_ZERO_POINTS, "input_global_scale")
"""With that of inputs of 4 bits."""
BESIDE = r"((q|k|v|kv|qkv|qk|prob|softmax|attn)(_cache)?|output)_(global_)?(scales?(_inv)?|zero_points?|scaling_factor)"
"""What tools call scales of caches, attention and outputs, which they put next to layers: nothing of a weight."""


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

    @property
    def per_token(self) -> str:
        """Name of the per-token 8-bit activation of this type: "int8" or "e4m3"."""
        return "int8" if self.type == "int" else "e4m3"

    @property
    def mxfp8(self) -> bool:
        """Whether they are e4m3 with a scale for 32 k, as no kernel here takes them."""
        groups = self.dynamic and self.symmetric and (self.strategy, self.group_size) == ("group", EXPONENT_GROUP)
        return groups and (self.type, self.num_bits) == ("float", 8)

    @property
    def instead(self) -> str | None:
        """The activation in place of fewer than 8 bits, and of MXFP8 with a scale for 128 k; None for others."""
        return "e4m3_block" if self.mxfp8 else self.per_token if self.num_bits < 8 else None

    def replaced_by(self, activation: str) -> str:
        """What a user hears of inputs that have another activation `instead`."""
        these = "MXFP8 inputs" if self.mxfp8 else f"inputs of {self.num_bits} bits"
        unit = "each token and 128 k" if activation.endswith("_block") else "each token"
        return (
            f"the checkpoint's {these} are quantised to 8 bits for {unit}, {activation}; activation={activation!r} "
            "says so without this warning"
        )

    @classmethod
    def of(cls, scheme: Mapping[str, Any] | None) -> Inputs:
        """From compressed-tensors' `input_activations`; nothing there means that the input stays in floats."""
        if not scheme:
            return cls(num_bits=16)
        type, bits, dynamic = scheme.get("type", "int"), scheme.get("num_bits", 8), bool(scheme.get("dynamic", False))
        return cls(type, bits, scheme.get("strategy"), scheme.get("group_size"), scheme.get("symmetric", True), dynamic)


PLACES = INPUT, OUTPUT = "input", "output"
RANDOM_MATRIX = "random-matrix"
"""The one type of transforms whose matrices are not orthogonal."""


@dataclass(frozen=True)
class Transform:
    """What multiplies the input or the result of a layer at run time.

    Attributes:
        name: of its group in the config.
        location: one of PLACES.
        kind: the group's type, such as RANDOM_MATRIX.
        size: of the matrix; None for all columns, or rows at the output.
        inverse: whether its inverse is applied, of a random matrix the one in the file.
        known: whether the matrix is Sylvester's, which no file need hold.
    """

    name: str
    location: str
    kind: str
    size: int | None
    inverse: bool
    known: bool

    def __str__(self) -> str:
        blocks = "all of it" if self.size is None else f"blocks of {self.size}"
        return f"transform {self.name} ({self.kind}) of {blocks} at the {self.location}"

    def matrix(self, stored: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
        """V, fp32 [size, size]; stored: the file's, if it has one. Raises ValueError if the config means another."""
        size = self.size or size
        expected = sylvester(size, device) if self.known else None
        matrix: Any = expected if stored is None else stored.float()
        if matrix.shape != (size, size) or not (expected is None or torch.equal(matrix, expected)):
            wanted = ("Sylvester's" if self.known else "a") + f" matrix [{size}, {size}] of {self} in the file"
            raise ValueError(f"transform_config: expected {wanted}, got another, {describe(matrix)}")
        return matrix if self.kind == RANDOM_MATRIX else (matrix.mT if self.inverse else matrix) * size**-0.5

    def stored_as(self, checkpoint: Any, prefix: str, sizes: Sizes) -> str | None:
        """The name of the matrix in a `Checkpoint`; None of one that is known and not there. Layers share those of one
        size, and files have them once. Raises ValueError unless there is one, of a size that divides the layer's."""
        total = sizes.k if self.location == INPUT else sizes.n
        size = self.size or total
        if self.known and size is not None and size & (size - 1):
            raise ValueError(f"transform_config: expected a power of two for {self}, got {size}")
        if total is not None and size is not None and total % size:
            raise ValueError(f"transform_config: head_dim: expected a divisor of {total}, got {size} of {self}")
        own = f"{prefix}.{self.name}_{self.location}.weight"
        if own in checkpoint or self.known:
            return own if own in checkpoint else None
        ends = tuple(f".{self.name}_{place}.weight" for place in PLACES)
        alike = (name for name in checkpoint.names() if f".{name}".endswith(ends))
        fitting = [name for name in alike if checkpoint.info(name).shape == (size, size)]
        if len(fitting) != 1:
            got = ", ".join(fitting) or "none"
            raise ValueError(f"transform_config: expected one matrix of {self} in the file, found {got}")
        return fitting[0]


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
        transforms: what multiplies its input and result at run time, by compressed-tensors' config.
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
    transforms: tuple[Transform, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def eight_bits(self) -> bool:
        """Whether its codes are bytes."""
        return self.code in CODE_TYPES

    @property
    def per_word(self) -> int:
        """Codes in an int32."""
        return 4 if self.eight_bits else 8

    @property
    def unpackable(self) -> bool:
        """Whether 8-bit codes may have zero points, which no packed weight holds: the layer is dequantised."""
        return self.zero_points and self.eight_bits

    def rotation(self, k: int | None) -> int:
        """128 where the quantiser does all that the transforms do to an input of k columns, else 0."""
        if len(self.transforms) != 1 or self.ordered:
            return 0
        transform = self.transforms[0]
        known = transform.known and transform.location == INPUT
        return ROTATION if known and (transform.size or k) == ROTATION else 0

    def why_dense(self, k: int | None) -> str | None:
        """Why no packed layer of k columns can do what the transforms do; None where one can."""
        if not self.transforms or self.rotation(k):
            return None
        got = " and ".join(map(str, self.transforms)) + (" behind an activation order" if self.ordered else "")
        return f"{got}; kernels rotate blocks of {ROTATION} of an input, by Sylvester's matrix"

    @property
    def static(self) -> dict[str, TensorLayout]:
        """The static scale of the input, where there is one."""
        has_scale = self.inputs is not None and not self.inputs.dynamic
        return {"input_scale": stored(torch.float32, optional=True)} if has_scale else {}

    def by_row(self, name: str, values: torch.Tensor, n: int) -> torch.Tensor:
        """[n, G] from a tensor of `found`, whose values rows, a block's or all, may share; e8m0 becomes fp32."""
        layout = self.found[name]
        if values.dtype in E8M0 and values.dtype in layout.dtypes:
            values = values.view(torch.float8_e8m0fnu).float()
        if not layout.dims:
            return values.reshape(1, 1).expand(n, 1)
        rows = values.reshape(len(values), -1)
        return rows if layout.per(0) == 1 else rows.repeat_interleave(layout.per(0), 0)[:n]

    def columns(self, k: int) -> int:
        """How many of k columns share a scale; 0 for all of them."""
        size = self.group_size or 0
        return self.block[1] if self.block is not None else size if 0 < size < k else 0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, as far as headers tell: n, k, and the columns of a group. None where only values tell."""

    n: int
    k: int | None
    group_size: int | None = None

    @property
    def known(self) -> tuple[int, int, int]:
        """n, k and group_size of a layer whose headers tell them all, as those of most formats do."""
        assert self.k is not None and self.group_size is not None
        return self.n, self.k, self.group_size


class Format:
    """A checkpoint format; one subclass each, and one instance in `formats.FORMATS`.

    Attributes:
        name: as `load(format=...)` takes it.
        stacked: the quant_methods of files whose experts stand together, each kind of tensor in one, with biases.
        suffixes: of all tensors that its layers may have.
        also: names of tensors that may be there without being in `tensors`.
        cuts: whether a rank's part of a layer is a part of each of its tensors.
    """

    name: str
    stacked: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    cuts: bool = False

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        """Whether a layer's tensors, {what stands behind its name: header}, are of this format by headers and the
        model's quantization_config. Raises nothing. No two formats may detect the same layer."""
        raise NotImplementedError

    def left_out(self, config: Config, prefix: str) -> str | None:
        """The setting that leaves a layer in floats, as a message; None for a quantised layer."""
        return None

    def transforms(self, config: Config, prefix: str) -> tuple[Transform, ...]:
        """What multiplies a layer's input and result at run time, whether the layer is quantised or not."""
        return ()

    def idle(self, config: Config, name: str) -> str | None:
        """Why a tensor that is no layer's is not used; None for one that is not known."""
        return None

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        """What config and headers say of one layer, which `left_out` says is quantised.

        Args:
            config: the model's quantization_config, or None.
            prefix: the layer's name, for configs that differ between layers.
            headers: the layer's tensors or their headers by suffix.

        Raises:
            ValueError: a setting is not supported; the message names it.
        """
        raise NotImplementedError

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        """The tensors of a layer, by suffix."""
        return dict(scheme.found)

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        """Sizes of a layer, from tensors or their headers. Raises ValueError for all that scheme, shapes and dtypes
        show to be wrong, so that a model is not changed by a load that cannot succeed."""
        layout = self.tensors(scheme)
        check_known(headers, tuple(dict.fromkeys((*layout, *self.also))))
        size = measure(headers, layout)
        n, k, grouped = size["n"], size["k"], [name for name, tensor in layout.items() if tensor.axis("G") is not None]
        if scheme.block is not None:
            return Sizes(n, k, scheme.block[1])
        name = (grouped or [name for name in layout if "scale" in name])[0]
        what = "columns" if layout[name].axis("G") else "groups"
        columns = group_size_of(k, size.get("G", 1), scheme.group_size, name, what)
        for name, tensor in layout.items():
            if scheme.ordered and columns != k and isinstance(tensor.optional, str) and name not in headers:
                raise ValueError(f"{name}: expected {tensor.optional}, found none")
        return Sizes(n, k, columns)

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        """The layer, or a rank's part of it, without its bias, from its tensors by suffix, on the device asked for.

        Raises:
            ValueError: what cannot be read exactly, naming tensor or setting.
        """
        raise NotImplementedError

    def stored_otherwise(self, config: Config, names: Sequence[str]) -> str | None:
        """Why a file of this config has tensors of these names, which are none of a quantised layer's, as a message;
        None where the config does not say."""
        return None

    def elsewhere(self, prefix: str) -> Mapping[str, str]:
        """{suffix: full name}: tensors of the layer that may stand under another prefix."""
        return {}

    def described(self, metadata: Mapping[str, str], prefix: str) -> Mapping[str, Any]:
        """Settings that the metadata of the layer's file adds to a config that lacks them."""
        return {}


# ---- what formats ask of a config and of headers ---------------------------------------------------------------------


_KINDS: dict[str, tuple[Any, str]] = {
    name: (kind, expected)
    for expected, kind, names in (
        ("a list of names", (list, tuple), "ignore targets"),
        ("a mapping", Mapping,
         "config_groups transform_config weights input_activations extra_config meta global_quant_config "
         "layer_quant_config layer_type_quant_config weight input_tensors export"),
        ("a name", str,
         "quant_method quant_algo format checkpoint_format version provider type strategy data_type act_data_type "
         "packing_format backend dtype qscheme pack_method class target_dtype quantization_status zeros_mode"),
        ("an integer", int,
         "num_bits bits wbits w_bit weight_bits act_bits group_size q_group_size groupsize in_features"),
        ("true or false", bool, "symmetric sym is_sym zero_point desc_act is_dynamic fast_decoding"),
    )
    for name in names.split()
}  # fmt: skip
"""What settings must be, in every format that asks for them."""


def check_kind(name: str, value: Any, where: str = "") -> Any:
    """The value of a setting, or ValueError for one that is neither null nor of its kind; where: begins the message."""
    types, expected = _KINDS.get(name, (object, ""))
    fits = isinstance(value, types) and (types is object or isinstance(value, bool) == (types is bool))
    if value is not None and (not fits or types == (list, tuple) and not all(isinstance(item, str) for item in value)):
        raise ValueError(f"{where}{name}: expected {expected}, got {value!r}")
    return value


def setting(config: Config, *names: str, default: Any = None) -> Any:
    """The first of several names that a config has, other than null. Raises ValueError for a value of another kind."""
    values = (check_kind(name, (config or {}).get(name)) for name in names)
    return next((value for value in values if value is not None), default)


def check_setting(config: Config, expected: Any, *names: str) -> None:
    """Raises ValueError for a config that has another value under one of the names."""
    got = setting(config, *names, default=expected)
    if got != expected:
        raise ValueError(f"{names[0]}: expected {expected}, got {got!r}")


def block_of(name: str, given: Any) -> tuple[int, int]:
    """Rows and columns of a block. Raises ValueError for a setting that is not two positive integers, or "128x128"."""
    block = (
        list(map(int, re.findall(r"\d+", given)))
        if isinstance(given, str) and re.fullmatch(r"\d+x\d+", given)
        else given
    )
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
        raise ValueError(f"{name}: expected two positive integers, got {given!r}")
    return block[0], block[1]


def group_size_of(k: int, groups: int, given: Any, name: str, what: str = "groups") -> int:
    """Columns of a group, from the number of groups that tensor `name` has and the config's group_size: -1, or k and
    more, for one group a row; None where no config says, and groups divide k. Raises ValueError where they contradict
    each other; what: the tensor has for each group, for the message."""
    if given is None:
        if groups < 1 or k % groups:
            raise ValueError(f"{name}: expected {what} that divide k = {k}, got {groups}")
        return k // groups
    if isinstance(given, bool) or not isinstance(given, int) or given < -1 or given == 0:
        raise ValueError(f"group_size: expected a positive integer, or -1 for one group a row, got {given!r}")
    size = k if given == -1 or given > k else given
    if ceil_div(k, size) != groups:
        expected = f"{ceil_div(k, size)} {what} for k = {k} and group_size {given}"
        raise ValueError(f"{name}: expected {expected}, got {groups}")
    return size


_INPUTS_SAID = {"int8": ("int", "activation_scheme"), "int4": ("float", "")}
"""By code: the type of activations that go with it, and which setting says how they are scaled. Others are as e4m3."""


def inputs_of(config: Config, code: str, headers: Headers, blocks: bool = False) -> Inputs | None:
    """The inputs by compressed-tensors' `input_activations`, by `activation_scheme` for 8 bits, or by a static scale's
    presence; blocks: engines quantise the input per token and 128 values, as DeepSeek's do with blocks."""
    config, (type, key) = config or {}, _INPUTS_SAID.get(code, ("float", "activation_scheme"))
    if "input_activations" in config:
        return Inputs.of(setting(config, "input_activations"))
    named = setting(config, key)
    if str(named).lower() == "static" or (named is None and any(name in headers for name in INPUT_SCALES)):
        return Inputs(type, strategy="tensor", dynamic=False)
    return Inputs(type, strategy="group", group_size=128) if blocks else None


def check_beside(headers: Mapping[str, Any]) -> None:
    """Raises ValueError where what a layer has beside its weight, in every format, is of another dtype or size."""
    for name in headers.keys() & {*INPUT_SCALES, "input_global_scale"}:
        check_single(name, headers[name])
    for name in headers.keys() & {*INPUT_ZERO_POINTS}:
        check_single(name, headers[name], (*FLOATS, *CODE_TYPES.values(), torch.uint8, torch.int32, torch.int64))
    if "bias" in headers and headers["bias"].dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"bias: expected floats of 16, 32 or 64 bits, got {describe(headers['bias'])}")


def check_known(tensors: Iterable[str], known: Sequence[str]) -> None:
    """Raises ValueError for a tensor that is not among `known`: what it means for the weight is not known either."""
    others = set(tensors) - {"bias", *known, *INPUT_TENSORS}
    if unknown := sorted(name for name in others if not re.fullmatch(BESIDE, name)):
        raise ValueError(f"{unknown[0]}: expected only {', '.join(known)} and bias, got also {', '.join(unknown)}")
