// The quantiser's arguments, what follows from its constants, and the threads of a row.
#pragma once
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/quantize/vector.cuh>

namespace jitgemm {

// Run-time arguments; jitgemm/activations/plan.py fills the same layout.
struct QuantizeArgs {
    const u8* x;               // [m][k], or [m][2k] of gates and ups
    u8* q;                     // [m][k], with sums more columns
    float* scale;              // [m]; kBlocks: [m][blocks of 128 k] with the strides below
    i32* zero;                 // [m], affine only
    const float* given_scale;  // static only: of row i at i * given_stride, as the zero point
    const i32* given_zero;     // static affine only
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
    u64 given_stride;   // kStatic only, in elements: 0 for one that all rows share
};
static_assert(sizeof(QuantizeArgs) == 184, "jitgemm/activations/plan.py packs this struct");

// What act() is, and where gates and ups lie: GATES and ORDERS of jitgemm/activations/kernel.py.
enum GateKind : i32 { kUngated, kSilu, kGelu, kGeluTanh, kSwigluOai, kSwigluStep, kSitu, kRelu2 };
enum GateOrder : i32 { kGateUp, kUpGate, kInterleaved };

constexpr u32 kMaxWarps = 32;       // of a CTA
constexpr u32 kBlockVectors = 16;   // that share a scale with kBlocks, and are rotated together with kRotated

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

}  // namespace jitgemm
