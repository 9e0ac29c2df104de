// A warpgroup's loop over the records of a tile: decode weights into A fragments, multiply, promote the partial sums by
// their scales.
//
// A record is multiplied in units: one for each half of the tokens, chunk and factor, each with sums of its own. Two
// policies say what differs between kernels, and one loop does the rest:
//
//     Operand   what wgmma reads as A: decoded weights in registers, weights in shared memory, or tokens
//     Scaling   what a unit's sums are multiplied by: nothing, a scale per row, row x token, strip x token; in f16
//
// Everywhere a unit is started, the one before is waited for and promoted, and the record behind is loaded and decoded.
// kInFlight units have registers. They are all of one record, or with kAhead go on over its end, so that the tensor
// cores have one of this warpgroup while another is promoted or a record decoded:
//
//     all of a record          start i   decode i + 1   promote i, unit by unit   stage back | start i + 1   decode ...
//     ahead, a unit a record   promote i   stage back   decode i + 2   start i + 2 | promote i + 1   ...
//     ahead, more              decode i + 1   promote unit 0   start unit 2   promote unit 1   start unit 3   ... | ...
//
// A run is the records whose sums stay together: in the tensor cores kPromoteRecords of them, or with 0 the whole tile,
// which nothing scales; in f16 kF16Run of them, by parts kPartsRun. Of an operand in two parts, a record's parts go
// where else two records of a run go.
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
#include <jitgemm/gemm/scaling.cuh>

namespace jitgemm {

// Where a step stands in its run: the first of a pair that the tensor cores sum is promoted with the last. kOpens:
// promoted, as the first of a run in f16, or of a pair by parts.
enum class Place { kOnly, kFirst, kLast, kInTile, kOpens };

constexpr u32 kF16Run = 8, kPartsRun = 16;  // records

// Hands a stage back to the producers that fill it, once what the warp loaded of it is there. ptxas arrives ahead of a
// record's promotion, when loads of its scales may still be on their way: behind a queue of single scales that another
// warp copies they can take longer than the next record takes to come.
template <typename Config>
__device__ __forceinline__ void release_stage(const Shared<Config>& shared, u32 stage, const Position& position) {
    loads_done();
    if constexpr (Config::kMulticastLhs == 1) {
        if (position.lane == 0) barrier_arrive(shared.empty(stage));
    } else {
        // A lane for each: a loop would end the block in which ptxas schedules the multiplies.
        if (position.lane < Config::kMulticastLhs) barrier_arrive_remote(shared.empty(stage), position.lane);
    }
}

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

// The loop over records times the first kWidth tokens of a tile, or where rows are tokens, kWidth rows of n.
template <typename Config, u32 kWidth>
struct Loop {
    static constexpr u32 kHalves = Config::kHalves;
    static constexpr u32 kTokens = kWidth / kHalves;  // wgmma's N
    static constexpr u32 kUnits = Unit<Config>::kCount, kInFlight = Config::kInFlight;
    using Wgmma = typename Config::template Wgmma<kTokens>;
    using Operand = typename Policies<Config, kTokens>::Operand;
    using Scaling = typename Policies<Config, kTokens>::Scaling;
    using Sums = TileSums<Config>;
    using Ring = jitgemm::Ring<Config::kStages>;
    static constexpr u32 kParts = Operand::kParts;
    static constexpr bool kAhead = Config::kF16Sums && kInFlight == 2;
    static constexpr bool kKeeps = Config::kF16Sums || Config::kByParts;  // what a run's end flushes
    static constexpr bool kPairs = Config::kPromoteRecords == 2 || kParts == 2;
    static constexpr bool kTwoSets = Config::kFragmentSets == 2 || kParts == 2;
    static constexpr u32 kRun = Config::kF16Sums ? kF16Run : Config::kByParts ? kPartsRun : 2;
    static constexpr u32 kTail = !kAhead ? 0 : kUnits == 1 ? 2 : 1;  // records at the end that start none behind them
    static_assert(kInFlight % kHalves == 0 || (Config::kTokensAsM && kInFlight == 1), "every half in flight, or one");
    static_assert(kAhead || kInFlight <= kUnits, "no more in flight than there are");
    static_assert(kUnits == kHalves || Config::kPromoteRecords == 1, "units share registers one after another");
    static_assert(!kKeeps || (Config::kFragmentSets == 2 && !kPairs && kRun % 2 == 0), "records of a run go by twos");
    static_assert(kParts == 1 || (Config::kPromoteRecords == 1 && kUnits == kHalves), "parts are of one unit");

