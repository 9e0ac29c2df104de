"""AWQ layers, packed from the definition."""

from __future__ import annotations

import builders
import layers
import pytest
import torch
from files_awq import GEMM, GEMV, gemm, gemv

from jitgemm.checkpoint import read_layer
from jitgemm.checkpoint.awq import FORMAT


@pytest.mark.parametrize("group_size, dtype", [(32, torch.float16), (64, torch.bfloat16), (256, torch.float16)])
def test_a_gemm_file_reads_as_what_the_definition_packed(tmp_path, group_size, dtype):
    layer = layers.layer(group_size, k=512, group_size=group_size, dtype=dtype)
    weight = layers.load(tmp_path, gemm(layer), GEMM | {"group_size": group_size})
    layers.assert_exactly(weight, layer.weight)
    assert builders.same_bits(weight.scale, layer.scale)
    assert weight.group_size == group_size and weight.permutation is None


@pytest.mark.parametrize("config", [None, {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}])
def test_a_gemm_layer_needs_no_config_and_understands_autoawqs_own(config):
    layer = layers.layer(1)
    layers.assert_exactly(layers.read(FORMAT, gemm(layer), config), layer.weight)


def test_one_group_a_row():
    layer = layers.layer(2, k=256, group_size=256)
    layers.assert_exactly(layers.read(FORMAT, gemm(layer), GEMM | {"group_size": -1}), layer.weight)


def test_constant_zero_8_becomes_signed_codes():
    layer = layers.layer(3, zeros=(8, 8))
    weight = layers.read(FORMAT, gemm(layer), GEMM)
    assert weight.zero is None
    layers.assert_exactly(weight, layer.weight)


@pytest.mark.parametrize(("group_size", "width"), [(128, 1), (64, 2), (32, 4)])
def test_a_gemv_file_reads_as_what_the_definition_packed(tmp_path, group_size, width):
    layer = layers.layer(4, k=256, group_size=group_size)
    weight = layers.load(tmp_path, gemv(layer, width), GEMV | {"group_size": group_size})
    layers.assert_exactly(weight, layer.weight)


@pytest.mark.parametrize("said", [{"zero_point": False}, {"zero_point": None, "sym": True}])
def test_a_symmetric_file_has_zeros_of_8_and_any_other_is_an_error(said):
    layer, other = layers.layer(6, zeros=(8, 8)), layers.layer(7)
    layers.assert_exactly(layers.read(FORMAT, gemm(layer), GEMM | said), layer.weight)
    with pytest.raises(ValueError, match=r"qzeros: expected 8 in every group, as the config says zero_point: false"):
        layers.read(FORMAT, gemm(other), GEMM | said)
    layers.assert_exactly(layers.read(FORMAT, gemm(other), GEMM | {"sym": False}), other.weight)


def test_dynamic_overrides_the_config_of_the_layers_it_matches():
    layer = layers.layer(8, group_size=32)
    source = {f"{layers.PREFIX}.{name}": tensor for name, tensor in gemm(layer).items()}
    config = GEMM | {"group_size": 128, "dynamic": {r"+:.*up_proj": {"group_size": 32}}}
    layers.assert_exactly(read_layer(source, layers.PREFIX, device="cpu", config=config), layer.weight)


@pytest.mark.parametrize(
    "said, message",
    [
        ({"bits": 8}, "bits: expected 4, got 8"),
        ({"backend": "llm-awq"}, "backend: expected autoawq, got 'llm-awq'"),
        ({"zero_point": "no"}, "zero_point: expected true or false, got 'no'"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(said, message):
    with pytest.raises(ValueError, match=message):
        layers.read(FORMAT, gemm(layers.layer(0)), GEMM | said)


@pytest.mark.parametrize("version", ["gemv_fast", "llm-awq", "marlin"])
def test_other_versions_are_refused(version):
    with pytest.raises(ValueError, match=f"version: expected gemm or gemv, got '{version}'"):
        layers.read(FORMAT, gemm(layers.layer(0)), GEMM | {"version": version})


def test_gemv_without_a_group_size_is_refused():
    with pytest.raises(ValueError, match="group_size: expected it in the config"):
        layers.read(FORMAT, gemv(layers.layer(0), 1), GEMV)
