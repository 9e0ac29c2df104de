"""Activations with a scale per token and 128 k on a GPU: the stated bound, bits of the per-token kernel, all
strides."""

from __future__ import annotations

import random
from dataclasses import replace

import builders
import pytest
import torch
from builders import PER_CHANNEL, same_bits, weight_of_experts
from guarded_calls import Guarded, assert_right
from guarded_groups import assert_right as assert_groups_right
from guarded_groups import offsets_of

import jitgemm
from jitgemm.dtypes import LHS_TYPES
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm, Groups, fp32_scales
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.devices import device_spec
from jitgemm.select.legal import illegal, legal_kernels
from jitgemm.select.ranked import candidates
from jitgemm.tensors import TYPE_NAMES

pytestmark = pytest.mark.gpu

FORMATS = {
    "g128-e4m3": ("e4m3", dict(group_size=128, codes="e4m3")),
    "g128-s8": ("s8", dict(group_size=128, codes="s8")),
    "g32z": ("e4m3", dict(group_size=32, zero_point=True)),
    "g64o": ("s8", dict(group_size=64, offset=True)),
    "g256-fp32": ("e4m3", dict(group_size=256, scale_type="fp32")),
    "channel": ("e4m3", dict(group_size=PER_CHANNEL)),
    "channel-z": ("s8", dict(group_size=PER_CHANNEL, zero_point=True, scale_type="fp16")),
}
"""Type of activations and form of weights."""


def run(plan_of, operands) -> torch.Tensor:
    """Three launches, of which all give the same bits."""
    results = []
    for _ in range(3):
        operands.out.fill_(float("nan"))
        plan_of.launch(operands)
        results.append(operands.out.clone())
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
    return results[0]


def test_a_kernel_for_strips_that_share_scales_is_kept_from_others():
    """By the plan of a call with the one, which the other must not find: both weights have the same shapes."""
    m, n, k = 130, 136, 256
    strips = builders.weight_parts(
        1, n, k, codes="e4m3", bits=8, scale_type="fp32", uniform_strip_scale=True, device="cuda"
    )
    rows = replace(strips, scale=strips.scale * torch.linspace(1, 8, n, device="cuda")[:, None]).packed
    every = legal_kernels("e4m3", strips.packed.format, device_spec("h200"), lhs_group=128)
    label = next(spec.label for spec in every if spec.tokens_as_m)
    lhs, out = builders.block_lhs(2, m, k, device="cuda"), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w8a8_bf16_nt(lhs, strips.packed, out, kernel=label)
    assert_right(out, lhs, strips.packed, has_rms=False)
    with pytest.raises(ValueError, match="kernel: expected one for weights whose strips do not share scales"):
        jitgemm.gemm_w8a8_bf16_nt(lhs, rows, out, kernel=label)


WAYS = [
    {"split_k": 1, "warpgroups_k": 4}, {"split_k": 4, "warpgroups_k": 2}, {"split_k": 6, "warpgroups_k": 1},
    {"reduce_scatter": True, "warpgroups_k": 2, "split_k": 2}, {"reduce_scatter": True, "split_k": 3}, {"block_n": 256},
    {"multicast_lhs": 2, "token_halves": 2}, {"token_halves": 2, "multicast_lhs": 1},
    {"block_m": 16, "ctas_per_sm": 2}, {"block_m": 24}, {"block_m": 48}, {"block_m": 112}, {"block_m": 160},
]  # fmt: skip


@pytest.mark.parametrize("m, k", [(1, 1056), (13, 8192), (40, 1056), (64, 8192)])
def test_consumers_copy_the_first_scales(m, k):
    n = 264
    weight = builders.weight_parts(1, n, k, device="cuda").packed
    problem = Problem(m, n, k, "e4m3", weight.format, lhs_group=128)
    direct = [
        c.kernel
        for c in candidates(problem, device_spec("h200"))
        if c.kernel.consumers_copy_lhs or c.kernel.block_m <= 16
    ]
    lhs = builders.block_lhs(2, m, k, device="cuda")
    for spec in [*direct[:2], *[spec for spec in direct if spec.warpgroups_n > 1][:1]]:
        operands = Gemm(*lhs, None, weight, torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), None)
        assert_right(run(GemmLaunch(operands, spec), operands), lhs, weight, has_rms=False)


