"""Layers divided among two GPUs of one host, with NCCL: against the whole layer, in CUDA graphs, after fuse_."""

from __future__ import annotations

import copy

import builders
import pytest
import ranks
import torch
from test_parallel import EXPERTS, LAYERS, PLAN, Model, apart, columns_of, layer_of_experts, of_rank, x_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import jitgemm.nn
from jitgemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    if torch.cuda.device_count() < ranks.WORLD:
        pytest.skip(f"needs {ranks.WORLD} GPUs of one host: found {torch.cuda.device_count()}")
    with ranks.two_ranks(tmp_path_factory.mktemp("ranks"), "nccl") as run:
        yield run


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same but for the order of additions and the rounding to bf16."""
    return bool((a.float() - b.float()).abs().max() <= 2**-7 * b.float().abs().max())


def in_a_graph(layer: torch.nn.Module, *given: torch.Tensor) -> torch.Tensor:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*given)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return out


def layers(mesh, name: str) -> torch.Tensor:
    rank = mesh.get_local_rank()
    on_cpu = LAYERS[name]()
    whole, x = copy.deepcopy(on_cpu).cuda(), x_of(on_cpu).cuda()
    mine = columns_of(x, rank).contiguous()

    layer = parallelize_module(copy.deepcopy(whole), mesh, ColwiseParallel())
    out = layer(x)
    assert near(out, columns_of(whole(x), rank))
    assert builders.same_bits(in_a_graph(layer, x), out)

    each = [apart(on_cpu, r).cuda()(columns_of(x, r).contiguous()) for r in range(ranks.WORLD)]
    layer = parallelize_module(copy.deepcopy(whole), mesh, RowwiseParallel())
    out = layer(mine)
    assert builders.same_bits(out, each[0] + each[1])
    assert builders.same_bits(in_a_graph(layer, mine), out)
    return out.cpu()


def on_rows(mesh, name: str) -> None:
    layer = LAYERS[name]().cuda()
    x = x_of(layer).cuda()
    expected = layer(x)
    for layout in (Shard(0), Replicate(), Shard(1)):
        out = layer(distribute_tensor(x, mesh, [layout], src_data_rank=None))
        assert out.placements == (layout if layout == Shard(0) else Replicate(),)
        assert near(out.full_tensor(), expected)


def a_model(mesh) -> torch.Tensor:
    model = Model().cuda()
    x = torch.randn(3, 128, generator=builders.generator(2)).cuda().bfloat16()
    jitgemm.nn.quantize_(model, activation="int8", clip_steps=0)
    model.to(torch.bfloat16)
    expected = model(x)
    parallelize_module(model, mesh, {name: style() for name, style in PLAN.items()})
    out = model(x)
    assert (out - expected).norm() < 0.05 * expected.norm()
    jitgemm.nn.fuse_(model)
    fused = model(x)
    assert (fused - out).norm() < 0.05 * out.norm()
    assert builders.same_bits(in_a_graph(model, x), fused)
    compiled = torch.compile(model, fullgraph=True)
    assert (compiled(x) - fused).norm() < 0.02 * fused.norm()
    return fused.cpu()


def divided_experts(mesh, kind: str) -> None:
    whole, rank = layer_of_experts(kind).cuda(), mesh.get_local_rank()
    layer = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(input_layouts=Shard(0)))
    fixed = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(input_layouts=Shard(0), max_tokens=200))
    for counts in ((9, 6), (200, 5), (5, 0)):
        tokens = counts[rank]
        given = [each[:tokens].cuda() for each in of_rank(rank, max(tokens, 5), torch.bfloat16)]
        expected, out = whole(*given), layer(*given)
        assert out.shape == expected.shape and (not tokens or near(out, expected))
        out = fixed(*given)
        assert out.shape == expected.shape and (not tokens or near(out, expected))
        assert builders.same_bits(in_a_graph(fixed, *given), out)
    layer = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel())
    given = [each.cuda() for each in of_rank(0, 9, torch.bfloat16)]
    assert near(layer(*given), whole(*given))


@pytest.mark.parametrize("kind", EXPERTS)
def test_divided_experts(both, kind):
    both(divided_experts, kind)


@pytest.mark.parametrize("name", LAYERS)
def test_divided_layers(both, name):
    first, second = both(layers, name)
    assert builders.same_bits(first, second)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_dtensors_through_whole_layers(both, name):
    both(on_rows, name)


def test_a_model(both):
    first, second = both(a_model)
    assert builders.same_bits(first, second)
