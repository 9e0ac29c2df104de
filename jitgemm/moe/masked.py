"""The experts of a mixture over tokens that other ranks sent sorted: max_m rows for every expert, few of them live."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.activations.arguments import Inputs
from jitgemm.activations.call import quantize
from jitgemm.activations.scheme import Gate
from jitgemm.dtypes import REAL_TYPES
from jitgemm.gemm.problem import ANY, Lhs, split_lhs
from jitgemm.gemm.call import expected_rows_of, masked
from jitgemm.moe.arguments import MASKED_POINTERS, check_experts, check_masked, make_gate, parts_of
from jitgemm.moe.call import GATE_SCHEMA, WEIGHTS_SCHEMA, by_block, lhs_dtype_of, op_gate, op_weights, weights_of_op
from jitgemm.runtime.launch import check_addresses_once
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.tensors import TYPE_NAMES, check_flag, check_tensor
from jitgemm.weight.packed import Weight


def fused_experts_masked(
    x: torch.Tensor | Lhs,
    w13: Weight,
    w2: Weight,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: float,
    *,
    activation: str = "silu",
    order: str = "gate_up",
    limit: float | None = None,
    alpha: float = 1.702,
    lhs_dtype: torch.dtype | None = None,
    affine: bool = False,
    scheme: str = "token",
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """out[e, i] = w2[e] · Q(act(g, u)) + bias2[e] for i < masked_m[e], where (g, u) = w13[e] · Q(x[e, i]) + bias13[e].

    DeepEP's low-latency form between its dispatch and its combine, which weighs and sums. Four launches: quantise, GEMM,
    gate and quantise, GEMM. None of them touches rows from masked_m[e] on, whose numbers stay on the device, so that a
    CUDA graph can be replayed with others.

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

    Raises: as `fused_experts`.
    """
    check_flag("affine", affine)
    check_flag("batch_invariant", batch_invariant)
    gate, block = make_gate(activation, order, limit, alpha), by_block(scheme)
    dtype = lhs_dtype_of(w13, lhs_dtype)
    expected_rows = expected_rows_of(check_experts(w13, w2, dtype, affine, block), expected_m)
    lhs = split_lhs(x, "x") if isinstance(x, (tuple, list)) else (x, None, None)
    rest = dtype, affine, bias13, bias2, batch_invariant, block
    if not needs_dispatcher(lhs[0], out):
        _run(*lhs, w13, w2, out, masked_m, expected_rows, gate, *rest)
        return
    for name, tensor in (("x", lhs[0]), ("out", out), ("masked_m", masked_m)):
        check_tensor(name, tensor)
    torch.ops.jitgemm.fused_experts_masked(
        *lhs, *op_weights(w13, w2), out, masked_m, expected_rows, *op_gate(gate), *rest
    )


def _run(*arguments: Any) -> None:
    """The call, directly or by its op."""
    _check(*arguments)
    x, x_scale, x_zero, w13, w2, out, masked_m, expected_rows, gate, dtype, affine, *rest = arguments
    bias13, bias2, batch_invariant, block = rest
    # As rows, of which column slices of one buffer are told apart.
    operands = x.flatten(0, 1), x_scale, x_zero, *parts_of(w13), *parts_of(w2), masked_m, bias13, bias2
    check_addresses_once("fused_experts_masked", MASKED_POINTERS, (*operands, out.flatten(0, 1)))
    experts, max_m = out.shape[:2]
    expected_m = expected_rows / experts

    def quantise(rows: torch.Tensor, by: Gate | None) -> Lhs:
        inputs = Inputs(rows.flatten(0, 1), dtype, False, affine, None, None, by, None, 0.0, None, masked_m, block)
        return tuple(part.unflatten(0, (experts, max_m)) for part in quantize(inputs) if part is not None)

    lhs = quantise(x, None) if x_scale is None else (x, x_scale) if x_zero is None else (x, x_scale, x_zero)
    hidden = torch.empty((experts, max_m, w13.n), dtype=out.dtype, device=out.device)
    masked(ANY, lhs, w13, hidden, masked_m, expected_m, bias13, batch_invariant)
    masked(ANY, quantise(hidden, gate), w2, out, masked_m, expected_m, bias2, batch_invariant)


def _check(*arguments: Any) -> None:
    x, x_scale, _, w13, w2, out, masked_m, _, _, dtype, affine, bias13, bias2, _, block = arguments
    check_experts(w13, w2, dtype, affine, block)
    check_masked(x, w13, w2, out, masked_m, REAL_TYPES if x_scale is None else (TYPE_NAMES[dtype],), bias13, bias2)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _of_op(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    weights, (out, masked_m, expected_rows, *gate), rest = arguments[3:15], arguments[15:22], arguments[22:]
    return *arguments[:3], *weights_of_op(weights), out, masked_m, expected_rows, make_gate(*gate), *rest


define_op(
    f"fused_experts_masked(Tensor x, Tensor? x_scale, Tensor? x_zero, {WEIGHTS_SCHEMA}, Tensor(a!) out, "
    f"Tensor masked_m, SymInt expected_rows, {GATE_SCHEMA}, ScalarType lhs_dtype, bool affine, Tensor? bias13, "
    "Tensor? bias2, bool batch_invariant, bool block) -> ()",
    lambda *arguments: _run(*_of_op(arguments)),
    lambda *arguments: _check(*_of_op(arguments)),
)
