"""The checkpoint formats that can be read, in one registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitgemm.checkpoint import autoround, awq, bitblas, compressed_tensors, executorch, gptq, mxfp4, nvfp4, qserve
from jitgemm.checkpoint import quark, torchao, w4afp8, w8a8
from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.checkpoint.compressed_tensors import stored_otherwise
from jitgemm.checkpoint.format import Format
from jitgemm.tensors import describe

FORMATS: list[Format] = [
    module.FORMAT
    for module in (
        compressed_tensors,
        w4afp8,
        w8a8,
        mxfp4,
        nvfp4,
        gptq,
        awq,
        quark,
        torchao,
        qserve,
        executorch,
        bitblas,
    )
]


def register(format: Format) -> None:
    """Adds a format. Raises ValueError where one of its name is there."""
    if any(each.name == format.name for each in FORMATS):
        raise ValueError(f"name: expected one that no format has, got {format.name!r}")
    FORMATS.append(format)


def by_name(name: str) -> Format:
    """The format called `name`. Raises ValueError, listing all names, for another one."""
    known = {format.name: format for format in FORMATS}
    if name not in known:
        raise ValueError(f"format: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def by_method(method: Any) -> Format | None:
    """The format that a quant_method means; None for none of ours."""
    return next((format for format in FORMATS if method in format.methods), None)


def translated(config: Mapping[str, Any] | None, prefix: str) -> Mapping[str, Any] | None:
    """A model's quantization_config in the words of the formats, for the layer called prefix: AutoRound's and Quark's tell
    of other formats' tensors. Raises ValueError where a setting is of another kind, or means what is not read here."""
    return quark.translated(autoround.translated(config, prefix), prefix)


def find(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None, prefix: str = "") -> Format:
    """The one format that a layer's tensors are of, by their headers and the model's quantization_config, as `translated`
    gives it; prefix: its name, for messages. Raises ValueError where no format, or more than one, has such tensors."""
    found = [format for format in FORMATS if format.detect(names, config)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{name} {t.kind or describe(t)}" for name, t in names.items()) or "no tensors"
    layer = f"layer {prefix!r}" if prefix else "the layer"
    if found:
        several = " and ".join(each.name for each in found)
        raise ValueError(f"format: {layer} fits {several}: say which with format=...; it has {listed}")
    if (other := _served_elsewhere(names, config)) is not None:
        raise ValueError(f"format: {layer} is {other}, which is not read here; it has {listed}")
    if (otherwise := stored_otherwise(config, names)) is not None:
        raise ValueError(f"format: {otherwise}; {layer} has {listed}")
    methods = [f", and {key} is {config[key]!r}" for key in ("quant_method", "quant_algo") if (config or {}).get(key)]
    known = ", ".join(format.name for format in FORMATS)
    raise ValueError(f"format: {layer} is of no format known here ({known}); it has {listed}{''.join(methods)}")


def _served_elsewhere(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> str | None:
    """What a layer of another library is, by its tensors or the config's quant_method; None where neither tells."""
    method = str((config or {}).get("quant_method")).lower()
    if "SCB" in names:
        return "bitsandbytes'"
    codes = any(not each.dtype.is_floating_point for each in names.values())
    return {"bitsandbytes": "bitsandbytes'", "gguf": "GGUF's", "hqq": "HQQ's"}.get(method) if codes else None
