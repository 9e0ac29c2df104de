// A warpgroup's part of a tile: its records, what corrects their sums, and stages that it has no part of.
#pragma once
#include <jitgemm/gemm/correction.cuh>
#include <jitgemm/gemm/loop.cuh>

namespace jitgemm {

// Multiplies the warpgroup's records of a tile's first kWidth tokens into `acc`. While one record multiplies, the next
// is loaded and decoded. `begin` is called once the tile's first record is decoded and before activations are needed.
template <typename Config, u32 kWidth, typename Begin>
__device__ __forceinline__ void multiply_tile(float (&acc)[Config::kSums], TileSums<Config>& sums,
                                              Multiplicands<Config>& of, Begin begin) {
    const Shared<Config>& shared = of.shared;
    const Position& position = of.position;
    Ring<Config::kStages>& ring = of.ring;
    const u32 blocks = of.range.end - of.range.begin, stages = ceil_div(blocks, Config::kWarpgroupsK);
    // The last stage may hold no record for this warpgroup.
    auto records_of = [&](u32 blocks) {
        return ceil_div(max(blocks, position.along_k) - position.along_k, Config::kWarpgroupsK);
    };
    u32 records = records_of(blocks), corrections = 0;
    if constexpr (Config::kCorrects) {
        corrections = records;
        records = records_of(min(max(of.codes_end, of.range.begin), of.range.end) - of.range.begin);
        corrections -= records;
    }
    const u64 first_descriptor =
        k_major_descriptor(shared.lhs(0, position.along_k) + first_token_row<Config>(position, 0) * kSwizzledRow);

    // Known where k is not split, which saves registers; but with one set of fragments ptxas would serialise the
    // multiplies (C7513).
    const bool any =
        (Config::kFragmentSets == 2 && Config::kSplitK == 1 && Config::kWarpgroupsK == 1) || records > 0;
    Loop<Config, kWidth> loop(acc, sums, of, first_descriptor);
    if (!any) begin();
    if (any) loop.run(records, begin);
    if constexpr (Config::kCorrects) {
#pragma unroll 1
        for (u32 left = corrections; left > 0; --left) {
            const u32 stage = ring.stage;
            barrier_wait<Config::kDebug>(shared.full(stage), ring.parity);
            correct<Config, kWidth>(acc, loop.record(stage), loop.descriptor(stage), position);
            release_stage(shared, stage, position);
            ring.advance();
        }
    }
    if (records + corrections < stages) {
        barrier_wait<Config::kDebug>(shared.full(ring.stage), ring.parity);
        release_stage(shared, ring.stage, position);
        ring.advance();
    }
}

// Whether a warpgroup has any of a tile's tokens; a tile may hold fewer tokens than it is wide.
template <typename Config>
__device__ __forceinline__ bool has_tokens(const Position& position, u32 tokens) {
    return Config::kWarpgroupsM == 1 || first_token_row<Config>(position, 0) < tokens;
}

// Hands all stages of a tile back; the warpgroup has none of the tile's tokens.
template <typename Config, typename Begin>
__device__ __forceinline__ void skip_tile(Multiplicands<Config>& of, Begin begin) {
    begin();
    for (u32 block = of.range.begin; block < of.range.end; ++block) {
        barrier_wait<Config::kDebug>(of.shared.full(of.ring.stage), of.ring.parity);
        release_stage(of.shared, of.ring.stage, of.position);
        of.ring.advance();
    }
}

// The same with the narrowest multiply that takes `tokens`.
template <typename Config, u32 kIndex = 0, typename Begin>
__device__ __forceinline__ void multiply_tokens(u32 tokens, float (&acc)[Config::kSums], TileSums<Config>& sums,
                                                Multiplicands<Config>& of, Begin begin) {
    constexpr u32 kWidth = Config::width(kIndex);
    if constexpr (Config::kWarpgroupsM > 1) {
        if (!has_tokens<Config>(of.position, tokens)) {
            skip_tile(of, begin);
            return;
        }
    }
    if constexpr (kIndex + 1 < Config::kWidths) {
        if (tokens > kWidth) {
            multiply_tokens<Config, kIndex + 1>(tokens, acc, sums, of, begin);
            return;
        }
    }
    multiply_tile<Config, kWidth>(acc, sums, of, begin);
}

}  // namespace jitgemm
