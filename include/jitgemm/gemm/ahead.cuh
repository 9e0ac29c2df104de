// Records whose sums are in f16, multiplied two units ahead. What a tile's loop is written in stands here as well: a record's
// place in its run, and constants as arguments.
#pragma once
#include <jitgemm/gemm/scaling.cuh>

namespace jitgemm {

// Where a record stands in its run.
enum class Place { kOnly, kFirst, kLast, kInTile, kOpens };  // kOpens: the first of a run in f16, or of a pair by parts

constexpr u32 kF16Run = 8, kPartsRun = 16;  // records

// Constants as arguments' types.
template <Place kValue>
struct At {
    static constexpr Place value = kValue;
};

template <u32 kValue>
struct Constant {
    static constexpr u32 value = kValue;
};

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

// Multiplies a tile's records two units ahead: while a unit is promoted, and a record decoded, the tensor cores have
// another of this warpgroup. That takes registers for two units' sums, which those in f16 leave.
//
//     one unit a record       | promote i   decode i + 2   start i + 2 | promote i + 1   decode i + 3   start i + 3 | ...
//     tensor cores            | i + 1                                  | i + 2
//
//     more                    | decode i + 1 | promote unit 0   start unit 2 | promote unit 1   start unit 3 | ...
//     tensor cores            | units 0, 1   | unit 1                        | unit 2
//
// `load(operand, ring)` waits for a stage and decodes it, `descriptor(stage)` is where its activations are.
template <typename Config, typename Multiplier, typename Operand, typename Load, typename Descriptor>
__device__ __forceinline__ void multiply_ahead(float (&acc)[Config::kSums], Multiplier& multiplier,
                                               Multiplicands<Config>& of, Operand& even, Operand& odd, u32 records,
                                               Load load, Descriptor descriptor) {
    using Scaling = typename Multiplier::Scaling;
    using Ring = jitgemm::Ring<Config::kStages>;
    constexpr u32 kUnits = Multiplier::kUnits, kInFlight = Config::kInFlight;
    constexpr Place kOnly = Place::kOnly;
    Ring& ring = of.ring;
    u32 block = of.range.begin;  // k is not split among warpgroups

    // Promotes the ring's record; where it is not among the last, starts what comes two units later.
    auto multiply = [&](auto place, auto behind, Operand& current, Operand& next, auto slot) {
        constexpr bool kOpens = decltype(place)::value == Place::kOpens, kMore = decltype(behind)::value > 0;
        constexpr u32 kSlot = decltype(slot)::value;
        const u32 stage = ring.stage;
        Ring ahead = ring;
        ahead.advance();
        if constexpr (kUnits > 1 && kMore) load(next, ahead);
        Scaling scaling(of.shared, of.position, stage, block, kNoStage);
#pragma unroll
        for (u32 index = 0; index < kUnits; ++index) {
            const Unit<Config> unit(index);
            auto& partial = multiplier.partial[(kSlot + index) % kInFlight];
            scaling.unit(unit, multiplier.kept);
            // Units started behind this one: of this record, and of the next where there is one.
            wgmma_wait(kMore ? kInFlight - 1 : min(kInFlight, kUnits - index) - 1);
            register_fence(partial);
            scaling.template promote<kOpens>(acc, multiplier.kept, partial, unit);
            multiplier.kept.fence(acc, 0, Config::kSums);
            const u32 later = index + kInFlight;
            if (kUnits > 1 && later < kUnits) {
                multiplier.template issue<kOnly>(later, partial, current, descriptor(stage));
            } else if (kUnits > 1 && kMore) {
                multiplier.template issue<kOnly>(later - kUnits, partial, next, descriptor(ahead.stage));
            }
        }
        current.fence();
        release_stage(of.shared, stage, of.position);
        ring.advance();
        ++block;
        if constexpr (kUnits == 1 && kMore) {
            ahead.advance();
            load(current, ahead);
            multiplier.template issue<kOnly>(0, multiplier.partial[kSlot], current, descriptor(ahead.stage));
        }
    };
    constexpr At<Place::kOpens> opens;
    constexpr At<kOnly> adds;
    constexpr Constant<1> more;
    constexpr Constant<0> none, first;
    constexpr Constant<kUnits == 1 ? 1 : 0> second;  // slot of odd records' first unit

    register_fence(multiplier.partial[1]);  // cleared by now, or ptxas would wait for the first multiply (C7517)
    multiplier.template issue<kOnly>(0, multiplier.partial[0], even, descriptor(ring.stage));
    if constexpr (kUnits > 1) multiplier.template issue<kOnly>(1, multiplier.partial[1], even, descriptor(ring.stage));
    if constexpr (kUnits == 1) {
        if (records == 1) {  // apart, or ptxas would wait where the paths meet (C7517)
            multiply(opens, none, even, odd, first);
            multiplier.kept.flush(acc);
            return;
        }
        Ring ahead = ring;
        ahead.advance();
        load(odd, ahead);
        multiplier.template issue<kOnly>(0, multiplier.partial[1], odd, descriptor(ahead.stage));
    }
    u32 left = records - (kUnits == 1 ? 2 : 1);  // records with something behind them to start
    // Runs end where a multiple of kF16Run of them is left, or one more: no counter of its own. A run's first two records
    // stand apart: clearing the sums instead, ptxas moves them about in each iteration.
    while (left >= 2) {
        multiply(opens, more, even, odd, first);
        multiply(adds, more, odd, even, second);
#pragma unroll 1
        for (left -= 2; left % kF16Run >= 2; left -= 2) {
            multiply(adds, more, even, odd, first);
            multiply(adds, more, odd, even, second);
        }
        multiplier.kept.flush(acc);
    }
    if (left > 0) {
        multiply(opens, more, even, odd, first);
        multiply(adds, none, odd, even, second);
        if constexpr (kUnits == 1) multiply(adds, none, even, odd, first);
    } else {
        multiply(opens, none, even, odd, first);
        if constexpr (kUnits == 1) multiply(adds, none, odd, even, second);
    }
    multiplier.kept.flush(acc);
}

}  // namespace jitgemm
