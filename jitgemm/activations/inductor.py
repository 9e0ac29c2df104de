"""What a compiled graph computes ahead of a quantiser, computed by the quantiser: a pass over inductor's graphs.

It stands among inductor's own patterns, beside whatever a user or an engine installs as a custom pass. Of each
`torch.ops.jitgemm.quantize_activations` it looks at what made the input: `PRODUCERS` says for which operators it knows
how. Structures other than these are left alone. Quantisers that read one tensor alike become one.

A fusion leaves out the rounding to x's type between norm or gate and quantiser, as inductor does between the pointwise
operators that it fuses; under its `emulate_precision_casts` there is none. A value that anything but quantisers reads,
such as a router, stays: its own kernel would run in any case.

Knows the ops of this package by name, and torch.fx; nothing here imports inductor before a compiler has loaded it.
"""

from __future__ import annotations

import hashlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims


class Front(NamedTuple):
    """What a quantiser can compute itself.

    Attributes:
        x: what it then reads: [..., k], or [..., 2k] with a gate; or two tensors [..., k] for the halves of that,
            which nothing else reads: if GEMMs made them, they write side by side then, else nothing is fused.
        arguments: of the op, by name, in place of what it was called with.
        reads: the nodes that read x and the arguments' tensors today: nothing may have been written since they ran.
        sum: with a residual among the arguments: x + residual, whose readers are given the op's last result.
    """

    x: Node | tuple[Node, Node]
    arguments: dict[str, Any]
    reads: tuple[Node, ...]
    sum: Node | None = None


Producer = Callable[[Node], Front | None]
"""producer(value): the front whose result `value` is, but for roundings to 16 bits; None if it is none. Conversions of
the value to another floating-point type are behind it."""

PRODUCERS: dict[Any, list[Producer]] = {}
"""By operator; of a result of several, by theirs, and of one that writes into an argument, by the operator that
`auto_functionalized` calls. A plug-in adds its own with `add_producer`."""


def add_producer(target: Any, producer: Producer) -> None:
    """From now on `producer` is asked about each result of the operator `target` that a quantiser reads."""
    PRODUCERS.setdefault(target, []).append(producer)
    _state.key = None


# ---- registration ----------------------------------------------------------------------------------------------------

_CONFIG, _POST_GRAD = "torch._inductor.config", "torch._inductor.fx_passes.post_grad"


class _State:
    registered = False
    key: str | None = None


_state = _State()


def register() -> None:
    """Puts the pass among inductor's patterns once inductor is loaded; called whenever the op is traced.

    Whoever compiles traces twice: Dynamo, maybe with inductor's configuration alone, and then AOTAutograd on inductor's
    behalf. Between them caches of compiled graphs are looked up, whose keys must tell passes of different versions
    apart: inductor hashes its configuration, and that has one entry that is there to say what else a graph depends on.
    """
    config = sys.modules.get(_CONFIG)
    if config is not None and _state.key is None:
        modules = {producer.__module__ for producers in PRODUCERS.values() for producer in producers} | {__name__}
        files = sorted(str(sys.modules[module].__file__) for module in modules)
        _state.key = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
        noted = {**config.unsafe_marked_cacheable_functions, __name__: _state.key}
        config.unsafe_marked_cacheable_functions = noted
    if not _state.registered and hasattr(sys.modules.get(_POST_GRAD), "pass_patterns"):
        from torch._inductor.fx_passes.post_grad import pass_patterns
        from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern

        _state.registered = True
        pattern = CallFunctionVarArgs(torch.ops.jitgemm.quantize_activations.default)
        for patterns, rewrite in zip(pass_patterns, (fuse, add_residual)):
            register_graph_pattern(pattern, pass_dict=patterns)(
                lambda match, *_, rewrite=rewrite, **__: rewrite(match.nodes[0])
            )


# ---- the pass --------------------------------------------------------------------------------------------------------


