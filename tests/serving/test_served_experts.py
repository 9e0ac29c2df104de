"""Experts of both engines through their loaders, on every rank, against the files' weights and the dequantised mixture."""

from __future__ import annotations

from importlib import import_module

import gpt_oss_experts
import pytest
import torch
import vllm_layers
from builders import third
from checkpoints import words
from engines import ENGINES, EXPERTS, SPLITS, each_engine, in_turn, process, sglang, vllm
from served_layers import (
    BF16,
    CONFIGS,
    SHARDS,
    WIDE,
    assert_held,
    assert_mixture,
    expert_tensors,
    mixture,
    routed,
    scheme,
)

from jitgemm.activations.scheme import Gate

OF_EXPERTS = [name for name in CONFIGS if name not in ("qserve-128", "qserve-channel", "rotated")]
OF_ONE = [name for name in OF_EXPERTS if name != "torchao-tiles"]  # whose headers tell one expert from several
WIDER = ("fp8-blocks", "torchao", "torchao-tiles")
"""Whose experts ranks cut into parts of 128 columns."""


@pytest.mark.parametrize(
    "way, name, split", third([(e, known) for e in ENGINES for known in (True, False)], OF_EXPERTS, SPLITS)
)
def test_experts_of_all_ranks_hold_the_files_weights_and_add_up_to_the_mixture(way, name, split):
    engine, known = way
    known |= name not in OF_ONE
    inter = 256 if name in WIDER else 64
    tensors, dense = expert_tensors(CONFIGS[name], 4, 64, inter)
    layers = []
    files = {f"{EXPERTS}.{e}.{proj}": each for (e, proj), each in tensors.items()} if known else {}
    for at in SPLITS[split]:
        layer = engine.experts(engine.told(CONFIGS[name], files), (4, 64, inter), tensors, at, packed=False)
        assert ("jitgemm" in layer._modules) == known
        with engine.rank():
            process(layer)
        layers.append(layer)
    assert not list(layer.parameters())
    assert_held(modules := [layer.jitgemm for layer in layers], dense, split)
    of_blocks = ("fp8-blocks", "fp8-blocks-32", "mxfp4-mxfp8", "deepseek-v4", "mxfp8", "mxfp8-blocks", "modelopt-mxfp8")
    assert (modules[0].activation == "e4m3_block") == (name in of_blocks)
    assert_mixture(engine, layers, dense)


THROUGH = WIDE | {"w4afp8": CONFIGS["w4afp8"] | {"group_size": 128}}
CUTS = [(name, 384, size) for name in THROUGH for size in (2, 4)] + [("fp8-blocks", 320, 2)]


@pytest.mark.parametrize("engine, cut", in_turn(*CUTS))
@pytest.mark.filterwarnings("ignore:tp_size")
def test_experts_are_cut_through_their_groups(engine, cut):
    """w2 along its columns; of blocks w13 along its rows, too."""
    name, inter, size = cut
    tensors, dense = expert_tensors(THROUGH[name], 2, 128, inter)
    places = [("tp", number, size) for number in range(size)]
    assert_held([engine.experts(THROUGH[name], (2, 128, inter), tensors, at).jitgemm for at in places], dense, "tp")


@pytest.mark.parametrize("engine, name", in_turn("packed-channel", "fp8", "int8-quantized", "modelopt-channel"))
def test_experts_of_sizes_in_multiples_of_16(engine, name):
    tensors, dense = expert_tensors(CONFIGS[name], 4, 48, 80)
    assert_mixture(engine, [engine.experts(CONFIGS[name], (4, 48, 80), tensors)], dense)


@each_engine
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_experts_that_are_packed_together_hold_what_each_of_them_does(monkeypatch, engine, at_once):
    """AWQ's experts of two ranks, of which some have zero points that make their codes signed."""
    monkeypatch.setattr("jitgemm.serving.experts.AT_ONCE", at_once)
    tensors, dense = expert_tensors(CONFIGS["awq"], 6, 64, 64)
    for proj in SHARDS:
        q = tensors[4, proj]["scales"].T.double().repeat_interleave(32, 1)
        zero = words(torch.full((2, 64), 8), 1, order=(0, 2, 4, 6, 1, 3, 5, 7))
        tensors[4, proj]["qweight"] = words(torch.full((64, 64), 11), 1)
        tensors[4, proj]["qzeros"], dense[4, proj] = zero, 3 * q
    assert_held([engine.experts(CONFIGS["awq"], (6, 64, 64), tensors, at).jitgemm for at in SPLITS["ep"]], dense, "ep")


