"""QServe's QoQ (OmniServe, SGLang's qoq): int4 weights for int8 activations, per group in two levels, or per channel.

::

    qweight    int8 [n, k / 2]    codes 0..15 in tiles of 32 rows by 32 columns, see below
    s1_scales  fp16 [n]
    per group:
    s2_scales  int8 [G, n]        within each 32 channels in the order 0, 8, 16, 24, 1, 9, 17, 25, ...
    s2_zeros   int8 [G, n]        -zero * s2_scales modulo 256, in the same order
    per channel:
    s1_szeros  fp16 [n]           zero * s1_scales, rounded

    per group    weight = (q * s2_scale + s2_zero) * s1_scale, the bracket in int8
    per channel  weight = q * s1_scale - s1_szero

The bracket is (q - zero) * s2_scale. s2_scale * s1_scale has at most 18 bits and is exact in fp32, so a group's scale
is that product, and its zero point -s2_zero / s2_scale. For int8 activations groups of 128 and more are packed in the
two levels that they have. The kernel multiplies four nibbles in one 32-bit word and adds
bytes: a product above 255 would spill into its neighbour and a sum outside -128..127 wrap. The quantiser avoids both,
and files with either raise.

A tile is 512 bytes, 16 for each lane of a warp; the low nibble is row r, the high one row r + 16::

    byte  = 64 * (row % 8) + 16 * (column % 16 / 4) + 8 * (column / 16) + 4 * (row / 8 % 2) + column % 4

Read from OmniServe's w4a8_linear.py and the kernels qgemm/w4a8_per_group and w4a8_per_chn. Mixture-of-experts files
stack experts along the first dimension, each laid out so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jitgemm.checkpoint.bits import integer_zero, scaled_zero, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Config, Format, Headers, Inputs, Scheme, Sizes, check_setting, setting
from jitgemm.checkpoint.layouts import BYTES, INT8, G, K, N, TensorLayout, measure, stored
from jitgemm.tensors import describe
from jitgemm.weight.two_level import levels_of

_TILE = 32
_CODES = stored(BYTES, N, K / 2)
_GROUP = 128
"""Columns of a group in every engine."""
WRITTEN = (
    f"rows in multiples of {_TILE}, and columns in multiples of {_GROUP}, or of {_TILE} up to there, as QServe's tiles"
)
METHOD = "qoq"
"""What SGLang calls the format."""


class _QServe(Format):
    name = "qserve"
    also = ("s2_scales", "s2_zeros", "s1_szeros")
    suffixes = ("qweight", "s1_scales", *also)

    def detect(self, names: Mapping[str, TensorInfo], config: Config) -> bool:
        return {"qweight", "s1_scales"} <= set(names)

    def scheme(self, config: Config, prefix: str, headers: Headers) -> Scheme:
        check_setting(config, 4, "bits", "wbits", "w_bit")
        size, form = setting(config, "group_size"), "group" if "s2_scales" in headers else "channel"
        return Scheme(self.name, group_size=size, strategy=form, zero_points=True, inputs=Inputs())

    def tensors(self, scheme: Scheme) -> dict[str, TensorLayout]:
        layout, rows, groups = {"qweight": _CODES}, stored(torch.float16, N), stored(INT8, G, N)
        if scheme.strategy == "channel":
            return layout | {"s1_scales": rows, "s1_szeros": rows}
        return layout | {"s1_scales": rows, "s2_scales": groups, "s2_zeros": groups}

    def sizes(self, headers: Mapping[str, Any], scheme: Scheme) -> Sizes:
        n, k = measure(headers, {"qweight": _CODES}).values()
        if n % _TILE or k % _TILE or not n * k:
            got = describe(headers["qweight"])
            raise ValueError(f"qweight: expected n and k to be multiples of {_TILE}, got {got}")
        sizes = super().sizes(headers, scheme)
        if k % sizes.known[2]:
            raise ValueError(f"group_size: expected a divisor of k = {k}, got {sizes.group_size}")
        return sizes

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        _, _, group_size = self.sizes(tensors, scheme).known
        q, s1 = _codes(tensors["qweight"]), tensors["s1_scales"][:, None]
        if scheme.strategy == "channel":
            return scaled_zero(q, s1, tensors["s1_szeros"][:, None], group_size)
        tiles = (tensors[name].unflatten(1, (-1, 8, 4)) for name in ("s2_scales", "s2_zeros"))  # 0, 8, 16, 24, 1, ...
        s2, s2_zero = (tile.transpose(-2, -1).flatten(1).T.to(torch.int32) for tile in tiles)
        zero = _zero_points(q, s2, s2_zero, group_size)
        weight = integer_zero(q, s2.float() * s1.float(), zero, group_size, name="-s2_zeros / s2_scales")
        return replace(weight, row_scale=tensors["s1_scales"])

    def written(self, config: Config, prefix: str) -> Scheme:
        """What `write` makes of a layer by the config that it is written with."""
        return self.scheme(config, prefix, {"s2_scales": None})

    def write(self, weight: CanonicalWeight, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors of a layer in two levels, with groups of 128 or one for a row, whose scale fp16 holds.

        Raises:
            ValueError: it is another, or its sizes are no multiples of the tiles'.
        """
        levels = levels_of(weight)
        if levels is None:
            raise ValueError(f"weight: expected one in two levels, got {weight.code} in groups of {weight.group_size}")
        q, factor, zero, scale = levels
        n, k = q.shape
        if not writes((n, k)):
            raise ValueError(f"weight: expected {WRITTEN}, got {n} and {k}")
        if not torch.equal(scale.half().float(), scale.float()):
            raise ValueError(f"s1_scales: expected numbers that fp16 holds, got others, the least {float(scale.min())}")
        product = (-zero.int() * factor.int()).to(torch.int8)  # which wraps

        def tiled(values: torch.Tensor) -> torch.Tensor:
            return values.T.unflatten(1, (-1, 4, 8)).transpose(-2, -1).flatten(1).to(torch.int8).contiguous()

        return {
            "qweight": _tiles(q), "s1_scales": scale.half(), "s2_scales": tiled(factor), "s2_zeros": tiled(product),
        }  # fmt: skip


