"""quantize_ and load_ of models of transformers 5 that stack a layer's experts."""

from __future__ import annotations

import json
import warnings
import weakref

import builders
import checkpoints
import pytest
import torch
from expert_models import (
    EXPERT,
    GATE_OF,
    MODELS,
    SIZES,
    alike,
    build,
    each,
    experts_of,
    file_of,
    first_of,
    fused,
    gpt_oss_file,
    logits,
    same_weights,
    transformers,
)
from nn_experts import HIDDEN, INTER, TOP_K, E
from safetensors.torch import save_file, save_model
from small_models import same_state
from stored_weights import COMPRESSED, FORMATS, GROUP, INPUTS, WEIGHTS, compressed, gptq_of_8_bits, rounded

import jitgemm
import jitgemm.nn
from jitgemm.nn import Gate, PackedLinear, W4A8Experts, W8A8Experts, load_
from jitgemm.nn.layers.gate import gate_of
from jitgemm.nn.load import layer_source


def fill(dense: torch.nn.Module, model: torch.nn.Module, names: list[str]) -> None:
    """Puts the weights that these layers of the model stand for into another that has Linears and experts there."""
    for name in names:
        ours, module = model.get_submodule(name), dense.get_submodule(name)
        if isinstance(ours, PackedLinear):
            module.weight.data = ours.weight.dequantize()
            continue
        for part, parameter in ((ours.w13, first_of(module)), (ours.w2, module.down_proj)):
            weight = part.weight.dequantize()
            parameter.data = weight.transpose(1, 2) if getattr(module, "is_transposed", False) else weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_quantize_replaces_experts_and_leaves_routers(name, bits):
    model, dense = build(name), build(name)
    stacked, kind = list(experts_of(model)), {4: W4A8Experts, 8: W8A8Experts}[bits]
    options = {"group_size": 32, "clip_steps": 0} if bits == 4 else {}
    report = jitgemm.nn.quantize_(model, bits=bits, activation="int8", **options)
    assert [each for each in report if each.endswith("experts")] == stacked and len(report) > len(stacked)
    assert not any(each.endswith((".gate", ".router")) for each in report)
    layer, module = model.get_submodule(stacked[0]), dense.get_submodule(stacked[0])
    assert type(layer) is kind and layer.gate == GATE_OF.get(name, Gate()) and layer.activation == "int8"
    assert layer.top_k == TOP_K
    w, bias = first_of(module)[2].detach(), getattr(module, "down_proj_bias", None)
    if bits == 4:
        expected = jitgemm.quantize_w4(w.T if name == "gpt-oss" else w, 32, clip_steps=0).dequantize()
        assert torch.equal(layer.w13.weight[2].dequantize(), expected)
    assert (layer.w2.bias is None) == (bias is None) and (bias is None or torch.equal(layer.w2.bias, bias))
    fill(dense, model, report)
    assert alike(logits(model), logits(dense))
    assert not any(p.dim() == 3 for p in model.parameters())


def test_a_filter_chooses_experts_and_unfit_ones_are_named():
    model = build("qwen3", moe_intermediate_size=72)
    report = jitgemm.nn.quantize_(model, clip_steps=0)
    assert report and not any("experts" in name for name in report)
    reason = "expected hidden and intermediate sizes that are multiples of 16, got 64 and 72"
    assert report.skipped["model.layers.0.mlp.experts"] == reason
    wanted = lambda name, _: name.endswith("experts")  # noqa: E731
    with pytest.raises(ValueError, match=f"model.layers.0.mlp.experts: {reason}"):
        jitgemm.nn.quantize_(build("qwen3", moe_intermediate_size=72), wanted)
    model = build("qwen3")
    model.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = torch.inf
    with pytest.raises(ValueError, match=r"1\.mlp\.experts: down_proj\[3\]: w: expected finite.*inf at \[5, 7\]"):
        jitgemm.nn.quantize_(model, wanted, clip_steps=0)
    report = jitgemm.nn.quantize_(build("qwen3"), lambda name, _: "layers.1.mlp.experts" in name, clip_steps=0)
    assert report == ["model.layers.1.mlp.experts"]


