// A warpgroup's part of a tile: decode weights into A fragments, multiply, promote the partial sums by their scales.
//
// A record is multiplied in units: one for each half of the tokens, chunk and factor, each with sums of its own. Two
// policies say what differs between kernels, and one loop does the rest:
//
//     Operand   what wgmma reads as A: decoded weights in registers, weights in shared memory, or tokens
//     Scaling   what a unit's sums are multiplied by: nothing, a scale per row, row x token, strip x token; in f16
//
//     record i        wait for stage   decode    | multiply, all units in flight
//     record i + 1                               | wait for its stage    decode       | multiply ...
//     record i                                   | factors   wait   promote   stage   | wait for ...
//                                                            \__ unit by unit _/ handed back
//
// A run is the records whose sums stay in the tensor cores: kPromoteRecords of them, or with 0 the whole tile, which
// nothing scales. The loop takes a run at a time, or two records where two sets of fragments alternate. With kF16Sums
// every record is promoted, and a run is the records whose scaled sums stay in f16, kF16Run of them. Of an operand in two
// parts, a record's parts go where else two records of a run go.
//
// Sum i of a thread, of 64 rows x N columns of a unit; w = thread / 32, l = thread % 32:
//
//     row     16 w + l / 4       i = 0, 1     4, 5     8, 9   ...
//     row     16 w + l / 4 + 8   i = 2, 3     6, 7    10, 11  ...
//     column  2 (l % 4) + 0, 1          + 0      + 8     + 16 ...
//
// Rows are rows of n and columns tokens; where tokens are wgmma's rows (kTokensAsM), the other way round. Halves follow
// one another: a thread's sums of the tile are [half][i]. Sums in f16 are pairs, 2 i and 2 i + 1 in register i.
#pragma once
#include <jitgemm/gemm/ahead.cuh>
#include <jitgemm/gemm/correction.cuh>

namespace jitgemm {

template <bool kCondition, typename A, typename B>
struct Choose {
    using Type = A;
};
template <typename A, typename B>
struct Choose<false, A, B> {
    using Type = B;
};

// The policies of a kernel whose wgmma has N = kTokens.
template <typename Config, u32 kTokens>
struct Policies {
    static constexpr bool kShared = Config::Codec::kSharedWeights;
    static constexpr bool kTwo = Config::Codec::kTerms == 2;
    using Decoded = typename Choose<kTwo, TwoTermWeights<Config>, RegisterWeights<Config>>::Type;
    using Weights = typename Choose<kShared, SharedWeights<Config>, Decoded>::Type;
    using Operand = typename Choose<Config::kTokensAsM, TokensAsRows<Config>, Weights>::Type;
    using OfRow32 = typename Choose<Config::kByParts, PartsScaling<Config, kTokens>, RowScaling<Config, kTokens>>::Type;
    using OfRow = typename Choose<Config::kF16Sums, F16Scaling<Config, kTokens>, OfRow32>::Type;
    using OfRows = typename Choose<(Config::kLhsGroup > 0), RowTokenScaling<Config, kTokens>, OfRow>::Type;
    using Scaled = typename Choose<Config::kTokensAsM, StripTokenScaling<Config, kTokens>, OfRows>::Type;
    using Scaling = typename Choose<Config::kPromoteRecords == 0, NoScaling<Config, kTokens>, Scaled>::Type;
};

// A warpgroup's sums of a tile that are in the tensor cores.
template <typename Config>
struct TileSums {
    static constexpr u32 kTokens = Config::kSums * 2 / Config::kHalves;
    using Wgmma = typename Config::template Wgmma<kTokens>;
    using Partial = typename Wgmma::Accumulator;
    static constexpr u32 kPartials = Wgmma::kRegisters;
    Partial partial[Config::kInFlight][kPartials];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 unit = 0; unit < Config::kInFlight; ++unit)
#pragma unroll
            for (u32 i = 0; i < kPartials; ++i) partial[unit][i] = Config::kByParts ? kFloatOfSums : 0;
    }

    // Those of the tile, where nothing promoted them.
    __device__ __forceinline__ void take(float (&acc)[Config::kSums]) const {
        if constexpr (Config::kPromoteRecords == 0) {
#pragma unroll
            for (u32 h = 0; h < Config::kHalves; ++h)
#pragma unroll
                for (u32 i = 0; i < kPartials; ++i) {
                    if constexpr (Config::kIntegers) acc[h * kPartials + i] = __int_as_float(partial[h][i]);
                    else acc[h * kPartials + i] = float(partial[h][i]);
                }
        }
    }
};

