"""The quantisation config "jitgemm" of vLLM: which layers are quantised, how, and who serves those that jitgemm cannot.

A checkpoint's own config and the headers of its files decide; what jitgemm has no reader for is left to vLLM's own
config of that checkpoint, with a warning. Imports no layers of vLLM before a model is built.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from jitgemm.activations.scheme import activation_named
from jitgemm.checkpoint.files import Checkpoint, weights_of
from jitgemm.checkpoint.gptq import FORMAT as GPTQ
from jitgemm.kernel.formats import SUMS
from jitgemm.nn.layers.packed import check_sums_of
from jitgemm.nn.layers.sums import set_sums
from jitgemm.nn.quantize.replaceable import ROUTERS
from jitgemm.vllm.layouts import Layout, Unsupported, floats, layout_of
from jitgemm.vllm.warm import Layers, Warmer

NAME = "jitgemm"
logger = init_logger("vllm." + __name__)

_OPTIONS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "activation": (None, lambda value: value is None or activation_named(value), ""),
    "lm_head": (None, lambda value: value in (None, "e4m3", "int8"), "e4m3, int8 or None"),
    "bits": (4, lambda value: value in (4, 8), "4 or 8"),
    "group_size": (None, lambda size: size is None or type(size) is int and (size > 0 or size == -1),
                   "a positive integer, or -1 for one group a row"),
    "symmetric": (None, lambda value: value is None or isinstance(value, bool), "true or false"),
    "sums": ("f32", lambda value: value in SUMS, ", ".join(SUMS)),
    "ignore": ((), lambda value: _patterns("ignore", value) is not None, ""),
}  # fmt: skip
"""What a user may say: what it is otherwise, a check, and what that expects."""
_LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
_FLOATS = ("F16", "BF16", "F32", "F64")


@register_quantization_config(NAME)
class JitGemmConfig(QuantizationConfig):
    """What `--quantization jitgemm` means for a model.

    Args:
        checkpoint: the quantization_config of a quantised checkpoint; None for a model in floats, whose linears and
            experts are quantised while it is loaded.
        options: a mapping with any of

            - activation: "e4m3", "int8" or "int8_affine"; None for what the checkpoint says, or e4m3;
            - sums: "f16" or "exact", what kernels of 4-bit weights may add up in, as for `gemm_w4a8_nt`; "f32" otherwise;
            - lm_head: "e4m3" or "int8": the output layer in 8 bits, a scale per row; None leaves it in its type;
            - of a model in floats: bits (4, or 8 with a scale per row), group_size (-1 or k and more: per channel) and
              symmetric, as `quantize_w4` takes them, None as in `quantize_` without calibration; ignore, names, parts of names or "re:" and an expression of layers
              that stay.

    Raises:
        ValueError: an option is not known or wrong, or the checkpoint's names of layers that it leaves out are.
    """

    def __init__(self, checkpoint: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None):
        super().__init__()
        self._given = checkpoint
        nested = (checkpoint or {}).get("quantization")  # of ModelOpt's hf_quant_config.json
        self.checkpoint = checkpoint if nested is None else {"quant_method": "modelopt", **checkpoint, **nested}
        said = self.checkpoint or {}
        self._left_out = [each for key in _LEFT_OUT for each in _patterns(key, said.get(key) or [])]
        _patterns("dynamic", ["re:" + rule.removeprefix("-:").removeprefix("+:") for rule in said.get("dynamic") or ()])
        self.options: dict[str, Any] = {name: default for name, (default, _, _) in _OPTIONS.items()}
        self._set(options or {})
        self.warmer = Warmer()
        self.from_files, self.adapted = Layers(), Layers()
        self._theirs: QuantizationConfig | None = None
        self._mappers: list[Any] = []
        self._model: tuple[Any, ...] = ("", None, None)  # its name, config and revision
        self._place: tuple[Any, str] | None = None
        self.saved = False  # whether the files hold layers that jitgemm packed
        self._headers: dict[str, dict[str, str]] = {}  # {layer: {suffix: safetensors' dtype}}
        self._in_file: dict[str, str] = {}  # what the files call the layers that vLLM renames

    def _set(self, options: Mapping[str, Any]) -> None:
        if not isinstance(options, Mapping):
            raise ValueError(f"jitgemm: expected options by name, got {options!r}")
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise ValueError(f"jitgemm: expected the options {', '.join(_OPTIONS)}, got {', '.join(sorted(unknown))}")
        for name, value in options.items():
            _, fits, expected = _OPTIONS[name]
            if not fits(value):
                raise ValueError(f"{name}: expected {expected}, got {value!r}")
        self.options |= options
        if (activation := self.options["activation"]) is not None and self.options["bits"] == 4:
            check_sums_of(self.options["sums"], activation)

    # ---- what vLLM asks of a config ----------------------------------------------------------------------------------

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JitGemmConfig:
        """From a model's quantization_config: that of a checkpoint, or {"quant_method": "jitgemm", options}.

        The latter may hold the former under "checkpoint".
        """
        if config.get("quant_method") != NAME:
            return cls(config)
        said = {name: value for name, value in config.items() if name != "quant_method"}
        return cls(said.pop("checkpoint", None), said)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Takes over any checkpoint for whose model the user asked for jitgemm, and no other."""
        return NAME if user_quant == NAME else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Options from --hf-overrides '{"jitgemm": {...}}', and the headers of the checkpoint's files."""
        self._set(getattr(hf_config, NAME, None) or {})
        self._model = (model_name, hf_config, revision)
        from vllm.transformers_utils.config import get_safetensors_params_metadata as headers_of

        local = os.path.isdir(model_name)
        if local:
            weights_of(Path(model_name), by_index=True)  # as vLLM's loader reads them
        try:
            found = Checkpoint(model_name).headers() if local else headers_of(model_name, revision=revision)
        except (OSError, ValueError) as error:
            logger.warning("jitgemm: no headers of %s (%s): its config alone decides", model_name, error)
            return
        for name, info in found.items():
            layer, _, suffix = name.rpartition(".")
            if layer:  # none of __metadata__
                self._headers.setdefault(layer, {})[suffix] = str(info.get("dtype"))
        self._in_file = {layer: layer for layer in self._headers}
        self.saved = any(_packed(found) for found in self._headers.values())

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self._mappers.append(hf_to_vllm_mapper)
        self._in_file = hf_to_vllm_mapper.apply_dict(self._in_file)
        for layer, found in self._headers.items():  # by what vLLM calls the tensors
            for suffix in list(found):
                for name in hf_to_vllm_mapper.apply_dict({f"{layer}.{suffix}": None}):
                    found[name.rpartition(".")[2]] = found.pop(suffix)

    def get_cache_scale_mapper(self) -> Any:
        """How the scales of a quantised cache are called, which is the checkpoint's own business.

        Drops experts that jitgemm packed, which are read from the files; again, where vLLM loads the model again. Raises
        ValueError where it does so with LoRA on experts.
        """
        if any(hasattr(layer.quant_method, "old_quant_method") for layer in self.adapted):
            raise ValueError(
                "reload_weights: expected a model without LoRA on experts, whose weights vLLM does not load again behind "
                "its adapters, got one with"
            )
        theirs = self._checkpoints_own()
        found = super().get_cache_scale_mapper() if theirs is None else theirs.get_cache_scale_mapper()
        packed = {
            re.escape(name.rpartition(".")[2])
            for name, suffixes in self._headers.items()
            if self.saved and "gate" in suffixes and f"{name}.w13" in self._headers
        }
        if not packed:
            return found
        from vllm.model_executor.models.utils import WeightsMapper

        from jitgemm.vllm.saved import read_again

        for layer in self.from_files:
            read_again(layer)
        names = re.compile(rf"(^|\.)({'|'.join(packed)})\.(gate|w13\.\w+|w2\.\w+)$")
        dropped = WeightsMapper(orig_to_new_regex={names: None})
        return dropped if found is None else found | dropped

    @property
    def kv_cache_scheme(self) -> Any:
        """How compressed-tensors' checkpoint has the cache quantised, which vLLM's attention reads from a config."""
        return getattr(self._checkpoints_own(), "kv_cache_scheme", None)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
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
        from jitgemm.vllm.linear import JitGemmLinearMethod

        if hasattr(layer, "num_embeddings"):
            return self._of_embedding(layer, prefix)
        if not isinstance(layer, (LinearBase, RoutedExperts)):
            theirs = self._checkpoints_own()
            return None if theirs is None else theirs.get_quant_method(layer, prefix)
        experts = isinstance(layer, RoutedExperts)
        names, joined = self._experts_names(prefix) if experts else (self._names(prefix),) * 2
        quantised = {name: self._quantised(name, layer, prefix) for name in joined}
        if len(set(quantised.values())) > 1:
            one_of_each = dict({each: (name, each) for name, each in quantised.items()}.values())
            raise ValueError(f"{prefix}: expected all or none of its layers to be quantised, got such as {one_of_each}")
        theirs = None
        if all(quantised.values()):
            try:
                return (JitGemmMoEMethod if experts else JitGemmLinearMethod).of(self, layer, names)
            except Unsupported as reason:
                theirs = self._checkpoints_own()
                if theirs is None and (self.saved or self.checkpoint is not None):
                    raise ValueError(f"{prefix}: {reason}") from reason
                logger.warning_once("jitgemm: vLLM's own kernels serve layers such as %s: %s", prefix, str(reason))
        if theirs is not None:
            return theirs.get_quant_method(layer, prefix)
        return UnquantizedFusedMoEMethod(layer.moe_config) if experts else UnquantizedLinearMethod()

    def _of_embedding(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of an embedding or an output layer; None for one that stays in its type."""
        from jitgemm.vllm.linear import JitGemmHeadMethod

        names, head = self._names(prefix), type(layer).__name__ == "ParallelLMHead"
        header = self._headers.get(names[0], {})
        given = self.saved or self.checkpoint is not None
        if not (given and header and self._quantised(names[0], layer)):
            ours = head and self.options["lm_head"] is not None
            return JitGemmHeadMethod(self, names, floats(torch.get_default_dtype())) if ours else None
        if head and self.saved:
            return JitGemmHeadMethod(self, names, Layout())
        theirs = self._checkpoints_own()
        method = None if theirs is None else theirs.get_quant_method(layer, prefix)
        if method is None:
            raise ValueError(
                f"{prefix}: expected its weight in floats, or a config of vLLM's that reads it, got {', '.join(header)}"
            )
        logger.warning_once("jitgemm: vLLM's own kernels serve %s, which the checkpoint has quantised", prefix)
        return method

    # ---- what the methods ask ----------------------------------------------------------------------------------------

    @property
    def loads_biases(self) -> bool:
        """Whether vLLM's model calls the loaders of experts' biases. That of gpt-oss does so for its own format alone, and
        what is quantised while loaded has models that copy them by themselves."""
        gpt_oss = getattr(self._model[1], "model_type", "") == "gpt_oss"
        return self.checkpoint is not None and not gpt_oss

    def layout(self, names: Iterable[str], k: int, dtype: torch.dtype, experts: bool = False) -> Layout:
        """How layers that vLLM joins, or those of an expert, are stored; k: columns on all ranks.

        Raises:
            Unsupported: jitgemm has no reader for them.
            ValueError: their configs differ.
        """
        if self.saved:
            return Layout()
        if self.checkpoint is None:
            logger.info_once(
                "jitgemm: weights are quantised as they are loaded, without calibration; a file that `jitgemm quantize` "
                "makes loses less"
            )
            return floats(dtype)
        if (bound := self.checkpoint.get("activation_scale_ub")) is not None:
            text = "jitgemm: activation_scale_ub %s is not applied: a token's scale grows with its largest value"
            logger.warning_once(text, bound)
        first, *others = [
            layout_of(self.checkpoint, name, k, dtype, self._headers.get(name, {}), experts) for name in names
        ]
        if any(each != first for each in others):
            raise ValueError(f"{', '.join(names)}: expected one way of quantising layers that vLLM joins, got several")
        return first

    def configure(self, name: str, module: torch.nn.Module, new: bool) -> None:
        """Sets what a layer of jitgemm.nn computes as the user says; new: False where its tensors go to another, whose
        sums stay as they are."""
        module.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)  # type: ignore[assignment]
        if not new:
            return
        for part, why in set_sums({name: module}, self.options["sums"]).items():
            logger.warning("jitgemm: %s is added up in fp32, as sums in f16 cannot be had: %s", part, why)

    def reads_files_for(self, layer: torch.nn.Module) -> None:
        """Notes a layer whose weights are read from the files, and what vLLM says where they are: `reload_weights` may
        change it."""
        self.from_files.add(layer)
        config = get_current_vllm_config_or_none()
        if self._place is None and config is not None and config.model_config is not None:
            self._place = config.model_config, config.model_config.model

    def files(self) -> Checkpoint:
        """The checkpoint's files, once vLLM has them on this machine."""
        name, _, revision = self._model
        if self._place is not None and self._place[0].model != self._place[1]:
            name, revision = self._place[0].model, None
        if not os.path.isdir(name):
            from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

            config = get_current_vllm_config_or_none()
            cache = None if config is None else config.load_config.download_dir
            name = download_weights_from_hf(name, cache, ["*.safetensors"], revision)
        return Checkpoint(name)

    def suffixes(self, names: Iterable[str]) -> list[str]:
        """What the files hold of layers but for their biases, which vLLM loads."""
        return sorted({suffix for name in names for suffix in self._headers[name]} - {"bias"})

    # ---- names and rules ---------------------------------------------------------------------------------------------

    def _names(self, prefix: str) -> list[str]:
        """What the files call the layers that vLLM joins into one."""
        above, dot, last = prefix.rpartition(".")
        parts = [above + dot + part for part in self.packed_modules_mapping.get(last, ())]
        for names in (parts, [prefix]):
            if any(name in self._in_file for name in names):
                return [self._in_file.get(name, name) for name in names]
        return parts or [prefix]

    def _experts_names(self, prefix: str) -> tuple[list[str], list[str]]:
        """What the files call one expert's layers, or those of all that jitgemm packed; and the layers of all experts.

        Raises:
            ValueError: the files have them in a form that vLLM's models do not load.
        """
        module = prefix.removesuffix(".routed_experts")
        start = module + "."
        below = {vllms[len(start) :]: name for vllms, name in self._in_file.items() if vllms.startswith(start)}
        every = [name for rest, name in below.items() if rest.partition(".")[0].isdigit()]
        if any(_packed(self._headers[name]) for name in every):
            raise ValueError(
                f"{prefix}: expected packed experts as one module has them all, got some that are packed one by one; "
                "serve the checkpoint that they were made from"
            )
        stacked = self._headers.get(self._in_file.get(module, ""), {})
        if "gate_up_proj_scale_inv" in stacked and self.checkpoint and not self.checkpoint.get("weight_block_size"):
            raise ValueError(
                f"{prefix}: expected the scales of experts one by one or in blocks, got gate_up_proj_scale_inv with one "
                "for each expert, which vLLM's models do not load"
            )
        names = [name for rest, name in below.items() if rest.startswith("0.")]
        if not names and self.saved:
            names = [below[part] for part in ("w13", "w2") if part in below]
        names = names or [f"{start}0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        return names, every or names

    def _quantised(self, name: str, layer: torch.nn.Module, prefix: str = "") -> bool:
        """Whether a layer is quantised in the checkpoint, or is to be where nothing is.

        Args:
            prefix: what vLLM calls it, by which a user may leave it out, too.
        """
        if self.saved:
            return _packed(self._headers.get(name, ()))
        if self.checkpoint is None:
            sizes = getattr(layer, "output_size", 0), getattr(layer, "input_size", 0)
            router = set(name.split(".")[-2:]) & set(ROUTERS) and sizes[0] < sizes[1]
            ignored = _patterns("ignore", self.options["ignore"])
            return not router and not any(each.match(called) for each in ignored for called in (name, prefix))
        if name in self._headers:
            found = self._headers[name]
            return bool(set(found) - {"weight", "bias"}) or found.get("weight") not in _FLOATS
        return not any(each.match(name) for each in self._left_out) and GPTQ.left_out(self.checkpoint, name) is None

    def _checkpoints_own(self) -> QuantizationConfig | None:
        """vLLM's config of the checkpoint, if it has one."""
        if self._theirs is None and self.checkpoint is not None:
            try:
                own = get_quantization_config(self.checkpoint.get("quant_method", ""))
                found = own.from_config(dict(self._given))
                found.maybe_update_config(*self._model)
            except Exception as error:  # whatever it asserts or does not know, jitgemm may
                logger.warning_once("jitgemm: vLLM's own config refuses this checkpoint: %s", repr(error))
                return None
            for mapper in self._mappers:
                found.apply_vllm_mapper(mapper)
            self._theirs = found
        if self._theirs is not None:
            self._theirs.packed_modules_mapping = self.packed_modules_mapping
        return self._theirs


def _packed(suffixes: Iterable[str]) -> bool:
    """Whether these are the tensors of a layer that jitgemm packed."""
    return {"blocks", "meta"} <= set(suffixes)


def _patterns(key: str, rules: Any) -> list[re.Pattern[str]]:
    """Of rules that mean layers: by an expression behind "re:", a pattern of names, or whole parts of them.

    Raises ValueError for other rules.
    """
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, str) for rule in rules):
        raise ValueError(f"{key}: expected a list of names, got {rules!r}")
    return [_pattern(key, rule) for rule in rules]


@cache
def _pattern(key: str, rule: str) -> re.Pattern[str]:
    parts = rf"(.*\.)?{re.escape(rule.strip('.'))}(\.|$)|{translate(rule)}"
    expression = rule.removeprefix("re:") if rule.startswith("re:") else parts
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(f"{key}: expected a regular expression, got {expression!r}: {error}") from error
