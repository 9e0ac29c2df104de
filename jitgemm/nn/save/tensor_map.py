"""Which tensors of a model's files quantised layers replace, and the names of the layers that are written instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, concat
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.nn.load.experts_source import ExpertsSource
from jitgemm.nn.load.transformers_names import renamed_for
from jitgemm.nn.quantize.stacked import ExpertsLayout
from jitgemm.nn.save.model_folder import ModelFolder

_PROJECTIONS = {2: (("gate_proj", "up_proj"), ("down_proj",)), 1: (("up_proj",), ("down_proj",))}
"""What the layers of an expert are called whose files stack the experts; by `Gate.inputs`."""
_WEIGHT = ".weight"


@dataclass(frozen=True)
class RowSlice:
    """Rows of a weight of the model: of a Linear's, or of one expert's.

    Attributes:
        layer: the module's name in the model.
        rows: which of the weight's.
        part, expert: 0 for w13 and 1 for w2, and whose, of experts; None of a Linear.
    """

    layer: str
    rows: slice
    part: int | None = None
    expert: int | None = None

    def packed(self, model: torch.nn.Module) -> tuple[Any, torch.Tensor | None]:
        """(weight, bias) of the layer that stands in the model, before rows are taken."""
        layer: Any = model.get_submodule(self.layer)
        if self.part is None:
            return layer.weight, layer.bias
        projection = (layer.w13, layer.w2)[self.part]
        bias = projection.bias
        return projection.weight[self.expert], None if bias is None else bias[self.expert]


@dataclass
class TensorMap:
    """Tensors of the files and the quantised layers that are written for them.

    Attributes:
        layers: {a layer's name in the files that are written: what its rows are, one slice below another}.
        replaces: {tensor of the files: layers that are written instead of it, in its shard}.
        bias_written: layers whose bias is written, as the files have those of all experts in one tensor.
        ignore: layers with a matrix that stay in floats, as compressed-tensors' "ignore" names them.
    """

    layers: dict[str, list[RowSlice]] = field(default_factory=dict)
    replaces: dict[str, list[str]] = field(default_factory=dict)
    bias_written: set[str] = field(default_factory=set)
    ignore: list[str] = field(default_factory=list)

    def canonical(self, model: torch.nn.Module, layer: str) -> CanonicalWeight:
        """A layer's weight out of the quantised model; with its bias where that is written."""
        parts = []
        for row_slice in self.layers[layer]:
            weight, bias = row_slice.packed(model)
            layer_weight = unpacked(weight)
            layer_weight = replace(layer_weight, bias=bias) if layer in self.bias_written else layer_weight
            parts.append(layer_weight.rows(row_slice.rows))
        return concat(parts)


def map_tensors(
    model: torch.nn.Module,
    source: ModelFolder,
    names: Iterable[str],
    layouts: Mapping[str, ExpertsLayout],
    head: str | None,
) -> TensorMap:
    """Where the source's files have the weights of a model's modules.

    Args:
        names: of the Linears and modules of stacked experts that are to be quantised.
        layouts: {name: layout} of the modules of stacked experts.
        head: name of the output embedding.

    Raises:
        ValueError: the files have a weight under no name that is known, or joined with one that stays in floats.
    """
    renamed, _ = renamed_for(model, source.checkpoint)
    mapped = TensorMap()
    slices: dict[str, list[tuple[int, int, RowSlice]]] = {}  # of each tensor of the files: (first row, rows, slice)
    for name in names:
        if name in layouts:
            _find_experts(mapped, renamed, name, layouts[name])
            continue
        if f"{name}{_WEIGHT}" not in renamed:
            raise ValueError(f"{name}: expected its weight in {source.folder}, found none under a known name")
        for tensor, start, row_slice, count in _of_linear(source, renamed, name):
            slices.setdefault(tensor, []).append((start, count, row_slice))
    for tensor, rows_of_tensor in slices.items():
        rows_of_tensor.sort(key=lambda entry: entry[0])
        rows, k = _matrix(source, tensor)
        if sum(count for _, count, _ in rows_of_tensor) != rows or any(
            k != _columns(model, row_slice) for _, _, row_slice in rows_of_tensor
        ):
            layers = ", ".join(row_slice.layer for _, _, row_slice in rows_of_tensor)
            raise ValueError(f"{tensor}: expected the rows of {layers} to be all of its {rows}, and their columns {k}")
        layer = _layer_name(tensor)
        mapped.layers[layer] = [row_slice for _, _, row_slice in rows_of_tensor]
        mapped.replaces[tensor] = [layer]
    mapped.ignore = sorted(set(_left_in_floats(model, source, renamed, mapped, head)))
    return mapped


def _of_linear(source: ModelFolder, renamed: Checkpoint, name: str) -> Iterator[tuple[str, int, RowSlice, int]]:
    """(tensor of the files, first of its rows, slice, rows) of a Linear's weight: of several that the model joins, or
    of one that it cuts."""
    rows = renamed.rows(f"{name}{_WEIGHT}")
    start, stop, offset = rows.start, rows.start + rows.count, 0
    for tensor in rows.sources:
        count, _ = _matrix(source, tensor)
        first, last = max(offset, start), min(offset + count, stop)
        if first < last:
            yield tensor, first - offset, RowSlice(name, slice(first - start, last - start)), last - first
        offset += count


def _find_experts(mapped: TensorMap, checkpoint: Checkpoint, name: str, layout: ExpertsLayout) -> None:
    """The layers of a module's experts: those of the files, or, where these stack the experts, new ones."""
    source = ExpertsSource.find(checkpoint, name, layout)
    if source is not None:
        for part, projection in enumerate(source.projections):
            for e, layers in enumerate(projection):
                for layer, rows in zip(layers, _rows_of(layout, len(layers)), strict=True):
                    (tensor,) = checkpoint.rows(f"{layer.prefix}{_WEIGHT}").sources
                    own = _layer_name(tensor)
                    mapped.layers[own] = [RowSlice(name, rows, part, e)]
                    mapped.replaces[tensor] = [own]
        return
    for part, parameter in enumerate(layout.parameters):
        if f"{name}.{parameter}" not in checkpoint:
            raise ValueError(f"{name}: expected its experts in {checkpoint.where}, found none under a known name")
        (tensor,) = checkpoint.rows(f"{name}.{parameter}").sources
        above = tensor.removesuffix(parameter)
        if above == tensor:
            raise ValueError(f"{tensor}: expected a name that ends in {parameter}")
        written = []
        for e in range(layout.experts):
            children = _PROJECTIONS[layout.gate.inputs][part]
            for child, rows in zip(children, _rows_of(layout, len(children)), strict=True):
                written.append(f"{above}{e}.{child}")
                mapped.layers[written[-1]] = [RowSlice(name, rows, part, e)]
        mapped.replaces[tensor] = written
        if layout.bias:
            (bias,) = checkpoint.rows(f"{name}.{layout.biases[part]}").sources
            mapped.replaces[bias] = []
            mapped.bias_written.update(written)


def _rows_of(layout: ExpertsLayout, count: int) -> list[slice]:
    """Which rows of a projection are its layers'. Gate and up are written apart, whatever order the model has."""
    if count == 1:
        return [slice(None)]
    if layout.gate.order == "interleaved":
        return [slice(0, None, 2), slice(1, None, 2)]
    halves = [slice(0, layout.inter), slice(layout.inter, None)]
    return halves if layout.gate.order == "gate_up" else halves[::-1]


def _left_in_floats(
    model: torch.nn.Module, source: ModelFolder, renamed: Checkpoint, mapped: TensorMap, head: str | None
) -> Iterator[str]:
    """Every layer of the files with a matrix that is not replaced, also layers that this model lacks."""
    embeddings: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and f"{name}{_WEIGHT}" in renamed:
            embeddings.update(renamed.rows(f"{name}{_WEIGHT}").sources)
    for tensor, stored in source.tensors.items():
        dims = len(stored.shape)
        if tensor in mapped.replaces or tensor in embeddings:
            continue
        if tensor.endswith(_WEIGHT) and dims == 2:
            yield tensor.removesuffix(_WEIGHT)
        elif dims == 3 and not tensor.endswith((_WEIGHT, "bias")):  # stacked experts
            yield f"re:{re.escape(tensor.rpartition('.')[0])}\\..*"
    if head is not None and f"{head}{_WEIGHT}" not in renamed:  # tied: in no file, and a Linear for other readers
        yield head


def _layer_name(tensor: str) -> str:
    if not tensor.endswith(_WEIGHT):
        raise ValueError(f"{tensor}: expected a name that ends in {_WEIGHT}")
    return tensor.removesuffix(_WEIGHT)


def _matrix(source: ModelFolder, tensor: str) -> tuple[int, int]:
    shape = source.tensors[tensor].shape
    if len(shape) != 2:
        raise ValueError(f"{tensor}: expected a matrix, got shape {list(shape)}")
    return shape[0], shape[1]


def _columns(model: torch.nn.Module, row_slice: RowSlice) -> int:
    layer: Any = model.get_submodule(row_slice.layer)
    return int(layer.in_features)
