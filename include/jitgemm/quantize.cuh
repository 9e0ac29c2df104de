// Quantisation of activations to e4m3 or int8, row by row: one read of x, one write of q, the row in registers between.
//
//   y = x, act(gate) * up, max(x, 0)^2, or x * weight / sqrt(mean(x^2) + eps)       fp32, never rounded to x's type
//       kResidual: x + residual for x, rounded to x's type and written, too
//       kRotated: y H, see rotate()
//   scale = max(range of y / range of the codes, 2^-126),  or as given
//   q = round(y * (1 / scale)) + zero                                       to nearest even, saturated
//
// A row has one scale, or one for every 128 codes (kBlocks), which are those of 16 threads side by side.
//
// Every product, quotient and rounding outside of act() and the sum of squares is one IEEE operation in a fixed order,
// and so the same bits as in jitgemm/activations/reference.py: hence __fmul_rn and its like, which nothing contracts.
//
// A thread holds kVectors vectors of eight values, a row's vectors dealt out to its threads round-robin:
//
//   vector    0   1   2  ..  T-1 | T  T+1  ..  2T-1 | ..        T = threads of a row
//   thread    0   1   2  ..  T-1 | 0   1   ..   T-1 | ..
//
// With kRotated a thread's vectors are those of a block of 16, which it shares with 16 / kVectors lanes, dealt out to
// them in the same way, so that they exchange less: vectors 0, 4, 8 and 12 are thread 0's of 4.
//
// blockDim.y rows share a CTA when a warp suffices for each (kRows > 1). A long row may have the CTAs of a cluster
// (Team), if rows are so few that SMs would idle. CTAs or clusters walk the rows, each one in so many.
//
// What is written behind a row's codes is a policy, Sums: nothing (NoSums), or sums of groups (quantize_sums.cuh).
#pragma once
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/ptx/memory.cuh>

namespace jitgemm {

// Run-time arguments; jitgemm/activations/plan.py fills the same layout.
struct QuantizeArgs {
    const u8* x;               // [m][k], or [m][2k] of gates and ups
    u8* q;                     // [m][k], with sums more columns
    float* scale;              // [m]; kBlocks: [m][blocks of 128 k] with the strides below
    i32* zero;                 // [m], affine only
    const float* given_scale;  // one element, static only
    const i32* given_zero;     // one element, static affine only
    const u8* norm_weight;     // [k] of norm_weight_type, RMSNorm only
    const u32* permutation;    // [k], permuted only: column j of q is column permutation[j] of y
    const u32* row_count;      // one element, kActivated or gathered only: rows from there on are left; null: none.
                               // kMasked: how many of each rows_of_count rows are live, from the first on
    const u32* row_index;      // [m], gathered only: row i of q is that row of x
    const u8* residual;        // [m][k], kResidual only
    u8* sum;                   // [m][k], kResidual only: may be x or residual
    u64 x_row_bytes;
    u64 q_row_bytes;
    u32 m, k;
    float eps;
    i32 norm_weight_type;
    float gate_limit;  // limited only: gates are at most that, ups at most so far from 0; kSitu: of ups' tanh
    float gate_alpha;  // kSwigluOai, kSitu only
    u64 scale_row_stride;  // kBlocks only, in elements
    u64 scale_block_stride;
    u64 residual_row_bytes;  // kResidual only
    u64 sum_row_bytes;
    u64 rows_of_count;  // kMasked only
};
static_assert(sizeof(QuantizeArgs) == 176, "jitgemm/activations/plan.py packs this struct");

// What act() is, and where gates and ups lie: GATES and ORDERS of jitgemm/activations/kernel.py.
enum GateKind : i32 { kUngated, kSilu, kGelu, kGeluTanh, kSwigluOai, kSwigluStep, kSitu, kRelu2 };
enum GateOrder : i32 { kGateUp, kUpGate, kInterleaved };

constexpr u32 kVector = 8;          // values of a vector
constexpr u32 kMaxWarps = 32;       // of a CTA
constexpr u32 kBlockVectors = 16;   // that share a scale with kBlocks, and are rotated together with kRotated
constexpr u32 kAllLanes = 0xffffffffu;
constexpr u32 kInfinity = 0x7f800000u;
constexpr float kMinScale = 1.17549435e-38f;  // 2^-126: its reciprocal is finite, and 0 / scale is 0

// ---- single instructions --------------------------------------------------------------------------------------------

// Unsigned maximum of each half.
__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
    u32 result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Maximum that keeps NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Minimum that keeps NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ u32 warp_max(u32 value) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
    return result;
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Two values as e4m3 codes, `low` in the low byte; beyond 448 saturates, NaN stays NaN.
__device__ __forceinline__ u16 to_e4m3(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// To nearest even; NaN becomes 0, and what int32 does not hold its nearest end.
__device__ __forceinline__ i32 to_integer(float x) {
    i32 result;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
}

// Four integers saturated to int8, the first in the lowest byte.
__device__ __forceinline__ u32 to_int8(i32 a, i32 b, i32 c, i32 d) {
    u32 upper, codes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(d), "r"(c));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(codes) : "r"(b), "r"(a), "r"(upper));
    return codes;
}

