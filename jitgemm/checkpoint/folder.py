"""A model's folder: which of its files are the model, and what its JSON files say. Reads no tensors."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_CONFIG_KEYS = ("quantization_config", "compression_config")
_CONFIG_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where GPTQ's, AWQ's and NVIDIA's tools put what config.json may lack."""


def index_of(files: Sequence[Path]) -> Path | None:
    """What decides on these files, all that transformers takes of a folder: its `model.safetensors` or the index that
    names them; None for others."""
    folder = files[0].parent
    if [file.name for file in files] == [_SINGLE]:
        return weights_of(folder)
    for place in (folder, folder.parent):  # of shards in a folder of their own
        for index in sorted(place.glob(_INDEX.replace(".json", "*.json"))):
            if set(read_index(index).values()) == set(files):
                return index
    return None


def weights_of(folder: Path, *, by_index: bool = False, stacklevel: int = 4) -> Path | None:
    """A folder's `model.safetensors` or its index, whichever is the model; None where it has neither.

    Where it has both, the index is left from another model if it names files that are not there: then
    `model.safetensors` is the model, as for transformers, with a warning; by_index, for loaders that follow an index
    wherever there is one, as vLLM's: FileNotFoundError. ValueError where both are whole.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if not index.is_file():
        return single if single.is_file() else None
    named = set(read_index(index).values())
    missing = sorted(file.name for file in named if not file.is_file())
    if not single.is_file() or single in named:
        if missing and by_index:
            raise FileNotFoundError(f"source: expected the files that {index} names, found no {', '.join(missing)}")
        return index
    if not missing:
        raise ValueError(
            f"source: expected one model in {folder}, got {_SINGLE} and {_INDEX} with {len(named)} files; delete one, "
            "or give the path of the one that is meant"
        )
    left = f"{index} names files that are not there, such as {missing[0]}, next to {_SINGLE}"
    if by_index:
        raise FileNotFoundError(f"source: {left}: delete the index if it was left from another model")
    warnings.warn(f"source: {left}: {_SINGLE} is read", stacklevel=stacklevel)
    return single


def model_files(folder: Path) -> Path | list[Path]:
    """What a folder's model is in: `weights_of`, or another index, or all safetensors files, none of them perhaps.
    Raises ValueError where there are several indices."""
    if (found := weights_of(folder, stacklevel=5)) is not None:
        return found
    files, indices = (sorted(folder.glob(f"*.safetensors{end}")) for end in ("", ".index.json"))
    if len(indices) > 1:
        got = ", ".join(index.name for index in indices)
        raise ValueError(f"source: expected one index, got {got}; give one's path")
    return indices[0] if indices else files


def read_index(path: Path) -> Mapping[str, Path]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        got = "none" if weight_map is None else repr(weight_map)[:80]
        raise ValueError(f"source: expected a weight_map that names tensors in {path}, found {got}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise ValueError(f"source: expected files inside the folder of {path.name}, got {file!r} for {name!r}")
    for file in dict.fromkeys(weight_map.values()):
        try:
            os.stat(path.parent / file)
        except (FileNotFoundError, NotADirectoryError):
            pass  # which is said once the file is read
        except (OSError, ValueError) as error:  # too long, or with letters that no name has
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"source: expected names of files in {path}, got {file[:60]!r}: {why}") from None
    return {name: path.parent / file for name, file in weight_map.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model's folder. Raises ValueError, which names the file, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: expected JSON in {path}, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: expected a JSON object in {path}, got {type(content).__name__}")
    return content


def config_of_folder(folder: Path) -> Mapping[str, Any] | None:
    """What a folder's JSON files say of a model's quantisation, or one file."""
    path = folder if folder.is_file() else folder / "config.json"
    if path.is_file() and (nested := _nested_config(read_json(path))) is not None:
        return nested
    others = (read_json(folder / name) for name in _CONFIG_FILES if (folder / name).is_file())
    content = next(others, {})
    quantization = content.get("quantization")
    return quantization if isinstance(quantization, dict) else content or None


def _nested_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config of a config.json, at its top or in the language model's part."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    configs = (part.get(key) for part in parts for key in _CONFIG_KEYS)
    return next((config_of for config_of in configs if isinstance(config_of, Mapping)), None)


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """From a whole config.json, or from one that is the quantization_config already."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config: expected a mapping, got {type(config).__name__}")
    nested, of_model = _nested_config(config), "architectures" in config or "model_type" in config
    return config if nested is None and not of_model else nested
