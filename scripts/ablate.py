#!/usr/bin/env python3
"""What a part of a kernel costs: the same kernels with it changed or left out, timed side by side. Needs a Hopper GPU.

    python scripts/ablate.py prefill      # decode and promotion in the main loop; figures: docs/notes/main-loop.md
    python scripts/ablate.py power        # the same held for a while: microseconds, watts, MHz
    python scripts/ablate.py decode       # the path from one kernel of a chain to the next: docs/notes/decode.md
    python scripts/ablate.py yields       # which instructions let other warps go first: docs/notes/yields.md
    python scripts/ablate.py addresses --m 1 16 --n 4096 --k 14336 --format e4m3_g128 e4m3_g128z
                                          # keeping addresses in shared memory: docs/notes/main-loop.md
    python scripts/ablate.py stages --m 1 16 --n 4096 --k 14336 --format e4m3_g128 e4m3_g128z
                                          # more stages, and fewer: docs/notes/decode.md
    python scripts/ablate.py chosen --m 128 256 --n 4096 --k 14336 --format e4m3_g128 int8_g128
                                          # the kernels that the selector takes there: docs/notes/what-limits.md

Results of kernels with a part left out are wrong, of course; only their time means something.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jitgemm import W4Weight

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_lib.cells import COPY_BYTES, Format, parse_format  # noqa: E402

from jitgemm.jit.sass import Yields  # noqa: E402
from jitgemm.kernel import render
from jitgemm.kernel.formats import WeightFormat, ceil_div
from jitgemm.kernel.render import kernel_source  # noqa: E402
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select import choose as config  # noqa: E402
from jitgemm.select.devices import DeviceSpec  # noqa: E402

ROUNDS = 7
"""Each has an order of its own: a large GEMM runs at the power limit, and takes after whoever ran before it."""

Change = tuple[str, str, str]
"""Header, text, what stands in its place."""

NO_PROMOTION: Change = ("kernel", "if (promote_now) {", "if (promote_now && last) {")
NO_DECODE: tuple[Change, ...] = (
    ("decode", "u32 bytes = word & 0x87878787u;\n        return bytes + ((bytes & 0x80808080u) >> 7);", "return word;"),
    ("decode", "return (word & 0x07070707u) ^ byte_sign_mask(word);", "return word;"),
    ("decode", "return word & 0x87878787u;", "return word;"),
    ("decode", "return word & 0xF0F0F0F0u;", "return word;"),
    ("decode", "return (word << 4) & 0xF0F0F0F0u;", "return word;"),
    ("decode", "u32 biased = codes + (0x80808080u - zero);", "return codes;"),
    ("decode", "return (~biased & 0x80808080u) | byte_distance(codes, zero);", ""),
    ("decode", "return ((codes | 0x80808080u) - zero) ^ 0x80808080u;", "return codes;"),
)
_FINISH = "finish_tile<Config>(acc, args, out_map, shared, place, tile, rank, summed, parity, scheduler.done());"
NO_EXCHANGE: tuple[Change, ...] = (
    ("kernel", "if constexpr (Config::kWarpgroupsK > 1) send_to_warpgroups<Config>(acc, shared, place, parity);", ""),
    # Sums that another split would have stored stay alive, else nothing would promote them.
    ("kernel", _FINISH, '_Pragma("unroll") for (float sum : acc) asm volatile("" ::"f"(sum));\n        ' + _FINISH),
    ("epilogue", "sum_part<Config, kPart>(acc, shared, place, parity, last_tile);", ""),
    ("epilogue", "if (summed) send_to_ctas<Config, kPart>(acc, shared, place, rank, parity);", ""),
    ("epilogue", "if (summed) sum_share<Config, kShare>(acc, shared, place, parity, last_tile);", ""),
)
_LOADS = (
    "load_weights<Config>(args, shared, tile, ring.stage, block, blocks, rank, policy, rows);\n"
    "                load_lhs(blocks);"
)
NO_LOADS: tuple[Change, ...] = (("kernel", _LOADS, "barrier_arrive(shared.full(ring.stage));"),)
ONE_THREAD: tuple[Change, ...] = (
    ("barrier", "elect.sync _|p, 0xFFFFFFFF;", "setp.eq.u32 p, 0, 0;"),
    (
        "kernel",
        "producer = warp == Shared<Config>::kWarpgroups * 4",
        "producer = threadIdx.x == Shared<Config>::kWarpgroups * 128",
    ),
)
_AT_BARRIERS = "    // Every thread of every CTA waits for"
EARLY_LAUNCH: tuple[Change, ...] = (
    ("kernel", "        if (threadIdx.x == 0) launch_next_grid();\n", ""),
    ("kernel", _AT_BARRIERS, "    if (producer) launch_next_grid();\n" + _AT_BARRIERS),
)
_CLUSTER_SYNC = 'asm volatile("barrier.cluster.arrive.release;\\nbarrier.cluster.wait.acquire;" ::: "memory");'
RELEASE_AT_START: Change = ("kernel", "        cluster_started();", "        " + _CLUSTER_SYNC)
_CONSUME = "        consume<Config>(args, out_map, Shared<Config>{base}, rank);\n    }\n"
_IN_CLUSTERS = "    if constexpr (Config::kClusterSize > 1) "
BARRIER_AT_END: Change = ("kernel", _CONSUME, f"{_CONSUME}{_IN_CLUSTERS}{_CLUSTER_SYNC}\n")
ALL_STAGES: tuple[Change, ...] = (
    ("kernel", "prefetched_stages<Config>(range) : Config::kPrefetchStages;", "Config::kStages : Config::kStages;"),
    ("scheduler", "min(all ? Config::kStages : Config::kPrefetchStages,", "min(Config::kStages,"),
)
TILE_COPIES: Change = ("kernel", "Config::kDirectLhs", "false")
EXIT_ONCE_READ: Change = ("kernel", "store_wait_written();", "store_wait_read();")
ADDRESSES_AGAIN: Change = ("kernel", "Config::kKeepAddresses", "false")
KEPT: Change = ("kernel", "Config::kKeepAddresses", "true")


@dataclass(frozen=True)
class Variant:
    """What of a kernel's source is changed, whose yield hints it gets, and how many stages more or less."""

    changes: tuple[Change, ...] = ()
    yields: Callable[[KernelSpec], Yields | None] = render.yields
    stages: int = 0


