"""The quantisation config "jitgemm" of vLLM. Imports no layers of vLLM before a model is built."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.formats import idle
from jitgemm.serving.served import NAME, ServedModel
from jitgemm.serving.warm import Layers
from jitgemm.vllm.warm_graphs import GraphWarmer

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

logger = init_logger("vllm." + __name__)


@register_quantization_config(NAME)
class JitGemmConfig(ServedModel, QuantizationConfig):
    """What vLLM asks of `ServedModel`."""

    engine, logger, experts_over_nvlink = "vLLM", logger, True

    def __init__(self, checkpoint: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None):
        super().__init__(checkpoint, options)
        self.warmer = GraphWarmer(logger)
        self.adapted = Layers()
        self._model: tuple[Any, ...] = ("", None, None)  # its name, config and revision
        self._place: tuple[Any, str] | None = None

    # ---- what vLLM asks of a config ----------------------------------------------------------------------------------

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Options from --hf-overrides '{"jitgemm": {...}}', and the headers of the checkpoint's files."""
        self._set(getattr(hf_config, NAME, None) or {})
        self._model = (model_name, hf_config, revision)
        from vllm.transformers_utils.config import get_safetensors_params_metadata as headers_of

        if os.path.isdir(model_name):
            self.read_folder(Path(model_name))
            return
        try:
            headers = headers_of(model_name, revision=revision)
        except (OSError, ValueError) as error:
            self.no_headers(model_name, error)
            return
        self.read_headers(headers)

    @property
    def model_type(self) -> str:
        """The model's type by config.json; "" if vLLM named none."""
        return getattr(self._model[1], "model_type", "")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Maps whole names of tensors, as vLLM's patterns may end in a tensor's own name (Mistral's files)."""
        self._mappers.append(hf_to_vllm_mapper)
        renamed: dict[str, str] = {}
        for own, layer in self._in_file.items():
            tensors = self._headers[layer]
            for suffix in list(tensors):
                for name in hf_to_vllm_mapper.apply_dict({f"{own}.{suffix}": None}):
                    above, _, last = name.rpartition(".")
                    renamed[above], tensors[last] = layer, tensors.pop(suffix)
        self._in_file = renamed

    def get_cache_scale_mapper(self) -> WeightsMapper | None:
        """How the scales of a quantised cache are called, which is the checkpoint's own business.

        Drops experts that jitgemm packed, which are read from the files; again, where vLLM loads the model again. Drops
        matrices of transforms, which kernels have. Raises ValueError where it does so with LoRA on experts.
        """
        if any(hasattr(layer.quant_method, "old_quant_method") for layer in self.adapted):
            raise ValueError(
                "reload_weights: expected a model without LoRA on experts, whose weights vLLM does not load again "
                "behind its adapters, got one with"
            )
        theirs = self._checkpoints_own()
        mapper = super().get_cache_scale_mapper() if theirs is None else theirs.get_cache_scale_mapper()
        packed = {
            re.escape(name.rpartition(".")[2])
            for name, suffixes in self._headers.items()
            if self.saved and "gate" in suffixes and f"{name}.w13" in self._headers
        }
        matrices = {name.rpartition(".")[2] for name in self._headers if idle(self.checkpoint, f"{name}.weight")}
        if not packed and not matrices:
            return mapper
        from vllm.model_executor.models.utils import WeightsMapper

        from jitgemm.serving.saved import read_again

        for layer in self.from_files:
            read_again(layer)
        of_experts = rf"(^|\.)({'|'.join(packed)})\.(gate|w13\.\w+|w2\.\w+)$" if packed else "(?!)"
        of_transforms = rf"(^|\.)({'|'.join(map(re.escape, matrices))})\.(weight|perm)$" if matrices else "(?!)"
        dropped = WeightsMapper(orig_to_new_regex={re.compile(f"{of_experts}|{of_transforms}"): None})
        return dropped if mapper is None else mapper | dropped

    @property
    def kv_cache_scheme(self) -> dict[str, object] | None:
        """How compressed-tensors' checkpoint has the cache quantised, which vLLM's attention reads from a config."""
        return getattr(self._checkpoints_own(), "kv_cache_scheme", None)

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Drops no tensor; vLLM's own drops activation orders (0.33)."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear or of fused experts; of attention and the like, what the checkpoint's own config has.

        Raises:
            ValueError: some of the layers that vLLM joins here are quantised and others are not, or differently.
        """
        from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from jitgemm.vllm.experts import JitGemmMoEMethod
        from jitgemm.vllm.linear import JitGemmHeadMethod, JitGemmLinearMethod

        if hasattr(layer, "num_embeddings"):
            head = type(layer).__name__ == "ParallelLMHead"
            return self.of_embedding(layer, prefix, partial(JitGemmHeadMethod, self) if head else None)
        if not isinstance(layer, (LinearBase, RoutedExperts)):
            theirs = self._checkpoints_own()
            return None if theirs is None else theirs.get_quant_method(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return self.choose(
                layer, prefix, partial(JitGemmMoEMethod.of, self, layer),
                partial(UnquantizedFusedMoEMethod, layer.moe_config), experts=True,
            )  # fmt: skip
        return self.choose(layer, prefix, partial(JitGemmLinearMethod.of, self, layer), UnquantizedLinearMethod)

    # ---- what the methods ask ----------------------------------------------------------------------------------------

    @property
    def loads_biases(self) -> bool:
        """Whether vLLM's model calls the loaders of experts' biases. That of gpt-oss does so for its own format alone,
        and what is quantised while loaded has models that copy them by themselves."""
        gpt_oss = getattr(self._model[1], "model_type", "") == "gpt_oss"
        return self.of_gpt_oss or (self.checkpoint is not None and not gpt_oss)

    @property
    def parameter_classes(self) -> Any:
        from vllm.model_executor import parameter

        return parameter

    @property
    def makes_weights_up(self) -> bool:
        config = get_current_vllm_config_or_none()
        return config is not None and config.load_config.load_format == "dummy"

    @property
    def reuses_memory(self) -> bool:
        config = get_current_vllm_config_or_none()
        return config is not None and str(config.load_config.load_format).startswith("runai")

    @property
    def captures_graphs(self) -> bool:
        model = getattr(get_current_vllm_config_or_none(), "model_config", None)
        return model is None or not model.enforce_eager

    @property
    def elastic(self) -> bool:
        parallel = getattr(get_current_vllm_config_or_none(), "parallel_config", None)
        return bool(getattr(parallel, "enable_elastic_ep", False))

    @staticmethod
    def keep(module: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES

        SKIP_MODULES.update(type(part).__name__ for part in module.modules())

    def ranks_that_share(self, layer: torch.nn.Module) -> int | None:
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import RowParallelLinear

        if isinstance(layer, RoutedExperts):
            place = layer.moe_config.moe_parallel_config
            return place.tp_size * place.ep_size
        return layer.tp_size if isinstance(layer, RowParallelLinear) else None

    def shares_whole_experts(self, layer: torch.nn.Module) -> bool:
        moe: Any = layer.moe_config
        ranks = moe.moe_parallel_config
        alone = ranks.dp_size == 1 and not ranks.is_sequence_parallel
        return ranks.tp_size == 1 and alone and not moe.is_lora_enabled

    def warn_of_others(self) -> None:
        config = get_current_vllm_config_or_none()
        if config is not None and config.compilation_config.pass_config.fuse_allreduce_rms:
            text = "jitgemm: tp_invariant: norms computed as vLLM sums over ranks have other bits than one GPU's; set "
            logger.warning_once(text + "pass_config.fuse_allreduce_rms to false in --compilation-config")
        if not self.batch_invariant:
            text = (
                "jitgemm: tp_invariant: attention and layers in floats choose kernels by a rank's heads and rows; set "
            )
            logger.warning_once(text + "VLLM_BATCH_INVARIANT=1")

    def group_of(self, layer: torch.nn.Module) -> torch.distributed.ProcessGroup:
        from vllm.distributed import parallel_state

        return parallel_state.get_tp_group().device_group

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        return bool(envs.VLLM_BATCH_INVARIANT)

    def reads_files_for(self, layer: torch.nn.Module) -> None:
        """Notes a layer whose weights are read from files, and their place, which `reload_weights` may change."""
        self.from_files.add(layer)
        config = get_current_vllm_config_or_none()
        if self._place is None and config is not None and config.model_config is not None:
            self._place = config.model_config, config.model_config.model

    def files(self) -> Checkpoint:
        name, _, revision = self._model
        if self._place is not None and self._place[0].model != self._place[1]:
            name, revision = self._place[0].model, None
        if not os.path.isdir(name):
            from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

            config = get_current_vllm_config_or_none()
            cache = None if config is None else config.load_config.download_dir
            name = download_weights_from_hf(name, cache, ["*.safetensors"], revision)
        return Checkpoint(name)

    def _checkpoints_own(self) -> QuantizationConfig | None:
        config = super()._checkpoints_own()
        if config is not None:
            config.packed_modules_mapping = self.packed_modules_mapping
        return config

    def _own_config(self, method: str) -> QuantizationConfig:
        config = get_quantization_config(method).from_config(dict(self._given or {}))
        config.maybe_update_config(*self._model)
        return config

    def _map(self, config: QuantizationConfig, mapper: WeightsMapper) -> None:
        config.apply_vllm_mapper(mapper)
