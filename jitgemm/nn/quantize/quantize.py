"""`quantize_`: the Linears and the experts of a model, quantised where they stand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from jitgemm.checkpoint.reader import target_device
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.linear import LINEARS, PackedLinear
from jitgemm.nn.layers.packed import put_sums
from jitgemm.nn.quantize.calibration import Batch, Calibration
from jitgemm.nn.quantize.choose import STACKED, choose, others
from jitgemm.nn.quantize.evaluate import relative_error
from jitgemm.nn.quantize.replaceable import Filter, Replaceable, check_model
from jitgemm.nn.quantize.stacked import ExpertsLayout
from jitgemm.nn.quantize.swap import bar, describe_to_transformers, made, put_layer
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.report import Report, by_reason, some, warn_if_nothing
from jitgemm.weight.packed import Weight

UNCALIBRATED = (
    "from the weights alone: calibration=batches, a few thousand tokens of text, makes a 4-bit model far better "
    "(docs/quantize.md)"
)


def quantize_(
    model: torch.nn.Module, filter: Filter | None = None, *, bits: int = 4, scheme: str | None = None,
    lm_head: str | None = None, activation: str | None = None, group_size: int | str | None = None,
    symmetric: bool | None = None, scale_dtype: torch.dtype | None = None, full_range: bool | None = None,
    clip_steps: int | None = None, block: int | None = None, calibration: Iterable[Batch] | None = None,
    act_order: bool | None = None, keep_8bit: float | None = None, device: torch.device | str | int | None = None,
    sums: str = "f32", rotation: int | None = None,
) -> QuantisationReport:  # fmt: skip
    """Replaces the Linears of a model by `W4A8Linear`s, or `W8A8Linear`s, in place, one at a time; each original is
    freed as it goes. With `calibration` it is a decoder block at a time.

    The experts of a layer that transformers 5 stacks in two parameters become a `W4A8Experts` or `W8A8Experts`. Where
    there is a Linear for each expert, each becomes a layer.

    A Linear is left alone whatever the filter says where something other than torch.nn.Linear's own call uses its
    weight: a subclass with a forward of its own, a forward replaced on the object (accelerate), or a parent that reads
    the weight (torch.nn.MultiheadAttention and TransformerEncoderLayer, Mamba's dt_proj, ...).

    In a transformers model, config.quantization_config then says that jitgemm saved the model. from_pretrained rejects
    what save_pretrained wrote of it; `load_` reads it.

    Args:
        model: any module that holds torch.nn.Linear modules. A Linear that stands at several places is quantised once;
            its forward hooks go to its layer.
        filter: filter(name, module) -> whether to replace it, a Linear or a module of stacked experts; one that is
            chosen and has no packed form is an error. None: all but the output embedding (`lm_head`, or what
            `model.get_output_embeddings()` returns), Linears that share their weight with another module, routers of
            mixtures of experts (`gate`, `router`, ...), and those without a packed form: out_features no multiple of 8,
            in_features none of 16, or a weight that is not bf16, fp16 or fp32.
        bits: of the weights, 4 or 8.
        scheme: of 4 bits: "two-level" for integer factors and zero points of groups of 128 (`quantize_w4_two_level`),
            with int8 activations; "int4" for integers in groups (`quantize_w4`); "mxfp4" for MXFP4 (`quantize_mxfp4`),
            with e4m3 activations. None: two levels, rotated, as long as nothing else is said that they do not have
            (group_size, symmetric, scale_dtype, full_range, clip_steps, other activations, sums="f16"), and then
            integers in groups. Layers whose in_features is no multiple of 128 then get groups; the report names them.
        lm_head: one of ACTIVATIONS, such as "int8": the output embedding becomes a `W8A8Linear` with these activations,
            whatever the filter says; where it is tied to the input's, that one stays as it is. None: it is like others.
        activation: one of ACTIVATIONS; None for int8 with two levels, else e4m3.
        group_size, symmetric: of "int4", as in `quantize_w4`; None for 128 and True. Where both are None and there is
            no calibration: groups of 32 with zero points (without, where activations have a scale per block).
        scale_dtype, full_range, clip_steps: of "int4", as in `quantize_w4`; None for that call's defaults.
        block: with 8 bits and no calibration, as in `quantize_w8`.
        calibration: what the model is called with to see the layers' inputs: token ids [sequences,
            tokens], tuples of arguments, or keywords such as a tokenizer's result, whose `attention_mask` leaves
            padding out. 16,000 tokens of text such as the model is for are enough. Each block runs on what the
            quantised ones before it pass on; up to 16 GiB of sums are held where the layers are. An expert counts the
            tokens that it gets. None: weights alone decide, which costs a 4-bit model much more.
        act_order: with calibration, as in `quantize_w4`.
        keep_8bit: with calibration, the relative squared error (`QuantisationReport.errors`) above which a layer and
            those with the same input, such as q, k and v, get 8 bits with a scale per row.
        device: where to quantise and keep the weights; None for where each is. With calibration, which runs the model,
            it is where the model is.
        sums: of the layers with 4-bit weights, as for `gemm_w4a8_nt`: "f32", "f16" with the activation "e4m3", or
            "exact" with those of int8. Weights whose scales f16 does not hold are added up in fp32, with a warning.
        rotation: 128 rotates weights, and inputs in the layers' quantisers, by blocks of 128 k, which spreads outliers
            (docs/quantize.md): the same products, with less error. With a scheme, or 8 bits, layers whose in_features
            is no multiple of 128 are left, as those without a packed form. None: no rotation, except as scheme says.

    Returns:
        The names of the replaced modules, in the model's order, as a list that also says what was skipped and why, and
        each layer's error.
        Warns where nothing was replaced, and of stacked experts that no packed ones can stand for.

    Raises:
        ValueError, TypeError: model is a Linear itself, an option is wrong, or a chosen Linear cannot be quantised; the
            message names it. What sizes and dtypes show is found before anything is replaced. Where a value is wrong,
            as a NaN is, the Linears before it have been replaced.
    """
    said = {
        "bits": bits, "scheme": scheme, "activation": activation, "group_size": group_size, "symmetric": symmetric,
        "scale_dtype": scale_dtype, "full_range": full_range, "clip_steps": clip_steps, "act_order": act_order,
        "block": block, "sums": sums, "lm_head": lm_head, "rotation": rotation,
    }  # fmt: skip
    recipe = Recipe.of(said, calibrated=calibration is not None)
    recipe.check_sums()
    job = Quantising(model, recipe, filter, calibration=calibration, keep_8bit=keep_8bit, device=device)
    for _ in job.stages():
        pass
    if sums != "f32":
        put_sums({name: model.get_submodule(name) for name in job.report}, sums, "quantize_")
    warn_of_experts(model, job.report, "quantize_")
    warn_if_nothing(
        job.report, "quantize_", "none was chosen" if job.found.places else "the model holds no torch.nn.Linear"
    )
    return job.report


class QuantisationReport(Report):
    """What `quantize_` did. Prints as a summary.

    Attributes:
        calibrated: whether calibration was given.
        errors: {name: the squared error of the layer's results over their squares}, for calibration's inputs; without
            calibration that of the weight. Activations' rounding is not in it.
        kept_8bit: {name: its error in 4 bits} of layers that `keep_8bit` left in 8 bits.
        unreached: layers that no batch of calibration reached: quantised from their weights alone.
    """

    def __init__(self, names: Iterable[str], skipped: Mapping[str, str], calibrated: bool):
        super().__init__(names, skipped)
        self.calibrated = calibrated
        self.errors: dict[str, float] = {}
        self.kept_8bit: dict[str, float] = {}
        self.unreached: list[str] = []

    @property
    def worst(self) -> list[str]:
        """The layers by error, the largest first."""
        return sorted(self.errors, key=lambda name: -self.errors[name])

    def __repr__(self) -> str:
        lines = [super().__repr__()]
        if self.errors:
            what = "results" if self.calibrated else "weights"
            largest = ", ".join(f"{name} {self.errors[name]:.2%}" for name in self.worst[:3])
            median = self.errors[self.worst[len(self.errors) // 2]]
            lines.append(f"squared error of {what}: median {median:.2%}; largest: {largest}")
        if self.kept_8bit:
            lines.append(f"kept in 8 bits: {len(self.kept_8bit)} ({some(self.kept_8bit)})")
        if self.unreached:
            lines.append(f"not reached by calibration: {len(self.unreached)} ({some(self.unreached)})")
        if self and not self.calibrated:
            lines.append(UNCALIBRATED)
        return "\n".join(lines)


class Quantising:
    """The steps of `quantize_`, which has the same arguments.

    Attributes:
        chosen: {name: all its places} of the modules to quantise.
        report: what is known so far.
    """

    def __init__(
        self, model: torch.nn.Module, recipe: Recipe, filter: Filter | None = None, *,
        calibration: Iterable[Batch] | None = None, keep_8bit: float | None = None,
        device: torch.device | str | int | None = None,
    ):  # fmt: skip
        check_model(model, filter)
        if keep_8bit is not None and recipe.bits == 8:
            raise TypeError("keep_8bit: expected none with bits=8, got one, which goes with 4")
        if keep_8bit is not None and not (isinstance(keep_8bit, (int, float)) and keep_8bit >= 0):
            raise ValueError(f"keep_8bit: expected a number of at least 0, got {keep_8bit!r}")
        if calibration is not None and recipe.block is not None:
            raise TypeError("block: expected none with calibration, which fits codes to a scale per row, got one")
        if keep_8bit is not None and calibration is None:
            raise ValueError("keep_8bit: expected calibration, whose inputs say what a layer loses, got none")
        self.batches = None if calibration is None else list(calibration)
        if self.batches == []:
            raise ValueError("calibration: expected at least one batch, got none")
        there = next((p.device for p in model.parameters()), None)
        wanted = None if calibration is None or device is None else target_device(device)
        if wanted and there and (wanted.type != there.type or wanted.index not in (None, there.index)):
            raise ValueError(f"device: expected none with calibration, which runs the model on {there}, got {device}")
        self.model, self.found, self.recipe, self.keep_8bit = model, Replaceable(model), recipe, keep_8bit
        self.device = device
        self.chosen, skipped = choose(self.found, filter, recipe)
        for name in self.chosen:
            weight = self.found.experts[name].parameters[0] if name in self.found.experts else "weight"
            if getattr(model.get_submodule(name), weight).is_meta:
                raise ValueError(f"{name}: expected a weight with data, got one on the meta device")
        self.report = QuantisationReport(self.chosen, skipped | others(self.found), calibration is not None)

    def stages(
        self, ready: Callable[[list[str]], dict[str, Any] | None] | None = None
    ) -> Generator[dict[str, Any], None, None]:
        """Replaces modules, and yields {name: layer} of what was replaced together.

        With calibration these are modules of one block, in the order in which they run; without it one module. A
        model whose stages did not all run is left with some modules replaced.

        Args:
            ready: what it returns for the names of a stage is put in their place; None: they are to be quantised.
        """
        untied = any(self.found.shared(name) for name in self.chosen)
        with bar("quantising", len(self.chosen)) as show:
            left = dict(self.chosen)
            for names, siblings, moments in self._stages(show):
                layers = None if ready is None else ready(names)
                for name in layers or ():
                    show(name)
                if layers is None:
                    layers = self._stage(siblings, moments, show)
                for name, layer in layers.items():
                    put_layer(self.model, name, left.pop(name), layer)
                    note_otherwise(self.report, name, layer, self.recipe)
                yield layers
                del layers
        if self.report:
            describe_to_transformers(self.model, untied)

    def _stages(self, show: Callable[..., None]) -> Iterator[tuple[list[str], list[list[str]], Any]]:
        """(names, the same by common input, what makes their moments or None) of each stage."""
        left = dict(self.chosen)
        if self.batches is not None:
            experts = {
                name: self.found.experts.get(name)
                for name in left
                if name != self.found.head or self.recipe.head is None
            }
            runs = Calibration(self.model, self.batches, experts, show=show)
            for stage in runs.stages():

                def moments(stage: list[str] = stage) -> dict[str, Any]:
                    return {name: sums.given(name in self.found.experts) for name, sums in runs.collect(stage).items()}

                siblings: dict[str, list[str]] = {}
                for name in stage:
                    siblings.setdefault(runs.calls[name].leader, []).append(name)
                    del left[name]
                yield stage, list(siblings.values()), moments
            self.report.unreached = [name for name in left if name in experts]
        for name in left:
            yield [name], [[name]], None

    def _stage(
        self, siblings: list[list[str]], moments: Callable[[], dict[str, Any]] | None, show: Callable[[str], None]
    ) -> dict[str, Any]:
        """A stage's layers. Its moments are gone when it returns, before the next stage's are summed."""
        of_inputs = {} if moments is None else moments()
        layers: dict[str, Any] = {}
        for together in siblings:
            layers |= self._quantised(together, of_inputs, show)
        return layers

    def _quantised(self, names: list[str], moments: dict[str, Any], show: Callable[[str], None]) -> dict[str, Any]:
        """The layers of modules that have the same input: all of 4 bits, or all of 8 where one would lose too much."""

        def make(name: str, module: torch.nn.Module, recipe: Recipe) -> PackedLinear | PackedExperts:
            layer = quantised(self.found, name, module, recipe, device=self.device, moments=moments.get(name))
            error = relative_error(layer, module, self.found.experts.get(name), moments.get(name))
            self.report.errors[name] = error
            return layer

        def layer_of(name: str, recipe: Recipe) -> PackedLinear | PackedExperts:
            return made(partial(make, recipe=recipe), name, self.model.get_submodule(name))

        layers = {}
        for name in names:
            show(name)
            layers[name] = layer_of(name, self.recipe)
        if self.keep_8bit is None or max(self.report.errors[name] for name in names) <= self.keep_8bit:
            return layers
        self.report.kept_8bit |= {name: self.report.errors[name] for name in names}
        return {name: layer_of(name, self.recipe.in_8_bits) for name in names}


def quantised(
    scan: Replaceable, name: str, module: torch.nn.Module, recipe: Recipe, *,
    device: torch.device | str | int | None = None, moments: Any = None, ranks: int = 1,
) -> PackedLinear | PackedExperts:  # fmt: skip
    """The layer for a module of that name, which `choose` chose; ranks: that will share its columns."""
    if (layout := scan.experts.get(name)) is not None:
        recipe = recipe.for_columns(layout.hidden, layout.inter)
        return quantised_experts(module, layout, recipe, device=device, moments=moments)
    if name == scan.head and recipe.head is not None:
        recipe, moments = recipe.head, None
    assert isinstance(module, (torch.nn.Linear, PackedLinear))
    recipe = recipe.for_columns(module.in_features // ranks)
    return LINEARS[recipe.bits].by_recipe(module, recipe, device=device, moments=moments)


def note_otherwise(report: Report, name: str, layer: PackedLinear | PackedExperts, recipe: Recipe) -> None:
    """Notes a layer of as many bits as the recipe says that got `recipe.otherwise`."""
    weight = next(iter(layer.packed_parts(name).values())).weight
    if recipe.otherwise is not None and isinstance(weight, recipe.quantiser.kind) and not weight.rotation:
        report.otherwise[name] = recipe.why_otherwise


def quantised_experts(
    module: torch.nn.Module, layout: ExpertsLayout, recipe: Recipe, *, device: torch.device | str | int | None = None,
    moments: Sequence[Sequence[torch.Tensor | None]] | None = None,
) -> PackedExperts:  # fmt: skip
    """A layer whose weights are the module's, quantised by a recipe.

    Args:
        moments: those of each expert's inputs, first of w13, then of w2.

    Raises:
        TypeError, ValueError: an argument is wrong, or a weight has no such form.
    """
    device = None if device is None else target_device(device)

    def packed(name: str) -> Weight:
        """One expert at a time, which is all that goes to the device."""
        w = layout.rows(getattr(module, name).detach())
        of_name = None if moments is None else moments[layout.parameters.index(name)]

        def make(e: int) -> Weight:
            try:
                w_e = w[e] if device is None else w[e].to(device)
                of_e = None if of_name is None else of_name[e]
                return recipe.apply(w_e, None if of_e is None else of_e.to(w_e.device))
            except ValueError as error:
                raise ValueError(f"{name}[{e}]: {error}") from error

        return recipe.quantiser.kind.stacked(layout.experts, make)

    with torch.no_grad():
        w13, w2 = map(packed, layout.parameters)
        names = layout.biases if layout.bias else ()
        biases = [getattr(module, name).detach().to(w13.device, copy=True) for name in names]
    return packed_experts(w13, w2, *biases, gate=layout.gate, activation=recipe.inputs, top_k=layout.top_k)


def warn_of_experts(model: torch.nn.Module, report: Report, call: str) -> None:
    """Warns, in the name of the caller's caller, of stacked experts that stay in their type."""
    stacked = {name: reason for name, reason in report.skipped.items() if reason.startswith(STACKED)}
    if stacked:
        total = sum(p.numel() for p in model.parameters())  # converted layers have none
        part = sum(model.get_parameter(name).numel() for name in stacked) / total
        reasons = ";".join(by_reason(stacked))
        warnings.warn(f"{call} left {part:.0%} of the remaining parameters in their type:{reasons}", stacklevel=3)
