"""Which tensors hold a ready weight: one that no kernel in flight writes.

A `torch.library` op, which is given tensors alone, knows its weight by this: the records are ready if they are the very
object that a `Weight` noted, still at that address and not written since, by its version counter. It is the rule of an
eager call, with its blind spots (see `Weight`). That is sound under a compiler. What it makes of a weight (a clone, a
view, a functionalised write, an input copied for a CUDA graph) is another object; and AOTAutograd moves the versions of
the inputs that a graph writes before the graph runs. A `Weight` keeps what it noted, too: every call asks, and a
look-up here takes longer than an attribute.
"""

from __future__ import annotations

import weakref

import torch

from jitgemm.tensors import PLAIN

ReadyAt = tuple[int, int]
"""Address and version."""

_noted: dict[int, tuple[weakref.ref[torch.Tensor], ReadyAt]] = {}
"""By `id`. An entry goes with its tensor: an address that another weight had says nothing."""


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured by a CUDA graph, so that nothing can be waited for."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether nothing can be known of its values now, as its device's current stream is being captured."""
    return tensor.is_cuda and capturing(tensor.device)


def wait(blocks: torch.Tensor) -> ReadyAt | None:
    """Waits for what the current stream still writes, and notes where the records are ready now.

    None where nothing can be waited for or known: see `Weight.mark_ready`.
    """
    ready = type(blocks) in PLAIN and not blocks.is_inference()
    ready = ready and not is_captured(blocks)
    if ready and blocks.is_cuda:
        torch.cuda.current_stream(blocks.device).synchronize()
    return note(blocks, ready)


def note(blocks: torch.Tensor, ready: bool) -> ReadyAt | None:
    """Notes that these records are ready as they are now, or forgets it; where, or None."""
    key = id(blocks)
    if not ready or type(blocks) not in PLAIN:
        _noted.pop(key, None)
        return None
    at = now(blocks)
    forget = _noted.pop  # bound: at the interpreter's end a tensor may outlive this module's names
    _noted[key] = weakref.ref(blocks, lambda _: forget(key, None)), at
    return at


def noted(blocks: torch.Tensor) -> ReadyAt | None:
    """Where this very tensor was noted last, if it was."""
    entry = _noted.get(id(blocks))
    return entry[1] if entry is not None and entry[0]() is blocks else None


def now(blocks: torch.Tensor) -> ReadyAt:
    """Where the records are ready if nothing is writing them."""
    return blocks.data_ptr(), blocks._version
