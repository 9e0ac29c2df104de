"""The methods of vLLM's linears and of its output layer: a packed weight, activations quantised to 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from jitgemm.serving.collected import CHILD
from jitgemm.serving.packing import PackedHead, PackedLinearMethod
from jitgemm.serving.served import ServedModel
from jitgemm.serving.stored import StoredLayers, Unsupported

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearBase

REORDERED = ("bloom", "falcon", "gpt_neox")
"""Types of models of which vLLM sorts the rows of query_key_value before a layer's loader gets them."""


@register_weight_loader_v2_supported_method
class JitGemmLinearMethod(PackedLinearMethod, LinearMethodBase):
    """vLLM's."""

    @classmethod
    def of(cls, config: ServedModel, layer: LinearBase, names: list[str]) -> JitGemmLinearMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        k = getattr(layer, "input_size_per_partition", layer.input_size)
        stored = config.stored(names)
        if names[0].endswith("query_key_value") and config.model_type in REORDERED:
            check_rows_are_first(stored, config.model_type)
        stored.check(layer.output_partition_sizes, k, layer.input_size)
        return cls(config, names, stored)

    def create_weights(
        self, layer: LinearBase, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        k, rank = input_size_per_partition, layer.tp_rank if input_size_per_partition != input_size else 0
        if self.config.tp_invariant:
            self.config.warn_of_others()
        self.place(layer, output_partition_sizes, k, input_size, rank, params_dtype, extra_weight_attrs)

    def finish(self, layer: torch.nn.Module) -> None:
        super().finish(layer)
        # Where vLLM's LoRA looks for a layer's device, and MLA for the type of its input; equal to no other weight.
        here = getattr(layer, CHILD).blocks.new_full((1,), torch.nan, dtype=self.dtype)
        layer.register_buffer("weight", here, persistent=False)


def check_rows_are_first(stored: StoredLayers, model_type: str) -> None:
    """Raises Unsupported for tensors of which vLLM would sort something else than rows, or nothing."""
    axes = {suffix: stored.axes(suffix).get("output_dim") for suffix in stored.suffixes}
    wrong = [suffix for suffix, axis in axes.items() if axis != 0]
    by_axis = model_type == "falcon" and any(axis is not None for axis in axes.values())  # which vLLM looks for there
    if wrong and not by_axis:
        text = f"query_key_value: expected tensors with a row each, whose rows vLLM sorts for {model_type}"
        raise Unsupported(f"{text}, got {', '.join(wrong)}")


class JitGemmHeadMethod(PackedHead, JitGemmLinearMethod):
    """vLLM's."""

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        return layer
