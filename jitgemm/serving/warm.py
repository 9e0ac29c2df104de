"""Kernels for every number of tokens that an engine may send, compiled and loaded while a model's layers are packed.

In threads and under a progress bar; what packs the last layer waits for them. That is before a profile run, and before
a CUDA graph is captured. Knows no engine.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakSet

import torch

from jitgemm import settings
from jitgemm.nn.layers.packed import Packed
from jitgemm.nn.warm.warm import warmup
from jitgemm.serving.engine import Logger


class Layers(WeakSet[torch.nn.Module]):
    """Layers of this process; a copy, such as an engine's of its configs, has none."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Layers, ()


class Warmer:
    """Layers of a model that are not packed yet, and the kinds of layers whose kernels are being compiled.

    A layer that is dropped before it is packed is not waited for. A copy, as in an engine's workers, has none.

    Args:
        logger: the engine's.

    Attributes:
        tokens: the most in one call.
        compiled: whether the model is compiled, so that quantisers may also compute norms and gates.
    """

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self._waiting, self._thread = Layers(), ThreadPoolExecutor(1, "jitgemm")
        self._kinds: set[str] = set()
        self._new: list[torch.nn.Module] = []
        self._jobs: list[Future[list[str]]] = []
        self._dtype = torch.bfloat16
        self.tokens, self.compiled = 1, False

    def __reduce__(self) -> tuple[type, tuple[Logger]]:
        return type(self), (self.logger,)

    def expect(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        """A layer is made, whose input is of a type."""
        self._dtype = dtype
        self._waiting.add(layer)

    def packed(self, layer: torch.nn.Module, module: torch.nn.Module) -> None:
        """A layer's weights are in `module`. After the last one all kernels are loaded.

        Raises:
            CacheMissError: JITGEMM_JIT=off, and the cache lacks a kernel.
            CompileError: a kernel did not compile.
        """
        self._waiting.discard(layer)
        if on_gpu(module) and (looks := kind_of(module)) not in self._kinds:
            self._kinds.add(looks)
            self._new.append(module)
            self._jobs.append(self._thread.submit(self._warm))
        if self._waiting or not self._jobs:
            return
        jobs, self._jobs = self._jobs, []
        built = sum(len(job.result()) for job in jobs)
        self.logger.info("jitgemm: kernels for up to %d tokens are loaded, %d of them compiled", self.tokens, built)

    def _warm(self) -> list[str]:
        """All kinds that have come up by now at once, as more kernels keep more threads busy."""
        new, self._new = self._new, []
        if not new:
            return []
        build = settings.jit_mode() != "off"
        return warmup(torch.nn.ModuleList(new), self.tokens, dtype=self._dtype, build=build, compiled=self.compiled)


def on_gpu(module: torch.nn.Module) -> bool:
    """Whether a layer's weights are on a GPU."""
    return any(buffer.is_cuda for buffer in module.buffers())


def kind_of(module: torch.nn.Module) -> str:
    """What tells layers apart that need different kernels."""
    formats = (str(layer.weight.format) for layer in module.modules() if isinstance(layer, Packed))
    return " ".join([str(module), str(getattr(module, "prologues", "")), *formats])
