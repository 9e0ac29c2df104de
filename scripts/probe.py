#!/usr/bin/env python3
"""What the hardware gives, apart from any GEMM: rates that docs/notes/main-loop.md reasons from. Needs a Hopper GPU.

python scripts/probe.py wgmma     # cycles of a multiply, and how long issuing it holds the warp
python scripts/probe.py beside    # what multiplies and other instructions of the same SM cost each other
python scripts/probe.py ports     # the same, by the registers that an instruction reads and writes
python scripts/probe.py copies    # bytes a cycle that copies bring from the L2 into an SM, multicast or not
python scripts/probe.py sends     # how long sums take from one CTA of a cluster to the others
python scripts/probe.py clusters  # how many clusters of CTAs run at a time
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from jitgemm.jit import sass
from jitgemm.jit.nvrtc import compile_cubin  # noqa: E402
from jitgemm.jit.sass import Yields, apply_yields, code_sections, instructions  # noqa: E402
from jitgemm.kernel import render  # noqa: E402

REPEATS = 400
TIMES = 16


def wgmma(lhs: str, tokens: int, registers: bool) -> tuple[str, str]:
    """Type of a sum, and the source of `multiply`: d += a * b, a in registers or in shared memory."""
    count = tokens // 2
    integer = lhs == "s8"
    kind, constraint, types = ("i32", "+r", "s32.s8.s8") if integer else ("float", "+f", "f32.e4m3.e4m3")
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"{constraint}"(d[{i}])' for i in range(count))
    if registers:
        a, used = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}", 4
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
    else:
        a, used, inputs = f"%{count}", 1, '"l"(shared_a)'
    signs = "" if integer else ", 1, 1"
    return (
        kind,
        f"""
