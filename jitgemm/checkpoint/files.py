"""The files of a checkpoint: names, headers and data of its tensors, and its quantization config.

Reads safetensors lazily: headers when a checkpoint is opened, data when asked for. Knows no format.

An index decides what a folder holds: a tensor is read from the file that it names, and nowhere else. Other tensors
of its files (`Checkpoint.elsewhere`), such as old copies, are no part of the model.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.checkpoint.folder import config_of_folder, index_of, model_files, quantization_config, read_index

_LOADED = "give its tensors as a mapping: torch.load(path, weights_only=True)"
_INSTEAD = dict.fromkeys((".bin", ".pt", ".pth"), _LOADED) | {
    ".gguf": "GGUF's blocks are no format that is read here; use the model's safetensors"
}
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors' names of dtypes."""
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


_STACKED = {
    "weight": "", "weight_scale_inv": "_scale_inv", "weight_scale": "_scale", "activation_scale": "_activation_scale",
}  # fmt: skip
"""{what it would be behind a layer's name: what stands behind that of a parameter} of transformers' FP8Experts."""


@dataclass(frozen=True)
class Rows:
    """Of some tensors one below the other, `count` rows from `start` on.

    Attributes:
        numbers: they hold (rows, columns) of a matrix of `count` rows instead.
    """

    sources: tuple[str, ...]
    start: int
    count: int
    numbers: bool = False


@dataclass(frozen=True)
class Part:
    """`count` elements from `start` on along a tensor's dimension `axis`."""

    axis: int
    start: int
    count: int


IN_MEMORY: list[Callable[[Mapping[str, torch.Tensor]], tuple[Mapping[str, torch.Tensor], dict[str, str]]]] = []
"""Of each library: its subclasses as the tensors that they hold, named as in its files, and such a file's metadata."""


