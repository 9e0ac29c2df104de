// A warpgroup's part of a tile: decode weights into A fragments, multiply, promote the partial sums by their scales.
#pragma once
#include <jitgemm/gemm/scheduler.cuh>
#include <jitgemm/gemm/shared.cuh>
#include <jitgemm/ptx/wgmma.cuh>

namespace jitgemm {

// acc += scale of the row * partial sum, for accumulators [first, first + kCount).
template <int kCount, int kTotal, int kPartials, typename Partial>
__device__ __forceinline__ void promote(float (&acc)[kTotal], int first, const Partial (&partial)[kPartials],
                                        float low_row, float high_row) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        acc[first + i] = fmaf(float(partial[i]), (i / 2) % 2 ? high_row : low_row, acc[first + i]);
}

// The tokens' scales of a record, two for every eight tokens: the first few are loaded before the sums are waited for,
// the rest as they are needed, since registers are short.
template <u32 kTokens, bool kUsed, bool kE8m0>
struct TokenScales {
    static constexpr u32 kAhead = smaller(kTokens / 8, 2);
    u32 address;
    float2 ahead[kAhead];

    __device__ __forceinline__ explicit TokenScales(u32 address) : address(address) {
#pragma unroll
        for (u32 i = 0; kUsed && i < kAhead; ++i) ahead[i] = load_shared_float2(address + i * 32);
    }
    __device__ __forceinline__ float2 pair(u32 i) const {
        return i < kAhead ? ahead[i] : load_shared_float2(address + i * 32);
    }
};

// A power of two by its exponent as bfloat16's bits: 0 stands for 2^-127, which is subnormal, and 255 for NaN.
__device__ __forceinline__ u32 bf16_of_e8m0(u32 exponent) {
    return exponent << 7 | (exponent - 1 >= 254 ? 0x40 : 0);
}

// Packed exponents: a token's word has those of four k-blocks. Each lane converts two tokens' of every 64, and gets
// the others from the lanes that have them: converted where they are needed, each would be by 32 threads.
template <u32 kTokens>
struct TokenScales<kTokens, true, true> {
    u32 pairs[ceil_div(kTokens, 64)];

    // `first` is the address of the first token's exponent.
    __device__ __forceinline__ explicit TokenScales(u32 first) {
#pragma unroll
        for (u32 i = 0; i < ceil_div(kTokens, 64); ++i) {
            const u32 address = first + min(i * 32 + threadIdx.x % 32, kTokens / 2 - 1) * 8;
            pairs[i] = bf16_of_e8m0(load_shared_u8(address)) | bf16_of_e8m0(load_shared_u8(address + 4)) << 16;
        }
    }
    __device__ __forceinline__ float2 pair(u32 i) const {
        const u32 both = shuffle_fours(pairs[i / 8], i % 8 * 4);
        return {__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000)};
    }
};

// The same with a scale for each token as well, which multiplies the row's first.
template <int kCount, int kTotal, int kPartials, typename Partial, typename Scales>
__device__ __forceinline__ void promote(float (&acc)[kTotal], int first, const Partial (&partial)[kPartials],
                                        float low_row, float high_row, const Scales& tokens) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 token = tokens.pair(i / 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float scale = (j / 2 ? high_row : low_row) * (j % 2 ? token.y : token.x);
            acc[first + i + j] = fmaf(float(partial[i + j]), scale, acc[first + i + j]);
        }
    }
}

// One record on its way through a warpgroup: A fragments of its four k-steps, the scales and offsets of its chunks.
template <typename Config>
struct Fragments {
    using Layout = Record<Config>;
    static constexpr u32 kChunks = Layout::kChunks;
    static constexpr u32 kSteps = 4 / kChunks;

