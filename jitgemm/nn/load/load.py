"""`load_`: a model filled from a quantised checkpoint, and its steps behind `plan_for`, which `jitgemm.hf` takes by
themselves: `make_layer`, `read_tensor`, `fill_tensors`, `warn_of`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.checkpoint.files import Source, opened
from jitgemm.checkpoint.reader import target_device
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.invariant import check_tp_invariant
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.packed import check_layers, set_sums, warn_of_sums
from jitgemm.nn.load.plan import Plan, plan_for
from jitgemm.nn.load.plan_layers import LEFT_OUT
from jitgemm.nn.quantize.replaceable import PACKED, Filter, check_model
from jitgemm.nn.quantize.swap import describe_to_transformers, put_layers, put_tensor
from jitgemm.nn.report import Report, by_reason, some, warn_if_nothing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from jitgemm.nn.parallel.plan import ShardingPlan
    from jitgemm.nn.parallel.styles import Style


def load_(
    model: torch.nn.Module, source: Source, *, filter: Filter | None = None, activation: str | None = None,
    device: torch.device | str | int | None = None, strict: bool = True, allow_missing: Collection[str] = (),
    config: Mapping[str, Any] | None = None, format: str | None = None, tp: DeviceMesh | None = None,
    tp_plan: Mapping[str, str | Style] | None = None, sums: str | None = None, tp_invariant: bool | int = False,
) -> Report:  # fmt: skip
    """Fills a model from a quantised checkpoint: its quantised Linears become `W4A8Linear`s and `W8A8Linear`s, all else
    is copied.

    Experts that the model stacks in two parameters, as transformers 5 does, become a `W4A8Experts` or `W8A8Experts`;
    the checkpoint names each expert's projections (docs/formats.md). Experts in floats are stacked; routers stay what
    they are.

    A model from transformers is made by `AutoModelForCausalLM.from_config(config)`; what it holds before does not
    matter. The names in the checkpoint are the model's, or names that transformers renames. Packed layers that the
    model has already are loaded again. Also reads what `safetensors.torch.save_file` or `save_model` wrote of a model
    that was quantised here.

    A quantised layer that no packed one can stand for (see `quantize_`), that the filter leaves out, whose n is no
    multiple of 8, whose k is none of 16 or whose 8-bit codes have zero points, stays what it is and gets the
    dequantised weight; so do quantised modules of other classes with a parameter `weight` of two dimensions, such as
    embeddings, routers and transformers' Conv1D.

    Two names of one tied tensor that differ in the file are untied in the model.

    Args:
        source: folder, file, tensors by name or an open `jitgemm.checkpoint.Checkpoint`, as in `jitgemm.load`.
        filter: filter(name, module) -> whether a quantised Linear or a layer's stacked experts are replaced; None: all.
        activation: one of ACTIVATIONS; None for what the checkpoint says, see
            `W4A8Linear.from_checkpoint`.
        device: where the model goes; None for where each of its tensors is (the GPU, if there is one, for those on the
            meta device).
        strict: raise for tensors of the checkpoint that have no place in the model. Always ignored are tensors that the
            model lists in `_keys_to_ignore_on_load_unexpected`, scales of KV caches, rotary frequencies, biases of
            zeros where the model has none, and what has no effect next to a weight in floats, such as g_idx.
        allow_missing: patterns (`fnmatch`) of the model's tensors that the checkpoint need not fill: they keep what
            they hold, with a warning. All others must be filled, whatever `strict` says, except what the model never
            saves and computes itself, as Marian its positions.
        config, format: as in `jitgemm.load`.
        tp: a mesh of one dimension: every rank of it calls `load_`, and gets its part of each Linear that tp_plan
            names, see docs/parallel.md. Ranks have all embeddings, and all experts but for `ExpertParallel`.
        tp_plan: {pattern (`fnmatch`) of modules: a style of `jitgemm.nn.parallel`, or its name: "colwise", "rowwise",
            "colwise_gather_output", "rowwise_split_input"}; None: the model's own, which models of transformers have.
        sums: of the layers with 4-bit weights, as for `gemm_w4a8_nt`: "f32", "f16" with the activation "e4m3", or
            "exact" with those of int8. None for what the layer in its place has, or "f32". Weights whose scales f16
            does not hold are added up in fp32, with a warning.
        tp_invariant: the styles are those with tp_invariant, or with the most ranks: results have the same bits on a
            mesh of 1, 2, 4 and 8 ranks, or so many at most. ValueError for Linears in floats that ranks would divide.

    Returns:
        The names of the layers loaded, in the model's order, as a list that also says what was skipped, dequantised and
        ignored. Warns where no layer was quantised, and of layers that had to be dequantised.

    Raises:
        FileNotFoundError, TypeError, ValueError: the checkpoint cannot be read exactly, or does not fit the model; the
            message says where, and what to do. What config and headers show is found before the model is changed.
            Where a value is wrong, as a NaN scale is, layers before it have been loaded; load again to mend that.
    """
    check_model(model, filter)
    target = None if device is None else target_device(device)
    if tp is None and tp_plan is not None:
        raise ValueError("tp_plan: expected None without tp, a mesh, got a plan")
    check_tp_invariant(tp_invariant)
    if tp_invariant and tp is None:
        raise ValueError(f"tp_invariant: expected False without tp, a mesh, even of one GPU, got {tp_invariant}")
    division = None
    if tp is not None:
        from jitgemm.nn.parallel.plan import sharding_plan  # half a second of torch.distributed

        division = sharding_plan(model, tp, tp_plan, tp_invariant)
    plan = plan_for(model, opened(source, config), filter, activation, format, allow_missing, strict)
    if division is not None:
        division.check(model, plan.layers)
    check_sums(plan, sums)
    problems = _carry_out(plan, target, division, sums)
    warn_of_sums(problems, "load_")
    report = Report(plan.layers, plan.skipped, plan.ignored, plan.kept)
    report.mxfp4 = _tiers(model, plan.layers)
    warn_of(report, "load_", f"of {plan.checkpoint.where}", "quantize_")
    return report


def check_sums(plan: Plan, sums: str | None) -> None:
    """Raises TypeError or ValueError if the plan's 4-bit layers cannot have these sums."""
    layers: dict[str, Any] = {} if sums is None else dict(plan.layers)
    activations = ((name, layer.activation) for name, layer in layers.items() if getattr(layer, "bits", 4) == 4)
    check_layers(sums or "f32", ((name, activation) for name, activation in activations if activation))


