"""quantize_w4_two_level: the least error of those tried, integers within 8 bits."""

from __future__ import annotations

import itertools

import pytest
import torch

import jitgemm


def normal(n: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def relative(found: jitgemm.W4Weight, w: torch.Tensor) -> float:
    return float((found.dequantize() - w).norm() / w.norm())


def best_of(values: torch.Tensor, row: float) -> float:
    """Least squared error of one group, by every factor, zero point and code."""
    least = float("inf")
    for factor, zero in itertools.product(range(1, 17), range(16)):
        levels = (torch.arange(16.0, dtype=torch.float64) - zero) * factor
        levels = levels[(levels >= -128) & (levels <= 127)] * row
        least = min(least, float((values[:, None] - levels).abs().amin(1).square().sum()))
    return least


def test_errors_are_close_to_the_least_of_all_factors_and_zero_points():
    w = normal(8, 288) * torch.tensor([1.0, 3.0, 0.2]).repeat_interleave(128)[:288]
    w[3] += 0.5
    found = jitgemm.quantize_w4_two_level(w)
    scale, by_group = found.unpack().row_scale.double()[:, 0], w.double().split(128, 1)
    errors = [part.square().sum(1) for part in (found.dequantize().double() - w.double()).split(128, 1)]
    for row, group in itertools.product(range(8), range(3)):
        least = best_of(by_group[group][row], float(scale[row]))
        assert least <= float(errors[group][row]) * (1 + 1e-9) and float(errors[group][row]) < 1.1 * least, (row, group)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_scales_are_the_rows_largest_value_over_119_and_factors_at_most_16(scale):
    w = normal(16, 512) * scale
    w[0, 5] = 40 * scale  # of one group the factor is 16, of the others of its row 1 or 2
    found = jitgemm.quantize_w4_two_level(w)
    q, factor, zero = found.unpack()
    assert torch.equal(found.unpack().row_scale[:, 0], (w.abs().amax(1) / 119).bfloat16())
    assert int(factor.max()) <= 16 and int(factor[0, 1:].max()) <= 2
    low, high = -zero.int() * factor, (15 - zero.int()) * factor
    assert int(low.min()) >= -128 and int(high.max()) <= 127


def test_groups_lose_about_as_much_as_with_scales_of_their_own():
    w = normal(64, 1024)
    own, zeros = (jitgemm.quantize_w4(w, 128, symmetric=symmetric) for symmetric in (True, False))
    channel, two = jitgemm.quantize_w4(w, "channel"), jitgemm.quantize_w4_two_level(w)
    assert relative(two, w) < relative(own, w) < relative(channel, w)
    assert relative(two, w) < 1.03 * relative(zeros, w)


def test_rows_of_zeros_are_zeros():
    w = normal(16, 256)
    w[3], w[5, :128] = 0, 0
    found = jitgemm.quantize_w4_two_level(w).dequantize()
    assert not found[3].any() and not found[5, :128].any() and found[5, 128:].any()


@pytest.mark.parametrize("calibrated", [False, True])
def test_experts_are_quantised_one_by_one(calibrated):
    w = torch.stack([normal(16, 256, seed) for seed in (1, 2)])
    x = normal(500, 256, 3) * torch.linspace(0.1, 3, 256)
    moments = (x.T @ x).expand(2, -1, -1).contiguous() if calibrated else None
    found = jitgemm.quantize_w4_two_level(w, moments=moments)
    for e in range(2):
        alone = jitgemm.quantize_w4_two_level(w[e], moments=None if moments is None else moments[e])
        assert torch.equal(found[e].dequantize(), alone.dequantize())


def test_moments_make_the_results_error_small():
    w, x = normal(64, 512), normal(4000, 512, 2) @ normal(512, 512, 3)
    x[:, :9] *= 8
    lost = [
        float(((found.dequantize() - w) @ x.T).norm() / (w @ x.T).norm())
        for found in (jitgemm.quantize_w4_two_level(w), jitgemm.quantize_w4_two_level(w, moments=x.T @ x))
    ]
    assert lost[1] < 0.8 * lost[0]


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "lhs_dtype: expected int8, as no e4m3 holds .*, got float8_e4m3fn", {"lhs_dtype": torch.float8_e4m3fn}),
        (ValueError, r"w: expected finite values, got nan at \[3, 7\]", {"w": normal(8, 64).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(torch.nan))}),
        (ValueError, r"moments: expected fp32 \[64, 64\]", {"moments": torch.eye(32)}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(error, message, options):
    with pytest.raises(error, match=message):
        jitgemm.quantize_w4_two_level(**({"w": normal(8, 64)} | options))
