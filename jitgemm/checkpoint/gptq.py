"""GPTQ, formats v1 ("gptq") and v2 ("gptq_v2"): AutoGPTQ, GPTQModel, all of transformers' quant_method gptq.

::

    qweight  int32 [k / 8, n]   codes 0..15, eight along k to a word, the low nibble first
    qzeros   int32 [G, n / 8]   zero points, eight along n to a word; v1 stores zero - 1, v2 zero
    scales   fp16 or bf16 [G, n]
    g_idx    int32 [k]          group of each column of the input, in any order with desc_act; may be absent

    weight = (q - zero) * scale

Read from GPTQModel 7.7.0 (qlinear/torch.py, utils/model.py, quantization/config.py), vLLM's q_gemm.cu and AutoGPTQ's
old CUDA class. A config without checkpoint_format is v1. Sources disagree on what a 15 in v1's qzeros is:

- vLLM and the Triton kernels take 16, AutoGPTQ's old CUDA class (15 + 1) & 15 = 0. Here the definition holds: 16.
- GPTQModel (meta.quantizer names it) writes v1 by subtracting 0x11111111 from whole words, borrowing from the next
  nibble, and adds it back to whole words when it reads. Its files are read the same way here, which gives back 0..15.

`rotation` leaves weights as they are, but mlp.down_proj's input needs a Hadamard transform at run time: refused for it.
Knows no files: tensors and config come from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import FLOATS, check_shape, group_size_of, integer_zero, setting, take
from jitgemm.checkpoint.bits import unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, Format, Sizes, TensorInfo, activation_order

_VERSIONS = ("gptq", "gptq_v2")
_ONE_IN_EACH = 0x11111111


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    method = setting(config, "quant_method")
    if "qweight" not in names or _checkpoint_format(config) == "bitblas" or method not in (None, "gptq"):
        return False
    if method == "gptq":
        return True
    qweight, scales, qzeros = (names.get(name) for name in ("qweight", "scales", "qzeros"))
    if scales is None or qzeros is None or qweight.dtype != torch.int32 or len(scales.shape) != 2:
        return False
    groups, n = scales.shape
    return len(qweight.shape) == 2 and qweight.shape[1] == n and qzeros.shape == (groups, n // 8)


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    _check_config(config)
    qweight = take(tensors, "qweight", (torch.int32,), "k / 8", "n")
    qzeros = take(tensors, "qzeros", (torch.int32,), "G", "n / 8")
    scales = take(tensors, "scales", FLOATS, "G", "n")
    k, n, groups = 8 * qweight.shape[0], qweight.shape[1], scales.shape[0]
    check_shape("scales", scales, groups, n)
    check_shape("qzeros", qzeros, groups, n // 8)
    if "g_idx" in tensors:
        check_shape("g_idx", tensors["g_idx"], k)
    return Sizes(n, k, group_size_of(k, groups, setting(config, "group_size"), "scales"))


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    version, group_size = _check_config(config), _sizes(tensors, config).group_size
    q = unpack_nibbles(tensors["qweight"], 0).T
    permutation = activation_order(tensors["g_idx"], group_size) if "g_idx" in tensors else None
    if permutation is not None:
        q = q[:, permutation.long()]
    zero = _zero_points(tensors["qzeros"], version, _written_by_gptqmodel(config)).T
    scale = tensors["scales"].T.contiguous()
    return integer_zero(q.contiguous(), scale, zero, group_size, permutation, name="qzeros")


def _zero_points(qzeros: torch.Tensor, version: str, whole_words: bool) -> torch.Tensor:
    """Integers [G, n]."""
    if version == "gptq_v2":
        return unpack_nibbles(qzeros, 1)
    if whole_words:
        return unpack_nibbles(qzeros + _ONE_IN_EACH, 1)  # int32 wraps
    return unpack_nibbles(qzeros, 1) + 1


def _checkpoint_format(config: Mapping[str, Any] | None) -> str:
    return str(setting(config, "checkpoint_format", "format", default="gptq")).lower()


def _written_by_gptqmodel(config: Mapping[str, Any] | None) -> bool:
    quantizer = (setting(config, "meta") or {}).get("quantizer") or []
    return any(q.lower().startswith("gptqmodel:") for q in ([quantizer] if isinstance(quantizer, str) else quantizer))


def _check_config(config: Mapping[str, Any] | None) -> str:
    """The version, gptq or gptq_v2. Refuses what cannot be read."""
    if config is None:
        raise ValueError(
            "quantization_config: expected one, as its checkpoint_format says whether qzeros hold zero - 1 (gptq) or "
            "zero (gptq_v2); found none"
        )
    version = _checkpoint_format(config)
    if version not in _VERSIONS:
        raise ValueError(f"checkpoint_format: expected {' or '.join(_VERSIONS)}, got {version!r}")
    bits = setting(config, "bits", "wbits", default=4)
    if bits != 4:
        raise ValueError(f"bits: expected 4, got {bits!r}")
    words = setting(config, "pack_dtype", default="int32")
    if words != "int32":
        raise ValueError(f"pack_dtype: expected int32, got {words!r}")
    return version


def _for_layer(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """GPTQModel's `dynamic`: the first expression that matches the layer's name overrides the config, or skips it."""
    if config is None or setting(config, "quant_method", default="gptq") != "gptq":
        return config
    if config.get("rotation") and prefix.endswith("mlp.down_proj"):
        return {**config, "refusal": f"rotation: expected none for {prefix!r}, whose input it transforms at run time"}
    for pattern, overrides in (config.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), prefix):
            if pattern.startswith("-:"):
                return {**config, "refusal": f"dynamic: expected {prefix!r} to be quantised, but {pattern!r} skips it"}
            return {**config, **overrides}
    return config


FORMAT = Format(name="gptq", detect=_detect, sizes=_sizes, read=_read, for_layer=_for_layer)
