// From the text of emulator/ptx.py to a program: the table of opcodes.
#pragma once
#include "warp.h"

namespace {

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
    return parts;
}

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
        {"dp4a.s32.s32", TERNARY(u32, dot_of_bytes(a, b, c))},
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
        {"red.release.sys.global.add.u32", add_to_memory},
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
        const bool half = last == "f16" || last == "bf16";
        if (half) in.b = last == "f16" ? 4 : 5;
        if (shape.substr(0, 4) != "m64n" || shape.substr(shape.find('k')) != (half ? "k16" : "k32"))
            fail("wgmma: " + shape);
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

}  // namespace
