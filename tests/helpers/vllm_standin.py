"""A stand-in for vLLM where it is not installed: what jitgemm.vllm derives from and calls, and layers that use it.

It stands for one version, the newest unless JITGEMM_TEST_VLLM names another. The base classes are made from that one's
signatures in vllm_signatures.json (scripts/vllm_signatures.py): a method that vLLM lacks cannot be called, an abstract
one must be there; functions and parameters take what vLLM's take. What those do, and layers, are written here, as
little of them as cutting and joining a layer's tensors takes. The tests that use it also run against the real package
(scripts/vllm_contract.sh), which shows that both do the same.
"""

from __future__ import annotations

import abc
import enum
import functools
import inspect
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

LAYERS = "vllm.model_executor.layers."
VERSIONS = json.loads((Path(__file__).parent / "vllm_signatures.json").read_text())
VERSION = os.environ.get("JITGEMM_TEST_VLLM", max(VERSIONS))
SIGNATURES = VERSIONS[VERSION]
RANK = SimpleNamespace(rank=0, size=1)
"""This process's place among the ranks of tensor parallelism; tests set it."""


def base(path: str, *parents: type) -> type:
    """A class with vLLM's methods, none of which does anything but refuse."""
    members: dict[str, Any] = {}
    for name, described in SIGNATURES["bases"][path].items():
        if any(hasattr(parent, name) for parent in parents) and name != "__init__" and "abstract" not in described:
            continue
        head, _, rest = described.partition("(")
        scope: dict[str, Any] = {}
        refusal = "pass" if name == "__init__" or name in _QUIET else f"raise NotImplementedError('{name}')"
        exec(f"def {name}({rest[:-1]}): {refusal}", scope)
        kind = {"staticmethod": staticmethod, "classmethod": classmethod, "property": property}.get(head.split()[-1])
        function = abc.abstractmethod(scope[name]) if "abstract" in head else scope[name]
        members[name] = kind(function) if kind else function
    return abc.ABCMeta(path.partition(":")[2], parents, members)


def takes(described: str, function: Any) -> Any:
    """The function, for calls that vLLM's, with these parameters, could be called with."""
    scope: dict[str, Any] = {}
    exec(f"def theirs({described}): pass", scope)
    signature = inspect.signature(scope["theirs"])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return function(*args, **kwargs)

    return call


_QUIET = ("apply_vllm_mapper", "maybe_update_config", "process_weights_after_loading", "override_quantization_method")


class Parameter(torch.nn.Parameter):
    def __new__(cls, data: torch.Tensor, **_: Any):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, weight_loader, output_dim=None):
        self.weight_loader, self.output_dim = weight_loader, output_dim

    def fill(self, loaded, start, count, rank):
        """Rows start.. of this parameter from a rank's part of a loaded tensor."""
        assert self.output_dim == 0
        self.data[start : start + count] = loaded[rank * count : (rank + 1) * count]


class LinearBase(torch.nn.Module):
    def __init__(self, input_size, output_size, columns, widths, bias, params_dtype, quant_config, prefix):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition, self.output_partition_sizes = columns, widths
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.tp_rank, self.tp_size = RANK.rank, RANK.size
        self.quant_method = quant_config.get_quant_method(self, prefix)
        second = type(self.quant_method).__name__ in SUPPORTED and hasattr(self, "weight_loader_v2")
        self.quant_method.create_weights(
            self, columns, widths, input_size, output_size, self.params_dtype,
            weight_loader=self.weight_loader_v2 if second else self.weight_loader,
        )  # fmt: skip
        self.bias = torch.nn.Parameter(torch.zeros(sum(widths), dtype=self.params_dtype), False) if bias else None

    def weight_loader(self, param, loaded_weight):
        raise AssertionError("the first loader, which knows no parameter classes")


class ReplicatedLinear(LinearBase):
    def __init__(self, input_size, output_size, bias=True, params_dtype=None, quant_config=None, prefix=""):
        super().__init__(input_size, output_size, input_size, [output_size], bias, params_dtype, quant_config, prefix)

    def weight_loader(self, param, loaded_weight):
        param.data.copy_(loaded_weight.reshape(param.shape))


