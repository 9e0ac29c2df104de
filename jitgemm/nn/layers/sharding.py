"""How layers and their inputs are divided among the ranks of a mesh. Imported where the first mesh or DTensor is met.

`Sharding` says which part of a weight a rank holds, and how the layer's input and output are laid out; the styles of
`jitgemm.nn.parallel` divide layers by it. Undivided layers and ops also take DTensors: each rank computes its own rows,
which depend on no others, so the result has the input's layout. DTensor cannot cut a packed weight, so each rank's
weight is a plain tensor. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Sharding:
    """The ranks that share a layer, in the order of its parts."""

    group: dist.ProcessGroup

    def sum(self, out: torch.Tensor) -> None:
        """out = the sum of all ranks' out, rounded to its type at every addition."""
        dist.all_reduce(out, group=self.group)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a mesh and its processes have no copies

    def __reduce__(self) -> Any:
        raise TypeError(
            "split: expected no pickle of a layer divided among ranks, as it holds a process group; save state_dict()"
        )


@dataclass(frozen=True)
class LinearSharding(Sharding):
    """How one Linear is divided.

    Attributes:
        dim: "n", each rank has rows of the weight and gives columns of the output; or "k", each rank has columns of the
            weight, takes columns of the input and gives a part of the sum.
        mesh: of one dimension.
        input_layout, output_layout: of plain tensors that go in, and of what comes out.
        local_output: whether a plain tensor comes out, or a DTensor.
        tp_invariant: the same bits on any number of ranks; along k the layer itself sums up over them then
            (`jitgemm.nn.layers.invariant`).
        nvlink: it does so by kernels that read the other ranks' memory, and not by collectives.
    """

    dim: str
    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    local_output: bool = True
    tp_invariant: bool = False
    nvlink: bool = False
    added_later = False

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def world(self) -> int:
        return self.mesh.size()

    @property
    def wanted(self) -> Placement:
        """The layout of the input that the layer multiplies."""
        return Replicate() if self.dim == "n" else Shard(-1)

    @property
    def sums(self) -> bool:
        """Whether the GEMM's output is summed in place, as an output on all ranks needs it."""
        return self.dim == "k" and self.output_layout == Replicate() and not self.tp_invariant

    @property
    def given(self) -> Placement:
        """The layout of what the layer computes."""
        return Shard(-1) if self.dim == "n" else Replicate() if self.sums or self.tp_invariant else Partial()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's input of the layer's, a plain tensor."""
        if not isinstance(x, DTensor):
            if self.input_layout == self.wanted:
                return x
            x = DTensor.from_local(x, self.mesh, [self.input_layout], run_check=False)
        assert isinstance(x, DTensor)
        if x.device_mesh != self.mesh:
            raise ValueError(
                f"x: expected a DTensor on {self.mesh}, which divides the layer, got one on {x.device_mesh}"
            )
        return x.redistribute(self.mesh, [self.wanted]).to_local()

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """The layer's output as its layout says."""
        if self.local_output and self.output_layout == self.given:
            return y
        distributed = DTensor.from_local(y, self.mesh, [self.given], run_check=False)
        distributed = distributed.redistribute(self.mesh, [self.output_layout])
        return distributed.to_local() if self.local_output else distributed


@dataclass(frozen=True)
class EngineSharding(Sharding):
    """How an engine divides a layer with `tp_invariant` along k, or experts, whose outputs it adds up.

    Attributes:
        rank, world: this rank, and how many.
        nvlink: as in `LinearSharding`.
    """

    rank: int
    world: int
    nvlink: bool = False
    dim, sums, exchanges, tp_invariant, added_later = "k", False, False, True, True


