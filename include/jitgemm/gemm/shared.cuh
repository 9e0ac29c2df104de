// The CTA's shared memory, by offset. smem_bytes() in jitgemm/kernel/spec.py computes the same total; the rendered
// source checks it.
//
//     1024-aligned   lhs      [stages][warpgroups_k][block_m][128 B]       activations, 128-byte swizzle
//                    out      [reducers][slice][64 columns]                rows of 128 B a token, 128-byte swizzle;
//                                                                          kTokensAsM: for each strip
//     64-aligned     records  [stages][strips][warpgroups_k][record]       1024-aligned where wgmma reads them;
//                                                                          kTokensAsM: only their codes, so that strips
//                                                                          follow one another as one operand
//                    slots    [reducers][warpgroups_k - 1][span / 8][128 threads][4] fp32 sums of the CTA's other
//                             warpgroups along k and, for each reducer behind them, [split_k - 1][slice / 8][128][4] of
//                             the other CTAs
//                    blocks   [stages][warpgroups_k][block_m] fp32         scales per token and 128 k (kLhsGroup), or
//                             words of packed exponents (kLhsE8m0), or
//                    strips   [stages][strips][32 B]                       the first of a record's scales (kTokensAsM)
//                    scales   [reducers][slice] fp32                       per-token scales
//                    terms    [reducers][3][64] fp32                       scale, bias and sum of each row of n;
//                             [reducers][columns]                          kTokensAsM: their bias
//                    barriers full[stages] empty[stages]
//                             span_full[reducers] span_empty[warpgroups]   where warpgroups split k
//                             slice_full[reducers] slice_empty[reducers]   where CTAs do
//                    table    [3][experts] u32                             of grouped kernels (scheduler.cuh)
//                    decode   [the codec's kTableBytes]                    its tables (codec.cuh), 16-aligned
//
// The sums over the splits of k are a reduce-scatter in two steps (sums.cuh). A `slice` is the tokens that one
// warpgroup stores; a `span` is the tokens that it sums over its CTA's warpgroups along k: a slice for each CTA of the cluster,
// as long as there are slices. `reducers` are the warpgroups of a CTA that have a span.
#pragma once
#include <jitgemm/gemm/codec.cuh>
#include <jitgemm/gemm/config.cuh>
#include <jitgemm/ptx/barrier.cuh>

namespace jitgemm {

template <typename Config>
struct Shared {
    static constexpr u32 kWarpgroups = Config::kWarpgroupsM * Config::kWarpgroupsN * Config::kWarpgroupsK;
    // Where rows are tokens, a warpgroup stores its halves one after the other.
    static constexpr u32 kSlices = Config::kTokensAsM ? 1 : Config::kBlockM / Config::kSliceTokens;
    static constexpr u32 kSpans = ceil_div(kSlices, Config::kSplitK);
    static constexpr u32 kSpanTokens = Config::kSliceTokens * smaller(Config::kSplitK, kSlices);
    static constexpr u32 kReducers = kSpans * Config::kWarpgroupsN * Config::kWarpgroupsM;
    static_assert(Config::kSliceTokens * kSlices *
                              (Config::kTokensAsM ? Config::kWarpgroupsM * Config::kHalves : 1) ==
                          Config::kBlockM &&
                      kSpans <= Config::kWarpgroupsK,
                  "slices cover the tile");

    static constexpr u32 kLhsTile = Config::kBlockM * kSwizzledRow;
    static constexpr u32 kLhsStage = Config::kWarpgroupsK * kLhsTile;
    static constexpr u32 kStripsOfWarpgroup = Config::kStrips / Config::kWarpgroupsN;
    static constexpr u32 kOutPanel =
        Config::kSliceTokens * kStripsOfWarpgroup * kStripRows * real_bytes(Config::kOutType);
    // What of a record lies together.
    static constexpr u32 kRecordBytes = Config::kTokensAsM ? Record<Config>::kScales : Record<Config>::kBytes;
    static constexpr u32 kRecord = Config::Codec::kSharedWeights ? ceil_div(kRecordBytes, 1024) * 1024 : kRecordBytes;
    static constexpr u32 kRecordColumn = Config::kWarpgroupsK * kRecord;
    static constexpr u32 kRecordStage = Config::kStrips * kRecordColumn;
    static constexpr u32 kStripScale = Config::kTokensAsM ? 32 : 0;
    static constexpr u32 kSlot = Config::kSliceTokens * kStripRows * 4;
    static constexpr u32 kSpanSlot = kSpanTokens * kStripRows * 4;
    static constexpr u32 kTermsBytes = (Config::kTokensAsM ? kStripsOfWarpgroup : 3) * kStripRows * 4;
    static constexpr u32 kBlockScalesTile = Config::kLhsGroup ? Config::kBlockM * 4 : 0;
    static constexpr u32 kScalesTile = Config::kLhsGroup ? 0 : Config::kSliceTokens * 4;
    static constexpr u32 kLanesThatCopy = Config::kLhsGroup ? 32 : 0;  // and count on a stage's barrier

