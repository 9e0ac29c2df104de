"""The kernels themselves without a GPU, a case of each kind: their PTX, run by tests/emulator.

And the emulator itself: faults that are planted in a kernel do not go unseen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import builders
import moe_cases
import pytest
import quantize_cases
import torch
from emulated_groups import grouped_problem
from emulator import launch
from emulator.launch import Emulator, emulate
from emulator.problems import assert_within_the_bound, problem
from marks import emulated

import jitgemm
from jitgemm.activations import plan as quantizers
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.call import quantize_activations
from jitgemm.activations.reference import gated
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import Gate, Prologue
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel import render
from jitgemm.kernel.codes import GROUP_SIZES
from jitgemm.kernel.formats import CORRECTION_TYPES
from jitgemm.kernel.spec import KernelSpec
from jitgemm.runtime import driver, loaded
from jitgemm.runtime.launch import LaunchCache, this_thread
from jitgemm.select.devices import DEVICES
from jitgemm.weight.correction import with_sums

pytestmark = emulated


@pytest.fixture
def emulator(monkeypatch) -> Emulator:
    return emulate(monkeypatch)


# ---- GEMMs -----------------------------------------------------------------------------------------------------------

DENSE = {
    "e4m3-g128-bf16-m8n64-k1x2-s12": 5,
    "s8-g64zo-fp16-m24n64-k2x2-s4": 30,
    "e4m3fast-channel-tofp32-m16n64-k2x2s-s5": 40,
    "s8fast-g32-fp32-tofp16-m8n256-s6": 21,
    "e4m3fast-g128-bf16-m160hn128-mc2lhs-s4": 170,
    "s8-channelz-b128-m64n128-s5": 70,
    "e4m3w8-g128-bf16-b128-m16n64-k2x2s-s5-ss": 20,
    "s8w8-channel-m64n192-mc2lhs-s4-ss": 130,
    "e4m3w8-g128-fp32-b128-m128n128-s3-ss-tr": 300,
    "e4m3w8-g128-fp32-b128-tofp32-m128n192-s3-ss-tr": 150,
    "e4m3w8-g128-fp16-b128-tofp16-m64n128-mc2lhs-s4-ss-tr": 170,
    "s8w8-g128-bf16-b128-m192n128-mc2lhs-s3-ss-tr": 210,
    "e4m3w8-g128-fp32-b128-m256hn128-s3-ss-tr": 330,
    "s8w8-g128-fp16-b128-tofp32-m256hn64-s2-ss-tr": 190,
    "s8fast-g256-bf16-m16n64-k1x2-s4": 20,
    "s8fast-g256-bf16-m64n256-s4": 70,
    "e4m3-g64-bf16-m32n64-k4x2s-s3": 45,
    "s8fast-g128-bf16-m48n64-k2x3s-s3": 100,
    "e4m3-g128-bf16-b128e-m16n64-k1x2-s4": 20,
    "s8w8-g128-fp32-b128e-m128n64-s3-ss-tr": 130,
    "e4m3fast-g128-bf16-m104n192-s4": 110,
    "e4m3fast-g128-bf16-m120n128-s4-f16": 130,
    "e4m3fast-g128-bf16-m168n128-s4": 170,
    "s8fast-channel-m224hn128-s4": 230,
}
"""Kernels, and tokens for them: no multiple of the tile."""


@pytest.mark.parametrize("label", DENSE)
def test_a_gemm_is_within_its_bound(emulator, label):
    spec = KernelSpec.from_label(label)
    operands = problem(spec, DENSE[label], 200, 544)
    GemmLaunch(operands, spec).launch(operands)
    assert emulator.launched == [label]
    assert_within_the_bound(operands)


@pytest.mark.parametrize("label", [label for label in DENSE if label.endswith("-tr")][::2])
def test_tokens_as_rows_give_the_bits_of_weights_as_rows(emulator, label):
    spec = KernelSpec.from_label(label)
    results = []
    for kernel in (spec, replace(spec, tokens_as_m=False, block_n=64, block_m=64, token_halves=1, multicast_lhs=1)):
        operands = problem(spec, DENSE[label], 200, 544)
        GemmLaunch(operands, kernel).launch(operands)
        results.append(operands.out)
    assert builders.same_bits(*results)


@pytest.mark.parametrize("label", ["s8fast-g128-bf16-m96hn128-s4", "s8-g256z-bf16-m80n64-k2x1s-s3"])
def test_a_kernel_built_with_one_set_of_fragments_gives_the_bits_of_two(monkeypatch, label):
    """What the compiler gets in place of a kernel that spills."""
    spec, results = KernelSpec.from_label(label), []
    for sets in (2, 1):
        emulator = emulate(monkeypatch)
        monkeypatch.setattr(launch, "kernels", {})
        monkeypatch.setattr(render, "fragment_sets", lambda spec, sets=sets: sets)
        operands = problem(spec, 110, 200, 1056)
        GemmLaunch(operands, spec).launch(operands)
        assert emulator.launched == [label]
        results.append(operands.out)
    assert builders.same_bits(*results)
    assert_within_the_bound(operands)


@pytest.mark.parametrize("label", ["e4m3-g128-bf16-m24n64-k2x2s-s2", "e4m3w8-g128-fp32-b128-m128n64-s2-ss-tr"])
def test_the_order_in_which_warps_run_changes_nothing(monkeypatch, label):
    spec = KernelSpec.from_label(label)
    results = []
    for seed in (1, 2, 3):
        emulate(monkeypatch, seed=seed)
        operands = problem(spec, 60, 136, 1056)
        GemmLaunch(operands, spec).launch(operands)
        results.append(operands.out)
    assert all(builders.same_bits(results[0], other) for other in results[1:])


GROUPED = {
    "e4m3-g128-bf16-m80n192-mc2lhs-s4-e64": [0, 3, 90, 0, 170],
    "s8-g64-bf16-m16n64-k2x2-s6-e64": [9, 0, 0, 1, 33],
    "e4m3w8-g128-bf16-m8n64-k1x2-s6-ss-e64": [9, 0, 0, 1, 33],
    "e4m3w8-g128-bf16-b128-m128n128-s3-ss-tr-e64": [9, 0, 200, 1, 64],
    "e4m3w8-g128-bf16-b128-m256hn128-s3-ss-tr-e64": [9, 0, 260, 1, 70],
    "s8fast-g128-bf16-m80n128-s4-parts-e64": [9, 0, 90, 1, 33],
    "e4m3fast-g128-bf16-m104n192-s4-e64": [20, 150, 0, 80],
    "s8fast-channel-m224n128-mc2lhs-s3-e64": [50, 324, 0, 9],
    "e4m3-g64-bf16-m16n64-s6-f16-e64": [9, 0, 90, 1, 33],
    "e4m3-g128-bf16-m80n128-mc2lhs-s5-f16-e64": [3, 0, 83],
    "s8fast-g128-bf16-m16n64-k2x2-s6-xfp16-e64": [9, 0, 0, 1, 33],
    "s8fast-g128-bf16-m80n128-s4-parts-xbf16-e64": [9, 0, 90, 1, 33],
}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("label", GROUPED)
def test_a_grouped_gemm_is_within_its_bound(emulator, label, gathered):
    spec = KernelSpec.from_label(label)
    operands = grouped_problem(spec, GROUPED[label], gathered)
    GemmLaunch(operands, spec).launch(operands)
    assert emulator.launched == [label]
    assert_experts_within_the_bound(operands, GROUPED[label])


def assert_experts_within_the_bound(operands: Gemm, counts: list[int]) -> None:
    groups, end = operands.groups, 0
    for e, count in enumerate(counts):
        begin, end = end, end + count
        rows = torch.arange(begin, end) if groups.row_index is None else groups.row_index[begin:end].long()
        x = operands.x.view(torch.uint8)[rows].view(operands.x.dtype)  # torch 2.8 indexes no e4m3 on the CPU
        scales = [each[rows] for each in (operands.x_scale, operands.x_zero) if each is not None]
        ref, bound = gemm_w4a8_bound((x, *scales), operands.weight[e], bias=operands.bias[e])
        assert bool(((operands.out[begin:end].double() - ref).abs() <= bound).all()), e


WILD = {
    "first rows": [-7, 9, 9, 40, 33, 99],  # a last expert before its first row, and rows that there are not
    "first rows of 64 bits": [-(2**40), 9, 9, 40, 2**32 + 3, 2**40],
    "rows and ends": [[-5, 9], [20, 12], [30, 4000], [9, 9], [2**31 - 1, -(2**31)]],
    "numbers of rows": [5, -3, 99, 0, 2**31 - 1],
}


@pytest.mark.parametrize("sizes", WILD)
@pytest.mark.parametrize("label", ["e4m3-g128-bf16-m8n64-k1x2-s4-e64", "s8fast-g128-bf16-m80n128-s4-e64"])
def test_sizes_of_experts_that_cannot_be_are_clamped_and_no_other_row_is_touched(monkeypatch, label, sizes):
    spec = KernelSpec.from_label(label)
    operands = grouped_problem(spec, [12] * 5, False)
    given = torch.tensor(WILD[sizes], dtype=torch.int64 if "64" in sizes else torch.int32)
    outs = []
    for run in (lambda: None, lambda: emulate(monkeypatch)):
        out = torch.full((62, 136), 3.0, dtype=torch.bfloat16)
        run()
        if sizes == "numbers of rows":
            parts = operands.x.view(5, 12, -1), operands.x_scale.view(5, 12), out[1:-1].view(5, 12, -1)
            jitgemm.m_grouped_gemm_w4a8_nt_masked(parts[:2], operands.weight, parts[2], given, 4, kernel=label)
        else:
            lhs = operands.x, operands.x_scale
            jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, operands.weight, out[1:-1], given, kernel=label)
        outs.append(out)
    written = [(out != 3).any(1) for out in outs]
    assert torch.equal(*written) and written[0].any() and not written[0].all()
    assert torch.allclose(*(out.float() for out in outs), rtol=0.05, atol=0.05)


SEVERAL = (
    "e4m3-g128-bf16-m8n64-k4x1-s4-e64", "s8fast-channel-m8n64-k2x2-s5-e64", "e4m3fast-g64-bf16-m16n128-s4-e64",
    "e4m3-g128-bf16-b128-m16n64-k2x1-s4-e64", "s8-g128-bf16-m8n192-s5-e64", "e4m3w8-g128-bf16-m8n64-k2x1-s4-ss-e64",
)  # fmt: skip


@pytest.mark.parametrize("label, k", builders.two_thirds(SEVERAL, [416, 1056, 1184]))
def test_a_cta_has_several_tiles_of_experts(monkeypatch, label, k):
    """Tiles of one CTA follow one another, with records that no warpgroup, one or all of them have of a tile's last
    stage."""
    spec, counts = KernelSpec.from_label(label), [9, 0, 3, 20]
    emulate(monkeypatch)
    monkeypatch.setattr("jitgemm.gemm.launch.device_of", lambda _: replace(DEVICES["h200"], num_sms=2))
    operands = grouped_problem(spec, counts, False, k)
    GemmLaunch(operands, spec).launch(operands)
    assert_experts_within_the_bound(operands, counts)


@pytest.mark.parametrize("byte", [0, 254, 255])
@pytest.mark.parametrize("label", [label for label in DENSE if "b128e" in label])
def test_a_packed_scale_of_nan_makes_its_token_nan_and_the_least_and_largest_are_powers_of_two(emulator, label, byte):
    spec = KernelSpec.from_label(label)
    operands = problem(spec, DENSE[label], 136, 416)
    words = operands.x_scale.view(torch.uint8).view(-1, 4).clone()
    words[3, 1] = byte  # of token 3's second 128 k
    if byte == 254:
        operands.x[3, 128:256] = 0
    operands = operands._replace(x_scale=words.view(torch.int32), bias=None)
    if byte == 0:  # alone in its row
        operands.x[3, :128] = operands.x[3, 256:] = 0
    GemmLaunch(operands, spec).launch(operands)
    if byte == 0:
        ref = jitgemm.gemm_w4a8_reference((operands.x, operands.x_scale), operands.weight)
        assert torch.allclose(operands.out[3].double(), ref[3].double(), rtol=0.02, atol=0) and ref[3].all()
    elif byte == 255:
        assert operands.out[3].isnan().all()
        operands.out[3] = 0
        assert operands.out.isfinite().all()
    else:
        assert_within_the_bound(operands)


# ---- quantisers and the layer of experts -----------------------------------------------------------------------------

QUANTIZERS = {
    "per token": ("e4m3", 288, {}),
    "affine": ("s8z", 288, {}),
    "static": ("s8", 288, quantize_cases.given("s8", 0.02)),
    "a given scale a row": ("e4m3", 288, {"scheme": "tensor", "scale": torch.linspace(0.01, 0.05, 11)}),
    "given scales, long": ("s8", 40960, {"scheme": "tensor", "scale": torch.tensor([0.02, torch.nan, 0.3])}),
    "by block": ("e4m3", 416, {"scheme": "block"}),
    "permuted": ("s8", 288, {"permutation": True}),
    "permuted by block": ("s8", 416, {"permutation": True, "scheme": "block"}),
    "a row in a CTA": ("s8", 2080, {}),
    "a long row": ("s8", 40960, {}),
    "rotated": ("s8", 384, {"rotation": 128}),
    "rotated, one vector a thread": ("e4m3", 128, {"rotation": 128}),
    "rotated, affine": ("s8z", 896, {"rotation": 128}),
    "rotated, static": ("s8z", 1152, quantize_cases.given("s8z", 0.02) | {"rotation": 128}),
    "rotated by block": ("e4m3", 4224, {"rotation": 128, "scheme": "block"}),
    "rotated by block in a warp": ("s8", 640, {"rotation": 128, "scheme": "block"}),
    "rotated, long": ("e4m3", 16512, {"rotation": 128}),
    "rotated by block, long": ("s8", 16512, {"rotation": 128, "scheme": "block"}),
}
SUMMED = {
    "a row in a warp": ("s8", 304, {}),
    "affine": ("s8z", 1024, {}),
    "permuted": ("s8z", 272, {"permutation": True}),
    "static": ("s8", 976, quantize_cases.given("s8", 0.02)),
    "a row in a CTA": ("s8", 2064, {}),
    "permuted in a CTA": ("s8", 2064, {"permutation": True}),
    "a long row": ("s8z", 32816, {}),
    "a long permuted row": ("s8", 32816, {"permutation": True}),
}
"""With sums behind codes."""


def of_mode(mode: str, k: int, options: dict, *more: str) -> tuple:
    """k, the type, whether with zero points, and options with the parameters that they or `more` name."""
    names = [name for name in ("permutation", *more) if name in options or name in more]
    parameters = quantize_cases.parameters(2, k)
    return k, *quantize_cases.MODES[mode], options | {name: parameters[name] for name in names}


@pytest.mark.parametrize(
    ("name", "dtype", "correction"),
    [
        *((name, dtype, None) for name, dtype in builders.third(QUANTIZERS, quantize_cases.X_DTYPES)),
        *((name, torch.bfloat16, (type, size)) for name, size in builders.third(SUMMED, GROUP_SIZES) for type in CORRECTION_TYPES),
    ],
    ids=str,
)  # fmt: skip
def test_a_quantiser_gives_the_reference_s_bits_and_writes_nothing_else(monkeypatch, name, dtype, correction):
    k, q_type, affine, options = of_mode(*(SUMMED if correction else QUANTIZERS)[name])
    options |= {"affine": affine, "correction": correction}
    x = quantize_cases.activations(1, 11 if k < 10000 else 3, k, dtype)
    expected = quantize_activations(x, q_type, **options)
    whole = torch.full((len(x), expected[0].shape[1] + 32), 0x5B, dtype=torch.int8)
    out = whole[:, 16:-16].view(q_type), *map(torch.empty_like, expected[1:])
    emulator = emulate(monkeypatch)
    quantize_activations(x, q_type, out=out, **options)
    assert len(emulator.launched) == 1
    quantize_cases.assert_same_bits(out, expected)
    assert bool((whole[:, :16] == 0x5B).all()) and bool((whole[:, -16:] == 0x5B).all())


@pytest.mark.parametrize("k", [288, 2080])
@pytest.mark.parametrize(
    "options",
    [
        {}, quantize_cases.given("e4m3", 0.02), {"rms_norm": True}, {"affine": True}, {"rotation": 128},
        {"rotation": 128} | quantize_cases.given("e4m3", 0.02),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_hold_no_numbers_are_nan_as_the_reference_s(monkeypatch, options, k):
    """NaN, an infinity, squares or a range beyond fp32."""
    k = k // 128 * 128 if "rotation" in options else k
    x = torch.randn(5, k, generator=builders.generator(1))
    x[1, 7], x[2, 8], x[3], x[4, :2] = torch.nan, torch.inf, 3e19, torch.tensor([3e38, -3e38])
    dtype = torch.int8 if "affine" in options else torch.float8_e4m3fn
    if "rms_norm" in options:
        options = {"rms_norm": quantize_cases.parameters(2, k)["rms_norm"]}
    expected = quantize_activations(x, dtype, **options)
    assert expected[1].isnan().any()
    emulate(monkeypatch)
    quantize_cases.assert_close(quantize_activations(x, dtype, **options), expected)


@pytest.mark.parametrize("k", [288, 2080, 20480])
@pytest.mark.parametrize(
    "prologue", [{"silu_mul": True}, {"rms_norm": True}, {"rms_norm": True, "residual": True}], ids=str
)
def test_sums_are_of_the_codes_that_a_prologue_s_kernel_makes(monkeypatch, prologue, k):
    draw = builders.generator(1)
    x, residual = (torch.randn(3, k * (1 + ("silu_mul" in prologue)), generator=draw).bfloat16() for _ in range(2))
    parameters = {"rms_norm": quantize_cases.parameters(2, k)["rms_norm"], "residual": residual, "silu_mul": True}
    options = {name: parameters[name] for name in prologue}
    emulate(monkeypatch)
    q, scale, zero, *total = quantize_activations(x, torch.int8, affine=True, **options)
    found = quantize_activations(x, torch.int8, affine=True, correction=("fp16", 64), **options)
    assert all(map(builders.same_bits, found, (with_sums(q, ("fp16", 64)), scale, zero, *total)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    builders.third(
        ["per token", "affine", "by block", "permuted by block", "a row in a CTA", "long", "rotated", "rotated, long"],
        quantize_cases.X_DTYPES,
    ),
)
def test_a_residual_s_sum_is_pytorch_s_and_codes_are_the_kernel_s_without_it(monkeypatch, name, dtype):
    k, q_type, affine, options = of_mode(*QUANTIZERS.get(name, ("s8", 20480, {})), "rms_norm")
    draw = builders.generator(1)
    x, residual = (torch.randn(11 if k < 10000 else 3, k, generator=draw).to(dtype) for _ in range(2))
    total = x + residual
    emulator = emulate(monkeypatch)
    expected = quantize_activations(total, q_type, affine=affine, **options)
    for into in (None, residual):
        *found, s = quantize_activations(x, q_type, affine=affine, residual=residual, residual_out=into, **options)
        assert builders.same_bits(s, total)
        quantize_cases.assert_same_bits(tuple(found), expected)
    assert len(emulator.launched) == 3 and s is residual


@pytest.mark.parametrize(
    ("mode", "names", "rows_at_once"),
    [
        ("e4m3", ["silu_mul"], 5), ("s8z", [], 1), ("e4m3", ["rms_norm"], 5), ("s8z", ["rms_norm", "residual"], 1),
        ("e4m3", ["block", "silu_mul"], 5), ("s8", ["block", "rms_norm", "residual"], 1), ("s8", ["correction"], 5),
        ("s8z", ["correction", "rms_norm", "residual"], 1), ("s8z", ["rotation"], 5),
        ("s8", ["rotation", "rms_norm", "residual"], 1), ("e4m3", ["block", "rotation", "silu_mul"], 5),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_has_the_same_bits_however_many_ctas_share_it(monkeypatch, mode, names, rows_at_once):
    k, (q_type, affine) = 4080 if "correction" in names else 4096, quantize_cases.MODES[mode]
    draw = builders.generator(1)
    x, residual = (torch.randn(5, k * (1 + ("silu_mul" in names)), generator=draw).bfloat16() for _ in range(2))
    parameters = {"rms_norm": quantize_cases.parameters(2, k)["rms_norm"], "residual": residual, "silu_mul": True}
    parameters |= {"correction": ("bf16", 64), "rotation": 128}
    options = {name: parameters[name] for name in names if name in parameters}
    options |= {"affine": affine, "scheme": "block" if "block" in names else "token"}
    emulate(monkeypatch)
    for module in (loaded, quantizers):
        monkeypatch.setattr(module, "device_of", lambda _: replace(DEVICES["h200"], num_sms=rows_at_once))
    monkeypatch.setattr(driver, "resident_ctas", lambda *_: 1)
    found = []
    for ctas in (1, 2, 4):
        monkeypatch.setattr(quantizers, "spec_for_rows", lambda spec, *_, ctas=ctas: replace(spec, ctas=ctas))
        monkeypatch.setattr(this_thread, "cache", LaunchCache())
        found.append(quantize_activations(x, q_type, **options))
    for shared in found[1:]:
        assert all(builders.same_bits(a, b) for a, b in zip(shared, found[0], strict=True))


@pytest.mark.parametrize(
    "k, options",
    builders.two_thirds(
        [288, 2080, 20480], [{"silu_mul": True}, {"gelu_mul": "tanh"}, {"gelu_mul": "none"}, {"rms_norm": True}]
    ),
    ids=str,
)
def test_a_quantiser_s_values_are_near_the_reference_s(monkeypatch, options, k):
    x = torch.randn(5, k if "rms_norm" in options else 2 * k, generator=builders.generator(1)).bfloat16()
    if "rms_norm" in options:
        options = {"rms_norm": quantize_cases.parameters(2, k)["rms_norm"]}
    q, scale = quantize_activations(x, torch.int8, **options)
    emulate(monkeypatch)
    found, found_scale = quantize_activations(x, torch.int8, **options)
    assert torch.allclose(found_scale, scale, rtol=2**-16, atol=0)
    apart = (found.int() - q.int()).abs()  # at a tie one code may be the next
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("kind", "limit"), [*product(moe_cases.ACTIVATIONS, (float("inf"), 7.0)), ("relu2", float("inf"))]
)
def test_a_gate_s_values_are_as_near_as_the_call_says(monkeypatch, kind, limit):
    """Rows of one value: their scale is that value's size / 127."""
    sizes = 2.0 ** torch.linspace(-12, 6, 37)
    values = torch.cat((-sizes, torch.zeros(1), sizes))
    g, u = torch.cartesian_prod(values, torch.tensor([-9.0, 0.01, 2.5])).T
    gate = Gate(kind) if kind == "relu2" else Gate(kind, "gate_up", limit, 1.5)
    x = torch.stack((g, u)[: gate.inputs], 1).repeat_interleave(32, 1)
    expected = gated(x.double(), gate)[:, 0].abs()
    emulate(monkeypatch)
    activation = activation_of(torch.int8, "token", False)
    _, scale, _ = quantize(QuantizeCall(x, activation, Prologue(gate=gate)))
    error = (scale.double() * 127 - expected).abs()
    assert bool((error <= expected * 2**-17 + 2.0**-118).all())  # a scale is at least 2^-126


