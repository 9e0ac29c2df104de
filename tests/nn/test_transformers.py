"""quantize_ and load_ on models of transformers, tiny and on the CPU: they run, and files go there and back."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path

import checkpoints
import files_gptq
import model_folders as folders
import pytest
import torch
from safetensors.torch import load_file
from small_models import checkpoint_tensors, quantised_names, same_state, stored
from small_models import config as stored_config
from stored_weights import COMPRESSED, compressed, rounded

import jitgemm.nn
from jitgemm.cli import main
from jitgemm.nn import W4A8Linear, load_

transformers = pytest.importorskip("transformers")
quantize = functools.partial(jitgemm.nn.quantize_, clip_steps=0)

SIZES = folders.SIZES | {"num_hidden_layers": 1, "vocab_size": 96, "pad_token_id": 0}
MOE = folders.MOE | SIZES | {"num_local_experts": 8, "num_experts": 8}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 96, "state_size": 16, "time_step_rank": 32}
JAMBA = {"num_hidden_layers": 2, "mamba_dt_rank": 32, "attn_layer_period": 2, "attn_layer_offset": 1}
JAMBA |= {"use_mamba_kernels": False}  # which transformers 4 asks for on a CPU
JAMBA |= {"expert_layer_period": 2, "expert_layer_offset": 1}
BLOOM = {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 96}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
SIGLIP = VISION | {"patch_size": 8, "num_patches": 16}
WAVLM = VISION | {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
WAVLM |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
MOBILE_BERT = {"vocab_size": 96, "hidden_size": 64, "embedding_size": 32, "num_hidden_layers": 1}
MOBILE_BERT |= {"intermediate_size": 64, "true_hidden_size": 32, "intra_bottleneck_size": 32}
TOKENS = {"input_ids": torch.arange(12)[None]}
MODELS = {
    "llama": ("Llama", SIZES, []),
    "llama4": ("Llama4", MOE | {"intermediate_size_mlp": 96, "head_dim": 16}, ["router"]),
    "phimoe": ("Phimoe", MOE, ["router"]),
    "mixtral": ("Mixtral", MOE, ["gate"]),
    "qwen3-moe": ("Qwen3Moe", MOE, ["gate"]),
    "qwen2-moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 64}, ["gate", "shared_expert_gate"]),
    "jamba": ("Jamba", MOE | JAMBA, ["router", "dt_proj"]),
    "mamba": ("Mamba", MAMBA, ["dt_proj"]),
    "falcon-mamba": ("FalconMamba", MAMBA, ["dt_proj"]),
    "bloom": ("Bloom", BLOOM, []),
    "slow bloom": ("Bloom", BLOOM | {"slow_but_exact": True, "pretraining_tp": 2}, ["dense", "dense_4h_to_h"]),
    "mobilebert": ("MobileBert ForMaskedLM", MOBILE_BERT, ["predictions.dense"]),
    "wavlm": ("WavLM Model", WAVLM, ["q_proj", "k_proj", "v_proj", "out_proj"]),
    "siglip2": ("Siglip2Vision Model", SIGLIP, []),  # reads patch_embedding.weight.dtype
}
INPUTS = {
    "wavlm": {"input_values": torch.sin(torch.arange(800.0))[None]},
    "siglip2": {
        "pixel_values": torch.ones(1, 16, 192),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[4, 4]]),
    },
}


@pytest.fixture(autouse=True)
def quiet(quiet_transformers):
    """Nor what quantize_ says of stacked experts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*stacked experts")
        yield


def build(kind: str, sizes: dict, seed: int = 0) -> torch.nn.Module:
    """A model of transformers, "Llama" for LlamaForCausalLM, "Llama Model" for LlamaModel."""
    kind, _, of = kind.partition(" ")
    model, config = kind + (of or "ForCausalLM"), "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config"
    if not hasattr(transformers, model):
        pytest.skip(f"this transformers has no {model}")
    torch.manual_seed(seed)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()


def llama(**sizes) -> torch.nn.Module:
    return build("Llama", SIZES | sizes)


