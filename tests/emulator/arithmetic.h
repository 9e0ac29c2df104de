// What instructions compute lane by lane: numbers, conversions, comparisons.
#pragma once
#include "state.h"

namespace {

// ---- arithmetic -----------------------------------------------------------------------------------------------------

template <class T, class F>
Next unary(Warp& w, const Instruction& in, u32 lanes, F f) {
    each(lanes, [&](u32 l) { put(w, in.operands[0], l, bits_of(f(get<T>(w, in.operands[1], l)))); });
    return Next::kOn;
}

template <class T, class F>
Next binary(Warp& w, const Instruction& in, u32 lanes, F f) {
    each(lanes, [&](u32 l) {
        put(w, in.operands[0], l, bits_of(f(get<T>(w, in.operands[1], l), get<T>(w, in.operands[2], l))));
    });
    return Next::kOn;
}

template <class T, class F>
Next ternary(Warp& w, const Instruction& in, u32 lanes, F f) {
    each(lanes, [&](u32 l) {
        const auto& o = in.operands;
        put(w, o[0], l, bits_of(f(get<T>(w, o[1], l), get<T>(w, o[2], l), get<T>(w, o[3], l))));
    });
    return Next::kOn;
}

float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

u16 to_half(float x) { return bits_of(static_cast<_Float16>(x)); }
float from_half(u16 x) { return static_cast<float>(as<_Float16>(x)); }

u16 to_bf16(float x) {
    const u32 bits = bits_of(x);
    if (std::isnan(x)) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

u8 to_e4m3(float x) {
    const u8 sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7f;
    const float size = std::fabs(x);
    if (size >= 464) return sign | 0x7e;  // rounds beyond 448: saturated
    int exponent = size == 0 ? -6 : std::ilogb(size);
    if (exponent < -6) exponent = -6;
    const float steps = std::nearbyint(std::ldexp(size, 3 - exponent));  // to nearest even: the default mode
    const float rounded = std::ldexp(steps, exponent - 3);
    if (rounded > 448) return sign | 0x7e;
    if (rounded < 0.015625f) return sign | u8(std::ldexp(rounded, 9));
    const int e = std::ilogb(rounded);
    return sign | u8((e + 7) << 3 | (int(std::ldexp(rounded, 3 - e)) & 7));
}

double from_e4m3(u8 code) {
    const int e = code >> 3 & 15, m = code & 7;
    if ((code & 0x7f) == 0x7f) return std::nan("");
    const double size = e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
    return code & 0x80 ? -size : size;
}

double from_e5m2(u8 code) {
    const int e = code >> 2 & 31, m = code & 3;
    if (e == 31) return m ? std::nan("") : code & 0x80 ? -HUGE_VAL : HUGE_VAL;
    const double size = e ? std::ldexp(4 + m, e - 17) : std::ldexp(m, -16);
    return code & 0x80 ? -size : size;
}

i64 saturated(double x, double low, double high) {
    if (std::isnan(x)) return 0;
    return i64(x < low ? low : x > high ? high : x);
}

// ---- conversions ----------------------------------------------------------------------------------------------------

// Types as codes: 'f', 'h' (f16), 's', 'u' and bytes.
struct Type {
    char letter;
    u32 bytes;
};

Type type_of(const std::string& name) {
    const u32 bits = std::stoul(name.substr(1));
    const char letter = name[0] == 'b' ? 'u' : name[0] == 'f' && bits == 16 ? 'h' : name[0];
    return {letter, bits / 8};
}

u64 truncated(u64 value, u32 bytes) { return bytes == 8 ? value : value & ((1ull << 8 * bytes) - 1); }

i64 extended(u64 value, Type type) {
    const u32 shift = 64 - 8 * type.bytes;
    return type.letter == 's' ? i64(value << shift) >> shift : i64(value << shift >> shift);
}

// in.a, in.b: codes of the types; operands[2], a value: rounding, 0 none, 1 to nearest, 2 to zero.
Next convert(Warp& w, const Instruction& in, u32 lanes) {
    const Type to{char(in.a & 255), in.a >> 8}, from{char(in.b & 255), in.b >> 8};
    const u64 rounding = in.operands.back().value;
    each(lanes, [&](u32 l) {
        const u64 bits = get(w, in.operands[1], l);
        u64 result;
        if (from.letter == 'f' || from.letter == 'h') {
            float x = from.letter == 'f' ? as<float>(bits) : from_half(u16(bits));
            if (rounding == 1 && to.letter != 'h') x = std::nearbyint(x);
            if (rounding == 2) x = std::trunc(x);
            if (to.letter == 'f') result = bits_of(x);
            else if (to.letter == 'h') result = to_half(x);
            else if (to.letter == 's') result = truncated(u64(saturated(x, -std::ldexp(1.0, 8 * to.bytes - 1),
                                                                 std::ldexp(1.0, 8 * to.bytes - 1) - 1)), to.bytes);
            else result = u64(saturated(x, 0, std::ldexp(1.0, 8 * to.bytes) - 1));
        } else {
            const i64 x = extended(bits, from);
            if (to.letter == 'f') result = bits_of(from.letter == 's' ? float(x) : float(u64(x)));
            else result = truncated(u64(x), to.bytes);
        }
        put(w, in.operands[0], l, result);
    });
    return Next::kOn;
}

// ---- handlers of expressions ----------------------------------------------------------------------------------------

#define UNARY(type, expression)                                                                \
    [](Warp& w, const Instruction& in, u32 lanes) {                                            \
        return unary<type>(w, in, lanes, [](type a) { return expression; });                   \
    }
#define BINARY(type, expression)                                                               \
    [](Warp& w, const Instruction& in, u32 lanes) {                                            \
        return binary<type>(w, in, lanes, [](type a, type b) { return expression; });          \
    }
#define TERNARY(type, expression)                                                              \
    [](Warp& w, const Instruction& in, u32 lanes) {                                            \
        return ternary<type>(w, in, lanes, [](type a, type b, type c) { return expression; }); \
    }

u32 bytewise_difference(u32 a, u32 b) {
    u32 result = 0;
    for (u32 i = 0; i < 32; i += 8) result |= u32(std::abs(i32(a >> i & 255) - i32(b >> i & 255))) << i;
    return result;
}

u32 reversed(u32 a) {
    u32 result = 0;
    for (u32 i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
    return result;
}

u32 permuted(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 pick = selector >> 4 * i & 15, byte = u32(bytes >> 8 * (pick & 7)) & 255;
        result |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}

// c and the products of the bytes of a and b, which have signs.
u32 dot_of_bytes(u32 a, u32 b, u32 c) {
    for (u32 shift = 0; shift < 32; shift += 8) c += u32(std::int8_t(a >> shift) * std::int8_t(b >> shift));
    return c;
}

u32 packed_s8(i32 a, i32 b, u32 c) {
    auto code = [](i32 x) { return u32(x < -128 ? -128 : x > 127 ? 127 : x) & 255; };
    return c << 16 | code(a) << 8 | code(b);
}

float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? std::nanf("") : a > b ? a : b; }
float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? std::nanf("") : a < b ? a : b; }

// Of halves 0 and 16 bits up.
float half_at(u32 pair, u32 at) { return from_half(u16(pair >> at)); }

// a * b + c, rounded once: the sum is exact in the 64 bits of long double, from 2^-48 to f16's largest.
u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (u32 at = 0; at < 32; at += 16) {
        const long double sum = (long double)half_at(a, at) * half_at(b, at) + half_at(c, at);
        result |= u32(bits_of(static_cast<_Float16>(sum))) << at;
    }
    return result;
}

