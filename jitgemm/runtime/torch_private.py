"""Functions of PyTorch that are not public and that a hot call asks: bound once, with the public way next to each.

A PyTorch without one of them takes the public way: the same results, more host time. With all of them a call takes
6.5 us (docs/notes/host-and-jit-costs.md).
"""

from __future__ import annotations

import torch

# Both take a third of the public ones' time.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream)

try:
    # Compares all of a call's tensors in one step, in a fifth of the time that their attributes take in Python.
    from torch._C._dynamo.guards import TensorGuards as TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

try:
    dispatch_modes = torch._C._len_torch_dispatch_stack
    functorch_transform = torch._C._functorch.peek_interpreter_stack
except AttributeError:  # nothing public tells: every call goes through its op, which takes 13 to 14 us

    def dispatch_modes() -> int:
        return 1

    def functorch_transform() -> object:  # type: ignore[misc]
        return None
