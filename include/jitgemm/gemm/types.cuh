// The GEMM's units, its argument block, and where a consumer thread stands.
#pragma once
#include <jitgemm/types.cuh>

namespace jitgemm {

constexpr u32 kBlockK = 128;     // k of a weight record, and bytes of a swizzled row of activations
constexpr u32 kStripRows = 64;   // rows of n of a weight record: wgmma's M
constexpr u32 kTokensOfHalf = 64; // tokens of a warpgroup's half where they are wgmma's M (Config::kTokensAsM)
constexpr u32 kSwizzledRow = 128;  // bytes of a row of shared memory with the 128-byte swizzle
constexpr u32 kSwizzleRows = 8;  // after so many rows the swizzle repeats
constexpr u32 kWarpgroup = 128;  // threads
constexpr u32 kWarpgroupVector = kWarpgroup * 16;  // bytes that a warpgroup loads or stores with 16 a thread

// Run-time arguments; jitgemm/gemm/launch.py fills the same layout. Everything that may change from call to call is here,
// so that a new m, n, k or stride never compiles.
struct Args {
    const u8* lhs;              // activations, as lhs_map has them
    const u8* records;          // packed weight, [strips][k_blocks][record_bytes]
    const void* channel_scale;  // [strips * 64] of channel_scale_type; read by kernels with kRowScales only
    const float* lhs_scale;     // one value every lhs_scale_stride elements; stride 0 is one scale for all tokens;
                                // kLhsE8m0: words of the exponents of four k-blocks, the first in the lowest byte
    const void* bias;           // [n] of bias_type, or null
    const i32* lhs_zero;        // zero points of activations, or null
    const float* row_sum;       // [strips * 64] sums of weights; read where there are zero points
    u64 lhs_stride;             // bytes between tokens
    u64 lhs_scale_stride;
    u64 lhs_zero_stride;  // kLhsGroup: of a token's scales, or words of them, as there are no zero points
    u32 m, n, k;
    i32 channel_scale_type;
    i32 bias_type;
    u32 last_rows;  // tokens of a copy of the last tile along m
    u32 chunk_blocks;  // kChunks: k-blocks that one sum has
    u32 chunk_rows;    // kChunks: rows of out from one chunk's sums to the next one's
};
static_assert(sizeof(Args) == 112, "jitgemm/gemm/launch.py packs this struct");

// The arguments that a grouped GEMM adds; jitgemm/gemm/launch.py fills the same layout. The weight's tensors and the
// bias have the experts as their first dimension.
struct GroupPointers {
    const void* sizes;     // first rows and ends of the experts, or numbers of rows
    const i32* row_index;  // which token each row is, or null where rows are tokens
};
struct GroupedArgs : GroupPointers, Args {
    u32 experts;
    u32 rows_of_expert;  // from one expert's first row to the next one's where `sizes` are numbers of rows; else 0
    u32 expected_rows;   // of an expert, a hint
    u32 tokens;          // rows of lhs
    u32 sizes_step;      // from one expert's first row in `sizes` to the next one's; its end stands behind it
    u32 wide_sizes;      // 64-bit ones
    u64 scale_expert_step;  // kLhsGroup: elements, mod 2^64, from one expert's scales to the next, beyond rows * stride
};
static_assert(sizeof(GroupedArgs) == 160, "jitgemm/gemm/launch.py packs this struct");

// The kernel's tensor maps: of activations by tiles and of the last tile or of single rows, of the result by tiles, and
// in grouped kernels of kSwizzleRows rows and of one.
struct Maps {
    const TensorMap *lhs, *last_lhs, *out, *out_part, *out_row;
};

// A consumer thread's position in its CTA, and the tokens that its warpgroup stores.
struct Position {
    u32 warpgroup, along_m, along_n, along_k;
    u32 thread, warp, lane;  // thread within the warpgroup
    u32 slice;               // of the tile's tokens; the warpgroup stores none where there are not so many
    u32 tables;              // where the codec's are in shared memory, if it has any
    u32 sixteen;             // as ptxas cannot know: a multiplication by it, which it would turn into a shift
};

// The first of the tile's tokens that a half of the warpgroup has where they are wgmma's M.
template <typename Config>
__device__ __forceinline__ u32 first_token_row(const Position& position, u32 half) {
    return (position.along_m * Config::kHalves + half) * kTokensOfHalf;
}

}  // namespace jitgemm
