// Combining experts: out[token] = addend[token] + the sum over the token's choices of weight * row, in their order.
//
// fp32 throughout, one fused multiply-add a choice, rounded once. A CTA takes kCombineThreads vectors of eight columns
// of a token at a time, a thread one of them: eight rows in flight. Lanes fetch rows and weights, one choice each.
#pragma once
#include <jitgemm/quantize/kernel.cuh>

namespace jitgemm {

// Run-time arguments; jitgemm/moe/plan.py fills the same layout.
struct CombineArgs {
    const u8* rows;        // [..][n] of Config::kRow, contiguous
    const i32* inverse;    // [tokens][top_k]: row of each choice, negative where it is skipped
    const u8* weights;     // [tokens][top_k] of weights_type
    const u8* addend;      // [tokens][n] of Config::kOut, or null
    u8* out;               // [tokens][n] of Config::kOut
    u64 addend_row_bytes;
    u64 out_row_bytes;
    u32 tokens, top_k, n;
    i32 weights_type;
};
static_assert(sizeof(CombineArgs) == 72, "jitgemm/moe/plan.py packs this struct");

constexpr u32 kCombineThreads = 128;

template <RealType kType>
__device__ __forceinline__ void store_vector(u8* target, const float (&values)[kVector]) {
    if constexpr (kType == kFp32) {
        reinterpret_cast<float4*>(target)[0] = {values[0], values[1], values[2], values[3]};
        reinterpret_cast<float4*>(target)[1] = {values[4], values[5], values[6], values[7]};
    } else {
        *reinterpret_cast<uint4*>(target) = {
            pack_halves<kType>(values[0], values[1]), pack_halves<kType>(values[2], values[3]),
            pack_halves<kType>(values[4], values[5]), pack_halves<kType>(values[6], values[7])};
    }
}

// sum += the token's choices of one vector of columns, weighed; whether there is any. The whole warp calls this, also where
// rows have no such vector.
template <RealType kRow>
__device__ __forceinline__ bool add_choices(const u8* rows, const i32* inverse, const u8* weights, i32 weights_type,
                                            u32 token, u32 top_k, u32 vector, u32 vectors, float (&sum)[kVector]) {
    const u32 lane = threadIdx.x % 32;
    const bool inside = vector < vectors;
    bool any = false;
    for (u32 from = 0; from < top_k; from += 32) {
        const u32 choice = token * top_k + from + lane, count = min(top_k - from, 32u);
        const i32 my_row = lane < count ? inverse[choice] : -1;
        const float my_weight = lane < count ? load_real(weights, choice, weights_type) : 0.0f;
        for (u32 first = 0; first < count; first += 8) {
            i32 row[8];
            Vector<kRow> values[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                row[i] = __shfl_sync(kAllLanes, my_row, first + i);
                any |= row[i] >= 0;
                if (row[i] >= 0 && inside) {
                    const u64 at = u64(row[i]) * vectors + vector;
                    values[i] = load_vector<kRow>(rows + at * Vector<kRow>::kBytes);
                }
            }
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const float weight = __shfl_sync(kAllLanes, my_weight, first + i);
                if (row[i] >= 0) {
#pragma unroll
                    for (u32 j = 0; j < kVector; ++j) sum[j] = __fmaf_rn(weight, values[i].value(j), sum[j]);
                }
            }
        }
    }
    return any;
}

template <class Config>
__device__ __forceinline__ void combine(const CombineArgs& args) {
    constexpr u32 kOutVectorBytes = Vector<Config::kOut>::kBytes;
    const u32 vectors = args.n / kVector, parts = ceil_div(vectors, kCombineThreads);

    // The rows are the grid's before; inverse and weights may be of grids before that one, whose every thread waited for
    // them: its end is theirs, and what they wrote is seen behind this wait.
    launch_next_grid();
    wait_for_previous_grid();

    for (u32 work = blockIdx.x; work < args.tokens * parts; work += gridDim.x) {
        const u32 token = work / parts, vector = work % parts * kCombineThreads + threadIdx.x;
        const bool inside = vector < vectors;
        float sum[kVector] = {};
        if (args.addend != nullptr && inside) {
            const u8* source = args.addend + token * args.addend_row_bytes + vector * kOutVectorBytes;
            const Vector<Config::kOut> addend = load_vector<Config::kOut>(source);
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) sum[i] = addend.value(i);
        }
        add_choices<Config::kRow>(args.rows, args.inverse, args.weights, args.weights_type, token, args.top_k, vector,
                                  vectors, sum);
        if (inside) store_vector<Config::kOut>(args.out + token * args.out_row_bytes + vector * kOutVectorBytes, sum);
    }
}

}  // namespace jitgemm
