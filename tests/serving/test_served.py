"""What a checkpoint and a user say of a model's linears, and linears through the loaders of both engines, on every rank,
against the dequantised model.

Without an engine its layers and loaders are stand-ins; scripts/vllm_contract.sh and scripts/sglang_contract.sh run the same
tests on the real ones.
"""

from __future__ import annotations

import gc
import json
import re
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from builders import third
from checkpoints import dequantized, words
from engines import ENGINES, EXPERTS, SPLITS, TWO, each_engine, first_engine, in_turn, load, process
from safetensors.torch import save_file
from served_layers import (
    AUTOROUND,
    BF16,
    CONFIGS,
    E4M3,
    INT8,
    OF_MXFP8,
    OF_QSERVE,
    QUARK,
    SHARDS,
    SPELT,
    WIDE,
    assert_held,
    dense_of,
    expert_tensors,
    scheme,
    stored,
)

from jitgemm.checkpoint.canonical import TensorInfo
from jitgemm.errors import CompileError
from jitgemm.nn import W4A8Linear, load_
from jitgemm.nn.recipe import Recipe
from jitgemm.serving import warm

PER_TENSOR = ("fp8", "fp8-names", "modelopt")
EIGHT = (*PER_TENSOR, "fp8-blocks", "fp8-blocks-32", "float-quantized", "int8-quantized", "fbgemm", "modelopt-channel")
EIGHT = (*EIGHT, "gptq-int8", "auto-round-fp8", "torchao-fp8", *OF_MXFP8)
STATIC = ("packed-static", "modelopt-mxfp4", *PER_TENSOR)
K = 128
LINEAR = [name for name in CONFIGS if name not in ("w4afp8", "deepseek-v4")]  # whose linears are FP8
OF_INT8 = ("packed-corrected", "rotated", *OF_QSERVE)
BY_BLOCK = ("fp8-blocks", "fp8-blocks-32", "mxfp4-mxfp8", *OF_MXFP8)
known_or_not = pytest.mark.parametrize("known", [True, False], ids=["with headers", "without"])


def told_if(engine, known, checkpoint, layers, **options):
    return engine.told(checkpoint, layers if known else {}, **options)


# ---- the config ------------------------------------------------------------------------------------------------------


@each_engine
def test_a_checkpoint_is_taken_over_and_options_are_read_when_asked_and_only_then(tmp_path, engine):
    """Options of the quantization_config and of the command."""
    take = engine.Config.override_quantization_method
    assert [take(CONFIGS["gptq"], user) for user in ("jitgemm", "gptq", "fp8", None)] == ["jitgemm", None, None, None]
    said = {"quant_method": "jitgemm", "activation": "int8", "group_size": 64}
    config = engine.of_folder(tmp_path, {"m.o_proj": stored(CONFIGS["gptq"], 64, 64)[0]}, said)
    assert (config.checkpoint, config.recipe) == (None, Recipe(activation="int8", group_size=64))
    config = engine.of_folder(tmp_path, None, said, activation="e4m3")
    assert config.recipe == Recipe(activation="e4m3", group_size=64)
    nested = engine.of_folder(tmp_path, None, {"quant_method": "jitgemm", "checkpoint": CONFIGS["gptq"]})
    assert nested.checkpoint == CONFIGS["gptq"] == engine.of_folder(tmp_path, None, CONFIGS["gptq"]).checkpoint
    with pytest.raises(ValueError, match="options"):
        engine.of_folder(tmp_path, wrong=1)


NAMES = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
WRONG = [
    ({}, {"bit": 4}, "jitgemm"), ({}, "int8", "jitgemm"), ({}, {"bits": 3}, "bits"), ({}, {"lm_head": "fp8"}, "lm_head"),
    ({}, {"activation": "fp4"}, "activation"), ({}, {"ignore": "lm_head"}, "ignore"), ({}, {"ignore": [5]}, "ignore"),
    ({}, {"ignore": ["re:["]}, "ignore"), ({}, {"symmetric": "no"}, "symmetric"), ({}, {"sums": "f64"}, "sums"),
    ({}, {"tp_invariant": 1}, "tp_invariant"), ({}, {"exchange": "ib", "tp_invariant": True}, "exchange"),
    ({}, {"exchange": True}, "exchange"), ({}, {"sums": "f16", "activation": "int8"}, "sums"), ({}, {"sums": "exact", "activation": "e4m3"}, "sums"),
    *(({}, {"group_size": size}, "group_size") for size in ("128", 0, -5, True)),
    *(({key: rules}, {}, key) for key in NAMES for rules in ("lm_head", [3], ["lm_head", "re:["])),
    *(({"dynamic": {rule: {}}}, {}, "dynamic") for rule in ("-:(", "+:(", "(")),
]  # fmt: skip
"""What a checkpoint and what a user says, and what the message names."""


@first_engine
@pytest.mark.parametrize("checkpoint, options, name", WRONG)
def test_what_is_said_wrong_is_named(engine, checkpoint, options, name):
    with pytest.raises(ValueError, match=rf"^(jitgemm: )?{name}: expected "):
        engine.Config(checkpoint and CONFIGS["gptq"] | checkpoint, options)


LEFT_OUT = [
    (CONFIGS["packed"] | {"ignore": ["lm_head", "re:.*gate$"]}, {}, ["m.mlp.gate", "lm_head"], ["m.mlp.gate_proj"]),
    (CONFIGS["awq"] | {"modules_to_not_convert": ["visual", "attn."]}, {}, ["visual.blocks.0.proj", "m.attn.o_proj"], ["visually.proj"]),
    (CONFIGS["gptq"] | {"dynamic": {"-:.*o_proj": {}}}, {}, ["m.attn.o_proj"], ["m.attn.q_proj"]),
    (None, {"ignore": ["vision", "re:.*head"]}, ["vision.layers.0.up_proj", "lm_head", ("m.gate", 8), ("m.up_proj", 64, 40)], ["m.up_proj"]),
    *(({"quant_method": method, "quant_algo": "NVFP4"}, {}, [], ["m.a"]) for method in ("modelopt", "modelopt_fp4")),
]  # fmt: skip
"""What a checkpoint and a user say, and names of layers, with rows and columns, that stay and that are served."""


