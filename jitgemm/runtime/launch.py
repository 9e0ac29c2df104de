"""A call's one way to the GPU: its operands and the checks of their addresses, a launch prepared except for these, and
what a thread remembers: plans by what decides them, launch parameters by addresses.

Knows addresses, fields and sizes; nothing of what a kernel computes. The CUDA driver is imported with the first launch
that is made, so that importing jitgemm touches none.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from jitgemm.runtime.torch_private import TensorGuards, current_device, current_stream
from jitgemm.tensors import check_device, check_no_grad

if TYPE_CHECKING:
    from jitgemm.runtime import driver


class Pointer(NamedTuple):
    """An operand of a call: an address that a launch takes.

    Attributes:
        field: its name in the kernel's argument block; None for one that is not in it.
        argument: the caller's name of the tensor there.
        alignment: on a GPU the address is a multiple of so many bytes.
        written: the call writes there; other operands are read.
        in_place: arguments that the tensor may be itself, not only a part of: of its shape, type and columns' stride.
    """

    field: str | None
    argument: str
    alignment: int = 1
    written: bool = False
    in_place: tuple[str, ...] = ()


Operands = Sequence[torch.Tensor | None]
"""What a call's pointers point to, in their order; None for what it does without."""


class Call(Protocol):
    """A call's arguments, as `run_prepared` asks them.

    Attributes:
        pointers: what its launch has addresses of.
        empty: there is nothing to do. Asked of checked arguments.
        check: raises TypeError or ValueError unless the arguments fit together; here the caller sees to that.
        operands: gives the tensors, in the order of `pointers`, including tensors that the call makes.
        run_reference: does on the CPU what the kernel does; here tensors there take another way.
        prepare: makes the launch, while the operands' device is the current one.
    """

    __slots__ = ()

    @property
    def pointers(self) -> Sequence[Pointer]: ...
    def operands(self) -> Operands: ...
    def prepare(self, operands: Operands) -> Launch: ...

    @property
    def empty(self) -> bool:
        return False

    def check(self) -> None:
        return None

    def run_reference(self, operands: Operands) -> None:
        raise AssertionError(f"{type(self).__name__}: expected tensors on a GPU")


def run_prepared(key: Hashable, layouts: Sequence[torch.Tensor], call: Call) -> Operands:
    """Runs a call, and remembers its launch for calls like it; what it did not launch before it checks.

    Args:
        key: what decides legality and launch, except the layouts. Other calls have other keys.
        layouts: the tensors whose layouts decide, too; the first of them is on the call's device.

    Returns:
        The call's operands, with its results.
    """
    launch = this_thread.cache.find_plan(key, layouts)
    if launch is None:
        call.check()
    operands = call.operands()
    if launch is None:
        launch = prepare(key, layouts, call, operands)
    if launch is not None:
        launch.run_tensors(*operands)
    return operands


def prepare(key: Hashable, layouts: Sequence[torch.Tensor], call: Call, operands: Operands) -> Launch | None:
    """The launch of a checked call, remembered; None for one that needs none, which is done then."""
    if call.empty:
        return None
    check_addresses(call.pointers, operands)
    if not layouts[0].is_cuda:
        with torch.no_grad():  # as the kernels
            call.run_reference(operands)
        return None
    with torch.cuda.device(layouts[0].device):
        launch = call.prepare(operands)
    this_thread.cache.add_plan(key, layouts, launch)
    return launch


def check_once(key: Hashable, layouts: Sequence[torch.Tensor], check: Callable[[], None]) -> None:
    """Checks a call of several launches, unless this thread has checked one of this key and these layouts."""
    if this_thread.cache.find_plan(key, layouts) is None:
        check()
        this_thread.cache.add_plan(key, layouts, True)


# ---- operands and their addresses ------------------------------------------------------------------------------------


