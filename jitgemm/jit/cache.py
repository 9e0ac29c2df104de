"""The on-disk cache of compiled kernels: rendered source in, cubin out, NVRTC only where no folder has the kernel.

Knows files, keys and NVRTC; knows nothing of torch, of GPUs or of what a kernel computes. Two promises shape it. A
cubin that comes out of here is whole and was built from exactly the source asked for. And nothing the disk does (a bad
entry, a full or read-only folder, a lock nobody gives back) fails a call that could have compiled. Locks only save
work; correctness rests on entries that appear by rename and carry their own checksum. Whose entries are loaded:
docs/cache.md, "Who is trusted". What is not trusted is not removed either.
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
from jitgemm.jit.entry import SCHEMA, SUFFIX, BadEntry, Entry, EntryInfo, UntrustedEntry
from jitgemm.jit.entry import describe_entry, encode_entry, load_entry, write_atomically
from jitgemm.jit.nvrtc import Compiled, nvrtc_info
from jitgemm.jit.source import KernelSource

LOCK_TIMEOUT_S = 10.0
STALE_AFTER_S = 3600.0
"""Age at which a temporary file or lock is taken to be a dead process's: no compilation lasts that long."""

# The folder may be shared with others (somebody's /tmp): only what bears a key is ours to read or remove.
_ENTRY = re.compile(r"[0-9a-f]{64}\.jgk")
_ENTRY_OR_SET_ASIDE = re.compile(r"[0-9a-f]{64}\.jgk(\.bad)?")
_LEFTOVER = re.compile(r"[0-9a-f]{64}\.(lock|\w+\.tmp)")


