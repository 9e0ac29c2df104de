"""The kernels that this process has loaded, GEMMs and quantisers alike: one table, filled from one cache.

Knows sources and the driver; nothing of what a kernel computes, nor of how it is launched.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from jitgemm.activations.kernel import QuantizeSpec
from jitgemm.errors import CacheMissError
from jitgemm.jit.cache import process_cache as cache
from jitgemm.jit.entry import Entry
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.jit.source import KernelSource
from jitgemm.kernel.spec import KernelSpec
from jitgemm.runtime import driver

Spec = TypeVar("Spec", KernelSpec, QuantizeSpec)

kernels: dict[tuple[KernelSpec | QuantizeSpec, int], driver.LoadedKernel] = {}
"""By spec and device; specs of different classes never compare equal."""
_lock = threading.Lock()
_warned_of_slow = False


def get_or_load(
    spec: Spec, device: int, source: Callable[[Spec], KernelSource], *, name: str, smem_bytes: int, call: str
) -> driver.LoadedKernel:
    """The kernel, ready to launch on the device: in memory, else from the cache, else compiled.

    Args:
        source: renders the spec; asked only for a kernel that is not in memory.
        name: the kernel's function.
        smem_bytes: the most dynamic shared memory that a launch will ask for.
        call: what loads the kernel when it is called once, for the error below.

    Raises:
        CacheMissError: a CUDA graph is being captured, and loading would break the capture; or compiling is switched
            off.
    """
    kernel = kernels.get((spec, device))
    if kernel is not None:
        return kernel
    if torch.cuda.is_current_stream_capturing():
        raise CacheMissError(
            f"kernel {spec.label} is not loaded, and loading it now would break the CUDA graph being captured: call "
            f"{call} before the capture"
        )
    # Before anything is compiled: a cubin that the driver cannot load is of no use.
    driver.check_nvrtc_against_driver(nvrtc_info().version)
    entry, _ = cache.get_or_compile(source(spec))
    if entry.slow_because and not getattr(spec, "debug", False):
        _warn_of_slow(entry)
    with _lock:
        kernel = kernels.get((spec, device))
        if kernel is None:
            kernel = kernels[spec, device] = driver.load_kernel(entry.cubin, name, device=device, smem_bytes=smem_bytes)
    return kernel


def _warn_of_slow(entry: Entry) -> None:
    """Says once a process that a kernel computes what it should and takes longer than it should."""
    global _warned_of_slow
    if _warned_of_slow:
        return
    warnings.warn(
        f"kernel {entry.metadata['label']} is slower than it should be: NVRTC {entry.metadata['nvrtc']['build']} built "
        f"it with {entry.slow_because}. Its results are right. Please report this; `jitgemm cache ls --sort spills` "
        "lists such kernels",
        RuntimeWarning,
        stacklevel=2,
    )
    _warned_of_slow = True
