"""jitgemm.vllm: its config, linears and experts, through vLLM's loaders on every rank, against the dequantised model.

Without vLLM the layers and loaders are vllm_standin's; scripts/vllm_contract.sh runs the same tests on the real ones.
"""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import re
import time
import tomllib
from contextlib import nullcontext
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders import third, two_thirds
from checkpoints import dequantized, words
from fresh_python import fresh_python
from safetensors.torch import save_file
from vllm_cases import (
    BF16,
    CONFIGS,
    E4M3,
    EXPERTS,
    FUSED,
    INT8,
    OF_MXFP8,
    SAVED,
    SHARDS,
    TWO,
    ParallelLMHead,
    applied,
    columns_of,
    dense_of,
    expert_tensors,
    gate_up,
    header,
    kind,
    load,
    load_experts,
    made,
    mixture,
    packed_module,
    process,
    routed,
    row,
    saved_experts,
    scheme,
    stored,
    told,
)
from vllm_cases import (
    vllm_is_there as vllm_is_there,
)
from vllm_cases import (
    workspaces as workspaces,
)
from vllm_layers import REAL, experts, hide, rank, show

import jitgemm
import jitgemm.vllm
from jitgemm.activations.scheme import SILU_MUL, Gate
from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.errors import CacheMissError, CompileError
from jitgemm.nn import W4A8Linear, load_, warmup
from jitgemm.nn.layers.gate import encoded
from jitgemm.nn.recipe import Recipe

show()
jitgemm.vllm.register()

from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import get_quantization_config

from jitgemm.serving import warm
from jitgemm.vllm import config as configs
from jitgemm.vllm.config import JitGemmConfig
from jitgemm.vllm.experts import JitGemmBatchedExperts, JitGemmExperts, JitGemmMoEMethod
from jitgemm.vllm.linear import JitGemmLinearMethod

hide()
ROOT = Path(__file__).resolve().parents[2]
VERSIONS = json.loads((ROOT / "tests" / "helpers" / "vllm_signatures.json").read_text())


# ---- checkpoints -----------------------------------------------------------------------------------------------------


PER_TENSOR = ("fp8", "modelopt")
EIGHT = (*PER_TENSOR, "fp8-blocks", "fp8-blocks-32", "float-quantized", "int8-quantized", "fbgemm", "modelopt-channel")
EIGHT = (*EIGHT, "gptq-int8", "auto-round-fp8", "torchao-fp8", *OF_MXFP8)
LINEAR = [name for name in CONFIGS if name != "w4afp8"]  # whose linears are FP8
OF_INT8 = ("packed-corrected", "qserve")
OF_EXPERTS = [name for name in CONFIGS if name != "torchao-tiles"]  # of which headers tell one expert from several


# ---- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "ours", [JitGemmConfig, JitGemmLinearMethod, JitGemmMoEMethod, JitGemmExperts, JitGemmBatchedExperts]
)
def test_what_is_overridden_has_vllms_signature(ours, version):
    bases = VERSIONS[version]["bases"]
    own = [each for each in ours.__mro__ if each.__module__.startswith("jitgemm")]
    by_name = {path.partition(":")[2]: described for path, described in bases.items()}
    theirs = {}
    for each in reversed(ours.__mro__[len(own) :]):
        theirs |= by_name.get(each.__name__, {})
    members = {name: member for each in reversed(own) for name, member in vars(each).items()}
    checked = 0
    for name, described in theirs.items():
        head, _, rest = described.partition("(")
        assert "abstract" not in head or name in members, f"{name} is abstract in vLLM"
        if name not in members or name == "__init__":
            continue
        raw = members[name]
        function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        mine = [stars.get(each.kind, "") + each.name for each in inspect.signature(function).parameters.values()]
        expected = [part.partition("=")[0] for part in rest[:-1].split(", ") if part]
        assert [each for each in mine if each != "self"] == [each for each in expected if each != "self"], name
        checked += 1
    assert checked >= 3


@pytest.mark.skipif(not REAL, reason="needs vLLM: scripts/vllm_contract.sh runs it")
def test_the_signatures_are_those_of_the_vllm_that_is_installed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from vllm_signatures import signatures

    installed = metadata.version("vllm").partition("+")[0]
    if installed not in VERSIONS:
        pytest.skip(f"scripts/vllm_signatures.py has not been run on {installed}")
    assert signatures() == VERSIONS[installed]


@pytest.mark.skipif(REAL, reason="needs the stand-in: scripts/vllm_contract.sh installs each version")
@pytest.mark.parametrize("version", sorted(VERSIONS)[:-1])
def test_layers_and_experts_work_with_the_signatures_of_older_versions(version):
    """A case of each thing that the plug-in does; the stand-in of this process has the newest version's."""
    files = [f"tests/serving/{name}.py" for name in ("test_vllm", "test_vllm_experts")]
    cases = "add_up and packed-int8 or heads and gptq or taken_over or sorted_by_expert and fp8 or adapter_of_zeros"
    call = ["-q", "-p", "no:cacheprovider", *files, "-k", f"({cases} or joined_layers_that) and not saved"]
    code = f"import os, pytest; os.chdir({str(ROOT)!r}); assert pytest.main({call}) == 0"
    done = fresh_python(code, {"JITGEMM_TEST_VLLM": version})
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 10


def test_vllm_finds_the_plug_in_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["jitgemm"].partition(":")
    register = getattr(import_module(module), name)
    register()
    register()
    assert get_quantization_config("jitgemm") is JitGemmConfig


# ---- the config ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_taken_over_when_asked_and_only_then():
    take = JitGemmConfig.override_quantization_method
    assert [take(CONFIGS["gptq"], user, hf_config=None) for user in ("jitgemm", "gptq", None)] == [
        "jitgemm",
        None,
        None,
    ]


def test_options_come_from_the_quantization_config_and_from_hf_overrides():
    config = JitGemmConfig.from_config({"quant_method": "jitgemm", "activation": "int8", "group_size": 64})
    assert (config.checkpoint, config.recipe) == (None, Recipe(activation="int8", group_size=64))
    config.maybe_update_config("nowhere", hf_config=SimpleNamespace(jitgemm={"activation": "e4m3"}))
    assert config.recipe == Recipe(activation="e4m3", group_size=64)
    nested = JitGemmConfig.from_config({"quant_method": "jitgemm", "checkpoint": CONFIGS["gptq"]})
    assert nested.checkpoint == CONFIGS["gptq"] == JitGemmConfig.from_config(CONFIGS["gptq"]).checkpoint


def test_a_config_travels_to_vllms_workers():
    config = pickle.loads(pickle.dumps(made(CONFIGS["gptq"], {"activation": "int8"})))
    assert (config.checkpoint, config.recipe.activation) == (CONFIGS["gptq"], "int8")
    assert kind(config, "model.a") is JitGemmLinearMethod


@pytest.mark.parametrize(
    "options, message",
    [({"bit": 4}, "jitgemm: expected the options bits, scheme, .*, got bit$"), ({"bits": 3}, "bits: expected 4 or 8, got 3"),
     ({"lm_head": "fp8"}, "lm_head: expected None or one of e4m3, int8"),
     ({"activation": "fp4"}, "activation: expected one of"), ({"ignore": "lm_head"}, "ignore: expected a list"),
     ({"ignore": [5]}, "ignore: expected a list of names, got .5."),
     *(({"group_size": size}, f"group_size: expected {wanted}")
       for size, wanted in {"128": "an int, got str", 0: "one of .* got 0", -5: "one of .* got -5", True: "an int, got bool"}.items()), ("int8", "by name, got 'int8'"),
     ({"ignore": ["re:["]}, "ignore: expected a regular expression, got '.': unterminated character set"),
     ({"symmetric": "no"}, "symmetric: expected a bool, got str"),
     ({"sums": "f64"}, "sums: expected one of .*, got 'f64'"),
     ({"sums": "f16", "activation": "int8"}, "sums: expected 'f32' .* got 'f16' with int8"),
     ({"sums": "exact", "activation": "e4m3"}, "sums: expected 'f32' .* got 'exact' with e4m3")],
)  # fmt: skip
def test_an_option_that_is_wrong_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        JitGemmConfig(None, options)


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"])
@pytest.mark.parametrize(
    "rules, message",
    [("lm_head", "expected a list of names, got 'lm_head'"), ([3], "expected a list of names, got .3."),
     (["lm_head", "re:["], "expected a regular expression, got '.': unterminated character set")],
)  # fmt: skip
def test_names_that_a_checkpoint_leaves_out_are_names(key, rules, message):
    with pytest.raises(ValueError, match=f"^{key}: {message}"):
        JitGemmConfig(CONFIGS["gptq"] | {key: rules})


@pytest.mark.parametrize("rule", ["-:(", "+:(", "("])
def test_an_expression_of_gptqmodels_that_is_none_is_named(rule):
    with pytest.raises(ValueError, match="^dynamic: expected a regular expression, got '.': missing"):
        JitGemmConfig(CONFIGS["gptq"] | {"dynamic": {rule: {}}})


def test_layers_that_the_config_leaves_out_stay():
    ct = made(CONFIGS["packed"] | {"ignore": ["lm_head", "re:.*gate$"]})
    assert kind(ct, "model.layers.0.mlp.gate") is UnquantizedLinearMethod
    assert kind(ct, "model.layers.0.mlp.gate_proj") is JitGemmLinearMethod
    awq = made(CONFIGS["awq"] | {"modules_to_not_convert": ["visual"]})
    assert kind(awq, "visual.blocks.0.proj") is UnquantizedLinearMethod
    assert kind(awq, "visually.proj") is JitGemmLinearMethod
    assert (
        kind(made(CONFIGS["awq"] | {"modules_to_not_convert": ["attn."]}), "m.attn.o_proj") is UnquantizedLinearMethod
    )
    gptq = made(CONFIGS["gptq"] | {"dynamic": {"-:.*o_proj": {}}})
    assert kind(gptq, "model.layers.0.self_attn.o_proj") is UnquantizedLinearMethod


@pytest.mark.parametrize("quantization", ["FP8", "fp8_per_channel_per_token", "NVFP4", "W4A8_AWQ"])
def test_modelopts_config_of_folder_the_files_is_read(monkeypatch, quantization):
    """hf_quant_config.json, as vLLM hands it over."""
    said = {"quant_algo": quantization, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "m.*.gate*"]}
    given = {"producer": {"name": "modelopt"}, "quantization": said, "quant_method": "modelopt"}
    asked = []

    def none(name):
        return SimpleNamespace(from_config=lambda config: asked.append((name, config)) or 1 / 0)

    monkeypatch.setattr(configs, "get_quantization_config", none)
    algorithm = "NVFP4" if quantization == "NVFP4" else "FP8"
    tensors, _ = stored({"quant_method": "modelopt", "quant_algo": algorithm}, 64, 64)
    config = told(given, {"m.0.up": tensors})
    assert kind(config, "m.0.gate") is kind(config, "lm_head") is UnquantizedLinearMethod
    if quantization == "W4A8_AWQ":
        with pytest.raises(ValueError, match="m.0.up: quant_algo: expected FP8 or FP8_PER_CHANNEL.* got 'W4A8_AWQ'"):
            kind(config, "m.0.up")
        assert asked == [("modelopt", given)]
    else:
        assert kind(config, "m.0.up") is JitGemmLinearMethod


def test_a_bound_on_activation_scales_is_said_not_to_be_applied(monkeypatch):
    said = []
    monkeypatch.setattr(configs.logger, "warning_once", lambda text, *given: said.append(text % given))
    assert kind(made(CONFIGS["fbgemm"] | {"activation_scale_ub": None}), "m.a") is JitGemmLinearMethod and not said
    assert kind(made(CONFIGS["fbgemm"]), "m.a") is JitGemmLinearMethod
    assert len(said) == 1 and "activation_scale_ub 1200.0 is not applied" in said[0]


