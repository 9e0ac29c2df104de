"""compressed-tensors' quantization_config: which scheme a layer has, and what schemes may say.

Presets (config_groups {"W4A16": ["Linear"]}) mean what they mean in release 0.20.0. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jitgemm.checkpoint.format import setting

METHOD = "compressed-tensors"
CODES = {(4, "int"): "int4", (8, "int"): "int8", (8, "float"): "e4m3"}
"""By num_bits and type."""
_SUPPORTED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")

_KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a list of names": ((list, tuple), ("ignore", "targets")),
    "a mapping": (Mapping, ("config_groups", "transform_config", "weights", "input_activations")),
    "a name": (str, ("type", "strategy")),
    "an integer": (int, ("num_bits", "group_size")),
    "true or false": (bool, ("symmetric",)),
}
"""What settings must be where they are given and not null."""
_OF_WEIGHTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
"""All that the library knows of a weight's scheme; zp_dtype and the observer's say nothing that tensors do not."""


def _args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


_INT8, _E4M3_TOKEN = (_args(8, kind, "token", dynamic=True) for kind in ("int", "float"))
_MXFP8 = _args(8, "float", "group", group_size=32, scale_dtype="torch.uint8")
_BLOCKS = _args(8, "float", "block", block_structure=[128, 128])
_PRESETS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "UNQUANTIZED": (None, None),
    "W4A16_ASYM": (_args(4, "int", "group", group_size=128, symmetric=False), None),
    "W8A8": (_args(8, "int", "channel"), _INT8),
    "INT8": (_args(8, "int", "channel"), _INT8),
    "W4AFP8": (_args(4, "int", "group", group_size=128), _E4M3_TOKEN),
    "FP8": (_args(8, "float", "tensor"), _args(8, "float", "tensor")),
    "FP8_DYNAMIC": (_args(8, "float", "channel"), _E4M3_TOKEN),
    "FP8_BLOCK": (_BLOCKS, _args(8, "float", "group", group_size=128, dynamic=True)),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, _MXFP8 | {"dynamic": True}),
}
"""Weights and input activations; also W2A4 to W8A16, which are all alike."""


def left_out(config: Mapping[str, Any] | None, prefix: str) -> str | None:
    """The target of `ignore` that a quantised layer has, as a message."""
    _check_kinds(config)
    if prefix and any(_names(prefix, target) for target in (config or {}).get("ignore") or ()):
        return f"ignore: expected no target that matches the quantised layer {prefix!r}, got one"
    return None


def for_layer(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any]:
    """The layer's scheme, as {quant_method, format, weights, input_activations, ...}.

    Raises:
        ValueError: a setting is of the wrong kind, or no group is for the layer.
    """
    _check_kinds(config)
    if config is None or "config_groups" not in config or "quant_algo" in config:  # ModelOpt's has groups, too
        return config or {}
    groups = {name: _spelt_out(name, group) for name, group in (config["config_groups"] or {}).items()}
    for name, group in groups.items():
        _check_kinds(group, f"{name}: ")
    if (reason := online_transform(config, prefix)) is not None:
        raise ValueError(reason)
    group = _config_group(groups, prefix)
    scheme = {key: group.get(key) for key in ("weights", "input_activations", "output_activations")}
    return scheme | {"quant_method": METHOD, "format": group.get("format") or config.get("format")}


def _check_kinds(settings: Mapping[str, Any] | None, where: str = "") -> None:
    """Raises ValueError for a setting that is of another kind; where: what its name follows in the message."""
    settings = settings or {}
    for expected, (kind, keys) in _KINDS.items():
        for key, value in ((key, settings[key]) for key in keys if settings.get(key) is not None):
            fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
            if not fits or (isinstance(value, (list, tuple)) and not all(isinstance(each, str) for each in value)):
                raise ValueError(f"{where}{key}: expected {expected}, got {value!r}")
    for part in sorted(settings.keys() & {"weights", "input_activations"}):
        _check_kinds(settings[part], f"{where}{part}: ")


def _spelt_out(name: str, group: Any) -> Mapping[str, Any]:
    """A group, or the scheme that a preset stands for: its name with a list of targets."""
    if isinstance(group, Mapping):
        return group
    weights, inputs = _PRESETS.get(name.upper(), (None, None))
    integers = re.fullmatch("W([2-8])A(4|8|16)", name.upper())
    if name.upper() not in _PRESETS:
        if integers is None or int(integers[1]) > int(integers[2]):
            known = f"W2A4 to W8A16, {', '.join(_PRESETS)}"
            raise ValueError(f"config_groups: expected a scheme, or one of the presets {known}, got {name!r}")
        weights = _args(int(integers[1]), "int", "group", group_size=128)
        inputs = None if integers[2] == "16" else _args(int(integers[2]), "int", "token", dynamic=True)
    return {"targets": group, "weights": weights, "input_activations": inputs}


def _config_group(groups: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """The group whose targets name the layer, the way the library chooses. Raises ValueError where there is none.

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
    raise ValueError(f"config_groups: expected one whose targets match {prefix!r}, got targets {sorted(by_target)}")


