"""A GEMM whose result is 8-bit again: the quantiser behind the GEMM, for chains of quantised layers.

Composes two public calls; knows nothing of kernels.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

import torch

from jitgemm.activations.arguments import activation_of, check_out
from jitgemm.activations.call import Pair, Triple, quantize_activations
from jitgemm.gemm.call import gemm_w4a8_nt
from jitgemm.gemm.problem import POINTERS, W4, X_SCALE, X_ZERO, Gemm, Lhs, X, check_types, check_weight, split_lhs
from jitgemm.kernel.formats import K_ALIGNMENT
from jitgemm.runtime.dispatch import needs_dispatcher
from jitgemm.runtime.launch import Pointer, address_of, check_addresses, check_once

if TYPE_CHECKING:
    from jitgemm.weight.packed import W4Weight

_POINTERS = (
    *POINTERS[:-1],
    Pointer(None, "out[0]", written=True, in_place=(X,)),
    Pointer(None, "out[1]", written=True, in_place=(X_SCALE,)),
    Pointer(None, "out[2]", written=True, in_place=(X_ZERO,)),
)
"""Of the whole call. The GEMM reads its operands before the quantiser writes out; the quantiser checks its own."""


class _Options(TypedDict, total=False):
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    out: tuple[torch.Tensor, ...] | None
    batch_invariant: bool


@overload
def gemm_w4a8_int8_nt(
    lhs: Lhs, rhs: W4Weight, *, affine: Literal[True] = True, **options: Unpack[_Options]
) -> Triple: ...
@overload
def gemm_w4a8_int8_nt(lhs: Lhs, rhs: W4Weight, *, affine: Literal[False], **options: Unpack[_Options]) -> Pair: ...
@overload
def gemm_w4a8_int8_nt(
    lhs: Lhs, rhs: W4Weight, *, affine: bool = True, **options: Unpack[_Options]
) -> Pair | Triple: ...


def gemm_w4a8_int8_nt(
    lhs: Lhs, rhs: W4Weight, *, bias: torch.Tensor | None = None, affine: bool = True,
    scale: torch.Tensor | None = None, zero: torch.Tensor | None = None, out: tuple[torch.Tensor, ...] | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """lhs · rhsᵀ + bias in int8, quantised from the fp32 result: ExecuTorch's `linear_qta8a_qga4w_qta8o`.

    The fp32 result [m, n] is a temporary of 4 * m * n bytes, 940 MB for m = 8192 and n = 28672: for so many tokens
    split m, which changes no bit with batch_invariant.

    Args:
        lhs, rhs, bias, batch_invariant: as `gemm_w4a8_nt` takes them; rhs has n, a multiple of 16.
        affine: with a zero point per token, else symmetric.
        scale, zero: fp32 and, if affine, int32 of one element each, to quantise with; None takes them from each token's
            results.
        out: (q, scale) or (q, scale, zero) to write to and return, as `quantize_activations` takes it; lhs itself for
            in place.

    Returns:
        (q, scale, zero), or (q, scale) unless affine: the `lhs` of the next GEMM. q is int8 [m, n], scale fp32 [m],
        zero int32 [m].

    Raises:
        TypeError, ValueError, CacheMissError, CompileError, UnsupportedDeviceError: as from `gemm_w4a8_nt` and
            `quantize_activations`.
    """
    x, x_scale, x_zero = split_lhs(lhs)
    if x.dim() != 2:
        raise ValueError(f"{X}: expected shape [m, k], got {list(x.shape)}")
    if check_weight(rhs, W4).n % K_ALIGNMENT:
        raise ValueError(f"rhs: expected n to be a multiple of {K_ALIGNMENT} for an 8-bit result, got {rhs.n}")
    result = torch.empty((x.shape[0], rhs.n), dtype=torch.float32, device=x.device)
    if out is not None:
        rows = check_out(out, result, activation_of(torch.int8, "token", affine))
        gemm = Gemm(x, x_scale, x_zero, rhs, result, bias, None, batch_invariant)
        check_types(gemm)
        # Tensors that a tracer follows have no addresses.
        if not torch.compiler.is_compiling() and not needs_dispatcher(x, x):
            operands = *gemm.operands()[:-1], *rows
            key, layouts = tuple(map(address_of, operands)), [each for each in operands if each is not None]
            check_once(("gemm_w4a8_int8_nt", *key), layouts, partial(check_addresses, _POINTERS, operands))
    gemm_w4a8_nt(lhs, rhs, result, bias=bias, batch_invariant=batch_invariant)
    scheme = "token" if scale is None else "tensor"
    return quantize_activations(result, torch.int8, scheme=scheme, affine=affine, scale=scale, zero=zero, out=out)
