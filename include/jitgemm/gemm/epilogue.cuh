// From accumulators to the output: per-token scale, per-channel scale, bias, the output's type, transposition, clipped
// store. multiply.cuh has the picture of where a thread's sums lie.
#pragma once
#include <jitgemm/gemm/sums.cuh>
#include <jitgemm/ptx/tma.cuh>

namespace jitgemm {

// Whether this call's activations have zero points.
template <typename Config>
__device__ __forceinline__ bool has_zeros(const Args& args) {
    return Config::Codec::kIntegerSums && Config::kLhsGroup == 0 && args.lhs_zero != nullptr;
}

// Bytes of a warpgroup's terms per row: scales come first.
constexpr u32 kBiasTerms = kStripRows * 4, kSumTerms = 2 * kStripRows * 4;

// Starts to copy what the epilogue needs per token of the warpgroup's slice and per row of n into shared memory: in
// registers it would be there all through the main loop. Done after copy_wait() and a warpgroup barrier.
template <typename Config>
__device__ __forceinline__ void copy_factors(const Args& args, const Shared<Config>& shared, const Position& position,
                                             const Tile<Config>& tile) {
    const u32 thread = reread_thread();
    // Scales per token and k-block came with the stages.
#pragma unroll
    for (u32 i = 0; Config::kLhsGroup == 0 && i < Config::kSliceTokens; i += kWarpgroup) {
        const u32 row = tile.first_token + position.slice * Config::kSliceTokens + i + thread;
        u32 token = row;
        if constexpr (Tile<Config>::kGrouped) token = row < tile.end_token() ? tile.token_of(row) : row;
        copy_4(i + thread < Config::kSliceTokens, shared.scales(position.warpgroup) + (i + thread) * 4,
               args.lhs_scale + token * args.lhs_scale_stride, args.lhs_scale, row < tile.end_token());
    }
    const u32 first = tile.first_row + position.along_n * kStripRows;
    const bool inside = thread < kStripRows && first + thread < args.n;
    const u32 terms = shared.terms(position.warpgroup) + thread * 4;
    if constexpr (Config::kRowScales) {
        // Bits of the type that it has; the array goes on to the end of the strip.
        const u32 bytes = args.channel_scale_type == kFp32 ? 4 : 2;
        const u8* scale = tile.channel_scale();
        copy_4(thread * 4 < kStripRows * bytes, terms, scale + u64(first) * bytes + thread * 4, scale, first < args.n);
    }
    if (has_zeros<Config>(args))
        copy_4(thread < kStripRows, terms + kSumTerms, tile.row_sum() + first + thread, tile.row_sum(), inside);
    if (tile.bias()) {
        const float bias = inside ? load_real(tile.bias(), first + thread, args.bias_type) : 0.0f;
        if (thread < kStripRows) store_shared_float(terms + kBiasTerms, bias);
    }
}

// The same where tokens are wgmma's rows: of the tile's columns, which have a bias alone.
template <typename Config>
__device__ __forceinline__ void store_biases(const Args& args, const Shared<Config>& shared, const Position& position,
                                             const Tile<Config>& tile) {
    if (!tile.bias()) return;
    constexpr u32 kColumns = Shared<Config>::kStripsOfWarpgroup * kStripRows;
    for (u32 i = reread_thread(); i < kColumns; i += kWarpgroup) {
        const u32 row = tile.first_row + position.along_n * kColumns + i;
        const float bias = row < args.n ? load_real(tile.bias(), row, args.bias_type) : 0.0f;
        store_shared_float(shared.terms(position.warpgroup) + i * 4, bias);
    }
}

// What a thread multiplies and adds per row of n; it owns rows lane/4 and lane/4 + 8 of its warp's 16.
struct RowTerms {
    float scale[2];
    float bias[2];
    float sum[2];  // of the row's weights, as the accumulators count them; times -1
};

template <typename Config>
__device__ __forceinline__ RowTerms load_row_terms(const Consumer<Config>& consumer, const Tile<Config>& tile) {
    const Args& args = consumer.args;
    const Position& position = consumer.position;
    const u32 terms = consumer.shared.terms(position.warpgroup);
    RowTerms found;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 row = position.warp * 16 + position.lane / 4 + half * 8;
        found.scale[half] = 1.0f;
        if constexpr (Config::kRowScales) {
            found.scale[half] = args.channel_scale_type == kFp32   ? load_shared_real<kFp32>(terms, row)
                                : args.channel_scale_type == kBf16 ? load_shared_real<kBf16>(terms, row)
                                                                   : load_shared_real<kFp16>(terms, row);
        }
        found.bias[half] = tile.bias() ? load_shared_float(terms + kBiasTerms + row * 4) : 0.0f;
        found.sum[half] = 0.0f;
        if (has_zeros<Config>(args))
            found.sum[half] = load_shared_float(terms + kSumTerms + row * 4) * (-1.0f / Config::Codec::kOutputScale);
    }
    return found;
}

