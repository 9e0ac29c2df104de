// Sums over the GPUs of a host, without collectives (jitgemm/nn/layers/invariant_nvlink.py): each rank has a buffer that
// the others read and write.
//
//     agree    a token's scale becomes the largest over the ranks: each writes its own into the others' buffers
//     (GEMM)   sums of this rank's k into its own buffer
//     total    reads all ranks' sums and finishes them: all rows, or this rank's, which go to its buffer
//     gather   reads the other ranks' finished rows
//
// Why nobody overwrites what is yet to be read: a rank is through agree when every other one has begun it, behind the
// kernels of the call before. Scales of two calls, by parity, since a rank may begin the next agree while another
// still reads.
#pragma once
#include <jitgemm/gemm/finish.cuh>
#include <jitgemm/moe/ranks.cuh>

namespace jitgemm {

// At the start of a buffer. Numbers of calls: what a kernel reads of them, another kernel writes.
struct SumHead {
    u64 summed, agreed;          // calls that total is over of; that agree is over of
    u64 gathered, finished;      // the same of gather, and of total where gather follows
    u32 sums_there[kMaxRanks];   // by rank, of calls
    u32 rows_there[kMaxRanks];   // by rank, of calls where gather follows
};

constexpr u64 kSumsThere = 32, kRowsThere = kSumsThere + 4 * kMaxRanks;  // in it
static_assert(sizeof(SumHead) == kRowsThere + 4 * kMaxRanks, "SumHead has no gaps");

// Run-time arguments of all three; jitgemm/gemm/ranks.py fills the same layout.
struct RanksArgs {
    const u64* peers;         // [world]: addresses of the ranks' buffers
    u32* scales;              // agree: [m] floats' bits, which are in order as integers, NaN behind infinity
    const float* x_scale;     // as FinishArgs has them
    const u8* channel_scale;
    const void* bias;
    u8* out;                  // [m][n]
    u64 words_at, sums_at, rows_at;  // in a buffer: [2][kMaxRanks][most_rows] scales, [m][n] sums, finished rows
    u64 x_scale_stride;
    u32 m, n;
    i32 channel_scale_type;
    i32 bias_type;
    u32 rank, world, most_rows;
    u32 each;     // rows that a rank finishes, and gather brings to the others; 0: each finishes all
    u32 limit_s;  // see Patience
    u32 unused;
};
static_assert(sizeof(RanksArgs) == 120, "jitgemm/gemm/ranks.py packs this struct");

__device__ __forceinline__ u8* buffer_of(const RanksArgs& args, u32 rank) { return reinterpret_cast<u8*>(args.peers[rank]); }

// A scale and the number of its call.
__device__ __forceinline__ void store_word(u8* address, u64 call, u32 value) {
    u64 word;
    asm("mov.b64 %0, {%1, %2};" : "=l"(word) : "r"(value), "r"(u32(call)));
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}
__device__ __forceinline__ u32 load_word(const u8* address, u64 call, u32 rank, u32 limit_s) {
    Patience patience(rank, limit_s);
    while (true) {
        u64 word;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
        if (word >> 32 == u32(call)) return u32(word);
        patience.spend();
    }
}

// Also without tokens the ranks wait for one another.
template <class Config>
__device__ __forceinline__ void agree(const RanksArgs& args) {
    launch_next_grid();
    wait_for_previous_grid();
    u8* const own = buffer_of(args, args.rank);
    SumHead* const head = reinterpret_cast<SumHead*>(own);
    const u64 call = head->summed + 1;
    const u32 token = blockIdx.x * kFinishThreads + threadIdx.x;
    if (token == 0) head->agreed = call;
    if (token >= max(args.m, 1u)) return;
    auto place = [&](u8* buffer, u32 rank) {
        return buffer + args.words_at + 8 * ((call % 2 * kMaxRanks + rank) * args.most_rows + token);
    };
    u32 largest = args.m > 0 ? args.scales[token] : 0;
    for (u32 step = 1; step < args.world; ++step)
        store_word(place(buffer_of(args, (args.rank + step) % args.world), args.rank), call, largest);
    for (u32 step = 1; step < args.world; ++step) {
        const u32 rank = (args.rank + step) % args.world;
        largest = max(largest, load_word(place(own, rank), call, rank, args.limit_s));
    }
    if (args.m > 0) args.scales[token] = largest;
}

// Tells the ranks that what the kernels before have written is there, and waits for theirs.
__device__ __forceinline__ void meet(const RanksArgs& args, u64 call, u64 counts_at) {
    auto count = [&](u32 of, u32 rank) { return reinterpret_cast<u32*>(buffer_of(args, of) + counts_at) + rank; };
    if (threadIdx.x < args.world) {
        if (blockIdx.x == 0) add_release(count(threadIdx.x, args.rank), 1);
        Patience patience(threadIdx.x, args.limit_s);
        while (load_acquire(count(args.rank, threadIdx.x)) != u32(call)) patience.spend();
    }
    __syncthreads();
}

// Half of sums `vector` and half of `vector` + 4, where `vector` is the same for a pair of lanes, and the next pair's is
// the next: a load of eight lanes is a whole line. No cache holds what these loads bring, so that a sector of which a
// lane reads half would travel twice.
__device__ __forceinline__ Vector<kFp32> load_halves(const u8* sums, u64 vector, u64 end) {
    u32 words[2][4] = {};
    const u8* const source = sums + vector * Vector<kFp32>::kBytes + 16 * (threadIdx.x % 2);
    if (vector < end) load_shared_by_ranks(source, words[0]);
    if (vector + 4 < end) load_shared_by_ranks(source + 4 * Vector<kFp32>::kBytes, words[1]);
    Vector<kFp32> halves;
#pragma unroll
    for (u32 i = 0; i < kVector; ++i) halves.words[i] = words[i / 4][i % 4];
    return halves;
}

// Of a pair's lanes, the even one gets the first vector, the odd one the second.
__device__ __forceinline__ Vector<kFp32> joined(const Vector<kFp32>& halves) {
    const bool odd = threadIdx.x % 2;
    Vector<kFp32> whole;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 early = halves.words[i], late = halves.words[4 + i];
        const u32 other = __shfl_xor_sync(0xffffffffu, odd ? early : late, 1);
        whole.words[i] = odd ? other : early;
        whole.words[4 + i] = odd ? late : other;
    }
    return whole;
}

