"""`jitgemm.load`: where tensors and settings come from, what is read, tensor parallelism, joined layers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import builders
import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from jitgemm.checkpoint import Checkpoint, formats, read_layer
from jitgemm.checkpoint.folder import weights_of
from jitgemm.checkpoint.format import Sizes
from jitgemm.checkpoint.load import load
from jitgemm.checkpoint.reader import layer_header
from jitgemm.checkpoint.writing import stored_in

CONFIG = {"quant_method": "w4afp8", "group_size": 128}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj"]


def name(layer: str, index: int = 0) -> str:
    return f"model.layers.{index}.self_attn.{layer}"


def parts(layer: str) -> builders.WeightParts:
    n = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 256}[layer]
    return builders.weight_parts(NAMES.index(layer), n, 256)


def expected(*layers: str) -> torch.Tensor:
    return torch.cat([parts(layer).dequantize_fp64() for layer in layers]).float()


def tensors(*layers: str, bias=()):
    """A model's tensors: the layers, and others that no one should touch, some with names that begin the same way."""
    others = [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        f"{name('q_proj')}_extra",
        f"{name('q_proj')}.lora",
    ]
    found = {f"{other}.weight": torch.ones(16, 16) for other in others}
    for layer in layers or NAMES:
        found[name(layer) + ".weight"] = checkpoints.words(parts(layer).q, 1, torch.int8)
        found[name(layer) + ".weight_scale_inv"] = parts(layer).scale
        if layer in bias:
            found[name(layer) + ".bias"] = torch.randn(len(parts(layer).q), generator=builders.generator(9)).bfloat16()
    return found


def holds(source, *layers: str, **kwargs) -> bool:
    prefix = [name(layer) for layer in layers] if len(layers) > 1 else name(layers[0])
    return torch.equal(load(source, prefix, device="cpu", **kwargs).dequantize(), expected(*layers))


# --- sources ---


def test_a_folder_whose_files_have_other_names(tmp_path):
    one = checkpoints.save(tmp_path / "one", tensors("q_proj", "k_proj"), CONFIG)
    (one / "model.safetensors").rename(one / "weights-a.safetensors")
    save_file({"other": torch.ones(1)}, one / "weights-b.safetensors")
    assert holds(one, "k_proj")
    many = checkpoints.save(tmp_path / "many", tensors(), CONFIG, shards=2)
    (many / "model.safetensors.index.json").rename(many / "language.safetensors.index.json")
    assert holds(many, "k_proj")


def test_an_open_checkpoint_serves_many_layers(tmp_path):
    checkpoint = Checkpoint(checkpoints.save(tmp_path, tensors(), CONFIG, shards=2))
    assert set(checkpoint.names()) == set(tensors()) and checkpoint.config == CONFIG
    assert all(holds(checkpoint, layer) for layer in NAMES)
    with pytest.raises(ValueError, match="config: expected None with an open Checkpoint"):
        load(checkpoint, name("q_proj"), config=CONFIG)


# --- laziness ---


def test_only_the_files_of_the_layer_are_opened(tmp_path):
    folder = checkpoints.save(tmp_path, tensors(), CONFIG, shards=len(tensors()))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index[name("q_proj") + suffix] for suffix in (".weight", ".weight_scale_inv")}
    for file in folder.glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    assert holds(folder, "q_proj")
    with pytest.raises(FileNotFoundError, match="source: expected the file .*found none"):
        load(folder, name("o_proj"), device="cpu")


class Watched(Checkpoint):
    """A checkpoint that notes which tensors' data are asked of its files."""

    def read(self, name, *options):
        self.seen = [*getattr(self, "seen", []), name]
        return super().read(name, *options)


def test_only_the_tensors_of_the_layer_are_read_and_each_once(tmp_path):
    checkpoint = Watched(checkpoints.save(tmp_path, tensors(bias=["q_proj"]), CONFIG))
    assert holds(checkpoint, "q_proj")
    assert sorted(checkpoint.seen) == [name("q_proj") + suffix for suffix in (".bias", ".weight", ".weight_scale_inv")]


def test_headers_tell_what_is_wrong_before_any_data_is_read(tmp_path):
    checkpoint = Watched(checkpoints.save(tmp_path, tensors(), CONFIG))
    assert layer_header(checkpoint, name("q_proj")).sizes == Sizes(64, 256, 128)
    wrong = Watched(checkpoints.save(tmp_path / "wrong", tensors(), CONFIG | {"group_size": 64}))
    with pytest.raises(ValueError, match="group_size: expected .*got 64"):
        layer_header(wrong, name("q_proj"))
    assert not hasattr(checkpoint, "seen") and not hasattr(wrong, "seen")


