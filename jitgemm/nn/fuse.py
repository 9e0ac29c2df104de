"""`fuse_`: norms, quantisers and projections of a model's blocks in as few kernels as the calls allow, and back.

How forward changes, and why so. A block's attention calls q_proj, k_proj and v_proj one by one on what its norm
returned. Here the norm runs them all: a `FusedNorm` takes the norm's input, quantises it once and returns the outputs
of all projections side by side, and each projection becomes a view of its columns (`Slice`). So plain tensors go from
module to module; no forward is patched, nothing is kept between calls, and torch.compile, CUDA graphs, deepcopy and
pickle see ordinary modules. What else reads the norm's output would get the wrong tensor, so such a norm stays as it
is. An MLP's forward cannot stay, as its product is no module: a `FusedMLP` with the same children replaces it. Nor can
a layer's whose second norm is to add the residual: its class becomes one derived from its own (`FusedLayer`).

What may be fused is found by running each block on a few random tokens, without its weights (`trial.py`): who reads
which tensor is recorded, and the block is run again with each fusion in place. Only a fusion that leaves the block's
output the same is made.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from jitgemm.nn.choose import check_model
from jitgemm.nn.fused import FUSED, FusedLayer, FusedMLP, FusedNorm, Slice, Steps, quantised_alike
from jitgemm.nn.linear import PackedLinear
from jitgemm.nn.report import FusionReport, by_reason
from jitgemm.nn.trial import (
    FRONTS,
    MLP,
    Block,
    Call,
    Columns,
    Gated,
    Joined,
    calls_of,
    lists,
    norm_of,
    steps_of,
    untouchable,
)


def fuse_(model: torch.nn.Module) -> FusionReport:
    """Fuses what stands around the packed Linears of a model, in place; after `quantize_` or `load_`, for inference.

    - RMSNorm, the quantiser behind it and the projections that read the norm: their input is quantised once, and
      Linears whose formats and biases are of one kind are one GEMM. Norms that multiply by 1 + weight, as Gemma's, do
      so in fp32.
    - the residual additions before such norms, of layers h = x + attention(norm(x)), h + mlp(norm(h)). The second one
      belongs to the next layer's norm, which runs early for it; of the last layer, of copies until `fuse_` is called
      on them, and wherever anything else may read or write the sum in between, it stays PyTorch's.
    - silu(gate) * up or gelu(gate) * up, gelu as it is or by tanh, and the quantiser of the next Linear's input. Other
      gates stay PyTorch's.

    Results are, bit for bit, those of `quantize_activations` with `rms_norm`, `residual`, `silu_mul` or `gelu_mul`
    and of `gemm_w4a8_nt` on the merged weights. They differ from the model's as it was by roundings that are left out: norm
    and product stay fp32.

    `state_dict()` has the same names and values, but for `blocks` and `meta` of weights whose codes had to be brought
    into the order "any"; it loads into the model fused or not. `load_` and `load_state_dict(assign=True)` need the
    model as it was. `.to`, copies and pickles of the whole model work, of fused modules without their block they do
    not. A fused norm returns projections, so forward hooks see these; its input is the norm's, and while it has hooks
    the residual addition is PyTorch's. Where `fuse_` is interrupted, a block is as it was or fused; called again, it
    fuses the others.

    Args:
        model: holds packed Linears in blocks, elements of a ModuleList such as decoder layers of transformers. A block
            is run as the model's own forward calls it, given `inputs_embeds`, or else with one tensor.

    Returns:
        The names of the modules that were replaced, in the model's order, as a list that says what each does (`fused`)
        and which norms and MLPs stayed as they are and why (`skipped`).

    Raises:
        TypeError: model is no module.
        ValueError: model is a packed Linear itself.
    """
    check_model(model)
    if isinstance(model, PackedLinear):
        raise ValueError(f"model: expected a module that holds packed Linears, got a {type(model).__name__}")
    report = FusionReport()
    with torch.inference_mode(False), torch.no_grad():
        for owner, owner_name, list_name, blocks in lists(model):
            calls = calls_of(owner, blocks)
            for number, block in blocks.items():
                name = ".".join(each for each in (owner_name, list_name, number) if each)
                call = calls[number]
                if any(isinstance(module, FUSED) for module in block.modules()):
                    report.skipped[name] = "is fused already"
                elif isinstance(call, str):
                    report.skipped[name] = call
                else:
                    _fuse_block(name, block, call, report)
            for layer, behind in pairwise(owner.get_submodule(list_name).children()):
                if isinstance(layer, FusedLayer) and isinstance(behind, FusedLayer):
                    layer.fused_next = weakref.ref(behind)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    report.sort(key=lambda name: order[name])
    if not report:
        reasons = "; skipped:\n" + "\n".join(by_reason(report.skipped)) if report.skipped else ""
        warnings.warn(f"fuse_ fused nothing: it finds packed Linears in blocks of a ModuleList{reasons}", stacklevel=2)
    return report


def unfuse_(model: torch.nn.Module) -> list[str]:
    """Puts back what `fuse_` replaced: the same modules over the same values, bit for bit, each with its own tensors.

    Returns:
        The names of the modules put back.

    Raises:
        TypeError: model is no module.
    """
    check_model(model)
    names = [(name, m) for name, m in model.named_modules() if isinstance(m, FUSED)]
    with torch.inference_mode(False), torch.no_grad():
        for kind in (FusedLayer, Slice, FusedMLP, FusedNorm):  # a norm's joint goes last: slices are views of it
            for name, found in names:
                if isinstance(found, kind):
                    module: Any = model.get_submodule(name)
                    _put(model, name, module.original())
    return [name for name, found in names if not isinstance(found, Slice)]


def _put(model: torch.nn.Module, name: str, module: torch.nn.Module, replaced: list[Any] | None = None) -> None:
    """Puts the module there; replaced: takes (parent, child, what was there) first."""
    parent, _, child = name.rpartition(".")
    children = model.get_submodule(parent)._modules
    if replaced is not None:
        replaced.append((children, child, children[child]))
    children[child] = module


# ---- one block -------------------------------------------------------------------------------------------------------


def _fuse_block(name: str, module: torch.nn.Module, call: Call, report: FusionReport) -> None:
    block = Block(module, call)
    try:
        block.look()
    except Exception as error:  # noqa: BLE001 - somebody else's code
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        report.skipped[name] = f"the block does not run by itself: {text}"
        return
    skipped: dict[str, str] = {}
    mlps = list(block.mlps(skipped))
    # All is decided before anything is replaced: the block runs to decide.
    norms: dict[str, tuple[float, bool, list[str]]] = {}
    gated: list[tuple[MLP, int, int]] = []  # with the start and the width in the output of a norm
    alone: list[MLP] = []
    for child, its_call in block.calls.items():
        kind = norm_of(module.get_submodule(child))
        readers, others = block.readers(its_call.output) if kind is not None and its_call.one is not None else ([], [])
        if kind is None or not readers:
            continue
        behind = [mlp for mlp in mlps if mlp.reads is its_call.output and set(mlp.linears) <= set(readers)]
        first = [each for mlp in behind for each in mlp.linears]  # gate before up
        linears = [each for each in readers if each not in first] + first
        reason = kind if isinstance(kind, str) else _stays(block, child, linears, others)
        if isinstance(kind, str) or reason is not None:
            skipped[child] = reason or ""
            continue
        norms[child] = (*kind, linears)
        put, starts, width = _joined(block, child, linears)
        for mlp in behind:
            start = starts[mlp.linears[0]]
            mlps.remove(mlp)
            reason = block.check(put | {mlp.name: Gated((), block.stubs[mlp.down], start, mlp.gate)})
            if reason is None:
                gated.append((mlp, start, width))
            else:
                skipped[mlp.name] = reason
    for mlp in mlps:
        stubs = [block.stubs[each] for each in mlp.linears]
        reason = quantised_alike(_layers(module, mlp.linears))
        reason = reason or block.check({mlp.name: Gated(stubs, block.stubs[mlp.down], 0, mlp.gate)})
        if reason is None:
            alone.append(mlp)
        else:
            skipped[mlp.name] = reason
    steps = next(filter(None, (steps_of(block, child) for child in norms)), None)
    report.skipped.update({f"{name}.{each}": why for each, why in skipped.items()})
    if isinstance(steps, str):
        report.skipped[name] = steps

    replaced: list[Any] = []

    def put_in(child: str, new: torch.nn.Module, joint: Any, linears: Sequence[str], what: str) -> None:
        _put(module, child, new, replaced)
        report.append(f"{name}.{child}")
        report.fused[report[-1]] = what
        for each, part in zip(linears, joint.slices if joint is not None else ()):
            _put(module, each, part, replaced)

    downs = _layers(module, [mlp.down for mlp, *_ in gated] + [mlp.down for mlp in alone])
    try:
        for child, (eps, one_plus, linears) in norms.items():
            norm = module.get_submodule(child)
            fused = FusedNorm(norm, eps, one_plus, _layers(module, linears))
            put_in(child, fused, fused.joint, linears, f"RMSNorm, quantiser and {_gemms(linears, fused.joint)}")
        for mlp, start, width in gated:
            new = FusedMLP(module.get_submodule(mlp.name), _last(mlp.down), start, width, FRONTS[mlp.gate])
            put_in(mlp.name, new, None, (), f"{mlp.gate} * mul, quantiser and {_last(mlp.down)}")
        for mlp in alone:
            layers = _layers(module, mlp.linears)
            width = sum(layer.out_features for layer in layers)
            new = FusedMLP(module.get_submodule(mlp.name), _last(mlp.down), 0, width, FRONTS[mlp.gate], layers)
            what = f"quantiser and {_gemms(mlp.linears, new.joint)}; {mlp.gate} * mul, quantiser and {_last(mlp.down)}"
            put_in(mlp.name, new, new.joint, mlp.linears, what)
        if isinstance(steps, Steps):
            FusedLayer.make(module, steps)
            report.append(name)
            report.fused[name] = f"residual addition in the quantiser of {steps.norm}"
    except BaseException:  # Ctrl-C too: half of a block computes nothing
        if isinstance(module, FusedLayer):
            module.original()
        vars(module).pop("fused_steps", None)
        for children, child, old in reversed(replaced):
            children[child] = old
        for down in downs:
            vars(down).pop("fronts", None)
        raise


def _stays(block: Block, norm: str, linears: Sequence[str], others: Sequence[str]) -> str | None:
    """Why a norm is not fused with the Linears that read it, or None."""
    layers = _layers(block.module, linears)
    reason = untouchable(block, norm, *linears) or quantised_alike(layers)
    if reason is None and sum(layer.out_features for layer in layers) == layers[0].in_features:
        reason = "its Linears give as many columns as they take: called by itself, one could not tell its input"
    if reason is None and others:
        kinds = [f"{each} ({type(block.module.get_submodule(each)).__name__})" for each in others]
        reason = f"{', '.join(kinds)} reads it too"
    return reason or block.check(_joined(block, norm, linears)[0])


def _joined(block: Block, norm: str, linears: Sequence[str]) -> tuple[dict[str, torch.nn.Module], dict[str, int], int]:
    """Stubs of a fused norm and its slices, the first column of each Linear, and their number."""
    put: dict[str, torch.nn.Module] = {
        norm: Joined(block.module.get_submodule(norm), [block.stubs[each] for each in linears])
    }
    starts, width = {}, 0
    for each in linears:
        starts[each] = width
        width += block.stubs[each].out_features
        put[each] = Columns(starts[each], width)
    return put, starts, width


def _layers(module: torch.nn.Module, names: Iterable[str]) -> list[Any]:
    """The packed Linears of these names."""
    return [module.get_submodule(each) for each in names]


def _gemms(linears: Sequence[str], joint: Any) -> str:
    """The GEMMs of a `Joint`: "q_proj + k_proj, v_proj"."""
    names = iter(map(_last, linears))
    return ", ".join(" + ".join(next(names) for _ in run.slices) for run in joint.runs)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
