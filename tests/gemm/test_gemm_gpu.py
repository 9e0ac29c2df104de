"""The kernels on a Hopper GPU against the reference in fp64: error bounds, every kind of argument, all around a launch.

The bound is `gemm_w4a8_bound`'s; e4m3 also has a relative RMS error of at most 2.2e-3. Every output lies between guard
bands and is filled with NaN before it is written. At the end of the session one line tells how many outputs were
compared and the worst errors.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import builders
import pytest
import torch
import w8
from ahead import compile_ahead
from builders import PER_CHANNEL
from guarded_calls import (
    GROUP_128,
    OUTPUTS,
    WORST,
    Case,
    Guarded,
    activations,
    assert_right,
    call,
    device_figures,
    launched,
    weight,
)

import jitgemm
from jitgemm.dtypes import LHS_TYPES
from jitgemm.gemm.reference import gemm_w4a8_reference
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import GROUP_SIZES, Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.select.choose import choose
from jitgemm.select.legal import illegal, legal_kernels
from jitgemm.select.ranked import candidates
from jitgemm.weight.pack import pack_w4

pytestmark = pytest.mark.gpu

SEED = 20240607


# ---- comparing ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def report(request):
    """Prints the worst errors at the end, past pytest's capturing."""
    yield
    if WORST.outputs:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{WORST.line()}")


# ---- cases ----------------------------------------------------------------------------------------------------------


def nasty_cases() -> list[Case]:
    """Sizes at, just below and just above what tiles, records and groups are made of."""
    ms, ns, ks = (0, 1, 7, 63, 64, 65, 129, 4097), (8, 72, 4104), (32, 96, 4128, 16384)
    return [
        Case(m, n, k, lhs, strided=(m + n + k) % 3 != 0)
        for k, m, lhs, n in builders.third(ks, ms, LHS_TYPES, ns)
        if not (m == 4097 and k == 16384 and (n == 4104 or (n != 8 and lhs == "s8")))
    ]


def format_cases() -> list[Case]:
    """Every weight format under both lhs types, with everything else drawn."""
    draw = random.Random(SEED)
    cases = []
    for number, (format, lhs) in enumerate(itertools.product(builders.ALL_FORMATS, LHS_TYPES)):
        k, (group, zero_point, _), out = 16 * draw.randrange(1, 160), format, draw.choice(tuple(OUTPUTS))
        case = Case(
            draw.choice((1, 3, 16, 40, 90, 200, 600, 1900)), 8 * draw.randrange(1, 140), k, lhs, format,
            mean=draw.choice(builders.LHS_MEANS),
            scales=draw.choice(("plain", "negative", "tiny") if out == "fp16" else builders.SCALE_KINDS),
            bias=draw.choice(("none", "bf16", "fp32")),
            per_token=draw.random() < 0.7,
            strided=draw.random() < 0.7,
            seed=number,
            offset=0 < group < k and draw.random() < 0.5,
            codes=lhs if not zero_point and draw.random() < 0.4 else "any",
            affine=lhs == "s8" and draw.random() < 0.5,
            out=out,
        )  # fmt: skip
        cases.append(case)
    return cases


def mean_cases() -> list[Case]:
    """Long sums of activations with and without a mean: where rounding of sums, not of terms, would show."""
    grouped = ((128, False, "bf16"), (32, True, "fp16"), (256, False, "fp32"))
    formats = (*grouped, (PER_CHANNEL, False, "fp32"), (PER_CHANNEL, True, "bf16"))
    sizes = ((16, 16384), (256, 16384), (256, 4096))
    return [
        Case(m, 512, k, lhs, format, mean=mean, seed=7)
        for lhs, mean, format, (m, k) in builders.third(LHS_TYPES, builders.LHS_MEANS, formats, sizes)
    ]


