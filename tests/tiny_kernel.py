"""A kernel small enough to compile by the dozen, for the tests of NVRTC and of the cache and their child processes."""

from __future__ import annotations

from jitgemm.jit.source import KernelSource

OPTIONS = ("-arch=sm_90a", "-std=c++17", "--ptxas-options=-v")
HEADERS = {"tiny/scale.cuh": "#pragma once\n#define SCALE 3\n"}


def tiny_source(salt: int = 0) -> str:
    """CUDA C++ of one kernel; another `salt`, another kernel."""
    return f"""\
#include <tiny/scale.cuh>
extern "C" __global__ void tiny(int* out) {{ out[threadIdx.x] = SCALE * out[threadIdx.x] + {salt}; }}
"""


def tiny_kernel(salt: int = 0) -> KernelSource:
    return KernelSource(f"tiny-{salt}", {"salt": salt}, tiny_source(salt), HEADERS, OPTIONS)
