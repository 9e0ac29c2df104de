"""Which linear layers a config.json stands for, and how tensor parallelism cuts them."""

from __future__ import annotations

import json

import pytest
import torch

from jitgemm.activations.kernel import Gate
from jitgemm.cli.hf_config import ExpertLayer, LinearLayer, Quantization
from jitgemm.cli.hf_config import linear_layers, quantization, read_config, weight_group

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
QWEN2_MOE = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
}


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
}


def shapes(config: dict, tp: int = 1, **options) -> dict[str, tuple[int, int, int]]:
    layers = linear_layers(config, tp, **options)
    return {layer.name: (layer.n, layer.k, layer.count) for layer in layers if isinstance(layer, LinearLayer)}


def experts(config: dict, tp: int = 1, **options) -> tuple[int, ...]:
    """experts, hidden, inter, top_k, count of the only experts."""
    (found,) = (layer for layer in linear_layers(config, tp, **options) if isinstance(layer, ExpertLayer))
    return found.experts, found.hidden, found.inter, found.top_k, found.count


def test_llama_has_its_projections_fused_and_separate():
    assert shapes(LLAMA_3_8B) == {
        "qkv_proj": (6144, 4096, 32),
        "q_proj": (4096, 4096, 32),
        "k_proj": (1024, 4096, 32),
        "v_proj": (1024, 4096, 32),
        "o_proj": (4096, 4096, 32),
        "gate_up_proj": (28672, 4096, 32),
        "gate_proj": (14336, 4096, 32),
        "up_proj": (14336, 4096, 32),
        "down_proj": (4096, 14336, 32),
    }


def test_one_form_alone():
    assert set(shapes(LLAMA_3_8B, form="fused")) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert set(shapes(LLAMA_3_8B, form="separate")) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_tp_cuts_columns_of_what_leaves_the_hidden_state_and_rows_of_what_returns():
    assert shapes(LLAMA_3_8B, tp=4, form="fused") == {
        "qkv_proj": (1536, 4096, 32),
        "o_proj": (4096, 1024, 32),
        "gate_up_proj": (7168, 4096, 32),
        "down_proj": (4096, 3584, 32),
    }


def test_key_and_value_heads_are_repeated_when_ranks_outnumber_them():
    layers = shapes(LLAMA_3_8B, tp=16)
    assert layers["k_proj"] == (128, 4096, 32)
    assert layers["qkv_proj"] == (2 * 128 + 2 * 128, 4096, 32)


def test_head_dim_need_not_be_hidden_size_over_heads():
    layers = shapes(QWEN3_32B)
    assert layers["q_proj"] == (8192, 5120, 64)
    assert layers["o_proj"] == (5120, 8192, 64)


def test_every_expert_of_every_layer_counts():
    layers = shapes(MIXTRAL_8X7B)
    assert layers["experts.up_proj"] == (14336, 4096, 8 * 32)
    assert layers["experts.down_proj"] == (4096, 14336, 8 * 32)
    assert "down_proj" not in layers
    assert experts(MIXTRAL_8X7B, form="fused") == experts(MIXTRAL_8X7B) == (8, 4096, 14336, 2, 32)
    assert not any("experts" in name for name in shapes(MIXTRAL_8X7B, form="fused"))
    assert all(isinstance(layer, LinearLayer) for layer in linear_layers(MIXTRAL_8X7B, form="separate"))


def test_experts_are_cut_by_tp_or_shared_out_by_ep():
    assert experts(QWEN3_30B, 2) == (128, 2048, 384, 8, 48)
    assert experts(QWEN3_30B, 8, group_size=32) == (128, 2048, 96, 8, 48)
    assert experts(QWEN3_30B, 8, ep=8, group_size=128) == (16, 2048, 768, 8, 48)
    assert shapes(QWEN3_30B, 8, ep=8)["o_proj"] == (2048, 512, 48)
    assert experts(QWEN2_MOE, ep=4) == (15, 2048, 1408, 4, 24)


def test_gates_follow_the_config():
    gates = {"silu": Gate(), "gelu_pytorch_tanh": Gate("gelu_tanh")}
    for act, gate in gates.items():
        assert linear_layers(MIXTRAL_8X7B | {"hidden_act": act}, form="fused")[-1].gate == gate
    gpt = linear_layers(GPT_OSS, form="fused")[-1]
    assert gpt.gate == Gate("swiglu_oai", "interleaved", 7.0, 1.702) and gpt.to_dict()["gate"]["limit"] == 7.0
    assert experts(GPT_OSS) == (32, 2880, 2880, 4, 24)


def test_qwen_moe_has_routed_and_shared_experts():
    layers = shapes(QWEN2_MOE)
    assert layers["experts.down_proj"] == (2048, 1408, 24 * 60)
    assert layers["shared_expert.down_proj"] == (2048, 5632, 24)
    assert "down_proj" not in layers


