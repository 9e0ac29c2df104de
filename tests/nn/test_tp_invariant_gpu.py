"""The same bits on one rank and on two: layers, in CUDA graphs and compiled, and a model that generates."""

from __future__ import annotations

import copy

import builders
import pytest
import ranks
import torch
from invariant_layers import CASES, KINDS, generated, model_of, on_one, plan_of
from parallel_layers import in_a_graph, layer_of_experts, of_rank, x_of
from torch.distributed.tensor.parallel import parallelize_module

from jitgemm.gemm import ranks as sums
from jitgemm.nn.layers import invariant
from jitgemm.nn.layers.sharding import EngineSharding
from jitgemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel
from jitgemm.nn.parallel.styles import EXCHANGES

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, ranks.needs_gpu]

GPU_KINDS = {**KINDS, "e4m3, groups of 128": {"clip_steps": 0}}
THOROUGHLY = "int8, per channel", "e4m3, groups of 128"
"""Sums in int32 and in chunks: at every m, and compiled. The others differ in their kernels alone."""
EVERY_M, SOME_M = (1, 7, 64, 700, 2100), (7, 2100)
BOTH_WAYS = [pytest.param(each, marks=ranks.needs_nccl if each == "collectives" else ()) for each in EXCHANGES]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with ranks.two_ranks(tmp_path_factory.mktemp("ranks"), "cuda") as run:
        yield run


def a_layer(mesh, name: str, exchange: str, most: int = 8) -> list[str]:
    layer, wrong = CASES[name]().cuda(), []
    layer.tp_ranks, thorough = most, name in THOROUGHLY and most == 8
    invariant.GATHERED_BYTES = sums.ALONE_BYTES = 1 << 18  # of 512 tokens; with more each rank finishes a part
    divided = parallelize_module(copy.deepcopy(layer), mesh, RowwiseParallel(tp_invariant=most, exchange=exchange))
    compiled = torch.compile(divided, fullgraph=True, dynamic=True)
    x = x_of(layer, torch.bfloat16, 2100).cuda()
    every = on_one(layer, x)
    for m in EVERY_M if thorough else SOME_M:
        mine = x[:m].chunk(2, 1)[mesh.get_local_rank()].contiguous()
        outs = {"one GPU": on_one(layer, x[:m]), "two": divided(mine)}
        torch.cuda.synchronize()  # a graph is captured on another stream
        outs["a graph"] = in_a_graph(divided, mine)
        if thorough and m in (7, 700):
            outs["compiled"] = compiled(mine)
        wrong += [f"{m} rows, {what}" for what, out in outs.items() if not builders.same_bits(out, every[:m])]
    return wrong


def added_later(mesh, name: str, exchange: str) -> list[str]:
    """As engines have it, in turns with what needs no later sum, whose buffers are the same."""
    layer, rank, wrong = CASES[name]().cuda(), mesh.get_local_rank(), []
    whole = parallelize_module(copy.deepcopy(layer), mesh, RowwiseParallel(tp_invariant=True, exchange=exchange))
    divided = copy.deepcopy(whole)
    divided.split = EngineSharding(mesh.get_group(), rank, 2, exchange == "nvlink")

    def summed(x: torch.Tensor) -> torch.Tensor:
        out = invariant.multiply_invariantly(divided, x)
        divided.split.sum(out)
        return out

    x = x_of(layer, torch.bfloat16, 2100).cuda()
    for m in (1, 7, 700, 2100):
        mine = x[:m].chunk(2, 1)[rank].contiguous()
        outs = {"whole": whole(mine), "eager": summed(mine)}
        torch.cuda.synchronize()  # a graph is captured on another stream
        outs["a graph"] = in_a_graph(summed, mine, collectives=True)
        expected = on_one(layer, x[:m])
        wrong += [f"{m} rows, {what}" for what, out in outs.items() if not builders.same_bits(out, expected)]
    return wrong


def experts_of(mesh, name: str) -> list[str]:
    whole = layer_of_experts(name).cuda()
    divided = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(tp_invariant=True))
    whole.batch_invariant, wrong = True, []
    every = [each.cuda() for each in of_rank(3, 700, torch.bfloat16)]
    of_all = whole(*every)
    for m in (5, 64, 700):
        given = [each[:m].contiguous() for each in every]
        outs = {"one GPU": whole(*given), "two": divided(*given)}
        torch.cuda.synchronize()  # a graph is captured on another stream
        outs["a graph"] = in_a_graph(divided, *given, collectives=True)
        wrong += [f"{m} tokens, {what}" for what, out in outs.items() if not builders.same_bits(out, of_all[:m])]
    return wrong


def columns(mesh, name: str) -> list[int]:
    """m of other bits: of tokens through a rank's rows of the weight, and through all of them."""
    layer = CASES[name]().cuda()
    divided = parallelize_module(copy.deepcopy(layer), mesh, ColwiseParallel(tp_invariant=True))
    x = x_of(layer, torch.bfloat16, 2100).cuda()
    every = on_one(layer, x, "n").chunk(2, 1)[mesh.get_local_rank()]
    return [m for m in SOME_M if not builders.same_bits(divided(x[:m]), every[:m])]


def greedy(mesh, kind: str, compiling: bool) -> list[tuple[list[int], torch.Tensor]]:
    torch._dynamo.reset()
    whole = model_of(kind, "cuda", GPU_KINDS[kind])
    divided = parallelize_module(copy.deepcopy(whole), mesh, plan_of(whole, "nvlink"))
    models = [torch.compile(each, fullgraph=True, dynamic=True) if compiling else each for each in (whole, divided)]
    return [generated(each) for each in models]


@pytest.mark.parametrize("exchange", BOTH_WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_has_one_gpu_s_bits(both, name, exchange):
    assert both(a_layer, name, exchange) == [[], []]


@pytest.mark.parametrize("exchange", BOTH_WAYS)
def test_a_layer_for_two_ranks_at_most_has_one_gpu_s_bits(both, exchange):
    assert both(a_layer, "e4m3, groups of 128", exchange, 2) == [[], []]


@pytest.mark.parametrize("exchange", BOTH_WAYS)
@pytest.mark.parametrize("name", ["int8, per channel", "e4m3, groups of 128"])
def test_sums_that_an_engine_brings_together_are_the_same(both, name, exchange):
    assert both(added_later, name, exchange) == [[], []]


@pytest.mark.parametrize("name", ["int8_affine", "e4m3", "8 bits"])
def test_experts_have_one_gpu_s_bits(both, name):
    assert both(experts_of, name) == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_columns_have_one_gpu_s_bits(both, name):
    assert both(columns, name) == [[], []]


@pytest.mark.parametrize(
    ("kind", "compiling"), [*((kind, False) for kind in GPU_KINDS), ("int8, per channel", True), ("experts", True)]
)
def test_a_model_generates_the_same_tokens_with_the_same_log_probabilities(both, kind, compiling):
    results = [each for rank in both(greedy, kind, compiling) for each in rank]
    for tokens, found in results:
        assert tokens == results[0][0] and builders.same_bits(found, results[0][1])
