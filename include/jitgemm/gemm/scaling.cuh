// What sums are multiplied by on their way from the tensor cores: the scaling policies.
//
// Each loads what a record's promotion needs: for all units when it is made, behind the multiplies' start and the next
// record's decode, since registers are short until then; for a unit by unit(), before that unit's sums are waited for.
// promote() adds a unit's scaled sums to `acc`; `block` is the record's k-block. A policy's Kept is what it has from record
// to record of a tile. `behind` is the stage of the next record, kNoStage at the last.
#pragma once
#include <jitgemm/gemm/operand.cuh>
#include <jitgemm/gemm/scheduler.cuh>

namespace jitgemm {

constexpr u32 kNoStage = 0xFFFFFFFF;
constexpr i32 kFloatOfSums = 0x4B400000;  // 1.5 * 2^23, see PartsScaling

// What a warpgroup multiplies: a tile's k-blocks, as they come through the stages of the ring.
template <typename Config>
struct Multiplicands {
    const Shared<Config>& shared;
    const Position& position;
    Ring<Config::kStages> ring;
    BlockRange range;
    float low_power, high_power;  // 2^E of the thread's rows, where sums are in f16
    u32 codes_end;                // of k, the first block that corrects
};

// Its rows' powers, of a tile; 1 for rows that the weight does not have.
template <typename Config>
__device__ __forceinline__ void load_powers(Multiplicands<Config>& of, const Tile<Config>& tile, u32 n) {
    const float* powers = reinterpret_cast<const float*>(tile.channel_scale());
    const Position& position = of.position;
    const u32 row = tile.first_row + position.along_n * kStripRows + position.warp * 16 + position.lane / 4;
    of.low_power = row < n ? powers[row] : 1.0f;
    of.high_power = row + 8 < n ? powers[row + 8] : 1.0f;
}

// Nothing, of a policy that promotes to `acc` at once.
struct KeepsNothing {
    template <typename Config>
    __device__ __forceinline__ explicit KeepsNothing(const Multiplicands<Config>&) {}

    // Asked for here; ptxas may still sink a promotion below the next wait (docs/notes/main-loop.md).
    template <int kTotal>
    __device__ __forceinline__ void fence(float (&acc)[kTotal], u32 first, u32 count) {
        register_fence(acc, first, count);
    }
};

// None: the sums stay in the tensor cores for the whole tile.
template <typename Config, u32 kTokens>
struct NoScaling {
    using Kept = KeepsNothing;
    __device__ __forceinline__ NoScaling(const Shared<Config>&, const Position&, u32, u32, u32) {}
    __device__ __forceinline__ void unit(const Unit<Config>&, const Kept&) {}
    template <bool kOpens, typename Acc, typename Partial>
    __device__ __forceinline__ void promote(Acc&, Kept&, const Partial&, const Unit<Config>&) const {}
};

// A scale of each row and chunk, and its offset: acc += scale of the row * sum.
template <typename Config, u32 kTokens>
struct RowScaling {
    using Kept = KeepsNothing;
    static constexpr u32 kChunks = Unit<Config>::kChunks;
    // Of the thread's two rows: for sums of codes times activations, for sums of activations.
    float low_scale[kChunks], high_scale[kChunks];
    float low_offset[kChunks], high_offset[kChunks];