def check_addresses(pointers: Sequence[Pointer], tensors: Sequence[torch.Tensor | None]) -> None:
    """Raises ValueError for a misaligned CUDA tensor, or one that is written and overlaps another; TypeError for one
    without memory, such as a DTensor next to a plain x.

    Args:
        tensors: what the pointers point to, in their order; None for what the call does without.
    """
    spans = []
    for pointer, tensor in zip(pointers, tensors):
        if tensor is None:
            continue
        start = address_of(tensor) or 0
        if start == 0 and tensor.numel() > 0:
            class_name = type(tensor).__name__
            raise TypeError(f"{pointer.argument}: expected a tensor with memory of its own, got a {class_name} without")
        if start % pointer.alignment and tensor.is_cuda:
            multiple, past = f"a multiple of {pointer.alignment} bytes", start % pointer.alignment
            raise ValueError(
                f"{pointer.argument}: expected an address that is {multiple}, got one that is {past} bytes past it"
            )
        spans.append((pointer, tensor, start, start + byte_extent(tensor)))
    for i, (pointer, tensor, start, end) in enumerate(spans):
        for j, (other, other_tensor, other_start, other_end) in enumerate(spans if pointer.written else ()):
            apart = end <= other_start or other_end <= start or i == j or (other.written and j > i)
            apart = apart or (other.argument in pointer.in_place and (start, end) == (other_start, other_end))
            if not apart and _share_a_byte(tensor, other_tensor):
                got = f"a tensor that overlaps {other.argument}"
                raise ValueError(f"{pointer.argument}: expected memory of its own, got {got}")


def check_places(
    pointers: Sequence[Pointer], tensors: Sequence[torch.Tensor | None], where: str, device: torch.device
) -> None:
    """Raises ValueError unless all tensors are on the device of the argument `where` and none expects a gradient."""
    for pointer, tensor in zip(pointers, tensors, strict=True):
        if tensor is not None:
            name = pointer.argument.partition(".")[0]
            check_device(name, tensor, where, device)
            check_no_grad(name, tensor)


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Where the tensor is, 0 for one that is nowhere, None for None."""
    try:
        return None if tensor is None else tensor.data_ptr()
    except RuntimeError:  # of a fake tensor
        return 0


def byte_extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


def _share_a_byte(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of tensors whose extents cross. Column slices of one matrix interleave without sharing any."""
    if b.dim() == 1:
        b = b[:, None]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] < 2 or b.shape[0] < 2:
        return True
    pitch = a.stride(0) * a.element_size()
    if pitch != b.stride(0) * b.element_size():
        return True
    # Rows of the same pitch: they meet only if their windows within the pitch do, wrapping around it.
    offset = (b.data_ptr() - a.data_ptr()) % pitch
    return offset < byte_extent(a[0]) or offset + byte_extent(b[0]) > pitch


# ---- launches --------------------------------------------------------------------------------------------------------


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

    def pack(self, addresses: Sequence[int], values: Mapping[str, float | None]) -> bytes:
        """The struct; addresses in the order of `pointers`."""
        count = len(self.fields) - len(self._names)
        return self._struct.pack(*addresses[:count], *(values[name] for name in self._names))


_numbers = itertools.count()


class Launch:
    """Everything about a launch that its shapes decide. Belongs to one thread.

    Args:
        kernel: what is launched, on the device it is loaded on.
        block, values: its argument block, and what the block holds besides addresses.
        grid, threads, smem_bytes: as for `driver.LaunchConfig`.
        maps: (number of a pointer, map over what it points to): tensor maps, the kernel's parameters before the block.

    Attributes:
        number: tells this launch's addresses from others' in the launch cache.
    """

    __slots__ = ("number", "_block", "_bound", "_device", "_driver", "_launch", "_maps", "_remembered", "_values")

    def __init__(
        self, kernel: driver.LoadedKernel, block: ArgumentBlock, values: Mapping[str, float | None], *, grid: int,
        threads: tuple[int, int], smem_bytes: int, maps: Sequence[tuple[int, driver.TileMap]] = (),
    ):  # fmt: skip
        from jitgemm.runtime import driver

        self.number = next(_numbers)
        self._launch = driver.LaunchConfig(kernel, grid=grid, block=threads, smem_bytes=smem_bytes)
        self._device, self._block, self._values, self._maps = kernel.device, block, values, maps
        self._driver, self._bound, self._remembered = driver, driver.bound, this_thread.cache.parameters.values

    def run(self, key: tuple[int, ...], dependent: bool, tensors: Operands | None = None) -> bool:
        """Launches on the current stream of the kernel's device; says whether it did.

        Args:
            key: the addresses of a call's tensors, 0 where it does without, in an order of its own, and `number`.
            dependent: the kernel may start before the kernel before it ends.
            tensors: what the block's pointers point to, in their order. New addresses are not launched without them,
                and raise ValueError where a tensor is misaligned, or one that is written overlaps another.
        """
        device = self._device
        if current_device() != device:
            with torch.cuda.device(device):
                self._driver.use_context(device)
                return self.run(key, dependent, tensors)
        if self._bound.device != device:
            self._driver.bind(device)
        parameters = self._remembered.get(key)
        if parameters is not None:
            self._remembered.move_to_end(key)
        elif tensors is None:
            return False
        else:
            check_addresses(self._block.pointers, tensors)
            addresses = [address_of(tensor) or 0 for tensor in tensors]
            # The device's context is current: tensor maps need it.
            encoded = {tile_map: tile_map.encode(addresses[i]) for i, tile_map in self._maps}
            maps = [encoded[tile_map] for _, tile_map in self._maps]
            parameters = self._driver.Parameters(self._block.pack(addresses, self._values), maps)
            this_thread.cache.parameters.add(key, parameters)
        self._launch.run(parameters, current_stream(device), dependent)
        return True

    def run_tensors(self, *tensors: torch.Tensor | None) -> None:
        """Launches with the tensors, in the block's order; it may start before the kernel before it ends."""
        # In all calls of a launch the same ones are None.
        key = (*[tensor.data_ptr() for tensor in tensors if tensor is not None], self.number)
        if not self.run(key, True):
            self.run(key, True, tensors)


