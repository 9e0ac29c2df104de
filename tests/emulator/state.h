// What a running grid is: the program, clusters with their CTAs and warps, barriers, copies and multiplies in flight.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr u32 kAll = 0xffffffffu;
constexpr u32 kSharedBase = 1024;        // where a CTA's shared memory begins, as on Hopper
constexpr u64 kStepLimit = 4000000000ull;
constexpr u64 kQuietRounds = 2000;       // rounds in which all warps wait: a hang

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const std::string& what) { throw Failure(what); }

std::string hex(u64 value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

// ---- program --------------------------------------------------------------------------------------------------------

enum class Kind : u8 { kNone, kRegister, kValue, kMemory };

struct Operand {
    Kind kind = Kind::kNone;
    i32 reg = -1;   // kRegister; kMemory: base, or -1
    u64 value = 0;  // kValue; kMemory: offset
};

struct Warp;
struct Instruction;

// What an instruction does next: go on, go on after the other warps had their turn, or be tried again.
enum class Next { kOn, kYield, kAgain };
using Handler = Next (*)(Warp&, const Instruction&, u32 lanes);

struct Instruction {
    std::string opcode;
    Handler handler = nullptr;
    i32 predicate = -1;
    bool negated = false;
    bool collective = false;  // lanes of `members`, or all that live, execute it together
    i32 members = -1;         // number of the operand with the mask
    i32 target = -1;          // branches
    std::vector<Operand> operands;
    u32 a = 0, b = 0;         // of the handler: sizes, shapes
};

struct Program {
    std::vector<Instruction> code;
    u32 registers = 0, static_shared = 0, cluster = 1;
    bool waits = false;  // has to wait for the grid before
};

// ---- machine --------------------------------------------------------------------------------------------------------

enum class Seen : u8 { kThread, kWarp, kCta, kCluster };

struct Barrier {
    u32 count = 0, pending = 0, phase = 0;
    i64 bytes = 0;
    u32 thread = 0;               // that initialised it
    Seen seen = Seen::kThread;    // who sees that it did
    bool for_cluster = false, for_copies = false;  // fences have said so
    bool remote = false;          // counts what another CTA sends
};

struct NamedBarrier {
    u32 arrived = 0, generation = 0;
    std::vector<Warp*> waiting;
};

struct Cta;
struct Machine;

struct Copy {  // by cp.async, or a store by the TMA
    std::function<void()> run;
    bool done = false;
    void finish() {
        if (!done) {
            done = true;
            run();
        }
    }
};
using CopyPointer = std::shared_ptr<Copy>;

struct Operands {  // of a multiply in flight: what it reads of shared memory
    std::vector<u32> rows;  // addresses of 16 bytes
    u64 sum;
};

struct Warp {
    Machine* machine;
    Cta* cta;
    u32 number;  // within the CTA
    u32 alive = kAll, pc = 0;
    u32 waited = 0;             // lanes that have waited for the grid before
    std::vector<u32> loading;   // 16 bytes each of shared memory that it may still be loading
    bool together = true;
    u32 pcs[32];
    u64* registers;
    bool at_barrier = false;
    u32 met = 0;  // warps that a barrier has let go on with this one, and that have not gone on yet
    u32 generation = 0, cluster_generation = 0;
    std::vector<std::vector<CopyPointer>> copies[32];  // cp.async of a lane: groups; the last is not committed
    std::vector<CopyPointer> stores[32];            // by the TMA
    std::vector<std::vector<Operands>> multiplies;  // groups; the last is not committed
    Warp() : multiplies(1) {
        for (auto& groups : copies) groups.resize(1);
    }

    bool done() const { return alive == 0; }
};

struct Cta {
    Machine* machine;
    u32 rank;  // within the cluster
    std::vector<u8> shared;
    std::vector<u16> unfenced;  // by 16 bytes of shared memory: 1 + the thread that wrote it and has not fenced
    std::vector<u32> loading;   // by 16 bytes: warps whose loads may be on their way
    std::unordered_map<u32, Barrier> barriers;
    std::vector<u32> fresh;     // barriers that not all see
    Seen all = Seen::kCta;      // who all are
    NamedBarrier named[16];
    std::vector<Warp> warps;
    u32 threads;

    u8* at(u32 address, u32 size, bool aligned = true) {
        if (address < kSharedBase || address + u64(size) > kSharedBase + shared.size())
            fail("shared memory: " + hex(address) + " is outside");
        if (aligned && address % (size > 16 ? 16 : size)) fail("shared memory: " + hex(address) + " is misaligned");
        return shared.data() + (address - kSharedBase);
    }
    void wrote(u32 address, u32 size, u32 thread) {
        for (u32 i = (address - kSharedBase) / 16; i <= (address - kSharedBase + size - 1) / 16; ++i)
            unfenced[i] = u16(thread + 1);
    }
    void loads(Warp& w, u32 address, u32 size) {
        for (u32 i = (address - kSharedBase) / 16; i <= (address - kSharedBase + size - 1) / 16; ++i) {
            if (loading[i] >> w.number & 1) continue;
            loading[i] |= 1u << w.number;
            w.loading.push_back(i);
        }
    }
    // A warp's loads are done once it has fenced or met others at a barrier; not where one of its lanes arrives.
    void loaded(Warp& w) {
        for (const u32 i : w.loading) loading[i] &= ~(1u << w.number);
        w.loading.clear();
    }
    void check_loaded(u32 address, u32 size, u32 but = 0) {
        for (u32 i = (address - kSharedBase) / 16; i <= (address - kSharedBase + size - 1) / 16; ++i)
            if (loading[i] & ~but)
                fail("shared memory " + hex(kSharedBase + 16 * i) + " is overwritten while warp " +
                     std::to_string(__builtin_ctz(loading[i] & ~but)) + "'s load of it may be on its way");
    }
    void all_see(Seen by) {
        std::vector<u32> left;
        for (const u32 at : fresh) {
            Barrier& each = barriers[at];
            each.seen = by == Seen::kCluster && !each.for_cluster ? Seen::kCta : by;
            if (each.seen < all) left.push_back(at);
        }
        fresh = left;
    }
    void check_fenced(u32 address, u32 size, const char* what) {
        for (u32 i = (address - kSharedBase) / 16; i <= (address - kSharedBase + size - 1) / 16; ++i)
            if (unfenced[i])
                fail(std::string(what) + " reads shared memory " + hex(kSharedBase + 16 * i) + ", which thread " +
                     std::to_string(unfenced[i] - 1) + " wrote without fence.proxy.async");
    }
    Barrier& barrier(u32 address) {
        const auto found = barriers.find(address);
        if (found == barriers.end()) fail("mbarrier " + hex(address) + " was not initialised");
        return found->second;
    }
    // The barrier, as a thread of a CTA uses it.
    Barrier& barrier(u32 address, const Cta& user, u32 thread) {
        Barrier& found = barrier(address);
        const Seen least = &user != this ? Seen::kCluster
                           : thread == found.thread ? Seen::kThread
                           : thread / 32 == found.thread / 32 ? Seen::kWarp : Seen::kCta;
        if (found.seen < least) fail("mbarrier " + hex(address) + ": thread " + std::to_string(thread) +
                                     " need not see that it was initialised");
        return found;
    }
};

struct Range {
    u64 begin, end;
};

struct Machine {
    const Program* program;
    std::vector<Range> ranges;
    std::vector<std::unique_ptr<Cta>> ctas;  // of the cluster that runs
    u32 cluster_arrived = 0, cluster_generation = 0, cluster_threads = 0;
    std::multimap<u64, CopyPointer> in_flight;  // by the round in which they arrive
    u64 round = 0, steps = 0, random_state = 1;

    u32 random() {
        random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
        return u32(random_state >> 11);
    }
    void later(std::function<void()> run) { later(std::make_shared<Copy>(Copy{std::move(run)})); }
    void later(CopyPointer copy) { in_flight.emplace(round + random() % 24, std::move(copy)); }

    u8* global(u64 address, u32 size) {
        for (const Range& range : ranges)
            if (address >= range.begin && address + size <= range.end) {
                if (address % size) fail("global memory: " + hex(address) + " is misaligned");
                return reinterpret_cast<u8*>(address);
            }
        fail("global memory: " + std::to_string(size) + " bytes at " + hex(address) + " are outside of all tensors");
    }
    Cta& cta_of(u32& address, Cta& own) {
        const u32 rank = address >> 24;
        address &= 0xffffffu;
        if (rank == 0) return own;
        if (rank > ctas.size()) fail("no CTA of rank " + std::to_string(rank - 1));
        return *ctas[rank - 1];
    }
    void flip(Barrier& barrier) {
        if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.count;
    }
    void arrive(Cta& cta, u32 address, i64 bytes = 0) {
        Barrier& barrier = cta.barrier(address);
        if (barrier.pending == 0) fail("mbarrier " + hex(address) + ": more arrivals than it counts");
        --barrier.pending, barrier.bytes += bytes;
        flip(barrier);
    }
    void complete(Cta& cta, u32 address, i64 bytes) {
        Barrier& barrier = cta.barrier(address);
        barrier.bytes -= bytes;
        flip(barrier);
    }
};

// ---- operands -------------------------------------------------------------------------------------------------------

u64 get(const Warp& w, const Operand& o, u32 lane) {
    if (o.kind == Kind::kRegister) return w.registers[u64(o.reg) * 32 + lane];
    if (o.kind == Kind::kMemory) return (o.reg < 0 ? 0 : w.registers[u64(o.reg) * 32 + lane]) + o.value;
    return o.value;
}

template <class T>
T as(u64 bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
u64 bits_of(T value) {
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T>
T get(const Warp& w, const Operand& o, u32 lane) {
    return as<T>(get(w, o, lane));
}

void put(Warp& w, const Operand& o, u32 lane, u64 value) {
    if (o.kind == Kind::kRegister) w.registers[u64(o.reg) * 32 + lane] = value;
}

u32 thread_of(const Warp& w, u32 lane) { return 32 * w.number + lane; }

template <class F>
void each(u32 lanes, F f) {
    for (; lanes; lanes &= lanes - 1) f(u32(__builtin_ctz(lanes)));
}

}  // namespace
