"""`jitgemm env`: versions, libraries, device and folders, for a bug report. Never fails on what it lacks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from jitgemm import settings
from jitgemm.cli import common
from jitgemm.select.devices import DEVICES, DeviceSpec

_PACKAGES = (
    "jitgemm torch cuda-bindings cuda-python nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 filelock safetensors typer rich"
).split()


@common.guarded
def env(as_json: common.Json = False) -> None:
    """Print versions, libraries found, device, settings and cache folders: the text to paste into a bug report.

    \b
    Examples:
      jitgemm env
      jitgemm env --json | jq .nvrtc
    """
    facts = gather()
    if as_json:
        common.print_json(facts)
        return
    shown: dict[str, object] = {}
    for section, values in facts.items():
        parts = {f".{name}": value for name, value in values.items()} if isinstance(values, dict) else {"": values}
        shown |= {section + name: _text(value) for name, value in parts.items()}
    common.print_facts(shown)


def gather() -> dict[str, Any]:
    """All facts, as `--json` prints them. What cannot be found out stands as the reason why."""
    return {
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "nvrtc": _try(_nvrtc),
        "driver": _try(_driver),
        "devices": _try(_devices),
        "cache": _try(lambda: [str(root) for root in settings.cache_roots()]),
        "settings": {name: os.environ.get(name, "(not set)") for name in settings.VARIABLES},
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not installed" if value is None else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _try(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:  # a broken part is what this command is there to show
        return f"{type(error).__name__}: {error}"


def _nvrtc() -> dict[str, Any]:
    from jitgemm.jit.nvrtc import nvrtc_info

    info = nvrtc_info()
    return {"version": ".".join(map(str, info.version)), "build": info.build, "library": info.library}


def _driver() -> str:
    from jitgemm.runtime.driver import driver_version

    return "CUDA {}.{}".format(*driver_version())


def _devices() -> list[str]:
    import torch

    from jitgemm.errors import UnsupportedDeviceError
    from jitgemm.runtime.device import device_of

    devices = []
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        name = f"{index}: {props.name}, sm_{props.major}{props.minor}, {props.multi_processor_count} SMs"
        try:
            figures = _figures(device_of(index))
        except UnsupportedDeviceError:
            figures = "no Hopper"
        devices.append(f"{name}, {common.show_size(props.total_memory)}; {figures}")
    return devices


def _figures(spec: DeviceSpec) -> str:
    if spec.name in DEVICES:
        return f"kernels are chosen for {spec.name}"
    rates = f"{spec.hbm_bytes_per_us / 1e6:.2g} TB/s, {spec.tensor_ops_per_us / 1e9:.2g} POP/s"
    return f"not in jitgemm's table: kernels are chosen for what the driver reports ({rates})"
