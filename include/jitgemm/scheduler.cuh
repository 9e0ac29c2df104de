// Which tile a cluster computes next. Knows tiles only: a grouped GEMM is another scheduler, not another kernel.
#pragma once
#include <jitgemm/barrier.cuh>

namespace jitgemm {

// A run of k-blocks.
struct BlockRange {
    u32 begin, end;
};

struct Tile {
    u32 m;             // first token
    u32 n;             // first row of the weight
    bool split;        // whether the CTAs of the cluster share it, a run of k each
    BlockRange range;  // this CTA's
};

// Persistent clusters walk the tiles in static strides. Tiles are ordered in bands of kBandTiles along m, m fastest
// inside a band, so that the tiles in flight share both operands through the L2. With kSplitTail each CTA has tiles of
// its own, as many as the others, and the tiles that are left are split over the CTAs of a cluster:
//
//     CTA    0  1   2  3   4  5         two CTAs a cluster, 16 tiles
//     round  0  1 | 2  3 | 4  5
//            6  7 | 8  9 |10 11
//     tail   12=12|13=13 |14=14
//            15=15|
template <typename Config>
struct Scheduler {
    static constexpr u32 kAlongM = Config::kMulticastRhs ? Config::kMulticast : 1;  // tiles of one cluster along m
    static constexpr u32 kAlongN = Config::kMulticastLhs ? Config::kMulticast : 1;
    static constexpr u32 kBandTiles = 8 / kAlongM;

    u32 units_m, units_n, unit, blocks, tail;

    __device__ __forceinline__ Scheduler(const Args& args)
        : units_m(ceil_div(args.m, Config::kBlockM * kAlongM)),
          units_n(ceil_div(args.n, Config::kBlockN * kAlongN)),
          unit(blockIdx.x / Config::kClusterSize),
          blocks(ceil_div(args.k, 128)),
          tail(0) {
        if constexpr (Config::kSplitTail) {
            tail = units_m * units_n / gridDim.x * gridDim.x;
            if (tail > 0) unit = blockIdx.x;
        }
    }

    // Whether the tile that next() gave was the last.
    __device__ __forceinline__ bool done() const { return unit >= units_m * units_n; }

    // The tile of the CTA of this rank, or false when the cluster is done. A cluster at the edge may own a tile wholly
    // outside: it still takes part in loads, and its stores are clipped. kBranch spares the divisions where there is one
    // tile along m; in the consumers' loop ptxas would take the branch for one that threads may take apart.
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
        tile.n = (unit_n * kAlongN + (kAlongN > 1 ? rank : 0)) * Config::kBlockN;
        tile.split = Config::kSplitK > 1 && unit >= tail;
        tile.range = {0, blocks};
        if (tile.split) {
            // Whole runs of records that are promoted together, so that no group of 256 is cut.
            constexpr u32 kWhole = Config::kPromoteRecords == 2 ? 2 : 1;
            const u32 run = ceil_div(blocks, kWhole * Config::kSplitK) * kWhole;
            tile.range = {min(rank * run, blocks), min((rank + 1) * run, blocks)};
        }
        if (Config::kSplitTail && unit < tail) {
            unit += gridDim.x;
            if (unit >= tail) unit = tail + blockIdx.x / Config::kClusterSize;
        } else {
            unit += gridDim.x / Config::kClusterSize;
        }
        return true;
    }
};

// The stages that hold the first tile's weights before this grid waits for the one before it: all where a CTA streams for
// long, for what it asks for after the wait stands behind what the next kernel asks for before its own.
template <typename Config>
__device__ __forceinline__ u32 prefetched_stages(BlockRange range) {
    const u32 stages = ceil_div(range.end - range.begin, Config::kWarpgroupsK);
    const bool all = Config::kStreams && stages > 2 * Config::kStages;
    return min(all ? Config::kStages : Config::kPrefetchStages, stages);
}

}  // namespace jitgemm
