"""Every form of weights on a GPU: within the bound, dense, grouped and masked, the same bits in a batch and in a graph, the
bytes that the CPU packs. Of MXFP4, NVFP4 and two levels, every product of a code, a scale and an activation, too."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from functools import partial

import builders
import edges
import mxfp4
import nvfp4
import pytest
import torch
from ahead import compile_ahead
from builders import same_bits
from codes import FORMS, KINDS, MODES, PRODUCTS, TIERS, form_and_scheme, forms, kinds, one_hot, rows_of
from expert_layers_gpu import assert_layer
from guarded_calls import OUTPUTS, Guarded, assert_right, device_figures
from guarded_groups import ROUTINGS, assert_masked_right, assert_routing_right
from moe_cases import Case
from same_weights import same_weight
from tensor_core import OfEmulator, TensorCore

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.formats import Problem
from jitgemm.select.choose import choose
from jitgemm.select.legal import legal_kernels
from jitgemm.weight.packed import Weight

pytestmark = pytest.mark.gpu


# ---- cases -----------------------------------------------------------------------------------------------------------

CASES = [
    (m, n, k, number % 3, number % 2 > 0, ("bf16", "fp32")[number // 3 % 2])
    for number, (m, n, k) in enumerate(
        builders.third((1, 7, 16, 33, 64, 100, 130, 257, 1000), (8, 72, 520, 4104), (32, 144, 496, 1056, 4128))
    )
]
WITHIN = [(name, case) for at, name in enumerate(FORMS) for case in CASES[at % 5 :: 5]]


def problems() -> Iterator[Problem]:
    """Of most calls below."""
    for name, (m, n, k, scheme, _, out) in WITHIN:
        yield FORMS[name].problem(m, n, k, FORMS[name].schemes[scheme], out=out)
    for at, kind in enumerate(FORMS.values()):
        scheme = kind.schemes[at % 3]
        yield from (kind.problem(m, 520, 1056, scheme, batch_invariant=True) for m in (1, 7, 48, 64, 150, 300))
        yield kind.problem((1, 33, 300)[at % 3], 520, 1056, scheme)
        yield from (kind.problem(m, 72, 16, scheme) for m in (1, 33, 257) if kind is not FORMS["far"])


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request, own_cache):
    """The cache holds what these calls need."""
    if not request.config.getoption("--emulate"):
        compile_ahead(request.config, {choose(problem, device_figures()) for problem in problems()})


# ---- packing ---------------------------------------------------------------------------------------------------------

ALL_SCALES = {**{name: kind.parts for name, kind in FORMS.items()}, "any scales": partial(nvfp4.parts, low=0, high=127)}
ORDERS = dict.fromkeys(mxfp4.TIERS, "e2m1") | {
    "near": "near",
    "far": "nvfp4",
    "any scales": "nvfp4",
    "two levels": "two_level",
}


@pytest.mark.parametrize("kind", ALL_SCALES)
@pytest.mark.parametrize("experts", [None, 3])
def test_the_gpu_packs_the_same_bytes(kind, experts, n=4104, k=1040):
    on_cpu, on_gpu = (ALL_SCALES[kind](1, n, k, experts=experts, device=device).packed for device in ("cpu", "cuda"))
    assert on_gpu.format == on_cpu.format and on_gpu.blocks.is_cuda
    assert on_gpu.format.order == ORDERS.get(kind, on_gpu.format.order)
    assert torch.equal(on_cpu.blocks, on_gpu.blocks.cpu())
    if kind == "two levels":
        assert torch.equal(on_cpu.row_sum, on_gpu.row_sum.cpu())
    found, expected = on_gpu.unpack(), on_cpu.unpack()
    for there, here in (*zip(found, expected), (found.row_scale, expected.row_scale)):
        assert there is here is None or torch.equal(there.view(torch.uint8).cpu(), here.view(torch.uint8))


@forms
def test_it_moves_to_a_gpu_and_back(kind):
    weight = kind.parts(1, 200, 528).packed
    gpu = weight.to("cuda")
    assert gpu.device == torch.device("cuda", torch.cuda.current_device()) and gpu.ready and gpu.to("cuda") is gpu
    assert same_weight(gpu.to("cpu"), weight)
    others = [copy.deepcopy(gpu), pickle.loads(pickle.dumps(gpu))]
    others += [] if weight.sums == "f16" else [Weight.from_state_dict(gpu.state_dict())]
    for other in others:
        assert other.device == gpu.device and other.ready and same_weight(other.to("cpu"), weight)


@pytest.mark.parametrize("name, m", builders.two_thirds(edges.EDGES, [1, 9, 64, 700]))
def test_scales_of_zero_subnormals_and_the_largest(name, m):
    make, lhs_type, scheme = edges.EDGES[name]
    parts, lhs = make("cuda"), edges.lhs_of(lhs_type, scheme, m, device="cuda")
    out = torch.full((m, edges.N), torch.nan, device="cuda")
    edges.call_of(parts.packed)(lhs, parts.packed, out)
    edges.assert_near(out, lhs, parts, gemm_w4a8_bound(lhs, parts.packed, out_dtype=torch.float32)[1])


# ---- every product ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, "8 bits for e4m3", "8 bits for s8"])
@pytest.mark.parametrize("m", [1, 17, 64, 480, 4096])
def test_every_code_with_every_scale(m, name):
    """One product a result, over all kinds of tiles: of e4m3s, subnormals included, or of what several wgmmas make of
    it."""
    parts = PRODUCTS[name]("cuda")
    weight, exact = parts.packed, parts.dequantize_fp64()
    for columns in torch.arange(weight.k, device="cuda").split(m)[:: 37 if name == "two levels" and m <= 64 else 1]:
        out = torch.full((len(columns), weight.n), torch.nan, device="cuda")
        edges.call_of(weight)(one_hot(name, columns, weight.k), weight, out)
        assert torch.equal(out.T.double(), exact[:, columns]), columns[0]


@pytest.mark.parametrize("name", [*mxfp4.TIERS, "near", "far"])
def test_every_code_with_every_scale_and_every_activation(name):
    """A product of seven or eight bits a term: the tensor cores cut off none of the ten of both."""
    parts = PRODUCTS[name]("cuda")
    weight, exact, k = parts.packed, parts.dequantize_fp64(), parts.codes.shape[1]
    finite = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    for values in finite.split(2**26 // k**2):
        x = torch.zeros(len(values), k, k, dtype=torch.uint8, device="cuda")
        x.diagonal(dim1=1, dim2=2).copy_(values[:, None].expand(-1, k))
        x = x.view(-1, k).view(torch.float8_e4m3fn)
        out = torch.full((len(x), weight.n), torch.nan, device="cuda")
        jitgemm.gemm_w4a8_nt((x, torch.ones(len(x), device="cuda")), weight, out)
        expected = values.view(torch.float8_e4m3fn).double()[:, None, None] * exact.T
        assert torch.equal(out.double().view(len(values), k, weight.n), expected)


# ---- extremes --------------------------------------------------------------------------------------------------------


def test_sums_of_the_largest_integers_of_two_levels_stay_in_int32():
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


@pytest.mark.parametrize("tile", ["m16n256-s6", "m128n128-s6", "m128hn128-s6", "m176n128-s4"])
@pytest.mark.parametrize("k", [416, 1312])
def test_runs_of_256_k_have_the_bits_of_the_arithmetic(tile, k):
    label = f"e4m3mx-channel-tofp32-{tile}"
    weight, lhs = mxfp4.parts(4, 392, k, device="cuda").packed, builders.lhs(1, 200, k, "e4m3", device="cuda")
    out = torch.empty(200, 392, device="cuda")
    jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=label)
    core = TensorCore() if torch.cuda.is_available() else OfEmulator()
    assert torch.equal(out, core.mxfp4_gemm(lhs, weight, 256))
    assert not torch.equal(out, core.mxfp4_gemm(lhs, weight, 128))


# ---- dense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), WITHIN, ids=str)
def test_within_the_bound(name, case):
    kind, (m, n, k, scheme, bias, out) = FORMS[name], case
    weight = kind.parts(4, n, k, device="cuda").packed
    lhs = kind.lhs_for(weight, kind.schemes[scheme], 2, m)
    guard = Guarded(m, n, contiguous=bias, dtype=OUTPUTS[out])
    row = builders.bias(3, n, torch.float32, "cuda") if bias else None
    kind.gemm(lhs, weight, guard.out, bias=row)
    guard.check()
    assert_right(guard.out, lhs, weight, row, has_rms=False)


@form_and_scheme
def test_k_of_sixteen(kind, scheme):
    k = 48 if kind is FORMS["far"] else 16  # one scale a row is not far from another
    weight = kind.parts(4, 72, k, device="cuda").packed
    for m in (1, 33, 257):
        lhs, guard = kind.lhs_for(weight, kind.schemes[scheme], 2, m), Guarded(m, 72)
        kind.gemm(lhs, weight, guard.out)
        guard.check()
        assert_right(guard.out, lhs, weight, has_rms=False)


@form_and_scheme
def test_a_row_has_the_same_bits_in_calls_of_every_size_and_in_every_place(kind, scheme):
    weight = kind.parts(4, 520, 1056, device="cuda").packed
    lhs = kind.lhs_for(weight, kind.schemes[scheme], 2, 300)
    whole = torch.empty(300, 520, dtype=torch.bfloat16, device="cuda")
    kind.gemm(lhs, weight, whole, batch_invariant=True)
    assert_right(whole, lhs, weight, has_rms=False)
    shuffled = torch.randperm(300, generator=builders.generator(1)).cuda()
    for rows in (slice(5, 6), slice(7), slice(33, 81), slice(150, 300), shuffled, shuffled[:64]):
        part = rows_of(lhs, rows)
        out = torch.empty(len(part[0]), 520, dtype=torch.bfloat16, device="cuda")
        kind.gemm(part, weight, out, batch_invariant=True)
        assert same_bits(out, whole[rows]), rows


@kinds
@pytest.mark.parametrize("scheme", ["token", "block"])
def test_every_shape_of_kernel(scheme, kind):
    """One of every few legal kernels, whatever the selector takes."""
    weight = kind.parts(4, 392, 1056, device="cuda").packed
    specs = legal_kernels(kind.lhs, weight.format, device_figures(), lhs_group=128 if scheme == "block" else 0)
    for spec in random.Random(1).sample(specs, 7):
        lhs = kind.lhs_of(scheme, 2, spec.block_m + 3, 1056, "cuda")
        guard = Guarded(spec.block_m + 3, 392)
        jitgemm.gemm_w4a8_nt(lhs, weight, guard.out, kernel=spec.label)
        guard.check()
        assert_right(guard.out, lhs, weight, has_rms=False)


@form_and_scheme
def test_a_graph_replays_with_what_its_inputs_hold_now(kind, scheme):
    m = (1, 33, 300)[scheme]
    weight = kind.parts(4, 520, 1056, device="cuda").packed
    lhs, guard = kind.lhs_for(weight, kind.schemes[scheme], 2, m), Guarded(m, 520)
    kind.gemm(lhs, weight, guard.out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            kind.gemm(lhs, weight, guard.out)
    for seed in (41, 42):
        for tensor, value in zip(lhs, kind.lhs_for(weight, kind.schemes[scheme], seed, m)):
            tensor.copy_(value)
        guard.out.fill_(float("nan"))
        graph.replay()
        guard.check()
        assert_right(guard.out, lhs, weight, has_rms=False)


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "routing", "at"),
    [
        pytest.param(FORMS[name], routing, at, id=f"{name}-{routing}")
        for at, (name, routing) in enumerate(builders.two_thirds(FORMS, ROUTINGS))
    ],
)
def test_grouped_within_the_bound(kind, routing, at):
    gathered, scheme = at % 2 > 0, at % 3
    experts, n, k = 40, 264, 752
    weight = kind.parts(5, n, k, experts=experts, device="cuda").packed
    counts = ROUTINGS[routing](experts, random.Random(1))
    rows = sum(counts) + 5
    index = torch.randint(0, rows, (rows,), generator=builders.generator(4), dtype=torch.int32) if gathered else None
    assert_routing_right(
        kind.lhs_for(weight, kind.schemes[scheme], 3, rows), weight, counts,
        bias=torch.randn(experts, n, device="cuda"), row_index=None if index is None else index.cuda(),
        offsets_dtype=(torch.int32, torch.int64)[at // 2 % 2],
    )  # fmt: skip


@form_and_scheme
def test_masked_within_the_bound(kind, scheme):
    scheme = min(scheme, 1)  # packed exponents of blocks are test_block_scales_gpu.py's
    experts, most, n, k = 9, 70, 264, 752
    weight = kind.parts(5, n, k, experts=experts, device="cuda").packed
    x, scale = kind.lhs_for(weight, kind.schemes[scheme], 3, experts * most)
    scale = scale.unflatten(0, (experts, most))
    lhs = x.unflatten(0, (experts, most)), scale.squeeze(-1) if scale.shape[-1] == 1 else scale
    assert_masked_right(lhs, weight, [0, 1, 70, 9, 0, 33, 64, 65, 2], expected_m=20)


LAYERS = [*((tier, kind.lhs, scheme) for tier, kind in TIERS.items() for scheme in ("token", "block")),
          ("two_level", "s8z", "token")]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "sizes"), builders.two_thirds(LAYERS, [(1, 8, 32), (8, 8, 64), (64, 4, 16), (300, 2, 5)]), ids=str
)
def test_a_layer_of_experts_is_the_reference(layer, sizes):
    (tier, mode, scheme), (tokens, top_k, experts) = layer, sizes
    sizes = dict(device="cuda", dtype=torch.bfloat16, scale=1.0, k=256, inter=160, n=264, mode=mode)
    assert_layer(Case(tokens=tokens, top_k=top_k, experts=experts, tier=tier, options={"scheme": scheme}, **sizes))


@pytest.mark.parametrize(("tier", "mode"), MODES)
def test_gpt_oss_gate_and_biases(tier, mode):
    g = builders.generator(3)
    options = dict(activation="swiglu_oai", order="interleaved", limit=7.0)
    options |= {"bias13": torch.randn(8, 320, generator=g).cuda(), "bias2": torch.randn(8, 264, generator=g).cuda()}
    sizes = dict(device="cuda", dtype=torch.bfloat16, scale=1.0, k=288, inter=160, n=264, mode=mode)
    assert_layer(Case(tokens=70, top_k=4, experts=8, tier=tier, options=options, **sizes))