    static constexpr u32 kOut = Config::kStages * kLhsStage;
    static constexpr u32 kRecords = kOut + kReducers * kOutPanel;
    static constexpr u32 kSlots = kRecords + Config::kStages * kRecordStage;
    static constexpr u32 kSlotsOfCta = (Config::kWarpgroupsK - 1) * kSpanSlot;
    static constexpr u32 kSlotsOfReducer = kSlotsOfCta + (Config::kSplitK - 1) * kSlot;
    static constexpr u32 kBlockScales = kSlots + kReducers * kSlotsOfReducer;
    static constexpr u32 kStripScales = kBlockScales + Config::kStages * Config::kWarpgroupsK * kBlockScalesTile;
    static constexpr u32 kScales = kStripScales + Config::kStages * Config::kStrips * kStripScale;
    static constexpr u32 kTerms = kScales + kReducers * kScalesTile;
    static constexpr u32 kBarriers = kTerms + kReducers * kTermsBytes;
    static constexpr u32 kSpanBarriers = Config::kWarpgroupsK > 1 ? kReducers + kWarpgroups : 0;
    static constexpr u32 kSliceBarriers = Config::kSplitK > 1 ? 2 * kReducers : 0;
    static constexpr u32 kBarrierCount = 2 * Config::kStages + kSpanBarriers + kSliceBarriers;
    static constexpr u32 kTable = kBarriers + kBarrierCount * 8;
    static constexpr u32 kTableRow = Config::kExperts * 4;
    static constexpr u32 kTablesBytes = Record<Config>::kMultipliers ? Config::Codec::kTableBytes : 0;
    static constexpr u32 kTableEnd = kTable + 3 * kTableRow;
    static constexpr u32 kDecode = kTablesBytes ? ceil_div(kTableEnd, 16) * 16 : kTableEnd;
    static constexpr u32 kBytes = kDecode + kTablesBytes;
    static_assert(kRecords % (Config::Codec::kSharedWeights ? 1024 : 64) == 0 && kSlots % 64 == 0 &&
                      kScales % 16 == 0 && kBarriers % 8 == 0 && kDecode % 8 == 0,
                  "misaligned shared memory");

    u32 base;

    __device__ __forceinline__ u32 lhs(u32 stage, u32 along_k) const {
        return base + stage * kLhsStage + along_k * kLhsTile;
    }
    __device__ __forceinline__ u32 out(u32 reducer) const { return base + kOut + reducer * kOutPanel; }
    __device__ __forceinline__ u32 record(u32 stage, u32 strip, u32 along_k) const {
        return base + kRecords + stage * kRecordStage + strip * kRecordColumn + along_k * kRecord;
    }
    __device__ __forceinline__ u32 strip_scale(u32 stage, u32 strip) const {
        return base + kStripScales + (stage * Config::kStrips + strip) * kStripScale;
    }
    __device__ __forceinline__ static u32 warpgroup_of(u32 along_k, u32 along_n) {
        return along_k * Config::kWarpgroupsN + along_n;
    }
    // How many slices a span has.
    __device__ __forceinline__ static constexpr u32 slices_of(u32 span) {
        return smaller(Config::kSplitK, kSlices - span * Config::kSplitK);
    }
    // The sums that a reducer gets from the index-th of its CTA's other warpgroups along k, and of the other CTAs.
    __device__ __forceinline__ u32 span_slot(u32 reducer, u32 index) const {
        return base + kSlots + reducer * kSlotsOfReducer + index * kSpanSlot;
    }
    __device__ __forceinline__ u32 slice_slot(u32 reducer, u32 index) const {
        return base + kSlots + reducer * kSlotsOfReducer + kSlotsOfCta + index * kSlot;
    }
    __device__ __forceinline__ u32 block_scales(u32 stage, u32 along_k) const {
        return base + kBlockScales + (stage * Config::kWarpgroupsK + along_k) * kBlockScalesTile;
    }
    __device__ __forceinline__ u32 scales(u32 reducer) const { return base + kScales + reducer * kScalesTile; }
    __device__ __forceinline__ u32 terms(u32 reducer) const { return base + kTerms + reducer * kTermsBytes; }
    __device__ __forceinline__ u32 table(u32 row, u32 expert) const {
        return base + kTable + row * kTableRow + expert * 4;
    }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + kBarriers + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(Config::kStages + stage); }
    __device__ __forceinline__ u32 span_full(u32 reducer) const { return full(2 * Config::kStages + reducer); }
    __device__ __forceinline__ u32 span_empty(u32 warpgroup) const { return span_full(kReducers + warpgroup); }
    __device__ __forceinline__ u32 slice_full(u32 reducer) const { return span_full(kSpanBarriers + reducer); }
    __device__ __forceinline__ u32 slice_empty(u32 reducer) const { return slice_full(kReducers + reducer); }

    // The barriers that copies complete on; the first copies wait for nothing else.
    __device__ __forceinline__ void init_full_barriers() const {
        for (u32 stage = 0; stage < Config::kStages; ++stage) barrier_init(full(stage), 1 + kLanesThatCopy);
        barrier_init_fence();
    }

    __device__ __forceinline__ void init_other_barriers(u32 rank) const {
        for (u32 stage = 0; stage < Config::kStages; ++stage)
            barrier_init(empty(stage), kWarpgroups * 4 * Config::kMulticastLhs);
        if constexpr (Config::kWarpgroupsK > 1) {
            for (u32 reducer = 0; reducer < kReducers; ++reducer)
                barrier_init(span_full(reducer), 4 * (Config::kWarpgroupsK - 1));
            // The warps of every reducer but the warpgroup itself.
            for (u32 w = 0; w < kWarpgroups; ++w) barrier_init(span_empty(w), max(4 * (kSpans - (w < kReducers)), 1u));
        }
        if constexpr (Config::kSplitK > 1) {
            for (u32 reducer = 0; reducer < kReducers; ++reducer) {
                // Sums come with their bytes counted, which the reducer announces.
                barrier_init(slice_full(reducer), 1);
                // The warps of all CTAs with a slice of the span but its own.
                const u32 slices = slices_of(reducer / Config::kWarpgroupsN);
                barrier_init(slice_empty(reducer), max(4 * (slices - (rank < slices)), 1u));
            }
        }
        barrier_init_fence();
    }
};

}  // namespace jitgemm
