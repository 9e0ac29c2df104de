"""k a multiple of 16 and not of 32 on a GPU, where test_codes_gpu.py and the quantisers' sizes do not ask."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace

import builders
import pytest
import torch
from builders import PER_CHANNEL
from expert_layers_gpu import assert_layer
from guarded_calls import assert_right
from masked_experts import called as called_masked
from masked_experts import sorted_tokens
from moe_cases import MODES, Case
from quantised_on_both import run_both
from quantize_cases import X_DTYPES, activations, assert_close, assert_same_bits, parameters
from w8 import weight as weight_of_8_bits

import jitgemm
from jitgemm import deep_gemm
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import Gate, Prologue
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.nn import W4A8Linear, W8A8Linear
from jitgemm.select.devices import device_spec
from jitgemm.select.legal import legal_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]

KS = (16, 48, 496, 1040)


def surrounded(lhs: tuple) -> tuple:
    """The same activations with the byte 127 on all sides of each row: a NaN of e4m3, the largest int8."""
    x = lhs[0].view(torch.uint8)
    whole = torch.full((x.shape[0] + 2, x.shape[1] + 48), 127, dtype=torch.uint8, device="cuda")
    whole[1:-1, 16:-32] = x
    return whole[1:-1, 16:-32].view(lhs[0].dtype), *lhs[1:]


def lhs_of(m: int, k: int, lhs: str, kind: str = "token") -> tuple:
    if kind == "block":
        return surrounded(builders.block_lhs(m, m, k, lhs, column_major=m % 2 == 1, device="cuda"))
    return surrounded(builders.lhs(m, m, k, lhs, device="cuda"))


# ---- dense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("lhs_type", builders.LHS_DTYPES)
def test_every_weight_comes_out_exactly(lhs_type, k):
    weights = [builders.weight_parts(2, 72, k, 32, zero_point=True, device="cuda").packed]
    weights.append(weight_of_8_bits(72, k, lhs_type, 32, scale="bf16"))
    for rhs, gemm in zip(weights, (jitgemm.gemm_w4a8_nt, jitgemm.gemm_w8a8_nt)):
        identity, out = torch.eye(k, device="cuda").to(builders.LHS_DTYPES[lhs_type]), torch.empty(k, 72, device="cuda")
        gemm(surrounded((identity, torch.ones(1, device="cuda"))), rhs, out)
        assert torch.equal(out, rhs.dequantize().T)


WAYS = [
    {}, {"split_k": 4, "warpgroups_k": 2}, {"split_k": 6, "warpgroups_k": 1}, {"reduce_scatter": True, "warpgroups_k": 2},
    {"multicast_lhs": 2}, {"token_halves": 2}, {"block_m": 8}, {"block_n": 256}, {"tokens_as_m": True},
]  # fmt: skip


@pytest.mark.parametrize("lhs_type, bits, way", [
    each for each in itertools.product(builders.LHS_DTYPES, (4, 8), WAYS) if each[1] == 8 or "tokens_as_m" not in each[2]
], ids=str)  # fmt: skip
def test_every_way_through_the_kernel(bits, lhs_type, way):
    m, n, k, group = 213, 264, 1040, 128 if "tokens_as_m" in way else 0
    options = {"uniform_strip_scale": bits == 8, "scale_type": "fp32"}
    rhs = builders.weight_parts(1, n, k, codes=lhs_type, bits=bits, **options, device="cuda").packed
    found = [
        spec for spec in legal_kernels(lhs_type, rhs.format, device_spec("h200"), lhs_group=group)
        if all(getattr(spec, field) == value for field, value in way.items())
    ]  # fmt: skip
    lhs = lhs_of(m, k, lhs_type, "block" if group else "token")
    for spec in random.Random(1).sample(found, 2):
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        operands = Gemm(*lhs, None, rhs, out, None)
        GemmLaunch(operands, with_k_rules(spec, k)).launch(operands)
        assert_right(out, lhs, rhs, has_rms=False)


# ---- grouped ---------------------------------------------------------------------------------------------------------

GROUPED = ("e4m3", "e4m3-g32z", "s8", "s8-g32o", "s8-channel", "w8-e4m3", "w8-s8")


@pytest.mark.parametrize("k", KS)
def test_pairs_of_deep_gemm(k):
    n, w = 136, builders.weight_parts(1, 136, k, PER_CHANNEL, codes="e4m3", bits=8, device="cuda").q
    scale = torch.rand(2, -(-k // 128), device="cuda") * 0.01 + 0.001
    a, d = lhs_of(17, k, "e4m3", "block"), torch.empty(17, n, dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt(a, (w, scale), d)
    assert_right(d, a, jitgemm.pack_w8(w, scale), has_rms=False)


# ---- quantising ------------------------------------------------------------------------------------------------------

QUANTISED = (16, 48, 240, 272, 1040, 2064, 8208, 16400, 32784)
"""At and just above where kernels change; 32784 is read twice."""


@pytest.mark.parametrize("k, permuted, mode", builders.third(QUANTISED, (False, True), MODES))
def test_gates_norms_and_residuals(k, permuted, mode):
    more = parameters(k, k, "cuda")
    order = {"permutation": more["permutation"]} if permuted else {}
    for x_dtype in X_DTYPES:
        x = torch.randn(9, 2 * k, generator=builders.generator(k)).to(x_dtype).cuda()
        assert_close(*run_both(x, mode, silu_mul=True, **order), rare=1e-2)
        assert_close(*run_both(x, mode, gelu_mul="tanh", **order), rare=1e-2)
        x, residual = x[:, :k].contiguous(), x[:, k:].contiguous()
        assert_close(*run_both(x, mode, rms_norm=more["rms_norm"], **order), rare=1e-2)
        dtype, affine = MODES[mode]
        options = {"affine": affine, "rms_norm": more["rms_norm"], **order}
        *results, total = jitgemm.quantize_activations(x, dtype, residual=residual, **options)
        assert builders.same_bits(total, x + residual)
        assert_same_bits(tuple(results), jitgemm.quantize_activations(total, dtype, **options))


@pytest.mark.parametrize("dtype", builders.LHS_DTYPES.values(), ids=str)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("k", QUANTISED)
def test_scales_by_block(k, permuted, dtype):
    if permuted and k > 32768:
        pytest.skip("longer than a permuted row may be")
    more = parameters(k, k, "cuda")
    order = {"permutation": more["permutation"]} if permuted else {}

    def both(x: torch.Tensor, **options) -> tuple:
        on_cpu = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in options.items()}
        here = jitgemm.quantize_activations(x.cpu(), dtype, scheme="block", **on_cpu)
        return jitgemm.quantize_activations(x, dtype, scheme="block", **options), here

    for x_dtype in X_DTYPES:
        assert_same_bits(*both(activations(k, 17, k, x_dtype, "cuda"), **order))
        x = torch.randn(9, 2 * k, generator=builders.generator(k)).to(x_dtype).cuda()
        assert_close(*both(x, silu_mul=True, **order), rare=1e-2)
        assert_close(*both(x[:, :k].contiguous(), rms_norm=more["rms_norm"], **order), rare=1e-2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("k", [16, 272, 2064])
def test_every_order_of_gates(k, order, mode):
    dtype, affine = MODES[mode]
    x = torch.randn(9, 2 * k, generator=builders.generator(k)).bfloat16()
    inputs = QuantizeCall(
        x, activation_of(dtype, "token", affine), Prologue(gate=Gate("swiglu_oai", order, 7.0, 1.702))
    )
    sides = quantize(replace(inputs, x=x.cuda())), quantize(inputs)
    assert_close(*(tuple(part for part in side if part is not None) for side in sides), rare=1e-2)


# ---- layers ----------------------------------------------------------------------------------------------------------

SIZES = ((16, 48), (272, 16), (496, 144), (1040, 496))
"""Hidden and intermediate."""
WAYS_OF_EXPERTS = (("e4m3", "token"), ("e4m3", "block"), ("s8", "token"), ("s8", "block"), ("s8z", "token"))


@pytest.mark.parametrize("tokens, sizes, way, bits", builders.third((1, 60), SIZES, WAYS_OF_EXPERTS, (4, 8)), ids=str)
def test_experts(tokens, sizes, way, bits):
    (k, inter), (mode, scheme) = sizes, way
    case = Case(
        tokens=tokens, top_k=3, experts=7, k=k, inter=inter, n=72, mode=mode, bits=bits, dtype=torch.bfloat16, scale=1.0,
        group_size=128 if bits == 4 else PER_CHANNEL, device="cuda", options={"scheme": scheme},
    )  # fmt: skip
    assert_layer(case)


@pytest.mark.parametrize("scheme", ["token", "block"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k, inter", [(16, 48), (496, 144)])
def test_masked_experts(k, inter, bits, scheme):
    counts = (0, 20, 1, 17)
    sizes = dict(experts=4, k=k, inter=inter, mode="e4m3", group_size=32, bits=bits, dtype=torch.bfloat16)
    here, there = Case(**sizes), Case(**sizes, device="cuda")
    here.options["scheme"] = there.options["scheme"] = scheme
    x, masked_m = sorted_tokens(here, 20, counts)
    out, expected = called_masked(there, x.cuda(), masked_m.cuda()).cpu(), called_masked(here, x, masked_m)
    for e, count in enumerate(counts):
        assert bool((out[e, count:] == 7).all())
        error = (out[e, :count].double() - expected[e, :count].double()).norm()
        assert error <= 0.02 * expected[e, :count].double().norm()


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("activation", jitgemm.nn.ACTIVATIONS)
def test_linears(activation, k):
    linear = torch.nn.Linear(k, 72, dtype=torch.bfloat16)
    x = torch.randn(9, k, generator=builders.generator(k)).bfloat16()
    layers = [W4A8Linear.from_linear(linear, group_size=32, activation=activation)]
    layers += [] if activation == "int8_affine" else [W8A8Linear.from_linear(linear, activation=activation)]
    for layer in layers:
        expected = layer(x).float()
        out = copy.deepcopy(layer).cuda()(x.cuda()).cpu().float()
        assert float((out - expected).norm()) <= 0.02 * float(expected.norm())