// Multiplies records by the first kWidth tokens of a tile, or where rows are tokens, by kWidth rows of n.
template <typename Config, u32 kWidth>
struct Multiplier {
    static constexpr u32 kHalves = Config::kHalves;
    static constexpr u32 kTokens = kWidth / kHalves;  // wgmma's N
    static constexpr u32 kInFlight = Config::kInFlight;  // units that have registers
    using Wgmma = typename Config::template Wgmma<kTokens>;
    using Operand = typename Policies<Config, kTokens>::Operand;
    using Scaling = typename Policies<Config, kTokens>::Scaling;
    using Sums = TileSums<Config>;
    static constexpr u32 kUnits = Unit<Config>::kCount;
    static_assert(kInFlight % kHalves == 0 || (Config::kTokensAsM && kInFlight == 1), "every half in flight, or one");
    // Whether multiplies start so many units ahead over the ends of records, see multiply_ahead().
    static constexpr bool kAhead = Config::kF16Sums && kInFlight == 2;
    static_assert(kAhead || kInFlight <= kUnits, "no more in flight than there are");
    static_assert(kUnits == kHalves || Config::kPromoteRecords == 1, "units share registers one after another");

    typename Sums::Partial (&partial)[kInFlight][Sums::kPartials];
    typename Scaling::Kept kept;
    u32 summed = 0;  // records, where the whole tile is a run

    __device__ __forceinline__ Multiplier(Sums& sums, const Multiplicands<Config>& of)
        : partial(sums.partial), kept(of) {
        sums.clear();
    }

    template <Place kPlace>
    __device__ __forceinline__ void issue(u32 index, const Operand& operand, u64 descriptor) {
        issue<kPlace>(index, partial[index % kInFlight], operand, descriptor);
    }
    template <Place kPlace>
    __device__ __forceinline__ void issue(u32 index, typename Sums::Partial (&sums)[Sums::kPartials],
                                          const Operand& operand, u64 descriptor) {
        const Unit<Config> unit(index);
        wgmma_fence();
#pragma unroll
        for (u32 s = 0; s < Unit<Config>::kSteps / Operand::kParts; ++s) {
            const u32 step = unit.chunk * Unit<Config>::kSteps + s;
            const bool accumulate = Config::kByParts || s > 0 || kPlace == Place::kLast || (kPlace == Place::kInTile && summed > 0);
            constexpr u32 kRows = Config::kTokensAsM ? kTokensOfHalf : kTokens;
            const u64 tokens = descriptor + unit.half * (kRows * kSwizzledRow >> 4) + step * 2;
            operand.template issue<Wgmma>(sums, unit, step, tokens, accumulate);
        }
        wgmma_commit();
    }

    // Starts one record's multiplies, as far as the registers for partial sums go.
    template <Place kPlace>
    __device__ __forceinline__ void start(const Operand& operand, u64 descriptor) {
#pragma unroll
        for (u32 index = 0; index < kInFlight; ++index) issue<kPlace>(index, operand, descriptor);
    }