template <class Config>
__device__ __forceinline__ void total(const RanksArgs& args) {
    __shared__ const u8* peers[kMaxRanks];
    if (threadIdx.x < args.world) peers[threadIdx.x] = buffer_of(args, threadIdx.x);
    launch_next_grid();
    wait_for_previous_grid();
    u8* const own = buffer_of(args, args.rank);
    SumHead* const head = reinterpret_cast<SumHead*>(own);
    meet(args, head->agreed, kSumsThere);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        head->summed = head->agreed;
        if (args.each > 0) head->finished = head->gathered + 1;
    }
    const u32 vectors = args.n / kVector;
    const u64 begin = u64(args.each) * args.rank * vectors;
    const u64 end = args.each > 0 ? min(begin + u64(args.each) * vectors, u64(args.m) * vectors) : u64(args.m) * vectors;
    const u32 lane = threadIdx.x % 8;
    // Whole warps, whose lanes shuffle.
    for (u64 first = begin + blockIdx.x * kFinishThreads + threadIdx.x / 32 * 32; first < end;
         first += gridDim.x * kFinishThreads) {
        const u64 of_pair = first + threadIdx.x % 32 / 8 * 8 + lane / 2, i = of_pair + 4 * (lane % 2);
        const Vector<kFp32> sums = joined(sum_of_parts<Config>([&](u32 part) {
            return load_halves(peers[part] + args.sums_at, of_pair, end);
        }));
        if (i >= end) continue;
        const u32 row = u32(i / vectors), vector = u32(i % vectors);
        const Vector<Config::kOut> result = finished<Config>(args, sums, row, vector);
        store_vector(args.out + i * Vector<Config::kOut>::kBytes, result);
        if (args.each > 0) store_vector(own + args.rows_at + (i - begin) * Vector<Config::kOut>::kBytes, result);
    }
}

template <class Config>
__device__ __forceinline__ void gather(const RanksArgs& args) {
    launch_next_grid();
    wait_for_previous_grid();
    SumHead* const head = reinterpret_cast<SumHead*>(buffer_of(args, args.rank));
    meet(args, head->finished, kRowsThere);
    if (blockIdx.x == 0 && threadIdx.x == 0) head->gathered = head->finished;
    constexpr u32 kBytes = Vector<Config::kOut>::kBytes;
    const u64 vectors = args.n / kVector, of_rank = args.each * vectors, all = args.m * vectors;
    // Each rank begins with another one's rows.
    for (u32 step = 1; step < args.world; ++step) {
        const u32 rank = (args.rank + step) % args.world;
        const u8* const rows = buffer_of(args, rank) + args.rows_at;
        const u64 begin = rank * of_rank, end = min(begin + of_rank, all);
        for (u64 i = begin + blockIdx.x * kFinishThreads + threadIdx.x; i < end; i += gridDim.x * kFinishThreads)
            store_vector(args.out + i * kBytes,
                         load_vector<Config::kOut, load_shared_by_ranks>(rows + (i - begin) * kBytes));
    }
}

}  // namespace jitgemm