class Normed(torch.nn.Module):
    """As transformers' experts look from outside, with a gate that none of ours is."""

    has_bias, is_transposed = False, False

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(E, 2 * INTER, HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.randn(E, HIDDEN, INTER))

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.relu(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


def test_experts_of_another_kind_stay_and_are_said_so():
    model = torch.nn.ModuleDict({"experts": Normed(), "up": torch.nn.Linear(64, 32)})
    with pytest.warns(UserWarning, match="quantize_ left 100% .*Normed has a forward of its own"):
        report = jitgemm.nn.quantize_(model, clip_steps=0)
    assert report == ["up"] and set(report.skipped) == {"experts.gate_up_proj", "experts.down_proj"}
    model = build("qwen3", hidden_act="relu")
    with pytest.warns(UserWarning, match=r"a gate that is not one of jitgemm.nn's \(Qwen3MoeExperts\)"):
        assert not any("experts" in name for name in jitgemm.nn.quantize_(model, clip_steps=0))


@pytest.mark.parametrize(
    "act, kind", [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("quick_gelu", None)]
)
def test_gates_are_told_by_what_they_compute(act, kind):
    assert gate_of(build("mixtral", hidden_act=act).model.layers[0].mlp.experts) == (kind and Gate(kind))


def loaded(name: str, source, **options) -> tuple[torch.nn.Module, list[str]]:
    """Another model of the kind, filled; and what it was filled with."""
    model = build(name, seed=1)
    return model, load_(model, source, **options)


# ---- load_ -----------------------------------------------------------------------------------------------------------


SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FUSED = [(("gate_up_proj.", "down_proj."), ""), (("gate_up_proj_", "down_proj_"), "one")]
FUSED += [(("w13_weight.", "w2_weight."), "one"), (("w13_", "w2_"), "")]
FILES = [(name, "compressed-tensors", None) for name in MODELS if name != "gpt-oss"]
FILES += [("qwen3", form, None) for form in FORMATS]
FILES += [("qwen3", "compressed-tensors", fuse) for fuse in FUSED]
FILES += [("nemotron", "compressed-tensors", (("up_proj.", "down_proj."), ""))]


@pytest.mark.parametrize("name, form, fuse", FILES, ids=str)
def test_experts_of_a_file_are_those_that_it_names_or_has_in_one_tensor(tmp_path, name, form, fuse):
    tensors, dense = fused(build(name), *fuse) if fuse else file_of(build(name), form)
    ending = "" if name == "mixtral" else "input_scale"  # as DeepSeek-R1's stand, and all of Mixtral's files
    for part, short in SHORT.items():
        tensors = {key.replace(f"{part}.{ending}", f"{short}.{ending}"): tensor for key, tensor in tensors.items()}
    if name == "mixtral":
        tensors = {key.replace(".mlp.", ".block_sparse_moe."): tensor for key, tensor in tensors.items()}
    folder = checkpoints.save(tmp_path, tensors, FORMATS[form][1], shards=3 if name == "mixtral" else None)
    model, report = loaded(name, folder, activation=None if form == "w4afp8" else "int8")
    assert report == list(experts_of(dense)) and report.skipped == {}
    assert same_weights(model, dense) and model.get_submodule(report[0]).gate == GATE_OF.get(name, Gate())
    others = {n: x for n, x in dense.state_dict().items() if "experts." not in n}
    assert all(torch.equal(model.state_dict()[n], x) for n, x in others.items())
    static = {name for name in tensors if name.endswith("input_scale")}
    assert set(report.ignored) == static and (not static) == (form != "w4afp8")
    assert all("experts quantise every token" in why for why in report.ignored.values())
    assert alike(logits(model), logits(dense))


def test_experts_of_8_bits_with_zero_points_are_dequantised(monkeypatch):
    monkeypatch.setitem(FORMATS, "asymmetric", (lambda layer: gptq_of_8_bits(layer, 77), {}))
    tensors, dense = file_of(build("qwen3"), "asymmetric")
    model = build("qwen3", seed=1)
    with pytest.warns(UserWarning, match="8-bit codes with zero points"):
        report = load_(model, tensors, config=FORMATS["gptq-int8"][1] | {"sym": False})
    assert report == [] and set(report.skipped.values()) == {"dequantised: 8-bit codes with zero points"}
    assert same_state(model, dense)


@pytest.mark.parametrize("least, codes", [(-7, "e4m3"), (-8, "any")])
def test_codes_decode_in_the_faster_order_where_all_experts_allow_it(least, codes):
    tensors, _ = file_of(build("qwen3"), least=-7)
    if least == -8:
        one = "model.layers.0.mlp.experts.2.up_proj.weight_packed"
        tensors[one] = tensors[one].clone()
        tensors[one][0, 0] &= ~0xF
    model, _ = loaded("qwen3", tensors, config=COMPRESSED)
    assert model.model.layers[0].mlp.experts.w13.weight.format.order == codes
    assert model.model.layers[1].mlp.experts.w13.weight.format.order == "e4m3"


def test_experts_with_zero_points_beside_some_without():
    tensors, dense = file_of(build("qwen3"), "awq")
    name = "model.layers.0.mlp.experts.2.gate_proj.qzeros"
    tensors[name] = checkpoints.words(torch.full((HIDDEN // 32, INTER), 3), 1)
    model, _ = loaded("qwen3", tensors, config=FORMATS["awq"][1])
    w13 = model.model.layers[0].mlp.experts.w13.weight
    expected = dense.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    scale = tensors["model.layers.0.mlp.experts.2.gate_proj.scales"].T.float().repeat_interleave(32, 1)
    expected[2, :INTER] += 5 * scale
    assert w13.format.zero_point and torch.allclose(w13.dequantize(), expected, atol=1e-6)
    assert not model.model.layers[1].mlp.experts.w13.weight.format.zero_point


def test_experts_in_floats_are_stacked_and_a_filter_dequantises():
    tensors, dense = file_of(build("qwen3"))
    model, report = loaded("qwen3", tensors, config=COMPRESSED, filter=lambda name, _: "layers.1" in name)
    assert report == ["model.layers.1.mlp.experts"]
    assert report.skipped == {"model.layers.0.mlp.experts": "dequantised: left out by the filter"}
    first, expected = (m.model.layers[0].mlp.experts for m in (model, dense))
    assert torch.equal(first.gate_up_proj, expected.gate_up_proj) and torch.equal(first.down_proj, expected.down_proj)
    plain = {f"{n}.weight": x for n, x in each(dense).items() if "layers.0" in n}
    mixed = {n: x for n, x in tensors.items() if "layers.0.mlp.experts" not in n} | plain
    model = build("qwen3", seed=2)
    assert load_(model, mixed, config=COMPRESSED) == ["model.layers.1.mlp.experts"]
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, expected.gate_up_proj)


def test_gpt_oss_gets_gate_and_up_apart_and_its_biases():
    source = build("gpt-oss")
    for module in experts_of(source).values():
        torch.nn.init.normal_(module.gate_up_proj_bias)
        torch.nn.init.normal_(module.down_proj_bias)
    tensors, dense = gpt_oss_file(source)
    model, _ = loaded("gpt-oss", tensors, config=COMPRESSED, activation="int8")
    layer, expected = (m.model.layers[0].mlp.experts for m in (model, dense))
    assert layer.gate == Gate("swiglu_oai", "gate_up", 7.0, 1.702)
    both = expected.gate_up_proj.detach().transpose(1, 2)
    assert torch.equal(layer.w13.weight.dequantize(), torch.cat([both[:, 0::2], both[:, 1::2]], 1))
    assert torch.equal(layer.w13.bias[:, :INTER], expected.gate_up_proj_bias[:, 0::2])
    assert alike(logits(model), logits(dense))
    again = build("gpt-oss", seed=2)
    load_(again, tensors, config=COMPRESSED, filter=lambda *_: False, activation="int8")
    first = again.model.layers[0].mlp.experts
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), expected.parameters()))


