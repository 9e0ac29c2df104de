"""What a thread remembers of calls is for calls like them: whatever no tensor's layout shows is part of a plan's key,
and whatever a kernel reads is part of what its parameters are found by. Without a GPU: nothing is compiled or run."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
import torch
from prepared_calls import remembered

import jitgemm
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import Prologue
from jitgemm.gemm.problem import ANY, W4
from jitgemm.gemm.run import gemm
from jitgemm.moe.exchange import Buffer, Layout, collect, dispatch
from jitgemm.moe.route import combine, gather, route, route_and_quantize

M, N, K, E = 6, 80, 256, 3
BF16 = torch.bfloat16
X, X_SCALE, X_ZERO = builders.affine_lhs(1, M, K)
PARTS = builders.weight_parts(2, N, K, 128, codes="s8")
WEIGHT, ZEROS = PARTS.packed, builders.weight_parts(2, N, K, 128, zero_point=True).packed
CHANNEL = builders.weight_parts(2, N, K, builders.PER_CHANNEL).packed
EXPERTS = builders.weight_of_experts(E, N, K, 128, codes="s8")
W13, W2 = (builders.weight_of_experts(E, n, k, 128, codes="s8") for n, k in ((2 * K, K), (N, K)))
FLOATS = (torch.randn(M, K, generator=builders.generator(1)).to(BF16), torch.randn(M, 2 * K).to(BF16))
OUT = torch.empty(M, N, dtype=BF16)
IDS, WEIGHTS, SIZES = torch.zeros(M, 2, dtype=torch.int32), torch.ones(M, 2), torch.zeros(E, dtype=torch.int32)


def dense(zero=None, weight=WEIGHT, bits=W4, **options):
    lhs = (X, X_SCALE) if zero is None else (X, X_SCALE, zero)
    gemm(bits, lhs, weight, torch.empty(M, N, dtype=BF16), **options)


def contiguous(zero=None, weight=EXPERTS, **options):
    lhs = (X, X_SCALE) if zero is None else (X, X_SCALE, zero)
    offsets = torch.zeros(E + 1, dtype=torch.int32)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, torch.empty(M, N, dtype=BF16), offsets, **options)


def masked(expected_m=2, rows=2, weight=EXPERTS, **options):
    """Of as many rows in all: by the layouts alone E experts' tensors are like those of a call of sorted rows."""
    x, scale, out = (each[: E * rows] for each in (X, X_SCALE, torch.empty(M, N, dtype=BF16)))
    parts = x.view(E, rows, K), scale.view(E, rows), out.view(E, rows, N)
    jitgemm.m_grouped_gemm_w4a8_nt_masked(parts[:2], weight, parts[2], SIZES, expected_m, **options)


def quantise(x=FLOATS[0], dtype=torch.int8, in_place=None, grad=False, **options):
    if in_place is not None:
        options["residual"] = FLOATS[0].clone()
        options["residual_out"] = {"x": x, "residual": options["residual"], "new": None}[in_place]
    with torch.set_grad_enabled(grad):
        jitgemm.quantize_activations(x, dtype, **options)


def count_rows(**given):
    """What experts' layers ask of a quantiser besides."""
    quantize(QuantizeCall(FLOATS[0], activation_of(torch.int8, "token", False), Prologue(), **given))


def routed(experts=E, mapped=False):
    route(IDS, experts, expert_map=torch.zeros(E, dtype=torch.int32) if mapped else None)


def routed_and_quantised(dtype=torch.int8, scheme="token", affine=False, experts=E, mapped=False):
    tokens = QuantizeCall(FLOATS[0], activation_of(dtype, scheme, affine))
    route_and_quantize(tokens, IDS, experts, torch.zeros(E, dtype=torch.int32) if mapped else None)


def combined(addend=None, grad=False):
    with torch.set_grad_enabled(grad):
        combine(FLOATS[0], IDS, WEIGHTS, torch.empty(M, K, dtype=BF16), addend=addend)


