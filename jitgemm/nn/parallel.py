"""Tensor parallel styles of packed Linears, for `torch.distributed.tensor.parallel.parallelize_module`.

    from jitgemm.nn.parallel import ColwiseParallel, RowwiseParallel
    parallelize_module(mlp, mesh, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})

Every rank holds the whole layer and keeps its part. Layers other than packed Linears go to PyTorch's styles, so one
plan serves a model with both.
"""

from __future__ import annotations


import torch
from torch.distributed.tensor import DeviceMesh, Placement
from torch.distributed.tensor.parallel import ColwiseParallel as _Colwise
from torch.distributed.tensor.parallel import RowwiseParallel as _Rowwise

from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.kernel.formats import BLOCK_K, LHS_GROUP, STRIP_ROWS
from jitgemm.nn.fused import ADVICE, Run, Slice
from jitgemm.nn.linear import PackedLinear
from jitgemm.nn.read import BLOCK, CODES
from jitgemm.nn.split import Split
from jitgemm.weight.pack import row_sums
from jitgemm.weight.packed import PackedWeight, Weight

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class ColwiseParallel(_Colwise):
    """Each rank computes out_features / ranks columns of the output, from the whole input.

    The rank's columns are those of the whole layer bit for bit, where the same kernel computes both: always on the CPU,
    on a GPU with `batch_invariant` or where the selector picks alike. The bias is divided like the rows.

    Args:
        input_layouts: layout of a plain input: None for Replicate(), or Shard(dim), which is gathered.
        output_layouts: None for Shard(-1), or Replicate(), which gathers the columns, or another.
        use_local_output: whether a plain tensor comes out; else a DTensor.

    out_features / ranks must be a multiple of 8; at multiples of 64 the packed weight is cut without packing it again.
    A DTensor as input is brought into the layout that the layer needs.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, PackedLinear):
            return super()._apply(module, device_mesh)
        return _divide(module, "n", device_mesh, self.input_layouts, self.output_layouts, self.use_local_output)


class RowwiseParallel(_Rowwise):
    """Each rank multiplies in_features / ranks columns of the input; the ranks' results are summed.

    Every rank's part is rounded to the output's type before the sum, and so is each addition: for R ranks and bf16 the
    result is within R * 2^-8 of the sum of the parts' magnitudes. The bias is rank 0's, so that it counts once.

    Args:
        input_layouts: layout of a plain input: None for Shard(-1), or Replicate(), of which each rank takes its
            columns, or another Shard(dim), by an all-to-all.
        output_layouts: None for Replicate(), by an all-reduce; or Shard(dim), by a reduce-scatter.
        use_local_output: whether a plain tensor comes out; else a DTensor.
        agree_scales: quantise each token with the scale of its whole row, found by an all-reduce of m maxima in fp32
            before the quantiser: the codes are then those of the whole layer. Default: the scale of the rank's own
            columns, which is never larger and so codes no worse, but other codes come out. What has a static scale or
            one per 128 columns has the whole layer's codes anyway.

    in_features / ranks must be a multiple of 32 and of the group size; at multiples of 128 the packed weight is cut
    without packing it again. A permutation (act-order) must keep each rank's columns among themselves.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        agree_scales: bool = False,
    ):
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.agree_scales = agree_scales

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, PackedLinear):
            return super()._apply(module, device_mesh)
        layouts = self.input_layouts, self.output_layouts, self.use_local_output
        return _divide(module, "k", device_mesh, *layouts, agree_scales=self.agree_scales)


