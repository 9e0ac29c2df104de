"""quantize_w4: codes for the rounded scale, errors no worse than plain round to nearest, and what it refuses."""

from __future__ import annotations

import re
from functools import partial

import builders
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_weights import same_weight

import jitgemm
from jitgemm.kernel.formats import ceil_div
from jitgemm.weight.quantize import quantize_w4
from jitgemm.weight.search import clip_ratios

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MARGIN = 1 + 1e-5
"""The search compares errors of fp32 steps; they are recomputed here in fp64."""


def weight(seed: int, n: int, k: int, *, outliers: bool = False) -> torch.Tensor:
    g = builders.generator(seed)
    w = torch.randn((n, k), generator=g) * 0.02
    if outliers:
        w[:, torch.randperm(k, generator=g)[: k // 64]] *= 20
    return w


def by_group(w: torch.Tensor, group_size: int) -> torch.Tensor:
    """fp64 [n, groups, group_size], padded with zeros."""
    n, k = w.shape
    group_size = min(group_size, k)
    groups = ceil_div(k, group_size)
    return torch.nn.functional.pad(w.double(), (0, groups * group_size - k)).view(n, groups, group_size)


def plain_signed(w: torch.Tensor, group_size: int, dtype: torch.dtype, divisor: float) -> torch.Tensor:
    """Round to nearest with max |w| / divisor, fp64 [n, groups, group_size]."""
    w = by_group(w.float(), group_size)
    scale = (w.abs().amax(-1, keepdim=True).float() / divisor).to(dtype).double()
    steps = torch.where(scale == 0, 0.0, w / scale)
    return steps.round().clamp(-8, 7) * scale


def plain_with_zero_points(w: torch.Tensor, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest over a range that includes 0, fp64 [n, groups, group_size]."""
    w = by_group(w.float(), group_size)
    low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low).float() / 15).to(dtype).double()
    steps, zero = (torch.where(scale == 0, 0.0, x / scale) for x in (w, -low))
    zero = zero.round().clamp(0, 15)
    return ((steps.round() + zero).clamp(0, 15) - zero) * scale


def errors(got: torch.Tensor, w: torch.Tensor, group_size: int) -> torch.Tensor:
    """Squared error of each group, fp64 [n, groups]."""
    return (by_group(got, group_size) - by_group(w.float(), group_size)).square().sum(-1)


# --- errors ---


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 4).map(lambda x: 8 * x),
    k=st.integers(1, 24).map(lambda x: 16 * x),
    group_size=st.sampled_from((32, 64, 128, 256, 10_000)),
    dtype=st.sampled_from(SCALE_DTYPES),
    outliers=st.booleans(),
    clip_steps=st.sampled_from((0, 3, 32)),
)
@settings(max_examples=40, deadline=None)
def test_no_group_is_worse_than_plain_round_to_nearest(seed, n, k, group_size, dtype, outliers, clip_steps):
    w = weight(seed, n, k, outliers=outliers)
    whole = by_group(w, group_size)
    signed = quantize_w4(w, group_size, scale_dtype=dtype, clip_steps=clip_steps).dequantize()
    for divisor in (7.0, 7.5, 8.0) if clip_steps else (7.0,):
        plain = (plain_signed(w, group_size, dtype, divisor) - whole).square().sum(-1)
        assert bool((errors(signed, w, group_size) <= plain * MARGIN).all())
    unsigned = quantize_w4(w, group_size, symmetric=False, scale_dtype=dtype, clip_steps=clip_steps).dequantize()
    plain = (plain_with_zero_points(w, group_size, dtype) - whole).square().sum(-1)
    assert bool((errors(unsigned, w, group_size) <= plain * MARGIN).all())


@pytest.mark.parametrize("group_size", [32, 128, 1024])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_without_a_search_it_is_plain_round_to_nearest(group_size, dtype):
    w = weight(1, 16, 1024)
    signed = quantize_w4(w, group_size, scale_dtype=dtype, clip_steps=0).dequantize()
    assert torch.equal(by_group(signed, group_size).float(), plain_signed(w, group_size, dtype, 7.0).float())
    unsigned = quantize_w4(w, group_size, symmetric=False, scale_dtype=dtype, clip_steps=0).dequantize()
    assert torch.equal(by_group(unsigned, group_size).float(), plain_with_zero_points(w, group_size, dtype).float())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size, at_most", [(32, 0.99), (128, 0.95), (4096, 0.75)])
def test_the_search_pays_on_normal_weights(symmetric, group_size, at_most):
    w = weight(2, 64, 4096)
    plain, searched = (
        errors(quantize_w4(w, group_size, symmetric=symmetric, clip_steps=steps).dequantize(), w, group_size).sum()
        for steps in (0, 32)
    )
    assert searched <= at_most * plain


def test_the_scale_is_the_best_of_those_tried():
    w = weight(3, 8, 64)
    got = errors(quantize_w4(w, 64, scale_dtype=torch.float32).dequantize(), w, 64)
    largest = w.abs().amax(-1, keepdim=True)
    for ratio in clip_ratios(32):
        scale = (largest / (8 / ratio)).double()
        for sign in (1, -1):
            tried = (w.double() / (sign * scale)).round().clamp(-8, 7) * sign * scale
            assert bool((got[:, 0] <= (tried - w.double()).square().sum(-1) * MARGIN).all())


@pytest.mark.parametrize("group_size", [32, 128, 1024])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_without_the_full_range_no_code_is_minus_eight(group_size, dtype):
    w = weight(14, 32, 1024)
    narrow = quantize_w4(w, group_size, scale_dtype=dtype, full_range=False, lhs_dtype=torch.float8_e4m3fn)
    assert int(narrow.unpack()[0].min()) == -7
    assert narrow.format.order == "e4m3"
    plain = (plain_signed(w, group_size, dtype, 7.0) - by_group(w, group_size)).square().sum(-1)
    assert bool((errors(narrow.dequantize(), w, group_size) <= plain * MARGIN).all())
    assert (errors(narrow.dequantize(), w, group_size) - plain).sum() < 0


# --- known cases ---


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_signed_weights_on_a_grid_come_back(dtype):
    q = (torch.arange(16 * 64).view(16, 64) * 7 % 16 - 8).to(torch.int8)
    scale = 2.0 ** torch.arange(-8, 8)[:, None]
    got = quantize_w4(q * scale, 64, scale_dtype=dtype)
    assert torch.equal(got.unpack()[0], q)
    assert torch.equal(got.unpack()[1], scale.to(dtype))


def test_a_negative_scale_puts_minus_eight_at_the_positive_end():
    q = torch.arange(-8, 8, dtype=torch.int8).repeat(8, 2)
    got = quantize_w4(q.float() * -0.5, 32)
    assert torch.equal(got.unpack()[0], q)
    assert torch.equal(got.unpack()[1], torch.full((8, 1), -0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("zero", [0, 3, 8, 15])
def test_weights_with_zero_points_on_a_grid_come_back(zero):
    q = torch.arange(16, dtype=torch.uint8).repeat(8, 4)
    got = quantize_w4((q.float() - zero) * 0.25, 64, symmetric=False)
    assert torch.equal(got.unpack()[0], q)
    assert torch.equal(got.unpack()[1], torch.full((8, 1), 0.25, dtype=torch.bfloat16))
    assert torch.equal(got.unpack()[2], torch.full((8, 1), zero, dtype=torch.uint8))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_is_zeros(symmetric):
    w = weight(4, 8, 96)
    w[:, 32:64] = 0
    got = quantize_w4(w, 32, symmetric=symmetric)
    assert torch.equal(got.dequantize()[:, 32:64], torch.zeros(8, 32))
    assert torch.equal(got.unpack()[1][:, 1], torch.zeros(8, dtype=torch.bfloat16))


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_stays_zero(symmetric):
    w = weight(5, 16, 256).abs() + 0.01
    w[:, ::3] = 0
    assert bool((quantize_w4(w, 64, symmetric=symmetric).dequantize()[:, ::3] == 0).all())


def test_codes_are_those_of_the_rounded_scale():
    """bf16 keeps 8 bits of a scale: codes for the unrounded one would be off by one at the far end of the range."""
    w = weight(6, 64, 512)
    q, scale, _ = quantize_w4(w, 512).unpack()
    exact = w.double() / scale.double()
    assert torch.equal(q.double(), exact.round().clamp(-8, 7))


@pytest.mark.parametrize("dtype, size", [(torch.float16, 1e-6), (torch.float32, 1e-43)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tiny_weights_err_by_no_more_than_themselves(dtype, size, symmetric):
    w = torch.linspace(-size, size, 256).repeat(8, 1)
    got = quantize_w4(w, 64, symmetric=symmetric, scale_dtype=dtype).dequantize()
    assert bool((errors(got, w, 64) <= errors(torch.zeros_like(w), w, 64)).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("exponent", [-100, 120])
def test_a_power_of_two_changes_the_scales_only(symmetric, exponent):
    """Squared errors would overflow or vanish in fp32."""
    w = weight(13, 16, 256)
    q, scale, zero = quantize_w4(w, 64, symmetric=symmetric).unpack()
    big = quantize_w4(w * 2.0**exponent, 64, symmetric=symmetric).unpack()
    assert torch.equal(big[0], q) and torch.equal(big[1], scale * 2.0**exponent)
    assert zero is None or torch.equal(big[2], zero)


# --- memory, strides, repeatability ---


QUANTISERS = {
    "groups": partial(quantize_w4, group_size=32, clip_steps=4),
    "zero points": partial(quantize_w4, group_size=128, symmetric=False, clip_steps=4),
    "per channel, fp16": partial(quantize_w4, group_size="channel", scale_dtype=torch.float16, lhs_dtype=torch.int8),
    "e4m3": partial(quantize_w4, group_size=128, lhs_dtype=torch.float8_e4m3fn),
    "8 bits": partial(jitgemm.quantize_w8, lhs_dtype=torch.int8),
    "8 bits by block": partial(jitgemm.quantize_w8, lhs_dtype=torch.float8_e4m3fn, block=128),
    "MXFP4": jitgemm.quantize_mxfp4,
    "two levels": jitgemm.quantize_w4_two_level,
}
quantisers = pytest.mark.parametrize("quantise", QUANTISERS.values(), ids=QUANTISERS)


@quantisers
def test_experts_quantise_as_each_does_in_chunks_and_from_any_tensor(monkeypatch, quantise):
    w = (
        torch.stack([weight(seed, 40, 416) for seed in range(3)]) * torch.tensor([0.1, 1, 10])[:, None, None]
    ).bfloat16()
    found, each = quantise(w), [quantise(expert) for expert in w]
    assert found.experts == 3 and all(map(same_weight, found, each))
    monkeypatch.setattr("jitgemm.weight.quantize.CHUNK", {"cpu": 1})
    parameter = torch.nn.Parameter(w.float())
    for other in (parameter, w.mT.contiguous().mT, w.repeat_interleave(2, 1)[:, ::2]):
        again = quantise(other)
        assert same_weight(again, found) and not again.blocks.requires_grad
    assert torch.equal(parameter, w.float())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["groups", "zero points", "per channel, fp16", "8 bits", "8 bits by block"])
def test_the_gpu_gives_the_same_weight(name):
    w = torch.stack([weight(seed, 256, 1120, outliers=True) for seed in (11, 12)])
    on_gpu = QUANTISERS[name](w.cuda())
    assert on_gpu.device.type == "cuda"
    for got, expected in zip(on_gpu.unpack(), QUANTISERS[name](w).unpack()):
        assert got is expected or builders.same_bits(got.cpu(), expected)


# --- refusals ---


@quantisers
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(value, quantise):
    w = torch.stack([weight(12, 16, 64)] * 2)
    w[1, 9, 33] = value
    for given_, name in ((w, "w[1]"), (w[1], "w")):
        with pytest.raises(ValueError, match=rf"^{re.escape(name)}: expected finite values, got {value} at \[9, 33\]"):
            quantise(given_)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("dtype", "size", "instead"), [
    (torch.float16, 1e-9, "use scale_dtype bfloat16 or float32"),
    (torch.bfloat16, 3e-41, "use scale_dtype float32"),
    (torch.float32, 1e-45, "multiply w by a power of two"),
])  # fmt: skip
def test_groups_too_small_for_the_scale_type_are_refused(dtype, size, instead, symmetric):
    w = torch.linspace(-1, 1, 64).repeat(8, 1)
    w[5, 32:] = size
    with pytest.raises(ValueError, match=f"{str(dtype)[6:]} has a scale for, got .*underflows to 0; {instead}"):
        quantize_w4(w, 32, symmetric=symmetric, scale_dtype=dtype)
    w[5, 32:] = 0
    assert not quantize_w4(w, 32, symmetric=symmetric, scale_dtype=dtype).dequantize()[5, 32:].any()


W = torch.zeros(8, 64)


@pytest.mark.parametrize(
    "arguments, options, error, text",
    [
        ((W[0], 32), {}, ValueError, "w: expected shape [n, k] or [experts, n, k], got [64]"),
        ((W[:7], 32), {}, ValueError, "w: expected n, its rows, to be a positive multiple of 8, got 7"),
        ((W[:, :40], 32), {}, ValueError, "w: expected k to be a positive multiple of 16, got 40"),
        ((W, 48), {}, ValueError, "group_size: expected one of (32, 64, 128, 256), or k = 64 for per channel, got 48"),
        ((W, 0), {}, ValueError, "group_size: expected one of"),
        ((W[None, :0], 32), {}, ValueError, "w: expected n, its rows, to be a positive multiple of 8, got 0"),
        ((W[None, :4], 32), {}, ValueError, "w: expected n, its rows, to be a positive multiple of 8, got 4"),
        ((W[None][:0], 32), {}, ValueError, "w: expected shape [n, k] or [experts, n, k], got [0, 8, 64]"),
        ((W[None, None], 32), {}, ValueError, "w: expected shape [n, k] or [experts, n, k], got [1, 1, 8, 64]"),
        ((torch.stack((W, W + 1e6)), 32), {"scale_dtype": torch.float16}, ValueError,
         "w[1]: expected scales within float16's 65504"),
        ((W, 32), {"clip_steps": -1}, ValueError, "clip_steps: expected 0 to 1000, got -1"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        quantize_w4(*arguments, **options)


@quantisers
def test_a_weight_does_not_depend_on_pytorch_s_default_type(quantise):
    """vLLM loads models under the model's type."""
    w = weight(1, 128, 256).bfloat16()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found.append(quantise(w).state_dict())
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[0][name].view(torch.uint8), found[1][name].view(torch.uint8)) for name in found[0])
