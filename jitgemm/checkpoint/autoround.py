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

_V1 = {"quant_method": "gptq", "checkpoint_format": "gptq"}
_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
_AWQ = {"quant_method": "awq", "version": "gemm"}
_METHODS = {
    "auto": _V1,
    "auto_gptq": _V1,
    "gptq": _V1,
    "gptqmodel": _V2,
    "auto_round": _V2,
    "auto_awq": _AWQ,
    "awq": _AWQ,
}


def translated(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """The config of the layer called prefix, if AutoRound wrote it; any other config as it is. Raises nothing."""
    method = str((config or {}).get("quant_method")).lower().replace("_", "-")
    if config is None or not method.endswith("auto-round"):
        return config
    packing = str(config.get("packing_format") or config.get("backend") or "auto")
    names = _METHODS.get(packing.removeprefix("auto_round:"))
    settings = {key: config.get(key) for key in ("bits", "group_size", "sym", "data_type", "act_bits")}
    extra = config.get("extra_config") or {}
    settings |= next((extra[name] for name in (prefix, *extra) if name in extra and _names(name, prefix)), {})
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
    else:
        return names | settings
    return (names or {}) | settings | {"refusal": refusal}


def _names(pattern: str, prefix: str) -> bool:
    try:
        return pattern == prefix or re.fullmatch(pattern, prefix) is not None
    except re.error:
        return False
