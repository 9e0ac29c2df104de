"""`quantize_folder`, what `jitgemm quantize` does: a folder's model, quantised into another, a stage at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint import qserve
from jitgemm.nn.quantize import evaluate
from jitgemm.nn.quantize.choose import why_unwise
from jitgemm.nn.quantize.quantize import Quantising
from jitgemm.nn.quantize.replaceable import Filter, Replaceable
from jitgemm.nn.quantize.swap import bar
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.report import by_reason, some
from jitgemm.nn.save.export import quantization_config, write_checkpoint
from jitgemm.nn.save.model_folder import ModelFolder, load_model
from jitgemm.nn.save.resume import ResumableFolder
from jitgemm.nn.save.tensor_map import map_tensors

GROUPS = (128, 64, 32)
"""Group sizes that other readers take, the fastest first."""
_BATCH = 8
"""Windows in one call of the model."""


def quantize_folder(
    source: ModelFolder, out: ResumableFolder, recipe: Recipe, *, device: torch.device,
    calibration: torch.Tensor | None, held_back: torch.Tensor | None, group_size: int | None, keep_8bit: float | None,
    note: Callable[[str], None], tenths: bool,
) -> dict[str, Any]:  # fmt: skip
    """Quantises a model in floats, and writes a checkpoint of its names.

    Args:
        calibration: token ids [windows, tokens]; None for none.
        held_back: token ids [windows, tokens] by which models are compared; None: they are not.
        group_size: one of GROUPS; None for the recipe's, or the next smaller one that divides all layers' columns.
        keep_8bit: as in `quantize_`.
        note: called with each thing that a user should know.
        tenths: whether to note each tenth of the layers, where no bar is shown.

    Returns:
        What `jitgemm quantize --json` prints, without the seconds.

    Raises:
        ValueError: the model cannot be made, quantised or written so, or a file was changed while it was read.
        OSError: a file could not be read or written.
        JitGemmError: what was written is not there when it is read back.
    """
    note(f"reading {source.folder}")
    model = load_model(source, device)
    source.check_unchanged()
    reasons: dict[str, str] = {}
    if "group_size" in recipe.quantiser.options:  # as other readers expect them
        recipe = replace(recipe, group_size=_group_size(model, recipe, group_size, note), positive_scales=True)
    elif (groups := recipe.otherwise) is not None:
        size = _group_size(model, recipe, None, note)
        recipe = replace(recipe, otherwise=replace(groups, group_size=size, positive_scales=True))
    job = Quantising(
        model, recipe, filter_for(model, recipe, reasons), keep_8bit=keep_8bit, device=device,
        calibration=None if calibration is None else calibration.split(_BATCH),
    )  # fmt: skip
    skipped = job.report.skipped | reasons
    if not job.chosen:
        why = "\n".join(by_reason(skipped)) or "  it holds no torch.nn.Linear"
        raise ValueError(f"{source.folder}: expected a layer that can be quantised, found none:\n{why}")
    tensor_map = map_tensors(model, source, job.chosen, job.found.experts, job.found.head)
    held_back = None if held_back is None else held_back.to(device)
    base = [] if held_back is None else [part.cpu() for part in _predicted(model, held_back)]

    _quantise(job, out, device, note if tenths else lambda text: None)
    if unlike := job.report.otherwise:
        note(f"{len(unlike)} layers in {next(iter(unlike.values()))}: {some(unlike)}")
    if job.report.unreached:
        note(f"the text did not reach {some(job.report.unreached)}: weights alone decided there")
    with bar("writing", len(source.shards)) as show:
        config = quantization_config(model, tensor_map, recipe)
        written = write_checkpoint(model, source, tensor_map, out, config, show)
    out.finish()
    evaluation = None
    if held_back is not None:
        note(f"{out.folder} is complete; what it predicts is compared with {source.folder}")
        before = evaluate.compared(base, base, held_back)
        after = evaluate.compared(base, _predicted(model, held_back), held_back)
        evaluation = {"tokens": held_back[:, 1:].numel(), "before": before, "after": after}
    lost = job.report.errors | job.report.kept_8bit  # in 4 bits
    return {
        "folder": str(source.folder), "out": str(out.folder), "activation": recipe.inputs,
        "scheme": recipe.code, "group_size": recipe.group, "tokens": 0 if calibration is None else calibration.numel(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "bytes_before": source.size, "bytes_after": written, "evaluation": evaluation,
        "layers": [
            {"name": name, "bits": _bits(model, name), "error": lost[name]}
            for name in sorted(lost, key=lambda name: -lost[name])
        ],
        "otherwise": job.report.otherwise, "skipped": skipped, "unreached": job.report.unreached,
    }  # fmt: skip


def _predicted(model: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """`log_probabilities`, with a bar."""
    parts = ids.split(evaluate.AT_ONCE)
    with bar("evaluating", len(parts)) as show:
        for part in parts:
            show("by text that is held back")
            yield from evaluate.log_probabilities(model, part)


def _quantise(job: Quantising, out: ResumableFolder, device: torch.device, note: Callable[[str], None]) -> None:
    """All stages: what an interrupted run left is read, the rest is quantised and kept."""
    read: set[str] = set()

    def ready(names: list[str]) -> dict[str, Any] | None:
        layers = out.load_stage(names, job.report, job.found.experts, device)
        read.update(layers or ())
        return layers

    done = 0
    with closing(job.stages(ready)) as stages:  # an interruption ends its bar
        for layers in stages:
            if not read.issuperset(layers):
                out.save_stage(layers, job.report)
            before, done, total = done, done + len(layers), len(job.chosen)
            if 10 * done // total > 10 * before // total:
                note(f"{done} of {total} layers are quantised")


def filter_for(model: Any, recipe: Recipe, reasons: dict[str, str]) -> Filter:
    """Which modules are quantised: `quantize_`'s own choice, within the text's decoder, where columns make groups.
    reasons: gets {name: why not} of the others."""
    scan, decoder = Replaceable(model), _decoder(model)
    multiple = max(recipe.k_alignment, GROUPS[-1] if recipe.group else 1)

    def fits(name: str, module: torch.nn.Module) -> bool:
        reason = why_unwise(scan, name)
        if reason is None and decoder and not name.startswith(f"{decoder}."):
            reason = f"outside of {decoder}, which reads the text"
        if reason is None and any(k % multiple for _, k in _sizes(scan, name, module)):
            reason = f"expected a number of columns that is a multiple of {multiple}"
        if reason is None and recipe.writes_qserve and not all(map(qserve.writes, _sizes(scan, name, module))):
            reason = f"expected {qserve.WRITTEN}"
        if reason is not None:
            reasons[name] = reason
        return reason is None

    return fits


def _sizes(scan: Replaceable, name: str, module: Any) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of a Linear, or of each of the weights that files have of an expert."""
    layout = scan.experts.get(name)
    if layout is None:
        return ((module.out_features, module.in_features),)
    return (layout.inter, layout.hidden), (layout.hidden, layout.inter)