    const Shared<Config>& shared;
    const Position& position;
    Ring& ring;  // at the step's record
    float (&acc)[Config::kSums];
    typename Sums::Partial (&partial)[kInFlight][Sums::kPartials];
    typename Scaling::Kept kept;
    const u64 first_descriptor;
    u32 block;       // of the ring's stage
    u32 summed = 0;  // records, where the whole tile is a run

    __device__ __forceinline__ Loop(float (&acc)[Config::kSums], Sums& sums, Multiplicands<Config>& of,
                                    u64 first_descriptor)
        : shared(of.shared), position(of.position), ring(of.ring), acc(acc), partial(sums.partial), kept(of),
          first_descriptor(first_descriptor), block(of.range.begin + position.along_k) {
        sums.clear();
    }

    // Of a stage's activations.
    __device__ __forceinline__ u64 descriptor(u32 stage) const {
        return advance_descriptor(first_descriptor, stage * Shared<Config>::kLhsStage);
    }
    __device__ __forceinline__ u32 record(u32 stage) const {
        return shared.record(stage, position.along_n * Shared<Config>::kStripsOfWarpgroup, position.along_k);
    }

    // Waits for a stage, and decodes its record.
    __device__ __forceinline__ void load(Operand& operand, const Ring& from) {
        barrier_wait<Config::kDebug>(shared.full(from.stage), from.parity);
        operand.load(record(from.stage), position, 0);
    }

    // The stage of the next record; after the last, the last again: loading it for nothing costs less than a branch,
    // which would keep ptxas from scheduling across it. By value: an address that is selected puts the ring into local
    // memory.
    __device__ __forceinline__ Ring behind(bool last) const {
        Ring next = ring;
        next.advance();
        return last && !kAhead ? ring : next;
    }

    // Starts the multiplies of a unit of `operand`, of the record in `stage`. Registers of sums count from kSlot on.
    template <Place kPlace, u32 kPart, u32 kSlot>
    __device__ __forceinline__ void start(u32 index, const Operand& operand, u32 stage) {
        const Unit<Config> unit(index);
        const u64 first = descriptor(stage) + kPart * (Unit<Config>::kSteps / kParts * 2);
        wgmma_fence();
#pragma unroll
        for (u32 s = 0; s < Unit<Config>::kSteps / kParts; ++s) {
            const u32 step = unit.chunk * Unit<Config>::kSteps + s;
            const bool accumulate =
                Config::kByParts || s > 0 || kPlace == Place::kLast || (kPlace == Place::kInTile && summed > 0);
            constexpr u32 kRows = Config::kTokensAsM ? kTokensOfHalf : kTokens;
            const u64 tokens = first + unit.half * (kRows * kSwizzledRow >> 4) + step * 2;
            operand.template issue<Wgmma>(partial[(kSlot + index) % kInFlight], unit, step, tokens, accumulate);
        }
        wgmma_commit();
    }

    // A step: a record, or a part of one; `next` becomes what comes behind it. kWhich: 0 or 1 in turns. kMore: whether
    // steps come that are not started or loaded yet. last: whether the record is the tile's last.
    template <Place kPlace, u32 kWhich, bool kMore>
    __device__ __forceinline__ void step(Operand& current, Operand& next, bool last) {
        constexpr bool kOpens = kPlace == Place::kOpens;
        constexpr bool kPromotes = kOpens || kPlace == Place::kOnly || kPlace == Place::kLast;
        constexpr u32 kPart = kParts == 2 ? kWhich : 0, kSlot = kTail == 2 ? kWhich : 0;
        constexpr bool kEnds = kPart + 1 == kParts;  // the record
        constexpr bool kStartsNext = kAhead && kMore;
        // Halves of token rows have few stages: the next is waited for when this one's is on its way again.
        constexpr bool kLoadsLate = kTail == 2 || (Config::kTokensAsM && kHalves == 2);
        const u32 stage = ring.stage;
        if constexpr (!kAhead) {
#pragma unroll
            for (u32 index = 0; index < kInFlight; ++index) start<kPlace, kPart, kSlot>(index, current, stage);
        }
        if constexpr (!kEnds) {
            next.load(record(stage), position, 1);
        } else if constexpr (!kLoadsLate) {
            if constexpr (kMore) load(next, behind(last));
            ring.advance();
        }
        Scaling scaling(shared, position, stage, block, last ? kNoStage : ring.stage);
#pragma unroll
        for (u32 index = 0; index < kUnits; ++index) {
            const Unit<Config> unit(index);
            auto& sums = partial[(kSlot + index) % kInFlight];
            if constexpr (kPromotes) scaling.unit(unit, kept);
            wgmma_wait(kStartsNext ? kInFlight - 1 : min(kInFlight, kUnits - index) - 1);
            register_fence(sums);
            // What the last unit's promotion needs is in registers.
            if (Operand::kReleasesEarly && index + 1 == kUnits) release_stage(shared, stage, position);
            if constexpr (kPromotes) {
                scaling.template promote<kOpens>(acc, kept, sums, unit);
                kept.fence(acc, unit.half * (kTokens / 2), kTokens / 2);
            }
            const u32 later = index + kInFlight;
            if (later < kUnits) start<kPlace, kPart, kSlot>(later, current, stage);
            else if (kStartsNext && kUnits > 1) start<kPlace, kPart, kSlot>(later - kUnits, next, ring.stage);
        }
        current.fence();
        if constexpr (kEnds) {
            if constexpr (!Operand::kReleasesEarly) release_stage(shared, stage, position);
            block += Config::kWarpgroupsK;
        }
        ++summed;
        if constexpr (kTail == 2) {
            // Its successor but one takes its registers.
            ring.advance();
            if constexpr (kMore) {
                load(current, behind(false));
                start<kPlace, kPart, kSlot>(0, current, behind(false).stage);
            }
        } else if constexpr (kLoadsLate) {
            if constexpr (kMore) load(next, behind(last));
            ring.advance();
        }
    }

