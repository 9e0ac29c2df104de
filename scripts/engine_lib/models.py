"""Configs of models of real sizes, as transformers has them."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "llama8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen3-30b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 8192,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128, "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": True,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "v4-flash-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "head_dim": 128,
        "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 32,
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 6, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 129280, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
