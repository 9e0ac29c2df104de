"""The expert layer's kernels on a Hopper GPU against the CPU's results, alone and together, and all around a launch."""

from __future__ import annotations

import threading
from dataclasses import replace

import builders
import pytest
import torch
from expert_layers_gpu import assert_layer, assert_near
from moe_cases import ACTIVATIONS, MODES, ORDERS, Case, choices
from quantize_cases import X_DTYPES, activations, assert_close, assert_same_bits

from jitgemm import fused_experts, fused_experts_workspace_bytes
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import Gate, Prologue
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.call import m_grouped_gemm_w4a8_nt_contiguous
from jitgemm.moe.arguments import Routing
from jitgemm.moe.route import combine, combine_reference, route, route_and_quantize, route_reference
from jitgemm.tensors import take_rows
from jitgemm.weight.packed import W4Weight

pytestmark = pytest.mark.gpu

POISON = 0x5B5B5B5B
SIZES = [
    (1, 1, 1), (1, 8, 128), (3, 2, 8), (8, 8, 256), (16, 8, 128), (31, 1, 1024), (32, 4, 32), (64, 8, 128),
    (128, 8, 256), (128, 8, 1024), (255, 8, 384), (256, 8, 384), (257, 8, 8), (1024, 10, 512), (4096, 8, 128),
    (5000, 6, 384), (131072, 8, 128),
]  # fmt: skip
"""(tokens, top_k, experts): about where the kernel changes, and up to a million choices."""


