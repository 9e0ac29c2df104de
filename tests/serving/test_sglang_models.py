"""Whole models of SGLang's, made and loaded by its own loader: a Llama and a Qwen3-MoE in floats and as a checkpoint, and a
gpt-oss in its own format."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang.srt.model_loader", reason="needs SGLang: scripts/sglang_contract.sh runs it")

import gpt_oss_experts
from safetensors.torch import save_file
from served_layers import CONFIGS, dense_of, stored
from sglang_layers import BF16, running

import jitgemm
import jitgemm.sglang
from jitgemm.activations.scheme import SILU_MUL
from jitgemm.nn import W4A8Linear
from jitgemm.nn.layers.experts import packed_experts

SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=256, max_position_embeddings=128, tie_word_embeddings=False, torch_dtype="bfloat16", hidden_act="silu",
)  # fmt: skip
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip


def linears(name):
    """{layer's name: its rows and columns}."""
    found = {}
    for i in range(2):
        for each, n in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64), ("o_proj", 128)):
            found[f"model.layers.{i}.self_attn.{each}"] = n, 128
        parts = [f"experts.{e}." for e in range(4)] if name == "qwen3_moe" else [""]
        inter = 64 if name == "qwen3_moe" else 256
        for part in parts:
            for each, size in (("gate_proj", (inter, 128)), ("up_proj", (inter, 128)), ("down_proj", (128, inter))):
                found[f"model.layers.{i}.mlp.{part}{each}"] = size
    return found


def saved_layers(dense):
    """(name, module) as jitgemm saves them of these weights, for which what they stand for then stands in `dense`."""
    for name in [each for each in dense if ".experts." not in each]:
        module = W4A8Linear(jitgemm.quantize_w4(dense[name].to(BF16), 64))
        dense[name] = module.weight.dequantize().double()
        yield name, module
    for part in sorted({name.partition(".experts.")[0] for name in dense if ".experts." in name}):
        at = f"{part}.experts"
        gates, ups, downs = (
            torch.stack([dense[f"{at}.{e}.{each}_proj"].to(BF16) for e in range(4)]) for each in ("gate", "up", "down")
        )
        w13, w2 = jitgemm.quantize_w4(torch.cat([gates, ups], 1), 64), jitgemm.quantize_w4(downs, 64)
        for e, (both, down) in enumerate(zip(w13.dequantize().double(), w2.dequantize().double(), strict=True)):
            dense[f"{at}.{e}.gate_proj"], dense[f"{at}.{e}.up_proj"] = both.chunk(2)
            dense[f"{at}.{e}.down_proj"] = down
        yield at, packed_experts(w13, w2, activation="e4m3", gate=SILU_MUL)


def written(folder, name, format):
    """Writes a model; returns {layer: the weight that it stands for}."""
    tensors, dense = {}, {}
    for seed, (layer, (n, k)) in enumerate(linears(name).items()):
        if format in (None, "saved"):
            dense[layer] = (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / 8).to(BF16).double()
            if format is None:
                tensors[f"{layer}.weight"] = dense[layer].to(BF16)
        else:
            parts, dense[layer] = stored(CONFIGS[format], n, k, seed)
            tensors |= {f"{layer}.{suffix}": tensor.contiguous() for suffix, tensor in parts.items()}
    plain = {"model.norm.weight": (128,), "model.embed_tokens.weight": (256, 128), "lm_head.weight": (256, 128)}
    for i in range(2):
        plain |= {f"model.layers.{i}.{each}_layernorm.weight": (128,) for each in ("input", "post_attention")}
        if name == "qwen3_moe":
            plain[f"model.layers.{i}.mlp.gate.weight"] = 4, 128
            plain |= {f"model.layers.{i}.self_attn.{each}_norm.weight": (32,) for each in "qk"}
    tensors |= {each: torch.ones(size, dtype=BF16) for each, size in plain.items()}
    quantised = {}
    if format == "saved":
        for layer, module in saved_layers(dense):
            tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in module.state_dict().items()}
        quantised = {"quantization_config": {"quant_method": "jitgemm"}}
    elif format is not None:
        quantised = {"quantization_config": {**CONFIGS[format], "ignore": ["lm_head", "re:.*gate$"]}}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**SIZES, **MODELS[name], **quantised}), encoding="utf-8")
    return dense


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


