"""`sums` of layers and of options for whole models, on the CPU: what reaches the GEMMs, what stays as it was."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace

import builders
import pytest
import torch
from builders import weight_of_experts
from emulator.launch import emulate
from marks import emulated
from nn_layers import inputs
from small_models import Model

import jitgemm
import jitgemm.nn
from jitgemm.gemm import exact, launch
from jitgemm.kernel.formats import WeightFormat
from jitgemm.moe import call as moe_call
from jitgemm.nn import W4A8Experts, W4A8Linear, W8A8Linear
from jitgemm.nn.layers.batched_experts import run_batched
from jitgemm.nn.layers.by_width import empty_weight
from jitgemm.nn.warm.warm import _command, kernels
from jitgemm.select.choose import choose, kernel_named, kernels_for
from jitgemm.select.devices import DEVICES
from jitgemm.weight.f16_sums import row_powers

N, K = 72, 256


def weight(seed: int = 1, group_size: int = 128, lost: bool = False, **options) -> jitgemm.W4Weight:
    parts = builders.weight_parts(seed, N, K, group_size, **options)
    if lost:
        parts.scale[9, 1] = parts.scale[9, 0] * 2.0**-20
    return parts.packed


def layer(activation: str = "e4m3", sums: str = "f16", **options) -> W4A8Linear:
    made = W4A8Linear(weight(**options), activation=activation)
    made.sums = sums
    return made


@pytest.fixture
def given(monkeypatch) -> list[str]:
    """What the GEMMs of this test were asked to add up in."""
    found = []
    write = exact.write_reference
    monkeypatch.setattr(exact, "write_reference", lambda gemm: (found.append(gemm.weight.sums), write(gemm))[1])
    return found


def assert_powers(part) -> None:
    """The buffer of scales has the weight's powers, and no state dict has it."""
    assert torch.equal(part.channel_scale, row_powers(part.weight.packed)[0])
    assert part.weight.channel_scale is part.channel_scale and "channel_scale" not in part.state_dict()


# ---- a layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation, sums, expected", [
    ("e4m3", "f16", "f16"), ("e4m3", "f32", "f32"), ("int8", "exact", "exact"), ("int8", "f32", "f32"),
    ("int8_affine", "exact", "exact"), ("int8_block", "exact", "exact"),
])  # fmt: skip
def test_a_layer_s_gemm_is_given_its_sums(given, activation, sums, expected):
    usual, made = W4A8Linear(weight(), activation=activation), layer(activation, sums)
    x = inputs(1, 5, K)
    assert torch.equal(made(x), usual(x)) and given == [expected, "f32"]
    assert made.sums == sums and (f"sums='{sums}'" in repr(made)) == (sums != "f32")
    assert made.state_dict().keys() == usual.state_dict().keys()


REFUSED = [
    (lambda: W4A8Linear(weight(), activation="int8"), "f16", "but with activation e4m3, got 'f16' with int8"),
    (
        lambda: W4A8Linear(weight(), activation="e4m3_block"),
        "f16",
        "but with activation e4m3, got 'f16' with e4m3_block",
    ),
    (lambda: W4A8Linear(weight()), "exact", "but with activation int8 of any kind, got 'exact' with e4m3"),
    (lambda: W4A8Linear(weight()), "f64", ""),
    (lambda: W4A8Linear(weight(lost=True)), "f16", ""),
    (lambda: W4A8Linear(weight(group_size=K)), "f16", ""),
    (lambda: W8A8Linear.from_linear(torch.nn.Linear(K, N)), "f16", ""),
]


@pytest.mark.parametrize("make, sums, message", REFUSED)
def test_a_layer_says_that_sums_cannot_be_had_and_stays_as_it_was(make, sums, message):
    made = make()
    with pytest.raises(ValueError, match=f"sums: expected .*{message}"):
        made.sums = sums
    assert made.sums == made.call_sums == "f32" and "channel_scale" not in made._non_persistent_buffers_set


