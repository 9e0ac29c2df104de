"""compressed-tensors (llm-compressor, vLLM): integer weights of 4 and 8 bits, and float-quantized FP8.

::

    weight_packed      int32 [n, ceil(k / 8)]  pack-quantized: q + 8, eight along k to a word, the low nibble first
                       int32 [n, ceil(k / 4)]  of 8 bits: q + 128, four to a word, the low byte first
    weight             int8 [n, k]             int-quantized: q, -8..7, or of 8 bits
                       float8_e4m3fn [n, k]    float-quantized: q
    weight_shape       [2]                     pack-quantized: n, k
    weight_scale       [n, G], [n, 1], [1]     strategy group, channel, tensor; mxfp8-quantized: e8m0 as uint8
                       [ceil(n / B), G]        strategy block: B rows and k / G columns share a scale
    weight_zero_point  int32 [ceil(n / 8), G]  pack-quantized: zero + 8, eight along n to a word; of 8 bits four
                       int8 [n, G]             int-quantized, and pack-quantized before release 0.9.4: zero
    weight_g_idx       int32 [k]               group of each column of the input; -1: columns stand in order
    input_scale        [1]                     static activations
    input_zero_point   [1]

    weight = (q - zero) * scale

Weights of 8 bits need a config that says so. With zero points they can be dequantised alone. Checked against compressed-tensors
0.10.2 and 0.20.0, 8 bits against the latter alone. That one no longer knows `weight_g_idx` (activation order "group" is
gone), but files with it are many. The scheme's activations change no weight, and are the layer's business.
Other tensors are refused, such as `weight_chan_scale`, a second scale that vLLM's first W4A8 files had. Presets
(config_groups {"W4A16": ["Linear"]}) mean what they mean in 0.20.0.
Knows no files: tensors and config come from the caller.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import FLOATS, INT8, check_codes, check_shape, check_single, measure, setting
from jitgemm.checkpoint.bits import minus_8, minus_128, unpack_bytes, unpack_nibbles
from jitgemm.checkpoint.canonical import (
    CanonicalWeight,
    Dims,
    Format,
    Sizes,
    TensorInfo,
    activation_order,
    by_block,
    check_known,
)
from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe, dtype_name, one_of

_METHOD = "compressed-tensors"
_E4M3 = torch.float8_e4m3fn
_BYTES = (torch.uint8, torch.float8_e8m0fnu)  # of e8m0
_SUPPORTED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_CODES = {(4, "int"): None, (8, "int"): torch.int8, (8, "float"): _E4M3}
"""By num_bits and type: that of 8-bit codes, None for 4 bits."""
_TENSORS = ("weight_scale", "weight_zero_point", "weight_g_idx")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


_NAMES = (lambda value: isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value), "a list of names")
_MAPPING = (lambda value: isinstance(value, Mapping), "a mapping")
_TEXT = (lambda value: isinstance(value, str), "a name")
_INTEGER = (lambda value: isinstance(value, int) and not isinstance(value, bool), "an integer")
_KINDS = {
    "ignore": _NAMES,
    "targets": _NAMES,
    "config_groups": _MAPPING,
    "transform_config": _MAPPING,
    "weights": _MAPPING,
    "input_activations": _MAPPING,
    "type": _TEXT,
    "strategy": _TEXT,
    "num_bits": _INTEGER,
    "group_size": _INTEGER,
    "symmetric": (lambda value: isinstance(value, bool), "true or false"),
}
"""What settings must be where they are given and not null: (a check, what it wants)."""
_OF_WEIGHTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
"""All that the library knows of a weight's scheme; zp_dtype and the observer's say nothing that tensors do not."""


def _args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


_INT8, _E4M3_TOKEN = (_args(8, kind, "token", dynamic=True) for kind in ("int", "float"))
_MXFP8 = _args(8, "float", "group", group_size=32, scale_dtype="torch.uint8")
_PRESETS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "UNQUANTIZED": (None, None),
    "W4A16_ASYM": (_args(4, "int", "group", group_size=128, symmetric=False), None),
    "W8A8": (_args(8, "int", "channel"), _INT8),
    "INT8": (_args(8, "int", "channel"), _INT8),
    "W4AFP8": (_args(4, "int", "group", group_size=128), _E4M3_TOKEN),
    "FP8": (_args(8, "float", "tensor"), _args(8, "float", "tensor")),
    "FP8_DYNAMIC": (_args(8, "float", "channel"), _E4M3_TOKEN),
    "FP8_BLOCK": (
        _args(8, "float", "block", block_structure=[128, 128]),
        _args(8, "float", "group", group_size=128, dynamic=True),
    ),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, _MXFP8 | {"dynamic": True}),
}
"""Weights and input activations; also W2A4 to W8A16, which are all alike."""


def _detect(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> bool:
    if config is not None and config.get("quant_method") not in (None, _METHOD):
        return False
    if "weight_packed" in names:
        return True
    plain = names.get("weight")
    return (
        plain is not None
        and (plain.dtype == torch.int8 or (config is not None and "weights" in config and plain.dtype == _E4M3))
        and "weight_scale" in names
        and not {"weight_scale_2", "qweight"} & set(names)
    )


def _sizes(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Sizes:
    weights = _check_config(config)
    packed = "weight_packed" in tensors
    check_known(tensors, (("weight_packed", "weight_shape") if packed else ("weight",)) + _TENSORS + _ACTIVATIONS)
    codes = _codes_of(weights)
    n, k = _size_of_codes(tensors, codes)
    scale = tensors["weight_scale"]
    if scale.dtype not in (*FLOATS, *(_BYTES if codes == _E4M3 else ())):
        raise ValueError(f"weight_scale: expected {one_of(REAL_TYPES)}, got {dtype_name(scale.dtype)}")
    if weights.get("strategy") == "block":
        rows, size = _block(weights)
        check_shape("weight_scale", tensors["weight_scale"], ceil_div(n, rows), ceil_div(k, size))
        groups = ceil_div(k, size)
    else:
        groups = _groups("weight_scale", tensors["weight_scale"], n)
        size = _group_size(weights, k, groups)
    per_word = 8 if codes is None else 4
    if codes == _E4M3 and weights.get("symmetric") is False:
        raise ValueError("weights: expected symmetric: true with type 'float', got false")
    if "weight_zero_point" in tensors:
        zero = tensors["weight_zero_point"]
        if zero.dtype not in (torch.int32, torch.int8) and codes != _E4M3:
            raise ValueError(f"weight_zero_point: expected int32, packed, or int8, got {describe(zero)}")
        if zero.dtype == torch.int32 and tuple(zero.shape) != (ceil_div(n, per_word), groups):
            raise ValueError(
                f"weight_zero_point: expected int32 [{ceil_div(n, per_word)}, {groups}], packed along n, got "
                f"{list(zero.shape)}"
            )
        if zero.dtype == torch.int8 and _groups("weight_zero_point", zero, n) != groups:
            raise ValueError(f"weight_zero_point: expected [{n}, {groups}] as weight_scale, got {list(zero.shape)}")
    elif weights.get("symmetric") is False:
        raise ValueError("weight_zero_point: expected the tensor, as the config says symmetric: false; found none")
    if "weight_g_idx" in tensors:
        check_shape("weight_g_idx", tensors["weight_g_idx"], k)
    elif weights.get("actorder") in (True, "group", "dynamic") and groups > 1:
        raise ValueError(
            f"weight_g_idx: expected the tensor, as the config says actorder {weights['actorder']!r}; found none"
        )
    if "input_scale" in tensors:
        check_single("input_scale", tensors["input_scale"])
    return Sizes(n, k, size, codes, zeros=codes is not None and weights.get("symmetric") is False)


def _read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    sizes = _sizes(tensors, config)
    weights = _check_config(config)
    q = _codes(tensors, sizes)
    zero = _zero_point(tensors, weights, sizes)
    permutation = None
    # -1 is the library's mark for an order that calibration never set.
    if "weight_g_idx" in tensors and not bool((tensors["weight_g_idx"] == -1).any()):
        permutation = activation_order(tensors["weight_g_idx"], sizes.group_size)
    if permutation is not None:
        q = q[:, permutation.long()]
    scale = tensors["weight_scale"]
    if scale.dtype in _BYTES:
        scale = scale.view(torch.float8_e8m0fnu).float()
    return CanonicalWeight(
        q=q if zero is None else q.view(torch.uint8) + (8 if sizes.codes is None else 128),  # which wraps
        scale=_by_row(scale, weights, sizes.n),
        zero=zero,
        group_size=sizes.group_size,
        permutation=permutation,
        input_scale=_input_scale(tensors),
        bits=4 if sizes.codes is None else 8,
    )


def _codes_of(weights: Mapping[str, Any]) -> torch.dtype | None:
    """The type of 8-bit codes; None for 4 bits."""
    return _CODES[weights.get("num_bits", 8), weights.get("type", "int")] if weights else None


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block."""
    block = weights.get("block_structure")
    block = [int(each) for each in block.split("x")] if isinstance(block, str) else block
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise ValueError(f"block_structure: expected two positive integers, got {weights.get('block_structure')!r}")
    return block[0], block[1]


