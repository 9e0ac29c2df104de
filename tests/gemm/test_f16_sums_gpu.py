"""Sums in f16 on a GPU: every format, shapes of tiles and calls, within the bound and the same bits each time."""

from __future__ import annotations

from functools import partial

import builders
import mxfp4
import pytest
import torch
from builders import weight_of_experts
from codes import rows_of
from f16_values import F16_TIERS, extreme, largest_mx
from guarded_calls import assert_right

import jitgemm
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn import W4A8Experts, W4A8Linear, warmup
from jitgemm.runtime import device as devices
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.gpu

GROUPS = (32, 64, 128, 256)
SHAPES = (
    (1, 4096, 4096),
    (77, 1032, 2336),
    (128, 28672, 4096),
    (500, 520, 1040),
    (1024, 4096, 1056),
    (3000, 264, 14336),
)


def kernels_of(weight: jitgemm.W4Weight, experts: int = 0, out: str = "bf16") -> list[KernelSpec]:
    """The legal kernels with sums in f16."""
    every = legal_kernels("e4m3", weight.format, devices.device_of(0), out, experts=experts, sums="f16")
    return [spec for spec in every if spec.sums == "f16"]


def plain(n: int, k: int, group_size: int, **form) -> builders.WeightParts:
    return builders.weight_parts(1, n, k, group_size, scales="negative", device="cuda", **form)


FORMS = {
    f"g{size} {name}": partial(plain, group_size=size, **form)
    for size in GROUPS
    for name, form in (("e4m3", dict(codes="e4m3")), ("any", {}), ("zero points", dict(zero_point=True)))
} | {f"mxfp4 {tier}": partial(mxfp4.narrow, 1, tier=tier, device="cuda") for tier in F16_TIERS}


def assert_within(out: torch.Tensor, lhs: tuple, weight: jitgemm.W4Weight, bias: torch.Tensor | None = None) -> None:
    rows = torch.arange(0, out.shape[0], max(1, out.shape[0] // 100), device="cuda")
    assert_right(out[rows], rows_of(lhs, rows), weight, bias, has_rms=False)


@pytest.mark.parametrize("name, shape", builders.third(FORMS, SHAPES), ids=str)
def test_a_chosen_kernel_is_within_the_bound(name, shape):
    m, n, k = shape
    weight = FORMS[name](n, k).packed.to("cuda").with_f16_sums()
    bias, out = builders.bias(1, n).cuda(), torch.full((m, n), torch.nan, device="cuda").bfloat16()
    lhs = builders.lhs(2, m, k, outliers=m % 2 > 0, device="cuda")
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out, bias=bias)
    assert_within(out, lhs, weight, bias)
    again = torch.empty_like(out)
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, again, bias=bias)
    assert builders.same_bits(out, again)


WEIGHTS = {
    **{f"g{size}": lambda size=size: extreme(3, 392, 2208, size, "e4m3").packed for size in GROUPS},
    **{f"g{size}z": lambda size=size: extreme(3, 392, 2208, size, zero_point=True).packed for size in GROUPS},
    **{f"mxfp4 {tier}": lambda tier=tier: mxfp4.narrow(3, 392, 2208, tier).packed for tier in F16_TIERS},
}


@pytest.mark.parametrize("kind, out_type", builders.third(WEIGHTS, REAL_TYPES))
def test_some_of_all_kernels_are_within_the_bound(kind, out_type):
    """Scales down to 2^-17 of their row's largest, rows of zeros, runs that end within a tile and a record over."""
    weight = WEIGHTS[kind]().to("cuda").with_f16_sums()
    x, scale = builders.lhs(3, 210, 2208, device="cuda")
    lhs = x, scale / (256 if out_type == "fp16" else 1)  # MXFP4's results would be beyond its largest
    for spec in kernels_of(weight, out=out_type)[::9]:
        out = torch.full((210, 392), torch.nan, device="cuda", dtype=torch_dtype(out_type))
        jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=spec.label)
        assert_within(out, lhs, weight)


@pytest.mark.parametrize("of", [*GROUPS, *F16_TIERS])
def test_the_largest_sums_do_not_overflow(of):
    parts = largest_mx(1, 16, 4096, of) if of in F16_TIERS else builders.weight_parts(1, 256, 4096, of, codes="any")
    if of in GROUPS:
        parts.q.fill_(-8), parts.scale.fill_(1.9921875)
    weight = parts.packed.to("cuda").with_f16_sums()
    lhs = (torch.full((128, 4096), 448.0).to(torch.float8_e4m3fn).cuda(), torch.ones(128, 1, device="cuda"))
    for spec in kernels_of(weight)[::12]:
        out = torch.empty(128, weight.n, device="cuda", dtype=torch.bfloat16)
        jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out, kernel=spec.label)
        assert_within(out, lhs, weight)


@pytest.mark.parametrize("kind", ["linear", "experts"])
@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_layers_add_up_in_f16(kind, mode):
    """Within the bound of the call by hand: in a CUDA graph without a call before, and compiled."""
    if kind == "linear":
        made = W4A8Linear(builders.weight_parts(1, 2048, 2048, 32, codes="e4m3").packed)
        given = (torch.randn(1024, 2048, generator=builders.generator(1)).bfloat16().cuda(),)
    else:
        weights = [weight_of_experts(4, *size, 32, codes="e4m3") for size in ((512, 256), (256, 256))]
        made = W4A8Experts(*weights, top_k=2)
        ids = torch.randint(0, 4, (2048, 2), generator=builders.generator(1), dtype=torch.int32)
        x = torch.randn(2048, 256, generator=builders.generator(1)).bfloat16()
        given = (x.cuda(), ids.cuda(), torch.rand(2048, 2, generator=builders.generator(2)).cuda())
    made = made.cuda()
    usual = made(*given)
    made.sums = "f16"
    warmup(made if kind == "experts" else torch.nn.Sequential(made), 4096)
    expected = made(*given).clone()
    run = torch.compile(made, fullgraph=True) if mode == "compiled" else made
    with torch.no_grad():
        if mode == "graph":
            made.load_state_dict(made.state_dict())
            graph, plain = torch.cuda.CUDAGraph(), builders.weight_parts(1, 64, 256, 32, codes="e4m3").packed.to("cuda")
            with torch.cuda.graph(graph):
                out = made(*given)
                with pytest.raises(ValueError, match="sums: expected to look at scales, got a CUDA graph's capture"):
                    plain.with_f16_sums()
            graph.replay()
        else:
            out = run(*given)
    assert builders.same_bits(out, expected)
    assert not torch.equal(out, usual) and (out - usual).float().norm() < 0.02 * usual.float().norm()
