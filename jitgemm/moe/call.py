"""The fused expert layer: the public call, its workspace, and its `torch.library` op.

Six launches at most. Each starts while the one before it ends: route, quantise (of few tokens both in one),
GEMM, gate and quantise, GEMM, combine. Sizes of the experts' parts live on the device alone, so that a CUDA graph can
be replayed with other routings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.activations.arguments import CODES, Outputs, activation_of
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import Activation, Gate, Prologue
from jitgemm.dtypes import REAL_TYPES
from jitgemm.gemm.problem import Gemm, Groups, Lhs, expected_rows_of
from jitgemm.gemm.run import GemmCall, run_grouped, weight_of_op
from jitgemm.kernel.formats import LHS_GROUP, MAX_ROWS, ceil_div
from jitgemm.moe.arguments import ExpertsCall, MaskedCall, Routing, check_call_once, check_weights
from jitgemm.moe.arguments import is_exact, make_gate, tokens_activation
from jitgemm.moe.kernel import GATHER_M
from jitgemm.moe.route import combine, combine_reference, route, route_reference, sort, sort_sent
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.tensors import TYPE_NAMES, check_device, check_dtype, check_flag, check_int, check_matrix, check_tensor
from jitgemm.tensors import check_written, take_rows
from jitgemm.weight.parts import PackedWeight

if TYPE_CHECKING:
    from jitgemm.weight.packed import Weight

_ALLOCATION = 512
"""PyTorch's caching allocator hands out multiples of so many bytes."""
Adapt = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fused_experts(
    x: torch.Tensor, w13: Weight, w2: Weight, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *,
    activation: str = "silu", order: str = "gate_up", limit: float | None = None, alpha: float | None = None,
    lhs_dtype: torch.dtype | None = None, affine: bool = False, scheme: str = "token", rotation: int = 0,
    expert_map: torch.Tensor | None = None, bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
    addend: torch.Tensor | None = None, batch_invariant: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
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
        swiglu_step  min(g * sigmoid(g), limit) * u               Step, with limit = 7
        situ         a * tanh(g / a) * sigmoid(g) * u             Kimi-K3, with a = alpha = 4 and limit = 25
        relu2        max(u, 0)^2                                  Nemotron; w13 is [inter, k], without gates

    Args:
        x: bfloat16, float16 or float32 [tokens, k], stride 1 along k, rows a multiple of 16 bytes apart; aligned so.
        w13: W4Weight or W8Weight of E experts [2 * inter, k], gate and up projections, E at most 1024.
        w2: the same, [n, inter]; the widths may differ. Each GEMM may add up in what its weight's `sums` say.
        topk_ids: int32 or int64 [tokens, top_k], contiguous: experts of each token. A choice that is none of 0..E-1 is
            skipped.
        topk_weights: float32, bfloat16 or float16 [tokens, top_k], contiguous.
        activation: see above.
        order: of w13's rows: "gate_up", all gates first, "up_gate", or "interleaved": gate, up, gate, up, ...
        limit: positive: g becomes min(g, limit) and u min(max(u, -limit), limit) before act; of swiglu_step g stays, of
            situ g stays and u becomes limit * tanh(u / limit). None for neither, and for relu2.
        alpha: of swiglu_oai, None for 1.702, and of situ.
        lhs_dtype: float8_e4m3fn or int8, what Q makes; None for what w13 was packed for, e4m3 if for both.
        affine: int8 with zero points.
        scheme: "token", a scale for each row, or "block", one for each row and 128 k; not affine.
        rotation: both weights' `rotation`: 128: Q rotates; 0: it does not.
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
        TypeError, ValueError: an argument is wrong, or x, topk_weights, a bias or addend requires grad and gradients
            are on; the message names it. out was not written.
        CacheMissError: a kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    check_flag("batch_invariant", batch_invariant)
    gate = make_gate(activation, order, limit, alpha)
    tokens = tokens_activation(w13, lhs_dtype, scheme, affine, rotation)
    rest = expert_map, bias13, bias2, addend, batch_invariant
    if not needs_dispatcher(x, x if out is None else out):
        return _run(ExpertsCall(x, w13, w2, topk_ids, topk_weights, gate, tokens, *rest, out))
    call = ExpertsCall(x, w13, w2, topk_ids, topk_weights, gate, tokens, *rest)
    result = torch.ops.jitgemm.fused_experts(*op_arguments(call))
    if out is None:
        return result
    check_matrix("out", out, (x.shape[0], w2.n), (TYPE_NAMES[x.dtype],), "as x is")
    check_device("out", out, "x", x.device)
    check_written("out", out)
    return out.copy_(result)


def fused_experts_reference(
    x: torch.Tensor, w13: Weight, w2: Weight, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *,
    activation: str = "silu", order: str = "gate_up", limit: float | None = None, alpha: float | None = None,
    lhs_dtype: torch.dtype | None = None, affine: bool = False, scheme: str = "token", rotation: int = 0,
    expert_map: torch.Tensor | None = None, bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`fused_experts` in plain PyTorch, on any device, which it waits for; fp64 except for the documented roundings."""
    gate = make_gate(activation, order, limit, alpha)
    tokens = tokens_activation(w13, lhs_dtype, scheme, affine, rotation)
    call = ExpertsCall(x, w13, w2, topk_ids, topk_weights, gate, tokens, expert_map, bias13, bias2, addend)
    call.check()
    return layer_reference(call)


def layer_reference(call: ExpertsCall) -> torch.Tensor:
    """`fused_experts` in plain PyTorch, for checked arguments.

    Both GEMMs, gate and combination in fp64. Rounded to x's type: what each GEMM returns, and the result; to fp32: what
    is quantised.
    """
    from jitgemm.activations.reference import gated, quantize_reference
    from jitgemm.gemm.exact import round_fp64, write_reference

    x, gate, activation = call.x, call.gate, call.activation
    offsets, row_index, inverse = route_reference(call.topk_ids, call.experts, call.expert_map)
    live = int(offsets[-1])
    groups, tokens = Groups(offsets, None, 0, live), row_index[:live].long()  # type: ignore[index]
    hidden, rows = x.new_empty((live, call.w13.n)), x.new_empty((live, call.w2.n))
    q, scale, zero = quantize_reference(x, activation)
    zero = None if zero is None else take_rows(zero, tokens)
    write_reference(Gemm(take_rows(q, tokens), take_rows(scale, tokens), zero, call.w13, hidden, call.bias13, groups))
    codes = quantize_reference(gated(hidden.double(), gate).float(), activation)
    write_reference(Gemm(*codes, call.w2, rows, call.bias2, groups))
    return round_fp64(combine_reference(rows, inverse, call.topk_weights, call.addend), x.dtype)


def fused_experts_workspace_bytes(
    tokens: int, top_k: int, w13: Weight, w2: Weight, *, dtype: torch.dtype = torch.bfloat16, affine: bool = False,
    scheme: str = "token",
) -> int:  # fmt: skip
    """Bytes of device memory that a call of `fused_experts` takes besides its arguments and its result.

    Both GEMMs' results share their memory, as the first is gone when the second is written. With E experts of
    [2 * inter, k] and [n, inter], m = tokens * top_k, and x of b bytes an element, inter for 2 * inter without gates ::

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
    block = activation_of(torch.int8, scheme, affine, schemes=("token", "block")).block
    for name, number, least in (("tokens", tokens, 0), ("top_k", top_k, 1)):
        if not least <= check_int(name, number) <= MAX_ROWS:
            raise ValueError(f"{name}: expected {least} to {MAX_ROWS}, got {number}")
    m = tokens * top_k
    parts = [4 * (experts + 1), 4 * m, 4 * m]  # routing
    t = m if m / experts >= GATHER_M else tokens
    parts += [t * w13.k, m * w2.k]  # codes
    if block:
        parts += [16 * ceil_div(rows, 4) * ceil_div(k, LHS_GROUP) for rows, k in ((t, w13.k), (m, w2.k))]
    else:
        parts += [4 * t, 4 * m] * (2 if affine else 1)  # scales and zero points
    parts.append(m * max(w13.n, w2.n) * dtype.itemsize)
    return sum(_ALLOCATION * ceil_div(part, _ALLOCATION) for part in parts)


def _run(call: ExpertsCall) -> torch.Tensor:
    """The call, directly or by its op."""
    check_call_once(call)
    out = call.new_out() if call.out is None else call.out
    if call.x.is_cuda and call.x.shape[0]:
        launch(call, out)
    elif call.x.shape[0]:
        out.copy_(layer_reference(call))
    return out


def launch(
    call: ExpertsCall, out: torch.Tensor, sent: Lhs | None = None, expected_m: float | None = None,
    adapt: Adapt | None = None,
) -> None:  # fmt: skip
    """The launches of a checked call, of at least one token.

    Args:
        out: where to write, whatever `call.out` is.
        sent: the tokens, quantised [tokens, k], as other ranks send them. Of `call.x` nothing is read then; it has the
            results' type and as many rows.
        expected_m: rows of an expert, as far as the host knows; None for what topk_ids say.
        adapt: given the first GEMM's result and the inverse of `route`, before the gate: may change that result in
            place, and returns the addend in the place of `call.addend`.
    """
    if expected_m is None:
        expected_m = call.topk_ids.numel() / (call.experts if call.expert_map is None else call.expert_map.numel())
    choices = call.topk_ids, call.experts, call.expert_map
    lhs: Outputs | Lhs
    if sent is None:
        routing, lhs = sort(call.x, call.activation, *choices, expected_m)
    else:
        routing, lhs = sort_sent(route(*choices), sent, expected_m)
    rows, addend = multiply(call, routing, lhs, expected_m, adapt)
    combine(rows, routing.inverse, call.topk_weights, out, addend=addend)


def multiply(
    call: ExpertsCall, routing: Routing, lhs: Outputs | Lhs, expected_m: float, adapt: Adapt | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What both GEMMs make of tokens, [choices, n], a row for each choice that is not skipped, and what is added to it.

    Of x only the type counts; adapt: as for `launch`.
    """
    (offsets, gather, inverse), w13, w2 = routing, call.w13, call.w2
    choices, expected_rows = inverse.numel(), expected_rows_of(call.experts, expected_m)
    # Where both write: the first one's result is gone when the second writes.
    memory = torch.empty(choices * max(w13.n, w2.n), dtype=call.x.dtype, device=call.x.device)
    hidden, rows = (memory[: choices * n].view(choices, n) for n in (w13.n, w2.n))
    q, scale, zero = lhs if len(lhs) == 3 else (*lhs, None)
    groups = Groups(offsets, gather, 0, expected_rows)
    run_grouped(GemmCall(q, scale, zero, w13, hidden, call.bias13, groups, call.batch_invariant))
    addend = call.addend if adapt is None else adapt(hidden, inverse)
    codes = quantize(QuantizeCall(hidden, call.activation, Prologue(gate=call.gate), row_count=offsets[-1:]))
    groups = Groups(offsets, None, 0, expected_rows)
    run_grouped(GemmCall(*codes, w2, rows, call.bias2, groups, call.batch_invariant))
    return rows, addend


# ---- torch.library ---------------------------------------------------------------------------------------------------


WEIGHTS_SCHEMA = ", ".join(
    f"Tensor blocks{i}, Tensor? channel_scale{i}, Tensor? row_sum{i}, int n{i}, int k{i}, str format{i}"
    for i in (13, 2)
)
HOW_SCHEMA = "str activation, str order, float? limit, float alpha, ScalarType lhs_dtype, bool affine"
"""Gate and activation."""
LAST_SCHEMA = "bool exact=False, int rotation=0"
CALL_SCHEMA = (
    f"Tensor x, {WEIGHTS_SCHEMA}, Tensor topk_ids, Tensor topk_weights, {HOW_SCHEMA}, Tensor? expert_map, Tensor? "
    f"bias13, Tensor? bias2, Tensor? addend, bool batch_invariant, bool block=False, {LAST_SCHEMA}"
)


def op_arguments(call: ExpertsCall) -> tuple[Any, ...]:
    """What an op takes of a call without out, as CALL_SCHEMA has it."""
    for name in ("x", "topk_ids", "topk_weights"):
        check_tensor(name, getattr(call, name))
    weights, how, last = op_layer(call)
    rest = call.expert_map, call.bias13, call.bias2, call.addend, call.batch_invariant
    return call.x, *weights, call.topk_ids, call.topk_weights, *how, *rest, *last


def call_of_op(x: torch.Tensor, *given: Any) -> ExpertsCall:
    """The call of what `op_arguments` gave."""
    w13, w2, *how = layer_of_op(given[:12], given[14:20], *given[25:])
    return ExpertsCall(x, w13, w2, *given[12:14], *how, *given[20:25])


def op_layer(call: ExpertsCall | MaskedCall) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
    """What an op takes of a call's weights, as WEIGHTS_SCHEMA has it, of gate and activation, as HOW_SCHEMA, and last:
    by block?, and as LAST_SCHEMA. Raises TypeError or ValueError for what are no weights of a layer."""
    (dtype, scheme, affine, rotation), gate = call.activation, call.gate
    check_weights(call.w13, call.w2, rotation=rotation)
    weights = [(w.blocks, w.channel_scale, w.row_sum, w.n, w.k, w.format.name) for w in (call.w13, call.w2)]
    how = *gate.keywords.values(), CODES[dtype], affine
    return [*weights[0], *weights[1]], how, (scheme == "block", is_exact(call.w13, call.w2), rotation)


def layer_of_op(
    weights: Sequence[Any], how: Sequence[Any], block: bool = False, exact: bool = False, rotation: int = 0
) -> tuple[PackedWeight, PackedWeight, Gate, Activation]:
    """(w13, w2, gate, activation) of what `op_layer` gave."""
    w13, w2 = (weight_of_op(*weights[i : i + 6], exact=exact) for i in (0, 6))
    *gate, lhs_dtype, affine = how
    activation = tokens_activation(w13, lhs_dtype, "block" if block else "token", affine, rotation)
    return w13, w2, make_gate(*gate), activation


def fake(call: ExpertsCall) -> torch.Tensor:
    """What tracers are given for a call's result."""
    call.check()
    return call.new_out()


define_op(f"fused_experts({CALL_SCHEMA}) -> Tensor", _run, fake, call_of_op)
