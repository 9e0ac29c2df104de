"""Quantising activations: the public call and its `torch.library` ops, over `run.py`."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch

from jitgemm.activations.arguments import Outputs, activation_of, as_rows, check_out, gate_of, rows_like
from jitgemm.activations.kernel import check_correction
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import Prologue
from jitgemm.kernel.formats import Correction
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.tensors import check_tensor
from jitgemm.weight.parts import Rotated

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Options(TypedDict, total=False):
    scheme: str
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    silu_mul: bool
    gelu_mul: str | None
    rms_norm: torch.Tensor | None
    eps: float
    permutation: torch.Tensor | None
    residual_out: torch.Tensor | None
    correction: Correction | None
    rotation: int
    out: tuple[torch.Tensor, ...] | None


@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, affine: Literal[False] = False, residual: None = None,
    **options: Unpack[_Options],
) -> Pair: ...  # fmt: skip
@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, affine: Literal[True], residual: None = None, **options: Unpack[_Options]
) -> Triple: ...  # fmt: skip
@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, affine: bool, residual: None = None, **options: Unpack[_Options]
) -> Pair | Triple: ...  # fmt: skip
@overload
def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, affine: bool = False, residual: torch.Tensor, **options: Unpack[_Options]
) -> tuple[torch.Tensor, ...]: ...  # fmt: skip


def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype, *, scheme: str = "token", affine: bool = False,
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, silu_mul: bool = False,
    gelu_mul: str | None = None, rms_norm: torch.Tensor | None = None, eps: float = 1e-6,
    permutation: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None, correction: Correction | None = None, rotation: int = 0,
    out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
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

    With rotation y H takes the place of y, block by block of 128 columns, H[i, j] = (-1)^popcount(i & j) / sqrt(128)
    (`jitgemm.weight.rotation`). Sums first: for d = 1, 2, 4, ... 64 in that order, of columns i without and j = i + d
    with bit d, y[i] + y[j] and y[i] - y[j] take their places. Then, s being 2^-3.5 in fp32 ::

        step[i]  = as scale[i] above, of these sums for y, and at least 2^-122
        scale[i] = step[i] * s
        q[i, j]  = round(y[i, j] * (1 / step[i])) + zero[i]      static scales: s / scale for 1 / step

    RMSNorm's factor comes behind the sums, as it does without. What is said of a NaN, an infinity or a range beyond
    fp32 holds for the sums of its block of 128, and of rows of zeros with 2^-122 * s for 2^-126.

    With scheme "block" scale[i, b] is that of the 128 codes q[i, 128 b] to q[i, 128 b + 127], the last block's of fewer
    maybe, and of the values of y that they stand for; what is said of rows below holds for blocks then.

    All in fp32, each operation rounded to nearest even; codes too. The CPU gives the same bits, except for gates
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
        scale: "tensor": fp32, one element or [m], one for each row, positive.
        zero: "tensor" and affine: int32, as many, -128..127.
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
        rotation: 128 rotates y, 0 does not: for a weight of `rotated` values. k is a multiple of 128; rows are read
            once up to 16384, fp32 with a gate 8192. Not with permutation or correction.
        correction: int8, not by block: a weight's `correction`, (type, group size), "bf16" or "fp16" and 32, 64, 128
            or 256. The sums of q's groups, as they are written, follow a row's codes, all the weight's GEMM has to know
            of zero points and offsets.
        out: (q, scale) or (q, scale, zero) to write to and return, shaped as below; q may have a row stride that is a
            multiple of 16 bytes, and block scales any strides.

    All on one device. On CUDA: compute capability 9.0.

    Returns:
        (q, scale), or (q, scale, zero) if affine: the `lhs` of a GEMM. q is [..., k] of dtype, scale fp32 [...] and
        zero int32 [...], for "tensor" too, where they are what was given except NaN. With correction q's last dimension
        is 128 (ceil(k / 128) + ceil(k / (32 group size))): codes, zeros up to a multiple of 128, and for each 32 groups
        32 digits of their sums, rounded to the type, and 32 of what that leaves out, as bytes. By block scale is
        [..., ceil(k / 128)], column-major: rows side by side, columns m elements apart, rounded up to 4. With residual
        the sum comes last: `*lhs, hidden = quantize_activations(x, dtype, rms_norm=weight, residual=hidden)`. With a
        rotation they are a `Rotated`; with residual `Rotated(lhs)` makes them one.

    Raises:
        TypeError, ValueError: an argument is wrong, or x, scale, rms_norm or residual requires grad and gradients are
            on; the message names it. Nothing was launched.
        CacheMissError: the kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    if type(x) is not torch.Tensor:
        check_tensor("x", x)
    activation, gate = activation_of(dtype, scheme, affine, rotation=rotation), gate_of(silu_mul, gelu_mul)
    rows = x if x.dim() == 2 else as_rows("x", x)
    through_op = needs_dispatcher(x, x if residual is None else residual)
    total = residual_out
    # Of rows alone the plan that is remembered says whether they fit.
    if (residual is not None or total is not None) and (residual is None or through_op or x.dim() != 2):
        residual = rows_like("residual", residual, x)
        total = None if total is None else rows_like("residual_out", total, x)
    if correction is not None:
        check_correction(correction, activation.dtype, activation.block, rotation != 0)
    outputs = None if out is None else check_out(out, x, activation, gate is not None, correction)
    if through_op:
        for name, value in (("scale", scale), ("zero", zero), ("rms_norm", rms_norm), ("permutation", permutation)):
            if value is not None:
                check_tensor(name, value)
        static, block = scheme == "tensor", scheme == "block"
        given = rows, dtype, static, affine, scale, zero, silu_mul, rms_norm, float(eps), permutation, block
        behind = *(correction or (None, 0)), rotation
        if residual is None:
            written = torch.ops.jitgemm.quantize_activations(*given, gelu_mul, *behind)
        else:
            *written, added = torch.ops.jitgemm.add_quantize_activations(*given, residual, *behind)
            total = added if total is None else total.copy_(added)
        for output, result in zip(outputs or (), written):
            if output is not None:
                output.copy_(result)
    else:
        if residual is not None and total is None:
            total = rows.new_empty(rows.shape)
        prologue = Prologue(rms_norm, eps, gate, residual, total, permutation)
        written = quantize(QuantizeCall(rows, activation, prologue, scale, zero, None, None, outputs, correction))
    results: tuple[torch.Tensor, ...] = tuple(out) if out is not None else written if affine else written[:2]
    if out is None and x.dim() != 2:  # results of rows, as x's shape has them
        lead = x.shape[:-1]
        results = tuple(each.view((*lead, *each.shape[1:])) for each in results)
    if total is None:
        return Rotated(results) if rotation else results
    return *results, residual_out if residual_out is not None else total if x.dim() == 2 else total.view(x.shape)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _of_op(
    x: torch.Tensor, dtype: torch.dtype, static: bool, affine: bool, scale: torch.Tensor | None,
    zero: torch.Tensor | None, silu_mul: bool, rms_norm: torch.Tensor | None, eps: float,
    permutation: torch.Tensor | None, block: bool = False, own: torch.Tensor | str | None = None,
    correction: str | None = None, correction_group: int = 0, rotation: int = 0,
) -> QuantizeCall:  # fmt: skip
    """What an op was called with; own: residual of the one, gelu_mul of the other."""
    residual, gelu_mul = (own, None) if isinstance(own, torch.Tensor) else (None, own)
    total = None if residual is None else x.new_empty(x.shape)
    scheme = "block" if block else "tensor" if static else "token"
    activation = activation_of(dtype, scheme, affine, rotation=rotation)
    prologue = Prologue(rms_norm, eps, gate_of(silu_mul, gelu_mul), residual, total, permutation)
    sums = None if correction is None else (correction, correction_group)
    return QuantizeCall(x, activation, prologue, scale, zero, correction=sums)


def _results(call: QuantizeCall, outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """An op returns tensors only: an empty one for no zero points. With residual the sum, too."""
    q, scale, zero = outputs
    results = q, scale, scale.new_empty(0, dtype=torch.int32) if zero is None else zero
    total = call.prologue.residual_out
    return results if total is None else (*results, total)


def _run(call: QuantizeCall) -> tuple[torch.Tensor, ...]:
    return _results(call, quantize(call))


def _fake(call: QuantizeCall) -> tuple[torch.Tensor, ...]:
    call.check()
    return _results(call, call.new_outputs())


_ARGUMENTS = (
    "(Tensor x, ScalarType dtype, bool static, bool affine, Tensor? scale, Tensor? zero, bool silu_mul, "
    "Tensor? rms_norm, float eps, Tensor? permutation, bool block"
)
_BEHIND = "str? correction=None, int correction_group=0, int rotation=0"
_RESULTS = "(Tensor, Tensor, Tensor"
define_op(f"quantize_activations{_ARGUMENTS}=False, str? gelu_mul=None, {_BEHIND}) -> {_RESULTS})", _run, _fake, _of_op)
define_op(
    f"add_quantize_activations{_ARGUMENTS}, Tensor residual, {_BEHIND}) -> {_RESULTS}, Tensor)", _run, _fake, _of_op
)
