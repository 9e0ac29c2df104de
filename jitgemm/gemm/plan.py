"""From checked operands to a launch.

A plan is everything about a call that its shapes decide: kernel, grid, argument block, tensor maps. Making one goes
down the layers: choose, render, cache or compile, load. Using one takes the operands' addresses, which `Launch`
checks when it first meets them; everything else `arguments.py` has checked.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from jitgemm import settings
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.arguments import POINTERS, Operands
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.render import KERNEL_NAME, kernel_source
from jitgemm.kernel.spec import KernelSpec, lhs_copy_rows, slice_tokens, smem_bytes
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of
from jitgemm.runtime.driver import TileMap
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.runtime.launch import ArgumentBlock, Launch
from jitgemm.select.choose import choose, kernel_named
from jitgemm.select.devices import DeviceSpec
from jitgemm.select.shapes import launched_clusters, units_of_work
from jitgemm.tensors import TYPE_NAMES
from jitgemm.weight.packed import AnyWeight

VALUES = dict(
    lhs_stride="Q", lhs_scale_stride="Q", lhs_zero_stride="Q", m="I", n="I", k="I", channel_scale_type="i",
    bias_type="i", last_rows="I",
)  # fmt: skip
ARGUMENTS = ArgumentBlock(POINTERS, **VALUES)
"""`Args` in include/jitgemm/gemm/types.cuh."""

KERNELS = KernelFamily(KERNEL_NAME, kernel_source, smem_bytes, call="the GEMM once with these shapes")


class Plan(Launch):
    """A prepared call, for operands of the shapes, strides, dtypes and device that it was made for.

    Args:
        operands: checked, on a GPU.
        spec: the kernel; None for the one that is chosen.
        batch_invariant, kernel: as for `gemm_w4a8_nt`.
    """

    __slots__ = ("spec",)

    def __init__(
        self,
        operands: Operands,
        spec: KernelSpec | None = None,
        *,
        batch_invariant: bool = False,
        kernel: str | None = None,
    ):
        x, x_scale, x_zero, weight, out, bias = operands
        m, n, k = x.shape[0], weight.n, weight.k
        device = device_of(x.get_device())
        if spec is None:
            problem = Problem(
                m, n, k, TYPE_NAMES[x.dtype], weight.format, TYPE_NAMES[out.dtype], batch_invariant,
                lhs_group=operands.lhs_group, lhs_e8m0=operands.lhs_e8m0,
            )  # fmt: skip
            spec = chosen(problem, device, kernel)
        self.spec = spec = as_set(spec)

        # One row's stride is never walked, and torch may report any value for it.
        x_row_bytes = x.stride(0) if m > 1 else k
        out_row_bytes = out.element_size() * (out.stride(0) if m > 1 else n)
        rows, last_rows = lhs_copy_rows(spec, m)
        last_x_map = x_map = TileMap("u8", columns=k, rows=m, row_bytes=x_row_bytes, box=(128, last_rows))
        if m > spec.block_m and rows != last_rows:  # else the only tile is the last one too
            x_map = TileMap("u8", columns=k, rows=m, row_bytes=x_row_bytes, box=(128, rows))
        out_box = 128 // out.element_size(), slice_tokens(spec)
        out_map = TileMap(spec.out, columns=n, rows=m, row_bytes=out_row_bytes, box=out_box)
        loaded = KERNELS.load(spec, x.get_device())
        super().__init__(
            loaded,
            ARGUMENTS,
            values_of(operands, rows=m, x_row_bytes=x_row_bytes, last_rows=last_rows),
            grid=grid_of(spec, loaded, units_of_work(spec, m, n), device),
            threads=(spec.threads, 1),
            smem_bytes=smem_bytes(spec),
            maps=((0, x_map), (0, last_x_map), (len(POINTERS) - 1, out_map)),
        )

    def launch(
        self, x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor | None, weight: AnyWeight,
        out: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Runs on the device of the operands (the fields of `Operands`), on its current stream.

        If the weight is settled, the kernel may start before the kernel before it ends. Raises as `Launch.run`.
        """
        blocks, channel_scale = weight.blocks, weight.channel_scale
        records = blocks.data_ptr()
        addresses = (
            x.data_ptr(),
            records,
            0 if channel_scale is None else channel_scale.data_ptr(),
            x_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if x_zero is None else x_zero.data_ptr(),
            0 if x_zero is None else weight.row_sum.data_ptr(),  # type: ignore[union-attr]
            out.data_ptr(),
            self.number,
        )
        settled_at = weight.settled_at
        # In this order: inference tensors, which are never settled, have no version to ask for.
        settled = settled_at is not None and settled_at == (records, blocks._version)
        if not self.run(addresses, settled):
            self.run(addresses, settled, Operands(x, x_scale, x_zero, weight, out, bias).tensors)


def chosen(problem: Problem, device: DeviceSpec, label: str | None) -> KernelSpec:
    """The kernel of this label, or the one that the selector takes."""
    return choose(problem, device) if label is None else kernel_named(label, problem, device)


def as_set(spec: KernelSpec) -> KernelSpec:
    """The kernel as settings have it."""
    return replace(spec, debug=True) if settings.debug() else spec


def grid_of(spec: KernelSpec, loaded: driver.LoadedKernel, units: int, device: DeviceSpec) -> int:
    """CTAs of a launch for so many units of work."""
    size, resident = spec.cluster_size, device.num_sms
    if size > 1:
        resident = driver.resident_clusters(loaded, size, spec.threads, smem_bytes(spec))
    return size * launched_clusters(spec, units, device.num_sms, resident)


def values_of(operands: Operands, *, rows: int, x_row_bytes: int, last_rows: int) -> dict[str, int]:
    """The values of VALUES."""
    weight, bias, group = operands.weight, operands.bias, operands.lhs_group
    scale_stride = operands.x_scale.stride(-2) if group else _per_token_stride(operands.x_scale)
    return {
        "lhs_stride": x_row_bytes,
        "lhs_scale_stride": scale_stride,
        "lhs_zero_stride": operands.x_scale.stride(-1) if group else _per_token_stride(operands.x_zero),
        "m": rows,
        "n": weight.n,
        "k": weight.k,
        "channel_scale_type": DTYPES[weight.format.scale_type].number,
        "bias_type": 0 if bias is None else DTYPES[TYPE_NAMES[bias.dtype]].number,
        "last_rows": last_rows,
    }


def _per_token_stride(tensor: torch.Tensor | None) -> int:
    """Elements between the values of consecutive tokens; 0 when one element serves all, or there is none."""
    return 0 if tensor is None or tensor.numel() == 1 else tensor.stride(0)
