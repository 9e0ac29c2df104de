"""The registry of checkpoint formats that can be read. It knows none: `jitgemm.checkpoint` registers its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.checkpoint.format import INPUT_TENSORS, Config, Format, Transform
from jitgemm.tensors import describe

FORMATS: list[Format] = []
DIALECTS: list[Callable[[Config, str], Config]] = []
"""dialect(config, prefix): the config of a tool that writes other formats' tensors, in those formats' words."""


def register(format: Format) -> None:
    """Adds a format. Raises ValueError where one of its name is there."""
    if any(other.name == format.name for other in FORMATS):
        raise ValueError(f"name: expected one that no format has, got {format.name!r}")
    FORMATS.append(format)


def by_name(name: str) -> Format:
    """The format called `name`. Raises ValueError, listing all names, for another one."""
    known = {format.name: format for format in FORMATS}
    if name not in known:
        raise ValueError(f"format: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def suffixes() -> tuple[str, ...]:
    """What stands behind a layer's name, of every tensor that some format has."""
    return tuple(sorted({*INPUT_TENSORS, *(suffix for format in FORMATS for suffix in format.suffixes)}))


def translated(config: Config, prefix: str) -> Config:
    """A model's quantization_config in the words of the formats, for the layer called prefix: AutoRound's and Quark's
    tell of other formats' tensors. Raises ValueError for a setting of another kind, or for what is not read here."""
    for dialect in DIALECTS:
        config = dialect(config, prefix)
    return config


def stored_otherwise(config: Config, names: Iterable[str]) -> str | None:
    """What the config says of a file whose tensors are none of a quantised layer's, by the first format that knows it.
    names: of tensors that have no place in a model, or of a layer that no format has."""
    names = list(names)
    return next(filter(None, (format.stored_otherwise(config, names) for format in FORMATS)), None)


def transforms_of(config: Config, prefix: str) -> tuple[Transform, ...]:
    """What multiplies a layer's input and result at run time by the config, whether the layer is quantised or not."""
    return next(filter(None, (format.transforms(config, prefix) for format in FORMATS)), ())


def idle(config: Config, name: str) -> str | None:
    """Why a tensor that is no layer's is not used, by the first format that knows it."""
    return next(filter(None, (format.idle(config, name) for format in FORMATS)), None)


def find(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None, prefix: str = "") -> Format:
    """The one format that a layer's tensors are of, by their headers and the model's quantization_config, as
    `translated` gives it; prefix: its name, for messages. Raises ValueError unless one format has such tensors."""
    detecting = [format for format in FORMATS if format.detect(names, config)]
    if len(detecting) == 1:
        return detecting[0]
    listed = ", ".join(f"{name} {t.kind or describe(t)}" for name, t in names.items()) or "no tensors"
    layer = f"layer {prefix!r}" if prefix else "the layer"
    if detecting:
        several = " and ".join(one.name for one in detecting)
        raise ValueError(f"format: {layer} fits {several}: say which with format=...; it has {listed}")
    if (other := _served_elsewhere(names, config)) is not None:
        raise ValueError(f"format: {layer} is {other}, which is not read here; it has {listed}")
    if (otherwise := stored_otherwise(config, names)) is not None:
        raise ValueError(f"format: {otherwise}; {layer} has {listed}")
    methods = [
        f", and {key} is {config[key]!r}" for key in ("quant_method", "quant_algo") if config and config.get(key)
    ]
    known = ", ".join(format.name for format in FORMATS)
    raise ValueError(f"format: {layer} is of no format known here ({known}); it has {listed}{''.join(methods)}")


def _served_elsewhere(names: Mapping[str, TensorInfo], config: Mapping[str, Any] | None) -> str | None:
    """What a layer of another library is, by its tensors or the config's quant_method; None where neither tells."""
    method = str((config or {}).get("quant_method")).lower()
    if "SCB" in names:
        return "bitsandbytes'"
    codes = any(not header.dtype.is_floating_point for header in names.values())
    return {"bitsandbytes": "bitsandbytes'", "gguf": "GGUF's", "hqq": "HQQ's"}.get(method) if codes else None