    // Waits for them and starts the others. At the end of a run each unit's sums are promoted while the next one
    // multiplies. `release` hands the record's stage back.
    template <Place kPlace, typename Release>
    __device__ __forceinline__ void finish(float (&acc)[Config::kSums], Operand& operand, Scaling& scaling,
                                           u64 descriptor, Release release) {
        constexpr bool kOpens = kPlace == Place::kOpens;
        constexpr bool kPromotes = kPlace == Place::kOnly || kPlace == Place::kLast || kOpens;
#pragma unroll
        for (u32 index = 0; index < kUnits; ++index) {
            const Unit<Config> unit(index);
            if constexpr (kPromotes) scaling.unit(unit, kept);
            wgmma_wait(min(kInFlight, kUnits - index) - 1);
            register_fence(partial[index % kInFlight]);
            // What the last unit's promotion needs is in registers.
            if (Operand::kReleasesEarly && index + 1 == kUnits) release();
            if constexpr (kPromotes) {
                scaling.template promote<kOpens>(acc, kept, partial[index % kInFlight], unit);
                kept.fence(acc, unit.half * (kTokens / 2), kTokens / 2);
            }
            if (index + kInFlight < kUnits) issue<kPlace>(index + kInFlight, operand, descriptor);
        }
        operand.fence();
        if constexpr (!Operand::kReleasesEarly) release();
        ++summed;
    }
};

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

    Multiplier<Config, kWidth> multiplier(sums, of);
    using Operand = typename Multiplier<Config, kWidth>::Operand;
    using Scaling = typename Multiplier<Config, kWidth>::Scaling;
    [[maybe_unused]] u32 block = of.range.begin + position.along_k;  // of the ring's stage
    auto load = [&](Operand& operand, const Ring<Config::kStages>& from, u32 part = 0) {
        const u32 strip = position.along_n * Shared<Config>::kStripsOfWarpgroup;
        if (part == 0) {
            barrier_wait<Config::kDebug>(shared.full(from.stage), from.parity);
        }
        operand.load(shared.record(from.stage, strip, position.along_k), position, part);
    };
    // The stage of the next record; after the last, the last again: loading it for nothing costs less than a branch,
    // which would keep ptxas from scheduling across it.
    auto stage_behind = [&](bool last) {
        Ring<Config::kStages> next = ring;
        next.advance();
        return last ? ring : next;
    };
    auto advance = [&](Operand& next, bool last, bool load_next) {
        if (load_next) load(next, stage_behind(last));
        ring.advance();
    };
    // Multiplies `current`, the record of the ring's stage, and loads the one after it.
    auto multiply = [&](auto place, Operand& current, Operand& next, bool last, bool load_next) {
        constexpr Place kPlace = decltype(place)::value;
        const u32 stage = ring.stage;
        const u64 descriptor = advance_descriptor(first_descriptor, stage * Shared<Config>::kLhsStage);
        // Halves of token rows have few stages: the next is waited for when this one's is on its way again.
        constexpr bool kAdvancesLast = Config::kTokensAsM && Config::kHalves == 2;
        multiplier.template start<kPlace>(current, descriptor);
        if constexpr (!kAdvancesLast) advance(next, last, load_next);
        Scaling scaling(shared, position, stage, block, last ? kNoStage : ring.stage);
        multiplier.template finish<kPlace>(acc, current, scaling, descriptor,
                                           [&] { release_stage(shared, stage, position); });
        block += Config::kWarpgroupsK;
        if constexpr (kAdvancesLast) advance(next, last, load_next);
    };
    // The same for a record in two parts; the first part is in `even`.
    auto multiply_parts = [&](Operand& even, Operand& odd, bool last, bool load_next) {
        const u32 stage = ring.stage;
        const u64 descriptor = advance_descriptor(first_descriptor, stage * Shared<Config>::kLhsStage);
        Scaling scaling(shared, position, stage, block, kNoStage);
        multiplier.template start<Place::kFirst>(even, descriptor);
        load(odd, ring, 1);
        multiplier.template finish<Place::kFirst>(acc, even, scaling, descriptor, [] {});
        const u64 second = descriptor + Unit<Config>::kSteps / 2 * 2;
        multiplier.template start<Place::kLast>(odd, second);
        advance(even, last, load_next);
        multiplier.template finish<Place::kLast>(acc, odd, scaling, second,
                                                 [&] { release_stage(shared, stage, position); });
        block += Config::kWarpgroupsK;
    };
    if (!any) begin();
    if (any) {
        constexpr bool kPairs = Config::kPromoteRecords == 2;  // records of a run; else one or all
        constexpr Place kWhole = Config::kPromoteRecords == 0 ? Place::kInTile : Place::kOnly;
        constexpr At<kWhole> whole;
        constexpr At<kPairs ? Place::kFirst : kWhole> first;
        constexpr At<kPairs ? Place::kLast : kWhole> second;
        Operand even, odd;
        // Where threads copy the activations, weights come on their own and can be decoded before.
        if constexpr (Config::kDirectLhs) load(even, ring);
        begin();
        if constexpr (!Config::kDirectLhs) load(even, ring);
        u32 left = records;
        [[maybe_unused]] constexpr At<Place::kOpens> opens;
        if constexpr (Multiplier<Config, kWidth>::kAhead) {
            multiply_ahead<Config>(acc, multiplier, of, even, odd, records, load, [&](u32 stage) {
                return advance_descriptor(first_descriptor, stage * Shared<Config>::kLhsStage);
            });
        } else if constexpr (Config::kByParts) {
            static_assert(Config::kFragmentSets == 2 && !kPairs && kPartsRun % 2 == 0, "records go by twos");
            while (left >= 2) {
#pragma unroll 1
                do {
                    multiply(opens, even, odd, false, true);
                    multiply(whole, odd, even, left == 2, true);
                    left -= 2;
                } while (left % kPartsRun >= 2);
                multiplier.kept.flush(acc);
            }
            if (left > 0) {
                multiply(opens, even, odd, true, false);
                multiplier.kept.flush(acc);
            }
        } else if constexpr (Config::kF16Sums) {
            static_assert(Config::kFragmentSets == 2 && !kPairs && kF16Run % 2 == 0, "records go by twos");
            // Runs end where a multiple of kF16Run records is left, or one more: no counter of its own. The first two
            // records stand apart: clearing the sums instead, ptxas moves them about in each iteration.
            while (left >= 2) {
                multiply(opens, even, odd, false, true);
                multiply(whole, odd, even, left == 2, true);
#pragma unroll 1
                for (left -= 2; left % kF16Run >= 2; left -= 2) {
                    multiply(whole, even, odd, false, true);
                    multiply(whole, odd, even, left == 2, true);
                }
                multiplier.kept.flush(acc);
            }
            if (left > 0) {
                multiply(opens, even, odd, true, false);
                multiplier.kept.flush(acc);
            }
        } else if constexpr (Operand::kParts == 2) {
            static_assert(Config::kPromoteRecords == 1 && Multiplier<Config, kWidth>::kUnits == Config::kHalves,
                          "parts are of one unit, and promoted together");
            for (; left > 0; --left) multiply_parts(even, odd, left == 1, true);
        } else if constexpr (Config::kFragmentSets == 2) {
            // Two sets of registers alternate, so that nothing is copied.
            for (; left >= 2; left -= 2) {
                multiply(first, even, odd, false, true);
                multiply(second, odd, even, left == 2, true);
            }
            if (left > 0) multiply(whole, even, odd, true, false);
        } else if constexpr (kPairs) {
            for (; left >= 2; left -= 2) {
                multiply(first, even, odd, false, true);
                even = odd;
                multiply(second, even, odd, left == 2, true);
                even = odd;
            }
            if (left > 0) multiply(whole, even, odd, true, false);
        } else {
            for (; left > 0; --left) {
                multiply(whole, even, odd, left == 1, true);
                even = odd;
            }
        }
    }
    if constexpr (Config::kCorrects) {
        const u32 strip = position.along_n * Shared<Config>::kStripsOfWarpgroup;
#pragma unroll 1
        for (u32 left = corrections; left > 0; --left) {
            const u32 stage = ring.stage;
            barrier_wait<Config::kDebug>(shared.full(stage), ring.parity);
            correct<Config, kWidth>(
                acc, shared.record(stage, strip, position.along_k),
                advance_descriptor(first_descriptor, stage * Shared<Config>::kLhsStage), position);
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