# ---- powers of two ---------------------------------------------------------------------------------------------------


def of_every_kind(m: int, k: int, column_major: bool) -> torch.Tensor:
    """Packed exponents of which one token's are 2^-127, and another's NaN; else as `builders.e8m0_lhs`."""
    words = builders.e8m0_lhs(2, m, k, column_major=column_major, device="cuda")[1]
    words[m // 2] = 0
    words[-1] = -1
    return words


@pytest.mark.parametrize("name, way", builders.third(FORMATS, WAYS), ids=str)
def test_every_way_through_the_kernel_and_packed_exponents_with_the_bits_of_fp32_scales(name, way):
    m, n, k = 213, 456, 2064
    lhs_type, form = FORMATS[name]
    weight = builders.weight_parts(1, n, k, **form, device="cuda").packed
    found = [
        spec for spec in legal_kernels(lhs_type, weight.format, device_spec("h200"), lhs_group=128)
        if all(getattr(spec, field) == value for field, value in way.items())
    ]  # fmt: skip
    assert found or name == "g64o"  # offsets take more registers than some tiles leave
    x = builders.lhs(2, m, k, lhs_type, device="cuda")[0]
    for spec in random.Random(1).sample(found, min(1, len(found))):
        words = of_every_kind(m, k, column_major=WAYS.index(way) % 2 == 0)
        results = []
        for x_scale, kernel in ((fp32_scales(words, k), spec), (words, replace(spec, lhs_e8m0=True))):
            out = torch.empty(m, n, device="cuda").bfloat16()
            operands = Gemm(x, x_scale, None, weight, out, None)
            results.append(run(GemmLaunch(operands, kernel), operands))
        assert same_bits(*(result[:-1] for result in results)), spec.label
        assert_right(results[0][:-1], (x[:-1], words[:-1]), weight, has_rms=False)
        assert bool(results[1][-1].isnan().all() and results[1][:-1].isfinite().all())


# ---- weights in blocks -----------------------------------------------------------------------------------------------


TOKEN_ROWS = [
    dict(block_m=64, block_n=256), dict(block_m=64, block_n=192), dict(block_m=128, block_n=128),
    dict(block_m=128, block_n=128, multicast_lhs=2), dict(block_m=128, block_n=192),
    dict(block_m=128, block_n=192, multicast_lhs=2), dict(block_m=192, block_n=128), dict(block_m=128, block_n=64),
    dict(block_m=256, block_n=128, token_halves=2),
]  # fmt: skip
"""Tiles with tokens as wgmma's rows."""


@pytest.mark.parametrize(
    "shape, out, scales, lhs_type",
    builders.third(TOKEN_ROWS, [torch.bfloat16, torch.float16, torch.float32], ["fp32", "bf16", "e8m0"], LHS_TYPES)[
        ::2
    ],
    ids=str,
)
def test_tokens_as_rows_give_the_bits_of_weights_as_rows(lhs_type, scales, out, shape):
    m, n, k = 213, 456, 1184
    scale_type = "bf16" if scales == "bf16" else "fp32"
    form = dict(codes=lhs_type, bits=8, scale_type=scale_type, uniform_strip_scale=True)
    weight = builders.weight_parts(1, n, k, scales="negative", **form, device="cuda").packed
    e8m0 = scales == "e8m0"
    x, x_scale = builders.block_lhs(2, m, k, lhs_type, column_major=True, device="cuda")
    if e8m0:
        x_scale = of_every_kind(m, k, column_major=True)
    bias = builders.bias(3, n, device="cuda")
    spec = KernelSpec(
        lhs_type, weight.format.kernel_format, stages=3, tokens_as_m=True, lhs_group=128, lhs_e8m0=e8m0,
        out=TYPE_NAMES[out], **shape,
    )  # fmt: skip
    assert illegal(spec, device_spec("h200")) is None
    results = []
    for kernel in (
        spec,
        replace(spec, block_m=64, block_n=64, token_halves=1, multicast_lhs=1, tokens_as_m=False),
    ):
        guarded = Guarded(m, n, dtype=out)
        operands = Gemm(x, x_scale, None, weight, guarded.out, bias)
        results.append(run(GemmLaunch(operands, kernel), operands))
        guarded.check()
    assert same_bits(*(result[:-1] for result in results)) if e8m0 else same_bits(*results)
    if e8m0:
        assert bool(results[0][-1].isnan().all() and results[0][:-1].isfinite().all())
    else:
        assert_right(results[0], (x, x_scale), weight, bias, has_rms=False)


@pytest.mark.parametrize(
    "lhs_type, sizes, m", builders.third(LHS_TYPES, [(136, 1040), (2112, 7168)], [1, 16, 40, 63, 700, 1001])
)
def test_weights_in_blocks_are_within_the_bound(lhs_type, sizes, m):
    """Scales of even m row by row, which the L1 has from the k-block before, of odd m column by column."""
    n, k = sizes
    parts = builders.weight_parts(1, n, k, PER_CHANNEL, codes=lhs_type, bits=8, device="cuda")
    weight = jitgemm.pack_w8(parts.q, torch.rand(-(-n // 128), -(-k // 128), device="cuda") * 0.01 + 0.001)
    lhs = builders.block_lhs(2, m, k, lhs_type, column_major=m % 2 == 1, device="cuda")
    out, bias = Guarded(m, n), builders.bias(3, n, device="cuda")
    jitgemm.gemm_w8a8_bf16_nt(lhs, weight, out.out, bias=bias)
    out.check()
    assert_right(out.out, lhs, weight, bias, has_rms=False)


def launch_groups_of_token_rows(lhs_type, gathered, shape, n, k, counts, launches=1):
    """Launches with scales row by row: alike to the bit, and right."""
    experts = len(counts)
    q = torch.stack([builders.weight_parts(e, n, k, codes=lhs_type, bits=8).q for e in range(experts)]).cuda()
    weight = jitgemm.pack_w8(q, torch.rand(experts, -(-n // 128), -(-k // 128), device="cuda") + 0.5)
    rows, first = sum(counts), 2
    lhs = builders.block_lhs(2, rows + first, k, lhs_type, device="cuda")
    index = torch.randint(0, rows, (rows + first,), generator=builders.generator(4), dtype=torch.int32).cuda()
    bias = torch.stack([builders.bias(e, n) for e in range(experts)]).cuda()
    spec = KernelSpec(
        lhs_type, weight.format.kernel_format, stages=3, tokens_as_m=True, lhs_group=128, experts=64, **shape
    )
    assert illegal(spec, device_spec("h200")) is None
    before = torch.full((rows + first + 3, n), 3.0, dtype=torch.bfloat16, device="cuda")
    groups = Groups(offsets_of(counts, first), index if gathered else None, 0, rows)
    results = []
    for _ in range(launches):
        results.append(before.clone())
        operands = Gemm(*lhs, None, weight, results[-1], bias)
        GemmLaunch(operands._replace(groups=groups), spec).launch(operands._replace(groups=groups))
    assert all(same_bits(results[0], each) for each in results)
    assert_groups_right(lhs, weight, results[0], before, counts, first, bias, index if gathered else None)


@pytest.mark.parametrize("shape, gathered, lhs_type", builders.third(TOKEN_ROWS, [False, True], LHS_TYPES), ids=str)
def test_groups_of_tokens_as_rows(lhs_type, gathered, shape):
    counts = [0, 1, 16, 17, 30, 48, 64, 80, 100, 128, 150, 200]
    launch_groups_of_token_rows(lhs_type, gathered, shape, 200, 672, counts)


@pytest.mark.parametrize("shape", [TOKEN_ROWS[i] for i in (2, 4, 6, 8)], ids=str)
@pytest.mark.parametrize("lhs_type, gathered", list(zip(LHS_TYPES, [False, True])))
def test_large_groups_of_tokens_as_rows(request, lhs_type, gathered, shape):
    """More tiles than SMs, and so many blocks of k that all stages are used often. The emulator takes less."""
    if request.config.getoption("--emulate"):
        sizes = 200, 1184, [130, 0, 260]
    else:
        sizes = 2112, 7168, [700, 0, 1, 384, 130, 1000]
    launch_groups_of_token_rows(lhs_type, gathered, shape, *sizes, launches=3)


@pytest.mark.parametrize("m, k, bits", builders.third([1, 16, 63, 700], [128, 416, 528, 4128], [4, 8]))
def test_every_form_of_exponents_is_within_the_bound(m, k, bits):
    n = 264
    weight = builders.weight_parts(1, n, k, codes="e4m3", bits=bits, device="cuda").packed
    gemm = jitgemm.gemm_w4a8_bf16_nt if bits == 4 else jitgemm.gemm_w8a8_bf16_nt
    x, words = builders.e8m0_lhs(2, m, k, column_major=True, device="cuda")
    rows = builders.e8m0_lhs(2, m, k, device="cuda")[1]
    exponents = rows.view(torch.float8_e8m0fnu)[:, : -(-k // 128)]
    results = []
    for x_scale in (words, rows, exponents, exponents.contiguous()):
        out = Guarded(m, n)
        gemm((x, x_scale), weight, out.out)
        out.check()
        results.append(out.out)
        assert same_bits(out.out, results[0])
    assert_right(results[0], (x, words), weight, has_rms=False)


# ---- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "columns", "columns of each expert"])
@pytest.mark.parametrize("max_m, make", [(1, builders.block_lhs), (40, builders.e8m0_lhs), (200, builders.block_lhs)])
def test_masked_groups(max_m, make, layout):
    experts, n, k = 24, 136, 1056
    weight = weight_of_experts(experts, n, k, device="cuda", group_size=128)
    x, x_scale = make(1, experts * max_m, k, device="cuda")
    x, x_scale = x.view(experts, max_m, k), x_scale.view(experts, max_m, -1)
    if layout == "columns":
        x_scale = x_scale.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    elif layout == "columns of each expert":
        x_scale = x_scale.transpose(1, 2).contiguous().transpose(1, 2)
    draw = random.Random(3)
    counts = [draw.randint(0, max_m) for _ in range(experts)]
    out = torch.full((experts, max_m, n), 3.0, dtype=torch.bfloat16, device="cuda")
    masked_m = torch.tensor([*counts[:-2], -5, max_m + 1000], dtype=torch.int32, device="cuda")
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_masked((x, x_scale), weight, out, masked_m, max(1, max_m // 2))
    for e, count in enumerate([*counts[:-2], 0, max_m]):
        assert bool((out[e, count:] == 3).all())
        if count:
            assert_right(out[e, :count], (x[e, :count], x_scale[e, :count]), weight[e], has_rms=False)


def test_long_int8_rows_per_channel():
    """Sums that one int32 would not hold, of the largest codes and values."""
    n, k = 64, 2**20 + 128
    q = torch.full((n, k), -8, dtype=torch.int8, device="cuda")
    weight = jitgemm.pack_w4(q, torch.ones(n, 1, device="cuda"), group_size=k)
    assert weight.format == WeightFormat(0, False, "fp32")
    lhs = torch.full((3, k), -128, dtype=torch.int8, device="cuda"), torch.ones(3, k // 128, device="cuda")
    out = torch.empty(3, n, device="cuda")
    jitgemm.gemm_w4a8_nt(lhs, weight, out)
    assert_right(out, lhs, weight, has_rms=False)
