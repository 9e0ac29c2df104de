"""Which Linears and stacked experts of a model `quantize_` takes, and why it leaves the others."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.formats import K_ALIGNMENT
from jitgemm.nn.quantize.replaceable import PACKED, ROUTERS, Filter, Replaceable
from jitgemm.nn.quantize.stacked import experts_layout
from jitgemm.nn.recipe import Recipe
from jitgemm.tensors import PLAIN, TYPE_NAMES, dtype_name, one_of

STACKED = "stacked experts"  # with which the reasons of `experts_layout` begin, too
_UNKNOWN = f"{STACKED} of an unknown kind, which stay in their type"
MIN_STACKED = 32  # smaller matrices in 3-D parameters are no experts


def choose(scan: Replaceable, filter: Filter | None, recipe: Recipe) -> tuple[dict[str, list[str]], dict[str, str]]:
    """({name: all its places} of the modules to quantise, {name: why not} of the others), from sizes and types.

    Raises:
        ValueError: the filter chose a module that has no packed form, or there is no head to quantise as lm_head says.
    """
    lm_head = recipe.head
    if lm_head is not None and scan.head is None:
        raise ValueError("lm_head: expected a model whose output embedding is a Linear, found none")
    chosen, skipped = {}, {}
    for name, places in scan.places.items():
        module = scan.model.get_submodule(name)
        reason = f"is a {type(module).__name__} already" if isinstance(module, PACKED) else scan.why_impossible(name)
        if lm_head is not None and name == scan.head:
            if (problem := reason or why_unfit(scan, name, recipe.k_alignment)) is not None:
                raise ValueError(f"lm_head: {name}: {problem}")
        elif reason is None and recipe.leaves(name):
            reason = "left out by ignore"
        elif reason is None and filter is None:
            reason = why_unwise(scan, name, recipe.k_alignment)
        elif reason is None and filter is not None and not filter(name, module):
            reason = "left out by the filter"
        elif reason is None and (problem := why_unfit(scan, name, recipe.k_alignment)) is not None:
            raise ValueError(f"{name}: {problem}")
        if reason is None:
            chosen[name] = places
        else:
            skipped[name] = reason
    return chosen, skipped


def why_unwise(scan: Replaceable, name: str, k_alignment: int = K_ALIGNMENT) -> str | None:
    """Why quantize_ leaves this module alone unless a filter asks for it; k_alignment: as for `why_unfit`."""
    linear: Any = scan.model.get_submodule(name)
    if name in scan.experts:
        return why_unfit(scan, name, k_alignment)
    if name.rpartition(".")[2] == "lm_head" or name == scan.head:
        return "output embedding"
    if scan.shared(name):
        return "shares its weight with another module"
    near = name.split(".")[-2:]
    if any(part in ROUTERS for part in near) and linear.out_features < linear.in_features:
        return "router"
    return why_unfit(scan, name, k_alignment)


def why_unfit(scan: Replaceable, name: str, k_alignment: int = K_ALIGNMENT) -> str | None:
    """Why a module has no packed form, whatever its values; k_alignment: what its columns are a multiple of."""
    linear: Any = scan.model.get_submodule(name)
    if (layout := scan.experts.get(name)) is not None:
        if layout.hidden % k_alignment or layout.inter % k_alignment:
            wanted = f"expected hidden and intermediate sizes that are multiples of {k_alignment}"
            return f"{wanted}, got {layout.hidden} and {layout.inter}"
        problems = (_why_unfit_type(parameter, getattr(linear, parameter)) for parameter in layout.parameters)
        return next(filter(None, problems), None)
    n, k = linear.out_features, linear.in_features
    if not n or not k or n % 8 or k % k_alignment:
        wanted = f"expected out_features a multiple of 8 and in_features a multiple of {k_alignment}"
        return f"{wanted}, got {n} and {k}"
    return _why_unfit_type("a weight", linear.weight)


def others(scan: Replaceable) -> dict[str, str]:
    """What else holds matrices: layers of other classes, and stacked experts that stay as they are."""
    reasons = {}
    for name, module in scan.model.named_modules():
        base = type(module)
        if name in scan.places or isinstance(module, torch.nn.Embedding) or base.__module__.startswith("torch.nn"):
            continue
        reason = experts_layout(module)
        for child, parameter in module.named_parameters(recurse=False):
            if child == "weight" and parameter.dim() == 2:
                reasons[name] = f"{base.__name__}, which is no torch.nn.Linear"
            elif parameter.dim() == 3 and len(parameter) > 1 and min(parameter.shape[1:]) >= MIN_STACKED:
                reasons[f"{name}.{child}"] = reason if isinstance(reason, str) else _UNKNOWN
    return reasons


def _why_unfit_type(name: str, tensor: torch.Tensor) -> str | None:
    plain = type(tensor) in PLAIN
    if plain and TYPE_NAMES.get(tensor.dtype) in REAL_TYPES:
        return None
    got = dtype_name(tensor.dtype) if plain else type(tensor).__name__
    return f"expected {name} of {one_of(REAL_TYPES)}, got {got}"
