"""Figures of the GPUs that jitgemm can choose kernels for. Plain data; only a GPU of this machine is asked of torch.

Shared memory, registers and SM counts are NVIDIA's published figures (CUDA programming guide, compute capability 9.0;
data sheets). The H200's rates were measured (`docs/notes/`): HBM as a stream of weights under programmatic dependent
launch, tensor rate as wgmma on decoded weights. The others' are the H200's scaled by the data sheets.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from functools import lru_cache

from jitgemm.errors import UnsupportedDeviceError
from jitgemm.spec import DeviceSpec

_H200 = DeviceSpec(
    name="h200",
    num_sms=132,
    smem_per_block=232448,
    smem_per_sm=233472,
    l2_bytes=60 << 20,
    hbm_bytes_per_us=4.5e6,
    tensor_ops_per_us=1.80e9,
    clock_mhz=1755.0,
)

DEVICES: dict[str, DeviceSpec] = {
    "h200": _H200,
    "h100-sxm": replace(_H200, name="h100-sxm", l2_bytes=50 << 20, hbm_bytes_per_us=4.5e6 * 3.35 / 4.8),
    "h100-pcie": replace(
        _H200,
        name="h100-pcie",
        num_sms=114,
        l2_bytes=50 << 20,
        hbm_bytes_per_us=4.5e6 * 2.0 / 4.8,
        tensor_ops_per_us=1.80e9 * 1513 / 1979,
        clock_mhz=1620.0,
    ),
    "h20": replace(
        _H200,
        name="h20",
        num_sms=78,
        hbm_bytes_per_us=4.5e6 * 4.0 / 4.8,
        tensor_ops_per_us=1.80e9 * 296 / 1979,
        clock_mhz=1830.0,
    ),
}

_SHORT = {
    "sms": "num_sms",
    "smem": "smem_per_block",
    "l2": "l2_bytes",
    "hbm": "hbm_bytes_per_us",
    "tensor": "tensor_ops_per_us",
}


def device_spec(name: str) -> DeviceSpec:
    """The device of this name, or one given by figures.

    Args:
        name: a key of `DEVICES`, optionally followed by figures that differ, such as "h200,sms=66" for half an H200;
            figures alone start from the H200. Keys are the fields of `DeviceSpec` or sms, smem, l2 (bytes),
            hbm (bytes/us), tensor (ops/us).

    Raises:
        ValueError: names what is known.
    """
    base, *figures = [part.strip() for part in name.lower().split(",")]
    if "=" in base:
        figures.insert(0, base)
        base = "h200"
    if base not in DEVICES:
        raise ValueError(
            f"device: expected one of {', '.join(DEVICES)} or figures such as 'sms=66,l2=31457280', got {name!r}"
        )
    known = {field.name: field for field in fields(DeviceSpec) if field.name != "name"}
    changes: dict[str, float] = {}
    for figure in figures:
        key, _, value = figure.partition("=")
        key = _SHORT.get(key.strip(), key.strip())
        if key not in known:
            raise ValueError(f"device: unknown figure {figure!r}; expected one of {', '.join([*_SHORT, *known])}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"device: {figure!r} needs a number") from None
        if number <= 0:
            raise ValueError(f"device: {figure!r} must be positive")
        changes[key] = number if "float" in str(known[key].type) else int(number)
    return replace(DEVICES[base], name=name, **changes) if changes else DEVICES[base]


def device_from_properties(name: str, num_sms: int, smem_per_block: int, smem_per_sm: int, l2_bytes: int) -> DeviceSpec:
    """The spec of a GPU at hand: what the driver reports, with the rates of the nearest device of the table.

    A part of a GPU (MIG, a green context) has its share of the rates.
    """
    lowered = name.lower()
    matches = (spec for key, spec in DEVICES.items() if key.split("-")[0] in lowered and key != "h100-pcie")
    nearest = next(matches, _H200)
    if "h100" in lowered and "pcie" in lowered:
        nearest = DEVICES["h100-pcie"]
    share = min(1.0, num_sms / nearest.num_sms)
    return replace(
        nearest,
        num_sms=num_sms,
        smem_per_block=smem_per_block,
        smem_per_sm=smem_per_sm,
        l2_bytes=l2_bytes,
        hbm_bytes_per_us=nearest.hbm_bytes_per_us * share,
        tensor_ops_per_us=nearest.tensor_ops_per_us * share,
    )


@lru_cache(maxsize=None)
def device_of(index: int) -> DeviceSpec:
    """The figures of a GPU of this machine. UnsupportedDeviceError if it is no Hopper."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    if (properties.major, properties.minor) != (9, 0):
        raise UnsupportedDeviceError(
            f"cuda:{index} is a {properties.name} of compute capability {properties.major}.{properties.minor}; "
            "jitgemm's kernels need 9.0 (Hopper)"
        )
    return device_from_properties(
        properties.name,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
        properties.L2_cache_size,
    )


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
