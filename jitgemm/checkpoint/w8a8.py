"""8-bit weights: DeepSeek's FP8 and SGLang's INT8 in blocks, and FP8 or INT8 with a scale for each row or the tensor.

::

    weight            float8_e4m3fn or int8 [n, k]
    weight_scale_inv  [ceil(n / B), ceil(k / B')], a scale for each block of B x B' (not its inverse, whatever the name
                      says), as config's weight_block_size says: 128 x 128, MXFP8's 1 x 32; one element without
                      blocks; the rows of gate_up_proj may have two, one above the other. DeepSeek-V4 calls it scale,
                      Mistral qscale_weight
    weight_scale      [n], [n, 1] or one element: without weight_scale_inv; ModelOpt's FP8_PB_WO has blocks of 128 x 128
                      in it, [n / 128, 1, k / 128, 1], Quark of B x B', as its config says; MXFP8's e8m0 [n, k / 32]
    input_scale       one element: static activations, of activation_scheme "static"; transformers' activation_scale,
                      Mistral's qscale_act

    weight = q * scale

DeepSeek-V3, transformers' and vLLM's per-tensor FP8 (quant_method "fp8"), SGLang's "blockwise_int8", "w8a8_int8" and
"w8a8_fp8" and "mxfp8" (MiniMax-M3's), FBGEMM's "fbgemm_fp8", ModelOpt's FP8 and MXFP8, Quark's, and the FP8 layers of
W4AFP8 checkpoints. Scales in e8m0, as such or as bytes, are read as the same powers of two in fp32. Read from vLLM's
fp8.py, transformers' finegrained_fp8.py (5.23), and SGLang's w4afp8.py, blockwise_int8.py and w8a8_int8.py. With
compressed-tensors' config the same tensors are that format's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint import quark
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.compressed_tensors_config import PRESETS
from jitgemm.checkpoint.format import Config, Format, Headers, Inputs, Scheme, block_of, inputs_of, setting
from jitgemm.checkpoint.layouts import CODE_TYPES, E8M0, FLOATS, Dim, G, K, N, TensorLayout, stored
from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe

INT8_METHODS = ("blockwise_int8", "w8a8_int8")
_BLOCK = (128, 128)
_BLOCKED = ("weight_scale_inv", "scale", "qscale_weight")
_PER_CHANNEL, _MXFP8, _MIXED = "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "MIXED_PRECISION"
_OF_MXFP8 = (1, EXPONENT_GROUP)
"""The block that SGLang's and MiniMax-M3's `mxfp8` has."""
_SETTINGS = {
    "activation_scheme": ("static", "dynamic"),
    "fmt": ("e4m3",),
    "scale_fmt": ("float", "ue8m0"),
    "quant_algo": (
        "FP8", _PER_CHANNEL, _MXFP8, "FP8_PB_WO", "FP8_BLOCK_SCALES", "W8A16", "W8A8_SQ_PER_CHANNEL", _MIXED,
        "W4A8_CUSTOM",
    ),
}  # fmt: skip
"""What settings may be, in whatever case."""


class _W8A8(Format):
    name, cuts = "w8a8", True
    suffixes = ("weight", "weight_scale", *_BLOCKED)

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        name, config = _scale_name(names), config or {}
        weight, scale, method = names.get("weight"), names.get(name), setting(config, "quant_method", default="")
        if weight is None or weight.dtype not in CODE_TYPES.values() or weight.dim() != 2 or scale is None:
            return False
        of_modelopt = "quant_algo" in config
        if method == "compressed-tensors" or (not method and "config_groups" in config and not of_modelopt):
            return False
        if name in _BLOCKED:
            # next to int8 with its own number of rows it is w4afp8's, unless the config says otherwise
            return weight.dtype != torch.int8 or scale.shape[:1] != weight.shape[:1] or method in INT8_METHODS
        return weight.dtype != torch.int8 or method in ("w8a8_int8", quark.METHOD) or of_modelopt

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        config = config or {}
        for key, known in _SETTINGS.items():
            if (got := setting(config, key)) is not None and str(got).lower() not in map(str.lower, known):
                raise ValueError(f"{key}: expected {' or '.join(known)}, got {got!r}")
        code, name, strategy, dims = _by_headers(config, headers)
        block = (_block(config) or _BLOCK) if strategy == "block" else None
        inputs, size = inputs_of(config, code, headers, block is not None), -1
        if strategy == "group":
            size = EXPONENT_GROUP
            quark.check_group(config)
        mixed = strategy == "group" and _algorithm(config) == _MIXED  # of MiniMax-M3's linears
        if (mixed or _is_mxfp8(config)) and "input_activations" not in config:  # of Quark's
            inputs = Inputs.of(PRESETS[_MXFP8][1])
        layouts = {name: stored(E8M0[::-1] if strategy == "group" else (*FLOATS, *E8M0), *dims)}
        return Scheme(self.name, code, size, strategy, block, inputs=inputs, found=layouts, settings=config)

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        return {"weight": stored(CODE_TYPES[scheme.code], N, K), **scheme.found, **scheme.static}

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        (n, _, group_size), name = self.sizes(tensors, scheme).known, _scale_name(tensors)
        scale = scheme.by_row(name, tensors[name], n)
        return CanonicalWeight(tensors["weight"], scale, group_size=group_size, code=scheme.code)


_Found = tuple[str, str, str, tuple[Dim | int, ...]]
"""Code, name of the scale, strategy, and dimensions of the scale."""


def _scale_name(tensors: Mapping[str, Any]) -> str:
    return next((name for name in _BLOCKED if name in tensors), "weight_scale")


def _algorithm(config: Mapping[str, Any]) -> str:
    return setting(config, "quant_algo", default="").upper()


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block that a config gives its scales; None for none."""
    default = _OF_MXFP8 if setting(config, "quant_method") == "mxfp8" else None
    block = setting(config, "weight_block_size", default=default)
    return block if block is None else block_of("weight_block_size", block)