// ---- vectors --------------------------------------------------------------------------------------------------------

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

template <RealType kType>
__device__ __forceinline__ Vector<kType> load_vector(const u8* source) {
    Vector<kType> vector;
#pragma unroll
    for (u32 part = 0; part < Vector<kType>::kBytes / 16; ++part) {
        u32 words[4];
        load_streamed(source + 16 * part, words);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) vector.words[4 * part + i] = words[i];
    }
    return vector;
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

// y is act() of something, with or without gates.
template <class Config>
constexpr bool kActivated = Config::kGate != kUngated;
// x holds gates and ups.
template <class Config>
constexpr bool kGated = kActivated<Config> && Config::kGate != kRelu2;

// Whether RMSNorm's weights of 16 bits come together with x, and not behind it: where registers suffice.
template <class Config>
constexpr bool kEarlyWeights = Config::kRmsNorm && Config::kVectors > 0 && !Config::kPermuted;

// The threads of a row: a warp, a CTA, or the kCtas CTAs of a cluster, side by side.
template <class Config>
struct Team {
    static constexpr bool kCluster = Config::kCtas > 1;
    u32 thread;   // of this one among them
    u32 threads;

    __device__ __forceinline__ Team()
        : thread((kCluster ? cluster_rank() * blockDim.x : 0) + threadIdx.x), threads(Config::kCtas * blockDim.x) {}

    // The other CTAs have started, and their barriers are there. Between the two there is time for something else.
    __device__ __forceinline__ static void start() {
        if constexpr (kCluster) cluster_arrive<true>();
    }
    __device__ __forceinline__ static void wait() {
        if constexpr (kCluster) cluster_wait();
    }

    // The i-th vector of this thread, of those kCount that each of them holds at once.
    template <u32 kCount>
    __device__ __forceinline__ u32 vector(u32 i) const {
        if constexpr (!Config::kRotated) return thread + i * threads;
        constexpr u32 kLanes = kBlockVectors / kCount;
        return thread / kLanes * kBlockVectors + i * kLanes + thread % kLanes;
    }
};

// What is read for a vector of y: the vector of x, and of the residual, or gates and ups, two vectors as they lie in x.
template <class Config>
struct Input {
    Vector<Config::kX> x[kGated<Config> || Config::kResidual ? 2 : 1];
    uint4 weights;  // kEarlyWeights only

    __device__ __forceinline__ float gate(u32 i) const {
        if constexpr (Config::kOrder == kInterleaved) return x[i / (kVector / 2)].value(2 * i % kVector);
        return x[Config::kOrder == kUpGate].value(i);
    }
    __device__ __forceinline__ float up(u32 i) const {
        if constexpr (Config::kOrder == kInterleaved) return x[i / (kVector / 2)].value(2 * i % kVector + 1);
        return x[Config::kOrder != kUpGate].value(i);
    }
};

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

// What a thread holds of y until the row's scale is known: x as it was read where y = x, else y (RMSNorm: y * rms;
// kRotated: y * 2^3.5) in fp32.
template <class Config>
using Held = Vector<kActivated<Config> || Config::kRmsNorm || Config::kRotated ? kFp32 : Config::kX>;

// `again`: transform() has been given the vector by this thread.
template <class Config>
__device__ __forceinline__ Input<Config> load(const QuantizeArgs& args, u32 row, u32 vector, bool again = false) {
    constexpr u32 kBytes = Vector<Config::kX>::kBytes;
    constexpr bool kInPairs = kGated<Config> && Config::kOrder == kInterleaved;
    if constexpr (Config::kGathered) row = args.row_index[row];
    const u8* source = args.x + row * args.x_row_bytes + vector * kBytes * (kInPairs ? 2 : 1);
    Input<Config> input;
    if constexpr (kEarlyWeights<Config>) {
        if (args.norm_weight_type != kFp32) input.weights = load_weights(args.norm_weight, vector);
    }
    if constexpr (Config::kResidual) {
        if (again) {
            source = args.sum + row * args.sum_row_bytes + vector * kBytes;
        } else {
            input.x[1] = load_vector<Config::kX>(args.residual + row * args.residual_row_bytes + vector * kBytes);
        }
    }
    input.x[0] = load_vector<Config::kX>(source);
    if constexpr (Config::kResidual && Config::kX == kFp32) {
        if (!again) input.x[0] = add(input.x[0], input.x[1]);  // holding both would take too many registers
    }
    if constexpr (kGated<Config>) {
        input.x[1] = load_vector<Config::kX>(source + (kInPairs ? kBytes : args.k / kVector * kBytes));
    }
    return input;
}

