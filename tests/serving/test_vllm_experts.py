"""What vLLM does to experts beyond loading and calling them: biases, EPLB, LoRA; on stand-ins, or on the real vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import dequantized
from vllm_cases import (
    BF16,
    CONFIGS,
    SHARDS,
    TWO,
    applied,
    expert_tensors,
    load_experts,
    made,
    mixture,
    packed_module,
    routed,
    saved_experts,
    vllm_is_there,
    workspaces,
)  # fmt: skip
from vllm_kernels import Kernels
from vllm_layers import experts, rank

from jitgemm.activations.scheme import Gate

__all__ = ["vllm_is_there", "workspaces"]
SIZES = (4, 64, 64)


def layer_of(name, tensors, sizes=SIZES, options=None, **more):
    """Packed experts of a checkpoint in this format."""
    with rank():
        layer = experts(made(CONFIGS[name], options), "m.experts", sizes, 2, **more)
        load_experts(layer, "m.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


# ---- biases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed", "gptq", "awq", "fp8", "fp8-blocks", "int8-quantized"])
@pytest.mark.parametrize("split", ["tp", "ep"])
def test_biases_of_experts_are_the_files_on_every_rank(name, split):
    inter = 256 if name == "fp8-blocks" else 64
    tensors, _ = expert_tensors(CONFIGS[name], 4, 64, inter)
    biases = {(e, proj): torch.randn(64 if proj == "down_proj" else inter, dtype=BF16) for e, proj in tensors}
    for key, bias in biases.items():
        tensors[key]["bias"] = bias
    ranks = [layer_of(name, tensors, (4, 64, inter), has_bias=True, **{split: place}).jitgemm for place in TWO]
    first, second = ([getattr(module, part).bias for module in ranks] for part in ("w13", "w2"))
    gate, up, down = (torch.stack([biases[e, proj] for e in range(4)]) for proj in SHARDS)
    if split == "ep":
        assert torch.equal(torch.cat(first), torch.cat([gate, up], 1)) and torch.equal(torch.cat(second), down)
        return
    halves = [torch.cat([gate.chunk(2, 1)[number], up.chunk(2, 1)[number]], 1) for number in range(2)]
    assert all(map(torch.equal, first, halves))
    assert torch.equal(second[0], down) and second[1] is None  # ranks' results are summed


def test_an_expert_without_its_bias_is_an_error():
    tensors, _ = expert_tensors(CONFIGS["packed"], *SIZES)
    for key in list(tensors)[:-1]:
        tensors[key]["bias"] = torch.zeros(64, dtype=BF16)
    with pytest.raises(ValueError, match="w2_bias: expected numbers .* for number 3's down_proj"):
        layer_of("packed", tensors, has_bias=True)


# ---- EPLB ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed", "packed-channel", "packed-int8", "mxfp4", "gptq", "fp8", "fp8-blocks"])
def test_ranks_that_swap_rows_swap_experts(name):
    """Of two ranks whose experts have other values, and had other formats without EPLB."""
    inter = 256 if name == "fp8-blocks" else 64
    sizes = (4, 64, inter)
    tensors, dense = expert_tensors(CONFIGS[name], *sizes)
    if name == "packed":
        for (e, proj), found in tensors.items():
            if e >= 2:  # codes without -8, which other kernels take
                found["weight_packed"] = torch.full_like(found["weight_packed"], 0x5A5A5A5A)
                q = torch.tensor([2, -3], dtype=torch.int8).repeat(64, 32)
                dense[e, proj] = dequantized(q, found["weight_scale"], None)
    layers = [layer_of(name, tensors, sizes, ep=place, eplb=0) for place in TWO]
    addresses = [row.data_ptr() for layer in layers for row in layer.get_expert_weights()]
    x, ids, weights = routed(4, tokens=5)
    before = [applied(layer, x, ids, weights) for layer in layers]

    def assert_experts(*physical):
        for e, logical in enumerate(physical):
            module = layers[e // 2].jitgemm
            parts = [module.w13.weight[e % 2].dequantize(), module.w2.weight[e % 2].dequantize()]
            gate, up, down = (dense[logical, proj] for proj in SHARDS)
            assert torch.equal(parts[0].double(), torch.cat([gate, up])) and torch.equal(parts[1].double(), down)

    assert_experts(0, 1, 2, 3)
    mine, others = (list(layer.get_expert_weights()) for layer in layers)
    assert [(row.shape, row.dtype) for row in mine] == [(row.shape, row.dtype) for row in others]
    for a, b in zip(mine, others):
        a[0], b[1] = b[1].clone(), a[0].clone()
    assert_experts(3, 1, 2, 0)
    swapped = torch.tensor([3, 1, 2, 0])[ids.long()].int()  # by the physical experts' numbers
    after = [applied(layer, x, swapped, weights) for layer in layers]
    total = [sum(each.double() for each in results) for results in (before, after)]
    expected = mixture(x, ids, weights, dense)
    assert (total[0] - expected).norm() < 0.06 * expected.norm()
    assert (total[0] - total[1]).norm() < 0.01 * total[0].norm()  # sums of ranks are rounded in other places
    one = torch.tensor([[0], [3]], dtype=torch.int32)
    moved = applied(layers[0], x[:1], one[:1], torch.ones(1, 1))
    alone = layer_of(name, tensors, sizes, ep=(1, 2), eplb=0)
    assert torch.equal(moved, applied(alone, x[:1], one[1:], torch.ones(1, 1)))
    assert addresses == [row.data_ptr() for layer in layers for row in layer.get_expert_weights()]


@pytest.mark.parametrize("kind", ["checkpoint", "saved"])
def test_redundant_experts_begin_as_the_first_ones(tmp_path, kind):
    if kind == "saved":
        whole = packed_module()
        config = saved_experts(tmp_path, whole)
        with rank():
            layers = [experts(config, "m.experts", (4, 128, 384), 2, ep=place, eplb=2) for place in TWO]
            for layer in layers:
                layer.quant_method.process_weights_after_loading(layer)
        expected = whole.w2.weight.dequantize()
    else:
        tensors, dense = expert_tensors(CONFIGS["packed"], *SIZES)
        physical = tensors | {(e + 4, proj): tensors[e, proj] for e in range(2) for proj in SHARDS}
        layers = [layer_of("packed", physical, ep=place, eplb=2) for place in TWO]
        expected = torch.stack([dense[e, "down_proj"] for e in range(4)]).float()
    found = torch.cat([layer.jitgemm.w2.weight.dequantize() for layer in layers])
    assert torch.equal(found, expected[[0, 1, 2, 3, 0, 1]])


def test_experts_that_move_are_added_up_in_fp32(caplog):
    tensors, _ = expert_tensors(CONFIGS["packed"], *SIZES)
    layer = layer_of("packed", tensors, options={"sums": "f16"}, ep=(0, 2), eplb=0)
    assert layer.jitgemm.sums == "f32" and layer.quant_method.supports_eplb


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def context(experts_here, hidden, inter, gates=2, rank=8):
    """One adapter for all tokens, as vLLM's layer sets it."""
    torch.manual_seed(3)

    def pair(n, k):
        return torch.randn(1, experts_here, rank, k, dtype=BF16) / k**0.5, torch.randn(
            1, experts_here, n, rank, dtype=BF16
        ) / 2

    first, second = zip(*(pair(inter, hidden) for _ in range(gates)))
    a2, b2 = pair(hidden, inter)
    return SimpleNamespace(
        w13_lora_a_stacked=first, w13_lora_b_stacked=second, w2_lora_a_stacked=(a2,), w2_lora_b_stacked=(b2,),
        adapter_enabled=torch.ones(2, dtype=torch.int32), max_loras=1, top_k=2, w13_num_slices=gates,
        fully_sharded=False, tp_rank=0, tp_size=1, local_num_experts=experts_here, punica_wrapper=Kernels(experts_here),
        use_tuned_config=False, enable_moe_shared_loras=False, aux_stream=None, events=None,
        local_token_lora_mapping=None, original_hidden_states=None,
    )  # fmt: skip


