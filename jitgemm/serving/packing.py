"""The base of jitgemm's methods of engines' layers, which packs a layer when all its tensors are there, and the method
of linears. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from jitgemm.kernel.codes import CODES
from jitgemm.nn.layers.invariant import invariant_part, most_ranks, multiply_invariantly
from jitgemm.nn.layers.linear import LINEARS, PackedLinear, input_rows
from jitgemm.nn.layers.packed import Parts
from jitgemm.nn.layers.shard_weight import Cut
from jitgemm.nn.recipe import Recipe
from jitgemm.serving.collected import CHILD, Collected
from jitgemm.serving.served import ServedModel
from jitgemm.serving.stored import StoredLayers
from jitgemm.weight import layout
from jitgemm.weight.packed import Weight


class Packing:
    """The base of jitgemm's methods of engines' layers: makes parameters, packs weights, and joins them in `module`.

    Attributes:
        config: the model's `JitGemmConfig`.
        names: what the checkpoint calls the layers that the engine joins, or those of an expert.
        stored: how the files hold them.
        option: of the config's, which says the activation.
        may_lack: whether files may lack a layer, which is zeros then.
        matrices: the layer's weights.
        made_up: whether the engine calls no loaders (--load-format dummy).
        copies: whether its loaders reuse a tensor's memory for others.
        complete: whether the layer was packed with the last of its tensors: others are copies.
        graphs: whether the engine may capture kernels of the first weights.
    """

    option, may_lack, made_up, copies, complete, graphs = "activation", False, False, False, False, True

    def __init__(self, config: ServedModel, names: list[str], stored: StoredLayers, *engine_arguments: Any):
        super().__init__(*engine_arguments)
        self.config, self.names, self.stored = config, names, stored
        self.matrices: Sequence[Any] = ()
        self.awaited: int | None = None  # tensors, -1 if no header tells

    @property
    def wanted(self) -> str | None:
        """The activation that the user's options name."""
        activation: str | None = getattr(self.config.recipe, self.option)
        return activation

    @property
    def recipe(self) -> Recipe:
        """How the layer's weights are quantised if the files have them in floats."""
        recipe = self.config.recipe
        recipe = recipe.head if self.option == "lm_head" and recipe.head is not None else recipe
        of_layer = recipe.for_columns(*(matrix.k for matrix in self.matrices))
        if of_layer is not recipe:
            self.config.logger.warning_once("jitgemm: some layers are in %s", recipe.why_otherwise)
        return of_layer

    def create(self, layer: torch.nn.Module, dtype: torch.dtype, attributes: Mapping[str, Any]) -> None:
        """Gives a layer its parameters."""
        self.given, self.awaited, self.complete = (dtype, attributes), None, False
        self.made_up, self.graphs = self.config.makes_weights_up, self.config.captures_graphs
        self.copies = self.config.reuses_memory
        for matrix in self.matrices:
            matrix.create(layer, dtype, attributes)
        self.config.warmer.expect(layer, dtype)

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        """Gives a packed layer its parameters back, as SGLang calls for before it loads the layer again."""
        if CHILD in layer._modules and not all(matrix.present(layer) for matrix in self.matrices):
            with torch.device(next(getattr(layer, CHILD).buffers()).device):
                self.create(layer, *self.given)

    def pack_if_complete(self, layer: torch.nn.Module) -> None:
        """Packs the layer as soon as its last tensor is there, so that its tensors do not stay in memory."""
        if self.awaited is None:
            self.awaited = self.matrices[0].expected(layer) or -1
        if sum(matrix.come for matrix in self.matrices) == self.awaited:
            self.complete = True
            self.pack(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not all(matrix.present(layer) for matrix in self.matrices):
            return
        if CHILD not in layer._modules or any(matrix.loaded for matrix in self.matrices):
            self.pack(layer)
        else:  # with its last tensor, or before: files that are loaded again have none
            self.config.warmer.packed(layer, getattr(layer, CHILD))
        self.finish(layer)

    def pack(self, layer: torch.nn.Module) -> None:
        """Gives a layer its packed weights. It keeps its parameters: engines look for those of other ranks' experts."""
        parts, old = [self.of_rank(matrix.parts(layer)) for matrix in self.matrices], getattr(layer, CHILD, None)
        if old is not None:
            first = old.packed_parts("").values()
            parts = [
                new._replace(weight=self.like(mine.weight, new.weight)) for mine, new in zip(first, parts, strict=True)
            ]
        module = self.module(layer, *parts)
        self.config.configure(self.names[0], module, old is None)
        self.install(layer, module)

    def like(self, first: Weight, weight: Weight) -> Weight:
        """A weight that is loaded again in the format of the first one, whose kernels CUDA graphs hold.

        Raises:
            ValueError: its values need another format.
        """
        if (first.group_size, first.format) == (weight.group_size, weight.format):
            return weight
        size, format = _group_for_any_values(weight), weight.format
        format = format if size == weight.group_size else replace(format, group_size=size)
        if (first.group_size, first.format) == (size, format.for_any_values):
            return for_any_values(weight)
        if first.group_size == weight.group_size and not self.graphs:
            return weight
        raise ValueError(
            f"weights: expected values that the first ones' format holds, {first!r}, whose kernels CUDA graphs may "
            f"have captured, got {weight!r} (layer {self.names[0]}); the first weights serve on"
        )

    def of_rank(self, parts: Parts) -> Parts:
        """This rank's part of a weight that was read."""
        return parts

    def module(self, layer: torch.nn.Module, *parts: Parts) -> torch.nn.Module:
        """The packed module of these weights."""
        raise NotImplementedError

    def finish(self, layer: torch.nn.Module) -> None:
        """Takes the parameters of a packed layer away."""
        self.complete = False
        for matrix in self.matrices:
            matrix.drop(layer)

    def install(self, layer: torch.nn.Module, module: torch.nn.Module) -> None:
        """Gives a layer its packed weights; if it has some, into the same memory, which CUDA graphs hold."""
        self.config.keep(module)
        if (old := layer._modules.get(CHILD)) is None:
            layer.add_module(CHILD, module)
        else:
            old.load_state_dict(module.state_dict())
        self.config.warmer.packed(layer, getattr(layer, CHILD))


def for_any_values(weight: Weight) -> Weight:
    """The same weight in the format that holds any values: codes in the order of all codes, MXFP4's scales for 32 k.

    The codes are reordered in the weight's own memory, where the number of bytes stays.
    """
    weight = weight.regrouped(_group_for_any_values(weight))
    common = weight.format.for_any_values
    if common == weight.format:
        return weight
    blocks = weight.blocks if weight.experts is not None else weight.blocks[None]
    layout.reorder_codes(blocks, common.code, weight.format.order, common.order)
    return replace(weight, format=common)


def _group_for_any_values(weight: Weight) -> int:
    inner = CODES[weight.format.code].inner
    return (inner and inner.spared) or weight.group_size


class PackedLinearMethod(Packing):
    """A linear with a packed weight, activations quantised to 8 bits on the way in.

    Attributes:
        tp_invariant: of the packed layer; along k each rank reads all columns, and keeps a part of the packed weight.
        ranks: (this rank, number of ranks) along k.
    """

    dtype = torch.bfloat16
    tp_invariant: str | None = None
    ranks = (0, 1)

    def place(
        self, layer: torch.nn.Module, widths: Sequence[int], k: int, whole: int, rank: int, dtype: torch.dtype,
        attributes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Gives a layer its parameters.

        Args:
            widths: this rank's rows of each of the layers that are joined.
            k, whole, rank: columns of this rank, those of all, and which of the ranks that share them it is.
            dtype: of the layer's input and output.
            attributes: what the engine wants the parameters to have, its "weight_loader" among that.
        """
        self.dtype = dtype
        if self.config.tp_invariant:
            self.tp_invariant = "n" if self.config.ranks_that_share(layer) is None else "k"
            self.ranks, k, rank = (rank, whole // k), whole, 0
        self.matrices = [Collected(self, widths, k, whole, rank)]
        self.create(layer, dtype, attributes)

    def of_rank(self, parts: Parts) -> Parts:
        if self.tp_invariant != "k":
            return parts
        parts.weight.named(self.names[0])
        return invariant_part(parts, Cut("k", *self.ranks), most_ranks(self.config.tp_invariant))

    def module(self, layer: torch.nn.Module, *parts: Parts) -> PackedLinear:
        weight, bias, activation, input_scale = parts[0]
        if self.names[0].rpartition(".")[2] == "kv_b_proj":  # whose weight MLA takes from the product with an identity
            input_scale = None
        made = LINEARS[weight.bits](weight, bias, activation=activation, input_scale=input_scale)
        if self.tp_invariant == "k" and self.ranks[1] > 1:
            from jitgemm.nn.layers.sharding import EngineSharding  # with torch.distributed

            nvlink = self.config.exchange == "nvlink"
            made.split = EngineSharding(self.config.group_of(layer), *self.ranks, nvlink)
        if self.tp_invariant is not None:
            made.tp_ranks, made.tp_invariant = most_ranks(self.config.tp_invariant), self.tp_invariant
        return made

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        module = getattr(layer, CHILD)
        rows = input_rows(x, module.in_features)
        if module.split is not None and not layer.skip_bias_add:
            bias = layer.bias  # which engines give one rank alone
        if bias is not None and bias.dtype == torch.float16:
            bias = bias.float()
        if module.tp_invariant is not None:
            out = multiply_invariantly(module, rows, bias)
        else:
            out = torch.empty((rows.shape[0], module.out_features), dtype=x.dtype, device=x.device)
            module.multiply(module.quantise(rows), out, bias)
        return out.view(*x.shape[:-1], module.out_features)


class PackedHead:
    """The output layer in 8 bits, quantised when loaded, or packed in the files; a tied embedding keeps its weight.

    Rows that fill up a rank's are zeros. A draft model's files may lack it: it takes that of another model.
    """

    option, may_lack = "lm_head", True