// ---- a row's range --------------------------------------------------------------------------------------------------

// What the scale of a row needs, of as much of the row as a thread, warp or CTA has seen. `high` and `low` are the bits
// of floats that are not negative, or NaN's without sign: as integers they are in the same order, NaN above infinity.
template <class Config>
struct Range {
    u32 high = 0;        // largest |y|; affine: largest y, at least 0
    u32 low = 0;         // affine: largest -y, at least 0
    float squares = 0;   // RMSNorm: sum of x^2

    template <class Values>
    __device__ __forceinline__ void include(const Values& y) {
        constexpr bool kPairs = sizeof(y.words) == 16;
        if constexpr (kPairs && !Config::kAffine) {
            u32 pair = y.words[0] & 0x7fff7fffu;
#pragma unroll
            for (u32 i = 1; i < 4; ++i) pair = max_halves(pair, y.words[i] & 0x7fff7fffu);
            const Vector<Config::kX> largest{{max(pair >> 16, pair & 0xffffu)}};
            high = max(high, __float_as_uint(largest.value(0)));
        } else if constexpr (Config::kAffine) {
            float highest = __uint_as_float(high), lowest = __uint_as_float(low);
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) {
                highest = max_nan(highest, y.value(i));
                lowest = max_nan(lowest, -y.value(i));
            }
            high = __float_as_uint(highest) & 0x7fffffffu;
            low = __float_as_uint(lowest) & 0x7fffffffu;
        } else {
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) high = max(high, __float_as_uint(y.value(i)) & 0x7fffffffu);
        }
    }

    // Includes a block of which each of its lanes has kOwn vectors, if it is live; all of them get the result. The whole
    // warp calls this.
    template <u32 kOwn, class Values>
    __device__ __forceinline__ void include_block(const Values* y, bool live) {
#pragma unroll
        for (u32 i = 0; i < kOwn; ++i) {
            if (live) include(y[i]);
        }
#pragma unroll
        for (u32 distance = kBlockVectors / kOwn / 2; distance > 0; distance /= 2)
            high = max(high, __shfl_xor_sync(kAllLanes, high, distance));
    }

    // Combines the lanes of a warp; all of them get the result.
    __device__ __forceinline__ void combine_lanes() {
        high = warp_max(high);
        if constexpr (Config::kAffine) low = warp_max(low);
        if constexpr (Config::kRmsNorm) {
#pragma unroll
            for (u32 distance = 16; distance > 0; distance /= 2) {
                squares = __fadd_rn(squares, __shfl_xor_sync(kAllLanes, squares, distance));
            }
        }
    }
};

// The warps' ranges of one row, each {high, low, squares, -}, and a barrier that counts them where they come from
// several CTAs.
struct WarpRanges {
    float4 range[kMaxWarps];
    u64 full;
};

// Combines the threads that share a row; all of them get the result. Consecutive rows use different `slots`, which are
// written again only when the whole team has read them: a warp sends the next row's range when its reads of this one are
// done.
template <class Config>
__device__ __forceinline__ void combine_threads(const Team<Config>& team, Range<Config>& range, WarpRanges (&slots)[2],
                                                u32 round) {
    range.combine_lanes();
    if constexpr (Config::kRows == 1) {
        const u32 own = team.thread / 32, lane = threadIdx.x % 32, warps = team.threads / 32;
        const u32 ranges = shared_address(slots[round % 2].range), full = shared_address(&slots[round % 2].full);
        const float high = __uint_as_float(range.high), low = __uint_as_float(range.low);
        if constexpr (!Team<Config>::kCluster) {
            if (lane == 0) store_shared_float4(ranges + 16 * own, high, low, range.squares, 0.0f);
            __syncthreads();
        } else {
            if (threadIdx.x == 0) barrier_expect_bytes(full, 16 * warps);
            if (lane < Config::kCtas)
                store_async_float4(map_to_rank(ranges + 16 * own, lane), high, low, range.squares, 0.0f,
                                   map_to_rank(full, lane));
            barrier_wait_for_cluster<false>(full, round / 2 % 2);
        }
        const float4 other = load_shared_float4(ranges + 16 * min(lane, warps - 1));
        if constexpr (Team<Config>::kCluster) loads_done();
        range.high = __float_as_uint(other.x), range.low = __float_as_uint(other.y);
        range.squares = lane < warps ? other.z : 0.0f;  // a maximum may count the last warp again
        range.combine_lanes();
    }
}

