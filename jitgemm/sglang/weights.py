"""What jitgemm's methods of SGLang's layers have in common.

A model in floats is packed while it is loaded: a layer's parameters get their memory with the first tensor that is
written, and are gone once the last one is. Weights that are loaded again (`restore_weights_before_loading`) go through
parameters that are made again, into the memory of the packed weights, which CUDA graphs hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from jitgemm.serving.experts_matrix import ExpertsMatrix
from jitgemm.serving.matrix import CHILD, Matrix, Packing, written


class Restoring(Packing):
    """A `Packing` whose layers SGLang may load again."""

    dtype = torch.bfloat16

    def create(self, layer: torch.nn.Module, dtype: torch.dtype, attributes: Mapping[str, Any]) -> None:
        self.uses_meta_device = False
        self.dtype, self.attributes = dtype, attributes
        super().create(layer, dtype, attributes)
        for matrix in self.matrices:
            if isinstance(matrix, OneAtATime) and not self.made_up:
                matrix.wait(layer)

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        """Gives a packed layer its parameters back, to be loaded."""
        if CHILD in layer._modules and self.absent(layer):
            with torch.device(next(layer._modules[CHILD].buffers()).device):
                self.create(layer, self.dtype, self.attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if CHILD in layer._modules and not self.absent(layer) and not self.any_written(layer):
            for matrix in self.matrices:  # which the files that were loaded again do not have
                matrix.take(layer)
            self.config.warmer.packed(layer, layer._modules[CHILD])
            return
        super().process_weights_after_loading(layer)

    def absent(self, layer: torch.nn.Module) -> bool:
        """Whether a layer's parameters are gone."""
        return any(param is None for matrix in self.matrices for param in matrix.params(layer).values())

    def any_written(self, layer: torch.nn.Module) -> bool:
        """Whether the loaders have written any of them."""
        return any(written(param) for matrix in self.matrices for param in matrix.params(layer).values())


class OneAtATime(Matrix):
    """A weight in floats, whose layer is packed as soon as all of it is read."""

    layer: torch.nn.Module | None = None

    def __init__(self, method: Packing, *given: Any):
        super().__init__(method, *given)
        self.method = method

    def wait(self, layer: torch.nn.Module) -> None:
        """Frees the parameters' memory until they are loaded."""
        self.layer = layer
        for param in self.params(layer).values():
            param.data = param.data.new_empty(0)

    def loader(self, suffix: str, load: Callable[..., Any]) -> Callable[..., Any]:
        write = super().loader(suffix, load)

        @wraps(load)
        def loads(param: Any, loaded_weight: torch.Tensor, *where: Any, **named: Any) -> Any:
            if self.layer is not None and not param.numel():
                param.data = param.data.new_empty(self.whole_shape(suffix))
            result = write(param, loaded_weight, *where, **named)
            matrices = self.method.matrices
            if self.layer is not None and all(each.complete(self.layer) for each in matrices):
                self.method.process_weights_after_loading(self.layer)
            return result

        loads.notes = True  # type: ignore[attr-defined]
        return loads

    def whole_shape(self, suffix: str) -> tuple[int, ...]:
        return self.tensors[suffix].shape(self.sizes)

    def complete(self, layer: torch.nn.Module) -> bool:
        """Whether all of it is loaded."""
        return not any(self.lacking(layer, part) for part in range(len(self.widths)))

    def check(self, layer: torch.nn.Module) -> None:
        for suffix, param in self.params(layer).items():
            if not param.numel():
                param.data = param.data.new_empty(self.whole_shape(suffix))
        super().check(layer)

    def take(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        params = self.params(layer)
        tensors = super().take(layer)
        for param in params.values():  # which the model's loader still holds
            param.data = param.data.new_empty(0)
        self.layer = None
        return tensors


class ExpertsOneAtATime(OneAtATime, ExpertsMatrix):
    """w13 or w2 of experts in floats."""

    def whole_shape(self, suffix: str) -> tuple[int, ...]:
        return (self.count, *super().whole_shape(suffix))

    def complete(self, layer: torch.nn.Module) -> bool:
        places = layer.expert_map
        mine = range(self.count) if places is None else [e for e, at in enumerate(places.tolist()) if at >= 0]
        found = written(self.params(layer)["weight"])
        return len(found) >= len(mine) * len(self.widths) and not any(
            self.lacking(layer, part, e) for e in mine for part in range(len(self.widths))
        )
