"""`jitgemm warmup --model`: what it makes is what the model asks for, in every use; no kernel is missing, few are in vain.

What a model asks for is recorded on a device whose launches do nothing. Nothing is compiled.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
import vllm_layers
from emulator.launch import emulate
from safetensors.torch import save_file
from test_inductor import Graphs
from test_vllm import CONFIGS, scheme, stored

import jitgemm.nn
from jitgemm.cli import main
from jitgemm.gemm import grouped_plan
from jitgemm.gemm import plan as gemms
from jitgemm.kernel.render import kernel_source
from jitgemm.nn.ahead import model_of, models_ahead
from jitgemm.nn.warm import kernels
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
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    jitgemm.nn.load_(model, folder)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use", ["linear", "fused", "compiled"])
def test_x(tmp_path, capsys, family, use):
    save(tmp_path, family, GPTQ, True)
    if family == "kimi-k2":
        found = wanted(capsys, tmp_path, "--for", use)
        said = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "deepseek_v3"}
        (tmp_path / "config.json").write_text(json.dumps(said))
    model = loaded(tmp_path)
    if use == "fused":
        jitgemm.nn.fuse_(model)
    needed = asked(model)
    if use == "compiled":
        torch._dynamo.reset()
        needed = {label for label in needed if not label.startswith("quantize")}
        run = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, backend=Graphs())
        with torch.no_grad():
            run(torch.arange(3)[None])
            with recorded() as labels:
                run(torch.arange(3)[None])
        needed |= labels
    check(wanted(capsys, tmp_path, "--for", use), needed)
