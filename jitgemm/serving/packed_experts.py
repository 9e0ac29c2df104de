"""What jitgemm's methods of engines' fused experts have in common: packed weights, and both GEMMs' inputs in 8 bits. Knows no
engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.packed import Parts
from jitgemm.serving.collected import one_activation
from jitgemm.serving.experts import CollectedExperts
from jitgemm.serving.packing import Packing
from jitgemm.serving.saved import SavedExperts
from jitgemm.serving.served import ServedModel
from jitgemm.serving.stored import StoredLayers


class PackedExpertsMethod(Packing):
    """Experts with packed weights.

    Attributes:
        bias: what stands behind "w13_" and "w2_" in the engine's names of biases.
    """

    bias = "bias"

    @staticmethod
    def stored_of(
        config: ServedModel, names: list[str], hidden: int, inter: int, whole: int, inputs: int
    ) -> StoredLayers:
        """How the files hold experts, as a rank has them.

        Args:
            names: of one expert's layers, in the files.
            hidden, inter, whole: the experts' sizes, inter on this rank and on all.
            inputs: of the gate.

        Raises:
            Unsupported: jitgemm cannot serve them as they are cut.
        """
        stored = config.stored(names)
        stored.check([inter] * inputs, hidden, hidden)
        stored.check([hidden], inter, whole)
        return stored

    def place(
        self, layer: torch.nn.Module, count: int, sizes: tuple[int, int, int], inputs: int, rank: int, dtype: torch.dtype,
        biased: bool, attributes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Gives a layer its parameters.

        Args:
            count: this rank's experts.
            sizes: (hidden, inter on this rank, inter on all).
            inputs: of the gate.
            rank: which of the ranks that share an expert this is.
            dtype: of the layer's input and output.
            biased: whether the experts have biases, which the engine loads.
            attributes: what the engine wants the parameters to have, its "weight_loader" among that.
        """
        hidden, inter, whole = sizes
        kind = SavedExperts if self.config.saved else CollectedExperts
        bias = self.bias if biased else ""
        self.matrices = [
            kind(self, "w13", count, [inter] * inputs, hidden, hidden, rank, whole, bias),
            kind(self, "w2", count, [hidden], inter, whole, rank, hidden, bias),
        ]
        self.create(layer, dtype, attributes)

    def module(self, layer: torch.nn.Module, *parts: Parts) -> PackedExperts:
        w13, w2 = parts
        wanted, prefix = self.wanted, self.names[0].rpartition(".")[0]
        activations = {f"{prefix}.w13": w13.activation, f"{prefix}.w2": w2.activation}
        activation = one_activation(activations, wanted if self.config.saved else None, "activation")
        gate, biases = self.matrices[0].gate(self.gate(layer)), (w13.bias, w2.bias)
        return packed_experts(w13.weight, w2.weight, *biases, gate=gate, activation=activation, top_k=layer.top_k)

    def gate(self, layer: torch.nn.Module) -> Gate:
        """The gate that the engine's layer has."""
        raise NotImplementedError


def weighed(x: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that are weighed before the experts, and the weights behind them. Raises ValueError for several experts of a
    token."""
    if topk_weights.shape[1] != 1:
        raise ValueError(
            f"topk_weights: expected one expert of a token to weigh the input, got {topk_weights.shape[1]}"
        )
    return x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
