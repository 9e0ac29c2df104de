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
    u32 share;  // of the tokens, which it stores; none has those past the last
};

// Whether this call's activations have zero points.
template <typename Config>
__device__ __forceinline__ bool has_zeros(const Args& args) {
    return Config::Decode::kIntegerSums && args.lhs_zero != nullptr;
}

// Place::thread asked for again: what follows from that is kept in registers from tile to tile.
__device__ __forceinline__ u32 thread_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % 128;
}

// Sums over the splits of k are made in two steps. First the warpgroups along k of a CTA sum up a part of the tokens
// each, through its shared memory; then each sends the other CTAs of the cluster their shares of its part, at a sixth of
// that rate (docs/notes/sums.md). With two of both:
//
//     CTA 0, along k 0   part 0 = shares 0, 1 of CTA 0   -- share 1 -->   stores share 0
//            along k 1   part 1 = shares 2, 3 of CTA 0   -- share 3 -->   stores share 2
//     CTA 1, along k 0   part 0 = shares 0, 1 of CTA 1   -- share 0 -->   stores share 1
//            along k 1   part 1 = shares 2, 3 of CTA 1   -- share 2 -->   stores share 3
//
// Each adds in the order of k: the same bits every run, whoever adds.

// Else ptxas keeps the slots' addresses in registers, which four warpgroups with tiles so wide lack.
template <typename Config>
__device__ __forceinline__ u32 sending_thread(const Place& place) {
    constexpr bool kCrowded = Shared<Config>::kWarpgroups == 4 && Config::kBlockM >= 64;
    return kCrowded ? thread_again() : place.thread;
}

// Hands this warpgroup's sums of the other parts to the warpgroups that sum them up.
template <typename Config>
__device__ __forceinline__ void send_to_warpgroups(const float (&acc)[Config::kBlockM / 2],
                                                   const Shared<Config>& shared, const Place& place, u32 parity) {
    using Layout = Shared<Config>;
    constexpr u32 kVectors = Layout::kPartTokens / 8;
    if (Layout::kParts == 1 && place.along_k == 0) return;
    const u32 thread = sending_thread<Config>(place);
    // The slots are free once every summer has read the previous tile from them.
    barrier_wait<Config::kDebug>(shared.part_empty(place.warpgroup), parity ^ 1);
#pragma unroll
    for (u32 part = 0; part < Layout::kParts; ++part) {
        if (part == place.along_k) continue;
        const u32 summer = Layout::warpgroup_of(part, place.along_n);
        const u32 slot = shared.part_slot(summer, place.along_k - (place.along_k > part)) + thread * 16;
#pragma unroll
        for (u32 i = 0; i < kVectors && part * kVectors + i < Config::kBlockM / 8; ++i) {
            const u32 first = (part * kVectors + i) * 4;
            store_shared_float4(slot + i * 2048, acc[first], acc[first + 1], acc[first + 2], acc[first + 3]);
        }
        __syncwarp();
        if (place.lane == 0) barrier_arrive(shared.part_full(summer));
    }
}

// Sends the other CTAs their shares of this warpgroup's part. The stores count on the receiver's barrier as they land,
// so that nothing has to be flushed.
template <typename Config, u32 kPart>
__device__ __forceinline__ void send_to_ctas(const float (&acc)[Config::kBlockM / 2], const Shared<Config>& shared,
                                             const Place& place, u32 rank, u32 parity) {
    constexpr u32 kVectors = Config::kShareTokens / 8;
    constexpr u32 kCount = Shared<Config>::shares_of(kPart);
    if (kCount == 1 && rank == 0) return;
    const u32 thread = sending_thread<Config>(place);
    barrier_wait<Config::kDebug>(shared.share_empty(place.warpgroup), parity ^ 1);
#pragma unroll
    for (u32 to = 0; to < kCount; ++to) {
        if (to == rank) continue;
        const u32 slot = map_to_rank(shared.share_slot(place.warpgroup, rank - (rank > to)) + thread * 16, to);
        const u32 barrier = map_to_rank(shared.share_full(place.warpgroup), to);
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            const u32 first = ((kPart * Config::kSplitK + to) * kVectors + i) * 4;
            asm volatile(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                ::"r"(slot + i * 2048), "f"(acc[first]), "f"(acc[first + 1]), "f"(acc[first + 2]),
                  "f"(acc[first + 3]), "r"(barrier)
                : "memory");
        }
    }
}

