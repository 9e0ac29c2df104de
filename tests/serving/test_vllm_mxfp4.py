"""MXFP4 in vLLM under the names of DeepSeek-V4, Quark and ModelOpt: layers of every rank against the specification."""

from __future__ import annotations

from types import SimpleNamespace

import mxfp4
import pytest
import torch
from safetensors.torch import save_file
from moe_cases import activated
from test_vllm import SHARDS, applied, dense_of, gate_up, load, load_experts, made, process
from test_vllm import vllm_is_there as vllm_is_there
from vllm_layers import experts, rank

from jitgemm.activations.scheme import Gate
from jitgemm.vllm.config import JitGemmConfig

V4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
"""DeepSeek-V4's config: of its FP8 layers; expert_dtype stands elsewhere in config.json."""
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def bytes_of(parts: mxfp4.Parts, config: dict) -> dict[str, torch.Tensor]:
    """As the files have them; vLLM's model calls DeepSeek-V4's `scale` weight_scale."""
    if config is V4:
        return {"weight": parts.canonical.view(torch.int8), "weight_scale": parts.scales.view(torch.float8_e8m0fnu)}
    return {"weight": parts.canonical, "weight_scale": parts.scales}


def with_headers(folder, config: dict, layers: dict[str, dict[str, torch.Tensor]]) -> JitGemmConfig:
    """The config of a folder whose file has these layers."""
    tensors = {f"{name}.{suffix}": each.clone() for name, parts in layers.items() for suffix, each in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    found = made(config)
    found.maybe_update_config(str(folder), hf_config=SimpleNamespace())
    return found


@pytest.mark.parametrize("config", [V4, QUARK, MODELOPT], ids=["deepseek-v4", "quark", "modelopt"])
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


@pytest.mark.parametrize("config", [QUARK, MODELOPT], ids=["quark", "modelopt"])
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
    from jitgemm.serving.layouts import Unsupported, layout_of

    config = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}
    with pytest.raises(Unsupported, match="global_quant_config: expected weights of dtype 'fp4', got 'fp8_e4m3'"):
        layout_of(config, "m.up_proj", 128, torch.bfloat16, {})


GPT_OSS = {
    "quant_method": "gpt_oss_mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
}


def of_rank(
    split: str, place: tuple[int, int], inter: int, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What vLLM's model cuts for a rank of the files' tensors, under its own names."""
    number, size = place
    if split == "ep":
        return {name: each.chunk(size)[number] for name, each in tensors.items()}
    first, last = inter * number // size, inter * (number + 1) // size
    found = {}
    for name, each in tensors.items():
        if name.startswith("w13"):
            found[name] = each[:, 2 * first : 2 * last]
        elif name == "w2_bias":
            found[name] = each if number == 0 else torch.zeros_like(each)
        else:
            per = 2 if name == "w2_weight" else 32
            found[name] = each[..., first // per : last // per]
    return found


@pytest.mark.parametrize("split", ["whole", "tp", "ep"])
def test_gpt_oss_in_its_own_format(split):
    count, hidden, inter = 4, 128, 192
    w13, w2 = (
        mxfp4.parts(i, n, k, experts=count, shift=-14)
        for i, (n, k) in enumerate(((2 * inter, hidden), (hidden, inter)))
    )
    tensors = {"w13_weight": w13.canonical, "w13_weight_scale": w13.scales, "w13_bias": torch.randn(count, 2 * inter).bfloat16(),
               "w2_weight": w2.canonical, "w2_weight_scale": w2.scales, "w2_bias": torch.randn(count, hidden).bfloat16()}  # fmt: skip
    x, ids, weights = (
        torch.randn(6, hidden).bfloat16(),
        torch.stack([torch.randperm(count)[:2] for _ in range(6)]).int(),
        torch.rand(6, 2),
    )
    total, found = torch.zeros(6, hidden, dtype=torch.float64), []
    for place in [(0, 1)] if split == "whole" else [(0, 2), (1, 2)]:
        options = {} if split == "whole" else {split: place}
        with rank():
            layer = experts(
                made(GPT_OSS), "m.experts", (count, hidden, inter), 2, activation="swigluoai", has_bias=True, **options
            )
            params = dict(layer.named_parameters())
            for name, each in of_rank(split, place, inter, tensors).items():
                params[name].weight_loader(params[name], each, weight_name=name, shard_id=None, expert_id=None)
            module = process(layer)
        assert module.gate == Gate("swiglu_oai", "interleaved", 7.0, 1.702) and module.activation == "e4m3"
        assert not list(layer.parameters())
        found.append(module)
        total += applied(layer, x, ids, weights).double()
    first, second = (
        [part.weight.dequantize().double() for part in each] for each in zip(*((m.w13, m.w2) for m in found))
    )
    dims = (1, 2) if split == "tp" else (0, 0)
    assert torch.equal(torch.cat(first, dims[0]), w13.dequantize_fp64())
    assert torch.equal(torch.cat(second, dims[1]), w2.dequantize_fp64())
    assert torch.equal(torch.cat([m.w13.bias for m in found], dims[0]), tensors["w13_bias"])
    options = {"activation": "swiglu_oai", "order": "interleaved", "limit": 7.0}
    expected = torch.zeros_like(total)
    for t in range(len(x)):
        for e, weight in zip(ids[t].tolist(), weights[t].double()):
            hidden_values = w13.dequantize_fp64()[e] @ x[t].double() + tensors["w13_bias"][e].double()
            result = w2.dequantize_fp64()[e] @ activated(hidden_values, options) + tensors["w2_bias"][e].double()
            expected[t] += weight * result
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
        with pytest.raises(ValueError, match=r"w13_weight: expected shape \[2, 128, 32\], got \[2, 64, 32\]"):
            params["w13_weight"].weight_loader(
                params["w13_weight"], parts.canonical[:, :64], weight_name="w13_weight", shard_id=None, expert_id=None
            )
