"""`quantize_` with calibration: what is collected, in what order, and what comes of it."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from small_models import same_state

import jitgemm.nn
from jitgemm.nn.quantize.calibration import Calibration
from jitgemm.nn.quantize.quantize import Quantising
from jitgemm.nn.quantize.replaceable import Replaceable
from jitgemm.nn.recipe import Recipe

transformers = pytest.importorskip("transformers")
VOCABULARY, HIDDEN = 96, 64


def llama(layers: int = 2, **more) -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def qwen3_moe() -> torch.nn.Module:
    torch.manual_seed(2)
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


def ids(sequences: int = 6, tokens: int = 24, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def runs(model: torch.nn.Module, batches: list, **more) -> Calibration:
    found = Replaceable(model)
    return Calibration(
        model, batches, {name: found.experts.get(name) for name in found.places if name != "lm_head"}, **more
    )


def moments_of(model: torch.nn.Module, batches: list) -> dict:
    """Of all stages, with nothing quantised between them."""
    run = runs(model, batches)
    return {name: each for stage in run.stages() for name, each in run.collect(stage).items()}


def seen(model: torch.nn.Module, name: str, *batches: torch.Tensor) -> torch.Tensor:
    """The inputs of a module, [tokens, k]."""
    inputs = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return torch.cat(inputs)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def test_moments_are_the_inputs_products():
    model, batches = llama(), list(ids().split(2))
    for name, found in moments_of(model, batches).items():
        x = seen(model, name, *batches)
        assert close(found.given(False), x.T @ x) and int(found.tokens) == 6 * 24, name


def test_stages_are_blocks_in_the_order_of_running_and_share_sums():
    run = runs(llama(3), [ids()])
    stages = list(run.stages())
    assert [{name.split(".")[2] for name in stage} for stage in stages] == [{"0"}, {"1"}, {"2"}]
    names = ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"]
    assert " ".join(name.rpartition(".")[2] for name in stages[0]) == " ".join(names)
    found = run.collect(stages[1])
    assert len({id(each) for each in found.values()}) == 4  # q, k, v have one input; gate and up as well
    run = runs(llama(1), [ids()], memory=4 * HIDDEN**2)  # and sums beyond the memory a stage of their own
    assert [" ".join(name.rpartition(".")[2] for name in stage) for stage in run.stages()] == names


def test_a_later_block_sees_what_the_quantised_ones_pass_on():
    model, batch = llama(), ids()
    job = Quantising(model, Recipe(group_size=32), calibration=[batch])
    stages = job.stages()
    next(stages)
    x = seen(model, "model.layers.1.mlp.down_proj", batch)
    untouched = seen(llama(), "model.layers.1.mlp.down_proj", batch)
    assert not close(x, untouched)
    expected = jitgemm.quantize_w4(
        llama().get_submodule("model.layers.1.mlp.down_proj").weight.detach(), 32, moments=x.T @ x
    )
    layer = next(stages)["model.layers.1.mlp.down_proj"]
    same = (layer.weight.dequantize() == expected.dequantize()).double().mean()
    assert float(same) > 0.97  # sums in another order
    assert next(stages, None) is None and isinstance(model.model.layers[1].mlp.down_proj, jitgemm.nn.W4A8Linear)


def test_padding_does_not_count():
    model, batch = llama(), ids(3)
    mask = torch.ones_like(batch)
    mask[1, 10:] = 0
    found = moments_of(model, [{"input_ids": batch, "attention_mask": mask}])
    assert {int(each.tokens) for each in found.values()} == {3 * 24 - 14}


@pytest.mark.parametrize("form", ("tensor", "tuple", "mapping"))
def test_forms_of_batches(form):
    batch = ids(2)
    given = {"tensor": batch, "tuple": (batch,), "mapping": {"input_ids": batch}}[form]
    first, second = llama(1).train(), llama(1)
    jitgemm.nn.quantize_(first, calibration=[given])
    jitgemm.nn.quantize_(second, calibration=[batch])
    assert all(module.training and not module._forward_pre_hooks for module in first.modules())  # as it was
    assert same_state(first, second)


def test_experts_count_the_tokens_that_they_get():
    model, batch = qwen3_moe(), ids(2)
    name = "model.layers.0.mlp.experts"
    calls = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: calls.append(args))
    with torch.no_grad():
        model(batch)
    handle.remove()
    x, chosen = calls[0][0].flatten(0, -2), calls[0][1].flatten(0, -2)
    moments = moments_of(model, [batch])[name]
    module = model.get_submodule(name)
    for e in range(6):
        mine = x[(chosen == e).any(-1)]
        assert int(moments.tokens[e]) == len(mine)
        assert close(moments.sums[0][e], mine.T @ mine)
        gate, up = (mine @ module.gate_up_proj[e].T).chunk(2, -1)
        between = torch.nn.functional.silu(gate) * up
        assert close(moments.sums[1][e], between.T @ between)


def test_an_expert_without_a_token_is_quantised_from_its_weight():
    model, batch = qwen3_moe(), ids(1, 2)
    name = "model.layers.0.mlp.experts"
    weights = model.get_submodule(name).gate_up_proj.detach().clone()
    idle = (moments_of(model, [batch])[name].tokens == 0).nonzero().flatten().tolist()
    assert idle
    jitgemm.nn.quantize_(model, calibration=[batch])
    expected = jitgemm.quantize_w4(weights[idle[0]], 128).dequantize()
    assert torch.equal(model.get_submodule(name).w13.weight[idle[0]].dequantize(), expected)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("make", (llama, qwen3_moe))
def test_results_are_nearer_than_without(make, device):
    model, batches, other = make().to(device), list(ids(24).split(8)), ids(4, seed=9).to(device)
    usual = {}
    if device == "cuda":
        model, usual = model.bfloat16(), {"activation": "int8"}
    lost = []
    with torch.no_grad():
        expected = model(other).logits.float()
        for options in ({"calibration": batches}, {"group_size": 128, "symmetric": True}):
            quantised = copy.deepcopy(model)
            report = jitgemm.nn.quantize_(quantised, **usual, **options)
            assert report.calibrated == ("calibration" in options) and set(report.errors) == set(report)
            lost.append(float((quantised(other).logits.float() - expected).square().mean()))
    assert lost[0] < 0.9 * lost[1]  # activations' rounding is in both


def test_errors_are_those_of_the_results():
    model, batch = llama(1), ids()
    name = "model.layers.0.self_attn.q_proj"
    x, w = seen(model, name, batch), model.get_submodule(name).weight.detach()
    report = jitgemm.nn.quantize_(model, calibration=[batch])
    got = model.get_submodule(name).weight.dequantize()
    assert report.errors[name] == pytest.approx(
        float((x @ (w - got).T).square().sum() / (x @ w.T).square().sum()), rel=1e-3
    )
    assert report.worst[0] in repr(report) and "docs/quantize.md" not in repr(report)
    alone = llama(1)
    report = jitgemm.nn.quantize_(alone)
    got = alone.get_submodule(name).weight.dequantize()
    assert report.errors[name] == pytest.approx(float((w - got).square().sum() / w.square().sum()), rel=1e-3)
    assert "calibration=batches" in repr(report)


def test_layers_of_one_input_stay_in_8_bits_together():
    model, batch = llama(), ids()
    errors = jitgemm.nn.quantize_(copy.deepcopy(model), calibration=[batch]).errors
    first = {name: error for name, error in errors.items() if ".0.self_attn" in name and "o_proj" not in name}
    limit = sorted(first.values())[-2]  # one of q, k, v is above
    report = jitgemm.nn.quantize_(model, calibration=[batch], keep_8bit=limit)
    assert first.keys() <= report.kept_8bit.keys()
    for name in report:
        bits = model.get_submodule(name).weight.format.bits
        assert bits == (8 if name in report.kept_8bit else 4)
        assert name in report.kept_8bit or report.errors[name] <= limit
    assert all(report.kept_8bit[name] == pytest.approx(errors[name], rel=1e-3) for name in first)
    assert all(report.errors[name] < 1e-3 for name in report.kept_8bit)
    assert "kept in 8 bits" in repr(report)


class Routed(torch.nn.Module):
    """Experts that are Linears each; the first element of x says whose turn it is."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.last = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts[int(x[0, 0])](x).tanh_())


