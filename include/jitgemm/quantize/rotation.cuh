// The rotation of a row's blocks of 128.
#pragma once
#include <jitgemm/quantize/types.cuh>

namespace jitgemm {

// y H * 2^3.5, where H has blocks of 128 on its diagonal:
//
//   H[i][j] = (-1)^popcount(i & j) * 2^-3.5            Sylvester's Hadamard matrix, orthogonal
//
// For d = 1, 2, 4, .. 64 in that order y[i] + y[i + d] and y[i] - y[i + d] take the places of both, bit d not in i, as
// butterfly() in jitgemm/weight/rotation.py has it. Of the distances a thread's vector has three, then come those
// between lanes, then those between its vectors. y: a thread's of one block; the whole warp calls this.
template <u32 kCount>
__device__ __forceinline__ void rotate(Vector<kFp32> (&y)[kCount]) {
    auto value = [&](u32 i) -> u32& { return y[i / kVector].words[i % kVector]; };
    auto add_own = [&](u32 distance) {
#pragma unroll
        for (u32 i = 0; i < kCount * kVector; ++i) {
            if (i & distance) continue;
            const float low = __uint_as_float(value(i)), high = __uint_as_float(value(i + distance));
            value(i) = __float_as_uint(__fadd_rn(low, high));
            value(i + distance) = __float_as_uint(__fsub_rn(low, high));
        }
    };
#pragma unroll
    for (u32 distance = 1; distance < kVector; distance *= 2) add_own(distance);
#pragma unroll
    for (u32 distance = 1; distance < kBlockVectors / kCount; distance *= 2) {
        const float sign = threadIdx.x & distance ? -1.0f : 1.0f;
#pragma unroll
        for (u32 i = 0; i < kCount * kVector; ++i) {
            const float own = __uint_as_float(value(i)), other = __shfl_xor_sync(kAllLanes, own, distance);
            value(i) = __float_as_uint(__fmaf_rn(own, sign, other));  // one rounding: a sum or a difference
        }
    }
#pragma unroll
    for (u32 distance = kVector; distance < kCount * kVector; distance *= 2) add_own(distance);
}

}  // namespace jitgemm
