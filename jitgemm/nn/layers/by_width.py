"""W4A8Linear and W8A8Linear: a `PackedLinear` for each width of weights, of a Linear in floats or without values."""

from __future__ import annotations

from functools import partial
from typing import Any, Self, TypeVar

import torch

from jitgemm.activations.scheme import activation_named
from jitgemm.checkpoint.reader import target_device
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.nn.layers.linear import LINEARS, Device, PackedLinear
from jitgemm.nn.recipe import Recipe
from jitgemm.tensors import check_dtype
from jitgemm.weight.pack import check_group_size
from jitgemm.weight.packed import W4Weight, W8Weight, Weight, kind_of
from jitgemm.weight.parts import format_group

T = TypeVar("T", bound=PackedLinear)


class _OfWidth(PackedLinear):
    """A layer of one width, which can be made of a Linear in floats."""

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, device: Device = None, moments: torch.Tensor | None = None, **options: Any
    ) -> Self:  # fmt: skip
        """A layer whose weight is `linear`'s, quantised by a `Recipe` of as many bits::

            W4A8Linear.from_linear(linear)                                    # int4 in groups of 128, by quantize_w4
            W4A8Linear.from_linear(linear, activation="int8", group_size=32, symmetric=False)
            W4A8Linear.from_linear(linear, scheme="mxfp4")                    # by quantize_mxfp4
            W4A8Linear.from_linear(linear, scheme="two-level", rotation=128)  # by quantize_w4_two_level
            W8A8Linear.from_linear(linear, activation="e4m3_block", block=128)  # by quantize_w8

        Args:
            linear: out_features a multiple of 8, in_features a multiple of 16; left as it is.
            device: where to quantise and keep the weight; None for where it is.
            moments: as in `quantize_w4`; may be on another device.
            options: of the recipe. scheme: None for integers (of 8 bits the activations' type), "mxfp4" or "two-level".
                activation: one of ACTIVATIONS; "e4m3" where none is said, of two levels "int8". group_size, symmetric,
                scale_dtype, full_range, positive_scales, clip_steps: as in `quantize_w4`. act_order: of all 4-bit ones.
                block: as in `quantize_w8`. rotation: 128: the weight is rotated, and the quantiser rotates inputs.

        Raises:
            TypeError, ValueError: an argument is wrong, or the weight has no such form.
        """
        if of_models := options.keys() & {"bits", "sums", "lm_head", "ignore", "otherwise"}:
            raise TypeError(f"{min(of_models)}: expected none, as from_linear makes one layer, got one")
        return cls.by_recipe(linear, Recipe(bits=cls.kind.bits, **options), device=device, moments=moments)

    @classmethod
    def by_recipe(
        cls, linear: torch.nn.Linear, recipe: Recipe, *, device: Device = None, moments: torch.Tensor | None = None
    ) -> Self:
        """A layer whose weight is `linear`'s, quantised by a recipe of as many bits; the rest as for `from_linear`."""
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        if linear.weight.is_meta:
            raise ValueError("linear: expected a weight with data, got one on the meta device")
        device = linear.weight.device if device is None else target_device(device)
        with torch.no_grad():
            weight = recipe.apply(linear.weight.detach().to(device), None if moments is None else moments.to(device))
            bias = None if linear.bias is None else linear.bias.detach().to(device, copy=True)
        return cls(weight, bias, activation=recipe.inputs)