@pytest.mark.parametrize(
    ("tokens", "experts", "options"),
    [
        (9, 5, {}),
        (70, 5, {"activation": "swiglu_oai", "order": "interleaved", "limit": 2.0}),
        (3, 40, {"activation": "gelu"}),
        (5, 5, {"activation": "swiglu_step", "limit": 0.8}),
        (5, 5, {"activation": "situ", "alpha": 1.5, "limit": 2.0, "order": "up_gate"}),
        (5, 5, {"activation": "relu2"}),
        (9, 5, {"rotation": 128}),
        (70, 5, {"rotation": 128, "scheme": "block"}),
        (300, 9, {}),  # more choices than one CTA routes
    ],
    ids="silu,swiglu_oai,gelu,swiglu_step,situ,relu2,rotated,rotated and gathered,routed by a cluster".split(","),
)
def test_a_layer_of_experts(monkeypatch, tokens, experts, options):
    top_k = 8 if tokens == 300 else 3
    sizes = {"k": 256, "inter": 128} if "rotation" in options else {}
    sizes |= {"tokens": tokens, "experts": experts, "top_k": top_k}
    case = moe_cases.Case(**sizes, dtype=torch.bfloat16, options=dict(options))
    expected = moe_cases.by_definition(case)
    emulator = emulate(monkeypatch)
    out = jitgemm.fused_experts(*case.arguments, **case.options)
    assert 4 <= len(emulator.launched) <= 6
    size = expected.abs().amax(1, keepdim=True)
    assert bool(((out.double() - expected).abs() <= 0.03 * size).all())


