"""torch's and torchao's int4 weights: `_convert_weight_to_int4pack`, its inputs, and torchao's tensor subclasses.

tinygemm, (q - 8) * scale + zero with a float zero::

    scales_and_zeros              bf16, fp16 or fp32 [G, n, 2]
    weight or weight_int4pack     one of
        uint8 [n, k / 2]          the op's input: even k in the high nibble, odd k in the low nibble
        uint8 or int32 [n, k]     one code 0..15 each
        int32 [n / 8, k / (16 * I), 32, I / 2]   the op's output on NVIDIA GPUs, I = inner_k_tiles = 2, 4 or 8

torchao's subclasses, as `weight` of a state dict, or as `_weight_qdata` ... where its safetensors code flattened them::

    Int4TilePackedTo4dTensor   qdata int32, the op's output; scale_and_zero [G, n, 2]
    Int4Tensor                 qdata int8 [n, k / 2], two's complement, even k low; scale, zero_point floats [G, n];
                               q * scale + zero_point
    Int4PlainInt32Tensor       (XPU) qdata int32 [n, k / 8], low nibble first; scale [G, n], zero_point int8 [G, n];
                               (q - zero_point) * scale
    IntxUnpackedToInt8Tensor   qdata int8 [n, k], -8..7; scale, zero_point [n, G]; (q - zero_point) * scale

The op's output: lane t of a warp holds what mma.m16n8k16 wants of B from it, for two tiles of 16 k in a word::

    n = 8 * (tile of n) + t / 4
    k = 16 * I * (super tile) + 32 * (word) + 8 * j + 2 * (t % 4) + h

    nibble   7   6   5   4   3   2   1   0        aten/native/cuda/int4mm.cu, matrix_to_m16n8k16_Bint4_layout
    j        3   2   1   0   3   2   1   0
    h        1   1   1   1   0   0   0   0

Read from PyTorch's int4mm.cu and torchao 0.18. What shapes cannot tell:

- uint8 [n, k / 2] and [n, k] both fit most scales. The config's group_size decides; else a value above 15 means packed.
- `_convert_weight_to_int4pack_for_cpu` also gives uint8 [n, k / 2], in an order that depends on the CPU: not to be
  given here. Nor ROCm's output, whose tiles have 16 rows of n under the shape of NVIDIA's.
- Int4TilePackedTo4dTensor pads k to a multiple of 1024 and n to 8 or 16. Subclasses say their shape, and so does the
  metadata of a file with flattened ones: the padding is dropped. Tensors taken out of their file need "shape": [n, k]
  in the config, else the padding comes back as columns and rows of the layer.

Refused: activations to be scaled first (act_pre_scale), the preshuffled and CPU (opaque) packings, NPU's float zero
points. Knows no files: tensors and config come from the caller. Does not import torchao.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint.affine import (
    FLOATS,
    check_codes,
    check_shape,
    float_zero,
    group_size_of,
    integer_zero,
    setting,
    take,
)
from jitgemm.checkpoint.bits import HIGH_FIRST, minus_8, twos_complement, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, Format, Sizes, TensorInfo
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe

_FLAT = "_weight_"
_PLAIN_NAMES = ("weight", "weight_int4pack")
_SUBCLASSES = ("Int4TilePackedTo4dTensor", "Int4Tensor", "Int4PlainInt32Tensor", "IntxUnpackedToInt8Tensor")
_QDATA_DTYPES = (torch.int8, torch.uint8, torch.int32)
_PARAMETERS = ("scale", "zero_point", "scale_and_zero", "group_scale", "act_pre_scale")


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    if setting(config, "quant_method", default="torchao") != "torchao":
        return False
    if "scales_and_zeros" in names:
        return any(name in names for name in _PLAIN_NAMES)
    qdata = names.get(_FLAT + "qdata")
    if qdata is not None:
        others = ("scale_and_zero", "zero_point", "group_scale")
        return qdata.dtype in _QDATA_DTYPES and any(_FLAT + name in names for name in others)
    return "weight" in names and (bool(names["weight"].kind) or setting(config, "quant_method") == "torchao")


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    group_size = setting(config, "group_size", "groupsize")
    if "scales_and_zeros" in tensors:
        codes = take_any(tensors, next((name for name in _PLAIN_NAMES if name in tensors), _PLAIN_NAMES[0]))
        groups, n, _ = take(tensors, "scales_and_zeros", FLOATS, "G", "n", "2").shape
        return Sizes(n, _tiled_k(codes) if codes.dim() == 4 else groups * group_size if group_size else None)
    if _FLAT + "qdata" in tensors:
        qdata = tensors[_FLAT + "qdata"]
        padded = (8 * qdata.shape[0], _tiled_k(qdata)) if qdata.dim() == 4 else (qdata.shape[0], None)
        return Sizes(*setting(config, "shape", default=padded))
    weight = take_any(tensors, "weight")
    kind = weight.kind if isinstance(weight, TensorInfo) else type(weight).__name__
    if kind not in _SUBCLASSES:
        plain = kind in ("", "Tensor", "Parameter")
        got = f"a plain {describe(weight)}" if plain else kind
        raise ValueError(f"weight: expected one of torchao's {', '.join(_SUBCLASSES)}, got {got}")
    return Sizes(*weight.shape)


def _tiled_k(words: torch.Tensor | TensorInfo) -> int:
    return words.shape[1] * 32 * words.shape[3]


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    _sizes(tensors, config)
    group_size = setting(config, "group_size", "groupsize")
    if "scales_and_zeros" in tensors:
        name = next((name for name in _PLAIN_NAMES if name in tensors), _PLAIN_NAMES[0])
        codes = take_any(tensors, name)
        return read_tinygemm(name, codes, take(tensors, "scales_and_zeros", FLOATS, "G", "n", "2"), group_size)
    if _FLAT + "qdata" in tensors:
        parts = {name: tensors[_FLAT + name] for name in _PARAMETERS if _FLAT + name in tensors}
        read = _read_subclass({"qdata": tensors[_FLAT + "qdata"], **parts}, _FLAT, None)
        return _without_padding(read, *setting(config, "shape", default=(read.n, read.k)))
    return _read_instance(take_any(tensors, "weight"))


def take_any(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """tensors[name], whatever it is. Raises ValueError where there is none."""
    if name not in tensors:
        raise ValueError(f"{name}: expected 4-bit codes, found none")
    return tensors[name]


def read_tinygemm(
    name: str, codes: torch.Tensor, scales_and_zeros: torch.Tensor, group_size: int | None
) -> CanonicalWeight:
    """(q - 8) * scale + zero, from any of the forms that the module describes.

    Args:
        name: the tensor that codes are, for messages.
        scales_and_zeros: [G, n, 2].
        group_size: None where only the shapes say.
    """
    groups, n, _ = scales_and_zeros.shape
    check_shape("scales_and_zeros", scales_and_zeros, groups, n, 2)
    q = _codes(name, codes, groups, group_size)
    check_shape("scales_and_zeros", scales_and_zeros, groups, q.shape[0], 2)
    scale, zero = (scales_and_zeros[..., i].T.contiguous() for i in (0, 1))
    return float_zero(minus_8(q), scale, zero, group_size_of(q.shape[1], groups, group_size, "scales_and_zeros"))


def _codes(name: str, codes: torch.Tensor, groups: int, group_size: int | None) -> torch.Tensor:
    """uint8 [n, k], 0..15."""
    if codes.dtype == torch.int32 and codes.dim() == 4:
        return unpack_tiles(name, codes)
    if codes.dtype not in (torch.uint8, torch.int32) or codes.dim() != 2:
        raise ValueError(
            f"{name}: expected uint8 [n, k / 2] or [n, k], int32 [n, k], or int32 [n / 8, k / (16 * I), 32, I / 2], "
            f"got {describe(codes)}"
        )
    if codes.dtype == torch.uint8 and _is_packed(codes, groups, group_size):
        return unpack_nibbles(codes, 1, order=HIGH_FIRST)
    check_codes(name, codes, 0, 15)
    return codes.to(torch.uint8)


def _is_packed(codes: torch.Tensor, groups: int, group_size: int | None) -> bool:
    columns = codes.shape[1]
    if group_size is None or group_size == -1:
        return bool((codes > 15).any())
    return columns != groups * group_size


def unpack_tiles(name: str, words: torch.Tensor) -> torch.Tensor:
    """uint8 codes [n, k], 0..15, of `_convert_weight_to_int4pack`'s output on NVIDIA GPUs.

    Args:
        words: int32 [n / 8, k / (16 * I), 32, I / 2], I = 2, 4 or 8.

    Raises:
        ValueError: another shape.
    """
    tiles, super_tiles, lanes, per_lane = words.shape
    if lanes != 32 or per_lane not in (1, 2, 4):
        raise ValueError(
            f"{name}: expected int32 [n / 8, k / (16 * I), 32, I / 2] with I 2, 4 or 8, got {describe(words)}"
        )
    nibbles = unpack_nibbles(words, 3).reshape(tiles, super_tiles, 8, 4, per_lane, 2, 4)
    #                   tile of n, t / 4, super tile, word, j, t % 4, h
    return nibbles.permute(0, 2, 1, 4, 6, 3, 5).reshape(8 * tiles, 32 * per_lane * super_tiles)


# ---- tensor subclasses -----------------------------------------------------------------------------------------------


def _read_instance(weight: torch.Tensor) -> CanonicalWeight:
    parts = {name: getattr(weight, name) for name in _PARAMETERS if getattr(weight, name, None) is not None}
    read = _read_subclass({"qdata": weight.qdata, **parts}, "weight.", type(weight).__name__)
    return _without_padding(read, *weight.shape)


def _read_subclass(parts: Mapping[str, torch.Tensor], prefix: str, kind: str | None) -> CanonicalWeight:
    """From a subclass's own tensors; kind None where dtypes and shapes must tell it."""
    if "act_pre_scale" in parts:
        raise ValueError(f"{prefix}act_pre_scale: expected none, as it scales the activations first; got one")
    if "group_scale" in parts:
        raise ValueError(f"{prefix}group_scale: expected a plain packing, got the preshuffled one")
    qdata = parts["qdata"]
    if "scale_and_zero" in parts:
        if qdata.dtype != torch.int32 or qdata.dim() != 4:
            raise ValueError(
                f"{prefix}qdata: expected int32 in four dimensions beside scale_and_zero, got {describe(qdata)}, whose "
                "order depends on the CPU that packed it"
            )
        return read_tinygemm(prefix + "qdata", qdata, take(parts, "scale_and_zero", FLOATS, "G", "n", "2"), None)
    scale = take(parts, "scale", FLOATS, "groups", "rows")
    zero = take(parts, "zero_point", (*FLOATS, torch.int8), "groups", "rows")
    check_shape(prefix + "zero_point", zero, *scale.shape)
    if qdata.dim() != 2 or qdata.dtype not in (torch.int8, torch.int32):
        raise ValueError(
            f"{prefix}qdata: expected int8 [n, k / 2] or [n, k], or int32 [n, k / 8], got {describe(qdata)}"
        )
    if qdata.dtype == torch.int32:
        return _read_plain_int32(qdata, scale, zero, prefix)
    if kind is None:
        kind = _int8_kind(qdata, scale, zero, prefix)
    if kind == "Int4Tensor":
        q = twos_complement(unpack_nibbles(qdata, 1))
        check_shape(prefix + "scale", scale, scale.shape[0], q.shape[0])
        group_size = group_size_of(q.shape[1], scale.shape[0], None, prefix + "scale")
        return float_zero(q, scale.T.contiguous(), zero.T.contiguous(), group_size)
    return read_unpacked(prefix + "qdata", qdata, scale, zero)


