// Runs a kernel's PTX on the CPU, instruction by instruction: as much of Hopper as jitgemm's kernels use.
//
// Clusters run one after another; the warps of a cluster take turns in an order and for as long as a seed decides.
// What the hardware does by itself is as late as it may be: copies by the TMA and cp.async arrive after a random time,
// stores read shared memory when they are waited for. So what a kernel does not wait for goes wrong here. Errors: an
// access outside of the ranges that a launch names or of shared memory, a shared-memory operand that changes before a
// multiply was waited for, a read by the async proxy of what no fence has handed to it, a hang. And what is right here
// by luck alone: a barrier that is used where its initialisation need not be seen, a copy into what a warp may still be
// loading, a wait at CTA scope for what another CTA sends, a grid that writes or ends before it waited for the one
// before it.
//
// Not modelled: caches, time, the limits on registers, the rounding of the tensor cores' sums in fp32 (here each multiply
// of k = 32 is added up exactly and rounded once).
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

// ---- arithmetic -----------------------------------------------------------------------------------------------------

template <class T, class F>
Next unary(Warp& w, const Instruction& in, u32 lanes, F f) {
    each(lanes, [&](u32 l) { put(w, in.operands[0], l, bits_of(f(get<T>(w, in.operands[1], l)))); });
    return Next::kOn;
}

template <class T, class F>
Next binary(Warp& w, const Instruction& in, u32 lanes, F f) {
    each(lanes, [&](u32 l) {
        put(w, in.operands[0], l, bits_of(f(get<T>(w, in.operands[1], l), get<T>(w, in.operands[2], l))));
    });
    return Next::kOn;
}

template <class T, class F>
Next ternary(Warp& w, const Instruction& in, u32 lanes, F f) {
    each(lanes, [&](u32 l) {
        const auto& o = in.operands;
        put(w, o[0], l, bits_of(f(get<T>(w, o[1], l), get<T>(w, o[2], l), get<T>(w, o[3], l))));
    });
    return Next::kOn;
}

float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

u16 to_half(float x) { return bits_of(static_cast<_Float16>(x)); }
float from_half(u16 x) { return static_cast<float>(as<_Float16>(x)); }

u16 to_bf16(float x) {
    const u32 bits = bits_of(x);
    if (std::isnan(x)) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

u8 to_e4m3(float x) {
    const u8 sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7f;
    const float size = std::fabs(x);
    if (size >= 464) return sign | 0x7e;  // rounds beyond 448: saturated
    int exponent = size == 0 ? -6 : std::ilogb(size);
    if (exponent < -6) exponent = -6;
    const float steps = std::nearbyint(std::ldexp(size, 3 - exponent));  // to nearest even: the default mode
    const float rounded = std::ldexp(steps, exponent - 3);
    if (rounded > 448) return sign | 0x7e;
    if (rounded < 0.015625f) return sign | u8(std::ldexp(rounded, 9));
    const int e = std::ilogb(rounded);
    return sign | u8((e + 7) << 3 | (int(std::ldexp(rounded, 3 - e)) & 7));
}

double from_e4m3(u8 code) {
    const int e = code >> 3 & 15, m = code & 7;
    if ((code & 0x7f) == 0x7f) return std::nan("");
    const double size = e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
    return code & 0x80 ? -size : size;
}

double from_e5m2(u8 code) {
    const int e = code >> 2 & 31, m = code & 3;
    if (e == 31) return m ? std::nan("") : code & 0x80 ? -HUGE_VAL : HUGE_VAL;
    const double size = e ? std::ldexp(4 + m, e - 17) : std::ldexp(m, -16);
    return code & 0x80 ? -size : size;
}

i64 saturated(double x, double low, double high) {
    if (std::isnan(x)) return 0;
    return i64(x < low ? low : x > high ? high : x);
}

// ---- conversions ----------------------------------------------------------------------------------------------------

// Types as codes: 'f', 'h' (f16), 's', 'u' and bytes.
struct Type {
    char letter;
    u32 bytes;
};

Type type_of(const std::string& name) {
    const u32 bits = std::stoul(name.substr(1));
    const char letter = name[0] == 'b' ? 'u' : name[0] == 'f' && bits == 16 ? 'h' : name[0];
    return {letter, bits / 8};
}

u64 truncated(u64 value, u32 bytes) { return bytes == 8 ? value : value & ((1ull << 8 * bytes) - 1); }

i64 extended(u64 value, Type type) {
    const u32 shift = 64 - 8 * type.bytes;
    return type.letter == 's' ? i64(value << shift) >> shift : i64(value << shift >> shift);
}

// in.a, in.b: codes of the types; operands[2], a value: rounding, 0 none, 1 to nearest, 2 to zero.
Next convert(Warp& w, const Instruction& in, u32 lanes) {
    const Type to{char(in.a & 255), in.a >> 8}, from{char(in.b & 255), in.b >> 8};
    const u64 rounding = in.operands.back().value;
    each(lanes, [&](u32 l) {
        const u64 bits = get(w, in.operands[1], l);
        u64 result;
        if (from.letter == 'f' || from.letter == 'h') {
            float x = from.letter == 'f' ? as<float>(bits) : from_half(u16(bits));
            if (rounding == 1 && to.letter != 'h') x = std::nearbyint(x);
            if (rounding == 2) x = std::trunc(x);
            if (to.letter == 'f') result = bits_of(x);
            else if (to.letter == 'h') result = to_half(x);
            else if (to.letter == 's') result = truncated(u64(saturated(x, -std::ldexp(1.0, 8 * to.bytes - 1),
                                                                 std::ldexp(1.0, 8 * to.bytes - 1) - 1)), to.bytes);
            else result = u64(saturated(x, 0, std::ldexp(1.0, 8 * to.bytes) - 1));
        } else {
            const i64 x = extended(bits, from);
            if (to.letter == 'f') result = bits_of(from.letter == 's' ? float(x) : float(u64(x)));
            else result = truncated(u64(x), to.bytes);
        }
        put(w, in.operands[0], l, result);
    });
    return Next::kOn;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

void check_waited(const Warp& w, u32 lanes, const char* what);

// in.a: bytes of an element, with bit 8 for a sign; in.b: elements | space << 8.
enum Space : u32 { kGlobal, kShared, kParameter };

Next load(Warp& w, const Instruction& in, u32 lanes) {
    const u32 bytes = in.a & 255, count = in.b & 255, space = in.b >> 8;
    each(lanes, [&](u32 l) {
        const u64 address = get(w, in.operands[count], l);
        const u8* source;
        if (space == kShared) {
            u32 at = u32(address);
            Cta& cta = w.machine->cta_of(at, *w.cta);
            source = cta.at(at, bytes * count);
            if (&cta == w.cta) cta.loads(w, at, bytes * count);
        } else {
            source = space == kGlobal ? w.machine->global(address, bytes * count) : reinterpret_cast<u8*>(address);
        }
        for (u32 i = 0; i < count; ++i) {
            u64 value = 0;
            std::memcpy(&value, source + i * bytes, bytes);
            put(w, in.operands[i], l, in.a >> 8 ? u64(extended(value, {'s', bytes})) : value);
        }
    });
    return Next::kOn;
}

Next store(Warp& w, const Instruction& in, u32 lanes) {
    const u32 bytes = in.a & 255, count = in.b & 255, space = in.b >> 8;
    each(lanes, [&](u32 l) {
        const u64 address = get(w, in.operands[0], l);
        u8* to;
        if (space == kShared) {
            u32 at = u32(address);
            Cta& cta = w.machine->cta_of(at, *w.cta);
            to = cta.at(at, bytes * count);
            cta.wrote(at, bytes * count, thread_of(w, l));
        } else {
            to = w.machine->global(address, bytes * count);
            check_waited(w, 1u << l, "writes global memory");
        }
        for (u32 i = 0; i < count; ++i) {
            const u64 value = get(w, in.operands[1 + i], l);
            std::memcpy(to + i * bytes, &value, bytes);
        }
    });
    return Next::kOn;
}

// cp.async: to shared memory, from global memory, bytes, of which so many are read and the others zero.
Next copy_async(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        const u32 to = u32(get(w, in.operands[0], l)), bytes = u32(in.operands[2].value);
        const u64 from = get(w, in.operands[1], l);
        const u32 inside = in.operands.size() > 3 ? u32(get(w, in.operands[3], l)) : bytes;
        w.cta->at(to, bytes);
        if (inside) w.machine->global(from, bytes);
        Warp* warp = &w;
        const u32 thread = thread_of(w, l);
        auto copy = std::make_shared<Copy>(Copy{[=] {
            u8 values[16] = {};
            if (inside) std::memcpy(values, reinterpret_cast<u8*>(from), inside);
            std::memcpy(warp->cta->at(to, bytes), values, bytes);
            warp->cta->check_loaded(to, bytes, 1u << warp->number);
            warp->cta->wrote(to, bytes, thread);
        }});
        w.copies[l].back().push_back(copy);
    });
    return Next::kOn;
}

