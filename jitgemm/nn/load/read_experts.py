"""Experts of a checkpoint for a module that stacks them: where their tensors are, and reading them expert by expert.

::

    experts.E.gate_proj, up_proj, down_proj     or w1, w3, w2: a layer for each projection of each expert, in any format
    experts.gate_up_proj, experts.down_proj     tensors with the experts in front; also w13_weight and w2_weight, and
                                                names with _ instead of . behind the projection's, and those of
                                                transformers' FP8Experts: gate_up_proj with gate_up_proj_scale_inv
                                                [E, 1, 1], [E, 2, 1] or in blocks, gate_up_proj_activation_scale [E];
                                                torchao's _gate_up_proj_qdata, ... of parameters [E, n, k]
    experts.w13.blocks, experts.w2.blocks, ...  what a `PackedExperts` saves

`experts_of` looks at config and headers alone, `read_experts` then reads the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, check_order, concat, pack_experts
from jitgemm.checkpoint.files import Checkpoint, Part
from jitgemm.checkpoint.reader import errors_that_name, read_header
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.gate import decoded, interleaved
from jitgemm.nn.load.read import (
    CODES,
    Layer,
    is_quantised,
    layer_of,
    packable,
    without_bias,
    without_input_scale,
    zero_bias,
)
from jitgemm.nn.quantize.stacked import BIASES, PARAMETERS, Form

_EACH = ((("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",)))
"""What an expert's layers are called, those of w13 and that of w2."""
_STACKED = (PARAMETERS, ("gate_up_proj_", "down_proj_"), ("w13_weight", "w2_weight"), ("w13_", "w2_"), ("w13", "w2"))
_OURS = ("gate", *(f"{part}.{name}" for part in ("w13", "w2") for name in ("blocks", "meta")))
_STATIC = "static input scale: experts quantise every token with a scale of its own"


