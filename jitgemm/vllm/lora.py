"""LoRA on packed experts, by vLLM's mixin: the layer in its steps, with the adapters' products added between them.

::

    hidden = w13 · Q(x) + b13        + B13 · A13 · x        the LoRA's, in the model's type
    inner  = gate(hidden)                                   Q(inner) goes into w2
    out    = sum over i of topk_weights[i] * (w2 · Q(inner) + b2 + B2 · A2 · inner)

vLLM's kernels compute what its adapters add, in the order of tokens and their choices; the layer's rows are sorted by
expert.
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.activations.reference import gated


def run_adapted(
    experts: Any, output: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:  # fmt: skip
    """Writes what packed experts and their adapters make of tokens into output [tokens, hidden].

    Args:
        experts: with vLLM's `LoRAExpertsMixin`, its LoRA context set, and `module`, the packed experts.
        x, topk_weights, topk_ids, expert_map: as a modular kernel's experts are given them.
    """
    module, context, (tokens, top_k) = experts.module, experts._lora_context, topk_ids.shape
    w13, w2 = module.w13.weight, module.w2.weight
    # vLLM chooses its kernels by the experts' sizes, which it reads from weights.
    sizes = [torch.empty(weight.shape, dtype=x.dtype, device="meta") for weight in (w13, w2)]
    shared = {"w1": sizes[0], "w2": sizes[1], "num_tokens": tokens, "top_k_num": top_k}

    def adapt(hidden: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        row = inverse.flatten().long()
        first, skipped = x.new_zeros(tokens, top_k, w13.n), (row < 0)[:, None]
        which = dict(topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map)
        sorted_ids, expert_ids, padded, mapping = experts.apply_w13_lora(context, y=first, x=x, **which, **shared)
        choice = row.new_zeros(len(row) + 1)  # of each row; the last is for choices that are skipped
        choice[torch.where(row < 0, len(row), row)] = torch.arange(len(row), device=row.device)
        hidden += first.view(-1, w13.n)[choice[:-1]]
        inner = gated(hidden.float(), module.gate).to(x.dtype)[row.clamp(min=0)].masked_fill_(skipped, 0)
        second = x.new_zeros(tokens, top_k, w2.n)
        experts.apply_w2_lora(
            context, y=second, x=inner, topk_weights=topk_weights, sorted_token_ids_lora=sorted_ids,
            expert_ids_lora=expert_ids, num_tokens_post_padded_lora=padded, token_lora_mapping=mapping, **shared,
        )  # fmt: skip
        return second.sum(1)

    module.run_adapted(x, topk_ids, topk_weights, expert_map, output, adapt)
