"""From a quantiser's checked arguments to a launch, as `plan.py` does for GEMMs.

A plan is everything about a call that its shapes decide; a launch adds the addresses. Knows addresses and sizes,
not tensors; nothing of what arguments are legal.
"""

from __future__ import annotations

import struct

import torch

from jitgemm.activations.kernel import (
    KERNEL_NAME,
    MAX_PERMUTED_K,
    QuantizeSpec,
    block_dims,
    quantize_source,
    smem_bytes,
)
from jitgemm.kernel.formats import ceil_div
from jitgemm.runtime import driver
from jitgemm.runtime import kernels as loaded
from jitgemm.runtime.device import device_of

_ARGUMENTS = struct.Struct("<10Q2IfI")
"""`QuantizeArgs` in include/jitgemm/quantize.cuh: x, q, scale, zero, given_scale, given_zero, norm_weight, permutation,
x_row_bytes, q_row_bytes, m, k, eps, norm_weight_type."""
_ADDRESSES = struct.Struct("<8Q")
"""Those at its beginning."""


def loaded_quantizer(spec: QuantizeSpec, device: int) -> driver.LoadedKernel:
    """The kernel, ready to launch on the device; raises as `loaded.get_or_load`."""
    return loaded.get_or_load(
        spec,
        device,
        quantize_source,
        name=KERNEL_NAME,
        smem_bytes=MAX_PERMUTED_K if spec.permuted else 0,
        call="quantize_activations once with these arguments",
    )


class QuantizePlan:
    """A prepared call. Belongs to one thread.

    The kernel may start while its predecessor still runs: it reads and writes nothing before that has ended.
    """

    __slots__ = ("spec", "addresses", "_device", "_after_addresses", "_parameters", "_launch")

    def __init__(
        self,
        spec: QuantizeSpec,
        device: int,
        *,
        m: int,
        k: int,
        x_row_bytes: int,
        q_row_bytes: int,
        eps: float,
        norm_weight_type: int,
    ):
        self.spec = spec
        self._device = device
        self.addresses: tuple[int, ...] = ()
        """Of the last launch."""
        figures = device_of(device)
        kernel = loaded_quantizer(spec, device)
        arguments = _ARGUMENTS.pack(*[0] * 8, x_row_bytes, q_row_bytes, m, k, eps, norm_weight_type)
        self._after_addresses = arguments[_ADDRESSES.size :]

        threads, rows = block_dims(spec, k)
        smem = smem_bytes(spec, k)
        driver.use_context(device)
        resident = max(1, driver.resident_ctas(kernel, threads * rows, smem))
        grid = min(ceil_div(m, rows), resident * figures.num_sms)
        self._launch = driver.Launch(kernel, grid=grid, block=(threads, rows), smem_bytes=smem)

    def launch(self, addresses: tuple[int, ...]) -> None:
        """Runs on the device's current stream; addresses in the order of `QuantizeArgs`, 0 for what is not there."""
        if addresses != self.addresses:
            self._parameters = driver.Parameters(_ADDRESSES.pack(*addresses) + self._after_addresses)
            self.addresses = addresses
        device = self._device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                driver.use_context(device)
                return self.launch(addresses)
        driver.bind(device)
        self._launch.run(self._parameters, torch._C._cuda_getCurrentRawStream(device), True)
