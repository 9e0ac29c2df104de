// mbarriers, named barriers, cluster barriers and grid dependencies: everything that makes one thread wait for another.
#pragma once
#include <jitgemm/ptx/memory.cuh>

namespace jitgemm {

// True in one thread of a warp, always the same; every thread of the warp asks. ptxas knows that the warp is together
// then: copies need no loop over threads whose operands might differ, as they do where one thread is found by its index
// (docs/notes/producer.md).
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once the thread's copies so far (copy_4, copy_16) are there.
__device__ __forceinline__ void barrier_arrive_behind_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The warp's loads are done, so that an arrival may hand back what they read: it overtakes loads that are in flight
// (docs/notes/sums.md).
__device__ __forceinline__ void loads_done() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
    __syncwarp();
}

// Arrives at the barrier of any CTA of the cluster, to hand back a buffer that the CTA fills.
//
// loads_done() and this arrival are less than PTX asks for: between CTAs its memory model orders loads before the other
// CTA's next writes by a release at cluster scope. That adds MEMBAR.ALL.GPU, which waits until all that the thread wrote
// is in the GPU's memory, and kernels with multicast would run at half speed. There is nothing to wait for: the loads are
// of this CTA's shared memory, which exists once, in this SM. A load that loads_done() saw done at CTA scope has its
// value, and no write of another CTA can still reach it; the arrival leaves the SM behind it. That the fence waits for
// the values is observed (docs/notes/sums.md), not promised: test_splits_over_warpgroups_and_ctas_sum_alike and
// test_multicast_hands_its_stages_back stress it in every GPU run.
__device__ __forceinline__ void barrier_arrive_remote(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_to_rank(barrier, rank)) : "memory");
}

// Blocks of assembly: the same loops in C++ cost the consumers registers, the one with the trap hundreds of bytes of
// spills.
#define JITGEMM_WAIT(scope, barrier, parity)                                                                   \
    asm volatile("{\n.reg .pred p;\n"                                                                          \
                 "wait:\nmbarrier.try_wait.parity" scope ".shared::cta.b64 p, [%0], %1;\n@!p bra wait;\n}"     \
                 ::"r"(barrier), "r"(parity) : "memory")
#define JITGEMM_WAIT_OR_TRAP(scope, barrier, parity)                                                           \
    asm volatile("{\n.reg .pred p;\n.reg .u32 spins;\nmov.u32 spins, 0;\n"                                     \
                 "wait:\nmbarrier.try_wait.parity" scope ".shared::cta.b64 p, [%0], %1;\n@p bra done;\n"       \
                 "add.u32 spins, spins, 1;\nsetp.lt.u32 p, spins, 4194304;\n@p bra wait;\ntrap;\ndone:\n}"    \
                 ::"r"(barrier), "r"(parity) : "memory")

// Waits until the phase of the given parity is over. kDebug traps where a release build would hang.
//
// The wait acquires at CTA scope. What CTAs multicast to one another, and the buffers that they hand back, PTX would have
// acquired at cluster scope. On sm_90 the two differ by one instruction, CCTL.IVALL: it drops the L1's lines of global
// memory. Such a wait is for shared memory alone, which has no copy that could be stale; so these waits, one a record,
// do without.
template <bool kDebug>
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    if constexpr (kDebug) JITGEMM_WAIT_OR_TRAP("", barrier, parity);
    else JITGEMM_WAIT("", barrier, parity);
}

// The same for what other CTAs of the cluster store: acquires at cluster scope.
template <bool kDebug>
__device__ __forceinline__ void barrier_wait_for_cluster(u32 barrier, u32 parity) {
    if constexpr (kDebug) JITGEMM_WAIT_OR_TRAP(".acquire.cluster", barrier, parity);
    else JITGEMM_WAIT(".acquire.cluster", barrier, parity);
}
#undef JITGEMM_WAIT
#undef JITGEMM_WAIT_OR_TRAP

// Barrier of the 128 threads of one warpgroup; hardware barrier 0 is __syncthreads'.
__device__ __forceinline__ void warpgroup_sync(u32 warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Barrier of the `threads` threads of the warpgroups along n that work on the same k-blocks.
__device__ __forceinline__ void along_n_sync(u32 along_k, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(along_k + 5), "r"(threads) : "memory");
}

// A barrier of all threads of the cluster, in two steps. What threads have written before is there behind it, unless
// they arrive relaxed: a release waits for all that is in flight, which takes microseconds while weights are being
// fetched.
template <bool kRelaxed>
__device__ __forceinline__ void cluster_arrive() {
    if constexpr (kRelaxed) {
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    }
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Every CTA of the cluster has started and its barriers are initialised (after barrier_init_fence).
template <bool kRelaxed>
__device__ __forceinline__ void cluster_started() {
    cluster_arrive<kRelaxed>();
    cluster_wait();
}

// Programmatic dependent launch. Both do nothing in a kernel launched without it.
__device__ __forceinline__ void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Registers move between the warpgroups of a CTA: one gives down to kCount a thread, another takes up to kCount and
// waits until they are there. Each is executed by all warps of the warpgroup.
template <u32 kCount>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <u32 kCount>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// A position in a ring of stages and the parity of its current round.
template <int kStages>
struct Ring {
    u32 stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace jitgemm
