"""The CUDA driver as jitgemm uses it: load a cubin, encode a tensor map, build and issue a launch.

Every return code is checked. Knows bytes, addresses and integers; knows no tensors. Importing this needs no bindings of
CUDA: without them every use of the driver raises DriverError.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from jitgemm.errors import DriverError, UnsupportedDeviceError
from jitgemm.jit.nvrtc import INSTALL, INSTALL_ONE


class _Missing:
    """Stands for CUDA's bindings where they cannot be imported."""

    def __init__(self, error: ImportError):
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        what = f"calls on a GPU need CUDA's bindings for Python, and they cannot be imported ({self._error})"
        raise DriverError(f"{what}: {INSTALL_ONE}", code="") from self._error


cu: Any
_SUCCESS: Any
try:
    from cuda.bindings import driver as cu  # type: ignore[no-redef]

    _SUCCESS = cu.CUresult.CUDA_SUCCESS
except ImportError as error:
    cu, _SUCCESS = _Missing(error), None


def check(result: tuple, what: str) -> Any:
    """The value of a driver call's result tuple, or DriverError with the code's name and the driver's own words."""
    code = result[0]
    if code != _SUCCESS:
        name = getattr(code, "name", str(code))
        error, text = cu.cuGetErrorString(code)
        words = f": {text.decode()}" if error == _SUCCESS and text else ""
        raise DriverError(f"{what} failed with {name}{words}", code=name)
    return result[1] if len(result) == 2 else result[2:] if len(result) > 2 else None


