"""Small models for the tests of quantize_ and load_, and checkpoints of them."""

from __future__ import annotations

import builders
import torch

from jitgemm.checkpoint import Checkpoint
from jitgemm.nn import PackedExperts, PackedLinear


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 96)
        self.down = torch.nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """A language model in small: embedding, blocks, a Linear that does not fit, a head."""

    def __init__(self, tied: bool = False):
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(48, 64)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.odd = torch.nn.Linear(64, 10)
        self.lm_head = torch.nn.Linear(64, 48, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x), self.odd(x)


BLOCKS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
IDS = torch.arange(10).view(2, 5)


def quantised_names(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (PackedLinear, PackedExperts))]


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(builders.same_bits(x[name], y[name]) for name in x)


def stored(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight as compressed-tensors stores it, int-quantized per channel: {suffix: tensor}; and what it stands for."""
    scale = (weight.abs().amax(1, keepdim=True) / 7).bfloat16()
    q = (weight / scale.float()).round().clamp(-8, 7).to(torch.int8)
    return {"weight": q, "weight_scale": scale}, q * scale.float()


def checkpoint_tensors(
    model: torch.nn.Module, *quantised: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model's tensors, those of the quantised layers as `stored`; and all tensors with the weights they stand for."""
    names = quantised or [name for name in BLOCKS]
    tensors, dense = {}, {}
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in names and name != layer:
            found, dense[name] = stored(tensor)
            tensors |= {f"{layer}.{suffix}": value for suffix, value in found.items()}
        else:
            tensors[name] = dense[name] = tensor.clone()
    return tensors, dense


def config(bits: int = 4, **inputs) -> dict:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True} | inputs
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }


def opened(tensors: dict[str, torch.Tensor], **inputs) -> Checkpoint:
    return Checkpoint(tensors, config(**inputs))