__device__ __forceinline__ void multiply({kind} (&d)[{count}], const u32 (&a)[4], u64 shared_a, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k32.{types} {{{sums}}}, {a}, %{count + used}, 1{signs};"
                 : {outputs} : {inputs}, "l"(b));
}}
""",
    )


@dataclass(frozen=True)
class Multiply:
    """Groups of four m64nNk32 in a row, as many groups in flight as `pending` says and one more."""

    lhs: str
    tokens: int
    registers: bool
    warpgroups: int
    pending: int

    @property
    def source(self) -> str:
        count = self.tokens // 2
        kind, multiply = wgmma(self.lhs, self.tokens, self.registers)
        return f"""
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/ptx/wgmma.cuh>
using namespace jitgemm;
constexpr int kBuffers = {self.pending + 1};
{multiply}
extern "C" __global__ void __launch_bounds__({128 * self.warpgroups}, 1) probe(u64* out) {{
    extern __shared__ __align__(1024) u8 memory[];
    for (u32 i = threadIdx.x; i < 98304 / 4; i += blockDim.x) reinterpret_cast<u32*>(memory)[i] = 0;
    __syncthreads();
    const u64 b = k_major_descriptor(shared_address(memory));
    const u64 shared_a = k_major_descriptor(shared_address(memory) + 65536);
    u32 a[4][4] = {{}};
    {kind} d[kBuffers][{count}] = {{}};
    u64 issuing = 0;
    const u64 start = clock64();
    for (u32 repeat = 0; repeat < {REPEATS}; repeat += kBuffers) {{
#pragma unroll
        for (int buffer = 0; buffer < kBuffers; ++buffer) {{
#pragma unroll
            for (int step = 0; step < 4; ++step) register_fence(a[step]);
            const u64 before = clock64();
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) multiply(d[buffer], a[step], shared_a + step * 2, b + step * 2);
            wgmma_commit();
            issuing += clock64() - before;
            wgmma_wait<kBuffers - 1>();
            register_fence(d[(buffer + 1) % kBuffers]);
        }}
    }}
    wgmma_wait<0>();
    const u64 cycles = clock64() - start;
    float sum = 0;
#pragma unroll
    for (int buffer = 0; buffer < kBuffers; ++buffer) {{
        register_fence(d[buffer]);
        for (int i = 0; i < {count}; ++i) sum += float(d[buffer][i]);
    }}
    if (threadIdx.x % 128 == 0) {{
        out[2 * (blockIdx.x * {self.warpgroups} + threadIdx.x / 128)] = cycles;
        out[2 * (blockIdx.x * {self.warpgroups} + threadIdx.x / 128) + 1] = issuing + (sum != 0);
    }}
}}
"""


@dataclass(frozen=True)
class Beside:
    """One warpgroup multiplies, m64nNk32 with A in registers; `others` run `instructions` over and over meanwhile.

    `%0` of an instruction is a register it reads and writes, `%1` another of its own, `%2` one that all share; there
    are 64 of the first two. `yields` sets its hints instead of ptxas.
    """

    name: str
    lhs: str
    tokens: int
    instructions: str
    yields: Yields | None
    multiplies: bool = True
    others: int = 1

    @property
    def threads(self) -> int:
        return 128 * (1 + self.others)

    @property
    def source(self) -> str:
        count = self.tokens // 2
        kind, multiply = wgmma(self.lhs, self.tokens, registers=True)
        return f"""
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/ptx/wgmma.cuh>
using namespace jitgemm;
{multiply}
extern "C" __global__ void __launch_bounds__({self.threads}, 1) probe(u64* out) {{
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ volatile u32 done;
    for (u32 i = threadIdx.x; i < 98304 / 4; i += blockDim.x) reinterpret_cast<u32*>(memory)[i] = 0;
    done = 0;
    __syncthreads();
    const u64 start = clock64();
    if (threadIdx.x < 128) {{
        const u64 b = k_major_descriptor(shared_address(memory));
        u32 a[4][4] = {{}};
        {kind} d[{count}] = {{}};
        for (u32 repeat = 0; repeat < {REPEATS}; ++repeat) {{
            if ({int(self.multiplies)}) {{
#pragma unroll
                for (int step = 0; step < 4; ++step) register_fence(a[step]);
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < 4; ++step) multiply(d, a[step], 0, b + step * 2);
                wgmma_commit();
                wgmma_wait<0>();
                register_fence(d);
            }} else {{
                __nanosleep(400);
            }}
        }}
        const u64 cycles = clock64() - start;
        done = 1;
        float sum = 0;
        for (int i = 0; i < {count}; ++i) sum += float(d[i]);
        if (threadIdx.x == 0) out[2 * blockIdx.x] = cycles + (sum != 0);
    }} else {{
        u32 own[64], other[64], shared = threadIdx.x;
#pragma unroll
        for (int i = 0; i < 64; ++i) own[i] = other[i] = i + threadIdx.x;
        u64 turns = 0;
        while (!done) {{
            // Several times between two looks at `done`, which take as long as one of them.
#pragma unroll 1
            for (u32 time = 0; time < {TIMES}; ++time) {{
#pragma unroll
                for (int i = 0; i < 64; ++i)
                    asm volatile("{self.instructions}" : "+r"(own[i]), "+r"(other[i]) : "r"(shared));
            }}
            turns += {TIMES};
        }}
        const u64 cycles = clock64() - start;
        u32 sum = 0;
#pragma unroll
        for (int i = 0; i < 64; ++i) sum += own[i] + other[i];
        if (threadIdx.x == 128) out[2 * blockIdx.x + 1] = (cycles * 1000 + (sum == 7)) / (turns * 64);
    }}
}}
"""


CLUSTER_SYNC = """__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\\nbarrier.cluster.wait.acquire;" ::: "memory");
}"""
COPY_BYTES = 32768
COPY_STAGES = 6


@dataclass(frozen=True)
class Copy:
    """A ring of 32 KiB copies that one warp asks for and another hands back; `multicast` CTAs of a cluster fetch a part
    each of a tile, for all of them. With a warp for both, or smaller copies, it would time the loop instead.

    `beyond` of a tile's 256 rows lie outside of the tensor, where the copy writes zeros.
    """

    multicast: int
    tile: bool
    beyond: int = 0

    @property
    def source(self) -> str:
        share = COPY_BYTES // self.multicast
        mask = (1 << self.multicast) - 1
        many = self.multicast > 1
        to = f"memory + stage * kBytes + rank * {share}"
        where = f"chunk % 32 * 128, chunk / 32 * 256 + rank * {share // 128}"
        if self.beyond:
            where = "chunk * 128, 0"
        copy = f"bulk_load({to}, base + chunk * kBytes, kBytes, full, policy);"
        if self.tile:
            copy = f"tile_load{'_multicast' * many}({to}, &map, {where}, full{f', {mask}' * many});"
        return f"""
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/ptx/tma.cuh>
using namespace jitgemm;
constexpr u32 kStages = {COPY_STAGES}, kBytes = {COPY_BYTES}, kCtas = {self.multicast};
{CLUSTER_SYNC}
extern "C" __global__ void __cluster_dims__(kCtas) probe(const __grid_constant__ TensorMap map, const u8* base,
                                                         u32 chunks, u32 count, u64* out) {{
    extern __shared__ __align__(1024) u8 bytes[];
    __shared__ u64 barriers[2 * kStages];
    const u32 memory = shared_address(bytes), rank = kCtas > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {{
        for (u32 i = 0; i < kStages; ++i) {{
            barrier_init(shared_address(barriers + i), 1);
            barrier_init(shared_address(barriers + kStages + i), kCtas);
        }}
        barrier_init_fence();
    }}
    __syncthreads();
    cluster_sync();
    const u64 start = clock64();
    Ring<kStages> ring;
    if (threadIdx.x == 0) {{
        const u64 policy = policy_evict_unchanged();
        u32 chunk = blockIdx.x / kCtas;
        for (u32 i = 0; i < count; ++i) {{
            const u32 stage = ring.stage;
            const u32 full = shared_address(barriers + stage), empty = shared_address(barriers + kStages + stage);
            barrier_wait<false>(empty, ring.parity ^ 1);
            barrier_expect_bytes(full, kBytes);
            {copy}
            chunk += gridDim.x / kCtas;
            if (chunk >= chunks) chunk -= chunks;
            ring.advance();
        }}
    }} else if (threadIdx.x == 32) {{
        for (u32 i = 0; i < count; ++i) {{
            barrier_wait<false>(shared_address(barriers + ring.stage), ring.parity);
            const u32 empty = shared_address(barriers + kStages + ring.stage);
            for (u32 peer = 0; peer < kCtas; ++peer) barrier_arrive_remote(empty, peer);
            ring.advance();
        }}
        out[blockIdx.x] = clock64() - start;
    }}
    __syncthreads();
    cluster_sync();
}}
"""


SENDS = 50
SENDERS = 256
STORES = {
    "st.async": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %2, %2, %2}, [%1];",
    "st, then arrive": "st.shared::cluster.v4.f32 [%0], {%2, %2, %2, %2};",
    "st, then bulk copy": "st.shared.v4.f32 [%0], {%2, %2, %2, %2};",
    "st of its own": "st.shared.v4.f32 [%0], {%2, %2, %2, %2};",
}
"""How two warpgroups of a CTA send; the last to one another, the others to the cluster's other CTAs."""


