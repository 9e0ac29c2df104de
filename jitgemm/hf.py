"""transformers' from_pretrained into the layers of jitgemm.nn: a config and a quantizer registered as "jitgemm".

    import jitgemm.hf
    AutoModelForCausalLM.from_pretrained(folder, config=jitgemm.hf.config(folder))                # quantised
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=jitgemm.hf.JitGemmConfig())  # quantises
    AutoModelForCausalLM.from_pretrained(folder)                                                  # what these saved

transformers makes the model, says where each part goes, and loads what is plain. What is not (quantised layers, weights
to be quantised or dequantised, tied tensors that differ) stands behind a `Placeholder` meanwhile; afterwards it is read
by `jitgemm.nn`'s reader from the same files, one layer at a time. So a format that `load_` reads is read here, too.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.invariant import check_tp_invariant, most_ranks
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.packed import put_sums
from jitgemm.nn.load.load import check_sums, fill_tensors, make_layer, read_tensor, warn_of
from jitgemm.nn.load.plan import Plan, never_saved, plan_for
from jitgemm.nn.quantize.choose import choose, others
from jitgemm.nn.quantize.placeholder import Placeholder
from jitgemm.nn.quantize.quantize import note_otherwise, quantised, warn_of_experts
from jitgemm.nn.quantize.swap import SAVED, describe_to_transformers, put_layers, put_module
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.report import Report
from jitgemm.tensors import check_flag

try:
    from transformers import AutoConfig, PreTrainedModel
    from transformers.quantizers import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils import cached_file
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(f"jitgemm.hf needs transformers 4.57 or newer: pip install transformers ({error})") from error

if TYPE_CHECKING:
    from jitgemm.nn.parallel.plan import ShardingPlan

__all__ = ["JitGemmConfig", "config"]

NAME = "jitgemm"
_OF_RECIPE = (
    "bits", "scheme", "activation", "group_size", "symmetric", "scale_dtype", "full_range", "clip_steps", "block",
    "sums",
    "lm_head", "rotation",
)  # fmt: skip


def config(
    folder: str | PathLike[str], *, activation: str | None = None, modules_to_not_convert: Iterable[str] = (),
    strict: bool = True, allow_missing: Iterable[str] = (), format: str | None = None, sums: str = "f32",
    tp_invariant: bool | int = False, **options: Any,
) -> Any:  # fmt: skip
    """A quantised checkpoint's config, with which from_pretrained loads it into layers of jitgemm.nn.

    Args:
        folder: what from_pretrained is given: a folder, or a name on the hub.
        activation, strict, allow_missing, format, sums: as in `jitgemm.nn.load_`.
        tp_invariant: as `JitGemmConfig` has it.
        modules_to_not_convert: patterns (`fnmatch`) of modules that stay what they are, with dequantised weights.
        options: for AutoConfig.from_pretrained, such as revision.

    Raises:
        OSError: there is no such folder, and the hub gives none of that name.
        TypeError, ValueError: an argument is wrong, or none that AutoConfig.from_pretrained takes.
    """
    if not isinstance(folder, (str, PathLike)):
        raise TypeError(f"folder: expected a path, or a name on the hub, got {type(folder).__name__}")
    settings = JitGemmConfig(
        activation=activation, modules_to_not_convert=modules_to_not_convert, strict=strict,
        allow_missing=allow_missing, format=format, sums=sums, tp_invariant=tp_invariant,
    )  # fmt: skip
    try:
        of_model, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    except RecursionError as error:
        raise ValueError(f"folder: expected a config.json in JSON in {folder}, got {error}") from None
    except OSError as error:
        if Path(folder).exists():
            raise
        wanted = "one that is here, or a name on the hub"
        raise OSError(f"folder: expected {wanted}, got {str(folder)!r}: {error}") from error
    if unknown:
        wanted = "arguments of its own or of AutoConfig.from_pretrained"
        raise TypeError(f"config: expected {wanted}, got {', '.join(unknown)}")
    of_model.quantization_config = settings.to_dict()  # transformers takes a dict for one that stood in the file
    return of_model


@register_quantization_config(NAME)
class JitGemmConfig(QuantizationConfigMixin):
    """How to quantise a model in floats while it is loaded; `jitgemm.hf.config` makes one for quantised checkpoints.

    Args:
        bits: 4, or 8 for a scale per row of int8 or e4m3, as `activation` says.
        scheme: as in `quantize_`, without calibration.
        group_size, symmetric: of 4 bits, as in `quantize_w4`; None for what `quantize_` takes without calibration.
        scale_dtype: of 4 bits: "bfloat16", "float16" or "float32"; None for bfloat16.
        full_range, clip_steps: of 4 bits, block, of 8, and rotation: as in `quantize_`.
        activation: one of `jitgemm.nn.ACTIVATIONS`; None for what `quantize_` takes, or for what a quantised checkpoint
            says.
        lm_head: as in `quantize_`.
        modules_to_not_convert: patterns (`fnmatch`) of modules that stay, besides those that `quantize_` never takes.
        strict, allow_missing, format, sums: as in `jitgemm.nn.load_`.
        tp_invariant: Linears have the same bits on any number of GPUs, as in `load_`, by the model's own plan; on one
            GPU without a mesh, too.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    _loaded = False

    def __init__(
        self, bits: int = 4, group_size: int | str | None = None, activation: str | None = None,
        symmetric: bool | None = None, scale_dtype: str | None = None,
        modules_to_not_convert: Iterable[str] | None = (), strict: bool = True,
        allow_missing: Iterable[str] = (), format: str | None = None, lm_head: str | None = None,
        quant_method: str = NAME, sums: str = "f32", scheme: str | None = None, full_range: bool | None = None,
        clip_steps: int | None = None, block: int | None = None, rotation: int | None = None,
        tp_invariant: bool | int = False,
    ):  # fmt: skip
        check_flag("strict", strict)
        check_tp_invariant(tp_invariant)
        lists = {"modules_to_not_convert": modules_to_not_convert, "allow_missing": allow_missing}
        for name, patterns in lists.items():
            if isinstance(patterns, str):
                raise ValueError(f"{name}: expected a list of patterns, got {patterns!r}")
        self.quant_method: Any = quant_method
        self.bits, self.group_size, self.activation = bits, group_size, activation
        self.symmetric, self.scale_dtype, self.lm_head = symmetric, scale_dtype, lm_head
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.strict, self.allow_missing, self.format = strict, list(allow_missing), format
        self.sums, self.scheme, self.tp_invariant = sums, scheme, tp_invariant
        self.full_range, self.clip_steps, self.block, self.rotation = full_range, clip_steps, block, rotation
        _ = self.recipe  # which checks it

    def to_dict(self) -> dict[str, Any]:
        """What goes into a config.json: of a loaded model, that jitgemm reads its files, whose tensors say the rest."""
        return dict(SAVED) if self._loaded else super().to_dict()

    def leaves(self, name: str) -> bool:
        """Whether a module stays what it is."""
        return any(fnmatchcase(name, pattern) for pattern in self.modules_to_not_convert)

    @property
    def recipe(self) -> Recipe:
        """How floats are quantised."""
        return Recipe.of({name: getattr(self, name) for name in _OF_RECIPE})