def fuse(quantiser: Node) -> None:
    """Rewrites the quantisers that read what this one reads, where that makes fewer kernels."""
    value = _root(quantiser.args[0], _converts)
    if not _is_tensor(value):
        return
    readers = list(_readers(value, _converts))
    front = None if _exact_rounding() or not all(map(_plain, readers)) else _front(value)
    alike: dict[Any, list[Node]] = {}
    for reader in filter(_is_quantiser, readers):
        arguments = tuple(_arguments(reader).items())[1:]
        alike.setdefault((_region(reader), _types(reader.args[0]), *arguments), []).append(reader)
    for same in sorted(alike.values(), key=min):
        first = min(same)
        made = None if front is None else _fused(first, front)
        for node in same:
            if made is not None or node is not first:
                node.replace_all_uses_with(made or first)
                _erase(node)
        if made is not None and front is not None and front.sum is not None:  # which the others normalise
            norm = {name: value for name, value in front.arguments.items() if name != "residual"}
            front = Front(_read_sum(made, front.sum), norm, ())


def add_residual(quantiser: Node) -> None:
    """Lets a quantiser with a norm add what it normalises, and write the sum, where that saves a kernel.

    It does unless inductor computes one of the two in the addition's kernel. Runs when all quantisers are fused, as
    what they read is no longer part of anybody's kernel.
    """
    arguments = _arguments(quantiser)
    total = _root(arguments["x"])
    parts = next(_either(_call(total, aten.add.Tensor)), None)
    if parts is None or arguments["rms_norm"] is None:
        return
    same = all(_same_shape(part, total) and _value(part).dtype == _value(total).dtype for part in parts)
    if same and parts[0] is not parts[1] and all(map(_is_stored, parts)):
        front = Front(parts[0], {"residual": parts[1]}, (total,), total)
        made = _fused(quantiser, front)
        if made is not None:
            quantiser.replace_all_uses_with(made)
            _erase(quantiser)
            _read_sum(made, total)


def _is_stored(part: Node) -> bool:
    """Whether a tensor is in memory in any case: an input, an operator's that is not inductor's, or read by one."""
    root = _root(part)
    maker = root.args[0] if root.target is operator.getitem else root
    if maker.op == "placeholder" or any(getattr(user.target, "namespace", "") == "jitgemm" for user in _readers(root)):
        return True
    return maker.target in _FUNCTIONALISED or getattr(maker.target, "namespace", "aten") not in ("aten", "prims")


def _read_sum(made: Node, total: Node) -> Node:
    """The sum that a quantiser writes, in place of `total`."""
    graph, shape = made.graph, _sizes(total)
    with graph.inserting_after(made):
        written = graph.call_function(operator.getitem, (made, 3))
    written.meta["val"] = made.meta["val"][3]
    if total.meta["val"].dim() != 2:
        with graph.inserting_after(written), total.meta["val"].fake_mode:
            flat, written = written, graph.call_function(aten.reshape.default, (written, shape))
            written.meta["val"] = flat.meta["val"].view(torch.fx.map_arg(shape, _value))
    total.replace_all_uses_with(written)
    _erase(total)
    return written


def _sizes(node: Node) -> list[Any] | None:
    """A tensor's sizes for a graph, None if no node of it holds them."""
    sizes = list(node.meta["val"].shape)
    if all(isinstance(size, int) for size in sizes):
        return sizes
    for view in (node, *node.all_input_nodes):
        if view.target in (aten.reshape.default, aten.view.default) and _same_shape(view, node):
            return view.args[1]
    return None


def _front(value: Node) -> Front | None:
    made_by = value.target
    if made_by is operator.getitem:
        made_by = value.args[0].target
        if made_by in _FUNCTIONALISED:
            made_by = value.args[0].args[0]
    return next((front for producer in PRODUCERS.get(made_by, ()) if (front := producer(value)) is not None), None)


