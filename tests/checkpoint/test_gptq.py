"""GPTQ v1 and v2 layers, packed from the definition."""

from __future__ import annotations

from typing import Any

import checkpoints
import layers
import pytest
import torch
from files_gptq import V1, V2, packed

import jitgemm.nn
from jitgemm.checkpoint import read_layer

BY_GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}


def read(tensors: dict[str, torch.Tensor], config: dict[str, Any] | None, prefix: str = layers.PREFIX):
    source = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    return read_layer(source, prefix, device="cpu", config=config, format="gptq")


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size, dtype", [(32, torch.float16), (64, torch.bfloat16), (256, torch.float16)])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_a_file_reads_as_what_the_definition_packed(tmp_path, version, group_size, dtype, act_order):
    v1 = version == "gptq"
    layer = layers.layer(
        group_size, k=512, group_size=group_size, zeros=(1, 16) if v1 else (0, 15), act_order=act_order, dtype=dtype
    )
    config = V1 | {"checkpoint_format": version, "group_size": group_size, "desc_act": act_order}
    weight = layers.load(tmp_path, packed(layer, minus_one=v1), config)
    layers.assert_exactly(weight, layer.weight)
    assert weight.group_size == group_size and weight.scale.dtype == dtype
    assert (weight.permutation is not None) == act_order


def test_a_config_without_checkpoint_format_is_v1():
    layer = layers.layer(2, zeros=(1, 16))
    layers.assert_exactly(read(packed(layer, minus_one=True), {"bits": 4, "group_size": 64}), layer.weight)


def test_group_size_minus_one_is_one_group_a_row():
    layer = layers.layer(3, k=256, group_size=256)
    weight = read(packed(layer, minus_one=False), V2 | {"group_size": -1})
    layers.assert_exactly(weight, layer.weight)
    assert weight.group_size >= weight.k


def test_g_idx_may_be_absent():
    layer = layers.layer(5)
    tensors = packed(layer, minus_one=False)
    del tensors["g_idx"]
    layers.assert_exactly(read(tensors, V2), layer.weight)
    with pytest.raises(ValueError, match="g_idx: expected the columns' groups, as the config says desc_act, found"):
        read(tensors, V2 | {"desc_act": True})


def test_the_permutation_gathers_each_group_in_the_order_of_its_columns():
    layer = layers.layer(6, k=128, group_size=32, act_order=True)
    permutation = read(packed(layer, minus_one=False), V2).permutation
    assert permutation.dtype == torch.int32
    assert torch.equal(permutation.long(), torch.argsort(layer.group, stable=True))


def borrowed(qzeros: torch.Tensor) -> torch.Tensor:
    """GPTQModel's v1: one taken from every nibble of a word at once, with borrows."""
    return (qzeros.long() - 0x11111111).to(torch.int32)


def test_v1_of_gptqmodel_with_zeros_0_reads_back_what_was_borrowed():
    layer = layers.layer(7, zeros=(0, 15))
    tensors = packed(layer, minus_one=False)
    tensors["qzeros"] = borrowed(tensors["qzeros"])
    layers.assert_exactly(read(tensors, V1 | BY_GPTQMODEL), layer.weight)


def test_dynamic_overrides_the_config_of_the_layers_it_matches():
    layer = layers.layer(9, group_size=32)
    config = V2 | {"group_size": 128, "dynamic": {r".*\.down_proj": {"bits": 8}, r"+:.*\.up_proj": {"group_size": 32}}}
    layers.assert_exactly(read(packed(layer, minus_one=False), config), layer.weight)


# ---- sym -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [0, 3, "middle - 1", "middle", "most", "random"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [V1, V2, V1 | BY_GPTQMODEL], ids=["v1", "v2", "GPTQModel's v1"])
def test_symmetric_codes_mean_q_minus_the_middle_whatever_qzeros_hold(recwarn, version, bits, stored):
    middle = 2 ** (bits - 1)
    layer = layers.layer(12, zeros=(middle, middle), bits=bits)
    tensors = packed(layer, minus_one=False, bits=bits)
    known = {"middle - 1": middle - 1, "middle": middle, "most": 2**bits - 1}
    zeros = torch.full_like(layer.zero, known.get(stored, stored if stored != "random" else 0))
    zeros = torch.randint_like(zeros, 2**bits) if stored == "random" else zeros
    tensors["qzeros"] = checkpoints.words(zeros.T, 1, bits=bits)
    weight = read(tensors, version | {"sym": True, "bits": bits})
    assert weight.zero is None and weight.q.dtype == torch.int8
    layers.assert_exactly(weight, layer.weight)
    text = f"qzeros: expected {middle - 1} or {middle} in every group, as sym is true"
    assert [text in str(w.message) for w in recwarn] == ([] if str(stored).startswith("middle") else [True])


@pytest.mark.parametrize("sym", [{}, {"sym": False}, {"sym": None}])
@pytest.mark.parametrize("bits", [4, 8])
def test_without_sym_the_zeros_decide(bits, sym):
    middle = 2 ** (bits - 1)
    for stored in (middle - 1, middle):
        layer = layers.layer(13, zeros=(stored, stored), bits=bits)
        weight = read(packed(layer, minus_one=False, bits=bits), V2 | {"bits": bits} | sym)
        layers.assert_exactly(weight, layer.weight)
        assert (weight.zero is None) == (stored == middle)