def test_activation_orders_are_refused_and_can_be_dequantised():
    tensors, dense = file_of(build("qwen3"), "gptq")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    name = "model.layers.1.mlp.experts.3.down_proj"
    order = torch.randperm(INTER, generator=builders.generator(1))
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"][order]
    said = FORMATS["gptq"][1]
    with pytest.raises(ValueError, match=r"expert 3: expected columns in .*order.*g_idx.*layers\.1\.mlp"):
        load_(build("qwen3", seed=1), tensors, config=said)
    first = {f"model.layers.1.mlp.experts.0.{part}.g_idx" for part in EXPERT}
    flipped = {n: x.flip(0) if n in first else x for n, x in tensors.items()}
    model = build("qwen3", seed=1)
    with pytest.raises(ValueError, match="expert 0: .*activation order.*layers.1.mlp.experts"):
        load_(model, flipped, config=said | {"desc_act": True})
    assert list(experts_of(model)) == list(experts_of(dense))  # found before anything was changed
    report = load_(model, flipped, config=said, filter=lambda name, _: "layers.0" in name)
    assert report == ["model.layers.0.mlp.experts"]
    model, report = loaded("qwen3", tensors, config=said, filter=lambda name, _: "layers.0" in name)
    assert report == ["model.layers.0.mlp.experts"]
    assert torch.equal(model.model.layers[1].mlp.experts.gate_up_proj, dense.model.layers[1].mlp.experts.gate_up_proj)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"3.up_proj": None},
            "every expert of model.layers.0.mlp.experts, found none of 1 layers: .*experts.3.up_proj",
        ),
        ({"4.up_proj": (96, 64)}, "found no place for model.layers.0.mlp.experts.4.up_proj"),
        ({"scale": "beside"}, "found no place for model.layers.0.mlp.experts.scale;"),
        ({"1.up_proj": (64, 64)}, r"experts.1.up_proj: expected n, k = \[96, 64\], got \[64, 64\]"),
        ({"1.down_proj": (64, 64)}, r"experts.1.down_proj: expected n, k = \[64, 96\], got \[64, 64\]"),
        ({"2.gate_proj": "bias"}, r"experts.2.gate_proj.bias: expected no bias, .* or zeros, got 1 at \[0\]"),
    ],
)
def test_incomplete_or_other_experts_are_refused_before_the_model_changes(change, message):
    ((part, what),) = change.items()
    tensors, dense = file_of(build("qwen3"))
    name = f"model.layers.0.mlp.experts.{part}"
    if what != "bias":
        tensors = {n: x for n, x in tensors.items() if not n.startswith(name)}
    if what == "bias":
        tensors[f"{name}.bias"] = torch.ones(INTER)
    elif what == "beside":
        tensors[name] = torch.ones(4)
    elif what is not None:
        tensors |= {f"{name}.{s}": x for s, x in compressed(rounded(torch.randn(what))).items()}
    model = build("qwen3", seed=1)
    with pytest.raises(ValueError, match=message):
        load_(model, tensors, config=COMPRESSED)
    assert list(experts_of(model)) == list(experts_of(dense))


