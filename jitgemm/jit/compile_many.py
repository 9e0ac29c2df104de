"""Compiling many kernels before they are needed, in threads, under a progress bar. Knows sources, not their users."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakSet

from jitgemm.errors import JitGemmError
from jitgemm.jit.cache import KernelCache
from jitgemm.jit.entry import Entry
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.jit.source import KernelSource

if TYPE_CHECKING:
    from rich.console import Console


_POOLS: WeakSet[ThreadPoolExecutor] = WeakSet()


def _begin_no_more() -> None:
    for pool in list(_POOLS):
        pool.shutdown(wait=False, cancel_futures=True)


# At the interpreter's end, also by SIGTERM, and before concurrent.futures' own hook, which runs all that was submitted.
threading._register_atexit(_begin_no_more)  # type: ignore[attr-defined]


def default_threads() -> int:
    """The CPUs that this process may run on; a container's quota counts too."""
    cpus = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, min(cpus, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no control group, or "max"
        return cpus


@dataclass
class Job:
    """A kernel that is wanted before it is called, and what became of it.

    Attributes:
        entry: its cache entry, None while it has none.
        compiled: whether this job compiled it.
        error: why it does not compile.
    """

    source: KernelSource
    key: str
    entry: Entry | None = None
    compiled: bool = False
    error: JitGemmError | None = None

    @property
    def stored(self) -> bool:
        """Whether a folder of the cache has it."""
        return self.entry is not None and self.entry.path is not None


def look_up(cache: KernelCache, source: KernelSource) -> Job:
    """A kernel as the cache has it. Compiles nothing."""
    key = source.key(nvrtc_info())
    return Job(source, key, cache.lookup(key))


def compile_all(
    cache: KernelCache, jobs: Sequence[Job], threads: int, console: Console, *, bar: bool = True
) -> Generator[Job]:
    """Looks up or compiles each kernel, also under JITGEMM_JIT=off, and yields the jobs as they are done.

    An exception, Ctrl-C too, leaves at once: nothing more is begun, and what is being compiled goes into the cache when
    it is done, in threads that only the interpreter's end waits for. That end begins nothing more either, if another
    thread runs this.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(TextColumn("compiling"), *columns, console=console, disable=not bar)
    pool = ThreadPoolExecutor(threads)
    _POOLS.add(pool)
    try:
        with progress:
            task = progress.add_task("", total=len(jobs))
            futures = {pool.submit(cache.get_or_compile, job.source, allow_compile=True): job for job in jobs}
            done: SimpleQueue[Future[tuple[Entry, bool]]] = SimpleQueue()
            for future in futures:
                future.add_done_callback(done.put)  # `as_completed` waits for ever for those that are cancelled
            for _ in jobs:
                job = futures[future := done.get()]
                try:
                    job.entry, job.compiled = future.result()
                except JitGemmError as error:
                    job.error = error
                yield job
                progress.update(task, advance=1, description=job.source.label)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
