"""A layer of experts divided among the GPUs of one host, next to the whole of it on one GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import jitgemm
from jitgemm.nn import PackedExperts, W4A8Experts

from .divided import of_slowest, warm_up
from .timing import QUICK_ROUNDS, REPLAYS, Launched, Timed

ROUTINGS = 8
"""Of a turn, so that calls meet different experts."""


@dataclass(frozen=True)
class ExpertSizes:
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    group_size: int


def experts_of(sizes: ExpertSizes, activation: str, device: torch.device, seed: int) -> W4A8Experts:
    """Random experts, each another; the same on every rank."""
    draw = torch.Generator(device).manual_seed(seed)
    lhs_dtype = torch.int8 if activation == "int8" else torch.float8_e4m3fn

    def weight(n: int, k: int) -> jitgemm.W4Weight:
        def expert(_: int) -> jitgemm.W4Weight:
            q = torch.randint(-7, 8, (n, k), dtype=torch.int8, device=device, generator=draw)
            groups = k // sizes.group_size
            scale = (torch.rand(n, groups, device=device, generator=draw) + 0.5).mul(k**-0.5 / 4).bfloat16()
            return jitgemm.pack_w4(q, scale, group_size=sizes.group_size, k=k, lhs_dtype=lhs_dtype)

        return jitgemm.W4Weight.stacked(sizes.experts, expert)

    w13 = weight(2 * sizes.intermediate, sizes.hidden)
    w2 = weight(sizes.hidden, sizes.intermediate)
    return W4A8Experts(w13, w2, activation=activation, top_k=sizes.top_k)


def time_experts(
    mesh: Any,
    sizes: ExpertSizes,
    activations: Sequence[str],
    tokens: Sequence[int],
    seed: int,
    device: torch.device,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each activation and number of a rank's tokens, equal on all ranks; routing is uniform.

    Returns:
        activation, tokens; one_us: the whole layer, `tokens` of them on one GPU; shared_us: divided, all ranks with these
        tokens; one_all_us: the whole layer, all ranks' tokens on one GPU; own_us: divided, each rank with tokens of its
        own, as many as max_tokens; nvlink_us: the same with exchange="nvlink", on a GPU; all these in CUDA graphs; any_us:
        the same for any number of tokens, as the host launches it; difference: relative, the largest of divided outputs
        from the whole layer's; same_bits: whether own and nvlink gave the same.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from jitgemm.nn.parallel import ExpertParallel

    gpu, rank, ranks = device.type == "cuda", mesh.get_local_rank(), mesh.size()
    graphs = Timed if gpu else Launched
    rows: list[dict[str, Any]] = []
    for activation in activations:
        say(f"{activation}: packing {sizes.experts} experts")
        whole = experts_of(sizes, activation, device, seed)

        def divided(style: ExpertParallel, whole: W4A8Experts = whole) -> PackedExperts:
            return parallelize_module(copy.deepcopy(whole), mesh, style)  # type: ignore[return-value]

        shared, any_number = divided(ExpertParallel()), divided(ExpertParallel(input_layouts=Shard(0)))
        if gpu:
            for layer in (whole, shared):
                warm_up(layer, mesh, ranks * max(tokens))
        for count in tokens:
            say(f"{activation}: {count} tokens a rank")
            draw = torch.Generator(device).manual_seed(seed)
            all_ranks = [_routed(sizes, ranks * count, device, draw) for _ in range(ROUTINGS)]
            first, here = slice(count), slice(rank * count, (rank + 1) * count)
            fixed = divided(ExpertParallel(input_layouts=Shard(0), max_tokens=count))
            nvlink = divided(ExpertParallel(input_layouts=Shard(0), max_tokens=count, exchange="nvlink"))
            difference, same_bits = 0.0, True
            for given in all_ranks:
                exact = whole(*given).float()
                same_bits &= torch.equal(*(layer(*(each[here] for each in given)) for layer in (fixed, nvlink)))
                for layer, part in ((shared, first), (fixed, here), (any_number, here)):
                    found = layer(*(each[part] for each in given)).float()
                    difference = max(difference, float((found - exact[part]).norm() / exact[part].norm()))

            def calls(layer: PackedExperts, part: slice, routed: list = all_ranks) -> list[Callable[[], Any]]:
                return [partial(layer, *(each[part].clone() for each in given)) for given in routed]

            timed = {
                "one_us": graphs(calls(whole, first)),
                "shared_us": graphs(calls(shared, first)),
                "one_all_us": graphs(calls(whole, slice(None))),
                "own_us": graphs(calls(fixed, here)),
                **({"nvlink_us": graphs(calls(nvlink, here))} if gpu else {}),
                "any_us": Launched(calls(any_number, here), torch.cuda.synchronize if gpu else lambda: None),
            }
            times = of_slowest(timed, QUICK_ROUNDS if gpu else 1, REPLAYS if gpu else 1)
            found_on: list[Any] = [None] * ranks
            dist.all_gather_object(found_on, (difference, same_bits))
            differences, bits = zip(*found_on)
            agreement = {"difference": max(differences), "same_bits": all(bits)}
            rows.append({"activation": activation, "tokens": count} | times | agreement)
        del whole, shared, any_number, fixed, nvlink
    return rows


def _routed(
    sizes: ExpertSizes, tokens: int, device: torch.device, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, top_k_index and top_k_weights of so many tokens."""
    x = torch.randn(tokens, sizes.hidden, device=device, generator=draw).bfloat16()
    ids = torch.rand(tokens, sizes.experts, device=device, generator=draw).argsort(1)[:, : sizes.top_k].int()
    return x, ids.contiguous(), torch.rand(tokens, sizes.top_k, device=device, generator=draw) / sizes.top_k
