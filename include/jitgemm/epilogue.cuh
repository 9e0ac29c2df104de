// From accumulators to the output: sum of the k-splits, per-token scale, per-channel scale, bias, bf16, transposition,
// clipped store.
//
// Accumulator i of a thread is row 16*warp + lane/4 + 8*((i/2)%2) of the 64-row strip and token
// 8*(i/4) + 2*(lane%4) + i%2.
#pragma once
#include <jitgemm/shared.cuh>
#include <jitgemm/tma.cuh>

namespace jitgemm {

// A consumer warpgroup's place in its CTA and cluster.
struct Place {
    u32 warpgroup, along_n, along_k;
    u32 thread, warp, lane;
    u32 split;  // which share of k; 0 leads: it sums and stores
};

// Adds the partial tiles of all splits in the leader's registers, in the order of the splits: the same bits every run.
// Warpgroups of other CTAs write theirs into the leader's shared memory with stores that count on its barrier as they
// land, so that nothing has to be flushed.
template <typename Config>
__device__ __forceinline__ void reduce_splits(float (&acc)[Config::kBlockM / 2], const Shared<Config>& shared,
                                              const Place& place, u32 parity, bool last_tile) {
    constexpr u32 kVectors = Config::kBlockM / 8;
    if (place.split > 0) {
        // The slot is free once the leader has read the previous tile from it.
        barrier_wait<Config::kDebug>(shared.reduce_empty(place.warpgroup), parity ^ 1);
        u32 slot = shared.slot(place.split, place.along_n) + place.thread * 16;
        if (place.split < Config::kWarpgroupsK) {
            // The leader's own CTA; where there is no cluster, stores into one are illegal.
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i)
                store_shared_float4(slot + i * 2048, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
            __syncwarp();
            if (place.lane == 0) barrier_arrive(shared.reduce_full(place.along_n));
        } else if constexpr (Config::kSplitK > 1) {
            slot = map_to_rank(slot, 0);
            u32 barrier = map_to_rank(shared.reduce_full(place.along_n), 0);
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                asm volatile(
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                    ::"r"(slot + i * 2048), "f"(acc[4 * i]), "f"(acc[4 * i + 1]), "f"(acc[4 * i + 2]),
                      "f"(acc[4 * i + 3]), "r"(barrier)
                    : "memory");
            }
        }
    } else {
        barrier_wait<Config::kDebug>(shared.reduce_full(place.along_n), parity);
        for (u32 split = 1; split < Shared<Config>::kSplits; ++split) {
            u32 slot = shared.slot(split, place.along_n) + place.thread * 16;
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                float4 part = load_shared_float4(slot + i * 2048);
                acc[4 * i] += part.x;
                acc[4 * i + 1] += part.y;
                acc[4 * i + 2] += part.z;
                acc[4 * i + 3] += part.w;
            }
        }
        __syncwarp();
        // After the last tile nobody writes the slots again, and the other CTAs may have ended.
        if (place.lane == 0 && !last_tile) {
            for (u32 split = 1; split < Shared<Config>::kSplits; ++split) {
                u32 warpgroup = split % Config::kWarpgroupsK * Config::kWarpgroupsN + place.along_n;
                u32 slot_free = shared.reduce_empty(warpgroup);
                if (split < Config::kWarpgroupsK) {
                    barrier_arrive(slot_free);
                } else {
                    barrier_arrive_remote(slot_free, split / Config::kWarpgroupsK);
                }
            }
        }
    }
}

// Two values of 16 bits, the first in the low half.
template <RealType kType>
__device__ __forceinline__ u32 pack_halves(float first, float second) {
    u32 packed;
    if constexpr (kType == kBf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    }
    return packed;
}

// The per-token scales of a tile, once per warpgroup; read back after a warpgroup barrier.
template <typename Config>
__device__ __forceinline__ void stage_lhs_scales(const Args& args, const Shared<Config>& shared, const Place& place,
                                                 const Tile& tile) {
    for (u32 i = place.thread; i < Config::kBlockM; i += 128) {
        u32 token = tile.m + i;
        float scale = token < args.m ? args.lhs_scale[token * args.lhs_scale_stride] : 0.0f;
        store_shared_float(shared.scales(place.along_n) + i * 4, scale * Config::Decode::kOutputScale);
    }
}

// What a thread multiplies and adds per row of n; it owns rows lane/4 and lane/4 + 8 of its warp's 16.
struct RowTerms {
    float scale[2];
    float bias[2];
    float sum[2];  // of the row's weights, as the accumulators count them; times -1
};

