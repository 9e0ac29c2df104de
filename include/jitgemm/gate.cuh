// SwiGLU and a scale's arithmetic, one IEEE operation after another: the quantiser's and the GEMM's epilogue give the
// same bits (jitgemm/activations/reference.py).
#pragma once
#include <jitgemm/types.cuh>

namespace jitgemm {

constexpr u32 kInfinity = 0x7f800000u;
constexpr float kMinScale = 1.17549435e-38f;  // 2^-126: its reciprocal is finite, and 0 / scale is 0
constexpr float kLog2E = 1.44269504f;

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

// x * sigmoid(z), where exponent = -log2(e) * z.
__device__ __forceinline__ float gated_by_sigmoid(float x, float exponent) {
    return __fmul_rn(x, reciprocal_approximate(__fadd_rn(1.0f, exp2_approximate(exponent))));
}

__device__ __forceinline__ float silu_times(float gate, float up) {
    return __fmul_rn(gated_by_sigmoid(gate, __fmul_rn(gate, -kLog2E)), up);
}

// The scale of e4m3 codes whose largest value has the bits `high`, without a sign.
__device__ __forceinline__ float e4m3_scale(u32 high) {
    float scale = __fdiv_rn(__uint_as_float(high), 448.0f);
    if (scale < kMinScale) scale = kMinScale;
    if (high >= kInfinity) scale = __uint_as_float(0x7fffffffu);
    return scale;
}

}  // namespace jitgemm
