// Which tile a cluster computes next, the k-blocks that each of its CTAs takes, and where the tile's weights, factors
// and tokens are. No other header reads m, records, channel scales, row sums or bias from the arguments: a scheduler of
// another kind, of groups of rows say, changes what a tile answers, and nothing else.
#pragma once
#include <jitgemm/gemm/shared.cuh>
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
    u32 expert, end;   // of grouped kernels: whose tile it is, and one past that expert's last row
    u32 out_row;       // kChunks: of the chunk's first token in out

    __device__ __forceinline__ explicit Tile(const Args& args) : args(args), expert(0), end(0), out_row(0) {}

    static constexpr bool kGrouped = Config::kExperts > 0;
    __device__ __forceinline__ const GroupedArgs& groups() const { return static_cast<const GroupedArgs&>(args); }
    // Whether rows are copied one by one, from where row_index says.
    __device__ __forceinline__ bool gathers() const {
        if constexpr (kGrouped) return groups().row_index != nullptr;
        else return false;
    }

    // One past the last token of the rows that the tile belongs to; those of its tokens that lie beyond are not stored.
    __device__ __forceinline__ u32 end_token() const {
        if constexpr (kGrouped) return end;
        else return args.m;
    }
    // Which activations are a row's; always some of lhs.
    __device__ __forceinline__ u32 token_of(u32 row) const {
        if constexpr (kGrouped) {
            if (gathers()) return min(u32(groups().row_index[row]), groups().tokens - 1);
        }
        return row;
    }
    // Tokens of one copy of activations; CTAs that share them bring so many each. The last tile is copied with as many
    // tokens as there are, by a map of its own, because out-of-bounds fill is slow. What lies in shared memory for the
    // missing tokens reaches only results that are clipped. Of a group's last tile, the tokens of all copies together.
    static constexpr u32 kLhsRows = Config::kBlockM / Config::kMulticastLhs;
    __device__ __forceinline__ u32 lhs_rows() const {
        if constexpr (kGrouped) {
            const u32 left = min(end - first_token, u32(Config::kBlockM));
            if (gathers()) return left;
            // More than a few copies take longer than one that also brings the next expert's rows.
            const bool few = Config::kMulticastLhs == 1 && left <= 4 * kSwizzleRows;
            return few ? ceil_div(left, kSwizzleRows) * kSwizzleRows : u32(Config::kBlockM);
        } else return first_token + Config::kBlockM > end_token() ? args.last_rows : kLhsRows;
    }

    // Of the weight that the tile belongs to, as in Args.
    __device__ __forceinline__ const u8* records() const {
        if constexpr (!kGrouped) {
            return args.records;
        } else {
            return args.records + u64(expert) * strips() * ceil_div(args.k, kBlockK) * Record<Config>::kBytes;
        }
    }
    __device__ __forceinline__ const u8* channel_scale() const {
        const u8* first = static_cast<const u8*>(args.channel_scale);
        if constexpr (!kGrouped) {
            return first;
        } else {
            return first + u64(expert) * strips() * kStripRows * (args.channel_scale_type == kFp32 ? 4 : 2);
        }
    }
    __device__ __forceinline__ const float* row_sum() const {
        if constexpr (!kGrouped) {
            return args.row_sum;
        } else {
            return args.row_sum + u64(expert) * strips() * kStripRows;
        }
    }
    __device__ __forceinline__ const void* bias() const {
        if constexpr (!kGrouped) {
            return args.bias;
        } else {
            const u64 bytes = u64(expert) * args.n * (args.bias_type == kFp32 ? 4 : 2);
            return args.bias ? static_cast<const u8*>(args.bias) + bytes : nullptr;
        }
    }

private:
    __device__ __forceinline__ u32 strips() const { return ceil_div(args.n, kStripRows); }
};

// What schedulers share: units of work, and the tile that a CTA has of one. A cluster that multicasts computes kAlongN
// tiles at once, here called a unit. Units are ordered in bands of kBandTiles along m, m fastest inside a band, so that
// the tiles in flight share both operands through the L2.
template <typename Config>
struct Units {
    static constexpr u32 kBlockN = kStripRows * Config::kStrips;
    static constexpr u32 kAlongN = Config::kMulticastLhs;
    static constexpr u32 kClusterSize = Config::kSplitK * kAlongN;
    static constexpr u32 kBandTiles = 8;

    __device__ __forceinline__ static u32 along_m(u32 rows) { return ceil_div(rows, Config::kBlockM); }
    __device__ __forceinline__ static u32 along_n(const Args& args) { return ceil_div(args.n, kBlockN * kAlongN); }

