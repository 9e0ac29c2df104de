"""jitgemm.hf: from_pretrained into layers of jitgemm.nn gives what `load_` and `quantize_` give, on tiny models."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import checkpoints
import dialects
import model_folders as folders
import pytest
import stored_weights
import torch
from files_8bit import DEEPSEEK
from safetensors.torch import load_file, save_file
from small_models import quantised_names, same_state
from stored_weights import compressed, rounded

from jitgemm import quantize_mxfp4
from jitgemm.nn import PackedExperts, W4A8Linear, W8A8Linear, load_, quantize_

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("jitgemm.hf")

OWN = {"pad_token_id": 0, "eos_token_id": None, "tie_word_embeddings": False}
MODELS = {
    "llama": ("Llama", folders.SIZES | OWN),
    "tied llama": ("Llama", folders.SIZES | OWN | {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", folders.MOE | OWN),
    "mixtral": ("Mixtral", folders.MOE | OWN),
}
TOKENS = torch.arange(1, 13)[None]
LAYER = re.compile(r"layers\.\d+\..*(_proj|\.w[123])\.weight")


ON_THE_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="auto means the GPU")
pytestmark = pytest.mark.usefixtures("quiet_transformers")


def build(name: str) -> torch.nn.Module:
    kind, sizes = MODELS[name]
    model = folders.model_of(kind, torch.float32, **sizes)
    for parameter in model.parameters():  # and no buffer: the positions' frequencies stay as they are
        parameter.data = parameter.data.bfloat16()
    return model


def mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale, _ = quantize_mxfp4(weight).unpack()
    return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale.view(torch.uint8)}


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """With a scale for the whole, which fills less than a block of 128 x 128."""
    scale = (weight.float().abs().amax() / 448).view(1, 1)
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


MX = {"type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
OF_MX = {
    "targets": ["Linear"], "weights": MX | {"num_bits": 4, "dynamic": False},
    "input_activations": MX | {"num_bits": 8, "dynamic": True},
}  # fmt: skip
FORMATS = {
    **{name: (lambda w, pack=pack: pack(rounded(w)), told) for name, (pack, told) in stored_weights.FORMATS.items()},
    "mxfp4 of compressed-tensors": (
        mxfp4,
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": OF_MX}},
    ),
    "fp8 in blocks": (fp8, DEEPSEEK),
}
"""Packers of a weight, and a config: what a model's experts need. `dialects` has a layer of each tool's."""


def floats(folder: Path, name: str, **options) -> Path:
    build(name).save_pretrained(folder, **options)
    return folder


def file(folder: Path, name: str, format: str, chosen: re.Pattern = LAYER, shards: int | None = None) -> Path:
    """A checkpoint of the model as its tool names the tensors, those of chosen layers in a format."""
    floats(folder, name)
    pack, told = FORMATS[format]
    tensors = {}
    for full, tensor in load_file(folder / "model.safetensors").items():
        prefix = full.removesuffix(".weight")
        if chosen.search(full):
            tensors |= {f"{prefix}.{suffix}": value for suffix, value in pack(tensor).items()}
        else:
            tensors[full] = tensor
    (folder / "model.safetensors").unlink()
    checkpoints.save(folder, tensors, shards=shards)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": told}))
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor | None]]) -> None:
    """The file with tensors changed; one that becomes None is left out."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= change(tensors)
    checkpoints.save(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def quantised_by(folder: Path, auto: type = transformers.AutoModelForCausalLM, **options) -> torch.nn.Module:
    """The model in floats of a folder, quantised on the way."""
    return auto.from_pretrained(folder, quantization_config=hf.JitGemmConfig(**options), dtype=torch.bfloat16)


def loaded(folder: Path, *, options: dict | None = None, **more) -> torch.nn.Module:
    config = hf.config(str(folder), **(options or {}))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16, **more)


def by_load_(folder: Path, **options) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    load_(model, folder, **options)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits


def assert_same(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    assert quantised_names(model) == quantised_names(expected) != []
    assert same_state(model, expected)
    assert not model.training and all(not x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert torch.equal(logits(model), logits(expected))


def assert_saved(folder: Path, model: torch.nn.Module) -> None:
    """That save_pretrained writes what both ways to load read, and the model of either is written again."""
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == {"quant_method": "jitgemm"}
    assert_same(loaded(folder), model)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # without config=
    assert_same(again, model)
    again.save_pretrained(folder / "again")
    assert_same(loaded(folder / "again"), model)


# ---- quantised checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, format", [*(("qwen3-moe", format) for format in FORMATS), ("llama", "gptq"), ("mixtral", "w4afp8")]
)
def test_a_checkpoint_becomes_the_model_that_load_makes(tmp_path, name, format):
    file(tmp_path, name, format)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if "mxfp4" in format:
            warnings.filterwarnings("ignore", message="the checkpoint's MXFP8 inputs")
        model = loaded(tmp_path)
    assert_same(model, by_load_(tmp_path))
    assert model.hf_quantizer.report == quantised_names(model)
    has_experts = any(isinstance(module, PackedExperts) for module in model.modules())
    assert has_experts == (name != "llama" and int(transformers.__version__.split(".")[0]) > 4)


CASES = {" ".join(sorted(case.tensors)): case for case in dialects.cases().values()}
"""One for all that have tensors of the same names."""


@pytest.fixture(scope="module")
def around_a_layer() -> torch.nn.Module:
    """A model with a place for the layer of `dialects`."""
    sizes = folders.SIZES | OWN | {"hidden_size": dialects.K, "intermediate_size": dialects.N, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, dtype=torch.bfloat16)).bfloat16()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_layer_of_every_tool_becomes_the_one_that_load_makes(tmp_path, around_a_layer, case):
    tensors = {name: each for name, each in around_a_layer.state_dict().items() if not name.startswith(dialects.LAYER)}
    tensors |= {name: tensor.clone().contiguous() for name, tensor in case.source.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said = {} if case.config is None else {"quantization_config": case.config}
    (tmp_path / "config.json").write_text(json.dumps(around_a_layer.config.to_dict() | said))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* inputs")
        model = loaded(tmp_path)
        assert_same(model, by_load_(tmp_path))
    weight = model.get_submodule(dialects.LAYER).weight
    assert torch.equal(weight.dequantize().double(), case.weight.float().double())


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_shards_and_device_maps(tmp_path, name):
    pytest.importorskip("accelerate")
    file(tmp_path, name, "gptq", shards=3)
    expected = by_load_(tmp_path)
    for device_map in ("cpu", {"": "cpu"}, *([] if torch.cuda.is_available() else ["auto"])):  # which means the GPU
        assert_same(loaded(tmp_path, device_map=device_map), expected)


@pytest.mark.parametrize("automatic", [False, pytest.param(True, marks=ON_THE_CPU)])
def test_offloading_is_refused(tmp_path, automatic):
    """Packed weights count for an automatic map."""
    pytest.importorskip("accelerate")
    file(tmp_path, "llama", "gptq")
    how = {"device_map": {"model": "cpu", "lm_head": "disk"}}
    if automatic:
        plain = sum(x.numel() * x.element_size() for x in loaded(tmp_path).parameters())
        how = {"device_map": "auto", "max_memory": {"cpu": plain + 9000}}
    with pytest.raises(ValueError, match="device_map: expected GPUs alone or the CPU alone.*disk"):
        loaded(tmp_path, offload_folder=str(tmp_path / "off"), **how)


def head_quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"lm_head.{k}": v for k, v in compressed(rounded(tensors["model.embed_tokens.weight"])).items()}