@dataclass(frozen=True)
class Part:
    """Shape, variants and kernels of one table; without kernels those that the selector takes for the formats."""

    m: int
    n: int
    k: int
    variants: dict[str, Variant]
    kernels: tuple[KernelSpec, ...] = ()
    hold_s: float = 0.0  # replay for so long and say what the GPU drew; 0 for a short burst


def _kernel(lhs: str, codes: str, block_m: int, block_n: int, group_size: int = 128, **shape: int) -> KernelSpec:
    scale_type = "bf16" if group_size else "fp32"
    return KernelSpec(lhs, group_size, False, scale_type, block_m, block_n, 2, codes=codes, **shape)


MAIN_LOOP = {
    "as it is": Variant(),
    "no promotion": Variant((NO_PROMOTION,)),
    "no decode": Variant(NO_DECODE),
    "neither": Variant((NO_PROMOTION, *NO_DECODE)),
    "no copies after the first stages": Variant(NO_LOADS),
    "neither, no copies": Variant((NO_PROMOTION, *NO_DECODE, *NO_LOADS)),
}


def prefill() -> Part:
    kernels = [
        _kernel(lhs, codes, block_m, block_n, halves=halves)
        for lhs in ("e4m3", "s8")
        for codes in ("any", lhs)
        for block_m, block_n, halves in ((128, 128, 1), (128, 128, 2), (160, 128, 2), (176, 128, 2), (64, 192, 2))
    ]
    variants = MAIN_LOOP | {"produced by a thread alone": Variant(ONE_THREAD)}
    return Part(4096, 4096, 4096, variants, (*kernels, _kernel("s8", "any", 256, 128, 0, halves=2)))


def addresses() -> Part:
    variants = {"as it is": Variant(), "worked out again": Variant((ADDRESSES_AGAIN,)), "kept": Variant((KEPT,))}
    return Part(16, 4096, 14336, variants)


def stages() -> Part:
    variants = {f"{more:+d} stages": Variant(stages=more) for more in (4, 3, 2, 1, -1, -2)}
    return Part(16, 4096, 14336, {"as it is": Variant(), **variants})


def power() -> Part:
    part = prefill()
    e4m3, s8 = "e4m3fast-g128-bf16-", "s8fast-g128-bf16-"
    chosen = (e4m3 + "m128n128-", e4m3 + "m176hn128-", s8 + "m128hn128-", "s8-channel-")
    return replace(part, kernels=tuple(each for each in part.kernels if each.label.startswith(chosen)), hold_s=0.6)