def logits(model: torch.nn.Module, inputs: dict = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_model_runs(name):
    kind, sizes, kept = MODELS[name]
    model = build(kind, sizes)
    inputs = INPUTS.get(name, TOKENS)
    exact = logits(model, inputs)
    report = quantize(model)
    assert report == quantised_names(model) and len(report) > 1
    assert not any(each.endswith(tuple("." + end for end in (*kept, "lm_head"))) for each in report)
    error = float((logits(model, inputs) - exact).norm() / exact.norm())
    assert 0 < error < 0.35


def test_experts_that_take_no_routing_are_reported():
    report = quantize(build(*MODELS["llama4"][:2]))
    stacked = {name: reason for name, reason in report.skipped.items() if "stacked experts" in reason}
    assert list(stacked) == [f"model.layers.0.feed_forward.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert all("another kind than transformers'" in reason for reason in stacked.values())


def file_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors, those of its decoder layers' Linears quantised, each with storage of its own."""
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return checkpoint_tensors(model, *(name for name in linears if "layers" in name))[0]


def saved_with(model: torch.nn.Module, folder: Path, layer: str, name: str | None = None) -> dict[str, torch.Tensor]:
    """What save_pretrained writes, one layer of it quantised, which the file may call by another name."""
    model.save_pretrained(folder)
    tensors, name = load_file(folder / "model.safetensors"), name or layer
    parts, dense = stored(tensors.pop(f"{name}.weight"))
    model.get_submodule(layer).weight.data.copy_(dense)
    return tensors | {f"{name}.{suffix}": value for suffix, value in parts.items()}


def test_a_quantised_head_of_a_tied_model_goes_to_a_file_and_back(tmp_path):
    model = llama(tie_word_embeddings=True)
    quantize(model, lambda name, linear: True)
    expected = logits(model)
    model.tie_weights()
    other = llama(tie_word_embeddings=True)
    load_(other, {name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert isinstance(other.lm_head, W4A8Linear) and torch.equal(logits(other), expected)
    model.save_pretrained(tmp_path)
    third = llama(tie_word_embeddings=True)
    load_(third, tmp_path)
    assert same_state(third, model) and torch.equal(logits(third), expected)
    with pytest.raises(AttributeError, match=r"lm_head: expected a tensor for \.size"):
        model.resize_token_embeddings(128)


def test_what_was_saved_of_a_quantised_model_names_jitgemm_and_is_read_by_it(tmp_path):
    pytest.importorskip("jitgemm.hf")
    model = llama()
    quantize(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == {"quant_method": "jitgemm"}
    assert same_state(transformers.LlamaForCausalLM.from_pretrained(tmp_path), model)
    again = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    load_(again, tmp_path)
    assert torch.equal(logits(again.eval()), logits(model))


def test_a_model_within_another_module_is_described_too():
    model = llama()
    model.config.quantization_config = {"quant_method": "gptq"}  # of the file that it was made for
    quantize(torch.nn.ModuleDict({"inner": model}))
    assert model.config.quantization_config == model.model.config.quantization_config == {"quant_method": "jitgemm"}


def test_a_model_without_data_but_for_its_buffers_is_filled():
    accelerate = pytest.importorskip("accelerate")
    tensors = file_of(llama())
    with accelerate.init_empty_weights():
        empty = llama()
    full = llama()
    for model in (empty, full):
        load_(model, tensors, config=stored_config(), device="cpu")
    assert torch.equal(logits(empty), logits(full))
    with torch.device("meta"):
        nothing = llama()
    with pytest.raises(ValueError, match="left on the meta device, got model.rotary_emb.inv_freq.*init_empty_weights"):
        load_(nothing, tensors, config=stored_config(), device="cpu")
    assert quantised_names(nothing) == []


ROUTED = SIZES | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
MIMO = ROUTED | {"v_head_dim": 16, "layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]}
DEEPSEEK_V4 = ROUTED | {"q_lora_rank": 32, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 32}
DEEPSEEK_V4 |= {"num_key_value_heads": 1, "index_n_heads": 2, "index_head_dim": 32, "mlp_layer_types": ["moe"]}
DEEPSEEK_V4 |= {"layer_types": ["heavily_compressed_attention"]}


@pytest.mark.parametrize("kind, sizes, head", [("MiMoV2Flash", MIMO, "lm_head"), ("DeepseekV4", DEEPSEEK_V4, "head")])
def test_names_that_transformers_changes_within_a_module_are_found(tmp_path, kind, sizes, head):
    """MiMo's file has self_attn.attention_sink_bias, of the model's self_attn.sinks; DeepSeek's head is quantised."""
    model, other = (build(kind, sizes) for _ in range(2))
    for parameter in other.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    tensors = saved_with(model, tmp_path, "lm_head", head)
    assert load_(other, tensors, config=stored_config()) == ["lm_head"]
    assert torch.equal(other.lm_head.weight.dequantize(), model.lm_head.weight)
    found = other.state_dict()
    assert all(torch.equal(found[name], x) for name, x in model.state_dict().items() if name != "lm_head.weight")


@pytest.mark.parametrize("saved", [False, True], ids=["compressed-tensors", "jitgemm"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_a_base_model_takes_a_whole_models_file_and_back(kind, saved):
    """transformers adds `base_model_prefix` to names, or takes it away, and drops the head."""
    sizes = (MOE if kind == "Qwen3Moe" else SIZES) | {"tie_word_embeddings": True}
    source = build(kind, sizes)
    if saved:
        quantize(source)
        tensors = source.state_dict()
    else:
        tensors = file_of(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    whole, base = build(kind, sizes), build(f"{kind} Model", sizes)
    names = load_(whole, tensors, config=stored_config())
    report = load_(base, tensors, config=stored_config())
    assert names and list(names) == [f"model.{name}" for name in report]
    assert report.ignored == {"lm_head.weight": f"of a head, which {kind}Model does not have"}
    assert same_state(base, whole.model)
    bare = {name.removeprefix("model."): x for name, x in tensors.items() if "lm_head" not in name}
    again = build(kind, sizes)
    assert load_(again, bare, config=stored_config()) == names and same_state(again, whole)
    with pytest.raises(ValueError, match="found no place for model.surplus"):
        load_(base, tensors | {"model.surplus": torch.zeros(1)}, config=stored_config())
    with pytest.raises(ValueError, match="found no place for surplus"):
        load_(again, bare | {"surplus": torch.zeros(1)}, config=stored_config())


def test_a_classifier_ignores_the_head_of_a_whole_model_and_misses_its_own():
    tensors = file_of(llama(tie_word_embeddings=False))
    model = build("Llama ForSequenceClassification", SIZES)
    with pytest.raises(ValueError, match="found none for score.weight"):
        load_(model, tensors, config=stored_config())
    with pytest.warns(UserWarning, match="keep what the model holds.*score.weight"):
        report = load_(model, tensors, config=stored_config(), allow_missing=["score.weight"])
    assert list(report.ignored) == ["lm_head.weight"] and list(report.kept) == ["score.weight"]


@pytest.mark.parametrize("tool", ["gptq", "compressed-tensors"])
def test_gpt2s_conv1d_gets_the_weight_in_its_own_order(tool):
    """[k, n]. GPTQ's tools put a Linear in its place; compressed-tensors keeps the parameter as it lies, square too."""
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 96, "n_positions": 32}
    source, model = (build("GPT2 LMHeadModel", sizes) for _ in range(2))
    tensors = {name: tensor.clone() for name, tensor in source.state_dict().items() if name != "lm_head.weight"}
    for name, module in source.named_modules():
        if type(module).__name__ != "Conv1D":
            continue
        torch.nn.init.normal_(module.weight)
        if tool == "gptq":
            layer = rounded(module.weight.T)
            parts, module.weight.data = files_gptq.packed(layer, minus_one=True), layer.weight.float().T
        else:
            parts, module.weight.data = stored(module.weight.detach())
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in parts.items()}
    said = files_gptq.V1 | {"group_size": 32} if tool == "gptq" else stored_config()
    with pytest.warns(UserWarning, match="Conv1D, which is no torch.nn.Linear"):
        report = load_(model, tensors, config=said)
    assert len(report.skipped) == 4 and set(report.skipped.values()) == {
        "dequantised: Conv1D, which is no torch.nn.Linear"
    }
    assert same_state(model, source)


MARIAN = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (
    ("layers", 1), ("ffn_dim", 96), ("attention_heads", 4),
)}  # fmt: skip
MARIAN |= {"vocab_size": 96, "d_model": 64, "max_position_embeddings": 64, "pad_token_id": 0}
MARIAN |= {"decoder_start_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def test_positions_that_no_file_holds_are_computed(tmp_path):
    hf = pytest.importorskip("jitgemm.hf")
    source, model = (build("Marian MTModel", MARIAN) for _ in range(2))
    name = "model.encoder.layers.0.fc1"
    tensors = saved_with(source, tmp_path, name)
    assert not any("embed_positions" in name for name in tensors)
    checkpoints.save(tmp_path, tensors)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text | {"quantization_config": stored_config()}))

    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    assert load_(model, tmp_path) == [name]
    other = transformers.MarianMTModel.from_pretrained(tmp_path, config=hf.config(str(tmp_path)), dtype=torch.float32)
    for found in (model.state_dict(), other.state_dict()):
        assert all(torch.equal(found[each], x) for each, x in source.state_dict().items() if each in found)
        assert "model.decoder.embed_positions.weight" in found
    model._keys_to_ignore_on_save = None  # what may be missing, and is saved, is missed
    with pytest.raises(ValueError, match="found none for model.encoder.embed_positions.weight"):
        load_(model, tmp_path)


@pytest.fixture
def by_rules(monkeypatch):
    """by_rules((names in the file, names in the model, operation), ...): how transformers makes the model's tensors."""
    pytest.importorskip("transformers", minversion="5")  # 4 joins and cuts none
    from transformers import conversion_mapping as mapping
    from transformers import core_model_loading as loading

    def given(*rules: tuple[list[str], list[str], str]) -> None:
        if not all(hasattr(loading, kind) for *_, kind in rules):
            pytest.skip("needs transformers that splits rows into parts of several sizes")
        made = [loading.WeightConverter(*names, operations=[getattr(loading, kind)(dim=0)]) for *names, kind in rules]
        monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda *_, **__: made)

    return given


JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_layers_that_transformers_joins_or_cuts_are_read(by_rules, cut, packed):
    """Phi-3 has q, k and v in one Linear, gate and up in another; Llama has them apart."""
    phi, llama_ = build("Phi3", SIZES), llama()
    source, model = (phi, llama_) if cut else (llama_, phi)
    rules = []
    for whole, parts in JOINED.items():
        each, one = [f"{part}.weight" for part in parts], [f"{whole}.weight"]
        kind = "Split" if whole == "qkv_proj" else "Chunk"
        rules.append((one, each, kind) if cut else (each, one, "Concatenate"))
    by_rules(*rules)
    tensors, dense = {}, {}
    for name, tensor in source.state_dict().items():
        layer = name.removesuffix(".weight")
        if "_proj" in name:
            codes = rounded(tensor)
            parts, weight = (compressed(codes), codes.weight.float()) if packed else stored(tensor)
            dense[layer.rpartition(".")[2], layer.rpartition(".")[0]] = weight
            tensors |= {f"{layer}.{suffix}": value for suffix, value in parts.items()}
        else:
            tensors[name] = tensor.clone()
    for _ in range(2):  # over the packed layers, too
        report = load_(model, tensors, config=COMPRESSED if packed else stored_config())
        assert len(report) == len([m for m in model.modules() if isinstance(m, W4A8Linear)]) == (7 if cut else 4)
    for (name, parent), weight in dense.items():
        module = model.get_submodule(parent)
        parts = JOINED.get(name, (name,)) if cut else [next((w for w, p in JOINED.items() if name in p), name)]
        found = torch.cat([getattr(module, part).weight.dequantize() for part in parts])
        start = 0
        if not cut and name in sum(JOINED.values(), ()):
            ahead = JOINED[parts[0]][: JOINED[parts[0]].index(name)]
            start = sum(len(dense[each, parent]) for each in ahead)
        assert torch.equal(found[start : start + len(weight)], weight)


GATE_UP = ["gate_proj.weight", "up_proj.weight"], ["gate_up_proj.weight"]


def test_layers_that_are_joined_have_one_scheme_of_activations(by_rules):
    by_rules((*GATE_UP, "Concatenate"))
    model, mlp = build("Phi3", SIZES), "model.layers.0.mlp"
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if "gate_up" not in name}
    for name in ("gate_proj", "up_proj"):
        parts, _ = stored(torch.randn(SIZES["intermediate_size"], SIZES["hidden_size"]))
        tensors |= {f"{mlp}.{name}.{suffix}": value for suffix, value in parts.items()}
    config = stored_config()
    group = config["config_groups"]["group_0"]
    inputs = group["input_activations"] | {"type": "int"}
    config["config_groups"]["group_1"] = group | {"targets": ["re:.*up_proj"], "input_activations": inputs}
    expected = f"expected one scheme of '{mlp}.gate_proj' and '{mlp}.up_proj', whose rows are joined"
    with pytest.raises(ValueError, match=expected):
        load_(model, tensors, config=config)
    inputs["type"] = "float"
    assert load_(model, tensors, config=config) == [f"{mlp}.gate_up_proj"]


@pytest.mark.parametrize("n", [128, 96])
@pytest.mark.parametrize("cut", [False, True])
def test_layers_in_blocks_are_joined_and_cut_between_blocks(by_rules, cut, n):
    """The scale of a block that holds rows of both parts is of neither."""
    by_rules((*reversed(GATE_UP), "Chunk") if cut else (*GATE_UP, "Concatenate"))
    kinds = ("Llama", "Phi3") if cut else ("Phi3", "Llama")
    model, source = (build(kind, SIZES | {"intermediate_size": n}) for kind in kinds)
    mlp = "model.layers.0.mlp"
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if "gate" not in name}
    tensors.pop(f"{mlp}.up_proj.weight", None)
    dense = []
    for name, tensor in source.state_dict().items():
        if mlp in name and "down" not in name:
            scale = torch.rand(-(-len(tensor) // 128), 1) + 0.5
            tensors |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
            dense.append(tensors[name].float() * scale.repeat_interleave(128, 0)[: len(tensor)])
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if n == 96:
        with pytest.raises(ValueError, match=f"found none for {mlp}.gate_.*found no place for {mlp}.gate_"):
            load_(model, tensors, config=config)
        return
    names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"] if cut else [f"{mlp}.gate_up_proj"]
    assert load_(model, tensors, config=config) == names
    found = [model.get_submodule(name).weight.dequantize() for name in names]
    assert torch.equal(torch.cat(found), torch.cat(dense))


def test_convolutions_that_transformers_joins_are_read(tmp_path):
    sizes = SIZES | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    sizes |= {"linear_value_head_dim": 16, "num_hidden_layers": 2}
    sizes |= {"layer_types": ["linear_attention", "full_attention"]}
    source, model = (build("OlmoHybrid", sizes) for _ in range(2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    name = "model.layers.1.mlp.down_proj"
    tensors = saved_with(source, tmp_path, name)
    assert any("q_conv1d" in each for each in tensors) and load_(model, tensors, config=stored_config()) == [name]
    found = model.state_dict()
    assert all(torch.equal(found[each], x) for each, x in source.state_dict().items() if each in found)


OF_THE_WEIGHTS, CALIBRATED = ["--data", "none"], ["--tokens", "512"]
EIGHT, SOME, INT8 = ["--keep-8bit", "1e-7"], ["--keep-8bit", "1e-3"], ["--activation", "int8"]
READ = {
    ("Llama", *OF_THE_WEIGHTS, "--group-size", "32"): ("exact", "exact"),
    ("Llama", *OF_THE_WEIGHTS): ("error", "exact"),
    ("Llama", *OF_THE_WEIGHTS, "--scheme", "mxfp4"): ("exact", "exact"),
    ("Llama", *CALIBRATED, *EIGHT): ("rounded", "exact"),
    ("Llama", *CALIBRATED, *EIGHT, *INT8): ("rounded", "exact"),
    ("Llama", *CALIBRATED, *SOME): ("rounded", "error"),
    ("Qwen3Moe", *CALIBRATED): ("exact", "exact"),
    ("Qwen3Moe", *OF_THE_WEIGHTS): ("error", "error"),
    ("Qwen3Moe", *OF_THE_WEIGHTS, "--scheme", "mxfp4"): ("exact", "exact"),
    ("Qwen3Moe", *CALIBRATED, *EIGHT): ("rounded", "exact"),
    ("Qwen3Moe", *CALIBRATED, *EIGHT, *INT8): ("error", "error"),
    ("Qwen3Moe", *CALIBRATED, *SOME): ("error", "error"),
}
"""{model and options of `jitgemm quantize`: what transformers' own reader makes of OUT, by default and dequantised}:
the table of docs/quantize.md."""


def written(tmp_path: Path, monkeypatch, kind: str, sizes: dict, *options: str) -> Path:
    """What `jitgemm quantize` makes of a model."""
    folder, out = folders.folder_of(tmp_path / "model", folders.model_of(kind, **sizes)), tmp_path / "out"
    monkeypatch.setattr("jitgemm.nn.quantize.evaluate.help_texts", folders.short_texts)
    with pytest.raises(SystemExit) as exit:
        main(["quantize", "--device", "cpu", str(folder), str(out), *options])
    assert not exit.value.code
    return out


@pytest.mark.parametrize("case", READ, ids=" ".join)
def test_transformers_own_reader_reads_what_the_command_writes(tmp_path, monkeypatch, quiet_transformers, case):
    """Every weight bit for bit, or within the rounding of scales to bf16, or an error, which later versions may
    mend."""
    pytest.importorskip("compressed_tensors", minversion="0.20.1")
    pytest.importorskip("transformers", minversion="5.23")
    kind, *options = case
    sizes = {"Llama": folders.SIZES, "Qwen3Moe": folders.MOE}[kind] | {"num_hidden_layers": 1}
    out = written(tmp_path, monkeypatch, kind, sizes, *options)
    dense = folders.emptied(out)
    with pytest.warns(UserWarning, match="left out by the filter"):
        load_(dense, out, filter=lambda name, module: False)
    expected = dict(dense.named_parameters())
    for dequantize, promised in zip((False, True), READ[case]):
        how = transformers.CompressedTensorsConfig(dequantize=dequantize)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                out, dtype=torch.bfloat16, **({"quantization_config": how} if dequantize else {})
            )
            folders.logits(model)  # which decompresses
        except (AttributeError, RuntimeError):
            assert promised == "error"
            continue
        found = dict(model.named_parameters())
        for name, tensor in expected.items():
            if promised == "exact" or name.endswith(("norm.weight", "lm_head.weight", "embed_tokens.weight")):
                assert torch.equal(found[name], tensor), name
            else:
                torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=0)


def test_transformers_warns_that_it_does_not_know_two_levels(tmp_path, monkeypatch, quiet_transformers):
    """No setting of config.json makes it raise: it skips what it does not know, and draws the layers' weights."""
    out = written(tmp_path, monkeypatch, "Llama", folders.SIZES, "--data", "none", "--scheme", "two-level")
    said = []
    monkeypatch.setattr("transformers.quantizers.auto.logger.warning", lambda text, *_: said.append(text))
    _, loaded = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert len(said) == 1 and "Unknown quantization type, got qoq" in said[0]
    drawn = {name.removesuffix(".weight") for name in loaded["missing_keys"]}
    assert drawn == set(folders.LAYERS)
