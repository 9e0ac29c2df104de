// The W4A8 GEMM: out[m, n] = lhs[m, k] · rhs[n, k]ᵀ with 4-bit rhs. Operands are swapped: weights are wgmma's A,
// decoded from shared memory into registers (64 rows of n), activations its B, read from shared memory
// (block_m tokens).
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
#include <jitgemm/decode.cuh>
#include <jitgemm/scheduler.cuh>
#include <jitgemm/epilogue.cuh>
#include <jitgemm/wgmma.cuh>

namespace jitgemm {

// ---- producer -------------------------------------------------------------------------------------------------------

// Tokens of one copy of activations; CTAs that share them bring so many each.
template <typename Config>
__device__ __forceinline__ constexpr u32 whole_lhs_rows() {
    return Config::kBlockM / Scheduler<Config>::kAlongN;
}

// The same for a tile. The last along m is copied with as many tokens as there are, by a map of its own: rows that a
// copy fills with zeros take longer than rows that it brings. What lies in shared memory for the missing tokens reaches
// only results that are clipped.
template <typename Config>
__device__ __forceinline__ u32 lhs_rows(const Args& args, const Tile& tile) {
    return tile.m + Config::kBlockM > args.m ? args.last_rows : whole_lhs_rows<Config>();
}

// Records of each strip in the stage that begins at `block`: one for each warpgroup along k, fewer at the end.
template <typename Config>
__device__ __forceinline__ u32 blocks_of_stage(BlockRange range, u32 block) {
    return Config::kWarpgroupsK == 1 ? 1 : min(u32(Config::kWarpgroupsK), range.end - block);
}

// Announces a stage's bytes and copies its weight records: for each strip of 64 rows one contiguous run of
// `blocks` records. The bytes of activations count where a tile copy brings them too, of `rows` tokens each.
template <typename Config>
__device__ __forceinline__ void load_weights(const Args& args, const Shared<Config>& shared, const Tile& tile,
                                             u32 stage, u32 block, u32 blocks, u32 rank, u64 policy, u32 rows) {
    u32 bytes = blocks * Record<Config>::kBytes;
    const u32 lhs_bytes = blocks * Scheduler<Config>::kAlongN * rows * 128;
    barrier_expect_bytes(shared.full(stage), Config::kWarpgroupsN * bytes + lhs_bytes);
    u32 k_blocks = ceil_div(args.k, 128);
    u32 last_strip = ceil_div(args.n, 64) - 1;
#pragma unroll
    for (u32 i = 0; i < Config::kWarpgroupsN; ++i) {
        // A strip past the end is computed from the last one and clipped by the store.
        u32 strip = min(tile.n / 64 + i, last_strip);
        const u8* source = args.records + (u64(strip) * k_blocks + block) * Record<Config>::kBytes;
        u32 destination = shared.record(stage, i, 0);
        if constexpr (Config::kMulticastRhs > 1) {
            u32 share = bytes / Config::kMulticastRhs;
            bulk_load_multicast(destination + rank * share, source + rank * share, share, shared.full(stage),
                                (1 << Config::kMulticastRhs) - 1, policy);
        } else {
            bulk_load(destination, source, bytes, shared.full(stage), policy);
        }
    }
}

template <typename Config>
__device__ __forceinline__ void load_activations(const TensorMap* lhs_map, const TensorMap* last_lhs_map,
                                                 const Shared<Config>& shared, const Tile& tile, u32 stage, u32 block,
                                                 u32 blocks, u32 rank, u32 rows) {
    const TensorMap* map = rows == whole_lhs_rows<Config>() ? lhs_map : last_lhs_map;
    for (u32 i = 0; i < blocks; ++i) {
        u32 destination = shared.lhs(stage, i);
        i32 k = (block + i) * 128;
        if constexpr (Config::kMulticastLhs > 1) {
            const u32 first = rank * rows;
            tile_load_multicast(destination + first * 128, map, k, tile.m + first, shared.full(stage),
                                (1 << Config::kMulticastLhs) - 1);
        } else {
            tile_load(destination, map, k, tile.m, shared.full(stage));
        }
    }
}

// Weights do not depend on the previous kernel: the first tile's are under way before this grid waits for it. Returns
// the stages filled. Called by the whole warp, as is produce(), and one thread issues the copies.
template <typename Config>
__device__ __forceinline__ u32 prefetch_weights(const Args& args, const Shared<Config>& shared, u32 rank, u64 policy) {
    Scheduler<Config> scheduler(args);
    Tile tile;
    u32 filled = 0;
    if (scheduler.template next<true>(tile, rank)) {
        const BlockRange range = tile.range;
        const u32 rows = Config::kDirectLhs ? 0 : lhs_rows<Config>(args, tile);
        u32 block = range.begin;
        for (; block < range.end && filled < Config::kPrefetchStages; block += Config::kWarpgroupsK, ++filled) {
            const u32 blocks = blocks_of_stage<Config>(range, block);
            if (elect_one()) load_weights<Config>(args, shared, tile, filled, block, blocks, rank, policy, rows);
        }
    }
    return filled;
}

// Brings what the stages lack: first activations to those that hold weights, then both to all that follow. Finds its
// first tile, which takes divisions, before it waits for the previous grid.
template <typename Config>
__device__ __forceinline__ void produce(const Args& args, const TensorMap* lhs_map, const TensorMap* last_lhs_map,
                                        const Shared<Config>& shared, u32 rank, u32 prefetched, u64 policy) {
    Scheduler<Config> scheduler(args);
    Ring<Config::kStages> ring;
    Tile tile;
    bool more = scheduler.next(tile, rank);
    u32 block = more ? tile.range.begin : 0;
    u32 rows = more ? lhs_rows<Config>(args, tile) : 0;
    wait_for_previous_grid();
    auto load_lhs = [&](u32 blocks) {
        load_activations<Config>(lhs_map, last_lhs_map, shared, tile, ring.stage, block, blocks, rank, rows);
    };
#pragma unroll 1
    for (u32 i = 0; i < prefetched; ++i, block += Config::kWarpgroupsK, ring.advance()) {
        const u32 blocks = blocks_of_stage<Config>(tile.range, block);
        if (!Config::kDirectLhs && elect_one()) load_lhs(blocks);
    }
    while (more) {
        // Several at a time take more registers than a producer has.
#pragma unroll 1
        for (; block < tile.range.end; block += Config::kWarpgroupsK, ring.advance()) {
            const u32 blocks = blocks_of_stage<Config>(tile.range, block);
            barrier_wait<Config::kDebug>(shared.empty(ring.stage), ring.parity ^ 1);
            if (elect_one()) {
                load_weights<Config>(args, shared, tile, ring.stage, block, blocks, rank, policy, rows);
                load_lhs(blocks);
            }
        }
        more = scheduler.next(tile, rank);
        block = tile.range.begin;
        rows = lhs_rows<Config>(args, tile);
    }
    // A CTA that shares an operand stays until its neighbours have handed all stages back to it: they reach into its
    // shared memory. A barrier of the cluster would wait for the stores, too.
    if constexpr (Shared<Config>::kMulticast > 1) {
        for (u32 stage = 0; stage < Config::kStages; ++stage, ring.advance())
            barrier_wait<Config::kDebug>(shared.empty(ring.stage), ring.parity ^ 1);
    }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// acc += scale of the row * partial sum, for accumulators [first, first + kCount).
template <int kCount, int kTotal, typename Partial>
__device__ __forceinline__ void promote(float (&acc)[kTotal], int first, const Partial (&partial)[kCount],
                                        float low_row, float high_row) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        acc[first + i] = fmaf(float(partial[i]), (i / 2) % 2 ? high_row : low_row, acc[first + i]);
}

// One record on its way through a warpgroup: A fragments of its four k-steps, the scales and offsets of its chunks.
template <typename Config>
struct Fragments {
    using Layout = Record<Config>;
    static constexpr u32 kChunks = Layout::kChunks;
    static constexpr u32 kSteps = 4 / kChunks;

