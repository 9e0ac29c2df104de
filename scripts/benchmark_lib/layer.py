"""The four Linears of Llama's decoder layers in one decode step, with the norms, the residual additions and the gate
around them: as modules, compiled, and as calls written by hand. Attention is left out: o_proj reads the columns
of q.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.functional import silu

import jitgemm
import jitgemm.nn
from jitgemm.nn.layers.packed import LHS_DTYPES

from .llama import ModelSizes
from .timing import REPLAYS, ROUNDS, Launched, Timed

EPS = 1e-5
BYTES_PER_US = 4.5e6
"""What the floor reads weights at: 4.5 TB/s, what an H200's memory gives of its 4.8."""
PASSES = 4
"""Passes through all layers in one CUDA graph, so that the gap between two replays counts little."""
ACTIVATIONS = ("e4m3", "int8")


# ---- the modules -----------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """The projections, with q's columns in place of what attention makes of q, k and v."""

    def __init__(self, sizes: ModelSizes):
        super().__init__()
        rows = sizes.hidden + 2 * sizes.kv_heads * (sizes.hidden // sizes.heads)
        self.qkv_proj = torch.nn.Linear(sizes.hidden, rows, bias=False)
        self.o_proj = torch.nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.qkv_proj(x)[..., : self.o_proj.in_features])


class MLP(torch.nn.Module):
    def __init__(self, sizes: ModelSizes):
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(sizes.hidden, 2 * sizes.intermediate, bias=False)
        self.down_proj = torch.nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(silu(gate) * up)


class Layer(torch.nn.Module):
    def __init__(self, sizes: ModelSizes):
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(sizes.hidden, eps=EPS)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = torch.nn.RMSNorm(sizes.hidden, eps=EPS)
        self.mlp = MLP(sizes)

    def linears(self) -> tuple[Any, ...]:
        return self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(torch.nn.Module):
    """Layers in a row: x [tokens, 1, hidden] -> the same."""

    def __init__(self, sizes: ModelSizes):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def random_stack(sizes: ModelSizes, device: str, seed: int) -> Stack:
    """In bf16; each Linear gives values about as large as it takes."""
    with torch.device("meta"):
        stack = Stack(sizes).to(torch.bfloat16).eval()
    stack.to_empty(device=device)
    torch.manual_seed(seed)
    for parameter in stack.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return stack


def shared_copy(stack: Stack) -> Stack:
    """A copy of the modules over the same tensors."""
    return copy.deepcopy(stack, {id(each): each for each in (*stack.parameters(), *stack.buffers())})


# ---- by hand ---------------------------------------------------------------------------------------------------------


