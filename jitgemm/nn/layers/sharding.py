"""How a layer is divided among the ranks of a mesh, and what that asks of its input and its output.

Knows `torch.distributed` and tensors; no layers. What divides a layer is `jitgemm.nn.parallel`.
"""

from __future__ import annotations

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
    """

    dim: str
    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    local_output: bool = True

    @property
    def wanted(self) -> Placement:
        """The layout of the input that the layer multiplies."""
        return Replicate() if self.dim == "n" else Shard(-1)

    @property
    def sums(self) -> bool:
        """Whether the GEMM's output is summed in place, as an output on all ranks needs it."""
        return self.dim == "k" and self.output_layout == Replicate()

    @property
    def given(self) -> Placement:
        """The layout of what the layer computes."""
        return Shard(-1) if self.dim == "n" else Replicate() if self.sums else Partial()

    @property
    def plain(self) -> bool:
        """Whether plain tensors go in and come out without a change of layout."""
        unchanged = self.input_layout == self.wanted and self.output_layout == self.given != Partial()
        return unchanged and self.local_output

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's input of the layer's, a plain tensor."""
        if not isinstance(x, DTensor):
            if self.input_layout == self.wanted:
                return x
            x = DTensor.from_local(x, self.mesh, [self.input_layout], run_check=False)
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
class ExpertSharding(Sharding):
    """Which experts of a layer this rank has: whole ones.

    Attributes:
        rank, world: this rank, and how many.
        experts: of a rank; rank r has experts r * experts to (r + 1) * experts - 1.
        exchanges: whether every rank has tokens of its own, or all have the same.
        max_tokens: of a rank in a call, where that is known; None: as many as there are.
    """

    rank: int
    world: int
    experts: int
    exchanges: bool
    max_tokens: int | None = None

    @property
    def mine(self) -> range:
        """The experts of this rank, as all are numbered."""
        return range(self.rank * self.experts, (self.rank + 1) * self.experts)

    def expert_map(self, device: torch.device) -> torch.Tensor:
        """int32 [all experts]: this rank's number of each, -1 for others'."""
        numbers = torch.arange(self.world * self.experts, dtype=torch.int32, device=device) - self.rank * self.experts
        return torch.where((numbers >= 0) & (numbers < self.experts), numbers, -1)
