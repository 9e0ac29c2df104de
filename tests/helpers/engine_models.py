"""Tiny models in folders for the engines' own loaders, and whether a model that was loaded holds what the files have."""

from __future__ import annotations

from typing import Any

import gpt_oss_experts
import pytest
import torch
from safetensors.torch import save_file
from served_layers import BF16, CONFIGS, stored

from jitgemm.nn import PackedExperts, PackedLinear, W8A8Linear, quantize_
from jitgemm.weight.rotation import rotated

transformers = pytest.importorskip("transformers", minversion="5")
SIZES = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 1, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS, INTER = 4, 384
"""Of 640 and 384 rows and columns, a rank of two has 320 and 192: parts of groups and blocks of 128."""
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PROJ = ("gate_proj", "up_proj", "down_proj")


def made(kind: str, **more: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    model.config.architectures = [type(model).__name__]
    return model


def model_of(mixture: bool, **more: Any) -> torch.nn.Module:
    """A Qwen3-MoE or a Llama."""
    if mixture:
        more |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTER}
    return made("Qwen3Moe" if mixture else "Llama", **more)


def write(folder, model, tensors, quantization=None):
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if quantization is not None:
        model.config.quantization_config = quantization
    model.config.save_pretrained(folder)


def layers_of(model):
    """{name: (n, k)} of the linears of a decoder layer, experts one by one as files have them."""
    found, hidden = {}, SIZES["hidden_size"]
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e in range(EXPERTS):
                each = [name.removesuffix("gate_up_proj") + f"{e}.{proj}" for proj in PROJ]
                found |= dict(zip(each, ((INTER, hidden), (INTER, hidden), (hidden, INTER))))
        elif name.endswith("_proj.weight") and tensor.dim() == 2:
            found[name.removesuffix(".weight")] = tuple(tensor.shape)
    return found


def save(folder, said, mixture, change=dict, tied=False, seed=0, head=False):
    """A model's files, and its weights.

    said: a quantization_config, or its name in CONFIGS, "floats", or "saved" by jitgemm, its output layer too if `head`.
    change: the tensors.
    """
    folder.mkdir(exist_ok=True)
    if said == "saved":
        return save_packed(folder, mixture, head, seed)
    quantization = CONFIGS.get(said) if isinstance(said, str) else said
    if quantization is not None and "config_groups" in quantization:
        quantization = {"ignore": ["lm_head", "re:.*gate$"], **quantization}
    model, dense = model_of(mixture, tie_word_embeddings=tied), {}
    tensors = {name: t for name, t in model.state_dict().items() if not name.endswith("_proj.weight")}
    tensors = {
        name: t for name, t in tensors.items() if ".experts." not in name and not (tied and name == "lm_head.weight")
    }
    torch.manual_seed(seed)
    for number, (layer, size) in enumerate(layers_of(model).items()):
        if quantization is None:
            found = {"weight": torch.randn(size, dtype=BF16) / 16}
            dense[layer] = found["weight"].double()
        else:
            found, dense[layer] = stored(quantization, *size, seed=seed + number)
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in found.items()}
    write(folder, model, change(tensors), quantization)
    return dense


def save_packed(folder, mixture, head, seed):
    """A model that jitgemm quantised, and the weights that its layers hold."""
    model, dense = model_of(mixture), {}
    torch.manual_seed(seed)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.05)
    quantize_(model, group_size=128)
    if head:
        model.lm_head = W8A8Linear.from_linear(model.lm_head)
    write(folder, model, model.state_dict(), {"quant_method": "jitgemm"})
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            dense[name] = module.weight.dequantize().double()
        elif isinstance(module, PackedExperts):
            w13, w2 = (each.weight.dequantize().double() for each in (module.w13, module.w2))
            for e in range(EXPERTS):
                dense |= {f"{name}.{e}.{proj}": each for proj, each in zip(PROJ, (*w13[e].chunk(2), w2[e]))}
    return dense


def save_gpt_oss(folder) -> gpt_oss_experts.Layer:
    """A tiny gpt-oss as it is published."""
    whole, start = gpt_oss_experts.Layer(), "model.layers.0.mlp.experts."
    sizes = {
        "hidden_size": gpt_oss_experts.HIDDEN,
        "intermediate_size": gpt_oss_experts.INTER,
        "layer_types": ["full_attention"],
    }
    model = made("GptOss", num_local_experts=EXPERTS, num_experts_per_tok=2, **sizes)
    tensors = {name: t for name, t in model.state_dict().items() if not name.startswith(start)}
    for name, parts, bias in (("gate_up", whole.w13, whole.b13), ("down", whole.w2, whole.b2)):
        each = {"blocks": parts.canonical.unflatten(-1, (-1, 16)), "scales": parts.scales, "bias": bias}
        tensors |= {f"{start}{name}_proj_{suffix}": tensor for suffix, tensor in each.items()}
    left_out = [*gpt_oss_experts.CONFIG["modules_to_not_convert"], "model.embed_tokens", "lm_head"]
    write(folder, model, tensors, gpt_oss_experts.CONFIG | {"modules_to_not_convert": left_out})
    return whole


def packed_modules(model: torch.nn.Module) -> dict[str, Any]:
    """{the model's name of a layer: its packed module}."""
    return {
        name.removesuffix(".routed_experts"): m.jitgemm for name, m in model.named_modules() if hasattr(m, "jitgemm")
    }


def check(model, dense, exact=True, at=("tp", 0, 1)):
    """A rank's packed layers hold its part of the files', its output layer too, if it is in `dense`; at: (split, rank, ranks)."""
    (split, number, size), seen = at, set()

    def mine(weight, dim=0):
        return weight.chunk(size, dim)[number]

    for name, packed in packed_modules(model).items():
        above, _, last = name.rpartition(".")
        if hasattr(packed, "w13"):
            seen |= {f"{name}.{e}.{proj}" for e in range(EXPERTS) for proj in PROJ}
            cut = mine if split == "tp" else lambda weight, dim=0: weight
            for i, e in enumerate(range(EXPERTS) if split == "tp" else mine(torch.arange(EXPERTS)).tolist()):
                gate, up, down = (dense[f"{name}.{e}.{proj}"] for proj in PROJ)
                same(packed.w13.weight[i], torch.cat([cut(gate), cut(up)]), exact)
                same(packed.w2.weight[i], cut(down, 1), exact)
        elif last == "lm_head":
            seen |= {name} & set(dense)
            if name in dense:  # filled up to 64 rows
                same(
                    packed.weight, mine(torch.nn.functional.pad(dense[name], (0, 0, 0, -len(dense[name]) % 64))), exact
                )
        else:
            parts = [f"{above}.{part}" for part in JOINED.get(last, (last,))]
            seen |= set(parts)
            same(packed.weight, torch.cat([mine(dense[part], 0 if last in JOINED else 1) for part in parts]), exact)
    assert seen == set(dense)


def same(weight, expected, exact=True):
    found = weight.dequantize()
    found = (rotated(found) if weight.rotation else found).double()  # back
    assert torch.equal(found, expected) if exact else (found - expected).norm() < 0.12 * expected.norm()
