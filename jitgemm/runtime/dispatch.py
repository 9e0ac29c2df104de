"""Whether a call is plain eager execution, or goes through its `torch.library` op."""

from __future__ import annotations

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Bound once: a hot call asks both.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transform = torch._C._functorch.peek_interpreter_stack


def traced(x: object, out: object) -> bool:
    """Whether this is not plain eager execution: tensor subclasses, a dispatch mode, a functorch transform."""
    return (
        type(x) not in _PLAIN
        or type(out) not in _PLAIN
        or _dispatch_modes() > 0
        or _functorch_transform() is not None
    )
