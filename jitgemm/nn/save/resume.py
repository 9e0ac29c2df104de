"""The folder that is written, until it is complete: its settings, and a stage's layers as soon as they are quantised.

::

    OUT/.jitgemm-quantize/settings.json          what decides the result; another run may only go on with the same
                          files.json             names of the files that are written to OUT, before the first of them is
                          FIRST.HASH.safetensors a stage's layers, as their state dicts, named after its first module
                          lock                   held by the process that writes

Without settings.json it is no folder of ours. A file is complete or not there (see `checkpoint.writing`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import torch
from filelock import FileLock, Timeout

from jitgemm.checkpoint.folder import read_json
from jitgemm.checkpoint.writing import unfinished_path, write_safetensors, written
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.quantize.quantize import QuantisationReport
from jitgemm.nn.quantize.stacked import ExpertsLayout

_WORK = ".jitgemm-quantize"
_SETTINGS, _WRITES = "settings.json", "files.json"


class ResumableFolder:
    """A folder that is being written by this process, and by no other.

    Attributes:
        folder: where the checkpoint goes.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], restart: bool = False):
        """Makes the folder, or takes over one that an interrupted run left.

        Args:
            settings: what decides the result, as JSON has it.
            restart: drop what an interrupted run left, and the files of its that are in the folder.

        Raises:
            ValueError: the folder holds something else, the interrupted run had other settings, or another run has it.
            OSError: it cannot be written.
        """
        self.folder, self._work = folder, folder / _WORK
        if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not self._work.is_dir())):
            raise ValueError(f"{folder}: expected an empty folder, or what an interrupted run left, got other files")
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        ours = not self._work.exists()
        self._work.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._work / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{folder}: expected no other process that writes to it, found one") from None
        try:
            self._hash = self._compare(settings, restart)
        except BaseException:
            self._lock.release()
            if ours:
                self.close()
            raise

    def _compare(self, settings: Mapping[str, Any], restart: bool) -> str:
        """Compares the settings with those of an interrupted run, or writes them; returns their hash."""
        known, text = self._work / _SETTINGS, json.dumps(settings, indent=1, sort_keys=True)
        if known.exists() and not restart:
            before = _read(known)
            changed = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
            if changed:
                was = ", ".join(f"{key} {before.get(key)} (now {settings.get(key)})" for key in changed)
                raise ValueError(
                    f"{self.folder}: an interrupted run had other settings: {was}; give the same to go on, or --restart"
                )
        else:
            noted = self._work / _WRITES
            for name in _read(noted)["files"] if noted.exists() else ():
                for left in (self.folder / name, unfinished_path(self.folder / name)):
                    left.unlink(missing_ok=True)
            noted.unlink(missing_ok=True)
            for left in self._files():
                left.unlink()
            with written(known) as file:
                file.write(text.encode())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def note_files(self, names: Iterable[str]) -> None:
        """Notes which files the folder gets, for a run that is to drop them."""
        with written(self._work / _WRITES) as file:
            file.write(json.dumps({"files": sorted(names)}).encode())

    @property
    def layers_done(self) -> int:
        """How many are kept."""
        return sum(len(_names(stage)) for stage in self._files())

    def _files(self) -> list[Path]:
        return sorted(self._work.glob("*.safetensors"))

    def _file(self, names: Iterable[str]) -> Path:
        return self._work / f"{next(iter(names))}.{self._hash}.safetensors"

    def save_stage(self, layers: Mapping[str, torch.nn.Module], report: QuantisationReport) -> None:
        """Writes a stage's layers, and what the report says of them. Raises OSError, which names the file."""
        tensors: dict[str, torch.Tensor] = {}
        for name, layer in layers.items():
            tensors |= layer.state_dict(prefix=f"{name}.")
        about = {
            "errors": {name: report.errors[name] for name in layers if name in report.errors},
            "kept_8bit": {name: report.kept_8bit[name] for name in layers if name in report.kept_8bit},
            "names": list(layers),
        }
        write_safetensors(self._file(layers), tensors, {"about": json.dumps(about)})

    def load_stage(
        self, names: list[str], report: QuantisationReport, layouts: Mapping[str, ExpertsLayout], device: torch.device
    ) -> dict[str, Any] | None:
        """A stage's layers, if an interrupted run had quantised them; the report then has what it said of them.

        Args:
            names: of the stage's modules.
            layouts: {name: layout} of the modules of stacked experts.
        """
        file = self._file(names)
        if not file.is_file() or sorted(_names(file)) != sorted(names):
            return None
        from safetensors import safe_open

        with safe_open(file, framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = _about(file)
        layers: dict[str, Any] = {}
        try:
            for name in names:
                if name in layouts:
                    layers[name] = PackedExperts.from_state_dict(tensors, f"{name}.")
                    layers[name].top_k = layouts[name].top_k
                else:
                    layers[name] = PackedLinear.from_state_dict(tensors, f"{name}.")
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(file, error) from error
        layers = {name: layer.to(device) for name, layer in layers.items()}
        report.errors |= about["errors"]
        report.kept_8bit |= about["kept_8bit"]
        return layers

    def finish(self) -> None:
        """Drops what only an unfinished folder has."""
        self._lock.release()
        shutil.rmtree(self._work)

    def close(self) -> None:
        """Lets another process go on; what was quantised stays. Folders that this run made, and filled with nothing,
        are gone. Raises no OSError, which would hide why a run failed."""
        with suppress(OSError):
            self._lock.release()
            if self._work.is_dir() and not self._files():
                shutil.rmtree(self._work)
                for folder in self._made:
                    folder.rmdir()


def _read(file: Path) -> dict[str, Any]:
    """What a JSON file of the work's says. Raises ValueError for one that is damaged."""
    try:
        record = read_json(file)
        names = record.get("files", [])
        if not isinstance(names, list) or not all(isinstance(name, str) and _is_inside(name) for name in names):
            raise ValueError(f"{file.name}: expected names of files in {file}, got {str(names)[:80]}")
        return record
    except ValueError as error:
        raise ValueError(f"{error}; delete {file.parent} to begin anew") from None


def _is_inside(name: str) -> bool:
    return not PurePath(name).is_absolute() and ".." not in PurePath(name).parts


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file}: expected what an interrupted run left, got {error}; delete it")


def _about(file: Path) -> dict[str, Any]:
    """What a stage's file says of its layers. Raises ValueError for one that is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})["about"])
            kinds = {"names": list, "errors": dict, "kept_8bit": dict}
            if not all(isinstance(about[name], expected) for name, expected in kinds.items()):
                raise ValueError(f"a list of layers that says {str(about)[:80]}")
            return dict(about)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from None


def _names(file: Path) -> list[str]:
    return list(_about(file)["names"])
