// The end of a GEMM whose sums were stored apart (jitgemm/gemm/partial.py): adds up parts and makes the result of them.
//
//   integers   out = float(p0 + p1 + ..) * channel_scale * x_scale + bias       any order gives the same sum
//   floats     out = ((p0 + p1) + (p2 + p3)) + .. + bias                        a tree of 1, 2, 4 or 8 parts
//
// Each product and sum is one IEEE operation, as in jitgemm/gemm/reference.py; then out's type.
#pragma once
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/quantize/vector.cuh>

namespace jitgemm {

constexpr u32 kFinishThreads = 128;

// Run-time arguments; jitgemm/gemm/partial.py fills the same layout.
struct FinishArgs {
    const u8* parts;          // [kParts] of [..][n] of kIn
    const float* x_scale;     // integers only: of row i at i * x_scale_stride
    const u8* channel_scale;  // integers only: [n] of channel_scale_type
    const void* bias;         // [n] of bias_type, or null
    u8* out;                  // [m][n] of kOut, contiguous
    u64 part_bytes;           // from part to part
    u64 x_scale_stride;
    u32 m, n;
    i32 channel_scale_type;
    i32 bias_type;
};
static_assert(sizeof(FinishArgs) == 72, "jitgemm/gemm/partial.py packs this struct");

// Eight columns of each part, added up: integers as their bits.
template <class Config, class Load>
__device__ __forceinline__ Vector<kFp32> sum_of_parts(Load load) {
    Vector<kFp32> parts[Config::kParts];
#pragma unroll
    for (u32 part = 0; part < Config::kParts; ++part) parts[part] = load(part);
#pragma unroll
    for (u32 distance = 1; distance < Config::kParts; distance *= 2) {
#pragma unroll
        for (u32 part = 0; part < Config::kParts; part += 2 * distance) {
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) {
                u32& sum = parts[part].words[i];
                const u32 other = parts[part + distance].words[i];
                if constexpr (Config::kIn == kS32) sum += other;
                else sum = __float_as_uint(__fadd_rn(__uint_as_float(sum), __uint_as_float(other)));
            }
        }
    }
    return parts[0];
}

// The result of a row's eight columns.
template <class Config, class Args>
__device__ __forceinline__ Vector<Config::kOut> finished(const Args& args, const Vector<kFp32>& sums, u32 row,
                                                         u32 vector) {
    float values[kVector];
    if constexpr (Config::kIn == kS32) {
        float scales[kVector];
        take_weights<false>(args.channel_scale, vector, args.channel_scale_type, {}, scales);
        const float x_scale = args.x_scale[row * args.x_scale_stride];
#pragma unroll
        for (u32 i = 0; i < kVector; ++i)
            values[i] = __fmul_rn(__fmul_rn(__int2float_rn(i32(sums.words[i])), scales[i]), x_scale);
    } else {
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) values[i] = sums.value(i);
    }
    if (args.bias != nullptr) {
        float bias[kVector];
        take_weights<false>(static_cast<const u8*>(args.bias), vector, args.bias_type, {}, bias);
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) values[i] = __fadd_rn(values[i], bias[i]);
    }
    Vector<Config::kOut> result;
    if constexpr (Config::kOut == kFp32) {
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) result.words[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
        for (u32 i = 0; i < kVector; i += 2) result.words[i / 2] = pack_halves<Config::kOut>(values[i], values[i + 1]);
    }
    return result;
}

template <class Config>
__device__ __forceinline__ void finish(const FinishArgs& args) {
    const u32 vectors = args.n / kVector;
    launch_next_grid();
    wait_for_previous_grid();
    for (u64 i = blockIdx.x * kFinishThreads + threadIdx.x; i < u64(args.m) * vectors; i += gridDim.x * kFinishThreads) {
        const u32 row = u32(i / vectors), vector = u32(i % vectors);
        const Vector<kFp32> sums = sum_of_parts<Config>([&](u32 part) {
            return load_vector<kFp32>(args.parts + part * args.part_bytes + i * Vector<kFp32>::kBytes);
        });
        store_vector(args.out + i * Vector<Config::kOut>::kBytes, finished<Config>(args, sums, row, vector));
    }
}

}  // namespace jitgemm
