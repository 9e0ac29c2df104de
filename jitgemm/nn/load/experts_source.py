"""Experts of a checkpoint for a module that stacks them: where their tensors are, and reading them expert by expert.

::

    experts.E.gate_proj, up_proj, down_proj     or w1, w3, w2: a layer for each projection of each expert, in any format
    experts.gate_up_proj, experts.down_proj     tensors with the experts in front; also w13_weight and w2_weight, and
                                                names with _ instead of . behind the projection's, and those of
                                                transformers' FP8Experts: gate_up_proj with gate_up_proj_scale_inv
                                                [E, 1, 1], [E, 2, 1] or in blocks, gate_up_proj_activation_scale [E];
                                                torchao's _gate_up_proj_qdata, ... of parameters [E, n, k]
    experts.w13.blocks, experts.w2.blocks, ...  what a `PackedExperts` saves

`ExpertsSource.find` looks at config and headers alone, its methods then read the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, check_order, concat, pack_experts
from jitgemm.checkpoint.files import Checkpoint, Part
from jitgemm.checkpoint.reader import errors_that_name
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.gate import decoded, interleaved
from jitgemm.nn.layers.packed import LHS_DTYPES, ON_CPU
from jitgemm.nn.load.layer_source import LayerSource, is_quantised, zero_bias
from jitgemm.nn.quantize.stacked import BIASES, PARAMETERS, Form

_EACH = ((("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",)))
"""What an expert's layers are called, those of w13 and that of w2."""
_STACKED = (PARAMETERS, ("gate_up_proj_", "down_proj_"), ("w13_weight", "w2_weight"), ("w13_", "w2_"), ("w13", "w2"))
_OURS = ("gate", *(f"{part}.{name}" for part in ("w13", "w2") for name in ("blocks", "meta")))
_STATIC = "static input scale: experts quantise every token with a scale of its own"
_CPU = torch.device("cpu")

Projection = Sequence[tuple[LayerSource, ...]]
"""For each expert the layers whose rows stand one below another: gate and up, or one."""


@dataclass(frozen=True)
class ExpertsSource:
    """The experts of a module as config and headers tell them.

    Attributes:
        prefix: the module's name in the checkpoint.
        form: how the module holds them; `gate.order` as the checkpoint's rows stand.
        projections: w13 and w2; None for the state dict of a `PackedExperts`.
        biases: full names of biases [E, n] that stand beside the projections' layers.
        activation: one of ACTIVATIONS.
        quantised: False where the file has them in floats, each by itself.
        files: full names of all their tensors.
        unused: {full name: reason} of those that are not used.
    """

    checkpoint: Checkpoint = field(repr=False)
    prefix: str
    form: Form
    projections: tuple[Projection, ...] | None
    biases: tuple[str | None, ...]
    activation: str
    quantised: bool
    files: frozenset[str]
    unused: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def find(
        cls, checkpoint: Checkpoint, prefix: str, form: Form, activation: str | None = None, format: str | None = None
    ) -> ExpertsSource | None:
        """The experts that the checkpoint has for the module `prefix`; None: none, or the module's own parameters.

        Raises:
            ValueError: they are not complete, do not fit the module, or cannot be read exactly.
        """
        if all(f"{prefix}.{name}" in checkpoint for name in _OURS):
            return _ours(checkpoint, prefix, form, activation)
        for each in _EACH:
            if any(checkpoint.layer(f"{prefix}.0.{name}") for part in each for name in part):
                return _one_by_one(checkpoint, prefix, form, each, activation, format)
        if f"{prefix}.{PARAMETERS[0]}_blocks" in checkpoint:
            raise ValueError(
                f"{prefix}.{PARAMETERS[0]} is packed in the file (…_blocks, …_scales: MXFP4), which is not read here"
            )
        for names in _STACKED:
            if all(is_quantised(checkpoint, f"{prefix}.{name}") for name in names):
                return _all_in_one(checkpoint, prefix, form, names, activation, format)
        return None

    @property
    def why_dense(self) -> str | None:
        """Why no `PackedExperts` can hold them; None where one can."""
        reasons = {layer.why_dense for layer in _layers(self.projections or ())} - {None}
        zeros = next((reason for reason in reasons if "zero points" in reason), None)
        sizes = "hidden or intermediate size is no multiple of 16, or the group size none of 32"
        return zeros or (sizes if reasons else None)

    @property
    def packable(self) -> bool:
        """Whether a `PackedExperts` can hold them."""
        return self.quantised and self.why_dense is None

    def check_order(self) -> None:
        """Raises ValueError where the first expert has an activation order: then most have one. Reads that expert."""
        for projection in self.projections or ():
            if projection[0][0].expert is None and any("g_idx" in suffix for suffix in projection[0][0].names):
                with errors_that_name(self.checkpoint, self.prefix):
                    check_order(_joined(projection[0], _CPU), 0)

    def read(self, device: torch.device, which: range | None = None) -> PackedExperts:
        """The experts' data, or that of some of them. In memory are the packed weights and one expert.

        Args:
            which: whose; not of experts that are packed in the file.

        Raises:
            ValueError: a value is out of range, or an expert has an activation order.
        """
        read, form = self.checkpoint.read, self.form
        if self.projections is None:
            start, on_cpu = self.prefix + ".", ("gate", *ON_CPU)
            layer = PackedExperts.from_state_dict(
                {name.removeprefix(start): read(name, _CPU if name.endswith(on_cpu) else device) for name in self.files}
            )
            layer.top_k = form.top_k
            return layer
        which = range(form.experts) if which is None else which
        weights, biases = [], []
        for projection, beside in zip(self.projections, self.biases):
            own: dict[int, torch.Tensor] = {}

            def expert(
                e: int, projection: Projection = projection, own: dict[int, torch.Tensor] = own
            ) -> CanonicalWeight:
                weight = _joined(projection[which[e]], device)
                check_order(weight, which[e])
                if weight.bias is not None:
                    own[e] = weight.bias
                return weight

            with errors_that_name(self.checkpoint, self.prefix):
                weights.append(pack_experts(len(which), expert, LHS_DTYPES[self.activation], projection[0][0].bits))
            bias = None if beside is None else read(beside, device, None, Part(0, which.start, len(which)))
            biases.append(torch.stack([own[e] for e in sorted(own)]) if own else bias)
        return packed_experts(*weights, *biases, gate=form.gate, activation=self.activation, top_k=form.top_k)


