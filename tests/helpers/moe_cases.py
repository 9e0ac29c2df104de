"""Layers of experts by seed, and what they compute by definition: for the CPU and GPU tests of the layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import builders
import mxfp4
import nvfp4
import torch
import two_level

from jitgemm.activations.call import quantize_activations

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglu_step", "situ")
"""Of gates and ups; "relu2" has no gates."""
ORDERS = ("gate_up", "up_gate", "interleaved")
MODES = {"e4m3": (torch.float8_e4m3fn, False), "s8": (torch.int8, False), "s8z": (torch.int8, True)}
"""Name -> (lhs_dtype, affine)."""


@dataclass
class Case:
    """A layer and its tokens; `arguments` and `options` are the call's."""

    tokens: int = 9
    top_k: int = 3
    experts: int = 5
    k: int = 64
    inter: int = 96
    n: int = 72
    seed: int = 1
    dtype: torch.dtype = torch.float32
    mode: str = "s8"
    group_size: int = 32
    zero_point: bool = False
    bits: int = 4
    tier: str = ""  # of MXFP4 weights, by which they are these; or "nvfp4", or "two_level"
    device: str = "cpu"
    scale: float = 4.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = {"lhs_dtype": MODES[self.mode][0], "affine": MODES[self.mode][1], **self.options}
        if self.options.get("activation") == "situ":
            self.options.setdefault("alpha", 4.0)

    @property
    def rows13(self) -> int:
        """n of w13."""
        return self.inter * (1 if self.options.get("activation") == "relu2" else 2)

    def _parts(self, seed: int, n: int, k: int) -> list[Any]:
        if self.tier == "nvfp4":
            seeds = range(100 * self.seed + seed, 100 * self.seed + seed + self.experts)
            return [nvfp4.parts(each, n, k, low=16, high=48) for each in seeds]
        if self.tier == "two_level":
            seeds = range(100 * self.seed + seed, 100 * self.seed + seed + self.experts)
            return [two_level.parts(each, n, k, most=16) for each in seeds]
        if self.tier:
            return [mxfp4.parts(100 * self.seed + seed + e, n, k, self.tier, shift=-16) for e in range(self.experts)]
        form: dict[str, Any] = {"zero_point": self.zero_point}
        if self.bits == 8:
            form = {"bits": 8, "codes": "e4m3" if self.mode == "e4m3" else "s8"}
        seeds = range(100 * self.seed + seed, 100 * self.seed + seed + self.experts)
        return [builders.weight_parts(each, n, k, self.group_size, **form) for each in seeds]

    @cached_property
    def parts13(self) -> list[Any]:
        return self._parts(1000, self.rows13, self.k)

    @cached_property
    def parts2(self) -> list[Any]:
        return self._parts(2000, self.n, self.inter)

    @cached_property
    def arguments(self) -> tuple:
        """x, w13, w2, topk_ids, topk_weights."""
        g = builders.generator(self.seed)
        x = (torch.randn((self.tokens, self.k), generator=g) * self.scale).to(self.dtype)
        w13, w2 = (
            replace(type(parts[0].packed).stacked(self.experts, lambda e: parts[e].packed), rotation=rotation)
            for parts, rotation in ((each, self.options.get("rotation", 0)) for each in (self.parts13, self.parts2))
        )
        w13, w2 = w13.to(self.device), w2.to(self.device)
        ids = choices(self.seed, self.tokens, self.top_k, self.experts)
        weights = torch.rand((self.tokens, self.top_k), generator=g)
        return x.to(self.device), w13, w2, ids.to(self.device), weights.to(self.device)

    def replaced(self, **changes: Any) -> tuple:
        """The arguments with others in their place, by name."""
        names = ("x", "w13", "w2", "topk_ids", "topk_weights")
        return tuple(changes.get(name, value) for name, value in zip(names, self.arguments))


