"""Small GEMMs, grouped ones, expert layers and quantisers that take every way through the kernels, for compute-sanitizer.

scripts/sanitize.sh runs them; with words, those alone whose names have one of the words. Inputs and references are computed on the CPU, so that the tool watches little except our
kernels. Exits 1 on a wrong result. Needs a Hopper GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import builders
import mxfp4
import nvfp4
import torch
import two_level
from moe_cases import Case
from quantize_cases import assert_same_bits

from jitgemm import fused_experts, fused_experts_reference, quantize_activations
from jitgemm.activations.arguments import activation_of
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm, Groups
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.arguments import ExpertsCall, make_gate
from jitgemm.moe.exchange import Buffer, Layout, run_exchanged
from jitgemm.runtime import device as devices
from jitgemm.select.devices import DeviceSpec
from jitgemm.select.legal import legal_kernels
from jitgemm.weight.correction import with_sums
from jitgemm.weight.packed import AnyWeight

# What the kernel must be, weight format, lhs type, (m, n, k) with tails on every side.
G128, G32Z, CHANNEL = (128, False, "bf16"), (32, True, "fp16"), (builders.PER_CHANNEL, False, "fp32")
E4M3_8, S8_8 = (builders.PER_CHANNEL, False, "fp32", "e4m3", False, "e4m3"), (128, False, "fp32", "s8", False, "int8")
E4M3_4, S8_4 = (128, False, "bf16", "e4m3"), (128, False, "bf16", "s8")
LHS, BLOCKS = {"multicast_lhs": 2}, {"lhs_group": 128}
E8M0 = BLOCKS | {"lhs_e8m0": True}
STRIPS, ROWS = (128, False, "fp32", "e4m3", False, "e4m3", True), {"tokens_as_m": True, **BLOCKS}
CORRECTED = (128, True, "bf16", "s8", False, "int4", False, "fp16")
F16, PARTS = {"sums": "f16"}, {"sums": "parts"}
TWO_LEVEL = (0, False, "fp16", "two_level", False, "two_level")
MXFP4, MXFP4_32 = (0, False, "bf16", "e2m1", False, "e2m1"), (32, False, "bf16", "e2m1", False, "e2m1")
NEAR, TERMS = (0, False, "fp32", "near", False, "nvfp4"), (0, False, "fp32", "nvfp4", False, "nvfp4")
CASES = [
    ("plain", {"block_m": 8, "warpgroups": 1, "split_k": 1}, G128, "e4m3", (5, 72, 544)),
    ("k over warpgroups", {"warpgroups_k": 4, "split_k": 1}, G128, "s8", (5, 72, 544)),
    ("split k", {"warpgroups_k": 2, "split_k": 4}, G128, "e4m3", (13, 136, 1056)),
    ("split k over 6", {"warpgroups_k": 1, "split_k": 6}, (64, False, "fp16"), "s8", (13, 136, 1056)),
    ("split k, scattered sums", {"warpgroups_k": 2, "split_k": 2, "reduce_scatter": True}, G128, "s8", (40, 136, 1056)),
    ("split k, several tiles a cluster", {"split_k": 3, "reduce_scatter": True}, G128, "e4m3", (40, 17160, 544)),
    ("four warpgroups along n", {"block_n": 256}, G128, "e4m3", (100, 520, 544)),
    ("split k, wide", {"block_m": 96, "split_k": 2}, CHANNEL, "e4m3", (100, 136, 1056)),
    ("halves", {"token_halves": 2, "multicast_lhs": 1}, (256, False, "fp32"), "e4m3", (100, 264, 544)),
    ("halves, multicast lhs", {"token_halves": 2, **LHS}, (32, False, "bf16"), "e4m3", (200, 392, 544)),
    ("activations copied by threads", {"block_m": 16, "warpgroups_k": 2, "split_k": 2, "ctas_per_sm": 2}, G128, "e4m3",
     (13, 136, 1056)),
    ("offsets", {"block_m": 32, "warpgroups_k": 1}, (64, False, "bf16", "any", True), "s8", (25, 136, 544)),
    ("offsets, groups of 32", {"block_m": 8}, (32, True, "bf16", "any", True), "e4m3", (5, 136, 544)),
    ("zero points as corrections", {"block_m": 16, "split_k": 2}, CORRECTED, "s8", (13, 136, 1056)),
    ("zero points", {"block_m": 16, "warpgroups": 2}, G32Z, "e4m3", (21, 136, 544)),
    ("zero points, per channel", {"warpgroups_n": 3}, (builders.PER_CHANNEL, True, "bf16"), "s8", (150, 200, 544)),
    ("several tiles a CTA", {"block_m": 8, "warpgroups": 1, "split_k": 1}, G128, "s8", (40, 3272, 288)),
    ("8 bits", {"block_m": 8, "warpgroups_k": 2, "split_k": 2}, E4M3_8, "e4m3", (5, 72, 1056)),
    ("8 bits, halves", {"token_halves": 2, **LHS}, S8_8, "s8", (200, 392, 544)),
    ("8 bits, k over warpgroups", {"block_m": 32, "warpgroups_k": 4, "split_k": 1}, S8_8, "s8", (40, 136, 1056)),
    ("8 bits, per channel, halves", {"token_halves": 2, **LHS}, E4M3_8, "e4m3", (200, 392, 544)),
    ("8 bits, block scales", {"block_m": 48, "split_k": 1, **BLOCKS}, S8_8, "s8", (100, 17160, 288)),
    ("block scales, copied by threads", {"block_m": 16, "warpgroups_k": 2, "split_k": 2, "ctas_per_sm": 2, **BLOCKS},
     G128, "e4m3", (13, 136, 1056)),
    ("block scales, k over warpgroups", {"block_m": 32, "warpgroups_k": 4, "split_k": 1, **BLOCKS}, G128, "s8",
     (40, 72, 544)),
    ("block scales, several tiles a CTA", {"block_m": 48, "split_k": 1, **BLOCKS}, G32Z, "s8", (100, 17160, 288)),
    ("block scales, multicast lhs", {"token_halves": 2, **LHS, **BLOCKS}, G128, "e4m3", (200, 392, 544)),
    ("packed block scales, copied by threads", {"block_m": 16, "warpgroups_k": 2, "split_k": 2, **E8M0}, G128, "e4m3",
     (13, 136, 1056)),
    ("packed block scales, several tiles a CTA", {"block_m": 48, "split_k": 1, **E8M0}, G32Z, "s8", (100, 17160, 288)),
    ("block scales, per channel, multicast lhs", {"token_halves": 2, **LHS, **BLOCKS}, CHANNEL, "s8", (200, 200, 544)),
    ("tokens as rows", {"block_m": 128, "block_n": 128, **ROWS}, STRIPS, "e4m3", (200, 392, 544)),
    ("tokens as rows, halves", {"block_m": 256, "token_halves": 2, **ROWS}, STRIPS, "e4m3", (300, 392, 544)),
    ("tokens as rows, 64 of them", {"block_m": 64, **ROWS}, STRIPS, "e4m3", (200, 392, 544)),
    ("tokens as rows, packed block scales", {"block_m": 192, **ROWS, **E8M0}, STRIPS, "e4m3", (200, 392, 544)),
    ("sums in f16", {"block_m": 112, "split_k": 1, **F16}, E4M3_4, "e4m3", (100, 136, 2336)),
    ("sums in f16, split k, groups of 32", {"split_k": 2, **F16}, (32, False, "fp16", "e4m3"), "e4m3", (90, 136, 1312)),
    ("sums in f16, any order, one run", {"block_n": 128, **F16}, (256, False, "bf16"), "e4m3", (190, 200, 544)),
    ("sums by parts", {"block_m": 80, "split_k": 1, **PARTS}, S8_4, "s8", (100, 136, 1056)),
    ("sums by parts, split k", {"split_k": 2, **PARTS}, (256, False, "fp32", "s8"), "s8", (40, 136, 1056)),
    ("sums by parts, three warpgroups", {"block_n": 192, **PARTS}, S8_4, "s8", (150, 200, 544)),
    ("two levels, copied by threads", {"block_m": 16, "warpgroups_k": 2, "split_k": 2}, TWO_LEVEL, "s8", (13, 136, 1056)),
    ("two levels, three warpgroups", {"block_n": 192}, TWO_LEVEL, "s8", (150, 200, 544)),
    ("near scales", {"block_m": 16, "warpgroups_k": 2, "split_k": 2}, NEAR, "e4m3", (13, 136, 1056)),
    ("near scales, wide", {"block_m": 96, "split_k": 1}, NEAR, "e4m3", (100, 136, 544)),
    ("two terms", {"block_m": 16, "warpgroups": 2}, TERMS, "e4m3", (21, 136, 544)),
    ("MXFP4, a base a row", {"block_m": 112, "split_k": 1}, MXFP4, "e4m3", (130, 136, 672)),
    ("MXFP4, a scale for 32", {"block_m": 32, "warpgroups_k": 1}, MXFP4_32, "e4m3", (25, 136, 544)),
    ("MXFP4, sums in f16", {"split_k": 1, **F16}, MXFP4_32, "e4m3", (120, 136, 1312)),
]  # fmt: skip


# The same for grouped GEMMs: rows of each expert, (n, k), and whether rows are gathered.
GROUPED = [
    ("grouped, split k", {"block_m": 8, "warpgroups_k": 2, "split_k": 2}, G128, "e4m3", (3, 0, 9), (136, 1056), False),
    ("grouped, gathered", {"block_m": 16, "warpgroups_k": 1}, G128, "s8", (5, 0, 40, 17), (200, 544), True),
    ("grouped, parts of tiles", {"block_m": 128, "token_halves": 1}, G128, "s8", (130, 0, 33, 256, 71), (200, 544), False),
    ("grouped, block scales", {"block_m": 24, **BLOCKS}, G128, "e4m3", (3, 0, 9, 50), (136, 1056), False),
    ("grouped, gathered, block scales", {"block_m": 64, **BLOCKS}, G128, "s8", (5, 0, 40, 17), (200, 544), True),
    ("grouped, gathered, packed block scales", {"block_m": 64, **E8M0}, S8_8, "s8", (5, 0, 40, 17), (200, 544), True),
    ("grouped, 8 bits", {"block_m": 24}, S8_8, "s8", (3, 0, 9, 50), (136, 1056), False),
    ("grouped, gathered, 8 bits", {"block_m": 64}, S8_8, "s8", (5, 0, 40, 17), (200, 544), True),
    ("grouped, activations shared", {"block_m": 80, **LHS}, G128, "e4m3", (130, 0, 33, 71), (328, 544), False),
    ("grouped, gathered and shared", {"block_m": 80, **LHS}, CHANNEL, "s8", (90, 0, 33, 71), (328, 544), True),
    ("grouped, tokens as rows", {"block_m": 128, **ROWS}, STRIPS, "e4m3", (130, 0, 33, 71), (328, 544), False),
    ("grouped, many experts", {"block_m": 8}, CHANNEL, "e4m3", (2,) * 40, (136, 544), False),
    ("grouped, sums in f16", {"block_m": 112, **F16}, E4M3_4, "e4m3", (130, 0, 33, 71), (200, 1312), False),
    ("grouped, gathered, sums by parts", {"block_m": 80, **PARTS}, S8_4, "s8", (90, 0, 33, 71), (200, 544), True),
    ("grouped, two levels", {"block_m": 24}, TWO_LEVEL, "s8", (3, 0, 9, 50), (136, 1056), False),
    ("grouped, near scales", {"block_m": 64}, NEAR, "e4m3", (5, 0, 40, 17), (200, 544), True),
]  # fmt: skip

MAPPED = torch.tensor([-1, 2, 0, -1, 1, 7], dtype=torch.int32)
GPT_OSS = {"activation": "swiglu_oai", "order": "interleaved", "limit": 7.0}
LAYERS = {
    "experts, few tokens": Case(tokens=5, top_k=3, experts=6, k=544, inter=160, mode="e4m3"),
    "experts of other ranks": Case(tokens=40, top_k=2, experts=3, options={"expert_map": MAPPED, **GPT_OSS}),
    "experts, many tokens": Case(tokens=700, top_k=3, experts=5, mode="s8z", options={"activation": "gelu"}),
}
"""One CTA routes while others quantise; a map, and skipped choices; a cluster routes."""


QUANTISED = {
    "rotated codes": ((9, 640), {"dtype": torch.int8, "rotation": 128}),
    "rotated codes, CTAs share a row": ((3, 16384), {"dtype": torch.int8, "affine": True, "rotation": 128}),
    "rotated codes, a scale for 128": ((5, 4224), {"dtype": torch.float8_e4m3fn, "scheme": "block", "rotation": 128}),
    "codes and sums for corrections": ((9, 1056), {"dtype": torch.int8, "correction": ("bf16", 64)}),
}

EXCHANGE = Case(tokens=4, top_k=2, experts=3, k=160, inter=96, n=64, dtype=torch.bfloat16, mode="e4m3")
"""Of one rank, which sends and collects by the same kernels as several."""


def first(wanted: dict[str, Any], lhs: str, format: WeightFormat, device: DeviceSpec, experts: int = 0) -> KernelSpec:
    """The device's first legal kernel with these properties; StopIteration when there is none any more."""
    sums = "f16" if wanted.get("sums") == "f16" else "f32"
    kernels = legal_kernels(lhs, format, device, experts=experts, lhs_group=wanted.get("lhs_group", 0), sums=sums)
    kernels = tuple(replace(spec, lhs_e8m0=bool(wanted.get("lhs_e8m0"))) for spec in kernels)
    return next(spec for spec in kernels if all(getattr(spec, name) == value for name, value in wanted.items()))


