// Warpgroup matrix multiply: ordering instructions, the shared-memory descriptor, register fences. The multiply itself
// is rendered for the type and the few shapes that a kernel needs (struct Wgmma in the rendered source).
#pragma once
#include <jitgemm/types.cuh>

namespace jitgemm {

// Before the first multiply that reads registers written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kPending of the newest committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Until at most so many groups are in flight; a constant once loops are unrolled.
__device__ __forceinline__ void wgmma_wait(u32 pending) {
    switch (pending) {
        case 0: return wgmma_wait<0>();
        case 1: return wgmma_wait<1>();
        case 2: return wgmma_wait<2>();
        case 3: return wgmma_wait<3>();
        case 4: return wgmma_wait<4>();
        case 5: return wgmma_wait<5>();
        case 6: return wgmma_wait<6>();
        default: return wgmma_wait<7>();
    }
}

// Keeps the compiler from moving reads or writes of registers across a wait: it does not know that a multiply is still
// at work on them.
template <int kCount>
__device__ __forceinline__ void register_fence(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void register_fence(i32 (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void register_fence(u32 (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void register_fence(float (&registers)[kCount], u32 first, u32 count) {
#pragma unroll
    for (u32 i = 0; i < count; ++i) asm volatile("" : "+f"(registers[first + i])::"memory");
}

// Descriptor of a k-major operand in shared memory: rows of 128 bytes of k, 128-byte swizzle, 1024-byte aligned, 8 rows
// every 1024 bytes. PTX ISA, "matrix descriptor": address >> 4 in bits 0-13, leading offset >> 4 from bit 16 (unused by
// this swizzle), stride >> 4 from bit 32, swizzle mode 1 = 128 bytes in bits 62-63. A step of 32 bytes along k adds 2.
__device__ __forceinline__ u64 k_major_descriptor(u32 address) {
    return u64((address & 0x3FFFF) >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
}

// The descriptor of a tile so many bytes further on; the sum stays within the address's bits.
__device__ __forceinline__ u64 advance_descriptor(u64 descriptor, u32 bytes) {
    return (descriptor & 0xFFFFFFFF00000000ull) | (u32(descriptor) + (bytes >> 4));
}

}  // namespace jitgemm
