"""Floats quantised to MXFP4 and to two levels: the least error of those tried, with calibration, and in models."""

from __future__ import annotations

import itertools

import mxfp4
import pytest
import torch
from moments import inputs, lost, weights

import jitgemm
import jitgemm.nn
from jitgemm.nn import W4A8Experts, W4A8Linear
from jitgemm.weight.gptq import gptq
from jitgemm.weight.quantize_mxfp4 import Powers

VALUES = torch.tensor([sign * each for each in mxfp4.MAGNITUDES for sign in (1, -1)], dtype=torch.float64)
POWERS = (0, 1, -1)
E4M3 = torch.float8_e4m3fn


# ---- weights ---------------------------------------------------------------------------------------------------------


def best_of_three(w: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """The power of two of each row of fp64 [n, 32], by trying all values of e2m1."""
    usual = w.abs().amax(-1).log2().floor() - 2
    tried = torch.stack([(usual + change).exp2() for change in POWERS])
    nearest = (w[None, :, :, None] / tried[:, :, None, None] - VALUES).square().amin(-1) * tried[:, :, None].square()
    return tried.gather(0, (nearest * importance).sum(-1).argmin(0, keepdim=True))[0]


def test_calibrated_values_are_the_solver_s_by_powers_that_lose_least_of_what_matters():
    """The solver itself is held against a plain one in test_gptq_solver.py."""
    x, w = inputs(600, 256), weights(32, 256)
    importance = (x.T @ x).double().diagonal()[:32]
    scale, _ = Powers().scales(w[:, :32], importance)
    assert torch.equal(scale.double(), best_of_three(w[:, :32].double(), importance))
    assert not torch.equal(scale, Powers().scales(w[:, :32])[0])
    values, scale, _ = gptq(w, x.T @ x, 32, Powers(), act_order=False)
    packed = jitgemm.quantize_mxfp4(w, moments=x.T @ x, act_order=False)
    assert torch.equal(packed.dequantize(), values * scale.repeat_interleave(32, 1))


QUANTISERS = {"mxfp4": jitgemm.quantize_mxfp4, "two-level": jitgemm.quantize_w4_two_level}
of_both = pytest.mark.parametrize("quantise", QUANTISERS.values(), ids=QUANTISERS)


@of_both
@pytest.mark.parametrize("k", [256, 240])
@pytest.mark.parametrize("act_order", [False, True])
def test_moments_make_the_results_error_small(quantise, act_order, k):
    x, w = inputs(600, k), weights(64, k)
    moments = x.T @ x
    weight = quantise(w, moments=moments, act_order=act_order)
    assert lost(w, weight, moments) < 0.6 * lost(w, quantise(w), moments)


@of_both
@pytest.mark.parametrize("calibrated", [False, True])
def test_each_expert_is_fitted_to_its_own_inputs(quantise, calibrated):
    w = torch.stack([weights(16, 64, seed) for seed in (1, 2)])
    moments = torch.stack([x.T @ x for x in (inputs(200, 64, seed) for seed in (3, 4))]) if calibrated else None
    weight = quantise(w, moments=moments)
    for e in range(2):
        alone = quantise(w[e], moments=None if moments is None else moments[e])
        assert torch.equal(weight[e].dequantize(), alone.dequantize())


NAN = weights(16, 64).index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(torch.nan))
WRONG = [
    *((quantise, NAN, {}, r"w: expected finite values, got nan at \[3, 7\]") for quantise in QUANTISERS.values()),
    *((quantise, weights(16, 64), {"moments": torch.eye(32)}, r"moments: expected fp32 \[64, 64\]")
      for quantise in QUANTISERS.values()),
    (jitgemm.quantize_mxfp4, weights(16, 64), {"lhs_dtype": torch.int8}, "lhs_dtype: expected float8_e4m3fn"),
    (jitgemm.quantize_w4_two_level, weights(16, 64), {"lhs_dtype": E4M3}, "lhs_dtype: expected int8"),
    (jitgemm.quantize_mxfp4, weights(16, 64), {"act_order": 1}, "act_order: expected a bool"),
]  # fmt: skip