def _fused(quantiser: Node, front: Front) -> Node | None:
    """A quantiser with that front, ahead of this one; None if the op takes no such arguments."""
    arguments = _arguments(quantiser) | front.arguments
    outs = [_gemm_out(_root(part)) for part in front.x] if isinstance(front.x, tuple) else None
    if any(_region(node) != _region(quantiser) for node in front.reads):
        return None
    if outs and (None in outs or not _same_out(*outs)):
        return None
    if (total := front.sum) is not None:  # whatever else reads it can wait for the quantiser
        later = all(user > quantiser or _only_for(user, quantiser) for user in total.users)
        if not later or (total.meta["val"].dim() != 2 and _sizes(total) is None):
            return None
    arguments["x"] = None if outs else _root(front.x)
    wide = [name for name in ("x", "residual") if isinstance(arguments.get(name), Node)]
    values = {name: _value(argument) for name, argument in arguments.items()}
    op = torch.ops.jitgemm.add_quantize_activations if "residual" in wide else torch.ops.jitgemm.quantize_activations
    if "residual" in wide:
        del arguments["gelu_mul"], values["gelu_mul"]
    with quantiser.args[0].meta["val"].fake_mode:
        try:
            if outs:
                m, n = outs[0].meta["val"].shape
                values["x"] = outs[0].meta["val"].new_empty((m, 2 * n))
            for name in wide:
                if values[name].dim() != 2:
                    values[name] = values[name].view(-1, values[name].shape[-1])
            results = op.default(*values.values())
        except (TypeError, ValueError, RuntimeError):  # a size, a dtype or a stride, or rows that are no view
            return None
    graph = quantiser.graph
    if outs:
        arguments["x"] = _side_by_side(outs, values["x"])
    with graph.inserting_before(quantiser):
        for name in wide:
            if arguments[name].meta["val"].dim() != 2:
                shape = [-1, values[name].shape[-1]]
                arguments[name] = graph.call_function(aten.reshape.default, (arguments[name], shape))
                arguments[name].meta["val"] = values[name]
        made = graph.call_function(op.default, tuple(arguments.values()))
    made.meta = {**quantiser.meta, "val": results}
    _note_inputs(made, tuple(values.values()), {})
    return made


def _note_inputs(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Inductor gives an operator's inputs the strides that are noted here."""
    if "eager_input_vals" in node.meta:
        node.meta["eager_input_vals"] = args, kwargs


def _gemm_out(result: Node) -> Node | None:
    """The empty tensor that a GEMM alone writes to, and all of it, if `result` is that."""
    args = _call(result, operator.getitem)
    gemm = args[0] if args else None
    if not args or args[1] != 1 or gemm.target is not torch.ops.higher_order.auto_functionalized_v2:
        return None
    told = {name: value for name, value in gemm.kwargs.items() if name.startswith("_")}
    out = (told.pop("_all_bases", None) or [None])[0]
    if gemm.args != (torch.ops.jitgemm.gemm_w4a8_nt.default,) or told != {"_out_base_index": 0}:
        return None
    alone = isinstance(out, Node) and out.target is aten.empty.memory_format and len(out.users) == len(gemm.users) == 1
    return out if alone and len(out.args[0]) == 2 else None


def _same_out(a: Node, b: Node) -> bool:
    """Whether two empty tensors are alike."""
    return a is not b and a.kwargs == b.kwargs and _same_shape(a, b)


def _side_by_side(outs: list[Node], fake: torch.Tensor) -> Node:
    """One tensor, which the GEMMs that wrote to these two write to, the first into its left half."""
    gemms = [next(iter(out.users)) for out in outs]
    first = min(gemms)
    graph, n = first.graph, fake.shape[1] // 2
    with graph.inserting_before(first):
        out = outs[gemms.index(first)]
        out = graph.call_function(out.target, ([out.args[0][0], 2 * n],), out.kwargs)
        out.meta["val"] = fake
    for gemm in sorted(gemms):
        start = n * gemms.index(gemm)
        told = {"_out_slice_dim": 1, "_out_slice_start": start, "_out_slice_end": start + n}
        (result,) = gemm.users
        old = gemm.kwargs["_all_bases"][0]
        gemm.kwargs = {**gemm.kwargs, **told, "_all_bases": [out]}
        with fake.fake_mode:  # a memory of its own, as what is written in place is told from that
            result.meta["val"] = torch.empty_like(fake)
        gemm.meta["val"] = (*gemm.meta["val"][:1], result.meta["val"])
        if "eager_input_vals" in gemm.meta:
            args, kwargs = gemm.meta["eager_input_vals"]
            _note_inputs(gemm, args, {**kwargs, **told, "_all_bases": type(kwargs["_all_bases"])([fake])})
        _erase(old)
        out, fake = result, result.meta["val"]
    return out


def _erase(node: Node) -> None:
    """Takes a node that nothing reads out of the graph, and what only it read."""
    if node._erased or node.users or node.op != "call_function" or node.is_impure():
        return
    read = node.all_input_nodes
    node.graph.erase_node(node)
    for each in read:
        _erase(each)


# ---- looking at a graph ----------------------------------------------------------------------------------------------

_VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.alias.default,
)  # fmt: skip
_REAL = torch.bfloat16, torch.float16, torch.float32
_FUNCTIONALISED = torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2


