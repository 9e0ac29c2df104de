"""The on-disk cache of compiled kernels: rendered source in, cubin out, NVRTC only where no folder has the kernel.

Knows files, keys and NVRTC; knows nothing of torch, of GPUs or of what a kernel computes. Two promises shape it. A
cubin that comes out of here is whole and was built from exactly the source asked for. And nothing the disk does (a bad
entry, a full or read-only folder, a lock nobody gives back) fails a call that could have compiled. Locks only save
work; correctness rests on entries that appear by rename and carry their own checksum. See docs/cache.md.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jitgemm import settings
from jitgemm.errors import CacheMissError, JitGemmError
from jitgemm.jit.entry import (
    SCHEMA,
    SET_ASIDE,
    SUFFIX,
    BadEntry,
    Entry,
    EntryInfo,
    describe_entry,
    encode_entry,
    read_entry,
    set_aside,
    write_atomically,
)
from jitgemm.jit.nvrtc import Compiled, nvrtc_info
from jitgemm.jit.source import KernelSource

LOCK_TIMEOUT_S = 10.0
STALE_AFTER_S = 3600.0
"""Age at which a temporary file or lock is taken to be a dead process's: no compilation lasts that long."""

_LEFTOVER = re.compile(r"[0-9a-f]{64}\.(lock|\w+\.tmp)")


