"""W4AFP8 of SGLang (`quant_method: w4afp8`) and TensorRT-LLM (W4A8_CUSTOM): int4 weights for static e4m3 activations.

::

    weight            int8 [n, k / 2]     two's complement, even k in the low nibble, odd k in the high nibble
    weight_scale_inv  fp32 or bf16 [n, G] weight = q * weight_scale_inv (not its inverse, whatever the name says)
    input_scale       one element         x = q_x * input_scale; of experts.E.gate_proj, down_proj and up_proj it may
                                          stand under experts.E.w1, w2 and w3

Read from SGLang's w4afp8.py and the packer of its kernel's tests, and from TensorRT-LLM's fused_moe/quantization.py and
quantize_mixed_precision_moe.py. Both engines round the scales to bf16 when they load them; here they stay as the file
has them. Both use one input_scale, the largest, for all experts; here each layer keeps its own. TensorRT-LLM's other
W4A8 files (ModelOpt, two rows n to a byte) are not this format and raise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint.bits import twos_complement, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Config, Format, Headers, Scheme, Sizes, inputs_of, setting
from jitgemm.checkpoint.layouts import BYTES, E8M0, FLOATS, G, K, N, TensorLayout, stored
from jitgemm.checkpoint.w8a8 import INT8_METHODS
from jitgemm.tensors import describe

_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class _W4AFp8(Format):
    name, cuts = "w4afp8", True
    suffixes = ("weight", "weight_scale_inv")

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        weight, scale = names.get("weight"), names.get("weight_scale_inv")
        if weight is None or weight.dtype not in BYTES or weight.dim() != 2:
            return False
        if scale is not None:  # int8 in blocks has one too, with fewer rows, or a config that says so
            int8 = (config or {}).get("quant_method") in INT8_METHODS or scale.dtype in E8M0  # MXFP4
            return not int8 and scale.dim() == 2 and scale.shape[0] == weight.shape[0]
        if not {"weight_scale_2", "pre_quant_scale", "weight_scale"} <= set(names):
            return False
        return names["weight_scale"].shape[:1] == (2 * weight.shape[0],)  # ModelOpt's

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        size = (config or {}).get("group_size")
        if "weight_scale_inv" not in headers:
            raise ValueError(
                "weight: expected int8 [n, k / 2] with weight_scale_inv, got ModelOpt's W4A8_AWQ (two rows to a byte, "
                "pre_quant_scale on the activations, weight_scale_2), which is not supported"
            )
        method, scale = setting(config, "quant_method"), headers["weight_scale_inv"]
        if method == "fp8":  # DeepSeek-V4's experts have these names and shapes
            raise ValueError(
                "weight_scale_inv: expected e8m0 scales of FP4 codes (expert_dtype) in a file of quant_method 'fp8', "
                f"got {describe(scale)}"
            )
        return Scheme(self.name, group_size=size, inputs=inputs_of(config, "int4", headers), settings=config or {})

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        return {
            "weight": stored(BYTES, N, K / 2),
            "weight_scale_inv": stored(FLOATS, N, G),
            "input_scale": stored(torch.float32, optional=True),
        }

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        sizes, given = super().sizes(headers, replace(scheme, group_size=None)), scheme.group_size
        _, k, group_size = sizes.known
        if given not in (None, group_size):
            expected = f"k / columns of weight_scale_inv = {k} / {k // group_size}"
            raise ValueError(f"group_size: expected {expected}, got {given}")
        return sizes

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        q = twos_complement(unpack_nibbles(tensors["weight"], 1))
        return CanonicalWeight(q, tensors["weight_scale_inv"], group_size=self.sizes(tensors, scheme).known[2])

    def elsewhere(self, prefix: str) -> Mapping[str, str]:
        match = re.fullmatch(r"(.*\.experts\.\d+\.)(gate_proj|down_proj|up_proj)", prefix)
        return {"input_scale": f"{match[1]}{_EXPERT_NAMES[match[2]]}.input_scale"} if match else {}


FORMAT = _W4AFp8()