def _exact_rounding() -> bool:
    return bool(getattr(sys.modules.get(_CONFIG), "emulate_precision_casts", False))


def _is_quantiser(node: Node) -> bool:
    return node.target is torch.ops.jitgemm.quantize_activations.default


def _plain(node: Node) -> bool:
    """Whether this is a quantiser that computes nothing first."""
    if not _is_quantiser(node):
        return False
    arguments = _arguments(node)
    return not arguments["silu_mul"] and arguments["gelu_mul"] is None and arguments["rms_norm"] is None


def _arguments(quantiser: Node) -> dict[str, Any]:
    """All arguments of the op by name, in its order."""
    schema = torch.ops.jitgemm.quantize_activations.default._schema.arguments
    given = dict(zip((argument.name for argument in schema), quantiser.args)) | quantiser.kwargs
    return {each.name: given.get(each.name, each.default_value) for each in schema}


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _is_tensor(node: Any) -> bool:
    """Whether this is a tensor of which the graph knows shape and type; other passes may leave nodes without."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _last(node: Node) -> Any:
    """The last size of a tensor."""
    return _value(node).shape[-1] if _is_tensor(node) and _value(node).dim() else None


def _is_view(node: Node) -> bool:
    """Whether this holds the rows of what it views, in their order."""
    return node.target in _VIEWS and isinstance(_last(node), int) and _same([_last(node)], [_last(node.args[0])])


def _converts(node: Node) -> bool:
    """Whether this converts one floating-point type to another."""
    return _unconverted(node) is not node


def _root(node: Node, besides: Callable[[Node], bool] = lambda _: False) -> Node:
    """What made these rows, behind views and what is named `besides`."""
    while _is_view(node) or besides(node):
        node = node.args[0]
    return node


def _readers(node: Node, besides: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """What reads these rows, maybe through views and what is named `besides`."""
    for user in node.users:
        if _is_view(user) or besides(user):
            yield from _readers(user, besides)
        else:
            yield user


def _types(node: Node) -> tuple[torch.dtype, ...]:
    """The types that rows were converted to, the last first."""
    found = []
    while _is_view(node) or _converts(node):
        found += [_value(node).dtype] if _converts(node) else []
        node = node.args[0]
    return tuple(found)


def _region(node: Node) -> int:
    """Between which writes of the graph a node runs."""
    from torch._inductor.pattern_matcher import get_mutation_region_id

    return get_mutation_region_id(node.graph, node)


def _call(node: Any, *targets: Any) -> tuple[Any, ...] | None:
    """The positional arguments of a call of one of these, without others."""
    called = isinstance(node, Node) and node.target in targets and not node.kwargs
    return node.args if called and all("val" in each.meta for each in (node, *node.all_input_nodes)) else None


def _unconverted(node: Any) -> Any:
    """What a floating-point value was before it was converted to another such type, if it was."""
    args = _call(node, prims.convert_element_type.default)
    return args[0] if args and args[1] in _REAL and _value(args[0]).dtype in _REAL else node


def _is_fp32(node: Any) -> bool:
    return _is_tensor(node) and _value(node).dtype is torch.float32


def _either(args: tuple[Any, ...] | None) -> Iterator[tuple[Any, Any]]:
    """Two tensors in both orders."""
    if args is not None and len(args) == 2 and all(map(_is_tensor, args)):
        yield args[0], args[1]
        yield args[1], args[0]


# ---- producers -------------------------------------------------------------------------------------------------------


def _norm(value: Node) -> Front | None:
    """x * rsqrt(mean(x^2) + eps) * weight, x and mean in fp32; rounded ahead of the weight, behind it or nowhere."""
    for weight, normed in _either(_call(value, aten.mul.Tensor)):
        if not _same(_value(weight).shape, _value(value).shape[-1:]):
            continue
        for wide, factor in _either(_call(_unconverted(normed), aten.mul.Tensor)):
            eps = _eps(factor, wide)
            if eps is not None and _same_shape(wide, value):
                x = _unconverted(wide)
                return Front(x, {"rms_norm": _unwidened(weight), "eps": eps}, (wide, factor, normed, value))
    return None


def _eps(factor: Node, wide: Node) -> float | None:
    """eps, if factor is rsqrt(mean(wide^2) + eps)."""
    (added,) = _call(factor, aten.rsqrt.default) or (None,)
    mean, eps = _call(added, aten.add.Tensor, aten.add.Scalar) or (None, None)
    square, dims, *kept = _call(mean, aten.mean.dim) or (None, None)
    squared = _call(square, aten.pow.Tensor_Scalar, aten.mul.Tensor)
    if squared not in ((wide, 2), (wide, wide)) or (squared[1] is wide) is not (square.target is aten.mul.Tensor):
        return None
    if list(dims) not in ([-1], [wide.meta["val"].dim() - 1]) or kept != [True] or not _is_fp32(wide):
        return None
    return float(eps) if isinstance(eps, (int, float)) else None


def _unwidened(weight: Node) -> Node:
    """A weight ahead of its exact conversion to fp32, if there was one."""
    return _unconverted(weight) if _is_fp32(weight) else weight


def _same_shape(a: Node, b: Node) -> bool:
    return _same(_value(a).shape, _value(b).shape)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes are equal for every m; `==` would put a guard on it."""
    return len(a) == len(b) and all(x is y or str(x) == str(y) for x, y in zip(a, b))


