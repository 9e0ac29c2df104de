"""k a multiple of 16 and not of 32 in layers and checkpoints; calls and weights have such k among their sizes."""

from __future__ import annotations

import builders
import checkpoints
import layers
import pytest
import torch
from builders import PER_CHANNEL

import jitgemm
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.kernel.formats import GROUP_SIZES
from jitgemm.nn import W4A8Linear, W8A8Linear

KS = (16, 48, 496, 1040)
SHORT = [(k, group) for k in KS for group in GROUP_SIZES if group < k]
"""Whose last group is short."""


@pytest.mark.parametrize("activation, k", builders.third(jitgemm.nn.ACTIVATIONS, KS))
def test_linears(activation, k):
    linear, x = torch.nn.Linear(k, 72).requires_grad_(False), torch.randn(9, k, generator=builders.generator(k))
    kinds = [W4A8Linear] if activation == "int8_affine" else [W4A8Linear, W8A8Linear]
    for kind in kinds:
        layer = kind.from_linear(linear, activation=activation)
        saved = kind.from_state_dict(layer.state_dict())
        expected = x @ layer.weight.dequantize().T + linear.bias
        assert float((saved(x) - expected).norm()) <= 0.04 * float(expected.norm())


@pytest.mark.parametrize("act_order, sizes", builders.third([False, True], [*((k, k) for k in KS), *SHORT]))
def test_a_gptq_file(tmp_path, sizes, act_order):
    k, group = sizes
    layer = layers.layer(k, k=k, group_size=group, act_order=act_order)
    said = {
        "quant_method": "gptq",
        "bits": 4,
        "checkpoint_format": "gptq_v2",
        "group_size": group,
        "desc_act": act_order,
    }
    tensors = {
        "qweight": checkpoints.words(layer.q.T, 0), "qzeros": checkpoints.words(layer.zero.T, 1),
        "scales": layer.scale.T.contiguous(), "g_idx": layer.group.int(),
    }  # fmt: skip
    weight = layers.load(tmp_path, tensors, said)
    layers.assert_exactly(weight, layer.weight)
    packed = weight.pack()
    order = slice(None) if packed.permutation is None else packed.permutation.long()
    assert torch.equal(packed.dequantize(), weight.dequantize()[:, order])


def test_an_awq_file(tmp_path):
    layer = layers.layer(1, k=496, group_size=128)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, qzeros = (checkpoints.words(each.T, 1, order=order) for each in (layer.q, layer.zero))
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    weight = layers.load(tmp_path, {"qweight": codes, "scales": layer.scale.T, "qzeros": qzeros}, said)
    layers.assert_exactly(weight, layer.weight)
    assert torch.equal(weight.pack().dequantize(), weight.dequantize())


def test_an_fp8_file_in_blocks_of_which_the_last_is_short(tmp_path):
    q = torch.randn(72, 496).to(torch.float8_e4m3fn)
    scale = torch.rand(1, 4) + 0.5
    weight = layers.load(tmp_path, {"weight": q, "weight_scale_inv": scale}, {"quant_method": "fp8"})
    expected = q.float() * scale.repeat_interleave(128, 1)[:, :496]
    assert torch.equal(weight.pack().dequantize(), expected)


def test_a_weight_per_channel_is_cut_along_k_at_multiples_of_16():
    parts = builders.weight_parts(1, 32, 96, PER_CHANNEL)
    whole = CanonicalWeight(parts.q, parts.scale, group_size=96)
    cuts = [whole.shard("k", rank, 6).pack() for rank in range(6)]
    assert [cut.k for cut in cuts] == [16] * 6
    assert torch.equal(torch.cat([cut.dequantize() for cut in cuts], 1), parts.packed.dequantize())
