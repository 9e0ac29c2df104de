// Codes on their way to other columns: a row of them in shared memory, and the sources of each thread's.
#pragma once
#include <jitgemm/quantize/codes.cuh>

namespace jitgemm {

// The sources of eight codes, two to a word. Rows that are held have at most 2^15 columns.
struct Sources {
    u32 pairs[kVector / 2];
};

__device__ __forceinline__ Sources load_sources(const u32* permutation, u32 vector) {
    const uint4* source = reinterpret_cast<const uint4*>(permutation) + 2 * vector;
    const uint4 low = source[0], high = source[1];
    return {{low.x | low.y << 16, low.z | low.w << 16, high.x | high.y << 16, high.z | high.w << 16}};
}

__device__ __forceinline__ u32 gather(const u8* row, u32 a, u32 b, u32 c, u32 d) {
    return row[a] | row[b] << 8 | row[c] << 16 | static_cast<u32>(row[d]) << 24;
}

// Eight codes out of a row of them in shared memory.
__device__ __forceinline__ uint2 gather_codes(const u8* row, const Sources& from) {
    const u32(&p)[4] = from.pairs;
    return {gather(row, p[0] & 0xffffu, p[0] >> 16, p[1] & 0xffffu, p[1] >> 16),
            gather(row, p[2] & 0xffffu, p[2] >> 16, p[3] & 0xffffu, p[3] >> 16)};
}

__device__ __forceinline__ uint2 gather_codes(const u8* row, const u32* permutation, u32 vector) {
    const uint4* source = reinterpret_cast<const uint4*>(permutation) + 2 * vector;
    const uint4 low = source[0], high = source[1];
    return {gather(row, low.x, low.y, low.z, low.w), gather(row, high.x, high.y, high.z, high.w)};
}

template <class Config>
__device__ __forceinline__ void sync_row() {
    if constexpr (Config::kRows == 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

// Of codes on their way to be permuted there are no sums yet.
template <class Config, class Sums, bool kPermuted = Config::kPermuted>
struct Unpermuted {
    using Type = Sums;
};
template <class Config, class Sums>
struct Unpermuted<Config, Sums, true> {
    using Type = NoSums;
};

// The thread's vectors of a row, by a permutation that is read again.
template <class Sums>
__device__ __forceinline__ void gather_row(const QuantizeArgs& args, const u8* permuted, u8* out) {
#pragma unroll 1
    for (u32 vector = threadIdx.x; vector < Sums::end(args.k / kVector); vector += blockDim.x) {
        uint2 codes{0, 0};
        if (!Sums::kWholeWarps || vector < args.k / kVector) codes = gather_codes(permuted, args.permutation, vector);
        Sums::store(out, args.k, vector, codes);
    }
}

}  // namespace jitgemm
