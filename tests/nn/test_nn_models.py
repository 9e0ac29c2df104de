"""quantize_ and load_ on small models: what is chosen, replaced, filled, refused and reported."""

from __future__ import annotations

import functools
import gc
import re
import warnings
import weakref

import builders
import pytest
import torch
from safetensors.torch import load_model, save_model
from small_models import (
    BLOCKS,
    IDS,
    Block,
    Model,
    checkpoint_tensors,
    config,
    opened,
    quantised_names,
    same_state,
    stored,
)
from terminals import on_a_terminal

import jitgemm.nn
from jitgemm.checkpoint import Checkpoint
from jitgemm.checkpoint.format import Inputs
from jitgemm.nn import W4A8Linear, W8A8Linear, load_
from jitgemm.nn.load.layer_source import activations

quantize = functools.partial(jitgemm.nn.quantize_, clip_steps=0)
"""Without the search for better scales, which takes most of the time."""


@pytest.mark.parametrize("call", ["quantize_", "warmup", "mark_ready", "load_"])
def test_what_is_no_model_is_refused(call):
    source = ({},) if call == "load_" else ()
    with pytest.raises(TypeError, match="^model: expected a torch.nn.Module, got str$"):
        getattr(jitgemm.nn, call)("model", *source)


OPTIONS = [
    ({"bits": 6}, "bits"), ({"scheme": "nf4"}, "scheme"), ({"block": 128}, "block"), ({"lm_head": "fp8"}, "lm_head"),
    ({"activation": "fp8"}, "activation"), ({"scale_dtype": "fp8"}, "scale_dtype"), ({"sums": "f64"}, "sums"),
    ({"group_size": -2}, "group_size"), ({"group_size": "128"}, "group_size"), ({"symmetric": "no"}, "symmetric"),
    *(({"clip_steps": steps}, "clip_steps") for steps in ("many", -1, 1001)), ({"bits": 8, "block": 64}, "block"),
    ({"scale_dtype": torch.int8}, "scale_dtype"),
    *(({"rotation": rotation}, "rotation") for rotation in (64, 0, True, 128.0)),
    *(({"bits": 8, name: value}, name) for name, value in (("group_size", 64), ("symmetric", True), ("clip_steps", 3))),
    *(({"sums": sums, "activation": activation}, "sums") for sums, activation in (
        ("f16", "int8"), ("exact", "e4m3"), ("f16", "e4m3_block"))),
    *(({"scheme": "mxfp4"} | {name: value}, name) for name, value in (
        ("bits", 8), ("activation", "int8"), ("group_size", 32), ("symmetric", True), ("clip_steps", 3))),
    *(({"scheme": "two-level"} | {name: value}, name) for name, value in (
        ("bits", 8), ("activation", "e4m3"), ("group_size", 32))),
]  # fmt: skip
"""Of a recipe, by whatever door: what is wrong, and which name the error begins with."""
DOORS = {
    "quantize_": lambda **options: jitgemm.nn.quantize_(Model(), **options),
    "from_pretrained": lambda **options: pytest.importorskip("jitgemm.hf").JitGemmConfig(**options),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("options, name", OPTIONS, ids=str)
def test_wrong_options_of_a_recipe_are_named(door, options, name):
    with pytest.raises((TypeError, ValueError), match=rf"(^|: ){name}: expected "):
        DOORS[door](**options)


# ---- quantize_ -------------------------------------------------------------------------------------------------------


WITHOUT_DATA = Model()
WITHOUT_DATA.blocks[1].up.to("meta")
WRONG = [
    (torch.nn.Linear(64, 32), {}, "model: expected a module that holds Linears, got a Linear"),
    (Block(), {"lm_head": "int8"}, "lm_head: expected a model whose output embedding is a Linear"),
    (Model(), {"filter": ["blocks.*"]}, "filter: expected a function"),
    (Model(), {"filter": lambda name, _: name == "odd"}, "odd: expected out_features a multiple of 8 and in_features"),
    (WITHOUT_DATA, {}, r"blocks\.1\.up: expected a weight with data"),
    *([] if torch.cuda.is_available() else [(Model(), {"device": "cuda"}, ".*device: expected one that is here, got cuda")]),
]  # fmt: skip


@pytest.mark.parametrize("model, options, message", WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_what_quantize_cannot_do_is_named_and_nothing_is_changed(model, options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        jitgemm.nn.quantize_(model, **options)
    assert quantised_names(model) == []


SWAPS = [
    (W4A8Linear, {"group_size": 32, "clip_steps": 0}, 0.1),
    (W8A8Linear, {"bits": 8, "activation": "e4m3"}, 0.05),
    (W8A8Linear, {"bits": 8, "activation": "int8"}, 0.02),
]


@pytest.mark.parametrize("kind, options, at_most", SWAPS)
def test_quantize_swaps_the_linears_that_fit_but_the_head(kind, options, at_most):
    model, own = Model().eval(), {name: value for name, value in options.items() if name != "bits"}
    expected = {name: kind.from_linear(model.get_submodule(name), **own) for name in BLOCKS}
    with torch.no_grad():
        before = model(IDS)[0]
    assert jitgemm.nn.quantize_(model, **options) == BLOCKS == quantised_names(model)
    for name in BLOCKS:
        layer = model.get_submodule(name)
        assert type(layer) is kind and same_state(layer, expected[name]) and not layer.training
    with torch.no_grad():
        assert 0 < float((model(IDS)[0] - before).norm() / before.norm()) < at_most
    with pytest.warns(UserWarning, match=f"converted no layer(?s:.*)is a {kind.__name__} already: blocks.0.up"):
        assert jitgemm.nn.quantize_(model, lambda name, _: name in BLOCKS, **options) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", ["int8", "e4m3"])
def test_the_head_is_quantised_to_8_bits_where_asked_for(lm_head, tied):
    model = Model(tied)
    table = model.embed.weight.clone()
    expected = W8A8Linear.from_linear(model.lm_head, activation=lm_head)
    assert quantize(model, lambda *_: False, lm_head=lm_head) == ["lm_head"]
    assert same_state(model.lm_head, expected) and torch.equal(model.embed.weight, table)
    assert quantize(model, group_size=32) == BLOCKS  # and again, for the others
    both = Model(tied)
    assert quantize(both, group_size=32, lm_head=lm_head) == [*BLOCKS, "lm_head"]
    assert same_state(both, model)
    with pytest.raises(ValueError, match="lm_head: lm_head: is a W8A8Linear already"):
        quantize(model, lm_head="int8")


def test_a_filter_chooses():
    ups = ["blocks.0.up", "blocks.1.up", "lm_head"]
    assert quantize(Model(), lambda name, _: "up" in name or name == "lm_head") == ups
    assert quantize(Model(), lambda _, linear: linear.in_features == 96) == ["blocks.0.down", "blocks.1.down"]


def test_a_failure_names_the_linear():
    model = Model()
    model.blocks[1].up.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"blocks\.1\.up: w: expected finite values, got nan at \[3, 4\]"):
        quantize(model)
    assert quantised_names(model) == BLOCKS[:2]


def test_a_models_own_output_embedding_stays():
    model = Model()
    model.get_output_embeddings = lambda: model.blocks[1].down
    assert quantize(model) == BLOCKS[:3]


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 0.1 * super().forward(x)


def zoo() -> torch.nn.ModuleDict:
    """A Linear at two places and one of an MLP that chooses no experts, and others that stay."""
    parts = {name: torch.nn.Linear(64, 32) for name in ("fits", "replaced", "wide", "fp8", "a", "b")}
    parts |= {name: torch.nn.Linear(64, 8) for name in ("gate", "router", "shared_expert_gate")}
    parts |= {"own": Scaled(64, 32), "odd": torch.nn.Linear(64, 10), "again": parts["fits"]}
    parts |= {"attention": torch.nn.MultiheadAttention(64, 4), "mlp": torch.nn.ModuleDict()}
    parts |= {"encoder": torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)}
    parts["mlp"]["gate"] = torch.nn.Linear(64, 128)
    parts["replaced"].forward = lambda x: x  # as accelerate's hooks replace it
    parts["b"].weight = parts["a"].weight
    parts["fp8"].weight = torch.nn.Parameter(parts["wide"].weight.to(torch.float8_e4m3fn))
    parts["wide"].double()
    return torch.nn.ModuleDict(parts).eval()


def test_tied_ones_routers_and_what_cannot_be_replaced_stay_and_the_model_runs():
    model, chosen, asked = zoo(), zoo(), []
    report = quantize(model)
    assert report == ["fits", "mlp.gate"]
    assert model["again"] is model["fits"] and isinstance(model["fits"], W4A8Linear)
    assert report.skipped == {
        **dict.fromkeys(("gate", "router", "shared_expert_gate"), "router"),
        **dict.fromkeys(("a", "b"), "shares its weight with another module"),
        "own": "Scaled has a forward of its own",
        "replaced": "its forward was replaced, as accelerate's hooks do",
        "odd": "expected out_features a multiple of 8 and in_features a multiple of 16, got 10 and 64",
        "wide": "expected a weight of bfloat16, float16 or float32, got float64",
        "fp8": "expected a weight of bfloat16, float16 or float32, got float8_e4m3fn",
        "attention.out_proj": "MultiheadAttention reads this weight itself",
        "encoder.self_attn.out_proj": "MultiheadAttention reads this weight itself",
        "encoder.linear1": "TransformerEncoderLayer reads this weight itself",
        "encoder.linear2": "TransformerEncoderLayer reads this weight itself",
    }
    x = torch.randn(2, 5, 64)
    with torch.inference_mode():  # the encoder's fused path
        assert model["fits"](model["encoder"](x)).isfinite().all()
        assert model["attention"](x, x, x)[0].isfinite().all()
    assert quantize(zoo(), lambda name, _: asked.append(name) or name == "router") == ["router"]
    irreplaceable = {name for name, why in report.skipped.items() if "itself" in why or "forward" in why}
    assert {"fits", "mlp.gate", "router"} <= {*asked} and irreplaceable.isdisjoint(asked)
    with pytest.raises(ValueError, match="wide: expected a weight of bfloat16, float16 or float32, got float64"):
        quantize(chosen, lambda name, _: name in ("fits", "wide"))
    assert quantised_names(chosen) == []


def weight_norm(linear: torch.nn.Linear) -> torch.nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(linear)


@pytest.mark.parametrize("norm", [weight_norm, torch.nn.utils.parametrizations.weight_norm])
def test_parametrised_linears_are_quantised_and_loaded(norm):
    linear = torch.nn.Linear(64, 32)
    model = torch.nn.Sequential(norm(linear))
    expected = W4A8Linear.from_linear(linear, clip_steps=0, group_size=32, symmetric=False)
    assert quantize(model) == ["0"] and same_state(model[0], expected)
    tensors, dense = checkpoint_tensors(Model())
    model = Model()
    norm(model.blocks[0].up)
    assert load_(model, opened(tensors)) == BLOCKS
    assert torch.equal(model.blocks[0].up.weight.dequantize(), dense["blocks.0.up.weight"])


def test_forward_hooks_go_to_the_layer():
    model, seen = torch.nn.Sequential(torch.nn.Linear(64, 32)), []
    before = model[0].register_forward_pre_hook(lambda module, args: seen.append(type(module)))
    after = model[0].register_forward_hook(lambda module, args, options, out: seen.append(out), with_kwargs=True)
    quantize(model)
    out = model(torch.randn(2, 64))
    for handle in (before, after):
        handle.remove()
    model(torch.randn(2, 64))
    assert seen[0] is W4A8Linear and seen[1] is out and len(seen) == 2


class Conv1D(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, 64))


