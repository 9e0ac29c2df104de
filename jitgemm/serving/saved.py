"""w13 and w2 of experts in a model that jitgemm packed and saved: the state dict of a `PackedExperts`.

Engines' models have no place for such experts' names: they are read from the files, a rank's own alone, and again where
the engine loads the model again. All other layers of such a model are loaded as every checkpoint's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.nn.layers.gate import decoded
from jitgemm.nn.layers.packed import LHS_DTYPES, ON_CPU, Parts, state_dict_parts
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.serving.collected import CHILD, CPU
from jitgemm.serving.experts import CollectedExperts
from jitgemm.weight.packed import Weight


class SavedExperts(CollectedExperts):
    """w13 or w2 of experts that are packed in the files, as `PackedExperts` has them.

    A buffer of the layer marks it as yet to be read.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.module, self.buffer = self.names[0].rpartition(".")[0], f"{self.part}_from_files"

    def create(self, layer: torch.nn.Module, dtype: torch.dtype, attributes: Mapping[str, Any]) -> None:
        layer.register_buffer(self.buffer, torch.empty(1), persistent=False)
        self.config.reads_files_for(layer)

    def present(self, layer: torch.nn.Module) -> bool:
        return layer._buffers.get(self.buffer) is not None

    def drop(self, layer: torch.nn.Module) -> None:
        layer._buffers.pop(self.buffer)

    loaded = True  # from the files, whatever the engine does

    def gate(self, expected: Gate) -> Gate:
        if self.found._replace(order=expected.order) != expected:
            raise ValueError(f"{self.module}.gate: expected {expected}, as the model has it, got {self.found}")
        return self.found

    def parts(self, layer: torch.nn.Module) -> Parts:
        """This rank's experts, in their order on it."""
        device, packed = getattr(layer, self.buffer).device, layer._modules.get(CHILD)
        if packed is not None:  # where vLLM loads again, and the layer is on the meta device
            device = getattr(packed, self.part).blocks.device
        files, prefix = self.config.files(), f"{self.module}.{self.part}."
        self.found = decoded(files.read(f"{self.module}.gate", CPU))
        names, count, mine = files.layer(prefix), self.method.logical_experts(layer), self.method.in_files(layer)
        if (held := files.info(names["blocks"]).shape[0]) != count:
            raise ValueError(f"{prefix}blocks: expected {count} experts, as the model has, got {held}")
        shared = {names[each]: files.read(names[each], CPU) for each in ON_CPU if each in names}
        of_one = [full for full in names.values() if full not in shared]
        size, ranks = (len(self.widths) * self.rows, self.whole), self.rows // self.widths[0] * (self.whole // self.k)
        biases: dict[int, torch.Tensor | None] = {}

        def parts_of(i: int) -> Parts:
            parts = state_dict_parts(shared | {full: files.read(full, device, mine[i]) for full in of_one}, prefix)
            if (parts.weight.n, parts.weight.k) != size:
                raise ValueError(f"{prefix}blocks: expected n, k = {size}, got {(parts.weight.n, parts.weight.k)}")
            return parts

        first = parts_of(0)

        def make(i: int) -> Weight:
            parts = parts_of(i) if i else first
            if ranks == 1:
                biases[i] = parts.bias
                return parts.weight
            weight = self._of_rank(replace(unpacked(parts.weight), bias=parts.bias), ranks)
            biases[i] = weight.bias
            return weight.pack(LHS_DTYPES[parts.activation])

        weight = type(first.weight).stacked(len(mine), make)
        of_experts = [bias for bias in biases.values() if bias is not None]
        return Parts(weight, torch.stack(of_experts) if of_experts else None, first.activation, None)

    def _of_rank(self, weight: CanonicalWeight, ranks: int) -> CanonicalWeight:
        """Columns of w2, or rows of w13 in the order of the files' gate."""
        if self.part == "w2":
            return weight.shard("k", self.rank, ranks)
        own = torch.arange(self.widths[0], device=weight.q.device) + self.rank * self.widths[0]
        if self.found.inputs == 1:
            return weight.rows(own)
        interleaved = self.found.order == "interleaved"
        pairs = torch.stack((2 * own, 2 * own + 1), 1) if interleaved else torch.stack((own, own + self.rows))
        return weight.rows(pairs.flatten())


def read_again(layer: torch.nn.Module) -> None:
    """Reads the layer's experts again into the same memory, when vLLM loads the layer again."""
    if CHILD in layer._modules and "w13_from_files" in layer._buffers:
        layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]
