// What a rank's experts make of tokens on its way back, and the sum over ranks there, in one launch on every rank.
//
// A CTA first works for the other ranks: it adds up a token's choices on this rank as combine() does, rounds to kRow and
// writes that into the buffer of the token's rank. Then it works on this rank's tokens: the part of its own experts, and
// those of the other ranks as they come, added up in fp32 in the order of ranks and rounded once. Ranks without experts
// of a token's choice send nothing. No flag is raised: a word of a part has come when it is not kAbsent, which who reads
// it writes again. The whole grid has to be resident, as its CTAs wait for those of the other ranks.
#pragma once
#include <jitgemm/moe/combine.cuh>
#include <jitgemm/moe/ranks.cuh>

namespace jitgemm {

// Run-time arguments; jitgemm/moe/plan.py fills the same layout.
struct CollectArgs {
    const u8* rows;      // [..][n] of Config::kRow
    const i32* inverse;  // [slots][top_k]: row of each choice, negative where it is another rank's
    const u32* counts;   // [world + 1]: tokens of each rank, and the parity of the call
    const u64* peers;    // [world]: addresses of the ranks' buffers
    u8* out;             // [tokens][n] of Config::kRow
    u64 out_row_bytes;
    u64 ids_at, weights_at, results_at;  // in a buffer; results are [world][max_tokens][n] of Config::kRow
    u64 max_tokens;
    u32 tokens, top_k, n, experts;  // experts of a rank
    u32 rank, world;
    u32 limit_s;  // see Patience
    u32 unused;
};
static_assert(sizeof(CollectArgs) == 112, "jitgemm/moe/plan.py packs this struct");

template <RealType kType>
__device__ __forceinline__ Vector<kType> rounded(const float (&values)[kVector]) {
    Vector<kType> result;
    constexpr u32 kOfWord = kType == kFp32 ? 1 : 2;
#pragma unroll
    for (u32 i = 0; i < kVector; i += kOfWord) {
        if constexpr (kType == kFp32) result.words[i] = __float_as_uint(values[i]);
        else result.words[i / 2] = pack_halves<kType>(values[i], values[i + 1]);
    }
    return result;
}

// This rank's part to another one, which reads it meanwhile.
template <RealType kType>
__device__ __forceinline__ void send_part(const Vector<kType>& part, u8* place) {
#pragma unroll
    for (u32 i = 0; i < Vector<kType>::kBytes / 16; ++i)
        store_shared_by_ranks(place + 16 * i, {part.words[4 * i], part.words[4 * i + 1], part.words[4 * i + 2], part.words[4 * i + 3]});
}

// Another rank's part, once it is here; its place is empty behind this.
template <RealType kType>
__device__ __forceinline__ Vector<kType> take_part(u8* place, u32 rank, u32 limit_s) {
    Vector<kType> part;
#pragma unroll
    for (u32 i = 0; i < Vector<kType>::kBytes / 16; ++i) {
        u32 words[4];
        Patience patience(rank, limit_s);
        while (true) {
            load_shared_by_ranks(place + 16 * i, words);
            if (words[0] != kAbsent && words[1] != kAbsent && words[2] != kAbsent && words[3] != kAbsent) break;
            patience.spend();
        }
        store_shared_by_ranks(place + 16 * i, {kAbsent, kAbsent, kAbsent, kAbsent});
#pragma unroll
        for (u32 j = 0; j < 4; ++j) part.words[4 * i + j] = words[j];
    }
    return part;
}

template <class Config>
__device__ __forceinline__ void collect(const CollectArgs& args) {
    constexpr RealType kRow = Config::kRow;
    constexpr u32 kBytes = Vector<kRow>::kBytes;
    __shared__ AllTokens all;
    __shared__ u8* peers[kMaxRanks];
    const u32 vectors = args.n / kVector, parts = ceil_div(vectors, kCombineThreads);
    if (threadIdx.x < args.world) peers[threadIdx.x] = reinterpret_cast<u8*>(args.peers[threadIdx.x]);

    launch_next_grid();
    wait_for_previous_grid();
    if (threadIdx.x < 32) all.set(threadIdx.x < args.world ? args.counts[threadIdx.x] : 0, u32(args.max_tokens));
    __syncthreads();

    auto own = [&] { return peers[args.rank]; };  // again where it is needed: registers are short
    auto add_choices_of = [&](u32 slot, u32 vector, float (&sum)[kVector]) {
        const u8* const weights = own() + args.weights_at;
        return add_choices<kRow>(args.rows, args.inverse, weights, kFp32, slot, args.top_k, vector, vectors, sum);
    };
    if (blockIdx.x == 0 && threadIdx.x == 0) reinterpret_cast<Head*>(own())->calls += 1;
    auto place = [&](u8* buffer, u32 rank, u32 token, u32 vector) {
        const u64 row = u64(rank) * args.max_tokens + token;
        return buffer + args.results_at + (row * vectors + vector) * kBytes;
    };

    for (u32 work = blockIdx.x; work < all.tokens() * parts; work += gridDim.x) {
        const u32 token = work / parts, vector = work % parts * kCombineThreads + threadIdx.x;
        const u32 rank = all.rank_of(token);
        if (rank == args.rank) continue;
        float sum[kVector] = {};
        if (add_choices_of(all.slot(token), vector, sum) && vector < vectors)
            send_part(rounded<kRow>(sum), place(peers[rank], args.rank, token - all.starts[rank], vector));
    }

    const u64 choices = u64(args.world) * args.max_tokens * args.top_k;
    const u64* const ids = reinterpret_cast<const u64*>(own() + args.ids_at) + args.counts[args.world] * choices;
    // From the CTA on that had nothing to do there where all tokens are a turn of the grid.
    const u32 first = all.starts[args.rank] * parts % gridDim.x;
    const u32 begin = blockIdx.x < first ? blockIdx.x + gridDim.x - first : blockIdx.x - first;
    for (u32 work = begin; work < args.tokens * parts; work += gridDim.x) {
        const u32 token = work / parts, vector = work % parts * kCombineThreads + threadIdx.x;
        const u32 slot = args.rank * u32(args.max_tokens) + token;
        const u32 ranks = ranks_of(args.top_k, args.experts, args.world, [&](u32 i) -> u32 {
            return u32(ids[u64(slot) * args.top_k + i]) & kStampedNone;
        });
        float part[kVector] = {}, sum[kVector] = {};
        add_choices_of(slot, vector, part);
        if (vector >= vectors) continue;
        for (u32 rank = 0; rank < args.world; ++rank) {
            if (!(ranks >> rank & 1)) continue;
            const Vector<kRow> values = rank == args.rank ? rounded<kRow>(part)
                                                          : take_part<kRow>(place(own(), rank, token, vector), rank, args.limit_s);
#pragma unroll
            for (u32 i = 0; i < kVector; ++i) sum[i] = __fadd_rn(sum[i], values.value(i));
        }
        store_vector<kRow>(args.out + token * args.out_row_bytes + vector * kBytes, sum);
    }
}

}  // namespace jitgemm