def test_nothing_to_convert_is_a_warning_that_says_why():
    with pytest.warns(UserWarning, match="(?s)no layer: the model holds no torch.nn.Linear.*1 Conv1D, which is no"):
        assert quantize(torch.nn.Sequential(Conv1D())) == []
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    quantize(model)
    with pytest.warns(UserWarning, match="is a W4A8Linear already: 0"):  # and the model has no parameter
        assert quantize(model) == []


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 64, 32))


def test_the_report_is_a_list_and_prints_as_a_summary():
    report = quantize(Model())
    assert isinstance(report, list) and list(report) == BLOCKS
    largest = ", ".join(f"{name} {report.errors[name]:.2%}" for name in report.worst[:3])
    for part in ("4 (blocks.0.up, ", "2\n", ": odd\n", ": lm_head\n", f": {largest}\n", "calibration=batches"):
        assert part in str(report)


def test_choosing_walks_the_model_a_fixed_number_of_times():
    walks = []

    class Watched(torch.nn.ModuleList):
        def named_modules(self, *args, **kwargs):
            walks.append(len(self))
            return super().named_modules(*args, **kwargs)

    for count in (2, 40):
        with pytest.warns(UserWarning, match="converted no layer"):
            quantize(Watched(torch.nn.Linear(10, 10) for _ in range(count)))
    assert walks.count(2) == walks.count(40) > 0


