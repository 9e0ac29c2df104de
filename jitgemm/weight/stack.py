"""A weight of experts out of dense ones, which may be of formats that their values decided: `Weight.stacked`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from jitgemm.kernel.formats import STRIP_ROWS, WeightFormat
from jitgemm.tensors import check_int
from jitgemm.weight import layout
from jitgemm.weight.codes import CODE_OPS

W = TypeVar("W", bound=Any)


def stack(cls: type[W], count: int, make: Callable[[int], W], together: int) -> W:
    """`cls.stacked`."""
    if (count := check_int("count", count)) < 1:
        raise ValueError(f"count: expected at least one expert, got {count}")
    if (together := check_int("together", together)) < 1 or count % together:
        raise ValueError(f"together: expected a divisor of {count} experts, got {together}")

    first: dict[str, Any] = {}
    stacked: dict[str, torch.Tensor] = {}
    sums = "f32"
    with torch.inference_mode(False), torch.no_grad():
        for e in range(0, count, together):
            weight = make(e)
            if not isinstance(weight, cls) or weight.experts is not None or weight.permutation is not None:
                got = repr(weight) if isinstance(weight, cls) else type(weight).__name__
                error = ValueError if isinstance(weight, cls) else TypeError
                raise error(f"make({e}): expected a dense {cls.__name__} without a permutation, got {got}")
            if together > 1 and weight.n % (together * STRIP_ROWS):
                expected = f"the rows of {together} experts, {STRIP_ROWS} or a multiple each"
                raise ValueError(f"make({e}): expected {expected}, got n = {weight.n}")
            sums, weight = weight.sums if e == 0 else sums, weight.with_sums("f32")
            common = weight.format.for_any_values
            like = e > 0 and (weight.k, common.code) == (first["k"], first["format"].code)
            if like:  # some experts' values may ask for smaller groups than others'
                regroup, ops = first["group_size"], weight.ops
                weight = weight.regrouped(ops.common_group(weight.group_size, regroup))
                if (size := ops.common_group(regroup, weight.group_size)) != regroup:
                    stacked, format = regrouped(stacked, first["format"], size), weight.format
                    first |= {"group_size": size, "format": format, "tensors": list(stacked)}
            tensors, common = weight._tensors, weight.format.for_any_values
            facts = {"n": weight.n, "k": weight.k, "group_size": weight.group_size, "device": weight.device}
            facts |= {"format": common, "tensors": list(tensors), "rotation": weight.rotation}
            if e == 0:
                first, format = facts, weight.format
                stacked = {
                    name: part.new_empty((count, part.shape[0] // together, *part.shape[1:]))
                    for name, part in tensors.items()
                }
            for name, fact in facts.items():
                if fact != first[name]:
                    raise ValueError(f"make({e}): expected {name} {first[name]}, as make(0) has, got {fact}")
            for name, part in tensors.items():
                stacked[name][e : e + together] = part.unflatten(0, (together, -1))
            if weight.format != format:
                blocks = stacked["blocks"]
                for some, order in ((blocks[:e], format.order), (blocks[e : e + together], weight.format.order)):
                    layout.reorder_codes(some, format.code, order, common.order)
                format = common
            del weight, tensors, part  # before the next is made
    sizes = first["n"] // together, first["k"], first["group_size"]
    more: Any = {"row_sum": stacked.get("row_sum"), "rotation": first["rotation"]}
    return cls(stacked["blocks"], stacked.get("channel_scale"), *sizes, format, **more).with_sums(sums)


def regrouped(tensors: dict[str, torch.Tensor], format: WeightFormat, group_size: int) -> dict[str, torch.Tensor]:
    """Tensors of a weight, or of experts, with a scale for fewer k."""
    new, ops = replace(format, group_size=group_size), CODE_OPS[format.code]
    return {"blocks": ops.regrouped(tensors["blocks"], tensors.get("channel_scale"), format, new)}
