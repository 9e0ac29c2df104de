"""Experts of vLLM's whose gate is another than SiLU, or that have none, against the dequantised mixture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from moe_cases import activated
from vllm_cases import CONFIGS, EXPERTS, SHARDS, applied, expert_tensors, load_experts, made, routed, saved_experts
from vllm_cases import vllm_is_there as vllm_is_there
from vllm_layers import experts, rank

from jitgemm.activations.scheme import Gate
from jitgemm.nn.layers.experts import packed_experts

GATES = {
    "swiglustep": (Gate("swiglu_step", limit=7.0), {}, {"activation": "swiglu_step", "limit": 7.0}),
    "situ": (
        Gate("situ", limit=25.0, alpha=4.0),
        {"more": {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}},
        {"activation": "situ", "alpha": 4.0, "limit": 25.0},
    ),
    "relu2_no_mul": (Gate("relu2"), {}, {"activation": "relu2"}),
}
"""By vLLM's name: the gate, more of the layer, and the call's options."""


def layer_of(config, name, sizes, **options):
    from vllm.model_executor.layers.fused_moe import MoEActivation

    if name not in {each.value for each in MoEActivation}:
        pytest.skip(f"a vLLM without {name}")
    return experts(
        config, options.pop("called", "m.mlp.experts"), sizes, 2, activation=name, **GATES[name][1], **options
    )


@pytest.mark.parametrize("form", ["packed", "fp8", "fp8-blocks"])
@pytest.mark.parametrize("split", ["whole", "tp", "ep"])
@pytest.mark.parametrize("name", GATES)
def test_experts_of_all_ranks_add_up_to_the_dequantised_mixture(name, split, form):
    gate, _, options = GATES[name]
    tensors, dense = expert_tensors(CONFIGS[form], 4, 64, 256)
    if gate.inputs == 1:  # the files have up and down; vLLM's loader calls up w1
        tensors = {at: tensor for at, tensor in tensors.items() if at[1] != "up_proj"}
    x, ids, weights = routed(4)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for place in [(0, 1)] if split == "whole" else [(0, 2), (1, 2)]:
        with rank():
            layer = layer_of(made(CONFIGS[form]), name, (4, 64, 256), **({} if split == "whole" else {split: place}))
            load_experts(layer, "m.mlp.experts", tensors)
            layer.quant_method.process_weights_after_loading(layer)
        assert layer.jitgemm.gate == gate and not list(layer.parameters())
        total += applied(layer, x, ids, weights).double()
    expected = torch.zeros_like(total)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t].double()):
            w1, w3, w2 = (dense[expert, proj] for proj in SHARDS)
            hidden = torch.cat([w1, w3][: gate.inputs]) @ x[t].double()
            expected[t] += weight * (w2 @ activated(hidden, options))
    assert (total - expected).norm() < 0.06 * expected.norm()


def test_an_expert_without_gates_that_no_file_holds_is_named():
    tensors, _ = expert_tensors(CONFIGS["packed"], 2, 64, 64)
    tensors = {at: tensor for at, tensor in tensors.items() if at[1] != "up_proj" and at != (1, "gate_proj")}
    with rank():
        layer = layer_of(made(CONFIGS["packed"]), "relu2_no_mul", (2, 64, 64))
        load_experts(layer, "m.mlp.experts", tensors)
        with pytest.raises(ValueError, match="found none in the files for number 1's up_proj"):
            layer.quant_method.process_weights_after_loading(layer)


def test_situ_without_its_beta_is_an_error():
    tensors, _ = expert_tensors(CONFIGS["packed"], 2, 64, 64)
    with rank():
        layer = layer_of(made(CONFIGS["packed"]), "situ", (2, 64, 64))
        load_experts(layer, "m.mlp.experts", tensors)
        layer.quant_method.moe = SimpleNamespace(**{**vars(layer.moe_config), "activation_situ_beta": None})
        with pytest.raises(
            ValueError, match="activation_situ_beta: expected a number for the activation situ, got None"
        ):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("split, size", [("tp", 1), ("tp", 2), ("tp", 4), ("ep", 2)])
def test_a_saved_model_s_experts_without_gates_hold_the_rank_s_part(tmp_path, split, size):
    w13, w2 = EXPERTS["4 bits"](4, 384, 128), EXPERTS["4 bits"](4, 128, 384)
    whole = packed_experts(w13, w2, gate=Gate("relu2"))
    config, found = saved_experts(tmp_path, whole), []
    for number in range(size):
        with rank():
            layer = layer_of(config, "relu2_no_mul", (4, 128, 384), called="m.experts", **{split: (number, size)})
            layer.quant_method.process_weights_after_loading(layer)
        found.append(layer.jitgemm)
    first, second = ([part.weight.dequantize() for part in parts] for parts in zip(*((m.w13, m.w2) for m in found)))
    dims = (0, 0) if split == "ep" else (1, 2)
    assert torch.equal(torch.cat(first, dims[0]), w13.dequantize()) and torch.equal(
        torch.cat(second, dims[1]), w2.dequantize()
    )
