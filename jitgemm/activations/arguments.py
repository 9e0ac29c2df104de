"""Checks of a quantiser call's arguments: what each must be, in one message that names it.

Works on real and fake tensors: looks at dtypes, shapes, strides and devices, never at values or addresses.
"""

from __future__ import annotations

import itertools
import math

import torch

from jitgemm.activations.kernel import most_k
from jitgemm.activations.scheme import GELU_MULS, SCHEMES, SILU_MUL, Activation, Gate, Prologue
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import K_ALIGNMENT, LHS_GROUP, ROTATION, Correction, ceil_div, lhs_columns
from jitgemm.runtime.launch import Pointer
from jitgemm.tensors import ALIGNMENT, check_device, check_dtype, check_flag, check_float, check_no_grad
from jitgemm.tensors import check_plain, check_rows, check_runs, check_tensor, check_vector, dtype_name
from jitgemm.tensors import shapes_differ, statically_true

POINTERS = (
    Pointer("x", "x", ALIGNMENT),
    Pointer("q", "out[0]", ALIGNMENT, written=True),
    Pointer("scale", "out[1]", written=True),
    Pointer("zero", "out[2]", written=True),
    Pointer("given_scale", "scale"),
    Pointer("given_zero", "zero"),
    Pointer("norm_weight", "rms_norm", ALIGNMENT),
    Pointer("permutation", "permutation", ALIGNMENT),
    Pointer("row_count", "row_count", 4),
    Pointer("row_index", "row_index", 4),
    Pointer("residual", "residual", ALIGNMENT),
    Pointer("sum", "residual_out", ALIGNMENT, written=True, in_place=("x", "residual")),
)
"""What a launch has addresses of, in the order of `QuantizeArgs` in include/jitgemm/quantize/types.cuh."""

_OUT_NAMES = "out[0]", "out[1]", "out[2]"

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""q [m, k], or of `lhs_columns` with sums, scale [m], or [m, ceil(k / 128)] by block, and zero [m] if affine."""


CODES = {name: torch_dtype(name) for name in LHS_TYPES}
"""PyTorch's dtype of codes by the name in `Activation`."""
_ACTIVATIONS: dict[tuple[object, str, bool, int], Activation] = {
    (CODES[dtype], scheme, affine, rotation): Activation(dtype, scheme, affine, rotation)
    for dtype, scheme, affine, rotation in itertools.product(LHS_TYPES, SCHEMES, (False, True), (0, ROTATION))
}
"""Made once, since a call asks for its own."""


def activation_of(
    dtype: object, scheme: object, affine: bool, name: str = "dtype", schemes: tuple[str, ...] = SCHEMES,
    rotation: int = 0,
) -> Activation:  # fmt: skip
    """The activation of a call's arguments, checked; `name` is the dtype's."""
    if type(scheme) is not str or scheme not in schemes:
        raise ValueError(f"scheme: expected one of {schemes}, got {scheme!r}")
    if type(affine) is not bool:
        check_flag("affine", affine)
    if type(rotation) is not int or rotation not in (0, ROTATION):
        raise ValueError(f"rotation: expected 0 or {ROTATION}, got {rotation!r}")
    if not isinstance(dtype, torch.dtype) or dtype not in CODES.values():
        check_dtype(name, dtype, LHS_TYPES)
    if affine and dtype != torch.int8:
        raise ValueError(f"affine: expected {name} int8, got {dtype_name(dtype)}, which has no zero point")
    if affine and scheme == "block":
        raise ValueError("affine: expected False for scheme 'block', got True")
    return _ACTIVATIONS[dtype, scheme, affine, rotation]


def gate_of(silu_mul: bool, gelu_mul: str | None) -> Gate | None:
    """The gate of a call. Raises TypeError or ValueError for two of them, or one unknown."""
    if type(silu_mul) is not bool:
        check_flag("silu_mul", silu_mul)
    if gelu_mul is None:
        return SILU_MUL if silu_mul else None
    if silu_mul or not isinstance(gelu_mul, str) or gelu_mul not in tuple(GELU_MULS):
        expected = "None with silu_mul" if silu_mul else " or ".join(map(repr, (*GELU_MULS, None)))
        raise ValueError(f"gelu_mul: expected {expected}, got {gelu_mul!r}")
    return GELU_MULS[gelu_mul]


