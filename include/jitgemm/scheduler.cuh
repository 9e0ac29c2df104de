// Which tile a cluster computes next. Knows tiles only: a grouped GEMM is another scheduler, not another kernel.
#pragma once
#include <jitgemm/barrier.cuh>

namespace jitgemm {

struct Tile {
    u32 m;  // first token
    u32 n;  // first row of the weight
};

// Persistent clusters walk the tiles in static strides. Tiles are ordered in bands of kBandTiles along m, m fastest
// inside a band, so that the tiles in flight share both operands through the L2.
template <typename Config>
struct Scheduler {
    static constexpr u32 kAlongM = Config::kMulticastRhs ? Config::kMulticast : 1;  // tiles of one cluster along m
    static constexpr u32 kAlongN = Config::kMulticastLhs ? Config::kMulticast : 1;
    static constexpr u32 kBandTiles = 8 / kAlongM;

    u32 units_m, units_n, unit, step;

    __device__ __forceinline__ Scheduler(const Args& args)
        : units_m(ceil_div(args.m, Config::kBlockM * kAlongM)),
          units_n(ceil_div(args.n, Config::kBlockN * kAlongN)),
          unit(blockIdx.x / Config::kClusterSize),
          step(gridDim.x / Config::kClusterSize) {}

    // Whether the tile that next() gave was the last.
    __device__ __forceinline__ bool done() const { return unit >= units_m * units_n; }

    // The tile of the CTA of this rank, or false when the cluster is done. A cluster at the edge may own a tile wholly
    // outside: it still takes part in loads, and its stores are clipped.
    __device__ __forceinline__ bool next(Tile& tile, u32 rank) {
        if (done()) return false;
        u32 per_band = kBandTiles * units_n;
        u32 band = unit / per_band;
        u32 inside = unit - band * per_band;
        u32 height = min(kBandTiles, units_m - band * kBandTiles);
        u32 unit_n = inside / height;
        u32 unit_m = band * kBandTiles + inside - unit_n * height;
        tile.m = (unit_m * kAlongM + (kAlongM > 1 ? rank : 0)) * Config::kBlockM;
        tile.n = (unit_n * kAlongN + (kAlongN > 1 ? rank : 0)) * Config::kBlockN;
        unit += step;
        return true;
    }
};

// The run of k-blocks that a CTA of a split-k cluster works on.
struct BlockRange {
    u32 begin, end;
};

template <typename Config>
__device__ __forceinline__ BlockRange block_range(const Args& args, u32 rank) {
    u32 blocks = ceil_div(args.k, 128);
    if constexpr (Config::kSplitK == 1) return {0, blocks};
    // Runs start at even blocks so that no group of 256 is cut.
    u32 run = ceil_div(blocks, 2 * Config::kSplitK) * 2;
    return {min(rank * run, blocks), min((rank + 1) * run, blocks)};
}

// The stages that hold the first tile's weights before this grid waits for the one before it.
template <typename Config>
__device__ __forceinline__ u32 prefetched_stages(BlockRange range) {
    return min(Config::kPrefetchStages, ceil_div(range.end - range.begin, Config::kWarpgroupsK));
}

}  // namespace jitgemm
