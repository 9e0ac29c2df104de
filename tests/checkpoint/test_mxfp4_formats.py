"""MXFP4 checkpoints from disk: compressed-tensors', gpt-oss', DeepSeek-V4's, Quark's; bits against the libraries'."""

from __future__ import annotations

import json
from pathlib import Path

import builders
import checkpoints
import mxfp4
import pytest
import torch
from expert_models import IDS, E, alike, build, experts_of, logits

from jitgemm.activations.scheme import Gate
from jitgemm.checkpoint.load import load, read_layer
from jitgemm.nn import W4A8Experts, W4A8Linear, load_

transformers = pytest.importorskip("transformers", minversion="5")

LAYER = "model.layers.0.mlp.down_proj"
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": True}
FORMAT = "mxfp4-pack-quantized"


def config(inputs: dict | None = None, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": FORMAT, "config_groups": {"group_0": group}}


def compressed(parts: mxfp4.Parts, layer: str = LAYER) -> dict[str, torch.Tensor]:
    return {f"{layer}.weight_packed": parts.canonical, f"{layer}.weight_scale": parts.scales}


def gpt_oss(parts: mxfp4.Parts, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a projection of experts."""
    return {f"{name}_blocks": parts.canonical.unflatten(-1, (-1, 16)), f"{name}_scales": parts.scales}


def deepseek_v4(parts: mxfp4.Parts, layer: str = LAYER) -> dict[str, torch.Tensor]:
    scales = parts.scales.view(torch.float8_e8m0fnu)
    return {f"{layer}.weight": parts.canonical.view(torch.int8), f"{layer}.scale": scales}


V4 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "expert_dtype": "fp4",
}
FILES = {
    "compressed-tensors": (compressed, config()),
    "compressed-tensors without a config": (compressed, None),
    "preset": (compressed, config() | {"config_groups": {"MXFP4A16": ["Linear"]}}),
}


@pytest.mark.parametrize("tier", mxfp4.TIERS)
@pytest.mark.parametrize("file", FILES)
def test_every_weight_is_the_specification_s(tmp_path, file, tier):
    tensors, settings = FILES[file]
    parts = mxfp4.parts(1, 72, 416, tier)
    folder = checkpoints.save(tmp_path, tensors(parts), settings)
    assert torch.equal(read_layer(folder, LAYER, device="cpu").dequantize().double(), parts.dequantize_fp64())
    weight = load(folder, LAYER, device="cpu")
    assert weight.format == parts.packed.format and torch.equal(weight.blocks, parts.packed.blocks)


def test_joined_layers_are_packed_in_the_tier_of_all():
    parts = [mxfp4.parts(seed, 64, 416, tier) for seed, tier in enumerate(("row", "block"))]
    tensors = compressed(parts[0], "a.q_proj") | compressed(parts[1], "a.k_proj")
    weight = load(tensors, ["a.q_proj", "a.k_proj"], device="cpu", config=config())
    assert weight.format.group_size == 128
    assert torch.equal(weight.dequantize().double(), torch.cat([each.dequantize_fp64() for each in parts]))


FILE, OTHER = compressed(mxfp4.parts(1, 72, 416)), deepseek_v4(mxfp4.parts(1, 72, 416))


@pytest.mark.parametrize("tensors, settings, message", [
    (FILE, config(group_size=16, strategy="tensor_group"), "as MXFP4 has"),
    (FILE | {f"{LAYER}.weight_scale": torch.ones(72, 13)}, config(), "weight_scale: expected"),
    (FILE | {f"{LAYER}.weight_global_scale": torch.ones(1)}, config(), "weight_global_scale"),
    (OTHER, V4 | {"expert_dtype": "fp8"}, "expert_dtype: expected 'fp4', as the tensors are, got 'fp8'"),
])  # fmt: skip
def test_what_is_not_mxfp4_is_named(tensors, settings, message):
    with pytest.raises(ValueError, match=message):
        load(tensors, LAYER, device="cpu", config=settings)


@pytest.mark.parametrize("version, low", [
    ("0.12.3.a20251214", 2), ("0.13.0", 2), ("0.13.1.a20251215", 2), ("0.13.1.a20260108", 2), ("0.13.1.a20260109", 0),
    ("0.13.1.a20260225", 0), ("0.14.0", 0), ("0.14.0.1", 0), ("0.20.1", 0), (None, 0),
])  # fmt: skip
def test_exponents_that_a_version_stored_two_too_low_are_read_two_higher(version, low):
    parts = mxfp4.parts(3, 72, 416)
    stored = compressed(mxfp4.Parts(parts.codes, parts.scales - low))
    said = config() | {"version": version}
    for settings in (said, said | {"config_groups": {"MXFP4A16": ["Linear"]}}):
        read = read_layer(stored, LAYER, device="cpu", config=settings)
        assert torch.equal(read.dequantize().double(), parts.dequantize_fp64())
    if low:
        stored[f"{LAYER}.weight_scale"][5, 3] = 253
        message = f"weight_scale: expected exponents up to 252 in a file of version {version}, got more"
        with pytest.raises(ValueError, match=message):
            load(stored, LAYER, device="cpu", config=said)


# ---- the libraries' own dequantisation -----------------------------------------------------------------------------


# ---- models from disk ------------------------------------------------------------------------------------------------


def saved(folder: Path, tensors: dict[str, torch.Tensor], settings: dict) -> Path:
    return checkpoints.save(folder, {name: each.detach().clone() for name, each in tensors.items()}, settings, shards=2)


def test_what_a_config_says_of_inputs_is_kept_or_raises():
    parts = mxfp4.parts(1, 160, 64)
    tensors = compressed(parts, "up")

    def loaded(inputs: dict | None, **options) -> W4A8Linear:
        model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 160, bias=False)})
        assert load_(model, tensors, config=config(inputs), **options) == ["up"]
        assert torch.equal(model["up"].weight.dequantize().double(), parts.dequantize_fp64())
        return model["up"]

    assert (loaded(None).activation, loaded(BLOCKS).activation) == ("e4m3", "e4m3_block")
    integers = BLOCKS | {"type": "int", "strategy": "token", "group_size": None}
    with pytest.raises(ValueError, match="expected e4m3 .* as codes of e2m1 are multiplied as floats of 8 bits, got"):
        loaded(integers)
    assert loaded(integers, activation="e4m3").activation == "e4m3"
    with pytest.warns(UserWarning, match="inputs of 4 bits are quantised to 8 bits for each token, e4m3"):
        loaded(WEIGHTS | {"dynamic": True})


def gpt_oss_file(source: torch.nn.Module, tiers: tuple[str, str] = ("row", "block")) -> dict[str, torch.Tensor]:
    """A gpt-oss in its own format, whose experts the model then has in floats."""
    tensors = {}
    for path, module in experts_of(source).items():
        torch.nn.init.normal_(module.gate_up_proj_bias)
        torch.nn.init.normal_(module.down_proj_bias)
        for name, tier in zip(("gate_up_proj", "down_proj"), tiers):
            parameter = getattr(module, name)
            n, k = parameter.shape[2], parameter.shape[1]
            parts = mxfp4.parts(len(tensors), n, k, tier, experts=E, shift=-16)
            parameter.data.copy_(parts.dequantize_fp64().transpose(1, 2))
            tensors |= gpt_oss(parts, f"{path}.{name}")
    stacked = tuple(f"{path}.{name}" for path in experts_of(source) for name in ("gate_up_proj", "down_proj"))
    return tensors | {name: each for name, each in source.state_dict().items() if name not in stacked}


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def oss(seed: int = 0) -> torch.nn.Module:
    return build("gpt-oss", seed=seed, hidden_size=256, intermediate_size=192)


@pytest.fixture(scope="module")
def of_oss(tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """A gpt-oss, and the folder of its own format. Tests only read them."""
    source = oss()
    folder = saved(tmp_path_factory.mktemp("gpt-oss"), gpt_oss_file(source), MXFP4)
    return source, folder


def test_gpt_oss_in_its_own_format(of_oss):
    source, folder = of_oss
    model = oss(1)
    names = load_(model, folder)
    assert names == list(experts_of(source))
    assert names.mxfp4 == dict.fromkeys(names, "with a base for a row and a base for a row and 128 k")
    assert "MXFP4: 2\n  2 with a base for a row and a base for a row and 128 k: model.layers.0" in repr(names)
    assert alike(logits(model).float(), logits(source))
    for name in names:
        layer, expected = model.get_submodule(name), source.get_submodule(name)
        assert isinstance(layer, W4A8Experts) and layer.activation == "e4m3"
        assert layer.gate == Gate("swiglu_oai", "interleaved", 7.0, 1.702)
        assert (layer.w13.weight.format.group_size, layer.w2.weight.format.group_size) == (0, 128)
        for part, parameter in ((layer.w13, expected.gate_up_proj), (layer.w2, expected.down_proj)):
            assert torch.equal(part.weight.dequantize(), parameter.transpose(1, 2))
        assert torch.equal(layer.w13.bias, expected.gate_up_proj_bias)
        assert torch.equal(layer.w2.bias, expected.down_proj_bias)
    again = oss(2)
    load_(again, folder, filter=lambda *_: False)  # in floats
    assert all(torch.equal(mine, its) for mine, its in zip(again.parameters(), source.parameters()))


def test_a_tiny_deepseek_v4(tmp_path):
    """Experts in FP4 under DeepSeek's names, the rest in floats."""
    sizes = dict(
        hidden_size=64, moe_intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=96, head_dim=32,
        n_routed_experts=4, num_local_experts=4, num_experts_per_tok=2, n_shared_experts=1, q_lora_rank=32, o_lora_rank=32,
        o_groups=2, qk_rope_head_dim=16, index_n_heads=2, index_head_dim=32, index_topk=8, num_hash_layers=0, pad_token_id=0,
        max_position_embeddings=64, sliding_window=16, num_nextn_predict_layers=0,
    )  # fmt: skip

    def made(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**sizes)).eval()

    source = made(1)
    stacks = {name: m for name, m in source.named_modules() if getattr(m, "gate_up_proj", None) is not None
              and isinstance(m.gate_up_proj, torch.nn.Parameter)}  # fmt: skip
    assert len(stacks) == 3
    tensors = {}
    for path, module in stacks.items():
        for e in range(4):
            both, down = (
                mxfp4.parts(len(tensors) + i, n, k, shift=-16) for i, (n, k) in enumerate(((192, 64), (64, 96)))
            )
            module.gate_up_proj.data[e], module.down_proj.data[e] = both.dequantize_fp64(), down.dequantize_fp64()
            gate, up = (mxfp4.Parts(both.codes[rows], both.scales[rows]) for rows in (slice(0, 96), slice(96, 192)))
            for name, each in (("w1", gate), ("w3", up), ("w2", down)):
                tensors |= deepseek_v4(each, f"{path}.{e}.{name}".replace("model.", "", 1).replace(".mlp.", ".ffn."))
    tensors |= {n: x for n, x in source.state_dict().items() if not n.startswith(tuple(stacks))}
    model = made(2)
    names = load_(model, saved(tmp_path, tensors, V4))
    assert names == list(stacks)
    for name in names:
        layer, expected = model.get_submodule(name), source.get_submodule(name)
        assert layer.activation == "e4m3_block" and layer.gate.limit == source.config.swiglu_limit
        assert torch.equal(layer.w13.weight.dequantize(), expected.gate_up_proj)
        assert torch.equal(layer.w2.weight.dequantize(), expected.down_proj)
    with torch.inference_mode():
        assert alike(model(**IDS).logits, source(**IDS).logits)


def test_deepseek_v4_1_s_blocks_of_32_are_read_and_expert_dtype_may_stand_at_the_config_s_top(tmp_path):
    g = builders.generator(1)
    weight = torch.randn(96, 256, generator=g).to(torch.float8_e4m3fn)
    scale = torch.randint(117, 127, (3, 8), generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    parts = mxfp4.parts(1, 64, 256)
    tensors = {"layers.0.attn.wq_a.weight": weight, "layers.0.attn.wq_a.scale": scale}
    tensors |= deepseek_v4(parts, "layers.0.ffn.experts.0.w1")
    settings = {name: value for name, value in V4.items() if name != "expert_dtype"} | {"weight_block_size": [32, 32]}
    folder = checkpoints.save(tmp_path, tensors)
    (folder / "config.json").write_text(json.dumps({"expert_dtype": "fp4", "quantization_config": settings}))
    expected = weight.double() * scale.double().repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(load(folder, "layers.0.attn.wq_a", device="cpu").dequantize().double(), expected)
    found = load(folder, "layers.0.ffn.experts.0.w1", device="cpu")
    assert torch.equal(found.dequantize().double(), parts.dequantize_fp64())