@pytest.mark.parametrize(
    "part, said",
    [
        ("2.gate_proj", "floats"), ("0.gate_proj", "floats"), ("3.down_proj", "int8 in groups of 96"), ("down_proj", "floats"),
        ("2.up_proj", "int4 in groups of 16"), ("1.up_proj", "e4m3 in groups of 64"), ("1.up_proj", "e2m1 in groups of 32"),
    ],
)  # fmt: skip
def test_experts_of_several_kinds_are_dequantised_each_exactly(part, said):
    source = build("qwen3")
    tensors, dense = file_of(source)
    kind, groups, prefix = said.partition(" ")[0], [], "model.layers.0.mlp.experts"
    for name, weight in each(dense).items():
        if name.startswith(prefix) and (name.endswith(f".{part}") or name == f"{prefix}.{part}"):
            tensors = {n: x for n, x in tensors.items() if not n.startswith(f"{name}.")}
            new, scheme, weight[:] = _of_kind(weight.clone(), kind)
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in new.items()}
            inputs = INPUTS | {"type": "int" if kind == "int8" else "float"}
            groups += [{"targets": [name], "weights": scheme, "input_activations": inputs}] if scheme else []
    config = COMPRESSED | {"config_groups": {str(i): group for i, group in enumerate([*groups, GROUP])}}
    if kind == "e2m1":
        config["format"] = "mixed-precision"
    model = build("qwen3", seed=1)
    with pytest.warns(UserWarning, match=f"experts of several kinds: .*{said}"):
        report = load_(model, tensors, config=config)
    assert list(report.skipped) == [prefix] and "model.layers.1.mlp.experts" in report
    for parameter in ("gate_up_proj", "down_proj"):
        found, expected = (getattr(m.model.layers[0].mlp.experts, parameter) for m in (model, dense))
        assert torch.equal(found, expected)