// ---- from x to y ----------------------------------------------------------------------------------------------------

// x * sigmoid(z), where exponent = -log2(e) * z.
__device__ __forceinline__ float gated_by_sigmoid(float x, float exponent) {
    return __fmul_rn(x, reciprocal_approximate(__fadd_rn(1.0f, exp2_approximate(exponent))));
}

// limit * tanh(x / limit)
__device__ __forceinline__ float soft_limit(float x, float limit) {
    return __fmul_rn(limit, tanhf(__fmul_rn(x, __fdiv_rn(1.0f, limit))));
}

template <class Config>
__device__ __forceinline__ float gate_times_up(const QuantizeArgs& args, float gate, float up) {
    constexpr float kLog2E = 1.44269504f;
    if constexpr (Config::kLimited && Config::kGate == kSitu) {
        up = soft_limit(up, args.gate_limit);
    } else if constexpr (Config::kLimited) {
        if constexpr (Config::kGate != kSwigluStep) gate = min_nan(gate, args.gate_limit);
        up = max_nan(min_nan(up, args.gate_limit), -args.gate_limit);
    }
    if constexpr (Config::kGate == kGelu) {
        return __fmul_rn(__fmul_rn(gate, normcdff(gate)), up);
    } else if constexpr (Config::kGate == kGeluTanh) {
        // (1 + tanh(z)) / 2 = sigmoid(2z), z = sqrt(2 / pi) * (x + 0.044715 x^3)
        const float inner = __fmul_rn(gate, __fmaf_rn(__fmul_rn(gate, gate), 0.044715f, 1.0f));
        return __fmul_rn(gated_by_sigmoid(gate, __fmul_rn(inner, -1.59576912f * kLog2E)), up);
    } else if constexpr (Config::kGate == kSwigluOai) {
        const float exponent = __fmul_rn(__fmul_rn(gate, args.gate_alpha), -kLog2E);
        return __fmul_rn(gated_by_sigmoid(gate, exponent), __fadd_rn(up, 1.0f));
    } else if constexpr (Config::kGate == kSitu) {
        return __fmul_rn(gated_by_sigmoid(soft_limit(gate, args.gate_alpha), __fmul_rn(gate, -kLog2E)), up);
    } else {
        float silu = gated_by_sigmoid(gate, __fmul_rn(gate, -kLog2E));
        if constexpr (Config::kLimited && Config::kGate == kSwigluStep) silu = min_nan(silu, args.gate_limit);
        return __fmul_rn(silu, up);
    }
}

template <RealType kType>
__device__ __forceinline__ void store_vector(u8* target, const Vector<kType>& vector) {
#pragma unroll
    for (u32 part = 0; part < Vector<kType>::kBytes / 16; ++part) {
        const u32* const words = vector.words + 4 * part;
        reinterpret_cast<uint4*>(target)[part] = {words[0], words[1], words[2], words[3]};
    }
}

// The vector of y without RMSNorm's factor, which is known only at the end of the row. `again` as load() had it.
template <class Config>
__device__ __forceinline__ Held<Config> transform(const QuantizeArgs& args, const Input<Config>& input, u32 row,
                                                  u32 vector, Range<Config>& range, bool again = false) {
    if constexpr (kGated<Config>) {
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) {
            y.words[i] = __float_as_uint(gate_times_up<Config>(args, input.gate(i), input.up(i)));
        }
        return y;
    } else if constexpr (kActivated<Config>) {
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) {
            const float positive = max_nan(input.x[0].value(i), 0.0f);
            y.words[i] = __float_as_uint(__fmul_rn(positive, positive));
        }
        return y;
    } else if constexpr (Config::kRmsNorm) {
        float weights[kVector];
        const i32 type = args.norm_weight_type;
        take_weights<kEarlyWeights<Config>>(args.norm_weight, vector, type, input.weights, weights);
        Vector<Config::kX> values = input.x[0];
        if constexpr (Config::kResidual) {
            if (!again) {
                if constexpr (Config::kX != kFp32) values = add(input.x[0], input.x[1]);
                store_vector(args.sum + row * args.sum_row_bytes + vector * sizeof(values), values);
            }
        }
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) {
            const float x = values.value(i);
            range.squares = __fmaf_rn(x, x, range.squares);
            y.words[i] = __float_as_uint(__fmul_rn(x, weights[i]));
        }
        return y;
    } else if constexpr (Config::kRotated) {
        Held<Config> y;
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) y.words[i] = __float_as_uint(input.x[0].value(i));
        return y;
    } else {
        return input.x[0];
    }
}