@register_quantizer(NAME)
class JitGemmQuantizer(HfQuantizer):
    """The two hooks around transformers' loading: placeholders before it, layers after it.

    Attributes:
        report: what was loaded or quantised, see `jitgemm.nn.Report`: `model.hf_quantizer.report`.
    """

    quantization_config: JitGemmConfig
    requires_parameters_quantization = False
    modules_to_not_convert: tuple[str, ...] = ()  # transformers 4 looks for it
    is_trainable = False
    is_compileable = True
    report: Report
    _divided = False

    def is_serializable(self, **_: Any) -> bool:
        return not self._divided  # each rank holds a part

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raises for offloading: a packed weight is used where it lies."""
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, Mapping) else set()
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                f"device_map: expected GPUs alone or the CPU alone, as packed weights are not offloaded, got "
                f"{', '.join(sorted(devices))}; give more GPUs, or max_memory without 'cpu'"
            )

    # ---- before ------------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        _check_parallel(model)
        config = self.quantization_config
        device = torch.empty(0).device  # meta where transformers allocates buffers after loading, else the CPU
        checkpoint = Checkpoint(checkpoint_files or _folder(model.config))
        self._copied = {name for name, _ in checkpoint.elsewhere()}
        self._tied = dict(getattr(model, "all_tied_weights_keys", {}))  # of transformers 5, which ties after loading
        for name, other in self._tied.items():
            setattr(model.get_submodule(_owner(name)), name.rpartition(".")[2], model.get_parameter_or_buffer(other))
        with _usual_defaults():
            # What no file holds is transformers' to compute.
            computed = {name for name, _ in model.named_buffers()} - set(model.state_dict()) | never_saved(model)
            filter = (lambda name, module: not config.leaves(name)) if config.modules_to_not_convert else None
            activation, may_miss = config.activation if self.pre_quantized else None, [*config.allow_missing, *computed]
            plan = plan_for(model, checkpoint, filter, activation, config.format, may_miss, config.strict)
            kept = {name: why for name, why in plan.kept.items() if name not in computed}
            self.report = Report((), plan.skipped, plan.ignored, kept)  # names are not known yet
            check_sums(plan, config.sums)
            _check_patterns(model, config.modules_to_not_convert, plan)
            self._chosen = {} if self.pre_quantized else self._choose(plan)
        self._plan = plan
        self._untied = any(plan.replaceable.shared(name) for name in (*plan.layers, *self._chosen))
        self._held: dict[str, Placeholder] = {}
        for name, places in _to_hold(plan, self._chosen, self._plain).items():
            placeholder = Placeholder(model.get_submodule(name), self._size(name), device)
            for place in places:
                put_module(model, place, placeholder)
                self._held[place] = placeholder
        self._unexpected = model._keys_to_ignore_on_load_unexpected
        container = list if self._unexpected is None else type(self._unexpected)  # a set in newer versions
        model._keys_to_ignore_on_load_unexpected = container(["."])  # all: the plan has found what each tensor is for
        if hasattr(model, "all_tied_weights_keys"):
            model.all_tied_weights_keys = self._ties_without(self._held.keys())

    def _plain(self, plan: Plan, name: str) -> bool:
        """Whether transformers reads a tensor as the plan does: it takes that of the last file that has one."""
        origin = plan.tensors[name]
        if not isinstance(origin, str) or name in plan.untied:
            return False
        return not self._copied or self._copied.isdisjoint(plan.checkpoint.rows(origin).sources)

    def _choose(self, plan: Plan) -> dict[str, dict[str, Any]]:
        """What to quantise: what `quantize_` would, as far as the checkpoint has it and nobody leaves it out.

        {name: {parameter: its name in the plan}}.
        """
        chosen, skipped = choose(plan.replaceable, None, self.quantization_config.recipe)
        origins = {}
        for name in [name for name in chosen if name not in plan.layers]:
            tensors = plan.model.get_submodule(name).named_parameters(recurse=False)
            origin_of = {child: _named(plan, chosen[name], child, tensor) for child, tensor in tensors}
            if self.quantization_config.leaves(name):
                skipped[name] = "left out by modules_to_not_convert"
            elif None in origin_of.values():
                skipped[name] = "not in the checkpoint"
            else:
                origins[name] = origin_of
        self.report.skipped |= skipped | others(plan.replaceable)
        return origins

    def _size(self, name: str) -> int:
        """Bytes that the layer of that name takes, about."""
        plan, layer = self._plan, self._plan.layers.get(name)
        if layer is not None:
            infos = [plan.checkpoint.info(name) for name in layer.files]
            return sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
        tensors = list(plan.model.get_submodule(name).parameters(recurse=False))
        if name in self._chosen:
            config = self.quantization_config
            head = config.recipe.head if name == plan.replaceable.head else None
            return sum(tensor.numel() * ((head or config).bits + 1) // 8 for tensor in tensors)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _ties_without(self, modules: Collection[str]) -> dict[str, str]:
        return {a: b for a, b in self._tied.items() if _owner(a) not in modules and _owner(b) not in modules}

    # ---- after -------------------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        plan, replaceable, recipe = self._plan, self._plan.replaceable, self.quantization_config.recipe
        invariant = self.quantization_config.tp_invariant
        division = _division(model, plan, invariant)
        self._divided = division is not None
        layers = {name: replaceable.places[name] for name in (*plan.layers, *self._chosen)}

        def make(name: str, old: Placeholder) -> PackedLinear | PackedExperts:
            module, device = old.vacate()
            if name in plan.layers:
                return make_layer(plan, name, module, device, division)
            for place in layers[name]:
                del self._held[place]  # with which the module goes
            for child, tensor in list(module.named_parameters(recurse=False)):
                value = read_tensor(plan, self._chosen[name][child], device, tensor.dtype).to(tensor.dtype)
                setattr(module, child, torch.nn.Parameter(value, requires_grad=False))
            cut = None if division is None or name in replaceable.experts else division.cut(name)
            layer = quantised(
                replaceable, name, module, recipe, ranks=1 if cut is None or cut.dim == "n" else cut.world
            )
            note_otherwise(self.report, name, layer, recipe)
            if division is not None:
                division.divide(name, layer)
            return layer

        replaced = {place for places in layers.values() for place in places}
        devices = {}
        for place in self._held.keys() - replaced:
            module, devices[place] = self._held[place].vacate()
            put_module(model, place, module)
        put_layers(model, layers, make, "loading" if self.pre_quantized else "quantising")
        if invariant and division is None:
            _as_divided(model, layers, most_ranks(invariant))
        state = model.state_dict(keep_vars=True)
        # transformers marks what it has loaded; what it did not find under its own name is read like the rest.
        others = [
            name
            for name in plan.tensors
            if name in state
            and _owner(name) not in replaced
            and not (self._plain(plan, name) and hasattr(state[name], "_is_hf_initialized"))
        ]
        fill_tensors(plan, others, lambda name, tensor: devices[_owner(name)])
        if division is not None:
            for place in devices:
                if isinstance(module := model.get_submodule(place), torch.nn.Linear):
                    division.divide(place, module)
        model._keys_to_ignore_on_load_unexpected = self._unexpected
        if hasattr(model, "all_tied_weights_keys"):
            model.all_tied_weights_keys = self._ties_without(replaced | {_owner(name) for name in plan.untied})
        describe_to_transformers(model, self._untied or bool(plan.untied))
        if hasattr(model.config, "quantization_config"):
            config = copy.copy(self.quantization_config)
            config._loaded = True
            model.config.quantization_config = config
        self.report += [name for name in replaceable.places if name in layers]
        if recipe.sums != "f32":
            put_sums({name: model.get_submodule(name) for name in self.report}, recipe.sums, "from_pretrained")
        warn_of_experts(model, self.report, "from_pretrained")
        warn_of(self.report, "from_pretrained", f"of {plan.checkpoint.where}", "quantization_config=JitGemmConfig()")
        del self._plan, self._held, self._chosen, self._copied


def _check_patterns(model: PreTrainedModel, patterns: Iterable[str], plan: Plan) -> None:
    """Warns of patterns that are no layer's: transformers' own quantizers take parts of names."""
    places = plan.replaceable.places
    layers = [name for name, module in model.named_modules() if name in places or not any(module.children())]
    idle = [repr(pattern) for pattern in patterns if not any(fnmatchcase(name, pattern) for name in layers)]
    if idle:
        wanted = "patterns of layers' whole names, such as '*.o_proj' or 'model.layers.0.*'"
        text = f"modules_to_not_convert: expected {wanted}, got {', '.join(idle)}, which match nothing"
        warnings.warn(text, stacklevel=2)


def _check_parallel(model: PreTrainedModel) -> None:
    """Raises ValueError for what of transformers' parallel plans layers of jitgemm.nn do not take part in."""
    distributed = getattr(model.config, "distributed_config", None)
    if distributed is not None and not hasattr(PreTrainedModel, "_mesh_manager"):
        raise ValueError(
            "tp_plan, distributed_config: expected none with this transformers, whose plans divide no layers of "
            "jitgemm.nn; update it, or call jitgemm.nn.load_(model, folder, tp=mesh)"
        )
    for name in ("dp_size", "pp_size", "ep_size"):
        size = (distributed.get(name) if isinstance(distributed, Mapping) else getattr(distributed, name, None)) or 1
        if size > 1:
            raise ValueError(f"distributed_config: expected {name} = 1, as jitgemm.nn knows tp_size only, got {size}")


