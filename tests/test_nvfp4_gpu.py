"""NVFP4 on a GPU: every product of a code, a scale and an activation exactly; dense, grouped and in a layer of experts within
the bound; the bytes that the CPU packs."""

from __future__ import annotations

import random

import builders
import nvfp4
import pytest
import torch
from builders import same_bits
from moe_cases import Case
from test_gemm_gpu import OUTPUTS, Guarded, assert_right, device_figures
from test_grouped_gpu import ROUTINGS, guarded, offsets_of
from test_grouped_gpu import assert_right as assert_grouped
from test_moe_gpu import assert_layer

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pairs", [nvfp4.all_pairs, nvfp4.near_pairs])
@pytest.mark.parametrize("m", [1, 17, 64, 200, 2032])
def test_every_code_with_every_scale(m, pairs):
    """One product a result: what two wgmmas make of it."""
    parts = pairs("cuda")
    weight, exact, k = parts.packed, parts.products(), parts.codes.shape[1]
    step = max(m, 127)
    for first in range(0, k, step):
        one_hot = torch.eye(k, device="cuda")[first : first + step].to(torch.float8_e4m3fn)
        for start in range(0, len(one_hot), m):
            x = one_hot[start : start + m]
            out = torch.full((len(x), 16), torch.nan, device="cuda")
            jitgemm.gemm_w4a8_nt((x, torch.ones(len(x), device="cuda")), weight, out)
            assert torch.equal(out.T.double(), exact[:, first + start : first + start + len(x)]), (first, start)


