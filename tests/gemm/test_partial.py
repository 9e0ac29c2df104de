"""Sums that are stored apart, and what is made of them: in the emulator, against the reference."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
import torch
import two_level
from emulator import launch
from emulator.problems import share_of_bound

from jitgemm.gemm import partial
from jitgemm.gemm.launch import GemmLaunch, problem_of
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.devices import DEVICES
from jitgemm.weight.packed import W4Weight

N, K = 136, 1024


def weight_of(kind: str) -> W4Weight:
    if kind == "two levels":
        return two_level.parts(3, N, K).packed
    group, codes = {"channel": (0, "s8"), "channel, any": (0, "any"), "g128": (128, "e4m3"), "g128, s8": (128, "s8")}[
        kind
    ]
    return builders.weight_parts(3, N, K, group, codes=codes).packed


INTEGERS = {
    "s8fast-channel-tos32-m16n64-k4x1-s4": "channel",
    "s8fast-channel-tos32-m16n64-k2x2s-s4": "channel",
    "s8-channel-tos32-m128n128-s4": "channel, any",
    "s8tl-channel-tos32-m24n64-k1x3-s4": "two levels",
}


@pytest.mark.parametrize("label", INTEGERS)
def test_integers_are_stored_as_they_are(monkeypatch, label):
    """Larger than what fp32 holds, over all splits of k."""
    weight, m = weight_of(INTEGERS[label]), 13
    x, scale = builders.lhs(1, m, K, "s8")
    x.fill_(127) if label.startswith("s8tl") else None
    out = torch.full((m, N), 3, dtype=torch.int32)
    gemm = Gemm(x, scale, None, weight, out)
    expected = partial.partial_sums((x, scale), weight, 0)
    launch.emulate(monkeypatch)
    out.fill_(3)
    GemmLaunch(gemm, KernelSpec.from_label(label)).launch(gemm)
    assert torch.equal(out, expected)


CHUNKS = {
    "e4m3fast-g128-bf16-tofp32-m16n64-s4-ch": "g128",
    "e4m3fast-g128-bf16-tofp32-m16n128-s4-c2-ch": "g128",
    "e4m3fast-g128-bf16-tofp32-m128hn128-mc2lhs-s4-ch": "g128",
    "s8fast-g128-bf16-tofp32-m24n64-s4-ch": "g128, s8",
}


@pytest.mark.parametrize("label", CHUNKS)
def test_a_chunk_s_sum_is_its_own(monkeypatch, label):
    """The same bits with all four chunks of k as with two of them or one, within the bound of a GEMM of its k."""
    weight, m, spec = weight_of(CHUNKS[label]), 20, KernelSpec.from_label(label)
    x, scale = builders.lhs(1, m, K, spec.lhs)
    rows = partial.slab_rows(m) if spec.block_m < 2 * m else spec.block_m
    launch.emulate(monkeypatch)

    def sums(of: Gemm, chunks: int) -> torch.Tensor:
        gemm = of._replace(out=torch.full((chunks, rows, N), 3.0))
        GemmLaunch(gemm, spec).launch(gemm)
        assert all((part[-(-m // spec.block_m) * spec.block_m :] == 3).all() for part in gemm.out)
        return gemm.out[:, :m]

    def columns(first: int, end: int) -> Gemm:
        k = end - first
        records = weight.blocks[:, first // 128 : end // 128].contiguous()
        part = replace(weight, blocks=records, k=k)
        return Gemm(x[:, first:end].contiguous(), scale, None, part, torch.empty(m, N))

    every = sums(columns(0, K), 4)
    assert builders.same_bits(sums(columns(K // 2, K), 2), every[2:])
    assert builders.same_bits(sums(columns(256, 512), 1), every[1:2])
    for chunk in (0, 3):
        assert share_of_bound(columns(256 * chunk, 256 * chunk + 256)._replace(out=every[chunk])) <= 1


def test_a_kernel_for_chunks_adds_up_each_alone():
    fmt = weight_of("g128").format
    for m in (1, 16, 70, 500, 2048):
        problem = Problem(m, 4096, 7168, "e4m3", fmt, "fp32")
        spec = partial.kernel_for_chunks(problem, 4, DEVICES["h200"])
        assert (spec.split_k, spec.warpgroups_k, spec.sums, spec.chunks) == (1, 1, "f32", True)
        assert -(-m // spec.block_m) * spec.block_m <= partial.slab_rows(m)
        assert KernelSpec.from_label(spec.label) == spec


def test_arguments_that_have_no_such_sums_are_refused():
    x, scale = builders.lhs(1, 4, K, "s8")
    for weight, chunks, words in (
        (weight_of("g128, s8"), 0, "expected int8 and one scale a row"),
        (weight_of("g128, s8"), 3, r"expected k to be a multiple of 3 chunks \* 128, got 1024"),
    ):
        with pytest.raises(ValueError, match=words):
            partial.partial_sums((x, scale), weight, chunks)


FINISHES = [(torch.int32, torch.bfloat16, 1), (torch.int32, torch.float16, 2), (torch.int32, torch.float32, 8),
            (torch.float32, torch.bfloat16, 8), (torch.float32, torch.float32, 4)]  # fmt: skip


@pytest.mark.parametrize(("of", "into", "count"), FINISHES)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_the_last_step_has_the_reference_s_bits(monkeypatch, of, into, count, bias):
    g, m, n = builders.generator(4), 5, 136
    weight = weight_of("channel")
    parts = torch.randn((count, m + 3, n), generator=g) * 1e3
    parts = (parts * 1e5).int() if of == torch.int32 else parts
    x_scale = torch.rand(m, generator=g) + 0.01
    added = None if bias is None else torch.randn(n, generator=g).to(bias)
    given = parts, x_scale, weight, added
    expected = partial.finish(given[0], torch.empty(m, n, dtype=into), *given[1:])
    launch.emulate(monkeypatch)
    written = torch.full((m, n), 3.0, dtype=into)
    call = partial._Finish(parts, x_scale, weight.channel_scale if of == torch.int32 else None, added, written)
    call.prepare(call.operands()).run_tensors(*call.operands())
    assert builders.same_bits(written, expected)


@pytest.mark.parametrize("m", [1, 300, 513])
def test_bands_of_rows_have_the_bits_of_all_at_once(monkeypatch, m):
    weight, bias = weight_of("g128"), torch.randn(N, generator=builders.generator(6))
    x, scale = builders.lhs(1, m, K, "e4m3")
    once = partial.sum_chunks((x, scale), weight, 4, torch.empty(m, N), bias)
    parts, rows = partial.partial_sums, []
    monkeypatch.setattr(partial, "partial_sums", lambda lhs, *rest: rows.append(len(lhs[0])) or parts(lhs, *rest))
    monkeypatch.setattr(partial, "BAND_BYTES", 0)
    banded = partial.sum_chunks((x, scale), weight, 4, torch.empty(m, N), bias)
    assert builders.same_bits(banded, once)
    assert sum(rows) == m and max(rows) <= 256 and len(rows) == -(-m // 256)
    whole, direct = (torch.empty(m, N) for _ in range(2))
    partial.sum_chunks((x, scale), weight, 1, whole)
    partial.rank_sums((x, scale), weight, 1, direct)
    assert builders.same_bits(direct, whole)


def test_a_tree_of_parts_has_one_order():
    a, b, c, d = (torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24, 2.0**-24))
    parts = torch.stack([a, b, c, d])[:, :, None].expand(4, 1, 8).contiguous()
    assert partial.finish(parts, torch.empty(1, 8))[0, 0] == (a + b) + (c + d) != ((a + b) + c) + d


def test_problems_of_integers_are_those_with_a_scale_a_row():
    x, scale = builders.lhs(1, 4, K, "s8")
    gemm = Gemm(x, scale, None, weight_of("channel"), torch.empty(4, N, dtype=torch.int32))
    assert problem_of(gemm).out == "s32"
    with pytest.raises(ValueError, match=r"out: expected one of \('bf16', 'fp16', 'fp32'\), got 's32'"):
        replace(problem_of(gemm), format=weight_of("g128").format, lhs="e4m3")