def test_experts_that_are_linears_are_reached_by_any_batch():
    model, x = Routed(), torch.randn(30, 64)
    batches = []
    for turn in (0, 2, 2):
        batches.append(x.clone())
        batches[-1][0, 0] = turn
    moments = moments_of(model, batches)
    assert {name: int(each.tokens) for name, each in moments.items()} == {"experts.0": 30, "last": 90, "experts.2": 60}
    assert close(moments["experts.2"].given(False), sum(each.T @ each for each in batches[1:]))
    report = jitgemm.nn.quantize_(model, calibration=batches)
    assert report.unreached == ["experts.1"] and "not reached by calibration: 1 (experts.1)" in repr(report)
    assert isinstance(model.experts[1], jitgemm.nn.W4A8Linear)


class Heads(torch.nn.Module):
    """Linears of one input; each has a block's name."""

    def __init__(self, late: bool = False):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.heads if not self.late or x[0, 0] > 0 else self.heads[:1]
        return sum(head(x) for head in heads)


@pytest.mark.parametrize("memory", (1, 1 << 30))
def test_layers_of_one_input_are_a_stage_whatever_their_names(memory):
    x = torch.randn(20, 64)
    run = runs(Heads(), [x], memory=memory)
    (stage,) = run.stages()
    assert stage == ["heads.0", "heads.1", "heads.2"]
    assert all(close(each.given(False), x.T @ x) for each in run.collect(stage).values())


