"""Sums that are stored apart, on a GPU: integers against the reference, chunks against themselves for other m."""

from __future__ import annotations

import builders
import pytest
import torch
import two_level

from jitgemm.gemm import partial
from jitgemm.nn.layers.shard_weight import part_of_weight

pytestmark = pytest.mark.gpu

N, K = 576, 2048
ROWS = (1, 7, 33, 130, 300, 700)


@pytest.mark.parametrize("kind", ["fast", "any", "two levels", "8 bits"])
def test_integers_are_the_reference_s(kind):
    if kind == "two levels":
        weight = two_level.parts(3, N, K).packed
    else:
        codes, bits = {"fast": ("s8", 4), "any": ("any", 4), "8 bits": ("s8", 8)}[kind]
        weight = builders.weight_parts(3, N, K, 0, codes=codes, bits=bits).packed
    x = torch.randint(-128, 128, (max(ROWS), K), dtype=torch.int8, generator=builders.generator(1))
    x[1] = 127
    ones = torch.ones(max(ROWS))
    expected = partial.partial_sums((x, ones), weight, 0)
    on_gpu = weight.to("cuda")
    for m in ROWS:
        found = partial.partial_sums((x[:m].cuda(), ones[:m].cuda()), on_gpu, 0)
        assert torch.equal(found.cpu(), expected[:m])


@pytest.mark.parametrize(("lhs", "group", "codes"), [("e4m3", 128, "e4m3"), ("e4m3", 0, "any"), ("s8", 32, "s8")])
def test_chunks_have_the_same_bits_for_any_m_and_any_number_of_them(lhs, group, codes):
    weight = builders.weight_parts(3, N, K, group, codes=codes).packed
    x, scale = (each.cuda() for each in builders.lhs(1, max(ROWS), K, lhs))
    whole = weight.to("cuda")
    expected = partial.partial_sums((x, scale), whole, 8)[:, : max(ROWS)]
    dtype = torch.int8 if lhs == "s8" else torch.float8_e4m3fn
    for m in ROWS:
        assert builders.same_bits(partial.partial_sums((x[:m], scale[:m]), whole, 8)[:, :m], expected[:, :m])
        for world in (2, 4):
            part, chunks = part_of_weight(whole, "k", 1, world, dtype), 8 // world
            columns = x[:m, K // world : 2 * K // world].contiguous()
            found = partial.partial_sums((columns, scale[:m]), part, chunks)[:, :m]
            assert builders.same_bits(found, expected[chunks : 2 * chunks, :m])
        part, direct = part_of_weight(whole, "k", 1, 8, dtype), torch.empty(m, N, device="cuda")
        partial.rank_sums((x[:m, K // 8 : K // 4].contiguous(), scale[:m]), part, 1, direct)
        assert builders.same_bits(direct, expected[1, :m])
