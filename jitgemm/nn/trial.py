"""What a block of a model computes around its packed Linears, found by running it on a few tokens with stubs for them.

A stub mixes the columns of its input. Who reads which tensor is recorded; `Block.check` runs the block again with
modules replaced and compares what comes out. The model itself is not touched: a skeleton of its modules runs, over its
tensors.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jitgemm.dtypes import REAL_TYPES
from jitgemm.nn.experts import PackedExperts
from jitgemm.nn.fused import Steps
from jitgemm.nn.linear import PackedLinear
from jitgemm.tensors import TYPE_NAMES

_SCALES = (0.5, 3.0, 12.0)
"""RMS of what a stub gives for the tokens: gates differ in small values, limits in large ones."""
_EPS = ("variance_epsilon", "eps", "epsilon")
_CLOSE = 1e-2
"""Relative error below which two results are the same: a product may be rounded in another order."""


# ---- blocks, and what calls them -------------------------------------------------------------------------------------


@dataclass
class Call:
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    output: Any

    @property
    def one(self) -> torch.Tensor | None:
        """The tensor that is all the call was given, or None."""
        alone = len(self.inputs) == 1 and not self.named and isinstance(self.inputs[0], torch.Tensor)
        return self.inputs[0] if alone else None

    def given(self, tensor: torch.Tensor) -> bool:
        return any(each is tensor for each in (*self.inputs, *self.named.values()))


def lists(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str, dict[str, torch.nn.Module]]]:
    """The outermost ModuleLists whose elements hold packed Linears: owner, its name, the list's, blocks by number."""
    inside: list[str] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.ModuleList) or any(name.startswith(each) for each in inside):
            continue
        blocks = {
            number: block
            for number, block in module.named_children()
            if not isinstance(block, PackedLinear) and any(isinstance(m, PackedLinear) for m in block.modules())
        }
        if blocks:
            inside.append(f"{name}.")
            parent, _, child = name.rpartition(".")
            yield model.get_submodule(parent), parent, child, blocks


def calls_of(owner: torch.nn.Module, blocks: dict[str, torch.nn.Module]) -> dict[str, Call | str]:
    """For each block a call with random tokens, or why there is none.

    As the owner calls it in a forward that takes `inputs_embeds`, else with one tensor.
    """
    found: dict[str, Call | str] = {}
    recorders = {number: _Recorder(block) for number, block in blocks.items()}
    put: dict[torch.nn.Module, torch.nn.Module] = {block: recorders[number] for number, block in blocks.items()}
    for module in owner.modules():
        if isinstance(module, (PackedLinear, PackedExperts)):
            put[module] = Mix(module)
    try:
        _skeleton(owner, put)(inputs_embeds=_tokens(next(iter(blocks.values()))), use_cache=False)
    except Exception:  # noqa: BLE001 - somebody else's code, and often no such argument
        pass
    for number, block in blocks.items():
        try:
            x = _tokens(block)
        except _Unclear as reason:
            found[number] = f"a block with {reason}"
            continue
        call = recorders[number].call
        inputs, named = ((), {}) if call is None else (call.inputs[1:], call.named)
        if call is not None and not call.inputs:
            inputs, named = (), named | {"hidden_states": x}
        else:
            inputs = (x, *inputs)
        found[number] = Call(_moved(inputs, x.device), _moved(named, x.device), None)
    return found


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors in tuples and dicts on the device: blocks may stand on others than the model's first."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return tuple(_moved(each, device) for each in value) if type(value) is tuple else value


def _tokens(block: torch.nn.Module) -> torch.Tensor:
    """Random tokens [1, 3, hidden] in type and width of the outermost norm that a Linear can read, on its device."""
    linears = [m for m in block.modules() if isinstance(m, PackedLinear)]
    widths = {linear.in_features for linear in linears}
    weights = [(name.count("."), m._parameters.get("weight")) for name, m in block.named_modules()]
    norms = [(depth, w) for depth, w in weights if w is not None and w.dim() == 1 and w.shape[0] in widths]
    norm = min(norms, key=lambda each: each[0], default=(0, None))[1]
    if norm is None or TYPE_NAMES.get(norm.dtype) not in REAL_TYPES:
        raise _Unclear("no norm as wide as the input of a Linear")
    if norm.is_meta or any(linear.blocks.is_meta for linear in linears):
        raise _Unclear("tensors without data")
    x = torch.randn(1, len(_SCALES), norm.shape[0], generator=torch.Generator().manual_seed(1), device="cpu")
    return x.to(norm.device, norm.dtype)


