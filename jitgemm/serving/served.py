"""What a checkpoint and a user say of the layers of a model that an engine serves: which are quantised, and how.

A checkpoint's own config and the headers of its files decide; what jitgemm has no reader for is left to the engine's own
config of that checkpoint, with a warning. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from jitgemm.checkpoint.expressions import patterns
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.folder import weights_of
from jitgemm.checkpoint.gptq import FORMAT as GPTQ
from jitgemm.nn.layers.sums import set_sums
from jitgemm.nn.quantize.replaceable import ROUTERS
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.report import some
from jitgemm.serving.layouts import Layout, Unsupported, floats, layout_of
from jitgemm.serving.warm import Layers

NAME = "jitgemm"

_LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
_FLOATS = ("F16", "BF16", "F32", "F64")


class ServedModel:
    """What `--quantization jitgemm` means for a model.

    Args:
        checkpoint: the quantization_config of a quantised checkpoint; None for a model in floats, whose linears and
            experts are quantised while it is loaded.
        options: a mapping with any of a `Recipe`'s fields. Of a quantised checkpoint only activation, sums and lm_head
            count; there an activation of None is what the checkpoint says.

    Attributes:
        recipe: what the options say.
        engine, logger: how messages call the engine, and its logger.
        batch_invariant: whether the user wants results that do not depend on the other tokens.
        warmer: is told of each layer that is made (`expect`) and packed (`packed`).
        saved: whether the files hold layers that jitgemm packed.
        from_files: layers whose weights are read from the files.
        packed_modules_mapping: {layer of the engine's: the layers that it joins}.

    Raises:
        ValueError: an option is not known or wrong, or the checkpoint's names of layers that it leaves out are.
    """

    engine: str
    logger: Any
    warmer: Any
    batch_invariant: bool
    packed_modules_mapping: Mapping[str, list[str]]

    def __init__(self, checkpoint: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None):
        super().__init__()
        self._given = checkpoint
        nested = (checkpoint or {}).get("quantization")  # of ModelOpt's hf_quant_config.json
        self.checkpoint = checkpoint if nested is None else {"quant_method": "modelopt", **checkpoint, **nested}
        said = self.checkpoint or {}
        self._left_out = [each for key in _LEFT_OUT for each in patterns(key, said.get(key) or [])]
        patterns("dynamic", ["re:" + rule.removeprefix("-:").removeprefix("+:") for rule in said.get("dynamic") or ()])
        self._said: dict[str, Any] = {}
        self._set(options or {})
        self.saved = False  # whether the files hold layers that jitgemm packed
        self.from_files = Layers()
        self._theirs: Any = None
        self._mappers: list[Any] = []  # of names, that the engine's config of the checkpoint is told, too
        self._headers: dict[str, dict[str, str]] = {}  # {layer: {suffix: safetensors' dtype}}
        self._in_file: dict[str, str] = {}  # what the files call the layers that the engine renames

    def _set(self, options: Mapping[str, Any]) -> None:
        if not isinstance(options, Mapping):
            raise ValueError(f"jitgemm: expected options by name, got {options!r}")
        self._said |= options
        try:
            self.recipe = Recipe.of(self._said)
        except (TypeError, ValueError) as error:
            raise ValueError(f"jitgemm: {error}") from error

    # ---- what every engine asks of a config ------------------------------------------------------------------------------

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
            FileNotFoundError, ValueError: an index and its files differ, or a tensor is in two of the files: the engine's
                loader takes every tensor of every file that the index names.
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

    def no_headers(self, model: str | Path, error: Exception) -> None:
        """Says that files cannot be looked at, or are not here."""
        self.logger.warning("jitgemm: no headers of %s (%s): its config alone decides", model, error)

    def read_headers(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes in the headers of the checkpoint's files, as safetensors has them."""
        for name, info in found.items():
            layer, _, suffix = name.rpartition(".")
            if layer:  # none of __metadata__
                self._headers.setdefault(layer, {})[suffix] = str(info.get("dtype"))
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
            ValueError: some of the layers that are joined here are quantised and others are not, or differently.
        """
        names, joined = self._experts_names(prefix) if experts else (self._names(prefix),) * 2
        quantised = {name: self._quantised(name, layer, prefix) for name in joined}
        if len(set(quantised.values())) > 1:
            one_of_each = dict({each: (name, each) for name, each in quantised.items()}.values())
            raise ValueError(f"{prefix}: expected all or none of its layers to be quantised, got such as {one_of_each}")
        theirs = None
        if all(quantised.values()):
            try:
                return make(names)
            except Unsupported as reason:
                theirs = self._checkpoints_own()
                if theirs is None and (self.saved or self.checkpoint is not None):
                    raise ValueError(f"{prefix}: {reason}") from reason
                text = "jitgemm: %s's own kernels serve layers such as %s: %s"
                self.logger.warning_once(text, self.engine, prefix, str(reason))
        return plain() if theirs is None else theirs.get_quant_method(layer, prefix)

    def of_embedding(self, layer: torch.nn.Module, prefix: str, make: Callable[..., Any] | None) -> Any:
        """The method of an embedding or an output layer; None for one that stays in its type.

        Args:
            make: the method for the names in the files and a `Layout`; None for an embedding.

        Raises:
            ValueError: the checkpoint has quantised it, and the engine has no config that reads it.
        """
        names = self._names(prefix)
        header = self._headers.get(names[0], {})
        given = self.saved or self.checkpoint is not None
        if not (given and header and self._quantised(names[0], layer)):
            ours = make is not None and self.recipe.lm_head is not None
            return make(names, floats(torch.get_default_dtype(), self.recipe.k_alignment)) if ours else None
        if make is not None and self.saved:
            return make(names, Layout())
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
        return (self.checkpoint or {}).get("quant_method") in ("mxfp4", "gpt_oss_mxfp4")

    def _checkpoints_own(self) -> Any:
        """The engine's config of the checkpoint, if it has one."""
        if self._theirs is None and self.checkpoint is not None:
            try:
                found = self._own_config(self.checkpoint.get("quant_method", ""))
            except Exception as error:  # whatever it asserts or does not know, jitgemm may
                text = "jitgemm: %s's own config does not take this checkpoint: %s"
                self.logger.warning_once(text, self.engine, repr(error))
                return None
            for mapper in self._mappers:
                self._map(found, mapper)
            self._theirs = found
        return self._theirs

    def _own_config(self, method: str) -> Any:
        """What the engine makes of the checkpoint's config by its own class for a quant_method."""
        raise NotImplementedError

    def _map(self, config: Any, mapper: Any) -> None:
        """Tells a config how the engine calls the files' layers."""
        raise NotImplementedError

    # ---- what the methods ask ----------------------------------------------------------------------------------------

    def layout(self, names: Iterable[str], k: int, dtype: torch.dtype, experts: bool = False) -> Layout:
        """How layers that the engine joins, or those of an expert, are stored; k: columns on all ranks.

        Raises:
            Unsupported: jitgemm has no reader for them.
            ValueError: their configs differ.
        """
        if self.saved:
            return Layout()
        if self.checkpoint is None:
            text = "jitgemm: weights are quantised as they are loaded, without calibration; a file that `jitgemm quantize` "
            text += "makes loses less"
            if self.recipe.otherwise is not None:
                text += ', and so does {"scheme": "int4"}, in groups of 32 with zero points'
            self.logger.info_once(text)
            return floats(dtype, self.recipe.k_alignment)
        if (bound := self.checkpoint.get("activation_scale_ub")) is not None:
            text = "jitgemm: activation_scale_ub %s is not applied: a token's scale grows with its largest value"
            self.logger.warning_once(text, bound)
        first, *others = [
            layout_of(self.checkpoint, name, k, dtype, self._headers.get(name, {}), experts) for name in names
        ]
        if any(each != first for each in others):
            raise ValueError(
                f"{', '.join(names)}: expected one way of quantising layers that {self.engine} joins, got several"
            )
        if first.instead is not None and self.recipe.activation is None:
            said = first.scheme.inputs.replaced_by(first.instead)  # type: ignore[union-attr]
            self.logger.warning_once("jitgemm: %s", said)
        return first

    def configure(self, name: str, module: torch.nn.Module, new: bool) -> None:
        """Sets what a layer of jitgemm.nn computes as the user says; new: False where its tensors go to another, whose sums
        stay as they are."""
        module.batch_invariant = self.batch_invariant  # type: ignore[assignment]
        if not new:
            return
        for part, why in set_sums({name: module}, self.recipe.sums).items():
            self.logger.warning("jitgemm: %s is added up in fp32, as sums in f16 cannot be had: %s", part, why)

    def suffixes(self, names: Iterable[str]) -> list[str]:
        """What the files hold of layers except their biases, which the engine loads."""
        return sorted({suffix for name in names for suffix in self._headers[name]} - {"bias"})

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
                f"for each expert, which {self.engine}'s models do not load"
            )
        names = [name for rest, name in below.items() if rest.startswith("0.")]
        if not names and self.saved:
            names = [below[part] for part in ("w13", "w2") if part in below]
        names = names or [f"{start}0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        return names, every or names

    def _quantised(self, name: str, layer: torch.nn.Module, prefix: str = "") -> bool:
        """Whether a layer is quantised in the checkpoint, or is to be where nothing is.

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
            return bool(set(found) - {"weight", "bias"}) or found.get("weight") not in _FLOATS
        return not any(each(name) for each in self._left_out) and GPTQ.left_out(self.checkpoint, name) is None


def _packed(suffixes: Iterable[str]) -> bool:
    """Whether these are the tensors of a layer that jitgemm packed."""
    return {"blocks", "meta"} <= set(suffixes)
