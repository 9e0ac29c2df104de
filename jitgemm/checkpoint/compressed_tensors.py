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
Other tensors are refused, such as `weight_chan_scale`, a second scale that vLLM's first W4A8 files had. Presets
(config_groups {"W4A16": ["Linear"]}) mean what they mean in 0.20.0.
Knows no files: tensors and config come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from jitgemm.checkpoint.affine import check_codes
from jitgemm.checkpoint.bits import minus_8, minus_128, unpack_bytes, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo, activation_order
from jitgemm.checkpoint.compressed_tensors_config import CODES, METHOD, block_of, for_layer, left_out, weights_of
from jitgemm.checkpoint.format import Format, Headers, Inputs, Scheme, Sizes, check_known, inputs_of
from jitgemm.checkpoint.layouts import CODE_TYPES, E8M0, FLOATS, INT32, INT8, PARTS, Dim, G, K, N, TensorLayout
from jitgemm.checkpoint.layouts import check_shape, check_single, measure, stored
from jitgemm.checkpoint.settings import Config
from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.formats import ceil_div
from jitgemm.tensors import describe, dtype_name, one_of

_E4M3 = torch.float8_e4m3fn


class _CompressedTensors(Format):
    name, methods, cuts = METHOD, (METHOD,), True
    also = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale", "output_scale",
            "output_zero_point")  # fmt: skip

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        if config is not None and config.get("quant_method") not in (None, METHOD):
            return False
        if "weight_packed" in names:
            return True
        plain, said = names.get("weight"), (config or {}).keys() & {"config_groups", "weights"}
        return (
            plain is not None
            and (plain.dtype == torch.int8 or (plain.dtype == _E4M3 and bool(said) and "quant_algo" not in config))
            and "weight_scale" in names
            and not {"weight_scale_2", "qweight"} & set(names)
        )

    def left_out(self, config: Config, prefix: str) -> str | None:
        return left_out(config, prefix)

    def scheme(self, config: Config, prefix: str = "", headers: Headers = None) -> Scheme:
        config = for_layer(config, prefix)
        weights = weights_of(config)
        code = CODES[weights.get("num_bits", 8), weights.get("type", "int")] if weights else "int4"
        symmetric, strategy, block = weights.get("symmetric"), weights.get("strategy") or "group", block_of(weights)
        if code == "e4m3" and symmetric is False:
            raise ValueError("weights: expected symmetric: true with type 'float', got false")
        zeros_given = "weight_zero_point" in (headers or ())
        packed = config.get("format") == "pack-quantized" if headers is None else "weight_packed" in headers
        inputs = Inputs.of(config["input_activations"]) if "input_activations" in config else None
        return Scheme(
            self.name,
            code,
            -1 if strategy in ("channel", "tensor") else weights.get("group_size"),
            strategy,
            block,
            zero_points=symmetric is False or (symmetric is None and code == "int4" and zeros_given),
            ordered=weights.get("actorder") in (True, "group", "dynamic"),
            inputs=inputs or inputs_of(config, code, headers),
            form="packed" if packed else "",
            found={} if "weight_scale" not in (headers or ()) else _found(headers, code, block),
            settings=config,
        )

    def tensors(self, scheme: Scheme, k: int | None = None) -> dict[str, TensorLayout]:
        word, groups = 8 if not scheme.eight_bits else 4, scheme.groups(k)
        if scheme.form == "packed":
            codes = {"weight_packed": stored(INT32, N, K / word), "weight_shape": stored(torch.int64, 2, optional=True)}
            zero = stored(INT32, N / word, groups)
        else:
            codes = {"weight": stored(CODE_TYPES.get(scheme.code, torch.int8), N, K)}
            zero = stored(INT8, N, groups)
        by_strategy = {"tensor": (PARTS,), "channel": (N, 1), "block": _of_block(scheme.block)}
        types = (*FLOATS, *(E8M0 if scheme.code == "e4m3" else ()))
        layout = codes | {"weight_scale": stored(types, *by_strategy.get(scheme.strategy, (N, groups)))}
        if scheme.zero_points:
            layout["weight_zero_point"] = zero
        if scheme.ordered:
            layout["weight_g_idx"] = stored(INT32, K)
        return layout | scheme.static | scheme.found

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        codes = ("weight_packed", "weight_shape") if scheme.form == "packed" else ("weight",)
        check_known(headers, (*codes, "weight_scale", *self.also))
        n, k = _size_of_codes(headers, scheme)
        scale, zero = headers["weight_scale"], headers.get("weight_zero_point")
        if scale.dtype not in scheme.found["weight_scale"].dtypes:
            raise ValueError(f"weight_scale: expected {one_of(REAL_TYPES)}, got {dtype_name(scale.dtype)}")
        if scheme.block is not None:
            size = scheme.block[1]
            groups = ceil_div(k, size)
            check_shape("weight_scale", scale, ceil_div(n, scheme.block[0]), groups)
        else:
            groups = _groups("weight_scale", scale, n)
            size = _group_size(scheme, k, groups)
        if zero is None and scheme.zero_points:
            raise ValueError("weight_zero_point: expected the tensor, as the config says symmetric: false; found none")
        if zero is not None:
            words = ceil_div(n, _per_word(scheme)), groups
            if zero.dtype not in (torch.int32, torch.int8) and scheme.code != "e4m3":
                raise ValueError(f"weight_zero_point: expected int32, packed, or int8, got {describe(zero)}")
            if zero.dtype == torch.int32 and tuple(zero.shape) != words:
                raise ValueError(
                    f"weight_zero_point: expected int32 {list(words)}, packed along n, got {list(zero.shape)}"
                )
            if zero.dtype == torch.int8 and _groups("weight_zero_point", zero, n) != groups:
                raise ValueError(f"weight_zero_point: expected [{n}, {groups}] as weight_scale, got {list(zero.shape)}")
        if "weight_g_idx" in headers:
            check_shape("weight_g_idx", headers["weight_g_idx"], k)
        elif scheme.ordered and groups > 1:
            actorder = scheme.settings["weights"]["actorder"]
            raise ValueError(f"weight_g_idx: expected the tensor, as the config says actorder {actorder!r}; found none")
        if "input_scale" in headers:
            check_single("input_scale", headers["input_scale"])
        return Sizes(n, k, size)

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        sizes = self.sizes(tensors, scheme)
        q, zero, permutation = _codes(tensors, scheme, sizes), _zero_point(tensors, scheme, sizes.n), None
        # -1 is the library's mark for an order that calibration never set.
        if "weight_g_idx" in tensors and not bool((tensors["weight_g_idx"] == -1).any()):
            permutation = activation_order(tensors["weight_g_idx"], sizes.group_size)
        if permutation is not None:
            q = q[:, permutation.long()]
        if "input_scale" in tensors and bool(tensors.get("input_zero_point", torch.zeros(1)).float().any()):
            raise ValueError(
                "input_zero_point: expected 0, as only symmetric static activations are supported; got another"
            )
        return CanonicalWeight(
            q=q if zero is None else q.view(torch.uint8) + (8 if not scheme.eight_bits else 128),  # which wraps
            scale=scheme.by_row("weight_scale", tensors["weight_scale"], sizes.n),
            zero=zero,
            group_size=sizes.group_size,
            permutation=permutation,
            code=scheme.code,
        )


