"""MXFP4 on a GPU: every product of a code, an exponent and an activation exactly, and the bits of long runs. More is in
test_e2m1_gpu.py."""

from __future__ import annotations


import builders
import mxfp4
import pytest
import torch
from tensor_core import OfEmulator, TensorCore

import jitgemm

pytestmark = pytest.mark.gpu


tiers = pytest.mark.parametrize("tier", mxfp4.TIERS)


def all_pairs(tier: str) -> mxfp4.Parts:
    """Every code with every exponent of a base; by "group" with every scale by itself."""
    parts = mxfp4.all_pairs("cuda")
    if tier == "block":  # another base for the last block
        parts.scales[:, 12:] += 40
    if tier == "group":
        parts.scales[0, 0] = 90
    assert parts.packed.format.group_size == mxfp4.TIERS[tier]
    return parts


@tiers
@pytest.mark.parametrize("m", [1, 8, 17, 64, 200, 480])
def test_every_code_with_every_exponent(tier, m):
    """One product a result: what wgmma makes of e4m3s, subnormals included."""
    parts = all_pairs(tier)
    weight, exact = parts.packed, parts.dequantize_fp64()
    for first in range(0, 480, m):
        one_hot = torch.eye(480, device="cuda")[first : first + m].to(torch.float8_e4m3fn)
        out = torch.full((len(one_hot), 16), torch.nan, device="cuda")
        jitgemm.gemm_w4a8_nt((one_hot, torch.ones(len(one_hot), device="cuda")), weight, out)
        assert torch.equal(out.T.double(), exact[:, first : first + m]), first


@tiers
def test_every_code_with_every_exponent_and_every_activation(tier):
    parts = all_pairs(tier)
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    values = torch.tensor(finite, dtype=torch.uint8, device="cuda")
    x = torch.zeros(len(finite), 480, 480, dtype=torch.uint8, device="cuda")
    x.diagonal(dim1=1, dim2=2).copy_(values[:, None].expand(-1, 480))
    x = x.view(-1, 480).view(torch.float8_e4m3fn)
    out = torch.full((len(x), 16), torch.nan, device="cuda")
    jitgemm.gemm_w4a8_nt((x, torch.ones(len(x), device="cuda")), parts.packed, out)
    exact = values.view(torch.float8_e4m3fn).double()[:, None, None] * parts.dequantize_fp64().T
    assert torch.equal(out.double().view(len(finite), 480, 16), exact)


@pytest.mark.parametrize(
    "label",
    [
        "e4m3mx-channel-tofp32-m16n256-s6",
        "e4m3mx-channel-tofp32-m128n128-s6",
        "e4m3mx-channel-tofp32-m128hn128-s6",
        "e4m3mx-channel-tofp32-m176n128-s4",
    ],
)
@pytest.mark.parametrize("k", [416, 1312])
def test_runs_of_256_k_have_the_bits_of_the_arithmetic(label, k):
    weight, lhs = mxfp4.parts(4, 392, k, device="cuda").packed, builders.lhs(1, 200, k, "e4m3", device="cuda")
    out = torch.empty(200, 392, device="cuda")
    jitgemm.gemm_w4a8_nt(lhs, weight, out, kernel=label)
    core = TensorCore() if torch.cuda.is_available() else OfEmulator()
    assert torch.equal(out, core.mxfp4_gemm(lhs, weight, 256))
    assert not torch.equal(out, core.mxfp4_gemm(lhs, weight, 128))