def decode() -> Part:
    shapes = (
        {"block_n": 64, "warpgroups_k": 2, "split_k": 2, "ctas_per_sm": 2},
        {"block_n": 64, "warpgroups_k": 4, "split_k": 2},
        {"block_n": 64, "split_k": 2, "ctas_per_sm": 2},
        {"block_n": 128, "warpgroups_k": 2, "split_k": 2},
    )
    kernels = [
        _kernel(lhs, codes, 16, **shape)
        for lhs, codes in (("e4m3", "any"), ("e4m3", "e4m3"), ("s8", "s8"))
        for shape in shapes
    ]
    variants = {
        "as it is": Variant(),
        "next kernel launched before the wait": Variant(EARLY_LAUNCH),
        "release barrier at a cluster's start": Variant((RELEASE_AT_START,)),
        "barrier at a cluster's end": Variant((BARRIER_AT_END,)),
        "all of these": Variant((*EARLY_LAUNCH, RELEASE_AT_START, BARRIER_AT_END)),
        "activations by tile copies": Variant((TILE_COPIES,)),
        "weights of all stages before the wait": Variant(ALL_STAGES),
        "exit once stores are read": Variant((EXIT_ONCE_READ,)),
        "produced by a thread alone": Variant(ONE_THREAD),
    }
    return Part(16, 4096, 4096, variants, tuple(kernels))


def yields() -> Part:
    shapes = (
        {"block_m": 128, "block_n": 128}, {"block_m": 128, "block_n": 128, "halves": 2},
        {"block_m": 176, "block_n": 128}, {"block_m": 176, "block_n": 128, "halves": 2},
        {"block_m": 192, "block_n": 128}, {"block_m": 192, "block_n": 128, "halves": 2},
        {"block_m": 64, "block_n": 256}, {"block_m": 64, "block_n": 64, "warpgroups_k": 4},
    )  # fmt: skip
    formats = (
        ("e4m3", "any", 128), ("e4m3", "e4m3", 128), ("e4m3", "any", 64), ("e4m3", "any", 32),
        ("s8", "any", 128), ("s8", "s8", 128), ("s8", "s8", 64), ("s8", "any", 32),
    )  # fmt: skip
    kernels = [_kernel(lhs, codes, group_size=group, **shape) for lhs, codes, group in formats for shape in shapes]
    hints = {
        "as ptxas has it": None,
        "FFMA in turn": Yields(conversions=False),
        "FFMA and I2FP in turn": Yields(),
        "one FFMA in four": Yields(every=4, conversions=False),
        "one FFMA in two": Yields(every=2, conversions=False),
        "one FFMA in four, factors kept": Yields(every=4, keep=True),
    }
    variants = {name: Variant(yields=lambda _, hints=each: hints) for name, each in hints.items()}
    return Part(4096, 4096, 4096, {"as it is": Variant(), **variants}, tuple(kernels))


def chosen() -> Part:
    return Part(128, 4096, 4096, MAIN_LOOP | {"splits keep their sums": Variant(NO_EXCHANGE)})


def choices(formats: list[Format], m: int, n: int, k: int, device: DeviceSpec) -> tuple[KernelSpec, ...]:
    """What the selector takes, each kernel once."""
    return tuple(dict.fromkeys(config.choose(fmt.problem(m, n, k), device) for fmt in formats))


def with_stages(kernel: KernelSpec, device: DeviceSpec) -> KernelSpec | None:
    """The selector's kernel of this shape, with as many stages as fit; None where registers do not suffice."""
    legal = config.legal_kernels(kernel.lhs, kernel.format, device)
    return next((each for each in legal if replace(each, stages=kernel.stages) == kernel), None)


