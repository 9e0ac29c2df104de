"""From a checked GEMM to a launch.

A launch is everything about a call that its shapes decide: kernel, grid, argument block, tensor maps. Making one goes
down the layers: choose, render, cache or compile, load. Using one takes the operands' addresses, which `Launch.run`
checks when it first meets them; everything else `problem.py` has checked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from jitgemm import settings
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.problem import GROUPED_POINTERS, POINTERS, Gemm, lhs_group_of
from jitgemm.kernel.formats import BLOCK_K, Problem, ceil_div
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec, lhs_copy_rows, slice_tokens, smem_bytes
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of
from jitgemm.runtime.driver import TileMap
from jitgemm.runtime.launch import ArgumentBlock, Launch
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.select.choose import choose, kernel_named
from jitgemm.select.devices import DeviceSpec
from jitgemm.select.legal import cluster_tiles, launched_clusters, max_cluster_tiles
from jitgemm.tensors import TYPE_NAMES

if TYPE_CHECKING:
    from jitgemm.weight.packed import AnyWeight

VALUES = dict(
    lhs_stride="Q", lhs_scale_stride="Q", lhs_zero_stride="Q", m="I", n="I", k="I", channel_scale_type="i",
    bias_type="i", last_rows="I", chunk_blocks="I", chunk_rows="I",
)  # fmt: skip
GROUP_VALUES = dict(
    experts="I", rows_of_expert="I", expected_rows="I", tokens="I", sizes_step="I", wide_sizes="I",
    scale_expert_step="Q",
)  # fmt: skip
ARGUMENTS = ArgumentBlock(POINTERS, **VALUES)
GROUPED_ARGUMENTS = ArgumentBlock(GROUPED_POINTERS, **VALUES, **GROUP_VALUES)
"""`Args` and `GroupedArgs` in include/jitgemm/gemm/types.cuh."""

SWIZZLE_ROWS = 8
"""Rows of the copies of an expert's tile that is not whole; after so many the swizzle repeats."""

KERNELS = KernelFamily(kernel_source, smem_bytes, call="the GEMM once with these shapes")