    // The tile of the CTA of this rank in a unit of rows from first_token on. A cluster at the edge may own a tile
    // wholly outside: it still takes part in loads, and its stores are clipped. kBranch spares the divisions where
    // there is one tile along m; in the consumers' loop ptxas would treat the branch as divergent.
    template <bool kBranch>
    __device__ __forceinline__ static void find_tile(Tile<Config>& tile, u32 rank, u32 unit, u32 units_m, u32 units_n,
                                                     u32 first_token, u32 blocks) {
        u32 unit_m = 0, unit_n = unit;
        if (!kBranch || units_m > 1) {
            u32 per_band = kBandTiles * units_n;
            u32 band = unit / per_band;
            u32 inside = unit - band * per_band;
            u32 height = min(kBandTiles, units_m - band * kBandTiles);
            unit_n = inside / height;
            unit_m = band * kBandTiles + inside - unit_n * height;
        }
        tile.first_token = first_token + unit_m * Config::kBlockM;
        tile.first_row = (unit_n * kAlongN + (kAlongN > 1 ? rank : 0)) * kBlockN;
        tile.range = {0, blocks};
        if constexpr (Config::kSplitK > 1) {
            // Records that are promoted together stay together, so that no group of 256 is cut.
            constexpr u32 kTogether = Config::kPromoteRecords == 2 ? 2 : 1;
            const u32 length = ceil_div(blocks, kTogether * Config::kSplitK) * kTogether;
            tile.range = {min(rank * length, blocks), min((rank + 1) * length, blocks)};
        }
    }
};

// Persistent clusters walk the units in static strides; with kChunks those of one chunk of k after the other, each of
// which has rows of its own in out.
template <typename Config, bool kGrouped = (Config::kExperts > 0)>
struct Scheduler : Units<Config> {
    using Units<Config>::kClusterSize;
    // Tiles follow from the launch alone, not from what the kernel before this one writes: weights may be asked for
    // before griddepcontrol.wait.
    static constexpr bool kKnownBeforeWait = true;
    // Tokens of a tile that are not its own lie outside of out, so that the tile store, which clips there, is right.
    static constexpr bool kClippedByMap = true;

    u32 units_m, units_n, unit, blocks;  // blocks of a tile
    u32 chunks;

    __device__ __forceinline__ Scheduler(const Args& args, const Shared<Config>&)
        : units_m(this->along_m(args.m)),
          units_n(this->along_n(args)),
          unit(blockIdx.x / kClusterSize),
          blocks(ceil_div(args.k, kBlockK)) {
        chunks = 1;
        if constexpr (Config::kChunks) chunks = blocks / args.chunk_blocks, blocks = args.chunk_blocks;
    }

    __device__ __forceinline__ static void prepare(const Args&, const Shared<Config>&) {}

    // Of weights in the L2: where one row of tiles reads them, they leave it first.
    __device__ __forceinline__ static u64 weight_policy(const Args& args) {
        return args.m <= Config::kBlockM ? policy_evict_first() : policy_evict_unchanged();
    }

    // Whether the tile that next() gave was the last.
    __device__ __forceinline__ bool done() const { return unit >= units_m * units_n * chunks; }

    // The tile of the CTA of this rank, or false when the cluster is done.
    template <bool kBranch = false>
    __device__ __forceinline__ bool next(Tile<Config>& tile, u32 rank) {
        if (done()) return false;
        u32 chunk = 0, inside = unit;
        if constexpr (Config::kChunks) chunk = unit / (units_m * units_n), inside -= chunk * units_m * units_n;
        this->template find_tile<kBranch>(tile, rank, inside, units_m, units_n, 0, blocks);
        if constexpr (Config::kChunks) {
            tile.range = {tile.range.begin + chunk * blocks, tile.range.end + chunk * blocks};
            tile.out_row = chunk * tile.args.chunk_rows;
        }
        unit += gridDim.x / kClusterSize;
        return true;
    }
};

// The same over the experts that have rows, one expert after the other, so that a weight is read once. Who has how many
// is on the device: prepare() makes a table of it in shared memory.
//
//     first, end [experts]   an expert's rows, within those of out
//     units      [experts]   units of the experts of a chunk of 32 up to this one
template <typename Config>
struct Scheduler<Config, true> : Units<Config> {
    using Units<Config>::kClusterSize;
    static constexpr bool kKnownBeforeWait = false;
    static constexpr bool kClippedByMap = false;
    static constexpr u32 kChunk = 32;  // experts, one a lane
    static_assert(Config::kExperts <= kChunk * kChunk && Config::kExperts % kChunk == 0, "a warp finds a chunk");