PARTS = {part.__name__: part for part in (prefill, power, decode, yields, addresses, stages, chosen)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--m", type=int, nargs="+", help="instead of the part's own; a table each")
    for name in ("n", "k"):
        parser.add_argument(f"--{name}", type=int, help="instead of the part's own")
    parser.add_argument("--format", nargs="+", help="of chosen kernels, as benchmark.py names them")
    arguments = parser.parse_args()
    part = PARTS[arguments.part]()
    n, k = arguments.n or part.n, arguments.k or part.k
    formats = [parse_format(text) for text in arguments.format or ("e4m3_g128", "int8_g128", "int8_ch")]

    import torch

    from jitgemm.runtime.device import device_of

    weights = Weights(n, k)
    for m in arguments.m or (part.m,):
        if part.kernels:
            kernels = tuple(filter(None, (with_stages(kernel, device_of(0)) for kernel in part.kernels)))
        else:
            kernels = choices(formats, m, n, k, device_of(0))
        times = measure(part, kernels, m, weights)
        what = "microseconds, watts, MHz" if part.hold_s else "microseconds"
        print(f"{torch.cuda.get_device_name()}, m = {m}, n = {n}, k = {k}, {what}\n")
        print("| kernel | " + " | ".join(part.variants) + " |\n|---|" + "---|" * len(part.variants))
        for kernel in kernels:
            print(f"| {kernel.label} | " + " | ".join(times[name, kernel] for name in part.variants) + " |")
        print(flush=True)


class Weights:
    """Copies of one random weight, packed for whichever kernel asks."""

    def __init__(self, n: int, k: int):
        import torch

        self.n, self.k = n, k
        self._q = torch.randint(-7, 8, (n, k), device="cuda", dtype=torch.int8)
        self._packed: dict[WeightFormat, list[W4Weight]] = {}

    def of(self, kernel: KernelSpec, m: int) -> list[W4Weight]:
        """Enough that they come from HBM where that matters, else a few."""
        import torch

        import jitgemm

        if kernel.format not in self._packed:
            groups = ceil_div(self.k, kernel.group_size or self.k)
            scale = (torch.rand(self.n, groups, device="cuda") * 0.01).bfloat16()
            lhs_dtype = {"any": None, "e4m3": torch.float8_e4m3fn, "s8": torch.int8}[kernel.codes]
            q, zero = self._q, None
            if kernel.zero_point:
                q, zero = q + 8, torch.randint(0, 16, (self.n, groups), device="cuda", dtype=torch.uint8)
            packed = jitgemm.pack_w4(q, scale, zero, group_size=kernel.group_size or self.k, lhs_dtype=lhs_dtype)
            self._packed[kernel.format] = [packed]
        copies = self._packed[kernel.format]
        wanted = max(4, math.ceil(COPY_BYTES / (self.n * self.k / 2))) if m <= 512 else 4
        copies += [copy.deepcopy(copies[0]) for _ in range(wanted - len(copies))]
        return copies[:wanted]


def measure(part: Part, kernels: tuple[KernelSpec, ...], m: int, weights: Weights) -> dict[tuple[str, KernelSpec], str]:
    """The table's cells, by variant and kernel."""
    import torch
    from benchmark_lib.timing import REPLAYS, Timed

    import jitgemm
    from jitgemm.gemm.plan import Plan
    from jitgemm.jit.cache import KernelCache
    from jitgemm.runtime import kernels as loaded
    from jitgemm.runtime.device import device_of

    x_scale, out = torch.rand(m, device="cuda"), torch.empty(m, weights.n, device="cuda", dtype=torch.bfloat16)
    x = {
        "s8": torch.randint(-127, 128, (m, weights.k), device="cuda", dtype=torch.int8),
        "e4m3": torch.randn(m, weights.k, device="cuda").to(torch.float8_e4m3fn),
    }
    device, original = device_of(0), render.headers()
    times: dict[tuple[str, KernelSpec], str] = {}
    ready_to_run: dict[tuple[str, KernelSpec], Timed] = {}

    def build(kernel: KernelSpec) -> KernelSpec | None:
        entry, _ = KernelCache().get_or_compile(kernel_source(kernel))
        return kernel if entry.slow_because else None

    for name, variant in part.variants.items():
        headers = dict(original)
        render.headers = lambda: headers
        render.yields = variant.yields
        for header, old, new in variant.changes:
            if old not in headers[f"jitgemm/{header}.cuh"]:
                sys.exit(f"ablate.py: {header}.cuh no longer holds what '{name}' replaces; bring it up to date")
            headers[f"jitgemm/{header}.cuh"] = headers[f"jitgemm/{header}.cuh"].replace(old, new)
        loaded.kernels.clear()
        varied = {kernel: replace(kernel, stages=kernel.stages + variant.stages) for kernel in kernels}
        fitting = [each for each in varied.values() if config.illegal(each, device) is None]
        with ThreadPoolExecutor() as pool:
            failed = {kernel for kernel in pool.map(build, fitting) if kernel}
        for kernel, built in varied.items():
            if built not in fitting or built in failed:
                times[name, kernel] = "spills" if built in failed else "no room"
                continue
            used = weights.of(kernel, m)
            ready = [Plan(x[kernel.lhs], x_scale, weight, out, None, spec=built) for weight in used]
            calls = [
                lambda plan=plan, weight=weight, lhs=kernel.lhs: plan.launch(x[lhs], x_scale, weight, out, None, True)
                for plan, weight in zip(ready, used)
            ]
            timed = Timed(calls)
            if part.hold_s:
                drawn = timed.hold(part.hold_s)
                times[name, kernel] = f"{timed.us:.1f}, {drawn.get('power_w', 0):.0f}, {drawn.get('sm_mhz', 0):.0f}"
            else:
                ready_to_run[name, kernel] = timed
    headers.clear()
    render.headers = lambda: original
    render.yields = Variant().yields
    for _ in range(ROUNDS):
        for timed in random.sample(list(ready_to_run.values()), len(ready_to_run)):
            timed.turn(REPLAYS)
    return times | {key: f"{timed.us:.{1 if m > 512 else 2}f}" for key, timed in ready_to_run.items()}


if __name__ == "__main__":
    main()
