"""8-bit weights on a GPU: every form within the stated bound, with guard bands; bits that do not change; both ways in
which wgmma gets the weights."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import lru_cache

import builders
from ahead import compile_ahead
import pytest
import torch
from builders import PER_CHANNEL, same_bits
from test_gemm_gpu import OUTPUTS, Guarded, assert_right, device_figures
from test_grouped_gpu import ROUTINGS, guarded, offsets_of
from test_grouped_gpu import activations as grouped_activations
from test_grouped_gpu import assert_right as assert_grouped

import jitgemm
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.gemm.problem import Gemm
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Groups
from jitgemm.gemm.reference import gemm_w4a8_reference
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import GROUP_SIZES, Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.select.choose import choose
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.gpu

GROUPS = (PER_CHANNEL, *GROUP_SIZES)
BLOCK = -1
"""As a group size: a scale per block of 128 x 128."""


@dataclass(frozen=True)
class Case:
    """A problem by what it is drawn from."""

    m: int
    n: int
    k: int
    lhs: str
    group: int = PER_CHANNEL
    scale: str = "fp32"
    bias: str = ""
    affine: bool = False
    out: str = "bf16"
    strided: bool = True
    scales: str = "plain"
    outliers: bool = True

    def __str__(self) -> str:
        rest = [self.bias and f"bias {self.bias}", "affine" * self.affine, self.out, self.scales]
        return "-".join([self.lhs, f"{self.m}x{self.n}x{self.k}", f"g{self.group}", self.scale, *filter(None, rest)])

    @property
    def problem(self) -> Problem:
        group = 128 if self.group == BLOCK else self.group
        group = group if group < self.k else 0
        strips = self.group == BLOCK and group > 0
        format = WeightFormat(group, False, self.scale, self.lhs, code=typed_code(self.lhs), uniform_strip_scale=strips)
        return Problem(self.m, self.n, self.k, self.lhs, format, self.out)

    def operands(self) -> tuple[tuple, jitgemm.W8Weight, torch.Tensor | None]:
        if self.affine:
            lhs = builders.affine_lhs(2, self.m, self.k, device="cuda")
        else:
            lhs = builders.lhs(2, self.m, self.k, self.lhs, outliers=self.outliers, device="cuda")
        if self.strided:
            whole = torch.zeros(self.m, self.k + 48, dtype=torch.uint8, device="cuda").view(lhs[0].dtype)
            lhs = whole[:, 16 : 16 + self.k].copy_(lhs[0]), *lhs[1:]
        bias = {"": None, "bf16": torch.bfloat16, "fp32": torch.float32}[self.bias]
        bias = None if bias is None else builders.bias(3, self.n, bias, "cuda")
        return lhs, weight(self.n, self.k, self.lhs, self.group, self.scale, self.scales), bias

    def run(self) -> None:
        lhs, rhs, bias = self.operands()
        assert rhs.format == self.problem.format
        out = Guarded(self.m, self.n, contiguous=not self.strided, dtype=OUTPUTS[self.out])
        call = jitgemm.gemm_w8a8_bf16_nt if self.out == "bf16" else jitgemm.gemm_w8a8_nt
        call(lhs, rhs, out.out, bias=bias)
        out.check()
        assert_right(out.out, lhs, rhs, bias)


@lru_cache(maxsize=24)
def weight(n: int, k: int, codes: str, group: int = PER_CHANNEL, scale: str = "fp32", scales: str = "plain", seed=1):
    if group == BLOCK:
        parts = builders.weight_parts(seed, n, k, PER_CHANNEL, codes=codes, bits=8, device="cuda")
        block = torch.rand((n + 127) // 128, (k + 127) // 128, device="cuda") * 0.01 + 0.001
        return jitgemm.pack_w8(parts.q, block.to(OUTPUTS[scale]))
    return builders.weight_parts(
        seed, n, k, group, scale_type=scale, scales=scales, codes=codes, bits=8, device="cuda"
    ).packed


def size_cases() -> list[Case]:
    """Sizes at, just below and just above what tiles and records are made of."""
    sizes = builders.third((32, 96, 4128), (1, 7, 63, 64, 65, 129, 1000, 4097), LHS_TYPES, (8, 72, 4104))
    return [
        Case(m, n, k, lhs, (PER_CHANNEL, 128)[number % 2], strided=number % 3 > 0)
        for number, (k, m, lhs, n) in enumerate(sizes)
        if not (m == 4097 and n == 4104 and k == 4128 and lhs == "s8")
    ]


def form_cases() -> list[Case]:
    draw = random.Random(5)
    cases = []
    for group, scale, lhs, m in builders.third((*GROUPS, BLOCK), REAL_TYPES, LHS_TYPES, (1, 17, 130, 600)):
        cases.append(
            Case(
                m,
                8 * draw.randrange(1, 140),
                32 * draw.randrange(1, 80),
                lhs,
                group,
                scale,
                bias=draw.choice(("", "bf16", "fp32")),
                affine=lhs == "s8" and draw.random() < 0.5,
                out=draw.choice(("bf16", "bf16", "fp16", "fp32")),
                strided=draw.random() < 0.7,
                scales="plain" if group == BLOCK else draw.choice(("plain", "negative")),
            )
        )
    return cases


SIZES, FORMS = size_cases(), form_cases()
MODELS = [
    Case(m, n, k, lhs, group)
    for (n, k), lhs, group, m in builders.third(
        ((2112, 7168), (7168, 2048), (4096, 4096)), LHS_TYPES, (PER_CHANNEL, BLOCK),
        (1, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 8192),
    )
    if m < 2048 or n == 4096
]  # fmt: skip
"""DeepSeek's and Llama's layers, from decode to prefill."""


@lru_cache
def sampled(problem: Problem, count: int = 12) -> list[KernelSpec]:
    """Some legal kernels of the problem."""
    legal = legal_kernels(problem.lhs, problem.format, device_figures(), problem.out)
    return [with_k_rules(spec, problem.k) for spec in random.Random(6).sample(legal, count)]


SAMPLED = [
    Problem(m, 328, 4128, lhs, WeightFormat(group, False, "fp32", lhs, code=typed_code(lhs)))
    for lhs, group, m in itertools.product(LHS_TYPES, (PER_CHANNEL, 32, 128, 256), (8, 60, 300))
]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request, own_cache):
    """The cache holds what most cases need."""
    if request.config.getoption("--emulate"):
        return
    figures = device_figures()
    specs = {choose(case.problem, figures) for case in (*SIZES, *FORMS, *MODELS)}
    specs.update(*(sampled(problem) for problem in SAMPLED))
    compile_ahead(request.config, specs)


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_sizes_at_the_edges_of_tiles(case):
    case.run()


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_of_scales_and_output(case):
    case.run()


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_layers_of_models(case):
    case.run()


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_weight_comes_out_exactly(lhs_name, group):
    """The identity as activations picks out each weight: with scales that are powers of two the output is exact."""
    n, k = 256, 544
    q = torch.arange(-128, 128, dtype=torch.int8, device="cuda")[:, None].repeat(1, k)
    if lhs_name == "e4m3":
        q = torch.where((q & 127) == 127, 0, q).view(torch.float8_e4m3fn)
    groups = -(-k // group) if group else 1
    scale = torch.exp2(torch.arange(n * groups, device="cuda") % 8 - 4.0).view(n, groups)
    rhs = jitgemm.pack_w8(q, scale, group_size=group or k)
    out = torch.empty(k, n, device="cuda")
    identity = torch.eye(k, device="cuda").to(builders.LHS_DTYPES[lhs_name])
    jitgemm.gemm_w8a8_nt((identity, torch.ones(1, device="cuda")), rhs, out)
    assert torch.equal(out, rhs.dequantize().T)


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
        for _ in range(3):
            out = Guarded(problem.m, problem.n)
            operands = Gemm(*lhs, None, rhs, out.out, None)
            GemmLaunch(operands, spec).launch(operands)
            out.check()
            outputs.setdefault((spec.split_k, spec.warpgroups_k), []).append(out.out.contiguous())
        assert_right(out.out, lhs, rhs)
    assert max(map(len, outputs.values())) > 3, "no two kernels of one order"
    for first, *rest in outputs.values():
        assert all(same_bits(first, other) for other in rest)


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize("operand", ["multicast_lhs", "multicast_rhs"])
@pytest.mark.parametrize("group", [PER_CHANNEL, 128])
def test_multicast_hands_its_stages_back(group, operand, lhs_name):

    m, n, k = 6 * 64 - 3, 128 * (device_figures().num_sms // 2 + 1) - 24, 33 * 128 - 32
    rhs = weight(n, k, lhs_name, group)
    lhs = builders.lhs(12, m, k, lhs_name, device="cuda")
    plain = KernelSpec(lhs_name, rhs.format, block_m=64, block_n=128, stages=4)
    outputs = []
    for spec in (plain, *[replace(plain, **{operand: 2})] * 6):
        out = Guarded(m, n)
        operands = Gemm(*lhs, None, rhs, out.out, None)
        GemmLaunch(operands, spec).launch(operands)
        out.check()
        outputs.append(out.out.contiguous())
    assert_right(outputs[-1], lhs, rhs)
    assert all(same_bits(outputs[0], other) for other in outputs)


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize("group", [PER_CHANNEL, BLOCK])
def test_batch_invariant_calls(group, lhs_name):
    n, k = 1536, 2112
    rhs = weight(n, k, lhs_name, group)
    lhs = builders.lhs(8, 700, k, lhs_name, device="cuda")
    whole = torch.empty(700, n, dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w8a8_bf16_nt(lhs, rhs, whole, batch_invariant=True)
    for m, first in ((1, 5), (7, 0), (64, 33), (150, 1), (300, 400)):
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        rows = slice(first, first + m)
        jitgemm.gemm_w8a8_bf16_nt((lhs[0][rows], lhs[1][rows]), rhs, out, batch_invariant=True)
        assert same_bits(out, whole[rows]), m


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
def test_a_graph_and_a_compiled_function_give_the_call_s_bits(lhs_name):
    rhs = weight(1000, 1056, lhs_name, BLOCK)
    lhs = builders.lhs(9, 33, 1056, lhs_name, device="cuda")
    out, replayed, compiled = (torch.empty(33, 1000, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    jitgemm.gemm_w8a8_bf16_nt(lhs, rhs, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jitgemm.gemm_w8a8_bf16_nt(lhs, rhs, replayed)
    graph.replay()
    torch.compile(lambda: jitgemm.gemm_w8a8_bf16_nt(lhs, rhs, compiled), fullgraph=True)()
    assert same_bits(replayed, out) and same_bits(compiled, out)


def test_a_kernel_may_be_asked_for_by_name():
    rhs = weight(200, 1056, "e4m3", 128)
    lhs = builders.lhs(9, 33, 1056, "e4m3", device="cuda")
    out = torch.empty(33, 200, dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w8a8_bf16_nt(lhs, rhs, out, kernel="e4m3w8-g128-fp32-m40n64-s4-ss")
    assert_right(out, lhs, rhs)
    with pytest.raises(ValueError, match="kernel: expected one for these operands, such as e4m3w8-g128-"):
        jitgemm.gemm_w8a8_bf16_nt(lhs, rhs, out, kernel="e4m3fast-g128-fp32-m40n64-s4")


def test_packing_and_quantising_give_the_cpu_s_bytes():
    w = torch.randn(2, 264, 416, generator=builders.generator(1))
    for dtype, block in itertools.product(builders.LHS_DTYPES.values(), (None, 128)):
        here, there = jitgemm.quantize_w8(w, dtype, block=block), jitgemm.quantize_w8(w.cuda(), dtype, block=block)
        for name, tensor in here.state_dict().items():
            assert same_bits(tensor, there.state_dict()[name].cpu()), name


# ---- grouped ---------------------------------------------------------------------------------------------------------


def experts_of(count: int, n: int, k: int, lhs: str, group: int) -> jitgemm.W8Weight:
    return jitgemm.W8Weight.stacked(count, lambda e: weight(n, k, lhs, group, seed=e))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize("group", [PER_CHANNEL, 32, BLOCK])
def test_grouped_calls_within_the_bound_for_every_routing(group, lhs_name, routing):
    experts, n, k = 20, 264, 768
    rhs = experts_of(experts, n, k, lhs_name, group)
    counts = ROUTINGS[routing](experts, random.Random(1))
    rows = sum(counts) + 5
    lhs = grouped_activations(lhs_name, rows, k)
    bias = torch.randn(experts, n, device="cuda")
    whole, out = guarded(rows, n)
    kept, before = whole.clone(), out.clone()
    jitgemm.m_grouped_gemm_w8a8_bf16_nt_contiguous(lhs, rhs, out, offsets_of(counts, first=2), bias=bias)
    assert_grouped(lhs, rhs, out, before, counts, first=2, bias=bias)
    whole[3 : rows + 3, 16 : n + 16] = before
    assert same_bits(whole, kept)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("out_type", [torch.bfloat16, torch.float32])
def test_gathered_rows(out_type, affine):
    experts, n, k, tokens = 20, 264, 704, 19
    rhs = experts_of(experts, n, k, "s8", 128)
    counts = ROUTINGS["skewed"](experts, random.Random(1))
    lhs = grouped_activations("s8", tokens, k, affine)
    index = torch.randint(0, tokens, (sum(counts),), dtype=torch.int32, device="cuda")
    whole, out = guarded(sum(counts), n, out_type)
    before = out.clone()
    jitgemm.m_grouped_gemm_w8a8_nt_contiguous(lhs, rhs, out, offsets_of(counts), row_index=index)
    assert_grouped(lhs, rhs, out, before, counts, row_index=index)


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize("max_m", [1, 8, 40, 200])
def test_blocks_of_rows_with_masks(max_m, lhs_name):
    experts, n, k = 12, 136, 512
    rhs = experts_of(experts, n, k, lhs_name, BLOCK)
    x, scale = grouped_activations(lhs_name, experts * max_m, k)
    lhs = x.view(experts, max_m, k), scale.view(experts, max_m)
    counts = [random.Random(e).randint(0, max_m) for e in range(experts)]
    out = torch.full((experts, max_m, n), 3.0, dtype=torch.bfloat16, device="cuda")
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    jitgemm.m_grouped_gemm_w8a8_bf16_nt_masked(lhs, rhs, out, masked_m, max(1, max_m // 2))
    for e, count in enumerate(counts):
        assert bool((out[e, count:] == 3).all())
        if count:
            assert_right(out[e, :count], (lhs[0][e, :count], lhs[1][e, :count]), rhs[e])


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        dict(block_m=8, block_n=64, stages=6, warpgroups_k=2, split_k=2),
        dict(block_m=16, block_n=256, stages=4),
        dict(block_m=24, block_n=64, stages=4, warpgroups_k=2, reduce_scatter=True, ctas_per_sm=2),
        dict(block_m=64, block_n=128, stages=4),
        dict(block_m=128, block_n=128, token_halves=2, stages=4),
    ],
    ids=lambda shape: "-".join(f"{k}{v}" for k, v in shape.items()),
)
def test_grouped_kernels_give_the_dense_kernel_s_bits(shape, lhs_name):

    experts, n, k = 20, 200, 1056
    rhs = experts_of(experts, n, k, lhs_name, 128)
    counts = [random.Random(e).choice((0, 0, 1, 3, 8, 17, 64, 130, 200)) for e in range(experts)]
    lhs = grouped_activations(lhs_name, sum(counts), k)
    spec = KernelSpec(lhs_name, rhs.format, **shape)
    out = torch.empty(sum(counts), n, dtype=torch.bfloat16, device="cuda")
    operands, groups = Gemm(*lhs, None, rhs, out, None), Groups(offsets_of(counts), None, 0, sum(counts))
    GemmLaunch(operands._replace(groups=groups), replace(spec, experts=64)).launch(operands._replace(groups=groups))
    end = 0
    for e, count in enumerate(counts):
        begin, end = end, end + count
        if count:
            right = torch.empty(count, n, dtype=torch.bfloat16, device="cuda")
            part = Gemm(lhs[0][begin:end], lhs[1][begin:end], None, rhs[e], right, None)
            GemmLaunch(part, spec).launch(part)
            assert same_bits(out[begin:end], right), (e, count)


def test_the_gpu_gives_what_the_cpu_reference_gives():
    rhs, lhs = weight(200, 1056, "s8", BLOCK), builders.lhs(9, 33, 1056, "s8", device="cuda")
    out = torch.empty(33, 200, dtype=torch.float32, device="cuda")
    jitgemm.gemm_w8a8_nt(lhs, rhs, out)
    ref = gemm_w4a8_reference(tuple(x.cpu() for x in lhs), rhs.to("cpu"), out_dtype=torch.float64)
    assert torch.allclose(out.cpu().double(), ref, rtol=1e-5, atol=1e-5 * float(ref.abs().max()))
