// What kernels on several GPUs share: a buffer of each rank, of one layout, which every rank of the host writes to.
//
// A rank's buffer holds a Head, what tokens of every rank are sent as, and results of this rank's tokens of every rank.
// Rows of tokens are slots: token t of rank s has slot s * max_tokens + t in the buffer of each rank that it is sent to.
//
// A call is dispatch (dispatch.cuh), the GEMMs, collect (collect.cuh). Why nobody overwrites what is yet to be read:
//
//   counts,   twice, by parity of calls: a rank dispatches call e + 2 once it has had every rank's dispatch of e + 1,
//   choices   which each sends when it is done with e
//   tokens    a rank overwrites its tokens of call e when their results have come back: they have been read
//   results   are sent in call e + 1 behind the dispatch of their tokens, by a rank that has taken those of e
#pragma once
#include <jitgemm/ptx/barrier.cuh>

namespace jitgemm {

constexpr u32 kMaxRanks = 8;
constexpr u32 kAbsent = 0xffffffffu;  // a word of a result that has not come: no arithmetic has it, as its NaN is another

// jitgemm/moe/exchange.py leaves HEAD_BYTES for it.
struct Head {
    u32 arrived[kMaxRanks];    // by rank that sends: max_tokens more with each call
    u64 counts[2][kMaxRanks];  // by parity of the call and rank that sends: its tokens, stamped
    u64 calls;                 // that are over
};

// A value in one word with the number of its call, so that no flag is needed: a waiting thread reads the word again.
constexpr u32 kStampAt = 24;
constexpr u32 kStampedNone = (1u << kStampAt) - 1;  // larger than any expert

__device__ __forceinline__ void store_stamped(u64* address, u64 call, u32 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(call << kStampAt | value) : "memory");
}

// How long this rank waits for another one, in seconds; 0 is for ever. A rank that ended, or that called a layer once
// less, would else keep this GPU busy for good, and the process with it.
struct Patience {
    u32 rank, limit_s;
    u32 spins = 0, begun = 0;

    __device__ __forceinline__ Patience(u32 rank, u32 limit_s) : rank(rank), limit_s(limit_s) {}
    __device__ __forceinline__ void spend() {
        if (++spins % 4096 != 0 || limit_s == 0) return;  // some milliseconds
        u64 nanoseconds;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
        const u32 now = u32(nanoseconds >> 30);  // 1.07 s
        if (spins == 4096) begun = now;
        if (now - begun <= limit_s) return;
        // What CUDA's assert calls: the driver prints it, and every later call of the process fails.
        __assertfail("a rank of this number did not come within JITGEMM_EXCHANGE_TIMEOUT_S: it ended, or it calls the "
                     "experts' layer less often", "rank", rank, "exchange='nvlink'", 1);
    }
};

// Of `rank`, once it has written it.
__device__ __forceinline__ u32 load_stamped(const u64* address, u64 call, u32 rank, u32 limit_s) {
    Patience patience(rank, limit_s);
    while (true) {
        u64 word;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
        if (word >> kStampAt == call) return u32(word) & kStampedNone;
        patience.spend();
    }
}

__device__ __forceinline__ u32 load_acquire(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Adds; what this thread, and others before a barrier, have written to any GPU is seen by whoever sees the sum.
__device__ __forceinline__ void add_release(u32* address, u32 value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// 16 bytes that another GPU may be writing or reading, a word at a time.
__device__ __forceinline__ void load_shared_by_ranks(const u8* source, u32 (&words)[4]) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source)
                 : "memory");
}
__device__ __forceinline__ void store_shared_by_ranks(u8* target, const u32 (&words)[4]) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}

// The tokens of all ranks, counted through without gaps, and their slots.
struct AllTokens {
    u32 starts[kMaxRanks + 1];  // the first of each rank; behind the last one, how many there are
    u32 max_tokens;

    __device__ __forceinline__ u32 rank_of(u32 token) const {
        u32 rank = 0;
#pragma unroll
        for (u32 other = 1; other < kMaxRanks; ++other) rank += token >= starts[other];
        return rank;
    }
    __device__ __forceinline__ u32 slot(u32 token) const {
        const u32 rank = rank_of(token);
        return rank * max_tokens + token - starts[rank];
    }
    __device__ __forceinline__ u32 tokens() const { return starts[kMaxRanks]; }

    // By a whole warp: lane r has the tokens of rank r, 0 from the last rank on.
    __device__ __forceinline__ void set(u32 count, u32 most) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 distance = 1; distance < kMaxRanks; distance *= 2) {
            const u32 before = __shfl_up_sync(0xffffffffu, count, distance);
            if (lane >= distance) count += before;
        }
        if (lane < kMaxRanks) starts[lane + 1] = count;
        if (lane == 0) starts[0] = 0, max_tokens = most;
    }
};

// The ranks that have experts of a token's choice, a bit each. A whole warp calls this; id(i) is choice i's, and -1 or
// another that no rank has where it is skipped.
template <class Id>
__device__ __forceinline__ u32 ranks_of(u32 top_k, u32 experts, u32 world, Id id) {
    u32 ranks = 0;
    for (u32 i = threadIdx.x % 32; i < top_k; i += 32) {
        const u32 expert = id(i);
        if (expert < world * experts) ranks |= 1u << expert / experts;
    }
    u32 all;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(all) : "r"(ranks));
    return all;
}

}  // namespace jitgemm
