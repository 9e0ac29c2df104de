"""Experts' tokens sent between data-parallel ranks by jitgemm's kernels over NVLink, where vLLM would gather all.

vLLM's runner asks a method whether it exchanges tokens itself, and then gives it this rank's tokens alone.
"""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.kernel.formats import ceil_div
from jitgemm.moe.kernel import MAX_RANKS
from jitgemm.nn.layers.sharding import ExpertSharding


def sharding_of(moe: Any, expert_map: torch.Tensor | None, elastic: bool, logger: Any) -> ExpertSharding | None:
    """How kernels exchange the tokens of a layer's ranks; None where all ranks have the same tokens, or, with a
    warning, where vLLM exchanges them.

    Args:
        moe: vLLM's FusedMoEConfig.
        expert_map: int32 [physical experts]: this rank's number of each, -1 for others'.
        elastic: whether ranks may come and go (--enable-elastic-ep).
        logger: vLLM's.
    """
    ranks = moe.moe_parallel_config
    if ranks.dp_size == 1 and not ranks.is_sequence_parallel:
        return None
    if ranks.use_ep:
        from vllm.distributed import get_ep_group

        group = get_ep_group()
        split = ExpertSharding(
            group.device_group, ranks.ep_rank, ranks.ep_size, moe.num_local_experts, exchanges=True,
            max_tokens=ceil_div(moe.max_num_tokens, ranks.sp_size), nvlink=True,
        )  # fmt: skip
        reason = reason_against(moe, split, expert_map, elastic, group.device_communicator.all2all_manager)
        if reason is None:
            return split
    else:
        reason = "--enable-expert-parallel, got experts that all ranks share"
    logger.warning_once('jitgemm: vLLM exchanges tokens of experts, as exchange="nvlink" expects %s', reason)
    return None


def reason_against(
    moe: Any, split: ExpertSharding, expert_map: torch.Tensor | None, elastic: bool, manager: Any
) -> str | None:
    """What kernels would need to exchange tokens so, and what came; None if nothing is wrong.

    Args:
        moe, expert_map, elastic: of `sharding_of`.
        manager: vLLM's all-to-all of the ranks, which knows their hosts.
    """
    ranks, device = moe.moe_parallel_config, torch.device("cpu")
    linear = expert_map is not None and torch.equal(expert_map.to(device), split.expert_map(device))
    wrong = {
        f"all2all_backend allgather_reducescatter, got {ranks.all2all_backend}": not ranks.use_ag_rs_all2all_kernels,
        f"other tokens on each rank, got prefill_context_parallel_size={ranks.pcp_size}": ranks.pcp_size > 1,
        "other tokens on each rank, got tensor-parallel ranks that have the same": (
            not ranks.is_sequence_parallel and ranks.ep_size != ranks.dp_size
        ),
        f"at most {MAX_RANKS} ranks, got {split.world}": split.world > MAX_RANKS,
        "ranks of one host, got several hosts": manager.internode,
        "as many experts on each rank, in their order, got another expert placement": not linear,
        "a fixed number of ranks, got --enable-elastic-ep": elastic,
        "experts without adapters, got --enable-lora": moe.is_lora_enabled,
    }
    return next((text for text, holds in wrong.items() if holds), None)
