"""W4A8Linear: y = x · weightᵀ + bias, the weight in 4 bits, x quantised to 8 bits on the way in.

A layer over the calls `quantize_activations` and `gemm_w4a8_nt`; knows no kernels. Its buffers are the tensors of its
`W4Weight`, which is therefore made anew wherever PyTorch replaces or moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from jitgemm.activations.call import quantize_activations
from jitgemm.checkpoint.files import Source, opened
from jitgemm.checkpoint.reader import target_device
from jitgemm.dtypes import REAL_TYPES
from jitgemm.gemm.call import gemm_w4a8_nt
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, ceil_div
from jitgemm.nn.read import ACTIVATIONS, CODES, check_activation, layer_of, read, state_dict_parts
from jitgemm.runtime.checks import ALIGNMENT
from jitgemm.tensors import check_dtype, describe, dtype_name
from jitgemm.weight.quantize import quantize_w4
from jitgemm.weight.w4 import W4Weight, check_packed, weight_format

_WEIGHT_TENSORS = ("blocks", "channel_scale", "row_sum", "permutation")  # as `W4Weight` and its state dict call them
_ON_CPU = ("meta", "activation_type")  # describe the layer, take no part in the call


class W4A8Linear(torch.nn.Module):
    """A linear layer with a packed 4-bit weight and activations quantised to 8 bits, for inference.

    Made by `from_linear`, `from_weight`, `from_checkpoint` or `from_state_dict`; `empty` makes one to load into.

    Input: bf16, fp16 or fp32 [..., in_features]; output: [..., out_features] in the input's dtype, or in autocast's.
    Every token (row) is quantised with a scale of its own, or with `input_scale` if there is one. There is no gradient:
    the input must not require one while gradients are enabled.

    Buffers, all in `state_dict()`; moved by `.to(device)`, but never converted to another type, whatever the model is:

    ==================  =========================================================================================
    `blocks`            uint8, the packed weight: see `W4Weight`
    `channel_scale`     scales, per channel only
    `row_sum`           fp32, row sums of the weight, for zero points of activations
    `permutation`       int32 [in_features], act-order only: the quantiser gathers its input by it
    `meta`              int64 on the CPU: sizes and format of the weight, compared when a state dict is loaded
    `activation_type`   int64 [1] on the CPU: number of `activation` in ACTIVATIONS, compared too
    `input_scale`       fp32 [1], static scale of the input, if the checkpoint has one
    `bias`              bf16 or fp32 [out_features], if there is one
    ==================  =========================================================================================

    Attributes:
        in_features, out_features: k and n.
        activation: "e4m3", "int8" or "int8_affine".
        batch_invariant: False; set it to True for results that do not depend on the other tokens, see `gemm_w4a8_nt`.
    """

    batch_invariant = False

    def __init__(
        self,
        weight: W4Weight,
        bias: torch.Tensor | None = None,
        *,
        activation: str = "e4m3",
        input_scale: torch.Tensor | None = None,
    ):
        """A layer over a packed weight; no tensor is copied.

        Args:
            weight: [n, k], packed.
            bias: bf16, fp16 or fp32 [n] or None; fp16 is widened to fp32.
            activation: "e4m3", "int8" or "int8_affine".
            input_scale: None for a scale per token, or fp32 of one element: the static scale of all inputs. Not with
                "int8_affine".

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        super().__init__()
        if not isinstance(weight, W4Weight):
            raise TypeError(f"weight: expected a W4Weight, got {type(weight).__name__}")
        check_packed(weight, "weight.", experts=False)
        self.activation = check_activation(activation)
        _check_codes(weight, activation)
        self._weight = weight
        self.in_features, self.out_features = weight.k, weight.n
        tensors = weight.state_dict()
        buffers = {name: tensors.get(name) for name in (*_WEIGHT_TENSORS, "meta")}
        buffers["activation_type"] = torch.tensor([ACTIVATIONS.index(activation)], device="cpu")
        buffers["input_scale"] = _check_input_scale(input_scale, activation, weight.device)
        buffers["bias"] = _check_bias(bias, weight.n, weight.device)
        # Absent ones last: torch.export (2.13, not strict) counts on it.
        for name, tensor in sorted(buffers.items(), key=lambda item: item[1] is None):
            self.register_buffer(name, tensor)

    # ---- constructors ------------------------------------------------------------------------------------------------

    @classmethod
    def from_weight(
        cls,
        weight: W4Weight,
        bias: torch.Tensor | None = None,
        *,
        activation: str = "e4m3",
        input_scale: torch.Tensor | None = None,
    ) -> W4A8Linear:
        """A layer over a packed weight; arguments and errors are the constructor's."""
        return cls(weight, bias, activation=activation, input_scale=input_scale)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        activation: str = "e4m3",
        group_size: int = 128,
        symmetric: bool = True,
        scale_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> W4A8Linear:
        """A layer whose weight is `linear`'s, quantised by `quantize_w4`.

        Args:
            linear: out_features a multiple of 8, in_features a multiple of 32; left as it is.
            activation: "e4m3", "int8" or "int8_affine".
            group_size, symmetric, scale_dtype, options: as in `quantize_w4`; a group_size of in_features or more is per
                channel.
            device: where to quantise and keep the weight; None for where it is.

        Raises:
            TypeError, ValueError: an argument is wrong, or the weight has no 4-bit form; see `quantize_w4`.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        check_activation(activation)
        with torch.no_grad():
            w = linear.weight.detach()
            if w.is_meta:
                raise ValueError("linear: expected a weight with data, got one on the meta device")
            bias = None if linear.bias is None else linear.bias.detach()
            if device is not None:
                w, bias = w.to(device), None if bias is None else bias.to(device)
            weight = quantize_w4(
                w, group_size, symmetric=symmetric, scale_dtype=scale_dtype, lhs_dtype=CODES[activation], **options
            )
            return cls(weight, None if bias is None else bias.clone(), activation=activation)

    @classmethod
    def from_checkpoint(
        cls,
        source: Source,
        prefix: str,
        *,
        activation: str | None = None,
        device: torch.device | str | int | None = None,
        format: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> W4A8Linear:
        """A layer read from a quantised checkpoint, bit-exact; only its own tensors are read.

        Args:
            source: folder or file, tensors by name or an open `jitgemm.checkpoint.Checkpoint`, as in `jitgemm.load`.
            prefix: the layer's name, such as "model.layers.0.mlp.down_proj".
            activation: "e4m3", "int8" or "int8_affine"; None for what the checkpoint says of the layer (config, or
                torchao's metadata), or "e4m3" where it says nothing of activations.
            device: where to; None for the current GPU, if there is one.
            format, config: as in `jitgemm.load`.

        Raises:
            ValueError: no such layer, or a form that cannot be read exactly; see `jitgemm.load`. Also for activations
                that the layer does not have, such as scales per group of k.
        """
        if activation is not None:
            check_activation(activation)
        checkpoint = opened(source, config)
        layer = layer_of(checkpoint, prefix, activation, format)
        return cls(**read(checkpoint, layer, target_device(device))._asdict())

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> W4A8Linear:
        """The layer whose `state_dict(prefix=prefix)` is among `tensors`, such as a safetensors file's.

        Nothing else need be known of the layer; memory is shared with `tensors`.

        Raises:
            ValueError: a tensor is missing, or has the wrong shape or type.
        """
        return cls(**state_dict_parts(tensors, prefix)._asdict())

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        *,
        bias: bool | torch.dtype = False,
        activation: str = "e4m3",
        group_size: int = 128,
        symmetric: bool = True,
        scale_dtype: torch.dtype = torch.bfloat16,
        offset: bool = False,
        permutation: bool = False,
        input_scale: bool = False,
        device: torch.device | str | int | None = None,
    ) -> W4A8Linear:
        """A layer without values, to load a state dict into; the arguments say which tensors that one has.

        Args:
            bias: whether there is one, bf16; or its dtype, torch.bfloat16 or torch.float32.
            offset, permutation, input_scale: whether the weight has float offsets or act-order, and the input a static
                scale.
            device: "meta" is possible, for `load_state_dict(…, assign=True)`.
        """
        scale_type = check_dtype("scale_dtype", scale_dtype, REAL_TYPES)
        bias_dtype = torch.bfloat16 if bias is True else bias
        if bias_dtype not in (False, torch.bfloat16, torch.float32):
            raise TypeError(f"bias: expected a bool, torch.bfloat16 or torch.float32, got {bias!r}")
        n, k = out_features, in_features
        fmt = weight_format(k, group_size, not symmetric, scale_type, offset=offset)
        strips = ceil_div(n, STRIP_ROWS)
        empty = partial(torch.empty, device=device)
        weight = W4Weight(
            empty((strips, ceil_div(k, BLOCK_K), fmt.record_bytes), dtype=torch.uint8),
            None if fmt.group_size else empty(STRIP_ROWS * strips, dtype=scale_dtype),
            n,
            k,
            group_size,
            fmt,
            row_sum=empty(STRIP_ROWS * strips, dtype=torch.float32),
            # A permutation even before it is loaded: what reads it never reaches beyond the input.
            permutation=torch.arange(k, dtype=torch.int32, device=device) if permutation else None,
        )
        return cls(
            weight,
            empty(n, dtype=bias_dtype) if bias_dtype else None,
            activation=activation,
            input_scale=torch.ones(1, device=device, dtype=torch.float32) if input_scale else None,
        )

    # ---- the call ----------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> W4Weight:
        """The packed weight; its tensors are the layer's buffers."""
        # Buffers first: a compiler then takes the tensors for the module's own, of fixed sizes and addresses.
        tensors = [self._buffers[name] for name in _WEIGHT_TENSORS]
        weight = self._weight
        if weight.blocks is tensors[0]:
            return weight
        # Replaced without asking the module: for good, or under a tracer for as long as it traces.
        return weight.with_tensors(*tensors) if torch.compiler.is_compiling() else self._bind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16, fp16 or fp32 [..., in_features] -> [..., out_features] of x's dtype, on the current stream.

        Under torch.autocast x is converted first, as for torch.nn.Linear.

        Raises:
            TypeError, ValueError: x has the wrong dtype, size or device, or requires grad.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x: expected shape [..., {self.in_features}], got {list(x.shape)}")
        check_dtype("x", x.dtype, REAL_TYPES)
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "x: expected a tensor that does not require grad, since W4A8Linear has no gradient, got one that does; "
                "run under torch.no_grad() or torch.inference_mode()"
            )
        device_type = x.device.type
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        weight, input_scale = self.weight, self._buffers["input_scale"]
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1 or rows.stride(0) * rows.element_size() % ALIGNMENT:
            rows = rows.contiguous()
        lhs = quantize_activations(
            rows,
            CODES[self.activation],
            scheme="token" if input_scale is None else "tensor",
            affine=self.activation == "int8_affine",
            scale=input_scale,
            permutation=weight.permutation,
        )
        out = torch.empty((rows.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        gemm_w4a8_nt(lhs, weight, out, bias=self._buffers["bias"], batch_invariant=self.batch_invariant)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        fmt = self._weight.format
        group = f"group_size={self._weight.group_size}" if fmt.group_size else "per channel"
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"bias={self.bias is not None}", f"activation={self.activation!r}", group]
        parts += ["zero points"] if fmt.zero_point else []
        parts += ["permutation"] if self.permutation is not None else []
        parts += ["static input scale"] if self.input_scale is not None else []
        return ", ".join(parts)

    # ---- buffers that are replaced, moved, loaded, copied ------------------------------------------------------------

    def _bind(self) -> W4Weight:
        """Makes the weight anew over the buffers as they are now, which checks and settles it."""
        self._weight = self._weight.with_tensors(*(self._buffers[name] for name in _WEIGHT_TENSORS))
        return self._weight

    def _bind_described(self) -> None:
        """The same, from what `meta` says of the buffers."""
        self._weight = W4Weight.from_state_dict({name: x for name, x in self._buffers.items() if x is not None})
        for name in _WEIGHT_TENSORS:
            self._buffers[name] = getattr(self._weight, name)  # a misaligned one was copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> W4A8Linear:
        moved = {
            name: _moved(tensor, fn)
            for name, tensor in self._buffers.items()
            if tensor is not None and name not in _ON_CPU
        }
        self._buffers.update(moved)
        self._bind()
        return self

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        wrong = self._what_is_wrong(state_dict, prefix)
        if wrong is not None:
            error_msgs.append(wrong)
            return
        errors = len(error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if len(error_msgs) > errors:
            return
        for name in _ON_CPU:
            self._buffers[name] = self._buffers[name].cpu()
        if self.blocks.is_meta:
            self._bind()
        else:
            self._bind_described()

    def _what_is_wrong(self, state_dict: Mapping[str, torch.Tensor], prefix: str) -> str | None:
        """Why these tensors are not this layer's, so that nothing is copied or converted that should not be."""
        if prefix + "blocks" in state_dict and prefix + "meta" in state_dict:
            try:
                other = W4Weight.from_state_dict(state_dict, prefix)
            except (TypeError, ValueError) as error:
                return str(error)
            mine = self._weight
            # The order of codes may differ: it depends on their values, and takes the same room.
            formats = (replace(weight.format, codes="any") for weight in (mine, other))
            if mine.shape != other.shape or mine.group_size != other.group_size or len(set(formats)) > 1:
                return f"{prefix}meta: expected {mine!r}, got {other!r}"
        number = state_dict.get(prefix + "activation_type")
        if number is not None and number.tolist() != self.activation_type.tolist():
            mine = self.activation_type.tolist()
            return f"{prefix}activation_type: expected {mine} ({self.activation}), got {number.tolist()}"
        for name in ("input_scale", "bias"):
            mine, other = self._buffers[name], state_dict.get(prefix + name)
            if mine is not None and other is not None and mine.dtype != other.dtype:
                return f"{prefix}{name}: expected {dtype_name(mine.dtype)}, got {dtype_name(other.dtype)}"
        return None

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Refuses parameters: what assigns one ties or resizes a weight, which a packed one cannot be."""
        raise TypeError(
            f"{self._weight.layer or 'W4A8Linear'}: expected no parameter, as a W4A8Linear has buffers only, got "
            f"{name!r}; to tie or resize this weight, leave the layer out with filter=..."
        )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_weight"]  # the buffers hold all of it
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_described()


def _moved(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """fn(tensor) with the dtype kept: `model.half()` and its like convert floats and leave integers alone."""
    bits = tensor.view(torch.uint8)
    out = fn(bits)
    if out is bits:
        return tensor
    if out.dtype != torch.uint8:
        raise TypeError(f"W4A8Linear: expected a move to another device, got a conversion to {dtype_name(out.dtype)}")
    return out.view(tensor.dtype)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _check_codes(weight: W4Weight, activation: str) -> None:
    codes, needed = weight.format.codes, "e4m3" if activation == "e4m3" else "s8"
    if codes not in ("any", needed):
        other = "e4m3" if codes == "e4m3" else "int8"
        raise ValueError(f"weight: expected one packed for {activation} or for any activations, got one for {other}")
    if activation == "int8_affine" and weight.row_sum is None:
        raise ValueError("weight: expected row sums, which int8_affine needs, got a weight without; pack it again")


def _check_given(name: str, tensor: object, device: torch.device) -> None:
    """Refuses what is no tensor beside the weight, other than None."""
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor or None, got {type(tensor).__name__}")
    if tensor is not None and tensor.device != device:
        raise ValueError(f"{name}: expected the weight's device {device}, got {tensor.device}")


def _check_input_scale(input_scale: torch.Tensor | None, activation: str, device: torch.device) -> torch.Tensor | None:
    _check_given("input_scale", input_scale, device)
    if input_scale is None:
        return None
    if activation == "int8_affine":
        raise ValueError("input_scale: expected None with int8_affine, whose zero points are found per token")
    if input_scale.dtype != torch.float32 or input_scale.numel() != 1:
        raise ValueError(f"input_scale: expected float32 of one element, got {describe(input_scale)}")
    if not input_scale.is_meta and not 0 < float(input_scale) < torch.inf:
        raise ValueError(f"input_scale: expected a positive, finite number, got {float(input_scale)}")
    return input_scale.detach().reshape(1)


def _check_bias(bias: torch.Tensor | None, n: int, device: torch.device) -> torch.Tensor | None:
    """As the GEMM takes it: fp16 widened to fp32, which is exact."""
    _check_given("bias", bias, device)
    if bias is None:
        return None
    check_dtype("bias", bias.dtype, REAL_TYPES)
    if tuple(bias.shape) != (n,):
        raise ValueError(f"bias: expected shape [{n}], got {list(bias.shape)}")
    bias = bias.detach().contiguous()
    return bias.to(torch.float32) if bias.dtype == torch.float16 else bias
