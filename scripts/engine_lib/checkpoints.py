"""Small random models with real weights for vllm_engine.py: one file in bf16, and files of the same values quantised.

Nothing here is jitgemm's code: the libraries' own packers, or a format's definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

E4M3 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(inputs: dict[str, Any] | None, group: int = 128) -> dict[str, Any]:
    """A compressed-tensors config of 4 bits in groups."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head", "re:.*mlp.gate$"],
    }  # fmt: skip


GROUP = 128
SCHEME = compressed(E4M3, GROUP)


def by_compressed_tensors(q: Any, scale: Any) -> dict[str, Any]:
    """A layer's tensors, packed by the library itself; it rounds the dequantised weight to the same codes again."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(SCHEME["config_groups"]["group_0"])
    tensors = {"weight": dequantised(q, scale), "weight_scale": scale}
    return PackedQuantizationCompressor.compress(tensors, scheme)


def by_gptq(q: Any, scale: Any) -> dict[str, Any]:
    """A layer's tensors by GPTQ's definition, with its zero points of 8 stored less one."""
    import torch

    def words(codes: Any) -> Any:
        places = torch.arange(0, 32, 4)[:, None]
        return (codes.long().unflatten(0, (-1, 8)) << places).sum(1).int()  # int32 wraps

    n, k = q.shape
    return {
        "qweight": words(q.T + 8),
        "qzeros": words(torch.full((n, k // GROUP), 8 - 1)).T,
        "scales": scale.T,
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
    }


def dequantised(q: Any, scale: Any) -> Any:
    return (q.float() * scale.float().repeat_interleave(GROUP, 1)).bfloat16()


GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
}  # fmt: skip
PACKED = {"compressed-tensors": (by_compressed_tensors, SCHEME), "gptq": (by_gptq, GPTQ)}
"""What packs a layer's codes and scales, and the model's quantization_config."""


def to_int4(weight: Any) -> tuple[Any, Any]:
    """Codes, int8 [n, k], and scales, bf16 [n, k / 128]."""
    import torch

    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / 7).bfloat16()
    return (groups / scale[..., None].float()).round().clamp(-8, 7).flatten(1).to(torch.int8), scale


# ---- MXFP4 -----------------------------------------------------------------------------------------------------------

MXFP4 = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def to_mxfp4(weight: Any) -> tuple[Any, Any]:
    """Codes, uint8 [..., k], of e2m1 and exponents of their scales, uint8 [..., k / 32], by the OCP specification."""
    import torch

    groups = weight.float().unflatten(-1, (-1, MXFP4))
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 1 - 2  # 2: the largest exponent of e2m1
    scaled = torch.ldexp(groups, -exponent[..., None])
    between = torch.tensor(E2M1).unfold(0, 2, 1).mean(1)
    codes = torch.bucketize(scaled.abs(), between) + 8 * (scaled < 0)
    return codes.flatten(-2).to(torch.uint8), (exponent + 127).to(torch.uint8)


def values(codes: Any, scales: Any) -> Any:
    """What they stand for, in bf16, which holds it."""
    import torch

    table = torch.tensor([*E2M1, *(-each for each in E2M1)])
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    return (table[codes.long()].unflatten(-1, (-1, MXFP4)) * powers[..., None]).flatten(-2).bfloat16()


def pairs(codes: Any) -> Any:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def by_fp4(codes: Any, scales: Any) -> dict[str, Any]:
    """An expert's linear, as compressed-tensors has it."""
    return {"weight_packed": pairs(codes), "weight_scale": scales}


def by_gpt_oss(codes: Any, scales: Any) -> dict[str, Any]:
    """The linears of all experts of a layer, as gpt-oss' files have them."""
    return {"blocks": pairs(codes).unflatten(-1, (-1, MXFP4 // 2)), "scales": scales}


FP4_SCHEME = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "format": "mxfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": MXFP4},
    }},
    "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"],
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


# ---- models ----------------------------------------------------------------------------------------------------------

Packer = Callable[[Any, Any], dict[str, Any]]
KINDS: dict[str, dict[str, tuple[Packer, dict[str, Any]]]] = {
    "dense": PACKED,
    "moe": PACKED,
    "moe-mxfp4": {"compressed-tensors": (by_fp4, FP4_SCHEME)},
    "gpt-oss": {"mxfp4": (by_gpt_oss, GPT_OSS)},
}
"""Models, and the files of each beside that in bf16."""
QUANTISED = {"dense": "_proj", "moe": "_proj", "moe-mxfp4": ".experts.", "gpt-oss": "experts."}
"""What the names of quantised weights have in them."""
Drawn = dict[str, tuple[Any, Any]]


def small(kind: str, folder: Path, names: Iterable[str], layers: int = 4) -> Drawn:
    """One small random model, as these checkpoints and in bf16: {layer that is quantised: (codes, scales)}."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config, tensors = random_model(kind, layers)
    stacked, mxfp4 = kind == "gpt-oss", "mxfp4" in KINDS[kind] or kind == "moe-mxfp4"
    drawn: Drawn = {}
    others = {}
    for name, tensor in tensors:
        if QUANTISED[kind] not in name or name.endswith("_bias"):
            others[name] = tensor.clone()
        else:
            tensor = tensor.transpose(1, 2) if stacked else tensor
            drawn[name.removesuffix(".weight")] = to_mxfp4(tensor) if mxfp4 else to_int4(tensor)
    for checkpoint in ("bf16", *names):
        pack, quantization = KINDS[kind].get(checkpoint, (None, None))
        written = dict(others)
        for layer, parts in drawn.items():
            if pack is not None:
                between = "_" if stacked else "."
                written |= {f"{layer}{between}{name}": part.contiguous() for name, part in pack(*parts).items()}
            elif stacked:
                written[layer] = values(*parts).transpose(1, 2).contiguous()
            else:
                written[f"{layer}.weight"] = (values if mxfp4 else dequantised)(*parts)
        path = folder / checkpoint
        path.mkdir()
        save_file(written, path / "model.safetensors", {"format": "pt"})
        if quantization is not None:
            config.quantization_config = quantization
        config.save_pretrained(path)
    return drawn


def random_model(kind: str, layers: int) -> tuple[Any, Iterator[tuple[str, Any]]]:
    """Its config and its tensors in bf16, biases and attention sinks included."""
    import torch
    import transformers

    sizes = {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 1024,
    }  # fmt: skip
    if kind == "gpt-oss":
        more = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 512, "head_dim": 64}
        more |= {"swiglu_limit": 7.0}  # which not all of transformers' configs have by themselves
        config: Any = transformers.GptOssConfig(**sizes | more)
    elif kind == "dense":
        config = transformers.LlamaConfig(**sizes)
    else:
        more = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
        config = transformers.Qwen3MoeConfig(**sizes, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    state = model.state_dict()
    if kind != "gpt-oss":
        return config, one_by_one(state)
    for name, tensor in state.items():
        if name.endswith(("bias", "sinks")):
            tensor.normal_(0, 0.1)
    return config, iter(state.items())


def one_by_one(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A state dict with each expert's projections under names of their own, as checkpoints have them."""
    for name, tensor in tensors.items():
        above, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for e, expert in enumerate(tensor):
            if last == "down_proj":
                yield f"{above}.{e}.down_proj.weight", expert
            else:
                yield from zip((f"{above}.{e}.{part}_proj.weight" for part in ("gate", "up")), expert.chunk(2))
