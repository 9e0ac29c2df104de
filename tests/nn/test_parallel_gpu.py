"""Layers divided among two ranks with a GPU each, or with one: against the whole layer, in CUDA graphs, compiled."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from pathlib import Path

import builders
import pytest
import ranks
import torch
from parallel_layers import EXPERTS, LAYERS, PLAN, Model, apart, columns_of, in_a_graph, layer_of_experts, of_rank, x_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import jitgemm.nn
from jitgemm.errors import CacheMissError
from jitgemm.moe import exchange
from jitgemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel
from jitgemm.nn.parallel.styles import EXCHANGES

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, ranks.needs_gpu]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with ranks.two_ranks(tmp_path_factory.mktemp("ranks"), "cuda") as run:
        yield run


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same but for the order of additions and the rounding to bf16."""
    return bool((a.float() - b.float()).abs().max() <= 2**-7 * b.float().abs().max())


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
    assert builders.same_bits(in_a_graph(layer, mine, collectives=True), out)
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
    assert builders.same_bits(in_a_graph(model, x, collectives=True), out)
    compiled = torch.compile(model, fullgraph=True)
    assert (compiled(x) - out).norm() < 0.05 * out.norm()  # quantisers compute norms and gates, which round nothing
    return out.cpu()


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
        assert builders.same_bits(in_a_graph(fixed, *given, collectives=True), out)
    layer = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel())
    given = [each.cuda() for each in of_rank(0, 9, torch.bfloat16)]
    assert near(layer(*given), whole(*given))


def both_exchanges(mesh, kind: str, most: int, seed: int | None = None) -> list[torch.nn.Module]:
    """Layers of the same experts whose tokens go by collectives, and by kernels; with a seed, of other weights."""
    whole = layer_of_experts(kind).cuda()
    if seed is not None:
        order = torch.randperm(whole.num_experts, generator=builders.generator(seed)).cuda()
        for part in (whole.w13, whole.w2):
            for buffer in part.buffers():
                if buffer.shape[:1] == order.shape:
                    buffer.copy_(buffer[order].clone())
    styles = [ExpertParallel(input_layouts=Shard(0), max_tokens=most, exchange=each) for each in EXCHANGES]
    return [parallelize_module(copy.deepcopy(whole), mesh, style) for style in styles]


def tokens_of(rank: int, tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [each[:tokens].cuda() for each in of_rank(rank + 2 * seed, max(tokens, 5), dtype)]


def nvlink_is_the_collectives(mesh, kind: str, dtype: torch.dtype) -> None:
    rank = mesh.get_local_rank()
    collectives, nvlink = both_exchanges(mesh, kind, 300)
    for counts in ((1, 1), (9, 6), (5, 0), (0, 5), (300, 260), (0, 0)):
        given = tokens_of(rank, counts[rank], dtype)
        expected = collectives(*given)
        for _ in range(3):  # back to back
            out = nvlink(*given)
        assert out.shape == expected.shape and out.dtype == dtype
        # GEMMs are chosen for as many tokens as the rank's own, in both.
        assert builders.same_bits(out, expected), counts


def nvlink_replays(mesh) -> None:
    """Two layers that share a buffer, in a graph; tokens change from replay to replay, and ranks start apart."""
    rank = mesh.get_local_rank()
    pairs = both_exchanges(mesh, "e4m3", 40), both_exchanges(mesh, "e4m3", 40, seed=1)
    collectives, nvlink = zip(*pairs)
    x, ids, weights = tokens_of(rank, 20, torch.bfloat16)

    def chain(layers: tuple[torch.nn.Module, ...]) -> torch.Tensor:
        first, second = layers
        return second(first(x, ids, weights), ids.flip(1).contiguous(), weights)

    eager = [chain(collectives), chain(nvlink)]
    assert builders.same_bits(*eager)
    assert not torch.equal(nvlink[0](x, ids, weights), nvlink[1](x, ids, weights))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(nvlink)
    results, expected = [], []
    given = [tokens_of(rank, 20, torch.bfloat16, seed) for seed in range(100)]
    for _, those, _ in given[1::3]:  # no rank sends a token
        those.copy_(those % nvlink[0].num_experts + rank * nvlink[0].num_experts)
    for turn, each in enumerate(given):
        for target, source in zip((x, ids, weights), each):
            target.copy_(source)
        if turn % 10 == rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        results.append(out.clone())
    for each in given:
        for target, source in zip((x, ids, weights), each):
            target.copy_(source)
        expected.append(chain(collectives))
    for turn, (found, wanted) in enumerate(zip(results, expected)):
        assert builders.same_bits(found, wanted), turn


def nvlink_says_what_is_wrong(mesh) -> None:
    _, nvlink = both_exchanges(mesh, "int8", 8)
    given = tokens_of(mesh.get_local_rank(), 5, torch.bfloat16)
    with pytest.raises(CacheMissError, match="call the layer once with these shapes before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            nvlink(*given)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="hidden_states: expected at most max_tokens = 8 tokens, got 9"):
        nvlink(*tokens_of(0, 9, torch.bfloat16))
    dtype = (torch.bfloat16, torch.float32)[mesh.get_local_rank()]
    with pytest.raises(ValueError, match="exchange: expected .*Layout.* on every rank"):
        nvlink(*tokens_of(0, 5, dtype))
    first, second = nvlink(*given), nvlink(*given)
    assert builders.same_bits(first, second)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in EXPERTS), ("int8", torch.float32)])