def wide_cases() -> list[Case]:
    """More tiles than SMs: every CTA takes several tiles, and their barriers' phases go on."""
    outs = zip(("fp16", "fp32"), LHS_TYPES)
    return [Case(m, 8 * 1027, 544, lhs, seed=5) for m in (8, 64, 256, 8192) for lhs in LHS_TYPES] + [
        Case(2000, 4104, 2080, lhs, out=out, seed=15) for out, lhs in outs
    ]


def outlier_cases() -> list[tuple]:
    """(m, k, lhs, format, offset, out): k that end within a record, within a group, with one step; every format."""
    formats = (
        ((32, False, "bf16"), True), ((64, True, "fp32"), True), ((128, False, "fp16"), False),
        ((128, True, "bf16"), True), ((256, False, "bf16"), True), ((PER_CHANNEL, False, "fp32"), False),
        ((PER_CHANNEL, True, "bf16"), False),
    )  # fmt: skip
    ms, outs = itertools.cycle((1, 17, 64, 130, 600)), itertools.cycle(("fp32", "bf16", "fp32", "fp16"))
    return [
        (m, k, lhs, format, offset and k > format[0], out)
        for (lhs, k, (format, offset)), m, out in zip(
            builders.third(LHS_TYPES, (32, 96, 160, 512, 1312, 4096), formats), ms, outs
        )
    ]


CASES = {
    "sizes at the edges": nasty_cases(),
    "every weight format": format_cases(),
    "long sums": mean_cases(),
    "more tiles than SMs": wide_cases(),
}
REPEATED = [
    Case(1, 4096, 4096, "e4m3"),
    Case(16, 4096, 4096, "s8", affine=True),
    Case(300, 4104, 4128, "s8", (64, True, "bf16"), offset=True, affine=True),
    Case(16, 4096, 4096, "e4m3", (128, False, "bf16"), offset=True),
    Case(64, 1024, 16384, "e4m3", out="fp32"),
    Case(64, 1024, 16384, "s8"),
    Case(2048, 2048, 4096, "s8", out="fp32"),
    Case(2048, 2048, 4096, "e4m3"),
    Case(16, 4096, 14336, "s8", codes="s8", out="fp16"),
    Case(300, 4104, 4128, "e4m3", codes="e4m3"),
]
"""Calls whose bits are compared from run to run."""

EXACT = [
    *((group, *rest, group > 0) for group in (*GROUP_SIZES, PER_CHANNEL)
      for rest in ((False, "any"), (False, "e4m3"), (False, "s8"), (True, "any"))),
    (32, False, "any", False), (128, True, "any", False),
]  # fmt: skip
"""Group size, zero points, order of codes and offsets of weights that are compared to the last bit."""
EXACT_SIZE = (72, 544)


def small_problem(lhs: str) -> Problem:
    """One whose every legal kernel runs the codes packed for this type of activations."""
    return Problem(8, 200, 2208, lhs, WeightFormat(128, False, "bf16", lhs))


def drawn_kernels() -> list[tuple[str, WeightFormat, str, int]]:
    """Lhs type, format, output and a number that chooses among the legal kernels, which depend on the device."""
    draw = random.Random(SEED + 2)
    pairs = builders.third(builders.ALL_FORMATS, LHS_TYPES * 2)
    drawn = [(lhs, WeightFormat(*format), "bf16", draw.randrange(1 << 30)) for format, lhs in pairs]
    for lhs in LHS_TYPES:
        newer = [WeightFormat(group, bool(group & 96), "bf16", offset=True) for group in GROUP_SIZES]
        newer += [WeightFormat(group, False, "fp16", lhs, offset) for group in (32, 128) for offset in (False, True)]
        newer += [WeightFormat(128, False, "bf16"), WeightFormat(PER_CHANNEL, True, "fp32")]
        newer += [WeightFormat(PER_CHANNEL, False, "fp32", lhs)]
        for number, format in enumerate(newer):
            for out in ("fp32",) if number % 3 == 0 else ("bf16", "fp16") if format.offset else ("fp16",):
                drawn.append((lhs, format, out, draw.randrange(1 << 30)))
    return drawn


