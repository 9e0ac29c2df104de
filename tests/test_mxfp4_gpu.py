"""MXFP4 on a GPU: every product of a code, an exponent and an activation exactly; the three tiers within the bound, dense,
grouped and in a layer of experts; the bytes that the CPU packs."""

from __future__ import annotations

import random

import builders
import mxfp4
import pytest
import torch
from builders import same_bits
from moe_cases import Case
from test_gemm_gpu import OUTPUTS, Guarded, assert_right, device_figures
from test_grouped_gpu import ROUTINGS, guarded, offsets_of
from test_grouped_gpu import assert_right as assert_grouped
from test_moe_gpu import assert_layer

import jitgemm
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.gpu

tiers = pytest.mark.parametrize("tier", mxfp4.TIERS)


def all_pairs(tier: str) -> mxfp4.Parts:
    """Every code with every exponent of a base; by "group" with every scale by itself."""
    parts = mxfp4.all_pairs("cuda")
    if tier == "block":  # another base for the last block
        parts.scales[:, 12:] += 40
    if tier == "group":
        parts.scales[0, 0] = 90
    assert parts.packed.format.group_size == mxfp4.TIERS[tier]
    return parts


@tiers
@pytest.mark.parametrize("m", [1, 8, 17, 64, 200, 480])
def test_every_code_with_every_exponent(tier, m):
    """One product a result: what wgmma makes of e4m3s, subnormals included."""
    parts = all_pairs(tier)
    weight, exact = parts.packed, parts.dequantize_fp64()
    for first in range(0, 480, m):
        one_hot = torch.eye(480, device="cuda")[first : first + m].to(torch.float8_e4m3fn)
        out = torch.full((len(one_hot), 16), torch.nan, device="cuda")
        jitgemm.gemm_w4a8_nt((one_hot, torch.ones(len(one_hot), device="cuda")), weight, out)
        assert torch.equal(out.T.double(), exact[:, first : first + m]), first


@tiers
def test_every_code_with_every_exponent_and_every_activation(tier):
    parts = all_pairs(tier)
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    values = torch.tensor(finite, dtype=torch.uint8, device="cuda")
    x = torch.zeros(len(finite), 480, 480, dtype=torch.uint8, device="cuda")
    x.diagonal(dim1=1, dim2=2).copy_(values[:, None].expand(-1, 480))
    x = x.view(-1, 480).view(torch.float8_e4m3fn)
    out = torch.full((len(x), 16), torch.nan, device="cuda")
    jitgemm.gemm_w4a8_nt((x, torch.ones(len(x), device="cuda")), parts.packed, out)
    exact = values.view(torch.float8_e4m3fn).double()[:, None, None] * parts.dequantize_fp64().T
    assert torch.equal(out.double().view(len(finite), 480, 16), exact)


@tiers
@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize(("n", "k"), [(72, 416), (4104, 1056)])
def test_the_gpu_packs_the_same_bytes(tier, experts, n, k):
    parts = mxfp4.parts(1, n, k, tier, experts=experts)
    on_cpu, on_gpu = parts.packed, mxfp4.Parts(parts.codes.cuda(), parts.scales.cuda()).packed
    assert on_cpu.format == on_gpu.format and torch.equal(on_cpu.blocks, on_gpu.blocks.cpu())
    for there, here in zip(on_gpu.unpack()[:2], on_cpu.unpack()[:2]):
        assert torch.equal(there.view(torch.uint8).cpu(), here.view(torch.uint8))


CASES = [
    (m, n, k, block, bias, out)
    for number, (m, n, k) in enumerate(
        builders.third((1, 7, 16, 33, 64, 100, 130, 257, 1000), (8, 72, 520, 4104), (32, 144, 416, 1056, 4128))
    )
    for block, bias, out in [(("", "fp32", "e8m0")[number % 3], number % 2 > 0, ("bf16", "fp32")[number // 3 % 2])]
]


@tiers
@pytest.mark.parametrize(("m", "n", "k", "block", "bias", "out"), CASES, ids=str)
def test_within_the_bound(m, n, k, block, bias, out, tier):
    weight = mxfp4.parts(4, n, k, tier, device="cuda").packed
    make = {"": builders.lhs, "fp32": builders.block_lhs, "e8m0": builders.e8m0_lhs}[block]
    lhs = make(2, m, k, "e4m3", device="cuda")
    guard = Guarded(m, n, contiguous=bias, dtype=OUTPUTS[out])
    row = builders.bias(3, n, torch.float32, "cuda") if bias else None
    jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, bias=row)
    guard.check()
    assert_right(guard.out, lhs, weight, row, has_rms=False)


@tiers
@pytest.mark.parametrize("m", [1, 48, 300])
def test_batch_invariant_rows(tier, m):
    weight, lhs = (
        mxfp4.parts(4, 520, 1056, tier, device="cuda").packed,
        builders.lhs(2, 300, 1056, "e4m3", device="cuda"),
    )
    outs = [torch.empty(rows, 520, dtype=torch.bfloat16, device="cuda") for rows in (300, m)]
    for out in outs:
        part = tuple(each[: len(out)] for each in lhs)
        jitgemm.gemm_w4a8_nt(part, weight, out, batch_invariant=True)
    assert same_bits(outs[0][:m], outs[1])


@tiers
def test_every_shape_of_kernel(tier):
    """One of every few legal kernels, whatever the selector takes."""
    weight = mxfp4.parts(4, 392, 1056, tier, device="cuda").packed
    specs = legal_kernels("e4m3", weight.format, device_figures())
    for spec in random.Random(1).sample(specs, 40):
        lhs = builders.lhs(2, spec.block_m + 3, 1056, "e4m3", device="cuda")
        guard = Guarded(spec.block_m + 3, 392)
        jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, kernel=spec.label)
        guard.check()
        assert_right(guard.out, lhs, weight, has_rms=False)


@tiers
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gathered", [False, True])
def test_grouped_within_the_bound(tier, routing, gathered):
    experts, n, k = 40, 264, 768
    weight = mxfp4.parts(5, n, k, tier, experts=experts, device="cuda").packed
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


@tiers
@pytest.mark.parametrize("block", [False, True])
def test_masked_within_the_bound(tier, block):
    experts, most, n, k = 9, 70, 264, 768
    weight = mxfp4.parts(5, n, k, tier, experts=experts, device="cuda").packed
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


@tiers
def test_a_graph_replays_the_same_bits(tier):
    weight, lhs = (
        mxfp4.parts(4, 520, 1056, tier, device="cuda").packed,
        builders.lhs(2, 33, 1056, "e4m3", device="cuda"),
    )
    eager, captured = (torch.empty(33, 520, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    jitgemm.gemm_w4a8_nt(lhs, weight, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            jitgemm.gemm_w4a8_nt(lhs, weight, captured)
    graph.replay()
    assert same_bits(eager, captured)
