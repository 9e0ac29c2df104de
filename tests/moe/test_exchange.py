"""Experts on several GPUs without collectives: the kernels that send tokens and collect results, on the emulator.

Ranks run one after another here. One that would wait for ranks behind it finds their arrival announced, and runs again
when they have run.
"""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
import torch
from emulator.launch import Emulator, emulate
from marks import emulated
from moe_cases import Case

import jitgemm
from jitgemm import settings
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.moe.arguments import ExpertsCall, make_gate
from jitgemm.moe.exchange import Buffer, Layout, collect, dispatch, run_exchanged
from jitgemm.moe.kernel import MAX_RANKS
from jitgemm.moe.route import combine_reference, gather, route_reference
from jitgemm.nn.layers.expert_nvlink import _new_buffer

pytestmark = emulated

EXPERTS, TOP_K, K, MOST = 2, 3, 160, 6


@pytest.fixture
def emulator(monkeypatch) -> Emulator:
    return emulate(monkeypatch)


class Ranks:
    """The ranks' buffers, in one address space."""

    def __init__(self, emulator: Emulator, world: int, n: int, dtype: torch.dtype, kind: str, top_k: int = TOP_K):
        codes, scheme, affine, k = {
            "e4m3": (torch.float8_e4m3fn, "token", False, K),
            "int8 affine": (torch.int8, "token", True, K),
            "block": (torch.float8_e4m3fn, "block", False, K),
            "rotated": (torch.int8, "token", True, 384),
            "rotated block": (torch.int8, "block", False, 4224),
        }[kind]
        activation = activation_of(codes, scheme, affine, rotation=128 if "rotated" in kind else 0)
        layout = Layout(0, world, MOST, k, n, top_k, dtype, activation)
        size = layout.offsets["end"]
        memory = [torch.empty(size + 256, dtype=torch.uint8) for _ in range(world)]
        own = [each[-each.data_ptr() % 256 :][:size] for each in memory]
        peers = torch.tensor([each.data_ptr() for each in own])
        self.buffers = [Buffer(replace(layout, rank=rank), own[rank], peers) for rank in range(world)]
        for buffer in self.buffers:
            buffer.clear()
        emulator.others = own
        self.world, self.n, self.dtype, self.call = world, n, dtype, 0

    def arrived(self, rank: int) -> torch.Tensor:
        return self.buffers[rank].own[: 4 * self.world].view(torch.int32)

    def counts(self, rank: int) -> torch.Tensor:
        """Of the call's parity."""
        start = 8 * MAX_RANKS * (self.call % 2) + 4 * MAX_RANKS
        return self.buffers[rank].own[start : start + 8 * self.world].view(torch.int64)

    def calls(self, rank: int) -> torch.Tensor:
        start = 8 * 2 * MAX_RANKS + 4 * MAX_RANKS
        return self.buffers[rank].own[start : start + 8].view(torch.int64)

    def results(self, rank: int) -> torch.Tensor:
        return self.buffers[rank]._part("results", "end")

    def dispatch(self, given: list[tuple[torch.Tensor, ...]]) -> list:
        """A rank is told that those behind it have no tokens and are through; all but the last run again."""
        self.call += 1
        due = self.call * MOST
        for rank in range(self.world):
            self.counts(rank)[rank + 1 :] = self.call << 24
            self.arrived(rank)[rank + 1 :] = due
            routed = dispatch(*given[rank], self.buffers[rank], EXPERTS)
            for other in range(self.world):
                assert self.arrived(other)[rank] == due + MOST * (other < rank)
                self.arrived(other)[rank] = due
        again = [dispatch(*given[rank], self.buffers[rank], EXPERTS) for rank in range(self.world - 1)]
        for rank in range(self.world):
            self.arrived(rank)[:] = due
        return [*again, routed]

    def collect(self, rows: list[torch.Tensor], routed: list, counts: tuple[int, ...]) -> list[torch.Tensor]:
        """A rank finds zeros of those behind it; all but the last run again."""
        for rank in range(self.world):
            self.results(rank).zero_()
        outs = []
        for rank in (*range(self.world), *range(self.world - 1)):
            routing, sent = routed[rank]
            outs.append(torch.full((counts[rank], self.n), 3.0, dtype=self.dtype))
            collect(rows[rank], routing.inverse, sent, outs[-1], self.buffers[rank], EXPERTS)
        for rank in range(self.world):
            assert self.calls(rank) == self.call + (rank < self.world - 1)
            self.calls(rank).fill_(self.call)
            self.results(rank).fill_(0xFF)
        return [*outs[self.world :], outs[self.world - 1]]