def test_every_original_is_freed_before_the_next_is_quantised(monkeypatch):
    model, alive = Model(), []
    originals = [weakref.ref(model.get_submodule(name).weight) for name in BLOCKS]
    plain = W4A8Linear.by_recipe.__func__

    def watched(cls, linear, *options, **more):
        alive.append(sum(ref() is not None for ref in originals))
        return plain(cls, linear, *options, **more)

    monkeypatch.setattr(W4A8Linear, "by_recipe", classmethod(watched))
    gc.disable()
    try:
        quantize(model)
    finally:
        gc.enable()
    assert alive == [4, 3, 2, 1]
    assert all(ref() is None for ref in originals)


LOADS = {
    "loading": lambda: load_(Model(), opened(checkpoint_tensors(Model())[0])),
    "quantising": lambda: quantize(Model()),
}


@pytest.mark.parametrize("doing", LOADS)
def test_a_bar_names_the_layers_where_stderr_is_a_terminal_and_nothing_is_written_elsewhere(monkeypatch, capsys, doing):
    LOADS[doing]()
    assert capsys.readouterr() == ("", "")
    with on_a_terminal(monkeypatch) as screen:
        names = LOADS[doing]()
    assert capsys.readouterr().out == ""
    for text in (doing, f"{len(names)}/{len(names)}", names[-1]):
        assert text in screen()


