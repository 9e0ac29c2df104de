"""What importers share of affine parameters: reading them, group sizes, the kinds of zero point. Knows no format.

::

    integer_zero   (q - zero) * scale             zero an integer 0..16
    float_zero     (q - 8) * scale + zero         zero a float
    scaled_zero    q * scale - zero               zero a float that was an integer times scale, rounded
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.bits import minus_8
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe, dtype_name
from jitgemm.weight.pack import MAX_ZERO

FLOATS = tuple(torch_dtype(name) for name in REAL_TYPES)
"""What a scale may be."""


def setting(config: Mapping[str, Any] | None, *names: str, default: Any = None) -> Any:
    """The first of several names that a config has, other than null."""
    for name in names:
        value = (config or {}).get(name)
        if value is not None:
            return value
    return default


def take(tensors: Mapping[str, Any], name: str, dtypes: tuple[torch.dtype, ...], *dims: str) -> Any:
    """tensors[name], a tensor or its header, of one of the dtypes and with that many dimensions.

    Raises:
        ValueError: there is none such; `dims` ("k / 8", "n") say in the message what the dimensions are.
    """
    expected = f"{name}: expected {' or '.join(dtype_name(d) for d in dtypes)} [{', '.join(dims)}]"
    if name not in tensors:
        raise ValueError(f"{expected}, found none")
    tensor = tensors[name]
    if tensor.dtype not in dtypes or tensor.dim() != len(dims):
        raise ValueError(f"{expected}, got {describe(tensor)}")
    return tensor


def check_shape(name: str, tensor: torch.Tensor | TensorInfo, *shape: int) -> None:
    """Raises ValueError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


def check_single(name: str, tensor: torch.Tensor | TensorInfo) -> None:
    """Raises ValueError for more than one element, or none."""
    if math.prod(tensor.shape) != 1:
        raise ValueError(f"{name}: expected one element, got shape {list(tensor.shape)}")


def group_size_of(k: int, groups: int, given: Any, name: str) -> int:
    """Columns of a group, from the number of groups that tensor `name` has and the config's group_size.

    Args:
        given: the config's; -1, or k and more, for one group a row; None where no config says, and groups divide k.

    Raises:
        ValueError: they contradict each other.
    """
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < -1 or given == 0):
        raise ValueError(f"group_size: expected a positive integer, or -1 for one group a row, got {given!r}")
    if given is None:
        if groups < 1 or k % groups:
            raise ValueError(f"{name}: expected a number of groups that divides k = {k}, got {groups}")
        return k // groups
    size = k if given == -1 or given > k else given
    if ceil_div(k, size) != groups:
        raise ValueError(
            f"{name}: expected {ceil_div(k, size)} groups for k = {k} and group_size {given}, got {groups}"
        )
    return size


def integer_zero(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group_size: int,
    permutation: torch.Tensor | None = None,
    *,
    name: str,
) -> CanonicalWeight:
    """(q - zero) * scale. Where every zero is 8: the signed codes q - 8, the same values and a cheaper kernel.

    Args:
        q: uint8 [n, k], 0..15.
        zero: integers [n, G].
        name: the tensor that holds zero, for the message.

    Raises:
        ValueError: a zero is not in 0..16.
    """
    if bool((zero == 8).all()):
        return CanonicalWeight(minus_8(q), scale, group_size=group_size, permutation=permutation)
    least, most = (int(x) for x in zero.aminmax())
    if least < 0 or most > MAX_ZERO:
        raise ValueError(
            f"{name}: expected zero points 0..{MAX_ZERO} on the scale of the codes 0..15, got {least}..{most}"
        )
    return CanonicalWeight(q, scale, zero.to(torch.uint8), group_size=group_size, permutation=permutation)


def float_zero(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> CanonicalWeight:
    """q * scale + zero; without offset where every zero is 0.

    Args:
        q: int8 [n, k], -8..7.
        scale, zero: floats [n, G]. Where their dtypes differ, both are widened to fp32.
    """
    if not bool(zero.any()):
        return CanonicalWeight(q, scale, group_size=group_size)
    if scale.dtype != zero.dtype:
        scale, zero = scale.float(), zero.float()
    return CanonicalWeight(q, scale, offset=zero, group_size=group_size)


def scaled_zero(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> CanonicalWeight:
    """q * scale - zero. With integer zero points where every zero is exactly an integer 0..16 times its scale.

    Args:
        q: uint8 [n, k], 0..15.
        scale, zero: floats [n, G]. Where their dtypes differ, both are widened to fp32.
    """
    integer = (zero.double() / scale.double()).round()
    exact = (integer * scale.double() == zero.double()) & (integer >= 0) & (integer <= MAX_ZERO)
    if scale.dtype != torch.float32 and bool(exact.all()):  # in fp32, q * scale is rounded before zero is subtracted
        return integer_zero(q, scale, integer.to(torch.uint8), group_size, name="zero")
    if scale.dtype != zero.dtype:
        scale, zero = scale.float(), zero.float()
    none = torch.zeros(scale.shape, dtype=torch.uint8, device=scale.device)
    return CanonicalWeight(q, scale, none, offset=-zero, group_size=group_size)


def check_codes(name: str, codes: torch.Tensor, least: int, most: int) -> None:
    """Raises ValueError for values outside least..most."""
    found = [int(x) for x in codes.aminmax()] if codes.numel() else [least, most]
    if found[0] < least or found[1] > most:
        raise ValueError(f"{name}: expected 4-bit values {least}..{most}, got {found[0]}..{found[1]}")