def guarded(count: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """(tensor of int32 words with 64 of poison on each side, what lies between them)."""
    words = torch.full((count + 128,), POISON, dtype=torch.int32, device="cuda")
    return words, words[64 : 64 + count].view(dtype)


def assert_unharmed(words: torch.Tensor) -> None:
    assert bool((words[:64] == POISON).all()) and bool((words[-64:] == POISON).all()), "written beside the tensor"


# ---- routing --------------------------------------------------------------------------------------------------------


def route_into_guards(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> Routing:
    """`route`, with what it writes in a sea of poison."""
    from jitgemm.moe.plan import prepare_route

    buffers = [guarded(count) for count in (experts + 1, ids.numel(), ids.numel())]
    routing = Routing(buffers[0][1], buffers[1][1], buffers[2][1].view(ids.shape))
    prepare_route(ids, experts, expert_map).run_tensors(ids, expert_map, *routing)
    torch.cuda.synchronize()
    for words, _ in buffers:
        assert_unharmed(words)
    live = int(routing.offsets[-1])
    assert bool((routing.row_index[live:] == POISON).all()), "rows of nobody were written"
    return routing


def assert_routed(routing: Routing, ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None = None) -> None:
    expected = route_reference(ids.cpu(), experts, None if expert_map is None else expert_map.cpu())
    live = int(expected.offsets[-1])
    assert torch.equal(routing.offsets.cpu(), expected.offsets)
    assert torch.equal(routing.row_index[:live].cpu(), expected.row_index[:live])
    assert torch.equal(routing.inverse.cpu(), expected.inverse)


@pytest.mark.parametrize(
    "sizes, kind, dtype", builders.third(SIZES, ("uniform", "zipf", "one"), (torch.int32, torch.int64)), ids=str
)
def test_routing_is_a_stable_sort(sizes, kind, dtype):
    tokens, top_k, experts = sizes
    ids = choices(tokens, tokens, top_k, experts, kind).to(dtype).cuda()
    assert_routed(route_into_guards(ids, experts, None), ids, experts)


@pytest.mark.parametrize("tokens, top_k, experts", SIZES)
def test_routing_skips_what_is_no_expert_of_this_rank(tokens, top_k, experts):
    g = builders.generator(tokens)
    wide = min(8192, 8 * experts)
    ids = choices(tokens, tokens, top_k, wide).cuda()
    ids.view(-1)[::7] = -1
    ids.view(-1)[3::11] = wide
    ids.view(-1)[5::13] = 2**40
    assert_routed(route_into_guards(ids, experts, None), ids, experts)
    expert_map = torch.full((wide,), -1, dtype=torch.int32)
    mine = torch.randperm(wide, generator=g)[:experts]
    expert_map[mine] = torch.randperm(experts, generator=g).int()
    expert_map[0] = experts + 5  # no expert either
    assert_routed(route_into_guards(ids, experts, expert_map.cuda()), ids, experts, expert_map)
    nobody = torch.full_like(ids, -1).int()
    assert_routed(route_into_guards(nobody, experts, None), nobody, experts)


FRONT_SIZES = [(1, 8, 256), (9, 6, 1024), (64, 8, 128), (256, 8, 512), (257, 8, 8)]


@pytest.mark.parametrize("sizes, k, mode", builders.third(FRONT_SIZES, (16, 272, 4128, 7168, 16384), MODES), ids=str)
def test_routing_and_quantising_at_once_are_both(sizes, k, mode):
    """What routes and what quantises know nothing of each other: pairs of sizes, k and mode suffice."""
    tokens, top_k, experts = sizes
    dtype, affine = MODES[mode]
    ids = choices(tokens, tokens, top_k, experts, "zipf").cuda()
    ids.view(-1)[::5] = -1
    schemes = ("token", "token", "token") if affine else ("token", "block", "token")
    for x_dtype, scheme in zip((torch.bfloat16, torch.float16, torch.float32), schemes):
        x = activations(1, tokens, k + 32, x_dtype, "cuda")[:, 32:]
        rotation = 128 if k % 128 == 0 and x_dtype != torch.float16 else 0
        inputs = QuantizeCall(x, activation_of(dtype, scheme, affine, rotation=rotation))
        for expert_map in (None, torch.arange(experts, dtype=torch.int32, device="cuda").flip(0)):
            routing, outputs = route_and_quantize(inputs, ids, experts, expert_map)
            assert_routed(routing, ids, experts, expert_map)
            sides = [tuple(part for part in side if part is not None) for side in (outputs, quantize(inputs))]
            assert_same_bits(*sides)


# ---- combining ------------------------------------------------------------------------------------------------------


COMBINED = [(1, 1, 8), (1, 8, 2048), (7, 3, 1032), (64, 8, 7168), (33, 40, 72), (3000, 4, 2880)]


@pytest.mark.parametrize("sizes, out_dtype, row_dtype", builders.third(COMBINED, X_DTYPES, X_DTYPES), ids=str)
def test_combining_is_the_weighted_sum_within_fp32_s_rounding(sizes, out_dtype, row_dtype):
    tokens, top_k, n = sizes
    g = builders.generator(tokens)
    rows = torch.randn((tokens * top_k + 1, n), generator=g).to(row_dtype).cuda()
    rows[-1] = float("nan")  # nobody's
    inverse = torch.randint(-1, tokens * top_k, (tokens, top_k), generator=g).int().cuda()
    inverse[0] = -1
    weights = torch.rand((tokens, top_k), generator=g).to(torch.bfloat16 if n % 16 else torch.float32).cuda()
    for addend in (None, torch.randn((tokens, n + 8), generator=g).to(out_dtype).cuda()[:, 8:]):
        words, flat = guarded(tokens * n * out_dtype.itemsize // 4, out_dtype)
        out = flat.view(tokens, n)
        combine(rows, inverse, weights, out, addend=addend)
        assert_unharmed(words)
        expected = combine_reference(rows, inverse, weights, addend)
        size = combine_reference(rows.abs(), inverse, weights, None if addend is None else addend.abs())
        rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[out_dtype]
        bound = (top_k + 1) * 2.0**-24 * size * 1.01 + rounding * 1.01 * expected.abs() + 2.0**-24
        assert bool(((out.double() - expected).abs() <= bound).all())
        again = torch.empty_like(out)
        for _ in range(5):
            combine(rows, inverse, weights, again, addend=addend)
            assert builders.same_bits(again, out)


# ---- gates ----------------------------------------------------------------------------------------------------------


GATED = [
    (*gate, *((112, 7.0), (768, float("inf")), (2880, 2.5), (16432, 7.0))[number % 4])
    for number, gate in enumerate(builders.third(ACTIVATIONS, ORDERS, X_DTYPES, MODES))
]
"""One of four widths in turn, a kernel each."""


@pytest.mark.parametrize("kind, order, x_dtype, mode, k, limit", GATED, ids=str)
def test_gates_and_codes_are_the_cpu_s(kind, order, x_dtype, mode, k, limit):
    dtype, affine = MODES[mode]
    x = (torch.randn((17, 2 * k), generator=builders.generator(k)) * 4).to(x_dtype)
    x[3] = 0
    x[5, 7] = float("nan")
    inputs = QuantizeCall(x, activation_of(dtype, "token", affine), Prologue(gate=Gate(kind, order, limit, 1.702)))
    expected = quantize(inputs)
    results = quantize(replace(inputs, x=x.cuda()))
    keep = [each for each in range(17) if each != 5]
    assert bool(results[1][5].isnan()) and bool(expected[1][5].isnan())
    sides = [tuple(part[keep] for part in side if part is not None) for side in (results, expected)]
    assert_close(*sides, rare=1e-2)


@pytest.mark.parametrize("k, x_dtype, mode", builders.third((96, 768, 2880, 16416, 40000), X_DTYPES, MODES), ids=str)
def test_squares_without_gates_are_the_cpu_s_bits(k, x_dtype, mode):
    dtype, affine = MODES[mode]
    x = (torch.randn((17, k), generator=builders.generator(k)) * 4).to(x_dtype)
    x[3] = -1
    inputs = QuantizeCall(x, activation_of(dtype, "token", affine), Prologue(gate=Gate("relu2")))
    sides = (quantize(each) for each in (replace(inputs, x=x.cuda()), inputs))
    assert_same_bits(*(tuple(part for part in side if part is not None) for side in sides))


@pytest.mark.parametrize("k", [96, 768, 2048, 20000 // 32 * 32])
@pytest.mark.parametrize("live", [0, 1, 13, 999, 1000, 5000])
def test_only_counted_rows_are_quantised(k, live):
    m = 1000
    x = torch.randn((m, 2 * k), generator=builders.generator(k)).bfloat16().cuda()
    x[min(live, m) :] = float("nan")
    count = torch.tensor([live], dtype=torch.int32, device="cuda")
    outputs = (
        torch.full((m, k), 0x5B, dtype=torch.int8, device="cuda"), torch.full((m,), -3.0, device="cuda"),
        torch.full((m,), POISON, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    inputs = QuantizeCall(x, activation_of(torch.int8, "token", True), Prologue(gate=Gate()))
    quantize(replace(inputs, row_count=count, out=outputs))
    rows = min(live, m)
    if rows:
        whole = quantize(inputs)
        assert all(builders.same_bits(part[:rows], all_of[:rows]) for part, all_of in zip(outputs, whole))
    q, scale, zero = (part[rows:] for part in outputs)
    assert bool((q == 0x5B).all()) and bool((scale == -3).all()) and bool((zero == POISON).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k, rotation", [(64, 0), (2048, 0), (7168, 0), (32800, 0), (384, 128), (7168, 128)])
def test_gathered_rows_are_quantised_as_where_they_were(k, rotation, mode):
    dtype, affine = MODES[mode]
    x = activations(1, 300, k, device="cuda")
    index = torch.randint(0, 300, (1000,), generator=builders.generator(k)).int().cuda()
    index[900:] = 2**30  # of nobody: never looked at
    count = torch.tensor([900], dtype=torch.int32, device="cuda")
    inputs = QuantizeCall(x, activation_of(dtype, "token", affine, rotation=rotation))
    results = quantize(replace(inputs, row_index=index, row_count=count))
    expected = quantize(inputs)
    for part, whole in zip(results, expected):
        if part is not None:
            words = torch.int8 if part.element_size() == 1 else torch.int32
            assert torch.equal(part[:900].view(words), whole.view(words)[index[:900].long()])


# ---- the layer ------------------------------------------------------------------------------------------------------


SMALL = {"device": "cuda", "dtype": torch.bfloat16, "scale": 1.0, "k": 272, "inter": 144, "n": 264, "group_size": 128}


def assert_within_bound(rows: torch.Tensor, lhs: tuple, weight: W4Weight, offsets: torch.Tensor, name: str) -> None:
    """An expert at a time: the GEMM's result from what it was given."""
    bounds = offsets.tolist()
    for e, (first, end) in enumerate(zip(bounds, bounds[1:])):
        if first < end:
            part = tuple(take_rows(each, slice(first, end)) for each in lhs)
            ref, bound = gemm_w4a8_bound(part, weight[e], out_dtype=rows.dtype)
            used = (rows[first:end].double() - ref).abs() / bound
            where = divmod(int(used.argmax()), weight.n)
            assert bool((used <= 1).all()), f"{name} of expert {e}: {float(used.max()):.4g} of its bound at {where}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "tokens, top_k, experts, everywhere",
    [(1, 8, 32, None), (8, 8, 64, None), (300, 2, 5, None), (128, 8, 16, 128), (700, 8, 16, 24)],
)
def test_the_layer_is_its_kernels_each_of_which_is_right(tokens, top_k, experts, everywhere, mode):
    """No error is handed on here: each kernel is held against what it was given, the layer against the kernels."""
    dtype, affine = MODES[mode]
    case = Case(tokens=tokens, top_k=top_k, experts=experts, mode=mode, **SMALL)
    x, w13, w2, ids, weights = case.arguments
    expert_map = None
    if everywhere is not None:
        expert_map = torch.full((everywhere,), -1, dtype=torch.int32, device="cuda")
        expert_map[2 : 2 + experts] = torch.arange(experts, dtype=torch.int32, device="cuda").flip(0)
        ids = choices(tokens, tokens, top_k, everywhere).cuda()
    expected_m = ids.numel() / (everywhere or experts)
    inputs = QuantizeCall(x, activation_of(dtype, "token", affine))

    def lhs_of(outputs: tuple) -> tuple:
        return tuple(part for part in outputs if part is not None)

    routing = route(ids, experts, expert_map=expert_map)
    assert_routed(routing, ids, experts, expert_map)
    live, index = int(routing.offsets[-1]), routing.row_index
    lhs = lhs_of(quantize(inputs))
    assert_same_bits(lhs, lhs_of(quantize(replace(inputs, x=x.cpu()))))

    hidden, rows = (x.new_zeros((ids.numel(), weight.n)) for weight in (w13, w2))
    m_grouped_gemm_w4a8_nt_contiguous(lhs, w13, hidden, routing.offsets, row_index=index, expected_m=expected_m)
    gathered = tuple(take_rows(part, index[:live].long()) for part in lhs)
    assert_within_bound(hidden, gathered, w13, routing.offsets, "first GEMM")

    between = replace(inputs, x=hidden, prologue=Prologue(gate=Gate()))
    lhs = lhs_of(quantize(replace(between, row_count=routing.offsets[-1:])))
    assert_close(
        tuple(part[:live] for part in lhs), lhs_of(quantize(replace(between, x=hidden[:live].cpu()))), rare=1e-2
    )
    m_grouped_gemm_w4a8_nt_contiguous(lhs, w2, rows, routing.offsets, expected_m=expected_m)
    assert_within_bound(rows, lhs, w2, routing.offsets, "second GEMM")

    out = torch.empty((tokens, w2.n), dtype=x.dtype, device="cuda")
    combine(rows, routing.inverse, weights, out)
    options = case.options | {"expert_map": expert_map}
    assert builders.same_bits(fused_experts(x, w13, w2, ids, weights, **options), out)


@pytest.mark.parametrize(
    "group_size, zero_point, dtype",
    [(32, False, torch.float16), (128, True, torch.bfloat16), (builders.PER_CHANNEL, False, torch.float32)],
    ids=str,
)
def test_the_layer_in_every_type_and_format(group_size, zero_point, dtype):
    changes = {"dtype": dtype, "group_size": group_size, "zero_point": zero_point}
    assert_layer(Case(tokens=20, top_k=4, experts=8, mode="s8", **(SMALL | changes)))


@pytest.mark.parametrize("activation, order", builders.third(ACTIVATIONS, ORDERS))
def test_the_layer_with_every_gate_biases_and_an_addend(order, activation):
    g = builders.generator(1)
    options = {
        "activation": activation,
        "order": order,
        "limit": 7.0,
        "bias13": torch.randn((8, 288), generator=g).cuda(),
        "bias2": torch.randn((8, 264), generator=g).bfloat16().cuda(),
        "addend": torch.randn((20, 264), generator=g).bfloat16().cuda(),
    }
    assert_layer(Case(tokens=20, top_k=4, experts=8, mode="s8", options=options, **SMALL))


@pytest.mark.parametrize("mode", MODES)
def test_the_layer_without_gates(mode):
    for tokens in (3, 200):
        assert_layer(Case(tokens=tokens, top_k=4, experts=8, mode=mode, options={"activation": "relu2"}, **SMALL))


def test_a_token_alone_has_the_same_bits_where_asked():
    case = Case(tokens=90, top_k=4, experts=16, mode="e4m3", **SMALL)
    x, w13, w2, ids, weights = case.arguments
    together = fused_experts(x, w13, w2, ids, weights, batch_invariant=True)
    for rows in (slice(0, 1), slice(89, 90), slice(5, 45)):
        alone = fused_experts(x[rows], w13, w2, ids[rows], weights[rows], batch_invariant=True)
        assert builders.same_bits(alone, together[rows])


def test_a_warm_call_never_waits_for_the_device():
    case = Case(tokens=8, top_k=4, experts=16, mode="s8", **SMALL)
    fused_experts(*case.arguments, **case.options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_experts(*case.arguments, **case.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [4, 600])
@pytest.mark.parametrize("mode", MODES)
def test_a_cuda_graph_is_replayed_with_other_routings(mode, tokens):
    case = Case(tokens=tokens, top_k=4, experts=16, mode=mode, **SMALL)
    x, w13, w2, ids, weights = case.arguments
    buffers = [each.clone() for each in (x, ids, weights)]
    expected = []
    routings = [choices(seed, tokens, 4, 16, kind).cuda() for seed, kind in ((2, "uniform"), (3, "zipf"), (4, "one"))]
    routings.append(torch.full_like(ids, -1))
    for routing in routings:
        expected.append(fused_experts(x.roll(1, 0), w13, w2, routing, weights.flip(0).contiguous(), **case.options))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = fused_experts(buffers[0], w13, w2, buffers[1], buffers[2], **case.options)
    buffers[0].copy_(x.roll(1, 0)), buffers[2].copy_(weights.flip(0))
    for routing, wanted in zip(routings, expected):
        buffers[1].copy_(routing)
        out.fill_(float("nan"))
        graph.replay()
        assert builders.same_bits(out, wanted)


def test_layers_one_behind_the_other_are_the_calls_one_by_one():
    """Each kernel starts before its predecessor has ended, and still reads what that wrote."""
    case = Case(tokens=16, top_k=4, experts=16, mode="s8", **(SMALL | {"n": 272}))
    first, w13, w2, ids, weights = case.arguments

    def chain(synchronise: bool) -> list[torch.Tensor]:
        outs, x = [], first
        for _ in range(6):
            x = fused_experts(x, w13, w2, ids, weights, addend=first, **case.options)
            if synchronise:
                torch.cuda.synchronize()
            outs.append(x)
        return outs

    slow = chain(True)
    assert all(bool(out.isfinite().all()) for out in slow)
    for _ in range(50):
        assert all(map(builders.same_bits, chain(False), slow))


def test_two_threads_on_two_streams():
    cases = [Case(tokens=40, top_k=4, experts=16, mode="s8", seed=seed, **SMALL) for seed in (1, 2)]
    expected = [fused_experts(*case.arguments, **case.options) for case in cases]
    wrong: list[int] = []
    torch.cuda.synchronize()

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outs = [fused_experts(*cases[number].arguments, **cases[number].options) for _ in range(100)]
        stream.synchronize()
        wrong.extend(number for out in outs if not builders.same_bits(out, expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert wrong == []


def test_tokens_may_be_gathered_by_the_quantiser_or_the_gemm(monkeypatch):
    case = Case(tokens=300, top_k=4, experts=16, mode="s8", **SMALL)
    outs = []
    for most in (1.0, 1e9):
        monkeypatch.setattr("jitgemm.moe.route.GATHER_M", most)
        outs.append(assert_layer(case))
    assert_near(*outs, "s8")


@pytest.mark.parametrize("tokens, affine", [(1, False), (64, True), (3000, False)])
def test_a_call_takes_the_memory_that_is_documented(tokens, affine):
    case = Case(tokens=tokens, top_k=4, experts=16, mode="s8z" if affine else "s8", **SMALL)
    x, w13, w2, *_ = case.arguments
    out = fused_experts(*case.arguments, **case.options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # What was asked for: the allocator may hand out a block with up to 1 MB more.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    fused_experts(*case.arguments, **case.options, out=out)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert 0 < taken <= fused_experts_workspace_bytes(tokens, 4, w13, w2, dtype=x.dtype, affine=affine)


def test_misaligned_tensors_are_refused():
    case = Case(tokens=6, top_k=4, experts=16, mode="s8", **SMALL)
    whole = torch.zeros((6, 280), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="x: expected an address that is a multiple of 16 bytes"):
        fused_experts(*case.replaced(x=whole[:, 4:276]), **case.options)
    addend = torch.zeros((6, 272), dtype=torch.bfloat16, device="cuda")[:, 4:268]
    with pytest.raises(ValueError, match="addend: expected an address that is a multiple of 16 bytes"):
        fused_experts(*case.arguments, **case.options, addend=addend)