@dataclass(frozen=True)
class StackedSource:
    """Where a stacked parameter, or its bias, comes from: experts that are dequantised, or in floats one by one.

    order: of the module's rows of w13.
    """

    experts: ExpertsSource
    order: str
    part: int
    bias: bool

    def dense(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[E, n, k] as the module has it, or [E, n]; rows of w13 in the module's order."""
        experts, form, part = self.experts, self.experts.form, self.part
        beside = experts.biases[part]
        if self.bias and beside is not None:
            return experts.checkpoint.read(beside, device).to(dtype)
        n, k = form.sizes[part]
        out = torch.empty((form.experts, n) if self.bias else (form.experts, n, k), dtype=dtype, device=device)
        for e, layers in enumerate(experts.projections[part]):
            rows = _dense(layers, device)[self.bias]
            mixed = part == 0 and self.order == "interleaved" and form.gate.order == "gate_up"
            out[e] = interleaved(rows) if mixed else rows
        return out.transpose(1, 2) if form.transposed and not self.bias else out


def _layers(projections: Sequence[Projection]) -> Iterator[LayerSource]:
    """All of them; one for all experts where these stand in the same tensors."""
    for projection in projections:
        for layers in projection if projection[0][0].expert is None else projection[:1]:
            yield from layers


def _joined(layers: Sequence[LayerSource], device: torch.device) -> CanonicalWeight:
    """An expert's projection before packing."""
    read = [layer.canonical(device) for layer in layers]
    with errors_that_name(layers[0].checkpoint, layers[0].prefix):
        return concat(read)


def _dense(layers: Sequence[LayerSource], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An expert's weight [n, k] in floats, and its bias."""
    if layers[0].header is not None:
        weight = _joined(layers, device)
        return weight.dequantize(), weight.bias
    weights, biases = (
        [layer.checkpoint.read(layer.names[name], device) for layer in layers if name in layer.names]
        for name in ("weight", "bias")
    )
    return torch.cat(weights), torch.cat(biases) if biases else None


def _ours(checkpoint: Checkpoint, prefix: str, form: Form, activation: str | None) -> ExpertsSource:
    found = [LayerSource.find(checkpoint, f"{prefix}.{name}", activation) for name in ("w13", "w2")]
    gate = decoded(checkpoint.read(f"{prefix}.gate", _CPU))
    if gate._replace(order=form.gate.order) != form.gate:
        raise ValueError(f"{prefix}.gate: expected {form.gate}, as the model has it, got {gate}")
    for layer, size in zip(found, form.sizes):
        if (layer.experts, layer.n, layer.k) != (form.experts, *size):
            expected, got = [form.experts, *size], [layer.experts, layer.n, layer.k]
            raise ValueError(f"{layer.prefix}: expected experts, n, k = {expected}, got {got}")
    files = frozenset({f"{prefix}.gate", *(name for layer in found for name in layer.names.values())})
    own = replace(form, gate=gate)
    return ExpertsSource(checkpoint, prefix, own, None, (None, None), found[0].activation, True, files)


def _one_by_one(
    checkpoint: Checkpoint,
    prefix: str,
    form: Form,
    names: tuple[tuple[str, ...], ...],
    activation: str | None,
    format: str | None,
) -> ExpertsSource:
    listed = [f"{prefix}.{e}.{name}" for part in names for name in part for e in range(form.experts)]
    missing = [layer for layer in listed if not checkpoint.layer(layer)]
    if missing:
        raise ValueError(
            f"source: expected every expert of {prefix}, found none of {len(missing)} layers: {missing[0]}"
        )
    quantised = [is_quantised(checkpoint, layer) for layer in listed]
    if any(quantised) and not all(quantised):
        odd = listed[quantised.index(not quantised[0])]
        kinds = ("quantised", "floats") if quantised[0] else ("floats", "quantised")
        raise ValueError(f"{odd}: expected {kinds[0]}, as {listed[0]} is, got {kinds[1]}")

    def layer(name: str, k: int, n: int) -> LayerSource:
        if all(quantised):
            return _layer(checkpoint, name, form, k, activation, format)
        return _in_floats(checkpoint, name, form, n, k)

    # By name first, so that errors name the first expert's layer of each.
    of_name = {
        name: [layer(f"{prefix}.{e}.{name}", k, n // len(part)) for e in range(form.experts)]
        for part, (n, k) in zip(names, form.sizes)
        for name in part
    }
    projections = [list(zip(*(of_name[name] for name in part))) for part in names]
    order = replace(form, gate=form.gate._replace(order="gate_up"))
    return _checked(checkpoint, prefix, order, projections, (None, None))


def _all_in_one(
    checkpoint: Checkpoint,
    prefix: str,
    form: Form,
    names: tuple[str, str],
    activation: str | None,
    format: str | None,
) -> ExpertsSource:
    projections: list[Projection] = []
    biases: list[str | None] = []
    for name, bias, (_, k) in zip(names, BIASES, form.sizes):
        layer = _layer(checkpoint, f"{prefix}.{name}", form, k, activation, format, expert=0)
        if form.transposed and "_weight_qdata" in layer.names:
            raise ValueError(f"{layer.prefix}: expected torchao's subclass of [E, n, k], got one of [E, k, n]")
        full = f"{prefix}.{bias}"
        beside = full if full in checkpoint and "bias" not in layer.names else None
        if beside is not None and not form.bias:
            layer = replace(layer, unused={**layer.unused, beside: zero_bias(checkpoint, beside)})
            beside = None
        count = checkpoint.info(next(iter(layer.names.values()))).shape[0]
        if count != form.experts:
            raise ValueError(f"{layer.prefix}: expected {form.experts} experts, as the model has, got {count}")
        projections.append([(replace(layer, expert=e),) for e in range(count)])
        biases.append(beside)
    return _checked(checkpoint, prefix, form, projections, tuple(biases))


def _layer(
    checkpoint: Checkpoint,
    prefix: str,
    form: Form,
    k: int,
    activation: str | None,
    format: str | None,
    expert: int | None = None,
) -> LayerSource:
    """A layer of experts, without a static scale, and without a bias of zeros where the module's experts have none."""
    layer = LayerSource.find(checkpoint, prefix, activation, format, expert, k)
    layer = layer.without_input_scale(_STATIC) if layer.static else layer
    return layer if form.bias else layer.without_bias()


def _in_floats(checkpoint: Checkpoint, prefix: str, form: Form, n: int, k: int) -> LayerSource:
    """The same of an expert that the file has in floats."""
    names = checkpoint.layer(prefix)
    if (got := checkpoint.info(names["weight"]).shape) != (n, k):
        raise ValueError(f"{prefix}.weight: expected shape {[n, k]}, got {list(got)}")
    kept = {name: names[name] for name in ("weight", "bias") if name in names}
    layer = LayerSource(checkpoint, prefix, kept, n, k, None, "", 0)
    return layer if form.bias else layer.without_bias()


def _checked(
    checkpoint: Checkpoint,
    prefix: str,
    form: Form,
    projections: Sequence[Projection],
    biases: tuple[str | None, ...],
) -> ExpertsSource:
    """Experts whose layers have the module's sizes and one kind of activations."""
    files: set[str] = {bias for bias in biases if bias is not None}
    unused: dict[str, str] = {}
    first = projections[0][0][0]
    for projection, bias, (n, k) in zip(projections, biases, form.sizes):
        like, parts = projection[0][0], len(projection[0])
        for layer in _layers([projection]):
            if layer.n != n // parts or layer.k not in (None, k):
                raise ValueError(f"{layer.prefix}: expected n, k = {[n // parts, k]}, got {[layer.n, layer.k]}")
            if form.bias and "bias" not in layer.names and bias is None:
                raise ValueError(f"{layer.prefix}: expected a bias, as the model has it, got none")
            shared = {
                f"groups of {like.group_size}": (layer.group_size, like.group_size),
                f"{like.bits} bits": (layer.bits, like.bits),
            }
            for wanted, (got, expected) in shared.items():
                if got != expected:
                    raise ValueError(
                        f"{layer.prefix}: expected {wanted}, as {like.prefix} has, got {got}: the experts of a layer "
                        "share one format"
                    )
            if layer.activation != first.activation:
                raise ValueError(
                    f"{layer.prefix}: expected {first.activation} activations, as {first.prefix} has, got "
                    f"{layer.activation}; activation=... chooses one for all"
                )
            files |= {*layer.names.values()}
            if layer.header is not None:
                start = layer.prefix if layer.prefix.endswith("_") else layer.prefix + "."
                files |= {*checkpoint.layer(start).values()}
            unused |= layer.unused
    quantised = first.header is not None
    return ExpertsSource(
        checkpoint, prefix, form, tuple(projections), biases, first.activation, quantised, frozenset(files), unused
    )
