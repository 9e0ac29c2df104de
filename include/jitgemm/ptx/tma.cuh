// Copies by the tensor memory accelerator: tiles through a descriptor, with and without multicast, and contiguous bytes
// as bulk copies.
#pragma once
#include <jitgemm/types.cuh>

namespace jitgemm {

__device__ __forceinline__ void prefetch_descriptor(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// L2 policies: weights that only one tile row reads leave the cache first; everything shared stays.
__device__ __forceinline__ u64 policy_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 policy_evict_unchanged() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Global to shared, `bytes` contiguous bytes (a multiple of 16), completing on `barrier`.
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(destination), "l"(source), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// A two-dimensional tile at element (x, y) of the tensor behind `map`; what lies outside arrives as zero and counts
// as bytes.
__device__ __forceinline__ void tile_load(u32 destination, const TensorMap* map, i32 x, i32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(destination), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

// The same into the same offset of every CTA in `mask`, completing on the same barrier of each.
__device__ __forceinline__ void tile_load_multicast(u32 destination, const TensorMap* map, i32 x, i32 y, u32 barrier,
                                                    u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(destination), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(mask) : "memory");
}

// Shared to global; what lies outside the tensor is not written.
__device__ __forceinline__ void tile_store(const TensorMap* map, u32 source, i32 x, i32 y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(x), "r"(y), "r"(source) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until this thread's stores have read their shared memory, so that it can be written again.
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Until this thread's stores are in global memory.
__device__ __forceinline__ void store_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace jitgemm