@pytest.mark.parametrize("pairs", [nvfp4.all_pairs, nvfp4.near_pairs])
def test_every_code_with_every_scale_and_every_activation(pairs):
    """A product of seven or eight bits a term: the tensor cores cut off none of the ten of both."""
    parts = pairs("cuda")
    weight, exact, k = parts.packed, parts.products(), parts.codes.shape[1]
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    values = torch.tensor(finite, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    columns = torch.arange(k, device="cuda")
    for value in values.view(torch.uint8)[::3]:
        x = torch.zeros(k, k, dtype=torch.uint8, device="cuda")
        x[columns, columns] = value
        out = torch.full((k, 16), torch.nan, device="cuda")
        jitgemm.gemm_w4a8_nt((x.view(torch.float8_e4m3fn), torch.ones(k, device="cuda")), weight, out)
        expected = float(value.view(torch.float8_e4m3fn)) * exact.T
        assert torch.equal(out.double(), expected), int(value)


def test_scales_of_zero_and_the_largest():
    parts = nvfp4.parts(1, 72, 416, device="cuda")
    scales = parts.scales.view(torch.uint8)
    scales[0], scales[1], scales[2, ::2] = 0, 126, 0
    parts.codes[1] = 7
    lhs = torch.full((40, 416), 448.0, device="cuda").to(torch.float8_e4m3fn), torch.ones(40, device="cuda")
    out = torch.empty(40, 72, device="cuda")
    jitgemm.gemm_w4a8_nt(lhs, parts.packed, out)
    ref, bound = gemm_w4a8_bound(lhs, parts.packed, out_dtype=torch.float32)
    assert not out[:, 0].any() and bool(((out.double() - ref).abs() <= bound).all())


@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize(("n", "k"), [(72, 416), (4104, 1056)])
@pytest.mark.parametrize("low", [0, 32], ids=["any scales", "near"])
def test_the_gpu_packs_the_same_bytes(experts, n, k, low):
    parts = nvfp4.parts(1, n, k, experts=experts, low=low, high=127 if low == 0 else 112)
    on_cpu, on_gpu = parts.packed, nvfp4.Parts(parts.codes.cuda(), parts.scales.cuda(), parts.whole.cuda()).packed
    assert on_gpu.format.order == ("nvfp4" if low == 0 else "near") and on_gpu.format == on_cpu.format
    assert torch.equal(on_cpu.blocks, on_gpu.blocks.cpu())
    for there, here in zip(on_gpu.unpack(), on_cpu.unpack()):
        assert torch.equal(there.view(torch.uint8).cpu(), here.view(torch.uint8))


CASES = [
    (m, n, k, block, bias, out)
    for number, (m, n, k) in enumerate(
        builders.third((1, 7, 16, 33, 64, 100, 130, 257, 1000), (8, 72, 520, 4104), (16, 144, 416, 1056, 4128))
    )
    for block, bias, out in [(("", "fp32", "e8m0")[number % 3], number % 2 > 0, ("bf16", "fp32")[number // 3 % 2])]
]


@pytest.mark.parametrize(("m", "n", "k", "block", "bias", "out"), CASES, ids=str)
def test_within_the_bound(m, n, k, block, bias, out):
    weight = (nvfp4.far if m % 2 and k > 16 else nvfp4.parts)(4, n, k, device="cuda").packed
    make = {"": builders.lhs, "fp32": builders.block_lhs, "e8m0": builders.e8m0_lhs}[block]
    lhs = make(2, m, k, "e4m3", device="cuda")
    guard = Guarded(m, n, contiguous=bias, dtype=OUTPUTS[out])
    row = builders.bias(3, n, torch.float32, "cuda") if bias else None
    jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, bias=row)
    guard.check()
    assert_right(guard.out, lhs, weight, row, has_rms=False)


@pytest.mark.parametrize("m", [1, 48, 300])
def test_batch_invariant_rows(m):
    weight, lhs = nvfp4.parts(4, 520, 1056, device="cuda").packed, builders.lhs(2, 300, 1056, "e4m3", device="cuda")
    outs = [torch.empty(rows, 520, dtype=torch.bfloat16, device="cuda") for rows in (300, m)]
    for out in outs:
        jitgemm.gemm_w4a8_nt(tuple(each[: len(out)] for each in lhs), weight, out, batch_invariant=True)
    assert same_bits(outs[0][:m], outs[1])


@pytest.mark.parametrize("made", [nvfp4.parts, nvfp4.far])
@pytest.mark.parametrize("block", [False, True])
def test_every_shape_of_kernel(block, made):
    """One of every few legal kernels, whatever the selector takes."""
    weight = made(4, 392, 1056, device="cuda").packed
    specs = legal_kernels("e4m3", weight.format, device_figures(), lhs_group=128 if block else 0)
    for spec in random.Random(1).sample(specs, 40):
        make = builders.block_lhs if block else builders.lhs
        lhs = make(2, spec.block_m + 3, 1056, "e4m3", device="cuda")
        guard = Guarded(spec.block_m + 3, 392)
        jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, kernel=spec.label)
        guard.check()
        assert_right(guard.out, lhs, weight, has_rms=False)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gathered", [False, True])
def test_grouped_within_the_bound(routing, gathered):
    experts, n, k = 40, 264, 768
    weight = nvfp4.parts(5, n, k, experts=experts, device="cuda").packed
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


@pytest.mark.parametrize("block", [False, True])
def test_masked_within_the_bound(block):
    experts, most, n, k = 9, 70, 264, 768
    weight = nvfp4.parts(5, n, k, experts=experts, device="cuda").packed
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


@pytest.mark.parametrize("scheme", ["token", "block"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 32), (8, 8, 64), (64, 4, 16), (300, 2, 5)])
def test_a_layer_of_experts_is_the_reference(scheme, tokens, top_k, experts):
    sizes = dict(device="cuda", dtype=torch.bfloat16, scale=1.0, k=256, inter=160, n=264, mode="e4m3")
    assert_layer(Case(tokens=tokens, top_k=top_k, experts=experts, tier="nvfp4", options={"scheme": scheme}, **sizes))


def test_a_graph_replays_the_same_bits():
    weight, lhs = nvfp4.parts(4, 520, 1056, device="cuda").packed, builders.lhs(2, 33, 1056, "e4m3", device="cuda")
    eager, captured = (torch.empty(33, 520, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    jitgemm.gemm_w4a8_nt(lhs, weight, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            jitgemm.gemm_w4a8_nt(lhs, weight, captured)
    graph.replay()
    assert same_bits(eager, captured)
