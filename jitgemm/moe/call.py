"""The fused expert layer: the public call, its workspace, and its `torch.library` op.

Six launches at most, each of which starts while the one before it ends: route, quantise (of few tokens both in one),
GEMM, gate and quantise, GEMM, combine. Sizes of the experts' parts live on the device alone, so that a CUDA graph can
be replayed with other routings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from jitgemm.activations.arguments import Inputs, Outputs
from jitgemm.activations.call import quantize
from jitgemm.activations.scheme import Gate
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.gemm.problem import ANY, Lhs, split_lhs
from jitgemm.gemm.call import contiguous
from jitgemm.kernel.formats import LHS_GROUP, MAX_ROWS, ceil_div, format_named
from jitgemm.moe.arguments import LAYER_POINTERS, Layer, check_arguments, check_out, check_weights, make_gate
from jitgemm.moe.kernel import GATHER_M
from jitgemm.moe.route import combine, route, route_and_quantize
from jitgemm.runtime.checks import address_of, check_addresses
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.tensors import check_dtype, check_flag, check_int, check_tensor, take_rows
from jitgemm.weight.packed import AnyWeight, Weight, as_weight
from jitgemm.weight.parts import PackedWeight

_ALLOCATION = 512
"""PyTorch's caching allocator hands out multiples of so many bytes."""