def _size_of_codes(tensors: Mapping[str, Any], codes: torch.dtype | None) -> tuple[int, int]:
    """n, k; k rounded up to a word where `weight_shape` is a header."""
    if "weight_packed" not in tensors:
        size = measure(tensors, {"weight": (INT8 if codes is None else (codes,), "n", "k")})
        return size["n"], size["k"]
    per_word = 8 if codes is None else 4
    packed = tensors["weight_packed"]
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ValueError(
            f"weight_packed: expected int32 [n, ceil(k / {per_word})] of {32 // per_word}-bit integers, got "
            + describe(packed)
            + (" (fp4 is not supported)" if packed.dtype == torch.uint8 else "")
        )
    if codes == _E4M3:
        raise ValueError("weight_packed: expected the tensor weight for type 'float', got a packed one")
    n, words = packed.shape
    shape = tensors.get("weight_shape")
    if not isinstance(shape, torch.Tensor):
        return n, per_word * words
    if shape.is_floating_point():
        raise ValueError(f"weight_shape: expected integers [2], got {describe(shape)}")
    shape = shape.tolist()
    if len(shape) != 2 or shape[0] != n or ceil_div(shape[1], per_word) != words:
        got = list(packed.shape)
        raise ValueError(f"weight_packed: expected [n, ceil(k / {per_word})] for weight_shape {shape}, got {got}")
    return n, shape[1]


