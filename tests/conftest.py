"""What all tests share: tests marked `gpu` are skipped, with the reason, where there is no Hopper GPU."""

from __future__ import annotations

import functools
import zlib

import pytest


@functools.cache
def no_gpu_reason() -> str | None:
    """Why tests marked `gpu` cannot run here, or None when they can."""
    try:
        import torch
    except ImportError:
        return "needs a Hopper GPU: torch is not installed"
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch finds no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (compute capability 9.0): found {name}, {capability[0]}.{capability[1]}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-kernels", action="store_true", help="compile every kernel of test_compile.py, not a sample of them"
    )
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the tests, I from 1 to N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--shard"):
        part, parts = map(int, config.getoption("--shard").split("/"))
        shards: list[list[pytest.Item]] = [[] for _ in range(parts)]
        for item in items:
            shards[zlib.crc32(item.nodeid.encode()) % parts].append(item)
        items[:] = shards.pop(part - 1)
        config.hook.pytest_deselected(items=sum(shards, []))
    if not any("gpu" in item.keywords for item in items):
        return
    reason = no_gpu_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
