"""What importers share of affine parameters: reading them, group sizes, the kinds of zero point. Knows no format.

::

    integer_zero   (q - zero) * scale             zero an integer 0..16, of 8 bits 0..256
    float_zero     q * scale + zero               zero a float
    scaled_zero    q * scale - zero               zero a float that was an integer times scale, rounded
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jitgemm.checkpoint.bits import minus_8, minus_128
from jitgemm.checkpoint.canonical import CanonicalWeight, Dims, TensorInfo
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe, dtype_name
from jitgemm.weight.pack import MAX_ZERO

FLOATS = tuple(torch_dtype(name) for name in REAL_TYPES)
"""What a scale may be."""
INT32 = (torch.int32,)
INT8 = (torch.int8,)
BYTES = (torch.int8, torch.uint8)

Layout = Mapping[str, tuple[Any, ...]]
"""{name: (dtypes, "k / 8", "n")} of a format's tensors. A dimension is a number, a letter for a size, or a letter over
how many of its elements share a word."""


def setting(config: Mapping[str, Any] | None, *names: str, default: Any = None) -> Any:
    """The first of several names that a config has, other than null."""
    for name in names:
        value = (config or {}).get(name)
        if value is not None:
            return value
    return default


def check_setting(config: Mapping[str, Any] | None, expected: Any, *names: str) -> None:
    """Raises ValueError for a config that has another value under one of the names."""
    found = setting(config, *names, default=expected)
    if found != expected:
        raise ValueError(f"{names[0]}: expected {expected}, got {found!r}")


def check_one_of(config: Mapping[str, Any] | None, name: str, known: Sequence[str]) -> None:
    """Raises ValueError for a setting that is given, not null and none of `known`, in whatever case."""
    found = (config or {}).get(name)
    if found is not None and str(found).lower() not in [each.lower() for each in known]:
        raise ValueError(f"{name}: expected {' or '.join(known)}, got {found!r}")


def flag(config: Mapping[str, Any] | None, name: str) -> bool | None:
    """A setting that is true or false, None where the config has none. Raises ValueError for another value."""
    value = setting(config, name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value


def measure(tensors: Mapping[str, Any], layout: Layout) -> dict[str, int]:
    """The size that each letter of the layout stands for, from tensors or their headers.

    Raises:
        ValueError: a tensor is missing, has another dtype or number of dimensions, or contradicts one further up.
    """
    sizes: dict[str, int] = {}
    for name, (dtypes, *dims) in layout.items():
        expected = f"{name}: expected {' or '.join(dtype_name(d) for d in dtypes)} [{', '.join(dims)}]"
        if name not in tensors:
            raise ValueError(f"{expected}, found none")
        tensor = tensors[name]
        if tensor.dtype not in dtypes or tensor.dim() != len(dims):
            raise ValueError(f"{expected}, got {describe(tensor)}")
        shape = []
        for dim, size in zip(dims, tensor.shape):
            letter, _, per_word = dim.partition(" / ")
            elements = int(per_word or 1)
            sizes.setdefault(letter, int(letter) if letter.isdigit() else size * elements)
            shape.append(sizes[letter] // elements)
        check_shape(name, tensor, *shape)
    return sizes


def dims_of(layout: Layout) -> Dims:
    """A layout without its dtypes."""
    return {name: tuple(dims) for name, (_, *dims) in layout.items()}


def fits(tensors: Mapping[str, Any], layout: Layout) -> bool:
    """Whether tensors or their headers are of this layout."""
    try:
        return bool(measure(tensors, layout))
    except ValueError:
        return False


def check_shape(name: str, tensor: torch.Tensor | TensorInfo, *shape: int) -> None:
    """Raises ValueError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


def check_single(name: str, tensor: torch.Tensor | TensorInfo) -> None:
    """Raises ValueError for more than one element, or none."""
    if math.prod(tensor.shape) != 1:
        raise ValueError(f"{name}: expected one element, got shape {list(tensor.shape)}")


def check_codes(name: str, codes: torch.Tensor, least: int, most: int, form: str = "") -> None:
    """Raises ValueError for values outside least..most. `form` says in the message what else was expected."""
    low, high = (int(x) for x in codes.aminmax()) if codes.numel() else (least, most)
    if low < least or high > most:
        raise ValueError(f"{name}: expected 4-bit values {least}..{most}{form}, got {low}..{high}")


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
    zero: torch.Tensor | None,
    group_size: int,
    permutation: torch.Tensor | None = None,
    *,
    name: str,
    bits: int = 4,
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
    most_zero = 1 << bits
    if zero is None or bool((zero == most_zero // 2).all()):
        signed = minus_8(q) if bits == 4 else minus_128(q)
        return CanonicalWeight(signed, scale, group_size=group_size, permutation=permutation, bits=bits)
    least, most = (int(x) for x in zero.aminmax())
    if least < 0 or most > most_zero:
        raise ValueError(
            f"{name}: expected zero points 0..{most_zero} on the scale of the codes 0..{most_zero - 1}, got "
            f"{least}..{most}"
        )
    zero = zero.to(torch.uint8 if bits == 4 else torch.int16)
    return CanonicalWeight(q, scale, zero, group_size=group_size, permutation=permutation, bits=bits)


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
