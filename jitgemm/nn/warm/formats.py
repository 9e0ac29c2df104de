"""The layers that a model will have, without values: formats by its files' headers, or by rows where values decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.checkpoint.canonical import CanonicalWeight, concat
from jitgemm.checkpoint.layouts import N
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import WeightFormat
from jitgemm.nn.layers.by_width import empty_weight
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.linear import LINEARS, PackedLinear
from jitgemm.nn.layers.shard_weight import Cut, part_of_weight
from jitgemm.nn.load.layer_source import LayerSource, parts_without_data
from jitgemm.nn.load.plan import Plan
from jitgemm.nn.quantize.choose import choose
from jitgemm.nn.quantize.replaceable import Replaceable
from jitgemm.nn.recipe import Recipe

ROWS = 128
"""Rows of a layer that are read to see its format: whole blocks with one scale, and words of packed codes."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Look:
    """A layer without its values.

    Attributes:
        bias: its type, or None.
        static, permuted: whether it has an input scale, and a permutation.
        rotation: the weight's.
    """

    n: int
    k: int
    group_size: int
    format: WeightFormat
    activation: str
    bias: torch.dtype | None = None
    static: bool = False
    permuted: bool = False
    rotation: int = 0

    def module(self) -> PackedLinear:
        weight = empty_weight(self.k, self.n, self.group_size, self.format, self.permuted, rotation=self.rotation)
        bias = None if self.bias is None else torch.zeros(self.n, dtype=self.bias)
        scale = torch.ones(1) if self.static else None
        return LINEARS[self.format.bits](weight, bias, activation=self.activation, input_scale=scale)


@dataclass(frozen=True)
class ExpertsLook:
    """Experts without their values."""

    w13: Look
    w2: Look
    count: int
    gate: Gate
    top_k: int | None

    def module(self) -> PackedExperts:
        w13, w2 = (
            empty_weight(x.k, x.n, x.group_size, x.format, experts=self.count, rotation=x.rotation)
            for x in (self.w13, self.w2)
        )
        return packed_experts(w13, w2, gate=self.gate, activation=self.w13.activation, top_k=self.top_k)