def test_powers_follow_the_weight():
    made = layer()
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert again.sums == again.call_sums == "f16"
        assert_powers(again)
    address = made.channel_scale.data_ptr()
    other = builders.weight_parts(7, N, K, 128)
    made.load_state_dict(W4A8Linear(replace(other, scale=other.scale * 8).packed).state_dict())
    assert made.channel_scale.data_ptr() == address, "CUDA graphs hold it"
    assert_powers(made)
    made.take(W4A8Linear(weight(3)).parts)
    assert_powers(made)
    made.to(torch.float16)
    assert made.channel_scale.dtype == torch.float32
    assert_powers(made)


def test_values_that_f16_does_not_hold_are_not_loaded_over_those_that_it_holds():
    made = layer()
    with pytest.raises(ValueError, match="scales f16 does not hold .* sums='f16' was set for values that it holds"):
        made.load_state_dict(W4A8Linear(weight(lost=True)).state_dict())


def test_a_layer_without_values_gets_its_powers_with_them():
    source, filled = W4A8Linear(weight(4)), []
    for lost in (False, True):
        made = W4A8Linear.empty(K, N, device="meta")
        made.sums = "f16"
        assert made.channel_scale.is_meta and made.call_sums == "f16"
        made.to_empty(device="cpu")
        assert made.channel_scale is None
        state = W4A8Linear(weight(4, lost=lost)).state_dict()
        if lost:
            with pytest.warns(UserWarning, match="does not hold .* kernels add up in fp32"):
                made.load_state_dict(state)
        else:
            made.load_state_dict(state)
        filled.append(made)
    assert_powers(filled[0])
    assert filled[1].sums == "f16" and filled[1].call_sums == "f32" and "sums" not in repr(filled[1])
    assert torch.equal(filled[0](inputs(1, 3, K)), source(inputs(1, 3, K)))


@emulated
def test_a_layer_launches_kernels_that_add_up_in_f16(monkeypatch):
    emulator = emulate(monkeypatch)
    label = "e4m3fast-g32-bf16-m80n64-s6-f16"  # a problem whose best kernel is such would take minutes here
    chosen = lambda problem, device: (  # noqa: E731
        kernel_named(label, problem, device) if problem.sums == "f16" else choose(problem, device)
    )
    monkeypatch.setattr(launch, "choose", chosen)
    made, x = W4A8Linear(builders.weight_parts(1, 256, 512, 32, codes="e4m3").packed), inputs(1, 100, 512)
    usual = made(x)
    made.sums = "f16"
    with torch.no_grad():
        found = [run(x) for run in (made, torch.compile(made, fullgraph=True, backend="eager"))]
    gemms = [label for label in emulator.launched if label.startswith("e4m3")]
    assert [label.endswith("-f16") for label in gemms] == [False, True, True]
    assert torch.equal(*found) and not torch.equal(found[0], usual)
    assert torch.allclose(found[0], usual, rtol=0.02, atol=0.02)


def test_mark_ready_makes_powers_again():
    made = torch.nn.Sequential(layer())
    other = builders.weight_parts(1, N, K, 128)
    made[0].blocks.data.copy_(replace(other, scale=other.scale * 4).packed.blocks)
    before = made[0].channel_scale.clone()
    jitgemm.nn.mark_ready(made)
    assert torch.equal(made[0].channel_scale[:N], 4 * before[:N])


