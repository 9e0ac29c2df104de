"""gemm_w4a8_int8_nt: the fp32 result, quantised per token or with what is given."""

from __future__ import annotations

import builders
import pytest
import torch

import jitgemm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N, K = 96, 288


def case(device: str, m: int = 7):
    lhs, bias = builders.affine_lhs(1, m, K), builders.bias(3, N, torch.float32)
    rhs = builders.weight_parts(2, N, K, 32).packed.to(device)
    return tuple(tensor.to(device) for tensor in lhs), rhs, bias.to(device)


def fp32(lhs, rhs, bias) -> torch.Tensor:
    out = torch.empty(lhs[0].shape[0], N, device=rhs.device)
    jitgemm.gemm_w4a8_nt(lhs, rhs, out, bias=bias)
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("affine", [True, False])
def test_results_are_quantised_per_token(device, affine):
    lhs, rhs, bias = case(device)
    got = jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias, affine=affine)
    expected = jitgemm.quantize_activations(fp32(lhs, rhs, bias), torch.int8, affine=affine)
    assert len(got) == (3 if affine else 2)
    assert all(map(torch.equal, got, expected))
    q, scale = got[0].double(), got[1].double()[:, None]
    back = (q - (got[2].double()[:, None] if affine else 0)) * scale
    assert ((back - fp32(lhs, rhs, bias).double()).abs() <= scale * 0.51).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_given_scale_and_zero_point_are_used(device):
    lhs, rhs, bias = case(device)
    result = fp32(lhs, rhs, bias)
    scale = (result.abs().max() / 100).reshape(1)
    zero = torch.tensor([-9], dtype=torch.int32, device=device)
    q, scales, zeros = jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias, scale=scale, zero=zero)
    assert (scales == scale).all() and (zeros == -9).all()
    assert torch.equal(q.double(), ((result * (1 / scale)).round() - 9).clamp(-128, 127).double())


def test_results_are_the_lhs_of_the_next_gemm():
    lhs, rhs, bias = case("cpu")
    hidden = jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias)
    following = builders.weight_parts(5, 64, N, 32).packed
    out = torch.empty(7, 64, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_bf16_nt(hidden, following, out)
    assert torch.equal(out, jitgemm.gemm_w4a8_reference(hidden, following))


def test_out_is_written_and_returned():
    lhs, rhs, bias = case("cpu")
    out = (torch.empty(7, N, dtype=torch.int8), torch.empty(7), torch.empty(7, dtype=torch.int32))
    got = jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias, out=out)
    assert all(a is b for a, b in zip(got, out))
    assert torch.equal(out[0], jitgemm.gemm_w4a8_int8_nt(lhs, rhs, bias=bias)[0])


def test_rows_of_a_wrong_length_are_refused():
    lhs = builders.lhs(1, 3, 64, "s8")
    rhs = builders.weight_parts(2, 72, 64, 32).packed
    with pytest.raises(ValueError, match="rhs: expected n to be a multiple of 16 for an 8-bit result, got 72"):
        jitgemm.gemm_w4a8_int8_nt(lhs, rhs)
    with pytest.raises(TypeError, match="rhs: expected a W4Weight from pack_w4, got Tensor"):
        jitgemm.gemm_w4a8_int8_nt(lhs, torch.empty(3))