def _per_word(scheme: Scheme) -> int:
    return 8 if not scheme.eight_bits else 4


def _found(headers: Mapping[str, Any], code: str, block: tuple[int, int] | None) -> dict[str, TensorLayout]:
    """The forms that scales, zero points and orders have in a file."""
    types = (*FLOATS, *(E8M0 if code == "e4m3" else ()))
    found = {"weight_scale": stored(types, *(_of_block(block) or _dims(headers["weight_scale"])))}
    if (zero := headers.get("weight_zero_point")) is not None:
        words = N / (8 if code == "int4" else 4), G
        found["weight_zero_point"] = stored(zero.dtype, *(words if zero.dtype == torch.int32 else _dims(zero)))
    if "weight_g_idx" in headers:
        found["weight_g_idx"] = stored((torch.int32, torch.int64), K)
    return found


def _dims(values: Any) -> tuple[Dim | int, ...]:
    """Of a value for each group, row, or the whole tensor."""
    return (PARTS,) if math.prod(values.shape) == 1 else (N, G)[: values.dim()]


def _of_block(block: tuple[int, int] | None) -> tuple[Dim, ...]:
    return () if block is None else (N / block[0], K / block[1])


def _size_of_codes(tensors: Mapping[str, Any], scheme: Scheme) -> tuple[int, int]:
    """n, k; k rounded up to a word where `weight_shape` is a header."""
    if scheme.form != "packed":
        size = measure(tensors, {"weight": stored(CODE_TYPES.get(scheme.code, torch.int8), N, K)})
        return size["n"], size["k"]
    per_word, packed = _per_word(scheme), tensors["weight_packed"]
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ValueError(
            f"weight_packed: expected int32 [n, ceil(k / {per_word})] of {32 // per_word}-bit integers, got "
            + describe(packed)
            + (" (fp4 is not supported)" if packed.dtype == torch.uint8 else "")
        )
    if scheme.code == "e4m3":
        raise ValueError("weight_packed: expected the tensor weight for type 'float', got a packed one")
    n, words = packed.shape
    shape = tensors.get("weight_shape")
    if not isinstance(shape, torch.Tensor):
        return n, per_word * words
    if shape.is_floating_point():
        raise ValueError(f"weight_shape: expected integers [2], got {describe(shape)}")
    shape = shape.tolist()
    if len(shape) != 2 or shape[0] != n or ceil_div(shape[1], per_word) != words:
        got = list(packed.shape)
        raise ValueError(f"weight_packed: expected [n, ceil(k / {per_word})] for weight_shape {shape}, got {got}")
    return n, shape[1]


