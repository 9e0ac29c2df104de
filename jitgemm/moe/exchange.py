"""Tokens to the ranks of their experts and results back, by kernels alone: two launches around a layer's GEMMs.

The ranks' buffers and the GPUs that reach them are the caller's; here they are addresses. See
`include/jitgemm/moe/ranks.cuh` for what lies where and who waits for whom.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from jitgemm import settings
from jitgemm.activations.arguments import CODES
from jitgemm.activations.scheme import Activation
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.problem import Lhs
from jitgemm.kernel.formats import LHS_GROUP, ceil_div
from jitgemm.moe.arguments import ExpertsCall, Routing
from jitgemm.moe.call import multiply
from jitgemm.moe.kernel import COMBINE_THREADS, ONE_CTA_CHOICES, ROUTE_QUANTIZE_THREADS, GatherSpec, RouteQuantizeSpec
from jitgemm.moe.kernel import RoutingSpec, combine_blocks, route_quantize_spec, route_smem_bytes, route_spec
from jitgemm.moe.kernel import type_config
from jitgemm.moe.route import sort_sent
from jitgemm.runtime.launch import ArgumentBlock, Call, Launch, Operands, Pointer, run_prepared
from jitgemm.tensors import ALIGNMENT, TYPE_NAMES
from jitgemm.weight.ready import is_captured

MOST_CHOICES = 2**24
"""Of all ranks' tokens: words of ids and counts have 24 bits for a value, `kStampAt` in the same header."""

DISPATCH_POINTERS = (
    Pointer("x", "x", ALIGNMENT),
    Pointer("ids", "topk_ids", 4),
    Pointer("weights", "topk_weights"),
    Pointer("peers", "peers", 8),
    *(Pointer(name, name, 4, written=True) for name in ("offsets", "row_index", "inverse", "counts")),
)
"""What a launch has addresses of, in the order of `DispatchArgs` in include/jitgemm/moe/dispatch.cuh."""
COLLECT_POINTERS = (
    Pointer("rows", "rows", ALIGNMENT),
    Pointer("inverse", "inverse", 4),
    Pointer("counts", "counts", 4),
    Pointer("peers", "peers", 8),
    Pointer("out", "out", ALIGNMENT, written=True),
)
"""What a launch has addresses of, in the order of `CollectArgs` in include/jitgemm/moe/collect.cuh."""
DISPATCH_ARGUMENTS = ArgumentBlock(
    DISPATCH_POINTERS, x_row_bytes="Q", codes_at="Q", scale_at="Q", zero_at="Q", ids_at="Q", weights_at="Q",
    scale_block_stride="Q", id_bytes="Q", m="I", k="I", top_k="I", experts="I", rank="I", world="I", max_tokens="I",
    weights_type="i", limit_s="I", unused="I",
)  # fmt: skip
"""`DispatchArgs` in include/jitgemm/moe/dispatch.cuh."""
COLLECT_ARGUMENTS = ArgumentBlock(
    COLLECT_POINTERS, out_row_bytes="Q", ids_at="Q", weights_at="Q", results_at="Q", max_tokens="Q", tokens="I",
    top_k="I", n="I", experts="I", rank="I", world="I", limit_s="I", unused="I",
)  # fmt: skip
"""`CollectArgs` in include/jitgemm/moe/collect.cuh."""


@dataclass(frozen=True, slots=True)
class DispatchSpec(RouteQuantizeSpec):
    """A kernel that sends tokens to other ranks and routes theirs: also CTAs that share the routing, 1 or `CLUSTER`."""

    family, function = "dispatch", ""

    ctas: int

    @property
    def label(self) -> str:
        return f"dispatch-{self.quantizer.label}-c{self.ctas}"


@dataclass(frozen=True, slots=True)
class CollectSpec(RoutingSpec):
    """A kernel that sums over ranks: the name of the type of rows and result."""

    family = "collect"

    row: str

    @property
    def label(self) -> str:
        return f"collect-{self.row}"

    @property
    def config(self) -> str:
        return type_config(Row=self.row)


