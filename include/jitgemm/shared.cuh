// The CTA's shared memory, by offset. jitgemm/config.py computes the same total; the rendered source checks it.
//
//     1024-aligned   lhs      [stages][warpgroups_k][block_m][128 B]       activations, 128-byte swizzle
//                    out      [warpgroups_n][64 columns][block_m]          in runs of 128 B a token, 128-byte swizzle
//     64-aligned     records  [stages][warpgroups_n][warpgroups_k][record]
//                    slots    [splits - 1][warpgroups_n][block_m / 8][128 threads][4] fp32 partial tiles (leader CTA)
//                    scales   [warpgroups_n][block_m] fp32                 per-token scales
//                    barriers full[stages] empty[stages] reduce_full[warpgroups_n] reduce_empty[warpgroups]
#pragma once
#include <jitgemm/barrier.cuh>

namespace jitgemm {

template <typename Config>
struct Shared {
    static constexpr u32 kWarpgroups = Config::kWarpgroupsN * Config::kWarpgroupsK;
    static constexpr u32 kSplits = Config::kSplitK * Config::kWarpgroupsK;

    static constexpr u32 kLhsTile = Config::kBlockM * 128;
    static constexpr u32 kLhsStage = Config::kWarpgroupsK * kLhsTile;
    static constexpr u32 kOutPanel = Config::kBlockM * 64 * (Config::kOutType == kFp32 ? 4 : 2);
    static constexpr u32 kRecordRun = Config::kWarpgroupsK * Config::kRecordBytes;
    static constexpr u32 kRecordStage = Config::kWarpgroupsN * kRecordRun;
    static constexpr u32 kSlot = Config::kBlockM * 64 * 4;

    static constexpr u32 kOut = Config::kStages * kLhsStage;
    static constexpr u32 kRecords = kOut + Config::kWarpgroupsN * kOutPanel;
    static constexpr u32 kSlots = kRecords + Config::kStages * kRecordStage;
    static constexpr u32 kScales = kSlots + (kSplits - 1) * Config::kWarpgroupsN * kSlot;
    static constexpr u32 kBarriers = kScales + Config::kWarpgroupsN * Config::kBlockM * 4;
    static constexpr u32 kBarrierCount = 2 * Config::kStages + Config::kWarpgroupsN + kWarpgroups;
    static constexpr u32 kBytes = kBarriers + kBarrierCount * 8;
    static_assert(kRecords % 64 == 0 && kSlots % 64 == 0 && kScales % 16 == 0 && kBarriers % 8 == 0,
                  "misaligned shared memory");

    u32 base;

    __device__ __forceinline__ u32 lhs(u32 stage, u32 along_k) const {
        return base + stage * kLhsStage + along_k * kLhsTile;
    }
    __device__ __forceinline__ u32 out(u32 along_n) const { return base + kOut + along_n * kOutPanel; }
    __device__ __forceinline__ u32 record(u32 stage, u32 along_n, u32 along_k) const {
        return base + kRecords + stage * kRecordStage + along_n * kRecordRun + along_k * Config::kRecordBytes;
    }
    // Slot of a partial tile; split 0 is the leader, which keeps its own in registers.
    __device__ __forceinline__ u32 slot(u32 split, u32 along_n) const {
        return base + kSlots + ((split - 1) * Config::kWarpgroupsN + along_n) * kSlot;
    }
    __device__ __forceinline__ u32 scales(u32 along_n) const { return base + kScales + along_n * Config::kBlockM * 4; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + kBarriers + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(Config::kStages + stage); }
    __device__ __forceinline__ u32 reduce_full(u32 along_n) const { return full(2 * Config::kStages + along_n); }
    __device__ __forceinline__ u32 reduce_empty(u32 warpgroup) const {
        return full(2 * Config::kStages + Config::kWarpgroupsN + warpgroup);
    }

    __device__ __forceinline__ void init_barriers() const {
        for (u32 stage = 0; stage < Config::kStages; ++stage) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), kWarpgroups * 4 * Config::kMulticast);
        }
        for (u32 n = 0; n < Config::kWarpgroupsN; ++n) {
            // The leader's announcement of the bytes from other CTAs, and each warp of the other warpgroups of its own.
            barrier_init(reduce_full(n), 1 + 4 * (Config::kWarpgroupsK - 1));
        }
        for (u32 w = 0; w < kWarpgroups; ++w) barrier_init(reduce_empty(w), 4);
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
        float value;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(row + index * 4) : "memory");
        return value;
    } else {
        u16 bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(row + index * 2) : "memory");
        return kType == kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
    }
}

}  // namespace jitgemm
