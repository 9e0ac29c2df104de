"""Experts of a checkpoint for a module that stacks them: where their tensors are, and reading them expert by expert.

::

    experts.E.gate_proj, up_proj, down_proj     or w1, w3, w2: a layer a projection of each expert, in any format;
                                                up_proj and down_proj, or w1 and w2, of experts without gates
    experts.gate_up_proj, experts.down_proj     tensors stacked over experts (up_proj without gates); also
                                                w13_weight and w2_weight, and
                                                names with _ instead of . behind the projection's, and those of
                                                transformers' FP8Experts: gate_up_proj with gate_up_proj_scale_inv
                                                [E, 1, 1], [E, 2, 1] or in blocks, gate_up_proj_activation_scale [E];
                                                torchao's _gate_up_proj_qdata, ... of parameters [E, n, k]
    experts.w13.blocks, experts.w2.blocks, ...  what a `PackedExperts` saves

`ExpertsSource.find` looks at config and headers alone, its methods then read the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, check_order, concat, pack_experts
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.format import INPUT_TENSORS, check_beside
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.gate import decoded, interleaved
from jitgemm.nn.layers.packed import LHS_DTYPES, ON_CPU
from jitgemm.nn.load.layer_source import LayerSource, parts_without_data
from jitgemm.nn.quantize.stacked import ExpertsLayout
from jitgemm.weight.packed import Weight

_EACH = {
    2: ((("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",))),
    1: ((("up_proj",), ("down_proj",)), (("w1",), ("w2",))),
}
"""What an expert's layers are called, those of w13 and that of w2; by `Gate.inputs`."""
_STACKED = (("w13_weight", "w2_weight"), ("w13_", "w2_"), ("w13", "w2"))
"""What tensors of all experts are called that do not bear the names of the module's parameters."""
_SAVED = ("gate", *(f"{part}.{name}" for part in ("w13", "w2") for name in ("blocks", "meta")))
_STATIC = "static input scale: experts quantise every token with a scale of its own"
_CPU = torch.device("cpu")

Projection = Sequence[tuple[LayerSource, ...]]
"""For each expert the layers whose rows stand one below another: gate and up, or one."""
Find = Callable[..., LayerSource]
"""find(prefix, n, k, expert=None): a layer of experts."""


