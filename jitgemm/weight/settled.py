"""Which tensors hold a settled weight: what a `torch.library` op, which is given tensors alone, can know of its weight.

An op's tensor is settled if it is the very object that a `Weight` settled, still at that address and not written since,
by its version counter: the rule of an eager call, with its blind spots (see `Weight`). That is sound under a compiler. What it makes of a weight (a clone, a
view, a functionalised write, an input copied for a CUDA graph) is another object; and AOTAutograd moves the versions of
the inputs that a graph writes before the graph runs.
"""

from __future__ import annotations

import weakref

import torch

from jitgemm.tensors import PLAIN

SettledAt = tuple[int, int]
"""Address and version."""

_noted: dict[int, tuple[weakref.ref[torch.Tensor], SettledAt]] = {}
"""By `id`. An entry goes with its tensor: an address that another weight had says nothing."""


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured by a CUDA graph, so that nothing can be waited for."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def settle(blocks: torch.Tensor) -> SettledAt | None:
    """Waits for what the current stream still writes, and remembers where the records are settled now.

    None where nothing can be waited for or known: see `Weight.settle`.
    """
    settled_at = None
    real = type(blocks) in PLAIN and not blocks.is_inference()
    if real and not (blocks.is_cuda and capturing(blocks.device)):
        if blocks.is_cuda:
            torch.cuda.current_stream(blocks.device).synchronize()
        settled_at = (blocks.data_ptr(), blocks._version)
    note_settled(blocks, settled_at)
    return settled_at


def note_settled(blocks: torch.Tensor, settled_at: SettledAt | None) -> None:
    """Remembers where a weight's records were settled; None forgets it."""
    key = id(blocks)
    if settled_at is None:
        _noted.pop(key, None)
    else:
        forget = _noted.pop  # bound: at the interpreter's end a tensor may outlive this module's names
        _noted[key] = weakref.ref(blocks, lambda _: forget(key, None)), settled_at


def noted_settled(blocks: torch.Tensor) -> SettledAt | None:
    """Where this very tensor was settled last, if it was."""
    found = _noted.get(id(blocks))
    return found[1] if found is not None and found[0]() is blocks else None
