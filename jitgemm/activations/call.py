"""Quantising activations: the public call and its `torch.library` op.

As `gemm/call.py` for GEMMs: one look-up by everything that decides legality and kernel, then a launch; only a miss
imports the layers below. CPU tensors run `reference.py`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from jitgemm.activations.arguments import (
    POINTERS,
    Inputs,
    Outputs,
    as_rows,
    check_arguments,
    check_out,
    gate_of,
    rows_like,
)
from jitgemm.activations.reference import quantize_reference
from jitgemm.activations.scheme import SCHEMES, SILU_MUL
from jitgemm.dtypes import LHS_TYPES
from jitgemm.runtime.checks import check_addresses
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.tensors import check_dtype, check_flag, check_tensor

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, scheme: str = "token", affine: Literal[False] = False,
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, silu_mul: bool = False, gelu_mul: str | None = None,
    rms_norm: torch.Tensor | None = None, eps: float = 1e-6, permutation: torch.Tensor | None = None,
    residual: None = None, residual_out: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> Pair: ...  # fmt: skip


@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, scheme: str = "token", affine: Literal[True],
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, silu_mul: bool = False, gelu_mul: str | None = None,
    rms_norm: torch.Tensor | None = None, eps: float = 1e-6, permutation: torch.Tensor | None = None,
    residual: None = None, residual_out: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> Triple: ...  # fmt: skip


@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, scheme: str = "token", affine: bool,
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, silu_mul: bool = False, gelu_mul: str | None = None,
    rms_norm: torch.Tensor | None = None, eps: float = 1e-6, permutation: torch.Tensor | None = None,
    residual: None = None, residual_out: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> Pair | Triple: ...  # fmt: skip


@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, scheme: str = "token", affine: bool = False,
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, silu_mul: bool = False, gelu_mul: str | None = None,
    rms_norm: torch.Tensor | None = None, eps: float = 1e-6, permutation: torch.Tensor | None = None,
    residual: torch.Tensor, residual_out: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]: ...  # fmt: skip


def quantize_activations(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scheme: str = "token",
    affine: bool = False,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    silu_mul: bool = False,
    gelu_mul: str | None = None,
    rms_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    permutation: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """8-bit activations for `gemm_w4a8_bf16_nt`, in one pass over x, on the current stream.

    ::

        y = x                                    or, in fp32 and not rounded to x's type,
            silu(x[:, :k]) * x[:, k:]            with silu_mul
            gelu(x[:, :k]) * x[:, k:]            with gelu_mul, its approximation
            x * rms_norm / sqrt(mean(x^2) + eps) with rms_norm; with residual too, x is x + residual in x's type
        scale[i] = max(max |y[i]| / 448, 2^-126)                e4m3
                   max(max |y[i]| / 127, 2^-126)                int8
                   max((high - low) / 255, 2^-126)              int8 affine; high = max(y[i], 0), low = min(y[i], 0)
        zero[i]  = what stands for 0: -128 - low / scale or 127 - high / scale, chosen as ExecuTorch does
        q[i, j]  = round(y[i, p(j)] * (1 / scale[i])) + zero[i]  p = permutation; saturated at +-448, at -128 and 127

    With scheme "block" scale[i, b] is that of the 128 codes q[i, 128 b] to q[i, 128 b + 127], the last block's of fewer
    maybe, and of the values of y that they stand for; what is said of rows below holds for blocks then.

    All in fp32, each operation rounded to nearest even; codes too. The CPU gives the same bits, but for gates
    (y within 2^-17 |y| + 2^-120) and `rms_norm` (y within 2^-17 |y| for k up to 2^16), whose codes may differ where y
    is as close to a tie. A row's result does not depend on the other rows, nor on m.

    Rows of zeros get codes that stand for 0, and scale 2^-126. A row whose y holds a NaN gets scale NaN, so that all
    its results are NaN, whatever the scheme; one that holds an infinity, or whose range or sum of squares is beyond
    fp32, too, except that static scales saturate infinities. In such rows codes stand for 0 (int8) or NaN (e4m3),
    with a dynamic scale all of them, with a static one those of NaN.

    Args:
        x: bfloat16, float16 or float32 [..., k], with a gate [..., 2k], gate first; stride 1 along k, rows one
            stride apart, which is a multiple of 16 bytes; 16-byte aligned. k is a multiple of 16, at most 2^20, with a
            permutation 2^17, by block 2^15. A row is read once if k is at most 32768 (16-bit x without gate and
            rms_norm), 8192 (fp32 with a gate) or 16384 (otherwise); longer ones are read again from the L2.
        dtype: float8_e4m3fn or int8.
        scheme: "token", a scale for each row, "tensor", the scale that is given, or "block", one for each row and 128
            codes; not affine.
        affine: int8 with a zero point.
        scale: "tensor": fp32, one element, positive.
        zero: "tensor" and affine: int32, one element, -128..127.
        silu_mul: y = silu(gate) * up; not with rms_norm.
        gelu_mul: "tanh" or "none", as PyTorch names gelu's approximations: y = gelu(gate) * up; with neither of both.
        rms_norm: weight [k], bfloat16, float16 or float32, contiguous, 16-byte aligned.
        eps: of RMSNorm.
        permutation: int32 [k], contiguous, 16-byte aligned; each of 0..k-1 once, which is not checked. A weight's
            `permutation`.
        residual: with rms_norm: added to x, of its shape and type, rows as x's. The sum, rounded to x's type as
            PyTorch's addition, is what is normalised, and the last result.
        residual_out: with residual: where the sum is written and what is returned, of x's shape and type, rows a
            multiple of 16 bytes apart; residual or x itself for in place; None for a new tensor.
        out: (q, scale) or (q, scale, zero) to write to and return, shaped as below; q may have a row stride that is a
            multiple of 16 bytes, and block scales any strides.

    All on one device. On CUDA: compute capability 9.0.

    Returns:
        (q, scale), or (q, scale, zero) if affine: the `lhs` of a GEMM. q is [..., k] of dtype, scale fp32 [...] and
        zero int32 [...], for "tensor" too, where they are what was given but for NaN. By block scale is
        [..., ceil(k / 128)], column-major: rows side by side, columns m elements apart, rounded up to 4. With residual
        the sum comes last: `*lhs, hidden = quantize_activations(x, dtype, rms_norm=weight, residual=hidden)`.

    Raises:
        TypeError, ValueError: an argument is wrong, or x, scale, rms_norm or residual requires grad and gradients are
            on; the message names it. Nothing was launched.
        CacheMissError: the kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    if type(x) is not torch.Tensor:
        check_tensor("x", x)
    if type(scheme) is not str or scheme not in SCHEMES:
        raise ValueError(f"scheme: expected one of {SCHEMES}, got {scheme!r}")
    rows = x if x.dim() == 2 else as_rows("x", x)
    if type(silu_mul) is not bool:
        check_flag("silu_mul", silu_mul)
    gate = SILU_MUL if silu_mul else None
    if gelu_mul is not None:
        gate = gate_of(silu_mul, gelu_mul)
    block = scheme == "block"
    through_op = needs_dispatcher(x, x if residual is None else residual)
    into = residual_out
    # Of rows alone `quantize` sees by the plan that it remembers whether they fit.
    if (residual is not None or into is not None) and (residual is None or through_op or x.dim() != 2):
        residual = rows_like("residual", residual, x)
        into = None if into is None else rows_like("residual_out", into, x)
    inputs = Inputs(
        rows, dtype, scheme == "tensor", affine, scale, zero, gate, rms_norm, eps, permutation, None, block, None,
        residual, into,
    )  # fmt: skip
    outputs = None if out is None else check_out(out, x, dtype, affine, gate is not None, block)
    if through_op:
        written, into = _call_op(inputs, outputs, gelu_mul)
    else:
        if residual is not None and into is None:
            into = _new_sum(rows)
            inputs = inputs._replace(residual_out=into)
        written = quantize(inputs, outputs)
    results: tuple[Any, ...] = written if affine else written[:2]
    if out is not None:
        results = tuple(out)
    elif x.dim() != 2:  # results of rows, as x's shape has them
        lead = x.shape[:-1]
        results = tuple(each.view((*lead, *each.shape[1:])) for each in results)
    if into is None:
        return results
    return *results, residual_out if residual_out is not None else into if x.dim() == 2 else into.view(x.shape)


