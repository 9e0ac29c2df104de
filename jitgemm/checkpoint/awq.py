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
(tiles of tensor cores) raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint.bits import AWQ_ORDER, integer_zero, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.checkpoint.format import Config, Headers, Scheme, Sizes, check_setting, group_size_of, setting
from jitgemm.checkpoint.gptq import Gptq, overridden
from jitgemm.checkpoint.layouts import FLOATS, INT32, Dim, G, K, N, TensorLayout, stored
from jitgemm.kernel.formats import ceil_div

_VERSIONS = ("gemm", "exllama", "exllamav2", "ipex", "gemv")
_W = Dim("W")


class _Awq(Gptq):
    name, cuts = "awq", True

    def version(self, config: Config) -> str:
        return setting(config, "version", "checkpoint_format", "format", default="gemm").lower()

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        config = overridden(config or {}, prefix)
        version = self.version(config)
        if version not in _VERSIONS:
            raise ValueError(
                f"version: expected gemm or gemv, got {version!r}, whose order of the codes is not read here"
            )
        if setting(config, "backend") == "llm-awq":
            raise ValueError("backend: expected autoawq, got 'llm-awq', whose order of the codes is not read here")
        check_setting(config, 4, "bits", "w_bit")
        zero_point, size = setting(config, "zero_point"), setting(config, "group_size", "q_group_size")
        asymmetric = zero_point if zero_point is not None else not setting(config, "sym")
        return Scheme(self.name, group_size=size, zero_points=asymmetric, form=version, settings=config)

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        if scheme.form == "gemv":
            dims = {"qweight": (N, K / 8), "scales": (N, _W), "qzeros": (N, _W / 8)}
        else:
            dims = {"qweight": (K, N / 8), "scales": (G, N), "qzeros": (G, N / 8)}
        return {name: stored(FLOATS if name == "scales" else INT32, *shape) for name, shape in dims.items()}

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        if scheme.form != "gemv":
            return super().sizes(headers, scheme)
        n, k, _ = super().sizes(headers, replace(scheme, group_size=None)).known
        wanted = scheme.group_size
        if wanted is None:
            raise ValueError("group_size: expected it in the config, as gemv files pad scales; found none")
        size = group_size_of(k, ceil_div(k, wanted) if wanted > 0 else 1, wanted, "scales")
        groups, width = ceil_div(k, size), headers["scales"].shape[1]
        if width < groups:
            raise ValueError(f"scales: expected {groups} or more columns for k = {k}, got {width}")
        return Sizes(n, k, size)

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        (_, k, group_size), scale = self.sizes(tensors, scheme).known, tensors["scales"]
        order = None if scheme.form == "gemv" else AWQ_ORDER
        q, zero = (unpack_nibbles(tensors[name], 1, order=order) for name in ("qweight", "qzeros"))
        if scheme.form == "gemv":
            groups = ceil_div(k, group_size)
            padding = not bool(scale[:, groups - 1].any() | zero[:, groups - 1].any())
            if padding or bool(scale[:, groups:].any()):
                raise ValueError(f"group_size: expected the groups that scales hold, got {groups} of {group_size}")
            scale, zero = scale[:, :groups], zero[:, :groups]
        else:
            q, scale, zero = q.T, scale.T, zero.T
        if not scheme.zero_points and not bool((zero == 8).all()):
            raise ValueError(
                "qzeros: expected 8 in every group, as the config says zero_point: false (or sym: true), got "
                f"{int(zero.min())}..{int(zero.max())}; a config with zero_point: true takes them as they are"
            )
        return integer_zero(q.contiguous(), scale.contiguous(), zero, group_size, name="qzeros")


FORMAT = _Awq()
