"""AutoRound's config (`quant_method: auto-round`), told in the words of GPTQ and AWQ, whose tensors its files hold.

::

    packing_format          tensors
    auto_round:auto_gptq    GPTQ v1, whose qzeros hold zero - 1; also where nothing is said
    auto_round:gptqmodel    GPTQ v2, whose qzeros hold zero; also plain "auto_round"
    auto_round:auto_awq     AWQ gemm

`extra_config` has settings of single layers, by name or expression. Read from AutoRound's export_to_autoround and
inference/backend.py of August 2026. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_METHODS = {
    "auto": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_awq": {"quant_method": "awq", "version": "gemm"},
    "awq": {"quant_method": "awq", "version": "gemm"},
}


def translated(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """The config of the layer called prefix, if AutoRound wrote it; any other config as it is. Raises nothing."""
    method = str((config or {}).get("quant_method")).lower().replace("_", "-")
    if config is None or not method.endswith("auto-round"):
        return config
    packing = str(config.get("packing_format") or config.get("backend") or "auto")
    names = _METHODS.get(packing.removeprefix("auto_round:"))
    settings = {key: config.get(key) for key in ("bits", "group_size", "sym", "data_type", "act_bits")}
    settings |= _extra(config.get("extra_config") or {}, prefix)
    refusal = None
    if names is None:
        refusal = f"packing_format: expected auto_round with {', '.join(_METHODS)}, got {packing!r}"
    elif settings["data_type"] not in (None, "int"):
        refusal = f"data_type: expected int, got {settings['data_type']!r}"
    elif (settings["act_bits"] or 16) < 16:
        refusal = (
            f"act_bits: expected 16, got {settings['act_bits']}; give a config without it, and choose activation=..."
        )
    elif config.get("rotation_config"):
        refusal = "rotation_config: expected none, as activations would have to be transformed at run time, got one"
    return {**(names or {}), **settings, **({"refusal": refusal} if refusal else {})}


def _extra(extra: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    if prefix in extra:
        return extra[prefix]
    return next((settings for pattern, settings in extra.items() if _matches(pattern, prefix)), {})


def _matches(pattern: str, prefix: str) -> bool:
    try:
        return re.fullmatch(pattern, prefix) is not None
    except re.error:
        return False