class _Unclear(Exception):
    """A block, or a fusion, that is better left alone, and why."""


# ---- stubs -----------------------------------------------------------------------------------------------------------


class Mix(torch.nn.Module):
    """Stands for a Linear: columns of x in another order, by the Linear's name; for experts x itself."""

    def __init__(self, layer: torch.nn.Module, seed: int = 0):
        super().__init__()
        self.layer, self.seed = (layer,), seed
        if isinstance(layer, PackedLinear):
            self.in_features, self.out_features = layer.in_features, layer.out_features
            self.weight, self.bias = layer.weight, None

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        layer = self.layer[0]
        if not isinstance(layer, PackedLinear):
            return x
        columns = torch.arange(layer.out_features, device=x.device)
        turn = (columns * (2 * self.seed + 1) + 7 * self.seed + columns // layer.in_features) % layer.in_features
        rms = x.float().square().mean(-1, keepdim=True).clamp(min=1e-30).sqrt()
        scales = torch.tensor(_SCALES, device=x.device)[torch.arange(x.shape[-2], device=x.device) % len(_SCALES), None]
        return (x.float() / rms * scales).to(x.dtype)[..., turn]


class _StandIn(torch.nn.Module):
    """Has the attributes of the module that it stands for, and notes its call."""

    call: Call | None = None

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = (module,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module[0], name)


class _Recorder(_StandIn):
    """Stands for a block: returns the hidden states."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.call = Call(inputs, named, None)
        return inputs[0] if inputs else named["hidden_states"]


class _Probe(_StandIn):
    """Stands for a module: returns random values, shaped as the output was."""

    def __init__(self, module: torch.nn.Module, output: Any, seed: int):
        super().__init__(module)
        first, *rest = output if isinstance(output, tuple) else (output,)
        draw = torch.Generator().manual_seed(seed)
        self.first = torch.randn(first.shape, generator=draw, device="cpu").to(first.device, first.dtype)
        self.whole = (self.first, *rest) if isinstance(output, tuple) else self.first

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.call = Call(inputs, named, None)
        return self.whole


class Joined(torch.nn.Module):
    """Stands for a `FusedNorm`: the norm, then all stubs that read it."""

    def __init__(self, norm: torch.nn.Module, stubs: Sequence[Mix]):
        super().__init__()
        self.parts = norm, stubs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, stubs = self.parts
        y = norm.forward(x)
        return torch.cat([stub(y) for stub in stubs], -1)


class Columns(torch.nn.Module):
    """Stands for a `Slice`."""

    def __init__(self, start: int, end: int):
        super().__init__()
        self.columns = slice(start, end)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.columns]


class Gated(torch.nn.Module):
    """Stands for a `FusedMLP`: gate and up as columns of x, or of what the stubs make of it."""

    def __init__(self, stubs: Sequence[Mix], down: Mix, start: int, gate: str):
        super().__init__()
        self.parts = stubs, down, start, gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stubs, down, start, gate = self.parts
        y = torch.cat([stub(x) for stub in stubs], -1) if stubs else x[..., start : start + 2 * down.in_features]
        return down(_gated(gate, *y.chunk(2, -1)))


FRONTS: dict[str, dict[str, Any]] = {
    "silu": {"silu_mul": True},
    "gelu_tanh": {"gelu_mul": "tanh"},
    "gelu": {"gelu_mul": "none"},
}
"""Gates by name, and what `quantize_activations` calls them."""


def _gated(kind: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    functional = torch.nn.functional
    if kind == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate=FRONTS[kind]["gelu_mul"]) * up


def _skeleton(
    module: torch.nn.Module,
    put: dict[torch.nn.Module, torch.nn.Module],
    calls: dict[torch.nn.Module, list[Call]] | None = None,
) -> torch.nn.Module:
    """A copy of the modules over the same tensors, without hooks, in evaluation; put: what stands for which module.

    Args:
        calls: gets the calls of every module, by the original.
    """
    made: dict[torch.nn.Module, torch.nn.Module] = {}

    def copied(old: torch.nn.Module) -> torch.nn.Module:
        if old in made:
            return made[old]
        if old in put:
            new = put[old]
        else:
            if "forward" in vars(old):
                raise _Unclear("a forward was replaced, as accelerate's hooks do")
            new = object.__new__(type(old))
            new.__dict__.update(old.__dict__, training=False)
            new.__dict__["_modules"] = {
                name: None if child is None else copied(child) for name, child in old._modules.items()
            }
        for name, value in vars(old).items():
            if "_hooks" in name and isinstance(value, dict):  # `_forward_hooks_with_kwargs` too
                new.__dict__[name] = OrderedDict()
        made[old] = new
        if calls is not None:

            def note(_: Any, inputs: Any, named: Any, output: Any) -> None:
                calls.setdefault(old, []).append(Call(inputs, named, output))

            new.register_forward_hook(note, with_kwargs=True)
        return new

    return copied(module)


# ---- one block -------------------------------------------------------------------------------------------------------


@dataclass
class MLP:
    name: str
    down: str
    linears: list[str]  # gate and up, or both in one
    reads: torch.Tensor
    gate: str  # a key of FRONTS


@dataclass
class Block:
    """What a block did on a few tokens, with stubs for its Linears.

    Attributes:
        names: by module, within the block; those that stand there once.
        calls: by name, of modules that ran once.
    """

    module: torch.nn.Module
    call: Call
    names: dict[torch.nn.Module, str] = field(default_factory=dict)
    stubs: dict[str, Mix] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    output: torch.Tensor | None = None

    def look(self) -> None:
        places: dict[torch.nn.Module, list[str]] = {}
        for name, module in self.module.named_modules(remove_duplicate=False):
            places.setdefault(module, []).append(name)
        self.names = {module: names[0] for module, names in places.items() if len(names) == 1}
        for i, (name, module) in enumerate(self.module.named_modules()):
            if isinstance(module, (PackedLinear, PackedExperts)):
                self.stubs[name] = Mix(module, i)
        calls: dict[torch.nn.Module, list[Call]] = {}
        self.output = self.run({}, calls)
        self.calls = {self.names[m]: each[0] for m, each in calls.items() if m in self.names and len(each) == 1}

    def run(
        self, put: dict[str, torch.nn.Module], calls: dict[torch.nn.Module, list[Call]] | None = None
    ) -> torch.Tensor:
        """The block's output with some modules replaced."""
        modules = {self.module.get_submodule(name): stub for name, stub in (self.stubs | put).items()}
        output = _skeleton(self.module, modules, calls)(*self.call.inputs, **copy.copy(self.call.named))
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, torch.Tensor):
            raise _Unclear(f"the block returns a {type(output).__name__}")
        return output

    def check(self, put: dict[str, torch.nn.Module]) -> str | None:
        """Why the block's output is another one with these modules replaced, or None where it is the same."""
        try:
            output = self.run(put)
        except Exception as error:  # noqa: BLE001 - somebody else's code
            return f"with it fused the block fails: {type(error).__name__}: {str(error).splitlines()[0]}"
        same = output.shape == self.output.shape and _near(output, self.output)
        return None if same else "something else reads its output: with it fused the block's output is another one"

    # ---- what to fuse ------------------------------------------------------------------------------------------------

    def readers(self, tensor: torch.Tensor) -> tuple[list[str], list[str]]:
        """Names of Linears of ours that are called with the tensor alone, and of other modules without children."""
        ours, others = [], []
        for name, call in self.calls.items():
            module = self.module.get_submodule(name)
            if isinstance(module, PackedLinear) and call.one is tensor:
                ours.append(name)
            elif call.given(tensor) and (isinstance(module, (PackedLinear, PackedExperts)) or not module._modules):
                others.append(name)
        order = list(self.stubs)
        return sorted(ours, key=order.index), others

    def mlps(self, skipped: dict[str, str]) -> Iterator[MLP]:
        """Modules that compute down(act(gate(x)) * up(x)), act one of FRONTS."""
        for down in [name for name in self.stubs if name in self.calls]:
            name, module = down.rpartition(".")[0], self.module.get_submodule(down)
            parent, whole = self.module.get_submodule(name), self.calls.get(name)
            if not isinstance(module, PackedLinear) or whole is None or not name:
                continue
            near = [each for each in self.stubs if each != down and each.rpartition(".")[0] == name]
            near = [each for each in near if each in self.calls and self.calls[each].one is not None]
            k = module.in_features
            pairs = [[a, b] for a in near for b in near if a != b and self._n(a) == self._n(b) == k]
            pairs += [[a] for a in near if self._n(a) == 2 * k]
            x = self.calls[down].one
            if not pairs or x is None or whole.output is not self.calls[down].output:
                continue
            for linears in pairs:
                outputs = [self.calls[each].output for each in linears]
                halves = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
                gates = {kind: _gated(kind, *halves) for kind in FRONTS if x.shape == halves[0].shape}
                gates = {kind: (x.double() - y).norm() for kind, y in gates.items() if _alike(x, y)}
                if gates:
                    gate = min(gates, key=gates.__getitem__)
                    break
            else:
                skipped[name] = "what its last Linear reads is neither silu(gate) * up nor gelu(gate) * up"
                continue
            read = whole.one
            if read is None or any(self.calls[each].one is not read for each in linears):
                skipped[name] = "its Linears do not read its input"
            elif parent._parameters or parent._buffers:
                skipped[name] = "it has tensors of its own"
            elif (reason := untouchable(self, name, down, *linears)) is not None:
                skipped[name] = reason
            else:
                yield MLP(name, down, linears, read, gate)

    def _n(self, name: str) -> int:
        module = self.module.get_submodule(name)
        return module.out_features if isinstance(module, PackedLinear) else 0


