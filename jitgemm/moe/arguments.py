"""Checks of the layer's arguments: what each must be, in one message that names it.

Works on real and fake tensors alike; looks at dtypes, shapes, strides and devices, never at values. Addresses are
`runtime/checks.py`'s.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from jitgemm.activations.scheme import GATE_KINDS, GATE_ORDERS, Gate
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.gemm.problem import X_SCALE, X_ZERO
from jitgemm.gemm.problem import as_rows
from jitgemm.kernel.formats import MAX_ROWS
from jitgemm.moe.kernel import MAX_EXPERTS, MAX_GLOBAL_EXPERTS
from jitgemm.runtime.checks import ALIGNMENT, Pointer, check_device, check_rows, check_vector
from jitgemm.tensors import check_dtype, check_float, check_int, check_no_grad, check_plain, check_tensor
from jitgemm.tensors import describe, shapes_differ, dtype_name, statically_true
from jitgemm.weight.packed import AnyWeight, Weight
from jitgemm.weight.parts import PackedWeight, check_packed

ROUTE_POINTERS = (
    Pointer("ids", "topk_ids", 4),
    Pointer("expert_map", "expert_map", 4),
    Pointer("offsets", "offsets", 4, written=True),
    Pointer("row_index", "row_index", 4, written=True),
    Pointer("inverse", "inverse", 4, written=True),
)
"""What a launch has addresses of, in the order of `RouteArgs` in include/jitgemm/moe/route.cuh."""
FRONT_POINTERS = (
    *ROUTE_POINTERS,
    Pointer("x", "x", ALIGNMENT),
    Pointer("q", "q", ALIGNMENT, written=True),
    Pointer("scale", "scale", 4, written=True),
    Pointer("zero", "zero", 4, written=True),
)
"""What a launch has addresses of, in the order of `FrontArgs` in include/jitgemm/moe/front.cuh."""
COMBINE_POINTERS = (
    Pointer("rows", "rows", ALIGNMENT),
    Pointer("inverse", "inverse", 4),
    Pointer("weights", "topk_weights"),
    Pointer("addend", "addend", ALIGNMENT),
    Pointer("out", "out", ALIGNMENT, written=True, in_place=("addend",)),
)
"""What a launch has addresses of, in the order of `CombineArgs` in include/jitgemm/moe/combine.cuh."""

_WEIGHTS = tuple(
    Pointer(None, f"{name}.{part}", alignment)
    for name in ("w13", "w2")
    for part, alignment in (("blocks", ALIGNMENT), ("channel_scale", 4), ("row_sum", 1))
)
_BIASES = Pointer(None, "bias13"), Pointer(None, "bias2")
LAYER_POINTERS = (
    Pointer(None, "x", ALIGNMENT),
    *_WEIGHTS,
    Pointer(None, "topk_ids", 4),
    Pointer(None, "topk_weights"),
    Pointer(None, "expert_map", 4),
    *_BIASES,
    Pointer(None, "addend", ALIGNMENT),
    Pointer(None, "out", ALIGNMENT, written=True, in_place=("x", "addend")),
)
"""Operands of `fused_experts`, which reads x before it writes out."""
MASKED_POINTERS = (
    Pointer(None, "x", ALIGNMENT),
    Pointer(None, X_SCALE),
    Pointer(None, X_ZERO),
    *_WEIGHTS,
    Pointer(None, "masked_m", 4),
    *_BIASES,
    Pointer(None, "out", ALIGNMENT, written=True, in_place=("x",)),
)
"""Operands of `fused_experts_masked`, which reads x before it writes out."""


class Routing(NamedTuple):
    """Where the tokens' choices go. Row r of a grouped GEMM is a choice of token row_index[r].

    Attributes:
        offsets: int32 [experts + 1]: expert e has the rows offsets[e]..offsets[e + 1] - 1, in the order of its choices
            in topk_ids.
        row_index: int32 [tokens * top_k]; undefined from offsets[experts] on.
        inverse: int32 [tokens, top_k]: row of each choice, -1 where it is skipped.
    """

    offsets: torch.Tensor
    row_index: torch.Tensor
    inverse: torch.Tensor


class Layer(NamedTuple):
    """All of a call but where to write. `block`: tokens are quantised with a scale for every 128 k."""

    x: torch.Tensor
    w13: AnyWeight
    w2: AnyWeight
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    gate: Gate
    lhs_dtype: torch.dtype
    affine: bool
    expert_map: torch.Tensor | None
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    addend: torch.Tensor | None
    batch_invariant: bool
    block: bool = False

    @property
    def experts(self) -> int:
        """Experts of this device."""
        return self.w13.experts  # type: ignore[return-value]

    def operands(self, out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """In the order of LAYER_POINTERS."""
        x, w13, w2, topk_ids, topk_weights, _, _, _, expert_map, bias13, bias2, addend, *_ = self
        return x, *parts_of(w13), *parts_of(w2), topk_ids, topk_weights, expert_map, bias13, bias2, addend, out

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What of it is a tensor, and not a weight."""
        return [value for value in self if isinstance(value, torch.Tensor)]

    def new_out(self) -> torch.Tensor:
        """A tensor to write to."""
        return self.x.new_empty((self.x.shape[0], self.w2.n))


def parts_of(weight: AnyWeight) -> tuple[torch.Tensor | None, ...]:
    """The weight's tensors, in the order of LAYER_POINTERS."""
    return weight.blocks, weight.channel_scale, weight.row_sum


def make_gate(activation: str, order: str, limit: float | None, alpha: float) -> Gate:
    """The gate of these arguments of a call, checked."""
    for name, value, choices in (("activation", activation, GATE_KINDS), ("order", order, GATE_ORDERS)):
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
    for name, number in (("limit", math.inf if limit is None else limit), ("alpha", alpha)):
        if not check_float(name, number) > 0:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    return Gate(
        activation, order, math.inf if limit is None else float(limit),
        float(alpha) if activation == "swiglu_oai" else 1.0,
    )  # fmt: skip


def check_routing(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError unless choices, map and number of experts fit together."""
    check_plain("topk_ids", check_tensor("topk_ids", topk_ids))
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids: expected int32 or int64, got {dtype_name(topk_ids.dtype)}")
    if topk_ids.dim() != 2 or statically_true(topk_ids.shape[1] < 1):
        raise ValueError(f"topk_ids: expected shape [tokens, top_k], top_k at least 1, got {list(topk_ids.shape)}")
    if not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids: expected a contiguous tensor, got strides {tuple(topk_ids.stride())}")
    if statically_true(topk_ids.shape[0] * topk_ids.shape[1] > MAX_ROWS):
        raise ValueError(f"topk_ids: expected at most {MAX_ROWS} elements, got {topk_ids.numel()}")
    if topk_ids.device.type not in ("cuda", "cpu"):
        raise ValueError(f"topk_ids: expected a CUDA or CPU tensor, got one on {topk_ids.device}")
    if not 1 <= check_int("experts", experts) <= MAX_EXPERTS:
        raise ValueError(f"experts: expected 1 to {MAX_EXPERTS}, got {experts}")
    if expert_map is not None:
        check_tensor("expert_map", expert_map)
        sizes = expert_map.shape
        if len(sizes) != 1 or statically_true(sizes[0] < 1) or statically_true(sizes[0] > MAX_GLOBAL_EXPERTS):
            raise ValueError(
                f"expert_map: expected shape [global_experts], 1 to {MAX_GLOBAL_EXPERTS} of them, got "
                f"{list(expert_map.shape)}"
            )
        check_vector("expert_map", expert_map, ("s32",), sizes[0])
        check_device("expert_map", expert_map, "topk_ids", topk_ids.device)


def check_combining(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    topk_weights: torch.Tensor,
    addend: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Raises TypeError or ValueError unless the tensors fit together."""
    _check_matrix("rows", rows, None, None, REAL_TYPES)
    columns = rows.shape[1]
    if columns % 8 or not rows.is_contiguous():
        raise ValueError(
            f"rows: expected a contiguous matrix of 8, 16, 24, ... columns, got {describe(rows)} with strides "
            f"{tuple(rows.stride())}"
        )
    check_plain("inverse", check_tensor("inverse", inverse))
    if inverse.dtype != torch.int32 or inverse.dim() != 2 or not inverse.is_contiguous():
        raise ValueError(f"inverse: expected contiguous int32 [tokens, top_k], got {describe(inverse)}")
    _check_weights(topk_weights, inverse)
    tokens = inverse.shape[0]
    _check_matrix("out", out, tokens, columns, REAL_TYPES)
    if addend is not None:
        _check_addend(addend, tokens, columns, out.dtype)
    for name, tensor in (
        ("rows", rows), ("inverse", inverse), ("topk_weights", topk_weights), ("addend", addend), ("out", out),
    ):  # fmt: skip
        if tensor is not None:
            check_device(name, tensor, "rows", rows.device)
            check_no_grad(name, tensor)


def check_weights(w13: Any, w2: Any) -> int:
    """How many experts both have; TypeError or ValueError unless they are weights of experts that fit together."""
    counts = []
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, (Weight, PackedWeight)):
            raise TypeError(f"{name}: expected a W4Weight or W8Weight of experts, got {type(weight).__name__}")
        counts.append(check_packed(weight, f"{name}.", experts=True) or 0)
        if counts[-1] > MAX_EXPERTS:
            raise ValueError(f"{name}: expected at most {MAX_EXPERTS} experts, got {counts[-1]}")
    if counts[1] != counts[0]:
        raise ValueError(f"w2: expected {counts[0]} experts, as w13 has, got {counts[1]}")
    if w13.n != 2 * w2.k:
        raise ValueError(f"w13: expected n = {2 * w2.k}, twice the k of w2, got {w13.n}")
    return counts[0]


def check_arguments(layer: Layer) -> None:
    """Raises TypeError or ValueError unless dtypes, shapes, strides and devices fit together."""
    x, w13, w2, topk_ids, topk_weights, _, lhs_dtype, affine, expert_map, bias13, bias2, addend, _, block = layer
    experts = check_experts(w13, w2, lhs_dtype, affine, block)
    _check_matrix("x", x, None, w13.k, REAL_TYPES)
    tokens = x.shape[0]
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(f"x: expected a CUDA or CPU tensor, got one on {x.device}")
    check_routing(topk_ids, experts, expert_map)
    if statically_true(topk_ids.shape[0] != tokens):
        raise ValueError(f"topk_ids: expected shape [{tokens}, top_k], got {list(topk_ids.shape)}")
    _check_weights(topk_weights, topk_ids)
    check_biases(w13, w2, bias13, bias2)
    if addend is not None:
        _check_addend(addend, tokens, w2.n, x.dtype)
    for name, tensor in (
        ("w13", w13.blocks), ("w2", w2.blocks), ("topk_ids", topk_ids), ("topk_weights", topk_weights),
        ("bias13", bias13), ("bias2", bias2), ("addend", addend),
    ):  # fmt: skip
        if tensor is not None:
            check_device(name, tensor, "x", x.device)
    for name in ("x", "topk_weights", "bias13", "bias2", "addend"):
        check_no_grad(name, getattr(layer, name))


def check_masked(
    x: torch.Tensor,
    w13: Any,
    w2: Any,
    out: torch.Tensor,
    masked_m: torch.Tensor,
    types: tuple[str, ...],
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
) -> None:
    """Raises TypeError or ValueError unless the tensors of `fused_experts_masked` fit together; types: of x."""
    experts = w13.experts
    for name, tensor, columns, names in (("x", x, w13.k, types), ("out", out, w2.n, REAL_TYPES)):
        check_tensor(name, tensor)
        max_m = x.shape[1] if x.dim() == 3 else 0
        _check_matrix(name, as_rows(name, tensor, experts, max_m, str(columns)), None, columns, names)
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(f"x: expected a CUDA or CPU tensor, got one on {x.device}")
    check_vector("masked_m", masked_m, ("s32",), experts)
    check_biases(w13, w2, bias13, bias2)
    for name, each in (("x", x), ("out", out), ("bias13", bias13), ("bias2", bias2)):
        check_no_grad(name, each)
    for name, other in (
        ("w13", w13.blocks), ("w2", w2.blocks), ("out", out), ("masked_m", masked_m), ("bias13", bias13),
        ("bias2", bias2),
    ):  # fmt: skip
        if other is not None:
            check_device(name, other, "x", x.device)


def check_biases(w13: Any, w2: Any, bias13: torch.Tensor | None, bias2: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError unless the biases fit the weights."""
    for name, bias, n in (("bias13", bias13, w13.n), ("bias2", bias2, w2.n)):
        if bias is not None:
            _check_bias(name, bias, (w13.experts, n))


def check_experts(w13: Any, w2: Any, lhs_dtype: torch.dtype, affine: bool, block: bool) -> int:
    """`check_weights`, and that they multiply activations of this kind."""
    experts = check_weights(w13, w2)
    lhs_type = check_dtype("lhs_dtype", lhs_dtype, LHS_TYPES)
    if affine and lhs_type != "s8":
        raise ValueError(f"affine: expected lhs_dtype int8, got {dtype_name(lhs_dtype)}, which has no zero point")
    if affine and block:
        raise ValueError("affine: expected False for scheme 'block', got True")
    for name, weight in (("w13", w13), ("w2", w2)):
        if lhs_type not in weight.format.lhs_types:
            raise TypeError(
                f"{name}: expected a weight packed for lhs_dtype {dtype_name(lhs_dtype)}, got one for "
                f"{weight.format.order}"
            )
        if affine and weight.row_sum is None:
            raise ValueError(f"{name}: expected a weight with row_sum, which affine needs, got one without")
    return experts


def check_out(out: torch.Tensor, layer: Layer) -> None:
    """Raises TypeError or ValueError unless the layer can write there."""
    _check_matrix("out", out, layer.x.shape[0], layer.w2.n, REAL_TYPES)
    if out.dtype != layer.x.dtype:
        raise TypeError(f"out: expected {dtype_name(layer.x.dtype)}, as x is, got {dtype_name(out.dtype)}")
    check_device("out", out, "x", layer.x.device)
    if out.requires_grad:
        raise ValueError("out: expected a tensor that does not require grad, got one that does")


def _check_matrix(
    name: str, tensor: torch.Tensor, rows: int | None, columns: int | None, types: tuple[str, ...]
) -> None:
    check_tensor(name, tensor)
    if not torch.compiler.is_compiling():  # a tracer cannot ask
        check_plain(name, tensor)
    check_dtype(name, tensor.dtype, types)
    sizes = zip((rows, columns), tensor.shape)
    if tensor.dim() != 2 or any(wanted is not None and statically_true(wanted != size) for wanted, size in sizes):
        expected = f"[{'rows' if rows is None else rows}, {'columns' if columns is None else columns}]"
        raise ValueError(f"{name}: expected shape {expected}, got {list(tensor.shape)}")
    check_rows(name, tensor)


def _check_weights(topk_weights: torch.Tensor, choices: torch.Tensor) -> None:
    check_plain("topk_weights", check_tensor("topk_weights", topk_weights))
    check_dtype("topk_weights", topk_weights.dtype, REAL_TYPES)
    if shapes_differ(topk_weights.shape, choices.shape) or not topk_weights.is_contiguous():
        raise ValueError(
            f"topk_weights: expected a contiguous tensor of shape {list(choices.shape)}, got "
            f"{list(topk_weights.shape)} with strides {tuple(topk_weights.stride())}"
        )


def _check_bias(name: str, bias: torch.Tensor, shape: tuple[int, int]) -> None:
    check_plain(name, check_tensor(name, bias))
    check_dtype(name, bias.dtype, ("bf16", "fp32"))
    if shapes_differ(bias.shape, shape) or not bias.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {list(shape)}, got {list(bias.shape)} with strides "
            f"{tuple(bias.stride())}"
        )


def _check_addend(addend: torch.Tensor, tokens: int, columns: int, dtype: torch.dtype) -> None:
    _check_matrix("addend", addend, tokens, columns, REAL_TYPES)
    if addend.dtype != dtype:
        raise TypeError(f"addend: expected {dtype_name(dtype)}, the result's type, got {dtype_name(addend.dtype)}")
