// Codes of 4 or 8 bits for wgmma's A, and the record that they lie in. A codec owns the bytes of its codes and says how
// a warpgroup turns a record of them into fragments; another width or number format is another codec.
//
// wgmma reads 8-bit codes where they are, in rows of 128 bytes with the 128-byte swizzle. Of 4-bit ones, one 16-byte
// load holds the codes of two k-steps of 32; a 32-bit word holds two fragment registers of one row: set A is
// k = 4*(lane%4)..+3 of the step, set B the same at k + 16.
//
// Word of signed codes: byte b is A_b | B_b << 4. A nibble is v << 1 | s: s is the sign, v the code's low three bits,
// inverted where it is negative (one's complement). It decodes to twice the code; for e4m3 by a multiplication, which
// leaves the ALU pipe to LOP3 and shifts.
//
// Word of codes with a zero point: byte b is A_b | B_b << 4 as well, and a nibble the code itself. For int8 alone byte b
// is A_b << 4 | B_b in two's complement. For e4m3 alone, v is the code's magnitude, and a rotation by 4 puts set B where
// set A was:
//
//     byte b, bit   7     6 5 4     3          2 1 0
//                   sA_b  v(B_b)    sB_(b-1)   v(A_b)
//
// Word of e2m1 codes, whose magnitudes v are indices of a table of bytes: nibble i is v(A_i), and from the fifth on
// v(B_(i-4)); between them stand the signs, where a shift by 4 puts set B's:
//
//     byte b, bit   7     6 5 4         3     2 1 0
//                   sA_b  v(A_(2b+1))   sB_b  v(A_2b)        b < 2; from there on B's
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

// Bytes of two words by the nibbles of a selector.
__device__ __forceinline__ u32 permuted(u32 low, u32 high, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

// value * kFactor + addend by one instruction, and not of the ALUs: several of one value would become a product and sums.
template <u32 kFactor>
__device__ __forceinline__ u32 times_plus(u32 value, u32 addend) {
    u32 sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(value), "n"(kFactor), "r"(addend));
    return sum;
}

// |a - b| of every byte.
__device__ __forceinline__ u32 byte_distance(u32 a, u32 b) {
    u32 distance;
    asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(distance) : "r"(a), "r"(b), "r"(0));
    return distance;
}

// ---- orders of codes ------------------------------------------------------------------------------------------------

// Each decodes a word of codes to four bytes that are kOutputScale times less than the codes; the epilogue multiplies.
// kOne is four ones. kIntegerSums: the tensor cores sum them up in int32.
//
// e4m3 is linear from 0 to 16 in its lowest bits: byte s000 mmmm (or s001 0000) is exactly ±m * 2^-9.
struct E4m3Codes {
    static constexpr bool kIntegerSums = false;
    static constexpr float kOutputScale = 256.0f;
    static constexpr u32 kOne = 0x02020202u;

    // One's complement plus its sign bit, on both sides of the magnitude, is sign and twice the magnitude.
    __device__ static u32 signed_a(u32 word) { return (word & 0x01010101u) * 0x81u + (word & 0x0F0F0F0Fu); }
    __device__ static u32 signed_b(u32 word) { return signed_a(word >> 4); }
};

struct E4m3ZeroPointCodes {
    static constexpr bool kIntegerSums = false;
    static constexpr float kOutputScale = 512.0f;
    static constexpr u32 kOne = 0x01010101u, kFactor = 1;

    // Of bytes 128 + q - z, whose highest bit is set where the sign is not.
    __device__ static u32 signed_of(u32 biased) { return (~biased & 0x80808080u) | byte_distance(biased, 0x80808080u); }
};

struct E4m3SignMagnitudeCodes {
    static constexpr bool kIntegerSums = false;
    static constexpr float kOutputScale = 512.0f;
    static constexpr u32 kOne = 0x01010101u;

    __device__ static u32 signed_a(u32 word) { return word & 0x87878787u; }
    __device__ static u32 signed_b(u32 word) { return signed_a(__funnelshift_r(word, word, 4)); }
};

