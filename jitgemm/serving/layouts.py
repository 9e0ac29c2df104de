"""How a checkpoint stores a layer that an engine cuts and joins: the tensors of its format, as parameters need them.

What the codes mean is the business of `jitgemm.checkpoint`, which reads what the engine has cut and joined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jitgemm.checkpoint import formats
from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.checkpoint.compressed_tensors_config import for_layer
from jitgemm.checkpoint.format import Config, Format, Scheme
from jitgemm.checkpoint.layouts import G, K, N, TensorLayout, stored
from jitgemm.checkpoint.reader import scheme_of
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import K_ALIGNMENT, ceil_div

BLOCK = 128
_FORMATS = ("compressed-tensors", "gptq", "awq", "w4afp8", "w8a8", "mxfp4", "nvfp4", "qserve")
_BYTES = ("I8", "U8")
_CALLED = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
"""What transformers calls the scales of FP8 per tensor."""
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_SCALES = ("weight_scale", "scales", "weight_scale_inv")


class Unsupported(ValueError):
    """jitgemm has no kernel or no reader for what a layer's config describes."""


@dataclass(frozen=True)
class Layout:
    """How a layer is stored.

    Attributes:
        format: what reads it; None for floats, which are quantised when loaded, and for layers that jitgemm packed.
        scheme: what the checkpoint's config says of it, in vLLM's words: group_size is 0 and strategy not "group" where a
            row or the whole weight has one scale.
        tensors: by what stands behind the layer's name.
        called: {name in `tensors`: what the files have behind the layer's name instead}.
        by_row: whether the parameter has a block's scales once for each row of the weight.
        k_alignment: what a rank's columns are a multiple of.
        name, config: of the layer in the files, and what says `scheme` of it.
    """

    format: Format | None = None
    scheme: Scheme = Scheme("", group_size=0, strategy="channel")
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    called: Mapping[str, str] = field(default_factory=dict)
    by_row: bool = False
    k_alignment: int = K_ALIGNMENT
    name: str = field(default="", compare=False)
    config: Config = field(default=None, compare=False)

    @property
    def needed(self) -> list[str]:
        """What the files must hold of a layer, as the format's reader asks for it."""
        static = self.scheme.format == "compressed-tensors"  # whose config alone says so; of others the tensor does
        needed = {"input_scale": static, "g_idx": self.scheme.ordered, "weight_g_idx": self.scheme.ordered}
        return [suffix for suffix, each in self.tensors.items() if needed.get(suffix, not each.optional)]

    @property
    def instead(self) -> str | None:
        """The activation in place of the checkpoint's, as `Inputs.instead`; None where that is taken as it is."""
        return None if self.scheme.inputs is None else self.scheme.inputs.instead

    @property
    def read_config(self) -> Config:
        """The checkpoint's config, as it describes the tensors of this layout."""
        return {**(self.config or {}), "weight_block_size": [1, BLOCK]} if self.by_row else self.config

    def sizes(self, n: int, k: int, parts: int = 1) -> dict[str, int]:
        """The number behind each word, and the columns of a group."""
        group = self.scheme.group_size or k
        return {"n": n, "k": k, "G": ceil_div(k, group), "parts": parts, "group": group}

    def cut(self, widths: Sequence[int], n: int, k: int, whole: int) -> Layout:
        """The layout for a rank: with a scale for each row where a block's rows are not together.

        Args:
            widths: this rank's rows of each of the layers that are joined.
            n: rows of all ranks.
            k, whole: columns of this rank, and of all.

        Raises:
            Unsupported: no weight can hold them.
        """
        if sum(widths) % 8 or k % self.k_alignment:
            wanted = f"expected rows in multiples of 8 and columns of {self.k_alignment} on each rank"
            raise Unsupported(f"{wanted}, got {sum(widths)} and {k}")
        size, least = self.scheme.group_size, CODES[self.scheme.code].least_group
        if size % least:
            raise Unsupported(f"group_size: expected a multiple of {least}, got {size}")
        if size and k != whole and math.gcd(size, k) % least:
            raise Unsupported(f"expected columns in multiples of {least} in groups of {size} on each rank, got {k}")
        for name, tensor in self.tensors.items():
            if tensor.tile is not None and any(each % tensor.tile[0] for each in (*widths, k)):
                wanted = f"rows and columns in multiples of {tensor.tile[0]} on each rank, as {name} has them in tiles"
                raise Unsupported(f"expected {wanted}, got {list(widths)} and {k}")
        if self.scheme.ordered and k != whole:
            raise Unsupported("expected no activation order (g_idx) where ranks have parts of the columns, got one")
        apart = widths if sum(widths) != n else widths[:-1]
        if self.scheme.strategy != "block" or not any(width % BLOCK for width in apart):
            return self
        if self.scheme.format != "w8a8":
            raise Unsupported(f"expected joined layers to have whole blocks of {BLOCK} rows on each rank, got {widths}")
        scale = self.tensors["weight_scale_inv"]
        rows = replace(scale, dims=(N, scale.dims[1]))
        scheme = replace(self.scheme, strategy="group")
        return replace(self, scheme=scheme, tensors={**self.tensors, "weight_scale_inv": rows}, by_row=True)

    def check(self, k: int) -> None:
        """Raises Unsupported for a layer of k columns that the format's reader cannot read."""
        if self.format is None:
            return
        sizes = self.sizes(BLOCK, k)  # of any number of rows
        headers = {name: TensorInfo(self.tensors[name].shape(sizes), self.tensors[name].dtype) for name in self.needed}
        try:
            scheme = self.format.scheme(self.read_config, self.name, headers)
            self.format.sizes(headers, scheme)
        except ValueError as error:
            raise Unsupported(str(error)) from error
        if scheme.unpackable:
            raise Unsupported("zero points: expected none with 8-bit integers, got some")