# ---- load_ -----------------------------------------------------------------------------------------------------------


def test_load_fills_a_model_from_a_checkpoint():
    tensors, dense = checkpoint_tensors(Model())
    model = Model()
    torch.nn.init.zeros_(model.embed.weight)
    assert load_(model, opened(tensors)) == BLOCKS == quantised_names(model)
    assert torch.equal(model.embed.weight, dense["embed.weight"]) and torch.equal(model.odd.bias, dense["odd.bias"])
    for name in BLOCKS:
        assert torch.equal(model.get_submodule(name).weight.dequantize(), dense[name + ".weight"])
        assert model.get_submodule(name).activation == "e4m3"
    assert torch.equal(model.blocks[0].up.bias, dense["blocks.0.up.bias"])


@pytest.mark.parametrize(
    "inputs, activation",
    [({}, "e4m3"), ({"num_bits": 16}, "e4m3"), ({"type": "int"}, "int8"),
     ({"type": "int", "symmetric": False}, "int8_affine")],
)  # fmt: skip
def test_the_checkpoint_says_which_activations(inputs, activation):
    tensors, _ = checkpoint_tensors(Model())
    for asked in (None, "int8_affine"):
        source = opened(tensors, **inputs)
        layer = W4A8Linear.from_checkpoint(source, "blocks.0.up", activation=asked, device="cpu")
        assert layer.activation == (asked or activation) and layer.input_scale is None
    assert W4A8Linear.from_checkpoint(tensors, "blocks.0.up", device="cpu").activation == "e4m3"  # without a config


def test_a_static_scale_comes_from_the_checkpoint_unless_the_activations_are_others():
    tensors, _ = checkpoint_tensors(Model())
    tensors["blocks.0.up.input_scale"] = torch.tensor([0.5], dtype=torch.bfloat16)
    source = opened(tensors, strategy="tensor", dynamic=False)
    layer = W4A8Linear.from_checkpoint(source, "blocks.0.up", device="cpu")
    assert layer.input_scale.tolist() == [0.5]
    assert W4A8Linear.from_checkpoint(source, "blocks.0.up", activation="int8", device="cpu").input_scale is None
    with pytest.raises(ValueError, match="input_scale: expected the static scale that the config names, found"):
        W4A8Linear.from_checkpoint(source, "blocks.0.down", device="cpu")


@pytest.mark.parametrize(
    "inputs, text",
    [
        ({"strategy": "tensor", "dynamic": True}, "got dynamic ones per tensor"),
        ({"strategy": "group", "dynamic": True}, "got dynamic ones per group"),
        ({"strategy": "token", "dynamic": False}, "got static ones per token"),
        ({"num_bits": 12}, "expected num_bits 8, got 12"),
        ({"strategy": "tensor", "dynamic": False, "symmetric": False}, "expected static scales to be symmetric"),
    ],
)
def test_activations_that_the_layer_lacks_are_refused_unless_replaced(inputs, text):
    scheme = config(**inputs)["config_groups"]["group_0"]
    given = Inputs.of(scheme["input_activations"])
    with pytest.raises(ValueError, match=f"input_activations: .*{text}"):
        activations(given, None)
    assert activations(given, "int8") == ("int8", False)


