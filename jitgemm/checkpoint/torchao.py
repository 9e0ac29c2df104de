"""torch's and torchao's int4 weights: `_convert_weight_to_int4pack`, its inputs, and torchao's tensor subclasses.

tinygemm, (q - 8) * scale + zero with a float zero::

    scales_and_zeros              bf16, fp16 or fp32 [G, n, 2]
    weight or weight_int4pack     one of
        uint8 [n, k / 2]          the op's input: even k in the high nibble, odd k in the low nibble
        uint8 or int32 [n, k]     one code 0..15 each
        int32 [n / 8, k / (16 * I), 32, I / 2]   the op's output on NVIDIA GPUs, I = inner_k_tiles = 2, 4 or 8

torchao's subclasses, flattened as its safetensors code does it (`_weight_qdata`, ...); those in a state dict are taken
apart the same way. The file's metadata names the class, which decides; without metadata dtypes and shapes do::

    Int4TilePackedTo4dTensor   qdata int32, the op's output; scale_and_zero [G, n, 2]
    Int4Tensor                 qdata int8 [n, k / 2], two's complement, even k low; scale, zero_point floats [G, n];
                               q * scale + zero_point
    Int4PlainInt32Tensor       (XPU) qdata int32 [n, k / 8], low nibble first; scale [G, n], zero_point int8 [G, n];
                               (q - zero_point) * scale
    IntxUnpackedToInt8Tensor   qdata int8 [n, k], -8..7; scale, zero_point [n, G]; (q - zero_point) * scale;
                               with target_dtype int5 to int8 a weight of 8 bits
    Int8Tensor                 qdata int8 [n, k]; scale [n / B, k / B'] or one element; zero_point of zeros; q * scale
    Float8Tensor               qdata float8_e4m3fn [n, k]; scale as Int8Tensor's; q * scale
                               both: act_quant_kwargs in the metadata say how the input is quantised, act_quant_scale is
                               its static scale

The op's output: lane t of a warp holds what mma.m16n8k16 wants of B from it, for two tiles of 16 k in a word::

    n = 8 * (tile of n) + t / 4
    k = 16 * I * (super tile) + 32 * (word) + 8 * j + 2 * (t % 4) + h

    nibble   7   6   5   4   3   2   1   0        aten/native/cuda/int4mm.cu, matrix_to_m16n8k16_Bint4_layout
    j        3   2   1   0   3   2   1   0
    h        1   1   1   1   0   0   0   0

Read from PyTorch's int4mm.cu and torchao 0.18. What shapes cannot tell:

- uint8 [n, k / 2] and [n, k] both fit most scales. The size of the model's layer or the config's shape decides, else
  the config's group_size; else a value above 15 means packed, and bytes that are all the same need the shape.
- `_convert_weight_to_int4pack_for_cpu` also gives uint8 [n, k / 2], in an order that depends on the CPU: not to be
  given here. Nor ROCm's output, whose tiles have 16 rows of n under the shape of NVIDIA's.
- Int4TilePackedTo4dTensor pads k to a multiple of 1024 and n to 8 or 16. The metadata says the shape: the padding is
  dropped. Tensors taken out of their file need "shape": [n, k] in the config, else the padding comes back as columns
  and rows of the layer.

Raises for activations to be scaled first (act_pre_scale), the preshuffled and CPU (opaque) packings, NPU's float zero
points, every other class, by its name. Bounds of activations (hp_value_lb, hp_value_ub) are not applied: a token's
scale follows its largest value. Does not import torchao.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from jitgemm.checkpoint.bits import HIGH_FIRST, check_codes, float_zero, integer_zero, minus, twos_complement
from jitgemm.checkpoint.bits import unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.files import subclass_of
from jitgemm.checkpoint.format import Config, Format, Headers, Scheme, Sizes, block_of, check_known, group_size_of
from jitgemm.checkpoint.format import inputs_of, setting
from jitgemm.checkpoint.layouts import CODE_TYPES, FLOATS, INT32, INT8, Dim, G, K, Layout, N
from jitgemm.checkpoint.layouts import fits, measure, stored
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe, dtype_name

_FLAT = "_weight_"
_QDATA, _SCALE, _ZERO, _BOTH = (_FLAT + name for name in ("qdata", "scale", "zero_point", "scale_and_zero"))
SCALES_AND_ZEROS = stored(FLOATS, G, N, 2)
_TILES = "Int4TilePackedTo4dTensor"
_LAYOUTS: dict[str, Layout] = {
    "Int4Tensor": {
        _QDATA: stored(INT8, N, K / 2), _SCALE: stored(FLOATS, G, N), _ZERO: stored(FLOATS, G, N),
    },
    "Int4PlainInt32Tensor": {
        _QDATA: stored(INT32, N, K / 8), _SCALE: stored(FLOATS, G, N), _ZERO: stored(INT8, G, N),
    },
    "IntxUnpackedToInt8Tensor": {
        _QDATA: stored(INT8, N, K), _SCALE: stored(FLOATS, N, G), _ZERO: stored((*FLOATS, torch.int8), N, G),
    },
}  # fmt: skip
_EIGHT = {"Int8Tensor": "int8", "Float8Tensor": "e4m3"}
"""Classes of 8 bits and their codes."""
_KNOWN = (_TILES, *_LAYOUTS, *_EIGHT)


class _TorchAo(Format):
    name = "torchao"
    also = (_QDATA, _SCALE, _ZERO, _BOTH)
    suffixes = (*also, "weight", "weight_int4pack", "scales_and_zeros")

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        method = setting(config, "quant_method")
        if method not in (None, "torchao"):
            return False
        if "scales_and_zeros" in names:
            return "weight" in names or "weight_int4pack" in names
        return _QDATA in names or ("weight" in names and (bool(names["weight"].kind) or method == "torchao"))

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        config, size = config or {}, None
        if "scales_and_zeros" in headers:
            form, size = _TILES, setting(config, "group_size", "groupsize")
            parts = _tinygemm("weight" if "weight" in headers else "weight_int4pack", headers, "scales_and_zeros")
        elif _QDATA not in headers:
            weight = headers["weight"]
            got = getattr(weight, "kind", "") or f"a plain {describe(weight)}"
            raise ValueError(f"weight: expected one of torchao's {', '.join(_KNOWN)}, got {got}")
        else:
            form = _kind(headers, config)
            check_known(headers, self.also)
            tiles = form == _TILES
            parts = _tinygemm(_QDATA, headers, _BOTH) if tiles else _LAYOUTS.get(form) or _blocks(headers, _EIGHT[form])
        code = _EIGHT.get(form, "int4")
        inputs, zeros = inputs_of(config, code, headers), form not in _EIGHT
        return Scheme(self.name, code, size, zero_points=zeros, inputs=inputs, form=form, found=parts, settings=config)

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        if scheme.form != _TILES:
            return super().sizes(headers, scheme)
        check_known(headers, (*scheme.found, *self.also))
        size, shape, columns = measure(headers, scheme.found), _shape(scheme.settings), scheme.group_size or 0
        several = size["G"] * columns if columns > 0 and size["G"] > 1 else None  # one may be of any size
        return Sizes(*(shape or (size["n"], size.get("k", several))))

    def described(self, metadata: Mapping[str, str], prefix: str) -> Mapping[str, Any]:
        """Class, size and activations of a subclass, in compressed-tensors' words: {"_type": ..., "_data": {"shape":
        [n, k], ...}} under its name. prefix is that of a layer, or a parameter that stacks experts."""
        try:
            whole = json.loads(metadata.get(prefix) or metadata[f"{prefix}.weight".lstrip(".")])
            data, settings = whole.get("_data", {}), {"class": whole["_type"]}
            settings |= {key: _plain(data[key]) for key in ("shape", "target_dtype") if key in data}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return {}
        named, given = _plain(data.get("activation_quantization")), data.get("act_quant_kwargs")
        inputs: dict[str, Any] = {"strategy": "token", "dynamic": True}
        if str(named).lower() == "int8_asym_per_token":
            inputs |= {"type": "int", "symmetric": False}
        elif named is not None:
            inputs["strategy"] = named
        elif _plain(data.get("activation_dtype")) == "float8_e4m3fn":
            inputs["type"] = "float"
        elif given is not None:
            static = "act_quant_scale" in whole.get("_tensor_data_names", ())
            try:
                inputs = _activations(given["_data"]) | {"dynamic": not static}
            except (AttributeError, KeyError, TypeError, ValueError):
                raise ValueError(f"act_quant_kwargs: expected torchao's of one of its classes, got {given!r}") from None
        else:
            return settings
        return settings | {"input_activations": inputs}

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        sizes, form, settings = self.sizes(tensors, scheme), scheme.form, scheme.settings
        if form == _TILES:
            (name, codes), (_, parameters) = ((name, tensors[name]) for name in scheme.found)
            shape = _shape(settings)
            k = shape[1] if shape else setting(settings, "in_features")
            q = _codes(name, codes, len(parameters), scheme.group_size, k)
            size = group_size_of(q.shape[1], len(parameters), scheme.group_size, "scales_and_zeros")
            n, k = shape or q.shape
            if q.shape[0] < n or q.shape[1] < k:
                raise ValueError(f"weight: expected qdata for at least [{n}, {k}], got {list(q.shape)}")
            return tinygemm(q[:n, :k], parameters[: ceil_div(k, size), :n], size)
        (n, _, group_size), qdata, scale, zero = sizes.known, tensors[_QDATA], tensors[_SCALE], tensors.get(_ZERO)
        if scheme.eight_bits:
            for name in (_ZERO, _FLAT + "act_quant_zero_point"):
                if name in tensors and bool(tensors[name].float().any()):
                    raise ValueError(f"{name}: expected zeros with 8 bits, got others")
            scale = scheme.by_row(_SCALE, scale, n)
            return CanonicalWeight(qdata, scale, group_size=group_size, code=scheme.code)
        if form == "IntxUnpackedToInt8Tensor":
            return unpacked(_QDATA, qdata, scale, zero, group_size)
        q, scale, zero = unpack_nibbles(qdata, 1), scale.T.contiguous(), tensors[_ZERO].T.contiguous()
        if form == "Int4Tensor":
            return float_zero(twos_complement(q), scale, zero, group_size)
        return integer_zero(q, scale, zero, group_size, name=_ZERO)


# ---- what headers say ------------------------------------------------------------------------------------------------


def _shape(config: Config) -> tuple[int, int] | None:
    """n, k of a layer, where its file or the config says them."""
    shape = setting(config, "shape")
    return None if shape is None else block_of("shape", shape)


def _kind(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The class of a flattened subclass. Raises ValueError, before data is read, for one that is not read."""
    stated, qdata, zero = setting(config, "class"), tensors[_QDATA], tensors.get(_ZERO)
    for name, why in (("act_pre_scale", "none, as it scales the activations first; got one"),
                      ("group_scale", "a plain packing, got the preshuffled one")):  # fmt: skip
        if _FLAT + name in tensors:
            raise ValueError(f"{_FLAT}{name}: expected {why}")
    if stated not in (None, *_KNOWN):
        raise ValueError(f"weight: expected one of torchao's {', '.join(_KNOWN)}, got {stated}")
    if stated == "IntxUnpackedToInt8Tensor" and config.get("target_dtype") in ("int5", "int6", "int7", "int8"):
        return "Int8Tensor"
    if _BOTH in tensors:
        if qdata.dtype != torch.int32 or qdata.dim() != 4:
            raise ValueError(
                f"{_QDATA}: expected int32 in four dimensions with scale_and_zero, got {describe(qdata)}, whose "
                "order depends on the CPU that packed it"
            )
        return _TILES
    if qdata.dtype == torch.int32:
        if zero is not None and zero.dtype != torch.int8:
            raise ValueError(f"{_ZERO}: expected int8, as XPU's has it, got {describe(zero)} (NPU's)")
        return "Int4PlainInt32Tensor"
    if stated is not None:
        return stated
    if zero is None:
        return "Float8Tensor" if qdata.dtype.is_floating_point else "Int8Tensor"
    fitting = [form for form in _LAYOUTS if fits(tensors, _LAYOUTS[form])]
    if len(fitting) != 1:
        got = ", ".join(f"{name} {describe(tensors[name])}" for name in (_QDATA, _SCALE, _ZERO) if name in tensors)
        raise ValueError(
            f"{_SCALE}: expected [G, n] (Int4Tensor) or [n, G] (IntxUnpackedToInt8Tensor), got {got}, which "
            f"fits {'both; give its file, whose metadata name the class' if fitting else 'neither'}"
        )
    return fitting[0]


