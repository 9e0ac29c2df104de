"""jitgemm's launches on the CPU: the driver's part is machine.cpp, everything above it is what runs on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from emulator import ptx
from jitgemm.activations import plan as quantizers
from jitgemm.errors import CompileError
from jitgemm.gemm import launch as gemms
from jitgemm.jit.source import KernelSource
from jitgemm.moe import plan as moe
from jitgemm.runtime import device as devices
from jitgemm.runtime import driver, launch, loaded
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.select.devices import DEVICES

COMPILER = shutil.which("g++") or shutil.which("clang++")
_ELEMENT_BYTES = {"u8": 1, "bf16": 2, "fp16": 2, "fp32": 4, "s32": 4}
_MAGIC = 0x70616D656C6974


@functools.cache
def machine() -> ctypes.CDLL:
    """machine.cpp and its headers, compiled once a machine."""
    source = Path(__file__).with_name("machine.cpp")
    files = [source, *sorted(source.parent.glob("*.h"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"jitgemm-emulator-{os.getuid()}-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / library.name
            subprocess.run(
                [COMPILER, "-std=c++17", "-O2", "-shared", "-fPIC", str(source), "-o", str(built)], check=True
            )
            shutil.copy(built, f"{library}.{os.getpid()}")
            os.replace(f"{library}.{os.getpid()}", library)
    loaded = ctypes.CDLL(str(library))
    loaded.emulator_load.restype = loaded.emulator_error.restype = ctypes.c_char_p
    loaded.emulator_load.restype = ctypes.c_void_p
    loaded.emulator_free.argtypes = [ctypes.c_void_p]
    loaded.emulator_run.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint32] * 4, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32,
        ctypes.c_uint64,
    ]  # fmt: skip
    return loaded


def to_ptx(kernel: KernelSource) -> str:
    """The kernel's PTX, of the same NVRTC that makes its cubin; raises CompileError."""
    from cuda.bindings import nvrtc

    names, texts = [name.encode() for name in kernel.headers], [text.encode() for text in kernel.headers.values()]
    program = nvrtc.nvrtcCreateProgram(kernel.source.encode(), b"kernel.cu", len(names), texts, names)[1]
    options = [b"-arch=compute_90a", b"-std=c++17", b"-default-device"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = nvrtc.nvrtcGetProgramLogSize(program)[1]
    log = bytes(size)  # filled in place; an empty log's one byte is Python's only b"\0", and stays that
    nvrtc.nvrtcGetProgramLog(program, log)
    if int(code) != 0:
        text = log.decode().rstrip("\0")
        raise CompileError(f"{kernel.label}: NVRTC does not compile it:\n{text}", log=text)
    text = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


class Fault(AssertionError):
    """What the emulator has against a kernel, or does not know of its PTX."""


class Kernel:
    """A kernel that machine.cpp has loaded.

    Raises:
        Fault: its PTX has what the emulator does not know.
    """

    def __init__(self, source: KernelSource):
        self.label = source.label
        text = to_ptx(source)
        try:
            self.assembled = ptx.assemble(text)
        except ValueError as unknown:
            raise Fault(f"{self.label}: {unknown}") from unknown
        self.handle = machine().emulator_load(self.assembled.text.encode())
        if not self.handle:
            raise Fault(f"{self.label}: {machine().emulator_error().decode()}")

    def run(
        self, parameters: int, grid: int, block: tuple[int, int], smem: int, memory: list[tuple[int, int]], seed: int
    ) -> None:
        """parameters: address of the pointers to them; memory: (begin, end) of what may be read or written.

        Raises:
            Fault: with the instruction, its CTA, warp and lanes, or where every warp of a hanging kernel stands.
        """
        variables = [(ctypes.addressof(each), ctypes.addressof(each) + len(each)) for each in self.assembled.variables]
        flat = [address for each in (*memory, *variables) for address in each]
        ranges = (ctypes.c_uint64 * len(flat))(*flat)
        done = machine().emulator_run(
            self.handle, grid, *block, smem, parameters, self.assembled.parameters, ranges, len(flat) // 2, seed
        )
        if not done:
            raise Fault(f"{self.label}: {machine().emulator_error().decode()}")


def plant(monkeypatch: Any, header: str, old: str, new: str) -> None:
    """Kernels have this fault from here on: the header, such as "gemm/multiply", has new where old stands.

    Raises:
        ValueError: at the next launch, where the kernel does not include it or old does not stand in it once.
    """
    name, real = f"jitgemm/{header}.cuh", to_ptx

    def faulty(source: KernelSource) -> str:
        if name not in source.headers:
            raise ValueError(f"header: expected one of {', '.join(source.headers)}, got {name}")
        if source.headers[name].count(old) != 1:
            raise ValueError(
                f"old: expected what stands once in {name}, got {source.headers[name].count(old)} of {old!r}"
            )
        return real(replace(source, headers={**source.headers, name: source.headers[name].replace(old, new)}))

    monkeypatch.setattr("emulator.launch.to_ptx", faulty)
    monkeypatch.setattr("emulator.launch.kernels", {})


kernels: dict[Any, Kernel] = {}
"""By spec, for the whole process."""


class Emulator:
    """What runs in place of a GPU.

    Attributes:
        launched: labels of the kernels, in the order of their launches.
        seed: of the order in which warps run and copies arrive.
        others: tensors that kernels know the addresses of from memory.
    """

    def __init__(self, seed: int = 1):
        self.launched: list[str] = []
        self.seed = seed
        self.others: list[torch.Tensor] = []
        self.memory: list[tuple[int, int]] = []

    def launch(self, config: Any, kernel: Kernel, parameters: int, extra: int) -> tuple[Any]:
        """In place of cuLaunchKernelEx."""
        self.launched.append(kernel.label)
        block = config.blockDimX, config.blockDimY
        kernel.run(parameters, config.gridDimX, block, config.sharedMemBytes, self.memory, self.seed)
        return (driver.cu.CUresult.CUDA_SUCCESS,)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _encode(tile_map: driver.TileMap, address: int) -> bytes:
    """In place of cuTensorMapEncodeTiled: the struct TileMap of memory.h."""
    columns, rows = map(int, tile_map._extent)
    kind = tile_map._type.name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_")
    element = next(_ELEMENT_BYTES[name] for name, each in driver._ELEMENTS.items() if each == kind)
    values = _MAGIC, address, columns, rows, int(tile_map._strides[0]), element, *map(int, tile_map._box)
    return struct.pack("8Q", *values).ljust(128, b"\0")


def emulate(monkeypatch: Any, *, device: str = "h200", seed: int = 1) -> Emulator:
    """Calls on CPU tensors run the kernels from here on, as on a GPU."""
    emulator = Emulator(seed)

    def load(family: KernelFamily, spec: Any, index: int) -> driver.LoadedKernel:
        if spec not in kernels:
            kernels[spec] = Kernel(family.source(spec))
        return driver.LoadedKernel(kernels[spec], None, index)

    real_run = launch.Launch.run

    def run(self: Any, addresses: Any, dependent: bool, tensors: Any = None) -> bool:
        if tensors is None:  # to see every launch's tensors
            return False
        emulator.memory = [extent(each) for each in (*tensors, *emulator.others) if each is not None]
        return real_run(self, addresses, dependent, tensors)

    # Launches that are made ready here run nowhere else.
    monkeypatch.setattr(launch.this_thread, "cache", launch.LaunchCache())
    monkeypatch.setattr(driver.cu, "cuLaunchKernelEx", emulator.launch)
    monkeypatch.setattr(driver, "use_context", lambda device: None)
    monkeypatch.setattr(driver, "resident_ctas", lambda *_: 2)
    monkeypatch.setattr(driver, "resident_clusters", lambda kernel, size, *_: 132 // size)
    monkeypatch.setattr(driver.TileMap, "encode", _encode)
    monkeypatch.setattr(KernelFamily, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(launch.Launch, "run", run)
    for module in (devices, gemms, loaded, quantizers, moe):
        monkeypatch.setattr(module, "device_of", lambda index: DEVICES[device])
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)  # hides the base class' own
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(synchronize=lambda: None))
    return emulator
