"""Tensor parallel styles of packed Linears, for `torch.distributed.tensor.parallel.parallelize_module`.

    from jitgemm.nn.parallel import ColwiseParallel, RowwiseParallel
    parallelize_module(mlp, mesh, {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()})

Every rank holds the whole layer and keeps its part. Layers other than packed Linears go to PyTorch's styles, so one
plan serves a model with both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as _Colwise
from torch.distributed.tensor.parallel import RowwiseParallel as _Rowwise
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

import jitgemm.nn.layers.dtensor  # noqa: F401 - registers what the ops do with DTensors
from jitgemm.checkpoint.canonical import PART_MULTIPLES
from jitgemm.kernel.formats import GROUP_SIZES, LHS_GROUP
from jitgemm.nn.layers.cut import Cut, part_of_bias, part_of_experts, part_of_weight
from jitgemm.nn.layers.exchange import ExpertSplit
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.fuse.fused import ADVICE, Run, Slice
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.packed import Packed
from jitgemm.nn.load.read import BLOCK, CODES, Layer
from jitgemm.nn.layers.split import Split


class _Divides(ParallelStyle):
    """Divides packed Linears; other layers go to the style of PyTorch that the class has beside it."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, PackedLinear):
            return super()._apply(module, device_mesh)  # type: ignore[safe-super]
        return _divide(module, self, device_mesh)  # type: ignore[arg-type]


class ColwiseParallel(_Divides, _Colwise):
    """Each rank computes out_features / ranks columns of the output, from the whole input.

    The rank's columns are those of the whole layer bit for bit, where the same kernel computes both: always on the CPU,
    on a GPU where the selector picks alike. The bias is divided like the rows.

    Args:
        input_layouts: layout of a plain input: None for Replicate(), or Shard(dim), which is gathered.
        output_layouts: None for Shard(-1), or Replicate(), which gathers the columns, or another.
        use_local_output: whether a plain tensor comes out; else a DTensor.

    out_features / ranks must be a multiple of 8; at multiples of 64 the packed weight is cut without packing it again.
    A DTensor as input is brought into the layout that the layer needs.
    """

    dim = "n"
    agree_scales = False


class RowwiseParallel(_Divides, _Rowwise):
    """Each rank multiplies in_features / ranks columns of the input; the ranks' results are summed.

    Every rank's part is rounded to the output's type before the sum, and so is each addition: for R ranks and bf16 the
    result is within R * 2^-8 of the sum of the parts' magnitudes. The bias is rank 0's, so that it counts once.

    Args:
        input_layouts: layout of a plain input: None for Shard(-1), or Replicate(), of which each rank takes its
            columns, or another Shard(dim), by an all-to-all.
        output_layouts: None for Replicate(), by an all-reduce; or Shard(dim), by a reduce-scatter.
        use_local_output: whether a plain tensor comes out; else a DTensor.
        agree_scales: quantise each token with the scale of its whole row, found by an all-reduce of m maxima in fp32
            before the quantiser: the codes are then those of the whole layer. Default: the scale of the rank's own
            columns, which is never larger and so codes no worse, but other codes come out. What has a static scale or
            one per 128 columns has the whole layer's codes anyway.

    in_features / ranks must be a multiple of 16; at multiples of 128 and of the group size the packed weight is cut
    without packing it again. A cut through groups, at multiples of 32, repeats their scales over smaller ones, with a
    warning. A permutation (act-order) must keep each rank's columns among themselves.
    """

    dim = "k"

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        agree_scales: bool = False,
    ):
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.agree_scales = agree_scales