// 16 times the code: two's complement in the high nibble.
struct S8TwosComplementCodes {
    static constexpr bool kIntegerSums = true;
    static constexpr float kOutputScale = 0.0625f;
    static constexpr u32 kOne = 0x10101010u;

    __device__ static u32 signed_a(u32 word) { return word & 0xF0F0F0F0u; }
    __device__ static u32 signed_b(u32 word) { return (word << 4) & 0xF0F0F0F0u; }
};

struct S8Codes {
    static constexpr bool kIntegerSums = true;
    static constexpr float kOutputScale = 0.5f;
    static constexpr u32 kOne = 0x02020202u;

    // The complement of a negative code's nibble is twice the code.
    __device__ static u32 signed_a(u32 word) { return (word & 0x0F0F0F0Fu) ^ byte_sign_mask(word << 7); }
    __device__ static u32 signed_b(u32 word) { return signed_a(word >> 4); }
};

// kTimes times the code: 8 for sums by parts, which are then 128 * 16 at most as well.
template <u32 kTimes>
struct S8ZeroPointCodesOf {
    static constexpr bool kIntegerSums = true;
    static constexpr float kOutputScale = 1.0f / kTimes;
    static constexpr u32 kOne = 0x01010101u * kTimes, kFactor = kTimes;

    __device__ static u32 signed_of(u32 biased) { return biased ^ 0x80808080u; }
};
using S8ZeroPointCodes = S8ZeroPointCodesOf<1>;

// ---- codecs ---------------------------------------------------------------------------------------------------------

// 4-bit codes in the order of Codes, with a zero point for each row and chunk or none.
template <typename Codes, bool kHasZeros>
struct Int4Codec : Codes {
    static constexpr bool kSharedWeights = false;  // whether wgmma reads them from shared memory, not from registers
    static constexpr bool kZeroPoint = kHasZeros;
    static constexpr u32 kCodeBytes = kStripRows * kBlockK / 2;
    static constexpr u32 kMultiplierBytes = 0, kTableBytes = 0, kTerms = 1;
    static constexpr float kRunScale = 1.0f;  // by which a record's sums in f16 go to a run

    // Loads a record's codes and decodes them to the fragments of its four k-steps: registers 0 and 2 are row lane/4 at
    // k and k + 16, registers 1 and 3 row lane/4 + 8. `zeros` is the record's [kChunks][64] zero points.
    template <u32 kChunks>
    __device__ __forceinline__ static void load(u32 (&step)[4][4], u32 record, u32 zeros, const Position& position) {
        const uint4 first = load_shared_v4(record + position.thread * 16);
        const uint4 second = load_shared_v4(record + kWarpgroupVector + position.thread * 16);
        const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        const u32 row = position.warp * 16 + position.lane / 4;
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            u32 bias[2] = {};  // of the two rows: 128 - z times the codes' factor, in every byte
            if constexpr (kZeroPoint) {
                constexpr u32 kEach = 0x01010101u * Codes::kFactor;
                const u32 zero = zeros + chunk * kStripRows + row;
                bias[0] = 0x80808080u - load_shared_u8(zero) * kEach;
                bias[1] = 0x80808080u - load_shared_u8(zero + 8) * kEach;
            }
#pragma unroll
            for (u32 s = chunk * (4 / kChunks); s < (chunk + 1) * (4 / kChunks); ++s)
#pragma unroll
                for (u32 i = 0; i < 2; ++i) decode(step[s][i], step[s][i + 2], words[2 * s + i], bias[i], position);
        }
    }

    __device__ __forceinline__ static void decode(u32& set_a, u32& set_b, u32 word, u32 bias, const Position& position) {
        if constexpr (kZeroPoint) {
            // ptxas makes an addition of three of one, and of the other a shift with an addition.
            const u32 high = word & 0xF0F0F0F0u;
            set_a = Codes::signed_of((word - high) * Codes::kFactor + bias);
            set_b = Codes::signed_of((high / 16 * Codes::kFactor) + bias);
        } else {
            set_a = Codes::signed_a(word);
            set_b = Codes::signed_b(word);
        }
    }
};