def writes(sizes: tuple[int, int]) -> bool:
    """Whether a layer of these rows and columns can be `WRITTEN`."""
    n, k = sizes
    return n % _TILE == 0 and k % (_TILE if k <= _GROUP else _GROUP) == 0


def _tiles(q: torch.Tensor) -> torch.Tensor:
    """int8 [n, k / 2] of codes uint8 [n, k]: what `_codes` reads."""
    n, k = q.shape
    # row / 16, row / 8 % 2, row % 8; column / 16, column % 16 / 4, column % 4
    tiles = q.reshape(n // _TILE, 2, 2, 8, k // _TILE, 2, 4, 4).permute(0, 4, 3, 6, 5, 2, 7, 1)
    return (tiles[..., 0] | tiles[..., 1] << 4).reshape(n, k // 2).view(torch.int8)


def _codes(qweight: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k], 0..15."""
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    # tile rows, tile columns, row % 8, column % 16 / 4, column / 16, row / 8 % 2, column % 4; of nibbles also row / 16
    tiles = qweight.reshape(n // _TILE, k // _TILE, 8, 4, 2, 2, 4)
    nibbles = unpack_nibbles(tiles.unsqueeze(-1), -1)
    return nibbles.permute(0, 7, 5, 2, 1, 4, 3, 6).reshape(n, k)


def _zero_points(q: torch.Tensor, s2: torch.Tensor, s2_zero: torch.Tensor, group_size: int) -> torch.Tensor:
    """int32 [n, G]: the zero points that the stored products stand for. Raises unless the kernel's bytes hold them."""
    if bool((s2 <= 0).any()):
        raise ValueError(f"s2_scales: expected 1..127, got {int(s2.min())}")
    product = -s2_zero & 0xFF  # zero * s2
    if bool((product % s2 != 0).any()):
        raise ValueError("s2_zeros: expected multiples of s2_scales, got others")
    zero = product // s2
    by_group = q.unflatten(1, (-1, group_size))
    least, most = by_group.amin(2).int(), by_group.amax(2).int()
    if bool((most * s2 > 255).any()):
        raise ValueError(f"s2_scales: expected q * s2_scales up to 255, got {int((most * s2).max())}")
    low, high = int(((least - zero) * s2).min()), int(((most - zero) * s2).max())
    if low < -128 or high > 127:
        raise ValueError(f"s2_zeros: expected (q - zero) * s2_scales within -128..127, got {low}..{high}")
    return zero


FORMAT = _QServe()
