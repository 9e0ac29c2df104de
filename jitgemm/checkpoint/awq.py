"""AWQ, versions "gemm" and "gemv": AutoAWQ, GPTQModel, and everything in transformers with quant_method awq.

::

    gemm     qweight  int32 [k, n / 8]    codes 0..15, eight along n to a word
             qzeros   int32 [G, n / 8]    zero points 0..15, likewise
             scales   fp16 or bf16 [G, n]

             | v7 | v5 | v3 | v1 | v6 | v4 | v2 | v0 |   a word, the low nibble at the right

    gemv     qweight  int32 [n, k / 8]    eight along k to a word, the low nibble first
             scales   fp16 [n, W]         a column for each group, padded with 0
             qzeros   int32 [n, W / 8]    eight groups to a word, the low nibble first

    weight = (q - zero) * scale

With zero_point: false (or AutoRound's sym: true) each zero is 8. AutoAWQ and all who write its files have 4 bits.
Read from AutoAWQ 0.2.9 (modules/linear/gemm.py and gemv.py, utils/packing_utils.py) and GPTQModel 7.7.0. "exllama",
"exllamav2" and "ipex" are kernels that read gemm files. "gemv_fast", "llm-awq" (int16, rows interleaved) and "marlin"
(tiles of tensor cores) are refused. Knows no files: tensors and config come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import (
    FLOATS,
    INT32,
    check_setting,
    dims_of,
    fits,
    flag,
    group_size_of,
    integer_zero,
    measure,
    setting,
)
from jitgemm.checkpoint.bits import AWQ_ORDER, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, Dims, Format, Sizes, TensorInfo, check_known
from jitgemm.checkpoint.gptq import for_layer
from jitgemm.kernel.formats import ceil_div

_GEMM = ("gemm", "exllama", "exllamav2", "ipex")
LAYOUT_GEMM = {"qweight": (INT32, "k", "n / 8"), "scales": (FLOATS, "G", "n"), "qzeros": (INT32, "G", "n / 8")}
_LAYOUT_GEMV = {"qweight": (INT32, "n", "k / 8"), "scales": (FLOATS, "n", "W"), "qzeros": (INT32, "n", "W / 8")}


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    method, version = setting(config, "quant_method"), _version(config)
    if "qweight" not in names or version == "bitblas" or method not in (None, "awq"):
        return False
    return method == "awq" or fits(names, _LAYOUT_GEMV if version == "gemv" else LAYOUT_GEMM)


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    version = check_config(config)
    check_known(tensors, tuple(LAYOUT_GEMM))
    given = setting(config, "group_size", "q_group_size")
    if version != "gemv":
        size = measure(tensors, LAYOUT_GEMM)
        return Sizes(size["n"], size["k"], group_size_of(size["k"], size["G"], given, "scales"))
    size = measure(tensors, _LAYOUT_GEMV)
    if given is None:
        raise ValueError("group_size: expected it in the config, as gemv files pad scales; found none")
    k = size["k"]
    groups = 1 if given == -1 or given >= k else k // given
    group_size = group_size_of(k, groups, given, "qweight")
    if size["W"] < groups:
        raise ValueError(f"scales: expected {groups} or more columns for k = {k}, got {size['W']}")
    return Sizes(size["n"], k, group_size)


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    sizes = _sizes(tensors, config)
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    if _version(config) == "gemv":
        groups = ceil_div(sizes.k, sizes.group_size)
        q, scale, zero = unpack_nibbles(qweight, 1), scales[:, :groups], unpack_nibbles(qzeros, 1)[:, :groups]
    else:
        q, zero = (unpack_nibbles(words, 1, order=AWQ_ORDER).T for words in (qweight, qzeros))
        scale = scales.T
    if _symmetric(config) and not bool((zero == 8).all()):
        raise ValueError(
            "qzeros: expected 8 in every group, as the config says zero_point: false (or sym: true), got "
            f"{int(zero.min())}..{int(zero.max())}; a config with zero_point: true takes them as they are"
        )
    return integer_zero(q.contiguous(), scale.contiguous(), zero, sizes.group_size, name="qzeros")


def check_config(config: Mapping[str, Any] | None) -> str:
    """The version. Raises ValueError for settings of tensors that cannot be read."""
    version = _version(config)
    if version not in (*_GEMM, "gemv"):
        raise ValueError(f"version: expected gemm or gemv, got {version!r}, whose order of the codes is not read here")
    check_setting(config, 4, "bits", "w_bit")
    if setting(config, "backend") == "llm-awq":
        raise ValueError("backend: expected autoawq, got 'llm-awq', whose order of the codes is not read here")
    _symmetric(config)
    return version


def _symmetric(config: Mapping[str, Any] | None) -> bool | None:
    zero_point = flag(config, "zero_point")
    return flag(config, "sym") if zero_point is None else not zero_point


def _version(config: Mapping[str, Any] | None) -> str:
    return str(setting(config, "version", "checkpoint_format", "format", default="gemm")).lower()


def _dims(headers: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> Dims | None:
    return None if _version(config) == "gemv" else dims_of(LAYOUT_GEMM)  # gemv pads its groups


FORMAT = Format(name="awq", detect=_detect, sizes=_sizes, read=_read, for_layer=for_layer, dims=_dims)
