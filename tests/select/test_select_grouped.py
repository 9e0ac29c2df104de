"""The selector for grouped GEMMs: which kernels there are, the routings it expects, and what it makes of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selected import FORMATS_OF, assert_legal, experts, order_of, relaxed, rows

from jitgemm.dtypes import LHS_TYPES
from jitgemm.kernel.formats import TABLE_SIZES, Problem, WeightFormat, ceil_div, tuned_order
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import multiply_widths
from jitgemm.select import cost, legal
from jitgemm.select.choose import bands, choose, kernels_for
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import illegal, legal_kernels, max_cluster_tiles
from jitgemm.select.ranked import candidates, predict

H200 = DEVICES["h200"]
FP8 = WeightFormat(128, False, "bf16", "e4m3")


def qwen(rows: int, **changes) -> Problem:
    """The gate and up projections of Qwen3-30B-A3B's experts."""
    return replace(Problem(rows, 1536, 2048, "e4m3", FP8, experts=128), **changes)


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLE_SIZES)
@pytest.mark.parametrize("lhs", LHS_TYPES)
def test_the_kernels_are_the_dense_ones_with_the_stages_that_a_table_leaves(lhs, table):
    for format in FORMATS_OF[lhs][::4]:
        dense = {
            replace(spec, stages=0)
            for spec in legal_kernels(lhs, format, H200)
            if spec.multicast_lhs == spec.ctas_per_sm == 1 and not spec.reduce_scatter
        }
        found = legal_kernels(lhs, format, H200, experts=table)
        assert {spec.experts for spec in found} == {table}
        # A kernel whose third stage only just fits has no room for a large table, and some count more registers.
        shared = {spec for spec in found if spec.multicast_lhs > 1}
        assert {replace(spec, stages=0, experts=0) for spec in set(found) - shared} <= dense
        assert len(found) - len(shared) > 0.8 * len(dense)
        assert {(spec.multicast_lhs, spec.split_k, spec.warpgroups_k) for spec in shared} <= {(2, 1, 1)}
        for spec in found:
            assert_legal(spec, H200)
            deeper = replace(spec, stages=spec.stages + 1)
            few = spec.block_m <= legal.FEW_STAGE_TOKENS and spec.ctas_per_sm == 1 and spec.warpgroups >= 3
            assert few or spec.stages == legal.MAX_STAGES or "shared memory" in illegal(deeper, H200)


@pytest.mark.parametrize(("count", "table"), [(1, 64), (64, 64), (65, 256), (256, 256), (257, 1024), (1024, 1024)])
def test_the_least_table_that_holds_the_experts_is_taken(count, table):
    assert choose(Problem(100, 1536, 2048, "e4m3", FP8, experts=count), H200).experts == table


# ---- bands ----------------------------------------------------------------------------------------------------------


def test_bands_of_rows_are_sixteen_from_one_power_of_two_to_the_next():
    ends = [last for _, last in bands(128, experts=128)]
    assert ends == [*range(1, 32), *range(32, 64, 2), *range(64, 129, 4)]


def test_a_layer_with_any_routing_takes_a_few_kernels():
    """Warm-up compiles them all."""
    kernels = kernels_for(1536, 2048, "e4m3", FP8, H200, 8 * 4096, experts=128)
    assert len(set(kernels)) == len(kernels) <= 24


# ---- routings -------------------------------------------------------------------------------------------------------


@relaxed
@given(count=experts, total=rows)
def test_routings_give_every_row_to_an_expert(count, total):
    for routing in cost.routings(count, total):
        assert sum(routing) == total and 1 <= len(routing) <= min(count, total) and min(routing) >= 1
    assert 1 <= cost.weights_read(count, total) <= min(count, total)
    assert cost.most_rows(count, total) >= ceil_div(total, count)


def test_without_experts_and_with_one_all_rows_belong_to_one_weight():
    for count in (0, 1):
        assert cost.routings(count, 300) == ((300,),)
        assert cost.token_tiles(count, 300, False, 64) == (5,)


@pytest.mark.parametrize("count", [8, 32, 128, 512])
def test_more_rows_reach_more_experts(count):
    hit = [cost.weights_read(count, last) for _, last in bands(20 * count, count)]
    assert all(a <= b + 0.02 * count for a, b in zip(hit, hit[1:]))
    assert hit[0] == 1 and hit[-1] == count


