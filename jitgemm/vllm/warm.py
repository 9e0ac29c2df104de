"""Kernels for every number of tokens that vLLM may send, compiled and loaded when a model's last layer is packed.

All at once, in threads and under one progress bar; before the profile run, and before a CUDA graph is captured.
"""

from __future__ import annotations

import gc
from weakref import WeakSet

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from jitgemm import settings
from jitgemm.nn.warm import warmup

logger = init_logger("vllm." + __name__)


class Warmer:
    """Layers of a model that are not packed yet, and packed ones whose kernels are not compiled.

    A layer that is dropped before it is packed is not waited for.
    """

    def __init__(self) -> None:
        self._waiting: WeakSet[torch.nn.Module] = WeakSet()
        self._packed: list[torch.nn.Module] = []
        self._dtype: torch.dtype = torch.bfloat16
        self.tokens = 1

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """vLLM hands its configs to worker processes, which make their own layers."""
        return Warmer, ()

    def expect(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        """A layer is made, while vLLM's config is at hand."""
        config = get_current_vllm_config_or_none()
        if config is not None and config.scheduler_config is not None:
            ranks = config.parallel_config.data_parallel_size if config.parallel_config is not None else 1
            self.tokens = max(self.tokens, config.scheduler_config.max_num_batched_tokens * ranks)
        self._dtype = dtype
        self._waiting.add(layer)

    def packed(self, layer: torch.nn.Module, module: torch.nn.Module) -> None:
        """A layer's weights are in `module`; after the last one the kernels of all are compiled and loaded.

        Raises:
            CacheMissError: JITGEMM_JIT=off, and the cache lacks a kernel.
            CompileError: a kernel did not compile.
        """
        self._waiting.discard(layer)
        self._packed.append(module)
        if 0 < len(self._waiting) <= 4:
            gc.collect()  # of a dropped layer, which its own loaders hold
        if self._waiting:
            return
        modules = torch.nn.ModuleList(self._packed)
        self._packed = []
        if on_gpu(modules):
            built = warmup(modules, self.tokens, dtype=self._dtype, build=settings.jit_mode() != "off")
            logger.info("jitgemm: %d kernels compiled for up to %d tokens", len(built), self.tokens)


def on_gpu(modules: torch.nn.Module) -> bool:
    """Whether the weights of some layers are on a GPU."""
    return any(buffer.is_cuda for buffer in modules.buffers())
