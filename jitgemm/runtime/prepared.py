"""A launch of which everything but the addresses is made beforehand, for GEMMs and quantisers alike.

Knows addresses, fields and sizes; nothing of what a kernel computes. Imported only when something runs on a GPU.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence

import torch

from jitgemm.runtime import driver
from jitgemm.runtime.checks import Pointer, check_addresses
from jitgemm.runtime.launch_cache import this_thread
from jitgemm.runtime.torch_private import current_device, current_stream


class ArgumentBlock:
    """The struct that a kernel takes its arguments in: addresses, then values.

    Args:
        pointers: what a launch has addresses of; those with a field come first, in the order of the struct.
        values: name -> `struct` code of the fields after them, in the order of the struct.
    """

    def __init__(self, pointers: Sequence[Pointer], **values: str):
        self.pointers, self._names = tuple(pointers), tuple(values)
        self.fields = {pointer.field: "Q" for pointer in pointers if pointer.field is not None} | values
        self._struct = struct.Struct("<" + "".join(self.fields.values()))

    def pack(self, addresses: Sequence[int], values: Mapping[str, float]) -> bytes:
        """The struct; addresses in the order of `pointers`, which may be followed by others."""
        count = len(self.fields) - len(self._names)
        return self._struct.pack(*addresses[:count], *(values[name] for name in self._names))


_numbers = itertools.count()


class PreparedLaunch:
    """Everything about a launch that its shapes decide. Belongs to one thread.

    Args:
        kernel: what is launched, on the device it is loaded on.
        block, values: its argument block, and what that holds beside addresses.
        grid, threads, smem_bytes: as for `driver.Launch`.
        maps: (number of a pointer, map over what it points to): tensor maps, the kernel's parameters before the block.

    Attributes:
        number: tells this launch's addresses from others' in the launch cache; the last of a call's `addresses`.
    """

    __slots__ = ("number", "_block", "_device", "_launch", "_maps", "_remembered", "_values")

    def __init__(
        self,
        kernel: driver.LoadedKernel,
        block: ArgumentBlock,
        values: Mapping[str, float],
        *,
        grid: int,
        threads: tuple[int, int],
        smem_bytes: int,
        maps: Sequence[tuple[int, driver.TileMap]] = (),
    ):
        self.number = next(_numbers)
        self._launch = driver.Launch(kernel, grid=grid, block=threads, smem_bytes=smem_bytes)
        self._device, self._block, self._values, self._maps = kernel.device, block, values, maps
        self._remembered = this_thread.cache.values

    def run(
        self, addresses: tuple[int, ...], dependent: bool, tensors: Sequence[torch.Tensor | None] | None = None
    ) -> bool:
        """Launches on the current stream of the kernel's device; says whether it did.

        Args:
            addresses: of the block's pointers, in their order, 0 where the call does without; and then `number`.
            dependent: the kernel may start before the kernel before it ends.
            tensors: what is at the addresses, None where nothing is. New addresses are not launched without them, and
                raise ValueError where a tensor is misaligned, or one that is written overlaps another.
        """
        device = self._device
        if current_device() != device:
            with torch.cuda.device(device):
                driver.use_context(device)
                return self.run(addresses, dependent, tensors)
        if driver.bound.device != device:
            driver.bind(device)
        parameters = self._remembered.get(addresses)
        if parameters is not None:
            self._remembered.move_to_end(addresses)
        elif tensors is None:
            return False
        else:
            check_addresses(self._block.pointers, tensors)
            # The device's context is current: tensor maps need it.
            encoded = {tile_map: tile_map.encode(addresses[i]) for i, tile_map in self._maps}
            maps = [encoded[tile_map] for _, tile_map in self._maps]
            parameters = driver.Parameters(self._block.pack(addresses, self._values), maps)
            this_thread.cache.add(addresses, parameters)
        self._launch.run(parameters, current_stream(device), dependent)
        return True

    def run_tensors(self, *tensors: torch.Tensor | None) -> None:
        """Launches with the tensors' addresses, in the block's order; it may start before the kernel before it ends."""
        addresses = (*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), self.number)
        if not self.run(addresses, True):
            self.run(addresses, True, tensors)
