"""The fused expert layer as specified: routing, combining, the layer by its definition, checks, the op, its kernels.

Results here are the CPU's; the kernels are held against them in test_moe_gpu.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import builders
import pytest
import torch
import torch._dynamo.testing
from moe_cases import ACTIVATIONS, MODES, ORDERS, Case, activated, by_definition, choices

import jitgemm
from jitgemm import fused_experts, fused_experts_reference, fused_experts_workspace_bytes
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.kernel import quantize_source, quantize_spec
from jitgemm.activations.reference import gated
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import GATE_KINDS, SILU_MUL, Gate, Prologue
from jitgemm.jit.cache import KernelCache
from jitgemm.moe.arguments import ExpertsCall
from jitgemm.moe.call import launch
from jitgemm.moe.exchange import CollectSpec, dispatch_spec, exchange_specs
from jitgemm.moe.kernel import (
    CLUSTER,
    MAX_EXPERTS,
    MAX_GLOBAL_EXPERTS,
    CombineSpec,
    RouteQuantizeSpec,
    RouteSpec,
    layer_specs,
    route_launch,
    route_quantize_spec,
    route_spec,
    route_threads,
    source_of,
)
from jitgemm.moe.route import combine, route

OP = torch.ops.jitgemm.fused_experts.default

# ---- routing --------------------------------------------------------------------------------------------------------


def sorted_by_hand(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> tuple[list, list, list]:
    """(offsets, row_index, inverse) of lists of Python."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for t, line in enumerate(ids.tolist()):
        for i, choice in enumerate(line):
            if expert_map is not None:
                choice = int(expert_map[choice]) if 0 <= choice < len(expert_map) else -1
            if 0 <= choice < experts:
                rows[choice].append((t, i))
    offsets, tokens, inverse = [0], [], [[-1] * ids.shape[1] for _ in range(ids.shape[0])]
    for expert in rows:
        for t, i in expert:
            inverse[t][i] = len(tokens)
            tokens.append(t)
        offsets.append(len(tokens))
    return offsets, tokens, inverse


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("tokens, top_k, experts", [(0, 2, 3), (1, 1, 1), (1, 8, 5), (40, 4, 16), (300, 8, 128)])
def test_choices_are_sorted_by_expert_in_their_order(tokens, top_k, experts, mapped, dtype):
    g = builders.generator(tokens + experts)
    ids = torch.randint(-2, experts + 3, (tokens, top_k), generator=g).to(dtype)
    expert_map = None
    if mapped:
        expert_map = torch.randint(-1, experts + 2, (experts + 1,), generator=g).int()
    offsets, row_index, inverse = route(ids, experts, expert_map=expert_map)
    expected = sorted_by_hand(ids, experts, expert_map)
    assert offsets.tolist() == expected[0] and inverse.tolist() == expected[2]
    assert row_index[: expected[0][-1]].tolist() == expected[1] and row_index.shape == (tokens * top_k,)
    assert {offsets.dtype, row_index.dtype, inverse.dtype} == {torch.int32}


def test_ids_far_out_of_range_are_skipped():
    ids = torch.tensor([[2**40 + 1, -(2**40) + 1, 1, 2**32 + 1]])
    assert route(ids, 4).inverse.tolist() == [[-1, -1, 0, -1]]


@pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_combining_adds_up_weighted_rows_and_skips_what_is_negative(row_dtype):
    g = builders.generator(1)
    rows = torch.randn((6, 16), generator=g).to(row_dtype)
    rows[5] = float("nan")  # nobody's
    inverse = torch.tensor([[0, 4, -1], [-1, -1, -1], [3, 3, 1]], dtype=torch.int32)
    weights, addend = torch.rand((3, 3), generator=g), torch.randn((3, 16), generator=g)
    out = torch.empty(3, 16)
    combine(rows, inverse, weights, out, addend=addend)
    a, r, w = addend.double(), rows.double(), weights.double()
    expected = [a[0] + w[0, 0] * r[0] + w[0, 1] * r[4], a[1], a[2] + (w[2, 0] + w[2, 1]) * r[3] + w[2, 2] * r[1]]
    assert torch.allclose(out, torch.stack(expected).float(), rtol=1e-6, atol=1e-6)
    combine(rows, inverse, weights.bfloat16(), out[:, :16])
    assert bool((out[1] == 0).all()) and bool(out.isfinite().all())