def test_experts_of_two_activations_are_named_and_the_one_that_is_advised_is_for_all():
    tensors, dense = file_of(build("qwen3"))
    other = GROUP | {"targets": ["re:.*experts.2.*"], "input_activations": INPUTS | {"type": "int"}}
    config = COMPRESSED | {"config_groups": {"a": other, "b": GROUP}}
    named = (
        "experts.2.gate_proj: expected e4m3 activations, as .*experts.0.gate_proj has, got int8; activation=... choo"
    )
    with pytest.raises(ValueError, match=named):
        load_(build("qwen3", seed=1), tensors, config=config)
    model, _ = loaded("qwen3", tensors, config=config, activation="int8")
    assert same_weights(model, dense)


def _of_kind(w: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], dict | None, torch.Tensor]:
    """A weight's tensors, their scheme, and what they stand for."""
    w = w.float()
    if kind == "floats":
        return {"weight": w}, None, w
    if kind == "int4":
        layer = rounded(w, group_size=16)
        return compressed(layer), WEIGHTS | {"group_size": 16}, layer.weight.float()
    if kind == "e2m1":
        codes, scale = (torch.arange(w.numel()) % 16).reshape(w.shape), torch.full((w.shape[0], w.shape[1] // 32), 122)
        packed = {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).byte(), "weight_scale": scale.byte()}
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scheme = WEIGHTS | {"type": "float", "group_size": 32}
        return packed, scheme, torch.cat([values, -values])[codes] / 32
    scale = w.abs().amax(1, keepdim=True) / 100
    q = (w / scale).to(torch.float8_e4m3fn) if kind == "e4m3" else (w / scale).round().to(torch.int8)
    scheme = {"num_bits": 8, "type": "float" if kind == "e4m3" else "int", "strategy": "channel", "symmetric": True}
    return {"weight": q, "weight_scale": scale}, scheme, q.float() * scale


@pytest.mark.parametrize("form", ["gptq", "floats"])
def test_biases_of_zeros_of_experts_without_are_ignored_and_reported(form):
    source = build("qwen3")
    if form == "gptq":
        (tensors, dense), config = file_of(source, form), FORMATS["gptq"][1]
    else:
        dense, stacked, config = source, tuple(experts_of(source)), None
        tensors = {f"{name}.weight": w for name, w in each(source).items()}
        tensors |= {name: x for name, x in source.state_dict().items() if not name.startswith(stacked)}
    biases = {f"{name}.bias": torch.zeros(len(w)) for name, w in each(source).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="load_ converted no layer")
        model, report = loaded("qwen3", tensors | biases, config=config)
    assert set(report.ignored) == set(biases)
    assert (same_weights if form == "gptq" else same_state)(model, dense)
    name = next(iter(biases))
    with pytest.raises(ValueError, match="bias: expected floats of 16, 32 or 64 bits, got int32"):
        load_(model, tensors | biases | {name: biases[name].int()}, config=config)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt-oss", "nemotron"])
def test_what_was_quantised_here_goes_to_a_file_and_back(tmp_path, name):
    model = build(name)
    jitgemm.nn.quantize_(model, clip_steps=0, group_size=32)
    expected = logits(model)
    save_model(model, str(tmp_path / "model.safetensors"))
    other = build(name, seed=1)
    assert {*experts_of(build(name))} < {*load_(other, tmp_path / "model.safetensors")}
    assert torch.equal(logits(other), expected) and same_state(other, model)
    model.save_pretrained(tmp_path / "saved")
    third = build(name, seed=2)
    load_(third, tmp_path / "saved")
    assert torch.equal(logits(third), expected)
    load_(third, tmp_path / "saved")  # W4A8Experts are loaded again
    assert torch.equal(logits(third), expected)
    with pytest.raises(ValueError, match="activation: expected e4m3, as the layer was saved, got int8"):
        load_(build(name), tmp_path / "saved", activation="int8")


def test_experts_that_a_file_lacks_are_missed():
    model = build("qwen3")
    tensors = {name: x for name, x in model.state_dict().items() if "layers.1.mlp.experts" not in name}
    with pytest.raises(ValueError, match="found none for model.layers.1.mlp.experts.gate_up_proj"):
        load_(build("qwen3"), tensors)
    jitgemm.nn.quantize_(model, lambda name, _: name.endswith("experts"), clip_steps=0)
    saved = {name: x.clone() for name, x in model.state_dict().items() if "layers.1.mlp.experts" not in name}
    with pytest.raises(ValueError, match="layers.1.mlp.experts is a W4A8Experts, for which the file has no quantised"):
        load_(model, saved)


def test_models_without_data_are_filled():
    accelerate = pytest.importorskip("accelerate")
    tensors, dense = file_of(build("qwen3"))
    with accelerate.init_empty_weights():
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES)).eval()
    load_(model, tensors, config=COMPRESSED, device="cpu", activation="int8")
    assert same_weights(model, dense) and alike(logits(model), logits(dense))