    u32 step[4][4];
    u64 weights;  // descriptor of the record, where wgmma reads it from shared memory
    // Factors of the thread's two rows: for sums of codes times activations, for sums of activations. Where rows are
    // tokens, one for each strip of the weights.
    static constexpr u32 kScales = Config::kTokenRows ? Shared<Config>::kStripsOfWarpgroup : kChunks;
    float low_scale[kScales], high_scale[kScales];
    float low_offset[kChunks], high_offset[kChunks];

    // Loads and decodes the codes.
    __device__ __forceinline__ void load(u32 record, const Position& position) {
        if constexpr (Config::Codec::kSharedWeights) {
            weights = k_major_descriptor(record);
        } else {
            Config::Codec::template load<kChunks>(step, record, record + Layout::kZeros, position);
            // Else int8's decode comes between the multiplies, which ptxas then fences one by one (C7519). Where groups
            // are promoted, that is no slower: the promotion comes there too.
            if constexpr (Config::kPromoteRecords == 0) fence();
        }
    }

    __device__ __forceinline__ void fence() {
        if constexpr (!Config::Codec::kSharedWeights) {
#pragma unroll
            for (u32 s = 0; s < 4; ++s) register_fence(step[s]);
        }
    }

    // Loads what promotion needs; later than the codes, since registers are short until then.
    __device__ __forceinline__ void load_factors(u32 record, const Position& position) {
        const u32 row = position.warp * 16 + position.lane / 4;
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

    // The same where rows are tokens, for a half of them: products of their scales and the strips'.
    __device__ __forceinline__ void load_factors(const Shared<Config>& shared, u32 stage, u32 block,
                                                 const Position& position, u32 half) {
        const u32 row = first_token_row<Config>(position, half) + position.warp * 16 + position.lane / 4;
        const u32 tokens = shared.block_scales(stage, 0) + row * 4;
        float low, high;
        if constexpr (Config::kLhsE8m0) {
            low = __uint_as_float(bf16_of_e8m0(load_shared_u8(tokens + block % 4)) << 16);
            high = __uint_as_float(bf16_of_e8m0(load_shared_u8(tokens + 32 + block % 4)) << 16);
        } else {
            low = load_shared_float(tokens);
            high = load_shared_float(tokens + 32);
        }
#pragma unroll
        for (u32 strip = 0; strip < kScales; ++strip) {
            const float scale = load_shared_real<Config::kScaleType>(shared.strip_scale(stage, position.along_n * kScales + strip), 0);
            low_scale[strip] = scale * low;
            high_scale[strip] = scale * high;
        }
    }
};

// A warpgroup's sums of a tile, promoted and in the tensor cores.
template <typename Config>
struct TileSums {
    static constexpr u32 kPartials = Config::kSums / Config::kHalves;
    using Partial = typename Config::template Wgmma<kPartials * 2>::Accumulator;
    Partial partial[Config::kInFlight][kPartials];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 unit = 0; unit < Config::kInFlight; ++unit)
#pragma unroll
            for (u32 i = 0; i < kPartials; ++i) partial[unit][i] = 0;
    }

    // Those of the tile, where no group promoted them.
    __device__ __forceinline__ void take(float (&acc)[Config::kSums]) const {
        if constexpr (Config::kPromoteRecords == 0) {
#pragma unroll
            for (u32 h = 0; h < Config::kHalves; ++h)
#pragma unroll
                for (u32 i = 0; i < kPartials; ++i) acc[h * kPartials + i] = float(partial[h][i]);
        }
    }
};