// e2m1 codes (OCP MX: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign) times a power of two for each row and 32 k, which is a
// step. Records whose scales are for more than that hold exponents t: a code becomes code * 2^(t - 8), an e4m3 exactly
// for all t up to 14, its subnormals included. A table of eight bytes for each t has the magnitudes. Where a step has a
// scale of its own, the table of t = 8 is a constant.
//
// Exponents are nibbles, in a word for each two rows i and i + 8 of a warp's sixteen, in the order of warps and i.
// Rotated by 4, the word has row i + 8's where it had row i's:
//
//     byte b, bit   7 and, of byte b + 1, 2 1 0     6 5 4 3
//                   t of row i + 8, step b          t of row i, step b
//
// With kLow = 8 codes become 2^-8 of that, for sums in f16, which hold them where no t is below 8; and those of a record
// may be as large as f16's largest number, so that a run has an eighth of them (jitgemm/weight/f16_sums.py).
template <u32 kLow>
struct E2m1CodecOf {
    static constexpr bool kIntegerSums = false;
    static constexpr float kRunScale = kLow > 0 ? 0.125f : 1.0f;
    static constexpr float kOutputScale = (1 << kLow) / kRunScale;
    static constexpr bool kSharedWeights = false;
    static constexpr bool kZeroPoint = false;
    static constexpr u32 kOne = 0x38383838u;
    static constexpr u32 kCodeBytes = kStripRows * kBlockK / 2;
    static constexpr u32 kMultiplierBytes = kStripRows * 2;
    static constexpr u32 kTables = 15, kTableBytes = 128, kTerms = 1;

    // Bytes of the magnitudes of codes 0 to 3 and 4 to 7, times 2^(t - 8 - kLow); zeros for t below kLow.
    __device__ __forceinline__ static constexpr uint2 table(u32 t) {
        if (t < kLow) return {0, 0};
        t -= kLow;
        // Normal numbers count exponents from bit 3 on; 0 does not, and below 2^-6 bytes are multiples of 2^-9.
        const u32 low = t < 3 ? 0x03020100u << t : 0x14100800u + (t - 3) * 0x08080800u;
        const u32 high = t == 0 ? 0x0C080604u : 0x14100C08u + (t - 1) * 0x08080808u;
        return {low, high};
    }

    // 64 threads write the tables to shared memory.
    __device__ __forceinline__ static void prepare(u32 tables, u32 t) {
        if (t < kTables) store_shared_v2(tables + t * 8, table(t));
    }

    // As Int4Codec's. `exponents` is where the record's are; kChunks is 4 where it has none.
    template <u32 kChunks>
    __device__ __forceinline__ static void load(u32 (&step)[4][4], u32 record, u32 exponents,
                                                const Position& position) {
        u32 low_bytes = 0, high_bytes = 0;  // of each step, eight times the exponent
        if constexpr (kChunks < 4) {
            const u32 word = load_shared_u32(exponents + (position.warp * 8 + position.lane / 4) * 4);
            low_bytes = word & 0x78787878u;
            high_bytes = __funnelshift_r(word, word, 4) & 0x78787878u;
        }
        const uint4 first = load_shared_v4(record + position.thread * 16);
        const uint4 second = load_shared_v4(record + kWarpgroupVector + position.thread * 16);
        const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (u32 s = 0; s < 4; ++s) {
            uint2 low = table(8), high = low;
            if constexpr (kChunks < 4) {
                low = load_shared_v2(position.tables + permuted(low_bytes, 0, 0x4440 + s));
                high = load_shared_v2(position.tables + permuted(high_bytes, 0, 0x4440 + s));
            }
            decode(step[s][0], step[s][2], words[2 * s], low);
            decode(step[s][1], step[s][3], words[2 * s + 1], high);
        }
    }