def dispatch_spec(
    choices: int, k: int, x: str, q: str, *, affine: bool, block: bool, rotated: bool = False
) -> DispatchSpec | None:
    """The kernel that sends tokens of k values where ranks together have so many choices; None for a k too large."""
    first = route_quantize_spec(1, k, x, q, affine, block, rotated)
    return None if first is None else DispatchSpec(first.quantizer, route_spec(choices).ctas)


def exchange_specs(
    k: int, x: str, q: str, *, affine: bool = False, block: bool = False, rotated: bool = False
) -> tuple[RoutingSpec, ...]:
    """Every kernel besides those of `layer_specs` of a layer whose ranks exchange tokens of k values over NVLink."""
    flags = {"affine": affine, "block": block, "rotated": rotated}
    dispatches = (dispatch_spec(choices, k, x, q, **flags) for choices in (1, ONE_CTA_CHOICES + 1))
    return *filter(None, dispatches), GatherSpec(), CollectSpec(x)


HEAD_BYTES = 256
"""At the start of a buffer: `Head` in include/jitgemm/moe/ranks.cuh."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class Layout:
    """What a rank's buffer holds, and where.

    Attributes:
        rank, world: this rank, and how many.
        max_tokens: of a rank in a call.
        k, n, top_k: of tokens, of results, and choices of a token.
        dtype: of x and of results.
        activation: how tokens are quantised, by token or by block.
    """

    rank: int
    world: int
    max_tokens: int
    k: int
    n: int
    top_k: int
    dtype: torch.dtype
    activation: Activation

    @property
    def slots(self) -> int:
        """Tokens of all ranks."""
        return self.world * self.max_tokens

    @property
    def scale_block_stride(self) -> int:
        """From a block's scales to the next one's, as `QuantizeCall.new_outputs` lays them out."""
        return 4 * ceil_div(self.slots, 4)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """By part: where it begins, in bytes; "end": of the buffer."""
        scales = ceil_div(self.k, LHS_GROUP) * self.scale_block_stride if self.activation.block else self.slots
        parts = {
            "codes": self.slots * self.k,
            "scale": 4 * scales,
            "zero": 4 * self.slots * self.activation.affine,
            "ids": 2 * 8 * self.slots * self.top_k,  # stamped, of two calls
            "weights": 4 * self.slots * self.top_k,
            "results": self.slots * self.n * self.dtype.itemsize,
        }
        sizes = [_ALIGNMENT * ceil_div(size, _ALIGNMENT) for size in parts.values()]
        return dict(zip((*parts, "end"), itertools.accumulate(sizes, initial=HEAD_BYTES)))


@dataclass(frozen=True)
class Buffer:
    """A rank's buffer, and where the others' are.

    Attributes:
        own: uint8 [layout.offsets["end"]], aligned to 256 bytes.
        peers: int64 [world] on the device: addresses of all ranks' buffers.
        keep: whatever has to live as long.
        broken: why a call ended half-way, if one did. The ranks' buffers no longer agree then, and no call takes them.
    """

    layout: Layout
    own: torch.Tensor
    peers: torch.Tensor
    keep: object = None
    lhs: Lhs = field(init=False)
    broken: list[str] = field(init=False, default_factory=list, compare=False)

    def __post_init__(self) -> None:
        layout, (dtype, _, affine, _) = self.layout, self.layout.activation
        codes = self._part("codes", "scale")[: layout.slots * layout.k].view(CODES[dtype]).view(layout.slots, layout.k)
        scale = self._part("scale", "zero").view(torch.float32)
        if layout.activation.block:
            shape = layout.slots, ceil_div(layout.k, LHS_GROUP)
            scale = scale.as_strided(shape, (1, layout.scale_block_stride))
        else:
            scale = scale[: layout.slots]
        zero = (self._part("zero", "ids").view(torch.int32)[: layout.slots],) if affine else ()
        object.__setattr__(self, "lhs", (codes, scale, *zero))

    def _part(self, name: str, behind: str) -> torch.Tensor:
        return self.own[self.layout.offsets[name] : self.layout.offsets[behind]]

    def clear(self) -> None:
        """As it is before the first call, on the current stream; ranks wait for one another behind that."""
        self.own.zero_()
        self._part("results", "end").fill_(0xFF)
        self.broken.clear()


def run_exchanged(call: ExpertsCall, buffer: Buffer) -> torch.Tensor:
    """What all ranks' experts make of this rank's tokens; every rank calls it, also without tokens.

    Args:
        call: checked, of at most `layout.max_tokens` tokens; w13, w2 and biases of this rank's experts, topk_ids count
            those of all. No addend, no expert_map.

    Raises:
        RuntimeError: an earlier call ended between its two launches. Its tokens were counted on every rank and its
            results never came, so that a later call would read tokens before they are there.
    """
    layout = buffer.layout
    if buffer.broken:
        raise RuntimeError(
            f"exchange: expected every call before this one to end, got one on rank {layout.rank} that raised "
            f"{buffer.broken[0]}; start the ranks again, or give their layers a new process group"
        )
    routing, counts = dispatch(call.x, call.topk_ids, call.topk_weights, buffer, call.experts)
    try:
        # As if all ranks had as many tokens as this one.
        expected_m = max(call.topk_ids.shape[0], 1) * layout.top_k / call.experts
        rows, _ = multiply(call, *sort_sent(routing, buffer.lhs, expected_m), expected_m)
        out = call.x.new_empty((call.x.shape[0], layout.n))
        return collect(rows, routing.inverse, counts, out, buffer, call.experts)
    except BaseException as error:
        if not is_captured(call.x):  # nothing ran
            buffer.broken.append(f"{type(error).__name__}: {error}")
        raise


def dispatch(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, buffer: Buffer, experts: int
) -> tuple[Routing, torch.Tensor]:
    """Sends tokens, and routes the tokens that arrive; unchecked.

    Args:
        x, topk_ids, topk_weights: of `fused_experts`; ids count the experts of all ranks.
        experts: of a rank.

    Returns:
        (Routing of all ranks' tokens by slot, int32 [world + 1]: tokens of each rank, and the parity of the call). The
        tokens are `buffer.lhs`.
    """
    call = _Dispatch(x, topk_ids, topk_weights, buffer, experts)
    key = "dispatch", buffer.layout, experts
    made = run_prepared(key, [x, topk_ids, topk_weights], call)[4:]
    return Routing(*made[:3]), made[3]  # type: ignore[arg-type,return-value]


def collect(
    rows: torch.Tensor, inverse: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, buffer: Buffer, experts: int
) -> torch.Tensor:  # fmt: skip
    """out [tokens, n] = the sum over ranks of what their experts made of this rank's tokens; unchecked.

    A rank's part is rounded to the type of rows, the sum is fp32, in the order of ranks, and rounded once.

    Args:
        rows: [.., n] of `layout.dtype`: this rank's choices.
        inverse, counts: of `dispatch`.
    """
    call = _Collect(rows, inverse, counts, out, buffer, experts)
    run_prepared(("collect", buffer.layout, experts), [rows, out], call)
    return out


def most_hidden() -> int:
    """The largest k that `dispatch` takes."""
    return 4 * 8 * ROUTE_QUANTIZE_THREADS


@dataclass(slots=True)
class _Dispatch(Call):
    """A call of `dispatch`. Also without tokens others wait for it."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    buffer: Buffer
    experts: int
    pointers: ClassVar = DISPATCH_POINTERS

    def operands(self) -> Operands:
        layout, new = self.buffer.layout, self.buffer.peers.new_empty
        choices = layout.slots * layout.top_k
        return (
            self.x, self.topk_ids, self.topk_weights, self.buffer.peers,
            new(self.experts + 1, dtype=torch.int32),
            new(choices, dtype=torch.int32),
            new((layout.slots, layout.top_k), dtype=torch.int32),
            new(layout.world + 1, dtype=torch.int32),
        )  # fmt: skip

    def prepare(self, operands: Operands) -> Launch:
        """The grid is resident as a whole; it waits for the kernel before it, as does the next."""
        from jitgemm.activations.plan import row_bytes
        from jitgemm.moe.plan import FAMILIES
        from jitgemm.runtime.loaded import resident

        layout, (m, k), device = self.buffer.layout, self.x.shape, self.x.get_device()
        choices, activation = layout.world * max(m, 1) * layout.top_k, layout.activation
        flags = {name: activation.flags[name] for name in ("affine", "block", "rotated")}
        spec = dispatch_spec(choices, layout.k, TYPE_NAMES[self.x.dtype], activation.dtype, **flags)
        assert isinstance(spec, DispatchSpec)
        kernel = FAMILIES["dispatch"].load(spec, device)
        threads, smem = ROUTE_QUANTIZE_THREADS, route_smem_bytes(ROUTE_QUANTIZE_THREADS // 32, self.experts, 0)
        held = resident(kernel, device, threads, smem, spec.ctas)
        senders = min(spec.ctas * ceil_div(max(m, 1), spec.ctas), held - spec.ctas)
        values = _of_ranks(layout, self.experts, "codes", "scale", "zero", "ids", "weights") | {
            "x_row_bytes": row_bytes(self.x), "scale_block_stride": layout.scale_block_stride, "m": m, "k": k,
            "id_bytes": self.topk_ids.element_size(),
            "weights_type": DTYPES[TYPE_NAMES[self.topk_weights.dtype]].number,
        }  # fmt: skip
        grid = senders + spec.ctas
        return Launch(kernel, DISPATCH_ARGUMENTS, values, grid=grid, threads=(threads, 1), smem_bytes=smem)


@dataclass(slots=True)
class _Collect(Call):
    """A call of `collect`. Also without tokens others wait for it."""

    rows: torch.Tensor
    inverse: torch.Tensor
    counts: torch.Tensor
    out: torch.Tensor
    buffer: Buffer
    experts: int
    pointers: ClassVar = COLLECT_POINTERS

    def operands(self) -> Operands:
        return self.rows, self.inverse, self.counts, self.buffer.peers, self.out

    def prepare(self, operands: Operands) -> Launch:
        """The grid is resident as a whole; it waits for the kernel before it, as does the next."""
        from jitgemm.activations.plan import row_bytes
        from jitgemm.moe.plan import FAMILIES
        from jitgemm.runtime.loaded import resident

        layout, tokens, device = self.buffer.layout, self.out.shape[0], self.rows.get_device()
        kernel = FAMILIES["collect"].load(CollectSpec(TYPE_NAMES[self.rows.dtype]), device)
        values = _of_ranks(layout, self.experts, "ids", "weights", "results")
        values |= {"out_row_bytes": row_bytes(self.out), "tokens": tokens, "n": layout.n}
        grid = combine_blocks(layout.world * max(tokens, 1), layout.n)
        grid = min(grid, resident(kernel, device, COMBINE_THREADS))
        return Launch(kernel, COLLECT_ARGUMENTS, values, grid=grid, threads=(COMBINE_THREADS, 1), smem_bytes=0)


def _of_ranks(layout: Layout, experts: int, *parts: str) -> dict[str, int]:
    """What both kernels are told of the ranks, and where these parts of a buffer begin. unused: pads their structs."""
    values = {name: getattr(layout, name) for name in ("rank", "world", "max_tokens", "top_k")}
    values |= {f"{name}_at": layout.offsets[name] for name in parts}
    return values | {"experts": experts, "limit_s": settings.exchange_timeout_s(), "unused": 0}
