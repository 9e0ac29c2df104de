"""The experts of one layer of a mixture, their weights in 4 or 8 bits, tokens quantised to 8 bits.

Layers over the call `jitgemm.fused_experts`; they know no kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from jitgemm.activations.scheme import SILU_MUL, Gate
from jitgemm.moe.arguments import ExpertsCall, check_call_once, check_weights
from jitgemm.moe.call import Adapt, fused_experts, launch
from jitgemm.nn.layers.gate import decoded, encoded
from jitgemm.nn.layers.linear import input_rows, is_dtensor, result_type
from jitgemm.nn.layers.packed import Described, Packed, state_dict_parts
from jitgemm.weight.packed import W4Weight, W8Weight, Weight

if TYPE_CHECKING:
    from jitgemm.nn.layers.sharding import EngineSharding, ExpertSharding


class PackedExperts(Described):
    """The routed experts of a layer: out[t] = sum over i of topk_weights[t, i] * expert topk_ids[t, i] of x[t].

    `W4A8Experts` and `W8A8Experts` hold weights of one width; this class itself holds w13 of one and w2 of the other.
    An expert computes w2 · gate(w13 · x), with biases where it has them. Replaces the experts module of a transformers
    model, whose three arguments it takes; the router is not part of it. For inference: there is no gradient.

    `state_dict()` holds `gate` (fp64 [4] on the CPU: the numbers of `Gate`, compared when a state dict is loaded), and
    under `w13.` and `w2.` the buffers that `PackedLinear` lists, each stacked over the experts. They are moved by
    `.to(device)`, but never converted to another type, whatever the model is.

    Attributes:
        w13, w2: modules with `weight` (a `Weight` of E experts), `bias` ([E, n] or None) and the buffers above.
        gate: what stands between the GEMMs, see `Gate`.
        num_experts, hidden_dim, intermediate_dim: E, hidden and inter.
        top_k: experts of a token, or None; `warmup` asks, the call takes any number.
        activation: one of ACTIVATIONS: how both GEMMs' inputs are quantised, never with a static scale.
        batch_invariant: False; set it to True for results that do not depend on the other tokens, see `gemm_w4a8_nt`.
        sums: "f32"; set it to "f16" or "exact" for kernels that may add up so, see `Weight.with_sums`.
        batched: set it to True if `batched_experts.run_batched` is called: `warmup` then compiles its kernels, too.
        split: which experts this rank has; None for all. See `jitgemm.nn.parallel.ExpertParallel`.
    """

    batch_invariant = False
    batched = False
    split: ExpertSharding | EngineSharding | None = None
    kind: ClassVar[type[Weight]] = Weight
    """The class of its weights."""

    def __init__(
        self, w13: Weight, w2: Weight, bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None, *,
        gate: Gate = SILU_MUL, activation: str = "e4m3", top_k: int | None = None,
    ):  # fmt: skip
        """A layer over packed weights; no tensor is copied.

        Args:
            w13: E experts of [2 * inter, hidden], rows in the order of `gate.order`; [inter, hidden] without gates.
            w2: E experts of [hidden, inter].
            bias13, bias2: bf16, fp16 or fp32 [E, 2 * inter] and [E, hidden], or None; fp16 is widened to fp32.
            gate: what stands between the GEMMs, see `Gate`.
            activation: one of ACTIVATIONS.
            top_k: experts of a token, for `warmup`; None where it is not known.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        super().__init__()
        for name, weight in (("w13", w13), ("w2", w2)):
            if not isinstance(weight, self.kind):
                raise TypeError(f"{name}: expected a {self.kind.__name__}, got {type(weight).__name__}")
            if weight.experts is None:
                raise ValueError(f"{name}: expected a weight of several experts, got {weight!r}")
            if weight.permutation is not None:
                raise ValueError(f"{name}: expected no permutation, as experts share their quantised input, got one")
        if w2.rotation != w13.rotation:
            raise ValueError(f"w2: expected rotation {w13.rotation}, as w13 has, got {w2.rotation}")
        experts, hidden, inter = check_weights(w13, w2, gate.inputs), w13.k, w2.k
        if w2.n != hidden:
            raise ValueError(f"w2: expected n = {hidden}, as w13 has columns, got {w2.n}")
        if w2.device != w13.device:
            raise ValueError(f"w2: expected w13's device {w13.device}, got {w2.device}")
        self.num_experts, self.hidden_dim, self.intermediate_dim = experts, hidden, inter
        self.gate, self.activation, self.top_k = gate, activation, top_k
        self.w13 = Packed(w13, bias13, activation=activation)
        self.w2 = Packed(w2, bias2, activation=activation)
        # Of `fused_experts`, made once: it is called with few tokens, too.
        self._keywords = {**gate.keywords, **self.w13.scheme.keywords, "lhs_dtype": self.w13.lhs_dtype}

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> PackedExperts:
        """The layer whose `state_dict(prefix=prefix)` is among `tensors`; memory is shared with them.

        Of `PackedExperts` itself: of the class that its weights have.

        Raises:
            ValueError: a tensor is missing, or has the wrong shape or type.
        """
        if prefix + "gate" not in tensors:
            raise ValueError(f"state dict: expected a tensor {prefix + 'gate'!r}, found none")
        gate = decoded(tensors[prefix + "gate"])
        w13, w2 = (state_dict_parts(tensors, f"{prefix}{name}.") for name in ("w13", "w2"))
        if w13.activation != w2.activation:
            raise ValueError(f"state dict: {prefix}: expected one activation, got {w13.activation} and {w2.activation}")
        make = packed_experts if cls is PackedExperts else cls
        return make(w13.weight, w2.weight, w13.bias, w2.bias, gate=gate, activation=w13.activation)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the experts make of each token, on the current stream.

        Args:
            hidden_states: bf16, fp16 or fp32 [..., hidden].
            top_k_index: int32 or int64 [tokens, top_k]: experts of each token; those outside 0..E-1 are skipped.
            top_k_weights: floats [tokens, top_k].

        Returns:
            [..., hidden] of hidden_states' dtype, or of autocast's.

        Raises:
            TypeError, ValueError: an argument has the wrong dtype, size or device, or hidden_states or top_k_weights
                requires grad.
        """
        if is_dtensor(hidden_states):
            raise TypeError("hidden_states: expected a plain tensor, such as a DTensor's to_local(), got a DTensor")
        rows, dtype = input_rows(hidden_states, self.hidden_dim, "hidden_states"), result_type(hidden_states)
        out = self.run(rows if rows.dtype is dtype else rows.to(dtype), top_k_index, top_k_weights)
        return out.view(hidden_states.shape)

    def run(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        """The call itself, of rows [tokens, hidden]; options: of `fused_experts`, such as expert_map and out."""
        split: Any = self.split
        w13, w2 = self.w13, self.w2
        if split is not None and split.tp_invariant and split.world > 1:
            return self._run_invariantly(rows, ids, weights, **options)
        if split is not None and split.exchanges:
            from jitgemm.nn.layers.expert_all_to_all import exchange  # with torch.distributed

            return exchange(self._call(rows, ids, weights), split)
        if split is not None:
            options["expert_map"] = split.expert_map(rows.device)
        options |= self.call_options(w13, w2)
        out = fused_experts(rows.contiguous(), w13.weight, w2.weight, ids.contiguous(), weights.contiguous(), **options)
        if split is not None:
            split.sum(out)
        return out

    def _run_invariantly(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert_map: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        from jitgemm.nn.layers.invariant_experts import run_invariantly  # with torch.distributed

        split: Any = self.split
        call = self._call(rows, ids.contiguous(), weights.contiguous())
        call.expert_map = expert_map if split.added_later else split.expert_map(rows.device)
        result = run_invariantly(call, split)
        return result if out is None else out.copy_(result)

    def run_adapted(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert_map: torch.Tensor | None,
        out: torch.Tensor, adapt: Adapt,
    ) -> None:  # fmt: skip
        """`run` into out, with `adapt` of `jitgemm.moe.call.launch` between the GEMMs; on one rank."""
        call = self._call(rows, ids.contiguous(), weights.contiguous())
        call.expert_map, call.out = expert_map, out
        check_call_once(call)
        if rows.shape[0]:
            launch(call, out, adapt=adapt)

    def _call(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> ExpertsCall:
        w13, w2 = self.w13, self.w2
        return ExpertsCall(
            rows.contiguous(), w13.weight, w2.weight, ids, weights, self.gate, w13.scheme, bias13=w13.bias,
            bias2=w2.bias, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def call_options(self, w13: Packed, w2: Packed) -> dict[str, Any]:
        """Of `fused_experts` and `fused_experts_masked`; w13, w2: the layer's, which a module is slow to give."""
        biases = {"bias13": w13._buffers["bias"], "bias2": w2._buffers["bias"]}
        return {**self._keywords, **biases, "batch_invariant": self.batch_invariant}

    @property
    def sums(self) -> str:
        return self.w13.sums if self.w13.sums != "f32" else self.w2.sums

    @sums.setter
    def sums(self, sums: str) -> None:
        before = self.sums
        try:
            self.w13.sums = self.w2.sums = sums
        except ValueError:
            for part in (self.w13, self.w2):
                part.prefer_sums(before)
            raise

    def extra_repr(self) -> str:
        gate = self.gate
        parts = [f"num_experts={self.num_experts}", f"hidden_dim={self.hidden_dim}"]
        parts += [f"intermediate_dim={self.intermediate_dim}", f"gate={gate.kind!r}, {gate.order}"]
        parts += [f"limit={gate.limit:g}"] if gate.limit != math.inf else []
        parts += [f"alpha={gate.alpha:g}"] if gate.kind == "situ" else []
        sums = [part.call_sums for part in (self.w13, self.w2)]
        parts += [f"sums={'/'.join(dict.fromkeys(sums))!r}"] if sums != ["f32", "f32"] else []
        return ", ".join([*parts, f"activation={self.activation!r}"])

    def packed_parts(self, name: str) -> dict[str, Packed]:
        return {f"{name}.w13": self.w13, f"{name}.w2": self.w2}

    def named(self, layer: str) -> None:
        """Sets the name of the layer, for messages of its weights."""
        for name in ("w13", "w2"):
            getattr(self, name).weight.named(f"{layer}.{name}")

    def _description(self) -> dict[str, torch.Tensor]:
        return {"gate": encoded(self.gate)}

    def _what_is_wrong(self, state_dict: Mapping[str, torch.Tensor], prefix: str) -> str | None:
        stored = state_dict.get(prefix + "gate")
        if stored is None or stored.tolist() == encoded(self.gate).tolist():
            return None
        return f"{prefix}gate: expected {self.gate}, got {stored.tolist()}"


class W4A8Experts(PackedExperts):
    """Experts whose weights have 4 bits."""

    kind = W4Weight


class W8A8Experts(PackedExperts):
    """Experts whose weights have 8 bits, of the activations' type."""

    kind = W8Weight


def packed_experts(w13: Weight, w2: Weight, *biases: torch.Tensor | None, **options: Any) -> PackedExperts:
    """A layer of the class for weights of these widths; arguments and errors are the constructor's."""
    kinds: dict[tuple[int, int], type[PackedExperts]] = {(4, 4): W4A8Experts, (8, 8): W8A8Experts}
    return kinds.get((w13.bits, w2.bits), PackedExperts)(w13, w2, *biases, **options)
