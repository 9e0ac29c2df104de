// Activations that the consumers quantise themselves, where a tile has few tokens: they read x, 16-bit, find each row's
// scale, and leave the codes of this CTA's k in shared memory, where they stay for all its tiles. The arithmetic is
// quantize.cuh's, and so are the bits: for RMSNorm a row's values are dealt to as many threads in the same order.
#pragma once
#include <jitgemm/gate.cuh>
#include <jitgemm/gemm/scheduler.cuh>
#include <jitgemm/gemm/shared.cuh>

namespace jitgemm {

template <typename Config>
struct ResidentActivations {
    static constexpr bool kNorm = Config::kQuantize == 2;
    static constexpr u32 kThreads = Config::kConsumers * kWarpgroup;
    static constexpr u32 kTeam = kNorm ? 256 : kThreads;  // threads of a row
    static constexpr u32 kTeams = kThreads / kTeam, kTeamWarps = kTeam / 32;
    static constexpr u32 kRowVectors = Config::kKBlocks * kBlockK / 8;
    static constexpr u32 kVectors = ceil_div(kRowVectors, kTeam);  // of 8 values, of a thread
    static constexpr u32 kRows = smaller(ceil_div(Config::kBlockM, kTeams), kNorm ? 4 / kVectors : smaller(4, 8 / kVectors));  // at a time
    static_assert(kRows > 0 && kTeams * kTeam == kThreads);

    uint4 weights[kVectors];

    __device__ __forceinline__ static u32 vector(u32 i) { return threadIdx.x % kTeam + i * kTeam; }

    __device__ __forceinline__ explicit ResidentActivations(const Args& args) {
        if constexpr (kNorm) {
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) weights[i] = reinterpret_cast<const uint4*>(args.norm_weight)[vector(i)];
        }
    }

    __device__ __forceinline__ static uint4 read(const u8* from) {
        u32 words[4];
        load_streamed(from, words);
        return {words[0], words[1], words[2], words[3]};
    }
    __device__ __forceinline__ static float value(const uint4& v, u32 i) {
        const u32 word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
        return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }
    __device__ __forceinline__ static u32 largest(u32 a, u32 b) {
        u32 result;
        asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
        return result;
    }
    __device__ __forceinline__ static u32 add(u32 a, u32 b) {
        return pack_halves<kBf16>(__fadd_rn(bf16_to_float(u16(a)), bf16_to_float(u16(b))),
                                  __fadd_rn(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u)));
    }
    __device__ __forceinline__ static u32 lanes_max(u32 value) {
        u32 result;
        asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
        return result;
    }
    __device__ __forceinline__ static float lanes_sum(float sum) {
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2)
            sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, distance));
        return sum;
    }
    __device__ __forceinline__ static void sync() { asm volatile("bar.sync 9, %0;" ::"n"(kThreads) : "memory"); }

    // All consumers call this, behind the wait for the grid before.
    __device__ __forceinline__ void make(const Args& args, const Shared<Config>& shared, const Tile<Config>& tile, u32 rank) {
        const u32 team = kTeams == 1 ? 0 : threadIdx.x / kTeam, warp = threadIdx.x % kTeam / 32, lane = threadIdx.x % 32;
        const u32 tokens = min(tile.end_token() - tile.first_token, u32(Config::kBlockM));
        // Of a row's warps, by row and warp, twice: {bits of the largest, sum of squares}.
        const u32 slots = shared.out(0);
        constexpr u32 kSlots = kTeams * kRows * kTeamWarps * 8;
        static_assert(2 * kSlots <= Shared<Config>::kOutPanel * Shared<Config>::kReducers);
        u32 parity = 0;
#pragma unroll 1
        for (u32 first = 0; first < tokens; first += kTeams * kRows, parity ^= 1) {
            uint4 x[kRows][kVectors];
            auto token = [&](u32 row) { return first + row * kTeams + team; };
            auto wanted = [&](u32 row, u32 i) { return token(row) < tokens && (kRowVectors % kTeam == 0 || vector(i) < kRowVectors); };
#pragma unroll
            for (u32 row = 0; row < kRows; ++row) {
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    x[row][i] = {0, 0, 0, 0};
                    if (wanted(row, i)) x[row][i] = read(args.lhs + token(row) * args.lhs_stride + vector(i) * 16);
                }
            }
            if constexpr (kNorm) {
                uint4 residual[kRows][kVectors];
#pragma unroll
                for (u32 row = 0; row < kRows; ++row)
#pragma unroll
                    for (u32 i = 0; i < kVectors; ++i) {
                        residual[row][i] = {0, 0, 0, 0};
                        if (wanted(row, i)) residual[row][i] = read(args.residual + token(row) * args.residual_stride + vector(i) * 16);
                    }
#pragma unroll
                for (u32 row = 0; row < kRows; ++row)
#pragma unroll
                    for (u32 i = 0; i < kVectors; ++i) {
                        uint4& to = x[row][i];
                        const uint4& by = residual[row][i];
                        to = {add(to.x, by.x), add(to.y, by.y), add(to.z, by.z), add(to.w, by.w)};
                        if (blockIdx.x == 0 && wanted(row, i))
                            *reinterpret_cast<uint4*>(args.sum + token(row) * args.residual_stride + vector(i) * 16) = to;
                    }
            }
#pragma unroll
            for (u32 row = 0; row < kRows; ++row) {
                u32 high = 0;
                float squares = 0.0f;
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    const uint4& v = x[row][i];
                    if constexpr (kNorm) {
#pragma unroll
                        for (u32 j = 0; j < 8; ++j) {
                            const float from = value(v, j);
                            squares = __fmaf_rn(from, from, squares);
                            high = max(high, __float_as_uint(__fmul_rn(from, value(weights[i], j))) & 0x7fffffffu);
                        }
                    } else {
                        const u32 pair = largest(largest(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu), largest(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu));
                        high = max(high, max(pair >> 16, pair & 0xffffu) << 16);
                    }
                }
                high = lanes_max(high);
                if constexpr (kNorm) squares = lanes_sum(squares);
                if (lane == 0)
                    store_shared_v2(slots + parity * kSlots + ((row * kTeams + team) * kTeamWarps + warp) * 8,
                                    uint2{high, __float_as_uint(squares)});
            }
            sync();
