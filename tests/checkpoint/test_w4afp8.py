"""W4AFP8 of SGLang and TensorRT-LLM, from the format's definition: neither engine can be installed for a test."""

from __future__ import annotations

import builders
import checkpoints
import pytest
import torch

from jitgemm.checkpoint.load import load, read_layer

LAYER = "model.layers.3.mlp.experts.7.down_proj"
CONFIG = {"quant_method": "w4afp8", "group_size": 128, "modules_to_not_convert": ["lm_head"]}


def tensors(parts: builders.WeightParts, layer: str = LAYER):
    return {
        f"{layer}.weight": checkpoints.words(parts.q, -1, torch.int8),
        f"{layer}.weight_scale_inv": parts.scale,
    }


def test_even_k_is_the_low_nibble_in_two_s_complement():
    one_row = torch.tensor([[0x7F, -0x80, 0x08, 0x1E] * 4], dtype=torch.int8)  # low, high: -1 7, 0 -8, -8 0, -2 1
    layer = {"weight": one_row.expand(8, 16), "weight_scale_inv": torch.ones((8, 1))}
    assert load(layer, "", device="cpu").dequantize()[5, :8].tolist() == [-1, 7, 0, -8, -8, 0, -2, 1]


def test_fp32_scales_are_not_rounded_to_the_bf16_that_the_engines_compute_with():
    parts = builders.weight_parts(2, 16, 256, 128, scale_type="fp32")
    weight = load(tensors(parts), LAYER, device="cpu")
    rounded = checkpoints.dequantized(parts.q, parts.scale.bfloat16()).float()
    assert weight.scale_dtype == torch.float32
    assert torch.equal(weight.dequantize(), parts.dequantize_fp64().float())
    assert not torch.equal(weight.dequantize(), rounded)
    as_engines_do = tensors(parts) | {f"{LAYER}.weight_scale_inv": parts.scale.bfloat16()}
    assert torch.equal(load(as_engines_do, LAYER, device="cpu").dequantize(), rounded)


@pytest.mark.parametrize("group_size", [32, 64, 256, 0])
def test_other_group_sizes_follow_from_the_shapes(group_size):
    parts = builders.weight_parts(3, 16, 512, group_size)
    assert torch.equal(load(tensors(parts), LAYER, device="cpu").dequantize(), parts.dequantize_fp64().float())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_static_scale_of_the_input_in_fp32(shape, dtype):
    layer = tensors(builders.weight_parts(4, 16, 128)) | {f"{LAYER}.input_scale": torch.full(shape, 0.3, dtype=dtype)}
    scale = read_layer(layer, LAYER, device="cpu").input_scale
    assert scale.dtype == torch.float32 and scale.tolist() == [torch.tensor(0.3, dtype=dtype).item()]


@pytest.mark.parametrize("name, other", [("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")])
def test_an_expert_s_static_scale_may_stand_under_its_other_name(tmp_path, name, other):
    expert = "model.layers.3.mlp.experts.7"
    scales = {f"{expert}.w{i}.input_scale": torch.tensor([i / 8]) for i in (1, 2, 3)}
    folder = checkpoints.save(tmp_path, tensors(builders.weight_parts(5, 16, 128), f"{expert}.{name}") | scales, CONFIG)
    assert read_layer(folder, f"{expert}.{name}", device="cpu").input_scale.tolist() == [int(other[1]) / 8]


def test_gate_and_up_with_one_static_scale_are_joined_and_with_two_are_not():
    expert = "model.layers.3.mlp.experts.7"
    gate, up = (builders.weight_parts(seed, 16, 128) for seed in (6, 7))
    layers = tensors(gate, f"{expert}.gate_proj") | tensors(up, f"{expert}.up_proj")
    prefixes = [f"{expert}.gate_proj", f"{expert}.up_proj"]
    same = {f"{expert}.w1.input_scale": torch.tensor(0.5), f"{expert}.w3.input_scale": torch.tensor(0.5)}
    joined = read_layer(layers | same, prefixes, device="cpu")
    assert torch.equal(joined.dequantize(), torch.cat([gate.dequantize_fp64(), up.dequantize_fp64()]).float())
    assert joined.input_scale.tolist() == [0.5]
    with pytest.raises(ValueError, match="must have one input_scale, got different ones"):
        read_layer(layers | same | {f"{expert}.w3.input_scale": torch.tensor(1.0)}, prefixes, device="cpu")


def test_stacked_experts_are_read_one_at_a_time(tmp_path):
    experts = [builders.weight_parts(seed, 16, 256) for seed in range(3)]
    stacked = {
        "experts.w13_weight": torch.stack([checkpoints.words(e.q, -1, torch.int8) for e in experts]),
        "experts.w13_weight_scale_inv": torch.stack([e.scale for e in experts]),
        "experts.w13_input_scale": torch.tensor([0.5, 1.0, 2.0]),
        "experts.w2_weight": torch.zeros((3, 8, 8), dtype=torch.int8),
    }
    folder = checkpoints.save(tmp_path, stacked, CONFIG)
    for source in (folder, stacked):
        for i, expert in enumerate(experts):
            read = read_layer(source, "experts.w13_", device="cpu", expert=i)
            assert torch.equal(read.dequantize(), expert.dequantize_fp64().float())
            assert read.input_scale.tolist() == [stacked["experts.w13_input_scale"][i]]
    with pytest.raises(ValueError, match=r"expert: expected 0\.\.2, got 3"):
        read_layer(folder, "experts.w13_", device="cpu", expert=3)


def test_a_layer_without_experts_has_no_expert():
    layer = tensors(builders.weight_parts(8, 16, 128)) | {f"{LAYER}.input_scale": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="expert: expected tensors with one number of experts as their first size"):
        load(layer, LAYER, device="cpu", expert=0)


def test_a_group_size_of_the_config_that_is_not_the_files_is_refused():
    with pytest.raises(ValueError, match="group_size: expected k / columns of weight_scale_inv = 256 / 2, got 64"):
        load(tensors(builders.weight_parts(10, 16, 256)), LAYER, device="cpu", config=CONFIG | {"group_size": 64})


def test_modelopt_s_w4a8_is_told_apart_and_refused():
    layer = {
        "weight": torch.zeros((8, 256), dtype=torch.uint8),  # two rows to a byte
        "weight_scale": torch.ones((16, 2)),
        "weight_scale_2": torch.ones(()),
        "pre_quant_scale": torch.ones(256),
        "input_scale": torch.ones(()),
    }
    with pytest.raises(ValueError, match="got ModelOpt's W4A8_AWQ .*which is not supported"):
        load(layer, "", device="cpu")
