"""The folder of a model in floats: what is there is checked before the model is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.folder import config_of_folder, read_json
from jitgemm.checkpoint.writing import Stored, stored_in
from jitgemm.nn.report import some

_CONFIG = "config.json"
_PREDICTS = ("ForCausalLM", "ForConditionalGeneration")
"""How transformers calls classes that predict tokens."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose files were looked at.

    Attributes:
        folder: where it is.
        config: its config.json.
        checkpoint: its tensors.
        shards: {file: {name: tensor}} of its safetensors files.
        states: {file: size and time} of these and its config.json, from before they were read.
    """

    folder: Path
    config: dict[str, Any]
    checkpoint: Checkpoint
    shards: dict[Path, dict[str, Stored]]
    states: dict[Path, tuple[int, int] | None]

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """All tensors of all shards."""
        return {name: tensor for tensors in self.shards.values() for name, tensor in tensors.items()}

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    def name(self, file: Path) -> str:
        """A shard's path in the folder."""
        return file.relative_to(self.folder).as_posix()

    def check_unchanged(self) -> None:
        """Raises ValueError, which names the file, if one was written or replaced since it was looked at."""
        for file, state in self.states.items():
            if _state(file) != state:
                raise ValueError(
                    f"{file}: expected a file that stays as it is while it is read, got one that was changed"
                )


def _state(file: Path) -> tuple[int, int] | None:
    """What changes when a file is written; None where there is none."""
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def _config_file(folder: Path) -> Path:
    return folder if folder.is_file() else folder / _CONFIG


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json, or that file. Raises ValueError, which names it, where it is none or names no model."""
    path = _config_file(folder)
    config = read_json(path)
    kinds, family = config.get("architectures"), config.get("model_type")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(name, str) for name in kinds)):
        raise ValueError(f"architectures: expected a list of names in {path}, got {str(kinds)[:80]}")
    if family is not None and not isinstance(family, str):
        raise ValueError(f"model_type: expected a name in {path}, got {str(family)[:80]}")
    return config


def open_model_folder(folder: Path) -> ModelFolder:
    """Looks at a folder's config and headers.

    Raises:
        FileNotFoundError: it, its config.json or one of its files is not there.
        ValueError: a file is damaged, or the model is quantised already.
    """
    if not (folder / _CONFIG).is_file():
        hint = "a model of the hub is fetched by: hf download NAME --local-dir FOLDER"
        raise FileNotFoundError(f"{folder}: expected a model's folder, found no config.json in it; {hint}")
    states = {folder / _CONFIG: _state(folder / _CONFIG)}
    config = config_of(folder)
    if (quantised := config_of_folder(folder)) is not None:
        method = quantised.get("quant_method") or quantised.get("quant_algo") or "another library"
        raise ValueError(f"{folder}: expected a model in floats, got one that {method} quantised")
    checkpoint = Checkpoint(folder)
    names: dict[Path, list[str]] = {}
    for name in checkpoint.names():
        names.setdefault(checkpoint.file(name), []).append(name)
    missing = sorted(str(file.relative_to(folder)) for file in names if not file.is_file())
    if missing:
        raise FileNotFoundError(f"{folder}: expected all files that its index names, found no {some(missing)}")
    if beside := checkpoint.check_copies("transformers"):
        raise ValueError(
            f"{folder}: expected an index that names all tensors of its files, found {some(beside)} in none"
        )
    shards = {}
    for file in sorted(names):
        states[file] = _state(file)
        stored, listed = stored_in(file), set(names[file])
        if lost := sorted(listed - stored.keys()):
            raise ValueError(f"{file}: expected the tensors that the index says, found no {some(lost)}")
        shards[file] = {name: tensor for name, tensor in stored.items() if name in listed}
    return ModelFolder(folder, config, checkpoint, shards, states)


def load_model(source: ModelFolder, device: torch.device) -> Any:
    """The model of transformers, in its files' type: of the class that config.json names, if it predicts tokens.

    Raises:
        ValueError: transformers is not there, makes no model of config.json, the files do not fill the model, or hold a
            NaN or infinity; the message names the file or tensor.
    """
    transformers = check_config(source)
    named = next((name for name in source.config.get("architectures") or () if name.endswith(_PREDICTS)), "")
    model_class: Any = getattr(transformers, named or "AutoModelForCausalLM", transformers.AutoModelForCausalLM)
    options = {"output_loading_info": True, "local_files_only": True, "ignore_mismatched_sizes": True}
    with naming_config(source.folder):
        opened: Any = model_class.from_pretrained(source.folder, dtype="auto", **options)
    model, loaded = opened
    for name, *shapes in sorted(loaded["mismatched_keys"]):
        got, expected = (list(shape) for shape in shapes)
        raise ValueError(f"{name}: expected shape {expected}, as {source.folder / _CONFIG} says, got {got}")
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(f"{source.folder}: expected all tensors of the model, found no {some(missing)}")
    model = model.to(device).eval()
    for name, tensor in model.named_parameters():
        if not bool(tensor.isfinite().all()):
            at = (~tensor.isfinite()).nonzero()[0]
            raise ValueError(f"{name}: expected finite values, got {float(tensor[tuple(at)])} at {at.tolist()}")
    return model


def check_config(source: ModelFolder) -> Any:
    """transformers, which reads the folder's config.json. Raises ValueError where it cannot, or is not there."""
    transformers = import_transformers()
    with naming_config(source.folder):
        transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True)
    return transformers


@contextmanager
def naming_config(folder: Path, passes: tuple[type[Exception], ...] = (OSError, MemoryError)) -> Iterator[None]:
    """What is raised inside, except `passes`, becomes a ValueError that names a folder's config.json, or that file."""
    try:
        yield
    except passes:
        raise
    except Exception as error:  # of any kind: each model reads its config in its own way
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"{_config_file(folder)}: expected a model that transformers can make, got {got}") from error


def load_tokenizer(source: ModelFolder) -> Any:
    """The folder's tokenizer, of transformers. Raises ValueError, which says why, where there is none."""
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    except Exception as error:  # of any kind: each tokenizer has its own files and libraries
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"{source.folder}: expected a tokenizer, got {type(error).__name__}: {why}") from error


def import_transformers() -> Any:
    """transformers. Raises ValueError, which says what to install, where it cannot be imported."""
    try:
        return import_module("transformers")
    except ImportError as error:
        how = "pip install transformers accelerate, or pip install -e '.[hf]' in jitgemm's checkout"
        raise ValueError(f"a model is opened by transformers: {how} ({error})") from None