class Checkpoint:
    """An open checkpoint: the names of all its tensors and its quantization config. No data is read.

    For many layers of one checkpoint, open it once and hand it to `load`: names are listed and headers parsed once.

    Args:
        source: a folder with one or more safetensors files, `model.safetensors.index.json` or another index, one
            `.safetensors` file, a list of them (all that an index beside them names: as it says), or a mapping of names
            to tensors.
        config: the model's config.json or its quantization_config, as a mapping; None: the config next to the files.
        metadata: of a mapping, what the files of its tensors say of them.

    Attributes:
        config: the model's quantization_config, or None.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file is of another kind, an index is damaged, two files have a tensor, or a folder two models.
    """

    def __init__(
        self, source: str | os.PathLike[str] | list[str] | list[Path] | Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
    ):  # fmt: skip
        self._files: dict[Path, Any] = {}
        self._said: dict[str, str] = {}  # metadata of tensors given in memory
        self._in_file: Mapping[str, str] = {}  # what a file calls the tensors that are renamed
        self._warned: set[str] = set()
        self._found: Mapping[str, torch.Tensor | Path | Rows]  # each tensor, or its file
        self._base: Checkpoint  # of `with_rows`: what has the rows' tensors
        folder = None
        if isinstance(source, Mapping):
            self.where = "the tensors given"
            for name, tensor in source.items():
                if not isinstance(tensor, torch.Tensor):
                    raise TypeError(f"source: expected tensors, got {type(tensor).__name__} for {name!r}")
            self._found, self._said = source, dict(metadata or {})
            if any(map(subclass_of, source.values())):
                for flattened in IN_MEMORY:
                    self._found, self._said = flattened(self._found)
        elif isinstance(source, list) and source:
            files = [Path(file) for file in source]
            index = index_of(files)
            folder = (index or files[0]).parent
            self.where, self._found = os.fspath(folder), self._list(index) if index else self._headers(files)
        elif isinstance(source, (str, os.PathLike)):
            path = Path(source)
            folder = path if path.is_dir() else path.parent
            self.where, self._found = os.fspath(source), self._list(path)
        else:
            raise TypeError(f"source: expected a path or a mapping of tensors, got {type(source).__name__}")
        self.config: Mapping[str, Any] | None = None
        if config is not None:
            self.config = quantization_config(config)
        elif folder is not None:
            self.config = config_of_folder(folder)
        self._listed = self._found  # under the files' own names
        self._layers = _by_layer(self._found)

    def warn(self, text: str) -> None:
        """Warns of what the checkpoint contradicts itself in, once, however many layers do so."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"{text} ({self.where})", stacklevel=2)

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """The same open checkpoint with some tensors under other names, {new name: name in the files}; its config
        speaks of those in the files."""
        other, new = copy.copy(self), {old: name for name, old in names.items()}
        other._found = {new.get(name, name): place for name, place in self._found.items()}
        other._in_file, other._layers = names, _by_layer(other._found)
        return other

    def with_rows(self, made: Mapping[str, Rows]) -> Checkpoint:
        """The same open checkpoint with some tensors made of the rows of others, which are gone."""
        other, gone = copy.copy(self), {source for rows in made.values() for source in rows.sources}
        other._found = {name: place for name, place in self._found.items() if name not in gone} | dict(made)
        other._base, other._layers = self, _by_layer(other._found)
        return other

    def hiding(self, names: Collection[str]) -> Checkpoint:
        """The same open checkpoint, whose layers lack some tensors that are no part of a weight."""
        other = copy.copy(self)
        other._layers = _by_layer(name for name in self._found if name not in names)
        return other

    def in_file(self, prefix: str) -> list[str]:
        """What the files call a layer, or the layers whose rows it has."""
        for suffix, name in self.layer(prefix).items():
            names = self._sources(name)
            if names != [name] and all(own.endswith(suffix) for own in names):
                return [own.removesuffix(suffix).rstrip("._") for own in names]
        return [prefix]

    def rows(self, name: str) -> Rows:
        """The files' tensors that a tensor is made of, and its rows in them."""
        place, sources = self._found[name], tuple(self._sources(name))
        if isinstance(place, Rows):
            return replace(place, sources=sources)
        return Rows(sources, 0, next(iter(self.info(name).shape), 1))

    def _sources(self, name: str) -> list[str]:
        """What the files call a tensor, or those whose rows it has."""
        place = self._found[name]
        sources = place.sources if isinstance(place, Rows) else (name,)
        return [self._in_file.get(source, source) for source in sources]

    def file(self, name: str) -> Path:
        """The file of a tensor that is one of its files'."""
        place = self._found[name]
        if not isinstance(place, Path):
            raise ValueError(f"{name}: expected a tensor of a file, got one that was given or is made of others")
        return place

    def elsewhere(self) -> Iterator[tuple[str, Path]]:
        """(name in the files, file) of tensors that a file holds and the index does not give to it."""
        for path in sorted({place for place in self._listed.values() if isinstance(place, Path)}):
            yield from ((name, path) for name in self._open(path).keys() if self._listed.get(name) != path)

    def check_copies(self, reader: str) -> list[str]:
        """For a reader that takes all tensors of all files: the names of tensors that the index lacks. Raises
        ValueError where it may get another tensor than the index names."""
        unlisted = []
        for name, file in self.elsewhere():
            if not isinstance(place := self._listed.get(name), Path):
                unlisted.append(name)
                continue
            own, other = (self._open(path).get_tensor(name) for path in (place, file))
            alike = own.dtype == other.dtype and own.shape == other.shape
            if not alike or not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (own, other))):
                raise ValueError(
                    f"source: expected {name!r} in {place} alone, as the index says, got another one in {file.name}, "
                    f"and {reader} reads both"
                )
        return unlisted

    def place(self, name: str) -> str:
        """What holds a tensor, for messages: its file, or all that was given."""
        place = self._found[name]
        return os.fspath(place) if isinstance(place, Path) else self.where

    def names(self) -> Iterator[str]:
        """The names of all tensors."""
        return iter(self._found)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype, from the file's header."""
        place = self._found[name]
        if isinstance(place, Rows):
            infos = [self._base.info(source) for source in place.sources]
            if len({(info.shape[1:], info.dtype, info.kind) for info in infos}) > 1:
                raise ValueError(f"{name}: expected {', '.join(place.sources)} to differ in their rows alone")
            return infos[0] if place.numbers else replace(infos[0], shape=(place.count, *infos[0].shape[1:]))
        if isinstance(place, torch.Tensor):
            return TensorInfo(tuple(place.shape), place.dtype, subclass_of(place))
        header = self._slice(name, place)
        dtype = header.get_dtype()
        if dtype not in DTYPES:
            raise ValueError(f"{name}: expected a dtype that a quantised layer can have, got safetensors' {dtype}")
        return TensorInfo(tuple(header.get_shape()), DTYPES[dtype])

    def headers(self) -> dict[str, dict[str, Any]]:
        """{name: dtype and shape} of all tensors of its files, in safetensors' words."""
        slices = {name: self._slice(name, self.file(name)) for name in self._found}
        return {name: {"dtype": view.get_dtype(), "shape": view.get_shape()} for name, view in slices.items()}

    def _slice(self, name: str, file: Path) -> Any:
        """safetensors' view of a file's tensor, which has its header, and parts of its data."""
        from safetensors import SafetensorError

        try:
            return self._open(file).get_slice(self._in_file.get(name, name))
        except SafetensorError:
            raise ValueError(f"source: expected {name!r} in {file}, as the index says, found none") from None

    def read(
        self, name: str, device: torch.device, expert: int | None = None, part: Part | None = None
    ) -> torch.Tensor:
        """The tensor on a device; or one expert's, without the first dimension; or a part of it."""
        place = self._found[name]
        at: tuple[int | slice, ...] = (expert,) if expert is not None else ()
        if part is not None and expert is None:
            at = (*(slice(None),) * part.axis, slice(part.start, part.start + part.count))
        if isinstance(place, Rows):
            if part is not None and part.axis == 0 and len(place.sources) == 1:
                return self._base.read(place.sources[0], device, None, replace(part, start=place.start + part.start))
            parts = [self._base.read(source, device) for source in place.sources]
            if place.numbers:
                return torch.cat((parts[0].new_tensor([place.count]), parts[0][1:]))
            bits = [part.view(torch.int8) if part.dtype.itemsize == 1 else part for part in parts]
            rows = torch.cat(bits)[place.start : place.start + place.count].view(parts[0].dtype)
            return rows[at] if at else rows
        if isinstance(place, torch.Tensor):
            return (place[at] if at else place).detach().to(device)
        view, in_file = self._slice(name, place), self._in_file.get(name, name)
        return (view[at] if at else self._open(place).get_tensor(in_file)).to(device)

    def layer(self, prefix: str) -> dict[str, str]:
        """{what stands behind the prefix: full name} of a layer's own tensors."""
        start = prefix if not prefix or prefix[-1] in "._" else prefix + "."
        parent = start[: start.rfind(".") + 1]
        inner = start.removeprefix(parent)
        suffixes = (suffix for suffix in self._layers.get(parent, ()) if suffix.startswith(inner))
        names = {suffix.removeprefix(inner): parent + suffix for suffix in suffixes}
        return names | self._of_parameter(prefix)

    def is_quantised(self, prefix: str) -> bool:
        """Whether a layer has tensors, and its weight is no plain one of floats."""
        names = self.layer(prefix)
        if "weight" not in names:
            return bool(set(names) - {"bias"})
        info = self.info(names["weight"])
        return bool(info.kind) or info.dtype not in _PLAIN_DTYPES

    @contextmanager
    def errors_that_name(self, prefix: str) -> Iterator[None]:
        """Adds layer and checkpoint to a ValueError."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{error} (layer {prefix!r} of {self.where})") from error

    def _of_parameter(self, name: str) -> dict[str, str]:
        """Of a quantised parameter, which stacks experts: what a layer's tensors would be called; {} for all others."""
        above, dot, child = name.rpartition(".")
        torchaos = [own for own in self._layers.get(above + dot, ()) if own.startswith(f"_{child}_")]
        named = {"_weight_" + own.removeprefix(f"_{child}_"): above + dot + own for own in torchaos}
        if name in self._found and not name.endswith("weight"):
            named |= {suffix: name + end for suffix, end in _STACKED.items() if name + end in self._found}
        return named

    def metadata(self, name: str) -> Mapping[str, str]:
        """What the tensor's file says of its tensors; of those given in memory, what torchao would write of them."""
        place = self._found[name]
        if isinstance(place, Rows):
            return self._base.metadata(place.sources[0])
        return self._open(place).metadata() or {} if isinstance(place, Path) else self._said

    def _open(self, path: Path) -> Any:
        """safetensors' reader of a file, which is opened once."""
        if path in self._files:
            return self._files[path]
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ImportError("a checkpoint's files need the package safetensors: pip install safetensors") from None
        if not path.is_file():
            raise FileNotFoundError(f"source: expected the file {path}, found none")
        try:
            return self._files.setdefault(path, safe_open(path, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise ValueError(f"source: expected a safetensors file, got {path}: {error}") from None

    def _list(self, source: Path) -> Mapping[str, Path]:
        """The file of every tensor."""
        if not source.exists():
            raise FileNotFoundError(f"source: expected a file or folder, found none at {source}")
        if source.is_dir():
            files = model_files(source)
            if isinstance(files, Path):
                return self._list(files)
            if not files:
                others = sorted(path.name for path in source.glob("*.gguf"))
                only = f", but GGUF's {others[0]}, whose blocks are no format that is read here" if others else ""
                raise FileNotFoundError(f"source: expected .safetensors files, found none in {source}{only}")
            return self._headers(files)
        if source.name.endswith(".index.json"):
            return read_index(source)
        if source.suffix != ".safetensors":
            instead = _INSTEAD.get(source.suffix, "give its tensors as a mapping of names to tensors")
            raise ValueError(f"source: expected a folder, .safetensors or .index.json, got {source.name}; {instead}")
        return self._headers([source])

    def _headers(self, files: Sequence[Path]) -> Mapping[str, Path]:
        paths: dict[str, Path] = {}
        for path in files:
            for name in sorted(self._open(path).keys()):
                if (other := paths.setdefault(name, path)) is not path:
                    got = f"{name!r} in {other.name} and {path.name}"
                    raise ValueError(f"source: expected each tensor once, got {got}")
        return paths


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """{"model.lm_head.": ["weight", ...]}."""
    layers: dict[str, list[str]] = {}
    for name in names:
        start = name.rfind(".") + 1
        layers.setdefault(name[:start], []).append(name[start:])
    return layers


def subclass_of(tensor: torch.Tensor) -> str:
    """The class of torchao's tensors, which hold codes and report the type of their values; "" for all others."""
    return type(tensor).__name__ if hasattr(tensor, "qdata") or type(tensor).__module__.startswith("torchao") else ""


Source = str | os.PathLike[str] | Mapping[str, torch.Tensor] | Checkpoint
"""What a checkpoint can be read from."""


def opened(source: Source, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """The checkpoint, opened unless it is open. Raises ValueError for a config given with an open one."""
    if not isinstance(source, Checkpoint):
        return Checkpoint(source, config)
    if config is not None:
        raise ValueError("config: expected None with an open Checkpoint, which has its own")
    return source