FEATURES = (
    lambda spec: spec.split_k > 1 and spec.warpgroups_k > 1,
    lambda spec: spec.multicast_lhs > 1,
    lambda spec: spec.token_halves == 2,
    lambda spec: spec.split_k == 6,
    lambda spec: spec.split_k == 3,
    lambda spec: spec.reduce_scatter,
    lambda spec: spec.warpgroups_k == 4,
    lambda spec: spec.consumers_copy_lhs,
    lambda spec: spec.warpgroups_n == 3,
    lambda spec: spec.ctas_per_sm == 2,
    lambda spec: True,
)
"""Each in turn is asked of the drawn kernels, so that sixty of thousands hold all of them several times."""


DRAWN_K = 4112
"""No multiple of 32."""


def kernel_of(lhs: str, format: WeightFormat, out: str, number: int) -> KernelSpec:
    """The number-th legal kernel that has a feature; as in a call, k decides whether consumers copy activations."""
    kernels = [with_k_rules(spec, DRAWN_K) for spec in legal_kernels(lhs, format, device_figures(), out)]
    with_feature = [spec for spec in kernels if FEATURES[number % len(FEATURES)](spec)] or kernels
    return with_feature[number // len(FEATURES) % len(with_feature)]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request, own_cache):
    """The cache holds what the cases need."""
    if request.config.getoption("--emulate"):
        return
    figures = device_figures()
    cases = [*itertools.chain(*CASES.values()), *REPEATED]
    found = {choose(case.problem, figures) for case in cases}
    found |= {kernel_of(*drawn) for drawn in drawn_kernels()}
    found |= {candidate.kernel for lhs in LHS_TYPES for candidate in candidates(small_problem(lhs), figures)}
    compile_ahead(request.config, found)


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{name}: {case}") for name, cases in CASES.items() for case in cases]
)
def test_a_call_is_within_the_bound(case):
    case.run()


@pytest.mark.parametrize("m, k, lhs_name, format, offset, out", outlier_cases())
def test_outliers_in_the_last_step(m, k, lhs_name, format, offset, out):
    """Where nothing that follows hides what the tensor cores cut off."""
    rhs = weight(264, k, format, "negative", 17, offset)
    for factor in (50, 1000):
        lhs = builders.lhs(17, m, k, lhs_name, outliers=False, last_step=factor, device="cuda")
        assert_right(call(lhs, rhs, out=out), lhs, rhs, has_rms=False)


@pytest.mark.parametrize("k", [32, 160, 512])
@pytest.mark.parametrize("m", [1, 130])
def test_an_outlier_above_terms_that_are_cut_off_whole(m, k):
    """One activation of 256 in each step, and products just below its cut that all have one sign."""
    x = torch.full((m, k), 0.029296875, device="cuda")
    x[:, ::32] = 256
    lhs = x.to(torch.float8_e4m3fn), torch.ones(m, 1, device="cuda")
    q, scale = torch.full((136, k), -8, dtype=torch.int8, device="cuda"), torch.ones(136, 1, device="cuda")
    rhs = pack_w4(q, scale, group_size=k)
    out = call(lhs, rhs, out="fp32")
    assert_right(out, lhs, rhs, has_rms=False)
    assert not bool((out == gemm_w4a8_reference(lhs, rhs, out_dtype=torch.float64)).any())


def name_of(drawn: tuple[str, WeightFormat, str, int]) -> str:
    lhs, format, out, _ = drawn
    name = f"{lhs}-g{format.group_size}{'z' if format.zero_point else ''}{'o' if format.offset else ''}"
    return f"{name}-{format.scale_type}-codes {format.order}-to {out}"


