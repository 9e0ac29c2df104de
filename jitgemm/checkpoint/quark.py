"""AMD Quark's config (`quant_method: quark`): the settings of one layer, whose tensors are those of MXFP4 and W8A8.

::

    layer_quant_config       {pattern (fnmatch) of names: settings}; the first that fits a name
    layer_type_quant_config  {class: settings}, which names do not tell from the model's
    global_quant_config      settings of all other layers

    settings    weight, input_tensors: dtype, qscheme (per_tensor, per_channel, per_group, per_block), group_size,
                block_size, is_dynamic

Read from Quark 0.13 (quant_config_parser.py, config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from jitgemm.checkpoint.format import block_of, setting

METHOD = "quark"
_TYPES = {
    "fp4": ("float", 4),
    "fp6_e3m2": ("float", 6),
    "fp6_e2m3": ("float", 6),
    "fp8_e4m3": ("float", 8),
    "int8": ("int", 8),
}


def translated(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """What a Quark config says of the layer called prefix, as {quant_method, dtype, weight_block_size, input_activations}
    with the last in compressed-tensors' words; any other config as it is. Raises ValueError for a setting of another kind."""
    if config is None or setting(config, "quant_method") != METHOD:
        return config
    layers = setting(config, "layer_quant_config", default={})
    pattern = next((pattern for pattern in layers if fnmatchcase(prefix, pattern)), None)
    said: dict[str, Any] = {"quant_method": METHOD}
    if pattern is not None:
        settings = layers[pattern]
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"layer_quant_config: expected settings by names of layers, got {settings!r} for {pattern!r}"
            )
    elif setting(config, "layer_type_quant_config"):
        return said
    else:
        settings = setting(config, "global_quant_config", default={})
    weight, inputs = (setting(settings, name, default={}) for name in ("weight", "input_tensors"))
    said["dtype"] = setting(weight, "dtype")
    if setting(weight, "qscheme") == "per_block":
        said["weight_block_size"] = block_of("block_size", weight.get("block_size"))
    if inputs:
        kind, bits = _TYPES.get(dtype := setting(inputs, "dtype"), (dtype, 8))
        dynamic = setting(inputs, "is_dynamic", default=True)
        groups = setting(inputs, "qscheme") in ("per_group", "per_block")
        said["input_activations"] = {
            "type": kind, "num_bits": bits, "strategy": "group" if groups else "token" if dynamic else "tensor",
            "dynamic": dynamic, "group_size": setting(inputs, "group_size"),
        }  # fmt: skip
    return said
