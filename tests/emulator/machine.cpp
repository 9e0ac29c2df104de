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
//
// Read state.h first, then memory.h (what arrives late), warp.h (who runs), decode.h (which instructions there are).
#include "decode.h"

namespace {

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