Next copy_commit(Warp& w, const Instruction&, u32 lanes) {
    each(lanes, [&](u32 l) { w.copies[l].emplace_back(); });
    return Next::kOn;
}

// Until at most so many committed groups of the lane are in flight.
void wait_for_copies(Warp& w, u32 l, u64 pending) {
    auto& groups = w.copies[l];
    while (groups.size() > pending + 1) {
        for (auto& copy : groups.front()) copy->finish();
        groups.erase(groups.begin());
    }
}

Next copy_wait_group(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) { wait_for_copies(w, l, in.operands[0].value); });
    return Next::kOn;
}

Next copy_wait_all(Warp& w, const Instruction& in, u32 lanes) {
    copy_commit(w, in, lanes);
    each(lanes, [&](u32 l) { wait_for_copies(w, l, 0); });
    return Next::kOn;
}

Next copy_arrive(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        const u32 at = u32(get(w, in.operands[0], l));
        w.cta->barrier(at, *w.cta, thread_of(w, l));
        Warp* warp = &w;
        auto groups = w.copies[l];
        w.machine->later([=] {
            for (auto& group : groups)
                for (auto& copy : group) copy->finish();
            warp->machine->arrive(*warp->cta, at);
        });
    });
    return Next::kOn;
}

// ---- the TMA --------------------------------------------------------------------------------------------------------

struct TileMap {  // tests/emulator/launch.py packs it
    u64 magic, address, columns, rows, row_bytes, element, box_columns, box_rows;
};
constexpr u64 kMagic = 0x70616d656c6974ull;

u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

const TileMap& tile_map(u64 address) {
    const auto& map = *reinterpret_cast<const TileMap*>(address);
    if (map.magic != kMagic) fail("no tensor map at " + hex(address));
    if (map.box_columns * map.element != 128) fail("a tile's rows are not of 128 bytes");
    return map;
}

// What lies outside of the tensor is left out; `f` gets the address in global memory or 0, and the offset in the tile.
template <class F>
void each_of_tile(const TileMap& map, i32 x, i32 y, F f) {
    for (u32 r = 0; r < map.box_rows; ++r)
        for (u32 c = 0; c < map.box_columns; ++c) {
            const i64 column = i64(x) + c, row = i64(y) + r;
            const bool inside = column >= 0 && row >= 0 && column < i64(map.columns) && row < i64(map.rows);
            f(inside ? map.address + row * map.row_bytes + column * map.element : 0, r * 128 + c * u32(map.element));
        }
}

void to_ctas(Warp& w, u32 lane, u32 mask, u32 address, u32 barrier, i64 bytes,
             const std::function<void(Cta&, u32)>& write) {
    Machine* machine = w.machine;
    const u32 own = w.cta->rank;
    for (u32 rank = 0; rank < machine->ctas.size(); ++rank) {
        if (!(mask >> rank & 1)) continue;
        u32 to = address, at = barrier;
        Cta* cta = &machine->cta_of(to, *machine->ctas[rank]);
        machine->cta_of(at, *machine->ctas[own]);
        if (!cta->barrier(at, *w.cta, thread_of(w, lane)).for_copies)
            fail("mbarrier " + hex(at) + ": no fence has shown it to the copy engine");
        machine->later([=] {
            write(*cta, to);
            machine->complete(*cta, at, bytes);
        });
    }
}

void check_ring(Cta& cta, u32 to, u32 bytes) {
    cta.check_loaded(to, bytes);
    std::memset(cta.unfenced.data() + (to - kSharedBase) / 16, 0, 2 * ((bytes + 15) / 16));
}

// [to], [map, {x, y}], [barrier] (, mask)
Next tile_load(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        const auto& o = in.operands;
        const TileMap map = tile_map(get(w, o[1], l));
        const i32 x = get<i32>(w, o[2], l), y = get<i32>(w, o[3], l);
        const u32 mask = in.a ? u32(get(w, o[5], l)) & 0xffff : 1u << w.cta->rank;
        const u32 bytes = u32(map.box_rows) * 128;
        if (get(w, o[0], l) % 128) fail("a tile's destination is misaligned");
        to_ctas(w, l, mask, u32(get(w, o[0], l)), u32(get(w, o[4], l)), bytes, [=](Cta& cta, u32 to) {
            cta.at(to, bytes, false);
            each_of_tile(map, x, y, [&](u64 from, u32 offset) {
                u8* byte = cta.at(swizzled(to + offset), u32(map.element), false);
                if (from) std::memcpy(byte, reinterpret_cast<u8*>(from), map.element);
                else std::memset(byte, 0, map.element);
            });
            check_ring(cta, to, bytes);
        });
    });
    return Next::kOn;
}

// [to], [from], bytes, [barrier] (, mask), policy
Next bulk_load(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        const auto& o = in.operands;
        const u64 from = get(w, o[1], l);
        const u32 bytes = u32(get(w, o[2], l));
        const u32 mask = in.a ? u32(get(w, o[4], l)) & 0xffff : 1u << w.cta->rank;
        if (bytes % 16 || from % 16 || get(w, o[0], l) % 16) fail("a bulk copy is misaligned");
        for (u32 i = 0; i < bytes; i += 16) w.machine->global(from + i, 16);
        to_ctas(w, l, mask, u32(get(w, o[0], l)), u32(get(w, o[3], l)), bytes, [=](Cta& cta, u32 to) {
            std::memcpy(cta.at(to, bytes, false), reinterpret_cast<u8*>(from), bytes);
            check_ring(cta, to, bytes);
        });
    });
    return Next::kOn;
}

// [map, {x, y}], [from]
Next tile_store(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        const auto& o = in.operands;
        const TileMap map = tile_map(get(w, o[0], l));
        const i32 x = get<i32>(w, o[1], l), y = get<i32>(w, o[2], l);
        const u32 from = u32(get(w, o[3], l));
        Cta* cta = w.cta;
        check_waited(w, 1u << l, "stores a tile");
        cta->check_fenced(from, u32(map.box_rows) * 128, "a tile's store");
        w.stores[l].push_back(std::make_shared<Copy>(Copy{[=] {
            each_of_tile(map, x, y, [&](u64 to, u32 offset) {
                const u8* byte = cta->at(swizzled(from + offset), u32(map.element), false);
                if (to) std::memcpy(reinterpret_cast<u8*>(to), byte, map.element);
            });
        }}));
        if (w.machine->random() % 2) w.machine->later(w.stores[l].back());
    });
    return Next::kOn;
}