class MergedColumnParallelLinear(LinearBase):
    def __init__(self, input_size, output_sizes, bias=True, params_dtype=None, quant_config=None, prefix=""):
        widths = [size // RANK.size for size in output_sizes]
        sizes = input_size, sum(output_sizes), input_size
        super().__init__(*sizes, widths, bias, params_dtype, quant_config, prefix)

    def weight_loader_v2(self, param, loaded_weight, loaded_shard_id=None):
        start, widths = 0, self.output_partition_sizes
        for part, width in enumerate(widths) if loaded_shard_id is None else ():  # joined in the file
            self.weight_loader_v2(param, loaded_weight[start : start + width * RANK.size], part)
            start += width * RANK.size
        if loaded_shard_id is not None:
            param.fill(loaded_weight, sum(widths[:loaded_shard_id]), widths[loaded_shard_id], RANK.rank)


class ColumnParallelLinear(MergedColumnParallelLinear):
    def __init__(self, input_size, output_size, **options):
        super().__init__(input_size, [output_size], **options)


class QKVParallelLinear(LinearBase):
    def __init__(
        self, hidden_size, head_size, total_num_heads, total_num_kv_heads, bias=True, params_dtype=None,
        quant_config=None, prefix="",
    ):  # fmt: skip
        heads, kv = total_num_heads // RANK.size, max(1, total_num_kv_heads // RANK.size)
        self._kv_rank = RANK.rank * total_num_kv_heads // RANK.size
        widths = [heads * head_size, kv * head_size, kv * head_size]
        sizes = hidden_size, sum(widths) * RANK.size, hidden_size
        super().__init__(*sizes, widths, bias, params_dtype, quant_config, prefix)

    def weight_loader_v2(self, param, loaded_weight, loaded_shard_id=None):
        part = "qkv".index(loaded_shard_id)
        start, count = sum(self.output_partition_sizes[:part]), self.output_partition_sizes[part]
        param.fill(loaded_weight, start, count, self._kv_rank if part else RANK.rank)


def tensor_model_parallel_all_reduce(input_):
    raise AssertionError("one rank of several, without a process group")


class RowParallelLinear(LinearBase):
    skip_bias_add = False

    def __init__(self, input_size, output_size, bias=True, params_dtype=None, quant_config=None, prefix=""):
        sizes = input_size, output_size, input_size // RANK.size
        super().__init__(*sizes, [output_size], bias, params_dtype, quant_config, prefix)

    def weight_loader_v2(self, param, loaded_weight):
        param.data.copy_(loaded_weight)

    def forward(self, input_):
        output = self.quant_method.apply(self, input_, None if self.tp_rank > 0 or self.skip_bias_add else self.bias)
        bias = self.bias if self.skip_bias_add else None
        return (output if self.tp_size == 1 else tensor_model_parallel_all_reduce(output)), bias


SUPPORTED: list[str] = []


class RoutedExperts(torch.nn.Module):
    """Its own loader is called for no parameter of jitgemm's."""

    def __init__(
        self, layer_name, params_dtype, moe_config, quant_config, expert_map_manager,
        apply_router_weight_on_input=False, swiglu_limit=None, swiglu_alpha=None,
    ):  # fmt: skip
        super().__init__()
        self.moe_config, self.params_dtype, self.hidden_size = moe_config, params_dtype, moe_config.hidden_dim
        self.intermediate_size_per_partition = moe_config.intermediate_size_per_partition
        self.activation, self.top_k = moe_config.activation, moe_config.experts_per_token
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.swiglu_limit, self.swiglu_alpha = swiglu_limit, swiglu_alpha
        self.expert_map = expert_map_manager.expert_map
        self.global_num_experts = moe_config.num_experts
        self.quant_method = quant_config.get_quant_method(self, layer_name)
        if hasattr(self.quant_method, "maybe_roundup_sizes"):
            sizes = self.hidden_size, self.intermediate_size_per_partition
            self.quant_method.maybe_roundup_sizes(*sizes, torch.bfloat16, moe_config.moe_parallel_config)
        self.quant_method.create_weights(
            layer=self, num_experts=moe_config.num_local_experts, hidden_size=self.hidden_size,
            intermediate_size_per_partition=self.intermediate_size_per_partition, params_dtype=params_dtype,
            weight_loader=self.weight_loader, global_num_experts=moe_config.num_experts,
        )  # fmt: skip

    def _expert_routing_tables(self):
        return None

    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        raise AssertionError("the layer's own loader")


class MoEActivation(enum.Enum):
    SILU = "silu"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SITU = "situ"
    SWIGLUSTEP = "swiglustep"
    RELU2_NO_MUL = "relu2_no_mul"


class FusedMoEKernel:
    """What exchanges tokens around experts, and these."""

    def __init__(self, prepare_finalize, fused_experts):
        assert prepare_finalize.activation_format == fused_experts.activation_format()
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts

    def apply(
        self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        apply_router_weight_on_input, shared_experts=None, shared_experts_input=None,
    ):  # fmt: skip
        experts, exchange, config = self.fused_experts, self.prepare_finalize, self.fused_experts.quant_config
        given = hidden_states, topk_weights, topk_ids, global_num_experts, expert_map, apply_router_weight_on_input
        x, scale, counts, _, _ = exchange.prepare(*given, config, experts.expects_unquantized_inputs)
        _, m, n, k, top_k = experts.moe_problem_size(x, w1, w2, topk_ids)
        shapes = experts.workspace_shapes(m, n, k, top_k, global_num_experts, len(w1), counts, activation)
        made = [torch.empty(shape, dtype=hidden_states.dtype) for shape in shapes]
        experts.apply(
            made[2], x, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, scale, None,
            made[0], made[1], counts, apply_router_weight_on_input,
        )  # fmt: skip
        output, reduce = torch.empty_like(hidden_states), experts.finalize_weight_and_reduce_impl()
        exchange.finalize(output, made[2], topk_weights, topk_ids, apply_router_weight_on_input, reduce)
        return output


class NoExchange:
    """One rank's tokens as they are."""

    activation_format = property(lambda self: FusedMoEActivationFormat.Standard)

    def prepare(self, a1, topk_weights, topk_ids, num_experts, expert_map, on_input, quant_config, defer):
        return a1 * topk_weights.to(a1.dtype) if on_input else a1, None, None, None, None

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input, reduce):
        assert type(reduce).__name__ == "TopKWeightAndReduceNoOP"
        output.copy_(fused_expert_output)