def floats(dtype: torch.dtype, k_alignment: int) -> Layout:
    """A layer of no format: its weight, in the model's type."""
    return Layout(tensors={"weight": stored(dtype, N, K)}, k_alignment=k_alignment)


def layout_of(
    config: Config, name: str, k: int, dtype: torch.dtype, header: Mapping[str, str], experts: bool = False
) -> Layout:
    """The layout that a checkpoint's config describes.

    Args:
        k: columns of the whole layer, of all ranks.
        dtype: the model's, in which GPTQ, AWQ and compressed-tensors mostly have their scales.
        header: {suffix: safetensors' type} of the layer's tensors; {} where no header is known.
        experts: whether it is one of an expert, which decides where a format has both and no header is known.

    Raises:
        Unsupported: there is no reader for such a layer, or it is not quantised.
    """
    try:
        config = formats.translated(config, name) or {}
        method = config.get("quant_method")
        if (method := _method(method)) != config.get("quant_method"):
            config = {**config, "quant_method": method}
        if method == "w4afp8" and header.get("weight", "" if experts else "F8_E4M3") == "F8_E4M3":
            method = "fp8"
        format = formats.by_method(method)
        # Next to FP8: DeepSeek-V4's experts, whose config describes its FP8 layers; ModelOpt's W4A8_MXFP4_FP8.
        if format is formats.by_name("w8a8") and _is_mxfp4(config, header):
            format = formats.by_name("mxfp4")
        if _is_nvfp4(config, name, header):
            format = formats.by_name("nvfp4")
            if config.get("quant_algo") == "MIXED_PRECISION":  # which leaves it to the tensors
                config = {**config, "quant_algo": "NVFP4" if "input_scale" in header else "W4A16_NVFP4"}
        if format is None or format.name not in _FORMATS:
            known = (method for name in _FORMATS for method in formats.by_name(name).methods)
            raise ValueError(f"quant_method: expected one of {', '.join(known)}, got {method!r}")
        if format.name == "qserve" and experts:
            raise ValueError(
                "quant_method: expected linears of QServe, got experts, whose tiles no engine's loader cuts"
            )
        scheme = scheme_of(format, config, name)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    _check(scheme, config)
    if (why := scheme.why_dense(k)) is not None:
        raise Unsupported(why)
    said = next((header[suffix] for suffix in _SCALES if suffix in header), "")
    scale = _DTYPES.get(said, torch.float32 if format.name in ("w4afp8", "w8a8") else dtype)
    columns = scheme.columns(k)
    tensors = {
        suffix: replace(
            each,
            dtypes=(scale, *each.dtypes) if each.is_scale else each.dtypes,
            dims=tuple(1 if dim == G and not columns else dim for dim in each.dims),
        )
        for suffix, each in format.tensors(scheme).items()
    }
    called = {own: other for own, other in _CALLED.items() if own in tensors and other in header}
    called = called if format.name == "w8a8" else {}
    strategy = "channel" if scheme.strategy == "group" and not columns else scheme.strategy
    scheme = replace(scheme, group_size=columns, strategy=strategy, ordered=scheme.ordered and columns > 0)
    alignment = scheme.rotation(k) or K_ALIGNMENT
    return Layout(format, scheme, tensors, called, k_alignment=alignment, name=name, config=config)


