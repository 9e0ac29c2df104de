"""NVFP4: every code times every scale is the sum of two FP8 numbers; packing, and the product by two terms."""

from __future__ import annotations

import builders
import pytest
import torch

from jitgemm.weight.nvfp4 import GROUP, RECORD_BYTES, Nvfp4Weight, pack_nvfp4, terms

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
SCALES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
"""All that are not negative and no NaN."""
PRODUCTS = SCALES.double()[:, None] * MAGNITUDES


def test_two_e5m2_terms_hold_every_code_times_every_scale():
    high, low = terms()
    assert high.dtype == low.dtype == torch.float8_e5m2
    assert torch.equal(high.double() + low.double(), PRODUCTS)
    assert PRODUCTS.numel() == 127 * 8 and bool((low.double() > 0).any())


def test_one_fp8_term_does_not():
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn):
        base = 0 if dtype is torch.float8_e5m2 else 3  # 6 * 448 is beyond e4m3's 448
        assert not torch.equal((PRODUCTS / 2**base).to(dtype).double() * 2**base, PRODUCTS)


@pytest.mark.parametrize("base", [-2, 0, 1, 3])
def test_two_e4m3_terms_hold_scales_within_a_window_of_a_base(base):
    """From 2^(base - 5) to 72 * 2^base."""
    high, low = terms(torch.float8_e4m3fn, base)
    exact = ((high.double() + low.double()) * 2.0**base == PRODUCTS).all(1)
    scales = SCALES.double()
    inside = (scales >= 2.0 ** (base - 5)) & (scales <= 72 * 2.0**base)
    assert bool(inside.any()) and bool(exact[inside].all())
    assert not bool(exact.all())


def parts(seed: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes [n, k / 2], scales and the tensor's scale."""
    g = builders.generator(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, k // GROUP), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, scales, torch.tensor([0.0123])


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code * scale by definition, fp64 [n, k]."""
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    signed = torch.cat((MAGNITUDES, -MAGNITUDES))[each]
    return signed * scales.double().repeat_interleave(GROUP, 1)


@pytest.mark.parametrize("n, k", [(8, 16), (64, 128), (72, 400), (200, 1024)])
def test_what_was_packed_comes_back_bit_for_bit(n, k):
    codes, scales, whole = parts(n, n, k)
    weight = pack_nvfp4(codes, scales, whole)
    assert weight.blocks.shape == (-(-n // 64), -(-k // 128), RECORD_BYTES) and RECORD_BYTES == 64 * 128 * 4.5 / 8
    found = weight.unpack()
    assert torch.equal(found[0][:, 0::2] | found[0][:, 1::2] << 4, codes)
    assert torch.equal(found[1].view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(found[2], whole.expand(n))
    assert torch.equal(weight.dequantize(), (values(codes, scales).float() * whole))


def test_a_thread_finds_its_two_rows_scales_in_one_vector():
    codes, scales, whole = parts(1, 64, 128)
    vectors = pack_nvfp4(codes, scales, whole).blocks[0, 0, 4096:].view(4, 8, 16)
    for warp, row in ((0, 0), (2, 5), (3, 7)):
        first = 16 * warp + row
        expected = torch.cat((scales.view(torch.uint8)[first], scales.view(torch.uint8)[first + 8]))
        assert torch.equal(vectors[warp, row], expected)


def test_two_products_with_the_same_activations_are_the_product():
    codes, scales, whole = parts(3, 72, 416)
    high, low = pack_nvfp4(codes, scales, whole).split()
    assert high.dtype == torch.float8_e5m2
    x = torch.randn(5, 416, generator=builders.generator(4)).to(torch.float8_e4m3fn).double()
    by_terms = x @ high.double().T + x @ low.double().T
    assert torch.equal(by_terms, x @ values(codes, scales).T)  # fp64 is exact here


def test_joined_layers_keep_their_tensors_scales():
    codes, scales, _ = parts(5, 16, 64)
    rows = torch.cat((torch.full((8,), 0.5), torch.full((8,), 3.0)))
    weight = pack_nvfp4(codes, scales, rows)
    assert isinstance(weight, Nvfp4Weight)
    assert torch.equal(weight.dequantize(), values(codes, scales).float() * rows[:, None])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scales": torch.full((8, 4), -1.0).to(torch.float8_e4m3fn)}, ValueError, "scales: .* at least 0, got -1.0 at .0, 0."),
        ({"scales": torch.full((8, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}, ValueError, "got nan at"),
        ({"scales": torch.ones(8, 2).to(torch.float8_e4m3fn)}, ValueError, r"scales: expected shape \[8, 4\], got \[8, 2\]"),
        ({"scales": torch.ones(8, 4)}, TypeError, "scales: expected float8_e4m3fn, got float32"),
        ({"codes": torch.zeros(8, 32)}, TypeError, "codes: expected uint8 or float4_e2m1fn_x2, got torch.float32"),
        ({"codes": torch.zeros(32, dtype=torch.uint8)}, ValueError, r"codes: expected shape \[n, k / 2\], got \[32\]"),
        ({"global_scale": torch.ones(3)}, ValueError, "global_scale: expected 1 or 8 elements, got 3"),
        ({"global_scale": torch.ones(1).double()}, TypeError, "global_scale: expected float32, got float64"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change, error, message):
    codes, scales, whole = parts(1, 8, 64)
    with pytest.raises(error, match=message):
        pack_nvfp4(**{"codes": codes, "scales": scales, "global_scale": whole, **change})
