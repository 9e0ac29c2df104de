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
from jitgemm.jit.entry import MAX_SPILL_BYTES
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import illegal

E4M3_CHANNEL = WeightFormat(0, True, "fp32")
S8_128, S8_64, S8_32 = (WeightFormat(group_size, True, "fp32") for group_size in (128, 64, 32))
TWO_CTAS = {"block_n": 64, "ctas_per_sm": 2}

SPILLING = {
    "52/124/124/16": (
        KernelSpec("e4m3", E4M3_CHANNEL, block_m=64, stages=8, split_k=2, reduce_scatter=True, **TWO_CTAS), (64, 4104, 1280)
    ),
    "16/16/16/24": (
        KernelSpec("s8", S8_128, block_m=48, stages=9, split_k=2, reduce_scatter=True, **TWO_CTAS), (257, 520, 2112)
    ),
    "8/8/8/0": (KernelSpec("s8", S8_64, block_m=48, stages=9, split_k=2, reduce_scatter=True, **TWO_CTAS), (112, 1280, 512)),
    "0/0/0/16": (KernelSpec("s8", S8_32, block_m=48, stages=8, split_k=4, reduce_scatter=True, **TWO_CTAS), (96, 768, 5120)),
    "too much to be called, once": (
        KernelSpec("e4m3", WeightFormat(256, True, "fp32"), block_m=64, stages=7, split_k=6, reduce_scatter=True, **TWO_CTAS),
        (129, 1032, 1280)
    ),
}  # fmt: skip
cases = pytest.mark.parametrize(("spec", "sizes"), SPILLING.values(), ids=SPILLING)


@pytest.mark.nvrtc
@cases
def test_a_legal_call_compiles_whatever_spills(tmp_path, spec, sizes):
    cache = KernelCache([tmp_path])
    for kernel in dict.fromkeys((spec, choose(Problem(*sizes, spec.lhs, spec.format), DEVICES["h200"]))):
        entry, _ = cache.get_or_compile(kernel_source(kernel))
        assert entry.metadata["spill_bytes"] <= MAX_SPILL_BYTES and not entry.metadata["serialised"]
        assert bool(entry.metadata["spill_bytes"]) == ("spills" in entry.slow_because)


SPILLED = (
    "s8w8-channel-b128-tofp16-m128hn192-s4-ss-e64", "s8w8-g128-fp32-b128-m128hn192-s4-ss-e64",
    "e4m3w8-g32-fp32-m128n192-k1x2s-s3-ss", "s8-g256o-bf16-m160hn128-k1x2-s3-e64",
    "e4m3-g256zo-fp32-m160hn128-k1x3s-s4", "e4m3fast-g128-fp16-b128-m176hn128-mc2lhs-s5-e64",
    "e4m3mx-channel-tofp32-m96n192-k1x2-s3-e64", "s8-g32z-bf16-m192hn128-s5", "s8fast-g128-bf16-m192hn128-s5-xfp16",
)  # fmt: skip
"""Kernels that spilled 24 to 572 bytes with NVRTC 13.0.88 or 12.9.86."""
FITS = (
    "e4m3w8-g128-fp32-b128-m128n192-s4-ss-tr-e64", "s8w8-channel-m128n128-s5-ss-e64", "e4m3fast-g128-bf16-m192n128-s5",
    "e4m3fast-g128-bf16-m176n128-mc2lhs-s5-e64",
    "e4m3-g128zo-bf16-b128-tofp32-m144hn64-k2x1s-s3",
    "s8-g128z-bf16-m64n256-s7", "s8-g128z-bf16-m176n128-s5-parts",
    "s8fast-g128-bf16-m176n128-s5-parts-xfp16", "s8fast-g64-bf16-m160hn128-s5-xbf16",
)  # fmt: skip
"""Kernels near the limit, the first ones people run."""
TIGHT = (
    "s8fast-g128-bf16-m192hn128-s5", "s8fast-g128-bf16-m192hn128-mc2lhs-s5", "s8fast-g128-bf16-m144n128-s7-e256",
    "s8fast-g128-bf16-b128-m160hn128-s6", "e4m3-g128-bf16-m112n192-k1x2s-s6", "s8-g128z-bf16-m192hn128-s5",
    "s8-g128z-fp32-m160hn128-mc2lhs-s6-e64", "e4m3mx-channel-b128-m160hn64-k2x1-s3", "e4m3-g256-bf16-b128-m176n128-s5",
    "s8-channelz-b128-m128n128-mc2lhs-s7-e64", "s8fast-g256o-bf16-m128n128-mc2lhs-s7-e64",
    "s8-g64-bf16-tofp16-m192hn128-s5",
)  # fmt: skip
"""With two sets of fragments each of these spills 12 to 196 bytes, with NVRTC 13.0.88."""


@pytest.mark.parametrize("label", SPILLED)
def test_kernels_that_spilled_are_not_chosen(label):
    assert "registers" in (illegal(KernelSpec.from_label(label), DEVICES["h200"]) or "")


@pytest.mark.nvrtc
@pytest.mark.parametrize("labels", [FITS, TIGHT], ids=["fit", "tight"])
def test_kernels_near_the_limit_do_not_spill(compiles_well, labels):
    specs = list(map(KernelSpec.from_label, labels))
    assert [spec.label for spec in specs if illegal(spec, DEVICES["h200"])] == []
    compiles_well(specs)


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
