"""What a quantiser can compute itself, found in a graph: norms and gates.

`PRODUCERS` says for which operators this knows how. Knows torch.fx and PyTorch's operators, and none of jitgemm's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from jitgemm.activations.scheme import GELU_MULS, SILU_MUL, Gate, Prologue

aten, prims = torch.ops.aten, torch.ops.prims


class Fold(NamedTuple):
    """What the pass folds into a quantiser, which computes it itself.

    Attributes:
        x: what it then reads: [..., k], or [..., 2k] with a gate; or two tensors [..., k] for the halves of that,
            which nothing else reads: if GEMMs made them, they write side by side then, else nothing is fused.
        prologue: what the quantiser then computes first, its tensors nodes of the graph.
        reads: the nodes that read x and the prologue's tensors today: nothing may have been written since they ran.
        sum: with a residual: x + residual, whose readers are given the op's last result.
    """

    x: Node | tuple[Node, Node]
    prologue: Prologue
    reads: tuple[Node, ...]
    sum: Node | None = None


Producer = Callable[[Node], Fold | None]
"""producer(value): the operations whose result `value` is, roundings to 16 bits aside; None if there are none.
Conversions of the value to another floating-point type are behind it."""

# ---- looking at a graph ----------------------------------------------------------------------------------------------

_VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.alias.default,
)  # fmt: skip
_REAL = torch.bfloat16, torch.float16, torch.float32


def value_of(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def is_tensor(node: Any) -> bool:
    """Whether this is a tensor whose shape and type the graph knows; other passes may leave nodes without."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _last(node: Node) -> Any:
    """The last size of a tensor."""
    return value_of(node).shape[-1] if is_tensor(node) and value_of(node).dim() else None


def _is_view(node: Node) -> bool:
    """Whether this holds the rows of what it views, in their order."""
    return node.target in _VIEWS and isinstance(_last(node), int) and _same([_last(node)], [_last(node.args[0])])


def converts(node: Node) -> bool:
    """Whether this converts one floating-point type to another."""
    return _unconverted(node) is not node


def root_of(node: Node, besides: Callable[[Node], bool] = lambda _: False) -> Node:
    """What made these rows, behind views and what is named `besides`."""
    while _is_view(node) or besides(node):
        node = node.args[0]
    return node