def _divide(
    layer: PackedLinear,
    dim: str,
    mesh: DeviceMesh,
    input_layouts: tuple[Placement, ...],
    output_layouts: tuple[Placement, ...],
    local_output: bool,
    agree_scales: bool = False,
) -> PackedLinear:
    """Makes the layer this rank's part of it, in place."""
    name = layer.weight.layer or type(layer).__name__
    if isinstance(layer, (Slice, Run)):
        raise ValueError(f"{name}: expected a layer that is not fused; {ADVICE}")
    if layer.split is not None:
        raise ValueError(f"{name}: expected a whole layer, got one that is divided along {layer.split.dim} already")
    try:
        rank, world = rank_of(mesh)
        part = part_of_weight(layer.weight, dim, rank, world, CODES[layer.activation])
        split = Split(
            dim, mesh, mesh.get_group(), input_layouts[0], output_layouts[0], local_output,
            agree_scales and agrees(layer, part.k),
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    put_part(layer, part, part_of_bias(layer.bias, dim, rank, world), split)
    return layer


def rank_of(mesh: DeviceMesh) -> tuple[int, int]:
    """This process's rank in a mesh of one dimension, and its size."""
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, such as mesh['tp'], got {mesh.ndim}")
    return mesh.get_local_rank(), mesh.size()


def agrees(layer: PackedLinear, k: int) -> bool:
    """Whether ranks have to exchange maxima for scales of the whole row; k: of a rank."""
    if layer.activation == "int8_affine":
        raise ValueError("agree_scales: expected symmetric activations, got int8_affine, whose zero points differ too")
    if layer.activation.endswith(BLOCK) and k % LHS_GROUP:
        raise ValueError(
            f"agree_scales: expected a multiple of {LHS_GROUP} columns a rank for {layer.activation}, got {k}"
        )
    return not layer.activation.endswith(BLOCK) and layer.input_scale is None


def part_of_weight(weight: Weight, dim: str, rank: int, world: int, lhs_dtype: torch.dtype) -> Weight:
    """A rank's part of a weight, exactly, in memory of its own; see `CanonicalWeight.shard`.

    Records are sliced where the cut falls between them; otherwise the weight is unpacked, cut and packed.
    """
    if weight.experts is not None:
        raise ValueError(f"weight: expected a dense one, got one of {weight.experts} experts")
    n, k, fmt = weight.n, weight.k, weight.format
    if dim == "n" and n % (world * STRIP_ROWS) == 0:
        n //= world
        rows = slice(rank * n, (rank + 1) * n)
        blocks = weight.blocks[rows.start // STRIP_ROWS : rows.stop // STRIP_ROWS].clone()
        channel_scale, row_sum = (
            None if each is None else each[rows].clone() for each in (weight.channel_scale, weight.row_sum)
        )
        part = type(weight)(
            blocks, channel_scale, n, k, weight.group_size, fmt, row_sum=row_sum, permutation=weight.permutation
        )
    elif dim == "k" and _between_records(weight, world):
        k //= world
        blocks = weight.blocks[:, rank * k // BLOCK_K : (rank + 1) * k // BLOCK_K].contiguous()
        row_sum = weight.row_sum
        if row_sum is not None:
            row_sum = row_sums(PackedWeight(blocks, weight.channel_scale, None, n, k, fmt))
        part = type(weight)(blocks, weight.channel_scale, n, k, fmt.group_size or k, fmt, row_sum=row_sum)
    else:
        q, scale, zero = weight.unpack()
        permutation, offset = weight.permutation, weight.unpack_offset()
        whole = CanonicalWeight(q, scale, zero, offset, weight.group_size, permutation, bits=weight.bits)
        part = whole.shard(dim, rank, world).pack(lhs_dtype)
    part.named(weight.layer)
    return part


def _between_records(weight: Weight, world: int) -> bool:
    """Whether each rank's part along k is whole records, in the weight's own format."""
    group_size = weight.format.group_size
    whole = weight.k % (world * max(BLOCK_K, group_size)) == 0
    return whole and weight.permutation is None and weight.k // world > group_size


def part_of_bias(bias: torch.Tensor | None, dim: str, rank: int, world: int) -> torch.Tensor | None:
    """Rows of it, or along k all of it for rank 0."""
    if bias is None or dim == "k":
        return bias if rank == 0 else None
    return bias.chunk(world)[rank].clone()


def put_part(layer: PackedLinear, weight: Weight, bias: torch.Tensor | None, split: Split) -> None:
    """Makes the layer one over this weight and bias."""
    part = type(layer)(weight, bias, activation=layer.activation, input_scale=layer.input_scale)
    layer._buffers, layer._weight = part._buffers, part._weight
    layer.in_features, layer.out_features, layer.split = weight.k, weight.n, split
