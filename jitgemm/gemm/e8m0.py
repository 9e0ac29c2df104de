"""Scales of activations in e8m0, per token and 128 k: eight bits e that stand for 2^(e - 127), or NaN where e is 255.

Kernels read them packed, as DeepGEMM makes them: int32 [..., ceil(k / 512)] of any strides. A word holds the exponents
of four consecutive blocks of 128 k, the first in its lowest byte; of bytes past the last block it does not matter what
they hold.
"""

from __future__ import annotations

import torch

from jitgemm.gemm.problem import Lhs, split_lhs
from jitgemm.kernel.formats import LHS_GROUP, ceil_div


def pack_e8m0(x_scale: torch.Tensor) -> torch.Tensor:
    """float8_e8m0fnu [..., blocks] as packed words: its own memory where rows are whole words, else a copy."""
    bits = x_scale.view(torch.uint8)
    *rows, blocks = bits.shape
    steps = blocks, bits.storage_offset(), *bits.stride()[:-1]
    if bits.stride(-1) != 1 or any(step % 4 for step in steps):
        whole = bits.new_empty(*rows, 4 * ceil_div(blocks, 4))
        whole[..., :blocks] = bits
        bits = whole
    return bits.view(torch.int32)


def fp32_scales(scale: torch.Tensor, k: int) -> torch.Tensor:
    """Scales per 128 k as fp32, exactly: packed ones, float8_e8m0fnu, or others, which are returned as they are."""
    if scale.dtype == torch.int32:
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
        bits = (scale[..., None] >> shifts & 255).flatten(-2).to(torch.uint8)
        blocks = ceil_div(k, LHS_GROUP)
        bits = bits[..., :blocks] if ceil_div(blocks, 4) == scale.shape[-1] else bits
        scale = bits.contiguous().view(torch.float8_e8m0fnu)
    return scale.float() if scale.dtype == torch.float8_e8m0fnu else scale


def with_fp32_scales(lhs: Lhs, k: int) -> Lhs:
    """The activations with `fp32_scales`."""
    x, x_scale, x_zero = split_lhs(lhs)
    x_scale = fp32_scales(x_scale, k)
    return (x, x_scale) if x_zero is None else (x, x_scale, x_zero)
