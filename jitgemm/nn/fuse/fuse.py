"""`fuse_`: norms, quantisers and projections of a model's blocks in as few kernels as the calls allow, and back.

How forward changes, and why so. A block's attention calls q_proj, k_proj and v_proj one by one on what its norm
returned. Here the norm runs them all: a `FusedNorm` takes the norm's input, quantises it once and returns the outputs
of all projections side by side, and each projection becomes a view of its columns (`ProjectionView`). So plain tensors go from
module to module; no forward is patched, nothing is kept between calls, and torch.compile, CUDA graphs, deepcopy and
pickle see ordinary modules. What else reads the norm's output would get the wrong tensor, so such a norm stays as it
is. An MLP's forward cannot stay, as its product is no module: a `FusedMLP` with the same children replaces it.

What may be fused is declared by the names of a block's modules: `NORMS` and `MLPS`. Names prove nothing, so each
fusion is checked once, before it is made: the norm's formula, the MLP's formula, and, by a run of the block with stubs
for its packed layers (`check.py`), that nothing else reads the norm.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.nn.fuse.check import Call, calls_of, gate_of, norm_of, run
from jitgemm.nn.fuse.fused import FUSED, FusedMLP, FusedNorm, ProjectionView, quantised_alike
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.quantize.replaceable import check_model
from jitgemm.nn.quantize.swap import put_module
from jitgemm.nn.report import FusionReport, by_reason


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
        for owner, name, blocks in block_lists(model):
            for number, call in calls_of(owner, blocks).items():
                _fuse_block(f"{name}.{number}", blocks[number], call, report)
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
    names = [(name, module) for name, module in model.named_modules() if isinstance(module, FUSED)]
    with torch.inference_mode(False), torch.no_grad():
        for kind in (ProjectionView, FusedMLP, FusedNorm):  # a norm's merged weights go last: views are of them
            for name, found in names:
                if isinstance(found, kind):
                    module: Any = model.get_submodule(name)
                    put_module(model, name, module.original())
    return [name for name, found in names if not isinstance(found, ProjectionView)]


def block_lists(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, dict[str, torch.nn.Module]]]:
    """The outermost ModuleLists whose elements hold packed Linears: owner, the list's name, blocks by number."""
    inside: list[str] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.ModuleList) or name.startswith(tuple(inside)):
            continue
        blocks = {
            number: block
            for number, block in module.named_children()
            if not isinstance(block, PackedLinear) and any(isinstance(m, PackedLinear) for m in block.modules())
        }
        if blocks:
            inside.append(f"{name}.")
            yield model.get_submodule(name.rpartition(".")[0]), name, blocks


# ---- one block -------------------------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    eps: float
    one_plus: bool
    linears: list[str]


class _MLP(NamedTuple):
    linears: list[str]
    down: str
    gate: Gate


def _fuse_block(name: str, module: torch.nn.Module, call: Call | str, report: FusionReport) -> None:
    if any(isinstance(each, FUSED) for each in module.modules()):
        call = "is fused already"
    if isinstance(call, str):
        report.skipped[name] = call
        return
    try:
        block = _Block(module, call, dict(module.named_modules()), run(module, call))
    except Exception as error:  # noqa: BLE001 - somebody else's code
        report.skipped[name] = f"the block does not run by itself: {_first_line(error)}"
        return
    # All is decided before anything is replaced: the block runs to decide.
    mlps = _mlps(block)
    norms = _norms(block, mlps)
    joined = [norm.linears for norm in norms.values() if isinstance(norm, _Norm)]
    for child, mlp in mlps.items():
        if isinstance(mlp, _MLP) and mlp.linears not in joined:
            mlps[child] = quantised_alike(block.layers(mlp.linears)) or mlp
    if not norms and not mlps:
        report.skipped[name] = "no recipe fits: no norm of a known name stands ahead of packed Linears of known names"

    new: dict[str, Any] = {}
    for child, found in (*norms.items(), *mlps.items()):
        if isinstance(found, str):
            report.skipped[f"{name}.{child}"] = found
            continue
        own, old = found.linears, block.modules[child]
        fused: Any
        if isinstance(found, _Norm):
            fused = FusedNorm(old, found.eps, found.one_plus, block.layers(own))
            what = f"RMSNorm, quantiser and {_gemms(own, fused.joint)}"
        else:
            own, down = [] if own in joined else own, found.down.rpartition(".")[2]
            fused = FusedMLP(old, down, found.gate, block.layers(own))
            what = f"quantiser and {_gemms(own, fused.joint)}; " if own else ""
            what += f"{found.gate.kind} * mul, quantiser and {down}"
        report.append(f"{name}.{child}")
        report.fused[report[-1]] = what
        new |= {child: fused} | dict(zip(own, fused.joint.slices if own else ()))
    whole = [each for each in new.values() if isinstance(each, FusedMLP)]
    # MLPs first: views go into what replaces them.
    before = {child: module.get_submodule(child) for child in sorted(new, key=lambda child: new[child] not in whole)}
    try:
        for child in before:
            put_module(module, child, new[child])
    except BaseException:  # Ctrl-C too: half of a block computes nothing
        for child in reversed(before):
            put_module(module, child, before[child])
        raise
    for each in whole:
        each.take_over()