# --- settings ---


def test_settings_beside_the_files(tmp_path):
    wrong = CONFIG | {"group_size": 64}  # refused, which shows that they were read
    texts = {
        "config.json": {"model_type": "llama", "quantization_config": wrong},
        "quantize_config.json": wrong,
        "quant_config.json": wrong,
        "hf_quant_config.json": {"producer": {}, "quantization": wrong},
        "nested/config.json": {"text_config": {"quantization_config": wrong}},  # of a model inside a model
    }
    for file, text in texts.items():
        folder = checkpoints.save((tmp_path / file).with_suffix(""), tensors())
        assert holds(folder, "q_proj")
        (folder / Path(file).name).write_text(json.dumps(text))
        for source in (folder, folder / "model.safetensors"):
            with pytest.raises(ValueError, match="group_size: expected .*got 64"):
                load(source, name("q_proj"), device="cpu")


def test_settings_that_are_given_replace_those_beside_the_files(tmp_path):
    folder, wrong = checkpoints.save(tmp_path, tensors(), CONFIG), {"group_size": 64}
    for config in (CONFIG | wrong, {"model_type": "llama", "quantization_config": CONFIG | wrong}):
        with pytest.raises(ValueError, match="group_size: expected .*got 64") as error:
            load(folder, [name("q_proj"), name("k_proj")], device="cpu", config=config)
        assert str(error.value).endswith(f"(layer '{name('q_proj')}' of {folder})")
    assert holds(folder, "q_proj", config={"model_type": "llama"} | wrong)  # a model's, without quantisation


def test_a_format_can_be_named():
    assert holds(tensors(), "q_proj", format="w4afp8")
    with pytest.raises(ValueError, match="weight_scale_inv: expected only weight, weight_scale, "):
        load(tensors(), name("q_proj"), device="cpu", format="compressed-tensors")
    with pytest.raises(ValueError, match="format: expected one of compressed-tensors"):
        load(tensors(), name("q_proj"), device="cpu", format="int4")


# --- bias, joined layers, tensor parallelism ---


def test_several_layers_become_one_in_the_order_of_their_names(tmp_path):
    folder = checkpoints.save(tmp_path, tensors(bias=["q_proj", "v_proj"]), CONFIG, shards=2)
    assert holds(folder, "q_proj", "k_proj", "v_proj")
    prefixes = [name(layer) for layer in NAMES[:3]]
    joined = read_layer(folder, prefixes, device="cpu")
    biases = [read_layer(folder, name(layer), device="cpu").bias for layer in ("q_proj", "v_proj")]
    assert torch.equal(joined.bias, torch.cat([biases[0], torch.zeros(32).bfloat16(), biases[1]]))
    for dim, world in (("n", 2), ("n", 4), ("k", 2)):  # each is cut by itself
        for rank in range(world):
            weight = load(folder, prefixes, device="cpu", tp_dim=dim, tp_rank=rank, tp_size=world)
            parts = [expected(layer).chunk(world, "nk".index(dim))[rank] for layer in NAMES[:3]]
            assert torch.equal(weight.dequantize(), torch.cat(parts))


@pytest.mark.gpu
def test_the_gpu_is_the_default_device_and_packs_the_same_bytes(tmp_path):
    folder = checkpoints.save(tmp_path, tensors(), CONFIG)
    weight = load(folder, name("o_proj"))
    assert weight.device.type == "cuda"
    assert builders.same_bits(weight.blocks.cpu(), load(folder, name("o_proj"), device="cpu").blocks)


# --- errors ---


