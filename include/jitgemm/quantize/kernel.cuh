// Quantisation of activations to e4m3 or int8, row by row: one read of x, one write of q, the row in registers between.
//
//   y = x, act(gate) * up, max(x, 0)^2, or x * weight / sqrt(mean(x^2) + eps)       fp32, never rounded to x's type
//       kResidual: x + residual for x, rounded to x's type and written, too
//       kRotated: y H, see rotate()
//   scale = max(range of y / range of the codes, 2^-126),  or as given
//   q = round(y * (1 / scale)) + zero                                       to nearest even, saturated
//
// A row has one scale, or one for every 128 codes (kBlocks), which are those of 16 threads side by side.
//
// Every product, quotient and rounding outside of act() and the sum of squares is one IEEE operation in a fixed order,
// and so the same bits as in jitgemm/activations/reference.py: hence __fmul_rn and its like, which nothing contracts.
//
// A thread holds kVectors vectors of eight values, a row's vectors dealt out to its threads round-robin:
//
//   vector    0   1   2  ..  T-1 | T  T+1  ..  2T-1 | ..        T = threads of a row
//   thread    0   1   2  ..  T-1 | 0   1   ..   T-1 | ..
//
// With kRotated a thread's vectors are those of a block of 16, which it shares with 16 / kVectors lanes, dealt out to
// them in the same way: vectors 0, 4, 8 and 12 are thread 0's of 4. It stores other codes of the block than those of
// what it read (rotation.cuh).
//
// blockDim.y rows share a CTA when a warp suffices for each (kRows > 1). A long row may have the CTAs of a cluster
// (Team), if rows are so few that SMs would idle. CTAs or clusters walk the rows, each one in so many.
//
// What is written behind a row's codes is a policy, Sums: nothing (NoSums), or sums of groups (sums.cuh).
#pragma once
#include <jitgemm/quantize/input.cuh>
#include <jitgemm/quantize/permutation.cuh>
#include <jitgemm/quantize/rotation.cuh>

namespace jitgemm {

template <class Config>
__device__ __forceinline__ void store_scale(const QuantizeArgs& args, const Team<Config>& team, u32 row,
                                            const Quantizer<Config>& quantizer) {
    if (team.thread == 0) {
        args.scale[row] = quantizer.scale;
        if constexpr (Config::kAffine) args.zero[row] = quantizer.zero;
    }
}

// Rows to quantise.
template <class Config>
__device__ __forceinline__ u32 live_rows(const QuantizeArgs& args) {
    if constexpr (Config::kMasked || (!kActivated<Config> && !Config::kGathered)) return args.m;
    return args.row_count == nullptr ? args.m : min(args.m, *args.row_count);
}

// The first live row of row, row + step, ..., or one that is not below args.m.
template <class Config>
__device__ __forceinline__ u32 live_row(const QuantizeArgs& args, u32 row, u32 step) {
    if constexpr (Config::kMasked) {
        const u32 rows = static_cast<u32>(args.rows_of_count);
        while (row < args.m && row % rows >= args.row_count[row / rows]) row += step;
    }
    return row;
}

// Rows that fit the registers of their threads; the next row is read while one is worked on.
template <class Config, class Sums>
__device__ __forceinline__ void quantize_held_rows(const QuantizeArgs& args, const Team<Config>& team,
                                                   WarpRanges (&slots)[2], u8* permuted, u32 block, u32 blocks) {
    using Now = typename Unpermuted<Config, Sums>::Type;
    constexpr u32 kVectors = Config::kVectors;
    const u32 m = live_rows<Config>(args), vectors = args.k / kVector, step = blocks * Config::kRows;
    u32 row = live_row<Config>(args, block * Config::kRows + threadIdx.y, step);
    auto mine = [&](u32 i) { return team.template vector<kVectors>(i); };
    auto live = [&](u32 i) { return mine(Config::kRotated ? 0 : i) < vectors; };  // to rotate: all or none of a thread's

    // Threads without vectors rotate zeros, where transform() reads and writes nothing else: no branch is around it.
    constexpr bool kZeros = Config::kRotated && !Config::kRmsNorm;
    Input<Config> input[kVectors];
    if constexpr (kZeros) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) input[i] = {};
    }
    auto load_row = [&](u32 of) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (live(i)) input[i] = load<Config>(args, of, mine(i));
        }
    };
    if (row < m) load_row(row);
    team.wait();
    Sources sources[Config::kSourcesHeld ? kVectors : 1];
    if constexpr (Config::kSourcesHeld) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (live(i)) sources[i] = load_sources(args.permutation, mine(i));
        }
    }

    for (u32 round = 0, next; row < m; row = next, ++round) {
        Range<Config> range;
        Held<Config> y[kVectors];
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (kZeros || live(i)) {
                y[i] = transform(args, input[i], row, mine(i), range);
                if constexpr (!Config::kRotated) range.include(y[i]);
            }
        }
        if constexpr (Config::kRotated) {
            const u32 largest = rotate(y);
            if (kZeros || live(0)) range.include_rotated(y, largest);
        }
        next = live_row<Config>(args, row + step, step);
        if (next < m) load_row(next);
        combine_threads(team, range, slots, round);
        const Quantizer<Config> quantizer(args, range, row);
        store_scale(args, team, row, quantizer);

        u8* const out = args.q + row * args.q_row_bytes;
        u8* const target = Config::kPermuted ? permuted : out;
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            uint2 codes{0, 0};
            if (kZeros || live(i)) codes = quantizer.codes(y[i]);
            if constexpr (Config::kRotated) {
                if (live(i)) store_rotated<kVectors>(out, mine(0), i, codes);
            } else if (Now::kWholeWarps || live(i)) {
                Now::store(target, args.k, mine(i), codes);
            }
        }
        if constexpr (Config::kPermuted) {
            // Codes are permuted, not values: a byte each. The next row's codes come after the barrier of its range.
            sync_row<Config>();
            if constexpr (Config::kSourcesHeld) {
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    uint2 codes{0, 0};
                    if (live(i)) codes = gather_codes(permuted, sources[i]);
                    if (Sums::kWholeWarps || live(i)) Sums::store(out, args.k, mine(i), codes);
                }
            } else {
                gather_row<Sums>(args, permuted, out);
            }
            if constexpr (Config::kRows > 1) sync_row<Config>();  // one warp's range needs no barrier
        }
        Sums::finish(out, args.k, team.thread);
    }
}

