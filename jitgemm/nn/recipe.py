"""Recipe: how weights in floats are quantised, for `quantize_`, transformers, both engines and the commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from jitgemm.activations.scheme import ACTIVATIONS, activation_named
from jitgemm.checkpoint.expressions import patterns
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.codes import EXPONENT_GROUP, FACTOR_GROUP, typed_code
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, ROTATION, check_sums
from jitgemm.nn.layers.packed import check_sums_of
from jitgemm.tensors import check_dtype, check_flag
from jitgemm.weight import quantize_mxfp4 as mxfp4
from jitgemm.weight import quantize_two_level as two_level
from jitgemm.weight.pack import check_group_size
from jitgemm.weight.packed import W4Weight, W8Weight, Weight
from jitgemm.weight.quantize import check_block, check_clip_steps, quantize_w4, quantize_w8


class Quantiser(NamedTuple):
    """What makes packed weights of a recipe.

    Attributes:
        kind: of the weights.
        quantise: gets a weight, `lhs_dtype`, `moments` and options.
        options: fields of `Recipe` that it takes.
        activation: what its weights meet where a recipe says none.
        group: columns that share a scale where a recipe says none; None for a row or block.
        check_lhs: raises TypeError for a type of activations that its weights do not meet; None: they meet both.
        code: what users call its codes; "" for their scheme, or the activations' type.
    """

    kind: type[Weight]
    quantise: Callable[..., Weight]
    options: tuple[str, ...]
    activation: str = "e4m3"
    group: int | None = None
    check_lhs: Callable[[str, str], None] | None = None
    code: str = ""


_INT4_OPTIONS = ("group_size", "symmetric", "scale_dtype", "full_range", "positive_scales", "clip_steps", "act_order")
INTEGERS = {
    4: Quantiser(W4Weight, quantize_w4, _INT4_OPTIONS, group=128, code="int4"),
    8: Quantiser(W8Weight, quantize_w8, ("block",)),
}
"""By bits, where a recipe has no scheme; those of 8 have the activations' type, so they may be e4m3."""
SCHEMES = {
    "int4": INTEGERS[4],
    "mxfp4": Quantiser(W4Weight, mxfp4.quantize_mxfp4, ("act_order",), group=EXPONENT_GROUP, check_lhs=mxfp4.check_lhs),
    "two-level": Quantiser(
        W4Weight, two_level.quantize_w4_two_level, ("act_order",), "int8", FACTOR_GROUP, two_level.check_lhs
    ),
}
"""Of 4 bits, by what users call them."""
_OF_DEFAULT = ("bits", "activation", "act_order", "sums", "lm_head", "ignore", "rotation")
"""Options that go with what is taken where no other is said."""
_FLAGS = ("symmetric", "full_range", "positive_scales", "act_order")
_SCALES = {str(dtype).removeprefix("torch."): dtype for dtype in map(torch_dtype, REAL_TYPES)}


