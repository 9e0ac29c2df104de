"""Safetensors files, written: tensors of memory, and tensors of other files byte for byte. Knows no formats.

::

    u64 little endian | header: JSON {name: {dtype, shape, data_offsets}, __metadata__}, padded to 8 bytes | data

A file is complete or not there: it is written under another name, which begins with a dot, and then renamed. What other
files hold is never in memory, so that a shard may be of any size and of dtypes that torch lacks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from jitgemm.checkpoint.files import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 1 << 24
"""Bytes copied at a time."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: `size` bytes from `start` on."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def stored_in(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, in the order of its data.

    Raises:
        ValueError: it is none, or is cut off.
    """
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size
            if not 0 < length <= size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: Stored(file, facts["dtype"], tuple(facts["shape"]), 8 + length + begin, end - begin)
            for name, facts in header.items()
            for begin, end in (facts["data_offsets"],)
        }
        if (end := max((facts.start + facts.size for facts in tensors.values()), default=0)) > size:
            raise ValueError(f"data up to byte {end} in a file of {size} bytes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"source: expected a safetensors file, got {file}: {error}") from None
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor | Stored], metadata: Mapping[str, str] | None = None
) -> int:
    """Writes a file of these tensors: dtypes of many bytes first, so that all are aligned, then by name.

    Returns:
        Its size in bytes.

    Raises:
        OSError: it could not be written, and is not there; the error names it.
    """
    facts: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Stored):
            facts[name] = tensor.dtype, tensor.shape, tensor.size
        else:
            facts[name] = _NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes
    names = sorted(facts, key=lambda name: (-_bytes_of_one(*facts[name]), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name in names:
        dtype, shape, size = facts[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensors[name]
            for block in _blocks_of(name, tensor) if isinstance(tensor, Stored) else _bytes(tensor):
                file.write(block)
    return 8 + len(text) + end


def unfinished_path(path: Path) -> Path:
    """What a file is called while it is written."""
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` if nothing is raised, and else is gone. An OSError names the path."""
    unfinished = unfinished_path(path)
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.filename in (None, os.fspath(unfinished)):
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
        raise


def _bytes_of_one(dtype: str, shape: tuple[int, ...], size: int) -> float:
    """Bytes of an element, which for some dtypes is no whole number."""
    return size / math.prod(shape) if math.prod(shape) else DTYPES[dtype].itemsize if dtype in DTYPES else 1


def _bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        yield memoryview(values)


def _blocks_of(name: str, stored: Stored) -> Iterator[bytes]:
    with open(stored.file, "rb") as file:
        file.seek(stored.start)
        left = stored.size
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise ValueError(f"{name}: expected {left} more bytes in {stored.file}, found its end")
            left -= len(block)
            yield block
