"""A thread's plans, and the one look-up of a hot call: by everything that decides legality and kernel.

Knows nothing of what a plan is. Imports torch alone, so that a call that hits touches no layer below.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

try:
    # All that is to be compared in one step, a fifth of the time. Not public: a torch without it must do, too.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

MAX_KEYS = 4096
"""Keys that a thread keeps; a plan is a few KiB of host memory."""
MAX_ALIKE = 32
"""Plans of one key: for other strides, other output types, with and without inference mode."""


class Plans(threading.local):
    """A thread's plans, by a hashable key and the tensors that each was made for.

    A launch's stream is written in place, so threads do not share plans.
    """

    def __init__(self) -> None:
        self.by_key: dict[tuple, list[tuple[Callable[..., bool], Any]]] = {}

    def find(self, key: tuple, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The plan kept for this key and for tensors like these (see `like`), or None."""
        for fits, plan in self.by_key.get(key, ()):
            if fits(*tensors):
                return plan
        return None

    def keep(self, key: tuple, tensors: tuple[torch.Tensor, ...], plan: Any) -> None:
        """For the next call with this key and such tensors; the oldest go where there are too many.

        A key has as many tensors whenever it comes.
        """
        plans = self.by_key.get(key)
        if plans is None:
            if len(self.by_key) >= MAX_KEYS:
                del self.by_key[next(iter(self.by_key))]
            plans = self.by_key[key] = []
        elif len(plans) >= MAX_ALIKE:
            del plans[0]
        plans.append((like(*tensors), plan))


def present(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Those that are not None."""
    return tuple(tensor for tensor in tensors if tensor is not None)


def like(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A check of as many other tensors: have they the same types, dtypes, devices, shapes and strides?

    Tensors that would be dispatched in another way are none such: negated lazily, made or met in inference mode. The
    check may refuse more than it must (a tensor that comes twice); never less.
    """
    if TensorGuards is not None:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    facts = [_facts(tensor) for tensor in tensors]
    return lambda *others: [_facts(other) for other in others] == facts


def _facts(tensor: Any) -> tuple | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), torch._C._dispatch_keys(tensor)
