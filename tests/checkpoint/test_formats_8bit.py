"""Checkpoints of 8-bit layers: FP8 and INT8 as compressed-tensors, DeepSeek, vLLM and SGLang have them, and
mixtures."""

from __future__ import annotations

import builders
import checkpoints
import layers
import pytest
import torch
from files_8bit import DEEPSEEK, E4M3, codes, inputs, scales, scheme
from small_models import BLOCKS, Model, checkpoint_tensors, quantised_names, same_state

from jitgemm.checkpoint.load import load, read_layer
from jitgemm.kernel.formats import ceil_div
from jitgemm.nn import PackedLinear, W4A8Linear, W8A8Linear, load_
from jitgemm.weight.packed import W8Weight

LAYER = layers.PREFIX


def over(scale: torch.Tensor, n: int, k: int, rows: int, columns: int) -> torch.Tensor:
    """A scale for each block of rows x columns, for every weight."""
    return scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def assert_holds(folder, q: torch.Tensor, scale: torch.Tensor, layer: str = LAYER) -> W8Weight:
    """That the packed weight has these codes, bit for bit, and these scales for every weight."""
    weight = load(folder, layer, device="cpu")
    assert isinstance(weight, W8Weight)
    found, by_group, zero = weight.unpack()
    size = weight.group_size
    assert zero is None and builders.same_bits(found, q)
    assert torch.equal(over(by_group, *q.shape, 1, size).double(), scale.double())
    expected = q.float() * scale.float()
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(read_layer(folder, layer, device="cpu").dequantize(), expected)
    return weight


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
def test_zero_points_of_8_bits_are_dequantised(tmp_path, format, strategy):
    """As W8A16 of llm-compressor without symmetry; no packed weight has them."""
    n, k, groups = 40, 256, {"group": 2}.get(strategy, 1)
    q, scale = codes(1, n, k, torch.int8), scales(2, *((1,) if strategy == "tensor" else (n, groups)))
    zero = torch.randint(-128, 128, scale.shape, generator=builders.generator(3), dtype=torch.int8)
    by_row = [x.reshape(-1, groups).expand(n, groups).repeat_interleave(k // groups, 1) for x in (scale, zero)]
    exact = (q.int() - by_row[1].int()).float() * by_row[0]
    tensors = {"weight": q, "weight_scale": scale, "weight_zero_point": zero}
    if format == "pack-quantized":
        tensors = {"weight_packed": checkpoints.words(q.long() + 128, 1, bits=8), "weight_scale": scale}
        tensors |= {"weight_shape": torch.tensor([n, k]), "weight_zero_point": zero}
        if strategy != "tensor":
            tensors["weight_zero_point"] = checkpoints.words(zero.long() + 128, 0, bits=8)
    told = scheme("int", strategy, format, symmetric=False, **({"group_size": 128} if strategy == "group" else {}))
    folder = checkpoints.save(tmp_path, {f"layer.{name}": tensor for name, tensor in tensors.items()}, told)
    assert torch.equal(read_layer(folder, "layer", device="cpu").dequantize(), exact)
    parts = [read_layer(folder, "layer", device="cpu", tp_dim="n", tp_rank=r, tp_size=5).dequantize() for r in range(5)]
    assert torch.equal(torch.cat(parts), exact)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(k, n, bias=False)})
    with pytest.warns(UserWarning, match="8-bit codes with zero points"):
        load_(model, folder)
    assert torch.equal(model["layer"].weight, exact)


# ---- w8a8: other tools' ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told, codes_type", [
    (DEEPSEEK, E4M3), ({"quant_method": "w4afp8"}, E4M3), (None, E4M3), (DEEPSEEK, torch.int8),
    ({"quant_algo": "FP8_BLOCK_SCALES"}, E4M3),
], ids=["deepseek", "w4afp8", "no config", "int8", "tensorrt-llm"])  # fmt: skip
@pytest.mark.parametrize("n, k", [(256, 384), (200, 416), (64, 32)])
def test_blocks_of_128_by_128(tmp_path, told, codes_type, n, k):
    q, scale = codes(5, n, k, codes_type), scales(6, ceil_div(n, 128), ceil_div(k, 128))
    folder = checkpoints.save(tmp_path, {f"{LAYER}.weight": q, f"{LAYER}.weight_scale_inv": scale}, told)
    assert_holds(folder, q, over(scale, n, k, 128, 128))
    layer = PackedLinear.from_checkpoint(folder, LAYER, device="cpu")
    kind = "e4m3" if codes_type == E4M3 else "int8"
    assert layer.activation == f"{kind}_block" and layer.input_scale is None
    layer = PackedLinear.from_checkpoint(folder, LAYER, device="cpu", activation=kind)
    assert layer.activation == kind


