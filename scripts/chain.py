"""Prototype: boundaries of a decode step, by CUDA graphs over cold weights."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
import chain_lib as lib
import torch
from benchmark_lib.timing import Timed

import jitgemm

HIDDEN, INTER, QKV = 4096, 14336, 6144
EPS, FP8 = 1e-5, torch.float8_e4m3fn
DEV = "cuda"


def weight(n: int, k: int, seed: int, rows: torch.Tensor | None = None):
    g = torch.Generator(DEV).manual_seed(seed)
    q = torch.randint(-7, 8, (n, k), generator=g, dtype=torch.int8, device=DEV)
    scale = ((0.5 + torch.rand((n, k // 128), generator=g, device=DEV)) * (0.23 / k**0.5)).bfloat16()
    plain = jitgemm.pack_w4(q, scale, group_size=128, lhs_dtype=FP8)
    if rows is None:
        return plain
    rows = rows.to(DEV)
    return plain, jitgemm.pack_w4(q[rows], scale[rows], group_size=128, lhs_dtype=FP8)


class Layers:
    def __init__(self, count: int):
        rows = lib.interleaved(2 * INTER)
        self.qkv = [weight(QKV, HIDDEN, 10 * i) for i in range(count)]
        self.o = [weight(HIDDEN, HIDDEN, 10 * i + 1) for i in range(count)]
        both = [weight(2 * INTER, HIDDEN, 10 * i + 2, rows) for i in range(count)]
        self.gu, self.woven = [each[0] for each in both], [each[1] for each in both]
        self.down = [weight(HIDDEN, INTER, 10 * i + 3) for i in range(count)]
        self.norms = [torch.rand(2, HIDDEN, device=DEV).add(0.5).bfloat16() for _ in range(count)]
        self.count = count


quantise = partial(jitgemm.quantize_activations, dtype=FP8)
gemm = jitgemm.gemm_w4a8_nt


class Step:
    """Everything for one m."""

    def __init__(self, layers: Layers, m: int):
        self.l, self.m = layers, m
        g = torch.Generator().manual_seed(m)
        self.x = torch.randn(m, HIDDEN, generator=g).to(DEV, torch.bfloat16)
        empty = partial(torch.empty, device=DEV, dtype=torch.bfloat16)
        self.zeros, self.hidden = torch.zeros_like(self.x), torch.empty_like(self.x)
        self.out_qkv, self.out_o = empty(m, QKV), empty(m, HIDDEN)
        self.out_gu, self.y, self.out_down = empty(m, 2 * INTER), empty(m, INTER), empty(m, HIDDEN)
        self.q = torch.empty(m, INTER, dtype=FP8, device=DEV)
        self.qs = torch.empty(m, INTER // 128, device=DEV)
        self.lhs = quantise(self.x)
        self.step1 = [lib.swiglu(self.lhs, w, self.y) for w in layers.woven]
        if m <= 16:
            self.block = [lib.swiglu_block(self.lhs, w, self.q, self.qs) for w in layers.woven]
        gemm(self.lhs, layers.gu[0], self.out_gu)
        self.kept_down = quantise(self.out_gu, silu_mul=True)
        self.kept_block = quantise(self.out_gu, silu_mul=True, scheme="block")

    # One MLP from quantised input to down's output, layer i.
    def mlp(self, kind: str, lhs, i: int):
        l = self.l
        if kind == "today":
            gemm(lhs, l.gu[i], self.out_gu)
            gemm(quantise(self.out_gu, silu_mul=True), l.down[i], self.out_down)
        elif kind == "today-block":
            gemm(lhs, l.gu[i], self.out_gu)
            gemm(quantise(self.out_gu, silu_mul=True, scheme="block"), l.down[i], self.out_down)
        elif kind == "step1":
            self.fused(self.step1, lhs, i)
            gemm(quantise(self.y), l.down[i], self.out_down)
        elif kind == "block":
            self.fused(self.block, lhs, i)
            gemm((self.q, self.qs), l.down[i], self.out_down)
        elif kind == "gemms":
            gemm(lhs, l.gu[i], self.out_gu)
            gemm(self.kept_down, l.down[i], self.out_down)
        elif kind == "gemms-block":
            gemm(lhs, l.gu[i], self.out_gu)
            gemm(self.kept_block, l.down[i], self.out_down)
        else:
            raise ValueError(kind)

    def fused(self, launches, lhs, i):
        launch = launches[i]
        launch.launch.launch(launch.gemm._replace(x=lhs[0], x_scale=lhs[1]))

    def pairs(self, kind: str):
        for i in range(self.l.count):
            self.mlp(kind, self.lhs, i)

    def layers(self, kind: str):
        y, hidden, l = self.x, self.zeros, self.l
        for i in range(l.count):
            *lhs, hidden = quantise(y, rms_norm=l.norms[i][0], eps=EPS, residual=hidden, residual_out=self.hidden)
            gemm(tuple(lhs), l.qkv[i], self.out_qkv)
            gemm(quantise(self.out_qkv[:, :HIDDEN]), l.o[i], self.out_o)
            *lhs, hidden = quantise(self.out_o, rms_norm=l.norms[i][1], eps=EPS, residual=hidden, residual_out=hidden)
            self.mlp(kind, tuple(lhs), i)
            y = self.out_down

    def layer_gemms(self):
        l = self.l
        for i in range(l.count):
            gemm(self.lhs, l.qkv[i], self.out_qkv)
            gemm(self.lhs, l.o[i], self.out_o)
            gemm(self.lhs, l.gu[i], self.out_gu)
            gemm(self.kept_down, l.down[i], self.out_down)


def check(step: Step) -> None:
    """Fused results against today's kernels."""
    gemm(step.lhs, step.l.gu[0], step.out_gu)
    gate, up = step.out_gu.float().chunk(2, 1)
    y = torch.nn.functional.silu(gate) * up
    step.y.fill_(9)
    step.step1[0]()
    torch.cuda.synchronize()
    error = ((step.y.float() - y).abs() / (y.abs() + 1e-6)).max().item()
    assert error < 2**-7, f"step 1 at m = {step.m}: {error}"
    text = f"m={step.m} step1 rel error {error:.2e}"
    if step.m <= 16:
        q, s = quantise(step.out_gu, silu_mul=True, scheme="block")
        step.block[0]()
        torch.cuda.synchronize()
        same = torch.equal(q.view(torch.uint8), step.q.view(torch.uint8)) and torch.equal(s, step.qs)
        assert same, f"block codes at m = {step.m}"
        text += ", block codes equal"
    print(text, flush=True)


