"""GPTQ v1 and v2, AWQ, and AutoRound's words for their tensors, packed from the definition."""

from __future__ import annotations

from typing import Any

import checkpoints
import files_awq
import layers
import pytest
import torch
from files_awq import GEMM, GEMV
from files_gptq import AUTOROUND, V1, V2, packed

import jitgemm.nn
from jitgemm.checkpoint import read_layer
from jitgemm.nn import PackedLinear

MODEL = V1 | {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}


def read(tensors: dict[str, torch.Tensor], config: dict[str, Any] | None, prefix: str = layers.PREFIX, **options):
    source = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    return read_layer(source, prefix, device="cpu", config=config, **options)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits, group_size, dtype", [
    (4, 32, torch.float16), (4, 64, torch.bfloat16), (4, 256, torch.float16), (8, 32, torch.float16),
    (8, 512, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_a_file_reads_as_what_the_definition_packed(tmp_path, version, bits, group_size, dtype, act_order):
    v1 = version == "gptq"
    zeros = (128, 128) if bits == 8 else (1, 16) if v1 else (0, 15)
    layer = layers.layer(1, k=512, group_size=group_size, zeros=zeros, act_order=act_order, dtype=dtype, bits=bits)
    said = {"checkpoint_format": version, "bits": bits, "group_size": group_size, "desc_act": act_order}
    weight = layers.load(tmp_path, packed(layer, minus_one=v1, bits=bits), V1 | said)
    layers.assert_exactly(weight, layer.weight)
    assert weight.bits == bits and weight.scale.dtype == dtype
    ordered = act_order and group_size < 512
    assert (weight.permutation is not None) == ordered
    if ordered:
        assert torch.equal(weight.permutation, torch.argsort(layer.group, stable=True).int())
    if bits == 8:
        w8 = weight.pack()
        assert isinstance(w8, jitgemm.W8Weight) and weight.zero is None and (w8.permutation is not None) == ordered
        columns = w8.permutation.long() if ordered else slice(None)
        assert torch.equal(w8.dequantize().double(), layer.weight[:, columns])


def borrowed(layer: layers.Layer, bits: int) -> dict[str, torch.Tensor]:
    """GPTQModel's v1: one taken from every code of a word at once, with borrows."""
    tensors, ones = packed(layer, minus_one=False, bits=bits), {4: 0x11111111, 8: 0x01010101}[bits]
    return tensors | {"qzeros": (tensors["qzeros"].long() - ones).to(torch.int32)}


def gptq(v1: bool = False, bits: int = 4, zeros: tuple[int, int] = (1, 15), **sizes):
    """A layer's tensors, its weight, and whether all of its zero points are the middle."""
    layer = layers.layer(2, zeros=zeros, bits=bits, **sizes)
    return packed(layer, minus_one=v1, bits=bits), layer.weight, zeros[0] == zeros[1] == 2 ** (bits - 1)


def awq(width: int = 0, zeros: tuple[int, int] = (0, 15), **sizes):
    """The same, in gemv's tensors of so many words of zeros, or in gemm's."""
    layer = layers.layer(3, zeros=zeros, **sizes)
    return files_awq.gemv(layer, width) if width else files_awq.gemm(layer), layer.weight, zeros == (8, 8)


def gptqmodels(bits: int):
    layer = layers.layer(7, zeros=(0, 2**bits - 1), bits=bits)
    return borrowed(layer, bits), layer.weight, False


OLD, EIGHT, UP = {"quant_method": "intel/auto-round"}, {"bits": 8, "sym": True}, {layers.PREFIX: {"bits": 8}}
ONE, MIDDLE, BYTES = {"group_size": 256}, (8, 8), (128, 128)
OF_32 = {r".*\.down_proj": {"bits": 8}, r"+:.*\.up_proj": {"group_size": 32}}
READ = [
    *((AUTOROUND | said, gptq(v1)) for said, v1 in (
        ({}, True), ({"packing_format": "auto_round:auto_gptq", "backend": "ark"}, True),
        ({"packing_format": "auto_round"}, False), ({"packing_format": "auto_round:gptqmodel"}, False),
        *((OLD | {"backend": backend}, True) for backend in (
            "auto_round:gptq", "auto_round:gptq:exllamav2", "auto_gptq:exllamav2", "gptq:exllamav2")),
        *((OLD | {"backend": f"{backend}2"}, False) for backend in (
            "auto_round:exllamav", "autoround:exllamav", "auto_round:tritonv")),
        # Expressions are found in the name, and plain names are the whole.
        *(({"group_size": 32, "extra_config": {name: {"group_size": 64}}}, True) for name in (
            layers.PREFIX, r"model\.layers\..*up_proj", r"\.up_proj")),
        *(({"extra_config": {other: {"bits": 8}}}, True) for other in ("layers.0.mlp.up", "model.layers.0.mlp")),
    )),
    *((AUTOROUND | said, gptq(True, 8, BYTES)) for said in (EIGHT, {"sym": True, "extra_config": UP})),
    (AUTOROUND | {"packing_format": "auto_round", "sym": True}, gptq(zeros=MIDDLE)),
    *((AUTOROUND | {"packing_format": f"auto_round:{awqs}", "sym": True}, awq(zeros=MIDDLE)) for awqs in (
        "auto_awq", "awq", "auto_awq:gemm")),
    ({"bits": 4, "group_size": 64}, gptq(True)),
    (V2 | {"group_size": -1}, gptq(**ONE)),
    (MODEL, gptqmodels(4)), (MODEL | {"bits": 8, "sym": False}, gptqmodels(8)),
    (V2 | {"group_size": 128, "dynamic": OF_32}, gptq(group_size=32)),
    (V2 | {"sym": True, "dynamic": {r"+:.*up_proj": {"sym": False}}}, gptq()),
    (None, awq()), ({"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}, awq()),
    (GEMM | {"group_size": 32}, awq(group_size=32)), (GEMM, awq(dtype=torch.bfloat16)),
    (GEMM | {"group_size": -1}, awq(**ONE)),
    *((GEMV | {"group_size": size}, awq(width, group_size=size)) for size, width in ((128, 1), (64, 2), (32, 4))),
    (GEMM | {"zero_point": False}, awq(zeros=MIDDLE)), (GEMM | {"zero_point": None, "sym": True}, awq(zeros=MIDDLE)),
    (GEMM | {"sym": False}, awq()), (GEMM | {"group_size": 128, "dynamic": OF_32}, awq(group_size=32)),
]  # fmt: skip


@pytest.mark.parametrize("config, file", READ, ids=[str(config) for config, _ in READ])
def test_what_a_config_says_of_tensors_is_how_they_are_read(config, file):
    tensors, expected, symmetric = file
    weight = read(tensors, config)
    layers.assert_exactly(weight, expected)
    assert (weight.zero is None) == symmetric


def test_g_idx_may_be_absent():
    tensors, expected, _ = gptq()
    del tensors["g_idx"]
    layers.assert_exactly(read(tensors, V2), expected)
    with pytest.raises(ValueError, match="g_idx: expected the columns' groups, as the config says desc_act, found"):
        read(tensors, V2 | {"desc_act": True})


# ---- sym -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [0, 3, "middle - 1", "middle", "most", "random"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [V1, V2, MODEL], ids=["v1", "v2", "GPTQModel's v1"])
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
        tensors, expected, _ = gptq(False, bits, (stored, stored))
        weight = read(tensors, V2 | {"bits": bits} | sym)
        layers.assert_exactly(weight, expected)
        assert (weight.zero is None) == (stored == middle)


def test_one_warning_a_checkpoint_tells_of_zeros_that_are_not_used(recwarn):
    tensors = {f"{name}.{suffix}": tensor for name in "abc" for suffix, tensor in gptq()[0].items()}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 32, bias=False) for name in "abc"})
    assert jitgemm.nn.load_(model, tensors, config=V1 | {"sym": True}) == ["a", "b", "c"]
    assert ["qzeros" in str(w.message) for w in recwarn] == [True]


