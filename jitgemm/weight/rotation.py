"""A Hadamard matrix along k, of weights and of activations: outliers become as large as their neighbours.

An orthogonal matrix on both sides leaves a product as it is, (x H)(W H)^T = x W^T, and no value of a rotated row is far
larger than the others, so that 8 bits with one scale hold it. H has blocks of 128 on its diagonal::

    H[i, j] = (-1)^popcount(i & j) * 2^-3.5                                  Sylvester's, symmetric, its own inverse
"""

from __future__ import annotations

import torch

from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.formats import ROTATION
from jitgemm.tensors import check_dtype, check_tensor

FACTOR = 0.08838834764831845
"""2^-3.5, which makes the matrix orthogonal; as fp32 its square is 2^-7 within 2^-24."""


def rotated(w: torch.Tensor, size: int = ROTATION) -> torch.Tensor:
    """w H in fp32, for a weight that meets `quantize_activations(..., rotation=128)`.

    Sums in the order of `butterfly`, each rounded once, then multiplied by fp32(2^-3.5) and rounded once: the same bits
    on every device, within 2^-20 of 2^-3.5 times the sum of a block's absolute values. Twice gives w, but for rounding.

    Args:
        w: bfloat16, float16 or float32 [..., k]: [n, k], or of experts [E, n, k]. k is a multiple of size.
        size: of the matrix: 128.

    Returns:
        float32 of w's shape.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    check_dtype("w", check_tensor("w", w).dtype, REAL_TYPES)
    if size != ROTATION:
        raise ValueError(f"size: expected {ROTATION}, got {size!r}")
    if w.dim() == 0 or w.shape[-1] % ROTATION:
        raise ValueError(f"w: expected shape [..., k] with k a multiple of {ROTATION}, got {list(w.shape)}")
    return butterfly(w.float()).mul_(FACTOR)


def rotated_moments(moments: torch.Tensor) -> torch.Tensor:
    """H M H of inputs' second moments M [..., k, k]: those of rotated inputs."""
    return rotated(rotated(moments).mT)


def butterfly(x: torch.Tensor) -> torch.Tensor:
    """x H * 2^3.5 of fp32 [..., k]: of columns i without and j = i + d with bit d the sum and the difference i - j.

    For d = 1, 2, 4, ... 64 in that order, each addition rounded to nearest even, as
    include/jitgemm/quantize/rotation.cuh has it.
    """
    shape, distance = x.shape, 1
    while distance < ROTATION:
        low, high = x.reshape(-1, 2, distance).unbind(1)
        x = torch.stack((low + high, low - high), 1)
        distance *= 2
    return x.reshape(shape)


def folded(w: torch.Tensor, location: str, matrix: torch.Tensor) -> torch.Tensor:
    """The weight [n, k] whose product is that of w with blocks of x ("input") or of the result ("output") times a
    matrix V [s, s]: w V^T, or V^T w."""
    if location == "output":
        return folded(w.T, "input", matrix.T).T
    return (w.unflatten(1, (-1, len(matrix))) @ matrix.T).flatten(1)


def sylvester(size: int, device: torch.device) -> torch.Tensor:
    """H * size^0.5, fp32 [size, size] of 1 and -1, of a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
