"""`jitgemm warmup --model`: what it makes is what the model asks for, in every use; no kernel is missing, few are in
vain.

What a model asks for is recorded on a device whose launches do nothing. Nothing is compiled.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm_layers
from compiled_graphs import Graphs
from emulator.launch import emulate
from engines import load, load_experts, process, vllm
from safetensors.torch import load_file, save_file
from served_layers import CONFIGS, stored

import jitgemm.nn
from jitgemm.activations.scheme import GELU_MULS, SILU_MUL
from jitgemm.errors import CacheMissError
from jitgemm.gemm import launch as gemms
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.kernel import source_of
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.warm.ahead import models_ahead
from jitgemm.nn.warm.warm import gates_of, kernels
from jitgemm.runtime import driver
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.select.choose import choose, kernels_for
from jitgemm.select.devices import device_spec
from jitgemm.weight.two_level import format_of

transformers = pytest.importorskip("transformers", minversion="5")

MAX_M = 4096
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = EXPERTS | {
    "n_routed_experts": 4, "num_local_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "head_dim": 32, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "qk_nope_head_dim": 32, "num_key_value_heads": 4, "norm_topk_prob": True,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "square": ("Llama", {"intermediate_size": 256, "num_key_value_heads": 4, "num_hidden_layers": 1}),
    "gemma3": ("Gemma3", {}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "kimi-k2": ("DeepseekV3", LATENT),
    "minimax-m2": ("MiniMaxM2", EXPERTS | {"num_local_experts": 4, "intermediate_size": 128}),
}
GPTQ = CONFIGS["gptq"]


def save(folder, family: str, quantization: dict | None, fp16: bool = False) -> None:
    """A model's folder, its Linears and experts as the format stores them."""
    kind, more = FAMILIES[family]
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, f"{kind}ForCausalLM").config_class(**SIZES | more)
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16()
    save_model(folder, model, config, quantization, fp16, **{"model_type": "kimi_k2"} if family == "kimi-k2" else {})


def save_model(folder, model, config, quantization: dict | None, fp16: bool = False, **said) -> None:
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer, _, child = name.rpartition(".")
        linear = isinstance(model.get_submodule(layer), torch.nn.Linear) and "lm_head" not in name
        linear = linear and tensor.shape[0] % 32 == 0
        if ".experts." in name and tensor.dim() == 3:
            for e, w in enumerate(tensor):
                parts = {"gate_proj": w.chunk(2)[0], "up_proj": w.chunk(2)[1]} if "gate_up" in child else {child: w}
                for part, rows in parts.items():
                    tensors |= layer_of(f"{layer}.{e}.{part}", rows, quantization, fp16)
        elif linear and child == "weight" and quantization is not None:
            tensors |= layer_of(layer, tensor, quantization, fp16)
        else:
            tensors[name] = tensor.clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    said = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"} | said
    said |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(said))


def layer_of(name: str, weight: torch.Tensor, quantization: dict | None, fp16: bool) -> dict[str, torch.Tensor]:
    if quantization is None:
        return {f"{name}.weight": weight.clone()}
    found, _ = stored(quantization, *weight.shape)
    return {f"{name}.{suffix}": t.half() if fp16 and t.dtype == torch.bfloat16 else t for suffix, t in found.items()}


@contextlib.contextmanager
def recorded():
    """Labels of the kernels that calls on CPU tensors ask for, as on a GPU; nothing is launched.

    Of a GEMM those for any number of tokens.
    """
    labels: set[str] = set()
    top_k = EXPERTS["num_experts_per_tok"]

    def load(family, spec, index):
        labels.add(family.source(spec).label)
        return driver.LoadedKernel(SimpleNamespace(label=""), None, index)

    def choose_all(problem, device):
        given = problem.n, problem.k, problem.lhs, problem.format, device, MAX_M * (top_k if problem.experts else 1)
        options = {"out": problem.out, "experts": problem.experts, "lhs_group": problem.lhs_group}
        labels.update(kernel_source(spec).label for spec in kernels_for(*given, **options))
        return choose(problem, device)

    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        patch.setattr(KernelFamily, "load", load)
        patch.setattr(gemms, "choose", choose_all)
        patch.setattr(driver.cu, "cuLaunchKernelEx", lambda *_: (driver.cu.CUresult.CUDA_SUCCESS,))
        yield labels


