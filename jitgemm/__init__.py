"""jitgemm: W4A8 GEMM for Hopper, generated, compiled and cached just in time.

    import jitgemm
    weight = jitgemm.pack_w4(q, scale, group_size=128)
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale), weight, out)
"""

from jitgemm.api import gemm_w4a8_bf16_nt
from jitgemm.errors import CacheMissError, CompileError, DriverError, JitGemmError, UnsupportedDeviceError
from jitgemm.reference import gemm_w4a8_reference
from jitgemm.weight import W4Weight, pack_w4

__version__ = "0.1.0"

__all__ = [
    "CacheMissError",
    "CompileError",
    "DriverError",
    "JitGemmError",
    "UnsupportedDeviceError",
    "W4Weight",
    "gemm_w4a8_bf16_nt",
    "gemm_w4a8_reference",
    "pack_w4",
]