def _as_divided(model: Any, layers: Iterable[str], most: int) -> None:
    """Sets tp_invariant of layers on one GPU as the model's plan would divide them."""
    from jitgemm.nn.parallel.plan import plan_of, style_in

    rules = plan_of(model)
    for name in layers:
        style, layer = style_in(rules, name), model.get_submodule(name)
        if style is not None and isinstance(layer, PackedLinear):
            layer.tp_ranks, layer.tp_invariant = most, style.dim


def _division(model: Any, plan: Plan, tp_invariant: bool | int) -> ShardingPlan | None:
    """How transformers divides the model among ranks; None for a whole one."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    from jitgemm.nn.parallel.plan import ShardingPlan  # half a second of torch.distributed

    experts = next((name for name, layer in plan.layers.items() if layer.layout is not None), None)
    summed = {"all_reduce", "moe_identity_expert"} & set(model.tp_plan.values())
    if experts is not None and summed:
        raise ValueError(
            f"tp_plan: expected no sum over the ranks around {experts}, whose packed experts are whole on each, got "
            f"{', '.join(sorted(summed))}; leave the experts out with modules_to_not_convert"
        )
    division = ShardingPlan(model._mesh_manager.get_mesh("tp"), model.tp_plan, tp_invariant)
    division.check(model, plan.layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):  # which transformers has divided
            division.style_in_floats(name)
    return division


def _to_hold(plan: Plan, chosen: Iterable[str], plain: Callable[[Plan, str], bool]) -> dict[str, list[str]]:
    """{a name: all names} of the modules that transformers is not to load: what it cannot read, or not as the plan."""
    held = {name: plan.replaceable.places[name] for name in (*plan.layers, *chosen)}
    groups: dict[int, list[str]] = {}
    for name, tensor in plan.model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    for names in groups.values():
        if all(plain(plan, name) for name in names if name in plan.tensors):
            continue
        for owner in dict.fromkeys(_owner(name) for name in names):
            module = plan.model.get_submodule(owner)
            if owner and not any(owner in places for places in held.values()) and not any(module.children()):
                held[owner] = [owner]
    return held


def _named(plan: Plan, places: Iterable[str], child: str, tensor: torch.Tensor) -> str | None:
    """The name under which the checkpoint has a tensor of a module that stands at these places, or one tied to it."""
    tied = [name for name, other in plan.model.named_parameters(remove_duplicate=False) if other is tensor]
    return next((name for name in [*(f"{place}.{child}" for place in places), *tied] if name in plan.tensors), None)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _folder(config: Any) -> str:
    """Where the files are, in transformers 4, which has downloaded them but does not say so."""
    revision = getattr(config, "_commit_hash", None)
    file = cached_file(config.name_or_path, "config.json", revision=revision, local_files_only=True)
    return str(Path(str(file)).parent)


@contextmanager
def _usual_defaults() -> Iterator[None]:
    """Without the default device and type that transformers sets while it makes a model."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(usual)
