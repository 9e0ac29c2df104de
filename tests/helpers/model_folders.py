"""Small models in folders, as people have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer

from jitgemm.nn.quantize.evaluate import help_texts, windows_of
from jitgemm.nn.quantize.quantize import Quantising
from jitgemm.nn.recipe import Recipe

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 272, "max_position_embeddings": 512,
}  # fmt: skip
MOE = SIZES | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
LAYERS = [f"model.layers.{number}.{name}" for number in (0, 1) for name in PROJECTIONS]


def short_texts() -> tuple[str, str]:
    """Of the texts as much as tests need: a token for each byte of all of them takes half a second a run."""
    held, text = help_texts()
    return held, text[:40000]


def model_of(kind: str, dtype: torch.dtype = torch.bfloat16, **sizes) -> torch.nn.Module:
    config = getattr(transformers, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes)).eval()
    for name, tensor in model.named_parameters():
        if tensor.dim() > 1 or name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.1)  # so that logits differ
    return model.to(dtype)


def folder_of(path: Path, model: torch.nn.Module, shard: str = "150KB") -> Path:
    """A folder as people have it: several shards, a tokenizer, files that nobody knows."""
    model.save_pretrained(path, max_shard_size=shard)
    byte_tokenizer().save_pretrained(path)
    (path / "LICENSE").write_text("as it was")
    (path / "pytorch_model.bin").write_text("weights of another kind")
    return path


def emptied(folder: Path) -> torch.nn.Module:
    """The model of a folder, with other values."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    torch.manual_seed(9)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(24)[None]).logits


def quantised(folder: Path, windows: int | None = 2, **options) -> torch.nn.Module:
    """What `quantize_` makes of the folder's model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    batches = None
    if windows is not None:
        ids = windows_of(transformers.AutoTokenizer.from_pretrained(folder), short_texts()[1], windows)
        batches = [ids]
    keep_8bit = options.pop("keep_8bit", None)
    recipe = Recipe.of({"group_size": 32, "positive_scales": True} | options, calibrated=batches is not None)
    for _ in Quantising(model, recipe, calibration=batches, keep_8bit=keep_8bit).stages():
        pass
    return model
