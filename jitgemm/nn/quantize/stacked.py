"""Experts that a model of transformers 5 stacks in two parameters: how its module holds them, and what cannot be read.

Knows no checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgemm.activations.reference import gated
from jitgemm.activations.scheme import Gate, activation_named
from jitgemm.checkpoint.reader import target_device
from jitgemm.dtypes import torch_dtype
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.gate import gate_of
from jitgemm.weight.packed import W4Weight, W8Weight, Weight
from jitgemm.weight.quantize import quantize_w4, quantize_w8

PARAMETERS = ("gate_up_proj", "down_proj")
"""What transformers calls w13 and w2; their biases have _bias behind."""
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")  # what configs call it
BIASES = tuple(name + "_bias" for name in PARAMETERS)


@dataclass(frozen=True)
class Form:
    """How a module holds its experts.

    Attributes:
        experts, hidden, inter: E and the sizes: w13 is [2 * inter, hidden], w2 [hidden, inter].
        transposed: the parameters are [E, k, n] rather than [E, n, k].
        bias: both projections have one, [E, n].
        gate: what stands between them.
        top_k: experts of a token, as the module's config says; None where it does not.
    """

    experts: int
    hidden: int
    inter: int
    transposed: bool
    bias: bool
    gate: Gate
    top_k: int | None = None

    def rows(self, parameter: torch.Tensor) -> torch.Tensor:
        """One of the parameters as [E, n, k]."""
        return parameter.transpose(1, 2) if self.transposed else parameter

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(n, k) of w13 and of w2."""
        return (2 * self.inter, self.hidden), (self.hidden, self.inter)


def form_of(module: torch.nn.Module) -> Form | str | None:
    """How a module stacks experts, or why that cannot be told; None for a module that does not stack any."""
    if isinstance(module, PackedExperts):
        sizes = (module.num_experts, module.hidden_dim, module.intermediate_dim)
        return Form(*sizes, False, module.w13.bias is not None, module.gate, module.top_k)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if not all(name in parameters and parameters[name].dim() == 3 for name in PARAMETERS):
        return None
    if not hasattr(module, "_apply_gate") or not hasattr(module, "is_transposed"):
        return "stacked experts of another kind than transformers' (use_experts_implementation)"
    if getattr(module, "has_post_expert_norm", False):
        return "stacked experts with a norm behind each"
    known = (*PARAMETERS, *(BIASES if module.has_bias else ()))
    more = [name for name in (*parameters, *module._buffers) if name not in known]
    more += [name for name, p in module.named_parameters() if "." in name]
    if more or set(known) - set(parameters):
        return f"stacked experts whose tensors are other than {', '.join(known)}"
    if "forward" in vars(module):
        return "stacked experts whose forward was replaced, as accelerate's hooks do"
    forward = inspect.signature(type(module).forward)
    if not hasattr(type(module).forward, "__wrapped__") or len(forward.parameters) != 4:
        return f"stacked experts: {type(module).__name__} has a forward of its own"
    w13, w2 = (parameters[name].shape for name in PARAMETERS)
    if module.is_transposed:
        w13, w2 = ((experts, n, k) for experts, k, n in (w13, w2))
    experts, hidden, inter = w2
    if tuple(w13) != (experts, 2 * inter, hidden):
        return f"stacked experts of shapes {list(w13)} and {list(w2)}, which are no gated MLP's"
    gate = gate_of(module)
    if gate is None:
        return f"stacked experts with a gate that is not one of jitgemm.nn's ({type(module).__name__})"
    config = getattr(module, "config", None)
    top_k = next((count for name in _TOP_K if isinstance(count := getattr(config, name, None), int)), None)
    return Form(experts, hidden, inter, module.is_transposed, module.has_bias, gate, top_k)


def intermediate(module: torch.nn.Module, form: Form, x: torch.Tensor, e: int) -> torch.Tensor:
    """What reaches expert e's second projection, [tokens, inter], of inputs x [tokens, hidden]."""
    w = form.rows(getattr(module, PARAMETERS[0]))[e]
    bias = getattr(module, BIASES[0])[e] if form.bias else None
    return gated(torch.nn.functional.linear(x, w, bias).float(), form.gate).to(x.dtype)


def quantised_experts(
    module: torch.nn.Module, form: Form, *, bits: int = 4, activation: str = "e4m3",
    device: torch.device | str | int | None = None,
    moments: Sequence[Sequence[torch.Tensor | None]] | None = None, **options: Any,
) -> PackedExperts:  # fmt: skip
    """A layer whose weights are the module's, quantised by `quantize_w4` or `quantize_w8`, which see for the options.

    Args:
        moments: those of each expert's inputs, first of w13, then of w2.

    Raises:
        TypeError, ValueError: an argument is wrong, or a weight has no such form.
    """
    lhs_dtype = torch_dtype(activation_named(activation).dtype)
    device = None if device is None else target_device(device)
    makers: dict[int, Any] = {4: (W4Weight, quantize_w4, {"group_size": 128}), 8: (W8Weight, quantize_w8, {})}
    kind, quantise, defaults = makers[bits]
    options = defaults | options

    def quantised(name: str) -> Weight:
        """One expert at a time, which is all that goes to the device."""
        w = form.rows(getattr(module, name).detach())
        of_name = None if moments is None else moments[PARAMETERS.index(name)]

        def make(e: int) -> Weight:
            try:
                w_e = w[e] if device is None else w[e].to(device)
                more = {} if of_name is None or of_name[e] is None else {"moments": of_name[e].to(w_e.device)}
                return quantise(w_e, lhs_dtype=lhs_dtype, **options, **more)
            except ValueError as error:
                raise ValueError(f"{name}[{e}]: {error}") from error

        return kind.stacked(form.experts, make)

    with torch.no_grad():
        weights = [quantised(name) for name in PARAMETERS]
        biases = [getattr(module, name).detach().to(weights[0].device, copy=True) for name in BIASES[: 2 * form.bias]]
    return packed_experts(*weights, *biases, gate=form.gate, activation=activation, top_k=form.top_k)