def test_a_layer_that_a_later_batch_reaches_first_has_moments_of_its_own():
    batches = [torch.full((20, 64), -1.0), torch.ones(30, 64)]
    moments = moments_of(Heads(late=True), batches)
    assert {name: int(each.tokens) for name, each in moments.items()} == {"heads.0": 50, "heads.1": 30, "heads.2": 30}


def test_one_stages_moments_are_gone_when_the_next_ones_are_summed(monkeypatch):
    alive, collect = [], Calibration.collect

    def watched(self, stage):
        assert not any(each() is not None for each in alive)
        found = collect(self, stage)
        alive[:] = [weakref.ref(each.sums[0]) for each in found.values()]
        return found

    monkeypatch.setattr(Calibration, "collect", watched)
    jitgemm.nn.quantize_(qwen3_moe(), calibration=[ids()])
    assert alive


def test_an_input_that_is_written_between_two_layers_is_another():
    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            x += y
            return self.second(x)

    x = torch.randn(20, 64)
    run = runs(Writes(), [x.clone()])
    list(run.stages())
    assert {name: calls.leader for name, calls in run.calls.items()} == {"first": "first", "second": "second"}


@pytest.mark.parametrize("make, activation", ((llama, "e4m3"), (qwen3_moe, "int8")))
def test_8_bits_are_calibrated_too(make, activation):
    plain, fitted, kept = make(), make(), make()
    batches = list(ids(24).split(8))
    report = jitgemm.nn.quantize_(fitted, bits=8, activation=activation, calibration=batches)
    assert report.calibrated and not report.kept_8bit and len(report) == len(report.errors)
    jitgemm.nn.quantize_(plain, bits=8, activation=activation)
    name = report[0]
    codes = [model.get_submodule(name).weight.unpack() for model in (plain, fitted)]
    assert torch.equal(codes[0][1], codes[1][1]) and not torch.equal(codes[0][0], codes[1][0])
    all_kept = jitgemm.nn.quantize_(kept, activation=activation, calibration=batches, keep_8bit=0)
    assert all_kept.kept_8bit.keys() == set(report)
    assert torch.equal(kept.get_submodule(name).weight.blocks, fitted.get_submodule(name).weight.blocks)


@pytest.mark.parametrize(
    "options, error",
    (
        ({"bits": 8, "calibration": []}, "calibration: expected at least one batch"),
        ({"bits": 8, "block": 128, "calibration": [ids()]}, "block: expected none with calibration"),
        ({"keep_8bit": 0.1}, "keep_8bit: expected calibration"),
        ({"bits": 8, "keep_8bit": 0.1}, "keep_8bit: expected none with bits=8"),
        ({"calibration": [ids()], "keep_8bit": -1.0}, "keep_8bit: expected a number of at least 0"),
        ({"calibration": [ids()], "keep_8bit": "AUTO"}, "keep_8bit: expected a number of at least 0"),
    ),
)
def test_wrong_arguments_are_named(options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        jitgemm.nn.quantize_(llama(1), **options)


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds():
    on_cpu, on_gpu = llama(1), llama(1).cuda()
    first = jitgemm.nn.quantize_(on_cpu, calibration=[ids(24)])
    second = jitgemm.nn.quantize_(on_gpu, calibration=[ids(24)])
    for name in first:
        assert second.errors[name] == pytest.approx(first.errors[name], rel=0.05)
        pair = [model.get_submodule(name).weight.dequantize().cpu() for model in (on_cpu, on_gpu)]
        assert float((pair[0] == pair[1]).double().mean()) > 0.9, name


@pytest.mark.gpu
def test_calibration_runs_where_the_model_is():
    with pytest.raises(ValueError, match="device: expected none with calibration, which runs the model on cpu"):
        jitgemm.nn.quantize_(llama(1), calibration=[ids()], device="cuda")
    jitgemm.nn.quantize_(llama(1).cuda(), calibration=[ids()], device="cuda")
