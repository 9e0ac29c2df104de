// From accumulators to the output: per-token scale, per-channel scale, bias, the output's type, transposition, clipped
// store. multiply.cuh has the picture of where a thread's sums lie.
#pragma once
#include <jitgemm/gate.cuh>
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
            tile_store(map, source, first_row + column, first_token + row);
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
                value[half][0] = fmaf(sum[0] * terms.scale[half], token_scales[i].x, terms.bias[half]);
                value[half][1] = fmaf(sum[1] * terms.scale[half], token_scales[i].y, terms.bias[half]);
            }
            if constexpr (Config::kOutType == kFp32) {
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
        if constexpr (Config::kOutType != kFp32) {
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

// SwiGLU of a slice: every 16 rows of the weight are 8 gates and their 8 ups, so that a thread's two rows are a gate and
// its up, and 64 rows give 32 columns of y = silu(gate) * up. Both are rounded to the output's type first, as they would
// be if they were stored.
template <typename Config, u32 kSlice>
__device__ __forceinline__ void store_gated(float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                            const Tile<Config>& tile) {
    const Position& position = consumer.position;
    const Args& args = consumer.args;
    const Shared<Config>& shared = consumer.shared;
    const u32 panel = shared.out(position.warpgroup);
    constexpr u32 kConsumerThreads = kWarpgroup * Config::kWarpgroupsN;
    copy_wait();
    if constexpr (Config::kGate == 2) along_n_sync(0, kConsumerThreads);
    else warpgroup_sync(position.warpgroup);  // the panel is free, the factors are there
    RowTerms terms = load_row_terms(consumer, tile);

    const u32 first_token = tile.first_token + kSlice * Config::kSliceTokens;
    constexpr u32 kMatrices = Config::kSliceTokens / 8;  // of 8 tokens
    float* sums = acc + kSlice * kMatrices * 4;
    if (has_zeros<Config>(args)) subtract_zeros<Config>(sums, terms, consumer, tile, panel, first_token);
    const u32 scales = shared.scales(position.warpgroup) + (position.lane % 4) * 8;
    const u32 first_row = tile.first_row + position.along_n * kStripRows;

    // y of the thread's column and two tokens of a matrix.
    auto gated = [&](u32 matrix) {
        float2 token = {1.0f, 1.0f};
        if constexpr (Config::kLhsGroup == 0) token = load_shared_float2(scales + matrix * 32);
        token.x *= Config::Codec::kOutputScale;
        token.y *= Config::Codec::kOutputScale;
        u32 packed[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float* sum = sums + matrix * 4 + half * 2;
            packed[half] = pack_halves<Config::kOutType>(fmaf(sum[0] * terms.scale[half], token.x, terms.bias[half]),
                                                         fmaf(sum[1] * terms.scale[half], token.y, terms.bias[half]));
        }
        auto low = [](u32 pair) { return Config::kOutType == kBf16 ? bf16_to_float(u16(pair)) : fp16_to_float(u16(pair)); };
        return float2{silu_times(low(packed[0]), low(packed[1])), silu_times(low(packed[0] >> 16), low(packed[1] >> 16))};
    };

    if constexpr (Config::kGate == 1) {
        // A token is a row of 64 bytes, whose 16-byte chunk c lies at c ^ (token / 2 % 4).
        constexpr u32 kRow = kStripRows;
#pragma unroll
        for (u32 first = 0; first < kMatrices; first += 2) {
            const u32 count = min(2u, kMatrices - first);
            u32 packed[2];
#pragma unroll
            for (u32 i = 0; i < count; ++i) {
                const float2 y = gated(first + i);
                packed[i] = pack_halves<Config::kOutType>(y.x, y.y);
            }
            const u32 token = first * 8 + position.lane % 16;
            const u32 row = panel + token * kRow + (position.warp ^ token / 2 % 4) * 16;
            if (count == 2) store_matrix_x2(row, packed[0], packed[1]);
            else store_matrix_x1(row, packed[0]);
        }
        warpgroup_sync(position.warpgroup);
#pragma unroll
        for (u32 i = 0; i < ceil_div(Config::kSliceTokens * 4, kWarpgroup); ++i) {
            const u32 token = i * 32 + position.thread / 4, chunk = position.thread % 4;
            if (token >= Config::kSliceTokens || first_token + token >= tile.end_token()) continue;
            if (first_row + chunk * 16 >= args.n) continue;
            const uint4 y = load_shared_v4(panel + token * kRow + (chunk ^ token / 2 % 4) * 16);
            *reinterpret_cast<uint4*>(args.gate_out + u64(first_token + token) * args.gate_stride + first_row + chunk * 16) = y;
        }
    } else {
        static_assert(Config::kWarpgroupsN == 4 && Config::kWarpgroupsK == 1 && Config::kSplitK == 1 &&
                          kMatrices <= 2 && Config::kExperts == 0, "four strips have the columns of a scale");
        constexpr u32 kWarpRow = Config::kSliceTokens * 4;
        float2 y[kMatrices];
#pragma unroll
        for (u32 i = 0; i < kMatrices; ++i) {
            y[i] = gated(i);
            u32 high[2] = {__float_as_uint(y[i].x) & 0x7fffffffu, __float_as_uint(y[i].y) & 0x7fffffffu};
#pragma unroll
            for (u32 distance = 4; distance < 32; distance *= 2) {
                high[0] = max(high[0], __shfl_xor_sync(0xFFFFFFFFu, high[0], distance));
                high[1] = max(high[1], __shfl_xor_sync(0xFFFFFFFFu, high[1], distance));
            }
            if (position.lane < 4)
                store_shared_v2(panel + position.warp * kWarpRow + i * 32 + position.lane * 8, uint2{high[0], high[1]});
        }
        along_n_sync(0, kConsumerThreads);
        const u32 column = first_row / 2 + position.warp * 8 + position.lane / 4;
        const bool inside = first_row + position.warp * 16 + position.lane / 4 < args.n;
#pragma unroll
        for (u32 i = 0; i < kMatrices; ++i) {
            u32 high[2] = {0, 0};
#pragma unroll
            for (u32 w = 0; w < 2; ++w) {  // of the 16 warps
                const u32 warp = position.lane / 4 + 8 * w;
                const uint2 other = load_shared_v2(shared.out(warp / 4) + warp % 4 * kWarpRow + i * 32 + position.lane % 4 * 8);
                high[0] = max(high[0], other.x);
                high[1] = max(high[1], other.y);
            }
#pragma unroll
            for (u32 distance = 4; distance < 32; distance *= 2) {
                high[0] = max(high[0], __shfl_xor_sync(0xFFFFFFFFu, high[0], distance));
                high[1] = max(high[1], __shfl_xor_sync(0xFFFFFFFFu, high[1], distance));
            }
            const float scale[2] = {e4m3_scale(high[0]), e4m3_scale(high[1])};
            const u32 codes = to_e4m3(__fmul_rn(y[i].x, __fdiv_rn(1.0f, scale[0])), __fmul_rn(y[i].y, __fdiv_rn(1.0f, scale[1])));
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                const u32 token = first_token + i * 8 + position.lane % 4 * 2 + j;
                if (token >= tile.end_token()) continue;
                if (inside) args.gate_out[token * args.gate_stride + column] = u8(codes >> 8 * j);
                if (position.warpgroup == 0 && position.thread < 4)
                    args.gate_scale[token * args.gate_scale_stride + tile.first_row / Config::kBlockN] = scale[j];
            }
        }
    }
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
    constexpr u32 kPanelBytes = kTokenRows * kSwizzledRow;
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
        if constexpr (Config::kGate != 0) store_gated<Config, kSlice>(acc, consumer, tile);
        else store_slice<Config, kSlice>(acc, consumer, tile);
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