// sums[kTokens / 2] += the sums of kCount - 1 others, in slots of kSlot bytes; the thread's own are the kOwn-th in order.
template <u32 kTokens, u32 kCount, u32 kOwn, u32 kSlot>
__device__ __forceinline__ void add_in_order(float* sums, u32 slots, const Place& place) {
#pragma unroll
    for (u32 i = 0; i < kTokens / 8; ++i) {
        float* own = sums + i * 4;
        const u32 slot = slots + place.thread * 16 + i * 2048;
        float4 sum = make_float4(own[0], own[1], own[2], own[3]);
        if constexpr (kOwn > 0) sum = load_shared_float4(slot);
#pragma unroll
        for (u32 other = 1; other < kCount; ++other) {
            float4 part = make_float4(own[0], own[1], own[2], own[3]);
            if (other != kOwn) part = load_shared_float4(slot + (other - (other > kOwn)) * kSlot);
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        own[0] = sum.x;
        own[1] = sum.y;
        own[2] = sum.z;
        own[3] = sum.w;
    }
}

// Adds up a part over the warpgroups along k. Its sums stay where they are in `acc`.
template <typename Config, u32 kPart>
__device__ __forceinline__ void sum_part(float (&acc)[Config::kBlockM / 2], const Shared<Config>& shared,
                                         const Place& place, u32 parity, bool last_tile) {
    using Layout = Shared<Config>;
    constexpr u32 kFirst = kPart * Layout::kPartTokens;
    constexpr u32 kTokens = smaller(Layout::kPartTokens, Config::kBlockM - kFirst);
    barrier_wait<Config::kDebug>(shared.part_full(place.warpgroup), parity);
    const u32 slots = shared.part_slot(place.warpgroup, 0);
    add_in_order<kTokens, Config::kWarpgroupsK, kPart, Layout::kPartSlot>(acc + kFirst / 2, slots, place);
    // After the last tile nobody writes the slots again.
    if (last_tile) return;
    loads_done();
    if (place.lane == 0) {
        for (u32 along_k = 0; along_k < Config::kWarpgroupsK; ++along_k)
            if (along_k != kPart) barrier_arrive(shared.part_empty(Layout::warpgroup_of(along_k, place.along_n)));
    }
}

// Adds up a share over the CTAs of the cluster.
template <typename Config, u32 kShare>
__device__ __forceinline__ void sum_share(float (&acc)[Config::kBlockM / 2], const Shared<Config>& shared,
                                          const Place& place, u32 parity, bool last_tile) {
    constexpr u32 kTokens = Config::kShareTokens, kRank = kShare % Config::kSplitK;
    barrier_wait<Config::kDebug>(shared.share_full(place.warpgroup), parity);
    const u32 slots = shared.share_slot(place.warpgroup, 0);
    add_in_order<kTokens, Config::kSplitK, kRank, Shared<Config>::kSlot>(acc + kShare * kTokens / 2, slots, place);
    // As above; and the other CTAs may have ended.
    if (last_tile) return;
    loads_done();
    if (place.lane == 0) {
        for (u32 rank = 0; rank < Config::kSplitK; ++rank)
            if (rank != kRank) barrier_arrive_remote(shared.share_empty(place.warpgroup), rank);
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

// Starts to copy what the epilogue needs per token of the warpgroup's share and per row of n into shared memory: in
// registers it would be there all through the main loop. Done after copy_wait() and a warpgroup barrier.
template <typename Config>
__device__ __forceinline__ void copy_factors(const Args& args, const Shared<Config>& shared, const Place& place,
                                             const Tile& tile) {
    const u32 thread = thread_again();
#pragma unroll
    for (u32 i = 0; i < Config::kShareTokens; i += 128) {
        const u32 token = tile.m + place.share * Config::kShareTokens + i + thread;
        copy_4(i + thread < Config::kShareTokens, shared.scales(place.warpgroup) + (i + thread) * 4,
               args.lhs_scale + token * args.lhs_scale_stride, args.lhs_scale, token < args.m);
    }
    const u32 first = tile.n + place.along_n * 64;
    const bool inside = thread < 64 && first + thread < args.n;
    const u32 terms = shared.terms(place.warpgroup) + thread * 4;
    if constexpr (Config::kGroupSize == 0) {
        // Bits of the type that it has; the array goes on to the end of the strip.
        const u32 bytes = args.channel_scale_type == kFp32 ? 4 : 2;
        const u8* scale = static_cast<const u8*>(args.channel_scale);
        copy_4(thread * 4 < 64 * bytes, terms, scale + u64(first) * bytes + thread * 4, scale, first < args.n);
    }
    if (has_zeros<Config>(args)) copy_4(thread < 64, terms + 512, args.row_sum + first + thread, args.row_sum, inside);
    if (args.bias) {
        const float bias = inside ? load_real(args.bias, first + thread, args.bias_type) : 0.0f;
        if (thread < 64) store_shared_float(terms + 256, bias);
    }
}

// What a thread multiplies and adds per row of n; it owns rows lane/4 and lane/4 + 8 of its warp's 16.
struct RowTerms {
    float scale[2];
    float bias[2];
    float sum[2];  // of the row's weights, as the accumulators count them; times -1
};

template <typename Config>
__device__ __forceinline__ RowTerms load_row_terms(const Args& args, const Shared<Config>& shared,
                                                   const Place& place) {
    const u32 terms = shared.terms(place.warpgroup);
    RowTerms found;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 row = place.warp * 16 + place.lane / 4 + half * 8;
        found.scale[half] = 1.0f;
        if constexpr (Config::kGroupSize == 0) {
            found.scale[half] = args.channel_scale_type == kFp32   ? load_shared_real<kFp32>(terms, row)
                                : args.channel_scale_type == kBf16 ? load_shared_real<kBf16>(terms, row)
                                                                   : load_shared_real<kFp16>(terms, row);
        }
        found.bias[half] = args.bias ? load_shared_float(terms + 256 + row * 4) : 0.0f;
        found.sum[half] = 0.0f;
        if (has_zeros<Config>(args))
            found.sum[half] = load_shared_float(terms + 512 + row * 4) * (-1.0f / Config::Decode::kOutputScale);
    }
    return found;
}

// Scales a share's sums per row and takes the zero points of its activations off. The panel, which is free, holds them
// meanwhile.
template <typename Config>
__device__ __forceinline__ void take_off_zeros(float* sums, RowTerms& terms, const Args& args, const Place& place,
                                               u32 panel, u32 first_token) {
    for (u32 i = place.thread; i < Config::kShareTokens; i += 128) {
        const u32 token = first_token + i;
        const float zero = token < args.m ? float(args.lhs_zero[token * args.lhs_zero_stride]) : 0.0f;
        store_shared_float(panel + i * 4, zero);
    }
    warpgroup_sync(place.warpgroup);
#pragma unroll
    for (u32 run = 0; run < Config::kShareTokens / 8; ++run) {
        const float2 zeros = load_shared_float2(panel + run * 32 + place.lane % 4 * 8);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float* sum = sums + run * 4 + half * 2;
            sum[0] = fmaf(zeros.x, terms.sum[half], sum[0] * terms.scale[half]);
            sum[1] = fmaf(zeros.y, terms.sum[half], sum[1] * terms.scale[half]);
        }
    }
    terms.scale[0] = terms.scale[1] = 1.0f;
    warpgroup_sync(place.warpgroup);
}

// Scales, converts and stores a share of the output tile, in runs of columns that take 128 bytes. In shared memory a
// token is a row of 128 bytes whose 16-byte chunks are swizzled: chunk c of token t lies at c ^ (t % 8), as the tile
// store expects and free of bank conflicts.
template <typename Config, u32 kShare>
__device__ __forceinline__ void store_share(float (&acc)[Config::kBlockM / 2], const Args& args,
                                            const TensorMap* out_map, const Shared<Config>& shared, const Place& place,
                                            const Tile& tile) {
    const u32 panel = shared.out(place.warpgroup);
    if (place.thread == 0) store_wait_read();
    copy_wait();
    warpgroup_sync(place.warpgroup);  // the panel is free, the factors are there
    RowTerms terms = load_row_terms(args, shared, place);

    const u32 first_token = tile.m + kShare * Config::kShareTokens;
    constexpr u32 kRuns = Config::kShareTokens / 8;
    float* sums = acc + kShare * kRuns * 4;
    if (has_zeros<Config>(args)) take_off_zeros<Config>(sums, terms, args, place, panel, first_token);

    const u32 scales = shared.scales(place.warpgroup) + (place.lane % 4) * 8;
    // Two runs at a time: neither's token scales are waited for alone, and one stmatrix writes both.
#pragma unroll
    for (u32 first = 0; first < kRuns; first += 2) {
        const u32 count = min(2u, kRuns - first);
        float2 token_scales[2];
#pragma unroll
        for (u32 i = 0; i < count; ++i) token_scales[i] = load_shared_float2(scales + (first + i) * 32);
        u32 packed[4];
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            token_scales[i].x *= Config::Decode::kOutputScale;
            token_scales[i].y *= Config::Decode::kOutputScale;
            float value[2][2];  // the thread's two rows for two tokens: [row][token]
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const float* sum = sums + (first + i) * 4 + half * 2;
                value[half][0] = fmaf(sum[0] * terms.scale[half], token_scales[i].x, terms.bias[half]);
                value[half][1] = fmaf(sum[1] * terms.scale[half], token_scales[i].y, terms.bias[half]);
            }
            if constexpr (Config::kOutType == kFp32) {
                // Two tiles of 32 columns; the thread's first row is column 16 * warp + lane / 4.
                const u32 column = place.warp * 16 + place.lane / 4;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    u32 token_in_run = place.lane % 4 * 2 + j % 2;
                    u32 byte = (column + j / 2 * 8) % 32 * 4;
                    u32 row = panel + column / 32 * (Config::kShareTokens * 128);
                    row += ((first + i) * 8 + token_in_run) * 128;
                    store_shared_float(row + (byte ^ (token_in_run * 16)), value[j / 2][j % 2]);
                }
            } else {
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
                    packed[i * 2 + half] = pack_halves<Config::kOutType>(value[half][0], value[half][1]);
            }
        }
        if constexpr (Config::kOutType != kFp32) {
            // stmatrix: lanes 8i..8i+7 give the rows of matrix i; matrices are {rows 0-7, rows 8-15} of n for one or
            // two runs of 8 tokens.
            const u32 token_in_run = place.lane % 8;
            const u32 chunk = place.warp * 2 + (place.lane / 8) % 2;
            const u32 row = panel + (place.lane / 16 * 8 + token_in_run) * 128 + (chunk ^ token_in_run) * 16;
            if (count == 2) {
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                             ::"r"(row + first * 1024), "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                             : "memory");
            } else {
                asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                             ::"r"(row + first * 1024), "r"(packed[0]), "r"(packed[1]) : "memory");
            }
        }
    }
    async_proxy_fence();
    warpgroup_sync(place.warpgroup);
    if (place.thread == 0) {
        constexpr u32 kColumns = Config::kOutType == kFp32 ? 32 : 64;
#pragma unroll
        for (u32 column = 0; column < 64; column += kColumns) {
            u32 source = panel + column / kColumns * (Config::kShareTokens * 128);
            tile_store(out_map, source, tile.n + place.along_n * 64 + column, first_token);
        }
    }
}