def test_what_was_saved_of_a_quantised_model_loads_into_a_plain_one(tmp_path):
    model = Model()
    quantize(model, activation="int8", group_size=32)
    save_model(model, str(tmp_path / "model.safetensors"))
    other = Model()
    assert load_(other, tmp_path) == BLOCKS
    with torch.no_grad():
        assert builders.same_bits(other(IDS)[0], model(IDS)[0])
    third = Model()
    quantize(third, activation="int8", group_size=32)
    load_model(third, str(tmp_path / "model.safetensors"))
    assert same_state(third, model)
    with pytest.raises(ValueError, match="activation: expected int8, as the layer was saved, got e4m3 .layer"):
        load_(Model(), tmp_path, activation="e4m3")


def test_tied_weights_need_to_be_stored_once():
    tensors, dense = checkpoint_tensors(Model(tied=True))
    del tensors["lm_head.weight"]
    model = Model(tied=True)
    load_(model, opened(tensors))
    assert model.lm_head.weight is model.embed.weight and torch.equal(model.embed.weight, dense["embed.weight"])
    untied = Model()
    before = untied.lm_head.weight.clone()
    with pytest.warns(UserWarning, match="1 tensors are not in the checkpoint.*keep what the model.*lm_head.weight"):
        report = load_(untied, opened(tensors), allow_missing=["lm_head.*"])
    assert report == BLOCKS and set(report.kept) == {"lm_head.weight"} and "not filled: 1" in str(report)
    assert torch.equal(untied.lm_head.weight, before)


# ---- load_: what is missing, and what has no place -------------------------------------------------------------------


OF_FLOATS = "of a quantised layer, where the file has the weight in floats"
OF_NOBODY = [
    ({}, {"blocks.0.attn.k_scale": "KV cache", "blocks.0.attn.v_scale": "KV cache"}),
    ({}, {"blocks.0.rotary_emb.inv_freq": "", "blocks.61.up.weight": "the model lists it as ignorable"}),
    ({}, dict.fromkeys(("odd.g_idx", "odd.input_scale", "odd.input_zero_point"), OF_FLOATS)),
    ({}, {"odd.output_scale": ""}),
    *((inputs, {"blocks.0.up.input_scale": "static input scale", "blocks.0.up.output_scale": "outputs, not quantised"})
      for inputs in ({"dynamic": True}, {"num_bits": 16})),
]  # fmt: skip
"""Of inputs as the config has them: what files hold besides, and why nobody needs it."""


@pytest.mark.parametrize("inputs, extra", OF_NOBODY, ids=str)
def test_what_nobody_misses_is_ignored_and_reported(inputs, extra):
    tensors, _ = checkpoint_tensors(Model())
    model, plain = Model(), Model()
    model.blocks[0]._keys_to_ignore_on_load_unexpected = [r"blocks\.61\."]
    report = load_(model, opened(tensors | {name: torch.ones(1) for name in extra}, **inputs))
    load_(plain, opened(tensors, **inputs))
    assert report == BLOCKS and report.ignored.keys() == extra.keys() and same_state(model, plain)
    assert all(why in report.ignored[name] for name, why in extra.items())
    report = load_(Model(), opened(tensors | {"other": torch.zeros(1)}), strict=False)
    assert report == BLOCKS and report.ignored == {"other": "the model has no place for it"}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "name, left", [("blocks.1.down.bias", ""), ("blocks.1.down.bias", "down"), ("lm_head.bias", "")]
)
def test_a_bias_that_the_model_lacks_is_ignored_where_it_is_zero(name, left, strict):
    """Of a quantised layer, of one that is dequantised, and of one in floats."""
    tensors, _ = checkpoint_tensors(Model())
    bias, options = torch.zeros(64 if "down" in name else 48), {"strict": strict}
    options["filter"] = (lambda name, _: not name.endswith(left)) if left else None
    model, plain = Model(), Model()
    report = load_(model, opened(tensors | {name: bias}), **options)
    assert len(report) == (2 if left else 4) and report.ignored == {name: "a bias of zeros, where the model has none"}
    load_(plain, opened(tensors), **options)
    assert same_state(model, plain)
    for value in (0.25, torch.nan):
        bias[7] = value
        untouched, fresh = Model(), Model()
        with pytest.raises(ValueError, match=rf"{name}: expected no bias, as the model has it, or zeros, got {value}"):
            load_(fresh, opened(tensors | {name: bias}), **options)
        assert same_state(fresh, untouched)


