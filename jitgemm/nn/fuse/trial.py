"""The check of `fuse_`'s recipes: a block of a model runs by itself on three random tokens, with stubs for its packed
Linears.

In place of a fused norm stands one that gives NaN: stubs that are declared to read it do not pass NaN on, so that all
that the block returns is finite only if nothing else reads the norm. The model itself is not touched: copies of its
modules run, over its tensors.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jitgemm.activations.scheme import MUL_KEYWORDS, Gate
from jitgemm.activations.reference import gated
from jitgemm.dtypes import REAL_TYPES
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.tensors import TYPE_NAMES

_TOKENS = 3
_SIZE = 4.0
"""Standard deviation of random values: gates differ in small ones, limits in large ones."""
_EPS = ("variance_epsilon", "eps", "epsilon")


class Call(NamedTuple):
    inputs: tuple[Any, ...]
    named: dict[str, Any]


class Unclear(Exception):
    """Why a block, or a fusion, is better left alone."""


def said(error: Exception) -> str:
    """An exception's first line, or its type."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---- blocks, and what calls them -------------------------------------------------------------------------------------


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


def calls_of(owner: torch.nn.Module, blocks: Mapping[str, torch.nn.Module]) -> dict[str, Call | str]:
    """For each block a call with random tokens, or why there is none.

    As the owner calls it in a forward that takes `inputs_embeds`, else with one tensor.
    """
    recorders = {number: _Recorder(block) for number, block in blocks.items()}
    try:
        _copied(owner, [*_stubs(owner).values(), *recorders.values()])(
            inputs_embeds=_tokens(next(iter(blocks.values()))), use_cache=False
        )
    except Exception:  # noqa: BLE001 - somebody else's code, and often no such argument
        pass
    found: dict[str, Call | str] = {}
    for number, block in blocks.items():
        inputs, named = recorders[number].call or Call((None,), {})
        try:
            x = _tokens(block)
            call = (x, *inputs[1:]) if inputs else (), named if inputs else named | {"hidden_states": x}
            found[number] = Call(*_moved(call, x.device))
        except Unclear as reason:
            found[number] = f"a block with {reason}"
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
        raise Unclear("no norm as wide as the input of a Linear")
    if norm.is_meta or any(linear.blocks.is_meta for linear in linears):
        raise Unclear("tensors without data")
    return _random((1, _TOKENS, norm.shape[0]), norm)


def _random(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), device="cpu")
    return (_SIZE * values).to(like.device, like.dtype)


# ---- stand-ins -------------------------------------------------------------------------------------------------------


