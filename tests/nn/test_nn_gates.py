"""Models of transformers 5 whose experts have gates of their own, or none: Nemotron, Step, Kimi-K3."""

from __future__ import annotations

import json
from types import SimpleNamespace

import builders
import checkpoints
import pytest
import torch
from expert_models import COMPRESSED, compressed, quantised
from moe_cases import activated

import jitgemm.nn
from jitgemm.nn import Gate, W4A8Experts, load_
from jitgemm.nn.layers.gate import gate_of
from jitgemm.nn.quantize.stacked import experts_layout

transformers = pytest.importorskip("transformers", minversion="5")

E, HIDDEN, INTER = 6, 64, 128
IDS = torch.arange(16)[None]


def nemotron(seed: int = 0) -> torch.nn.Module:
    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip("a release without Nemotron-H's stacked experts")
    config = transformers.NemotronHConfig(
        hidden_size=HIDDEN, intermediate_size=64, moe_intermediate_size=INTER, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=96, layers_block_type=["attention", "moe"] * 2,
        n_routed_experts=E, num_experts_per_tok=2, moe_shared_expert_intermediate_size=64, n_group=1, topk_group=1,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.NemotronHForCausalLM(config).eval()
    if not experts_of(model):
        pytest.skip("a release without Nemotron-H's stacked experts")
    return model


def experts_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(getattr(m, "up_proj", None), torch.nn.Parameter)}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def of_nemotron(model: torch.nn.Module, stacked: bool) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint whose experts are quantised; the model's own become what they stand for."""
    found = {}
    for name, module in experts_of(model).items():
        for proj in ("up_proj", "down_proj"):
            parts = []
            for e in range(E):
                q, scale = quantised(getattr(module, proj)[e].detach())
                getattr(module, proj).data[e] = checkpoints.dequantized(q, scale)
                parts.append(compressed(q, scale))
            if stacked:
                joined = {suffix: torch.stack([part[suffix] for part in parts]) for suffix in parts[0]}
                joined["weight_shape"] = parts[0]["weight_shape"]
                found |= {f"{name}.{proj}.{suffix}": tensor for suffix, tensor in joined.items()}
            else:
                found |= {f"{name}.{e}.{proj}.{s}": t for e, part in enumerate(parts) for s, t in part.items()}
    names = experts_of(model)
    rest = {n: x for n, x in model.state_dict().items() if n.rpartition(".")[0] not in names}
    return found | rest


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_without_gates_load_from_disk(tmp_path, stacked):
    dense = nemotron()
    folder = checkpoints.save(tmp_path, of_nemotron(dense, stacked), COMPRESSED)
    model = nemotron(seed=1)
    report = load_(model, folder, activation="int8")
    assert report == list(experts_of(dense)) and report.skipped == {} and report.ignored == {}
    for name, module in experts_of(dense).items():
        layer = model.get_submodule(name)
        assert isinstance(layer, W4A8Experts) and layer.gate == Gate("relu2")
        assert torch.equal(layer.w13.weight.dequantize(), module.up_proj)
        assert torch.equal(layer.w2.weight.dequantize(), module.down_proj)
    error = (logits(model) - logits(dense)).norm(dim=-1) / logits(dense).norm(dim=-1)
    assert float(error.median()) < 0.04


