"""A weight of an engine's fused experts: the tensors of a linear's, with this rank's experts in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.checkpoint.canonical import CanonicalWeight, pack_experts
from jitgemm.checkpoint.layouts import PARTS, N, stored
from jitgemm.kernel.formats import STRIP_ROWS
from jitgemm.nn.layers.packed import Parts
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.serving.layouts import BLOCK
from jitgemm.serving.matrix import SHAPE, Marks, Matrix, Packing

AT_ONCE = 16 << 20
"""Bytes of a checkpoint's codes that are packed at once, or those of one expert."""


class ExpertsMatrix(Matrix):
    """w13 or w2 of fused experts: the same tensors, with this rank's experts in front.

    Attributes:
        part, count: "w13" or "w2", and the experts of this rank.
    """

    def __init__(
        self, method: Packing, part: str, count: int, widths: Sequence[int], k: int, whole: int, rank: int, rows: int
    ):
        super().__init__(method, widths, k, whole, rank)
        self.part, self.count, self.rows = part, count, rows
        self.parameters = {suffix: f"{part}_{name}" for suffix, name in self.parameters.items()}
        # Engines load one number of an expert's input scale, and one of w2's scale of the whole weight.
        numbers = [suffix for suffix, each in self.tensors.items() if each.dims == (PARTS,)]
        single = numbers if part == "w2" else [each for each in numbers if each == "input_scale"]
        self.tensors = {**self.tensors, **{each: replace(self.tensors[each], dims=()) for each in single}}

    @property
    def columns(self) -> tuple[int, ...]:
        return self.k, self.widths[0]  # the other weight's: w13 has its rows, w2 those of each of w13's halves

    def add_bias(self, dtype: torch.dtype, called: str) -> None:
        self.tensors, self.parameters["bias"] = {**self.tensors, "bias": stored(dtype, N)}, f"{self.part}_{called}"
        self.more = ("bias",)

    def parameter(self, suffix: str, attributes: Mapping[str, Any]) -> torch.nn.Parameter:
        tensor = self.tensors[suffix]
        shape = (0,) if suffix.endswith("g_idx") else tensor.shape(self.sizes)  # which is looked at, not kept
        param = torch.nn.Parameter(torch.empty((self.count, *shape), dtype=tensor.dtype), requires_grad=False)
        said = {
            "is_transposed": (tensor.axis("k", "G", "1") or 0) < (tensor.axis("n") or 0),
            "quant_method": "channel"
            if suffix == "bias"
            else "tensor"
            if tensor.dims in ((PARTS,), ())
            else self.layout.scheme.strategy,
            "weight_loader": self.loader(suffix, attributes["weight_loader"]),
        }
        for name, value in {**attributes, **said}.items():
            setattr(param, name, value)
        return param

    def load(
        self, load: Any, suffix: str, param: Any, tensor: torch.Tensor, weight_name: str, *where: Any, **named: Any
    ) -> Any:
        """Tells the engine's loader, which goes by names, its own name of a parameter. Of gpt-oss' stacked experts the engine's
        model has cut the rank's part. Raises ValueError for an activation order."""
        if suffix.endswith("g_idx"):
            k = tensor.shape[-1]
            order = torch.arange(k, device=tensor.device) // (self.layout.scheme.group_size or k)
            if bool((tensor != order).any()) and not bool((tensor == -1).any()):
                raise ValueError(
                    f"g_idx: expected columns in the input's order, got an activation order of experts such as "
                    f"{self.names[0]}, which share their quantised input"
                )
            return True
        if named.get("shard_id", True) is None:
            if tensor.shape == param.shape:
                return param.data.copy_(tensor)
            raise ValueError(f"{weight_name}: expected shape {list(param.shape)}, got {list(tensor.shape)}")
        if suffix == SHAPE and PARTS in self.tensors[SHAPE].dims:
            ((part, _),) = self.marks(tensor, weight_name, *where, **named)
            param = torch.nn.Parameter(param.data[:, part], requires_grad=False)
        own = weight_name.replace(self.layout.called.get(suffix, suffix), suffix)
        if suffix == "bias":  # vLLM's loaders before 0.33 know no biases: cut like a scale per row
            own = f"{self.part}_weight_scale"
            tensor = (
                tensor if self.part == "w13" or self.rank == 0 else torch.zeros_like(tensor)
            )  # ranks' results are summed
        return load(param, self.shares(suffix, tensor), own, *where, **named)

    def marks(
        self, loaded_weight: torch.Tensor, weight_name: str, shard_id: Any, expert_id: Any, return_success: bool = False
    ) -> Marks:  # type: ignore[override]
        part = None if shard_id is None else int(shard_id == "w3")
        return frozenset({(part, None if loaded_weight.dim() == 3 else expert_id)})

    def check(self, layer: torch.nn.Module) -> None:
        """Raises ValueError for a tensor that no file holds of one of this rank's experts."""
        places = layer.expert_map
        mine = range(self.count) if places is None else [e for e, at in enumerate(places.tolist()) if at >= 0]
        projections = ("down_proj",) if self.part == "w2" else ("gate_proj", "up_proj")[-len(self.widths) :]
        for e, (part, proj) in product(mine, enumerate(projections)):
            lacking = [suffix for suffix in self.lacking(layer, part, e) if suffix != "input_scale"]  # which is unused
            if lacking:
                raise ValueError(
                    f"{', '.join(self.parameters[suffix] for suffix in lacking)}: expected numbers for each of this "
                    f"rank's {self.count} experts, found none in the files for number {e}'s {proj} "
                    f"(layer of {self.names[0]})"
                )

    def gate(self, expected: Gate) -> Gate:
        """The gate of these experts, where the model has `expected`."""
        return expected

    def parts(self, layer: torch.nn.Module) -> Parts:
        tensors = self.take(layer)
        codes, bias = next(iter(tensors.values())), tensors.pop("bias", None)
        if self.layout.format is None:
            return self.quantised(codes)
        for suffix, tensor in tensors.items():
            if suffix.endswith("g_idx"):
                tensors[suffix] = self.in_order().to(tensor).expand(self.count, -1)
            elif suffix == "input_scale":
                tensor.fill_(1)  # unused
        together = self._together(codes)

        def source(e: int) -> LayerSource:
            rows = {suffix: self._rows(suffix, tensor[e : e + together]) for suffix, tensor in tensors.items()}
            return self.source(rows, together)

        def read(e: int) -> CanonicalWeight:
            weight = source(e).canonical(codes.device)
            return weight if self.own is None else weight.columns(*self.own)

        first = source(0)
        packed = pack_experts(self.count, read, first.lhs_dtype, first.bits, together)
        return Parts(packed, bias, first.activation, None)

    def _together(self, codes: torch.Tensor) -> int:
        """How many experts are packed at a time: kernels that pack one take less time than Python does to launch them."""
        if sum(self.widths) % (BLOCK if self.layout.scheme.strategy == "block" else STRIP_ROWS):
            return 1
        most = max(1, AT_ONCE // codes[0].nbytes)
        return max(each for each in range(1, self.count + 1) if self.count % each == 0 and each <= most)

    def _rows(self, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors [experts, ...] as one of all their rows; as the first where rows do not count."""
        layout = self.layout.tensors[suffix]
        if layout.dims == (PARTS,):
            return tensor.flatten()
        axis = layout.axis("n")
        return tensor[0] if axis is None else tensor.movedim(0, axis).flatten(axis, axis + 1)
