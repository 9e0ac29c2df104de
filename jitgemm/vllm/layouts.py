"""The tensors of a linear layer in each checkpoint format, as vLLM's parameters need them: dtypes and dimensions.

A dimension is a number or one of these words, divided by what a word of packed codes or a block with one scale holds::

    n       rows of the weight, cut by column-parallel layers and joined by merged ones
    k       columns, cut by row-parallel layers
    G       groups of k, cut with it
    parts   layers that are joined, such as q, k and v: a number for each

What the codes mean is the business of `jitgemm.checkpoint`, which reads what vLLM has cut and joined. Knows no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from jitgemm.checkpoint import awq, formats, gptq
from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.checkpoint.format import Scheme
from jitgemm.checkpoint.settings import setting
from jitgemm.kernel.formats import K_ALIGNMENT, ceil_div

E4M3 = torch.float8_e4m3fn
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
class TensorLayout:
    """A tensor: its type, and a word for each dimension, see above; how often it has each row of the file's tensor."""

    dtype: torch.dtype
    dims: tuple[str, ...]
    repeated: int = 1

    def axis(self, *letters: str) -> int | None:
        """Which dimension counts one of these."""
        return next((i for i, dim in enumerate(self.dims) if dim.partition(" / ")[0] in letters), None)

    def per(self, axis: int) -> int:
        """How many rows, columns or groups share an element along a dimension."""
        return int(self.dims[axis].partition(" / ")[2] or 1)

    def rows(self, widths: Sequence[int]) -> tuple[int, list[int]] | None:
        """(dimension, elements along it) of joined layers of so many rows each; None where they share the tensor."""
        if self.dims == ("parts",):
            return 0, [1] * len(widths)
        axis = self.axis("n")
        return None if axis is None else (axis, [ceil_div(width, self.per(axis)) for width in widths])

    @property
    def packed(self) -> tuple[int, int] | None:
        """(dimension, values to a word) of packed codes."""
        found = [(i, self.per(i)) for i, dim in enumerate(self.dims) if " / " in dim]
        return found[0] if found and not self.dtype.is_floating_point else None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        def length(dim: str) -> int:
            letter, _, per_word = dim.partition(" / ")
            return ceil_div(int(letter) if letter.isdigit() else sizes[letter], int(per_word or 1))

        return tuple(map(length, self.dims))


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
        rows = replace(scale, dims=("n", scale.dims[1]), repeated=BLOCK)
        return replace(self, tensors={**self.tensors, "weight_scale_inv": rows}, scheme="group")


def floats(dtype: torch.dtype) -> Layout:
    """A layer of no format: its weight, in the model's type."""
    return Layout(None, {"weight": TensorLayout(dtype, ("n", "k"))})


def layout_of(config: Mapping[str, Any], k: int, scale: torch.dtype, codes: str, names: Collection[str] = ()) -> Layout:
    """The layout that a layer's config describes.

    Args:
        config: what the model's quantization_config says of the layer, as `formats.config_of_layer` tells it.
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
    if method not in _METHODS:
        raise Unsupported(f"quant_method: expected one of {', '.join(_METHODS)}, got {method!r}")
    try:
        layout = _METHODS[method](config, k, scale)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    if layout.format != "w8a8":
        return layout
    return replace(
        layout, called={own: name for own, name in _CALLED.items() if own in layout.tensors and name in names}
    )


def check_readable(layout: Layout, config: Mapping[str, Any], k: int) -> None:
    """Raises Unsupported for a layer of k columns that the format's reader cannot read, by its config and layout."""
    sizes = layout.sizes(BLOCK, k)  # of any number of rows
    headers = {
        name: TensorInfo(layout.tensors[name].shape(sizes), layout.tensors[name].dtype) for name in layout.needed
    }
    try:
        format = formats.by_name(layout.format or "")
        scheme = format.scheme(layout.config_of(config), headers=headers)
        assert scheme is not None
        format.sizes(headers, scheme)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    if scheme.unpackable:
        raise Unsupported("zero points: expected none with 8-bit integers, got some")


def _compressed_tensors(config: Mapping[str, Any], k: int, scale: torch.dtype) -> Layout:
    weights, format = config.get("weights") or {}, config.get("format")
    kind = bits, type_ = weights.get("num_bits", 8), weights.get("type", "int")
    packed = format == "pack-quantized"
    if kind not in _KINDS or not (packed and type_ == "int" or format in ("naive-quantized", f"{type_}-quantized")):
        raise Unsupported(f"weights: expected integers of 4 or 8 bits or 8-bit floats, got {kind} in format {format!r}")
    strategy, size = weights.get("strategy") or "group", weights.get("group_size")
    if strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
        raise Unsupported(f"block_structure: expected {[BLOCK, BLOCK]}, got {weights.get('block_structure')}")
    group_size = {"block": BLOCK, "group": size if size and 0 < size < k else 0}.get(strategy, 0)
    groups = "G" if group_size else "1"
    if packed:
        tensors = {"weight_packed": TensorLayout(torch.int32, ("n", f"k / {32 // bits}"))}
        tensors["weight_shape"] = TensorLayout(torch.int64, ("2",))
    else:
        tensors = {"weight": TensorLayout(torch.int8 if type_ == "int" else E4M3, ("n", "k"))}
    tensors["weight_scale"] = TensorLayout(scale, _SCALES.get(strategy, ("n", groups)))
    if not weights.get("symmetric", True):
        if strategy not in ("group", "channel"):
            raise Unsupported(f"strategy: expected group or channel with zero points, got {strategy}")
        zero = (torch.int32, (f"n / {32 // bits}", groups)) if packed else (torch.int8, ("n", groups))
        tensors["weight_zero_point"] = TensorLayout(*zero)
    ordered = weights.get("actorder") in (True, "group")
    if ordered:
        tensors["weight_g_idx"] = TensorLayout(torch.int32, ("k",))
    inputs = config.get("input_activations") or {}
    if inputs and not inputs.get("dynamic", False):
        tensors["input_scale"] = _INPUT
    return Layout("compressed-tensors", tensors, group_size, strategy, _KINDS[kind], ordered and bool(group_size))


