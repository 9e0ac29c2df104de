"""The selector: every legal problem gets a legal kernel, on every device, and the same one wherever it is asked.

No GPU, no compiler: the specs' own arithmetic. That kernels compile is tests/kernel/test_compile.py's business.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import builders
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from selected import (
    ALL_DEVICES,
    FORMATS_OF,
    SMALLER,
    assert_legal,
    devices,
    either,
    experts,
    grouped,
    order_of,
    problems,
    relaxed,
    tokens,
)  # fmt: skip

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.kernel.formats import TABLE_SIZES, Problem, WeightFormat, ceil_div
from jitgemm.kernel.render import render
from jitgemm.kernel.spec import KernelSpec, lhs_copy_rows, slice_tokens, smem_bytes
from jitgemm.kernel.tactics import direct_lhs, prefetch_stages, promote_records
from jitgemm.select import choose as choice
from jitgemm.select import cost, legal
from jitgemm.select.choose import band_end, bands, choose, kernels_for
from jitgemm.select.devices import _DRIVER_NAMES, DEVICES, DeviceSpec, device_from_properties, device_spec
from jitgemm.select.legal import cluster_tiles, illegal, launched_clusters, legal_kernels
from jitgemm.select.ranked import candidates, predict

REPOSITORY = Path(__file__).resolve().parents[2]
G128, G32 = WeightFormat(128, False, "bf16"), WeightFormat(32, False, "fp32")
E4M3, E4M3_W8 = replace(G128, order="e4m3"), WeightFormat(128, False, "fp32", "e4m3", code="e4m3")
LAYER = Problem(16, 4096, 4096, "e4m3", E4M3)

# ---- every problem gets a kernel ------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [problems, grouped], ids=["dense", "experts"])
@relaxed
@given(data=st.data(), device=devices)
def test_every_legal_problem_gets_a_legal_kernel_of_its_own_formats(of, data, device):
    problem = data.draw(of)
    spec = choose(problem, device)
    assert_legal(spec, device)
    assert illegal(spec, device) is None
    assert (spec.lhs, spec.out, spec.debug) == (problem.lhs, problem.out, False)
    # Per-channel kernels read their scales by a run-time type.
    assert spec.format == (problem.format if problem.format.group_size else replace(problem.format, scale_type="fp32"))
    # The kernel checks its shared memory, and has every stage that fits unless its tile is narrow.
    assert re.findall(r"static_assert\(Shared<Config>::kBytes == (\d+),", render(spec)) == [str(smem_bytes(spec))]
    deeper = replace(spec, stages=spec.stages + 1)
    narrow = spec.block_m <= legal.FEW_STAGE_TOKENS and spec.ctas_per_sm == 1 and spec.warpgroups >= 3
    assert narrow or spec.stages == legal.MAX_STAGES or "shared memory" in illegal(deeper, device)
    if problem.experts:
        assert spec.experts in TABLE_SIZES and problem.experts <= spec.experts
        assert not spec.consumers_copy_lhs and not direct_lhs(spec) and prefetch_stages(spec) == 0
        return
    assert spec.experts == 0 and min(spec.stages, 2) <= prefetch_stages(spec) <= spec.stages
    # The grid covers the output and fits the device.
    units = cluster_tiles(spec, problem.m, problem.n)
    resident = device.resident_clusters(spec.cluster_size, spec.ctas_per_sm)
    clusters = launched_clusters(spec, units, device.num_sms, resident)
    assert 1 <= clusters <= units
    assert clusters * spec.cluster_size <= max(device.num_sms, spec.cluster_size)
    tiles = ceil_div(problem.m, spec.block_m) * ceil_div(problem.n, spec.block_n)
    assert tiles <= units * spec.multicast_lhs


@relaxed
@given(problem=problems, sms=st.integers(1, 300), smem=st.integers(112, 227))
def test_any_number_of_sms_and_less_shared_memory_will_do(problem, sms, smem):
    device = replace(DEVICES["h200"], name="x", num_sms=sms, smem_per_block=smem << 10, smem_per_sm=(smem + 1) << 10)
    assert_legal(choose(problem, device), device)


@pytest.mark.parametrize("device", ALL_DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("lhs", LHS_TYPES)
def test_every_candidate_is_legal_and_told_apart_by_its_label(device, lhs):
    """But for CTAs a SM, which a label does not say."""
    at, experts = ALL_DEVICES.index(device), (0, 0, 256)[ALL_DEVICES.index(device) % 3]
    for number, format in enumerate(FORMATS_OF[lhs][at::7]):
        out = REAL_TYPES[(at + number) % 3]
        kernels = legal_kernels(lhs, format, device, out, experts)
        assert len({(spec.label, spec.ctas_per_sm) for spec in kernels}) == len(set(kernels)) == len(kernels) > 20
        for spec in kernels:
            assert illegal(spec, device) is None
            assert_legal(spec, device)
            assert (spec.format.order, spec.format.offset, spec.out) == (format.order, format.offset, out)
        for spec in kernels[::97]:
            assert KernelSpec.from_label(spec.label) == spec
            both = replace(spec, consumers_copy_lhs=True, debug=True)
            assert KernelSpec.from_label(both.label) == both


@pytest.mark.parametrize(
    ("spec", "change", "bytes"),
    [
        (KernelSpec("s8", G128, 64, 128, 4), {"out": "fp16"}, 0),
        (KernelSpec("s8", G128, 64, 128, 4), {"out": "fp32"}, 64 * 128 * 2),
        # A second row of scales, of four groups, in four stages of two strips.
        (KernelSpec("s8", G32, 64, 128, 4), {"format": replace(G32, offset=True)}, 4 * 2 * 4 * 64 * 4),
        *((KernelSpec("e4m3", G128, 16, 128, 4), {"experts": table}, 12 * table) for table in TABLE_SIZES),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_takes_shared_memory(spec, change, bytes):
    assert smem_bytes(replace(spec, **change)) == smem_bytes(spec) + bytes


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: replace(LAYER, out="int8"), r"out: expected one of \('bf16', 'fp16', 'fp32'\), got 'int8'"),
        (lambda: replace(LAYER, experts=-1), "experts: expected .* got -1"),
        (lambda: replace(LAYER, experts=1025), "experts: expected .* got 1025"),
        (lambda: choose(LAYER, device_spec("h200,smem=8192")), "device: no kernel fits"),
        (lambda: bands(0), "max_m: expected at least 1"),
        (lambda: bands(-1), "max_m: expected at least 1"),
    ],
)
def test_what_cannot_be_is_named(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()


def test_heights_between_are_of_tiles_that_have_all_of_k_and_of_experts_in_one_shape():
    layer = Problem(200, 28672, 4096, "e4m3", E4M3)
    assert choose(layer, DEVICES["h200"]).block_m == 104
    dense, grouped = (
        {
            (spec.block_m, spec.block_n, spec.cluster_size, spec.warpgroups_k)
            for spec in legal_kernels("e4m3", layer.format, DEVICES["h200"], experts=n)
            if spec.block_m in legal.FINER_MS
        }
        for n in (0, 64)
    )
    assert grouped == {(104, 192, 1, 1)} < dense and {each[2:] for each in dense} == {(1, 1)}


def test_a_choice_costs_only_the_tiles_that_it_can_take():
    """The first call of a process waits for it: milliseconds for a few tokens, several times as many for all tiles."""
    choice._choose.cache_clear()
    choice._costed.cache_clear()
    choose(Problem(16, 4096, 4096, "e4m3", G128), DEVICES["h200"])
    assert choice._costed.cache_info().misses == len([rows for rows in legal.BLOCK_MS if rows < 32])


@pytest.mark.parametrize(
    ("label", "changes", "message"),
    [
        ("m16n64", {}, "kernel: expected a label such as .*, got 'm16n64'"),
        ("s8fast-g128-bf16-m16n64-s6", {}, "for these operands, such as e4m3fast-g128-bf16-m16n64-s6, got s8fast-g128"),
        ("e4m3fast-g128-bf16-m16n64-s6-e64", {}, "for these operands, such as e4m3fast-g128-bf16-m16n64-s6, got"),
        ("e4m3fast-g128-bf16-m16n64-s6", {"experts": 65}, "operands, such as e4m3fast-g128-bf16-m16n64-s6-e256"),
        ("e4m3fast-g128-bf16-m16n64-s6", {"out": "fp32"}, "operands, such as e4m3fast-g128-bf16-tofp32-m16n64"),
        ("e4m3fast-g128-bf16-m16n256-s30", {}, r"h200 can run, got \S+s30: \d+ bytes of shared memory, \d+ available"),
        ("e4m3fast-g128-bf16-m224n192-s3", {}, "h200 can run, .* registers a thread"),
        ("e4m3fast-g128-bf16-m20n64-s6", {}, "wgmma has no N of 20/1 for e4m3"),
        ("e4m3fast-g128-bf16-m16n64-k2x3-s6", {"batch_invariant": True}, "sums k as batch_invariant calls here do"),
    ],
)
def test_a_kernel_asked_for_by_name_is_refused_with_the_reason(label, changes, message):
    with pytest.raises(ValueError, match=message):
        choice.kernel_named(label, replace(LAYER, **changes), device_spec("h200"))


@given(problem=problems, device=st.sampled_from(ALL_DEVICES))
@relaxed
def test_every_candidate_may_be_asked_for_by_name(problem, device):
    for candidate in candidates(problem, device)[:5]:
        assert choice.kernel_named(candidate.kernel.label, problem, device) == candidate.kernel


# ---- bands ----------------------------------------------------------------------------------------------------------


@relaxed
@given(most=tokens, count=st.one_of(st.just(0), experts))
def test_bands_cover_every_m_without_gaps(most, count):
    found = bands(most, count)
    assert found[0][0] == 1 and found[-1][0] <= most <= found[-1][1]
    assert all(last + 1 == first for (_, last), (first, _) in zip(found, found[1:]))
    assert all(first <= last == band_end(first, count) == band_end(last, count) for first, last in found)
    assert bands(2 * most, count)[: len(found)] == found


@relaxed
@given(problem=either, device=devices, data=st.data())
def test_one_band_one_kernel_which_kernels_for_has(problem, device, data):
    slack = data.draw(st.integers(0, 5000))
    kernels = kernels_for(
        problem.n, problem.k, problem.lhs, problem.format, device, problem.m + slack * (not problem.experts),
        out=problem.out, batch_invariant=problem.batch_invariant, experts=problem.experts,
    )  # fmt: skip
    assert choose(problem, device) in kernels
    if not problem.experts:
        problem = replace(problem, m=min(problem.m, choice.EXACT_FROM))
    first, last = bands(problem.m, problem.experts)[-1]
    other = replace(problem, m=data.draw(st.integers(first, last)))
    assert choose(problem, device) == choose(other, device)
    assert [c.kernel for c in candidates(problem, device)] == [c.kernel for c in candidates(other, device)]


@relaxed
@given(problem=problems, device=devices, m=st.integers(choice.EXACT_FROM + 1, 20000))
def test_of_many_rows_the_fastest_of_the_layer_s_kernels_at_their_number_is_taken(problem, device, m):
    problem = replace(problem, m=m)
    chosen, of_end = choose(problem, device), choose(replace(problem, m=band_end(m)), device)
    assert predict(chosen, problem, device).predicted_us <= predict(of_end, problem, device).predicted_us


@pytest.mark.parametrize("kind", ["e4m3 g128", "int8 per channel"])
def test_what_choosing_of_a_layer_s_kernels_loses(kind):
    """Beside the fastest kernel of all at each m: by the ends of bands alone it was 2.3 % in the mean and 40 at
    most."""
    lhs, format = {"e4m3 g128": ("e4m3", E4M3),
                   "int8 per channel": ("s8", WeightFormat(0, False, "bf16", "s8"))}[kind]  # fmt: skip
    losses = []
    for (n, k), m in itertools.product(
        ((7168, 18432), (2048, 7168), (13824, 5120), (1536, 8960)), (400, 700, 1500, 2500)
    ):
        problem = Problem(m, n, k, lhs, format)
        found = candidates(problem, DEVICES["h200"])
        losses.append(found[0].predicted_us / min(candidate.predicted_us for candidate in found))
    assert max(losses) <= 1.08 and sum(losses) / len(losses) <= 1.01


@pytest.mark.parametrize("device", [DEVICES["h20"], SMALLER[0]], ids=lambda device: device.name)
@pytest.mark.parametrize("lhs", LHS_TYPES)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (72, 96)])
def test_kernels_for_a_layer_are_those_that_any_m_chooses(device, lhs, n, k):
    format, max_m = G128, 2500
    kernels = kernels_for(n, k, lhs, format, device, max_m)
    assert len(set(kernels)) == len(kernels)
    needed = {choose(Problem(m, n, k, lhs, format), device) for m in range(1, max_m + 1)}
    assert needed <= set(kernels)
    # Nothing is compiled that no m of a band needs.
    last = bands(max_m)[-1][1]
    assert set(kernels) == needed | {choose(Problem(last, n, k, lhs, format), device)}


@pytest.mark.parametrize("codes", ["any", "e4m3"])
def test_tall_tiles_do_not_share_sms(codes):
    """Among GEMMs alone they would be faster; behind a quantiser they are not."""
    layer = Problem(1, 4096, 4096, "e4m3", WeightFormat(128, False, "bf16", codes))
    chosen = {m: choose(replace(layer, m=m), DEVICES["h200"]).ctas_per_sm for m in (8, 16, 32, 40, 48, 64)}
    assert chosen == {8: 2, 16: 2, 32: 2, 40: 1, 48: 1, 64: 1}


# ---- batch-invariant calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(0,), (1, 16, 512)], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("layer", "lhs", "format"),
    builders.third(
        [(4096, 4096), (1536, 2112), (28672, 8192), (72, 96)], LHS_TYPES, [(128, False, "bf16"), (0, True, "fp32")]
    ),
)
def test_a_batch_invariant_layer_sums_k_in_one_order_for_any_rows_and_number_of_experts(layer, lhs, format, counts):
    kernels = []
    for count in counts:
        fmt = WeightFormat(*format)
        kernels += kernels_for(*layer, lhs, fmt, DEVICES["h200"], 20000, batch_invariant=True, experts=count)
    assert len({order_of(spec) for spec in kernels}) == 1
    # Tiles still follow m, where the output is large enough for tiles to differ.
    assert layer[0] < 1000 or len({spec.block_m for spec in kernels}) > 1


@relaxed
@given(problem=problems, device=devices, other=tokens)
def test_every_batch_invariant_problem_has_its_layer_s_order(problem, device, other):
    problem = replace(problem, batch_invariant=True)
    spec = choose(problem, device)
    assert_legal(spec, device)
    assert order_of(choose(replace(problem, m=other), device)) == order_of(spec)
    # Promotion, the other thing that makes sums differ, follows from the order.
    for candidate in candidates(problem, device):
        assert order_of(candidate.kernel) == order_of(spec)
        assert promote_records(candidate.kernel) == promote_records(spec)


@relaxed
@given(problem=problems, device=devices)
def test_a_batch_invariant_choice_is_the_best_of_its_order(problem, device):
    problem = replace(problem, m=band_end(problem.m))
    spec = choose(replace(problem, batch_invariant=True), device)
    same_order = [
        c for c in candidates(replace(problem, batch_invariant=False), device) if order_of(c.kernel) == order_of(spec)
    ]
    assert same_order[0].kernel == spec


# ---- the model ------------------------------------------------------------------------------------------------------


@relaxed
@given(problem=either, device=devices)
def test_candidates_are_sorted_the_first_is_chosen_and_none_beats_memory_and_tensor_cores(problem, device):
    found = candidates(problem, device)
    times = [candidate.predicted_us for candidate in found]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= min(times) or problem.m > choice.EXACT_FROM and not problem.experts
    assert all(math.isfinite(time) and time > 0 for time in times)
    assert all(math.isfinite(us) and us >= 0 for candidate in found for us in candidate.terms.values())
    assert found[0].kernel == choose(problem, device)
    assert {replace(candidate.kernel, consumers_copy_lhs=False) for candidate in found} <= set(
        legal_kernels(problem.lhs, problem.format, device, problem.out, problem.table_size)
    )
    m = choice.seen(problem).m
    weights = cost.weights_read(problem.experts, m) if problem.experts else 1
    code_bytes, operations = weights * problem.n * problem.k / 2, 2 * m * problem.n * problem.k
    floor_us = max(code_bytes / device.hbm_bytes_per_us, operations / device.tensor_ops_per_us)
    assert times[0] >= 0.99 * floor_us


def test_more_sms_are_never_predicted_slower():
    problem = Problem(4096, 8192, 8192, "e4m3", G128)
    whole, half = DEVICES["h200"], SMALLER[0]
    for spec in legal_kernels("e4m3", problem.format, whole):
        assert predict(spec, problem, whole).predicted_us <= predict(spec, problem, half).predicted_us + 1e-9


def test_decode_takes_narrow_tiles_and_prefill_wide_ones():
    for lhs in LHS_TYPES:
        for device in DEVICES.values():
            narrow = choose(Problem(1, 4096, 4096, lhs, G128), device)
            wide = choose(Problem(8192, 4096, 4096, lhs, G128), device)
            assert narrow.block_m <= 16 and wide.block_m >= 48 and wide.block_m * wide.block_n >= 64 * 128


# ---- purity ---------------------------------------------------------------------------------------------------------


@relaxed
@given(problem=problems, device=devices)
def test_equal_inputs_give_equal_outputs(problem, device):
    before = candidates(problem, device)
    for cached in (choice._choose, choice._invariant_order, choice._costed, legal.kernels):
        cached.cache_clear()
    copy = replace(problem, format=replace(problem.format))
    assert candidates(copy, replace(device)) == before


def test_other_processes_draw_and_choose_alike():
    script = """
