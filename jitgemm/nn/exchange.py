"""Experts divided among ranks: whole experts on each, and the tokens' way there and back.

Knows `torch.distributed` and the calls of a mixture; no layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jitgemm.activations.call import quantize_activations
from jitgemm.moe.arguments import Layer, check_arguments
from jitgemm.moe.call import run_quantised
from jitgemm.moe.route import combine


@dataclass(frozen=True)
class ExpertSplit:
    """Which experts of a layer this rank has.

    Attributes:
        group: the ranks, in the order of their experts.
        rank, world: this one, and how many.
        experts: of a rank; rank r has experts r * experts to (r + 1) * experts - 1.
        exchanges: whether every rank has tokens of its own, or all have the same.
    """

    group: dist.ProcessGroup
    rank: int
    world: int
    experts: int
    exchanges: bool

    def expert_map(self, device: torch.device) -> torch.Tensor:
        """int32 [all experts]: this rank's number of each, -1 for others'."""
        numbers = torch.arange(self.world * self.experts, dtype=torch.int32, device=device) - self.rank * self.experts
        return torch.where((numbers >= 0) & (numbers < self.experts), numbers, -1)

    def sum(self, out: torch.Tensor) -> None:
        """out = the sum of all ranks' out, rounded to its type at every addition."""
        dist.all_reduce(out, group=self.group)

    def exchange(self, layer: Layer) -> torch.Tensor:
        return _exchanged(layer, self)

    def __deepcopy__(self, memo: Any) -> ExpertSplit:
        return self  # processes have no copies

    def __reduce__(self) -> Any:
        raise TypeError("split: expected no pickle of experts divided among ranks, as they hold a process group")


def _exchanged(layer: Layer, split: ExpertSplit) -> torch.Tensor:
    """`fused_experts` of this rank's tokens by the experts of all ranks; every rank calls it, with tokens or without.

    A token goes once to each rank that has experts of its choice, as 8-bit codes with scale, choices and weights, and
    what these experts make of it comes back summed, in x's type. The host waits once, for the numbers of rows.

    Args:
        layer: w13, w2 and biases of this rank's experts; topk_ids count those of all. No addend, no expert_map.

    Raises:
        TypeError, ValueError: an argument is wrong. The other ranks wait for this one then, as in any collective.
    """
    check_arguments(layer)
    x, _, _, ids, weights, _, dtype, affine, *_ = layer
    tokens, top_k = ids.shape
    scheme = "block" if layer.block else "token"
    q, *values = quantize_activations(x, dtype, scheme=scheme, affine=affine)
    known = (ids >= 0) & (ids < split.world * split.experts)
    owner = torch.where(known, ids // split.experts, split.world)
    wanted = owner[:, None] == torch.arange(split.world, device=x.device)[:, None]  # [tokens, world, top_k]
    sent = wanted.any(2).T
    rank, token = sent.nonzero(as_tuple=True)  # by rank, then by token
    chosen = torch.where(wanted[token, rank], ids[token] - rank[:, None] * split.experts, -1)
    parts = [_bytes(q)[token]]
    parts += [_bytes((value[:, None] if value.dim() == 1 else value)[token]) for value in values]
    parts += [_bytes(chosen.int()), _bytes(weights.float()[token])]
    counts = sent.sum(1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=split.group)
    there, here = counts.tolist(), arriving.tolist()
    widths = [part.shape[1] for part in parts]
    got = torch.empty((sum(here), sum(widths)), dtype=torch.uint8, device=x.device)
    dist.all_to_all_single(got, torch.cat(parts, 1), here, there, group=split.group)

    y = x.new_empty((sum(here), layer.w2.n))
    if y.shape[0]:
        codes, *rest = (part.contiguous() for part in got.split(widths, 1))
        *scales, chosen_here, weights_here = rest
        lhs = [codes.view(dtype)]
        for value, each in zip(values, scales):
            found = each.view(value.dtype)
            lhs.append(found if value.dim() == 2 else found[:, 0].contiguous())
        mine = layer._replace(
            x=y.new_empty((y.shape[0], x.shape[1])),
            topk_ids=chosen_here.view(torch.int32),
            topk_weights=weights_here.view(torch.float32),
        )
        run_quantised(mine, tuple(lhs), y.shape[0] * top_k / (split.world * split.experts), y)
    back = x.new_empty((token.shape[0], y.shape[1]))
    dist.all_to_all_single(_bytes(back), _bytes(y), there, here, group=split.group)
    inverse = torch.full((split.world, tokens), -1, dtype=torch.int32, device=x.device)
    inverse[rank, token] = torch.arange(token.shape[0], dtype=torch.int32, device=x.device)
    out = x.new_empty((tokens, y.shape[1]))
    combine(back, inverse.T.contiguous(), torch.ones((tokens, split.world), device=x.device), out)
    return out


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Rows [m, n] as bytes, over the same memory where they are contiguous."""
    return rows.contiguous().view(torch.uint8)
