// Integer types and the kernel's argument block. NVRTC without a toolkit has no <cstdint>, so the few types are
// declared here.
#pragma once

namespace jitgemm {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "unexpected integer sizes");

// The driver's opaque 128-byte CUtensorMap.
struct alignas(64) TensorMap {
    u8 opaque[128];
};

// Storage type of a value that is read through load_real().
enum RealType : i32 { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// Run-time arguments; jitgemm/plan.py fills the same layout. Everything that may change from call to call is here, so
// that a new m, n, k or stride never compiles.
struct Args {
    const u8* lhs;              // activations, as lhs_map has them
    const u8* records;          // packed weight, [strips][k_blocks][record_bytes]
    const void* channel_scale;  // [strips * 64] of channel_scale_type; read by per-channel kernels only
    const float* lhs_scale;     // one value every lhs_scale_stride elements; stride 0 is one scale for all tokens
    const void* bias;           // [n] of bias_type, or null
    const i32* lhs_zero;        // zero points of activations, or null
    const float* row_sum;       // [strips * 64] sums of weights; read where there are zero points
    u64 lhs_stride;             // bytes between tokens
    u64 lhs_scale_stride;
    u64 lhs_zero_stride;
    u32 m, n, k;
    i32 channel_scale_type;
    i32 bias_type;
    u32 last_rows;  // tokens of a copy of the last tile along m
};
static_assert(sizeof(Args) == 104, "jitgemm/plan.py packs this struct");


__host__ __device__ constexpr u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
// min(), which is no constant.
__host__ __device__ constexpr u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

__device__ __forceinline__ float fp16_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Reads element `index` of a global array whose type is known at run time only.
__device__ __forceinline__ float load_real(const void* base, u32 index, i32 type) {
    if (type == kFp32) return static_cast<const float*>(base)[index];
    u16 bits = static_cast<const u16*>(base)[index];
    return type == kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

}  // namespace jitgemm
