"""AutoRound's config (`quant_method: auto-round`), in the words of the formats whose tensors its files hold.

::

    packing_format, in 2024 backend          tensors
    auto_round:auto_gptq, auto_round:gptq    GPTQ v1, whose qzeros hold zero - 1; also where nothing is said
    auto_round:gptqmodel, auto_round         GPTQ v2, whose qzeros hold zero
    auto_round:auto_awq, auto_round:awq      AWQ gemm
    any, with data_type fp and bits 8        weight e4m3, weight_scale [n] or [1], or weight_scale_inv by blocks
    any, with data_type mx_fp or nv_fp       compressed-tensors' MXFP4, MXFP8 or NVFP4

Names of 2024 go on with a kernel, which says nothing of the tensors (auto_round:gptq:exllamav2, auto_round:exllamav2,
auto_gptq:triton), and may spell autoround. `extra_config` has settings of single layers, by name or expression.
Its MXFP4 has had the same bytes since 0.8, the first that wrote any. Sources: AutoRound 0.16.1 (export_to_autoround,
export_to_fp8, export_to_nvfp_mx, qlinear_fp and inference/backend.py), and the first of 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgemm.checkpoint.compressed_tensors_config import PRESETS
from jitgemm.checkpoint.expressions import matches
from jitgemm.checkpoint.format import block_of, check_kind, setting

_V1 = {"quant_method": "gptq", "checkpoint_format": "gptq"}
_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
_AWQ = {"quant_method": "awq", "version": "gemm"}
_METHODS = dict.fromkeys(("auto", "auto_gptq", "gptq"), _V1)
_METHODS |= dict.fromkeys(("gptqmodel", "auto_round"), _V2) | dict.fromkeys(("auto_awq", "awq"), _AWQ)
_KERNELS = frozenset({"exllamav1", "exllamav2", "triton", "tritonv2", "cuda", "qigen", "gemm"})
_TENSORS_OF = {
    "mx_fp": (32, {4: ("MXFP4", "mxfp4-pack-quantized"), 8: ("MXFP8", "mxfp8-quantized")}),
    "nv_fp": (16, {4: ("NVFP4", "nvfp4-pack-quantized")}),
}
"""{data_type, or what begins it: (group size, {bits: (compressed-tensors' preset, its format)})}."""
_KNOWN = "int, or in e4m3 fp of 8 bits, or mx_fp or nv_fp"
_FP8 = (None, "fp", "fp8", "fp8_e4m3", "e4m3")
_SETTINGS = ("bits", "group_size", "sym", "data_type", "act_bits", "act_data_type", "fmt", "activation_scheme")
_OF_EXPRESSIONS = frozenset("*+?^$()[]{}|\\")


def translated(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """The config of the layer called prefix, if AutoRound wrote it; any other config as it is. Raises ValueError where
    a setting is of another kind, or means weights or activations that are not read here."""
    method = setting(config, "quant_method", default="").lower().replace("_", "-")
    if config is None or not method.endswith("auto-round"):
        return config
    packing = setting(config, "packing_format", "backend", default="auto")
    extra = setting(config, "extra_config", default={})
    if not all(isinstance(each, Mapping) for each in extra.values()):
        raise ValueError(f"extra_config: expected settings by names of layers, got {extra!r}")
    settings = {key: config.get(key) for key in _SETTINGS}
    settings |= next((extra[name] for name in (prefix, *extra) if name in extra and _names(name, prefix)), {})
    for key in settings.keys() - {"group_size"}:
        check_kind(key, settings[key])
    data_type, family, activations = settings["data_type"], _family(packing), (settings["act_bits"] or 16) < 16
    if config.get("rotation_config"):
        raise ValueError(
            "rotation_config: expected none, as activations would have to be transformed at run time, got one"
        )
    if (name := next((name for name in _TENSORS_OF if name in str(data_type)), None)) is not None:
        return _of_compressed_tensors(name, settings)
    if str(data_type).startswith("fp"):
        if data_type not in _FP8:
            raise ValueError(f"data_type: expected {_KNOWN}, got {data_type!r}")
        if settings["bits"] != 8:
            raise ValueError(f"bits: expected 8 with data_type {data_type!r}, got {settings['bits']!r}")
        if settings["fmt"] not in _FP8:
            raise ValueError(f"fmt: expected e4m3, got {settings['fmt']!r}")
        if activations and settings["act_data_type"] not in _FP8:
            raise ValueError(f"act_data_type: expected fp, as data_type is, got {settings['act_data_type']!r}")
        size = settings["group_size"]  # of blocks, of the whole weight (0) or a row
        if isinstance(size, (list, tuple)):
            return settings | {"quant_method": "fp8", "weight_block_size": block_of("group_size", size)}
        if check_kind("group_size", size) not in (None, -1, 0):
            raise ValueError(f"group_size: expected -1, 0 or that of a block with data_type {data_type!r}, got {size}")
        return settings | {"quant_method": "fp8", "strategy": "tensor" if size == 0 else "channel"}
    if family not in _METHODS:
        raise ValueError(f"packing_format: expected auto_round with {', '.join(_METHODS)}, got {packing!r}")
    if data_type not in (None, "int"):
        raise ValueError(f"data_type: expected {_KNOWN}, got {data_type!r}")
    if activations:
        got = f"{settings['act_bits']}; give a config without it, and choose activation=..."
        raise ValueError(f"act_bits: expected 16, got {got}")
    return settings | _METHODS[family]


def _of_compressed_tensors(kind: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layer of mx_fp or nv_fp, in compressed-tensors' words; kind: a key of _TENSORS_OF."""
    (size, formats), bits, inputs = _TENSORS_OF[kind], settings["bits"], None
    preset, format = formats.get(bits, ("", ""))
    if settings["group_size"] != size or not preset:
        expected = f"{' or '.join(map(str, formats))} in groups of {size}"
        got = f"{bits!r} in {settings['group_size']!r}"
        raise ValueError(f"bits, group_size: expected {expected} with data_type {kind}, got {got}")
    if (width := settings["act_bits"] or 16) < 16:
        said = str(settings["act_data_type"])
        of = next((name for name in _TENSORS_OF if name in said and width in _TENSORS_OF[name][1]), None)
        if of is None:
            raise ValueError(f"act_data_type: expected mx_fp or nv_fp of act_bits 4 or 8, got {said!r} of {width!r}")
        inputs = PRESETS[_TENSORS_OF[of][1][width][0]][1]
    return {
        "quant_method": "compressed-tensors", "format": format, "weights": PRESETS[preset][0],
        "input_activations": inputs,
    }  # fmt: skip


def _family(packing: str) -> str:
    """Whose packing it is: `(auto_round:)family(:kernel)`, a key of _METHODS where it is known."""
    words = packing.lower().replace("-", "_").replace("autoround", "auto_round").split(":")
    known = [word for word in words if word not in _KERNELS]
    return ":".join(known if len(known) < 2 else known[known[0] == "auto_round" :])


def _names(pattern: str, prefix: str) -> bool:
    """Whether a key of extra_config means the layer: its name, or an expression that is found in it."""
    named = bool(_OF_EXPRESSIONS & set(pattern)) and matches("extra_config", pattern, prefix, search=True)
    return named or pattern == prefix