@pytest.mark.parametrize("kwargs, error, message", [
    ({"prefix": name("x_proj")}, ValueError, r"prefix: expected a layer's name, found no tensor model.*x_proj\.\*"),
    ({"prefix": []}, TypeError, "prefix: expected a layer's name or several"),
    ({"prefix": 3}, TypeError, "prefix: expected a layer's name or several"),
    ({"prefix": [name("q_proj"), 3]}, TypeError, "prefix: expected a layer's name or several"),
    ({"tp_size": 2}, ValueError, "tp_dim: expected 'n' or 'k' with tp_rank 0 of tp_size 2, got None"),
    ({"tp_rank": 1}, ValueError, "tp_dim: expected 'n' or 'k' with tp_rank 1 of tp_size 1, got None"),
    ({"tp_size": 2, "tp_dim": "rows"}, ValueError, "tp_dim: expected 'n' or 'k', got 'rows'"),
    ({"tp_size": 2, "tp_dim": "G"}, ValueError, "tp_dim: expected 'n' or 'k', got 'G'"),
    ({"tp_size": 2, "tp_rank": 2, "tp_dim": "n"}, ValueError, "tp_rank, tp_size: expected 0 <= rank < size"),
    ({"tp_size": 32, "tp_dim": "k"}, ValueError, "multiple of 16, got 256 / 32 = 8"),
    ({"config": 3}, TypeError, "config: expected a mapping, got int"),
    ({"prefix": "model.embed_tokens"}, ValueError, "layer 'model.embed_tokens' is of no format known here"),
])  # fmt: skip
def test_wrong_arguments_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        load(tensors(), **{"prefix": name("q_proj"), "device": "cpu"} | kwargs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
def test_input_scales_that_are_not_positive_are_refused(value):
    source = tensors("q_proj") | {name("q_proj") + ".input_scale": torch.tensor([value])}
    with pytest.raises(ValueError, match="input_scale: expected a positive, finite number, got "):
        load(source, name("q_proj"), device="cpu")


def test_without_a_gpu_the_default_device_is_the_cpu_and_another_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert load(tensors(), name("q_proj")).device.type == "cpu"
    with pytest.raises(ValueError, match="device: expected one that is here, got cuda, and PyTorch finds no GPU"):
        load(tensors(), name("q_proj"), device="cuda")


def test_sources_that_are_not_there_or_not_safetensors_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "model.gguf").write_bytes(b"x")
    (tmp_path / "of gguf").mkdir()
    (tmp_path / "of gguf" / "model-Q4_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "bad.safetensors").write_bytes(b"not one")
    (tmp_path / "bad.safetensors.index.json").write_text("{}")
    (tmp_path / "worse.safetensors.index.json").write_text("{")
    deep = tmp_path / "deep" / "model.safetensors.index.json"
    deep.parent.mkdir()
    deep.write_text("[" * 100_000)
    config = tmp_path / "config" / "config.json"
    checkpoints.save(config.parent, tensors())
    config.write_text('{"a":' * 100_000)
    (tmp_path / "deep.safetensors").write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)
    with pytest.raises(ValueError, match="source: expected a safetensors file, got .*deep.safetensors: maximum recurs"):
        stored_in(tmp_path / "deep.safetensors")
    assert formats.by_name("torchao").described({"a": "[" * 100_000}, "a") == {}
    for source, error, message in [
        (tmp_path / "none", FileNotFoundError, "source: expected a file or folder, found none at"),
        (tmp_path / "empty", FileNotFoundError, "source: expected .safetensors files, found none in"),
        (tmp_path / "of gguf", FileNotFoundError, "found none in .*, but GGUF's model-Q4_0.gguf"),
        (tmp_path / "pytorch_model.bin", ValueError, r"as a mapping: torch\.load\(path, weights_only=True\)"),
        (tmp_path / "model.gguf", ValueError, "GGUF's blocks are no format that is read here"),
        (tmp_path / "bad.safetensors", ValueError, "source: expected a safetensors file"),
        (tmp_path / "deep.safetensors", ValueError, "source: expected a safetensors file, got .*deep.safetensors"),
        (tmp_path / "bad.safetensors.index.json", ValueError, "source: expected a weight_map"),
        (tmp_path / "worse.safetensors.index.json", ValueError, "expected JSON in"),
        (deep.parent, ValueError, f"expected JSON in {deep}, got maximum recursion"),
        (config.parent, ValueError, f"expected JSON in {config}, got maximum recursion"),
        (tmp_path, ValueError, "source: expected one index, got bad.safetensors.index.json, worse"),
        (3, TypeError, "source: expected a path or a mapping of tensors, got int"),
        ({"a.weight": 3}, TypeError, "source: expected tensors, got int for 'a.weight'"),
    ]:
        with pytest.raises(error, match=message):
            load(source, "a", device="cpu")


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path):
    folder = checkpoints.save(tmp_path, tensors(), CONFIG, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {key: files[1 - files.index(file)] for key, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    checkpoint = Checkpoint(folder)
    for read in (
        lambda: load(folder, name("q_proj"), device="cpu"),
        checkpoint.headers,
        lambda: checkpoint.read(name("q_proj") + ".weight", torch.device("cpu")),
    ):
        with pytest.raises(ValueError, match=r"source: expected 'model.*' in .*safetensors, as the index says, found"):
            read()


@pytest.mark.parametrize("place", ["", "shards"])
def test_an_index_decides_however_a_folder_is_given(tmp_path, place):
    """Its second shard also has copies of before of the first one's tensors, and one that the index does not name."""
    folder = checkpoints.save(tmp_path, tensors(), CONFIG, shards=2)
    shards = sorted(folder.glob("*.safetensors"))
    (first, second), path = (load_file(shard) for shard in shards), folder / "model.safetensors.index.json"
    more = {key: torch.zeros_like(tensor) for key, tensor in first.items()} | {"model.norm.weight": torch.ones(1)}
    save_file(second | more, shards[1])
    if place:
        (folder / place).mkdir()
        shards = [shard.rename(folder / place / shard.name) for shard in shards]
        index = json.loads(path.read_text())["weight_map"]
        path.write_text(json.dumps({"weight_map": {key: f"{place}/{file}" for key, file in index.items()}}))
    for source in (folder, path, shards, [str(shard) for shard in reversed(shards)]):
        checkpoint = Checkpoint(source)
        assert all(holds(checkpoint, layer) for layer in NAMES) and checkpoint.config == CONFIG
        assert checkpoint.headers().keys() == tensors().keys() == set(checkpoint.names())
        assert dict(checkpoint.elsewhere()) == dict.fromkeys(more, shards[1])
    with pytest.raises(ValueError, match="source: expected each tensor once"):
        Checkpoint([shards[1], checkpoints.save(tmp_path / "other", first, CONFIG) / "model.safetensors"])


def test_an_index_that_another_model_left_is_not_followed(tmp_path):
    """As transformers reads such a folder; vLLM's loader follows the index, so there it is an error."""
    folder = checkpoints.save(tmp_path, tensors(), CONFIG, shards=2)
    (shard, gone) = sorted(folder.glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=f"expected the files that .* names, found no {gone.name}"):
        weights_of(folder, by_index=True)
    checkpoints.save(tmp_path, tensors("q_proj"), CONFIG)
    said = rf"index.json names files that are not there, such as {gone.name}, next to model.safetensors"
    for source in (folder, [folder / "model.safetensors"]):  # the list is what transformers hands on
        with pytest.warns(UserWarning, match=f"{said}: model.safetensors is read"):
            assert set(Checkpoint(source).names()) == set(tensors("q_proj"))
    with pytest.raises(FileNotFoundError, match=f"{said}: delete the index"):
        weights_of(folder, by_index=True)


def test_two_whole_models_in_a_folder_are_an_error(tmp_path):
    folder = checkpoints.save(tmp_path, tensors(), CONFIG, shards=2)
    checkpoints.save(tmp_path, tensors(), CONFIG)
    for source in (folder, [folder / "model.safetensors"]):
        with pytest.raises(ValueError, match=r"expected one model in .*, got model.safetensors and .* with 2 files"):
            Checkpoint(source)
    assert holds(folder / "model.safetensors", "q_proj") and holds(folder / "model.safetensors.index.json", "q_proj")


@pytest.mark.parametrize("file, message", [
    *((file, "files inside the folder of .*'x.weight'") for file in (
        "../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors", 3)),
    *((file, "names of files in .*index.json, got '") for file in (
        "x" * 5000, "a/\0.safetensors", "\ud800.safetensors")),
])  # fmt: skip
def test_an_index_that_points_out_of_its_folder_or_names_what_no_file_can_be_is_refused(tmp_path, file, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x.weight": file}}))
    with pytest.raises(ValueError, match=f"source: expected {message}"):
        Checkpoint(tmp_path)


def test_no_format_is_left_out_of_the_registry():
    import importlib
    import pkgutil

    import jitgemm.checkpoint as room

    modules = [importlib.import_module(f"jitgemm.checkpoint.{m.name}") for m in pkgutil.iter_modules(room.__path__)]
    assert {id(m.FORMAT) for m in modules if hasattr(m, "FORMAT")} == {id(f) for f in formats.FORMATS}