def test_no_more_than_one_expert_is_in_memory_beside_the_packed_weight(monkeypatch):
    tensors, _ = file_of(build("qwen3"))
    alive, most, original = [], [], layer_source.read_header

    def counted(*arguments):
        weight = original(*arguments)
        alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(weight.q)]
        most.append(len(alive))
        return weight

    monkeypatch.setattr(layer_source, "read_header", counted)
    loaded("qwen3", tensors, config=COMPRESSED)
    assert max(most) <= 4  # gate and up, and those before them until they are replaced


# ---- stacked in the file ---------------------------------------------------------------------------------------------


def fp8_file(name: str, by: str) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """Tensors by FP8Experts' names: e4m3 codes and, of each expert, a scale, one of its gate and one of up, or blocks'."""
    dense = build(name).bfloat16().float()
    tensors = {n: x.clone() for n, x in dense.state_dict().items()}
    for path, module in experts_of(dense).items():
        for parameter in ("gate_up_proj", "down_proj"):
            w = getattr(module, parameter).detach()
            w = w.transpose(1, 2) if module.is_transposed else w
            halves = 2 if by == "gate and up" and parameter == "gate_up_proj" else 1
            rows, columns = (32, 32) if by == "blocks" else (w.shape[1] // halves, w.shape[2])
            blocks = w.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))
            scale = blocks.abs().amax((2, 4)) / 448
            q = (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2).to(torch.float8_e4m3fn)
            exact = q.float() * scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
            getattr(module, parameter).data = exact.transpose(1, 2) if module.is_transposed else exact
            tensors |= {f"{path}.{parameter}": q, f"{path}.{parameter}_scale_inv": scale}
    return tensors, dense