def _gptq(config: Mapping[str, Any], k: int, scale: torch.dtype) -> Layout:
    own = gptq.FORMAT.scheme({**config, "dynamic": None})
    words = gptq.FORMAT.tensors(own)
    tensors, group_size = _words(config, k, scale, words, "group_size")
    ordered = bool(config.get("desc_act") and group_size)
    codes = "int8" if own.code == "int8" else ""
    return Layout("gptq", tensors, group_size, _scheme(group_size), codes, ordered)


def _awq(config: Mapping[str, Any], k: int, scale: torch.dtype) -> Layout:
    if str(setting(config, "version", "format", default="gemm")).lower() == "gemv":
        raise Unsupported("version: expected gemm, got 'gemv'")
    tensors, group_size = _words(config, k, scale, awq.FORMAT.tensors(Scheme("awq")), "group_size", "q_group_size")
    return Layout("awq", tensors, group_size, _scheme(group_size))


def _words(
    config: Mapping[str, Any], k: int, scale: torch.dtype, words: Mapping[str, Any], *names: str
) -> tuple[dict[str, TensorLayout], int]:
    """What GPTQ and AWQ have in common: (tensors, group size)."""
    size = setting(config, *names, default=-1)
    group_size = size if 0 < size < k else 0
    groups = "G" if group_size else "1"
    return {
        name: TensorLayout(
            scale if name == "scales" else torch.int32, tuple(groups if str(d) == "G" else str(d) for d in each.dims)
        )
        for name, each in words.items()
    }, group_size


def _w4afp8(config: Mapping[str, Any], k: int, scale: torch.dtype) -> Layout:
    tensors = {
        "weight": TensorLayout(torch.int8, ("n", "k / 2")),
        "weight_scale_inv": TensorLayout(scale, ("n", "G")),
        "input_scale": _INPUT,
    }
    return Layout("w4afp8", tensors, config.get("group_size") or BLOCK, "group")


def _w8a8(config: Mapping[str, Any], k: int, scale: torch.dtype) -> Layout:
    method, block = config["quant_method"], config.get("weight_block_size")
    codes = "int8" if "int8" in method else "e4m3"
    if method in ("blockwise_int8", "w4afp8"):
        block = block or [BLOCK, BLOCK]
    if block not in (None, [BLOCK, BLOCK]):
        raise Unsupported(f"weight_block_size: expected {[BLOCK, BLOCK]}, got {block}")
    algorithm = str(config.get("quant_algo")).upper() if method == "modelopt" else ""
    if algorithm not in ("", "FP8", _PER_CHANNEL):
        raise Unsupported(f"quant_algo: expected FP8 or {_PER_CHANNEL} of ModelOpt, got {config.get('quant_algo')!r}")
    strategy = config.get("strategy")  # AutoRound's
    scheme = "block" if block else strategy or ("tensor" if method == "fp8" or algorithm == "FP8" else "channel")
    tensors = {"weight": TensorLayout(E4M3 if codes == "e4m3" else torch.int8, ("n", "k"))}
    by_row = ("n",) if algorithm == _PER_CHANNEL or strategy else ("n", "1")
    tensors["weight_scale_inv" if block else "weight_scale"] = TensorLayout(scale, _SCALES.get(scheme, by_row))
    if config.get("activation_scheme") == "static" or algorithm == "FP8":
        tensors["input_scale"] = _INPUT
    return Layout("w8a8", tensors, BLOCK if block else 0, scheme, codes)


_METHODS = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "w4afp8": _w4afp8} | dict.fromkeys(
    ("fp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8", "fbgemm_fp8", "modelopt"), _w8a8
)
_CALLED = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
"""What transformers calls the scales of FP8 per tensor."""
_PER_CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"
_KINDS = {(4, "int"): "", (8, "int"): "int8", (8, "float"): "e4m3"}
_INPUT = TensorLayout(torch.float32, ("parts",))
_SCALES: dict[str, tuple[str, ...]] = {"tensor": ("parts",), "block": (f"n / {BLOCK}", f"k / {BLOCK}")}


def _scheme(group_size: int) -> str:
    return "group" if group_size else "channel"
