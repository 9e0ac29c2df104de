#!/usr/bin/env python3
"""How much of the error bound (`jitgemm.gemm.bound`) results use. Needs a Hopper GPU.

The figures of docs/notes/e4m3-accuracy.md. "as the model": of e4m3 results with k up to 128, which are one record, how
many have the very bits of the tensor core that tests/helpers/tensor_core.py emulates.

    python scripts/accuracy.py [--m 2048] [--n 4096] [--json FILE] > table.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import builders
import torch
from tensor_core import TensorCore

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound

DRAWN = {
    "normal": {"outliers": False},
    "positive": {"outliers": False, "mean": "positive"},
    "columns x50": {},
    "last step x50": {"outliers": False, "last_step": 50.0},
    "last step x1000": {"outliers": False, "last_step": 1000.0},
}
MADE = ("below an outlier", "below a sum")
"""e4m3 products that are cut off whole: all but one of a step, and all of a run but its first step's."""
MODEL_K = 128
COLUMNS = ("lhs", "k", "group", "activations", "bf16 / bound", "fp32 / bound", "bf16 relative RMS", "as the model")


def made(kind: str, m: int, n: int, k: int) -> tuple[tuple[torch.Tensor, torch.Tensor], builders.WeightParts]:
    """Codes of -16 throughout: 0 with zero points of 16. An outlier cuts off 0.5, a first step's sum of 2^15 cuts 4."""
    large, small = (torch.arange(k) % 32 < 1, 0.029296875) if kind == MADE[0] else (torch.arange(k) % 128 < 8, 0.234375)
    x = torch.where(large, 256.0, small).expand(m, k).to(torch.float8_e4m3fn).cuda()
    zero, scale = torch.full((n, 1), 16, dtype=torch.uint8), torch.ones(n, 1)
    codes = torch.zeros((n, k), dtype=torch.uint8)
    return (x, torch.ones(m, 1).cuda()), builders.WeightParts(codes.cuda(), scale.cuda(), zero.cuda(), k)


def measure(lhs_name: str, k: int, group: int, kind: str, m: int, n: int) -> dict[str, object]:
    offset = group == 32
    name = f"{group}, offsets" if offset else group or "per channel"
    row = dict.fromkeys(COLUMNS) | {"lhs": lhs_name, "k": k, "group": name, "activations": kind}
    if kind in MADE:
        lhs, parts = made(kind, m, n, k)
    else:
        lhs = builders.lhs(1, m, k, lhs_name, device="cuda", **DRAWN[kind])
        parts = builders.weight_parts(2, n, k, group, offset=offset, device="cuda")
    weight = parts.packed
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        out = torch.empty(m, n, device="cuda", dtype=dtype)
        jitgemm.gemm_w4a8_nt(lhs, weight, out)
        ref, bound = gemm_w4a8_bound(lhs, weight, out_dtype=dtype)
        error = (out.double() - ref).abs()
        row[f"{name} / bound"] = float((error / bound).nan_to_num(nan=torch.inf).max())
        if name == "bf16":
            row["bf16 relative RMS"] = float((error.square().mean() / ref.square().mean()).sqrt())
    if lhs_name == "e4m3" and k <= MODEL_K:
        rows, columns = slice(0, 32), slice(0, 512)
        zero = None if parts.zero is None else parts.zero[columns]
        few = builders.WeightParts(parts.q[columns], parts.scale[columns], zero, parts.group_size)
        model = TensorCore().gemm((lhs[0][rows], lhs[1][rows]), few)
        row["as the model"] = float((out[rows, columns] == model).double().mean())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, default=2048)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    formats = {"bf16 / bound": ".3f", "fp32 / bound": ".3f", "bf16 relative RMS": ".2e", "as the model": ".4%"}
    rows = []
    print(f"{torch.cuda.get_device_name()}, {arguments.m} x {arguments.n} outputs a row\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for lhs_name in builders.LHS_DTYPES:
        kinds = (*DRAWN, *MADE) if lhs_name == "e4m3" else DRAWN
        for k in (32, 96, 128, 160, 512, 1312, 4096, 16384):
            for kind in kinds:
                for group in (0,) if k <= 128 or kind in MADE else (32, 128, 0):
                    row = measure(lhs_name, k, group, kind, arguments.m, arguments.n)
                    rows.append(row)
                    cells = ("" if row[c] is None else format(row[c], formats.get(c, "")) for c in COLUMNS)
                    print(f"| {' | '.join(cells)} |", flush=True)
    worst = max(max(row["bf16 / bound"], row["fp32 / bound"]) for row in rows)
    print(f"\nAt most {worst:.3f} of the bound.")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    sys.exit(worst > 1)


if __name__ == "__main__":
    main()
