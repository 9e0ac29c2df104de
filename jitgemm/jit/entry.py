"""One kernel of the cache as one file: its layout, reading it with suspicion, writing it so that nobody sees half.

Knows bytes and files; knows neither folders' order, nor locks, nor how a kernel comes about. Whose entries are trusted
stands in `jitgemm/jit/cache.py`; see also docs/cache.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

SCHEMA = 2
"""Version of the key's fields and of the entry's layout. A change orphans every older entry."""

MAX_SPILL_BYTES = 200
"""Bytes of register spills from which a kernel counts as badly built: some kernels that spill less are the fastest."""

MAGIC = b"JITGEMM1"
SUFFIX = ".jgk"
SET_ASIDE = SUFFIX + ".bad"

_HEADER = struct.Struct("<8sQQ32s")  # magic, bytes of metadata, bytes of cubin, checksum


@dataclass(frozen=True)
class Entry:
    """A kernel from the cache. `path` is None when no folder took it (`unwritten`): only this process has it."""

    key: str
    path: Path | None
    metadata: dict
    cubin: bytes
    unwritten: str = ""

    @property
    def _spills(self) -> int:
        return self.metadata.get("spill_bytes", 0)

    @property
    def _arrays(self) -> int:
        """Bytes of stack that spills do not explain: an array that is indexed at run time, which is in local memory and
        counts as no spill. What is spilled is stored and loaded once at least; stack comes by eights."""
        return max(0, self.metadata.get("stack_bytes", 0) - (self._spills + 15) // 16 * 8)

    @property
    def slow_because(self) -> str:
        """What ptxas did that costs the kernel time, such as "124 bytes of register spills"; "" for a clean build."""
        spills = f"{self._spills} bytes of register spills" if self._spills else ""
        arrays = f"{self._arrays} bytes of stack" if self._arrays else ""
        return "; ".join(filter(None, (spills, arrays, self.metadata.get("serialised", ""))))

    @property
    def slow_build(self) -> bool:
        """True if nobody should run it unawares: many spills, arrays in local memory, serialised wgmma."""
        return self._spills > MAX_SPILL_BYTES or self._arrays > 0 or bool(self.metadata.get("serialised"))


@dataclass(frozen=True)
class EntryInfo:
    """What is known of a file of the cache without reading its cubin.

    Attributes:
        key, path, root: the kernel's key, its file, and the cache folder that holds it.
        size: bytes of the file.
        last_used: unix time; the file's mtime, which every look-up renews.
        problem: what is wrong with the file, or None. Only `KernelCache.verify` compares hashes.
        foreign: another user's that is not trusted: neither loaded nor removed.
        metadata: what the file says of the kernel, without its source and log; empty where it cannot be read.
    """

    key: str
    path: Path
    root: Path
    size: int
    last_used: float
    problem: str | None
    foreign: bool
    metadata: dict

    @property
    def ok(self) -> bool:
        return self.problem is None


class BadEntry(Exception):
    """A file that is not the entry its name says."""


class UntrustedEntry(BadEntry):
    """A file that somebody who is not trusted wrote or can write."""


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file of the cache, open for reading. Raises OSError, BadEntry for no regular file, and UntrustedEntry."""
    # Without O_NONBLOCK a FIFO would wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadEntry("not a regular file")
        if status.st_mode & stat.S_IWOTH:
            raise UntrustedEntry("everybody can write it")
        if status.st_uid not in (0, os.geteuid()) and _open_to_all(path):
            raise UntrustedEntry(f"user {status.st_uid} wrote it where everybody can write")
        yield file


_LINKS = 40
"""Links of a path that Linux follows."""


def _open_to_all(path: Path) -> bool:
    """Whether everybody could have made a part of the path: a folder, or a link on the way to the file.

    The path is walked as the kernel walks it, and ends at the first folder that everybody can write, before what lies
    in it is looked at. So whoever swaps a link between this and the file's opening changes nothing.
    """
    here, ahead, links = Path("/"), list(path.absolute().parts[:0:-1]), 0
    while ahead:
        if here.stat().st_mode & stat.S_IWOTH:
            return True
        name = ahead.pop()
        here, above = here.parent if name == ".." else here / name, here
        if here.is_symlink():
            links += 1
            if links > _LINKS:
                return True
            target = Path(os.readlink(here))
            ahead += target.parts[: 0 if target.is_absolute() else None : -1]
            here = Path("/") if target.is_absolute() else above
    return False


