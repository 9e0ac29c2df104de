// What wgmma multiplies: the units of a record, and the operand policies. Each loads a record when its stage has come, and
// issues one k-step of a unit: `tokens` is the descriptor of that step's activations. Of kParts parts a record is loaded
// and multiplied one after the other.
#pragma once
#include <jitgemm/gemm/shared.cuh>
#include <jitgemm/ptx/wgmma.cuh>

namespace jitgemm {

// The units of a record, in the order in which they multiply: halves fastest, then factors of a chunk.
template <typename Config>
struct Unit {
    static constexpr u32 kHalves = Config::kHalves;
    static constexpr u32 kChunks = Record<Config>::kChunks;
    static constexpr u32 kSteps = 4 / kChunks;  // k-steps of 32
    // A chunk's scale, and its offset, which multiplies the sum of activations: the tensor cores add that up as
    // products with ones.
    static constexpr u32 kFactors = Config::kOffset ? 2 : 1;
    static constexpr u32 kCount = kChunks * kFactors * kHalves;

    u32 half, factor, chunk;
    __device__ __forceinline__ constexpr explicit Unit(u32 index)
        : half(index % kHalves), factor(index / kHalves % kFactors), chunk(index / kHalves / kFactors) {}
};

// Weights of 4 bits, decoded into registers: A fragments of a record's four k-steps.
template <typename Config>
struct RegisterWeights {
    static constexpr bool kReleasesEarly = false;
    static constexpr u32 kParts = 1;
    u32 step[4][4];

    // Loads and decodes the codes.
    __device__ __forceinline__ void load(u32 record, const Position& position, u32) {
        Config::Codec::template load<Unit<Config>::kChunks>(step, record, record + Record<Config>::kZeros, position);
        // Else int8's decode comes between the multiplies, which ptxas then fences one by one (C7519). Where groups are
        // promoted, that is no slower: the promotion comes there too.
        if constexpr (Config::kPromoteRecords == 0) fence();
    }
    __device__ __forceinline__ void fence() {
#pragma unroll
        for (u32 s = 0; s < 4; ++s) register_fence(step[s]);
    }
    template <typename Wgmma, typename Partial>
    __device__ __forceinline__ void issue(Partial& partial, const Unit<Config>& unit, u32 s, u64 tokens,
                                          bool accumulate) const {
        if (unit.factor == 0) {
            Wgmma::issue(partial, step[s], tokens, accumulate);
        } else {
            constexpr u32 kOne = Config::Codec::kOne;
            const u32 ones[4] = {kOne, kOne, kOne, kOne};
            Wgmma::issue(partial, ones, tokens, accumulate);
        }
    }
};

// The same, of codes that are the sum of two terms: both multiply the same activations into the same sums. As terms take
// twice the registers, an operand is half of a record.
template <typename Config>
struct TwoTermWeights {
    static constexpr bool kReleasesEarly = false;
    static constexpr u32 kParts = 2;
    u32 high[2][4], low[2][4];

    __device__ __forceinline__ void load(u32 record, const Position& position, u32 part) {
        Config::Codec::load(high, low, record, record + Record<Config>::kZeros, part, position);
    }
    __device__ __forceinline__ void fence() {
#pragma unroll
        for (u32 s = 0; s < 2; ++s) {
            register_fence(high[s]);
            register_fence(low[s]);
        }
    }
    template <typename Wgmma, typename Partial>
    __device__ __forceinline__ void issue(Partial& partial, const Unit<Config>&, u32 s, u64 tokens,
                                          bool accumulate) const {
        Wgmma::issue(partial, high[s], tokens, accumulate);
        Wgmma::issue(partial, low[s], tokens, true);
    }
};

// Weights of 8 bits, which wgmma reads from shared memory.
template <typename Config>
struct SharedWeights {
    static constexpr bool kReleasesEarly = false;
    static constexpr u32 kParts = 1;
    u64 weights;  // descriptor of the record

    __device__ __forceinline__ void load(u32 record, const Position&, u32) { weights = k_major_descriptor(record); }
    __device__ __forceinline__ void fence() {}
    template <typename Wgmma, typename Partial>
    __device__ __forceinline__ void issue(Partial& partial, const Unit<Config>&, u32 s, u64 tokens,
                                          bool accumulate) const {
        Wgmma::issue(partial, weights + s * 2, tokens, accumulate);
    }
};

// Tokens as A, all strips' weights as B. Sums of a record are the last thing that is read of its stage.
template <typename Config>
struct TokensAsRows : SharedWeights<Config> {
    static constexpr bool kReleasesEarly = true;
    template <typename Wgmma, typename Partial>
    __device__ __forceinline__ void issue(Partial& partial, const Unit<Config>&, u32 s, u64 tokens,
                                          bool accumulate) const {
        Wgmma::issue(partial, tokens, this->weights + s * 2, accumulate);
    }
};

}  // namespace jitgemm
