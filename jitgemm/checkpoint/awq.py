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

from jitgemm.checkpoint.affine import integer_zero
from jitgemm.checkpoint.bits import AWQ_ORDER, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Format, Headers, Scheme, Sizes
from jitgemm.checkpoint.layouts import FLOATS, INT32, Dim, K, N, TensorLayout, fits, stored
from jitgemm.checkpoint.settings import Config, check_setting, flag, group_size_of, setting
from jitgemm.checkpoint.gptq import overridden, skipped
from jitgemm.kernel.formats import ceil_div

_GEMM = ("gemm", "exllama", "exllamav2", "ipex")
_W = Dim("W")


class _Awq(Format):
    name, methods, cuts = "awq", ("awq",), True

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        method, version = setting(config, "quant_method"), _version(config)
        if "qweight" not in names or version == "bitblas" or method not in (None, "awq"):
            return False
        return method == "awq" or fits(names, self.tensors(Scheme(self.name, form=version)))

    def left_out(self, config: Config, prefix: str) -> str | None:
        return skipped(config, prefix)

    def scheme(self, config: Config, prefix: str = "", headers: Headers = None) -> Scheme:
        config = overridden(config or {}, prefix)
        version = _version(config)
        if version not in (*_GEMM, "gemv"):
            raise ValueError(
                f"version: expected gemm or gemv, got {version!r}, whose order of the codes is not read here"
            )
        check_setting(config, 4, "bits", "w_bit")
        if setting(config, "backend") == "llm-awq":
            raise ValueError("backend: expected autoawq, got 'llm-awq', whose order of the codes is not read here")
        zero_point = flag(config, "zero_point")
        zero_point = not flag(config, "sym") if zero_point is None else zero_point
        size = setting(config, "group_size", "q_group_size")
        return Scheme(self.name, group_size=size, zero_points=zero_point, form=version, settings=config)

    def tensors(self, scheme: Scheme, k: int | None = None) -> dict[str, TensorLayout]:
        if scheme.form == "gemv":
            return {
                "qweight": stored(INT32, N, K / 8),
                "scales": stored(FLOATS, N, _W),
                "qzeros": stored(INT32, N, _W / 8),
            }
        groups = scheme.groups(k)
        return {
            "qweight": stored(INT32, K, N / 8),
            "scales": stored(FLOATS, groups, N),
            "qzeros": stored(INT32, groups, N / 8),
        }

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        if scheme.form != "gemv":
            return super().sizes(headers, scheme)
        sizes, given = super().sizes(headers, scheme), scheme.group_size
        if given is None:
            raise ValueError("group_size: expected it in the config, as gemv files pad scales; found none")
        k = sizes.k
        groups = 1 if given == -1 or given >= k else k // given
        group_size = group_size_of(k, groups, given, "qweight")
        if headers["scales"].shape[1] < groups:
            raise ValueError(f"scales: expected {groups} or more columns for k = {k}, got {headers['scales'].shape[1]}")
        return Sizes(sizes.n, k, group_size)

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        sizes = self.sizes(tensors, scheme)
        qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
        if scheme.form == "gemv":
            groups = ceil_div(sizes.k, sizes.group_size)
            q, scale, zero = unpack_nibbles(qweight, 1), scales[:, :groups], unpack_nibbles(qzeros, 1)[:, :groups]
        else:
            q, zero = (unpack_nibbles(words, 1, order=AWQ_ORDER).T for words in (qweight, qzeros))
            scale = scales.T
        if not scheme.zero_points and not bool((zero == 8).all()):
            raise ValueError(
                "qzeros: expected 8 in every group, as the config says zero_point: false (or sym: true), got "
                f"{int(zero.min())}..{int(zero.max())}; a config with zero_point: true takes them as they are"
            )
        return integer_zero(q.contiguous(), scale.contiguous(), zero, sizes.group_size, name="qzeros")


def _version(config: Config) -> str:
    return str(setting(config, "version", "checkpoint_format", "format", default="gemm")).lower()


FORMAT = _Awq()