@pytest.mark.parametrize("drawn", drawn_kernels(), ids=name_of)
def test_kernels_that_the_selector_might_choose(drawn):
    """Drawn from all legal kernels, each on a problem with tails on every side, several tiles a CTA row, twice."""
    lhs_name, format, out, number = drawn
    spec = kernel_of(*drawn)
    draw = random.Random(number)
    m = draw.randrange(1, 3 * spec.block_m + 1)
    n, k = 2 * spec.block_n + 72, DRAWN_K
    rhs = weight(
        n, k, (format.group_size, format.zero_point, format.scale_type), "plain", 3, format.offset, format.order
    )
    assert rhs.format == format
    # Every int8 kernel takes zero points of activations: whether there are any is a run-time argument.
    affine = lhs_name == "s8" and number % 3 == 0
    lhs = activations(m, k, lhs_name, draw.choice(builders.LHS_MEANS), True, 3, affine)
    bias = builders.bias(3, n, torch.float32, "cuda")
    outputs = [launched(spec, lhs, rhs, bias, out=out) for _ in range(2)]
    assert_right(outputs[0], lhs, rhs, bias)
    assert builders.same_bits(*outputs)


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
def test_every_legal_kernel_of_a_small_problem_decodes_the_codes_packed_for_its_type(lhs_name):
    """All of them right, and those that sum k in the same order the same to the bit."""
    problem = small_problem(lhs_name)
    rhs = weight(problem.n, problem.k, GROUP_128, codes=lhs_name, seed=6)
    assert rhs.format == problem.format
    lhs = activations(problem.m, problem.k, lhs_name, seed=6)
    outputs: dict[tuple[int, int], list[torch.Tensor]] = {}
    kernels = [candidate.kernel for candidate in candidates(problem, device_figures())]
    assert len(kernels) > 20
    for spec in kernels:
        out = launched(spec, lhs, rhs)
        assert_right(out, lhs, rhs)
        outputs.setdefault((spec.split_k, spec.warpgroups_k), []).append(out)
    for first, *rest in outputs.values():
        assert all(builders.same_bits(first, other) for other in rest)


