"""ExecuTorch layers, packed from the definition; PyTorch's CPU op and torchao's primitive are what they must equal."""

from __future__ import annotations

import builders
import layers
import pytest
import torch
from files_torchao import high_first

from jitgemm.checkpoint.executorch import FORMAT


def qta8a_qga4w(layer: layers.Layer) -> dict[str, torch.Tensor]:
    """Codes stored with 8 added, zero points without; parameters [G, n] as the operator takes them."""
    return {
        "weight": high_first(layer.q),
        "weight_scales": layer.scale.T.contiguous(),
        "weight_zeros": (layer.zero.T - 8).to(torch.int32),
    }


def exactly(layer: layers.Layer) -> torch.Tensor:
    """(q - 8 - zero) * scale, in the operator's fp32."""
    return (layer.q - layer.zero[:, layer.group]).float() * layer.scale[:, layer.group]


@pytest.mark.parametrize("group_size, names", [
    (32, ("weight", "weight_scales_and_zeros")), (256, ("weights_4x2", "scales_and_zeros"))
])  # fmt: skip
def test_linear_qga4w_equals_pytorchs_cpu_op(tmp_path, group_size, names):
    n, k = 64, 512
    g = builders.generator(group_size)
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.int32)
    parameters = torch.randn((k // group_size, n, 2), generator=g).bfloat16().float()
    weight = layers.load(tmp_path, dict(zip(names, (high_first(q), parameters), strict=True)))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    by_op = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(k), packed, group_size, parameters)
    layers.assert_exactly(weight, by_op.T)
    assert weight.group_size == group_size and weight.offset is not None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zeros", [(0, 15), (0, 16), (8, 8)])
def test_linear_qta8a_qga4w_reads_as_the_definition(tmp_path, zeros, transposed):
    layer = layers.layer(1, zeros=zeros, dtype=torch.float32)
    tensors = qta8a_qga4w(layer)
    if transposed:
        tensors |= {name: tensors[name].T for name in ("weight_scales", "weight_zeros")}
    assert layers.detecting(tensors) == ["executorch"]
    weight = layers.load(tmp_path, tensors)
    assert torch.equal(weight.dequantize(), exactly(layer))
    assert (weight.zero is None) == (zeros == (8, 8))


@pytest.mark.parametrize("zeros", ["none", torch.float32, torch.bfloat16, torch.int8])
def test_8da4w_reads_as_the_definition(tmp_path, zeros):
    layer = layers.layer(2, zeros=(8, 8) if zeros == "none" else (0, 15), dtype=torch.float32)
    tensors = {"weight": (layer.q - 8).to(torch.int8), "scales": layer.scale}
    if zeros != "none":
        tensors["zeros"] = (layer.zero - 8).to(zeros)
    assert layers.detecting(tensors) == ["executorch"]
    assert torch.equal(layers.load(tmp_path, tensors).dequantize(), exactly(layer))


FILE = qta8a_qga4w(layers.layer(0, dtype=torch.float32))
EIGHT = {"weight": torch.full((32, 256), 100, dtype=torch.int8), "scales": torch.ones(32, 1)}
REFUSED = [
    ({name: FILE[name] for name in ("weight", "weight_scales")}, None, r"weight_zeros: .*; found none \(linear_q4gsw"),
    (FILE | {"weight_zeros": FILE["weight_zeros"] * 0 + 9}, None, r"weight_zeros \+ 8: expected zero points"),
    (FILE, {"group_size": 32}, r"weight_scales: expected 8 groups for k = 256 and group_size 32, got 4"),
    (qta8a_qga4w(layers.layer(5, n=8, group_size=32)), None, r"weight_scales: expected \[G, n\] .* fits both"),
    (EIGHT, None, "weight: expected 4-bit values -8..7, got 100..100"),  # an 8-bit layer among layers of 4 bits
]  # fmt: skip


@pytest.mark.parametrize("tensors, config, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_a_layer_that_cannot_be_read_is_refused(tensors, config, message):
    with pytest.raises(ValueError, match=message):
        layers.read(FORMAT, tensors, config)
