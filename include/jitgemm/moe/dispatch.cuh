// Tokens on their way to the ranks of their experts, and their routing there, in one launch on every rank.
//
// The last CTAs route the tokens of all ranks that this rank has experts for. The others send this rank's tokens into
// the buffers of the ranks, over NVLink. Choices go first, to all ranks: each word is stamped with its call, so routing
// begins without a fence, while the rest is on its way. A CTA then quantises a token at a time and writes codes, scales
// and weights where a rank has experts of the token's choice. When it has written its last, it adds their number to
// `arrived` of each rank; all CTAs together add max_tokens in every call, so that who waits needs no number of tokens.
// When the grid ends, all tokens have arrived. It has to be resident as a whole, or the last CTAs would keep the others
// out.
#pragma once
#include <jitgemm/moe/ranks.cuh>
#include <jitgemm/moe/route.cuh>
#include <jitgemm/quantize/kernel.cuh>

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
    u32* counts;         // [world + 1]: tokens of each rank, and the parity of the call
    u64 x_row_bytes;
    u64 codes_at, scale_at, zero_at, ids_at, weights_at;  // in a buffer; ids there are stamped, by parity of the call
    u64 scale_block_stride;  // kBlocks only, in elements
    u64 id_bytes;            // 4 or 8
    u32 m, k, top_k, experts;  // experts of a rank
    u32 rank, world, max_tokens;
    i32 weights_type;
    u32 limit_s;  // see Patience
    u32 unused;
};
static_assert(sizeof(DispatchArgs) == 168, "jitgemm/moe/plan.py packs this struct");

// Where choices of a call are in a buffer: [slots][top_k].
__device__ __forceinline__ u64* choices_of(const DispatchArgs& args, u8* buffer, u64 call) {
    const u64 choices = u64(args.world) * args.max_tokens * args.top_k;
    return reinterpret_cast<u64*>(buffer + args.ids_at) + call % 2 * choices;
}

// Of the tokens of all ranks, which have gaps between them.
struct ReceivedChoices {
    const AllTokens& all;
    const u64* words;
    u64 call;
    u32 top_k, first, limit_s;  // first: this rank's expert 0

    __device__ __forceinline__ u32 token(u32 choice) const { return all.slot(choice / top_k); }
    __device__ __forceinline__ u32 place(u32 choice) const {
        return token(choice) * top_k + choice % top_k;
    }
    __device__ __forceinline__ u32 id(const RouteArgs&, u32 choice) const {
        const u32 slot = token(choice);
        return load_stamped(words + slot * top_k + choice % top_k, call, slot / all.max_tokens, limit_s) - first;
    }
};