def readers_of(node: Node, besides: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """What reads these rows, maybe through views and what is named `besides`."""
    for user in node.users:
        if _is_view(user) or besides(user):
            yield from readers_of(user, besides)
        else:
            yield user


def types_of(node: Node) -> tuple[torch.dtype, ...]:
    """The types that rows were converted to, the last first."""
    types = []
    while _is_view(node) or converts(node):
        types += [value_of(node).dtype] if converts(node) else []
        node = node.args[0]
    return tuple(types)


def call_of(node: Any, *targets: Any) -> tuple[Any, ...] | None:
    """The positional arguments of a call of one of these, without others."""
    called = isinstance(node, Node) and node.target in targets and not node.kwargs
    return node.args if called and all("val" in value.meta for value in (node, *node.all_input_nodes)) else None


def _unconverted(node: Any) -> Any:
    """What a floating-point value was before it was converted to another such type, if it was."""
    args = call_of(node, prims.convert_element_type.default)
    return args[0] if args and args[1] in _REAL and value_of(args[0]).dtype in _REAL else node


def _is_fp32(node: Any) -> bool:
    return is_tensor(node) and value_of(node).dtype is torch.float32


def either(args: tuple[Any, ...] | None) -> Iterator[tuple[Any, Any]]:
    """Two tensors in both orders."""
    if args is not None and len(args) == 2 and all(map(is_tensor, args)):
        yield args[0], args[1]
        yield args[1], args[0]


# ---- producers -------------------------------------------------------------------------------------------------------


def norm(value: Node) -> Fold | None:
    """x * rsqrt(mean(x^2) + eps) * weight, x and mean in fp32; rounded ahead of the weight, behind it or nowhere."""
    for weight, normed in either(call_of(value, aten.mul.Tensor)):
        if not _same(value_of(weight).shape, value_of(value).shape[-1:]):
            continue
        for wide, factor in either(call_of(_unconverted(normed), aten.mul.Tensor)):
            eps = _eps(factor, wide)
            if eps is not None and same_shape(wide, value):
                x = _unconverted(wide)
                weight = _unconverted(weight) if _is_fp32(weight) else weight  # widened exactly
                return Fold(x, Prologue(weight, eps), (wide, factor, normed, value))
    return None


def _eps(factor: Node, wide: Node) -> float | None:
    """eps, if factor is rsqrt(mean(wide^2) + eps)."""
    (added,) = call_of(factor, aten.rsqrt.default) or (None,)
    mean, eps = call_of(added, aten.add.Tensor, aten.add.Scalar) or (None, None)
    square, dims, *kept = call_of(mean, aten.mean.dim) or (None, None)
    squared = call_of(square, aten.pow.Tensor_Scalar, aten.mul.Tensor)
    if squared not in ((wide, 2), (wide, wide)) or (squared[1] is wide) is not (square.target is aten.mul.Tensor):
        return None
    if list(dims) not in ([-1], [wide.meta["val"].dim() - 1]) or kept != [True] or not _is_fp32(wide):
        return None
    return float(eps) if isinstance(eps, (int, float)) else None


def same_shape(a: Node, b: Node) -> bool:
    return _same(value_of(a).shape, value_of(b).shape)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes are equal for every m; `==` would put a guard on it."""
    return len(a) == len(b) and all(x is y or str(x) == str(y) for x, y in zip(a, b))


def _whole_norm(value: Node) -> Fold | None:
    """PyTorch's own RMSNorm, where it is one operator yet."""
    call = value.args[0] if value.target is operator.getitem else value
    if value.target is operator.getitem and value.args[1] != 0:
        return None
    x, sizes, weight, eps = (*call.args, None, None)[:4]
    if weight is None or eps is None or call.kwargs or len(sizes) != 1:
        return None
    return Fold(x, Prologue(weight, float(eps)), (call,))


def _gate_mul(value: Node) -> Fold | None:
    """silu(gate) * up or gelu(gate) * up of one tensor's halves, silu and gelu in fp32."""
    for activated, up in either(call_of(value, aten.mul.Tensor)):
        activated = _unconverted(activated)
        gate, gate_kind = _silu(activated) or _gelu(activated) or (None, SILU_MUL)
        if gate is not None and same_shape(gate, value):
            gate, up = _unconverted(gate), _unconverted(up)
            x = _whole(gate, up) or (root_of(gate), root_of(up))
            if isinstance(x, Node) or all(only_for(part, value) for part in x):
                return Fold(x, Prologue(gate=gate_kind), (gate, up, value))
    return None


def only_for(node: Node, value: Node) -> bool:
    """Whether whatever reads a node does so on the way to `value`."""
    ahead = node < value and len(node.users) > 0
    return node is value or (ahead and all(only_for(user, value) for user in node.users))


def _silu(activated: Node) -> tuple[Node, Gate] | None:
    """(gate, SILU_MUL), if this is silu(gate): inductor's own decomposition, in fp32, or the operator."""
    if (args := call_of(activated, aten.silu.default)) is not None:
        return args[0], SILU_MUL
    gate, below = call_of(activated, aten.div.Tensor) or (None, None)
    exp, one = call_of(below, aten.add.Tensor, aten.add.Scalar) or (None, None)
    (negated,) = call_of(exp, aten.exp.default) or (None,)
    if call_of(negated, aten.neg.default) == (gate,) and one == 1 and _is_fp32(gate):
        return gate, SILU_MUL
    for gate, factor in either(call_of(activated, aten.mul.Tensor)):
        if call_of(factor, aten.sigmoid.default) == (gate,) and _is_fp32(gate):
            return gate, SILU_MUL
    return None


def _gelu(activated: Node) -> tuple[Node, Gate] | None:
    """(gate, one of GELU_MULS), if this is gelu(gate): inductor's own decomposition, in fp32, or the operator."""
    if activated.target is aten.gelu.default:
        return activated.args[0], GELU_MULS[activated.kwargs.get("approximate", "none")]
    half, factor = call_of(activated, aten.mul.Tensor) or (None, None)
    gate, by = call_of(half, aten.mul.Tensor) or (None, None)
    curve, one = call_of(factor, aten.add.Tensor, aten.add.Scalar) or (None, None)
    (inner,) = call_of(curve, aten.erf.default, aten.tanh.default) or (None,)
    argument, scale = call_of(inner, aten.mul.Tensor) or (None, None)
    if (by, one) != (0.5, 1) or not _is_fp32(gate):
        return None
    if curve.target is aten.erf.default:
        exact = argument is gate and isinstance(scale, float) and math.isclose(scale, math.sqrt(0.5))
        return (gate, GELU_MULS["none"]) if exact else None
    first, cubic = call_of(argument, aten.add.Tensor) or (None, None)
    cube, coefficient = call_of(cubic, aten.mul.Tensor) or (None, None)
    square, last = call_of(cube, aten.mul.Tensor) or (None, None)
    same = first is gate and last is gate and call_of(square, aten.mul.Tensor) == (gate, gate)
    close = isinstance(scale, float) and math.isclose(scale, math.sqrt(2 / math.pi)) and coefficient == 0.044715
    return (gate, GELU_MULS["tanh"]) if same and close else None


def _whole(gate: Node, up: Node) -> Node | None:
    """The tensor [..., 2k] whose halves these are."""
    halves = _half(root_of(gate)), _half(root_of(up))
    if halves[0] is None or halves[1] is None or halves[0][0] is not halves[1][0]:
        return None
    root, k = halves[0][0], _last(gate)
    return root if (halves[0][1:], halves[1][1:]) == ((0, k), (k, 2 * k)) and _last(root) == 2 * k else None


def _half(part: Node) -> tuple[Node, int, int] | None:
    """(tensor, first column, end) of a tensor's columns."""
    if (args := call_of(part, aten.slice.Tensor)) is not None:
        root, dim, start, end = (*args, None, None, None)[:4]
        columns = _last(root)
        start, end = start or 0, columns if end is None else end
        if (args[4:] or (1,)) != (1,) or not all(isinstance(number, int) for number in (columns, start, end)):
            return None
        end = min(end, columns)
    elif (args := call_of(part, operator.getitem)) is not None and call_of(
        args[0], aten.split.Tensor, aten.split_with_sizes.default
    ):
        root, sizes, *options = args[0].args
        dim, width = options[0] if options else 0, _last(part)
        if not isinstance(width, int) or (not isinstance(sizes, int) and any(size != width for size in sizes)):
            return None
        start, end = args[1] * width, (args[1] + 1) * width
    else:
        return None
    return (root_of(root), start, end) if dim in (-1, value_of(root).dim() - 1) else None


PRODUCERS: dict[Any, list[Producer]] = {aten.mul.Tensor: [norm, _gate_mul], aten.rms_norm.default: [_whole_norm]}
"""By operator; of a result of several, by theirs, and of one that writes into an argument, by the operator that
`auto_functionalized` calls. A plug-in adds its own with `add_producer`."""
if hasattr(aten, "_fused_rms_norm"):
    PRODUCERS[aten._fused_rms_norm.default] = [_whole_norm]
