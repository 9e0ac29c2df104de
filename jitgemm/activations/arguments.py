"""Checks of a quantiser call's arguments: what each must be, in one message that names it.

Works on real and fake tensors alike; looks at dtypes, shapes, strides and devices, never at values. Addresses are
`runtime/checks.py`'s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from jitgemm.activations.kernel import most_k
from jitgemm.activations.scheme import GELU_MULS, SILU_MUL, Gate
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.kernel.formats import K_ALIGNMENT, LHS_GROUP, ceil_div
from jitgemm.runtime.checks import ALIGNMENT, Pointer, check_device, check_rows, check_vector
from jitgemm.tensors import (
    check_dtype,
    check_flag,
    check_float,
    check_no_grad,
    check_plain,
    check_tensor,
    shapes_differ,
    dtype_name,
    statically_true,
)

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
"""What a launch has addresses of, in the order of `QuantizeArgs` in include/jitgemm/quantize.cuh."""

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""q [m, k], scale [m], or [m, ceil(k / 128)] by block, and zero [m] if affine."""


class Inputs(NamedTuple):
    """A call's arguments but `out`, x as rows; but for row_count and row_index, in the order of the op's.

    Attributes:
        gate: for `silu_mul` and `gelu_mul` as `gate_of` says.
        row_count: int32 [1]: rows from there on are left alone. Or [E]: the result is E parts of as many rows, and of
            each part rows from row_count[e] on are left alone. None: no row is.
        block: a scale for every `LHS_GROUP` codes.
        row_index: int32 [m]: row i of the result is row row_index[i] of x, which is not checked. None: row i.
        residual: of x's shape and type, with rms_norm: x + residual is what is normalised.
        residual_out: with residual: where the sum is written.
    """

    x: torch.Tensor
    dtype: torch.dtype
    static: bool
    affine: bool
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    gate: Gate | None
    rms_norm: torch.Tensor | None
    eps: float
    permutation: torch.Tensor | None
    row_count: torch.Tensor | None = None
    block: bool = False
    row_index: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.x.shape[0] if self.row_index is None else self.row_index.shape[0]

    @property
    def masked(self) -> bool:
        """Whether rows to leave alone may have live ones behind them, as far as the kernel is to know."""
        if self.row_count is None:
            return False
        return self.row_count.shape[0] > 1 or (self.gate is None and self.row_index is None)

    @property
    def k(self) -> int:
        """Codes of a row."""
        return self.x.shape[1] // 2 if self.gate else self.x.shape[1]

    def new_outputs(self) -> Outputs:
        """Tensors to write to."""
        x = self.x
        m, device = self.rows, x.device
        q = torch.empty((m, self.k), dtype=self.dtype, device=device)
        scale = torch.empty(m, dtype=torch.float32, device=device)
        if self.block:  # by column, as DeepGEMM has them
            shape = m, ceil_div(self.k, LHS_GROUP)
            scale = torch.empty_strided(shape, (1, 4 * ceil_div(m, 4)), dtype=torch.float32, device=device)
        return q, scale, torch.empty(m, dtype=torch.int32, device=device) if self.affine else None

    def tensors(self, outputs: Outputs) -> tuple[torch.Tensor | None, ...]:
        """In the order of POINTERS."""
        given = self.scale, self.zero, self.rms_norm, self.permutation, self.row_count, self.row_index
        return self.x, *outputs, *given, self.residual, self.residual_out


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


def gate_of(silu_mul: bool, gelu_mul: str | None) -> Gate | None:
    """The gate of a call. Raises ValueError for two of them, or one unknown."""
    if gelu_mul is None:
        return SILU_MUL if silu_mul else None
    if silu_mul or not isinstance(gelu_mul, str) or gelu_mul not in tuple(GELU_MULS):
        expected = "None with silu_mul" if silu_mul else " or ".join(map(repr, (*GELU_MULS, None)))
        raise ValueError(f"gelu_mul: expected {expected}, got {gelu_mul!r}")
    return GELU_MULS[gelu_mul]