class GemmLaunch(Launch):
    """A prepared GEMM, for tensors of the shapes, strides, dtypes and device that it was made for.

    Args:
        gemm: checked, on a GPU, with rows. Of chunks out has three dimensions (`jitgemm.gemm.partial`).
        spec: the kernel; None for the one that is asked for, or else chosen.
    """

    __slots__ = ("spec",)

    def __init__(self, gemm: Gemm, spec: KernelSpec | None = None):
        x, _, _, weight, out, _, groups, _, label = gemm
        (tokens, k), (rows, n), experts = x.shape, out.shape[-2:], weight.experts or 0
        chunks, out_rows = (out.shape[0], out.shape[0] * rows) if out.dim() == 3 else (1, rows)
        rows = tokens if out.dim() == 3 else rows
        device = device_of(x.get_device())
        if spec is None:
            problem = problem_of(gemm)
            spec = choose(problem, device) if label is None else kernel_named(label, problem, device)
        self.spec = spec = replace(spec, debug=True) if settings.debug() else spec

        if groups is None:
            copied, last_rows = lhs_copy_rows(spec, rows)
            # The only tile is the last one, too.
            x_boxes: tuple[int, ...] = (copied if rows > spec.block_m else last_rows, last_rows)
            out_boxes: tuple[int, ...] = (slice_tokens(spec),)
            tiles = chunks * cluster_tiles(spec, rows, n)
        else:
            last_rows = 0
            x_boxes = spec.block_m // spec.multicast_lhs, SWIZZLE_ROWS if groups.row_index is None else 1
            out_boxes = slice_tokens(spec), SWIZZLE_ROWS, 1
            tiles = max_cluster_tiles(spec, experts, rows, n)
        # One row's stride is never walked, and torch may report any value for it.
        x_row_bytes = x.stride(0) if tokens > 1 else k
        out_row_bytes = out.element_size() * (out.stride(-2) if out_rows > 1 else n)
        x_map = partial(TileMap, "u8", columns=k, rows=tokens, row_bytes=x_row_bytes)
        x_maps = {box: x_map(box=(128, box)) for box in set(x_boxes)}
        out_map = partial(TileMap, spec.out, columns=n, rows=out_rows, row_bytes=out_row_bytes)
        out_maps = [out_map(box=(128 // out.element_size(), box)) for box in out_boxes]
        loaded = KERNELS.load(spec, x.get_device())
        block = ARGUMENTS if groups is None else GROUPED_ARGUMENTS
        x_at, out_at = len(block.pointers) - len(POINTERS), len(block.pointers) - 1
        super().__init__(
            loaded, block, _values(gemm, x_row_bytes, last_rows), grid=_grid(spec, loaded, tiles, device),
            threads=(spec.threads, 1), smem_bytes=smem_bytes(spec),
            maps=(*((x_at, x_maps[box]) for box in x_boxes), *((out_at, each) for each in out_maps)),
        )  # fmt: skip

    def launch(self, gemm: Gemm) -> None:
        """Runs on the device of the operands, on its current stream. Raises as `Launch.run`."""
        if gemm.groups is None:
            self.launch_dense(*gemm[:6])
        else:
            self.run_tensors(*gemm.operands())

    def launch_dense(
        self, x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor | None, weight: AnyWeight,
        out: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """`launch`, unrolled for calls that come again.

        If the weight is ready, the kernel may start before the kernel before it ends. A grouped one always may: it
        reads nothing of the device's memory until that has.
        """
        blocks, channel_scale = weight.blocks, weight.channel_scale
        records = blocks.data_ptr()
        key = (
            x.data_ptr(),
            x_scale.data_ptr(),
            0 if x_zero is None else x_zero.data_ptr(),
            0 if x_zero is None else weight.row_sum.data_ptr(),  # type: ignore[union-attr]
            records,
            0 if channel_scale is None else channel_scale.data_ptr(),
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.number,
        )
        ready_at = weight.ready_at
        # In this order: inference tensors, which are never ready, have no version to ask for.
        ready = ready_at is not None and ready_at == (records, blocks._version)
        if not ready and weight.sums == "f16":
            weight.follow_writes()
        if not self.run(key, ready):
            self.run(key, ready, Gemm(x, x_scale, x_zero, weight, out, bias).operands())


def problem_of(gemm: Gemm) -> Problem:
    """What the selector chooses a kernel for, of a checked GEMM."""
    x, x_scale, _, weight, out = gemm[:5]
    rows = gemm.expected_rows or out.shape[0]
    return Problem(
        rows, weight.n, weight.k, TYPE_NAMES[x.dtype], weight.format, TYPE_NAMES[out.dtype], gemm.batch_invariant,
        weight.experts or 0, lhs_group_of(x_scale), x_scale.dtype == torch.int32, weight.sums, rows < out.shape[0],
    )  # fmt: skip


def _grid(spec: KernelSpec, loaded: driver.LoadedKernel, tiles: int, device: DeviceSpec) -> int:
    """CTAs of a launch for so many tiles of work."""
    size, resident = spec.cluster_size, device.num_sms
    if size > 1:
        resident = driver.resident_clusters(loaded, size, spec.threads, smem_bytes(spec))
    return size * launched_clusters(spec, tiles, device.num_sms, resident)


def _values(gemm: Gemm, x_row_bytes: int, last_rows: int) -> dict[str, int | None]:
    """What VALUES and GROUP_VALUES name."""
    x, x_scale, x_zero, weight, out, bias, groups = gemm[:7]
    per_block = lhs_group_of(x_scale) > 0
    scale_type = DTYPES["fp32" if weight.sums == "f16" else weight.format.scale_type].number  # powers are fp32
    values = dict(
        lhs_stride=x_row_bytes,
        lhs_scale_stride=x_scale.stride(-2) if per_block else _per_token_stride(x_scale),
        lhs_zero_stride=x_scale.stride(-1) if per_block else _per_token_stride(x_zero),
        m=out.shape[0] if out.dim() == 2 else x.shape[0], n=weight.n, k=x.shape[1], channel_scale_type=scale_type,
        bias_type=0 if bias is None else DTYPES[TYPE_NAMES[bias.dtype]].number, last_rows=last_rows,
        **dict(zip(("chunk_blocks", "chunk_rows"), _chunks(gemm), strict=True)),
    )  # fmt: skip
    if groups is None:
        return values
    sizes, _, rows_of_expert, _ = groups
    # Elements, mod 2^64, from one expert's scales [E, rows, groups] to the next, beyond rows * stride.
    step = (x_scale.stride(0) - rows_of_expert * x_scale.stride(1)) % 2**64 if x_scale.dim() == 3 else 0
    return values | dict(
        experts=weight.experts, rows_of_expert=rows_of_expert,
        expected_rows=ceil_div(gemm.expected_rows, weight.experts or 1), tokens=x.shape[0],
        sizes_step=2 if sizes.dim() == 2 else 1, wide_sizes=sizes.element_size() == 8, scale_expert_step=step,
    )  # fmt: skip


def _chunks(gemm: Gemm) -> tuple[int, int]:
    """(blocks of k that a sum has, rows of out for each chunk) where out [chunks, rows, n] has sums of chunks."""
    out = gemm.out
    return (gemm.x.shape[1] // BLOCK_K // out.shape[0], out.shape[1]) if out.dim() == 3 else (0, 0)


def _per_token_stride(tensor: torch.Tensor | None) -> int:
    """Elements between the values of consecutive tokens; 0 when one element serves all, or there is none."""
    return 0 if tensor is None or tensor.numel() == 1 else tensor.stride(0)