# ---- what a thread remembers -----------------------------------------------------------------------------------------

MAX_PLAN_BYTES, MAX_PARAMETER_BYTES = 12 << 20, 20 << 20
"""Host memory that a thread's calls may hold on to: 3,000 plans, for example, with 5 sets of addresses each."""
PLAN_BYTES = 4 << 10
"""What a plan counts as; it holds 3.3 to 3.6 KiB, and the parameters of a GEMM for one set of addresses 1.3 KiB
(tests/runtime/test_launch_cache.py)."""
MAX_PLANS_PER_KEY = 32
"""Plans of one key: for other strides, other output types, with and without inference mode."""


class Recent:
    """Values by key, within so many bytes: what was found least lately goes first.

    Whoever finds one of `values`, which say in `nbytes` how much they hold, moves it to the end.
    """

    def __init__(self, most_bytes: int) -> None:
        self.values: OrderedDict[Hashable, Any] = OrderedDict()
        self.nbytes, self.most_bytes = 0, most_bytes

    def add(self, key: Hashable, value: Any) -> None:
        """Remembers the value instead of the key's last one, and forgets others while there are too many bytes."""
        last = self.values.pop(key, None)
        self.nbytes += value.nbytes - (0 if last is None else last.nbytes)
        self.values[key] = value
        while self.nbytes > self.most_bytes:
            self.nbytes -= self.values.popitem(last=False)[1].nbytes


class LaunchCache:
    """What a thread knows of calls: `plans` of a key, each with the check of its tensors, and launch `parameters`."""

    def __init__(self) -> None:
        self.plans, self.parameters = Recent(MAX_PLAN_BYTES), Recent(MAX_PARAMETER_BYTES)
        self._plans = self.plans.values

    def find_plan(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> Any:
        """The plan of this key and of tensors of these layouts, or None; also for what cannot be a key."""
        try:
            for fits, plan in self._plans.get(key, ()):
                if fits(*tensors):
                    self._plans.move_to_end(key)
                    return plan
        except TypeError:  # nothing that can be hashed: the caller's checks say what
            pass
        return None

    def add_plan(self, key: Hashable, tensors: Sequence[torch.Tensor], plan: Any) -> None:
        """For the next call with this key and such tensors. A key has as many tensors whenever it comes."""
        others = self._plans.get(key, ())[-MAX_PLANS_PER_KEY + 1 :]
        self.plans.add(key, _Plans((*others, (same_layout_check(*tensors), plan))))


class _Plans(tuple[tuple[Callable[..., bool], Any], ...]):
    __slots__ = ()

    @property
    def nbytes(self) -> int:
        return PLAN_BYTES * len(self)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.cache = LaunchCache()


this_thread = _Thread()
"""`this_thread.cache` is this thread's: a launch's stream is written in place, so threads do not share plans."""


def same_layout_check(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A check of as many other tensors: have they the same types, dtypes, devices, shapes and strides?

    Tensors that would be dispatched in another way are none such: negated lazily, made or met in inference mode. The
    check may say no where it need not (a tensor that comes twice); never yes where it must not.
    """
    if TensorGuards is not None:
        try:
            same = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            if same(*tensors):
                return same
        except Exception:  # another PyTorch's: whatever has changed, calls must not fail over it
            pass
    facts = [_facts(tensor) for tensor in tensors]
    return lambda *others: [_facts(other) for other in others] == facts


def _facts(tensor: Any) -> tuple[object, ...] | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    return (
        type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, tensor.stride(), tensor.is_neg(),
        tensor.is_inference(), torch.is_inference_mode_enabled(), tensor.requires_grad,
    )  # fmt: skip
