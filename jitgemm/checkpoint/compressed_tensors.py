"""compressed-tensors (llm-compressor, vLLM): integer weights of 4 and 8 bits, and float-quantized FP8.

::

    weight_packed      int32 [n, ceil(k / 8)]  pack-quantized: q + 8, eight along k to a word, the low nibble first
                       int32 [n, ceil(k / 4)]  of 8 bits: q + 128, four to a word, the low byte first
    weight             int8 [n, k]             int-quantized: q, -8..7, or of 8 bits
                       float8_e4m3fn [n, k]    float-quantized: q
    weight_shape       [2]                     pack-quantized: n, k
    weight_scale       [n, G], [n, 1], [1]     strategy group, channel, tensor; mxfp8-quantized: e8m0 as uint8
                       [ceil(n / B), G]        strategy block: B rows and k / G columns share a scale
    weight_zero_point  int32 [ceil(n / 8), G]  pack-quantized: zero + 8, eight along n to a word; of 8 bits four
                       int8 [n, G]             int-quantized, and pack-quantized before release 0.9.4: zero
    weight_g_idx       int32 [k]               group of each column of the input; -1: columns stand in order
    input_scale        [1]                     static activations
    input_zero_point   [1]

    weight = (q - zero) * scale

Weights of 8 bits need a config that says so. With zero points they can be dequantised alone. Checked against compressed-tensors
0.10.2 and 0.20.0, 8 bits against the latter alone. That one no longer knows `weight_g_idx` (activation order "group" is
gone), but files with it are many. The scheme's activations change no weight, and are the layer's business.
Other tensors raise, such as `weight_chan_scale`, a second scale that vLLM's first W4A8 files had. Presets
(config_groups {"W4A16": ["Linear"]}) mean what they mean in 0.20.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint.bits import check_codes, minus
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.compressed_tensors_config import CODES, METHOD, block_of, for_layer, left_out, weights_of
from jitgemm.checkpoint.format import Config, Format, Headers, Inputs, Scheme, Sizes, check_known, inputs_of
from jitgemm.checkpoint.layouts import CODE_TYPES, E8M0, FLOATS, INT32, INT8, PARTS, Dim, G, K, N, TensorLayout, stored
from jitgemm.tensors import describe

_E4M3 = torch.float8_e4m3fn


class _CompressedTensors(Format):
    name, methods, cuts = METHOD, (METHOD,), True
    also = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale", "output_scale",
            "output_zero_point")  # fmt: skip

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        config = config or {}
        if config.get("quant_method") not in (None, METHOD):
            return False
        if "weight_packed" in names:
            return True
        plain, said = names.get("weight"), config.keys() & {"config_groups", "weights"} and "quant_algo" not in config
        if plain is None or "weight_scale" not in names or {"weight_scale_2", "qweight"} & set(names):
            return False
        return plain.dtype == torch.int8 or (plain.dtype == _E4M3 and bool(said))

    def left_out(self, config: Config, prefix: str) -> str | None:
        return left_out(config, prefix)

    def scheme(self, config: Config, prefix: str = "", headers: Headers = None) -> Scheme:
        config, names = for_layer(config, prefix), headers or {}
        weights = weights_of(config)
        code = CODES[weights.get("num_bits", 8), weights.get("type", "int")] if weights else "int4"
        symmetric, strategy, size = (
            weights.get("symmetric"),
            weights.get("strategy") or "group",
            weights.get("group_size"),
        )
        if code == "e4m3" and symmetric is False:
            raise ValueError("weights: expected symmetric: true with type 'float', got false")
        packed = config.get("format") == "pack-quantized" if headers is None else "weight_packed" in headers
        inputs = Inputs.of(config["input_activations"]) if "input_activations" in config else None
        scheme = Scheme(
            self.name,
            code,
            -1 if strategy in ("channel", "tensor") else size if size and size > 0 else None,
            strategy,
            block_of(weights),
            zero_points=symmetric is False or (symmetric is None and code == "int4" and "weight_zero_point" in names),
            ordered=weights.get("actorder") in (True, "group", "dynamic") or "weight_g_idx" in names,
            inputs=inputs or inputs_of(config, code, headers),
            form="packed" if packed else "",
            settings=config,
        )
        return scheme if headers is None else replace(scheme, found=self._found(headers, scheme))

    def _found(self, headers: Mapping[str, Any], scheme: Scheme) -> dict[str, TensorLayout]:
        """The forms that scales and zero points have in a file."""
        check_known(headers, (*self.tensors(scheme), *self.also))
        words, zero = headers.get("weight_packed"), headers.get("weight_zero_point")
        if words is not None and (words.dtype == torch.uint8 or scheme.code == "e4m3"):
            raise ValueError(f"weight_packed: expected int32 of integers, got {describe(words)} (fp4 is not supported)")
        if zero is None and scheme.zero_points:
            raise ValueError("weight_zero_point: expected the tensor, as the config says symmetric: false; found none")
        found = {"weight_scale": _layout(scheme, _dims(headers["weight_scale"]))}
        if zero is not None and zero.dtype == torch.int32:
            wanted = "int32 {shape}, packed along n, got {got}"
            found["weight_zero_point"] = stored(INT32, N / scheme.per_word, G, wanted=wanted)
        elif zero is not None:
            if zero.dtype != torch.int8 and scheme.code != "e4m3":
                raise ValueError(f"weight_zero_point: expected int32, packed, or int8, got {describe(zero)}")
            found["weight_zero_point"] = stored(zero.dtype, *_dims(zero), wanted="{shape} as weight_scale, got {got}")
        return found

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        packed, word = scheme.form == "packed", scheme.per_word
        if packed:
            wanted = "[n, ceil(k / %d)] for weight_shape [{n}, {k}], got {got}" % word
            codes = {"weight_packed": stored(INT32, N, K / word, wanted=wanted)}
            codes["weight_shape"] = stored((torch.int64, torch.int32), 2, optional=True)
        else:
            codes = {"weight": stored(CODE_TYPES.get(scheme.code, torch.int8), N, K)}
        dims = {"tensor": (PARTS,), "channel": (N, 1)}.get(scheme.strategy, (N, G))
        layout = codes | {"weight_scale": _layout(scheme, dims)}
        if scheme.zero_points:
            layout["weight_zero_point"] = stored(INT32, N / word, G) if packed else stored(INT8, N, G)
        if scheme.ordered:
            layout["weight_g_idx"] = stored((torch.int32, torch.int64), K, optional=True)
        return layout | scheme.static | scheme.found

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        sizes = super().sizes(headers, scheme)
        if scheme.ordered and "weight_g_idx" not in headers and sizes.group_size != sizes.k:
            actorder = scheme.settings["weights"]["actorder"]
            raise ValueError(f"weight_g_idx: expected the tensor, as the config says actorder {actorder!r}; found none")
        return sizes

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        sizes, middle, packed = self.sizes(tensors, scheme), 128 if scheme.eight_bits else 8, scheme.form == "packed"
        q = scheme.unpack(tensors["weight_packed"], 1)[:, : sizes.k] if packed else tensors["weight"]
        if not packed and not scheme.eight_bits:
            form = " in int-quantized int8; num_bits 8 in a config says that there are more,"
            check_codes("weight", q, -8, 7, form)
        zero = _zero_point(tensors, scheme, sizes.n)
        if zero is None:
            q = minus(q, middle) if packed else q
        elif not packed:
            q = q.view(torch.uint8) + middle  # which wraps
        if "input_scale" in tensors and bool(tensors.get("input_zero_point", torch.zeros(1)).float().any()):
            raise ValueError(
                "input_zero_point: expected 0, as only symmetric static activations are supported; got another"
            )
        scale, g_idx = scheme.by_row("weight_scale", tensors["weight_scale"], sizes.n), tensors.get("weight_g_idx")
        weight = CanonicalWeight(q, scale, zero, group_size=sizes.group_size, code=scheme.code)
        # -1 is the library's mark for an order that calibration never set.
        return weight if g_idx is None or bool((g_idx == -1).any()) else weight.ordered(g_idx)


def _dims(values: Any) -> tuple[Dim | int, ...]:
    """Of a value for each group, row, or the whole tensor."""
    return (PARTS,) if math.prod(values.shape) == 1 else (N, G)[: values.dim()]


def _layout(scheme: Scheme, dims: tuple[Dim | int, ...]) -> TensorLayout:
    """Of the scales, by the config's blocks or with these dimensions."""
    types = (*FLOATS, *(E8M0 if scheme.code == "e4m3" else ()))
    if scheme.block is not None:
        return stored(types, N / scheme.block[0], K / scheme.block[1])
    return stored(types, *dims, wanted="[{n}, groups], [{n}, 1] or one element, got shape {got}")


def _zero_point(tensors: Mapping[str, torch.Tensor], scheme: Scheme, n: int) -> torch.Tensor | None:
    """[n, G] on the scale of codes from 0, or None."""
    zero = tensors.get("weight_zero_point")
    if zero is None:
        return None
    if zero.dtype == torch.int32:
        zero = minus(scheme.unpack(zero, 0)[:n], 128 if scheme.eight_bits else 8)
    else:
        zero = scheme.by_row("weight_zero_point", zero, n)
    if not bool(zero.float().any()):
        return None
    if not scheme.zero_points:
        raise ValueError("weight_zero_point: expected zeros, as the config says symmetric: true; got others")
    if scheme.eight_bits:
        return zero.to(torch.int16) + 128
    check_codes("weight_zero_point", zero, -8, 7)
    return (zero + 8).view(torch.uint8)


FORMAT = _CompressedTensors()
