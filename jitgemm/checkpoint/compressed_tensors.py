"""compressed-tensors (llm-compressor, vLLM): integer weights of 4 and 8 bits, float-quantized FP8, and MXFP4.

::

    weight_packed      int32 [n, ceil(k / 8)]  pack-quantized: q + 8, eight along k to a word, the low nibble first
                       int32 [n, ceil(k / 4)]  of 8 bits: q + 128, four to a word, the low byte first
                       uint8 [n, k / 2]        mxfp4-pack-quantized: e2m1, two along k to a byte, the low nibble first
    weight             int8 [n, k]             int-quantized: q, -8..7, or of 8 bits
                       float8_e4m3fn [n, k]    float-quantized: q
    weight_shape       [2]                     pack-quantized: n, k
    weight_scale       [n, G], [n, 1], [1]     strategy group, channel, tensor; mxfp4- and mxfp8-: e8m0 as uint8
                       [ceil(n / B), G]        strategy block: B rows and k / G columns share a scale
    weight_zero_point  int32 [ceil(n / 8), G]  pack-quantized: zero + 8, eight along n to a word; of 8 bits four
                       int8 [n, G]             int-quantized, and pack-quantized before release 0.9.4: zero
    weight_g_idx       int32 [k]               group of each column of the input; -1: columns stand in order
    input_scale        [1]                     static activations
    input_zero_point   [1]

    weight = (q - zero) * scale

The exponents of mxfp4-pack-quantized files of version 0.13.0 are two too low, and read two higher.
Weights of 8 bits need a config that says so. With zero points they can be dequantised alone. Checked against
compressed-tensors 0.10.2 and 0.20.1, 8 bits against the latter alone. That one no longer knows `weight_g_idx`
(activation order "group" is gone), but files with it are many. The scheme's activations change no weight, and are the
layer's business. Other tensors raise, such as `weight_chan_scale`, a second scale that vLLM's first W4A8 files had.
Presets (config_groups {"W4A16": ["Linear"]}) mean what they mean in 0.20.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from jitgemm.checkpoint.bits import check_codes, minus, pack_words, unpack_nibbles, unpack_words
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.compressed_tensors_config import METHOD, MXFP4, MXFP4_FORMAT, check_kinds, for_layer
from jitgemm.checkpoint.compressed_tensors_config import is_matrix, names as targeted, transforms_of
from jitgemm.checkpoint.format import Config, Format, Headers, Inputs, Scheme, Transform, block_of, check_known
from jitgemm.checkpoint.format import inputs_of, setting
from jitgemm.checkpoint.layouts import CODE_TYPES, E8M0, FLOATS, INT32, INT8, Dim, G, K, N
from jitgemm.checkpoint.layouts import TensorLayout, fits, stored
from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.tensors import describe
from jitgemm.weight.mxfp4 import NAN
from jitgemm.weight.two_level import MOST, holds, levels_of

_CODES = {(4, "int"): "int4", (8, "int"): "int8", (8, "float"): "e4m3", (4, "float"): "e2m1"}
"""By num_bits and type."""


class _Kind(NamedTuple):
    """What files may say of weights of a code: what may share a scale; the only group size, 0 for any; the types of
    `weight_packed`, of zero points that are not packed, and of scales; that there are no zero points; and whether the
    tensor says if there are, where a config says nothing."""

    strategies: tuple[str, ...] = ("group", "channel", "tensor", "block")
    group_size: int = 0
    words: torch.dtype | None = torch.int32
    zeros: tuple[torch.dtype, ...] = (torch.int8,)
    scales: tuple[torch.dtype, ...] = FLOATS
    symmetric: bool = False
    zeros_by_file: bool = False


_ANY = (torch.int8, torch.uint8, torch.float8_e4m3fn, *FLOATS)  # zero points of e4m3 mean nothing
_KINDS = {
    "int4": _Kind(("group", "channel", "tensor"), zeros_by_file=True),
    "int8": _Kind(),
    "e4m3": _Kind(words=None, zeros=_ANY, scales=(*FLOATS, *E8M0), symmetric=True),
    "e2m1": _Kind(("group",), EXPONENT_GROUP, torch.uint8, symmetric=True),
}
_SUPPORTED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
)  # fmt: skip

_TWO_TOO_LOW = re.compile(r"0\.13\.0$|0\.12\.3\.?a202512(14|15)$|0\.13\.1\.?a(2025|20260108$)")
"""Versions of the library that stored the exponents of MXFP4 two too low, tried with each preview on PyPI; those of
AutoRound's files, which names the version that is installed, are right."""

