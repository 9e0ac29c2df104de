// Eight values as they lie in memory, a thread's unit of work, and how they are read and written.
#pragma once
#include <jitgemm/ptx/memory.cuh>

namespace jitgemm {

constexpr u32 kVector = 8;          // values of a vector
constexpr u32 kAllLanes = 0xffffffffu;

// Eight values as they lie in memory.
template <RealType kType>
struct Vector {
    static constexpr u32 kBytes = kVector * (kType == kFp32 ? 4 : 2);
    u32 words[kBytes / 4];

    __device__ __forceinline__ float value(u32 i) const {
        if constexpr (kType == kFp32) return __uint_as_float(words[i]);
        const u32 word = words[i / 2];
        if constexpr (kType == kBf16) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
        return fp16_to_float(static_cast<u16>(i % 2 ? word >> 16 : word));
    }
};

// kLoad: how 16 bytes are loaded.
template <RealType kType, void (*kLoad)(const u8*, u32 (&)[4]) = load_streamed>
__device__ __forceinline__ Vector<kType> load_vector(const u8* source) {
    Vector<kType> vector;
#pragma unroll
    for (u32 part = 0; part < Vector<kType>::kBytes / 16; ++part) {
        u32 words[4];
        kLoad(source + 16 * part, words);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) vector.words[4 * part + i] = words[i];
    }
    return vector;
}

template <RealType kType>
__device__ __forceinline__ void store_vector(u8* target, const Vector<kType>& vector) {
#pragma unroll
    for (u32 part = 0; part < Vector<kType>::kBytes / 16; ++part) {
        const u32* const words = vector.words + 4 * part;
        reinterpret_cast<uint4*>(target)[part] = {words[0], words[1], words[2], words[3]};
    }
}

// Eight consecutive weights of 16 bits; rows share them, so they may stay in the L1.
__device__ __forceinline__ uint4 load_weights(const u8* weights, u32 vector) {
    return reinterpret_cast<const uint4*>(weights)[vector];
}

// Eight consecutive weights, whose type is known at run time only. kEarly: those of 16 bits are `early`.
template <bool kEarly>
__device__ __forceinline__ void take_weights(const u8* weights, u32 vector, i32 type, const uint4& early,
                                             float (&values)[kVector]) {
    if (type == kFp32) {
        const float4* source = reinterpret_cast<const float4*>(weights) + 2 * vector;
        const float4 low = source[0], high = source[1];
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
        return;
    }
    const uint4 packed = kEarly ? early : load_weights(weights, vector);
    const Vector<kBf16> bf16{{packed.x, packed.y, packed.z, packed.w}};
    const Vector<kFp16> fp16{{packed.x, packed.y, packed.z, packed.w}};
#pragma unroll
    for (u32 i = 0; i < kVector; ++i) values[i] = type == kBf16 ? bf16.value(i) : fp16.value(i);
}

// x + residual, rounded to their type.
template <RealType kType>
__device__ __forceinline__ Vector<kType> add(const Vector<kType>& x, const Vector<kType>& residual) {
    Vector<kType> sum;
    constexpr u32 kOfWord = kType == kFp32 ? 1 : 2;
#pragma unroll
    for (u32 i = 0; i < kVector; i += kOfWord) {
        const float first = __fadd_rn(x.value(i), residual.value(i));
        if constexpr (kType == kFp32) {
            sum.words[i] = __float_as_uint(first);
        } else {
            sum.words[i / 2] = pack_halves<kType>(first, __fadd_rn(x.value(i + 1), residual.value(i + 1)));
        }
    }
    return sum;
}

}  // namespace jitgemm
