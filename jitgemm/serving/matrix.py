"""A weight of one of an engine's layers: the parameters that a rank loads its tensors into, and the packed weight of them.

The engine cuts and joins the tensors (tensor parallelism, q, k and v, gate and up); `jitgemm.checkpoint` reads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.layouts import BYTES, E8M0, FLOATS, PARTS, G
from jitgemm.kernel.formats import ceil_div
from jitgemm.nn.layers.packed import Parts
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.nn.recipe import Recipe
from jitgemm.serving.layouts import BLOCK, Layout
from jitgemm.tensors import dtype_name

CHILD = "jitgemm"
"""What a layer calls the module of its packed weights."""
SHAPE = "weight_shape"
_NOT_READ = (SHAPE, "input_global_scale")
"""Of a file's layer, and of inputs of 4 bits, which have 8 here."""
Marks = frozenset[tuple[int | None, int | None]]
"""(number of the joined layer, number of the expert) that loaders have written; None stands for all."""
_ANOTHERS = ("qzeros", "s2_scales", "weight_global_scale", "weight_scale_2")
"""What a joined layer of zeros takes of another one: packed zero points, so that symmetric ones stay so, and what may not
be zero, as other scales are."""


class Matrix:
    """The weight of a linear: of one layer, or of several one below the other.

    Attributes:
        config, layout, names, option: of its `Packing`.
        widths: this rank's rows of each of the joined layers.
        k, whole: columns of this rank, and of all.
        touched: the first and one past the last column of the groups that its columns touch: it loads them whole;
            None where they are whole groups.
        own: its columns among those.
        tensors: what the parameters hold, by suffix.
        parameters: {suffix: name of the layer's parameter}.
    """

    more: tuple[str, ...] = ()  # that files must hold
    of_attention = False
    """Whether its loaders call the joined layers q, k and v."""
    rows: int | None = None
    """Of a layer in the file, for loaders that expect no more; None for loaders that take a rank's from the start."""

    def __init__(self, method: Packing, widths: Sequence[int], k: int, whole: int, rank: int = 0):
        self.config, self.layout, self.names, self.option = method.config, method.layout, method.names, method.option
        self.widths, self.k, self.whole, self.rank = widths, k, whole, rank
        size, self.touched, self.own = self.layout.scheme.group_size, None, None
        if k != whole and size and k % size:
            start, stop = rank * k // size * size, min(ceil_div((rank + 1) * k, size) * size, whole)
            self.touched, self.own, k = (start, stop), (rank * k - start, (rank + 1) * k - start), stop - start
        self.sizes = self.layout.sizes(sum(widths), k, len(widths))
        self.tensors = dict(self.layout.tensors)
        if SHAPE in self.tensors and len(widths) > 1:
            # One of each joined layer: vLLM, when it loads again, packs once it has counted all numbers, and this is what
            # comes last.
            self.tensors[SHAPE] = replace(self.tensors[SHAPE], dims=(PARTS, 2))
        self.parameters = {suffix: self.layout.called.get(suffix, suffix) for suffix in self.tensors}

    @property
    def columns(self) -> tuple[int, ...]:
        """Of this rank: those of all weights that are quantised in one way."""
        return (self.k,)

    @property
    def wanted(self) -> str | None:
        """What the user wants its input quantised to, if the weight can meet it; None: as the checkpoint says, with
        `Inputs.instead`."""
        wanted, scheme = getattr(self.config.recipe, self.option) or self.layout.instead, self.layout.scheme
        codes = scheme.code if scheme.eight_bits else ""
        return wanted if wanted is None or wanted.startswith(codes) else None

    # ---- parameters --------------------------------------------------------------------------------------------------

    def create(self, layer: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
        """Gives a layer the parameters; attributes: what the engine wants them to have, its "weight_loader" among that."""
        for suffix, name in self.parameters.items():
            layer.register_parameter(name, self.parameter(suffix, attributes))

    def parameter(self, suffix: str, attributes: Mapping[str, Any]) -> torch.nn.Parameter:
        """An empty parameter of the class that cuts and joins such a tensor."""
        tensor = self.tensors[suffix]
        axes = {"output_dim": tensor.axis("n"), "input_dim": tensor.axis("k", "G")}
        given: dict[str, Any] = {axis: dim for axis, dim in axes.items() if dim is not None}
        parameters, kind = self.config.parameter_classes, None
        if tensor.packed is not None:
            given["packed_dim"], given["packed_factor"] = tensor.packed
            kind = parameters.PackedvLLMParameter if "input_dim" in given else parameters.PackedColumnParameter
        elif len(given) == 2:
            kind = parameters.BlockQuantScaleParameter if tensor.per(0) > 1 else parameters.ModelWeightParameter
        elif given:
            kind = parameters.RowvLLMParameter if "input_dim" in given else parameters.ChannelQuantScaleParameter
        else:
            kind = parameters.PerTensorScaleParameter if PARTS in tensor.dims else parameters.BasevLLMParameter
        data = torch.empty(tensor.shape(self.sizes), dtype=tensor.dtype)
        if suffix.endswith("g_idx"):
            data.copy_(self.in_order())
        return kind(data=data, weight_loader=self.loader(suffix, attributes["weight_loader"]), **given)

    def in_order(self) -> torch.Tensor:
        """The group of each column, where columns are in the input's order."""
        return torch.arange(self.sizes["k"]) // self.sizes["group"]

    def loader(self, suffix: str, load: Callable[..., Any]) -> Callable[..., Any]:
        """The engine's loader for a parameter: it writes the rank's part, and notes it in `written`.

        Raises ValueError for scales that the parameter's type cannot hold, and for tensors that joined layers share and
        that differ.
        """
        shared = self.tensors[suffix].axis("n", "parts") is None

        @wraps(load)
        def loads(param: Any, loaded_weight: torch.Tensor, *where: Any, **named: Any) -> Any:
            marks = self.marks(loaded_weight, *where, **named)
            if param.is_meta and shared and not {part for part, _ in marks} & {0, None}:
                return True  # vLLM counts numbers, to pack the layer once it has all: shared ones count once
            loaded_weight = self.in_type(suffix, param.dtype, loaded_weight)
            result = self.load(load, suffix, param, loaded_weight, *where, **named)
            if not param.is_meta:
                param.written = written(param) | marks
            return result

        loads.notes = True  # type: ignore[attr-defined]
        return loads

    def in_type(self, suffix: str, kind: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
        """A file's tensor for a parameter of type `kind`, into which engines' loaders convert whatever they get.

        Raises ValueError for a type that the format's tensor cannot have, and scales that `kind` cannot hold.
        """
        dtypes, real = set(self.tensors[suffix].dtypes), kind in FLOATS
        if real and tensor.dtype == torch.uint8 and dtypes.issuperset(E8M0):
            tensor = tensor.view(torch.float8_e8m0fnu)
        given = tensor.dtype
        if real:
            dtypes.update(FLOATS, () if "scale" in suffix else (torch.float64,))
        if given not in dtypes.union((*BYTES, *E8M0) if kind == torch.uint8 else ()):
            wanted = " or ".join(sorted(map(dtype_name, dtypes)))
            raise ValueError(f"{suffix}: expected {wanted}, got {dtype_name(given)} (layer {self.names[0]})")
        if not real:
            return tensor.view(kind) if given.itemsize == kind.itemsize else tensor  # bytes, or integers of 8
        if "scale" in suffix and not torch.equal(tensor.to(kind).float(), tensor.float()):
            raise ValueError(f"scale: expected numbers that {kind} holds, as no header told their type, got {given}")
        return tensor

    def load(
        self, load: Callable[..., Any], suffix: str, param: Any, tensor: torch.Tensor, *where: Any, **named: Any
    ) -> Any:
        if suffix == SHAPE and PARTS in self.tensors[SHAPE].dims:
            for part, _ in self.marks(tensor, *where, **named):
                (param.data if part is None else param.data[part]).copy_(tensor)
            return None
        again = suffix.endswith("g_idx") and not param.is_meta and bool(written(param))
        before = param.data.clone() if again else None
        result = load(param, self.shares(suffix, tensor), *where, **named)
        if before is not None and not torch.equal(before, param.data):
            raise ValueError("g_idx: expected one activation order of layers that are joined, got several")
        return result

    def marks(self, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> Marks:
        """What a loader is asked to write: of linears, by the number or letter of a joined layer."""
        part = next(iter((*shard, *shards.values())), None)
        self.of_attention |= part in ("q", "k", "v")
        parts = part if isinstance(part, (tuple, list)) else [{"q": 0, "k": 1, "v": 2}.get(part, part)]
        return frozenset((part if isinstance(part, int) else None, None) for part in parts)

    def shares(self, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
        """A file's tensor, such that the part the engine takes is the rank's: a row for each of a block's, and touched columns."""
        layout = self.tensors[suffix]
        stacked = tensor.dim() - len(layout.dims)  # experts in front
        tensor = layout.by_rows(tensor)
        if self.layout.by_row and suffix == "weight_scale_inv":
            n = stacked + (layout.axis("n") or 0)
            tensor = tensor.repeat_interleave(BLOCK, n)
            tensor = tensor.narrow(n, 0, self.rows or tensor.shape[n])
        axis = layout.axis("k", "G")
        if self.touched is None or axis is None:
            return tensor
        each = self.layout.scheme.group_size if layout.dims[axis] == G else layout.per(axis)
        start, stop = self.touched[0] // each, ceil_div(self.touched[1], each)
        mine = tensor.narrow(stacked + axis, start, stop - start)
        return torch.cat([mine] * (self.whole // self.k), stacked + axis)

    # ---- what was loaded ---------------------------------------------------------------------------------------------

    def params(self, layer: torch.nn.Module) -> dict[str, Any]:
        """The layer's parameters; None for one that `take` removed."""
        return {suffix: layer._parameters.get(name) for suffix, name in self.parameters.items()}

    def take(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """What the parameters hold, which the layer no longer has."""
        params = {suffix: layer._parameters.pop(name) for suffix, name in self.parameters.items()}
        for param in params.values():
            param.written = frozenset()
        return {suffix: param.data for suffix, param in params.items()}

    def lacking(self, layer: torch.nn.Module, part: int, expert: int | None = None) -> list[str]:
        """What the reader needs of one of the joined layers, and no file holds."""
        params, either = self.params(layer), {(part, expert), (part, None), (None, expert), (None, None)}
        return [suffix for suffix in (*self.layout.needed, *self.more) if not written(params[suffix]) & either]

    def check(self, layer: torch.nn.Module) -> None:
        """Makes k and v zeros where no file holds them, as of layers that share others' caches, and of tensors that files may
        lack what the lack means.

        Raises:
            ValueError: the files lack a tensor that any other layer needs.
        """
        names = self.names if len(self.names) == len(self.widths) else self.names[:1] * len(self.widths)
        lacking = [self.lacking(layer, part) for part in range(len(names))]
        missing = [part for part, lacks in enumerate(lacking) if len(lacks) == len(self.layout.needed)]
        shared = missing == [1, 2] and self.of_attention
        for part, lacks in enumerate(lacking):
            if lacks and not (shared and part in missing):
                raise ValueError(f"{', '.join(lacks)}: expected numbers, found none in the files (layer {names[part]})")
        for suffix, param in self.params(layer).items():
            self._fill(suffix, param, missing)
        if missing:
            self.config.logger.warning_once(
                "jitgemm: no file holds %s: zeros", ", ".join(names[part] for part in missing)
            )

    def _fill(self, suffix: str, param: Any, missing: Sequence[int]) -> None:
        """Fills what was not loaded, which is of anything before where the engine loads again."""
        tensor, found = self.tensors[suffix], {part for part, _ in written(param)}
        if suffix.endswith("g_idx") and not found:
            param.data.copy_(self.in_order())
        single, axis = PARTS in tensor.dims, tensor.axis("n", "parts")
        if axis is None:
            return
        parts = param.data.split([1 if single else ceil_div(width, tensor.per(axis)) for width in self.widths], axis)
        for part, values in enumerate(parts):
            if single and found == {None}:  # one number for all
                values.copy_(parts[0])
            elif suffix == "input_scale" and part not in found:
                values.fill_(torch.nan)
            elif part in missing:
                other = next(each for i, each in enumerate(parts) if i not in missing)
                values.fill_(other.flatten()[0] if suffix in _ANOTHERS else 0)

    # ---- the packed weight -------------------------------------------------------------------------------------------

    def parts(self, layer: torch.nn.Module) -> Parts:
        """Packs what was loaded; the layer's parameters are gone."""
        tensors = self.take(layer)
        if self.layout.format is None:
            return self.quantised(tensors["weight"])
        # Weights that are loaded again go to the memory of the first, which have corrections or not.
        old = layer._modules.get(CHILD)
        correction = None if old is None else bool(old.weight.format.correction)
        device = next(iter(tensors.values())).device
        return self.source(tensors).read(device, columns=self.own, correction=correction)

    def quantised(self, weight: torch.Tensor) -> Parts:
        """A weight in floats, packed as the user's options say."""
        recipe: Recipe = self.config.recipe
        recipe = recipe.head if self.option == "lm_head" and recipe.head is not None else recipe
        whole, recipe = recipe, recipe.for_columns(*self.columns)
        if recipe is not whole:
            self.config.logger.warning_once("jitgemm: some layers are in %s", whole.why_otherwise)
        return Parts(recipe.apply(weight), None, recipe.inputs, None)

    def source(self, tensors: Mapping[str, torch.Tensor], times: int = 1) -> LayerSource:
        """What the engine loaded, as the reader takes it: one layer of all rows; times: how often it has the joined ones."""
        assert self.layout.format is not None
        found = {}
        for suffix, tensor in tensors.items():
            if suffix in _NOT_READ:
                continue
            if suffix.endswith("g_idx"):
                # A rank's columns in order begin with a later group; -1 says that they stand in order.
                tensor = tensor - tensor.min().clamp(min=0)
            elif suffix == "input_scale":
                given = tensor[~tensor.isnan()]
                if not len(given):
                    continue
                tensor = given.max().reshape(1)
            elif self.layout.tensors[suffix].dims == (PARTS,):
                rows = torch.tensor([*self.widths] * times, device=tensor.device)
                tensor = tensor.reshape(-1).repeat_interleave(rows)[:, None]
            found[f"{self.layout.name}.{suffix}"] = self.layout.tensors[suffix].by_tiles(tensor)
        checkpoint = Checkpoint(found, self.layout.read_config)
        return LayerSource.find(checkpoint, self.layout.name, self.wanted, self.layout.format.name)


class Packing:
    """What jitgemm's methods of engines' layers have in common: parameters of matrices, packed for `module` to join.

    Attributes:
        config: the model's `JitGemmConfig`.
        names: what the checkpoint calls the layers that the engine joins; the first speaks for all.
        layout: how they are stored.
        option: of the config's, which says the activation.
    """

    option = "activation"

    def __init__(self, config: Any, names: list[str], layout: Layout, *given: Any):
        super().__init__(*given)
        self.config, self.names, self.layout = config, names, layout
        self.matrices: Sequence[Any] = ()
        self.made_up = False  # by the engine (--load-format dummy), which calls no loaders
        self.uses_meta_device = layout.format is None and bool(layout.tensors)

    def create(self, layer: torch.nn.Module, dtype: torch.dtype, attributes: Mapping[str, Any]) -> None:
        """Gives a layer its parameters."""
        self.made_up = self.config.makes_weights_up
        with torch.device("meta") if self.uses_meta_device else nullcontext():
            for matrix in self.matrices:
                matrix.create(layer, attributes)
        self.config.warmer.expect(layer, dtype)
        if self.uses_meta_device:
            self.config.pack_once_read(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if any(param is None for matrix in self.matrices for param in matrix.params(layer).values()):
            return
        if self.layout.tensors:
            self.check(layer)
        module = self.module(layer, *(matrix.parts(layer) for matrix in self.matrices))
        self.config.configure(self.names[0], module, CHILD not in layer._modules)
        self.install(layer, module)

    def check(self, layer: torch.nn.Module) -> None:
        """See `Matrix.check`."""
        for matrix in self.matrices:
            if not self.made_up or any(map(written, matrix.params(layer).values())):
                matrix.check(layer)

    def install(self, layer: torch.nn.Module, module: torch.nn.Module) -> None:
        """Gives a layer its packed weights; if it has some, into the same memory, which CUDA graphs hold."""
        self.config.keep(module)
        if (old := layer._modules.get(CHILD)) is None:
            layer.add_module(CHILD, module)
        else:
            old.load_state_dict(module.state_dict())
        self.config.warmer.packed(layer, getattr(layer, CHILD))


def written(param: Any) -> Marks:
    """What the loaders have written in a parameter; all, where a model has put its own loader there."""
    replaced = not hasattr(getattr(param, "weight_loader", None), "notes")
    return frozenset({(None, None)}) if replaced else getattr(param, "written", frozenset())