    u32 table, units_n, unit, blocks;
    u32 chunk_units;  // of the lane's chunk and those before it
    u32 all_units;

    // Every thread of the CTA calls this once it has waited for the grid before; the table is there after the next
    // barrier of the CTA. Rows never lie outside of out, whatever the sizes are.
    __device__ __forceinline__ static void prepare(const Args& args, const Shared<Config>& shared) {
        const GroupedArgs& groups = static_cast<const GroupedArgs&>(args);
        const u32 lane = threadIdx.x % kChunk;
        auto size = [&](u32 index) -> u32 {
            const long long value = groups.wide_sizes ? static_cast<const long long*>(groups.sizes)[index]
                                                      : static_cast<const i32*>(groups.sizes)[index];
            const u32 most = groups.rows_of_expert ? groups.rows_of_expert : args.m;
            return u32(min(max(value, 0ll), static_cast<long long>(most)));
        };
        for (u32 chunk = threadIdx.x / kChunk * kChunk; chunk < groups.experts; chunk += blockDim.x) {
            const u32 expert = chunk + lane;
            u32 first = 0, end = 0;
            if (expert < groups.experts) {
                first = groups.rows_of_expert ? expert * groups.rows_of_expert : size(expert * groups.sizes_step);
                end = groups.rows_of_expert ? first + size(expert) : max(first, size(expert * groups.sizes_step + 1));
            }
            u32 units = Units<Config>::along_m(end - first) * Units<Config>::along_n(args);
#pragma unroll
            for (u32 step = 1; step < kChunk; step *= 2) {
                const u32 before = __shfl_up_sync(0xFFFFFFFFu, units, step);
                units += lane >= step ? before : 0;
            }
            store_shared_u32(shared.table(0, expert), first);
            store_shared_u32(shared.table(1, expert), end);
            store_shared_u32(shared.table(2, expert), units);
        }
    }

    __device__ __forceinline__ Scheduler(const Args& args, const Shared<Config>& shared)
        : table(shared.table(0, threadIdx.x % kChunk)),
          units_n(this->along_n(args)),
          unit(blockIdx.x / kClusterSize),
          blocks(ceil_div(args.k, kBlockK)) {
        const u32 lane = threadIdx.x % kChunk;
        const bool used = lane * kChunk < static_cast<const GroupedArgs&>(args).experts;
        chunk_units = used ? load_shared_u32(shared.table(2, lane * kChunk + kChunk - 1)) : 0;
#pragma unroll
        for (u32 step = 1; step < kChunk; step *= 2) {
            const u32 before = __shfl_up_sync(0xFFFFFFFFu, chunk_units, step);
            chunk_units += lane >= step ? before : 0;
        }
        all_units = __shfl_sync(0xFFFFFFFFu, chunk_units, kChunk - 1);
    }

    __device__ __forceinline__ static u64 weight_policy(const Args& args) {
        const u32 rows = static_cast<const GroupedArgs&>(args).expected_rows;
        return rows <= Config::kBlockM ? policy_evict_first() : policy_evict_unchanged();
    }

    __device__ __forceinline__ bool done() const { return unit >= all_units; }

    // Called by whole warps.
    template <bool kBranch = false>
    __device__ __forceinline__ bool next(Tile<Config>& tile, u32 rank) {
        if (done()) return false;
        const u32 chunk = __popc(__ballot_sync(0xFFFFFFFFu, chunk_units <= unit));
        const u32 before = __shfl_sync(0xFFFFFFFFu, chunk_units, (chunk - 1) % kChunk);
        u32 inside = chunk > 0 ? unit - before : unit;
        const u32 row = table + chunk * kChunk * 4;
        const u32 units = load_shared_u32(row + Shared<Config>::kTableRow * 2);
        const u32 lane = __popc(__ballot_sync(0xFFFFFFFFu, units <= inside));
        const u32 others = __shfl_sync(0xFFFFFFFFu, units, (lane - 1) % kChunk);
        inside -= lane > 0 ? others : 0;
        // The same in the whole warp, which the compiler cannot know of a load.
        const u32 first = __shfl_sync(0xFFFFFFFFu, load_shared_u32(row), lane);
        tile.end = __shfl_sync(0xFFFFFFFFu, load_shared_u32(row + Shared<Config>::kTableRow), lane);
        tile.expert = chunk * kChunk + lane;
        this->template find_tile<kBranch>(tile, rank, inside, this->along_m(tile.end - first), units_n, first, blocks);
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