def _codes(tensors: Mapping[str, torch.Tensor], scheme: Scheme, sizes: Sizes) -> torch.Tensor:
    """[n, k]: int8 of -8..7, or 8-bit codes."""
    if scheme.form == "packed":
        packed = tensors["weight_packed"]
        q = minus_8(unpack_nibbles(packed, 1)) if not scheme.eight_bits else minus_128(unpack_bytes(packed, 1))
        return q[:, : sizes.k]
    if not scheme.eight_bits:
        check_codes(
            "weight",
            tensors["weight"],
            -8,
            7,
            " in int-quantized int8; num_bits 8 in a config says that there are more,",
        )
    return tensors["weight"]


def _groups(name: str, values: torch.Tensor | TensorInfo, n: int) -> int:
    """Columns of [n, G]; 1 for a value for each row or for the whole tensor."""
    shape = tuple(values.shape)
    if math.prod(shape) == 1 or shape == (n,):
        return 1
    if len(shape) != 2 or shape[0] != n:
        raise ValueError(f"{name}: expected [{n}, groups], [{n}, 1] or one element, got shape {list(shape)}")
    return shape[1]


def _group_size(scheme: Scheme, k: int, groups: int) -> int:
    size = k if scheme.strategy in ("channel", "tensor") else scheme.group_size
    if size is None or size <= 0:
        if groups < 1 or k % groups:
            raise ValueError(f"weight_scale: expected columns that divide k = {k}, got {groups}")
        size = k // groups
    if k % size or k // size != groups:
        raise ValueError(f"weight_scale: expected {k / size:g} columns for k = {k} and group_size {size}, got {groups}")
    return size


def _zero_point(tensors: Mapping[str, torch.Tensor], scheme: Scheme, n: int) -> torch.Tensor | None:
    """[n, G] on the scale of codes from 0, or None."""
    if "weight_zero_point" not in tensors:
        return None
    zero, nibbles = tensors["weight_zero_point"], not scheme.eight_bits
    if zero.dtype == torch.int32:
        zero = (minus_8(unpack_nibbles(zero, 0)) if nibbles else minus_128(unpack_bytes(zero, 0)))[:n]
    else:
        zero = scheme.by_row("weight_zero_point", zero, n)
    if not bool(zero.float().any()):
        return None
    if not scheme.zero_points:
        raise ValueError("weight_zero_point: expected zeros, as the config says symmetric: true; got others")
    if not nibbles:
        return zero.to(torch.int16) + 128
    check_codes("weight_zero_point", zero, -8, 7)
    return (zero + 8).view(torch.uint8)


FORMAT = _CompressedTensors()