@dataclass(frozen=True)
class Recipe:
    """How weights in floats are quantised, and what their layers compute; None: what the quantiser takes by itself.

    Attributes:
        bits: of the weights, 4 or 8.
        scheme: one of SCHEMES; None for integers of 4 bits, or e4m3 or integers of 8, as activations are.
        activation: one of ACTIVATIONS; None for `Quantiser.activation`, or for what a quantised checkpoint says.
        group_size, symmetric, scale_dtype, full_range, positive_scales, clip_steps, act_order: as in `quantize_w4`.
        block: as in `quantize_w8`.
        rotation: 128: weights and their layers' inputs are rotated, as in `quantize_w4`; None: they are not.
        sums: of layers with 4-bit weights, as for `gemm_w4a8_nt`.
        lm_head: the activations of an output embedding in 8 bits with a scale per row; None: it is like others.
        ignore: layers that stay: names, parts of names, patterns (`fnmatch`), or "re:" and an expression.
        otherwise: of layers whose columns are no multiple of `rotation`; None: there are none. Only `of` says it.

    Raises:
        TypeError, ValueError: an option is wrong, or does not go with others; the message names it.
    """

    bits: int = 4
    scheme: str | None = None
    activation: str | None = None
    group_size: int | str | None = None
    symmetric: bool | None = None
    scale_dtype: torch.dtype | None = None
    full_range: bool | None = None
    positive_scales: bool | None = None
    clip_steps: int | None = None
    act_order: bool | None = None
    block: int | None = None
    sums: str = "f32"
    lm_head: str | None = None
    ignore: tuple[str, ...] = ()
    rotation: int | None = None
    otherwise: Recipe | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in tuple(INTEGERS):
            raise ValueError(f"bits: expected 4 or 8, got {self.bits!r}")
        if self.scheme not in (None, *SCHEMES):
            raise ValueError(f"scheme: expected None or one of {', '.join(SCHEMES)}, got {self.scheme!r}")
        if (width := self.quantiser.kind.bits) != self.bits:
            raise ValueError(f"bits: expected {width} with scheme={self.scheme!r}, got {self.bits}")
        for name in (*_INT4_OPTIONS, "block"):
            value = getattr(self, name)
            if value is not None and name not in self.quantiser.options:
                other = f"bits={self.bits}" if self.scheme is None else f"scheme={self.scheme!r}"
                raise TypeError(f"{name}: expected none with {other}, got {value!r}")
            if value is not None and name in _FLAGS:
                check_flag(name, value)
        if self.clip_steps is not None:
            check_clip_steps(self.clip_steps)
        check_block(self.block)
        if self.group_size is not None and check_group_size(self.group_size, GROUP_SIZES[-1]) < GROUP_SIZES[0]:
            wanted = f"one of {GROUP_SIZES}, or in_features or more for a scale per row"
            raise ValueError(f"group_size: expected {wanted}, got {self.group_size}")
        if self.scale_dtype is not None:
            check_dtype("scale_dtype", self.scale_dtype, REAL_TYPES)
        if self.activation is not None:
            lhs = activation_named(self.activation).dtype
            if self.quantiser.check_lhs is not None:
                self.quantiser.check_lhs(lhs, "activation")
        if self.rotation is not None and (type(self.rotation) is not int or self.rotation != ROTATION):
            raise ValueError(f"rotation: expected None or {ROTATION}, got {self.rotation!r}")
        check_sums(self.sums)
        if self.activation is not None:
            self.check_sums()
        if self.lm_head not in (None, *ACTIVATIONS):
            raise ValueError(f"lm_head: expected None or one of {', '.join(ACTIVATIONS)}, got {self.lm_head!r}")
        patterns("ignore", self.ignore)

    @classmethod
    def of(cls, said: Mapping[str, Any], *, calibrated: bool = False, beside: tuple[str, ...] = ()) -> Recipe:
        """The recipe that a user means.

        Where nothing is said that does not go with it: two levels with int8 activations, rotated, which lose least of
        what runs as fast (docs/choosing.md). Layers whose columns are no multiple of 128 get groups of integers.

        Of groups of whom nobody says group_size or symmetric: 128 and no zero points if there is calibration. Weights
        alone keep a real model's results best with groups of 32 and zero points (docs/quantize.md), which do not go
        with activations that have a scale per block.

        Args:
            said: fields by name, as a JSON file may have them: None as if it was not said, a list for ignore, and
                "bfloat16" for scale_dtype.
            calibrated: whether `apply` gets moments.
            beside: other options that the user has, which the error for an unknown one lists, too.

        Raises:
            TypeError, ValueError: as the class, or a name is none of its fields.
        """
        names = [field.name for field in fields(cls) if field.name != "otherwise"]
        if unknown := sorted(set(said) - set(names)):
            raise ValueError(f"expected the options {', '.join((*names, *beside))}, got {', '.join(unknown)}")
        options = {name: value for name, value in said.items() if value is not None}
        if isinstance(scale := options.get("scale_dtype"), str):
            if scale not in _SCALES:
                raise ValueError(f"scale_dtype: expected {' or '.join(map(repr, _SCALES))}, got {scale!r}")
            options["scale_dtype"] = _SCALES[scale]
        if isinstance(options.get("ignore"), list):
            options["ignore"] = tuple(options["ignore"])
        made = groups = cls(**options)
        sized = options.keys() & {"group_size", "symmetric"}
        if not calibrated and not sized and "group_size" in made.quantiser.options:
            groups = replace(made, group_size=32, symmetric=activation_named(made.inputs).block)
        levels = made.quantiser is INTEGERS[4] and made.activation in (None, "int8") and made.sums != "f16"
        if not levels or not options.keys() <= set(_OF_DEFAULT):
            return groups
        activation = "int8" if made.sums == "exact" else made.activation
        otherwise = replace(groups, activation=activation, rotation=None)
        return replace(made, scheme="two-level", rotation=ROTATION, otherwise=otherwise)

    def for_columns(self, *k: int) -> Recipe:
        """The recipe of a layer whose weights, or both weights of experts, have so many columns: it or `otherwise`."""
        fits = self.otherwise is None or not any(columns % (self.rotation or 1) for columns in k)
        return self if fits else self.otherwise  # type: ignore[return-value]

    @property
    def quantiser(self) -> Quantiser:
        return INTEGERS[self.bits] if self.scheme is None else SCHEMES[self.scheme]

    @property
    def code(self) -> str:
        """What users call the weights' codes: int4, e4m3, int8, or a scheme."""
        return self.scheme or self.quantiser.code or typed_code(activation_named(self.inputs).dtype)

    def check_sums(self) -> None:
        """Raises TypeError or ValueError unless layers with 4-bit weights can be added up so."""
        if self.bits == 4:
            check_sums_of(self.sums, self.inputs)

    @property
    def inputs(self) -> str:
        """The activation of the layers."""
        return self.quantiser.activation if self.activation is None else self.activation

    @property
    def lhs_dtype(self) -> torch.dtype:
        """The type of the activations that the weights meet."""
        return torch_dtype(activation_named(self.inputs).dtype)

    @property
    def group(self) -> int | str | None:
        """Columns that share a scale; None for a row or block."""
        return self.quantiser.group if self.group_size is None else self.group_size

    @property
    def why_otherwise(self) -> str:
        """Why some layers get `otherwise`, and what that is."""
        other: Any = self.otherwise
        what = f"{other.code} in groups of {other.group}, {other.inputs} activations"
        return f"{what}, as columns are no multiple of {self.rotation}"

    @property
    def head(self) -> Recipe | None:
        """Of the output embedding, where it has one of its own: rotated where somebody said so beside a format."""
        rotation = self.rotation if self.otherwise is None else None
        return None if self.lm_head is None else Recipe(bits=8, activation=self.lm_head, rotation=rotation)

    @property
    def in_8_bits(self) -> Recipe:
        """Of the layers that lose too much in 4."""
        otherwise = None if self.otherwise is None else self.otherwise.in_8_bits
        return Recipe(bits=8, activation=self.inputs, rotation=self.rotation, otherwise=otherwise)

    @property
    def writes_qserve(self) -> bool:
        """Whether files of such weights are QServe's, which know no rotation, and not compressed-tensors'."""
        return self.scheme == "two-level" and not self.rotation

    @property
    def k_alignment(self) -> int:
        """What k is a multiple of."""
        return K_ALIGNMENT if self.otherwise is not None else self.rotation or K_ALIGNMENT

    def leaves(self, *names: str) -> bool:
        """Whether a layer of one of these names stays what it is."""
        return any(matches(name) for matches in patterns("ignore", self.ignore) for name in names)

    def apply(self, w: torch.Tensor, moments: torch.Tensor | None = None) -> Weight:
        """A weight [n, k], or those of experts [E, n, k], quantised and packed on their device.

        Args:
            w: with k that the recipe is `for_columns` of.
            moments: of the layer's inputs, as in `quantize_w4`; of a recipe that `of` made with calibrated=True.

        Raises:
            TypeError, ValueError: as `quantize_w4`, `quantize_w8` and the others of SCHEMES.
        """
        options = {name: getattr(self, name) for name in (*self.quantiser.options, "rotation")}
        if "group_size" in options:
            options["group_size"] = self.group
        options = {name: value for name, value in options.items() if value is not None}
        return self.quantiser.quantise(w, lhs_dtype=self.lhs_dtype, moments=moments, **options)