    __device__ __forceinline__ RowScaling(const Shared<Config>& shared, const Position& position, u32 stage, u32, u32) {
        using Layout = Record<Config>;
        const u32 record = shared.record(stage, position.along_n, position.along_k);
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
    __device__ __forceinline__ void unit(const Unit<Config>&, const Kept&) {}

    template <bool kOpens, int kTotal, int kPartials, typename Partial>
    __device__ __forceinline__ void promote(float (&acc)[kTotal], Kept&, const Partial (&partial)[kPartials],
                                            const Unit<Config>& unit) const {
        const u32 first = unit.half * (kTokens / 2);
        const float low = unit.factor == 0 ? low_scale[unit.chunk] : low_offset[unit.chunk];
        const float high = unit.factor == 0 ? high_scale[unit.chunk] : high_offset[unit.chunk];
#pragma unroll
        for (u32 i = 0; i < kTokens / 2; ++i)
            acc[first + i] = fmaf(float(partial[i]), (i / 2) % 2 ? high : low, acc[first + i]);
    }
};

// The same with sums in f16, two to a register: in the tensor cores for a group, then times scale / 2^E for a run of
// records, short enough that no sum overflows (docs/notes/f16-sums.md). E is the row's, the least with all scales below 2^E, so
// that scales are exact in f16; the epilogue multiplies by 2^E. A run's end adds it to `acc`:
//
//     record         0        1       ..  7       8        ...
//     f16 run        = s p    += s p      += s p  = s p
//     acc, fp32                                   += run   ... and at the tile's end
template <typename Config, u32 kTokens>
struct F16Scaling : RowScaling<Config, kTokens> {
    static constexpr u32 kPairs = kTokens / 4;  // registers of a unit's sums
    static_assert(Config::kHalves == 1 && Config::kWarpgroupsK == 1, "a run is all tokens, and records in order");
    static_assert(Config::kGroupSize > 0, "where a row has one scale the epilogue takes it");

    struct Kept {
        u32 run[kPairs];
        float low, high;  // 2^-E of the thread's rows, times kRunScale

        __device__ __forceinline__ explicit Kept(const Multiplicands<Config>& of) {
            // Of a power of two whose exponent is at most 126.
            low = Config::Codec::kRunScale * __uint_as_float(0x7F000000 - __float_as_uint(of.low_power));
            high = Config::Codec::kRunScale * __uint_as_float(0x7F000000 - __float_as_uint(of.high_power));
        }
        __device__ __forceinline__ void fence(float (&)[Config::kSums], u32, u32) { register_fence(run); }

        // Adds the run to `acc`. Register i of a run has the sums of register i ^ 1 of a unit, see promote().
        __device__ __forceinline__ void flush(float (&acc)[Config::kSums]) {
#pragma unroll
            for (u32 i = 0; i < kPairs; ++i) {
                const float2 sums = f16x2_to_floats(run[i ^ 1]);
                acc[2 * i] += sums.x;
                acc[2 * i + 1] += sums.y;
            }
            register_fence(acc);
        }
    };
    u32 low_pair[Unit<Config>::kChunks], high_pair[Unit<Config>::kChunks];

    using RowScaling<Config, kTokens>::RowScaling;

    __device__ __forceinline__ void unit(const Unit<Config>& unit, const Kept& kept) {
        const float low = this->low_scale[unit.chunk] * kept.low, high = this->high_scale[unit.chunk] * kept.high;
        low_pair[unit.chunk] = pack_halves<kFp16>(low, low);
        high_pair[unit.chunk] = pack_halves<kFp16>(high, high);
    }

    // kOpens: the record is a run's first. Sums change places by twos: an HFMA2 then has its operands in both banks of
    // registers, 77 cycles for 88 where it took 94.
    template <bool kOpens, int kTotal, int kPartials>
    __device__ __forceinline__ void promote(float (&)[kTotal], Kept& kept, const u32 (&partial)[kPartials],
                                            const Unit<Config>& unit) const {
        const u32 low = low_pair[unit.chunk], high = high_pair[unit.chunk];
#pragma unroll
        for (u32 i = 0; i < kPairs; ++i) {
            u32& sum = kept.run[i ^ 1];
            const u32 scale = i % 2 ? high : low;
            sum = kOpens && unit.chunk == 0 ? multiply_f16x2(partial[i], scale) : fma_f16x2(partial[i], scale, sum);
        }
    }
};

// The same for int8's sums, as floats as they stand: the tensor cores begin with the bits of 1.5 * 2^23, whose last one
// counts 1, so that bits + p are the float 1.5 * 2^23 + p while |p| <= 2^22. Two records add up there before they begin
// again, and with P0 = p0 and P1 = p0 + p1
//
//     s0 p0 + s1 p1 = (s0 - s1) P0 + s1 P1
//
// A record then takes one multiply-add a sum, and two of them one move; nothing is converted. What the two add too much,
// 1.5 * 2^23 * s0, is taken off at the end of a run of kPartsRun records. Codes are at most 128 large, 16 * 8 of them, or 15
// with a zero point: 2 * 128 * 128 * 128 <= 2^22.
template <typename Config, u32 kTokens>
struct PartsScaling : RowScaling<Config, kTokens> {
    static_assert(Config::Codec::kIntegerSums && Unit<Config>::kCount == 1, "int8, and a group a record");
    static constexpr float kBegin = 12582912.0f;

