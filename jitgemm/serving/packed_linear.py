"""What jitgemm's methods of engines' linears have in common: a packed weight, activations quantised to 8 bits. Knows no
engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jitgemm.nn.layers.linear import LINEARS, PackedLinear, input_rows
from jitgemm.nn.layers.packed import Parts
from jitgemm.serving.matrix import CHILD, Matrix, Packing
from jitgemm.serving.saved import SavedMatrix


class PackedHead:
    """The output layer in 8 bits, quantised once it is loaded, or packed in the files; a tied embedding keeps its weight.

    Rows that fill up a rank's are zeros.
    """

    option = "lm_head"

    def check(self, layer: torch.nn.Module) -> None:
        """Nothing: a draft model's files may lack an output layer, which it takes from another model."""


class PackedLinearMethod(Packing):
    """A linear with a packed weight, activations quantised to 8 bits on the way in."""

    dtype = torch.bfloat16
    kind: type[Matrix] = Matrix

    def place(
        self, layer: torch.nn.Module, widths: Sequence[int], k: int, whole: int, rank: int, dtype: torch.dtype,
        attributes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Gives a layer its parameters.

        Args:
            widths: this rank's rows of each of the layers that are joined.
            k, whole, rank: columns of this rank, those of all, and which of the ranks that share them it is.
            dtype: of the layer's input and output.
            attributes: what the engine wants the parameters to have, its "weight_loader" among that.
        """
        self.dtype = dtype
        self.matrices = [(self.kind if self.layout.tensors else SavedMatrix)(self, widths, k, whole, rank)]
        self.create(layer, dtype, attributes)

    def module(self, layer: torch.nn.Module, *parts: Parts) -> PackedLinear:
        weight, bias, activation, input_scale = parts[0]
        if self.names[0].rpartition(".")[2] == "kv_b_proj":  # whose weight MLA takes from the product with an identity
            input_scale = None
        return LINEARS[weight.bits](weight, bias, activation=activation, input_scale=input_scale)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        module = getattr(layer, CHILD)
        rows = input_rows(x, module.in_features)
        out = torch.empty((rows.shape[0], module.out_features), dtype=x.dtype, device=x.device)
        if bias is not None and bias.dtype == torch.float16:
            bias = bias.float()
        module.multiply(module.quantise(rows), out, bias)
        return out.view(*x.shape[:-1], module.out_features)
