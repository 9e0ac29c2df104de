"""The files of a quantised model's folder: the source's shards with quantised layers, its config, what is copied."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jitgemm.checkpoint import qserve
from jitgemm.checkpoint.compressed_tensors import FORMAT
from jitgemm.checkpoint.compressed_tensors_config import written_config, written_group
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.format import Scheme
from jitgemm.checkpoint.writing import Stored, stored_in, write_safetensors, written
from jitgemm.errors import JitGemmError
from jitgemm.kernel.codes import FACTOR_GROUP
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.save.model_folder import ModelFolder
from jitgemm.nn.save.resume import ResumableFolder
from jitgemm.nn.save.tensor_map import TensorMap

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt", ".onnx", ".index.json")
"""Files that hold weights, or list them, and are not copied."""
_FOLDERS = ("additional_chat_templates",)
"""Folders that belong to a tokenizer."""


def quantization_config(model: torch.nn.Module, tensor_map: TensorMap, recipe: Recipe) -> dict[str, Any]:
    """What config.json says of the layers that stand in the model, which a recipe has quantised."""
    if recipe.writes_qserve:
        return {
            "quant_method": qserve.METHOD,
            "wbits": 4,
            "group_size": FACTOR_GROUP,
            "modules_to_not_convert": tensor_map.ignore,
        }
    of_kind: dict[tuple[bool, int], list[str]] = {}  # (whether the recipe is for their columns, bits): names
    for layer in tensor_map.layers:
        weight, _ = tensor_map.layers[layer][0].packed(model)
        of_kind.setdefault((bool(weight.rotation) == bool(recipe.rotation), weight.bits), []).append(layer)
    # The layers of most are matched last. "Linear" takes joined layers before the names of their parts do in vLLM 0.24,
    # and the first match counts.
    kinds = sorted(of_kind, key=lambda key: (key[0], -key[1]))
    last = sorted({re.escape(layer.rpartition(".")[2]) for layer in of_kind[kinds[-1]]})
    targets = of_kind | {kinds[-1]: ["Linear"] if len(kinds) == 1 else [rf"re:(.*\.)?({'|'.join(last)})$"]}
    groups = []
    for by_recipe, bits in kinds:
        own: Any = recipe if by_recipe else recipe.otherwise
        inputs = "float" if own.lhs_dtype.is_floating_point else "int"
        grouping = (own.group, own.symmetric is not False, own.scheme) if bits == 4 else ()
        groups.append(written_group(targets[by_recipe, bits], bits, inputs, *grouping))
    straight = [layer for (by_recipe, _), layers in of_kind.items() if not by_recipe for layer in layers]
    rotation = recipe.rotation if len(straight) < len(tensor_map.layers) else None
    return written_config(groups, tensor_map.ignore, rotation, straight)


def write_checkpoint(
    model: torch.nn.Module, source: ModelFolder, tensor_map: TensorMap, out: ResumableFolder, config: dict[str, Any],
    show: Callable[[str], None],
) -> int:  # fmt: skip
    """Writes the checkpoint, config.json last: until then no reader takes the folder for a model. Before it is written,
    the package's own reader finds in the folder what it should hold.

    Args:
        model: in which the quantised layers stand.
        config: the quantization_config.
        show: called with the name of each shard before it is written.

    Returns:
        Bytes of all tensors.

    Raises:
        OSError: a file could not be written; the error names it.
        ValueError: the source was changed meanwhile.
        JitGemmError: the folder does not hold what was written.
    """
    schemes: dict[tuple[int, int], Scheme] = {}  # by bits and rotation
    format: Any = qserve.FORMAT if config["quant_method"] == qserve.METHOD else FORMAT
    folder, shards, copied = out.folder, _shard_names(source), _copied(source)
    out.note_files([*shards.values(), *copied.values(), _INDEX, _CONFIG])
    shard_of: dict[str, str] = {}
    sizes: dict[str, tuple[int, int, int]] = {}  # (n, k, bits) of each layer
    total = 0
    for file, stored in source.shards.items():
        show(shards[file])
        tensors: dict[str, torch.Tensor | Stored] = {}
        for name, tensor in stored.items():
            if name not in tensor_map.replaces:
                tensors[name] = tensor
            for layer in tensor_map.replaces.get(name, ()):
                weight = tensor_map.canonical(model, layer)
                width = weight.bits, weight.rotation
                scheme = schemes.get(width) or schemes.setdefault(width, format.written(config, layer))
                sizes[layer] = weight.n, weight.k, weight.bits
                made = format.write(weight, scheme)
                if weight.bias is not None:
                    made["bias"] = weight.bias
                tensors |= {f"{layer}.{suffix}": value.cpu() for suffix, value in made.items()}
        write_safetensors(folder / shards[file], tensors)
        shard_of |= dict.fromkeys(tensors, shards[file])
        total += sum(tensor.size if isinstance(tensor, Stored) else tensor.nbytes for tensor in tensors.values())
    if [*shards.values()] != ["model.safetensors"]:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
        with written(folder / _INDEX) as opened:
            opened.write(json.dumps(index, indent=2).encode() + b"\n")
    for path, name in copied.items():
        (folder / name).parent.mkdir(exist_ok=True)
        _copy(path, folder / name)
    source.check_unchanged()
    _check_written(folder, source, tensor_map, sizes, config)
    with written(folder / _CONFIG) as opened:
        opened.write(json.dumps(source.config | {"quantization_config": config}, indent=2).encode() + b"\n")
    return total


def _shard_names(source: ModelFolder) -> dict[Path, str]:
    """{shard: what it is called in the new folder}: as in the source, but engines look into no folders inside."""
    names = {file: source.name(file) for file in source.shards}
    if all("/" not in name for name in names.values()):
        return names
    return {file: f"model-{i:05}-of-{len(names):05}.safetensors" for i, file in enumerate(names, 1)}


def _copied(source: ModelFolder) -> dict[Path, str]:
    """{file: its path in the new folder} of what is copied: all but weights and config.json."""
    copied: dict[Path, str] = {}
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and path.name[0] != "." and path.name != _CONFIG and not path.name.endswith(_WEIGHTS):
            copied[path] = path.name
        elif path.is_dir() and path.name in _FOLDERS:
            copied |= {inner: f"{path.name}/{inner.name}" for inner in sorted(path.iterdir()) if inner.is_file()}
    return copied


def _check_written(
    folder: Path,
    source: ModelFolder,
    tensor_map: TensorMap,
    sizes: dict[str, tuple[int, int, int]],
    config: dict[str, Any],
) -> None:
    """Reads names and headers of the new folder as `load_` does. Raises JitGemmError unless they are those that the
    source and its quantised layers have."""
    try:
        checkpoint = Checkpoint(folder, config)
        files = {name: checkpoint.file(name) for name in checkpoint.names()}
        headers = {file: stored_in(file) for file in set(files.values())}
        for name, stored in source.tensors.items():
            got = headers[files[name]].get(name) if name in files else None
            if name not in tensor_map.replaces and (
                got is None or (got.dtype, got.shape) != (stored.dtype, stored.shape)
            ):
                shown = "none" if got is None else f"{got.dtype} {list(got.shape)}"
                raise ValueError(f"{name}: expected {stored.dtype} {list(stored.shape)}, found {shown}")
        for layer, expected in sizes.items():
            found = LayerSource.find(checkpoint, layer)
            if (found.n, found.k, found.bits) != expected:
                raise ValueError(f"{layer}: expected (n, k, bits) = {expected}, got {(found.n, found.k, found.bits)}")
    except (ValueError, FileNotFoundError) as error:
        raise JitGemmError(f"{folder}: expected to read back what was written: {error}") from error


def _copy(path: Path, to: Path) -> None:
    with written(to) as opened, open(path, "rb") as source:
        shutil.copyfileobj(source, opened)
    os.chmod(to, path.stat().st_mode & 0o777)