def _adapting(part: str) -> Any:
    """The mixin's method that hands what it is given, and what vLLM's layer of adapters has set, to vLLM's kernel."""
    owner = LAYERS + "fused_moe.experts.lora_experts_mixin:LoRAExpertsMixin"
    described = SIGNATURES["bases"][owner][f"apply_{part}_lora"].partition("(")[2][:-1]
    names = [each.partition("=")[0] for each in described.partition("*, ")[2].split(", ")]

    def apply(self, lora_context, **given):
        stacked = (getattr(lora_context, f"{part}_lora_{each}_stacked") for each in "ab")
        y, x, *others = (given[name] for name in names if name in given)
        return getattr(lora_context.punica_wrapper, f"add_lora_{part}")(y, x, *stacked, *others)

    return takes(described, apply)


class LoRAExpertsMixin:
    _lora_context: Any = None
    apply_w13_lora, apply_w2_lora = _adapting("w13"), _adapting("w2")

    def set_lora_context(self, ctx):
        self._lora_context = ctx

    @staticmethod
    def supports_lora():
        return True


class BatchedPrepareAndFinalize:
    """One rank's tokens, sorted by those of its experts, and their results weighed and summed."""

    def __init__(self, max_num_tokens, num_local_experts, num_dispatchers, rank):
        self.max_num_tokens, self.experts, self.dispatchers, self.rank = (
            max_num_tokens, num_local_experts, num_dispatchers, rank,
        )  # fmt: skip
        self.activation_format = FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self):
        return self.max_num_tokens

    def num_dispatchers(self):
        return self.dispatchers

    def prepare(self, a1, topk_weights, topk_ids, num_experts, expert_map, on_input, quant_config, defer):
        assert not defer and quant_config is FUSED_MOE_UNQUANTIZED_CONFIG
        found = a1.new_zeros(self.experts, self.max_num_tokens, a1.shape[1])
        counts = torch.zeros(num_experts, dtype=torch.int32)  # as long as vLLM's
        for e in range(self.experts):
            mine = a1[(topk_ids == e + self.rank * self.experts).any(1)]
            found[e, : len(mine)], counts[e] = mine, len(mine)
        return found, None, SimpleNamespace(expert_num_tokens=counts), None, None

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input, reduce):
        assert type(reduce).__name__ == "TopKWeightAndReduceDelegate"
        output.zero_()
        for e in range(self.experts):
            chosen = topk_ids == e + self.rank * self.experts
            tokens = chosen.any(1)
            weights = (topk_weights * chosen).sum(1)[tokens, None]
            output[tokens] += fused_expert_output[e, : int(tokens.sum())] * weights.to(output.dtype)


FusedMoEActivationFormat = enum.Enum("FusedMoEActivationFormat", ("Standard", "BatchedExperts"))
FUSED_MOE_UNQUANTIZED_CONFIG = object()


class Unquantized:
    """What stays in its type, for linears and experts."""

    def __init__(self, moe=None):
        self.moe = moe

    def create_weights(self, layer, *args, **kwargs):
        pass


