"""The method of vLLM's fused experts: the checkpoint's tensors with the experts in front, packed once all are loaded.

vLLM routes; `jitgemm.fused_experts` does the rest, for the experts of this rank. Where data-parallel ranks exchange
tokens, it does so inside a modular kernel of vLLM; backends that sort them by expert (DeepEP low latency, NIXL) get
`fused_experts_masked`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.fused_moe import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.utils import set_weight_attrs

from jitgemm.activations.scheme import Gate
from jitgemm.checkpoint.canonical import pack_experts
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.layouts import PARTS
from jitgemm.checkpoint.reader import layer_header, read_header
from jitgemm.kernel.formats import STRIP_ROWS
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.vllm.layouts import BLOCK, Layout, TensorLayout, Touched, Unsupported
from jitgemm.vllm.linear import (
    CHILD,
    cut,
    require_exact,
    loaded,
    noted,
    of_dummies,
    put,
    quantise_while_loading,
    quantised,
    read_parts,
    taken,
    unloaded,
    written,
)

_GATES = {
    "silu": ("silu", "gate_up"),
    "gelu": ("gelu", "gate_up"),
    "gelu_tanh": ("gelu_tanh", "gate_up"),
    "swigluoai": ("swiglu_oai", "interleaved"),
    "swigluoai_uninterleave": ("swiglu_oai", "gate_up"),
}
"""vLLM's MoEActivation: jitgemm's kind and order."""
_SHARDS = {"w1": ("w13", "gate_proj"), "w3": ("w13", "up_proj"), "w2": ("w2", "down_proj")}
"""vLLM's names of an expert's layers: the parameter that holds them, and what most files call them."""
AT_ONCE = 16 << 20
"""Bytes of a checkpoint's codes that are packed at once, or those of one expert."""