// y H * 2^3.5, where H has blocks of 128 on its diagonal:
//
//   H[i][j] = (-1)^popcount(i & j) * 2^-3.5            Sylvester's Hadamard matrix, orthogonal
//
// For d = 1, 2, 4, .. 64 in that order y[i] + y[i + d] and y[i] - y[i + d] take the places of both, bit d not in i, as
// butterfly() in jitgemm/weight/rotation.py has it. Of the distances a thread's vector has three, then come those
// between lanes, then those between its vectors. y: a thread's of one block; the whole warp calls this.
template <u32 kCount>
__device__ __forceinline__ void rotate(Vector<kFp32> (&y)[kCount]) {
    auto value = [&](u32 i) -> u32& { return y[i / kVector].words[i % kVector]; };
    auto add_own = [&](u32 distance) {
#pragma unroll
        for (u32 i = 0; i < kCount * kVector; ++i) {
            if (i & distance) continue;
            const float low = __uint_as_float(value(i)), high = __uint_as_float(value(i + distance));
            value(i) = __float_as_uint(__fadd_rn(low, high));
            value(i + distance) = __float_as_uint(__fsub_rn(low, high));
        }
    };
#pragma unroll
    for (u32 distance = 1; distance < kVector; distance *= 2) add_own(distance);
#pragma unroll
    for (u32 distance = 1; distance < kBlockVectors / kCount; distance *= 2) {
        const float sign = threadIdx.x & distance ? -1.0f : 1.0f;
#pragma unroll
        for (u32 i = 0; i < kCount * kVector; ++i) {
            const float own = __uint_as_float(value(i)), other = __shfl_xor_sync(kAllLanes, own, distance);
            value(i) = __float_as_uint(__fmaf_rn(own, sign, other));  // one rounding: a sum or a difference
        }
    }
#pragma unroll
    for (u32 distance = kVector; distance < kCount * kVector; distance *= 2) add_own(distance);
}

// ---- from y to codes ------------------------------------------------------------------------------------------------

template <class Config>
struct Quantizer {
    static constexpr float kRotation = Config::kRotated ? 0.0883883461f : 1.0f;  // 2^-3.5, which rotate() left out

    float norm;     // RMSNorm: 1 / sqrt(mean + eps)
    float scale;    // as the row's scale is returned
    float inverse;  // 1 / scale
    i32 zero;

