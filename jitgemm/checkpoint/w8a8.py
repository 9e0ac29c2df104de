"""8-bit weights: DeepSeek's FP8 and SGLang's INT8 in blocks, and FP8 or INT8 with a scale for each row or the tensor.

::

    weight            float8_e4m3fn or int8 [n, k]
    weight_scale_inv  [ceil(n / B), ceil(k / B')], a scale for each block of B x B' (not its inverse, whatever the name
                      says), as config's weight_block_size says: 128 x 128; one element without blocks, of which the
                      rows of gate_up_proj may have two, one above the other. DeepSeek-V4 calls it scale, Mistral
                      qscale_weight
    weight_scale      [n], [n, 1] or one element: without weight_scale_inv; ModelOpt's FP8_PB_WO has blocks of 128 x 128
                      in it, [n / 128, 1, k / 128, 1]
    input_scale       one element: static activations, of activation_scheme "static"; transformers' activation_scale,
                      Mistral's qscale_act

    weight = q * scale

DeepSeek-V3, transformers' and vLLM's per-tensor FP8 (quant_method "fp8"), SGLang's "blockwise_int8", "w8a8_int8" and
"w8a8_fp8", FBGEMM's "fbgemm_fp8", ModelOpt's FP8, and the FP8 layers of W4AFP8 checkpoints. Scales in e8m0, as such or as
bytes, are read as the same powers of two in fp32. Read from vLLM's fp8.py, transformers' finegrained_fp8.py (5.23), and
SGLang's w4afp8.py, blockwise_int8.py and w8a8_int8.py. With compressed-tensors' config the same tensors are that
format's. Knows no files: tensors come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import check_one_of, check_single, setting
from jitgemm.checkpoint.canonical import (
    INPUT_SCALES,
    CanonicalWeight,
    Dims,
    Format,
    Sizes,
    TensorInfo,
    by_block,
    check_known,
)
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe

CODES = (torch.float8_e4m3fn, torch.int8)
INT8_METHODS = ("blockwise_int8", "w8a8_int8")
_BLOCK = (128, 128)
_STATIC = INPUT_SCALES[:3]
_BLOCKED = ("weight_scale_inv", "scale", "qscale_weight")
_SETTINGS = {
    "activation_scheme": ("static", "dynamic"),
    "fmt": ("e4m3",),
    "scale_fmt": ("float", "ue8m0"),
    "quant_algo": (
        "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W8A16", "W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION",
    ),
}  # fmt: skip
"""What settings may be."""


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    weight, scale = names.get("weight"), names.get(_scale_name(names))
    method = setting(config, "quant_method", default="")
    if weight is None or weight.dtype not in CODES or len(weight.shape) != 2:
        return False
    of_modelopt = "quant_algo" in (config or {})
    if method == "compressed-tensors" or (not method and "config_groups" in (config or {}) and not of_modelopt):
        return False
    if scale is not None and _scale_name(names) in _BLOCKED:
        # beside int8 with its own number of rows it is w4afp8's, unless the config says otherwise
        return weight.dtype != torch.int8 or scale.shape[:1] != weight.shape[:1] or method in INT8_METHODS
    return "weight_scale" in names and (weight.dtype != torch.int8 or method == "w8a8_int8" or of_modelopt)


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    name = _scale_name(tensors)
    for key, known in _SETTINGS.items():
        check_one_of(config, key, known)
    check_known(tensors, ("weight", name, *_STATIC))
    weight = tensors["weight"]
    if weight.dtype not in CODES or weight.dim() != 2:
        raise ValueError(f"weight: expected float8_e4m3fn or int8 [n, k], got {describe(weight)}")
    for static in _STATIC:
        if static in tensors:
            check_single(static, tensors[static])
    n, k = weight.shape
    _, columns, blocks = _block(name, tuple(tensors[name].shape), n, k, config)
    return Sizes(n, k, columns, weight.dtype, blocks)


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    sizes = _sizes(tensors, config)
    name = _scale_name(tensors)
    scale = tensors[name]
    rows, columns, _ = _block(name, tuple(scale.shape), sizes.n, sizes.k, config)
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        scale = scale.view(torch.float8_e8m0fnu).float()
    scale = by_block(scale.reshape(-1, ceil_div(sizes.k, columns)), rows, sizes.n)
    static = next((tensors[each].reshape(1).float() for each in _STATIC if each in tensors), None)
    return CanonicalWeight(tensors["weight"], scale, group_size=columns, input_scale=static, bits=8)


def _scale_name(tensors: Mapping[str, Any]) -> str:
    return next((name for name in _BLOCKED if name in tensors), "weight_scale")


def _block(
    name: str, shape: tuple[int, ...], n: int, k: int, config: Mapping[str, Any] | None
) -> tuple[int, int, bool]:
    """Rows and columns that share a scale, and whether engines quantise the layer's input in blocks, too."""
    rows, columns = block = _BLOCK
    if name in _BLOCKED:
        block = setting(config, "weight_block_size", default=_BLOCK)
        if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
            raise ValueError(f"weight_block_size: expected two positive integers, got {block!r}")
        rows, columns = block
    grid = ceil_div(n, rows), ceil_div(k, columns)
    per_tensor = (config or {}).get("weight_block_size", block) is None
    if name in _BLOCKED:
        if shape == (2, 1) and per_tensor and n % 2 == 0:  # a gate's rows, and those that it gates
            return n // 2, k, False
        if shape == grid and not (per_tensor and math.prod(shape) == 1):
            return rows, columns, True
        expected = f"shape {list(grid)}, or one element"
    elif shape == (grid[0], 1, grid[1], 1):
        return rows, columns, True
    elif shape in ((n,), (n, 1)):
        return 1, k, False
    else:
        expected = f"one element, shape [{n}] or [{n}, 1]"
    if math.prod(shape) != 1:
        raise ValueError(f"{name}: expected {expected}, got shape {list(shape)}")
    return n, k, False


def _dims(headers: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> Dims:
    name = _scale_name(headers)
    (n, k), shape = headers["weight"].shape, headers[name].shape
    rows, columns, _ = _block(name, shape, n, k, config)
    dims: dict[str, tuple[str, ...]] = {"weight": ("n", "k")}
    if math.prod(shape) != 1:
        by = f"n / {rows}", "G" if columns < k else "1"
        dims[name] = (by[0], "1", by[1], "1") if len(shape) == 4 else by[: len(shape)]
    return dims


FORMAT = Format(name="w8a8", detect=_detect, sizes=_sizes, read=_read, dims=_dims)
