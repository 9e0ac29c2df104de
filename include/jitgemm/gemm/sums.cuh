// Sums over the splits of k: a reduce-scatter in two steps. First the warpgroups along k of a CTA sum up a span of the
// tokens each, through its shared memory; then each sends the other CTAs of the cluster their slices of its span, at a
// sixth of that rate (docs/notes/sums.md). With two of both:
//
//     CTA 0, along k 0   span 0 = slices 0, 1 of CTA 0   -- slice 1 -->   stores slice 0
//            along k 1   span 1 = slices 2, 3 of CTA 0   -- slice 3 -->   stores slice 2
//     CTA 1, along k 0   span 0 = slices 0, 1 of CTA 1   -- slice 0 -->   stores slice 1
//            along k 1   span 1 = slices 2, 3 of CTA 1   -- slice 2 -->   stores slice 3
//
// Each adds in the order of k: the same bits every run, whoever adds.
#pragma once
#include <jitgemm/gemm/scheduler.cuh>
#include <jitgemm/gemm/shared.cuh>

namespace jitgemm {

// What a consumer warpgroup works with.
template <typename Config>
struct Consumer {
    const Args& args;
    const Maps& maps;
    const Shared<Config>& shared;
    u32 rank;
    const Position& position;
};

// Position::thread read again: else ptxas keeps in registers, from tile to tile, what follows from it.
__device__ __forceinline__ u32 reread_thread() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % kWarpgroup;
}

// The thread whose slots are written. Four warpgroups with wide tiles lack the registers for the slots' addresses.
template <typename Config>
__device__ __forceinline__ u32 sending_thread(const Position& position) {
    constexpr bool kCrowded = Shared<Config>::kWarpgroups == 4 && Config::kBlockM >= 64;
    return kCrowded ? reread_thread() : position.thread;
}

// Hands this warpgroup's sums of the other spans to the warpgroups that reduce them.
template <typename Config>
__device__ __forceinline__ void send_to_warpgroups(const float (&acc)[Config::kSums],
                                                   const Consumer<Config>& consumer, u32 parity) {
    using Layout = Shared<Config>;
    const Layout& shared = consumer.shared;
    const Position& position = consumer.position;
    constexpr u32 kVectors = Layout::kSpanTokens / 8;
    if (Layout::kSpans == 1 && position.along_k == 0) return;
    const u32 thread = sending_thread<Config>(position);
    // The slots are free once every reducer has read the previous tile from them.
    barrier_wait<Config::kDebug>(shared.span_empty(position.warpgroup), parity ^ 1);
#pragma unroll
    for (u32 span = 0; span < Layout::kSpans; ++span) {
        if (span == position.along_k) continue;
        const u32 reducer = Layout::warpgroup_of(span, position.along_n);
        const u32 slot = shared.span_slot(reducer, position.along_k - (position.along_k > span)) + thread * 16;
#pragma unroll
        for (u32 i = 0; i < kVectors && span * kVectors + i < Config::kBlockM / 8; ++i) {
            const u32 first = (span * kVectors + i) * 4;
            store_shared_float4(slot + i * kWarpgroupVector, acc[first], acc[first + 1], acc[first + 2],
                                acc[first + 3]);
        }
        __syncwarp();
        if (position.lane == 0) barrier_arrive(shared.span_full(reducer));
    }
}

// Sends the other CTAs their slices of this warpgroup's span. The stores count on the receiver's barrier as they land,
// so that nothing has to be flushed.
template <typename Config, u32 kSpan>
__device__ __forceinline__ void send_to_ctas(const float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                             u32 parity) {
    const Shared<Config>& shared = consumer.shared;
    const u32 warpgroup = consumer.position.warpgroup, rank = consumer.rank;
    constexpr u32 kVectors = Config::kSliceTokens / 8;
    constexpr u32 kCount = Shared<Config>::slices_of(kSpan);
    if (kCount == 1 && rank == 0) return;
    const u32 thread = sending_thread<Config>(consumer.position);
    barrier_wait<Config::kDebug>(shared.slice_empty(warpgroup), parity ^ 1);
#pragma unroll
    for (u32 to = 0; to < kCount; ++to) {
        if (to == rank) continue;
        const u32 slot = map_to_rank(shared.slice_slot(warpgroup, rank - (rank > to)) + thread * 16, to);
        const u32 barrier = map_to_rank(shared.slice_full(warpgroup), to);
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            const u32 first = ((kSpan * Config::kSplitK + to) * kVectors + i) * 4;
            store_async_float4(slot + i * kWarpgroupVector, acc[first], acc[first + 1], acc[first + 2],
                               acc[first + 3], barrier);
        }
    }
}

