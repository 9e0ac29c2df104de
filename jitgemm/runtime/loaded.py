"""The kernels that this process has loaded: one table, filled from one cache; and how many of their CTAs a GPU holds.

Knows sources and the driver; nothing of what a kernel computes, nor of how it is launched.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from jitgemm.errors import CacheMissError
from jitgemm.jit.cache import process_cache as cache
from jitgemm.jit.entry import Entry
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.jit.source import KernelSource
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of

Spec = TypeVar("Spec", bound=Hashable)

kernels: dict[tuple[Hashable, int], driver.LoadedKernel] = {}
"""By spec and device; specs of different classes never compare equal."""
_lock = threading.Lock()
_warned_of_slow = False


@dataclass(frozen=True)
class KernelFamily(Generic[Spec]):
    """Kernels that one template renders from specs, all that is constant in a kernel.

    Attributes:
        source: renders a spec.
        smem_bytes: the most dynamic shared memory that a launch of a spec's kernel asks for.
        call: what loads a kernel when it is called once, for the error below.
    """

    source: Callable[[Spec], KernelSource]
    smem_bytes: Callable[[Spec], int]
    call: str

    def load(self, spec: Spec, device: int) -> driver.LoadedKernel:
        """The kernel, ready to launch on the device: in memory, else from the cache, else compiled.

        Raises:
            CacheMissError: a CUDA graph is being captured, and loading would break that; or compiling is switched off.
        """
        kernel = kernels.get((spec, device))
        if kernel is not None:
            return kernel
        source = self.source(spec)
        if torch.cuda.is_current_stream_capturing():
            raise CacheMissError(
                f"kernel {source.label} is not loaded, and loading it now would break the CUDA graph being captured: "
                f"call {self.call} before the capture"
            )
        # Before anything is compiled: a cubin that the driver cannot load is of no use.
        driver.check_nvrtc_against_driver(nvrtc_info().version)
        entry, _ = cache.get_or_compile(source)
        if entry.slow_build and not getattr(spec, "debug", False):
            _warn_of_slow(entry)
        with _lock:
            kernel = kernels.get((spec, device))
            if kernel is None:
                smem = self.smem_bytes(spec)
                kernel = driver.load_kernel(entry.cubin, source.function, device=device, smem_bytes=smem)
                kernels[spec, device] = kernel
        return kernel


def resident(kernel: driver.LoadedKernel, device: int, threads: int, smem: int = 0, cluster: int = 1) -> int:
    """CTAs of a kernel that a device holds at once, a multiple of its clusters."""
    driver.use_context(device)
    if cluster > 1:
        return cluster * driver.resident_clusters(kernel, cluster, threads, smem)
    return max(1, driver.resident_ctas(kernel, threads, smem)) * device_of(device).num_sms


def _warn_of_slow(entry: Entry) -> None:
    """Says once a process that a kernel computes what it should and takes longer than it should."""
    global _warned_of_slow
    if not _warned_of_slow:
        built = f"NVRTC {entry.metadata['nvrtc']['build']} built it with {entry.slow_because}"
        message = f"kernel {entry.metadata['label']} is slower than it should be: {built}. Its results are right. "
        message += "Please report this; `jitgemm cache ls --sort spills` lists such kernels"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    _warned_of_slow = True