def _whole_norm(value: Node) -> Front | None:
    """PyTorch's own RMSNorm, where it is one operator yet."""
    call = value.args[0] if value.target is operator.getitem else value
    if value.target is operator.getitem and value.args[1] != 0:
        return None
    x, sizes, weight, eps = (*call.args, None, None)[:4]
    if weight is None or eps is None or call.kwargs or len(sizes) != 1:
        return None
    return Front(x, {"rms_norm": weight, "eps": float(eps)}, (call,))


def _gate_mul(value: Node) -> Front | None:
    """silu(gate) * up or gelu(gate) * up of one tensor's halves, silu and gelu in fp32."""
    for activated, up in _either(_call(value, aten.mul.Tensor)):
        activated = _unconverted(activated)
        gate, arguments = _silu(activated), {"silu_mul": True}
        if gate is None:
            gate, arguments = _gelu(activated) or (None, {})
        if gate is not None and _same_shape(gate, value):
            gate, up = _unconverted(gate), _unconverted(up)
            x = _whole(gate, up) or (_root(gate), _root(up))
            if isinstance(x, Node) or all(_only_for(part, value) for part in x):
                return Front(x, arguments, (gate, up, value))
    return None


def _only_for(node: Node, value: Node) -> bool:
    """Whether whatever reads a node does so on the way to `value`."""
    ahead = node < value and len(node.users) > 0
    return node is value or (ahead and all(_only_for(user, value) for user in node.users))


