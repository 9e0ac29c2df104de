// A kernel's constants: what may be chosen, and what follows. The rendered source has a struct of the constants that
// differ from Defaults (jitgemm/kernel/render.py); KernelSpec in jitgemm/kernel/spec.py says what each is.
#pragma once
#include <jitgemm/gemm/types.cuh>

namespace jitgemm {

struct Defaults {
    // Rendered always: kBlockM, kStrips, kStages, kPrefetchStages, kGroupSize, kScaleType, Codec, Wgmma, width(): N of the
    // multiplies that tiles of fewer tokens take, ascending, kWidths of them; the last is kFullN.
    static constexpr RealType kOutType = kBf16;
    static constexpr u32 kHalves = 1, kWarpgroupsK = 1, kSplitK = 1, kMulticastLhs = 1, kCtasPerSm = 1;
    static constexpr u32 kExperts = 0, kLhsGroup = 0;
    static constexpr bool kScatter = false, kTokensAsM = false, kOffset = false, kLhsE8m0 = false, kDebug = false;
    static constexpr bool kF16Sums = false, kByParts = false, kCorrects = false, kChunks = false;
    // Rules by measurement, jitgemm/kernel/tactics.py.
    static constexpr u32 kInFlight = 1, kFragmentSets = 2, kPromoteRecords = 1, kWidths = 1;
    static constexpr bool kDirectLhs = false, kPinSharedBase = false;
};

template <typename Chosen>
struct Derived : Chosen {
    static constexpr u32 kBlockN = kStripRows * Chosen::kStrips;
    static constexpr u32 kWarpgroupsM = Chosen::kTokensAsM ? Chosen::kBlockM / (kStripRows * Chosen::kHalves) : 1;
    // Where rows are tokens, a warpgroup takes all rows of n, or half of 256 in tiles of 64 tokens.
    static constexpr bool kHalfOfColumns = Chosen::kBlockM == 64 && Chosen::kStrips == 4;
    static constexpr u32 kWarpgroupsN = !Chosen::kTokensAsM ? Chosen::kStrips : kHalfOfColumns ? 2 : 1;
    // wgmma's N over all halves, and a thread's sums.
    static constexpr u32 kFullN = Chosen::kTokensAsM ? Chosen::kHalves * kBlockN / kWarpgroupsN : Chosen::kBlockM;
    static constexpr u32 kSums = kFullN / 2;
    // Whether the epilogue multiplies by a number of each row: of f16 sums that is 2^E, by which scales are divided.
    static constexpr bool kRowScales = Chosen::kGroupSize == 0 || Chosen::kF16Sums;

    // Whether sums are stored as the integers that they are.
    static constexpr bool kIntegers = Chosen::kOutType == kS32;

    // Tokens that one split of k reduces and stores: all, or with a scatter multiples of 8, as many for each.
    static constexpr u32 slice() {
        if (Chosen::kTokensAsM) return kTokensOfHalf;
        if (!Chosen::kScatter) return Chosen::kBlockM;
        const u32 eights = Chosen::kBlockM / 8;
        u32 size = ceil_div(eights, Chosen::kSplitK * Chosen::kWarpgroupsK);
        while (eights % size != 0) ++size;
        return 8 * size;
    }
    static constexpr u32 kSliceTokens = slice();

    // Registers of a thread: a CTA starts with as many for all, and the producer's warpgroup gives some to the others.
    static constexpr u32 kConsumers = kWarpgroupsM * kWarpgroupsN * Chosen::kWarpgroupsK;  // warpgroups
    static constexpr u32 kEntryRegisters =
        smaller(255, 65536 / Chosen::kCtasPerSm / (kWarpgroup * (kConsumers + 1)) / 8 * 8);
    static constexpr u32 kAllRegisters = kEntryRegisters * (kConsumers + 1);
    static constexpr u32 kConsumerRegisters = kConsumers == 1 ? 0 : (kAllRegisters - 40) / kConsumers / 8 * 8;
    static constexpr u32 kProducerRegisters = kAllRegisters - kConsumerRegisters * kConsumers;
};

}  // namespace jitgemm
