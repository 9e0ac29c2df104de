"""The GPUs of this machine, as the selector sees them. Imports torch only when a GPU is asked for."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from jitgemm.errors import UnsupportedDeviceError
from jitgemm.select.devices import DeviceSpec, device_from_properties, device_spec


@cache
def device_of(index: int) -> DeviceSpec:
    """The figures of a GPU of this machine. UnsupportedDeviceError if it is no Hopper."""
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    if (properties.major, properties.minor) != (9, 0):
        raise UnsupportedDeviceError(
            f"cuda:{index} is a {properties.name} of compute capability {properties.major}.{properties.minor}; "
            "jitgemm's kernels need 9.0 (Hopper)"
        )
    from jitgemm.runtime import driver

    clock, memory_clock, memory_bits = (
        driver.device_attribute(index, name) for name in ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
    )
    return device_from_properties(
        properties.name, properties.multi_processor_count, properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor, clock_mhz=clock / 1000, memory_mhz=memory_clock / 1000,
        memory_bits=memory_bits,
    )  # fmt: skip


def local_device() -> DeviceSpec | None:
    """The current Hopper GPU, or None. Looks for a driver before it pays for importing torch."""
    if not os.path.exists("/dev/nvidiactl"):
        return None
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return device_of(torch.cuda.current_device())


def pick_device(name: str | None) -> DeviceSpec:
    """The device of this name, as `device_spec` takes it; for None the Hopper GPU at hand, else an H200."""
    if name is not None:
        return device_spec(name)
    return local_device() or device_spec("h200")
