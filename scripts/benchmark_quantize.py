#!/usr/bin/env python3
"""Times the activation quantiser next to a copy of as many bytes. Needs a Hopper GPU.

The figures of docs/notes/quantiser.md. A call reads x and writes codes and scales; a copy of half those bytes
(`Tensor.copy_`, what `torch.clone` does) reads and writes as many, and is timed in the same run, in turns. Both as CUDA
graphs of calls on different buffers, which together are larger than the L2, launched dependently as in a model. The
floor is the bytes over the device's rate.

    python scripts/benchmark_quantize.py [--k 4096,14336] [--m 1,16,1024,8192] [--x bf16] [--mode NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_lib.timing import REPLAYS, ROUNDS

COLD_BYTES = 300e6
"""What all buffers of a graph hold together at least: five times an H200's L2."""
MAX_COPIES = 4096
"""Calls of a graph at most: the smallest do not fill the L2 then, and "cold" in the results is false."""
X_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_NORMS, _BLOCK_NORMS = ("rms_norm", "residual rms_norm"), ("block rms_norm", "block residual rms_norm")
MODES = tuple(f"{lhs} {what}".strip() for lhs, some in (
    ("e4m3", ("", "static", "silu_mul", *_NORMS, "block", "block silu_mul", *_BLOCK_NORMS, "permuted", "rotated")),
    ("int8", ("", "affine", "affine rms_norm", "static", "silu_mul", *_NORMS, "block", "block silu_mul", *_BLOCK_NORMS,
              "permuted", "sums 32", "sums 64", "sums 128", "sums 256", "sums 128 silu_mul", "sums 128 rms_norm",
              "sums 128 residual rms_norm", "sums 128 permuted", "rotated", "rotated silu_mul", "rotated rms_norm",
              "rotated residual rms_norm", "rotated block")),
) for what in some)  # fmt: skip
"""Type of the codes, and what the call does besides; sums are of so many codes."""


def calls_of(mode: str, m: int, k: int, x_type: str, device: str = "cuda") -> tuple[list, list, int]:
    """(quantiser calls, copies of as many bytes, bytes read and written by one call)."""
    import torch

    from jitgemm.activations.call import quantize_activations
    from jitgemm.kernel.formats import lhs_columns

    options = mode.split()
    dtype = torch.float8_e4m3fn if options[0] == "e4m3" else torch.int8
    affine = "affine" in options
    arguments: dict[str, Any] = {"affine": affine}
    parameter_bytes, wide = 0, k
    if "sums" in options:
        arguments["correction"] = "bf16", int(options[2])
        wide = lhs_columns(k, arguments["correction"])
    if "static" in options:
        arguments |= {"scheme": "tensor", "scale": torch.tensor([0.05], device=device)}
    if "block" in options:
        arguments["scheme"] = "block"
    if "silu_mul" in options:
        arguments["silu_mul"] = True
    if "rms_norm" in options:
        arguments["rms_norm"] = torch.ones(k, device=device, dtype=torch.bfloat16)
        parameter_bytes = 2 * k
    if "rotated" in options:
        arguments["rotation"] = 128
    if "permuted" in options:
        arguments["permutation"] = torch.randperm(k, device=device).to(torch.int32)
        parameter_bytes = 4 * k

    columns = 2 * k if "silu_mul" in options else k
    x_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[x_type]
    scales = -(-k // 128) if "block" in options else 1
    moved = m * (columns * X_BYTES[x_type] + wide + 4 * scales + (4 if affine else 0)) + parameter_bytes
    moved += 2 * m * k * X_BYTES[x_type] if "residual" in options else 0
    copies = min(MAX_COPIES, max(2, int(COLD_BYTES / moved) + 1))
    sources, targets = [], []
    for _ in range(copies):
        sources.append(torch.randn(m, columns, device=device).to(x_dtype))
        out = [torch.empty(m, wide, dtype=dtype, device=device), torch.empty(m, device=device)]
        if "block" in options:  # as the quantiser makes them
            out[1] = torch.empty(scales, -(-m // 4) * 4, device=device).T[:m]
        if affine:
            out.append(torch.empty(m, dtype=torch.int32, device=device))
        sums = torch.randn_like(sources[-1]) if "residual" in options else None
        targets.append({"out": tuple(out), "residual": sums, "residual_out": sums})
    ours = [
        lambda x=x, into=into: quantize_activations(x, dtype, **into, **arguments) for x, into in zip(sources, targets)
    ]
    blocks = [torch.empty(2, max(1, moved // 2), dtype=torch.uint8, device=device) for _ in range(copies)]
    return ours, [lambda block=block: block[0].copy_(block[1]) for block in blocks], moved


def measure(mode: str, m: int, k: int, x_type: str, rounds: int) -> dict[str, Any]:
    import torch
    from benchmark_lib.cells import Rates
    from benchmark_lib.timing import Timed

    from jitgemm.runtime.device import local_device

    ours, clones, moved = calls_of(mode, m, k, x_type)
    timed, copy = Timed(ours), Timed(clones)
    for _ in range(rounds):
        timed.turn(REPLAYS)
        copy.turn(REPLAYS)
    result = {
        "mode": mode,
        "x": x_type,
        "m": m,
        "k": k,
        "us": timed.us,
        "spread": timed.spread,
        "copy_us": copy.us,
        "bytes": moved,
        "floor_us": moved / Rates.of(local_device()).hbm_bytes_per_us,
        "tb_per_s": moved / timed.us / 1e6,
        "copy_tb_per_s": moved / copy.us / 1e6,
        "of_copy": copy.us / timed.us,
        "cold": len(ours) * moved >= COLD_BYTES,
    }
    del ours, clones, timed, copy
    torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", default="1,16,1024,8192", help="numbers of rows (default: %(default)s)")
    parser.add_argument("--k", default="4096,14336", help="codes of a row (default: %(default)s)")
    parser.add_argument("--x", default="bf16", choices=list(X_BYTES), help="type of x (default: %(default)s)")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too; - for stdout instead of the table")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("no Hopper GPU here: times need one")
    from benchmark_lib.results import write_rows

    table = arguments.json != "-"
    if table:
        print(f"{torch.cuda.get_device_name()}, x {arguments.x}, medians of {arguments.rounds * REPLAYS} replays\n")
        print("| mode | m | k | us | +- | TB/s | floor us | copy us | copy TB/s | % of copy |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for mode in arguments.mode or MODES:
        for k in map(int, arguments.k.split(",")):
            for m in map(int, arguments.m.split(",")):
                row = measure(mode, m, k, arguments.x, arguments.rounds)
                rows.append(row)
                if table:
                    print(
                        f"| {mode} | {m} | {k} | {row['us']:.2f} | {row['spread']:.0%} | {row['tb_per_s']:.2f} "
                        f"| {row['floor_us']:.2f} | {row['copy_us']:.2f} | {row['copy_tb_per_s']:.2f} "
                        f"| {row['of_copy']:.0%} |",
                        flush=True,
                    )
    write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