@dataclass(frozen=True)
class Send:
    """Every CTA of a cluster sends `size` bytes, as much to each of the others, and waits for what they send."""

    how: str
    ctas: int
    size: int

    @property
    def source(self) -> str:
        own, counted = self.how == "st of its own", self.how in ("st.async", "st, then bulk copy")
        peers = 1 if own else self.ctas - 1
        where = "to" if self.how.startswith("st.async") or self.how == "st, then arrive" else "from"
        after = {
            "st.async": "",
            "st, then arrive": """__syncwarp();
            if (threadIdx.x % 32 == 0)
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
            """,
            "st, then bulk copy": """async_proxy_fence();
            warpgroup_sync(threadIdx.x / 128);
            if (threadIdx.x % 128 == 0)
                asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                             " [%0], [%1], %2, [%3];"
                             ::"r"(to), "r"(from), "r"(kPart), "r"(barrier) : "memory");
            """,
            "st of its own": "__syncwarp(); if (threadIdx.x % 32 == 0) barrier_arrive(received);",
        }[self.how]  # fmt: skip
        return f"""
#include <jitgemm/ptx/barrier.cuh>
#include <jitgemm/ptx/tma.cuh>
using namespace jitgemm;
constexpr u32 kCtas = {self.ctas}, kPeers = {peers}, kPart = {self.size} / kPeers / {SENDERS // 128};
{CLUSTER_SYNC}
extern "C" __global__ void __launch_bounds__({SENDERS}, 1) __cluster_dims__(kCtas) probe(u64* out) {{
    extern __shared__ __align__(1024) u8 bytes[];
    __shared__ u64 barrier_of_sums;
    const u32 received = shared_address(&barrier_of_sums), rank = cluster_rank();
    if (threadIdx.x == 0) {{
        barrier_init(received, {1 if counted else f"kPeers * {SENDERS // 32}"});
        barrier_init_fence();
    }}
    u64 total = 0;
    for (u32 round = 0; round < {SENDS}; ++round) {{
        __syncthreads();
        cluster_sync();
        const u64 start = clock64();
        if ({int(counted)} && threadIdx.x == 0) barrier_expect_bytes(received, {self.size});
#pragma unroll
        for (u32 peer = 0; peer < kPeers; ++peer) {{
            // A run for each warpgroup and sender.
            const u32 run = shared_address(bytes) + (peer * {SENDERS // 128} + threadIdx.x / 128) * kPart;
            const u32 other = (rank + 1 + peer) % kCtas;
            const u32 from = run + {self.size}, to = map_to_rank(run, other), barrier = map_to_rank(received, other);
#pragma unroll
            for (u32 i = 0; i < kPart / 2048; ++i)
                asm volatile("{STORES[self.how]}"
                             ::"r"({where} + i * 2048 + threadIdx.x % 128 * 16), "r"(barrier), "f"(1.0f) : "memory");
            {after}
        }}
        barrier_wait<false>(received, round % 2);
        total += clock64() - start;
    }}
    cluster_sync();
    if (threadIdx.x == 0) out[blockIdx.x] = total / {SENDS};
}}
"""