OF_TRANSFORMERS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}


@pytest.mark.parametrize(
    "shape, dtype", [((), torch.bfloat16), ((1,), torch.float32), ((1, 1), torch.bfloat16), ((2, 1), torch.float32)]
)
def test_a_scale_of_transformers_fp8_without_blocks_is_that_of_the_tensor(tmp_path, shape, dtype):
    q, scale = codes(8, 64, 96, E4M3), scales(9, *shape, dtype=dtype)
    tensors = {f"{LAYER}.weight": q, f"{LAYER}.weight_scale_inv": scale}
    folder = checkpoints.save(tmp_path, tensors, OF_TRANSFORMERS)
    rows = scale.reshape(-1, 1).repeat_interleave(64 // scale.numel(), 0)
    assert_holds(folder, q, rows.expand(64, 96))
    layer = PackedLinear.from_checkpoint(folder, LAYER, device="cpu")
    assert layer.activation == "e4m3" and layer.input_scale is None
    for dim, size in (("n", 4), ("k", 3)):
        parts = [load(folder, LAYER, device="cpu", tp_dim=dim, tp_rank=r, tp_size=size) for r in range(size)]
        whole = torch.cat([part.dequantize() for part in parts], 0 if dim == "n" else 1)
        assert torch.equal(whole, q.float() * rows.float())


def test_a_static_activation_scale_of_transformers_is_the_layers(tmp_path):
    tensors = {"weight": codes(8, 64, 96, E4M3), "weight_scale_inv": torch.tensor(0.5).bfloat16()}
    tensors |= {"activation_scale": torch.tensor(0.25).bfloat16()}
    tensors = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    static = OF_TRANSFORMERS | {"activation_scheme": "static"}
    layer = PackedLinear.from_checkpoint(checkpoints.save(tmp_path, tensors, static), LAYER, device="cpu")
    assert layer.activation == "e4m3" and layer.input_scale.tolist() == [0.25]
    assert PackedLinear.from_checkpoint(tensors, LAYER, device="cpu", config=OF_TRANSFORMERS).input_scale is None
    del tensors[f"{LAYER}.activation_scale"]
    with pytest.raises(ValueError, match="expected the static scale that the config names, .*activation='e4m3' quant"):
        PackedLinear.from_checkpoint(tensors, LAYER, device="cpu", config=static)
    layer = PackedLinear.from_checkpoint(tensors, LAYER, device="cpu", config=static, activation="e4m3")
    assert layer.activation == "e4m3" and layer.input_scale is None


@pytest.mark.parametrize("name, static", [("scale", "input_scale"), ("qscale_weight", "qscale_act")])
def test_other_names_of_the_same_scales(tmp_path, name, static):
    """DeepSeek-V4's and Mistral's own, which transformers renames to weight_scale_inv."""
    q, scale = codes(7, 256, 384, E4M3), scales(8, 2, 3)
    tensors = {f"{LAYER}.weight": q, f"{LAYER}.{name}": scale, f"{LAYER}.{static}": torch.tensor(0.25)}
    folder = checkpoints.save(tmp_path, tensors, {"quant_method": "fp8"})
    assert_holds(folder, q, over(scale, 256, 384, 128, 128))
    assert PackedLinear.from_checkpoint(folder, LAYER, device="cpu").input_scale.tolist() == [0.25]


def test_fp4_experts_under_the_names_of_w4afp8_are_told_by_their_scales():
    """As DeepSeek-V4 has them: the same names and shapes as int4 codes in groups, with e8m0 scales."""
    tensors = {"weight": torch.zeros((64, 64), dtype=torch.int8), "weight_scale_inv": torch.ones(64, 4)}
    assert "expected e8m0 scales of FP4 codes (expert_dtype)" in refused(tensors, {"quant_method": "fp8"})
    exponents = torch.ones((64, 4), dtype=torch.uint8)
    tensors = {f"{LAYER}.{name}": tensor for name, tensor in (tensors | {"weight_scale_inv": exponents}).items()}
    assert load(tensors, LAYER, device="cpu").format.code == "e2m1"


STATIC = dict.fromkeys(("weights", "input_activations"), {"dynamic": False, "num_bits": 8, "type": "float"})
OF_MODELOPT = {"quant_algo": "FP8", "config_groups": {"group_0": STATIC}, "ignore": ["lm_head"]}
"""As ModelOpt writes it: groups of compressed-tensors' without a strategy; its first releases name no quant_method."""


@pytest.mark.parametrize("told, codes_type", [
    ({"quant_method": "fp8"}, E4M3), ({"quant_method": "w8a8_fp8"}, E4M3), ({"quant_method": "w8a8_int8"}, torch.int8),
    ({"quant_method": "modelopt", "quant_algo": "W8A16"}, torch.int8),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, E4M3),
    (OF_MODELOPT, E4M3), (OF_MODELOPT | {"quant_method": "modelopt"}, E4M3),
    ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]}, E4M3),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (40,), (40, 1)])
