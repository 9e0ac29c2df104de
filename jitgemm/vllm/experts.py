"""The method of vLLM's fused experts: packed weights, and tokens quantised to 8 bits before each of the two GEMMs.

vLLM routes; `jitgemm.fused_experts` does the rest, for the experts of this rank. Where data-parallel ranks exchange
tokens, and where experts have LoRAs, it does so inside a modular kernel of vLLM; backends that sort tokens by expert
(DeepEP low latency, NIXL) get `fused_experts_masked`. With `exchange="nvlink"` this method exchanges tokens itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEActivationFormat, FusedMoEExpertsModular, FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from jitgemm.activations.scheme import Gate
from jitgemm.kernel.formats import LHS_GROUP
from jitgemm.nn.layers.batched_experts import run_batched
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.packed import Parts
from jitgemm.serving.collected import CHILD
from jitgemm.serving.packed_experts import PackedExpertsMethod, expert_rows, weighed
from jitgemm.serving.served import ServedModel
from jitgemm.serving.stored import Unsupported
from jitgemm.vllm.lora import run_adapted

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import MoEActivation, RoutedExperts, SharedExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata, FusedMoEKernel

    from jitgemm.nn.layers.sharding import ExpertSharding

logger = init_logger("vllm." + __name__)
_GATES = {
    "silu": ("silu", "gate_up"),
    "gelu": ("gelu", "gate_up"),
    "gelu_tanh": ("gelu_tanh", "gate_up"),
    "swigluoai": ("swiglu_oai", "interleaved"),
    "swigluoai_uninterleave": ("swiglu_oai", "gate_up"),
    "swiglustep": ("swiglu_step", "gate_up"),
    "situ": ("situ", "gate_up"),
    "relu2_no_mul": ("relu2", "gate_up"),
}
"""vLLM's MoEActivation: jitgemm's kind and order."""


class JitGemmMoEMethod(PackedExpertsMethod, FusedMoEMethodBase):
    """Experts with packed weights.

    Attributes:
        split: how jitgemm's kernels exchange the ranks' tokens; None where vLLM does, or nobody.
    """

    split: ExpertSharding | None = None
    moe_kernel: FusedMoEKernel | None

    @classmethod
    def of(cls, config: ServedModel, layer: RoutedExperts, names: list[str]) -> JitGemmMoEMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        moe = layer.moe_config
        if moe.activation.value not in _GATES:
            raise Unsupported(f"expected an activation of {', '.join(_GATES)}, got {moe.activation.value}")
        inputs = Gate(*_GATES[moe.activation.value]).inputs
        sizes = moe.hidden_dim, moe.intermediate_size_per_partition, moe.intermediate_size
        stored = cls.stored_of(config, names, *sizes, inputs)
        if moe.has_bias and not config.saved and not config.loads_biases:
            raise Unsupported(
                "expected experts with biases in a quantised checkpoint, and of gpt-oss in its own format, as vLLM's "
                "models call no loaders for others; got some"
            )
        return cls(config, names, stored, moe)

    @property
    def supports_eplb(self) -> bool:
        return True

    @property
    def supports_internal_mk(self) -> bool:
        """True if this method or its modular kernel exchanges tokens, so that vLLM's runner does not."""
        return self.moe_kernel is not None or self.split is not None

    @property
    def moves(self) -> bool:  # type: ignore[override]
        return bool(self.moe.moe_parallel_config.enable_eplb)

    def places(self, layer: RoutedExperts) -> list[list[int]]:
        numbers = range(self.moe.num_local_experts) if layer.expert_map is None else layer.expert_map.tolist()
        return [[mine] if mine >= 0 else [] for mine in numbers]

    def logical_experts(self, layer: RoutedExperts) -> int:
        return self.moe.num_logical_experts

    def create_weights(
        self, layer: RoutedExperts, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        sizes = hidden_size, intermediate_size_per_partition, self.moe.intermediate_size
        inputs, rank = Gate(*_GATES[self.moe.activation.value]).inputs, self.moe.moe_parallel_config.tp_rank
        biased = self.moe.has_bias
        if self.config.exchange == "nvlink":
            from jitgemm.vllm.exchange import sharding_of  # with torch.distributed

            self.split = sharding_of(self.moe, layer.expert_map, self.config.elastic, logger)
        self.place(layer, num_experts, sizes, inputs, rank, params_dtype, biased, extra_weight_attrs)

    def module(self, layer: torch.nn.Module, *parts: Parts) -> PackedExperts:
        module = super().module(layer, *parts)
        order, expected = module.gate.order, self.gate(layer).order
        if self.moe.is_lora_enabled and order != expected:
            name = f"{self.names[0].rpartition('.')[0]}.gate"
            raise ValueError(f"{name}: expected order {expected} with LoRA, as vLLM's adapters have it, got {order}")
        module.batched = self.moe.moe_parallel_config.use_batched_activation_format
        module.split = self.split or module.split
        return module

    def gate(self, layer: RoutedExperts) -> Gate:
        """The gate that vLLM's layer has. Raises ValueError for SiTU without its beta."""
        activation, order = _GATES[layer.activation.value]
        limit, alpha = (getattr(layer, name, None) for name in ("swiglu_limit", "swiglu_alpha"))
        if activation == "situ":
            names = "activation_situ_linear_beta", "activation_situ_beta"
            limit, alpha = (getattr(self.moe, name, None) for name in names)
            if alpha is None:
                raise ValueError("activation_situ_beta: expected a number for the activation situ, got None")
        if layer.activation.value in ("swiglustep", "swigluoai") and limit is None:
            limit = 7.0  # what vLLM's own experts use
        if activation == "relu2":
            limit = alpha = None
        default = 1.702 if activation == "swiglu_oai" else 1.0
        return Gate(activation, order, math.inf if limit is None else limit, default if alpha is None else alpha)

    def install(self, layer: RoutedExperts, module: torch.nn.Module) -> None:
        super().install(layer, module)
        packed = getattr(layer, CHILD)
        layer.get_expert_weights = lambda: expert_rows(packed)
        if self.moe_kernel is None:
            self.moe_kernel = self._modular_kernel(layer)

    def finish(self, layer: torch.nn.Module) -> None:
        super().finish(layer)
        if self.moe.is_lora_enabled:  # where vLLM's LoRA looks for the device, and for what it gives a modular kernel
            packed = getattr(layer, CHILD)
            layer.register_buffer("w13_weight", packed.w13.blocks, persistent=False)
            layer.register_buffer("w2_weight", packed.w2.blocks, persistent=False)
            self.config.adapted.add(layer)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:  # fmt: skip
        """The same sizes. Raises ValueError where the all-to-all backend would pad tokens."""
        sizes = hidden_size, intermediate_size_per_partition
        padded = super().maybe_roundup_sizes(*sizes, act_dtype, moe_parallel_config)
        if padded != sizes:
            raise ValueError(
                f"all2all_backend: expected one for tokens of {hidden_size} values, got "
                f"{moe_parallel_config.all2all_backend}, which pads them to {padded[0]}"
            )
        return padded

    def _modular_kernel(self, layer: RoutedExperts) -> FusedMoEKernel | None:
        """The modular kernel that exchanges tokens around the experts; None if vLLM's runner does, or nobody."""
        from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

        backend = self.moe.moe_parallel_config.all2all_backend
        if backend in ("passthrough", "moonep"):
            raise ValueError(f"all2all_backend: expected one that exchanges tokens around the experts, got {backend}")
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        # With adapters there is one always, as vLLM's runner gathers tokens for methods alone that have none.
        options = {"allow_new_interface": self.moe.is_lora_enabled}
        tables = layer._expert_routing_tables()
        exchange = maybe_make_prepare_finalize(self.moe, self.moe_quant_config, tables, **options)
        if exchange is None:
            return None
        experts = getattr(layer, CHILD), self.moe, self.moe_quant_config
        if exchange.activation_format == FusedMoEActivationFormat.Standard:
            return FusedMoEKernel(exchange, JitGemmExperts(*experts))
        batch = exchange.max_num_tokens_per_rank(), exchange.num_dispatchers()
        return FusedMoEKernel(exchange, JitGemmBatchedExperts(*experts, *batch))

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """What a modular kernel is told to quantise before the experts: e4m3 by blocks of 128 k, else nothing.

        And only for backends that sort tokens by expert, which send them so, and do not rotate them.
        """
        from vllm.model_executor.layers.fused_moe import config

        module = getattr(layer, CHILD)
        if module.batched and module.activation == "e4m3_block" and not module.w13.scheme.rotation:
            return config.fp8_w8a8_moe_quant_config(None, None, block_shape=[LHS_GROUP, LHS_GROUP])
        return config.FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self, layer: RoutedExperts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
        shared_experts: SharedExperts | None, shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        module, on_input = getattr(layer, CHILD), layer.apply_router_weight_on_input
        if self.moe_kernel is not None:
            return self.moe_kernel.apply(
                x, module.w13.blocks, module.w2.blocks, topk_weights, topk_ids, activation=layer.activation,
                global_num_experts=layer.global_num_experts, expert_map=layer.expert_map,
                apply_router_weight_on_input=on_input, shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )  # fmt: skip
        if on_input:
            x, topk_weights = weighed(x, topk_weights)
        if self.split is not None:
            return module.run(x, topk_ids.contiguous(), topk_weights.contiguous())
        return module.run(x, topk_ids, topk_weights, expert_map=layer.expert_map)


class JitGemmExperts(LoRAExpertsMixin, FusedMoEExpertsModular):
    """The experts of a layer as a modular kernel of vLLM: tokens in the standard format, weighed and summed."""

    def __init__(self, module: PackedExperts, moe: FusedMoEConfig, quant: FusedMoEQuantConfig, *batch: int):
        super().__init__(moe, quant, *batch)
        self.module = module

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in _GATES

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        module = self.module
        return module.num_experts, a1.shape[-2], module.w13.weight.n, module.hidden_dim, topk_ids.shape[1]

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None, activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        batched = self.activation_format() == FusedMoEActivationFormat.BatchedExperts
        experts = (self.module.num_experts,) if batched else ()
        return (0,), (0,), (*experts, M, K)  # what is in between comes from PyTorch's allocator

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: MoEActivation, global_num_experts: int,
        expert_map: torch.Tensor | None, a1q_scale: torch.Tensor | None, a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor, workspace2: torch.Tensor, expert_tokens_meta: ExpertTokensMetadata,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        if self.activation_format() == FusedMoEActivationFormat.BatchedExperts:
            x = hidden_states if a1q_scale is None else (hidden_states, a1q_scale)
            live = expert_tokens_meta.expert_num_tokens[: self.module.num_experts].to(torch.int32)
            # As many tokens of every other rank: a CUDA graph is captured for its own number alone.
            expected = topk_ids.numel() * self.num_dispatchers / global_num_experts
            run_batched(self.module, x, output, live, min(expected, hidden_states.shape[1]))
            return
        if apply_router_weight_on_input:  # which vLLM has done
            topk_weights = torch.ones_like(topk_weights)
        if self._lora_context is not None:
            run_adapted(self, output, hidden_states, topk_weights, topk_ids, expert_map)
            return
        self.module.run(hidden_states, topk_ids, topk_weights, expert_map=expert_map, out=output)


class JitGemmBatchedExperts(JitGemmExperts):
    """The same for tokens sorted by expert, [experts, max_m, hidden]; who sent them weighs and sums.

    They come in the model's type, or as e4m3 with a scale for each token and 128 k.
    """

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    @staticmethod
    def supports_lora() -> bool:
        return False

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False  # DeepEP's exchange cannot put off what its config does not ask for

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return moe_parallel_config.use_batched_activation_format

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceDelegate:
        return TopKWeightAndReduceDelegate()