Next store_wait(Warp& w, const Instruction& in, u32 lanes) {
    if (in.operands[0].value != 0) fail("only all stores can be waited for");
    each(lanes, [&](u32 l) {
        for (auto& copy : w.stores[l]) copy->finish();
        w.stores[l].clear();
    });
    return Next::kOn;
}

// [to], {values}, [barrier]
Next store_remote(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        const auto& o = in.operands;
        u32 to = u32(get(w, o[0], l)), at = u32(get(w, o[5], l));
        if (to >> 24 != at >> 24) fail("st.async: address and mbarrier are of different CTAs");
        Cta* cta = &w.machine->cta_of(to, *w.cta);
        at &= 0xffffffu;
        u32 values[4];
        for (u32 i = 0; i < 4; ++i) values[i] = u32(get(w, o[1 + i], l));
        Machine* machine = w.machine;
        cta->barrier(at, *w.cta, thread_of(w, l));
        const bool remote = cta != w.cta;
        machine->later([=] {
            std::memcpy(cta->at(to, 16), values, 16);
            cta->check_loaded(to, 16);
            cta->barrier(at).remote |= remote;
            machine->complete(*cta, at, 16);
        });
    });
    return Next::kOn;
}

// ---- barriers -------------------------------------------------------------------------------------------------------

Next barrier_init(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        const u32 at = u32(get(w, in.operands[0], l)), count = u32(get(w, in.operands[1], l));
        w.cta->at(at, 8);
        w.cta->barriers[at] = {count, count, 0, 0, thread_of(w, l)};
        w.cta->fresh.push_back(at);
    });
    return Next::kOn;
}

Next barrier_arrive(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        u32 at = u32(get(w, in.operands[1], l));
        const i64 bytes = in.operands.size() > 2 ? i64(u32(get(w, in.operands[2], l))) : 0;
        Cta& cta = w.machine->cta_of(at, *w.cta);
        cta.barrier(at, *w.cta, thread_of(w, l));
        w.machine->arrive(cta, at, bytes);
    });
    return Next::kOn;
}

Next barrier_try_wait(Warp& w, const Instruction& in, u32 lanes) {
    bool all = true;
    each(lanes, [&](u32 l) {
        const Barrier& barrier = w.cta->barrier(u32(get(w, in.operands[1], l)), *w.cta, thread_of(w, l));
        const bool over = barrier.phase != (get(w, in.operands[2], l) & 1);
        if (over && barrier.remote && in.opcode.find(".cluster") == std::string::npos)
            fail("mbarrier: a wait at CTA scope for what another CTA sends");
        put(w, in.operands[0], l, over);
        all &= over;
    });
    return all ? Next::kOn : Next::kYield;
}

Next named_barrier(Warp& w, const Instruction& in, u32 lanes) {
    const u32 l = u32(__builtin_ctz(lanes));
    const u32 threads = in.operands.size() > 1 ? u32(get(w, in.operands[1], l)) : w.cta->threads;
    NamedBarrier& barrier = w.cta->named[get(w, in.operands[0], l) & 15];
    if (!w.at_barrier) {
        w.at_barrier = true, w.generation = barrier.generation;
        barrier.arrived += 32;
        if (barrier.arrived >= threads) {
            barrier.arrived = 0, ++barrier.generation;
            if (threads == w.cta->threads) w.cta->all_see(Seen::kCta);
        }
    }
    if (barrier.generation == w.generation) return Next::kAgain;
    w.at_barrier = false;
    w.cta->loaded(w);
    return Next::kOn;
}

Next cluster_arrive(Warp& w, const Instruction&, u32) {
    Machine& machine = *w.machine;
    w.cluster_generation = machine.cluster_generation;
    machine.cluster_arrived += 32;
    if (machine.cluster_arrived == machine.cluster_threads) {
        machine.cluster_arrived = 0, ++machine.cluster_generation;
        for (auto& cta : machine.ctas) cta->all_see(Seen::kCluster);
    }
    return Next::kOn;
}

Next cluster_wait(Warp& w, const Instruction&, u32) {
    return w.machine->cluster_generation == w.cluster_generation ? Next::kAgain : Next::kOn;
}

Next fence_async(Warp& w, const Instruction&, u32 lanes) {
    for (u16& thread : w.cta->unfenced)
        if (thread && thread - 1u >= 32 * w.number && thread - 1u < 32 * w.number + 32 &&
            lanes >> (thread - 1 - 32 * w.number) & 1)
            thread = 0;
    each(lanes, [&](u32 l) {
        for (const u32 at : w.cta->fresh)
            if (w.cta->barriers[at].thread == thread_of(w, l)) w.cta->barriers[at].for_copies = true;
    });
    return Next::kOn;
}

Next fence_initialised(Warp& w, const Instruction&, u32 lanes) {
    each(lanes, [&](u32 l) {
        for (const u32 at : w.cta->fresh)
            if (w.cta->barriers[at].thread == thread_of(w, l)) w.cta->barriers[at].for_cluster = true;
    });
    return Next::kOn;
}

Next fence(Warp& w, const Instruction&, u32) {
    w.cta->loaded(w);
    return Next::kOn;
}

Next warp_sync(Warp& w, const Instruction&, u32) {
    for (const u32 at : w.cta->fresh) {
        Barrier& barrier = w.cta->barriers[at];
        if (barrier.seen == Seen::kThread && barrier.thread / 32 == w.number) barrier.seen = Seen::kWarp;
    }
    return Next::kOn;
}

// ---- the grid before ------------------------------------------------------------------------------------------------

Next wait_for_grid(Warp& w, const Instruction&, u32 lanes) {
    w.waited |= lanes;
    return Next::kOn;
}

// Only what every thread waits for is over when the next grid is told so: that grid's successor may have started, too.
void check_waited(const Warp& w, u32 lanes, const char* what) {
    if (w.machine->program->waits && (lanes & ~w.waited))
        fail("thread " + std::to_string(thread_of(w, u32(__builtin_ctz(lanes & ~w.waited)))) + " " + what +
             " without griddepcontrol.wait");
}

Next nothing(Warp&, const Instruction&, u32) { return Next::kOn; }

// ---- across a warp --------------------------------------------------------------------------------------------------

enum class Shuffle : u32 { kIndex, kUp, kDown, kButterfly };

// d, p, a, b, c, mask
Next shuffle(Warp& w, const Instruction& in, u32 lanes) {
    u64 values[32];
    for (u32 l = 0; l < 32; ++l) values[l] = get(w, in.operands[2], l);
    u64 results[32], inside[32];
    each(lanes, [&](u32 l) {
        const i32 b = i32(get(w, in.operands[3], l)), c = i32(get(w, in.operands[4], l));
        const i32 segment = c >> 8 & 31, clamp = c & 31, lane = i32(l);
        const i32 most = (lane & segment) | (clamp & ~segment), least = lane & segment;
        i32 from = 0;
        bool valid = false;
        switch (Shuffle(in.a)) {
            case Shuffle::kUp: from = lane - (b & 31), valid = from >= most; break;
            case Shuffle::kDown: from = lane + (b & 31), valid = from <= most; break;
            case Shuffle::kButterfly: from = lane ^ (b & 31), valid = from <= most; break;
            case Shuffle::kIndex: from = least | (b & 31 & ~segment), valid = from <= most; break;
        }
        if (!valid) from = lane;
        if (!(lanes >> from & 1)) fail("shfl reads lane " + std::to_string(from) + ", which takes no part");
        results[l] = values[from], inside[l] = valid;
    });
    each(lanes, [&](u32 l) { put(w, in.operands[0], l, results[l]), put(w, in.operands[1], l, inside[l]); });
    return Next::kOn;
}

