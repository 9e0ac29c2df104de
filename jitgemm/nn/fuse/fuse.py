"""`fuse_`: norms, quantisers and projections of a model's blocks in as few kernels as the calls allow, and back.

How forward changes, and why so. A block's attention calls q_proj, k_proj and v_proj one by one on what its norm
returned. Here the norm runs them all: a `FusedNorm` takes the norm's input, quantises it once and returns the outputs
of all projections side by side, and each projection becomes a view of its columns (`ProjectionView`). So plain tensors go from
module to module; no forward is patched, nothing is kept between calls, and torch.compile, CUDA graphs, deepcopy and
pickle see ordinary modules. What else reads the norm's output would get the wrong tensor, so such a norm stays as it
is. An MLP's forward cannot stay, as its product is no module: a `FusedMLP` with the same children replaces it.

What may be fused is declared by the names of a block's modules: `NORMS` and `MLPS`. Names prove nothing, so each
fusion is checked once, before it is made: the norm's formula, the MLP's formula, and, by a run of the block with stubs
for its packed layers (`trial.py`), that nothing else reads the norm.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.nn.quantize.replaceable import check_model
from jitgemm.nn.quantize.swap import put_module
from jitgemm.nn.fuse.fused import FUSED, FusedMLP, FusedNorm, ProjectionView, quantised_alike
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.report import FusionReport, by_reason
from jitgemm.nn.fuse.trial import Call, calls_of, gate_of, lists, norm_of, run, said


class Recipe(NamedTuple):
    """A norm whose output projections read, by names.

    Attributes:
        norms: within the block; the first that it has.
        part: the module that holds the projections; the first that the block has.
        projections: children of the part that read the norm, where there are such; they must stand in this order.
    """

    norms: tuple[str, ...]
    part: tuple[str, ...]
    projections: tuple[str, ...]


NORMS = (
    Recipe(
        ("input_layernorm", "operator_norm", "norm1", "norm"),
        ("self_attn", "linear_attn", "attention", "attn", "conv", "mixer"),
        (
            *("q_proj", "k_proj", "v_proj", "qkv_proj", "qkv", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "g_proj"),
            *("in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        ),
    ),
    Recipe(("self_attn.q_a_layernorm",), ("self_attn",), ("q_b_proj",)),
    Recipe(("self_attn.kv_a_layernorm",), ("self_attn",), ("kv_b_proj",)),
    Recipe(
        # Gemma's post_attention_layernorm is none of these: its pre_feedforward_layernorm comes first.
        ("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "ffn_norm", "norm2", "norm"),
        ("mlp", "feed_forward"),
        ("gate_proj", "up_proj", "gate_up_proj", "gate", "up", "w1", "w3"),
    ),
)

MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("gate", "up", "down"),
    ("w1", "w3", "w2"),
)
"""Children of modules that compute down(act(gate(x)) * up(x)), down last: MLPs and shared experts."""


def fuse_(model: torch.nn.Module) -> FusionReport:
    """Fuses what stands around the packed Linears of a model, in place; after `quantize_` or `load_`, for inference.

    - RMSNorm, the quantiser behind it and the projections that read the norm: their input is quantised once, and
      Linears whose formats and biases are of one kind are one GEMM. Norms that multiply by 1 + weight, as Gemma's, do
      so in fp32.
    - silu(gate) * up or gelu(gate) * up, gelu as it is or by tanh, and the quantiser of the next Linear's input. Other
      gates stay PyTorch's, and so do residual additions.

    Results are, bit for bit, those of `quantize_activations` with `rms_norm`, `silu_mul` or `gelu_mul` and of
    `gemm_w4a8_nt` on the merged weights. They differ from the model's as it was by roundings that are left out: norm
    and product stay fp32.

    `state_dict()` has the same names and values, but for `blocks` and `meta` of weights whose codes had to be brought
    into the order "any"; it loads into the model fused or not. `load_` and `load_state_dict(assign=True)` need the
    model as it was. `.to`, copies and pickles of the whole model work, of fused modules without their block they do
    not. A fused norm returns projections, so forward hooks see these; its input is the norm's. Where `fuse_` is
    interrupted, a block is as it was or fused; called again, it fuses the others.

    Args:
        model: holds packed Linears in blocks, elements of a ModuleList such as decoder layers of transformers. A block
            whose norms, projections and MLPs have the names of transformers' models (`NORMS`, `MLPS`) is run once, as
            the model's own forward calls it, given `inputs_embeds`, or else with one tensor.

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
        for kind in (ProjectionView, FusedMLP, FusedNorm):  # a norm's merged weights go last: views are of them
            for name, found in names:
                if isinstance(found, kind):
                    module: Any = model.get_submodule(name)
                    put_module(model, name, module.original())
    return [name for name, found in names if not isinstance(found, ProjectionView)]


# ---- one block -------------------------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    eps: float
    one_plus: bool
    linears: list[str]


class _MLP(NamedTuple):
    linears: list[str]
    down: str
    gate: Gate


