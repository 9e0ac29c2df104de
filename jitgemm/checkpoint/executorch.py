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
- The C++ operator takes scales and zeros as [G, n], the Python reference as [n, G]. Both are read; what fits both is
  refused.

linear_qta8a_qga4w_qta8o had scales_and_zeros as linear_qga4w. ExecuTorch 1.5.1 has linear_q4gsw and
linear_dq8ca_q4gsw instead, with even k in the LOW nibble and no zeros: without weight_zeros a layer is refused rather
than read in the wrong order. Knows no files: tensors come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import FLOATS, INT8, group_size_of, integer_zero, measure, setting
from jitgemm.checkpoint.bits import HIGH_FIRST, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, Format, Sizes, TensorInfo, check_known
from jitgemm.checkpoint.torchao import SCALES_AND_ZEROS, read_tinygemm, read_unpacked
from jitgemm.tensors import describe

_OPERATOR_NAMES = ("weights_4x2", "weights_4bit")
_BOTH = ("scales_and_zeros", "weight_scales_and_zeros")
_INTEGERS = (torch.int32, torch.int8, torch.int16, torch.int64)


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    if any(name in names for name in _OPERATOR_NAMES):
        return any(name in names for name in (*_BOTH, "weight_scales"))
    weight, scales = names.get("weight"), names.get("scales")
    if weight is None or len(weight.shape) != 2:
        return False
    if weight.dtype == torch.uint8:
        return "weight_scales" in names or "weight_scales_and_zeros" in names
    rows = weight.shape[0]
    return weight.dtype == torch.int8 and scales is not None and len(scales.shape) == 2 and scales.shape[0] == rows


def _codes_name(tensors: Mapping[str, Any]) -> str:
    return next((name for name in ("weight", *_OPERATOR_NAMES) if name in tensors), "weight")


def _both_name(tensors: Mapping[str, Any]) -> str | None:
    return next((name for name in _BOTH if name in tensors), None)


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    name, both = _codes_name(tensors), _both_name(tensors)
    given, packed = setting(config, "group_size"), {name: ((torch.uint8,), "n", "k / 2")}
    if "scales" in tensors:
        given, parameters = None, "scales"
        layout = {name: (INT8, "n", "k"), "scales": (FLOATS, "n", "G")}
        if "zeros" in tensors:
            layout["zeros"] = ((*FLOATS, *_INTEGERS), "n", "G")
    elif both is not None:
        parameters, layout = both, packed | {both: SCALES_AND_ZEROS}
    else:
        parameters, n, scale = "weight_scales", measure(tensors, packed)["n"], tensors["weight_scales"]
        if "weight_zeros" not in tensors:
            raise ValueError(
                "weight_zeros: expected integers beside weight_scales, as linear_qta8a_qga4w has them; found none "
                "(linear_q4gsw, without them, has its nibbles in another order)"
            )
        if scale.shape == (n, n):
            raise ValueError(f"weight_scales: expected [G, n] or [n, G], got {describe(scale)}, which fits both")
        dims = ("n", "G") if scale.shape[:1] == (n,) else ("G", "n")
        layout = packed | {"weight_scales": (FLOATS, *dims), "weight_zeros": (_INTEGERS, *dims)}
    check_known(tensors, tuple(layout))
    size = measure(tensors, layout)
    return Sizes(size["n"], size["k"], group_size_of(size["k"], size["G"], given, parameters))


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    sizes, name, both = _sizes(tensors, config), _codes_name(tensors), _both_name(tensors)
    if "scales" in tensors:
        return read_unpacked(name, tensors[name], tensors["scales"], tensors.get("zeros"))
    if both is not None:
        return read_tinygemm(name, tensors[name], tensors[both], sizes.group_size, sizes.k)
    scale, zero = tensors["weight_scales"], tensors["weight_zeros"]
    if scale.shape[0] != sizes.n:
        scale, zero = scale.T.contiguous(), zero.T.contiguous()
    q = unpack_nibbles(tensors[name], 1, order=HIGH_FIRST)
    return integer_zero(q, scale, zero.to(torch.int32) + 8, sizes.group_size, name="weight_zeros + 8")


FORMAT = Format(name="executorch", detect=_detect, sizes=_sizes, read=_read)