def test_the_cause_of_what_is_missing_is_told():
    """A layer's experts in one parameter, and a method of the config that is not read."""
    model = torch.nn.ModuleDict({"experts": Experts(), "linear": torch.nn.Linear(64, 32, bias=False)})
    layer = {f"linear.{suffix}": tensor for suffix, tensor in stored(torch.randn(32, 64))[0].items()}
    each = {f"experts.{i}.gate_proj.weight": torch.zeros(64, 32) for i in range(4)}
    packed = {f"experts.gate_up_proj_{what}": torch.zeros(4, 4) for what in ("blocks", "scales")}
    codes = {f"linear.weight.{what}": torch.zeros(4) for what in ("codes", "codebooks")}
    for source, cause in (
        (opened(layer | each), "experts.gate_up_proj.*stacks a layer's experts in one parameter"),
        (opened(layer | packed), "experts.gate_up_proj; found no place for experts"),
        (
            Checkpoint(codes, {"quant_method": "aqlm"}),
            ".*linear.weight.*;.* the config says quant_method 'aqlm', and no",
        ),
    ):
        with pytest.raises(ValueError, match=f"found none for {cause}"):
            load_(model, source, strict=False)


def test_a_checkpoint_without_quantised_layers_is_a_warning():
    model = Model()
    with pytest.warns(UserWarning, match="load_ converted no layer: of the tensors given, its Linears are not"):
        assert load_(model, {name: x.clone() for name, x in Model().state_dict().items()}) == []


# ---- load_: into what, and what a failure leaves ---------------------------------------------------------------------


