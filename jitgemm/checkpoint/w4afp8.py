"""W4AFP8 of SGLang (`quant_method: w4afp8`) and TensorRT-LLM (W4A8_CUSTOM): int4 weights for static e4m3 activations.

::

    weight            int8 [n, k / 2]     two's complement, even k in the low nibble, odd k in the high nibble
    weight_scale_inv  fp32 or bf16 [n, G] weight = q * weight_scale_inv (not its inverse, whatever the name says)
    input_scale       one element         x = q_x * input_scale; of experts.E.gate_proj, down_proj and up_proj it may
                                          stand under experts.E.w1, w2 and w3

Read from SGLang's w4afp8.py and the packer of its kernel's tests, and from TensorRT-LLM's fused_moe/quantization.py and
quantize_mixed_precision_moe.py. Both engines round the scales to bf16 when they load them; here they stay as the file
has them. Both use one input_scale, the largest, for all experts; here each layer keeps its own. TensorRT-LLM's other
W4A8 files (ModelOpt, two rows n to a byte) are not this format and are refused.

Knows no files: tensors come from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import BYTES, check_single, setting
from jitgemm.checkpoint.bits import twos_complement, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, Format, Sizes, TensorInfo, check_known
from jitgemm.checkpoint.w8a8 import INT8_METHODS
from jitgemm.tensors import describe

_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    weight = names.get("weight")
    if weight is None or weight.dtype not in BYTES or len(weight.shape) != 2:
        return False
    scale = names.get("weight_scale_inv")
    if scale is not None:  # int8 in blocks of n and k has such a scale too, with fewer rows, or a config that says so
        int8 = (config or {}).get("quant_method") in INT8_METHODS
        return not int8 and len(scale.shape) == 2 and scale.shape[0] == weight.shape[0]
    return _is_modelopt(names)


def _is_modelopt(names: Mapping[str, TensorInfo]) -> bool:
    scale = names.get("weight_scale")
    return (
        {"weight_scale_2", "pre_quant_scale"} <= set(names)
        and scale is not None
        and scale.shape[:1] == (2 * names["weight"].shape[0],)
    )


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    if "weight_scale_inv" not in tensors:
        raise ValueError(
            "weight: expected int8 [n, k / 2] beside weight_scale_inv, got ModelOpt's W4A8_AWQ (two rows to a byte, "
            "pre_quant_scale on the activations, weight_scale_2), which is not supported"
        )
    check_known(tensors, ("weight", "weight_scale_inv", "input_scale"))
    weight, scale = tensors["weight"], tensors["weight_scale_inv"]
    method = setting(config, "quant_method")
    if method == "fp8" or scale.dtype in (
        torch.float8_e8m0fnu,
        torch.uint8,
    ):  # DeepSeek-V4's experts have these names and shapes
        raise ValueError(
            f"weight: expected int4 codes with floats for scales, got int8 with {describe(scale)} in a file of "
            f"quant_method {method!r}, which are FP4 (expert_dtype), not read here"
        )
    k, groups = 2 * weight.shape[1], scale.shape[1]
    if groups < 1 or k % groups:
        raise ValueError(f"weight_scale_inv: expected columns that divide k = {k}, got {groups}")
    group_size = k // groups
    given = (config or {}).get("group_size")
    if given is not None and given != group_size:
        raise ValueError(f"group_size: expected k / columns of weight_scale_inv = {k} / {groups}, got {given}")
    if "input_scale" in tensors:
        check_single("input_scale", tensors["input_scale"])
    return Sizes(weight.shape[0], k, group_size)


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    group_size = _sizes(tensors, config).group_size
    q = twos_complement(unpack_nibbles(tensors["weight"], 1))
    static = tensors["input_scale"].reshape(1).float() if "input_scale" in tensors else None
    return CanonicalWeight(q, tensors["weight_scale_inv"], group_size=group_size, input_scale=static)


def _elsewhere(prefix: str) -> Mapping[str, str]:
    match = re.fullmatch(r"(.*\.experts\.\d+\.)(gate_proj|down_proj|up_proj)", prefix)
    return {"input_scale": f"{match[1]}{_EXPERT_NAMES[match[2]]}.input_scale"} if match else {}


FORMAT = Format(
    name="w4afp8", detect=_detect, sizes=_sizes, read=_read, elsewhere=_elsewhere,
    dims=lambda *_: {"weight": ("n", "k / 2"), "weight_scale_inv": ("n", "G")},
)  # fmt: skip
