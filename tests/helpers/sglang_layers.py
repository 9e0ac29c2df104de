"""SGLang's layers for tests, on any rank without a process group: the real package's where it is, else stand-ins."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace

import torch

REAL = importlib.util.find_spec("sglang") is not None
BF16 = torch.bfloat16


def _standins() -> dict[str, ModuleType]:
    """Of what the plug-in imports; linears and parameters are those of vLLM's, whose loaders SGLang's are."""
    import vllm_standin as vllm

    class FusedMoE(vllm.RoutedExperts):
        """SGLang's constructor and place of an expert."""

        def __init__(
            self, num_experts, hidden_size, intermediate_size, layer_id, top_k, params_dtype, quant_config, prefix,
            activation="silu", with_bias=False, is_gated=True, routed_scaling_factor=None, use_weight_loader_fused=False,
            apply_router_weight_on_input=False, **gate,
        ):  # fmt: skip
            torch.nn.Module.__init__(self)
            for name in ("moe_tp_rank", "moe_tp_size", "moe_ep_rank", "moe_ep_size"):
                setattr(self, name, getattr(PARALLEL, name))
            self.params_dtype, self.top_k, self.layer_id = params_dtype, top_k, layer_id
            self.num_experts, self.with_bias = num_experts, with_bias
            self.hidden_size, self.num_local_experts = hidden_size, num_experts // self.moe_ep_size
            self.intermediate_size_per_partition = intermediate_size // self.moe_tp_size
            said = dict.fromkeys(("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")) | {"gate_up_interleaved": True}
            self.moe_runner_config = SimpleNamespace(
                activation=activation, is_gated=is_gated, params_dtype=params_dtype, no_combine=False,
                routed_scaling_factor=routed_scaling_factor,
                apply_router_weight_on_input=apply_router_weight_on_input, **(said | gate),
            )  # fmt: skip
            self.quant_method = quant_config.get_quant_method(self, prefix)
            self.dispatcher = SimpleNamespace(
                set_quant_config=lambda said: setattr(self.dispatcher, "quant_config", said)
            )
            self.quant_method.create_weights(
                self, self.num_local_experts, hidden_size, self.intermediate_size_per_partition, params_dtype,
                weight_loader=self.weight_loader_fused if use_weight_loader_fused else self.weight_loader,
                with_bias=with_bias, moe_intermediate_size=intermediate_size,
            )  # fmt: skip
            self.quant_method.create_moe_runner(self, self.moe_runner_config)

        def weight_loader_fused(self, param, loaded_weight, weight_name, shard_id):
            raise AssertionError

        def _map_global_expert_id_to_local_expert_id(self, expert):
            local = expert - self.moe_ep_rank * self.num_local_experts
            return local if 0 <= local < self.num_local_experts else -1

    def method(*names):
        return type("Method", (), {name: lambda self, layer, *_, **__: None for name in names})

    unquantized = {
        name: type(name, (vllm.Unquantized,), {}) for name in ("UnquantizedLinearMethod", "UnquantizedFusedMoEMethod")
    }
    kinds = {name: type(name, (vllm.Parameter,), {}) for name in ("BasevLLMParameter", "ChannelQuantScaleParameter")}
    unquantized["UnquantizedFusedMoEMethod"].create_moe_runner = lambda self, layer, config: None
    linears = (
        "LinearBase", "ReplicatedLinear", "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear",
        "RowParallelLinear",
    )  # fmt: skip
    choices: list[str] = []
    modules = {
        "layers.linear": {name: getattr(vllm, name) for name in linears} | {"WEIGHT_LOADER_V2_SUPPORTED": vllm.SUPPORTED},
        "layers": {"parameter": SimpleNamespace(**kinds)},
        "layers.quantization": {"QUANTIZATION_METHODS": {}},
        "layers.quantization.base_config": {
            "QuantizationConfig": type("QuantizationConfig", (), {}), "QuantizeMethodBase": object,
            "LinearMethodBase": method("process_weights_after_loading"), "FusedMoEMethodBase": method("get_moe_runner_backend"),
        },
        "layers.quantization.unquant": unquantized,
        "eplb.expert_location": {"get_global_expert_location_metadata": None},
        "layers.moe": {"get_moe_a2a_backend": lambda: SimpleNamespace(is_deepep=lambda: False)}
        | dict.fromkeys(("get_moe_runner_backend", "get_deepep_mode")),
        "layers.moe.fused_moe_triton.layer": {"FusedMoE": FusedMoE},
        "layers.moe.token_dispatcher.standard": {"StandardCombineInput": SimpleNamespace},
        "layers.moe.token_dispatcher.deepep": {
            "DeepEPLLCombineInput": SimpleNamespace, "DeepEPNormalCombineInput": SimpleNamespace,
        },
        "runtime_context": {"get_context": lambda: None, "get_server_args": lambda: ARGUMENTS},
        "server_args": {"add_quantization_method_choices": choices.extend, "QUANTIZATION_CHOICES": choices},
    }  # fmt: skip
    made: dict[str, ModuleType] = {}
    for name, members in modules.items():
        path = "sglang.srt." + name
        for depth in range(1, path.count(".") + 2):
            made.setdefault(".".join(path.split(".")[:depth]), ModuleType(path))
        vars(made[path]).update(members)
    for module in made.values():
        module.__path__ = []
    return made