def test_8_bits_with_zero_points_are_dequantised_and_joined_and_not_packed():
    a, b = gptq(False, 8, BYTES), gptq(False, 8, (0, 255))
    source = {f"{name}.{suffix}": tensor for name, file in (("a", a), ("b", b)) for suffix, tensor in file[0].items()}
    joined = read_layer(source, ["a", "b"], config=V2 | {"bits": 8})
    layers.assert_exactly(joined, torch.cat([a[1], b[1]]))
    with pytest.raises(ValueError, match="zero: expected none, as packed 8-bit weights have no zero points"):
        joined.pack()


# ---- AutoRound's FP8 -------------------------------------------------------------------------------------------------

FP8 = {"bits": 8, "group_size": -1, "sym": True, "data_type": "fp"}
STATIC = {"act_bits": 8, "act_data_type": "fp", "act_dynamic": False, "act_group_size": 0, "fmt": "e4m3"}


@pytest.mark.parametrize("said, shape, activation", [
    (FP8 | {"data_type": "fp8"}, (32,), "e4m3"),
    (FP8 | STATIC | {"packing_format": "auto_round:fp8_static", "activation_scheme": "static"}, (32,), "e4m3"),
    (FP8 | {"group_size": [128, 128], "act_bits": 8, "act_dynamic": True}, (1, 2), "e4m3_block"),
    ({"extra_config": {layers.PREFIX: FP8 | {"act_bits": 16}}}, (32,), "e4m3"),
])  # fmt: skip
def test_fp8_layers_are_read(said, shape, activation):
    q, static = torch.randn(32, 256).to(torch.float8_e4m3fn), "activation_scheme" in said
    scale = (torch.rand(shape) + 0.5).bfloat16()
    by_row = scale.float().repeat_interleave(128, 1).expand(32, -1) if len(shape) == 2 else scale.float()[:, None]
    tensors = {"weight": q, "weight_scale_inv" if len(shape) == 2 else "weight_scale": scale}
    tensors |= {"input_scale": torch.tensor([0.5], dtype=torch.bfloat16)} if static else {}
    source = {f"{layers.PREFIX}.{name}": tensor for name, tensor in tensors.items()}
    layer = PackedLinear.from_checkpoint(source, layers.PREFIX, config=AUTOROUND | said, device="cpu")
    assert torch.equal(layer.weight.dequantize(), q.float() * by_row)
    assert layer.activation == activation and (layer.input_scale is not None) == static