def tokens_of(
    seed: int, count: int, experts: int, dtype: torch.dtype, id_type: torch.dtype, k: int = K
) -> tuple[torch.Tensor, ...]:
    draw = builders.generator(seed)
    x = torch.randn(count, k, generator=draw).to(dtype)
    ids = torch.rand(count, experts, generator=draw).argsort(1)[:, :TOP_K].to(id_type)
    if count > 1:
        ids[0], ids[1, 0] = torch.tensor([-1, experts, 1 << 24]), -1
        if id_type == torch.int64:
            ids[1, 1] = (1 << 32) + 1
    return x, ids.contiguous(), torch.rand(count, TOP_K, generator=draw).bfloat16()


CASES = [
    pytest.param("e4m3", torch.bfloat16, torch.int32, 1032, [(3, 2, 0), (0, 1, 4)], id="e4m3, 3 ranks, 2 calls, wide"),
    pytest.param("int8 affine", torch.float16, torch.int64, 64, [(2, 3)], id="int8 affine"),
    pytest.param("block", torch.float32, torch.int32, 64, [(0, 3)], id="block"),
    pytest.param("rotated", torch.bfloat16, torch.int32, 64, [(3, 2)], id="rotated"),
    pytest.param("rotated block", torch.float32, torch.int32, 64, [(1, 3)], id="rotated by block"),
]


@pytest.mark.parametrize(("kind", "dtype", "id_type", "n", "turns"), CASES)
def test_tokens_go_to_the_ranks_of_their_experts_and_back(emulator, kind, dtype, id_type, n, turns):
    world = len(turns[0])
    ranks, all_experts = Ranks(emulator, world, n, dtype, kind), world * EXPERTS
    for turn, counts in enumerate(turns):
        k = ranks.buffers[0].layout.k
        given = [tokens_of(10 * turn + r, counts[r], all_experts, dtype, id_type, k) for r in range(world)]
        routed = ranks.dispatch(given)
        x, ids, weights = (torch.cat(parts) for parts in zip(*given))
        slots = torch.cat([rank * MOST + torch.arange(counts[rank]) for rank in range(world)])
        codes = quantize(QuantizeCall(x, ranks.buffers[0].layout.activation))
        rows, sums = [], torch.zeros(len(slots), n)
        for rank, (routing, sent) in enumerate(routed):
            local = torch.where((ids >= 0) & (ids < all_experts), ids.long() - rank * EXPERTS, -1)
            expected = route_reference(local, EXPERTS, None)
            used = int(expected.offsets[-1])
            assert sent.tolist() == [*counts, ranks.call % 2]
            assert torch.equal(routing.offsets, expected.offsets)
            assert torch.equal(routing.row_index[:used].long(), slots[expected.row_index[:used].long()])
            assert torch.equal(routing.inverse[slots], expected.inverse)

            wanted = ((local >= 0) & (local < EXPERTS)).any(1)
            for found, made in zip(ranks.buffers[rank].lhs, codes):
                assert builders.same_bits(found[slots][wanted].view(made.dtype), made[wanted])
            rows.append(torch.randn(max(used, 1), n, generator=builders.generator(rank)).to(dtype))
            sums += combine_reference(rows[rank], expected.inverse, weights, None).to(dtype).float()
        outs = ranks.collect(rows, routed, counts)
        for out, expected_out in zip(outs, sums.to(dtype).split(list(counts))):
            near = {torch.float32: 1e-6}.get(dtype, 2**-7)  # fp64 above, rounded once
            assert torch.allclose(out.float(), expected_out.float(), rtol=near, atol=near)