@pytest.mark.parametrize("engine, proj", in_turn(*SHARDS))
def test_experts_have_no_activation_order_in_any_of_their_layers(engine, proj):
    config = scheme(actorder="group")
    tensors, dense = expert_tensors(config, 2, 64, 64)
    for expert in tensors.values():
        expert["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)  # in order
    assert_held([engine.experts(config, (2, 64, 64), tensors).jitgemm], dense, "whole")
    tensors[1, proj]["weight_g_idx"] = (torch.arange(64) // 32)[torch.randperm(64)].to(torch.int32)
    with pytest.raises(ValueError, match="expert 1: expected columns in the input's order, got an activation order"):
        engine.experts(config, (2, 64, 64), tensors)


@pytest.mark.parametrize(
    "engine, case", in_turn(("gptq", "scales"), ("fp8", "weight_scale"), ("w4afp8", "weight_scale_inv"))
)
def test_an_expert_that_no_file_holds_is_an_error(engine, case):
    name, suffix = case
    tensors, _ = expert_tensors(CONFIGS[name], 3, 64, 64)
    del tensors[2, "up_proj"]
    with pytest.raises(ValueError, match=rf"w13_{suffix}\b.*: expected numbers for each .* 3 experts, .* for number 2"):
        engine.experts(CONFIGS[name], (3, 64, 64), tensors)


MAY_LACK = ("weight_shape", "g_idx", "input_scale", "activation_scale", "input_global_scale")
"""What experts can be read without."""


@pytest.mark.parametrize("engine, name", in_turn(*OF_ONE))
def test_a_tensor_of_one_expert_that_no_file_holds_is_an_error(engine, name):
    """Of one of its layers, on the rank that has the expert."""
    tensors, _ = expert_tensors(CONFIGS[name], 4, 128, 128)
    for number, suffix in enumerate(tensors[3, "up_proj"]):
        proj = list(SHARDS)[number % 3]
        part = "w2" if proj == "down_proj" else "w13"
        lacks = tensors | {(3, proj): {each: tensor for each, tensor in tensors[3, proj].items() if each != suffix}}
        engine.experts(CONFIGS[name], (4, 128, 128), lacks, ("ep", 0, 2))
        if suffix in MAY_LACK:
            engine.experts(CONFIGS[name], (4, 128, 128), lacks, ("ep", 1, 2))
        else:
            with pytest.raises(ValueError, match=f"^{part}_{suffix}: expected .* for number 3's {proj}"):
                engine.experts(CONFIGS[name], (4, 128, 128), lacks, ("ep", 1, 2))


@each_engine
@pytest.mark.parametrize("name, at_once", [("fp8", 1), ("packed-static", 1 << 20)])
def test_static_input_scales_of_experts_may_be_anything(monkeypatch, engine, name, at_once):
    """Calibration that no token of an expert came by leaves 0, or none."""
    monkeypatch.setattr("jitgemm.serving.experts.AT_ONCE", at_once)
    tensors, dense = expert_tensors(CONFIGS[name], 3, 64, 64)
    tensors[1, "up_proj"]["input_scale"].zero_()
    del tensors[2, "down_proj"]["input_scale"]
    assert_held([engine.experts(CONFIGS[name], (3, 64, 64), tensors).jitgemm], dense, "whole")


@each_engine
@pytest.mark.parametrize("split", SPLITS)
def test_experts_in_floats_are_quantised_while_they_are_loaded(engine, split):
    tensors = {(e, proj): {"weight": torch.randn(64, 64, dtype=BF16) / 8} for e in range(4) for proj in SHARDS}
    layers = [engine.experts(engine.config(None, group_size=32), (4, 64, 64), tensors, at) for at in SPLITS[split]]
    assert_mixture(engine, layers, {name: found["weight"].double() for name, found in tensors.items()}, 0.25)


@each_engine
def test_a_router_weight_on_the_input_is_applied_once(engine):
    tensors, dense = expert_tensors(CONFIGS["packed"], 2, 64, 64)
    layer = engine.experts(CONFIGS["packed"], (2, 64, 64), tensors, apply_router_weight_on_input=True, top_k=1)
    x, ids, weights = routed(2, top_k=1)
    expected = mixture(x * weights.to(BF16), ids, torch.ones_like(weights), dense)
    assert (engine.run_experts(layer, x, ids, weights).double() - expected).norm() < 0.06 * expected.norm()


@each_engine
@pytest.mark.parametrize("what", ["biases", "another gate"])
def test_experts_that_jitgemm_has_no_kernel_for_stay_in_their_type(monkeypatch, engine, what):
    if engine is vllm and vllm_layers.REAL:  # which looks for kernels of a GPU
        owner = import_module(
            import_module("vllm.model_executor.layers.fused_moe").UnquantizedFusedMoEMethod.__module__
        )
        monkeypatch.setattr(owner, "select_unquantized_moe_backend", lambda moe_config: (None, None))
    other = {"activation": "relu2"} | ({"is_gated": True} if engine is sglang else {})
    layer = engine.experts(None, (2, 64, 64), packed=False, **(engine.biased if what == "biases" else other))
    assert not isinstance(layer.quant_method, engine.Experts)


# ---- gates -----------------------------------------------------------------------------------------------------------

GATES = {
    "swiglu_step": (Gate("swiglu_step", limit=7.0), {"activation": "swiglu_step", "limit": 7.0}),
    "situ": (Gate("situ", limit=25.0, alpha=4.0), {"activation": "situ", "alpha": 4.0, "limit": 25.0}),
    "relu2": (Gate("relu2"), {"activation": "relu2"}),
}
"""The gate, and the call's options."""


@pytest.mark.parametrize("engine, name, form, split", third(ENGINES, GATES, ["packed", "fp8", "fp8-blocks"], SPLITS))
def test_experts_with_other_gates_or_none_add_up_to_the_dequantised_mixture(engine, name, form, split):
    gate, options = GATES[name]
    tensors, dense = expert_tensors(CONFIGS[form], 4, 64, 256)
    if gate.inputs == 1:  # the files have up and down; the engines' loaders call up w1
        tensors, dense = ({at: each for at, each in found.items() if at[1] != "up_proj"} for found in (tensors, dense))
    layers = [engine.experts(CONFIGS[form], (4, 64, 256), tensors, at, **engine.gates[name]) for at in SPLITS[split]]
    assert all(layer.jitgemm.gate == gate for layer in layers)
    assert_held([layer.jitgemm for layer in layers], dense, split)
    assert_mixture(engine, layers, dense, options=options)


@each_engine
def test_an_expert_without_gates_that_no_file_holds_is_named(engine):
    tensors, _ = expert_tensors(CONFIGS["packed"], 2, 64, 64)
    tensors = {at: tensor for at, tensor in tensors.items() if at[1] != "up_proj" and at != (1, "gate_proj")}
    with pytest.raises(ValueError, match="found none in the files for number 1's up_proj"):
        engine.experts(CONFIGS["packed"], (2, 64, 64), tensors, **engine.gates["relu2"])


# ---- gpt-oss in its own format ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine, split, inter", [
    *((engine, split, 192) for engine in ENGINES for split in SPLITS),
    *((engine, "tp", 160) for engine in ENGINES if engine is sglang),
])  # fmt: skip
def test_gpt_oss_in_its_own_format(tmp_path, engine, split, inter):
    """Also where ranks have 96 and 64 of the 160 columns of w2, as SGLang's model cuts them."""
    whole, (x, ids, weights) = gpt_oss_experts.Layer(engine.bias, inter), gpt_oss_experts.tokens()
    layers = [engine.gpt_oss_experts(tmp_path, whole, inter, at) for at in SPLITS[split]]
    modules = [layer.jitgemm for layer in layers]
    for module in modules:
        assert module.gate == Gate("swiglu_oai", "interleaved", 7.0, 1.702) and module.activation == "e4m3"
    assert not list(layers[0].parameters())
    whole.check(modules, split == "ep")
    expected = whole.by_hand(x, ids, weights)
    total = sum(engine.run_experts(layer, x, ids, weights).double() for layer in layers)
    assert (total - expected).norm() < 0.06 * expected.norm()


@each_engine
def test_what_gpt_oss_lacks_or_has_in_other_sizes_is_named(tmp_path, engine):
    whole = gpt_oss_experts.Layer(engine.bias)
    del whole.tensors[f"w13_{engine.bias}"]
    with pytest.raises(ValueError, match=f"w13_{engine.bias}: expected numbers for each of this rank's 4 experts"):
        engine.gpt_oss_experts(tmp_path, whole, 192)
    with pytest.raises(ValueError, match=r"w13_weight: expected n, k = \(384, 128\), got \(256, 128\)"):
        engine.gpt_oss_experts(tmp_path, gpt_oss_experts.Layer(engine.bias, 128), 192)
