#!/usr/bin/env python3
"""Times the fused expert layer and each of its six launches. Needs a Hopper GPU.

A CUDA graph holds one call for each of many routings, drawn uniformly, so that calls meet different experts and weights
come from memory. A part's graph holds that part's calls alone, on what the parts before it made of the same routings;
"rest" is the layer without its two GEMMs.

    python scripts/benchmark_moe_layer.py [--model deepseek-v3-ep8] [--tokens 8,128] [--mode e4m3] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_lib.cells import ROUTINGS
from benchmark_lib.timing import REPLAYS, ROUNDS

MODELS = {
    "deepseek-v3-ep8": {"experts": 32, "everywhere": 256, "top_k": 8, "k": 7168, "inter": 2048, "tokens": (8, 128)},
    "qwen3-30b-a3b": {"experts": 128, "everywhere": 128, "top_k": 8, "k": 2048, "inter": 768, "tokens": (1, 16, 64)},
}
MODES = {
    "e4m3": ("float8_e4m3fn", 4, 128, "token"),
    "int8": ("int8", 4, 128, "token"),
    "int8-channel": ("int8", 4, 0, "token"),
    "w8-e4m3": ("float8_e4m3fn", 8, 0, "token"),
    "w8-int8": ("int8", 8, 0, "token"),
    "w8-e4m3-block": ("float8_e4m3fn", 8, 128, "block"),
}
"""Name -> (lhs_dtype, bits of weights, group or block size or 0 for scales per channel, scheme of activations)."""
PARTS = ("route", "quantise", "gemm1", "act", "gemm2", "combine")


def weights_of(model: dict[str, Any], bits: int, group_size: int, lhs_dtype: Any, device: str = "cuda") -> list[Any]:
    """w13 and w2: all experts alike, each in its own memory."""
    import torch

    import jitgemm

    made = []
    for n, k in ((2 * model["inter"], model["k"]), (model["k"], model["inter"])):
        if bits == 8:
            weight = torch.randn(n, k, device=device).mul(k**-0.5).bfloat16()
            expert = jitgemm.quantize_w8(weight, lhs_dtype, block=group_size or None)
        else:
            group = group_size or k
            q = torch.randint(-7, 8, (n, k), dtype=torch.int8, device=device)
            scale = (torch.rand(n, -(-k // group), device=device) + 0.5).mul(0.01).bfloat16()
            expert = jitgemm.pack_w4(q, scale, group_size=group, k=k, lhs_dtype=lhs_dtype)
        made.append(type(expert).stacked(model["experts"], lambda e: expert))
    return made


def calls_of(
    model: dict[str, Any], tokens: int, weights: list[Any], mode: str, routings: int, device: str = "cuda"
) -> dict[str, list]:
    """For "layer" and each part, a call for each routing."""
    import torch

    import jitgemm.moe.route
    from jitgemm.activations.arguments import activation_of
    from jitgemm.activations.run import QuantizeCall, quantize
    from jitgemm.activations.scheme import SILU_MUL, Prologue
    from jitgemm.moe.route import combine, route

    w13, w2 = weights
    dtype_name, bits, _, scheme = MODES[mode]
    lhs_dtype = getattr(torch, dtype_name)
    gemm = getattr(jitgemm, f"m_grouped_gemm_w{bits}a8_nt_contiguous")
    experts, everywhere, top_k = model["experts"], model["everywhere"], model["top_k"]
    choices = tokens * top_k
    hint = choices / everywhere
    expert_map = None
    if everywhere != experts:
        expert_map = torch.full((everywhere,), -1, dtype=torch.int32, device=device)
        expert_map[:experts] = torch.arange(experts, dtype=torch.int32, device=device)
    calls: dict[str, list] = {name: [] for name in ("layer", *PARTS)}
    for _ in range(routings):
        x = torch.randn(tokens, model["k"], device=device).bfloat16()
        ids = torch.rand(tokens, everywhere, device=device).argsort(1)[:, :top_k].int().contiguous()
        topk_weights, out = torch.rand(tokens, top_k, device=device), torch.empty_like(x)
        hidden, rows = (torch.empty(choices, w.n, dtype=x.dtype, device=device) for w in weights)
        routing = route(ids, experts, expert_map=expert_map)
        first = QuantizeCall(x, activation_of(lhs_dtype, scheme, False))
        options: dict[str, Any] = {"expected_m": hint}
        gather = routing.row_index
        if hint >= jitgemm.moe.route.GATHER_M:  # the layer's quantiser gathers then
            first, gather = replace(first, row_count=routing.offsets[-1:], row_index=gather), None
        lhs1 = quantize(first)
        gemm(lhs1[:2], w13, hidden, routing.offsets, row_index=gather, **options)
        second = replace(
            first, x=hidden, prologue=Prologue(gate=SILU_MUL), row_count=routing.offsets[-1:], row_index=None
        )
        lhs2 = quantize(second)
        gemm(lhs2[:2], w2, rows, routing.offsets, **options)

        def layer(x=x, ids=ids, topk_weights=topk_weights, out=out) -> None:
            options = {"lhs_dtype": lhs_dtype, "scheme": scheme, "expert_map": expert_map, "out": out}
            jitgemm.fused_experts(x, w13, w2, ids, topk_weights, **options)

        def gemm1(lhs=lhs1, hidden=hidden, routing=routing, gather=gather) -> None:
            gemm(lhs[:2], w13, hidden, routing.offsets, row_index=gather, **options)

        def gemm2(lhs=lhs2, rows=rows, routing=routing) -> None:
            gemm(lhs[:2], w2, rows, routing.offsets, **options)

        calls["layer"].append(layer)
        calls["route"].append(lambda ids=ids: route(ids, experts, expert_map=expert_map))
        calls["quantise"].append(lambda call=replace(first, out=lhs1): quantize(call))
        calls["gemm1"].append(gemm1)
        calls["act"].append(lambda call=replace(second, out=lhs2): quantize(call))
        calls["gemm2"].append(gemm2)
        calls["combine"].append(
            lambda rows=rows, inverse=routing.inverse, w=topk_weights, out=out: combine(rows, inverse, w, out)
        )
    return calls


def measure(name: str, tokens: int, mode: str, weights: list[Any]) -> dict[str, Any]:
    from benchmark_lib.timing import Timed

    calls = calls_of(MODELS[name], tokens, weights, mode, ROUTINGS)
    timed = {part: Timed(each) for part, each in calls.items()}
    for _ in range(ROUNDS):
        for each in timed.values():
            each.turn(REPLAYS)
    us = {part: each.us for part, each in timed.items()}
    return {
        "model": name,
        "mode": mode,
        "tokens": tokens,
        "us": us,
        "rest": us["layer"] - us["gemm1"] - us["gemm2"],
        "spread": timed["layer"].spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be repeated; default: all")
    parser.add_argument("--tokens", help="numbers of tokens (default: the model's)")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="may be repeated; default: e4m3")
    parser.add_argument("--json", metavar="FILE", help="write the results there too; - for stdout instead of the table")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("no Hopper GPU here: times need one")
    from benchmark_lib.results import write_rows

    table = arguments.json != "-"
    if table:
        print(f"{torch.cuda.get_device_name()}, us, medians of {ROUNDS * REPLAYS} replays\n")
        print(f"| model | mode | tokens | {' | '.join(PARTS)} | layer | rest | +- |\n|{'---|' * (len(PARTS) + 6)}")
    rows = []
    for name in arguments.model or MODELS:
        for mode in arguments.mode or ["e4m3"]:
            dtype_name, bits, group_size, _ = MODES[mode]
            weights = weights_of(MODELS[name], bits, group_size, getattr(torch, dtype_name))
            tokens = tuple(map(int, arguments.tokens.split(","))) if arguments.tokens else MODELS[name]["tokens"]
            for count in tokens:
                row = measure(name, count, mode, weights)
                rows.append(row)
                if table:
                    figures = " | ".join(f"{row['us'][part]:.2f}" for part in (*PARTS, "layer"))
                    head = f"| {name} | {mode} | {count} | {figures}"
                    print(f"{head} | {row['rest']:.2f} | {row['spread']:.0%} |", flush=True)
            del weights
            torch.cuda.empty_cache()
    write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
