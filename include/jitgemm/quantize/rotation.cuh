// The rotation of a row's blocks of 128.
#pragma once
#include <jitgemm/quantize/types.cuh>

namespace jitgemm {

// y H * 2^3.5, where H has blocks of 128 on its diagonal:
//
//   H[i][j] = (-1)^popcount(i & j) * 2^-3.5            Sylvester's Hadamard matrix, orthogonal
//
// For d = 1, 2, 4, .. 64 in that order y[i] + y[i + d] and y[i] - y[i + d] take the places of both, bit d not in i, as
// butterfly() in jitgemm/weight/rotation.py has it. Zeros are +0. y: a thread's of one block, as Team::vector() deals
// them out; the whole warp calls this.
//
// No addition has one addend in another lane. Of the sum and the difference at a distance of 4 a lane keeps one, and
// gives the other to a neighbour for the one that it has not, which the kept one meets at the next distance: half of
// the values go through a shuffle, and which half is in the sign of an addend. So a value's place in the block changes:
//
//             from the highest bit to the lowest
//   before    vector     lane             register 4    registers 2, 1
//   behind    vector     register 4       lane          registers 2, 1          see store_rotated()
//
// A lane that kept a difference has the higher addend where others have the lower one, and so the next difference with
// the wrong sign; sign() makes up for all of them.
//
// Returns the bits of the largest |y|: of a + b and a - b that is |a| + |b|, infinity also where one of them is NaN.
template <u32 kCount>
__device__ __forceinline__ u32 rotate(Vector<kFp32> (&y)[kCount]) {
    constexpr u32 kLanes = kBlockVectors / kCount, kValues = kCount * kVector, kHalf = kVector / 2;
    auto value = [&](u32 i) { return __uint_as_float(y[i / kVector].words[i % kVector]); };
    auto set = [&](u32 i, float to) { y[i / kVector].words[i % kVector] = __float_as_uint(to); };
    auto for_pairs = [&](u32 distance, auto each) {
#pragma unroll
        for (u32 i = 0; i < kValues; ++i) {
            if (!(i & distance)) each(i, i + distance, value(i), value(i + distance));
        }
    };
    auto add_own = [&](u32 i, u32 j, float low, float high) {
        set(i, __fadd_rn(low, high));
        set(j, __fsub_rn(low, high));
    };
#pragma unroll
    for (u32 distance = 1; distance < kHalf; distance *= 2) for_pairs(distance, add_own);
#pragma unroll
    for (u32 lane = 1; lane < kLanes; lane *= 2) {
        const float keep = threadIdx.x & lane ? -1.0f : 1.0f;
        for_pairs(kHalf, [&](u32 i, u32 j, float low, float high) {
            set(i, __fmaf_rn(high, keep, low));  // one rounding: a sum or a difference
            set(j, __shfl_xor_sync(kAllLanes, __fmaf_rn(high, -keep, low), lane));
        });
    }
#pragma unroll
    for (u32 distance = kHalf; distance < kValues / 2; distance *= 2) for_pairs(distance, add_own);
    constexpr u32 kOdd = 0x6996;  // bit i: i has an odd number of ones
    auto sign = [&](u32 i) {
        const u32 place = threadIdx.x % kLanes + (i & kHalf ? kLanes : 0);  // of a four
        return __uint_as_float(__float_as_uint(1.0f) | (kOdd >> (place & place >> 1) & 1) << 31);
    };
    u32 largest = 0;
    for_pairs(kValues / 2, [&](u32 i, u32 j, float low, float high) {
        largest = max(largest, __float_as_uint(__fadd_rn(fabsf(low), fabsf(high))));
        set(i, __fmaf_rn(high, sign(i), __fmaf_rn(low, sign(i), 0.0f)));
        set(j, __fmaf_rn(high, -sign(j), __fmaf_rn(low, sign(j), 0.0f)));
    });
    return largest;
}

}  // namespace jitgemm
