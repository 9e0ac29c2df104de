"""8-bit weights on a GPU: every form within the stated bound, with guard bands; bits that do not change; both ways in
which wgmma gets the weights."""

from __future__ import annotations

import random
from functools import lru_cache

import builders
import pytest
import torch
from ahead import compile_ahead
from builders import PER_CHANNEL, same_bits
from guarded_calls import Case, assert_right, device_figures, launched
from w8 import BLOCK, weight

import jitgemm
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import GROUP_SIZES, Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.select.choose import choose
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.gpu

GROUPS = (PER_CHANNEL, *GROUP_SIZES)


def form_cases() -> list[Case]:
    draw = random.Random(5)
    cases = []
    for group, scale, lhs, m in builders.third((*GROUPS, BLOCK), REAL_TYPES, LHS_TYPES, (1, 17, 130, 600)):
        drawn = {"bias": draw.choice(("none", "bf16", "fp32")), "affine": lhs == "s8" and draw.random() < 0.5}
        drawn |= {"out": draw.choice(("bf16", "bf16", "fp16", "fp32")), "strided": draw.random() < 0.7}
        drawn |= {"scales": "plain" if group == BLOCK else draw.choice(("plain", "negative"))}
        n, k = 8 * draw.randrange(1, 140), 16 * draw.randrange(1, 160)
        cases.append(Case(m, n, k, lhs, (group, False, scale), bits=8, **drawn))
    return cases


FORMS = form_cases()
MODELS = [
    Case(m, n, k, lhs, (group, False, "fp32"), bits=8)
    for (n, k), lhs, group, m in builders.third(
        ((2112, 7168), (7168, 2048), (4096, 4096)), LHS_TYPES, (PER_CHANNEL, BLOCK),
        (1, 16, 64, 256, 1024, 8192),
    )
    if m < 2048 or n == 4096
]  # fmt: skip
"""DeepSeek's and Llama's layers, from decode to prefill."""


@lru_cache
def sampled(problem: Problem, count: int = 8) -> list[KernelSpec]:
    """Some legal kernels of the problem."""
    legal = legal_kernels(problem.lhs, problem.format, device_figures(), problem.out)
    return [with_k_rules(spec, problem.k) for spec in random.Random(6).sample(legal, count)]


SAMPLED = [
    Problem(m, 328, 4128, lhs, WeightFormat(group, False, "fp32", lhs, code=typed_code(lhs)))
    for lhs, group, m in builders.third(LHS_TYPES, (PER_CHANNEL, 32, 128, 256), (8, 60, 300))
]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request, own_cache):
    """The cache holds what most cases need."""
    if request.config.getoption("--emulate"):
        return
    figures = device_figures()
    specs = {choose(case.problem, figures) for case in (*FORMS, *MODELS)}
    specs.update(*(sampled(problem) for problem in SAMPLED))
    compile_ahead(request.config, specs)


@pytest.mark.parametrize("case", [*FORMS, *MODELS], ids=str)
def test_a_call_is_within_the_bound(case):
    case.run()


@pytest.mark.parametrize("m", [1, 100])
@pytest.mark.parametrize("k", [131056, 16384])
def test_the_largest_sums_of_int8_per_channel(k, m):
    """k products of 128 * 128 just stay in int32."""
    q = torch.full((64, k), -128, dtype=torch.int8, device="cuda")
    q[1] = 127
    rhs = jitgemm.pack_w8(q, torch.ones(1, device="cuda"))
    out = torch.empty(m, 64, device="cuda")
    jitgemm.gemm_w8a8_nt(
        (torch.full((m, k), -128, dtype=torch.int8, device="cuda"), torch.ones(1, device="cuda")), rhs, out
    )
    assert bool((out[:, 0] == 128 * 128 * k).all()) and bool((out[:, 2:] == 128 * 128 * k).all())
    assert torch.equal(out[:, 1], torch.full((m,), -128 * 127 * k, device="cuda").float())


@pytest.mark.parametrize("problem", SAMPLED, ids=lambda p: f"{p.m}-{p.format.name}")
def test_kernels_of_one_order_of_summation_give_the_same_bits(problem):
    """All right, and those that sum k in one order alike to the bit."""
    rhs = weight(problem.n, problem.k, problem.lhs, problem.format.group_size, seed=6)
    lhs = builders.lhs(7, problem.m, problem.k, problem.lhs, device="cuda")
    outputs: dict[tuple[int, int], list[torch.Tensor]] = {}
    for spec in sampled(problem):
        found = [launched(spec, lhs, rhs) for _ in range(3)]
        outputs.setdefault((spec.split_k, spec.warpgroups_k), []).extend(found)
        assert_right(found[-1], lhs, rhs)
    assert max(map(len, outputs.values())) > 3, "no two kernels of one order"
    for first, *rest in outputs.values():
        assert all(same_bits(first, other) for other in rest)