    u32 step[4][4];
    // Factors of the thread's two rows: for sums of codes times activations, for sums of activations.
    float low_scale[kChunks], high_scale[kChunks];
    float low_offset[kChunks], high_offset[kChunks];

    // Loads and decodes the codes.
    __device__ __forceinline__ void load(u32 record, const Place& place) {
        const uint4 first = load_shared_v4(record + place.thread * 16);
        const uint4 second = load_shared_v4(record + 2048 + place.thread * 16);
        const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        const u32 row = place.warp * 16 + place.lane / 4;
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            u32 low_zero = 0, high_zero = 0;
            if constexpr (Config::kZeroPoint) {
                u32 zeros = record + Layout::kZeros + chunk * 64 + row;
                low_zero = load_shared_u8(zeros) * 0x01010101u;
                high_zero = load_shared_u8(zeros + 8) * 0x01010101u;
            }
#pragma unroll
            for (u32 s = chunk * kSteps; s < (chunk + 1) * kSteps; ++s) {
                decode_step<typename Config::Decode, Config::kZeroPoint>(step[s], words[2 * s], words[2 * s + 1],
                                                                         low_zero, high_zero);
                // Else int8's decode comes between the multiplies, which ptxas then fences one by one (C7519). Where
                // groups are promoted, that is no slower: the promotion comes there too.
                if constexpr (Config::kPromoteRecords == 0) register_fence(step[s]);
            }
        }
    }

