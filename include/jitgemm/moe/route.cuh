// Routing: a stable counting sort of the tokens' choices by expert, in one launch of one CTA or one cluster.
//
// Choice i is token i / top_k's. The choices are cut into runs of `run` of them, one per warp, in order:
//
//   count    each warp counts its run's choices by expert         counts[warp][expert], in shared memory
//   scan     over the warps (and CTAs) before, then over experts  first[expert] = first row of this CTA's choices
//   place    row = first[expert] + counts[warp][expert] + choices of the expert before it in the warp's run
//
// A warp takes 32 choices at a time: lanes that chose one expert find each other by match.any, and the first of them
// counts for all. No two warps write one counter, so the order is the same in every run.
#pragma once
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/ptx/memory.cuh>

namespace jitgemm {

// Run-time arguments; jitgemm/moe/plan.py fills the same layout.
struct RouteArgs {
    const u8* ids;          // [choices] of id_bytes
    const i32* expert_map;  // [global_experts]: an id's expert here, or none; null: ids are experts
    i32* offsets;           // [experts + 1]
    i32* row_index;         // [choices]: token of each row; rows from offsets[experts] on are left alone
    i32* inverse;           // [choices]: row of each choice, -1 where it is skipped
    u32 choices, top_k, experts, global_experts;
    u32 run;                // choices of a warp, a multiple of 32
    u32 id_bytes;           // 4 or 8
};
static_assert(sizeof(RouteArgs) == 64, "jitgemm/moe/plan.py packs this struct");

constexpr u32 kNoExpert = 0xffffffffu;
constexpr u32 kEveryLane = 0xffffffffu;

// A word of the same shared memory in another CTA of the cluster.
__device__ __forceinline__ u32 load_remote(const u32* address, u32 rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(map_to_rank(shared_address(address), rank)));
    return value;
}

// Shared memory that any thread of the cluster wrote is seen by all of them behind this.
template <u32 kCtas>
__device__ __forceinline__ void sync_ctas() {
    if constexpr (kCtas == 1) {
        __syncthreads();
    } else {
        cluster_arrive<false>();
        cluster_wait();
    }
}

__device__ __forceinline__ u32 inclusive_scan(u32 value) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 before = __shfl_up_sync(kEveryLane, value, distance);
        if (threadIdx.x % 32 >= distance) value += before;
    }
    return value;
}

// Shared memory: counts, and what follows them.
struct RouteShared {
    u32* counts;  // [warps in use][experts]
    u32* totals;  // [experts]: of this CTA
    u32* first;   // [experts]
    i32* map;     // [global_experts]

    __device__ __forceinline__ RouteShared(const RouteArgs& args, u32* base, u32 warps)
        : counts(base), totals(counts + warps * args.experts), first(totals + args.experts),
          map(reinterpret_cast<i32*>(first + args.experts)) {}
};

// An id of 4 or 8 bytes; kNoExpert for what 32 bits do not hold.
__device__ __forceinline__ u32 load_id(const u8* ids, u64 id_bytes, u64 at) {
    const u32* const words = reinterpret_cast<const u32*>(ids);
    if (id_bytes == 4) return words[at];
    return words[2 * at + 1] == 0 ? words[2 * at] : kNoExpert;
}

// Choices as they lie in memory, without gaps: where each one does, its token, and its id.
struct AllChoices {
    u32 top_k;

    __device__ __forceinline__ u32 token(u32 choice) const { return choice / top_k; }
    __device__ __forceinline__ u32 place(u32 choice) const { return choice; }
    __device__ __forceinline__ u32 id(const RouteArgs& args, u32 choice) const {
        return load_id(args.ids, args.id_bytes, choice);
    }
};

__device__ __forceinline__ u32 expert_of(const RouteArgs& args, const RouteShared& shared, u32 id) {
    if (args.expert_map != nullptr) id = id < args.global_experts ? shared.map[id] : kNoExpert;
    return id < args.experts ? id : kNoExpert;
}

