"""Calibration: what reaches a model's layers when it runs, summed up as GPTQ wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from jitgemm.activations.reference import gated
from jitgemm.nn.quantize.stacked import ExpertsLayout

MEMORY = 16 << 30
"""Bytes of moments at a time, by default. A Llama-3-8B's are 33 GB."""

Batch = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a model is called with: token ids [sequences, tokens], arguments, or keywords such as a tokenizer's result."""


@dataclass
class Calls:
    """The calls of a module by one batch.

    Attributes:
        count: how many at most.
        leader: the module that had the same input before; its own name for the first.
    """

    leader: str
    count: int = 0


@dataclass
class Moments:
    """Sums of x xᵀ over the inputs of one module, by projection: [k, k], or [E, k, k] for experts.

    Attributes:
        sums: one of a Linear, two of experts.
        tokens: how many inputs were summed; of experts by expert, [E].
    """

    sums: list[torch.Tensor]
    tokens: torch.Tensor

    def given(self, experts: bool) -> Any:
        """What a layer's maker takes: a Linear's tensor, or by projection those of experts, None without a token."""
        if not experts:
            return self.sums[0] if int(self.tokens) else None
        counts = self.tokens.tolist()
        return [[sums[e] if count else None for e, count in enumerate(counts)] for sums in self.sums]


