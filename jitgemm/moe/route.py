"""Routing: tokens' choices sorted by expert, and the rows that experts made of them combined again.

The two calls at the ends of the layer, each one launch on a GPU; CPU tensors run the references here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from jitgemm.activations.arguments import Outputs
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import Activation
from jitgemm.gemm.problem import Lhs, split_lhs
from jitgemm.gemm.exact import round_fp64
from jitgemm.kernel.formats import ceil_div
from jitgemm.moe.arguments import COMBINE_POINTERS, ROUTE_QUANTIZE_POINTERS, GATHER_POINTERS, ROUTE_POINTERS, Routing
from jitgemm.moe.arguments import check_combining, check_routing
from jitgemm.moe.kernel import GATHER_M, GATHER_SENT_M, RouteQuantizeSpec, route_quantize_spec
from jitgemm.runtime.launch import Call, Launch, Operands, run_prepared
from jitgemm.tensors import TYPE_NAMES, take_rows


def route(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None = None) -> Routing:
    """Sorts choices by expert, stably, on the current stream; the same result in every run.

    Args:
        topk_ids: int32 or int64 [tokens, top_k], contiguous. Those outside 0..experts - 1 are skipped.
        experts: 1 to 1024.
        expert_map: int32 [global_experts], at most 8192: topk_ids are numbers in it, and what it holds there is the
            expert, or -1 to skip the choice. Ids outside of it are skipped.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        CacheMissError, CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    call = _Route(topk_ids, experts, expert_map)
    layouts = [topk_ids] if expert_map is None else [topk_ids, expert_map]
    return Routing._make(run_prepared(("route", experts, expert_map is None), layouts, call)[2:])


@dataclass(slots=True)
class _Route(Call):
    """A call of `route`."""

    topk_ids: torch.Tensor
    experts: int
    expert_map: torch.Tensor | None
    pointers: ClassVar = ROUTE_POINTERS

    @property
    def empty(self) -> bool:
        return self.topk_ids.shape[0] == 0

    def check(self) -> None:
        check_routing(self.topk_ids, self.experts, self.expert_map)

    def operands(self) -> Operands:
        ids, experts, expert_map = self.topk_ids, self.experts, self.expert_map
        choices, device = ids.numel(), ids.device
        return (
            ids, expert_map,
            (torch.empty if choices else torch.zeros)(experts + 1, dtype=torch.int32, device=device),
            torch.empty(choices, dtype=torch.int32, device=device),
            torch.empty(ids.shape, dtype=torch.int32, device=device),
        )  # fmt: skip

    def run_reference(self, operands: Operands) -> None:
        for written, result in zip(operands[2:], route_reference(self.topk_ids, self.experts, self.expert_map)):
            written.copy_(result)  # type: ignore[union-attr, arg-type]

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.moe.plan import prepare_route

        return prepare_route(self.topk_ids, self.experts, self.expert_map)


def route_and_quantize(
    tokens: QuantizeCall, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None
) -> tuple[Routing, Outputs]:
    """`route`, and `quantize` of tokens by row; of few tokens in one launch.

    Args:
        tokens: x [tokens, k], at least one token, and activation. The rest is what says nothing.
    """
    x, (dtype, scheme, affine, rotation) = tokens.x, tokens.activation
    flags = affine, scheme == "block", rotation != 0
    spec = route_quantize_spec(topk_ids.numel(), x.shape[1], TYPE_NAMES[x.dtype], dtype, *flags)
    if spec is None or not x.is_cuda:
        return route(topk_ids, experts, expert_map), quantize(tokens)
    layouts = [x, topk_ids] if expert_map is None else [x, topk_ids, expert_map]
    call = _RouteAndQuantize(_Route(topk_ids, experts, expert_map), tokens, spec)
    _, _, *made = run_prepared(("route_quantize", spec.label, experts, expert_map is None), layouts, call)
    return Routing._make(made[:3]), tuple(made[4:])  # type: ignore[return-value]


@dataclass(slots=True)
class _RouteAndQuantize(Call):
    """A call of `route_and_quantize` on a GPU."""

    routing: _Route
    tokens: QuantizeCall
    spec: RouteQuantizeSpec
    pointers: ClassVar = ROUTE_QUANTIZE_POINTERS

    def check(self) -> None:
        self.routing.check()
        self.tokens.check()

    def operands(self) -> Operands:
        return (*self.routing.operands(), self.tokens.x, *self.tokens.new_outputs())

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.moe.plan import prepare_route_and_quantize

        ids, experts, expert_map = self.routing.topk_ids, self.routing.experts, self.routing.expert_map
        return prepare_route_and_quantize(self.spec, self.tokens.x, ids, experts, expert_map)


def sort(
    x: torch.Tensor, activation: Activation, topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None,
    expected_m: float,
) -> tuple[Routing, Outputs]:  # fmt: skip
    """The routing of tokens x, and their codes for the first GEMM, which gathers rows of few itself; row_index is None
    where the codes stand in the order of experts."""
    if expected_m < GATHER_M:
        return route_and_quantize(QuantizeCall(x, activation), topk_ids, experts, expert_map)
    routing = route(topk_ids, experts, expert_map)
    row_count, row_index = routing.offsets[-1:], routing.row_index
    codes = quantize(QuantizeCall(x, activation, row_count=row_count, row_index=row_index))
    return routing._replace(row_index=None), codes


def sort_sent(routing: Routing, sent: Lhs, expected_m: float) -> tuple[Routing, Lhs]:
    """`sort` of quantised tokens whose routing is known."""
    if expected_m < GATHER_SENT_M:
        return routing, sent
    offsets, index, _ = routing
    return routing._replace(row_index=None), gather(sent, index, offsets[-1:])  # type: ignore[arg-type]


