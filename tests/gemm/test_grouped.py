"""The grouped calls without a GPU: arguments, routings, converters, kernels that compile, the argument block."""

from __future__ import annotations

import struct

import builders
import numpy as np
import pytest
import torch
from arguments_of_kernels import CODES, struct_of
from builders import weight_of_experts
from prepared_calls import without_driver

import jitgemm
from jitgemm.gemm import launch as gemms
from jitgemm.gemm.grouped import rows_of_m_indices
from jitgemm.gemm.problem import Gemm, Groups
from jitgemm.tensors import take_rows

E, N, K = 5, 72, 256


def expected(lhs, weight, offsets, out, row_index=None, bias=None):
    """Expert by expert, by the dense call."""
    out = out.clone()
    for e, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        rows = torch.arange(first, end) if row_index is None else row_index[first:end].long()
        part = tuple(each if each.numel() == 1 else take_rows(each, rows) for each in lhs)
        result = torch.empty(len(rows), weight.n, dtype=out.dtype)
        jitgemm.gemm_w4a8_nt(part, weight[e], result, bias=None if bias is None else bias[e])
        out[first:end] = result
    return out


@pytest.mark.parametrize("size_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
def test_each_expert_s_rows_meet_its_weight_and_other_rows_are_left_alone(dtype, size_type):
    weight, lhs = weight_of_experts(), builders.lhs(1, 12, K, dtype)
    offsets = torch.tensor([1, 3, 3, 8, 9, 11], dtype=size_type)
    out = torch.randn(12, N).bfloat16()
    bias = torch.randn(E, N)
    right = expected(lhs, weight, offsets, out, bias=bias)
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(lhs, weight, out, offsets, bias=bias)
    assert torch.equal(out, right)
    again = jitgemm.m_grouped_gemm_w4a8_reference(lhs, weight, offsets, bias=bias)
    assert torch.equal(again[1:11], right[1:11]) and not again[0].any() and not again[11].any()


def test_first_rows_and_ends_leave_rows_between_experts_alone():
    weight, lhs = weight_of_experts(), builders.lhs(1, 12, K)
    pairs = torch.tensor([[0, 2], [4, 4], [5, 8], [9, 7], [10, 12]], dtype=torch.int32)
    out = torch.full((12, N), 3.0)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, out, pairs)
    right = torch.full((12, N), 3.0)
    for e in (0, 2, 4):
        first, end = pairs[e].tolist()
        jitgemm.gemm_w4a8_nt(tuple(each[first:end] for each in lhs), weight[e], right[first:end])
    assert torch.equal(out, right)


def test_blocks_of_rows_with_masks():
    weight, (x, scale) = weight_of_experts(), builders.lhs(1, E * 6, K, "s8")
    masked_m = torch.tensor([6, 0, 3, 99, -4], dtype=torch.int32)
    out = torch.full((E, 6, N), 3.0, dtype=torch.bfloat16)
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_masked((x.view(E, 6, K), scale.view(E, 6)), weight, out, masked_m, 3)
    for e, rows in enumerate((6, 0, 3, 6, 0)):
        right = torch.empty(rows, N, dtype=torch.bfloat16)
        jitgemm.gemm_w4a8_nt((x[e * 6 : e * 6 + rows], scale[e * 6 : e * 6 + rows]), weight[e], right)
        assert torch.equal(out[e, :rows], right) and bool((out[e, rows:] == 3).all())


def test_deepgemm_s_sizes():
    indices = torch.tensor([0, 0, -1, -1, 2, 2, 2, -1, 3, 9], dtype=torch.int32)
    assert rows_of_m_indices(indices, 5).tolist() == [[0, 2], [0, 0], [4, 7], [8, 9], [0, 0]]


@pytest.mark.parametrize("expected_m", [np.int64(3), np.uint8(3), torch.tensor(3), 3.0, 1e308, 10**400])
def test_any_class_of_numbers_says_how_many_rows_are_expected(expected_m):
    weight, lhs, offsets = weight_of_experts(), builders.lhs(1, 12, K), torch.tensor([0, 2, 4, 6, 8, 12])
    out, right = torch.zeros(2, 12, N)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, right, offsets, expected_m=3)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, out, offsets, expected_m=expected_m)
    assert torch.equal(out, right)


@pytest.mark.parametrize(("expected_rows", "vary"), [(12, False), (99, False), (11, True), (0, True)])
def test_rows_vary_where_fewer_are_expected_than_the_call_has_room_for(expected_rows, vary):
    """A rank of many: its tensors have room for all tokens' rows."""
    weight, (x, x_scale), offsets = weight_of_experts(), builders.lhs(1, 12, K), torch.tensor([0, 2, 4, 6, 8, 12])
    gemm = Gemm(x, x_scale, None, weight, torch.zeros(12, N), None, Groups(offsets, None, 0, expected_rows))
    problem = gemms.problem_of(gemm)
    assert (problem.m, problem.rows_vary) == (max(1, min(12, expected_rows)), vary)
    dense = Gemm(x, x_scale, None, weight[0], torch.zeros(12, N))
    assert not gemms.problem_of(dense).rows_vary