    // Loads what promotion needs; later than the codes, since registers are short until then.
    __device__ __forceinline__ void load_factors(u32 record, const Place& place) {
        const u32 row = place.warp * 16 + place.lane / 4;
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            low_scale[chunk] = high_scale[chunk] = 1.0f;
            if constexpr (Config::kGroupSize != 0) {
                u32 scales = record + Layout::kScales + chunk * Layout::kRowOfScales;
                low_scale[chunk] = load_shared_real<Config::kScaleType>(scales, row);
                high_scale[chunk] = load_shared_real<Config::kScaleType>(scales, row + 8);
            }
            if constexpr (Config::kOffset) {
                u32 offsets = record + Layout::kOffsets + chunk * Layout::kRowOfScales;
                low_offset[chunk] = load_shared_real<Config::kScaleType>(offsets, row);
                high_offset[chunk] = load_shared_real<Config::kScaleType>(offsets, row + 8);
            }
        }
    }
};

template <typename Config>
struct Multiplier {
    using Wgmma = typename Config::Wgmma;
    static constexpr u32 kHalves = Config::kHalves;
    static constexpr u32 kTokens = Config::kBlockM / kHalves;  // wgmma's N
    static constexpr u32 kPartials = kTokens / 2;
    static constexpr u32 kChunks = Fragments<Config>::kChunks;
    static constexpr u32 kSteps = Fragments<Config>::kSteps;
    // Offsets multiply the sums of activations, which the tensor cores add up as products with ones.
    static constexpr u32 kParts = Config::kOffset ? 2 : 1;
    // A unit is one half of the tokens times one part of a chunk; kInFlight of them have registers for their sums.
    static constexpr u32 kUnits = kChunks * kParts * kHalves;
    static constexpr u32 kInFlight = Config::kInFlight;
    static_assert(kInFlight % kHalves == 0 && kInFlight <= kUnits, "every half in flight, or no more than there are");
    static_assert(kUnits == kHalves || Config::kPromoteRecords == 1, "units take turns with registers");

    typename Wgmma::Accumulator partial[kInFlight][kPartials];
    u32 pending = 0;  // records summed in `partial` since the last promotion

    __device__ __forceinline__ Multiplier() {
#pragma unroll
        for (u32 unit = 0; unit < kInFlight; ++unit)
#pragma unroll
            for (u32 i = 0; i < kPartials; ++i) partial[unit][i] = 0;
    }

