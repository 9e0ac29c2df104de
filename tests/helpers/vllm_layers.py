"""vLLM's layers for tests, on any rank without a process group: the real package's where it is, else the stand-in's."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

REAL = importlib.util.find_spec("vllm") is not None
STANDIN = {}
if not REAL:
    import vllm_standin

    STANDIN = vllm_standin.install()
elif not any(Path(importlib.util.find_spec("vllm").origin).parent.glob("*.so")):
    # Without its libraries, as scripts/vllm_contract.sh has it: 0.26's layers look this up where they are made, and
    # compute in PyTorch on a CPU.
    LIBRARY = torch.library.Library("_C", "FRAGMENT")
    LIBRARY.define("silu_and_mul(Tensor! out, Tensor input) -> ()")


def show() -> None:
    """Puts the stand-in, if it is used, where imports find it: what imports this module has it so."""
    sys.modules.update(STANDIN)


def hide() -> None:
    """Takes it away, for tests of others."""
    for name in STANDIN:
        sys.modules.pop(name, None)


@contextmanager
def rank(number: int = 0, size: int = 1, group: Any = None):
    """Layers that are made and loaded inside are those of a rank of tensor parallelism.

    group: the ranks' process group, with which layers that are called inside sum up.
    """
    import pytest

    def summed(out):
        torch.distributed.all_reduce(out, group=group)
        return out

    with pytest.MonkeyPatch.context() as patch:
        if group is not None:
            linears = "vllm.model_executor.layers.linear" if REAL else "vllm_standin"
            patch.setattr(f"{linears}.tensor_model_parallel_all_reduce", summed)
            place = SimpleNamespace(device_group=group)
            patch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: place)
        if REAL:
            from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

            for module in ("vllm.model_executor.layers.linear", "vllm.model_executor.parameter"):
                patch.setattr(f"{module}.get_tensor_model_parallel_rank", lambda: number)
                patch.setattr(f"{module}.get_tensor_model_parallel_world_size", lambda: size)
            with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
                yield
        else:
            patch.setattr(vllm_standin.RANK, "rank", number)
            patch.setattr(vllm_standin.RANK, "size", size)
            yield


@dataclass
class ExpertMap:
    """Which experts a rank of expert parallelism has: of `count`, an equal share in their order."""

    count: int
    number: int = 0
    size: int = 1
    placement_strategy: str = "linear"
    expert_mask: Any = None
    routing_tables: Any = None

    @property
    def local_num_experts(self) -> int:
        return self.count // self.size

    def map_global_to_local(self, expert: int) -> int:
        local = expert - self.number * self.local_num_experts
        return local if 0 <= local < self.local_num_experts else -1

    @property
    def expert_map(self) -> torch.Tensor | None:
        if self.size == 1:
            return None
        return torch.tensor([self.map_global_to_local(e) for e in range(self.count)], dtype=torch.int32)


@contextmanager
def _platform_of_a_gpu():
    """Which experts without gates ask for."""
    import pytest
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_xpu", lambda self: True)
        yield


def experts(config: Any, name: str, sizes: tuple[int, int, int], top_k: int, **options: Any) -> torch.nn.Module:
    """Fused experts of (experts, hidden, inter); options: tp and ep = (rank, size), all2all, activation, eplb: so many
    redundant experts, more of the config of experts, others."""
    from vllm.model_executor.layers.fused_moe import MoEActivation, RoutedExperts

    count, hidden, inter = sizes
    (tp_rank, tp_size), (ep_rank, ep_size) = options.pop("tp", (0, 1)), options.pop("ep", (0, 1))
    activation, has_bias = options.pop("activation", "silu"), options.pop("has_bias", False)
    backend = options.pop("all2all", None)  # of as many data-parallel ranks as there are of experts
    pads, more, redundant = options.pop("pads", 1), options.pop("more", {}), options.pop("eplb", None)
    logical, count = count, count + (redundant or 0)
    manager = ExpertMap(count, ep_rank, ep_size)
    said: dict[str, Any] = dict(
        num_experts=count, experts_per_token=top_k, hidden_dim=hidden, intermediate_size=inter,
        num_local_experts=manager.local_num_experts, activation=MoEActivation(activation), has_bias=has_bias,
        num_logical_experts=logical, **({"is_lora_enabled": False} | more),
    )  # fmt: skip
    ranks: dict[str, Any] = dict(
        tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, dp_size=ep_size if backend else 1, enable_eplb=redundant is not None,
        all2all_backend=backend or "allgather_reducescatter",
    )  # fmt: skip
    if REAL:
        from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

        ungated = activation.endswith("_no_mul")
        if ungated and "ckpt_up_proj_name" in inspect.signature(RoutedExperts).parameters:
            options |= dict(ckpt_gate_proj_name="up_proj", ckpt_up_proj_name=None)
        ranks |= dict(ep_rank=ep_rank, dp_rank=ep_rank if backend else 0, use_ep=ep_size > 1)
        said |= dict(device="cpu", in_dtype=torch.bfloat16, routing_method=RoutingMethodType.Default)
        with _platform_of_a_gpu() if ungated else nullcontext():
            place = FusedMoEParallelConfig(**ranks, pcp_size=1, pcp_rank=0, sp_size=1)
            moe: Any = FusedMoEConfig(**said, moe_parallel_config=place)
    else:
        ranks |= dict(use_batched_activation_format=bool(backend), pads=pads, is_sequence_parallel=False)
        said |= dict(moe_parallel_config=SimpleNamespace(**ranks), intermediate_size_per_partition=inter // tp_size)
        moe = SimpleNamespace(**said)
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        if REAL and backend:  # whose package is not there
            owner = "vllm.model_executor.layers.fused_moe.all2all_utils.maybe_roundup_layer_hidden_size"
            patch.setattr(owner, lambda hidden, dtype, place: -(-hidden // pads) * pads)
        return RoutedExperts(name, torch.bfloat16, moe, config, expert_map_manager=manager, **options)
