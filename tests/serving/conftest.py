"""What tests of engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import vllm_layers


@pytest.fixture(scope="module", autouse=True)
def vllm_is_there() -> Iterator[None]:
    """While a file's tests run, imports find vLLM's stand-in, if it is used."""
    vllm_layers.show()
    yield
    vllm_layers.hide()


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What modular kernels of the real vLLM allocate from."""
    if vllm_layers.REAL:
        from vllm.v1.worker.workspace import init_workspace_manager

        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None, raising=False)
        init_workspace_manager(torch.device("cpu"))