#pragma unroll
            for (u32 row = 0; row < kRows; ++row) {
                const uint2 other = load_shared_v2(slots + parity * kSlots + ((row * kTeams + team) * kTeamWarps + min(lane, kTeamWarps - 1)) * 8);
                u32 high = lanes_max(other.x);
                float norm = 1.0f;
                if constexpr (kNorm) {
                    const float squares = lanes_sum(lane < kTeamWarps ? __uint_as_float(other.y) : 0.0f);
                    const float mean = __fdiv_rn(squares, float(args.k));
                    norm = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, args.eps)));
                    if (__float_as_uint(squares) >= kInfinity) norm = __uint_as_float(0x7fffffffu);
                    high = __float_as_uint(__fmul_rn(__uint_as_float(high), norm));
                }
                const float scale = e4m3_scale(high);
                const float inverse = __fdiv_rn(1.0f, scale);
                if (threadIdx.x % kTeam == 0 && token(row) < tokens) {
#pragma unroll
                    for (u32 r = 0; r < Shared<Config>::kReducers; ++r) {
                        const u32 slice = r / Config::kWarpgroupsN * Config::kSplitK + (Config::kSplitK > 1 ? rank : 0);
                        if (token(row) / Config::kSliceTokens == slice)
                            store_shared_float(shared.scales(r) + token(row) % Config::kSliceTokens * 4, scale);
                    }
                }
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    float y[8];
#pragma unroll
                    for (u32 j = 0; j < 8; ++j) {
                        y[j] = value(x[row][i], j);
                        if constexpr (kNorm) y[j] = __fmul_rn(__fmul_rn(y[j], value(weights[i], j)), norm);
                        y[j] = __fmul_rn(y[j], inverse);
                    }
                    const uint2 codes = {to_e4m3(y[0], y[1]) | u32(to_e4m3(y[2], y[3])) << 16,
                                         to_e4m3(y[4], y[5]) | u32(to_e4m3(y[6], y[7])) << 16};
                    const u32 block = vector(i) / 16 - tile.range.begin;
                    if (wanted(row, i) && block < tile.range.end - tile.range.begin)
                        store_shared_v2(shared.lhs(0, 0) + block * Shared<Config>::kLhsTile + token(row) * kSwizzledRow +
                                            ((vector(i) % 16 / 2 ^ token(row) % 8) * 16) + vector(i) % 2 * 8, codes);
                }
            }
        }
        async_proxy_fence();
        sync();
    }
};

}  // namespace jitgemm
