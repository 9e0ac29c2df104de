"""NVFP4 checkpoints from disk: compressed-tensors' and ModelOpt's; bits against the library's."""

from __future__ import annotations

import warnings

import checkpoints
import nvfp4
import pytest
import torch

from jitgemm.checkpoint.load import load, read_layer
from jitgemm.nn import W4A8Linear, load_

LAYER = "model.layers.0.mlp.down_proj"
WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}
FOUR_BITS = WEIGHTS | {"dynamic": "local"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def config(inputs: dict | None = None, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group}}


def modelopt(algorithm: str = "W4A16_NVFP4") -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def compressed(parts: nvfp4.Parts, layer: str = LAYER) -> dict[str, torch.Tensor]:
    tensors = {"packed": parts.canonical, "scale": parts.scales, "global_scale": parts.whole.reciprocal()}
    return {f"{layer}.weight_{name}": tensor for name, tensor in tensors.items()}


def of_modelopt(parts: nvfp4.Parts, layer: str = LAYER) -> dict[str, torch.Tensor]:
    tensors = {"": parts.canonical, "_scale": parts.scales, "_scale_2": parts.whole.view(())}
    return {f"{layer}.weight{name}": tensor for name, tensor in tensors.items()}


FILES = {
    "compressed-tensors": (compressed, config()),
    "compressed-tensors without a config": (compressed, None),
    "preset": (compressed, config() | {"config_groups": {"NVFP4A16": ["Linear"]}}),
    "modelopt without a config": (of_modelopt, None),
}


def parts_of(seed: int, n: int, k: int) -> nvfp4.Parts:
    """With a tensor's scale whose inverse's inverse it is."""
    parts = nvfp4.parts(seed, n, k, low=0, high=127)
    return nvfp4.Parts(parts.codes, parts.scales, torch.tensor([0.0078125 * 2**seed]))


@pytest.mark.parametrize("file", FILES)
def test_every_weight_is_the_specification_s(tmp_path, file):
    tensors, settings = FILES[file]
    parts = parts_of(1, 72, 416)
    folder = checkpoints.save(tmp_path, tensors(parts), settings)
    assert torch.equal(read_layer(folder, LAYER, device="cpu").dequantize().double(), parts.dequantize_fp64())
    weight = load(folder, LAYER, device="cpu")
    assert weight.format == parts.packed.format and torch.equal(weight.blocks, parts.packed.blocks)
    assert torch.equal(weight.channel_scale, parts.packed.channel_scale)


# ---- activations -----------------------------------------------------------------------------------------------------


def model_of(tmp_path, tensors: dict, settings: dict | None, **options) -> W4A8Linear:
    model = torch.nn.Sequential(torch.nn.Linear(416, 72, bias=False))
    folder = checkpoints.save(tmp_path, {f"0.{name.split('.')[-1]}": each for name, each in tensors.items()}, settings)
    load_(model, folder, device="cpu", **options)
    assert isinstance(model[0], W4A8Linear)
    return model[0]


@pytest.mark.parametrize("settings", [config(), config(TOKEN), None, modelopt("W4A8_NVFP4_FP8")])
def test_activations_of_8_bits_are_the_layer_s(tmp_path, settings):
    static = settings == modelopt("W4A8_NVFP4_FP8")
    parts = parts_of(1, 72, 416)
    tensors = of_modelopt(parts) | {f"{LAYER}.input_scale": torch.tensor(0.25)} if static else compressed(parts)
    layer = model_of(tmp_path, tensors, settings)
    assert layer.activation == "e4m3" and torch.equal(layer.weight.blocks, parts.packed.blocks)
    assert (layer.input_scale.item() == 0.25) if static else layer.input_scale is None


@pytest.mark.parametrize("file", ["compressed-tensors", "modelopt", "modelopt without a config"])
def test_activations_of_4_bits_are_replaced_with_a_warning(tmp_path, file):
    parts = parts_of(1, 72, 416)
    name = "input_global_scale" if file == "compressed-tensors" else "input_scale"
    tensors = (compressed if file == "compressed-tensors" else of_modelopt)(parts)
    tensors |= {f"{LAYER}.{name}": torch.tensor([0.25])}
    settings = {"compressed-tensors": config(FOUR_BITS), "modelopt": modelopt("NVFP4")}.get(file)
    with pytest.warns(UserWarning, match="inputs of 4 bits are quantised to 8 bits for each token, e4m3"):
        layers = [model_of(tmp_path, tensors, settings)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.append(model_of(tmp_path, tensors, settings, activation="e4m3"))
    assert read_layer(tensors, LAYER, device="cpu", config=settings).input_scale is None
    for layer in layers:
        assert layer.activation == "e4m3" and layer.input_scale is None
        assert torch.equal(layer.weight.blocks, parts.packed.blocks)


# ---- what raises -----------------------------------------------------------------------------------------------------


TENSORS, OTHER = compressed(parts_of(1, 72, 416)), of_modelopt(parts_of(1, 72, 416))
REFUSED = [
    (TENSORS, config(group_size=32), "weights: expected group_size 16, as NVFP4's tensors have, got 32"),
    (TENSORS, config(symmetric=False), "weights: expected symmetric ones"),
    (OTHER, modelopt("FP8"), "quant_algo: expected NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8, as"),
    (TENSORS, config() | {"ignore": [LAYER]}, "ignore: expected no target that matches"),
    (TENSORS | {f"{LAYER}.weight_zero_point": torch.zeros(72, 26)}, config(), "zero_point"),
    *((file | {f"{LAYER}.{name}": torch.tensor([value])}, None, f"{name}: expected a positive, finite number")
      for file, name in ((OTHER, "weight_scale_2"), (TENSORS, "weight_global_scale"))
      for value in (0.0, -1.0, torch.inf, torch.nan)),
    *(({each: tensor for each, tensor in whole.items() if not each.endswith(name)}, settings, f"{name}: .*found none")
      for whole, name, said in ((TENSORS, "weight_global_scale", config()), (OTHER, "weight_scale_2", modelopt()))
      for settings in (said, None)),
]  # fmt: skip


@pytest.mark.parametrize("tensors, settings, message", REFUSED)
def test_what_is_not_nvfp4_is_named(tensors, settings, message):
    with pytest.raises(ValueError, match=message):
        load(tensors, LAYER, device="cpu", config=settings)


@pytest.mark.parametrize("file", FILES)
def test_a_negative_scale_is_named(file):
    tensors, settings = FILES[file]
    parts = parts_of(1, 72, 416)
    parts.scales.view(torch.uint8)[5, 3] = 0xB8
    with pytest.raises(ValueError, match=r"scale: expected numbers of at least 0, got -1.0 at \[5, 3\]"):
        load(tensors(parts), LAYER, device="cpu", config=settings)