# ---- what raises -----------------------------------------------------------------------------------------------------

OF_GPTQ = [
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
    *((AUTOROUND | said, message) for said, message in (
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
        ({"extra_config": {layers.PREFIX: {"bits": 3}}}, "bits: expected 4 or 8, got 3"),
        ({"act_bits": 8}, "act_bits: expected 16, got 8; give a config without it"),
        ({"rotation_config": {"hadamard_type": "quarot"}}, "rotation_config: expected none"),
    )),
]  # fmt: skip
OF_AWQ = [
    ({"bits": 8}, "bits: expected 4, got 8"), ({"backend": "llm-awq"}, "backend: expected autoawq, got 'llm-awq'"),
    *(({"version": version}, f"version: expected gemm or gemv, got '{version}'") for version in (
        "gemv_fast", "llm-awq", "marlin")),
    ({"zero_point": "no"}, "zero_point: expected true or false, got 'no'"),
    *((said, "qzeros: expected 8 in every group, as the config says zero_point: false") for said in (
        {"zero_point": False}, {"zero_point": None, "sym": True})),
]  # fmt: skip
REFUSED = [(*each, gptq()[0]) for each in OF_GPTQ] + [(GEMM | said, message, awq()[0]) for said, message in OF_AWQ]
REFUSED.append((GEMV, "group_size: expected it in the config", awq(1)[0]))


@pytest.mark.parametrize("config, message, tensors", REFUSED, ids=[message for _, message, _ in REFUSED])
def test_a_config_that_cannot_be_read_is_refused(config, message, tensors):
    with pytest.raises(ValueError, match=message):
        read(tensors, config, format="gptq" if config is None else None)


def test_rotation_is_refused_only_where_the_input_is_transformed():
    (tensors, expected, _), config = gptq(), V2 | {"rotation": "hadamard"}
    layers.assert_exactly(read(tensors, config), expected)
    with pytest.raises(ValueError, match="rotation: expected none"):
        read(tensors, config, "model.layers.0.mlp.down_proj")


def test_activation_order_with_unequal_groups_is_refused():
    tensors = gptq()[0]
    with pytest.raises(ValueError, match="g_idx: expected 64 columns in group 0, got 256"):
        read(tensors | {"g_idx": torch.zeros_like(tensors["g_idx"])}, V2)