@pytest.mark.parametrize("total", [1024, 8 * 1024, 64 * 1024])
def test_rows_scatter_as_those_of_a_multinomial_draw(total):
    """Drawn one by one or from a normal distribution: variance = mean, about."""
    mean = total / 128
    counts = [count for routing in cost.routings(128, total) for count in routing]
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert variance == pytest.approx(mean, rel=0.2)


@pytest.mark.parametrize("total", [4, 36, 1000])
def test_rows_of_a_rank_vary_by_the_root_of_their_number(total):
    totals = [sum(routing) for routing in cost.routings(48, total, True)]
    mean = sum(totals) / len(totals)
    assert min(totals) >= 1 and mean == pytest.approx(total, abs=0.5)
    assert sum((each - mean) ** 2 for each in totals) / len(totals) == pytest.approx(total, rel=0.2, abs=0.5)


def test_a_rank_gets_no_tiles_that_fill_the_device_with_its_mean_rows_alone():
    """Four experts of 24 tiles of 256 rows are one round on 132 SMs, and five are two; of 64 rows 3 rounds and 4."""
    mean = Problem(4, 6144, 7168, "e4m3", WeightFormat(0, False, "bf16", "e2m1", code="e2m1"), experts=48)
    exact, rank = choose(mean, H200), choose(replace(mean, rows_vary=True), H200)
    assert rank != exact
    us = [predict(spec, replace(mean, rows_vary=True), H200).predicted_us for spec in (rank, exact)]
    assert us[0] < 0.97 * us[1]


@pytest.mark.parametrize("rows", [4, 40, 400])
def test_batch_invariant_calls_add_up_alike_whether_rows_vary_or_not(rows):
    layer = Problem(rows, 7168, 3072, "e4m3", FP8, batch_invariant=True, experts=48)
    assert order_of(choose(layer, H200)) == order_of(choose(replace(layer, rows_vary=True), H200))


@pytest.mark.parametrize(
    ("count", "drawn", "tokens", "hit"),
    # Counted in 24 routings, as scripts/benchmark.py --moe draws them.
    [(128, 8, 8, 52.5), (128, 8, 32, 113.0), (8, 2, 8, 7.4), (128, 4, 8, 29.1), (128, 4, 32, 80.4)],
)
def test_experts_that_have_rows_are_as_many_as_when_tokens_choose_distinct_ones(count, drawn, tokens, hit):
    assert cost.weights_read(count, drawn * tokens) == pytest.approx(hit, rel=0.1)


@given(count=st.integers(1, 300), total=st.integers(1, 3000), seed=st.integers(0, 1000))
@relaxed
def test_no_routing_has_more_tiles_than_a_grid_is_made_for(count, total, seed):
    random = Random(seed)
    favourites = [random.randrange(count) for _ in range(random.randint(1, count))]
    chosen = [random.choice(favourites) for _ in range(total)]
    spec = KernelSpec("e4m3", FP8, block_m=16, block_n=128, stages=4, experts=1024)
    tiles = sum(ceil_div(chosen.count(expert), 16) for expert in set(chosen))
    assert ceil_div(total, 16) * 12 <= tiles * 12 <= max_cluster_tiles(spec, count, total, 1536)


def test_a_grid_is_no_larger_than_the_worst_routing():
    spec = KernelSpec("e4m3", FP8, block_m=16, block_n=128, stages=4, experts=64)
    # 33 rows to 2 experts: 17 + 16.
    assert max_cluster_tiles(spec, 2, 33, 128) == 3
    assert max_cluster_tiles(spec, 64, 5, 128) == 5
    assert max_cluster_tiles(spec, 64, 1, 1536) == 12


# ---- predictions ----------------------------------------------------------------------------------------------------


def test_decode_is_predicted_by_the_weights_that_it_reads():
    """Mixtral's down projections: most of the time is memory's."""
    for total in (2, 16, 64):
        problem = Problem(total, 4096, 14336, "e4m3", FP8, experts=8)
        best = candidates(problem, H200)[0]
        record = 64 * 128 // 2 + 64 * 2
        moved = cost.weights_read(8, total) * 64 * 112 * record + total * (14336 + 2 * 4096)
        assert 1 <= best.terms["memory"] / moved * H200.hbm_bytes_per_us < 1.15  # some SMs have a tile less
        assert best.terms["memory"] < best.predicted_us < 1.15 * best.terms["memory"] + 3.5


