// Sums of codes, which the quantiser writes behind a row's int8 codes for weights with corrections
// (include/jitgemm/gemm/correction.cuh).
//
//   row     [0, k)        codes
//           [k, K)        zeros; K = k rounded up to a block's 128
//           [K, ...)      128 bytes for 32 groups: the high digits of their sums, then the low ones, 16 bits each
//   high = sum, rounded to kType; low = sum - high, which kType holds. Groups behind the last have sum 0.
//
// A group's vectors are those of 4, 8, 16 or 32 threads side by side, whatever threads a row has: of one warp.
#pragma once
#include <jitgemm/quantize/kernel.cuh>

namespace jitgemm {

constexpr u32 kSumsOfBlock = 32;  // that share 128 bytes
constexpr u32 kBlockBytes = 128;

// In place of NoSums.
template <RealType kType, u32 kGroup>
struct GroupSums {
    static constexpr u32 kLanes = kGroup / kVector;  // that hold a group
    static_assert(kLanes >= 4 && kLanes <= 32 && 32 % kLanes == 0, "a warp holds groups as wholes");

    __device__ __forceinline__ static u32 groups(u32 k) { return (k + kGroup - 1) / kGroup; }
    __device__ __forceinline__ static u32 code_bytes(u32 k) { return (k + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

    // Where digit 0 or 1 of a group's sum lies.
    __device__ __forceinline__ static u16* digit_of(u8* row, u32 k, u32 group, u32 digit) {
        u8* const block = row + code_bytes(k) + group / kSumsOfBlock * kBlockBytes;
        return reinterpret_cast<u16*>(block) + digit * kSumsOfBlock + group % kSumsOfBlock;
    }

    static constexpr bool kWholeWarps = true;

    __device__ __forceinline__ static u32 end(u32 vectors) { return (vectors + 31) / 32 * 32; }

    __device__ __forceinline__ static void store(u8* row, u32 k, u32 vector, uint2 codes) {
        if (vector < code_bytes(k) / kVector) store_codes(row, vector, codes);
        constexpr i32 kOnes = 0x01010101;
        i32 sum = __dp4a(static_cast<i32>(codes.x), kOnes, __dp4a(static_cast<i32>(codes.y), kOnes, 0));
#pragma unroll
        for (u32 distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        const u32 digit = vector % kLanes;  // two of the group's threads write one each
        if (digit > 1 || vector / kLanes >= groups(k)) return;
        const float whole = static_cast<float>(sum);
        const Vector<kType> high{{pack_halves<kType>(whole, 0.0f)}};
        const float part = digit == 0 ? whole : __fsub_rn(whole, high.value(0));
        *digit_of(row, k, vector / kLanes, digit) = static_cast<u16>(pack_halves<kType>(part, 0.0f));
    }

    // The sums that the last 128 bytes have no groups for: fewer than a warp has threads.
    __device__ __forceinline__ static void finish(u8* row, u32 k, u32 thread) {
        const u32 group = groups(k) + thread;
        if (group >= (groups(k) + kSumsOfBlock - 1) / kSumsOfBlock * kSumsOfBlock) return;
        *digit_of(row, k, group, 0) = 0;
        *digit_of(row, k, group, 1) = 0;
    }
};

}  // namespace jitgemm