Next ballot(Warp& w, const Instruction& in, u32 lanes) {
    u32 result = 0;
    each(lanes, [&](u32 l) { result |= u32(get(w, in.operands[1], l) & 1) << l; });
    each(lanes, [&](u32 l) { put(w, in.operands[0], l, result); });
    return Next::kOn;
}

template <class F>
Next reduce(Warp& w, const Instruction& in, u32 lanes, u32 start, F f) {
    u32 result = start;
    each(lanes, [&](u32 l) { result = f(result, u32(get(w, in.operands[1], l))); });
    each(lanes, [&](u32 l) { put(w, in.operands[0], l, result); });
    return Next::kOn;
}

Next match_any(Warp& w, const Instruction& in, u32 lanes) {
    u32 values[32];
    each(lanes, [&](u32 l) { values[l] = u32(get(w, in.operands[1], l)); });
    each(lanes, [&](u32 l) {
        u32 same = 0;
        each(lanes, [&](u32 m) { same |= u32(values[m] == values[l]) << m; });
        put(w, in.operands[0], l, same);
    });
    return Next::kOn;
}

Next elect(Warp& w, const Instruction& in, u32 lanes) {
    const u32 leader = u32(__builtin_ctz(lanes));
    each(lanes, [&](u32 l) { put(w, in.operands[0], l, leader), put(w, in.operands[1], l, l == leader); });
    return Next::kOn;
}

// [row], {words}; in.a matrices: lane l holds columns 2 * (l % 4) and the next of row l / 4, or transposed such rows of
// that column
Next store_matrices(Warp& w, const Instruction& in, u32) {
    for (u32 i = 0; i < in.a; ++i)
        for (u32 l = 0; l < 32; ++l) {
            const u32 word = u32(get(w, in.operands[1 + i], l));
            for (u32 half = 0; half < 2; ++half) {
                const u32 pair = 2 * (l % 4) + half, of_row = 8 * i + (in.b ? pair : l / 4);
                const u32 row = u32(get(w, in.operands[0], of_row)), at = row + 2 * (in.b ? l / 4 : pair);
                const u16 value = u16(word >> 16 * half);
                w.cta->at(row, 16);
                std::memcpy(w.cta->at(at, 2), &value, 2);
                w.cta->wrote(at, 2, thread_of(w, of_row));
            }
        }
    return Next::kOn;
}

// ---- multiplies -----------------------------------------------------------------------------------------------------

// Row `row` of an operand in shared memory, its 32 bytes; their addresses go to `rows`.
void operand_row(Cta& cta, u64 descriptor, u32 row, u8 (&bytes)[32], std::vector<u32>& rows) {
    const u32 start = u32(descriptor & 0x3fff) << 4, stride = u32(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) fail("wgmma: the descriptor's swizzle is not of 128 bytes");
    for (u32 half = 0; half < 2; ++half) {
        const u32 address = swizzled(start + row / 8 * stride + row % 8 * 128 + 16 * half);
        std::memcpy(bytes + 16 * half, cta.at(address, 16), 16);
        rows.push_back(address);
    }
}

u64 sum_of(Cta& cta, const std::vector<u32>& rows) {
    u64 sum = 14695981039346656037ull;
    for (const u32 row : rows)
        for (u32 i = 0; i < 16; i += 8) {
            u64 word;
            std::memcpy(&word, cta.at(row, 16) + i, 8);
            sum = (sum ^ word) * 1099511628211ull, sum ^= sum >> 29;
        }
    return sum;
}

// A step of e4m3 with sums in f16, as MMA-Sim has Hopper's (tests/tensor_core.py): products by the exponents of their
// factors and the sum before are cut off 13 bits below the largest exponent, their sum again, then rounded to f16.
u16 half_step(const u8 (&a)[32], const u8 (&b)[32], u16 before) {
    static double table[256];
    if (table[1] == 0)
        for (u32 i = 0; i < 256; ++i) table[i] = from_e4m3(u8(i));
    auto exponent = [](u8 code) { return std::max(code >> 3 & 15, 1) - 7; };
    auto cut = [](double value, int last) { return std::ldexp(std::trunc(std::ldexp(value, -last)), last); };
    const double acc = from_half(before);
    int largest = acc == 0 ? -1000 : std::ilogb(acc);
    for (u32 i = 0; i < 32; ++i)
        if (table[a[i]] * table[b[i]] != 0) largest = std::max(largest, exponent(a[i]) + exponent(b[i]));
    double sum = cut(acc, largest - 13);
    for (u32 i = 0; i < 32; ++i) sum += cut(table[a[i]] * table[b[i]], largest - 13);
    if (sum != 0) sum = cut(sum, std::ilogb(sum) - 13);
    return to_half(float(sum));
}

// in.a: n; in.b: 1 for e4m3, 2 for e4m3 with sums in f16, 3 for e5m2 times e4m3. {d}, {a} or descriptor, descriptor, whether d is added to
Next multiply(Warp& w, const Instruction& in, u32) {
    const u32 n = in.a, results = in.b == 2 ? n / 4 : n / 2;
    const bool floats = in.b != 0;
    const auto& o = in.operands;
    // With a's registers three more operands stand between.
    const bool from_registers = o.size() >= results + 4 + 2 + (floats ? 2 : 0);
    const u32 at = results + (from_registers ? 4 : 1);
    Operands reads;
    u8 a[16][32];
    if (from_registers) {
        for (u32 l = 0; l < 32; ++l)
            for (u32 i = 0; i < 4; ++i) {
                const u32 word = u32(get(w, o[results + i], l));
                std::memcpy(&a[l / 4 + 8 * (i % 2)][4 * (l % 4) + 16 * (i / 2)], &word, 4);
            }
    } else {
        for (u32 r = 0; r < 16; ++r)
            operand_row(*w.cta, get(w, o[results], 0), 16 * (w.number % 4) + r, a[r], reads.rows);
    }
    const bool adds = get(w, o[at + 1], 0) & 1;
    static double table[256], e5m2[256];
    if (table[1] == 0)
        for (u32 i = 0; i < 256; ++i) table[i] = from_e4m3(u8(i)), e5m2[i] = from_e5m2(u8(i));
    const double* of_a = in.b == 3 ? e5m2 : table;
    for (u32 column = 0; column < n; ++column) {
        u8 b[32];
        operand_row(*w.cta, get(w, o[at], 0), column, b, reads.rows);
        for (u32 row = 0; row < 16; ++row) {
            const u32 lane = 4 * (row % 8) + column % 8 / 2, number = column / 8 * 4 + row / 8 * 2 + column % 2;
            if (in.b == 2) {
                const u32 pair = u32(get(w, o[number / 2], lane)), shift = column % 2 * 16;
                const u32 sum = half_step(a[row], b, adds ? u16(pair >> shift) : u16(0));
                put(w, o[number / 2], lane, (pair & ~(0xffffu << shift)) | sum << shift);
                continue;
            }
            const u64 before = adds ? get(w, o[number], lane) : 0;
            if (floats) {
                double sum = as<float>(before);
                for (u32 i = 0; i < 32; ++i) sum += of_a[a[row][i]] * table[b[i]];
                put(w, o[number], lane, bits_of(float(sum)));
            } else {
                i32 sum = as<i32>(before);
                for (u32 i = 0; i < 32; ++i) sum += i32(int8_t(a[row][i])) * int8_t(b[i]);
                put(w, o[number], lane, bits_of(sum));
            }
        }
    }
    for (const u32 row : reads.rows) w.cta->check_fenced(row, 16, "wgmma");
    reads.sum = sum_of(*w.cta, reads.rows);
    w.multiplies.back().push_back(std::move(reads));
    return Next::kOn;
}

