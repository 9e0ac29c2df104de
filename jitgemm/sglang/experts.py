"""The method of SGLang's fused experts: packed weights, and tokens quantised to 8 bits before each of the two GEMMs.

SGLang routes and its dispatcher exchanges tokens; `jitgemm.fused_experts` does the rest, for the experts of this rank,
and `fused_experts_masked` where DeepEP's low latency has sorted them by expert.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.layers.moe import get_deepep_mode, get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput, DeepEPNormalCombineInput
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from jitgemm.activations.scheme import Gate
from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.kernel.formats import ceil_div
from jitgemm.nn.layers.batched_experts import run_batched
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.packed import Parts
from jitgemm.serving.collected import CHILD
from jitgemm.serving.packed_experts import PackedExpertsMethod, expert_rows, weighed
from jitgemm.serving.served import ServedModel
from jitgemm.serving.stored import Unsupported
from jitgemm.sglang.arguments import setting

if TYPE_CHECKING:
    from sglang.srt.layers.moe import MoeRunnerConfig
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, DispatchOutput

_RUNNERS = ("auto", "triton")
"""--moe-runner-backend that leaves tensors as the files have them; neither runs here."""


class JitGemmMoEMethod(PackedExpertsMethod, FusedMoEMethodBase):
    """Experts with packed weights."""

    bias = "weight_bias"
    runner = None  # a direct kernel: SGLang gives it routed tokens and the numbers of this rank's experts

    @classmethod
    def of(cls, config: ServedModel, layer: FusedMoE, names: list[str]) -> JitGemmMoEMethod:
        """The method for a layer of SGLang's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        hidden, (inter, whole), inputs = layer.hidden_size, cut(config, layer), gate_of(layer.moe_runner_config).inputs
        stored = cls.stored_of(config, names, hidden, inter, whole, inputs)
        if layer.with_bias and not config.saved and not config.loads_biases:
            raise Unsupported(
                "expected experts without biases but of gpt-oss in its own format, as SGLang's models bring no others "
                "to their loaders, got some with"
            )
        return cls(config, names, stored)

    def create_weights(
        self, layer: FusedMoE, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Raises ValueError for experts that SGLang's loader brings in another form."""
        load = extra_weight_attrs["weight_loader"]
        if not self.config.saved and getattr(load, "__name__", "") == "weight_loader_fused":
            raise ValueError(
                f"{self.names[0]}: expected experts one by one in the files, got a model that has them stacked"
            )
        sizes, attributes = (hidden_size, *cut(self.config, layer)), {"weight_loader": load}
        inputs, rank, biased = self.gate(layer).inputs, layer.moe_tp_rank, layer.with_bias
        self.place(layer, num_experts, sizes, inputs, rank, params_dtype, biased, attributes)

    @property
    def moves(self) -> bool:  # type: ignore[override]
        return bool(setting("enable_eplb") or setting("elastic_ep_backend"))

    def places(self, layer: FusedMoE) -> list[list[int]]:
        """By the numbers of the model's experts, as they lie now: EPLB has several copies of some, and moves them."""
        location = get_global_expert_location_metadata() if getattr(layer, "uses_expert_location", True) else None
        if location is None:
            everywhere = [[expert] for expert in range(layer.num_experts)]
        else:
            routed = range(location.num_logical_experts)
            everywhere = [location.logical_to_all_physical(layer.layer_id, expert) for expert in routed]
            shared = getattr(layer, "num_fused_shared_experts", 0)  # behind all copies
            everywhere += [[layer.num_global_routed_experts + number] for number in range(shared)]
        place = layer._map_global_expert_id_to_local_expert_id
        return [[mine for mine in map(place, copies) if mine >= 0] for copies in everywhere]

    def logical_experts(self, layer: FusedMoE) -> int:
        return len(self.places(layer))

    def gate(self, layer: FusedMoE) -> Gate:
        return gate_of(layer.moe_runner_config)

    def module(self, layer: torch.nn.Module, *parts: Parts) -> PackedExperts:
        module = super().module(layer, *parts)
        module.batched = sends_by_deepep() and get_deepep_mode().enable_low_latency()
        return module

    def install(self, layer: FusedMoE, module: torch.nn.Module) -> None:
        super().install(layer, module)
        if self.moves:  # SGLang moves rows of parameters that have one for each expert
            for number, rows in enumerate(expert_rows(getattr(layer, CHILD))):
                layer.register_parameter(f"{CHILD}_{number}", torch.nn.Parameter(rows, requires_grad=False))
        layer.deprecate_flag = True  # of DeepEPMoE: it calls this method, as FusedMoE does
        if sends_by_deepep():
            experts = getattr(layer, CHILD)  # the dispatcher rotates no token
            codes = "fp8" if experts.activation == "e4m3_block" and not experts.w13.scheme.rotation else "bf16"
            dtypes = {"dispatcher_output_dtype": "bf16", "low_latency_dispatcher_output_dtype": codes}
            layer.dispatcher.set_quant_config({**(getattr(layer.dispatcher, "quant_config", None) or {}), **dtypes})

    def create_moe_runner(self, layer: FusedMoE, moe_runner_config: MoeRunnerConfig) -> None:
        """Raises ValueError for a runner that wants weights or tokens of its own."""
        backend = get_moe_runner_backend().value
        if backend not in _RUNNERS:
            raise ValueError(f"moe_runner_backend: expected {' or '.join(_RUNNERS)} with jitgemm, got {backend}")
        self.moe_runner_config = moe_runner_config

    def apply(self, layer: FusedMoE, dispatch_output: DispatchOutput) -> CombineInput:
        """Runs the experts on what the dispatcher gave.

        Raises ValueError for a dispatcher, or a form of its tokens, that is not served.
        """
        form, module = dispatch_output.format.value, getattr(layer, CHILD)
        if form not in _FORMS:
            raise ValueError(f"moe_a2a_backend: expected a dispatcher of {', '.join(_FORMS)}, got {form}")
        return _FORMS[form](module, self.moe_runner_config, dispatch_output)


def _standard(module: PackedExperts, config: MoeRunnerConfig, tokens: DispatchOutput) -> CombineInput:
    """Tokens as they are, weighed and summed; experts of other ranks are -1."""
    topk = tokens.topk_output
    if not hasattr(topk, "topk_ids"):
        raise ValueError(f"topk_output: expected experts and weights of tokens, got {type(topk).__name__}")
    x, weights = _plain(tokens), topk.topk_weights
    if config.apply_router_weight_on_input:
        x, weights = weighed(x, weights)
    if config.routed_scaling_factor not in (None, 1.0):
        weights = weights * config.routed_scaling_factor
    return StandardCombineInput(hidden_states=module.run(x, topk.topk_ids, weights))


def _deepep_normal(module: PackedExperts, config: MoeRunnerConfig, tokens: DispatchOutput) -> CombineInput:
    """The same for tokens that other ranks sent. The model scales the combined output."""
    out = module.run(_plain(tokens), tokens.topk_ids, tokens.topk_weights)
    return DeepEPNormalCombineInput(hidden_states=out, topk_ids=tokens.topk_ids, topk_weights=tokens.topk_weights)


def _deepep_low_latency(module: PackedExperts, config: MoeRunnerConfig, tokens: DispatchOutput) -> CombineInput:
    """Tokens sorted by expert, [experts, max_m, hidden], as e4m3 with a scale for each token and 128 columns or in the
    model's type; the combine weighs and sums."""
    x, scale = tokens.hidden_states, tokens.hidden_states_scale
    out = torch.empty(x.shape, dtype=config.params_dtype if scale is not None else x.dtype, device=x.device)
    live, expected = tokens.masked_m[: module.num_experts].to(torch.int32), min(tokens.expected_m, x.shape[1])
    run_batched(module, x if scale is None else (x, scale), out, live, expected)
    return DeepEPLLCombineInput(hidden_states=out, topk_ids=tokens.topk_ids, topk_weights=tokens.topk_weights)


_FORMS = {"standard": _standard, "deepep_normal": _deepep_normal, "deepep_ll": _deepep_low_latency}
"""SGLang's DispatchOutputFormat: what runs the experts."""


def _plain(tokens: DispatchOutput) -> torch.Tensor:
    """Tokens in the model's type. Raises ValueError for quantised ones."""
    x, scale = tokens.hidden_states, tokens.hidden_states_scale
    if scale is not None or not isinstance(x, torch.Tensor):
        raise ValueError(
            "hidden_states: expected tokens in the model's type (--deepep-dispatcher-output-dtype bf16), got codes"
        )
    return x


def sends_by_deepep() -> bool:
    return get_moe_a2a_backend().is_deepep()


def cut(config: ServedModel, layer: FusedMoE) -> tuple[int, int]:
    """An expert's size between the GEMMs on this rank, and on all. gpt-oss' model cuts its own format between scales:
    the last rank may have less. Raises Unsupported where that leaves a rank nothing."""
    inter, ranks = layer.intermediate_size_per_partition, layer.moe_tp_size
    whole = inter * ranks
    if config.loads_biases:
        most = ceil_div(inter, EXPONENT_GROUP) * EXPONENT_GROUP
        if (inter := min(most, whole - most * layer.moe_tp_rank)) <= 0:
            raise Unsupported(
                f"tp_size: expected ranks that share {whole // EXPONENT_GROUP} groups of columns, got {ranks}"
            )
    return inter, whole


def gate_of(config: MoeRunnerConfig) -> Gate:
    """The gate of SGLang's MoeRunnerConfig. Raises Unsupported for one that jitgemm has not."""
    activation, gated = config.activation, config.is_gated
    limit, alpha = config.gemm1_clamp_limit, config.gemm1_alpha
    if getattr(config, "gemm1_beta", None) not in (None, 1, 1.0):
        raise Unsupported(f"gemm1_beta: expected 1, got {config.gemm1_beta}")
    if config.no_combine:
        raise Unsupported("no_combine: expected False, got True")
    if activation == "silu" and gated and alpha is not None:
        order = "interleaved" if config.gate_up_interleaved else "gate_up"
        return Gate("swiglu_oai", order, math.inf if limit is None else limit, alpha)
    if activation == "silu" and gated and limit is not None:
        return Gate("swiglu_step", limit=limit)
    if activation in ("silu", "gelu", "gelu_tanh") and gated and alpha is None:
        return Gate(activation, limit=math.inf if config.swiglu_limit is None else config.swiglu_limit)
    if activation == "situ" and gated:
        return Gate(activation, limit=math.inf if limit is None else limit, alpha=4.0 if alpha is None else alpha)
    if activation == "relu2" and not gated:
        return Gate(activation)
    known = "silu, gelu, gelu_tanh or situ with gates, or relu2 without"
    raise Unsupported(f"activation: expected {known}, got {activation} {'with' if gated else 'without'} gates")