// Multiplies the first kWidth tokens of a tile, or where rows are tokens, kWidth rows of n.
template <typename Config, u32 kWidth>
struct Multiplier {
    static constexpr u32 kHalves = Config::kHalves;
    static constexpr u32 kTokens = kWidth / kHalves;  // wgmma's N
    using Wgmma = typename Config::template Wgmma<kTokens>;
    static constexpr u32 kPartials = kTokens / 2;
    using Sums = TileSums<Config>;
    static constexpr u32 kChunks = Fragments<Config>::kChunks;
    static constexpr u32 kSteps = Fragments<Config>::kSteps;
    // A chunk's scale, and its offset, which multiplies the sum of activations: the tensor cores add that up as
    // products with ones.
    static constexpr u32 kFactors = Config::kOffset ? 2 : 1;
    // A unit is the sum for one half of the tokens and one factor of a chunk; kInFlight of them have registers.
    static constexpr u32 kUnits = kChunks * kFactors * kHalves;
    static constexpr u32 kInFlight = Config::kInFlight;
    static_assert(kInFlight % kHalves == 0 || (Config::kTokenRows && kInFlight == 1), "every half in flight, or one");
    static_assert(kInFlight <= kUnits, "no more in flight than there are");
    static_assert(kUnits == kHalves || Config::kPromoteRecords == 1, "units share registers one after another");

    typename Sums::Partial (&partial)[kInFlight][Sums::kPartials];
    u32 pending = 0;  // records summed in `partial` since the last promotion

    __device__ __forceinline__ explicit Multiplier(Sums& sums) : partial(sums.partial) { sums.clear(); }