def _tiers(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """`Report.mxfp4` of the layers of these names."""
    tiers_of = {}
    for name in names:
        layer: Any = model.get_submodule(name)
        parts: list[Any] = [layer] if isinstance(layer, PackedLinear) else []
        parts = [layer.w13, layer.w2] if isinstance(layer, PackedExperts) else parts
        formats = [part.weight.format for part in parts]
        if tiers := dict.fromkeys(format.tier for format in formats if format.powers):
            tiers_of[name] = "with " + " and ".join(tiers)
    return tiers_of


def warn_of(report: Report, call: str, where: str, instead: str) -> None:
    """Warns in the name of the caller's caller if nothing was quantised, and of what is dequantised or not filled."""
    why = f"its Linears are not quantised ({instead} does that)" if not report.skipped else "none could be"
    warn_if_nothing(report, call, f"{where}, {why}", stacklevel=4)
    slower = {name: why for name, why in report.skipped.items() if why.startswith("dequantised") and why != LEFT_OUT}
    if report and slower:
        lines = "\n".join(by_reason(slower))
        warnings.warn(f"{call}: {len(slower)} quantised layers are dequantised:\n{lines}", stacklevel=3)
    if report.kept:
        warnings.warn(
            f"{call}: {len(report.kept)} tensors are not in the checkpoint and keep what the model holds, as "
            f"allow_missing says: {some(report.kept)}",
            stacklevel=3,
        )


def _carry_out(
    plan: Plan, target: torch.device | None, division: ShardingPlan | None, sums: str | None
) -> dict[str, str]:
    """What `set_sums` says of the layers, whose sums are these, or None for those of packed layers in their places."""
    model: Any = plan.model
    problems: dict[str, str] = {}

    def device_of(tensor: torch.Tensor) -> torch.device:
        return target or (target_device(None) if tensor.is_meta else tensor.device)

    def make(name: str, old: Any) -> PackedLinear | PackedExperts:
        new = make_layer(plan, name, old, device_of(next(chain(old.parameters(), old.buffers()))), division)
        alike = isinstance(old, PACKED) and old.activation == new.activation
        if (wanted := sums or (old.sums if alike else "f32")) != "f32":
            problems.update((name + part, why) for part, why in set_sums({"": new}, wanted).items())
        return new

    tied = any(plan.replaceable.shared(name) for name in plan.layers)
    put_layers(model, {name: plan.replaceable.places[name] for name in plan.layers}, make, "loading")
    for name in plan.computed:  # whatever it holds, as every other tensor
        model._init_weights(model.get_submodule(name.rpartition(".")[0]))
    fill_tensors(plan, plan.tensors, lambda name, tensor: device_of(tensor))
    describe_to_transformers(model, bool(tied or plan.untied))
    if target is not None:
        model.to(target)
    if division is not None:
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear):
                division.divide(name, module)
        if hasattr(model, "_tp_size"):  # by which transformers sizes static caches
            model._tp_size = division.mesh.size()
    return problems