def _read_plain_int32(qdata: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, prefix: str) -> CanonicalWeight:
    if zero.dtype != torch.int8:
        raise ValueError(f"{prefix}zero_point: expected int8, as XPU's has it, got {describe(zero)} (NPU's)")
    q = unpack_nibbles(qdata, 1)
    check_shape(prefix + "scale", scale, scale.shape[0], q.shape[0])
    group_size = group_size_of(q.shape[1], scale.shape[0], None, prefix + "scale")
    return integer_zero(q, scale.T.contiguous(), zero.T.contiguous(), group_size, name=prefix + "zero_point")


def _int8_kind(qdata: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, prefix: str) -> str:
    """Which of the two with int8 qdata: Int4Tensor's scale is [G, n] and its zero a float."""
    n = qdata.shape[0]
    packed = scale.shape[1] == n and zero.dtype in FLOATS
    unpacked = scale.shape[0] == n
    if packed and unpacked:
        raise ValueError(
            f"{prefix}scale: expected [G, n] (Int4Tensor) or [n, G] (IntxUnpackedToInt8Tensor), got "
            f"{list(scale.shape)}, which fits both; load the subclass itself from a state dict"
        )
    if not packed and not unpacked:
        raise ValueError(f"{prefix}scale: expected [G, {n}] or [{n}, G], got {list(scale.shape)}")
    return "Int4Tensor" if packed else "IntxUnpackedToInt8Tensor"