# ---- the emulator ----------------------------------------------------------------------------------------------------


GEMM, SPLIT = "s8fast-g128-bf16-m16n64-s3", "s8fast-g128-bf16-m16n64-k2x2s-s3"
BLOCKS = "s8fast-g128-bf16-b128-m16n64-s3"
SHARES = "e4m3-g128-bf16-m16n64-mc2lhs-s3"
SEEN_TOO_EARLY = "need not see that it was initialised|was not initialised"
LOADING = "is overwritten while warp [0-9]+'s load of it may be on its way"
FAULTS = {
    "data is not waited for": (
        GEMM, "gemm/loop", "barrier_wait<Config::kDebug>(shared.full(from.stage), from.parity);", "",
        "outside of the bound|changed before|more arrivals",
    ),
    "stages are not handed back": (
        GEMM, "gemm/loop", "if (position.lane == 0) barrier_arrive(shared.empty(stage));", "", "the kernel hangs"
    ),
    "a stage is filled too early": (
        GEMM, "gemm/producer",
        "block)};\n            barrier_wait<Config::kDebug>(shared.empty(ring.stage), ring.parity ^ 1);", "block)};",
        f"changed before|outside of the bound|more arrivals|{LOADING}",
    ),
    "a store without a fence": (GEMM, "gemm/epilogue", "async_proxy_fence();", "", "without fence.proxy.async"),
    "a store before all have written": (
        GEMM, "gemm/epilogue", "async_proxy_fence();\n    warpgroup_sync(position.warpgroup);", "async_proxy_fence();",
        "without fence.proxy.async|outside of the bound",
    ),
    "lanes arrive at a barrier that another lane initialises": (
        BLOCKS, "gemm/kernel", "elect.sync orders no memory.\n        __syncwarp();", "\n", SEEN_TOO_EARLY
    ),
    "warps use barriers of a warp that they have not met": (
        GEMM, "gemm/kernel", "    } else {\n        __syncthreads();", "    } else {", SEEN_TOO_EARLY
    ),
    "a cluster that has not met": (SPLIT, "gemm/kernel", "cluster_started<kPrefetches>();", "", SEEN_TOO_EARLY),
    "barriers that the copy engine need not see": (
        GEMM, "ptx/barrier", 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "",
        "no fence has shown it to the copy engine",
    ),
    "barriers that other CTAs need not see": (
        SHARES, "ptx/barrier", 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "", SEEN_TOO_EARLY
    ),
    "a stage is handed back ahead of its loads": (
        GEMM, "ptx/barrier", 'asm volatile("fence.acq_rel.cta;" ::: "memory");', "", LOADING
    ),
    "slots of sums are handed back ahead of their loads": (
        SPLIT, "gemm/sums",
        "if (last_tile) return;\n    loads_done();\n    if (position.lane == 0) {\n        for (u32 rank",
        "if (last_tile) return;\n    if (position.lane == 0) {\n        for (u32 rank", LOADING,
    ),
    "another CTA's sums are waited for in this one": (
        SPLIT, "gemm/sums",
        "barrier_wait_for_cluster<Config::kDebug>(shared.slice_full", "barrier_wait<Config::kDebug>(shared.slice_full",
        "a wait at CTA scope",
    ),
    "idle threads do not wait for the grid before": (
        GEMM, "gemm/kernel", "} else {\n            wait_for_previous_grid();\n        }", "}",
        "ends without griddepcontrol.wait",
    ),
}  # fmt: skip
"""Kernel, header, what stands there, what a mistake makes of it, and what then is to be seen."""


