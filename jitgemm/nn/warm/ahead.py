"""A model as it will be loaded, for warm-up on any machine. No data is loaded: the model is made from its config, and
its packed layers have formats and no values.

transformers makes the model. `load_`'s plan says which layers are packed; headers of the files say their formats, or
the first rows where values decide. For vLLM, `_as_vllm` joins and cuts layers as vLLM's models do.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.folder import config_of_folder, model_files
from jitgemm.dtypes import REAL_TYPES
from jitgemm.moe.kernel import MAX_RANKS
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.shard_weight import Cut
from jitgemm.nn.load.plan import plan_for
from jitgemm.nn.quantize.replaceable import PACKED
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.report import by_reason
from jitgemm.nn.save.model_folder import config_of, import_transformers, naming_config
from jitgemm.nn.warm.formats import ExpertsLook, LayersOfFloats, LayersOfPlan, Look, decided_by_values, in_common
from jitgemm.nn.warm.warm import gates_of, prologues_in_vllm
from jitgemm.tensors import TYPE_NAMES
from jitgemm.weight.correction import of_parts

# vLLM's models: which Linears are one layer there, and how layers are cut, by the last part of their names.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
ROWWISE = "o_proj down_proj out_proj w2 wo dense dense_4h_to_h c_proj fc2 linear_fc2 proj".split()
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate")


def model_of(folder: str | Path) -> torch.nn.Module:
    """The model of a folder's config.json, its parameters on the meta device. ValueError if transformers makes none."""
    transformers = import_transformers()
    config_of(Path(folder))
    with naming_config(Path(folder), passes=()):
        settings, _ = transformers.PretrainedConfig.get_config_dict(folder, local_files_only=True)
        names = (getattr(transformers, name, None) for name in settings.get("architectures") or ())
        model_class = next((named for named in names if getattr(named, "config_class", None) is not None), None)
        config = (transformers.AutoConfig if model_class is None else model_class.config_class).from_pretrained(folder)
        with _without_data():
            if model_class is not None:
                return model_class(config)
            for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
                if type(config) in auto._model_mapping:
                    return auto.from_config(config)
            return transformers.AutoModel.from_config(config)


class _NoMemory(TorchFunctionMode):
    """Puts large tensors of torch.empty and torch.zeros on the meta device, as parameters are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            kwargs |= {"device": "meta" if function(*args, **kwargs | {"device": "meta"}).numel() > 1 << 16 else "cpu"}
        return function(*args, **kwargs)


@contextmanager
def _without_data() -> Iterator[None]:
    """Puts parameters that modules register on the meta device. Buffers, which nobody loads, keep their data."""
    register = torch.nn.Module.register_parameter

    def registered(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = registered  # type: ignore[assignment, method-assign]
    try:
        with torch.no_grad(), _NoMemory():
            yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The dtype that the model's config names; bfloat16 if jitgemm does not take that one."""
    config: Any = model.config
    configs = config, config.get_text_config()
    # transformers 5 warns of the older name, so it is read last, and lazily.
    stated: Iterator[Any] = (getattr(config, name, None) for name in ("dtype", "torch_dtype") for config in configs)
    return next((dtype for dtype in stated if TYPE_NAMES.get(dtype) in REAL_TYPES), torch.bfloat16)


