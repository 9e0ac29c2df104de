"""The base of methods of engines' fused experts: packed weights, 8-bit inputs of both GEMMs. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.packed import Parts
from jitgemm.serving.collected import one_activation
from jitgemm.serving.experts import CollectedExperts
from jitgemm.serving.packing import Packing, for_any_values
from jitgemm.serving.saved import SavedExperts
from jitgemm.serving.served import ServedModel
from jitgemm.serving.stored import StoredLayers


class PackedExpertsMethod(Packing):
    """Experts with packed weights.

    Attributes:
        bias: what stands behind "w13_" and "w2_" in the engine's names of biases.
        moves: whether the engine moves experts between ranks in place (EPLB): `expert_rows`.
    """

    bias, moves = "bias", False

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
        self, layer: torch.nn.Module, count: int, sizes: tuple[int, int, int], inputs: int, rank: int,
        dtype: torch.dtype, biased: bool, attributes: Mapping[str, Any],
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
        collected = SavedExperts if self.config.saved else CollectedExperts
        bias = self.bias if biased else ""
        self.matrices = [
            collected(self, "w13", count, [inter] * inputs, hidden, hidden, rank, whole, bias),
            collected(self, "w2", count, [hidden], inter, whole, rank, hidden, bias),
        ]
        self.create(layer, dtype, attributes)

    def module(self, layer: torch.nn.Module, *parts: Parts) -> PackedExperts:
        w13, w2 = (matrix._replace(weight=for_any_values(matrix.weight)) if self.moves else matrix for matrix in parts)
        wanted, prefix = self.wanted, self.names[0].rpartition(".")[0]
        activations = {f"{prefix}.w13": w13.activation, f"{prefix}.w2": w2.activation}
        activation = one_activation(activations, wanted if self.config.saved else None, "activation")
        gate, biases = self.matrices[0].gate(self.gate(layer)), (w13.bias, w2.bias)
        made = packed_experts(w13.weight, w2.weight, *biases, gate=gate, activation=activation, top_k=layer.top_k)
        made.split = self.config.sharding_of_experts(layer)
        return made

    def install(self, layer: torch.nn.Module, module: torch.nn.Module) -> None:
        if self.moves and module.sums == "f16":
            text = (
                "jitgemm: %s is added up in fp32: experts move between ranks (EPLB), and f16 may not hold their scales"
            )
            self.config.logger.warning_once(text, self.names[0].rpartition(".")[0])
            module.sums = "f32"  # type: ignore[assignment]
        super().install(layer, module)

    def gate(self, layer: torch.nn.Module) -> Gate:
        """The gate that the engine's layer has."""
        raise NotImplementedError

    def places(self, layer: torch.nn.Module) -> list[list[int]]:
        """By an expert's number in the engine's loader: its numbers on this rank, which may have copies."""
        raise NotImplementedError

    def logical_experts(self, layer: torch.nn.Module) -> int:
        """Experts of the model, each counted once."""
        raise NotImplementedError

    def in_files(self, layer: torch.nn.Module) -> list[int]:
        """This rank's experts in order, by their numbers in the files. Engines may count copies behind them."""
        count = self.logical_experts(layer)
        pairs = ((mine, number % count) for number, every in enumerate(self.places(layer)) for mine in every)
        return [number for _, number in sorted(pairs)]


def expert_rows(module: PackedExperts) -> list[torch.Tensor]:
    """All tensors of packed experts as [E, values of an expert], over the same memory, in one order on all ranks.

    Engines move experts between ranks in place, and know no formats: row e of every tensor is all of expert e, and all
    ranks hold their experts in one format, whatever the weights' values are.
    """
    parts = (module.w13, module.w2)
    tensors = [tensor for part in parts for _, tensor in sorted(part.named_buffers(recurse=False))]
    return [tensor.view(module.num_experts, -1) for tensor in tensors]


def weighed(x: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens times their weights, ones) for weights that apply first. Raises ValueError for several experts."""
    if topk_weights.shape[1] != 1:
        raise ValueError(
            f"topk_weights: expected one expert of a token to weigh the input, got {topk_weights.shape[1]}"
        )
    return x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
