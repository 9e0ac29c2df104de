"""Random weights by seed in every form that kernels know apart: int4, 8 bits, MXFP4, NVFP4 and two levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import builders
import mxfp4
import nvfp4
import pytest
import torch
import two_level

import jitgemm
from jitgemm.kernel.formats import Problem
from jitgemm.weight.correction import with_sums


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
        bits: of a weight's code.
        blocks: whether activations may have a scale per token and 128 k.
    """

    parts: Callable
    name: str
    label: str
    format: str
    lhs: str = "e4m3"
    reason: str = ""
    bits: int = 4
    blocks: bool = True

    @property
    def gemm(self) -> Callable:
        return getattr(jitgemm, f"gemm_w{self.bits}a8_nt")

    @property
    def lhs_dtype(self) -> torch.dtype:
        return builders.LHS_DTYPES[self.lhs]

    @property
    def schemes(self) -> tuple[str, str, str]:
        blocks = ("block", "e8m0") if self.blocks else ("token", "token")
        return ("token", blocks[0], "affine" if self.lhs == "s8" else blocks[1])

    def problem(self, m: int, n: int, k: int, scheme: str, **options: Any) -> Problem:
        """What the kernel of a call is chosen for; options as `Problem` has them."""
        weight, by_block = self.parts(4, 64, k).packed, scheme in ("block", "e8m0")
        options |= {"lhs_group": 128 * by_block, "lhs_e8m0": scheme == "e8m0", "sums": weight.sums}
        return Problem(m, n, k, self.lhs, weight.format, **options)

    def lhs_of(self, scheme: str, seed: int, m: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        if scheme == "affine":
            return builders.affine_lhs(seed, m, k, device=device)
        make = {"token": builders.lhs, "block": builders.block_lhs, "e8m0": builders.e8m0_lhs}[scheme]
        return make(seed, m, k, self.lhs, device=device)

    def lhs_for(self, weight: Any, scheme: str, seed: int, m: int, device: str = "cuda") -> tuple[torch.Tensor, ...]:
        """With the byte 127 on all sides of each row, a NaN of e4m3 and the largest int8; with sums for corrections."""
        x, *scales = self.lhs_of(scheme, seed, m, weight.k, device)
        if weight.correction:
            x = with_sums(x, weight.correction)
        whole = torch.full((m + 2, x.shape[1] + 48), 127, dtype=torch.uint8, device=device)
        whole[1:-1, 16:-32] = x.view(torch.uint8)
        return whole[1:-1, 16:-32].view(x.dtype), *scales


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


def rows_of(lhs: tuple[torch.Tensor, ...], rows: torch.Tensor | slice) -> tuple[torch.Tensor, ...]:
    """These rows of activations and of their scales: PyTorch takes no rows of FP8 itself."""
    x, *scales = lhs
    return x.view(torch.uint8)[rows].view(x.dtype), *(each[rows] for each in scales)


def _plain(
    seed: int, n: int, k: int, experts: int | None = None, device: str = "cpu", group: int = 128, sums: str = "f32",
    **form: Any,
) -> builders.WeightParts:  # fmt: skip
    """int4, or 8 bits of a type: as `builders.weight_parts` makes them."""
    if group >= k or not group:  # a short row has no groups, which offsets, corrections and other sums need
        form, sums = {name: value for name, value in form.items() if name not in ("offset", "correction")}, "f32"
    each = [builders.weight_parts(seed + e, n, k, group, device=device, **form) for e in range(experts or 1)]
    return replace(builders.stacked(each) if experts else each[0], sums=sums)


def _form(label: str, lhs: str = "e4m3", blocks: bool = True, **form: Any) -> Kind:
    return Kind(partial(_plain, **form), "int", label, "", lhs, bits=form.get("bits", 4), blocks=blocks)


FORMS = KINDS | {
    "int4 of any": _form("e4m3-g128-"),
    "int4, e4m3": _form("e4m3fast-g128-", codes="e4m3", scales="negative"),
    "int4, int8": _form("s8fast-g128-", "s8", codes="s8", scales="negative"),
    "int4 per row": _form("s8fast-channel-", "s8", codes="s8", group=0),
    "zero points": _form("e4m3-g32-", zero_point=True, max_zero=16, group=32),
    "zero points, int8": _form("s8-g64-", "s8", zero_point=True, max_zero=16, group=64, scale_type="fp16"),
    "offsets": _form("e4m3-g64-", offset=True, group=64),
    "corrections": _form("s8x-g128-", "s8", False, codes="s8", zero_point=True, max_zero=16, correction=True),
    "sums in f16": _form("e4m3-g64-", blocks=False, zero_point=True, group=64, sums="f16"),
    "exact sums": _form("s8-g32-", "s8", group=32, sums="exact"),
    "8 bits per row": _form("e4m3w8-channel-", codes="e4m3", bits=8, scale_type="fp32", group=0),
    "8 bits in groups": _form("s8w8-g32-", "s8", codes="s8", bits=8, group=32, scales="negative"),
    "8 bits in strips": _form(
        "e4m3w8-g128-", codes="e4m3", bits=8, scale_type="fp32", uniform_strip_scale=True
    ),
}  # fmt: skip
"""And int4 and 8 bits with what their kernels know apart."""


def _mx_pairs(tier: str, device: str) -> mxfp4.Parts:
    """Every code with every exponent of a base; by "group" with every scale by itself."""
    parts = mxfp4.all_pairs(device)
    if tier == "block":  # another base for the last block
        parts.scales[:, 12:] += 40
    if tier == "group":
        parts.scales[0, 0] = 90
    assert parts.packed.format.group_size == mxfp4.TIERS[tier]
    return parts


def _zero_points(device: str) -> builders.WeightParts:
    """Every code with every zero point 0..16, in every row."""
    row = torch.arange(16)[:, None]
    q, zero = (row + torch.arange(544)) % 16, (row + torch.arange(17)) % 17
    scale = torch.full((16, 17), 2.0**-4, dtype=torch.bfloat16, device=device)
    return builders.WeightParts(q.to(torch.uint8).to(device), scale, zero.to(torch.uint8).to(device), 32)


def _by_powers_of_two(device: str, **form: Any) -> builders.WeightParts:
    """Every code next to any other, times powers of two."""
    made = builders.weight_parts(1, 16, 480, device=device, **form)
    powers = torch.exp2(torch.arange(made.scale.numel(), device=device) % 8 - 4.0).view(made.scale.shape)
    return replace(made, scale=powers.to(made.scale.dtype))


PRODUCTS: dict[str, Callable[[str], Any]] = {
    **{tier: partial(_mx_pairs, tier) for tier in mxfp4.TIERS},
    "near": nvfp4.near_pairs,
    "far": nvfp4.all_pairs,
    "two levels": two_level.all_triples,
    **{
        f"{order} for {lhs}": partial(_by_powers_of_two, group_size=32, codes=order)
        for order, lhs in (("any", "e4m3"), ("any", "s8"), ("e4m3", "e4m3"), ("s8", "s8"))
    },
    **{f"zero points for {lhs}": _zero_points for lhs in builders.LHS_DTYPES},
    "8 bits for e4m3": partial(_by_powers_of_two, group_size=32, codes="e4m3", bits=8),
    "8 bits for s8": partial(_by_powers_of_two, group_size=0, codes="s8", bits=8),
}  # fmt: skip
"""Parts that hold every code with every scale or zero point that it may meet, of a device; and for which activations."""


def one_hot(name: str, columns: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations for these products: each row picks out one column."""
    dtype = KINDS[name].lhs_dtype if name in KINDS else builders.LHS_DTYPES[name.split()[-1]]
    x = torch.zeros(len(columns), k, dtype=torch.int8, device=columns.device)
    x[torch.arange(len(columns), device=columns.device), columns] = {torch.int8: 1, torch.float8_e4m3fn: 0x38}[dtype]
    return x.view(dtype), torch.ones(len(columns), device=columns.device)


kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
forms = pytest.mark.parametrize("kind", FORMS.values(), ids=FORMS)
form_and_scheme = pytest.mark.parametrize(
    ("kind", "scheme"), [pytest.param(kind, at % 3, id=name) for at, (name, kind) in enumerate(FORMS.items())]
)
"""Each form with one of its three schemes of activations, in turn."""
MODES = [*((tier, TIERS[tier].lhs) for tier in TIERS), ("two_level", "s8z")]
"""Of `moe_cases.Case`: each kind's activations, per token."""
