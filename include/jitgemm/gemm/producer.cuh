// Who fills the stages: the producer warp with weight records and activations, a second warp with scales of activations
// per token and 128 k, and, for the first stages of narrow tiles, the consumers themselves with activations.
#pragma once
#include <jitgemm/gemm/scheduler.cuh>
#include <jitgemm/gemm/shared.cuh>

namespace jitgemm {

// ---- the producer warps ---------------------------------------------------------------------------------------------

// Records of each strip in the stage that begins at `block`: one for each warpgroup along k, fewer at the end.
template <typename Config>
__device__ __forceinline__ u32 blocks_of_stage(BlockRange range, u32 block) {
    return Config::kWarpgroupsK == 1 ? 1 : min(u32(Config::kWarpgroupsK), range.end - block);
}

// What a producer fills stages from.
template <typename Config>
struct Source {
    const Args& args;
    const Maps& maps;
    const Shared<Config>& shared;
    u32 rank;
    u64 policy;  // of weights in the L2
};

// A stage to fill: from `block` on, with `blocks` of them.
struct Filling {
    u32 stage, block, blocks;
};

// Announces a stage's bytes and copies its weight records: for each strip contiguous ones. The bytes of activations
// count where copies bring them too: `rows` is Tile::lhs_rows().
template <typename Config>
__device__ __forceinline__ void load_weights(const Source<Config>& source, const Tile<Config>& tile,
                                             const Filling& filling, u32 rows) {
    const Args& args = source.args;
    const Shared<Config>& shared = source.shared;
    const u32 stage = filling.stage, blocks = filling.blocks;
    const u64 policy = source.policy;
    u32 bytes = blocks * Shared<Config>::kRecordBytes;
    const u32 copies = Tile<Config>::kGrouped ? 1 : Config::kMulticastLhs;
    const u32 lhs_bytes = blocks * copies * rows * kSwizzledRow;
    barrier_expect_bytes(shared.full(stage), Config::kStrips * (bytes + Shared<Config>::kStripScale) + lhs_bytes);
    u32 k_blocks = ceil_div(args.k, kBlockK);
    u32 last_strip = ceil_div(args.n, kStripRows) - 1;
#pragma unroll
    for (u32 i = 0; i < Config::kStrips; ++i) {
        // A strip past the end is computed from the last one and clipped by the store.
        u32 strip = min(tile.first_row / kStripRows + i, last_strip);
        const u8* records = tile.records() + (u64(strip) * k_blocks + filling.block) * Record<Config>::kBytes;
        auto copy = [&](u32 destination, const u8* source, u32 bytes) {
            bulk_load(destination, source, bytes, shared.full(stage), policy);
        };
        if constexpr (Shared<Config>::kRecord == Record<Config>::kBytes || Config::kWarpgroupsK == 1) {
            copy(shared.record(stage, i, 0), records, bytes);
        } else {
            for (u32 j = 0; j < blocks; ++j)
                copy(shared.record(stage, i, j), records + j * Record<Config>::kBytes, Record<Config>::kBytes);
        }
        if constexpr (Config::kTokensAsM)
            copy(shared.strip_scale(stage, i), records + Record<Config>::kScales, Shared<Config>::kStripScale);
    }
}

template <typename Config>
__device__ __forceinline__ void load_activations(const Source<Config>& source, const Tile<Config>& tile,
                                                 const Filling& filling, u32 rows) {
    const Shared<Config>& shared = source.shared;
    const u32 rank = source.rank, stage = filling.stage;
    constexpr bool kGrouped = Tile<Config>::kGrouped;
    const u32 whole = kGrouped ? u32(Config::kBlockM) : u32(Tile<Config>::kLhsRows);
    const TensorMap* map = rows == whole ? source.maps.lhs : source.maps.last_lhs;
    for (u32 i = 0; i < filling.blocks; ++i) {
        u32 destination = shared.lhs(stage, i);
        i32 k = (filling.block + i) * kBlockK;
        if (kGrouped && tile.gathers()) return;
        if constexpr (kGrouped && Config::kMulticastLhs == 1) {
            // A tile of few rows comes in copies of as many as the swizzle's period.
            const u32 step = rows == whole ? rows : kSwizzleRows;
            for (u32 row = 0; row < rows; row += step)
                tile_load(destination + row * kSwizzledRow, map, k, tile.first_token + row, shared.full(stage));
        } else if constexpr (Config::kMulticastLhs > 1) {
            const u32 first = rank * (kGrouped ? u32(Tile<Config>::kLhsRows) : rows);
            tile_load_multicast(destination + first * kSwizzledRow, map, k, tile.first_token + first,
                                shared.full(stage), (1 << Config::kMulticastLhs) - 1);
        } else {
            tile_load(destination, map, k, tile.first_token, shared.full(stage));
        }
    }
}

// The same row by row, from where row_index says, if it does. The whole warp calls this.
template <typename Config>
__device__ __forceinline__ void gather_activations(const Source<Config>& source, const Tile<Config>& tile,
                                                   const Filling& filling, u32 rows) {
    if (!tile.gathers()) return;
    const Shared<Config>& shared = source.shared;
    const TensorMap* row_map = source.maps.last_lhs;
    const u32 rank = source.rank, stage = filling.stage;
    const u32 share = Config::kMulticastLhs > 1 ? rank * Tile<Config>::kLhsRows : 0;
    const u32 end = min(rows, share + Tile<Config>::kLhsRows);
    for (u32 row = share + threadIdx.x % 32; row < end; row += 32) {
        const i32 token = tile.token_of(tile.first_token + row);
        for (u32 i = 0; i < filling.blocks; ++i) {
            const u32 destination = shared.lhs(stage, i) + row * kSwizzledRow;
            const i32 k = (filling.block + i) * kBlockK;
            if constexpr (Config::kMulticastLhs > 1) {
                tile_load_multicast(destination, row_map, k, token, shared.full(stage),
                                    (1 << Config::kMulticastLhs) - 1);
            } else {
                tile_load(destination, row_map, k, token, shared.full(stage));
            }
        }
    }
}

// From a token's scale of a k-block to that of another, `step` blocks on. Packed exponents are four to a word.
template <typename Config>
__device__ __forceinline__ u64 scale_step(const Args& args, u32 block, u32 step) {
    return (Config::kLhsE8m0 ? (block + step) / 4 - block / 4 : step) * args.lhs_zero_stride;
}

// Where the first scale of a row's activations is.
template <typename Config>
__device__ __forceinline__ const float* block_scale_of(const Tile<Config>& tile, u32 row) {
    u64 index = tile.token_of(row) * tile.args.lhs_scale_stride;
    if constexpr (Tile<Config>::kGrouped) index += tile.expert * tile.groups().scale_expert_step;
    return tile.args.lhs_scale + index;
}

// The scales of a tile's activations that a lane copies, where they have one per token and k-block: of every 32nd row.
// Which row is whose is found out once a tile: of grouped kernels that takes hundreds of instructions, and where rows
// are gathered a load of each one's index, for which every record would wait.
template <typename Config>
struct BlockScales {
    static constexpr u32 kRows = ceil_div(Config::kBlockM, 32);
    const float* source[kRows];  // of the next record