def encode_entry(metadata: dict, cubin: bytes) -> bytes:
    """The bytes of an entry::

    0       8                16            24       56
    | magic | metadata bytes | cubin bytes | sha256 | metadata, JSON | cubin |

    The two sizes are little-endian 64-bit. The checksum covers the metadata's size, the metadata and the cubin.
    """
    text = json.dumps(metadata, sort_keys=True).encode()
    return _HEADER.pack(MAGIC, len(text), len(cubin), _checksum(text, cubin)) + text + cubin


def _checksum(text: bytes, cubin: bytes) -> bytes:
    # The length keeps one part's end from passing for the other's beginning.
    return hashlib.sha256(struct.pack("<Q", len(text)) + text + cubin).digest()


def _read_metadata(file: BinaryIO, key: str) -> tuple[dict, bytes, bytes]:
    """(metadata, as text too, expected sha256) of an open entry, left at its cubin. Raises BadEntry."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise BadEntry("not a kernel cache entry")
    _, text_bytes, cubin_bytes, digest = _HEADER.unpack(head)
    # Before any big read: a flipped length must not ask for exabytes.
    expected, size = _HEADER.size + text_bytes + cubin_bytes, os.fstat(file.fileno()).st_size
    if size != expected:
        raise BadEntry(f"{size} bytes long, {expected} expected")
    text = file.read(text_bytes)
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"unreadable metadata: {error}") from None
    if not isinstance(metadata, dict) or metadata.get("schema") != SCHEMA:
        raise BadEntry("metadata of another schema")
    if metadata.get("key") != key:
        raise BadEntry("holds another kernel than its name says")
    values: dict[str, Any] = {"serialised": ""} | metadata
    values["nvrtc.build"] = values["nvrtc"].get("build") if isinstance(values.get("nvrtc"), dict) else None
    for name, types in _FIELDS.items():
        if not isinstance(values.get(name), types):
            raise BadEntry(f"metadata without a proper {name}")
    return metadata, text, digest


_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("label", "source", "log", "serialised", "nvrtc.build"), str),
    **dict.fromkeys(("registers", "spill_bytes", "stack_bytes"), int),
    **dict.fromkeys(("seconds", "created"), (int, float)),
    "spec": dict,
}
"""Metadata that is read again, by type. `serialised` may be missing."""


def load_entry(path: Path, *, aside: bool = False) -> Entry:
    """The entry of a file, checked against its checksum and its name's key. Raises OSError, BadEntry, UntrustedEntry.

    With `aside` a bad file that is trusted is renamed to *.bad, unless another process has put a new file there since.
    """
    key = path.name.partition(".")[0]
    with _opened(path) as file:
        try:
            metadata, text, digest = _read_metadata(file, key)
            cubin = file.read()
            if _checksum(text, cubin) != digest:
                raise BadEntry("checksum mismatch")
            return Entry(key, path, metadata, cubin)
        except BadEntry as problem:
            with suppress(OSError):
                if aside and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    os.replace(path, path.with_suffix(SET_ASIDE))
                    message = f"kernel cache entry set aside as {path.stem}{SET_ASIDE}: {problem}"
                    warnings.warn(message, stacklevel=2)
            raise


def describe_entry(path: Path) -> EntryInfo:
    """What a file of the cache says of itself. Raises OSError when it is gone."""
    key, status = path.name.partition(".")[0], path.stat()
    metadata, problem, foreign = {}, None, False
    try:
        if path.name.endswith(SET_ASIDE):
            raise BadEntry("set aside")
        with _opened(path) as file:
            read = _read_metadata(file, key)[0]
        metadata = {name: read[name] for name in read if name not in ("source", "log")}
    except (BadEntry, OSError) as error:
        problem, foreign = str(error), isinstance(error, UntrustedEntry) and status.st_uid != os.geteuid()
    return EntryInfo(key, path, path.parent, status.st_size, status.st_mtime, problem, foreign, metadata)


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, or leave it as it was and raise OSError.

    Readable as the umask allows, like any file that is made in place: a folder may be warmed by one user for another.
    Nobody but its owner may write it.
    """
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the data it names
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
