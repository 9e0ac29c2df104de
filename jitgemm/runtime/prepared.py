"""A launch of which everything but the addresses is made beforehand, for GEMMs and quantisers alike.

Knows addresses, fields and sizes; nothing of what a kernel computes. Imported only when something runs on a GPU.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import torch

from jitgemm.runtime import driver, plans
from jitgemm.runtime.checks import Pointer, check_addresses

# PyTorch's own functions, where it has them, take a third of the public ones' time.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream)


class ArgumentBlock:
    """The struct that a kernel takes its arguments in: addresses, then values.

    Args:
        pointers: what a launch has addresses of; those with a field come first, in the order of the struct.
        values: name -> `struct` code of the fields after them, in the order of the struct.
    """

    def __init__(self, pointers: Sequence[Pointer], **values: str):
        self.pointers = tuple(pointers)
        self.fields = {pointer.field: "Q" for pointer in pointers if pointer.field is not None} | values
        self._names = tuple(values)
        self._values = struct.Struct("<" + "".join(values.values()))
        self._addresses = struct.Struct("<" + "Q" * (len(self.fields) - len(values)))

    @property
    def nbytes(self) -> int:
        """Bytes of the struct."""
        return self._addresses.size + self._values.size

    def pack_values(self, values: dict[str, float]) -> bytes:
        """The end of the struct, from the first value on."""
        return self._values.pack(*(values[name] for name in self._names))

    def pack(self, addresses: Sequence[int], values: bytes) -> bytes:
        """The struct; addresses in the order of `pointers`."""
        return self._addresses.pack(*addresses[: self._addresses.size // 8]) + values


_numbers = itertools.count()


class PreparedLaunch:
    """Everything about a launch that its shapes decide. Belongs to one thread.

    Args:
        kernel: what is launched, on the device it is loaded on.
        block: its argument block, and the values in it.
        grid, threads, smem_bytes: as for `driver.Launch`.
        maps: (number of a pointer, map over what it points to): tensor maps, the kernel's parameters before the block.

    Attributes:
        number: tells this launch's addresses from others' in the thread's memory; the last of a call's `addresses`.
    """

    __slots__ = ("number", "_block", "_device", "_launch", "_maps", "_remembered", "_values")

    def __init__(
        self,
        kernel: driver.LoadedKernel,
        block: ArgumentBlock,
        values: dict[str, float],
        *,
        grid: int,
        threads: tuple[int, int],
        smem_bytes: int,
        maps: Sequence[tuple[int, driver.TileMap]] = (),
    ):
        self.number = next(_numbers)
        self._launch = driver.Launch(kernel, grid=grid, block=threads, smem_bytes=smem_bytes)
        self._device = kernel.device
        self._block, self._values, self._maps = block, block.pack_values(values), maps
        self._remembered = plans.thread.memory.values

    def run(self, addresses: tuple[int, ...], dependent: bool) -> bool:
        """Launches on the current stream of the kernel's device, if `prepare` has seen these addresses.

        Args:
            addresses: of the block's pointers, in their order, 0 for what the call does without; and then `number`.
            dependent: the kernel may start before the kernel before it ends.

        Returns:
            Whether it did.
        """
        device = self._device
        if _current_device() != device:
            with torch.cuda.device(device):
                driver.use_context(device)
                return self.run(addresses, dependent)
        if driver.bound.device != device:
            driver.bind(device)
        parameters = self._remembered.get(addresses)
        if parameters is None:
            return False
        self._remembered.move_to_end(addresses)
        self._launch.run(parameters, _current_stream(device), dependent)
        return True

    def prepare(self, addresses: tuple[int, ...], tensors: Sequence[torch.Tensor | None]) -> None:
        """Checks the tensors at these addresses, and remembers what `run` needs.

        Raises:
            ValueError: a tensor is misaligned, or one that is written overlaps another.
        """
        check_addresses(self._block.pointers, tensors)
        with torch.cuda.device(self._device):
            driver.use_context(self._device)  # tensor maps need one
            maps = [tile_map.encode(addresses[i]) for i, tile_map in self._maps]
        parameters = driver.Parameters(self._block.pack(addresses, self._values), maps)
        plans.thread.memory.add(addresses, parameters)
