"""W4A8Experts on the CPU."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from nn_experts import GATES, HIDDEN, INTER, LAYERS, WIDTHS, E, experts, experts_of_8_bits, routed, weight
from small_models import same_state

import jitgemm
from jitgemm.moe.exchange import dispatch_spec, exchange_specs
from jitgemm.moe.kernel import layer_specs
from jitgemm.nn import ACTIVATIONS, PackedExperts, W4A8Experts, W8A8Experts
from jitgemm.nn.layers.packed import LHS_DTYPES
from jitgemm.nn.layers.sharding import ExpertSharding
from jitgemm.nn.warm import warm
from jitgemm.nn.warm.warm import warmup
from jitgemm.select.choose import kernels_for
from jitgemm.select.devices import device_spec

# ---- the layer -------------------------------------------------------------------------------------------------------


def by_hand(layer: PackedExperts, *routed: torch.Tensor) -> torch.Tensor:
    """What forward is defined as."""
    x, ids, weights = routed
    gate, w13, w2 = layer.gate, layer.w13, layer.w2
    options = {"activation": gate.kind, "order": gate.order, "limit": gate.limit, "alpha": gate.alpha}
    options |= {"lhs_dtype": LHS_DTYPES[layer.activation], "affine": layer.activation == "int8_affine"}
    options |= {"scheme": "block" if layer.activation.endswith("_block") else "token"}
    options |= {"bias13": w13.bias, "bias2": w2.bias}
    return jitgemm.fused_experts(x, w13.weight, w2.weight, ids, weights, **options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_forward_is_the_call_of_its_parts(name, activation):
    layer = LAYERS[name](activation=activation)
    assert type(layer) is {"(8, 8)": W8A8Experts, "(4, 8)": PackedExperts, "(8, 4)": PackedExperts}.get(
        name, W4A8Experts
    )
    x, ids, weights = routed()
    out = layer(x, ids, weights)
    assert out.shape == x.shape and out.dtype == x.dtype and torch.equal(out, by_hand(layer, x, ids, weights))


def test_tokens_keep_their_leading_dimensions_and_ids_outside_are_skipped():
    layer = experts()
    x, ids, weights = routed(2, 6)
    assert torch.equal(layer(x.view(2, 3, HIDDEN), ids, weights), layer(x, ids, weights).view(2, 3, HIDDEN))
    ids[1], ids[3, 0], ids[4, 1] = E, -1, E + 3
    out = layer(x, ids, weights)
    assert not out[1].any() and torch.equal(out, by_hand(layer, x, ids, weights))


def test_compilers_take_it_whole():
    arguments = routed()
    for layer in (experts(bias=True), experts_of_8_bits("e4m3", 4, 8)):
        torch._dynamo.reset()
        expected = layer(*arguments)
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(*arguments), expected)
    assert torch.equal(torch.export.export(layer, arguments).module()(*arguments), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x[:, :32], r"hidden_states: expected shape \[\.\.\., 64\], got \[9, 32\]"),
        (lambda x: x.double(), "hidden_states: expected bfloat16, float16 or float32, got float64"),
        (lambda x: x.requires_grad_(), "hidden_states: expected a tensor that does not require grad.*no_grad"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    x, ids, weights = routed()
    with pytest.raises((TypeError, ValueError), match=message):
        experts()(change(x), ids, weights)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"w13": weight(1, 2 * INTER, HIDDEN)[0]}, "w13: expected a weight of several experts, got W4Weight"),
        ({"w13": weight(1, INTER, HIDDEN)}, "w13: expected n = 192, twice the k of w2, got 96"),
        ({"w2": weight(1, 2 * HIDDEN, INTER)}, "w2: expected n = 64, as w13 has columns, got 128"),
        ({"bias13": torch.zeros(E, INTER)}, r"bias: expected shape \[4, 192\], got \[4, 96\]"),
        ({"activation": "fp8"}, "activation: expected one of e4m3, int8, int8_affine, e4m3_block, int8_block, got"),
    ],
)
def test_wrong_parts_are_named(change, message):
    layer = experts()
    with pytest.raises(ValueError, match=message):
        W4A8Experts(**{"w13": layer.w13.weight, "w2": layer.w2.weight} | change)


KINDS = {
    "bias": lambda: experts(GATES["gpt-oss"], bias=True),
    "zero points": lambda: experts(GATES["gpt-oss"], zero_point=True),
    **{str(widths): partial(experts_of_8_bits, "int8", *widths) for widths in WIDTHS[:2]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_copies_and_pickles_hold_the_same_layer(kind):
    layer = KINDS[kind]()
    tensors = layer.state_dict(prefix="mlp.experts.")
    for other in (
        PackedExperts.from_state_dict(tensors, "mlp.experts."),
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer).bfloat16().half(),
    ):
        assert type(other) is type(layer) and same_state(other, layer) and other.gate == layer.gate
        assert torch.equal(other(*routed()), layer(*routed()))
    assert layer.to("meta").w13.weight.device.type == "meta" and list(layer.parameters()) == []


def test_a_state_dict_is_loaded_and_another_layers_refused():
    layer, other = experts(), W4A8Experts(weight(20, 2 * INTER, HIDDEN), weight(30, HIDDEN, INTER))
    other.load_state_dict(layer.state_dict())
    assert same_state(other, layer) and torch.equal(other(*routed()), layer(*routed()))
    for change, message in (
        ({"gate": GATES["gpt-oss"]}, "gate: expected Gate"),
        ({"activation": "int8"}, "w13.activation_type: expected"),
        ({"zero_point": True}, "w13.meta: expected"),
    ):
        with pytest.raises(RuntimeError, match=message):
            experts(**change).load_state_dict(layer.state_dict())
    tensors = layer.state_dict()
    with pytest.raises(RuntimeError, match="Missing key.*gate"):
        other.load_state_dict({name: x for name, x in tensors.items() if name != "gate"})
    with pytest.raises(ValueError, match="'gate', found none"):
        W4A8Experts.from_state_dict({name: x for name, x in tensors.items() if name != "gate"})


def needed(layer: W4A8Experts, rows: int, x: str, lhs: str, affine: bool) -> set[str]:
    found = list(layer_specs(HIDDEN, INTER, x, lhs, layer.gate, affine=affine))
    for each in (layer.w13.weight, layer.w2.weight):
        found += kernels_for(each.n, each.k, lhs, each.format, device_spec("h200"), rows, out=x, experts=E)
    return {spec.label for spec in found}


@pytest.mark.nvrtc
def test_warmup_compiles_routing_quantisers_and_grouped_gemms_once(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "cache"))
    layer = experts(GATES["gpt-oss"], "int8_affine")
    layer.top_k = 2
    model = torch.nn.ModuleList([layer, copy.deepcopy(layer)])
    compiled = warmup(model, 1, dtype=torch.float16, device="h200")
    assert len(compiled) == len(set(compiled)) and set(compiled) == needed(layer, 2, "fp16", "s8", True)
    assert warmup(model, 1, dtype=torch.float16, device="h200") == []


def test_the_warm_up_has_the_kernels_between_ranks_where_tokens_go_over_nvlink():
    layer = experts(GATES["gpt-oss"], "int8_affine")

    def specs() -> set:
        return {spec for spec, *_ in warm.kernels(layer, 8, [torch.float16], "h200") if spec.kind != "gemm"}

    whole = specs()
    layer.split = ExpertSharding(None, 0, 2, E, exchanges=True, max_tokens=8)
    assert specs() == whole
    layer.split = replace(layer.split, nvlink=True)
    between = specs() - whole
    assert between == set(exchange_specs(HIDDEN, "fp16", "s8", affine=True)) and len(between) == 4
    for choices in (1, 2048, 2049, 10**6):
        assert dispatch_spec(choices, HIDDEN, "fp16", "s8", affine=True, block=False) in between


def test_the_warm_ups_rows_are_those_of_all_choices(monkeypatch):
    asked = []
    monkeypatch.setattr(warm, "kernels_for", lambda *arguments, **options: asked.append((arguments[5], options)) or [])
    monkeypatch.setattr(warm, "layer_specs", lambda *arguments, **options: [])
    layer = experts()
    for top_k, rows in ((None, 4 * 100), (2, 200)):
        layer.top_k = top_k
        with pytest.warns(UserWarning, match="holds no layer of jitgemm.nn"):
            assert warmup(layer, 100, dtype=torch.float16, device="h200") == []
        assert [each[0] for each in asked] == [rows, rows] and asked[0][1]["experts"] == E
        asked.clear()