def _tinygemm(name: str, tensors: Mapping[str, Any], parameters: str) -> Layout:
    """The layout of tinygemm's codes, in the forms that the module describes, and their scales and zeros."""
    codes, tiles = tensors[name], "int32 [n / 8, k / (16 * I), 32, I / 2]"
    inner = codes.shape[-1] if codes.shape[-1] in (1, 2, 4) else 4
    layouts = {
        (torch.uint8, 2): stored(torch.uint8, N, Dim("codes or pairs of codes")),
        (torch.int32, 2): stored(INT32, N, K),
        (torch.int32, 4): stored(
            INT32, N / 8, K / (32 * inner), 32, inner, wanted=tiles + " with I 2, 4 or 8, got int32 {got}"
        ),
    }
    if (codes.dtype, codes.dim()) not in layouts:
        raise ValueError(
            f"{name}: expected uint8 [n, k / 2] or [n, k], int32 [n, k], or {tiles}, got {describe(codes)}"
        )
    return {name: layouts[codes.dtype, codes.dim()], parameters: SCALES_AND_ZEROS}


def _blocks(tensors: Mapping[str, Any], code: str) -> Layout:
    """The layout of 8-bit codes, whose scale may be one for a row, a block or the whole tensor."""
    codes, scale = {_QDATA: stored(CODE_TYPES[code], N, K)}, tensors[_SCALE]
    n, k = measure(tensors, codes).values()
    single = math.prod(scale.shape) == 1
    rows, columns = (n, 1) if tuple(scale.shape) == (n,) else (1, 1) if single else (*scale.shape, 0)[:2]
    if scale.dtype not in FLOATS or not rows * columns or scale.dim() > 2 and not single or n % rows or k % columns:
        raise ValueError(
            f"{_SCALE}: expected floats, one or [n / rows, k / columns] for n, k = {n, k}, got {describe(scale)}"
        )
    return codes | {_SCALE: stored(FLOATS, *(() if single else (N / (n // rows), G)[: scale.dim()]))}


# ---- codes and parameters --------------------------------------------------------------------------------------------


def tinygemm(q: torch.Tensor, parameters: torch.Tensor, group_size: int) -> CanonicalWeight:
    """(q - 8) * scale + zero, of codes 0..15 [n, k] and [G, n, 2]."""
    scale, zero = (parameters[..., i].T.contiguous() for i in (0, 1))
    return float_zero(minus(q.contiguous(), 8), scale, zero, group_size)


def _codes(name: str, codes: torch.Tensor, groups: int, group_size: int | None, k: int | None) -> torch.Tensor:
    """uint8 [n, k], 0..15. Whether bytes are two codes each: by k, else by the group size, else by what they hold."""
    if codes.dim() == 4:
        return unpack_tiles(codes)
    columns, size = codes.shape[1], group_size if (group_size or 0) > 0 else None
    wrong = [bool(ceil_div(each, size) - groups if size else each % groups) for each in (columns, 2 * columns)]
    if codes.dtype != torch.uint8:
        packed = False
    elif k is not None:
        if k not in (columns, 2 * columns):
            raise ValueError(f"{name}: expected codes for k = {k}, got {describe(codes)}")
        packed = columns != k
    elif wrong[0] != wrong[1]:
        packed = wrong[0]
    else:
        least, most = (int(each) for each in codes.aminmax())
        if most <= 15 and least == most:
            raise ValueError(
                f'{name}: expected "shape": [n, k] in the config, as {describe(codes)} of {most} alone can be codes or '
                f"pairs of codes, and {groups} groups of {group_size} fit both"
            )
        packed = most > 15
    if packed:
        return unpack_nibbles(codes, 1, order=HIGH_FIRST)
    check_codes(name, codes, 0, 15)
    return codes.to(torch.uint8)


def unpack_tiles(words: torch.Tensor) -> torch.Tensor:
    """uint8 codes [n, k], 0..15, of `_convert_weight_to_int4pack`'s output on NVIDIA GPUs, int32 [n / 8, k / (16 * I),
    32, I / 2], I = 2, 4 or 8."""
    tiles, super_tiles, _, per_lane = words.shape
    nibbles = unpack_nibbles(words, 3).reshape(tiles, super_tiles, 8, 4, per_lane, 2, 4)
    #                   tile of n, t / 4, super tile, word, j, t % 4, h
    return nibbles.permute(0, 2, 1, 4, 6, 3, 5).reshape(8 * tiles, 32 * per_lane * super_tiles)


def unpacked(
    name: str, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int
) -> CanonicalWeight:
    """(q - zero) * scale with q int8 [n, k] of -8..7; scale and zero [n, G], zero integers in any dtype."""
    check_codes(name, q, -8, 7)
    if zero is None:
        return CanonicalWeight(q, scale, group_size=group_size)
    if zero.is_floating_point() and not bool((zero == zero.round()).all()):
        raise ValueError("zero_point: expected integers, as it is subtracted before scaling; got fractions")
    return integer_zero((q + 8).view(torch.uint8), scale, zero.to(torch.int32) + 8, group_size, name="zero_point + 8")


def _activations(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What act_quant_kwargs say, apart from whether the scale is static."""
    granularity, inner = settings["granularity"]["_type"], settings["granularity"].get("_data") or {}
    dtype, (rows, columns) = _plain(settings.get("float8_dtype", "int8")), inner.get("block_size", (0, 0))
    inputs = {"type": {"float8_e4m3fn": "float", "int8": "int"}.get(dtype, dtype)}
    inputs["symmetric"] = _plain(settings.get("mapping_type")) != "ASYMMETRIC"
    if granularity == "PerBlock" and rows == 1:
        return inputs | {"strategy": "group", "group_size": columns}
    if granularity == "PerRow" and inner.get("dim", -1) not in (-1, 1):
        granularity = f"PerRow of dim {inner['dim']}"
    known = {"PerRow": "token", "PerToken": "token", "PerTensor": "tensor"}
    known["PerBlock"] = f"PerBlock of {rows} x {columns}"
    return inputs | {"strategy": known.get(granularity, granularity)}


def _plain(value: Any) -> Any:
    """What torchao writes as {"_type": ..., "_data": value}."""
    return value["_data"] if isinstance(value, Mapping) else value


def flattened(source: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """torchao's subclasses as the tensors that they hold, named as in its files, and what it says of them there."""

    def named(tensor: torch.Tensor, kind: str) -> dict[str, Any]:
        lists = (getattr(tensor, f"{start}tensor_{kind}_names", ()) for start in ("", "optional_"))
        return {part: getattr(tensor, part, None) for names in lists for part in names}

    tensors_by_name: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for name, tensor in source.items():
        held = {part: value for part, value in named(tensor, "data").items() if value is not None}
        if not subclass_of(tensor) or not held:
            tensors_by_name[name] = tensor
            continue
        above, dot, child = name.rpartition(".")
        tensors_by_name |= {f"{above}{dot}_{child}_{part}": value for part, value in held.items()}
        data = {"_type": subclass_of(tensor), "_data": named(tensor, "attribute"), "_tensor_data_names": list(held)}
        metadata[name] = json.dumps(data, default=_encoded)
    return tensors_by_name, metadata


def _encoded(value: Any) -> Any:
    """What JSON has no form for, as torchao writes it."""
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": dtype_name(value)}
    data: Any = value.name if isinstance(value, Enum) else str(value)
    if is_dataclass(value):
        data = {each.name: getattr(value, each.name) for each in fields(value)}
    return {"_type": type(value).__name__, "_data": data}


FORMAT = _TorchAo()