template <typename Config>
__device__ __forceinline__ RowTerms load_row_terms(const Args& args, const Place& place, const Tile& tile) {
    RowTerms terms;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        u32 row = tile.n + place.along_n * 64 + place.warp * 16 + place.lane / 4 + half * 8;
        bool inside = row < args.n;
        terms.scale[half] = 1.0f;
        if constexpr (Config::kGroupSize == 0)
            terms.scale[half] = inside ? load_real(args.channel_scale, row, args.channel_scale_type) : 0.0f;
        terms.bias[half] = inside && args.bias ? load_real(args.bias, row, args.bias_type) : 0.0f;
        terms.sum[half] = inside && args.lhs_zero ? args.row_sum[row] * (-1.0f / Config::Decode::kOutputScale) : 0.0f;
    }
    return terms;
}

// Scales, converts and stores the warpgroup's 64 columns of the output tile, in runs of columns that take 128 bytes. In
// shared memory a token is a row of 128 bytes whose 16-byte chunks are swizzled: chunk c of token t lies at
// c ^ (t % 8), as the tile store expects and free of bank conflicts.
template <typename Config>
__device__ __forceinline__ void store_tile(float (&acc)[Config::kBlockM / 2], const Args& args,
                                           const TensorMap* out_map, const Shared<Config>& shared, const Place& place,
                                           const Tile& tile, const RowTerms& terms) {
    u32 panel = shared.out(place.along_n);
    if (place.thread == 0) store_wait_read();
    warpgroup_sync(place.warpgroup);  // the panel is free, the per-token scales are there

    u32 scales = shared.scales(place.along_n) + (place.lane % 4) * 8;
    constexpr u32 kRuns = Config::kBlockM / 8;
    // The thread's two rows for two tokens: [row][token].
    auto finish = [&](u32 run, float (&value)[2][2]) {
        float2 token_scale = load_shared_float2(scales + run * 32);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            value[half][0] = acc[run * 4 + half * 2] * terms.scale[half];
            value[half][1] = acc[run * 4 + half * 2 + 1] * terms.scale[half];
        }
        if (args.lhs_zero) {
            u32 token = tile.m + run * 8 + place.lane % 4 * 2;
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                float zero = token + i < args.m ? float(args.lhs_zero[(token + i) * args.lhs_zero_stride]) : 0.0f;
                value[0][i] = fmaf(zero, terms.sum[0], value[0][i]);
                value[1][i] = fmaf(zero, terms.sum[1], value[1][i]);
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            value[half][0] = fmaf(value[half][0], token_scale.x, terms.bias[half]);
            value[half][1] = fmaf(value[half][1], token_scale.y, terms.bias[half]);
        }
    };
    if constexpr (Config::kOutType == kFp32) {
        // Two tiles of 32 columns; the thread's first row is column 16 * warp + lane / 4.
        u32 column = place.warp * 16 + place.lane / 4;
#pragma unroll
        for (u32 run = 0; run < kRuns; ++run) {
            float value[2][2];
            finish(run, value);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                u32 token_in_run = place.lane % 4 * 2 + i % 2;
                u32 byte = (column + i / 2 * 8) % 32 * 4;
                u32 address = panel + column / 32 * (Config::kBlockM * 128) + (run * 8 + token_in_run) * 128;
                store_shared_float(address + (byte ^ (token_in_run * 16)), value[i / 2][i % 2]);
            }
        }
    } else {
        // stmatrix: lanes 8i..8i+7 give the rows of matrix i; matrices are {rows 0-7, rows 8-15} of n for one or two
        // runs of 8 tokens.
        u32 token_in_run = place.lane % 8;
        u32 chunk = place.warp * 2 + (place.lane / 8) % 2;
        u32 address = panel + (place.lane / 16 * 8 + token_in_run) * 128 + ((chunk ^ token_in_run) * 16);
        u32 packed[4];
#pragma unroll
        for (u32 run = 0; run < kRuns; ++run) {
            float value[2][2];
            finish(run, value);
#pragma unroll
            for (u32 half = 0; half < 2; ++half)
                packed[run % 2 * 2 + half] = pack_halves<Config::kOutType>(value[half][0], value[half][1]);
            if (run % 2 == 1) {
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                             ::"r"(address + (run - 1) * 1024), "r"(packed[0]), "r"(packed[1]), "r"(packed[2]),
                               "r"(packed[3])
                             : "memory");
            } else if (run == kRuns - 1) {
                asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                             ::"r"(address + run * 1024), "r"(packed[0]), "r"(packed[1]) : "memory");
            }
        }
    }
    async_proxy_fence();
    warpgroup_sync(place.warpgroup);
    if (place.thread == 0) {
        constexpr u32 kColumns = Config::kOutType == kFp32 ? 32 : 64;
#pragma unroll
        for (u32 column = 0; column < 64; column += kColumns) {
            u32 source = panel + column / kColumns * (Config::kBlockM * 128);
            tile_store(out_map, source, tile.n + place.along_n * 64 + column, tile.m);
        }
    }
}

}  // namespace jitgemm
