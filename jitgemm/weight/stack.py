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
    whole: dict[str, torch.Tensor] = {}
    sums = "f32"
    with torch.inference_mode(False), torch.no_grad():
        for e in range(0, count, together):
            each = make(e)
            if not isinstance(each, cls) or each.experts is not None or each.permutation is not None:
                got = repr(each) if isinstance(each, cls) else type(each).__name__
                error = ValueError if isinstance(each, cls) else TypeError
                raise error(f"make({e}): expected a dense {cls.__name__} without a permutation, got {got}")
            if together > 1 and each.n % (together * STRIP_ROWS):
                expected = f"the rows of {together} experts, {STRIP_ROWS} or a multiple each"
                raise ValueError(f"make({e}): expected {expected}, got n = {each.n}")
            sums, each = each.sums if e == 0 else sums, each.with_sums("f32")
            common = each.format.for_any_values
            like = e > 0 and (each.k, common.code) == (first["k"], first["format"].code)
            if like:  # some experts' values may ask for smaller groups than others'
                regroup, ops = first["group_size"], each.ops
                each = each.regrouped(ops.common_group(each.group_size, regroup))
                if (size := ops.common_group(regroup, each.group_size)) != regroup:
                    whole, format = regrouped(whole, first["format"], size), each.format
                    first |= {"group_size": size, "format": format, "tensors": list(whole)}
            tensors, common = each._tensors, each.format.for_any_values
            facts = {"n": each.n, "k": each.k, "group_size": each.group_size, "device": each.device}
            facts |= {"format": common, "tensors": list(tensors), "rotation": each.rotation}
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
                blocks = whole["blocks"]
                for some, order in ((blocks[:e], format.order), (blocks[e : e + together], each.format.order)):
                    layout.reorder_codes(some, format.code, order, common.order)
                format = common
            del each, tensors, part  # before the next is made
    sizes = first["n"] // together, first["k"], first["group_size"]
    more: Any = {"row_sum": whole.get("row_sum"), "rotation": first["rotation"]}
    return cls(whole["blocks"], whole.get("channel_scale"), *sizes, format, **more).with_sums(sums)


def regrouped(tensors: dict[str, torch.Tensor], format: WeightFormat, group_size: int) -> dict[str, torch.Tensor]:
    """Tensors of a weight, or of experts, with a scale for fewer k."""
    new, ops = replace(format, group_size=group_size), CODE_OPS[format.code]
    return {"blocks": ops.regrouped(tensors["blocks"], tensors.get("channel_scale"), format, new)}