def asked(model: torch.nn.Module) -> set[str]:
    with recorded() as labels, torch.no_grad():
        for count in (1, 24, 2048):
            rows = 8 if count % 8 == 0 else 1  # short sequences, as attention is the CPU's
            model(input_ids=torch.arange(96).repeat(count)[:count].view(-1, rows), use_cache=False)
    return labels


@pytest.fixture
def wanted(command):
    """wanted(folder, "--for", "vllm"): labels of the kernels that a warm-up would compile."""

    def call(folder, *options: str) -> set[str]:
        done = command(
            "warmup", "--model", folder, "--max-m", MAX_M, "--device", "h200", "--dry-run", "--json", *options
        )
        assert not done.code, done.stderr
        return {kernel["label"] for kernel in done.json["kernels"]}

    return call


def check(found: set[str], needed: set[str]) -> None:
    """No kernel is missing, and a tenth at most is in vain."""
    assert needed - found == set()
    assert len(found - needed) <= len(found) / 10, found - needed


def loaded(folder, **options) -> torch.nn.Module:
    said = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, said["architectures"][0])
    model = kind(kind.config_class.from_pretrained(folder)).bfloat16()
    jitgemm.nn.load_(model, folder, **options)
    return model.eval()


COMPILED = ("gemma3", "qwen3-moe")
"""Families that a compiler sees: what is compiled is asked for by the layers that the other uses have."""


def needed_by(model: torch.nn.Module, use: str) -> set[str]:
    """What the model asks for, made ready for this use."""
    needed = asked(model)
    if use == "compiled":  # to the same GEMMs
        torch._dynamo.reset()
        run = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, backend=Graphs())
        with torch.no_grad():
            run(torch.arange(3)[None])
            with recorded() as labels:
                run(torch.arange(3)[None])
        needed = {label for label in needed if not label.startswith("quantize")} | labels
    return needed


@pytest.mark.parametrize(
    ("use", "family"),
    [("linear", name) for name in FAMILIES if name != "square"] + [("compiled", name) for name in COMPILED],
)
def test_a_model_asks_for_what_was_made_and_nearly_all_of_it(tmp_path, wanted, family, use):
    save(tmp_path, family, GPTQ, fp16=True)
    found = wanted(tmp_path, "--for", use)
    assert any("-fp16-" in label for label in found)  # as the headers say
    check(found, needed_by(loaded(tmp_path), use))


OF_FOUR_BITS = {"nvfp4", "modelopt-nvfp4"}
"""Their inputs are quantised as the user says."""


@pytest.mark.parametrize("form", sorted({*CONFIGS} - {"fp8-blocks", "gptq", "deepseek-v4", "quark-mixed", "rotated"}))
def test_so_it_does_in_every_format(tmp_path, wanted, form):
    """With layers of one shape: a kernel for each m is chosen once."""
    save(tmp_path, "qwen3-moe" if form == "w4afp8" else "square", CONFIGS[form])
    said = {"activation": "e4m3"} if form in OF_FOUR_BITS else {}
    found = wanted(tmp_path, *(["--activation", "e4m3"] if said else []))
    check(found, needed_by(loaded(tmp_path, **said), "linear"))


