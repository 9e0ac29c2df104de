"""NVFP4 of compressed-tensors and ModelOpt.

::

    weight_packed        uint8 [n, k / 2]             compressed-tensors' nvfp4-pack-quantized
    weight_scale         float8_e4m3fn [n, k / 16]
    weight_global_scale  fp32, one element
    weight               uint8 [n, k / 2]             ModelOpt's NVFP4, W4A16_NVFP4 and W4A8_NVFP4_FP8
    weight_scale         float8_e4m3fn [n, k / 16]
    weight_scale_2       fp32, one element
    input_scale          one element; with W4A8_NVFP4_FP8 static e4m3 activations

    weight = e2m1(code) * weight_scale * weight_scale_2, or / weight_global_scale; the even k is in a byte's low nibble

The tensors decide. weight_global_scale is the inverse: 1 / it is rounded to fp32, where its library divides
weight_scale by it. Activations of 4 bits are not served: the config's say so, and `activation="e4m3"` replaces them.
Read from compressed-tensors 0.20.1, which the tests hold this against, and vLLM's modelopt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint import compressed_tensors
from jitgemm.checkpoint.bits import unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.compressed_tensors_config import for_layer
from jitgemm.checkpoint.format import Config, Format, Headers, Inputs, Scheme, setting
from jitgemm.checkpoint.layouts import G, K, N, TensorLayout, fits, stored
from jitgemm.kernel.codes import SCALE_GROUP

_CODES, _SCALES = stored(torch.uint8, N, K / 2), stored(torch.float8_e4m3fn, N, G)
_ONE = stored(torch.float32)
_FORMS: dict[str, dict[str, TensorLayout]] = {
    "compressed-tensors": {"weight_packed": _CODES, "weight_scale": _SCALES, "weight_global_scale": _ONE},
    "modelopt": {"weight": _CODES, "weight_scale": _SCALES, "weight_scale_2": _ONE},
}
"""The tensors, by whose they are."""
_WHOLE = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}
_OF_4_BITS = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}
"""The static scale of inputs of 4 bits."""
_ALGORITHMS: dict[str, Inputs | None] = {
    "NVFP4": Inputs("float", 4, "tensor_group", SCALE_GROUP),
    "W4A16_NVFP4": Inputs(num_bits=16),
    "W4A8_NVFP4_FP8": Inputs("float", strategy="tensor", dynamic=False),
}
"""Inputs by ModelOpt's quant_algo; MIXED_PRECISION's say no more than the tensors."""


class _Nvfp4(Format):
    name, cuts = "nvfp4", True
    suffixes = tuple(suffix for form in _FORMS.values() for suffix in form)

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        return _form(names) is not None

    def left_out(self, config: Config, prefix: str) -> str | None:
        return compressed_tensors.FORMAT.left_out(config, prefix) if "quant_algo" not in (config or {}) else None

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        config = config or {}
        form = _form(headers)
        if form is None:
            raise ValueError(
                "weight: expected NVFP4's tensors, of bytes with e4m3 scales for 16 k and one more, got others"
            )
        of_modelopt = form == "modelopt"
        transforms = () if of_modelopt else compressed_tensors.FORMAT.transforms(config, prefix)
        inputs = (
            _of_modelopt(config, "input_scale" in headers) if of_modelopt else _of_compressed_tensors(config, prefix)
        )
        more: Any = {"inputs": inputs, "form": form, "transforms": transforms, "settings": config}
        return Scheme(self.name, "nvfp4", SCALE_GROUP, **more)

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        shape = {"weight_shape": stored((torch.int64, torch.int32), 2, optional=True)}
        more = shape if scheme.form == "compressed-tensors" else {}
        if scheme.inputs is not None and scheme.inputs.num_bits == 4:
            more = more | {_OF_4_BITS[scheme.form]: stored(torch.float32, optional=True)}
        return {**_FORMS[scheme.form], **more, **scheme.static}

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        sizes = self.sizes(tensors, scheme)
        codes, scales, name = (name for name in _FORMS[scheme.form])
        of_tensor = tensors[name].reshape(-1).float()
        wrong = ~((of_tensor > 0) & of_tensor.isfinite())
        if bool(wrong.any()):
            raise ValueError(f"{name}: expected a positive, finite number, got {float(of_tensor[wrong][0])}")
        of_tensor = of_tensor.reciprocal() if scheme.form == "compressed-tensors" else of_tensor
        return CanonicalWeight(
            unpack_nibbles(tensors[codes], 1), tensors[scales].view(torch.uint8), group_size=SCALE_GROUP, code="nvfp4",
            row_scale=of_tensor.expand(sizes.n),
        )  # fmt: skip


def _form(names: Mapping[str, Any]) -> str | None:
    """Which of the forms the tensors, or their headers, have, whatever the scale of the tensor is, or none; None for
    none of the forms."""
    for form, layout in _FORMS.items():
        if fits(names, {own: layout[own] for own in layout if own != _WHOLE[form]}):
            return form
    return None


def _of_modelopt(config: Mapping[str, Any], named: bool) -> Inputs | None:
    """named: whether there is an input_scale, which without a config is taken for that of 4 bits."""
    algorithm = setting(config, "quant_algo", default="MIXED_PRECISION").upper()
    if algorithm == "MIXED_PRECISION":
        return _ALGORITHMS["NVFP4"] if named else None
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"quant_algo: expected {', '.join(_ALGORITHMS)}, as the tensors are, got {algorithm!r}")
    return _ALGORITHMS[algorithm]


def _of_compressed_tensors(config: Mapping[str, Any], prefix: str) -> Inputs | None:
    scheme = for_layer(config, prefix)
    weights = scheme.get("weights") or {}
    of_nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": SCALE_GROUP}
    for key, expected in of_nvfp4.items():
        if weights and weights.get(key) != expected:
            raise ValueError(f"weights: expected {key} {expected!r}, as NVFP4's tensors have, got {weights.get(key)!r}")
    if weights.get("symmetric") is False or weights.get("dynamic"):
        raise ValueError(f"weights: expected symmetric ones that are not dynamic, got {dict(weights)}")
    if "input_activations" not in scheme:
        return None
    inputs = Inputs.of(scheme["input_activations"])
    return replace(inputs, dynamic=True) if inputs.num_bits == 4 else inputs


FORMAT = _Nvfp4()