@dataclass
class Calibration:
    """The runs of a model on calibration batches.

    Attributes:
        model: where it stands.
        batches: what it is called with.
        layouts: {name: how it holds its experts} of modules of stacked experts; {name: None} of Linears.
        memory: bytes of moments that may exist at once, if that is enough for one module.
        show: called with what runs next, which takes long, and False.
    """

    model: torch.nn.Module
    batches: list[Batch]
    layouts: Mapping[str, ExpertsLayout | None]
    memory: int = MEMORY
    show: Callable[[str, bool], None] = lambda text, step: None  # noqa: E731
    calls: dict[str, Calls] = field(default_factory=dict)

    def stages(self) -> Iterator[list[str]]:
        """Names of modules that run one behind the other, as many as memory holds moments of, and none of two blocks.

        The next stage sees what is left of the inputs when the ones before are quantised.
        """
        self._observe()
        stage: list[str] = []
        room = self.memory
        for name, calls in self.calls.items():
            if calls.leader == name:  # others share its moments, and follow it
                needed = self._bytes(name)
                if stage and (needed > room or _block(name) != _block(stage[-1])):
                    yield stage
                    stage, room = [], self.memory
                room -= needed
            stage.append(name)
        if stage:
            yield stage

    def _bytes(self, name: str) -> int:
        layout = self.layouts[name]
        module: Any = self.model.get_submodule(name)
        if layout is None:
            return 4 * int(module.in_features) ** 2
        return 4 * layout.experts * (layout.hidden**2 + layout.inter**2)

    def _observe(self) -> None:
        """Which modules the batches reach, in what order, how often in one at most, and which have the same input."""
        leader, last, version = "", torch.empty(0), 0
        times: dict[str, int] = {}
        earlier: set[str] = set()  # of batches: such a module may have had inputs that a new one had not

        def hook(name: str, x: torch.Tensor, *more: Any) -> None:
            nonlocal leader, last, version
            now = 0 if x.is_inference() else x._version  # whether it was written since
            if x is not last or now != version or leader in earlier or self.layouts[leader] != self.layouts[name]:
                leader, last, version = name, x, now
            times[name] = times.get(name, 0) + 1
            calls = self.calls.setdefault(name, Calls(leader))
            calls.count = max(calls.count, times[name])

        self.calls.clear()
        with self._hooks(self.layouts, hook):
            for number, batch in enumerate(self.batches, 1):
                self.show(f"batch {number} of {len(self.batches)}: order of layers", False)
                times.clear()
                earlier.update(self.calls)
                self._run(batch)

    def collect(self, stage: list[str]) -> dict[str, Moments]:
        """The moments of a stage's modules, from all batches."""
        leaders = {self.calls[name].leader for name in stage}
        moments = {name: self._zeros(name) for name in leaders if name in stage}
        expected = sum(self.calls[name].count for name in stage)
        mask: torch.Tensor | None = None
        seen = 0

        def hook(name: str, x: torch.Tensor, *more: Any) -> None:
            nonlocal seen
            seen += 1
            if name in moments:
                self._add(name, moments[name], x, mask, *more)
            if seen == expected:
                raise _Enough

        with self._hooks(stage, hook):
            for number, batch in enumerate(self.batches, 1):
                self.show(f"batch {number} of {len(self.batches)}: inputs of {stage[0]}", False)
                seen, mask = 0, _mask(batch)
                try:
                    self._run(batch)
                except _Enough:
                    pass
        return {name: moments[self.calls[name].leader] for name in stage}

    def _zeros(self, name: str) -> Moments:
        layout = self.layouts[name]
        module: Any = self.model.get_submodule(name)
        if layout is None:
            device = module.weight.device
            sums = [torch.zeros((module.in_features,) * 2, device=device)]
            return Moments(sums, torch.zeros((), dtype=torch.int64, device=device))
        device = getattr(module, layout.parameters[0]).device
        sums = [torch.zeros((layout.experts, k, k), device=device) for k in (layout.hidden, layout.inter)]
        return Moments(sums, torch.zeros(layout.experts, dtype=torch.int64, device=device))

    def _add(self, name: str, moments: Moments, x: torch.Tensor, mask: torch.Tensor | None, *more: Any) -> None:
        layout, rows = self.layouts[name], x.detach().flatten(0, -2)
        kept = None if mask is None or mask.numel() != len(rows) else mask.flatten().to(rows.device)
        if layout is None:
            rows = rows if kept is None else rows[kept]
            _add_products(moments.sums[0], rows)
            moments.tokens += len(rows)
            return
        ids = more[0].flatten(0, -2)
        ids = ids if kept is None else ids.where(kept[:, None], -1)
        module = self.model.get_submodule(name)
        for e in range(layout.experts):
            mine = rows[(ids == e).any(-1)]
            if len(mine):
                moments.tokens[e] += len(mine)
                _add_products(moments.sums[0][e], mine)
                _add_products(moments.sums[1][e], intermediate(module, layout, mine, e))

    @contextmanager
    def _hooks(self, names: Iterable[str], hook: Callable[..., None]) -> Iterator[None]:
        """hook(name, the module's input, its further arguments) ahead of each of the modules."""

        def ahead(name: str) -> Any:
            def called(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hook(name, *args, *kwargs.values())

            return called

        handles = [
            self.model.get_submodule(name).register_forward_pre_hook(ahead(name), with_kwargs=True) for name in names
        ]
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, mode in modes.items():
                module.training = mode

    def _run(self, batch: Batch) -> None:
        device = next((p.device for p in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))
        place = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value  # noqa: E731
        with torch.no_grad():
            if isinstance(batch, Mapping):
                self.model(**{name: place(value) for name, value in batch.items()})
            else:
                self.model(*map(place, batch if isinstance(batch, tuple) else (batch,)))


def intermediate(module: torch.nn.Module, layout: ExpertsLayout, x: torch.Tensor, e: int) -> torch.Tensor:
    """What reaches expert e's second projection, [tokens, inter], of inputs x [tokens, hidden]."""
    w = layout.rows(getattr(module, layout.parameters[0]))[e]
    bias = getattr(module, layout.biases[0])[e] if layout.bias else None
    return gated(torch.nn.functional.linear(x, w, bias).float(), layout.gate).to(x.dtype)


class _Enough(Exception):
    """All modules of a stage had their inputs; the rest of the model need not run."""


def _block(name: str) -> str:
    """The name up to its first number: the decoder layer that a module belongs to."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def _mask(batch: Batch) -> torch.Tensor | None:
    """Which tokens are no padding, if the batch says it."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _add_products(total: torch.Tensor, x: torch.Tensor) -> None:
    """total += xᵀ x in fp32, of x [tokens, k]."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        total += torch.mm(x.T, x, out_dtype=torch.float32)
        return
    for part in x.split(1 << 14):
        part = part.to(torch.float32)
        total.addmm_(part.T, part)
