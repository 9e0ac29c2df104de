"""Experts that a model of transformers 5 stacks in two parameters: how its module holds them, and what is not read."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass

import torch

from jitgemm.activations.reference import gated
from jitgemm.activations.scheme import Gate
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.gate import gate_of

PARAMETERS = {2: ("gate_up_proj", "down_proj"), 1: ("up_proj", "down_proj")}
"""What transformers calls w13 and w2, by `Gate.inputs`; their biases have _bias behind."""
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")  # what configs call it


@dataclass(frozen=True)
class ExpertsLayout:
    """How a module holds its experts.

    Attributes:
        experts, hidden, inter: E and the sizes: w13 is [2 * inter, hidden], or [inter, hidden] without gates, w2
            [hidden, inter].
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
        return (self.gate.inputs * self.inter, self.hidden), (self.hidden, self.inter)

    @property
    def parameters(self) -> tuple[str, str]:
        """What transformers calls w13 and w2."""
        return PARAMETERS[self.gate.inputs]

    @property
    def biases(self) -> tuple[str, str]:
        w13, w2 = self.parameters
        return w13 + "_bias", w2 + "_bias"


def experts_layout(module: torch.nn.Module) -> ExpertsLayout | str | None:
    """How a module stacks experts, or why that cannot be told; None for a module that does not stack any."""
    if isinstance(module, PackedExperts):
        sizes = (module.num_experts, module.hidden_dim, module.intermediate_dim)
        return ExpertsLayout(*sizes, False, module.w13.bias is not None, module.gate, module.top_k)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    stacked = {name for name, p in parameters.items() if p.dim() == 3}
    inputs = next((inputs for inputs, names in PARAMETERS.items() if stacked.issuperset(names)), None)
    if inputs is None:
        return None
    names = PARAMETERS[inputs]
    if not hasattr(module, "_apply_gate"):
        return "stacked experts of another kind than transformers' (use_experts_implementation)"
    transposed, bias = (bool(getattr(module, name, False)) for name in ("is_transposed", "has_bias"))
    if getattr(module, "has_post_expert_norm", False):
        return "stacked experts with a norm behind each"
    if getattr(module, "has_gate", True) != (inputs == 2):
        return f"stacked experts: {', '.join(names)} of {type(module).__name__}, whose has_gate says otherwise"
    expected = (*names, *(f"{name}_bias" for name in names if bias))
    more = [name for name in (*parameters, *module._buffers) if name not in expected]
    more += [name for name, p in module.named_parameters() if "." in name]
    if more or set(expected) - set(parameters):
        return f"stacked experts whose tensors are other than {', '.join(expected)}"
    if "forward" in vars(module):
        return "stacked experts whose forward was replaced, as accelerate's hooks do"
    w13, w2 = (tuple(parameters[name].shape) for name in names)
    if transposed:
        w13, w2 = ((experts, n, k) for experts, k, n in (w13, w2))
    experts, hidden, inter = w2
    if tuple(w13) != (experts, inputs * inter, hidden):
        return f"stacked experts of shapes {list(w13)} and {list(w2)}, which are no{' gated' * (inputs == 2)} MLP's"
    gate = gate_of(module)
    module_class = type(module)
    decorated = hasattr(module_class.forward, "__wrapped__") and hasattr(module, "is_transposed")
    known = decorated or (gate is not None and not bias and _computes_the_layer(module, gate, transposed))
    if not known or len(inspect.signature(module_class.forward).parameters) != 4:
        return f"stacked experts: {module_class.__name__} has a forward of its own"
    if gate is None:
        return f"stacked experts with a gate that is not one of jitgemm.nn's ({module_class.__name__})"
    config = getattr(module, "config", None)
    top_k = next((count for name in _TOP_K if isinstance(count := getattr(config, name, None), int)), None)
    return ExpertsLayout(experts, hidden, inter, transposed, bias, gate, top_k)


def _computes_the_layer(module: torch.nn.Module, gate: Gate, transposed: bool) -> bool:
    """True if a forward of the module's own computes what transformers' does: tried with few small experts."""
    experts, hidden, inter = 3, 8, 16
    draw = torch.Generator("cpu").manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    w13, w2 = values(experts, gate.inputs * inter, hidden), values(experts, hidden, inter)
    x, weights = values(10, hidden), values(10, 2)
    ids = torch.arange(20, device="cpu").view(10, 2) % experts
    trial = copy.copy(module)
    weights_of_trial = [w.transpose(1, 2).contiguous() if transposed else w for w in (w13, w2)]
    trial._parameters = dict(zip(PARAMETERS[gate.inputs], weights_of_trial))  # type: ignore[arg-type]
    trial.num_experts, trial.hidden_dim, trial.intermediate_dim = experts, hidden, inter  # type: ignore[assignment]
    expected = torch.zeros_like(x)
    for choice, weight in zip(ids.T, weights.T):
        between = gated((w13[choice] @ x[:, :, None])[..., 0], gate)
        expected += weight[:, None] * (w2[choice] @ between[:, :, None])[..., 0]
    try:
        with torch.no_grad():
            result = type(module).forward(trial, x, ids, weights)
    except Exception:  # noqa: BLE001 - somebody else's code, given what it was not made for
        return False
    return isinstance(result, torch.Tensor) and torch.allclose(result, expected, rtol=1e-3, atol=1e-3)