def gather(lhs: Lhs, row_index: torch.Tensor, row_count: torch.Tensor) -> Lhs:
    """Quantised tokens [.., k] in the order of row_index [m], each as often as it is in there.

    Args:
        lhs: as a quantiser makes it, codes contiguous; unchecked, as is the rest.
        row_index: int32 [m], contiguous.
        row_count: int32 [1]: rows from there on are undefined.
    """
    codes, scale, zero = split_lhs(lhs)
    call = _Gather(codes, scale, zero, row_index, row_count)
    made = run_prepared(("gather", zero is None), [codes, scale, row_index], call)[5:]
    return tuple(part for part in made if part is not None)  # type: ignore[return-value]


@dataclass(slots=True)
class _Gather(Call):
    """A call of `gather`."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    row_index: torch.Tensor
    row_count: torch.Tensor
    pointers: ClassVar = GATHER_POINTERS

    @property
    def empty(self) -> bool:
        return self.row_index.shape[0] == 0

    def operands(self) -> Operands:
        codes, scale, zero, index = self.codes, self.scale, self.zero, self.row_index
        m = index.shape[0]
        if scale.dim() == 2:  # by block: by column, as quantisers have them
            scales = scale.new_empty(4 * ceil_div(m, 4) * scale.shape[1])
            scales = scales.as_strided((m, scale.shape[1]), (1, 4 * ceil_div(m, 4)))
        else:
            scales = scale.new_empty(m)
        made = codes.new_empty(m, codes.shape[1]), scales, None if zero is None else zero.new_empty(m)
        return codes, scale, zero, index, self.row_count, *made

    def run_reference(self, operands: Operands) -> None:
        rows = self.row_index.long().clamp(0, self.codes.shape[0] - 1)  # indices behind the last row say nothing
        for source, target in zip((self.codes, self.scale, self.zero), operands[5:], strict=True):
            if source is not None and target is not None:
                target.copy_(take_rows(source, rows))

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.moe.plan import prepare_gather

        return prepare_gather(self.codes, self.scale, self.row_index, operands[6])  # type: ignore[arg-type]


def combine(
    rows: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor, *,
    addend: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out[t] = addend[t] + sum over i of topk_weights[t, i] * rows[inverse[t, i]], on the current stream.

    In fp32, in the order of i, a fused multiply-add each, rounded once: the same bits in every run.

    Args:
        rows: bfloat16, float16 or float32 [m, n], contiguous, n a multiple of 8.
        inverse: int32 [tokens, top_k], contiguous; choices of a negative row are skipped. Others are checked on the CPU
            alone.
        topk_weights: float32, bfloat16 or float16 [tokens, top_k], contiguous.
        out: bfloat16, float16 or float32 [tokens, n], rows a multiple of 16 bytes apart; addend itself for in place.
        addend: of out's shape and type, rows a multiple of 16 bytes apart; None for zeros.

    Raises:
        As `route`; and ValueError if rows, topk_weights, addend or out requires grad and gradients are on.
    """
    layouts = [rows, inverse, topk_weights, out] if addend is None else [rows, inverse, topk_weights, out, addend]
    call = _Combine(rows, inverse, topk_weights, addend, out)
    run_prepared(("combine", addend is None, torch.is_grad_enabled()), layouts, call)


@dataclass(slots=True)
class _Combine(Call):
    """A call of `combine`."""

    rows: torch.Tensor
    inverse: torch.Tensor
    topk_weights: torch.Tensor
    addend: torch.Tensor | None
    out: torch.Tensor
    pointers: ClassVar = COMBINE_POINTERS

    @property
    def empty(self) -> bool:
        return self.out.shape[0] == 0

    def check(self) -> None:
        check_combining(self.rows, self.inverse, self.topk_weights, self.addend, self.out)

    def operands(self) -> Operands:
        return self.rows, self.inverse, self.topk_weights, self.addend, self.out

    def run_reference(self, operands: Operands) -> None:
        rows, inverse, topk_weights, addend = self.rows, self.inverse, self.topk_weights, self.addend
        if inverse.numel() and inverse.max() >= rows.shape[0]:
            raise ValueError(f"inverse: expected rows below {rows.shape[0]}, got {int(inverse.max())}")
        self.out.copy_(round_fp64(combine_reference(rows, inverse, topk_weights, addend), self.out.dtype))

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.moe.plan import prepare_combine

        return prepare_combine(self.rows, self.inverse, self.topk_weights, self.addend, self.out)


def route_reference(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> Routing:
    """`route` in plain PyTorch; skipped choices' tokens fill the end of row_index."""
    ids, top_k = topk_ids.flatten().long(), topk_ids.shape[1]
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(known, expert_map.long()[ids.clamp(0, expert_map.numel() - 1)], -1)
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = ids.sort(stable=True).indices
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = torch.bincount(ids, minlength=experts + 1)[:experts].cumsum(0)
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    inverse.masked_fill_(ids == experts, -1)
    return Routing(offsets, (order // top_k).int(), inverse.view(topk_ids.shape))


def combine_reference(
    rows: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor, addend: torch.Tensor | None
) -> torch.Tensor:
    """`combine` in fp64, not rounded."""
    out = rows.new_zeros((inverse.shape[0], rows.shape[1]), dtype=torch.float64)
    if addend is not None:
        out += addend
    for row, weight in zip(inverse.T, topk_weights.double().T):
        used = row >= 0
        out[used] += weight[used, None] * rows[row[used].long()].double()
    return out