def _codes(tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """[n, k]: int8 of -8..7, or 8-bit codes."""
    if "weight_packed" in tensors:
        packed = tensors["weight_packed"]
        if sizes.codes is not None:
            return (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)[:, : sizes.k]
        return minus_8(unpack_nibbles(packed, 1))[:, : sizes.k]
    q = tensors["weight"]
    if sizes.codes is None:
        check_codes("weight", q, -8, 7, " in int-quantized int8; num_bits 8 in a config says that there are more,")
    return q


def _groups(name: str, values: torch.Tensor | TensorInfo, n: int) -> int:
    """Columns of [n, G]; 1 for a value for each row or for the whole tensor."""
    shape = tuple(values.shape)
    if math.prod(shape) == 1 or shape == (n,):
        return 1
    if len(shape) != 2 or shape[0] != n:
        raise ValueError(f"{name}: expected [{n}, groups], [{n}, 1] or one element, got shape {list(shape)}")
    return shape[1]


def _by_row(values: torch.Tensor, weights: Mapping[str, Any], n: int) -> torch.Tensor:
    """[n, G]; a value for the whole tensor, or a block, becomes one for each row."""
    if weights.get("strategy") == "block":
        return by_block(values, _block(weights)[0], n)
    return values.reshape(1, 1).expand(n, 1) if values.numel() == 1 else values.reshape(n, -1)


def _group_size(weights: Mapping[str, Any], k: int, groups: int) -> int:
    size = weights.get("group_size")
    if weights.get("strategy") in ("channel", "tensor"):
        size = k
    if size is None or size <= 0:
        if groups < 1 or k % groups:
            raise ValueError(f"weight_scale: expected columns that divide k = {k}, got {groups}")
        size = k // groups
    if k % size or k // size != groups:
        raise ValueError(f"weight_scale: expected {k / size:g} columns for k = {k} and group_size {size}, got {groups}")
    return size


def _zero_point(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any], sizes: Sizes) -> torch.Tensor | None:
    """[n, G] on the scale of codes from 0, or None."""
    if "weight_zero_point" not in tensors:
        return None
    zero, n = tensors["weight_zero_point"], sizes.n
    if zero.dtype == torch.int32:
        zero = minus_8(unpack_nibbles(zero, 0)) if sizes.codes is None else minus_128(unpack_bytes(zero, 0))
        zero = zero[:n]
    else:
        zero = _by_row(zero, {}, n)
    if not bool(zero.float().any()):
        return None
    if weights.get("symmetric", sizes.codes is not None):  # with 8 bits there is a config, and true is the default
        raise ValueError("weight_zero_point: expected zeros, as the config says symmetric: true; got others")
    if sizes.codes is not None:
        return zero.to(torch.int16) + 128
    check_codes("weight_zero_point", zero, -8, 7)
    return (zero + 8).view(torch.uint8)