    __device__ __forceinline__ void issue(u32 unit, const Fragments<Config>& fragments, u64 descriptor) {
        const u32 half = unit % kHalves, factor = unit / kHalves % kFactors, chunk = unit / kHalves / kFactors;
        wgmma_fence();
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
            const u32 step = chunk * kSteps + s;
            const bool accumulate = s > 0 || (Config::kPromoteRecords != 1 && pending > 0);
            constexpr u32 kRows = Config::kTokenRows ? kTokenRows : kTokens;
            const u64 tokens = descriptor + half * (kRows * kSwizzledRow >> 4) + step * 2;
            if constexpr (Config::kTokenRows) {
                Wgmma::issue(partial[unit % kInFlight], tokens, fragments.weights + step * 2, accumulate);
            } else if constexpr (Config::Codec::kSharedWeights) {
                Wgmma::issue(partial[unit % kInFlight], fragments.weights + step * 2, tokens, accumulate);
            } else if (factor == 0) {
                Wgmma::issue(partial[unit % kInFlight], fragments.step[step], tokens, accumulate);
            } else {
                constexpr u32 kOne = Config::Codec::kOne;
                const u32 ones[4] = {kOne, kOne, kOne, kOne};
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

    // Waits for them, promoting each unit's sums by its factor while the next one multiplies. Sums of several records
    // are promoted when kPromoteRecords are summed up, or at the last one; 0 is never. `tokens` is where the first of
    // the tokens' scales that the lane reads is, if they have any for the record.
    __device__ __forceinline__ void finish(float (&acc)[Config::kSums], Fragments<Config>& fragments,
                                           u64 descriptor, bool last, u32 tokens) {
        constexpr bool kNever = Config::kPromoteRecords == 0;
        const bool promote_now =
            !kNever && (Config::kPromoteRecords == 1 || last || pending + 1 == Config::kPromoteRecords);
#pragma unroll
        for (u32 unit = 0; unit < kUnits; ++unit) {
            const u32 half = unit % kHalves, factor = unit / kHalves % kFactors, chunk = unit / kHalves / kFactors;
            const TokenScales<kTokens, (Config::kLhsGroup > 0), Config::kLhsE8m0> scales(tokens + half * kTokens * 4);
            wgmma_wait(min(kInFlight, kUnits - unit) - 1);
            register_fence(partial[unit % kInFlight]);
            if (promote_now) {
                const float low = factor == 0 ? fragments.low_scale[chunk] : fragments.low_offset[chunk];
                const float high = factor == 0 ? fragments.high_scale[chunk] : fragments.high_offset[chunk];
                if constexpr (Config::kLhsGroup > 0)
                    promote<kPartials>(acc, half * kPartials, partial[unit % kInFlight], low, high, scales);
                else
                    promote<kPartials>(acc, half * kPartials, partial[unit % kInFlight], low, high);
                // Asked for here; ptxas may still sink it below the next wait (docs/notes/main-loop.md).
                register_fence(acc, half * kPartials, kPartials);
            }
            if (unit + kInFlight < kUnits) issue(unit + kInFlight, fragments, descriptor);
        }
        fragments.fence();
        pending = promote_now ? 0 : pending + 1;
    }

    // The same where rows are tokens. `load_factors` loads those of a half; `release` is called once the tensor cores
    // have read all of the record.
    template <typename LoadFactors, typename Release>
    __device__ __forceinline__ void finish(float (&acc)[Config::kSums], const Fragments<Config>& fragments,
                                           u64 descriptor, LoadFactors load_factors, Release release) {
#pragma unroll
        for (u32 half = 0; half < kHalves; ++half) {
            load_factors(half);
            wgmma_wait<0>();
            register_fence(partial[0]);
            if (half + 1 == kHalves) release();
#pragma unroll
            for (u32 i = 0; i < kPartials; ++i) {
                const u32 strip = i / (kStripRows / 2);
                const float scale = i / 2 % 2 ? fragments.high_scale[strip] : fragments.low_scale[strip];
                acc[half * kPartials + i] = fmaf(float(partial[0][i]), scale, acc[half * kPartials + i]);
            }
            register_fence(acc, half * kPartials, kPartials);
            if (half + 1 < kHalves) issue(half + 1, fragments, descriptor);
        }
    }
};

// Hands a stage back to the producers that fill it, once what the warp loaded of it is there. ptxas arrives ahead of a
// record's promotion, when loads of its scales may still be on their way: behind a queue of single scales that another
// warp copies they can take longer than the next record takes to come.
template <typename Config>
__device__ __forceinline__ void release_stage(const Shared<Config>& shared, u32 stage, const Position& position) {
    loads_done();
    if constexpr (Shared<Config>::kMulticast == 1) {
        if (position.lane == 0) barrier_arrive(shared.empty(stage));
    } else {
        // A lane for each: a loop would end the block in which ptxas schedules the multiplies.
        if (position.lane < Shared<Config>::kMulticast) barrier_arrive_remote(shared.empty(stage), position.lane);
    }
}

// Multiplies the warpgroup's records of a tile's first kWidth tokens into `acc`. While one record multiplies, the next
// is loaded and decoded. `begin` is called once the tile's first record is decoded and before activations are needed.
template <typename Config, u32 kWidth, typename Begin>
__device__ __forceinline__ void multiply_tile(float (&acc)[Config::kSums], TileSums<Config>& sums,
                                              const Shared<Config>& shared, const Position& position,
                                              BlockRange range, Ring<Config::kStages>& ring, Begin begin) {
    const u32 stages = ceil_div(range.end - range.begin, Config::kWarpgroupsK);
    // The last stage may hold no record for this warpgroup.
    const u32 records =
        ceil_div(max(range.end - range.begin, position.along_k) - position.along_k, Config::kWarpgroupsK);
    const u64 first_descriptor =
        k_major_descriptor(shared.lhs(0, position.along_k) + first_token_row<Config>(position, 0) * kSwizzledRow);

    // Known where k is not split, which saves registers; but with one set of fragments ptxas would serialise the
    // multiplies (C7513).
    const bool any =
        (Config::kFragmentSets == 2 && Config::kSplitK == 1 && Config::kWarpgroupsK == 1) || records > 0;

    Multiplier<Config, kWidth> multiplier(sums);
    [[maybe_unused]] u32 block = range.begin + position.along_k;  // of the ring's stage
    auto load = [&](Fragments<Config>& fragments, const Ring<Config::kStages>& from) {
        barrier_wait<Config::kDebug>(shared.full(from.stage), from.parity);
        const u32 strip = position.along_n * Shared<Config>::kStripsOfWarpgroup;
        fragments.load(shared.record(from.stage, strip, position.along_k), position);
    };
    // The stage of the next record; after the last, the last again: loading it for nothing costs less than a branch,
    // which would keep ptxas from scheduling across it.
    auto next_stage = [&](bool last) {
        Ring<Config::kStages> next = ring;
        next.advance();
        return last ? ring : next;
    };
    // Multiplies `current`, the record of the ring's stage, and loads the one after it.
    auto multiply = [&](Fragments<Config>& current, Fragments<Config>& next, bool last, bool load_next) {
        const u32 stage = ring.stage;
        const u64 descriptor = advance_descriptor(first_descriptor, stage * Shared<Config>::kLhsStage);
        // Halves of token rows have few stages: the next is waited for when this one's is on its way again.
        constexpr bool kAdvancesLast = Config::kTokenRows && Config::kHalves == 2;
        multiplier.start(current, descriptor);
        if constexpr (!kAdvancesLast) {
            if (load_next) load(next, next_stage(last));
            ring.advance();
        }
        if constexpr (Config::kTokenRows) {
            auto load_factors = [&](u32 half) { current.load_factors(shared, stage, block, position, half); };
            multiplier.finish(acc, current, descriptor, load_factors, [&] { release_stage(shared, stage, position); });
            ++block;
            if constexpr (kAdvancesLast) {
                if (load_next) load(next, next_stage(last));
                ring.advance();
            }
        } else {
            current.load_factors(shared.record(stage, position.along_n, position.along_k), position);
            const u32 tokens = shared.block_scales(stage, position.along_k);
            if constexpr (Config::kLhsE8m0) {
                multiplier.finish(acc, current, descriptor, last, tokens + block % 4);
                block += Config::kWarpgroupsK;
            } else {
                multiplier.finish(acc, current, descriptor, last, tokens + position.lane % 4 * 8);
            }
            release_stage(shared, stage, position);
        }
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
            // Two sets of registers alternate, so that nothing is copied.
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
        release_stage(shared, ring.stage, position);
        ring.advance();
    }
}

// Whether a warpgroup has some of a tile's tokens, of which there may be fewer than the tile has room for.
template <typename Config>
__device__ __forceinline__ bool has_tokens(const Position& position, u32 tokens) {
    return Config::kWarpgroupsM == 1 || first_token_row<Config>(position, 0) < tokens;
}

// Hands all stages of a tile back, of which the warpgroup has no tokens.
template <typename Config, typename Begin>
__device__ __forceinline__ void skip_tile(const Shared<Config>& shared, const Position& position, BlockRange range,
                                          Ring<Config::kStages>& ring, Begin begin) {
    begin();
    for (u32 block = range.begin; block < range.end; ++block) {
        barrier_wait<Config::kDebug>(shared.full(ring.stage), ring.parity);
        release_stage(shared, ring.stage, position);
        ring.advance();
    }
}

// The same with the narrowest multiply that takes `tokens`.
template <typename Config, u32 kIndex = 0, typename Begin>
__device__ __forceinline__ void multiply_tokens(u32 tokens, float (&acc)[Config::kSums], TileSums<Config>& sums,
                                                const Shared<Config>& shared, const Position& position,
                                                BlockRange range, Ring<Config::kStages>& ring, Begin begin) {
    constexpr u32 kWidth = Config::width(kIndex);
    if constexpr (Config::kWarpgroupsM > 1) {
        if (!has_tokens<Config>(position, tokens)) {
            skip_tile(shared, position, range, ring, begin);
            return;
        }
    }
    if constexpr (kIndex + 1 < Config::kWidths) {
        if (tokens > kWidth) {
            multiply_tokens<Config, kIndex + 1>(tokens, acc, sums, shared, position, range, ring, begin);
            return;
        }
    }
    multiply_tile<Config, kWidth>(acc, sums, shared, position, range, ring, begin);
}

}  // namespace jitgemm
