"""Compiling many kernels before they are needed, in threads, under a progress bar. Knows sources, not their users."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from jitgemm.errors import JitGemmError
from jitgemm.jit.cache import KernelCache
from jitgemm.jit.entry import Entry
from jitgemm.jit.source import KernelSource

if TYPE_CHECKING:
    from rich.console import Console


def default_threads() -> int:
    """The CPUs that this process may run on; a container's quota counts too."""
    cpus = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, min(cpus, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no control group, or "max"
        return cpus


def compile_all(
    cache: KernelCache, sources: Sequence[KernelSource], threads: int, console: Console, *, bar: bool = True
) -> Generator[tuple[int, tuple[Entry, bool] | JitGemmError]]:
    """Looks up or compiles each source, also under JITGEMM_JIT=off, and yields them as they are done.

    An exception, Ctrl-C too, leaves at once: nothing more is begun, and what is being compiled goes into the cache when
    it is done, in threads that only the interpreter's end waits for.

    Yields:
        The source's index, and what `KernelCache.get_or_compile` returned, or the error it raised.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(TextColumn("compiling"), *columns, console=console, disable=not bar)
    pool = ThreadPoolExecutor(threads)
    try:
        with progress:
            task = progress.add_task("", total=len(sources))
            futures = {
                pool.submit(cache.get_or_compile, source, allow_compile=True): index
                for index, source in enumerate(sources)
            }
            for future in as_completed(futures):
                index = futures[future]
                try:
                    yield index, future.result()
                except JitGemmError as error:
                    yield index, error
                progress.update(task, advance=1, description=sources[index].label)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
