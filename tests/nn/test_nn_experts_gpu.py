"""W4A8Experts and models with them on a Hopper GPU: against the CPU, after a warm-up, in a graph, memory on the way."""

from __future__ import annotations

import copy
import gc

import builders
import pytest
import torch
from expert_models import MODELS, alike, build, logits
from nn_experts import GATES, LAYERS, TOP_K, E, close, experts, routed
from nn_layers import requested
from small_models import same_state

import jitgemm.nn
from jitgemm.nn import ACTIVATIONS, W4A8Experts
from jitgemm.nn.layers.experts import packed_experts
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.warm.warm import warmup

pytestmark = pytest.mark.gpu


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(tensors):
    return tuple(tensor.cuda() for tensor in tensors)


@pytest.mark.parametrize("name, activation, dtype", builders.third(LAYERS, ACTIVATIONS, DTYPES), ids=str)
def test_the_gpu_gives_the_cpus_results(name, activation, dtype):
    layer = LAYERS[name](activation=activation)
    for tokens in (1, 9, 300):
        arguments = routed(tokens, tokens, dtype=dtype)
        out = copy.deepcopy(layer).cuda()(*on_gpu(arguments))
        assert out.is_cuda and out.dtype == dtype
        assert close(out.cpu(), layer(*arguments), 0.02)


@pytest.mark.parametrize(
    "scheme", [{"bits": 8, "activation": "int8"}, {"bits": 8}, {"scheme": "two-level"}, {"scheme": "mxfp4"}], ids=str
)
def test_rotated_experts_give_the_cpus_results_eager_compiled_and_in_a_graph(scheme):
    recipe = Recipe(rotation=128, **scheme)
    w13, w2 = (torch.randn(E, n, k, generator=builders.generator(k)) / 16 for n, k in ((512, 384), (384, 256)))
    layer = packed_experts(recipe.apply(w13), recipe.apply(w2), activation=recipe.inputs, top_k=TOP_K)
    there = copy.deepcopy(layer).cuda()
    warmup(there, 64, dtype=torch.bfloat16)
    _, ids, weights = routed(tokens=48)
    x = torch.randn(48, 384, generator=builders.generator(3)).bfloat16()
    x[:, 5::96] *= 60
    held = on_gpu((x, ids, weights))
    torch._dynamo.reset()
    compiled, graph = torch.compile(there, fullgraph=True), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = there(*held)
    for seed in (4, 5):
        x = x.roll(seed, 0)
        held[0].copy_(x)
        graph.replay()
        expected = there(*held)
        assert torch.equal(out, expected) and close(expected.cpu(), layer(x, ids, weights), 0.02)
        assert close(compiled(*held).cpu(), expected.cpu(), 0.02)
    torch._dynamo.reset()


def test_moves_and_state_dicts_cross_devices():
    layer = experts(GATES["gpt-oss"], bias=True)
    moved = copy.deepcopy(layer).cuda()
    assert moved.w13.weight.ready and moved.w13.weight.blocks is moved.w13.blocks
    assert same_state(copy.deepcopy(moved).cpu(), layer)
    expected = moved(*on_gpu(routed()))
    moved.w2.blocks.zero_()
    moved.load_state_dict(layer.state_dict())
    assert moved.w2.weight.ready and torch.equal(moved(*on_gpu(routed())), expected)
    fresh = W4A8Experts.from_state_dict({name: tensor.cuda() for name, tensor in layer.state_dict().items()})
    assert torch.equal(fresh(*on_gpu(routed())), expected)


def test_after_the_warm_up_no_routing_compiles_and_a_graph_replays_others(monkeypatch):
    layer = experts(activation="int8").cuda()
    layer.top_k = 2
    warmup(layer, 512, dtype=torch.bfloat16)
    monkeypatch.setenv("JITGEMM_JIT", "off")
    for tokens in (1, 2, 3, 7, 16, 33, 100, 255, 512):
        x, ids, weights = on_gpu(routed(tokens, tokens, dtype=torch.bfloat16))
        for each in (ids, ids % 1, ids - E, torch.full_like(ids, E - 1)):
            layer(x, each, weights)
    x, ids, weights = on_gpu(routed(3, 64, dtype=torch.bfloat16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, ids, weights)
    for seed in (4, 5):
        other = on_gpu(routed(seed, 64, dtype=torch.bfloat16))
        for held, new in zip((x, ids, weights), other):
            held.copy_(new)
        graph.replay()
        assert torch.equal(out, layer(*other))


@pytest.mark.parametrize("name", MODELS)
def test_quantised_models_give_the_cpus_logits(name):
    model = build(name)
    jitgemm.nn.quantize_(model, clip_steps=0, group_size=32, activation="int8")
    other = build(name).cuda()
    jitgemm.nn.quantize_(other, clip_steps=0, group_size=32, activation="int8")
    assert same_state(copy.deepcopy(other).cpu(), model)
    with torch.inference_mode():
        out = other(input_ids=torch.arange(16, device="cuda")[None]).logits
    assert alike(out.cpu(), logits(model))


def test_quantising_experts_takes_the_packed_weight_and_one_expert():
    # Under both of its names: transformers takes the one that is given last.
    count = {"num_experts": 64, "num_local_experts": 64}
    model = build("qwen3", **count, hidden_size=1024, moe_intermediate_size=1024, num_hidden_layers=1)
    path = "model.layers.0.mlp.experts"
    parameters = list(model.get_submodule(path).parameters())
    assert [len(each) for each in parameters] == [64, 64]
    whole, values = sum(each.nbytes for each in parameters), parameters[0][0].numel()
    del parameters
    gc.collect()  # what earlier tests left, which would be freed meanwhile
    torch.cuda.empty_cache()
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    jitgemm.nn.quantize_(model, lambda name, _: name == path, clip_steps=0, device="cuda")
    layer = model.get_submodule(path)
    packed = layer.w13.weight.nbytes + layer.w2.weight.nbytes
    # A value of the expert at work is 4 bytes of fp32, 32 of temporaries, and half a byte packed, twice.
    one = 40 * values
    held, peak = requested() - before, requested("peak") - before
    numbers = f"held {held}, peak {peak}, packed {packed}, one expert {one}, all in fp32 {whole}, before {before}"
    assert packed <= held <= packed + (1 << 16), numbers
    assert packed < peak <= packed + one < whole / 2, numbers