@pytest.mark.parametrize("activation, sums", [("e4m3", "f16"), ("int8", "exact")])
def test_a_compiled_layer_says_its_sums(activation, sums):
    """With its powers as scales, or a flag; and takes another kind of sums."""
    made = layer(activation, "f32")
    x, nodes = inputs(2, 5, K), []

    def backend(module, _):
        nodes[:] = module.graph.nodes
        return module.forward

    compiled = torch.compile(made, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = compiled(x)
        made.sums = sums
        assert torch.equal(compiled(x), expected)
        program = torch.export.export(made, (x,))
        assert torch.equal(program.module()(x), expected)
    for graph in (nodes, program.graph.nodes):
        (call,) = [node for node in graph if "gemm_w4a8_nt" in str(node.target)]
        scale = call.kwargs.get("channel_scale", call.args[4] if len(call.args) > 4 else None)
        assert (sums == "f16") == ("channel_scale" in str(scale))
        assert (sums == "exact") == (call.args[-1] is True or call.kwargs.get("exact") is True)


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(activation: str = "e4m3", codes: str = "any") -> W4A8Experts:
    w13, w2 = weight_of_experts(4, 256, 128, 64, codes=codes), weight_of_experts(4, 128, 128, 64, codes=codes)
    return W4A8Experts(w13, w2, activation=activation, top_k=2)


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """Sums of the layers' calls, of w13 and of w2."""
    found, run = [], moe_call.layer_reference

    def spied(call):
        found.append((call.w13.sums, call.w2.sums))
        return run(call)

    monkeypatch.setattr(moe_call, "layer_reference", spied)
    return found


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 4, (6, 2), generator=builders.generator(1), dtype=torch.int32)
    return inputs(1, 6, 128), ids, torch.rand((6, 2), generator=builders.generator(2))


@pytest.mark.parametrize("activation, sums", [("e4m3", "f16"), ("int8", "exact"), ("e4m3", "f32")])
def test_experts_are_added_up_as_they_are_set(asked, activation, sums):
    made, expected = experts(activation), (sums, sums)
    usual = made(*tokens())
    made.sums = sums
    assert torch.equal(made(*tokens()), usual) and asked[1] == expected and made.sums == sums
    assert ("sums" in repr(made)) == (sums != "f32")
    x, ids, weights = tokens()
    given = [part.parts.weight.with_sums(sums) for part in (made.w13, made.w2)]
    out = jitgemm.fused_experts(x, *given, ids, weights, lhs_dtype=made.w13.lhs_dtype)
    assert torch.equal(out, usual) and asked[2] == expected
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, ids, weights), usual) and asked[3] == expected
    assert not any("channel_scale" in name for name in made.state_dict())


@pytest.mark.parametrize("activation, sums", [("e4m3", "f16"), ("int8", "exact")])
def test_experts_of_sorted_tokens_are_added_up_as_they_are_set(given, activation, sums):
    made = experts(activation)
    made.sums = sums
    x, out = inputs(1, 4, 3, 128), torch.empty(4, 3, 128, dtype=torch.bfloat16)
    live = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    run_batched(made, x, out, live, 2.0)
    weights = [part.parts.weight.with_sums(sums) for part in (made.w13, made.w2)]
    jitgemm.fused_experts_masked(x, *weights, torch.empty_like(out), live, 2.0, lhs_dtype=made.w13.lhs_dtype)
    assert given == 4 * [sums]