    // Rows past the end get the last one's.
    __device__ __forceinline__ void start(const Tile<Config>& tile) {
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) {
            const u32 row = min(tile.first_token + i * 32 + threadIdx.x % 32, tile.end_token() - 1);
            source[i] = block_scale_of(tile, row) + scale_step<Config>(tile.args, 0, tile.range.begin);
        }
    }

    // Copies those of a stage, whose barrier each lane arrives at behind its copies.
    __device__ __forceinline__ void copy(const Args& args, const Shared<Config>& shared, u32 stage, u32 block,
                                         u32 blocks) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 along_k = 0; along_k < Config::kWarpgroupsK; ++along_k) {
            const u32 destination = shared.block_scales(stage, along_k) + lane * 4;
#pragma unroll
            for (u32 i = 0; i < kRows; ++i)
                copy_4(along_k < blocks && i * 32 + lane < Config::kBlockM, destination + i * 128, source[i], source[i],
                       true);
            skip(args, block + along_k, 1);
        }
        barrier_arrive_behind_copies(shared.full(stage));
    }

    // Goes on from a record to that `step` blocks behind it.
    __device__ __forceinline__ void skip(const Args& args, u32 block, u32 step) {
        const u64 elements = scale_step<Config>(args, block, step);
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) source[i] += elements;
    }
};