@pytest.mark.parametrize(
    ("m", "format", "lhs_name"),
    builders.third(
        (16, 64, 512), [GROUP_128, (32, False, "bf16"), (128, True, "bf16"), (PER_CHANNEL, False, "fp32")], LHS_TYPES
    ),
)
def test_yield_hints_change_no_bit(m, format, lhs_name, monkeypatch):
    """They only say which warp goes first: jitgemm's hints and ptxas's own."""
    from jitgemm.kernel import render
    from jitgemm.runtime import loaded

    rhs = weight(1536, 1792, format, codes="any" if format[1] else lhs_name, seed=9)
    lhs = activations(m, 1792, lhs_name, seed=9)
    spec = choose(Problem(m, 1536, 1792, lhs_name, rhs.format), device_figures())
    outputs = []
    for _ in range(2):
        monkeypatch.setattr(loaded, "kernels", {})
        outputs.append(launched(spec, lhs, rhs))
        monkeypatch.setattr(render, "yields", lambda _: None)
    assert_right(outputs[0], lhs, rhs)
    assert builders.same_bits(*outputs)


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_splits_sum_alike_whoever_sums(rounds, lhs_name):
    """So many rounds of tiles and a rest: splits that scatter give the bits of those that do not."""
    m, k = 40, 1184
    n = 128 * (rounds * device_figures().num_sms + 21) - 24
    rhs = weight(n, k, GROUP_128, seed=8)
    lhs = activations(m, k, lhs_name, seed=8)
    plain = KernelSpec(lhs_name, WeightFormat(128, False, "bf16"), block_m=48, block_n=128, stages=5, split_k=2)
    outputs = []
    for spec in (plain, replace(plain, reduce_scatter=True)):
        outputs.append(launched(spec, lhs, rhs, times=2))
        assert_right(outputs[-1], lhs, rhs)
    assert builders.same_bits(outputs[0], outputs[1])


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize(
    "shape", [(2, 2, 32, 128), (2, 2, 48, 64), (4, 2, 16, 64), (2, 3, 32, 64), (4, 3, 24, 64), (4, 3, 32, 64)]
)
def test_splits_over_warpgroups_and_ctas_sum_alike(shape, lhs_name):
    """By (warpgroups along k, CTAs, tokens, rows), several tiles for each cluster, whose CTAs have runs of k of
    different length: the one with less to do may not send the next tile's sums before the other has read these."""
    warpgroups_k, split_k, block_m, block_n = shape
    m, k = block_m - 3, 17 * 128 - 32
    n = block_n * (5 * device_figures().num_sms // split_k + 7) - 24
    rhs = weight(n, k, GROUP_128, codes=lhs_name, seed=9)
    lhs = activations(m, k, lhs_name, seed=9)
    kernels = [
        spec
        for spec in legal_kernels(lhs_name, rhs.format, device_figures())
        if (spec.warpgroups_k, spec.split_k, spec.block_m, spec.block_n) == shape
    ]
    assert kernels
    outputs = []
    for spec in kernels:
        outputs += [launched(spec, lhs, rhs) for _ in range(10)]
        assert_right(outputs[-1], lhs, rhs)
    assert all(builders.same_bits(outputs[0], other) for other in outputs)


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (8, 128), (8, PER_CHANNEL)])
def test_multicast_hands_its_stages_back(bits, group, lhs_name):
    """Several tiles for each cluster that shares activations: a stage is handed back across CTAs, which may not refill
    it before it was read (include/jitgemm/ptx/barrier.cuh). The same bits every time, and those of a kernel without."""
    m, n, k = 6 * 64 - 3, 128 * (device_figures().num_sms // 2 + 1) - 24, 33 * 128 - 32
    rhs = weight(n, k, GROUP_128, codes=lhs_name, seed=12) if bits == 4 else w8.weight(n, k, lhs_name, group)
    lhs = activations(m, k, lhs_name, seed=12)
    plain = KernelSpec(lhs_name, rhs.format, block_m=64, block_n=128, stages=4)
    outputs = [launched(spec, lhs, rhs) for spec in (plain, *[replace(plain, multicast_lhs=2)] * 10)]
    assert_right(outputs[-1], lhs, rhs)
    assert all(builders.same_bits(outputs[0], other) for other in outputs)


@pytest.mark.parametrize(("group_size", "zero_point", "codes", "offset"), EXACT)
def test_all_codes_zero_points_and_offsets_exactly(group_size, zero_point, codes, offset):
    """The identity picks out each weight: powers of two and an fp32 output leave nothing to round."""
    n, k = EXACT_SIZE
    g, groups = builders.generator(8), -(-k // group_size) if group_size else 1
    least, most = (0, 16) if zero_point else (-7 if codes == "e4m3" else -8, 8)
    q = torch.arange(n)[:, None] * 5 + torch.arange(k)[None, :]
    q = (q % (most - least) + least).to(torch.uint8 if zero_point else torch.int8)
    scale = torch.ldexp(
        1.0 - 2.0 * (torch.rand(n, groups, generator=g) < 0.5), -torch.randint(0, 5, (n, groups), generator=g)
    )
    offsets = (torch.randint(-256, 256, (n, groups), generator=g) / 32.0).cuda() if offset else None
    zeros = (torch.arange(n)[:, None] * 3 + torch.arange(groups)) % 17
    zero = zeros.to(torch.uint8).cuda() if zero_point else None
    parts = builders.WeightParts(
        q.cuda(), scale.cuda(), zero, group_size or k, offsets,
        lhs_dtype=None if codes == "any" else builders.LHS_DTYPES[codes],
    )  # fmt: skip
    rhs, exact = parts.packed, parts.dequantize_fp64().T
    assert rhs.format.order == codes
    one = torch.ones(1, device="cuda")
    identity = torch.eye(k, device="cuda")
    for lhs_name in LHS_TYPES if codes == "any" else (codes,):
        out = call((identity.to(builders.LHS_DTYPES[lhs_name]), one), rhs, out="fp32")
        assert torch.equal(out.double(), exact)
    if codes != "e4m3":
        shifted = (identity - 2).to(torch.int8), one, torch.tensor([-2], dtype=torch.int32, device="cuda")
        assert torch.equal(call(shifted, rhs, out="fp32").double(), exact)


@pytest.mark.parametrize("zero", [-128, 127, 1 << 20])
@pytest.mark.parametrize("m", [5, 200])
def test_the_ends_of_the_range_of_zero_points(m, zero):
    rhs, (x, x_scale) = weight(264, 1056, (128, True, "bf16")), activations(m, 1056, "s8")
    x_zero = torch.full((m, 1), zero, dtype=torch.int32, device="cuda")
    x_zero[::2] -= 1
    lhs = (x, x_scale, x_zero)
    assert_right(call(lhs, rhs, out="fp32"), lhs, rhs)


def test_what_fp16_cannot_hold_becomes_infinite():
    rhs, (x, x_scale) = weight(264, 1056), activations(20, 1056, "s8")
    lhs = (x, x_scale * 1e6)
    out = call(lhs, rhs, out="fp16")
    ref = gemm_w4a8_reference(lhs, rhs, out_dtype=torch.float64)
    large, small = ref.abs() > 66000, ref.abs() < 65000
    assert bool(large.any()) and bool(small.any())
    assert torch.equal(out[large].double(), ref[large].sign() * float("inf"))
    assert bool(out[small].isfinite().all())


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
def test_the_ends_of_the_activations_range(lhs_name):
    largest = 448.0 if lhs_name == "e4m3" else 127
    x = torch.full((20, 4096), largest, device="cuda")
    x[::2, ::3] *= -1
    if lhs_name == "s8":
        x[5] = -128
    lhs = (x.to(builders.LHS_DTYPES[lhs_name]), torch.rand(20, device="cuda") + 0.5)
    for format in ((128, True, "bf16"), (PER_CHANNEL, True, "fp32"), (PER_CHANNEL, False, "fp32")):
        parts = builders.weight_parts(1, 72, 4096, format[0], zero_point=format[1], scale_type=format[2])
        parts.q.fill_(15 if format[1] else -8)
        if format[1]:
            parts.zero.fill_(0)
        rhs = parts.packed.to("cuda")
        assert_right(call(lhs, rhs), lhs, rhs)


@pytest.mark.parametrize("m", [1, 40])
def test_the_largest_sums_of_codes_packed_for_int8_per_channel(m):
    """The longest row that is packed for int8 alone, and one beyond it: 128 * 8 * 16 a product in int32."""
    longest = CODES["int4"].order("s8").max_channel_k
    for k, codes in ((longest, "s8"), (longest + 32, "any")):
        q = torch.full((8, k), -8, dtype=torch.int8, device="cuda")
        q[1] = 7
        rhs = pack_w4(q, torch.ones(8, 1, device="cuda"), group_size=k, lhs_dtype=torch.int8)
        assert rhs.format.order == codes
        x = torch.full((m, k), -128, dtype=torch.int8, device="cuda")
        x[1::2] = 127
        lhs = (x, torch.ones(1, device="cuda"))
        assert_right(call(lhs, rhs, out="fp32"), lhs, rhs)


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x_scale", "x_zero", "bias"])
@pytest.mark.parametrize("m", [5, 200])
def test_forms_of_what_rows_or_columns_share_give_the_same_bits(m, name):
    """Of any strides, one for all, and aligned to their type alone."""
    rhs, given = weight(264, 512), dict(zip(("x", "x_scale", "x_zero"), activations(m, 512, "s8", affine=True)))
    given = given | {"x_scale": torch.rand(m, device="cuda") + 0.5, "bias": builders.bias(1, 264).cuda() * 10}
    given["x_zero"] = (given["x_zero"].flatten() + torch.arange(m, device="cuda", dtype=torch.int32)).contiguous()

    def called(value: torch.Tensor) -> torch.Tensor:
        *lhs, bias = (given | {name: value}).values()
        return call(tuple(lhs), rhs, bias)

    values = given[name]
    table = torch.full((m, 3), 1 << 30, dtype=values.dtype, device="cuda")
    forms = [torch.cat([values[:1], values])[1:]]
    if name != "bias":
        table[:, 1] = values
        forms += [values[:, None], table[:, 1], table[:, 1:2]]
    expected = called(values)
    *lhs, bias = given.values()
    assert_right(expected, tuple(lhs), rhs, bias)
    assert all(builders.same_bits(called(form), expected) for form in forms)
    if name != "bias":
        same = values[:1].expand(m).contiguous()
        expected = called(same)
        assert all(builders.same_bits(called(form), expected) for form in (same[0], same[:1], same[:1, None]))


# ---- run to run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_bits_never_change_from_run_to_run(case):
    rhs = weight(case.n, case.k, case.format, case.scales, case.seed, case.offset, case.codes)
    lhs = activations(case.m, case.k, case.lhs, affine=case.affine)
    out = torch.empty(case.m, case.n, dtype=OUTPUTS[case.out], device="cuda")
    jitgemm.gemm_w4a8_nt(lhs, rhs, out)
    expected = out.clone()
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for run in range(60):
        if run % 3 == 0:
            out.fill_(float("nan"))
        jitgemm.gemm_w4a8_nt(lhs, rhs, out)
        different |= (out.view(torch.int16) != expected.view(torch.int16)).any()
    assert not bool(different)
    assert_right(expected, lhs, rhs)


def test_a_weight_packed_a_moment_ago_is_read_whole():
    lhs = activations(16, 2048, "s8")
    for seed in range(6):
        parts = builders.weight_parts(seed, 2048, 2048, device="cuda")
        torch.cuda._sleep(1_000_000)
        rhs = parts.packed
        out = torch.empty(16, 2048, dtype=torch.bfloat16, device="cuda")
        jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
        assert_right(out, lhs, rhs)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


def test_a_miss_during_capture_raises_and_leaves_the_capture_usable(monkeypatch):
    from jitgemm.runtime import loaded

    monkeypatch.setattr(loaded, "kernels", {})
    rhs, lhs = weight(1040, 1056), activations(24, 1056, "s8")
    out = torch.full((24, 1040), float("nan"), dtype=torch.bfloat16, device="cuda")
    counter = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        with pytest.raises(jitgemm.CacheMissError, match="CUDA graph being captured"):
            jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
        counter += 1
    before = float(counter)
    graph.replay()
    assert float(counter) == before + 2 and bool(out.isnan().all())
    # The very call works outside, and then in a capture.
    jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
    assert_right(out.clone(), lhs, rhs)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)


# ---- large ----------------------------------------------------------------------------------------------------------


def need_memory(gib: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, found {free:.0f}")


def rows_around(m: int, row_bytes: int, position: int = 2**31) -> list[int]:
    middle = position // row_bytes
    return sorted({row for first in (0, middle - 66, m - 130) for row in range(max(0, first), min(m, first + 130))})


@pytest.mark.parametrize("lhs_name", LHS_TYPES)
def test_activations_and_outputs_beyond_2_to_the_31_bytes(lhs_name):
    m, n, k = 131200, 8200, 16416
    need_memory(16)
    rhs = weight(n, k)
    x = torch.randint(-60, 60, (m, k), dtype=torch.int8, device="cuda")
    if lhs_name == "e4m3":
        x = x.abs_().view(torch.float8_e4m3fn)  # bytes 0..60 are 0 to 1.5; byte 255 would be NaN
    x_scale = torch.rand(m, device="cuda") + 0.5
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert x.nbytes > 2**31 and out.nbytes > 2**31
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale), rhs, out)
    rows = sorted({*rows_around(m, k), *rows_around(m, 2 * n)})
    assert_right(out[rows], (x[rows], x_scale[rows]), rhs)
    assert not bool(out[:, ::64].isnan().any())