// Longer rows are read twice, the second time from the L2; with a residual, the sum.
template <class Config, class Sums>
__device__ __forceinline__ void quantize_long_rows(const QuantizeArgs& args, const Team<Config>& team,
                                                   WarpRanges (&slots)[2], u8* permuted, u32 block, u32 blocks) {
    using Now = typename Unpermuted<Config, Sums>::Type;
    const u32 m = live_rows<Config>(args), vectors = args.k / kVector;
    const u32 end = Config::kRotated ? (vectors + 31) / 32 * 32 : vectors;  // whole warps rotate
    auto live = [&](u32 vector) { return !Config::kRotated || vector < vectors; };
    u32 round = 0;
    for (u32 row = live_row<Config>(args, block, blocks); row < m;
         row = live_row<Config>(args, row + blocks, blocks), ++round) {
        Range<Config> range;
        auto read = [&](u32 vector, bool again) -> Held<Config> {
            auto one = [&] {
                return transform(args, load<Config>(args, row, vector, again), row, vector, range, again);
            };
            if constexpr (!Config::kRotated) return one();
            Held<Config> y[1];
            if (vector < vectors) y[0] = one();
            if constexpr (Config::kRotated) rotate(y);
            return y[0];
        };
#pragma unroll 2
        for (u32 vector = threadIdx.x; vector < end; vector += blockDim.x) {
            const Held<Config> y = read(vector, false);
            if (live(vector)) range.include(y);
        }
        combine_threads(team, range, slots, round);
        const Quantizer<Config> quantizer(args, range, row);
        store_scale(args, team, row, quantizer);

        u8* const out = args.q + row * args.q_row_bytes;
        u8* const target = Config::kPermuted ? permuted : out;
#pragma unroll 2
        for (u32 vector = threadIdx.x; vector < Now::end(end); vector += blockDim.x) {
            const u32 own = Now::kWholeWarps ? min(vector, vectors - 1) : vector;  // loads behind no branch overlap
            uint2 codes = quantizer.codes(read(own, true));
            if (Now::kWholeWarps && vector >= vectors) codes = {0, 0};
            if constexpr (Config::kRotated) {
                if (live(vector)) store_rotated<1>(out, vector, 0, codes);
            } else {
                Now::store(target, args.k, vector, codes);
            }
        }
        if constexpr (Config::kPermuted) {
            sync_row<Config>();
            gather_row<Sums>(args, permuted, out);
        }
        Sums::finish(out, args.k, team.thread);
    }
}

