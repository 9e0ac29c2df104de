"""AutoRound's configs: its files hold GPTQ's and AWQ's tensors under another name."""

from __future__ import annotations

import layers
import pytest
import test_awq
import test_gptq
import torch

from jitgemm.checkpoint import read_layer

CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "data_type": "int"}


def read(tensors: dict[str, torch.Tensor], **config) -> torch.Tensor:
    source = {f"{layers.PREFIX}.{name}": tensor for name, tensor in tensors.items()}
    return read_layer(source, layers.PREFIX, device="cpu", config=CONFIG | config)


@pytest.mark.parametrize(
    "config, minus_one",
    [
        ({}, True),
        ({"packing_format": "auto_round:auto_gptq"}, True),
        ({"packing_format": "auto_round:gptqmodel"}, False),
        ({"packing_format": "auto_round"}, False),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq"}, True),
    ],
)
def test_gptqs_tensors_are_read_with_the_zero_points_of_their_packing(config, minus_one):
    layer = layers.layer(0, zeros=(1, 15))
    layers.assert_exactly(read(test_gptq.packed(layer, minus_one=minus_one), **config), layer.weight)


def test_awqs_tensors_are_read():
    layer = layers.layer(1)
    layers.assert_exactly(read(test_awq.gemm(layer), packing_format="auto_round:auto_awq"), layer.weight)


@pytest.mark.parametrize("name", [layers.PREFIX, r"model\.layers\..*up_proj"])
def test_settings_of_one_layer_replace_the_models(name):
    layer = layers.layer(2, zeros=(1, 15))
    tensors = test_gptq.packed(layer, minus_one=True)
    layers.assert_exactly(read(tensors, group_size=32, extra_config={name: {"group_size": 64}}), layer.weight)
    with pytest.raises(ValueError, match="bits: expected 4, got 8"):
        read(tensors, extra_config={name: {"bits": 8}})


@pytest.mark.parametrize(
    "config, text",
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format: expected auto_round with auto, auto_gptq"),
        ({"data_type": "mx_fp"}, "data_type: expected int, got 'mx_fp'"),
        ({"act_bits": 8}, "act_bits: expected 16, got 8; give a config without it"),
        ({"rotation_config": {"hadamard_type": "quarot"}}, "rotation_config: expected none"),
    ],
)
def test_what_cannot_be_read_is_refused(config, text):
    with pytest.raises(ValueError, match=text):
        read(test_gptq.packed(layers.layer(0), minus_one=True), **config)
