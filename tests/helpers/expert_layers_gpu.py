"""Layers of experts on a GPU against the CPU's."""

from __future__ import annotations

import torch
from moe_cases import Case

from jitgemm import fused_experts, fused_experts_reference

CODE_STEP = 2.0**-3
"""From an e4m3 code to the next, as a part of its value, at most: three bits of mantissa."""
GEMM_RMS = 2.2e-3
"""What cutting off bits costs an e4m3 GEMM at most, relative RMS: docs/notes/e4m3-accuracy.md."""
TOLERANCES = {"e4m3": (CODE_STEP, 2 * CODE_STEP, (CODE_STEP * 2 * GEMM_RMS) ** 0.5), "s8": (0.01, 0.04, 0.01)}
"""Of a row's error, of its largest element's, and of the root mean square of rows' errors; see `assert_near`."""


def assert_near(out: torch.Tensor, expected: torch.Tensor, mode: str) -> None:
    """Against a reference that quantises what its own first GEMM gives: where values are at a tie, a code apart.

    e4m3: the first GEMM of a GPU cuts off bits, GEMM_RMS. A value y between the GEMMs has two such factors; moved by
    d <= 2 * GEMM_RMS of itself it comes to lie across a tie in d / CODE_STEP of all cases, and then its code moves by
    CODE_STEP of it. So the mean square over many values is CODE_STEP * d, which the second GEMM hands on as it hands on
    the values themselves. A single row may have bad luck with its largest values: CODE_STEP is every code a step off,
    an element of a row that long twice that. What each kernel may do to what it is given is tested closer, below.

    int8: GEMMs are exact; a code is 1/127 of the row's largest value, and few are at a tie.
    """
    row, element, rms = TOLERANCES["e4m3" if mode == "e4m3" else "s8"]
    error, wanted = out.double() - expected.double(), expected.double()
    assert bool((error[(wanted == 0).all(1)] == 0).all()), "rows of nobody"
    rows = error.norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-300)
    elements = error.abs().amax(1) / wanted.abs().amax(1).clamp(min=1e-300)
    found = float(rows.max()), float(elements.max()), float(rows.square().mean().sqrt())
    assert all(map(float.__le__, found, (row, element, rms))), (
        f"row {found[0]:.4g} of {row:.4g} (number {int(rows.argmax())}), element {found[1]:.4g} of {element:.4g} (row "
        f"{int(elements.argmax())}), rms of {len(rows)} rows {found[2]:.4g} of {rms:.4g}"
    )


def assert_layer(case: Case, **changes) -> torch.Tensor:
    arguments = case.replaced(**changes)
    out = fused_experts(*arguments, **case.options)
    on_cpu = [each.to("cpu") if hasattr(each, "to") else each for each in arguments]
    options = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in case.options.items()}
    assert_near(out.cpu(), fused_experts_reference(*on_cpu, **options), case.mode)
    return out