def measure(named: dict, per: int, rounds: int, replays: int, passes: int, seed: int = 0) -> dict[str, float]:
    clocks = {name: Timed([call] * passes) for name, call in named.items()}
    for i in range(rounds):
        for name in random.Random(i + seed).sample(list(clocks), len(clocks)):
            clocks[name].turn(replays)
    return {name: (clock.us / per, clock.spread) for name, clock in clocks.items()}


def main() -> None:
    what = sys.argv[1]
    start = time.time()
    count = int(os.environ.get("LAYERS", "6"))
    layers = Layers(count)
    print(f"{torch.cuda.get_device_name()}, {count} layers, weights {time.time() - start:.1f} s", flush=True)
    found: dict = {}
    if what == "one":
        for m in (1, 16):
            check(Step(layers, m))
    elif what == "decode":
        for m in (1, 4, 16):
            step = Step(layers, m)
            check(step)
            kinds = ("today", "step1", "today-block", "block", "gemms", "gemms-block")
            named = {f"pair {k}": partial(step.pairs, k) for k in kinds}
            named |= {f"layer {k}": partial(step.layers, k) for k in ("today", "step1", "today-block", "block")}
            named["layer gemms"] = step.layer_gemms
            found[m] = measure(named, count, 9, 3, 4)
            for name, (us, spread) in found[m].items():
                print(f"m={m:5} {name:20} {us:8.2f} us  spread {spread:.3f}", flush=True)
    elif what == "prefill":
        for m in (1024, 4096):
            step = Step(layers, m)
            check(step)
            found[m] = measure({f"pair {k}": partial(step.pairs, k) for k in ("today", "step1", "gemms")}, count, 7, 2, 1)
            for name, (us, spread) in found[m].items():
                print(f"m={m:5} {name:20} {us:8.2f} us  spread {spread:.3f}", flush=True)
    print(f"{time.time() - start:.1f} s", flush=True)
    if out := os.environ.get("OUT"):
        Path(out, f"chain-{what}.json").write_text(json.dumps(found))


main()