def install() -> dict[str, ModuleType]:
    """Puts the stand-in where `import vllm` finds it. Returns its modules, to be taken away again."""
    configs: dict[str, type] = {}
    method = base(LAYERS + "quantization.base_config:QuantizeMethodBase")
    linear_method = base(LAYERS + "linear:LinearMethodBase", method)
    moe_method = base(LAYERS + "fused_moe:FusedMoEMethodBase", method)
    moe_method.__init__ = lambda self, moe: self.__dict__.update(moe=moe, moe_kernel=None, moe_quant_config=None)
    moe_method.maybe_roundup_sizes = lambda self, hidden, inter, dtype, parallel: (
        -(-hidden // parallel.pads) * parallel.pads,
        inter,
    )
    experts = base(LAYERS + "fused_moe:FusedMoEExpertsModular")

    def init_experts(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
        assert (max_num_tokens is not None) == (self.activation_format().name == "BatchedExperts")
        self.quant_config, self.max_num_tokens, self.num_dispatchers = quant_config, max_num_tokens, num_dispatchers

    experts.__init__ = init_experts
    config = base(LAYERS + "quantization.base_config:QuantizationConfig")
    config.__init__ = lambda self: setattr(self, "packed_modules_mapping", {})

    def register(quantization):
        return lambda cls: configs.setdefault(quantization, cls) and cls

    def get(quantization):
        if quantization not in configs:
            raise ValueError(quantization)
        return configs[quantization]

    def supported(cls):
        SUPPORTED.append(cls.__name__)
        return cls

    def logger(name):
        found = logging.getLogger(name)
        found.warning_once, found.info_once = found.warning, found.info
        return found

    kinds: dict[str, type] = {}
    for path in SIGNATURES["classes"]:
        module, _, name = path.partition(":")
        if module.endswith("parameter"):
            kind = kinds.setdefault(name, type(name, (Parameter,), {}))
            described = SIGNATURES["classes"][path]["__init__"].partition("(")[2][:-1]
            kind.__init__ = takes(described, kind.__init__)
    unquantized = {name: type(name, (Unquantized,), {}) for name in ("Linear", "FusedMoE")}
    linears = (
        LinearBase, ReplicatedLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear,
        RowParallelLinear,
    )  # fmt: skip
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": f"{VERSION}, a stand-in"},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logger},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: None},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.transformers_utils.config": {"get_safetensors_params_metadata": lambda model, *, revision=None: {}},
        "vllm.model_executor.parameter": kinds,
        "vllm.model_executor.model_loader.reload.meta": {"SKIP_MODULES": set()},
        LAYERS + "quantization": {"register_quantization_config": register, "get_quantization_config": get},
        LAYERS + "quantization.base_config": {"QuantizationConfig": config, "QuantizeMethodBase": method},
        LAYERS + "linear": {
            **{kind.__name__: kind for kind in linears},
            "LinearMethodBase": linear_method,
            "UnquantizedLinearMethod": unquantized["Linear"],
            "register_weight_loader_v2_supported_method": supported,
        },
        LAYERS + "fused_moe": {
            "FusedMoEActivationFormat": FusedMoEActivationFormat,
            "FusedMoEExpertsModular": experts,
            "FusedMoEMethodBase": moe_method,
            "MoEActivation": MoEActivation,
            "RoutedExperts": RoutedExperts,
            "UnquantizedFusedMoEMethod": unquantized["FusedMoE"],
        },
        LAYERS + "fused_moe.config": {
            "FUSED_MOE_UNQUANTIZED_CONFIG": FUSED_MOE_UNQUANTIZED_CONFIG,
            "fp8_w8a8_moe_quant_config": lambda w1_scale, w2_scale, *, block_shape: SimpleNamespace(
                quant_dtype=torch.float8_e4m3fn, block_shape=block_shape
            ),
        },
        LAYERS + "fused_moe.all2all_utils": {
            "maybe_make_prepare_finalize": lambda moe, quant_config, tables=None, allow_new_interface=False: (
                NoExchange() if allow_new_interface else None
            )
        },
        LAYERS + "fused_moe.modular_kernel": {"FusedMoEKernel": FusedMoEKernel},
        LAYERS + "fused_moe.experts.lora_experts_mixin": {"LoRAExpertsMixin": LoRAExpertsMixin},
        LAYERS + "fused_moe.prepare_finalize.batched": {"BatchedPrepareAndFinalize": BatchedPrepareAndFinalize},
        LAYERS + "fused_moe.topk_weight_and_reduce": {
            name: type(name, (), {}) for name in ("TopKWeightAndReduceNoOP", "TopKWeightAndReduceDelegate")
        },
    }
    for path, described in SIGNATURES["functions"].items():
        module, _, name = path.partition(":")
        members, name = (vars(FusedMoEKernel), "apply") if "." in name else (modules[module], name)
        if inspect.isfunction(members[name]):
            function = takes(described, members[name])
            setattr(FusedMoEKernel, name, function) if name == "apply" else members.update({name: function})
    made: dict[str, ModuleType] = {}
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = sys.modules.setdefault(path, ModuleType(path))
            module.__path__, made[path] = [], module
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        for member, value in members.items():
            setattr(sys.modules[name], member, value)
    return made