def read_unpacked(name: str, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> CanonicalWeight:
    """(q - zero) * scale with q int8 [n, k] of -8..7; scale and zero [n, G], zero integers in any dtype.

    Raises:
        ValueError: values out of range, or a zero that is no integer.
    """
    check_codes(name, q, -8, 7)
    n, k = q.shape
    check_shape("scale", scale, n, scale.shape[1])
    group_size = group_size_of(k, scale.shape[1], None, "scale")
    if zero is None:
        return CanonicalWeight(q, scale, group_size=group_size)
    check_shape("zero_point", zero, *scale.shape)
    if zero.is_floating_point() and not bool((zero == zero.round()).all()):
        raise ValueError("zero_point: expected integers, as it is subtracted before scaling; got fractions")
    return integer_zero((q + 8).view(torch.uint8), scale, zero.to(torch.int32) + 8, group_size, name="zero_point + 8")


def _without_padding(weight: CanonicalWeight, n: int, k: int) -> CanonicalWeight:
    """The first n rows and k columns."""
    if (weight.n, weight.k) == (n, k):
        return weight
    if weight.n < n or weight.k < k:
        raise ValueError(f"weight: expected qdata for at least [{n}, {k}], got [{weight.n}, {weight.k}]")
    groups = slice(ceil_div(k, weight.group_size))
    cut = {
        name: None if value is None else value[:n, groups].contiguous()
        for name, value in (("scale", weight.scale), ("zero", weight.zero), ("offset", weight.offset))
    }
    return replace(weight, q=weight.q[:n, :k].contiguous(), **cut)


def _described(metadata: Mapping[str, str], prefix: str) -> Mapping[str, Any]:
    """Size and activations of a subclass, {"_type": ..., "_data": {"shape": [n, k], ...}} under its name.

    Activations are told in compressed-tensors' words, which are the layer's.
    """
    try:
        data = dict(json.loads(metadata[f"{prefix}.weight".lstrip(".")])["_data"])
    except (KeyError, TypeError, ValueError):
        return {}
    said = {"shape": data["shape"]} if "shape" in data else {}
    per_token = {"strategy": "token", "dynamic": True}
    named = data.get("activation_quantization")
    if named is not None:
        known = per_token | {"type": "int", "symmetric": False}
        said["input_activations"] = known if named == "int8_asym_per_token" else {"strategy": named, "dynamic": True}
    elif data.get("activation_dtype") == {"_type": "torch.dtype", "_data": "float8_e4m3fn"}:
        said["input_activations"] = per_token | {"type": "float"}
    return said


FORMAT = Format(name="torchao", detect=_detect, sizes=_sizes, read=_read, described=_described)
