"""jitgemm.hf: from_pretrained into layers of jitgemm.nn gives what `load_` and `quantize_` give, on tiny models."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import checkpoints
import dialects
import pytest
import torch
from files_8bit import DEEPSEEK
from safetensors.torch import load_file, save_file
from small_models import config as stored_config
from small_models import quantised_names, same_state

from jitgemm import quantize_mxfp4
from jitgemm.checkpoint import formats
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.checkpoint.format import Format, Scheme
from jitgemm.checkpoint.layouts import FLOATS, G, K, N, TensorLayout
from jitgemm.nn import PackedExperts, PackedLinear, W4A8Linear, W8A8Linear, load_, quantize_

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("jitgemm.hf")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
MOE = SIZES | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MOE),
}
TOKENS = torch.arange(1, 13)[None]
LAYER = re.compile(r"layers\.\d+\..*(_proj|\.w[123])\.weight")


pytestmark = pytest.mark.usefixtures("quiet_transformers")


def build(name: str) -> torch.nn.Module:
    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = getattr(transformers, config)(**sizes)
        return transformers.AutoModelForCausalLM.from_config(told, dtype=torch.bfloat16).eval()


def integers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes -8..7 [n, k] and scales [n, k / 32]."""
    groups = weight.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2) / 7).clamp(min=1e-4)
    q = (groups / scale.half().float()[:, :, None]).round().clamp(-8, 7)
    return q.flatten(1).to(torch.int64), scale.half()


