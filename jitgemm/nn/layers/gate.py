"""The gate between an expert's two GEMMs: in a state dict, and read off a module of transformers.

Knows neither weights nor calls.
"""

from __future__ import annotations

import math
from itertools import product

import torch

from jitgemm.activations.reference import gated
from jitgemm.activations.scheme import GATE_KINDS, GATE_ORDERS, UNGATED, Gate

_LIMITS = ("limit", "swiglu_limit")  # what experts call the attributes
_ALPHAS = ("alpha", "swiglu_alpha")
_SITU_LIMITS = ("activation_situ_linear_beta", "situ_linear_beta", "linear_beta")
_SITU_ALPHAS = ("activation_situ_beta", "situ_beta", "beta")


def encoded(gate: Gate) -> torch.Tensor:
    """The gate as fp64 [4], for a state dict."""
    numbers = (GATE_KINDS.index(gate.kind), GATE_ORDERS.index(gate.order), gate.limit, gate.alpha)
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def decoded(numbers: torch.Tensor) -> Gate:
    """The gate that `encoded` wrote. Raises ValueError for a tensor that is none."""
    values, kinds, orders = numbers.tolist(), dict(enumerate(GATE_KINDS)), dict(enumerate(GATE_ORDERS))
    if tuple(numbers.shape) != (4,) or values[0] not in kinds or values[1] not in orders:
        raise ValueError(f"gate: expected the four numbers of a gate, got {values}")
    return Gate(kinds[values[0]], orders[values[1]], *values[2:])


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Rows [gate; up] as gate, up, gate, up, ...."""
    return torch.stack(rows.chunk(2), 1).flatten(0, 1)


def gate_of(experts: torch.nn.Module) -> Gate | None:
    """The gate that computes what `experts._apply_gate` computes, as transformers' experts have it, or None.

    Of experts without gates what `act_fn` computes. Found by trying: nothing else says for sure what a model's code
    does between the GEMMs.
    """
    limit, alpha = (_number(experts, names) for names in (_LIMITS, _ALPHAS))
    linear, beta = (_number(experts, names) for names in (_SITU_LIMITS, _SITU_ALPHAS))
    reach = 3 * max(4.0, limit or 0.0, linear or 0.0)
    generator = torch.Generator("cpu").manual_seed(1)
    probe = (2 * torch.rand((64, 16), generator=generator, dtype=torch.float32, device="cpu") - 1) * reach
    numbers = {kind: dict.fromkeys(((math.inf, 1.0), (limit or math.inf, 1.0))) for kind in GATE_KINDS}
    numbers["swiglu_oai"] = {(bound, alpha or 1.0): None for bound, _ in numbers["swiglu_oai"]}
    numbers["situ"] = {} if beta is None else {(linear or math.inf, beta): None}
    has_gate = getattr(experts, "has_gate", True)
    gates = [Gate(kind, order, *of) for kind in GATE_KINDS if kind not in UNGATED
             for order, of in product(GATE_ORDERS, numbers[kind])] if has_gate else [*map(Gate, UNGATED)]  # fmt: skip
    with torch.no_grad():
        try:
            result = experts._apply_gate(probe) if has_gate else experts.act_fn(probe)  # type: ignore[operator]
        except Exception:  # noqa: BLE001 - somebody else's code, given what it was not made for
            return None
        for gate in gates:
            expected = gated(probe, gate)  # apart from roundings
            if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-4, atol=1e-5):
                return gate
    return None


def _number(module: torch.nn.Module, names: tuple[str, ...]) -> float | None:
    owners = module, getattr(module, "config", None)
    settings = (getattr(owner, name, None) for owner in owners for name in names)
    numbers = (float(value) for value in settings if isinstance(value, (int, float)))
    return next(filter(math.isfinite, numbers), None)