def layers_of_vllm(folder, place: tuple[int, int]) -> torch.nn.Module:
    """What vLLM packs of a model's layers on a rank, as it joins and cuts them."""
    config = json.loads((folder / "config.json").read_text())
    tensors, made_of = load_file(folder / "model.safetensors"), vllm.config(config["quantization_config"])
    made_of.warmer.compiled, made_of.warmer._gates = True, gates_of(SimpleNamespace(to_dict=lambda: config))
    hidden, head, heads, kv = (
        config[x] for x in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    said = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": made_of}
    found = torch.nn.ModuleList()

    def stored_as(name: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(name + "."): t for key, t in tensors.items() if key.startswith(name + ".")}

    def add(kind: str, *sizes, at: str, name: str, parts: dict) -> None:
        layer = getattr(vllm.linears, f"{kind}ParallelLinear")(*sizes, **said, prefix=at + name)
        for part, shard in parts.items():
            load(layer, stored_as(f"{at}{part}_proj"), *shard)
        found.append(process(layer))

    for i in range(config["num_hidden_layers"]):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        add("QKV", hidden, head, heads, kv, at=at, name="qkv_proj", parts={part: [part] for part in "qkv"})
        add("Row", heads * head, hidden, at=at, name="o_proj", parts={"o": []})
        if "moe_intermediate_size" not in config:
            inter = config["intermediate_size"]
            add("MergedColumn", hidden, [inter, inter], at=mlp, name="gate_up_proj", parts={"gate": [0], "up": [1]})
            add("Row", inter, hidden, at=mlp, name="down_proj", parts={"down": []})
            continue
        sizes, top_k = (EXPERTS["num_experts"], hidden, config["moe_intermediate_size"]), config["num_experts_per_tok"]
        layer = vllm_layers.experts(made_of, mlp + "experts", sizes, top_k, tp=place)
        parts = {(e, name): stored_as(f"{mlp}experts.{e}.{name}") for e in range(sizes[0])
                 for name in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
        load_experts(layer, mlp + "experts", parts)
        found.append(process(layer))
    return found


@pytest.fixture
def standin():
    vllm_layers.show()
    yield
    vllm_layers.hide()


@pytest.mark.skipif(vllm_layers.REAL, reason="by the stand-in's layers")
@pytest.mark.parametrize(
    ("family", "form", "size"),
    [("llama", "float-quantized", 4), ("gemma3", "packed-static", 1), ("qwen3-moe", "awq", 4)],
)
def test_vllm_waits_for_what_was_made_and_for_no_more(tmp_path, wanted, standin, family, form, size):
    save(tmp_path, family, CONFIGS[form])
    needed = set()
    for number in range(size):
        with vllm_layers.rank(number, size):
            layers = layers_of_vllm(tmp_path, (number, size))
        for spec, *_ in kernels(layers, MAX_M, [torch.bfloat16], "h200", True):
            needed.add((kernel_source(spec) if isinstance(spec, KernelSpec) else source_of(spec)).label)
    assert wanted(tmp_path, "--for", "vllm", "--tp", str(size)) == needed


NESTED = {
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "qwen3.5-moe": ("Qwen3_5MoeForConditionalGeneration", {"num_position_embeddings": 16}),
}
LINEAR_ATTENTION = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 64}
LINEAR_ATTENTION |= {"linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]}
LINEAR_ATTENTION |= {"shared_expert_intermediate_size": 128} | EXPERTS


@pytest.mark.parametrize("family", NESTED)
def test_models_of_several_parts_have_the_layers_that_are_loaded(tmp_path, wanted, family):
    kind, more = NESTED[family]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    vision = {"depth": 1, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256} | more
    text = SIZES | ({} if family == "qwen3-vl" else LINEAR_ATTENTION)
    config = getattr(transformers, kind).config_class(text_config=text, vision_config=vision)
    torch.manual_seed(1)
    save_model(tmp_path, getattr(transformers, kind)(config).bfloat16(), config, CONFIGS["awq"])
    model, (ahead,) = loaded(tmp_path), models_ahead(tmp_path)
    assert any(isinstance(module, jitgemm.nn.PackedLinear) for module in model.modules())
    given = 64, [torch.bfloat16], "h200"
    assert {spec for spec, *_ in kernels(ahead, *given)} == {spec for spec, *_ in kernels(model, *given)}
    assert wanted(tmp_path, "--for", "vllm")


# ---- what a folder says, and what it does not ------------------------------------------------------------------------


def layers_by_format(folder, *options, **more) -> dict[str, set[str]]:
    """{the last part of a layer's name: formats}"""
    found: dict[str, set[str]] = {}
    for model in models_ahead(folder, *options, **more):
        for name, module in model.named_modules():
            if isinstance(module, jitgemm.nn.PackedLinear):
                found.setdefault(name.rpartition(".")[2], set()).add(module.weight.format.name)
    return found


def test_a_folder_that_jitgemm_saved_needs_what_it_saved(tmp_path, wanted):
    save(tmp_path, "llama", GPTQ, fp16=True)
    model = loaded(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    check(wanted(tmp_path / "saved"), needed_by(model, "linear"))


@pytest.mark.parametrize("last", [-7, -8])
def test_a_code_in_the_last_row_decides_the_order_of_all(tmp_path, last):
    """Of e4m3's own, which holds no -8."""
    save(tmp_path, "llama", CONFIGS["int-quantized"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensors[name] = tensor.clamp(min=-7)
            tensors[name][-1, -1] = last
    save_file(tensors, tmp_path / "model.safetensors")
    expected = {"g32-bf16-e4m3" if last == -7 else "g32-bf16-any"}
    assert all(found == expected for found in layers_by_format(tmp_path).values())
    model = loaded(tmp_path)
    assert {m.weight.format.name for m in model.modules() if isinstance(m, jitgemm.nn.PackedLinear)} == expected


def test_experts_are_shared_by_ranks_whole_and_linears_are_cut_by_the_models_plan(tmp_path):
    save(tmp_path, "qwen3-moe", GPTQ)
    first, *others = models_ahead(tmp_path, tp=2, ep=4)
    assert len(others) == 3
    layer = first.model.layers[0]
    assert layer.mlp.experts.num_experts == 1 and layer.mlp.experts.intermediate_dim == 128
    assert [each.model.layers[0].mlp.experts.split.rank for each in (first, *others)] == [0, 1, 2, 3]
    of_vllm = next(models_ahead(tmp_path, "vllm", ep=4))
    assert all(m.split.nvlink for m in of_vllm.modules() if isinstance(m, jitgemm.nn.PackedExperts))
    sizes = [(m.out_features, m.in_features) for m in (layer.self_attn.q_proj, layer.self_attn.o_proj)]
    assert sizes == [(128, 256), (256, 128)]
    with pytest.raises(ValueError, match="ep: expected ranks that 4 experts divide among, got 3"):
        next(models_ahead(tmp_path, ep=3))
    with pytest.raises(ValueError, match="tp: expected ranks that divide num_key_value_heads = 2, got 4"):
        next(models_ahead(tmp_path, tp=4))


def test_a_model_in_16_bits_is_ready_for_both_orders_of_codes(tmp_path, wanted):
    save(tmp_path, "qwen3-moe", None)
    default = format_of("bf16").name
    assert layers_by_format(tmp_path)["q_proj"] == {default}
    (tmp_path / "model.safetensors").unlink()  # which nothing is read from
    assert layers_by_format(tmp_path)["q_proj"] == {default}  # as it is quantised where nobody says how
    assert layers_by_format(tmp_path, recipe=Recipe.of({"scheme": "int4"}))["q_proj"] == {"g32-bf16-z"}
    assert layers_by_format(tmp_path, recipe=Recipe(group_size=128))["q_proj"] == {"g128-bf16-any", "g128-bf16-e4m3"}
    options = ("--recipe", '{"bits": 8, "activation": "int8"}')
    assert all("-w8-" in f"-{label}" or "s8" in label or "route" in label or "combine" in label
               for label in wanted(tmp_path, *options))  # fmt: skip
    rotating = [spec for model in models_ahead(tmp_path, recipe=Recipe(scheme="two-level", rotation=128))
                for spec, *_ in kernels(model, 64, [torch.bfloat16], "h200") if hasattr(spec, "rotated")]  # fmt: skip
    assert rotating and all(spec.rotated for spec in rotating)
    said = {"group_size": 64, "symmetric": False, "scale_dtype": torch.float16}
    assert layers_by_format(tmp_path, recipe=Recipe(**said))["q_proj"] == {"g64-fp16-z"}


def failing(command, *argv: str) -> str:
    done = command("warmup", *argv)
    assert done.code == 2
    return " ".join(done.stderr.split())


def test_without_files_what_no_config_says_is_named(tmp_path, command):
    save(tmp_path, "llama", GPTQ)
    options, recipe = ("--model", str(tmp_path), "--dry-run"), ("--recipe", '{"scale_dtype": "float16"}')
    assert "expected no recipe, as its files say all that" in failing(command, *options, *recipe)
    (tmp_path / "model.safetensors").unlink()
    said = failing(command, *options)
    assert "expected the safetensors files of a model that is quantised already, as its config says (gptq)" in said
    assert "--shape N,K --weight NAME" in said


def test_a_damaged_config_or_index_and_a_shape_that_the_config_contradicts_are_named_with_their_files(
    tmp_path, command
):
    save(tmp_path, "llama", GPTQ)
    config, index = tmp_path / "config.json", tmp_path / "model.safetensors.index.json"
    given, options = json.loads(config.read_text()), ("--model", str(tmp_path), "--dry-run")
    for changed, tensor in (("vocab_size", "embed_tokens.weight"), ("intermediate_size", "layers.0.mlp.gate_proj")):
        config.write_text(json.dumps(given | {changed: given[changed] + 128}))
        said = failing(command, *options)
        assert tensor in said and f" in {tmp_path / 'model.safetensors'}" in said
    for change in ({"num_attention_heads": 0}, {"hidden_size": "many"}, {"architectures": [3]}, {"model_type": []}):
        config.write_text(json.dumps(given | change))
        assert f"{config}" in failing(command, *options)
    for text in ("{", "[" * 100000, "[]"):
        config.write_text(text)
        assert f"{config}" in failing(command, *options)
    config.write_text(json.dumps(given))
    (tmp_path / "model.safetensors").unlink()
    index.write_text('{"weight_map": {}}')
    said = failing(command, *options)
    assert f"expected a weight_map that names tensors in {index}, found {{}}" in said


def test_the_error_for_a_missing_kernel_has_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "kernels"))
    save(tmp_path, "llama", GPTQ)
    model = loaded(tmp_path)
    model.config._name_or_path = str(tmp_path)  # as from_pretrained leaves it
    at_hand = replace(device_spec("h100-sxm"), num_sms=114)
    monkeypatch.setattr("jitgemm.nn.warm.warm.pick_device", lambda name: at_hand if name is None else device_spec(name))
    for device, named in (("h200", "h200"), (None, "h100-sxm,sms=114")):  # None: the GPU at hand
        command = f"; jitgemm warmup --model {tmp_path} --for linear --max-m 8 --device {named}"
        with pytest.raises(CacheMissError, match=command):
            jitgemm.nn.warmup(model, 8, device=device, build=False)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu2", None])
def test_gates_are_those_that_the_config_names(name):
    config = None if name is None else SimpleNamespace(to_dict=lambda: {"a": {"hidden_act": name}})
    silu, gelu, tanh = SILU_MUL, GELU_MULS["none"], GELU_MULS["tanh"]
    expected = {"silu": (silu,), "gelu": (gelu,), "gelu_pytorch_tanh": (tanh,), "relu2": (), None: (silu, gelu, tanh)}
    assert gates_of(config) == expected[name]
