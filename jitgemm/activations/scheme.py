"""How activations become codes, and what is computed first: the nouns and their names, each in one table.

Layers, the public calls, kernels, commands and compiled graphs spell them by these. No torch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Activation(NamedTuple):
    """How activations become codes.

    Attributes:
        dtype: of the codes, one of `dtypes.LHS_TYPES`.
        scheme: one of SCHEMES: a scale for each row, one that is given, or one for each row and `LHS_GROUP` codes.
        affine: int8 with zero points; not by block.
        rotation: size of the Hadamard matrix that rotates the values first, `formats.ROTATION`, or 0.
    """

    dtype: str
    scheme: str = "token"
    affine: bool = False
    rotation: int = 0

    @property
    def block(self) -> bool:
        return self.scheme == "block"

    @property
    def static(self) -> bool:
        """Whether scale and zero point are given."""
        return self.scheme == "tensor"

    @property
    def given(self) -> Activation:
        """The same with a scale that is given."""
        return self._replace(scheme="tensor")

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `quantize_activations` and the calls of experts, without the dtype."""
        return {"scheme": self.scheme, "affine": self.affine, "rotation": self.rotation}

    @property
    def flags(self) -> dict[str, Any]:
        """Of `quantize_spec`, without the dtype."""
        rotated = self.rotation != 0
        return {"affine": self.affine, "static": self.static, "block": self.block, "rotated": rotated}


SCHEMES = ("token", "tensor", "block")
NAMED = {
    "e4m3": Activation("e4m3"),
    "int8": Activation("s8"),
    "int8_affine": Activation("s8", affine=True),
    "e4m3_block": Activation("e4m3", "block"),
    "int8_block": Activation("s8", "block"),
}
"""By the names that layers and commands have. Append only: state dicts hold the number."""
ACTIVATIONS = tuple(NAMED)
"""How a layer quantises its input: fp8 e4m3, int8, or int8 with a zero point per token; e4m3 or int8 with a scale per
token and 128 values."""


def activation_named(name: object) -> Activation:
    """Raises ValueError for a name that is none of ACTIVATIONS."""
    if not isinstance(name, str) or name not in NAMED:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return NAMED[name]


def activation_name(dtype: str, *, affine: bool = False, block: bool = False) -> str:
    """The name of this activation with dynamic scales. Raises ValueError for one that layers do not have."""
    wanted = Activation(dtype, "block" if block else "token", affine)
    for name, activation in NAMED.items():
        if activation == wanted:
            return name
    raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {wanted}")


class Gate(NamedTuple):
    """y out of gates g and ups u; a row of x holds 2k values. Or out of u alone, of k values.

    ::

        silu         g * sigmoid(g) * u
        gelu         g * Phi(g) * u, Phi the normal distribution's
        gelu_tanh    g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) / 2 * u
        swiglu_oai   g * sigmoid(alpha * g) * (u + 1)
        swiglu_step  min(g * sigmoid(g), limit) * min(max(u, -limit), limit)
        situ         alpha * tanh(g / alpha) * sigmoid(g) * limit * tanh(u / limit); without a limit u as it is
        relu2        max(u, 0)^2, without gates

    Attributes:
        kind: one of GATE_KINDS.
        order: one of GATE_ORDERS: all gates before all ups, after them, or gate, up, gate, up, ...
        limit: of swiglu_step and situ as above; of relu2 infinity. Of the others g becomes min(g, limit) and u
            min(max(u, -limit), limit) first. Infinity for none.
        alpha: of swiglu_oai and situ.
    """

    kind: str = "silu"
    order: str = "gate_up"
    limit: float = math.inf
    alpha: float = 1.0

    @property
    def inputs(self) -> int:
        """Values of x that one value of y is made of."""
        return 1 if self.kind in UNGATED else 2

    @property
    def keywords(self) -> dict[str, Any]:
        """Of the calls of experts."""
        limit = None if self.limit == math.inf else self.limit
        return {"activation": self.kind, "order": self.order, "limit": limit, "alpha": self.alpha}


GATE_KINDS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglu_step", "situ", "relu2")
GATE_ORDERS = ("gate_up", "up_gate", "interleaved")
"""Append only, both: state dicts hold the number."""
UNGATED = ("relu2",)
"""Kinds that have no gates."""
SILU_MUL = Gate()
GELU_MULS = {"none": Gate("gelu"), "tanh": Gate("gelu_tanh")}
"""By the approximation, in PyTorch's words."""
GATES = {
    **dict.fromkeys(("silu", "swish"), SILU_MUL),
    **dict.fromkeys(("gelu", "gelu_python"), GELU_MULS["none"]),
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), GELU_MULS["tanh"]),
}
"""The gates of `quantize_activations`, by the kind and by what configs of transformers call the activation."""
MUL_KEYWORDS: dict[Gate, dict[str, Any]] = {
    SILU_MUL: {"silu_mul": True},
    **{gate: {"gelu_mul": name} for name, gate in GELU_MULS.items()},
}
"""Keywords of `quantize_activations` by gate."""


class Prologue(NamedTuple):
    """What a quantiser computes first, in this order. Not both a norm and a gate; a residual with a norm only.

    A call has tensors here, a graph its nodes, and where only kernels are told apart True stands for what is there.

    Attributes:
        residual: is added to x, in x's type.
        residual_out: where that sum is written.
        norm: RMSNorm's weight [k].
        eps: RMSNorm's.
        gate: what becomes of gates and ups in x.
        permutation: int32 [k]: column permutation[j] becomes column j.
    """

    norm: Any = None
    eps: float = 1e-6
    gate: Gate | None = None
    residual: Any = None
    residual_out: Any = None
    permutation: Any = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `quantize_activations`, what is there of them."""
        names = {"rms_norm": self.norm, "residual": self.residual, "residual_out": self.residual_out}
        keywords = {name: value for name, value in names.items() if value is not None}
        keywords |= {} if self.norm is None else {"eps": self.eps}
        keywords |= {} if self.permutation is None else {"permutation": self.permutation}
        return keywords | (MUL_KEYWORDS[self.gate] if self.gate else {})

    @property
    def flags(self) -> dict[str, Any]:
        """Of `quantize_spec`."""
        return {
            "gate": self.gate,
            "rms_norm": self.norm is not None,
            "residual": self.residual is not None,
            "permuted": self.permutation is not None,
        }


NO_PROLOGUE = Prologue()
NORM = Prologue(norm=True)
ADDED_NORM = Prologue(norm=True, residual=True)
