"""What a checkpoint and a user say of the layers of a model that an engine serves: which are quantised, and how.

A checkpoint's own config and the headers of its files decide; what jitgemm has no reader for is left to the engine's
own config of that checkpoint, with a warning. Knows no engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from jitgemm.checkpoint import formats
from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.checkpoint.compressed_tensors_config import METHOD as COMPRESSED_TENSORS
from jitgemm.checkpoint.expressions import patterns
from jitgemm.checkpoint.files import DTYPES, Checkpoint
from jitgemm.checkpoint.folder import weights_of
from jitgemm.checkpoint.format import BESIDE, INPUT_TENSORS
from jitgemm.checkpoint.gptq import FORMAT as GPTQ
from jitgemm.checkpoint.layouts import FLOATS
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.invariant import EXCHANGES, check_tp_invariant
from jitgemm.nn.layers.packed import set_sums
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.nn.quantize.replaceable import ROUTERS
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.report import some
from jitgemm.serving.engine import Engine
from jitgemm.serving.stored import StoredLayers, Unsupported, check_alike, source_of
from jitgemm.serving.warm import Layers, Warmer

NAME = "jitgemm"

_LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
_OF_MODELS = {"deepseek_v4_fp8": "fp8"}
"""{what vLLM calls a quant_method for one of its models: what the files do}."""
_EXPERT = re.compile(r"(.*\.)(\d+)\.[^.]+")
SHAPE = "weight_shape"
"""A tensor of sizes, whose numbers no header has."""


class ServedModel(Engine):
    """What `--quantization jitgemm` means for a model.

    Args:
        checkpoint: the quantization_config of a quantised checkpoint; None for a model in floats, whose linears and
            experts are quantised while it is loaded.
        options: a mapping with any of a `Recipe`'s fields. Of a quantised checkpoint only activation, sums and lm_head
            count; there an activation of None is what the checkpoint says. Also tp_invariant and exchange.

    Attributes:
        recipe: what the options say of weights.
        batch_invariant: whether the user wants results that do not depend on the other tokens.
        exchange: one of EXCHANGES, for the sums of such linears, and for experts' tokens where `experts_over_nvlink`.
        warmer: is told of each layer that is made (`expect`) and packed (`packed`).
        saved: whether the files hold layers that jitgemm packed.
        from_files: layers whose weights are read from the files.

    Raises:
        ValueError: an option is not known or wrong, or the checkpoint's names of layers that it leaves out are.
    """

    warmer: Warmer
    batch_invariant: bool

    def __init__(self, checkpoint: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None):
        super().__init__()
        self._given = checkpoint
        self.checkpoint = _in_the_files_words(checkpoint)
        said = self.checkpoint or {}
        self._left_out = [each for key in _LEFT_OUT for each in patterns(key, said.get(key) or [])]
        patterns("dynamic", ["re:" + rule.removeprefix("-:").removeprefix("+:") for rule in said.get("dynamic") or ()])
        self._said: dict[str, Any] = {}
        self._set(options or {})
        self.saved = False  # whether the files hold layers that jitgemm packed
        self.from_files = Layers()
        self._theirs: Any = None
        self._mappers: list[Any] = []  # of names, that the engine's config of the checkpoint is told, too
        self._headers: dict[str, dict[str, TensorInfo]] = {}  # {layer: {suffix: header}}
        self._metadata: dict[str, str] = {}  # what the files say of their tensors
        self._counts: dict[bool, dict[str, Counter[int]]] = {}
        self._in_file: dict[str, str] = {}  # what the files call the layers that the engine renames

    def _set(self, options: Mapping[str, Any]) -> None:
        if not isinstance(options, Mapping):
            raise ValueError(f"jitgemm: expected options by name, got {options!r}")
        self._said |= options
        said = {name: value for name, value in self._said.items() if value is not None}
        try:
            self.tp_invariant = said.pop("tp_invariant", False)
            check_tp_invariant(self.tp_invariant)
            self.exchange = said.pop("exchange", EXCHANGES[0])
            wide = bool(self.tp_invariant or self.experts_over_nvlink)
            if self.exchange not in EXCHANGES[: 1 + wide]:
                wanted = f"one of {EXCHANGES}" if wide else f"{EXCHANGES[0]!r} without tp_invariant"
                raise ValueError(f"exchange: expected {wanted}, got {self.exchange!r}")
            self.recipe = Recipe.of(said, beside=("exchange", "tp_invariant"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"jitgemm: {error}") from error

    # ---- what every engine asks of a config --------------------------------------------------------------------------

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
    def from_config(cls, config: dict[str, Any]) -> Self:
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

    def read_folder(self, folder: Path) -> None:
        """Takes in the headers of a checkpoint's files that are here; warns of a folder without any.

        Raises:
            FileNotFoundError, ValueError: an index and its files differ, or a tensor is in two of the files: the
                engine's loader takes every tensor of every file that the index names.
        """
        weights_of(folder, by_index=True)
        try:
            checkpoint = Checkpoint(folder)
        except FileNotFoundError as error:
            self.no_headers(folder, error)
            return
        if beside := checkpoint.check_copies(f"{self.engine}'s loader"):
            text = "jitgemm: %s's loader reads tensors that the index does not name: %s"
            self.logger.warning(text, self.engine, some(beside, 5))
        self.read_headers(checkpoint.headers())
        for name in {checkpoint.file(name): name for name in checkpoint.names()}.values():
            self._metadata |= checkpoint.metadata(name)

    def no_headers(self, model: str | Path, error: Exception) -> None:
        """Warns that the files' headers cannot be read."""
        self.logger.warning(
            "jitgemm: no headers of %s (%s): its config says which layers are quantised, and how is seen once all of "
            "its tensors are in the host's memory", model, error,
        )  # fmt: skip

    def read_headers(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Remembers the headers of the checkpoint's files, in safetensors' form."""
        for name, info in found.items():
            layer, _, suffix = name.rpartition(".")
            if layer:  # none of __metadata__
                dtype = DTYPES.get(str(info["dtype"]), torch.bool)  # which no layer has
                self._headers.setdefault(layer, {})[suffix] = TensorInfo(tuple(info["shape"]), dtype)
        self._in_file = {layer: layer for layer in self._headers}
        self.saved = any(_packed(found) for found in self._headers.values())

    def choose(
        self, layer: torch.nn.Module, prefix: str, make: Callable[[list[str]], Any], plain: Callable[[], Any],
        experts: bool = False,
    ) -> Any:  # fmt: skip
        """The method of a linear, or of a layer's experts.

        Args:
            prefix: what the engine calls it.
            make: the method for what the files call its layers, or Unsupported.
            plain: the engine's own of a layer in floats.

        Raises:
            ValueError: some of the layers that are joined here are quantised and others are not, or differently; the
                layer has none of the bits that tp_invariant promises.
        """
        if experts and not self.shares_whole_experts(layer):
            self.check_invariant(layer, prefix, "experts")
        names, joined = self._experts_names(prefix) if experts else (self._names(prefix),) * 2
        quantised = {name: self._quantised(name, layer, prefix) for name in joined}
        if len(set(quantised.values())) > 1:
            one_of_each = dict({flag: (name, flag) for name, flag in quantised.items()}.values())
            raise ValueError(f"{prefix}: expected all or none of its layers to be quantised, got such as {one_of_each}")
        theirs = None
        if all(quantised.values()):
            try:
                return make(names)
            except Unsupported as reason:
                theirs = self._checkpoints_own()
                if theirs is None and (self.saved or self.checkpoint is not None):
                    raise ValueError(f"{prefix}: {reason}") from reason
                self.check_invariant(layer, prefix, str(reason))
                text = "jitgemm: %s's own kernels serve layers such as %s: %s"
                self.logger.warning_once(text, self.engine, prefix, str(reason))
        self.check_invariant(layer, prefix, "one in floats")
        return plain() if theirs is None else theirs.get_quant_method(layer, prefix)

    def of_embedding(self, layer: torch.nn.Module, prefix: str, make: Callable[..., Any] | None) -> Any:
        """The method of an embedding or an output layer; None for one that stays in its type.

        Args:
            make: the method for the names in the files and what is `StoredLayers` there; None for an embedding.

        Raises:
            ValueError: the checkpoint has quantised it, and the engine has no config that reads it.
        """
        names = self._names(prefix)
        header = self._headers.get(names[0], {})
        quantised_file = self.saved or self.checkpoint is not None
        if not (quantised_file and header and self._quantised(names[0], layer)):
            return None if make is None or self.recipe.lm_head is None else make(names, self._floats())
        if make is not None and self.saved:
            return make(names, self.stored(names))
        theirs = self._checkpoints_own()
        method = None if theirs is None else theirs.get_quant_method(layer, prefix)
        if method is None:
            raise ValueError(
                f"{prefix}: expected its weight in floats, or a config of {self.engine}'s that reads it, got "
                f"{', '.join(header)}"
            )
        text = "jitgemm: %s's own kernels serve %s, which the checkpoint has quantised"
        self.logger.warning_once(text, self.engine, prefix)
        return method

    @property
    def of_gpt_oss(self) -> bool:
        """Whether the files are gpt-oss' own, whose experts are in MXFP4, stand together and have biases."""
        method = (self.checkpoint or {}).get("quant_method")
        return any(method in format.stacked for format in formats.FORMATS)

    def _checkpoints_own(self) -> Any:
        """The engine's config of the checkpoint, if it has one."""
        if self._theirs is None and self.checkpoint is not None:
            try:
                config = self._own_config(self.checkpoint.get("quant_method", ""))
            except Exception as error:  # whatever it asserts or does not know, jitgemm may
                text = "jitgemm: %s's own config does not take this checkpoint: %s"
                self.logger.warning_once(text, self.engine, repr(error))
                return None
            for mapper in self._mappers:
                self._map(config, mapper)
            self._theirs = config
        return self._theirs

    def _own_config(self, method: str) -> Any:
        """The engine's own config object for the checkpoint's quant_method."""
        raise NotImplementedError

    def _map(self, config: Any, mapper: Any) -> None:
        """Gives the engine's own config the mapping of names."""
        raise NotImplementedError

    # ---- what the methods ask ----------------------------------------------------------------------------------------

    def stored(self, names: Iterable[str]) -> StoredLayers:
        """How the files hold layers that the engine joins, or those of an expert.

        Raises:
            Unsupported: jitgemm has no reader for them.
            ValueError: they are quantised differently.
        """
        if self.saved:
            return StoredLayers(self._suffixes(names))
        if self.checkpoint is None:
            text = "jitgemm: weights are quantised as they are loaded, without calibration; a file made by "
            text += "`jitgemm quantize` loses less"
            if self.recipe.otherwise is not None:
                text += ', and so does {"scheme": "int4"}, in groups of 32 with zero points'
            self.logger.info_once(text)
            return self._floats()
        if (bound := self.checkpoint.get("activation_scale_ub")) is not None:
            text = "jitgemm: activation_scale_ub %s is not applied: a token's scale grows with its largest value"
            self.logger.warning_once(text, bound)
        headers = {name: self._headers[name] for name in names if name in self._headers}
        try:
            sources = {
                name: self.source(name, {suffix: _shell(info) for suffix, info in header.items() if suffix != SHAPE})
                for name, header in headers.items()
                if not header.keys() <= {*INPUT_TENSORS}
            }
        except ValueError as error:
            raise Unsupported(str(error)) from error
        if sources:
            check_alike(sources, self.engine)
        return StoredLayers(self._suffixes(headers) if headers else formats.suffixes(), sources)

    def _floats(self) -> StoredLayers:
        return StoredLayers(("weight",), floats=True, k_alignment=self.recipe.k_alignment)

    def source(
        self, name: str, tensors: Mapping[str, torch.Tensor], option: str = "activation", k: int | None = None
    ) -> LayerSource:
        """How a layer of these tensors, or with these headers, is read.

        Args:
            option: of the user's, which says its activation.
            k: columns of the layer in the files, if known.

        Raises:
            ValueError: it cannot be read.
        """
        own = {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
        source = source_of(Checkpoint(own, self.checkpoint, self._metadata), name, getattr(self.recipe, option), k)
        inputs = None if source.header is None else source.header.scheme.inputs
        if inputs is not None and inputs.instead is not None and self.recipe.activation is None:
            self.logger.warning_once("jitgemm: %s", inputs.replaced_by(inputs.instead))
        return source

    def check_loaded_again(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError if a model whose experts are read from files gets other weights for its other layers."""
        if not self.from_files:
            return
        for suffix, tensor in tensors.items():
            if not torch.equal(self.files().read(f"{name}.{suffix}", tensor.device), tensor):
                raise ValueError(
                    "weights: expected those of a path for a model with experts that jitgemm packed, which are read "
                    f"from files, got another {name}.{suffix} than theirs"
                )

    def configure(self, name: str, module: torch.nn.Module, new: bool) -> None:
        """Sets what a layer of jitgemm.nn computes as the user says; new: False where its tensors go to another, whose
        sums stay as they are."""
        experts = isinstance(module, PackedExperts)
        module.batch_invariant = self.batch_invariant or (experts and bool(self.tp_invariant))  # type: ignore[assignment]
        if not new:
            return
        for part, why in set_sums({name: module}, self.recipe.sums).items():
            self.logger.warning("jitgemm: %s is added up in fp32, as sums in f16 cannot be had: %s", part, why)

    def count(self, names: Iterable[str]) -> int | None:
        """How many tensors the files hold of these layers, without biases; None if no header is known."""
        tensors = [_own(self._headers[name]) for name in names if name in self._headers]
        return sum(map(len, tensors)) if tensors else None

    def experts_counts(self, name: str, biases: bool) -> Mapping[int, int]:
        """{expert's number: how many tensors the files hold of it} for the experts next to this layer's expert."""
        if biases not in self._counts:
            by_module = self._counts[biases] = {}
            for layer, suffixes in self._headers.items():
                if (match := _EXPERT.fullmatch(layer)) is not None:
                    of_layer = by_module.setdefault(match[1], Counter())
                    of_layer[int(match[2])] += len(_own(suffixes, biases))
        match = _EXPERT.fullmatch(name)
        return {} if match is None else self._counts[biases].get(match[1], {})

    def _suffixes(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({suffix for name in names for suffix in _own(self._headers.get(name, {}))}))

    # ---- names and rules ---------------------------------------------------------------------------------------------

    def _names(self, prefix: str) -> list[str]:
        """What the files call the layers that the engine joins into one."""
        above, dot, last = prefix.rpartition(".")
        parts = [above + dot + part for part in self.packed_modules_mapping.get(last, ())]
        for names in (parts, [prefix]):
            if any(name in self._in_file for name in names):
                return [self._in_file.get(name, name) for name in names]
        return parts or [prefix]

    def _experts_names(self, prefix: str) -> tuple[list[str], list[str]]:
        """What the files call one expert's layers, or those of all that jitgemm packed; and the layers of all experts.

        Raises:
            ValueError: the files have them in a form that the engine's models do not load.
        """
        module = prefix.removesuffix(".routed_experts")
        start = module + "."
        below = {own[len(start) :]: name for own, name in self._in_file.items() if own.startswith(start)}
        every = [name for below_module, name in below.items() if below_module.partition(".")[0].isdigit()]
        if any(_packed(self._headers[name]) for name in every):
            raise ValueError(
                f"{prefix}: expected packed experts as one module has them all, got some that are packed one by one; "
                "serve the checkpoint that they were made from"
            )
        stacked = self._headers.get(self._in_file.get(module, ""), {})
        if "gate_up_proj_scale_inv" in stacked and self.checkpoint and not self.checkpoint.get("weight_block_size"):
            raise ValueError(
                f"{prefix}: expected the scales of experts one by one or in blocks, got gate_up_proj_scale_inv with "
                f"one for each expert, which {self.engine}'s models do not load"
            )
        names = [name for below_module, name in below.items() if below_module.startswith("0.")]
        if not names and self.saved:
            names = [below[part] for part in ("w13", "w2") if part in below]
        names = names or [f"{start}0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        return names, every or names

    def _quantised(self, name: str, layer: torch.nn.Module, prefix: str = "") -> bool:
        """True if the checkpoint has the layer quantised, or if a model in floats is to have it quantised.

        Args:
            prefix: what the engine calls it, by which a user may leave it out, too.
        """
        if self.saved:
            return _packed(self._headers.get(name, ()))
        if self.checkpoint is None:
            sizes = getattr(layer, "output_size", 0), getattr(layer, "input_size", 0)
            router = set(name.split(".")[-2:]) & set(ROUTERS) and sizes[0] < sizes[1]
            return not router and not self.recipe.leaves(name, prefix)
        if name in self._headers:
            found = self._headers[name]
            weight = found.get("weight")
            return bool({*_own(found)} - {"weight"}) or weight is None or weight.dtype not in (*FLOATS, torch.float64)
        return not any(each(name) for each in self._left_out) and GPTQ.left_out(self.checkpoint, name) is None


def _packed(suffixes: Iterable[str]) -> bool:
    """True if these suffixes are of a layer that jitgemm packed."""
    return {"blocks", "meta"} <= set(suffixes)


def _own(suffixes: Iterable[str], biases: bool = False) -> list[str]:
    """Suffixes of the layer's own tensors, without those that files only keep next to it."""
    return [suffix for suffix in suffixes if (biases or suffix != "bias") and not re.fullmatch(BESIDE, suffix)]


def _shell(info: TensorInfo) -> torch.Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def _in_the_files_words(checkpoint: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A quantization_config as it stands in files: of ModelOpt's hf_quant_config.json, and without the names that an
    engine has for one of its models or of ModelOpt's algorithms."""
    if checkpoint is None:
        return None
    if (nested := checkpoint.get("quantization")) is not None:
        checkpoint = {"quant_method": "modelopt", **checkpoint, **nested}
    method = str(checkpoint.get("quant_method"))
    own = "modelopt" if method.startswith("modelopt_") else _OF_MODELS.get(method)
    if "config_groups" in checkpoint and "quant_algo" not in checkpoint:  # which vLLM 0.33 calls mxfp4 of Kimi-K3
        own = COMPRESSED_TENSORS
    return checkpoint if own is None else {**checkpoint, "quant_method": own}