@each_engine
@pytest.mark.parametrize("checkpoint, options, left, served", LEFT_OUT)
def test_layers_that_the_config_or_the_user_leaves_out_routers_and_odd_sizes_stay(
    engine, checkpoint, options, left, served
):
    config = engine.config(checkpoint, **options)
    found = [engine.serves(config, *((each,) if isinstance(each, str) else each)) for each in (*left, *served)]
    assert found == [False] * len(left) + [True] * len(served)
    layer = engine.row(None, 72, 64, {}, (0, 2))  # nine columns on a rank
    assert not isinstance(layer.quant_method, engine.Linear)


@each_engine
@pytest.mark.parametrize("quantization", ["FP8", "fp8_per_channel_per_token", "NVFP4", "MIXED_PRECISION", "W4A8_AWQ"])
def test_modelopts_config_of_the_files_is_read(monkeypatch, engine, quantization):
    """hf_quant_config.json, as engines hand it over."""
    said = {"quant_algo": quantization, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "m.*.gate*"]}
    engine.has_own(monkeypatch)
    said |= {"quantized_layers": {}} if quantization == "MIXED_PRECISION" else {}  # tensors tell
    algorithm = "NVFP4" if quantization in ("NVFP4", "MIXED_PRECISION") else "FP8"
    tensors, _ = stored({"quant_method": "modelopt", "quant_algo": algorithm}, 64, 64)
    given = {"producer": {"name": "modelopt"}, "quantization": said, "quant_method": "modelopt"}
    config = engine.told(given, {"m.0.up": tensors})
    assert not engine.serves(config, "m.0.gate") and not engine.serves(config, "lm_head")
    if quantization == "W4A8_AWQ":
        with pytest.raises(ValueError, match="m.0.up: quant_algo: expected"):
            engine.serves(config, "m.0.up")
    else:
        assert engine.serves(config, "m.0.up")


