"""The tensors of a linear layer in each checkpoint format, as vLLM's parameters need them: dtypes and dimensions.

What the codes mean is the business of `jitgemm.checkpoint`, which reads what vLLM has cut and joined. Knows no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from jitgemm.checkpoint import formats, layouts
from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.checkpoint.format import Scheme
from jitgemm.checkpoint.layouts import PARTS, G, K, N
from jitgemm.checkpoint.reader import scheme_of
from jitgemm.kernel.formats import K_ALIGNMENT, ceil_div

BLOCK = 128
_ORDERS = ("g_idx", "weight_g_idx")


class Unsupported(ValueError):
    """jitgemm has no kernel or no reader for what a layer's config describes."""


class Touched(NamedTuple):
    """Columns start..stop - 1 of a layer, all of the groups that a rank's own touch, which are `own` among them."""

    start: int
    stop: int
    own: tuple[int, int]


@dataclass(frozen=True)
class TensorLayout(layouts.TensorLayout):
    """A format's tensor as a parameter; `repeated`: how often it has each row of the file's tensor."""

    repeated: int = 1

    def rows(self, widths: Sequence[int]) -> tuple[int, list[int]] | None:
        """(dimension, elements along it) of joined layers of so many rows each; None where they share the tensor."""
        if self.dims == (PARTS,):
            return 0, [1] * len(widths)
        axis = self.axis("n")
        return None if axis is None else (axis, [ceil_div(width, self.per(axis)) for width in widths])