def launch_config(grid: int, threads: int, smem_bytes: int):  # type: ignore[no-untyped-def]
    from cuda.bindings import driver as cu

    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    return config


def launch(cubin: bytes, arguments: list, *, grid: int, threads: int, smem_bytes: int, device_map: int = 0) -> None:
    """Runs the probe twice, so that the second run finds it loaded. A tensor map's address comes first, if any."""
    import torch
    from cuda.bindings import driver as cu

    from jitgemm.runtime import driver

    kernel = driver.load_kernel(cubin, "probe", device=0, smem_bytes=smem_bytes)
    config = launch_config(grid, threads, smem_bytes)
    config.hStream = torch.cuda.current_stream().cuda_stream
    addresses = ([device_map] if device_map else []) + [ctypes.addressof(value) for value in arguments]
    parameters = (ctypes.c_void_p * len(addresses))(*addresses)
    for _ in range(2):
        driver.check(cu.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(parameters), 0), "cuLaunchKernelEx")
    torch.cuda.synchronize()


def build(probes: list) -> list[bytes]:
    headers = render.headers()
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda each: compile_cubin(each.source, headers, render.OPTIONS, name=str(each)), probes)
        return [each.cubin for each in compiled]


def multiplies() -> list[Multiply]:
    probes = [
        Multiply("e4m3", tokens, registers, warpgroups, pending)
        for tokens in (16, 64, 128, 256)
        for registers in (True, False)
        for warpgroups in (1, 2)
        for pending in (0, 1)
        if tokens * (pending + 1) <= 256
    ]
    return [*probes, Multiply("s8", 128, True, 2, 0), Multiply("s8", 256, True, 2, 0)]


