"""The methods of vLLM's linears and of its output layer: a packed weight, activations quantised to 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from jitgemm.serving.collected import CHILD
from jitgemm.serving.packing import PackedHead, PackedLinearMethod


@register_weight_loader_v2_supported_method
class JitGemmLinearMethod(PackedLinearMethod, LinearMethodBase):
    """vLLM's."""

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmLinearMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        k = getattr(layer, "input_size_per_partition", layer.input_size)
        stored = config.stored(names)
        stored.check(layer.output_partition_sizes, k, layer.input_size)
        return cls(config, names, stored)

    def create_weights(
        self, layer: torch.nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        k, rank = input_size_per_partition, layer.tp_rank if input_size_per_partition != input_size else 0
        self.place(layer, output_partition_sizes, k, input_size, rank, params_dtype, extra_weight_attrs)

    def finish(self, layer: torch.nn.Module) -> None:
        super().finish(layer)
        # Where vLLM's LoRA looks for a layer's device, and MLA for the type of its input; equal to no other weight.
        here = getattr(layer, CHILD).blocks.new_full((1,), torch.nan, dtype=self.dtype)
        layer.register_buffer("weight", here, persistent=False)


class JitGemmHeadMethod(PackedHead, JitGemmLinearMethod):
    """vLLM's."""

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        return layer
