"""NVFP4 on a GPU: every product of a code, a scale and an activation exactly. More is in test_e2m1_gpu.py."""

from __future__ import annotations


import builders
import nvfp4
import pytest
import torch
from test_gemm_gpu import assert_right

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pairs", [nvfp4.all_pairs, nvfp4.near_pairs])
@pytest.mark.parametrize("m", [1, 17, 64, 200, 2032])
def test_every_code_with_every_scale(m, pairs):
    """One product a result: what two wgmmas make of it."""
    parts = pairs("cuda")
    weight, exact, k = parts.packed, parts.products(), parts.codes.shape[1]
    step = max(m, 127)
    for first in range(0, k, step):
        one_hot = torch.eye(k, device="cuda")[first : first + step].to(torch.float8_e4m3fn)
        for start in range(0, len(one_hot), m):
            x = one_hot[start : start + m]
            out = torch.full((len(x), 16), torch.nan, device="cuda")
            jitgemm.gemm_w4a8_nt((x, torch.ones(len(x), device="cuda")), weight, out)
            assert torch.equal(out.T.double(), exact[:, first + start : first + start + len(x)]), (first, start)


@pytest.mark.parametrize("pairs", [nvfp4.all_pairs, nvfp4.near_pairs])
def test_every_code_with_every_scale_and_every_activation(pairs):
    """A product of seven or eight bits a term: the tensor cores cut off none of the ten of both."""
    parts = pairs("cuda")
    weight, exact, k = parts.packed, parts.products(), parts.codes.shape[1]
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    values = torch.tensor(finite, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    columns = torch.arange(k, device="cuda")
    for value in values.view(torch.uint8)[::3]:
        x = torch.zeros(k, k, dtype=torch.uint8, device="cuda")
        x[columns, columns] = value
        out = torch.full((k, 16), torch.nan, device="cuda")
        jitgemm.gemm_w4a8_nt((x.view(torch.float8_e4m3fn), torch.ones(k, device="cuda")), weight, out)
        expected = float(value.view(torch.float8_e4m3fn)) * exact.T
        assert torch.equal(out.double(), expected), int(value)


def test_scales_of_zero_and_the_largest():
    parts = nvfp4.parts(1, 72, 416, device="cuda")
    scales = parts.scales.view(torch.uint8)
    scales[0], scales[1], scales[2, ::2] = 0, 126, 0
    parts.codes[1] = 7
    lhs = torch.full((40, 416), 448.0, device="cuda").to(torch.float8_e4m3fn), torch.ones(40, device="cuda")
    out = torch.empty(40, 72, device="cuda")
    jitgemm.gemm_w4a8_nt(lhs, parts.packed, out)
    ref, bound = gemm_w4a8_bound(lhs, parts.packed, out_dtype=torch.float32)
    assert not out[:, 0].any() and bool(((out.double() - ref).abs() <= bound).all())


@pytest.mark.parametrize("m", [1, 33, 257])
def test_one_group_of_k(m):
    weight, lhs = nvfp4.parts(4, 72, 16, device="cuda").packed, builders.lhs(2, m, 16, "e4m3", device="cuda")
    out = torch.empty(m, 72, dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w4a8_nt(lhs, weight, out)
    assert_right(out, lhs, weight, has_rms=False)
