"""The check of `fuse_`'s recipes: a block runs by itself on three random tokens, with stand-ins for its packed layers.

In place of a fused norm stands one that gives NaN. Stand-ins that are declared to read it do not pass NaN on, so all
that the block returns is finite only if nothing else reads the norm. The model is not touched: copies of its modules
run, over its tensors.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from jitgemm.activations.scheme import MUL_KEYWORDS, Gate
from jitgemm.dtypes import REAL_TYPES
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.gate import matching_gate
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


# ---- runs ------------------------------------------------------------------------------------------------------------


def calls_of(owner: torch.nn.Module, blocks: Mapping[str, torch.nn.Module]) -> dict[str, Call | str]:
    """For each block a call with random tokens, or why there is none.

    As the owner calls it in a forward that takes `inputs_embeds`, else with one tensor.
    """
    recorders = {name: _StandIn(block, _hidden_states) for name, block in blocks.items()}
    with suppress(Exception):  # somebody else's code, and often no such argument
        embedded = _tokens(next(iter(blocks.values())))
        _copied(owner, [*_stubs(owner).values(), *recorders.values()])(inputs_embeds=embedded, use_cache=False)
    found: dict[str, Call | str] = {}
    for name, block in blocks.items():
        calls = recorders[name].calls
        inputs, named = calls[-1][0] if calls else Call((None,), {})
        try:
            x = _tokens(block)
            call = ((x, *inputs[1:]), named) if inputs else ((), named | {"hidden_states": x})
            found[name] = Call(*_moved(call, x.device))
        except Unclear as reason:
            found[name] = f"a block with {reason}"
    return found


def run(block: torch.nn.Module, call: Call, readers: Sequence[str] = (), norm: str = "", width: int = 0) -> set[str]:
    """Runs the block with stand-ins for its packed layers.

    Args:
        readers: Linears and MLPs that have stand-ins; each is to be called once.
        norm: gives `width` columns of NaN, which the readers alone are to read.

    Returns:
        The names of the packed layers that were called.

    Raises:
        Unclear: the block raises, a reader is not called once, or the block returns something else than finite hidden
            states: something else reads the norm.
    """
    try:
        return _run(block, call, readers, norm, width)
    except Exception as error:  # noqa: BLE001 - somebody else's code
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failing = "with it fused the block fails" if readers else "the block does not run by itself"
        raise Unclear(f"{failing}: {reason}") from error


def _run(block: torch.nn.Module, call: Call, readers: Sequence[str], norm: str, width: int) -> set[str]:
    stubs, hidden = _stubs(block), _hidden_states(*call.inputs, **call.named).shape[-1]
    for name in readers:
        module = block.get_submodule(name)
        stubs[name] = _StandIn(module, _columns(getattr(module, "out_features", hidden), passing=not norm))
    if norm:
        stubs[norm] = _StandIn(block.get_submodule(norm), lambda x: x.new_full((*x.shape[:-1], width), math.nan))
    output = _copied(block, stubs.values())(*call.inputs, **call.named)
    output = output[0] if isinstance(output, tuple) else output
    if not isinstance(output, torch.Tensor):
        raise Unclear(f"the block returns a {type(output).__name__}")
    calls = {name: stub.calls for name, stub in stubs.items() if stub.calls}
    if any(len(calls.get(name, ())) != 1 for name in (*readers, *([norm] if norm else ()))):
        raise Unclear("what would be fused is not called once")
    if norm and any(calls[each][0][0].inputs[0] is not calls[norm][0][1] for each in readers):
        raise Unclear("what would be fused is given something else than the norm's output")
    if not output.isfinite().all():
        raise Unclear("its output is another one: something else reads what the norm gives" if norm else "it gives NaN")
    return set(calls)


def _tokens(block: torch.nn.Module) -> torch.Tensor:
    """Random tokens [1, 3, hidden] in type and width of the outermost norm that a Linear can read, on its device."""
    linears = [m for m in block.modules() if isinstance(m, PackedLinear)]
    widths = {(linear.in_features,) for linear in linears}
    weights = [(name.count("."), m._parameters.get("weight")) for name, m in block.named_modules()]
    norms = [(depth, weight) for depth, weight in weights if weight is not None and tuple(weight.shape) in widths]
    norm = min(norms, key=lambda each: each[0], default=(0, None))[1]
    if norm is None or TYPE_NAMES.get(norm.dtype) not in REAL_TYPES:
        raise Unclear("no norm as wide as the input of a Linear")
    if norm.is_meta or any(linear.blocks.is_meta for linear in linears):
        raise Unclear("tensors without data")
    return _random((1, _TOKENS, norm.shape[0]), norm)


def _random(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), device="cpu")
    return (_SIZE * values).to(like.device, like.dtype)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors in tuples and dicts on the device: blocks may stand on others than the model's first."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return tuple(_moved(each, device) for each in value) if type(value) is tuple else value


# ---- stand-ins -------------------------------------------------------------------------------------------------------


class _StandIn(torch.nn.Module):
    """Has the attributes of the module that it stands for, computes something else and keeps its calls, with outputs."""

    def __init__(self, module: torch.nn.Module, compute: Callable[..., Any]):
        super().__init__()
        self.module, self.compute = (module,), compute  # in a tuple: it is no child
        self.calls: list[tuple[Call, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module[0], name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        output = self.compute(*inputs, **named)
        self.calls.append((Call(inputs, named), output))
        return output


def _hidden_states(*inputs: Any, **named: Any) -> Any:
    """A block's."""
    return inputs[0] if inputs else named["hidden_states"]