    __device__ __forceinline__ Quantizer(const QuantizeArgs& args, const Range<Config>& range) {
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
            scale = *args.given_scale;
            if constexpr (Config::kAffine) zero = *args.given_zero;
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

// ---- permutation ----------------------------------------------------------------------------------------------------

// The sources of eight codes, two to a word. Rows that are held have at most 2^15 columns.
struct Sources {
    u32 pairs[kVector / 2];
};

__device__ __forceinline__ Sources load_sources(const u32* permutation, u32 vector) {
    const uint4* source = reinterpret_cast<const uint4*>(permutation) + 2 * vector;
    const uint4 low = source[0], high = source[1];
    return {{low.x | low.y << 16, low.z | low.w << 16, high.x | high.y << 16, high.z | high.w << 16}};
}

__device__ __forceinline__ u32 gather(const u8* row, u32 a, u32 b, u32 c, u32 d) {
    return row[a] | row[b] << 8 | row[c] << 16 | static_cast<u32>(row[d]) << 24;
}

// Eight codes out of a row of them in shared memory.
__device__ __forceinline__ uint2 gather_codes(const u8* row, const Sources& from) {
    const u32(&p)[4] = from.pairs;
    return {gather(row, p[0] & 0xffffu, p[0] >> 16, p[1] & 0xffffu, p[1] >> 16),
            gather(row, p[2] & 0xffffu, p[2] >> 16, p[3] & 0xffffu, p[3] >> 16)};
}

__device__ __forceinline__ uint2 gather_codes(const u8* row, const u32* permutation, u32 vector) {
    const uint4* source = reinterpret_cast<const uint4*>(permutation) + 2 * vector;
    const uint4 low = source[0], high = source[1];
    return {gather(row, low.x, low.y, low.z, low.w), gather(row, high.x, high.y, high.z, high.w)};
}

template <class Config>
__device__ __forceinline__ void sync_row() {
    if constexpr (Config::kRows == 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

__device__ __forceinline__ void store_codes(u8* row, u32 vector, uint2 codes) {
    reinterpret_cast<uint2*>(row)[vector] = codes;
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

// Of codes on their way to be permuted there are no sums yet.
template <class Config, class Sums, bool kPermuted = Config::kPermuted>
struct Unpermuted {
    using Type = Sums;
};
template <class Config, class Sums>
struct Unpermuted<Config, Sums, true> {
    using Type = NoSums;
};

// The thread's vectors of a row, by a permutation that is read again.
template <class Sums>
__device__ __forceinline__ void gather_row(const QuantizeArgs& args, const u8* permuted, u8* out) {
#pragma unroll 1
    for (u32 vector = threadIdx.x; vector < Sums::end(args.k / kVector); vector += blockDim.x) {
        uint2 codes{0, 0};
        if (!Sums::kWholeWarps || vector < args.k / kVector) codes = gather_codes(permuted, args.permutation, vector);
        Sums::store(out, args.k, vector, codes);
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

template <class Config>
__device__ __forceinline__ void store_scale(const QuantizeArgs& args, const Team<Config>& team, u32 row,
                                            const Quantizer<Config>& quantizer) {
    if (team.thread == 0) {
        args.scale[row] = quantizer.scale;
        if constexpr (Config::kAffine) args.zero[row] = quantizer.zero;
    }
}

// Rows to quantise.
template <class Config>
__device__ __forceinline__ u32 live_rows(const QuantizeArgs& args) {
    if constexpr (Config::kMasked || (!kActivated<Config> && !Config::kGathered)) return args.m;
    return args.row_count == nullptr ? args.m : min(args.m, *args.row_count);
}

// The first live row of row, row + step, ..., or one that is not below args.m.
template <class Config>
__device__ __forceinline__ u32 live_row(const QuantizeArgs& args, u32 row, u32 step) {
    if constexpr (Config::kMasked) {
        const u32 rows = static_cast<u32>(args.rows_of_count);
        while (row < args.m && row % rows >= args.row_count[row / rows]) row += step;
    }
    return row;
}

// Rows that fit the registers of their threads; the next row is read while one is worked on.
template <class Config, class Sums>
__device__ __forceinline__ void quantize_held_rows(const QuantizeArgs& args, const Team<Config>& team,
                                                   WarpRanges (&slots)[2], u8* permuted, u32 block, u32 blocks) {
    using Now = typename Unpermuted<Config, Sums>::Type;
    constexpr u32 kVectors = Config::kVectors;
    const u32 m = live_rows<Config>(args), vectors = args.k / kVector, step = blocks * Config::kRows;
    u32 row = live_row<Config>(args, block * Config::kRows + threadIdx.y, step);
    auto mine = [&](u32 i) { return team.template vector<kVectors>(i); };
    auto live = [&](u32 i) { return mine(Config::kRotated ? 0 : i) < vectors; };  // to rotate: all or none of a thread's

    Input<Config> input[kVectors];
    auto load_row = [&](u32 of) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (live(i)) input[i] = load<Config>(args, of, mine(i));
        }
    };
    if (row < m) load_row(row);
    team.wait();
    Sources sources[Config::kSourcesHeld ? kVectors : 1];
    if constexpr (Config::kSourcesHeld) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (live(i)) sources[i] = load_sources(args.permutation, mine(i));
        }
    }

    for (u32 round = 0, next; row < m; row = next, ++round) {
        Range<Config> range;
        Held<Config> y[kVectors];
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (live(i)) {
                y[i] = transform(args, input[i], row, mine(i), range);
                if constexpr (!Config::kRotated) range.include(y[i]);
            }
        }
        if constexpr (Config::kRotated) {
            rotate(y);
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (live(i)) range.include(y[i]);
            }
        }
        next = live_row<Config>(args, row + step, step);
        if (next < m) load_row(next);
        combine_threads(team, range, slots, round);
        const Quantizer<Config> quantizer(args, range);
        store_scale(args, team, row, quantizer);

        u8* const out = args.q + row * args.q_row_bytes;
        u8* const target = Config::kPermuted ? permuted : out;
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            uint2 codes{0, 0};
            if (live(i)) codes = quantizer.codes(y[i]);
            if (Now::kWholeWarps || live(i)) Now::store(target, args.k, mine(i), codes);
        }
        if constexpr (Config::kPermuted) {
            // Codes are permuted, not values: a byte each. The next row's codes come after the barrier of its range.
            sync_row<Config>();
            if constexpr (Config::kSourcesHeld) {
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    uint2 codes{0, 0};
                    if (live(i)) codes = gather_codes(permuted, sources[i]);
                    if (Sums::kWholeWarps || live(i)) Sums::store(out, args.k, mine(i), codes);
                }
            } else {
                gather_row<Sums>(args, permuted, out);
            }
            if constexpr (Config::kRows > 1) sync_row<Config>();  // one warp's range needs no barrier
        }
        Sums::finish(out, args.k, team.thread);
    }
}

