// Which tile a cluster computes next, and the k-blocks that each of its CTAs takes.
#pragma once
#include <jitgemm/gemm/types.cuh>

namespace jitgemm {

// Contiguous k-blocks.
struct BlockRange {
    u32 begin, end;
};

struct Tile {
    u32 m;             // first token
    u32 n;             // first row of the weight
    BlockRange range;  // this CTA's k-blocks
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

    u32 units_m, units_n, unit, blocks;

    __device__ __forceinline__ Scheduler(const Args& args)
        : units_m(ceil_div(args.m, Config::kBlockM * kAlongM)),
          units_n(ceil_div(args.n, kBlockN * kAlongN)),
          unit(blockIdx.x / kClusterSize),
          blocks(ceil_div(args.k, kBlockK)) {}

    // Whether the tile that next() gave was the last.
    __device__ __forceinline__ bool done() const { return unit >= units_m * units_n; }

    // The tile of the CTA of this rank, or false when the cluster is done. A cluster at the edge may own a tile wholly
    // outside: it still takes part in loads, and its stores are clipped. kBranch spares the divisions where there is one
    // tile along m; in the consumers' loop ptxas would treat the branch as divergent.
    template <bool kBranch = false>
    __device__ __forceinline__ bool next(Tile& tile, u32 rank) {
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
        tile.m = (unit_m * kAlongM + (kAlongM > 1 ? rank : 0)) * Config::kBlockM;
        tile.n = (unit_n * kAlongN + (kAlongN > 1 ? rank : 0)) * kBlockN;
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
