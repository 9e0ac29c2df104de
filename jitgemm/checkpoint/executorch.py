"""ExecuTorch's int4 weights: Vulkan's `linear_qga4w` and `linear_qta8a_qga4w`, and 8da4w state dicts.

::

    linear_qga4w         weight [n, k / 2], scales_and_zeros fp32 [G, n, 2]     (q - 8) * scale + zero
    linear_qta8a_qga4w   weight [n, k / 2], weight_scales [G, n] or [n, G],
                         weight_zeros, integers of the same shape               (q - 8 - zero) * scale
    8da4w                weight int8 [n, k] of -8..7, scales [n, G],
                         zeros [n, G] of any dtype, or none                     (q - zero) * scale

    weight of the first two   uint8   | q of even k | q of odd k |   q stored as 0..15

A .pte program names no tensors of a layer; the names here are those of the operators' arguments (`weight` may also be
`weights_4x2` or `weights_4bit`, `scales_and_zeros` `weight_scales_and_zeros`), 8da4w's those of torchao's
Int8DynActInt4WeightLinear, which pre-quantised Llama checkpoints have.

Read from ExecuTorch's Vulkan backend of 2025 (custom_ops_lib.py, _passes/fuse_quantized_ops.py, and the operators' C++
tests) and 1.5.1. Sources disagree twice on linear_qta8a_qga4w:

- The packer adds 8 and the C++ tests subtract it; the Python reference reads the nibbles as two's complement. Nibbles
  with 8 added are read here.
- The C++ operator takes scales and zeros as [G, n], the Python reference as [n, G]. Both are read; what fits both
  raises.

linear_qta8a_qga4w_qta8o had scales_and_zeros as linear_qga4w. ExecuTorch 1.5.1 has linear_q4gsw and
linear_dq8ca_q4gsw instead, with even k in the LOW nibble and no zeros: without weight_zeros a layer raises rather
than be read in the wrong order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jitgemm.checkpoint.bits import HIGH_FIRST, integer_zero, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Config, Format, Headers, Scheme, setting
from jitgemm.checkpoint.layouts import FLOATS, INT8, G, K, N, measure, stored
from jitgemm.checkpoint.torchao import SCALES_AND_ZEROS, tinygemm, unpacked
from jitgemm.tensors import describe

_CODES = ("weight", "weights_4x2", "weights_4bit")
_BOTH = ("scales_and_zeros", "weight_scales_and_zeros")
_INTEGERS = (torch.int32, torch.int8, torch.int16, torch.int64)


class _ExecuTorch(Format):
    name = "executorch"
    suffixes = (*_CODES, *_BOTH, "weight_scales", "weight_zeros", "scales", "zeros")

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        if any(name in names for name in _CODES[1:]):
            return any(name in names for name in (*_BOTH, "weight_scales"))
        weight, scales = names.get("weight"), names.get("scales")
        if weight is None or weight.dim() != 2:
            return False
        if weight.dtype == torch.uint8:
            return "weight_scales" in names or "weight_scales_and_zeros" in names
        rows = weight.shape[:1]
        return weight.dtype == torch.int8 and scales is not None and scales.dim() == 2 and scales.shape[:1] == rows

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        size, form = setting(config, "group_size"), "operator"
        name = next((candidate for candidate in _CODES if candidate in headers), "weight")
        packed = {name: stored(torch.uint8, N, K / 2)}
        both = next((candidate for candidate in _BOTH if candidate in headers), "")
        if "scales" in headers:
            size, form, layouts = None, "unpacked", {name: stored(INT8, N, K), "scales": stored(FLOATS, N, G)}
            if "zeros" in headers:
                layouts["zeros"] = stored((*FLOATS, *_INTEGERS), N, G)
        elif both:
            form, layouts = both, packed | {both: SCALES_AND_ZEROS}
        elif "weight_zeros" not in headers:
            raise ValueError(
                "weight_zeros: expected integers with weight_scales, as linear_qta8a_qga4w has them; found none "
                "(linear_q4gsw, without them, has its nibbles in another order)"
            )
        else:
            n, scale = measure(headers, packed)["n"], headers["weight_scales"]
            if scale.shape == (n, n):
                raise ValueError(f"weight_scales: expected [G, n] or [n, G], got {describe(scale)}, which fits both")
            dims = (N, G) if scale.shape[:1] == (n,) else (G, N)
            layouts = packed | {"weight_scales": stored(FLOATS, *dims), "weight_zeros": stored(_INTEGERS, *dims)}
        return Scheme(self.name, group_size=size, zero_points=True, form=form, found=layouts)

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        (_, _, size), name = self.sizes(tensors, scheme).known, next(iter(scheme.found))
        if scheme.form == "unpacked":
            return unpacked(name, tensors[name], tensors["scales"], tensors.get("zeros"), size)
        q = unpack_nibbles(tensors[name], 1, order=HIGH_FIRST)
        if scheme.form in _BOTH:
            return tinygemm(q, tensors[scheme.form], size)
        scale, zero = tensors["weight_scales"], tensors["weight_zeros"]
        if scheme.found["weight_scales"].axis("n") == 1:
            scale, zero = scale.T.contiguous(), zero.T.contiguous()
        return integer_zero(q, scale, zero.to(torch.int32) + 8, size, name="weight_zeros + 8")


FORMAT = _ExecuTorch()