def test_experts_over_nvlink_give_the_collectives_bits(both, kind, dtype):
    both(nvlink_is_the_collectives, kind, dtype)


def test_experts_over_nvlink_replay(both):
    both(nvlink_replays)


def test_experts_over_nvlink_say_what_is_wrong(both):
    both(nvlink_says_what_is_wrong)


@pytest.mark.parametrize("kind", EXPERTS)
def test_divided_experts(both, kind):
    both(divided_experts, kind)


@pytest.mark.parametrize("name", LAYERS)
def test_divided_layers(both, name):
    first, second = both(layers, name)
    assert builders.same_bits(first, second)


@ranks.needs_nccl
@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_dtensors_through_whole_layers(both, name):
    both(on_rows, name)


def test_a_model(both):
    first, second = both(a_model)
    assert builders.same_bits(first, second)


LIMIT_S = 3


def killed(*_) -> None:
    torch.cuda.synchronize()  # both ranks' tokens have come
    os.kill(os.getpid(), signal.SIGKILL)


def one_rank_ends(rank: int, folder: str, said: list[Path], by_signal: bool) -> None:
    """Rank 0's call ends between dispatch and collect, or its process does; rank 1's call waits for it."""
    sys.stderr = said[rank].open("w")
    os.dup2(sys.stderr.fileno(), 2)  # the driver writes there
    _, nvlink = both_exchanges(ranks.join(rank, folder, "cuda"), "e4m3", 8)
    given = tokens_of(rank, 5, torch.bfloat16)
    with torch.no_grad():
        nvlink(*given)
        torch.cuda.synchronize()
        if rank == 0:
            # None: as a kernel that does not compile, or memory that is not there.
            exchange.multiply = killed if by_signal else None
            with pytest.raises(TypeError):
                nvlink(*given)
            with pytest.raises(RuntimeError, match="exchange: expected every call before this one to end"):
                nvlink(*given)
            deadline = time.monotonic() + 4 * LIMIT_S
            while "as expected" not in said[1].read_text() and time.monotonic() < deadline:
                time.sleep(0.1)  # it needs this rank's memory
        else:
            began = time.monotonic()
            nvlink(*given)
            with pytest.raises(RuntimeError, match="CUDA error"):
                torch.cuda.synchronize()
            assert time.monotonic() - began < 3 * LIMIT_S
    print("as expected", file=sys.stderr, flush=True)
    os._exit(0)  # no communicator can be closed now


@pytest.mark.parametrize("by_signal", [False, True], ids=["raised", "was killed"])
def test_a_rank_whose_other_one_ended_stops_with_a_message(tmp_path, monkeypatch, by_signal):
    monkeypatch.setenv("JITGEMM_EXCHANGE_TIMEOUT_S", str(LIMIT_S))
    context = torch.multiprocessing.get_context("spawn")
    said = [tmp_path / f"rank{rank}" for rank in range(2)]
    arguments = [(rank, str(tmp_path), said, by_signal) for rank in range(2)]
    processes = [context.Process(target=one_rank_ends, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        process.kill()
    words = [each.read_text() for each in said]
    assert ["as expected" in each for each in words] == [not by_signal, True], words
    assert not by_signal or processes[0].exitcode == -signal.SIGKILL
    assert "did not come within JITGEMM_EXCHANGE_TIMEOUT_S" in words[1] and "rank:0" in words[1]
