#!/usr/bin/env python3
"""How far results are from the exact product, by length of k. Needs a Hopper GPU.

The figures of docs/notes/e4m3-accuracy.md.

    python scripts/accuracy.py [--m 2048] [--n 4096] > table.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import jitgemm  # noqa: E402
from jitgemm.gemm.reference import error_bound, gemm_w4a8_terms  # noqa: E402


def measure(lhs: str, k: int, group_size: int, mean: float, outliers: bool, m: int, n: int) -> tuple[int, float, float]:
    """(elements beyond the bound, worst error over the bound, relative RMS)."""
    x = torch.randn(m, k, device="cuda") + mean
    if outliers:  # a few columns fifty times as big, as language models have
        x[:, torch.randperm(k, device="cuda")[: max(1, k // 512)]] *= 50
    x *= (448.0 if lhs == "e4m3" else 127.0) / x.abs().amax(1, keepdim=True)
    x = x.to(torch.float8_e4m3fn) if lhs == "e4m3" else x.round().to(torch.int8)
    q = torch.randint(-8, 8, (n, k), device="cuda", dtype=torch.int8)
    groups = 1 if group_size >= k else -(-k // group_size)
    scale = (torch.rand(n, groups, device="cuda") * 0.02 + 0.001).bfloat16()
    weight = jitgemm.pack_w4(q, scale, group_size=group_size)
    x_scale = torch.rand(m, device="cuda") + 0.5
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale), weight, out)
    ref, terms = gemm_w4a8_terms((x, x_scale), weight)
    error = (out.double() - ref).abs()
    ratio = error / error_bound(ref, terms, x.dtype).clamp(min=1e-30)
    return int((ratio > 1).sum()), float(ratio.max()), float((error.square().mean() / ref.square().mean()).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, default=2048)
    parser.add_argument("--n", type=int, default=4096)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, {arguments.m} x {arguments.n} outputs a row\n")
    print("| lhs | k | group | mean of x | outliers | beyond the bound | worst error / bound | relative RMS |")
    print("|---|---|---|---|---|---|---|---|")
    for lhs in ("e4m3", "int8"):
        for k in (32, 64, 96, 128, 1024, 4096, 16384):
            for group_size in dict.fromkeys((min(128, k), k)):
                for mean, outliers in ((0.0, False), (0.0, True), (1.0, False), (1.0, True)):
                    beyond, worst, rms = measure(lhs, k, group_size, mean, outliers, arguments.m, arguments.n)
                    group = "per channel" if group_size >= k else group_size
                    kind = "yes" if outliers else "no"
                    print(
                        f"| {lhs} | {k} | {group} | {mean:g} | {kind} | {beyond} | {worst:.3f} | {rms:.2e} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