    __device__ __forceinline__ static void decode(u32& set_a, u32& set_b, u32 word, uint2 table) {
        const u32 magnitudes = word & 0x77777777u;
        set_a = permuted(table.x, table.y, magnitudes) | (word & 0x80808080u);
        set_b = permuted(table.x, table.y, magnitudes >> 16) | (word << 4 & 0x80808080u);
    }
};

using E2m1Codec = E2m1CodecOf<0>;
using E2m1LowCodec = E2m1CodecOf<8>;

// A thread's part of a half of an NVFP4 record's steps: four scales of each of its two rows, and their codes.
struct Nvfp4Half {
    u32 bytes[2], words[4];

    __device__ __forceinline__ Nvfp4Half(u32 record, u32 scales, u32 half, const Position& position) {
        const u32 address = scales + (position.warp * 8 + position.lane / 4) * 16 + half * 4;
        bytes[0] = load_shared_u32(address), bytes[1] = load_shared_u32(address + 8);
        const uint4 codes = load_shared_v4(record + half * kWarpgroupVector + position.thread * 16);
        words[0] = codes.x, words[1] = codes.y, words[2] = codes.z, words[3] = codes.w;
    }
};

// e2m1 codes times an e4m3 scale for each row and 16 k, NVFP4's. That has up to six significant bits, and is the sum of
// two e5m2s: the upper three bits, and the rest. A table of sixteen bytes for each scale has the high terms of the
// magnitudes, then the low ones. The least term is 2^-10, and e5m2's least normal number 2^-14 (jitgemm/weight/terms.py).
// Shifts are multiplications, as the ALUs have the most to do (docs/notes/nvfp4.md).
//
// Scales. A thread takes the scales of its two rows and of half of the k:
//
//     [warp: 4][row: 8][row, row + 8: 2][group of 16 k: 8]
struct Nvfp4Codec {
    static constexpr bool kIntegerSums = false;
    static constexpr float kOutputScale = 1.0f;
    static constexpr bool kSharedWeights = false;
    static constexpr bool kZeroPoint = false;
    static constexpr u32 kOne = 0x3C3C3C3Cu;
    static constexpr u32 kCodeBytes = kStripRows * kBlockK / 2;
    static constexpr u32 kMultiplierBytes = kStripRows * kBlockK / 16;
    static constexpr u32 kTables = 128, kTableBytes = kTables * 16, kTerms = 2;

    // 64 threads write the tables to shared memory. A product is taken times 2^-112, so that the upper bits of its fp32
    // are e5m2's: a sign, five of exponent, and two of mantissa.
    __device__ __forceinline__ static void prepare(u32 tables, u32 thread) {
        constexpr float kUnit = 0x1p-104f;  // an e4m3's bits as f16 are 2^-8 of it
        constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
#pragma unroll
        for (u32 scale = thread; scale < kTables; scale += kTables / 2) {
            const float value = f16x2_to_floats(scale << 7).x;
            u32 words[4] = {};
#pragma unroll
            for (u32 i = 1; i < 8; ++i) {
                const float product = value * (kMagnitudes[i] * kUnit);
                const u32 high = __float_as_uint(product) & 0xFFE00000u;
                const u32 low = __float_as_uint(product - __uint_as_float(high));
                words[i / 4] |= high >> 21 << i % 4 * 8;
                words[2 + i / 4] |= low >> 21 << i % 4 * 8;
            }
            store_shared_v2(tables + scale * 16, {words[0], words[1]});
            store_shared_v2(tables + scale * 16 + 8, {words[2], words[3]});
        }
    }

