"""Linears whose results have the same bits on 1, 2, 4 and 8 ranks, for every m: `tp_invariant`.

Ranks that share k, "k":

1. A token has one scale, its largest value's over all ranks: each quantises its columns, the scales' maximum is found
   (a scale is a monotone function of the largest value), and each quantises again by that. Not with a static scale,
   nor with scales per 128 columns, which are each rank's own.
2. int8 per channel and in two levels: the sums are integers. They travel as int32 and add up in any order; then
   out = float(sum) * channel_scale * token_scale + bias, each operation rounded to fp32, and out's type.
3. Others: k is cut into chunks: as many as ranks may be at most (`tp_ranks` of a layer, CHUNKS where nobody says
   less), or fewer, of whole records and groups. A rank has whole ones next to each other. Each chunk's sum is fp32,
   scaled, added up in the order of k. They are added up in one tree over all chunks, ((c0 + c1) + (c2 + c3)) + ..,
   in which a rank's chunks are a subtree: the rank sends its sum. Then + bias, and out's type.

One rank computes the same, for it is what the bits are. Weights are slices of the whole layer's records.

An engine adds up what its ranks' layers return, with what LoRA and other layers return. There each rank returns an
equal part of the rows, whole, and NOTHING in the others: the engine's sum only brings them together.

Ranks that share n, "n": each quantises whole tokens. k is added up in its order, by kernels that do not split it: which
split is the fastest would depend on a rank's n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.activations.call import quantize_activations
from jitgemm.activations.kernel import quantize_specs
from jitgemm.activations.scheme import Activation, activation_named
from jitgemm.gemm.partial import PARTS, FinishSpec, finish, gemm_in_order, partial_sums, rank_sums, sum_chunks
from jitgemm.gemm.ranks import RanksSpec
from jitgemm.kernel.formats import BLOCK_K, format_named
from jitgemm.nn.layers.packed import LHS_DTYPES, Parts
from jitgemm.nn.layers.shard_weight import Cut, part_of, unpacked
from jitgemm.runtime.dispatch import define_op, needs_dispatcher
from jitgemm.select.choose import kernels_for
from jitgemm.weight.parts import PackedWeight

if TYPE_CHECKING:
    from jitgemm.nn.layers.invariant_nvlink import NvlinkRanks
    from jitgemm.select.devices import DeviceSpec
    from jitgemm.weight.packed import Weight

EXCHANGES = ("collectives", "nvlink")
"""How sums, and tokens of each rank's own for experts on others, get from rank to rank."""
NOTHING = -0.0
"""What changes no number that it is added to, -0.0 among them."""
CHUNKS = 8
"""Of k, at most: ranks that can share a layer, where nobody says that there are fewer."""
GATHERED_BYTES = 2 << 20
"""Sums of a rank up to which each rank gets those of all the others, and finishes all rows: one collective. With more
each finishes a part of the rows, which then travel in out's type."""


def check_tp_invariant(value: object) -> None:
    """Raises ValueError for anything but a bool, or the most ranks that have the same bits."""
    if type(value) is not bool and (type(value) is not int or value not in PARTS[1:]):
        raise ValueError(f"tp_invariant: expected a bool, or 2, 4 or 8, the most ranks, got {value!r}")


def most_ranks(tp_invariant: bool | int) -> int:
    """Of a layer with tp_invariant."""
    return CHUNKS if tp_invariant is True else int(tp_invariant)