def _names(prefix: str, target: str) -> bool:
    if not target.startswith("re:"):
        return target == prefix
    try:
        return re.match(target.removeprefix("re:"), prefix) is not None
    except re.error as error:
        raise ValueError(f"targets: expected regular expressions behind re:, got {target!r} ({error})") from None


def online_transform(config: Mapping[str, Any] | None, prefix: str) -> str | None:
    """Why a Hadamard or other transform at run time forbids this layer, quantised or not; None where there is none.

    Those at weight_input and weight_output are in the weight already; q_attn and k_cache, of queries and keys, cancel.
    """

    def named(targets: str | Iterable[str] | None) -> bool:
        targets = [targets] if isinstance(targets, str) else targets or ()
        return any(target == "Linear" or _names(prefix, target) for target in targets)

    transforms = (config or {}).get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    for apply in (each for group in (groups or {}).values() for each in group.get("apply") or ()):
        location = str(apply.get("location")).lower()
        if location not in ("weight_input", "weight_output", "q_attn", "k_cache"):
            if named(apply.get("targets")) and not named(apply.get("ignore")):
                return f"transform_config: expected no transform at run time, got one at the {location}"
    return None


def weights_of(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What a layer's config says of its weight, {} for nothing. Raises ValueError for what the kernel cannot have."""
    format, weights = setting(config, "format"), setting(config, "weights", default={})
    if format is not None and format not in _SUPPORTED and format != "mixed-precision":
        raise ValueError(f"format: expected {', '.join(_SUPPORTED)}, got {format!r}")
    if unknown := sorted(set(weights) - set(_OF_WEIGHTS)):
        raise ValueError(f"weights: expected only {', '.join(_OF_WEIGHTS)}, got also {', '.join(unknown)}")
    if weights.get("dynamic"):
        raise ValueError(f"weights: expected dynamic: false, got {weights['dynamic']!r}")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if weights and (bits, kind) not in CODES:
        expected = "num_bits 4 or 8 and type 'int', or 8 and 'float'"
        raise ValueError(f"weights: expected {expected}, got {bits} and {kind!r}")
    known = ("group", "channel", "tensor", *(("block",) if CODES.get((bits, kind)) != "int4" else ()))
    if weights.get("strategy") not in (None, *known):
        raise ValueError(f"weights: expected strategy {', '.join(known)}, got {weights['strategy']!r}")
    return weights


def block_of(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, with strategy "block"."""
    if weights.get("strategy") != "block":
        return None
    block = weights.get("block_structure")
    block = [int(each) for each in block.split("x")] if isinstance(block, str) else block
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise ValueError(f"block_structure: expected two positive integers, got {weights.get('block_structure')!r}")
    return block[0], block[1]


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