class W4A8Linear(_OfWidth):
    """A linear layer with a packed 4-bit weight and activations quantised to 8 bits; see `PackedLinear`."""

    kind = W4Weight

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, *, bias: bool | torch.dtype = False, activation: str = "e4m3",
        group_size: int | str = 128, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16,
        offset: bool = False, permutation: bool = False, input_scale: bool = False, correction: str = "",
        device: Device = None, rotation: int = 0,
    ) -> W4A8Linear:  # fmt: skip
        """A layer without values, to load a state dict into; the arguments say which tensors that one has.

        Args:
            bias: whether there is one, bf16; or its dtype, torch.bfloat16 or torch.float32.
            offset, permutation, input_scale: whether the weight has float offsets or act-order, and the input a static
                scale.
            correction: "bf16" or "fp16" for a weight packed with correction=True, by the type of its factors.
            device: "meta" is possible, for `load_state_dict(…, assign=True)`.
            rotation: the weight's.
        """
        options = group_size, scale_dtype, activation, bias, permutation, input_scale, device, rotation
        more: dict[str, Any] = {"zero_point": not symmetric, "offset": offset, "correction": correction}
        return _empty(cls, in_features, out_features, *options, order="s8" if correction else "any", **more)


class W8A8Linear(_OfWidth):
    """A linear layer with a packed 8-bit weight and activations quantised to its type; see `PackedLinear`.

    `activation` is "e4m3" or "e4m3_block" for weights of e4m3, one of the others for those of int8.
    """

    kind = W8Weight

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, *, bias: bool | torch.dtype = False, activation: str = "e4m3",
        group_size: int | str | None = None, scale_dtype: torch.dtype = torch.float32, permutation: bool = False,
        input_scale: bool = False, device: Device = None, rotation: int = 0,
    ) -> W8A8Linear:  # fmt: skip
        """As `W4A8Linear.empty`; group_size None is per channel."""
        group_size, lhs = "channel" if group_size is None else group_size, activation_named(activation).dtype
        options = group_size, scale_dtype, activation, bias, permutation, input_scale, device, rotation
        return _empty(cls, in_features, out_features, *options, zero_point=False, order=lhs, code=typed_code(lhs))


LINEARS.update({each.kind.bits: each for each in (W4A8Linear, W8A8Linear)})


def _empty(
    kind: type[T], k: int, n: int, group_size: int | str, scale_dtype: torch.dtype, activation: str,
    bias: bool | torch.dtype, permutation: bool, input_scale: bool, device: Device, rotation: int, **format: Any,
) -> T:  # fmt: skip
    """A layer without values; format: more of `WeightFormat`."""
    group_size = check_group_size(group_size, k)
    scale_type = check_dtype("scale_dtype", scale_dtype, REAL_TYPES)
    fmt = WeightFormat(format_group(k, group_size), scale_type=scale_type, **format)
    bias_dtype = torch.bfloat16 if bias is True else bias
    if bias_dtype not in (False, torch.bfloat16, torch.float32):
        raise TypeError(f"bias: expected a bool, torch.bfloat16 or torch.float32, got {bias!r}")
    weight = empty_weight(k, n, group_size, fmt, permutation, device, rotation=rotation)
    made = torch.empty(n, dtype=bias_dtype, device=device) if bias_dtype else None
    scale = torch.ones(1, device=device, dtype=torch.float32) if input_scale else None
    return kind(weight, made, activation=activation, input_scale=scale)


def empty_weight(
    k: int, n: int, group_size: int, fmt: WeightFormat, permutation: bool = False, device: Device = None,
    experts: int | None = None, rotation: int = 0,
) -> Weight:  # fmt: skip
    """A weight without values, of this format."""
    lead, strips = () if experts is None else (experts,), ceil_div(n, STRIP_ROWS)
    empty = partial(torch.empty, device=device)
    rows = (*lead, STRIP_ROWS * strips)
    blocks = empty((*lead, strips, fmt.kblocks(k), fmt.record_bytes), dtype=torch.uint8)
    channel_scale = None if fmt.group_size else empty(rows, dtype=torch_dtype(fmt.scale_type))
    row_sum = empty(rows, dtype=torch.float32) if fmt.row_sums else None
    # A permutation even before it is loaded: what reads it never reaches beyond the input.
    order = torch.arange(k, dtype=torch.int32, device=device) if permutation else None
    sums_and_order: dict[str, Any] = {"row_sum": row_sum, "permutation": order, "rotation": rotation}
    return kind_of(fmt)(blocks, channel_scale, n, k, group_size, fmt, **sums_and_order)