def driver_version() -> tuple[int, int]:
    """Version of CUDA that the installed driver supports, such as (12, 8)."""
    version = int(check(cu.cuDriverGetVersion(), "cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


# ---- contexts --------------------------------------------------------------------------------------------------------


class _Bound(threading.local):
    device: int | None = None


bound = _Bound()
"""`bound.device`: whose context this thread made current last, by `bind`."""
_primary: dict[int, object] = {}
_primary_lock = threading.Lock()


def bind(device: int) -> None:
    """Makes the device's primary context, which PyTorch uses too, this thread's current one."""
    if bound.device != device:
        use_context(device)
        bound.device = device


def use_context(device: int) -> None:
    """`bind` without the short cut: for callers that know the current context to be another."""
    with _primary_lock:
        if device not in _primary:
            check(cu.cuInit(0), "cuInit")
            handle = check(cu.cuDeviceGet(device), "cuDeviceGet")
            # Held to the end of the process, as PyTorch holds it.
            _primary[device] = check(cu.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
    check(cu.cuCtxSetCurrent(_primary[device]), "cuCtxSetCurrent")


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedKernel:
    """A function in a device's primary context; `module` keeps it loaded."""

    function: object
    module: object
    device: int


def check_nvrtc_against_driver(nvrtc: tuple[int, int]) -> None:
    """Raises UnsupportedDeviceError for an NVRTC of a major version whose cubins the driver cannot load.

    Within a major version CUDA's minor-version compatibility applies to cubins.
    """
    have = driver_version()
    if nvrtc[0] > have[0]:
        what = "NVRTC {}.{} builds kernels that this driver (CUDA {}.{}) cannot load".format(*nvrtc, *have)
        instead = f": {INSTALL[have[0]]}" if have[0] in INSTALL else ""
        raise UnsupportedDeviceError(f"{what}. Update the driver, or install CUDA {have[0]}'s NVRTC instead{instead}")


def load_kernel(cubin: bytes, name: str, *, device: int, smem_bytes: int) -> LoadedKernel:
    """Loads a cubin into the device's primary context and raises the function's shared-memory limit."""
    bind(device)
    module = check(cu.cuModuleLoadData(cubin), "cuModuleLoadData")
    function = check(cu.cuModuleGetFunction(module, name.encode()), f"cuModuleGetFunction({name})")
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    result = cu.cuFuncSetAttribute(function, attribute, smem_bytes)
    check(result, f"cuFuncSetAttribute(dynamic shared memory = {smem_bytes})")
    return LoadedKernel(function, module, device)


def device_attribute(device: int, name: str) -> int:
    """A figure that the driver reports of a device, such as "CLOCK_RATE" (kHz)."""
    check(cu.cuInit(0), "cuInit")
    handle = check(cu.cuDeviceGet(device), "cuDeviceGet")
    attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(cu.cuDeviceGetAttribute(attribute, handle), f"cuDeviceGetAttribute({name})"))


def resident_clusters(kernel: LoadedKernel, size: int, threads: int, smem_bytes: int) -> int:
    """Clusters of the kernel that its device holds at once; the kernel says of how many CTAs they are."""
    bind(kernel.device)
    result = cu.cuOccupancyMaxActiveClusters(kernel.function, _config(size, (threads, 1), smem_bytes))
    return int(check(result, "cuOccupancyMaxActiveClusters"))


def resident_ctas(kernel: LoadedKernel, threads: int, smem_bytes: int) -> int:
    """CTAs of the kernel that an SM holds at once. The kernel's device is current."""
    result = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, threads, smem_bytes)
    return int(check(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor"))


# ---- tensor maps -----------------------------------------------------------------------------------------------------

_ELEMENTS = {"u8": "UINT8", "bf16": "BFLOAT16", "fp16": "FLOAT16", "fp32": "FLOAT32", "s32": "INT32"}
"""By type, how the driver calls it."""


@cache
def _modes() -> tuple[Any, ...]:
    """Strides of elements, and what else all maps have in common."""
    return (
        [cu.cuuint32_t(1), cu.cuuint32_t(1)],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


class TileMap:
    """Encodes tensor maps of one two-dimensional shape; only the address changes from call to call.

    Args:
        element: "u8", "bf16", "fp16", "fp32" or "s32".
        columns, rows: extent in elements, columns contiguous.
        row_bytes: distance between rows, a multiple of 16.
        box: (columns, rows) of a tile; a tile row is 128 bytes, swizzled.
    """

    __slots__ = ("_type", "_extent", "_strides", "_box", "_modes")

    def __init__(self, element: str, *, columns: int, rows: int, row_bytes: int, box: tuple[int, int]):
        self._type = getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_ELEMENTS[element]}")
        self._extent = [cu.cuuint64_t(columns), cu.cuuint64_t(rows)]
        self._strides = [cu.cuuint64_t(row_bytes)]
        self._box = [cu.cuuint32_t(box[0]), cu.cuuint32_t(box[1])]
        self._modes = _modes()

    def encode(self, address: int) -> bytes:
        """The 128 bytes of the map for a tensor at `address`, 16-byte aligned."""
        result = cu.cuTensorMapEncodeTiled(self._type, 2, address, self._extent, self._strides, self._box, *self._modes)
        if result[0] != _SUCCESS:
            check(result, "cuTensorMapEncodeTiled")
        return ctypes.string_at(result[1].getPtr(), 128)


# ---- launches --------------------------------------------------------------------------------------------------------


_PARAMETERS_OVERHEAD = 800
"""Bytes of the Python objects around a launch's parameters, the addresses that they are found by among them
(tests/runtime/test_launch_cache.py)."""


class Parameters:
    """A kernel's parameters as a launch reads them: tensor maps, then one argument block, the last parameter::

        address
        | pointer to each parameter | maps | block |

    Args:
        arguments: the argument block.
        maps: the tensor maps before it.

    Attributes:
        address: of the pointers.
        nbytes: bytes of host memory that this holds, with the addresses that it is found by.
    """

    __slots__ = ("address", "nbytes", "_buffer")

    def __init__(self, arguments: bytes, maps: Sequence[bytes] = ()):
        parameters = *maps, arguments
        head = 8 * len(parameters)
        contents = bytes(head) + b"".join(parameters)
        self._buffer = (ctypes.c_char * len(contents)).from_buffer_copy(contents)
        self.address = ctypes.addressof(self._buffer)
        starts = itertools.accumulate(map(len, parameters[:-1]), initial=self.address + head)
        struct.pack_into(f"{len(parameters)}Q", self._buffer, 0, *starts)
        self.nbytes = len(self._buffer) + _PARAMETERS_OVERHEAD


def _config(grid: int, block: tuple[int, int], smem_bytes: int, *attributes: object) -> Any:
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = *block, 1
    config.sharedMemBytes = smem_bytes
    config.attrs, config.numAttrs = list(attributes), len(attributes)
    return config


class LaunchConfig:
    """A kernel with its grid and attributes, which are built once.

    Not thread-safe: each thread has its own.

    Args:
        kernel: what is launched.
        grid: CTAs.
        block: threads of a CTA along x and y.
        smem_bytes: dynamic shared memory of a CTA.
    """

    __slots__ = ("_config", "_plain", "_kernel", "_module", "_stream")

    def __init__(self, kernel: LoadedKernel, *, grid: int, block: tuple[int, int], smem_bytes: int):
        self._kernel = kernel.function
        self._module = kernel.module
        dependent = cu.CUlaunchAttribute()
        dependent.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        self._config = _config(grid, block, smem_bytes, dependent)
        self._plain = _config(grid, block, smem_bytes)
        self._stream = -1

    def run(self, parameters: Parameters, stream: int, dependent: bool) -> None:
        """Launches on a stream handle. The parameters are copied: they may go or change as soon as this returns.

        `dependent`: may start while the kernel before it still runs (programmatic dependent launch).
        """
        if stream != self._stream:
            self._config.hStream = stream
            self._plain.hStream = stream
            self._stream = stream
        config = self._config if dependent else self._plain
        (code,) = cu.cuLaunchKernelEx(config, self._kernel, parameters.address, 0)
        if code != _SUCCESS:
            check((code,), "cuLaunchKernelEx")
