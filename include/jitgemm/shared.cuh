// The CTA's shared memory, by offset. jitgemm/config.py computes the same total; the rendered source checks it.
//
//     1024-aligned   lhs      [stages][warpgroups_k][block_m][128 B]       activations, 128-byte swizzle
//                    out      [summers][share][64 columns]                 in runs of 128 B a token, 128-byte swizzle
//     64-aligned     records  [stages][warpgroups_n][warpgroups_k][record]
//                    slots    [summers][warpgroups_k - 1][part / 8][128 threads][4] fp32 sums of the CTA's others
//                             and, for each summer behind them, [split_k - 1][share / 8][128][4] of the other CTAs
//                    scales   [summers][share] fp32                        per-token scales
//                    terms    [summers][3][64] fp32                        scale, bias and sum of each row of n
//                    barriers full[stages] empty[stages]
//                             part_full[summers] part_empty[warpgroups]   where warpgroups split k
//                             share_full[summers] share_empty[summers]    where CTAs do
//
// `share` is the tokens that one warpgroup stores, `part` those that it sums over its CTA's warpgroups along k: a share
// for each CTA of the cluster, while there are shares. `summers` are the warpgroups of a CTA that have a part.
#pragma once
#include <jitgemm/barrier.cuh>
#include <jitgemm/decode.cuh>

namespace jitgemm {

template <typename Config>
struct Shared {
    static constexpr u32 kWarpgroups = Config::kWarpgroupsN * Config::kWarpgroupsK;
    static constexpr u32 kMulticast = Config::kMulticastLhs * Config::kMulticastRhs;  // CTAs that share an operand
    static_assert(Config::kMulticastLhs == 1 || Config::kMulticastRhs == 1, "a cluster shares one operand");
    static constexpr u32 kShares = Config::kBlockM / Config::kShareTokens;
    static constexpr u32 kParts = ceil_div(kShares, Config::kSplitK);
    static constexpr u32 kPartTokens = Config::kShareTokens * smaller(Config::kSplitK, kShares);
    static constexpr u32 kSummers = kParts * Config::kWarpgroupsN;
    static_assert(Config::kShareTokens * kShares == Config::kBlockM && kParts <= Config::kWarpgroupsK,
                  "shares cover the tile");

    static constexpr u32 kLhsTile = Config::kBlockM * 128;
    static constexpr u32 kLhsStage = Config::kWarpgroupsK * kLhsTile;
    static constexpr u32 kOutPanel = Config::kShareTokens * 64 * (Config::kOutType == kFp32 ? 4 : 2);
    static constexpr u32 kRecordRun = Config::kWarpgroupsK * Record<Config>::kBytes;
    static constexpr u32 kRecordStage = Config::kWarpgroupsN * kRecordRun;
    static constexpr u32 kSlot = Config::kShareTokens * 64 * 4;
    static constexpr u32 kPartSlot = kPartTokens * 64 * 4;
    static constexpr u32 kTermsBytes = 3 * 64 * 4;

    static constexpr u32 kOut = Config::kStages * kLhsStage;
    static constexpr u32 kRecords = kOut + kSummers * kOutPanel;
    static constexpr u32 kSlots = kRecords + Config::kStages * kRecordStage;
    static constexpr u32 kSlotsOfCta = (Config::kWarpgroupsK - 1) * kPartSlot;
    static constexpr u32 kSlotsOfSummer = kSlotsOfCta + (Config::kSplitK - 1) * kSlot;
    static constexpr u32 kScales = kSlots + kSummers * kSlotsOfSummer;
    static constexpr u32 kTerms = kScales + kSummers * Config::kShareTokens * 4;
    static constexpr u32 kBarriers = kTerms + kSummers * kTermsBytes;
    static constexpr u32 kPartBarriers = Config::kWarpgroupsK > 1 ? kSummers + kWarpgroups : 0;
    static constexpr u32 kShareBarriers = Config::kSplitK > 1 ? 2 * kSummers : 0;
    static constexpr u32 kBarrierCount = 2 * Config::kStages + kPartBarriers + kShareBarriers;
    static constexpr u32 kBytes = kBarriers + kBarrierCount * 8;
    static_assert(kRecords % 64 == 0 && kSlots % 64 == 0 && kScales % 16 == 0 && kBarriers % 8 == 0,
                  "misaligned shared memory");