def test_experts_raise_for_sums_that_cannot_be_had():
    made = experts("int8")
    x, ids, weights = tokens()
    with pytest.raises(ValueError, match="got 'f16' with int8"):
        made.sums = "f16"
    w13, w2 = made.w13.weight, made.w2.weight
    for sums, lhs_dtype in (("f16", torch.int8), ("exact", torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="w13.sums: expected"):
            jitgemm.fused_experts(x, w13.with_sums(sums), w2.with_sums(sums), ids, weights, lhs_dtype=lhs_dtype)
    w13, w2 = (weight_of_experts(4, n, 256, 128, codes="s8") for n in (512, 256))
    x = inputs(1, 6, 256)
    with pytest.raises(ValueError, match="w2.sums: expected 'exact', as w13 has, got 'f32'"):
        jitgemm.fused_experts(x, w13.with_sums("exact"), w2, ids, weights, lhs_dtype=torch.int8)


# ---- warm-up ---------------------------------------------------------------------------------------------------------


def specs(module: torch.nn.Module, **options) -> list:
    return [spec for spec, _, _ in kernels(module, 4096, [torch.bfloat16], "h200", **options) if spec.kind == "gemm"]


def test_warm_up_has_the_kernels_of_a_layer_s_sums():
    def expected(*sums: str) -> set:
        form = 4096, 4096, "e4m3", WeightFormat(128, False, "bf16"), DEVICES["h200"], 4096
        return {spec for each in sums for spec in kernels_for(*form, sums=each)}

    part = empty_weight(4096, 4096, 128, WeightFormat(128, False, "bf16"), device="meta")
    made = torch.nn.Sequential(W4A8Linear(part), W4A8Linear(part))
    assert set(specs(made)) == expected("f32") and set(specs(made, sums="f16")) == expected("f16", "f32")
    assert set(specs(made, sums="exact")) == expected("f32")
    made[0].sums = "f16"
    assert set(specs(made)) == expected("f16", "f32"), "values may yet be such as f16 does not hold"
    filled = layer()
    assert {spec.sums for spec in specs(filled)} <= {"f16", "f32"}
    assert set(specs(filled)) == set(kernels_for(N, K, "e4m3", filled.weight.format, DEVICES["h200"], 4096, sums="f16"))
    assert "--sums f16" in _command(made, 4096, None, False)


def test_warm_up_of_experts_has_the_kernels_of_their_sums():
    made = experts()
    made.sums = "f16"
    found, form = set(specs(made)), made.w13.weight
    options = dict(experts=4, sums="f16")
    for part in (made.w13, made.w2):
        form = part.weight
        assert found >= set(kernels_for(form.n, form.k, "e4m3", form.format, DEVICES["h200"], 8192, **options))


# ---- options of whole models -----------------------------------------------------------------------------------------


def quantised(**options) -> Model:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jitgemm.nn.quantize_(model, group_size=32, **options)
    return model


def sums_of(model: torch.nn.Module) -> set[str]:
    return {m.call_sums for m in model.modules() if isinstance(m, W4A8Linear)}


@pytest.mark.parametrize("activation, sums", [("e4m3", "f16"), ("int8", "exact")])
def test_quantize_and_load_set_sums(activation, sums):
    model = quantised(activation=activation, sums=sums)
    assert sums_of(model) == {sums}
    state = model.state_dict()
    for given, expected in ((sums, sums), (None, "f32")):
        other = Model()
        jitgemm.nn.load_(other, state, sums=given)
        assert sums_of(other) == {expected}
    jitgemm.nn.load_(model, state)
    assert sums_of(model) == {sums}, "a layer that is loaded again stays as it is set"


def test_load_refuses_sums_before_it_replaces_a_layer():
    model = quantised(filter=lambda name, _: name == "blocks.0.up")
    jitgemm.nn.quantize_(model, group_size=32, activation="int8")
    other = Model()
    with pytest.raises(ValueError, match="sums: .* got 'f16' with int8 .layer "):
        jitgemm.nn.load_(other, model.state_dict(), sums="f16")
    assert sums_of(other) == set()


def test_weights_that_f16_does_not_hold_fall_back_with_one_warning_that_names_them():
    model = quantised()
    names = [name for name, m in model.named_modules() if isinstance(m, W4A8Linear)]
    bad = model.get_submodule(names[0])
    q, scale, _ = bad.weight.unpack()
    scale[3, 1] = scale[3, 0] * 2.0**-20
    bad.take(bad.parts._replace(weight=jitgemm.pack_w4(q, scale, group_size=32, lhs_dtype=torch.float8_e4m3fn)))
    other = Model()
    with pytest.warns(UserWarning) as caught:
        jitgemm.nn.load_(other, model.state_dict(), sums="f16")
    (text,) = [str(each.message) for each in caught if "fp32" in str(each.message)]
    assert "1 weights are" in text and names[0] in text and "scales that f16 does not hold" in text
    assert other.get_submodule(names[0]).call_sums == "f32"
    assert {other.get_submodule(name).call_sums for name in names[1:]} == {"f16"}