Next multiply_commit(Warp& w, const Instruction&, u32) {
    w.multiplies.emplace_back();
    return Next::kOn;
}

Next multiply_wait(Warp& w, const Instruction& in, u32) {
    const u64 pending = in.operands[0].value;
    while (w.multiplies.size() > pending + 1) {
        for (const Operands& reads : w.multiplies.front())
            if (sum_of(*w.cta, reads.rows) != reads.sum) fail("wgmma: what it reads changed before it was waited for");
        w.multiplies.erase(w.multiplies.begin());
    }
    return Next::kOn;
}

// ---- opcodes --------------------------------------------------------------------------------------------------------

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
    return parts;
}

#define UNARY(type, expression)                                                                \
    [](Warp& w, const Instruction& in, u32 lanes) {                                            \
        return unary<type>(w, in, lanes, [](type a) { return expression; });                   \
    }
#define BINARY(type, expression)                                                               \
    [](Warp& w, const Instruction& in, u32 lanes) {                                            \
        return binary<type>(w, in, lanes, [](type a, type b) { return expression; });          \
    }
#define TERNARY(type, expression)                                                              \
    [](Warp& w, const Instruction& in, u32 lanes) {                                            \
        return ternary<type>(w, in, lanes, [](type a, type b, type c) { return expression; }); \
    }

u32 bytewise_difference(u32 a, u32 b) {
    u32 result = 0;
    for (u32 i = 0; i < 32; i += 8) result |= u32(std::abs(i32(a >> i & 255) - i32(b >> i & 255))) << i;
    return result;
}

u32 reversed(u32 a) {
    u32 result = 0;
    for (u32 i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
    return result;
}

u32 permuted(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 pick = selector >> 4 * i & 15, byte = u32(bytes >> 8 * (pick & 7)) & 255;
        result |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}

u32 packed_s8(i32 a, i32 b, u32 c) {
    auto code = [](i32 x) { return u32(x < -128 ? -128 : x > 127 ? 127 : x) & 255; };
    return c << 16 | code(a) << 8 | code(b);
}

float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? std::nanf("") : a > b ? a : b; }
float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? std::nanf("") : a < b ? a : b; }

// Of halves 0 and 16 bits up.
float half_at(u32 pair, u32 at) { return from_half(u16(pair >> at)); }

// a * b + c, rounded once: the sum is exact in the 64 bits of long double, from 2^-48 to f16's largest.
u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (u32 at = 0; at < 32; at += 16) {
        const long double sum = (long double)half_at(a, at) * half_at(b, at) + half_at(c, at);
        result |= u32(bits_of(static_cast<_Float16>(sum))) << at;
    }
    return result;
}

u32 max_halves(u32 a, u32 b) { return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff); }

const std::map<std::string, Handler>& plain_opcodes() {
    static const std::map<std::string, Handler> table = {
        {"abs.f32", UNARY(float, std::fabs(a))},
        {"neg.f32", UNARY(float, -a)},
        {"neg.s32", UNARY(u32, 0u - a)},
        {"not.b32", UNARY(u32, ~a)},
        {"not.b64", UNARY(u64, ~a)},
        {"not.pred", UNARY(u8, u8(!a))},
        {"popc.b32", UNARY(u32, u32(__builtin_popcount(a)))},
        {"brev.b32", UNARY(u32, reversed(a))},
        {"bfind.shiftamt.u32", UNARY(u32, a ? u32(__builtin_clz(a)) : kAll)},
        {"clz.b32", UNARY(u32, a ? u32(__builtin_clz(a)) : 32u)},
        {"ex2.approx.ftz.f32", UNARY(float, flushed(std::exp2(flushed(a))))},
        {"rcp.approx.ftz.f32", UNARY(float, flushed(1.0f / flushed(a)))},
        {"sqrt.rn.f32", UNARY(float, std::sqrt(a))},
        {"mul.f32", BINARY(float, a * b)},
        {"mul.rn.f32", BINARY(float, a * b)},
        {"add.f32", BINARY(float, a + b)},
        {"add.rn.f32", BINARY(float, a + b)},
        {"sub.f32", BINARY(float, a - b)},
        {"sub.rn.f32", BINARY(float, a - b)},
        {"div.rn.f32", BINARY(float, a / b)},
        {"max.f32", BINARY(float, std::fmax(a, b))},
        {"min.f32", BINARY(float, std::fmin(a, b))},
        {"max.NaN.f32", BINARY(float, max_nan(a, b))},
        {"min.NaN.f32", BINARY(float, min_nan(a, b))},
        {"copysign.f32", BINARY(float, std::copysign(b, a))},
        {"fma.rn.f32", TERNARY(float, std::fma(a, b, c))},
        {"mul.rn.f16x2", BINARY(u32, fma_halves(a, b, 0x80008000u))},
        {"fma.rn.f16x2", TERNARY(u32, fma_halves(a, b, c))},
        {"max.u16x2", BINARY(u32, max_halves(a, b))},
        {"shf.r.wrap.b32", TERNARY(u32, u32((u64(b) << 32 | a) >> (c & 31)))},
        {"shf.l.wrap.b32", TERNARY(u32, u32((u64(b) << 32 | a) << (c & 31) >> 32))},
        {"vabsdiff4.u32.u32.u32", BINARY(u32, bytewise_difference(a, b))},
        {"prmt.b32", TERNARY(u32, permuted(a, b, c))},
        {"cvt.pack.sat.s8.s32.b32", TERNARY(u32, packed_s8(i32(a), i32(b), c))},
        {"cvt.rn.bf16x2.f32", BINARY(float, u32(to_bf16(a)) << 16 | to_bf16(b))},
        {"cvt.rn.f16x2.f32", BINARY(float, u32(to_half(a)) << 16 | to_half(b))},
        {"cvt.rn.satfinite.e4m3x2.f32", BINARY(float, u16(to_e4m3(a) << 8 | to_e4m3(b)))},
        {"bfi.b32",
         [](Warp& w, const Instruction& in, u32 lanes) {
             each(lanes, [&](u32 l) {
                 const auto& o = in.operands;
                 const u32 start = u32(get(w, o[3], l)) & 255, length = u32(get(w, o[4], l)) & 255;
                 const u32 mask = start > 31 ? 0 : u32(length > 31 ? kAll : (1u << length) - 1) << start;
                 const u32 bits = start > 31 ? 0 : u32(get(w, o[1], l)) << start;
                 put(w, o[0], l, (bits & mask) | (u32(get(w, o[2], l)) & ~mask));
             });
             return Next::kOn;
         }},
        {"mapa.shared::cluster.u32", BINARY(u32, (a & 0xffffffu) | (b + 1) << 24)},
        {"vote.sync.ballot.b32", ballot},
        {"redux.sync.max.u32",
         [](Warp& w, const Instruction& in, u32 lanes) {
             return reduce(w, in, lanes, 0, [](u32 a, u32 b) { return std::max(a, b); });
         }},
        {"redux.sync.or.b32",
         [](Warp& w, const Instruction& in, u32 lanes) {
             return reduce(w, in, lanes, 0, [](u32 a, u32 b) { return a | b; });
         }},
        {"redux.sync.add.u32",
         [](Warp& w, const Instruction& in, u32 lanes) {
             return reduce(w, in, lanes, 0, [](u32 a, u32 b) { return a + b; });
         }},
        {"match.any.sync.b32", match_any},
        {"elect.sync", elect},
        {"bar.warp.sync", warp_sync},
        {"bar.sync", named_barrier},
        {"barrier.cluster.arrive.relaxed", cluster_arrive},
        {"barrier.cluster.arrive.release", cluster_arrive},
        {"barrier.cluster.wait.acquire", cluster_wait},
        {"mbarrier.init.shared::cta.b64", barrier_init},
        {"mbarrier.arrive.expect_tx.shared::cta.b64", barrier_arrive},
        {"mbarrier.arrive.shared::cta.b64", barrier_arrive},
        {"mbarrier.arrive.shared::cluster.b64", barrier_arrive},
        {"mbarrier.try_wait.parity.shared::cta.b64", barrier_try_wait},
        {"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", barrier_try_wait},
        {"mbarrier.test_wait.parity.shared::cta.b64", barrier_try_wait},
        {"fence.proxy.async.shared::cta", fence_async},
        {"fence.mbarrier_init.release.cluster", fence_initialised},
        {"prefetch.global.L2", nothing},
        {"fence.acq_rel.cta", fence},
        {"fence.acq_rel.gpu", fence},
        {"membar.gl", fence},
        {"griddepcontrol.wait", wait_for_grid},
        {"griddepcontrol.launch_dependents", nothing},
        {"prefetch.tensormap", nothing},
        {"createpolicy.fractional.L2::evict_first.b64", nothing},
        {"createpolicy.fractional.L2::evict_unchanged.b64", nothing},
        {"cp.async.cg.shared.global", copy_async},
        {"cp.async.ca.shared.global", copy_async},
        {"cp.async.wait_all", copy_wait_all},
        {"cp.async.wait_group", copy_wait_group},
        {"cp.async.commit_group", copy_commit},
        {"cp.async.mbarrier.arrive.noinc.shared::cta.b64", copy_arrive},
        {"cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", tile_store},
        {"cp.async.bulk.commit_group", nothing},
        {"cp.async.bulk.wait_group", store_wait},
        {"cp.async.bulk.wait_group.read", store_wait},
        {"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32", store_remote},
        {"wgmma.fence.sync.aligned", nothing},
        {"wgmma.commit_group.sync.aligned", multiply_commit},
        {"wgmma.wait_group.sync.aligned", multiply_wait},
        {"setmaxnreg.dec.sync.aligned.u32", nothing},
        {"setmaxnreg.inc.sync.aligned.u32", nothing},
        {"trap", [](Warp&, const Instruction&, u32) -> Next { fail("trap"); }},
    };
    return table;
}

