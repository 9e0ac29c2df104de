"""Figures of the GPUs that jitgemm can choose kernels for. Plain data; only a GPU of this machine is asked of torch.

Shared memory, registers and SM counts are NVIDIA's published figures (CUDA programming guide, compute capability 9.0;
data sheets). The H200's rates were measured (`docs/notes/`): HBM as a stream of weights under programmatic dependent
launch, tensor rate as wgmma on decoded weights. The others' are the H200's scaled by the data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the selector needs to know of a GPU.

    Rates are what a kernel can reach, not what a datasheet promises; sources stand in `jitgemm/device.py`.

    Attributes:
        name: short name, such as "h200".
        num_sms: streaming multiprocessors.
        smem_per_block: bytes of dynamic shared memory one CTA may ask for.
        smem_per_sm: bytes of shared memory an SM has for all its CTAs; each CTA also costs 1 KiB of the system's.
        l2_bytes: size of the L2.
        hbm_bytes_per_us: streaming read rate of device memory, bytes per microsecond.
        tensor_ops_per_us: dense 8-bit multiply-adds x 2 per microsecond, all SMs together.
        clock_mhz: SM clock under tensor load.
    """

    name: str
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    hbm_bytes_per_us: float
    tensor_ops_per_us: float
    clock_mhz: float


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
        if not 1 <= number <= 1e15:
            raise ValueError(f"device: {figure!r} must be at least 1 and at most 1e15")
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


