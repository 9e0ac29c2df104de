// Memory, the TMA, barriers and fences, the grid before: what arrives late, and what must have been waited for.
#pragma once
#include "arithmetic.h"

namespace {

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

// red.add of 32 bits in global memory: [to], value.
Next add_to_memory(Warp& w, const Instruction& in, u32 lanes) {
    each(lanes, [&](u32 l) {
        u8* to = w.machine->global(get(w, in.operands[0], l), 4);
        check_waited(w, 1u << l, "adds to global memory");
        u32 sum;
        std::memcpy(&sum, to, 4);
        sum += get<u32>(w, in.operands[1], l);
        std::memcpy(to, &sum, 4);
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
            warp->cta->check_loaded(to, bytes, 1u << warp->number | warp->met);
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
        barrier.waiting.push_back(&w);
        if (barrier.arrived >= threads) {
            barrier.arrived = 0, ++barrier.generation;
            // The first of them to go on may overwrite what the last has loaded.
            u32 all = 0;
            for (const Warp* met : barrier.waiting) all |= 1u << met->number;
            for (Warp* met : barrier.waiting) met->met |= all;
            barrier.waiting.clear();
            if (threads == w.cta->threads) w.cta->all_see(Seen::kCta);
        }
    }
    if (barrier.generation == w.generation) return Next::kAgain;
    w.at_barrier = false;
    w.cta->loaded(w);
    for (Warp& other : w.cta->warps) other.met &= ~(1u << w.number);
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

}  // namespace