u32 max_halves(u32 a, u32 b) { return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff); }

template <class T>
Handler integer_handler(const std::string& name) {
    using S = std::make_signed_t<T>;
    constexpr T kBits = 8 * sizeof(T);
    if (name == "add") return BINARY(T, T(a + b));
    if (name == "sub") return BINARY(T, T(a - b));
    if (name == "mul") return BINARY(T, T(a * b));
    if (name == "mad") return TERNARY(T, T(a * b + c));
    if (name == "and") return BINARY(T, T(a & b));
    if (name == "or") return BINARY(T, T(a | b));
    if (name == "xor") return BINARY(T, T(a ^ b));
    if (name == "min.u") return BINARY(T, std::min(a, b));
    if (name == "max.u") return BINARY(T, std::max(a, b));
    if (name == "min.s") return BINARY(S, std::min(a, b));
    if (name == "max.s") return BINARY(S, std::max(a, b));
    if (name == "div.u") return BINARY(T, b ? T(a / b) : T(-1));
    if (name == "rem.u") return BINARY(T, b ? T(a % b) : a);
    if (name == "mov") return UNARY(T, a);
    // A shift's distance has 32 bits.
    if (name == "shl")
        return [](Warp& w, const Instruction& in, u32 lanes) {
            each(lanes, [&](u32 l) {
                const u32 by = u32(get(w, in.operands[2], l));
                put(w, in.operands[0], l, by >= kBits ? 0 : u64(T(get<T>(w, in.operands[1], l) << by)));
            });
            return Next::kOn;
        };
    if (name == "shr.u" || name == "shr.s") {
        if (name == "shr.u")
            return [](Warp& w, const Instruction& in, u32 lanes) {
                each(lanes, [&](u32 l) {
                    const u32 by = u32(get(w, in.operands[2], l));
                    put(w, in.operands[0], l, by >= kBits ? 0 : u64(T(get<T>(w, in.operands[1], l) >> by)));
                });
                return Next::kOn;
            };
        return [](Warp& w, const Instruction& in, u32 lanes) {
            each(lanes, [&](u32 l) {
                const u32 by = std::min(u32(get(w, in.operands[2], l)), u32(kBits - 1));
                put(w, in.operands[0], l, u64(T(get<S>(w, in.operands[1], l) >> by)));
            });
            return Next::kOn;
        };
    }
    return nullptr;
}

