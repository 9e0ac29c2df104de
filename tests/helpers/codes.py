"""Random weights by seed of the 4-bit codes that are not int4: MXFP4, NVFP4 and two levels, in every form that kernels
know apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import builders
import mxfp4
import nvfp4
import pytest
import torch
import two_level


@dataclass(frozen=True)
class Kind:
    """A form of weights, and what differs from form to form in what tests say of it.

    Attributes:
        parts: of a seed, n and k, and as options experts and the device: what a pack function is given.
        name: as messages have it.
        label: how the labels of its kernels begin.
        format: how the name of its format begins.
        lhs: the type of its activations.
        reason: why other activations raise.
    """

    parts: Callable
    name: str
    label: str
    format: str
    lhs: str = "e4m3"
    reason: str = ""

    @property
    def lhs_dtype(self) -> torch.dtype:
        return builders.LHS_DTYPES[self.lhs]

    @property
    def schemes(self) -> tuple[str, str, str]:
        return ("token", "block", "affine" if self.lhs == "s8" else "e8m0")

    def lhs_of(self, scheme: str, seed: int, m: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        if scheme == "affine":
            return builders.affine_lhs(seed, m, k, device=device)
        make = {"token": builders.lhs, "block": builders.block_lhs, "e8m0": builders.e8m0_lhs}[scheme]
        return make(seed, m, k, self.lhs, device=device)


_NO_INTEGERS = "as no integers of 8 bits hold {}"
KINDS = {
    **{
        tier: Kind(
            partial(mxfp4.parts, tier=tier), "MXFP4", "e4m3mx-", "mx-", reason=_NO_INTEGERS.format("MXFP4")
        )
        for tier in mxfp4.TIERS
    },
    "near": Kind(nvfp4.parts, "NVFP4", "e4m3nvnear-channel-", "nv-", reason=_NO_INTEGERS.format("NVFP4")),
    "far": Kind(nvfp4.far, "NVFP4", "e4m3nv-channel-", "nv-", reason=_NO_INTEGERS.format("NVFP4")),
    "two levels": Kind(
        two_level.parts, "two levels", "s8tl-channel-", "tl-", "s8", "as no e4m3 holds the integers of 8 bits that"
    ),
}  # fmt: skip
"""MXFP4 with a base a row, a base for 128 k and a scale for 32 k; NVFP4 of two e4m3s and of two e5m2s; two levels."""
TIERS = {**{tier: KINDS[tier] for tier in mxfp4.TIERS}, "nvfp4": KINDS["near"], "two_level": KINDS["two levels"]}
"""Of `moe_cases.Case`."""

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
modes = pytest.mark.parametrize(("tier", "mode"), [*((tier, TIERS[tier].lhs) for tier in TIERS), ("two_level", "s8z")])
"""Of `moe_cases.Case`: each kind's activations, per token."""
