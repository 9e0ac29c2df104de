"""AMD Quark (`quant_method: quark`): a layer's settings, and int4 weights; others are as MXFP4's and W8A8's.

::

    weight             int32 [k, n / 8]    int4 (two's complement) or uint4, eight along n to a word: AWQ's order with
                                           pack_method "reorder", else the low nibble first
    weight_scale       floats [G, n]
    weight_zero_point  int32 [G, n / 8]    as weight; zeros, or absent, in a symmetric file of int4

    weight = (q - zero) * scale

::

    layer_quant_config       {pattern (fnmatch) of names: settings}; the first that fits a name
    layer_type_quant_config  {class: settings}, which names do not tell from the model's
    global_quant_config      settings of all other layers

    settings    weight, input_tensors: dtype, qscheme (per_tensor, per_channel, per_group, per_block), group_size,
                block_size, symmetric, is_dynamic

Read from Quark 0.13 (quant_config_parser.py, config.py, utils/pack.py, realquantizer.py). Zero points in floats, int4
with a scale for a row and scales of scales raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from jitgemm.checkpoint.bits import AWQ_ORDER, integer_zero, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Config, Format, Headers, Scheme, block_of, check_setting, inputs_of, setting
from jitgemm.checkpoint.layouts import FLOATS, INT32, G, K, N, TensorLayout, stored
from jitgemm.kernel.codes import EXPONENT_GROUP

METHOD = "quark"
_TYPES = {
    "fp4": ("float", 4),
    "fp6_e3m2": ("float", 6),
    "fp6_e2m3": ("float", 6),
    "fp8_e4m3": ("float", 8),
    "int8": ("int", 8),
}


def translated(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """What a Quark config says of the layer called prefix, as {quant_method, dtype, symmetric, pack_method, group_size,
    weight_block_size, input_activations} with the last in compressed-tensors' words; any other config as it is. Raises
    ValueError for a setting of another kind."""
    if config is None or setting(config, "quant_method") != METHOD:
        return config
    layers = setting(config, "layer_quant_config", default={})
    pattern = next((pattern for pattern in layers if fnmatchcase(prefix, pattern)), None)
    said: dict[str, Any] = {"quant_method": METHOD}
    if pattern is not None:
        settings = layers[pattern]
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"layer_quant_config: expected settings by names of layers, got {settings!r} for {pattern!r}"
            )
    elif setting(config, "layer_type_quant_config"):
        return said
    else:
        settings = setting(config, "global_quant_config", default={})
    weight, inputs = (setting(settings, name, default={}) for name in ("weight", "input_tensors"))
    said |= {name: setting(weight, name) for name in ("dtype", "symmetric", "group_size")}
    said["pack_method"] = setting(setting(config, "export"), "pack_method")
    if setting(weight, "qscheme") == "per_block":
        said["weight_block_size"] = block_of("block_size", weight.get("block_size"))
    if inputs:
        number_type, bits = _TYPES.get(dtype := setting(inputs, "dtype"), (dtype, 8))
        dynamic = setting(inputs, "is_dynamic", default=True)
        groups = setting(inputs, "qscheme") in ("per_group", "per_block")
        said["input_activations"] = {
            "type": number_type, "num_bits": bits, "strategy": "group" if groups else "token" if dynamic else "tensor",
            "dynamic": dynamic, "group_size": setting(inputs, "group_size"),
        }  # fmt: skip
    return said


def check_group(config: Config) -> None:
    """Raises ValueError for a config of Quark's with other groups than the 32 columns that share an e8m0."""
    if setting(config, "quant_method") == METHOD:
        check_setting(config, EXPONENT_GROUP, "group_size")


class _Quark(Format):
    name, cuts = METHOD, True
    suffixes = ("weight", "weight_scale", "weight_zero_point")

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        weight = names.get("weight")
        packed = weight is not None and weight.dtype == torch.int32 and "weight_scale" in names
        return packed and setting(config, "quant_method") == METHOD

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        dtype, method = setting(config, "dtype"), setting(config, "pack_method", default="reorder")
        if dtype not in ("int4", "uint4"):
            raise ValueError(f"weight: expected dtype 'int4' or 'uint4' in the config of one in int32, got {dtype!r}")
        if method not in ("reorder", "order"):
            raise ValueError(f"pack_method: expected reorder or order, got {method!r}")
        more: Any = {"inputs": inputs_of(config, "int4", headers), "settings": config or {}, "zero_points": True}
        return Scheme(self.name, "int4", setting(config, "group_size"), form=f"{dtype} {method}", **more)

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        signed = scheme.form.startswith("int4") and setting(scheme.settings, "symmetric") is not False
        return {
            "weight": stored(INT32, K, N / 8), "weight_scale": stored(FLOATS, G, N),
            "weight_zero_point": stored(INT32, G, N / 8, optional=signed), **scheme.static,
        }  # fmt: skip

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        (_, _, size), (dtype, _, packing) = self.sizes(tensors, scheme).known, scheme.form.partition(" ")
        order, middle = AWQ_ORDER if packing == "reorder" else None, 8 if dtype == "int4" else 0
        names = [name for name in ("weight", "weight_zero_point") if name in tensors]
        q, *zeros = ((unpack_nibbles(tensors[name], 1, order=order) ^ middle).T.contiguous() for name in names)
        scale = tensors["weight_scale"].T.contiguous()
        zero = zeros[0] if zeros else torch.full_like(scale, 8, dtype=torch.uint8)
        return integer_zero(q, scale, zero, size, name="weight_zero_point")


FORMAT = _Quark()
