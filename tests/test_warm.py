"""`jitgemm warmup --model`: what it makes is what the model asks for, in every use; no kernel is missing, few are in vain.

What a model asks for is recorded on a device whose launches do nothing. Nothing is compiled.
"""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
import vllm_layers
from emulator.launch import emulate
from safetensors.torch import load_file, save_file
from test_inductor import Graphs
from test_vllm import (
    CONFIGS,
    QKVParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    load,
    load_experts,
    made,
    stored,
)

import jitgemm.nn
from jitgemm.cli import main
from jitgemm.gemm import grouped_plan
from jitgemm.gemm import plan as gemms
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.kernel import source_of
from jitgemm.nn.warm import gates_of, kernels
from jitgemm.runtime import driver
from jitgemm.runtime.kernels import KernelFamily
from jitgemm.select.choose import choose, kernels_for

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
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "kimi-k2": ("DeepseekV3", LATENT),
    "glm-4.5": ("Glm4Moe", LATENT),
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
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer, _, child = name.rpartition(".")
        linear = isinstance(model.get_submodule(layer), torch.nn.Linear) and "lm_head" not in name
        if tensor.dim() == 3:
            for e, w in enumerate(tensor):
                parts = {"gate_proj": w.chunk(2)[0], "up_proj": w.chunk(2)[1]} if "gate_up" in child else {child: w}
                for part, rows in parts.items():
                    tensors |= layer_of(f"{layer}.{e}.{part}", rows, quantization, fp16)
        elif linear and child == "weight" and quantization is not None:
            tensors |= layer_of(layer, tensor, quantization, fp16)
        else:
            tensors[name] = tensor.clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    said = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    if family == "kimi-k2":
        said["model_type"] = "kimi_k2"
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

    def chosen(problem, device, label):
        given = problem.n, problem.k, problem.lhs, problem.format, device, MAX_M * (top_k if problem.experts else 1)
        options = {"out": problem.out, "experts": problem.experts, "lhs_group": problem.lhs_group}
        labels.update(kernel_source(spec).label for spec in kernels_for(*given, **options))
        return choose(problem, device)

    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        patch.setattr(KernelFamily, "load", load)
        patch.setattr(gemms, "chosen", chosen)
        patch.setattr(grouped_plan, "chosen", chosen)
        patch.setattr(driver.cu, "cuLaunchKernelEx", lambda *_: (driver.cu.CUresult.CUDA_SUCCESS,))
        yield labels


def asked(model: torch.nn.Module) -> set[str]:
    with recorded() as labels, torch.no_grad():
        for count in (1, 24, 2048):
            rows = 8 if count % 8 == 0 else 1  # short sequences, as attention is the CPU's
            model(input_ids=torch.arange(96).repeat(count)[:count].view(-1, rows), use_cache=False)
    return labels


def wanted(capsys, folder, *options: str) -> set[str]:
    with pytest.raises(SystemExit) as exit:
        fixed = ("--max-m", str(MAX_M), "--device", "h200", "--dry-run", "--json")
        main(["warmup", "--model", str(folder), *fixed, *options])
    out, error = capsys.readouterr()
    assert not exit.value.code, error
    return {kernel["label"] for kernel in json.loads(out)["kernels"]}


def check(found: set[str], needed: set[str]) -> None:
    """No kernel is missing, and a tenth at most is in vain."""
    assert needed - found == set()
    assert len(found - needed) <= len(found) / 10, found - needed


def loaded(folder) -> torch.nn.Module:
    said = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, said["architectures"][0])
    model = kind(kind.config_class.from_pretrained(folder)).bfloat16()
    jitgemm.nn.load_(model, folder)
    return model.eval()