WEIGHT = weight_of_experts()
CALL = dict(offsets=torch.zeros(E + 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(rhs=WEIGHT[0]), "rhs: expected a weight of experts, got a dense one"),
        (dict(offsets=torch.zeros(E, dtype=torch.int32)), r"offsets: .* of shape \[6\] or \[5, 2\], got \[5\]"),
        (dict(offsets=torch.zeros(E + 2, dtype=torch.int32)), r"offsets: .* got \[7\]"),
        (dict(offsets=torch.zeros(2 * E + 2, dtype=torch.int32)[::2]), "offsets: expected a contiguous tensor"),
        (dict(bias=torch.zeros(N)), r"bias: expected .*shape \[5, 72\], got \[72\]"),
        (dict(bias=torch.ones(E + 1, N)), r"bias: expected .*shape \[5, 72\], got \[6, 72\]"),
        (dict(bias=torch.ones(E, N).int()), "bias: expected .*, got int32"),
        (dict(row_index=torch.zeros(5, dtype=torch.int32)), r"row_index: .* shape \[4\], got \[5\]"),
        (dict(row_index=torch.zeros(4, dtype=torch.int64)), "row_index: expected int32, got int64"),
        (dict(lhs=(builders.lhs(1, 4, K)[0], torch.ones(7))), r"\(x_scale\): expected shape \[4\], .*, got \[7\]"),
        (dict(out=torch.zeros(5, N).bfloat16()), r"out: expected .*shape \[4, 72\], got .*\[5, 72\]"),
        (dict(expected_m=-1), "expected_m: expected a number of rows, got -1"),
        (dict(expected_m=np.int64(-1)), "expected_m: expected a number of rows, got -1"),
    ],
)
def test_what_is_wrong_is_named(changed, message):
    given = dict(lhs=builders.lhs(1, 4, K), rhs=WEIGHT, out=torch.zeros(4, N).bfloat16()) | CALL | changed
    calls = [jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous]
    calls += [] if "expected_m" in changed or "row_index" in changed else [jitgemm.m_grouped_gemm_w4a8_reference]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=message):
            call(**given)


def test_blocks_of_rows_must_be_views_of_all_rows():
    x, scale = torch.zeros(E, 8, K, dtype=torch.int8)[:, :6], torch.ones(E, 6)
    out, counts = torch.zeros(E, 6, N).bfloat16(), torch.zeros(E, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lhs\[0\] \(x\): expected strides of a view of all rows"):
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_masked((x, scale), WEIGHT, out, counts, 4)
    with pytest.raises(ValueError, match=r"out: expected shape \[5, 6, n\], got \[5, 7, 72\]"):
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_masked(
            (x.contiguous(), scale), WEIGHT, torch.zeros(E, 7, N).bfloat16(), counts, 4
        )


def test_no_rows_return_at_once():
    masked = torch.zeros(E, 0, N).bfloat16()
    lhs = torch.zeros(E, 0, K, dtype=torch.int8), torch.zeros(E, 0)
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_masked(lhs, WEIGHT, masked, CALL["offsets"][:E], 1)
    out = torch.zeros(0, N).bfloat16()
    jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(builders.lhs(1, 0, K), WEIGHT, out, CALL["offsets"])


def test_the_argument_block_has_the_fields_of_the_header():
    fields = struct_of("jitgemm/gemm/types.cuh", "GroupedArgs")
    assert gemms.GROUPED_ARGUMENTS.fields == {field: CODES[kind] for field, (kind, _) in fields.items()}
    assert list(gemms.GROUPED_ARGUMENTS.fields) == list(fields)
    assert gemms.GROUPED_ARGUMENTS._struct.size == 160


@pytest.mark.parametrize("gathers", [False, True])
def test_a_grouped_call_s_tensors_and_sizes_reach_its_parameters(gathers, monkeypatch):
    launches = without_driver(monkeypatch)
    weight, (x, x_scale, x_zero) = weight_of_experts(), builders.affine_lhs(1, 12, K)
    out, bias = torch.empty(9 if gathers else 12, N), torch.zeros(E, N)
    offsets = torch.zeros(E + 1, dtype=torch.int64)
    index = torch.zeros(9, dtype=torch.int32) if gathers else None
    operands, groups = Gemm(x, x_scale, x_zero, weight, out, bias), Groups(offsets, index, 0, 7)
    gemms.GemmLaunch(operands._replace(groups=groups)).launch(operands._replace(groups=groups))
    [(dependent, (*maps, block))] = launches
    assert dependent
    at = [x, x, out, out, out]
    assert [int.from_bytes(each, "little") for each in maps] == [tensor.data_ptr() for tensor in at]
    fields = gemms.GROUPED_ARGUMENTS.fields
    values = dict(zip(fields, struct.unpack("<" + "".join(fields.values()), block)))
    assert values == {
        "sizes": offsets.data_ptr(), "row_index": index.data_ptr() if gathers else 0, "lhs": x.data_ptr(),
        "records": weight.blocks.data_ptr(), "channel_scale": 0, "lhs_scale": x_scale.data_ptr(),
        "bias": bias.data_ptr(), "lhs_zero": x_zero.data_ptr(), "row_sum": weight.row_sum.data_ptr(),
        "lhs_stride": K, "lhs_scale_stride": 1, "lhs_zero_stride": 1, "m": len(out), "n": N, "k": K,
        "channel_scale_type": 1, "bias_type": 0, "last_rows": 0, "chunk_blocks": 0, "chunk_rows": 0, "experts": E, "rows_of_expert": 0, "expected_rows": 2,
        "tokens": 12, "sizes_step": 1, "wide_sizes": 1, "scale_expert_step": 0,
    }  # fmt: skip