    struct Kept {
        float low = 0.0f, high = 0.0f;  // s0 of the thread's rows, over the run's pairs

        __device__ __forceinline__ explicit Kept(const Multiplicands<Config>&) {}
        __device__ __forceinline__ void fence(float (&acc)[Config::kSums], u32 first, u32 count) {
            register_fence(acc, first, count);
        }
        __device__ __forceinline__ void flush(float (&acc)[Config::kSums]) {
#pragma unroll
            for (u32 i = 0; i < kTokens / 2; ++i) acc[i] = fmaf(-kBegin, i / 2 % 2 ? high : low, acc[i]);
            low = high = 0.0f;
        }
    };
    float low_behind = 0.0f, high_behind = 0.0f;  // scales of the next record, which are 0 where there is none

    __device__ __forceinline__ PartsScaling(const Shared<Config>& shared, const Position& position, u32 stage, u32 block,
                                            u32 behind)
        : RowScaling<Config, kTokens>(shared, position, stage, block, behind) {
        if (behind == kNoStage) return;
        const RowScaling<Config, kTokens> next(shared, position, behind, block, behind);
        low_behind = next.low_scale[0];
        high_behind = next.high_scale[0];
    }
    __device__ __forceinline__ void unit(const Unit<Config>&, const Kept&) {}

    // kOpens: the record is a pair's first.
    template <bool kOpens, int kTotal, int kPartials>
    __device__ __forceinline__ void promote(float (&acc)[kTotal], Kept& kept, i32 (&partial)[kPartials],
                                            const Unit<Config>&) const {
        float low = this->low_scale[0], high = this->high_scale[0];
        if constexpr (kOpens) {
            kept.low += low;
            kept.high += high;
            low -= low_behind;
            high -= high_behind;
        }
#pragma unroll
        for (u32 i = 0; i < kTokens / 2; ++i) {
            acc[i] = fmaf(__int_as_float(partial[i]), i / 2 % 2 ? high : low, acc[i]);
            if constexpr (!kOpens) partial[i] = kFloatOfSums;
        }
    }
};

// The tokens' scales of a record, two for every eight tokens: the first few are loaded before the sums are waited for,
// the rest as they are needed, since registers are short.
template <u32 kTokens, bool kE8m0>
struct TokenScales {
    static constexpr u32 kAhead = smaller(kTokens / 8, 2);
    u32 address;
    float2 ahead[kAhead];

    // Where the first that the lane reads is, of a record whose scales are at `record`.
    __device__ __forceinline__ static u32 first(u32 record, u32 block, const Position& position) {
        return record + position.lane % 4 * 8;
    }
    __device__ __forceinline__ void load(u32 from) {
        address = from;
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) ahead[i] = load_shared_float2(address + i * 32);
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
struct TokenScales<kTokens, true> {
    u32 pairs[ceil_div(kTokens, 64)];