class ExpertParallel(ParallelStyle):
    """Each rank holds num_experts / ranks whole experts of a `W4A8Experts` or `W8A8Experts`.

    A rank's experts sum their results of a token as the whole layer does and round them to the input's type; then the
    ranks' results are summed.

    Args:
        input_layouts: None for Replicate(): all ranks have the same tokens, each computes what its experts make of
            them, and an all-reduce sums that, rounding at each addition. Or Shard(0): every rank has tokens of its own,
            any number, which travel by `all_to_all_single` to the ranks of their experts, once each, as 8-bit codes
            with their scales, and come back in the input's type; the sum is in fp32, in the order of ranks. That waits
            for the device once a call, so no CUDA graph captures it, and no compiler traces it.
        max_tokens: of a rank in a call, with Shard(0). As many rows of each rank then go to every other one, by
            `all_gather_into_tensor`, whatever experts they choose: nothing waits for the device, and CUDA graphs
            capture it. A rank with more tokens raises ValueError, and the others wait for it. For decoding, and for
            few ranks: with R of them a token travels R - 1 times instead of once to each rank that it needs.
    """

    def __init__(self, *, input_layouts: Placement | None = None, max_tokens: int | None = None):
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.max_tokens = max_tokens

    def split_of(self, name: str, experts: int, mesh: DeviceMesh) -> ExpertSplit:
        """What this rank has of so many experts. Raises ValueError for ranks or arguments that cannot be."""
        if self.input_layouts not in (Replicate(), Shard(0)):
            raise ValueError(f"input_layouts: expected Replicate() or Shard(0), got {self.input_layouts}")
        most = self.max_tokens
        if most is not None and self.input_layouts != Shard(0):
            raise ValueError(f"max_tokens: expected None without input_layouts=Shard(0), got {most!r}")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"max_tokens: expected a number from 1 on, or None, got {most!r}")
        rank, world = rank_of(mesh)
        if experts % world:
            raise ValueError(f"{name}: expected experts that {world} ranks share alike, got {experts}")
        return ExpertSplit(mesh.get_group(), rank, world, experts // world, self.input_layouts == Shard(0), most)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, PackedExperts):
            raise TypeError(f"module: expected W4A8Experts or W8A8Experts, got {type(module).__name__}")
        name = module.w13.weight.layer.removesuffix(".w13") or type(module).__name__
        if module.split is not None:
            raise ValueError(f"{name}: expected all experts, got {module.num_experts} of a rank")
        split = self.split_of(name, module.num_experts, device_mesh)
        mine = slice(split.mine.start, split.mine.stop)
        for part in (module.w13, module.w2):
            bias = part.bias
            new = Packed(
                part_of_experts(part.weight, mine),
                None if bias is None else bias[mine].clone(),
                activation=part.activation,
            )
            part.take(new)
        module.num_experts, module.split = split.experts, split
        return module


Style = ColwiseParallel | RowwiseParallel


def _divide(layer: PackedLinear, style: Style, mesh: DeviceMesh) -> PackedLinear:
    """Makes the layer this rank's part of it, in place."""
    name = layer.weight.layer or type(layer).__name__
    if isinstance(layer, (Slice, Run)):
        raise ValueError(f"{name}: expected a layer that is not fused; {ADVICE}")
    if layer.split is not None:
        raise ValueError(f"{name}: expected a whole layer, got one that is divided along {layer.split.dim} already")
    try:
        cut = Cut(style.dim, *rank_of(mesh))
        weight = part_of_weight(layer.weight, *cut, CODES[layer.activation])
        split = split_of(layer, weight.k, style, mesh)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    bias = part_of_bias(layer.bias, *cut)
    part = type(layer)(weight, bias, activation=layer.activation, input_scale=layer.input_scale)
    layer.take(part)
    layer.in_features, layer.out_features, layer.split = weight.k, weight.n, split
    return layer


def split_of(layer: PackedLinear, k: int, style: Style, mesh: DeviceMesh) -> Split:
    """What divides a layer as the style says; k: columns of a rank. Raises ValueError for scales that cannot agree."""
    layouts = style.input_layouts[0], style.output_layouts[0], style.use_local_output
    return Split(style.dim, mesh, mesh.get_group(), *layouts, style.agree_scales and _exchanges(layer, k))


def rank_of(mesh: DeviceMesh) -> tuple[int, int]:
    """This process's rank in a mesh of one dimension, and its size."""
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, such as mesh['tp'], got {mesh.ndim}")
    return mesh.get_local_rank(), mesh.size()


def _exchanges(layer: PackedLinear, k: int) -> bool:
    """Whether ranks have to exchange maxima for scales of the whole row; k: of a rank."""
    if layer.activation == "int8_affine":
        raise ValueError("agree_scales: expected symmetric activations, got int8_affine, whose zero points differ too")
    if layer.activation.endswith(BLOCK) and k % LHS_GROUP:
        raise ValueError(
            f"agree_scales: expected a multiple of {LHS_GROUP} columns a rank for {layer.activation}, got {k}"
        )
    return not layer.activation.endswith(BLOCK) and layer.input_scale is None


# ---- a model's plan --------------------------------------------------------------------------------------------------

STYLES: dict[str, Callable[[], Style]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Styles by the names that transformers' plans give them."""

WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Names for a layer that is whole on every rank, as far as inference goes."""


@dataclass(frozen=True)
class Division:
    """How a whole model is divided.

    Attributes:
        mesh: of one dimension.
        rules: {pattern (`fnmatch`) of names: a style, or its name}; the first that fits a name holds.
    """

    mesh: DeviceMesh
    rules: Mapping[str, str | Style]

    def _rule(self, name: str) -> Any:
        return next((rule for pattern, rule in self.rules.items() if fnmatchcase(name, pattern)), None)

    def style(self, name: str) -> Style | None:
        """Of the Linear of that name; None for one that is whole on every rank."""
        style = self._rule(name)
        if style is None or style in WHOLE:
            return None
        if isinstance(style, str) and style in STYLES:
            style = STYLES[style]()
        if not isinstance(style, Style):
            expected = ", ".join((*STYLES, *WHOLE))
            raise ValueError(f"tp_plan: expected a style, or one of {expected}, got {style!r} for {name}")
        return style

    def _expert_style(self, name: str) -> ExpertParallel | None:
        style = self._rule(name)
        return style if isinstance(style, ExpertParallel) else None

    def check(self, model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        """Raises ValueError for what headers show that cannot be divided so, warns where no quantised layer is divided.

        layers: of `load_`'s plan, by name.
        """
        _, world = rank_of(self.mesh)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                self.style(name)
        for name, layer in layers.items():
            style = self.style(name) if isinstance(layer, Layer) else None
            if style is None:
                if not isinstance(layer, Layer):
                    self.expert_split(name, layer.form.experts)
                continue
            size, multiple = (layer.n if style.dim == "n" else layer.k or 0), PART_MULTIPLES[style.dim]
            group = layer.group_size or size
            if style.dim == "k" and group < size and size % (world * group):
                multiple = min(GROUP_SIZES)  # what a cut through groups leaves of them
            if size % (world * multiple):
                raise ValueError(
                    f"{name}: expected {style.dim} = {size} to be a multiple of {world} ranks * {multiple}; give it "
                    "another style in tp_plan, with those that share its heads or columns"
                )
        divided = (self.style(n) if isinstance(x, Layer) else self._expert_style(n) for n, x in layers.items())
        if layers and not any(divided):
            warnings.warn(
                f"tp_plan: divides none of the {len(layers)} quantised layers, which every rank holds whole; give "
                "load_(tp_plan=...) a style for them",
                stacklevel=3,
            )
        heads = getattr(getattr(model, "config", None), "num_key_value_heads", None)
        cut = [rule for pattern, rule in self.rules.items() if pattern.endswith("k_proj") and rule == "colwise"]
        if isinstance(heads, int) and cut and heads % world:
            raise ValueError(f"tp: expected ranks that divide num_key_value_heads = {heads}, got {world}")

    def cut(self, name: str) -> Cut | None:
        style = self.style(name)
        return None if style is None else Cut(style.dim, *rank_of(self.mesh))

    def mark(self, layer: PackedLinear, name: str) -> None:
        """Says of a layer that was cut when it was read how it is divided."""
        style = self.style(name)
        if style is not None:
            layer.split = split_of(layer, layer.in_features, style, self.mesh)

    def expert_split(self, name: str, experts: int) -> ExpertSplit | None:
        """What this rank has of a layer's experts; None for all of them."""
        style = self._expert_style(name)
        return None if style is None else style.split_of(name, experts, self.mesh)

    def divide(self, name: str, module: torch.nn.Module) -> None:
        """Divides a whole layer, packed or not; a Linear in floats stays whole where that gives the same output."""
        if isinstance(module, PackedExperts):
            if (expert_style := self._expert_style(name)) is not None:
                parallelize_module(module, self.mesh, expert_style, src_data_rank=None)
            return
        style = self.style(name)
        if style is None:
            return
        if not isinstance(module, PackedLinear):
            whole = style.output_layouts if style.dim == "n" else style.input_layouts
            if whole == (Replicate(),):
                return
        parallelize_module(module, self.mesh, style, src_data_rank=None)


def division_of(model: torch.nn.Module, mesh: DeviceMesh, rules: Mapping[str, str | Style] | None) -> Division:
    """A model's division, by its own plan where rules is None.

    Raises:
        TypeError, ValueError: no mesh, no plan, or a rule that fits nothing.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"tp: expected a DeviceMesh, got {type(mesh).__name__}")
    rank_of(mesh)
    if rules is None:
        return Division(mesh, plan_of(model))
    names = [name for name, _ in model.named_modules()]
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"tp_plan: expected patterns of the model's modules, got {pattern!r}, which fits none")
    return Division(mesh, rules)


def plan_of(model: torch.nn.Module) -> Mapping[str, str | Style]:
    """The model's own plan. Raises ValueError where it has none."""
    rules = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not rules:
        raise ValueError("tp_plan: expected {pattern of names: style}, as the model has no plan of its own, got None")
    return rules