def _columns(width: int | None, passing: bool = True) -> Callable[..., torch.Tensor]:
    """A stand-in's: random values of `width` columns, None for as many as x has; passing: NaN where x or more has it."""

    def compute(x: torch.Tensor, *more: Any) -> torch.Tensor:
        y = _random((*x.shape[:-1], width or x.shape[-1]), x)
        for each in (x, *more) if passing else ():
            y = y + (0 * each.float().sum()).to(y.dtype) if isinstance(each, torch.Tensor) else y
        return y

    return compute


def _stubs(module: torch.nn.Module) -> dict[str, _StandIn]:
    """Stand-ins for all packed layers, by name."""
    packed = [(name, m) for name, m in module.named_modules() if isinstance(m, (PackedLinear, PackedExperts))]
    return {name: _StandIn(m, _columns(getattr(m, "out_features", None))) for name, m in packed}


def _copied(module: torch.nn.Module, put: Iterable[_StandIn]) -> torch.nn.Module:
    """A copy of the modules over the same tensors, without hooks, in evaluation; put: what stands for some of them."""
    made: dict[torch.nn.Module, torch.nn.Module] = {each.module[0]: each for each in put}

    def copied(old: torch.nn.Module) -> torch.nn.Module:
        if old in made:
            return made[old]
        if "forward" in vars(old):
            raise Unclear("a forward was replaced, as accelerate's hooks do")
        new = made[old] = object.__new__(type(old))
        hooks = (name for name, value in vars(old).items() if "_hooks" in name and isinstance(value, dict))
        new.__dict__.update(vars(old), training=False, **{name: OrderedDict() for name in hooks})
        new.__dict__["_modules"] = {
            name: None if child is None else copied(child) for name, child in old._modules.items()
        }
        return new

    return copied(module)


# ---- formulas --------------------------------------------------------------------------------------------------------


def mlp_gate(mlp: torch.nn.Module, gates: Sequence[str], down: str) -> Gate:
    """The gate where the MLP computes down(act(gate(x)) * up(x)). Raises Unclear for gates that quantisers do not have.

    Args:
        gates: the children gate and up, or one for both, gate first.
    """
    stubs = _stubs(mlp)
    x = _random((64, stubs[gates[0]].in_features), torch.empty(0, device="cpu"))
    gate = None
    with suppress(Exception):  # somebody else's code
        output = _copied(mlp, stubs.values())(x)
        ((call, result),) = stubs[down].calls
        read = [stubs[name].calls for name in gates]
        halves = torch.cat([calls[0][1] for calls in read], -1)
        if output is result and all(len(calls) == 1 and calls[0][0].inputs[0] is x for calls in read):
            gate = matching_gate(halves, call.inputs[0], MUL_KEYWORDS)
    if gate is not None:
        return gate
    raise Unclear("what its last Linear reads is neither silu(gate) * up nor gelu(gate) * up")


def norm_formula(norm: torch.nn.Module) -> tuple[float, bool]:
    """(eps, whether it multiplies by 1 + weight) of an RMSNorm. Raises Unclear for anything else.

    Found by trying, in fp32, on tokens, some so small that eps shows.
    """
    eps: float = next((value for name in _EPS if isinstance(value := getattr(norm, name, None), float)), math.nan)
    tensors = {name: each for name, each in (norm._parameters | norm._buffers).items() if each is not None}
    with suppress(Exception):  # somebody else's code, or no weight, or none of one dimension
        weight = tensors.pop("weight")
        (k,) = weight.shape
        if TYPE_NAMES[weight.dtype] in REAL_TYPES and weight.is_contiguous() and not tensors and not norm._modules:
            x = torch.randn(4, k, generator=torch.Generator().manual_seed(2), device="cpu") + 0.5
            x[2:] *= max(eps, 1e-30) ** 0.5
            x, gain = x.to(weight.device), weight.detach().float()
            found = torch.func.functional_call(norm, {"weight": gain}, (x,)).float()
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
            for one_plus in (False, True):
                if torch.allclose(found, normed * (gain + one_plus), rtol=1e-5, atol=1e-6):
                    return eps, one_plus
    raise Unclear(f"{type(norm).__name__} is no RMSNorm with one weight and a fixed eps")


def check_one_input(linears: Sequence[PackedLinear]) -> None:
    """Raises Unclear where one quantised input cannot serve all of these."""
    first = linears[0]
    for other in linears[1:]:
        if other.activation != first.activation:
            raise Unclear(f"activations differ: {first.activation} and {other.activation}")
        for name in ("input_scale", "permutation"):
            a, b = first._buffers[name], other._buffers[name]
            if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
                raise Unclear(f"{name.replace('_', ' ')}s differ")
        if other.in_features != first.in_features or other.blocks.device != first.blocks.device:
            raise Unclear("sizes or devices differ")