def steps_of(block: Block, norm: str) -> Steps | str | None:
    """How a layer leads to this norm and on, if that reads a sum with the layer's input; why it does so otherwise."""
    _, *parameters = inspect.signature(type(block.module).forward).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    defaults = {each.name: each.default for each in parameters if each.kind in kinds}
    names, inputs = tuple(defaults), dict(block.call.named)
    inputs |= zip(names, block.call.inputs)
    x = inputs.pop(next(iter(names), ""), None)
    first = {
        name: call.output[0] if isinstance(call.output, tuple) else call.output for name, call in block.calls.items()
    }
    read, children = block.calls[norm].one, dict(block.module.named_children())
    order = [name for name in first if name in children and not isinstance(children[name], torch.nn.Dropout)]
    if x is None or norm not in order[2:-1] or read is x or any(read is each for each in first.values()):
        return None
    at = order.index(norm)
    marks = {name: object() for name in names[1:]}
    more = {"more": object()} if any(each.kind is each.VAR_KEYWORD for each in parameters) else {}
    needed = {name: marks[name] for name in marks if defaults[name] is inspect.Parameter.empty}
    try:
        reads, given = _probed(block, order, at, x, marks | more)
        passed = [(to, name) for to, value in given.items() for name, mark in marks.items() if mark is value]
        if len(passed) + len(more) != len(given) or any(given.get(name) is not mark for name, mark in more.items()):
            raise _Unclear("its attention is given other arguments than it")
        for named in (needed, inputs):
            others = {name: value for name, value in named.items() if name not in names}
            expected = {to: named.get(name, defaults[name]) for to, name in passed} | others
            if _probed(block, order, at, x, named) != (reads, expected):
                raise _Unclear("what its attention is given depends on the arguments")
    except Exception as error:  # noqa: BLE001 - somebody else's code
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"its residual addition stays PyTorch's: {text}"
    fixed = tuple((to, name, None if name in needed else defaults[name]) for to, name in passed)
    return Steps(tuple(order[:at]), norm, tuple(order[at + 1 :]), reads, names, fixed)


