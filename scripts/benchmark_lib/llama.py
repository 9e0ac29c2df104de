"""A whole Llama, decoding and prefilling, with other kinds of Linears in it; blocks compiled, one CUDA graph a step.

The modules are transformers', so that `quantize_` and compilers meet what they meet in models. The forward around them is
written out here: caches and masks have fixed sizes, and `torch.compile` takes one block, whose code serves all.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import jitgemm.nn
from jitgemm.nn import W4A8Linear

ROUNDS = 3
ATTENTIONS = ("sdpa", "flex")
SLOTS = 64
"""Caches have a multiple of so many tokens: SDPA's kernels take masks of such sizes as they are."""
MOST_DIFFERENT = 0.3
"""Largest relative difference between the results of compiled and of plain modules, of some layers. Both round to bf16,
elsewhere, and 8-bit activations turn that into 4 % within three layers of random weights; wrong results differ by 1 and
more."""
MOST_DIFFERENT_LOGITS = 0.6
"""The same of a whole model: 32 layers make 24 to 48 % of it, torch's own FP8 most."""


@dataclass(frozen=True)
class ModelSizes:
    """A Llama model's sizes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int

    def check(self, group_size: int) -> None:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"--heads: expected an even head size and a multiple of --kv-heads, got hidden {self.hidden}, heads "
                f"{self.heads}, kv-heads {self.kv_heads}"
            )
        for name, size in (("--hidden", self.hidden), ("--intermediate", self.intermediate)):
            if group_size < 1 or size % group_size:
                raise ValueError(f"{name}: expected a multiple of --group-size {group_size}, got {size}")

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.positions,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            bos_token_id=0,
            eos_token_id=1,
        )


def empty_model(sizes: ModelSizes, device: str, seed: int) -> Any:
    """A model with random bf16 weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # not .to(bfloat16), which would round the rotary frequencies
    try:
        with torch.device(device):
            return LlamaForCausalLM(sizes.config()).eval()
    finally:
        torch.set_default_dtype(before)


# ---- the contestants -------------------------------------------------------------------------------------------------


class Fp8Linear(torch.nn.Module):
    """torch._scaled_mm with a scale per row of the weight and per token; the quantiser is the compiler's to fuse."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        codes, scale = _quantised(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = _quantised(x.reshape(-1, x.shape[-1]))
        # use_fast_accum: sums stay in the tensor cores, the faster setting and the one vLLM runs with.
        options = {"out_dtype": x.dtype, "use_fast_accum": x.is_cuda}
        out = torch._scaled_mm(q, self.codes.t(), scale_a=scale, scale_b=self.scale, **options)
        return out.view(*x.shape[:-1], -1)


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes, and the scale of each row [rows, 1]."""
    values = rows.float()
    scale = (values.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def bf16(model: Any, group_size: int) -> None:
    """torch.nn.Linear."""


def fp8(model: Any, group_size: int) -> None:
    """torch._scaled_mm, a scale per row and per token."""
    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.model.get_submodule(parent), child, Fp8Linear(module))


def ours(activation: str, head: bool = False) -> Callable[[Any, int], None]:
    """head: lm_head in 8 bits, with these activations."""

    def change(model: Any, group_size: int) -> None:
        lm_head = activation if head else None
        jitgemm.nn.quantize_(model, activation=activation, lm_head=lm_head, group_size=group_size, clip_steps=0)

    return change


CONTESTANTS: dict[str, Callable[[Any, int], None]] = {
    "bf16": bf16,
    "fp8": fp8,
    "e4m3": ours("e4m3"),
    "int8": ours("int8"),
    "e4m3-head8": ours("e4m3", head=True),
}
"""By name: what makes a bf16 model another one, in place."""
USUAL = ("bf16", "fp8", "e4m3", "int8")


# ---- a forward of fixed sizes ----------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [batch, heads, tokens, size], its halves turned by each token's angles, whose cosines and sines are given."""
    low, high = x.chunk(2, -1)
    return x * rotary[0] + torch.cat((-high, low), -1) * rotary[1]