def gathered(zero=None):
    lhs = (X, X_SCALE.flatten()) if zero is None else (X, X_SCALE.flatten(), zero.flatten())
    gather(lhs, IDS[:, 0].contiguous(), torch.ones(1, dtype=torch.int32))


LAYOUT = Layout(0, 2, M, K, K, 2, BF16, activation_of(torch.int8, "token", False))


def exchanged(experts=E, **changes):
    layout = replace(LAYOUT, **changes)
    buffer = Buffer(layout, torch.empty(layout.offsets["end"], dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    routing, counts = dispatch(FLOATS[0], IDS, WEIGHTS, buffer, experts)
    collect(FLOATS[0], routing.inverse, counts, torch.empty(M, K, dtype=BF16), buffer, experts)


NORM, ORDER, ONE = torch.ones(K, dtype=BF16), torch.arange(K, dtype=torch.int32), torch.ones(1)
GATED, NORMED = {"x": FLOATS[1]}, {"rms_norm": NORM}
STATIC = {"scheme": "tensor", "scale": ONE}
TWO_KERNELS = ({"kernel": "s8fast-g128-bf16-m8n64-s4"}, {"kernel": "s8fast-g128-bf16-m8n64-s5"})
EXACT = EXPERTS.with_sums("exact")
SAME_TENSORS = replace(WEIGHT, format=replace(WEIGHT.format, order="any"))
CALLS = {
    "dense": (dense, [
        {}, {"batch_invariant": True}, {"weight": WEIGHT.with_sums("exact")}, *TWO_KERNELS, {"bias": NORM[:N]}, {"zero": X_ZERO},
        {"weight": SAME_TENSORS}, {"weight": CHANNEL}, {"weight": ZEROS}, {"batch_invariant": True, "weight": WEIGHT.with_sums("exact")},
        {"bits": ANY},
    ]),
    "contiguous": (contiguous, [
        {}, {"batch_invariant": True}, {"weight": EXACT}, {"kernel": "s8fast-g128-bf16-m8n64-s4-e64"},
        {"kernel": "s8fast-g128-bf16-m8n64-s5-e64"}, {"expected_m": 1}, {"zero": X_ZERO},
        {"row_index": IDS[:, 0].contiguous()}, {"bias": NORM.new_zeros(E, N)},
    ]),
    "masked": (masked, [{}, {"batch_invariant": True}, {"weight": EXACT}, {"expected_m": 1}, {"rows": 1}]),
    "quantise": (quantise, [
        {}, {"dtype": torch.float8_e4m3fn}, {"affine": True}, {"scheme": "block"}, {"grad": True}, STATIC,
        STATIC | {"affine": True, "zero": ONE.int()}, {"correction": ("bf16", 64)}, {"correction": ("fp16", 64)},
        {"correction": ("bf16", 128)}, {"permutation": ORDER}, NORMED, NORMED | {"eps": 0.5}, NORMED | {"affine": True},
        *(NORMED | {"in_place": place} for place in ("x", "residual", "new")),
        *(GATED | gate for gate in ({"silu_mul": True}, {"gelu_mul": "tanh"}, {"gelu_mul": "none"})),
        {"out": (torch.empty(M, K, dtype=torch.int8), torch.empty(M))},
    ]),
    "quantise for experts": (count_rows, [
        {}, {"row_count": torch.ones(1, dtype=torch.int32)}, {"row_index": IDS[:, 0].contiguous()},
        {"row_count": torch.ones(1, dtype=torch.int32), "row_index": IDS[:, 0].contiguous()},
    ]),
    "route": (routed, [{}, {"experts": 4}, {"mapped": True}]),
    "route and quantise": (routed_and_quantised, [
        {}, {"experts": 4}, {"mapped": True}, {"affine": True}, {"dtype": torch.float8_e4m3fn}, {"scheme": "block"},
    ]),
    "combine": (combined, [{}, {"addend": FLOATS[0]}, {"grad": True}]),
    "gather": (gathered, [{}, {"zero": X_ZERO}]),
    "exchange": (exchanged, [{}, {"experts": 4}, {"rank": 1}, {"max_tokens": M + 1}, {"world": 3}]),
}  # fmt: skip
"""A call, and what it is called with: by layouts alone no two of these are apart, or need not be."""


def plans(cache) -> list:
    return [plan for of_key in cache.plans.values.values() for _, plan in of_key]


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_prepare_launches_of_their_own_and_equal_ones_share_one(monkeypatch, name):
    call, arguments = CALLS[name]
    cache, launches = remembered(monkeypatch)
    each = 2 if name == "exchange" else 1
    for count, given in enumerate(arguments, 1):
        call(**given)
        assert len(plans(cache)) == len(launches) == each * count, f"{given} has the plan of another call"
    for given in arguments:
        call(**given)
    assert len(plans(cache)) == each * len(arguments), "an equal call has a plan of its own"
    assert len(launches) == 2 * each * len(arguments)


def layer(grad=False, out=None, w13=W13, w2=W2, **options):
    with torch.set_grad_enabled(grad):
        jitgemm.fused_experts(FLOATS[0], w13, w2, IDS, WEIGHTS, out=out, **options)


def masked_layer(grad=False, w13=W13, w2=W2, **options):
    with torch.set_grad_enabled(grad):
        jitgemm.fused_experts_masked(FLOATS[0].view(E, 2, K), w13, w2, OUT.view(E, 2, N), SIZES, 1, **options)


EXACT_BOTH = {"w13": W13.with_sums("exact"), "w2": W2.with_sums("exact")}
UNGATED = {"w13": builders.weight_of_experts(E, K, K, 128, codes="s8"), "activation": "relu2"}
LAYERS = [
    {}, {"grad": True}, EXACT_BOTH, {"affine": True}, {"scheme": "block"}, {"bias13": NORM.new_zeros(E, 2 * K)},
    {"bias2": NORM.new_zeros(E, N)}, UNGATED,
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "more"),
    [(layer, [{"out": OUT}, {"out": OUT.clone()}, {"addend": OUT}, {"addend": OUT, "out": OUT}]), (masked_layer, [])],
)
def test_a_layer_is_checked_for_each_way_to_call_it_and_once(monkeypatch, call, more):
    cache, _ = remembered(monkeypatch)
    for count, given in enumerate([*LAYERS, *more], 1):
        for _ in range(2):
            call(**given)
            assert sum(plan is True for plan in plans(cache)) == count, given


def test_a_layer_s_gate_is_part_of_what_was_checked(monkeypatch):
    """With w13 of as many rows as gates and ups have, or as ups alone have."""
    remembered(monkeypatch)
    layer(**UNGATED)
    with pytest.raises(ValueError, match="w13: expected n = "):
        layer(w13=UNGATED["w13"])


def test_parameters_are_found_by_the_address_of_whatever_a_kernel_reads(monkeypatch):
    cache, launches = remembered(monkeypatch)
    given = {"x": X, "x_scale": X_SCALE, "x_zero": X_ZERO, "bias": NORM[:N], "out": OUT.clone()}
    given |= {name: getattr(CHANNEL, name) for name in ("blocks", "channel_scale", "row_sum")}

    def call(x, x_scale, x_zero, bias, out, **tensors):
        other = CHANNEL.with_tensors(tensors["blocks"], tensors["channel_scale"], tensors["row_sum"], None)
        jitgemm.gemm_w4a8_nt((x, x_scale, x_zero), other, out, bias=bias)

    call(**given)
    for name, tensor in given.items():
        moved = tensor.clone()
        call(**given | {name: moved})
        assert moved.data_ptr().to_bytes(8, "little") in b"".join(launches[-1][1]), name
    call(**given)
    assert len(plans(cache)) == 1 and len(cache.parameters.values) == 1 + len(given)