def quantize(inputs: Inputs, outputs: Outputs | None = None) -> Outputs:
    """The call, directly or by its op, into `outputs`, which are checked, or new ones."""
    (
        x, dtype, static, affine, scale, zero, gate, rms_norm, eps, permutation, row_count, block, row_index, residual,
        total,
    ) = inputs  # fmt: skip
    # What decides legality and kernel; the rest of the tensors `LaunchCache.find_plan` compares.
    key = (
        x.shape, dtype, static, affine, gate, eps, scale is None, zero is None, rms_norm is None,
        permutation is None, row_count is None, row_index is None, outputs is None, block, residual is None,
        total is x, total is residual, torch.is_grad_enabled(),
    )  # fmt: skip
    tensors = [x] if outputs is None else [x, outputs[0], outputs[1]]
    others = scale, zero, rms_norm, permutation, row_count, row_index, residual
    tensors += [tensor for tensor in others if tensor is not None]
    if total is not None and total is not x and total is not residual:
        tensors.append(total)
    plan = this_thread.cache.find_plan(key, tensors)
    if plan is None:
        check_arguments(inputs)
    if outputs is None:
        outputs = inputs.new_outputs()
    if plan is None:
        if inputs.rows == 0:
            return outputs
        check_addresses(POINTERS, inputs.tensors(outputs))
        if not x.is_cuda:
            return _run_reference(inputs, outputs)
        from jitgemm.activations.plan import QuantizePlan

        with torch.cuda.device(x.device):
            plan = QuantizePlan(inputs, outputs)
        this_thread.cache.add_plan(key, tensors, plan)
    plan.launch(inputs, outputs)
    return outputs


