"""A model as it will be loaded, for warm-up on any machine: made from its config without data, its packed layers without
values, in the formats that the headers of its files say, and the first rows where values decide.

What the model is, transformers says; what becomes of its layers, `load_`'s plan. Where neither transformers nor
`torch.distributed` runs the model but vLLM, `_as_vllm` joins and cuts layers as vLLM's models do.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jitgemm.checkpoint.canonical import CanonicalWeight, concat
from jitgemm.checkpoint.files import Checkpoint, config_beside
from jitgemm.checkpoint.reader import errors_that_name, read_header
from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.formats import WeightFormat
from jitgemm.nn.quantize.choose import PACKED, Replaceable
from jitgemm.nn.layers.shard_weight import Cut, part_of_weight
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.fuse.fuse import fuse_
from jitgemm.nn.layers.linear import LINEARS, PackedLinear, empty_weight
from jitgemm.nn.load.load import planned
from jitgemm.nn.load.plan import Plan
from jitgemm.nn.quantize.quantize import choose, quantised
from jitgemm.nn.load.read import CODES, Layer, packed_parts, read
from jitgemm.nn.load.read_experts import Experts
from jitgemm.nn.report import by_reason
from jitgemm.nn.fuse.trial import lists
from jitgemm.nn.warm.warm import block_of, fronts_in_vllm, gates_of
from jitgemm.tensors import TYPE_NAMES
from jitgemm.weight.packed import Weight

ROWS = 128
"""Rows of a layer that are read to see its format: whole blocks with one scale, and words of packed codes."""
_CPU = torch.device("cpu")

# vLLM's models: which Linears are one layer there, and how layers are cut, by the last part of their names.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
ROWWISE = "o_proj down_proj out_proj w2 wo dense dense_4h_to_h c_proj fc2 linear_fc2 proj".split()
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Look:
    """A layer but for its values.

    Attributes:
        bias: its type, or None.
        static, order: number of its input scale, and of its permutation, among those of its block; None without.
    """

    n: int
    k: int
    group_size: int
    format: WeightFormat
    activation: str
    bias: torch.dtype | None = None
    static: int | None = None
    order: int | None = None

    def linear(self) -> PackedLinear:
        weight = empty_weight(self.k, self.n, self.group_size, self.format, self.order is not None)
        if self.order:
            weight.permutation.copy_(weight.permutation.roll(self.order))
        bias = None if self.bias is None else torch.zeros(self.n, dtype=self.bias)
        scale = None if self.static is None else torch.tensor([1.0 + self.static])
        return LINEARS[self.format.bits](weight, bias, activation=self.activation, input_scale=scale)


# ---- the model -------------------------------------------------------------------------------------------------------


def model_of(folder: str | Path) -> torch.nn.Module:
    """The model of a folder's config.json, its parameters on the meta device. ValueError where transformers makes none."""
    try:
        import transformers

        said, _ = transformers.PretrainedConfig.get_config_dict(folder, local_files_only=True)
        names = (getattr(transformers, name, None) for name in said.get("architectures") or ())
        kind = next((each for each in names if getattr(each, "config_class", None) is not None), None)
        config = (transformers.AutoConfig if kind is None else kind.config_class).from_pretrained(folder)
        with _without_data():
            if kind is not None:
                return kind(config)
            for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
                if type(config) in auto._model_mapping:
                    return auto.from_config(config)
            return transformers.AutoModel.from_config(config)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: expected a model that transformers can make, got: {error}") from error


class _NoMemory(TorchFunctionMode):
    """Tensors that are made empty, or of zeros, take no memory where they are large, as parameters are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            kwargs |= {"device": "meta" if function(*args, **kwargs | {"device": "meta"}).numel() > 1 << 16 else "cpu"}
        return function(*args, **kwargs)


@contextmanager
def _without_data() -> Iterator[None]:
    """Parameters that modules register are on the meta device; buffers, which nobody loads, have their data."""
    register = torch.nn.Module.register_parameter

    def registered(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        with torch.no_grad(), _NoMemory():
            yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The type that a model's config says it runs in; bfloat16 where that is none of ours."""
    configs = model.config, model.config.get_text_config()
    found = [getattr(config, name, None) for config in configs for name in ("dtype", "torch_dtype")]
    return next((dtype for dtype in found if TYPE_NAMES.get(dtype) in REAL_TYPES), torch.bfloat16)