def _fuse_block(name: str, block: torch.nn.Module, call: Call, report: FusionReport) -> None:
    try:
        called = run(block, call)
    except Exception as error:  # noqa: BLE001 - somebody else's code
        report.skipped[name] = f"the block does not run by itself: {said(error)}"
        return
    # All is decided before anything is replaced: the block runs to decide.
    skipped: dict[str, str] = {}
    mlps = _mlps(block, call, called, skipped)
    norms = _norms(block, call, called, mlps, skipped)
    joined = [norm.linears for norm in norms.values()]
    for child, mlp in list(mlps.items()):
        reason = None if mlp.linears in joined else quantised_alike(_layers(block, mlp.linears))
        if reason is not None:
            skipped[child] = reason
            del mlps[child]
    if not norms and not mlps and not skipped:
        skipped[""] = "no recipe fits: no norm of a known name stands ahead of packed Linears of known names"
    report.skipped.update({f"{name}.{each}" if each else name: why for each, why in skipped.items()})

    downs = _layers(block, [mlp.down for mlp in mlps.values()])
    replaced: dict[str, torch.nn.Module] = {}

    def put(child: str, fused: Any, linears: Sequence[str], what: str) -> None:
        for each, new in ((child, fused), *zip(linears, fused.joint.slices if linears else ())):
            replaced[each] = block.get_submodule(each)
            put_module(block, each, new)
        report.append(f"{name}.{child}")
        report.fused[report[-1]] = what

    try:
        for child, (eps, one_plus, linears) in norms.items():
            norm = FusedNorm(block.get_submodule(child), eps, one_plus, _layers(block, linears))
            put(child, norm, linears, f"RMSNorm, quantiser and {_gemms(linears, norm.joint)}")
        for child, (linears, down, gate) in mlps.items():
            own = [] if linears in joined else linears
            new = FusedMLP(block.get_submodule(child), _last(down), gate, _layers(block, own))
            what = f"quantiser and {_gemms(own, new.joint)}; " if own else ""
            put(child, new, own, f"{what}{gate.kind} * mul, quantiser and {_last(down)}")
    except BaseException:  # Ctrl-C too: half of a block computes nothing
        for child, old in reversed(replaced.items()):
            put_module(block, child, old)
        for layer in downs:
            vars(layer).pop("fronts", None)
        raise


def _mlps(block: torch.nn.Module, call: Call, called: set[str], skipped: dict[str, str]) -> dict[str, _MLP]:
    """MLPs whose product can be fused with the quantiser behind it."""
    found = {}
    for child, module in block.named_modules():
        for *gates, last in MLPS:
            children = [module._modules.get(each) for each in (*gates, last)]
            linears, down = [f"{child}.{each}" for each in gates], f"{child}.{last}"
            if not child or down not in called or not all(isinstance(each, PackedLinear) for each in children):
                continue
            reason, gate = None, gate_of(module, gates, last)
            if gate is None:
                reason = "what its last Linear reads is neither silu(gate) * up nor gelu(gate) * up"
            elif module._parameters or module._buffers:
                reason = "it has tensors of its own"
            else:
                width = block.get_submodule(down).out_features
                reason = _untouchable(block, child, down, *linears) or _runs(block, call, mlps={child: width})
            if reason is not None:
                skipped[child] = reason
            elif gate is not None:
                found[child] = _MLP(linears, down, gate)
    return found


def _norms(
    block: torch.nn.Module, call: Call, called: set[str], mlps: Mapping[str, _MLP], skipped: dict[str, str]
) -> dict[str, _Norm]:
    """Norms that can be fused with the Linears that read them."""
    found: dict[str, _Norm] = {}
    modules = dict(block.named_modules())
    widths = {child: modules[mlp.down].out_features for child, mlp in mlps.items()}
    for recipe in NORMS:
        norm = next((each for each in recipe.norms if each in modules), None)
        part = next((each for each in recipe.part if each in modules), None)
        readers = [f"{part}.{each}" for each in recipe.projections if f"{part}.{each}" in modules]
        linears = [each for each in readers if each in called and isinstance(modules[each], PackedLinear)]
        if norm is None or norm in found or not linears:
            continue
        layers = _layers(block, linears)
        others = [each for each in readers if not isinstance(modules[each], PackedLinear)]
        width = sum(layer.out_features for layer in layers)
        whole = [child for child, mlp in mlps.items() if mlp.linears == linears]  # given all that the norm gives
        kind = norm_of(modules[norm])
        reason = kind if isinstance(kind, str) else _untouchable(block, norm, *linears) or quantised_alike(layers)
        if reason is None and width == layers[0].in_features:
            reason = "its Linears give as many columns as they take: called by itself, one could not tell its input"
        if reason is None and others:
            reason = f"{', '.join(f'{each} ({type(modules[each]).__name__})' for each in others)} reads it too"
        reason = reason or _runs(block, call, widths, norm, whole or linears, width)
        if reason is not None:
            skipped[norm] = reason
        elif not isinstance(kind, str):
            found[norm] = _Norm(*kind, linears)
    return found


def _runs(block: torch.nn.Module, call: Call, *stubs: Any, **named: Any) -> str | None:
    """Why the block does not run with these stubs, or None."""
    try:
        run(block, call, *stubs, **named)
    except Exception as error:  # noqa: BLE001 - somebody else's code
        return f"with it fused the block fails: {said(error)}"
    return None


def _untouchable(block: torch.nn.Module, *names: str) -> str | None:
    """Why these modules cannot be replaced, or None."""
    places = Counter(module for _, module in block.named_modules(remove_duplicate=False))
    for name in names:
        module = block.get_submodule(name)
        if places[module] > 1:
            return f"{name} stands at several places"
        if any(value for key, value in vars(module).items() if key.endswith("_hooks")):
            return f"{name} has hooks, which would see other tensors"
        if "forward" in vars(module):
            return f"the forward of {name} was replaced"
        split = getattr(module, "split", None) if isinstance(module, PackedLinear) else None
        if split is not None and not split.plain:
            return f"{name} changes the layout of its input or output"
    return None


def _layers(module: torch.nn.Module, names: Iterable[str]) -> list[Any]:
    """The packed Linears of these names."""
    return [module.get_submodule(each) for each in names]


def _gemms(linears: Sequence[str], joint: Any) -> str:
    """The GEMMs of a `FusedProjections`: "q_proj + k_proj, v_proj"."""
    names = iter(map(_last, linears))
    return ", ".join(" + ".join(next(names) for _ in gemm.slices) for gemm in joint.runs)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
