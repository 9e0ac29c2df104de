"""DTensors as activations: each rank runs a whole layer, or an op, on its own rows. Imported where the first is met.

Rows depend on no others, so any layout of them holds for the result. A packed weight has no rows or columns that
DTensor could cut: weights are plain tensors of each rank, whole here and cut by the styles of `parallel.py` there.
Knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from jitgemm.nn.layers.sharding import LinearSharding

ROWS = {"quantize_activations": ("x",), "gemm_w4a8_nt": ("x", "x_scale", "x_zero", "out")}
"""By op: its arguments that have a row for each token. The others are the same on all ranks."""


def on_parts(
    forward: Callable[[torch.Tensor], torch.Tensor], x: DTensor, split: LinearSharding | None = None
) -> torch.Tensor:
    """forward, a module's, of each rank's rows of x [..., k]: a DTensor of x's layout.

    Partial sums are summed and columns gathered before. With `split`, of a divided module that takes and gives plain
    tensors, x is brought into its layout, and a plain tensor comes out.
    """
    if split is not None:
        return forward(split.enter(x))
    last = x.dim() - 1
    whole = [Replicate() if each.is_partial() or getattr(each, "dim", None) == last else each for each in x.placements]
    x = x.redistribute(placements=whole)
    return _distributed(forward(x.to_local()), x, x.shape[:-1])


def _distributed(part: torch.Tensor, x: DTensor, lead: tuple[int, ...]) -> DTensor:
    """The DTensor [*lead, ...] of x's layout whose part on this rank is `part`."""
    shape = torch.Size((*lead, *part.shape[len(lead) :]))
    # Ranks may have other numbers of rows, so the sizes are said. Scales per block stand in columns, 4 rows aligned.
    by_columns = part.dim() == 2 and part.stride(0) == 1 != part.shape[1]
    stride = (1, -(-shape[0] // 4) * 4) if by_columns else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)


def _by_rows(_class: type, op: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """An op on each rank's rows, of which no layout is changed: `register_torch_dispatch`'s rule for DTensors."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args)) | (kwargs or {})
    name = op._schema.name.removeprefix("jitgemm::")
    x = given["x"]
    if not isinstance(x, DTensor):
        raise TypeError(f"x: expected a DTensor beside others in {name}, got {type(x).__name__}")
    if any(each not in (Replicate(), Shard(0)) for each in x.placements):
        raise ValueError(
            f"x: expected placements Replicate() or Shard(0) in {name}, as a row's scale is of the whole row, got "
            f"{x.placements}; redistribute it first"
        )
    for key, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        layout = tensor.placements if isinstance(tensor, DTensor) else None
        if key in ROWS[name]:
            if layout != x.placements or tensor.device_mesh != x.device_mesh:
                if layout is not None or tensor.numel() != 1 or key == "out":  # one scale for all rows may be plain
                    got = type(tensor).__name__ if layout is None else f"{layout} on {tensor.device_mesh}"
                    raise ValueError(
                        f"{key}: expected a DTensor with {x.placements} on {x.device_mesh} in {name}, as x is, got {got}"
                    )
        elif layout is not None and any(each != Replicate() for each in layout):
            raise ValueError(
                f"{key}: expected a plain tensor or one with Replicate() in {name}, got {layout}; "
                "jitgemm.nn.parallel divides weights"
            )
        if layout is not None:
            given[key] = tensor.to_local()
    results = op(**given)
    return tuple(_distributed(each, x, x.shape[:1]) for each in results) if results else results


for _name in ROWS:
    torch.library.register_torch_dispatch(f"jitgemm::{_name}", DTensor, _by_rows)
