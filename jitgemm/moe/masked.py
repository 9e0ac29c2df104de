"""The experts of a mixture over tokens that other ranks sent sorted: max_m rows for every expert, few of them live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgemm.activations.arguments import Outputs
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import NO_PROLOGUE, Prologue
from jitgemm.gemm.problem import X, X_SCALE, X_ZERO, Groups, Lhs, as_rows, expected_rows_of, split_lhs
from jitgemm.gemm.run import GemmCall, run_grouped
from jitgemm.moe.arguments import MaskedCall, check_call_once, check_weights, make_gate, tokens_activation
from jitgemm.moe.call import HOW_SCHEMA, LAST_SCHEMA, WEIGHTS_SCHEMA, layer_of_op, op_layer
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.tensors import check_flag, check_tensor
from jitgemm.weight.parts import check_rotated

if TYPE_CHECKING:
    from jitgemm.weight.packed import Weight


def fused_experts_masked(
    x: torch.Tensor | Lhs, w13: Weight, w2: Weight, out: torch.Tensor, masked_m: torch.Tensor, expected_m: float, *,
    activation: str = "silu", order: str = "gate_up", limit: float | None = None, alpha: float | None = None,
    lhs_dtype: torch.dtype | None = None, affine: bool = False, scheme: str = "token", rotation: int = 0,
    bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None, batch_invariant: bool = False,
) -> None:  # fmt: skip
    """out[e, i] = w2[e] · Q(act(g, u)) + bias2[e] for i < masked_m[e], where (g, u) = w13[e] · Q(x[e, i]) + bias13[e].

    DeepEP's low-latency form between its dispatch and its combine, which weighs and sums. Four launches: quantise,
    GEMM, gate and quantise, GEMM. None of them touches rows from masked_m[e] on, whose numbers stay on the device, so
    that a CUDA graph can be replayed with others.

    Args:
        x: bfloat16, float16 or float32 [E, max_m, k], an expert max_m row strides behind the one before; or tokens that
            are quantised, as the dispatch may send them: (q, scale), or (q, scale, zero), as
            `m_grouped_gemm_w4a8_nt_masked` takes them, q of lhs_dtype, with a scale for each token, or one for each
            token and 128 k whatever `scheme` is.
        w13, w2: as `fused_experts` takes them, of E experts.
        out: bfloat16, float16 or float32 [E, max_m, n], strides as x; both GEMMs' results are rounded to its type. x
            itself for in place, else memory of its own.
        masked_m: int32 [E], contiguous: live rows of each expert, clamped to 0..max_m on the device.
        expected_m: live rows of an expert, as expected, by which kernels are chosen. Any value gives right results.
        activation, order, limit, alpha, lhs_dtype, affine, scheme, bias13, bias2, batch_invariant: as `fused_experts`.
        rotation: as `fused_experts`; tokens that are quantised are then `jitgemm.Rotated`.

    Raises: as `fused_experts`.
    """
    check_flag("batch_invariant", batch_invariant)
    gate = make_gate(activation, order, limit, alpha)
    tokens = tokens_activation(w13, lhs_dtype, scheme, affine, rotation)
    experts = getattr(w13, "experts", None) or check_weights(w13, w2)
    expected_rows = expected_rows_of(experts, expected_m)
    lhs: Any = x, None, None
    if isinstance(x, (tuple, list)):
        check_rotated(x, rotation, "x")
        lhs = split_lhs(x, "x")
    codes, x_scale, x_zero = lhs
    last = gate, tokens, bias13, bias2, batch_invariant
    call = MaskedCall(codes, x_scale, x_zero, w13, w2, out, masked_m, expected_rows, *last)
    if not needs_dispatcher(codes, out):
        _run(call)
        return
    weights, how, flags = op_layer(call)
    for name, tensor in (("x", codes), ("out", out), ("masked_m", masked_m)):
        check_tensor(name, tensor)
    rest = bias13, bias2, batch_invariant
    torch.ops.jitgemm.fused_experts_masked(*lhs, *weights, out, masked_m, expected_rows, *how, *rest, *flags)


def _run(call: MaskedCall) -> None:
    """The call, directly or by its op."""
    check_call_once(call)
    (experts, max_m, _), w13, w2 = call.out.shape, call.w13, call.w2
    given = (X, call.x, "k"), (X_SCALE, call.x_scale, ""), (X_ZERO, call.x_zero, ""), ("out", call.out, "n")
    x, x_scale, x_zero, out = (
        None if each is None else as_rows(name, each, experts, max_m, columns) for name, each, columns in given
    )
    lhs: Any = (x, x_scale, x_zero) if x_scale is not None else _quantise(call, x, NO_PROLOGUE)
    hidden = torch.empty((experts * max_m, w13.n), dtype=call.out.dtype, device=call.out.device)
    # 0 would stand for offsets; where no expert can have a row, any other number serves.
    groups = Groups(call.masked_m, None, max(max_m, 1), call.expected_rows)
    run_grouped(GemmCall(*(*lhs, w13, hidden, call.bias13, groups, call.batch_invariant)))
    codes = _quantise(call, hidden, Prologue(gate=call.gate))
    run_grouped(GemmCall(*codes, w2, out, call.bias2, groups, call.batch_invariant))  # type: ignore[arg-type]


def _quantise(call: MaskedCall, rows: Any, prologue: Prologue) -> Outputs:
    q, scale, zero = quantize(QuantizeCall(rows, call.activation, prologue, row_count=call.masked_m))
    return q, scale.unflatten(0, call.out.shape[:2]) if call.activation.block else scale, zero


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _of_op(*given: Any) -> MaskedCall:
    w13, w2, *how = layer_of_op(given[3:15], given[18:24], *given[27:])
    return MaskedCall(*(*given[:3], w13, w2, *given[15:18], *how, *given[24:27]))


define_op(
    f"fused_experts_masked(Tensor x, Tensor? x_scale, Tensor? x_zero, {WEIGHTS_SCHEMA}, Tensor(a!) out, Tensor "
    f"masked_m, SymInt expected_rows, {HOW_SCHEMA}, Tensor? bias13, Tensor? bias2, bool batch_invariant, bool block, "
    f"{LAST_SCHEMA}) -> ()",
    _run,
    MaskedCall.check,
    _of_op,
)
