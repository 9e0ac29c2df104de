"""The quantiser's kernels on a Hopper GPU against the CPU's results: the same bits, in every mode, all around a launch.

SiLU and RMSNorm are approximated and added up in another order: scales within 2^-16, codes off by one at ties.
"""

from __future__ import annotations

import builders
import pytest
import torch
from quantize_cases import MODES, X_DTYPES, activations, assert_close, assert_same_bits, given, parameters

import jitgemm
from jitgemm.activations.call import quantize_activations
from jitgemm.kernel.codes import GROUP_SIZES
from jitgemm.kernel.formats import CORRECTION_TYPES, lhs_columns
from jitgemm.weight.correction import with_sums

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]

KS = (
    16, 48, 96, 240, 256, 272, 512, 1024, 1040, 2064, 4128, 8208, 14336, 16384, 16400, 32768, 32784, 65536,
)  # fmt: skip
"""At, just below and just above where kernels change, by 16 and by 32; 32784 and more are read twice."""


POISON = 0x5B


def on_cpu(arguments: dict) -> dict:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


class Guarded:
    """Outputs in a sea of poison; `check` says whether anything else was written."""

    def __init__(self, m: int, k: int, mode: str):
        dtype, affine = MODES[mode]
        self._q = torch.full((m + 2, k + 48), POISON, dtype=torch.uint8, device="cuda")
        self._rows = [torch.full((m + 2,), POISON, dtype=torch.int32, device="cuda") for _ in range(1 + affine)]
        inside = (self._rows[0][1 : m + 1].view(torch.float32), *(t[1 : m + 1] for t in self._rows[1:]))
        self.out = (self._q[1 : m + 1, 16 : 16 + k].view(dtype), *inside)

    def check(self) -> tuple[torch.Tensor, ...]:
        results = tuple(t.clone() for t in self.out)
        m, k = self.out[0].shape
        self._q[1 : m + 1, 16 : 16 + k] = POISON
        assert bool((self._q == POISON).all()), "the kernel wrote beside q"
        for rows in self._rows:
            assert bool((rows[[0, -1]] == POISON).all()), "the kernel wrote beside a row's results"
        return results


def run_both(x: torch.Tensor, mode: str, **arguments) -> tuple[tuple, tuple]:
    """(GPU's results, CPU's) of the same tensors, which are on the GPU."""
    dtype, affine = MODES[mode]
    k = x.shape[1] // 2 if {"silu_mul", "gelu_mul"} & set(arguments) else x.shape[1]
    guarded = Guarded(x.shape[0], lhs_columns(k, arguments.get("correction")), mode)
    quantize_activations(x, dtype, affine=affine, out=guarded.out, **arguments)
    expected = quantize_activations(x.cpu(), dtype, affine=affine, **on_cpu(arguments))
    return guarded.check(), expected


