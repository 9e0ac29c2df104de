"""`quantize_w4` with moments: GPTQ's codes are a plain solver's, and make the result's error small."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from moments import inputs, lost, weights

import jitgemm
from jitgemm.weight.gptq import DAMPING, gptq
from jitgemm.weight.search import Search


def plain(w: torch.Tensor, moments: torch.Tensor, size: int, search: Search) -> torch.Tensor:
    """Column after column in fp64, with an inverse that loses a row and a column each time."""
    low, high = search.codes
    w, h = w.double().clone(), moments.double()
    importance = moments.diagonal()
    inverse = torch.linalg.inv(h + torch.eye(len(h)).double() * DAMPING * h.diagonal().mean())
    codes = torch.empty_like(w)
    for column in range(w.shape[1]):
        if column % size == 0:
            groups = slice(column, column + size)
            scale, zero = (each[:, 0] for each in search.scales(w[:, None, groups].float(), importance[None, groups]))
        codes[:, column] = (w[:, column] / scale).round().add(zero).clamp(low, high)
        error = (w[:, column] - (codes[:, column] - zero) * scale) / inverse[0, 0]
        w[:, column:] -= error[:, None] * inverse[0]
        inverse = (inverse - inverse[:, :1] @ inverse[:1] / inverse[0, 0])[1:, 1:]
    return codes


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("size", (32, 128, 256))
def test_codes_are_a_plain_solvers(size, symmetric):
    x, w = inputs(600, 256), weights(32, 256)
    search = Search(symmetric, torch.bfloat16, True, 8)
    codes, scale, zero = gptq(w, x.T @ x, size, search, act_order=False)
    expected = plain(w, x.T @ x, size, search)
    # fp32's rounding may turn a tie, after which what follows in the row may differ as well.
    assert float((codes == expected).double().mean()) > 0.98
    assert codes.min() >= search.codes[0] and codes.max() <= search.codes[1]
    assert scale.shape == zero.shape == (32, 256 // size)


@pytest.mark.parametrize("act_order", (True, False))
@pytest.mark.parametrize("group_size", (32, 128, "channel"))
def test_the_results_error_is_far_below_the_searchs(group_size, act_order):
    x, w = inputs(1000, 384), weights(64, 384)
    moments = x.T @ x
    found = jitgemm.quantize_w4(w, group_size, moments=moments, act_order=act_order)
    assert lost(w, found, moments) < 0.6 * lost(w, jitgemm.quantize_w4(w, group_size), moments)


def test_the_format_does_not_depend_on_the_order():
    x, w = inputs(500, 256), weights(16, 256)
    orders = [jitgemm.quantize_w4(w, 64, moments=x.T @ x, act_order=order) for order in (True, False)]
    assert orders[0].format == orders[1].format and all(each.permutation is None for each in orders)
    assert not torch.equal(orders[0].blocks, orders[1].blocks)


@pytest.mark.parametrize(
    ("tokens", "k", "group_size", "unused", "zeros"),
    [
        *((600, k, 128, slice(0), slice(0)) for k in (144, 272, 400)),  # a last group of fewer columns
        (20, 128, 32, slice(40, 60), slice(0)),  # inputs that are always zero
        # Later groups make up for earlier ones' errors, in which zeros may take part: within what was lost.
        (300, 128, 32, slice(0), slice(32, 64)),
    ],
)
def test_less_is_lost_than_without_moments(tokens, k, group_size, unused, zeros):
    x, w = inputs(tokens, k), weights(16, k)
    x[:, unused], w[:, zeros] = 0, 0
    for order in (True, False):
        found = jitgemm.quantize_w4(w, group_size, moments=x.T @ x, act_order=order)
        assert lost(w, found, x.T @ x) < lost(w, jitgemm.quantize_w4(w, group_size), x.T @ x)
    nothing = jitgemm.quantize_w4(w, group_size, moments=torch.zeros(k, k))
    assert bool(nothing.dequantize().isfinite().all())


def test_what_earlier_groups_leave_to_a_group_of_zeros_may_be_too_small_for_a_scale():
    x, w = inputs(300, 64), weights(16, 64) * 1e-4
    w[:, 32:] = 0
    x[:, 32:] *= 1e4
    found = jitgemm.quantize_w4(w, 32, moments=x.T @ x, scale_dtype=torch.float16, act_order=False)
    assert bool(found.dequantize().isfinite().all())
    with pytest.raises(ValueError, match="underflows"):
        jitgemm.quantize_w4(w * 1e-6, 32, moments=x.T @ x, scale_dtype=torch.float16)


def test_experts_are_quantised_one_by_one():
    w = torch.stack([weights(16, 64, seed) for seed in range(3)])
    moments = torch.stack([x.T @ x for x in (inputs(100, 64, seed) for seed in range(3))])
    together = jitgemm.quantize_w4(w, 32, moments=moments)
    for e in range(3):
        alone = jitgemm.quantize_w4(w[e], 32, moments=moments[e])
        assert torch.equal(together[e].dequantize(), alone.dequantize())


@pytest.mark.parametrize(
    ("moments", "error", "message"),
    [
        (torch.zeros(64, 32), ValueError, r"expected fp32 \[64, 64\] on cpu"),
        (torch.zeros(64, 64, dtype=torch.float64), ValueError, "expected fp32"),
        (torch.full((64, 64), torch.nan), ValueError, ".*finite"),
        (-torch.eye(64), ValueError, ".*sums of squares"),
        ([[1.0]], TypeError, "expected"),
    ],
)
def test_wrong_moments_are_named(moments, error, message):
    for quantise in (partial(jitgemm.quantize_w4, group_size=32), partial(jitgemm.quantize_w8, lhs_dtype=torch.int8)):
        with pytest.raises(error, match=f"moments: {message}"):
            quantise(weights(16, 64), moments=moments)


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.int8))
def test_8_bits_lose_less_with_moments(dtype):
    x, w = inputs(1000, 384), weights(64, 384)
    w[3], moments = 0, x.T @ x
    found, nearest = (jitgemm.quantize_w8(w, dtype, moments=given) for given in (moments, None))
    assert found.format == nearest.format and lost(w, found, moments) < 0.6 * lost(w, nearest, moments)
    codes, scales = found.unpack()[:2]
    assert torch.equal(scales, nearest.unpack()[1]) and not codes[3].float().any()
    experts = jitgemm.quantize_w8(torch.stack((w, w)), dtype, moments=torch.stack((moments, moments)))
    assert torch.equal(experts.blocks[1], found.blocks)
