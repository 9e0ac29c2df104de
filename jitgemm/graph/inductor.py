"""An inductor pass that folds norm, gate and residual addition into the quantiser behind them.

It stands among inductor's own patterns, next to whatever a user or an engine installs as a custom pass. Of each
`torch.ops.jitgemm.quantize_activations` it looks at what made the input: `PRODUCERS` says for which operators it knows
how. Structures other than these are left alone. Quantisers that quantise one tensor in the same way become one.

A fusion leaves out the rounding to x's type between norm or gate and quantiser, as inductor does between the pointwise
operators that it fuses; under its `emulate_precision_casts` there is none. A value that anything but quantisers reads,
such as a router, stays: its own kernel would run in any case.

Knows the ops of this package by name, and torch.fx; nothing here imports inductor before a compiler has loaded it.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import sys
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from jitgemm.activations.scheme import Prologue
from jitgemm.graph.producers import PRODUCERS, Fold, Producer, call_of, converts, either, is_tensor, only_for
from jitgemm.graph.producers import readers_of, root_of, same_shape, types_of, value_of

aten = torch.ops.aten


def add_producer(target: Any, producer: Producer) -> None:
    """From now on `producer` is asked about each result of the operator `target` that a quantiser reads."""
    PRODUCERS.setdefault(target, []).append(producer)
    _State.key = None


# ---- registration ----------------------------------------------------------------------------------------------------

_CONFIG, _POST_GRAD = "torch._inductor.config", "torch._inductor.fx_passes.post_grad"


class _State:
    registered = False
    key: str | None = None


def register() -> None:
    """Puts the pass among inductor's patterns once inductor is loaded; called whenever an op of jitgemm is traced.

    Whoever compiles traces twice: Dynamo, maybe with inductor's configuration alone, and then AOTAutograd on inductor's
    behalf. Between them caches of compiled graphs are looked up, whose keys must tell passes of different versions
    apart: inductor hashes its configuration, and that has one entry that is there to say what else a graph depends on.
    """
    config: Any = sys.modules.get(_CONFIG)
    if config is not None and _State.key is None:
        modules = {part.__module__ for part in (fuse, Fold, Prologue, *itertools.chain(*PRODUCERS.values()))}
        files = sorted(str(sys.modules[module].__file__) for module in modules)
        _State.key = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
        noted = {**config.unsafe_marked_cacheable_functions, __name__: _State.key}
        config.unsafe_marked_cacheable_functions = noted
    if not _State.registered and hasattr(sys.modules.get(_POST_GRAD), "pass_patterns"):
        from torch._inductor.fx_passes.post_grad import pass_patterns
        from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern

        _State.registered = True
        pattern = CallFunctionVarArgs(torch.ops.jitgemm.quantize_activations.default)
        for patterns, rewrite in zip(pass_patterns, (fuse, add_residual)):
            register_graph_pattern(pattern, pass_dict=patterns)(
                lambda match, *_, rewrite=rewrite, **__: rewrite(match.nodes[0])
            )


# ---- the pass --------------------------------------------------------------------------------------------------------


def fuse(quantiser: Node) -> None:
    """Rewrites the quantisers that read what this one reads, where that makes fewer kernels."""
    value = root_of(quantiser.args[0], converts)
    if not is_tensor(value):
        return
    readers = list(readers_of(value, converts))
    exact = getattr(sys.modules.get(_CONFIG), "emulate_precision_casts", False)
    fold = None if exact or not all(map(_plain, readers)) else _fold(value)
    same_work: dict[Any, list[Node]] = {}
    for reader in filter(_is_quantiser, readers):
        arguments = tuple(_arguments(reader).items())[1:]
        same_work.setdefault((_region(reader), types_of(reader.args[0]), *arguments), []).append(reader)
    for same in sorted(same_work.values(), key=min):
        first = min(same)
        made = None if fold is None else _fused(first, fold)
        for node in same:
            if made is not None or node is not first:
                node.replace_all_uses_with(made or first)
                _erase(node)
        if made is not None and fold is not None and fold.sum is not None:  # which the others normalise
            fold = Fold(_read_sum(made, fold.sum), fold.prologue._replace(residual=None), ())


def add_residual(quantiser: Node) -> None:
    """Lets a quantiser with a norm add what it normalises, and write the sum, where that saves a kernel.

    It does unless inductor computes one of the two in the addition's kernel. Runs when all quantisers are fused, as
    what they read is no longer part of anybody's kernel.
    """
    arguments = _arguments(quantiser)
    total = root_of(arguments["x"])
    parts = next(either(call_of(total, aten.add.Tensor)), None)
    if parts is None or arguments["rms_norm"] is None:
        return
    same = all(same_shape(part, total) and value_of(part).dtype == value_of(total).dtype for part in parts)
    if same and parts[0] is not parts[1] and all(map(_is_stored, parts)):
        fold = Fold(parts[0], Prologue(residual=parts[1]), (total,), total)
        made = _fused(quantiser, fold)
        if made is not None:
            quantiser.replace_all_uses_with(made)
            _erase(quantiser)
            _read_sum(made, total)


def _is_stored(part: Node) -> bool:
    """Whether a tensor is in memory in any case: an input, an operator's that is not inductor's, or read by one."""
    root = root_of(part)
    maker = root.args[0] if root.target is operator.getitem else root
    if maker.op == "placeholder" or any(
        getattr(user.target, "namespace", "") == "jitgemm" for user in readers_of(root)
    ):
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
            written.meta["val"] = flat.meta["val"].view(torch.fx.map_arg(shape, value_of))
    total.replace_all_uses_with(written)
    _erase(total)
    return written


def _sizes(node: Node) -> list[Any] | None:
    """A tensor's sizes for a graph, None if no node of it holds them."""
    sizes = list(node.meta["val"].shape)
    if all(isinstance(size, int) for size in sizes):
        return sizes
    for view in (node, *node.all_input_nodes):
        if view.target in (aten.reshape.default, aten.view.default) and same_shape(view, node):
            return view.args[1]
    return None


