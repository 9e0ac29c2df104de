"""Layers and a small model whose results have the same bits on any number of ranks."""

from __future__ import annotations

import copy

import builders
import torch
import two_level
from parallel_layers import linear, quantised

import jitgemm.nn
from jitgemm.nn import PackedLinear, W4A8Experts, W4A8Linear, W8A8Linear
from jitgemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel
from jitgemm.weight.pack import pack_w4
from jitgemm.weight.quantize import quantize_w4

K = 2048


def layer_in(k: int = K, bias: bool = True, **options) -> PackedLinear:
    return quantised(linear(k=k, bias=bias), **options)


def corrected() -> PackedLinear:
    parts = builders.weight_parts(7, 128, K, 128, zero_point=True)
    weight = pack_w4(parts.q, parts.scale, parts.zero, group_size=128, lhs_dtype=torch.int8, correction=True)
    return W4A8Linear(weight, activation="int8")


def with_f16_sums(layer: PackedLinear) -> PackedLinear:
    layer.sums = "f16"
    assert layer.call_sums == "f16"
    return layer


CASES = {
    "int8, per channel": lambda: layer_in(activation="int8", group_size=K),
    "int8, two levels": lambda: W4A8Linear(
        two_level.parts(5, 128, K).packed, linear().bias.detach(), activation="int8"
    ),
    "int8, 8 bits": lambda: W8A8Linear.from_linear(linear(k=K), activation="int8"),
    "int8, rotated": lambda: layer_in(activation="int8", group_size=K, rotation=128),
    "int8, 16 columns a rank": lambda: layer_in(128, activation="int8", group_size=128),
    "int8, groups": lambda: layer_in(activation="int8"),
    "int8, groups with corrections": lambda: corrected(),
    "e4m3, groups of 128": layer_in,
    "e4m3, groups of 32, rotated": lambda: layer_in(group_size=32, rotation=128, bias=False),
    "e4m3, per channel": lambda: layer_in(group_size=K),
    "e4m3, by block": lambda: layer_in(activation="e4m3_block"),
    "e4m3, 8 bits": lambda: W8A8Linear.from_linear(linear(k=K)),
    "e4m3, sums in f16": lambda: with_f16_sums(layer_in()),
    "static": lambda: W4A8Linear(layer_in().weight, linear().bias.detach(), input_scale=torch.tensor([0.02])),
}


def on_one(layer: PackedLinear, x: torch.Tensor, dim: str = "k") -> torch.Tensor:
    whole = copy.deepcopy(layer)
    whole.tp_invariant = dim
    return whole(x)


class Model(torch.nn.Module):
    """Attention and an MLP of a small Llama, with a head."""

    def __init__(self, heads: int = 8, hidden: int = 1024, inter: int = 2048, words: int = 96):
        super().__init__()
        torch.manual_seed(1)
        make = lambda k, n: torch.nn.Linear(k, n, bias=False)  # noqa: E731
        self.embed, self.head = torch.nn.Embedding(words, hidden), make(hidden, words)
        self.q, self.k, self.v, self.o = (make(hidden, hidden) for _ in range(4))
        self.gate, self.up, self.down = make(hidden, inter), make(hidden, inter), make(inter, hidden)
        self.size = hidden // heads
        self.to(torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        h = torch.nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = (each(h).unflatten(-1, (-1, self.size)).transpose(0, 1) for each in (self.q, self.k, self.v))
        y = torch.stack(
            [torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True) for each in zip(q, k, v)]
        )
        x = x + self.o(y.transpose(0, 1).flatten(1))
        h = torch.nn.functional.rms_norm(x, x.shape[-1:])
        x = x + self.mlp(h)
        return self.head(torch.nn.functional.rms_norm(x, x.shape[-1:])).float().log_softmax(-1)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


class Mixture(Model):
    """The same with eight experts, two of them for each token."""

    def __init__(self, hidden: int = 1024, inter: int = 128):
        super().__init__(hidden=hidden)
        del self.gate, self.up, self.down
        self.router = torch.nn.Linear(hidden, 8, bias=False, dtype=torch.bfloat16)
        made = [torch.randn(8, n, k) / k**0.5 for n, k in ((2 * inter, hidden), (hidden, inter))]
        self.experts = W4A8Experts(*(quantize_w4(weight, 128, clip_steps=0) for weight in made))
        self.experts.batch_invariant = True

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(h).float().softmax(-1).topk(2)
        return self.experts(h, ids, weights)


KINDS = {
    "int8, per channel": {"activation": "int8", "group_size": "channel", "clip_steps": 0},
    "two levels": {"activation": "int8", "scheme": "two-level"},
    "e4m3, groups of 64": {"group_size": 64, "clip_steps": 0},
    "experts": {"group_size": 64, "clip_steps": 0},
}


def model_of(kind: str, device: str = "cpu", options: dict | None = None) -> Model:
    model, options = (Mixture if kind == "experts" else Model)(), KINDS[kind] if options is None else options
    jitgemm.nn.quantize_(model, filter=lambda name, module: name not in ("head", "router"), **options)
    for name, layer in model.named_children():
        if isinstance(layer, PackedLinear):
            layer.tp_invariant = "k" if name in ("o", "down") else "n"
    return model.to(device)


def plan_of(model: Model, exchange: str = "collectives") -> dict:
    rows = RowwiseParallel(tp_invariant=True, exchange=exchange)
    plan = dict.fromkeys("qkv", ColwiseParallel(tp_invariant=True)) | {"o": rows}
    if isinstance(model, Mixture):
        return plan | {"experts": ExpertParallel(tp_invariant=True)}
    return plan | dict.fromkeys(("gate", "up"), plan["q"]) | {"down": rows}


@torch.no_grad()
def generated(model, steps: int = 3) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their log probabilities."""
    tokens, found = [3, 14, 15, 9], []
    for _ in range(steps):
        words = model(torch.tensor(tokens, device=model.head.weight.device))[-1]
        tokens.append(int(words.argmax()))
        found.append(words[tokens[-1]])
    return tokens, torch.stack(found).cpu()