TIES = {
    "as they are": (lambda tensors: {}, True),
    "a quantised head": (head_quantised, False),
    "tables that differ": (lambda tensors: {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, False),
}


@pytest.mark.parametrize("kind", TIES)
def test_tied_tables_stay_tied_only_where_the_file_has_them_equal(tmp_path, kind):
    change, tied = TIES[kind]
    rewritten(file(tmp_path, "tied llama", "compressed-tensors"), change)
    model = loaded(tmp_path)
    model.tie_weights()  # as generate and resizing may
    assert isinstance(model.lm_head, W4A8Linear) == (kind == "a quantised head")
    assert model.config.tie_word_embeddings == tied
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert_same(model, by_load_(tmp_path))


@pytest.mark.parametrize("load", [loaded, by_load_], ids=["from_pretrained", "load_"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_inputs_in_mxfp8_are_told_of_once_in_a_model(tmp_path, name, load):
    file(tmp_path, name, "mxfp4 of compressed-tensors")
    with pytest.warns(UserWarning, match="MXFP8 inputs are .* e4m3_block") as said:
        model = load(tmp_path)
    packed = [model.get_submodule(name) for name in quantised_names(model)]
    assert len(said) == 1 and len(packed) > 2 and {module.activation for module in packed} == {"e4m3_block"}


OTHERS = [("llama", "model.embed_tokens", 1), ("tied llama", "model.embed_tokens", 1)]
OTHERS += [("qwen3-moe", "model.layers.1.mlp.gate", 2)]


@pytest.mark.parametrize("name, module, count", OTHERS)
def test_quantised_embeddings_and_routers_are_dequantised(tmp_path, name, module, count):
    _, _, last = module.rpartition(".")
    file(tmp_path, name, "w4afp8", re.compile(rf"{LAYER.pattern}|\.{last}\."))
    with pytest.warns(UserWarning, match=f"from_pretrained: {count} quantised layers are dequantised"):
        model = loaded(tmp_path)
    with pytest.warns(UserWarning, match="dequantised"):
        assert_same(model, by_load_(tmp_path))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied llama")
    layer = rounded(build(name).get_submodule(module).weight)
    assert torch.equal(model.get_submodule(module).weight, layer.weight.bfloat16())


def test_what_was_saved_of_a_whole_model_is_read_as_its_base_model_and_back(tmp_path):
    floats(tmp_path / "floats", "tied llama")
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModel
    whole, base = (quantised_by(tmp_path / "floats", auto, group_size=32) for auto in kinds)
    assert len(quantised_names(base)) == 14 and same_state(base, whole.model)
    whole.save_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    assert same_state(transformers.AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16), base)
    assert same_state(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16), whole)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_modules_to_not_convert_are_dequantised_or_stay_in_floats(tmp_path, name):
    options = {"modules_to_not_convert": ["*.mlp.*", "*.block_sparse_moe.*"]}
    model = loaded(file(tmp_path / "packed", name, "gptq"), options=options)
    assert len(quantised_names(model)) == 8
    assert_same(model, by_load_(tmp_path / "packed", filter=lambda name, _: "self_attn" in name))
    model = quantised_by(floats(tmp_path / "floats", name), **options)
    kept = [each for each, why in model.hf_quantizer.report.skipped.items() if "modules_to_not_convert" in why]
    assert len(quantised_names(model)) == 8 and kept
    for each, parameter in model.get_submodule(kept[0]).named_parameters():
        assert torch.equal(parameter, build(name).get_submodule(kept[0]).get_parameter(each))


def test_the_callers_config_is_what_it_was_and_serves_again(tmp_path):
    file(tmp_path, "llama", "awq")
    config = hf.config(str(tmp_path), activation="int8")
    for _ in range(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
        assert model.model.layers[0].mlp.up_proj.activation == "int8"
    assert json.loads(config.to_json_string())["quantization_config"]["activation"] == "int8"


def test_a_later_load_finds_the_model_as_transformers_made_it(tmp_path):
    file(tmp_path, "tied llama", "awq")
    model = loaded(tmp_path)
    expected = logits(model)
    with pytest.raises(ValueError, match="found no place for surplus"):
        load_(model, {**load_file(tmp_path / "model.safetensors"), "surplus": torch.zeros(1)}, config=FORMATS["awq"][1])
    load_(model, tmp_path)
    assert torch.equal(logits(model), expected)


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_models_that_are_cut_among_ranks_are_refused(tmp_path):
    file(tmp_path, "llama", "awq")
    config = hf.config(str(tmp_path))
    config.distributed_config = {"dp_size": 2}  # where transformers notes it
    with pytest.raises(ValueError, match="distributed_config: expected (dp_size = 1|none)"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


def test_missing_and_unknown_tensors_are_named(tmp_path):
    tensors = load_file(file(tmp_path, "llama", "gptq") / "model.safetensors")
    norm, scales = "model.norm.weight", "model.layers.1.mlp.up_proj.scales"
    for change, message in (
        ({norm: None}, f"found none for {norm}.*allow_missing"),
        ({scales: None}, "up_proj.*expected the tensor|expected.*up_proj"),
        ({"model.extra": tensors[norm].clone()}, "found no place for model.extra; strict=False"),
        ({norm: tensors[norm][:32].clone()}, r"model.norm.weight: expected shape \[64\], got \[32\]"),
        ({scales: tensors[scales] * torch.nan}, r"scale: expected finite.*layers\.1\.mlp\.up_proj"),
    ):
        checkpoints.save(tmp_path, tensors)
        rewritten(tmp_path, lambda _: change)
        with pytest.raises(ValueError, match=message):
            loaded(tmp_path)
    checkpoints.save(tmp_path, tensors)
    rewritten(tmp_path, lambda _: {norm: None, "model.extra": torch.zeros(2)})
    with pytest.warns(UserWarning, match="from_pretrained: 1 tensors are not in the checkpoint.*model.norm.weight"):
        model = loaded(tmp_path, options={"strict": False, "allow_missing": [norm]})
    assert model.hf_quantizer.report.ignored["model.extra"] == "the model has no place for it"
    assert list(model.hf_quantizer.report.kept) == [norm]  # transformers' to make
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))


def test_what_a_shard_holds_beside_the_index_is_not_read(tmp_path):
    """Copies of before, of another shape, too, and a norm that the index does not name."""
    expected = loaded(file(tmp_path / "whole", "llama", "gptq"))
    file(tmp_path, "llama", "gptq", shards=2)
    index, shards = tmp_path / "model.safetensors.index.json", sorted(tmp_path.glob("*.safetensors"))
    first, second = (load_file(shard) for shard in shards)
    stale = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    stale |= {name: torch.zeros(3) for name in first if name.endswith("norm.weight")}
    assert {"lm_head.weight", "model.embed_tokens.weight"} & stale.keys() and len(stale) > 20
    save_file(second | stale, shards[1])
    assert_same(loaded(tmp_path), expected)
    said = json.loads(index.read_text())
    del said["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="found none for model.norm.weight.*does not name model.norm.weight, which"):
        loaded(tmp_path)


def test_a_copy_of_a_parameter_of_a_module_with_children_is_not_read(tmp_path):
    """gpt-oss' sinks, which no placeholder stands for."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads))
    name = "model.layers.0.self_attn.sinks"
    torch.nn.init.normal_(model.get_parameter(name))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    last = max(set(index.values()) - {index[name]})
    assert last > index[name]
    save_file(load_file(tmp_path / last) | {name: torch.zeros(4)}, tmp_path / last)
    loaded = quantised_by(tmp_path, modules_to_not_convert=["*.experts"])
    assert torch.equal(loaded.get_parameter(name), model.get_parameter(name).bfloat16()) and quantised_names(loaded)


def test_a_checkpoint_in_floats_is_told_apart(tmp_path):
    floats(tmp_path, "llama")
    with pytest.warns(UserWarning, match="from_pretrained converted no layer.*JitGemmConfig"):
        model = loaded(tmp_path)
    assert quantised_names(model) == [] and torch.equal(logits(model), logits(build("llama")))


@pytest.mark.parametrize("wrong", [{"activations": "int8"}, {"group_size": 64}, {"lm_head": "int8"}], ids=str)
def test_options_that_config_does_not_know_are_named(tmp_path, wrong):
    floats(tmp_path, "llama")
    with pytest.raises(TypeError, match=f"config: expected arguments .* got {next(iter(wrong))}$"):
        hf.config(tmp_path, **wrong)
    told = {"revision": "main", "local_files_only": True, "trust_remote_code": False, "rms_norm_eps": 0.5}
    assert hf.config(tmp_path, **told).rms_norm_eps == 0.5


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./no-such-folder", "no-such-folder", "nobody/no-such-model", None]
)
def test_a_folder_that_is_not_here_is_named(tmp_path, name):
    with pytest.raises(OSError if name else TypeError, match=f"^folder: expected .*, got '?{name or 'NoneType'}"):
        hf.config(name, local_files_only=True)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"folder: expected a config.json in JSON in {tmp_path}, got maximum rec"):
        hf.config(tmp_path)


def sums_of(model: torch.nn.Module) -> set[str]:
    parts = [part for m in model.modules() for part in ([m.w13, m.w2] if isinstance(m, PackedExperts) else [m])]
    return {part.call_sums for part in parts if hasattr(part, "call_sums") and part.weight.bits == 4}


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_what_kernels_may_add_up_in_is_an_option(tmp_path, name):
    file(tmp_path, name, "compressed-tensors")
    model = loaded(tmp_path, options={"sums": "f16"})
    assert sums_of(model) == {"f16"}
    assert_same(model, by_load_(tmp_path))
    assert sums_of(loaded(tmp_path)) == {"f32"}
    with pytest.raises(ValueError, match=r"sums: .* got 'exact' with e4m3 \(layer model\."):
        loaded(tmp_path, options={"sums": "exact"})


# ---- quantising on the way -------------------------------------------------------------------------------------------


RECIPES = [
    *((name, {"group_size": 32, "activation": "int8"}) for name in MODELS),
    *(("llama", options) for options in ({}, {"activation": "int8", "sums": "exact"})),
    *(("qwen3-moe", {"scheme": scheme}) for scheme in ("mxfp4", "two-level")),
    ("tied llama", {"bits": 4, "lm_head": "int8", "activation": "int8"}),
    ("qwen3-moe", {"bits": 8, "lm_head": "int8", "activation": "int8"}),
]


@pytest.mark.parametrize("name, options", RECIPES, ids=str)
def test_floats_are_quantised_as_quantize_does_and_go_to_a_file_and_back(tmp_path, name, options):
    floats(tmp_path, name, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, expected = quantised_by(tmp_path, **options), build(name)
    quantize_(expected, **options)
    assert_same(model, expected)
    assert (type(model.lm_head) is W8A8Linear) == ("lm_head" in options) and sums_of(model) == sums_of(expected)
    assert_saved(tmp_path / "saved", model)


def test_patterns_that_are_no_layer_s_name_are_told(tmp_path):
    floats(tmp_path, "llama")
    for patterns, idle in (
        (["*.up_proj", "o_proj", "model.layers.1"], "'o_proj', 'model.layers.1'"),
        (["lm_head"], ""),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quantised_by(tmp_path, modules_to_not_convert=patterns)
        told = [str(each.message) for each in caught if "modules_to_not_convert" in str(each.message)]
        assert [each.partition(", got ")[2] for each in told] == [f"{idle}, which match nothing"] * bool(idle)


def test_weights_are_quantised_one_layer_at_a_time(tmp_path, monkeypatch):
    alive, original = [], hf.quantised

    def counted(replaceable, *arguments, **options):
        modules = [x.module[0] if isinstance(x, hf.Placeholder) else x for x in replaceable.model.modules()]
        alive.append(sum(isinstance(x, torch.nn.Linear) and not x.weight.is_meta for x in modules))
        return original(replaceable, *arguments, **options)

    monkeypatch.setattr(hf, "quantised", counted)
    quantised_by(floats(tmp_path, "llama"))
    assert alive == [2] * 14  # the head, which is loaded as it is, and the layer at work


# ---- there and back, and use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_goes_to_a_file_and_back(tmp_path, name):
    assert_saved(tmp_path / "saved", loaded(file(tmp_path / "source", name, "gptq")))


@pytest.mark.parametrize("load", [loaded, by_load_], ids=["from_pretrained", "load_"])
def test_a_model_whose_layers_are_all_dequantised_is_saved_as_one_in_floats(tmp_path, load):
    file(tmp_path / "gptq", "llama", "gptq", re.compile("embed_tokens"))
    with pytest.warns(UserWarning, match="converted no layer"):
        model = load(tmp_path / "gptq")
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert same_state(again, model)


def test_a_loaded_models_config_has_a_config_object(tmp_path):
    """As transformers' own quantizers leave it."""
    floats(tmp_path / "floats", "llama")
    how, auto = hf.JitGemmConfig(bits=8, activation="int8"), transformers.AutoModelForCausalLM
    of_floats = auto.from_pretrained(tmp_path / "floats", quantization_config=how)
    for model in (of_floats, loaded(file(tmp_path / "gptq", "llama", "gptq"))):
        told = model.config.quantization_config
        assert isinstance(told, hf.JitGemmConfig) and told.quant_method == "jitgemm"
        assert told.to_dict() == model.config.to_dict()["quantization_config"] == {"quant_method": "jitgemm"}
    assert how.to_dict()["bits"] == 8  # the caller's own, which serves again


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_compiled_generation_on_the_gpu(tmp_path, name):
    file(tmp_path, name, "compressed-tensors")
    model = loaded(tmp_path, device_map="cuda")
    assert all(x.is_cuda for x in model.parameters())
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    eager = model.generate(TOKENS.cuda(), disable_compile=True, **options)
    assert torch.equal(model.generate(TOKENS.cuda(), **options), eager)
    expected = by_load_(tmp_path, device="cuda")
    assert torch.equal(expected.generate(TOKENS.cuda(), disable_compile=True, **options), eager)


def test_layers_that_a_device_map_names_move_their_input(tmp_path, monkeypatch):
    hooks = pytest.importorskip("accelerate.hooks")
    file(tmp_path, "llama", "gptq", re.compile(LAYER.pattern + "|lm_head"))
    before = hf.JitGemmQuantizer._process_model_after_weight_loading

    def dispatched(self, model, **kwargs):
        hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu"))
        return before(self, model, **kwargs)

    monkeypatch.setattr(hf.JitGemmQuantizer, "_process_model_after_weight_loading", dispatched)
    model = loaded(tmp_path)
    (hook,) = model.lm_head._forward_pre_hooks.values()
    assert hook(model.lm_head, (torch.ones(2), 1))[0].device.type == "cpu"
    assert torch.equal(logits(model), logits(by_load_(tmp_path)))
