"""Whole models of SGLang's, made and loaded by its own loader: a Llama and a Qwen3-MoE in floats and as a checkpoint, and a
gpt-oss in its own format."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.model_loader", reason="needs SGLang: scripts/sglang_contract.sh runs it")

import gpt_oss_experts
from engine_models import EXPERTS, PROJ, SIZES, check, save, save_gpt_oss
from safetensors.torch import load_file
from served_layers import BF16, mixture
from sglang_layers import running

import jitgemm.sglang

IDS, WEIGHTS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]], dtype=torch.int32), torch.full((5, 2), 0.5)


@pytest.fixture
def loader(monkeypatch):
    """SGLang's, which looks for the two models alone, and takes rotary embeddings from PyTorch."""
    absent = ModuleType("vllm")
    absent._custom_ops = SimpleNamespace(rotary_embedding=None, silu_and_mul=None)
    monkeypatch.setitem(sys.modules, "vllm", absent)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", absent._custom_ops)
    from sglang.srt.model_loader import loader

    def architecture(config):
        name = config.hf_config.architectures[0]
        return getattr(importlib.import_module(f"sglang.srt.models.{config.hf_config.model_type}"), name), name

    monkeypatch.setattr(loader, "get_model_architecture", architecture)
    return loader


@contextmanager
def groups(folder):
    """The process groups of one process."""
    from sglang.srt import distributed
    from sglang.srt.runtime_context import get_parallel

    where = f"file://{folder}/store"
    distributed.init_distributed_environment(1, 0, where, 0, "gloo")
    distributed.initialize_model_parallel()
    try:
        yield
    finally:
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()
        getattr(get_parallel(), "clear_stamp", lambda: None)()  # of newer ones


@contextmanager
def loaded(folder, loader, before=lambda config: None, **arguments):
    """A model by SGLang's loader, with its processes' arguments in effect; before: given the model's config first."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_parallel

    jitgemm.sglang.register()
    more = {f"{each}_rank": 0 for each in ("pp", "attn_dp", "attn_cp", "moe_dp")} | {"attn_dp_size": 1}
    arguments |= {"model_path": str(folder), "quantization": "jitgemm"}
    with running(**arguments), get_parallel().override(**more), groups(folder):
        config = ModelConfig(model_path=str(folder), quantization="jitgemm", dtype="bfloat16")
        assert config.quantization == "jitgemm"
        before(config)
        made = loader.DefaultModelLoader(LoadConfig())
        yield made.load_model(model_config=config, device_config=DeviceConfig("cpu"))


def run(experts, x, ids, weights):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return experts(x, StandardTopKOutput(weights, ids, torch.zeros(len(x), 4))).double()


@pytest.mark.parametrize("format", ["floats", "packed", "torchao", "saved"])
@pytest.mark.parametrize("moe", [False, True], ids=["llama", "qwen3-moe"])
def test_a_model_is_loaded_by_sglang_s_loader(tmp_path, loader, moe, format):
    dense = save(tmp_path, format, moe)
    with loaded(tmp_path, loader) as model:
        check(model, dense, format != "floats")
        x, mlp, part = (
            torch.randn(5, SIZES["hidden_size"], dtype=BF16),
            model.model.layers[0].mlp,
            "model.layers.0.mlp.",
        )
        if moe:
            experts = {(e, proj): dense[f"{part}experts.{e}.{proj}"] for e in range(EXPERTS) for proj in PROJ}
            out, expected = run(mlp.experts, x, IDS, WEIGHTS), mixture(x, IDS, WEIGHTS, experts)
        else:
            out = mlp.gate_up_proj(x)[0].double()
            expected = x.double() @ torch.cat([dense[f"{part}{proj}"] for proj in PROJ[:2]]).T
        assert (out - expected).norm() < 0.25 * expected.norm()


def test_gpt_oss_is_loaded_by_sglang_s_loader(tmp_path, loader):
    """Its experts packed bit for bit, biases included; all else is as the file has it."""
    whole, at = save_gpt_oss(tmp_path), "model.layers.0.self_attn."
    with loaded(tmp_path, loader) as model:
        layer, file = model.model.layers[0], load_file(tmp_path / "model.safetensors")
        whole.check([layer.mlp.experts.jitgemm], False)
        assert torch.equal(
            layer.self_attn.qkv_proj.weight, torch.cat([file[f"{at}{each}_proj.weight"] for each in "qkv"])
        )
        x, ids, weights = gpt_oss_experts.tokens()
        expected = whole.by_hand(x, ids, weights)
        assert (run(layer.mlp.experts, x, ids, weights) - expected).norm() < 0.06 * expected.norm()


def test_sglang_s_models_load_copies_of_experts_and_list_their_rows(tmp_path, loader, monkeypatch):
    """Two redundant experts, as SGLang's own map has them, whose models look for what its EPLB moves."""
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata
    from sglang.srt.runtime_context import get_resources

    def placed(config):
        where = ExpertLocationMetadata.init_trivial(config, 0)
        monkeypatch.setattr(get_resources(), "expert_location_metadata", where)
        assert where.physical_to_logical_map.tolist() == [[0, 1, 2, 3, 0, 1]]

    dense = save(tmp_path, "packed", True)
    with loaded(tmp_path, loader, placed, enable_eplb=True, ep_num_redundant_experts=2) as model:
        part = model.model.layers[0].mlp
        packed, rows = part.experts.jitgemm, part.get_moe_weights()
        down = torch.stack([dense[f"model.layers.0.mlp.experts.{e}.down_proj"] for e in range(EXPERTS)])
        assert torch.equal(packed.w2.weight.dequantize().double(), down[[0, 1, 2, 3, 0, 1]])
        assert sum(each.nbytes for each in rows) == sum(
            each.nbytes for each in packed.buffers() if each.shape[:1] == (6,)
        )
        x = torch.randn(5, SIZES["hidden_size"], dtype=BF16)
        before = run(part.experts, x, IDS, WEIGHTS)
        assert torch.equal(run(part.experts, x, torch.where(IDS < 2, IDS + 4, IDS), WEIGHTS), before)
        for each in rows:
            each.copy_(each.flip(0).clone())
        assert torch.equal(run(part.experts, x, 5 - IDS, WEIGHTS), before)
