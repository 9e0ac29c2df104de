"""W4A8Linear and W8A8Linear: y = x · weightᵀ + bias, the weight in 4 or 8 bits, x quantised to 8 bits on the way in.

Layers over the calls `quantize_activations` and `gemm_w4a8_nt` or `gemm_w8a8_nt`; they know no kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from jitgemm.activations.call import quantize_activations
from jitgemm.activations.scheme import NO_PROLOGUE, Prologue, activation_named
from jitgemm.checkpoint.files import Source, opened
from jitgemm.checkpoint.reader import target_device
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.gemm.problem import ANY
from jitgemm.gemm.run import gemm
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.nn.layers.packed import Packed, Parts, state_dict_parts
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.nn.recipe import Recipe
from jitgemm.runtime.checks import ALIGNMENT
from jitgemm.tensors import check_dtype, check_no_grad
from jitgemm.weight.pack import check_group_size
from jitgemm.weight.packed import W4Weight, W8Weight, Weight, kind_of
from jitgemm.weight.parts import check_packed, format_group
from jitgemm.weight.quantize import CLIP_STEPS

if TYPE_CHECKING:
    from jitgemm.nn.layers.sharding import LinearSharding


Device = torch.device | str | int | None


class PackedLinear(Packed):
    """A linear layer with a packed weight and activations quantised to 8 bits, for inference; see its subclasses.

    Made by `from_linear`, `from_weight`, `from_checkpoint` or `from_state_dict`; `empty` makes one to load into. Of
    this class, `from_checkpoint` and `from_state_dict` make a layer of the width that they find.

    Input: bf16, fp16 or fp32 [..., in_features]; output: [..., out_features] in the input's dtype, or in autocast's.
    Every token (row) is quantised with a scale of its own, or with `input_scale` if there is one. There is no gradient:
    the input must not require one while gradients are enabled.

    Tensors of `state_dict()`. All but `meta` and `activation_type` are buffers; moved by `.to(device)`, but never
    converted to another type, whatever the model is:

    ==================  =========================================================================================
    `blocks`            uint8, the packed weight: see `Weight`
    `channel_scale`     scales, per channel only
    `row_sum`           fp32, row sums of the weight, for zero points of activations; not of e4m3 weights
    `permutation`       int32 [in_features], act-order only: the quantiser gathers its input by it
    `meta`              int64 on the CPU: sizes and format of the weight, compared when a state dict is loaded
    `activation_type`   int64 [1] on the CPU: number of `activation` in ACTIVATIONS, compared too
    `input_scale`       fp32 [1], static scale of the input, if the checkpoint has one
    `bias`              bf16 or fp32 [out_features], if there is one
    ==================  =========================================================================================

    Attributes:
        in_features, out_features: k and n, those of this rank's part where the layer is divided among ranks.
        activation: one of ACTIVATIONS.
        batch_invariant: False; set it to True for results that do not depend on the other tokens, see `gemm_w4a8_nt`.
        sums: "f32"; set it to "f16" or "exact" for kernels that may add up so, see `gemm_w4a8_nt`.
        split: how the layer is divided among ranks; None for a whole one. See `jitgemm.nn.parallel`.
    """

    batch_invariant = False
    split: LinearSharding | None = None
    prologues: Sequence[Prologue] = (NO_PROLOGUE,)
    """What the layer's quantiser may compute first."""

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None = None, *, activation: str = "e4m3",
        input_scale: torch.Tensor | None = None,
    ):  # fmt: skip
        """A layer over a packed weight; no tensor is copied.

        Args:
            weight: [n, k], packed; 8-bit weights meet activations of their own type.
            bias: bf16, fp16 or fp32 [n] or None; fp16 is widened to fp32.
            activation: one of ACTIVATIONS: "e4m3" or "int8", "int8_affine" (with zero points), "e4m3_block" or
                "int8_block" (with a scale per token and 128 values).
            input_scale: None for a scale per token, or fp32 of one element: the static scale of all inputs, of "e4m3"
                or "int8".

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        super().__init__(weight, bias, activation=activation, input_scale=input_scale)
        check_packed(weight, "weight.", experts=False)
        self.in_features, self.out_features = weight.k, weight.n

    # ---- constructors ------------------------------------------------------------------------------------------------

    @classmethod
    def from_weight(
        cls, weight: Weight, bias: torch.Tensor | None = None, *, activation: str = "e4m3",
        input_scale: torch.Tensor | None = None,
    ) -> Self:  # fmt: skip
        """A layer over a packed weight; arguments and errors are the constructor's."""
        return cls(weight, bias, activation=activation, input_scale=input_scale)

    @classmethod
    def by_recipe(
        cls, linear: torch.nn.Linear, recipe: Recipe, *, device: Device = None, moments: torch.Tensor | None = None
    ) -> Self:
        """A layer whose weight is `linear`'s, quantised by a recipe of as many bits; the rest as `from_linear`'s."""
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        if linear.weight.is_meta:
            raise ValueError("linear: expected a weight with data, got one on the meta device")
        device = linear.weight.device if device is None else target_device(device)
        with torch.no_grad():
            weight = recipe.apply(linear.weight.detach().to(device), None if moments is None else moments.to(device))
            bias = None if linear.bias is None else linear.bias.detach().to(device, copy=True)
        return cls(weight, bias, activation=recipe.inputs)

    @classmethod
    def from_checkpoint(
        cls, source: Source, prefix: str, *, activation: str | None = None, device: Device = None,
        format: str | None = None, config: Mapping[str, Any] | None = None,
    ) -> Self:  # fmt: skip
        """A layer read from a quantised checkpoint, bit-exact; only its own tensors are read.

        Args:
            source: folder or file, tensors by name or an open `jitgemm.checkpoint.Checkpoint`, as in `jitgemm.load`.
            prefix: the layer's name, such as "model.layers.0.mlp.down_proj".
            activation: one of ACTIVATIONS; None for what the checkpoint says of the layer (config, or torchao's
                metadata), or, where it says nothing of activations, "e4m3", and for 8-bit weights those of their type:
                per token and 128 values for DeepSeek's blocks.
            device: where to; None for the current GPU, if there is one.
            format, config: as in `jitgemm.load`.

        Raises:
            ValueError: no such layer, or a form that cannot be read exactly; see `jitgemm.load`. Also for activations
                that the layer does not have, such as scales per group of k.
        """
        if activation is not None:
            activation_named(activation)
        checkpoint = opened(source, config)
        layer = LayerSource.find(checkpoint, prefix, activation, format)
        kind = LINEARS[layer.bits]
        if not issubclass(kind.kind, cls.kind):
            expected = f"expected a layer of {cls.kind.bits} bits"
            raise ValueError(f"prefix: {expected}, got {prefix!r}, which is a {kind.__name__}'s")
        return cls.of_parts(layer.read(target_device(device)))

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Self:
        """The layer whose `state_dict(prefix=prefix)` is among `tensors`, such as a safetensors file's.

        Nothing else need be known of the layer; memory is shared with `tensors`.

        Raises:
            ValueError: a tensor is missing, or has the wrong shape or type.
        """
        return cls.of_parts(state_dict_parts(tensors, prefix))

    @classmethod
    def of_parts(cls, parts: Parts) -> Self:
        """The layer of these parts; of `PackedLinear` itself: of the class for the weight's width."""
        kind: Any = LINEARS[parts.weight.bits] if cls is PackedLinear else cls
        return kind(**parts._asdict())

    @classmethod
    def _empty(
        cls, k: int, n: int, group_size: int | str, scale_dtype: torch.dtype, activation: str, bias: bool | torch.dtype,
        permutation: bool, input_scale: bool, device: Device, rotation: int, **format: Any,
    ) -> Self:  # fmt: skip
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
        return cls(weight, made, activation=activation, input_scale=scale)

    # ---- the call ----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16, fp16 or fp32 [..., in_features] -> [..., out_features] of x's dtype, on the current stream.

        Under torch.autocast x is converted first, as for torch.nn.Linear. Of a DTensor each rank computes its own rows.

        Raises:
            TypeError, ValueError: x has the wrong dtype, size or device, or requires grad.
        """
        split = self.split
        if split is not None:
            x = split.enter(x)
        elif is_dtensor(x):
            return on_parts(self.forward, x)
        rows, dtype = input_rows(x, self.in_features), result_type(x)
        out = torch.empty((rows.shape[0], self.out_features), dtype=dtype, device=x.device)
        # A call of PyTorch's that changes nothing takes half a microsecond.
        self.multiply(self.quantise(rows if rows.dtype is dtype else rows.to(dtype)), out)
        out = out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)
        return out if split is None else split.leave(out)

    def quantise(self, rows: torch.Tensor, **prologue: Any) -> tuple[torch.Tensor, ...]:
        """rows [m, in_features] as the GEMM takes them; prologue: what `quantize_activations` computes of them first."""
        scheme, buffers = self.scheme, self._buffers
        return quantize_activations(
            rows, self.lhs_dtype, scheme=scheme.scheme, affine=scheme.affine, scale=buffers["input_scale"],
            permutation=buffers["permutation"], correction=self._weight.format.lhs_sums, rotation=scheme.rotation,
            **prologue,
        )  # fmt: skip

    def multiply(self, lhs: tuple[torch.Tensor, ...], out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """out [m, out_features] from what `quantise` gave; bias: bf16 or fp32, instead of the layer's.

        Of a layer divided along k: summed over the ranks, where all of them want it.
        """
        sums = self._sums
        weight = self.weight if sums == "f32" else self.operand
        bias = self._buffers["bias"] if bias is None else bias
        gemm(ANY, lhs, weight, out, bias, self.batch_invariant, sums="exact" if sums == "exact" else "f32")
        if self.split is not None and self.split.sums:
            self.split.sum(out)

    def extra_repr(self) -> str:
        fmt = self._weight.format
        held, decoded = self._weight.ops.layer_words(fmt, self._weight.group_size)
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"bias={self.bias is not None}", f"activation={self.activation!r}"]
        parts += held
        parts += ["permutation"] if self.permutation is not None else []
        parts += [f"rotation={self.scheme.rotation}"] if self.scheme.rotation else []
        parts += [f"sums={self.call_sums!r}"] if self.call_sums != "f32" else []
        parts += ["static input scale"] if self.input_scale is not None else []
        parts += [f"1 of {self.split.mesh.size()} parts along {self.split.dim}"] if self.split is not None else []
        return ", ".join(parts + decoded)


class W4A8Linear(PackedLinear):
    """A linear layer with a packed 4-bit weight and activations quantised to 8 bits; see `PackedLinear`."""

    kind = W4Weight

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, activation: str = "e4m3", group_size: int | str = 128, symmetric: bool = True,
        scale_dtype: torch.dtype = torch.bfloat16, full_range: bool = True, positive_scales: bool = False,
        clip_steps: int = CLIP_STEPS, moments: torch.Tensor | None = None, act_order: bool = True,
        device: Device = None, rotation: int | None = None,
    ) -> W4A8Linear:  # fmt: skip
        """A layer whose weight is `linear`'s, quantised by `quantize_w4`.

        Args:
            linear: out_features a multiple of 8, in_features a multiple of 16; left as it is.
            activation: one of ACTIVATIONS.
            group_size, symmetric, scale_dtype, full_range, positive_scales, clip_steps, moments, act_order: as in
                `quantize_w4`; moments may be on another device.
            device: where to quantise and keep the weight; None for where it is.
            rotation: 128: the weight is rotated, and the layer's quantiser rotates inputs; None: neither.

        Raises:
            TypeError, ValueError: an argument is wrong, or the weight has no such form; see `quantize_w4`.
        """
        recipe = Recipe(
            activation=activation, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype,
            full_range=full_range, positive_scales=positive_scales, clip_steps=clip_steps, act_order=act_order,
            rotation=rotation,
        )  # fmt: skip
        return cls.by_recipe(linear, recipe, device=device, moments=moments)

    @classmethod
    def from_linear_mxfp4(
        cls, linear: torch.nn.Linear, *, activation: str = "e4m3", moments: torch.Tensor | None = None,
        act_order: bool = True, device: Device = None, rotation: int | None = None,
    ) -> W4A8Linear:  # fmt: skip
        """As `from_linear`, by `quantize_mxfp4`; activation: "e4m3" or "e4m3_block", others raise TypeError."""
        recipe = Recipe(scheme="mxfp4", activation=activation, act_order=act_order, rotation=rotation)
        return cls.by_recipe(linear, recipe, device=device, moments=moments)

    @classmethod
    def from_linear_two_level(
        cls, linear: torch.nn.Linear, *, activation: str = "int8", moments: torch.Tensor | None = None,
        act_order: bool = True, device: Device = None, rotation: int | None = None,
    ) -> W4A8Linear:  # fmt: skip
        """As `from_linear`, by `quantize_w4_two_level`; activation: one of int8, others raise TypeError."""
        recipe = Recipe(scheme="two-level", activation=activation, act_order=act_order, rotation=rotation)
        return cls.by_recipe(linear, recipe, device=device, moments=moments)

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
        given = group_size, scale_dtype, activation, bias, permutation, input_scale, device, rotation
        order = "s8" if correction else "any"
        return cls._empty(
            in_features,
            out_features,
            *given,
            zero_point=not symmetric,
            offset=offset,
            correction=correction,
            order=order,
        )


class W8A8Linear(PackedLinear):
    """A linear layer with a packed 8-bit weight and activations quantised to its type; see `PackedLinear`.

    `activation` is "e4m3" or "e4m3_block" for weights of e4m3, one of the others for those of int8.
    """

    kind = W8Weight

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, activation: str = "e4m3", block: int | None = None,
        moments: torch.Tensor | None = None, device: Device = None, rotation: int | None = None,
    ) -> W8A8Linear:  # fmt: skip
        """As `W4A8Linear.from_linear`, by `quantize_w8`; the weight is of the activations' type.

        Args:
            block: None for a scale per row, 128 for one per block of 128 x 128.
            moments: as in `quantize_w8`; may be on another device.
            rotation: as there.
        """
        recipe = Recipe(bits=8, activation=activation, block=block, rotation=rotation)
        return cls.by_recipe(linear, recipe, device=device, moments=moments)

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, *, bias: bool | torch.dtype = False, activation: str = "e4m3",
        group_size: int | str | None = None, scale_dtype: torch.dtype = torch.float32, permutation: bool = False,
        input_scale: bool = False, device: Device = None, rotation: int = 0,
    ) -> W8A8Linear:  # fmt: skip
        """As `W4A8Linear.empty`; group_size None is per channel."""
        group_size, lhs = "channel" if group_size is None else group_size, activation_named(activation).dtype
        given = group_size, scale_dtype, activation, bias, permutation, input_scale, device, rotation
        return cls._empty(in_features, out_features, *given, zero_point=False, order=lhs, code=typed_code(lhs))


def empty_weight(
    k: int, n: int, group_size: int, fmt: WeightFormat, permutation: bool = False, device: Device = None,
    experts: int | None = None, rotation: int = 0,
) -> Weight:  # fmt: skip
    """A weight without values, of this format."""
    lead, strips = () if experts is None else (experts,), ceil_div(n, STRIP_ROWS)
    empty = partial(torch.empty, device=device)
    rows = (*lead, STRIP_ROWS * strips)
    return kind_of(fmt)(
        empty((*lead, strips, fmt.kblocks(k), fmt.record_bytes), dtype=torch.uint8),
        None if fmt.group_size else empty(rows, dtype=torch_dtype(fmt.scale_type)),
        n,
        k,
        group_size,
        fmt,
        row_sum=empty(rows, dtype=torch.float32) if fmt.row_sums else None,
        # A permutation even before it is loaded: what reads it never reaches beyond the input.
        permutation=torch.arange(k, dtype=torch.int32, device=device) if permutation else None,
        rotation=rotation,
    )


LINEARS: dict[int, type[PackedLinear]] = {each.kind.bits: each for each in (W4A8Linear, W8A8Linear)}
"""The layer's class by the width of its weight."""


def is_dtensor(x: torch.Tensor) -> bool:
    """Whether x is a DTensor, whose module costs a second to import: without it there is none."""
    if type(x) is torch.Tensor or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def on_parts(forward: Callable[..., torch.Tensor], x: Any) -> torch.Tensor:
    """`jitgemm.nn.layers.sharding.on_parts`, imported with the first DTensor."""
    from jitgemm.nn.layers import sharding

    return sharding.on_parts(forward, x)


def input_rows(x: torch.Tensor, columns: int, name: str = "x") -> torch.Tensor:
    """x [..., columns] in two dimensions, as the quantiser takes it. Raises TypeError or ValueError for any other x."""
    if x.shape[-1:] != (columns,):
        raise ValueError(f"{name}: expected shape [..., {columns}], got {list(x.shape)}")
    check_dtype(name, x.dtype, REAL_TYPES)
    check_no_grad(name, x)
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    if rows.stride(1) != 1 or rows.stride(0) * rows.element_size() % ALIGNMENT:
        rows = rows.contiguous()
    return rows


def result_type(x: torch.Tensor) -> torch.dtype:
    """x's dtype, or that of torch.autocast on its device."""
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype
