"""The calls of the layer, and checks of their arguments: what each must be, in one message that names it.

Works on real and fake tensors: looks at dtypes, shapes, strides and devices, never at values or addresses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from jitgemm.activations.arguments import activation_of
from jitgemm.activations.scheme import GATE_KINDS, GATE_ORDERS, UNGATED, Activation, Gate
from jitgemm.dtypes import INDEX_TYPES, LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.gemm.problem import X_SCALE, X_ZERO, as_rows, check_sums_with
from jitgemm.kernel.formats import MAX_ROWS, ROTATION
from jitgemm.moe.kernel import MAX_EXPERTS, MAX_GLOBAL_EXPERTS
from jitgemm.runtime.launch import Operands, Pointer, address_of, check_addresses, check_once, check_places
from jitgemm.tensors import ALIGNMENT, TYPE_NAMES, check_device, check_dtype, check_exact, check_float, check_int
from jitgemm.tensors import check_matrix, check_plain, check_runs, check_tensor, check_vector, check_written, describe
from jitgemm.tensors import dtype_name, statically_true
from jitgemm.weight.parts import PackedWeight, WeightBase, check_packed

if TYPE_CHECKING:
    from jitgemm.weight.packed import AnyWeight

ROUTE_POINTERS = (
    Pointer("ids", "topk_ids", 4),
    Pointer("expert_map", "expert_map", 4),
    *(Pointer(name, name, 4, written=True) for name in ("offsets", "row_index", "inverse")),
)
"""What a launch has addresses of, in the order of `RouteArgs` in include/jitgemm/moe/route.cuh."""
ROUTE_QUANTIZE_POINTERS = (
    *ROUTE_POINTERS,
    Pointer("x", "x", ALIGNMENT),
    Pointer("q", "q", ALIGNMENT, written=True),
    Pointer("scale", "scale", 4, written=True),
    Pointer("zero", "zero", 4, written=True),
)
"""What a launch has addresses of, in the order of `RouteQuantizeArgs` in include/jitgemm/moe/route_quantize.cuh."""
COMBINE_POINTERS = (
    Pointer("rows", "rows", ALIGNMENT),
    Pointer("inverse", "inverse", 4),
    Pointer("weights", "topk_weights"),
    Pointer("addend", "addend", ALIGNMENT),
    Pointer("out", "out", ALIGNMENT, written=True, in_place=("addend",)),
)
"""What a launch has addresses of, in the order of `CombineArgs` in include/jitgemm/moe/combine.cuh."""
GATHER_POINTERS = (
    Pointer("codes", "lhs[0]", ALIGNMENT),
    Pointer("scale", "lhs[1]", 4),
    Pointer("zero", "lhs[2]", 4),
    Pointer("row_index", "row_index", 4),
    Pointer("row_count", "row_count", 4),
    Pointer("out_codes", "q", ALIGNMENT, written=True),
    Pointer("out_scale", "scale", 4, written=True),
    Pointer("out_zero", "zero", 4, written=True),
)
"""What a launch has addresses of, in the order of `GatherArgs` in include/jitgemm/moe/gather.cuh."""

_WEIGHTS = tuple(
    Pointer(None, f"{name}.{part}", alignment)
    for name in ("w13", "w2")
    for part, alignment in (("blocks", ALIGNMENT), ("channel_scale", 4), ("row_sum", 1))
)


class Routing(NamedTuple):
    """Where the tokens' choices go. Row r of a grouped GEMM is a choice of token row_index[r].

    Attributes:
        offsets: int32 [experts + 1]: expert e has the rows offsets[e]..offsets[e + 1] - 1, in the order of its choices
            in topk_ids.
        row_index: int32 [tokens * top_k]; undefined from offsets[experts] on. None: tokens are sorted as the rows are.
        inverse: int32 [tokens, top_k]: row of each choice, -1 where it is skipped.
    """

    offsets: torch.Tensor
    row_index: torch.Tensor | None
    inverse: torch.Tensor


@dataclass(slots=True)
class ExpertsCall:
    """A call of `fused_experts`, which reads x before it writes out.

    Attributes:
        activation: how tokens are quantised, for both GEMMs: by token or by block.
        out: where to write; None for a new tensor.
    """

    x: torch.Tensor
    w13: AnyWeight
    w2: AnyWeight
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    gate: Gate
    activation: Activation
    expert_map: torch.Tensor | None = None
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    batch_invariant: bool = False
    out: torch.Tensor | None = None
    pointers: ClassVar = (
        *_WEIGHTS,
        Pointer(None, "x", ALIGNMENT),
        Pointer(None, "topk_ids", 4),
        Pointer(None, "topk_weights"),
        Pointer(None, "expert_map", 4),
        Pointer(None, "bias13"),
        Pointer(None, "bias2"),
        Pointer(None, "addend", ALIGNMENT),
        Pointer(None, "out", ALIGNMENT, written=True, in_place=("x", "addend")),
    )

    def tensors(self) -> Operands:
        """All but the weights, in the order of `pointers`."""
        routed = self.x, self.topk_ids, self.topk_weights, self.expert_map
        return *routed, self.bias13, self.bias2, self.addend, self.out

    @property
    def experts(self) -> int:
        """Experts of this device."""
        return self.w13.experts  # type: ignore[return-value]

    def new_out(self) -> torch.Tensor:
        """A tensor to write to."""
        return self.x.new_empty(self.x.shape[0], self.w2.n)

    def check(self) -> None:
        """Raises TypeError or ValueError unless dtypes, shapes, strides and devices fit together."""
        x, w13, w2 = self.x, self.w13, self.w2
        experts = check_layer(w13, w2, self.activation, self.gate, self.bias13, self.bias2)
        check_routing(self.topk_ids, experts, self.expert_map)
        check_matrix("x", x, (None, w13.k), REAL_TYPES)
        check_runs("x", x)
        if statically_true(self.topk_ids.shape[0] != x.shape[0]):
            raise ValueError(f"topk_ids: expected shape [{x.shape[0]}, top_k], got {list(self.topk_ids.shape)}")
        check_exact("topk_weights", self.topk_weights, self.topk_ids.shape, REAL_TYPES)
        shape, like = (x.shape[0], w2.n), (TYPE_NAMES[x.dtype],)
        if self.addend is not None:
            check_matrix("addend", self.addend, shape, like, "the result's type")
        if self.out is not None:
            check_matrix("out", self.out, shape, like, "as x is")
            check_written("out", self.out)
        check_places(self.pointers, _operands(self), "x", x.device)


@dataclass(slots=True)
class MaskedCall:
    """A call of `fused_experts_masked`, which reads x before it writes out. x has the codes of quantised tokens.

    Attributes:
        expected_rows: of all experts together, a hint.
    """

    x: torch.Tensor
    x_scale: torch.Tensor | None
    x_zero: torch.Tensor | None
    w13: AnyWeight
    w2: AnyWeight
    out: torch.Tensor
    masked_m: torch.Tensor
    expected_rows: int
    gate: Gate
    activation: Activation
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    batch_invariant: bool
    pointers: ClassVar = (
        *_WEIGHTS,
        Pointer(None, "x", ALIGNMENT),
        Pointer(None, X_SCALE),
        Pointer(None, X_ZERO),
        Pointer(None, "masked_m", 4),
        Pointer(None, "bias13"),
        Pointer(None, "bias2"),
        Pointer(None, "out", ALIGNMENT, written=True, in_place=("x",)),
    )

    def tensors(self) -> Operands:
        """All but the weights, in the order of `pointers`."""
        return self.x, self.x_scale, self.x_zero, self.masked_m, self.bias13, self.bias2, self.out

    def check(self) -> None:
        """Raises TypeError or ValueError unless dtypes, shapes, strides and devices fit together."""
        x, w13, w2, out = self.x, self.w13, self.w2, self.out
        experts = check_layer(w13, w2, self.activation, self.gate, self.bias13, self.bias2)
        types = REAL_TYPES if self.x_scale is None else (self.activation.dtype,)
        for name, tensor, columns, names in (("x", x, w13.k, types), ("out", out, w2.n, REAL_TYPES)):
            check_tensor(name, tensor)
            max_m = x.shape[1] if x.dim() == 3 else 0
            check_matrix(name, as_rows(name, tensor, experts, max_m, str(columns)), (None, columns), names)
        check_runs("x", x)
        check_vector("masked_m", self.masked_m, ("s32",), experts)
        check_places(self.pointers, _operands(self), "x", x.device)


def _operands(call: ExpertsCall | MaskedCall) -> Operands:
    """In the order of `pointers`."""
    parts = [part for w in (call.w13, call.w2) for part in (w.blocks, w.channel_scale, w.row_sum)]
    return *parts, *call.tensors()


def check_call_once(call: ExpertsCall | MaskedCall) -> None:
    """Checks arguments and addresses of a call, unless this thread has checked one like it."""
    tensors = call.tensors()
    try:
        # What is new cannot overlap: of its own launches each checks its addresses.
        addresses = None if call.out is None else tuple(map(address_of, _operands(call)))
        key = (
            type(call), addresses, call.w13.plan_key, call.w2.plan_key, getattr(call.w13, "rotation", None),
            getattr(call.w2, "rotation", None), call.activation, call.gate.inputs, torch.is_grad_enabled(),
            *[tensor is None for tensor in tensors],
        )  # fmt: skip
    except (AttributeError, TypeError):  # not what it should be: the checks say what
        call.check()
        raise

    def check() -> None:
        call.check()
        # As rows: column slices of one buffer then do not overlap.
        outer = (call.x, call.out) if isinstance(call, MaskedCall) else ()
        rows = [t.flatten(0, 1) if t is not None and any(t is x for x in outer) else t for t in _operands(call)]
        check_addresses(call.pointers, rows)

    check_once(key, [tensor for tensor in tensors if tensor is not None], check)


_ALPHAS = {"swiglu_oai": 1.702, "situ": None}
"""Of kinds that have an alpha: its default."""
_SITU_NUMBERS = 2.0**-64, 2.0**64
"""Between them the numbers of situ have reciprocals in fp32, and products with them."""


def make_gate(activation: str, order: str, limit: float | None, alpha: float | None) -> Gate:
    """The gate of these arguments of a call, checked."""
    for name, value, choices in (("activation", activation, GATE_KINDS), ("order", order, GATE_ORDERS)):
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
    if activation in UNGATED and (limit is not None or order != "gate_up"):
        raise ValueError(f"{'order' if limit is None else 'limit'}: expected the default, as {activation} has no gates")
    alpha = _ALPHAS.get(activation, 1.0) if alpha is None else alpha
    if alpha is None:
        raise ValueError(f"alpha: expected a number for {activation}, got None")
    for name, number in (("limit", math.inf if limit is None else limit), ("alpha", alpha)):
        if not check_float(name, number) > 0:
            raise ValueError(f"{name}: expected a positive number, got {number}")
        if activation == "situ" and number != math.inf and not _SITU_NUMBERS[0] <= number <= _SITU_NUMBERS[1]:
            raise ValueError(f"{name}: expected a number of 2^-64 to 2^64 for situ, got {number}")
    if activation == "situ" and alpha == math.inf:
        raise ValueError("alpha: expected a finite number for situ, got inf")
    limit, alpha = math.inf if limit is None else float(limit), float(alpha) if activation in _ALPHAS else 1.0
    return Gate(activation, order, limit, alpha)


def tokens_activation(w13: AnyWeight, lhs_dtype: object, scheme: object, affine: Any, rotation: int = 0) -> Activation:
    """How a call quantises its tokens, checked; lhs_dtype None for what w13 is packed for."""
    if lhs_dtype is None:
        # Where it is no weight, the checks say what it is.
        types = w13.format.lhs_types if isinstance(w13, (WeightBase, PackedWeight)) else LHS_TYPES
        lhs_dtype = torch_dtype(types[0])
    return activation_of(lhs_dtype, scheme, affine, "lhs_dtype", ("token", "block"), rotation)


def check_routing(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError unless choices, map and number of experts fit together."""
    check_plain("topk_ids", check_tensor("topk_ids", topk_ids))
    check_dtype("topk_ids", topk_ids.dtype, INDEX_TYPES)
    if topk_ids.dim() != 2 or statically_true(topk_ids.shape[1] < 1):
        raise ValueError(f"topk_ids: expected shape [tokens, top_k], top_k at least 1, got {list(topk_ids.shape)}")
    if not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids: expected a contiguous tensor, got strides {tuple(topk_ids.stride())}")
    if statically_true(topk_ids.shape[0] * topk_ids.shape[1] > MAX_ROWS):
        raise ValueError(f"topk_ids: expected at most {MAX_ROWS} elements, got {topk_ids.numel()}")
    check_runs("topk_ids", topk_ids)
    if not 1 <= check_int("experts", experts) <= MAX_EXPERTS:
        raise ValueError(f"experts: expected 1 to {MAX_EXPERTS}, got {experts}")
    if expert_map is not None:
        shape = check_tensor("expert_map", expert_map).shape
        if len(shape) != 1 or statically_true(shape[0] < 1) or statically_true(shape[0] > MAX_GLOBAL_EXPERTS):
            expected = f"shape [global_experts], 1 to {MAX_GLOBAL_EXPERTS} of them"
            raise ValueError(f"expert_map: expected {expected}, got {list(shape)}")
        check_vector("expert_map", expert_map, ("s32",), shape[0])
        check_device("expert_map", expert_map, "topk_ids", topk_ids.device)


def check_combining(
    rows: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor, addend: torch.Tensor | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError unless the tensors fit together."""
    check_matrix("rows", rows, (None, None), REAL_TYPES)
    columns = rows.shape[1]
    if columns % 8 or not rows.is_contiguous():
        raise ValueError(
            f"rows: expected a contiguous matrix of 8, 16, 24, ... columns, got {describe(rows)} with strides "
            f"{tuple(rows.stride())}"
        )
    check_plain("inverse", check_tensor("inverse", inverse))
    if inverse.dtype != torch.int32 or inverse.dim() != 2 or not inverse.is_contiguous():
        raise ValueError(f"inverse: expected contiguous int32 [tokens, top_k], got {describe(inverse)}")
    check_exact("topk_weights", topk_weights, inverse.shape, REAL_TYPES)
    shape = inverse.shape[0], columns
    check_matrix("out", out, shape, REAL_TYPES)
    if addend is not None:
        check_matrix("addend", addend, shape, (TYPE_NAMES[out.dtype],), "the result's type")
    check_places(COMBINE_POINTERS, (rows, inverse, topk_weights, addend, out), "rows", rows.device)


def check_weights(w13: AnyWeight, w2: AnyWeight, inputs: int | None = None, rotation: int | None = None) -> int:
    """How many experts both have; TypeError or ValueError unless they are weights of experts that fit together.

    inputs: `Gate.inputs`; None where the gate is not known.
    rotation: the activations', which is the weights'; an op's tensors do not say theirs. None where it is not known.
    """
    counts = []
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, (WeightBase, PackedWeight)):
            raise TypeError(f"{name}: expected a W4Weight or W8Weight of experts, got {type(weight).__name__}")
        counts.append(check_packed(weight, f"{name}.", experts=True) or 0)
        if weight.format.correction:  # no quantiser of experts writes sums
            raise ValueError(f"{name}: expected a weight packed without correction, got {weight.format.name}")
        if counts[-1] > MAX_EXPERTS:
            raise ValueError(f"{name}: expected at most {MAX_EXPERTS} experts, got {counts[-1]}")
        if rotation is not None and rotation != (own := getattr(weight, "rotation", rotation)):
            raise ValueError(f"rotation: expected {own}, as {name} has, got {rotation}")
    if counts[1] != counts[0]:
        raise ValueError(f"w2: expected {counts[0]} experts, as w13 has, got {counts[1]}")
    if inputs is None and w13.n == w2.k:
        inputs = 1
    inputs = inputs or 2
    if w13.n != inputs * w2.k:
        raise ValueError(f"w13: expected n = {inputs * w2.k}, {'twice ' * (inputs == 2)}the k of w2, got {w13.n}")
    return counts[0]


def check_layer(
    w13: Any, w2: Any, activation: Activation, gate: Gate, bias13: torch.Tensor | None, bias2: torch.Tensor | None
) -> int:
    """`check_weights`, and that both have such biases, multiply these activations, and add up so."""
    experts = check_weights(w13, w2, gate.inputs, activation.rotation)
    for name, weight in (("w13", w13), ("w2", w2)):
        if activation.dtype not in weight.format.lhs_types:
            expected, got = (torch_dtype(name) for name in (weight.format.lhs_types[0], activation.dtype))
            why = weight.format.why_lhs(name)
            raise TypeError(f"{name}: expected lhs_dtype {dtype_name(expected)}, {why}, got {dtype_name(got)}")
        check_sums_with(weight, activation.dtype, activation.block, name)
        if activation.rotation and weight.k % ROTATION:
            raise ValueError(f"{name}: expected k to be a multiple of {ROTATION} with a rotation, got {weight.k}")
        if activation.affine and weight.row_sum is None:
            raise ValueError(f"{name}: expected a weight with row_sum, which affine needs, got one without")
    if is_exact(w13, w2) and any(w.sums != "exact" and w.format.sums_by_parts for w in (w13, w2)):
        raise ValueError(f"w2.sums: expected {w13.sums!r}, as w13 has, got {w2.sums!r}")
    for name, bias, weight in (("bias13", bias13, w13), ("bias2", bias2, w2)):
        if bias is not None:
            check_exact(name, bias, (experts, weight.n), ("bf16", "fp32"))
    return experts


def is_exact(w13: AnyWeight, w2: AnyWeight) -> bool:
    """What an op says of both weights' sums. One that has none by parts is exact whatever it says."""
    return "exact" in (w13.sums, w2.sums)
