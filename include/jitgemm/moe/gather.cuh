// Quantised tokens in the order of a grouped GEMM's rows: each once for every choice. A warp has a row at a time.
#pragma once
#include <jitgemm/ptx/barrier.cuh>

namespace jitgemm {

// Run-time arguments; jitgemm/moe/plan.py fills the same layout.
struct GatherArgs {
    const u8* codes;         // [..][k]
    const float* scale;      // [..], or by block of 128 k [..][blocks] with the stride below
    const i32* zero;         // [..], or null
    const i32* row_index;    // token of each row
    const i32* row_count;    // one element: rows from there on are left alone
    u8* out_codes;           // [rows][k]
    float* out_scale;        // as scale
    i32* out_zero;
    u64 scale_block_stride;  // in elements
    u64 out_scale_block_stride;
    u32 k, blocks;
};
static_assert(sizeof(GatherArgs) == 88, "jitgemm/moe/plan.py packs this struct");

__device__ __forceinline__ void gather(const GatherArgs& args) {
    const u32 lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32, vectors = args.k / 16;
    launch_next_grid();
    wait_for_previous_grid();

    const u32 rows = *args.row_count;
    for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < rows; row += warps) {
        const u64 token = args.row_index[row];
        const u8* const source = args.codes + token * args.k;
        u8* const target = args.out_codes + u64(row) * args.k;
        for (u32 first = lane; first < vectors; first += 4 * 32) {
            u32 words[4][4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if (first + 32 * i < vectors) load_streamed(source + 16 * (first + 32 * i), words[i]);
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if (first + 32 * i < vectors) {
                    reinterpret_cast<uint4*>(target)[first + 32 * i] = {words[i][0], words[i][1], words[i][2], words[i][3]};
                }
            }
        }
        for (u32 block = lane; block < args.blocks; block += 32) {
            const float scale = args.scale[token + block * args.scale_block_stride];
            args.out_scale[row + block * args.out_scale_block_stride] = scale;
        }
        if (args.zero != nullptr && lane == 0) args.out_zero[row] = args.zero[token];
    }
}

}  // namespace jitgemm
