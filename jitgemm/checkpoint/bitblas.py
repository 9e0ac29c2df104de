"""BitBLAS: `qweight` int8 of bitblas.Linear, and GPTQModel's and vLLM's files with checkpoint_format bitblas.

::

    qweight   int8 [n, k / 2]       codes 0..15, the low nibble first, or interleaved for fast_decoding
    scales    fp16 or bf16 [n, G]
    zeros     by zeros_mode:
      original    floats [n, G]     (q - zero) * scale
      rescale     floats [n, G]     q * scale - zero
      quantized   int8 [G, n / 2]   (q - zero) * scale, two n to a byte, the low nibble first; GPTQModel names it qzeros
      none                          (q - 8) * scale for W_dtype int4, q * scale for uint4

    nibble              7   6   5   4   3   2   1   0      of eight codes, four bytes
    plain              v7  v6  v5  v4  v3  v2  v1  v0
    interleaved, fp16  v7  v5  v3  v1  v6  v4  v2  v0      fast_decoding with A_dtype float16
    interleaved, int8  v7  v3  v6  v2  v5  v1  v4  v0      fast_decoding with A_dtype int8

The tensors do not say which; settings do:

- fast_decoding, A_dtype: where the config has no fast_decoding but quant_method or checkpoint_format bitblas, BitBLAS's
  own rule: on for float16 activations (those of fp16 scales), off for bfloat16 and int8. Without either it raises.
- zeros_mode: "quantized" for int8 zeros; for float zeros it must be in the config.
- W_dtype, or sym: for files without zeros.

Weights in four dimensions (propagate_b, "ladder" tiles) raise, and so do zeros of mode original that are
fractions too fine to be exact in fp32. Other fractional zeros of mode original become the offset -zero * scale, scales
in fp32: with 4-bit q and 11-bit zero and scale each product is exact, and the sum is the same number rounded once.

Read from BitBLAS 0.1.0.post1 (module/__init__.py, ops/general_matmul, lop3_permutate_impl.py, quantization/utils.py)
and GPTQModel 7.7.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.bits import AWQ_ORDER, float_zero, integer_zero, scaled_zero, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Config, Format, Headers, Scheme, Sizes, check_setting, setting
from jitgemm.checkpoint.layouts import FLOATS, INT8, G, K, N, TensorLayout, stored
from jitgemm.tensors import describe, dtype_name
from jitgemm.weight.given import MAX_ZERO

_ZEROS = ("zeros", "qzeros")
_ORDERS = {"float16": AWQ_ORDER, "int8": (0, 4, 1, 5, 2, 6, 3, 7)}
"""Of interleaved words, by A_dtype."""
_EXACT_BITS = 2.0**20  # q - zero is exact in fp32 where zero is a multiple of its inverse


class _BitBlas(Format):
    name, also = "bitblas", _ZEROS
    suffixes = ("qweight", "scales", *_ZEROS)

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        qweight, scales = names.get("qweight"), names.get("scales")
        if qweight is None or scales is None or qweight.dtype != torch.int8:
            return False
        if _is_bitblas(config) or setting(config, "quant_method") is not None or "s1_scales" in names:
            return _is_bitblas(config)
        return qweight.dim() == scales.dim() == 2 and qweight.shape[0] == scales.shape[0]

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        check_setting(config, 4, "bits", "weight_bits")
        mode, layouts = setting(config, "zeros_mode"), {}
        qweight, name = headers.get("qweight"), _zeros_name(headers)
        if qweight is not None and qweight.dim() == 4:
            got = f"{describe(qweight)}: tiles of propagate_b, which are not read here"
            raise ValueError(f"qweight: expected int8 [n, k / 2], got {got}")
        if name is None:
            _implied_zero(config)
        elif headers[name].dtype == torch.int8:
            layouts[name] = stored(INT8, G, N / 2)
            if mode not in (None, "quantized"):
                got = describe(headers[name])
                raise ValueError(f"{name}: expected floats [n, G] for zeros_mode {mode!r}, got {got}")
        else:
            layouts[name] = stored(FLOATS, N, G)
            if mode not in ("rescale", "original"):
                raise ValueError(f"zeros_mode: expected original or rescale for float zeros, got {mode!r}")
        size, settings = setting(config, "group_size"), config or {}
        return Scheme(self.name, group_size=size, zero_points=True, form=mode or "", found=layouts, settings=settings)

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        return {"qweight": stored(INT8, N, K / 2), "scales": stored(FLOATS, N, G), **scheme.found}

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        sizes = super().sizes(headers, scheme)
        _, k, group_size = sizes.known
        if k % 8 and _order(scheme.settings, headers["scales"].dtype) is not None:
            expected = "k to be a multiple of 8 for fast_decoding"
            raise ValueError(f"qweight: expected {expected}, got {describe(headers['qweight'])}")
        if group_size != k:
            check_setting(scheme.settings, False, "desc_act")
        return sizes

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        (_, _, size), scales, name = self.sizes(tensors, scheme).known, tensors["scales"], _zeros_name(tensors)
        order = _order(scheme.settings, scales.dtype)
        q = unpack_nibbles(tensors["qweight"].contiguous().view(torch.int32 if order else torch.int8), 1, order=order)
        if name is None:
            zeros = torch.full_like(scales, _implied_zero(scheme.settings), dtype=torch.uint8)
            return integer_zero(q, scales, zeros, size, name="W_dtype")
        zeros = tensors[name]
        if zeros.dtype == torch.int8:
            return integer_zero(q, scales, unpack_nibbles(zeros, 1).T, size, name=name)
        if scheme.form == "rescale":
            return scaled_zero(q, scales, zeros, size)
        wide = zeros.float()
        if bool(((wide == wide.round()) & (wide >= 0) & (wide <= MAX_ZERO)).all()):
            return integer_zero(q, scales, wide.to(torch.uint8), size, name=name)
        steps = wide * _EXACT_BITS
        exact = (steps == steps.round()) & (wide.abs() <= 16)
        if torch.float32 in (scales.dtype, zeros.dtype) or not bool(exact.all()):
            raise ValueError(
                f"{name}: expected zeros_mode original to have integers 0..{MAX_ZERO}, or fp16 or bf16 multiples of "
                "2**-20 within -16..16, got others"
            )
        return float_zero(q, scales.float(), -(wide * scales.float()), size)


def _zeros_name(tensors: Mapping[str, Any]) -> str | None:
    return next((name for name in _ZEROS if name in tensors and math.prod(tensors[name].shape)), None)


def _order(config: Config, scale_dtype: torch.dtype) -> tuple[int, ...] | None:
    """Order of a word's nibbles, None for plain."""
    activations = setting(config, "A_dtype", default=dtype_name(scale_dtype))
    fast = setting(config, "fast_decoding", default=activations == "float16" if _is_bitblas(config) else None)
    if fast is None:
        raise ValueError(
            "fast_decoding: expected true or false in the config, as the tensors do not say whether the codes are "
            "interleaved; found none"
        )
    if fast and activations not in _ORDERS:
        raise ValueError(f"A_dtype: expected float16 or int8 with fast_decoding, got {activations!r}")
    return _ORDERS[activations] if fast else None


def _implied_zero(config: Config) -> int:
    """The zero point of files without zeros."""
    symmetric = setting(config, "sym", "is_sym") is True
    w_dtype = setting(config, "W_dtype", default="int4" if symmetric else None)
    if w_dtype not in ("int4", "uint4"):
        expected = "int4 or uint4 (or sym: true) in the config of a layer without zeros"
        raise ValueError(f"W_dtype: expected {expected}, got {w_dtype!r}")
    return 8 if w_dtype == "int4" else 0


def _is_bitblas(config: Config) -> bool:
    keys = ("quant_method", "checkpoint_format", "format")
    return "bitblas" in (str(setting(config, key, default="")).lower() for key in keys)


FORMAT = _BitBlas()