def _is_mxfp8(config: Mapping[str, Any]) -> bool:
    """Whether scales are e8m0 for 32 k, and the input's too."""
    return _algorithm(config) == _MXFP8 or _block(config) == _OF_MXFP8


def _by_headers(config: Mapping[str, Any], headers: Mapping[str, Any]) -> _Found:
    """What the shape of the scale says, as far as the config allows it."""
    name, weight = _scale_name(headers), headers["weight"]
    if weight.dtype not in CODE_TYPES.values() or weight.dim() != 2:
        raise ValueError(f"weight: expected float8_e4m3fn or int8 [n, k], got {describe(weight)}")
    (n, k), shape, blocked = weight.shape, tuple(headers[name].shape), name in _BLOCKED
    code, single = "int8" if weight.dtype == torch.int8 else "e4m3", math.prod(shape) == 1
    block = _block(config) or _BLOCK
    per_tensor = config.get("weight_block_size", block) is None
    rows, columns = N / block[0], K / block[1]
    grid = ceil_div(n, block[0]), ceil_div(k, block[1])
    forms: dict[tuple[int, ...], tuple[str, tuple[Dim | int, ...]]] = {}
    if blocked:
        expected = f"shape {list(grid)}, or one element"
        if not (per_tensor and single):
            forms[grid] = "block", (rows, columns)
        if block == _OF_MXFP8 and headers[name].dtype in E8M0:
            forms[grid] = "group", (N, G)
        if per_tensor and n % 2 == 0:  # a gate's rows and the rows that it gates
            forms[2, 1] = "tensor", (N / (n // 2), 1)
    else:
        expected = f"one element, shape [{n}], [{n}, 1] or {list(grid)}, or e8m0s for {EXPONENT_GROUP} k"
        forms = {(n,): ("channel", (N,)), (n, 1): ("channel", (N, 1))}
        forms[grid[0], 1, grid[1], 1] = "block", (rows, 1, columns, 1)
        if headers[name].dtype in E8M0:
            forms.setdefault((n, ceil_div(k, EXPONENT_GROUP)), ("group", (N, G)))
        if not single:
            forms.setdefault(grid, ("block", (rows, columns)))
    if shape not in forms and not single:
        raise ValueError(f"{name}: expected {expected}, got shape {list(shape)}")
    return code, name, *forms.get(shape, ("tensor", ()))


FORMAT = _W8A8()