@dataclass(frozen=True)
class ExpertsSource:
    """The experts of a module as config and headers tell them.

    Attributes:
        prefix: the module's name in the checkpoint.
        layout: how the module holds them; `gate.order` as the checkpoint's rows stand.
        order: of the module's rows.
        projections: w13 and w2; () for the state dict of a `PackedExperts`.
        activation: one of ACTIVATIONS; "" where the file has them in floats, each by itself.
        several: which experts are of several kinds, which no packed weight holds together; "" for one kind.
    """

    checkpoint: Checkpoint = field(repr=False)
    prefix: str
    layout: ExpertsLayout
    order: str
    projections: Sequence[Projection]
    activation: str
    several: str = ""

    @classmethod
    def find(
        cls, checkpoint: Checkpoint, prefix: str, layout: ExpertsLayout, activation: str | None = None,
        format: str | None = None,
    ) -> ExpertsSource | None:  # fmt: skip
        """The experts that the checkpoint has for the module `prefix`; None: none, or the module's own parameters.

        Raises:
            ValueError: they are not complete, do not fit the module, or cannot be read exactly.
        """
        if all(f"{prefix}.{name}" in checkpoint for name in _SAVED):
            return _saved(checkpoint, prefix, layout, activation)
        find, order = partial(_layer, checkpoint, layout, activation, format), layout.gate.order
        for named in _EACH[layout.gate.inputs]:
            if any(checkpoint.layer(f"{prefix}.0.{name}") for part in named for name in part):
                own = replace(layout, gate=layout.gate._replace(order="gate_up"))
                return _checked(checkpoint, prefix, own, order, _one_by_one(checkpoint, prefix, layout, named, find))
        own_names = layout.parameters
        for names in (own_names, tuple(f"{name}_" for name in own_names), *_STACKED):
            if all(checkpoint.is_quantised(f"{prefix}.{name}") for name in names):
                parts = [_all_in_one(checkpoint, prefix, layout, part, names[part], find) for part in (0, 1)]
                return _checked(checkpoint, prefix, layout, order, parts)
        return None

    @property
    def files(self) -> set[str]:
        """Full names of all their tensors."""
        if self.projections:
            return set[str]().union(*(layer.files for layer in _layers(self.projections)))
        layers = (self.checkpoint.layer(f"{self.prefix}.{part}") for part in ("w13", "w2"))
        return {f"{self.prefix}.gate"}.union(*(names.values() for names in layers))

    @property
    def unused(self) -> dict[str, str]:
        """{full name: reason} of tensors that are not used."""
        return {name: why for layer in _layers(self.projections) for name, why in layer.unused.items()}

    @property
    def why_dense(self) -> str | None:
        """Why no `PackedExperts` can hold them; None where one can."""
        if self.several or not self.activation:
            return self.several or "floats"
        reasons = {layer.why_dense for layer in _layers(self.projections)} - {None}
        zeros = next((reason for reason in reasons if reason and "zero points" in reason), None)
        sizes = "hidden or intermediate size is no multiple of 16, or the group size none of 32"
        return zeros or (sizes if reasons else None)

    def check_order(self) -> None:
        """Raises ValueError where the first expert has an activation order: then most have one. Reads that expert."""
        for projection in self.projections:
            if projection[0][0].expert is None and any("g_idx" in suffix for suffix in projection[0][0].names):
                with self.checkpoint.errors_that_name(self.prefix):
                    check_order(_joined(projection[0], _CPU), 0)

    def read(self, device: torch.device, which: range | None = None) -> PackedExperts:
        """The experts' data, or that of some of them. In memory are the packed weights and one expert.

        Args:
            which: whose; not of experts that are packed in the file.

        Raises:
            ValueError: a value is out of range, or an expert has an activation order.
        """
        layout = self.layout
        if not self.projections:
            places = {name: _CPU if name.endswith(("gate", *ON_CPU)) else device for name in self.files}
            tensors = {name: self.checkpoint.read(name, where) for name, where in places.items()}
            layer = PackedExperts.from_state_dict(tensors, self.prefix + ".")
            layer.top_k = layout.top_k
            return layer
        which = range(layout.experts) if which is None else which
        w13, w2 = (self._weight(part, device, which) for part in (0, 1))
        biases = [self._bias(part, device, which) for part in (0, 1)]
        return packed_experts(w13, w2, *biases, gate=layout.gate, activation=self.activation, top_k=layout.top_k)

    def _weight(self, part: int, device: torch.device, which: range) -> Weight:
        projection = self.projections[part]

        def expert(e: int) -> CanonicalWeight:
            weight = _joined(projection[which[e]], device)
            check_order(weight, which[e])
            return weight

        with self.checkpoint.errors_that_name(self.prefix):
            return pack_experts(len(which), expert, LHS_DTYPES[self.activation], projection[0][0].bits)

    def _bias(self, part: int, device: torch.device, which: range) -> torch.Tensor | None:
        """[E, n], rows in the file's order; None where the experts have none."""
        read, experts = self.checkpoint.read, [self.projections[part][e] for e in which]
        rows = [[read(x.names["bias"], device, x.expert) for x in layers] for layers in experts if self.layout.bias]
        return torch.stack([torch.cat(parts) for parts in rows]) if rows else None

    @property
    def dense(self) -> dict[str, Callable[[torch.device, torch.dtype], torch.Tensor]]:
        """{the module's parameter: its values in floats}."""
        parts = [(part, bias) for part in range(len(self.projections)) for bias in range(1 + self.layout.bias)]
        names = self.layout.parameters, self.layout.biases
        return {names[bias][part]: partial(self._dense, part, bool(bias)) for part, bias in parts}

    def _dense(self, part: int, bias: bool, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[E, n, k] as the module has it, or [E, n]; rows of w13 in the module's order."""
        layout = self.layout
        mixed = part == 0 and self.order == "interleaved" and layout.gate.order == "gate_up"
        n, k = layout.sizes[part]
        out = torch.empty((layout.experts, n) if bias else (layout.experts, n, k), dtype=dtype, device=device)
        weights = (torch.cat([layer.weight(device) for layer in joined]) for joined in self.projections[part])
        values: Any = self._bias(part, device, range(layout.experts)) if bias else weights
        for e, rows in enumerate(values):
            out[e] = interleaved(rows) if mixed else rows
        return out.transpose(1, 2) if layout.transposed and not bias else out


def _layers(projections: Iterable[Projection]) -> Iterable[LayerSource]:
    """All of them; one for all experts where these stand in the same tensors."""
    of_experts = (layers if layers[0][0].expert is None else layers[:1] for layers in projections)
    return chain.from_iterable(chain.from_iterable(of_experts))


def _joined(layers: Sequence[LayerSource], device: torch.device) -> CanonicalWeight:
    """An expert's projection before packing."""
    read = [layer.canonical(device) for layer in layers]
    with layers[0].checkpoint.errors_that_name(layers[0].prefix):
        return concat(read)


def _saved(checkpoint: Checkpoint, prefix: str, layout: ExpertsLayout, activation: str | None) -> ExpertsSource:
    gate = decoded(checkpoint.read(f"{prefix}.gate", _CPU))
    if gate._replace(order=layout.gate.order) != layout.gate:
        raise ValueError(f"{prefix}.gate: expected {layout.gate}, as the model has it, got {gate}")
    for part, (n, k) in zip(("w13", "w2"), layout.sizes):
        layer = f"{prefix}.{part}"
        with checkpoint.errors_that_name(layer):
            saved = parts_without_data(checkpoint, checkpoint.layer(layer), activation)
        expected, got = [layout.experts, n, k], [saved.weight.experts, saved.weight.n, saved.weight.k]
        if got != expected:
            raise ValueError(f"{layer}: expected experts, n, k = {expected}, got {got}")
    return ExpertsSource(checkpoint, prefix, replace(layout, gate=gate), gate.order, (), saved.activation)


def _one_by_one(
    checkpoint: Checkpoint, prefix: str, layout: ExpertsLayout, names: tuple[tuple[str, ...], ...], find: Find
) -> list[Projection]:
    listed = [f"{prefix}.{e}.{name}" for part in names for name in part for e in range(layout.experts)]
    missing = [layer for layer in listed if not checkpoint.layer(layer)]
    if missing:
        raise ValueError(
            f"source: expected every expert of {prefix}, found none of {len(missing)} layers: {missing[0]}"
        )
    projections: list[Projection] = []
    for part, (n, k) in zip(names, layout.sizes):
        # By name first, so that errors name the first expert's layer of each.
        layers = [[find(f"{prefix}.{e}.{name}", n // len(part), k) for e in range(layout.experts)] for name in part]
        projections.append(list(zip(*layers)))
    return projections


def _all_in_one(
    checkpoint: Checkpoint, prefix: str, layout: ExpertsLayout, part: int, name: str, find: Find
) -> list[tuple[LayerSource]]:
    layer = find(f"{prefix}.{name}", *layout.sizes[part], expert=0)
    if layout.transposed and "_weight_qdata" in layer.names:
        raise ValueError(f"{layer.prefix}: expected torchao's subclass of [E, n, k], got one of [E, k, n]")
    count = checkpoint.info(next(iter(layer.names.values()))).shape[0]
    if count != layout.experts:
        raise ValueError(f"{layer.prefix}: expected {layout.experts} experts, as the model has, got {count}")
    bias = f"{prefix}.{layout.biases[part]}"
    if bias in checkpoint and "bias" not in layer.names:  # under the module's name, whatever the weight is called
        layer = replace(layer, names={**layer.names, "bias": bias})
        _check_bias(layer)
        layer = layer if layout.bias else layer.without_bias()
    return [(replace(layer, expert=e),) for e in range(count)]


def _layer(
    checkpoint: Checkpoint, layout: ExpertsLayout, activation: str | None, format: str | None, prefix: str, n: int,
    k: int, expert: int | None = None,
) -> LayerSource:  # fmt: skip
    """A layer of experts, quantised or in floats, without a static scale, and without a bias of zeros where the
    module's experts have none."""
    if checkpoint.is_quantised(prefix):
        layer = LayerSource.find(checkpoint, prefix, activation, format, expert, k).without(INPUT_TENSORS, _STATIC)
    else:
        names = checkpoint.layer(prefix)
        if (got := checkpoint.info(names["weight"]).shape) != (n, k):
            raise ValueError(f"{prefix}.weight: expected shape {[n, k]}, got {list(got)}")
        names = {name: names[name] for name in ("weight", "bias") if name in names}
        layer = LayerSource(checkpoint, prefix, names, n, k)
        _check_bias(layer)
    return layer if layout.bias else layer.without_bias()


def _check_bias(layer: LayerSource) -> None:
    """Raises ValueError for a bias that is none of floats, as a layer's header is checked."""
    with layer.checkpoint.errors_that_name(layer.prefix):
        check_beside({name: layer.checkpoint.info(layer.names[name]) for name in ("bias",) if name in layer.names})


def _checked(
    checkpoint: Checkpoint, prefix: str, layout: ExpertsLayout, order: str, projections: Sequence[Projection]
) -> ExpertsSource:
    """Experts whose layers have the module's sizes, and one kind of activations where one weight can hold them."""
    several = ""
    for projection, (n, k) in zip(projections, layout.sizes):
        like, rows = projection[0][0], n // len(projection[0])
        for layer in _layers([projection]):
            if layer.n != rows or layer.k not in (None, k):
                raise ValueError(f"{layer.prefix}: expected n, k = {[rows, k]}, got {[layer.n, layer.k]}")
            if layout.bias and "bias" not in layer.names:
                raise ValueError(f"{layer.prefix}: expected a bias, as the model has it, got none")
            for one in (like, projections[0][0][0]):  # w13 and w2 may differ, unless one of them is in floats
                alike = one is not like and layer.bits and one.bits and layer.rotation == one.rotation
                if not several and not alike and _kind(layer) != _kind(one):
                    several = f"experts of several kinds: {one.prefix} has {_kind(one)}, {layer.prefix} {_kind(layer)}"
    first, *others = sorted(_layers(projections), key=lambda layer: not layer.bits)  # quantised ones first
    other = next((layer for layer in others if layer.activation != first.activation), None)
    if other is not None and not several:
        raise ValueError(
            f"{other.prefix}: expected {first.activation} activations, as {first.prefix} has, got {other.activation}; "
            "activation=... chooses one for all"
        )
    return ExpertsSource(checkpoint, prefix, layout, order, projections, first.activation, several)


def _kind(layer: LayerSource) -> str:
    """What all experts that are packed in one weight share, as a message has it."""
    if layer.header is None:
        return "floats"
    rotated = ", rotated" if layer.rotation else ""
    return f"{layer.header.scheme.code} in groups of {layer.group_size}{rotated}"
