"""MXFP4 in vLLM under the names of DeepSeek-V4, Quark and ModelOpt: layers of every rank against the specification."""

from __future__ import annotations

import gpt_oss_experts
import mxfp4
import pytest
import torch
from vllm_cases import SHARDS, applied, dense_of, gate_up, load, load_experts, made, process, told
from vllm_cases import vllm_is_there as vllm_is_there
from vllm_layers import experts, rank
from vllm_mxfp4_cases import AUTOROUND, QUARK, with_headers

from jitgemm.activations.scheme import Gate
from jitgemm.serving.stored import Unsupported

V4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
"""DeepSeek-V4's config: of its FP8 layers; expert_dtype stands elsewhere in config.json."""
MIXED = {
    "quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
    "layer_quant_config": {"m.*": QUARK["global_quant_config"]},
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def bytes_of(parts: mxfp4.Parts, config: dict) -> dict[str, torch.Tensor]:
    """As the files have them; vLLM's model calls DeepSeek-V4's `scale` weight_scale."""
    if config is V4:
        return {"weight": parts.canonical.view(torch.int8), "weight_scale": parts.scales.view(torch.float8_e8m0fnu)}
    if config is AUTOROUND:
        return {"weight_packed": parts.canonical, "weight_scale": parts.scales}
    return {"weight": parts.canonical, "weight_scale": parts.scales}


@pytest.mark.parametrize(
    "config", [V4, QUARK, MIXED, AUTOROUND, MODELOPT], ids=["deepseek-v4", "quark", "mixed", "auto-round", "modelopt"]
)
@pytest.mark.parametrize("split", ["whole", "tp", "ep"])
def test_experts_hold_the_files_weights(tmp_path, config, split):
    count, hidden, inter = 4, 128, 192
    parts, tensors = {}, {}
    for e in range(count):
        for i, proj in enumerate(SHARDS):
            n, k = (hidden, inter) if proj == "down_proj" else (inter, hidden)
            parts[e, proj] = mxfp4.parts(3 * e + i, n, k, shift=-12)
            tensors[e, proj] = bytes_of(parts[e, proj], config)
    names = {f"m.experts.{e}.{proj}": each for (e, proj), each in tensors.items()}
    own = with_headers(tmp_path, config, names)
    found = []
    for place in [(0, 1)] if split == "whole" else [(0, 2), (1, 2)]:
        with rank():
            layer = experts(own, "m.experts", (count, hidden, inter), 2, **({} if split == "whole" else {split: place}))
            load_experts(layer, "m.experts", tensors)
            module = process(layer)
        assert module.activation == ("e4m3_block" if config is V4 else "e4m3")
        assert module.w13.weight.format.powers and not list(layer.parameters())
        found.append([part.weight.dequantize().double() for part in (module.w13, module.w2)])
    expected = [[parts[e, proj].dequantize_fp64() for e in range(count)] for proj in SHARDS]
    gate, up, down = (torch.stack(each) for each in expected)
    first, second = zip(*found)
    if split == "tp":
        halves = [torch.cat([each.chunk(2, 1)[half] for each in first], 1) for half in (0, 1)]
        assert torch.equal(halves[0], gate) and torch.equal(halves[1], up) and torch.equal(torch.cat(second, 2), down)
    else:
        assert torch.equal(torch.cat(first), torch.cat((gate, up), 1)) and torch.equal(torch.cat(second), down)


@pytest.mark.parametrize(
    "config", [QUARK, MIXED, AUTOROUND, MODELOPT], ids=["quark", "mixed", "auto-round", "modelopt"]
)
@pytest.mark.parametrize("known", [True, False], ids=["with headers", "without"])
def test_joined_linears_hold_the_files_weights(tmp_path, config, known):
    parts = [mxfp4.parts(seed, 64, 128, shift=-12) for seed in (1, 2)]
    tensors = [bytes_of(each, config) for each in parts]
    if config is MODELOPT:
        tensors = [each | {"input_scale": torch.tensor(scale)} for each, scale in zip(tensors, (0.02, 0.05))]
    names = ("m.gate_proj", "m.up_proj")
    own = with_headers(tmp_path, config, dict(zip(names, tensors))) if known else made(config)
    with rank():
        layer = gate_up(own, 128, 64)
        for part, each in enumerate(tensors):
            load(layer, each, part)
        module = process(layer)
    assert torch.equal(dense_of(module), torch.cat([each.dequantize_fp64() for each in parts]))
    scale = None if module.input_scale is None else float(module.input_scale)
    assert scale == (pytest.approx(0.05) if config is MODELOPT else None)


@pytest.mark.parametrize("method", ["fp8", "deepseek_v4_fp8"])
def test_deepseek_v4_s_other_layers_are_fp8(tmp_path, method):
    """By the name in the files, and by the one that vLLM puts there for this model."""
    weight, scale = torch.randn(128, 128).to(torch.float8_e4m3fn), torch.full((1, 1), 0.25)
    names = ("m.gate_proj", "m.up_proj")
    tensors = {"weight": weight, "weight_scale_inv": scale}
    own = with_headers(tmp_path, V4 | {"quant_method": method}, dict.fromkeys(names, tensors))
    with rank():
        layer = gate_up(own, 128, 128)
        for part in (0, 1):
            load(layer, tensors, part)
        module = process(layer)
    assert torch.equal(dense_of(module), torch.cat([weight.double() / 4] * 2)) and module.activation == "e4m3_block"


def test_quark_s_other_types_are_left_to_vllm():
    config = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e3m2"}}}
    tensors = {"weight": torch.zeros(64, 96, dtype=torch.uint8), "weight_scale": torch.zeros(64, 4, dtype=torch.uint8)}
    with pytest.raises(Unsupported, match="format: layer 'm.up_proj' is of no format known here"):
        told(config, {"m.up_proj": tensors}).stored(["m.up_proj"])


GPT_OSS = {
    "quant_method": "gpt_oss_mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
}


@pytest.mark.parametrize("split", ["whole", "tp", "ep"])
def test_gpt_oss_in_its_own_format(split):
    whole, (x, ids, weights), found = gpt_oss_experts.Layer(), gpt_oss_experts.tokens(), []
    sizes, total = (gpt_oss_experts.COUNT, gpt_oss_experts.HIDDEN, gpt_oss_experts.INTER), 0
    for place in [(0, 1)] if split == "whole" else [(0, 2), (1, 2)]:
        options = {} if split == "whole" else {split: place}
        with rank():
            layer = experts(made(GPT_OSS), "m.experts", sizes, 2, activation="swigluoai", has_bias=True, **options)
            whole.load(layer, *place, split == "ep")
            module = process(layer)
        assert module.gate == Gate("swiglu_oai", "interleaved", 7.0, 1.702) and module.activation == "e4m3"
        assert not list(layer.parameters())
        found.append(module)
        total += applied(layer, x, ids, weights).double()
    whole.check(found, split == "ep")
    expected = whole.by_hand(x, ids, weights)
    assert (total - expected).norm() < 0.06 * expected.norm()


def test_gpt_oss_s_missing_bias_is_named():
    with rank():
        layer = experts(made(GPT_OSS), "m.experts", (2, 64, 64), 2, activation="swigluoai", has_bias=True)
        params = dict(layer.named_parameters())
        parts = mxfp4.parts(1, 128, 64, experts=2)
        for name, each in (("w13_weight", parts.canonical), ("w13_weight_scale", parts.scales)):
            params[name].weight_loader(params[name], each, weight_name=name, shard_id=None, expert_id=None)
        with pytest.raises(ValueError, match="w13_bias: expected numbers for each of this rank's 2 experts"):
            layer.quant_method.process_weights_after_loading(layer)


def test_gpt_oss_s_experts_of_other_sizes_are_named():
    whole = gpt_oss_experts.Layer(inter=128)
    sizes = gpt_oss_experts.COUNT, gpt_oss_experts.HIDDEN, gpt_oss_experts.INTER
    with rank():
        layer = experts(made(GPT_OSS), "m.experts", sizes, 2, activation="swigluoai", has_bias=True)
        whole.load(layer, 0, 1, False)
        with pytest.raises(ValueError, match=r"w13_weight: expected n, k = \(384, 128\), got \(256, 128\)"):
            process(layer)