def check_arguments(
    x: torch.Tensor, activation: Activation, prologue: Prologue, scale: torch.Tensor | None, zero: torch.Tensor | None,
    row_count: torch.Tensor | None, row_index: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError unless the fields of a `QuantizeCall` fit together."""
    norm, eps, gate, residual, total, permutation = prologue
    check_plain("x", x)
    check_dtype("x", x.dtype, REAL_TYPES)
    check_runs("x", x)
    check_rows("x", x, may_overlap=True)
    inputs = gate.inputs if gate else 1
    if inputs > 1 and statically_true(x.shape[1] % (inputs * K_ALIGNMENT) != 0):
        raise ValueError(f"x: expected {inputs}k columns with a gate, k a multiple of {K_ALIGNMENT}, got {x.shape[1]}")
    k = x.shape[1] // inputs
    limit = most_k(permutation is not None, activation.block)
    if statically_true(k < K_ALIGNMENT) or statically_true(k % K_ALIGNMENT != 0) or statically_true(k > limit):
        suffix = "" if permutation is None else " with a permutation"
        expected = f"k to be a multiple of {K_ALIGNMENT} from {K_ALIGNMENT} to {limit}{suffix}"
        raise ValueError(f"x: expected {expected}, got {k}")
    if activation.rotation and statically_true(k % ROTATION != 0):
        raise ValueError(f"x: expected k to be a multiple of {ROTATION} with a rotation, got {k}")
    if activation.rotation and permutation is not None:
        raise ValueError("permutation: expected None with a rotation, got one")

    for name, value, needed, why in (
        ("scale", scale, activation.static, "scheme 'tensor'"),
        ("zero", zero, activation.static and activation.affine, "scheme 'tensor' with affine"),
    ):
        if needed and value is None:
            raise ValueError(f"{name}: expected one element for {why}, got None")
        if not needed and value is not None:
            raise ValueError(f"{name}: expected None unless for {why}, got a {type(value).__name__}")
    if norm is not None and gate:
        raise ValueError("rms_norm: expected None with silu_mul or gelu_mul, got a weight")
    if residual is not None and norm is None:
        raise ValueError("residual: expected None without rms_norm, got a tensor")
    for name, value in (("residual", residual), ("residual_out", total)):
        if value is not None:
            rows_of_x = rows_like(name, value, x)
            check_plain(name, rows_of_x)
            check_rows(name, rows_of_x, may_overlap=name == "residual")
    rows = x.shape[0] if row_index is None else row_index.shape[0]
    if row_count is not None and check_tensor("row_count", row_count).dim() != 1:
        raise ValueError(f"row_count: expected shape [1] or [parts], got {list(row_count.shape)}")
    parts = 1 if row_count is None else max(1, row_count.numel())
    given = rows if isinstance(scale, torch.Tensor) and statically_true(scale.numel() == rows) else 1
    if statically_true(rows % parts != 0):
        raise ValueError(f"row_count: expected as many elements as {rows} rows have equal parts, got {parts}")
    for name, value, types, elements in (
        ("scale", scale, ("fp32",), given),
        ("zero", zero, ("s32",), given),
        ("rms_norm", norm, REAL_TYPES, k),
        ("permutation", permutation, ("s32",), k),
        ("row_count", row_count, ("s32",), parts),
        ("row_index", row_index, ("s32",), rows),
    ):
        if value is not None:
            check_vector(name, value, types, elements)
            check_device(name, value, "x", x.device)
    if not 0 <= check_float("eps", eps) < 3e38:
        raise ValueError(f"eps: expected a finite number that is not negative, got {eps}")
    read = ("x", x), ("scale", scale), ("rms_norm", norm), ("residual", residual), ("residual_out", total)
    for name, value in read:
        check_no_grad(name, value)


def as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in two dimensions, without a copy."""
    if tensor.dim() == 0:
        raise ValueError(f"{name}: expected shape [..., k], got a scalar")
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    except RuntimeError:
        check_plain(name, tensor)
        raise ValueError(
            f"{name}: expected rows that are one stride apart, got shape {list(tensor.shape)} with strides "
            f"{tuple(tensor.stride())}; make it contiguous"
        ) from None


def rows_like(name: str, value: object, x: torch.Tensor) -> torch.Tensor:
    """The tensor as rows, of x's shape, type and device."""
    tensor = check_tensor(name, value)
    if shapes_differ(tensor.shape, x.shape):
        raise ValueError(f"{name}: expected shape {list(x.shape)}, x's, got {list(tensor.shape)}")
    if tensor.dtype != x.dtype:
        check_dtype(name, tensor.dtype, (check_dtype("x", x.dtype, REAL_TYPES),), "x's type")
    check_device(name, tensor, "x", x.device)
    return as_rows(name, tensor)


def check_out(
    out: object, x: torch.Tensor, activation: Activation, gated: bool = False, correction: Correction | None = None
) -> Outputs:
    """The call's `out`, as rows, for x of any number of dimensions but 0."""
    dtype, scheme, affine, _ = activation
    expected = "(q, scale, zero)" if affine else "(q, scale)"
    if not isinstance(out, (tuple, list)) or len(out) != (3 if affine else 2):
        what = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out: expected {expected}, got {what}")
    compiling, device = torch.compiler.is_compiling(), x.device
    for name, tensor, wanted in zip(_OUT_NAMES, out, (CODES[dtype], torch.float32, torch.int32)):
        check_tensor(name, tensor)
        if not compiling:  # a tracer cannot ask
            check_plain(name, tensor)
        if tensor.dtype is not wanted:
            raise TypeError(f"{name}: expected {dtype_name(wanted)}, got {dtype_name(tensor.dtype)}")
        check_device(name, tensor, "x", device)
        if tensor.requires_grad:
            raise ValueError(f"{name}: expected a tensor that does not require grad, got one that does")
    q, (*lead, columns) = out[0], x.shape
    shape = (*lead, lhs_columns(columns // 2 if gated else columns, correction))
    if shapes_differ(q.shape, shape):
        raise ValueError(f"out[0]: expected shape {list(shape)}, got {list(q.shape)}")
    rows = as_rows("out[0]", q)
    check_rows("out[0]", rows)
    if scheme == "block":
        return rows, _check_block_scale(out[1], (*lead, ceil_div(shape[-1], LHS_GROUP))), None
    for name, tensor in zip(_OUT_NAMES[1:], out[1:]):
        fits = not shapes_differ(tensor.shape, lead) or not shapes_differ(tensor.shape, (*lead, 1))
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor of shape {lead} or {[*lead, 1]}, got "
                f"{list(tensor.shape)} with strides {tuple(tensor.stride())}"
            )
    scale, *zero = [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in out[1:]]
    return rows, scale, zero[0] if zero else None


def _check_block_scale(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The scales to write to as rows, of any strides without overlap."""
    if shapes_differ(scale.shape, shape):
        raise ValueError(f"out[1]: expected shape {list(shape)}, got {list(scale.shape)}")
    rows = as_rows("out[1]", scale)
    (m, blocks), (down, across) = rows.shape, rows.stride()
    several_rows, several_blocks = statically_true(m > 1), statically_true(blocks > 1)
    shared = (several_rows and statically_true(down <= 0)) or (several_blocks and statically_true(across <= 0))
    crossed = (
        several_rows
        and several_blocks
        and statically_true(down < blocks * across)
        and statically_true(across < m * down)
    )
    if shared or crossed:
        raise ValueError(f"out[1]: expected elements that do not overlap, got strides {tuple(scale.stride())}")
    return rows
