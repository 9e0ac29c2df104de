"""The weights of a model that jitgemm packed and saved: state dicts of `jitgemm.nn`'s layers.

A packed weight is opaque to engines' loaders. Of linears and the output layer each joined layer's tensors are kept as the
files have them; once all are there, they are unpacked, cut and joined like a checkpoint's, and packed again, exactly.
Which rows a rank has of each, the engine's own loader says: it cuts their numbers. Experts, for whose names engines' models
have no place, are read from the files, a rank's own alone, and again where the engine loads the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.checkpoint.canonical import CanonicalWeight, concat
from jitgemm.nn.layers.gate import decoded
from jitgemm.nn.layers.packed import LHS_DTYPES, ON_CPU, Parts, state_dict_parts
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.serving.experts_matrix import ExpertsMatrix
from jitgemm.serving.matrix import CHILD, Matrix
from jitgemm.weight.packed import Weight

_CPU = torch.device("cpu")


class SavedMatrix(Matrix):
    """A linear's weight whose layers are packed in the files."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.parameters = {suffix: suffix for suffix in self.config.suffixes(self.names)}

    def create(self, layer: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
        self.cut = attributes["weight_loader"]
        for suffix in self.parameters:
            # A number for each layer in the files: when vLLM loads again, it counts numbers that are written.
            empty = torch.empty(len(self.names), dtype=torch.uint8)
            made = self.config.parameter_classes.BasevLLMParameter(data=empty, weight_loader=self.keep(suffix))
            layer.register_parameter(suffix, made)

    def keep(self, suffix: str) -> Callable[..., Any]:
        """A loader that keeps the files' tensors by the layers that are joined."""

        def kept(param: Any, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> None:
            ((part, _),) = self.marks(loaded_weight, *shard, **shards)
            mine = param.data if part is None else param.data[part : part + 1]
            mine.copy_(torch.ones_like(mine))
            if param.is_meta:
                return
            param.kept = getattr(param, "kept", {}) | {part: loaded_weight}
            if suffix == "meta":
                if not hasattr(param, "row_numbers"):
                    param.row_numbers = self.rows_of(param)
                n = Weight.sizes_of(loaded_weight)[0]
                self.cut(param.row_numbers, torch.arange(1, n + 1, dtype=torch.int32)[:, None], *shard, **shards)

        return kept

    def rows_of(self, param: Any) -> Any:
        """For the numbers, in the files' layers, of a rank's rows: 1 for the first, 0 for rows that none has."""
        numbers = torch.zeros((sum(self.widths), 1), dtype=torch.int32)
        rows: Any = self.config.parameter_classes.ChannelQuantScaleParameter(
            data=numbers, weight_loader=self.cut, output_dim=0
        )
        for name in {"tp_rank", "tp_size"} & vars(param).keys():  # which vLLM sets where ranks have the same
            setattr(rows, name, getattr(param, name))
        return rows

    def parts(self, layer: torch.nn.Module) -> Parts:
        params = self.params(layer)
        kept = {suffix: getattr(param, "kept", {}) for suffix, param in params.items()}
        rows, device = getattr(params.get("meta"), "row_numbers", None), params["blocks"].device
        rows = torch.zeros(sum(self.widths), 1) if rows is None else rows.data.to(device)
        if CHILD in layer._modules and self.config.from_files:
            self._check_files(kept["blocks"])
        self.take(layer)
        whole = all(None in parts for parts in kept.values() if parts)  # one layer, or one that the files have joined
        names = {None: self.names[0]} if whole else dict(enumerate(self.names))
        found = {}
        for part, name in names.items():
            prefix = name + "."
            tensors = {prefix + suffix: parts[part].to(device) for suffix, parts in kept.items() if part in parts}
            found[name] = state_dict_parts(tensors, prefix)
        activation = one_activation(found, self.wanted, self.option)
        columns = self.rank * self.k, (self.rank + 1) * self.k
        weights = []
        for parts, mine in zip(found.values(), [rows] if whole else rows.split(list(self.widths))):
            numbers = mine.flatten().long()
            weight, none = unpacked(parts.weight).rows((numbers - 1).clamp(min=0)), numbers == 0
            weight = weight if not bool(none.any()) else _without(weight, none)
            weights.append(weight if self.k == self.whole else weight.columns(*columns))
        corrects = all(parts.weight.format.correction for parts in found.values())
        packed = concat(weights).pack(LHS_DTYPES[activation], correction=None if corrects else False)
        scales = [parts.input_scale for parts in found.values() if parts.input_scale is not None]
        return Parts(packed, None, activation, torch.cat(scales).max().reshape(1) if scales else None)

    def _check_files(self, blocks: Mapping[Any, torch.Tensor]) -> None:
        """Raises ValueError for weights that are loaded again from elsewhere than the files, where experts are read."""
        files = self.config.files()
        for part, tensor in blocks.items():
            name = f"{self.names[part or 0]}.blocks"
            if not torch.equal(files.read(name, tensor.device), tensor):
                raise ValueError(
                    f"weights: expected those of a path for a model with experts that jitgemm packed, which are read from "
                    f"files, got another {name} than theirs"
                )


def _without(weight: CanonicalWeight, none: torch.Tensor) -> CanonicalWeight:
    """The weight with zeros in the rows of `none`."""
    if weight.ops.given_scales is not None:  # bytes of numbers that are not zero
        return replace(weight, q=weight.q.masked_fill(none[:, None], 0))
    rows = None if weight.row_scale is None else weight.row_scale.masked_fill(none, 0)
    return replace(weight, row_scale=rows, **weight.parameters(lambda values: values.masked_fill(none[:, None], 0)))


class SavedExperts(ExpertsMatrix):
    """w13 or w2 of experts that are packed in the files, as `PackedExperts` has them.

    The layer has a buffer for it that says whether it is yet to be read.
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.module, self.buffer = self.names[0].rpartition(".")[0], f"{self.part}_from_files"

    def create(self, layer: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
        layer.register_buffer(self.buffer, torch.empty(1), persistent=False)
        self.config.reads_files_for(layer)

    def params(self, layer: torch.nn.Module) -> dict[str, Any]:
        return {self.buffer: layer._buffers.get(self.buffer)}

    def gate(self, expected: Gate) -> Gate:
        if self.found._replace(order=expected.order) != expected:
            raise ValueError(f"{self.module}.gate: expected {expected}, as the model has it, got {self.found}")
        return self.found

    def parts(self, layer: torch.nn.Module) -> Parts:
        """This rank's experts, in their order on it."""
        device, packed = layer._buffers.pop(self.buffer).device, layer._modules.get(CHILD)
        if packed is not None:  # where vLLM loads again, and the layer is on the meta device
            device = getattr(packed, self.part).blocks.device
        files, prefix, places = self.config.files(), f"{self.module}.{self.part}.", layer.expert_map
        self.found = decoded(files.read(f"{self.module}.gate", _CPU))
        places = range(self.count) if places is None else places.tolist()
        names, count = files.layer(prefix), self.config.logical_experts(layer)
        if (held := files.info(names["blocks"]).shape[0]) != count:
            raise ValueError(f"{prefix}blocks: expected {count} experts, as the model has, got {held}")
        # Some are there several times under EPLB, in the order in which vLLM begins.
        mine = [e % count for e in sorted((e for e in range(len(places)) if places[e] >= 0), key=lambda e: places[e])]
        shared = {names[each]: files.read(names[each], _CPU) for each in ON_CPU if each in names}
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
        given = [bias for bias in biases.values() if bias is not None]
        return Parts(weight, torch.stack(given) if given else None, first.activation, None)

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
    """Reads experts again if vLLM wants to load a layer again that has some, into the same memory."""
    if CHILD in layer._modules and "w13_from_files" in layer._buffers:
        layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]


def one_activation(found: Mapping[str, Parts], wanted: str | None, option: str) -> str:
    """The activation of these layers. Raises ValueError for several, and for another than the user wants."""
    (first, parts), *_ = found.items()
    activation = parts.activation
    for name, parts in found.items():
        if parts.activation != activation or wanted not in (None, activation):
            raise ValueError(
                f"{option}: expected {parts.activation}, as {name} was saved, got {wanted or activation}, as "
                f"{'the options say' if wanted else first + ' was'}"
            )
    return activation
