"""The quantiser that the kernels are held against, and what calls on CPU tensors run.

The same fp32 operations in the same order as `include/jitgemm/quantize/`: bit for bit the same results, except
gates and the sum of squares of RMSNorm, which the kernels approximate and add up in another order. Knows tensors only.
"""

from __future__ import annotations

import math

import torch

from jitgemm.activations.arguments import CODES, Outputs
from jitgemm.activations.scheme import NO_PROLOGUE, Activation, Gate, Prologue
from jitgemm.kernel.formats import LHS_GROUP, Correction, ceil_div
from jitgemm.runtime.launch import Operands
from jitgemm.weight.correction import with_sums
from jitgemm.weight.rotation import FACTOR, butterfly

MIN_SCALE = 2.0**-126
"""Smallest scale: the smallest normal fp32, whose reciprocal is finite."""
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def write_reference(
    activation: Activation, prologue: Prologue, correction: Correction | None, operands: Operands
) -> None:
    """A quantiser's call on CPU tensors; operands: in the order of `arguments.POINTERS`."""
    x, *outputs, scale, zero, _, permutation, _, row_index, _, _ = operands
    assert x is not None and outputs[0] is not None
    if permutation is not None:
        least, most = permutation.aminmax()
        k = permutation.shape[0]
        if least < 0 or most >= k:
            raise ValueError(f"permutation: expected values 0..{k - 1}, got {int(least)}..{int(most)}")
    x = x if row_index is None else x[row_index.long()]
    q, *others = quantize_reference(x, activation, prologue, scale, zero)
    q = q if correction is None else with_sums(q, correction)
    for output, result in zip(outputs, (q, *others)):
        if output is not None and result is not None:
            output.copy_(result)