template <u32 kCtas, class Choices>
__device__ __forceinline__ void route(const RouteArgs& args, const Choices& choices) {
    extern __shared__ u32 base[];
    __shared__ u32 warp_sums[32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const u32 rank = kCtas == 1 ? 0 : cluster_rank();
    const u32 busy = min(warps, ceil_div(args.choices, args.run));
    const RouteShared shared(args, base, busy);
    u32* const counts = shared.counts + warp * args.experts;
    const u32 begin = min((rank * warps + warp) * args.run, args.choices), end = min(begin + args.run, args.choices);

    // Every thread waits below, as in quantize_rows: who waits for the end of this grid waits for those before it.
    launch_next_grid();
    for (u32 i = threadIdx.x; i < busy * args.experts; i += blockDim.x) shared.counts[i] = 0;
    wait_for_previous_grid();

    auto id_of = [&](u32 choice) { return choice < end ? choices.id(args, choice) : kNoExpert; };
    u32 next = id_of(begin + lane);
    if (args.expert_map != nullptr) {
        for (u32 i = threadIdx.x; i < args.global_experts; i += blockDim.x) shared.map[i] = args.expert_map[i];
    }
    __syncthreads();

    for (u32 i = begin; i < end; i += 32) {
        const u32 expert = expert_of(args, shared, next);
        next = id_of(i + 32 + lane);
        const u32 peers = __match_any_sync(kEveryLane, expert);
        if (expert != kNoExpert && lane == __ffs(peers) - 1) counts[expert] += __popc(peers);
        __syncwarp();
    }
    __syncthreads();

    // Counts become the choices of the same expert in the warps before; eight at once, for their latency.
    for (u32 expert = threadIdx.x; expert < args.experts; expert += blockDim.x) {
        u32 sum = 0;
        for (u32 from = 0; from < busy; from += 8) {
            u32 count[8];
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                count[i] = from + i < busy ? shared.counts[(from + i) * args.experts + expert] : 0;
            }
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                if (from + i < busy) shared.counts[(from + i) * args.experts + expert] = sum;
                sum += count[i];
            }
        }
        shared.totals[expert] = sum;
    }
    sync_ctas<kCtas>();

    u32 sum_before = 0;  // of experts in the rounds before
    for (u32 round = 0; round < args.experts; round += blockDim.x) {
        const u32 expert = round + threadIdx.x;
        u32 all = 0, before = 0;
        if (expert < args.experts) {
            if constexpr (kCtas == 1) {
                all = shared.totals[expert];
            } else {
#pragma unroll
                for (u32 other = 0; other < kCtas; ++other) {
                    const u32 total = load_remote(shared.totals + expert, other);
                    all += total;
                    if (other < rank) before += total;
                }
            }
        }
        const u32 inclusive = inclusive_scan(all);
        if (lane == 31) warp_sums[warp] = inclusive;
        __syncthreads();
        const u32 sums = inclusive_scan(lane < warps ? warp_sums[lane] : 0);
        const u32 warps_before = __shfl_sync(kEveryLane, sums, (warp + 31) % 32);
        const u32 start = sum_before + (warp == 0 ? 0 : warps_before) + inclusive - all;
        sum_before += __shfl_sync(kEveryLane, sums, 31);
        if (expert < args.experts) {
            shared.first[expert] = start + before;
            if (rank == 0) args.offsets[expert] = start;
        }
        __syncthreads();
    }
    if (rank == 0 && threadIdx.x == 0) args.offsets[args.experts] = sum_before;

    next = id_of(begin + lane);
    for (u32 i = begin; i < end; i += 32) {
        const u32 expert = expert_of(args, shared, next), choice = i + lane;
        next = id_of(choice + 32);
        const u32 peers = __match_any_sync(kEveryLane, expert);
        u32 row = kNoExpert;
        if (expert != kNoExpert) row = shared.first[expert] + counts[expert] + __popc(peers & ((1u << lane) - 1));
        __syncwarp();
        if (expert != kNoExpert && lane == __ffs(peers) - 1) counts[expert] += __popc(peers);
        __syncwarp();
        if (expert != kNoExpert) args.row_index[row] = choices.token(choice);
        if (choice < end) args.inverse[choices.place(choice)] = row;
    }
    if constexpr (kCtas > 1) sync_ctas<kCtas>();  // no CTA leaves while another may read its totals
}

template <u32 kCtas>
__device__ __forceinline__ void route(const RouteArgs& args) {
    route<kCtas>(args, AllChoices{args.top_k});
}

}  // namespace jitgemm
