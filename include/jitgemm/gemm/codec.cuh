// 4-bit codes to wgmma A fragments. One 16-byte load holds the codes of two k-steps of 32; a 32-bit word holds two
// fragment registers of one row: set A is k = 4*(lane%4)..+3 of the step, set B the same at k + 16.
//
// Word of signed codes: s is the sign, v the code's low three bits, inverted where it is negative (one's complement):
//
//     byte b, bit   7     6 5 4     3          2 1 0
//                   sA_b  v(B_b)    sB_(b-1)   v(A_b)
//
// so that a rotation by 4 puts set B where set A was. For e4m3 alone, v is the code's magnitude. For int8 alone, byte b
// is A_b << 4 | B_b in two's complement. Word of codes with a zero point: byte b is A_b | B_b << 4.
#pragma once
#include <jitgemm/gemm/types.cuh>
#include <jitgemm/ptx/memory.cuh>

namespace jitgemm {

// Every byte becomes 0xFF where its highest bit is set, else 0.
__device__ __forceinline__ u32 byte_sign_mask(u32 word) {
    u32 mask;
    asm("prmt.b32 %0, %1, 0, 0xBA98;" : "=r"(mask) : "r"(word));
    return mask;
}

// |a - b| of every byte.
__device__ __forceinline__ u32 byte_distance(u32 a, u32 b) {
    u32 distance;
    asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(distance) : "r"(a), "r"(b), "r"(0));
    return distance;
}

__device__ __forceinline__ u32 rotate_right_4(u32 word) { return __funnelshift_r(word, word, 4); }

// A decoder turns a code into kOutputScale times less than its value, kOne being four ones; the epilogue multiplies.
//
// e4m3 is linear from 0 to 16 in its lowest bits: byte s000 mmmm (or s001 0000) is exactly ±m * 2^-9.
struct DecodeE4m3 {
    static constexpr bool kIntegerSums = false;
    static constexpr float kOutputScale = 512.0f;
    static constexpr u32 kOne = 0x01010101u;

    // One's complement plus its sign bit is sign and magnitude, -8 included.
    __device__ static u32 signed_a(u32 word) {
        u32 bytes = word & 0x87878787u;
        return bytes + ((bytes & 0x80808080u) >> 7);
    }
    __device__ static u32 signed_b(u32 word) { return signed_a(rotate_right_4(word)); }

    // `zero` is the zero point in every byte. The bytes 128 + q - z have their highest bit where the sign has not.
    __device__ static u32 zero_point_codes(u32 codes, u32 zero) {
        u32 biased = codes + (0x80808080u - zero);
        return (~biased & 0x80808080u) | byte_distance(codes, zero);
    }
};

struct DecodeE4m3SignMagnitude {
    static constexpr bool kIntegerSums = false;
    static constexpr float kOutputScale = 512.0f;
    static constexpr u32 kOne = 0x01010101u;

    __device__ static u32 signed_a(u32 word) { return word & 0x87878787u; }
    __device__ static u32 signed_b(u32 word) { return signed_a(rotate_right_4(word)); }
};

// 16 times the code: two's complement in the high nibble.
struct DecodeS8TwosComplement {
    static constexpr bool kIntegerSums = true;
    static constexpr float kOutputScale = 0.0625f;
    static constexpr u32 kOne = 0x10101010u;

    __device__ static u32 signed_a(u32 word) { return word & 0xF0F0F0F0u; }
    __device__ static u32 signed_b(u32 word) { return (word << 4) & 0xF0F0F0F0u; }
};

struct DecodeS8 {
    static constexpr bool kIntegerSums = true;
    static constexpr float kOutputScale = 1.0f;
    static constexpr u32 kOne = 0x01010101u;

    __device__ static u32 signed_a(u32 word) { return (word & 0x07070707u) ^ byte_sign_mask(word); }
    __device__ static u32 signed_b(u32 word) { return signed_a(rotate_right_4(word)); }

    __device__ static u32 zero_point_codes(u32 codes, u32 zero) { return ((codes | 0x80808080u) - zero) ^ 0x80808080u; }
};

// Fragments of one k-step of 32 from its two words (rows lane/4 and lane/4 + 8). Registers 0 and 2 are the first row at
// k and k + 16, registers 1 and 3 the second row.
template <typename Decode, bool kZeroPoint>
__device__ __forceinline__ void decode_step(u32 (&fragment)[4], u32 low_row, u32 high_row, u32 low_zero,
                                            u32 high_zero) {
    if constexpr (kZeroPoint) {
        fragment[0] = Decode::zero_point_codes(low_row & 0x0F0F0F0Fu, low_zero);
        fragment[1] = Decode::zero_point_codes(high_row & 0x0F0F0F0Fu, high_zero);
        fragment[2] = Decode::zero_point_codes(low_row >> 4 & 0x0F0F0F0Fu, low_zero);
        fragment[3] = Decode::zero_point_codes(high_row >> 4 & 0x0F0F0F0Fu, high_zero);
    } else {
        fragment[0] = Decode::signed_a(low_row);
        fragment[1] = Decode::signed_a(high_row);
        fragment[2] = Decode::signed_b(low_row);
        fragment[3] = Decode::signed_b(high_row);
    }
}

// A weight record: 64 rows x 128 k of codes, then what belongs to its groups. A chunk is a run of k within the record
// that has scales of its own.
//
//     0        4096                      kOffsets                    kZeros
//     | codes  | scales [scale_rows][64] | offsets [scale_rows][64]  | zero points uint8 [chunks][64] |
template <typename Config>
struct Record {
    static constexpr u32 kChunks = Config::kGroupSize == 0 || Config::kGroupSize >= 128 ? 1 : 128 / Config::kGroupSize;
    static constexpr u32 kScaleRows = Config::kGroupSize == 0 ? 0 : kChunks;
    static constexpr u32 kRowOfScales = 64 * (Config::kScaleType == kFp32 ? 4 : 2);
    static constexpr u32 kScales = 64 * 128 / 2;
    static constexpr u32 kOffsets = kScales + kScaleRows * kRowOfScales;
    static constexpr u32 kZeros = kOffsets + (Config::kOffset ? kScaleRows * kRowOfScales : 0);
    static constexpr u32 kBytes = kZeros + (Config::kZeroPoint ? kChunks * 64 : 0);
};

}  // namespace jitgemm