@pytest.fixture
def plant(monkeypatch):
    """Puts a mistake into a header for the kernels that are built from here on."""

    return partial(launch.plant, monkeypatch)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(emulator, plant, fault):
    label, header, old, new, expected = FAULTS[fault]
    plant(header, old, new)
    spec = KernelSpec.from_label(label)
    operands = problem(spec, 300, 200, 1056)
    with pytest.raises(AssertionError, match=expected):
        GemmLaunch(operands, spec).launch(operands)
        assert_within_the_bound(operands)


@pytest.mark.parametrize(
    ("header", "old", "new", "expected"),
    [
        ("range", "if constexpr (Team<Config>::kCluster) loads_done();", "", LOADING),
        ("range", "barrier_wait_for_cluster<false>(full", "barrier_wait<false>(full", "a wait at CTA scope"),
        ("kernel", "    wait_for_previous_grid();\n\n    u8* const row", "    u8* const row", "writes global"),
    ],
    ids=["loads in flight", "scope", "the grid before"],
)
def test_a_fault_in_a_quantiser_of_rows_that_ctas_share_is_seen(monkeypatch, plant, header, old, new, expected):
    emulate(monkeypatch)
    plant(f"quantize/{header}", old, new)
    for module in (loaded, quantizers):
        monkeypatch.setattr(module, "device_of", lambda _: replace(DEVICES["h200"], num_sms=1))
    monkeypatch.setattr(driver, "resident_ctas", lambda *_: 1)
    monkeypatch.setattr(quantizers, "spec_for_rows", lambda spec, *_: replace(spec, ctas=2))
    with pytest.raises(AssertionError, match=expected):
        quantize_activations(torch.randn(9, 4096).bfloat16(), torch.int8)


def test_memory_of_other_tensors_is_not_touched(emulator, monkeypatch):
    x = torch.randn(8, 256).bfloat16()
    quantize_activations(x, torch.int8)
    real = launch.extent
    monkeypatch.setattr(launch, "extent", lambda each: real(each[:-1] if each.dtype == x.dtype else each))
    with pytest.raises(AssertionError, match="16 bytes at 0x[0-9a-f]+ are outside of all tensors"):
        quantize_activations(x.clone(), torch.int8)


def test_warps_that_met_at_a_barrier_may_overwrite_what_the_others_have_loaded(emulator, monkeypatch):
    """Tiles of two records, several a CTA: a warp copies the next tile's scales before another has gone on from the
    barrier behind the last one's."""
    spec = KernelSpec.from_label("s8fast-channel-m96n192-s6")
    monkeypatch.setattr("jitgemm.gemm.launch.device_of", lambda _: replace(DEVICES["h200"], num_sms=2))
    monkeypatch.setattr(driver, "resident_clusters", lambda *_: 2)
    operands = problem(spec, 200, 392, 144)
    GemmLaunch(operands, spec).launch(operands)
    assert_within_the_bound(operands)