def test_of_a_model_in_floats_routers_ignored_layers_and_odd_sizes_stay():
    config = made(None, {"ignore": ["vision", "re:.*head"]})
    assert kind(config, "model.layers.0.mlp.up_proj") is JitGemmLinearMethod
    assert kind(config, "model.layers.0.mlp.gate", n=8) is UnquantizedLinearMethod
    assert kind(config, "vision.layers.0.up_proj") is UnquantizedLinearMethod
    assert kind(config, "lm_head") is UnquantizedLinearMethod
    assert kind(config, "model.layers.0.mlp.up_proj", k=40) is UnquantizedLinearMethod


def headers(monkeypatch, config, tensors):
    """The config, told of the files' headers as vLLM finds them."""
    found = {name: header(tensor) for name, tensor in tensors.items()}
    module = import_module("vllm.transformers_utils.config")
    monkeypatch.setattr(module, "get_safetensors_params_metadata", lambda model, *, revision=None: found)
    config.maybe_update_config("folder", hf_config=SimpleNamespace())
    return config


def test_an_index_that_names_files_that_are_not_there_is_an_error(tmp_path):
    """vLLM's loader follows the index."""
    index = {"weight_map": {"model.a.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="names, found no model-00001-of-00001.safetensors"):
        made(CONFIGS["gptq"]).maybe_update_config(str(tmp_path), hf_config=SimpleNamespace())
    save_file({"model.a.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="next to model.safetensors: delete the index"):
        made(CONFIGS["gptq"]).maybe_update_config(str(tmp_path), hf_config=SimpleNamespace())


def test_an_index_that_its_files_contradict_is_an_error(tmp_path, monkeypatch):
    """vLLM's loader takes every tensor of every file that the index names; equal copies do no harm."""
    said = []
    monkeypatch.setattr("jitgemm.vllm.config.logger.warning", lambda text, *given: said.append(text % given))
    names, index = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)], tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"m.a.weight": names[0], "m.b.weight": names[1]}}))
    save_file({"m.a.weight": torch.ones(1)}, tmp_path / names[0])
    for a, expected in (
        (torch.ones(1), None),
        (
            torch.zeros(1),
            rf"expected 'm.a.weight' in .*{names[0]} alone, .* another one in {names[1]}, and vLLM's loader",
        ),
        (torch.ones(2), "source: expected 'm.a.weight' in"),
        (torch.ones(1, dtype=torch.int32), "source: expected 'm.a.weight' in"),
    ):
        save_file({"m.a.weight": a, "m.b.weight": torch.ones(1), "m.c.weight": torch.ones(2)}, tmp_path / names[1])
        with nullcontext() if expected is None else pytest.raises(ValueError, match=expected):
            config = made(CONFIGS["gptq"])
            config.maybe_update_config(str(tmp_path), hf_config=SimpleNamespace())
            one = TensorInfo((1,), torch.float32)
            assert config._headers == {"m.a": {"weight": one}, "m.b": {"weight": one}}
            assert said == ["jitgemm: vLLM's loader reads tensors that the index does not name: m.c.weight"]
    save_file({"m.a.weight": torch.ones(1)}, tmp_path / names[1])
    with pytest.raises(ValueError, match=f"expected 'm.b.weight' in .*{names[1]}, as the index says, found none"):
        made(CONFIGS["gptq"]).maybe_update_config(str(tmp_path), hf_config=SimpleNamespace())


def test_headers_of_the_files_say_what_is_quantised_and_how_exact_scales_are(monkeypatch):
    tensors, dense = stored(CONFIGS["gptq"], 64, 64)
    exact = torch.rand(2, 64)  # no bf16 holds these
    names = {f"model.a.{suffix}": tensor for suffix, tensor in (tensors | {"scales": exact}).items()}
    config = headers(monkeypatch, made(CONFIGS["gptq"]), names | {"model.b.weight": "BF16", "model.b.bias": "BF16"})
    assert kind(config, "model.b") is UnquantizedLinearMethod
    with rank():
        layer = ReplicatedLinear(64, 64, bias=False, params_dtype=BF16, quant_config=config, prefix="model.a")
        load(layer, tensors | {"scales": exact})
    q = dense / tensors["scales"].T.double().repeat_interleave(32, 1)
    expected = q * exact.T.double().repeat_interleave(32, 1)
    assert (dense_of(layer.jitgemm) - expected).abs().max() < 1e-6  # packed with the last of the files' tensors
    assert process(layer).weight.format.scale_type == "fp32"


def test_linears_of_a_w4afp8_checkpoint_are_fp8_in_blocks(monkeypatch):
    tensors, dense = stored(CONFIGS["fp8-blocks"], 128, 128)
    names = {f"m.o_proj.{suffix}": tensor for suffix, tensor in tensors.items()}
    for config in (headers(monkeypatch, made(CONFIGS["w4afp8"]), names), made(CONFIGS["w4afp8"])):
        with rank():
            layer = row(config, 128, 128)
            load(layer, tensors)
        assert process(layer).weight.bits == 8 and torch.equal(dense_of(layer.jitgemm), dense)


def test_names_that_a_model_changes_are_found_in_the_files(monkeypatch):
    tensors, dense = stored(CONFIGS["gptq"], 64, 64)
    names = {f"lm.layers.0.{part}_proj.{suffix}": tensor for part in "qkv" for suffix, tensor in tensors.items()}
    config = headers(monkeypatch, made(CONFIGS["gptq"]), names | {"lm.layers.0.o_proj.weight": "BF16"})
    config.apply_vllm_mapper(
        SimpleNamespace(apply_dict=lambda d: {n.replace("lm.", "model."): v for n, v in d.items()})
    )
    assert kind(config, "model.layers.0.o_proj") is UnquantizedLinearMethod
    with rank():
        layer = QKVParallelLinear(
            64, 32, 2, 2, bias=False, params_dtype=BF16, quant_config=config, prefix="model.layers.0.qkv_proj"
        )
        for each in "qkv":
            load(layer, tensors, each)
    assert layer.quant_method.names == [f"lm.layers.0.{part}_proj" for part in "qkv"]
    assert torch.equal(dense_of(layer.jitgemm), torch.cat([dense] * 3))


def test_a_user_leaves_layers_out_by_vllms_names_too(monkeypatch):
    names = {f"model.language_model.layers.0.self_attn.{part}_proj.weight": "BF16" for part in "qkv"}
    config = headers(
        monkeypatch, made(None, {"ignore": ["self_attn.qkv_proj", "language_model.model.layers.1"]}), names
    )
    config.apply_vllm_mapper(
        SimpleNamespace(
            apply_dict=lambda d: {n.replace("model.language_model", "language_model.model"): v for n, v in d.items()}
        )
    )
    for layer, number in (("0.self_attn.qkv_proj", 0), ("1.mlp.down_proj", 0), ("0.mlp.down_proj", 1)):
        found = kind(config, f"language_model.model.layers.{layer}")
        assert found is (UnquantizedLinearMethod, JitGemmLinearMethod)[number]


def test_experts_of_which_some_are_quantised_are_an_error(monkeypatch):
    names = {
        f"m.experts.{e}.{proj}.{suffix}": kind
        for e in range(4)
        for proj in ("gate_proj", "up_proj", "down_proj")
        for suffix, kind in {"weight": "F8_E4M3", "weight_scale_inv": "F32"}.items()
    }
    del names["m.experts.2.down_proj.weight_scale_inv"]
    names["m.experts.2.down_proj.weight"] = "BF16"
    config = headers(monkeypatch, made(CONFIGS["fp8-blocks"]), names)
    with rank(), pytest.raises(ValueError, match="m.experts: expected all or none .*m.experts.2.down_proj': False"):
        experts(config, "m.experts", (4, 128, 128), 2)


def test_an_output_layer_that_the_checkpoint_has_quantised_is_vllms_own(monkeypatch):
    names = {"lm_head.qweight": "I32", "lm_head.scales": "F16", "model.embed_tokens.weight": "BF16"}
    theirs, asked = object(), []
    own = SimpleNamespace(
        get_quant_method=lambda layer, prefix: asked.append(prefix) or theirs, maybe_update_config=lambda *model: None
    )
    monkeypatch.setattr(
        configs, "get_quantization_config", lambda name: SimpleNamespace(from_config=lambda config: own)
    )
    head = SimpleNamespace(num_embeddings=96)
    config = headers(monkeypatch, made(CONFIGS["gptq"], {"lm_head": "e4m3"}), names)
    assert config.get_quant_method(head, "lm_head") is theirs and asked == ["lm_head"]
    assert config.get_quant_method(head, "model.embed_tokens") is None and asked == ["lm_head"]
    floats = headers(monkeypatch, made(None), {"lm_head.weight": "BF16"})
    assert floats.get_quant_method(head, "lm_head") is None
    theirs = None
    with pytest.raises(ValueError, match="lm_head: expected its weight in floats, .* got qweight, scales"):
        config.get_quant_method(head, "lm_head")


def test_how_a_checkpoint_has_its_cache_quantised_is_read_from_vllms_own_config(monkeypatch):
    said = {"strategy": "attn_head", "num_bits": 8, "type": "float"}
    own = SimpleNamespace(kv_cache_scheme=said, maybe_update_config=lambda *model: None)
    monkeypatch.setattr(
        configs, "get_quantization_config", lambda name: SimpleNamespace(from_config=lambda config: own)
    )
    assert made(CONFIGS["packed"] | {"kv_cache_scheme": said}).kv_cache_scheme == said
    assert made(None).kv_cache_scheme is None


def test_layers_that_are_joined_but_quantised_differently_are_an_error():
    config = made(CONFIGS["packed"] | {"ignore": ["model.gate_proj"]})
    with rank(), pytest.raises(ValueError, match="model.gate_up_proj: expected all or none .*'model.gate_proj': False"):
        MergedColumnParallelLinear(
            64, [64, 64], bias=False, params_dtype=BF16, quant_config=config, prefix="model.gate_up_proj"
        )


@pytest.mark.parametrize("form", ["linear", "experts"])
def test_joined_layers_with_different_activations_are_an_error(form):
    group = CONFIGS["packed"]["config_groups"]["group_0"]
    groups = {"a": group | {"targets": ["re:.*up_proj"], "input_activations": INT8}}
    config = CONFIGS["packed"] | {"config_groups": groups | {"b": group | {"input_activations": E4M3}}}
    tensors, _ = stored(CONFIGS["packed"], 64, 64)
    above = "m." if form == "linear" else "m.experts.0."
    config = told(config, {f"{above}{proj}": tensors for proj in SHARDS})
    with rank(), pytest.raises(ValueError, match="gate_proj, .*up_proj.*: expected one way of quantising layers"):
        if form == "linear":
            gate_up(config, 64, 64)
        else:
            experts(config, "m.experts", (2, 64, 64), 1)


@pytest.mark.parametrize("known", [True, False])
def test_joined_layers_that_have_nothing_in_common_are_an_error_without_headers_too(known):
    """Of 4 bits and of 8, by their tensors."""
    tensors = [stored(CONFIGS[name], 64, 64)[0] for name in ("packed", "float-quantized")]
    config = CONFIGS["packed"] | {"config_groups": {
        name: CONFIGS[like]["config_groups"]["group_0"] | {"targets": [f"re:.*{name}_proj"], "format": CONFIGS[like]["format"]}
        for name, like in {"gate": "packed", "up": "float-quantized"}.items()
    }}  # fmt: skip
    said = (
        "expected one way of quantising layers" if known else "prefix: layers to be joined along n must have one width"
    )
    with rank(), pytest.raises(ValueError, match=said):
        config = made(config) if not known else told(config, dict(zip(("m.gate_proj", "m.up_proj"), tensors)))
        layer = gate_up(config, 64, 64)
        for part, each in enumerate(tensors):
            load(layer, each, part)
        process(layer)


def test_what_jitgemm_cannot_read_is_left_to_vllms_own_config(monkeypatch):
    theirs = SimpleNamespace(
        get_quant_method=lambda layer, prefix: UnquantizedLinearMethod(), packed_modules_mapping={},
        maybe_update_config=lambda *args: None, apply_vllm_mapper=lambda mapper: None,
    )  # fmt: skip
    own = SimpleNamespace(from_config=lambda config: theirs)
    monkeypatch.setattr(configs, "get_quantization_config", lambda name: own)
    config = told(CONFIGS["gptq"] | {"bits": 3}, {"model.a": stored(CONFIGS["gptq"], 64, 64)[0]})
    assert kind(config, "model.a") is UnquantizedLinearMethod
    assert theirs.packed_modules_mapping is config.packed_modules_mapping