    // As Int4Codec's, of both terms of a half of the record's steps. `scales` is where the record's are.
    __device__ __forceinline__ static void load(u32 (&high)[2][4], u32 (&low)[2][4], u32 record, u32 scales, u32 half,
                                                const Position& position) {
        const Nvfp4Half own(record, scales, half, position);
#pragma unroll
        for (u32 s = 0; s < 2; ++s)
#pragma unroll
            for (u32 row = 0; row < 2; ++row) {
                const u32 word = own.words[2 * s + row];
                const u32 magnitudes = word & 0x77777777u;
                const uint4 a = table(position, own.bytes[row], s * 2), b = table(position, own.bytes[row], s * 2 + 1);
                const u32 sign_a = word & 0x80808080u, sign_b = word & 0x08080808u;
                high[s][row] = permuted(a.x, a.y, magnitudes) | sign_a;
                low[s][row] = permuted(a.z, a.w, magnitudes) | sign_a;
                high[s][row + 2] = permuted(b.x, b.y, magnitudes >> 16) + sign_b * position.sixteen;
                low[s][row + 2] = permuted(b.z, b.w, magnitudes >> 16) + sign_b * position.sixteen;
            }
    }

    // That of a word's index-th scale.
    __device__ __forceinline__ static uint4 table(const Position& position, u32 scales, u32 index) {
        return load_shared_v4(position.tables + permuted(scales, 0, 0x4440 + index) * position.sixteen);
    }
};

// The same where a row's scales are near one another: next to a base, four of their powers of two are normal e4m3s, of
// which every code times a scale is the sum of two. A table of four bytes is a byte times 0x01010101 and a constant, so
// that nothing is looked up (docs/notes/nvfp4.md). With b the byte of half a scale:
//
//     nibble       bit 3: whether small is 0     bits 2 to 0: index of large     bits 1, 0: index of small
//     large        0, 1, 2, 4, -1, -2, -4, -8 times the scale: b + 8 i; 0 apart
//     small        0.5, 0.5, 1, 2 times the scale, or 0
//
// prmt itself makes the zeros of small: where a selector's bit 3 is set, it takes all bits from the byte's sign.
// Nibble i of a word is A_i, and from the fifth on B_(i-4). Records lie as Nvfp4Codec's, with b in the place of a scale.
struct Nvfp4NearCodec {
    static constexpr bool kIntegerSums = false;
    static constexpr float kOutputScale = 1.0f;
    static constexpr bool kSharedWeights = false;
    static constexpr bool kZeroPoint = false;
    static constexpr u32 kOne = 0x38383838u;
    static constexpr u32 kCodeBytes = kStripRows * kBlockK / 2;
    static constexpr u32 kMultiplierBytes = kStripRows * kBlockK / 16;
    static constexpr u32 kTableBytes = 0, kTerms = 2;

    // As Nvfp4Codec's.
    __device__ __forceinline__ static void load(u32 (&large)[2][4], u32 (&small)[2][4], u32 record, u32 scales,
                                                u32 half, const Position& position) {
        const Nvfp4Half own(record, scales, half, position);
#pragma unroll
        for (u32 s = 0; s < 2; ++s)
#pragma unroll
            for (u32 row = 0; row < 2; ++row) {
                const u32 word = own.words[2 * s + row], index = word & 0x77777777u;
                const u32 a = permuted(own.bytes[row], 0, 0x4440 + s * 2), b = permuted(own.bytes[row], 0, 0x4441 + s * 2);
                decode(large[s][row], small[s][row], index, word, a);
                decode(large[s][row + 2], small[s][row + 2], index >> 16, word >> 16, b);
            }
    }

    __device__ __forceinline__ static void decode(u32& large, u32& small, u32 index, u32 nibbles, u32 byte) {
        const u32 positive = times_plus<0x01010100u>(byte, 0x18100800u);
        const u32 negative = times_plus<0x01010101u>(byte, 0xA0989088u);
        const u32 small_bytes = times_plus<0x01010101u>(byte, 0x10080000u);
        large = permuted(positive, negative, index);
        small = permuted(small_bytes, small_bytes, nibbles);
    }
};

