"""Kernels that spill with one NVRTC or another: legal calls that choose them compile, and compute what they should.

In the order of NVRTC 12.6.85, 12.9.86, 13.0.88 and 13.5.37, the bytes that each spilled.
"""

from __future__ import annotations

import warnings

import builders
import pytest
import torch

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.jit.cache import KernelCache
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES

E4M3_CHANNEL = WeightFormat(0, True, "fp32")
S8_128, S8_64, S8_32 = (WeightFormat(group_size, True, "fp32") for group_size in (128, 64, 32))
TWO_CTAS = {"block_n": 64, "ctas_per_sm": 2}

SPILLING = {
    "52/124/124/16": (
        KernelSpec("e4m3", E4M3_CHANNEL, block_m=64, stages=8, split_k=2, scatter=True, **TWO_CTAS), (64, 4104, 1280)
    ),
    "16/16/16/24": (
        KernelSpec("s8", S8_128, block_m=48, stages=9, split_k=2, scatter=True, **TWO_CTAS), (257, 520, 2112)
    ),
    "8/8/8/0": (KernelSpec("s8", S8_64, block_m=48, stages=9, split_k=2, scatter=True, **TWO_CTAS), (112, 1280, 512)),
    "0/0/0/16": (KernelSpec("s8", S8_32, block_m=48, stages=8, split_k=4, scatter=True, **TWO_CTAS), (96, 768, 5120)),
}  # fmt: skip
cases = pytest.mark.parametrize(("spec", "sizes"), SPILLING.values(), ids=SPILLING)


@pytest.mark.nvrtc
@cases
def test_a_legal_call_compiles_whatever_spills(tmp_path, spec, sizes):
    cache = KernelCache([tmp_path])
    for kernel in dict.fromkeys((spec, choose(Problem(*sizes, spec.lhs, spec.format), DEVICES["h200"]))):
        entry, _ = cache.get_or_compile(kernel_source(kernel))
        assert bool(entry.metadata["spill_bytes"]) == ("spills" in entry.slow_because)


@pytest.mark.gpu
@cases
def test_a_kernel_that_spills_computes_what_it_should(monkeypatch, spec, sizes):
    monkeypatch.setattr("jitgemm.gemm.launch.choose", lambda problem, device: spec)
    m, n, k = sizes
    fmt = spec.format
    parts = builders.weight_parts(7, n, k, fmt.group_size or k, zero_point=True, scale_type="fp32", device="cuda")
    lhs = builders.lhs(7, m, k, spec.lhs, device="cuda")
    weight, out = parts.packed, torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is slower than it should be", RuntimeWarning)
        jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out)
    expected, bound = gemm_w4a8_bound(lhs, weight, out_dtype=out.dtype)
    assert bool(((out.double() - expected).abs() <= bound).all())
