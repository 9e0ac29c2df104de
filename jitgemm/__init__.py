"""jitgemm: W4A8 GEMM for Hopper, generated, compiled and cached just in time.

    import torch, jitgemm
    weight = jitgemm.pack_w4(q, scale, group_size=128)
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale), weight, out)
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from jitgemm.errors import CacheMissError, CompileError, DriverError, JitGemmError, UnsupportedDeviceError

__version__ = "0.1.0"

__all__ = [
    "CacheMissError",
    "CompileError",
    "DriverError",
    "JitGemmError",
    "UnsupportedDeviceError",
    "W4Weight",
    "gemm_w4a8_bf16_nt",
    "gemm_w4a8_int8_nt",
    "gemm_w4a8_nt",
    "gemm_w4a8_reference",
    "load",
    "pack_w4",
    "quantize_activations",
    "quantize_w4",
]


_HOMES = {
    "W4Weight": "weight.w4",
    "gemm_w4a8_bf16_nt": "gemm.call",
    "gemm_w4a8_int8_nt": "gemm.int8_out",
    "gemm_w4a8_nt": "gemm.call",
    "gemm_w4a8_reference": "gemm.reference",
    "load": "checkpoint.reader",
    "pack_w4": "weight.pack",
    "quantize_activations": "activations.call",
    "quantize_w4": "weight.quantize",
}
"""The module of every name that needs torch."""


def __getattr__(name: str) -> object:
    if name == "nn":
        return import_module("jitgemm.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'jitgemm' has no attribute {name!r}")
    value = getattr(import_module(f"jitgemm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


# Names load on first use, so that commands such as `jitgemm cache ls`, which need no torch, answer a second sooner.
# Where torch is there already, what models call is loaded now: a compiler that traces them finds plain functions.
if TYPE_CHECKING:
    from jitgemm.activations.call import quantize_activations
    from jitgemm.checkpoint.reader import load
    from jitgemm.gemm.call import gemm_w4a8_bf16_nt, gemm_w4a8_nt
    from jitgemm.gemm.int8_out import gemm_w4a8_int8_nt
    from jitgemm.gemm.reference import gemm_w4a8_reference
    from jitgemm.weight.pack import pack_w4
    from jitgemm.weight.quantize import quantize_w4
    from jitgemm.weight.w4 import W4Weight
elif "torch" in sys.modules:
    for _name in ("W4Weight", "gemm_w4a8_bf16_nt", "gemm_w4a8_nt", "pack_w4", "quantize_activations"):
        __getattr__(_name)
