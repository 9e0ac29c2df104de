"""Tensor parallel styles of packed Linears, for `torch.distributed.tensor.parallel.parallelize_module`.

    from jitgemm.nn.parallel import ColwiseParallel, RowwiseParallel
    parallelize_module(mlp, mesh, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})

Every rank holds the whole layer and keeps its part. Layers other than packed Linears go to PyTorch's styles, so one
plan serves a model with both.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch.distributed.tensor import DeviceMesh, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as _Colwise
from torch.distributed.tensor.parallel import RowwiseParallel as _Rowwise
from torch.distributed.tensor.parallel.style import ParallelStyle

from jitgemm.moe.kernel import MAX_RANKS
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.invariant import EXCHANGES, check_tp_invariant, invariant_part, most_ranks
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.shard_weight import Cut, part_of, part_of_experts
from jitgemm.nn.layers.sharding import ExpertSharding, LinearSharding


class _Invariant(ParallelStyle):
    """Divides layers that may have the same bits on any number of ranks."""

    tp_invariant: bool | int

    def invariant(self, tp_invariant: bool | int) -> Self:
        """The same style with tp_invariant."""
        style = copy.copy(self)
        style.tp_invariant = tp_invariant
        return style


class _Divides(_Invariant):
    """Divides packed Linears; other layers go to the style of PyTorch that is the class's other base."""

    dim: str
    input_layouts: tuple[Placement, ...]
    output_layouts: tuple[Placement, ...]
    use_local_output: bool
    exchange = "collectives"

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True, tp_invariant: bool | int = False,
    ):  # fmt: skip
        layouts = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        super().__init__(**layouts, use_local_output=use_local_output)  # type: ignore[call-arg]
        check_tp_invariant(tp_invariant)
        self.tp_invariant = tp_invariant

    def sharding(self, mesh: DeviceMesh) -> LinearSharding:
        """What divides a layer so among the ranks of a mesh."""
        layouts = self.input_layouts[0], self.output_layouts[0]
        options = self.use_local_output, bool(self.tp_invariant), self.exchange == "nvlink"
        return LinearSharding(mesh.get_group(), self.dim, mesh, *layouts, *options)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, PackedLinear):
            return super()._apply(module, device_mesh)  # type: ignore[safe-super]
        name = module.weight.layer or type(module).__name__
        if module.split is not None:
            raise ValueError(
                f"{name}: expected a whole layer, got one that is divided along {module.split.dim} already"
            )
        try:
            cut = Cut(self.dim, *rank_of(device_mesh))
            invariant, most = self.tp_invariant and self.dim == "k", most_ranks(self.tp_invariant)
            module.take(invariant_part(module.parts, cut, most) if invariant else part_of(module.parts, cut))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        module.in_features, module.out_features = module.weight.k, module.weight.n
        module.split = self.sharding(device_mesh)
        if self.tp_invariant:
            module.tp_ranks = most
        module.tp_invariant = self.dim if self.tp_invariant else None
        return module


class ColwiseParallel(_Divides, _Colwise):
    """Each rank computes out_features / ranks columns of the output, from the whole input.

    The rank's columns are those of the whole layer bit for bit, where the same kernel computes both: always on the CPU,
    on a GPU where the selector picks the same kernel. The bias is divided like the rows.

    Args:
        input_layouts: layout of a plain input: None for Replicate(), or Shard(dim), which is gathered.
        output_layouts: None for Shard(-1), or Replicate(), which gathers the columns, or another.
        use_local_output: whether a plain tensor comes out; else a DTensor.
        tp_invariant: packed Linears give the same bits on any number of ranks, for any number of tokens: those of a
            layer on one GPU with `tp_invariant = "n"`.

    out_features / ranks must be a multiple of 8; at multiples of 64 the packed weight is cut without packing it again.
    A DTensor as input is brought into the layout that the layer needs.
    """

    dim = "n"


class RowwiseParallel(_Divides, _Rowwise):
    """Each rank multiplies in_features / ranks columns of the input; the ranks' results are summed.

    Every rank's part is rounded to the output's type before the sum, and so is each addition: for R ranks and bf16 the
    result is within R * 2^-8 of the sum of the parts' magnitudes. The bias is rank 0's, so that it counts once. A token
    is quantised with the scale of the rank's own columns, which is never larger than its whole row's: codes are as fine
    or finer, but not the whole layer's. With a static scale or one per 128 columns they are.

    Args:
        input_layouts: layout of a plain input: None for Shard(-1), or Replicate(): each rank then takes its
            columns, or another Shard(dim), by an all-to-all.
        output_layouts: None for Replicate(), by an all-reduce; or Shard(dim), by a reduce-scatter.
        use_local_output: whether a plain tensor comes out; else a DTensor.
        tp_invariant: packed Linears give the same bits on 1, 2, 4 and 8 ranks, for any number of tokens. A token has
            one scale, of the largest value over the ranks, and sums are rounded once, when all ranks' are added up
            (`jitgemm.nn.layers.invariant` says how). A layer on one GPU gives these bits with its own
            `tp_invariant = "k"`. Every rank has the bias. 2 or 4 in the place of True: the same bits on so many ranks
            at most, for which fewer chunks of k are added up (`PackedLinear.tp_ranks`).
        exchange: of tp_invariant: "collectives", or "nvlink": kernels read the sums in the memory of the other ranks,
            2, 4 or 8 of one host, with the same bits. What `ExpertParallel` says of it holds; calls whose sums in fp32
            take more than 64 MiB go by collectives.

    in_features / ranks must be a multiple of 16; at multiples of 128 and of the group size the packed weight is cut
    without packing it again. A cut through groups, at multiples of 32, repeats their scales over smaller ones, with a
    warning. A permutation (act-order) must keep each rank's columns among themselves.
    """

    dim = "k"

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True, tp_invariant: bool | int = False, exchange: str = "collectives",
    ):  # fmt: skip
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output,
            tp_invariant=tp_invariant,
        )  # fmt: skip
        if exchange not in EXCHANGES or (exchange == "nvlink" and not tp_invariant):
            wanted = f"one of {EXCHANGES}" if tp_invariant else "'collectives' without tp_invariant"
            raise ValueError(f"exchange: expected {wanted}, got {exchange!r}")
        self.exchange = exchange