def chunks_of(weight: Weight, activation: Activation, world: int, whole: bool = False, most: int = CHUNKS) -> int:
    """Chunks of a rank's part of a weight, or of all ranks' weight; 0 where sums are integers. most: ranks, at most.

    Raises:
        ValueError: results would depend on the ranks, or so many ranks do not have whole chunks.
    """
    name, fmt = weight.layer or "weight", weight.format
    if world not in PARTS or world > most:
        *few, last = (str(each) for each in PARTS if each <= most)
        raise ValueError(f"{name}: expected {', '.join(few)} or {last} ranks for tp_invariant, got {world}")
    if activation.affine:
        raise ValueError(f"{name}: expected activations without zero points for tp_invariant, got int8_affine")
    if activation.dtype == "s8" and not activation.block and not fmt.group_size:
        return 0
    if weight.permutation is not None:
        raise ValueError(
            f"{name}: expected no activation order for tp_invariant, as chunks of k are next to each other"
        )
    if fmt.lhs_sums:
        raise ValueError(f"{name}: expected a weight without correction for tp_invariant, got {weight!r}")
    k, unit = weight.k * (1 if whole else world), max(BLOCK_K, fmt.group_size)
    chunks = math.gcd(most, k // unit) if k % unit == 0 else 1
    if chunks % world:
        raise ValueError(
            f"{name}: expected k = {k} to be a multiple of {world} ranks * {unit} for tp_invariant, as sums are of "
            f"whole groups and records"
        )
    return chunks // world


def make_invariant(layer: Any, dim: str) -> None:
    """Gives a `PackedLinear`, or a rank's part, a weight that `multiply_invariantly` takes. Raises as `chunks_of`."""
    if dim == "n":
        return
    parts = without_correction(layer.parts)
    chunks_of(parts.weight, layer.scheme, 1 if layer.split is None else layer.split.world, most=layer.tp_ranks)
    if parts.weight is not layer.weight:
        layer.take(parts)


def invariant_part(parts: Parts, cut: Cut, most: int = CHUNKS) -> Parts:
    """A rank's part of a whole layer: a slice of its records, with all of the bias.

    Raises:
        ValueError: results would depend on the ranks.
    """
    parts = without_correction(parts)
    chunks = chunks_of(parts.weight, activation_named(parts.activation), cut.world, True, most)
    if cut.world == 1:
        return parts
    part = part_of(parts, cut, summed_first=True)
    if chunks and part.weight.format != parts.weight.format:
        raise ValueError(
            f"{parts.weight.layer or 'weight'}: expected more than a group of {parts.weight.group_size} columns on "
            f"each of {cut.world} ranks for tp_invariant, got k = {parts.weight.k}"
        )
    return part


def without_correction(parts: Parts) -> Parts:
    """The same layer with zero points or offsets where codes are: of a chunk there are no sums of groups."""
    if not parts.weight.format.lhs_sums:
        return parts
    weight = unpacked(parts.weight).pack(LHS_DTYPES[parts.activation], correction=False)
    weight.named(parts.weight.layer)
    return parts._replace(weight=weight)


def multiply_invariantly(layer: Any, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's result of rows [m, k], of this rank's columns where ranks share them: [m, n], all or this rank's.

    bias: bf16 or fp32 [n], instead of the layer's.
    """
    split, buffers, weight, scheme = layer.split, layer._buffers, layer.weight, layer.scheme
    columns = layer.tp_invariant == "n"
    alone = split is None or columns
    rank, world, group = (0, 1, "") if alone else (split.rank, split.world, split.group.group_name)
    chunks = 0 if columns else chunks_of(weight, scheme, world, most=layer.tp_ranks)
    scales = None if weight.sums == "f16" else weight.channel_scale  # powers, which sums in fp32 do without
    arguments = (
        rows, weight.blocks, scales, weight.row_sum, buffers["permutation"], buffers["input_scale"],
        buffers["bias"] if bias is None else bias, weight.n, weight.k, weight.format.name, layer.activation,
        scheme.rotation, columns, chunks, group, rank, world, not alone and split.nvlink,
        not alone and split.added_later,
    )  # fmt: skip
    if needs_dispatcher(rows, rows):
        return torch.ops.jitgemm.invariant_linear(*arguments)
    return _multiply(*arguments)


def kernels_of(layer: Any, x: str, device: DeviceSpec, max_m: int) -> Iterator[Any]:
    """Every kernel that a layer's calls of up to max_m rows of type x can need, on one GPU or on this rank's."""
    scheme, weight, split = layer.scheme, layer.weight, layer.split
    columns = layer.tp_invariant == "n"
    world = 1 if columns or split is None else split.world
    shared = not columns and scheme.scheme == "token" and (world > 1 or scheme.rotation)
    for used in (scheme, scheme.given) if shared else (scheme,):
        flags = used.flags | {"permuted": weight.permutation is not None, "correction": weight.correction}
        yield from quantize_specs(weight.k, x, scheme.dtype, **flags)
    group, sizes = BLOCK_K if scheme.block else 0, (scheme.dtype, weight.format, device, max_m)
    if columns:
        yield from kernels_for(weight.n, weight.k, *sizes, out=x, lhs_group=group, in_order=True)
        return
    chunks, of = chunks_of(weight, scheme, world, most=layer.tp_ranks), "s32"
    if chunks:
        of, (n, k) = "fp32", (weight.n * chunks, weight.k // chunks)
        for spec in kernels_for(n, k, *sizes, out=of, lhs_group=group, in_order=True):
            yield spec if world > 1 and chunks == 1 else replace(spec, chunks=True)
        if world == 1 or chunks > 1:
            yield FinishSpec(of if world > 1 else x, of, chunks)
    else:
        yield from kernels_for(weight.n, weight.k, *sizes, out=of)
    if world > 1 or not chunks:
        yield FinishSpec(x, of, world)
    if world > 1 and split.nvlink:
        yield from (RanksSpec("agree", ranks=world), *(RanksSpec(step, of, x, world) for step in ("total", "gather")))


def _multiply(
    rows: torch.Tensor, blocks: torch.Tensor, channel_scale: torch.Tensor | None, row_sum: torch.Tensor | None,
    permutation: torch.Tensor | None, input_scale: torch.Tensor | None, bias: torch.Tensor | None, n: int, k: int,
    format: str, activation: str, rotation: int, columns: bool, chunks: int, group: str, rank: int, world: int,
    nvlink: bool, added_later: bool,
) -> torch.Tensor:  # fmt: skip
    weight = PackedWeight(blocks, channel_scale, row_sum, n, k, format_named(format))
    out = rows.new_empty((rows.shape[0], n))
    if not rows.shape[0]:
        return out
    scheme = activation_named(activation)._replace(rotation=rotation)
    scheme = scheme if input_scale is None else scheme.given
    if columns:
        lhs = quantize_activations(
            rows, LHS_DTYPES[activation], scheme=scheme.scheme, affine=scheme.affine, scale=input_scale,
            permutation=permutation, correction=weight.format.lhs_sums, rotation=rotation,
        )  # fmt: skip
        gemm_in_order(lhs, weight, out, bias)
        return out
    ranks = _ranks(group, rank, world, nvlink, out)
    lhs = _quantised(rows, scheme, input_scale, permutation, ranks)
    if added_later:
        out.fill_(NOTHING)
    return ranks.sum(lhs, weight, chunks, bias, out, added_later)


def _ranks(group: str, rank: int, world: int, nvlink: bool, out: torch.Tensor) -> Ranks | NvlinkRanks:
    if nvlink and world > 1 and out.is_cuda:
        from jitgemm.nn.layers import invariant_nvlink  # with torch's symmetric memory

        # Also for a call that is too large: it may be the only one before CUDA graphs are captured, as in engines.
        ranks = invariant_nvlink.NvlinkRanks(group_named(group), rank, world, out.device)
        if invariant_nvlink.takes(*out.shape):
            return ranks
    return Ranks(group, rank, world)


def group_named(name: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def _quantised(
    rows: torch.Tensor, scheme: Activation, input_scale: torch.Tensor | None, permutation: torch.Tensor | None,
    ranks: Ranks | NvlinkRanks,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Codes and scales by the ranks' largest value of each token."""
    dtype = LHS_DTYPES["int8" if scheme.dtype == "s8" else "e4m3"]
    common: dict[str, Any] = {"permutation": permutation, "rotation": scheme.rotation}
    lhs = quantize_activations(rows, dtype, scheme=scheme.scheme, scale=input_scale, **common)
    # Rotated rows' given scales are divided otherwise than their own: on one rank, too.
    if scheme.scheme != "token" or (ranks.world == 1 and not scheme.rotation):
        ranks.maximum(None)
        return lhs
    codes, scale = lhs
    ranks.maximum(scale)
    out = codes, torch.empty_like(scale)
    return quantize_activations(rows, dtype, scheme="tensor", scale=scale, out=out, **common)


class Ranks:
    """The ranks that share a layer, by PyTorch's collectives."""

    def __init__(self, group: str, rank: int, world: int):
        self.rank, self.world, self._name = rank, world, group

    @property
    def _group(self) -> Any:
        return group_named(self._name)

    def maximum(self, scales: torch.Tensor | None) -> None:
        """scales [m], not negative or NaN, become all ranks' largest, NaN if one is NaN. Calls begin with this."""
        if self.world > 1 and scales is not None:
            import torch.distributed as dist

            dist.all_reduce(scales.view(torch.int32), dist.ReduceOp.MAX, group=self._group)

    def sum(
        self, lhs: tuple[torch.Tensor, torch.Tensor], weight: PackedWeight, chunks: int, bias: torch.Tensor | None,
        out: torch.Tensor, own: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """out = the sums over all ranks of lhs times weight, and the bias; own: of this rank's part of the rows."""
        m, n, world = *out.shape, self.world
        scale = lhs[1]
        if world == 1:
            if chunks:
                return sum_chunks(lhs, weight, chunks, out, bias)
            return finish(partial_sums(lhs, weight, 0)[None], out, scale, weight, bias)
        import torch.distributed as dist

        small = 4 * m * n <= GATHERED_BYTES and not own
        per_rank = m if small else -(-m // world)
        mine = out.new_empty((m if small else world * per_rank, n), dtype=torch.float32 if chunks else torch.int32)
        rank_sums(lhs, weight, chunks, mine[:m])
        parts = mine.new_empty((world, per_rank, n))
        if small:
            _all_gather(parts.view(world * m, n), mine, self._group)
            return finish(parts, out, scale, weight, bias)
        dist.all_to_all_single(parts.view(world * per_rank, n), mine, group=self._group)
        first = min(self.rank * per_rank, m)
        rows = slice(first, min(first + per_rank, m))
        done = out[rows] if own else out.new_empty((per_rank, n))
        if rows.stop > first:
            finish(parts, done[: rows.stop - first], scale[rows], weight, bias)
        if own:
            return out
        gathered = out.new_empty((world * per_rank, n))
        _all_gather(gathered, done, self._group)
        return gathered[:m]


def _all_gather(out: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    import torch.distributed as dist

    # torch 2.13 has a new name, and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


define_op(
    "invariant_linear(Tensor rows, Tensor blocks, Tensor? channel_scale, Tensor? row_sum, Tensor? permutation, "
    "Tensor? input_scale, Tensor? bias, SymInt n, SymInt k, str format, str activation, int rotation, bool columns, "
    "int chunks, str group, int rank, int world, bool nvlink, bool added_later) -> Tensor",
    _multiply,
    lambda rows, *rest: rows.new_empty((rows.shape[0], rest[6])),
)
