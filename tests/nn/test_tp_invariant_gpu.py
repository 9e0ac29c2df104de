"""The same bits on one GPU and on two: layers, in CUDA graphs and compiled, and a model that generates."""

from __future__ import annotations

import copy

import builders
import pytest
import ranks
import torch
from invariant_layers import CASES, INVARIANT_PLAN, KINDS, generated, model_of, on_one
from parallel_layers import in_a_graph, x_of
from torch.distributed.tensor.parallel import parallelize_module

from jitgemm.nn.parallel import RowwiseParallel

pytestmark = pytest.mark.gpu

GPU_KINDS = {**KINDS, "e4m3, groups of 128": {"clip_steps": 0}}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    if torch.cuda.device_count() < ranks.WORLD:
        pytest.skip(f"needs {ranks.WORLD} GPUs of one host: found {torch.cuda.device_count()}")
    with ranks.two_ranks(tmp_path_factory.mktemp("ranks"), "nccl") as run:
        yield run


def a_layer(mesh, name: str) -> list[str]:
    torch._dynamo.reset()  # a process compiles a function for eight layers at most
    layer, wrong = CASES[name]().cuda(), []
    divided = parallelize_module(copy.deepcopy(layer), mesh, RowwiseParallel(tp_invariant=True))
    compiled = torch.compile(divided, fullgraph=True, dynamic=True)
    x = x_of(layer, torch.bfloat16, 2100).cuda()
    every = on_one(layer, x)
    for m in (1, 7, 64, 700, 2100):
        mine = x[:m].chunk(2, 1)[mesh.get_local_rank()].contiguous()
        outs = {"one GPU": on_one(layer, x[:m]), "two": divided(mine), "a graph": in_a_graph(divided, mine)}
        if m in (7, 700):
            outs["compiled"] = compiled(mine)
        wrong += [f"{m} rows, {what}" for what, out in outs.items() if not builders.same_bits(out, every[:m])]
    return wrong


def greedy(mesh, kind: str, compiling: bool) -> list[tuple[list[int], torch.Tensor]]:
    torch._dynamo.reset()
    whole = model_of(kind, "cuda", GPU_KINDS[kind])
    divided = parallelize_module(copy.deepcopy(whole), mesh, INVARIANT_PLAN)
    models = [torch.compile(each, fullgraph=True, dynamic=True) if compiling else each for each in (whole, divided)]
    return [generated(each) for each in models]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_has_one_gpu_s_bits(both, name):
    assert both(a_layer, name) == [[], []]


@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_model_generates_the_same_tokens_with_the_same_log_probabilities(both, kind, compiling):
    results = [each for rank in both(greedy, kind, compiling) for each in rank]
    for tokens, found in results:
        assert tokens == results[0][0] and builders.same_bits(found, results[0][1])