def test_a_scale_for_each_row_or_the_tensor(tmp_path, told, codes_type, shape):
    q, scale = codes(8, 40, 96, codes_type), scales(9, *shape)
    tensors = {f"{LAYER}.weight": q, f"{LAYER}.weight_scale": scale}
    folder = checkpoints.save(tmp_path, tensors, told)
    assert_holds(folder, q, scale.reshape(-1, 1).expand(40, 96))
    static = checkpoints.save(tmp_path / "static", tensors | {f"{LAYER}.input_scale": torch.tensor(0.5)}, told)
    if codes_type == E4M3:  # its kind of activations follows from the weight
        layer = PackedLinear.from_checkpoint(static, LAYER, device="cpu")
        assert layer.activation == "e4m3" and layer.input_scale.tolist() == [0.5]


def test_no_two_formats_detect_8_bits():
    fp8, blocks, rows = (
        codes(1, 256, 256, E4M3),
        {"weight_scale_inv": torch.ones(2, 2)},
        {"weight_scale": torch.ones(256, 1)},
    )
    fp8, int8, groups = {"weight": fp8}, {"weight": fp8.view(torch.int8)}, {"weight_scale_inv": torch.ones(256, 4)}
    compressed = scheme("float", "channel", "float-quantized")
    rows_of_one = {"quant_method": "blockwise_int8", "weight_block_size": [1, 64]}  # not two codes a byte
    for tensors, told, expected in (
        *((fp8 | blocks, told, "w8a8") for told in (None, {"quant_method": "w4afp8"})),
        *((fp8 | rows, told, "w8a8") for told in (
            None, {}, {"quant_method": "fp8"}, {"quant_method": "modelopt", "config_groups": {}})),
        (fp8 | rows, compressed, "compressed-tensors"),
        (fp8 | rows, {"config_groups": compressed["config_groups"]}, "compressed-tensors"),
        (int8 | rows, None, "compressed-tensors"), (int8 | rows, {"quant_method": "w8a8_int8"}, "w8a8"),
        (int8 | blocks, None, "w8a8"), (int8 | groups, None, "w4afp8"), (int8 | groups, rows_of_one, "w8a8"),
    ):  # fmt: skip
        assert layers.detecting(tensors, told) == [expected]


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(tensors, told=None, **options) -> str:
    tensors = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(ValueError) as error:
        PackedLinear.from_checkpoint(tensors, LAYER, device="cpu", config=told, **options)
    return str(error.value)


FP8 = {"weight": codes(1, 16, 256, E4M3), "weight_scale": torch.ones(16, 1)}
INT8 = {"weight": codes(1, 16, 256, torch.int8), "weight_scale": torch.ones(16, 1)}
OF_FP8, OF_INT8 = (scheme(kind, "channel", f"{kind}-quantized", inputs(kind)) for kind in ("float", "int"))


