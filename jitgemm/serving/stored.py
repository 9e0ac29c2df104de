"""How a checkpoint's files hold the layers that an engine joins: what their headers tell before anything is loaded.

What the tensors mean is the business of `jitgemm.checkpoint`, whose readers look at the same headers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.format import Scheme
from jitgemm.checkpoint.reader import layer_header
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import K_ALIGNMENT
from jitgemm.nn.load.layer_source import LayerSource


class Unsupported(ValueError):
    """jitgemm has no kernel or no reader for what the files hold."""


@dataclass(frozen=True)
class StoredLayers:
    """Layers of the files that an engine joins into one, or those of an expert.

    Attributes:
        suffixes: what stands behind the layers' names, of the tensors that are loaded.
        sources: {a layer's name: how it is read}; {} where no header is known, and of layers that jitgemm packed.
        floats: whether they are quantised when they are loaded.
        k_alignment: what a rank's columns are a multiple of.
    """

    suffixes: tuple[str, ...]
    sources: Mapping[str, LayerSource] = field(default_factory=dict)
    floats: bool = False
    k_alignment: int = K_ALIGNMENT

    def check(self, widths: Sequence[int], k: int, whole: int) -> None:
        """Checks how ranks cut the layers, as far as headers tell.

        Args:
            widths: this rank's rows of each of the layers that are joined.
            k, whole: columns of this rank, and of all.

        Raises:
            Unsupported: no packed weight can hold such a part.
        """
        alignment = max([self.k_alignment, *(source.rotation for source in self.sources.values())])
        if sum(widths) % 8 or k % alignment:
            wanted = f"expected rows in multiples of 8 and columns of {alignment} on each rank"
            raise Unsupported(f"{wanted}, got {sum(widths)} and {k}")
        for name, source in self.sources.items():
            if source.header is None:
                continue
            scheme = source.header.scheme
            if scheme.unpackable:
                raise Unsupported(f"zero points: expected none with 8-bit integers, got some (layer {name})")
            if (why := scheme.why_dense(source.k)) is not None:
                raise Unsupported(f"{why} (layer {name})")
            size, least = source.group_size or whole, CODES[scheme.code].least_group
            grouped = size < whole
            if grouped and size % least:
                raise Unsupported(f"group_size: expected a multiple of {least}, got {size}")
            if grouped and k != whole and math.gcd(size, k) % least:
                raise Unsupported(f"expected columns in multiples of {least} in groups of {size} on each rank, got {k}")
            if grouped and k != whole and scheme.ordered:
                raise Unsupported("expected no activation order (g_idx) where ranks have parts of the columns, got one")

    def axes(self, suffix: str) -> dict[str, int]:
        """{"output_dim", "input_dim": a tensor's dimension of rows and columns}, as some of vLLM's models ask."""
        if self.floats:
            return {"output_dim": 0, "input_dim": 1}
        for source in self.sources.values():
            if source.header is not None and suffix in (layout := source.header.format.tensors(source.header.scheme)):
                axes = {"output_dim": layout[suffix].axis("n"), "input_dim": layout[suffix].axis("k", "G")}
                return {name: axis for name, axis in axes.items() if axis is not None}
        return {}


def source_of(checkpoint: Checkpoint, name: str, wanted: str | None, k: int | None = None) -> LayerSource:
    """How a layer is read.

    Args:
        wanted: the activation that the user wants, if the weight can meet it.
        k: columns of the layer, if known.

    Raises:
        ValueError: it cannot be.
    """
    if {"blocks", "meta"} <= checkpoint.layer(name).keys():
        return LayerSource.find(checkpoint, name)
    with checkpoint.errors_that_name(name):
        scheme = layer_header(checkpoint, name, k=k).scheme
    if wanted is not None and scheme.eight_bits and not wanted.startswith(scheme.code):
        wanted = None
    return LayerSource.find(checkpoint, name, wanted or (None if scheme.inputs is None else scheme.inputs.instead), k=k)


def check_alike(sources: Mapping[str, LayerSource], engine: str) -> None:
    """Raises ValueError for joined layers that the files do not have quantised in one way."""

    def way(source: LayerSource) -> tuple[str, Scheme, str]:
        assert source.header is not None
        return source.header.format.name, replace(source.header.scheme, found={}), source.activation

    first, *others = map(way, sources.values())
    if any(other != first for other in others):
        raise ValueError(
            f"{', '.join(sources)}: expected one way of quantising layers that {engine} joins, got several"
        )
