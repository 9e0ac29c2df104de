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
Knows no files: tensors and config come from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint.affine import (
    FLOATS,
    INT32,
    Layout,
    check_setting,
    check_shape,
    dims_of,
    fits,
    flag,
    group_size_of,
    integer_zero,
    measure,
    setting,
)
from jitgemm.checkpoint.bits import unpack_bytes, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, Format, Sizes, TensorInfo, activation_order, check_known

_VERSIONS = ("gptq", "gptq_v2")
_ONE_IN_EACH = {4: 0x11111111, 8: 0x01010101}


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    method = setting(config, "quant_method")
    if "qweight" not in names or _checkpoint_format(config) == "bitblas" or method not in (None, "gptq"):
        return False
    return method == "gptq" or fits(names, layout(config))


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    check_config(config)
    check_known(tensors, (*layout(config), "g_idx"))
    size = measure(tensors, layout(config))
    if "g_idx" in tensors:
        check_shape("g_idx", tensors["g_idx"], size["k"])
    elif size["G"] > 1 and setting(config, "desc_act") is True:
        raise ValueError("g_idx: expected the columns' groups, as the config says desc_act, found none")
    group_size = group_size_of(size["k"], size["G"], setting(config, "group_size"), "scales")
    codes = None if _bits(config) == 4 else torch.int8
    return Sizes(size["n"], size["k"], group_size, codes, zeros=codes is not None and not flag(config, "sym"))


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    version, group_size = check_config(config), _sizes(tensors, config).group_size
    bits, qzeros, scale = _bits(config), tensors["qzeros"], tensors["scales"].T.contiguous()
    unpack = unpack_nibbles if bits == 4 else unpack_bytes
    q = unpack(tensors["qweight"], 0).T
    permutation = activation_order(tensors["g_idx"], group_size) if "g_idx" in tensors else None
    if permutation is not None:
        q = q[:, permutation.long()]
    zero, note = None, None
    if flag(config, "sym"):
        least, most = (int(each) for each in unpack(qzeros, 1).aminmax())
        middle = 1 << bits - 1
        if least != most or most not in (middle - 1, middle):
            note = (
                f"qzeros: expected {middle - 1} or {middle} in every group, as sym is true in the config, got others: "
                f"they are not used, and weights are (q - {middle}) * scale"
            )
    else:
        in_words = version == "gptq" and _written_by_gptqmodel(config)
        zero = unpack(qzeros + _ONE_IN_EACH[bits] if in_words else qzeros, 1).T.to(torch.int16)  # int32 wraps
        if version == "gptq" and not in_words:
            zero = zero + 1
    weight = integer_zero(q.contiguous(), scale, zero, group_size, permutation, name="qzeros", bits=bits)
    return replace(weight, note=note)


def _bits(config: Mapping[str, Any] | None) -> Any:
    return setting(config, "bits", "wbits", default=4)


def layout(config: Mapping[str, Any] | None) -> Layout:
    """The tensors, of 4 bits or 8 as the config says."""
    word = 4 if _bits(config) == 8 else 8
    return {
        "qweight": (INT32, f"k / {word}", "n"),
        "scales": (FLOATS, "G", "n"),
        "qzeros": (INT32, "G", f"n / {word}"),
    }


def _checkpoint_format(config: Mapping[str, Any] | None) -> str:
    return str(setting(config, "checkpoint_format", "format", default="gptq")).lower()


def _written_by_gptqmodel(config: Mapping[str, Any] | None) -> bool:
    quantizer = (setting(config, "meta") or {}).get("quantizer") or []
    return any(q.lower().startswith("gptqmodel:") for q in ([quantizer] if isinstance(quantizer, str) else quantizer))


def check_config(config: Mapping[str, Any] | None) -> str:
    """The version, gptq or gptq_v2. Raises ValueError for settings of tensors that cannot be read."""
    if config is None:
        raise ValueError(
            "quantization_config: expected one, as its checkpoint_format says whether qzeros hold zero - 1 (gptq) or "
            "zero (gptq_v2); found none"
        )
    version = _checkpoint_format(config)
    if version not in _VERSIONS:
        raise ValueError(f"checkpoint_format: expected {' or '.join(_VERSIONS)}, got {version!r}")
    if _bits(config) not in (4, 8):
        raise ValueError(f"bits: expected 4 or 8, got {_bits(config)!r}")
    flag(config, "sym")
    check_setting(config, "int32", "pack_dtype")
    check_setting(config, False, "is_marlin_format")
    return version


def for_layer(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """GPTQModel's `dynamic`: the first expression that matches the layer's name overrides the config, or skips it."""
    if config is None or setting(config, "quant_method", default="gptq") not in ("gptq", "awq"):
        return config
    if config.get("rotation") and prefix.endswith("mlp.down_proj"):
        return {**config, "refusal": f"rotation: expected none for {prefix!r}, whose input it transforms at run time"}
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        return {**config, "refusal": f"dynamic: expected settings by expressions, got {dynamic!r}"}
    for pattern, overrides in dynamic.items():
        try:
            found = re.match(pattern.removeprefix("-:").removeprefix("+:"), prefix)
        except re.error as error:
            return {**config, "refusal": f"dynamic: expected regular expressions, got {pattern!r} ({error})"}
        if found and pattern.startswith("-:"):
            return {**config, "refusal": f"dynamic: expected {prefix!r} to be quantised, but {pattern!r} skips it"}
        if found:
            return {**config, **overrides}
    return config


FORMAT = Format(
    name="gptq", detect=_detect, sizes=_sizes, read=_read, for_layer=for_layer,
    dims=lambda headers, config: dims_of(layout(config)),
)  # fmt: skip
