"""compressed-tensors' quantization_config: groups, presets, and what models multiply inputs by at run time.

::

    {"transform_config": {"config_groups": {NAME: {"type", "head_dim", "randomize", "requires_grad", "precision",
        "apply": [{"targets", "ignore", "location", "inverse"}, ...]}}}}

    location  input                      x V, block by block of head_dim columns (without it k); the weight is W V^-T
              output                     y U of the result y, likewise
              weight_input, _output      in the weight, which is read as it is
              q_attn, k_cache            of queries and keys: one orthogonal matrix of both cancels
    type      hadamard                   V = H / sqrt(size), Sylvester's, `weight.rotation`'s
              random-hadamard            H with other rows and signs, in the file
              random-matrix              in the file; of "inverse" its inverse
    LAYER.NAME_LOCATION.weight           [size, size], before the square root. Layers share it, and files have it once

Kernels rotate inputs by Sylvester's blocks of 128; layers with other matrices are dequantised, W V^-T V^T. "precision"
is the type of the library's own product, for which kernels have fp32. Checked against 0.20.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jitgemm.checkpoint.expressions import matches
from jitgemm.checkpoint.format import INPUT, PLACES, RANDOM_MATRIX, Config, Transform, check_kind, setting
from jitgemm.kernel.codes import FACTOR_GROUP

METHOD = "compressed-tensors"
MXFP4_FORMAT = "mxfp4-pack-quantized"

# ---- presets ---------------------------------------------------------------------------------------------------------


def args_of(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """Of weights, or of inputs, in the library's words."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


_INT8, _E4M3_TOKEN = (args_of(8, kind, "token", dynamic=True) for kind in ("int", "float"))
MXFP4 = args_of(4, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8")
_MXFP8 = args_of(8, "float", "group", group_size=32, scale_dtype="torch.uint8")
_NVFP4 = args_of(4, "float", "tensor_group", group_size=16)
_BLOCKS = args_of(8, "float", "block", block_structure=[128, 128])
PRESETS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    f"W{width}A{inputs}": (
        args_of(width, "int", "group", group_size=128),
        None if inputs == 16 else args_of(inputs, "int", "token", dynamic=True),
    )
    for inputs in (4, 8, 16)
    for width in range(2, min(inputs, 8) + 1)
} | {
    "UNQUANTIZED": (None, None),
    "W4A16_ASYM": (args_of(4, "int", "group", group_size=128, symmetric=False), None),
    "W8A8": (args_of(8, "int", "channel"), _INT8),
    "INT8": (args_of(8, "int", "channel"), _INT8),
    "W4AFP8": (args_of(4, "int", "group", group_size=128), _E4M3_TOKEN),
    "FP8": (args_of(8, "float", "tensor"), args_of(8, "float", "tensor")),
    "FP8_DYNAMIC": (args_of(8, "float", "channel"), _E4M3_TOKEN),
    "FP8_BLOCK": (_BLOCKS, args_of(8, "float", "group", group_size=128, dynamic=True)),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, _NVFP4 | {"dynamic": "local"}),
    "MXFP4A16": (MXFP4, None),
    "MXFP4": (MXFP4, MXFP4 | {"dynamic": True}),
    "MXFP4XFP8": (MXFP4, args_of(8, "float", "group", group_size=128, dynamic=True)),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, _MXFP8 | {"dynamic": True}),
}
"""Schemes by name, as release 0.20.1 has them, as far as they can be read: weights and input activations."""

# ---- groups ----------------------------------------------------------------------------------------------------------


