// The W4A8 GEMM: out[m, n] = lhs[m, k] · rhs[n, k]ᵀ with 4-bit rhs. Operands are swapped: weights are wgmma's A,
// decoded from shared memory into registers (64 rows of n), activations its B, read from shared memory
// (block_m tokens). With kTokensAsM, for 8-bit weights in shared memory, they are not: 64 tokens of each warpgroup are
// its A, the tile's weights its B.
//
//     producer warp                         consumer warpgroups
//     weights of the first stages           load and decode the first record
//     griddepcontrol.wait                   griddepcontrol.wait, activations of the first stages of narrow tiles
//     for tile, for stage:                  for tile, for stage:
//       wait empty                            wait full
//       bulk copy of weight records           load and decode 64 rows x 128 k
//       tile copy of activations    ---->     wgmma, promote each group's partial sums by its exact scale
//                                    <----     arrive at empty
//                                           sum the splits of k, scale, bf16, store
#pragma once
#include <jitgemm/gemm/epilogue.cuh>
#include <jitgemm/gemm/multiply.cuh>
#include <jitgemm/gemm/producer.cuh>

namespace jitgemm {

template <typename Config>
__device__ __forceinline__ void consume(const Args& args, const Maps& maps, const Shared<Config>& shared, u32 rank) {
    Position position;
    const Consumer<Config> consumer{args, maps, shared, rank, position};
    // The same in the whole warp, see w4a8_gemm: descriptors stay in uniform registers.
    position.warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroup, 0);
    position.along_m = Config::kWarpgroupsM > 1 ? position.warpgroup / Config::kWarpgroupsN : 0;
    position.along_n = position.warpgroup % Config::kWarpgroupsN;
    position.along_k = position.warpgroup / (Config::kWarpgroupsN * Config::kWarpgroupsM);
    position.thread = threadIdx.x % kWarpgroup;
    position.warp = position.thread / 32;
    position.lane = position.thread % 32;
    position.tables = shared.base + Shared<Config>::kDecode;
    // Wide tiles have more of the tensor cores to wait for, and no register to spare.
    constexpr bool kHides = Config::Codec::kTerms > 1 && Shared<Config>::kTablesBytes > 0 && Config::kBlockM <= 64;
    position.sixteen = kHides ? __reduce_or_sync(0xFFFFFFFFu, 16) : 16;

    auto wait = [&] {
        wait_for_previous_grid();
        // Not before: the next kernel's weights would be fetched ahead of this one's activations.
        if (threadIdx.x == 0) launch_next_grid();
    };
    // Consumers that copy activations themselves decode their first record before; the tile must be known.
    constexpr bool kWaitsFirst = !Config::kDirectLhs || !Scheduler<Config>::kKnownBeforeWait;
    if constexpr (kWaitsFirst) wait();
    bool waited = kWaitsFirst;

    Scheduler<Config> scheduler(args, shared);
    Multiplicands<Config> multiplicands{shared, position};
    u32 parity = 0;  // of the tile, for the barriers of the sums
    Tile<Config> tile(args);
    while (scheduler.next(tile, rank)) {
        position.slice = position.along_k * Config::kSplitK + (Config::kSplitK > 1 ? rank : 0);
        float acc[Config::kSums];
#pragma unroll
        for (u32 i = 0; i < Config::kSums; ++i) acc[i] = 0.0f;
        TileSums<Config> sums;
        const u32 tokens = tile.end_token() - tile.first_token;
        multiplicands.range = tile.range;
        if constexpr (Config::kCorrects) multiplicands.codes_end = code_blocks<Config>(ceil_div(args.k, kBlockK));
        if constexpr (Config::kF16Sums) load_powers(multiplicands, tile, args.n);
        multiply_tokens<Config>(tokens, acc, sums, multiplicands, [&] {
            const bool copying = !waited;
            if (copying) {
                ActivationCopies<Config> copies(args, shared, position, tile);
                wait();
                copies.start(args, shared, position, tile);
                waited = true;
            }
            if (position.slice < Shared<Config>::kSlices) {
                if (Config::kSplitK > 1 && position.thread == 0)
                    barrier_expect_bytes(shared.slice_full(position.warpgroup),
                                         (Config::kSplitK - 1) * Shared<Config>::kSlot);
                if constexpr (Config::kTokensAsM) store_biases(args, shared, position, tile);
                else copy_factors(args, shared, position, tile);
            }
            if (copying) ActivationCopies<Config>::wait(position);
        });
        sums.take(acc);

        if constexpr (Config::kTokensAsM) {
            store_token_rows(acc, consumer, tile);
        } else {
            if constexpr (Config::kWarpgroupsK > 1) send_to_warpgroups(acc, consumer, parity);
            finish_tile(acc, consumer, tile, parity, scheduler.done());
        }
        parity ^= Config::kSplitK > 1 || Config::kWarpgroupsK > 1;
    }
    if (!waited) wait_for_previous_grid();
    if (stores<Config>(position)) store_wait_written();
}