def _decoder(model: Any) -> str:
    """The name of a model's text decoder; "" if all of the model is one. What sees images is not calibrated by text."""
    part = getattr(model, "get_decoder", lambda: None)()
    return next((name for name, module in model.named_modules() if module is part), "")


def _group_size(model: Any, recipe: Recipe, asked: int | None, note: Callable[[str], None]) -> int:
    """The group size that was asked for, else the recipe's or the next smaller one that divides all layers' columns."""
    scan, fits, of_groups = Replaceable(model), filter_for(model, recipe, {}), recipe.otherwise or recipe
    columns: dict[int, str] = {}  # and the first layer that has as many
    for name in scan.places:
        module = model.get_submodule(name)
        if scan.why_impossible(name) is None and fits(name, module):
            of_layer = [k for _, k in _sizes(scan, name, module)]
            if recipe.for_columns(*of_layer) is of_groups:
                for k in of_layer:
                    columns.setdefault(k, name)
    good = [size for size in GROUPS if all(k % size == 0 for k in columns)]
    if asked is not None and asked not in good:
        k = next(k for k in columns if k % asked)
        raise ValueError(f"group_size: expected one of {good}, got {asked}, and {columns[k]} has {k} columns")
    if asked is not None:
        return asked
    wanted = of_groups.group
    size = next(size for size in good if size <= wanted)  # type: ignore[operator]
    if size != wanted:
        k = next(k for k in columns if k % (2 * size))
        note(f"groups of {size}: {columns[k]} has {k} columns, no multiple of {2 * size}")
    return size


def _bits(model: Any, name: str) -> int:
    layer = model.get_submodule(name)
    return int((layer.w13 if hasattr(layer, "w13") else layer).weight.bits)
