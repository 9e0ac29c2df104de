"""Tests that were written for a GPU on the emulator: "cuda" means the CPU's tensors. `pytest -m gpu --emulate`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from emulator.launch import Emulator, emulate


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        args = tuple(map(_on_cpu, args))
        return function(*args, **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def cuda_is_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a test does with "cuda" happens on the CPU, kernels on the emulator. CUDA graphs and streams skip it."""
    emulator: Emulator = emulate(monkeypatch)

    def unknown(*_: Any, **__: Any) -> None:
        pytest.skip("the emulator has no graphs, streams, memory statistics and devices")

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, _on_cpu(device))

    monkeypatch.setattr(torch, "Generator", Generator)
    names = "CUDAGraph", "Stream", "Event", "max_memory_allocated", "memory_allocated", "reset_peak_memory_stats"
    for name in (*names, "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, unknown)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with _CudaIsCpu():
        yield emulator
