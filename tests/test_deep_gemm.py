"""DeepGEMM's names: its order of arguments, pairs that are packed once, and what is refused."""

from __future__ import annotations

import gc
import inspect
import json
from pathlib import Path

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
    deep_gemm.fp8_gemm_nt(a, b, d, None, None, (1, 128), (128, 128), "nk", True)
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
    older = torch.full_like(d, 3.0)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, older, m_indices=indices, recipe=(1, 128, 128))
    assert same_bits(d, older)
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
        ("recipe_a: expected one of .* got 'nk'", {"recipe_a": "nk"}),
        ("recipe_b: expected one of", {"recipe_a": (1, 128), "recipe_b": (1, 32)}),
        ("recipe: expected it alone, recipe_a and recipe_b together, or none", {"recipe_b": (1, 128)}),
        ("recipe: expected it alone", {"recipe": (1, 128, 128), "recipe_a": (1, 128), "recipe_b": (128, 128)}),
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


@pytest.mark.parametrize("name", ["grouped_layout", "m_indices"])
@pytest.mark.parametrize("count", [M - 1, M + 1])
def test_every_row_has_an_index(count, name):
    a, d = builders.block_lhs(1, M, K), torch.empty(M, N)
    with pytest.raises(ValueError, match=rf"{name}: expected shape \[{M}\], got \[{count}\]"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, pair(2, E), d, **{name: torch.zeros(count, dtype=torch.int32)})


def test_one_layout_of_groups_and_an_index_for_each_row():
    a, b, d, indices = builders.block_lhs(1, M, K), pair(2, E), torch.empty(M, N), torch.zeros(M, dtype=torch.int32)
    call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    for options in ({}, {"grouped_layout": indices, "m_indices": indices}):
        with pytest.raises(TypeError, match="grouped_layout: expected it, or m_indices in its place"):
            call(a, b, d, **options)
    for options in ({"use_psum_layout": True}, {"expected_m_for_psum_layout": 4}):
        with pytest.raises(ValueError, match="use_psum_layout: expected False and an index for each row"):
            call(a, b, d, indices, **options)
    call(a, b, d, indices, ensure_zero_padding=False)


SIGNATURES = json.loads((Path(__file__).parent / "deep_gemm_signatures.json").read_text())
NEWEST, *OLDER = sorted(SIGNATURES.keys() - {"source"}, reverse=True)
CALLS = ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"]
GRADIENTS = ["k_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_tn_contiguous"]


def theirs(version: str, name: str) -> dict[str, object]:
    """DeepGEMM's arguments in their order, each with its default."""
    scope: dict = {}
    exec(f"def call({SIGNATURES[version][name]}): ...", scope)
    return {each.name: each.default for each in inspect.signature(scope["call"]).parameters.values()}


def ours(name: str) -> dict[str, object]:
    return {each.name: each.default for each in inspect.signature(getattr(deep_gemm, name)).parameters.values()}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_have_the_names_order_and_defaults_of_deepgemm_s_newest(name):
    layout = {"grouped_layout", "m_indices"}  # either, so that neither is required
    assert [each for each in ours(name) if each != "m_indices"] == list(theirs(NEWEST, name))
    assert all(ours(name)[each] == default for each, default in theirs(NEWEST, name).items() if each not in layout)


@pytest.mark.parametrize("version", OLDER)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_older_versions_are_taken_by_name_and_in_order_up_to_what_is_new(name, version):
    older = theirs(version, name)
    assert older.keys() <= ours(name).keys()
    positional = [each for each in older if each != "m_indices"]
    assert [each for each in ours(name) if each in positional and each != "expected_m_for_psum_layout"] == [
        each for each in positional if each != "expected_m_for_psum_layout"  # 2.6.1 has an argument before it
    ]  # fmt: skip


@pytest.mark.parametrize("version", [NEWEST, *OLDER])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_weights_are_not_there(name, version):
    with pytest.raises(NotImplementedError, match=f"{name}: jitgemm has no GEMM for the gradients of weights"):
        getattr(deep_gemm, name)(*theirs(version, name))
    with pytest.raises(NotImplementedError, match=name):
        getattr(deep_gemm, name)(**theirs(version, name))


def test_callers_need_neither_pad_nor_transpose():
    scale = torch.ones(3, 4)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == deep_gemm.get_mk_alignment_for_contiguous_layout() == 1
    assert deep_gemm.get_col_major_tma_aligned_tensor(scale) is scale
