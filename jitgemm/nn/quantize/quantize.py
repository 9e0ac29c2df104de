"""`quantize_`: the Linears and the experts of a model, quantised where they stand."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

from jitgemm.activations.scheme import ACTIVATIONS
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import LINEARS, PackedLinear
from jitgemm.nn.quantize.replaceable import PACKED, STACKED, Filter, Replaceable, check_model
from jitgemm.nn.quantize.stacked import PARAMETERS, quantised_experts
from jitgemm.nn.quantize.swap import describe_to_transformers, put_layers
from jitgemm.nn.report import Report, by_reason, warn_if_nothing


def quantize_(
    model: torch.nn.Module, filter: Filter | None = None, *, bits: int = 4, lm_head: str | None = None,
    activation: str = "e4m3", group_size: int | str | None = None, symmetric: bool | None = None,
    scale_dtype: torch.dtype | None = None, full_range: bool | None = None, clip_steps: int | None = None,
    block: int | None = None, device: torch.device | str | int | None = None,
) -> Report:  # fmt: skip
    """Replaces the Linears of a model by `W4A8Linear`s, or `W8A8Linear`s, in place, one at a time; each original is
    freed as it goes.

    The experts of a layer that transformers 5 stacks in two parameters become a `W4A8Experts` or `W8A8Experts`. Where
    there is a Linear for each expert, each becomes a layer.

    A Linear is left alone whatever the filter says where something other than torch.nn.Linear's own call uses its
    weight: a subclass with a forward of its own, a forward replaced on the object (accelerate), or a parent that reads
    the weight (torch.nn.MultiheadAttention and TransformerEncoderLayer, Mamba's dt_proj, ...).

    In a transformers model, config.quantization_config then says that jitgemm saved the model. from_pretrained refuses
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
        lm_head: one of ACTIVATIONS, such as "int8": the output embedding becomes a `W8A8Linear` with these activations,
            whatever the filter says; where it is tied to the input's, that one stays as it is. None: it is like others.
        activation: one of ACTIVATIONS.
        group_size, symmetric, scale_dtype, full_range, clip_steps: with 4 bits, as in `quantize_w4`; None for 128 and
            that call's defaults.
        block: with 8 bits, as in `quantize_w8`.
        device: where to quantise and keep the weights; None for where each is.

    Returns:
        The names of the replaced modules, in the model's order, as a list that also says what was skipped and why.
        Warns where nothing was replaced, and of stacked experts that no packed ones can stand for.

    Raises:
        ValueError, TypeError: model is a Linear itself, an option is wrong, or a chosen Linear cannot be quantised; the
            message names it. What sizes and dtypes show is found before anything is replaced. Where a value is wrong,
            as a NaN is, the Linears before it have been replaced.
    """
    check_model(model, filter)
    check_options(bits, lm_head)
    four = {
        "group_size": group_size, "symmetric": symmetric, "scale_dtype": scale_dtype, "full_range": full_range,
        "clip_steps": clip_steps,
    }  # fmt: skip
    options: dict[str, Any] = {name: value for name, value in (four | {"block": block}).items() if value is not None}
    wrong = next((name for name in options if (name in four) != (bits == 4)), None)
    if wrong is not None:
        raise TypeError(f"{wrong}: expected none with bits={bits}, got one, which goes with {8 if bits == 4 else 4}")
    options |= {"activation": activation, "device": device}
    found = Replaceable(model)
    chosen, skipped = choose(model, found, filter, lm_head)
    for name in chosen:
        if getattr(model.get_submodule(name), PARAMETERS[0] if name in found.forms else "weight").is_meta:
            raise ValueError(f"{name}: expected a weight with data, got one on the meta device")
    untied = any(found.shared(name) for name in chosen)
    report = Report(chosen, skipped | found.others())
    put_layers(model, chosen, partial(quantised, found, lm_head=lm_head, bits=bits, **options), "quantising")
    if report:
        describe_to_transformers(model, untied)
    warn_of_experts(model, report, "quantize_")
    warn_if_nothing(report, "quantize_", "none was chosen" if skipped else "the model holds no torch.nn.Linear")
    return report


def choose(
    model: torch.nn.Module, found: Replaceable, filter: Filter | None, lm_head: str | None = None
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """({name: all its places} of the modules to quantise, {name: why not} of the others), from sizes and types.

    Raises:
        ValueError: the filter chose a module that has no packed form, or there is no head to quantise as lm_head says.
    """
    if lm_head is not None and found.head is None:
        raise ValueError("lm_head: expected a model whose output embedding is a Linear, found none")
    chosen, skipped = {}, {}
    for name, places in found.places.items():
        module = model.get_submodule(name)
        reason = f"is a {type(module).__name__} already" if isinstance(module, PACKED) else found.why_impossible(name)
        if lm_head is not None and name == found.head:
            if (problem := reason or found.why_unfit(name)) is not None:
                raise ValueError(f"lm_head: {name}: {problem}")
        elif reason is None and filter is None:
            reason = found.why_unwise(name)
        elif reason is None and not filter(name, module):
            reason = "left out by the filter"
        elif reason is None and (problem := found.why_unfit(name)) is not None:
            raise ValueError(f"{name}: {problem}")
        if reason is None:
            chosen[name] = places
        else:
            skipped[name] = reason
    return chosen, skipped


def check_options(bits: int, lm_head: str | None) -> None:
    if bits not in LINEARS:
        raise ValueError(f"bits: expected 4 or 8, got {bits!r}")
    if lm_head is not None and lm_head not in ACTIVATIONS:
        raise ValueError(f"lm_head: expected None or one of {', '.join(ACTIVATIONS)}, got {lm_head!r}")


def quantised(
    found: Replaceable, name: str, module: torch.nn.Module, *, lm_head: str | None, bits: int, **options: Any
) -> PackedLinear | PackedExperts:
    """The layer for a module of that name, which `choose` chose."""
    if lm_head is not None and name == found.head:
        return LINEARS[8].from_linear(module, activation=lm_head, device=options.get("device"))
    if name in found.forms:
        return quantised_experts(module, found.forms[name], bits=bits, **options)
    return LINEARS[bits].from_linear(module, **options)


def warn_of_experts(model: torch.nn.Module, report: Report, call: str) -> None:
    """Warns, in the name of the caller's caller, of stacked experts that stay in their type."""
    stacked = {name: reason for name, reason in report.skipped.items() if reason.startswith(STACKED)}
    if stacked:
        total = sum(p.numel() for p in model.parameters())  # converted layers have none
        part = sum(model.get_parameter(name).numel() for name in stacked) / total
        reasons = ";".join(by_reason(stacked))
        warnings.warn(f"{call} left {part:.0%} of the remaining parameters in their type:{reasons}", stacklevel=3)
