"""quantize_mxfp4: a float weight to the nearest MXFP4 codes, with the best power of two of each 32."""

from __future__ import annotations

import torch

from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.kernel.formats import ceil_div
from jitgemm.weight import e2m1
from jitgemm.weight.mxfp4 import pack_mxfp4
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import expert_indices
from jitgemm.weight.quantize import _check_finite, _check_weight
from jitgemm.weight.search import CHUNK

_EVEN, _ODD = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Halfway between codes: those where the lower code's mantissa is even take it, the others the upper."""


def quantize_mxfp4(w: torch.Tensor) -> W4Weight:
    """Quantise a weight to MXFP4: per 32 columns, the scale of least squared error among three.

    Tried are the power of two 2^(floor(log2(max |w|)) - 2) of the OCP MX specification 1.0 (6.3), with which the largest
    value is 4 to 8 steps long and clipped to 6, its double and its half. A later one is taken only if its error is
    smaller. Codes are the nearest, ties to even. The same w gives the same weight in every run.

    Args:
        w: fp32, bf16 or fp16 [n, k], or [E, n, k] for a weight of E experts, any strides, n a multiple of 8 and k a
            multiple of 16; finite. Left as it is.

    Returns:
        The packed weight on w's device, in the first of `pack_mxfp4`'s forms that holds it.

    Raises:
        TypeError, ValueError: wrong dtype, shape, or values.
    """
    n, k = _check_weight(w)
    groups = ceil_div(k, EXPONENT_GROUP)
    with torch.inference_mode(False), torch.no_grad():
        codes = torch.empty((*w.shape[:-1], k // 2), dtype=torch.uint8, device=w.device)
        scales = torch.empty((*w.shape[:-1], groups), dtype=torch.uint8, device=w.device)
        step = max(1, CHUNK["cuda" if w.is_cuda else "cpu"] // k)
        for e in expert_indices(w.shape[0] if w.dim() == 3 else None):
            for first in range(0, n, step):
                rows = slice(first, min(first + step, n))
                part = w[e][rows].to(torch.float32)
                _check_finite(w[e], part, first)
                part = torch.nn.functional.pad(part, (0, groups * EXPONENT_GROUP - k)).unflatten(1, (groups, -1))
                found, scale = _nearest(part)
                found = found.flatten(1)[:, :k]
                codes[e][rows], scales[e][rows] = found[:, 0::2] | found[:, 1::2] << 4, scale
        return pack_mxfp4(codes, scales, k=k)


def _nearest(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w fp32 [rows, groups, 32] -> codes uint8 of its shape, scales uint8 [rows, groups]."""
    values = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64, device=w.device)
    largest = w.abs().amax(-1)
    # frexp: largest = mantissa * 2^exponent with mantissa from a half on.
    usual = torch.where(largest > 0, torch.frexp(largest).exponent - 3, 0)
    best, scales, least = (
        torch.zeros_like(w, dtype=torch.uint8),
        usual,
        torch.full_like(largest, torch.inf, dtype=torch.float64),
    )
    for change in (0, 1, -1):
        exponent = (usual + change).clamp(-e2m1.BIAS, e2m1.BIAS)
        steps = torch.ldexp(w.double(), -exponent[..., None])
        magnitude = steps.abs()
        codes = sum(magnitude > bound for bound in _EVEN) + sum(magnitude >= bound for bound in _ODD)
        error = torch.ldexp((values[codes] - magnitude).square().sum(-1), 2 * exponent)
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, exponent, scales)
        signed = (codes + 8 * steps.signbit()).to(torch.uint8)
        best = torch.where(better[..., None], signed, best)
    return best, (scales + e2m1.BIAS).to(torch.uint8)