class KernelCache:
    """Kernels by content, over one or more folders.

    Args:
        roots: folders in reading order; the first one that takes it receives what is compiled. None asks
            `settings.cache_roots()` at every use.
        lock_timeout_s: how long to wait for another process that compiles the same kernel before compiling it as well.

    Thread-safe, and usable in a forked child. Creating one touches no disk.
    """

    def __init__(self, roots: Sequence[Path] | None = None, *, lock_timeout_s: float = LOCK_TIMEOUT_S):
        self._roots = None if roots is None else [Path(root) for root in roots]
        self._lock_timeout_s = lock_timeout_s
        self._unwritten: dict[str, Entry] = {}
        self._warned: set[tuple[str, Path | None]] = set()
        self._key_locks: dict[str, threading.Lock] = {}
        os.register_at_fork(after_in_child=self._key_locks.clear)  # their holders are threads of the parent

    @property
    def roots(self) -> list[Path]:
        return settings.cache_roots() if self._roots is None else list(self._roots)

    # Looking up and compiling

    def lookup(self, key: str) -> Entry | None:
        """The entry of `key` from the first root that has a good one, or None. Bad ones on the way are set aside."""
        for root in self.roots:
            path = root / (key + SUFFIX)
            try:
                entry = load_entry(path, aside=True)
            except UntrustedEntry as problem:
                self._warn_once("trust", root, f"kernel cache entry {path} is not trusted and not loaded: {problem}")
                continue
            except (BadEntry, OSError):
                # Absent, no permission, not a file, a network file system's bad moment: all mean "not here".
                continue
            with suppress(OSError):
                os.utime(path)
            return entry
        return self._unwritten.get(key)

    def get_or_compile(self, request: KernelSource, *, allow_compile: bool | None = None) -> tuple[Entry, bool]:
        """The kernel, and whether this call compiled it. One that no folder took is offered to the folders again.

        Args:
            allow_compile: whether a missing kernel may be compiled, without a word; None asks `JITGEMM_JIT`.

        Raises:
            CacheMissError: it is missing and must not be compiled.
            CompileError: it is missing and does not compile.
        """
        key = request.key(nvrtc_info())
        entry = self.lookup(key)
        if entry is not None:
            return (entry if entry.path else self._store(key, entry.metadata, entry.cubin)), False
        mode = settings.jit_mode() if allow_compile is None else None
        if mode == "off" or allow_compile is False:
            why = "JITGEMM_JIT=off" if mode else "this call must not compile (a CUDA graph is being captured)"
            folders = os.pathsep.join(map(str, self.roots))
            hint = f"; compile it ahead: {request.warmup}" if request.warmup else ""
            raise CacheMissError(f"kernel {request.label} ({key[:12]}) is not in the cache ({folders}) and {why}{hint}")
        with self._key_locks.setdefault(key, threading.Lock()), self._file_lock(key):
            entry = self.lookup(key)  # another thread or process may have compiled it meanwhile
            if entry is not None:
                return entry, False
            if mode == "warn":
                warnings.warn(f"JITGEMM_JIT=warn: compiling kernel {request.label}", stacklevel=2)
            compiled = request.compile()
            _dump(request, key, compiled)
            return self._store(key, _metadata(request, key, compiled), compiled.cubin), True

    def _writable_roots(self) -> Iterator[Path]:
        """The roots that permit writing, each created when it is asked for. Their disks may still be full."""
        for root in self.roots:
            try:
                root.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
            if os.access(root, os.W_OK | os.X_OK):
                yield root

    def writable_root(self) -> Path | None:
        """The first root that permits writing, which `prune` and `clear` work on; created if need be."""
        return next(self._writable_roots(), None)

    @contextmanager
    def _file_lock(self, key: str) -> Iterator[None]:
        """Hold the key's lock among processes, or go on without it: one that cannot be had only costs a compilation."""
        import filelock

        root = self.writable_root()
        path = (root or Path()) / f"{key}.lock"
        lock = filelock.FileLock(path)
        with suppress(filelock.Timeout, OSError, NotImplementedError):
            if root is not None and not _is_second_name(path):
                lock.acquire(timeout=self._lock_timeout_s, poll_interval=0.01)
        try:
            yield
        finally:
            # Removed while held. Whoever waits on this file gets a lock without a name, finds the entry published and
            # compiles nothing; if publishing failed, two may compile at once, which is allowed.
            if lock.is_locked:
                with suppress(OSError):
                    os.unlink(lock.lock_file)
                with suppress(OSError):
                    lock.release()

    def _store(self, key: str, metadata: dict, cubin: bytes) -> Entry:
        """Write the entry next to its final name and rename it, in the first root that takes it; else warn once
        and keep it in memory."""
        data = encode_entry(metadata, cubin)
        failed: dict[Path, str] = {}
        for root in self._writable_roots():
            path = root / (key + SUFFIX)
            try:
                write_atomically(path, data)
            except OSError as error:
                failed[root] = error.strerror or str(error)
                continue
            _remove_leftovers(root, STALE_AFTER_S)
            for folder, why in failed.items():
                message = f"kernel cache {folder} cannot be written ({why}); {root} is used instead"
                self._warn_once("full", folder, message)
            self._unwritten.pop(key, None)
            return Entry(key, path, metadata, cubin)
        folders = os.pathsep.join(map(str, self.roots))
        why = "; ".join(failed.values()) or ("no folder is writable" if folders else "there is no folder")
        problem = f"kernel cache {folders} cannot be written ({why})"
        message = f"{problem}; every process compiles its kernels again. JITGEMM_CACHE_DIR names folders"
        self._warn_once("unwritten", None, message)
        self._unwritten[key] = entry = Entry(key, None, metadata, cubin, problem)
        return entry

    def _warn_once(self, about: str, folder: Path | None, message: str) -> None:
        if (about, folder) not in self._warned:
            self._warned.add((about, folder))
            warnings.warn(message, stacklevel=2)

    # Inspection and maintenance

    def entries(self) -> Iterator[EntryInfo]:
        """Every entry of every root, hidden ones too: a key may stand in two roots. Reads no cubin."""
        return _describe(self.roots, _ENTRY)

    def read(self, key_or_prefix: str) -> Entry:
        """The entry whose key starts so; leaves its last use alone. JitGemmError if none, several or a bad one does."""
        matching = [path for path in _files(self.roots, _ENTRY) if path.name.startswith(key_or_prefix)]
        paths = {path.stem: path for path in reversed(matching)}  # of two roots the first one's
        if not paths:
            raise JitGemmError(f"no kernel in the cache has a key that starts with {key_or_prefix!r}")
        if len(paths) > 1:
            keys = ", ".join(key[:16] for key in sorted(paths)[:8])
            raise JitGemmError(f"{len(paths)} kernels have a key that starts with {key_or_prefix!r}: {keys}")
        (path,) = paths.values()
        try:
            return load_entry(path)
        except (BadEntry, OSError) as problem:
            raise JitGemmError(f"{path}: {problem}") from problem

    def verify(self) -> list[tuple[EntryInfo, str | None]]:
        """Every entry with what is wrong with it, hashes compared; None for a good one. Changes nothing."""
        results: list[tuple[EntryInfo, str | None]] = []
        for info in self.entries():
            problem = None
            try:
                load_entry(info.path)
            except (BadEntry, OSError) as error:
                problem = str(error)
            results.append((info, problem))
        return results

    def prune(
        self,
        older_than_s: float | None = None,
        max_bytes: int | None = None,
        dry_run: bool = False,
        leftovers_after_s: float = STALE_AFTER_S,
    ) -> list[EntryInfo]:
        """Remove entries of the writable root that were not used for `older_than_s`, then the least recently used ones
        until `max_bytes` hold the rest. Bad and set-aside entries and what dead processes left always go.

        Returns:
            What was removed, or with `dry_run` what would be.
        """
        root = self.writable_root()
        if root is None:
            return []
        now, used_bytes, doomed = time.time(), 0, []
        own = [info for info in _describe([root], _ENTRY_OR_SET_ASIDE) if not info.foreign]
        for info in sorted(own, key=lambda info: info.last_used, reverse=True):
            if info.ok and (older_than_s is None or now - info.last_used <= older_than_s):
                used_bytes += info.size
                if max_bytes is None or used_bytes <= max_bytes:
                    continue
            doomed.append(info)
        if dry_run:
            return doomed
        _remove_leftovers(root, leftovers_after_s)
        return [info for info in doomed if _removed(info.path)]

    def clear(self) -> list[EntryInfo]:
        """Remove every entry of the writable root, set-aside ones, locks and temporary files; return the entries."""
        return self.prune(max_bytes=0, leftovers_after_s=0.0)