class ByHand:
    """The calls of all layers over a stack's weights, on tokens x [m, hidden].

    Hidden states are a sum of two tensors between layers, which the quantiser of the next layer adds. So they are
    ahead of the first layer, lest that be another kernel: x + 0.
    """

    def __init__(self, stack: Stack, x: torch.Tensor):
        linears = [layer.linears() for layer in stack.layers]
        self.weights = [tuple(linear.weight for linear in each) for each in linears]
        self.norms = [
            [norm.weight.detach() for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
            for layer in stack.layers
        ]
        self.x, self.zeros, self.hidden = x, torch.zeros_like(x), torch.empty_like(x)
        self.outs = tuple(x.new_empty(len(x), weight.n) for weight in self.weights[0])
        self.attended = x.new_empty(len(x), self.weights[0][1].k)
        self.quantise = partial(jitgemm.quantize_activations, dtype=LHS_DTYPES[linears[0][0].activation])
        self.inputs: list[tuple[torch.Tensor, ...]] = []
        """Of each GEMM, in a row, as the last call of `fused` that was to keep them found them."""

    def fused(self, keep: bool = False, attention: bool = False) -> None:
        """Leaves the hidden states as self.hidden + self.outs[-1].

        attention: two kernels of PyTorch's, which change nothing, stand where a model has attention.
        """
        inputs = []

        def multiply(lhs: tuple[torch.Tensor, ...], i: int) -> torch.Tensor:
            if keep:
                inputs.append(lhs)
            jitgemm.gemm_w4a8_nt(lhs, weights[i], self.outs[i])
            return self.outs[i]

        y, hidden = self.x, self.zeros
        for weights, norms in zip(self.weights, self.norms):
            *lhs, hidden = self.quantise(y, rms_norm=norms[0], eps=EPS, residual=hidden, residual_out=self.hidden)
            q = multiply(tuple(lhs), 0)[:, : weights[1].k]
            if attention:
                q = torch.add(q.mul_(1), 0, out=self.attended)
            y = multiply(self.quantise(q), 1)
            *lhs, hidden = self.quantise(y, rms_norm=norms[1], eps=EPS, residual=hidden, residual_out=hidden)
            y = multiply(self.quantise(multiply(tuple(lhs), 2), silu_mul=True), 3)
        if keep:
            self.inputs = inputs

    def gemms(self) -> None:
        """The GEMMs alone, on kept inputs."""
        inputs = iter(self.inputs)
        for weights in self.weights:
            for weight, out in zip(weights, self.outs):
                jitgemm.gemm_w4a8_nt(next(inputs), weight, out)

    def result(self, call: Callable[[], None]) -> torch.Tensor:
        """The hidden states [m, hidden] that one of the two makes."""
        for out in self.outs:
            out.fill_(torch.nan)
        call()
        return self.hidden + self.outs[-1]


# ---- the contestants -------------------------------------------------------------------------------------------------

BY_HAND = ("gemms", "hand", "hand-attention")
CONTESTANTS = (*BY_HAND, "modules", "compiled", "bf16", "floor")


@dataclass
class Weights:
    """The stack of one kind of activations; None: bf16."""

    activation: str | None
    stack: Stack

    @classmethod
    def quantised(cls, stack: Stack, activation: str, group_size: int) -> Weights:
        stack = shared_copy(stack)
        jitgemm.nn.quantize_(stack, activation=activation, group_size=group_size, clip_steps=0)
        return cls(activation, stack)


def floor_us(stack: Stack, group_size: int) -> float:
    """What reading a layer's weights takes: 4 bits a value, and a 16-bit scale a group."""
    values = sum(linear.in_features * linear.out_features for linear in stack.layers[0].linears())
    return values * (1 / 2 + 2 / group_size) / BYTES_PER_US


@dataclass
class Entry:
    """What is timed: `call`; `result` gives the hidden states that it makes."""

    name: str
    call: Callable[[], Any]
    result: Callable[[], torch.Tensor]


def entries(weights: Weights, names: Sequence[str], hand: ByHand | None, x: torch.Tensor, compiled: Any) -> list[Entry]:
    """The contestants over these weights; compiled: what makes a module a compiled one."""
    made: list[Entry] = []
    for name in names:
        if hand is not None and name in BY_HAND:
            call = hand.gemms if name == "gemms" else partial(hand.fused, attention=name != "hand")
            made.append(Entry(name, call, partial(hand.result, call)))
        elif (name == "bf16") == (weights.activation is None) and name not in (*BY_HAND, "floor"):
            module = weights.stack if name == "modules" else compiled(weights.stack)
            run = partial(module, x[:, None])
            made.append(Entry(name, run, lambda run=run: run()[:, 0]))
    return made


def time_layer(
    sizes: ModelSizes,
    names: Sequence[str],
    activations: Sequence[str],
    batches: Sequence[int],
    group_size: int,
    backend: str | None,
    device: str,
    seed: int,
    allocations: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each contestant, kind of activations and number of tokens.

    Args:
        allocations: how many times each contestant gets its buffers, elsewhere in memory: some places take 1.5 us of a
            layer more than others.

    Returns:
        contestant, activation (None for bf16), tokens; us: of a layer, the median over the allocations of the medians
        of all replays, which are us_by_allocation; spread: relative, of the replays, the largest; times_hand: us over
        that of the calls by hand; difference: relative, of what the layers add to x from what the calls by hand do, for
        bf16 from what its modules do uncompiled. The floor has no spread and no difference: it is computed.
    """
    gpu = torch.device(device).type == "cuda"
    base = random_stack(sizes, device, seed)
    kinds: list[Weights] = []
    for activation in activations if set(names) - {"bf16"} else ():
        say(f"{activation}: quantising {sizes.layers} layers")
        kinds.append(Weights.quantised(base, activation, group_size))
        if gpu:
            say(f"{activation}: compiling and loading kernels")
            jitgemm.nn.warmup(kinds[-1].stack, max(batches), compiled=True)
    if "bf16" in names:
        kinds.append(Weights(None, base))

    def compiled(module: Stack) -> Any:
        return module if backend is None else torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    rows: list[dict[str, Any]] = []
    for m in batches:
        torch._dynamo.reset()  # a function is compiled for a few kinds of arguments at most
        tokens = torch.randn(m, sizes.hidden, generator=torch.Generator().manual_seed(seed))
        found: dict[tuple[str, str | None], tuple[dict[str, Any], list[Timed]]] = {}  # row and clocks of a contestant
        between = []
        for place in range(allocations):
            between.append(torch.empty(place * 3 << 17, dtype=torch.uint8, device=device))
            x = tokens.to(device, torch.bfloat16)
            for weights in kinds:
                kind = weights.activation
                if kind is None:
                    hand, exact = None, weights.stack(x[:, None])[:, 0]
                else:
                    hand = ByHand(weights.stack, x)
                    exact = hand.result(partial(hand.fused, keep=True))
                for entry in entries(weights, names, hand, x, compiled):
                    if (entry.name, kind) not in found:
                        say(f"{m} token{'s' if m > 1 else ''}: {' '.join(filter(None, (entry.name, kind)))}")
                        row = {"contestant": entry.name, "activation": kind, "tokens": m}
                        added = (exact - x).float()
                        row["difference"] = float((entry.result().float() - exact.float()).norm() / added.norm())
                        found[entry.name, kind] = row, []
                    found[entry.name, kind][1].append(
                        (Timed if gpu else Launched)([entry.call] * (PASSES if gpu else 1))
                    )
                if kind is not None and "floor" in names:
                    row = {"contestant": "floor", "activation": kind, "tokens": m}
                    found["floor", kind] = row | {"us": floor_us(weights.stack, group_size)}, []
        timed = [clock for _, clocks in found.values() for clock in clocks]
        for i in range(ROUNDS if gpu else 1):
            for clock in random.Random(i).sample(timed, len(timed)):  # nobody keeps its neighbours
                clock.turn(REPLAYS if gpu else 1)
        for row, clocks in found.values():
            if clocks:
                us = [clock.us / sizes.layers for clock in clocks]
                spread = max(clock.spread for clock in clocks)
                row |= {"us": median(us), "us_by_allocation": us, "spread": spread}
            rows.append(row)
    hands = {(row["activation"], row["tokens"]): row["us"] for row in rows if row["contestant"] == "hand"}
    for row in rows:
        by_hand = hands.get((row["activation"], row["tokens"]))
        if by_hand is not None:
            row["times_hand"] = row["us"] / by_hand
    return rows