def changed(told: dict, **weights) -> dict:
    group = told["config_groups"]["group_0"]
    return told | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize("tensors, told, message", [
    (INT8, OF_FP8, "weight: expected float8_e4m3fn [n, k], got int8 [16, 256]"),
    (FP8, OF_INT8, "weight: expected int8 [n, k], got float8_e4m3fn [16, 256]"),
    (INT8, changed(OF_INT8, symmetric=False), "weight_zero_point: expected the tensor, as the config says"),
    (FP8, changed(OF_FP8, symmetric=False), "weights: expected symmetric: true with type 'float', got false"),
    (FP8, changed(OF_FP8, strategy="block", block_structure=[128]), "block_structure: expected two positive"),
    (FP8, scheme("float", "channel", "float-quantized", inputs("int")), "activation: expected e4m3 activations"),
    (INT8, None, "num_bits 8 in a config says that there are more"),
    *((FP8, {"quant_method": "fp8", setting: value}, f"{setting}: expected ") for setting, value in (
        ("activation_scheme", "block"), ("fmt", "e5m2"), ("scale_fmt", "log"), ("quant_algo", "FP8_OF_TOMORROW"))),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tensors, told, message):
    assert message in refused(tensors, told)


def test_activations_of_another_type_are_named():
    message = "activation: expected e4m3 activations, as the 8-bit weight is e4m3, got int8 (layer"
    assert message in refused(FP8, OF_FP8, activation="int8")
    tensors = {f"{LAYER}.{name}": tensor for name, tensor in INT8.items()}
    said = scheme("int", "channel", "int-quantized", inputs("float"))
    layer = PackedLinear.from_checkpoint(tensors, LAYER, device="cpu", config=said, activation="int8_affine")
    assert layer.activation == "int8_affine"
    with pytest.raises(ValueError, match="prefix: expected a layer of 4 bits, got .*, which is a W8A8Linear's"):
        W4A8Linear.from_checkpoint(tensors, LAYER, device="cpu", config=OF_INT8)


# ---- cutting and joining ---------------------------------------------------------------------------------------------


def test_layers_of_one_kind_are_joined_and_others_named():
    def layer(name: str, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": codes(n, n, 256, dtype), f"{name}.weight_scale_inv": scales(n, ceil_div(n, 128), 2)}

    tensors = layer("q", 200, E4M3) | layer("k", 136, E4M3) | layer("v", 136, torch.int8)
    joined = load(tensors, ["q", "k"], device="cpu")
    assert torch.equal(
        joined.dequantize(), torch.cat([load(tensors, name, device="cpu").dequantize() for name in "qk"])
    )
    with pytest.raises(ValueError, match="must have one type of codes, got .'float8_e4m3fn', 'int8'."):
        load(tensors, ["q", "v"], device="cpu")
    tensors |= {"u.weight": torch.zeros((8, 128), dtype=torch.int8), "u.weight_scale_inv": torch.ones(8, 2)}
    with pytest.raises(ValueError, match="must have one width, got .8, 4."):
        load(tensors, ["q", "u"], device="cpu")


# ---- models ----------------------------------------------------------------------------------------------------------


def test_a_mixed_checkpoint_loads_whole(tmp_path):
    """`up` in 4 bits, block 0's `down` in 8, block 1's in floats."""
    tensors, dense = checkpoint_tensors(Model(), "blocks.0.up", "blocks.1.up")
    weight = tensors.pop("blocks.0.down.weight")
    scale = weight.abs().amax(1, keepdim=True).float() / 448
    tensors |= {"blocks.0.down.weight": (weight / scale).to(E4M3), "blocks.0.down.weight_scale": scale}
    dense["blocks.0.down.weight"] = tensors["blocks.0.down.weight"].float() * scale
    of_4, of_8 = (
        scheme(kind, "channel", format, inputs("float"), bits)["config_groups"]["group_0"] | {"targets": [target]}
        for kind, format, bits, target in (
            ("int", "int-quantized", 4, "re:.*up"), ("float", "float-quantized", 8, "re:.*down"))
    )  # fmt: skip
    told = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"a": of_4, "b": of_8}}
    told["ignore"] = ["blocks.1.down", "odd", "lm_head"]
    model, expected = Model(), Model()
    folder = checkpoints.save(tmp_path, tensors, told)
    report = load_(model, folder)
    assert report == ["blocks.0.up", "blocks.0.down", "blocks.1.up"] == quantised_names(model)
    assert report.skipped == {} and report.ignored == {}
    kinds = [type(model.get_submodule(name)) for name in BLOCKS]
    assert kinds == [W4A8Linear, W8A8Linear, W4A8Linear, torch.nn.Linear]
    for name in report:
        assert torch.equal(model.get_submodule(name).weight.dequantize(), dense[f"{name}.weight"])
    expected.load_state_dict(dense)
    with torch.no_grad():
        found, exact = model(torch.arange(10)[None])[0], expected(torch.arange(10)[None])[0]
    assert float((found - exact).norm() / exact.norm()) < 0.03
    again = Model()
    assert load_(again, model.state_dict()) == report and same_state(again, model)  # and from what it saves
    plain = Model()
    with pytest.warns(UserWarning, match="converted no layer"):
        load_(plain, folder, filter=lambda *_: False)
    assert torch.equal(plain.blocks[0].down.weight, dense["blocks.0.down.weight"])