def _probed(
    block: Block, order: list[str], at: int, x: torch.Tensor, named: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The attention's keyword for what it reads, and its others, of the layer called with x and these.

    Raises `_Unclear` unless the layer is h = x + before(x), h + after(norm(h)), bit for bit; norm is order[at].
    """
    modules = [block.module.get_submodule(name) for name in order]
    probes = [_Probe(module, block.calls[name].output, i) for i, (name, module) in enumerate(zip(order, modules))]
    put: dict[torch.nn.Module, torch.nn.Module] = dict(zip(modules, probes))
    output = _skeleton(block.module, put)(x, **named)
    total = x + probes[at - 1].first
    for i, probe in enumerate(probes):
        wanted = x if i == 0 else total if i == at else probes[i - 1].first
        read = probe.call and probe.call.one
        if i != 1 and (read is None or not torch.equal(read, wanted)):
            raise _Unclear(f"{order[i]} reads something else")
    if not isinstance(output, torch.Tensor) or not torch.equal(output, total + probes[-1].first):
        raise _Unclear("it returns something else than the sum")
    call, y = probes[1].call, probes[0].first
    reads = "" if call is None else next((name for name, value in call.named.items() if value is y), "")
    if call is None or len(call.inputs) != (not reads) or (call.inputs and call.inputs[0] is not y):
        raise _Unclear(f"{order[1]} reads something else")
    return reads, {name: value for name, value in call.named.items() if value is not y}


def untouchable(block: Block, *names: str) -> str | None:
    """Why these modules cannot be replaced, or None."""
    for name in names:
        module = block.module.get_submodule(name)
        if module not in block.names:
            return f"{name} stands at several places"
        if any(value for key, value in vars(module).items() if key.endswith("_hooks")):
            return f"{name} has hooks, which would see other tensors"
        if "forward" in vars(module):
            return f"the forward of {name} was replaced"
        split = getattr(module, "split", None) if isinstance(module, PackedLinear) else None
        if split is not None and not split.plain:
            return f"{name} changes the layout of its input or output, or agrees with other ranks on scales"
    return None


def norm_of(module: torch.nn.Module) -> tuple[float, bool] | str | None:
    """(eps, whether it multiplies by 1 + weight) of an RMSNorm; why another norm is none; None for what is no norm.

    Found by trying, in fp32, on tokens of which some are so small that eps shows.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or module._modules or isinstance(module, PackedLinear):
        return None
    kind = f"{type(module).__name__} is no RMSNorm with one weight and a fixed eps"
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    if eps is None or any(each is not None for name, each in module._parameters.items() if name != "weight"):
        return kind
    if TYPE_NAMES.get(weight.dtype) not in REAL_TYPES or module._buffers or not weight.is_contiguous():
        return kind
    k = weight.shape[0]
    x = torch.randn(4, k, generator=torch.Generator().manual_seed(2), device="cpu") + 0.5
    x[2:] *= max(eps, 1e-30) ** 0.5
    x = x.to(weight.device)
    gain = weight.detach().float()
    try:
        found = torch.func.functional_call(module, {"weight": gain}, (x,))
    except Exception:  # noqa: BLE001 - somebody else's code
        return kind
    for one_plus in (False, True):
        expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (gain + one_plus)
        if found.shape == x.shape and torch.allclose(found.float(), expected, rtol=1e-5, atol=1e-6):
            return eps, one_plus
    return kind


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`_near`, and so is each value that is not small: quick_gelu's are 1 % from gelu's together, more one by one.

    A gate of several operations in bf16 is up to 6 % away, quick_gelu 18 %.
    """
    off, values = (a.double() - b.double()).abs(), b.double().abs()
    small = values.square().mean(-1, keepdim=True).sqrt() / 20
    return _near(a, b) and bool((off <= 0.1 * (values + small)).all())


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether every token's values are the same but for roundings."""
    a, b = a.double(), b.double()
    sizes = b.norm(dim=-1)
    return bool(((a - b).norm(dim=-1) <= _CLOSE * sizes).all() and (sizes > 0).all())
