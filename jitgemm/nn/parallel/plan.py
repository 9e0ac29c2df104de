"""Which style divides which layer of a model: what `load_` and `jitgemm.hf` ask for every layer that they make."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from jitgemm.checkpoint.canonical import PART_MULTIPLES
from jitgemm.kernel.formats import GROUP_SIZES
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.shard_weight import Cut
from jitgemm.nn.layers.sharding import ExpertSharding
from jitgemm.nn.parallel.styles import ColwiseParallel, ExpertParallel, RowwiseParallel, Style, rank_of

STYLES: dict[str, Style] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), ColwiseParallel(output_layouts=Replicate())),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), RowwiseParallel(input_layouts=Replicate())),
}
"""Styles by the names that transformers' plans give them."""

WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Names for a layer that is whole on every rank, as far as inference goes."""


@dataclass(frozen=True)
class ShardingPlan:
    """How a whole model is divided.

    Attributes:
        mesh: of one dimension.
        rules: {pattern (`fnmatch`) of names: a style, or its name}; the first that fits a name holds.
        tp_invariant: every style of a Linear is one with tp_invariant.
    """

    mesh: DeviceMesh
    rules: Mapping[str, str | Style]
    tp_invariant: bool | int = False

    def style(self, name: str) -> Style | None:
        """Of the Linear of that name; None for one that is whole on every rank."""
        style = style_in(self.rules, name)
        return style if style is None or not self.tp_invariant else style.invariant(self.tp_invariant)

    def style_in_floats(self, name: str) -> Style | None:
        """Of a Linear in floats; None if no rank need divide it. Raises ValueError for a style with tp_invariant."""
        style = self.style(name)
        if style is None or (style.output_layouts if style.dim == "n" else style.input_layouts) == (Replicate(),):
            return None
        if self.tp_invariant:
            raise ValueError(f"{name}: expected a packed layer for tp_invariant, got a Linear in floats")
        return style

    def check(self, model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        """Raises ValueError for what headers show that cannot be divided so, warns where no quantised layer is divided.

        layers: of `load_`'s plan, by name.
        """
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                self.style(name)
        divided = [self._divides(name, layer) for name, layer in layers.items()]
        if layers and not any(divided):
            warnings.warn(
                f"tp_plan: divides none of the {len(layers)} quantised layers, which every rank holds whole; give "
                "load_(tp_plan=...) a style for them",
                stacklevel=3,
            )
        heads = getattr(getattr(model, "config", None), "num_key_value_heads", None)
        cut = [rule for pattern, rule in self.rules.items() if pattern.endswith("k_proj") and rule == "colwise"]
        if isinstance(heads, int) and cut and heads % (world := self.mesh.size()):
            raise ValueError(f"tp: expected ranks that divide num_key_value_heads = {heads}, got {world}")

    def _divides(self, name: str, layer: Any) -> bool:
        """Whether a layer of `load_`'s plan is divided. Raises ValueError where so many ranks cannot."""
        if layer.layout is not None:
            return self.expert_split(name, layer.layout.experts) is not None
        style, world = self.style(name), self.mesh.size()
        if style is None:
            return False
        size, multiple = (layer.n if style.dim == "n" else layer.k or 0), PART_MULTIPLES[style.dim]
        group = layer.group_size or size
        if style.dim == "k" and group < size and size % (world * group):
            multiple = min(GROUP_SIZES)  # what a cut through groups leaves of them
        if size % (world * multiple):
            raise ValueError(
                f"{name}: expected {style.dim} = {size} to be a multiple of {world} ranks * {multiple}; give it "
                "another style in tp_plan, as for the layers that share its heads or columns"
            )
        return True

    def cut(self, name: str) -> Cut | None:
        """Which part of a Linear this rank has as it is read; None for all of it."""
        style = self.style(name)
        return (
            None if style is None or (style.tp_invariant and style.dim == "k") else Cut(style.dim, *rank_of(self.mesh))
        )

    def mark(self, layer: PackedLinear, name: str) -> None:
        """Tells a layer that was cut when read how it is divided; cuts one that is to have parts of all records."""
        style = self.style(name)
        if style is not None and style.tp_invariant and style.dim == "k":
            parallelize_module(layer, self.mesh, style, src_data_rank=None)
        elif style is not None:
            layer.split, layer.tp_invariant = style.sharding(self.mesh), "n" if style.tp_invariant else None

    def _of_experts(self, name: str) -> ExpertParallel | None:
        rule = rule_in(self.rules, name)
        if not isinstance(rule, ExpertParallel):
            return None
        return rule.invariant(self.tp_invariant) if self.tp_invariant else rule

    def expert_split(self, name: str, experts: int) -> ExpertSharding | None:
        """What this rank has of a layer's experts; None for all of them."""
        style = self._of_experts(name)
        if style is None:
            return None
        return style.sharding_of(name, experts, self.mesh)

    def divide(self, name: str, module: torch.nn.Module) -> None:
        """Divides a whole layer, packed or not; a Linear in floats stays whole where that gives the same output."""
        if isinstance(module, PackedExperts):
            style: Any = self._of_experts(name)
        else:
            style = self.style_in_floats(name) if isinstance(module, torch.nn.Linear) else self.style(name)
        if style is not None:
            parallelize_module(module, self.mesh, style, src_data_rank=None)


def sharding_plan(
    model: torch.nn.Module, mesh: DeviceMesh, rules: Mapping[str, str | Style] | None, tp_invariant: bool | int = False
) -> ShardingPlan:  # fmt: skip
    """How a model is divided, by its own plan where rules is None.

    Raises:
        TypeError, ValueError: no mesh, no plan, or a rule that fits nothing.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"tp: expected a DeviceMesh, got {type(mesh).__name__}")
    rank_of(mesh)
    if rules is None:
        return ShardingPlan(mesh, plan_of(model), tp_invariant)
    names = [name for name, _ in model.named_modules()]
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"tp_plan: expected patterns of the model's modules, got {pattern!r}, which fits none")
    return ShardingPlan(mesh, rules, tp_invariant)


def rule_in(rules: Mapping[str, str | Style], name: str) -> Any:
    """That of the first pattern that fits a name; None where none does."""
    return next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)


def style_in(rules: Mapping[str, str | Style], name: str) -> Style | None:
    """That of the Linear of a name; None for one that no rank divides. Raises ValueError for a rule that is none."""
    rule = rule_in(rules, name)
    if rule is None or rule in WHOLE:
        return None
    style = STYLES.get(rule) if isinstance(rule, str) else rule
    if not isinstance(style, Style):
        expected = ", ".join((*STYLES, *WHOLE))
        raise ValueError(f"tp_plan: expected a style, or one of {expected}, got {rule!r} for {name}")
    return style


def plan_of(model: torch.nn.Module) -> Mapping[str, str | Style]:
    """The model's own plan. Raises ValueError where it has none."""
    rules = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not rules:
        raise ValueError("tp_plan: expected {pattern of names: style}, as the model has no plan of its own, got None")
    return rules