process_cache = KernelCache()
"""The one that calls, warm-ups and commands of this process share: what no folder took is found again here."""


def _metadata(request: KernelSource, key: str, compiled: Compiled) -> dict:
    import jitgemm

    nvrtc = nvrtc_info()
    built = ("source", "log", "registers", "spill_bytes", "serialised", "stack_bytes", "smem_static")
    return {
        "schema": SCHEMA,
        "key": key,
        "label": request.label,
        "spec": dict(request.spec),
        "options": list(request.options),
        "yields": str(request.yields),
        "arch": next((o.split("=", 1)[1] for o in request.options if o.startswith("-arch=")), ""),
        "nvrtc": {"version": list(nvrtc.version), "build": nvrtc.build},
        "seconds": round(compiled.seconds, 4),
        "created": time.time(),
        "jitgemm": jitgemm.__version__,
        "cubin_bytes": len(compiled.cubin),
        "cubin_sha256": hashlib.sha256(compiled.cubin).hexdigest(),
    } | {name: getattr(compiled, name) for name in built}


def _dump(request: KernelSource, key: str, compiled: Compiled) -> None:
    try:
        folder = settings.dump_dir()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        files = {"cu": compiled.source.encode(), "log": compiled.log.encode(), "cubin": compiled.cubin}
        for suffix, data in (files | {"unpatched.cubin": compiled.built}).items():
            if data is not None:  # by rename, which replaces a link instead of following it
                write_atomically(folder / f"{request.label}-{key[:12]}.{suffix}", data)
    except OSError as error:
        warnings.warn(f"JITGEMM_DUMP_DIR: {error}", stacklevel=4)


def _files(roots: Iterable[Path], name: re.Pattern[str]) -> Iterator[Path]:
    for root in roots:
        with suppress(OSError):
            yield from sorted(path for path in root.iterdir() if name.fullmatch(path.name) and path.is_file())


def _describe(roots: Iterable[Path], name: re.Pattern[str]) -> Iterator[EntryInfo]:
    for path in _files(roots, name):
        with suppress(OSError):
            yield describe_entry(path)


def _remove_leftovers(root: Path, older_than_s: float) -> None:
    """Remove temporary files and locks that no living process can still want."""
    for path in _files([root], _LEFTOVER):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= older_than_s:
                path.unlink()


def _is_second_name(lock: Path) -> bool:
    """Whether it is a hard link of another file, which filelock before 4 would empty: another user's trap."""
    try:
        return lock.lstat().st_nlink > 1
    except OSError:
        return False


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