def written_config(
    groups: Iterable[Mapping[str, Any]],
    ignore: Iterable[str],
    rotation: int | None = None,
    straight: Iterable[str] = (),
) -> dict[str, Any]:
    """A quantization_config of `written_group`s, as compressed-tensors, vLLM and this module read it.

    Args:
        groups: those with names before those with expressions: for vLLM the first match counts.
        ignore: names of Linears and other layers with a matrix that stay in floats.
        rotation: 128 for layers whose inputs the kernels rotate.
        straight: quantised layers whose inputs they do not.
    """
    groups, ignore = list(groups), sorted(ignore)
    apply = {"targets": ["Linear"], "location": INPUT, "inverse": False, "ignore": sorted([*ignore, *straight])}
    group = {"type": _HADAMARD, "head_dim": rotation, "apply": [apply]}
    turned = {} if rotation is None else {"transform_config": {"config_groups": {"rotation": group}}}
    formats = {group["format"] for group in groups}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ignore,
        **turned,
    }


def written_group(
    targets: Iterable[str], bits: int, inputs: str, group_size: int | None = None, symmetric: bool = True,
    scheme: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One of a config's groups: layers with a scale per token of their input, which is "int" or "float" (e4m3), and
    int4 weights in groups, MXFP4, or 8-bit weights of the input's type with a scale per row.

    Args:
        targets: names of layers, expressions behind "re:", or "Linear" for all layers.
        group_size, symmetric: of 4 bits.
        scheme: None or "int4" for groups; "mxfp4" for MXFP4; "two-level" for groups whose scales in fp32 are integers
            times a row's (`in_levels`).
    """
    levels = {"group_size": FACTOR_GROUP, "symmetric": False, "scale_dtype": "torch.float32"}
    groups = args_of(4, "int", "group", group_size=group_size, symmetric=symmetric), "pack-quantized"
    weights, format = {
        4: groups,
        "int4": groups,
        8: (args_of(8, inputs, "channel"), f"{inputs}-quantized"),
        "mxfp4": (MXFP4, MXFP4_FORMAT),
        "two-level": (args_of(4, "int", "group", **levels), "pack-quantized"),
    }[scheme or bits]
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": args_of(8, inputs, "token", dynamic=True),
        "format": format,
    }


def for_layer(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any]:
    """The layer's scheme, as {quant_method, format, weights, input_activations, ...}. Raises ValueError where a setting
    is of the wrong kind, or no group is for the layer."""
    check_kinds(config)
    if config is None or "config_groups" not in config or "quant_algo" in config:  # ModelOpt's has groups, too
        return config or {}
    groups = {name: _spelt_out(name, group) for name, group in (config["config_groups"] or {}).items()}
    for name, group in groups.items():
        check_kinds(group, f"{name}: ")
    group = _config_group(groups, prefix)
    scheme = {key: group.get(key) for key in ("weights", "input_activations", "output_activations")}
    said = {key: config[key] for key in ("version", "provider") if key in config}
    return scheme | said | {"quant_method": METHOD, "format": group.get("format") or config.get("format")}


def check_kinds(settings: Mapping[str, Any] | None, where: str = "") -> None:
    """Raises ValueError for a setting that is of another kind; where: what its name follows in the message."""
    settings = settings or {}
    for key, value in settings.items():
        check_kind(key, value, where)
    for part in sorted(settings.keys() & {"weights", "input_activations"}):
        check_kinds(settings[part], f"{where}{part}: ")


def _spelt_out(name: str, group: Any) -> Mapping[str, Any]:
    """A group, or the scheme that a preset stands for: its name with a list of targets."""
    if isinstance(group, Mapping):
        return group
    if name.upper() not in PRESETS:
        expected = f"a scheme, or one of the presets {', '.join(PRESETS)}"
        raise ValueError(f"config_groups: expected {expected}, got {name!r}")
    weights, inputs = PRESETS[name.upper()]
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
        if names(prefix, target):
            return by_target[target]
    if "Linear" in by_target:
        return by_target["Linear"]
    raise ValueError(f"config_groups: expected one whose targets match {prefix!r}, got targets {sorted(by_target)}")


def names(prefix: str, target: str) -> bool:
    """Whether a config's target means a layer: its name, or an expression behind "re:"."""
    return matches("targets", target.removeprefix("re:"), prefix) if target.startswith("re:") else target == prefix


# ---- transforms ------------------------------------------------------------------------------------------------------

_FUSED, _ATTENTION = ("weight_input", "weight_output"), ("q_attn", "k_cache")
_HADAMARD, _TYPES = "hadamard", ("hadamard", "random-hadamard", RANDOM_MATRIX)
_OF_GROUPS = ("type", "apply", "randomize", "requires_grad", "head_dim", "precision")
_OF_APPLIED = ("targets", "location", "inverse", "ignore")


def transforms_of(config: Config, prefix: str) -> tuple[Transform, ...]:
    """What a config applies to a layer's input and result at run time, at most one of each.

    Raises:
        ValueError: a setting is not known, or no layer can be read so; the message names it.
    """
    by_place: dict[str, Transform] = {}
    for name, group in _transform_groups(config).items():
        listed = group.get("apply") or [] if isinstance(group, Mapping) else None
        if not isinstance(listed, list) or not all(isinstance(apply, Mapping) for apply in listed):
            raise ValueError(f"transform_config: expected groups of schemes to apply, got {name}: {group!r}")
        for mapping, known in ((group, _OF_GROUPS), *((apply, _OF_APPLIED) for apply in listed)):
            if unknown := sorted(mapping.keys() - {*known}):
                raise ValueError(
                    f"transform_config: expected only {', '.join(known)}, got {', '.join(unknown)} in {name}"
                )
        places = [str(apply.get("location")).lower() for apply in listed]
        turned = [
            {bool(entry.get("inverse")) for entry, at in zip(listed, places) if at == place} for place in _ATTENTION
        ]
        if turned[0] != turned[1] or (turned[0] and group.get("type") == RANDOM_MATRIX):
            expected = f"one orthogonal matrix at {' and '.join(_ATTENTION)}, where it cancels"
            raise ValueError(f"transform_config: expected {expected}, got another in {name}")
        for apply, place in zip(listed, places):
            if place in (*_FUSED, *_ATTENTION) or not _means(apply, prefix):
                continue
            if place not in PLACES or place in by_place:
                raise ValueError(f"transform_config: expected one transform at {prefix}'s {place}, got {name}'s, too")
            by_place[place] = _transform(name, group, place, bool(apply.get("inverse")))
    return tuple(by_place.values())


def _transform_groups(config: Config) -> Mapping[str, Any]:
    return setting(setting(config, "transform_config"), "config_groups", default={})


def _transform(name: str, group: Mapping[str, Any], place: str, inverse: bool) -> Transform:
    type_name, size = group.get("type"), group.get("head_dim")
    if type_name not in _TYPES or group.get("randomize"):
        expected = f"type {' or '.join(_TYPES)} and randomize: false"
        raise ValueError(
            f"transform_config: expected {expected}, got {type_name!r} and {group.get('randomize')!r} of {name}"
        )
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f"transform_config: expected a positive integer as head_dim, got {size!r} of {name}")
    return Transform(name, place, type_name, size, inverse, type_name == _HADAMARD and not group.get("requires_grad"))


def _means(apply: Mapping[str, Any], prefix: str) -> bool:
    """Whether a layer is one of the targets, and not to be ignored."""
    chosen = []
    for targets in (apply.get("targets"), apply.get("ignore")):
        listed = [targets] if isinstance(targets, str) else check_kind("targets", targets) or ()
        chosen.append(any(target == "Linear" or names(prefix, target) for target in listed))
    return chosen[0] and not chosen[1]


def is_matrix(config: Config, name: str) -> bool:
    """Whether a tensor is one of a config's transforms."""
    last = name.removesuffix(".weight").removesuffix(".perm").rpartition(".")[2]
    return any(last == f"{group}_{place}" for group in _transform_groups(config) for place in (*PLACES, *_ATTENTION))
