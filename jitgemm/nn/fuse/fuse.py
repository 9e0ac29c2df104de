"""`fuse_`: norms, quantisers and projections of a model's blocks in as few kernels as the calls allow, and back.

A block's attention calls q_proj, k_proj and v_proj one by one on what its norm returned. Here the norm runs them all: a
`FusedNorm` takes the norm's input, quantises it once and returns the outputs of all projections side by side, and each
projection becomes a view of its columns (`ProjectionView`). No forward is patched and nothing is kept between calls, so
torch.compile, CUDA graphs, deepcopy and pickle see ordinary modules. An MLP's product is no module, so a `FusedMLP` with
the same children replaces the MLP.

What may be fused is declared by the names of a block's modules: `NORMS` and `MLPS`. Names prove nothing, so each fusion
is checked once, before it is made (`check.py`): the norm's formula, the MLP's formula, and that nothing else reads the
norm, which would get the wrong tensor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from jitgemm.nn.fuse.check import Call, Unclear, calls_of, check_one_input, mlp_gate, norm_formula, run
from jitgemm.nn.fuse.fused import FUSED, FusedMLP, FusedNorm, ProjectionView
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

    `state_dict()` has the same names and values, except `blocks` and `meta` of weights whose codes had to be brought
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
        for owner, blocks in block_lists(model):
            for name, call in calls_of(owner, blocks).items():
                _fuse_block(name, blocks[name], call, report)
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


def block_lists(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, dict[str, torch.nn.Module]]]:
    """The outermost ModuleLists whose elements hold packed Linears: owner, and blocks by name."""
    inside: list[str] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.ModuleList) or name.startswith(tuple(inside)):
            continue
        prefix = f"{name}." if name else ""
        blocks = {
            prefix + number: block
            for number, block in module.named_children()
            if not isinstance(block, PackedLinear) and any(isinstance(m, PackedLinear) for m in block.modules())
        }
        if blocks:
            inside.append(prefix)
            yield model.get_submodule(name.rpartition(".")[0]), blocks


# ---- one block -------------------------------------------------------------------------------------------------------


class _Fusion(NamedTuple):
    """A fusion that passed its check.

    Attributes:
        linears: names of the Linears that its quantised input serves.
        make: gives the module, of these Linears.
    """

    linears: list[str]
    make: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Block:
    """A block while it is decided what of it is fused.

    Attributes:
        called: the packed layers that a call of the block calls.
        skipped: {name: why it stays as it is}.
    """

    module: torch.nn.Module
    call: Call
    modules: Mapping[str, torch.nn.Module]
    called: set[str]
    skipped: dict[str, str] = field(default_factory=dict)

    def mlps(self) -> dict[str, _Fusion]:
        """MLPs whose product is fused with the quantiser behind it."""
        found = {}
        for name, mlp in self.modules.items():
            for *gates, last in MLPS:
                linears, down = [f"{name}.{each}" for each in gates], f"{name}.{last}"
                packed = all(isinstance(mlp._modules.get(each), PackedLinear) for each in (*gates, last))
                if not name or not packed or down not in self.called:
                    continue
                with self.skipping(name):
                    gate = mlp_gate(mlp, gates, last)
                    if mlp._parameters or mlp._buffers:
                        raise Unclear("it has tensors of its own")
                    self.check_replaceable(name, down, *linears)
                    check_one_input(self.layers(linears))
                    run(self.module, self.call, [name])
                    found[name] = _Fusion(linears, partial(FusedMLP, mlp, last, gate))
        return found

    def norms(self, mlps: Mapping[str, _Fusion]) -> dict[str, _Fusion]:
        """Norms that are fused with the Linears that read them."""
        found: dict[str, _Fusion] = {}
        for recipe in NORMS:
            norm = next((each for each in recipe.norms if each in self.modules), None)
            part = next((each for each in recipe.part if each in self.modules), None)
            readers = [name for each in recipe.projections if (name := f"{part}.{each}") in self.modules]
            kinds = {name: type(self.modules[name]) for name in readers}
            others = [f"{name} ({kind.__name__})" for name, kind in kinds.items() if not issubclass(kind, PackedLinear)]
            linears = [name for name in readers if name in self.called and issubclass(kinds[name], PackedLinear)]
            if norm is None or norm in found or not linears:
                continue
            with self.skipping(norm):
                layers, formula = self.layers(linears), norm_formula(self.modules[norm])
                self.check_replaceable(norm, *linears)
                check_one_input(layers)
                width = sum(layer.out_features for layer in layers)
                if width == layers[0].in_features:
                    raise Unclear(
                        "its Linears give as many columns as they take: nobody would notice a call of one alone"
                    )
                if others:
                    raise Unclear(f"{', '.join(others)} reads it too")
                # An MLP that reads the norm is given all that it gives.
                whole = [mlp for mlp, fusion in mlps.items() if fusion.linears == linears]
                run(self.module, self.call, whole or linears, norm, width)
                found[norm] = _Fusion(linears, partial(FusedNorm, self.modules[norm], *formula))
        return found

    def layers(self, names: Iterable[str]) -> list[Any]:
        return [self.module.get_submodule(each) for each in names]

    @contextmanager
    def skipping(self, name: str) -> Iterator[None]:
        """Notes why a module is skipped where its check fails."""
        try:
            yield
        except Unclear as reason:
            self.skipped[name] = str(reason)

    def check_replaceable(self, *names: str) -> None:
        """Raises Unclear for a module that cannot be replaced."""
        places = Counter(module for _, module in self.module.named_modules(remove_duplicate=False))
        for name, module in zip(names, self.layers(names)):
            if places[module] > 1:
                raise Unclear(f"{name} stands at several places")
            if any(value for key, value in vars(module).items() if key.endswith("_hooks")):
                raise Unclear(f"{name} has hooks, which would see other tensors")
            if "forward" in vars(module):
                raise Unclear(f"the forward of {name} was replaced")
            if isinstance(module, PackedLinear) and module.split is not None and not module.split.plain:
                raise Unclear(f"{name} changes the layout of its input or output")


def _fuse_block(name: str, module: torch.nn.Module, call: Call | str, report: FusionReport) -> None:
    if any(isinstance(each, FUSED) for each in module.modules()):
        call = "is fused already"
    if isinstance(call, str):
        report.skipped[name] = call
        return
    try:
        block = _Block(module, call, dict(module.named_modules()), run(module, call))
    except Unclear as reason:
        report.skipped[name] = str(reason)
        return
    # All is decided before anything is replaced: the block runs to decide.
    mlps = block.mlps()
    norms = block.norms(mlps)
    if not norms and not mlps and not block.skipped:
        report.skipped[name] = "no recipe fits: no norm of a known name stands ahead of packed Linears of known names"
    report.skipped.update({f"{name}.{child}": why for child, why in block.skipped.items() if child not in norms})

    new: dict[str, Any] = {}
    of_norms = [norm.linears for norm in norms.values()]
    for child, (linears, make) in (*norms.items(), *mlps.items()):
        own = [] if child in mlps and linears in of_norms else linears
        new[child] = fused = make(block.layers(own))
        new |= zip(own, fused.joint.slices if own else ())
        report.append(f"{name}.{child}")
        names = (each.rpartition(".")[2] for each in own)
        gemms = ", ".join(" + ".join(next(names) for _ in run.slices) for run in (fused.joint.runs if own else ()))
        if child in norms:
            what = f"RMSNorm, quantiser and {gemms}"
        else:
            product = f"{fused.prologue.gate.kind} * mul, quantiser and {fused.down_name}"
            what = f"quantiser and {gemms}; {product}" if own else product
        report.fused[report[-1]] = what
    # MLPs first: views go into what replaces them.
    old = {child: module.get_submodule(child) for child in sorted(new, key=lambda child: child not in mlps)}
    try:
        for child in old:
            put_module(module, child, new[child])
    except BaseException:  # Ctrl-C too: half of a block computes nothing
        for child in reversed(old):
            put_module(module, child, old[child])
        raise
    for child in mlps:
        new[child].take_over()