def run_multiplies() -> None:
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print("| A | type | n | warpgroups | groups in flight | cycles a multiply | at full rate | cycles to issue four |")
    print("|---|---|---|---|---|---|---|---|")
    probes = multiplies()
    for probe, cubin in zip(probes, build(probes)):
        out = torch.zeros(sms, probe.warpgroups, 2, dtype=torch.int64, device="cuda")
        arguments = [ctypes.c_uint64(out.data_ptr())]
        launch(cubin, arguments, grid=sms, threads=128 * probe.warpgroups, smem_bytes=98304)
        cycles, issuing = (out.double().mean((0, 1)) / REPEATS).tolist()
        place = "registers" if probe.registers else "shared"
        print(f"| {place} | {probe.lhs} | {probe.tokens} | {probe.warpgroups} | {probe.pending + 1} | "
              f"{cycles / 4 / probe.warpgroups:.1f} | {probe.tokens // 2} | {issuing:.0f} |")  # fmt: skip


BESIDE = {
    "nothing": ("", None),
    "FFMA": ("fma.rn.f32 %0, %1, %2, %0;", None),
    "FFMA, every other yields": ("fma.rn.f32 %0, %1, %2, %0;", Yields()),
    "FFMA, all yield": ("fma.rn.f32 %0, %1, %2, %0;", Yields(every=1)),
    "FADD": ("add.rn.f32 %0, %1, %0;", None),
    "FMUL by an immediate": ("mul.rn.f32 %0, %0, 0f3F800001;", None),
    "LOP3": ("lop3.b32 %0, %0, %1, %2, 0x6A;", None),
    "I2F": ("cvt.rn.f32.s32 %0, %0;", None),
    "I2F and FFMA": ("{.reg .f32 f; cvt.rn.f32.s32 f, %1; fma.rn.f32 %0, f, %2, %0;}", None),
}


def measure_beside(probe: Beside, cubin: bytes) -> tuple[float, float]:
    """Cycles a multiply, and of a scheduler an instruction."""
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.zeros(sms, 2, dtype=torch.int64, device="cuda")
    launch(cubin, [ctypes.c_uint64(out.data_ptr())], grid=sms, threads=probe.threads, smem_bytes=98304)
    cycles, instruction = out.double().mean(0).tolist()
    return cycles / REPEATS / 4, instruction / 1000 / probe.others


def run_beside() -> None:
    print("| beside | type | n | cycles a multiply | cycles an instruction or pair | the same without multiplies |")
    print("|---|---|---|---|---|---|")
    probes = [
        Beside(name, lhs, tokens, text, yields, multiplies)
        for lhs, tokens in (("e4m3", 128), ("e4m3", 256), ("s8", 128))
        for name, (text, yields) in BESIDE.items()
        for multiplies in (True, False)
    ]
    figures = []
    for probe, cubin in zip(probes, build(probes)):
        figures.append(measure_beside(probe, apply_yields(cubin, probe.yields) if probe.yields else cubin))
    for probe, (multiply, instruction), (_, alone) in zip(probes[::2], figures[::2], figures[1::2]):
        print(f"| {probe.name} | {probe.lhs} | {probe.tokens} | {multiply:.1f} | {instruction:.2f} | {alone:.2f} |")


_DESTINATION, _A, _B = 16, 24, 32
"""First bits of an instruction's registers."""
_ZERO = 255
"""The register that is always zero."""


