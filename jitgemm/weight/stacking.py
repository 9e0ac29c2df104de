"""Experts out of dense weights, copied one by one into the memory of all. Checks that they fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jitgemm.kernel.formats import STRIP_ROWS
from jitgemm.weight import layout
from jitgemm.weight.parts import PackedWeight


def stack(count: int, make: Callable[[int], tuple[PackedWeight, int]], together: int) -> tuple[PackedWeight, int]:
    """`Weight.stacked`, of dense weights with their group sizes."""
    first: dict[str, Any] = {}
    whole: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for e in range(0, count, together):
            each, group_size = make(e)
            if together > 1 and each.n % (together * STRIP_ROWS):
                expected = f"the rows of {together} experts, {STRIP_ROWS} or a multiple each"
                raise ValueError(f"make({e}): expected {expected}, got n = {each.n}")
            tensors = {name: part for name, part in each._asdict().items() if isinstance(part, torch.Tensor)}
            facts: dict[str, Any] = {"n": each.n, "k": each.k, "group_size": group_size}
            facts |= {"device": each.blocks.device, "format": each.format.for_any_values, "tensors": list(tensors)}
            if e == 0:
                first, format = facts, each.format
                whole = {
                    name: part.new_empty((count, part.shape[0] // together, *part.shape[1:]))
                    for name, part in tensors.items()
                }
            for name, fact in facts.items():
                if fact != first[name]:
                    raise ValueError(f"make({e}): expected {name} {first[name]}, as make(0) has, got {fact}")
            for name, part in tensors.items():
                whole[name][e : e + together] = part.unflatten(0, (together, -1))
            if each.format != format:
                common = format.for_any_values.order
                layout.reorder_codes(whole["blocks"][:e], format.code, format.order, common)
                layout.reorder_codes(whole["blocks"][e : e + together], format.code, each.format.order, common)
                format = format.for_any_values
            del each, tensors, part  # before the next is made
    parts = whole["blocks"], whole.get("channel_scale"), whole.get("row_sum")
    return PackedWeight(*parts, first["n"] // together, first["k"], format), group_size
