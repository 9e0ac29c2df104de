// Which tile a cluster computes next, the k-blocks that each of its CTAs takes, and where the tile's weights, factors
// and tokens are. No other header reads m, records, channel scales, row sums or bias from the arguments: a scheduler of
// another kind, of groups of rows say, changes what a tile answers, and nothing else.
#pragma once
#include <jitgemm/gemm/types.cuh>
#include <jitgemm/ptx/tma.cuh>

namespace jitgemm {

// Contiguous k-blocks.
struct BlockRange {
    u32 begin, end;
};

template <typename Config>
struct Tile {
    const Args& args;
    u32 first_token;
    u32 first_row;     // of the weight
    BlockRange range;  // this CTA's k-blocks

    __device__ __forceinline__ explicit Tile(const Args& args) : args(args) {}

    // One past the last token of the rows that the tile belongs to; those of its tokens that lie beyond are not stored.
    __device__ __forceinline__ u32 end_token() const { return args.m; }
    // Tokens of one copy of activations; CTAs that share them bring so many each. The last tile is copied with as many
    // tokens as there are, by a map of its own, because out-of-bounds fill is slow. What lies in shared memory for the
    // missing tokens reaches only results that are clipped.
    static constexpr u32 kLhsRows = Config::kBlockM / Config::kMulticastLhs;
    __device__ __forceinline__ u32 lhs_rows() const {
        return first_token + Config::kBlockM > end_token() ? args.last_rows : kLhsRows;
    }

    // Of the weight that the tile belongs to, as in Args.
    __device__ __forceinline__ const u8* records() const { return args.records; }
    __device__ __forceinline__ const u8* channel_scale() const { return static_cast<const u8*>(args.channel_scale); }
    __device__ __forceinline__ const float* row_sum() const { return args.row_sum; }
    __device__ __forceinline__ const void* bias() const { return args.bias; }
};

// Persistent clusters walk the tiles in static strides. Tiles are ordered in bands of kBandTiles along m, m fastest
// inside a band, so that the tiles in flight share both operands through the L2. A cluster that multicasts computes
// kAlongM x kAlongN tiles at once, here called a unit.
template <typename Config>
struct Scheduler {
    static constexpr u32 kBlockN = kStripRows * Config::kWarpgroupsN;
    static constexpr u32 kAlongM = Config::kMulticastRhs, kAlongN = Config::kMulticastLhs;
    static constexpr u32 kClusterSize = Config::kSplitK * kAlongM * kAlongN;
    static constexpr u32 kBandTiles = 8 / kAlongM;
    // Tiles follow from the launch alone, not from what the kernel before this one writes: weights may be asked for
    // before griddepcontrol.wait.
    static constexpr bool kKnownBeforeWait = true;
    // Tokens of a tile that are not its own lie outside of out, so that the tile store, which clips there, is right.
    static constexpr bool kClippedByMap = true;

    u32 units_m, units_n, unit, blocks;

    __device__ __forceinline__ Scheduler(const Args& args)
        : units_m(ceil_div(args.m, Config::kBlockM * kAlongM)),
          units_n(ceil_div(args.n, kBlockN * kAlongN)),
          unit(blockIdx.x / kClusterSize),
          blocks(ceil_div(args.k, kBlockK)) {}

    // Of weights in the L2: where one row of tiles reads them, they leave it first.
    __device__ __forceinline__ static u64 weight_policy(const Args& args) {
        return args.m <= Config::kBlockM ? policy_evict_first() : policy_evict_unchanged();
    }

    // Whether the tile that next() gave was the last.
    __device__ __forceinline__ bool done() const { return unit >= units_m * units_n; }

    // The tile of the CTA of this rank, or false when the cluster is done. A cluster at the edge may own a tile wholly
    // outside: it still takes part in loads, and its stores are clipped. kBranch spares the divisions where there is
    // one tile along m; in the consumers' loop ptxas would treat the branch as divergent.
    template <bool kBranch = false>
    __device__ __forceinline__ bool next(Tile<Config>& tile, u32 rank) {
        if (done()) return false;
        u32 unit_m = 0, unit_n = unit;
        if (!kBranch || units_m > 1) {
            u32 per_band = kBandTiles * units_n;
            u32 band = unit / per_band;
            u32 inside = unit - band * per_band;
            u32 height = min(kBandTiles, units_m - band * kBandTiles);
            unit_n = inside / height;
            unit_m = band * kBandTiles + inside - unit_n * height;
        }
        tile.first_token = (unit_m * kAlongM + (kAlongM > 1 ? rank : 0)) * Config::kBlockM;
        tile.first_row = (unit_n * kAlongN + (kAlongN > 1 ? rank : 0)) * kBlockN;
        tile.range = {0, blocks};
        if constexpr (Config::kSplitK > 1) {
            // Records that are promoted together stay together, so that no group of 256 is cut.
            constexpr u32 kTogether = Config::kPromoteRecords == 2 ? 2 : 1;
            const u32 length = ceil_div(blocks, kTogether * Config::kSplitK) * kTogether;
            tile.range = {min(rank * length, blocks), min((rank + 1) * length, blocks)};
        }
        unit += gridDim.x / kClusterSize;
        return true;
    }
};

// The stages that hold the first tile's weights before this grid waits for the one before it.
template <typename Config>
__device__ __forceinline__ u32 prefetched_stages(BlockRange range) {
    return min(Config::kPrefetchStages, ceil_div(range.end - range.begin, Config::kWarpgroupsK));
}

}  // namespace jitgemm