template <class T>
Handler integer_handler(const std::string& name) {
    using S = std::make_signed_t<T>;
    constexpr T kBits = 8 * sizeof(T);
    if (name == "add") return BINARY(T, T(a + b));
    if (name == "sub") return BINARY(T, T(a - b));
    if (name == "mul") return BINARY(T, T(a * b));
    if (name == "mad") return TERNARY(T, T(a * b + c));
    if (name == "and") return BINARY(T, T(a & b));
    if (name == "or") return BINARY(T, T(a | b));
    if (name == "xor") return BINARY(T, T(a ^ b));
    if (name == "min.u") return BINARY(T, std::min(a, b));
    if (name == "max.u") return BINARY(T, std::max(a, b));
    if (name == "min.s") return BINARY(S, std::min(a, b));
    if (name == "max.s") return BINARY(S, std::max(a, b));
    if (name == "div.u") return BINARY(T, b ? T(a / b) : T(-1));
    if (name == "rem.u") return BINARY(T, b ? T(a % b) : a);
    if (name == "mov") return UNARY(T, a);
    // A shift's distance has 32 bits.
    if (name == "shl")
        return [](Warp& w, const Instruction& in, u32 lanes) {
            each(lanes, [&](u32 l) {
                const u32 by = u32(get(w, in.operands[2], l));
                put(w, in.operands[0], l, by >= kBits ? 0 : u64(T(get<T>(w, in.operands[1], l) << by)));
            });
            return Next::kOn;
        };
    if (name == "shr.u" || name == "shr.s") {
        if (name == "shr.u")
            return [](Warp& w, const Instruction& in, u32 lanes) {
                each(lanes, [&](u32 l) {
                    const u32 by = u32(get(w, in.operands[2], l));
                    put(w, in.operands[0], l, by >= kBits ? 0 : u64(T(get<T>(w, in.operands[1], l) >> by)));
                });
                return Next::kOn;
            };
        return [](Warp& w, const Instruction& in, u32 lanes) {
            each(lanes, [&](u32 l) {
                const u32 by = std::min(u32(get(w, in.operands[2], l)), u32(kBits - 1));
                put(w, in.operands[0], l, u64(T(get<S>(w, in.operands[1], l) >> by)));
            });
            return Next::kOn;
        };
    }
    return nullptr;
}

template <class T>
Handler comparison(const std::string& name) {
    if (name == "eq") return BINARY(T, u8(a == b));
    if (name == "equ") return BINARY(T, u8(!(a < b || a > b)));
    if (name == "ne" || name == "neu") return BINARY(T, u8(a != b));
    if (name == "lt") return BINARY(T, u8(a < b));
    if (name == "le") return BINARY(T, u8(a <= b));
    if (name == "gt") return BINARY(T, u8(a > b));
    if (name == "ge") return BINARY(T, u8(a >= b));
    // Floats: true where one of them is NaN.
    if (name == "ltu") return BINARY(T, u8(!(a >= b)));
    if (name == "leu") return BINARY(T, u8(!(a > b)));
    if (name == "gtu") return BINARY(T, u8(!(a <= b)));
    if (name == "geu") return BINARY(T, u8(!(a < b)));
    if (name == "nan") return BINARY(T, u8(a != a || b != b));
    return nullptr;
}

Handler comparison_of(const std::string& name, const std::string& type) {
    if (name == "ne" && type == "f32") return BINARY(float, u8(a < b || a > b));
    if (type == "f32") return comparison<float>(name);
    const Type t = type_of(type);
    const bool sign = t.letter == 's';
    if (t.bytes == 2) return sign ? comparison<int16_t>(name) : comparison<u16>(name);
    if (t.bytes == 4) return sign ? comparison<i32>(name) : comparison<u32>(name);
    return sign ? comparison<i64>(name) : comparison<u64>(name);
}

Handler integer_of(const std::string& name, u32 bytes) {
    return bytes == 2 ? integer_handler<u16>(name)
                      : bytes == 4 ? integer_handler<u32>(name) : integer_handler<u64>(name);
}

