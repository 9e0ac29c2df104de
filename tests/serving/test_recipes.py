"""Doors and recipes: what quantises a model in floats makes the same packed bytes of it, wherever it is asked."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import ENGINES, SPLITS, each_engine, process, sglang, vllm
from model_folders import MOE, emptied, folder_of, model_of
from model_folders import SIZES as LLAMA
from safetensors.torch import load_file

import jitgemm.nn
from jitgemm.cli import main
from jitgemm.nn.layers.packed import Packed
from jitgemm.nn.quantize.quantize import Quantising
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.warm.ahead import models_ahead

transformers = pytest.importorskip("transformers", minversion="5")
SIZES = MOE | {"num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 128}
LINEARS = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
EXPERTS = "model.layers.0.mlp.experts"
RECIPES = {
    "nothing said": {},
    "groups": {"group_size": 32},
    "a scale per row": {"group_size": -1},
    "groups with zero points": {"group_size": 64, "symmetric": False},
    "groups for int8": {"group_size": 32, "activation": "int8"},
    "e4m3": {"bits": 8},
    "int8": {"bits": 8, "activation": "int8"},
    "e4m3 in blocks": {"bits": 8, "activation": "e4m3_block", "block": 128},
    "codes without -8": {"group_size": 32, "full_range": False, "scale_dtype": torch.float16},
    "mxfp4": {"scheme": "mxfp4"},
    "two-level": {"scheme": "two-level"},
    "two-level, rotated": {"scheme": "two-level", "rotation": 128},
    "mxfp4, rotated": {"scheme": "mxfp4", "rotation": 128},
    "int8, rotated": {"bits": 8, "activation": "int8", "rotation": 128},
}


@pytest.fixture(scope="module")
def folder_with(tmp_path_factory):
    """A model's folder by the columns of its experts, without a tokenizer, so that there is nothing to evaluate with."""

    @functools.cache
    def made(inter: int) -> Path:
        sizes = SIZES | {"moe_intermediate_size": inter}
        folder = folder_of(tmp_path_factory.mktemp("moe") / "model", model_of("Qwen3Moe", **sizes))
        for file in folder.glob("token*"):
            file.unlink()
        return folder

    return made


