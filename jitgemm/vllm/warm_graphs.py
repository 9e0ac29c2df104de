"""What vLLM's config says to what compiles kernels: how many tokens there are, and whether its graphs are compiled."""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config_or_none

from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.warm.warm import gates_of, prologues_in_vllm
from jitgemm.serving.engine import Logger
from jitgemm.serving.warm import Warmer


class GraphWarmer(Warmer):
    """A `Warmer` for models that vLLM may compile."""

    def __init__(self, logger: Logger) -> None:
        super().__init__(logger)
        self._gates = gates_of(None)

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
        super().expect(layer, dtype)

    def packed(self, layer: torch.nn.Module, module: torch.nn.Module) -> None:
        if self.compiled and isinstance(module, PackedLinear):
            from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

            row, undivided = isinstance(layer, RowParallelLinear), isinstance(layer, ReplicatedLinear)
            module.prologues = prologues_in_vllm("k" if row else None if undivided else "n", self._gates)
        super().packed(layer, module)
