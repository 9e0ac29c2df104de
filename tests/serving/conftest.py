"""What tests of engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import sglang_layers
import torch
import vllm_layers


@pytest.fixture(scope="module", autouse=True)
def vllm_is_there() -> Iterator[None]:
    """While a file's tests run, imports find vLLM's stand-in, if it is used."""
    vllm_layers.show()
    yield
    vllm_layers.hide()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[Callable[..., list[Any]]]:
    """Two processes: `ranks.two_ranks`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "LIMIT_S", 400 if sglang_layers.REAL else ranks.LIMIT_S)  # SGLang takes long to import
        with ranks.two_ranks(tmp_path_factory.mktemp("ranks")) as run:
            yield run


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What modular kernels of the real vLLM allocate from."""
    if vllm_layers.REAL:
        from vllm.v1.worker.workspace import init_workspace_manager

        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None, raising=False)
        init_workspace_manager(torch.device("cpu"))
