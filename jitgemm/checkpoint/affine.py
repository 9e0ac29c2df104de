"""What formats share of affine parameters: ranges of codes, and the kinds of zero point. Knows no format.

::

    integer_zero   (q - zero) * scale             zero an integer 0..16, of 8 bits 0..256
    float_zero     q * scale + zero               zero a float
    scaled_zero    q * scale - zero               zero a float that was an integer times scale, rounded
"""

from __future__ import annotations

import torch

from jitgemm.checkpoint.bits import minus_8, minus_128
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.kernel.codes import CODES
from jitgemm.weight.pack import MAX_ZERO


def check_codes(name: str, codes: torch.Tensor, least: int, most: int, form: str = "") -> None:
    """Raises ValueError for values outside least..most. `form` says in the message what else was expected."""
    low, high = (int(x) for x in codes.aminmax()) if codes.numel() else (least, most)
    if low < least or high > most:
        raise ValueError(f"{name}: expected 4-bit values {least}..{most}{form}, got {low}..{high}")


def integer_zero(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    permutation: torch.Tensor | None = None,
    *,
    name: str,
    code: str = "int4",
) -> CanonicalWeight:
    """(q - zero) * scale. Where every zero is 8 (of 8 bits 128): the signed codes q - 8, the same values and a cheaper
    kernel.

    Args:
        q: uint8 [n, k], 0..15; of 8 bits 0..255.
        zero: integers [n, G]; None where each is 8 or 128 by definition.
        name: the tensor that holds zero, for the message.

    Raises:
        ValueError: a zero is not in 0..16, or of 8 bits in 0..256.
    """
    most_zero = 1 << CODES[code].bits
    if zero is None or bool((zero == most_zero // 2).all()):
        signed = minus_8(q) if code == "int4" else minus_128(q)
        return CanonicalWeight(signed, scale, group_size=group_size, permutation=permutation, code=code)
    least, most = (int(x) for x in zero.aminmax())
    if least < 0 or most > most_zero:
        raise ValueError(
            f"{name}: expected zero points 0..{most_zero} on the scale of the codes 0..{most_zero - 1}, got "
            f"{least}..{most}"
        )
    zero = zero.to(torch.uint8 if code == "int4" else torch.int16)
    return CanonicalWeight(q, scale, zero, group_size=group_size, permutation=permutation, code=code)


def float_zero(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> CanonicalWeight:
    """q * scale + zero; without offset where every zero is 0.

    Args:
        q: [n, k], int8 of -8..7 or uint8 of 0..15.
        scale, zero: floats [n, G]. Where their dtypes differ, both are widened to fp32.
    """
    offset = zero if bool(zero.any()) else None
    if offset is not None and scale.dtype != zero.dtype:
        scale, offset = scale.float(), zero.float()
    none = None if q.dtype == torch.int8 else torch.zeros(scale.shape, dtype=torch.uint8, device=scale.device)
    return CanonicalWeight(q, scale, none, offset, group_size)


def scaled_zero(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> CanonicalWeight:
    """q * scale - zero, as `float_zero`. With integer zero points where every zero is exactly 0..16 times its scale."""
    integer = (zero.double() / scale.double()).round()
    exact = (integer * scale.double() == zero.double()) & (integer >= 0) & (integer <= MAX_ZERO)
    if scale.dtype != torch.float32 and bool(exact.all()):  # in fp32, q * scale is rounded before zero is subtracted
        return integer_zero(q, scale, integer.to(torch.uint8), group_size, name="zero")
    return float_zero(q, scale, -zero, group_size)
