"""AutoRound's configs: its files hold GPTQ's and AWQ's tensors under another name."""

from __future__ import annotations

import files_awq
import files_gptq
import layers
import pytest
import torch
from files_autoround import CONFIG

from jitgemm.checkpoint import read_layer
from jitgemm.nn import PackedLinear


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
        ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, True),
        ({"quant_method": "intel/auto-round", "backend": "auto_gptq:exllamav2"}, True),
        ({"quant_method": "intel/auto-round", "backend": "gptq:exllamav2"}, True),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, False),
        ({"quant_method": "intel/auto-round", "backend": "autoround:exllamav2"}, False),
        ({"quant_method": "intel/auto-round", "backend": "auto_round:tritonv2"}, False),
        ({"packing_format": "auto_round:auto_gptq", "backend": "ark"}, True),
    ],
)
def test_gptqs_tensors_are_read_with_the_zero_points_of_their_packing(config, minus_one):
    layer = layers.layer(0, zeros=(1, 15))
    layers.assert_exactly(read(files_gptq.packed(layer, minus_one=minus_one), **config), layer.weight)


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:auto_awq", "auto_round:awq", "auto_round:auto_awq:gemm"])
def test_sym_means_q_minus_8(packing):
    layer = layers.layer(3, zeros=(8, 8))
    tensors = files_awq.gemm(layer) if "awq" in packing else files_gptq.packed(layer, minus_one=False)
    layers.assert_exactly(read(tensors, sym=True, packing_format=packing), layer.weight)


@pytest.mark.parametrize("said", [{"bits": 8}, {"extra_config": {layers.PREFIX: {"bits": 8}}}])
def test_layers_of_8_bits_are_read(said):
    layer = layers.layer(4, zeros=(128, 128), bits=8)
    layers.assert_exactly(read(files_gptq.packed(layer, minus_one=True, bits=8), sym=True, **said), layer.weight)


FP8 = {"bits": 8, "group_size": -1, "sym": True, "data_type": "fp"}
STATIC = {"act_bits": 8, "act_data_type": "fp", "act_dynamic": False, "act_group_size": 0, "fmt": "e4m3"}


@pytest.mark.parametrize(
    "said, shape, activation",
    [
        (FP8, (32,), "e4m3"),
        (FP8 | {"data_type": "fp8"}, (32,), "e4m3"),
        (FP8 | STATIC | {"packing_format": "auto_round:fp8_static", "activation_scheme": "static"}, (32,), "e4m3"),
        (FP8 | {"group_size": 0}, (1,), "e4m3"),
        (FP8 | {"group_size": [128, 128], "act_bits": 8, "act_dynamic": True}, (1, 2), "e4m3_block"),
        ({"extra_config": {layers.PREFIX: FP8 | {"act_bits": 16}}}, (32,), "e4m3"),
    ],
)
def test_fp8_layers_are_read(said, shape, activation):
    q = torch.randn((32, 256), generator=torch.Generator().manual_seed(5)).to(torch.float8_e4m3fn)
    scale = (torch.rand(shape) + 0.5).bfloat16()
    by_row = scale.float().repeat_interleave(128, 1).expand(32, -1) if len(shape) == 2 else scale.float()[:, None]
    tensors = {"weight": q, "weight_scale_inv" if len(shape) == 2 else "weight_scale": scale}
    static = "activation_scheme" in said
    tensors |= {"input_scale": torch.tensor([0.5], dtype=torch.bfloat16)} if static else {}
    source = {f"{layers.PREFIX}.{name}": tensor for name, tensor in tensors.items()}
    layer = PackedLinear.from_checkpoint(source, layers.PREFIX, config=CONFIG | said, device="cpu")
    assert torch.equal(layer.weight.dequantize(), q.float() * by_row)
    assert layer.activation == activation and (layer.input_scale is not None) == static


@pytest.mark.parametrize("name", [layers.PREFIX, r"model\.layers\..*up_proj"])
def test_settings_of_one_layer_replace_the_models(name):
    layer = layers.layer(2, zeros=(1, 15))
    tensors = files_gptq.packed(layer, minus_one=True)
    layers.assert_exactly(read(tensors, group_size=32, extra_config={name: {"group_size": 64}}), layer.weight)
    with pytest.raises(ValueError, match="bits: expected 4 or 8, got 3"):
        read(tensors, extra_config={name: {"bits": 3}})


def test_expressions_of_extra_config_are_found_in_the_name_and_plain_names_are_the_whole():
    layer = layers.layer(6, zeros=(1, 15))
    tensors = files_gptq.packed(layer, minus_one=True)
    for name in ("layers.0.mlp.up", "model.layers.0.mlp"):  # other layers' names
        layers.assert_exactly(read(tensors, extra_config={name: {"bits": 8}}), layer.weight)
    layers.assert_exactly(read(tensors, group_size=32, extra_config={r"\.up_proj": {"group_size": 64}}), layer.weight)


@pytest.mark.parametrize(
    "config, text",
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format: expected auto_round with auto, auto_gptq"),
        ({"packing_format": "auto_round:gptq:marlin"}, "packing_format: expected auto_round with .* got .*marlin'"),
        ({"data_type": "mx_int"}, "data_type: expected int, or .*, got 'mx_int'"),
        ({"data_type": "nvfp4_v2", "group_size": 16}, "data_type: expected int, or .*, got 'nvfp4_v2'"),
        ({"data_type": "mx_fp"}, "bits, group_size: expected 4 or 8 in groups of 32 with data_type mx_fp, got 4 in 64"),
        ({"data_type": "nv_fp", "bits": 8, "group_size": 16}, "bits, group_size: expected 4 in groups of 16 .*, got 8"),
        ({"data_type": "mx_fp", "group_size": 32, "act_bits": 6, "act_data_type": "mx_fp"}, "act_data_type: expected"),
        ({"data_type": "fp8_e5m2", "bits": 8}, "data_type: expected int, or .*, got 'fp8_e5m2'"),
        ({"data_type": "fp", "bits": 4}, "bits: expected 8 with data_type 'fp', got 4"),
        ({"data_type": "fp", "bits": 8, "fmt": "e5m2"}, "fmt: expected e4m3, got 'e5m2'"),
        ({"data_type": "fp", "bits": 8, "act_bits": 8, "act_data_type": "int"}, "act_data_type: expected fp, as"),
        ({"extra_config": {"a": 8}}, "extra_config: expected settings by names of layers, got {'a': 8}"),
        ({"extra_config": {"(": {"bits": 8}}}, r"extra_config: expected a regular expression, got '\('"),
        ({"act_bits": 8}, "act_bits: expected 16, got 8; give a config without it"),
        ({"rotation_config": {"hadamard_type": "quarot"}}, "rotation_config: expected none"),
    ],
)
def test_what_cannot_be_read_is_refused(config, text):
    with pytest.raises(ValueError, match=text):
        read(files_gptq.packed(layers.layer(0), minus_one=True), **config)