def test_rows_that_are_not_there_are_named_on_the_cpu():
    inverse = torch.tensor([[0, 6]], dtype=torch.int32)
    with pytest.raises(ValueError, match="inverse: expected rows below 6, got 6"):
        combine(torch.zeros(6, 8), inverse, torch.ones(1, 2), torch.zeros(1, 8))


# ---- gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gates_are_what_their_names_say(kind, order):
    g = builders.generator(1)
    gate, up = torch.randn((2, 5, 32), generator=g, dtype=torch.float64) * 4
    x = torch.stack((gate, up), -1).flatten(1) if order == "interleaved" else torch.cat((gate, up), 1)
    x = torch.cat((up, gate), 1) if order == "up_gate" else x
    for limit in (float("inf"), 3.0):
        lim_gate, lim_up = torch.minimum(gate, torch.tensor(limit)), up.clip(-limit, limit)
        expected = {
            "silu": lambda g, u: torch.nn.functional.silu(g) * u,
            "gelu": lambda g, u: torch.nn.functional.gelu(g) * u,
            "gelu_tanh": lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u,
            "swiglu_oai": lambda g, u: g / (1 + torch.exp(-1.5 * g)) * (u + 1),
            "swiglu_step": lambda _, u: torch.minimum(gate / (1 + torch.exp(-gate)), torch.tensor(limit)) * u,
            "situ": lambda *_: 1.5 * torch.tanh(gate / 1.5) / (1 + torch.exp(-gate)) * soft(up, limit),
        }[kind](lim_gate, lim_up)
        assert torch.allclose(gated(x, Gate(kind, order, limit, 1.5)), expected, rtol=1e-12, atol=1e-12)


def soft(up, limit):
    return up if limit == float("inf") else limit * torch.tanh(up / limit)


def test_a_square_of_what_is_positive_has_no_gates():
    x = torch.tensor([[-2.0, -0.0, 0.5, 3.0]], dtype=torch.float64)
    assert torch.equal(gated(x, Gate("relu2")), torch.tensor([[0.0, 0.0, 0.25, 9.0]], dtype=torch.float64))
    assert Gate("relu2").inputs == 1 and {Gate(kind).inputs for kind in ACTIVATIONS} == {2}


def test_a_nan_behind_a_limit_is_still_a_nan():
    x = torch.ones(1, 64)
    x[0, 3] = float("nan")
    for order in ORDERS:
        _, scale, _ = quantize(
            QuantizeCall(x, activation_of(torch.int8, "token", False), Prologue(gate=Gate("silu", order, 1.0)))
        )
        assert bool(scale.isnan().all())


def test_counted_rows_without_a_gate_or_indices_are_the_masked_kernels():
    inputs = QuantizeCall(torch.ones(2, 64), activation_of(torch.int8, "token", False), row_count=torch.ones(1).int())
    assert inputs.masked and not replace(inputs, prologue=Prologue(gate=SILU_MUL)).masked
    assert not replace(inputs, row_index=torch.zeros(2).int()).masked
    quantize(inputs)


@pytest.mark.parametrize("shape", [(), (1, 1), (2, 1), (0,), (3,)], ids=str)
def test_counts_of_rows_that_no_kernel_reads_are_refused(shape):
    count = torch.ones(shape, dtype=torch.int32)
    with pytest.raises(ValueError, match="row_count: expected .*got"):
        quantize(QuantizeCall(torch.ones(2, 64), activation_of(torch.int8, "token", False), row_count=count))


# ---- the layer ------------------------------------------------------------------------------------------------------


def assert_by_definition(case: Case, **changes) -> None:
    arguments = case.replaced(**changes)
    out = fused_experts(*arguments, **case.options)
    assert out.dtype == arguments[0].dtype and out.shape == (arguments[0].shape[0], case.n)
    expected = by_definition(case, **changes)
    step = 2.0**-7 if out.dtype == torch.bfloat16 else 2.0**-10 if out.dtype == torch.float16 else 1e-6
    assert float(expected.abs().max()) > 0.05
    assert bool(((out.double() - expected).abs() <= step * (expected.abs() + expected.abs().max() / 16)).all())
    assert builders.same_bits(out, fused_experts_reference(*arguments, **case.options))