@dataclass(frozen=True)
class Registers:
    """Where an FFMA has its operands: "even" and "odd" registers, or "none", the one that is always zero."""

    destination: str
    a: str
    b: str
    c: str
    reuses_b: bool = False

    def apply(self, cubin: bytes, every: int) -> bytes:
        """The cubin of a `Beside` of FFMA with these instead; one in `every` yields, 0 is none."""
        changed = bytearray(cubin)
        (section,) = code_sections(cubin)
        ffma = [each for each in instructions(cubin, *section) if each.opcode == sass.FFMA]
        # Registers that nothing else needs, but for the one that all share.
        free = sorted({each.low >> at & 0xFF for each in ffma for at in (_DESTINATION, _A)})
        assert len(ffma) == 64 and len(free) == 128
        pools = {"even": [r for r in free if r % 2 == 0], "odd": [r for r in free if r % 2], "none": [_ZERO] * 3}

        def register(where: str, operand: int, index: int) -> int:
            third = len(pools[where]) // 3
            return pools[where][operand * third + index % third]

        for index, each in enumerate(ffma):
            # Each operand has a third of its pool, and b is the same for all.
            a, c, b = register(self.a, 0, index), register(self.c, 1, index), register(self.b, 2, 0)
            destination = register(self.destination, 1, index)
            yielding = every > 0 and index % every == every - 1
            low = each.low & ~(0xFFFFFF << _DESTINATION) | destination << _DESTINATION | a << _A | b << _B
            high = each.high & ~(0xFF | 15 << sass.REUSE | 15 << sass.STALL | 1 << sass.YIELD)
            high |= c | 1 << sass.STALL | (not yielding) << sass.YIELD
            if self.reuses_b and not yielding and index < len(ffma) - 1:
                high |= 2 << sass.REUSE
            struct.pack_into("<QQ", changed, each.offset, low, high)
        return bytes(changed)


PORTS = {
    "none": Registers("none", "none", "none", "none"),
    "one written": Registers("even", "none", "none", "none"),
    "one read": Registers("none", "even", "none", "none"),
    "two read of two banks, one written": Registers("even", "odd", "none", "even"),
    "the same and a factor, which is reused": Registers("even", "odd", "even", "even", reuses_b=True),
    "the same, and it is read each time": Registers("even", "odd", "even", "even"),
    "two read of one bank, one written": Registers("even", "even", "none", "even"),
    "three read of one bank, one written": Registers("even", "even", "even", "even"),
}