def quantize_reference(
    x: torch.Tensor, activation: Activation, prologue: Prologue = NO_PROLOGUE, scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> Outputs:  # fmt: skip
    """`jitgemm.quantize_activations` in plain PyTorch, for checked arguments. Writes residual_out."""
    rms_norm, eps, gate, residual, total, permutation = prologue
    if residual is not None:
        x = total.copy_(x + residual)
    y = x.float() if gate is None else gated(x.float(), gate)
    norm = None
    if rms_norm is not None:
        norm = _norm(y, eps)
        y = y * rms_norm.float()
    if activation.rotation:
        y = butterfly(y) + 0.0  # zeros are +0
    if activation.block:
        return _quantize_blocks(y if permutation is None else y[:, permutation.long()], norm, activation)
    q, *others = _quantize_rows(y, norm, activation, scale, zero)
    if permutation is not None:
        q = q.view(torch.int8)[:, permutation.long()].view(q.dtype)
    return q, *others  # type: ignore[return-value]


def _quantize_rows(
    y: torch.Tensor, norm: torch.Tensor | None, activation: Activation, scale: torch.Tensor | None,
    zero: torch.Tensor | None,
) -> Outputs:  # fmt: skip
    """y * norm by row, of rotated rows without FACTOR."""
    dtype, affine, factor = CODES[activation.dtype], activation.affine, FACTOR if activation.rotation else 1.0
    nonfinite = torch.full((y.shape[0],), float("nan"), device=y.device)
    high = (y if affine else y.abs()).amax(dim=1).clamp(min=0)
    low = (-y).amax(dim=1).clamp(min=0)
    if norm is not None:
        y, high, low = y * norm[:, None], high * norm, low * norm
    row_zero: torch.Tensor | None
    if scale is not None:
        row_scale = scale.reshape(-1).expand(y.shape[0])
        row_zero = None if zero is None else zero.reshape(-1).expand(y.shape[0])
        inverse = torch.full_like(row_scale, factor) / row_scale
        row_scale = torch.where(high.isnan(), nonfinite, row_scale)
    else:
        extent = high + low if affine else high
        step = (extent / (255.0 if affine else LARGEST[dtype])).clamp(
            min=MIN_SCALE * (16 if activation.rotation else 1)
        )
        step = torch.where(extent.isfinite(), step, nonfinite)
        inverse = 1 / step
        row_zero = _zero_point(high, low, step) if affine else None
        row_scale = step * factor

    return _encode(y * inverse[:, None], dtype, row_zero), row_scale, row_zero


def _quantize_blocks(y: torch.Tensor, norm: torch.Tensor | None, activation: Activation) -> Outputs:
    """A scale for every `LHS_GROUP` codes; y as permuted, norm one factor a row."""
    m, k = y.shape
    blocks = ceil_div(k, LHS_GROUP)
    y = torch.nn.functional.pad(y, (0, blocks * LHS_GROUP - k)).view(m * blocks, LHS_GROUP)
    norm = None if norm is None else norm.repeat_interleave(blocks)
    q, scale, _ = _quantize_rows(y, norm, activation, None, None)
    q = q.view(torch.int8).view(m, blocks * LHS_GROUP)[:, :k].contiguous().view(q.dtype)
    return q, scale.view(m, blocks), None


def gated(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """What `Gate` says, of x [m, inputs * k] in its own type, float32 or float64."""
    if gate.kind == "relu2":
        return x.clamp(min=0).square()
    if gate.order == "interleaved":
        g, u = x[:, 0::2], x[:, 1::2]
    else:
        g, u = x.chunk(2, dim=1)
        g, u = (u, g) if gate.order == "up_gate" else (g, u)
    if gate.kind == "situ":
        u = u if gate.limit == math.inf else gate.limit * torch.tanh(u / gate.limit)
        return gate.alpha * torch.tanh(g / gate.alpha) * torch.sigmoid(g) * u
    u = u.clamp(-gate.limit, gate.limit)
    if gate.kind == "swiglu_step":
        return (g * torch.sigmoid(g)).clamp(max=gate.limit) * u
    g = g.clamp(max=gate.limit)
    if gate.kind == "gelu":
        tails = torch.special.erfc(-g.double() / math.sqrt(2))  # torch.special.ndtr is 0 below -8
        return g * (tails / 2).to(g.dtype) * u
    if gate.kind == "gelu_tanh":
        return g * torch.sigmoid(2 * math.sqrt(2 / math.pi) * g * (1 + 0.044715 * g * g)) * u
    if gate.kind == "swiglu_oai":
        return g * torch.sigmoid(gate.alpha * g) * (u + 1)
    return g * (1 / (1 + torch.exp(-g))) * u


def _norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) by row; NaN where the sum of squares is beyond fp32, which would make a row zeros."""
    squares = x.double().square().sum(dim=1).float()
    mean = squares / x.shape[1]
    norm = 1 / torch.sqrt(mean + torch.tensor(eps, dtype=torch.float32, device=x.device))
    return torch.where(squares.isfinite(), norm, torch.full_like(norm, float("nan")))


def _zero_point(high: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The integer that stands for 0, of a range -low..high that holds it; 0 where scale is NaN.

    It follows from either end of the range, and the sum of both ends' errors tells which to take: as
    `choose_qparams_per_token_asymmetric` of PyTorch and ExecuTorch, after XNNPACK's src/xnnpack/quantization.h.
    """
    bottom, top = -low / scale, high / scale
    from_bottom = (-128 + bottom) + (127 + top) > 0
    exact = torch.where(from_bottom, -128 - bottom, 127 - top)
    return exact.round().nan_to_num(0).clamp(-128, 127).to(torch.int32)


def _encode(scaled: torch.Tensor, dtype: torch.dtype, zero: torch.Tensor | None) -> torch.Tensor:
    """To the nearest code, ties to even, saturated. NaN: e4m3's NaN 0x7f; int8 what stands for 0."""
    if dtype == torch.float8_e4m3fn:
        codes = scaled.clamp(-448.0, 448.0).to(dtype).view(torch.uint8)
        return codes.masked_fill(scaled.isnan(), 0x7F).view(dtype)
    integers = scaled.round().nan_to_num(0).clamp(-65536, 65535).to(torch.int32)
    if zero is not None:
        integers = integers + zero[:, None]
    return integers.clamp(-128, 127).to(torch.int8)
