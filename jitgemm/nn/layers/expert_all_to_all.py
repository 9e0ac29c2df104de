"""Tokens' way to experts on other ranks and back: `fused_experts` over several ranks. Knows no layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.moe.arguments import ExpertsCall
from jitgemm.moe.call import CALL_SCHEMA, call_of_op, fake, launch, op_arguments
from jitgemm.moe.route import combine
from jitgemm.nn.layers.sharding import ExpertSharding
from jitgemm.runtime.dispatch import define_op, needs_dispatcher

# torch 2.13 has a new name, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange(call: ExpertsCall, split: ExpertSharding) -> torch.Tensor:
    """`fused_experts` of this rank's tokens by the experts of all ranks; every rank calls it, also without tokens.

    Args:
        call: w13, w2 and biases of this rank's experts; topk_ids count those of all. No addend, no expert_map.

    Raises:
        TypeError, ValueError: an argument is wrong. The other ranks wait for this one then, as in any collective.
    """
    if needs_dispatcher(call.x, call.x):
        ranks = split.group.group_name, split.rank, split.world, split.experts, split.max_tokens, split.nvlink
        return torch.ops.jitgemm.exchange_experts(*ranks, *op_arguments(call))
    return _exchange(call, split)


def _exchange(call: ExpertsCall, split: ExpertSharding) -> torch.Tensor:
    call.check()
    tokens, most = call.topk_ids.shape[0], split.max_tokens
    if most is None:
        return _sent_where_wanted(call, split)
    if tokens > most:
        raise ValueError(f"hidden_states: expected at most max_tokens = {most} tokens, got {tokens}")
    if split.nvlink and call.x.is_cuda:
        from jitgemm.nn.layers.expert_nvlink import sent_by_kernels  # with torch's symmetric memory

        return sent_by_kernels(call, split, most)
    return _sent_to_all(call, split, most)


def _sent_where_wanted(call: ExpertsCall, split: ExpertSharding) -> torch.Tensor:
    """A token goes once to each rank that has experts of its choice, any number of tokens of any rank.

    What these experts make of it comes back summed, in x's type. The host waits once, for the numbers of rows.
    """
    x, ids = call.x, call.topk_ids
    tokens = ids.shape[0]
    records = _Records.of(call)
    ranks = torch.arange(split.world, device=x.device)
    sent = (ids[:, None] // split.experts == ranks[:, None]).any(2).T  # [world, tokens]; // rounds down
    rank, token = sent.nonzero(as_tuple=True)  # by rank, then by token
    counts = torch.empty((2, split.world), dtype=torch.int64, device=x.device)
    torch.sum(sent, 1, out=counts[0])
    dist.all_to_all_single(counts[1], counts[0], group=split.group)
    there, here = counts.tolist()
    got = torch.empty((sum(here), records.bytes.shape[1]), dtype=torch.uint8, device=x.device)
    dist.all_to_all_single(got, records.bytes[token], here, there, group=split.group)

    y = x.new_empty((sum(here), call.w2.n))
    if y.shape[0]:
        records.run(got, call, split, y.shape[0], y)
    back = x.new_empty((token.shape[0], y.shape[1]))
    dist.all_to_all_single(_bytes(back), _bytes(y), there, here, group=split.group)
    inverse = torch.full((tokens, split.world), -1, dtype=torch.int32, device=x.device)
    inverse[token, rank] = torch.arange(token.shape[0], dtype=torch.int32, device=x.device)
    out = x.new_empty((tokens, y.shape[1]))
    combine(back, inverse, torch.ones((tokens, split.world), device=x.device), out)
    return out


def _sent_to_all(call: ExpertsCall, split: ExpertSharding, most: int) -> torch.Tensor:
    """Every token goes to every rank, as `most` rows of each; nothing waits for the device.

    What a rank's experts make of it comes back summed, in x's type. Rows without a token choose expert -1, which costs
    no work.
    """
    tokens = call.topk_ids.shape[0]
    records = _Records.of(call)
    sent = records.bytes
    if tokens < most:
        sent = torch.cat([sent, sent.new_full((most - tokens, sent.shape[1]), 0xFF)])
    got = sent.new_empty((split.world * most, sent.shape[1]))
    _all_gather(got, sent, group=split.group)
    y = call.x.new_empty((got.shape[0], call.w2.n))
    records.run(got, call, split, split.world * max(tokens, 1), y)
    back = torch.empty_like(y)
    dist.all_to_all_single(back, y, group=split.group)
    return back.view(split.world, most, -1)[:, :tokens].sum(0)  # bf16 and fp16 in fp32, rounded once


@dataclass(frozen=True)
class _Records:
    """Tokens as they travel, and how to read them: a row of bytes each.

        | k codes | scale or scales | zero point, if any | top_k experts, int32 | top_k weights, fp32 |

    Attributes:
        bytes: uint8 [tokens, width]; 0xFF everywhere is a token without experts.
        parts: tensors [0, ...] like the parts.
    """

    bytes: torch.Tensor
    parts: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, call: ExpertsCall) -> _Records:
        ids = call.topk_ids
        if ids.dtype != torch.int32:
            ids = ids.clamp(-1, torch.iinfo(torch.int32).max).int()  # none comes back as another expert
        codes = quantize(QuantizeCall(call.x, call.activation))
        parts = *(each for each in codes if each is not None), ids, call.topk_weights.float()
        rows = [_bytes(part[:, None] if part.dim() == 1 else part) for part in parts]
        return cls(torch.cat(rows, 1), tuple(part.new_empty((0, *part.shape[1:])) for part in parts))

    def run(self, got: torch.Tensor, call: ExpertsCall, split: ExpertSharding, tokens: int, y: torch.Tensor) -> None:
        """y = what this rank's experts make of the tokens that it got, some `tokens` of them."""
        columns = got.split([part.shape[1:].numel() * part.element_size() for part in self.parts], 1)
        *lhs, ids, weights = (
            column.contiguous().view(part.dtype).view(got.shape[0], *part.shape[1:])
            for column, part in zip(columns, self.parts, strict=True)
        )
        ids = ids - split.rank * split.experts  # those of other ranks are outside of this one's
        mine = replace(call, x=call.x.new_empty(got.shape[0], call.x.shape[1]), topk_ids=ids, topk_weights=weights)
        launch(mine, y, tuple(lhs), tokens * ids.shape[1] / (split.world * split.experts))


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Rows [m, n] as bytes, over the same memory where they are contiguous."""
    if rows.stride(-1) != 1:  # a single column is contiguous whatever its stride
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.contiguous().view(torch.uint8)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _op(
    group: str, rank: int, world: int, experts: int, most: int | None, nvlink: bool, *arguments: Any
) -> torch.Tensor:
    split = ExpertSharding(_resolve_process_group(group), rank, world, experts, True, most, nvlink)
    return _exchange(call_of_op(*arguments), split)


define_op(
    "exchange_experts(str group, int rank, int world, int experts, int? max_tokens, bool nvlink, "
    f"{CALL_SCHEMA}) -> Tensor",
    _op,
    lambda *arguments: fake(call_of_op(*arguments[6:])),
)
"""Opaque to tracers, which would guard on the number of tokens and cannot follow launches."""
