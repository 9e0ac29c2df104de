"""DeepGEMM's names: its order of arguments, pairs that are packed once, and what is refused."""

from __future__ import annotations

import gc
import inspect

import builders
import pytest
import torch
from builders import same_bits

import jitgemm
from jitgemm import deep_gemm
from jitgemm.gemm.e8m0 import fp32_scales

M, N, K, E = 7, 200, 416, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pair(seed: int, *lead: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 weight [*lead, N, K] with a scale per 128 x 128."""
    g = builders.generator(seed)
    w = torch.randn((*lead, N, K), generator=g).to(torch.float8_e4m3fn)
    return w.to(device), torch.rand((*lead, 2, 4), generator=g).to(device) + 0.5


def exact(a: tuple, b: tuple) -> torch.Tensor:
    x = a[0].float().double() * a[1].double().repeat_interleave(128, -1)[..., :K]
    scale = b[1].double().repeat_interleave(128, -2)[..., :N, :].repeat_interleave(128, -1)[..., :K]
    return x @ (b[0].float().double() * scale).mT


def assert_near(d: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((d.double() - expected).abs().max()) <= 2.0**-7 * float(expected.abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_a_dense_gemm(device):
    a, b = builders.block_lhs(1, M, K, column_major=True, device=device), pair(2, device=device)
    d, older = (torch.empty(M, N, dtype=torch.bfloat16, device=device) for _ in range(2))
    deep_gemm.fp8_gemm_nt(a, b, d, None, (1, 128, 128), "nk", True)
    assert_near(d, exact(a, b))
    deep_gemm.gemm_fp8_fp8_bf16_nt(a, jitgemm.pack_w8(*b), older)
    assert same_bits(d, older)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_exponents_as_scales_of_both(device, column_major):
    x, words = builders.e8m0_lhs(1, M, K, column_major=column_major, device=device)
    w, of_w = builders.e8m0_lhs(2, N, K, column_major=column_major, device=device)
    d = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt((x, deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(words)), (w, of_w), d)
    by_128 = [fp32_scales(scale, K).double().repeat_interleave(128, 1)[:, :K] for scale in (words, of_w)]
    assert_near(d, (x.double() * by_128[0]) @ (w.double() * by_128[1]).T)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_exponents_of_groups(device):
    b, indices = pair(2, E, device=device), torch.arange(E, dtype=torch.int32, device=device).repeat_interleave(4)
    (x, words), masked_m = builders.e8m0_lhs(1, E * 4, K, device=device), torch.full((E,), 4, device=device)
    d, of_masked = (torch.empty(E * 4, N, dtype=torch.bfloat16, device=device) for _ in range(2))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, words), b, d, indices)
    a = x.view(E, 4, K), words.view(E, 4, 1)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, of_masked.view(E, 4, N), masked_m, 4)
    assert_near(d, exact((a[0], fp32_scales(a[1], K)), b).flatten(0, 1))
    assert_near(of_masked, d.double())


@pytest.mark.parametrize("device", DEVICES)
def test_contiguous_groups(device):
    a, b = builders.block_lhs(1, 9, K, device=device), pair(2, E, device=device)
    indices = torch.tensor([0, 0, -1, 2, 2, 2, -1, -1, -1], dtype=torch.int32, device=device)
    d = torch.full((9, N), 3.0, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, indices)
    for e in (0, 2):
        rows = indices == e
        part = a[0].view(torch.uint8)[rows].view(a[0].dtype), a[1][rows]
        assert_near(d[rows], exact(part, (b[0][e], b[1][e])))
    assert bool((d[indices < 0] == 3).all())


@pytest.mark.parametrize("device", DEVICES)
def test_masked_groups(device):
    x, scale = builders.block_lhs(1, E * 4, K, device=device)
    a, b = (x.view(E, 4, K), scale.view(E, 4, 4)), pair(2, E, device=device)
    d = torch.full((E, 4, N), 3.0, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, torch.tensor([2, 0, 4], dtype=torch.int32, device=device), 2)
    expected = exact(a, b)
    for e, count in enumerate((2, 0, 4)):
        assert bool((d[e, count:] == 3).all())
        if count:
            assert_near(d[e, :count], expected[e, :count])


def test_four_bit_weights_go_too():
    a, parts = builders.block_lhs(1, M, K), builders.weight_parts(2, N, K)
    d = torch.empty(M, N, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, parts.packed, d)
    assert same_bits(d, jitgemm.gemm_w4a8_reference(a, parts.packed))


def test_a_pair_is_packed_once_until_it_is_written_to_or_gone(monkeypatch):
    packed = []
    pack = lambda *b: packed.append(b) or jitgemm.pack_w8(*b)
    monkeypatch.setattr(deep_gemm, "pack_w8", pack)
    a, (w, scale), d = builders.block_lhs(1, M, K), pair(2), torch.empty(M, N)
    for _ in range(3):
        deep_gemm.fp8_gemm_nt(a, (w, scale), d)
    assert len(packed) == 1
    scale.mul_(2)
    before = d.clone()
    deep_gemm.fp8_gemm_nt(a, (w, scale), d)
    assert len(packed) == 2 and torch.allclose(d, 2 * before)
    with torch.inference_mode():
        deep_gemm.fp8_gemm_nt(a, (w, scale.clone()), d)
    assert len(packed) == 3
    remembered = len(deep_gemm._packed)
    packed.clear()
    del w
    gc.collect()
    assert len(deep_gemm._packed) == remembered - 1


@pytest.mark.parametrize(
    "message, change",
    [
        ("c: expected None, as results are not added to a tensor, got a Tensor", {"c": torch.zeros(M, N)}),
        ("recipe: expected one of", {"recipe": (1, 1, 32)}),
        ("b: expected a packed weight or a pair", {"b": torch.zeros(N, K)}),
        (r"b\[1\] \(scales\): expected a torch.Tensor, got None", {"b": (torch.zeros(N, K), None)}),
        (r"lhs\[1\] \(x_scale\): expected shape \[7, 1\] for the exponents of a token and four times 128 k, got \[7, 4\]", {
            "a": (torch.zeros(M, K).to(torch.float8_e4m3fn), torch.zeros(M, 4, dtype=torch.int32))}),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(message, change):
    arguments = {"a": builders.block_lhs(1, M, K), "b": pair(2), "d": torch.empty(M, N), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        deep_gemm.fp8_gemm_nt(**arguments)


@pytest.mark.parametrize("count", [M - 1, M + 1])
def test_every_row_has_an_index(count):
    a, d = builders.block_lhs(1, M, K), torch.empty(M, N)
    with pytest.raises(ValueError, match=rf"m_indices: expected shape \[{M}\], got \[{count}\]"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, pair(2, E), d, torch.zeros(count, dtype=torch.int32))


def test_gradients_of_weights_are_not_there():
    with pytest.raises(NotImplementedError, match="k_grouped_fp8_gemm_tn_contiguous: jitgemm has no GEMM"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous(1, ks=2)


def test_arguments_have_deepgemm_s_names_and_order():
    rest = ["recipe", "compiled_dims", "disable_ue8m0_cast"]
    for call, names in (
        (deep_gemm.fp8_gemm_nt, ["a", "b", "d", "c", *rest]),
        (deep_gemm.m_grouped_fp8_gemm_nt_contiguous, ["a", "b", "d", "m_indices", *rest]),
        (deep_gemm.m_grouped_fp8_gemm_nt_masked, ["a", "b", "d", "masked_m", "expected_m", *rest]),
    ):
        assert list(inspect.signature(call).parameters) == names


def test_callers_need_neither_pad_nor_transpose():
    scale = torch.ones(3, 4)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == deep_gemm.get_mk_alignment_for_contiguous_layout() == 1
    assert deep_gemm.get_col_major_tma_aligned_tensor(scale) is scale