void find_handler(Instruction& in) {
    const auto parts = split(in.opcode);
    const std::string &name = parts[0], &last = parts.back();
    auto found = plain_opcodes().find(in.opcode);
    static const std::map<std::string, i32> masks = {{"vote", 2}, {"redux", 2}, {"match", 2}, {"elect", 2}};
    if (found != plain_opcodes().end()) {
        in.handler = found->second;
        if (masks.count(name)) in.collective = true, in.members = masks.at(name);
        if (in.opcode == "bar.warp.sync") in.collective = true, in.members = 0;
        if (in.opcode == "bar.sync" || name == "barrier" || name == "wgmma" || name == "setmaxnreg")
            in.collective = true;
        return;
    }
    if (name == "bra" || name == "ret" || name == "exit") return;
    if (name == "shfl") {
        in.collective = true, in.members = 5, in.handler = shuffle;
        const std::string& mode = parts[2];
        in.a = u32(mode == "idx" ? Shuffle::kIndex
                                 : mode == "up" ? Shuffle::kUp
                                                : mode == "down" ? Shuffle::kDown : Shuffle::kButterfly);
        return;
    }
    if (name == "wgmma") {
        in.collective = true, in.handler = multiply, in.b = last != "e4m3" ? 0 : parts[parts.size() - 3] == "f16" ? 2 : 1;
        if (parts[parts.size() - 2] == "e5m2") in.b = in.b == 1 && last == "e4m3" ? 3 : (fail("wgmma: " + in.opcode), 0);
        const std::string& shape = parts[4];
        in.a = std::stoul(shape.substr(shape.find('n') + 1));
        if (shape.substr(0, 4) != "m64n" || shape.substr(shape.find('k')) != "k32") fail("wgmma: " + shape);
        return;
    }
    if (name == "stmatrix") {
        in.collective = true, in.handler = store_matrices;
        in.a = in.opcode.find(".x4") != std::string::npos ? 4 : 2;
        in.b = in.opcode.find(".trans") != std::string::npos;
        return;
    }
    if (in.opcode.rfind("cp.async.bulk.", 0) == 0) {
        in.a = in.opcode.find("multicast") != std::string::npos;
        in.handler = in.opcode.find("tensor.2d.shared::cluster") != std::string::npos ? tile_load : bulk_load;
        return;
    }
    if (name == "ld" || name == "st") {
        u32 count = 1, space = kGlobal;
        for (const auto& part : parts) {
            if (part == "v2" || part == "v4") count = part[1] - '0';
            if (part.rfind("shared", 0) == 0) space = kShared;
            if (part == "param") space = kParameter;
            if (part == "local" || part == "async") fail("no such memory: " + in.opcode);
        }
        const Type type = type_of(last);
        in.a = type.bytes | (type.letter == 's') << 8, in.b = count | space << 8;
        in.handler = name == "ld" ? load : store;
        return;
    }
    if (name == "cvta") {
        if (in.opcode.find("shared") != std::string::npos) fail("no generic addresses of shared memory");
        in.handler = integer_of("mov", 8);
        return;
    }
    if (name == "cvt") {
        const Type to = type_of(parts[parts.size() - 2]), from = type_of(last);
        in.a = u32(to.letter) | to.bytes << 8, in.b = u32(from.letter) | from.bytes << 8, in.handler = convert;
        Operand rounding{Kind::kValue};
        for (const auto& part : parts) {
            if (part == "rni" || part == "rn") rounding.value = 1;
            if (part == "rzi" || part == "rz") rounding.value = 2;
            if (part == "sat" || part == "ftz" || part == "rp" || part == "rm") fail("no such cvt: " + in.opcode);
        }
        in.operands.push_back(rounding);
        return;
    }
    if (name == "setp") {
        in.handler = parts.size() == 3 ? comparison_of(parts[1], parts[2]) : nullptr;
    } else if (name == "selp") {
        in.handler = [](Warp& w, const Instruction& in, u32 lanes) {
            each(lanes, [&](u32 l) {
                const auto& o = in.operands;
                put(w, o[0], l, get(w, get(w, o[3], l) & 1 ? o[1] : o[2], l));
            });
            return Next::kOn;
        };
    } else if (in.opcode == "mov.pack") {
        in.handler = [](Warp& w, const Instruction& in, u32 lanes) {
            const u32 count = u32(in.operands.size()) - 1, bits = u32(in.a) / count;
            each(lanes, [&](u32 l) {
                u64 value = 0;
                for (u32 i = 0; i < count; ++i)
                    value |= truncated(get(w, in.operands[1 + i], l), bits / 8) << bits * i;
                put(w, in.operands[0], l, value);
            });
            return Next::kOn;
        };
    } else if (in.opcode == "mov.unpack") {
        in.handler = [](Warp& w, const Instruction& in, u32 lanes) {
            const u32 count = u32(in.operands.size()) - 1, bits = u32(in.a) / count;
            each(lanes, [&](u32 l) {
                const u64 value = get(w, in.operands[count], l);
                for (u32 i = 0; i < count; ++i) put(w, in.operands[i], l, truncated(value >> bits * i, bits / 8));
            });
            return Next::kOn;
        };
    } else if (last == "pred") {
        in.handler = name == "and" ? Handler(BINARY(u8, u8(a & b & 1)))
                     : name == "or" ? Handler(BINARY(u8, u8((a | b) & 1)))
                     : name == "xor" ? Handler(BINARY(u8, u8((a ^ b) & 1)))
                     : name == "mov" ? Handler(UNARY(u8, u8(a & 1))) : nullptr;
    } else if (name == "mul" && parts[1] == "wide") {
        in.handler = last == "u32"   ? Handler(BINARY(u32, u64(a) * b))
                     : last == "s32" ? Handler(BINARY(i32, i64(a) * b))
                     : last == "u16" ? Handler(BINARY(u16, u32(a) * b)) : nullptr;
    } else if (name == "mul" && parts[1] == "hi") {
        in.handler = last == "u32" ? Handler(BINARY(u32, u32(u64(a) * b >> 32))) : nullptr;
    } else if (name == "mov") {
        in.handler = integer_of("mov", type_of(last).bytes);
    } else {
        const Type type = type_of(last);
        const bool letter = name == "min" || name == "max" || name == "div" || name == "rem" || name == "shr";
        if (type.letter == 's' && (name == "div" || name == "rem")) fail("no such opcode: " + in.opcode);
        in.handler = integer_of(letter ? name + "." + type.letter : name, type.bytes);
    }
    if (in.handler == nullptr) fail("no such opcode: " + in.opcode);
}

// ---- running --------------------------------------------------------------------------------------------------------

void leave(Warp& w, u32 lanes) {
    check_waited(w, lanes, "ends");
    w.alive &= ~lanes;
    each(lanes, [&](u32 l) {
        w.copies[l].emplace_back(), wait_for_copies(w, l, 0);
        for (auto& copy : w.stores[l]) copy->finish();
    });
}

// The lanes that go on, which share a pc; 0 where all wait for one another.
u32 next_lanes(Warp& w, u32& pc) {
    const auto& code = w.machine->program->code;
    u32 tried = 0;
    for (;;) {
        u32 least = ~0u, lanes = 0;
        each(w.alive & ~tried, [&](u32 l) {
            if (w.pcs[l] < least) least = w.pcs[l], lanes = 0;
            if (w.pcs[l] == least) lanes |= 1u << l;
        });
        if (!lanes) return 0;
        const Instruction& in = code[least];
        if (in.collective) {
            const u32 first = u32(__builtin_ctz(lanes));
            const u32 members =
                in.members < 0 ? kAll : u32(get(w, in.operands[in.members], first));
            if ((members & w.alive & ~lanes) != 0) {
                tried |= lanes;
                continue;
            }
            lanes &= members;
        }
        pc = least;
        return lanes;
    }
}

