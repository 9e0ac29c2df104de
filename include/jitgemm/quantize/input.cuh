// What is read for a vector of y, and y.
#pragma once
#include <jitgemm/quantize/gate.cuh>
#include <jitgemm/quantize/range.cuh>

namespace jitgemm {

// What is read for a vector of y: the vector of x, and of the residual, or gates and ups, two vectors as they lie in x.
template <class Config>
struct Input {
    Vector<Config::kX> x[kGated<Config> || Config::kResidual ? 2 : 1];
    uint4 weights;  // kEarlyWeights only

    __device__ __forceinline__ float gate(u32 i) const {
        if constexpr (Config::kOrder == kInterleaved) return x[i / (kVector / 2)].value(2 * i % kVector);
        return x[Config::kOrder == kUpGate].value(i);
    }
    __device__ __forceinline__ float up(u32 i) const {
        if constexpr (Config::kOrder == kInterleaved) return x[i / (kVector / 2)].value(2 * i % kVector + 1);
        return x[Config::kOrder != kUpGate].value(i);
    }
};

// What a thread holds of y until the row's scale is known: x as it was read where y = x, else y (RMSNorm: y * rms;
// kRotated: y * 2^3.5) in fp32.
template <class Config>
using Held = Vector<kActivated<Config> || Config::kRmsNorm || Config::kRotated ? kFp32 : Config::kX>;

// `again`: transform() has been given the vector by this thread.
template <class Config>
__device__ __forceinline__ Input<Config> load(const QuantizeArgs& args, u32 row, u32 vector, bool again = false) {
    constexpr u32 kBytes = Vector<Config::kX>::kBytes;
    constexpr bool kInPairs = kGated<Config> && Config::kOrder == kInterleaved;
    if constexpr (Config::kGathered) row = args.row_index[row];
    const u8* source = args.x + row * args.x_row_bytes + vector * kBytes * (kInPairs ? 2 : 1);
    Input<Config> input;
    if constexpr (kEarlyWeights<Config>) {
        if (args.norm_weight_type != kFp32) input.weights = load_weights(args.norm_weight, vector);
    }
    if constexpr (Config::kResidual) {
        if (again) {
            source = args.sum + row * args.sum_row_bytes + vector * kBytes;
        } else {
            input.x[1] = load_vector<Config::kX>(args.residual + row * args.residual_row_bytes + vector * kBytes);
        }
    }
    input.x[0] = load_vector<Config::kX>(source);
    if constexpr (Config::kResidual && Config::kX == kFp32) {
        if (!again) input.x[0] = add(input.x[0], input.x[1]);  // holding both would take too many registers
    }
    if constexpr (kGated<Config>) {
        input.x[1] = load_vector<Config::kX>(source + (kInPairs ? kBytes : args.k / kVector * kBytes));
    }
    return input;
}

// The vector of y without RMSNorm's factor, which is known only at the end of the row. `again` as load() had it.
template <class Config>
__device__ __forceinline__ Held<Config> transform(const QuantizeArgs& args, const Input<Config>& input, u32 row,
                                                  u32 vector, Range<Config>& range, bool again = false) {
    if constexpr (kGated<Config>) {
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) {
            y.words[i] = __float_as_uint(gate_times_up<Config>(args, input.gate(i), input.up(i)));
        }
        return y;
    } else if constexpr (kActivated<Config>) {
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) {
            const float positive = max_nan(input.x[0].value(i), 0.0f);
            y.words[i] = __float_as_uint(__fmul_rn(positive, positive));
        }
        return y;
    } else if constexpr (Config::kRmsNorm) {
        float weights[kVector];
        const i32 type = args.norm_weight_type;
        take_weights<kEarlyWeights<Config>>(args.norm_weight, vector, type, input.weights, weights);
        Vector<Config::kX> values = input.x[0];
        if constexpr (Config::kResidual) {
            if (!again) {
                if constexpr (Config::kX != kFp32) values = add(input.x[0], input.x[1]);
                store_vector(args.sum + row * args.sum_row_bytes + vector * sizeof(values), values);
            }
        }
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) {
            const float x = values.value(i);
            range.squares = __fmaf_rn(x, x, range.squares);
            y.words[i] = __float_as_uint(__fmul_rn(x, weights[i]));
        }
        return y;
    } else if constexpr (Config::kRotated) {
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) y.words[i] = __float_as_uint(input.x[0].value(i));
        return y;
    } else {
        return input.x[0];
    }
}

}  // namespace jitgemm
