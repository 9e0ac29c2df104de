"""MXFP4 under the names of gpt-oss, DeepSeek-V4, AMD Quark and ModelOpt; compressed-tensors' is that format's.

::

    blocks            uint8 [n, k / 32, 16]   gpt-oss (`quant_method: mxfp4`): experts.gate_up_proj_blocks and so on,
                                              stacked over experts, gate and up in alternate rows
    scales            uint8 [n, k / 32]
    weight            int8 [n, k / 2]         DeepSeek-V4's experts (`expert_dtype: fp4`, `quant_method: fp8`)
    scale             e8m0 [n, k / 32]        transformers calls it weight_scale_inv
    weight            uint8 [n, k / 2]        Quark (`quant_method: quark`), ModelOpt's W4A8_MXFP4_FP8
    weight_scale      uint8 [n, k / 32]
    input_scale       one element, ModelOpt's: static e4m3 activations

    weight = e2m1(code) * 2^(scale - 127); the even k is in a byte's low nibble

The tensors decide: DeepSeek-V4's config describes its FP8 layers. Its engines quantise the experts' input per token
and 128 k on Hopper. Read from transformers' mxfp4.py and finegrained_fp8.py (5.23), which the tests hold this against,
and vLLM's quark_ocp_mx.py and modelopt.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from jitgemm.checkpoint.bits import unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Config, Format, Headers, Inputs, Scheme, setting
from jitgemm.checkpoint.layouts import BYTES, G, K, N, TensorLayout, fits, stored
from jitgemm.checkpoint.quark import check_group
from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.kernel.formats import ceil_div

_SCALES = (torch.uint8, torch.float8_e8m0fnu)
_FORMS: dict[str, dict[str, TensorLayout]] = {
    "blocks": {
        "blocks": stored(torch.uint8, N, K / EXPONENT_GROUP, EXPONENT_GROUP // 2),
        "scales": stored(_SCALES, N, G),
    },
    "scale": {"weight": stored(BYTES, N, K / 2), "scale": stored(_SCALES, N, G)},
    "weight_scale_inv": {"weight": stored(BYTES, N, K / 2), "weight_scale_inv": stored(_SCALES, N, G)},
    "weight_scale": {"weight": stored(BYTES, N, K / 2), "weight_scale": stored(_SCALES, N, G)},
}
"""The tensors, by what tells them."""
_BLOCKS = Inputs("float", strategy="group", group_size=128)


class _Mxfp4(Format):
    name, cuts = "mxfp4", True
    stacked = ("mxfp4", "gpt_oss_mxfp4")  # the latter is vLLM's name for the former
    suffixes = tuple(suffix for form in _FORMS.values() for suffix in form)

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        return setting(config, "quant_method") != "compressed-tensors" and _form(names) is not None

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        method = setting(config, "quant_method")
        form = _form(headers)
        if form is None:
            raise ValueError("weight: expected MXFP4's tensors, of bytes with e8m0 scales for 32 k, got others")
        if (dtype := setting(config, "expert_dtype", default="fp4")) != "fp4":
            raise ValueError(f"expert_dtype: expected 'fp4', as the tensors are, got {dtype!r}")
        check_group(config)
        deepseek = form in ("scale", "weight_scale_inv") or method == "fp8"
        inputs = _BLOCKS if deepseek else _inputs(config or {}, headers)
        return Scheme(self.name, "e2m1", EXPONENT_GROUP, inputs=inputs, form=form, settings=config or {})

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        return _FORMS[scheme.form] | scheme.static

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        self.sizes(tensors, scheme)
        codes, scales = (tensors[name] for name in _FORMS[scheme.form])
        q = unpack_nibbles(codes.flatten(1).view(torch.uint8), 1)
        return CanonicalWeight(q, scales.view(torch.uint8), group_size=EXPONENT_GROUP, code="e2m1")


def _form(names: Mapping[str, Any]) -> str | None:
    """Which of the forms the tensors, or their headers, have; None for none."""
    for form, layout in _FORMS.items():
        packed, scales = (names.get(name) for name in layout)
        if packed is None or scales is None or not fits(names, layout):
            continue
        if scales.shape[1] == ceil_div(2 * math.prod(packed.shape[1:]), EXPONENT_GROUP):
            return form
    return None


def _inputs(config: Mapping[str, Any], headers: Iterable[str]) -> Inputs | None:
    """What a Quark config says of inputs, or the static scale that ModelOpt's W4A8_MXFP4_FP8 has; None for nothing."""
    if "input_scale" in headers:
        return Inputs("float", strategy="tensor", dynamic=False)
    return Inputs.of(config["input_activations"]) if "input_activations" in config else None


FORMAT = _Mxfp4()