def weight_of(format: tuple[Any, ...], seed: int, n: int, k: int) -> AnyWeight:
    """A random weight of a format of `CASES` or `GROUPED`."""
    form = WeightFormat(*format)
    if form.code == "two_level":
        return two_level.parts(seed, n, k).packed
    if form.code == "nvfp4":
        return (nvfp4.parts if form.order == "near" else nvfp4.far)(seed, n, k).packed
    if form.powers:  # few enough apart for sums in f16
        return mxfp4.narrow(seed, n, k, "group" if form.group_size else "row").packed
    fields = form.to_dict()
    fields["correction"] = bool(fields.get("correction"))
    return builders.weight_parts(seed, n, k, fields.pop("group_size"), **fields).packed


def activations(wanted: dict[str, Any], m: int, k: int, lhs_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    make = builders.block_lhs if "lhs_group" in wanted else builders.lhs
    return (builders.e8m0_lhs if "lhs_e8m0" in wanted else make)(2, m, k, lhs_type)


def for_sums(spec: KernelSpec, weight: AnyWeight) -> AnyWeight:
    """The weight as this kernel takes it: one that adds up in f16 reads a power of two for each row."""
    return weight.with_sums("f16" if spec.sums == "f16" else "f32")


def grouped(  # type: ignore[no-untyped-def]
    wanted: dict[str, Any], format: tuple[Any, ...], lhs_type: str, counts, sizes, gathers: bool
) -> bool:
    """Whether a grouped GEMM of these sizes is right, and leaves the rows before and behind alone."""
    (n, k), rows = sizes, sum(counts) + 4
    weights = [weight_of(format, e, n, k) for e in range(len(counts))]
    weight = type(weights[0]).stacked(len(weights), weights.__getitem__)
    lhs, bias = activations(wanted, rows, k, lhs_type), torch.stack([builders.bias(e, n) for e in range(len(counts))])
    index = torch.randint(rows, (rows,), dtype=torch.int32) if gathers else None
    offsets = torch.tensor([2, *counts]).cumsum(0).int()
    whole = torch.full((rows, n + 8), 3.0, dtype=torch.bfloat16, device="cuda")
    spec = first(wanted, lhs_type, weight.format, devices.device_of(0), experts=64)
    weight = for_sums(spec, weight)
    out, rhs = whole[:, 8:], weight.to("cuda")
    operands = Gemm(lhs[0].cuda(), lhs[1].cuda(), None, rhs, out, bias.cuda())
    groups = Groups(offsets.cuda(), None if index is None else index.cuda(), 0, rows)
    operands = operands._replace(groups=groups)
    plan = GemmLaunch(operands, spec)
    for _ in range(3):
        plan.launch(operands)
    good = bool((whole[:, :8] == 3).all() and (out[:2] == 3).all() and (out[-2:] == 3).all())
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        part = range(begin, end) if index is None else index[begin:end].tolist()
        lhs_part = lhs[0][part], lhs[1][part]
        ref, bound = gemm_w4a8_bound(lhs_part, weight[e], bias=bias[e])
        good &= bool(((out[begin:end].cpu().double() - ref).abs() <= bound).all())
    return good


def dense(wanted: dict[str, Any], format: tuple[Any, ...], lhs_type: str, sizes: tuple[int, int, int]) -> bool:
    """Whether a GEMM of this (m, n, k) is right."""
    m, n, k = sizes
    weight = weight_of(format, 1, n, k)
    lhs, bias = activations(wanted, m, k, lhs_type), builders.bias(3, n, torch.float32)
    spec = first(wanted, lhs_type, weight.format, devices.device_of(0))
    weight = for_sums(spec, weight)
    ref, bound = gemm_w4a8_bound(lhs, weight, bias=bias)
    rhs = weight.to("cuda")
    if weight.format.correction:
        lhs = with_sums(lhs[0], weight.format.lhs_sums), lhs[1]
    out = torch.empty(m, n + 8, dtype=torch.bfloat16, device="cuda")[:, 8:]
    operands = Gemm(lhs[0].cuda(), lhs[1].cuda(), None, rhs, out, bias.cuda())
    plan = GemmLaunch(operands, spec)
    for _ in range(3):
        unready = rhs.packed._replace(blocks=rhs.blocks.clone())  # no tensor that a weight marked ready
        plan.launch(operands._replace(weight=unready))
        plan.launch(operands)
    torch.cuda.synchronize()
    return bool(((out.cpu().double() - ref).abs() <= bound).all())


def layer(case: Case) -> bool:
    """Whether a layer of experts is near the reference."""
    expected = fused_experts_reference(*case.arguments, **case.options).double()
    options = {key: value.cuda() if torch.is_tensor(value) else value for key, value in case.options.items()}
    arguments = [each.to("cuda") for each in case.arguments]
    for _ in range(3):
        out = fused_experts(*arguments, **options)
    return float((out.cpu().double() - expected).norm()) <= 0.02 * float(expected.norm())


def quantised(sizes: tuple[int, int], options: dict[str, Any]) -> bool:
    """Whether codes and scales are the CPU's."""
    x = torch.randn(sizes, generator=builders.generator(1)).bfloat16()
    for _ in range(3):
        found = quantize_activations(x.cuda(), **options)
    assert_same_bits(found, quantize_activations(x, **options))
    return True


def exchanged() -> bool:
    """Whether a rank that sends its tokens to itself gets what the layer makes of them."""
    arguments = [each.to("cuda") for each in EXCHANGE.arguments]
    tokens = activation_of(torch.float8_e4m3fn, "token", False)
    layout = Layout(0, 1, 6, EXCHANGE.k, EXCHANGE.n, EXCHANGE.top_k, EXCHANGE.dtype, tokens)
    own = torch.empty(layout.offsets["end"], dtype=torch.uint8, device="cuda")
    buffer = Buffer(layout, own, torch.tensor([own.data_ptr()], device="cuda"))
    buffer.clear()
    call = ExpertsCall(*arguments, make_gate("silu", "gate_up", None, None), tokens)
    right = fused_experts(*arguments, **EXCHANGE.options)
    return all(builders.same_bits(run_exchanged(call, buffer), right) for _ in range(3))


def runs() -> list[tuple[str, Callable[[], bool]]]:
    """All that there is to run, by name."""
    gemms = [(name, partial(dense, *case)) for name, *case in CASES]
    gemms += [(name, partial(grouped, *case)) for name, *case in GROUPED]
    layers = [(name, partial(layer, case)) for name, case in LAYERS.items()]
    rows = [(name, partial(quantised, *case)) for name, case in QUANTISED.items()]
    return [*gemms, *layers, *rows, ("exchange", exchanged)]


def main(words: list[str]) -> int:
    wrong = 0
    for name, run in runs():
        if not words or any(word in name for word in words):
            good = run()
            wrong += not good
            print(f"{'ok   ' if good else 'WRONG'} {name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