def _check(scheme: Scheme, config: Mapping[str, object]) -> None:
    """Raises Unsupported for what the format's reader has and engines' parameters do not."""
    if scheme.block not in (None, (BLOCK, BLOCK)):
        name = "weight_block_size" if scheme.format == "w8a8" else "block_structure"
        raise Unsupported(f"{name}: expected {[BLOCK, BLOCK]}, got {list(scheme.block or ())}")
    if scheme.form == "gemv":
        raise Unsupported("version: expected gemm, got 'gemv'")
    algorithm = str(config.get("quant_algo")).upper()
    of_8_bits = config.get("quant_method") == "modelopt" and scheme.format == "w8a8"
    if of_8_bits and algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"):
        expected = "FP8, FP8_PER_CHANNEL_PER_TOKEN, MXFP8, W4A8_MXFP4_FP8 or one of NVFP4 of ModelOpt"
        raise Unsupported(f"quant_algo: expected {expected}, got {config.get('quant_algo')!r}")
    if scheme.format == "compressed-tensors":
        kind = "float" if scheme.code == "e4m3" else "int"
        said, known = scheme.settings.get("format"), {"naive-quantized", f"{kind}-quantized"}
        known |= {"mxfp4-pack-quantized"} if scheme.form == "fp4" else {"mxfp8-quantized"} if kind == "float" else set()
        if said not in known and (scheme.form, kind) != ("packed", "int"):
            raise Unsupported(f"weights: expected another format for {scheme.code}, got {said!r}")
        if scheme.zero_points and scheme.strategy not in ("group", "channel"):
            raise Unsupported(f"strategy: expected group or channel with zero points, got {scheme.strategy}")


def _method(said: Any) -> Any:
    """A quant_method as the files say it, where an engine has put a name of its own for one of its models or algorithms."""
    return "modelopt" if str(said).startswith("modelopt_") else "fp8" if said == "deepseek_v4_fp8" else said


def _is_nvfp4(config: Mapping[str, Any], name: str, header: Mapping[str, str]) -> bool:
    """Whether a layer is stored as NVFP4: by its tensors, or by the config where no header is known."""
    of_modelopt = config.get("quant_method") == "modelopt"
    if config.get("quant_method") != "compressed-tensors" and not of_modelopt:
        return False
    if header:
        return "weight_global_scale" in header or (header.get("weight") in _BYTES and "weight_scale_2" in header)
    if of_modelopt:
        return "NVFP4" in str(config.get("quant_algo")).upper()
    return (for_layer(config, name).get("weights") or {}).get("strategy") == "tensor_group"


def _is_mxfp4(config: Mapping[str, object], header: Mapping[str, str]) -> bool:
    """Whether bytes are MXFP4's codes: by ModelOpt's name, or by their scales."""
    if config.get("quant_method") == "modelopt":
        return str(config.get("quant_algo")).upper() == "W4A8_MXFP4_FP8"
    scales = {header.get(name) for name in ("weight_scale", "weight_scale_inv", "scale")}
    return header.get("weight") in _BYTES and "F8_E8M0" in scales
