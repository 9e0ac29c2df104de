"""8-bit weights: DeepSeek's FP8 and SGLang's INT8 in blocks, and FP8 or INT8 with a scale for each row or the tensor.

::

    weight            float8_e4m3fn or int8 [n, k]
    weight_scale_inv  [ceil(n / B), ceil(k / B')], a scale for each block of B x B' (not its inverse, whatever the name
                      says), as config's weight_block_size says: 128 x 128
    weight_scale      [n], [n, 1] or one element: without weight_scale_inv
    input_scale       one element: static activations, of activation_scheme "static"

    weight = q * scale

DeepSeek-V3 and vLLM's per-tensor FP8 (quant_method "fp8"), SGLang's "blockwise_int8", "w8a8_int8" and "w8a8_fp8",
FBGEMM's "fbgemm_fp8", ModelOpt's FP8 per tensor and per channel, and the FP8 layers of W4AFP8 checkpoints. Scales in
e8m0 are read as the same powers of two in fp32. Read from vLLM's fp8.py and SGLang's w4afp8.py, blockwise_int8.py and
w8a8_int8.py. With compressed-tensors' config the same tensors are that format's. Knows no files: tensors come from the
caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import check_shape, check_single, setting
from jitgemm.checkpoint.canonical import CanonicalWeight, Dims, Format, Sizes, TensorInfo, by_block, check_known
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe

CODES = (torch.float8_e4m3fn, torch.int8)
INT8_METHODS = ("blockwise_int8", "w8a8_int8")
_BLOCK = (128, 128)


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    weight, scale = names.get("weight"), names.get("weight_scale_inv")
    method = setting(config, "quant_method", default="")
    if weight is None or weight.dtype not in CODES or len(weight.shape) != 2:
        return False
    if method == "compressed-tensors" or (
        not method and "config_groups" in (config or {}) and "quant_algo" not in config
    ):
        return False
    if scale is not None:  # beside int8 with its own number of rows it is w4afp8's, unless the config says otherwise
        return weight.dtype != torch.int8 or scale.shape[:1] != weight.shape[:1] or method in INT8_METHODS
    return "weight_scale" in names and (weight.dtype != torch.int8 or method == "w8a8_int8")


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    blocks = "weight_scale_inv" in tensors
    check_known(tensors, ("weight", "weight_scale_inv" if blocks else "weight_scale", "input_scale"))
    weight = tensors["weight"]
    if weight.dtype not in CODES or weight.dim() != 2:
        raise ValueError(f"weight: expected float8_e4m3fn or int8 [n, k], got {describe(weight)}")
    n, k = weight.shape
    if blocks:
        rows, columns = _block(config)
        check_shape("weight_scale_inv", tensors["weight_scale_inv"], ceil_div(n, rows), ceil_div(k, columns))
    else:
        columns, scale = k, tensors["weight_scale"]
        if tuple(scale.shape) not in ((n,), (n, 1)) and math.prod(scale.shape) != 1:
            raise ValueError(
                f"weight_scale: expected one element, shape [{n}] or [{n}, 1], got shape {list(scale.shape)}"
            )
    if "input_scale" in tensors:
        check_single("input_scale", tensors["input_scale"])
    return Sizes(n, k, columns, weight.dtype)


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    sizes = _sizes(tensors, config)
    blocks = "weight_scale_inv" in tensors
    scale = tensors["weight_scale_inv" if blocks else "weight_scale"]
    scale = scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
    scale = by_block(scale, _block(config)[0], sizes.n) if blocks else scale.reshape(-1, 1).expand(sizes.n, 1)
    static = tensors["input_scale"].reshape(1).float() if "input_scale" in tensors else None
    return CanonicalWeight(tensors["weight"], scale, group_size=sizes.group_size, input_scale=static, bits=8)


def _block(config: Mapping[str, Any] | None) -> tuple[int, int]:
    """Rows and columns of a block."""
    block = setting(config, "weight_block_size", default=_BLOCK)
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise ValueError(f"weight_block_size: expected two positive integers, got {block!r}")
    return block[0], block[1]


def _dims(headers: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> Dims:
    dims: dict[str, tuple[str, ...]] = {"weight": ("n", "k")}
    if "weight_scale_inv" in headers:
        dims["weight_scale_inv"] = f"n / {_block(config)[0]}", "G"
    elif math.prod(headers["weight_scale"].shape) != 1:
        dims["weight_scale"] = ("n", "1")[: headers["weight_scale"].dim()]
    return dims


FORMAT = Format(name="w8a8", detect=_detect, sizes=_sizes, read=_read, dims=_dims)