@each_engine
def test_an_index_that_its_files_contradict_is_an_error(tmp_path, monkeypatch, engine):
    """The engines' loaders take every tensor of every file that the index names; equal copies do no harm."""
    said = engine.log(monkeypatch)
    names, index = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)], tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"m.a.weight": names[0], "m.b.weight": names[1]}}))
    with pytest.raises(FileNotFoundError, match=f"names, found no {names[0]}"):
        engine.of_folder(tmp_path, None, CONFIGS["gptq"])
    save_file({"m.a.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="next to model.safetensors: delete the index"):
        engine.of_folder(tmp_path, None, CONFIGS["gptq"])
    (tmp_path / "model.safetensors").unlink()
    save_file({"m.a.weight": torch.ones(1)}, tmp_path / names[0])
    alone = rf"expected 'm.a.weight' in .*{names[0]} alone, .* another one in {names[1]}, and {engine.label}'s loader"
    for a, expected in (
        (torch.ones(1), None), (torch.zeros(1), alone), (torch.ones(2), "source: expected 'm.a.weight' in"),
        (torch.ones(1, dtype=torch.int32), "source: expected 'm.a.weight' in"),
    ):  # fmt: skip
        save_file({"m.a.weight": a, "m.b.weight": torch.ones(1), "m.c.weight": torch.ones(2)}, tmp_path / names[1])
        with nullcontext() if expected is None else pytest.raises(ValueError, match=expected):
            config = engine.of_folder(tmp_path, None, CONFIGS["gptq"])
            one = TensorInfo((1,), torch.float32)
            assert config._headers == {"m.a": {"weight": one}, "m.b": {"weight": one}}
            assert said == [f"jitgemm: {engine.label}'s loader reads tensors that the index does not name: m.c.weight"]
    save_file({"m.a.weight": torch.ones(1)}, tmp_path / names[1])
    with pytest.raises(ValueError, match=f"expected 'm.b.weight' in .*{names[1]}, as the index says, found none"):
        engine.of_folder(tmp_path, None, CONFIGS["gptq"])


@each_engine
@known_or_not
def test_linears_of_a_w4afp8_checkpoint_are_fp8_in_blocks(engine, known):
    tensors, dense = stored(CONFIGS["fp8-blocks"], 128, 128)
    layer = engine.row(told_if(engine, known, CONFIGS["w4afp8"], {"m.o_proj": tensors}), 128, 128, tensors)
    assert process(layer).weight.bits == 8 and torch.equal(dense_of(layer.jitgemm), dense)


@each_engine
def test_names_that_a_model_changes_are_found_in_the_files(engine):
    """A user leaves layers out by the engine's names, too."""
    tensors, dense = stored(CONFIGS["gptq"], 64, 64)
    layers = {f"lm.layers.0.{part}_proj": tensors for part in "qkv"} | {"lm.layers.0.o_proj": {"weight": "BF16"}}
    config = engine.told(CONFIGS["gptq"], layers)
    of_floats = engine.told(None, layers, ignore=["0.qkv_proj", "model.layers.1"])
    for each in (config, of_floats):
        engine.rename(each, lambda name: name.replace("lm.", "model."))
    assert not engine.serves(config, "model.layers.0.o_proj")
    layer = engine.qkv(config, 64, dict.fromkeys("qkv", tensors), heads=(32, 2, 2), prefix="model.layers.0.qkv_proj")
    assert layer.quant_method.names == [f"lm.layers.0.{part}_proj" for part in "qkv"]
    assert torch.equal(dense_of(layer.jitgemm), torch.cat([dense] * 3))
    served = [engine.serves(of_floats, f"model.layers.{each}") for each in ("0.qkv_proj", "1.down_proj", "0.o_proj")]
    assert served == [False, False, True]


@each_engine
def test_an_output_layer_that_the_checkpoint_has_quantised_is_the_engines_own(monkeypatch, engine):
    theirs, asked = object(), []
    own = SimpleNamespace(get_quant_method=lambda layer, prefix: asked.append(prefix) or theirs)
    engine.has_own(monkeypatch, own)
    head = SimpleNamespace(num_embeddings=96)
    layers = {"lm_head": {"qweight": "I32", "scales": "F16"}, "model.embed_tokens": {"weight": "BF16"}}
    config = engine.told(CONFIGS["gptq"], layers, lm_head="e4m3")
    assert config.get_quant_method(head, "lm_head") is theirs and asked == ["lm_head"]
    assert config.get_quant_method(head, "model.embed_tokens") is None and asked == ["lm_head"]
    floats = engine.told(None, {"lm_head": {"weight": "BF16"}})
    assert floats.get_quant_method(head, "lm_head") is None
    theirs = None
    with pytest.raises(ValueError, match="lm_head: expected its weight in floats, .* got qweight, scales"):
        config.get_quant_method(head, "lm_head")


GROUP, FP8_GROUP = (CONFIGS[name]["config_groups"]["group_0"] for name in ("packed", "float-quantized"))
ONE_WAY = "expected one way of quantising layers"
JOINED = {
    "all or none": (
        CONFIGS["packed"] | {"ignore": ["m.gate_proj", "re:.*0.gate_proj"]}, "packed", "packed",
        "expected all or none .*gate_proj': False",
    ),
    "zero points": (CONFIGS["gptq"] | {"dynamic": {"+:.*up_proj": {"sym": False}}}, "gptq", "gptq", ONE_WAY),
    "activations": (CONFIGS["packed"] | {"config_groups": {
        "a": GROUP | {"targets": ["re:.*up_proj"], "input_activations": INT8}, "b": GROUP | {"input_activations": E4M3},
    }}, "packed", "packed", ONE_WAY),
    "bits": (CONFIGS["packed"] | {"config_groups": {
        "gate": GROUP | {"targets": ["re:.*(gate|down)_proj"], "format": "pack-quantized"},
        "up": FP8_GROUP | {"targets": ["re:.*up_proj"], "format": "float-quantized"},
    }}, "packed", "float-quantized", ONE_WAY),
}  # fmt: skip
"""A config, whose tensors gate and down have, and whose up, and what the message says."""


@each_engine
@pytest.mark.parametrize("form", ["linear", "experts"])
@pytest.mark.parametrize("case", JOINED)
def test_layers_that_are_joined_but_quantised_differently_are_an_error(engine, case, form):
    config, gate, up, message = JOINED[case]
    tensors = {proj: stored(CONFIGS[up if proj == "up_proj" else gate], 64, 64)[0] for proj in SHARDS}
    above = "m." if form == "linear" else f"{EXPERTS}.0."
    headers = {f"{above}{proj}": each for proj, each in tensors.items()} if case != "all or none" else {}
    config = engine.told(config, headers)
    with pytest.raises(ValueError, match=f"gate_proj.*: {message}" if headers else message):
        if form == "linear":
            engine.gate_up(config, 64, 64)
        else:
            engine.experts(config, (2, 64, 64), packed=False)
    if case == "bits" and form == "linear":  # which tensors alone tell without headers
        with pytest.raises(ValueError, match="prefix: layers to be joined along n must have one width"):
            process(engine.gate_up(JOINED[case][0], 64, 64, [tensors["gate_proj"], tensors["up_proj"]]))


@each_engine
def test_experts_of_which_some_are_in_floats_are_an_error(engine):
    names = {
        f"{EXPERTS}.{e}.{proj}": {"weight": "F8_E4M3", "weight_scale_inv": "F32"} for e in range(4) for proj in SHARDS
    }
    names[f"{EXPERTS}.2.down_proj"] = {"weight": "BF16"}
    with pytest.raises(ValueError, match="m.experts: expected all or none .*m.experts.2.down_proj': False"):
        engine.experts(engine.told(CONFIGS["fp8-blocks"], names), (4, 128, 128), packed=False)


@each_engine
def test_what_jitgemm_cannot_read_is_left_to_the_engines_own_config(monkeypatch, engine):
    plain = engine.linear("ReplicatedLinear", engine.config(None, ignore=["m.a"]), 64, 64, prefix="m.a").quant_method
    theirs = SimpleNamespace(get_quant_method=lambda layer, prefix: plain, packed_modules_mapping={})
    engine.has_own(monkeypatch, theirs)
    config = engine.told(CONFIGS["gptq"] | {"bits": 3}, {"m.a": stored(CONFIGS["gptq"], 64, 64)[0]})
    layer = engine.linear("ReplicatedLinear", config, 64, 64, prefix="m.a")
    assert layer.quant_method is plain
    assert theirs.packed_modules_mapping is config.packed_modules_mapping or engine.label == "SGLang"


LEFT = [
    ("gptq", {"bits": 3}, (64, 64), "bits: expected"), ("gptq", {"group_size": -5}, (64, 64), "group_size: "),
    ("gptq", {"group_size": 0}, (64, 64), "group_size: "), ("awq", {"bits": 8}, (64, 64), "bits: expected 4, got 8"),
    ("gptq", {"checkpoint_format": "marlin"}, (64, 64), "checkpoint_format: expected gptq"),
    ("fp8", {"weight_block_size": [64]}, (64, 64), "weight_block_size: expected"),
    ("packed-channel", {}, (64, 72), "multiples of 8"), ("gptq", {"desc_act": True}, (64, 128), "no activation order"),
    ("awq", {"group_size": 48}, (64, 768), "group_size: expected a multiple of 32, got 48"),
    ("packed", {}, (64, 192), "columns in multiples of 32 in groups of 32 on each rank, got 48"),
    ("gptq-int8", {"sym": False}, (64, 256), "zero points: expected none with 8-bit integers"),
    ("gptq", {"pack_dtype": "int16"}, (64, 256), "pack_dtype: expected int32, got 'int16'"),
    ("awq", {"backend": "llm-awq"}, (64, 256), "backend: expected autoawq, got 'llm-awq'"),
    ("auto-round-fp8", {"fmt": "e5m2"}, (64, 256), "fmt: expected e4m3, got 'e5m2'"),
]  # fmt: skip
"""Rows and columns of a layer of a setting, and why four ranks cannot have it."""


@pytest.mark.parametrize("engine, case", in_turn(*LEFT))
def test_a_layer_that_cannot_be_read_or_cut_so_is_left_to_the_engine_or_an_error(monkeypatch, engine, case):
    name, change, (n, k), reason = case
    engine.has_own(monkeypatch)
    config = CONFIGS[name] | change
    config = engine.told(config, {"m.down_proj": stored(CONFIGS[name] if k == 64 else config, n, k)[0]})
    with pytest.raises(ValueError, match=f"m.down_proj: .*{reason}"):
        engine.row(config, k, n, {}, (0, 4), prefix="m.down_proj")


# ---- linears ---------------------------------------------------------------------------------------------------------


def ranks_rows(tensor, place):
    return tensor.chunk(place[1])[place[0]]


@pytest.mark.parametrize(
    "way, name, place",
    third([(e, known) for known in (True, False) for e in ENGINES], LINEAR, [(0, 1), (1, 2), (3, 8)]),
)
def test_joined_columns_hold_the_ranks_rows_of_each_part(way, name, place):
    """320 rows, whose parts end inside of blocks and tiles."""
    engine, known = way
    parts = [stored(CONFIGS[name], 320, K, seed) for seed in (1, 2)]
    tensors = [each for each, _ in parts]
    config = told_if(engine, known, CONFIGS[name], dict(zip(("m.gate_proj", "m.up_proj"), tensors)))
    layer = engine.gate_up(config, K, 320, tensors[:1], place)
    assert "jitgemm" not in layer._modules
    with engine.rank(*place):
        load(layer, tensors[1], 1)
    assert ("jitgemm" in layer._modules) == known  # packed with its last tensor, whose memory is free then
    assert not (known and layer.quant_method.matrices[0].kept)
    module = process(layer)
    assert torch.equal(dense_of(module), torch.cat([ranks_rows(dense, place) for _, dense in parts]))
    assert not list(layer.parameters()) and module.weight.bits == (8 if name in EIGHT else 4)
    assert (module.weight.rotation, module.weight.format.code) == (128, "two_level") or name != "rotated"
    scale = None if module.input_scale is None else module.input_scale.tolist()
    assert scale == (pytest.approx([0.03]) if name in STATIC else None)  # the largest of both
    of_int8 = "int8" if "int8" in name or name in OF_INT8 else "e4m3"
    assert module.activation == ("e4m3_block" if name in BY_BLOCK else of_int8)
    if not known:
        sizes, tensors = (K, 320), {None: tensors[0]}
        single = engine.linear(
            "ColumnParallelLinear", CONFIGS[name], *sizes, parts=tensors, at=place, prefix="m.q_b_proj"
        )
        assert torch.equal(dense_of(process(single)), ranks_rows(parts[0][1], place))


@pytest.mark.parametrize("engine, name", in_turn(*LINEAR))
@pytest.mark.filterwarnings("error::UserWarning")
def test_k_and_v_that_no_file_holds_are_zeros_and_other_joined_layers_an_error(monkeypatch, engine, name):
    """Gemma 3n and 4 have no k and v in layers that share others', where engines make them all the same."""
    said, real = engine.log(monkeypatch), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: dirty(real(*size, **more)))
    tensors, dense = stored(CONFIGS[name], 128, 128)
    layer = engine.qkv(CONFIGS[name], 128, {"q": tensors})
    found = dense_of(process(layer))
    assert torch.equal(found[:128], dense) and not found[128:].any()
    assert said[-1:] == ["jitgemm: no file holds m.k_proj, m.v_proj: zeros"]
    assert name not in STATIC or layer.jitgemm.input_scale.tolist() == pytest.approx([0.01])
    with pytest.raises(ValueError, match="weights: expected numbers, found none in the files.*m.o_proj"):
        process(engine.row(CONFIGS[name], 128, 128))
    merged = {"parts": {0: tensors}, "prefix": "m.qkv_proj"}  # which are joined by numbers
    for layer, lacks in (
        (engine.qkv(CONFIGS[name], 128, dict.fromkeys("qk", tensors)), "v_proj"),
        (engine.qkv(CONFIGS[name], 128, dict.fromkeys("kv", tensors)), "q_proj"),
        (engine.linear("MergedColumnParallelLinear", CONFIGS[name], 128, [128] * 3, **merged), "k_proj"),
        (engine.gate_up(CONFIGS[name], 128, 128, {0: tensors}), "up_proj"),
        (engine.gate_up(CONFIGS[name], 128, 128, {1: tensors}), "gate_proj"),
    ):
        with pytest.raises(ValueError, match=f"scale.*: expected numbers, found none in the files.*m.{lacks}"):
            process(layer)


def dirty(tensor):
    """Memory as somebody left it."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.int8).fill_(0x7F)
    return tensor


THROUGH = ((896, 2), (768, 4), (384, 4))
SIXTEENS = dict.fromkeys(("packed-channel", "packed-tensor", "gptq-channel", "fp8", "int8-quantized", "nvfp4"))
PARTS = [(WIDE[name], THROUGH) for name in WIDE] + [(CONFIGS["fp8-blocks"], ((96, 1), (48, 1)))]
PARTS += [(CONFIGS[name], ((96, 2), (48, 1), (224, 2))) for name in SIXTEENS] + [
    (CONFIGS[name], ((256, 2),)) for name in LINEAR
]


@pytest.mark.parametrize(
    "way, part", third([(e, known) for known in (True, False) for e in (*ENGINES, ENGINES[0])], PARTS)
)
def test_ranks_hold_their_columns_within_groups_and_in_multiples_of_16(recwarn, way, part):
    """A rank loads every group that its columns touch; the ranks side by side are the layer. Of (columns, ranks)."""
    (engine, known), (checkpoint, sizes) = way, part
    for k, size in sizes:
        tensors, dense = stored(checkpoint, 64, k)
        config = told_if(engine, known, checkpoint, {"m.down_proj": tensors})
        layers = [engine.row(config, k, 64, tensors, (number, size), "m.down_proj") for number in range(size)]
        modules = list(map(process, layers))
        assert torch.equal(torch.cat([dense_of(module) for module in modules], 1), dense)
        assert {module.in_features for module in modules} == {k // size}
    said = "a rank's columns end inside groups of 128: scales are repeated over groups"
    assert any(said in str(each.message) for each in recwarn) == (sizes is THROUGH)
    x, wanted = torch.randn(3, k // size, dtype=BF16), dense_of(modules[-1])
    wanted = x.double() @ wanted.T
    assert (engine.run(layers[-1], x).double() - wanted).norm() < 0.06 * wanted.norm()


@each_engine
@pytest.mark.parametrize("size", [1, 2])
def test_a_last_group_of_fewer_columns_needs_no_order_of_columns(engine, size):
    """192 columns in groups of 128, on a rank or two; 80 in groups of 32."""
    tensors, dense = stored(WIDE["gptq"], 64, 256)
    del tensors["g_idx"]
    tensors["qweight"] = tensors["qweight"][:24]
    parts = [dense_of(process(engine.row(WIDE["gptq"], 192, 64, tensors, (i, size)))) for i in range(size)]
    assert torch.equal(torch.cat(parts, 1), dense[:, :192])
    q, scale, group = torch.randint(-8, 8, (64, 80)), torch.rand(64, 3).to(BF16), torch.arange(80) // 32
    tensors = {"qweight": words(q.T + 8, 0), "qzeros": words(torch.full((3, 64), 7), 1), "scales": scale.T}
    tensors |= {"g_idx": group.int()} if size == 1 else {}
    layer = engine.row(CONFIGS["gptq"], 80, 64, tensors)
    assert torch.equal(dense_of(process(layer)), dequantized(q, scale, None, group))


@each_engine
def test_a_layer_computes_what_w4a8linear_does_with_bias_and_any_leading_sizes(engine):
    layer = engine.row(CONFIGS["packed"], 64, 64, stored(CONFIGS["packed"], 64, 64)[0], bias=True)
    bias = torch.randn(64, dtype=BF16)
    own = W4A8Linear(process(layer).weight, bias)
    x = torch.randn(2, 3, 64, dtype=BF16)
    assert torch.equal(engine.run(layer, x, bias), own(x)) and engine.run(layer, x).shape == (2, 3, 64)
    half = x.to(torch.float16)
    assert torch.equal(engine.run(layer, half, bias.half()), W4A8Linear(own.weight, bias.half())(half))


@first_engine
def test_a_layer_traces_into_one_graph_for_any_number_of_tokens(engine):
    layer = engine.row(CONFIGS["packed"], 64, 64, stored(CONFIGS["packed"], 64, 64)[0])
    process(layer)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: engine.run(layer, x), fullgraph=True, dynamic=True, backend=count)
    for m in (7, 2, 64):
        x = torch.randn(m, 64, dtype=BF16)
        assert torch.equal(compiled(x), engine.run(layer, x))
    assert len(graphs) == 1


# ---- activation orders, scales and zero points -----------------------------------------------------------------------

BY_ORDER = CONFIGS["gptq"] | {"desc_act": True}


def shuffled(k=64, size=32):
    return (torch.arange(k) // size)[torch.randperm(k)].to(torch.int32)


@each_engine
def test_an_activation_order_is_kept_by_column_parallel_layers(engine):
    tensors, dense = stored(BY_ORDER, 64, 64)
    tensors["g_idx"] = order = shuffled()
    scales = tensors["scales"].T.double()
    dense = dense / scales[:, torch.arange(64) // 32] * scales[:, order.long()]
    for place in TWO:
        weight = process(engine.gate_up(BY_ORDER, 64, 64, [tensors] * 2, place)).weight
        found = torch.empty(64, 64, dtype=torch.float64)
        found[:, weight.permutation.long()] = weight.dequantize().double()
        assert torch.equal(found, ranks_rows(dense, place).repeat(2, 1))


@each_engine
def test_joined_layers_with_different_activation_orders_or_none_are_an_error(engine):
    tensors, _ = stored(BY_ORDER, 64, 64)
    layer = engine.gate_up(BY_ORDER, 64, 64, [tensors | {"g_idx": shuffled()} for _ in range(2)])
    with pytest.raises(ValueError, match="must have one permutation, got different ones.*m.gate_proj, m.up_proj"):
        process(layer)
    del tensors["g_idx"]
    with pytest.raises(ValueError, match="g_idx: expected the columns' groups, .* found none .layer 'm.o_proj'"):
        process(engine.row(BY_ORDER, 64, 64, tensors))


@each_engine
@pytest.mark.parametrize("form", ["linear", "of a folder", "experts"])
def test_scales_that_the_models_type_cannot_hold_are_kept(tmp_path, engine, form):
    """With headers, which also say what is quantised, and without."""
    tensors, dense = stored(CONFIGS["gptq"], 64, 64)
    scales = torch.rand(2, 64)
    by_column = [each.T.double().repeat_interleave(32, 1) for each in (tensors["scales"], scales)]
    tensors["scales"] = scales
    if form == "experts":
        every = {(e, proj): tensors for e in range(2) for proj in SHARDS}
        found = engine.experts(CONFIGS["gptq"], (2, 64, 64), every).jitgemm.w2.weight[1]
    else:
        config = CONFIGS["gptq"]
        if form == "of a folder":
            files = {"m.o_proj": tensors, "m.b": {"weight": torch.zeros(64, 64), "bias": torch.zeros(64)}}
            config = engine.of_folder(tmp_path, files, config)
            assert not engine.serves(config, "m.b")
        layer = engine.row(config, 64, 64, tensors)
        assert ("jitgemm" in layer._modules) == (form == "of a folder")  # with the last of the files' tensors
        found = process(layer).weight
    assert found.format.scale_type == "fp32"
    assert (found.dequantize().double() - dense / by_column[0] * by_column[1]).abs().max() < 1e-6


@each_engine
@pytest.mark.parametrize("activation, corrected", [(None, "fp16"), ("int8_block", ""), ("e4m3", "")])
def test_zero_points_are_corrections_where_int8_has_a_scale_per_token(engine, activation, corrected):
    tensors, dense = stored(CONFIGS["packed-corrected"], 64, 128)
    layer = engine.row(engine.config(CONFIGS["packed-corrected"], activation=activation), 128, 64, tensors)
    assert process(layer).weight.format.correction == corrected and torch.equal(dense_of(layer.jitgemm), dense)
    x = torch.randn(3, 128, dtype=BF16)
    expected = x.double() @ dense.T
    assert (engine.run(layer, x).double() - expected).norm() < 0.05 * expected.norm()


# ---- what formats have of their own ----------------------------------------------------------------------------------


ACT_8 = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "is_dynamic": True, "scale_format": "e8m0"}
OF_MX = {name: (CONFIGS[name], name) for name in ("mxfp4-mxfp8", *OF_MXFP8)} | {
    "auto-round": (AUTOROUND | {"act_bits": 8, "act_data_type": "mx_fp_rceil"}, "mxfp4"),
    "quark": (QUARK | {"global_quant_config": QUARK["global_quant_config"] | {"input_tensors": ACT_8}}, "quark"),
}
WEIGHTS_ALONE = scheme("tensor_group", 16, format="nvfp4-pack-quantized", type="float")
OF_INPUTS = [
    (CONFIGS["fbgemm"], "fbgemm", None, "e4m3", "activation_scale_ub 1200.0 is not applied"),
    (CONFIGS["fbgemm"] | {"activation_scale_ub": None}, "fbgemm", None, "e4m3", None),
    (CONFIGS["nvfp4"], "nvfp4", None, "e4m3", "jitgemm: the checkpoint's inputs of 4 bits .* e4m3; activation='e4m3' says"),
    (CONFIGS["nvfp4"], "nvfp4", "e4m3_block", "e4m3_block", None), (WEIGHTS_ALONE, "nvfp4", None, "e4m3", None),
    (CONFIGS["float-quantized"], "float-quantized", "int8", "e4m3", None),
    *((*case, "e4m3", "e4m3", None) for case in OF_MX.values()),
    *((*case, None, "e4m3_block",
       "jitgemm: the checkpoint's MXFP8 inputs are quantised to 8 bits for each token and 128 k, e4m3_block; "
       "activation='e4m3_block' says so without this warning") for case in OF_MX.values()),
]  # fmt: skip
"""A config, what has the same tensors, the user's activation, the layer's, and what the log says once of two."""


@each_engine
@pytest.mark.parametrize("config, like, wanted, activation, text", OF_INPUTS)
def test_inputs_that_the_checkpoint_has_otherwise_are_in_8_bits_and_the_log_says_so(
    monkeypatch, engine, config, like, wanted, activation, text
):
    said, tensors = engine.log(monkeypatch), stored(CONFIGS[like], 64, 128)[0]
    own = engine.told(config, dict.fromkeys(("m.a", "m.b"), tensors), activation=wanted)
    assert engine.serves(own, "m.a", 64, 128) and engine.serves(own, "m.b", 64, 128)
    assert not said if text is None else len({*said}) == 1 and re.search(text, said[0])
    layer = engine.row(engine.config(config, activation=wanted), 128, 64, tensors)
    assert process(layer).activation == activation


@first_engine
def test_what_torchaos_files_say_of_a_layer_is_read(tmp_path, engine):
    """Its class, which tensors of these sizes do not tell, and its activations."""
    q, scale = torch.randint(-8, 8, (64, 64), dtype=torch.int8), (torch.rand(64, 2) + 0.5).to(BF16)
    zero = torch.randint(-7, 8, (64, 2), dtype=torch.int8)
    tensors = {"_weight_qdata": q, "_weight_scale": scale, "_weight_zero_point": zero}
    said = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"activation_quantization": "int8_asym_per_token"}}
    named = {f"m.o_proj.{suffix}": each for suffix, each in tensors.items()}
    save_file(named, tmp_path / "model.safetensors", {"m.o_proj.weight": json.dumps(said), "format": "pt"})
    layer = engine.row(engine.of_folder(tmp_path, None, CONFIGS["torchao"]), 64, 64, tensors)
    assert layer.jitgemm.activation == "int8_affine"
    assert torch.equal(dense_of(process(layer)), dequantized(q, scale, zero))


@pytest.mark.parametrize("engine, name", in_turn("packed", "gptq", "fp8"))
def test_layers_that_the_file_has_joined_are_loaded_at_once(engine, name):
    """As Phi-3's: one tensor of each kind, one scale for both where it is per tensor."""
    tensors, dense = stored(CONFIGS[name], 128, 64)
    assert torch.equal(dense_of(process(engine.gate_up(CONFIGS[name], 64, 64, {None: tensors}))), dense)


@each_engine
@pytest.mark.parametrize("split", ["tp", "ep"])
def test_a_rank_has_its_part_of_rotated_experts_in_two_levels(engine, split):
    tensors, dense = expert_tensors(CONFIGS["rotated"], 4, 128, 256)
    config = engine.told(CONFIGS["rotated"], {f"{EXPERTS}.{e}.{proj}": each for (e, proj), each in tensors.items()})
    modules = [engine.experts(config, (4, 128, 256), tensors, at).jitgemm for at in SPLITS[split]]
    for weight in (each.weight for module in modules for each in (module.w13, module.w2)):
        assert (weight.rotation, weight.format.code) == (128, "two_level")
    assert_held(modules, dense, split)


@each_engine
def test_rotated_layers_whose_blocks_ranks_cut_and_other_transforms_are_left_to_the_engine(monkeypatch, engine):
    """Whose own config says what it makes of them, if it has one; else the error says why."""
    rotated = CONFIGS["rotated"]
    (group,) = rotated["transform_config"]["config_groups"].values()
    others = {"transform_config": {"config_groups": {"R4": group | {"head_dim": 64}}}}
    of_rank = "expected rows in multiples of 8 and columns of 128 on each rank, got 64 and 192"
    of_blocks = "transform R4 .hadamard. of blocks of 64 at the input; kernels rotate blocks of 128"
    engine.has_own(monkeypatch)
    for config, k, size, reason in ((rotated, 384, 2, of_rank), (rotated | others, 256, 1, of_blocks)):
        with pytest.raises(ValueError, match=reason):
            engine.row(engine.told(config, {"m.o_proj": stored(rotated, 64, k)[0]}), k, 64, {}, (0, size))


def test_fp8_per_tensor_is_loaded_by_names_that_vllms_models_map():
    """From transformers' to vLLM's own, as Mistral3's."""
    of_files, back = CONFIGS["fp8-names"], {new: old for old, new in SPELT.items()}
    if ENGINES[0].label != "vLLM":
        pytest.skip("vLLM's")
    tensors, dense = stored(CONFIGS["fp8"], 64, 128)
    config = ENGINES[0].told(of_files, {"m.o_proj": stored(of_files, 64, 128)[0]})
    ENGINES[0].rename(config, lambda name: re.sub(r"\w+$", lambda found: back.get(found[0], found[0]), name))
    assert torch.equal(dense_of(process(ENGINES[0].row(config, 128, 64, tensors))), dense)


@each_engine
def test_experts_in_fp8_per_tensor_by_transformers_names_that_are_stacked_are_an_error(engine):
    names = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")
    config = engine.told(CONFIGS["fp8-names"], {EXPERTS: dict.fromkeys(names, "F32")})
    with pytest.raises(ValueError, match=f"{EXPERTS}.*: expected the scales of experts .* got gate_up_proj_s"):
        engine.experts(config, (4, 64, 64), packed=False)


# ---- layers in floats, sums, made-up weights --------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize("bits, activation", [(4, None), (4, "int8"), (8, "e4m3"), (8, "int8")])
def test_a_layer_in_floats_is_quantised_while_it_is_loaded(engine, bits, activation):
    weights = [torch.randn(64, 64, dtype=BF16) for _ in range(2)]
    config = engine.config(None, bits=bits, activation=activation, group_size=32 if bits == 4 else None)
    layer = engine.gate_up(config, 64, 64)
    assert layer.weight.nbytes < 64  # files' tensors stay in the host's memory until the last one is there
    for part, weight in enumerate(weights):
        assert "jitgemm" not in layer._modules
        with engine.rank():
            load(layer, {"weight": weight}, part)
    module, expected = layer.jitgemm, torch.cat(weights).double()
    assert process(layer) is module and not any(matrix.kept for matrix in layer.quant_method.matrices)
    assert (dense_of(module) - expected).norm() < (0.12 if bits == 4 else 0.03) * expected.norm()
    assert module.activation == (activation or "e4m3") and not list(layer.parameters())


@each_engine
def test_tensors_whose_memory_a_loader_uses_again_are_copied(monkeypatch, engine):
    """As --load-format runai_streamer does."""
    engine.loads_as(monkeypatch, "runai_streamer")
    weights, memory = [torch.randn(64, 64, dtype=BF16) for _ in range(2)], torch.empty(64, 64, dtype=BF16)
    layer = engine.gate_up(engine.config(None, group_size=32), 64, 64)
    with engine.rank():
        for part, weight in enumerate(weights):
            load(layer, {"weight": memory.copy_(weight)}, part)
    expected = torch.cat(weights).double()
    assert (dense_of(process(layer)) - expected).norm() < 0.12 * expected.norm()


@each_engine
def test_floats_of_any_type_are_rounded_and_codes_are_not_taken_for_them(engine):
    weight = torch.randn(64, 64, dtype=torch.float64)
    engine.row(None, 64, 64, {"weight": weight})
    with pytest.raises(ValueError, match="weight: expected .*float64, got float8_e4m3fn .layer m.o_proj"):
        engine.row(None, 64, 64, {"weight": weight.to(torch.float8_e4m3fn)})


@each_engine
def test_sums_in_f16_that_cannot_be_had_are_named(monkeypatch, engine):
    """Of scales that f16 does not hold, where fp32 serves on; of activations that have none."""
    said = engine.log(monkeypatch)
    tensors, _ = stored(CONFIGS["packed"], 64, 64)
    tensors["weight_scale"][3, 1] *= 2.0**-20
    module = process(engine.row(engine.config(CONFIGS["packed"], sums="f16"), 64, 64, tensors))
    assert (module.sums, module.call_sums) == ("f16", "f32")
    expected = "jitgemm: m.o_proj is added up in fp32, as sums in f16 cannot be had: scales that f16 does not hold"
    assert said[-1:] == [expected]
    config = engine.config(CONFIGS["packed-int8"], sums="f16")
    with pytest.raises(ValueError, match=r"sums: .* got 'f16' with int8 \(layer m.o_proj\)"):
        process(engine.row(config, 64, 64, stored(CONFIGS["packed-int8"], 64, 64)[0]))


@pytest.mark.parametrize("engine, name", in_turn(None, *LINEAR))
def test_weights_that_the_engine_makes_up_are_packed_in_the_files_form(monkeypatch, engine, name):
    """--load-format dummy: it calls no loaders."""
    tensors = {"weight": torch.randn(128, 128, dtype=BF16)} if name is None else stored(CONFIGS[name], 128, 128)[0]
    layers = {"m.o_proj": tensors} | {f"{EXPERTS}.{e}.{proj}": tensors for e in range(2) for proj in SHARDS}
    expected = process(engine.row(engine.told(name and CONFIGS[name], layers), 128, 128, tensors))
    engine.loads_as(monkeypatch, "dummy")
    config = engine.told(name and CONFIGS[name], layers)
    module, fused = process(engine.row(config, 128, 128)), engine.experts(config, (2, 128, 128)).jitgemm
    assert module.activation == fused.activation == expected.activation
    for weight in (module.weight, fused.w13.weight, fused.w2.weight):
        assert weight.bits == expected.weight.bits
        # Of these data alone tell it.
        assert weight.group_size == expected.weight.group_size or name in ("torchao-tiles", "qserve-channel")
        assert weight.dequantize().isfinite().all() and weight.dequantize().any()
    assert module.weight.format.code == expected.weight.format.code or name in (*OF_QSERVE, "rotated")


@each_engine
def test_weights_that_the_engine_makes_up_without_headers_are_quantised_as_the_options_say(monkeypatch, engine):
    engine.loads_as(monkeypatch, "dummy")
    config = engine.config(CONFIGS["gptq"], bits=8)
    fill = lambda layer: [param.data.fill_(1) for param in layer.parameters()]  # noqa: E731
    fill(layer := engine.row(config, 64, 64))
    assert process(layer).weight.bits == engine.experts(config, (2, 64, 64), fill).jitgemm.w13.weight.bits == 8


# ---- files that lack a tensor ----------------------------------------------------------------------------------------

MAY_LACK = {"weight_shape": CONFIGS, "g_idx": CONFIGS, "activation_scale": CONFIGS, "input_scale": (*PER_TENSOR, "modelopt-mxfp4", "modelopt-nvfp4"),
            "input_global_scale": CONFIGS, "zeros": ("executorch",)}  # fmt: skip
"""What a layer can be read without, and in which formats."""


def dropped(name, *seeds, sizes=(128, 128)):
    """Each suffix that the format needs, and the tensors of layers of which the last lacks it."""
    found = [stored(CONFIGS[name], *sizes, seed)[0] for seed in seeds]
    for suffix in found[-1]:
        if name not in MAY_LACK.get(suffix, ()):
            yield suffix, [*found[:-1], {each: tensor for each, tensor in found[-1].items() if each != suffix}]


@pytest.mark.parametrize("engine, name", in_turn(*LINEAR))
@known_or_not
def test_a_tensor_that_no_file_holds_is_an_error_of_every_loader(engine, name, known):
    """Of a row-parallel layer; of joined ones, where the others have it; for `load_`."""
    layers = ("m.o_proj", *(f"m.{part}_proj" for part in ("gate", "up", *"qkv")))
    config = told_if(engine, known, CONFIGS[name], dict.fromkeys(layers, stored(CONFIGS[name], 128, 128)[0]))
    for suffix, (tensors,) in dropped(name, 0):
        said = rf"^{suffix}: expected numbers, found none in the files .layer m.o_proj" if known else "m.o_proj"
        with pytest.raises(ValueError, match=said):
            process(engine.row(config, 128, 128, tensors))
        model = torch.nn.ModuleDict({"o_proj": torch.nn.Linear(128, 128, bias=False)})
        with pytest.raises(ValueError, match="o_proj"):
            load_(model, {f"o_proj.{each}": tensor for each, tensor in tensors.items()}, config=CONFIGS[name])
    for make, count, lacks in (
        (engine.gate_up, 2, "up"),
        (lambda c, k, n, p: engine.qkv(c, k, dict(zip("qkv", p))), 3, "v"),
    ):
        for suffix, parts in dropped(name, *range(count)):
            with pytest.raises(ValueError, match=rf"^{suffix}: expected numbers, .* .layer m.{lacks}_proj"):
                process(make(config, 128, 128, parts))


@pytest.mark.parametrize("engine, case", in_turn(*third(LINEAR, [torch.float64, torch.complex64, torch.int16])))
def test_a_tensor_of_a_type_that_its_format_has_not_is_an_error(engine, case):
    name, wrong = case
    tensors, _ = stored(CONFIGS[name], 128, 128)
    for suffix, tensor in tensors.items():
        if name in MAY_LACK.get(suffix, ()) and (suffix, name) != ("input_scale", "fp8"):
            continue  # which says nothing of the weight, or may be of any type
        with pytest.raises(ValueError, match=f"{suffix}.*m.o_proj"):
            process(engine.row(CONFIGS[name], 128, 128, tensors | {suffix: torch.zeros(tensor.shape, dtype=wrong)}))


@each_engine
@pytest.mark.parametrize("form", ["linear", "joined", "experts"])
def test_weights_in_floats_that_no_file_holds_are_an_error(engine, form):
    weight = {"weight": torch.randn(64, 64, dtype=BF16)}
    with pytest.raises(ValueError, match="weight: expected numbers.* found none in the files"):
        if form == "experts":
            engine.experts(None, (2, 64, 64), {(0, proj): weight for proj in SHARDS} | {(1, "gate_proj"): weight})
        else:
            process(engine.row(None, 64, 64) if form == "linear" else engine.gate_up(None, 64, 64))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@first_engine
def test_kernels_of_every_kind_are_compiled_before_the_last_layer_is_packed(monkeypatch, engine):
    calls = []

    def compiled(modules, tokens, **options):
        time.sleep(0.2)
        calls.append((sorted(module.out_features for module in modules), options))
        return ["a kernel"]

    monkeypatch.setattr(warm, "warmup", compiled)
    monkeypatch.setattr(warm, "on_gpu", lambda module: True)
    monkeypatch.setenv("JITGEMM_JIT", "off")
    config, asymmetric = engine.config(CONFIGS["packed"]), engine.config(CONFIGS["packed-asymmetric"])
    asymmetric.warmer = config.warmer
    layers = []
    for i, (own, n) in enumerate([(config, 64), (config, 64), (config, 128), (asymmetric, 64), (config, 64)]):
        layers.append(engine.row(own, 64, n, stored(own.checkpoint, n, 64)[0], prefix=f"m.{i}.o_proj"))
    del layers[-1]  # a layer that no model keeps is not waited for
    gc.collect()
    for layer in layers[:3]:
        process(layer)
    assert sum((found for found, _ in calls), []) in ([], [64])  # packing goes on meanwhile
    process(layers[3])
    assert sorted(sum((found for found, _ in calls), [])) == [64, 64, 128]  # one with zero points
    expected = {"dtype": BF16, "build": False, "compiled": config.warmer.compiled}
    assert all(options == expected for _, options in calls)


@first_engine
def test_a_kernel_that_does_not_compile_stops_the_start(monkeypatch, engine):
    def fails(modules, tokens, **options):
        raise CompileError("nvrtc says no")

    monkeypatch.setattr(warm, "warmup", fails)
    monkeypatch.setattr(warm, "on_gpu", lambda module: True)
    layer = engine.row(CONFIGS["packed"], 64, 64, stored(CONFIGS["packed"], 64, 64)[0])
    with pytest.raises(CompileError, match="nvrtc says no"):
        process(layer)