// Scales a slice's sums per row and subtracts what the zero points of its activations add. The panel, which is free,
// holds them meanwhile.
template <typename Config>
__device__ __forceinline__ void subtract_zeros(float* sums, RowTerms& terms, const Consumer<Config>& consumer,
                                               const Tile<Config>& tile, u32 panel, u32 first_token) {
    const Args& args = consumer.args;
    const Position& position = consumer.position;
    for (u32 i = position.thread; i < Config::kSliceTokens; i += kWarpgroup) {
        const u32 row = first_token + i;
        const float zero =
            row < tile.end_token() ? float(args.lhs_zero[tile.token_of(row) * args.lhs_zero_stride]) : 0.0f;
        store_shared_float(panel + i * 4, zero);
    }
    warpgroup_sync(position.warpgroup);
#pragma unroll
    for (u32 matrix = 0; matrix < Config::kSliceTokens / 8; ++matrix) {
        const float2 zeros = load_shared_float2(panel + matrix * 32 + position.lane % 4 * 8);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float* sum = sums + matrix * 4 + half * 2;
            sum[0] = fmaf(zeros.x, terms.sum[half], sum[0] * terms.scale[half]);
            sum[1] = fmaf(zeros.y, terms.sum[half], sum[1] * terms.scale[half]);
        }
    }
    terms.scale[0] = terms.scale[1] = 1.0f;
    warpgroup_sync(position.warpgroup);
}

// Whether the thread issues stores.
template <typename Config>
__device__ __forceinline__ bool stores(const Position& position) {
    return !Scheduler<Config>::kClippedByMap || position.thread == 0;
}

// Stores the warpgroup's panels, one for each 128 bytes of its kColumns columns from first_row on, of kSliceTokens
// tokens from first_token on. All its threads call this once they have written.
template <typename Config, u32 kColumns>
__device__ __forceinline__ void store_panels(const Consumer<Config>& consumer, const Tile<Config>& tile, u32 panel,
                                             u32 first_token, u32 first_row) {
    const Position& position = consumer.position;
    async_proxy_fence();
    warpgroup_sync(position.warpgroup);
    auto store = [&](const TensorMap* map, u32 row) {
        constexpr u32 kPanelBytes = Config::kSliceTokens * kSwizzledRow;
        constexpr u32 kPanelColumns = kSwizzledRow / real_bytes(Config::kOutType);
#pragma unroll
        for (u32 column = 0; column < kColumns; column += kPanelColumns) {
            u32 source = panel + column / kPanelColumns * kPanelBytes + row * kSwizzledRow;
            tile_store(map, source, first_row + column, tile.out_row + first_token + row);
        }
    };
    if (Scheduler<Config>::kClippedByMap || first_token + Config::kSliceTokens <= tile.end_token()) {
        if (position.thread == 0) store(consumer.maps.out, 0);
    } else {
        // Another expert's rows follow: in parts of kSwizzleRows by a first warp, and the rest by a second.
        const u32 rows = max(tile.end_token(), first_token) - first_token;
        const u32 parts = rows / kSwizzleRows;
        if (position.thread < parts) store(consumer.maps.out_part, position.thread * kSwizzleRows);
        const u32 row = parts * kSwizzleRows + position.thread - 32;
        if (position.thread >= 32 && row < rows) store(consumer.maps.out_row, row);
    }
}