class JitGemmMoEMethod(FusedMoEMethodBase):
    """Experts with packed weights, tokens quantised to 8 bits before each of the two GEMMs.

    Attributes:
        config: the model's `JitGemmConfig`.
        names: what the checkpoint calls the layers of its first expert; the first speaks for all.
        layout: how they are stored.
    """

    def __init__(self, config: Any, moe: Any, names: list[str], layout: Layout):
        super().__init__(moe)
        self.config, self.names, self.layout = config, names, layout
        self.sizes: dict[str, dict[str, int]] = {}
        self.touched: Touched | None = None
        self.dummies = False
        self.uses_meta_device = layout.format is None

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmMoEMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        moe = layer.moe_config
        sizes = moe.hidden_dim, moe.intermediate_size
        layout = cls.cut(config.layout(names, max(sizes), layer.params_dtype, True), moe)
        for k in sizes:
            config.check_readable(layout, names, k)
        if moe.has_bias:
            raise Unsupported("expected experts without biases, got some with")
        return cls(config, moe, names, layout)

    @staticmethod
    def cut(layout: Layout, moe: Any) -> Layout:
        """The layout for a rank's part. Raises Unsupported for one that jitgemm cannot serve."""
        if moe.activation.value not in _GATES:
            raise Unsupported(f"expected an activation of {', '.join(_GATES)}, got {moe.activation.value}")
        hidden, inter, whole = moe.hidden_dim, moe.intermediate_size_per_partition, moe.intermediate_size
        return layout.cut([inter, inter], 2 * whole, hidden, hidden).cut([hidden], hidden, inter, whole)

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.dummies, moe = of_dummies(), self.moe
        inter, whole = intermediate_size_per_partition, moe.intermediate_size
        self.touched = self.layout.touched(inter, whole, moe.moe_parallel_config.tp_rank)
        k2 = inter if self.touched is None else self.touched.stop - self.touched.start
        for part, n, k, parts, rows in (
            ("w13", 2 * inter, hidden_size, 2, whole),
            ("w2", hidden_size, k2, 1, hidden_size),
        ):
            sizes = self.sizes[part] = self.layout.sizes(n, k, parts)
            touched = self.touched if part == "w2" else None
            for name, each in self.layout.tensors.items():
                with torch.device("meta") if self.uses_meta_device else nullcontext():
                    data = unloaded(name, _of_expert(name, each, part), sizes)
                data = data[:0] if name.endswith("g_idx") else data  # which is looked at, not kept
                data = data.expand(num_experts, *data.shape).clone()
                param = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(self.layout.parameters(part + "_")[name], param)
                transposed = (each.axis("k", "G", "1") or 0) < (each.axis("n") or 0)
                said = {"is_transposed": transposed, "quant_method": self.layout.scheme}
                load = by_name(extra_weight_attrs["weight_loader"], self.layout.called.get(name, name), name)
                load = cut(load, each, self.layout.group_size, touched, whole // inter, rows)
                loader = self._in_order if name.endswith("g_idx") else require_exact(load) if "scale" in name else load
                shared = part == "w13" and (name == "weight_shape" or data.dim() == 1)
                said["weight_loader"] = noted(count_shared_once(loader) if shared else loader, expert_of)
                set_weight_attrs(param, extra_weight_attrs | said)
        self.config.warmer.expect(layer, params_dtype)
        if self.uses_meta_device:
            quantise_while_loading(layer)

    def _in_order(self, param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        """A loader of the group of each column, which takes columns that stand in their order alone."""
        k = loaded_weight.shape[-1]
        order = torch.arange(k, device=loaded_weight.device) // (self.layout.group_size or k)
        if bool((loaded_weight != order).any()) and not bool((loaded_weight == -1).any()):
            raise ValueError(
                f"g_idx: expected columns in the input's order, got an activation order of experts such as "
                f"{self.names[0]}, which share their quantised input"
            )
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        names = {part: self.layout.parameters(part + "_") for part in ("w13", "w2")}
        params = {part: loaded(layer, names[part]) for part in names}
        if params["w13"] is None or params["w2"] is None:
            return
        self._check_written(layer, params)
        tensors = {part: taken(layer, found, names[part]) for part, found in params.items()}
        inter = layer.intermediate_size_per_partition
        w13, activation = self._packed(tensors.pop("w13"), "w13", [inter, inter])  # which goes before w2 is read
        w2, _ = self._packed(tensors.pop("w2"), "w2", [layer.hidden_size])
        self.install(layer, packed_experts(w13, w2, gate=self._gate(layer), activation=activation, top_k=layer.top_k))

    def install(self, layer: torch.nn.Module, module: PackedExperts) -> None:
        """Gives a layer its packed experts."""
        module.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        module.batched = self.moe.moe_parallel_config.use_batched_activation_format
        put(layer, module)
        if self.moe_kernel is None:
            self.moe_kernel = self._modular_kernel(layer)
        self.config.warmer.packed(layer, getattr(layer, CHILD))

    def _check_written(self, layer: torch.nn.Module, params: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises ValueError for a tensor that no file holds of one of this rank's experts."""
        found = {part: {suffix: written(param) for suffix, param in each.items()} for part, each in params.items()}
        if self.dummies and not any(each for part in found.values() for each in part.values()):
            return
        places, count = layer.expert_map, len(next(iter(params["w2"].values())))
        mine = range(count) if places is None else [e for e, place in enumerate(places.tolist()) if place >= 0]
        needed = [suffix for suffix in self.layout.needed if suffix != "input_scale"]  # which experts do not use
        for e, (shard, (part, proj)) in itertools.product(mine, _SHARDS.items()):
            lacking = [suffix for suffix in needed if not found[part][suffix] & {(shard, e), (shard, None)}]
            if lacking:
                raise ValueError(
                    f"{', '.join(f'{part}_{suffix}' for suffix in lacking)}: expected numbers for each of this rank's "
                    f"{count} experts, found none in the files for number {e}'s {proj} (layer of {self.names[0]})"
                )

    def _packed(self, mine: dict[str, torch.Tensor], part: str, widths: list[int]) -> tuple[Any, str]:
        """w13 or w2 of all experts, and what it multiplies; widths: rows of the layers that it joins."""
        activation = self.config.activation(self.layout)
        if self.layout.format is None:
            activation = activation or "e4m3"
            return quantised(mine["weight"], activation, self.config.options), activation
        first, name = next(iter(mine.values())), self.names[0]
        for suffix in (each for each in mine if each.endswith("g_idx")):
            order = unloaded(suffix, self.layout.tensors[suffix], self.sizes[part]).to(first.device)
            mine[suffix] = order.expand(first.shape[0], -1)
        if "input_scale" in mine:
            mine["input_scale"].fill_(1)  # unused
        together = _together(mine, self.layout, sum(widths))
        config = self.layout.config_of(self.config.checkpoint)

        def checkpoint(e: int) -> Checkpoint:
            rows = {suffix: _rows(tensor[e : e + together], self.layout, suffix) for suffix, tensor in mine.items()}
            found = read_parts(rows, self.layout, widths * together)
            return Checkpoint({f"{name}.{suffix}": tensor for suffix, tensor in found.items()}, config)

        def read(e: int) -> Any:
            opened = checkpoint(e)
            weight = read_header(opened, layer_header(opened, name, format=self.layout.format), first.device)
            return weight if part == "w13" or self.touched is None else weight.columns(*self.touched.own)

        layer = LayerSource.find(checkpoint(0), name, activation, self.layout.format)
        given = first.shape[0], read, layer.lhs_dtype, layer.bits, together
        return pack_experts(*given), layer.activation

    def _gate(self, layer: torch.nn.Module) -> Gate:
        kind, order = _GATES[layer.activation.value]
        limit, alpha = (getattr(layer, name, None) for name in ("swiglu_limit", "swiglu_alpha"))
        default = 1.702 if kind == "swiglu_oai" else 1.0
        return Gate(kind, order, math.inf if limit is None else limit, default if alpha is None else alpha)

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """The same sizes. Raises ValueError where the all-to-all backend would pad tokens."""
        given = hidden_size, intermediate_size_per_partition
        found = super().maybe_roundup_sizes(*given, act_dtype, moe_parallel_config)
        if found != given:
            raise ValueError(
                f"all2all_backend: expected one for tokens of {hidden_size} values, got "
                f"{moe_parallel_config.all2all_backend}, which pads them to {found[0]}"
            )
        return found

    def _modular_kernel(self, layer: torch.nn.Module) -> Any:
        """What exchanges tokens around the experts; None where vLLM's runner does, or nobody."""
        from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

        backend = self.moe.moe_parallel_config.all2all_backend
        if backend in ("passthrough", "moonep"):
            raise ValueError(f"all2all_backend: expected one that exchanges tokens around the experts, got {backend}")
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        tables = layer._expert_routing_tables()
        exchange = maybe_make_prepare_finalize(self.moe, self.moe_quant_config, tables)
        if exchange is None:
            return None
        given = getattr(layer, CHILD), self.moe, self.moe_quant_config
        if exchange.activation_format == FusedMoEActivationFormat.Standard:
            return FusedMoEKernel(exchange, JitGemmExperts(*given))
        batch = exchange.max_num_tokens_per_rank(), exchange.num_dispatchers()
        return FusedMoEKernel(exchange, JitGemmBatchedExperts(*given, *batch))

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
        """What a modular kernel is told to quantise before the experts: e4m3 by blocks of 128 k, else nothing.

        And only for backends that sort tokens by expert, which send them so.
        """
        from vllm.model_executor.layers.fused_moe import config

        module = getattr(layer, CHILD)
        if module.batched and module.activation == "e4m3_block":
            return config.fp8_w8a8_moe_quant_config(None, None, block_shape=[BLOCK, BLOCK])
        return config.FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        module = getattr(layer, CHILD)
        if self.moe_kernel is not None:
            return self.moe_kernel.apply(
                x,
                module.w13.blocks,
                module.w2.blocks,
                topk_weights,
                topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
        if layer.apply_router_weight_on_input:
            x, topk_weights = _weighted(x, topk_weights)
        return module.run(x, topk_ids, topk_weights, expert_map=layer.expert_map)


def _together(tensors: dict[str, torch.Tensor], layout: Layout, n: int) -> int:
    """How many experts are packed at a time: kernels that pack one take less time than Python does to launch them."""
    if n % (BLOCK if layout.scheme == "block" else STRIP_ROWS):
        return 1
    codes = next(iter(tensors.values()))
    experts, most = len(codes), AT_ONCE // codes[0].nbytes
    return max(each for each in range(1, experts + 1) if experts % each == 0 and each <= max(1, most))


def _rows(tensor: torch.Tensor, layout: Layout, suffix: str) -> torch.Tensor:
    """Tensors [experts, ...] as one of all their rows; as the first where rows do not count."""
    if layout.tensors[suffix].dims == (PARTS,):
        return tensor.flatten()
    axis = layout.tensors[suffix].axis("n")
    return tensor[0] if axis is None else tensor.movedim(0, axis).flatten(axis, axis + 1)


class JitGemmExperts(FusedMoEExpertsModular):
    """The experts of a layer as a modular kernel of vLLM: tokens in the standard format, weighed and summed."""

    def __init__(self, module: PackedExperts, moe_config: Any, quant_config: Any, *batch: int):
        super().__init__(moe_config, quant_config, *batch)
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
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in _GATES

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        module = self.module
        return module.num_experts, a1.shape[-2], module.w13.weight.n, module.hidden_dim, topk_ids.shape[1]

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        batched = self.activation_format() == FusedMoEActivationFormat.BatchedExperts
        experts = (self.module.num_experts,) if batched else ()
        return (0,), (0,), (*experts, M, K)  # what is in between comes from PyTorch's allocator

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        if self.activation_format() == FusedMoEActivationFormat.BatchedExperts:
            x = hidden_states if a1q_scale is None else (hidden_states, a1q_scale)
            live = expert_tokens_meta.expert_num_tokens[: self.module.num_experts].to(torch.int32)
            # As many tokens of every other rank: a CUDA graph is captured for its own number alone.
            expected = topk_ids.numel() * self.num_dispatchers / global_num_experts
            self.module.run_batched(x, output, live, min(expected, hidden_states.shape[1]))
            return
        if apply_router_weight_on_input:  # which vLLM has done
            topk_weights = torch.ones_like(topk_weights)
        self.module.run(hidden_states, topk_ids, topk_weights, expert_map=expert_map, out=output)


class JitGemmBatchedExperts(JitGemmExperts):
    """The same for tokens sorted by expert, [experts, max_m, hidden]; who sent them weighs and sums.

    They come in the model's type, or as e4m3 with a scale for each token and 128 k.
    """

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False  # DeepEP's exchange refuses to put off what its config does not ask for

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.use_batched_activation_format

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceDelegate:
        return TopKWeightAndReduceDelegate()


def expert_of(
    loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
) -> frozenset[tuple[str, int | None]]:
    """Which expert's layer vLLM's loader is told to write: (shard, expert), None for all experts at once."""
    return frozenset({(shard_id, None if loaded_weight.dim() == 3 else expert_id)})


def count_shared_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """A loader of what w1 and w3 share, where vLLM counts numbers to pack the layer once it has all."""

    @wraps(load)
    def counted(param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if param.is_meta and "w3" in (*args, *kwargs.values()):
            return True
        return load(param, loaded_weight, *args, **kwargs)

    return counted


def by_name(load: Callable[..., Any], called: str, name: str) -> Callable[..., Any]:
    """vLLM's loader, which goes by names, told its own name of a parameter that is called otherwise."""
    if called == name:
        return load

    @wraps(load)
    def loads(param: Any, loaded_weight: torch.Tensor, weight_name: str, *args: Any, **kwargs: Any) -> Any:
        return load(param, loaded_weight, weight_name.replace(called, name), *args, **kwargs)

    return loads


def _weighted(x: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens times their weight, which then is 1. Raises ValueError for more than one expert of a token."""
    if topk_weights.shape[1] != 1:
        raise ValueError(
            f"topk_weights: expected one expert of a token to weigh the input, got {topk_weights.shape[1]}"
        )
    return x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)


def _of_expert(name: str, layout: TensorLayout, part: str) -> TensorLayout:
    """vLLM loads one number of an expert's input scale, and one of w2's scale of the whole weight."""
    single = layout.dims == (PARTS,) and (name == "input_scale" or part == "w2")
    return TensorLayout(layout.dtypes, ()) if single else layout