def check_arguments(inputs: Inputs) -> None:
    """Raises TypeError or ValueError unless the inputs fit together; looks at no values."""
    x, dtype, static, affine, scale, zero, gate, rms_norm, eps, permutation, row_count, block, row_index = inputs[:13]
    check_flag("affine", affine)
    check_dtype("dtype", dtype, LHS_TYPES)
    if affine and dtype != torch.int8:
        raise ValueError(f"affine: expected dtype int8, got {dtype_name(dtype)}, which has no zero point")
    if affine and block:
        raise ValueError("affine: expected False for scheme 'block', got True")
    check_plain("x", x)
    check_dtype("x", x.dtype, REAL_TYPES)
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(f"x: expected a CUDA or CPU tensor, got one on {x.device}")
    check_rows("x", x, may_overlap=True)
    if gate and statically_true(x.shape[1] % (2 * K_ALIGNMENT) != 0):
        raise ValueError(f"x: expected 2k columns with a gate, k a multiple of {K_ALIGNMENT}, got {x.shape[1]}")
    k, limit = inputs.k, most_k(permutation is not None, block)
    if statically_true(k < K_ALIGNMENT) or statically_true(k % K_ALIGNMENT != 0) or statically_true(k > limit):
        suffix = "" if permutation is None else " with a permutation"
        raise ValueError(
            f"x: expected k to be a multiple of {K_ALIGNMENT} from {K_ALIGNMENT} to {limit}{suffix}, got {k}"
        )

    for name, value, needed, why in (
        ("scale", scale, static, "scheme 'tensor'"),
        ("zero", zero, static and affine, "scheme 'tensor' with affine"),
    ):
        if needed and value is None:
            raise ValueError(f"{name}: expected one element for {why}, got None")
        if not needed and value is not None:
            raise ValueError(f"{name}: expected None unless for {why}, got a {type(value).__name__}")
    if rms_norm is not None and gate:
        raise ValueError("rms_norm: expected None with silu_mul or gelu_mul, got a weight")
    if inputs.residual is not None and rms_norm is None:
        raise ValueError("residual: expected None without rms_norm, got a tensor")
    for name in ("residual", "residual_out"):
        if getattr(inputs, name) is not None:
            rows = rows_like(name, getattr(inputs, name), x)
            check_plain(name, rows)
            check_rows(name, rows, may_overlap=name == "residual")
    if row_count is not None and check_tensor("row_count", row_count).dim() != 1:
        raise ValueError(f"row_count: expected shape [1] or [parts], got {list(row_count.shape)}")
    parts = 1 if row_count is None else max(1, row_count.numel())
    if statically_true(inputs.rows % parts != 0):
        raise ValueError(f"row_count: expected as many elements as {inputs.rows} rows have equal parts, got {parts}")
    for name, value, types, elements in (
        ("scale", scale, ("fp32",), 1),
        ("zero", zero, ("s32",), 1),
        ("rms_norm", rms_norm, REAL_TYPES, k),
        ("permutation", permutation, ("s32",), k),
        ("row_count", row_count, ("s32",), parts),
        ("row_index", row_index, ("s32",), inputs.rows),
    ):
        if value is not None:
            check_vector(name, value, types, elements)
            check_device(name, value, "x", x.device)
    if not 0 <= check_float("eps", eps) < 3e38:
        raise ValueError(f"eps: expected a finite number that is not negative, got {eps}")
    for name in ("x", "scale", "rms_norm", "residual", "residual_out"):
        check_no_grad(name, getattr(inputs, name))


def rows_like(name: str, value: object, x: torch.Tensor) -> torch.Tensor:
    """The tensor as rows, of x's shape, type and device."""
    tensor = check_tensor(name, value)
    if shapes_differ(tensor.shape, x.shape):
        raise ValueError(f"{name}: expected shape {list(x.shape)}, x's, got {list(tensor.shape)}")
    if tensor.dtype != x.dtype:
        check_dtype("x", x.dtype, REAL_TYPES)
        raise TypeError(f"{name}: expected {dtype_name(x.dtype)}, x's type, got {dtype_name(tensor.dtype)}")
    check_device(name, tensor, "x", x.device)
    return as_rows(name, tensor)


def check_out(
    out: object, x: torch.Tensor, dtype: torch.dtype, affine: bool, gated: bool, block: bool = False
) -> Outputs:
    """The call's `out`, as rows, for x of any number of dimensions but 0."""
    if type(affine) is not bool:
        check_flag("affine", affine)
    expected = "(q, scale, zero)" if affine else "(q, scale)"
    if not isinstance(out, (tuple, list)) or len(out) != (3 if affine else 2):
        what = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out: expected {expected}, got {what}")
    for i, (tensor, wanted) in enumerate(zip(out, (dtype, torch.float32, torch.int32))):
        name = f"out[{i}]"
        check_tensor(name, tensor)
        if not torch.compiler.is_compiling():  # a tracer cannot ask
            check_plain(name, tensor)
        if tensor.dtype is not wanted:
            check_dtype("dtype", dtype, LHS_TYPES)
            raise TypeError(f"{name}: expected {dtype_name(wanted)}, got {dtype_name(tensor.dtype)}")
        check_device(name, tensor, "x", x.device)
        if tensor.requires_grad:
            raise ValueError(f"{name}: expected a tensor that does not require grad, got one that does")
    q, lead = out[0], tuple(x.shape[:-1])
    shape = (*lead, x.shape[-1] // 2 if gated else x.shape[-1])
    if shapes_differ(q.shape, shape):
        raise ValueError(f"out[0]: expected shape {list(shape)}, got {list(q.shape)}")
    rows = as_rows("out[0]", q)
    check_rows("out[0]", rows)
    if block:
        return rows, _check_block_scale(out[1], (*lead, ceil_div(shape[-1], LHS_GROUP))), None
    for i, tensor in enumerate(out[1:], 1):
        if (
            shapes_differ(tensor.shape, lead) and shapes_differ(tensor.shape, (*lead, 1))
        ) or not tensor.is_contiguous():
            raise ValueError(
                f"out[{i}]: expected a contiguous tensor of shape {list(lead)} or {[*lead, 1]}, got "
                f"{list(tensor.shape)} with strides {tuple(tensor.stride())}"
            )
    return rows, out[1].view(-1), out[2].view(-1) if affine else None


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