// a + b, as they are.
template <bool kIntegers>
__device__ __forceinline__ float sum_of(float a, float b) {
    return kIntegers ? __int_as_float(__float_as_int(a) + __float_as_int(b)) : a + b;
}

// sums[kTokens / 2] += the sums of kCount - 1 others, in slots of kSlot bytes; the thread's own are the kOwn-th in
// order.
template <bool kIntegers, u32 kTokens, u32 kCount, u32 kOwn, u32 kSlot>
__device__ __forceinline__ void add_in_order(float* sums, u32 slots, const Position& position) {
#pragma unroll
    for (u32 i = 0; i < kTokens / 8; ++i) {
        float* own = sums + i * 4;
        const u32 slot = slots + position.thread * 16 + i * kWarpgroupVector;
        float4 sum = make_float4(own[0], own[1], own[2], own[3]);
        if constexpr (kOwn > 0) sum = load_shared_float4(slot);
#pragma unroll
        for (u32 other = 1; other < kCount; ++other) {
            float4 addend = make_float4(own[0], own[1], own[2], own[3]);
            if (other != kOwn) addend = load_shared_float4(slot + (other - (other > kOwn)) * kSlot);
            sum.x = sum_of<kIntegers>(sum.x, addend.x);
            sum.y = sum_of<kIntegers>(sum.y, addend.y);
            sum.z = sum_of<kIntegers>(sum.z, addend.z);
            sum.w = sum_of<kIntegers>(sum.w, addend.w);
        }
        own[0] = sum.x;
        own[1] = sum.y;
        own[2] = sum.z;
        own[3] = sum.w;
    }
}

// Adds up a span over the warpgroups along k, in place in `acc`.
template <typename Config, u32 kSpan>
__device__ __forceinline__ void reduce_span(float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                            u32 parity, bool last_tile) {
    using Layout = Shared<Config>;
    const Layout& shared = consumer.shared;
    const Position& position = consumer.position;
    constexpr u32 kFirst = kSpan * Layout::kSpanTokens;
    constexpr u32 kTokens = smaller(Layout::kSpanTokens, Config::kBlockM - kFirst);
    barrier_wait<Config::kDebug>(shared.span_full(position.warpgroup), parity);
    const u32 slots = shared.span_slot(position.warpgroup, 0);
    add_in_order<Config::kIntegers, kTokens, Config::kWarpgroupsK, kSpan, Layout::kSpanSlot>(acc + kFirst / 2, slots, position);
    // After the last tile nobody writes the slots again.
    if (last_tile) return;
    loads_done();
    if (position.lane == 0) {
        for (u32 along_k = 0; along_k < Config::kWarpgroupsK; ++along_k)
            if (along_k != kSpan) barrier_arrive(shared.span_empty(Layout::warpgroup_of(along_k, position.along_n)));
    }
}

// Adds up a slice over the CTAs of the cluster, in place in `acc`.
template <typename Config, u32 kSlice>
__device__ __forceinline__ void reduce_slice(float (&acc)[Config::kSums], const Consumer<Config>& consumer,
                                             u32 parity, bool last_tile) {
    const Shared<Config>& shared = consumer.shared;
    const Position& position = consumer.position;
    constexpr u32 kTokens = Config::kSliceTokens, kRank = kSlice % Config::kSplitK;
    barrier_wait_for_cluster<Config::kDebug>(shared.slice_full(position.warpgroup), parity);
    const u32 slots = shared.slice_slot(position.warpgroup, 0);
    add_in_order<Config::kIntegers, kTokens, Config::kSplitK, kRank, Shared<Config>::kSlot>(acc + kSlice * kTokens / 2, slots, position);
    // After the last tile nobody writes the slots again; and the other CTAs may have ended.
    if (last_tile) return;
    loads_done();
    if (position.lane == 0) {
        for (u32 rank = 0; rank < Config::kSplitK; ++rank)
            if (rank != kRank) barrier_arrive_remote(shared.slice_empty(position.warpgroup), rank);
    }
}

}  // namespace jitgemm