// Scales, converts and stores a slice of the output tile, by columns that take 128 bytes together. In shared memory a
// token is a row of 128 bytes whose 16-byte chunks are swizzled: chunk c of token t lies at c ^ (t % 8), as the tile
// store expects and free of bank conflicts.
template <typename Config, u32 kSlice>
__device__ __forceinline__ void store_slice(float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                            const Tile<Config>& tile) {
    const Position& position = consumer.position;
    const u32 panel = consumer.shared.out(position.warpgroup);
    if (stores<Config>(position)) store_wait_read();
    copy_wait();
    warpgroup_sync(position.warpgroup);  // the panel is free, the factors are there
    RowTerms terms = load_row_terms(consumer, tile);

    const u32 first_token = tile.first_token + kSlice * Config::kSliceTokens;
    constexpr u32 kMatrices = Config::kSliceTokens / 8;  // of 8 tokens
    float* sums = acc + kSlice * kMatrices * 4;
    if (has_zeros<Config>(consumer.args)) subtract_zeros<Config>(sums, terms, consumer, tile, panel, first_token);

    const u32 scales = consumer.shared.scales(position.warpgroup) + (position.lane % 4) * 8;
    constexpr u32 kPanelBytes = Config::kSliceTokens * kSwizzledRow;
    // Two matrices at a time: neither's token scales are waited for alone, and one stmatrix writes both.
#pragma unroll
    for (u32 first = 0; first < kMatrices; first += 2) {
        const u32 count = min(2u, kMatrices - first);
        float2 token_scales[2];
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            if constexpr (Config::kLhsGroup > 0) token_scales[i] = {1.0f, 1.0f};
            else token_scales[i] = load_shared_float2(scales + (first + i) * 32);
        }
        u32 packed[4];
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            token_scales[i].x *= Config::Codec::kOutputScale;
            token_scales[i].y *= Config::Codec::kOutputScale;
            float value[2][2];  // the thread's two rows for two tokens: [row][token]
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const float* sum = sums + (first + i) * 4 + half * 2;
                if constexpr (Config::kIntegers) {
                    // The codes are kOutputScale times what was multiplied, a power of two of at most 1.
                    constexpr i32 kTimes = i32(1.0f / Config::Codec::kOutputScale);
                    value[half][0] = __int_as_float(__float_as_int(sum[0]) / kTimes);
                    value[half][1] = __int_as_float(__float_as_int(sum[1]) / kTimes);
                    continue;
                }
                value[half][0] = fmaf(sum[0] * terms.scale[half], token_scales[i].x, terms.bias[half]);
                value[half][1] = fmaf(sum[1] * terms.scale[half], token_scales[i].y, terms.bias[half]);
            }
            if constexpr (real_bytes(Config::kOutType) == 4) {
                // Two panels of 32 columns; the thread's first row is column 16 * warp + lane / 4.
                const u32 column = position.warp * 16 + position.lane / 4;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    u32 token = position.lane % 4 * 2 + j % 2;
                    u32 byte = (column + j / 2 * 8) % 32 * 4;
                    u32 row = panel + column / 32 * kPanelBytes;
                    row += ((first + i) * 8 + token) * kSwizzledRow;
                    store_shared_float(row + (byte ^ (token * 16)), value[j / 2][j % 2]);
                }
            } else {
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
                    packed[i * 2 + half] = pack_halves<Config::kOutType>(value[half][0], value[half][1]);
            }
        }
        if constexpr (real_bytes(Config::kOutType) == 2) {
            // The matrices of stmatrix are {rows 0-7, rows 8-15} of n for 8 tokens or 16.
            const u32 token = position.lane % 8;
            const u32 chunk = position.warp * 2 + (position.lane / 8) % 2;
            const u32 row = panel + (position.lane / 16 * 8 + token) * kSwizzledRow + (chunk ^ token) * 16 +
                            first * 8 * kSwizzledRow;
            if (count == 2) {
                store_matrix_x4(row, packed[0], packed[1], packed[2], packed[3]);
            } else {
                store_matrix_x2(row, packed[0], packed[1]);
            }
        }
    }
    store_panels<Config, kStripRows>(consumer, tile, panel, first_token,
                                     tile.first_row + position.along_n * kStripRows);
}