@functools.cache
def floats(folder: Path) -> torch.nn.Module:
    """The model, which no test changes."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: model.get_submodule(name) for name in (*LINEARS, EXPERTS)}


def by_quantize(folder, said, tmp_path):
    model = copy.deepcopy(floats(folder))
    jitgemm.nn.quantize_(model, **said)
    return layers_of(model)


def by_hf(folder, said, tmp_path):
    hf = pytest.importorskip("jitgemm.hf")
    said |= {"scale_dtype": "float16"} if "scale_dtype" in said else {}  # as JSON has it
    config = hf.JitGemmConfig(**said)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=config)
    if "rotation" in said:  # and what it saves
        model.save_pretrained(tmp_path / "saved")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    return layers_of(model)


@functools.cache
def written(folder, options):
    """The folder that the command writes, its config and its tensors."""
    out = folder.parent / f"written{''.join(options)}"
    with pytest.raises(SystemExit) as exit:
        main(["quantize", str(folder), str(out), "--device", "cpu", "--data", "none", *options])
    assert not exit.value.code
    tensors: dict = {}
    for file in out.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            layer, _, suffix = name.rpartition(".")
            tensors.setdefault(layer, {})[suffix] = tensor
    return out, json.loads((out / "config.json").read_text())["quantization_config"], tensors


def written_by(folder, said):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in said.items() if name != "symmetric"]
    return written(folder, (*options, *(["--zero-point"] if said.get("symmetric") is False else [])))


def by_command(folder, said, tmp_path):
    out, _, _ = written_by(folder, said)
    jitgemm.nn.load_(model := emptied(out), out, activation=said.get("activation"))
    return layers_of(model)


def tensors_of_experts(model):
    layout, found = model.get_submodule(EXPERTS), {}
    for e, (both, down) in enumerate(zip(layout.gate_up_proj.detach(), layout.down_proj.detach())):
        parts = zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), down))
        found |= {(e, proj): {"weight": weight} for proj, weight in parts}
    return found


def sizes_of(model):
    return tuple(model.get_submodule(EXPERTS).down_proj.shape)


def by_engine(engine, of_files=False):
    """What an engine makes of the model in floats, or of the files that the command writes."""

    def by(folder, said, tmp_path):
        model, config = floats(folder), engine.config(None, **said)
        tensors = {name: {"weight": model.get_submodule(name).weight.detach()} for name in LINEARS}
        experts = tensors_of_experts(model)
        if of_files:
            out, quantization, tensors = written_by(folder, said)
            config = engine.config(quantization, activation=said.get("activation"))
            config.read_folder(out)
            experts = {(e, proj): tensors[f"{EXPERTS}.{e}.{proj}"] for e, proj in experts}
        made = {}
        for name in LINEARS:
            made[name] = process(
                engine.row(config, *model.get_submodule(name).weight.shape[::-1], tensors[name], prefix=name)
            )
        made[EXPERTS] = engine.experts(config, sizes_of(model), experts, prefix=EXPERTS).jitgemm
        return made

    return by


DOORS = {"quantize_": by_quantize, "hf": by_hf, "command": by_command}
DOORS |= {engine.label: by_engine(engine) for engine in ENGINES}
DOORS |= {f"files in {engine.label}": by_engine(engine, True) for engine in ENGINES}
OF_FILES = [name for name in DOORS if name == "command" or name.startswith("files")]


def same(layer, weight: torch.Tensor, recipe: Recipe, door: str) -> bool:
    """Whether a layer's weight and activation are the recipe's, byte for byte."""
    made = recipe.apply(weight)
    expected, found = made.state_dict(), layer.weight.state_dict()
    if door in OF_FILES and recipe.scheme == "two-level":
        # QServe's files have the same row scales in fp16, and compressed-tensors' the largest that fit.
        names = [] if recipe.rotation else ["blocks", "row_sum"]
        assert torch.equal(layer.weight.dequantize(), made.dequantize())
        assert layer.weight.rotation == made.rotation and layer.weight.format.code == made.format.code
    else:
        names = list(expected)
    bytes_of = {name: [tensors[name].view(torch.uint8) for tensors in (found, expected)] for name in names}
    same = all(torch.equal(*both) for both in bytes_of.values())
    return same and layer.activation == recipe.inputs and expected.keys() == found.keys()


every_recipe = pytest.mark.parametrize(
    "recipe, inter",
    [*((recipe, 128) for recipe in RECIPES), ("nothing said", 96)],
    ids=[*RECIPES, "columns of no whole blocks"],
)


@every_recipe
@pytest.mark.parametrize("door", DOORS)
def test_every_door_makes_the_same_packed_bytes_by_every_recipe(
    folder_with, tmp_path, quiet_transformers, door, recipe, inter
):
    said, folder = RECIPES[recipe], folder_with(inter)
    if door in OF_FILES and (said.get("group_size") == -1 or {"block", "full_range"} & said.keys()):
        pytest.skip("no option of the command: its files have groups, or 8 bits with a scale per row")
    model, found, recipe = floats(folder), DOORS[door](folder, dict(said), tmp_path), Recipe.of(said)
    of_experts = recipe.for_columns(inter)

    def written_so(recipe):  # as other readers expect scales
        positive = door in OF_FILES and "positive_scales" in recipe.quantiser.options
        return replace(recipe, positive_scales=True) if positive else recipe

    for name in LINEARS:
        assert same(found[name], model.get_submodule(name).weight.detach(), written_so(recipe), door), name
    fused = model.get_submodule(EXPERTS)
    assert same(found[EXPERTS].w13, fused.gate_up_proj.detach(), written_so(of_experts), door)
    assert same(found[EXPERTS].w2, fused.down_proj.detach(), written_so(of_experts), door)
    assert inter == 128 or (found[EXPERTS].w2.weight.group_size, found[EXPERTS].activation) == (32, "e4m3")


@pytest.mark.parametrize("use", ["linear", "vllm"])
@every_recipe
def test_warm_up_of_a_model_in_floats_has_every_format_that_a_recipe_makes(folder_with, use, recipe, inter):
    folder, recipe = folder_with(inter), Recipe.of(RECIPES[recipe])
    ahead = [part for model in models_ahead(folder, use, recipe=recipe) for part in model.modules()]
    weights = [part.weight for part in ahead if hasattr(part, "blocks")]
    there = {(weight.n, weight.k, weight.format, weight.rotation) for weight in weights}
    model = floats(folder)
    joined = {"linear": [[name] for name in LINEARS], "vllm": [LINEARS[:3], LINEARS[3:]]}[use]
    weights = [torch.cat([model.get_submodule(name).weight.detach() for name in names]) for names in joined]
    fused, of_experts = model.get_submodule(EXPERTS), recipe.for_columns(inter)
    packed = list(map(recipe.apply, weights))
    packed += map(of_experts.apply, (fused.gate_up_proj.detach(), fused.down_proj.detach()))
    assert {(weight.n, weight.k, weight.format, weight.rotation) for weight in packed} <= there


def test_layers_that_a_recipe_leaves_and_its_output_embedding_are_those_of_warm_up(folder_with):
    recipe = Recipe.of({"ignore": ["o_proj", "re:.*experts"], "lm_head": "int8", "group_size": 32, "symmetric": False})
    folder = folder_with(128)
    model = copy.deepcopy(floats(folder))
    for _ in Quantising(model, recipe).stages():
        pass
    (ahead, *_) = models_ahead(folder, recipe=recipe)
    found, expected = (
        {name: (x.weight.format, x.activation) for name, x in each.named_modules() if isinstance(x, Packed)}
        for each in (ahead, model)
    )
    assert found == expected and found.keys() == {*LINEARS[:3], "lm_head"} and found["lm_head"][1] == "int8"


ROTATED = {"scheme": "two-level", "rotation": 128}


@pytest.mark.parametrize(
    "said", [{}, {"group_size": 128}, {"scheme": "two-level"}, {"scheme": "mxfp4"}, ROTATED], ids=str
)
def test_warm_up_for_an_engine_has_formats_of_columns_that_a_rank_quantises(tmp_path, recwarn, said):
    """192 of 384 columns on each of two ranks: the second one's begin inside a group of the whole layer's."""
    folder = folder_of(tmp_path / "model", model_of("Llama", **LLAMA | {"intermediate_size": 384}))
    recipe, name = Recipe.of(said), "model.layers.0.mlp.down_proj"
    of_rank = recipe.for_columns(192)
    weight = floats(folder).get_submodule(name).weight.detach()

    def ahead(world):
        models = models_ahead(folder, "vllm", world, recipe=recipe)
        return {(x.weight.k, x.weight.format) for model in models for n, x in model.named_modules() if "down_proj" in n}

    assert ahead(1) and not any("is left" in str(each.message) for each in recwarn)
    there, left = ahead(2), said == ROTATED  # as no rank has whole blocks
    assert any("down_proj is left to vLLM's own kernels" in str(each.message) for each in recwarn) == left
    # As values decide.
    assert len(there) == (0 if left else {"mxfp4": 3, "two-level": 1}.get(of_rank.scheme, 2 if said else 1))
    for number in range(2):
        layer = vllm.row(vllm.config(None, **said), 384, 64, {} if left else {"weight": weight}, (number, 2), name)
        assert isinstance(layer.quant_method, vllm.Linear) != left
        if not left:
            found = process(layer).weight
            assert (found.k, found.format) in there
            assert torch.equal(found.blocks, of_rank.apply(weight.chunk(2, 1)[number]).blocks)


@pytest.mark.parametrize("recipe", ["two-level", "two-level, rotated", "mxfp4", "mxfp4, rotated"])
@pytest.mark.parametrize("split", ["tp", "ep"])
@each_engine
def test_a_rank_quantises_its_experts_or_its_part_of_each(engine, split, recipe):
    """With files in floats; w2's columns are the rank's own, of whole blocks."""
    recipe, sizes = Recipe.of(RECIPES[recipe]), (4, 128, 256)
    said = {name: value for name, value in (("scheme", recipe.scheme), ("rotation", recipe.rotation)) if value}
    torch.manual_seed(3)
    w13, w2 = torch.randn(4, 512, 128).bfloat16(), torch.randn(4, 128, 256).bfloat16()
    tensors = {(e, proj): {"weight": each} for e in range(4) for proj, each in
               zip(("gate_proj", "up_proj", "down_proj"), (*w13[e].chunk(2), w2[e]))}  # fmt: skip
    for _, number, size in SPLITS[split]:
        module = engine.experts(engine.config(None, **said), sizes, tensors, (split, number, size), EXPERTS).jitgemm
        if split == "ep":
            mine = [each.chunk(2)[number] for each in (w13, w2)]
        else:
            gate, up = (half.chunk(2, 1)[number] for half in w13.chunk(2, 1))
            mine = [torch.cat((gate, up), 1), w2.chunk(2, 2)[number]]
        for part, weight in zip((module.w13, module.w2), mine):
            assert same(part, weight, recipe, engine.label) and part.weight.rotation == (recipe.rotation or 0)


@pytest.mark.parametrize("rotation", [None, 128])
def test_tokens_that_are_to_be_rotated_are_not_sent_in_codes(folder_with, rotation):
    said = {"bits": 8, "activation": "e4m3_block", "rotation": rotation}
    model = floats(folder_with(128))
    sizes, tensors = sizes_of(model), tensors_of_experts(model)
    layer = sglang.experts(sglang.config(None, **said), sizes, tensors, prefix=EXPERTS, deepep=True)
    codes = layer.dispatcher.quant_config["low_latency_dispatcher_output_dtype"]
    assert codes == ("fp8" if rotation is None else "bf16")
    layer = vllm.experts(vllm.config(None, **said), sizes, tensors, prefix=EXPERTS)
    layer.jitgemm.batched = True
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    sent = layer.quant_method.get_fused_moe_quant_config(layer)
    assert (sent is FUSED_MOE_UNQUANTIZED_CONFIG) == (rotation is not None)