def make_layer(
    plan: Plan, name: str, old: torch.nn.Module, device: torch.device, division: ShardingPlan | None = None
) -> PackedLinear | PackedExperts:
    """The layer of that name, with its data, or a rank's part of it.

    Raises:
        ValueError: data that does not fit the old module, or cannot be divided.
    """
    source: Any = plan.layers[name]
    if source.layout is not None:
        split = None if division is None else division.expert_split(name, source.layout.experts)
        if split is not None and source.projections:
            experts = source.read(device, split.mine)
            experts.split, experts.batch_invariant = split, split.tp_invariant
            return experts
        experts = source.read(device)
        if division is not None:
            division.divide(name, experts)
        return experts
    cut = None if division is None else division.cut(name)
    parts = source.read(device, cut)
    k = parts.weight.k * (cut.world if cut is not None and cut.dim == "k" else 1)
    if k != old.in_features:
        raise ValueError(f"{name}: expected k = {old.in_features}, got {k}")
    new = PackedLinear.of_parts(parts)
    if division is not None:
        division.mark(new, name)
    return new


def read_tensor(plan: Plan, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the model as the checkpoint has it, dequantised or stacked where need be; its type may be another."""
    origin = plan.tensors[name]
    return plan.checkpoint.read(origin, device) if isinstance(origin, str) else origin(device, dtype)


def fill_tensors(plan: Plan, names: Collection[str], device_of: Callable[[str, torch.Tensor], torch.device]) -> None:
    """Gives tensors of the model their data, those on the meta device on device_of(name, tensor)."""
    places: dict[int, list[str]] = {}
    state = plan.model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        places.setdefault(id(tensor), []).append(name)
    with torch.no_grad():
        for name in names:
            tensor = state[name]
            value = read_tensor(plan, name, device_of(name, tensor) if tensor.is_meta else tensor.device, tensor.dtype)
            if value.shape != tensor.shape:  # of a format whose headers do not tell
                raise ValueError(f"{name}: expected shape {list(tensor.shape)}, got {list(value.shape)}")
            if name in plan.untied:
                put_tensor(plan.model, [name], tensor, value.to(tensor.dtype, copy=True))
            elif tensor.is_meta:
                tied = [place for place in places[id(tensor)] if place not in plan.untied]
                put_tensor(plan.model, tied, tensor, value.to(tensor.dtype))
            else:
                tensor.copy_(value)
