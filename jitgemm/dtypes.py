"""The types of values in tensors and kernels, in one table. Imports PyTorch only when a dtype of its is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class DType(NamedTuple):
    """A type of values.

    Attributes:
        name: as kernel specs, cache entries and options have it.
        torch_name: PyTorch's name.
        bytes: of a value.
        number: `RealType` in include/jitgemm/types.cuh, which kernels take at run time and state dicts hold; None for
            types that are no `RealType`. Append only.
    """

    name: str
    torch_name: str
    bytes: int
    number: int | None = None

    @property
    def cpp_name(self) -> str:
        """The enumerator of `RealType`."""
        return f"k{self.name.capitalize()}"


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("bf16", "bfloat16", 2, 1),
        DType("fp16", "float16", 2, 2),
        DType("fp32", "float32", 4, 0),
        DType("e4m3", "float8_e4m3fn", 1),
        DType("e8m0", "float8_e8m0fnu", 1),
        DType("s8", "int8", 1),
        DType("s32", "int32", 4, 3),
        DType("s64", "int64", 8),
    )
}
"""By name."""

REAL_TYPES = ("bf16", "fp16", "fp32")
"""Types of scales, results, and activations before they are quantised."""
LHS_TYPES = ("e4m3", "s8")
"""Types of quantised activations."""
INDEX_TYPES = ("s32", "s64")
"""Types of experts' ids and of numbers of rows."""


def torch_dtype(name: str) -> torch.dtype:
    """PyTorch's dtype of this name."""
    import torch

    return getattr(torch, DTYPES[name].torch_name)