def block(  # type: ignore[no-untyped-def]
    layer, hidden, rotary, keys, values, positions, mask, kind
) -> torch.Tensor:
    """A decoder layer: hidden [batch, tokens, size] -> the same; writes tokens' keys and values to their positions.

    mask: what a single token adds to its scores [batch, 1, 1, slots]; None for a prompt, whose tokens are all there is.
    kind: of a single token's attention, one of ATTENTIONS; "flex" is for a compiler, which cuts the cache into parts
    that SMs share.
    """
    attention = layer.self_attn
    batch, tokens, _ = hidden.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    x = layer.input_layernorm(hidden)
    q, k, v = (
        projection(x).view(batch, tokens, -1, size).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = rotated(q, rotary), rotated(k, rotary)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    if mask is None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    elif kind == "flex":
        position = positions[0]
        out = flex_attention(
            q, keys, values, lambda score, b, h, q, at: torch.where(at <= position, score, -torch.inf), enable_gqa=True
        )
    else:
        # The heads that share keys as the tokens of one: kernels that take a mask know no such heads.
        shared = q.view(batch, kv_heads, -1, size)
        out = scaled_dot_product_attention(shared, keys, values, attn_mask=mask.expand(-1, *shared.shape[1:3], -1))
        out = out.reshape(q.shape)
    hidden = hidden + attention.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def first(model, ids, positions, slots) -> tuple[Any, ...]:  # type: ignore[no-untyped-def]
    """What all blocks of a forward share: hidden states, cosines and sines, the mask of a single token."""
    hidden = model.model.embed_tokens(ids)
    angles = positions[:, None].float() * model.model.rotary_emb.inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    mask = None
    if ids.shape[1] == 1:
        mask = torch.zeros_like(slots, dtype=hidden.dtype).masked_fill(slots > positions, float("-inf"))
        mask = mask.expand(len(ids), 1, 1, -1)
    return hidden, (angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)), mask


def last(model, hidden) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Logits [batch, vocab] of the last tokens."""
    return model.lm_head(model.model.norm(hidden[:, -1]))


class Forward:
    """A model's forward with a static cache for `batch` sequences.

    Args:
        length: tokens that the cache is for; it has some more.
        backend: `torch.compile`'s; None for modules as they are.
        ranks: that share the heads.
        attention: one of ATTENTIONS.
    """

    def __init__(
        self, model: Any, batch: int, length: int, backend: str | None = None, ranks: int = 1, attention: str = "sdpa"
    ):
        self.model, self.attention = model, attention
        config, device = model.config, model.device
        self.slots = torch.arange(-(-length // SLOTS) * SLOTS, device=device)
        heads, size = config.num_key_value_heads // ranks, config.hidden_size // config.num_attention_heads
        shape = batch, heads, len(self.slots), size
        self.caches = [
            [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2)] for _ in model.model.layers
        ]

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return (
                torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
                if backend is not None
                else function
            )

        self.first, self.block, self.last = map(compiled, (first, block, last))

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocab] of the last of ids [batch, tokens]: one token, or a prompt from position 0 on."""
        hidden, rotary, mask = self.first(self.model, ids, positions, self.slots)
        return self.last(self.model, self.layers(hidden, rotary, positions, mask))

    def layers(self, hidden, rotary, positions, mask) -> torch.Tensor:  # type: ignore[no-untyped-def]
        for layer, (keys, values) in zip(self.model.model.layers, self.caches, strict=True):
            hidden = self.block(layer, hidden, rotary, keys, values, positions, mask, self.attention)
        return hidden