def models_ahead(
    folder: str | Path, use: str = "linear", tp: int = 1, ep: int = 1, activation: str | None = None,
    recipe: Recipe | None = None, orders: Sequence[str] = ("any", "e4m3"), batch_invariant: bool = False,
) -> Iterator[torch.nn.Module]:  # fmt: skip
    """The model of each rank, for `kernels`: with packed layers that have no values.

    Args:
        folder: with config.json and safetensors files; a model that is quantised while it is loaded needs no files,
            and may be given by its config alone.
        use: "linear", as `load_` leaves it; "compiled", under torch.compile; "vllm".
        tp, ep: ranks that share Linears, by the model's own plan or as vLLM cuts them, and experts.
        activation: as in `load_`.
        recipe: of a model in floats; None: as `quantize_` takes it by itself, for this activation.
        orders: of codes of such a model: "any", and "e4m3" for weights that happen to have no code -8.

    Raises:
        ValueError: the model cannot be made, read or cut.
    """
    if not Path(folder).exists():
        raise ValueError(f"folder: expected a model's folder that is here, found none at {folder}")
    config, files = config_of_folder(Path(folder)), model_files(Path(folder)) if Path(folder).is_dir() else []
    if config and not files:
        raise ValueError(
            f"{folder}: expected the safetensors files of a model that is quantised already, as its config "
            f"says ({config.get('quant_method')}): their headers say which layers are, and the types of scales; found "
            "none. Without files the layers' shapes and formats have to be given instead (--shape N,K --weight NAME)"
        )
    checkpoint = Checkpoint(files) if files else None
    wanted = recipe or Recipe.of({"activation": activation})
    decided = decided_by_values(wanted, orders)
    for rank, values in product(range(max(tp, ep)), decided):
        model = model_of(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = None if checkpoint is None else plan_for(model, checkpoint, None, activation, None, ["*"], False)
        layers: LayersOfPlan | LayersOfFloats
        if plan is not None and (plan.layers or config):
            if values is not decided[0]:
                continue
            if recipe or not plan.layers:
                why = "no recipe, as its files say all that"
                why = why if plan.layers else f"layers that can be packed, found none: {by_reason(plan.skipped)}"
                raise ValueError(f"{folder}: expected {why}")
            layers = LayersOfPlan(plan)
        else:
            layers = LayersOfFloats(model, wanted, values, use == "vllm")
        cuts = _Cuts(model, use, Cut("", rank % tp, tp), Cut("", rank % ep, ep))
        made = _as_vllm(layers, cuts) if use == "vllm" else _as_loaded(layers, cuts)
        for layer in made.modules():
            if isinstance(layer, PACKED):
                layer.batch_invariant = batch_invariant
            if isinstance(layer, PackedExperts) and 1 < ep <= MAX_RANKS:
                layer.split = _over_nvlink(layer, rank % ep, ep)
        yield made


def _over_nvlink(layer: PackedExperts, rank: int, world: int) -> Any:
    """The `ExpertSharding` of ranks that exchange tokens by kernels, without a process group."""
    from jitgemm.nn.layers.sharding import ExpertSharding  # half a second of torch.distributed

    return ExpertSharding(None, rank, world, layer.num_experts, exchanges=True, nvlink=True)  # type: ignore[arg-type]


class _Cuts:
    """Which part of each layer a rank has."""

    def __init__(self, model: torch.nn.Module, use: str, tp: Cut, ep: Cut):
        self.tp, self.ep, self.use = tp, ep, use
        self.division: Any = None
        config: Any = model.config
        self.kv_heads = getattr(config.get_text_config(), "num_key_value_heads", None) or tp.world
        if tp.world > 1 and use != "vllm":
            from jitgemm.nn.parallel.plan import ShardingPlan, plan_of  # half a second of torch.distributed

            self.division = ShardingPlan(None, plan_of(model))

    def dim(self, name: str) -> str | None:
        """ "n" or "k", the dimension along which a Linear is cut; None for one that no rank divides."""
        if self.use == "vllm":
            last = name.rpartition(".")[2]
            return "k" if last in ROWWISE else None if last in WHOLE else "n"
        style = None if self.division is None else self.division.style(name)
        return None if style is None else style.dim

    def linear(self, name: str) -> Cut | None:
        dim, (_, rank, world) = self.dim(name), self.tp
        if dim is None or world == 1:
            return None
        if name.endswith((".k_proj", ".v_proj")) and (heads := self.kv_heads) < world:
            if self.use != "vllm" or world % heads:
                raise ValueError(f"tp: expected ranks that divide num_key_value_heads = {heads}, got {world}")
            rank, world = rank * heads // world, heads  # as many ranks as share a head have it
        return None if world == 1 else Cut(dim, rank, world)

    def look(self, layers: LayersOfPlan | LayersOfFloats, name: str) -> Look | ExpertsLook:
        """A rank's part of a layer."""
        if (layout := layers.experts.get(name)) is None:
            return layers.look(name, self.linear(name))
        _, rank, world = self.ep
        if layout.experts % world:
            raise ValueError(f"ep: expected ranks that {layout.experts} experts divide among, got {world}")
        mine = range(rank * layout.experts // world, (rank + 1) * layout.experts // world)
        along_inter = self.use == "vllm" and world == 1 < self.tp.world
        cuts = [self.tp._replace(dim=dim) if along_inter else None for dim in "nk"]
        w13, w2 = (layers.part(name, part, mine, cut) for part, cut in enumerate(cuts))
        return ExpertsLook(w13, w2, len(mine), layout.gate, layout.top_k)


def _as_loaded(layers: LayersOfPlan | LayersOfFloats, cuts: _Cuts) -> torch.nn.Module:
    """The model with its layers in their places. Layers that look the same share a module."""
    made: dict[Hashable, torch.nn.Module] = {}
    for name, places in layers.places.items():
        key = _pattern(name), cuts.look(layers, name)
        layer = made[key] = made[key] if key in made else key[1].module()
        for place in places:
            parent, _, child = place.rpartition(".")
            layers.model.get_submodule(parent)._modules[child] = layer
    return layers.model


def _as_vllm(layers: LayersOfPlan | LayersOfFloats, cuts: _Cuts) -> torch.nn.Module:
    """The layers that vLLM makes of the model, joined as vLLM joins them. Of layers that look the same there is one."""
    made: dict[tuple[str, Look | ExpertsLook], torch.nn.Module] = {}
    gates = gates_of(layers.model.config)
    done: set[str] = set()
    for name in layers.places:
        above, dot, last = name.rpartition(".")
        joined, parts = next((row for row in JOINED.items() if last in row[1]), ("", ()))
        names = [above + dot + part for part in parts]
        if not names or not all(part in layers.places for part in names):
            joined, names = last, [name]
        if name in done or name == layers.head:  # which vLLM's own method serves
            continue
        done |= {*names}
        dim, key = cuts.dim(name), _pattern(above + dot + joined)
        try:
            look, *others = [cuts.look(layers, part) for part in names]
            if isinstance(look, Look):
                static = look.static and last != "kv_b_proj"  # whose weight MLA reads
                looks = [look, *(other for other in others if isinstance(other, Look))]
                n, format = sum(x.n for x in looks), in_common(of_parts([x.format for x in looks]))
                size = format.group_size or look.group_size
                look = replace(look, n=n, format=format, group_size=size, static=static)
            layer: Any = look.module()
            if isinstance(look, Look):
                layer.prologues = prologues_in_vllm(dim, gates)
        except ValueError as error:
            warnings.warn(f"{key} is left to vLLM's own kernels: {error}", stacklevel=2)
            continue
        made.setdefault((key, look), layer)
    model = torch.nn.Module()
    model.config = layers.model.config
    for number, ((key, _), layer) in enumerate(made.items()):
        model.add_module(f"{key.replace('.', '/')}#{number}", layer)
    return model


def _pattern(name: str) -> str:
    """The layer's name with * for the numbers of blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
