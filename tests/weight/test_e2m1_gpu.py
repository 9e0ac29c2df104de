"""MXFP4 and NVFP4 on a GPU: every form within the bound, dense, grouped and in a layer of experts; the bytes that the CPU
packs."""

from __future__ import annotations

import random

import builders
import mxfp4
import nvfp4
import pytest
import torch
from builders import same_bits
from e2m1 import KINDS, kinds, tiers
from moe_cases import Case
from test_gemm_gpu import OUTPUTS, Guarded, assert_right, device_figures
from test_grouped_gpu import ROUTINGS, guarded, offsets_of
from test_grouped_gpu import assert_right as assert_grouped
from test_moe_gpu import assert_layer

import jitgemm
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.gpu

ALL_SCALES = {**KINDS, "any scales": lambda *sizes, **options: nvfp4.parts(*sizes, low=0, high=127, **options)}


@pytest.mark.parametrize("kind", ALL_SCALES)
@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize(("n", "k"), [(72, 416), (4104, 1056)])
def test_the_gpu_packs_the_same_bytes(kind, experts, n, k):
    on_cpu, on_gpu = (ALL_SCALES[kind](1, n, k, experts=experts, device=device).packed for device in ("cpu", "cuda"))
    assert on_gpu.format == on_cpu.format and on_gpu.blocks.is_cuda
    assert on_gpu.format.order == {"near": "near", "far": "nvfp4", "any scales": "nvfp4"}.get(kind, "e2m1")
    assert torch.equal(on_cpu.blocks, on_gpu.blocks.cpu())
    parts = 2 if kind in mxfp4.TIERS else 3
    for there, here in zip(on_gpu.unpack()[:parts], on_cpu.unpack()[:parts]):
        assert torch.equal(there.view(torch.uint8).cpu(), here.view(torch.uint8))


