"""One weight of an engine's layer: collects its tensors as the files have them, and packs them once all are there.

The engine's models hand each tensor to its parameter's loader, which keeps it in the host's memory. The engine's own
loader cuts the row numbers, which says which rows a rank has. Then the checkpoint's reader reads the kept tensors,
`CanonicalWeight` cuts, joins and packs them, and they are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, concat
from jitgemm.checkpoint.layouts import FLOATS
from jitgemm.kernel.formats import ceil_div
from jitgemm.nn.layers.packed import LHS_DTYPES, Parts
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.tensors import dtype_name
from jitgemm.weight.codes import CODE_OPS

CHILD = "jitgemm"
"""What a layer calls the module of its packed weights."""
CPU = torch.device("cpu")
MISSING = -1
_LOADED = (*FLOATS, torch.float64)
"""Of weights that are quantised when they are loaded."""
LOCK = RLock()  # SGLang loads in threads


class Collected:
    """The weight of a linear: of one layer, or of several one below the other.

    Attributes:
        method, names: its `Packing`, and the files' layers.
        widths: this rank's rows of each of the joined layers.
        k, whole, rank: columns of this rank, those of all, and which of the ranks that share them it is.
        kept: {which of the joined layers: the tensors of a file's layer}; a number, several numbers, or None for all.
        numbers: {the same: what `row_numbers` gives}.
    """

    start = ""
    """What stands in front of the parameters' names."""
    of_attention = False
    """Whether its loaders call the joined layers q, k and v."""

    def __init__(self, method: Any, widths: Sequence[int], k: int, whole: int, rank: int = 0):
        self.method, self.config, self.stored, self.names = method, method.config, method.stored, method.names
        self.widths, self.k, self.whole, self.rank = list(widths), k, whole, rank
        self.device, self.dtype = CPU, torch.bfloat16
        self.forget()

    # ---- parameters and loaders --------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, str]:
        """{suffix: name of the layer's parameter}."""
        return {suffix: self.start + suffix for suffix in self.stored.suffixes}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of parameters: a number for each tensor of that name in the files. vLLM counts those written."""
        return (len(self.widths),)

    def create(self, layer: torch.nn.Module, dtype: torch.dtype, attributes: Mapping[str, Any]) -> None:
        """Registers the layer's parameters. They hold no weights, only which tensors were loaded.

        Args:
            dtype: of weights that are quantised when they are loaded.
            attributes: what the engine wants parameters to have, its "weight_loader" among that.
        """
        self.dtype, self.cut = dtype, attributes["weight_loader"]
        self.forget()
        for suffix, name in self.parameters.items():
            parameter = self.config.parameter_classes.BasevLLMParameter
            made = parameter(data=torch.empty(self.shape, dtype=torch.uint8), weight_loader=self.loader(layer, suffix))
            for attribute, value in self.stored.axes(suffix).items():
                setattr(made, attribute, value)
            layer.register_parameter(name, made)
            self.device = made.device

    def loader(self, layer: torch.nn.Module, suffix: str) -> Callable[..., Any]:
        """The parameter's weight_loader: it keeps a file's tensor, and packs the layer with the last one."""

        def keep(param: Any, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> None:
            key = self.key(*shard, **shards)
            mark(param, ... if key is None else list(key) if isinstance(key, tuple) else key)
            if param.is_meta or self.method.complete:
                return
            tensor = self.taken(suffix, loaded_weight, CHILD in layer._modules)
            with LOCK:
                self.hold(key, suffix, tensor)
                if key not in self.numbers and (n := self.rows_in_file(key)) is not None:
                    self.numbers[key] = self.row_numbers(param, n, *shard, **shards)
                self.method.pack_if_complete(layer)

        keep.keeps = True  # type: ignore[attr-defined]
        return keep

    def hold(self, key: Any, suffix: str, tensor: torch.Tensor) -> None:
        tensors = self.kept.setdefault(key, {})
        self.come += suffix not in tensors
        tensors[suffix] = tensor

    def key(self, *shard: Any, **shards: Any) -> Any:
        """Which of the joined layers a loader is called for: one number, several, or None for all; q, k, v: 0, 1, 2."""
        part: Any = next(iter((*shard, *shards.values())), None)
        self.of_attention |= part in ("q", "k", "v")
        return tuple(part) if isinstance(part, (tuple, list)) else {"q": 0, "k": 1, "v": 2}.get(part, part)

    def taken(self, suffix: str, tensor: torch.Tensor, again: bool) -> torch.Tensor:
        """The loaded tensor on the CPU; copied if the engine or a trainer may fill its memory again. Raises ValueError
        for codes if floats are expected."""
        if self.stored.floats and tensor.dtype not in _LOADED:
            wanted = f"expected {', '.join(map(dtype_name, _LOADED))}, got {dtype_name(tensor.dtype)}"
            raise ValueError(f"{suffix}: {wanted} (layer {self.names[0]})")
        return tensor.detach().to(CPU, copy=self.method.copies or again)

    def rows_in_file(self, key: Any) -> int | None:
        """Rows of a layer in the file; None as long as the tensors kept so far do not tell."""
        name, tensors = self.name(key), self.kept[key]
        if self.stored.floats:
            return len(tensors["weight"])
        if name in self.stored.sources:
            return self.stored.sources[name].n
        try:
            return self.config.source(name, tensors, self.method.option, self.whole).n
        except ValueError:
            return None

    def row_numbers(self, param: Any, n: int, *shard: Any, **shards: Any) -> torch.Tensor:
        """For each row of this rank its row number in the file, counted from 1; 0 for rows that the file lacks."""
        numbers = torch.zeros((sum(self.widths), 1), dtype=torch.int32, device=CPU)
        rows: Any = self.config.parameter_classes.ChannelQuantScaleParameter(
            data=numbers, weight_loader=self.cut, output_dim=0
        )
        for name in {"tp_rank", "tp_size"} & vars(param).keys():  # which vLLM sets where ranks have the same
            setattr(rows, name, getattr(param, name))
        self.cut(rows, torch.arange(1, n + 1, dtype=torch.int32, device=CPU)[:, None], *shard, **shards)
        return rows.data.flatten().long()

    def name(self, key: Any) -> str:
        """What the files call a layer."""
        return self.names[key] if isinstance(key, int) and len(self.names) == len(self.widths) else self.names[0]

    # ---- what was kept -----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        self.come = 0  # tensors
        self.kept: dict[Any, dict[str, torch.Tensor]] = {}
        self.numbers: dict[Any, torch.Tensor] = {}

    def present(self, layer: torch.nn.Module) -> bool:
        """True if the layer still has its parameters, so that it is yet to be loaded."""
        return all(layer._parameters.get(name) is not None for name in self.parameters.values())

    @property
    def loaded(self) -> bool:
        """True if any tensor was loaded."""
        return bool(self.kept)

    def drop(self, layer: torch.nn.Module) -> None:
        """Takes the layer's parameters away."""
        for name in self.parameters.values():
            layer._parameters.pop(name, None)

    def expected(self, layer: torch.nn.Module) -> int | None:
        """How many tensors of the layer the files hold; None if no header is known."""
        return len(self.widths) if self.stored.floats else self.config.count(self.names)

    def rows_of(self, key: Any) -> list[int]:
        """The joined layers, by number, that a key of `kept` stands for."""
        return [*range(len(self.widths))] if key is None else [key] if isinstance(key, int) else [*key]

    def in_order(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """(key of `kept`, its row numbers) for each joined layer in order; of a layer of zeros MISSING and zeros.

        Raises:
            ValueError: the files lack a layer other than k and v that share caches, or a draft's output layer.
        """
        owner = {part: key for key in self.kept for part in self.rows_of(key)}
        missing = [part for part in range(len(self.widths)) if part not in owner]
        names = ", ".join(map(self.name, missing))
        may_lack = (missing == [1, 2] and self.of_attention) or (self.method.may_lack and self.stored.floats)
        if missing and not may_lack:
            known = self.stored.suffixes if self.stored.floats or self.stored.sources else ("weights",)
            lacks = ", ".join(next(iter(self.kept.values()), known))
            raise ValueError(f"{lacks}: expected numbers, found none in the files (layer {names})")
        if missing:
            self.config.logger.warning_once("jitgemm: no file holds %s: zeros", names)
        starts = [sum(self.widths[:part]) for part in range(len(self.widths) + 1)]
        for part, width in enumerate(self.widths):
            if part in missing:
                yield MISSING, torch.zeros(width, dtype=torch.int64, device=CPU)
            elif self.rows_of(key := owner[part])[0] == part:
                yield key, torch.cat([self.numbers[key][starts[i] : starts[i + 1]] for i in self.rows_of(key)])

    def sources(self) -> dict[Any, LayerSource]:
        """The reader of each kept layer, by key. Raises ValueError, naming the layer, if one cannot be read."""
        sources: dict[Any, LayerSource] = {}
        wrong: dict[Any, ValueError] = {}
        for key, tensors in self.kept.items():
            try:
                source = self.config.source(name := self.name(key), tensors, self.method.option, self.whole)
                if source.k not in (None, self.whole):
                    raise ValueError(f"{name}: expected {self.whole} columns, as the model has, got {source.k}")
                sources[key] = source
            except ValueError as error:
                wrong[key] = error
        for key, tensors in self.kept.items():
            name = self.name(key)
            like = self.stored.sources.get(name) or (next(iter(sources.values()), None) if key in wrong else None)
            if lacks := [] if like is None else needed(like, tensors):
                raise ValueError(f"{', '.join(lacks)}: expected numbers, found none in the files (layer {name})")
            if key in wrong:
                raise wrong[key]
        return sources

    # ---- the packed weight -------------------------------------------------------------------------------------------

    def parts(self, layer: torch.nn.Module) -> Parts:
        """Packs the kept tensors and frees them."""
        self.leave_meta(layer)
        try:
            if self.method.made_up and not self.kept:
                return self.made_up()
            return self.of_floats(layer) if self.stored.floats else self.of_files(layer)
        finally:
            self.forget()

    def leave_meta(self, layer: torch.nn.Module) -> None:
        """Takes the parameters' device if the layer was made on the meta device."""
        if self.device.type == "meta":
            self.device = next(getattr(layer, name).device for name in self.parameters.values())

    def of_files(self, layer: torch.nn.Module) -> Parts:
        """Packs tensors of a quantised checkpoint."""
        sources, order = self.sources(), [*self.in_order()]
        old: Any = layer._modules.get(CHILD)
        if old is not None:
            for key, tensors in self.kept.items():
                self.config.check_loaded_again(self.name(key), tensors)
        saved = any(source.header is None for source in sources.values())
        activations = {self.name(key): source.activation for key, source in sources.items()}
        activation = one_activation(activations, self.method.wanted if saved else None, self.method.option)
        read = {key: self.read(sources[key], rows) for key, rows in order if key in sources}
        corrections = [correction for _, correction in read.values()]
        correction = None if all(value is None for value in corrections) else False
        if old is not None:  # those that are loaded again go to the memory of the first, which have corrections or not
            correction = bool(old.weight.format.correction)
        scales = [weight.input_scale for weight, _ in read.values() if weight.input_scale is not None]
        weights = {key: replace(weight, input_scale=None) for key, (weight, _) in read.items()}
        weights[MISSING] = next(iter(weights.values()))
        with next(iter(sources.values())).checkpoint.errors_that_name(", ".join(self.names)):
            joined = concat([
                _without(weights[key].rows(rows.to(self.device)), rows >= 0) if key == MISSING else weights[key]
                for key, rows in order
            ])  # fmt: skip
            packed = joined.pack(LHS_DTYPES[activation], correction)
        return Parts(packed, None, activation, torch.cat(scales).max().reshape(1) if scales else None)

    def read(self, source: LayerSource, rows: torch.Tensor) -> tuple[CanonicalWeight, bool | None]:
        """(this rank's part of a layer in the file, `correction` as `CanonicalWeight.pack` takes it)."""
        columns = self.rank * self.k, (self.rank + 1) * self.k
        correction, cut = source.correction, None
        if source.header is None:
            parts = source.read(self.device)
            weight = replace(unpacked(parts.weight), input_scale=parts.input_scale)
            correction = None if parts.weight.format.correction else False
            weight = weight if self.k == self.whole else weight.columns(*columns)
        elif self.k != self.whole:
            weight = source.canonical(self.device, ("k", self.rank, self.whole // self.k))
        else:
            cut = _run(rows, source.n)
            weight = source.canonical(self.device, cut)
        if cut is None and not torch.equal(rows, torch.arange(1, weight.n + 1, device=CPU)):
            weight = weight.rows((rows - 1).clamp(min=0).to(self.device))
            weight = _without(weight, rows == 0) if bool((rows == 0).any()) else weight
        return weight, correction

    def of_floats(self, layer: torch.nn.Module) -> Parts:
        """Quantises weights in floats by the user's options."""
        tied = layer._parameters.get("weight")
        if tied is not None and not hasattr(getattr(tied, "weight_loader", None), "keeps"):  # with an embedding
            weight = tied.data
        else:
            weight = torch.zeros((sum(self.widths), self.k), dtype=self.dtype, device=self.device)
            start, columns = 0, slice(self.rank * self.k, (self.rank + 1) * self.k)
            for key, rows in self.in_order():
                floats = self.kept.get(key, {}).get("weight")
                if floats is not None:
                    held = rows > 0
                    mine = floats[:, columns][rows[held] - 1].to(self.device, self.dtype)
                    weight[start : start + len(rows)][held.to(self.device)] = mine
                start += len(rows)
        return Parts(self.method.recipe.apply(weight), None, self.method.recipe.inputs, None)

    def made_up(self) -> Parts:
        """Random weights for --load-format dummy, in the format that the files' headers say."""
        source = next((stored for stored in self.stored.sources.values() if stored.header is not None), None)
        if source is None:
            return self.random(sum(self.widths), self.k)
        weight = arbitrary(source, sum(self.widths), self.k, self.device)
        return Parts(weight.pack(source.lhs_dtype), None, source.activation, None)

    def random(self, *sizes: int) -> Parts:
        """Random weights quantised by the user's options: for a model in floats, or if no header tells the format."""
        if not self.stored.floats:
            text = (
                "jitgemm: no header tells the form of weights that are made up: they are quantised as those in floats"
            )
            self.config.logger.warning_once(text)
        weight = torch.randn(sizes, dtype=self.dtype, device=self.device) / 64
        return Parts(self.method.recipe.apply(weight), None, self.method.recipe.inputs, None)


def needed(like: LayerSource, found: Container[str], unread: Iterable[str] = ()) -> list[str]:
    """Suffixes that the reader needs of a layer like this one and `found` lacks; unread: what it does not read."""
    may_lack = {"bias", *unread}
    if like.header is not None:
        scheme = like.header.scheme
        for suffix, tensor_layout in like.header.format.tensors(scheme).items():
            in_order = isinstance(tensor_layout.optional, str) and not scheme.ordered
            if in_order or (tensor_layout.optional is True and suffix not in scheme.static):
                may_lack.add(suffix)
    return [suffix for suffix in like.names if suffix not in found and suffix not in may_lack]


def mark(param: torch.Tensor, where: Any) -> None:
    """Sets the parameter's element that says: this tensor was loaded."""
    marks = param.data[where]
    marks.copy_(torch.ones_like(marks))


def one_activation(found: Mapping[str, str], wanted: str | None, option: str) -> str:
    """The activation of these layers. Raises ValueError for several, and for another than the user wants."""
    (first, activation), *_ = found.items()
    for name, its in found.items():
        if its != activation or wanted not in (None, activation):
            raise ValueError(
                f"{option}: expected {its}, as {name} was saved, got {wanted or activation}, as "
                f"{'the options say' if wanted else first + ' was'}"
            )
    return activation


def arbitrary(source: LayerSource, n: int, k: int, device: torch.device) -> CanonicalWeight:
    """A weight of random values in the format of a file's layer."""
    assert source.header is not None
    scheme, size = source.header.scheme, min(source.group_size or k, k)
    ops, zeros = CODE_OPS[scheme.code], scheme.zero_points and not scheme.eight_bits
    code_type, groups = ops.given(zeros), (n, ceil_div(k, size))
    low, high = (0, 16) if code_type == torch.uint8 else (-8, 8)
    scale = torch.full(groups, 2.0**-6, device=device)
    return CanonicalWeight(
        torch.randint(low, high, (n, k), device=device).to(code_type),
        scale.bfloat16() if ops.given_scales is None else scale.to(ops.given_scales).view(torch.uint8),
        torch.full(groups, 8, dtype=torch.uint8, device=device) if zeros else None,
        group_size=size, code=scheme.code,
        row_scale=torch.ones(n, device=device) if ops.needs_row_scale else None, rotation=source.rotation,
    )  # fmt: skip


def _run(rows: torch.Tensor, n: int) -> tuple[str, int, int] | None:
    """("n", part, parts) for `CanonicalWeight.shard` if the rows are one of equal parts of n; else None."""
    width, first = len(rows), int(rows[0]) - 1
    equal_parts = width % 8 == 0 and n % width == 0 and first % width == 0
    return (
        ("n", first // width, n // width)
        if equal_parts and torch.equal(rows, rows[0] + torch.arange(width, device=CPU))
        else None
    )


def _without(weight: CanonicalWeight, none: torch.Tensor) -> CanonicalWeight:
    """The weight with zeros in the rows of `none`."""
    none = none.to(weight.q.device)
    if weight.ops.given_scales is not None:  # bytes of numbers that are not zero
        return replace(weight, q=weight.q.masked_fill(none[:, None], 0))
    rows = None if weight.row_scale is None else weight.row_scale.masked_fill(none, 0)
    return replace(weight, row_scale=rows, **weight.parameters(lambda values: values.masked_fill(none[:, None], 0)))
