"""A kernel small enough to compile by the dozen, for the tests of NVRTC and of the cache and their child processes."""

from __future__ import annotations

from jitgemm.jit.source import KernelSource

OPTIONS = ("-arch=sm_90a", "-std=c++17", "--ptxas-options=-v")
TIGHT = (*OPTIONS, "-maxrregcount=24")
HEADERS = {"tiny/scale.cuh": "#pragma once\n#define SCALE 3\n"}


SERIALISED = """
extern "C" __global__ void serialised(float* out, unsigned long long a, unsigned long long b) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;");
    for (int i = 0; i < 4; ++i) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i), "l"(b + i));
        asm volatile("wgmma.commit_group.sync.aligned;");
        out[threadIdx.x + i] = d[i];  // read before the wait
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    out[threadIdx.x] += d[0] + d[1] + d[2] + d[3];
}
"""

SPILLING = """
extern "C" __global__ void spilling(float* out) {
    float v[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = out[threadIdx.x + 1024 * i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i) out[threadIdx.x + 1024 * i] = v[i] * v[63 - i];
}
"""


STACKED = """
extern "C" __global__ void stacked(int* out) {
    int counts[32] = {};
    for (int i = 0; i < 999; ++i) ++counts[out[i] & 31];
    out[threadIdx.x] = counts[out[threadIdx.x] & 31];
}
"""


def tiny_source(salt: int = 0) -> str:
    """CUDA C++ of one kernel; another `salt`, another kernel."""
    return f"""\
#include <tiny/scale.cuh>
extern "C" __global__ void tiny(int* out) {{ out[threadIdx.x] = SCALE * out[threadIdx.x] + {salt}; }}
"""


def tiny_kernel(salt: int = 0) -> KernelSource:
    return KernelSource(f"tiny-{salt}", {"salt": salt}, tiny_source(salt), HEADERS, OPTIONS)


def stacked_kernel() -> KernelSource:
    """With an array that ptxas keeps in local memory, and no spill."""
    return KernelSource("stacked", {}, STACKED, {}, OPTIONS)


def spilling_kernel() -> KernelSource:
    return KernelSource("spilling", {}, SPILLING, {}, TIGHT)


def serialised_kernel() -> KernelSource:
    return KernelSource("serialised", {}, SERIALISED, {}, OPTIONS)