CASES = [
    (m, n, k, block, bias, out)
    for number, (m, n, k) in enumerate(
        builders.third((1, 7, 16, 33, 64, 100, 130, 257, 1000), (8, 72, 520, 4104), (32, 144, 416, 1056, 4128))
    )
    for block, bias, out in [(("", "fp32", "e8m0")[number % 3], number % 2 > 0, ("bf16", "fp32")[number // 3 % 2])]
]


@kinds
@pytest.mark.parametrize(("m", "n", "k", "block", "bias", "out"), CASES, ids=str)
def test_within_the_bound(m, n, k, block, bias, out, kind):
    weight = KINDS[kind](4, n, k, device="cuda").packed
    make = {"": builders.lhs, "fp32": builders.block_lhs, "e8m0": builders.e8m0_lhs}[block]
    lhs = make(2, m, k, "e4m3", device="cuda")
    guard = Guarded(m, n, contiguous=bias, dtype=OUTPUTS[out])
    row = builders.bias(3, n, torch.float32, "cuda") if bias else None
    jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, bias=row)
    guard.check()
    assert_right(guard.out, lhs, weight, row, has_rms=False)


@kinds
@pytest.mark.parametrize("m", [1, 48, 300])
def test_batch_invariant_rows(kind, m):
    weight, lhs = KINDS[kind](4, 520, 1056, device="cuda").packed, builders.lhs(2, 300, 1056, "e4m3", device="cuda")
    outs = [torch.empty(rows, 520, dtype=torch.bfloat16, device="cuda") for rows in (300, m)]
    for out in outs:
        jitgemm.gemm_w4a8_nt(tuple(each[: len(out)] for each in lhs), weight, out, batch_invariant=True)
    assert same_bits(outs[0][:m], outs[1])


@kinds
@pytest.mark.parametrize("block", [False, True])
def test_every_shape_of_kernel(block, kind):
    """One of every few legal kernels, whatever the selector takes."""
    weight = KINDS[kind](4, 392, 1056, device="cuda").packed
    specs = legal_kernels("e4m3", weight.format, device_figures(), lhs_group=128 if block else 0)
    for spec in random.Random(1).sample(specs, 40):
        make = builders.block_lhs if block else builders.lhs
        lhs = make(2, spec.block_m + 3, 1056, "e4m3", device="cuda")
        guard = Guarded(spec.block_m + 3, 392)
        jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, kernel=spec.label)
        guard.check()
        assert_right(guard.out, lhs, weight, has_rms=False)


@kinds
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gathered", [False, True])
def test_grouped_within_the_bound(kind, routing, gathered):
    experts, n, k = 40, 264, 768
    weight = KINDS[kind](5, n, k, experts=experts, device="cuda").packed
    counts = ROUTINGS[routing](experts, random.Random(1))
    rows = sum(counts) + 5
    lhs = builders.lhs(3, rows, k, "e4m3", device="cuda")
    index = (
        torch.randint(0, rows, (rows,), generator=builders.generator(4), dtype=torch.int32).cuda() if gathered else None
    )
    whole, out = guarded(rows, n)
    before, bias = out.clone(), torch.randn(experts, n, device="cuda")
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(
        lhs, weight, out, offsets_of(counts, first=2), row_index=index, bias=bias
    )
    assert_grouped(lhs, weight, out, before, counts, first=2, bias=bias, row_index=index)


@kinds
@pytest.mark.parametrize("block", [False, True])
def test_masked_within_the_bound(kind, block):
    experts, most, n, k = 9, 70, 264, 768
    weight = KINDS[kind](5, n, k, experts=experts, device="cuda").packed
    x, scale = (builders.block_lhs if block else builders.lhs)(3, experts * most, k, "e4m3", device="cuda")
    counts = [0, 1, 70, 9, 0, 33, 64, 65, 2]
    out = torch.zeros(experts, most, n, dtype=torch.bfloat16, device="cuda")
    lhs = x.view(experts, most, k), scale.view(experts, most, *(scale.shape[1:] if block else ()))
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    jitgemm.m_grouped_gemm_w4a8_nt_masked(lhs, weight, out, masked_m, expected_m=20)
    for e, count in enumerate(counts):
        assert not out[e, count:].any()
        if count:
            assert_right(out[e, :count], (lhs[0][e, :count], lhs[1][e, :count]), weight[e], has_rms=False)


@tiers
@pytest.mark.parametrize("scheme", ["token", "block"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 32), (8, 8, 64), (64, 4, 16), (300, 2, 5)])
def test_a_layer_of_experts_is_the_reference(tier, scheme, tokens, top_k, experts):
    sizes = dict(device="cuda", dtype=torch.bfloat16, scale=1.0, k=256, inter=160, n=264, mode="e4m3")
    assert_layer(Case(tokens=tokens, top_k=top_k, experts=experts, tier=tier, options={"scheme": scheme}, **sizes))


@tiers
def test_gpt_oss_gate_and_biases(tier):
    g = builders.generator(3)
    options = dict(activation="swiglu_oai", order="interleaved", limit=7.0)
    options |= {"bias13": torch.randn(8, 320, generator=g).cuda(), "bias2": torch.randn(8, 264, generator=g).cuda()}
    sizes = dict(device="cuda", dtype=torch.bfloat16, scale=1.0, k=288, inter=160, n=264, mode="e4m3")
    assert_layer(Case(tokens=70, top_k=4, experts=8, tier=tier, options=options, **sizes))


@kinds
def test_a_graph_replays_the_same_bits(kind):
    weight, lhs = KINDS[kind](4, 520, 1056, device="cuda").packed, builders.lhs(2, 33, 1056, "e4m3", device="cuda")
    eager, captured = (torch.empty(33, 520, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    jitgemm.gemm_w4a8_nt(lhs, weight, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            jitgemm.gemm_w4a8_nt(lhs, weight, captured)
    graph.replay()
    assert same_bits(eager, captured)