class Steps:
    """A step of a forward, on a GPU as a CUDA graph: greedy decoding, a token a step for each sequence, or a prompt.

    Attributes:
        ids, positions: what the step takes, and in decoding leaves for the next one.
        logits: of the last step.
    """

    def __init__(self, forward: Forward, ids: torch.Tensor, first_position: int):
        device = forward.slots.device
        self.forward, self.ids = forward, ids.to(device, copy=True).contiguous()
        self.decodes = ids.shape[1] == 1
        self.positions = torch.arange(ids.shape[1], device=device) + first_position
        self.start = self.ids.clone(), self.positions.clone()
        self.run = self.step
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            self.run = graph.replay

    def step(self) -> None:
        self.logits = self.forward(self.ids, self.positions)
        if self.decodes:
            self.ids.copy_(self.logits.argmax(-1, keepdim=True))
            self.positions.add_(1)

    def rewind(self) -> None:
        for tensor, value in zip((self.ids, self.positions), self.start):
            tensor.copy_(value)

    def seconds(self, steps: int) -> float:
        """Of a step: the best of some rounds of so many."""
        best = float("inf")
        for _ in range(ROUNDS):
            self.rewind()
            if self.ids.is_cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
            start = time.perf_counter()
            for _ in range(steps):
                self.run()
            took = time.perf_counter() - start
            if self.ids.is_cuda:
                end.record()
                end.synchronize()
                took = begin.elapsed_time(end) * 1e-3
            best = min(best, took / steps)
        return best


@contextlib.contextmanager
def known_attention() -> Iterator[None]:
    """SDPA without cuDNN, whose plans depend on its version."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def time_llama(
    sizes: ModelSizes,
    names: Sequence[str],
    batches: Sequence[int],
    context: int,
    steps: int,
    prefill: int,
    group_size: int,
    backend: str | None,
    attention: str,
    device: str,
    seed: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each contestant and number of sequences, and for its prompt of `prefill` tokens (0 for none).

    Decoding starts from a cache with random keys and values of `context` tokens.

    Returns:
        contestant, kind ("decode" or "prefill"), sequences, us (a step's), tokens_per_s; times_NAME: how many times as
        fast as that contestant; difference: relative, of the logits from those of the modules as they are.
    """
    base = empty_model(sizes, device, seed)
    draw = torch.Generator().manual_seed(seed)
    prompts = [(b, 1, context, steps) for b in batches] + ([(1, prefill, 0, 2)] if prefill else [])
    inputs = [torch.randint(0, sizes.vocab, (b, tokens), generator=draw) for b, tokens, _, _ in prompts]
    rows: list[dict[str, Any]] = []
    for name in names:
        say(f"{name}: making the model")
        model = copy.deepcopy(base)
        CONTESTANTS[name](model, group_size)
        if device.startswith("cuda") and any(isinstance(module, W4A8Linear) for module in model.modules()):
            jitgemm.nn.warmup(model, max(b * tokens for b, tokens, _, _ in prompts), compiled=backend is not None)
        torch._dynamo.reset()  # a function is compiled for a few kinds of arguments at most
        for (batch, tokens, position, count), ids in zip(prompts, inputs):
            kind = "decode" if tokens == 1 else "prefill"
            say(f"{name}: {kind}, {batch} sequence{'s' if batch > 1 else ''}")
            with known_attention():
                length = position + (count if tokens == 1 else tokens)
                forward = Forward(model, batch, length, backend, attention=attention)
                for cache in forward.caches:
                    for each in cache:
                        each.normal_()
                taken = Steps(forward, ids, position)
                seconds = taken.seconds(count)
                taken.rewind()
                taken.run()
                found = taken.logits.float()
                taken.rewind()
                plain = Forward(model, batch, 0)
                plain.caches, plain.slots = forward.caches, forward.slots
                exact = plain(taken.ids, taken.positions).float()
            rows.append(
                {
                    "contestant": name,
                    "kind": kind,
                    "sequences": batch,
                    "us": seconds * 1e6,
                    "tokens_per_s": batch * tokens / seconds,
                    "difference": float((found - exact).norm() / exact.norm()),
                }
            )
            del forward, plain, taken
        del model
    for row in rows:
        for other in rows:
            if (other["kind"], other["sequences"]) == (row["kind"], row["sequences"]) and other["contestant"] in USUAL[
                :2
            ]:
                row[f"times_{other['contestant']}"] = other["us"] / row["us"]
    return rows
