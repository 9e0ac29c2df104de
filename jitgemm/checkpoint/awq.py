"""AWQ, versions "gemm" and "gemv": AutoAWQ, GPTQModel, and everything in transformers with quant_method awq.

::

    gemm     qweight  int32 [k, n / 8]    codes 0..15, eight along n to a word
             qzeros   int32 [G, n / 8]    zero points 0..15, likewise
             scales   fp16 or bf16 [G, n]

             | v7 | v5 | v3 | v1 | v6 | v4 | v2 | v0 |   a word, the low nibble at the right

    gemv     qweight  int32 [n, k / 8]    eight along k to a word, the low nibble first
             qzeros   int32 [n, W]        eight groups to a word, the low nibble first; padded with 0
             scales   fp16 [n, 8 * W]     padded with 0

    weight = (q - zero) * scale

Read from AutoAWQ 0.2.9 (modules/linear/gemm.py and gemv.py, utils/packing_utils.py) and GPTQModel 7.7.0. "exllama",
"exllamav2" and "ipex" are kernels that read gemm files. "gemv_fast", "llm-awq" (int16, rows interleaved) and "marlin"
(tiles of tensor cores) are refused. Knows no files: tensors and config come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import FLOATS, check_shape, group_size_of, integer_zero, setting, take
from jitgemm.checkpoint.bits import AWQ_ORDER, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, Format, Sizes, TensorInfo
from jitgemm.kernel.formats import ceil_div

_GEMM = ("gemm", "exllama", "exllamav2", "ipex")


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    method, version = setting(config, "quant_method"), _version(config)
    if "qweight" not in names or version == "bitblas" or method not in (None, "awq"):
        return False
    if method == "awq":
        return True
    qweight, scales, qzeros = (names.get(name) for name in ("qweight", "scales", "qzeros"))
    if scales is None or qzeros is None or qweight.dtype != torch.int32 or len(scales.shape) != 2:
        return False
    if version == "gemv":
        return qzeros.shape == (scales.shape[0], scales.shape[1] // 8) and qweight.shape[:1] == scales.shape[:1]
    groups, n = scales.shape
    return len(qweight.shape) == 2 and qweight.shape[1] == n // 8 and qzeros.shape == (groups, n // 8)


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    return _sizes_gemv(tensors, config) if _check_config(config) == "gemv" else _sizes_gemm(tensors, config)


def _sizes_gemm(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    qweight = take(tensors, "qweight", (torch.int32,), "k", "n / 8")
    qzeros = take(tensors, "qzeros", (torch.int32,), "G", "n / 8")
    scales = take(tensors, "scales", FLOATS, "G", "n")
    k, n, groups = qweight.shape[0], 8 * qweight.shape[1], scales.shape[0]
    check_shape("scales", scales, groups, n)
    check_shape("qzeros", qzeros, groups, n // 8)
    return Sizes(n, k, group_size_of(k, groups, _group_size(config), "scales"))


def _sizes_gemv(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    qweight = take(tensors, "qweight", (torch.int32,), "n", "k / 8")
    qzeros = take(tensors, "qzeros", (torch.int32,), "n", "W")
    scales = take(tensors, "scales", FLOATS, "n", "8 * W")
    n, k = qweight.shape[0], 8 * qweight.shape[1]
    group_size = _group_size(config)
    if group_size is None:
        raise ValueError("group_size: expected it in the config, as gemv files pad scales; found none")
    groups = 1 if group_size == -1 or group_size >= k else k // group_size
    group_size = group_size_of(k, groups, group_size, "qweight")
    check_shape("qzeros", qzeros, n, qzeros.shape[1])
    check_shape("scales", scales, n, 8 * qzeros.shape[1])
    if scales.shape[1] < groups:
        raise ValueError(f"scales: expected {groups} or more columns for k = {k}, got {scales.shape[1]}")
    return Sizes(n, k, group_size)


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    sizes = _sizes(tensors, config)
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    if _version(config) == "gemv":
        groups = ceil_div(sizes.k, sizes.group_size)
        q, scale, zero = unpack_nibbles(qweight, 1), scales[:, :groups], unpack_nibbles(qzeros, 1)[:, :groups]
    else:
        q, zero = (unpack_nibbles(words, 1, order=AWQ_ORDER).T for words in (qweight, qzeros))
        scale = scales.T
    return integer_zero(q.contiguous(), scale.contiguous(), zero, sizes.group_size, name="qzeros")


def _version(config: Mapping[str, Any] | None) -> str:
    return str(setting(config, "version", "checkpoint_format", "format", default="gemm")).lower()


def _group_size(config: Mapping[str, Any] | None) -> Any:
    return setting(config, "group_size", "q_group_size")


def _check_config(config: Mapping[str, Any] | None) -> str:
    version = _version(config)
    if version not in (*_GEMM, "gemv"):
        raise ValueError(f"version: expected gemm or gemv, got {version!r}, whose order of the codes is not read here")
    bits = setting(config, "bits", "w_bit", default=4)
    if bits != 4:
        raise ValueError(f"bits: expected 4, got {bits!r}")
    return version


FORMAT = Format(name="awq", detect=_detect, sizes=_sizes, read=_read)
