// Tokens on their way to the ranks of their experts, and their routing there, in one launch on every rank.
//
// The last CTAs wait for all ranks' tokens and route those that this rank has experts for. The others quantise this
// rank's tokens and write codes, scales, choices and weights into the buffers of the ranks, over NVLink: choices to all,
// the rest where a rank has experts of the token's choice. A CTA has a token at a time. When it has written its last, it
// adds their number to `arrived` of each rank; all CTAs together add max_tokens in every call, so that who waits needs no
// number of tokens. The whole grid has to be resident, or the last CTAs would keep the others out.
#pragma once
#include <jitgemm/moe/ranks.cuh>
#include <jitgemm/moe/route.cuh>
#include <jitgemm/quantize.cuh>

namespace jitgemm {

// Run-time arguments; jitgemm/moe/plan.py fills the same layout.
struct DispatchArgs {
    const u8* x;         // [m][k]
    const u8* ids;       // [m][top_k] of id_bytes: of all ranks' experts
    const u8* weights;   // [m][top_k] of weights_type
    const u64* peers;    // [world]: addresses of the ranks' buffers
    i32* offsets;        // the rest as of RouteArgs, tokens and choices by slot
    i32* row_index;
    i32* inverse;
    u32* counts;         // [world]: tokens of each rank
    u64 x_row_bytes;
    u64 codes_at, scale_at, zero_at, ids_at, weights_at;  // in a buffer; ids there count the receiving rank's experts
    u64 scale_block_stride;  // kBlocks only, in elements
    u64 id_bytes;            // 4 or 8
    u32 m, k, top_k, experts;  // experts of a rank
    u32 rank, world, max_tokens;
    i32 weights_type;
};
static_assert(sizeof(DispatchArgs) == 160, "jitgemm/moe/plan.py packs this struct");

// Of the tokens of all ranks, which have gaps between them.
struct ReceivedChoices {
    const AllTokens& all;
    u32 top_k;