@dataclass(frozen=True)
class Projection:
    """One of the two projections of all experts.

    Attributes:
        layers: for each expert the layers whose rows stand one below another: gate and up, or one. Where all experts
            stand in the same tensors, one entry for all.
        stacked: whether they do.
        bias: full name of a bias [E, n] that stands beside the layers.
    """

    layers: tuple[tuple[Layer | str, ...], ...]
    stacked: bool = False
    bias: str | None = None

    @property
    def bits(self) -> int:
        """Of its weights' codes; 0 where they are floats."""
        first = self.layers[0][0]
        return 0 if isinstance(first, str) else first.bits

    def canonical(self, checkpoint: Checkpoint, e: int, device: torch.device) -> CanonicalWeight:
        """Expert e before packing."""
        parts, expert = (self.layers[0], e) if self.stacked else (self.layers[e], None)
        read = []
        for layer in parts:
            with errors_that_name(checkpoint, layer.prefix if expert is None else f"{layer.prefix}[{e}]"):
                read.append(read_header(checkpoint, layer.header, device, expert))
        with errors_that_name(checkpoint, parts[0].prefix):
            return concat(read)

    def dense(self, checkpoint: Checkpoint, e: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Expert e's weight [n, k] in floats, and its bias."""
        if not isinstance(self.layers[0][0], str):
            weight = self.canonical(checkpoint, e, device)
            return weight.dequantize(), weight.bias
        weight = torch.cat([checkpoint.read(f"{prefix}.weight", device) for prefix in self.layers[e]])
        biases = [
            checkpoint.read(f"{prefix}.bias", device) for prefix in self.layers[e] if f"{prefix}.bias" in checkpoint
        ]
        return weight, torch.cat(biases) if biases else None


@dataclass(frozen=True)
class Experts:
    """The experts of a module as config and headers tell them.

    Attributes:
        prefix: the module's name in the checkpoint.
        form: how the module holds them; `gate.order` as the checkpoint's rows stand.
        projections: of w13 and w2; None for the state dict of a `PackedExperts`.
        activation: one of ACTIVATIONS.
        quantised: False where the file has them in floats, each by itself.
        names: full names of all their tensors.
        unused: {full name: reason} of those that are not used.
    """

    prefix: str
    form: Form
    projections: tuple[Projection, Projection] | None
    activation: str
    quantised: bool
    names: frozenset[str]
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def packable(self) -> bool:
        """Whether a `PackedExperts` can hold them."""
        if self.projections is None:
            return True
        return self.quantised and all(packable(layer) for p in self.projections for each in p.layers for layer in each)


@dataclass(frozen=True)
class Stacked:
    """Where a stacked parameter, or its bias, comes from: experts that are dequantised, or in floats one by one."""

    experts: Experts
    order: str
    part: int
    bias: bool

    def read(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[E, n, k] as the module has it, or [E, n]; rows of w13 in the module's order."""
        form, projection = self.experts.form, self.experts.projections[self.part]
        if self.bias and projection.bias is not None:
            return checkpoint.read(projection.bias, device).to(dtype)
        (n, k) = form.sizes[self.part]
        out = torch.empty((form.experts, n) if self.bias else (form.experts, n, k), dtype=dtype, device=device)
        for e in range(form.experts):
            weight, bias = projection.dense(checkpoint, e, device)
            rows = bias if self.bias else weight
            mixed = self.part == 0 and self.order == "interleaved" and form.gate.order == "gate_up"
            out[e] = interleaved(rows) if mixed else rows
        return out.transpose(1, 2) if form.transposed and not self.bias else out


def experts_of(
    checkpoint: Checkpoint, prefix: str, form: Form, activation: str | None = None, format: str | None = None
) -> Experts | None:
    """The experts that the checkpoint has for the module `prefix`; None: none, or the module's own parameters.

    Raises:
        ValueError: they are not complete, do not fit the module, or cannot be read exactly.
    """
    if all(f"{prefix}.{name}" in checkpoint for name in _OURS):
        return _ours(checkpoint, prefix, form, activation)
    for names in _EACH:
        if any(checkpoint.layer(f"{prefix}.0.{name}") for part in names for name in part):
            return _one_by_one(checkpoint, prefix, form, names, activation, format)
    if f"{prefix}.{PARAMETERS[0]}_blocks" in checkpoint:
        raise ValueError(
            f"{prefix}.{PARAMETERS[0]} is packed in the file (…_blocks, …_scales: MXFP4), which is not read here"
        )
    for names in _STACKED:
        if all(is_quantised(checkpoint, f"{prefix}.{name}") for name in names):
            return _all_in_one(checkpoint, prefix, form, names, activation, format)
    return None


def check_packable(checkpoint: Checkpoint, experts: Experts) -> None:
    """Raises ValueError where the first expert has an activation order: then most have one. Reads that expert."""
    for projection in experts.projections or ():
        if not projection.stacked and any("g_idx" in suffix for suffix in projection.layers[0][0].names):
            with errors_that_name(checkpoint, experts.prefix):
                check_order(projection.canonical(checkpoint, 0, torch.device("cpu")), 0)


def read_experts(
    checkpoint: Checkpoint, experts: Experts, device: torch.device, which: range | None = None
) -> PackedExperts:
    """The experts' data, or that of some of them. In memory are the packed weights and one expert.

    Args:
        which: whose; not of experts that are packed in the file.

    Raises:
        ValueError: a value is out of range, or an expert has an activation order.
    """
    if experts.projections is None:
        start = experts.prefix + "."
        cpu = torch.device("cpu")
        on_cpu = ("gate", "meta", "activation_type")
        tensors = {
            name.removeprefix(start): checkpoint.read(name, cpu if name.endswith(on_cpu) else device)
            for name in experts.names
        }
        layer = PackedExperts.from_state_dict(tensors)
        layer.top_k = experts.form.top_k
        return layer
    which = range(experts.form.experts) if which is None else which
    weights, biases = [], []
    for projection in experts.projections:
        bias: dict[int, torch.Tensor] = {}

        def read(e: int, projection: Projection = projection, bias: dict[int, torch.Tensor] = bias) -> CanonicalWeight:
            weight = projection.canonical(checkpoint, which[e], device)
            check_order(weight, which[e])
            if weight.bias is not None:
                bias[e] = weight.bias
            return weight

        with errors_that_name(checkpoint, experts.prefix):
            weights.append(pack_experts(len(which), read, CODES[experts.activation], projection.bits))
        part = Part(0, which.start, len(which))
        beside = None if projection.bias is None else checkpoint.read(projection.bias, device, None, part)
        biases.append(torch.stack([bias[e] for e in sorted(bias)]) if bias else beside)
    form = experts.form
    return packed_experts(*weights, *biases, gate=form.gate, activation=experts.activation, top_k=form.top_k)


def _ours(checkpoint: Checkpoint, prefix: str, form: Form, activation: str | None) -> Experts:
    found = [layer_of(checkpoint, f"{prefix}.{name}", activation) for name in ("w13", "w2")]
    gate = decoded(checkpoint.read(f"{prefix}.gate", torch.device("cpu")))
    if gate._replace(order=form.gate.order) != form.gate:
        raise ValueError(f"{prefix}.gate: expected {form.gate}, as the model has it, got {gate}")
    for layer, size in zip(found, form.sizes):
        if (layer.experts, layer.n, layer.k) != (form.experts, *size):
            expected, got = [form.experts, *size], [layer.experts, layer.n, layer.k]
            raise ValueError(f"{layer.prefix}: expected experts, n, k = {expected}, got {got}")
    names = frozenset({f"{prefix}.gate", *(name for layer in found for name in layer.names.values())})
    return Experts(prefix, replace(form, gate=gate), None, found[0].activation, True, names)


def _one_by_one(
    checkpoint: Checkpoint,
    prefix: str,
    form: Form,
    names: tuple[tuple[str, ...], ...],
    activation: str | None,
    format: str | None,
) -> Experts:
    each = {name: [f"{prefix}.{e}.{name}" for e in range(form.experts)] for part in names for name in part}
    missing = [layer for layers in each.values() for layer in layers if not checkpoint.layer(layer)]
    if missing:
        raise ValueError(
            f"source: expected every expert of {prefix}, found none of {len(missing)} layers: {missing[0]}"
        )
    listed = [layer for layers in each.values() for layer in layers]
    quantised = [is_quantised(checkpoint, layer) for layer in listed]
    if any(quantised) and not all(quantised):
        odd = listed[quantised.index(not quantised[0])]
        kinds = ("quantised", "floats") if quantised[0] else ("floats", "quantised")
        raise ValueError(f"{odd}: expected {kinds[0]}, as {listed[0]} is, got {kinds[1]}")
    order = replace(form, gate=form.gate._replace(order="gate_up"))
    if not all(quantised):
        projections = [Projection(tuple(zip(*(each[name] for name in part)))) for part in names]
        unused = _check_floats(checkpoint, projections, form)
        tensors = {f"{layer}.{child}" for layer in listed for child in ("weight", *(("bias",) if form.bias else ()))}
        return Experts(prefix, order, tuple(projections), "", False, frozenset(tensors), unused)
    of_part = {name: k for part, (_, k) in zip(names, form.sizes) for name in part}
    layers = {
        layer: _layer(checkpoint, layer, form, of_part[name], activation, format)
        for name in each
        for layer in each[name]
    }
    projections = [
        Projection(tuple(tuple(layers[each[name][e]] for name in part) for e in range(form.experts))) for part in names
    ]
    return _checked(checkpoint, prefix, order, projections)


def _all_in_one(
    checkpoint: Checkpoint,
    prefix: str,
    form: Form,
    names: tuple[str, str],
    activation: str | None,
    format: str | None,
) -> Experts:
    projections = []
    for name, bias, (_, k) in zip(names, BIASES, form.sizes):
        layer = _layer(checkpoint, f"{prefix}.{name}", form, k, activation, format, expert=0)
        if form.transposed and "_weight_qdata" in layer.names:
            raise ValueError(f"{layer.prefix}: expected torchao's subclass of [E, n, k], got one of [E, k, n]")
        beside = f"{prefix}.{bias}"
        beside = beside if beside in checkpoint and "bias" not in layer.names else None
        if beside is not None and not form.bias:
            layer = replace(layer, unused={**layer.unused, beside: zero_bias(checkpoint, beside)})
            beside = None
        count = checkpoint.info(next(iter(layer.names.values()))).shape[0]
        if count != form.experts:
            raise ValueError(f"{layer.prefix}: expected {form.experts} experts, as the model has, got {count}")
        projections.append(Projection(((layer,),), True, beside))
    return _checked(checkpoint, prefix, form, projections)


def _layer(
    checkpoint: Checkpoint,
    prefix: str,
    form: Form,
    k: int,
    activation: str | None,
    format: str | None,
    expert: int | None = None,
) -> Layer:
    """A layer of experts, without a static scale, and without a bias of zeros where the module's experts have none."""
    layer = layer_of(checkpoint, prefix, activation, format, expert, k)
    layer = without_input_scale(layer, _STATIC) if layer.static else layer
    return layer if form.bias or "bias" not in layer.names else without_bias(checkpoint, layer)


def _checked(checkpoint: Checkpoint, prefix: str, form: Form, projections: list[Projection]) -> Experts:
    """Experts whose layers have the module's sizes and one kind of activations."""
    names: set[str] = set()
    unused: dict[str, str] = {}
    first = projections[0].layers[0][0]
    for projection, (n, k) in zip(projections, form.sizes):
        for layers in projection.layers:
            for layer in layers:
                if layer.n != n // len(layers) or layer.k not in (None, k):
                    raise ValueError(
                        f"{layer.prefix}: expected n, k = {[n // len(layers), k]}, got {[layer.n, layer.k]}"
                    )
                if form.bias and "bias" not in layer.names and projection.bias is None:
                    raise ValueError(f"{layer.prefix}: expected a bias, as the model has it, got none")
                like = projection.layers[0][0]
                if layer.group_size != like.group_size:
                    raise ValueError(
                        f"{layer.prefix}: expected groups of {like.group_size}, as {like.prefix} has, got "
                        f"{layer.group_size}: the experts of a layer share one format"
                    )
                if layer.bits != like.bits:
                    raise ValueError(
                        f"{layer.prefix}: expected {like.bits} bits, as {like.prefix} has, got {layer.bits}: the "
                        "experts of a layer share one format"
                    )
                if layer.activation != first.activation:
                    raise ValueError(
                        f"{layer.prefix}: expected {first.activation} activations, as {first.prefix} has, got "
                        f"{layer.activation}; activation=... chooses one for all"
                    )
                start = layer.prefix if layer.prefix.endswith("_") else layer.prefix + "."
                names |= {*layer.names.values(), *checkpoint.layer(start).values()}
                unused |= layer.unused
        names |= {projection.bias} - {None}
    return Experts(prefix, form, tuple(projections), first.activation, True, frozenset(names), unused)


def _check_floats(checkpoint: Checkpoint, projections: list[Projection], form: Form) -> dict[str, str]:
    """{full name: reason} of biases that the module has no place for, which are zeros."""
    unused = {}
    for projection, (n, k) in zip(projections, form.sizes):
        for layers in projection.layers:
            for layer in layers:
                expected, names = (n // len(layers), k), checkpoint.layer(layer)
                if checkpoint.info(names["weight"]).shape != expected:
                    got = list(checkpoint.info(names["weight"]).shape)
                    raise ValueError(f"{layer}.weight: expected shape {list(expected)}, got {got}")
                if form.bias and "bias" not in names:
                    raise ValueError(f"{layer}: expected a bias, as the model has it, got none")
                if not form.bias and "bias" in names:
                    unused[names["bias"]] = zero_bias(checkpoint, names["bias"])
    return unused
