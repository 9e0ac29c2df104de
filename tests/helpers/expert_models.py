"""Small models of transformers whose layers stack their experts."""

from __future__ import annotations

import copy

import model_folders as folders
import pytest
import torch
from nn_experts import INTER, TOP_K, E
from stored_weights import FORMATS, compressed, rounded

from jitgemm.nn import Gate, PackedExperts

transformers = pytest.importorskip("transformers", minversion="5")
SIZES = folders.MOE | {
    "moe_intermediate_size": INTER, "head_dim": 16, "vocab_size": 96, "pad_token_id": 0,
    **dict.fromkeys(("num_experts", "num_local_experts"), E), "num_experts_per_tok": TOP_K,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": E, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "qk_nope_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
NEMOTRON = {name: size for name, size in SIZES.items() if name not in ("num_hidden_layers", "num_experts")}
NEMOTRON |= {
    "layers_block_type": ["attention", "moe"] * 2, "n_routed_experts": E, "n_group": 1, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
MODELS = {
    "qwen3": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SIZES),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SIZES),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", SIZES),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", SIZES | DEEPSEEK),
    "nemotron": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON),
}
GATE_OF = {"gpt-oss": Gate("swiglu_oai", "interleaved", 7.0, 1.702), "nemotron": Gate("relu2")}
"""Those that are not SiLU's; with "relu2", experts have no gate."""
IDS = {"input_ids": torch.arange(16)[None]}
EXPERT = ("gate_proj", "up_proj", "down_proj")


def build(name: str, seed: int = 0, **sizes) -> torch.nn.Module:
    model, config, known = MODELS[name]
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    torch.manual_seed(seed)
    model = getattr(transformers, model)(getattr(transformers, config)(**known | sizes)).eval()
    if not experts_of(model):
        pytest.skip(f"this transformers stacks no experts of {config}")
    for tensor in (p for p in model.parameters() if p.dim() == 3):  # not as tiny as a fresh model's
        torch.nn.init.normal_(tensor, std=0.05)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(**IDS).logits


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of most tokens: a token on the edge between two experts may take the other."""
    error = ((a - b).norm(dim=-1) / b.norm(dim=-1)).nanmedian()
    return float(error) < 0.04


def experts_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: m for name, m in model.named_modules() if getattr(getattr(m, "down_proj", None), "ndim", 0) == 3}


def first_of(module: torch.nn.Module) -> torch.Tensor:
    """The parameter that the tokens meet first."""
    return module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj


def parts_of(module: torch.nn.Module, e: int) -> dict[str, torch.Tensor]:
    """{"up_proj": [n, k]} of an expert, for parameters that are neither transposed nor interleaved."""
    first = first_of(module)[e].detach()
    halves = zip(EXPERT, first.chunk(2)) if hasattr(module, "gate_up_proj") else [("up_proj", first)]
    return {**dict(halves), "down_proj": module.down_proj[e].detach()}


def each(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """{"….experts.3.up_proj": [n, k]}, as `parts_of` has them."""
    return {
        f"{name}.{e}.{part}": w
        for name, module in experts_of(model).items()
        for e in range(E)
        for part, w in parts_of(module, e).items()
    }


def file_of(
    model: torch.nn.Module, form: str = "compressed-tensors", least: int = -8
) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """Tensors of a checkpoint that names each expert by itself, and the model with the weights that they stand for."""
    store, _ = FORMATS[form]
    dense, tensors = copy.deepcopy(model), {}
    for name, w in each(dense).items():
        stored = rounded(w, least)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in store(stored).items()}
        w.copy_(stored.weight)
    stacked = tuple(experts_of(model))
    return tensors | {n: x.clone() for n, x in model.state_dict().items() if not n.startswith(stacked)}, dense


def fused(model: torch.nn.Module, names: tuple[str, str], shape: str = "") -> tuple[dict, torch.nn.Module]:
    """A checkpoint with the experts of a layer in one tensor."""
    tensors, dense = file_of(model)
    for name, module in experts_of(model).items():
        *first, down = parts_of(module, 0)
        for new, parts in zip(names, (first, [down])):
            for suffix in ("weight_packed", "weight_scale", "weight_shape"):
                rows = [torch.cat([tensors.pop(f"{name}.{e}.{part}.{suffix}") for part in parts]) for e in range(E)]
                if suffix != "weight_shape" or shape:
                    tensors[f"{name}.{new}{suffix}"] = torch.stack(rows)
            if shape == "one":
                size = tensors[f"{name}.{new}weight_packed"].shape
                tensors[f"{name}.{new}weight_shape"] = torch.tensor([size[0], size[1], 8 * size[2]])
    return tensors, dense


def gpt_oss_file(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """Each expert by itself, as llm-compressor writes gpt-oss: gate and up apart, with biases."""
    dense, tensors = copy.deepcopy(model), {}
    for path, module in experts_of(dense).items():
        for e in range(E):
            both, down = module.gate_up_proj[e].detach().T, module.down_proj[e].detach().T
            bias = module.gate_up_proj_bias[e].detach()
            parts = zip(EXPERT, (both[0::2], both[1::2], down), (bias[0::2], bias[1::2], module.down_proj_bias[e]))
            for part, w, b in parts:
                stored = rounded(w)
                w.copy_(stored.weight)
                layer = compressed(stored) | {"bias": b.detach().clone()}
                tensors |= {f"{path}.{e}.{part}.{suffix}": tensor for suffix, tensor in layer.items()}
    stacked = tuple(experts_of(model))
    return tensors | {n: x.clone() for n, x in model.state_dict().items() if not n.startswith(stacked)}, dense


def same_weights(model: torch.nn.Module, dense: torch.nn.Module) -> bool:
    """Whether the experts are those of `dense`, bit for bit."""
    pairs = [(model.get_submodule(name), module) for name, module in experts_of(dense).items()]
    return len(pairs) > 0 and all(
        isinstance(ours, PackedExperts)
        and torch.equal(ours.w13.weight.dequantize(), first_of(module))
        and torch.equal(ours.w2.weight.dequantize(), module.down_proj)
        for ours, module in pairs
    )