    // Two of them. Two sets of registers alternate, so that nothing is copied.
    template <Place kFirst, Place kSecond>
    __device__ __forceinline__ void two(Operand& even, Operand& odd, bool last) {
        step<kFirst, 0, true>(even, odd, false);
        if constexpr (kTwoSets) {
            step<kSecond, 1, true>(odd, even, last);
        } else {
            even = odd;
            step<kSecond, 1, true>(even, odd, last);
            even = odd;
        }
    }

    __device__ __forceinline__ void flush() {
        if constexpr (kKeeps) kept.flush(acc);
    }

    // All records of a tile, at least one. `begin` is called once the first is decoded, and before activations are
    // needed.
    template <typename Begin>
    __device__ __forceinline__ void run(u32 records, Begin begin) {
        constexpr Place kWhole = Config::kPromoteRecords == 0 ? Place::kInTile : Place::kOnly;
        constexpr Place kAlone = kKeeps ? Place::kOpens : kWhole;
        constexpr Place kFirst = kPairs ? Place::kFirst : kAlone, kSecond = kPairs ? Place::kLast : kWhole;
        Operand even, odd;
        // Where threads copy the activations, weights come on their own and can be decoded before.
        if constexpr (Config::kDirectLhs) load(even, ring);
        begin();
        if constexpr (!Config::kDirectLhs) load(even, ring);
        if constexpr (!kTwoSets && !kPairs) {
            for (; records > 0; --records) {
                step<kWhole, 0, true>(even, odd, records == 1);
                even = odd;
            }
            return;
        }
        if constexpr (kAhead) {
            register_fence(partial[1]);  // cleared by now, or ptxas would wait for the first multiply (C7517)
            start<kFirst, 0, 0>(0, even, ring.stage);
            if constexpr (kUnits > 1) start<kFirst, 0, 0>(1, even, ring.stage);
        }
        if constexpr (kTail == 2) {
            if (records == 1) {  // apart, or ptxas would wait where the paths meet (C7517)
                step<kFirst, 0, false>(even, odd, true);
                flush();
                return;
            }
            const Ring second = behind(false);
            load(odd, second);
            start<kFirst, 0, 1>(0, odd, second.stage);
        }
        u32 left = records * kParts - kTail;
        // A run ends where a multiple of kRun steps is left, or one more: no counter of its own. Of a run in f16 the
        // first two stand apart: clearing the sums instead, ptxas moves them about in each iteration.
        while (left >= 2) {
#pragma unroll 1
            do {
                two<kFirst, kSecond>(even, odd, left == 2);
                left -= 2;
            } while (!Config::kF16Sums && left % kRun >= 2);
#pragma unroll 1
            for (; Config::kF16Sums && left % kRun >= 2; left -= 2) two<kSecond, kSecond>(even, odd, left == 2);
            flush();
        }
        if constexpr (kTail == 0) {
            if (left == 0) return;
            step<kAlone, 0, false>(even, odd, true);
        } else if (left > 0) {
            step<kFirst, 0, true>(even, odd, false);
            step<kSecond, 1, false>(odd, even, true);
            if constexpr (kTail == 2) step<kSecond, 0, false>(even, odd, true);
        } else {
            step<kFirst, 0, false>(even, odd, true);
            if constexpr (kTail == 2) step<kSecond, 1, false>(odd, even, true);
        }
        flush();
    }
};

}  // namespace jitgemm
