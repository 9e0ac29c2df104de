"""`quantize_`: the Linears of a model, quantised where they stand."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from jitgemm.nn.choose import STACKED, Filter, Linears
from jitgemm.nn.linear import W4A8Linear
from jitgemm.nn.report import Report, warn_if_nothing
from jitgemm.nn.swap import describe_to_transformers, put_layers


def quantize_(model: torch.nn.Module, filter: Filter | None = None, **options: Any) -> Report:
    """Replaces the Linears of a model by `W4A8Linear`s, in place, one at a time; each original is freed as it goes.

    A Linear is left alone whatever the filter says where something other than torch.nn.Linear's own call uses its
    weight: a subclass with a forward of its own, a forward replaced on the object (accelerate), or a parent that reads
    the weight (torch.nn.MultiheadAttention and TransformerEncoderLayer, Mamba's dt_proj, ...).

    In a transformers model, config.quantization_config then says that jitgemm saved the model. from_pretrained refuses
    what save_pretrained wrote of it; `load_` reads it.

    Args:
        model: any module that holds torch.nn.Linear modules. A Linear that stands at several places is quantised once;
            its forward hooks go to its layer.
        filter: filter(name, linear) -> whether to replace it; a Linear that is chosen and has no 4-bit form is an
            error. None: all but the output embedding (`lm_head`, or what `model.get_output_embeddings()` returns),
            Linears that share their weight with another module, routers of mixtures of experts (`gate`, `router`, ...),
            and those without a 4-bit form: out_features no multiple of 8, in_features none of 32, or a weight that is
            not bf16, fp16 or fp32.
        options: as in `W4A8Linear.from_linear`: activation, group_size, symmetric, scale_dtype, device, ....

    Returns:
        The names of the replaced modules, in the model's order, as a list that also says what was skipped and why, such
        as experts that the model stacks in one parameter. Warns where nothing was replaced.

    Raises:
        ValueError, TypeError: model is a Linear itself, an option is wrong, or a chosen Linear cannot be quantised; the
            message names it. What sizes and dtypes show is found before anything is replaced. Where a value is wrong,
            as a NaN is, the Linears before it have been replaced.
    """
    linears = Linears(model)
    chosen, skipped, untied = {}, {}, False
    for name, places in linears.places.items():
        linear = model.get_submodule(name)
        reason = "is a W4A8Linear already" if isinstance(linear, W4A8Linear) else linears.cannot(name)
        if reason is None and filter is None:
            reason = linears.should_not(name)
        elif reason is None and not filter(name, linear):
            reason = "left out by the filter"
        elif reason is None:
            problem = linears.unfit(linear)
            if problem is not None:
                raise ValueError(f"{name}: {problem}")
        if reason is not None:
            skipped[name] = reason
            continue
        if linear.weight.is_meta:
            raise ValueError(f"{name}: expected a weight with data, got one on the meta device")
        untied |= linears.shared(name)
        chosen[name] = places

    def quantised(name: str, linear: torch.nn.Module) -> W4A8Linear:
        return W4A8Linear.from_linear(linear, **options)

    report = Report(chosen, skipped | linears.others())
    put_layers(model, chosen, quantised, "quantising")
    if report:
        describe_to_transformers(model, untied)
    stacked = [name for name, reason in report.skipped.items() if reason == STACKED]
    if stacked:
        total = sum(p.numel() for p in model.parameters())  # converted layers have none
        part = sum(model.get_parameter(name).numel() for name in stacked) / total
        warnings.warn(f"quantize_: {len(stacked)} {STACKED}: {part:.0%} of the parameters that are left", stacklevel=2)
    warn_if_nothing(report, "quantize_", "none was chosen" if skipped else "the model holds no torch.nn.Linear")
    return report
