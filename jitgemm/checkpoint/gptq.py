"""GPTQ, formats v1 ("gptq") and v2 ("gptq_v2"): AutoGPTQ, GPTQModel, all of transformers' quant_method gptq.

::

    qweight  int32 [k / 8, n]   codes 0..15, eight along k to a word, the low nibble first
    qzeros   int32 [G, n / 8]   zero points, eight along n to a word; v1 stores zero - 1, v2 zero
    scales   fp16 or bf16 [G, n]
    g_idx    int32 [k]          group of each column of the input, in any order with desc_act; may be absent

    weight = (q - zero) * scale

8 bits: codes 0..255, four to a word, the low byte first. With sym: true each zero is 8 (128) by definition: Marlin and
Machete take q - 8 and never read qzeros, so that files with v2's zeros under v1's name, or with any others, are in use.
Without sym in the config the zeros decide.

Read from GPTQModel 7.7.0 (qlinear/torch.py, utils/model.py, quantization/config.py), vLLM's q_gemm.cu and AutoGPTQ's
old CUDA class. A config without checkpoint_format is v1. Sources disagree on what a 15 in v1's qzeros is:

- vLLM and the Triton kernels take 16, AutoGPTQ's old CUDA class (15 + 1) & 15 = 0. Here the definition holds: 16.
- GPTQModel (meta.quantizer names it) writes v1 by subtracting 0x11111111 from whole words, borrowing from the next
  nibble, and adds it back to whole words when it reads. Its files are read the same way here, which gives back 0..15.

`rotation` leaves weights as they are, but mlp.down_proj's input needs a Hadamard transform at run time: an error there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint.bits import integer_zero, unpack_words
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.expressions import matches
from jitgemm.checkpoint.format import Config, Format, Headers, Scheme, check_setting, setting
from jitgemm.checkpoint.layouts import FLOATS, INT32, G, K, N, TensorLayout, fits, stored

_VERSIONS = ("gptq", "gptq_v2")
_CODES = {4: "int4", 8: "int8"}
_ONE_IN_EACH = {"int4": 0x11111111, "int8": 0x01010101}


class Gptq(Format):
    name, cuts = "gptq", True
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        method, version = setting(config, "quant_method"), self.version(config)
        if "qweight" not in names or version == "bitblas" or method not in (None, self.name):
            return False
        forms = (Scheme(self.name, code, form=version) for code in _CODES.values())
        return method == self.name or any(fits(names, self.tensors(form)) for form in forms)

    def version(self, config: Config) -> str:
        """What a config says of the layout and the zero points."""
        return setting(config, "checkpoint_format", "format", default="gptq").lower()

    def left_out(self, config: Config, prefix: str) -> str | None:
        return skipped(config, prefix)

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        if config is None:
            raise ValueError(
                "quantization_config: expected one, as its checkpoint_format says whether qzeros hold zero - 1 (gptq) "
                "or zero (gptq_v2); found none"
            )
        config = overridden(config, prefix)
        version, width = self.version(config), setting(config, "bits", "wbits", default=4)
        if version not in _VERSIONS:
            raise ValueError(f"checkpoint_format: expected {' or '.join(_VERSIONS)}, got {version!r}")
        if width not in _CODES:
            raise ValueError(f"bits: expected 4 or 8, got {width!r}")
        check_setting(config, "int32", "pack_dtype")
        check_setting(config, False, "is_marlin_format")
        size, zeros = setting(config, "group_size"), not setting(config, "sym")
        ordered = setting(config, "desc_act") is True
        return Scheme(self.name, _CODES[width], size, zero_points=zeros, ordered=ordered, form=version, settings=config)

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        word, order = scheme.per_word, "the columns' groups, as the config says desc_act"
        return {
            "qweight": stored(INT32, K / word, N),
            "scales": stored(FLOATS, G, N),
            "qzeros": stored(INT32, G, N / word),
            "g_idx": stored((torch.int32, torch.int64), K, optional=order),
        }

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        (_, _, size), middle = self.sizes(tensors, scheme).known, 128 if scheme.eight_bits else 8
        word = scheme.per_word
        qzeros, zero, note = tensors["qzeros"], None, None
        if scheme.zero_points:
            in_words = scheme.form == "gptq" and _written_by_gptqmodel(scheme.settings)
            qzeros = qzeros + _ONE_IN_EACH[scheme.code] if in_words else qzeros  # which wraps
            zero = unpack_words(qzeros, 1, word).T.to(torch.int16) + int(scheme.form == "gptq" and not in_words)
        else:
            least, most = (int(end) for end in unpack_words(qzeros, 1, word).aminmax())
            if least != most or most not in (middle - 1, middle):
                note = (
                    f"qzeros: expected {middle - 1} or {middle} in every group, as sym is true in the config, got "
                    f"others: they are not used, and weights are (q - {middle}) * scale"
                )
        q, scale = unpack_words(tensors["qweight"], 0, word).T.contiguous(), tensors["scales"].T.contiguous()
        weight = replace(integer_zero(q, scale, zero, size, name="qzeros", code=scheme.code), note=note)
        return weight.ordered(tensors["g_idx"]) if "g_idx" in tensors else weight


def _written_by_gptqmodel(config: Mapping[str, Any]) -> bool:
    quantizer = setting(config, "meta", default={}).get("quantizer") or []
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(str(name).lower().startswith("gptqmodel:") for name in names)


def skipped(config: Config, prefix: str) -> str | None:
    """The expression of GPTQModel's `dynamic` that leaves a layer in floats, as a message; None for none."""
    pattern, _ = _dynamic(config or {}, prefix)
    skips = pattern.startswith("-:")
    return f"dynamic: expected {prefix!r} to be quantised, but {pattern!r} skips it" if skips else None


def overridden(config: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """The layer's config: the first expression of `dynamic` that matches its name overrides the model's. Raises
    ValueError where `dynamic` holds no settings by expressions, or the layer's input is to be rotated."""
    if config.get("rotation") and prefix.endswith("mlp.down_proj"):
        raise ValueError(f"rotation: expected none for {prefix!r}, whose input it transforms at run time")
    _, overrides = _dynamic(config, prefix)
    return {**config, **overrides} if overrides else config


def _dynamic(config: Mapping[str, Any], prefix: str) -> tuple[str, Mapping[str, Any]]:
    """The first expression that matches, and what it overrides."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(rule, Mapping) for rule in dynamic.values()):
        raise ValueError(f"dynamic: expected settings by expressions, got {dynamic!r}")
    for pattern, overrides in dynamic.items():
        if matches("dynamic", pattern.removeprefix("-:").removeprefix("+:"), prefix):
            return pattern, overrides
    return "", {}


FORMAT = Gptq()
