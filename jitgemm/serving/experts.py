"""w13 or w2 of an engine's fused experts: this rank's tensors as the files have them, and the packed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from jitgemm.activations.scheme import Gate
from jitgemm.checkpoint.canonical import CanonicalWeight, check_order, concat, pack_experts
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.format import INPUT_TENSORS
from jitgemm.kernel.formats import STRIP_ROWS
from jitgemm.nn.layers.packed import Parts
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.serving.collected import CHILD, LOCK, Collected, arbitrary, mark, needed

AT_ONCE = 16 << 20
"""Bytes of a checkpoint's codes that are packed at once, or those of one expert."""


class CollectedExperts(Collected):
    """w13 or w2 of fused experts.

    Attributes:
        part, count: "w13" or "w2", and the experts of this rank.
        rows: of a layer in the files.
        biased: whether the experts have biases, which the engine loads; what stands behind "w13_" in their names.
        kept: {(rank's expert, which of the joined layers): its tensors}; None for all, cut by the engine's model.
        places: what `PackedExpertsMethod.places` says; None until it is asked.
    """

    places: list[list[int]] | None = None

    def __init__(
        self, method: Any, part: str, count: int, widths: Sequence[int], k: int, whole: int, rank: int, rows: int,
        biased: str = "",
    ):  # fmt: skip
        super().__init__(method, widths, k, whole, rank)
        self.part, self.count, self.rows, self.biased = part, count, rows, biased
        self.start = f"{part}_"

    @property
    def parameters(self) -> dict[str, str]:
        return super().parameters | ({"bias": f"{self.part}_{self.biased}"} if self.biased else {})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, len(self.widths)

    def create(self, layer: torch.nn.Module, dtype: torch.dtype, attributes: Mapping[str, Any]) -> None:
        super().create(layer, dtype, attributes)
        for name in self.parameters.values():
            for attribute, value in attributes.items():
                if attribute != "weight_loader":
                    setattr(layer._parameters[name], attribute, value)

    def loader(self, layer: torch.nn.Module, suffix: str) -> Callable[..., Any]:
        """The weight_loader: it keeps one expert's tensor, or all experts', and packs the layer with the last one."""

        def keep(
            param: Any, loaded_weight: torch.Tensor, weight_name: str = "", shard_id: str | None = None,
            expert_id: int | None = None, return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            part = None if shard_id is None else int(shard_id == "w3")
            stacked = shard_id is None or self.stacks(suffix, loaded_weight)
            mine = [*range(self.count)] if stacked else self.place(layer, expert_id or 0)
            if not mine:
                return False if return_success else None
            mark(param, (mine if len(mine) > 1 else mine[0], ... if part is None else part))
            if not param.is_meta and not self.method.complete:
                tensor = self.taken(suffix, loaded_weight, CHILD in layer._modules)
                with LOCK:
                    for e in mine:
                        self.hold((e, part), suffix, tensor[e] if stacked else tensor)
                    self.method.pack_if_complete(layer)
            return True if return_success else None

        keep.keeps = True  # type: ignore[attr-defined]
        return keep

    def stacks(self, suffix: str, tensor: torch.Tensor) -> bool:
        """True if a tensor stacks all experts."""
        known = (source for source in self.stored.sources.values() if suffix in source.names)
        of_one = next((source.checkpoint.info(source.names[suffix]).dim() for source in known), 2)
        return tensor.dim() == of_one + 1 and len(tensor) == self.count

    def place(self, layer: torch.nn.Module, expert: int) -> list[int]:
        """Which of this rank's experts one of the loader's is: none, one or several."""
        if self.places is None:
            self.places = self.method.places(layer)
        return self.places[expert]

    def forget(self) -> None:
        super().forget()
        self.places = None

    def expected(self, layer: torch.nn.Module) -> int | None:
        """How many tensors of this rank's experts the files hold for w13 and w2; None if no header tells."""
        if self.stored.floats:
            return self.count * (len(self.widths) + 1)
        module = self.names[0].rpartition(".")[0].rpartition(".")[0]
        if self.config.of_gpt_oss:
            return self.count * (self.config.count([module]) or 0)
        counts = self.config.experts_counts(self.names[0], bool(self.biased))
        mine = self.method.in_files(layer)
        return sum(counts[expert] for expert in mine) if counts.keys() >= {*mine} else None

    # ---- the packed weights ------------------------------------------------------------------------------------------

    def parts(self, layer: torch.nn.Module) -> Parts:
        self.leave_meta(layer)
        try:
            if self.method.made_up and not self.kept:
                return self.made_up()
            self.place(layer, 0)
            for expert in range(self.count):
                for part in range(len(self.widths)):
                    if (expert, None) not in self.kept and (expert, part) not in self.kept:
                        self.lacks(expert, part, next(iter(self.kept.values()), ("weight",)))
                    key = (expert, None if (expert, None) in self.kept else part)
                    if self.biased and "bias" not in self.kept[key]:
                        self.lacks(expert, part, ("bias",))
            return self.of_floats(layer) if self.stored.floats else self.of_files(layer)
        finally:
            self.forget()

    def called(self, expert: int, part: int | None) -> tuple[int, str]:
        """(the expert's number in the model, the name of its projection), for messages."""
        proj = "down_proj" if self.part == "w2" else ("gate_proj", "up_proj")[-len(self.widths) :][part or 0]
        return next(number for number, mine in enumerate(self.places or ()) if expert in mine), proj

    def lacks(self, expert: int, part: int | None, suffixes: Iterable[str]) -> None:
        """Raises ValueError: the files lack these tensors of one of this rank's experts."""
        names = ", ".join(self.parameters.get(suffix, self.start + suffix) for suffix in suffixes)
        number, proj = self.called(expert, part)
        raise ValueError(
            f"{names}: expected numbers for each of this rank's {self.count} experts, found none in the files for "
            f"number {number}'s {proj} (layer of {self.names[0]})"
        )

    def of_files(self, layer: torch.nn.Module) -> Parts:
        fullest = max(self.kept.values(), key=len)
        first = self.config.source(self.names[0], fullest, k=self.whole).without(INPUT_TENSORS, "not read of experts")
        biases: dict[int, torch.Tensor | None] = {}
        together = self._together(fullest)

        def canonical(expert: int, part: int | None) -> CanonicalWeight:
            tensors = self.kept[expert, part]
            if lacks := needed(first, tensors, INPUT_TENSORS):
                self.lacks(expert, part, lacks)
            number, proj = self.called(expert, part)
            prefix = f"{self.names[0].rpartition('.')[0].rpartition('.')[0]}.{number}.{proj}"
            weight = self.cut_part(replace(self.source_like(first, tensors, fullest), prefix=prefix), part)
            check_order(weight, number)
            return weight

        def read(expert: int) -> CanonicalWeight:
            weight = concat([
                canonical(each, part)
                for each in range(expert, expert + together)
                for part in ([None] if (each, None) in self.kept else range(len(self.widths)))
            ])  # fmt: skip
            biases[expert] = weight.bias
            return replace(weight, bias=None)

        packed = pack_experts(self.count, read, first.lhs_dtype, first.bits, together)
        biases_by_expert = [bias for _, bias in sorted(biases.items()) if bias is not None]
        bias = torch.cat(biases_by_expert).view(self.count, -1) if biases_by_expert else None
        return Parts(packed, bias, first.activation, None)

    def source_like(
        self, first: LayerSource, found: Mapping[str, torch.Tensor], fullest: Mapping[str, torch.Tensor]
    ) -> LayerSource:
        """The reader of one more expert's tensors: the first expert's, if shapes and dtypes are the same."""
        checkpoint = Checkpoint(
            {f"{first.prefix}.{suffix}": tensor for suffix, tensor in found.items()}, first.checkpoint.config
        )
        names = {suffix: name for suffix, name in first.names.items() if suffix in found}
        if len(names) == len(first.names) and all(
            checkpoint.info(name) == first.checkpoint.info(name) for name in names.values()
        ):
            return replace(first, checkpoint=checkpoint)
        inputs = {suffix: tensor for suffix, tensor in fullest.items() if suffix in INPUT_TENSORS}
        return self.config.source(first.prefix, {**inputs, **found}, k=self.whole).without(
            INPUT_TENSORS, "not read of experts"
        )

    def cut_part(self, source: LayerSource, part: int | None) -> CanonicalWeight:
        """This rank's rows of one of w13's joined layers, or columns of w2; all if the engine's model has cut."""
        width = self.widths[part or 0]
        expected = (sum(self.widths), self.k) if part is None else (self.rows, self.whole)
        if (got := (source.n, source.k or expected[1])) != expected:
            raise ValueError(f"{self.start}weight: expected n, k = {expected}, got {got}")
        if part is None or expected == (width, self.k):
            return source.canonical(self.device)
        if self.k != self.whole:
            return source.canonical(self.device, ("k", self.rank, self.whole // self.k))
        if width % 8 == 0 and self.rows % width == 0:
            return source.canonical(self.device, ("n", self.rank, self.rows // width))
        return source.canonical(self.device).rows(slice(self.rank * width, (self.rank + 1) * width))

    def _together(self, found: Mapping[str, torch.Tensor]) -> int:
        """How many experts are packed at a time: kernels for one take less time than launching them."""
        if sum(self.widths) % STRIP_ROWS:
            return 1
        most = max(1, AT_ONCE // (len(self.widths) * max(tensor.nbytes for tensor in found.values())))
        return max(count for count in range(1, self.count + 1) if self.count % count == 0 and count <= most)

    def of_floats(self, layer: torch.nn.Module) -> Parts:
        weight = torch.empty((self.count, sum(self.widths), self.k), dtype=self.dtype, device=self.device)
        for (expert, part), tensors in self.kept.items():
            if part is None:
                weight[expert] = tensors["weight"]
                continue
            width, start = self.widths[part], sum(self.widths[:part])
            rows = slice(self.rank * width, (self.rank + 1) * width) if self.rows != width else slice(None)
            columns = slice(self.rank * self.k, (self.rank + 1) * self.k) if self.k != self.whole else slice(None)
            weight[expert, start : start + width] = tensors["weight"][rows, columns]
        return Parts(self.method.recipe.apply(weight), None, self.method.recipe.inputs, None)

    def made_up(self) -> Parts:
        source = next(iter(self.stored.sources.values()), None)
        if source is None:
            return self.random(self.count, sum(self.widths), self.k)
        packed = pack_experts(
            self.count,
            lambda _: arbitrary(source, sum(self.widths), self.k, self.device),
            source.lhs_dtype,
            source.bits,
        )
        return Parts(packed, None, source.activation)

    def gate(self, expected: Gate) -> Gate:
        """The gate of these experts, where the model has `expected`."""
        return expected
