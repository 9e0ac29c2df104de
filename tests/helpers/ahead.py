"""Kernels compiled ahead of the tests that run them on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from jitgemm import settings
from jitgemm.errors import JitGemmError
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec


def compile_ahead(config: pytest.Config, specs: Iterable[KernelSpec]) -> None:
    """Fills the cache in threads: serially it would take minutes.

    The processes of a run share the cache: each begins elsewhere, and finds what another has compiled.
    """
    from jitgemm.runtime import loaded

    ordered = sorted({replace(spec, debug=settings.debug()) for spec in specs}, key=lambda spec: spec.label)
    part, parts = map(int, (config.getoption("--shard") or "1/1").split("/"))
    first = len(ordered) * (part - 1) // parts

    def build(spec: KernelSpec) -> None:
        with suppress(JitGemmError):  # the test that needs it will say so
            loaded.cache.get_or_compile(kernel_source(spec))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(build, ordered[first:] + ordered[:first]))
