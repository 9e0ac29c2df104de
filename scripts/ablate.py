#!/usr/bin/env python3
"""What limits a kernel: the same kernels with one part of the work left out, timed side by side. Needs a Hopper GPU.

    python scripts/ablate.py [--m 4096] [--n 4096] [--k 4096]

Results of the cut-down kernels are wrong, of course; only their time means something. Figures: docs/notes/main-loop.md.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from jitgemm import render  # noqa: E402
from jitgemm.spec import KernelSpec  # noqa: E402

NO_PROMOTION = ("kernel", "if (promote_now) {", "if (promote_now && last) {")
NO_DECODE = (
    ("decode", "u32 bytes = word & 0x87878787u;\n        return bytes + ((bytes & 0x80808080u) >> 7);", "return word;"),
    ("decode", "return (word & 0x07070707u) ^ byte_sign_mask(word);", "return word;"),
)
NO_AHEAD = (
    "kernel",
    "        if (!last) load(next);\n"
    "        multiplier.finish(acc, current, descriptor, last);\n"
    "        release_stage(shared, stage, place);",
    "        multiplier.finish(acc, current, descriptor, last);\n"
    "        release_stage(shared, stage, place);\n"
    "        if (!last) load(next);",
)
VARIANTS = {
    "as it is": (),
    "no promotion": (NO_PROMOTION,),
    "no decode": NO_DECODE,
    "neither": (NO_PROMOTION, *NO_DECODE),
    "decode after": (NO_AHEAD,),
}


def kernels() -> list[KernelSpec]:
    found = []
    shapes = ((128, 128, 1, 7), (128, 128, 2, 7), (160, 128, 2, 6), (96, 192, 2, 7), (80, 192, 1, 8))
    for lhs in ("e4m3", "s8"):
        for block_m, block_n, halves, stages in shapes:
            found.append(
                KernelSpec(lhs, 128, False, "bf16", block_m=block_m, block_n=block_n, halves=halves, stages=stages)
            )
    return [*found, KernelSpec("s8", 0, False, "fp32", block_m=256, block_n=128, stages=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("m", "n", "k"):
        parser.add_argument(f"--{name}", type=int, default=4096)
    arguments = parser.parse_args()
    m, n, k = arguments.m, arguments.n, arguments.k

    import torch
    from benchmark_lib.timing import Timed

    import jitgemm
    from jitgemm import plan as plans
    from jitgemm.cache import KernelCache

    q = torch.randint(-8, 8, (n, k), device="cuda", dtype=torch.int8)
    weights = {}
    for g in (128, k):
        weights[g] = jitgemm.pack_w4(q, torch.rand(n, -(-k // g), device="cuda").bfloat16(), group_size=g)
    x_scale, out = torch.rand(m, device="cuda"), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    x = {
        "s8": torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8),
        "e4m3": torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn),
    }

    headers, original = render.headers(), dict(render.headers())
    times: dict[tuple[str, KernelSpec], str] = {}
    for name, changes in VARIANTS.items():
        headers.clear()
        headers.update(original)
        for header, old, new in changes:
            if old not in headers[f"jitgemm/{header}.cuh"]:
                sys.exit(f"ablate.py: {header}.cuh no longer holds what '{name}' replaces; bring VARIANTS up to date")
            headers[f"jitgemm/{header}.cuh"] = headers[f"jitgemm/{header}.cuh"].replace(old, new)
        plans._loaded.clear()

        def build(kernel: KernelSpec) -> KernelSpec | None:
            try:
                KernelCache().get_or_compile(kernel)
            except jitgemm.CompileError:
                return kernel
            return None

        with ThreadPoolExecutor() as pool:
            failed = {kernel for kernel in pool.map(build, kernels()) if kernel}
        for kernel in kernels():
            if kernel in failed:
                times[name, kernel] = "spills"
                continue
            weight = weights[kernel.group_size or k]
            plan = plans.Plan(x[kernel.lhs], x_scale, weight, out, None, spec=kernel)
            timed = Timed([lambda: plan.launch(x[kernel.lhs], x_scale, weight, out, None, True)] * 4)
            timed.turn(5)
            times[name, kernel] = f"{sorted(timed.turns[0])[2]:.1f}"
    print(f"{torch.cuda.get_device_name()}, m = {m}, n = {n}, k = {k}, microseconds\n")
    print("| kernel | " + " | ".join(VARIANTS) + " |\n|---|" + "---|" * len(VARIANTS))
    for kernel in kernels():
        print(f"| {kernel.label} | " + " | ".join(times[name, kernel] for name in VARIANTS) + " |")


if __name__ == "__main__":
    main()