template <u32 kCtas>
__device__ __forceinline__ void receive(const DispatchArgs& args) {
    __shared__ AllTokens all;
    u8* const own = reinterpret_cast<u8*>(args.peers[args.rank]);

    launch_next_grid();
    wait_for_previous_grid();
    const Head& head = *reinterpret_cast<const Head*>(own);
    const u64 call = head.calls + 1;
    const u32 source = threadIdx.x;
    if (threadIdx.x < 32) {
        const u32 count = source < args.world ? load_stamped(head.counts[call % 2] + source, call, source, args.limit_s) : 0;
        all.set(count, args.max_tokens);
        if (blockIdx.x == gridDim.x - 1 && source <= args.world)
            args.counts[source] = source < args.world ? count : u32(call % 2);
    }
    __syncthreads();

    const u32 choices = all.tokens() * args.top_k, warps = kCtas * blockDim.x / 32;
    const RouteArgs routing{nullptr,      nullptr, args.offsets, args.row_index,
                            args.inverse, choices, args.top_k,   args.experts,
                            0,            32 * max(1u, ceil_div(choices, 32 * warps)), 0};
    const u64* const words = choices_of(args, own, call);
    route<kCtas>(routing, ReceivedChoices{all, words, call, args.top_k, args.rank * args.experts, args.limit_s});

    if (source < args.world) {
        Patience patience(source, args.limit_s);
        while (i32(load_acquire(head.arrived + source) - u32(call) * args.max_tokens) < 0) patience.spend();
    }
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
    auto mine = [&](u32 i) { return team.template vector<kVectors>(i); };
    auto id_of = [&](u32 row, u32 i) { return load_id(args.ids, args.id_bytes, u64(row) * args.top_k + i); };
    const u64 call = reinterpret_cast<const Head*>(peers[args.rank])->calls + 1, first_slot = u64(args.rank) * args.max_tokens;

    if (block == 0 && threadIdx.x < args.world) {
        Head& head = *reinterpret_cast<Head*>(peers[threadIdx.x]);
        store_stamped(head.counts[call % 2] + args.rank, call, args.m);
    }
    // By the last threads first: those have the least to quantise.
    const u32 rows = args.m > block ? ceil_div(args.m - block, blocks) : 0, copies = args.world * args.top_k;
    for (u32 i = blockDim.x - 1 - threadIdx.x; i < rows * copies; i += blockDim.x) {
        const u32 row = block + i / copies * blocks, rank = i % copies / args.top_k, choice = i % args.top_k;
        const u32 expert = id_of(row, choice);
        u64* const to = choices_of(args, peers[rank], call) + (first_slot + row) * args.top_k + choice;
        store_stamped(to, call, expert < args.world * args.experts ? expert : kStampedNone);
    }

    u32 sent = 0;
    for (u32 row = block; row < args.m; row += blocks, ++sent) {
        Input<Config> input[kVectors];
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            if (mine(i) < vectors) input[i] = load<Config>(tokens, row, mine(i));
        }
        const u32 ranks = ranks_of(args.top_k, args.experts, args.world, [&](u32 i) { return id_of(row, i); });
        const u64 slot = first_slot + row;
        for (u32 i = threadIdx.x; i < copies; i += blockDim.x) {
            const u32 rank = i / args.top_k, choice = i % args.top_k;
            if (!(ranks >> rank & 1)) continue;
            const float weight = load_real(args.weights, row * args.top_k + choice, args.weights_type);
            reinterpret_cast<float*>(peers[rank] + args.weights_at)[slot * args.top_k + choice] = weight;
        }
        Held<Config> rotated[Config::kRotated ? kVectors : 1];
        if constexpr (Config::kRotated) {
            Range<Config> range;
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(i) < vectors) rotated[i] = transform(tokens, input[i], row, mine(i), range);
            }
            rotate(rotated);
        }
        auto values = [&](u32 i) -> const Held<Config>& {
            if constexpr (Config::kRotated) return rotated[i];
            else return input[i].x[0];
        };
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
            const uint2 codes = quantizer.codes(values(i));
            to_each_rank([&](u8* to) {
                u8* const out = to + args.codes_at + slot * args.k;
                if constexpr (Config::kRotated) store_rotated<kVectors>(out, mine(0), i, codes);
                else store_codes(out, mine(i), codes);
            });
        };

        if constexpr (Config::kBlocks) {
            constexpr u32 kOwn = Config::kRotated ? kVectors : 1;  // of a thread's vectors, that are of one block
#pragma unroll
            for (u32 i = 0; i < kVectors; i += kOwn) {
                Range<Config> part;
                part.template include_block<kOwn>(&values(i), mine(i) < vectors);
                if (mine(i) >= vectors) continue;
                const Quantizer<Config> quantizer(tokens, part);
#pragma unroll
                for (u32 j = i; j < i + kOwn; ++j) store_codes_of(quantizer, j);
                if (mine(i) % kBlockVectors == 0)
                    store_scale_at(quantizer, slot + mine(i) / kBlockVectors * args.scale_block_stride);
            }
        } else {
            Range<Config> range;
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                if (mine(i) < vectors) range.include(values(i));
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
        if (block == 0) sent += args.max_tokens - args.m;
        add_release(reinterpret_cast<Head*>(peers[threadIdx.x])->arrived + args.rank, sent);
    }
}

template <class Config, u32 kCtas>
__device__ __forceinline__ void dispatch(const DispatchArgs& args) {
    const u32 senders = gridDim.x - kCtas;
    if (blockIdx.x < senders) {
        send<Config>(args, blockIdx.x, senders);
    } else {
        receive<kCtas>(args);
    }
}

}  // namespace jitgemm