@pytest.mark.parametrize("quantise, w, options, message", WRONG)
def test_wrong_arguments_are_named(quantise, w, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        quantise(w, **options)


# ---- two levels ------------------------------------------------------------------------------------------------------


def best_of(values: torch.Tensor, row: float) -> float:
    """Least squared error of one group, by every factor, zero point and code."""
    least = float("inf")
    for factor, zero in itertools.product(range(1, 17), range(16)):
        levels = (torch.arange(16.0, dtype=torch.float64) - zero) * factor
        levels = levels[(levels >= -128) & (levels <= 127)] * row
        least = min(least, float((values[:, None] - levels).abs().amin(1).square().sum()))
    return least


def test_errors_are_close_to_the_least_of_all_factors_and_zero_points():
    w = weights(8, 288) * torch.tensor([1.0, 3.0, 0.2]).repeat_interleave(128)[:288]
    w[3] += 0.5
    found = jitgemm.quantize_w4_two_level(w)
    scale, by_group = found.unpack().row_scale.double()[:, 0], w.double().split(128, 1)
    errors = [part.square().sum(1) for part in (found.dequantize().double() - w.double()).split(128, 1)]
    for row, group in itertools.product(range(8), range(3)):
        least = best_of(by_group[group][row], float(scale[row]))
        assert least <= float(errors[group][row]) * (1 + 1e-9) and float(errors[group][row]) < 1.1 * least, (row, group)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_scales_are_the_rows_largest_value_over_119_and_factors_at_most_16(scale):
    w = weights(16, 512) * scale
    w[0, 5] = 40 * scale  # of one group the factor is 16, of the others of its row 1 or 2
    found = jitgemm.quantize_w4_two_level(w)
    q, factor, zero = found.unpack()
    assert torch.equal(found.unpack().row_scale[:, 0], (w.abs().amax(1) / 119).bfloat16())
    assert int(factor.max()) <= 16 and int(factor[0, 1:].max()) <= 2
    low, high = -zero.int() * factor, (15 - zero.int()) * factor
    assert int(low.min()) >= -128 and int(high.max()) <= 127


def test_rows_of_zeros_are_zeros():
    w = weights(16, 256)
    w[3], w[5, :128] = 0, 0
    found = jitgemm.quantize_w4_two_level(w).dequantize()
    assert not found[3].any() and not found[5, :128].any() and found[5, 128:].any()


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["e4m3", "e4m3_block"])
def test_linears_of_a_model(activation):
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 64, bias=False))
    weights = {name: model.get_submodule(name).weight.detach() for name in "02"}
    report = jitgemm.nn.quantize_(model, scheme="mxfp4", activation=activation)
    assert report == ["0", "2"] and all(0 < error < 0.02 for error in report.errors.values())
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, W4A8Linear) and layer.activation == activation
        assert torch.equal(layer.weight.dequantize(), jitgemm.quantize_mxfp4(weight).dequantize())


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss", "nemotron"])
def test_stacked_experts_of_a_model(kind, calibrated):
    pytest.importorskip("transformers", minversion="5")
    from expert_models import build, experts_of, logits

    model, dense = build(kind), build(kind)
    ids = torch.arange(64)[None] % 96
    report = jitgemm.nn.quantize_(model, scheme="mxfp4", calibration=[ids] if calibrated else None)
    assert set(experts_of(dense)) < set(report) and all(0 < error < 0.02 for error in report.errors.values())
    for name, module in experts_of(dense).items():
        layer = model.get_submodule(name)
        assert isinstance(layer, W4A8Experts) and layer.w13.weight.format.powers and layer.w2.weight.format.powers
        if not calibrated and kind == "qwen3":
            expected = jitgemm.quantize_mxfp4(module.down_proj.detach())
            assert torch.equal(layer.w2.weight.dequantize(), expected.dequantize())
    assert logits(model).nan_to_num().any()