// Sums a share over the cluster and stores it, if it is this warpgroup's.
template <typename Config, u32 kShare, u32 kEnd>
__device__ __forceinline__ void finish_share(float (&acc)[Config::kBlockM / 2], const Args& args,
                                             const TensorMap* out_map, const Shared<Config>& shared, const Place& place,
                                             const Tile& tile, u32 parity, bool last_tile) {
    // A constant for each share, so that accumulators stay in registers.
    if (place.share == kShare) {
        if constexpr (Config::kSplitK > 1) {
            sum_share<Config, kShare>(acc, shared, place, parity, last_tile);
        }
        store_share<Config, kShare>(acc, args, out_map, shared, place, tile);
    } else if constexpr (kShare + 1 < kEnd) {
        finish_share<Config, kShare + 1, kEnd>(acc, args, out_map, shared, place, tile, parity, last_tile);
    }
}

// Sums the tile over the splits of k and stores it, each split its share.
template <typename Config, u32 kPart = 0>
__device__ __forceinline__ void finish_tile(float (&acc)[Config::kBlockM / 2], const Args& args,
                                            const TensorMap* out_map, const Shared<Config>& shared, const Place& place,
                                            const Tile& tile, u32 rank, u32 parity, bool last_tile) {
    using Layout = Shared<Config>;
    if (Layout::kParts == 1 || place.along_k == kPart) {
        if constexpr (Config::kWarpgroupsK > 1) {
            if (place.along_k > kPart) return;
            sum_part<Config, kPart>(acc, shared, place, parity, last_tile);
        }
        if constexpr (Config::kSplitK > 1) {
            send_to_ctas<Config, kPart>(acc, shared, place, rank, parity);
        }
        constexpr u32 kFirst = kPart * Config::kSplitK;
        constexpr u32 kEnd = kFirst + Layout::shares_of(kPart);
        finish_share<Config, kFirst, kEnd>(acc, args, out_map, shared, place, tile, parity, last_tile);
    } else if constexpr (kPart + 1 < Layout::kParts) {
        finish_tile<Config, kPart + 1>(acc, args, out_map, shared, place, tile, rank, parity, last_tile);
    }
}

}  // namespace jitgemm
