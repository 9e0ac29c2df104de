"""Who sends experts' tokens between vLLM's ranks; on stand-ins, or on the real vLLM. `test_vllm_models.py` sends some."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from engines import EXPERTS, load_experts, process, vllm
from ranks import needs_gpu, two_ranks
from served_layers import CONFIGS, expert_tensors, routed
from vllm_layers import show

from jitgemm.nn.layers.sharding import ExpertSharding
from jitgemm.vllm.exchange import reason_against, sharding_of

SIZES = 4, 64, 64


def ranks(**more):
    said = dict(
        dp_size=2, ep_size=2, ep_rank=1, tp_size=1, pcp_size=1, sp_size=1, is_sequence_parallel=False, use_ep=True,
        use_ag_rs_all2all_kernels=True, all2all_backend="allgather_reducescatter",
    )  # fmt: skip
    return SimpleNamespace(**said | more)


def config(of_ranks, **more):
    said = dict(moe_parallel_config=of_ranks, num_local_experts=2, max_num_tokens=33, is_lora_enabled=False)
    return SimpleNamespace(**said | more)


def reason(of_ranks=None, places=(-1, -1, 0, 1), elastic=False, internode=False, **more):
    of_ranks = of_ranks or ranks()
    split = ExpertSharding(None, of_ranks.ep_rank, of_ranks.ep_size, 2, exchanges=True)
    places = None if places is None else torch.tensor(places, dtype=torch.int32)
    return reason_against(config(of_ranks, **more), split, places, elastic, SimpleNamespace(internode=internode))


def test_ranks_of_one_host_with_their_own_tokens_exchange_them():
    assert reason() is None and reason(ranks(dp_size=1, sp_size=2, is_sequence_parallel=True)) is None


AGAINST = [
    ("all2all_backend allgather_reducescatter, got deepep_high_throughput",
     {"of_ranks": ranks(use_ag_rs_all2all_kernels=False, all2all_backend="deepep_high_throughput")}),
    ("prefill_context_parallel_size=2", {"of_ranks": ranks(pcp_size=2)}),
    ("got tensor-parallel ranks that have the same", {"of_ranks": ranks(dp_size=1)}),
    ("at most 8 ranks, got 9", {"of_ranks": ranks(dp_size=9, ep_size=9), "places": (-1, -1, 0, 1, *[-1] * 14)}),
    ("got several hosts", {"internode": True}), ("another expert placement", {"places": (-1, 0, -1, 1)}),
    ("another expert placement", {"places": (-1, -1, -1, 0, 1)}), ("another expert placement", {"places": None}),
    ("--enable-elastic-ep", {"elastic": True}), ("--enable-lora", {"is_lora_enabled": True}),
]  # fmt: skip


@pytest.mark.parametrize("why, what", AGAINST)
def test_what_kernels_cannot_exchange_is_said(why, what):
    assert why in reason(**what)


def test_ranks_with_the_same_tokens_exchange_none_and_shared_experts_warn():
    said = []
    logger = SimpleNamespace(warning_once=lambda text, *given: said.append(text % given))
    assert sharding_of(config(ranks(dp_size=1)), None, False, logger) is None and not said
    assert sharding_of(config(ranks(use_ep=False)), None, False, logger) is None
    assert len(said) == 1 and "expects --enable-expert-parallel, got experts that all ranks share" in said[0]


def of_own_tokens(mesh, name):
    """What the method makes of this rank's tokens, which go to the other's experts; also of none."""
    show()
    tensors, number, far = expert_tensors(CONFIGS[name], *SIZES)[0], mesh.get_local_rank(), 0.0
    config = vllm.config(CONFIGS[name], exchange="nvlink")
    with torch.device(mesh.device_type):  # vLLM makes layers so, but does not load so; they are packed where they are
        whole = vllm.experts(CONFIGS[name], SIZES, packed=False)
        layer = vllm.experts(config, SIZES, None, ("ep", number, 2), packed=False)
    method = layer.quant_method
    assert not method.supports_internal_mk
    method.split = ExpertSharding(mesh.get_group(), number, 2, 2, exchanges=True, max_tokens=8, nvlink=True)
    with vllm.rank():
        for each in (whole, layer):
            load_experts(each, EXPERTS, tensors)
            process(each)
    assert method.supports_internal_mk and method.moe_kernel is None
    for counts in ((5, 3), (0, 8), (1, 0)):
        given = (each[8 * number :][: counts[number]] for each in routed(4, tokens=16))
        x, ids, weights = (each.to(mesh.device_type) for each in given)
        found, wanted = (vllm.run_experts(each, x, ids, weights) for each in (layer, whole))
        assert found.shape == x.shape and found.dtype == x.dtype
        if len(x):
            far = max(far, float((found - wanted).double().norm() / wanted.double().norm()))
    return far


@pytest.mark.parametrize("name", ["packed", "packed-int8", "fp8", "mxfp4"])
def test_a_rank_gets_the_results_of_its_own_tokens(two, name):
    """Of two processes without GPUs: jitgemm's collectives stand for its kernels."""
    assert max(two(of_own_tokens, name)) < 2**-7  # each rank rounds its sum to bf16


@pytest.mark.gpu
@pytest.mark.ranks
@needs_gpu
def test_kernels_give_a_rank_the_results_of_its_own_tokens(tmp_path):
    with two_ranks(tmp_path, "cuda") as run:
        assert max(run(of_own_tokens, "packed")) < 2**-7


def test_a_rank_of_a_sequence_parallel_layer_has_its_share_of_tokens(monkeypatch):
    ranks_of_both = SimpleNamespace(
        device_group="both", device_communicator=SimpleNamespace(all2all_manager=SimpleNamespace(internode=False))
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(get_ep_group=lambda: ranks_of_both))
    halves, places = ranks(sp_size=2, is_sequence_parallel=True), torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    split = sharding_of(config(halves), places, False, None)
    assert split == ExpertSharding("both", 1, 2, 2, exchanges=True, max_tokens=17, nvlink=True)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_kernel_with_adapters_exchanges_tokens_as_vllms_runner_does_for_none(monkeypatch, adapters):
    """The runner gathers no tokens for a modular kernel, which adapters need."""
    owner = import_module("vllm.model_executor.layers.fused_moe.all2all_utils")
    make, asked = owner.maybe_make_prepare_finalize, []

    def recorded(moe, *given, **options):
        asked.append(options)
        return make(moe, *given, **options)

    monkeypatch.setattr(owner, "maybe_make_prepare_finalize", recorded)
    monkeypatch.setattr(owner, "get_ep_all2all_manager", lambda *_: SimpleNamespace(world_size=2), raising=False)
    tensors, _ = expert_tensors(CONFIGS["packed"], *SIZES)
    layer = vllm.experts(CONFIGS["packed"], SIZES, tensors, more={"is_lora_enabled": adapters})
    assert asked == [{"allow_new_interface": adapters}]
    assert (layer.quant_method.moe_kernel is not None) is adapters is layer.quant_method.supports_internal_mk