def test_a_tile_multiplies_no_more_tokens_than_it_needs():
    widths = multiply_widths(KernelSpec("e4m3", FP8, block_m=144, block_n=128, stages=5, experts=64))
    assert widths == (48, 80, 112, 128, 144)
    assert multiply_widths(KernelSpec("e4m3", FP8, block_m=144, block_n=128, stages=5)) == (144,)
    assert cost.filled(1, 144, False, widths) == 1 and cost.filled(1, 145, False, widths) == (144 + 48) / 288
    assert cost.filled(1, 100, False, widths) == 112 / 144 and cost.filled(1, 1, False, (144,)) == 1
    assert 0.8 < cost.filled(32, 32 * 128, False, widths) < 0.95


def test_an_expert_is_predicted_as_a_dense_gemm_without_prefetch():
    dense = Problem(8, 2 * 128 * H200.num_sms, 4096, "e4m3", FP8)
    spec = KernelSpec("e4m3", FP8, block_m=8, block_n=128, stages=8)

    def apart(n):
        alone, grouped = replace(dense, n=n), replace(dense, n=n, experts=1)
        return predict(replace(spec, experts=64), grouped, H200).predicted_us - predict(spec, alone, H200).predicted_us

    assert 0.3 < apart(dense.n) < cost.PREFETCH_US
    # SMs without a tile of the last round prefetch nothing either.
    assert apart(dense.n) + 2 < apart(dense.n + 128)


def test_experts_with_few_rows_take_low_tiles_and_those_with_many_high_ones():
    for lhs in LHS_TYPES:
        format = WeightFormat(128, False, "bf16", tuned_order(lhs, 128, False, 2048))
        per_expert = {
            mean: choose(qwen(128 * mean, lhs=lhs, format=format), H200).block_m for mean in (1, 4, 16, 64, 256)
        }
        assert per_expert[1] == 8 and per_expert[4] <= 16 and per_expert[16] <= 48 and per_expert[64] >= 48
        assert per_expert[256] >= 96
        assert list(per_expert.values()) == sorted(per_expert.values())


INT8, TWO_LEVEL = WeightFormat(0, False, "fp32", "s8"), WeightFormat(0, False, "fp32", "two_level", code="two_level")
MXFP4 = WeightFormat(0, False, "bf16", "e2m1", code="e2m1")


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (Problem(4200, 2560, 768, "e4m3", FP8, experts=64), (104, 192, 1)),
        (Problem(24000, 4096, 768, "e4m3", MXFP4, experts=128), (104, 192, 1)),
        (Problem(3000, 5120, 4096, "s8", INT8, experts=16), (224, 128, 2)),
        (Problem(24000, 1536, 4096, "s8", TWO_LEVEL, experts=128), (224, 128, 2)),
        (Problem(24000, 4096, 768, "s8", TWO_LEVEL, experts=128), (224, 128, 2)),
    ],
)
def test_experts_of_4_bits_take_a_height_between_where_it_was_measured_to_win(problem, tile):
    """docs/notes/grouped.md; 8-bit weights were not measured."""
    spec = choose(problem, H200)
    assert (spec.block_m, spec.block_n, spec.multicast_lhs) == tile
    byte = WeightFormat(0, False, "fp32", problem.lhs, code="int8" if problem.lhs == "s8" else "e4m3")
    assert not legal.kernels(problem.lhs, byte, H200, "bf16", tile[0], spec.experts)


def test_int8_experts_of_few_columns_take_no_height_between():
    """It lost there; two levels, above, won."""
    assert choose(Problem(24000, 4096, 768, "s8", INT8, experts=128), H200).block_m not in legal.FINER_MS


def test_tiles_follow_the_rows_of_an_expert_and_not_those_of_all():
    """4096 rows are 8 an expert of 512, and 4096 of a single one."""
    assert choose(qwen(4096, experts=512), H200).block_m <= 16
    assert choose(qwen(4096, experts=1), H200).block_m >= 96