    __device__ __forceinline__ void issue(u32 unit, const Fragments<Config>& fragments, u64 descriptor) {
        const u32 half = unit % kHalves, part = unit / kHalves % kParts, chunk = unit / kHalves / kParts;
        constexpr u32 kOne = Config::Decode::kOne;
        const u32 ones[4] = {kOne, kOne, kOne, kOne};
        wgmma_fence();
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
            const u32 step = chunk * kSteps + s;
            const bool accumulate = s > 0 || (Config::kPromoteRecords != 1 && pending > 0);
            const u64 tokens = descriptor + half * (kTokens * 128 >> 4) + step * 2;
            if (part == 0) {
                Wgmma::issue(partial[unit % kInFlight], fragments.step[step], tokens, accumulate);
            } else {
                Wgmma::issue(partial[unit % kInFlight], ones, tokens, accumulate);
            }
        }
        wgmma_commit();
    }

    // Starts one record's multiplies, as far as the registers for partial sums go.
    __device__ __forceinline__ void start(const Fragments<Config>& fragments, u64 descriptor) {
#pragma unroll
        for (u32 unit = 0; unit < kInFlight; ++unit) issue(unit, fragments, descriptor);
    }

    // Waits for them, promoting each unit's sums by its scales while the next one multiplies. Sums of several records
    // are promoted when kPromoteRecords are summed up, or at the last one; 0 is never.
    __device__ __forceinline__ void finish(float (&acc)[Config::kBlockM / 2], Fragments<Config>& fragments,
                                           u64 descriptor, bool last) {
        constexpr bool kNever = Config::kPromoteRecords == 0;
        const bool promote_now =
            !kNever && (Config::kPromoteRecords == 1 || last || pending + 1 == Config::kPromoteRecords);
#pragma unroll
        for (u32 unit = 0; unit < kUnits; ++unit) {
            const u32 half = unit % kHalves, part = unit / kHalves % kParts, chunk = unit / kHalves / kParts;
            wgmma_wait(min(kInFlight, kUnits - unit) - 1);
            register_fence(partial[unit % kInFlight]);
            if (promote_now) {
                promote(acc, half * kPartials, partial[unit % kInFlight],
                        part == 0 ? fragments.low_scale[chunk] : fragments.low_offset[chunk],
                        part == 0 ? fragments.high_scale[chunk] : fragments.high_offset[chunk]);
                // Asked for here; ptxas may still sink it below the next wait (docs/notes/main-loop.md).
                register_fence(acc, half * kPartials, kPartials);
            }
            if (unit + kInFlight < kUnits) issue(unit + kInFlight, fragments, descriptor);
        }
#pragma unroll
        for (u32 s = 0; s < 4; ++s) register_fence(fragments.step[s]);
        pending = promote_now ? 0 : pending + 1;
    }

    // The tile's sums, where no group promoted them.
    __device__ __forceinline__ void take_sums(float (&acc)[Config::kBlockM / 2]) {
        if constexpr (Config::kPromoteRecords == 0) {
#pragma unroll
            for (u32 h = 0; h < kHalves; ++h)
#pragma unroll
                for (u32 i = 0; i < kPartials; ++i) acc[h * kPartials + i] = float(partial[h][i]);
        }
    }
};

// Hands a stage back to the producers that fill it.
template <typename Config>
__device__ __forceinline__ void release_stage(const Shared<Config>& shared, u32 stage, const Place& place) {
    __syncwarp();
    if constexpr (Shared<Config>::kMulticast == 1) {
        if (place.lane == 0) barrier_arrive(shared.empty(stage));
    } else {
        // A lane for each: a loop would end the block in which ptxas schedules the multiplies.
        if (place.lane < Shared<Config>::kMulticast) barrier_arrive_remote(shared.empty(stage), place.lane);
    }
}

// The activations of the prefetched stages that a thread copies, where the threads that will multiply them do so: for a
// few tokens the copy engine takes twice as long from the wait to the first byte. The layout is the tile copy's 128-byte
// swizzle. Addresses are worked out here, before the wait; behind it a copy is an addition and an instruction.
template <typename Config>
struct ActivationCopies {
    static constexpr u32 kTokens = 16 * Config::kWarpgroupsN;  // from one copy of a stage to the next
    static constexpr u32 kCopies = ceil_div(Config::kBlockM, kTokens);

    const u8* source;  // of a stage's first copy, as the next is
    u32 destination;

    __device__ __forceinline__ ActivationCopies(const Args& args, const Shared<Config>& shared, const Place& place,
                                                const Tile& tile) {
        const u32 k = (tile.range.begin + place.along_k) * 128 + chunk(place) * 16;
        source = args.lhs + (tile.m + token(place)) * args.lhs_stride + k;
        // The same for all copies of the thread: their tokens are a multiple of 8 apart.
        destination = shared.lhs(0, place.along_k) + token(place) * 128 + ((chunk(place) ^ token(place) % 8) * 16);
    }

    // Of the first copy, within the tile and within 128 of k.
    __device__ __forceinline__ static u32 token(const Place& place) {
        return (place.along_n * 128 + place.thread) / 8;
    }
    __device__ __forceinline__ static u32 chunk(const Place& place) { return place.thread % 8; }

    __device__ __forceinline__ void start(const Args& args, const Place& place, const Tile& tile) {
        const u64 step = kTokens * args.lhs_stride;
        const u32 stages = prefetched_stages<Config>(tile.range);
        u32 block = tile.range.begin + place.along_k;
        // Several at a time take more registers than some tiles leave.
#pragma unroll 1
        for (u32 stage = 0; stage < stages; ++stage, block += Config::kWarpgroupsK) {
            if (block >= tile.range.end) break;
            const bool inside = block * 128 + chunk(place) * 16 < args.k;
            const u8* from = source;
#pragma unroll
            for (u32 copy = 0; copy < kCopies; ++copy, from += step) {
                const u32 at = token(place) + copy * kTokens;
                const bool wanted = Config::kBlockM % kTokens == 0 || at < Config::kBlockM;
                copy_16(wanted, destination + copy * kTokens * 128, from, tile.m + at < args.m && inside);
            }
            source += Config::kWarpgroupsK * 128;
            destination += Shared<Config>::kLhsStage;
        }
    }
};