class ExpertParallel(_Invariant):
    """Each rank holds num_experts / ranks whole experts of a `W4A8Experts` or `W8A8Experts`.

    A rank's experts sum their results of a token as the whole layer does and round them to the input's type; then the
    ranks' results are summed.

    Args:
        input_layouts: None for Replicate(): all ranks have the same tokens, each computes what its experts make of
            them, and an all-reduce sums that, rounding at each addition. Or Shard(0): every rank has tokens of its own,
            any number, which travel by `all_to_all_single` to the ranks of their experts, once each, as 8-bit codes
            with their scales, and come back in the input's type; the sum is in fp32, in the order of ranks. That waits
            for the device once a call, so no CUDA graph captures it.
        max_tokens: of a rank in a call, with Shard(0). As many rows of each rank then go to every other one, by
            `all_gather_into_tensor`, whatever experts they choose: nothing waits for the device, and CUDA graphs
            capture it. A rank with more tokens raises ValueError, and the others wait for it. For decoding, and for
            few ranks: with R of them a token travels R - 1 times instead of once to each rank that it needs.
        exchange: "collectives", as above, or "nvlink", with max_tokens: kernels write tokens and results into the
            memory of the other ranks, 2 to 8 of one host. A token goes to the ranks that have experts of its choice.
            Two ranks get the bits of "collectives". The first call with new shapes makes buffers; all ranks take part
            in it, and it raises CacheMissError while a CUDA graph is captured. Layers share the buffers, so the calls
            of a group run on one stream, in the same order on every rank. With JITGEMM_DEBUG=1 a kernel traps that
            waits long for another rank. CPU tensors are exchanged by collectives.
        tp_invariant: the same bits on 1, 2, 4 and 8 ranks, those of a layer on one GPU with `batch_invariant`, for any
            number of tokens, which are the same on all ranks: top_k times as much travels
            (`jitgemm.nn.layers.invariant_experts`).
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, max_tokens: int | None = None, exchange: str = "collectives",
        tp_invariant: bool | int = False,
    ):  # fmt: skip
        super().__init__()
        check_tp_invariant(tp_invariant)
        self.tp_invariant = tp_invariant
        self.input_layouts = input_layouts or Replicate()
        self.max_tokens, self.exchange = max_tokens, exchange

    def sharding_of(self, name: str, experts: int, mesh: DeviceMesh) -> ExpertSharding:
        """What this rank has of so many experts. Raises ValueError for ranks or arguments that cannot be."""
        if self.tp_invariant and self.input_layouts != Replicate():
            raise ValueError(f"input_layouts: expected Replicate() with tp_invariant, got {self.input_layouts}")
        if self.input_layouts not in (Replicate(), Shard(0)):
            raise ValueError(f"input_layouts: expected Replicate() or Shard(0), got {self.input_layouts}")
        most = self.max_tokens
        if most is not None and self.input_layouts != Shard(0):
            raise ValueError(f"max_tokens: expected None without input_layouts=Shard(0), got {most!r}")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"max_tokens: expected a number from 1 on, or None, got {most!r}")
        nvlink = self.exchange == "nvlink"
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange: expected one of {EXCHANGES}, got {self.exchange!r}")
        if nvlink and most is None:
            raise ValueError("max_tokens: expected a number for exchange='nvlink', got None")
        rank, world = rank_of(mesh)
        if experts % world:
            raise ValueError(f"{name}: expected a number of experts that {world} ranks divide, got {experts}")
        if nvlink and world > MAX_RANKS:
            raise ValueError(f"exchange: expected at most {MAX_RANKS} ranks for 'nvlink', got {world}")
        split = mesh.get_group(), rank, world, experts // world
        return ExpertSharding(*split, self.input_layouts == Shard(0), most, nvlink, bool(self.tp_invariant))

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, PackedExperts):
            raise TypeError(f"module: expected W4A8Experts or W8A8Experts, got {type(module).__name__}")
        name = module.w13.weight.layer.removesuffix(".w13") or type(module).__name__
        if module.split is not None:
            raise ValueError(f"{name}: expected all experts, got {module.num_experts} of a rank")
        split = self.sharding_of(name, module.num_experts, device_mesh)
        mine = slice(split.mine.start, split.mine.stop)
        for part in (module.w13, module.w2):
            part.take(part_of_experts(part.parts, mine))
        module.num_experts, module.split = split.experts, split
        module.batch_invariant |= split.tp_invariant
        return module


Style = ColwiseParallel | RowwiseParallel


def rank_of(mesh: DeviceMesh) -> tuple[int, int]:
    """This process's rank in a mesh of one dimension, and its size."""
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, such as mesh['tp'], got {mesh.ndim}")
    return mesh.get_local_rank(), mesh.size()
