"""The quantisation config "jitgemm" of SGLang."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.serving.served import NAME, ServedModel
from jitgemm.serving.warm import Warmer
from jitgemm.sglang.arguments import most_tokens, setting


class Logger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger with `_once` methods, which log the same text and values only once."""

    def __init__(self, name: str):
        super().__init__(logging.getLogger(name))
        self._said: set[tuple[object, ...]] = set()

    def warning_once(self, text: str, *values: object) -> None:
        self._once(logging.WARNING, text, *values)

    def info_once(self, text: str, *values: object) -> None:
        self._once(logging.INFO, text, *values)

    def _once(self, level: int, text: str, *values: object) -> None:
        if (text, *values) not in self._said:
            self._said.add((text, *values))
            self.log(level, text, *values)


logger = Logger("sglang." + __name__)
_JOINED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""The layers that SGLang's models join, most of which do not say so."""


class JitGemmConfig(ServedModel, QuantizationConfig):
    """What SGLang asks of `ServedModel`. Options also come from --json-model-override-args '{"jitgemm": {...}}'."""

    engine, logger = "SGLang", logger

    def __init__(self, checkpoint: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None):
        super().__init__(checkpoint, options)
        self.packed_modules_mapping = dict(_JOINED)
        self._model, self._kind = "", ""  # a model's name or folder, and its type
        self._set(json.loads(setting("json_model_override_args") or "{}").get(NAME) or {})
        self.made_up = setting("load_format") == "dummy"
        self.batch_invariant = bool(setting("enable_deterministic_inference"))
        self.warmer = Warmer(logger)
        self.warmer.tokens = most_tokens()

    # ---- what SGLang asks of a config --------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """As `ServedModel`, with what SGLang adds to a quantization_config: the model's config and joined layers."""
        settings = dict(config)
        model, joined = settings.pop("hf_config", None), settings.pop("packed_modules_mapping", None) or {}
        made = super().from_config(settings)
        made.packed_modules_mapping.update(joined)
        made._model = getattr(model, "_name_or_path", "") or setting("model_path")
        made._kind = getattr(model, "model_type", "")
        made._read()
        return made

    def get_name(self) -> str:
        """jitgemm; "mxfp4" for gpt-oss in its own format, by which SGLang's model and layer load experts."""
        return "mxfp4" if self.loads_biases else NAME

    @staticmethod
    def is_static_cfg() -> bool:
        """Whether a format is that of the files, which SGLang asks for "mxfp4"."""
        return True

    @property
    def loads_biases(self) -> bool:
        """Whether SGLang's model calls the loaders of experts' biases, as gpt-oss' does for its own format."""
        return self.of_gpt_oss and self._kind == "gpt_oss"

    def _read(self) -> None:
        """Reads the headers of the checkpoint's files."""
        try:
            folder = self._folder()
        except (OSError, ValueError) as error:
            self.no_headers(self._model, error)
            return
        self.read_folder(folder)

    def update_packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self.packed_modules_mapping.update(mapping)

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        self._mappers.append(hf_to_sglang_mapper)
        self._in_file = hf_to_sglang_mapper.apply_dict(self._in_file)

    @property
    def weight_block_size(self) -> list[int] | None:  # type: ignore[override]
        """The checkpoint's, by which models read layers that SGLang itself serves."""
        return (self.checkpoint or {}).get("weight_block_size")

    @property
    def kv_cache_quant_algo(self) -> str | None:
        return getattr(self._checkpoints_own(), "kv_cache_quant_algo", None)

    def get_scaled_act_names(self) -> list[str]:
        return []

    def is_linear_unquantized(self, prefix: str) -> bool:
        """True if a linear stays in its type."""
        return not all(self._quantised(name, torch.nn.Module(), prefix) for name in self._names(prefix))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear or of fused experts; of attention and the like, what the checkpoint's own config has.

        Raises:
            ValueError: some of the layers that SGLang joins here are quantised and others are not, or differently.
        """
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

        from jitgemm.sglang.experts import JitGemmMoEMethod
        from jitgemm.sglang.linear import JitGemmHeadMethod, JitGemmLinearMethod

        if hasattr(layer, "num_embeddings"):
            head = type(layer).__name__ == "ParallelLMHead"
            return self.of_embedding(layer, prefix, partial(JitGemmHeadMethod, self) if head else None)
        if isinstance(layer, FusedMoE):
            make = partial(JitGemmMoEMethod.of, self, layer)
            return self.choose(layer, prefix, make, UnquantizedFusedMoEMethod, experts=True)
        if isinstance(layer, LinearBase):
            make = partial(JitGemmLinearMethod.of, self, layer, prefix)
            return self.choose(layer, prefix, make, UnquantizedLinearMethod)
        theirs = self._checkpoints_own()
        return None if theirs is None else theirs.get_quant_method(layer, prefix)

    # ---- what the methods ask ----------------------------------------------------------------------------------------

    @property
    def parameter_classes(self) -> Any:
        from sglang.srt.layers import parameter

        return parameter

    @property
    def makes_weights_up(self) -> bool:
        return self.made_up

    @property
    def reuses_memory(self) -> bool:
        return str(setting("load_format")).startswith("runai")

    @property
    def captures_graphs(self) -> bool:
        return not setting("disable_cuda_graph")

    @staticmethod
    def keep(module: torch.nn.Module) -> None:
        """Nothing: SGLang leaves modules alone that have no method of their own."""

    def ranks_that_share(self, layer: torch.nn.Module) -> int | None:
        from sglang.srt.layers.linear import RowParallelLinear
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        if isinstance(layer, FusedMoE):
            return layer.moe_tp_size * layer.moe_ep_size
        if not isinstance(layer, RowParallelLinear):
            return None
        group = getattr(layer, "tp_group", None)
        return getattr(layer, "tp_size", 1) if group is None else group.world_size

    def shares_whole_experts(self, layer: torch.nn.Module) -> bool:
        from jitgemm.sglang.experts import sends_by_deepep

        fused = getattr(layer, "num_fused_shared_experts", 0)  # which ranks may have copies of
        return (layer.moe_tp_size, fused, sends_by_deepep(), setting("enable_dp_attention")) == (
            1, 0, False, False,
        )  # fmt: skip

    def group_of(self, layer: Any) -> torch.distributed.ProcessGroup:
        if hasattr(layer, "moe_ep_size"):
            from sglang.srt.runtime_context import get_parallel

            return get_parallel().moe_ep_group.device_group
        return layer.tp_group.device_group

    def reads_files_for(self, layer: torch.nn.Module) -> None:
        self.from_files.add(layer)

    def files(self) -> Checkpoint:
        return Checkpoint(self._folder())

    def _folder(self) -> Path:
        if os.path.isdir(self._model):
            return Path(self._model)
        from sglang.srt.model_loader.weight_utils import download_weights_from_hf

        return Path(
            download_weights_from_hf(self._model, setting("download_dir"), ["*.safetensors"], setting("revision"))
        )

    def _own_config(self, method: str) -> QuantizationConfig:
        settings = {**(self._given or {}), "packed_modules_mapping": self.packed_modules_mapping}
        return QUANTIZATION_METHODS[method].from_config(settings)

    def _map(self, config: QuantizationConfig, mapper: Any) -> None:
        config.apply_weight_name_mapper(mapper)