GPT_OSS = {"activation": "swiglu_oai", "order": "interleaved", "limit": 0.7, "alpha": 1.25}
DRAW = builders.generator(5)
GPT_OSS |= {"bias13": torch.randn((5, 192), generator=DRAW), "bias2": torch.randn((5, 72), generator=DRAW).bfloat16()}
LAYERS = {
    **{
        f"{activation}, {order}, {mode}": Case(mode=mode, options={"activation": activation, "order": order})
        for activation, order, mode in builders.third(ACTIVATIONS, ORDERS, MODES)
    },
    **{f"{kind}, limited": Case(scale=20.0, options={"activation": kind, "limit": 1.5}) for kind in ACTIVATIONS},
    **{
        f"no gates, {mode}": Case(
            mode=mode, options={"activation": "relu2", "bias13": torch.randn((5, 96), generator=DRAW)}
        )
        for mode in ("e4m3", "s8z")
    },
    **{f"blocks, {mode}": Case(k=400, inter=144, mode=mode, options={"scheme": "block"}) for mode in ("e4m3", "s8")},
    **{
        f"{top_k} choices of {experts}": Case(
            tokens=4, top_k=top_k, experts=experts
        )  # one that comes twice counts twice
        for top_k, experts in ((1, 1), (4, 2), (8, 3), (33, 2))
    },
    "bf16": Case(dtype=torch.bfloat16, scale=2.0, mode="e4m3"),
    "fp16, zero points": Case(dtype=torch.float16, zero_point=True, scale=2.0, mode="e4m3"),
    "gpt-oss": Case(options=GPT_OSS),
    "gpt-oss, a scale a row": Case(group_size=builders.PER_CHANNEL, options=GPT_OSS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_its_definition(name):
    assert_by_definition(LAYERS[name])


@pytest.mark.parametrize("scheme", ["token", "block"])
@pytest.mark.parametrize("mode", MODES)
def test_the_layer_rotates_what_both_gemms_read(mode, scheme):
    if (mode, scheme) == ("s8z", "block"):
        pytest.skip("blocks have no zero points")
    case = Case(k=256, inter=128, mode=mode, options={"scheme": scheme, "rotation": 128})
    assert_by_definition(case)
    plain = [replace(weight, rotation=0) for weight in case.arguments[1:3]]
    plain = fused_experts(*case.replaced(w13=plain[0], w2=plain[1]), **case.options | {"rotation": 0})
    assert float((plain - fused_experts(*case.arguments, **case.options)).norm() / plain.norm()) > 0.5


@pytest.mark.parametrize(("limit", "least", "most"), [(7.0, 0.09, 0.3), (None, 0.03, 0.06)])
def test_a_limit_far_below_the_hidden_values_makes_a_step_of_the_activation(limit, least, most):
    """gpt-oss' gate then is near 0 or the limit, by the hidden value's sign: where 8 bits of the input turn that of one near
    0, the result is off by the limit. Beside its own intermediate the layer is as near as ever."""
    options = dict(scheme="block", activation="swiglu_oai", order="up_gate", limit=limit)
    sizes = dict(tokens=2, top_k=1, experts=1, k=1024, inter=160, n=1024)
    case = Case(**sizes, bits=8, mode="e4m3", group_size=0, dtype=torch.bfloat16, options=options)
    out, (x, _, _, _, weights) = fused_experts(*case.arguments, **case.options).double(), case.arguments
    own = by_definition(case)
    assert (out - own).norm() < 0.004 * own.norm()
    hidden = x.double() @ case.parts13[0].dequantize_fp64().T
    assert hidden.abs().mean() > 100
    exact = torch.stack([activated(row, case.options) for row in hidden]) @ case.parts2[0].dequantize_fp64().T * weights
    assert least < (out - exact).norm() / exact.norm() < most


def test_experts_of_other_ranks_are_skipped():
    expert_map = torch.full((20,), -1, dtype=torch.int32)
    expert_map[[0, 4, 9, 12, 19]] = torch.tensor([1, 0, 4, 2, 3], dtype=torch.int32)
    case = Case(tokens=30, options={"expert_map": expert_map})
    ids = choices(3, 30, 3, 20)
    assert len(set(ids.flatten().tolist())) > 15
    assert_by_definition(case, topk_ids=ids)
    ids[0], ids[1, 1], ids[2, 2] = -1, 20, 2**40
    assert_by_definition(case, topk_ids=ids)


def test_an_addend_is_added_once():
    g = builders.generator(9)
    addend = torch.randn((9, 72 + 8), generator=g)[:, 8:]
    case = Case(options={"addend": addend})
    assert_by_definition(case)
    nobody = torch.full((9, 3), -1)
    assert builders.same_bits(fused_experts(*case.replaced(topk_ids=nobody), **case.options), addend.contiguous())


def test_no_tokens():
    case = Case(tokens=0)
    assert fused_experts(*case.arguments, **case.options).shape == (0, 72)


def test_out_is_written_and_returned():
    case = Case()
    whole = torch.full((9, 72 + 8), 7.0)
    out = whole[:, :72]
    assert fused_experts(*case.arguments, **case.options, out=out) is out
    assert builders.same_bits(out.contiguous(), fused_experts(*case.arguments, **case.options))
    assert bool((whole[:, 72:] == 7).all())


@pytest.mark.parametrize(
    "mode, dtype, rotation", builders.two_thirds(MODES, [torch.bfloat16, torch.float32], [0, 128]), ids=str
)
def test_the_launches_one_by_one_are_the_reference(monkeypatch, mode, dtype, rotation):
    """The way of CUDA tensors, each step by what it runs on the CPU."""
    g = builders.generator(3)
    expert_map = torch.tensor([4, -1, 2, 0, 1, 3, -1], dtype=torch.int32)
    sizes = {"k": 128, "inter": 128} if rotation else {}
    case = Case(dtype=dtype, mode=mode, scale=1.0, options={"rotation": rotation}, **sizes)
    x, w13, w2, _, weights = case.arguments
    options = {
        "bias13": torch.randn((5, 2 * case.inter), generator=g),
        "bias2": torch.randn((5, 72), generator=g),
        "addend": torch.randn((9, 72), generator=g).to(dtype),
    }
    ids, (lhs_dtype, affine) = choices(4, 9, 3, 7), MODES[mode]
    gate = Gate("swiglu_oai", "interleaved", 7.0, 1.702)
    tokens = activation_of(lhs_dtype, "token", affine, rotation=rotation)
    layer = ExpertsCall(x, w13, w2, ids, weights, gate, tokens, expert_map, **options)
    out, gathered = torch.empty((2, 9, 72), dtype=dtype)
    launch(layer, out)
    monkeypatch.setattr("jitgemm.moe.route.GATHER_M", 1)
    launch(layer, gathered)
    assert builders.same_bits(out, gathered)
    options |= {"activation": "swiglu_oai", "order": "interleaved", "limit": 7.0, "expert_map": expert_map}
    options |= {"rotation": rotation}
    expected = fused_experts(x, w13, w2, ids, weights, lhs_dtype=lhs_dtype, affine=affine, **options)
    assert float((out - expected).double().norm() / expected.double().norm()) < (4e-3 if dtype.itemsize == 2 else 1e-3)


def test_lhs_dtype_is_what_the_weights_were_packed_for():
    case = Case(group_size=builders.PER_CHANNEL)
    w13, w2 = (
        jitgemm.W4Weight.stacked(
            5,
            lambda e: jitgemm.pack_w4(parts[e].q, parts[e].scale, group_size=parts[e].group_size, lhs_dtype=torch.int8),
        )
        for parts in (case.parts13, case.parts2)
    )
    assert w13.format.order == "s8"
    arguments = case.replaced(w13=w13, w2=w2)
    expected = fused_experts(*case.arguments, lhs_dtype=torch.int8)
    assert builders.same_bits(fused_experts(*arguments), expected)
    assert not builders.same_bits(fused_experts(*case.arguments), expected)  # e4m3, where both go
    with pytest.raises(TypeError, match="w13: expected lhs_dtype int8, for which w13 was packed .*, got float8_e4m3fn"):
        fused_experts(*arguments, lhs_dtype=torch.float8_e4m3fn)


def test_workspace_bytes_are_documented():
    """As the formula in its docstring says, for sizes that are all multiples of 512 bytes."""
    w13, w2, wide = (
        jitgemm.W4Weight.stacked(127, lambda e, one=builders.weight_parts(1, n, 512).packed: one)
        for n in (1024, 512, 1536)
    )
    m = 128 * 2
    expected = 2 * m * 1024 + m * 512 + 128 * 512 + 4 * (3 * m + 128 + 128)
    assert fused_experts_workspace_bytes(128, 2, w13, w2) == expected
    affine = fused_experts_workspace_bytes(128, 2, w13, w2, dtype=torch.float32, affine=True)
    assert affine == expected + 2 * m * 1024 + 4 * (m + 128)
    block = fused_experts_workspace_bytes(128, 2, w13, w2, scheme="block")
    assert block == expected + 3 * 4 * (m + 128)  # four scales a row
    tokens, m = 4064, 127 * 128  # one quantised row for each choice
    expected = 2 * m * 1024 + m * 512 + m * 512 + 4 * (4 * m + 128)
    assert fused_experts_workspace_bytes(tokens, 4, w13, w2) == expected
    assert fused_experts_workspace_bytes(tokens, 4, w13, wide) == expected + 2 * m * 512  # the second result is wider


# ---- checks ---------------------------------------------------------------------------------------------------------

CASE = Case()
DENSE = CASE.parts2[0].packed


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "x: expected shape [rows, 64], got [9, 32]", {"x": torch.zeros(9, 32)}),
        (ValueError, "x: expected a row stride that is a multiple of 4 elements", {"x": torch.zeros(9, 66)[:, :64]}),
        (TypeError, "w13: expected a W4Weight or W8Weight of experts, got Tensor", {"w13": torch.zeros(5, 8, 64)}),
        (ValueError, "w2: expected a weight of experts, got a dense one", {"w2": DENSE}),
        (ValueError, "w13: expected n = 192, twice the k of w2, got 72", {"w13": CASE.arguments[2]}),
        (ValueError, "w2: expected 5 experts, as w13 has, got 2", {"w2": Case(experts=2).arguments[2]}),
        (ValueError, "topk_ids: expected shape [tokens, top_k]", {"topk_ids": torch.zeros(9).long()}),
        (ValueError, "topk_ids: expected shape [tokens, top_k]", {"topk_ids": torch.zeros(9, 0).long()}),
        (ValueError, "topk_ids: expected shape [9, top_k], got [8, 3]", {"topk_ids": torch.zeros(8, 3).long()}),
        (ValueError, "topk_ids: expected a contiguous tensor", {"topk_ids": torch.zeros(9, 6).long()[:, ::2]}),
        (ValueError, "topk_weights: expected a contiguous tensor of shape [9, 3]", {"topk_weights": torch.ones(9, 2)}),
        (ValueError, "activation: expected one of ('silu', 'gelu', 'gelu_tanh'", {"activation": "relu"}),
        (ValueError, "order: expected one of ('gate_up', 'up_gate', 'interleaved'), got 'ug'", {"order": "ug"}),
        (ValueError, "limit: expected a positive number, got -1", {"limit": -1.0}),
        (ValueError, "limit: expected a positive number, got nan", {"limit": float("nan")}),
        (ValueError, "alpha: expected a positive number, got 0", {"alpha": 0}),
        (ValueError, "alpha: expected a number for situ, got None", {"activation": "situ"}),
        (ValueError, "alpha: expected a finite number for situ, got inf", {"activation": "situ", "alpha": math.inf}),
        (ValueError, "limit: expected a number of 2^-64 to 2^64 for situ", {"activation": "situ", "alpha": 1, "limit": 1e30}),
        (ValueError, "limit: expected the default, as relu2 has no gates", {"activation": "relu2", "limit": 1.0}),
        (ValueError, "order: expected the default, as relu2 has no gates", {"activation": "relu2", "order": "up_gate"}),
        (ValueError, "w13: expected n = 96, the k of w2, got 192", {"activation": "relu2"}),
        (TypeError, "lhs_dtype: expected float8_e4m3fn or int8, got uint8", {"lhs_dtype": torch.uint8}),
        (ValueError, "affine: expected lhs_dtype int8", {"affine": True, "lhs_dtype": torch.float8_e4m3fn}),
        (ValueError, "affine: expected False for scheme 'block', got True", {"affine": True, "scheme": "block"}),
        (ValueError, "scheme: expected one of ('token', 'block'), got 'tensor'", {"scheme": "tensor"}),
        (ValueError, "rotation: expected 0 or 128, got 64", {"rotation": 64}),
        (ValueError, "rotation: expected 0, as w13 has, got 128", {"rotation": 128}),
        (ValueError, "w13: expected k to be a multiple of 128 with a rotation, got 64",
         {"rotation": 128, "w13": Case().arguments[1].packed, "w2": Case().arguments[2].packed}),
        (ValueError, "expert_map: expected shape [global_experts], 1 to 8192", {"expert_map": torch.zeros(2, 2).int()}),
        (ValueError, "expert_map: expected shape [global_experts]", {"expert_map": torch.zeros(8193).int()}),
        (ValueError, "bias13: expected a contiguous tensor of shape [5, 192]", {"bias13": torch.zeros(192)}),
        (TypeError, "bias2: expected bfloat16 or float32, got float16", {"bias2": torch.zeros(5, 72).half()}),
        (ValueError, "addend: expected shape [9, 72], got [9, 64]", {"addend": torch.zeros(9, 64)}),
        (ValueError, "out: expected shape [9, 72], got [8, 72]", {"out": torch.zeros(8, 72)}),
        (ValueError, "out: expected a tensor that does not require grad", {"out": torch.zeros(9, 72).requires_grad_()}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(error, message, change):
    options = {"lhs_dtype": torch.int8} | {
        name: value for name, value in change.items() if name not in ("x", "w13", "w2", "topk_ids", "topk_weights")
    }
    for _ in range(2):  # the second call has met the layer before
        with pytest.raises(error, match=re.escape(message)):
            fused_experts(*CASE.replaced(**change), **options)
        fused_experts(*CASE.arguments, lhs_dtype=torch.int8)


@pytest.mark.parametrize("experts", [0, 1025, True, 2.0])
def test_routing_checks_the_number_of_experts(experts):
    with pytest.raises((TypeError, ValueError), match="experts: expected"):
        route(torch.zeros(1, 1).long(), experts)


# ---- the op ---------------------------------------------------------------------------------------------------------


def test_opcheck_passes():
    case = Case()
    x, w13, w2, ids, weights = case.arguments
    parts = [(w.blocks, w.channel_scale, w.row_sum, w.n, w.k, w.format.name) for w in (w13, w2)]
    for limit, addend in ((None, None), (7.0, torch.ones(9, 72))):
        arguments = (
            x, *parts[0], *parts[1], ids, weights, "silu", "gate_up", limit, 1.702, torch.int8, False, None, None, None,
            addend, False,
        )  # fmt: skip
        assert set(torch.library.opcheck(OP, arguments).values()) == {"SUCCESS"}


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 32, 33, 64, 1024, 2048, 2049, 32768, 1_000_003, 2**31 - 1])
@pytest.mark.parametrize("experts", [1, 8, 256, MAX_EXPERTS])
def test_a_routing_s_runs_cover_its_choices(choices, experts):
    spec = route_spec(choices)
    threads = route_threads(spec, choices, experts)
    run, smem = route_launch(threads, spec.ctas, choices, experts, MAX_GLOBAL_EXPERTS)
    assert threads % 32 == 0 and threads <= 1024 and run % 32 == 0
    assert spec.ctas * (threads // 32) * run >= choices > (spec.ctas * (threads // 32) - 1) * (run - 32)
    assert smem + 128 <= 227 * 1024


GATE_SPECS = dict.fromkeys(
    quantize_spec(k, x, "s8", affine=affine, gate=Gate(kind, order, limit))
    for k, x in ((768, "bf16"), (2048, "bf16"), (16384, "bf16"), (32768, "bf16"), (1024, "fp32"), (16384, "fp32"))
    for affine in (True,)
    for kind in GATE_KINDS
    for order, limit in (("gate_up", float("inf")), ("up_gate", 7.0), ("interleaved", 7.0))[
        : 1 if kind == "relu2" else 3
    ]
)
FRONTS = ((2048, "bf16", "e4m3", False), (16384, "fp32", "s8", True), (7168, "fp16", "s8", False))
SPECS = [RouteSpec(1), RouteSpec(CLUSTER)]
SPECS += [route_quantize_spec(8, k, x, q, affine) for k, x, q, affine in FRONTS]
SPECS += [quantize_spec(k, x, "s8", affine=True, gathered=True) for k, x in ((768, "bf16"), (7168, "fp32"))]
SPECS += [quantize_spec(32800, "bf16", "s8", affine=True, gathered=True)]
SPECS += [*exchange_specs(2048, "bf16", "e4m3"), *exchange_specs(16384, "fp32", "s8", affine=True)[1:2]]
SPECS += [CollectSpec("fp32"), dispatch_spec(1, 7168, "fp16", "e4m3", affine=False, block=True)]
SPECS += [route_quantize_spec(64, 7168, "bf16", "e4m3", False, True)]
SPECS += [route_quantize_spec(8, k, "bf16", "s8", False, block, True) for k in (4096, 16384) for block in (False, True)]
SPECS += [*exchange_specs(16384, "bf16", "s8", affine=True, rotated=True)[:2]]
SPECS += [dispatch_spec(1, 7168, "fp32", "e4m3", affine=False, block=True, rotated=True)]
SPECS += [CombineSpec(row, out) for row, out in (("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "bf16"))]


def test_gates_have_kernels_of_their_own():
    assert len({spec.label for spec in GATE_SPECS}) == len(GATE_SPECS)
    assert len({quantize_source(spec).source for spec in GATE_SPECS}) == len(GATE_SPECS)
    with pytest.raises(ValueError, match="gate: expected a kind of"):
        quantize_spec(64, "bf16", "s8", gate=Gate("relu"))
    with pytest.raises(ValueError, match="gate: expected neither order, limit nor alpha of relu2"):
        quantize_spec(64, "bf16", "s8", gate=Gate("relu2", limit=7.0))


def test_a_layer_s_kernels_are_the_same_for_any_numbers_of_tokens_and_choices():
    gate = Gate("swiglu_oai", "interleaved", 7.0, 1.702)
    for k in (2880, 20000):
        specs = layer_specs(k, 2880, "bf16", "s8", gate, affine=True)
        for count in (1, 8, 2048, 2049, 10**6):
            routed = route_quantize_spec(count, k, "bf16", "s8", True)
            assert (routed is None) == (count > 2048 or k > 16384)
            first = (routed,) if routed else (route_spec(count), quantize_spec(k, "bf16", "s8", affine=True))
            assert set(first) <= set(specs)
        assert quantize_spec(2880, "bf16", "s8", affine=True, gate=gate) in specs
        rotating = layer_specs(4096, 2048, "bf16", "s8", gate, rotated=True, masked=True)
        assert all("rotated" in spec.label for spec in rotating if "quantize" in spec.label)
        assert any(isinstance(spec, RouteQuantizeSpec) for spec in specs) == (k == 2880)
    assert len({spec.label for spec in SPECS}) == len(SPECS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> KernelCache:
    return KernelCache([tmp_path_factory.mktemp("kernels")])


@pytest.mark.nvrtc
@pytest.mark.parametrize("spec", [*SPECS, *GATE_SPECS][::3], ids=lambda spec: spec.label)
def test_compiles_for_sm_90a_without_spills_or_warnings(cache, compiles_without_warnings, spec):
    entry, compiled = cache.get_or_compile(source_of(spec))
    assert compiled and entry.cubin.startswith(b"\x7fELF")
    compiles_without_warnings(entry)
