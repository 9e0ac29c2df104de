"""Experts on several GPUs without collectives: the kernels that send tokens and collect results, on the emulator.

Ranks run one after another here. One that would wait for ranks behind it finds their arrival announced, and runs again
when they have run.
"""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
import torch
from emulator.launch import COMPILER, Emulator, emulate

from jitgemm.activations.arguments import activation_of
from jitgemm.activations.call import QuantizeCall, quantize
from jitgemm.moe.exchange import Buffer, Layout, collect, dispatch
from jitgemm.moe.kernel import MAX_RANKS
from jitgemm.moe.route import combine_reference, gather, route_reference

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

WORLD, EXPERTS, TOP_K, K, N = 3, 2, 3, 160, 1032
"""N is of more than one CTA's columns."""
ALL = WORLD * EXPERTS


@pytest.fixture
def emulator(monkeypatch) -> Emulator:
    return emulate(monkeypatch)


class Ranks:
    """The ranks' buffers, in one address space."""

    def __init__(self, emulator: Emulator, max_tokens: int, dtype: torch.dtype, kind: str):
        codes, scheme, affine = {
            "e4m3": (torch.float8_e4m3fn, "token", False),
            "int8 affine": (torch.int8, "token", True),
            "block": (torch.float8_e4m3fn, "block", False),
        }[kind]
        layout = Layout(0, WORLD, max_tokens, K, N, TOP_K, dtype, activation_of(codes, scheme, affine))
        size = layout.offsets["end"]
        memory = [torch.empty(size + 256, dtype=torch.uint8) for _ in range(WORLD)]
        own = [each[-each.data_ptr() % 256 :][:size] for each in memory]
        peers = torch.tensor([each.data_ptr() for each in own])
        self.buffers = [Buffer(replace(layout, rank=rank), own[rank], peers) for rank in range(WORLD)]
        for buffer in self.buffers:
            buffer.clear()
        emulator.others = own

    def head(self, rank: int) -> torch.Tensor:
        """The words of `Head`."""
        return self.buffers[rank].own[:256].view(torch.int32)

    def results(self, rank: int) -> torch.Tensor:
        layout = self.buffers[rank].layout
        part = self.buffers[rank]._part("results", "end")
        return part[: layout.slots * N * layout.dtype.itemsize].view(layout.dtype).view(WORLD, -1, N)

    def dispatch(self, given: list[tuple[torch.Tensor, ...]]) -> list:
        most = self.buffers[0].layout.max_tokens
        due = (int(self.head(0)[3 * MAX_RANKS]) + 1) * most
        for rank in range(WORLD):
            arrived = self.head(rank)[:WORLD].clone()
            self.head(rank)[:WORLD] = due
            dispatch(*given[rank], self.buffers[rank], EXPERTS)
            arrived[rank] += most
            assert self.head(rank)[rank] == due + most
            self.head(rank)[:WORLD] = arrived
        assert all((self.head(rank)[:WORLD] == due).all() for rank in range(WORLD))
        routed = [dispatch(*given[rank], self.buffers[rank], EXPERTS) for rank in range(WORLD)]
        for rank in range(WORLD):
            self.head(rank)[:WORLD] = due
        return routed

    def collect(self, rows: list[torch.Tensor], routed: list, counts: list[int]) -> list[torch.Tensor]:
        def once(rank: int) -> torch.Tensor:
            routing, sent = routed[rank]
            out = torch.full((counts[rank], N), 3.0, dtype=rows[rank].dtype)
            return collect(rows[rank], routing.inverse, sent, out, self.buffers[rank], EXPERTS)

        for rank in range(WORLD):
            self.results(rank).zero_()  # has all come
        for rank in range(WORLD):
            once(rank)
        outs = [once(rank) for rank in range(WORLD)]
        for rank in range(WORLD):
            self.head(rank)[3 * MAX_RANKS] -= 1  # each ran twice
            self.buffers[rank]._part("results", "end").fill_(0xFF)
        return outs


