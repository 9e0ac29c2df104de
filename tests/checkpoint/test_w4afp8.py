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


def test_fp32_scales_are_not_rounded_to_the_bf16_that_the_engines_compute_with():
    parts = builders.weight_parts(2, 16, 256, 128, scale_type="fp32")
    assert torch.equal(load(tensors(parts), LAYER, device="cpu").dequantize(), parts.dequantize_fp64().float())


@pytest.mark.parametrize("name, other, shape, dtype", [
    ("gate_proj", "w1", (), torch.float32), ("down_proj", "w2", (1,), torch.bfloat16),
    ("up_proj", "w3", (1, 1), torch.float32),
])  # fmt: skip
def test_an_expert_s_static_scale_may_stand_under_its_other_name(tmp_path, name, other, shape, dtype):
    expert = "model.layers.3.mlp.experts.7"
    scales = {f"{expert}.w{i}.input_scale": torch.full(shape, i / 8, dtype=dtype) for i in (1, 2, 3)}
    folder = checkpoints.save(tmp_path, tensors(builders.weight_parts(5, 16, 128), f"{expert}.{name}") | scales, CONFIG)
    scale = read_layer(folder, f"{expert}.{name}", device="cpu").input_scale
    assert scale.dtype == torch.float32 and scale.tolist() == [int(other[1]) / 8]


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
    one = tensors(builders.weight_parts(8, 16, 128)) | {f"{LAYER}.input_scale": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="expert: expected tensors with one number of experts as their first size"):
        load(one, LAYER, device="cpu", expert=0)


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
