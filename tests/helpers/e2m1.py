"""Random weights of e2m1 codes by seed, MXFP4 and NVFP4, in every form that kernels know apart."""

from __future__ import annotations

from collections.abc import Callable

import mxfp4
import nvfp4
import pytest

KINDS: dict[str, Callable] = {
    **{tier: lambda *sizes, tier=tier, **options: mxfp4.parts(*sizes, tier, **options) for tier in mxfp4.TIERS},
    "near": nvfp4.parts,
    "far": nvfp4.far,
}
"""MXFP4 with a base a row, a base for 128 k and a scale for 32 k; NVFP4 of two e4m3s and of two e5m2s. Functions of a
seed, n and k, and as options of experts and the device."""
LABELS = {"near": "e4m3nvnear-channel-", "far": "e4m3nv-channel-"}
"""How kernels' labels begin, where not with `MX_LABEL`."""
MX_LABEL = "e4m3mx-"
TIERS = (*mxfp4.TIERS, "nvfp4")
"""Of `moe_cases.Case`."""

kinds = pytest.mark.parametrize("kind", KINDS)
tiers = pytest.mark.parametrize("tier", TIERS)


def name_of(kind: str) -> str:
    return "MXFP4" if kind in mxfp4.TIERS else "NVFP4"