def tokens_of(seed: int, count: int, dtype: torch.dtype, id_type: torch.dtype) -> tuple[torch.Tensor, ...]:
    draw = builders.generator(seed)
    x = torch.randn(count, K, generator=draw).to(dtype)
    ids = torch.rand(count, ALL, generator=draw).argsort(1)[:, :TOP_K].to(id_type)
    if count > 1:
        ids[0], ids[1, 0] = torch.tensor([-1, ALL, 77]), -1
        if id_type == torch.int64:
            ids[1, 1] = (1 << 32) + 1
    return x, ids.contiguous(), torch.rand(count, TOP_K, generator=draw).bfloat16()


CASES = [
    pytest.param("e4m3", torch.bfloat16, torch.int32, (5, 3, 0), id="e4m3"),
    pytest.param("int8 affine", torch.float16, torch.int64, (1, 6, 2), id="int8 affine"),
    pytest.param("block", torch.float32, torch.int32, (0, 0, 4), id="block"),
]


@pytest.mark.parametrize(("kind", "dtype", "id_type", "counts"), CASES)
def test_tokens_go_to_the_ranks_of_their_experts_and_back(emulator, kind, dtype, id_type, counts):
    ranks = Ranks(emulator, 6, dtype, kind)
    for turn in range(2):
        if turn:
            counts = counts[::-1]
        given = [tokens_of(10 * turn + rank, counts[rank], dtype, id_type) for rank in range(WORLD)]
        routed = ranks.dispatch(given)
        ids = torch.cat([each[1] for each in given]).long()
        slots = torch.cat([rank * 6 + torch.arange(counts[rank]) for rank in range(WORLD)])
        outs: list[torch.Tensor] = [torch.zeros(len(slots), N) for _ in range(2)]
        rows, parts = [], []
        for rank in range(WORLD):
            routing, sent = routed[rank]
            local = torch.where((ids >= 0) & (ids < ALL), ids - rank * EXPERTS, -1)
            expected = route_reference(local, EXPERTS, None)
            used = int(expected.offsets[-1])
            assert sent.tolist() == list(counts)
            assert torch.equal(routing.offsets, expected.offsets)
            assert torch.equal(routing.row_index[:used].long(), slots[expected.row_index[:used].long()])
            assert torch.equal(routing.inverse[slots], expected.inverse)

            wanted = ((local >= 0) & (local < EXPERTS)).any(1)
            codes = quantize(QuantizeCall(torch.cat([each[0] for each in given]), ranks.buffers[0].layout.activation))
            for found, made in zip(ranks.buffers[rank].lhs, codes):
                assert builders.same_bits(found[slots][wanted].view(made.dtype), made[wanted])
            rows.append(torch.randn(max(used, 1), N, generator=builders.generator(rank)).to(dtype))
            weights = torch.cat([each[2] for each in given])
            parts.append(combine_reference(rows[rank], expected.inverse, weights, None).to(dtype))
        outs = ranks.collect(rows, routed, list(counts))
        sums = torch.zeros(len(slots), N)
        for part in parts:
            sums += part.float()
        for out, expected_out in zip(outs, sums.to(dtype).split(list(counts))):
            near = {torch.float32: 1e-6}.get(dtype, 2**-7)  # fp64 above, rounded once
            assert torch.allclose(out.float(), expected_out.float(), rtol=near, atol=near)


@pytest.mark.parametrize("kind", ["affine", "block"])
def test_tokens_are_gathered_in_the_order_of_rows(emulator, kind):
    activation = activation_of(torch.int8, "block" if kind == "block" else "token", kind == "affine")
    x = torch.randn(7, 528, generator=builders.generator(1))
    codes, scale, zero = quantize(QuantizeCall(x, activation))
    lhs = (codes, scale) if zero is None else (codes, scale, zero)
    index = torch.tensor([3, 3, 0, 6, 5, 999], dtype=torch.int32)
    for part, gathered in zip(lhs, gather(lhs, index, torch.tensor([5], dtype=torch.int32)), strict=True):
        assert builders.same_bits(gathered[:5], part[index[:5].long()])