class LayersOfPlan:
    """A model's layers as `load_` plans them, without their values; sizes and formats are those of a rank's cut.

    Attributes:
        places, experts: as `Replaceable` has them, of the packed layers.
        head: the name of the output embedding.
    """

    def __init__(self, plan: Plan):
        self.model, self.layers, self.checkpoint, scan = plan.model, plan.layers, plan.checkpoint, plan.replaceable
        self.places, self.head = {name: scan.places[name] for name in plan.layers}, scan.head
        self.experts = {name: layer.layout for name, layer in plan.layers.items() if layer.layout is not None}

    def look(self, name: str, cut: Cut | None) -> Look:
        layer: Any = self.layers[name]
        with self.checkpoint.errors_that_name(layer.prefix):
            if layer.header is None:
                parts = parts_without_data(self.checkpoint, layer.names) if cut is None else layer.read(_CPU, cut)
                weight, format = parts.weight, parts.weight.format
                static, permuted = (name in layer.names for name in ("input_scale", "permutation"))
            else:
                format, weight, joined = self._packed([[layer]], cut, correction=layer.correction)
                static, permuted = joined.input_scale is not None, joined.permutation is not None
        bias = self.checkpoint.info(layer.names["bias"]).dtype if "bias" in layer.names else None
        bias = torch.float32 if bias == torch.float16 else bias
        n = layer.n // (cut.world if cut is not None and cut.dim == "n" else 1)
        size = format.group_size or weight.group_size
        return Look(n, weight.k, size, format, layer.activation, bias, static, permuted, weight.rotation)

    def part(self, name: str, part: int, which: range, cut: Cut | None) -> Look:
        """w13 or w2 of some experts."""
        experts: Any = self.layers[name]
        (n, k), world = experts.layout.sizes[part], 1 if cut is None else cut.world
        with self.checkpoint.errors_that_name(experts.prefix):
            if not experts.projections:
                names = self.checkpoint.layer(f"{experts.prefix}.{('w13', 'w2')[part]}")
                weight = parts_without_data(self.checkpoint, names).weight
                format = weight.format
            else:
                halves = experts.layout.gate.inputs
                format, weight, _ = self._packed([experts.projections[part][e] for e in which], cut, halves)
        n, k = (n, k // world) if part else (n // world, k)
        size = format.group_size or min(weight.group_size, k)
        return Look(n, k, size, format, experts.activation, rotation=weight.rotation)

    def _packed(
        self, layers: Iterable[Sequence[LayerSource]], cut: Cut | None, halves: int = 1, correction: bool | None = False
    ) -> tuple[WeightFormat, Any, CanonicalWeight]:
        """(format, weight, layer before packing) of layers, each of parts that are joined. The first rows of one layer
        say it for all if they can; else every row of every layer is read."""
        for all_rows in (False, True):
            formats: list[WeightFormat] = []
            for parts in layers:
                joined = concat([self._rows(layer, cut, all_rows, halves) for layer in parts])
                weight = joined.pack(parts[0].lhs_dtype, correction)
                if not all_rows and all(_rows_tell(layer, weight.format) for layer in parts):
                    return weight.format, weight, joined
                formats.append(weight.format)
        return in_common(formats), weight, joined

    def _rows(self, layer: LayerSource, cut: Cut | None, all_rows: bool, halves: int) -> CanonicalWeight:
        """A rank's part of a layer, or the first rows of its part.

        halves: 2 if one tensor holds all experts with gate's rows above up's: a rank then has its part of each half.
        """
        expert, rank, world = layer.expert, 0, 1
        if cut is not None and cut.dim == "n":
            _, rank, world = cut
        if all_rows and world > 1 and expert is not None:
            weight = layer.canonical(_CPU)
            return concat([weight.shard("n", half, halves).shard("n", rank, world) for half in range(halves)])
        size = layer.n // (world * (1 if expert is None or world == 1 else halves))
        rows = ROWS if size % ROWS == 0 else size
        if all_rows or not size or layer.n % rows or layer.n % world:
            return layer.canonical(_CPU, cut)
        weight = layer.canonical(_CPU, ("n", rank * size // rows, layer.n // rows))
        return weight if cut is None or cut.dim == "n" else weight.shard(*cut)


def in_common(formats: Sequence[WeightFormat]) -> WeightFormat:
    """The format that holds weights of all of these formats."""
    first = formats[0]
    zero_point, orders = any(fmt.zero_point for fmt in formats), {fmt.order for fmt in formats}
    order = first.order if len(orders) == 1 and not zero_point else first.for_any_values.order
    strips = all(fmt.uniform_strip_scale for fmt in formats)
    size = min((fmt.group_size for fmt in formats if fmt.group_size), default=0)  # the fewest scales that hold all
    return replace(first, group_size=size, zero_point=zero_point, order=order, uniform_strip_scale=strips)


def _rows_tell(layer: LayerSource, format: WeightFormat) -> bool:
    """True if the first rows determine the format of all rows. They do not if it depends on values: a code -8, zero
    points other than 8, the spread of MXFP4's scales, the bits of a correction's factors."""
    assert layer.header is not None  # layers that jitgemm saved have their format in the file
    scheme = layer.header.scheme
    tensors = layer.header.format.tensors(scheme)
    by_row = any("scale" in suffix and N in tensor.dims for suffix, tensor in tensors.items())
    if format.by_values or (format.uniform_strip_scale and by_row):
        return False
    zeros = [tensor.dtype for suffix, tensor in tensors.items() if "zero" in suffix]
    if not zeros or not scheme.zero_points or format.offset:
        return True
    return format.zero_point and not any(dtype.is_floating_point for dtype in zeros)


class LayersOfFloats:
    """The layers of a model in floats, as a recipe quantises them; otherwise like `LayersOfPlan`.

    Args:
        values: what those of weights decide of a format, by recipe, one of `decided_by_values`.
        by_rank: whether ranks quantise their own parts, as engines do, or have parts of what is quantised as a whole.
    """

    head = None

    def __init__(
        self, model: torch.nn.Module, recipe: Recipe, values: Mapping[Recipe, Mapping[str, Any]], by_rank: bool = False
    ):
        self.model, self.recipe, self.values, self.by_rank = model, recipe, values, by_rank
        self.found = Replaceable(model)
        self.places, _ = choose(self.found, None, recipe)
        self.experts = {name: self.found.experts[name] for name in self.places if name in self.found.experts}

    def look(self, name: str, cut: Cut | None) -> Look:
        linear: Any = self.model.get_submodule(name)
        bias = None if linear.bias is None else torch.float32
        recipe = self.recipe.head if name == self.found.head and self.recipe.head is not None else self.recipe
        recipe = recipe.for_columns(_of_rank(linear.in_features, cut))
        return self._look(linear.out_features, linear.in_features, cut, recipe, bias)

    def part(self, name: str, part: int, which: range, cut: Cut | None) -> Look:
        layout = self.experts[name]
        recipe = self.recipe.for_columns(layout.hidden, layout.inter // (1 if cut is None else cut.world))
        return self._look(*layout.sizes[part], cut, recipe)

    def _look(self, n: int, k: int, cut: Cut | None, recipe: Recipe, bias: torch.dtype | None = None) -> Look:
        values = self.values.get(recipe, {})
        if cut is not None and cut.dim == "k" and self.by_rank:
            k, cut = k // cut.world, None
        fast = replace(recipe, clip_steps=0) if "clip_steps" in recipe.quantiser.options else recipe
        few = fast.apply(torch.nn.Linear(k, 8, bias=False).weight.detach())
        if cut is not None and cut.dim == "k":
            few = part_of_weight(few, *cut, recipe.lhs_dtype)
        elif cut is not None:
            n //= cut.world
        format = replace(few.format, **values)
        if format.group_size >= few.k:
            format = replace(format, group_size=0)
        size = format.group_size or (few.k if "group_size" in values else few.group_size)
        return Look(n, few.k, size, format, recipe.inputs, bias, rotation=few.rotation)


def _of_rank(k: int, cut: Cut | None) -> int:
    return k // cut.world if cut is not None and cut.dim == "k" else k


def decided_by_values(recipe: Recipe, orders: Sequence[str]) -> list[dict[Recipe, dict[str, Any]]]:
    """Every way in which the values of weights may decide the formats that a recipe gives them.

    Args:
        orders: of codes whose order values decide: "any", and "e4m3" for weights that happen to have no code -8.
    """
    format = recipe.apply(torch.zeros(8, recipe.rotation or recipe.k_alignment, device="cpu")).format
    decisions: list[dict[str, Any]] = [{}]
    if recipe.scheme not in (None, "int4"):
        decisions = [{"group_size": size} for size in CODES[format.code].group_sizes]
    elif not format.complete:
        decisions = [{"order": order} for order in orders]
    others = [{}] if recipe.otherwise is None else decided_by_values(recipe.otherwise, orders)
    return [{recipe: values} | other for values, other in product(decisions, others)]