    __device__ __forceinline__ u32 token(u32 choice) const { return all.slot(choice / top_k); }
    __device__ __forceinline__ u32 place(u32 choice) const {
        return token(choice) * top_k + choice % top_k;
    }
};

template <u32 kCtas, bool kDebug>
__device__ __forceinline__ void receive(const DispatchArgs& args) {
    __shared__ AllTokens all;
    u8* const own = reinterpret_cast<u8*>(args.peers[args.rank]);

    launch_next_grid();
    wait_for_previous_grid();
    if (threadIdx.x < 32) {
        const u32 source = threadIdx.x;
        u32 count = 0;
        if (source < args.world) {
            const Head& head = *reinterpret_cast<const Head*>(own);
            const u32 call = head.calls + 1;
            Patience<kDebug> patience;
            while (i32(load_acquire(head.arrived + source) - call * args.max_tokens) < 0) patience.spend();
            count = load_acquire(head.counts[call % 2] + source);
            if (kCtas == 1 || cluster_rank() == 0) args.counts[source] = count;
        }
        all.set(count, args.max_tokens);
    }
    __syncthreads();

    const u32 choices = all.tokens() * args.top_k, warps = kCtas * blockDim.x / 32;
    const RouteArgs routing{own + args.ids_at, nullptr,    args.offsets, args.row_index,
                            args.inverse,      choices,    args.top_k,   args.experts,
                            0,                 32 * max(1u, ceil_div(choices, 32 * warps)), 4};
    route<kCtas>(routing, ReceivedChoices{all, args.top_k});
}

template <class Config>
__device__ __forceinline__ void send(const DispatchArgs& args, u32 block, u32 blocks) {
    constexpr u32 kVectors = Config::kVectors;
    __shared__ WarpRanges slots[2];
    __shared__ u8* peers[kMaxRanks];
    if (threadIdx.x < args.world) peers[threadIdx.x] = reinterpret_cast<u8*>(args.peers[threadIdx.x]);
    __syncthreads();

    launch_next_grid();
    wait_for_previous_grid();

    QuantizeArgs tokens{};
    tokens.x = args.x, tokens.x_row_bytes = args.x_row_bytes, tokens.m = args.m, tokens.k = args.k;
    const Team<Config> team;
    const u32 vectors = args.k / kVector;
    auto mine = [&](u32 i) { return team.thread + i * team.threads; };
    auto id_of = [&](u32 row, u32 i) -> u32 {
        const u32* const ids = reinterpret_cast<const u32*>(args.ids);
        const u64 at = u64(row) * args.top_k + i;
        if (args.id_bytes == 4) return ids[at];
        return ids[2 * at + 1] == 0 ? ids[2 * at] : kNoExpert;
    };
    u32 sent = 0;
    for (u32 row = block; row < args.m; row += blocks, ++sent) {
        Input<Config> input[kVectors];
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (mine(i) < vectors) input[i] = load<Config>(tokens, row, mine(i));
        }
        const u32 ranks = ranks_of(args.top_k, args.experts, args.world, [&](u32 i) { return id_of(row, i); });
        const u64 slot = u64(args.rank) * args.max_tokens + row;
        for (u32 i = threadIdx.x; i < args.world * args.top_k; i += blockDim.x) {
            const u32 rank = i / args.top_k, choice = i % args.top_k, expert = id_of(row, choice);
            const u64 at = slot * args.top_k + choice;
            const bool any = expert < args.world * args.experts;
            reinterpret_cast<u32*>(peers[rank] + args.ids_at)[at] = (any ? expert : kNoExpert) - rank * args.experts;
            if (ranks >> rank & 1) {
                const float weight = load_real(args.weights, row * args.top_k + choice, args.weights_type);
                reinterpret_cast<float*>(peers[rank] + args.weights_at)[at] = weight;
            }
        }
        auto to_each_rank = [&](auto write) {
            for (u32 rank = 0; rank < args.world; ++rank) {
                if (ranks >> rank & 1) write(peers[rank]);
            }
        };
        auto store_scale_at = [&](const Quantizer<Config>& quantizer, u64 at) {
            to_each_rank([&](u8* to) {
                reinterpret_cast<float*>(to + args.scale_at)[at] = quantizer.scale;
                if constexpr (Config::kAffine) reinterpret_cast<i32*>(to + args.zero_at)[at] = quantizer.zero;
            });
        };
        auto store_codes_of = [&](const Quantizer<Config>& quantizer, u32 i) {
            const uint2 codes = quantizer.codes(input[i].x[0]);
            to_each_rank([&](u8* to) { store_codes(to + args.codes_at + slot * args.k, mine(i), codes); });
        };

        if constexpr (Config::kBlocks) {
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                Range<Config> range;
                if (mine(i) < vectors) range.include(input[i].x[0]);
                range.combine_block();
                if (mine(i) >= vectors) continue;
                const Quantizer<Config> quantizer(tokens, range);
                store_codes_of(quantizer, i);
                if (mine(i) % kBlockVectors == 0)
                    store_scale_at(quantizer, slot + mine(i) / kBlockVectors * args.scale_block_stride);
            }
        } else {
            Range<Config> range;
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(i) < vectors) range.include(input[i].x[0]);
            }
            combine_threads(team, range, slots, sent);
            const Quantizer<Config> quantizer(tokens, range);
            if (team.thread == 0) store_scale_at(quantizer, slot);
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(i) < vectors) store_codes_of(quantizer, i);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < args.world) {
        const u32 call = reinterpret_cast<const Head*>(peers[args.rank])->calls + 1;
        Head& head = *reinterpret_cast<Head*>(peers[threadIdx.x]);
        if (block == 0) {
            head.counts[call % 2][args.rank] = args.m;
            sent += args.max_tokens - args.m;
        }
        add_release(head.arrived + args.rank, sent);
    }
}

template <class Config, u32 kCtas, bool kDebug>
__device__ __forceinline__ void dispatch(const DispatchArgs& args) {
    const u32 senders = gridDim.x - kCtas;
    if (blockIdx.x < senders) {
        send<Config>(args, blockIdx.x, senders);
    } else {
        receive<kCtas, kDebug>(args);
    }
}

}  // namespace jitgemm