def needed_by(model: torch.nn.Module, use: str) -> set[str]:
    """What the model asks for, made ready for this use."""
    if use == "fused":
        jitgemm.nn.fuse_(model)
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use", ["linear", "fused", "compiled"])
def test_a_model_asks_for_what_was_made_and_nearly_all_of_it(tmp_path, capsys, family, use):
    save(tmp_path, family, GPTQ, fp16=True)
    found = wanted(capsys, tmp_path, "--for", use)
    assert any("-fp16-" in label for label in found)  # as the headers say
    check(found, needed_by(loaded(tmp_path), use))


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("form", sorted({*CONFIGS} - {"fp8-blocks", "gptq"}))
def test_so_it_does_in_every_format(tmp_path, capsys, family, form):
    if (form == "w4afp8") != (family == "qwen3-moe"):
        pytest.skip("w4afp8 is the format of experts")
    save(tmp_path, family, CONFIGS[form])
    check(wanted(capsys, tmp_path), needed_by(loaded(tmp_path), "linear"))


def layers_of_vllm(folder, place: tuple[int, int]) -> torch.nn.Module:
    """What vLLM packs of a model's layers on a rank, as it joins and cuts them."""
    config = json.loads((folder / "config.json").read_text())
    tensors, made_of = load_file(folder / "model.safetensors"), made(config["quantization_config"])
    made_of.warmer.compiled, made_of.warmer._gates = True, gates_of(SimpleNamespace(to_dict=lambda: config))
    hidden, head, heads, kv = (
        config[x] for x in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    said = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": made_of}
    found = torch.nn.ModuleList()

    def done(layer, parts):
        for name, *shard in parts:
            own = {key.removeprefix(name + "."): t for key, t in tensors.items() if key.startswith(name + ".")}
            load(layer, own, *shard)
        layer.quant_method.process_weights_after_loading(layer)
        found.append(layer.jitgemm)

    for i in range(config["num_hidden_layers"]):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = QKVParallelLinear(hidden, head, heads, kv, **said, prefix=at + "qkv_proj")
        done(qkv, [(f"{at}{part}_proj", part) for part in "qkv"])
        done(RowParallelLinear(heads * head, hidden, **said, prefix=at + "o_proj"), [(at + "o_proj",)])
        if "moe_intermediate_size" not in config:
            inter = config["intermediate_size"]
            gate_up = MergedColumnParallelLinear(hidden, [inter, inter], **said, prefix=mlp + "gate_up_proj")
            done(gate_up, [(mlp + "gate_proj", 0), (mlp + "up_proj", 1)])
            done(RowParallelLinear(inter, hidden, **said, prefix=mlp + "down_proj"), [(mlp + "down_proj",)])
            continue
        sizes, top_k = (EXPERTS["num_experts"], hidden, config["moe_intermediate_size"]), config["num_experts_per_tok"]
        layer = vllm_layers.experts(made_of, mlp + "experts", sizes, top_k, tp=place)
        parts = {
            (e, proj): {
                key.removeprefix(f"{mlp}experts.{e}.{proj}."): t
                for key, t in tensors.items()
                if key.startswith(f"{mlp}experts.{e}.{proj}.")
            }
            for e in range(sizes[0])
            for proj in ("gate_proj", "up_proj", "down_proj")
        }
        load_experts(layer, mlp + "experts", parts)
        layer.quant_method.process_weights_after_loading(layer)
        found.append(layer.jitgemm)
    return found


@pytest.fixture
def standin():
    vllm_layers.show()
    yield
    vllm_layers.hide()


@pytest.mark.skipif(vllm_layers.REAL, reason="by the stand-in's layers")
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("form", ["awq", "packed-static", "float-quantized"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_vllm_waits_for_what_was_made_and_for_no_more(tmp_path, capsys, standin, family, form, size):
    save(tmp_path, family, CONFIGS[form])
    needed = set()
    for number in range(size):
        with vllm_layers.rank(number, size):
            layers = layers_of_vllm(tmp_path, (number, size))
        for spec, *_ in kernels(layers, MAX_M, [torch.bfloat16], "h200", True):
            needed.add((kernel_source(spec) if isinstance(spec, KernelSpec) else source_of(spec)).label)
    assert wanted(capsys, tmp_path, "--for", "vllm", "--tp", str(size)) == needed