// Asks for the first tile's weights before this grid waits for the one before it, on which they do not depend. Returns
// the stages filled. The whole warp calls this and produce(); one elected lane issues the copies.
template <typename Config>
__device__ __forceinline__ u32 prefetch_weights(const Source<Config>& source) {
    const Shared<Config>& shared = source.shared;
    Scheduler<Config> scheduler(source.args, shared);
    Tile<Config> tile(source.args);
    u32 filled = 0;
    if (scheduler.template next<true>(tile, source.rank)) {
        const BlockRange range = tile.range;
        const u32 rows = Config::kDirectLhs ? 0 : tile.lhs_rows();
        u32 block = range.begin;
        for (; block < range.end && filled != Config::kPrefetchStages; block += Config::kWarpgroupsK, ++filled) {
            const u32 blocks = blocks_of_stage<Config>(range, block);
            if (elect_one()) load_weights(source, tile, {filled, block, blocks}, rows);
            // Consumers that copy activations copy their scales, too.
            if (Config::kLhsGroup > 0 && Config::kDirectLhs) barrier_arrive(shared.full(filled));
        }
    }
    return filled;
}

// Fills the stages: first the activations of the stages that hold prefetched weights, then weights and activations of all
// further stages. If it can, it finds its first tile, which takes divisions, before it waits for the previous grid.
template <typename Config>
__device__ __forceinline__ void produce(const Source<Config>& source, u32 prefetched) {
    constexpr bool kKnown = Scheduler<Config>::kKnownBeforeWait;
    if constexpr (!kKnown) wait_for_previous_grid();
    const Shared<Config>& shared = source.shared;
    Scheduler<Config> scheduler(source.args, shared);
    Ring<Config::kStages> ring;
    Tile<Config> tile(source.args);
    bool more = scheduler.next(tile, source.rank);
    u32 block = more ? tile.range.begin : 0;
    u32 rows = more ? tile.lhs_rows() : 0;
    if constexpr (kKnown) wait_for_previous_grid();
#pragma unroll 1
    for (u32 i = 0; i < prefetched; ++i, block += Config::kWarpgroupsK, ring.advance()) {
        const u32 blocks = blocks_of_stage<Config>(tile.range, block);
        if (!Config::kDirectLhs && elect_one()) load_activations(source, tile, {ring.stage, block, blocks}, rows);
    }
    while (more) {
        // Several at a time take more registers than a producer has.
#pragma unroll 1
        for (; block < tile.range.end; block += Config::kWarpgroupsK, ring.advance()) {
            const Filling filling{ring.stage, block, blocks_of_stage<Config>(tile.range, block)};
            barrier_wait<Config::kDebug>(shared.empty(ring.stage), ring.parity ^ 1);
            if (elect_one()) {
                load_weights(source, tile, filling, rows);
                load_activations(source, tile, filling, rows);
            }
            if constexpr (Tile<Config>::kGrouped) gather_activations(source, tile, filling, rows);
        }
        more = scheduler.next(tile, source.rank);
        block = tile.range.begin;
        rows = tile.lhs_rows();
    }
    // A CTA that shares activations stays until its neighbours have handed all stages back to it: they reach into its
    // shared memory. A barrier of the cluster would wait for the stores, too.
    if constexpr (Config::kMulticastLhs > 1) {
        for (u32 stage = 0; stage < Config::kStages; ++stage, ring.advance())
            barrier_wait<Config::kDebug>(shared.empty(ring.stage), ring.parity ^ 1);
    }
}

// Brings the scales of activations, one per token and k-block, to all stages but those whose activations the consumers
// copy. A warp of its own does: between a stage that is handed back and the next copies, a few hundred instructions
// would keep the copy engine waiting.
template <typename Config>
__device__ __forceinline__ void produce_block_scales(const Args& args, const Shared<Config>& shared, u32 rank) {
    constexpr bool kKnown = Scheduler<Config>::kKnownBeforeWait;
    if constexpr (!kKnown) wait_for_previous_grid();
    Scheduler<Config> scheduler(args, shared);
    Ring<Config::kStages> ring;
    Tile<Config> tile(args);
    bool more = scheduler.next(tile, rank);
    if constexpr (kKnown) wait_for_previous_grid();
    u32 copied = Config::kDirectLhs && more ? prefetched_stages<Config>(tile.range) : 0;
    BlockScales<Config> scales;
    for (; more; more = scheduler.next(tile, rank)) {
        scales.start(tile);
#pragma unroll 1
        for (u32 block = tile.range.begin; block < tile.range.end; block += Config::kWarpgroupsK, ring.advance()) {
            if (copied > 0) {
                --copied;
                scales.skip(args, block, Config::kWarpgroupsK);
                continue;
            }
            barrier_wait<Config::kDebug>(shared.empty(ring.stage), ring.parity ^ 1);
            scales.copy(args, shared, ring.stage, block, blocks_of_stage<Config>(tile.range, block));
        }
    }
}