def gptq(weight: torch.Tensor, bits: int = 4) -> dict[str, torch.Tensor]:
    q, scale = integers(weight)
    n, k = q.shape
    middle = 2 ** (bits - 1)
    zeros = torch.full((k // 32, n), middle - 1)  # v1 stores zero - 1
    return {
        "qweight": checkpoints.words((q + middle).T, 0, bits=bits),
        "qzeros": checkpoints.words(zeros, 1, bits=bits),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(k) // 32).to(torch.int32),
    }


def awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    q, scale = integers(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": checkpoints.words((q + 8).T, 1, order=order),
        "qzeros": checkpoints.words(torch.full_like(scale.T, 8), 1, order=order),
        "scales": scale.T.contiguous(),
    }


def pack_quantized(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    q, scale = integers(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": checkpoints.words(q + 8, 1), "weight_scale": scale.bfloat16(), "weight_shape": shape}


def w4afp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    q, scale = integers(weight)
    codes = (q[:, ::2] % 16 + 16 * (q[:, 1::2] % 16)).to(torch.uint8).view(torch.int8)
    return {"weight": codes, "weight_scale_inv": scale.float()}


def mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale, _ = quantize_mxfp4(weight).unpack()
    return {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale.view(torch.uint8)}


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """With a scale for the whole, which fills less than a block of 128 x 128."""
    scale = (weight.float().abs().amax() / 448).view(1, 1)
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
PACKED = stored_config()
PACKED["format"] = "pack-quantized"
PACKED["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": 32}
MX = {"type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
OF_MX = {
    "targets": ["Linear"], "weights": MX | {"num_bits": 4, "dynamic": False},
    "input_activations": MX | {"num_bits": 8, "dynamic": True},
}  # fmt: skip
FORMATS = {
    "compressed-tensors": (pack_quantized, PACKED),
    "mxfp4 of compressed-tensors": (
        mxfp4,
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": OF_MX}},
    ),
    "gptq": (gptq, {"quant_method": "gptq"} | GPTQ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "w4afp8": (w4afp8, {"quant_method": "w4afp8", "group_size": 32}),
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
    text = json.loads((folder / "config.json").read_text())
    if shards:
        (folder / "model.safetensors").unlink()
    checkpoints.save(folder, tensors, shards=shards)
    (folder / "config.json").write_text(json.dumps(text | ({"quantization_config": told} if told else {})))
    if shards is None:  # transformers wants to be told who wrote the file
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


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


CASES = dialects.cases()


@pytest.fixture(scope="module")
def around_a_layer() -> torch.nn.Module:
    """A model with a place for the layer of `dialects`."""
    sizes = SIZES | {"hidden_size": dialects.K, "intermediate_size": dialects.N, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, dtype=torch.bfloat16)).bfloat16()


@pytest.mark.parametrize("case", CASES.values(), ids=[" ".join(filter(None, key)) for key in CASES])
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
def test_a_format_that_comes_later_needs_no_change_in_hf(tmp_path, monkeypatch, name):
    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        q, scale = integers(weight)
        return {"later_codes": q.to(torch.int16), "later_scale": scale}

    class Later(Format):
        name = "later"

        def detect(self, names, config):
            return "later_codes" in names

        def scheme(self, config, prefix="", headers=None):
            return Scheme(self.name, group_size=32)

        def tensors(self, scheme, k=None):
            return {"later_codes": TensorLayout((torch.int16,), (N, K)), "later_scale": TensorLayout(FLOATS, (N, G))}

        def read(self, tensors, scheme):
            q, scale = tensors["later_codes"].to(torch.int8), tensors["later_scale"]
            return CanonicalWeight(q, scale, group_size=scheme.group_size)

    monkeypatch.setitem(FORMATS, "later", (pack, {"quant_method": "later"}))
    file(tmp_path, name, "later")
    with pytest.raises(ValueError, match="is of no format known here"):
        loaded(tmp_path)
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, Later()))
    model = loaded(tmp_path)
    assert_same(model, by_load_(tmp_path))
    up = "model.layers.1.mlp.up_proj" if name == "llama" else "model.layers.1.self_attn.k_proj"
    assert torch.equal(
        model.get_submodule(up).weight.unpack()[0].long(), integers(build(name).get_submodule(up).weight)[0]
    )


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_shards_and_device_maps(tmp_path, name):
    pytest.importorskip("accelerate")
    file(tmp_path, name, "gptq", shards=3)
    for shard in tmp_path.glob("*.safetensors"):
        save_file(load_file(shard), shard, {"format": "pt"})
    expected = by_load_(tmp_path)
    for device_map in ("cpu", {"": "cpu"}, *([] if torch.cuda.is_available() else ["auto"])):  # which means the GPU
        assert_same(loaded(tmp_path, device_map=device_map), expected)


def test_offloading_is_refused(tmp_path):
    pytest.importorskip("accelerate")
    file(tmp_path, "llama", "awq")
    with pytest.raises(ValueError, match="device_map: expected GPUs alone or the CPU alone.*cpu, disk"):
        loaded(tmp_path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=str(tmp_path / "off"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto means the GPU")
def test_packed_weights_count_for_an_automatic_device_map(tmp_path):
    pytest.importorskip("accelerate")
    file(tmp_path, "llama", "gptq")
    plain = sum(x.numel() * x.element_size() for x in loaded(tmp_path).parameters())
    with pytest.raises(ValueError, match="device_map: expected GPUs alone or the CPU alone.*disk"):
        loaded(tmp_path, device_map="auto", max_memory={"cpu": plain + 9000}, offload_folder=str(tmp_path / "off"))


def head_quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"lm_head.{k}": v for k, v in pack_quantized(tensors["model.embed_tokens.weight"]).items()}


TIES = {
    "as they are": (lambda tensors: {}, True),
    "a quantised head": (head_quantised, False),
    "tables that differ": (lambda tensors: {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, False),
}


@pytest.mark.parametrize("kind", TIES)
def test_tied_tables_stay_tied_only_where_the_file_has_them_equal(tmp_path, kind):
    file(tmp_path, "tied llama", "compressed-tensors")
    tensors = load_file(tmp_path / "model.safetensors")
    change, tied = TIES[kind]
    save_file(tensors | change(tensors), tmp_path / "model.safetensors", {"format": "pt"})
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
    assert len(said) == 1 and len(quantised_names(model)) > 2
    packed = [module for module in model.modules() if isinstance(module, (PackedLinear, PackedExperts))]
    assert {module.activation for module in packed} == {"e4m3_block"}
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_quantised_embeddings_are_dequantised(tmp_path, name):
    file(tmp_path, name, "w4afp8", re.compile(LAYER.pattern + "|embed_tokens"))
    with pytest.warns(UserWarning, match="from_pretrained: 1 quantised layers are dequantised(?s:.*)an Embedding"):
        model = loaded(tmp_path)
    with pytest.warns(UserWarning, match="dequantised"):
        expected = by_load_(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied llama")
    assert_same(model, expected)


def test_a_quantised_router_is_dequantised(tmp_path):
    file(tmp_path, "qwen3-moe", "w4afp8", re.compile(LAYER.pattern + r"|mlp\.gate\."))
    with pytest.warns(UserWarning, match="from_pretrained: 2 quantised layers are dequantised"):
        model = loaded(tmp_path)
    with pytest.warns(UserWarning, match="dequantised"):
        assert_same(model, by_load_(tmp_path))
    router = build("qwen3-moe").model.layers[1].mlp.gate.weight
    q, scale = integers(router)
    assert torch.equal(model.model.layers[1].mlp.gate.weight, (q * scale.float().repeat_interleave(32, 1)).bfloat16())


@pytest.mark.parametrize("kind, names", [("AutoModel", "model."), ("AutoModelForCausalLM", "")])
def test_a_base_model_takes_a_whole_models_file_and_back(tmp_path, kind, names):
    file(tmp_path, "tied llama", "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {names + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    auto = getattr(transformers, kind)
    model = auto.from_pretrained(tmp_path, config=hf.config(tmp_path), dtype=torch.bfloat16)
    expected = auto.from_config(transformers.AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16).eval()
    load_(expected, tmp_path)
    assert quantised_names(model) == quantised_names(expected) != [] and same_state(model, expected)
    assert all(not x.is_meta for x in (*model.parameters(), *model.buffers()))


def test_what_was_saved_of_a_whole_model_is_read_as_its_base_model_and_back(tmp_path):
    floats(tmp_path / "floats", "tied llama")
    options = {"quantization_config": hf.JitGemmConfig(group_size=32), "dtype": torch.bfloat16}
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", **options)
    base = transformers.AutoModel.from_pretrained(tmp_path / "floats", **options)
    assert len(quantised_names(base)) == 14 and same_state(base, whole.model)
    whole.save_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    assert same_state(transformers.AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16), base)
    assert same_state(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16), whole)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_modules_to_not_convert_are_dequantised(tmp_path, name):
    file(tmp_path, name, "gptq")
    model = loaded(tmp_path, options={"modules_to_not_convert": ["*.mlp.*", "*.block_sparse_moe.*"]})
    expected = by_load_(tmp_path, filter=lambda name, _: "self_attn" in name)
    assert len(quantised_names(model)) == 8
    assert_same(model, expected)


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
    file(tmp_path, "llama", "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    norm, scales = "model.norm.weight", "model.layers.1.mlp.up_proj.scales"
    for change, message in (
        ({norm: None}, f"found none for {norm}.*allow_missing"),
        ({scales: None}, "up_proj.*expected the tensor|expected.*up_proj"),
        ({"model.extra": tensors[norm].clone()}, "found no place for model.extra; strict=False"),
        ({norm: tensors[norm][:32].clone()}, r"model.norm.weight: expected shape \[64\], got \[32\]"),
    ):
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            loaded(tmp_path)
    save_file({**tensors, "model.extra": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    model = loaded(tmp_path, options={"strict": False})
    assert model.hf_quantizer.report.ignored["model.extra"] == "the model has no place for it"


def test_what_a_shard_holds_beside_the_index_is_not_read(tmp_path):
    """Copies of before, of another shape, too, and a norm that the index does not name."""
    expected = loaded(file(tmp_path / "whole", "llama", "gptq"))
    file(tmp_path, "llama", "gptq", shards=2)
    index, shards = tmp_path / "model.safetensors.index.json", sorted(tmp_path.glob("*.safetensors"))
    first, second = (load_file(shard) for shard in shards)
    stale = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    stale |= {name: torch.zeros(3) for name in first if name.endswith("norm.weight")}
    assert {"lm_head.weight", "model.embed_tokens.weight"} & stale.keys() and len(stale) > 20
    save_file(first, shards[0], {"format": "pt"})
    save_file(second | stale, shards[1], {"format": "pt"})
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
    save_file(load_file(tmp_path / last) | {name: torch.zeros(4)}, tmp_path / last, {"format": "pt"})
    how = hf.JitGemmConfig(modules_to_not_convert=["*.experts"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)
    assert torch.equal(loaded.get_parameter(name), model.get_parameter(name)) and quantised_names(loaded)


def test_a_wrong_value_names_its_layer(tmp_path):
    file(tmp_path, "llama", "w4afp8")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"][3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"weight_scale_inv|scale: expected finite.*layers\.1\.mlp\.up_proj"):
        loaded(tmp_path)


def test_allowed_missing_tensors_are_transformers_to_make(tmp_path):
    file(tmp_path, "llama", "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="from_pretrained: 1 tensors are not in the checkpoint.*model.norm.weight"):
        model = loaded(tmp_path, options={"allow_missing": ["model.norm.weight"]})
    assert list(model.hf_quantizer.report.kept) == ["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))


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


def test_floats_are_quantised_with_exact_sums(tmp_path):
    floats(tmp_path, "llama")
    how = hf.JitGemmConfig(activation="int8", sums="exact")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.bfloat16)
    assert sums_of(model) == {"exact"}
    model.save_pretrained(tmp_path / "saved")
    assert "sums" not in (tmp_path / "saved" / "config.json").read_text()


# ---- quantising on the way -------------------------------------------------------------------------------------------


RECIPES = [
    *((name, {"group_size": 32, "activation": "int8"}) for name in MODELS),
    ("llama", {}),
    *(("qwen3-moe", {"scheme": scheme}) for scheme in ("mxfp4", "two-level")),
    ("tied llama", {"bits": 4, "lm_head": "int8", "activation": "int8"}),
    ("qwen3-moe", {"bits": 8, "lm_head": "int8", "activation": "int8"}),
]


@pytest.mark.parametrize("name, options", RECIPES, ids=str)
def test_floats_are_quantised_as_quantize_does_and_go_to_a_file_and_back(tmp_path, name, options):
    floats(tmp_path, name, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=hf.JitGemmConfig(**options), dtype=torch.bfloat16
    )
    expected = build(name)
    quantize_(expected, **options)
    assert_same(model, expected)
    assert (type(model.lm_head) is W8A8Linear) == ("lm_head" in options)
    model.save_pretrained(tmp_path / "packed")
    assert_same(loaded(tmp_path / "packed"), model)


def test_modules_to_not_convert_stay_in_floats(tmp_path):
    floats(tmp_path, "llama")
    config = hf.JitGemmConfig(modules_to_not_convert=["*.down_proj"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.bfloat16
    )
    down = "model.layers.0.mlp.down_proj"
    assert len(quantised_names(model)) == 12 and type(model.get_submodule(down)) is torch.nn.Linear
    assert model.hf_quantizer.report.skipped[down] == "left out by modules_to_not_convert"
    assert torch.equal(model.get_submodule(down).weight, build("llama").get_submodule(down).weight)


def test_patterns_that_are_no_layer_s_name_are_told(tmp_path):
    floats(tmp_path, "llama")
    for patterns, idle in (
        (["*.up_proj", "o_proj", "model.layers.1"], "'o_proj', 'model.layers.1'"),
        (["lm_head"], ""),
    ):
        config = hf.JitGemmConfig(modules_to_not_convert=patterns)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        told = [str(each.message) for each in caught if "modules_to_not_convert" in str(each.message)]
        assert [each.partition(", got ")[2] for each in told] == [f"{idle}, which match nothing"] * bool(idle)


def test_weights_are_quantised_one_layer_at_a_time(tmp_path, monkeypatch):
    floats(tmp_path, "llama")
    alive = []

    def counted(*arguments, **options):
        state = [x for x in model_of[0].modules() if isinstance(x, torch.nn.Linear)]
        alive.append(sum(not x.weight.is_meta for x in state))
        held = [x.module[0] for x in model_of[0].modules() if isinstance(x, hf.Placeholder)]
        alive.append(sum(not x.weight.is_meta for x in held))
        return original(*arguments, **options)

    model_of, original = [], hf.quantised
    before = hf.JitGemmQuantizer._process_model_after_weight_loading
    monkeypatch.setattr(hf, "quantised", counted)
    monkeypatch.setattr(
        hf.JitGemmQuantizer,
        "_process_model_after_weight_loading",
        lambda self, model, **kwargs: (model_of.append(model), before(self, model, **kwargs))[1],
    )
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=hf.JitGemmConfig())
    assert alive == [1, 1] * 14  # the head, which is loaded as it is, and the layer at work


# ---- there and back, and use -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantised", [True, False])
def test_save_pretrained_and_back(tmp_path, name, quantised):
    source, saved = tmp_path / "source", tmp_path / "saved"
    if quantised:
        model = loaded(file(source, name, "gptq"))
    else:
        floats(source, name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, quantization_config=hf.JitGemmConfig(group_size=32), dtype=torch.bfloat16
        )
    model.save_pretrained(saved)
    assert_same(loaded(saved), model)
    assert json.loads((saved / "config.json").read_text())["quantization_config"] == {"quant_method": "jitgemm"}
    auto, dtype = transformers.AutoModelForCausalLM, torch.bfloat16
    again = auto.from_pretrained(saved, dtype=dtype)  # without config=, now that jitgemm.hf is imported
    assert_same(again, model)
    again.save_pretrained(tmp_path / "again")
    assert_same(auto.from_pretrained(tmp_path / "again", dtype=dtype), model)


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
    how = hf.JitGemmConfig(bits=8, activation="int8")
    auto = transformers.AutoModelForCausalLM
    for model in (
        auto.from_pretrained(tmp_path / "floats", quantization_config=how),
        loaded(file(tmp_path / "gptq", "llama", "gptq")),
    ):
        told = model.config.quantization_config
        assert isinstance(told, hf.JitGemmConfig) and told.quant_method == "jitgemm"
        assert told.to_dict() == model.config.to_dict()["quantization_config"] == {"quant_method": "jitgemm"}
    assert how.to_dict()["bits"] == 8  # the caller's own, which serves again


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_generation_with_a_static_cache(tmp_path, name):
    model = loaded(file(tmp_path, name, "compressed-tensors"))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(TOKENS, cache_implementation="static", **options)
    assert tokens.shape == (1, TOKENS.shape[1] + 6)
    assert torch.equal(tokens, by_load_(tmp_path).generate(TOKENS, cache_implementation="static", **options))


def test_a_pipeline_takes_the_loaded_model(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w0")
    model = loaded(file(tmp_path, "llama", "gptq"))
    options = {"max_new_tokens": 3, "do_sample": False}
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    [said] = pipeline("w5 w6", return_full_text=False, **options)
    expected = by_load_(tmp_path).generate(torch.tensor([[5, 6]]), pad_token_id=0, **options)
    assert said["generated_text"].split() == [f"w{i}" for i in expected[0, 2:].tolist()]


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