_OF_WEIGHTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
"""All that the library knows of a weight's scheme; zp_dtype and the observer's say nothing that tensors do not."""


class _CompressedTensors(Format):
    name, cuts = METHOD, True
    also = ("weight_zero_point", "weight_g_idx")
    suffixes = ("weight", "weight_packed", "weight_shape", "weight_scale", *also)

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        config = config or {}
        if setting(config, "quant_method") not in (None, METHOD):
            return False
        if (packed := names.get("weight_packed")) is not None:
            scale = names.get("weight_scale")
            e4m3 = packed.dtype == torch.uint8 and scale is not None and scale.dtype == torch.float8_e4m3fn
            return not e4m3 and "weight_global_scale" not in names  # of NVFP4: see nvfp4.py
        plain, listed = names.get("weight"), config.keys() & {"config_groups", "weights"} and "quant_algo" not in config
        if plain is None or "weight_scale" not in names or {"weight_scale_2", "qweight"} & set(names):
            return False
        return plain.dtype == torch.int8 or (plain.dtype == torch.float8_e4m3fn and bool(listed))

    def left_out(self, config: Config, prefix: str) -> str | None:
        check_kinds(config)
        if prefix and any(targeted(prefix, target) for target in (config or {}).get("ignore") or ()):
            return f"ignore: expected no target that matches the quantised layer {prefix!r}, got one"
        return None

    def stored_otherwise(self, config: Config, names: Sequence[str]) -> str | None:
        """Sparse, or not yet quantised."""
        sparsity = (config or {}).get("sparsity_config")
        sparse = sparsity.get("format") if isinstance(sparsity, Mapping) else None
        if sparse not in (None, "dense") and any(name.endswith(".bitmask") for name in names):
            return (
                f"sparsity_config: expected format 'dense', got {sparse!r}: the weights are stored sparse (bitmask, "
                "compressed), which is not read here; load them with their library and save them without it"
            )
        format, status = setting(config, "format"), setting(config, "quantization_status")
        uncompressed = format in ("dense", "fakequant") or status in ("initialized", "calibration", "frozen")
        if uncompressed and any(name.endswith("weight_scale") for name in names):
            return (
                f"the file was saved uncompressed (format {format!r}, quantization_status {status!r}): its weights are "
                "floats that its library would quantise; save it with save_compressed=True, or take the floats with "
                "strict=False and quantize_"
            )
        return None

    def transforms(self, config: Config, prefix: str) -> tuple[Transform, ...]:
        return transforms_of(config, prefix)

    def idle(self, config: Config, name: str) -> str | None:
        return "a transform's matrix" if is_matrix(config, name) else None

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        scheme = self._scheme(config, prefix, headers, "weight_packed" in headers)
        return replace(scheme, found=self._found(headers, scheme))

    def written(self, config: Config, prefix: str) -> Scheme:
        """What `write` makes of a layer by the config that it is written with."""
        return self._scheme(config, prefix, {}, for_layer(config, prefix)["format"] == "pack-quantized")

    def _scheme(self, config: Config, prefix: str, headers: Headers, packed: bool) -> Scheme:
        transforms, config = self.transforms(config, prefix), for_layer(config, prefix)
        weights, code, block = _weights_of(config)
        if not weights and config.get("format") in (None, MXFP4_FORMAT) and fits(headers, _MXFP4_TENSORS):
            weights, code = MXFP4, _CODES[4, "float"]
        stored_as = _KINDS[code]
        symmetric, size = weights.get("symmetric"), weights.get("group_size")
        strategy = weights.get("strategy") or "group"
        by_file = symmetric is None and stored_as.zeros_by_file and "weight_zero_point" in headers
        return Scheme(
            self.name, code, -1 if strategy in ("channel", "tensor") else size, strategy, block,
            zero_points=symmetric is False or by_file,
            ordered=weights.get("actorder") in (True, "group", "dynamic") or "weight_g_idx" in headers,
            inputs=inputs_of(config, code, headers),
            form="fp4" if stored_as.words is torch.uint8 else "packed" if packed else "",
            transforms=transforms, settings=config,
        )  # fmt: skip

    def _found(self, headers: Mapping[str, Any], scheme: Scheme) -> dict[str, TensorLayout]:
        """The forms that scales and zero points have in a file."""
        check_known(headers, (*self.tensors(scheme), *self.also))
        words, zero = headers.get("weight_packed"), headers.get("weight_zero_point")
        if words is not None and words.dtype == torch.uint8 and scheme.form != "fp4":
            got = describe(words)
            raise ValueError(f"weight_packed: expected int32, or num_bits 4 and type 'float' in a config, got {got}")
        if words is not None and _KINDS[scheme.code].words is None:
            raise ValueError(f"weight_packed: expected int32 of integers, got {describe(words)}")
        if zero is None and scheme.zero_points:
            raise ValueError("weight_zero_point: expected the tensor, as the config says symmetric: false; found none")
        if scheme.form == "fp4":
            return {}
        layouts = {"weight_scale": _layout(scheme, _dims(headers["weight_scale"]))}
        if zero is not None and zero.dtype == torch.int32:
            wanted = "int32 {shape}, packed along n, got {got}"
            layouts["weight_zero_point"] = stored(INT32, N / scheme.per_word, G, wanted=wanted)
        elif zero is not None:
            if zero.dtype not in _KINDS[scheme.code].zeros:
                raise ValueError(f"weight_zero_point: expected int32, packed, or int8, got {describe(zero)}")
            layouts["weight_zero_point"] = stored(zero.dtype, *_dims(zero), wanted="{shape} as weight_scale, got {got}")
        return layouts

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        if scheme.form == "fp4":
            return _MXFP4_TENSORS | scheme.static
        packed, word = scheme.form == "packed", scheme.per_word
        codes: dict[str, TensorLayout]
        if packed:
            wanted = "[n, ceil(k / %d)] for weight_shape [{n}, {k}], got {got}" % word
            codes = {"weight_packed": stored(INT32, N, K / word, wanted=wanted)}
            codes["weight_shape"] = stored((torch.int64, torch.int32), 2, optional=True)
        else:
            codes = {"weight": stored(CODE_TYPES.get(scheme.code, torch.int8), N, K)}
        dims = {"tensor": (), "channel": (N, 1)}.get(scheme.strategy, (N, G))
        layout = codes | {"weight_scale": _layout(scheme, dims)}
        if scheme.zero_points:
            layout["weight_zero_point"] = stored(INT32, N / word, G) if packed else stored(INT8, N, G)
        if scheme.ordered:
            actorder = (scheme.settings.get("weights") or {}).get("actorder")
            order = f"the tensor, as the config says actorder {actorder!r}"
            layout["weight_g_idx"] = stored((torch.int32, torch.int64), K, optional=order)
        return {**layout, **scheme.static, **scheme.found}

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        (n, k, group_size), eight = self.sizes(tensors, scheme).known, scheme.eight_bits
        middle = 128 if eight else 8
        if scheme.form == "fp4":
            codes, scale = unpack_nibbles(tensors["weight_packed"], 1), tensors["weight_scale"].view(torch.uint8)
            if _two_too_low(scheme.settings):
                if bool((scale > NAN - 3).any()):
                    version = scheme.settings["version"]
                    raise ValueError(
                        f"weight_scale: expected exponents up to 252 in a file of version {version}, got more"
                    )
                scale = scale + 2
            return CanonicalWeight(codes, scale, group_size=EXPONENT_GROUP, code="e2m1")
        zero, g_idx = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
        if scheme.form == "packed":
            q = minus(unpack_words(tensors["weight_packed"], 1, scheme.per_word)[:, :k], middle)
        else:
            q = tensors["weight"]
            if not eight:
                form = " in int-quantized int8; num_bits 8 in a config says that there are more,"
                check_codes("weight", q, -8, 7, form)
        if zero is not None and zero.dtype == torch.int32:
            zero = minus(unpack_words(zero, 0, scheme.per_word)[:n], middle)
        elif zero is not None:
            zero = scheme.by_row("weight_zero_point", zero, n)
        if "input_scale" in tensors and bool(tensors.get("input_zero_point", torch.zeros(1)).float().any()):
            raise ValueError(
                "input_zero_point: expected 0, as only symmetric static activations are supported; got another"
            )
        scale = scheme.by_row("weight_scale", tensors["weight_scale"], n)
        weight = CanonicalWeight(q, scale, group_size=group_size, code=scheme.code)
        if zero is not None and bool(zero.float().any()):
            if not scheme.zero_points:
                raise ValueError("weight_zero_point: expected zeros, as the config says symmetric: true; got others")
            if not eight:
                check_codes("weight_zero_point", zero, -8, 7)
            unsigned = (zero.to(torch.int16) + middle).to(torch.int16 if eight else torch.uint8)
            weight = replace(weight.with_zero_points(), zero=unsigned)
        if weight.scale.dtype == torch.float32 and weight.zero is not None and scheme.inputs == Inputs() and not eight:
            rows = _row_scales(weight)  # as two levels are written
            weight = weight if rows is None else replace(weight, row_scale=rows)
        # -1 is the library's mark for an order that calibration never set.
        return weight if g_idx is None or bool((g_idx == -1).any()) else weight.ordered(g_idx)

    def write(self, weight: CanonicalWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """A layer's tensors by suffix, on the weight's device: `read` makes the same weight of them.

        Args:
            weight: without offsets and activation order; its bias is not written.
            scheme: what `written` says of it.

        Raises:
            ValueError: the weight is not what the scheme says, or has no such form.
        """
        zero = weight.zero
        got = weight.code, min(weight.group_size, weight.k), zero is not None
        if got != (wanted := (scheme.code, scheme.columns(weight.k) or weight.k, scheme.zero_points)):
            raise ValueError(f"weight: expected code, group size and zero points {wanted}, got {got}")
        if weight.offset is not None or weight.permutation is not None:
            raise ValueError("weight: expected neither offsets nor an activation order, got one of them")
        if zero is not None and int(zero.max()) >= 16:
            raise ValueError("weight: expected zero points 0..15, got 16")
        tensors = {"weight_scale": weight.scale.contiguous()}
        if scheme.form == "fp4":
            tensors["weight_packed"] = weight.q[:, 0::2] | weight.q[:, 1::2] << 4
        elif scheme.form == "packed":
            q = weight.q if zero is not None else weight.q.view(torch.uint8) + (1 << weight.bits - 1)  # which wraps
            tensors["weight_packed"] = pack_words(q, 1, weight.bits)
            tensors["weight_shape"] = torch.tensor([weight.n, weight.k])
            if zero is not None:
                tensors["weight_zero_point"] = pack_words(zero.to(torch.uint8), 0, weight.bits)
        else:
            tensors["weight"] = weight.q.contiguous()
        sizes = self.sizes(tensors, scheme)
        if (sizes.n, sizes.k, sizes.group_size) != (weight.n, weight.k, got[1]):
            raise ValueError(f"weight: expected tensors of {weight.n} x {weight.k} in groups of {got[1]}, got {sizes}")
        return tensors


def _row_scales(weight: CanonicalWeight) -> torch.Tensor | None:
    """bf16 [n]: the largest that each row's fp32 scales are integers times, if two levels hold all of the weight so."""
    scale, least = weight.scale, weight.scale.amin(1)
    rows, left = torch.zeros_like(least, dtype=torch.bfloat16), (scale != 0).any(1)
    for factor in range(1, MOST + 1):  # of the least scale
        row = (least / factor).to(torch.bfloat16)
        tried = (left & (row > 0) & (row.float() * factor == least)).nonzero().flatten()
        values, scales = row[tried].float()[:, None], scale[tried]
        fits = tried[((scales / values).round() * values == scales).all(1) & (scales.amax(1) <= MOST * values[:, 0])]
        rows[fits], left[fits] = row[fits], False
        if not bool(left.any()):
            levels = levels_of(replace(weight, row_scale=rows))
            return rows if levels is not None and holds(*levels[:3]) else None
    return None


def _two_too_low(config: Mapping[str, Any]) -> bool:
    return setting(config, "provider") != "auto-round" and bool(
        _TWO_TOO_LOW.match(setting(config, "version", default=""))
    )


_MXFP8_FORMAT = "mxfp8-quantized"
_MXFP4_TENSORS = {
    "weight_packed": stored(torch.uint8, N, K / 2),
    "weight_shape": stored((torch.int64, torch.int32), 2, optional=True),
    "weight_scale": stored((torch.uint8, torch.float8_e8m0fnu), N, G),
}


def _dims(values: Any) -> tuple[Dim | int, ...]:
    """Of a value for each group, row, or the whole tensor."""
    return () if math.prod(values.shape) == 1 else (N, G)[: values.dim()]


def _layout(scheme: Scheme, dims: tuple[Dim | int, ...]) -> TensorLayout:
    """Of the scales, by the config's blocks or with these dimensions."""
    types = _KINDS[scheme.code].scales
    if scheme.settings.get("format") == _MXFP8_FORMAT:
        types = E8M0[::-1]
    if scheme.block is not None:
        return stored(types, N / scheme.block[0], K / scheme.block[1])
    return stored(types, *dims, wanted="[{n}, groups], [{n}, 1] or one element, got shape {got}")


# ---- config ----------------------------------------------------------------------------------------------------------


def _weights_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, tuple[int, int] | None]:
    """What a layer's config says of its weight, {} for nothing; its code; rows and columns of a block. Raises
    ValueError for what the kernel cannot have."""
    format, weights = setting(config, "format"), setting(config, "weights", default={})
    if format is not None and format not in _SUPPORTED and format != "mixed-precision":
        raise ValueError(f"format: expected {', '.join(_SUPPORTED)}, got {format!r}")
    if unknown := sorted(set(weights) - set(_OF_WEIGHTS)):
        raise ValueError(f"weights: expected only {', '.join(_OF_WEIGHTS)}, got also {', '.join(unknown)}")
    if weights.get("dynamic"):
        raise ValueError(f"weights: expected dynamic: false, got {weights['dynamic']!r}")
    width, number_type, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    code = _CODES.get((width, number_type)) if weights else "int4"
    if code is None:
        expected = "num_bits 4 or 8 and type 'int' or 'float'"
        raise ValueError(f"weights: expected {expected}, got {width} and {number_type!r}")
    may = _KINDS[code]
    if may.group_size and (strategy, weights.get("group_size")) != ("group", may.group_size):
        raise ValueError(
            f"weights: expected strategy group and group_size {EXPONENT_GROUP}, as MXFP4 has, of num_bits 4 and type "
            f"'float', got {strategy!r} and {weights.get('group_size')} (NVFP4's tensors are others)"
        )
    if strategy not in (None, *may.strategies):
        raise ValueError(f"weights: expected strategy {', '.join(may.strategies)}, got {strategy!r}")
    if strategy in ("channel", "tensor") and weights.get("group_size") not in (None, -1):
        raise ValueError(f"weights: expected no group_size with strategy {strategy}, got {weights['group_size']!r}")
    if may.symmetric and weights.get("symmetric") is False:
        raise ValueError("weights: expected symmetric: true with type 'float', got false")
    return weights, code, block_of("block_structure", weights.get("block_structure")) if strategy == "block" else None


FORMAT = _CompressedTensors()
