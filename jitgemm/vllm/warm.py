"""Kernels for every number of tokens that vLLM may send, compiled and loaded while a model's layers are packed.

In threads and under a progress bar; what packs the last layer waits for them. That is before the profile run, and
before a CUDA graph is captured.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakSet

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from jitgemm import settings
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.packed import Packed
from jitgemm.nn.warm.warm import fronts_in_vllm, gates_of, warmup

logger = init_logger("vllm." + __name__)


class Layers(WeakSet[torch.nn.Module]):
    """Layers of this process; a copy, such as vLLM's of its configs, has none."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Layers, ()


class Warmer:
    """Layers of a model that are not packed yet, and the kinds of layers whose kernels are being compiled.

    A layer that is dropped before it is packed is not waited for. A copy, as in vLLM's workers, has layers of its own.
    """

    def __init__(self) -> None:
        self._waiting, self._thread = Layers(), ThreadPoolExecutor(1, "jitgemm")
        self._kinds: set[str] = set()
        self._new: list[torch.nn.Module] = []
        self._jobs: list[Future[list[str]]] = []
        self._dtype, self._gates = torch.bfloat16, gates_of(None)
        self.tokens, self.compiled = 1, False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Warmer, ()

    def expect(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        """A layer is made, while vLLM's config is at hand: the graphs of its model are compiled with jitgemm's pass."""
        config = get_current_vllm_config_or_none()
        if config is not None:
            from jitgemm.vllm.fusion import install  # which loads inductor, as vLLM does then

            if config.scheduler_config is not None:
                ranks = config.parallel_config.data_parallel_size if config.parallel_config is not None else 1
                self.tokens = max(self.tokens, config.scheduler_config.max_num_batched_tokens * ranks)
            self.compiled = install(config.compilation_config)
            self._gates = gates_of(getattr(config.model_config, "hf_config", None))
        self._dtype = dtype
        self._waiting.add(layer)

    def packed(self, layer: torch.nn.Module, module: torch.nn.Module) -> None:
        """A layer's weights are in `module`. After the last one all kernels are loaded.

        Raises:
            CacheMissError: JITGEMM_JIT=off, and the cache lacks a kernel.
            CompileError: a kernel did not compile.
        """
        self._waiting.discard(layer)
        if self.compiled and isinstance(module, PackedLinear):
            from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

            row, whole = isinstance(layer, RowParallelLinear), isinstance(layer, ReplicatedLinear)
            module.fronts = fronts_in_vllm("k" if row else None if whole else "n", self._gates)
        if on_gpu(module) and (kind := kind_of(module)) not in self._kinds:
            self._kinds.add(kind)
            self._new.append(module)
            self._jobs.append(self._thread.submit(self._warm))
        if self._waiting or not self._jobs:
            return
        jobs, self._jobs = self._jobs, []
        built = sum(len(job.result()) for job in jobs)
        logger.info("jitgemm: kernels for up to %d tokens are loaded, %d of them compiled", self.tokens, built)

    def _warm(self) -> list[str]:
        """All kinds that have come up by now at once, as more kernels keep more threads busy."""
        new, self._new = self._new, []
        if not new:
            return []
        options = {"build": settings.jit_mode() != "off", "compiled": self.compiled}
        return warmup(torch.nn.ModuleList(new), self.tokens, dtype=self._dtype, **options)


def on_gpu(module: torch.nn.Module) -> bool:
    """Whether a layer's weights are on a GPU."""
    return any(buffer.is_cuda for buffer in module.buffers())


def kind_of(module: torch.nn.Module) -> str:
    """What tells layers apart that need different kernels."""
    formats = (str(each.weight.format) for each in module.modules() if isinstance(each, Packed))
    return " ".join([str(module), str(getattr(module, "fronts", "")), *formats])
