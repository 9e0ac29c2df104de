// Conversions, maxima and approximations of a single instruction.
#pragma once
#include <jitgemm/types.cuh>

namespace jitgemm {

// Unsigned maximum of each half.
__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
    u32 result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Maximum that keeps NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Minimum that keeps NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ u32 warp_max(u32 value) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
    return result;
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Two values as e4m3 codes, `low` in the low byte; beyond 448 saturates, NaN stays NaN.
__device__ __forceinline__ u16 to_e4m3(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// To nearest even; NaN becomes 0, and what int32 does not hold its nearest end.
__device__ __forceinline__ i32 to_integer(float x) {
    i32 result;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
}

// Four integers saturated to int8, the first in the lowest byte.
__device__ __forceinline__ u32 to_int8(i32 a, i32 b, i32 c, i32 d) {
    u32 upper, codes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(d), "r"(c));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(codes) : "r"(b), "r"(a), "r"(upper));
    return codes;
}

}  // namespace jitgemm