# ---- its layers ------------------------------------------------------------------------------------------------------


class _OfPlan:
    """A model's layers as `load_` plans them, but for their values; sizes and formats are those of a rank's cut.

    Attributes:
        places, forms: as `Replaceable` has them, of the packed layers.
        head: the name of the output embedding.
    """

    def __init__(self, plan: Plan):
        self.model, self.plan, self.checkpoint, self.head = plan.model, plan, plan.checkpoint, plan.replaceable.head
        self.places = {name: plan.replaceable.places[name] for name in plan.layers}
        self.forms = {name: layer.form for name, layer in plan.layers.items() if isinstance(layer, Experts)}
        self._seen: dict[tuple[str, str], dict[Any, int]] = {}

    def look(self, name: str, cut: Cut | None) -> Look:
        layer: Any = self.plan.layers[name]
        static: torch.Tensor | None
        with errors_that_name(self.checkpoint, layer.prefix):
            if layer.header is None:
                parts = packed_parts(self.checkpoint, layer.names) if cut is None else None
                weight = (parts or read(self.checkpoint, layer, _CPU, cut)).weight
                format = weight.format
                held = (layer.names.get(suffix) for suffix in ("input_scale", "permutation"))
                static, order = (each and self.checkpoint.read(each, _CPU) for each in held)
            else:
                format, weight, canonical = self._packed([[(layer, None)]], cut)
                static, order = canonical.input_scale if layer.static else None, canonical.permutation
        bias = self.checkpoint.info(layer.names["bias"]).dtype if "bias" in layer.names else None
        return Look(
            layer.n // (cut.world if cut is not None and cut.dim == "n" else 1),
            weight.k,
            weight.group_size,
            format,
            layer.activation,
            torch.float32 if bias == torch.float16 else bias,
            self._number(name, "static", static),
            self._number(name, "order", order),
        )

    def part(self, name: str, part: int, which: range, cut: Cut | None) -> Look:
        """w13 or w2 of some experts."""
        experts: Any = self.plan.layers[name]
        n, k = experts.form.sizes[part]
        with errors_that_name(self.checkpoint, experts.prefix):
            if experts.projections is None:
                names = self.checkpoint.layer(f"{experts.prefix}.{('w13', 'w2')[part]}")
                weight = packed_parts(self.checkpoint, names).weight
                format, k = weight.format, k // (cut.world if cut is not None and part else 1)
            else:
                projection = experts.projections[part]
                each = [
                    [(x, e if projection.stacked else None) for x in projection.layers[e * (not projection.stacked)]]
                    for e in which
                ]
                format, weight, _ = self._packed(each, cut)
                k = weight.k
        n //= cut.world if cut is not None and not part else 1
        return Look(n, k, min(weight.group_size, k), format, experts.activation)

    def _packed(
        self, layers: Iterable[Sequence[tuple[Layer, int | None]]], cut: Cut | None
    ) -> tuple[WeightFormat, Weight, CanonicalWeight]:
        """Layers, of parts that are joined, in the format of all: by the first rows of one, or by all where none tells."""
        for whole in (False, True):
            formats: list[WeightFormat] = []
            for parts in layers:
                joined = concat([self._rows(layer, expert, cut, whole) for layer, expert in parts])
                weight = joined.pack(CODES[parts[0][0].activation])
                if not whole and all(self._tells(layer, weight.format) for layer, _ in parts):
                    return weight.format, weight, joined
                formats.append(weight.format)
        return in_common(formats), weight, joined

    def _rows(self, layer: Layer, expert: int | None, cut: Cut | None, whole: bool) -> CanonicalWeight:
        """A layer, or its first rows, as a rank has them. Experts that stand in one tensor have gate above up there."""
        by_rows = cut is not None and cut.dim == "n"
        if whole and by_rows and expert is not None:
            weight = read_header(self.checkpoint, layer.header, _CPU, expert)
            return concat([weight.shard("n", half, 2).shard(*cut) for half in (0, 1)])
        size = layer.n // (cut.world * (1 if expert is None else 2)) if by_rows else layer.n
        rows = ROWS if size % ROWS == 0 else size
        if whole or not size or layer.n % rows or (by_rows and layer.n % cut.world):
            return read_header(self.checkpoint, layer.header, _CPU, expert, cut)
        part = "n", cut.rank * size // rows if by_rows else 0, layer.n // rows
        weight = read_header(self.checkpoint, layer.header, _CPU, expert, part)
        return weight if cut is None or by_rows else weight.shard(*cut)

    def _tells(self, layer: Layer, format: WeightFormat) -> bool:
        """Whether a format of some rows is that of all: a later code may be -8, a later zero point another than 8."""
        if not format.complete:
            return False
        headers = {suffix: self.checkpoint.info(name) for suffix, name in layer.names.items()}
        if format.strip_scales and any("scale" in suffix and layer.n in each.shape for suffix, each in headers.items()):
            return False
        zeros = [each.dtype for suffix, each in headers.items() if "zero" in suffix]
        integers = format.zero_point and not any(dtype.is_floating_point for dtype in zeros)
        return not zeros or not layer.header.scheme.zero_points or format.offset or integers

    def _number(self, name: str, what: str, value: torch.Tensor | None) -> int | None:
        """Which of the values this is that the layers of a block have; None for none."""
        if value is None:
            return None
        seen = self._seen.setdefault((block_of(name), what), {})
        return seen.setdefault(tuple(value.flatten().tolist()), len(seen))