// Until all of them are there.
template <typename Config>
__device__ __forceinline__ void wait_for_activations(const Place& place) {
    copy_wait();
    async_proxy_fence();
    along_k_sync(place.along_k, 128 * Config::kWarpgroupsN);
}

// The warpgroup's share of a tile. While one record multiplies, the next is loaded and decoded. `begin` is called once
// the tile's first record is decoded and before activations are needed.
template <typename Config, typename Begin>
__device__ __forceinline__ void multiply_tile(float (&acc)[Config::kBlockM / 2], const Shared<Config>& shared,
                                              const Place& place, BlockRange range, Ring<Config::kStages>& ring,
                                              Begin begin) {
    const u32 stages = ceil_div(range.end - range.begin, Config::kWarpgroupsK);
    // The last stage may hold no record for this warpgroup.
    const u32 records = ceil_div(max(range.end - range.begin, place.along_k) - place.along_k, Config::kWarpgroupsK);
    const u64 first_descriptor = k_major_descriptor(shared.lhs(0, place.along_k));

    // Known where k is not split, which saves registers; but with one set of fragments ptxas would serialise the
    // multiplies (C7513).
    const bool any =
        (Config::kFragmentSets == 2 && Config::kSplitK == 1 && Config::kWarpgroupsK == 1) || records > 0;

    Multiplier<Config> multiplier;
    auto load = [&](Fragments<Config>& fragments, const Ring<Config::kStages>& at) {
        barrier_wait<Config::kDebug>(shared.full(at.stage), at.parity);
        fragments.load(shared.record(at.stage, place.along_n, place.along_k), place);
    };
    // Where the next record is; after the last, the last again: loading it for nothing costs less than a branch, which
    // would keep ptxas from scheduling across it.
    auto following = [&](bool last) {
        Ring<Config::kStages> next = ring;
        next.advance();
        return last ? ring : next;
    };
    // Multiplies `current`, the record of the ring's stage, and loads the one after it.
    auto multiply = [&](Fragments<Config>& current, Fragments<Config>& next, bool last, bool load_next) {
        const u32 stage = ring.stage;
        const u64 descriptor = advance_descriptor(first_descriptor, stage * Shared<Config>::kLhsStage);
        multiplier.start(current, descriptor);
        if (load_next) load(next, following(last));
        ring.advance();
        current.load_factors(shared.record(stage, place.along_n, place.along_k), place);
        multiplier.finish(acc, current, descriptor, last);
        release_stage(shared, stage, place);
    };
    if (!any) begin();
    if (any) {
        Fragments<Config> even, odd;
        // Where threads copy the activations, weights come on their own and can be decoded before.
        if constexpr (Config::kDirectLhs) load(even, ring);
        begin();
        if constexpr (!Config::kDirectLhs) load(even, ring);
        u32 left = records;
        if constexpr (Config::kFragmentSets == 2) {
            // Two sets of registers in turn, so that nothing is copied.
            for (; left >= 2; left -= 2) {
                multiply(even, odd, false, true);
                multiply(odd, even, left == 2, true);
            }
            if (left > 0) multiply(even, odd, true, false);
        } else {
            for (; left > 0; --left) {
                multiply(even, odd, left == 1, true);
                even = odd;
            }
        }
    }
    if (records < stages) {
        barrier_wait<Config::kDebug>(shared.full(ring.stage), ring.parity);
        release_stage(shared, ring.stage, place);
        ring.advance();
    }
    multiplier.take_sums(acc);
}

