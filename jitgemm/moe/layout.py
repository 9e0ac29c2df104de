"""Where a rank's buffer, which the other ranks of the host write to, holds what. Addresses are not known here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from jitgemm.activations.scheme import Activation
from jitgemm.kernel.formats import LHS_GROUP, ceil_div

HEAD_BYTES = 256
"""At the start of a buffer: `Head` in include/jitgemm/moe/ranks.cuh."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class Layout:
    """What a rank's buffer holds, and where.

    Attributes:
        rank, world: this rank, and how many.
        max_tokens: of a rank in a call.
        k, n, top_k: of tokens, of results, and choices of a token.
        dtype: of x and of results.
        activation: how tokens are quantised, by token or by block.
    """

    rank: int
    world: int
    max_tokens: int
    k: int
    n: int
    top_k: int
    dtype: torch.dtype
    activation: Activation

    @property
    def slots(self) -> int:
        """Tokens of all ranks."""
        return self.world * self.max_tokens

    @property
    def scale_block_stride(self) -> int:
        """From a block's scales to the next one's, as `QuantizeCall.new_outputs` lays them out."""
        return 4 * ceil_div(self.slots, 4)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """By part: where it begins, in bytes; "end": of the buffer."""
        scales = ceil_div(self.k, LHS_GROUP) * self.scale_block_stride if self.activation.block else self.slots
        parts = {
            "codes": self.slots * self.k,
            "scale": 4 * scales,
            "zero": 4 * self.slots * self.activation.affine,
            "ids": 2 * 8 * self.slots * self.top_k,  # stamped, of two calls
            "weights": 4 * self.slots * self.top_k,
            "results": self.slots * self.n * self.dtype.itemsize,
        }
        sizes = [_ALIGNMENT * ceil_div(size, _ALIGNMENT) for size in parts.values()]
        return dict(zip((*parts, "end"), itertools.accumulate(sizes, initial=HEAD_BYTES)))
