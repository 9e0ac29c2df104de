"""From checked tensors to a launch.

A plan is everything about a call that its shapes decide: kernel, grid, argument block, tensor maps. The hot path looks
the call's addresses up, finds the launch's parameters with them, and launches. A miss goes down the layers: choose,
render, cache or compile, load. Knows nothing of what arguments are legal; `arguments.py` has checked them.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import torch

from jitgemm import settings
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.arguments import (
    ALIGNMENT,
    CHANNEL_SCALE_ALIGNMENT,
    PackedWeight,
    byte_extent,
    check_addresses,
    per_token_stride,
)
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.render import KERNEL_NAME, kernel_source
from jitgemm.kernel.spec import KernelSpec, lhs_copy_rows, slice_tokens, smem_bytes
from jitgemm.runtime import driver
from jitgemm.runtime import kernels as loaded
from jitgemm.runtime.device import device_of
from jitgemm.select.choose import choose, grid_clusters
from jitgemm.tensors import TYPE_NAMES

_ARGUMENTS = struct.Struct("<10Q3I2iI")
"""`Args` in include/jitgemm/gemm/types.cuh: lhs, records, channel_scale, lhs_scale, bias, lhs_zero, row_sum, lhs_stride,
lhs_scale_stride, lhs_zero_stride, m, n, k, channel_scale_type, bias_type, last_rows."""

_ADDRESSES = struct.Struct("<7Q")
"""Those at its beginning, in the order of `Plan.launch`."""

MAX_KNOWN = 1024
"""Sets of addresses whose parameters a plan keeps: the layers of a model call with the same ones, step after step."""


def loaded_kernel(spec: KernelSpec, device: int) -> driver.LoadedKernel:
    """The kernel, ready to launch on the device; raises as `loaded.get_or_load`."""
    return loaded.get_or_load(
        spec,
        device,
        kernel_source,
        name=KERNEL_NAME,
        smem_bytes=smem_bytes(spec),
        call="the GEMM once with these shapes",
    )


class Plan:
    """A prepared call. Belongs to one thread."""

    __slots__ = (
        "spec", "_device", "_after_addresses", "_launch", "_x_maps", "_out_map", "_known", "_ends", "_out_end",
    )  # fmt: skip

    def __init__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: PackedWeight,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        spec: KernelSpec | None = None,
        *,
        x_zero: torch.Tensor | None = None,
        batch_invariant: bool = False,
    ):
        device = x.get_device()
        m, n, k = x.shape[0], weight.n, weight.k
        figures = device_of(device)
        if spec is None:
            problem = Problem(m, n, k, TYPE_NAMES[x.dtype], weight.format, TYPE_NAMES[out.dtype], batch_invariant)
            spec = choose(problem, figures)
        if settings.debug():
            spec = replace(spec, debug=True)
        self.spec = spec
        kernel = loaded_kernel(spec, device)

        scale_type = DTYPES[weight.format.scale_type].number
        bias_type = 0 if bias is None else DTYPES[TYPE_NAMES[bias.dtype]].number
        # One row's stride is never walked, and torch may report any value for it.
        x_bytes = x.stride(0) if m > 1 else k
        out_bytes = out.element_size() * (out.stride(0) if m > 1 else n)
        strides = x_bytes, per_token_stride(x_scale), per_token_stride(x_zero)
        whole_rows, last_rows = lhs_copy_rows(spec, m)
        arguments = _ARGUMENTS.pack(*[0] * 7, *strides, m, n, k, scale_type, bias_type, last_rows)
        self._after_addresses = arguments[_ADDRESSES.size :]
        _, clusters = grid_clusters(spec, m, n, figures.num_sms)
        self._launch = driver.Launch(
            kernel,
            grid=clusters * spec.cluster_size,
            block=(spec.threads, 1),
            smem_bytes=smem_bytes(spec),
        )
        self._x_maps = [
            driver.TileMap("u8", columns=k, rows=m, row_bytes=x_bytes, box=(128, rows))
            # A single tile is the last one too.
            for rows in ((last_rows,) if m <= spec.block_m or last_rows == whole_rows else (whole_rows, last_rows))
        ]
        box = (128 // out.element_size(), slice_tokens(spec))
        self._out_map = driver.TileMap(spec.out, columns=n, rows=m, row_bytes=out_bytes, box=box)
        self._device = device
        self._known: dict[tuple[int, ...], driver.Parameters] = {}
        self._out_end = byte_extent(out)
        row_sum = None if x_zero is None else weight.row_sum
        inputs = (x, weight.blocks, weight.channel_scale, x_scale, bias, x_zero, row_sum)
        self._ends = tuple(0 if tensor is None else byte_extent(tensor) for tensor in inputs)

    def launch(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: PackedWeight,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        dependent: bool,
        x_zero: torch.Tensor | None = None,
    ) -> None:
        """Runs on the tensors' device and its current stream.

        Args:
            x, x_scale, weight, out, bias, x_zero: tensors of the shapes, strides, dtypes and device that the plan was
                made for.
            dependent: nothing that may still be running writes the weight, so the kernel may start before its
                predecessor ends.

        Raises:
            ValueError: a tensor is misaligned, or out overlaps an input.
        """
        channel_scale = weight.channel_scale
        addresses = (
            x.data_ptr(),
            weight.blocks.data_ptr(),
            0 if channel_scale is None else channel_scale.data_ptr(),
            x_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if x_zero is None else x_zero.data_ptr(),
            0 if x_zero is None else weight.row_sum.data_ptr(),
            out.data_ptr(),
        )
        device = self._device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                driver.use_context(device)
                return self.launch(x, x_scale, weight, out, bias, dependent, x_zero)
        driver.bind(device)
        parameters = self._known.get(addresses)
        if parameters is None:
            if not self._plainly_legal(addresses):
                check_addresses(x, x_scale, weight, out, bias, x_zero)
            parameters = self._parameters(addresses)
        self._launch.run(parameters, torch._C._cuda_getCurrentRawStream(device), dependent)

    def _parameters(self, addresses: tuple[int, ...]) -> driver.Parameters:
        """Kept for the next launch with these addresses. The device's context is current: tensor maps need it."""
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        x_maps = [tile_map.encode(addresses[0]) for tile_map in self._x_maps]
        maps = x_maps[0], x_maps[-1], self._out_map.encode(addresses[-1])
        arguments = _ADDRESSES.pack(*addresses[:-1]) + self._after_addresses
        parameters = self._known[addresses] = driver.Parameters(arguments, maps)
        return parameters

    def _plainly_legal(self, addresses: tuple[int, ...]) -> bool:
        """Aligned, and no input within the bytes that out spans; what fails this may still be legal."""
        x, records, channel_scale, *_, out = addresses
        if (x | records | out) % ALIGNMENT or channel_scale % CHANNEL_SCALE_ALIGNMENT:
            return False
        end = out + self._out_end
        for start, extent in zip(addresses, self._ends):
            if start < end and out < start + extent:
                return False
        return True