def choices(seed: int, tokens: int, top_k: int, experts: int, kind: str = "uniform") -> torch.Tensor:
    """topk_ids, int64: "uniform", without repetition where there are enough experts; "zipf"; "one", all the same."""
    g = builders.generator(seed)
    if kind == "one":
        return torch.full((tokens, top_k), experts // 2)
    if kind == "zipf":
        odds = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
        return torch.multinomial(odds, max(1, tokens * top_k), True, generator=g)[: tokens * top_k].view(tokens, top_k)
    if top_k > experts:
        return torch.randint(0, experts, (tokens, top_k), generator=g)
    if tokens * experts > 1 << 22:  # so many numbers take seconds to sort
        steps = torch.randint(1, experts // top_k + 1, (tokens, top_k), generator=g).cumsum(1)
        return (torch.randint(0, experts, (tokens, 1), generator=g) + steps) % experts
    return torch.rand((tokens, experts), generator=g).argsort(1)[:, :top_k].contiguous()


def dequantized(values: torch.Tensor, mode: str, scheme: str = "token", rotation: int = 0) -> torch.Tensor:
    """fp32 [rows, k] -> what their codes stand for, fp64."""
    dtype, affine = MODES[mode]
    q, scale, *zero = quantize_activations(values, dtype, affine=affine, scheme=scheme, rotation=rotation)
    if scheme == "block":
        return q.double() * scale.double().repeat_interleave(128, 1)[:, : q.shape[1]]
    return (q.double() - (zero[0].double()[:, None] if affine else 0)) * scale.double()[:, None]


def activated(hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """What an expert makes of its first projection's result, [2 * inter] or without gates [inter], by a call's
    options."""
    activation, order, limit = (options.get(name) for name in ("activation", "order", "limit"))
    if activation == "relu2":
        return torch.relu(hidden) ** 2
    if order == "interleaved":
        gate, up = hidden[0::2], hidden[1::2]
    else:
        gate, up = hidden.chunk(2)
        gate, up = (up, gate) if order == "up_gate" else (gate, up)
    if activation == "situ":
        beta, linear = options["alpha"], limit
        up = up if linear is None else linear * torch.tanh(up / linear)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
    if limit is not None:
        up = up.clamp(-limit, limit)
        gate = gate if activation == "swiglu_step" else gate.clamp(max=limit)
    if activation == "swiglu_oai":
        return gate * torch.sigmoid(options.get("alpha", 1.702) * gate) * (up + 1)
    if activation in (None, "silu"):
        return torch.nn.functional.silu(gate) * up
    if activation == "swiglu_step":
        silu = torch.nn.functional.silu(gate)
        return (silu if limit is None else silu.clamp(max=limit)) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def by_definition(case: Case, **changes: Any) -> torch.Tensor:
    """The layer token by token, choice by choice in fp64, from the codes and scales that were packed."""
    x, _, _, ids, weights = case.replaced(**changes)
    options = case.options
    expert_map = options.get("expert_map")
    w13, w2 = ([part.dequantize_fp64() for part in parts] for parts in (case.parts13, case.parts2))
    bias13, bias2 = (
        torch.zeros(case.experts, n).double() if options.get(name) is None else options[name].double()
        for name, n in (("bias13", case.rows13), ("bias2", case.n))
    )
    addend = options.get("addend")
    out = torch.zeros(x.shape[0], case.n).double() if addend is None else addend.double().clone()
    forms = case.mode, options.get("scheme", "token"), options.get("rotation", 0)
    tokens = dequantized(x.float(), *forms)
    for t in range(x.shape[0]):
        for choice, weight in zip(ids[t].tolist(), weights[t].tolist()):
            if expert_map is not None:
                choice = int(expert_map[choice]) if 0 <= choice < len(expert_map) else -1
            if not 0 <= choice < case.experts:
                continue
            hidden = (w13[choice] @ tokens[t] + bias13[choice]).to(x.dtype).double()
            y = activated(hidden, options)
            result = w2[choice] @ dequantized(y.float()[None], *forms)[0] + bias2[choice]
            out[t] += weight * result.to(x.dtype).double()
    return out
