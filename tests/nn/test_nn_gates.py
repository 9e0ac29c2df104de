"""Models of transformers 5 whose experts have gates of their own, or none: Nemotron, Step, Kimi-K3."""

from __future__ import annotations

import json
from types import SimpleNamespace

import checkpoints
import pytest
import torch
from expert_models import build, experts_of, file_of, fused, same_weights, transformers
from moe_cases import activated
from nn_experts import HIDDEN, INTER, E, experts
from stored_weights import COMPRESSED

import jitgemm.nn
from jitgemm.nn import Gate, W4A8Experts, load_
from jitgemm.nn.layers.gate import gate_of
from jitgemm.nn.quantize.stacked import experts_layout
from jitgemm.nn.save.model_folder import open_model_folder
from jitgemm.nn.save.tensor_map import map_tensors
from jitgemm.nn.warm.ahead import models_ahead
from jitgemm.nn.warm.warm import kernels


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_without_gates_are_known_from_the_files(tmp_path, stacked):
    """By from_pretrained, and by the warm-up."""
    hf = pytest.importorskip("jitgemm.hf")
    source, model = (build("nemotron", seed, moe_intermediate_size=128) for seed in (0, 1))
    tensors, dense = fused(source, ("up_proj.", "down_proj.")) if stacked else file_of(source)
    folder = checkpoints.save(tmp_path, tensors, COMPRESSED)
    known = dense.config.to_dict() | {"quantization_config": COMPRESSED, "architectures": ["NemotronHForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(known, default=str))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", config=hf.config(folder))
    load_(model, folder)
    assert same_weights(theirs, dense) and same_weights(model, dense)
    (ahead,) = models_ahead(folder, "linear", 1, 1, None, None, ["any"], False)

    def labels(of: torch.nn.Module) -> set[str]:
        return {spec.label for spec, _, _ in kernels(of, 64, [torch.bfloat16], "h200", False)}

    assert labels(ahead) == labels(model) and any("-relu2-" in label for label in labels(ahead))
    for rank in models_ahead(folder, "vllm", 2, 1, None, None, ["any"], False):
        (layer,) = {module for module in rank.modules() if isinstance(module, W4A8Experts)}
        sizes = [(part.weight.n, part.weight.k) for part in (layer.w13, layer.w2)]
        assert sizes == [(64, HIDDEN), (HIDDEN, 64)]


def test_layers_of_experts_without_gates_are_written_expert_by_expert(tmp_path):
    model = build("nemotron")
    model.save_pretrained(tmp_path)
    layouts = {name: experts_layout(module) for name, module in experts_of(model).items()}
    found = map_tensors(model, open_model_folder(tmp_path), list(layouts), layouts, None)
    endings = {f"experts.{e}.{proj}" for e in range(E) for proj in ("up_proj", "down_proj")}
    assert {layer.partition("mixer.")[2] for layer in found.layers} == endings and len(found.layers) == 2 * len(endings)


def step(limit: float | None) -> torch.nn.Module:
    module = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = SimpleNamespace(num_local_experts=E, hidden_size=HIDDEN, moe_intermediate_size=INTER, hidden_act="silu")
    torch.manual_seed(0)
    made = module.Step3p7Experts(config, limit)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


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
    assert "gate='situ', gate_up, limit=25, alpha=4" in repr(experts(Gate("situ", limit=25.0, alpha=4.0)))
