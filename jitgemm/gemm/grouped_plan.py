"""From the checked operands of a grouped call to a launch: what `plan.py` is to the dense one."""

from __future__ import annotations

import torch

from jitgemm.gemm.arguments import Operands
from jitgemm.gemm.groups import GROUPED_POINTERS, Groups
from jitgemm.gemm.plan import KERNELS, VALUES, as_set, chosen, grid_of, values_of
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.spec import KernelSpec, slice_tokens, smem_bytes
from jitgemm.runtime.device import device_of
from jitgemm.runtime.driver import TileMap
from jitgemm.runtime.launch import ArgumentBlock, Launch
from jitgemm.select.shapes import most_units
from jitgemm.tensors import TYPE_NAMES

SWIZZLE_ROWS = 8
"""Rows of the copies of a tile that is not whole; after so many the swizzle repeats."""

ARGUMENTS = ArgumentBlock(
    GROUPED_POINTERS,
    **VALUES,
    experts="I",
    rows_of_expert="I",
    expected_rows="I",
    tokens="I",
    sizes_step="I",
    wide_sizes="I",
    scale_expert_step="Q",
)
"""`GroupedArgs` in include/jitgemm/gemm/types.cuh."""


class GroupedPlan(Launch):
    """A prepared grouped call, for operands and groups of the shapes, strides, dtypes and device it was made for.

    Args:
        operands, groups: checked, on a GPU, with rows.
        spec: the kernel; None for the one that is chosen.
        batch_invariant, kernel: as for `gemm_w4a8_nt`.
    """

    __slots__ = ("spec",)

    def __init__(
        self,
        operands: Operands,
        groups: Groups,
        spec: KernelSpec | None = None,
        *,
        batch_invariant: bool = False,
        kernel: str | None = None,
    ):
        x, x_scale, x_zero, weight, out, bias = operands
        rows, n, k, experts = out.shape[0], weight.n, weight.k, weight.experts
        device = device_of(x.get_device())
        if spec is None:
            problem = Problem(
                groups.expected_rows, n, k, TYPE_NAMES[x.dtype], weight.format, TYPE_NAMES[out.dtype], batch_invariant,
                experts, operands.lhs_group, operands.lhs_e8m0,
            )  # fmt: skip
            spec = chosen(problem, device, kernel)
        self.spec = spec = as_set(spec)

        gathers = groups.row_index is not None
        x_row_bytes = x.stride(0) if x.shape[0] > 1 else k
        out_row_bytes = out.element_size() * (out.stride(0) if rows > 1 else n)

        def x_map(rows: int) -> TileMap:
            return TileMap("u8", columns=k, rows=x.shape[0], row_bytes=x_row_bytes, box=(128, rows))

        def out_map(box_rows: int) -> TileMap:
            box = 128 // out.element_size(), box_rows
            return TileMap(spec.out, columns=n, rows=rows, row_bytes=out_row_bytes, box=box)

        x_maps = x_map(spec.block_m // spec.multicast_lhs), x_map(1 if gathers else SWIZZLE_ROWS)
        out_maps = out_map(slice_tokens(spec)), out_map(SWIZZLE_ROWS), out_map(1)
        loaded = KERNELS.load(spec, x.get_device())
        lhs, out_at = (i for i, pointer in enumerate(GROUPED_POINTERS) if pointer.field in ("lhs", None))
        super().__init__(
            loaded,
            ARGUMENTS,
            values_of(operands, rows=rows, x_row_bytes=x_row_bytes, last_rows=0)
            | {
                "experts": experts,
                "rows_of_expert": groups.rows_of_expert,
                "expected_rows": -(-groups.expected_rows // experts),
                "tokens": x.shape[0],
                "sizes_step": 2 if groups.sizes.dim() == 2 else 1,
                "wide_sizes": groups.sizes.element_size() == 8,
                "scale_expert_step": _expert_step(x_scale, groups.rows_of_expert),
            },
            grid=grid_of(spec, loaded, most_units(spec, experts, rows, n), device),
            threads=(spec.threads, 1),
            smem_bytes=smem_bytes(spec),
            maps=(*((lhs, each) for each in x_maps), *((out_at, each) for each in out_maps)),
        )

    def launch(self, operands: Operands, groups: Groups) -> None:
        """Runs on the device of the operands, on its current stream. Raises as `Launch.run`.

        The kernel may start before the kernel before it ends: it reads nothing of the device's memory until that has.
        """
        self.run_tensors(groups.sizes, groups.row_index, *operands.tensors)


def _expert_step(x_scale: torch.Tensor, rows_of_expert: int) -> int:
    """What an expert adds to the index of a scale of [E, rows, groups] beside its rows' stride, modulo 2^64."""
    return (x_scale.stride(0) - rows_of_expert * x_scale.stride(1)) % 2**64 if x_scale.dim() == 3 else 0
