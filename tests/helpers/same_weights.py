"""Packed weights, tensor by tensor."""

from __future__ import annotations

import builders

from jitgemm.weight.packed import W4Weight

TENSORS = ("blocks", "channel_scale", "row_sum", "permutation")


def same_weight(a: W4Weight, b: W4Weight) -> bool:
    def same_tensor(name: str) -> bool:
        pair = getattr(a, name), getattr(b, name)
        return pair == (None, None) or (None not in pair and builders.same_bits(*pair))

    described = ("shape", "group_size", "format", "layout_version")
    return all(map(same_tensor, TENSORS)) and all(getattr(a, x) == getattr(b, x) for x in described)