def _run_reference(inputs: Inputs, outputs: Outputs) -> Outputs:
    permutation, k = inputs.permutation, inputs.k
    if permutation is not None:
        least, most = permutation.aminmax()
        if least < 0 or most >= k:
            raise ValueError(f"permutation: expected values 0..{k - 1}, got {int(least)}..{int(most)}")
    for output, result in zip(outputs, quantize_reference(inputs)):
        if output is not None and result is not None:
            output.copy_(result)
    return outputs


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _call_op(inputs: Inputs, outputs: Outputs | None, gelu_mul: str | None) -> tuple[Outputs, torch.Tensor | None]:
    """The outputs, and with residual the sum."""
    for name in ("scale", "zero", "rms_norm", "permutation"):
        if getattr(inputs, name) is not None:
            check_tensor(name, getattr(inputs, name))
    check_dtype("dtype", inputs.dtype, LHS_TYPES)
    x, dtype, static, affine, scale, zero, gate, rms_norm, eps, permutation, _, block, _, residual, total = inputs
    silu_mul = gate is not None and gelu_mul is None
    arguments = x, dtype, static, affine, scale, zero, silu_mul, rms_norm, float(eps), permutation, block
    if residual is None:
        results = torch.ops.jitgemm.quantize_activations(*arguments, gelu_mul)
    else:
        *three, added = torch.ops.jitgemm.add_quantize_activations(*arguments, residual)
        results, total = tuple(three), added if total is None else total.copy_(added)
    if outputs is None:
        return results, total
    for output, result in zip(outputs, results):
        if output is not None:
            output.copy_(result)
    return outputs, total


_INPUTS = 10
"""Arguments of the ops that `Inputs` has before row_count; block follows, where it is given, and gelu_mul or residual."""


def _inputs(*arguments: Any) -> Inputs:
    block = len(arguments) > _INPUTS and arguments[_INPUTS]
    last = arguments[_INPUTS + 1] if len(arguments) > _INPUTS + 1 else None
    residual, gelu_mul = (last, None) if isinstance(last, torch.Tensor) else (None, last)
    total = None if residual is None else _new_sum(arguments[0])
    inputs = Inputs._make((*arguments[:_INPUTS], None, block, None, residual, total))
    return inputs._replace(gate=gate_of(bool(inputs.gate), gelu_mul))


def _new_sum(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _op(*arguments: Any) -> tuple[torch.Tensor, ...]:
    inputs = _inputs(*arguments)
    return _without_none(inputs, quantize(inputs))


def _fake_op(*arguments: Any) -> tuple[torch.Tensor, ...]:
    inputs = _inputs(*arguments)
    check_arguments(inputs)
    return _without_none(inputs, inputs.new_outputs())


def _without_none(inputs: Inputs, outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """An op returns tensors only: an empty one for no zero points. With residual the sum, too."""
    q, scale, zero = outputs
    results = q, scale, scale.new_empty(0, dtype=torch.int32) if zero is None else zero
    return results if inputs.residual_out is None else (*results, inputs.residual_out)


_ARGUMENTS = (
    "(Tensor x, ScalarType dtype, bool static, bool affine, Tensor? scale, Tensor? zero, bool silu_mul, "
    "Tensor? rms_norm, float eps, Tensor? permutation, bool block"
)
define_op(f"quantize_activations{_ARGUMENTS}=False, str? gelu_mul=None) -> (Tensor, Tensor, Tensor)", _op, _fake_op)
define_op(f"add_quantize_activations{_ARGUMENTS}, Tensor residual) -> (Tensor, Tensor, Tensor, Tensor)", _op, _fake_op)