// Rows with a scale for each block of 128 codes. Only RMSNorm and a permutation make a row's threads wait for one
// another; permuted rows lie in shared memory as values, since a block's codes come from anywhere in the row.
template <class Config>
__device__ __forceinline__ void quantize_blocks(const QuantizeArgs& args, const Team<Config>& team,
                                                WarpRanges (&slots)[2], float* values, u32 block, u32 blocks) {
    constexpr bool kHeld = Config::kVectors > 0;  // the threads hold the row
    constexpr bool kLarge = Config::kRotated && Config::kX == kFp32;  // two vectors of gates, ups and sums would spill
    constexpr u32 kVectors = kHeld ? Config::kVectors : Config::kPermuted || Config::kResidual || kLarge ? 1 : 2;
    constexpr u32 kOwn = Config::kRotated ? kVectors : 1;  // of a thread's vectors, that are of one block
    const u32 m = live_rows<Config>(args), vectors = args.k / kVector, step = kVectors * team.threads;
    const u32 rows = blocks * Config::kRows;
    auto mine = [&](u32 first, u32 i) { return first + team.template vector<kVectors>(i); };
    team.wait();
    u32 round = 0;
    for (u32 row = live_row<Config>(args, block * Config::kRows + threadIdx.y, rows); row < m;
         row = live_row<Config>(args, row + rows, rows), ++round) {
        Range<Config> range;
        Held<Config> y[kVectors];
        auto read = [&](u32 first, bool again) {
            Input<Config> input[kVectors];
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(first, i) < vectors) input[i] = load<Config>(args, row, mine(first, i), again);
            }
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(first, i) < vectors) y[i] = transform(args, input[i], row, mine(first, i), range, again);
            }
        };
        auto keep = [&](u32 first) {
#pragma unroll
            for (u32 i = 0; i < kVectors * kVector; ++i) {
                const u32 vector = mine(first, i / kVector);
                if (vector < vectors) values[vector * kVector + i % kVector] = y[i / kVector].value(i % kVector);
            }
        };
        float squares = 0;
        // The vectors of a block that this thread has; the whole warp calls this.
        auto write = [&](const auto* of, u32 vector) {
            Range<Config> part;
            part.template include_block<kOwn>(of, vector < vectors);
            part.squares = squares;
            if (vector >= vectors) return;
            const Quantizer<Config> quantizer(args, part);
#pragma unroll
            for (u32 i = 0; i < kOwn; ++i) {
                u8* const out = args.q + row * args.q_row_bytes;
                const uint2 codes = quantizer.codes(of[i]);
                if constexpr (Config::kRotated) store_rotated<kOwn>(out, vector, i, codes);
                else store_codes(out, vector, codes);
            }
            const u64 at = row * args.scale_row_stride + vector / kBlockVectors * args.scale_block_stride;
            if (vector % kBlockVectors == 0) args.scale[at] = quantizer.scale;
        };
        if constexpr (Config::kRmsNorm) {
            for (u32 first = 0; first < vectors; first += step) {
                read(first, false);
                if constexpr (Config::kPermuted) keep(first);
            }
            combine_threads(team, range, slots, round);
            squares = range.squares;
        }
        if constexpr (!Config::kPermuted) {
            for (u32 first = 0; first < vectors; first += step) {
                if constexpr (!(Config::kRmsNorm && kHeld)) read(first, Config::kRmsNorm);
                if constexpr (Config::kRotated) rotate(y);
#pragma unroll
                for (u32 i = 0; i < kVectors; i += kOwn) write(y + i, mine(first, i));
            }
        } else {
            for (u32 first = 0; !Config::kRmsNorm && first < vectors; first += step) {
                read(first, false);
                keep(first);
            }
            sync_row<Config>();
            for (u32 first = 0; first < vectors; first += blockDim.x) {
                Vector<kFp32> of;
                const u32 vector = mine(first, 0);
#pragma unroll
                for (u32 j = 0; vector < vectors && j < kVector; ++j)
                    of.words[j] = __float_as_uint(values[args.permutation[vector * kVector + j]]);
                write(&of, vector);
            }
            sync_row<Config>();
        }
    }
}

// Prefetches into the L2 the weights that a row needs; other kernels' weights may have evicted them. Runs before the wait
// for the previous grid: what that grid still writes goes through the L2, too.
template <class Config>
__device__ __forceinline__ void prefetch_weights(const QuantizeArgs& args, const Team<Config>& team) {
    const u32 bytes = kVector * (args.norm_weight_type == kFp32 ? 4 : 2);
#pragma unroll
    for (u32 i = 0; i < Config::kVectors; ++i) {
        const u32 vector = team.thread + i * team.threads;
        if (vector < args.k / kVector) prefetch_l2(args.norm_weight + vector * bytes);
    }
}

// The part of CTA `block` of `blocks`, or of a cluster. Sums: not with kBlocks.
template <class Config, class Sums = NoSums>
__device__ __forceinline__ void quantize_rows(const QuantizeArgs& args, u32 block, u32 blocks) {
    __shared__ WarpRanges slots[2];
    extern __shared__ __align__(16) u8 permuted[];  // [kRows][k] codes, or values with kBlocks; permuted only

    // First of all, so that a GEMM behind this kernel fetches its weights meanwhile; it waits for the end of this grid,
    // and so, because every thread here waits too, for the end of those before.
    launch_next_grid();
    const Team<Config> team;
    if (Team<Config>::kCluster && threadIdx.x == 0) {
        for (WarpRanges& each : slots) barrier_init(shared_address(&each.full), 1);
        barrier_init_fence();
    }
    team.start();
    if constexpr (Config::kRmsNorm && Config::kVectors > 0) prefetch_weights<Config>(args, team);
    wait_for_previous_grid();

    u8* const row_of_codes = permuted + threadIdx.y * args.k;
    if constexpr (Config::kBlocks) {
        float* const values = reinterpret_cast<float*>(permuted) + threadIdx.y * args.k;
        quantize_blocks<Config>(args, team, slots, values, block, blocks);
    } else if constexpr (Config::kVectors > 0) {
        quantize_held_rows<Config, Sums>(args, team, slots, row_of_codes, block, blocks);
    } else {
        quantize_long_rows<Config, Sums>(args, team, slots, row_of_codes, block, blocks);
    }
}

}  // namespace jitgemm
