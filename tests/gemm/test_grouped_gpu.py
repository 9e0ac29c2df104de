"""The grouped kernels on a GPU, weights of 4 and of 8 bits: bits of the dense kernel, the stated bound, guard bands,
graphs with other routings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import builders
import pytest
import torch
from builders import PER_CHANNEL, same_bits, weight_of_experts
from guarded_groups import (
    ROUTINGS,
    assert_bits_of_the_dense_kernel,
    assert_masked_right,
    assert_right,
    assert_routing_right,
    guarded,
    offsets_of,
)
from w8 import BLOCK
from w8 import experts_of as w8_experts

import jitgemm
from jitgemm.dtypes import LHS_TYPES
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm, Groups
from jitgemm.kernel.spec import KernelSpec

pytestmark = pytest.mark.gpu

FORMATS = {
    "e4m3": ("e4m3", dict(group_size=128, codes="e4m3")),
    "s8": ("s8", dict(group_size=128)),
    "s8-channel": ("s8", dict(group_size=PER_CHANNEL)),
}
W8_FORMATS = {
    f"{lhs}w8{name}": (lhs, dict(bits=8, group_size=group))
    for lhs in LHS_TYPES
    for name, group in (("-g128", 128), ("-block", BLOCK))
}


def experts_on_gpu(count, n, k, lhs, options):
    if options.get("bits") == 8:
        return w8_experts(count, n, k, lhs, options["group_size"])
    weight = weight_of_experts(count, n, k, device="cuda", **options)
    if options.get("codes") == "e4m3":
        assert weight.format.order in ("any", "e4m3")
    return weight


def activations(lhs, rows, k, affine=False):
    make = builders.affine_lhs if affine else builders.lhs
    return make(3, rows, k, device="cuda") if affine else make(3, rows, k, lhs, device="cuda")


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
    [*builders.third([False, True], ["e4m3", "s8", "s8-channel"], SPECS),
     *itertools.product([False], ["e4m3w8-g128", "s8w8-g128"], W8_SPECS),
     *itertools.product([False], ["e4m3", "s8"], BLOCK_SPECS)],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_the_same_bits_as_the_dense_kernel(gathered, name, shape):
    experts, n, k = 37, 200, 1056
    lhs_type, options = {**FORMATS, **W8_FORMATS}[name]
    weight = experts_on_gpu(experts, n, k, lhs_type, options)
    g = random.Random(2)
    counts = [g.choice((0, 0, 1, 3, 8, 17, 64, 130, 200)) for _ in range(experts)]
    rows, bias = sum(counts), torch.randn(experts, n, device="cuda")
    fmt = weight.format if weight.format.group_size else replace(weight.format, scale_type="fp32")
    order = torch.randperm(rows, device="cuda") if gathered else None
    spec = KernelSpec(lhs_type, fmt, **shape)
    lhs = (builders.block_lhs if spec.lhs_group else builders.lhs)(3, rows, k, lhs_type, device="cuda")
    assert_bits_of_the_dense_kernel(lhs, weight, spec, counts, bias=bias, order=order)


@pytest.mark.parametrize(
    "name, affine, out_type",
    builders.third(["s8-g64", "s8w8-g128"], [False, True], [torch.bfloat16, torch.float16, torch.float32]),
)
def test_rows_are_gathered(name, affine, out_type):
    experts, n, k, tokens = 30, 264, 704, 19
    options = dict(group_size=64) if name == "s8-g64" else W8_FORMATS[name][1]
    weight = experts_on_gpu(experts, n, k, "s8", options)
    counts = ROUTINGS["skewed"](experts, random.Random(1))
    rows = sum(counts) + 5
    lhs = activations("s8", tokens, k, affine)
    index = torch.randint(0, tokens, (rows,), dtype=torch.int32, device="cuda")
    bias = torch.randn(experts, n, device="cuda").bfloat16()
    out = assert_routing_right(lhs, weight, counts, bias=bias, row_index=index, out_dtype=out_type)
    gathered = tuple(each[index.long()] for each in lhs)
    assert same_bits(out, assert_routing_right(gathered, weight, counts, bias=bias, out_dtype=out_type))


@pytest.mark.parametrize("max_m, name", builders.third([1, 8, 40, 200], ["e4m3", "e4m3w8-block", "s8w8-block"]))
def test_blocks_of_rows_with_masks(name, max_m):
    experts, n, k = 24, 136, 512
    lhs_type, options = {**FORMATS, **W8_FORMATS}[name]
    weight = experts_on_gpu(experts, n, k, lhs_type, options)
    x, scale = activations(lhs_type, experts * max_m, k)
    g = random.Random(3)
    counts = [g.randint(0, max_m) for _ in range(experts - 2)]
    lhs = x.view(experts, max_m, k), scale.view(experts, max_m)
    masked_m, has_rms = [*counts, -5, max_m + 1000], options.get("bits") == 8
    assert_masked_right(lhs, weight, [*counts, 0, max_m], max(1, max_m // 2), masked_m, has_rms)


@pytest.mark.parametrize("experts", [1, 64, 65, 512, 1024])
def test_any_number_of_experts(experts):
    n, k = 64, 256
    weight = experts_on_gpu(experts, n, k, "s8", dict(group_size=128))
    counts = [(i * 7) % 4 for i in range(experts)] if experts > 1 else [33]
    lhs = activations("s8", sum(counts), k)
    out = torch.empty(sum(counts), n, dtype=torch.bfloat16, device="cuda")
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, weight, out, offsets_of(counts))
    right = jitgemm.m_grouped_gemm_w4a8_reference(lhs, weight, offsets_of(counts))
    assert (out.double() - right.double()).abs().max() <= 2**-7 * right.double().abs().max()


def test_sizes_without_sense_stay_inside_of_the_tensors():
    experts, n, k, rows = 16, 136, 512, 100
    weight = experts_on_gpu(experts, n, k, "s8", dict(group_size=128))
    lhs = activations("s8", rows, k)
    g = random.Random(5)
    for kind in ("random", "negative", "huge", "descending", "wide"):
        sizes = [g.randint(-300, 300) for _ in range(experts + 1)]
        if kind == "negative":
            sizes = [-(2**31)] * (experts + 1)
        if kind == "huge":
            sizes = [0, *[2**31 - 1] * experts]
        if kind == "descending":
            sizes = list(range(rows, rows - experts - 1, -1))
        dtype = torch.int64 if kind == "wide" else torch.int32
        if kind == "wide":
            sizes = [g.choice((-(2**62), 0, 50, 2**33, 2**62)) for _ in sizes]
        whole, out = guarded(rows, n)
        kept, before = whole.clone(), out.clone()
        offsets = torch.tensor(sizes, dtype=dtype, device="cuda")
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, weight, out, offsets)
        whole[3 : rows + 3, 16 : n + 16] = before
        assert same_bits(whole, kept)
        assert out.isfinite().all()


def test_a_graph_is_replayed_with_other_routings():
    experts, n, k, rows = 64, 264, 512, 96
    weight = experts_on_gpu(experts, n, k, "e4m3", FORMATS["e4m3"][1])
    lhs = activations("e4m3", rows, k)
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


def test_batch_invariant_rows_do_not_depend_on_others():
    experts, n, k = 16, 264, 2048
    weight = experts_on_gpu(experts, n, k, "e4m3", FORMATS["e4m3"][1])
    one = activations("e4m3", 1, k)
    results = []
    for counts in ([0] * 15 + [1], [3] * 15 + [1], [40] * 15 + [200]):
        rows = sum(counts)
        x, scale = activations("e4m3", rows, k)
        x[-1], scale[-1] = one[0][0], one[1][0]
        out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(
            (x, scale), weight, out, offsets_of(counts), batch_invariant=True
        )
        results.append(out[-1].clone())
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_a_kernel_may_be_asked_for_by_name():
    experts, n, k = 8, 200, 1056
    weight = experts_on_gpu(experts, n, k, "s8", dict(group_size=128))
    lhs = activations("s8", 90, k)
    offsets, label = offsets_of([9, 0, 30, 1, 0, 50, 0, 0]), "s8-g128-bf16-m24n64-k2x{}-s4-e64"
    results = []
    for splits in (1, 2):
        out = torch.empty(90, n, dtype=torch.bfloat16, device="cuda")
        asked = label.format(splits)
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, weight, out, offsets, kernel=asked)
        groups, again = Groups(offsets, None, 0, 90), torch.empty_like(out)
        operands = Gemm(*lhs, None, weight, again, None)
        GemmLaunch(operands._replace(groups=groups), KernelSpec.from_label(asked)).launch(
            operands._replace(groups=groups)
        )
        assert same_bits(out, again)
        results.append(out)
    with pytest.raises(ValueError, match="kernel: expected one that an .* can run, got .*-s40-e64: .* shared memory"):
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(
            lhs, weight, out, offsets, kernel=label.format(1).replace("s4", "s40")
        )
    dense = torch.empty(9, n, dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w4a8_bf16_nt(
        tuple(each[:9] for each in lhs), weight[0], dense, kernel=label.format(2).removesuffix("-e64")
    )
    assert same_bits(results[1][:9], dense)