// Longer rows are read twice, the second time from the L2; with a residual, the sum.
template <class Config, class Sums>
__device__ __forceinline__ void quantize_long_rows(const QuantizeArgs& args, const Team<Config>& team,
                                                   WarpRanges (&slots)[2], u8* permuted, u32 block, u32 blocks) {
    using Now = typename Unpermuted<Config, Sums>::Type;
    const u32 m = live_rows<Config>(args), vectors = args.k / kVector;
    const u32 end = Config::kRotated ? (vectors + 31) / 32 * 32 : vectors;  // whole warps rotate
    auto live = [&](u32 vector) { return !Config::kRotated || vector < vectors; };
    u32 round = 0;
    for (u32 row = live_row<Config>(args, block, blocks); row < m;
         row = live_row<Config>(args, row + blocks, blocks), ++round) {
        Range<Config> range;
        auto read = [&](u32 vector, bool again) -> Held<Config> {
            auto one = [&] {
                return transform(args, load<Config>(args, row, vector, again), row, vector, range, again);
            };
            if constexpr (!Config::kRotated) return one();
            Held<Config> y[1];
            if (vector < vectors) y[0] = one();
            if constexpr (Config::kRotated) rotate(y);
            return y[0];
        };
#pragma unroll 2
        for (u32 vector = threadIdx.x; vector < end; vector += blockDim.x) {
            const Held<Config> y = read(vector, false);
            if (live(vector)) range.include(y);
        }
        combine_threads(team, range, slots, round);
        const Quantizer<Config> quantizer(args, range);
        store_scale(args, team, row, quantizer);

        u8* const out = args.q + row * args.q_row_bytes;
        u8* const target = Config::kPermuted ? permuted : out;
#pragma unroll 2
        for (u32 vector = threadIdx.x; vector < Now::end(end); vector += blockDim.x) {
            const u32 own = Now::kWholeWarps ? min(vector, vectors - 1) : vector;  // loads behind no branch overlap
            uint2 codes = quantizer.codes(read(own, true));
            if (Now::kWholeWarps && vector >= vectors) codes = {0, 0};
            if (live(vector)) Now::store(target, args.k, vector, codes);
        }
        if constexpr (Config::kPermuted) {
            sync_row<Config>();
            gather_row<Sums>(args, permuted, out);
        }
        Sums::finish(out, args.k, team.thread);
    }
}