@dataclass(frozen=True)
class Layout:
    """How a layer is stored.

    Attributes:
        format: name of the reader in `jitgemm.checkpoint.formats`; None for floats, which are quantised when loaded.
        tensors: by what stands behind the layer's name.
        group_size: columns of k with a scale; 0 where there is one for a row, or for the whole weight.
        scheme: "group", "channel", "tensor" or "block", as vLLM calls what a scale belongs to.
        codes: "e4m3" or "int8", which activations must be too, where the weight has 8 bits; "" for 4 bits and floats.
        ordered: columns may be in activation order.
        called: {name in `tensors`: what the files have behind the layer's name instead}.
    """

    format: str | None
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    group_size: int = 0
    scheme: str = "channel"
    codes: str = ""
    ordered: bool = False
    called: Mapping[str, str] = field(default_factory=dict)

    def parameters(self, part: str = "") -> dict[str, str]:
        """{name in `tensors`: what vLLM's layer calls its parameter}; part: what stands before it, of experts."""
        return {name: part + self.called.get(name, name) for name in self.tensors}

    def sizes(self, n: int, k: int, parts: int = 1) -> dict[str, int]:
        """The number behind each word, and the columns of a group."""
        group = self.group_size or k
        return {"n": n, "k": k, "G": ceil_div(k, group), "parts": parts, "group": group}

    @property
    def needed(self) -> list[str]:
        """What the files must hold of a layer, as the format's reader asks for it."""
        static = self.format == "compressed-tensors"  # whose config alone says so; of others the tensor does
        optional = {"weight_shape", *(() if static else ("input_scale",)), *(() if self.ordered else _ORDERS)}
        return [suffix for suffix in self.tensors if suffix not in optional]

    def touched(self, k: int, whole: int, rank: int) -> Touched | None:
        """What a rank of k of `whole` columns has to load; None for its own columns, in whole groups."""
        size = self.group_size
        if k == whole or not size or k % size == 0:
            return None
        start, stop = rank * k // size * size, min(ceil_div((rank + 1) * k, size) * size, whole)
        return Touched(start, stop, (rank * k - start, (rank + 1) * k - start))

    def config_of(self, config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The checkpoint's config, as it describes the tensors of this layout."""
        if config is None or all(each.repeated == 1 for each in self.tensors.values()):
            return config
        return {**config, "weight_block_size": [1, BLOCK]}

    def cut(self, widths: Sequence[int], n: int, k: int, whole: int) -> Layout:
        """The layout for a rank's rows and columns: with a scale for each row where a block's rows are not together.

        Args:
            widths: rows of each of the layers that are joined, on a rank.
            n: rows of all ranks.
            k, whole: columns of a rank, and of all.

        Raises:
            Unsupported: no weight can hold them.
        """
        if sum(widths) % 8 or k % K_ALIGNMENT:
            wanted = f"expected rows in multiples of 8 and columns of {K_ALIGNMENT} on each rank"
            raise Unsupported(f"{wanted}, got {sum(widths)} and {k}")
        if self.group_size % 32:
            raise Unsupported(f"group_size: expected a multiple of 32, got {self.group_size}")
        if self.group_size and k != whole and math.gcd(self.group_size, k) % 32:
            raise Unsupported(
                f"expected columns in multiples of 32 in groups of {self.group_size} on each rank, got {k}"
            )
        if self.ordered and k != whole:
            raise Unsupported("expected no activation order (g_idx) where ranks have parts of the columns, got one")
        apart = widths if sum(widths) != n else widths[:-1]
        if self.scheme != "block" or not any(width % BLOCK for width in apart):
            return self
        if self.format != "w8a8":
            raise Unsupported(f"expected joined layers to have whole blocks of {BLOCK} rows on each rank, got {widths}")
        scale = self.tensors["weight_scale_inv"]
        rows = replace(scale, dims=(N, scale.dims[1]), repeated=BLOCK)
        return replace(self, tensors={**self.tensors, "weight_scale_inv": rows}, scheme="group")


def floats(dtype: torch.dtype) -> Layout:
    """A layer of no format: its weight, in the model's type."""
    return Layout(None, {"weight": TensorLayout((dtype,), (N, K))})


def layout_of(config: Mapping[str, Any], k: int, scale: torch.dtype, codes: str, names: Collection[str] = ()) -> Layout:
    """The layout that a layer's config describes.

    Args:
        config: what the model's quantization_config says of the layer, by `Format.scheme`.
        k: columns of the whole layer, of all ranks.
        scale: type of the scales.
        codes: safetensors' type of the weight, if its header is known, for checkpoints of several formats.
        names: of its tensors, if headers are known.

    Raises:
        Unsupported: there is no reader for such a layer.
    """
    method = config.get("quant_method")
    if method == "w4afp8" and codes == "F8_E4M3":
        method = "fp8"
    format = formats.by_method(method)
    if format is None or format.name not in _FORMATS:
        known = (method for name in _FORMATS for method in formats.by_name(name).methods)
        raise Unsupported(f"quant_method: expected one of {', '.join(known)}, got {method!r}")
    try:
        scheme = scheme_of(format, config, "")
    except ValueError as error:
        raise Unsupported(str(error)) from error
    _check(scheme, config)
    columns = scheme.columns(k)
    tensors = {
        name: TensorLayout(
            (scale,) if each.is_scale else each.dtypes, tuple(1 if d == G and not columns else d for d in each.dims)
        )
        for name, each in format.tensors(scheme).items()
    }
    strategy = "channel" if scheme.strategy == "group" and not columns else scheme.strategy
    called = {own: name for own, name in _CALLED.items() if own in tensors and name in names}
    codes, called = scheme.code if scheme.eight_bits else "", called if format.name == "w8a8" else {}
    return Layout(format.name, tensors, columns, strategy, codes, scheme.ordered and bool(columns), called)


def _check(scheme: Scheme, config: Mapping[str, Any]) -> None:
    """Raises Unsupported for what the format's reader has and vLLM's parameters do not."""
    if scheme.block not in (None, (BLOCK, BLOCK)):
        name = "weight_block_size" if scheme.format == "w8a8" else "block_structure"
        raise Unsupported(f"{name}: expected {[BLOCK, BLOCK]}, got {list(scheme.block or ())}")
    if scheme.form == "gemv":
        raise Unsupported("version: expected gemm, got 'gemv'")
    algorithm = str(config.get("quant_algo")).upper()
    if config.get("quant_method") == "modelopt" and algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        expected = "FP8 or FP8_PER_CHANNEL_PER_TOKEN of ModelOpt"
        raise Unsupported(f"quant_algo: expected {expected}, got {config.get('quant_algo')!r}")
    if scheme.format == "compressed-tensors":
        kind = "float" if scheme.code == "e4m3" else "int"
        packed = scheme.form == "packed" and kind == "int"
        if not packed and config.get("format") not in ("naive-quantized", f"{kind}-quantized"):
            raise Unsupported(f"weights: expected another format for {scheme.code}, got {config.get('format')!r}")
        if scheme.zero_points and scheme.strategy not in ("group", "channel"):
            raise Unsupported(f"strategy: expected group or channel with zero points, got {scheme.strategy}")


def check_readable(layout: Layout, config: Mapping[str, Any], k: int) -> None:
    """Raises Unsupported for a layer of k columns that the format's reader cannot read, by its config and layout."""
    sizes = layout.sizes(BLOCK, k)  # of any number of rows
    headers = {
        name: TensorInfo(layout.tensors[name].shape(sizes), layout.tensors[name].dtype) for name in layout.needed
    }
    try:
        format = formats.by_name(layout.format or "")
        scheme = format.scheme(layout.config_of(config), headers=headers)
        format.sizes(headers, scheme)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    if scheme.unpackable:
        raise Unsupported("zero points: expected none with 8-bit integers, got some")


_FORMATS = ("compressed-tensors", "gptq", "awq", "w4afp8", "w8a8")
_CALLED = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
"""What transformers calls the scales of FP8 per tensor."""