// ---- consumers that copy activations --------------------------------------------------------------------------------

// The activations of the prefetched stages that a thread copies, where the threads that will multiply them do so: for a
// few tokens the copy engine takes twice as long from the wait to the first byte. The layout is the tile copy's
// 128-byte swizzle. Addresses are computed here, before the wait; behind it a copy is an addition and an instruction.
template <typename Config>
struct ActivationCopies {
    static constexpr u32 kTokens = 16 * Config::kWarpgroupsN;  // from one copy of a stage to the next
    static constexpr u32 kCopies = ceil_div(Config::kBlockM, kTokens);
    static constexpr bool kScales = Config::kLhsGroup > 0;
    static_assert(!kScales || !Config::kDirectLhs || Config::kBlockM <= kWarpgroup, "a thread copies a token's scale");

    const u8* source;  // of a stage's first copy, as the next is
    u32 destination;
    const float* scale;  // of the thread's token, if it has one

    __device__ __forceinline__ ActivationCopies(const Args& args, const Shared<Config>& shared,
                                                const Position& position, const Tile<Config>& tile) {
        const u32 k = (tile.range.begin + position.along_k) * kBlockK + chunk(position) * 16;
        source = args.lhs + (tile.first_token + token(position)) * args.lhs_stride + k;
        // The same for all copies of the thread: their tokens are a multiple of 8 apart.
        destination = shared.lhs(0, position.along_k) + token(position) * kSwizzledRow +
                      ((chunk(position) ^ token(position) % 8) * 16);
        if constexpr (kScales) {
            const u32 of = min(tile.first_token + position.thread, tile.end_token() - 1);
            scale = block_scale_of(tile, of) + scale_step<Config>(args, 0, tile.range.begin + position.along_k);
        }
    }

    // Of the first copy, within the tile and within a k-block.
    __device__ __forceinline__ static u32 token(const Position& position) {
        return (position.along_n * kWarpgroup + position.thread) / 8;
    }
    __device__ __forceinline__ static u32 chunk(const Position& position) { return position.thread % 8; }

    __device__ __forceinline__ void start(const Args& args, const Shared<Config>& shared, const Position& position,
                                          const Tile<Config>& tile) {
        const u64 step = kTokens * args.lhs_stride;
        const u32 stages = prefetched_stages<Config>(tile.range);
        u32 block = tile.range.begin + position.along_k;
        // Several at a time take more registers than some tiles leave.
#pragma unroll 1
        for (u32 stage = 0; stage < stages; ++stage, block += Config::kWarpgroupsK) {
            if (block >= tile.range.end) break;
            const bool inside = block * kBlockK + chunk(position) * 16 < args.k;
            const u8* from = source;
#pragma unroll
            for (u32 copy = 0; copy < kCopies; ++copy, from += step) {
                const u32 at = token(position) + copy * kTokens;
                const bool wanted = Config::kBlockM % kTokens == 0 || at < Config::kBlockM;
                copy_16(wanted, destination + copy * kTokens * kSwizzledRow, from,
                        tile.first_token + at < tile.end_token() && inside);
            }
            if constexpr (kScales) {
                const bool wanted = position.along_n == 0 && position.thread < Config::kBlockM;
                copy_4(wanted, shared.block_scales(stage, position.along_k) + position.thread * 4, scale, scale, true);
                scale += scale_step<Config>(args, block, Config::kWarpgroupsK);
            }
            source += Config::kWarpgroupsK * kBlockK;
            destination += Shared<Config>::kLhsStage;
        }
    }

    // Until the copies of all threads that share a k-block are there.
    __device__ __forceinline__ static void wait(const Position& position) {
        copy_wait();
        async_proxy_fence();
        along_n_sync(position.along_k, kWarpgroup * Config::kWarpgroupsN);
    }
};

}  // namespace jitgemm
