"""Random quantised layers for the tests of importers, and the way to a file and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builders
import checkpoints
import torch

from jitgemm.checkpoint import Checkpoint, read_layer
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Format
from jitgemm.checkpoint.formats import FORMATS
from jitgemm.checkpoint.reader import layer_header, scheme_of
from jitgemm.kernel.formats import ceil_div

PREFIX = "model.layers.0.mlp.up_proj"


@dataclass(frozen=True)
class Layer:
    """Codes 0..15 (0..255) with integer zero points, all [n, ...]; group[j] is the group of column j."""

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group: torch.Tensor

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1]

    @property
    def weight(self) -> torch.Tensor:
        """(q - zero) * scale, fp64 [n, k]."""
        return checkpoints.dequantized(self.q, self.scale, self.zero, self.group)


def layer(
    seed: int,
    n: int = 32,
    k: int = 256,
    group_size: int = 64,
    *,
    zeros: tuple[int, int] = (0, 15),
    dtype: torch.dtype = torch.float16,
    act_order: bool = False,
    bits: int = 4,
) -> Layer:
    g = builders.generator(seed)
    groups = ceil_div(k, group_size)
    q = torch.randint(0, 2**bits, (n, k), generator=g)
    zero = torch.randint(zeros[0], zeros[1] + 1, (n, groups), generator=g)
    scale = ((torch.rand((n, groups), generator=g) + 0.5) * 0.01).to(dtype)
    group = torch.arange(k) // group_size
    if act_order:
        group = group[torch.randperm(k, generator=g)]
    return Layer(q, scale, zero, group)


def load(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> CanonicalWeight:
    """The layer from a checkpoint on disk, its format detected."""
    saved = checkpoints.save(folder, {f"{PREFIX}.{name}": t for name, t in tensors.items()}, config)
    weight = read_layer(saved, PREFIX, device="cpu")
    told = layer_header(Checkpoint(saved), PREFIX).sizes
    assert told.n == weight.n and told.k in (None, weight.k) and told.group_size in (None, weight.group_size)
    return weight


def detecting(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> list[str]:
    """Names of all formats that detect a layer of such tensors."""
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    return [f.name for f in FORMATS if f.detect(infos, config)]


def read(format: Format, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> CanonicalWeight:
    """The layer of such tensors."""
    return format.read(tensors, scheme_of(format, config, PREFIX, tensors))


def assert_exactly(weight: CanonicalWeight, expected: torch.Tensor) -> None:
    """That the layer's matrix has the very values expected, fp64 or any narrower dtype."""
    got = weight.dequantize()
    assert got.dtype == torch.float32
    assert torch.equal(got.double(), expected.double())


def over_k(values: torch.Tensor, k: int) -> torch.Tensor:
    """[n, G] -> [n, k]."""
    return values.repeat_interleave(k // values.shape[1], 1)
