// Shared memory by address, and the loads, stores and copies that a thread makes itself.
#pragma once
#include <jitgemm/types.cuh>

namespace jitgemm {

// Shared-memory addresses are passed as 32-bit shared-window addresses throughout.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same offset in the shared memory of another CTA of the cluster.
__device__ __forceinline__ u32 map_to_rank(u32 address, u32 rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// ---- shared memory --------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_shared_v4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared_v2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_v2(u32 address, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 load_shared_float2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float load_shared_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ u32 load_shared_u32(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_shared_u8(u32 address) {
    u32 value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Element `index` of an array of reals.
template <RealType kType>
__device__ __forceinline__ float load_shared_real(u32 base, u32 index) {
    if constexpr (kType == kFp32) {
        return load_shared_float(base + index * 4);
    } else {
        u16 bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(base + index * 2) : "memory");
        return kType == kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
    }
}

__device__ __forceinline__ void store_shared_float4(u32 address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

__device__ __forceinline__ void store_shared_float2(u32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_shared_u32(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_float(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Into any CTA of the cluster; counts its bytes on `barrier`, of the same CTA, as they land. Both addresses by
// map_to_rank().
__device__ __forceinline__ void store_async_float4(u32 address, float x, float y, float z, float w, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier) : "memory");
}

// Four 8 x 8 matrices of 16 bits, or two, transposed: lanes 8i..8i+7 give the rows' addresses of matrix i.
__device__ __forceinline__ void store_matrix_x4(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_matrix_x2(u32 row, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(row), "r"(a), "r"(b) : "memory");
}

// Four of them as they are.
__device__ __forceinline__ void store_rows_x4(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by the copy engine.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The value of lane `first` + lane % 4 of the warp, `first` a multiple of 4: the mask of segments, 3, keeps the low bits
// of the lane's own number (PTX ISA, shfl.sync).
__device__ __forceinline__ u32 shuffle_fours(u32 value, u32 first) {
    u32 found;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x31F, 0xFFFFFFFF;" : "=r"(found) : "r"(value), "r"(first));
    return found;
}

// ---- copies from global to shared memory ----------------------------------------------------------------------------

// Copies 16 bytes where `wanted`, or writes zeros, and reads nothing, where not `inside`. Without a branch: behind one,
// ptxas takes a warp for divergent, and keeps in registers of each thread what is the same for all.
__device__ __forceinline__ void copy_16(bool wanted, u32 destination, const u8* source, bool inside) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n}"
                 ::"r"(destination), "l"(source), "r"(inside ? 16 : 0), "r"(u32(wanted)) : "memory");
}

// The same for 4 bytes; `base` is an address that may be read in any case.
__device__ __forceinline__ void copy_4(bool wanted, u32 destination, const void* source, const void* base,
                                       bool inside) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p cp.async.ca.shared.global [%0], [%1], 4, %2;\n}"
                 ::"r"(destination), "l"(inside ? source : base), "r"(inside ? 4 : 0), "r"(u32(wanted)) : "memory");
}

// Until this thread's copies are there.
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- global memory --------------------------------------------------------------------------------------------------

// Brings what lies at an address on its way into the L2.
__device__ __forceinline__ void prefetch_l2(const u8* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// 16 bytes that are read once. Not through the read-only path: the kernel before may still have been writing them when
// this one started.
__device__ __forceinline__ void load_streamed(const u8* source, u32 (&words)[4]) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source)
                 : "memory");
}

}  // namespace jitgemm
