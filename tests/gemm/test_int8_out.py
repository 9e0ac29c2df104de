"""gemm_w4a8_int8_nt: the fp32 result, quantised per token or with what is given."""

from __future__ import annotations

import builders
import pytest
import torch

import jitgemm

N, K = 96, 288


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def made(request) -> tuple:
    """lhs, rhs and bias, and the result in fp32."""
    lhs = builders.affine_lhs(1, 7, K, device=request.param)
    rhs = builders.weight_parts(2, N, K, 32, device=request.param).packed
    bias, out = builders.bias(3, N, torch.float32, request.param), torch.empty(7, N, device=request.param)
    jitgemm.gemm_w4a8_nt(lhs, rhs, out, bias=bias)
    return lhs, rhs, bias, out


@pytest.mark.parametrize("affine", [True, False])
def test_results_are_quantised_per_token(made, affine):
    lhs, rhs, bias, result = made
    got = jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias, affine=affine)
    expected = jitgemm.quantize_activations(result, torch.int8, affine=affine)
    out = tuple(map(torch.empty_like, got))
    assert jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias, affine=affine, out=out)[0] is out[0]
    assert all(map(torch.equal, out, got))
    assert len(got) == (3 if affine else 2)
    assert all(map(torch.equal, got, expected))
    q, scale = got[0].double(), got[1].double()[:, None]
    back = (q - (got[2].double()[:, None] if affine else 0)) * scale
    assert ((back - result.double()).abs() <= scale * 0.51).all()


def test_a_given_scale_and_zero_point_are_used(made):
    lhs, rhs, bias, result = made
    scale = (result.abs().max() / 100).reshape(1)
    zero = torch.tensor([-9], dtype=torch.int32, device=rhs.device)
    q, scales, zeros = jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias, scale=scale, zero=zero)
    assert (scales == scale).all() and (zeros == -9).all()
    assert torch.equal(q.double(), ((result * (1 / scale)).round() - 9).clamp(-128, 127).double())


def test_rows_of_a_wrong_length_are_refused():
    lhs = builders.lhs(1, 3, 64, "s8")
    rhs = builders.weight_parts(2, 72, 64, 32).packed
    with pytest.raises(ValueError, match="rhs: expected n to be a multiple of 16 for an 8-bit result, got 72"):
        jitgemm.gemm_w4a8_int8_nt(lhs, rhs)
    with pytest.raises(TypeError, match="rhs: expected a W4Weight from pack_w4, got Tensor"):
        jitgemm.gemm_w4a8_int8_nt(lhs, torch.empty(3))
