"""The checkpoints that docs/models.md names, at toy size: names, mixtures of schemes, drafts and what stays in floats as the
files have them; filled by `load_` and loaded by both engines' layers, against the weights that the tensors stand for."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mxfp4
import pytest
import torch
from engines import each_engine, process
from safetensors.torch import save_file
from served_layers import BF16, CONFIGS, E4M3, MXFP8, assert_held, dense_of, scheme, stored

from jitgemm.nn import PackedLinear, load_

Layer = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors by suffix, and the weight that they stand for."""
HIDDEN, INTER, COUNT = 256, 128, 2
SIZES = {"w1": (INTER, HIDDEN), "w3": (INTER, HIDDEN), "w2": (HIDDEN, INTER)}
PROJ = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def of(config: dict[str, Any]) -> Callable[..., Layer]:
    return lambda n, k, seed: stored(config, n, k, seed)


def fp4(n: int, k: int, seed: int) -> Layer:
    """DeepSeek-V4's experts."""
    parts = mxfp4.parts(seed, n, k, shift=-12)
    tensors = {"weight": parts.canonical.view(torch.int8), "scale": parts.scales.view(torch.float8_e8m0fnu)}
    return tensors, parts.dequantize_fp64()


def fp8(block: int) -> Callable[..., Layer]:
    """DeepSeek's linears, whose blocks have powers of two."""

    def made(n: int, k: int, seed: int) -> Layer:
        torch.manual_seed(seed)
        codes = torch.randn(n, k).to(torch.float8_e4m3fn)
        exponents = torch.randint(112, 124, (-(-n // block), -(-k // block)), dtype=torch.uint8)
        scale = torch.exp2(exponents.double() - 127).repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k]
        return {"weight": codes, "scale": exponents.view(torch.float8_e8m0fnu)}, codes.double() * scale

    return made


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's config and headers say.

    Attributes:
        config: its quantization_config; `vllm`: what vLLM 0.33 makes of it, where that is another.
        linears: {layer: how it is stored}. experts: {module: the same}, whose layers are `projs`.
        floats: layers that stay in floats.
        activation: what linears, and what experts compute with.
        drafts: layers of which the models have none.
        named: what vLLM's model calls a tensor.
    """

    config: dict[str, Any]
    linears: dict[str, Callable[..., Layer]]
    experts: dict[str, Callable[..., Layer]]
    floats: tuple[str, ...]
    activation: tuple[str | None, str]
    projs: dict[str, str] = field(default_factory=lambda: PROJ)
    vllm: dict[str, Any] = field(default_factory=dict)
    drafts: str | None = None
    named: Callable[[str], str] = str
    warns: bool = False

    def layers(self) -> dict[str, Layer]:
        found = {}
        for name, make in self.linears.items():
            found[name] = make(HIDDEN, HIDDEN, len(found))
        for module, make in self.experts.items():
            for e in range(COUNT):
                for shard, size in SIZES.items():
                    found[f"{module}.{e}.{self.projs[shard]}"] = make(*size, len(found))
        return found


WS = {each: each for each in SIZES}
V4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic", "expert_dtype": "fp4"}
AS_V4 = {"quant_method": "deepseek_v4_fp8"}


def deepseek(block: int, vision: tuple[str, ...] = ()) -> Checkpoint:
    linears = [f"layers.0.attn.{each}" for each in ("wq_a", "wq_b", "wkv", "wo_b")]
    linears += [f"layers.0.ffn.shared_experts.{each}" for each in WS] + ["mtp.0.attn.wq_a"]
    return Checkpoint(
        V4 | {"weight_block_size": [block, block]},
        dict.fromkeys(linears, fp8(block)), dict.fromkeys(("layers.0.ffn.experts", "mtp.0.ffn.experts"), fp4),
        ("layers.0.ffn.gate", "layers.0.attn.indexer.weights_proj", "head", *vision), ("e4m3_block", "e4m3_block"), WS, AS_V4, r"^mtp\.",
    )  # fmt: skip


LEFT_OUT = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]


def of_mistral(name: str) -> str:
    """As vLLM's patterns: they end with the tensors' names."""
    if found := re.fullmatch(r"layers\.(\d+)\.((?:shared_)?experts(?:\.\d+)?)\.(w\d)\.(\w+)", name):
        return f"model.layers.{found[1]}.mlp.{found[2]}.{PROJ[found[3]]}.{found[4]}"
    return re.sub(r"\Alayers\.(\d+)\.attention\.wq_b\.(\w+)\Z", r"model.layers.\1.self_attn.q_b_proj.\2", name)


TOWERS = ("vision_tower.encoder.blocks.0.wqkv", "mm_projector.linear_1")
OF_TEXT = "language_model.model.layers.1"
K3 = scheme(format="mxfp4-pack-quantized", type="float") | {
    "ignore": [*LEFT_OUT, "re:.*vision_tower.*", "re:mm_projector.*"]
}
K3_MX = {"config_groups": {"group_0": K3["config_groups"]["group_0"] | {"input_activations": MXFP8}}}
INT4_128, FP8_ROWS = scheme(size=128, inputs=E4M3), CONFIGS["float-quantized"]
M3 = {
    f"{OF_TEXT}.self_attn.{each}_proj": "MXFP8" for each in "qkvo"
} | {f"{OF_TEXT}.block_sparse_moe.shared_experts.{each}": "MXFP8" for each in PROJ.values()}  # fmt: skip
M3_EXPERTS = [f"{OF_TEXT}.block_sparse_moe.experts.{e}.{each}" for e in range(COUNT) for each in WS]


def kimi_k3(config: dict[str, Any], activation: str, warns: bool) -> Checkpoint:
    shared = f"{OF_TEXT}.block_sparse_moe.shared_experts.down_proj"
    floats = (f"{OF_TEXT}.self_attn.o_proj", shared, f"{OF_TEXT}.block_sparse_moe.gate", "language_model.lm_head")
    named = {f"{OF_TEXT}.block_sparse_moe.experts": of(CONFIGS["mxfp4"])}
    given = config | {"ignore": [*config["ignore"], "re:.*lm_head", "re:.*block_sparse_moe.gate$"]}
    return Checkpoint(given, {}, named, floats + TOWERS, (None, activation), WS, {"quant_method": "mxfp4"}, warns=warns)


CHECKPOINTS = {
    "deepseek-ai/DeepSeek-V4-Flash": deepseek(128),
    "deepseek-ai/DeepSeek-V4.1-Flash": deepseek(32, ("vision.blocks.0.attn.wqkv",)),
    "moonshotai/Kimi-K2.6": Checkpoint(
        scheme() | {"ignore": [*LEFT_OUT, "re:.*vision_tower.*", "re:mm_projector.*", "re:.*lm_head", "re:.*mlp.gate$"]},
        {}, {f"{OF_TEXT}.mlp.experts": of(scheme())},
        (f"{OF_TEXT}.self_attn.o_proj", f"{OF_TEXT}.mlp.shared_experts.up_proj", f"{OF_TEXT}.mlp.gate", *TOWERS,
         "language_model.lm_head"), (None, "e4m3"),
    ),
    "moonshotai/Kimi-K3": kimi_k3(K3, "e4m3", False),
    "moonshotai/Kimi-K3, inputs in MXFP8": kimi_k3(K3 | K3_MX, "e4m3_block", True),
    "gpustack/GLM-5.3-W4A8": Checkpoint(
        INT4_128 | {
            "format": "mixed-precision", "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*indexer.*", "re:.*eh_proj"],
            "config_groups": {
                "group_0": INT4_128["config_groups"]["group_0"] | {
                    "targets": [r"re:.*mlp\.experts\.\d+\..*"], "format": "pack-quantized"},
                "group_1": FP8_ROWS["config_groups"]["group_0"] | {
                    "targets": ["re:.*self_attn.*", "re:.*shared_experts.*"], "format": "float-quantized"},
            },
        },
        dict.fromkeys(
            (*(f"model.layers.3.self_attn.{each}_proj" for each in ("q_a", "q_b", "o")),
             *(f"model.layers.3.mlp.shared_experts.{each}" for each in PROJ.values()), "model.layers.78.self_attn.o_proj"),
            of(FP8_ROWS),
        ),
        dict.fromkeys(("model.layers.3.mlp.experts", "model.layers.78.mlp.experts"), of(INT4_128)),
        ("model.layers.3.mlp.gate", "model.layers.3.self_attn.indexer.wk", "lm_head"), ("e4m3", "e4m3"),
        drafts=r"^model\.layers\.78\.",
    ),
    "nvidia/MiniMax-M3-NVFP4": Checkpoint(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
         "quantized_layers": {name: {"quant_algo": kind} for name, kind in M3.items()}
         | {name: {"quant_algo": "NVFP4", "group_size": 16} for name in M3_EXPERTS},
         "exclude_modules": ["*lm_head", "*block_sparse_moe.gate", "vision_tower*", "multi_modal_projector*"]},
        dict.fromkeys(M3, of(CONFIGS["modelopt-mxfp8"])),
        {f"{OF_TEXT}.block_sparse_moe.experts": of(CONFIGS["modelopt-nvfp4"])},
        (f"{OF_TEXT}.block_sparse_moe.gate", "vision_tower.encoder.layers.0.self_attn.q_proj", "language_model.lm_head"),
        ("e4m3_block", "e4m3"), WS, {"quant_method": "modelopt_mixed"}, warns=True,
    ),
    "mistralai/Mistral-Small-4-119B-2603-NVFP4": Checkpoint(
        CONFIGS["nvfp4"] | {"ignore": ["re:vision_encoder.*", "output"]},
        dict.fromkeys((f"layers.0.shared_experts.{each}" for each in WS), of(CONFIGS["nvfp4"])),
        {"layers.0.experts": of(CONFIGS["nvfp4"])},
        ("layers.0.attention.wq_b", "layers.0.gate", "output", "vision_encoder.transformer.layers.0.attention.wq"),
        ("e4m3", "e4m3"), WS, named=of_mistral,
    ),
}  # fmt: skip
each_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)


def floats_of(name: str) -> torch.Tensor:
    torch.manual_seed(len(name))
    return torch.randn(64, HIDDEN).to(BF16)


def model_of(names: dict[str, tuple[int, ...]], drafts: str | None) -> torch.nn.Module:
    """A module for each of a file's layers, under its name; but drafts."""
    model = torch.nn.Module()
    for name, (n, k) in names.items():
        if drafts is not None and re.match(drafts, name):
            continue
        *path, last = name.split(".")
        module = model
        for part in path:
            module = module._modules.setdefault(part, torch.nn.Module())
        module.add_module(last, torch.nn.Linear(k, n, bias=False, dtype=BF16, device="meta"))
    model._keys_to_ignore_on_load_unexpected = [] if drafts is None else [drafts]
    return model


@each_checkpoint
def test_load_fills_every_layer_in_its_own_format_and_leaves_the_rest_in_floats(tmp_path, name):
    checkpoint = CHECKPOINTS[name]
    layers = checkpoint.layers()
    tensors = {f"{layer}.{suffix}": tensor for layer, (found, _) in layers.items() for suffix, tensor in found.items()}
    tensors |= {f"{layer}.weight": floats_of(layer) for layer in checkpoint.floats}
    native = name.startswith("mistralai/")  # the files have no config.json
    file, told_in = ("consolidated", "params") if native else ("model", "config")
    save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, tmp_path / f"{file}.safetensors")
    said_there = {"quantization" if native else "quantization_config": checkpoint.config}
    (tmp_path / f"{told_in}.json").write_text(json.dumps(said_there))
    sizes = {layer: tuple(dense.shape) for layer, (_, dense) in layers.items()}
    model = model_of(sizes | {layer: (64, HIDDEN) for layer in checkpoint.floats}, checkpoint.drafts)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = load_(model, tmp_path, device="cpu")
    mine = [layer for layer in layers if not (checkpoint.drafts and re.match(checkpoint.drafts, layer))]
    assert sorted(report) == sorted(mine)
    assert len([each for each in said if "MXFP8" in str(each.message)]) == checkpoint.warns
    for layer in mine:
        module = model.get_submodule(layer)
        of_experts = any(layer.startswith(f"{module}.") for module in checkpoint.experts)
        assert isinstance(module, PackedLinear) and module.activation == checkpoint.activation[of_experts], layer
        assert torch.equal(dense_of(module), layers[layer][1]), layer
    ignored = {each.rpartition(".")[0] for each in report.ignored}
    assert set(layers) - set(mine) <= ignored
    for layer in checkpoint.floats:
        module = model.get_submodule(layer)
        assert type(module) is torch.nn.Linear and torch.equal(module.weight, floats_of(layer))


@each_engine
@each_checkpoint
def test_an_engine_s_layers_hold_every_weight_and_leave_the_rest_in_floats(name, engine):
    """By the names of the files, as the engines' maps of names are theirs; drafts too."""
    checkpoint = CHECKPOINTS[name]
    layers, of_vllm = checkpoint.layers(), engine.label == "vLLM"
    told_of = {layer: found for layer, (found, _) in layers.items()}
    told_of |= {layer: {"weight": floats_of(layer)} for layer in checkpoint.floats}
    config = engine.told(checkpoint.config | (checkpoint.vllm if of_vllm else {}), told_of)
    config.packed_modules_mapping = {}
    called = dict(zip(told_of, told_of))
    if of_vllm:
        engine.rename(config, checkpoint.named)
        called = {layer: checkpoint.named(f"{layer}.weight").removesuffix(".weight") for layer in called}
    for layer in checkpoint.linears:
        tensors, dense = layers[layer]
        packed = process(engine.row(config, HIDDEN, HIDDEN, tensors, prefix=called[layer]))
        assert torch.equal(dense_of(packed), dense) and packed.activation == checkpoint.activation[0], layer
    for layer in checkpoint.floats:
        assert not engine.serves(config, called[layer], 64, HIDDEN), layer
    for prefix in checkpoint.experts:
        of_module = {(e, PROJ[s]): layers[f"{prefix}.{e}.{checkpoint.projs[s]}"] for e in range(COUNT) for s in SIZES}
        tensors, dense = ({key: each[i] for key, each in of_module.items()} for i in (0, 1))
        own = called[f"{prefix}.0.{checkpoint.projs['w1']}"].rsplit(".", 2)[0]
        packed = engine.experts(config, (COUNT, HIDDEN, INTER), tensors, prefix=own).jitgemm
        assert packed.activation == checkpoint.activation[1]
        assert_held([packed], dense, "whole")


def test_the_page_has_these_checkpoints_and_gpt_oss():
    """Whose own format test_served_experts.py and test_mxfp4_formats.py test by `gpt_oss`."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    named = set(re.findall(r"^vllm serve (\S+)", text, re.MULTILINE))
    served = {name.partition(",")[0] for name in CHECKPOINTS} | {"openai/gpt-oss-20b", "openai/gpt-oss-120b"}
    assert named == served
    assert all(f"--model-path {name} " in text for name in served)
    sections = text.split("\n## ")[1:]
    assert all(section.count("\n") < 20 for section in sections)
