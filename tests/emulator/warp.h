// A warp: what its lanes exchange, multiplies, which lanes go on; and the warps of a cluster, by turns.
#pragma once
#include "memory.h"

namespace {

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

// A step of e4m3 with sums in f16, as MMA-Sim has Hopper's (tests/helpers/tensor_core.py): products by the exponents of their
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

// Element i of 32 bytes of an operand: in.b is 4 for f16, 5 for bf16.
double sixteen_bits(const u8 (&bytes)[32], u32 i, u32 type) {
    u16 bits;
    std::memcpy(&bits, bytes + 2 * i, 2);
    return type == 4 ? from_half(bits) : double(as<float>(u32(bits) << 16));
}

// in.a: n; in.b: 0 for int8, 1 for e4m3, 2 for e4m3 with sums in f16, 3 for e5m2 times e4m3, 4 for f16, 5 for bf16.
// {d}, {a} or descriptor, descriptor, whether d is added to
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
                if (in.b >= 4) {
                    for (u32 i = 0; i < 16; ++i)
                        sum += sixteen_bits(a[row], i, in.b) * sixteen_bits(b, i, in.b);
                } else {
                    for (u32 i = 0; i < 32; ++i) sum += of_a[a[row][i]] * table[b[i]];
                }
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

}  // namespace
