// What the scale of a row needs to know of it, and how the row's threads find it together.
#pragma once
#include <jitgemm/ptx/convert.cuh>
#include <jitgemm/quantize/types.cuh>

namespace jitgemm {

// What the scale of a row needs, of as much of the row as a thread, warp or CTA has seen. `high` and `low` are the bits
// of floats that are not negative, or NaN's without sign: as integers they are in the same order, NaN above infinity.
template <class Config>
struct Range {
    u32 high = 0;        // largest |y|; affine: largest y, at least 0
    u32 low = 0;         // affine: largest -y, at least 0
    float squares = 0;   // RMSNorm: sum of x^2

    template <class Values>
    __device__ __forceinline__ void include(const Values& y) {
        constexpr bool kPairs = sizeof(y.words) == 16;
        if constexpr (kPairs && !Config::kAffine) {
            u32 pair = y.words[0] & 0x7fff7fffu;
#pragma unroll
            for (u32 i = 1; i < 4; ++i) pair = max_halves(pair, y.words[i] & 0x7fff7fffu);
            const Vector<Config::kX> largest{{max(pair >> 16, pair & 0xffffu)}};
            high = max(high, __float_as_uint(largest.value(0)));
        } else if constexpr (Config::kAffine) {
            float highest = __uint_as_float(high), lowest = __uint_as_float(low);
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) {
                highest = max_nan(highest, y.value(i));
                lowest = max_nan(lowest, -y.value(i));
            }
            high = __float_as_uint(highest) & 0x7fffffffu;
            low = __float_as_uint(lowest) & 0x7fffffffu;
        } else {
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) high = max(high, __float_as_uint(y.value(i)) & 0x7fffffffu);
        }
    }

    // Includes vectors behind rotate(), which gave `largest`.
    template <u32 kCount>
    __device__ __forceinline__ void include_rotated(const Vector<kFp32> (&y)[kCount], u32 largest) {
        if constexpr (Config::kAffine || Config::kStatic) {  // static: NaN counts, infinities do not
#pragma unroll
            for (u32 i = 0; i < kCount; ++i) include(y[i]);
        } else {
            high = max(high, largest);
        }
    }

    // Includes a block of which each of its lanes has kOwn vectors, if it is live; all of them get the result. The whole
    // warp calls this.
    template <u32 kOwn, class Values>
    __device__ __forceinline__ void include_block(const Values* y, bool live) {
#pragma unroll
        for (u32 i = 0; i < kOwn; ++i) {
            if (live) include(y[i]);
        }
#pragma unroll
        for (u32 distance = kBlockVectors / kOwn / 2; distance > 0; distance /= 2)
            high = max(high, __shfl_xor_sync(kAllLanes, high, distance));
    }

    // Combines the lanes of a warp; all of them get the result.
    __device__ __forceinline__ void combine_lanes() {
        high = warp_max(high);
        if constexpr (Config::kAffine) low = warp_max(low);
        if constexpr (Config::kRmsNorm) {
#pragma unroll
            for (u32 distance = 16; distance > 0; distance /= 2) {
                squares = __fadd_rn(squares, __shfl_xor_sync(kAllLanes, squares, distance));
            }
        }
    }
};

// The warps' ranges of one row, each {high, low, squares, -}, and a barrier that counts them where they come from
// several CTAs.
struct WarpRanges {
    float4 range[kMaxWarps];
    u64 full;
};

// Combines the threads that share a row; all of them get the result. Consecutive rows use different `slots`, which are
// written again only when the whole team has read them: a warp sends the next row's range when its reads of this one are
// done.
template <class Config>
__device__ __forceinline__ void combine_threads(const Team<Config>& team, Range<Config>& range, WarpRanges (&slots)[2],
                                                u32 round) {
    range.combine_lanes();
    if constexpr (Config::kRows == 1) {
        const u32 own = team.thread / 32, lane = threadIdx.x % 32, warps = team.threads / 32;
        const u32 ranges = shared_address(slots[round % 2].range), full = shared_address(&slots[round % 2].full);
        const float high = __uint_as_float(range.high), low = __uint_as_float(range.low);
        if constexpr (!Team<Config>::kCluster) {
            if (lane == 0) store_shared_float4(ranges + 16 * own, high, low, range.squares, 0.0f);
            __syncthreads();
        } else {
            if (threadIdx.x == 0) barrier_expect_bytes(full, 16 * warps);
            if (lane < Config::kCtas)
                store_async_float4(map_to_rank(ranges + 16 * own, lane), high, low, range.squares, 0.0f,
                                   map_to_rank(full, lane));
            barrier_wait_for_cluster<false>(full, round / 2 % 2);
        }
        const float4 other = load_shared_float4(ranges + 16 * min(lane, warps - 1));
        if constexpr (Team<Config>::kCluster) loads_done();
        range.high = __float_as_uint(other.x), range.low = __float_as_uint(other.y);
        range.squares = lane < warps ? other.z : 0.0f;  // a maximum may count the last warp again
        range.combine_lanes();
    }
}

}  // namespace jitgemm