def test_qwen3_moe_s_experts_are_counted_under_either_name():
    """Files of transformers 5 say num_local_experts."""
    saved = {key: value for key, value in QWEN3_30B.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert linear_layers(saved) == linear_layers(QWEN3_30B)


def test_qwen_moe_keeps_some_layers_dense():
    layers = shapes(QWEN2_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert layers["experts.down_proj"][2] == 11 * 60
    assert layers["down_proj"] == (2048, 5632, 13)


def test_deepseek_has_latent_attention_and_three_kinds_of_mlp():
    assert shapes(DEEPSEEK_V3, tp=8, ep=8, form="fused") == {
        "fused_qkv_a_proj": (2112, 7168, 61),
        "q_b_proj": (3072, 1536, 61),
        "kv_b_proj": (4096, 512, 61),
        "o_proj": (7168, 2048, 61),
        "gate_up_proj": (4608, 7168, 3),
        "down_proj": (7168, 2304, 3),
        "shared_experts.gate_up_proj": (512, 7168, 58),
        "shared_experts.down_proj": (7168, 256, 58),
    }
    assert experts(DEEPSEEK_V3, tp=8, ep=8) == (32, 7168, 2048, 8, 58)
    separate = shapes(DEEPSEEK_V3, form="separate")
    assert separate["q_a_proj"] == (1536, 7168, 61) and separate["kv_a_proj_with_mqa"] == (576, 7168, 61)
    assert not {"fused_qkv_a_proj", "gate_up_proj"} & set(separate)
    lite = {key: value for key, value in DEEPSEEK_V3.items() if key != "q_lora_rank"} | {"model_type": "deepseek_v2"}
    fused = shapes(lite, form="fused")
    assert fused["q_proj"] == (24576, 7168, 61) and fused["kv_a_proj_with_mqa"] == (576, 7168, 61)
    assert not {"fused_qkv_a_proj", "q_a_proj", "q_b_proj"} & set(fused)


@pytest.mark.parametrize("rank", [48, None])
def test_deepseek_s_layers_are_those_of_transformers_model(rank):
    transformers = pytest.importorskip("transformers")
    small = DEEPSEEK_V3 | {"hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 32}
    small |= {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    small |= {"q_lora_rank": rank and 64, "kv_lora_rank": 32, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    small |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 2}
    config = transformers.DeepseekV3Config(**{key: value for key, value in small.items() if key != "model_type"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found: dict[str, list[tuple[int, int]]] = {}
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".experts." not in name:
            name = name.rpartition(".")[2] if "shared_experts" not in name else ".".join(name.split(".")[-2:])
            found.setdefault(name, []).append((module.out_features, module.in_features))
    expected = {name: layer for name, layer in shapes(small, form="separate").items() if "experts." not in name[:8]}
    assert found == {name: [(n, k)] * count for name, (n, k, count) in expected.items()}


def test_a_multimodal_config_is_read_through_its_text_config():
    assert shapes({"model_type": "llava", "text_config": LLAMA_3_8B}) == shapes(LLAMA_3_8B)


def test_attention_without_key_value_heads_has_one_per_query_head():
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "num_key_value_heads"}
    assert shapes(config)["k_proj"] == (4096, 4096, 32)


@pytest.mark.parametrize(
    ("config", "tp", "group_size", "message"),
    [
        (LLAMA_3_8B, 0, 0, "tp: expected at least 1, got 0"),
        (LLAMA_3_8B, 3, 0, "tp=3: num_attention_heads 32 is not divisible"),
        (LLAMA_3_8B | {"num_key_value_heads": 6}, 4, 0, "tp=4: num_key_value_heads 6 is not divisible"),
        (LLAMA_3_8B | {"num_key_value_heads": 3}, 8, 0, "num_key_value_heads 3 neither divides it nor"),
        (QWEN2_MOE, 16, 0, "shared_expert.*|k of experts.down_proj|k = 88"),
        (
            QWEN2_MOE,
            4,
            128,
            "experts.down_proj would be cut at k = 352, which is not a border of a group of 128; what fits: tp of 1; "
            "groups of 32; --ep, which leaves experts whole",
        ),
        (
            QWEN3_30B,
            8,
            128,
            "experts.down_proj would be cut at k = 96, which is not a border of a group of 128; what fits: tp of 1, 2, "
            "3, 6; groups of 32; --ep",
        ),
        (GPT_OSS, 8, 32, "k = 360, which is not a multiple of 16; what fits: tp of 1, 2, 3, 5, 6; --ep"),
        (MIXTRAL_8X7B | {"hidden_act": "relu"}, 1, 0, "hidden_act: expected one of silu.* for experts, got 'relu'"),
        (MIXTRAL_8X7B | {"num_experts_per_tok": None}, 1, 0, "num_experts_per_tok: expected a positive integer"),
        (LLAMA_3_8B | {"model_type": "gpt2"}, 1, 0, "model_type 'gpt2' is not known .*llama.*--shape"),
        ({"hidden_size": 4096}, 1, 0, "expected a key 'model_type'"),
        (
            LLAMA_3_8B | {"hidden_size": None},
            1,
            0,
            "hidden_size: expected a positive integer, found none.*use_diff=False.*--shape",
        ),
        (LLAMA_3_8B | {"model_type": ["llama"]}, 1, 0, r"model_type \['llama'\] is not known"),
        (QWEN2_MOE | {"mlp_only_layers": 5}, 1, 0, "mlp_only_layers: expected a list of integers, got 5"),
        (LLAMA_3_8B | {"intermediate_size": "big"}, 1, 0, "intermediate_size: expected a positive integer, got 'big'"),
        (LLAMA_3_8B | {"hidden_size": 4100}, 1, 0, "hidden_size 4100 is not divisible by 32 heads"),
        (LLAMA_3_8B | {"intermediate_size": 14336 + 8}, 1, 0, "down_proj: k = 14344 .* not a multiple of 16"),
    ],
)
def test_what_cannot_be_read_or_cut_says_why(config, tp, group_size, message):
    with pytest.raises(ValueError, match=message):
        linear_layers(config, tp, group_size=group_size)


def test_experts_that_ranks_cannot_share_are_refused():
    with pytest.raises(
        ValueError, match="ep=8: num_experts 60 is not divisible by it; what fits: ep of 1, 2, 3, 4, 5, 6"
    ):
        linear_layers(QWEN2_MOE, ep=8)
    with pytest.raises(ValueError, match="ep=2: expected 1 for llama, which has no experts"):
        linear_layers(LLAMA_3_8B, ep=2)


def test_config_is_read_from_a_file_or_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == LLAMA_3_8B


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
    ],
    ids=range(4),
)
def test_a_file_that_is_no_config_says_so(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        read_config(tmp_path / "absent.json")


def test_a_group_that_covers_all_of_k_is_per_channel():
    assert weight_group(128, 4096) == 128
    assert weight_group(128, 96) == 0
    assert weight_group(0, 4096) == 0


def test_layers_go_to_json():
    assert LinearLayer("o_proj", 8, 32, 2).to_dict() == {"name": "o_proj", "n": 8, "k": 32, "count": 2}


# quantization_config

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": True, "strategy": "token"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
BY_BLOCK = FP8 | {"dynamic": True, "strategy": "group", "group_size": 128}


def compressed(weights: dict, inputs: dict | None = None) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (GPTQ, Quantization("gptq", 64, False)),
        (GPTQ | {"group_size": -1, "sym": False, "desc_act": True}, Quantization("gptq", 0, True, None, ("permuted",))),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, Quantization("awq", 128, True)),
        (GPTQ | {"quant_method": "auto-round", "group_size": 128}, Quantization("auto-round", 128, False)),
        (compressed(WEIGHTS), Quantization("compressed-tensors", 32, False)),
        (
            compressed(WEIGHTS | {"strategy": "channel", "symmetric": False}),
            Quantization("compressed-tensors", 0, True),
        ),
        (compressed(WEIGHTS, INT8), Quantization("compressed-tensors", 32, False, "int8", ("affine",))),
        (compressed(WEIGHTS, FP8), Quantization("compressed-tensors", 32, False, "fp8", ("static",))),
        (compressed(WEIGHTS, BY_BLOCK), Quantization("compressed-tensors", 32, False, "fp8", ("block",))),
    ],
)
def test_what_a_config_says_of_its_quantisation_is_read(section, said):
    assert quantization(LLAMA_3_8B | {"quantization_config": section}) == said
    assert quantization({"text_config": LLAMA_3_8B | {"quantization_config": section}}) == said
    assert quantization(LLAMA_3_8B) is None


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"quant_method": "quip"}, "fbgemm_fp8, modelopt, blockwise_int8, w8a8_int8, got 'quip'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "FP8_PER_CHANNEL_PER_TOKEN of ModelOpt, got 'NVFP4'"),
        (GPTQ | {"bits": 8}, "bits: expected 4, got 8"),
        ({"quant_method": "gptq", "bits": 4}, "'group_size' is missing"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "settings of their own"),
        (compressed(WEIGHTS | {"num_bits": 3}), "weights: num_bits 3, type 'int', symmetric True"),
        (compressed(WEIGHTS) | {"config_groups": {}}, "number of config_groups: expected 1, got 0"),
        (compressed(WEIGHTS | {"type": "float"}), "weights: num_bits 4, type 'float', symmetric True"),
        (compressed(WEIGHTS, INT8 | {"num_bits": 4}), "input_activations: num_bits: expected 8, got 4"),
        (compressed(WEIGHTS, BY_BLOCK | {"group_size": 64}), "input_activations: group_size: expected 128, got 64"),
        (
            compressed(WEIGHTS, BY_BLOCK | {"dynamic": False}),
            "input_activations: static or not symmetric: expected False",
        ),
        ({"quant_method": 7}, "lower"),
        ({}, "'quant_method' is missing"),
        ("gptq", "string indices"),
    ],
)
def test_what_a_config_says_in_words_unknown_is_named(section, why):
    if section:
        assert why in quantization(LLAMA_3_8B | {"quantization_config": section})