// Rows with a scale for each block of 128 codes. Only RMSNorm and a permutation make a row's threads wait for one
// another; permuted rows lie in shared memory as values, since a block's codes come from anywhere in the row.
template <class Config>
__device__ __forceinline__ void quantize_blocks(const QuantizeArgs& args, const Team<Config>& team,
                                                WarpRanges (&slots)[2], float* values, u32 block, u32 blocks) {
    constexpr bool kHeld = Config::kVectors > 0;  // the threads hold the row
    constexpr bool kLarge = Config::kRotated && Config::kX == kFp32;  // two vectors of gates, ups and sums would spill
    constexpr u32 kVectors = kHeld ? Config::kVectors : Config::kPermuted || Config::kResidual || kLarge ? 1 : 2;
    constexpr u32 kOwn = Config::kRotated ? kVectors : 1;  // of a thread's vectors, that are of one block
    const u32 m = live_rows<Config>(args), vectors = args.k / kVector, step = kVectors * team.threads;
    const u32 rows = blocks * Config::kRows;
    auto mine = [&](u32 first, u32 i) { return first + team.template vector<kVectors>(i); };
    team.wait();
    u32 round = 0;
    for (u32 row = live_row<Config>(args, block * Config::kRows + threadIdx.y, rows); row < m;
         row = live_row<Config>(args, row + rows, rows), ++round) {
        Range<Config> range;
        Held<Config> y[kVectors];
        auto read = [&](u32 first, bool again) {
            Input<Config> input[kVectors];
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(first, i) < vectors) input[i] = load<Config>(args, row, mine(first, i), again);
            }
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(first, i) < vectors) y[i] = transform(args, input[i], row, mine(first, i), range, again);
            }
        };
        auto keep = [&](u32 first) {
#pragma unroll
            for (u32 i = 0; i < kVectors * kVector; ++i) {
                const u32 vector = mine(first, i / kVector);
                if (vector < vectors) values[vector * kVector + i % kVector] = y[i / kVector].value(i % kVector);
            }
        };
        float squares = 0;
        // The vectors of a block that this thread has; the whole warp calls this.
        auto write = [&](const auto* of, u32 vector) {
            Range<Config> part;
            part.template include_block<kOwn>(of, vector < vectors);
            part.squares = squares;
            if (vector >= vectors) return;
            const Quantizer<Config> quantizer(args, part);
#pragma unroll
            for (u32 i = 0; i < kOwn; ++i) {
                const u32 at = vector + i * (kBlockVectors / kOwn);
                store_codes(args.q + row * args.q_row_bytes, at, quantizer.codes(of[i]));
            }
            const u64 at = row * args.scale_row_stride + vector / kBlockVectors * args.scale_block_stride;
            if (vector % kBlockVectors == 0) args.scale[at] = quantizer.scale;
        };
        if constexpr (Config::kRmsNorm) {
            for (u32 first = 0; first < vectors; first += step) {
                read(first, false);
                if constexpr (Config::kPermuted) keep(first);
            }
            combine_threads(team, range, slots, round);
            squares = range.squares;
        }
        if constexpr (!Config::kPermuted) {
            for (u32 first = 0; first < vectors; first += step) {
                if constexpr (!(Config::kRmsNorm && kHeld)) read(first, Config::kRmsNorm);
                if constexpr (Config::kRotated) rotate(y);
#pragma unroll
                for (u32 i = 0; i < kVectors; i += kOwn) write(y + i, mine(first, i));
            }
        } else {
            for (u32 first = 0; !Config::kRmsNorm && first < vectors; first += step) {
                read(first, false);
                keep(first);
            }
            sync_row<Config>();
            for (u32 first = 0; first < vectors; first += blockDim.x) {
                Vector<kFp32> of;
                const u32 vector = mine(first, 0);
#pragma unroll
                for (u32 j = 0; vector < vectors && j < kVector; ++j)
                    of.words[j] = __float_as_uint(values[args.permutation[vector * kVector + j]]);
                write(&of, vector);
            }
            sync_row<Config>();
        }
    }
}

// Prefetches into the L2 the weights that a row needs; other kernels' weights may have evicted them. Runs before the wait
// for the previous grid: what that grid still writes goes through the L2, too.
template <class Config>
__device__ __forceinline__ void prefetch_weights(const QuantizeArgs& args, const Team<Config>& team) {
    const u32 bytes = kVector * (args.norm_weight_type == kFp32 ? 4 : 2);
#pragma unroll
    for (u32 i = 0; i < Config::kVectors; ++i) {
        const u32 vector = team.thread + i * team.threads;
        if (vector < args.k / kVector) prefetch_l2(args.norm_weight + vector * bytes);
    }
}

// The part of CTA `block` of `blocks`, or of a cluster. Sums: not with kBlocks.
template <class Config, class Sums = NoSums>
__device__ __forceinline__ void quantize_rows(const QuantizeArgs& args, u32 block, u32 blocks) {
    __shared__ WarpRanges slots[2];
    extern __shared__ __align__(16) u8 permuted[];  // [kRows][k] codes, or values with kBlocks; permuted only

    // First of all, so that a GEMM behind this kernel fetches its weights meanwhile; it waits for the end of this grid,
    // and so, because every thread here waits too, for the end of those before.
    launch_next_grid();
    const Team<Config> team;
    if (Team<Config>::kCluster && threadIdx.x == 0) {
        for (WarpRanges& each : slots) barrier_init(shared_address(&each.full), 1);
        barrier_init_fence();
    }
    team.start();
    if constexpr (Config::kRmsNorm && Config::kVectors > 0) prefetch_weights<Config>(args, team);
    wait_for_previous_grid();

    u8* const row_of_codes = permuted + threadIdx.y * args.k;
    if constexpr (Config::kBlocks) {
        float* const values = reinterpret_cast<float*>(permuted) + threadIdx.y * args.k;
        quantize_blocks<Config>(args, team, slots, values, block, blocks);
    } else if constexpr (Config::kVectors > 0) {
        quantize_held_rows<Config, Sums>(args, team, slots, row_of_codes, block, blocks);
    } else {
        quantize_long_rows<Config, Sums>(args, team, slots, row_of_codes, block, blocks);
    }
}

}  // namespace jitgemm
