"""A thread's cache of calls: plans by what decides them, launch parameters by addresses.

Knows nothing of what a plan is, so that a call that hits touches no layer below.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from jitgemm.runtime.torch_private import TensorGuards

MAX_PLAN_BYTES, MAX_PARAMETER_BYTES = 12 << 20, 20 << 20
"""Host memory that a thread's calls may hold on to: 3,000 plans, for example, with 5 sets of addresses each."""
PLAN_BYTES = 4 << 10
"""What a plan counts as; it holds 3.3 to 3.6 KiB, and the parameters of a GEMM for one set of addresses 1.3 KiB
(tests/test_launch_cache.py)."""
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
    """What a thread knows of calls: `plans` of a key, each with the check of the tensors that it is for, and launch
    `parameters` by addresses."""

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
            check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            if check(*tensors):
                return check
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