def _silu(activated: Node) -> Node | None:
    """gate, if this is silu(gate): inductor's own decomposition, in fp32, or the operator."""
    if (args := _call(activated, aten.silu.default)) is not None:
        return args[0]
    gate, below = _call(activated, aten.div.Tensor) or (None, None)
    exp, one = _call(below, aten.add.Tensor, aten.add.Scalar) or (None, None)
    (negated,) = _call(exp, aten.exp.default) or (None,)
    if _call(negated, aten.neg.default) == (gate,) and one == 1 and _is_fp32(gate):
        return gate
    for gate, factor in _either(_call(activated, aten.mul.Tensor)):
        if _call(factor, aten.sigmoid.default) == (gate,) and _is_fp32(gate):
            return gate
    return None


def _gelu(activated: Node) -> tuple[Node, dict[str, Any]] | None:
    """(gate, arguments), if this is gelu(gate): inductor's own decomposition, in fp32, or the operator."""
    if activated.target is aten.gelu.default:
        return activated.args[0], {"gelu_mul": activated.kwargs.get("approximate", "none")}
    half, factor = _call(activated, aten.mul.Tensor) or (None, None)
    gate, by = _call(half, aten.mul.Tensor) or (None, None)
    curve, one = _call(factor, aten.add.Tensor, aten.add.Scalar) or (None, None)
    (inner,) = _call(curve, aten.erf.default, aten.tanh.default) or (None,)
    argument, scale = _call(inner, aten.mul.Tensor) or (None, None)
    if (by, one) != (0.5, 1) or not _is_fp32(gate):
        return None
    if curve.target is aten.erf.default:
        return (
            (gate, {"gelu_mul": "none"})
            if argument is gate and isinstance(scale, float) and math.isclose(scale, math.sqrt(0.5))
            else None
        )
    first, cubic = _call(argument, aten.add.Tensor) or (None, None)
    cube, coefficient = _call(cubic, aten.mul.Tensor) or (None, None)
    square, last = _call(cube, aten.mul.Tensor) or (None, None)
    same = first is gate and last is gate and _call(square, aten.mul.Tensor) == (gate, gate)
    close = isinstance(scale, float) and math.isclose(scale, math.sqrt(2 / math.pi)) and coefficient == 0.044715
    return (gate, {"gelu_mul": "tanh"}) if same and close else None


def _whole(gate: Node, up: Node) -> Node | None:
    """The tensor [..., 2k] whose halves these are."""
    halves = _half(_root(gate)), _half(_root(up))
    if halves[0] is None or halves[1] is None or halves[0][0] is not halves[1][0]:
        return None
    whole, k = halves[0][0], _last(gate)
    return whole if (halves[0][1:], halves[1][1:]) == ((0, k), (k, 2 * k)) and _last(whole) == 2 * k else None


def _half(part: Node) -> tuple[Node, int, int] | None:
    """(tensor, first column, end) of a tensor's columns."""
    if (args := _call(part, aten.slice.Tensor)) is not None:
        whole, dim, start, end = (*args, None, None, None)[:4]
        columns = _last(whole)
        start, end = start or 0, columns if end is None else end
        if (args[4:] or (1,)) != (1,) or not all(isinstance(each, int) for each in (columns, start, end)):
            return None
        end = min(end, columns)
    elif (args := _call(part, operator.getitem)) is not None and _call(
        args[0], aten.split.Tensor, aten.split_with_sizes.default
    ):
        whole, sizes, *rest = args[0].args
        dim, width = rest[0] if rest else 0, _last(part)
        if not isinstance(width, int) or (not isinstance(sizes, int) and any(size != width for size in sizes)):
            return None
        start, end = args[1] * width, (args[1] + 1) * width
    else:
        return None
    return (_root(whole), start, end) if dim in (-1, _value(whole).dim() - 1) else None


add_producer(aten.mul.Tensor, _norm)
add_producer(aten.mul.Tensor, _gate_mul)
for _target in (aten.rms_norm.default, *([aten._fused_rms_norm.default] if hasattr(aten, "_fused_rms_norm") else [])):
    add_producer(_target, _whole_norm)