def _fold(value: Node) -> Fold | None:
    made_by = value.target
    if made_by is operator.getitem:
        made_by = value.args[0].target
        if made_by in _FUNCTIONALISED:
            made_by = value.args[0].args[0]
    return next((fold for producer in PRODUCERS.get(made_by, ()) if (fold := producer(value)) is not None), None)


def _fused(quantiser: Node, fold: Fold) -> Node | None:
    """A quantiser with that fold, ahead of this one; None if the op takes no such arguments."""
    arguments = _arguments(quantiser) | fold.prologue.keywords
    outs: Any = [_gemm_out(root_of(part)) for part in fold.x] if isinstance(fold.x, tuple) else None
    if any(_region(node) != _region(quantiser) for node in fold.reads):
        return None
    if outs:
        a, b = outs
        if a is None or b is None or a is b or a.kwargs != b.kwargs or not same_shape(a, b):
            return None
    if (total := fold.sum) is not None:  # whatever else reads it can wait for the quantiser
        later = all(user > quantiser or only_for(user, quantiser) for user in total.users)
        if not later or (total.meta["val"].dim() != 2 and _sizes(total) is None):
            return None
    arguments["x"] = None if outs else root_of(fold.x)
    wide = [name for name in ("x", "residual") if isinstance(arguments.get(name), Node)]
    values: dict[str, Any] = {name: value_of(argument) for name, argument in arguments.items()}
    op = torch.ops.jitgemm.add_quantize_activations if "residual" in wide else torch.ops.jitgemm.quantize_activations
    taken = [argument.name for argument in op.default._schema.arguments]
    arguments, values = ({name: each[name] for name in taken} for each in (arguments, values))
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
    args = call_of(result, operator.getitem)
    if not args or args[1] != 1:
        return None
    gemm: Any = args[0]
    if gemm.target is not torch.ops.higher_order.auto_functionalized_v2:
        return None
    extra = {name: value for name, value in gemm.kwargs.items() if name.startswith("_")}
    out = (extra.pop("_all_bases", None) or [None])[0]
    if gemm.args != (torch.ops.jitgemm.gemm_w4a8_nt.default,) or extra != {"_out_base_index": 0}:
        return None
    alone = isinstance(out, Node) and out.target is aten.empty.memory_format and len(out.users) == len(gemm.users) == 1
    return out if alone and len(out.args[0]) == 2 else None


def _side_by_side(outs: list[Node], fake: Any) -> Node:
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
        extra = {"_out_slice_dim": 1, "_out_slice_start": start, "_out_slice_end": start + n}
        (result,) = gemm.users
        old = gemm.kwargs["_all_bases"][0]
        gemm.kwargs = {**gemm.kwargs, **extra, "_all_bases": [out]}
        with fake.fake_mode:  # a memory of its own, as what is written in place is told from that
            result.meta["val"] = torch.empty_like(fake)
        gemm.meta["val"] = (*gemm.meta["val"][:1], result.meta["val"])
        if "eager_input_vals" in gemm.meta:
            args, kwargs = gemm.meta["eager_input_vals"]
            _note_inputs(gemm, args, {**kwargs, **extra, "_all_bases": type(kwargs["_all_bases"])([fake])})
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

_FUNCTIONALISED = torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2


def _is_quantiser(node: Node) -> bool:
    return node.target is torch.ops.jitgemm.quantize_activations.default


def _plain(node: Node) -> bool:
    """Whether this is a quantiser that computes nothing first."""
    return _is_quantiser(node) and not any(_arguments(node)[name] for name in ("silu_mul", "gelu_mul", "rms_norm"))


def _arguments(quantiser: Node) -> dict[str, Any]:
    """All arguments of the op by name, in its order."""
    schema = torch.ops.jitgemm.quantize_activations.default._schema.arguments
    passed = dict(zip((argument.name for argument in schema), quantiser.args)) | quantiser.kwargs
    return {each.name: passed.get(each.name, each.default_value) for each in schema}


def _region(node: Node) -> int:
    """Between which writes of the graph a node runs."""
    from torch._inductor.pattern_matcher import get_mutation_region_id

    return get_mutation_region_id(node.graph, node)