// The same for a half of the warpgroup's tokens and all its columns where tokens are wgmma's rows.
template <typename Config>
__device__ __forceinline__ void store_token_rows(const float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                                 const Tile<Config>& tile, u32 half) {
    constexpr u32 kSums = Config::kSums / Config::kHalves;
    const Position& position = consumer.position;
    const u32 panel = consumer.shared.out(position.warpgroup);
    if (stores<Config>(position)) store_wait_read();
    warpgroup_sync(position.warpgroup);  // the panels are free, the bias is there
    constexpr u32 kPanelBytes = kTokensOfHalf * kSwizzledRow;
    const u32 biases = consumer.shared.terms(position.warpgroup) + position.lane % 4 * 8;
#pragma unroll
    for (u32 first = 0; first < kSums / 4; first += 2) {  // matrices of 8 columns, two at a time
        u32 packed[4];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const float2 bias = tile.bias() ? load_shared_float2(biases + (first + i) * 32) : float2{0.0f, 0.0f};
#pragma unroll
            for (u32 eight = 0; eight < 2; ++eight) {  // the thread's two tokens
                const float* sum = acc + half * kSums + (first + i) * 4 + eight * 2;
                const float left = fmaf(sum[0], Config::Codec::kOutputScale, bias.x);
                const float right = fmaf(sum[1], Config::Codec::kOutputScale, bias.y);
                if constexpr (Config::kOutType == kFp32) {
                    const u32 token = position.warp * 16 + eight * 8 + position.lane / 4;
                    const u32 byte = ((first + i) % 4 * 8 + position.lane % 4 * 2) * 4;
                    const u32 row = panel + (first + i) / 4 * kPanelBytes + token * kSwizzledRow;
                    store_shared_float2(row + (byte ^ token % kSwizzleRows * 16), left, right);
                } else {
                    packed[i * 2 + eight] = pack_halves<Config::kOutType>(left, right);
                }
            }
        }
        if constexpr (Config::kOutType != kFp32) {
            const u32 token = position.warp * 16 + position.lane % 16;
            const u32 chunk = first % 8 + position.lane / 16;
            const u32 row = panel + first / 8 * kPanelBytes + token * kSwizzledRow;
            store_rows_x4(row + (chunk ^ token % kSwizzleRows) * 16, packed[0], packed[1], packed[2], packed[3]);
        }
    }
    constexpr u32 kColumns = Shared<Config>::kStripsOfWarpgroup * kStripRows;
    store_panels<Config, kColumns>(consumer, tile, panel, tile.first_token + first_token_row<Config>(position, half),
                                   tile.first_row + position.along_n * kColumns);
}

// The same for the halves that have tokens.
template <typename Config>
__device__ __forceinline__ void store_token_rows(const float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                                 const Tile<Config>& tile) {
#pragma unroll
    for (u32 half = 0; half < Config::kHalves; ++half)
        if (first_token_row<Config>(consumer.position, half) < tile.end_token() - tile.first_token)
            store_token_rows(acc, consumer, tile, half);
}

// Sums up the slices of a span over the cluster and stores the one that is this warpgroup's, if any is.
template <typename Config, u32 kSlice, u32 kEnd>
__device__ __forceinline__ void finish_slice(float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                             const Tile<Config>& tile, u32 parity, bool last_tile) {
    // A constant for each slice, so that accumulators stay in registers.
    if (consumer.position.slice == kSlice) {
        if constexpr (Config::kSplitK > 1) reduce_slice<Config, kSlice>(acc, consumer, parity, last_tile);
        store_slice<Config, kSlice>(acc, consumer, tile);
    } else if constexpr (kSlice + 1 < kEnd) {
        finish_slice<Config, kSlice + 1, kEnd>(acc, consumer, tile, parity, last_tile);
    }
}

// Sums the tile over the splits of k and stores it, each split its slice.
template <typename Config, u32 kSpan = 0>
__device__ __forceinline__ void finish_tile(float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                            const Tile<Config>& tile, u32 parity, bool last_tile) {
    using Layout = Shared<Config>;
    const u32 along_k = consumer.position.along_k;
    if (Layout::kSpans == 1 || along_k == kSpan) {
        if constexpr (Config::kWarpgroupsK > 1) {
            if (along_k > kSpan) return;
            reduce_span<Config, kSpan>(acc, consumer, parity, last_tile);
        }
        if constexpr (Config::kSplitK > 1) send_to_ctas<Config, kSpan>(acc, consumer, parity);
        constexpr u32 kFirst = kSpan * Config::kSplitK;
        constexpr u32 kEnd = kFirst + Layout::slices_of(kSpan);
        finish_slice<Config, kFirst, kEnd>(acc, consumer, tile, parity, last_tile);
    } else if constexpr (kSpan + 1 < Layout::kSpans) {
        finish_tile<Config, kSpan + 1>(acc, consumer, tile, parity, last_tile);
    }
}

}  // namespace jitgemm
