// Zero points and offsets as a correction of small rank: what a row's groups add to the product of codes and activations is
//
//     sum over groups of (offset - scale * zero) of the row and group * sum of the group's activations of the token
//
// a multiply of [n, groups] by [groups, m]. Its blocks follow those of the codes along k, in records of the same size and
// in rows of activations that are as much longer: a block has kCorrected groups. Both are 16-bit floats that hold every
// number exactly, a token's sums as two digits: the second is what the first rounds off.
//
//     record   [k-step of 16 groups: 2][thread: 128][A register: 4] pairs of factors
//     token    [digit: 2][group: 32], 128 bytes
//
// Behind the last promotion the tensor cores multiply a record in fp32, in registers of its own, as in the tile's sums ptxas
// would move those about in the loop before; and wide tiles in two parts, whose sums fit the registers.
#pragma once
#include <jitgemm/gemm/operand.cuh>

namespace jitgemm {

constexpr u32 kCorrected = 32;  // groups of a block of corrections

// How many of a tile's k-blocks are of codes: with groups of 128 one more corrects 32 of them.
template <typename Config>
__device__ __forceinline__ u32 code_blocks(u32 blocks) {
    return blocks - ceil_div(blocks, kCorrected * Config::kGroupSize / kBlockK + 1);
}

// Tokens of a multiply, of a half of a tile.
constexpr u32 corrected_tokens(u32 tokens) { return tokens > 128 ? tokens / 2 : tokens; }

// Adds a record of factors times a stage's sums to `acc`, of the tile's first kWidth tokens.
template <typename Config, u32 kWidth>
__device__ __forceinline__ void correct(float (&acc)[Config::kSums], u32 record, u64 descriptor, const Position& position) {
    constexpr u32 kTokens = corrected_tokens(kWidth / Config::kHalves);
    using Wgmma = typename Config::template CorrectionWgmma<kTokens>;
    const uint4 first = load_shared_v4(record + position.thread * 16);
    const uint4 second = load_shared_v4(record + kWarpgroupVector + position.thread * 16);
    const u32 factors[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
#pragma unroll
    for (u32 part = 0; part < kWidth / kTokens; ++part) {
        float sums[kTokens / 2];
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < 2; ++step)
#pragma unroll
            for (u32 digit = 0; digit < 2; ++digit)
                Wgmma::issue(sums, factors[step], descriptor + part * (kTokens * kSwizzledRow >> 4) + digit * 4 + step * 2,
                             step + digit > 0);
        wgmma_commit();
        wgmma_wait<0>();
        register_fence(sums);
#pragma unroll
        for (u32 i = 0; i < kTokens / 2; ++i) acc[part * (kTokens / 2) + i] += sums[i];
    }
}

}  // namespace jitgemm