def _input_scale(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if "input_scale" not in tensors:
        return None
    if "input_zero_point" in tensors and bool(tensors["input_zero_point"].float().any()):
        raise ValueError(
            "input_zero_point: expected 0, as only symmetric static activations are supported; got another"
        )
    return tensors["input_scale"].reshape(1).float()


# ---- quantization_config ---------------------------------------------------------------------------------------------


def _for_layer(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """The layer's scheme, as {quant_method, format, weights, input_activations, ...}, or a `refusal`."""
    if config is None or "config_groups" not in config or config.get("quant_method", _METHOD) != _METHOD:
        return config
    if "quant_algo" in config:  # ModelOpt's, which has groups, too
        return config
    found: dict[str, Any] = {"quant_method": _METHOD, "format": config.get("format")}
    try:
        _check_kinds(config)
        groups = {name: _spelt_out(name, group) for name, group in (config["config_groups"] or {}).items()}
        for name, group in groups.items():
            _check_kinds(group, f"{name}: ")
    except ValueError as error:
        return found | {"refusal": str(error)}
    if prefix and any(_names(prefix, target) for target in config.get("ignore") or ()):
        return found | {"refusal": f"ignore: expected no target that matches the quantised layer {prefix!r}, got one"}
    group = online_transform(config, prefix) or _config_group(groups, prefix)
    if isinstance(group, str):
        return found | {"refusal": group}
    scheme = {key: group.get(key) for key in ("weights", "input_activations", "output_activations")}
    return found | scheme | {"format": group.get("format") or config.get("format")}


def _spelt_out(name: str, group: Any) -> Mapping[str, Any]:
    """A group, or the scheme that a preset stands for: its name with a list of targets."""
    if isinstance(group, Mapping):
        return group
    preset, of_integers = name.upper(), re.fullmatch("W([2-8])A(4|8|16)", name.upper())
    if preset in _PRESETS:
        weights, inputs = _PRESETS[preset]
    elif of_integers and int(of_integers[1]) <= int(of_integers[2]):
        bits = int(of_integers[2])
        weights = _args(int(of_integers[1]), "int", "group", group_size=128)
        inputs = None if bits == 16 else _args(bits, "int", "token", dynamic=True)
    else:
        raise ValueError(
            f"config_groups: expected a scheme, or one of the presets W2A4 to W8A16, {', '.join(_PRESETS)}, got {name!r}"
        )
    return {"targets": group, "weights": weights, "input_activations": inputs}


def stored_otherwise(config: Mapping[str, Any] | None, names: Iterable[str]) -> str | None:
    """What the config says of a file whose tensors are none of a quantised layer's: sparse, or not yet quantised.

    Args:
        names: tensors that have no place in a model, or of a layer that no format has.
    """
    names, sparsity = list(names), (config or {}).get("sparsity_config")
    sparse = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if sparse not in (None, "dense") and any(name.endswith(".bitmask") for name in names):
        return (
            f"sparsity_config: expected format 'dense', got {sparse!r}: the weights are stored sparse (bitmask, "
            "compressed), which is not read here; load them with their library and save them without it"
        )
    format, status = setting(config, "format"), setting(config, "quantization_status")
    uncompressed = format in ("dense", "fakequant") or status in ("initialized", "calibration", "frozen")
    if uncompressed and any(name.endswith("weight_scale") for name in names):
        return (
            f"the file was saved uncompressed (format {format!r}, quantization_status {status!r}): its weights are "
            "floats that its library would quantise; save it with save_compressed=True, or take the floats with "
            "strict=False and quantize_"
        )
    return None


def _check_kinds(settings: Any, where: str = "") -> None:
    """Raises ValueError for a setting that is of another kind; where: what its name follows in the message."""
    for key in _KINDS.keys() & set(settings if isinstance(settings, Mapping) else ()):
        fits, expected = _KINDS[key]
        if settings[key] is not None and not fits(settings[key]):
            raise ValueError(f"{where}{key}: expected {expected}, got {settings[key]!r}")


def _config_group(groups: Mapping[str, Any], prefix: str) -> Mapping[str, Any] | str:
    """The group whose targets name the layer, the way the library chooses, or why there is none.

    Targets are tried exact names first, then expressions, both in alphabetical order, then class names; of equal
    targets in two groups the later group's counts. A checkpoint's names may differ from the module's that the targets
    were written for, so a single group needs no match: something quantised the layer.
    """
    if len(groups) == 1:
        return next(iter(groups.values()))
    by_target = {target: group for group in groups.values() for target in group.get("targets") or ()}
    for target in sorted(by_target, key=lambda target: ("re:" in target, target)):
        if _names(prefix, target):
            return by_target[target]
    if "Linear" in by_target:
        return by_target["Linear"]
    return f"config_groups: expected one whose targets match {prefix!r}, got targets {sorted(by_target)}"


def _names(prefix: str, target: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target.removeprefix("re:"), prefix) is not None
        except re.error as error:
            raise ValueError(f"targets: expected regular expressions behind re:, got {target!r} ({error})") from None
    return target == prefix


def online_transform(config: Mapping[str, Any] | None, prefix: str) -> str | None:
    """Why a Hadamard or other transform at run time forbids this layer, quantised or not; None where there is none.

    Those at weight_input and weight_output are in the weight already; q_attn and k_cache, of queries and keys, cancel.
    """
    transforms = (config or {}).get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    for group in (groups or {}).values():
        for apply in group.get("apply") or ():
            location = str(apply.get("location")).lower()
            if location in ("weight_input", "weight_output", "q_attn", "k_cache"):
                continue
            targets, ignored = (
                [each] if isinstance(each, str) else each or () for each in (apply.get("targets"), apply.get("ignore"))
            )
            if _any_names(prefix, targets) and not _any_names(prefix, ignored):
                return f"transform_config: expected no transform at run time, got one at the {location}"
    return None


def _any_names(prefix: str, targets: Iterable[str]) -> bool:
    return any(target == "Linear" or _names(prefix, target) for target in targets)


def _check_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Refuses what the config says and the kernel cannot have. Returns what it says of the weight, {} for nothing."""
    _check_kinds(config)
    for part in ("weights", "input_activations"):
        _check_kinds(setting(config, part), f"{part}: ")
    format, weights = setting(config, "format"), setting(config, "weights", default={})
    if format is not None and format not in _SUPPORTED and format != "mixed-precision":
        raise ValueError(f"format: expected {', '.join(_SUPPORTED)}, got {format!r}")
    bits, type_ = weights.get("num_bits", 8), weights.get("type", "int")
    unknown = sorted(set(weights) - set(_OF_WEIGHTS))
    if unknown:
        raise ValueError(f"weights: expected only {', '.join(_OF_WEIGHTS)}, got also {', '.join(unknown)}")
    if weights.get("dynamic"):
        raise ValueError(f"weights: expected dynamic: false, got {weights['dynamic']!r}")
    if weights and (bits, type_) not in _CODES:
        raise ValueError(
            f"weights: expected num_bits 4 or 8 and type 'int', or 8 and 'float', got {bits} and {type_!r}"
        )
    known = ("group", "channel", "tensor", *(("block",) if bits == 8 else ()))
    if weights.get("strategy") not in (None, *known):
        raise ValueError(f"weights: expected strategy {', '.join(known)}, got {weights['strategy']!r}")
    return weights


def _dims(headers: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> Dims:
    weights = _check_config(config)
    codes = _codes_of(weights)
    dims: dict[str, tuple[str, ...]] = {"weight": ("n", "k")}
    dims["weight_packed"] = "n", f"k / {8 if codes is None else 4}"
    for name in ("weight_scale", "weight_zero_point"):
        if name in headers and math.prod(headers[name].shape) != 1:
            dims[name] = ("n", "G")[: headers[name].dim()]
    if weights.get("strategy") == "block":
        dims["weight_scale"] = f"n / {_block(weights)[0]}", "G"
    if "weight_zero_point" in headers and headers["weight_zero_point"].dtype == torch.int32:
        dims["weight_zero_point"] = f"n / {8 if codes is None else 4}", "G"
    return dims


FORMAT = Format(name="compressed-tensors", detect=_detect, sizes=_sizes, read=_read, for_layer=_for_layer, dims=_dims)
