"""jitgemm: W4A8 GEMM for Hopper, generated, compiled and cached just in time.

    import torch, jitgemm
    weight = jitgemm.pack_w4(q, scale, group_size=128)
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale), weight, out)
"""

from __future__ import annotations

import sys
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
    "gemm_w4a8_nt",
    "gemm_w4a8_reference",
    "pack_w4",
]


def _load() -> None:
    global W4Weight, gemm_w4a8_bf16_nt, gemm_w4a8_nt, gemm_w4a8_reference, pack_w4
    from jitgemm.api import gemm_w4a8_bf16_nt, gemm_w4a8_nt
    from jitgemm.reference import gemm_w4a8_reference
    from jitgemm.weight import W4Weight, pack_w4


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'jitgemm' has no attribute {name!r}")
    _load()
    return globals()[name]


# Where nothing has imported torch yet, the names that need it load on first use: commands such as `jitgemm cache ls` answer a second sooner.
if TYPE_CHECKING or "torch" in sys.modules:
    _load()