@dataclass(frozen=True)
class ExpertSharding(Sharding):
    """Which experts of a layer this rank has: whole ones.

    Attributes:
        rank, world: this rank, and how many.
        experts: of a rank; rank r has experts r * experts to (r + 1) * experts - 1.
        exchanges: whether every rank has tokens of its own, or all have the same.
        max_tokens: of a rank in a call, where that is known; None: as many as there are.
        nvlink: kernels write tokens into the other ranks' memory; else collectives send them.
        tp_invariant: the same bits on any number of ranks (`jitgemm.nn.layers.invariant_experts`).
    """

    rank: int
    world: int
    experts: int
    exchanges: bool
    max_tokens: int | None = None
    nvlink: bool = False
    tp_invariant: bool = False
    added_later = False

    @property
    def mine(self) -> range:
        """The experts of this rank, as all are numbered."""
        return range(self.rank * self.experts, (self.rank + 1) * self.experts)

    def expert_map(self, device: torch.device) -> torch.Tensor:
        """int32 [all experts]: this rank's number of each, -1 for others'."""
        numbers = torch.arange(self.world * self.experts, dtype=torch.int32, device=device) - self.rank * self.experts
        return torch.where((numbers >= 0) & (numbers < self.experts), numbers, -1)


# ---- DTensors as activations -----------------------------------------------------------------------------------------

ROWS = {"quantize_activations": ("x",), "gemm_w4a8_nt": ("x", "x_scale", "x_zero", "out")}
"""By op: its arguments that have a row for each token. The others are the same on all ranks."""


def on_parts(forward: Callable[[torch.Tensor], torch.Tensor], x: DTensor) -> torch.Tensor:
    """forward, a module's, of each rank's rows of x [..., k]: a DTensor of x's layout.

    Partial sums are summed and columns gathered before.
    """
    last = x.dim() - 1
    layouts = [Replicate() if old.is_partial() or getattr(old, "dim", None) == last else old for old in x.placements]
    x = x.redistribute(placements=layouts)
    return _distributed(forward(x.to_local()), x, x.shape[:-1])


def _distributed(part: torch.Tensor, x: DTensor, lead: tuple[int, ...]) -> DTensor:
    """The DTensor [*lead, ...] of x's layout whose part on this rank is `part`."""
    shape = torch.Size((*lead, *part.shape[len(lead) :]))
    # Ranks may have other numbers of rows, so the sizes are said. Scales per block stand in columns, 4 rows aligned.
    by_columns = part.dim() == 2 and part.stride(0) == 1 != part.shape[1]
    stride = (1, -(-shape[0] // 4) * 4) if by_columns else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)


def _by_rows(_class: type, op: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """An op on each rank's rows, whose layouts stay: `register_torch_dispatch`'s rule for DTensors."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args)) | (kwargs or {})
    name = op._schema.name.removeprefix("jitgemm::")
    x = given["x"]
    if not isinstance(x, DTensor):
        raise TypeError(f"x: expected a DTensor, as other arguments of {name} are, got {type(x).__name__}")
    if any(each not in (Replicate(), Shard(0)) for each in x.placements):
        raise ValueError(
            f"x: expected placements Replicate() or Shard(0) in {name}, as a row's scale is of the whole row, got "
            f"{x.placements}; redistribute it first"
        )
    for key, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        layout, mesh = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else (None, None)
        one_scale = layout is None and tensor.numel() == 1 and key != "out"  # for all rows; it may be plain
        if key in ROWS[name]:
            if not one_scale and (layout, mesh) != (x.placements, x.device_mesh):
                got = type(tensor).__name__ if layout is None else f"{layout} on {mesh}"
                raise ValueError(
                    f"{key}: expected a DTensor with {x.placements} on {x.device_mesh} in {name}, as x is, got {got}"
                )
        elif layout is not None and any(each != Replicate() for each in layout):
            raise ValueError(
                f"{key}: expected a plain tensor or one with Replicate() in {name}, got {layout}; "
                "jitgemm.nn.parallel divides weights"
            )
        if layout is not None:
            assert isinstance(tensor, DTensor)
            given[key] = tensor.to_local()
    results = op(**given)
    return tuple(_distributed(each, x, x.shape[:1]) for each in results) if results else results


for _name in ROWS:
    torch.library.register_torch_dispatch(f"jitgemm::{_name}", DTensor, _by_rows)