def run_ports() -> None:
    print("An FFMA's registers; cycles a multiply and, of a scheduler, an instruction; none yields, every other does\n")
    probes = [
        Beside("FFMA", lhs, 128, BESIDE["FFMA"][0], None, multiplies, others=2)
        for lhs, multiplies in (("e4m3", True), ("s8", True), ("e4m3", False))
    ]
    names = [f"{probe.lhs}: {what}" for probe in probes[:2] for what in ("none", "every other")]
    print(f"| registers | {' | '.join(names)} | no multiplies: none | every other |")
    print("|---" * 7 + "|")
    cubins = build(probes)
    for name, registers in PORTS.items():
        cells = []
        for probe, cubin in zip(probes, cubins):
            for every in (0, 2):
                multiply, instruction = measure_beside(probe, registers.apply(cubin, every))
                cells.append(f"{multiply:.1f}, {instruction:.2f}" if probe.multiplies else f"{instruction:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


def run_copies() -> None:
    import torch

    from jitgemm.runtime import driver

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    grids, count, size = (sms, 120, 96, 64, 16), 2000, 8 << 20
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    print(f"{count} copies of 32 KiB each out of {size >> 20} MiB, one CTA an SM; bytes into an SM, a cycle\n")
    print("| copy | rows of 256 outside | CTAs a fetch is for |" + "".join(f" {grid} CTAs |" for grid in grids))
    print("|---|---|---|" + "---|" * len(grids))
    probes = [Copy(1, False), *(Copy(multicast, True) for multicast in (1, 2, 4))]
    probes += [Copy(1, True, beyond) for beyond in (1, 64, 128, 192, 255)]
    for probe, cubin in zip(probes, build(probes)):
        columns = size // 256 if probe.beyond else 4096
        rows = 256 - probe.beyond if probe.beyond else size // columns
        encoded = driver.TileMap(
            "u8", columns=columns, rows=rows, row_bytes=columns, box=(128, 256 // probe.multicast)
        ).encode(source.data_ptr())
        tensor_map = ctypes.create_string_buffer(encoded)
        rates = []
        for grid in grids:
            grid -= grid % probe.multicast
            out = torch.zeros(grid, dtype=torch.int64, device="cuda")
            arguments = [ctypes.c_uint64(source.data_ptr()), ctypes.c_uint32(size // COPY_BYTES),
                         ctypes.c_uint32(count), ctypes.c_uint64(out.data_ptr())]  # fmt: skip
            smem_bytes, device_map = COPY_STAGES * COPY_BYTES, ctypes.addressof(tensor_map)
            launch(cubin, arguments, grid=grid, threads=64, smem_bytes=smem_bytes, device_map=device_map)
            rates.append(count * COPY_BYTES / out.double().mean().item())
        print(f"| {'tile' if probe.tile else 'contiguous'} | {probe.beyond} | {probe.multicast} |"
              + "".join(f" {rate:.1f} |" for rate in rates))  # fmt: skip


def run_sends() -> None:
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = (16384, 32768, 65536)
    print("Cycles from the first store to having what the other CTAs sent, all SMs at it\n")
    print("| how | CTAs a cluster |" + "".join(f" {size >> 10} KiB from each |" for size in sizes))
    print("|---" * (2 + len(sizes)) + "|")
    kinds = [(how, ctas) for how in STORES for ctas in ((2,) if how == "st of its own" else (2, 3, 5))]
    for how, ctas in kinds:
        probes = [Send(how, ctas, size) for size in sizes]
        cells = []
        for probe, cubin in zip(probes, build(probes)):
            # As many clusters as find room at once.
            grid = sms * 4 // 5 // ctas * ctas
            out = torch.zeros(grid, dtype=torch.int64, device="cuda")
            arguments = [ctypes.c_uint64(out.data_ptr())]
            launch(cubin, arguments, grid=grid, threads=SENDERS, smem_bytes=max(2 * probe.size, 120_000))
            cells.append(f"{out.double().mean().item():.0f}")
        print(f"| {how} | {ctas} | {' | '.join(cells)} |")


def run_clusters() -> None:
    import torch
    from cuda.bindings import driver as cu

    from jitgemm.runtime import driver

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    source = 'extern "C" __global__ void probe() {}'
    cubin = compile_cubin(source, {}, render.OPTIONS, name="probe").cubin
    print("| CTAs a cluster | CTAs an SM has room for | clusters at a time | SMs without a CTA |\n|---|---|---|---|")
    for size in (2, 3, 4, 5, 6, 7, 8):
        for room, smem_bytes in ((1, 200_000), (2, 100_000)):
            kernel = driver.load_kernel(cubin, "probe", device=0, smem_bytes=smem_bytes)
            config = launch_config(size, 384, smem_bytes)
            cluster = cu.CUlaunchAttribute()
            cluster.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = size, 1, 1
            config.attrs, config.numAttrs = [cluster], 1
            count = driver.check(
                cu.cuOccupancyMaxActiveClusters(kernel.function, config), "cuOccupancyMaxActiveClusters"
            )
            print(f"| {size} | {room} | {count} | {sms - count * size // room} |")


PARTS = {
    "wgmma": run_multiplies, "beside": run_beside, "ports": run_ports, "copies": run_copies, "clusters": run_clusters,
    "sends": run_sends,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    part = parser.parse_args().part

    import torch

    torch.cuda.init()
    print(f"{torch.cuda.get_device_name()}\n")
    PARTS[part]()


if __name__ == "__main__":
    main()
