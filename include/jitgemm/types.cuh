// Integer types, storage types of real numbers and conversions between them. NVRTC without a toolkit has no <cstdint>,
// so the few types are declared here.
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

// Storage type of a value that is read through load_real(); kS32 of results alone.
enum RealType : i32 { kFp32 = 0, kBf16 = 1, kFp16 = 2, kS32 = 3 };

__host__ __device__ constexpr u32 real_bytes(RealType type) { return type == kFp32 || type == kS32 ? 4 : 2; }
__host__ __device__ constexpr u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
// min(), which is no constant.
__host__ __device__ constexpr u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

__device__ __forceinline__ float fp16_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Two values of 16 bits, the first in the low half.
template <RealType kType>
__device__ __forceinline__ u32 pack_halves(float first, float second) {
    u32 packed;
    if constexpr (kType == kBf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    }
    return packed;
}

__device__ __forceinline__ float2 f16x2_to_floats(u32 pair) {
    return {fp16_to_float(u16(pair)), fp16_to_float(u16(pair >> 16))};
}

__device__ __forceinline__ u32 multiply_f16x2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Reads element `index` of a global array whose type is known at run time only.
__device__ __forceinline__ float load_real(const void* base, u32 index, i32 type) {
    if (type == kFp32) return static_cast<const float*>(base)[index];
    u16 bits = static_cast<const u16*>(base)[index];
    return type == kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

}  // namespace jitgemm
