"""What messages say of a tensor, and the checks that more than one call makes: plain ones, and rows that TMA can walk.

The lowest module that imports PyTorch; knows nothing of weights, calls and addresses. Looks at dtypes, shapes, strides
and devices of real and fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from jitgemm.dtypes import DTYPES, torch_dtype
from jitgemm.kernel.formats import MAX_ROWS

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of tensors that have addresses and versions of their own: no tracer's, no wrapper of others."""

ALIGNMENT = 16
"""Addresses and row strides of TMA tensors are multiples of so many bytes (CUDA driver API, cuTensorMapEncodeTiled)."""

TYPE_NAMES = {torch_dtype(name): name for name in DTYPES}
"""`jitgemm.dtypes`' name of a PyTorch dtype."""


def dtype_name(dtype: object) -> str:
    """A dtype in a message: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: Any) -> str:
    """dtype and shape of a tensor, or of a header that has both, in a message: "bfloat16 [4, 64]"."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def one_of(types: tuple[str, ...]) -> str:
    """Types by name in a message: "bfloat16, float16 or float32"."""
    names = [DTYPES[name].torch_name for name in types]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def statically_true(condition: Any) -> bool:
    """Whether a condition on sizes holds for all that a tracer lets them be: to ask more would put a guard on the
    graph. The call checks again when it runs."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():  # Dynamo says that a SymBool is one
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def shapes_differ(shape: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether two shapes are known to differ."""
    return len(shape) != len(expected) or any(statically_true(a != b) for a, b in zip(shape, expected))


def take_rows(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """tensor[rows], of 8-bit floats too, which torch 2.8 cannot index on a CPU."""
    return tensor.view(torch.int8)[rows].view(tensor.dtype) if tensor.dtype.itemsize == 1 else tensor[rows]


def check_tensor(name: str, value: object) -> torch.Tensor:
    """The value, if it is a tensor; else TypeError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    return value


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for tensors whose memory does not hold their values one by one."""
    if tensor.layout != torch.strided or (not torch.compiler.is_compiling() and tensor.is_neg()):
        form = "a lazily negated one" if tensor.layout == torch.strided else f"layout {tensor.layout}"
        raise TypeError(f"{name}: expected a plain strided tensor, got {form}")


def check_values(name: str, tensor: torch.Tensor) -> None:
    """`check_plain`; ValueError for tensors without values."""
    check_plain(name, tensor)
    if tensor.is_meta:
        raise ValueError(f"{name}: expected a tensor with values, got one on the meta device")


def check_dtype(name: str, dtype: object, types: tuple[str, ...], why: str = "") -> str:
    """The name of a dtype that is one of `types`; else TypeError, which may say why it has to be."""
    name_of = TYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if name_of not in types:
        raise TypeError(f"{name}: expected {one_of(types)}{why and f', {why}'}, got {dtype_name(dtype)}")
    return name_of


def check_rows(name: str, tensor: torch.Tensor, *, may_overlap: bool = False) -> None:
    """A matrix with contiguous rows whose stride TMA can walk."""
    rows, columns = tensor.shape
    if statically_true(tensor.stride(1) != 1) and statically_true(columns > 1):
        raise ValueError(f"{name}: expected stride 1 along its columns, got strides {tuple(tensor.stride())}")
    if statically_true(rows > MAX_ROWS):
        raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {rows}")
    if statically_true(rows < 2):  # one row has no stride to walk
        return
    unit = ALIGNMENT // tensor.element_size()
    if statically_true(tensor.stride(0) % unit != 0):
        multiple = f"a row stride that is a multiple of {unit} elements ({ALIGNMENT} bytes)"
        raise ValueError(f"{name}: expected {multiple}, got {tensor.stride(0)}")
    if statically_true(tensor.stride(0) < columns) and not may_overlap:
        apart = f"rows that do not overlap (row stride at least {columns})"
        raise ValueError(f"{name}: expected {apart}, got row stride {tensor.stride(0)}")


def check_matrix(
    name: str, value: object, shape: tuple[int | None, int | None], types: tuple[str, ...], why: str = ""
) -> None:
    """`check_rows` of a tensor of this shape, None for any size; types, why: as for `check_dtype`."""
    tensor = check_tensor(name, value)
    if not torch.compiler.is_compiling():  # a tracer cannot ask
        check_plain(name, tensor)
    check_dtype(name, tensor.dtype, types, why)
    wrong = (size is not None and statically_true(size != found) for size, found in zip(shape, tensor.shape))
    if tensor.dim() != 2 or any(wrong):
        rows, columns = (each if size is None else size for each, size in zip(("rows", "columns"), shape))
        raise ValueError(f"{name}: expected shape [{rows}, {columns}], got {list(tensor.shape)}")
    check_rows(name, tensor)


def check_exact(name: str, value: object, shape: Sequence[Any], types: tuple[str, ...]) -> None:
    """A contiguous tensor of this shape."""
    tensor = check_tensor(name, value)
    check_plain(name, tensor)
    check_dtype(name, tensor.dtype, types)
    if shapes_differ(tensor.shape, shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {list(shape)}, got {list(tensor.shape)} with strides "
            f"{tuple(tensor.stride())}"
        )


def check_vector(name: str, value: object, types: tuple[str, ...], elements: int) -> None:
    """A contiguous vector, or for one element a tensor of any shape."""
    tensor = check_tensor(name, value)
    check_dtype(name, tensor.dtype, types)
    check_plain(name, tensor)
    several = statically_true(elements > 1)
    if statically_true(tensor.numel() != elements) or (several and tensor.dim() != 1):
        expected = f"shape [{elements}]" if several else "one element"
        raise ValueError(f"{name}: expected {expected}, got shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def check_device(name: str, tensor: torch.Tensor, where: str, device: torch.device) -> None:
    """The device is that of the call's first tensor, whose name is `where`."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where {where} is, got one on {tensor.device}")


def check_runs(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor where no call can run, such as one on the meta device."""
    if tensor.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name}: expected a CUDA or CPU tensor, got one on {tensor.device}")


def check_no_grad(name: str, tensor: torch.Tensor | None) -> None:
    """Raises ValueError for tensors that a gradient is expected for. Whoever remembers that a call was checked has to
    remember whether gradients were on, too."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor that does not require grad, since jitgemm computes no gradients, got one that "
            "does; run under torch.no_grad() or torch.inference_mode()"
        )


def check_written(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a result that a gradient is expected for, whether gradients are on or not."""
    if tensor.requires_grad:
        raise ValueError(f"{name}: expected a tensor that does not require grad, got one that does")


def check_flag(name: str, value: object) -> None:
    """Raises TypeError for anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def check_float(name: str, value: Any) -> float:
    """An int or float as a float; else TypeError. ValueError for an int that is beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a float, got an int of {int(value).bit_length()} bits") from None


def check_int(name: str, value: Any) -> int:
    """An integer of any class but bool, as an int; else TypeError."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
