"""PackedLinear: y = x · weightᵀ + bias, the weight in 4 or 8 bits, x quantised to 8 bits on the way in.

Layers over the calls `quantize_activations` and `gemm_w4a8_nt` or `gemm_w8a8_nt`; they know no kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from jitgemm.activations.call import quantize_activations
from jitgemm.activations.scheme import NO_PROLOGUE, Prologue, activation_named
from jitgemm.checkpoint.files import Source, opened
from jitgemm.checkpoint.reader import target_device
from jitgemm.dtypes import REAL_TYPES
from jitgemm.gemm.problem import ANY
from jitgemm.gemm.run import gemm
from jitgemm.nn.layers.invariant import CHUNKS, make_invariant, multiply_invariantly
from jitgemm.nn.layers.packed import Packed, Parts, state_dict_parts
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.tensors import ALIGNMENT, check_dtype, check_no_grad
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import check_packed, check_rotated

if TYPE_CHECKING:
    from jitgemm.nn.layers.sharding import EngineSharding, LinearSharding


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
        tp_invariant: None; set it to "k" or "n" for results that do not depend on how many ranks share the layer along
            k, as `RowwiseParallel(tp_invariant=True)` has them, or along n, as `ColwiseParallel`, nor on the other
            tokens (docs/parallel.md). ValueError for a layer that has none; along k a weight with corrections gets zero
            points again.
        tp_ranks: 8; set it to 2 or 4, ahead of `tp_invariant`, where no more ranks share the layer along k: with
            activations of e4m3, and of groups, fewer chunks are added up then. The bits are others.
        sums: "f32"; set it to "f16" or "exact" for kernels that may add up so, see `Weight.with_sums`.
        split: how the layer is divided among ranks; None for a whole one. See `jitgemm.nn.parallel`.
    """

    batch_invariant = False
    _tp_invariant: str | None = None
    tp_ranks = CHUNKS
    split: LinearSharding | EngineSharding | None = None
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

    @property
    def tp_invariant(self) -> str | None:
        return self._tp_invariant

    @tp_invariant.setter
    def tp_invariant(self, dim: str | None) -> None:
        if dim not in (None, "k", "n"):
            raise ValueError(f"tp_invariant: expected None, 'k' or 'n', got {dim!r}")
        if dim is not None:
            make_invariant(self, dim)
        self._tp_invariant = dim

    # ---- constructors ------------------------------------------------------------------------------------------------

    @classmethod
    def from_weight(
        cls, weight: Weight, bias: torch.Tensor | None = None, *, activation: str = "e4m3",
        input_scale: torch.Tensor | None = None,
    ) -> Self:  # fmt: skip
        """A layer over a packed weight; arguments and errors are the constructor's."""
        return cls(weight, bias, activation=activation, input_scale=input_scale)

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
        layer_class = LINEARS[layer.bits]
        if not issubclass(layer_class.kind, cls.kind):
            expected = f"expected a layer of {cls.kind.bits} bits"
            raise ValueError(f"prefix: {expected}, got {prefix!r}, which is a {layer_class.__name__}'s")
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
        layer_class: Any = LINEARS[parts.weight.bits] if cls is PackedLinear else cls
        return layer_class(**parts._asdict())

    # ---- the call ----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16, fp16 or fp32 [..., in_features] -> [..., out_features] of x's dtype, on the current stream.

        Under torch.autocast x is converted first, as for torch.nn.Linear. Of a DTensor each rank computes its own rows.

        Raises:
            TypeError, ValueError: x has the wrong dtype, size or device, or requires grad.
        """
        split: Any = self.split
        if split is not None:
            x = split.enter(x)
        elif is_dtensor(x):
            return on_parts(self.forward, x)
        rows, dtype = input_rows(x, self.in_features), result_type(x)
        # A call of PyTorch's that changes nothing takes half a microsecond.
        rows = rows if rows.dtype is dtype else rows.to(dtype)
        if self._tp_invariant is not None:
            out = multiply_invariantly(self, rows)
        else:
            out = torch.empty((rows.shape[0], self.out_features), dtype=dtype, device=x.device)
            self.multiply(self.quantise(rows), out)
        out = out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)
        return out if split is None else split.leave(out)

    def quantise(self, rows: torch.Tensor, **prologue: Any) -> tuple[torch.Tensor, ...]:
        """rows [m, in_features] as the GEMM takes them; prologue: what `quantize_activations` computes first."""
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
        bias = self._buffers["bias"] if bias is None else bias
        check_rotated(lhs, self.scheme.rotation)
        gemm(ANY, lhs, self.weight, out, bias, self.batch_invariant)
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
        parts += [f"tp_invariant={self.tp_invariant!r}"] if self.tp_invariant is not None else []
        parts += [f"tp_ranks={self.tp_ranks}"] if self.tp_ranks != CHUNKS else []
        parts += [f"1 of {self.split.world} parts along {self.split.dim}"] if self.split is not None else []
        return ", ".join(parts + decoded)


LINEARS: dict[int, Any] = {}
"""The layer's class by the width of its weight; `by_width.py` has them."""


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
