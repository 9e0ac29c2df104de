"""The methods of vLLM's linears and of its output layer: a packed weight, activations quantised to 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from jitgemm.nn.layers.linear import LINEARS, PackedLinear, input_rows
from jitgemm.nn.layers.packed import Parts
from jitgemm.vllm.layouts import BLOCK, Layout
from jitgemm.vllm.matrix import CHILD, Matrix, Packing
from jitgemm.vllm.saved import SavedMatrix


@register_weight_loader_v2_supported_method
class JitGemmLinearMethod(Packing, LinearMethodBase):
    """A linear with a packed weight, activations quantised to 8 bits on the way in."""

    dtype = torch.bfloat16

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmLinearMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        k = getattr(layer, "input_size_per_partition", layer.input_size)
        layout = config.layout(names, layer.input_size, layer.params_dtype)
        layout = layout.cut(layer.output_partition_sizes, layer.output_size, k, layer.input_size)
        layout.check(layer.input_size)
        return cls(config, names, layout)

    def create_weights(
        self, layer: torch.nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        self.dtype, k = params_dtype, input_size_per_partition
        rank = layer.tp_rank if k != input_size else 0
        kind = Matrix if self.layout.tensors else SavedMatrix
        self.matrices = [kind(self, output_partition_sizes, k, input_size, rank)]
        if self.layout.scheme.strategy == "block":
            layer.weight_block_size = [BLOCK, BLOCK]  # vLLM's loaders ask
        self.create(layer, params_dtype, extra_weight_attrs)

    def module(self, layer: torch.nn.Module, *parts: Parts) -> PackedLinear:
        weight, bias, activation, input_scale = parts[0]
        if self.names[0].rpartition(".")[2] == "kv_b_proj":  # whose weight MLA takes from the product with an identity
            input_scale = None
        module = LINEARS[weight.bits](weight, bias, activation=activation, input_scale=input_scale)
        # Where vLLM's LoRA looks for a layer's device, and MLA for the type of its input; equal to no other weight.
        here = next(module.buffers()).new_full((1,), torch.nan, dtype=self.dtype)
        layer.register_buffer("weight", here, persistent=False)
        return module

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        module = getattr(layer, CHILD)
        rows = input_rows(x, module.in_features)
        out = torch.empty((rows.shape[0], module.out_features), dtype=x.dtype, device=x.device)
        if bias is not None and bias.dtype == torch.float16:
            bias = bias.float()
        module.multiply(module.quantise(rows), out, bias)
        return out.view(*x.shape[:-1], module.out_features)


class JitGemmHeadMethod(JitGemmLinearMethod):
    """The output layer in 8 bits, quantised once it is loaded, or packed in the files; a tied embedding keeps its weight.

    Rows that fill up a rank's to a multiple of 64 are zeros.
    """

    option = "lm_head"

    def __init__(self, config: Any, names: list[str], layout: Layout):
        super().__init__(config, names, layout)
        self.uses_meta_device = False

    def check(self, layer: torch.nn.Module) -> None:
        """Nothing: a draft model's files may lack an output layer, which it takes from another model."""

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        return layer