@pytest.mark.parametrize(
    "name, change, message",
    [("gptq", {"bits": 3}, "bits: expected .*got 3"), ("gptq", {"group_size": -5}, "group_size: .* got -5"),
     ("gptq", {"group_size": 0}, "group_size: .* got 0"), ("awq", {"bits": 8}, "bits: expected 4, got 8"),
     ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: expected gptq"),
     ("fp8", {"weight_block_size": [64]}, "weight_block_size: expected two positive integers, got .64.")],
)  # fmt: skip
def test_a_setting_that_no_reader_takes_is_named_before_a_layer_is_made(monkeypatch, name, change, message):
    def none(name):
        raise ValueError(name)

    monkeypatch.setattr(configs, "get_quantization_config", none)
    with pytest.raises(ValueError, match=f"m.a: {message}"):
        kind(told(CONFIGS[name] | change, {"m.a": stored(CONFIGS[name], 64, 64)[0]}), "m.a")


# ---- linears ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known, name, place", third([True, False], LINEAR, [(0, 1), *TWO]))
def test_joined_columns_hold_the_ranks_rows_of_each_part(name, place, known):
    parts = [stored(CONFIGS[name], 256, 64, seed) for seed in (1, 2)]
    layers = {f"m.{proj}_proj": tensors for proj, (tensors, _) in zip(("gate", "up"), parts)}
    with rank(*place):
        layer = gate_up(told(CONFIGS[name], layers if known else {}), 64, 256)
        for part, (tensors, _) in enumerate(parts):
            assert "jitgemm" not in layer._modules
            load(layer, tensors, part)
    assert ("jitgemm" in layer._modules) == known  # packed with its last tensor, whose memory is free then
    assert not (known and layer.quant_method.matrices[0].kept)
    module = process(layer)
    rows = slice(256 * place[0] // place[1], 256 * (place[0] + 1) // place[1])
    assert torch.equal(dense_of(module), torch.cat([dense[rows] for _, dense in parts]))
    assert not list(layer.parameters()) and module.weight.bits == (8 if name in EIGHT else 4)
    if name in ("packed-static", "modelopt-mxfp4", *PER_TENSOR):
        assert module.input_scale.tolist() == pytest.approx([0.03])  # the largest of both
    block = name in ("fp8-blocks", "fp8-blocks-32", "mxfp4-mxfp8", *OF_MXFP8)
    assert module.activation == ("e4m3_block" if block else "int8" if "int8" in name or name in OF_INT8 else "e4m3")


@pytest.mark.parametrize("name", ["packed", "packed-asymmetric", "gptq", "awq"])
@pytest.mark.parametrize("place", [(0, 1), *TWO, (3, 4)])
def test_q_k_and_v_hold_the_ranks_heads(name, place):
    parts = {
        each: stored(CONFIGS[name], rows, 64, seed)
        for seed, (each, rows) in enumerate((("q", 256), ("k", 128), ("v", 128)))
    }
    with rank(*place):
        layer = QKVParallelLinear(
            64, 64, 4, 2, bias=False, params_dtype=BF16, quant_config=made(CONFIGS[name]), prefix="m.qkv_proj"
        )
        for each, (tensors, _) in parts.items():
            load(layer, tensors, each)
    number, size = place
    heads = 4 // size
    kv = max(1, 2 // size)
    first = number * 2 // size
    q = parts["q"][1][number * heads * 64 : (number + 1) * heads * 64]
    others = [parts[each][1][first * 64 : (first + kv) * 64] for each in "kv"]
    assert torch.equal(dense_of(process(layer)), torch.cat([q, *others]))


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.filterwarnings("error::UserWarning")
def test_k_and_v_that_no_file_holds_are_zeros_and_other_joined_layers_an_error(monkeypatch, name):
    """Gemma 3n and 4 have no k and v in layers that share others', where vLLM makes them all the same."""
    said, real = [], torch.empty
    monkeypatch.setattr("jitgemm.vllm.config.logger.warning_once", lambda text, *given: said.append(text % given))
    monkeypatch.setattr(torch, "empty", lambda *size, **more: dirty(real(*size, **more)))
    tensors, dense = stored(CONFIGS[name], 128, 128)
    with rank():
        layer = QKVParallelLinear(
            128, 64, 2, 2, bias=False, params_dtype=BF16, quant_config=made(CONFIGS[name]), prefix="m.qkv_proj"
        )
        load(layer, tensors, "q")
    found = dense_of(process(layer))
    assert torch.equal(found[:128], dense) and not found[128:].any()
    assert said[-1:] == ["jitgemm: no file holds m.k_proj, m.v_proj: zeros"]
    if name in ("packed-static", "modelopt-mxfp4", *PER_TENSOR):
        assert layer.jitgemm.input_scale.tolist() == pytest.approx([0.01])
    with rank(), pytest.raises(ValueError, match="weights: expected numbers, found none in the files.*m.o_proj"):
        process(row(CONFIGS[name], 128, 128))
    for shards, lacks in (("qk", "v"), ("kv", "q")):
        with rank():
            layer = QKVParallelLinear(
                128, 64, 2, 2, bias=False, params_dtype=BF16, quant_config=made(CONFIGS[name]), prefix="m.qkv_proj"
            )
            for each in shards:
                load(layer, tensors, each)
        with pytest.raises(ValueError, match=f"scale.*: expected numbers, found none in the files.*m.{lacks}_proj"):
            process(layer)
    with rank():  # which vLLM joins by numbers
        layer = MergedColumnParallelLinear(
            128, [128] * 3, bias=False, params_dtype=BF16, quant_config=made(CONFIGS[name]), prefix="m.qkv_proj"
        )
        load(layer, tensors, 0)
    with pytest.raises(ValueError, match="scale.*: expected numbers, found none in the files.*m.k_proj"):
        process(layer)
    for part, lacks in enumerate(("up_proj", "gate_proj")):
        with rank():
            layer = gate_up(CONFIGS[name], 128, 128)
            load(layer, tensors, part)
        with pytest.raises(ValueError, match=f"scale.*: expected numbers, found none in the files.*m.{lacks}"):
            process(layer)


def dirty(tensor):
    """Memory as somebody left it."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.int8).fill_(0x7F)
    return tensor


@pytest.mark.parametrize("known", [True, False], ids=["with headers", "without"])
@pytest.mark.parametrize("name", LINEAR)
def test_the_ranks_columns_of_a_row_parallel_layer_add_up(name, known):
    tensors, dense = stored(CONFIGS[name], 64, 256)
    x, total = torch.randn(5, 256) / 4, torch.zeros(5, 64, dtype=torch.float64)
    config = told(CONFIGS[name], {"m.down_proj": tensors} if known else {})
    for number, size in TWO:
        with rank(number, size):
            layer = row(config, 256, 64, prefix="m.down_proj")
            load(layer, tensors)
        module = process(layer)
        columns = slice(128 * number, 128 * (number + 1))
        assert torch.equal(dense_of(module), dense[:, columns])
        total += layer.quant_method.apply(layer, x[:, columns].to(BF16)).double()
    expected = x.to(BF16).double() @ dense.T
    assert (total - expected).norm() < 0.05 * expected.norm()


WIDE = {
    "packed": scheme(size=128),
    "packed-asymmetric": scheme(size=128, symmetric=False),
    "int-quantized": scheme(size=128, format="int-quantized"),
    "gptq": CONFIGS["gptq"] | {"group_size": 128, "sym": False},
    "awq": CONFIGS["awq"] | {"group_size": 128},
    "w4afp8": CONFIGS["w4afp8"] | {"group_size": 128},
    "fp8-blocks": CONFIGS["fp8-blocks"],
}
"""Formats with groups of 128."""


@pytest.mark.parametrize("name", [name for name in WIDE if name != "w4afp8"])
@pytest.mark.parametrize("k, size", [(896, 2), (768, 4), (384, 4)])
def test_a_row_parallel_cut_through_groups_gives_each_rank_its_columns(name, k, size):
    """A rank loads every group that its columns touch; the ranks side by side are the layer."""
    tensors, dense = stored(WIDE[name], 64, k)
    layers, parts = [], []
    for number in range(size):
        with rank(number, size):
            layers.append(row(WIDE[name], k, 64, prefix="m.down_proj"))
            load(layers[-1], tensors)
    with pytest.warns(UserWarning, match="a rank's columns end inside groups of 128: scales are repeated over groups"):
        modules = list(map(process, layers))
    for layer, module in zip(layers, modules):
        assert module.in_features == k // size
        parts.append(dense_of(module))
        x = torch.randn(3, k // size, dtype=BF16)
        found, wanted = layer.quant_method.apply(layer, x).double(), x.double() @ parts[-1].T
        assert (found - wanted).norm() < 0.06 * wanted.norm()
    assert torch.equal(torch.cat(parts, 1), dense)


@pytest.mark.parametrize("size", [1, 2])
def test_a_last_group_of_fewer_columns_needs_no_order_of_columns(size):
    """192 columns in groups of 128, on a rank or two."""
    tensors, dense = stored(WIDE["gptq"], 64, 256)
    del tensors["g_idx"]
    parts = []
    for number in range(size):
        with rank(number, size):
            layer = row(WIDE["gptq"], 192, 64)
            load(layer, tensors | {"qweight": tensors["qweight"][:24]})
        parts.append(dense_of(process(layer)))
    assert torch.equal(torch.cat(parts, 1), dense[:, :192])


@pytest.mark.parametrize("k", [256, 320])
def test_columns_of_blocks_that_ranks_share_rows_of_hold_the_ranks_rows(k):
    """Rows of 320 / 2 end inside of blocks of 128: of joined layers, and of one whose ranks share blocks."""
    config = CONFIGS["fp8-blocks"]
    parts = [stored(config, 320, k, seed) for seed in (1, 2)]
    for number, size in TWO:
        rows = slice(160 * number, 160 * (number + 1))
        with rank(number, size):
            layer = gate_up(config, k, 320)
            for part, (tensors, _) in enumerate(parts):
                load(layer, tensors, part)
            single = ColumnParallelLinear(
                k, 320, bias=False, params_dtype=BF16, quant_config=made(config), prefix="m.q_b_proj"
            )
            load(single, parts[0][0])
        assert torch.equal(dense_of(process(layer)), torch.cat([dense[rows] for _, dense in parts]))
        assert torch.equal(dense_of(process(single)), parts[0][1][rows])
        assert layer.jitgemm.activation == single.jitgemm.activation == "e4m3_block"


@pytest.mark.parametrize(
    "name", ["packed-channel", "packed-tensor", "gptq-channel", "fp8", "fp8-blocks", "int8-quantized"]
)
def test_columns_in_multiples_of_16(name):
    tensors, dense = stored(CONFIGS[name], 64, 96)
    places = [(0, 1)] if name == "fp8-blocks" else TWO  # 96 columns, or 48 on each rank
    for number, size in places:
        with rank(number, size):
            layer = row(CONFIGS[name], 96, 64, prefix="m.down_proj")
            load(layer, tensors)
        assert torch.equal(dense_of(process(layer)), dense.chunk(size, 1)[number])
    with rank():
        layer = row(CONFIGS[name], 48, 64)
        tensors, dense = stored(CONFIGS[name], 64, 48)
        load(layer, tensors)
    assert torch.equal(dense_of(process(layer)), dense)


@pytest.mark.parametrize("order", ["in the file", "in no file"])
def test_the_last_group_may_be_short(order):
    q, scale, group = torch.randint(-8, 8, (64, 80)), torch.rand(64, 3).to(BF16), torch.arange(80) // 32
    tensors = {"qweight": words(q.T + 8, 0), "qzeros": words(torch.full((3, 64), 7), 1), "scales": scale.T}
    with rank():
        layer = row(CONFIGS["gptq"], 80, 64)
        load(layer, tensors | ({"g_idx": group.int()} if order == "in the file" else {}))
    assert torch.equal(dense_of(process(layer)), dequantized(q, scale, None, group))


def test_a_layer_computes_what_w4a8linear_does_with_bias_and_any_leading_sizes():
    tensors, _ = stored(CONFIGS["packed"], 64, 64)
    with rank():
        layer = row(CONFIGS["packed"], 64, 64, bias=True)
        load(layer, tensors)
    bias = torch.randn(64, dtype=BF16)
    own = W4A8Linear(process(layer).weight, bias)
    x = torch.randn(2, 3, 64, dtype=BF16)
    apply = layer.quant_method.apply
    assert torch.equal(apply(layer, x, bias), own(x)) and apply(layer, x).shape == (2, 3, 64)
    half = x.to(torch.float16)
    assert torch.equal(apply(layer, half, bias.half()), W4A8Linear(own.weight, bias.half())(half))


@pytest.mark.parametrize(
    "name", ["packed", "packed-static", "gptq", "awq", "fp8", "fp8-blocks", "float-quantized", None]
)
def test_mla_gets_a_layers_weight_and_lora_its_device(name):
    """From the attributes that vLLM knows, and a product with an identity: no static scale may round that."""
    with rank():
        if name is None:
            layer = row(made(None, {"bits": 8}), 128, 128, prefix="m.kv_b_proj")
            dense = torch.randn(128, 128, dtype=BF16)
            load(layer, {"weight": dense})
        else:
            layer = row(CONFIGS[name], 128, 128, prefix="m.kv_b_proj")
            tensors, dense = stored(CONFIGS[name], 128, 128)
            load(layer, tensors | ({"input_scale": torch.tensor([1e-4])} if "input_scale" in tensors else {}))
        module = process(layer)
    if REAL:
        from vllm.lora.layers.utils import _get_lora_device
        from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

        assert _get_lora_device(layer) == module.blocks.device
        found = get_and_maybe_dequant_weights(layer, out_dtype=BF16)
    else:
        found = layer.quant_method.apply(layer, torch.eye(128, dtype=BF16)).T
    assert not torch.equal(layer.weight, layer.weight)  # as vLLM asks of the heads of two models, to share one
    assert (layer.weight.device, layer.weight.dtype) == (module.blocks.device, BF16)  # MLA's input is cast to it
    exact = dense_of(module)
    assert ((found.double() - exact).abs() <= exact.abs() / 256 + 1e-30).all()


def test_a_layer_traces_into_one_graph_for_any_number_of_tokens():
    tensors, _ = stored(CONFIGS["packed"], 64, 64)
    with rank():
        layer = row(CONFIGS["packed"], 64, 64)
        load(layer, tensors)
    process(layer)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x), fullgraph=True, dynamic=True, backend=count)
    for m in (7, 2, 64):
        x = torch.randn(m, 64, dtype=BF16)
        assert torch.equal(compiled(x), layer.quant_method.apply(layer, x))
    assert len(graphs) == 1


def in_order(k, size, shuffled):
    order = torch.arange(k) // size
    return (order[torch.randperm(k)] if shuffled else order).to(torch.int32)


def test_an_activation_order_is_kept_by_column_parallel_layers():
    config = CONFIGS["gptq"] | {"desc_act": True}
    tensors, dense = stored(config, 64, 64)
    order = in_order(64, 32, True)
    tensors["g_idx"] = order
    q = dense / (tensors["scales"].T.double()[:, torch.arange(64) // 32])
    dense = q * tensors["scales"].T.double()[:, order.long()]
    for place in TWO:
        with rank(*place):
            layer = gate_up(config, 64, 64)
            for part in (0, 1):
                load(layer, tensors, part)
        weight = process(layer).weight
        mine = dense[32 * place[0] : 32 * (place[0] + 1)]
        found = torch.empty(64, 64, dtype=torch.float64)
        found[:, weight.permutation.long()] = weight.dequantize().double()
        assert torch.equal(found, torch.cat([mine, mine]))


def test_joined_layers_with_different_activation_orders_are_an_error():
    config = CONFIGS["gptq"] | {"desc_act": True}
    tensors, _ = stored(config, 64, 64)
    with rank():
        layer = gate_up(config, 64, 64)
        for part in (0, 1):
            load(layer, tensors | {"g_idx": in_order(64, 32, True)}, part)
        with pytest.raises(ValueError, match="must have one permutation, got different ones.*m.gate_proj, m.up_proj"):
            process(layer)


@pytest.mark.parametrize("form", ["linear", "experts"])
def test_scales_that_the_models_type_cannot_hold_are_kept_without_headers_too(form):
    tensors, dense = stored(CONFIGS["gptq"], 64, 64)
    scales = torch.rand(2, 64)
    expected = (
        dense / tensors["scales"].T.double().repeat_interleave(32, 1) * scales.T.double().repeat_interleave(32, 1)
    )
    tensors["scales"] = scales
    with rank():
        if form == "linear":
            layer = row(CONFIGS["gptq"], 64, 64)
            load(layer, tensors)
        else:
            layer = experts(made(CONFIGS["gptq"]), "m.experts", (2, 64, 64), 1)
            load_experts(layer, "m.experts", {(e, proj): tensors for e in range(2) for proj in SHARDS})
        module = process(layer)
    found = module.weight if form == "linear" else module.w2.weight[1]
    assert (found.dequantize().double() - expected).abs().max() < 1e-6


def test_an_activation_order_that_is_not_loaded_is_an_error():
    config = CONFIGS["gptq"] | {"desc_act": True}
    tensors, _ = stored(config, 64, 64)
    del tensors["g_idx"]
    with rank():
        layer = row(config, 64, 64)
        load(layer, tensors)
    with pytest.raises(ValueError, match="g_idx: expected the columns' groups, .* found none .layer 'm.o_proj'"):
        process(layer)


@pytest.mark.parametrize("config, sizes, reason", [
    (CONFIGS["packed-channel"], (64, 72), "multiples of 8"),
    (CONFIGS["gptq"] | {"desc_act": True}, (64, 128), "no activation order"),
    (CONFIGS["awq"] | {"group_size": 48}, (64, 768), "group_size: expected a multiple of 32, got 48"),
    (CONFIGS["packed"], (64, 192), "columns in multiples of 32 in groups of 32 on each rank, got 48"),
    (CONFIGS["gptq-int8"] | {"sym": False}, (64, 256), "zero points: expected none with 8-bit integers"),
    (CONFIGS["gptq"] | {"pack_dtype": "int16"}, (64, 256), "pack_dtype: expected int32, got 'int16'"),
    (CONFIGS["awq"] | {"backend": "llm-awq"}, (64, 256), "backend: expected autoawq, got 'llm-awq'"),
    (CONFIGS["auto-round-fp8"] | {"fmt": "e5m2"}, (64, 256), "fmt: expected e4m3, got 'e5m2'"),
])  # fmt: skip
def test_a_layer_that_cannot_be_cut_so_is_left_to_vllm_or_an_error(monkeypatch, config, sizes, reason):
    def none(name):
        raise ValueError(name)

    monkeypatch.setattr(configs, "get_quantization_config", none)
    n, k = sizes
    config = told(config, {"m.down_proj": stored(config, n, k)[0]})
    with rank(0, 4), pytest.raises(ValueError, match=f"m.down_proj: .*{reason}"):
        row(config, k, n, prefix="m.down_proj")


def test_joined_layers_have_one_say_on_zero_points():
    config = CONFIGS["gptq"] | {"dynamic": {"+:.*up_proj": {"sym": False}}}
    config = told(config, dict.fromkeys(("m.gate_proj", "m.up_proj"), stored(CONFIGS["gptq"], 64, 64)[0]))
    with rank(), pytest.raises(ValueError, match="m.gate_proj, m.up_proj: expected one way of quantising layers"):
        gate_up(config, 64, 64)


@pytest.mark.parametrize("value", [0, 3, 8])
def test_zero_points_of_a_symmetric_layer_are_not_read(value):
    tensors, dense = stored(CONFIGS["gptq"], 64, 64)
    tensors["qzeros"] = words(torch.full((2, 64), value), 1)
    with rank():
        layer = row(CONFIGS["gptq"], 64, 64)
        load(layer, tensors)
    assert torch.equal(dense_of(process(layer)), dense)


def test_tensors_whose_memory_a_loader_uses_again_are_copied(monkeypatch):
    """As --load-format runai_streamer does."""
    given = SimpleNamespace(load_config=SimpleNamespace(load_format="runai_streamer"))
    monkeypatch.setattr(configs, "get_current_vllm_config_or_none", lambda: given)
    weights, memory = [torch.randn(64, 64, dtype=BF16) for _ in range(2)], torch.empty(64, 64, dtype=BF16)
    with rank():
        layer = gate_up(None, 64, 64, {"group_size": 32})
        for part, weight in enumerate(weights):
            load(layer, {"weight": memory.copy_(weight)}, part)
        module = process(layer)
    expected = torch.cat(weights).double()
    assert (dense_of(module) - expected).norm() < 0.12 * expected.norm()


@pytest.mark.parametrize("bits, activation", [(4, None), (4, "int8"), (8, "e4m3"), (8, "int8")])
def test_a_layer_in_floats_is_quantised_while_it_is_loaded(bits, activation):
    weights = [torch.randn(64, 64, dtype=BF16) for _ in range(2)]
    with rank():
        layer = gate_up(None, 64, 64, {"bits": bits, "activation": activation, "group_size": 32 if bits == 4 else None})
        for part, weight in enumerate(weights):
            load(layer, {"weight": weight}, part)
        layer.quant_method.process_weights_after_loading(layer)
    expected = torch.cat(weights).double()
    assert (dense_of(layer.jitgemm) - expected).norm() < (0.12 if bits == 4 else 0.03) * expected.norm()
    assert layer.jitgemm.activation == (activation or "e4m3") and not list(layer.parameters())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["packed", "fp8", "w4afp8", "gptq", "awq", "nvfp4", "qserve"])
def test_weights_that_are_loaded_again_go_to_the_same_memory(name, known):
    absent = {"g_idx", "input_scale"} if name in ("w4afp8", "gptq") else set()
    first, second = (stored(CONFIGS[name], 64, 64, seed) for seed in (1, 2))
    first, tensors = (
        {suffix: each for suffix, each in found.items() if suffix not in absent} for found, _ in (first, second)
    )
    config = told(CONFIGS[name], {"m.o_proj": first} if known else {})
    with rank():
        layer = row(config, 64, 64)
        names = dict(layer.named_parameters())
        load(layer, first)
    assert ("jitgemm" in layer._modules) == known  # with the last tensor, if headers tell that it is
    address = process(layer).blocks.data_ptr()
    for each in (*layer._parameters, *layer._buffers):  # as vLLM does
        delattr(layer, each)
    for each, param in names.items():
        layer.register_parameter(each, param)
        param.data.fill_(1)  # vLLM's are of anything then
    with rank():
        load(layer, tensors)
    assert process(layer).blocks.data_ptr() == address and torch.equal(dense_of(layer.jitgemm), second[1])
    assert (layer.jitgemm.input_scale is None) == (name != "fp8")


@pytest.mark.parametrize("name, sums", [("packed", "f16"), ("packed-int8", "exact")])
def test_what_kernels_may_add_up_in_is_an_option_that_a_layer_keeps(name, sums):
    config = made(CONFIGS[name], {"sums": sums})
    with rank():
        layer = row(config, 64, 64)
        params = dict(layer.named_parameters())
        load(layer, stored(CONFIGS[name], 64, 64, 1)[0])
        first = process(layer)
        assert first.sums == first.call_sums == sums
        powers = first.channel_scale
        before = None if powers is None else (powers.data_ptr(), powers.clone())
        for each in (*layer._parameters, *layer._buffers):  # vLLM loads again
            delattr(layer, each)
        for each, param in params.items():
            layer.register_parameter(each, param)
        tensors, _ = stored(CONFIGS[name], 64, 64, 2)
        load(layer, tensors | {"weight_scale": tensors["weight_scale"] * 4})
        assert process(layer) is first and first.sums == first.call_sums == sums
    if before is not None:
        assert first.channel_scale.data_ptr() == before[0] and not torch.equal(first.channel_scale, before[1])


def test_a_layer_whose_scales_f16_does_not_hold_is_named_and_served(monkeypatch):
    said = []
    monkeypatch.setattr(configs.logger, "warning", lambda text, *given: said.append(text % given))
    with rank():
        layer = row(made(CONFIGS["packed"], {"sums": "f16"}), 64, 64)
        tensors, dense = stored(CONFIGS["packed"], 64, 64)
        tensors["weight_scale"][3, 1] *= 2.0**-20
        load(layer, tensors)
        module = process(layer)
    assert (module.sums, module.call_sums) == ("f16", "f32")
    expected = "jitgemm: m.o_proj is added up in fp32, as sums in f16 cannot be had: scales that f16 does not hold"
    assert said == [expected]


def test_sums_that_a_files_activations_do_not_have_are_an_error_with_the_layers_name():
    with rank():
        layer = row(made(CONFIGS["packed-int8"], {"sums": "f16"}), 64, 64)
        load(layer, stored(CONFIGS["packed-int8"], 64, 64)[0])
        with pytest.raises(ValueError, match=r"sums: .* got 'f16' with int8 \(layer m.o_proj\)"):
            process(layer)


@pytest.mark.parametrize("kind, sums", [("4 bits", ("f16", "f16")), ("per channel", ("f32", "f32"))])
def test_experts_are_added_up_as_the_option_says(tmp_path, kind, sums):
    config = saved_experts(tmp_path, packed_module(kind))
    config._set({"sums": "f16"})
    with rank():
        layer = experts(config, "m.experts", (4, 128, 384), 1)
        module = process(layer)
    assert (module.w13.call_sums, module.w2.call_sums) == sums


# ---- files that lack a tensor ----------------------------------------------------------------------------------------

MAY_LACK = {"weight_shape": CONFIGS, "g_idx": CONFIGS, "input_scale": (*PER_TENSOR, "modelopt-mxfp4", "modelopt-nvfp4"),
            "input_global_scale": CONFIGS, "zeros": ("executorch",)}  # fmt: skip
"""What a layer can be read without, and in which formats."""


def dropped(name, *seeds, sizes=(128, 128)):
    """Each suffix that the format needs, and the tensors of layers of which the last lacks it."""
    found = [stored(CONFIGS[name], *sizes, seed)[0] for seed in seeds]
    for suffix in found[-1]:
        if name not in MAY_LACK.get(suffix, ()):
            yield suffix, [*found[:-1], {each: tensor for each, tensor in found[-1].items() if each != suffix}]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", LINEAR)
def test_a_tensor_that_no_file_holds_is_an_error_of_every_loader(name, known):
    """Of a row-parallel layer; of joined ones, where the others have it; for `load_`."""
    whole = dict.fromkeys(
        ("m.o_proj", *(f"m.{part}_proj" for part in ("gate", "up", *"qkv"))), stored(CONFIGS[name], 128, 128)[0]
    )
    config = told(CONFIGS[name], whole if known else {})
    for suffix, (tensors,) in dropped(name, 0):
        with rank():
            layer = row(config, 128, 128)
            load(layer, tensors)
        said = rf"^{suffix}: expected numbers, found none in the files .layer m.o_proj" if known else "m.o_proj"
        with pytest.raises(ValueError, match=said):
            process(layer)
        model = torch.nn.ModuleDict({"o_proj": torch.nn.Linear(128, 128, bias=False)})
        with pytest.raises(ValueError, match="o_proj"):
            load_(model, {f"o_proj.{each}": tensor for each, tensor in tensors.items()}, config=CONFIGS[name])
    for suffix, parts in dropped(name, 0, 1):
        with rank():
            layer = gate_up(config, 128, 128)
            for part, tensors in enumerate(parts):
                load(layer, tensors, part)
        with pytest.raises(ValueError, match=rf"^{suffix}: expected numbers, .* .layer m.up_proj"):
            process(layer)
    for suffix, parts in dropped(name, 0, 1, 2):
        with rank():
            layer = QKVParallelLinear(
                128, 64, 2, 2, bias=False, params_dtype=BF16, quant_config=config, prefix="m.qkv_proj"
            )
            for part, tensors in zip("qkv", parts):
                load(layer, tensors, part)
        with pytest.raises(ValueError, match=rf"^{suffix}: expected numbers, .* .layer m.v_proj"):
            process(layer)


@pytest.mark.parametrize("name, wrong", third(LINEAR, [torch.float64, torch.complex64, torch.int16]))
def test_a_tensor_of_a_type_that_its_format_has_not_is_an_error(name, wrong):
    tensors, _ = stored(CONFIGS[name], 128, 128)
    for suffix, tensor in tensors.items():
        if name in MAY_LACK.get(suffix, ()) and (suffix, name) != ("input_scale", "fp8"):
            continue  # which says nothing of the weight, or may be of any type
        with rank():
            layer = row(CONFIGS[name], 128, 128)
            load(layer, tensors | {suffix: torch.zeros(tensor.shape, dtype=wrong)})
            with pytest.raises(ValueError, match=f"{suffix}.*m.o_proj"):
                process(layer)


def test_floats_of_any_type_are_rounded_and_codes_are_not_taken_for_them():
    weight = torch.randn(64, 64, dtype=torch.float64)
    with rank():
        layer = row(made(None), 64, 64)
        load(layer, {"weight": weight})
        layer = row(made(None), 64, 64)  # vLLM packs one that is complete
        with pytest.raises(ValueError, match="weight: expected .*float64, got float8_e4m3fn .layer m.o_proj"):
            load(layer, {"weight": weight.to(torch.float8_e4m3fn)})


def test_scales_in_blocks_may_be_powers_of_two_of_every_type():
    tensors, _ = stored(CONFIGS["fp8-blocks"], 128, 128)
    powers = torch.tensor([[120]], dtype=torch.uint8)
    found = []
    for scale in (powers, powers.view(torch.float8_e8m0fnu), torch.tensor([[2.0**-7]])):
        with rank():
            layer = row(CONFIGS["fp8-blocks"], 128, 128)
            load(layer, tensors | {"weight_scale_inv": scale})
        found.append(dense_of(process(layer)))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2]) and found[2].any()


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_tensor_of_one_expert_that_no_file_holds_is_an_error(name):
    """Of any of its layers, on the rank that has the expert."""
    tensors, _ = expert_tensors(CONFIGS[name], 4, 128, 128)
    for proj, part in (("gate_proj", "w13"), ("up_proj", "w13"), ("down_proj", "w2")):
        for suffix in tensors[3, proj]:
            lacks = {key: found for key, found in tensors.items()}
            lacks[3, proj] = {each: tensor for each, tensor in tensors[3, proj].items() if each != suffix}
            for place in TWO:
                with rank():
                    layer = experts(made(CONFIGS[name]), "m.experts", (4, 128, 128), 1, ep=place)
                    load_experts(layer, "m.experts", lacks)
                if place[0] and suffix not in MAY_LACK.keys() - {"zeros"}:
                    with pytest.raises(ValueError, match=f"^{part}_{suffix}: expected .* for number 3's {proj}"):
                        layer.quant_method.process_weights_after_loading(layer)
                else:
                    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("form", ["linear", "joined", "experts"])
def test_weights_in_floats_that_no_file_holds_are_an_error(form):
    weight = {"weight": torch.randn(64, 64, dtype=BF16)}
    with rank():
        if form == "experts":
            layer = experts(made(None), "m.experts", (2, 64, 64), 1)
            load_experts(layer, "m.experts", {(0, proj): weight for proj in SHARDS} | {(1, "gate_proj"): weight})
        else:
            layer = row(made(None), 64, 64) if form == "linear" else gate_up(None, 64, 64)
        with pytest.raises(ValueError, match="weight: expected numbers.* found none in the files"):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("name", [None, *LINEAR])
def test_weights_that_vllm_makes_up_are_packed_in_the_files_form(monkeypatch, name):
    """--load-format dummy: it calls no loaders."""
    said = SimpleNamespace(
        load_config=SimpleNamespace(load_format="dummy"), scheduler_config=None, compilation_config=None
    )
    tensors = {"weight": torch.randn(128, 128, dtype=BF16)} if name is None else stored(CONFIGS[name], 128, 128)[0]
    layers = {"m.o_proj": tensors} | {f"m.experts.{e}.{proj}": tensors for e in range(2) for proj in SHARDS}
    config = told(name and CONFIGS[name], layers)
    with rank():
        real = row(config, 128, 128)
        load(real, tensors)
        expected = process(real)
        monkeypatch.setattr("jitgemm.vllm.config.get_current_vllm_config_or_none", lambda: said)
        layers = [row(config, 128, 128), experts(config, "m.experts", (2, 128, 128), 1)]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    module, fused = (layer.jitgemm for layer in layers)
    assert module.activation == fused.activation == expected.activation
    for weight in (module.weight, fused.w13.weight, fused.w2.weight):
        assert weight.bits == expected.weight.bits
        assert weight.group_size == expected.weight.group_size or name == "torchao-tiles"  # whose data alone tell it
        assert weight.dequantize().isfinite().all() and weight.dequantize().any()
    assert module.weight.format.code == expected.weight.format.code or name == "qserve"


def test_weights_that_vllm_makes_up_without_headers_are_quantised_as_the_options_say(monkeypatch):
    said = SimpleNamespace(
        load_config=SimpleNamespace(load_format="dummy"), scheduler_config=None, compilation_config=None
    )
    monkeypatch.setattr("jitgemm.vllm.config.get_current_vllm_config_or_none", lambda: said)
    config = made(CONFIGS["gptq"], {"bits": 8})
    with rank():
        layers = [row(config, 64, 64), experts(config, "m.experts", (2, 64, 64), 1)]
    for layer in layers:
        for param in layer.parameters():
            param.data.fill_(1)
        layer.quant_method.process_weights_after_loading(layer)
    assert layers[0].jitgemm.weight.bits == layers[1].jitgemm.w13.weight.bits == 8


def test_what_torchaos_files_say_of_a_layer_is_read(tmp_path):
    """Its class, which tensors of these sizes do not tell, and its activations."""
    q, scale = torch.randint(-8, 8, (64, 64), dtype=torch.int8), (torch.rand(64, 2) + 0.5).to(BF16)
    zero = torch.randint(-7, 8, (64, 2), dtype=torch.int8)
    tensors = {"_weight_qdata": q, "_weight_scale": scale, "_weight_zero_point": zero}
    said = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"activation_quantization": "int8_asym_per_token"}}
    metadata = {"m.o_proj.weight": json.dumps(said), "format": "pt"}
    save_file(
        {f"m.o_proj.{suffix}": each for suffix, each in tensors.items()}, tmp_path / "model.safetensors", metadata
    )
    config = made(CONFIGS["torchao"])
    config.maybe_update_config(str(tmp_path), hf_config=SimpleNamespace())
    with rank():
        layer = row(config, 64, 64)
        load(layer, tensors)
    assert layer.jitgemm.activation == "int8_affine"
    assert torch.equal(dense_of(process(layer)), dequantized(q, scale, zero))


@pytest.mark.parametrize("name", ["packed", "gptq", "fp8"])
def test_layers_that_the_file_has_joined_are_loaded_at_once(name):
    """As Phi-3's: one tensor of each kind, one scale for both where it is per tensor."""
    tensors, dense = stored(CONFIGS[name], 128, 64)
    with rank():
        layer = gate_up(CONFIGS[name], 64, 64)
        load(layer, tensors)
    assert torch.equal(dense_of(process(layer)), dense)


@pytest.mark.parametrize("name", ["packed-asymmetric", "gptq", "fp8"])
def test_a_joined_layer_that_is_loaded_again_without_a_tensor_is_an_error(name):
    parts = [stored(CONFIGS[name], 64, 64, seed)[0] for seed in (0, 1)]
    with rank():
        layer = gate_up(CONFIGS[name], 64, 64)
        names = dict(layer.named_parameters())
        for part, tensors in enumerate(parts):
            load(layer, tensors, part)
        process(layer)
        for each in (*layer._parameters, *layer._buffers):  # as vLLM does
            delattr(layer, each)
        for each, param in names.items():
            layer.register_parameter(each, param)
        load(layer, parts[0], 0)
        load(layer, {each: tensor for each, tensor in parts[1].items() if "scale" not in each}, 1)
    with pytest.raises(ValueError, match="scale.*: expected numbers, found none in the files .layer m.up_proj"):
        process(layer)


# ---- FP8 per tensor as transformers writes it -------------------------------------------------------------------------

FINEGRAINED = CONFIGS["fp8"] | {"weight_block_size": None}
SPELT = {"weight": "weight", "weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}


def spelt(tensors):
    """Under transformers' names."""
    return {SPELT[suffix]: tensor for suffix, tensor in tensors.items()}


def fp8_headers(monkeypatch, layers):
    found = {f"{name}.{suffix}": tensor for name, parts in layers.items() for suffix, tensor in spelt(parts).items()}
    return headers(monkeypatch, made(FINEGRAINED), found)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("place", [(0, 1), *TWO])
def test_fp8_per_tensor_is_loaded_by_transformers_names(monkeypatch, mapped, place):
    """Some of vLLM's models map them to its own names, as Mistral3's."""
    pairs = [stored(CONFIGS["fp8"], 64, 128, seed) for seed in (0, 1)]
    config = fp8_headers(monkeypatch, dict.fromkeys(("m.gate_proj", "m.up_proj", "m.o_proj"), pairs[0][0]))
    if mapped:
        back = {new: old for old, new in SPELT.items()}

        def apply_dict(values):
            parts = {name: name.rpartition(".") for name in values}
            return {f"{a}{dot}{back.get(last, last)}": values[name] for name, (a, dot, last) in parts.items()}

        config.apply_vllm_mapper(SimpleNamespace(apply_dict=apply_dict))
    number, size = place
    with rank(*place):
        layer, other = gate_up(config, 128, 64), row(config, 128, 64)
        for part, (tensors, _) in enumerate(pairs):
            load(layer, tensors if mapped else spelt(tensors), part)
        load(other, pairs[0][0] if mapped else spelt(pairs[0][0]))
    mine = slice(64 // size * number, 64 // size * (number + 1))
    module = process(layer)
    assert torch.equal(dense_of(module), torch.cat([dense[mine] for _, dense in pairs]))
    assert module.input_scale.tolist() == pytest.approx([0.02]) and not list(layer.parameters())
    assert torch.equal(dense_of(process(other)), pairs[0][1].chunk(size, 1)[number])


def test_experts_in_fp8_per_tensor_are_loaded_by_transformers_names(monkeypatch):
    tensors, dense = expert_tensors(CONFIGS["fp8"], 4, 64, 64)
    config = fp8_headers(monkeypatch, {f"m.mlp.experts.{e}.{proj}": each for (e, proj), each in tensors.items()})
    with rank():
        layer = experts(config, "m.mlp.experts", (4, 64, 64), 2)
        load_experts(layer, "m.mlp.experts", {each: spelt(found) for each, found in tensors.items()})
        layer.quant_method.process_weights_after_loading(layer)
    for e in range(4):
        gate, up, down = (dense[e, proj] for proj in SHARDS)
        assert torch.equal(layer.jitgemm.w13.weight[e].dequantize().double(), torch.cat([gate, up]))
        assert torch.equal(layer.jitgemm.w2.weight[e].dequantize().double(), down)


def test_stacked_experts_in_fp8_with_a_scale_for_each_are_an_error_before_they_are_made(monkeypatch):
    names = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")
    config = headers(monkeypatch, made(FINEGRAINED), {f"m.mlp.experts.{name}": "F32" for name in names})
    with (
        rank(),
        pytest.raises(ValueError, match="m.mlp.experts.*: expected the scales of experts .* got gate_up_proj_s"),
    ):
        experts(config, "m.mlp.experts", (4, 64, 64), 2)


# ---- models that jitgemm saved ---------------------------------------------------------------------------------------


def saved(monkeypatch, layers, **more):
    """The config of a model that holds these layers by the files' names."""
    found = {f"{name}.{suffix}": "U8" for name, layer in layers.items() for suffix in layer.state_dict()}
    return headers(monkeypatch, JitGemmConfig.from_config({"quant_method": "jitgemm"}), found | more)


@pytest.mark.parametrize("model_type, name, served", [
    ("falcon", "saved", False), ("falcon", "gptq", True), ("falcon", "packed", True), ("bloom", "saved", False),
    ("bloom", "gptq", False), ("gpt_neox", "int8-quantized", True), ("chatglm", "gptq", True),
])  # fmt: skip
def test_models_whose_rows_vllm_sorts_are_served_from_tensors_with_rows(monkeypatch, model_type, name, served):
    if name == "saved":
        config = saved(monkeypatch, {"m.query_key_value": SAVED["4 bits"](192, 128)})
    else:
        config = told(CONFIGS[name], {"m.query_key_value": stored(CONFIGS[name], 192, 128)[0]})
    config._model = ("", SimpleNamespace(model_type=model_type), None)

    def layer():
        return QKVParallelLinear(
            128, 64, 1, 1, bias=False, params_dtype=BF16, quant_config=config, prefix="m.query_key_value"
        )

    with rank(0, 1):
        if served:
            assert isinstance(layer().quant_method, JitGemmLinearMethod)
        else:
            try:  # vLLM's own kernels serve it, if it has some
                theirs = layer().quant_method
                assert name != "saved" and not isinstance(theirs, JitGemmLinearMethod)
            except ValueError as error:
                assert "query_key_value: expected tensors with a row each" in str(error)


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("place", [(0, 1), *TWO, (3, 4)])
def test_a_saved_models_joined_layers_hold_the_ranks_rows_of_each(monkeypatch, kind, place):
    """Heads of 40 rows, which begin inside of the strips that a packed weight is in; k and v are two ranks' each."""
    torch.manual_seed(0)
    layers = {f"m.{each}_proj": SAVED[kind](rows, 128) for each, rows in (("q", 160), ("k", 80), ("v", 80))}
    config = saved(monkeypatch, layers)
    config.packed_modules_mapping = FUSED
    with rank(*place):
        layer = QKVParallelLinear(
            128, 40, 4, 2, bias=False, params_dtype=BF16, quant_config=config, prefix="m.qkv_proj"
        )
        for each, part in zip("qkv", layers.values()):
            load(layer, part.state_dict(), each)
    number, size = place
    first, kv = number * 2 // size, max(1, 2 // size)
    q, *others = (dense_of(part) for part in layers.values())
    rows = [
        q[160 // size * number : 160 // size * (number + 1)],
        *(each[first * 40 : (first + kv) * 40] for each in others),
    ]
    module = process(layer)
    assert torch.equal(dense_of(module), torch.cat(rows)) and not list(layer.parameters())
    assert module.activation == layers["m.q_proj"].activation
    assert (module.input_scale is None) == (kind != "static")
    assert module.weight.rotation == layers["m.q_proj"].weight.rotation
    x = torch.randn(3, 128, dtype=BF16)
    own = torch.cat([part(x) for part in layers.values()], 1)
    if size == 1:
        assert (layer.quant_method.apply(layer, x) - own).norm() <= 0.01 * own.norm()


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_saved_models_row_parallel_layers_hold_the_ranks_columns(monkeypatch, kind, size):
    """Of 384 / 4 = 96 columns within groups of 128 and blocks, too; whole blocks of what is rotated."""
    torch.manual_seed(0)
    k = columns_of(kind)
    whole = SAVED[kind](64, k)
    config, parts = saved(monkeypatch, {"m.o_proj": whole}, **{"m.gate.weight": "BF16"}), []
    for number in range(size):
        with rank(number, size):
            layer = row(config, k, 64)
            load(layer, whole.state_dict())
            assert type(row(config, k, 64, prefix="m.gate").quant_method) is UnquantizedLinearMethod
        parts.append(dense_of(process(layer)))
        assert layer.jitgemm.weight.rotation == whole.weight.rotation
    assert torch.equal(torch.cat(parts, 1), dense_of(whole))
    if size == 1:
        x = torch.randn(3, k, dtype=BF16)
        assert torch.equal(layer.quant_method.apply(layer, x), whole(x))


def test_a_saved_layers_blocks_that_are_rotated_together_are_not_cut(monkeypatch):
    whole = SAVED["two levels, rotated"](64, 384)
    with rank(1, 2):
        layer = row(saved(monkeypatch, {"m.o_proj": whole}), 384, 64)
        with pytest.raises(
            ValueError, match="columns to be a multiple of 128, which are rotated together, got columns 192"
        ):
            load(layer, whole.state_dict())


def test_a_saved_models_activation_order_is_kept_with_the_files_joined_rows(monkeypatch):
    """As Phi-3's, whose file has q, k and v in one layer."""
    torch.manual_seed(0)
    q, order = torch.randint(-8, 8, (192, 128), dtype=torch.int8), torch.randperm(128).to(torch.int32)
    whole = W4A8Linear(jitgemm.pack_w4(q, torch.rand(192, 2) + 0.5, group_size=64, permutation=order))
    config = saved(monkeypatch, {"m.gate_up_proj": whole})
    for number, size in TWO:
        with rank(number, size):
            layer = gate_up(config, 128, 96)
            load(layer, whole.state_dict())
        rows = torch.cat([dense_of(whole)[96 * part + 48 * number :][:48] for part in (0, 1)])
        weight = process(layer).weight
        assert torch.equal(dense_of(layer.jitgemm), rows) and torch.equal(weight.permutation, order)


EVERY = "blocks meta channel_scale activation_type"


@pytest.mark.parametrize("suffix", [*EVERY.split(), EVERY])
def test_a_saved_layer_that_lacks_a_tensor_is_an_error(monkeypatch, suffix):
    layers = {f"m.{each}_proj": SAVED["per channel"](64, 128) for each in ("gate", "up")}
    config = saved(monkeypatch, layers)
    config.packed_modules_mapping = FUSED
    with rank():
        layer = gate_up(config, 128, 64)
        for part, each in enumerate(layers.values()):
            load(layer, {name: x for name, x in each.state_dict().items() if part == 0 or name not in suffix}, part)
    with pytest.raises(ValueError, match=rf"({suffix.replace(' ', '|')}).*: expected numbers, .*m.up_proj"):
        process(layer)


def test_what_is_not_read_of_a_saved_model_is_named(monkeypatch):
    torch.manual_seed(0)
    layers = {"m.gate_proj": SAVED["4 bits"](64, 128), "m.up_proj": SAVED["zero points"](64, 128)}
    layers |= {"embed": SAVED["8 bits"](64, 128), "m.experts.0.gate_proj": layers["m.gate_proj"]}
    config = saved(monkeypatch, layers, **{"m.k_proj.weight": "BF16"})
    config.packed_modules_mapping = FUSED | {"both": ["gate_proj", "k_proj"]}
    with rank():
        with pytest.raises(
            ValueError, match="m.experts: expected packed experts as one module .*, got some .* one by o"
        ):
            experts(config, "m.experts", (2, 64, 64), 1)
        with pytest.raises(ValueError, match="embed: expected its weight in floats, .* got .*blocks"):
            config.get_quant_method(SimpleNamespace(num_embeddings=64), "embed")
        with pytest.raises(ValueError, match="m.both: expected all or none .*'m.k_proj': False"):
            kind(config, "m.both")
        with pytest.raises(ValueError, match="expected rows in multiples of 8 and columns of 16"):
            row(config, 40, 64, prefix="m.gate_proj")
        layer = gate_up(config, 128, 64)
        load(layer, layers["m.gate_proj"].state_dict(), 0)
        with pytest.raises(ValueError, match="activation: expected int8_affine, as m.up_proj was saved, got e4m3"):
            load(layer, layers["m.up_proj"].state_dict(), 1)


@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_models_output_layer_holds_the_ranks_rows_and_zeros(monkeypatch, kind):
    torch.manual_seed(0)
    whole = SAVED[kind](200, 128)
    config, parts = saved(monkeypatch, {"lm_head": whole}), []
    for start, stop in ((0, 104), (104, 200)):
        with rank():
            head = ParallelLMHead(config, 200, 128, start, stop)
            load(head, whole.state_dict())
            found = dense_of(process(head))
        assert found.shape[0] == 128 and not found[stop - start :].any()
        parts.append(found[: stop - start])
    assert torch.equal(torch.cat(parts), dense_of(whole)) and head.jitgemm.activation == whole.activation


def test_an_output_layer_in_floats_is_quantised_as_the_option_says():
    config, weight = made(CONFIGS["packed"]), torch.randn(64, 128, dtype=BF16)
    config._set({"lm_head": "int8"})
    with rank():
        head = ParallelLMHead(config, 64, 128, 0, 64)
        load(head, {"weight": weight})
        found = dense_of(process(head))
    assert head.jitgemm.activation == "int8" and (found - weight).norm() < 0.01 * weight.norm()


def test_a_saved_output_layer_in_another_activation_is_an_error(monkeypatch):
    torch.manual_seed(0)
    whole = SAVED["8 bits"](64, 128)
    config = saved(monkeypatch, {"lm_head": whole})
    config._set({"activation": "e4m3", "lm_head": "e4m3"})
    with rank():
        head = ParallelLMHead(config, 64, 128, 0, 64)
        with pytest.raises(
            ValueError, match="^lm_head: expected int8, as lm_head was saved, got e4m3, as the options s"
        ):
            load(head, whole.state_dict())


@pytest.mark.parametrize(
    ("kind", "order", "ranks"),
    two_thirds(EXPERTS, ["gate_up", "interleaved"], [("tp", 1), ("tp", 2), ("tp", 4), ("ep", 2)]),
)
def test_a_saved_models_experts_hold_the_ranks_part(tmp_path, kind, order, ranks):
    """Of 384 / 4 = 96 rows and columns, within strips and groups of 128, too."""
    split, size = ranks
    gate = SILU_MUL if order == "gate_up" else Gate("swiglu_oai", order, 7.0, 1.702)
    more = {} if order == "gate_up" else {"activation": "swigluoai", "swiglu_limit": 7.0}
    activation = "int8" if kind.startswith("two levels") else "e4m3"
    whole = packed_module(kind, activation, gate=gate)
    config, found = saved_experts(tmp_path, whole), []
    for number in range(size):
        with rank():
            sizes = 4, 128, columns_of(kind)
            layer = experts(config, "m.experts", sizes, 1, **{split: (number, size)}, **more)
            layer.quant_method.process_weights_after_loading(layer)
        module = layer.jitgemm
        assert (module.gate, module.activation) == (gate, activation) and not list(layer.parameters())
        assert module.w13.weight.rotation == module.w2.weight.rotation == whole.w2.weight.rotation
        found.append(module)
    w13, w2 = ([each.weight.dequantize() for each in halves] for halves in zip(*((m.w13, m.w2) for m in found)))
    expected13, expected2 = whole.w13.weight.dequantize(), whole.w2.weight.dequantize()
    if split == "ep":
        assert torch.equal(torch.cat(w13), expected13) and torch.equal(torch.cat(w2), expected2)
        assert torch.equal(torch.cat([m.w13.bias for m in found]), whole.w13.bias)
        assert torch.equal(torch.cat([m.w2.bias for m in found]), whole.w2.bias)
        return

    def rows(of_ranks):
        if order == "interleaved":
            return torch.cat(of_ranks, 1)
        return torch.cat([each.chunk(2, 1)[half] for half in (0, 1) for each in of_ranks], 1)

    assert torch.equal(rows(w13), expected13) and torch.equal(torch.cat(w2, 2), expected2)
    assert torch.equal(rows([m.w13.bias for m in found]), whole.w13.bias)
    assert torch.equal(found[0].w2.bias, whole.w2.bias) and all(m.w2.bias is None for m in found[1:])


@pytest.mark.parametrize("split", ["tp", "ep"])
def test_saved_experts_of_all_ranks_add_up(tmp_path, split):
    whole = packed_module()
    config = saved_experts(tmp_path, whole)
    torch.manual_seed(5)
    x, ids = torch.randn(6, 128), torch.stack([torch.randperm(4)[:2] for _ in range(6)]).to(torch.int32)
    weights, total = torch.rand(6, 2), torch.zeros(6, 128)
    for place in TWO:
        with rank():
            layer = experts(config, "m.experts", (4, 128, 384), 2, **{split: place})
            layer.quant_method.process_weights_after_loading(layer)
        total += applied(layer, x, ids, weights)
    expected = whole(x, ids, weights)
    assert (total - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(
    "change, message",
    [({"w2__activation_type": None}, "m.experts.w2.activation_type"),
     ({"w13__bias": torch.zeros(4, 8)}, "bias"),
     ({"gate": encoded(Gate("gelu", "gate_up"))}, "m.experts.gate: expected .*silu.*, got .*gelu")],
)  # fmt: skip
def test_saved_experts_that_are_not_whole_or_not_the_models_are_named(tmp_path, change, message):
    config = saved_experts(tmp_path, packed_module(), **change)
    with rank():
        layer = experts(config, "m.experts", (4, 128, 384), 1)
        with pytest.raises(ValueError, match=message):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    "sizes, message",
    [((8, 128, 384), "m.experts.w13.blocks: expected 8 experts, as the model has, got 4"),
     ((4, 128, 256), r"m.experts.w13.blocks: expected n, k = \(512, 128\), got \(768, 128\)")],
)  # fmt: skip
def test_saved_experts_of_other_sizes_are_named(tmp_path, sizes, message):
    config = saved_experts(tmp_path, packed_module())
    with rank():
        layer = experts(config, "m.experts", sizes, 1)
        with pytest.raises(ValueError, match=message):
            layer.quant_method.process_weights_after_loading(layer)


def test_saved_experts_in_another_activation_than_the_options_say_are_an_error(tmp_path):
    config = saved_experts(tmp_path, packed_module())
    config._set({"activation": "int8"})
    with rank():
        layer = experts(config, "m.experts", (4, 128, 384), 1)
        with pytest.raises(
            ValueError, match="activation: expected e4m3, as m.experts.w13 was saved, got int8, as the o"
        ):
            layer.quant_method.process_weights_after_loading(layer)


# ---- experts ---------------------------------------------------------------------------------------------------------

WIDER = ("fp8-blocks", "torchao", "torchao-tiles")
"""Whose experts ranks cut into parts of 128 columns."""


@pytest.mark.parametrize("known, name, split", third([True, False], CONFIGS, ["whole", "tp", "ep"]))
def test_experts_of_all_ranks_add_up_to_the_dequantised_mixture(name, known, split):
    if not known and name not in OF_EXPERTS:
        pytest.skip("headers tell one expert's tensor from all experts'")
    inter = 256 if name in WIDER else 64
    tensors, dense = expert_tensors(CONFIGS[name], 4, 64, inter)
    x, ids, weights = routed(4)
    total = torch.zeros(x.shape, dtype=torch.float64)
    files = {f"m.mlp.experts.{e}.{proj}": each for (e, proj), each in tensors.items()}
    for place in [(0, 1)] if split == "whole" else TWO:
        options = {} if split == "whole" else {split: place}
        with rank():
            config = told(CONFIGS[name], files if known else {})
            layer = experts(config, "m.mlp.experts", (4, 64, inter), 2, **options)
            load_experts(layer, "m.mlp.experts", tensors)
            assert ("jitgemm" in layer._modules) == known
            layer.quant_method.process_weights_after_loading(layer)
        assert not list(layer.parameters())
        if split == "ep":
            first = layer.jitgemm.w2.weight.dequantize()[0].double()
            assert torch.equal(first, dense[2 * place[0], "down_proj"])
        total += applied(layer, x, ids, weights).double()
    expected = mixture(x, ids, weights, dense)
    assert (total - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize(
    "name, inter, size", [(name, 384, size) for name in WIDE for size in (2, 4)] + [("fp8-blocks", 320, 2)]
)
def test_experts_are_cut_through_their_groups(name, inter, size):
    """w2 along its columns; of blocks w13 along its rows, too."""
    count, hidden = 2, 128
    tensors, dense = expert_tensors(WIDE[name], count, hidden, inter)
    down = []
    for number in range(size):
        with rank():
            layer = experts(made(WIDE[name]), "m.experts", (count, hidden, inter), 1, tp=(number, size))
            load_experts(layer, "m.experts", tensors)
            layer.quant_method.process_weights_after_loading(layer)
        w13, w2 = (each.weight.dequantize().double() for each in (layer.jitgemm.w13, layer.jitgemm.w2))
        rows = slice(inter * number // size, inter * (number + 1) // size)
        for e in range(count):
            gate, up = (dense[e, proj][rows] for proj in ("gate_proj", "up_proj"))
            assert torch.equal(w13[e], torch.cat([gate, up]))
        down.append(w2)
    for e in range(count):
        assert torch.equal(torch.cat([each[e] for each in down], 1), dense[e, "down_proj"])


@pytest.mark.parametrize("name", ["packed-channel", "fp8", "int8-quantized", "modelopt-channel"])
def test_experts_of_sizes_in_multiples_of_16(name):
    tensors, dense = expert_tensors(CONFIGS[name], 4, 48, 80)
    with rank():
        layer = experts(made(CONFIGS[name]), "m.mlp.experts", (4, 48, 80), 2)
        load_experts(layer, "m.mlp.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = routed(4)
    out, expected = applied(layer, x[:, :48], ids, weights).double(), mixture(x[:, :48], ids, weights, dense)
    assert (out - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_experts_that_are_packed_together_hold_what_each_of_them_does(monkeypatch, at_once):
    """AWQ's experts of two ranks, of which some have zero points that make their codes signed."""
    monkeypatch.setattr("jitgemm.serving.experts.AT_ONCE", at_once)
    tensors, dense = expert_tensors(CONFIGS["awq"], 6, 64, 64)
    for proj in SHARDS:
        q = tensors[4, proj]["scales"].T.double().repeat_interleave(32, 1)
        zero = words(torch.full((2, 64), 8), 1, order=(0, 2, 4, 6, 1, 3, 5, 7))
        tensors[4, proj]["qweight"] = words(torch.full((64, 64), 11), 1)
        tensors[4, proj]["qzeros"], dense[4, proj] = zero, 3 * q
    for place in TWO:
        with rank():
            layer = experts(made(CONFIGS["awq"]), "m.experts", (6, 64, 64), 1, ep=place)
            load_experts(layer, "m.experts", tensors)
            layer.quant_method.process_weights_after_loading(layer)
        found = [each.weight.dequantize().double() for each in (layer.jitgemm.w13, layer.jitgemm.w2)]
        for e in range(3):
            gate, up, down = (dense[3 * place[0] + e, proj] for proj in SHARDS)
            assert torch.equal(found[0][e], torch.cat([gate, up])) and torch.equal(found[1][e], down)


@pytest.mark.parametrize("proj", SHARDS)
def test_experts_have_no_activation_order_in_any_of_their_layers(proj):
    config = scheme(actorder="group")
    tensors, dense = expert_tensors(config, 2, 64, 64)
    with rank():
        layer = experts(made(config), "m.experts", (2, 64, 64), 1)
        for expert in tensors.values():
            expert["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)  # in order
        load_experts(layer, "m.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(layer.jitgemm.w2.weight.dequantize()[1].double(), dense[1, "down_proj"])
        layer = experts(made(config), "m.experts", (2, 64, 64), 1)
        tensors[1, proj]["weight_g_idx"] = in_order(64, 32, True)
        load_experts(layer, "m.experts", tensors)
        with pytest.raises(
            ValueError, match="expert 1: expected columns in the input's order, got an activation order"
        ):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("name, suffix", [("gptq", "scales"), ("fp8", "weight_scale"), ("w4afp8", "weight_scale_inv")])
def test_an_expert_that_no_file_holds_is_an_error(name, suffix):
    tensors, _ = expert_tensors(CONFIGS[name], 3, 64, 64)
    del tensors[2, "up_proj"]
    with rank():
        layer = experts(made(CONFIGS[name]), "m.experts", (3, 64, 64), 1)
        load_experts(layer, "m.experts", tensors)
        with pytest.raises(
            ValueError, match=rf"w13_{suffix}\b.*: expected numbers for each .* 3 experts, .* for number 2"
        ):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("name", ["fp8", "packed-static"])
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_static_input_scales_of_experts_may_be_anything(monkeypatch, name, at_once):
    """Calibration that no token of an expert came by leaves 0, or none."""
    monkeypatch.setattr("jitgemm.serving.experts.AT_ONCE", at_once)
    tensors, dense = expert_tensors(CONFIGS[name], 3, 64, 64)
    tensors[1, "up_proj"]["input_scale"].zero_()
    del tensors[2, "down_proj"]["input_scale"]
    with rank():
        layer = experts(made(CONFIGS[name]), "m.experts", (3, 64, 64), 1)
        load_experts(layer, "m.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.jitgemm.w2.weight.dequantize()[2].double(), dense[2, "down_proj"])


def test_columns_that_are_said_to_be_in_order_are():
    config = scheme(actorder="group")
    tensors, dense = stored(config, 64, 64)
    with rank():
        layer = row(config, 64, 64)
        load(layer, tensors | {"weight_g_idx": torch.full((64,), -1, dtype=torch.int32)})
    assert torch.equal(dense_of(process(layer)), dense)


def test_experts_in_floats_are_quantised_while_they_are_loaded():
    tensors = {(e, proj): {"weight": torch.randn(64, 64, dtype=BF16) / 8} for e in range(2) for proj in SHARDS}
    with rank():
        layer = experts(made(None, {"group_size": 32}), "m.mlp.experts", (2, 64, 64), 1)
        load_experts(layer, "m.mlp.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = routed(2, top_k=1)
    expected = mixture(x, ids, weights, {name: found["weight"].double() for name, found in tensors.items()})
    assert (applied(layer, x, ids, weights).double() - expected).norm() < 0.25 * expected.norm()


def test_a_router_weight_on_the_input_is_applied_once():
    tensors, dense = expert_tensors(CONFIGS["packed"], 2, 64, 64)
    with rank():
        layer = experts(made(CONFIGS["packed"]), "m.experts", (2, 64, 64), 1, apply_router_weight_on_input=True)
        load_experts(layer, "m.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = routed(2, top_k=1)
    expected = mixture(x * weights.to(BF16), ids, torch.ones_like(weights), dense)
    assert (applied(layer, x, ids, weights).double() - expected).norm() < 0.06 * expected.norm()


def test_a_modular_kernel_gets_the_same_results_into_its_output(monkeypatch, workspaces):
    tensors, _ = expert_tensors(CONFIGS["packed"], 4, 64, 64)
    with rank():
        layer = experts(made(CONFIGS["packed"]), "m.experts", (4, 64, 64), 2, ep=(1, 2))
        load_experts(layer, "m.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
    method = layer.quant_method
    assert method.moe_kernel is None  # nobody exchanges tokens
    module = layer.jitgemm
    blocks = module.w13.blocks, module.w2.blocks
    kernel = JitGemmExperts(module, layer.moe_config, method.get_fused_moe_quant_config(layer))
    x, ids, weights = routed(4)
    assert kernel.moe_problem_size(x, *blocks, ids) == (2, 6, 128, 64, 2)
    out = torch.empty(kernel.workspace_shapes(6, 128, 64, 2, 4, 2, None, layer.activation)[2], dtype=BF16)
    kernel.apply(
        out, x, *blocks, weights, ids, layer.activation, 4, layer.expert_map, None, None, torch.empty(0),
        torch.empty(0), None, False,
    )  # fmt: skip
    wanted = applied(layer, x, ids, weights)
    assert torch.equal(out, wanted)
    weighed = torch.empty_like(out)  # by whoever has sent tokens, on their input
    kernel.apply(
        weighed, x, *blocks, weights, ids, layer.activation, 4, layer.expert_map, None, None, torch.empty(0),
        torch.empty(0), None, True,
    )  # fmt: skip
    assert torch.equal(weighed, applied(layer, x, ids, torch.ones_like(weights)))
    if not REAL:
        return
    from vllm.model_executor.layers.fused_moe.all2all_utils import make_moe_prepare_and_finalize_no_dp_ep
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    method.moe_kernel = FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), kernel)
    with rank():
        assert torch.equal(applied(layer, x, ids, weights), wanted)


def batched(monkeypatch, config, sizes, ep, max_num_tokens=8, **options):
    """Experts on a rank to which a backend sends tokens sorted by expert; vLLM's reference stands for the backend."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

    asked = []

    def exchange(moe, quant_config, routing_tables=None, allow_new_interface=False):
        asked.append(quant_config)
        return BatchedPrepareAndFinalize(max_num_tokens, moe.num_local_experts, 1, ep[0])

    owner = import_module("vllm.model_executor.layers.fused_moe.all2all_utils")
    monkeypatch.setattr(owner, "maybe_make_prepare_finalize", exchange)
    count, hidden, inter = sizes
    tensors, dense = expert_tensors(config, *sizes)
    with rank():
        layer = experts(made(config), "m.experts", sizes, 2, ep=ep, all2all="deepep_low_latency", **options)
        load_experts(layer, "m.experts", tensors)
        layer.quant_method.process_weights_after_loading(layer)
        layer.quant_method.process_weights_after_loading(layer)  # as the loader may
    assert layer.jitgemm.batched and len(asked) == 1
    return layer, dense, asked[0]


@pytest.mark.parametrize("name", ["packed", "packed-asymmetric", "packed-int8", "fp8", "int8-quantized", "w4afp8"])
def test_tokens_that_come_sorted_by_expert_add_up_to_the_dequantised_mixture(monkeypatch, workspaces, name):
    """Each rank sends its own tokens to all ranks' experts."""
    x, ids, weights = routed(4, tokens=7)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for place in TWO:
        layer, dense, config = batched(monkeypatch, CONFIGS[name], (4, 64, 64), place)
        kernel = layer.quant_method.moe_kernel.fused_experts
        assert type(kernel) is JitGemmBatchedExperts and getattr(config, "quant_dtype", None) is None
        with rank():
            found = applied(layer, x, ids, weights).double()
        module = layer.jitgemm
        same = module.run(x, ids, weights, expert_map=layer.expert_map)
        assert (found - same.double()).norm() < 0.01 * same.double().norm()
        total += found
    wanted = mixture(x, ids, weights, dense)
    assert (total - wanted).norm() < 0.06 * wanted.norm()


def test_tokens_that_come_in_8_bits_are_not_quantised_again(monkeypatch):
    """DeepEP's form: e4m3 with a scale for each token and 128 k, room for the tokens of two ranks, few of them live."""
    layer, dense, config = batched(monkeypatch, CONFIGS["fp8-blocks"], (4, 256, 256), (1, 2))
    assert (config.quant_dtype, list(config.block_shape)) == (torch.float8_e4m3fn, [128, 128])
    assert layer.jitgemm.activation == "e4m3_block"
    kernel = layer.quant_method.moe_kernel.fused_experts
    live, x = torch.tensor([3, 0], dtype=torch.int64), torch.randn(2, 16, 256, dtype=BF16)
    q, scale = jitgemm.quantize_activations(x, torch.float8_e4m3fn, scheme="block")
    q.view(torch.uint8)[0, 3:] = 0x7F  # NaN
    module, ids = layer.jitgemm, torch.zeros(8, 2, dtype=torch.int64)
    blocks = module.w13.blocks, module.w2.blocks
    assert kernel.moe_problem_size(q, *blocks, ids) == (2, 16, 512, 256, 2)
    out = torch.full(kernel.workspace_shapes(16, 512, 256, 2, 4, 2, None, layer.activation)[2], 7.0, dtype=BF16)
    kernel.apply(
        out, q, *blocks, torch.ones(8, 2), ids, layer.activation, 4, layer.expert_map, scale, None, torch.empty(0),
        torch.empty(0), SimpleNamespace(expert_num_tokens=live), False,
    )  # fmt: skip
    values = q.double()[0, :3] * scale.double()[0, :3].repeat_interleave(128, 1)
    w1, w3, w2 = (dense[2, proj] for proj in SHARDS)
    wanted = (torch.nn.functional.silu(values @ w1.T) * (values @ w3.T)) @ w2.T
    assert (out[0, :3].double() - wanted).norm() < 0.03 * wanted.norm()
    assert bool((out[0, 3:] == 7).all()) and bool((out[1] == 7).all())


def test_a_backend_that_would_pad_tokens_is_an_error(monkeypatch):
    with rank(), pytest.raises(ValueError, match="expected one for tokens of 64 values, got .*pads them to 128"):
        experts(made(CONFIGS["packed"]), "m.experts", (4, 64, 64), 2, ep=(0, 2), all2all="deepep_low_latency", pads=128)


@pytest.mark.parametrize("backend", ["passthrough", "moonep"])
def test_a_backend_that_leaves_the_exchange_to_the_experts_is_an_error(backend):
    tensors, _ = expert_tensors(CONFIGS["packed"], 4, 64, 64)
    with rank():
        layer = experts(made(CONFIGS["packed"]), "m.experts", (4, 64, 64), 2, ep=(0, 2), all2all=backend)
        load_experts(layer, "m.experts", tensors)
        with pytest.raises(ValueError, match=f"all2all_backend: expected one that exchanges .* got {backend}"):
            layer.quant_method.process_weights_after_loading(layer)


def test_experts_that_jitgemm_has_no_kernel_for_stay_in_their_type(monkeypatch):
    if REAL:  # it looks for kernels of a GPU
        owner = import_module(UnquantizedFusedMoEMethod.__module__)
        monkeypatch.setattr(owner, "select_unquantized_moe_backend", lambda moe_config: (None, None))
    with rank():
        for options in ({"activation": "relu2"}, {"has_bias": True}):
            layer = experts(made(None), "m.experts", (2, 64, 64), 1, **options)
            assert isinstance(layer.quant_method, UnquantizedFusedMoEMethod)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_of_every_kind_are_compiled_before_the_last_layer_is_packed(monkeypatch):
    calls = []

    def compiled(modules, tokens, **options):
        time.sleep(0.2)
        calls.append((sorted(module.out_features for module in modules), options))
        return ["a kernel"]

    monkeypatch.setattr(warm, "warmup", compiled)
    monkeypatch.setattr(warm, "on_gpu", lambda module: True)
    monkeypatch.setenv("JITGEMM_JIT", "off")
    config = made(CONFIGS["packed"])
    asymmetric = made(CONFIGS["packed-asymmetric"])
    asymmetric.warmer = config.warmer
    with rank():
        layers = [row(config, 64, n, prefix=f"m.{i}.o_proj") for i, n in enumerate((64, 64, 128))]
        layers += [row(asymmetric, 64, 64, prefix="m.3.o_proj"), row(config, 64, 64, prefix="m.4.o_proj")]
        for layer in layers:
            load(layer, stored(layer.quant_method.config.checkpoint, layer.output_size, 64)[0])
    del layers[-1], layer  # a layer that no model keeps is not waited for
    gc.collect()
    for layer in layers[:3]:
        process(layer)
    assert sum((found for found, _ in calls), []) in ([], [64])  # packing goes on meanwhile
    process(layers[3])
    assert sorted(sum((found for found, _ in calls), [])) == [64, 64, 128]  # one with zero points
    expected = {"dtype": BF16, "build": False, "compiled": config.warmer.compiled}
    assert all(options == expected for _, options in calls)


def test_a_kernel_that_does_not_compile_stops_the_start(monkeypatch):
    def fails(modules, tokens, **options):
        raise CompileError("nvrtc says no")

    monkeypatch.setattr(warm, "warmup", fails)
    monkeypatch.setattr(warm, "on_gpu", lambda module: True)
    with rank():
        layer = row(CONFIGS["packed"], 64, 64)
        load(layer, stored(CONFIGS["packed"], 64, 64)[0])
    with pytest.raises(CompileError, match="nvrtc says no"):
        process(layer)


@pytest.mark.skipif(REAL, reason="needs NVRTC, which vLLM's environment may lack")
def test_without_compiling_a_missing_kernel_is_named_before_anything_is_served(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path))
    q = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    module = torch.nn.ModuleList([W4A8Linear(jitgemm.pack_w4(q, torch.ones(64, 1), group_size=128))])
    with pytest.raises(CacheMissError, match="kernels are not in the cache, such as .*jitgemm warmup"):
        warmup(module, 16, device="h200", build=False)
    assert not list(tmp_path.rglob("*.cubin"))