template <class T>
Handler comparison(const std::string& name) {
    if (name == "eq") return BINARY(T, u8(a == b));
    if (name == "equ") return BINARY(T, u8(!(a < b || a > b)));
    if (name == "ne" || name == "neu") return BINARY(T, u8(a != b));
    if (name == "lt") return BINARY(T, u8(a < b));
    if (name == "le") return BINARY(T, u8(a <= b));
    if (name == "gt") return BINARY(T, u8(a > b));
    if (name == "ge") return BINARY(T, u8(a >= b));
    // Floats: true where one of them is NaN.
    if (name == "ltu") return BINARY(T, u8(!(a >= b)));
    if (name == "leu") return BINARY(T, u8(!(a > b)));
    if (name == "gtu") return BINARY(T, u8(!(a <= b)));
    if (name == "geu") return BINARY(T, u8(!(a < b)));
    if (name == "nan") return BINARY(T, u8(a != a || b != b));
    return nullptr;
}

Handler comparison_of(const std::string& name, const std::string& type) {
    if (name == "ne" && type == "f32") return BINARY(float, u8(a < b || a > b));
    if (type == "f32") return comparison<float>(name);
    const Type t = type_of(type);
    const bool sign = t.letter == 's';
    if (t.bytes == 2) return sign ? comparison<int16_t>(name) : comparison<u16>(name);
    if (t.bytes == 4) return sign ? comparison<i32>(name) : comparison<u32>(name);
    return sign ? comparison<i64>(name) : comparison<u64>(name);
}

Handler integer_of(const std::string& name, u32 bytes) {
    return bytes == 2 ? integer_handler<u16>(name)
                      : bytes == 4 ? integer_handler<u32>(name) : integer_handler<u64>(name);
}

}  // namespace
