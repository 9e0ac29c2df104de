"""A small DeepSeek-V3 from disk, as published: FP8 attention, MLPs and shared experts in blocks of 128 x 128, router
and embeddings in bf16, and experts in W4AFP8 or in FP8."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import builders
import checkpoints
import pytest
import torch
from safetensors.torch import load_file
from small_models import quantised_names, same_state

import jitgemm.nn
from jitgemm.kernel.spec import KernelSpec
from jitgemm.nn import W4A8Experts, W8A8Experts, W8A8Linear, load_
from jitgemm.nn.warm.warm import kernels as kernels_of

transformers = pytest.importorskip("transformers", minversion="5")
hf = pytest.importorskip("jitgemm.hf")

E4M3 = torch.float8_e4m3fn
SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 256, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 192,
    "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48, "vocab_size": 120, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
TOKENS = torch.randint(2, 120, (2, 9), generator=builders.generator(4))
QUANTISED = re.compile(r"layers\.\d+\..*_proj(_with_mqa)?\.weight$")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
KINDS = {"w4afp8": W4A8Experts, "fp8": W8A8Experts}


pytestmark = pytest.mark.usefixtures("quiet_transformers")


def from_config(config, dtype: torch.dtype) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for buffer in corrections(model):  # which from_pretrained leaves in fp32
        buffer.data = buffer.float()
    return model


def corrections(model: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


# ---- the files, from the formats' definitions ------------------------------------------------------------------------


def over_blocks(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def fp8(w: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer's tensors, a scale for each block of 128 x 128, and what they stand for."""
    n, k = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -k % 128, 0, -n % 128))
    blocks = padded.view(math.ceil(n / 128), 128, math.ceil(k / 128), 128)
    scale = blocks.abs().amax((1, 3)) / 448
    every = over_blocks(scale, n, k)
    q = (w.float() / every).to(E4M3)
    return {"weight": q, "weight_scale_inv": scale}, q.float() * every


def w4afp8(w: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same in 4 bits, a scale for 128 of k."""
    groups = w.float().unflatten(1, (-1, 128))
    scale = groups.abs().amax(2) / 7
    q = (groups / scale[..., None]).round().clamp(-8, 7)
    values = (q * scale[..., None]).flatten(1)
    codes = q.flatten(1).long() % 16
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    return {"weight": packed, "weight_scale_inv": scale}, values


def written(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint in the published names, and the weight that each layer in it stands for."""
    torch.manual_seed(11)
    config = transformers.DeepseekV3Config(**SIZES)
    model = from_config(config, torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2 if parameter.dim() == 1 else 0.04)
    for buffer in corrections(model):
        buffer.normal_(0.0, 0.1)
    model.save_pretrained(folder)  # names each expert's projections, as the published files do
    tensors, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not QUANTISED.search(name):
            tensors[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        stored, dense[prefix] = (w4afp8 if kind == "w4afp8" and EXPERT.match(name) else fp8)(tensor)
        tensors |= {f"{prefix}.{suffix}": value for suffix, value in stored.items()}
        if kind == "w4afp8" and (found := EXPERT.match(name)):  # whose static scales stand under other names
            other = {"gate": "w1", "down": "w2", "up": "w3"}[found[3]]
            tensors[f"{found[1]}.{found[2]}.{other}.input_scale"] = torch.tensor([0.01])
    (folder / "model.safetensors").unlink()
    told = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIG | {"quant_method": kind}}
    checkpoints.save(folder, tensors, shards=3)
    (folder / "config.json").write_text(json.dumps(told))
    return dense


@pytest.fixture(scope="module", params=KINDS)
def published(request, tmp_path_factory) -> tuple[str, Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, written(folder, request.param)


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = from_config(config, dtype)
    report = load_(model, folder, device=device)
    assert report.skipped == {} and all("experts quantise every token" in why for why in report.ignored.values())
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS.to(model.device)).logits.double().cpu()


def of_most(a: torch.Tensor, b: torch.Tensor) -> float:
    """The same of half of the tokens: one may lie on the edge between two experts, or one of its values between two
    codes."""
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


def in_floats(folder: Path, dense: dict[str, torch.Tensor]) -> torch.nn.Module:
    """transformers' own model in fp32 with the dequantised weights."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = from_config(config, torch.float32)
    state = model.state_dict()
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name in state and name.removesuffix(".weight") not in dense:
                state[name].copy_(tensor)
    for name, module in model.named_modules():
        if name in dense:
            module.weight.data = dense[name]
        elif name.endswith(".experts"):
            module.gate_up_proj.data, module.down_proj.data = (
                torch.stack([torch.cat([dense[f"{name}.{e}.{each}_proj"] for each in part]) for e in range(8)])
                for part in (("gate", "up"), ("down",))
            )
    return model


# ---- on the CPU ------------------------------------------------------------------------------------------------------


def test_it_loads_whole_with_the_files_weights(published):
    kind, folder, dense = published
    model = loaded(folder)
    found = set()
    for name in quantised_names(model):
        layer = model.get_submodule(name)
        if not name.endswith("experts") or name.endswith("shared_experts"):
            assert type(layer) is W8A8Linear and layer.activation == "e4m3_block"
            assert torch.equal(layer.weight.dequantize(), dense[name])
            found.add(name)
            continue
        assert type(layer) is KINDS[kind] and layer.top_k == 2
        assert layer.activation == {"w4afp8": "e4m3", "fp8": "e4m3_block"}[kind]
        for e in range(8):
            names = [f"{name}.{e}.{each}_proj" for each in ("gate", "up", "down")]
            assert torch.equal(layer.w13.weight[e].dequantize(), torch.cat([dense[each] for each in names[:2]]))
            assert torch.equal(layer.w2.weight[e].dequantize(), dense[names[2]])
            found |= set(names)
    assert found == set(dense)
    routers = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    in_floats = (torch.bfloat16, torch.float32)  # transformers before 5.24 and since
    assert len(routers) == 2 and all(router.weight.dtype in in_floats for router in routers)
    plain = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(model.get_parameter(name).float(), plain[name].float())


def test_its_logits_are_close_to_those_of_its_weights_in_floats(published):
    """What is lost is the 8 bits of the activations."""
    _, folder, dense = published
    assert 1e-3 < of_most(logits(loaded(folder, torch.float32)), logits(in_floats(folder, dense))) < 0.2


def test_it_is_warmed_up(published):
    kind, folder, _ = published
    model = loaded(folder, torch.float32)
    kernels = {spec for spec, *_ in kernels_of(model, 64, [torch.bfloat16], "h200") if isinstance(spec, KernelSpec)}
    found = {(spec.format.bits, spec.lhs_group, spec.experts > 0) for spec in kernels}
    assert found == {(8, 128, False), (4, 0, True) if kind == "w4afp8" else (8, 128, True)}


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_it_gives_the_cpus_logits_and_from_pretrained_the_same(published):
    _, folder, _ = published
    on_gpu, expected = loaded(folder, device="cuda"), logits(loaded(folder))
    assert all(tensor.is_cuda for tensor in on_gpu.parameters())
    # Where a value lies between two codes, another one changes all behind it.
    assert of_most(logits(on_gpu), expected) < 0.15
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=hf.config(str(folder)), dtype=torch.bfloat16, device_map="cuda"
    )
    assert same_state(again, on_gpu)
    jitgemm.nn.warmup(again, max_m=64)
    assert torch.equal(logits(again), logits(on_gpu))