def with_adapter(dense, ctx, first=0, count=4):
    """Experts' weights with the adapter's products added."""
    found = dict(dense)
    for e in range(count):
        for number, proj in enumerate(("gate_proj", "up_proj")):
            a, b = ctx.w13_lora_a_stacked[number][0, e], ctx.w13_lora_b_stacked[number][0, e]
            found[first + e, proj] = dense[first + e, proj] + b.double() @ a.double()
        a, b = ctx.w2_lora_a_stacked[0][0, e], ctx.w2_lora_b_stacked[0][0, e]
        found[first + e, "down_proj"] = dense[first + e, "down_proj"] + b.double() @ a.double()
    return found


@pytest.mark.parametrize("name", ["packed", "fp8"])
@pytest.mark.parametrize("place", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize("tokens", [3, 20])
def test_experts_with_an_adapter_compute_the_sum_of_both(workspaces, name, place, tokens):
    tensors, dense = expert_tensors(CONFIGS[name], *SIZES)
    options = {} if place is None else {"ep": place}
    layer = layer_of(name, tensors, more={"is_lora_enabled": True}, **options)
    here = 4 if place is None else 2
    ctx = context(here, 64, 64)
    kernel = layer.quant_method.moe_kernel.fused_experts
    assert kernel.supports_lora() and layer.w2_weight.shape[0] == layer.w13_weight.shape[0] == here
    x, ids, weights = routed(4, tokens)
    with rank():
        without = applied(layer, x, ids, weights)
        kernel.set_lora_context(ctx)
        found = applied(layer, x, ids, weights).double()
    assert torch.equal(without, layer.jitgemm.run(x, ids, weights, expert_map=layer.expert_map))
    first = 0 if place is None else 2 * place[0]
    mine = (ids >= first) & (ids < first + here)
    expected = mixture(x, ids, weights * mine, with_adapter(dense, ctx, first, here))
    assert (found - expected).norm() < 0.06 * expected.norm()
    assert (found - without.double()).norm() > 0.15 * expected.norm()


def test_an_adapter_of_zeros_changes_no_bit(workspaces):
    tensors, _ = expert_tensors(CONFIGS["packed"], *SIZES)
    layer = layer_of("packed", tensors, more={"is_lora_enabled": True})
    ctx = context(4, 64, 64)
    for each in (*ctx.w13_lora_b_stacked, *ctx.w2_lora_b_stacked):
        each.zero_()
    x, ids, weights = routed(4, 9)
    with rank():
        without = applied(layer, x, ids, weights)
        layer.quant_method.moe_kernel.fused_experts.set_lora_context(ctx)
        assert torch.equal(applied(layer, x, ids, weights), without)


def test_saved_experts_with_gates_in_another_order_take_no_adapters(tmp_path):
    config = saved_experts(tmp_path, packed_module(gate=Gate("silu", "interleaved")))
    with rank():
        layer = experts(config, "m.experts", (4, 128, 384), 2, more={"is_lora_enabled": True})
        with pytest.raises(ValueError, match="m.experts.gate: expected order gate_up with LoRA.*, got interleaved"):
            layer.quant_method.process_weights_after_loading(layer)
