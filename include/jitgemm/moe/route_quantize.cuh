// Routing and quantising of the tokens in one launch, which are independent: CTA 0 routes, the others quantise.
#pragma once
#include <jitgemm/moe/route.cuh>
#include <jitgemm/quantize/kernel.cuh>

namespace jitgemm {

// Run-time arguments, those of both; jitgemm/moe/plan.py fills the same layout.
struct RouteQuantizeArgs {
    const u8* ids;
    const i32* expert_map;
    i32* offsets;
    i32* row_index;
    i32* inverse;
    const u8* x;
    u8* q;
    float* scale;
    i32* zero;
    u64 x_row_bytes;
    u32 choices, top_k, experts, global_experts;
    u32 run;
    u32 id_bytes;
    u32 m, k;
    u64 scale_block_stride;
};
static_assert(sizeof(RouteQuantizeArgs) == 120, "jitgemm/moe/plan.py packs this struct");

template <class Config>
__device__ __forceinline__ void route_and_quantize(const RouteQuantizeArgs& args) {
    if (blockIdx.x == 0) {
        const RouteArgs routing{args.ids,     args.expert_map, args.offsets, args.row_index,      args.inverse,
                                args.choices, args.top_k,      args.experts, args.global_experts, args.run,
                                args.id_bytes};
        route<1>(routing);
    } else {
        QuantizeArgs tokens{};
        tokens.x = args.x, tokens.q = args.q, tokens.scale = args.scale, tokens.zero = args.zero;
        tokens.x_row_bytes = args.x_row_bytes, tokens.q_row_bytes = args.k;
        tokens.m = args.m, tokens.k = args.k;
        tokens.scale_row_stride = 1, tokens.scale_block_stride = args.scale_block_stride;
        quantize_rows<Config>(tokens, blockIdx.x - 1, gridDim.x - 1);
    }
}

}  // namespace jitgemm