def test_experts_without_gates_load_through_transformers(tmp_path):
    hf = pytest.importorskip("jitgemm.hf")
    dense = nemotron()
    folder = checkpoints.save(tmp_path, of_nemotron(dense, False), COMPRESSED)
    known = dense.config.to_dict() | {"quantization_config": COMPRESSED, "architectures": ["NemotronHForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(known, default=str))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", config=hf.config(folder))
    for name, module in experts_of(dense).items():
        assert torch.equal(model.get_submodule(name).w13.weight.dequantize(), module.up_proj)


@pytest.mark.parametrize("stacked", [False, True])
def test_warm_up_knows_experts_without_gates_from_the_files(tmp_path, stacked):
    from jitgemm.nn.warm.ahead import models_ahead
    from jitgemm.nn.warm.warm import kernels

    dense, model = nemotron(), nemotron(seed=1)
    folder = checkpoints.save(tmp_path, of_nemotron(dense, stacked), COMPRESSED)
    known = dense.config.to_dict() | {"quantization_config": COMPRESSED, "architectures": ["NemotronHForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(known, default=str))
    load_(model, folder)
    (ahead,) = models_ahead(folder, "linear", 1, 1, None, None, ["any"], False)

    def labels(of: torch.nn.Module) -> set[str]:
        return {spec.label for spec, _, _ in kernels(of, 64, [torch.bfloat16], "h200", False)}

    assert labels(ahead) == labels(model) and any("-relu2-" in label for label in labels(ahead))
    for rank in models_ahead(folder, "vllm", 2, 1, None, None, ["any"], False):
        (layer,) = {module for module in rank.modules() if isinstance(module, W4A8Experts)}
        sizes = [(part.weight.n, part.weight.k) for part in (layer.w13, layer.w2)]
        assert sizes == [(INTER // 2, HIDDEN), (HIDDEN, INTER // 2)]


@pytest.mark.parametrize("calibrated", [False, True])
def test_experts_without_gates_are_quantised_saved_and_loaded(tmp_path, calibrated):
    from safetensors.torch import save_model

    model, dense = nemotron(), nemotron()
    report = jitgemm.nn.quantize_(model, activation="int8", calibration=[IDS] if calibrated else None)
    assert set(experts_of(dense)) <= set(report)
    error = (logits(model) - logits(dense)).norm(dim=-1) / logits(dense).norm(dim=-1)
    assert float(error.median()) < 0.2
    save_model(model, str(tmp_path / "model.safetensors"))
    again = nemotron(seed=1)
    load_(again, tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_layers_of_experts_without_gates_are_written_expert_by_expert(tmp_path):
    from jitgemm.nn.save.model_folder import open_model_folder
    from jitgemm.nn.save.tensor_map import map_tensors

    model = nemotron()
    model.save_pretrained(tmp_path)
    layouts = {name: experts_layout(module) for name, module in experts_of(model).items()}
    found = map_tensors(model, open_model_folder(tmp_path), list(layouts), layouts, None)
    endings = {f"experts.{e}.{proj}" for e in range(E) for proj in ("up_proj", "down_proj")}
    assert {layer.partition("mixer.")[2] for layer in found.layers} == endings and len(found.layers) == 2 * len(endings)


def step(limit: float | None) -> torch.nn.Module:
    module = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = SimpleNamespace(num_local_experts=E, hidden_size=HIDDEN, moe_intermediate_size=INTER, hidden_act="silu")
    torch.manual_seed(0)
    experts = module.Step3p7Experts(config, limit)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


@pytest.mark.parametrize("limit", [None, 0.5])
def test_step_s_experts_have_a_forward_that_is_found_to_be_the_layer_s(limit):
    experts = step(limit)
    kept = {name: parameter.detach().clone() for name, parameter in experts.named_parameters()}
    layout = experts_layout(experts)
    assert layout.gate == (Gate() if limit is None else Gate("swiglu_step", limit=limit))
    assert all(torch.equal(kept[name], parameter) for name, parameter in experts.named_parameters())
    assert (layout.experts, layout.hidden, layout.inter) == (E, HIDDEN, INTER) and experts.num_experts == E
    x, ids = torch.randn(20, HIDDEN), torch.rand(20, E).argsort(1)[:, :2]
    weights = torch.rand(20, 2)
    expected = experts(x, ids, weights).detach()
    model = torch.nn.ModuleDict({"experts": experts, "up": torch.nn.Linear(64, 32)})
    jitgemm.nn.quantize_(model, bits=8, activation="int8")
    assert (model.experts(x, ids, weights) - expected).norm() < 0.03 * expected.norm()


def test_a_forward_that_computes_something_else_is_left_alone():
    experts = step(0.5)
    kind = type(experts)
    other = type("Other", (kind,), {"forward": lambda self, x, ids, w: 2 * kind.forward(self, x, ids, w)})
    experts.__class__ = other
    assert experts_layout(experts) == "stacked experts: Other has a forward of its own"


class Situ(torch.nn.Module):
    """Kimi-K3's gate, as a model's code may have it."""

    def __init__(self, where: str):
        super().__init__()
        numbers = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
        owner = self if where == "module" else SimpleNamespace()
        for name, number in numbers.items():
            setattr(owner, name, number)
        if where == "config":
            self.config = owner

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        options = {"activation": "situ", "alpha": 4.0, "limit": 25.0}
        return torch.stack([activated(row, options) for row in gate_up])


@pytest.mark.parametrize("where", ["module", "config"])
def test_kimi_k3_s_gate_is_known_by_what_it_computes(where):
    assert gate_of(Situ(where)) == Gate("situ", "gate_up", 25.0, 4.0)


def test_a_layer_says_its_gate_s_numbers():
    g = builders.generator(1)
    w13, w2 = (
        jitgemm.quantize_w4(torch.randn((E, *nk), generator=g), 32) for nk in ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    )
    layer = W4A8Experts(w13, w2, gate=Gate("situ", limit=25.0, alpha=4.0))
    assert "gate='situ', gate_up, limit=25, alpha=4" in repr(layer)
