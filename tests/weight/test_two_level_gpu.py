"""Weights in two levels on a GPU: every code, factor and zero point exactly; dense, grouped and in a layer of experts within
the bound; the bytes that the CPU packs."""

from __future__ import annotations

import random

import builders
import pytest
import torch
import two_level
from builders import same_bits
from moe_cases import Case
from test_gemm_gpu import OUTPUTS, Guarded, assert_right, device_figures
from test_grouped_gpu import ROUTINGS, guarded, offsets_of
from test_grouped_gpu import assert_right as assert_grouped
from test_moe_gpu import assert_layer

import jitgemm
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.gpu


def moved(parts: two_level.Parts) -> two_level.Parts:
    return two_level.Parts(parts.q.cuda(), parts.factor.cuda(), parts.zero.cuda(), parts.scale.cuda())


@pytest.mark.parametrize("m", [1, 17, 64, 200, 4096])
def test_every_code_with_every_factor_and_zero_point(m):
    """One product a result, over all kinds of tiles."""
    parts = two_level.all_triples("cuda")
    weight, exact, k = parts.packed, parts.integers(), parts.q.shape[1]
    for first in range(0, k, m if m > 64 else 37 * m):
        columns = torch.arange(first, min(first + m, k), device="cuda")
        x = torch.zeros(len(columns), k, dtype=torch.int8, device="cuda")
        x[torch.arange(len(columns), device="cuda"), columns] = 1
        out = torch.full((len(columns), 8), torch.nan, device="cuda")
        jitgemm.gemm_w4a8_nt((x, torch.ones(len(columns), device="cuda")), weight, out)
        assert torch.equal(out.T.long(), exact[:, columns]), first


def test_sums_of_the_largest_integers_stay_in_int32():
    """k at its limit, all products 128 * 128: 2^31 less 262144."""
    k = 2**17 - 16
    groups = -(-k // 128)
    q = torch.zeros(8, k, dtype=torch.uint8, device="cuda")
    factor, zero = (torch.full((8, groups), value, dtype=torch.uint8, device="cuda") for value in (8, 16))
    weight = jitgemm.pack_w4_two_level(q, factor, zero, torch.ones(8, dtype=torch.bfloat16, device="cuda"))
    for m in (1, 40, 300):
        x = torch.full((m, k), -128, dtype=torch.int8, device="cuda")
        out = torch.empty(m, 8, device="cuda")
        jitgemm.gemm_w4a8_nt((x, torch.ones(m, device="cuda")), weight, out)
        assert bool((out == 128.0 * 128 * k).all()), m


@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize(("n", "k"), [(72, 416), (4104, 1056)])
def test_the_gpu_packs_the_same_bytes(experts, n, k):
    parts = two_level.parts(1, n, k, experts=experts)
    on_cpu, on_gpu = parts.packed, moved(parts).packed
    assert torch.equal(on_cpu.blocks, on_gpu.blocks.cpu())
    assert torch.equal(on_cpu.row_sum, on_gpu.row_sum.cpu())
    for there, here in zip(on_gpu.unpack(), on_cpu.unpack()):
        assert torch.equal(there.cpu(), here)


CASES = [
    (m, n, k, kind, bias, out)
    for number, (m, n, k) in enumerate(
        builders.third((1, 7, 16, 33, 64, 100, 130, 257, 1000), (8, 72, 520, 4104), (16, 144, 416, 1056, 4128))
    )
    for kind, bias, out in [
        (("token", "affine", "block")[number % 3], number % 2 > 0, ("bf16", "fp32")[number // 3 % 2])
    ]
]


def activations(kind: str, m: int, k: int) -> tuple:
    if kind == "affine":
        return builders.affine_lhs(2, m, k, device="cuda")
    return (builders.block_lhs if kind == "block" else builders.lhs)(2, m, k, "s8", device="cuda")


@pytest.mark.parametrize(("m", "n", "k", "kind", "bias", "out"), CASES, ids=str)
def test_within_the_bound(m, n, k, kind, bias, out):
    weight = two_level.parts(4, n, k, device="cuda").packed
    lhs = activations(kind, m, k)
    guard = Guarded(m, n, contiguous=bias, dtype=OUTPUTS[out])
    row = builders.bias(3, n, torch.float32, "cuda") if bias else None
    jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, bias=row)
    guard.check()
    assert_right(guard.out, lhs, weight, row, has_rms=False)


@pytest.mark.parametrize("m", [1, 48, 300])
def test_batch_invariant_rows(m):
    weight, lhs = two_level.parts(4, 520, 1056, device="cuda").packed, builders.lhs(2, 300, 1056, "s8", device="cuda")
    outs = [torch.empty(rows, 520, dtype=torch.bfloat16, device="cuda") for rows in (300, m)]
    for out in outs:
        jitgemm.gemm_w4a8_nt(tuple(each[: len(out)] for each in lhs), weight, out, batch_invariant=True)
    assert same_bits(outs[0][:m], outs[1])


@pytest.mark.parametrize("kind", ["token", "block"])
def test_every_shape_of_kernel(kind):
    """One of every few legal kernels, whatever the selector takes."""
    weight = two_level.parts(4, 392, 1056, device="cuda").packed
    specs = legal_kernels("s8", weight.format, device_figures(), lhs_group=128 if kind == "block" else 0)
    for spec in random.Random(1).sample(specs, 12):
        lhs = activations(kind, spec.block_m + 3, 1056)
        guard = Guarded(spec.block_m + 3, 392)
        jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, kernel=spec.label)
        guard.check()
        assert_right(guard.out, lhs, weight, has_rms=False)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gathered", [False, True])
def test_grouped_within_the_bound(routing, gathered):
    experts, n, k = 40, 264, 768
    weight = two_level.parts(5, n, k, experts=experts, device="cuda").packed
    counts = ROUTINGS[routing](experts, random.Random(1))
    rows = sum(counts) + 5
    lhs = builders.lhs(3, rows, k, "s8", device="cuda")
    index = (
        torch.randint(0, rows, (rows,), generator=builders.generator(4), dtype=torch.int32).cuda() if gathered else None
    )
    whole, out = guarded(rows, n)
    before, bias = out.clone(), torch.randn(experts, n, device="cuda")
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(
        lhs, weight, out, offsets_of(counts, first=2), row_index=index, bias=bias
    )
    assert_grouped(lhs, weight, out, before, counts, first=2, bias=bias, row_index=index)


@pytest.mark.parametrize("mode", ["s8", "s8z"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 32), (64, 4, 16), (300, 2, 5)])
def test_a_layer_of_experts_is_the_reference(mode, tokens, top_k, experts):
    sizes = dict(device="cuda", dtype=torch.bfloat16, scale=1.0, k=256, inter=160, n=264, mode=mode)
    assert_layer(Case(tokens=tokens, top_k=top_k, experts=experts, tier="two_level", **sizes))


def test_a_graph_replays_the_same_bits():
    weight, lhs = two_level.parts(4, 520, 1056, device="cuda").packed, builders.lhs(2, 33, 1056, "s8", device="cuda")
    eager, captured = (torch.empty(33, 520, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    jitgemm.gemm_w4a8_nt(lhs, weight, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            jitgemm.gemm_w4a8_nt(lhs, weight, captured)
    graph.replay()
    assert same_bits(eager, captured)