@dataclass(frozen=True)
class _Block:
    """A block while it is decided what of it is fused.

    Attributes:
        called: the packed layers that a call of the block calls.
    """

    module: torch.nn.Module
    call: Call
    modules: Mapping[str, torch.nn.Module]
    called: set[str]

    def layers(self, names: Iterable[str]) -> list[Any]:
        return [self.module.get_submodule(each) for each in names]

    def why_kept(self, *names: str) -> str | None:
        """Why these modules cannot be replaced, or None."""
        places = Counter(module for _, module in self.module.named_modules(remove_duplicate=False))
        for name, module in zip(names, self.layers(names)):
            if places[module] > 1:
                return f"{name} stands at several places"
            if any(value for key, value in vars(module).items() if key.endswith("_hooks")):
                return f"{name} has hooks, which would see other tensors"
            if "forward" in vars(module):
                return f"the forward of {name} was replaced"
            if isinstance(module, PackedLinear) and module.split is not None and not module.split.plain:
                return f"{name} changes the layout of its input or output"
        return None

    def why_failing(self, readers: Mapping[str, int], norm: str = "", width: int = 0) -> str | None:
        """Why the block does not run with stand-ins for these, or None; arguments are those of `run`."""
        try:
            run(self.module, self.call, readers, norm, width)
        except Exception as error:  # noqa: BLE001 - somebody else's code
            return f"with it fused the block fails: {_first_line(error)}"
        return None


def _mlps(block: _Block) -> dict[str, _MLP | str]:
    """MLPs whose product can be fused with the quantiser behind it, or why not."""
    found: dict[str, _MLP | str] = {}
    for child, mlp in block.modules.items():
        for *gates, last in MLPS:
            linears, down = [f"{child}.{each}" for each in gates], f"{child}.{last}"
            children = [mlp._modules.get(each) for each in (*gates, last)]
            if not child or down not in block.called or not all(isinstance(each, PackedLinear) for each in children):
                continue
            gate = gate_of(mlp, gates, last)
            if gate is None:
                found[child] = "what its last Linear reads is neither silu(gate) * up nor gelu(gate) * up"
            elif mlp._parameters or mlp._buffers:
                found[child] = "it has tensors of its own"
            else:
                reason = block.why_kept(child, down, *linears)
                reason = reason or block.why_failing({child: block.layers([down])[0].out_features})
                found[child] = reason or _MLP(linears, down, gate)
    return found


def _norms(block: _Block, mlps: Mapping[str, _MLP | str]) -> dict[str, _Norm | str]:
    """Norms that can be fused with the Linears that read them, or why not."""
    found: dict[str, _Norm | str] = {}
    for recipe in NORMS:
        norm = next((each for each in recipe.norms if each in block.modules), None)
        part = next((each for each in recipe.part if each in block.modules), None)
        readers = [name for each in recipe.projections if (name := f"{part}.{each}") in block.modules]
        others = {name: kind for name in readers if not isinstance(kind := block.modules[name], PackedLinear)}
        linears = [name for name in readers if name in block.called and name not in others]
        if norm is None or isinstance(found.get(norm), _Norm) or not linears:
            continue
        layers, formula = block.layers(linears), norm_of(block.modules[norm])
        if formula is None:
            found[norm] = f"{type(block.modules[norm]).__name__} is no RMSNorm with one weight and a fixed eps"
            continue
        widths = {name: layer.out_features for name, layer in zip(linears, layers)}
        width = sum(widths.values())
        reason = block.why_kept(norm, *linears) or quantised_alike(layers)
        if reason is None and width == layers[0].in_features:
            reason = "its Linears give as many columns as they take: called by itself, one could not tell its input"
        if reason is None and others:
            reason = f"{', '.join(f'{name} ({type(each).__name__})' for name, each in others.items())} reads it too"
        for child, mlp in mlps.items():
            if isinstance(mlp, _MLP) and mlp.linears == linears:  # it is given all that the norm gives
                widths = {child: block.layers([mlp.down])[0].out_features}
        found[norm] = reason or block.why_failing(widths, norm, width) or _Norm(*formula, linears)
    return found


def _first_line(error: Exception) -> str:
    """An exception's first line, or its type."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _gemms(linears: Sequence[str], joint: Any) -> str:
    """The GEMMs of these Linears: "q_proj + k_proj, v_proj"."""
    names = (each.rpartition(".")[2] for each in linears)
    return ", ".join(" + ".join(next(names) for _ in run.slices) for run in joint.runs)