def test_a_call_that_ended_half_way_is_the_last_one(emulator, monkeypatch):
    """Its tokens were counted: the next call would read its own before they come."""
    case = Case(tokens=4, top_k=2, experts=3, k=K, inter=96, n=64, dtype=torch.bfloat16, mode="e4m3")
    gate, tokens = make_gate("silu", "gate_up", None, None), activation_of(torch.float8_e4m3fn, "token", False)
    call = ExpertsCall(*case.arguments, gate, tokens)
    (buffer,) = Ranks(emulator, 1, 64, torch.bfloat16, "e4m3", case.top_k).buffers
    right = run_exchanged(call, buffer)
    assert builders.same_bits(right, jitgemm.fused_experts(*case.arguments, **case.options))
    with monkeypatch.context() as patch:
        patch.setattr("jitgemm.moe.exchange.multiply", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
        with pytest.raises(MemoryError):
            run_exchanged(call, buffer)
    with pytest.raises(
        RuntimeError, match="exchange: expected every call .* rank 0 that raised MemoryError: none left"
    ):
        run_exchanged(call, buffer)
    buffer.clear()
    assert builders.same_bits(run_exchanged(call, buffer), right)


@pytest.mark.parametrize("value", ["-1", "1.5", "86401", "soon"])
def test_a_limit_that_is_no_number_of_seconds_is_named(monkeypatch, value):
    monkeypatch.setenv("JITGEMM_EXCHANGE_TIMEOUT_S", value)
    with pytest.raises(ValueError, match=f"JITGEMM_EXCHANGE_TIMEOUT_S: expected .* 0 to 86400, got '{value}'"):
        settings.exchange_timeout_s()


@pytest.mark.parametrize("kind", ["affine", "block"])
def test_tokens_are_gathered_in_the_order_of_rows(emulator, kind):
    activation = activation_of(torch.int8, "block" if kind == "block" else "token", kind == "affine")
    x = torch.randn(7, 528, generator=builders.generator(1))
    codes, scale, zero = quantize(QuantizeCall(x, activation))
    lhs = (codes, scale) if zero is None else (codes, scale, zero)
    index = torch.tensor([3, 3, 0, 6, 5, 999], dtype=torch.int32)
    for part, gathered in zip(lhs, gather(lhs, index, torch.tensor([5], dtype=torch.int32)), strict=True):
        assert builders.same_bits(gathered[:5], part[index[:5].long()])


@pytest.mark.parametrize("kind", ["token", "affine", "block"])
def test_parts_of_a_buffer_hold_all_ranks_tokens_and_do_not_overlap(kind):
    activation = activation_of(torch.int8, "block" if kind == "block" else "token", kind == "affine")
    layout = Layout(0, 3, 257, 1040, 64, TOP_K, torch.float16, activation)
    starts, slots, choices = list(layout.offsets.values()), 3 * 257, 3 * 257 * TOP_K
    scales = 772 * 9 if kind == "block" else slots
    held = [256, slots * 1040, 4 * scales, 4 * slots * (kind == "affine"), 2 * 8 * choices, 4 * choices, slots * 64 * 2]
    assert all(start % 256 == 0 for start in starts)
    assert all(0 <= end - start - size < 256 for start, end, size in zip([0, *starts], starts, held, strict=False))
    assert layout.scale_block_stride == 772 and len(starts) == len(held)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"k": 16400}, "hidden_states: expected at most 16384 columns for exchange='nvlink', got 16400"),
        ({"max_tokens": 2**19 + 1}, "max_tokens: expected at most 524288 for exchange='nvlink', 4 ranks and 8 choices"),
    ],
)
def test_sizes_that_buffers_cannot_have_raise(sizes, words):
    layout = Layout(0, 4, 16, 2048, 2048, 8, torch.bfloat16, activation_of(torch.float8_e4m3fn, "token", False))
    with pytest.raises(ValueError, match=words):
        _new_buffer(replace(layout, **sizes), None, torch.device("cuda"))