// Codes in two levels: minus a zero point, times a factor, for each row and record, they are integers of 8 bits. Four of
// them plus 128 are bytes of one multiplication, as borrows and carries of a word cancel where every byte is in range.
//
// Factors f and products with zero points, of rows i and i + 8 of a warp's sixteen, in the order of warps and i:
//
//     byte     0          1              2           3
//              f of i     f of i + 8     f * z       f * z of i + 8
struct TwoLevelCodec {
    static constexpr bool kIntegerSums = true;
    static constexpr float kOutputScale = 1.0f, kRunScale = 1.0f;
    static constexpr bool kSharedWeights = false;
    static constexpr bool kZeroPoint = false;
    static constexpr u32 kOne = 0x01010101u;
    static constexpr u32 kCodeBytes = kStripRows * kBlockK / 2;
    static constexpr u32 kMultiplierBytes = kStripRows * 2;
    static constexpr u32 kTableBytes = 0, kTerms = 1;

    // As Int4Codec's. `factors` is where the record's are.
    template <u32 kChunks>
    __device__ __forceinline__ static void load(u32 (&step)[4][4], u32 record, u32 factors, const Position& position) {
        static_assert(kChunks == 1, "a factor for a row and record");
        const u32 pairs = load_shared_u32(factors + (position.warp * 8 + position.lane / 4) * 4);
        const u32 factor[2] = {pairs & 0xFF, pairs >> 8 & 0xFF};
        const u32 bias[2] = {0x80808080u - (pairs >> 16 & 0xFF) * 0x01010101u, 0x80808080u - (pairs >> 24) * 0x01010101u};
        const uint4 first = load_shared_v4(record + position.thread * 16);
        const uint4 second = load_shared_v4(record + kWarpgroupVector + position.thread * 16);
        const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            u32(&operand)[4] = step[i / 2];
            const u32 row = i % 2;
            operand[row] = ((words[i] & 0x0F0F0F0Fu) * factor[row] + bias[row]) ^ 0x80808080u;
            operand[row + 2] = ((words[i] >> 4 & 0x0F0F0F0Fu) * factor[row] + bias[row]) ^ 0x80808080u;
        }
    }
};

// 8-bit codes of the activations' type.
template <bool kIntegers>
struct ByteCodec {
    static constexpr bool kIntegerSums = kIntegers;
    static constexpr float kOutputScale = 1.0f;
    static constexpr bool kSharedWeights = true;
    static constexpr bool kZeroPoint = false;
    static constexpr u32 kCodeBytes = kStripRows * kBlockK;
    static constexpr u32 kMultiplierBytes = 0, kTableBytes = 0, kTerms = 1;
};

// A weight record: 64 rows x 128 k of codes, then what belongs to its groups. A chunk is the part of the record's k
// that has scales of its own.
//
//     0        kScales                   kOffsets                    kZeros
//     | codes  | scales [scale_rows][64] | offsets [scale_rows][64]  | zero points uint8 [chunks][64] |
//                                                                    | or what decoding multiplies by |
template <typename Config>
struct Record {
    static constexpr u32 kChunks =
        Config::kGroupSize == 0 || Config::kGroupSize >= kBlockK ? 1 : kBlockK / Config::kGroupSize;
    static constexpr u32 kScaleRows = Config::kGroupSize == 0 ? 0 : kChunks;
    static constexpr u32 kRowOfScales = kStripRows * real_bytes(Config::kScaleType);
    static constexpr u32 kScales = Config::Codec::kCodeBytes;
    static constexpr u32 kOffsets = kScales + kScaleRows * kRowOfScales;
    static constexpr u32 kZeros = kOffsets + (Config::kOffset ? kScaleRows * kRowOfScales : 0);
    static constexpr bool kMultipliers = Config::Codec::kMultiplierBytes > 0 && kChunks < 4;
    static constexpr u32 kBytes = kZeros + (Config::Codec::kZeroPoint ? kChunks * kStripRows : 0) +
                                  (kMultipliers ? Config::Codec::kMultiplierBytes : 0);
};

}  // namespace jitgemm