@pytest.mark.parametrize("by", ["tensor", "gate and up", "blocks"])
@pytest.mark.parametrize("static", [False, True])
def test_fp8_experts_of_transformers_names_are_read_as_stacked(tmp_path, by, static):
    hf = pytest.importorskip("jitgemm.hf")
    model, (tensors, dense) = build("qwen3").bfloat16(), fp8_file("qwen3", by)
    model.save_pretrained(tmp_path)
    stacked = list(experts_of(model))
    if static:
        each = [f"{name}.{parameter}" for name in stacked for parameter in ("gate_up_proj", "down_proj")]
        tensors |= {f"{name}_activation_scale": torch.full((E,), 0.05) for name in each}
    told = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    told |= {"weight_block_size": [32, 32] if by == "blocks" else None}
    text = json.loads((tmp_path / "config.json").read_text())
    checkpoints.save(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(text | {"quantization_config": told}))
    report = load_(model, tmp_path)
    assert report == stacked and same_weights(model, dense)
    activation = "e4m3_block" if by == "blocks" and not static else "e4m3"
    assert {model.get_submodule(name).activation for name in stacked} == {activation}
    assert all("experts quantise every token" in why for why in report.ignored.values())
    assert len(report.ignored) == (2 * len(stacked) if static else 0)
    options = {"config": hf.config(str(tmp_path)), "dtype": torch.bfloat16}
    assert same_weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options), dense)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_stacked_weights_are_dequantised_and_have_the_modules_biases(name):
    tensors, dense = fp8_file(name, "tensor")
    said = {"quant_method": "fp8", "weight_block_size": None}
    left = build(name, seed=1)
    with pytest.warns(UserWarning, match="converted no layer"):
        load_(left, tensors, config=said, filter=lambda *_: False)
    assert same_state(left, dense)
    model, names = loaded(name, tensors, config=said)
    assert names == list(experts_of(dense))
    if name == "qwen3":
        return
    for path in names:
        ours, theirs = model.get_submodule(path), dense.get_submodule(path)
        assert torch.equal(ours.w13.weight.dequantize().transpose(1, 2), theirs.gate_up_proj)
        assert torch.equal(ours.w13.bias, theirs.gate_up_proj_bias) and torch.equal(ours.w2.bias, theirs.down_proj_bias)
    bias = f"{names[0]}.gate_up_proj_bias"
    with pytest.raises(ValueError, match=r"bias: expected floats .*, got int32 .*experts.gate_up_proj"):
        load_(build("gpt-oss", seed=1), tensors | {bias: tensors[bias].float().view(torch.int32)}, config=said)


def test_experts_that_torchao_has_quantised_in_their_parameter(tmp_path):
    """As its FqnToConfig does: subclasses of [E, n, k]."""
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    if not hasattr(quantization, "Int8Tensor"):
        pytest.skip("this torchao has no Int8Tensor")
    model, dense = build("qwen3"), build("qwen3")
    state = model.state_dict()
    for name, module in experts_of(dense).items():
        for parameter in ("gate_up_proj", "down_proj"):
            full = f"{name}.{parameter}"
            state[full] = quantization.Int8Tensor.from_hp(state[full], quantization.PerRow())
            getattr(module, parameter).data = state[full].dequantize()
    tensors, metadata = support.flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    for source in (state, tmp_path):
        loaded = build("qwen3")
        assert load_(loaded, source) == list(experts_of(model)) and same_weights(loaded, dense)
        assert {loaded.get_submodule(name).activation for name in experts_of(model)} == {"int8"}
