"""The grouped kernels on a GPU, weights of 4 and of 8 bits: bits of the dense kernel, the stated bound, guard bands,
graphs with other routings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import builders
import pytest
import torch
import w8
from builders import PER_CHANNEL, same_bits, weight_of_experts
from guarded_groups import (
    assert_masked_right,
    assert_right,
    offsets_of,
)

import jitgemm
from jitgemm.dtypes import LHS_TYPES
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm, Groups
from jitgemm.kernel.spec import KernelSpec

pytestmark = pytest.mark.gpu

FORMS = {
    "e4m3": lambda count, n, k: weight_of_experts(count, n, k, codes="e4m3", device="cuda"),
    "s8": lambda count, n, k: weight_of_experts(count, n, k, device="cuda"),
    "s8-channel": lambda count, n, k: weight_of_experts(count, n, k, PER_CHANNEL, device="cuda"),
} | {
    f"{lhs}w8-{name}": partial(w8.experts_of, lhs=lhs, group=group)
    for lhs in LHS_TYPES
    for name, group in (("g128", 128), ("block", w8.BLOCK))
}
"""Weights of a number of experts, n and k, by the type of activations."""

SPECS = [
    dict(block_m=8, block_n=64, stages=6, warpgroups_k=2, split_k=2),
    dict(block_m=8, block_n=128, stages=6, split_k=3),
    dict(block_m=16, block_n=256, stages=5),
    dict(block_m=16, block_n=64, stages=5, warpgroups_k=4),
    dict(block_m=24, block_n=64, stages=4, warpgroups_k=2),
    dict(block_m=64, block_n=64, stages=4, warpgroups_k=1, split_k=2),
    dict(block_m=64, block_n=192, stages=4),
    dict(block_m=128, block_n=128, stages=4),
    dict(block_m=128, block_n=128, token_halves=2, stages=4),
    dict(block_m=176, block_n=128, stages=3),
    dict(block_m=80, block_n=192, stages=4),
    dict(block_m=144, block_n=128, multicast_lhs=2, stages=4),
    dict(block_m=160, block_n=128, token_halves=2, multicast_lhs=2, stages=3),
    dict(block_m=112, block_n=192, multicast_lhs=2, stages=3),
]


W8_SPECS = [
    dict(block_m=8, block_n=64, stages=6, warpgroups_k=2, split_k=2),
    dict(block_m=16, block_n=256, stages=4),
    dict(block_m=24, block_n=64, stages=4, warpgroups_k=2),
    dict(block_m=64, block_n=128, stages=4),
    dict(block_m=128, block_n=128, token_halves=2, stages=4),
]


BLOCK_SPECS = [dict(SPECS[i], lhs_group=128) for i in (0, 3, 4, 6, 7, 8)]
"""For activations with a scale per token and 128 k."""


@pytest.mark.parametrize(
    ("gathered", "name", "shape"),
    [*zip(itertools.cycle([False, True]), itertools.cycle(["e4m3", "s8", "s8-channel"]), SPECS),
     *itertools.product([False], ["e4m3w8-g128", "s8w8-g128"], W8_SPECS),
     *itertools.product([False], ["e4m3", "s8"], BLOCK_SPECS)],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_the_same_bits_as_the_dense_kernel(gathered, name, shape):
    experts, n, k = 37, 200, 1056
    lhs_type, weight = name.partition("w8")[0].partition("-")[0], FORMS[name](experts, n, k)
    g = random.Random(2)
    counts = [g.choice((0, 0, 1, 3, 8, 17, 64, 130, 200)) for _ in range(experts)]
    rows, bias = sum(counts), torch.randn(experts, n, device="cuda")
    fmt = weight.format if weight.format.group_size else replace(weight.format, scale_type="fp32")
    order = torch.randperm(rows, device="cuda") if gathered else torch.arange(rows, device="cuda")
    spec = KernelSpec(lhs_type, fmt, **shape)
    lhs = (builders.block_lhs if spec.lhs_group else builders.lhs)(3, rows, k, lhs_type, device="cuda")
    groups = Groups(offsets_of(counts), torch.argsort(order).int() if gathered else None, 0, rows)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    operands = Gemm(*(each[order] for each in lhs), None, weight, out, bias)._replace(groups=groups)
    GemmLaunch(operands, replace(spec, experts=64)).launch(operands)
    for e, (begin, end) in enumerate(itertools.pairwise(groups.sizes.tolist())):
        if begin < end:
            right = torch.empty(end - begin, n, dtype=torch.bfloat16, device="cuda")
            part = Gemm(*(each[begin:end] for each in lhs), None, weight[e], right, bias[e])
            GemmLaunch(part, spec).launch(part)
            assert same_bits(out[begin:end], right), (e, end - begin)


@pytest.mark.parametrize("max_m, name", builders.third([1, 8, 40, 200], ["e4m3", "e4m3w8-block", "s8w8-block"]))
def test_blocks_of_rows_with_masks(name, max_m):
    experts, n, k = 24, 136, 512
    weight = FORMS[name](experts, n, k)
    x, scale = builders.lhs(3, experts * max_m, k, name.partition("w8")[0], device="cuda")
    g = random.Random(3)
    counts = [g.randint(0, max_m) for _ in range(experts - 2)]
    lhs = x.view(experts, max_m, k), scale.view(experts, max_m)
    masked_m, has_rms = [*counts, -5, max_m + 1000], "w8" in name
    assert_masked_right(lhs, weight, [*counts, 0, max_m], max(1, max_m // 2), masked_m, has_rms)


@pytest.mark.parametrize("experts", [1, 64, 65, 512, 1024])
def test_any_number_of_experts(experts):
    n, k = 64, 256
    weight = FORMS["s8"](experts, n, k)
    counts = [(i * 7) % 4 for i in range(experts)] if experts > 1 else [33]
    lhs = builders.lhs(3, sum(counts), k, "s8", device="cuda")
    out = torch.empty(sum(counts), n, dtype=torch.bfloat16, device="cuda")
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, weight, out, offsets_of(counts))
    right = jitgemm.m_grouped_gemm_w4a8_reference(lhs, weight, offsets_of(counts))
    assert (out.double() - right.double()).abs().max() <= 2**-7 * right.double().abs().max()


def test_a_graph_is_replayed_with_other_routings():
    experts, n, k, rows = 64, 264, 512, 96
    weight, lhs = FORMS["e4m3"](experts, n, k), builders.lhs(3, rows, k, device="cuda")
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device="cuda")
    out = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, weight, out, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, weight, out, offsets)
    for seed in range(4):
        g = random.Random(seed)
        cuts = sorted(g.randint(0, rows) for _ in range(experts - 1))
        if seed == 3:
            cuts = [0] * (experts - 1)
        bounds = [0, *cuts, rows]
        offsets.copy_(torch.tensor(bounds, dtype=torch.int32))
        out.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        counts = [b - a for a, b in zip(bounds, bounds[1:])]
        assert_right(lhs, weight, out, out, counts)
        first = out.clone()
        graph.replay()
        assert same_bits(first, out)
