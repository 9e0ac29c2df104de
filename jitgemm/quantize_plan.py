"""From a quantiser's checked arguments to a launch, as `plan.py` does for GEMMs.

A plan is everything about a call that its shapes decide; a launch writes addresses into it. Knows addresses and sizes,
not tensors; nothing of what arguments are legal.
"""

from __future__ import annotations

import ctypes
import struct
import threading

import torch
from cuda.bindings import driver as cu

from jitgemm import driver
from jitgemm.cache import KernelCache
from jitgemm.errors import CacheMissError
from jitgemm.nvrtc import nvrtc_info
from jitgemm.plan import device_of
from jitgemm.quantize_spec import KERNEL_NAME, MAX_PERMUTED_K, QuantizeSpec, block_dims, quantize_source, smem_bytes
from jitgemm.spec import ceil_div

_ARGUMENTS = struct.Struct("<10Q2IfI")
"""`QuantizeArgs` in include/jitgemm/quantize.cuh: x, q, scale, zero, given_scale, given_zero, norm_weight, permutation,
x_row_bytes, q_row_bytes, m, k, eps, norm_weight_type."""
_ADDRESSES = 8

_cache = KernelCache()
_loaded: dict[tuple[QuantizeSpec, int], driver.LoadedKernel] = {}
_load_lock = threading.Lock()


def loaded_quantizer(spec: QuantizeSpec, device: int) -> driver.LoadedKernel:
    """The kernel, ready to launch on the device: in memory, else from the cache, else compiled.

    Raises:
        CacheMissError: a CUDA graph is being captured, and loading would break the capture; or compiling is switched
            off.
    """
    kernel = _loaded.get((spec, device))
    if kernel is not None:
        return kernel
    if torch.cuda.is_current_stream_capturing():
        raise CacheMissError(
            f"kernel {spec.label} is not loaded, and loading it now would break the CUDA graph being captured: call "
            "quantize_activations once with these arguments before the capture"
        )
    # Before anything is compiled: a cubin that the driver cannot load is of no use.
    driver.check_nvrtc_against_driver(nvrtc_info().version)
    entry, _ = _cache.get_or_compile_source(quantize_source(spec))
    with _load_lock:
        kernel = _loaded.get((spec, device))
        if kernel is None:
            kernel = driver.load_kernel(
                entry.cubin,
                KERNEL_NAME,
                device=device,
                smem_bytes=MAX_PERMUTED_K if spec.permuted else 0,
                threads=block_dims(spec, 32)[0],
            )
            _loaded[spec, device] = kernel
    return kernel


class _Launch:
    """A prepared launch of a kernel whose one parameter is its argument block; always dependent, see `QuantizePlan`."""

    __slots__ = ("_config", "_kernel", "_parameters", "_address", "_keep", "_stream")

    def __init__(
        self, kernel: driver.LoadedKernel, grid: int, block: tuple[int, int], smem: int, arguments: ctypes.Array
    ):
        dependent = cu.CUlaunchAttribute()
        dependent.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = *block, 1
        config.sharedMemBytes = smem
        config.attrs = [dependent]
        config.numAttrs = 1
        self._config = config
        self._kernel = kernel.function
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._address = ctypes.addressof(self._parameters)
        self._keep = (arguments, kernel)
        self._stream = -1

    def run(self, stream: int) -> None:
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        (code,) = cu.cuLaunchKernelEx(self._config, self._kernel, self._address, 0)
        if code != cu.CUresult.CUDA_SUCCESS:
            driver.check((code,), "cuLaunchKernelEx")


class QuantizePlan:
    """A prepared call. Belongs to one thread; addresses are written in place before each launch.

    The kernel may start while its predecessor still runs: it reads and writes nothing before that has ended.
    """

    __slots__ = ("spec", "addresses", "_device", "_block", "_words", "_launch")

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
        self._block = ctypes.create_string_buffer(_ARGUMENTS.size)
        addresses = (0,) * _ADDRESSES
        _ARGUMENTS.pack_into(self._block, 0, *addresses, x_row_bytes, q_row_bytes, m, k, eps, norm_weight_type)
        self._words = (ctypes.c_uint64 * _ADDRESSES).from_buffer(self._block)

        threads, rows = block_dims(spec, k)
        smem = smem_bytes(spec, k)
        driver.use_context(device)
        resident = driver.check(
            cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, threads * rows, smem),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        )
        grid = min(ceil_div(m, rows), max(1, int(resident)) * figures.num_sms)
        self._launch = _Launch(kernel, grid, (threads, rows), smem, self._block)

    def launch(self, addresses: tuple[int, ...]) -> None:
        """Runs on the device's current stream; addresses in the order of `QuantizeArgs`, 0 for what is not there."""
        if addresses != self.addresses:
            self._words[:] = addresses
            self.addresses = addresses
        device = self._device
        if torch._C._cuda_getDevice() == device:
            driver.bind(device)
            self._launch.run(torch._C._cuda_getCurrentRawStream(device))
        else:
            with torch.cuda.device(device):
                driver.use_context(device)
                self._launch.run(torch._C._cuda_getCurrentRawStream(device))