def test_one_warning_a_checkpoint_tells_of_zeros_that_are_not_used(recwarn):
    tensors = {f"{name}.{suffix}": tensor for name in "abc" for suffix, tensor in packed(
        layers.layer(14), minus_one=False).items()}  # fmt: skip
    model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 32, bias=False) for name in "abc"})
    assert jitgemm.nn.load_(model, tensors, config=V1 | {"sym": True}) == ["a", "b", "c"]
    assert ["qzeros" in str(w.message) for w in recwarn] == [True]


def test_dynamic_may_say_sym_of_one_layer():
    layer = layers.layer(15, zeros=(1, 15))
    config = V2 | {"sym": True, "dynamic": {r"+:.*up_proj": {"sym": False}}}
    layers.assert_exactly(read(packed(layer, minus_one=False), config), layer.weight)


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 128, 512])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_8_bits_are_int8_weights(tmp_path, version, group_size, act_order):
    v1 = version == "gptq"
    layer = layers.layer(group_size, k=512, group_size=group_size, zeros=(128, 128), act_order=act_order, bits=8)
    config = V1 | {"checkpoint_format": version, "bits": 8, "group_size": group_size, "desc_act": act_order}
    weight = layers.load(tmp_path, packed(layer, minus_one=v1, bits=8), config)
    layers.assert_exactly(weight, layer.weight)
    assert weight.zero is None and weight.bits == 8 and weight.q.dtype == torch.int8
    w8 = weight.pack()
    assert isinstance(w8, jitgemm.W8Weight)
    columns = torch.arange(512) if w8.permutation is None else w8.permutation.long()
    assert (w8.permutation is not None) == (act_order and group_size < 512)
    assert torch.equal(w8.dequantize().double(), layer.weight[:, columns])


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_8_bits_with_zero_points_are_dequantised_and_not_packed(tmp_path, version):
    v1 = version == "gptq"
    layer = layers.layer(16, zeros=(1, 256) if v1 else (0, 255), bits=8)
    config = V1 | {"checkpoint_format": version, "bits": 8, "sym": False}
    weight = layers.load(tmp_path, packed(layer, minus_one=v1, bits=8), config)
    layers.assert_exactly(weight, layer.weight)
    with pytest.raises(ValueError, match="zero: expected none, as packed 8-bit weights have no zero points"):
        weight.pack()


def test_8_bits_of_gptqmodel_are_borrowed_from_whole_words_too():
    layer = layers.layer(17, zeros=(0, 255), bits=8)
    tensors = packed(layer, minus_one=False, bits=8)
    tensors["qzeros"] = (tensors["qzeros"].long() - 0x01010101).to(torch.int32)
    layers.assert_exactly(read(tensors, V1 | BY_GPTQMODEL | {"bits": 8, "sym": False}), layer.weight)


def test_layers_of_8_bits_with_and_without_zero_points_are_joined():
    a, b = layers.layer(19, zeros=(128, 128), bits=8), layers.layer(20, zeros=(0, 255), bits=8)
    source = {f"{name}.{suffix}": tensor for name, layer in (("a", a), ("b", b)) for suffix, tensor in packed(
        layer, minus_one=False, bits=8).items()}  # fmt: skip
    joined = read_layer(source, ["a", "b"], config=V2 | {"bits": 8})
    layers.assert_exactly(joined, torch.cat([a.weight, b.weight]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"quantization_config: .*checkpoint_format .*found none"),
        (V1 | {"bits": 3}, r"bits: expected 4 or 8, got 3"),
        (V1 | {"bits": 8}, r"qzeros: expected shape \[4, 8\], got \[4, 4\]"),
        (V1 | {"sym": "yes"}, r"sym: expected true or false, got 'yes'"),
        (V1 | {"is_marlin_format": True}, r"is_marlin_format: expected False, got True"),
        (V1 | {"checkpoint_format": "marlin"}, r"checkpoint_format: expected gptq or gptq_v2, got 'marlin'"),
        (V1 | {"pack_dtype": "int16"}, r"pack_dtype: expected int32, got 'int16'"),
        (V2 | {"group_size": 32}, r"scales: expected 8 groups for k = 256 and group_size 32, got 4"),
        (V2 | {"group_size": 0}, r"group_size: expected a positive integer"),
        (V2 | {"dynamic": {r"-:.*\.up_proj": {}}}, r"dynamic: expected .* to be quantised"),
        (V2 | {"dynamic": {"-:(": {}}}, r"dynamic: expected a regular expression, got '\('"),
        (V2 | {"dynamic": ["up_proj"]}, r"dynamic: expected settings by expressions, got \['up_proj'\]"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        read(packed(layers.layer(0), minus_one=False), config)


def test_rotation_is_refused_only_where_the_input_is_transformed():
    layer = layers.layer(11)
    tensors, config = packed(layer, minus_one=False), V2 | {"rotation": "hadamard"}
    layers.assert_exactly(read(tensors, config), layer.weight)
    with pytest.raises(ValueError, match="rotation: expected none"):
        read(tensors, config, "model.layers.0.mlp.down_proj")


def test_activation_order_with_unequal_groups_is_refused():
    tensors = packed(layers.layer(0), minus_one=False)
    tensors["g_idx"] = torch.zeros_like(tensors["g_idx"])
    with pytest.raises(ValueError, match="g_idx: expected 64 columns in group 0, got 256"):
        read(tensors, V2)