def run_both_by_block(x: torch.Tensor, dtype: torch.dtype, **arguments) -> tuple[tuple, tuple]:
    """The same with a scale for each block; the GPU's are written by column."""
    m, k = x.shape[0], x.shape[1] // (2 if arguments.get("silu_mul") else 1)
    q = torch.full((m + 2, k + 48), POISON, dtype=torch.uint8, device="cuda")
    scale = torch.full((-(-k // 128) + 2, m + 7), 91.0, device="cuda")
    out = q[1:-1, 16 : 16 + k].view(dtype), scale[1:-1, 3 : 3 + m].T
    quantize_activations(x, dtype, scheme="block", out=out, **arguments)
    results = tuple(each.clone() for each in out)
    q[1:-1, 16 : 16 + k], scale[1:-1, 3 : 3 + m] = POISON, 91.0
    assert bool((q == POISON).all() and (scale == 91.0).all()), "the kernel wrote beside its results"
    return results, quantize_activations(x.cpu(), dtype, scheme="block", **on_cpu(arguments))


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k, x_dtype, mode", builders.third(KS, X_DTYPES, MODES), ids=str)
def test_codes_scales_and_zero_points_are_the_cpu_s_bits(k, x_dtype, mode):
    m = 37 if k <= 4128 else 9
    assert_same_bits(*run_both(activations(k, m, k, x_dtype, "cuda"), mode))


@pytest.mark.parametrize("m, k, mode", builders.third([1, 2, 7, 8, 9, 1000, 5000], [512, 2048], MODES))
def test_any_number_of_rows(m, k, mode):
    x, (dtype, affine) = activations(m, m, k, device="cuda"), MODES[mode]
    assert_same_bits(*run_both(x, mode))
    if not affine:
        assert_same_bits(*run_both_by_block(x, dtype))
        q, scale = quantize_activations(x, dtype, scheme="block")
        assert scale.stride() == (1, -(-m // 4) * 4)
        assert_same_bits((q, scale), quantize_activations(x.cpu(), dtype, scheme="block"))


@pytest.mark.parametrize("k, x_dtype, mode", builders.two_thirds([48, 256, 4096, 32784], X_DTYPES, MODES), ids=str)
def test_static_scales(k, x_dtype, mode):
    x = activations(k, 20, k, x_dtype, "cuda")
    for scale in (0.01, 1e-30, 3e30):
        assert_same_bits(*run_both(x, mode, **given(mode, scale, device="cuda")))


@pytest.mark.parametrize(
    "sizes, x_dtype, mode",
    builders.third([(96, 0), (4096, 0), (40960, 0), (384, 128), (4096, 128), (16512, 128)], X_DTYPES, MODES),
    ids=str,
)
def test_nan_and_infinities_are_never_lost(sizes, x_dtype, mode):
    (k, rotation), large = sizes, 6e4 if x_dtype == torch.float16 else 3e38
    x = activations(3, 24, k, x_dtype, "cuda")
    nan, inf = float("nan"), float("inf")
    x[0, 0], x[8, k - 1], x[9, 17], x[10, 5], x[11, 6] = nan, nan, -nan, inf, -inf
    x[13, 3], x[13, 4] = inf, nan
    x[14, 1], x[14, 2], x[16, 3], x[16, 4] = large, -large, inf, -inf
    for static in (False, True):
        results, expected = run_both(x, mode, rotation=rotation, **(given(mode, 0.02, device="cuda") if static else {}))
        assert_same_bits(results, expected)
        lost = {0, 8, 9, 13} | ({16} if rotation or not static else set()) | (set() if static else {10, 11})
        assert set(results[1].isnan().nonzero().flatten().tolist()) >= lost


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_16_bit_value_is_quantised_exactly(x_dtype, mode):
    """All 65536 bit patterns under a static scale: every rounding, tie, subnormal and special value."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(x_dtype).view(64, 1024).cuda()
    for scale in (1.0, 0.25, 3.0, 0.007):
        assert_same_bits(*run_both(x, mode, **given(mode, scale, device="cuda")))


@pytest.mark.parametrize(
    "k, x_dtype, mode", builders.third([48, 512, 1024, 4096, 14336, 20480, 65536], X_DTYPES, MODES), ids=str
)
def test_a_permutation_of_columns(k, x_dtype, mode):
    m = 1000 if k == 4096 else 11
    x = activations(k, m, k, x_dtype, "cuda")
    assert_same_bits(*run_both(x, mode, permutation=parameters(1, k, "cuda")["permutation"]))


ROTATED_KS = (128, 256, 384, 512, 1024, 1152, 4096, 8192, 8320, 14336, 16384, 16512, 28672)
"""At, just below and just above where kernels for a rotation change; 14336 and 16384 with few rows have several
CTAs."""


@pytest.mark.parametrize("k, x_dtype, mode", builders.third(ROTATED_KS, X_DTYPES, MODES), ids=str)
def test_rotated_codes_scales_and_zero_points_are_the_cpu_s_bits(k, x_dtype, mode):
    dtype, affine = MODES[mode]
    for m in (9, 50, 1000) if k in (4096, 14336) else (11,):
        x = activations(k, m, k, x_dtype, "cuda")
        assert_same_bits(*run_both(x, mode, rotation=128))
        assert_same_bits(*run_both(x, mode, rotation=128, **given(mode, 0.02, device="cuda")))
        if not affine:
            expected = quantize_activations(x.cpu(), dtype, scheme="block", rotation=128)
            assert_same_bits(quantize_activations(x, dtype, scheme="block", rotation=128), expected)


@pytest.mark.parametrize("front", ["silu_mul", "gelu_mul", "rms_norm", "residual"])
@pytest.mark.parametrize("k, x_dtype, mode", builders.third([256, 4096, 28672], X_DTYPES, MODES), ids=str)
def test_a_rotation_comes_behind_what_is_computed_first(k, x_dtype, mode, front):
    draw, gate = builders.generator(k), "mul" in front
    x = torch.randn(33, k * (1 + gate), generator=draw).to(x_dtype).cuda()
    x[3] = 0
    norm = parameters(1, k, "cuda", x_dtype)["rms_norm"]
    options = {"silu_mul": {"silu_mul": True}, "gelu_mul": {"gelu_mul": "tanh"}}.get(front, {"rms_norm": norm})
    if front != "residual":
        return assert_close(*run_both(x, mode, rotation=128, **options))
    dtype, affine = MODES[mode]
    residual = torch.randn(33, k, generator=draw).to(x_dtype).cuda()
    *found, total = quantize_activations(x, dtype, affine=affine, rotation=128, residual=residual, **options)
    assert builders.same_bits(total, x + residual)
    assert_same_bits(tuple(found), quantize_activations(total, dtype, affine=affine, rotation=128, **options))


@pytest.mark.parametrize(
    "k, gate, x_dtype, mode",
    builders.third([48, 1040, 4096, 28688], ["silu", "silu, permuted", "gelu", "tanh"], X_DTYPES, MODES),
    ids=str,
)
def test_products_with_a_gate(k, gate, x_dtype, mode):
    x = (torch.randn(33, 2 * k, generator=builders.generator(k)) * 4).to(x_dtype).cuda()
    x[3] = 0
    x[4, :k] = -150.0  # gates end in zeros
    arguments = {"gelu": {"gelu_mul": "none"}, "tanh": {"gelu_mul": "tanh"}}.get(gate, {"silu_mul": True})
    arguments |= {"permutation": parameters(1, k, "cuda")["permutation"]} if "permuted" in gate else {}
    assert_close(*run_both(x, mode, **arguments))


@pytest.mark.parametrize(
    "k, permuted, x_dtype, mode",
    builders.third([16, 512, 1040, 4096, 28688, 65536], [False, True], X_DTYPES, MODES),
    ids=str,
)
def test_rms_norm(k, permuted, x_dtype, mode):
    x = torch.randn(33, k, generator=builders.generator(k)).to(x_dtype).cuda()
    x[3] = 0
    for weight_dtype in X_DTYPES if k == 4096 else (x_dtype,):
        arguments = parameters(1, k, "cuda", weight_dtype)
        if not permuted:
            del arguments["permutation"]
        assert_close(*run_both(x, mode, eps=1e-5, **arguments))


@pytest.mark.parametrize(
    "k, permuted, x_dtype, mode",
    builders.third([48, 1024, 4096, 16400, 28672, 65536], [False, True], X_DTYPES, MODES),
    ids=str,
)
def test_a_residual_is_pytorch_s_addition_and_the_call_behind_it(k, permuted, x_dtype, mode):
    """Bit for bit, wherever the sum goes, in every scheme; nothing beside the sum is written."""
    dtype, affine = MODES[mode]
    m = 1000 if k == 4096 else 33
    draw = builders.generator(k)
    x, residual = (torch.randn(m, k, generator=draw).to(x_dtype).cuda() for _ in range(2))
    x[3], residual[3], x[5, 7], residual[6, k - 1] = 0, 0, float("inf"), float("nan")
    arguments = {"affine": affine, **parameters(1, k, "cuda", x_dtype)}
    if not permuted:
        del arguments["permutation"]
    schemes = [{}, given(mode, 0.02, device="cuda")]
    if not affine and not (permuted and k > 32768):
        schemes.append({"scheme": "block"})
    for scheme in schemes:
        expected = (*quantize_activations(x + residual, dtype, **arguments, **scheme), x + residual)
        for place in ("new", "x", "residual", "rows of a wider tensor"):
            mine = {"x": x.clone(), "residual": residual.clone()}
            wide = torch.full((m + 2, k + 16), 7.0, dtype=x_dtype, device="cuda")
            mine["residual_out"] = mine.get(place, wide[1:-1, 8:-8] if place.startswith("rows") else None)
            *results, total = quantize_activations(dtype=dtype, **mine, **arguments, **scheme)
            assert mine["residual_out"] is None or total is mine["residual_out"]
            assert torch.equal(total.isnan(), expected[-1].isnan())
            assert builders.same_bits(total.nan_to_num(1.0), expected[-1].nan_to_num(1.0))
            assert_same_bits(tuple(results), expected[:-1])
            wide[1:-1, 8:-8] = 7.0
            assert bool((wide == 7.0).all()), "the kernel wrote beside the sum"
            if place == "new":
                everything = {"x": x, "residual": residual, **arguments, **scheme}
                wanted = quantize_activations(dtype=dtype, **on_cpu(everything))
                assert_close(tuple(results), wanted[:-1])


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_added_as_pytorch_does(x_dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(x_dtype).view(64, 1024).cuda()
    for seed in range(8):
        residual = x.flatten()[torch.randperm(65536, generator=builders.generator(seed)).cuda()].view(64, 1024)
        total = quantize_activations(x, torch.int8, rms_norm=torch.ones(1024, device="cuda"), residual=residual)[-1]
        expected = x + residual
        assert torch.equal(total.isnan(), expected.isnan())
        assert builders.same_bits(total[~total.isnan()], expected[~total.isnan()])


@pytest.mark.parametrize("front", ["silu_mul", "rms_norm"])
def test_static_scales_behind_silu_and_rms_norm(front):
    k = 2048
    x = torch.randn(40, 2 * k if front == "silu_mul" else k, generator=builders.generator(1)).cuda()
    x[7, 5] = float("nan")
    arguments = {"silu_mul": True} if front == "silu_mul" else {"rms_norm": parameters(1, k, "cuda")["rms_norm"]}
    for mode in MODES:
        results, expected = run_both(x, mode, **arguments, **given(mode, 0.02, device="cuda"))
        assert results[1].isnan().nonzero().flatten().tolist() == [7]
        assert_close(results, expected)


# ---- a scale for each block ------------------------------------------------------------------------------------------

LHS_DTYPES = tuple(builders.LHS_DTYPES.values())


@pytest.mark.parametrize("k, x_dtype, dtype", builders.third(KS, X_DTYPES, LHS_DTYPES), ids=str)
def test_codes_and_scales_of_blocks_are_the_cpu_s_bits(k, x_dtype, dtype):
    x = activations(k, 37 if k <= 4128 else 9, k, x_dtype, "cuda")
    x[-1, k // 2] = float("nan")
    assert_same_bits(*run_both_by_block(x, dtype))
    if k <= 32768:
        assert_same_bits(*run_both_by_block(x, dtype, permutation=parameters(k, k, "cuda")["permutation"]))


@pytest.mark.parametrize(
    "k, permuted, x_dtype, dtype",
    builders.third([48, 1024, 7168, 16416, 65536], [False, True], X_DTYPES, LHS_DTYPES),
    ids=str,
)
def test_gates_and_norms_come_before_blocks(k, permuted, x_dtype, dtype):
    more = parameters(k, k, "cuda")
    order = {"permutation": more["permutation"]} if permuted and k <= 32768 else {}
    x = torch.randn(9, 2 * k, generator=builders.generator(k)).to(x_dtype).cuda()
    assert_close(*run_both_by_block(x, dtype, silu_mul=True, **order), rare=1e-2)
    assert_close(*run_both_by_block(x[:, :k].contiguous(), dtype, rms_norm=more["rms_norm"], **order), rare=1e-2)


# ---- sums of groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, k", builders.two_thirds(GROUP_SIZES, [16, 1024, 1056, 4112, 14336, 14416, 32784]))
def test_sums_behind_codes_are_the_cpu_s_bits(k, size):
    """Of one row and of a few, which several CTAs may share, and of many; nothing behind the sums is written."""
    correction = CORRECTION_TYPES[(k // 16 + size // 32) % 2], size
    order = parameters(1, k, "cuda")["permutation"]
    for m in (1, 9, 200 if k <= 4112 else 40):
        x = activations(k + m, m, k, device="cuda")
        assert_same_bits(*run_both(x, "s8", correction=correction))
        assert_same_bits(*run_both(x, "s8z", correction=correction, permutation=order))
        assert_same_bits(*run_both(x, "s8z", correction=correction, **given("s8z", 0.02, device="cuda")))


@pytest.mark.parametrize("front", ["silu_mul", "gelu_mul", "rms_norm", "residual", "permuted"])
@pytest.mark.parametrize(
    "k, x_dtype, correction",
    [
        (64, torch.float16, ("bf16", 32)),
        (4096, torch.bfloat16, ("fp16", 64)),
        (4096, torch.float32, ("bf16", 128)),
        (14336, torch.float16, ("bf16", 128)),
        (28688, torch.bfloat16, ("fp16", 32)),
    ],
    ids=str,
)
def test_sums_are_of_the_codes_that_a_prologue_s_kernel_makes(k, x_dtype, correction, front):
    for m in (1, 33, 300):
        draw = builders.generator(k + m)
        x, residual = (torch.randn(m, k * (1 + ("mul" in front)), generator=draw).to(x_dtype).cuda() for _ in range(2))
        weights = parameters(1, k, "cuda", x_dtype)
        options = {
            "silu_mul": {"silu_mul": True},
            "gelu_mul": {"gelu_mul": "tanh"},
            "rms_norm": {"rms_norm": weights["rms_norm"]},
            "residual": {"rms_norm": weights["rms_norm"], "residual": residual},
            "permuted": weights,
        }[front]
        q, *expected = quantize_activations(x, torch.int8, affine=True, **options)
        wide, *found = quantize_activations(x, torch.int8, affine=True, correction=correction, **options)
        assert builders.same_bits(wide, with_sums(q, correction))
        assert all(map(builders.same_bits, found, expected))


# ---- forms of arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_wider_tensor(mode):
    whole = activations(1, 50, 4096 + 64, device="cuda")
    assert_same_bits(*run_both(whole[:, 32 : 32 + 4096], mode))
    assert_same_bits(*run_both(whole[::2, 8 : 8 + 1024], mode))


def test_misaligned_tensors_are_refused():
    """In the second call of the same shapes, too, which skips the checks of shapes."""
    x = activations(1, 4, 520, device="cuda")
    out = torch.empty(4, 512, dtype=torch.int8, device="cuda"), torch.empty(4, device="cuda")
    quantize_activations(x[:, :512], torch.int8, out=out)
    with pytest.raises(ValueError, match="x: expected an address that is a multiple of 16 bytes, got one that is 2"):
        quantize_activations(x[:, 1:513], torch.int8, out=out)
    with pytest.raises(ValueError, match="residual: expected an address"):
        quantize_activations(x[:, :512], torch.int8, rms_norm=torch.ones(512, device="cuda"), residual=x[:, 1:513])
    weight = torch.ones(513, device="cuda")[1:]
    with pytest.raises(ValueError, match="rms_norm: expected an address"):
        quantize_activations(x[:, :512], torch.int8, rms_norm=weight)
    with pytest.raises(ValueError, match=r"out\[0\]: expected memory of its own, got a tensor that overlaps x"):
        quantize_activations(x[:, :512], torch.int8, out=(x.view(torch.int8)[:, :512], out[1]))


# ---- streams, graphs, threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [4, 2000])
def test_the_current_stream_is_honoured(m):
    """By a quantiser and a GEMM: work queued behind a long sleep on a side stream."""
    x, rhs = activations(1, m, 1024, device="cuda"), builders.weight_parts(1, 1024, 1024).packed.to("cuda")
    late = torch.zeros_like(x)
    expected, out = torch.empty(2, m, 1024, dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w4a8_bf16_nt(quantize_activations(x, torch.int8), rhs, expected)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        results = quantize_activations(late, torch.int8)
        jitgemm.gemm_w4a8_bf16_nt(results, rhs, out)
    side.synchronize()
    assert_same_bits(results, quantize_activations(x.cpu(), torch.int8))
    assert builders.same_bits(out, expected)


def test_a_chain_of_quantisers_and_gemms_is_the_calls_one_by_one():
    """Each kernel starts before its predecessor has ended, and still reads what that wrote."""
    k, m = 1024, 16
    layers = [builders.weight_parts(seed, k, k).packed.to("cuda") for seed in range(6)]
    first = activations(1, m, k, device="cuda")
    first[:] = torch.randn(m, k, generator=builders.generator(1)).bfloat16()
    norm = parameters(1, k, "cuda")["rms_norm"]
    buffers = [torch.empty(m, k, dtype=torch.bfloat16, device="cuda") for _ in layers]

    def chain(synchronise: bool) -> list[torch.Tensor]:
        x = first
        for number, (rhs, out) in enumerate(zip(layers, buffers)):
            dtype, affine = list(MODES.values())[number % 3]
            scheme = "block" if number == 4 else "token"
            lhs = quantize_activations(x, dtype, affine=affine, rms_norm=norm, scheme=scheme)
            if synchronise:
                torch.cuda.synchronize()
            jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
            if synchronise:
                torch.cuda.synchronize()
            x = out
        return [out.clone() for out in buffers]

    slow = chain(True)
    assert all(bool(out.isfinite().all()) and float(out.abs().max()) > 0 for out in slow)
    for _ in range(50):
        for out in buffers:
            out.fill_(float("nan"))
        assert all(map(builders.same_bits, chain(False), slow))


def test_outputs_are_not_overwritten_while_the_gemm_before_still_reads_them():
    """One pair of buffers for all layers: a quantiser waits for the GEMM that reads what it is about to write."""
    k, m = 4096, 64
    rhs = builders.weight_parts(1, k, k).packed.to("cuda")
    inputs = [torch.randn(m, k, generator=builders.generator(seed)).bfloat16().cuda() for seed in range(8)]
    lhs = (torch.empty(m, k, dtype=torch.int8, device="cuda"), torch.empty(m, device="cuda"))
    outputs = torch.empty(8, m, k, dtype=torch.bfloat16, device="cuda")
    for x, out in zip(inputs, outputs):
        quantize_activations(x, torch.int8, out=lhs)
        jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
    for x, out in zip(inputs, outputs):
        expected = torch.empty_like(out)
        torch.cuda.synchronize()
        jitgemm.gemm_w4a8_bf16_nt(quantize_activations(x, torch.int8), rhs, expected)
        assert builders.same_bits(out, expected)


@pytest.mark.parametrize(
    "k, mode, scheme, rotation",
    builders.third([512, 4096, 8192, 14336, 16384], MODES, ["token", "block"], [0, 128]),
)
def test_a_row_has_the_same_bits_among_few_rows_and_many(k, mode, scheme, rotation):
    """Few rows have several CTAs each."""
    dtype, affine = MODES[mode]
    if affine and scheme == "block":
        pytest.skip("blocks have no zero points")
    draw = builders.generator(k)
    x, gates, residual = (torch.randn(200, width, generator=draw).bfloat16().cuda() for width in (k, 2 * k, k))
    norm = {"rms_norm": parameters(1, k, "cuda")["rms_norm"]}
    for values, options in ((x, {}), (gates, {"silu_mul": True}), (x, norm), (x, norm | {"residual": residual})):
        options = {"affine": affine, "scheme": scheme, "rotation": rotation, **options}
        many = quantize_activations(values, dtype, **options)
        for rows in (slice(0, 1), slice(60, 93), slice(100, 140)):
            few = options | ({"residual": residual[rows]} if "residual" in options else {})
            assert_same_bits(quantize_activations(values[rows], dtype, **few), tuple(each[rows] for each in many))


def test_a_graph_of_quantisers_and_gemms():
    k, m = 2048, 8
    layers = [builders.weight_parts(seed, k, k).packed.to("cuda") for seed in range(4)]
    x = torch.randn(m, k, generator=builders.generator(1)).bfloat16().cuda()

    def model() -> torch.Tensor:
        h = x
        for rhs in layers:
            out = torch.empty(m, k, dtype=torch.bfloat16, device="cuda")
            jitgemm.gemm_w4a8_bf16_nt(quantize_activations(h, torch.float8_e4m3fn), rhs, out)
            h = out
        return h

    model()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model()
    for seed in (1, 2, 3):
        x.copy_(torch.randn(m, k, generator=builders.generator(seed)))
        graph.replay()
        assert builders.same_bits(captured, model())


# ---- large ----------------------------------------------------------------------------------------------------------


def test_activations_beyond_2_to_the_31_bytes():
    m, k = 300_000, 4096
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    x = torch.empty(m, k, dtype=torch.bfloat16, device="cuda").normal_()
    q, scale = quantize_activations(x, torch.int8)
    for rows in (slice(0, 100), slice(2**31 // (2 * k) - 50, 2**31 // (2 * k) + 50), slice(m - 100, m)):
        assert_same_bits((q[rows], scale[rows]), quantize_activations(x[rows].cpu(), torch.int8))