class KernelCache:
    """Kernels by content, over one or more folders.

    Args:
        roots: folders in reading order; the first writable one receives what is compiled. None asks
            `settings.cache_roots()` at every use.
        lock_timeout_s: how long to wait for another process that compiles the same kernel before compiling it as well.

    Thread-safe. Creating one touches no disk.
    """

    def __init__(self, roots: Sequence[Path] | None = None, *, lock_timeout_s: float = LOCK_TIMEOUT_S):
        self._roots = None if roots is None else [Path(root) for root in roots]
        self._lock_timeout_s = lock_timeout_s
        self._guard = threading.Lock()
        self._key_locks: dict[str, threading.Lock] = {}
        self._unwritten: dict[str, Entry] = {}
        self._warned: set[str] = set()

    @property
    def roots(self) -> list[Path]:
        return settings.cache_roots() if self._roots is None else list(self._roots)

    # Looking up and compiling

    def lookup(self, key: str) -> Entry | None:
        """The entry of `key` from the first root that has a good one, or None. Bad ones on the way are set aside."""
        for root in self.roots:
            path = root / (key + SUFFIX)
            try:
                with open(path, "rb") as file:
                    try:
                        entry = Entry(key, path, *read_entry(file, key))
                    except BadEntry as problem:
                        set_aside(path, os.fstat(file.fileno()), problem)
                        continue
            except OSError:
                # Absent, no permission, not a folder, a network file system's bad moment: all mean "not here".
                continue
            with suppress(OSError):
                os.utime(path)
            return entry
        return self._unwritten.get(key)

    def get_or_compile(self, request: KernelSource, *, allow_compile: bool | None = None) -> tuple[Entry, bool]:
        """The kernel, and whether this call compiled it.

        Args:
            allow_compile: whether a missing kernel may be compiled, without a word; None asks `JITGEMM_JIT`.

        Raises:
            CacheMissError: it is missing and must not be compiled.
            CompileError: it is missing and does not compile.
        """
        key = request.key(nvrtc_info())
        entry = self.lookup(key)
        if entry is not None:
            return entry, False
        mode = settings.jit_mode() if allow_compile is None else None
        if mode == "off" or allow_compile is False:
            why = "JITGEMM_JIT=off" if mode else "this call must not compile (a CUDA graph is being captured)"
            folders = os.pathsep.join(map(str, self.roots))
            hint = f"; compile it ahead: {request.warmup}" if request.warmup else ""
            raise CacheMissError(f"kernel {request.label} ({key[:12]}) is not in the cache ({folders}) and {why}{hint}")
        with self._guard:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            root = self._writable_root()
            with self._file_lock(root, key):
                entry = self.lookup(key)  # another thread or process may have compiled it meanwhile
                if entry is not None:
                    return entry, False
                if mode == "warn":
                    warnings.warn(f"JITGEMM_JIT=warn: compiling kernel {request.label}", stacklevel=2)
                compiled = request.compile()
                self._dump(request, key, compiled)
                return self._publish(root, request, key, compiled), True

    def _writable_root(self) -> Path | None:
        """The first root that takes files; created if need be."""
        for root in self.roots:
            with suppress(OSError):
                root.mkdir(parents=True, exist_ok=True)
                if os.access(root, os.W_OK | os.X_OK):
                    return root
        return None

    @contextmanager
    def _file_lock(self, root: Path | None, key: str) -> Iterator[None]:
        """Hold the key's lock among processes, or go on without it: one that cannot be had only costs a compilation."""
        if root is None:
            yield
            return
        import filelock

        path = root / f"{key}.lock"
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=self._lock_timeout_s, poll_interval=0.01)
        except (filelock.Timeout, OSError, NotImplementedError):
            yield
            return
        try:
            yield
        finally:
            # Removed while held. Whoever waits on this file gets a lock without a name, finds the entry published and
            # compiles nothing; if publishing failed, two may compile at once, which is allowed.
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                lock.release()

    def _publish(self, root: Path | None, request: KernelSource, key: str, compiled: Compiled) -> Entry:
        """Write the entry beside its final name and rename it there; on failure warn once and keep it in memory."""
        metadata = _metadata(request, key, compiled)
        if root is None:
            folders = os.pathsep.join(map(str, self.roots))
            return self._keep_unwritten(key, metadata, compiled.cubin, folders, "no folder is writable")
        path = root / (key + SUFFIX)
        try:
            write_atomically(path, encode_entry(metadata, compiled.cubin))
        except OSError as error:
            return self._keep_unwritten(key, metadata, compiled.cubin, str(root), str(error))
        for stale in _leftovers(root, STALE_AFTER_S):
            with suppress(OSError):
                stale.unlink()
        return Entry(key, path, metadata, compiled.cubin)

    def _keep_unwritten(self, key: str, metadata: dict, cubin: bytes, folder: str, problem: str) -> Entry:
        if folder not in self._warned:
            self._warned.add(folder)
            warnings.warn(
                f"kernel cache {folder} cannot be written ({problem}); kernels are compiled anew in every process",
                stacklevel=5,
            )
        self._unwritten[key] = entry = Entry(key, None, metadata, cubin)
        return entry

    def _dump(self, request: KernelSource, key: str, compiled: Compiled) -> None:
        try:
            folder = settings.dump_dir()
            if folder is None:
                return
            folder.mkdir(parents=True, exist_ok=True)
            stem = f"{request.label}-{key[:12]}"
            (folder / f"{stem}.cu").write_text(request.source, encoding="utf-8")
            (folder / f"{stem}.log").write_text(compiled.log, encoding="utf-8")
            (folder / f"{stem}.cubin").write_bytes(compiled.cubin)
        except OSError as error:
            warnings.warn(f"JITGEMM_DUMP_DIR: {error}", stacklevel=4)

    # Inspection and maintenance

    def entries(self) -> Iterator[EntryInfo]:
        """Every entry of every root, hidden ones too: a key may stand in two roots. Reads no cubin."""
        for root in self.roots:
            for path in _files(root, SUFFIX):
                with suppress(OSError):
                    yield describe_entry(root, path)

    def read(self, key_or_prefix: str) -> Entry:
        """The entry whose key starts so; leaves its last use alone. JitGemmError if none, several or a bad one does."""
        paths: dict[str, Path] = {}
        for root in self.roots:
            for path in _files(root, SUFFIX):
                if path.name.startswith(key_or_prefix):
                    paths.setdefault(path.stem, path)
        if not paths:
            raise JitGemmError(f"no kernel in the cache has a key that starts with {key_or_prefix!r}")
        if len(paths) > 1:
            keys = ", ".join(key[:16] for key in sorted(paths)[:8])
            raise JitGemmError(f"{len(paths)} kernels have a key that starts with {key_or_prefix!r}: {keys}")
        ((key, path),) = paths.items()
        try:
            with open(path, "rb") as file:
                return Entry(key, path, *read_entry(file, key))
        except (BadEntry, OSError) as problem:
            raise JitGemmError(f"{path}: {problem}") from problem

    def verify(self) -> list[tuple[EntryInfo, str | None]]:
        """Every entry with what is wrong with it, hashes compared; None for a good one. Changes nothing."""
        results = []
        for info in self.entries():
            try:
                with open(info.path, "rb") as file:
                    read_entry(file, info.key)
                problem = None
            except (BadEntry, OSError) as error:
                problem = str(error)
            results.append((info, problem))
        return results

    def prune(
        self, older_than_s: float | None = None, max_bytes: int | None = None, dry_run: bool = False
    ) -> list[EntryInfo]:
        """Remove entries of the writable root that were not used for `older_than_s`, then the least recently used ones
        until `max_bytes` hold the rest. Bad and set-aside entries and what dead processes left always go.

        Returns:
            What was removed, or with `dry_run` what would be.
        """
        root = self._writable_root()
        if root is None:
            return []
        now, used_bytes, doomed = time.time(), 0, []
        for info in sorted(self._all_files(root), key=lambda info: info.last_used, reverse=True):
            if not info.ok or (older_than_s is not None and now - info.last_used > older_than_s):
                doomed.append(info)
                continue
            used_bytes += info.size
            if max_bytes is not None and used_bytes > max_bytes:
                doomed.append(info)
        return _remove(root, doomed, STALE_AFTER_S, dry_run)

    def clear(self) -> list[EntryInfo]:
        """Remove every entry of the writable root, set-aside ones, locks and temporary files; return the entries."""
        root = self._writable_root()
        return [] if root is None else _remove(root, self._all_files(root), 0.0, False)

    @staticmethod
    def _all_files(root: Path) -> list[EntryInfo]:
        found = []
        for path in (*_files(root, SUFFIX), *_files(root, SET_ASIDE)):
            with suppress(OSError):
                found.append(describe_entry(root, path))
        return found