    u32 base;

    __device__ __forceinline__ u32 lhs(u32 stage, u32 along_k) const {
        return base + stage * kLhsStage + along_k * kLhsTile;
    }
    __device__ __forceinline__ u32 out(u32 summer) const { return base + kOut + summer * kOutPanel; }
    __device__ __forceinline__ u32 record(u32 stage, u32 along_n, u32 along_k) const {
        return base + kRecords + stage * kRecordStage + along_n * kRecordRun + along_k * Record<Config>::kBytes;
    }
    __device__ __forceinline__ static u32 warpgroup_of(u32 along_k, u32 along_n) {
        return along_k * Config::kWarpgroupsN + along_n;
    }
    // How many shares a part has.
    __device__ __forceinline__ static constexpr u32 shares_of(u32 part) {
        return smaller(Config::kSplitK, kShares - part * Config::kSplitK);
    }
    // Where a summer finds the sums of the index-th of its CTA's other warpgroups along k, and of the other CTAs.
    __device__ __forceinline__ u32 part_slot(u32 summer, u32 index) const {
        return base + kSlots + summer * kSlotsOfSummer + index * kPartSlot;
    }
    __device__ __forceinline__ u32 share_slot(u32 summer, u32 index) const {
        return base + kSlots + summer * kSlotsOfSummer + kSlotsOfCta + index * kSlot;
    }
    __device__ __forceinline__ u32 scales(u32 summer) const {
        return base + kScales + summer * Config::kShareTokens * 4;
    }
    __device__ __forceinline__ u32 terms(u32 summer) const { return base + kTerms + summer * kTermsBytes; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + kBarriers + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(Config::kStages + stage); }
    __device__ __forceinline__ u32 part_full(u32 summer) const { return full(2 * Config::kStages + summer); }
    __device__ __forceinline__ u32 part_empty(u32 warpgroup) const { return part_full(kSummers + warpgroup); }
    __device__ __forceinline__ u32 share_full(u32 summer) const { return part_full(kPartBarriers + summer); }
    __device__ __forceinline__ u32 share_empty(u32 summer) const { return share_full(kSummers + summer); }

    // Those that copies complete on; the first copies wait for nothing else.
    __device__ __forceinline__ void init_full_barriers() const {
        for (u32 stage = 0; stage < Config::kStages; ++stage) barrier_init(full(stage), 1);
        barrier_init_fence();
    }

    __device__ __forceinline__ void init_other_barriers(u32 rank) const {
        for (u32 stage = 0; stage < Config::kStages; ++stage)
            barrier_init(empty(stage), kWarpgroups * 4 * kMulticast);
        if constexpr (Config::kWarpgroupsK > 1) {
            for (u32 summer = 0; summer < kSummers; ++summer)
                barrier_init(part_full(summer), 4 * (Config::kWarpgroupsK - 1));
            // Every summer's warps but the warpgroup's own.
            for (u32 w = 0; w < kWarpgroups; ++w) barrier_init(part_empty(w), max(4 * (kParts - (w < kSummers)), 1u));
        }
        if constexpr (Config::kSplitK > 1) {
            for (u32 summer = 0; summer < kSummers; ++summer) {
                // Sums come with their bytes counted, which the summer announces.
                barrier_init(share_full(summer), 1);
                // The warps of all CTAs with a share of the part but its own.
                const u32 shares = shares_of(summer / Config::kWarpgroupsN);
                barrier_init(share_empty(summer), max(4 * (shares - (rank < shares)), 1u));
            }
        }
        barrier_init_fence();
    }
};

__device__ __forceinline__ uint4 load_shared_v4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float load_shared_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float2 load_shared_float2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_float4(u32 address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

__device__ __forceinline__ void store_shared_float(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ u32 load_shared_u8(u32 address) {
    u32 value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// One element of a row of scales in shared memory.
template <RealType kType>
__device__ __forceinline__ float load_shared_real(u32 row, u32 index) {
    if constexpr (kType == kFp32) {
        return load_shared_float(row + index * 4);
    } else {
        u16 bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(row + index * 2) : "memory");
        return kType == kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
    }
}

}  // namespace jitgemm