def test_strides_that_reach_beyond_2_to_the_31_bytes():
    """Few rows, far apart, on both sides."""
    m, n, k = 40, 264, 512
    need_memory(8)
    rhs, (x, x_scale) = weight(n, k), activations(m, k, "s8")
    wide = torch.empty(m, 2**26, dtype=torch.int8, device="cuda")
    wide[:, -k:] = x
    out = torch.empty(m, 2**25, dtype=torch.bfloat16, device="cuda")[:, -n:]
    jitgemm.gemm_w4a8_bf16_nt((wide[:, -k:], x_scale), rhs, out)
    assert builders.same_bits(out.contiguous(), call((x, x_scale), rhs))


@pytest.mark.parametrize("m", [3, 80])
def test_weights_beyond_2_to_the_31_bytes(m):
    n, k = 262144 + 72, 16384
    need_memory(24)
    generator = torch.Generator("cuda").manual_seed(1)
    q = torch.randint(-8, 8, (n, k), dtype=torch.int8, device="cuda", generator=generator)
    scale = (torch.rand((n, k // 128), device="cuda", generator=generator) + 0.5).to(torch.bfloat16)
    rhs = pack_w4(q, scale, group_size=128)
    assert rhs.nbytes > 2**31
    lhs = activations(m, k, "s8")
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
    strip_bytes = rhs.blocks[0].nbytes
    middle, strips = 2**31 // strip_bytes, rhs.blocks.shape[0]
    for first, end in ((0, 2), (middle - 2, middle + 2), (strips - 3, strips)):
        rows = slice(64 * first, min(n, 64 * end))
        assert_right(out[:, rows], lhs, pack_w4(q[rows].cpu(), scale[rows].cpu(), group_size=128).to("cuda"))
    assert not bool(out.isnan().any())


# ---- devices --------------------------------------------------------------------------------------------------------


def test_a_tensor_on_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability(1) != (9, 0):
        pytest.skip("needs two Hopper GPUs")
    lhs, rhs = builders.lhs(1, 33, 544, "s8", device="cuda:1"), weight(264, 544).to("cuda:1")
    zero = [tensor.to("cuda:0") for tensor in lhs]
    for _ in range(3):  # cold, then warm, in turns with the other device
        with torch.cuda.device(0):
            guarded = Guarded(33, 264, device="cuda:1")
            jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, guarded.out)
            assert torch.cuda.current_device() == 0
            out = torch.empty(33, 264, dtype=torch.bfloat16, device="cuda:0")
            jitgemm.gemm_w4a8_bf16_nt(tuple(zero), weight(264, 544), out)
        with torch.cuda.device(1):
            guarded.check()
            assert_right(guarded.out.clone(), lhs, rhs)
            assert builders.same_bits(out.cpu(), guarded.out.cpu().contiguous())
    with pytest.raises(ValueError, match="^out: expected a tensor on cuda:1, where lhs"):
        jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)


# ---- this module itself ---------------------------------------------------------------------------------------------


def test_the_drawn_kernels_hold_every_feature():
    kernels = [kernel_of(*drawn) for drawn in drawn_kernels()]
    assert all(illegal(spec, device_figures()) is None for spec in kernels)
    for has_feature in FEATURES:
        assert sum(map(has_feature, kernels)) >= 2
    assert Path(os.environ["JITGEMM_CACHE_DIR"]).is_dir()