ARGUMENTS = SimpleNamespace(
    json_model_override_args="{}", load_format="auto", enable_deterministic_inference=False, model_path="",
    chunked_prefill_size=64, max_prefill_tokens=16, dp_size=1, disable_cuda_graph=False, enable_dp_attention=False, enable_eplb=False,
    elastic_ep_backend=None,
)  # fmt: skip
PARALLEL = SimpleNamespace(moe_tp_rank=0, moe_tp_size=1, moe_ep_rank=0, moe_ep_size=1)
if not REAL:
    sys.modules.update(_standins())


@contextmanager
def running(rank=0, size=1, ep=False, deepep=False, runner="auto", location=None, **arguments):
    """Layers that are made inside are those of a rank, of tensor or of expert parallelism, under SGLang's arguments.

    deepep, runner, location: what jitgemm's experts see of the all-to-all backend, the runner and where experts are; the
        dispatcher is the standard one.
    """
    place = {"moe_ep_rank": rank if ep else 0, "moe_ep_size": size if ep else 1}
    place |= {"moe_tp_rank": 0 if ep else rank, "moe_tp_size": 1 if ep else size}
    with ExitStack() as stack:
        import pytest

        patch, experts = stack.enter_context(pytest.MonkeyPatch.context()), "jitgemm.sglang.experts."
        patch.setattr(experts + "get_moe_a2a_backend", lambda: SimpleNamespace(is_deepep=lambda: deepep))
        patch.setattr(experts + "get_deepep_mode", lambda: SimpleNamespace(enable_low_latency=lambda: True))
        patch.setattr(experts + "get_moe_runner_backend", lambda: SimpleNamespace(value=runner))
        if location is not None or not REAL:
            patch.setattr(experts + "get_global_expert_location_metadata", lambda: location)
        if REAL:
            from sglang.srt.runtime_context import get_context, get_parallel

            ranks = {f"{name}_rank": rank for name in ("tp", "attn_tp")} | {
                f"{name}_size": size for name in ("tp", "attn_tp")
            }
            said = {"device": "cpu", "chunked_prefill_size": 64, "max_prefill_tokens": 16} | arguments
            stack.enter_context(get_context().override_server_args(**said))
            stack.enter_context(get_parallel().override(**ranks, **place))
        else:
            import vllm_standin

            for name, value in place.items():
                patch.setattr(PARALLEL, name, value)
            for name, value in arguments.items():
                patch.setattr(ARGUMENTS, name, value)
            patch.setattr(vllm_standin.RANK, "rank", rank)
            patch.setattr(vllm_standin.RANK, "size", size)
        yield


def experts(config, sizes, top_k, prefix="m.experts", **options):
    """Fused experts of (experts, hidden, inter)."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    count, hidden, inter = sizes
    said = dict(num_experts=count, hidden_size=hidden, intermediate_size=inter, layer_id=0, top_k=top_k)
    return FusedMoE(**said, params_dtype=BF16, quant_config=config, prefix=prefix, **options)


class Location:
    """What SGLang knows of where experts are; physical: which of the model's each of all ranks' is."""

    def __init__(self, physical):
        self.physical, self.num_logical_experts = physical, 1 + max(physical)

    def logical_to_all_physical(self, layer, expert):
        assert layer == 0
        return [number for number, logical in enumerate(self.physical) if logical == expert]


def dispatched(form, **members):
    """What a dispatcher gives."""
    return SimpleNamespace(format=SimpleNamespace(value=form), **members)
