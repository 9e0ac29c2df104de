"""The experts of a mixture over tokens that other ranks sent sorted: max_m rows for every expert, few of them live."""

from __future__ import annotations

import torch

from jitgemm.activations.arguments import Inputs
from jitgemm.activations.call import quantize
from jitgemm.dtypes import REAL_TYPES
from jitgemm.gemm.arguments import Lhs, split_lhs
from jitgemm.gemm.grouped import check_hint, masked
from jitgemm.moe.arguments import MASKED_POINTERS, check_experts, check_masked, make_gate, parts_of
from jitgemm.moe.call import by_block, lhs_dtype_of
from jitgemm.runtime.checks import check_call
from jitgemm.tensors import TYPE_NAMES, check_flag
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
    CUDA graph can be replayed with others. No op of `torch.library`: call it outside of what is compiled.

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
    check_hint(expected_m)
    gate, block = make_gate(activation, order, limit, alpha), by_block(scheme)
    dtype = lhs_dtype_of(w13, lhs_dtype)
    experts = check_experts(w13, w2, dtype, affine, block)
    quantised = isinstance(x, (tuple, list))
    tokens, x_scale, x_zero = split_lhs(x, "x") if quantised else (x, None, None)
    check_masked(tokens, w13, w2, out, masked_m, (TYPE_NAMES[dtype],) if quantised else REAL_TYPES, bias13, bias2)
    max_m = tokens.shape[1]
    # As rows, of which column slices of one buffer are told apart.
    lhs = tokens.flatten(0, 1), x_scale, x_zero
    operands = *lhs, *parts_of(w13), *parts_of(w2), masked_m, bias13, bias2, out.flatten(0, 1)
    check_call("fused_experts_masked", MASKED_POINTERS, operands)

    def quantise(rows: torch.Tensor, by: object) -> Lhs:
        inputs = Inputs(rows.flatten(0, 1), dtype, False, affine, None, None, by, None, 0.0, None, masked_m, block)
        return tuple(part.unflatten(0, (experts, max_m)) for part in quantize(inputs) if part is not None)

    hidden = torch.empty((experts, max_m, w13.n), dtype=out.dtype, device=out.device)
    masked(Weight, x if quantised else quantise(x, None), w13, hidden, masked_m, expected_m, bias13, batch_invariant)
    masked(Weight, quantise(hidden, gate), w2, out, masked_m, expected_m, bias2, batch_invariant)