@pytest.mark.parametrize("format", [None, "packed", "torchao", "saved"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_loaded_by_sglang_s_loader(tmp_path, loader, name, format):
    dense = written(tmp_path, name, format)
    with loaded(tmp_path, loader) as model:
        layer = model.model.layers[1]
        qkv = torch.cat([dense[f"model.layers.1.self_attn.{each}_proj"] for each in "qkv"])
        found, close = dense_of(layer.self_attn.qkv_proj.jitgemm), 0.15 if format is None else 0.0
        assert (found - qkv).norm() <= close * qkv.norm()
        x = torch.randn(5, 128, dtype=BF16)
        part = "model.layers.1.mlp."
        if name == "llama":
            g, u, d = (dense[f"{part}{each}_proj"] for each in ("gate", "up", "down"))
            hidden = layer.mlp.gate_up_proj(x)[0]
            expected = x.double() @ torch.cat([g, u]).T
            assert (hidden.double() - expected).norm() < 0.15 * expected.norm()
        else:
            ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]], dtype=torch.int32)
            out = run(layer.mlp.experts, x, ids, torch.full((5, 2), 0.5))
            expected = torch.zeros(5, 128, dtype=torch.float64)
            for t in range(5):
                for e in ids[t].tolist():
                    g, u, d = (dense[f"{part}experts.{e}.{each}_proj"] for each in ("gate", "up", "down"))
                    expected[t] += 0.5 * d @ (torch.nn.functional.silu(g @ x[t].double()) * (u @ x[t].double()))
            assert (out - expected).norm() < 0.25 * expected.norm()


def test_gpt_oss_is_loaded_by_sglang_s_loader(tmp_path, loader):
    """Its experts packed bit for bit, biases included; all else is as the file has it."""
    whole = gpt_oss_experts.Layer()
    sizes = {"hidden_size": gpt_oss_experts.HIDDEN, "intermediate_size": gpt_oss_experts.INTER, "num_hidden_layers": 1}
    more = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "sliding_window": 32,
    }
    more |= {
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention"],
        "quantization_config": gpt_oss_experts.CONFIG,
    }
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **sizes, **more}), encoding="utf-8")
    at = "model.layers.0."
    plain = {"model.norm.weight": (128,), "model.embed_tokens.weight": (256, 128), "lm_head.weight": (256, 128)}
    plain |= {f"{at}{each}_layernorm.weight": (128,) for each in ("input", "post_attention")}
    plain |= {f"{at}self_attn.sinks": (4,), f"{at}mlp.router.weight": (4, 128), f"{at}mlp.router.bias": (4,)}
    for each, n in (("q", 128), ("k", 64), ("v", 64), ("o", 128)):
        plain |= {f"{at}self_attn.{each}_proj.weight": (n, 128), f"{at}self_attn.{each}_proj.bias": (n,)}
    tensors = {name: torch.randn(shape).to(BF16) for name, shape in plain.items()}
    for name, parts, bias in (("gate_up", whole.w13, whole.b13), ("down", whole.w2, whole.b2)):
        blocks = parts.canonical.unflatten(-1, (-1, 16))
        stored = {"blocks": blocks, "scales": parts.scales, "bias": bias}
        tensors |= {f"{at}mlp.experts.{name}_proj_{each}": tensor.contiguous() for each, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with loaded(tmp_path, loader) as model:
        layer = model.model.layers[0]
        whole.check([layer.mlp.experts.jitgemm], False)
        qkv = torch.cat([tensors[f"{at}self_attn.{each}_proj.weight"] for each in "qkv"])
        assert torch.equal(layer.self_attn.qkv_proj.weight, qkv)
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
        assert where.physical_to_logical_map.tolist() == [[0, 1, 2, 3, 0, 1]] * 2

    dense = written(tmp_path, "qwen3_moe", "packed")
    with loaded(tmp_path, loader, placed, enable_eplb=True, ep_num_redundant_experts=2) as model:
        part = model.model.layers[1].mlp
        packed, rows = part.experts.jitgemm, part.get_moe_weights()
        down = torch.stack([dense[f"model.layers.1.mlp.experts.{e}.down_proj"] for e in range(4)])
        assert torch.equal(packed.w2.weight.dequantize().double(), down[[0, 1, 2, 3, 0, 1]])
        assert sum(each.nbytes for each in rows) == sum(
            each.nbytes for each in packed.buffers() if each.shape[:1] == (6,)
        )
        x, weights = torch.randn(5, 128, dtype=BF16), torch.full((5, 2), 0.5)
        ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]], dtype=torch.int32)
        before = run(part.experts, x, ids, weights)
        assert torch.equal(run(part.experts, x, torch.where(ids < 2, ids + 4, ids), weights), before)
        for each in rows:
            each.copy_(each.flip(0).clone())
        assert torch.equal(run(part.experts, x, 5 - ids, weights), before)
