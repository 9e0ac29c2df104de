"""How a format stores a tensor: its types, and a `Dim` for each dimension. Knows no format.

Cutting for ranks and the sizes of a layer are derived from these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe, dtype_name, one_of
from jitgemm.weight.codes import CODE_OPS

FLOATS = tuple(torch_dtype(name) for name in REAL_TYPES)
"""What a scale may be."""
INT32 = (torch.int32,)
INT8 = (torch.int8,)
BYTES = (torch.int8, torch.uint8)
E8M0 = (torch.float8_e8m0fnu, torch.uint8)
"""Scales that are powers of two, as such or as bytes."""
CODE_TYPES = {name: each.dtype for name, each in CODE_OPS.items() if each.dtype is not None}
"""The dtypes of the 8-bit codes."""


@dataclass(frozen=True)
class Dim:
    """A dimension of a tensor: `per` rows, columns or groups of the layer share an element along it.

    Attributes:
        of: "n" rows, "k" columns, or "G" groups of columns. Any other letter is a size of the format's own, along which
            nobody can cut.
    """

    of: str
    per: int = 1

    def __truediv__(self, per: int) -> Dim:
        return Dim(self.of, per)

    def __str__(self) -> str:
        return self.of if self.per == 1 else f"{self.of} / {self.per}"


N, K, G = Dim("n"), Dim("k"), Dim("G")


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of a layer as a format stores it.

    Attributes:
        dtypes: what it may have, the usual one first.
        dims: `Dim`s and numbers. None of them: a single element, in a file of any number of dimensions.
        optional: True if files may lack it; as text, what an error says if columns in groups are in activation order.
        wanted: what an error says of another shape.
    """

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[Dim | int, ...]
    optional: bool | str = False
    wanted: str = "shape {shape}, got {got}"

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    def axis(self, *letters: str) -> int | None:
        """Which dimension is one of "n", "k", "G", ..., or the number "1"; None for none."""
        dims = (dim.of if isinstance(dim, Dim) else str(dim) for dim in self.dims)
        return next((i for i, letter in enumerate(dims) if letter in letters), None)

    @property
    def known(self) -> bool:
        """Whether rows, columns and groups are all that it extends along."""
        return all(isinstance(dim, int) or dim.of in ("n", "k", "G") for dim in self.dims)

    def per(self, axis: int) -> int:
        """How many rows, columns or groups share an element along a dimension."""
        dim = self.dims[axis]
        return dim.per if isinstance(dim, Dim) else 1

    @property
    def is_scale(self) -> bool:
        """Whether it is in the type of the layer's scales, which files choose."""
        return self.dtypes[: len(FLOATS)] == FLOATS

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for {letter: size}."""
        return tuple(dim if isinstance(dim, int) else ceil_div(sizes[dim.of], dim.per) for dim in self.dims)

    def __str__(self) -> str:
        return f"{' or '.join(map(dtype_name, self.dtypes))} [{', '.join(map(str, self.dims))}]"


Layout = Mapping[str, TensorLayout]
"""A layer's tensors by suffix: what stands behind the layer's name."""


def stored(dtypes: torch.dtype | tuple[torch.dtype, ...], *dims: Dim | int, **more: Any) -> TensorLayout:
    """`TensorLayout` in the words of a table: stored(INT32, K / 8, N)."""
    return TensorLayout(dtypes if isinstance(dtypes, tuple) else (dtypes,), dims, **more)


def measure(tensors: Mapping[str, Any], layout: Layout) -> dict[str, int]:
    """The size that each letter of the layout stands for, from tensors or their headers. A tensor `weight_shape` is n,
    k. Raises ValueError where a tensor is missing, has another dtype or number of dimensions, or contradicts one
    further up."""
    sizes, shape = {}, tensors.get("weight_shape")
    if isinstance(shape, torch.Tensor):
        if shape.dtype not in (torch.int64, torch.int32) or tuple(shape.shape) != (2,):
            raise ValueError(f"weight_shape: expected int64 or int32 [2], got {describe(shape)}")
        sizes = dict(zip("nk", shape.tolist()))
    for name, expected in layout.items():
        if name not in tensors:
            if expected.optional:
                continue
            raise ValueError(f"{name}: expected {expected}, found none")
        tensor = tensors[name]
        if expected.is_scale and tensor.dtype not in expected.dtypes and "scale" in name:
            raise ValueError(f"{name}, a scale: expected {one_of(REAL_TYPES)}, got {dtype_name(tensor.dtype)}")
        if not expected.dims:
            check_single(name, tensor, FLOATS if expected.dtypes == (torch.float32,) else expected.dtypes)
            continue
        if tensor.dtype not in expected.dtypes or tensor.dim() != len(expected.dims):
            raise ValueError(f"{name}: expected {expected}, got {describe(tensor)}")
        for dim, size in zip(expected.dims, tensor.shape):
            if isinstance(dim, Dim):
                sizes.setdefault(dim.of, size * dim.per)
        if tuple(tensor.shape) != (shape := expected.shape(sizes)):
            shapes = expected.wanted.format(shape=list(shape), got=list(tensor.shape), **sizes)
            raise ValueError(f"{name}: expected {shapes}")
    return sizes


def fits(tensors: Mapping[str, Any], layout: Layout) -> bool:
    """Whether tensors or their headers are of this layout."""
    try:
        return bool(measure(tensors, layout))
    except ValueError:
        return False


def check_single(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raises ValueError for more than one element, or none, and for another dtype: nothing is converted."""
    if math.prod(tensor.shape) != 1 or tensor.dtype not in dtypes:
        types = " or ".join(map(dtype_name, dtypes))
        raise ValueError(f"{name}: expected one element of {types}, got {describe(tensor)}")