class _OfFloats:
    """The same as `quantize_` makes them; order: of codes that may be e4m3's own, which values decide."""

    head = None

    def __init__(self, model: torch.nn.Module, bits: int, order: str, options: Mapping[str, Any]):
        self.model, self.bits, self.order, self.options = model, bits, order, options
        found = Replaceable(model)
        self.places, _ = choose(model, found, None)
        self.forms = {name: found.forms[name] for name in self.places if name in found.forms}

    def look(self, name: str, cut: Cut | None) -> Look:
        linear: Any = self.model.get_submodule(name)
        return self._look(linear.out_features, linear.in_features, cut, None if linear.bias is None else torch.float32)

    def part(self, name: str, part: int, which: range, cut: Cut | None) -> Look:
        return self._look(*self.forms[name].sizes[part], cut, None)

    def _look(self, n: int, k: int, cut: Cut | None, bias: torch.dtype | None) -> Look:
        fast = {"clip_steps": 0} if self.bits == 4 else {}
        few = quantised(torch.nn.Linear(k, 8, bias=False), None, self.bits, **fast, **self.options)
        weight, lhs = few.weight, CODES[few.activation]
        if cut is not None and cut.dim == "k":
            weight = part_of_weight(weight, *cut, lhs)
        elif cut is not None:
            n //= cut.world
        open = self.bits == 4 and not weight.format.zero_point and lhs is torch.float8_e4m3fn
        format = replace(weight.format, order=self.order) if open else weight.format
        return Look(n, weight.k, weight.group_size, format, few.activation, bias)


def experts_of(layers: Any, name: str, which: range, cut: Cut | None) -> PackedExperts:
    """Some experts; cut: of their intermediate size."""
    cuts = [None if cut is None else cut._replace(dim=dim) for dim in "nk"]
    looks = [layers.part(name, part, which, along) for part, along in enumerate(cuts)]
    weights = [empty_weight(x.k, x.n, x.group_size, x.format, experts=len(which)) for x in looks]
    form = layers.forms[name]
    return packed_experts(*weights, gate=form.gate, activation=looks[0].activation, top_k=form.top_k)