template <typename Config>
__device__ __forceinline__ void w4a8_gemm(const Maps& maps, const Args& args) {
    extern __shared__ __align__(1024) u8 memory[];
    const Shared<Config> shared{shared_address(memory)};
    const u32 rank = Scheduler<Config>::kClusterSize > 1 ? cluster_rank() : 0;
    // The shuffle tells the compiler that the value is the same in the whole warp.
    const u32 warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    const bool producer_warpgroup = threadIdx.x / kWarpgroup == Shared<Config>::kWarpgroups;
    const bool producer_warp = warp == Shared<Config>::kWarpgroups * 4;

    constexpr bool kPrefetches = Scheduler<Config>::kKnownBeforeWait;
    u32 prefetched = 0;
    Source<Config> source{args, maps, shared, rank, 0};
    if (producer_warp) {
        if (elect_one()) {
            if (shared.base % 1024 != 0) __trap();  // swizzled tiles and their descriptors would be wrong
            shared.init_full_barriers();
        }
        // Other lanes arrive at them, of scales that they copy: elect.sync orders no memory.
        __syncwarp();
        source.policy = Scheduler<Config>::weight_policy(args);
        if constexpr (kPrefetches) prefetched = prefetch_weights(source);
    } else if (warp == Shared<Config>::kWarpgroups * 4 + 1 && elect_one()) {
        prefetch_descriptor(maps.lhs);
        prefetch_descriptor(maps.last_lhs);
        prefetch_descriptor(maps.out);
        shared.init_other_barriers(rank);
    }
    if constexpr (Shared<Config>::kTablesBytes > 0) {
        if (warp >= Shared<Config>::kWarpgroups * 4 + 2)
            Config::Codec::prepare(shared.base + Shared<Config>::kDecode, threadIdx.x % 64);
    }
    __syncwarp();
    if constexpr (!kPrefetches) {
        // Sizes and row_index may be of a grid before the last, routing's ahead of a quantiser. Every thread of that
        // one waited for routing: its end is routing's, and what routing wrote is seen behind this wait.
        wait_for_previous_grid();
        Scheduler<Config>::prepare(args, shared);
    }
    if constexpr (Scheduler<Config>::kClusterSize > 1) {
        if constexpr (Shared<Config>::kTablesBytes > 0) __syncthreads();  // the cluster's barrier need not order the tables
        cluster_started<kPrefetches>();
    } else {
        __syncthreads();
    }

    // Every thread of every CTA waits for the grid before this one, also a thread without work, so that the end of this
    // grid implies the end of its predecessor.
    if (producer_warpgroup) {
        // Before the wait: the consumers need them for what they do before it.
        if constexpr (Config::kConsumerRegisters > 0) release_registers<Config::kProducerRegisters>();
        if (producer_warp) {
            produce(source, prefetched);
        } else if (Config::kLhsGroup > 0 && warp == Shared<Config>::kWarpgroups * 4 + 1) {
            produce_block_scales(args, shared, rank);
        } else {
            wait_for_previous_grid();
        }
        __syncwarp();
    } else {
        if constexpr (Config::kConsumerRegisters > 0) claim_registers<Config::kConsumerRegisters>();
        // Keeps the shared memory's address in a register for the whole main loop. ptxas cannot recompute the result of a
        // reduction; without it, each iteration reads the CTA's rank again and derives addresses (docs/notes/main-loop.md).
        const u32 base = Config::kPinSharedBase ? __reduce_or_sync(0xFFFFFFFFu, shared.base) : shared.base;
        consume<Config>(args, maps, Shared<Config>{base}, rank);
    }
}

}  // namespace jitgemm