template <typename Config>
__device__ __forceinline__ void consume(const Args& args, const TensorMap* out_map, const Shared<Config>& shared,
                                        u32 rank) {
    Place place;
    // The same in the whole warp, see w4a8_gemm: descriptors stay in uniform registers.
    place.warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    place.along_n = place.warpgroup % Config::kWarpgroupsN;
    place.along_k = place.warpgroup / Config::kWarpgroupsN;
    place.thread = threadIdx.x % 128;
    place.warp = place.thread / 32;
    place.lane = place.thread % 32;

    auto wait = [&] {
        wait_for_previous_grid();
        // Not before: the next kernel's weights would be fetched ahead of this one's activations.
        if (threadIdx.x == 0) launch_next_grid();
    };
    if constexpr (!Config::kDirectLhs) wait();
    bool waited = !Config::kDirectLhs;

    Scheduler<Config> scheduler(args);
    Ring<Config::kStages> ring;
    u32 parity = 0;  // of the tile, among those that are summed over splits
    Tile tile;
    while (scheduler.next(tile, rank)) {
        place.share = place.along_k * Config::kSplitK + (Config::kSplitK > 1 ? rank : 0);
        float acc[Config::kBlockM / 2];
#pragma unroll
        for (u32 i = 0; i < Config::kBlockM / 2; ++i) acc[i] = 0.0f;
        multiply_tile<Config>(acc, shared, place, tile.range, ring, [&] {
            const bool copying = !waited;
            if (copying) {
                ActivationCopies<Config> copies(args, shared, place, tile);
                wait();
                copies.start(args, place, tile);
                waited = true;
            }
            if (place.share < Shared<Config>::kShares) {
                if (Config::kSplitK > 1 && place.thread == 0)
                    barrier_expect_bytes(shared.share_full(place.warpgroup),
                                         (Config::kSplitK - 1) * Shared<Config>::kSlot);
                copy_factors<Config>(args, shared, place, tile);
            }
            if (copying) wait_for_activations<Config>(place);
        });

        if constexpr (Config::kWarpgroupsK > 1) send_to_warpgroups<Config>(acc, shared, place, parity);
        finish_tile<Config>(acc, args, out_map, shared, place, tile, rank, parity, scheduler.done());
        parity ^= Config::kSplitK > 1 || Config::kWarpgroupsK > 1;
    }
    if (!waited) wait_for_previous_grid();
    if (place.thread == 0) store_wait_written();
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void w4a8_gemm(const TensorMap* lhs_map, const TensorMap* last_lhs_map,
                                          const TensorMap* out_map, const Args& args) {
    extern __shared__ __align__(1024) u8 memory[];
    const Shared<Config> shared{shared_address(memory)};
    const u32 rank = Scheduler<Config>::kClusterSize > 1 ? cluster_rank() : 0;
    // The shuffle tells the compiler that the value is the same in the whole warp.
    const u32 warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    const bool producer_warpgroup = threadIdx.x / 128 == Shared<Config>::kWarpgroups;
    const bool producer = warp == Shared<Config>::kWarpgroups * 4;

    u32 prefetched = 0;
    u64 policy = 0;
    if (producer) {
        if (elect_one()) {
            if (shared.base % 1024 != 0) __trap();  // swizzled tiles and their descriptors would be wrong
            shared.init_full_barriers();
        }
        policy = args.m <= Config::kBlockM ? policy_evict_first() : policy_evict_unchanged();
        // Multicast weights land in the neighbour too, whose barriers must exist first.
        if constexpr (Config::kMulticastRhs == 1) prefetched = prefetch_weights<Config>(args, shared, rank, policy);
    } else if (warp == Shared<Config>::kWarpgroups * 4 + 1 && elect_one()) {
        prefetch_descriptor(lhs_map);
        prefetch_descriptor(last_lhs_map);
        prefetch_descriptor(out_map);
        shared.init_other_barriers(rank);
    }
    __syncwarp();
    if constexpr (Scheduler<Config>::kClusterSize > 1) {
        cluster_started();
    } else {
        __syncthreads();
    }
    if (producer && Config::kMulticastRhs > 1) prefetched = prefetch_weights<Config>(args, shared, rank, policy);

    // Every thread of every CTA waits for the grid before this one, also a thread without work, so that the end of this
    // grid implies the end of its predecessor.
    if (producer_warpgroup) {
        // Before the wait: the consumers need them for what they do before it.
        if constexpr (Config::kConsumerRegisters > 0) release_registers<Config::kProducerRegisters>();
        if (producer) {
            produce<Config>(args, lhs_map, last_lhs_map, shared, rank, prefetched, policy);
        } else {
            wait_for_previous_grid();
        }
        __syncwarp();
    } else {
        if constexpr (Config::kConsumerRegisters > 0) claim_registers<Config::kConsumerRegisters>();
        // The reduction is for ptxas, which cannot work it out again: else main loops ask for the CTA's rank in each
        // iteration, of which addresses consist, and derive from it what they need (docs/notes/main-loop.md).
        const u32 base = Config::kKeepAddresses ? __reduce_or_sync(0xFFFFFFFFu, shared.base) : shared.base;
        consume<Config>(args, out_map, Shared<Config>{base}, rank);
    }
}

}  // namespace jitgemm
