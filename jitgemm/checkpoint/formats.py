"""The checkpoint formats that can be read, in one registry.

One module a format; what they share is canonical.py (the result), bits.py (nibbles) and affine.py (scales and zeros).
autoround.py translates another tool's config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgemm.checkpoint import autoround, awq, bitblas, compressed_tensors, executorch, gptq, qserve, torchao
from jitgemm.checkpoint import w4afp8, w8a8
from jitgemm.checkpoint.canonical import Format, TensorInfo
from jitgemm.tensors import describe

FORMATS: tuple[Format, ...] = tuple(
    module.FORMAT for module in (compressed_tensors, w4afp8, w8a8, gptq, awq, torchao, qserve, executorch, bitblas)
)


def by_name(name: str) -> Format:
    """The format called `name`. Raises ValueError, listing all names, for another one."""
    for format in FORMATS:
        if format.name == name:
            return format
    raise ValueError(f"format: expected one of {', '.join(f.name for f in FORMATS)}, got {name!r}")


def config_of_layer(format: Format, config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """What the model's quantization_config says of one layer, as the format has it."""
    return format.for_layer(autoround.translated(config, prefix), prefix)


def find(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None, prefix: str = "") -> Format:
    """The one format that a layer's tensors are of.

    Args:
        names: what stands behind the layer's prefix, with shapes and dtypes.
        config: the model's quantization_config, or None.
        prefix: the layer's name, for configs that differ between layers and for messages.

    Raises:
        ValueError: no format, or more than one, has such tensors; the message lists them.
    """
    found = [format for format in FORMATS if format.detect(names, config_of_layer(format, config, prefix))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{name} {t.kind or describe(t)}" for name, t in names.items())
    layer = f"layer {prefix!r}" if prefix else "the layer"
    if not found:
        otherwise = compressed_tensors.stored_otherwise(config, names)
        if otherwise is not None:
            raise ValueError(f"format: {otherwise}; {layer} has {listed}")
        refusal = (autoround.translated(config, prefix) or {}).get("refusal")
        if refusal is not None:
            raise ValueError(refusal)
        methods = [f"{key} is {config[key]!r}" for key in ("quant_method", "quant_algo") if (config or {}).get(key)]
        raise ValueError(
            f"format: {layer} is of no format known here ({', '.join(f.name for f in FORMATS)}); it has "
            f"{listed or 'no tensors'}" + "".join(f", and {method}" for method in methods)
        )
    raise ValueError(
        f"format: {layer} fits {' and '.join(f.name for f in found)}: say which with format=...; it has {listed}"
    )