def in_common(formats: Sequence[WeightFormat]) -> WeightFormat:
    """The format of one weight that holds all of these."""
    first = formats[0]
    zero_point, orders = any(each.zero_point for each in formats), {each.order for each in formats}
    order = first.order if len(orders) == 1 and not zero_point else first.common.order
    strips = all(each.strip_scales for each in formats)
    return replace(first, zero_point=zero_point, order=order, strip_scales=strips)


# ---- the model with them ---------------------------------------------------------------------------------------------


def models_ahead(
    folder: str | Path,
    use: str = "linear",
    tp: int = 1,
    ep: int = 1,
    activation: str | None = None,
    quantise: Mapping[str, Any] | None = None,
    orders: Sequence[str] = ("any", "e4m3"),
    batch_invariant: bool = False,
) -> Iterator[torch.nn.Module]:
    """The model of each rank, for `kernels`: with packed layers that have no values.

    Args:
        folder: with config.json and safetensors files; a model that is quantised while it is loaded needs no files,
            and may be given by its config alone.
        use: "linear", as `load_` leaves it; "fused", after `fuse_`; "compiled", under torch.compile; "vllm".
        tp, ep: ranks that share Linears, by the model's own plan or as vLLM cuts them, and experts.
        activation: as in `load_`.
        quantise: of a model in floats, bits and options as `quantize_` takes them.
        orders: of codes of such a model: "any", and "e4m3" for weights that happen to have no code -8.

    Raises:
        ValueError: the model cannot be made, read or cut.
    """
    if not Path(folder).exists():
        raise ValueError(f"folder: expected a model's folder that is here, found none at {folder}")
    said, files = config_beside(Path(folder)), any(Path(folder).glob("*.safetensors"))
    if said and not files:
        raise ValueError(
            f"{folder}: expected the safetensors files of a model that is quantised already, as its config "
            f"says ({said.get('quant_method')}): their headers say which layers are, and the types of scales; found "
            "none. Without files the layers' shapes and formats have to be given instead (--shape N,K --scale-dtype ...)"
        )
    checkpoint = Checkpoint(str(folder)) if files else None
    given = dict(quantise or {}) | {"activation": activation or "e4m3"}
    bits = given.pop("bits", 4)
    for rank, order in product(range(max(tp, ep)), orders):
        model = model_of(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = None if checkpoint is None else planned(model, checkpoint, None, activation, None, ["*"], False)
        read = plan is not None and (plan.layers or said)
        if read and order != orders[0]:
            continue
        if read and (quantise or not plan.layers):
            why = "no bits, group size, zero points, scale type and codes, as its files say all that"
            why = why if plan.layers else f"layers that can be packed, found none: {by_reason(plan.skipped)}"
            raise ValueError(f"{folder}: expected {why}")
        layers: Any = _OfPlan(plan) if read else _OfFloats(model, bits, order, given)
        cuts = _Cuts(model, use, Cut("", rank % tp, tp), Cut("", rank % ep, ep))
        made = _as_vllm(layers, cuts) if use == "vllm" else _as_loaded(layers, cuts, use)
        for layer in filter(lambda each: isinstance(each, PACKED), made.modules()):
            layer.batch_invariant = batch_invariant
        yield made


class _Cuts:
    """Which part of each layer a rank has."""

    def __init__(self, model: torch.nn.Module, use: str, tp: Cut, ep: Cut):
        self.tp, self.ep, self.use = tp, ep, use
        self.division: Any = None
        self.kv_heads = getattr(model.config.get_text_config(), "num_key_value_heads", None) or tp.world
        if tp.world > 1 and use != "vllm":
            from jitgemm.nn.parallel.plan import ShardingPlan, plan_of  # half a second of torch.distributed

            self.division = ShardingPlan(None, plan_of(model))

    def dim(self, name: str) -> str | None:
        """Along what a Linear is cut."""
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

    def experts(self, count: int) -> tuple[range, Cut | None]:
        """Which experts, and along what they are cut."""
        _, rank, world = self.ep
        if count % world:
            raise ValueError(f"ep: expected ranks that {count} experts divide among, got {world}")
        mine = range(rank * count // world, (rank + 1) * count // world)
        return mine, self.tp if self.use == "vllm" and world == 1 < self.tp.world else None


def _as_loaded(layers: Any, cuts: _Cuts, use: str) -> torch.nn.Module:
    """The model with its layers in their places; blocks of one kind are one module."""
    made: dict[Hashable, torch.nn.Module] = {}
    for name, places in layers.places.items():
        if name in layers.forms:
            experts = experts_of(layers, name, *cuts.experts(layers.forms[name].experts))
            kind = [(part.weight.shape, part.weight.format) for part in (experts.w13, experts.w2)]
            key: Hashable = (_pattern(name), *kind, experts.gate, experts.activation, experts.top_k)
            layer = made.setdefault(key, experts)
        else:
            look = layers.look(name, cuts.linear(name))
            key = _pattern(name), look
            layer = made[key] = made[key] if key in made else look.linear()
        for place in places:
            parent, _, child = place.rpartition(".")
            layers.model.get_submodule(parent)._modules[child] = layer
    for module in list(layers.model.modules()):
        seen: dict[Hashable, torch.nn.Module] = {}
        for number, block in module._modules.items() if isinstance(module, torch.nn.ModuleList) else ():
            inside = ((name, type(m), id(m) if isinstance(m, PACKED) else 0) for name, m in block.named_modules())
            module._modules[number] = seen.setdefault(tuple(inside), block)
    if use == "fused":
        _fill_blocks(layers.model)
        fuse_(layers.model)
    return layers.model


def _fill_blocks(model: torch.nn.Module) -> None:
    """Gives what stands in blocks beside packed layers some values, as `fuse_` runs them."""
    inside = {m for _, _, _, blocks in lists(model) for block in blocks.values() for m in block.modules()}
    draw = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                new = torch.empty(old.shape, dtype=old.dtype)
                if old.dim() < 2:
                    new.fill_(1)
                elif module in inside:
                    new.normal_(0, old.shape[-1] ** -0.5, generator=draw)
                module._parameters[name] = torch.nn.Parameter(new, requires_grad=False)


def _as_vllm(layers: Any, cuts: _Cuts) -> torch.nn.Module:
    """vLLM's layers of the model, each kind once, by the names of those that it joins."""
    made: dict[Hashable, torch.nn.Module] = {}
    gates = gates_of(layers.model.config)
    done: set[str] = set()
    for name in layers.places:
        above, dot, last = name.rpartition(".")
        whole, parts = next((each for each in JOINED.items() if last in each[1]), ("", ()))
        names = [above + dot + part for part in parts]
        if not names or not all(each in layers.places for each in names):
            whole, names = last, [name]
        if name in done or name == layers.head:  # which vLLM's own method serves
            continue
        done |= {*names}
        dim, key = cuts.dim(name), _pattern(above + dot + whole)
        try:
            if name in layers.forms:
                layer: Any = experts_of(layers, name, *cuts.experts(layers.forms[name].experts))
                kind: Hashable = (layer.w13.weight.format, layer.w2.weight.format, layer.w13.weight.shape, layer.gate)
            else:
                looks = [layers.look(each, cuts.linear(each)) for each in names]
                static = None if last == "kv_b_proj" else looks[0].static  # whose weight MLA reads
                format = in_common([look.format for look in looks])
                look = replace(looks[0], n=sum(each.n for each in looks), format=format, static=static and 0)
                layer, kind = look.linear(), look
                layer.fronts = fronts_in_vllm(dim, gates)
        except ValueError as error:
            warnings.warn(f"{key} is left to vLLM's own kernels: {error}", stacklevel=2)
            continue
        made.setdefault((key, kind), layer)
    model = torch.nn.Module()
    model.config = layers.model.config
    for number, ((key, _), layer) in enumerate(made.items()):
        model.add_module(f"{key.replace('.', '/')}#{number}", layer)
    return model


def _pattern(name: str) -> str:
    """A layer's name for all blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