// Runs a warp for some instructions; says whether it got anywhere.
bool turn(Warp& w, u32 instructions) {
    const auto& code = w.machine->program->code;
    bool moved = false;
    for (u32 i = 0; i < instructions && w.alive; ++i) {
        u32 pc = w.pc, lanes = w.alive;
        if (!w.together) {
            lanes = next_lanes(w, pc);
            if (!lanes) fail("threads of a warp wait for one another");
        }
        const Instruction& in = code[pc];
        u32 active = lanes;
        if (in.predicate >= 0) {
            active = 0;
            each(lanes, [&](u32 l) {
                if ((w.registers[u64(in.predicate) * 32 + l] & 1) != in.negated) active |= 1u << l;
            });
        }
        ++w.machine->steps;
        Next next = Next::kOn;
        u32 jumping = 0;
        if (in.target >= 0) {
            jumping = active;
        } else if (in.handler == nullptr) {  // ret
            leave(w, active);
            lanes &= ~active;
        } else if (active) {
            try {
                next = in.handler(w, in, active);
            } catch (const Failure& failure) {
                fail(std::string(failure.what()) + "\n  in " + in.opcode + ", instruction " + std::to_string(pc) +
                     ", CTA " + std::to_string(w.cta->rank) + " of its cluster, warp " + std::to_string(w.number) +
                     ", lanes " + hex(active));
            }
            if (next == Next::kAgain) return moved;
        }
        if (w.together && (jumping == 0 || jumping == lanes)) {
            w.pc = jumping ? u32(in.target) : pc + 1;
        } else {
            w.together = false;
            each(lanes, [&](u32 l) { w.pcs[l] = jumping >> l & 1 ? u32(in.target) : pc + 1; });
            const u32 first = w.alive ? w.pcs[__builtin_ctz(w.alive)] : 0;
            bool same = true;
            each(w.alive, [&](u32 l) { same &= w.pcs[l] == first; });
            if (same) w.together = true, w.pc = first;
        }
        if (next == Next::kYield) return moved;
        moved |= in.target < 0;  // a loop that waits branches and asks again
    }
    return moved;
}

void run_cluster(Machine& machine, u32 first, u32 grid, u32 block_x, u32 block_y, u32 dynamic, void** parameters,
                 u32 parameter_count) {
    const Program& program = *machine.program;
    const u32 threads = block_x * block_y, warps = threads / 32;
    machine.ctas.clear(), machine.in_flight.clear();
    machine.cluster_arrived = machine.cluster_generation = 0;
    machine.cluster_threads = threads * program.cluster;
    std::vector<std::unique_ptr<u64, decltype(&std::free)>> memory;
    std::vector<Warp*> all;
    for (u32 rank = 0; rank < program.cluster; ++rank) {
        auto cta = std::make_unique<Cta>();
        cta->machine = &machine, cta->rank = rank, cta->threads = threads;
        cta->all = program.cluster > 1 ? Seen::kCluster : Seen::kCta;
        cta->shared.assign((program.static_shared + dynamic + 15) / 16 * 16, 0xcd);
        cta->unfenced.assign(cta->shared.size() / 16, 0);
        cta->loading.assign(cta->shared.size() / 16, 0);
        cta->warps.resize(warps);
        for (u32 number = 0; number < warps; ++number) {
            Warp& w = cta->warps[number];
            w.machine = &machine, w.cta = cta.get(), w.number = number;
            memory.emplace_back(static_cast<u64*>(std::calloc(u64(program.registers) * 32, 8)), std::free);
            w.registers = memory.back().get();
            for (u32 l = 0; l < 32; ++l) {  // the order of SPECIAL in tests/emulator/ptx.py
                const u32 thread = 32 * number + l;
                const u32 x = thread % block_x, y = thread / block_x;
                const u64 values[] = {x, y, block_x, block_y, first + rank, grid, rank, l};
                for (u32 i = 0; i < 8; ++i) w.registers[i * 32 + l] = values[i];
                for (u32 i = 0; i < parameter_count; ++i)
                    w.registers[(8 + i) * 32 + l] = reinterpret_cast<u64>(parameters[i]);
            }
            all.push_back(&w);
        }
        machine.ctas.push_back(std::move(cta));
    }
    u64 quiet = 0;
    for (;;) {
        ++machine.round;
        while (!machine.in_flight.empty() && machine.in_flight.begin()->first <= machine.round) {
            const CopyPointer copy = machine.in_flight.begin()->second;
            machine.in_flight.erase(machine.in_flight.begin());
            copy->finish();
            quiet = 0;
        }
        for (u32 i = u32(all.size()); i > 1; --i) std::swap(all[i - 1], all[machine.random() % i]);
        bool left = false, moved = false;
        for (Warp* w : all) {
            if (w->done()) continue;
            left = true;
            moved |= turn(*w, 1 + machine.random() % 400);
        }
        if (!left) break;
        quiet = moved ? 0 : quiet + 1;
        if (quiet > kQuietRounds || machine.steps > kStepLimit) {
            std::string where = "the kernel hangs:";
            for (const Warp* w : all)
                if (!w->done())
                    where += " CTA " + std::to_string(w->cta->rank) + " warp " + std::to_string(w->number) + " at " +
                             std::to_string(w->together ? w->pc : w->pcs[__builtin_ctz(w->alive)]) + " " +
                             program.code[w->together ? w->pc : w->pcs[__builtin_ctz(w->alive)]].opcode + ";";
            fail(where);
        }
    }
    while (!machine.in_flight.empty()) {
        machine.in_flight.begin()->second->finish();
        machine.in_flight.erase(machine.in_flight.begin());
    }
}

Operand parse_operand(const std::string& text) {
    Operand operand;
    switch (text[0]) {
        case 'r': operand = {Kind::kRegister, i32(std::stol(text.substr(1))), 0}; break;
        case 'i': operand = {Kind::kValue, -1, std::stoull(text.substr(1))}; break;
        case 'm': {
            const auto plus = text.find('+');
            operand = {Kind::kMemory, i32(std::stol(text.substr(1, plus - 1))), std::stoull(text.substr(plus + 1))};
            break;
        }
        default: break;
    }
    return operand;
}

thread_local std::string error;

}  // namespace

extern "C" {

// Text: "registers static_shared cluster", then an instruction a line: predicate negated target opcode operands.
void* emulator_load(const char* text) {
    auto program = std::make_unique<Program>();
    std::istringstream lines(text);
    std::string line;
    try {
        std::getline(lines, line);
        std::istringstream(line) >> program->registers >> program->static_shared >> program->cluster;
        while (std::getline(lines, line)) {
            std::istringstream words(line);
            Instruction in;
            std::string word;
            words >> in.predicate >> in.negated >> in.target >> in.opcode;
            if (in.opcode == "mov.pack" || in.opcode == "mov.unpack") words >> in.a;
            while (words >> word) in.operands.push_back(parse_operand(word));
            find_handler(in);
            program->waits |= in.opcode.rfind("griddepcontrol.", 0) == 0;
            program->code.push_back(std::move(in));
        }
    } catch (const std::exception& failure) {
        error = line + ": " + failure.what();
        return nullptr;
    }
    return program.release();
}

void emulator_free(void* program) { delete static_cast<Program*>(program); }

const char* emulator_error() { return error.c_str(); }

// Whether it ran; else emulator_error() says why not. ranges: begin and end of each.
int emulator_run(void* program, u32 grid, u32 block_x, u32 block_y, u32 dynamic, void** parameters, u32 count,
                 const u64* ranges, u32 range_count, u64 seed) {
    Machine machine;
    machine.program = static_cast<Program*>(program);
    machine.random_state = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
    for (u32 i = 0; i < range_count; ++i) machine.ranges.push_back({ranges[2 * i], ranges[2 * i + 1]});
    try {
        if (grid % machine.program->cluster) fail("the grid is no multiple of the cluster");
        if (block_x * block_y % 32) fail("a CTA is no multiple of 32 threads");
        for (u32 first = 0; first < grid; first += machine.program->cluster)
            run_cluster(machine, first, grid, block_x, block_y, dynamic, parameters, count);
    } catch (const std::exception& failure) {
        error = failure.what();
        return 0;
    }
    return 1;
}
}
