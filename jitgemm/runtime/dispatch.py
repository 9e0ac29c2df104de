"""How a call meets PyTorch: run at once, or through its `torch.library` op where something traces or transforms it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jitgemm.runtime.torch_private import dispatch_modes, functorch_transform
from jitgemm.tensors import PLAIN

_is_compiling = torch.compiler.is_compiling


def needs_dispatcher(x: object, out: object) -> bool:
    """False in plain eager execution: no compiler, tensor subclasses, dispatch mode or functorch transform."""
    # A compiler first: it cannot follow the rest.
    if _is_compiling() or type(x) not in PLAIN or type(out) not in PLAIN:
        return True
    return dispatch_modes() > 0 or functorch_transform() is not None


_library = torch.library.Library("jitgemm", "FRAGMENT")
_subscribers: list[Callable[[], object]] = []


def on_trace(subscriber: Callable[[], object]) -> None:
    """From now on calls `subscriber()` whenever one of the ops is traced, before its results are made."""
    _subscribers.append(subscriber)


def define_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], call: Callable[..., Any] | None = None
) -> None:
    """Registers `torch.ops.jitgemm.<name>`: `run` for CUDA and CPU tensors, `fake` for those without values; both take
    what `call` makes of the op's arguments, if it is given."""

    def given(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if call is None else lambda *arguments: function(call(*arguments))

    def trace(*arguments: Any, **options: Any) -> Any:
        for subscriber in _subscribers:
            subscriber()
        return given(fake)(*arguments, **options)

    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CUDA", "CPU"):
        _library.impl(name, given(run), device)
    torch.library.register_fake(f"jitgemm::{name}", trace, lib=_library)
