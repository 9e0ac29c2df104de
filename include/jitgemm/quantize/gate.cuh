// Activation functions: act(gate) * up.
#pragma once
#include <jitgemm/ptx/convert.cuh>
#include <jitgemm/quantize/types.cuh>

namespace jitgemm {

// x * sigmoid(z), where exponent = -log2(e) * z.
__device__ __forceinline__ float gated_by_sigmoid(float x, float exponent) {
    return __fmul_rn(x, reciprocal_approximate(__fadd_rn(1.0f, exp2_approximate(exponent))));
}

// limit * tanh(x / limit)
__device__ __forceinline__ float soft_limit(float x, float limit) {
    return __fmul_rn(limit, tanhf(__fmul_rn(x, __fdiv_rn(1.0f, limit))));
}

template <class Config>
__device__ __forceinline__ float gate_times_up(const QuantizeArgs& args, float gate, float up) {
    constexpr float kLog2E = 1.44269504f;
    if constexpr (Config::kLimited && Config::kGate == kSitu) {
        up = soft_limit(up, args.gate_limit);
    } else if constexpr (Config::kLimited) {
        if constexpr (Config::kGate != kSwigluStep) gate = min_nan(gate, args.gate_limit);
        up = max_nan(min_nan(up, args.gate_limit), -args.gate_limit);
    }
    if constexpr (Config::kGate == kGelu) {
        return __fmul_rn(__fmul_rn(gate, normcdff(gate)), up);
    } else if constexpr (Config::kGate == kGeluTanh) {
        // (1 + tanh(z)) / 2 = sigmoid(2z), z = sqrt(2 / pi) * (x + 0.044715 x^3)
        const float inner = __fmul_rn(gate, __fmaf_rn(__fmul_rn(gate, gate), 0.044715f, 1.0f));
        return __fmul_rn(gated_by_sigmoid(gate, __fmul_rn(inner, -1.59576912f * kLog2E)), up);
    } else if constexpr (Config::kGate == kSwigluOai) {
        const float exponent = __fmul_rn(__fmul_rn(gate, args.gate_alpha), -kLog2E);
        return __fmul_rn(gated_by_sigmoid(gate, exponent), __fadd_rn(up, 1.0f));
    } else if constexpr (Config::kGate == kSitu) {
        return __fmul_rn(gated_by_sigmoid(soft_limit(gate, args.gate_alpha), __fmul_rn(gate, -kLog2E)), up);
    } else {
        float silu = gated_by_sigmoid(gate, __fmul_rn(gate, -kLog2E));
        if constexpr (Config::kLimited && Config::kGate == kSwigluStep) silu = min_nan(silu, args.gate_limit);
        return __fmul_rn(silu, up);
    }
}

}  // namespace jitgemm
