"""Experts that ranks divide, with the same bits on 1, 2, 4 and 8 ranks, for every number of tokens: `tp_invariant`.

One rank computes a choice of a token, by kernels whose order of summation depends on no number of rows or experts, and
rounds it to x's type, as one GPU does with `batch_invariant`. A sum over the ranks brings the choices together: all
ranks but one have zeros, and top_k times the bytes of a plain sum travel. Then each token is added up as on one GPU:
in fp32, in the order of its choices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jitgemm.kernel.formats import ceil_div
from jitgemm.moe.arguments import ExpertsCall
from jitgemm.moe.call import CALL_SCHEMA, call_of_op, fake, launch, op_arguments
from jitgemm.moe.route import combine
from jitgemm.nn.layers.invariant import NOTHING, group_named
from jitgemm.runtime.dispatch import define_op, needs_dispatcher

BAND_BYTES = 64 << 20
"""Of choices that are brought together at a time."""


def run_invariantly(call: ExpertsCall, ranks: Any) -> torch.Tensor:
    """`fused_experts` of tokens that are the same on all ranks, by the experts of all: [tokens, hidden].

    Args:
        call: w13, w2 and biases of this rank's experts, which expert_map numbers among all. No addend.
        ranks: a `Sharding` with rank, world and added_later: where that is so, out of all ranks adds up to the result.

    Raises:
        TypeError, ValueError: an argument is wrong. The other ranks wait for this one then, as in any collective.
    """
    of_ranks = ranks.group.group_name, ranks.rank, ranks.world, ranks.added_later
    if needs_dispatcher(call.x, call.x):
        return torch.ops.jitgemm.invariant_experts(*of_ranks, *op_arguments(call))
    return _run(*of_ranks, call)


def _run(group: str, rank: int, world: int, added_later: bool, call: ExpertsCall) -> torch.Tensor:
    import torch.distributed as dist

    call = replace(call, batch_invariant=True)
    call.check()
    (tokens, top_k), n = call.topk_ids.shape, call.w2.n
    out = call.x.new_full((tokens, n), NOTHING)
    band = max(1, BAND_BYTES // (top_k * n * out.element_size()))
    for first in range(0, tokens, band):
        x, ids, weights = (each[first : first + band] for each in (call.x, call.topk_ids, call.topk_weights))
        m, part = x.shape[0], ceil_div(x.shape[0], world)
        choices, ones = x.new_empty((m * top_k, n)), torch.ones((m * top_k, 1), device=x.device)
        each = replace(call, x=x.repeat_interleave(top_k, 0), topk_ids=ids.reshape(-1, 1), topk_weights=ones)
        launch(each, choices)
        dist.all_reduce(choices, group=group_named(group))
        rows = torch.arange(m * top_k, dtype=torch.int32, device=x.device).view(m, top_k)
        own = slice(rank * part, (rank + 1) * part) if added_later else slice(m)
        if len(rows[own]):
            combine(choices, rows[own], weights[own], out[first : first + band][own])
    return out


define_op(
    f"invariant_experts(str group, int rank, int world, bool added_later, {CALL_SCHEMA}) -> Tensor",
    lambda group, rank, world, added_later, *arguments: _run(group, rank, world, added_later, call_of_op(*arguments)),
    lambda *arguments: fake(call_of_op(*arguments[4:])),
)
"""Opaque to tracers, which would guard on the number of tokens and cannot follow launches."""
