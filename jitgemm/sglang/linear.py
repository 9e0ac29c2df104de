"""The methods of SGLang's linears and of its output layer: a packed weight, activations quantised to 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from jitgemm.serving.packing import PackedHead, PackedLinearMethod
from jitgemm.serving.served import ServedModel
from jitgemm.serving.stored import StoredLayers, Unsupported

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase

ABSORBED = "kv_b_proj"
"""The layer whose weight MLA's attention takes apart, before it is packed."""


class JitGemmLinearMethod(PackedLinearMethod, LinearMethodBase):
    """SGLang's.

    Attributes:
        prefix: what SGLang calls the layer.
    """

    prefix = ""

    @classmethod
    def of(cls, config: ServedModel, layer: LinearBase, prefix: str, names: list[str]) -> JitGemmLinearMethod:
        """The method for a layer of SGLang's, which does not know yet how it is cut.

        Raises Unsupported for one that jitgemm cannot read."""
        if prefix.rpartition(".")[2] == ABSORBED:
            raise Unsupported("the attention takes its weight apart")
        method = cls(config, names, config.stored(names))
        method.prefix = prefix
        return method

    def create_weights(
        self, layer: LinearBase, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Gives a layer its parameters; hands a layer that jitgemm cannot serve as it is cut to SGLang's own method."""
        widths, k = output_partition_sizes, input_size_per_partition
        try:
            self.stored.check(widths, k, input_size)
        except Unsupported as reason:
            method = self.instead(layer, reason)
            if type(method).__name__ not in WEIGHT_LOADER_V2_SUPPORTED:
                extra_weight_attrs["weight_loader"] = layer.weight_loader
            layer.quant_method = method
            sizes = k, widths, input_size, output_size, params_dtype
            return method.create_weights(layer, *sizes, **extra_weight_attrs)
        attributes = {"weight_loader": extra_weight_attrs["weight_loader"]}
        rank = rank_of(layer) if k != input_size else 0
        self.place(layer, widths, k, input_size, rank, params_dtype, attributes)

    def instead(self, layer: LinearBase, reason: Unsupported) -> LinearMethodBase:
        """SGLang's own method. Raises ValueError where it has none for the checkpoint."""
        theirs = self.config._checkpoints_own()
        if theirs is None and (self.config.saved or self.config.checkpoint is not None):
            raise ValueError(f"{self.prefix}: {reason}") from reason
        self.config.check_invariant(layer, self.prefix, str(reason))
        text = "jitgemm: SGLang's own kernels serve layers such as %s: %s"
        self.config.logger.warning_once(text, self.prefix, str(reason))
        return UnquantizedLinearMethod() if theirs is None else theirs.get_quant_method(layer, self.prefix)


class JitGemmHeadMethod(PackedHead, JitGemmLinearMethod):
    """SGLang's."""

    def __init__(self, config: ServedModel, names: list[str], stored: StoredLayers):
        super().__init__(config, names, stored)
        self.prefix = names[0]


def rank_of(layer: LinearBase) -> int:
    """Which part of a row-parallel layer's columns this process has."""
    group = getattr(layer, "tp_group", None)
    return getattr(layer, "tp_rank", 0) if group is None else group.rank_in_group
