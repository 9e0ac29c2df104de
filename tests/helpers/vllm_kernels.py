"""What vLLM's experts hand to kernels."""

from __future__ import annotations

import torch


class Kernels:
    """What vLLM's kernels do for an adapter of every token, as their Triton code is documented: y += weight * B · A · x."""

    def __init__(self, local):
        self.local, self.seen = local, None

    def add_lora_w13(self, y, x, a, b, topk_ids, topk_weights, expert_map, w1, w2, num_tokens, top_k_num, *_, **__):
        expected = a[0].shape[1], x.shape[1], (num_tokens, top_k_num, w1.shape[1])
        assert (w1.shape[0], w1.shape[2], tuple(y.shape)) == expected
        self.seen = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
        for t in range(num_tokens):
            for i in range(top_k_num):
                if (e := int(self.seen[t, i])) >= 0:
                    parts = [
                        second[0, e].double() @ (first[0, e].double() @ x[t].double()) for first, second in zip(a, b)
                    ]
                    y[t, i] += torch.cat(parts).to(y.dtype)
        return None, None, None, None

    def add_lora_w2(self, y, x, a, b, topk_weights, *rest, **__):
        for t in range(y.shape[0]):
            for i in range(y.shape[1]):
                if (e := int(self.seen[t, i])) >= 0:
                    found = b[0][0, e].double() @ (a[0][0, e].double() @ x[t * y.shape[1] + i].double())
                    y[t, i] += (topk_weights[t, i].double() * found).to(y.dtype)