def test_w4a8linears_are_loaded_again():
    a, b = Model(), Model()
    torch.nn.init.normal_(b.blocks[0].up.weight)
    quantize(a), quantize(b)
    a.blocks[0].up.batch_invariant = True
    assert not same_state(a, b)
    assert load_(a, b.state_dict()) == BLOCKS
    assert same_state(a, b) and a.blocks[0].up.batch_invariant


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def broken_files() -> dict[str, tuple[Checkpoint, str]]:
    """What is wrong: the file, and what the error says."""
    tensors, _ = checkpoint_tensors(Model())
    last, renamed = "blocks.1.down", {f"net.{name}": tensor for name, tensor in tensors.items()}
    return {
        "missing scale": (opened(without(tensors, last + ".weight_scale")), last),
        "scale of another shape": (opened(tensors | {last + ".weight_scale": torch.ones(3, 1)}), last),
        "8 bits": (Checkpoint(tensors, config(bits=8)), "blocks.0.up"),
        "activations": (opened(tensors, strategy="tensor"), "blocks.0.up"),
        "static scale": (opened(tensors, strategy="tensor", dynamic=False), "blocks.0.up"),
        "sizes": (
            opened(tensors | {last + ".weight": torch.zeros(64, 64, dtype=torch.int8)}),
            f"{last}: expected k, n = (96, 64), got (64, 64)",
        ),
        "bias": (opened(tensors | {last + ".bias": torch.ones(64)}), f"{last}.bias: expected no bias"),
        "missing bias": (opened(without(tensors, "blocks.0.up.bias")), "blocks.0.up: expected a bias, as the model has"),
        "missing layer": (
            opened(without(tensors, last + ".weight", last + ".weight_scale")), f"found none for {last}.weight",
        ),
        "missing tensor": (opened(without(tensors, "odd.bias")), "found none for odd.bias"),
        "missing head": (opened(without(tensors, "lm_head.weight")), "expected the model's tensors, found none for lm_head.weight"),
        "other names": (opened(renamed), "the file calls embed.weight net.embed.weight"),
        "uncompressed": (opened(tensors | {"odd.weight_scale": torch.ones(10, 1)}), "odd.weight_scale is of a layer"),
        "no place": (opened(tensors | {"other": torch.zeros(1)}), "found no place for other; strict=False ignores"),
        "shape": (opened(tensors | {"odd.weight": torch.zeros(10, 32)}), "odd.weight: expected shape [10, 64], got [10, 32]"),
        "dtype": (opened(tensors | {"odd.bias": torch.zeros(10, dtype=torch.int64)}), "odd.bias: expected torch.float32"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", broken_files())
def test_what_headers_show_to_be_wrong_leaves_the_model_as_it_was(kind):
    model, untouched = Model(), Model()
    torch.nn.init.zeros_(model.embed.weight)
    torch.nn.init.zeros_(untouched.embed.weight)
    source, message = broken_files()[kind]
    for strict in (True, False)[: 1 if kind in ("no place", "uncompressed") else 2]:
        with pytest.raises(ValueError, match=re.escape(message)):
            load_(model, source, strict=strict)
    assert same_state(model, untouched)


def test_a_load_that_failed_can_be_repeated():
    tensors, _ = checkpoint_tensors(Model())
    model, expected = Model(), Model()
    broken = tensors["blocks.1.down.weight_scale"].clone()
    broken[3] = torch.nan
    with pytest.raises(ValueError, match=r"scale: expected finite numbers, got nan at \[3, 0\] .*'blocks\.1\.down'"):
        load_(model, opened(tensors | {"blocks.1.down.weight_scale": broken}))
    assert quantised_names(model) == BLOCKS[:3]
    load_(model, opened(tensors))
    load_(expected, opened(tensors))
    assert same_state(model, expected)
    model.blocks[0].up.row_sum[5] = torch.nan
    with pytest.raises(ValueError, match=r"row_sum: expected finite numbers.*layer 'blocks\.0\.up'"):
        load_(Model(), model.state_dict())


# ---- load_: what stays a Linear --------------------------------------------------------------------------------------


class Router(torch.nn.Module):
    """A mixture's router, as transformers 5 has it: a matrix and, as in DeepSeek, a correction of its own."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 64))
        self.register_buffer("e_score_correction_bias", torch.zeros(8))


class Zoo(torch.nn.Module):
    """Quantised modules that no W4A8Linear can stand for, one with a weight of the file's own type, and one that fits."""

    def __init__(self):
        super().__init__()
        self.embedding, self.gate = torch.nn.Embedding(48, 64), Router()
        self.own = Scaled(64, 32, bias=False)
        self.dt_proj = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        self.odd = torch.nn.Linear(64, 12)
        self.unwanted, self.fits = (torch.nn.Linear(64, 32, bias=False) for _ in range(2))
        self.table = torch.nn.Module()
        self.table.weight = torch.nn.Parameter(torch.zeros(8, 64, dtype=torch.int8), requires_grad=False)


def test_quantised_modules_that_cannot_be_converted_are_dequantised():
    model = Zoo()
    names = ("embedding", "gate", "own", "dt_proj", "odd", "unwanted", "fits")
    tensors, dense = checkpoint_tensors(model, *names)
    tensors |= {"table.weight": torch.ones(8, 64, dtype=torch.int8), "gate.e_score_correction_bias": torch.arange(8.0)}
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.warns(UserWarning, match="(?s)load_: 5 quantised layers are dequantised.*an Embedding: embedding"):
        report = load_(model, opened(tensors), filter=lambda name, _: name != "unwanted")
    assert report == ["fits"]
    assert report.skipped == {
        "embedding": "dequantised: an Embedding",
        "gate": "dequantised: Router, which is no torch.nn.Linear",
        "own": "dequantised: Scaled has a forward of its own",
        "dt_proj": "dequantised: Zoo reads this weight itself",
        "odd": "dequantised: n is no multiple of 8, k none of 16 or the group size none of 32",
        "unwanted": "dequantised: left out by the filter",
    }
    for name in names[:-1]:
        weight = model.get_submodule(name).weight
        assert torch.equal(weight, dense[name + ".weight"].to(weight.dtype))
    for name in ("odd.bias", "table.weight", "gate.e_score_correction_bias"):
        assert torch.equal(model.state_dict()[name], tensors[name])
    wide = {f"gate.{suffix}": x for suffix, x in stored(torch.randn(16, 64))[0].items()}
    for change, message in (
        (tensors | wide, r"gate: expected k, n = \(64, 8\), got \(64, 16\)"),
        (without(tensors, "gate.weight", "gate.weight_scale"), "found none for gate.weight"),
    ):
        with pytest.raises(ValueError, match=message):
            load_(Zoo(), opened(change))


def test_groups_that_cannot_be_packed_are_dequantised():
    q, scale = torch.randint(-8, 8, (32, 96), dtype=torch.int8), torch.rand(32, 2) + 0.5
    said = config()
    said["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": 48}
    model = torch.nn.Sequential(torch.nn.Linear(96, 32, bias=False))
    with pytest.warns(UserWarning, match="the group size none of 32: 0"):
        load_(model, {"0.weight": q, "0.weight_scale": scale}, config=said)
    assert torch.equal(model[0].weight, q * scale.repeat_interleave(48, 1))


def test_a_layer_of_ours_is_dequantised_in_the_order_of_its_input():
    source = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    quantize(source)
    weight = source[0].weight
    order = torch.randperm(64)
    state = source.state_dict() | {"0.permutation": order.int()}
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    with pytest.warns(UserWarning, match="left out by the filter"):
        load_(model, state, filter=lambda *_: False)
    assert torch.equal(model[0].weight[:, order], weight.dequantize())


def test_layers_of_other_widths_are_named_and_left_to_a_filter():
    """4-bit `up`, 2-bit `down`."""
    tensors, _ = checkpoint_tensors(Model())
    four, two = (config(bits=bits)["config_groups"]["group_0"] for bits in (4, 2))
    said = config() | {"config_groups": {"a": four | {"targets": ["re:.*up"]}, "b": two | {"targets": ["re:.*down"]}}}
    with pytest.raises(ValueError, match=r"num_bits 4 or 8.*got 2.*blocks\.0\.down.*2 layers cannot be"):
        load_(Model(), tensors, config=said)
    chosen, model = {"config": said, "filter": lambda name, _: name.endswith("up")}, Model()
    with pytest.raises(ValueError, match="found none for blocks.0.down.weight.*left out by the filter, and cannot be"):
        load_(Model(), tensors, **chosen)
    before = model.blocks[0].down.weight.clone()
    with pytest.warns(UserWarning, match="2 tensors are not in the checkpoint.*blocks.0.down.weight"):
        report = load_(model, tensors, **chosen, allow_missing=["blocks.*.down.weight"])
    assert report == ["blocks.0.up", "blocks.1.up"] and list(report.skipped) == ["blocks.0.down", "blocks.1.down"]
    assert torch.equal(model.blocks[0].down.weight, before)


def test_config_and_format_are_those_of_load():
    tensors, _ = checkpoint_tensors(Model())
    assert load_(Model(), tensors, config=config(type="int")) == BLOCKS
    model = Model()
    assert load_(model, tensors, config=config(type="int"), format="compressed-tensors") == BLOCKS
    assert model.blocks[0].up.activation == "int8"
    with pytest.raises(ValueError, match="config: expected None with an open Checkpoint"):
        load_(Model(), opened(tensors), config=config())
    with pytest.raises(ValueError, match="activation: expected one of e4m3, int8, int8_affine, e4m3_block, int8_block"):
        load_(Model(), opened(tensors), activation="fp8")


# ---- load_: tied tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("same", [True, False])
def test_tied_tensors_stay_tied_only_where_the_file_has_them_equal(device, same):
    tensors, _ = checkpoint_tensors(Model())
    if same:
        tensors["lm_head.weight"] = tensors["embed.weight"].clone()
    with torch.device(device):
        model = Model(tied=True)
    load_(model, opened(tensors), device="cpu")
    assert torch.equal(model.embed.weight, tensors["embed.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert (model.lm_head.weight is model.embed.weight) == same


def test_one_module_at_two_places_cannot_hold_two_tensors():
    shared = torch.nn.Embedding(8, 8)
    model = torch.nn.ModuleDict({"a": shared, "b": shared, "linear": torch.nn.Linear(64, 32, bias=False)})
    layer = {f"linear.{suffix}": tensor for suffix, tensor in stored(torch.randn(32, 64))[0].items()}
    with pytest.raises(ValueError, match="expected a.weight and b.weight to be equal, as one module"):
        load_(model, opened(layer | {"a.weight": torch.zeros(8, 8), "b.weight": torch.ones(8, 8)}))


def test_a_quantised_head_leaves_the_tied_embedding_as_the_file_has_it():
    tensors, dense = checkpoint_tensors(Model(), *BLOCKS, "lm_head")
    model = Model(tied=True)
    assert load_(model, opened(tensors)) == [*BLOCKS, "lm_head"]
    assert torch.equal(model.embed.weight, dense["embed.weight"])
    assert torch.equal(model.lm_head.weight.dequantize(), dense["lm_head.weight"])


# ---- load_: activations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [None, {"quant_method": "torchao"}])
def test_torchaos_subclasses_in_a_state_dict_are_quantised_weights(said):
    """Of 8da4w, and of weights alone."""
    quantization = pytest.importorskip("torchao.quantization")
    group = quantization.PerGroup(128)
    eight_by_four = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=group
    )
    alone = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)
    for kind, activation in ((eight_by_four, "int8_affine"), (alone, "e4m3")):
        net = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16))
        quantization.quantize_(net, kind)
        for device in ("cpu", "meta"):
            with torch.device(device):
                model = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16))
            assert load_(model, net.state_dict(), config=said, device="cpu") == ["0"]
            assert torch.equal(model[0].weight.dequantize().bfloat16(), net[0].weight.dequantize())
            assert model[0].activation == activation
