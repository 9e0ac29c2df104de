"""The methods of vLLM's layers in a model that jitgemm packed and saved: state dicts of `jitgemm.nn`'s layers.

A packed weight is opaque to vLLM's loaders. Of linears and the output layer each joined layer's tensors are kept as the
files have them; once all are there, they are unpacked, cut and joined like a checkpoint's, and packed again, exactly.
Which rows a rank has of each, vLLM's own loader says: it cuts their numbers. Experts, for whose names vLLM's models have
no place, are read from the files, a rank's own alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor import parameter as parameters
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from jitgemm.checkpoint.canonical import CanonicalWeight, concat
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.nn.layers.experts import packed_experts
from jitgemm.nn.layers.gate import decoded
from jitgemm.nn.layers.linear import LINEARS, PackedLinear
from jitgemm.nn.layers.packed import LHS_DTYPES, ON_CPU, Parts, state_dict_parts
from jitgemm.vllm.experts import JitGemmMoEMethod
from jitgemm.vllm.layouts import Layout
from jitgemm.vllm.linear import CHILD, JitGemmLinearMethod, loaded, part_of
from jitgemm.weight.packed import Weight

_ROWS = "rows"
"""The parameter of the numbers, in the files' layers, of a rank's rows: 1 for the first, 0 for rows that none has."""
FROM_FILES = "from_files"
"""The buffer of experts that are not read yet."""


@register_weight_loader_v2_supported_method
class JitGemmSavedMethod(JitGemmLinearMethod):
    """A linear whose layers are packed in the files."""

    option = "activation"

    def __init__(self, config: Any, names: list[str], suffixes: Sequence[str]):
        super().__init__(config, names, Layout("jitgemm"))
        self.suffixes = suffixes
        self.columns: tuple[int, int] | None = None

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmSavedMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        k = getattr(layer, "input_size_per_partition", layer.input_size)
        Layout("jitgemm").cut(layer.output_partition_sizes, layer.output_size, k, layer.input_size)
        return cls(config, names, config.suffixes(names))

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.dtype, k = params_dtype, input_size_per_partition
        if k != input_size:
            self.columns = layer.tp_rank * k, (layer.tp_rank + 1) * k
        load = extra_weight_attrs["weight_loader"]
        numbers = torch.zeros((sum(output_partition_sizes), 1), dtype=torch.int32)
        rows = parameters.ChannelQuantScaleParameter(data=numbers, weight_loader=load, output_dim=0)
        layer.register_parameter(_ROWS, rows)
        for suffix in self.suffixes:
            keep = self._keep(load, rows) if suffix == "meta" else self._keep()
            layer.register_parameter(suffix, parameters.BasevLLMParameter(data=torch.empty(0), weight_loader=keep))
        self.config.warmer.expect(layer, params_dtype)

    def _keep(self, load: Callable[..., Any] | None = None, rows: Any = None) -> Callable[..., Any]:
        """A loader that keeps the files' tensors by the layers that are joined; of `meta` cuts the rows' numbers."""

        def kept(param: Any, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> None:
            if param.is_meta:
                raise ValueError(
                    f"{self.names[0]}: expected a model that jitgemm saved to be loaded once, got reload_weights; "
                    "weights that change are loaded again from the checkpoint before packing"
                )
            (part,) = part_of(loaded_weight, *shard, **shards)
            param.kept = getattr(param, "kept", {}) | {part: loaded_weight}
            if load is not None:
                n = Weight.sizes_of(loaded_weight)[0]
                load(rows, torch.arange(1, n + 1, dtype=torch.int32)[:, None], *shard, **shards)

        return kept

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        params = loaded(layer, {name: name for name in (_ROWS, *self.suffixes)})
        if params is None:
            return
        rows = params.pop(_ROWS).data
        kept = {suffix: getattr(param, "kept", {}) for suffix, param in params.items()}
        for name in (_ROWS, *params):
            delattr(layer, name)
        self.install(layer, self._joined(kept, rows, getattr(layer, "output_partition_sizes", ())))

    def _joined(self, kept: Mapping[str, Mapping[Any, Any]], rows: torch.Tensor, widths: Sequence[int]) -> PackedLinear:
        whole = all(None in parts for parts in kept.values() if parts)  # one layer, or one that the files have joined
        names = {None: self.names[0]} if whole else dict(enumerate(self.names))
        found = []
        for part, name in names.items():
            prefix = name + "."
            tensors = {prefix + suffix: parts[part].to(rows.device) for suffix, parts in kept.items() if part in parts}
            found.append(state_dict_parts(tensors, prefix))
        activation = one_activation(dict(zip(names.values(), found)), self.config.options, self.option)
        weights = []
        for parts, mine in zip(found, [rows] if whole else rows.split(list(widths))):
            weight = rows_of(unpacked(parts.weight), mine.flatten().long())
            weights.append(weight if self.columns is None else weight.columns(*self.columns))
        packed = concat(weights).pack(LHS_DTYPES[activation])
        scales = [parts.input_scale for parts in found if parts.input_scale is not None]
        static = torch.cat(scales).max().reshape(1) if scales else None
        return LINEARS[packed.bits](packed, activation=activation, input_scale=self.static(static))


class JitGemmSavedHeadMethod(JitGemmSavedMethod):
    """An output layer that is packed in the files; rows that fill up the vocabulary are zeros."""

    option = "lm_head"

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmSavedHeadMethod:
        """The method; vLLM fills up the rows of a rank to a multiple of 8."""
        return cls(config, names, config.suffixes(names))


class JitGemmSavedMoEMethod(JitGemmMoEMethod):
    """Experts that are packed in the files, as `PackedExperts` has them."""

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmSavedMoEMethod:
        """The method; names: of w13 and w2. Raises Unsupported for experts that jitgemm cannot serve as they are cut."""
        moe = layer.moe_config
        return cls(config, moe, [names[0].rpartition(".")[0]], cls.cut(Layout("jitgemm"), moe))

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.register_buffer(FROM_FILES, torch.empty(1), persistent=False)
        self.config.from_files.add(layer)
        self.config.warmer.expect(layer, params_dtype)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if (mark := layer._buffers.get(FROM_FILES)) is None:
            return
        delattr(layer, FROM_FILES)
        files, expected = self.config.files(), self._gate(layer)
        gate = decoded(files.read(f"{self.names[0]}.gate", torch.device("cpu")))
        if gate._replace(order=expected.order) != expected:
            raise ValueError(f"{self.names[0]}.gate: expected {expected}, as the model has it, got {gate}")
        rank, inter = self.moe.moe_parallel_config.tp_rank, layer.intermediate_size_per_partition
        own, whole = torch.arange(rank * inter, (rank + 1) * inter), self.moe.intermediate_size
        pairs = torch.stack((2 * own, 2 * own + 1) if gate.order == "interleaved" else (own, own + whole))
        rows = (pairs.T if gate.order == "interleaved" else pairs).flatten().to(mark.device)
        cut = inter != whole

        def half(weight: CanonicalWeight) -> CanonicalWeight:
            return weight.rows(rows)

        def columns(weight: CanonicalWeight) -> CanonicalWeight:
            return replace(weight.columns(rank * inter, (rank + 1) * inter), bias=weight.bias if rank == 0 else None)

        w13 = self._read(layer, files, "w13", (2 * whole, layer.hidden_size), half if cut else None, mark.device)
        w2 = self._read(layer, files, "w2", (layer.hidden_size, whole), columns if cut else None, mark.device)
        found = {f"{self.names[0]}.{part}": each for part, each in (("w13", w13), ("w2", w2))}
        activation = one_activation(found, self.config.options, "activation")
        biases = w13.bias, w2.bias
        self.install(
            layer, packed_experts(w13.weight, w2.weight, *biases, gate=gate, activation=activation, top_k=layer.top_k)
        )

    def _read(
        self,
        layer: torch.nn.Module,
        files: Checkpoint,
        part: str,
        size: tuple[int, int],
        cut: Callable[[CanonicalWeight], CanonicalWeight] | None,
        device: torch.device,
    ) -> Parts:
        """w13 or w2 of this rank's experts, in their order on it; cut: gives the rank's part of an expert."""
        prefix, count = f"{self.names[0]}.{part}.", self.moe.num_experts
        names = files.layer(prefix)
        if (held := files.info(names["blocks"]).shape[0]) != count:
            raise ValueError(f"{prefix}blocks: expected {count} experts, as the model has, got {held}")
        places = range(count) if layer.expert_map is None else layer.expert_map.tolist()
        mine = sorted((e for e in range(count) if places[e] >= 0), key=lambda e: places[e])
        shared = {names[each]: files.read(names[each], torch.device("cpu")) for each in ON_CPU if each in names}
        of_one = [full for full in names.values() if full not in shared]
        biases: dict[int, torch.Tensor | None] = {}

        def parts_of(i: int) -> Parts:
            parts = state_dict_parts(shared | {full: files.read(full, device, mine[i]) for full in of_one}, prefix)
            if (parts.weight.n, parts.weight.k) != size:
                raise ValueError(f"{prefix}blocks: expected n, k = {size}, got {(parts.weight.n, parts.weight.k)}")
            return parts

        first = parts_of(0)

        def make(i: int) -> Weight:
            parts = parts_of(i) if i else first
            if cut is None:
                biases[i] = parts.bias
                return parts.weight
            weight = cut(replace(unpacked(parts.weight), bias=parts.bias))
            biases[i] = weight.bias
            return weight.pack(LHS_DTYPES[parts.activation])

        weight = type(first.weight).stacked(len(mine), make)
        given = [bias for bias in biases.values() if bias is not None]
        return Parts(weight, torch.stack(given) if given else None, first.activation, None)


def read_before(layer: torch.nn.Module) -> bool:
    """Whether vLLM wants to load experts again that were read from the files."""
    return CHILD in layer._modules and FROM_FILES in layer._buffers


def one_activation(found: Mapping[str, Parts], options: Mapping[str, Any], option: str) -> str:
    """The activation of these layers. Raises ValueError for several, and for another that the options say."""
    (first, parts), *_ = found.items()
    activation, wanted = parts.activation, options[option]
    for name, parts in found.items():
        if parts.activation != activation or wanted not in (None, activation):
            raise ValueError(
                f"{option}: expected {parts.activation}, as {name} was saved, got {wanted or activation}, as "
                f"{'the options say' if wanted else first + ' was'}"
            )
    return activation


def rows_of(weight: CanonicalWeight, numbers: torch.Tensor) -> CanonicalWeight:
    """The rows of these numbers, from 1 on; number 0 is a row of zeros."""
    rows, none = weight.rows((numbers - 1).clamp(min=0)), (numbers == 0)[:, None]
    return replace(rows, **rows.parameters(lambda values: values.masked_fill(none, 0)))