class _StandIn(torch.nn.Module):
    """Has the attributes of the module that it stands for."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = (module,)  # in a tuple: it is no child

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module[0], name)


class _Recorder(_StandIn):
    """Stands for a block: returns the hidden states."""

    call: Call | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.call = Call(inputs, named)
        return inputs[0] if inputs else named["hidden_states"]


class _Nan(_StandIn):
    """Stands for a norm that is fused: NaN, `width` columns of it."""

    def __init__(self, norm: torch.nn.Module, width: int):
        super().__init__(norm)
        self.width = width
        self.given: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given.append(torch.full((*x.shape[:-1], self.width), math.nan, dtype=x.dtype, device=x.device))
        return self.given[-1]


class Stub(_StandIn):
    """Stands for a Linear, for experts or for an MLP: random values of `width` columns, NaN where anything that it is
    given is, other than a tensor of `reads`.

    Attributes:
        calls: (input, output).
    """

    reads: Sequence[torch.Tensor] = ()

    def __init__(self, module: torch.nn.Module, width: int | None):
        super().__init__(module)
        self.width = width
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        y = _random((*x.shape[:-1], self.width or x.shape[-1]), x)
        if not any(x is each for each in self.reads):
            for each in (x, *more):
                y = y + (0 * each.float().sum()).to(y.dtype) if isinstance(each, torch.Tensor) else y
        self.calls.append((x, y))
        return y


def _stubs(block: torch.nn.Module) -> dict[str, Stub]:
    """Of all packed layers, by name."""
    packed = [(name, m) for name, m in block.named_modules() if isinstance(m, (PackedLinear, PackedExperts))]
    return {name: Stub(m, m.out_features if isinstance(m, PackedLinear) else None) for name, m in packed}


def _copied(module: torch.nn.Module, put: Iterable[_StandIn]) -> torch.nn.Module:
    """A copy of the modules over the same tensors, without hooks, in evaluation; put: what stands for some of them."""
    made: dict[torch.nn.Module, torch.nn.Module] = {each.module[0]: each for each in put}

    def copied(old: torch.nn.Module) -> torch.nn.Module:
        if old in made:
            return made[old]
        if "forward" in vars(old):
            raise Unclear("a forward was replaced, as accelerate's hooks do")
        new = made[old] = object.__new__(type(old))
        new.__dict__.update(old.__dict__, training=False)
        for name, value in vars(old).items():
            if "_hooks" in name and isinstance(value, dict):  # `_forward_hooks_with_kwargs` too
                new.__dict__[name] = OrderedDict()
        new.__dict__["_modules"] = {
            name: None if child is None else copied(child) for name, child in old._modules.items()
        }
        return new

    return copied(module)


# ---- checks ----------------------------------------------------------------------------------------------------------


def run(
    block: torch.nn.Module,
    call: Call,
    mlps: Mapping[str, int] | None = None,
    norm: str = "",
    readers: Sequence[str] = (),
    width: int = 0,
) -> set[str]:
    """Runs the block with stubs for its packed layers and for these MLPs, of so many columns.

    Args:
        norm: gives `width` columns, which these readers alone, Linears or MLPs, are to read.

    Returns:
        The names of those that were called.

    Raises:
        Unclear: readers or MLPs are not called once each, or the block returns something else than finite hidden
            states: something else reads the norm.
        Exception: the block's own.
    """
    stubs = _stubs(block) | {name: Stub(block.get_submodule(name), n) for name, n in (mlps or {}).items()}
    nan = [_Nan(block.get_submodule(norm), width)] if norm else []
    for name in readers:
        stubs[name].reads = nan[0].given
    output = _copied(block, [*stubs.values(), *nan])(*call.inputs, **dict(call.named))
    output = output[0] if isinstance(output, tuple) else output
    if not isinstance(output, torch.Tensor):
        raise Unclear(f"the block returns a {type(output).__name__}")
    counts = [len(stubs[name].calls) for name in {*readers, *(mlps or {})}] + [len(each.given) for each in nan]
    if any(count != 1 for count in counts):
        raise Unclear("what would be fused is not called once")
    if not output.isfinite().all():
        raise Unclear("its output is another one: something else reads what the norm gives" if norm else "it gives NaN")
    return {name for name, stub in stubs.items() if stub.calls}


def gate_of(mlp: torch.nn.Module, linears: Sequence[str], down: str) -> Gate | None:
    """The gate, of those that quantisers have, where the MLP computes down(act(gate(x)) * up(x)), else None.

    Args:
        linears: the children gate and up, or one for both, gate first.
    """
    stubs = _stubs(mlp)
    x = _random((64, stubs[linears[0]].in_features), torch.empty(0, device="cpu"))
    try:
        output = _copied(mlp, stubs.values())(x)
        (found, result), *others = stubs[down].calls
        read = [stubs[name].calls for name in linears]
    except Exception:  # noqa: BLE001 - somebody else's code
        return None
    if others or output is not result or any(len(calls) != 1 or calls[0][0] is not x for calls in read):
        return None
    halves = torch.cat([calls[0][1] for calls in read], -1)
    for gate in MUL_KEYWORDS:
        expected = gated(halves, gate)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            return gate
    return None


def norm_of(module: torch.nn.Module) -> tuple[float, bool] | str:
    """(eps, whether it multiplies by 1 + weight) of an RMSNorm, or that it is none.

    Found by trying, in fp32, on tokens of which some are so small that eps shows.
    """
    kind = f"{type(module).__name__} is no RMSNorm with one weight and a fixed eps"
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    tensors = {name: each for name, each in (module._parameters | module._buffers).items() if each is not None}
    weight = tensors.pop("weight", None)
    if weight is None or tensors or module._modules or eps is None:
        return kind
    if weight.dim() != 1 or TYPE_NAMES.get(weight.dtype) not in REAL_TYPES or not weight.is_contiguous():
        return kind
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(2), device="cpu") + 0.5
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
