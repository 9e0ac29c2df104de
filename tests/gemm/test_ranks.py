"""Sums over ranks by kernels, in the emulator. Ranks run one after another here: each finds what the others would have
written by then, and is held to have written as much."""

from __future__ import annotations

import builders
import pytest
import torch
from emulator.launch import emulate
from marks import emulated

from jitgemm.gemm import partial, ranks

pytestmark = emulated


class Ranks:
    """The ranks' buffers, in one address space."""

    def __init__(self, emulator, world: int):
        memory = [torch.zeros(ranks.BUFFER_BYTES + 256, dtype=torch.uint8) for _ in range(world)]
        own = [each[-each.data_ptr() % 256 :][: ranks.BUFFER_BYTES] for each in memory]
        peers = torch.tensor([each.data_ptr() for each in own])
        self.buffers = [ranks.SumBuffer(rank, world, own[rank], peers) for rank in range(world)]
        emulator.others = own
        self.world, self.calls, self.gathers = world, 0, 0

    def counts(self, rank: int, kind: int) -> torch.Tensor:
        """How often each rank has said that its sums (0) or its rows (1) are there."""
        start = 32 + 4 * ranks.MAX_RANKS * kind
        return self.buffers[rank].own[start : start + 4 * self.world].view(torch.int32)

    def agree(self, scales: list[torch.Tensor | None]) -> None:
        self.calls += 1
        given = [torch.zeros(1) if each is None else each.clone() for each in scales]
        words = [(self.calls << 32) + each.view(torch.int32).long() for each in given]
        for rank, buffer in enumerate(self.buffers):
            places = [self.words(each.rank) for each in self.buffers]
            for other, word in enumerate(words):
                places[rank][other, : len(word)] = word
            for other, place in enumerate(places):
                if other != rank:
                    place[rank] = 0
            ranks.agree(buffer, scales[rank])
            for other, place in enumerate(places):
                assert other == rank or torch.equal(place[rank, : len(given[0])], words[rank])

    def words(self, rank: int) -> torch.Tensor:
        start = ranks.OFFSETS["words"]
        words = self.buffers[rank].own[start : ranks.OFFSETS["sums"]].view(torch.int64)
        return words.view(2, ranks.MAX_RANKS, ranks.MOST_ROWS)[self.calls % 2]

    def meeting(self, kind: int, calls: int, run) -> None:
        for rank in range(self.world):
            self.counts(rank, kind)[:] = calls
            for other in range(self.world):
                self.counts(other, kind)[rank] = calls - 1
            run(rank)
            assert all(self.counts(other, kind)[rank] == calls for other in range(self.world))

    def total(self, of: torch.dtype, outs: list[torch.Tensor], given, gathers: bool, own: bool) -> None:
        calls = {rank: [] for rank in range(self.world)}
        run = ranks._run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "_run", lambda call: calls[call.buffer.rank].append(call))
            for buffer, out in zip(self.buffers, outs):
                ranks.total(buffer, of, out, *given, own)
        assert all([call.function for call in each] == ["total", "gather"][: 1 + gathers] for each in calls.values())
        self.meeting(0, self.calls, lambda rank: run(calls[rank][0]))
        if gathers:
            self.gathers += 1
            self.meeting(1, self.gathers, lambda rank: run(calls[rank][1]))


CASES = [(2, torch.int32, torch.bfloat16), (4, torch.float32, torch.float16), (8, torch.int32, torch.float32)]


@pytest.mark.parametrize(("world", "of", "into"), CASES)
def test_all_ranks_get_the_largest_scales_and_the_same_result(monkeypatch, world, of, into):
    emulator, g, n = emulate(monkeypatch), builders.generator(world), 72
    host = Ranks(emulator, world)
    weight = builders.weight_parts(3, n, 256, 0).packed
    bias = torch.randn(n, generator=g)
    calls = ((5, True), (1, True), (7, False), (5, True, True), (5, True), (1, False, True), (3, False))
    for m, alone, *own in calls:
        monkeypatch.setattr(ranks, "ALONE_BYTES", 2 << 20 if alone else 0)
        scales = [torch.rand(m, generator=g) + 0.01 for _ in range(world)]
        scales[1][0] = torch.nan
        expected = torch.stack(scales).amax(0)
        host.agree(scales)
        assert all(builders.same_bits(each.nan_to_num(7), expected.nan_to_num(7)) for each in scales)

        parts = torch.randn((world, m, n), generator=g) * 1e3
        parts = (parts * 1e5).int() if of == torch.int32 else parts
        for buffer, part in zip(host.buffers, parts):
            buffer.sums(m, n, of).copy_(part)
        outs = [torch.full((m, n), 3.0, dtype=into) for _ in range(world)]
        host.total(of, outs, (expected, weight.channel_scale, bias), not alone and not own, bool(own))
        factors = (expected, weight.channel_scale) if of == torch.int32 else (None, None)
        reference = partial._Finish(parts, *factors, bias, outs[0].clone())
        reference.run_reference(())
        for rank, out in enumerate(outs):
            wanted, each = reference.out, -(-m // world)
            if own:  # and no other row is written
                wanted = torch.full_like(out, 3.0)
                wanted[rank * each : (rank + 1) * each] = reference.out[rank * each : (rank + 1) * each]
            assert builders.same_bits(out.nan_to_num(7), wanted.nan_to_num(7))


def test_a_call_without_scales_meets_as_well(monkeypatch):
    host = Ranks(emulate(monkeypatch), 2)
    host.agree([None, None])
    assert host.buffers[0].own[8:16].view(torch.int64) == 1