def fused_experts(
    x: torch.Tensor,
    w13: Weight,
    w2: Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "silu",
    order: str = "gate_up",
    limit: float | None = None,
    alpha: float = 1.702,
    lhs_dtype: torch.dtype | None = None,
    affine: bool = False,
    scheme: str = "token",
    expert_map: torch.Tensor | None = None,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts of a mixture, from tokens and their choices to results, on the current stream.

    ::

        out[t] = addend[t] + sum over i of topk_weights[t, i] * y[t, i]         choices that are skipped left out
        y[t, i] = w2[e] · Q(act(g, u)) + bias2[e]                               e the expert that topk_ids[t, i] means
        (g, u)  = w13[e] · Q(x[t]) + bias13[e]

    Q quantises to 8 bits, a scale for each row, or for each row and 128 k, as `quantize_activations`. Both products are
    rounded to x's type, act is fp32 and not rounded, the sum is fp32, in the order of i, and rounded once. The same
    bits in every run.

    ::

        activation   act(g, u)
        silu         g * sigmoid(g) * u
        gelu         g * Phi(g) * u                               Phi the normal distribution's, "erf"
        gelu_tanh    the same with its approximation by tanh
        swiglu_oai   g * sigmoid(alpha * g) * (u + 1)             gpt-oss, with limit = 7

    Args:
        x: bfloat16, float16 or float32 [tokens, k], stride 1 along k, rows a multiple of 16 bytes apart; aligned so.
        w13: W4Weight or W8Weight of E experts [2 * inter, k], gate and up projections, E at most 1024.
        w2: the same, [n, inter]; the widths may differ.
        topk_ids: int32 or int64 [tokens, top_k], contiguous: experts of each token. A choice that is none of 0..E-1 is
            skipped.
        topk_weights: float32, bfloat16 or float16 [tokens, top_k], contiguous.
        activation: see above.
        order: of w13's rows: "gate_up", all gates first, "up_gate", or "interleaved": gate, up, gate, up, ...
        limit: positive: g becomes min(g, limit) and u min(max(u, -limit), limit) before act; None for neither.
        alpha: of swiglu_oai.
        lhs_dtype: float8_e4m3fn or int8, what Q makes; None for what w13 was packed for, e4m3 if for both.
        affine: int8 with zero points.
        scheme: "token", a scale for each row, or "block", one for each row and 128 k; not affine.
        expert_map: int32 [global experts], at most 8192, for expert parallelism: topk_ids count the experts of all
            ranks, and expert_map holds this rank's number of each, or -1 to skip its choices.
        bias13, bias2: bfloat16 or float32 [E, 2 * inter] and [E, n], contiguous, or None.
        addend: of the result's shape and x's type, rows a multiple of 16 bytes apart: a shared expert's result, or a
            residual; None for zeros.
        batch_invariant: a token's result has the same bits whatever the other tokens are. Costs time, as for GEMMs.
        out: where to write: of x's type, [tokens, n], rows a multiple of 16 bytes apart; addend or x itself for in
            place, else memory of its own; None for a new tensor.

    All on one device. On CUDA: compute capability 9.0; memory for what is in between comes from PyTorch's allocator
    (`fused_experts_workspace_bytes`) and goes back to it, so that calls on other streams and in CUDA graphs never share
    it. On the CPU: `layer_reference`, in fp64.

    Returns:
        out, or a new tensor, [tokens, n] of x's type.

    Raises:
        TypeError, ValueError: an argument is wrong, or x, topk_weights, a bias or addend requires grad and gradients are
            on; the message names it. out was not written.
        CacheMissError: a kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    check_flag("affine", affine)
    check_flag("batch_invariant", batch_invariant)
    layer = _layer(
        x, w13, w2, topk_ids, topk_weights, make_gate(activation, order, limit, alpha), lhs_dtype, affine, expert_map,
        bias13, bias2, addend, batch_invariant, by_block(scheme),
    )  # fmt: skip
    if needs_dispatcher(x, x if out is None else out):
        result = _call_op(layer)
        if out is None:
            return result
        check_out(check_tensor("out", out), layer)
        return out.copy_(result)
    return _run(layer, out)


def fused_experts_reference(
    x: torch.Tensor,
    w13: Weight,
    w2: Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "silu",
    order: str = "gate_up",
    limit: float | None = None,
    alpha: float = 1.702,
    lhs_dtype: torch.dtype | None = None,
    affine: bool = False,
    scheme: str = "token",
    expert_map: torch.Tensor | None = None,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fused_experts` in plain PyTorch, on any device, which it waits for; fp64 but for the documented roundings."""
    from jitgemm.moe.reference import layer_reference

    check_flag("affine", affine)
    layer = _layer(
        x, w13, w2, topk_ids, topk_weights, make_gate(activation, order, limit, alpha), lhs_dtype, affine, expert_map,
        bias13, bias2, addend, False, by_block(scheme),
    )  # fmt: skip
    check_arguments(layer)
    return layer_reference(layer)


def fused_experts_workspace_bytes(
    tokens: int,
    top_k: int,
    w13: Weight,
    w2: Weight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    affine: bool = False,
    scheme: str = "token",
) -> int:
    """Bytes of device memory that a call of `fused_experts` takes beside its arguments and its result.

    Both GEMMs' results share their memory, as the first is gone when the second is written. With E experts of
    [2 * inter, k] and [n, inter], m = tokens * top_k, and x of b bytes an element ::

        b * m * max(2 * inter, n) + m * inter + t * k + 4 * (3 * m + t + E + 1), more 4 * (m + t) affine

    each of these tensors rounded up to 512 bytes. t is tokens, or m from 4 rows an expert on; calls with an expert_map
    may take less. By block, each of t has a scale for every 128 k, and of m one for every 128 of inter, both t and m
    rounded up to 4.

    Args:
        tokens, top_k: shape of topk_ids.
        w13, w2: as for `fused_experts`.
        dtype: of x.
        affine, scheme: as for `fused_experts`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    experts = check_weights(w13, w2)
    check_dtype("dtype", dtype, REAL_TYPES)
    check_flag("affine", affine)
    for name, number, least in (("tokens", tokens, 0), ("top_k", top_k, 1)):
        if not least <= check_int(name, number) <= MAX_ROWS:
            raise ValueError(f"{name}: expected {least} to {MAX_ROWS}, got {number}")
    m = tokens * top_k
    parts = [4 * (experts + 1), 4 * m, 4 * m]  # routing
    t = m if m / experts >= GATHER_M else tokens
    parts += [t * w13.k, m * w2.k]  # codes
    if by_block(scheme):
        parts += [16 * ceil_div(rows, 4) * ceil_div(k, LHS_GROUP) for rows, k in ((t, w13.k), (m, w2.k))]
    else:
        parts += [4 * t, 4 * m] * (2 if affine else 1)  # scales and zero points
    parts.append(m * max(w13.n, w2.n) * dtype.itemsize)
    return sum(_ALLOCATION * ceil_div(part, _ALLOCATION) for part in parts)


def by_block(scheme: str) -> bool:
    if not isinstance(scheme, str) or scheme not in ("token", "block"):
        raise ValueError(f"scheme: expected one of ('token', 'block'), got {scheme!r}")
    return scheme == "block"


def _layer(
    x: torch.Tensor,
    w13: AnyWeight,
    w2: AnyWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: Gate,
    lhs_dtype: torch.dtype | None,
    *rest: Any,
) -> Layer:
    return Layer(x, w13, w2, topk_ids, topk_weights, gate, lhs_dtype_of(w13, lhs_dtype), *rest)


def lhs_dtype_of(w13: AnyWeight, lhs_dtype: torch.dtype | None) -> torch.dtype:
    """What tokens are quantised to where the caller says None."""
    if lhs_dtype is not None:
        return lhs_dtype
    types = w13.format.lhs_types if isinstance(w13, (Weight, PackedWeight)) else LHS_TYPES  # the checks say what it is
    return torch_dtype(types[0])


def _run(layer: Layer, out: torch.Tensor | None) -> torch.Tensor:
    """The call, directly or by its op."""
    x, w13, w2, _, _, gate, lhs_dtype, affine, expert_map, bias13, bias2, addend, batch_invariant, block = layer
    check_tensor("x", x)
    tensors = layer.tensors if out is None else [*layer.tensors, out]
    try:
        # What is new cannot overlap: of its own launches each checks its addresses.
        addresses = None if out is None else tuple(map(address_of, layer.operands(out)))
        key = (
            "experts", addresses, w13.plan_key, w2.plan_key, gate, lhs_dtype, affine, expert_map is None, bias13 is None,
            bias2 is None, addend is None, batch_invariant, block,
            torch.is_grad_enabled(),
        )  # fmt: skip
        checked = this_thread.cache.find_plan(key, tensors)
    except (AttributeError, TypeError):  # not what it should be: the checks say what
        checked = None
    if checked is None:
        check_arguments(layer)
        if out is not None:
            check_out(out, layer)
        check_addresses(LAYER_POINTERS, layer.operands(out))
        this_thread.cache.add_plan(key, tensors, True)
    if out is None:
        out = layer.new_out()
    if x.shape[0] == 0:
        return out
    if x.is_cuda:
        _launch(layer, out)
    else:
        from jitgemm.moe.reference import layer_reference

        out.copy_(layer_reference(layer._replace(w13=as_weight(w13), w2=as_weight(w2))))
    return out


def _launch(layer: Layer, out: torch.Tensor) -> None:
    x, _, _, topk_ids, _, _, dtype, affine, expert_map = layer[:9]
    everywhere = layer.experts if expert_map is None else expert_map.numel()
    expected_m = topk_ids.numel() / everywhere

    tokens = Inputs(x, dtype, False, affine, None, None, None, None, 0.0, None, block=layer.block)
    gather: torch.Tensor | None  # by the GEMM
    if expected_m >= GATHER_M:
        offsets, row_index, inverse = route(topk_ids, layer.experts, expert_map=expert_map)
        quantised, gather = quantize(tokens._replace(row_count=offsets[-1:], row_index=row_index)), None
    else:
        (offsets, gather, inverse), quantised = route_and_quantize(tokens, topk_ids, layer.experts, expert_map)
    _multiply(layer, _lhs(quantised), offsets, inverse, gather, expected_m, out)


def run_quantised(layer: Layer, lhs: Lhs, expected_m: float, out: torch.Tensor) -> None:
    """The layer of tokens that are quantised, as other ranks send them; checks no more than its calls do.

    Args:
        layer: with an x of the results' type and as many rows as there are tokens, which is not read; at least one.
        lhs: the tokens, [tokens, k].
        expected_m: rows of an expert.
    """
    offsets, row_index, inverse = route(layer.topk_ids, layer.experts)
    gather: torch.Tensor | None = row_index
    if expected_m >= GATHER_M:  # indices behind the last row say nothing
        rows = row_index.long().clamp(0, layer.x.shape[0] - 1)
        x, scale, zero = split_lhs(lhs)
        lhs, gather = _lhs((take_rows(x, rows), scale[rows], None if zero is None else zero[rows])), None
    _multiply(layer, lhs, offsets, inverse, gather, expected_m, out)


def _multiply(
    layer: Layer,
    lhs: Lhs,
    offsets: torch.Tensor,
    inverse: torch.Tensor,
    gather: torch.Tensor | None,
    expected_m: float,
    out: torch.Tensor,
) -> None:
    """Both GEMMs, what is between them and the sum; gather: by which the first GEMM takes rows of lhs, or None."""
    x, w13, w2, topk_ids, topk_weights, gate, dtype, affine, _, bias13, bias2, addend, batch_invariant, block = layer
    choices = topk_ids.numel()
    memory = torch.empty(choices * max(w13.n, w2.n), dtype=x.dtype, device=x.device)
    hidden, rows = (memory[: choices * n].view(choices, n) for n in (w13.n, w2.n))
    contiguous(ANY, lhs, w13, hidden, offsets, bias13, gather, expected_m, batch_invariant)
    made = Inputs(hidden, dtype, False, affine, None, None, gate, None, 0.0, None, offsets[-1:], block)
    contiguous(ANY, _lhs(quantize(made)), w2, rows, offsets, bias2, None, expected_m, batch_invariant)
    combine(rows, inverse, topk_weights, out, addend=addend)


def _lhs(outputs: Outputs) -> Lhs:
    q, scale, zero = outputs
    return (q, scale) if zero is None else (q, scale, zero)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _call_op(layer: Layer) -> torch.Tensor:
    check_weights(layer.w13, layer.w2)
    check_dtype("lhs_dtype", layer.lhs_dtype, LHS_TYPES)
    x, w13, w2, topk_ids, topk_weights, gate, *rest = layer
    for name in ("x", "topk_ids", "topk_weights"):
        check_tensor(name, getattr(layer, name))
    return torch.ops.jitgemm.fused_experts(x, *op_weights(w13, w2), topk_ids, topk_weights, *op_gate(gate), *rest)


WEIGHTS_SCHEMA = ", ".join(
    f"Tensor blocks{i}, Tensor? channel_scale{i}, Tensor? row_sum{i}, int n{i}, int k{i}, str format{i}"
    for i in (13, 2)
)
GATE_SCHEMA = "str activation, str order, float? limit, float alpha"


def op_weights(w13: AnyWeight, w2: AnyWeight) -> list[Any]:
    """What an op takes of both, as WEIGHTS_SCHEMA has it."""
    parts = [(w.blocks, w.channel_scale, w.row_sum, w.n, w.k, w.format.name) for w in (w13, w2)]
    return [*parts[0], *parts[1]]


def weights_of_op(arguments: Sequence[Any]) -> tuple[PackedWeight, PackedWeight]:
    """w13 and w2 of what `op_weights` gave."""
    w13, w2 = (PackedWeight._make((*parts[:5], format_named(parts[5]))) for parts in (arguments[:6], arguments[6:]))
    return w13, w2


def op_gate(gate: Gate) -> tuple[Any, ...]:
    """What an op takes of it, as GATE_SCHEMA has it, and `make_gate`."""
    return gate.kind, gate.order, None if gate.limit == math.inf else gate.limit, gate.alpha


def _op_layer(x: torch.Tensor, *arguments: Any) -> Layer:
    w13, w2 = weights_of_op(arguments[:12])
    topk_ids, topk_weights, *gate = arguments[12:18]
    return Layer(x, w13, w2, topk_ids, topk_weights, make_gate(*gate), *arguments[18:])


def _op(*arguments: Any) -> torch.Tensor:
    return _run(_op_layer(*arguments), None)


def _fake_op(*arguments: Any) -> torch.Tensor:
    layer = _op_layer(*arguments)
    check_arguments(layer)
    return layer.new_out()


define_op(
    f"fused_experts(Tensor x, {WEIGHTS_SCHEMA}, Tensor topk_ids, Tensor topk_weights, {GATE_SCHEMA}, "
    "ScalarType lhs_dtype, bool affine, Tensor? expert_map, Tensor? bias13, Tensor? bias2, Tensor? addend, bool batch_invariant, "
    "bool block=False) -> Tensor",
    _op,
    _fake_op,
)
