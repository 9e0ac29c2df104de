"""Any CUDA kernel on the emulator: its arguments as people write them, and one run."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from emulator import launch
from jitgemm.jit.source import KernelSource

TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "f64": torch.float64,
    "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
FILLS = ("zeros", "ones", "arange", "random", "nan")
FORM = "NAME=TYPE:VALUE or NAME=TYPE[COUNT]:FILL, such as n=i32:100 or x=f32[100]:random"


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel.

    Attributes:
        name: for messages; the order of arguments decides which parameter it is.
        values: a tensor of no dimensions for a value, of one for a buffer that the kernel gets the address of.
    """

    name: str
    values: torch.Tensor

    @property
    def is_buffer(self) -> bool:
        return self.values.dim() == 1


def argument_of(text: str, seed: int = 1) -> Argument:
    """An argument as `FORM` says; without FILL a buffer is of zeros.

    Raises:
        ValueError: another form, type, count or fill.
    """
    parts = re.fullmatch(r"(\w+)=(\w+)(?:\[(\d+)\])?(?::(.+))?", text)
    if parts is None:
        raise ValueError(f"argument: expected {FORM}, got {text!r}")
    name, type_name, count, fill = parts.groups()
    if type_name not in TYPES:
        raise ValueError(f"{name}: expected a type of {', '.join(TYPES)}, got {type_name!r}")
    dtype = TYPES[type_name]
    if count is None:
        if fill is None:
            raise ValueError(f"{name}: expected a value, as in {name}={type_name}:1, or a count, got {text!r}")
        return Argument(name, torch.tensor(_number(name, fill, "a number")).to(dtype))
    if int(count) == 0:
        raise ValueError(f"{name}: expected a count of 1 or more, got 0")
    return Argument(name, _filled(name, int(count), fill or "zeros", seed).to(dtype))


def _filled(name: str, count: int, fill: str, seed: int) -> torch.Tensor:
    if fill == "arange":
        return torch.arange(count)
    if fill == "random":
        return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 4
    numbers = {"zeros": 0, "ones": 1, "nan": float("nan")}
    number = numbers[fill] if fill in numbers else _number(name, fill, f"one of {', '.join(FILLS)} or a number")
    return torch.full((count,), number)


def _number(name: str, text: str, expected: str) -> int | float:
    for kind in (lambda text: int(text, 0), float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError(f"{name}: expected {expected}, got {text!r}")


def load(source: str, headers: Mapping[str, str], name: str = "kernel.cu") -> launch.Kernel:
    """The one kernel of a CUDA source, built for sm_90a by NVRTC.

    Args:
        headers: name, as included, to text.

    Raises:
        CompileError: NVRTC is missing or does not compile it.
        Fault: its PTX has what the emulator does not know.
        ValueError: no kernel in the source, or several.
    """
    kernel = KernelSource(name, {}, source, headers, ())
    found = re.findall(r"\.entry (\w+)", launch.to_ptx(kernel))
    if len(found) != 1:
        raise ValueError(f"{name}: expected one __global__ function, got {len(found)}: {', '.join(found) or 'none'}")
    return launch.Kernel(kernel)


def run(
    kernel: launch.Kernel,
    arguments: Sequence[Argument],
    grid: int,
    block: tuple[int, int],
    smem: int = 0,
    seed: int = 1,
) -> None:
    """Runs a kernel, which writes into the arguments' buffers. It may read and write nothing else.

    Args:
        block: threads along x and y, a multiple of 32 in all.
        smem: dynamic shared memory in bytes.
        seed: of the order in which warps take turns and copies arrive.

    Raises:
        Fault: what the emulator has against it.
        ValueError: the kernel has another number of parameters.
    """
    expected = kernel.assembled.parameters
    if len(arguments) != expected:
        raise ValueError(f"arguments: expected {expected}, as the kernel has parameters, got {len(arguments)}")
    cells = [torch.tensor(each.values.data_ptr()) if each.is_buffer else each.values for each in arguments]
    pointers = (ctypes.c_void_p * len(cells))(*(each.data_ptr() for each in cells))
    memory = [launch.extent(each.values) for each in arguments if each.is_buffer]
    kernel.run(ctypes.addressof(pointers), grid, block, smem, memory, seed)
