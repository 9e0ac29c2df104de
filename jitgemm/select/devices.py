"""Figures of the GPUs that jitgemm can choose kernels for. Plain data; knows no driver.

Shared memory and SM counts are NVIDIA's published figures (CUDA programming guide, compute capability 9.0; data
sheets). The H200's rates were measured (docs/notes): HBM as a stream of weights under programmatic dependent launch,
tensor rate as wgmma on decoded weights. The others' are the H200's, scaled by the data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

CLUSTER_SHARE = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78, 8: 0.91}
"""Share of the SMs that clusters of a size can fill, one CTA an SM. A cluster lies within a GPC, whose SMs it need not
divide: `cuOccupancyMaxActiveClusters` counts 39 clusters of 3, 30 of 4, 22 of 5, 17 of 6 and 15 of 8 on an H200. The
other devices are taken to behave the same. For predictions only: a launch asks the driver."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the selector needs to know of a GPU. Rates are what a kernel can reach, not what a data sheet promises.

    Attributes:
        name: short name, such as "h200"; of a device that is not in `DEVICES` the driver's name.
        num_sms: streaming multiprocessors.
        smem_per_block: bytes of dynamic shared memory one CTA may ask for.
        smem_per_sm: bytes of shared memory an SM has for all its CTAs; each CTA also costs 1 KiB of the system's.
        hbm_bytes_per_us: streaming read rate of device memory, bytes per microsecond.
        tensor_ops_per_us: dense 8-bit multiply-adds x 2 per microsecond, all SMs together.
        clock_mhz: SM clock under tensor load.
    """

    name: str
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    hbm_bytes_per_us: float
    tensor_ops_per_us: float
    clock_mhz: float

    def resident_clusters(self, size: int, ctas_per_sm: int = 1) -> int:
        """Clusters of so many CTAs that the device holds at once, about."""
        share = CLUSTER_SHARE[size] if ctas_per_sm == 1 else 1.0
        return int(self.num_sms * share) // size


_H200 = DeviceSpec("h200", 132, 232448, 233472, hbm_bytes_per_us=4.5e6, tensor_ops_per_us=1.80e9, clock_mhz=1755.0)


def _like_h200(hbm_tb_per_s: float, fp8_tflops: float, num_sms: int = 132, clock_mhz: float = 1755.0) -> DeviceSpec:
    """The H200 with its rates scaled by data sheets: 4.8 TB/s and 1979 TFLOP/s of dense FP8 are the H200's own."""
    hbm = _H200.hbm_bytes_per_us * hbm_tb_per_s / 4.8
    tensor = _H200.tensor_ops_per_us * fp8_tflops / 1979
    return replace(_H200, num_sms=num_sms, hbm_bytes_per_us=hbm, tensor_ops_per_us=tensor, clock_mhz=clock_mhz)


_TABLE = (
    ("h200", "NVIDIA H200", _H200),
    ("h200-nvl", "NVIDIA H200 NVL", _like_h200(4.8, 1671)),
    ("h100-sxm", "NVIDIA H100 80GB HBM3", _like_h200(3.35, 1979)),
    ("h100-nvl", "NVIDIA H100 NVL", _like_h200(3.9, 1671)),
    ("h100-pcie", "NVIDIA H100 PCIe", _like_h200(2.0, 1513, num_sms=114, clock_mhz=1620.0)),
    ("h800", "NVIDIA H800", _like_h200(3.35, 1979)),
    ("h800-pcie", "NVIDIA H800 PCIe", _like_h200(2.0, 1513, num_sms=114, clock_mhz=1620.0)),
    ("gh200", "NVIDIA GH200 480GB", _like_h200(4.0, 1979)),
    ("gh200-144g", "NVIDIA GH200 144G HBM3e", _like_h200(4.9, 1979)),
    ("h20", "NVIDIA H20", _like_h200(4.0, 296, num_sms=78, clock_mhz=1830.0)),
    ("h20-3e", "NVIDIA H20-3e", _like_h200(4.8, 296, num_sms=78, clock_mhz=1830.0)),
)
DEVICES: dict[str, DeviceSpec] = {name: replace(spec, name=name) for name, _, spec in _TABLE}
_DRIVER_NAMES = {driver_name: name for name, driver_name, _ in _TABLE}
"""Names as the driver reports them. Nothing but the whole name counts: an H800 is no H8, an H200 no H20."""

_SHORT = {"sms": "num_sms", "smem": "smem_per_block", "hbm": "hbm_bytes_per_us", "tensor": "tensor_ops_per_us"}


def device_spec(name: str) -> DeviceSpec:
    """The device of this name, or one given by figures.

    Args:
        name: a key of `DEVICES`, optionally followed by figures that differ, such as "h200,sms=66" for half an H200;
            figures alone start from the H200. Keys are the fields of `DeviceSpec` or sms, smem (bytes), hbm
            (bytes/us), tensor (ops/us).

    Raises:
        ValueError: names what is known.
    """
    base, *figures = [part.strip() for part in name.lower().split(",")]
    if "=" in base:
        figures.insert(0, base)
        base = "h200"
    if base not in DEVICES:
        expected = f"one of {', '.join(DEVICES)} or figures such as 'sms=66,hbm=2.2e6'"
        raise ValueError(f"device: expected {expected}, got {name!r}")
    known = {field.name: field for field in fields(DeviceSpec) if field.name != "name"}
    changes: dict[str, Any] = {}
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


def device_from_properties(
    name: str, num_sms: int, smem_per_block: int, smem_per_sm: int, *, clock_mhz: float, memory_mhz: float,
    memory_bits: int,
) -> DeviceSpec:  # fmt: skip
    """The spec of a GPU at hand, from what the driver reports.

    Rates are those of `DEVICES` for a name that is known, less where the GPU has fewer SMs: a part of a GPU (MIG) has
    its share of them. Rates of an unknown GPU follow from its memory's clock and width and from its SMs and their
    clock, as an H200's would.

    Args:
        clock_mhz, memory_mhz: highest clocks of SMs and memory.
        memory_bits: width of the memory bus.
    """
    known = _DRIVER_NAMES.get(name.partition(" MIG ")[0])
    if known is not None:
        base = DEVICES[known]
        share = min(1.0, num_sms / base.num_sms)
        hbm, tensor = base.hbm_bytes_per_us * share, base.tensor_ops_per_us * share
    else:
        # An H200 reports 1980 MHz, 3201 MHz and 6144 bits.
        base = replace(_H200, name=name, clock_mhz=_H200.clock_mhz * clock_mhz / 1980)
        hbm = _H200.hbm_bytes_per_us * (memory_mhz * memory_bits) / (3201 * 6144)
        tensor = _H200.tensor_ops_per_us * (num_sms * clock_mhz) / (132 * 1980)
    rates = replace(base, hbm_bytes_per_us=hbm, tensor_ops_per_us=tensor)
    return replace(rates, num_sms=num_sms, smem_per_block=smem_per_block, smem_per_sm=smem_per_sm)
