"""The method of vLLM's linears in a model that jitgemm packed and saved: state dicts of `jitgemm.nn`'s layers.

A packed weight is opaque to vLLM's loaders. Each joined layer's tensors are kept as the files have them; once all are
there, they are unpacked, cut and joined like a checkpoint's, and packed again, exactly. Which rows a rank has of each,
vLLM's own loader says: it cuts their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor import parameter as parameters
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from jitgemm.checkpoint.canonical import concat
from jitgemm.nn.cut import unpacked
from jitgemm.nn.linear import LINEARS, PackedLinear
from jitgemm.nn.read import CODES, state_dict_parts
from jitgemm.vllm.layouts import Layout
from jitgemm.vllm.linear import JitGemmLinearMethod, loaded, part_of
from jitgemm.weight.packed import Weight

_ROWS = "rows"
"""The parameter of the numbers, in the files' layers, of a rank's rows."""


@register_weight_loader_v2_supported_method
class JitGemmSavedMethod(JitGemmLinearMethod):
    """A linear whose layers are packed in the files."""

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
        numbers = torch.full((sum(output_partition_sizes), 1), -1, dtype=torch.int32)
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
                load(rows, torch.arange(n, dtype=torch.int32)[:, None], *shard, **shards)

        return kept

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        params = loaded(layer, (_ROWS, *self.suffixes))
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
        activation, wanted = found[0].activation, self.config.options["activation"]
        for name, parts in zip(names.values(), found):
            if parts.activation != activation or wanted not in (None, activation):
                raise ValueError(
                    f"activation: expected {parts.activation}, as {name} was saved, got {wanted or activation}, as "
                    f"{'the options say' if wanted else self.names[0] + ' was'}"
                )
        weights = []
        for parts, mine in zip(found, [rows] if whole else rows.split(list(widths))):
            weight = unpacked(parts.weight).rows(mine.flatten().long())
            weights.append(weight if self.columns is None else weight.columns(*self.columns))
        packed = concat(weights).pack(CODES[activation])
        scales = [parts.input_scale for parts in found if parts.input_scale is not None]
        static = torch.cat(scales).max().reshape(1) if scales else None
        return LINEARS[packed.bits](packed, activation=activation, input_scale=self.static(static))