    __device__ __forceinline__ static u32 first(u32 record, u32 block, const Position&) { return record + block % 4; }
    __device__ __forceinline__ void load(u32 from) {
#pragma unroll
        for (u32 i = 0; i < ceil_div(kTokens, 64); ++i) {
            const u32 address = from + min(i * 32 + threadIdx.x % 32, kTokens / 2 - 1) * 8;
            pairs[i] = bf16_of_e8m0(load_shared_u8(address)) | bf16_of_e8m0(load_shared_u8(address + 4)) << 16;
        }
    }
    __device__ __forceinline__ float2 pair(u32 i) const {
        const u32 both = shuffle_fours(pairs[i / 8], i % 8 * 4);
        return {__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000)};
    }
};

// The same with a scale for each token as well, which multiplies the row's first.
template <typename Config, u32 kTokens>
struct RowTokenScaling : RowScaling<Config, kTokens> {
    using Kept = KeepsNothing;
    TokenScales<kTokens, Config::kLhsE8m0> tokens;
    u32 address;  // of the first scale that the lane reads

    __device__ __forceinline__ RowTokenScaling(const Shared<Config>& shared, const Position& position, u32 stage,
                                               u32 block, u32 behind)
        : RowScaling<Config, kTokens>(shared, position, stage, block, behind),
          address(tokens.first(shared.block_scales(stage, position.along_k), block, position)) {}

    __device__ __forceinline__ void unit(const Unit<Config>& unit, const Kept&) {
        tokens.load(address + unit.half * kTokens * 4);
    }

    template <bool kOpens, int kTotal, int kPartials, typename Partial>
    __device__ __forceinline__ void promote(float (&acc)[kTotal], Kept&, const Partial (&partial)[kPartials],
                                            const Unit<Config>& unit) const {
        const u32 first = unit.half * (kTokens / 2);
        const float low = unit.factor == 0 ? this->low_scale[unit.chunk] : this->low_offset[unit.chunk];
        const float high = unit.factor == 0 ? this->high_scale[unit.chunk] : this->high_offset[unit.chunk];
#pragma unroll
        for (u32 i = 0; i < kTokens / 2; i += 4) {
            const float2 token = tokens.pair(i / 4);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const float scale = (j / 2 ? high : low) * (j % 2 ? token.y : token.x);
                acc[first + i + j] = fmaf(float(partial[i + j]), scale, acc[first + i + j]);
            }
        }
    }
};

// Rows are tokens: their scales times one of each strip of the weights, for a half at a time.
template <typename Config, u32 kColumns>
struct StripTokenScaling {
    using Kept = KeepsNothing;
    static constexpr u32 kStrips = Shared<Config>::kStripsOfWarpgroup;
    const Shared<Config>& shared;
    const Position& position;
    const u32 stage, block;
    float low_scale[kStrips], high_scale[kStrips];

    __device__ __forceinline__ StripTokenScaling(const Shared<Config>& shared, const Position& position, u32 stage,
                                                 u32 block, u32)
        : shared(shared), position(position), stage(stage), block(block) {}

    __device__ __forceinline__ void unit(const Unit<Config>& unit, const Kept&) {
        const u32 row = first_token_row<Config>(position, unit.half) + position.warp * 16 + position.lane / 4;
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
        for (u32 strip = 0; strip < kStrips; ++strip) {
            const u32 address = shared.strip_scale(stage, position.along_n * kStrips + strip);
            const float scale = load_shared_real<Config::kScaleType>(address, 0);
            low_scale[strip] = scale * low;
            high_scale[strip] = scale * high;
        }
    }

    template <bool kOpens, int kTotal, int kPartials, typename Partial>
    __device__ __forceinline__ void promote(float (&acc)[kTotal], Kept&, const Partial (&partial)[kPartials],
                                            const Unit<Config>& unit) const {
        const u32 first = unit.half * (kColumns / 2);
#pragma unroll
        for (u32 i = 0; i < kColumns / 2; ++i) {
            const u32 strip = i / (kStripRows / 2);
            const float scale = i / 2 % 2 ? high_scale[strip] : low_scale[strip];
            acc[first + i] = fmaf(float(partial[i]), scale, acc[first + i]);
        }
    }
};

}  // namespace jitgemm