def _metadata(request: KernelSource, key: str, compiled: Compiled) -> dict:
    import jitgemm

    nvrtc = nvrtc_info()
    return {
        "schema": SCHEMA,
        "key": key,
        "label": request.label,
        "spec": dict(request.spec),
        "source": request.source,
        "log": compiled.log,
        "options": list(request.options),
        "yields": str(request.yields),
        "arch": next((o.split("=", 1)[1] for o in request.options if o.startswith("-arch=")), ""),
        "nvrtc": {"version": list(nvrtc.version), "build": nvrtc.build},
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "serialised": compiled.serialised,
        "stack_bytes": compiled.stack_bytes,
        "smem_static": compiled.smem_static,
        "seconds": round(compiled.seconds, 4),
        "created": time.time(),
        "jitgemm": getattr(jitgemm, "__version__", "unknown"),
        "cubin_bytes": len(compiled.cubin),
        "cubin_sha256": hashlib.sha256(compiled.cubin).hexdigest(),
    }


def _files(root: Path, suffix: str) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.name.endswith(suffix) and path.is_file())
    except OSError:
        return []


def _leftovers(root: Path, older_than_s: float) -> Iterator[Path]:
    """This cache's temporary files and locks that no living process can still want."""
    for path in (*_files(root, ".tmp"), *_files(root, ".lock")):
        with suppress(OSError):
            # The folder may be shared with others (somebody's /tmp): only what bears a key is ours to remove.
            if _LEFTOVER.fullmatch(path.name) and time.time() - path.stat().st_mtime >= older_than_s:
                yield path


def _remove(root: Path, doomed: Iterable[EntryInfo], leftovers_after_s: float, dry_run: bool) -> list[EntryInfo]:
    if dry_run:
        return list(doomed)
    for path in _leftovers(root, leftovers_after_s):
        with suppress(OSError):
            path.unlink()
    removed = []
    for info in doomed:
        with suppress(OSError):
            info.path.unlink()
            removed.append(info)
    return removed
