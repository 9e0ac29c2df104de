// From y to codes, and where they are written.
#pragma once
#include <jitgemm/ptx/convert.cuh>
#include <jitgemm/quantize/range.cuh>

namespace jitgemm {

constexpr u32 kInfinity = 0x7f800000u;
constexpr float kMinScale = 1.17549435e-38f;  // 2^-126: its reciprocal is finite, and 0 / scale is 0

template <class Config>
struct Quantizer {
    static constexpr float kRotation = Config::kRotated ? 0.0883883461f : 1.0f;  // 2^-3.5, which rotate() left out

    float norm;     // RMSNorm: 1 / sqrt(mean + eps)
    float scale;    // as the row's scale is returned
    float inverse;  // 1 / scale
    i32 zero;

    __device__ __forceinline__ Quantizer(const QuantizeArgs& args, const Range<Config>& range, u32 row = 0) {
        const float nan = __uint_as_float(0x7fffffffu);
        float high = __uint_as_float(range.high), low = __uint_as_float(range.low);
        norm = 1.0f;
        if constexpr (Config::kRmsNorm) {
            const float mean = __fdiv_rn(range.squares, static_cast<float>(args.k));
            norm = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, args.eps)));
            // An infinite sum would make every y zero.
            if (__float_as_uint(range.squares) >= kInfinity) norm = nan;
            high = __fmul_rn(high, norm);
            low = __fmul_rn(low, norm);
        }
        zero = 0;
        if constexpr (Config::kStatic) {
            scale = args.given_scale[row * args.given_stride];
            if constexpr (Config::kAffine) zero = args.given_zero[row * args.given_stride];
            inverse = __fdiv_rn(kRotation, scale);
            if (high != high) scale = nan;
        } else {
            // Affine: low is minus the smallest, so the sum is the range.
            const float extent = Config::kAffine ? __fadd_rn(high, low) : high;
            scale = __fdiv_rn(extent, Config::kE4m3 ? 448.0f : Config::kAffine ? 255.0f : 127.0f);
            constexpr float kLeast = Config::kRotated ? 16 * kMinScale : kMinScale;  // kRotation makes it smaller
            if (scale < kLeast) scale = kLeast;
            if (__float_as_uint(extent) >= kInfinity) scale = nan;
            inverse = __fdiv_rn(1.0f, scale);
            if constexpr (Config::kAffine) zero = zero_point(high, low, scale);
            if constexpr (Config::kRotated) scale = __fmul_rn(scale, kRotation);
        }
        asm volatile("" : "+f"(inverse));  // else each vector divides again
    }

    // The zero point of -low..high. It follows from either end; the sum of both errors tells which, as in XNNPACK.
    __device__ __forceinline__ static i32 zero_point(float high, float low, float scale) {
        const float bottom = __fdiv_rn(-low, scale), top = __fdiv_rn(high, scale);
        const bool from_bottom = __fadd_rn(__fadd_rn(-128.0f, bottom), __fadd_rn(127.0f, top)) > 0.0f;
        const float exact = from_bottom ? __fsub_rn(-128.0f, bottom) : __fsub_rn(127.0f, top);
        return min(max(to_integer(exact), -128), 127);
    }

    template <class Values>
    __device__ __forceinline__ uint2 codes(const Values& y) const {
        float scaled[kVector];
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) {
            const float value = Config::kRmsNorm ? __fmul_rn(y.value(i), norm) : y.value(i);
            scaled[i] = __fmul_rn(value, inverse);
        }
        uint2 result;
        if constexpr (Config::kE4m3) {
            result.x = to_e4m3(scaled[0], scaled[1]) | static_cast<u32>(to_e4m3(scaled[2], scaled[3])) << 16;
            result.y = to_e4m3(scaled[4], scaled[5]) | static_cast<u32>(to_e4m3(scaled[6], scaled[7])) << 16;
        } else {
            i32 integers[kVector];
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) {
                integers[i] = to_integer(scaled[i]);
                // A given scale may be far too small: the sum with zero must not wrap around.
                if constexpr (Config::kAffine && Config::kStatic) integers[i] = min(max(integers[i], -65536), 65535);
                if constexpr (Config::kAffine) integers[i] += zero;
            }
            result.x = to_int8(integers[0], integers[1], integers[2], integers[3]);
            result.y = to_int8(integers[4], integers[5], integers[6], integers[7]);
        }
        return result;
    }
};

__device__ __forceinline__ void store_codes(u8* row, u32 vector, uint2 codes) {
    reinterpret_cast<uint2*>(row)[vector] = codes;
}

// The codes of a thread's i-th vector behind rotate(): by fours, as it has left them. vector: the thread's first of the
// block.
template <u32 kCount>
__device__ __forceinline__ void store_rotated(u8* row, u32 vector, u32 i, uint2 codes) {
    constexpr u32 kLanes = kBlockVectors / kCount;
    u32* const fours = reinterpret_cast<u32*>(row) + 2 * vector - vector % kBlockVectors + 2 * i * kLanes;
    fours[0] = codes.x;
    fours[kLanes] = codes.y;
}

// Rows are their codes alone.
struct NoSums {
    // Whole warps call store(), with vectors side by side, and zeros for vectors that the row has not.
    static constexpr bool kWholeWarps = false;

    // A row's threads go through its vectors up to there.
    __device__ __forceinline__ static u32 end(u32 vectors) { return vectors; }

    // Writes a vector of a row of k.
    __device__ __forceinline__ static void store(u8* row, u32, u32 vector, uint2 codes) {
        store_codes(row, vector, codes);
    }

    // What no vector stands for. All of a row's threads call this.
    __device__ __forceinline__ static void finish(u8*, u32, u32) {}
};

}  // namespace jitgemm