import jitgemm_cli  # without torch
from jitgemm.select import cost
from jitgemm.select.ranked import candidates
from jitgemm.select.devices import DEVICES
from jitgemm.kernel.formats import Problem, WeightFormat
for lhs in ("e4m3", "s8"):
    for m, experts in ((1, 0), (100, 0), (3000, 0), (8, 128), (1000, 128), (40000, 128)):
        print(cost.routings(experts, m))
        problem = Problem(m, 1536, 4096, lhs, WeightFormat(64, True, "fp16"), experts=experts)
        for c in candidates(problem, DEVICES["h100-sxm"])[:10]:
            print(c.kernel, c.predicted_us.hex())
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", script]
    found = [
        subprocess.run(command, env={**environment, "PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] and found[0].count(b"KernelSpec") == 120


# ---- shared memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_m", legal.BLOCK_MS)
@pytest.mark.parametrize(("split_k", "warpgroups_k"), [(1, 1), (1, 2), (2, 2), (1, 4), (4, 1), (3, 2), (8, 2)])
def test_shares_cover_a_tile_in_whole_runs_of_8(block_m, split_k, warpgroups_k):
    split = {"warpgroups_k": warpgroups_k, "split_k": split_k}
    spec = KernelSpec("s8", G128, block_m, 64, 4, **split)
    assert slice_tokens(spec) == block_m
    share = slice_tokens(replace(spec, reduce_scatter=True))
    splits = split_k * warpgroups_k
    assert share % 8 == 0 and block_m % share == 0 and block_m // share <= splits
    # As short as that allows.
    assert not any(block_m % less == 0 and block_m // less <= splits for less in range(8, share, 8))


@given(problem=problems, m=st.integers(1, 5000), device=devices)
def test_a_copy_of_the_last_tile_brings_the_tokens_that_are_left(problem, m, device):
    for spec in legal_kernels(problem.lhs, problem.format, device, problem.out)[::7]:
        shares = spec.multicast_lhs
        whole, last = lhs_copy_rows(spec, m)
        left = (m - 1) % spec.block_m + 1
        assert shares * whole == spec.block_m and 0 < last <= whole
        # All of them; the CTAs that share a tile start on rows of eight, and none brings eight for nothing.
        assert last == left if shares == 1 else (last % 8 == 0 and left <= shares * last < left + 8 * shares)


@pytest.mark.parametrize("lhs", LHS_TYPES)
def test_dense_kernels_share_activations_in_halves(lhs):
    for format in FORMATS_OF[lhs][::3]:
        shared = {spec for spec in legal_kernels(lhs, format, DEVICES["h200"]) if spec.multicast_lhs > 1}
        assert {spec.multicast_lhs for spec in shared} == {2}
        assert all(spec.token_halves == 2 and spec.block_m > legal.NARROW_TOKENS for spec in shared)


@relaxed
@given(problem=problems, device=devices)
@example(Problem(160, 6784, 384, "s8", WeightFormat(0, False, "fp32", "s8", code="int8")), DEVICES["gh200"])
@example(Problem(3072, 6752, 2048, "e4m3", WeightFormat(32, False, "fp32", "e4m3")), device_spec("h100-pcie,sms=113"))
def test_a_dense_cluster_that_shares_activations_is_predicted_no_faster_and_wins_no_tie(problem, device):
    """Not by a CTA that only fills it up, or by an SM that clusters leave: in the examples 53 tiles make 27 clusters,
    and 113 SMs have room for 56."""
    ranked = [candidate.kernel for candidate in candidates(problem, device)]
    assert ranked[0].multicast_lhs == 1
    problem = choice.seen(problem)
    for spec in [spec for spec in ranked if spec.multicast_lhs > 1][:4]:
        alone = predict(replace(spec, multicast_lhs=1), problem, device).predicted_us
        assert alone <= predict(spec, problem, device).predicted_us


def test_which_kernels_exist_does_not_depend_on_the_model():
    source = (REPOSITORY / "jitgemm" / "select" / "legal.py").read_text()
    assert "select.cost" not in source and "select import cost" not in source


INT4, EIGHT_BITS = KernelSpec("s8", G128, block_m=16, block_n=64, stages=4), KernelSpec("e4m3", E4M3_W8, 128, 192, 3)
EXPERTS = KernelSpec("e4m3", G128, block_m=16, block_n=128, stages=4, experts=64)


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        (INT4, {"stages": 2}, "fewer than 3 stages"),
        (INT4, {"stages": 100}, "shared memory"),
        (INT4, {"block_m": 20}, "wgmma has no N of 20"),
        (INT4, {"block_m": 224, "block_n": 192, "stages": 3}, "registers"),
        (INT4, {"multicast_lhs": 2, "split_k": 2}, "either splits k or shares"),
        (INT4, {"split_k": 16}, "do not fit"),
        (INT4, {"block_m": 8, "multicast_lhs": 2}, "swizzle rows"),
        (INT4, {"warpgroups_k": 4, "block_n": 128}, "8 warpgroups"),
        (EIGHT_BITS, {"block_m": 144}, "registers"),  # spilled up to 500 bytes, as did 224 tokens
        (EIGHT_BITS, {"block_m": 224, "block_n": 128, "token_halves": 2}, "registers"),
        (EXPERTS, {"consumers_copy_lhs": True}, "grouped"),
        (EXPERTS, {"ctas_per_sm": 2}, "grouped"),
        (EXPERTS, {"reduce_scatter": True}, "grouped"),
    ],
    ids=str,
)
def test_a_kernel_that_cannot_be_is_refused_with_the_reason(kernel, change, reason):
    assert illegal(kernel, DEVICES["h200"]) is None
    assert reason in illegal(replace(kernel, **change), DEVICES["h200"])


# ---- devices --------------------------------------------------------------------------------------------------------


def described(name: str, **changes: float) -> DeviceSpec:
    """A GPU as the driver describes it: an H200, but for the name and what else is given."""
    figures = {
        "num_sms": 132, "smem_per_block": 232448, "smem_per_sm": 233472,
        "clock_mhz": 1980.0, "memory_mhz": 3201.0, "memory_bits": 6144,
    }  # fmt: skip
    return device_from_properties(name, **(figures | changes))


@pytest.mark.parametrize("name", _DRIVER_NAMES)
def test_a_gpu_of_the_table_has_the_table_s_figures_whatever_clocks_the_driver_reports(name):
    known = DEVICES[_DRIVER_NAMES[name]]
    assert described(name, num_sms=known.num_sms, clock_mhz=1.0, memory_mhz=1.0) == known


def test_every_device_of_the_table_has_a_name_of_the_driver_s():
    assert set(_DRIVER_NAMES.values()) == set(DEVICES)


@pytest.mark.parametrize("name", ["NVIDIA H200X", "NVIDIA H20Z", "NVIDIA H8000", "NVIDIA H100 96GB HBM3", "H200"])
def test_an_unknown_hopper_is_described_by_what_the_driver_reports(name):
    h200 = DEVICES["h200"]
    alike = described(name)
    assert alike == replace(h200, name=name)
    slower = described(name, num_sms=66, memory_mhz=1600.5, clock_mhz=990.0)
    assert slower.name == name and slower.num_sms == 66
    assert slower.hbm_bytes_per_us == pytest.approx(h200.hbm_bytes_per_us / 2)
    assert slower.tensor_ops_per_us == pytest.approx(h200.tensor_ops_per_us / 4)
    assert slower.clock_mhz == pytest.approx(h200.clock_mhz / 2)


def test_a_part_of_a_gpu_has_its_share_of_the_rates():
    half = described("NVIDIA H200 MIG 3g.71gb", num_sms=66)
    assert half.name == "h200" and half.num_sms == 66
    assert half.hbm_bytes_per_us == DEVICES["h200"].hbm_bytes_per_us / 2


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_clusters_are_predicted_to_fit_the_sms(device):
    for size in (1, 2, 3, 4, 5, 6, 8):
        assert 0.7 * device.num_sms <= size * device.resident_clusters(size) <= device.num_sms
        assert device.resident_clusters(size) <= device.resident_clusters(size, ctas_per_sm=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100", "expected one of h200, h200-nvl, h100-sxm, h100-nvl, h100-pcie, h800, h800-pcie, gh200"),
        ("h200,cores=3", "unknown figure 'cores=3'"),
        ("h200,sms=many", "needs a number"),
        ("h200,sms=0", "must be at least 1"),
        ("", "expected one of"),
    ],
)
def test_an_unknown_device_is_refused_with_what_is_known(name, message):
    with pytest.raises(ValueError, match=message):
        device_spec(name)


def test_figures_alone_start_from_the_h200():
    name = "sms=66,hbm=2.2e6"
    assert device_spec(name) == replace(DEVICES["h200"], name=name, num_sms=66, hbm_bytes_per_us=2.2e6)
